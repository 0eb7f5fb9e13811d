"""Second level of LMCache's multi-process mode: its plug-in adapter for a cluster, which all engines share.

LMCache loads the class by its module path; `docs/integrations/lmcache.md` has the configuration. This module needs
LMCache, and nothing else in the package imports it.
"""

import collections
import difflib
import math
import secrets
import threading
import time
import urllib.parse
from typing import TYPE_CHECKING, Any, Deque, Dict, List, Optional, Sequence, Tuple

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.platform import create_event_notifier

from kvplane._blocks import PRESENT, BlockStore

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.memory_management import MemoryObj

#: Settings with their types and defaults.
_SETTINGS: Dict[str, Tuple[Any, Any]] = {
    "control": (str, None),
    "cluster": (str, None),
    "certificates": (str, None),
    "tenant": (str, ""),
    "data_tls": (str, None),
    "deadline": ((int, float), 10.0),
    "replicas": (int, 1),
    "priority": (int, 0),
    "workers": (int, 4),
    "batch_bytes": (int, 16 << 20),
    "pending_bytes": (int, 1 << 30),
    "prefetch": (bool, True),
    "namespace": (str, "lmcache"),
    "lock_seconds": ((int, float), 30.0),
}
#: Those of the adapter itself; the others are those of its store.
_OWN = ("prefetch", "namespace", "lock_seconds")
#: Longest namespace in bytes, as it is in keys: there is room for the rest of a key.
_MOST_NAMESPACE = 1024
#: Number of model, rank and group combinations whose lengths are remembered.
_MOST_LENGTHS = 4096
_HELP = """Settings, all of them optional:
- control, cluster, certificates, tenant, data_tls, deadline: the cluster, as of kvplane.Store
- replicas (1), priority (0): of the objects
- workers (4): threads that make calls; batch_bytes (16 MiB): bytes of a call
- pending_bytes (1 GiB): bytes of stores that may wait; stores beyond it fail at once
- prefetch (true): a lookup has nodes read blocks from their SSDs ahead of the load
- namespace (lmcache): prefix of all keys
- lock_seconds (30): time for which a lookup keeps blocks in memory, unless they are unlocked before; 0: no locks"""


class KvplaneL2AdapterConfig(L2AdapterConfigBase):
    """Settings of the adapter, checked."""

    def __init__(self, **settings: Any):
        super().__init__()
        for name, value in settings.items():
            if name not in _SETTINGS:
                near = difflib.get_close_matches(name, _SETTINGS, 1)
                raise ValueError(f"{name!r} is no setting of kvplane" + (f"; did you mean {near[0]!r}?" if near else ""))
            kind, default = _SETTINGS[name]
            is_truth = isinstance(value, bool)
            if not (value is default or (isinstance(value, kind) and is_truth == (kind is bool))):
                raise ValueError(f"{name} is not {value!r}: {self.help().splitlines()[0]}")
        self.settings = {name: settings.get(name, default) for name, (_, default) in _SETTINGS.items()}
        if not 0 <= self.settings["lock_seconds"] <= 86_400:
            raise ValueError(f"lock_seconds is from 0 to 86400, not {self.settings['lock_seconds']}")
        try:
            length = len(_prefix(self.settings["namespace"]))
        except UnicodeEncodeError:
            raise ValueError("namespace is no text: it has a lone surrogate") from None
        if length > _MOST_NAMESPACE:
            raise ValueError(f"namespace has at most {_MOST_NAMESPACE} bytes in keys, not {length}")

    @classmethod
    def from_dict(cls, d: Dict[str, Any]) -> "KvplaneL2AdapterConfig":
        return cls(**d)

    @classmethod
    def help(cls) -> str:
        return _HELP


class _Lock:
    """Retention of the blocks that one lookup found: released when all of them are unlocked."""

    def __init__(self, keys: Sequence[str], until: float):
        self.number = secrets.randbits(63) + 1
        self.keys, self.remaining, self.until = keys, len(keys), until


