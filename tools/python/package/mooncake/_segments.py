"""Memory that this process provides to the cluster beside that of `setup`, and memory of its own for transfers."""

import threading

from kvplane import _native
from mooncake._types import texts


class Pool:
    """Memory pool of `setup_dummy`: allocations live as long as their store."""

    def __init__(self):
        self._lock = threading.Lock()
        self._left = 0
        self._memory = None

    def open(self, size):
        """Allows allocations of so many bytes from now on."""
        with self._lock:
            self._left = size

    def close(self):
        """Rejects further allocations; existing ones stay valid."""
        self.open(0)

    def take(self, size):
        """Allocates memory. Returns its address; 0 when the pool has not enough."""
        with self._lock:
            if not 0 < size <= self._left:
                return 0
            self._memory = self._memory or _native.HostMemory()
            try:
                address = self._memory.alloc(size)
            except (MemoryError, ValueError):
                return 0
            self._left -= size
            return address


class Segments:
    """Calls of a store that mount and unmount memory."""

    def allocate_and_mount_segment(self, size, protocol="tcp", location=""):
        """Provides `size` bytes of this process's memory to the cluster."""
        result = self.mount_segment("", size, 0, protocol, location)
        if result["ret"] == 0:
            result["allocated_size"] = size
        return result

    def mount_segment(self, path, size, offset=0, protocol="tcp", location=""):
        """Provides memory to the cluster. Memory in a file of other processes cannot be provided: give a node the file
        as its SSD."""
        native = self._native
        if native is None or path or size <= 0:
            return {"ret": -1, "segment_ids": []}
        name = native.join(size, self._hostname)
        if not isinstance(name, str):
            return {"ret": name, "segment_ids": []}
        return {"ret": 0, "segment_ids": [name]}

    def unmount_segment(self, segment_ids, grace_period_seconds=0):
        """Takes memory back; objects may migrate to other nodes within the given time."""
        segment_ids = texts(segment_ids, "unmount_segment", "segment_ids")
        native = self._native
        if native is None:
            return -1
        results = [native.leave(name, grace_period_seconds) for name in segment_ids]
        return -1 if any(results) else 0

    def unmount_and_free_segment(self, segment_ids, grace_period_seconds=0):
        """Does the same: memory that is not mounted is not kept."""
        return self.unmount_segment(segment_ids, grace_period_seconds)

    def unmount_local_disk_segment(self, grace_period_seconds=0):
        """Has no effect: clients have no disks here; nodes do."""
        return 0 if self._native is not None else -1

    def alloc_from_mem_pool(self, arg0, /):
        """Allocates from the pool of `setup_dummy`; the caller registers the memory. Returns its address, or 0 when the
        pool has not enough, or the store was set up otherwise."""
        if not hasattr(arg0, "__index__") or int(arg0) < 0:
            raise TypeError(f"alloc_from_mem_pool(): a size is int and not below 0, not {arg0!r}")
        return 0 if self._native is None else self._pool.take(int(arg0))
