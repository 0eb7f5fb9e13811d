"""Client of the store: `Store`, for any number of threads."""

import math
import operator
from types import TracebackType
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple, Type, Union

from kvplane import _native
from kvplane._buffers import DeviceMemory, Stream, device_memory, exporter
from kvplane._errors import Closed, InvalidArgument, Unreachable, error

Key = Union[str, bytes]

_NOT_FOUND = -704
_LONGEST_PIN_S = 86_400
_LOWEST, _HIGHEST = -4, 4
_MOST_REPLICAS = 8
_HIGHEST_KIND = 255


class _Place(NamedTuple):
    address: int
    size: int


class Piece(_Place):
    """Part of registered memory. A part that was sliced from a registration keeps the memory in place, and can be used
    until the registration is closed."""

    _memory: "Optional[Registration]" = None


def _places(pieces: Sequence[Piece]) -> Tuple[List[int], List[int]]:
    """Returns addresses and lengths. Rejects parts of memory that was unregistered, which may belong to another object
    by now."""
    for piece in pieces:
        if piece._memory is not None and piece._memory.closed:
            raise InvalidArgument(-600, f"{piece!r} refers to memory that was unregistered")
    return [piece.address for piece in pieces], [piece.size for piece in pieces]


def _columns(items: Iterable[Tuple[Key, Piece]]) -> Tuple[List[Key], List[Piece]]:
    rows = list(items)
    return [key for key, _ in rows], [piece for _, piece in rows]


def _streams_of(pieces: Sequence[Piece]) -> Set[Stream]:
    """Returns the streams that device memory of these parts is used on, but the default ones."""
    owners = {id(piece._memory): piece._memory for piece in pieces if piece._memory is not None}
    return {stream for memory in owners.values() for stream in [memory._stream()] if stream is not None}


class Registration:
    """Memory that is registered with a store until this is closed. Slices name parts of it: `memory[4096:8192]`."""

    def __init__(self, store: "_native.Store", owner: Any):
        self._store = store
        #: Device memory; None for that of the host.
        self._device = device_memory(owner)
        self._view: Optional[memoryview] = None
        if self._device is not None:
            self.address, self.size = self._device.address, self._device.size
        else:
            self._buffer = exporter(owner)
            # A view keeps a bytearray from being resized, and so keeps its memory in place.
            self._view = memoryview(self._buffer)
            self.address, self.size = _native.buffer_address(self._buffer, False)
        self._is_open = False
        code = store.register(self.address, self.size)
        if code < 0:
            self._release()
            raise error(code)
        self._is_open = True

    def __getitem__(self, part: slice) -> Piece:
        start, stop, step = part.indices(self.size)
        if step != 1:
            raise ValueError("a part of memory has no step")
        piece = Piece(self.address + start, max(stop - start, 0))
        piece._memory = self
        return piece

    def __len__(self) -> int:
        return self.size

    @property
    def closed(self) -> bool:
        """True if the memory was unregistered."""
        return not self._is_open

    def _stream(self) -> Optional[Stream]:
        return None if self._device is None else self._device.stream()

    def _release(self) -> None:
        if self._view is not None:
            self._view.release()
        self._view = self._device = None

    def close(self) -> None:
        """Unregisters the memory. When this returns, no call uses it any more."""
        if self._is_open:
            code = self._store.unregister(self.address)
            if code < 0 and code != -1:
                raise error(code)
            self._is_open = False
            self._release()

    def __enter__(self) -> "Registration":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Any, trace: Optional[TracebackType]) -> None:
        self.close()

    def __del__(self) -> None:
        # The memory may be freed with this object.
        if getattr(self, "_is_open", False):
            self._store.unregister(self.address)


