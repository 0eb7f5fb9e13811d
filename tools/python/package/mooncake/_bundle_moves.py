"""Puts and gets of a bundle's payloads: which calls of a store move them."""

import copy
import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from mooncake._bundle_values import PoolArray, address_of, bytes_of
from mooncake._registrations import REGISTERED, Registrations

NOT_FOUND = -704
#: Gets of an object that exists and whose bytes do not come, before that is an error.
_TURNS = 3
#: Most bytes of one call for a batch, whose deadline it has to meet on a slow machine, too.
CALL_BYTES = 256 << 20
#: Several puts at a time pay from these sizes on.
PARALLEL_BYTES = 64 << 20
PARALLEL_CHUNKS = 8


def has(store, *names):
    """Returns true if a store has all of these calls."""
    return all(callable(getattr(store, name, None)) for name in names)


def check(code, call, key):
    """RuntimeError if a code is that of a failure."""
    if code not in (None, 0):
        raise RuntimeError(f"{call} failed for {key}: {code}")


class Configs:
    """Configurations of puts: a caller's names one group, which becomes that of each key of a bundle."""

    #: Attributes that a configuration without a copy constructor is copied by.
    _COPIED = (
        "replica_num", "nof_replica_num", "dfs_replica_num", "soft_pin_action", "soft_pin_ttl_ms", "with_soft_pin",
        "with_hard_pin", "preferred_segment", "preferred_segments", "preferred_nof_segments",
        "prefer_alloc_in_same_node", "data_type", "group_ids", "session_ids",
    )  # fmt: skip

    @staticmethod
    def group(config):
        """Returns the group that a configuration names: text, perhaps empty, or None. ValueError for several."""
        groups = getattr(config, "group_ids", None)
        if groups is None or isinstance(groups, str):
            return groups
        try:
            groups = list(groups)
        except TypeError:
            raise ValueError("config.group_ids must contain strings") from None
        if len(groups) > 1:
            raise ValueError(f"config.group_ids names {len(groups)} groups: all of a bundle is in one")
        if groups and not isinstance(groups[0], str):
            raise ValueError("config.group_ids must contain strings")
        return groups[0] if groups else None

    @classmethod
    def for_keys(cls, config, count):
        """Returns the configuration for a call with `count` keys."""
        groups = getattr(config, "group_ids", None)
        if groups is None or count <= 0:
            return config
        group = cls.group(config)
        if group is not None and count == 1 and not isinstance(groups, str):
            return config
        copied = cls.copied(config)
        copied.group_ids = None if group is None or (group == "" and count > 1) else [group] * count
        return copied

    @classmethod
    def of_group(cls, config, group):
        """Returns the configuration for objects of a group; ValueError if it names another one."""
        named = cls.group(config)
        if named and named != group:
            raise ValueError(f"config.group_ids conflicts with the group of the object: {named!r} is not {group!r}")
        if config is None:
            from mooncake.store import ReplicateConfig

            config = ReplicateConfig()
        else:
            config = cls.copied(config)
        config.group_ids = [group]
        return config

    @classmethod
    def copied(cls, config):
        """Returns a copy."""
        try:
            return copy.copy(config)
        except TypeError:
            made = type(config)()
        for name in cls._COPIED:
            if hasattr(config, name):
                value = getattr(config, name)
                setattr(made, name, list(value) if isinstance(value, list) else value)
        return made

    @classmethod
    def call(cls, put, keys, *arguments, config=None):
        """Calls a put for one key or a list of them, with the configuration if there is one."""
        config = cls.for_keys(config, len(keys) if isinstance(keys, list) else 1)
        return put(keys, *arguments) if config is None else put(keys, *arguments, config=config)


class Piece:
    """Part of an object that a get reads, and the place for it: `offset` in a destination."""

    __slots__ = ("key", "source", "size", "offset", "whole")

    def __init__(self, key, source, size, offset, whole):
        self.key = key
        self.source = source
        self.size = size
        self.offset = offset
        self.whole = whole


class Destination:
    """Memory of a get: an address with the object that keeps it."""

    __slots__ = ("address", "size", "owner", "registered")

    def __init__(self, address, size, owner, registered=False):
        self.address = address
        self.size = size
        self.owner = owner
        self.registered = registered

    @classmethod
    def of(cls, array):
        """Returns the memory of a contiguous array."""
        return cls(array.ctypes.data, array.nbytes, array)