class KvplaneL2Adapter(L2AdapterInterface):
    """Objects of LMCache in a cluster of kvplane. `help()` of its configuration has the settings.

    Every task is a few calls, each with one request to each shard, made by threads of the adapter; loads go before stores.
    """

    def __init__(self, config: KvplaneL2AdapterConfig, l1_memory_desc: "Optional[L1MemoryDesc]" = None):
        # The cluster evicts by itself: it has no capacity of this adapter's.
        super().__init__(max_capacity_bytes=0)
        settings = dict(config.settings)
        self._prefetch, self._namespace, self._lock_seconds = (settings.pop(name) for name in _OWN)
        self._prefix = _prefix(self._namespace)
        self._blocks = BlockStore(**settings)
        self._arena = self._register(l1_memory_desc)
        self._notifiers = [create_event_notifier() for _ in range(3)]
        self._guard = threading.Lock()
        self._last_task = -1
        self._stored: Dict[int, L2StoreResult] = {}
        self._looked_up: Dict[int, Bitmap] = {}
        self._loaded: Dict[int, Bitmap] = {}
        #: Locks of each key, the oldest first; and all locks in the order of their ends.
        self._locks: Dict[str, Deque[_Lock]] = {}
        #: Length of the objects that were stored or loaded last, by model, rank and group.
        self._lengths: Dict[Tuple[str, int, int], int] = {}
        self._ends: Deque[_Lock] = collections.deque()
        self._is_closed = False

    def _register(self, arena: "Optional[L1MemoryDesc]") -> Tuple[int, int]:
        """Registers LMCache's memory as far as it can be. Returns its address and size; objects elsewhere are sent from
        and received into their own memory, with a registration of its own for each call."""
        if arena is not None and arena.ptr:
            for size in (arena.size, arena.stable_registration_size):
                if size and self._blocks.register(arena.ptr, size):
                    return arena.ptr, size
        return 0, 0

    # --- events ----------------------------------------------------------------------------------------------------

    def get_store_event_fd(self) -> int:
        return self._notifiers[0].fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._notifiers[1].fileno()

    def get_load_event_fd(self) -> int:
        return self._notifiers[2].fileno()

    def _finish(self, results: Dict[int, Any], task: int, result: Any, notifier: int) -> None:
        with self._guard:
            results[task] = result
            # After a close there is nobody to wake: results are polled for.
            if not self._is_closed:
                self._notifiers[notifier].notify()

    def _task(self) -> int:
        with self._guard:
            self._last_task += 1
            return self._last_task

    # --- stores ----------------------------------------------------------------------------------------------------

    def submit_store_task(self, keys: "List[ObjectKey]", objects: "List[MemoryObj]") -> int:
        task, names = self._task(), self._names(keys)
        sizes = self._sizes(keys, objects)

        def done(codes: List[int], seconds: float) -> None:
            # A key that is in the task repeatedly is one object.
            fresh = {names[at]: at for at, code in reversed(list(enumerate(codes))) if 0 <= code < PRESENT}
            stored = sorted(fresh.values())
            is_whole = len(codes) == len(keys) and all(code >= 0 for code in codes)
            result = L2StoreResult(is_whole, sum(sizes[at] for at in stored))
            try:
                if stored:
                    self._notify_keys_stored([keys[at] for at in stored], [sizes[at] for at in stored])
            finally:
                # An error of a listener is not the task's.
                self._finish(self._stored, task, result, 0)

        addresses = self._addresses(objects, sizes)
        if addresses is not None:
            is_taken = self._blocks.put((names, addresses, sizes), done)
        else:
            is_taken = self._blocks.put_buffers(names, [_view(one) for one in objects], done)
        if not is_taken:
            self._finish(self._stored, task, L2StoreResult(False, 0), 0)
        return task

    def pop_completed_store_tasks(self) -> Dict[int, L2StoreResult]:
        with self._guard:
            # In place: a task that ends at this moment has this dictionary in its hands already.
            stored = dict(self._stored)
            self._stored.clear()
        return stored

    # --- lookups and locks -----------------------------------------------------------------------------------------

    def submit_lookup_and_lock_task(
        self, keys: "List[ObjectKey]", group_layout_descs: "Dict[int, MemoryLayoutDesc]"
    ) -> int:
        task, names = self._task(), self._names(keys)
        lengths = {group: _length(layout) for group, layout in group_layout_descs.items()}
        bitmap = Bitmap(len(names))

        def look() -> None:
            try:
                found = [at for at, there in enumerate(self._blocks.exist(names, self._prefetch)) if there]
                found = self._loadable(keys, names, found, lengths)
                self._lock([names[at] for at in found])
                bitmap.batched_set(found)
            finally:
                self._finish(self._looked_up, task, bitmap, 1)

        self._blocks.later(look, lambda: self._finish(self._looked_up, task, bitmap, 1))
        return task

    def _loadable(
        self, keys: "Sequence[ObjectKey]", names: List[str], found: List[int], lengths: Dict[int, Optional[int]]
    ) -> List[int]:
        """Returns those of the found objects that loads can have: with the length of their group's layout, or that of
        the objects that this adapter moved last. Without a layout, all of them."""
        known = [at for at in found if lengths.get(keys[at].object_group_id) is not None]
        if not known:
            return found
        sizes = dict(zip(known, self._blocks.sizes([names[at] for at in known])))
        with self._guard:
            last = {at: self._lengths.get(_kind(keys[at])) for at in known}
        group = {at: lengths[keys[at].object_group_id] for at in known}
        return [at for at in found if at not in sizes or sizes[at] in (group[at], last[at])]

    def query_lookup_and_lock_result(self, task_id: int) -> Optional[Bitmap]:
        with self._guard:
            return self._looked_up.pop(task_id, None)

    def submit_unlock(self, keys: "List[ObjectKey]") -> None:
        released = []
        with self._guard:
            for name in self._names(keys):
                locks = self._locks.get(name)
                if not locks:
                    continue
                lock = locks.popleft()
                if not locks:
                    del self._locks[name]
                lock.remaining -= 1
                if lock.remaining == 0:
                    released.append(lock.number)
        for number in released:
            # It ends by itself if this call is not made.
            self._blocks.later(lambda number=number: self._blocks.release(number))

    def _lock(self, names: List[str]) -> None:
        """Keeps the blocks of a lookup in memory until they are unlocked, or for `lock_seconds`."""
        if not names or not self._lock_seconds:
            return
        now = time.monotonic()
        lock = _Lock(names, now + self._lock_seconds)
        self._blocks.retain(lock.number, names, self._lock_seconds)
        with self._guard:
            self._forget_locks(now)
            self._ends.append(lock)
            for name in names:
                self._locks.setdefault(name, collections.deque()).append(lock)

    def _forget_locks(self, now: float) -> None:
        """Forgets the locks whose time is over: nobody unlocked them."""
        while self._ends and (self._ends[0].until <= now or self._ends[0].remaining == 0):
            lock = self._ends.popleft()
            for name in lock.keys if lock.remaining else ():
                locks = self._locks.get(name)
                if locks and lock in locks:
                    locks.remove(lock)
                    if not locks:
                        del self._locks[name]

    # --- loads -----------------------------------------------------------------------------------------------------

    def submit_load_task(self, keys: "List[ObjectKey]", objects: "List[MemoryObj]") -> int:
        task, names = self._task(), self._names(keys)
        sizes = self._sizes(keys, objects)
        bitmap = Bitmap(len(names))

        def done(codes: List[int], seconds: float) -> None:
            # An object of another length is none of these.
            good = [at for at, code in enumerate(codes) if code == sizes[at]]
            bitmap.batched_set(good)
            try:
                if good:
                    self._notify_keys_accessed([keys[at] for at in good])
            finally:
                self._finish(self._loaded, task, bitmap, 2)

        addresses = self._addresses(objects, sizes)
        if addresses is not None:
            self._blocks.get((names, addresses, sizes), done)
        else:
            self._blocks.get_buffers(names, [_view(one) for one in objects], done)
        return task

    def query_load_result(self, task_id: int) -> Optional[Bitmap]:
        with self._guard:
            return self._loaded.pop(task_id, None)

    # --- removal, state --------------------------------------------------------------------------------------------

    def delete(self, keys: "List[ObjectKey]") -> None:
        """Removes objects. Reads in flight complete."""
        names = self._names(keys)
        sizes = self._blocks.sizes(names)
        removed = [at for at, was_there in enumerate(self._blocks.remove(names)) if was_there]
        if removed:
            self._notify_keys_deleted([keys[at] for at in removed], [max(sizes[at], 0) for at in removed])

    def report_status(self) -> Dict[str, Any]:
        """Returns the state and the counts of this adapter."""
        with self._guard:
            locked = len(self._locks)
        return {
            "is_healthy": self._blocks.is_healthy(),
            "type": type(self).__name__,
            "namespace": self._namespace,
            "registered_bytes": self._arena[1],
            "locked_blocks": locked,
            "last_problem": self._blocks.problem,
            **self._blocks.metrics(),
        }

    def close(self) -> None:
        """Fails what waits, waits for the calls in progress, and leaves the cluster. Idempotent."""
        self._blocks.close()
        with self._guard:
            if self._is_closed:
                return
            self._is_closed = True
            for notifier in self._notifiers:
                notifier.close()

    # --- names and memory ------------------------------------------------------------------------------------------

    def _names(self, keys: "Sequence[ObjectKey]") -> List[str]:
        names = []
        for key in keys:
            salt = f"@{key.cache_salt}" if key.cache_salt else ""
            rank, group = f"{key.kv_rank:08x}", f"{key.object_group_id:x}"
            names.append(f"{self._prefix}/{key.model_name}@{rank}@{group}@{key.chunk_hash.hex()}{salt}")
        return names

    def _sizes(self, keys: "Sequence[ObjectKey]", objects: "Sequence[MemoryObj]") -> List[int]:
        """Returns the lengths of objects, and remembers them for lookups."""
        sizes = [one.get_size() for one in objects]
        with self._guard:
            if len(self._lengths) >= _MOST_LENGTHS:
                self._lengths.clear()
            self._lengths.update((_kind(key), size) for key, size in zip(keys, sizes))
        return sizes

    def _addresses(self, objects: "Sequence[MemoryObj]", sizes: Sequence[int]) -> Optional[List[int]]:
        """Returns the addresses of objects, if all of them are in registered memory."""
        start, length = self._arena
        if not length:
            return None
        addresses = [one.data_ptr for one in objects]
        if all(start <= at and at + size <= start + length for at, size in zip(addresses, sizes)):
            return addresses
        return None


def _prefix(namespace: str) -> str:
    """Returns a namespace as it is in keys: without slashes, so that what follows the first one is the model's."""
    return urllib.parse.quote(namespace, safe="")


def _kind(key: "ObjectKey") -> Tuple[str, int, int]:
    """Returns what objects of one length have in common."""
    return key.model_name, key.kv_rank, key.object_group_id


def _length(layout: "MemoryLayoutDesc") -> Optional[int]:
    """Returns the length of the objects with a layout; None if it is unknown."""
    try:
        return sum(math.prod(shape) * int(kind.itemsize) for shape, kind in zip(layout.shapes, layout.dtypes))
    except (AttributeError, TypeError):
        return None


def _view(one: "MemoryObj") -> memoryview:
    """Returns a view of an object's bytes."""
    view = memoryview(one.byte_array).cast("B")
    return view[: one.get_size()]