def _count(name: str, value: Any) -> int:
    """Returns an argument that is a number as int. TypeError for what is none, truth values included."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is int, not {type(value).__name__}") from None


def _number(name: Union[str, int]) -> int:
    """Returns the number of a group or a retention: of a name, a digest that is the same in every process."""
    if isinstance(name, str):
        import hashlib

        return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") or 1
    try:
        number = _count("the number of a group or a retention", name)
    except TypeError:
        raise TypeError(f"a group or a retention is a name, str, or a number, int, not {type(name).__name__}") from None
    if not 0 < number < 1 << 64:
        raise ValueError(f"a group or a retention has a name, or a number from 1 to 2**64 - 1, not {number}")
    return number


def _milliseconds(seconds: float) -> int:
    if not 0 < seconds <= _LONGEST_PIN_S:
        raise ValueError(f"a pin lasts more than 0 and at most {_LONGEST_PIN_S} s, not {seconds}")
    return math.ceil(seconds * 1000)


def _kept(
    replace: bool,
    pin: bool,
    keep: float,
    group: Union[str, int, None],
    kind: int,
    replicas: int,
    wait: Optional[int],
    priority: int,
) -> Optional[Tuple[int, int, bool, int, bool, int, List[str], bool, int, int]]:
    replicas, kind, priority = _count("replicas", replicas), _count("kind", kind), _count("priority", priority)
    if not 1 <= replicas <= _MOST_REPLICAS:
        raise ValueError(f"an object has 1 to {_MOST_REPLICAS} replicas, not {replicas}")
    waits = replicas if wait is None else _count("wait", wait)
    if not 1 <= waits <= replicas:
        raise ValueError(f"a put of {replicas} replicas waits for 1 to {replicas} of them, not {waits}")
    if not 0 <= kind <= _HIGHEST_KIND:
        raise ValueError(f"the data type of an object is from 0 to {_HIGHEST_KIND}, not {kind}")
    if isinstance(keep, str) or not hasattr(keep, "__float__"):
        raise TypeError(f"keep is a number of seconds, not {type(keep).__name__}")
    if not 0 <= keep <= _LONGEST_PIN_S:
        raise ValueError(f"an object can be kept for 0 to {_LONGEST_PIN_S} s, not {keep}")
    if not _LOWEST <= priority <= _HIGHEST:
        raise ValueError(f"the priority of an object is from {_LOWEST} to {_HIGHEST}, not {priority}")
    number = 0 if group is None else _number(group)
    if not (replace or pin or keep or number or kind or replicas > 1 or priority):
        return None
    return (number, int(keep * 1000), pin, kind, replace, replicas, [], False, priority, waits)


class Store:
    """Client of the store of a cluster. Any number of threads may use one.

    Without arguments, it connects to the cluster of this user on this host: that of `kvplane dev` or `kvplane control`.
    For a remote cluster, `control` gives the addresses of the control planes (`host:port,host:port`) and `certificates`
    the folder that `kvplane ctl cert` created. With `memory`, this process provides so many bytes to the cluster.
    `deadline` bounds each call, in seconds. `tenant` is the tenant of the keys; by default, the one that the
    certificate is bound to, else the default tenant. `data_tls` is the mode of TLS 1.3 on data connections over TCP:
    "off", "offer" (with nodes that require it) or "require" (with no other nodes); the default is `KVPLANE_DATA_TLS`,
    else "offer". `hedge` is the upper bound of the delay, in seconds, after which a get that the owner has not answered
    is also sent to a replica owner; with 0, only when the owner is unreachable.

    Values and buffers are objects with the buffer protocol, and tensors and objects with `__cuda_array_interface__` or
    DLPack, whose memory may be a device's. What was enqueued there on the object's stream (torch's current one, for its
    tensors; the default one otherwise) is done before bytes are moved. Memory that is used often is faster registered.
    """

    def __init__(
        self,
        control: Optional[str] = None,
        *,
        cluster: Optional[str] = None,
        certificates: Optional[str] = None,
        tenant: str = "",
        memory: int = 0,
        shared_memory: bool = True,
        deadline: float = 10.0,
        hedge: float = 0.1,
        data_tls: Optional[str] = None,
        runtime_directory: Optional[str] = None,
    ):
        try:
            native = _native.Store(
                master=control,
                cluster=cluster,
                certificates=certificates,
                runtime_directory=runtime_directory,
                tenant=tenant,
                shared_memory=shared_memory,
                deadline=deadline,
                hedge=hedge,
                data_tls=data_tls,
            )
        except ConnectionError as problem:
            raise Unreachable(-900, str(problem)) from None
        if memory > 0:
            joined = native.join(memory)
            if not isinstance(joined, str):
                native.close()
                raise error(joined)
        self._open: Optional[_native.Store] = native

    def _native(self) -> "_native.Store":
        if self._open is None:
            raise Closed(-1, "the store was closed")
        return self._open

    def put(
        self,
        key: Key,
        value: Any,
        *,
        replace: bool = False,
        pin: bool = False,
        keep: float = 0.0,
        group: Union[str, int, None] = None,
        kind: int = 0,
        replicas: int = 1,
        wait: Optional[int] = None,
        priority: int = 0,
    ) -> None:
        """Stores bytes under a key. An existing object is left unchanged or, with `replace`, replaced.

        `pin`: never evict it (hard pin). `keep`: prefer other objects for eviction for so many seconds (soft pin).
        `group`: objects of a group are evicted and prefetched together. `kind`: data type of the caller, from 0 to 255.
        `replicas`: 2 to 8 keep so many replicas, each on another node, as far as slots have so many owners (`kvplane
        control --replicas`) and there is space. `wait`: number of replicas that the call waits for, for at most a
        second: all of them by default. `priority`: from -4 to 4; within a tenant, objects of a lower one are evicted
        before.
        """
        kept = _kept(replace, pin, keep, group, kind, replicas, wait, priority)
        memory = device_memory(value)
        if memory is None:
            self._check(self._native().put(key, exporter(value), kept))
        else:
            self._check(self._with_device(memory, lambda *place: self._native().put_from([key], *place, kept)))

    def put_many(
        self,
        items: Dict[Key, Any],
        *,
        replace: bool = False,
        pin: bool = False,
        keep: float = 0.0,
        replicas: int = 1,
        wait: Optional[int] = None,
        priority: int = 0,
    ) -> None:
        """Stores many objects in one batch. All that can be stored are; the first error is raised afterwards."""
        kept = _kept(replace, pin, keep, None, 0, replicas, wait, priority)
        memories = {key: memory for key, memory in ((key, device_memory(items[key])) for key in items) if memory}
        here = {key: exporter(value) for key, value in items.items() if key not in memories}
        codes = self._native().put_many(list(here), list(here.values()), kept)
        for key, memory in memories.items():
            codes.append(self._with_device(memory, lambda *place: self._native().put_from([key], *place, kept)))
        self._all(codes)

    def put_from(
        self,
        items: Iterable[Tuple[Key, Piece]],
        *,
        replace: bool = False,
        pin: bool = False,
        replicas: int = 1,
        wait: Optional[int] = None,
        priority: int = 0,
    ) -> None:
        """Stores parts of registered memory, without an additional copy."""
        keys, pieces = _columns(items)
        kept = _kept(replace, pin, 0.0, None, 0, replicas, wait, priority)
        places = _places(pieces)
        self._await(_streams_of(pieces))
        self._all(self._native().put_from(keys, *places, kept))

    def get(self, key: Key) -> Optional[bytes]:
        """Returns the bytes under a key; None when there are none."""
        value = self._native().get(key)
        if isinstance(value, bytes):
            return value
        if value == _NOT_FOUND:
            return None
        raise error(value)

    def get_into(self, key: Key, buffer: Any) -> Optional[int]:
        """Reads an object into a writable buffer. Returns its length; None when there is none."""
        memory = device_memory(buffer)
        if memory is None:
            return self._found(self._native().receive(key, exporter(buffer)))
        if not memory.writable:
            raise BufferError("the memory of the device is read-only")
        return self._found(self._with_device(memory, lambda *place: self._native().get_into([key], *place)))

    def get_many_into(self, items: Iterable[Tuple[Key, Piece]]) -> List[Optional[int]]:
        """Reads many objects into parts of registered memory, without an additional copy. Returns the length of
        each."""
        keys, pieces = _columns(items)
        places = _places(pieces)
        self._await(_streams_of(pieces))
        codes = self._native().get_into(keys, *places)
        return [self._found(code) for code in codes]

    def get_many(self, keys: Sequence[Key]) -> List[Optional[bytes]]:
        """Returns the bytes under many keys; None where there are none."""
        values = self._native().get_many(keys)
        for value in values:
            if not isinstance(value, bytes) and value != _NOT_FOUND:
                raise error(value)
        return [value if isinstance(value, bytes) else None for value in values]

    def exists(self, key: Key) -> bool:
        """Returns True if there is an object."""
        return self.exists_many([key])[0]

    def exists_many(self, keys: Sequence[Key]) -> List[bool]:
        """Returns for each key whether there is an object; one request to each shard."""
        found = self._native().has(keys)
        if isinstance(found, int):
            raise error(found)
        return found

    def size(self, key: Key) -> Optional[int]:
        """Returns the length of an object; None when there is none."""
        return self._found(self._native().sizes([key])[0])

    def remove(self, key: Key) -> bool:
        """Removes an object. Returns True if there was one. Reads in flight complete."""
        return self._found(self._native().remove([key])[0]) is not None

    def remove_many(self, keys: Sequence[Key]) -> List[bool]:
        """Removes many objects. Returns for each whether there was one."""
        return [self._found(code) is not None for code in self._native().remove(keys)]

    def remove_matching(self, pattern: str) -> int:
        """Removes the objects whose keys match a regular expression. Returns their number."""
        return self._check(self._native().remove_matching(pattern))

    def clear(self) -> int:
        """Removes all objects of this tenant. Returns their number."""
        return self._check(self._native().remove_all())

    def soft_pin(self, keys: Sequence[Key], seconds: float = 1800.0) -> List[bool]:
        """Gives objects soft pins from now on, in place of those that they have: for so many seconds, other objects are
        evicted first. Returns for each key whether the object is in memory."""
        return self._each(self._native().soft_pin(keys, _milliseconds(seconds)))

    def soft_unpin(self, keys: Sequence[Key]) -> List[bool]:
        """Ends soft pins. Returns for each key whether the object is in memory."""
        return self._each(self._native().soft_pin(keys, 0))

    def set_priority(self, keys: Sequence[Key], priority: int) -> List[bool]:
        """Sets the priority of objects, from -4 to 4. Returns for each key whether the object is in memory."""
        return self._each(self._native().set_priority(keys, priority))

    def retain(self, retention: Union[str, int], keys: Sequence[Key], seconds: float) -> List[bool]:
        """Adds objects to a retention, which keeps them in memory for so many seconds from now at least. Returns for each
        key whether the object is in memory, and so retained. All that can be are; the first error, `NoSpace` beyond the
        limit of hard pins, is raised afterwards.

        A retention has a name, or a number, within its tenant. An object stays until the last of its retentions ends.
        """
        return self._each(self._native().retain(_number(retention), keys, _milliseconds(seconds)))

    def retain_group(self, group: Union[str, int], seconds: float) -> int:
        """Adds the objects that a group has now to the retention of the group's name. Returns their number."""
        return self._check(self._native().extend(_number(group), _milliseconds(seconds), True))

    def renew(self, retention: Union[str, int], seconds: float) -> int:
        """Makes a retention last for so many seconds from now at least. Returns the number of its objects."""
        return self._check(self._native().extend(_number(retention), _milliseconds(seconds), False))

    def release(self, retention: Union[str, int]) -> int:
        """Ends a retention. Returns the number of its objects."""
        return self._check(self._native().extend(_number(retention), 0, False))

    def register(self, buffer: Any) -> Registration:
        """Registers memory, for `put_from` and `get_many_into`."""
        return Registration(self._native(), buffer)

    def _await(self, streams: Iterable[Stream]) -> None:
        """Waits until what is enqueued on the caller's streams is done."""
        for stream in streams:
            self._check(self._native().await_stream(*stream))

    def _with_device(self, memory: DeviceMemory, work: Callable[[List[int], List[int]], List[int]]) -> int:
        """Makes one put or get with memory of a device, which is registered for that unless it is already."""
        native = self._native()
        self._await(filter(None, [memory.stream()]))
        is_lent = native.register(memory.address, memory.size) == 0
        try:
            return work([memory.address], [memory.size])[0]
        finally:
            if is_lent:
                native.unregister(memory.address)

    def close(self) -> None:
        """Closes the client; memory that was provided to the cluster is taken back."""
        native, self._open = self._open, None
        if native is not None:
            native.close()

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Any, trace: Optional[TracebackType]) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_open", None) is not None:
            self.close()

    @staticmethod
    def _check(code: int) -> int:
        if code < 0:
            raise error(code)
        return code

    @staticmethod
    def _found(code: int) -> Optional[int]:
        if code == _NOT_FOUND:
            return None
        if code < 0:
            raise error(code)
        return code

    @classmethod
    def _each(cls, codes: Sequence[int]) -> List[bool]:
        cls._all(codes)
        return [code == 1 for code in codes]

    @staticmethod
    def _all(codes: Sequence[int]) -> None:
        bad = next((code for code in codes if code < 0), 0)
        if bad:
            raise error(bad)