class Moves:
    """Calls of one store that put and get the payloads of bundles."""

    def __init__(self, store, pool, concatenate):
        self._store = store
        self._pool = pool
        self._given = pool is not None
        self._registrations = Registrations.of(store)
        #: Held while the pool of this object's own is made or closed.
        self._lock = threading.Lock()
        #: Concatenation of arrays at an address: (arrays, address, bytes, start, count) -> bytes.
        self._concatenate = concatenate

    # --- puts ------------------------------------------------------------------------------------------------------

    def _resolve_buffer_group_put_mode(self, chunk_groups, transfer_policy):
        """Returns `batch` or `parallel` for chunks, each of one or more buffers."""
        if transfer_policy.put_mode != "auto":
            return transfer_policy.put_mode
        several = transfer_policy.max_inflight_put > 1 and len(chunk_groups) >= PARALLEL_CHUNKS
        total = sum(len(buffer) for group in chunk_groups for buffer in group) if several else 0
        return "parallel" if total >= PARALLEL_BYTES and several else "batch"

    def put(self, chunks, policy, config):
        """Puts chunks, pairs of key and memoryview."""
        chunks = [(key, view) for key, view in chunks if len(view)]
        if not chunks:
            return
        if policy.copy_mode == "zero_copy":
            self._put_registered(chunks, config)
        elif policy.copy_mode == "copy":
            self._put_each(chunks, policy, config)
        elif has(self._store, "put_batch") and policy.put_mode != "parallel":
            for some in _calls(chunks, lambda chunk: len(chunk[1])):
                keys, views = map(list, zip(*some))
                code = Configs.call(self._store.put_batch, keys, views, config=config)
                check(code, "put_batch", f"{len(keys)} objects")
        elif self._given and has(self._store, "batch_put_from"):
            self.put_staged([(key, [view]) for key, view in chunks], policy, config)
        else:
            self._put_each(chunks, policy, config)

    def _put_each(self, chunks, policy, config):
        def one(chunk):
            check(Configs.call(self._store.put, *chunk, config=config), "put", chunk[0])

        self._each(one, chunks, [[view] for _, view in chunks], policy)

    def _each(self, one, chunks, groups, policy):
        """Calls `one` for each chunk, several at a time if the policy says so. The first failure is raised when none
        is in progress any more."""
        if len(chunks) < 2 or self._resolve_buffer_group_put_mode(groups, policy) == "batch":
            for chunk in chunks:
                one(chunk)
            return
        with ThreadPoolExecutor(min(policy.max_inflight_put, len(chunks))) as threads:
            for done in [threads.submit(one, chunk) for chunk in chunks]:
                done.result()

    def _put_registered(self, chunks, config):
        if not has(self._store, "batch_put_from", "register_buffer", "unregister_buffer"):
            raise RuntimeError("this store has no zero-copy put: batch_put_from with register_buffer")
        places = [Destination(address_of(view), len(view), view.obj) for _, view in chunks]
        taken = self._registrations.take(_hulls(places))
        try:
            self._put_from([key for key, _ in chunks], places, config)
        finally:
            self._registrations.give(taken)

    def _put_from(self, keys, places, config):
        addresses, sizes = [place.address for place in places], [place.size for place in places]
        codes = Configs.call(self._store.batch_put_from, keys, addresses, sizes, config=config)
        if len(codes) != len(keys):
            raise RuntimeError(f"batch_put_from returned {len(codes)} codes for {len(keys)} keys")
        for key, code in zip(keys, codes):
            check(code, "batch_put_from", key)

    def put_staged(self, chunks, policy, config):
        """Puts chunks in several pieces, pairs of key and memoryviews: concatenated in the pool if there is one."""
        chunks = [(key, views) for key, views in chunks if sum(map(len, views))]
        if not chunks:
            return
        if policy.copy_mode == "zero_copy":
            raise RuntimeError("memory in several pieces has no zero-copy put")
        pool = None if policy.copy_mode == "copy" else self._staging()

        def one(chunk):
            key, views = chunk
            if pool is None:
                check(Configs.call(self._store.put, key, b"".join(views), config=config), "put", key)
                return
            self._put_lease(pool, key, sum(map(len, views)), lambda address, size: _join(views, address), config)

        self._each(one, chunks, [views for _, views in chunks], policy)

    def put_concatenated(self, chunks, policy, config):
        """Puts chunks of arrays, triples of key, list of arrays, and number of bytes."""
        pool = None if policy.copy_mode != "auto" else self._staging()
        if pool is None or self._concatenate is None:
            views = [(key, [bytes_of(array, "array") for array in arrays]) for key, arrays, _ in chunks]
            self.put_staged(views, policy, config)
            return

        def one(chunk):
            key, arrays, size = chunk
            fill = lambda address, size: self._concatenate(arrays, address, size, 0, len(arrays))
            self._put_lease(pool, key, size, fill, config)

        self._each(one, chunks, [[_Sized(size)] for _, _, size in chunks], policy)

    def _put_lease(self, pool, key, size, fill, config):
        lease = pool.acquire(size)
        try:
            written = fill(lease.ptr, size)
            if written != size:
                raise RuntimeError(f"native fast-copy wrote {written} of {size} bytes for {key}")
            self._put_from([key], [Destination(lease.ptr, size, lease)], config)
        finally:
            lease.release()

    def _staging(self):
        """Returns the pool for staging: the caller's, or one of this object's own for a store of this package."""
        if not has(self._store, "batch_put_from"):
            return None
        with self._lock:
            if self._pool is None:
                from mooncake.buffer_pool import BufferPool
                from mooncake.store import MooncakeDistributedStore

                if isinstance(self._store, MooncakeDistributedStore):
                    self._pool = BufferPool(self._store)
            return self._pool

    def close(self):
        """Closes the pool of this object's own, if there is one; RuntimeError during a put."""
        if self._given:
            return
        with self._lock:
            if self._pool is not None:
                self._pool.close()
                self._pool = None

    def check_there(self, keys):
        """RuntimeError if objects that were put are gone again: other objects of the same bundle have evicted them."""
        if not has(self._store, "batch_is_exist"):
            return
        gone = [key for key, code in zip(keys, self._store.batch_is_exist(keys)) if code == 0]
        if gone:
            raise RuntimeError(
                f"{len(gone)} of {len(keys)} objects of a bundle were evicted while it was put, for example {gone[0]}: the "
                "pool has no room for all of it"
            )

    def object(self, key, kind):
        """Returns an object's bytes. KeyError if there is none; RuntimeError if its owner does not answer: a get of the
        store returns no bytes in either case."""
        for _ in range(_TURNS):
            data = self._store.get(key)
            if data:
                return data
            if not self._is_there(key, kind):
                raise KeyError(f"no {kind} at {key}")
        raise RuntimeError(f"the {kind} at {key} exists, and its bytes did not come in {_TURNS} gets: try again")

    def _is_there(self, key, kind):
        """Returns true if there is an object; RuntimeError if that cannot be known. A store without `is_exist` says that
        by its gets."""
        if not has(self._store, "is_exist"):
            return False
        code = self._store.is_exist(key)
        if code < 0:
            raise RuntimeError(
                f"the {kind} at {key} cannot be read: the owner of the key does not answer (is_exist: {code}); it may "
                "exist: try again when the cluster is reachable"
            )
        return code > 0

    # --- tensors ---------------------------------------------------------------------------------------------------

    def takes_tensors(self, config):
        """Returns true if the store has a tensor call that takes such a configuration."""
        return has(self._store, "put_tensor" if config is None else "pub_tensor")

    def put_tensors(self, keys, tensors, config):
        """Puts tensors by the store's tensor calls."""
        batch = "batch_put_tensor" if config is None else "batch_pub_tensor"
        if len(keys) > 1 and has(self._store, batch):
            codes = Configs.call(getattr(self._store, batch), list(keys), list(tensors), config=config)
        else:
            batch = "put_tensor" if config is None else "pub_tensor"
            put = getattr(self._store, batch)
            codes = [Configs.call(put, key, tensor, config=config) for key, tensor in zip(keys, tensors)]
        for key, code in zip(keys, codes):
            check(code, batch, key)

    def put_tensor_object(self, key, source, config):
        """Puts registered memory with a tensor's header and bytes."""
        if config is None and has(self._store, "put_tensor_from"):
            check(self._store.put_tensor_from(key, source.ptr, source.size), "put_tensor_from", key)
        elif has(self._store, "put_from"):
            check(Configs.call(self._store.put_from, key, source.ptr, source.size, config=config), "put_from", key)
        else:
            raise RuntimeError("this store has no zero-copy put of a tensor: put_tensor_from or put_from")

    def get_tensors(self, keys):
        """Reads tensors by the store's tensor calls."""
        if not has(self._store, "get_tensor"):
            raise RuntimeError("the store does not support get_tensor, and a tensor was put by its tensor call")
        if len(keys) > 1 and has(self._store, "batch_get_tensor"):
            found = self._store.batch_get_tensor(list(keys))
        else:
            found = [self._store.get_tensor(key) for key in keys]
        for key, tensor in zip(keys, found):
            if tensor is None:
                there = self._is_there(key, "tensor")
                text = f"the tensor at {key} exists, and was not read: try again"
                raise RuntimeError(text) if there else KeyError(f"no tensor at {key}")
        return found

    # --- gets ------------------------------------------------------------------------------------------------------

    def leases(self, sizes, held):
        """Returns arrays of bytes over memory of the caller's pool, all at once; None for each without a pool, or without
        bytes. `held` are the leases that the call has already, and gets these. RuntimeError if the pool cannot have all of
        them at a time."""
        if not self._given or not any(sizes) or not has(self._store, "get_into_ranges"):
            return [None] * len(sizes)
        some = [size for size in sizes if size]
        if has(self._pool, "acquire_all"):
            leases = self._pool.acquire_all(some, held=list(held))
            held.update(leases)
        else:
            leases = [self._pool.acquire(size) for size in some]
        arrays = iter([PoolArray.over(lease, size) for lease, size in zip(leases, some)])
        return [next(arrays) if size else None for size in sizes]

    def get(self, reads, array=False, ranges=False):
        """Reads pieces: `reads` are pairs of destination and pieces; `array` if they are a single array's; `ranges` to
        read also whole objects as ranges.

        RuntimeError if a piece is missing or of another length: what was read by then is in the destinations.
        """
        reads = [(place, pieces) for place, pieces in reads if pieces]
        if not reads:
            return
        whole = all(piece.whole for _, pieces in reads for piece in pieces)
        one = array and len(reads) == 1 and len(reads[0][1]) == 1
        if not has(self._store, "register_buffer", "unregister_buffer"):
            call = self._get_each
        elif ranges and has(self._store, "get_into_ranges"):
            call = self._get_ranges
        elif whole and one and has(self._store, "get_into"):
            call = self._get_one
        elif whole and not (array and len(reads) == 1) and has(self._store, "batch_get_into"):
            call = self._get_whole
        elif has(self._store, "get_into_ranges"):
            call = self._get_ranges
        else:
            call = self._get_each
        if call == self._get_each:
            call(reads)
            return
        places = [place for place, _ in reads]
        try:
            self._with_registered(_hulls(places), call, reads)
        except _NotRegistered:
            # An array of which a part is registered cannot be registered as a whole.
            self._with_registered([_alone(place) for place in places if _is_to_register(place)], call, reads)

    def _with_registered(self, groups, call, reads):
        taken = self._registrations.take(groups)
        try:
            call(reads)
        finally:
            self._registrations.give(taken)

    def _get_one(self, reads):
        place, (piece,) = reads[0]
        _expect(self._store.get_into(piece.key, place.address + piece.offset, piece.size), piece, "get_into")

    def _get_whole(self, reads):
        pieces = [(place, piece) for place, some in reads for piece in some]
        for some in _calls(pieces, lambda pair: pair[1].size):
            self._get_batch(some)

    def _get_batch(self, pieces):
        keys = [piece.key for _, piece in pieces]
        addresses = [place.address + piece.offset for place, piece in pieces]
        codes = self._store.batch_get_into(keys, addresses, [piece.size for _, piece in pieces])
        _paired(codes, pieces, "batch_get_into")
        for (_, piece), code in zip(pieces, codes):
            _expect(code, piece, "batch_get_into")

    def _get_ranges(self, reads):
        columns = []
        for place, pieces in reads:
            by_key = {}
            for piece in pieces:
                by_key.setdefault(piece.key, []).append(piece)
            columns.append((place.address, by_key))
        some = [list(by_key.values()) for _, by_key in columns]
        codes = self._store.get_into_ranges(
            [address for address, _ in columns],
            [list(by_key) for _, by_key in columns],
            [[[piece.offset for piece in pieces] for pieces in lists] for lists in some],
            [[[piece.source for piece in pieces] for pieces in lists] for lists in some],
            [[[piece.size for piece in pieces] for pieces in lists] for lists in some],
        )
        _paired(codes, some, "get_into_ranges")
        for lists, answered in zip(some, codes):
            _paired(answered, lists, "get_into_ranges")
            for pieces, numbers in zip(lists, answered):
                _paired(numbers, pieces, "get_into_ranges")
                for piece, code in zip(pieces, numbers):
                    _expect(code, piece, "get_into_ranges")

    def _get_each(self, reads):
        """Reads whole objects, each once, and copies the pieces."""
        objects = {}
        for place, pieces in reads:
            for piece in pieces:
                if piece.key not in objects:
                    objects[piece.key] = self._store.get(piece.key)
                value = objects[piece.key]
                if len(value) < piece.source + piece.size or (piece.whole and len(value) != piece.size):
                    raise RuntimeError(f"get failed for {piece.key}: {len(value)} bytes")
                part = memoryview(value)[piece.source : piece.source + piece.size]
                ctypes.memmove(place.address + piece.offset, address_of(part), piece.size)

    # --- removal ---------------------------------------------------------------------------------------------------

    def remove(self, keys, strict):
        """Removes objects; those that are missing count as removed. With `strict`, RuntimeError if any stays."""
        keys = list(dict.fromkeys(keys))
        if keys and has(self._store, "batch_remove"):
            try:
                codes = self._store.batch_remove(keys, True)
                keys = [key for key, code in zip(keys, codes) if code not in (None, 0, NOT_FOUND)]
            except Exception:
                if strict:
                    raise
        stayed = []
        for key in keys:
            try:
                code = self._store.remove(key, True)
            except KeyError:
                continue
            except Exception:
                if strict:
                    raise
                continue
            if code not in (None, 0, NOT_FOUND):
                stayed.append((key, code))
        if stayed and strict:
            raise RuntimeError(f"{len(stayed)} objects were not removed, for example {stayed[0]}")


class _Sized:
    """A number of bytes, in the place of a buffer of that length."""

    def __init__(self, size):
        self._size = size

    def __len__(self):
        return self._size


def _calls(items, size):
    """Yields items in lists for one call each, by their bytes."""
    some, total = [], 0
    for item in items:
        if some and total + size(item) > CALL_BYTES:
            yield some
            some, total = [], 0
        some.append(item)
        total += size(item)
    if some:
        yield some


def _join(views, address):
    at = address
    for view in views:
        if len(view):
            ctypes.memmove(at, address_of(view), len(view))
            at += len(view)
    return at - address


class _NotRegistered(RuntimeError):
    """A get was refused because its memory is not registered."""


def _is_to_register(place):
    return place.size > 0 and not place.registered


def _alone(place):
    return (place.address, place.size), [(place.address, place.size)]


def _hulls(places):
    """Returns memory that contains these places, each with the places in it: those in one array together, since each
    registration is checked with the kernel. Those that are registered for good, or empty, are left out."""
    found = {}
    for place in filter(_is_to_register, places):
        root = place.owner
        while isinstance(root, np.ndarray) and isinstance(root.base, np.ndarray) and root.base.flags.c_contiguous:
            root = root.base
        found.setdefault(id(root), []).append((place.address, place.size))
    hulls = []
    for parts in found.values():
        begin, end = min(address for address, _ in parts), max(address + size for address, size in parts)
        hulls.append(((begin, end - begin), parts))
    return hulls


def _expect(code, piece, call):
    if code != piece.size:
        error = _NotRegistered if code == REGISTERED else RuntimeError
        raise error(f"{call} failed for {piece.key}: {code}, not {piece.size} bytes")


def _paired(codes, asked, call):
    if len(codes) != len(asked):
        raise RuntimeError(f"{call} returned {len(codes)} results for {len(asked)} requests")


def fresh(size):
    """Returns an array of so many bytes, not initialized."""
    return np.empty(size, np.uint8)
