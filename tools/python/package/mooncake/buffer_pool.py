"""Pool of registered memory: `BufferPool`, and its leases."""

import threading
import time
import weakref

from kvplane import _native

#: Longest wait for a buffer without a timeout of the pool's or the call's, in seconds.
DEFAULT_TIMEOUT_S = 60


class BufferLeaseView:
    """View of a lease, for use as a context manager."""

    def __init__(self, lease):
        self._lease = lease
        self.ptr = lease.ptr
        self.size = lease.size

    @property
    def buffer(self):
        """Returns the memory, as a memoryview of the requested length."""
        return self._lease.buffer


class BufferLease:
    """Memory of a pool, until it is released. Created by `BufferPool.acquire`."""

    #: Default for a constructor that raised because of its arguments: there is nothing to release.
    _pool = None
    _exported = staticmethod(lambda: None)

    def __init__(self, pool, address, room, size):
        self._pool = pool
        self._room = room
        self._address = address
        self._size = size
        self._exported = lambda: None

    @property
    def ptr(self):
        """Returns the address."""
        return self._live()

    @property
    def size(self):
        """Returns the requested length in bytes."""
        return self._size

    @property
    def buffer(self):
        """Returns the memory, as a memoryview, which keeps the lease."""
        import ctypes

        memory = self._exported()
        if memory is None:
            memory = (ctypes.c_char * self._size).from_address(self._live())
            memory.lease = self
            self._exported = weakref.ref(memory)
        return memoryview(memory).cast("B") if self._size else memoryview(b"")

    def _live(self):
        if self._pool is None:
            raise ValueError("the lease was released")
        return self._address

    def release(self):
        """Returns the memory to the pool; fails while there are views of it. A second call has no effect."""
        if self._pool is not None and self._exported() is not None:
            raise RuntimeError("the lease has exported views: delete them first")
        pool, self._pool = self._pool, None
        if pool is not None:
            pool._take_back(self._address, self._room)

    def __enter__(self):
        return BufferLeaseView(self)

    def __exit__(self, *_):
        self.release()

    def __del__(self):
        self.release()


def _count(call, name, value):
    """Returns an argument that is a number as int, also one of numpy's; TypeError for anything else."""
    if not hasattr(value, "__index__"):
        raise TypeError(f"{call}(): {name} is int, not {type(value).__name__}")
    return value.__index__()


class BufferPool:
    """Buffers in sizes of powers of two, registered with a store once and reused. A pool that nobody refers to any more
    is closed: its memory is unregistered before it is freed."""

    #: Default for a constructor that raised because of its arguments: there is nothing to free.
    _changed = None

    def __init__(
        self,
        store,
        max_bytes=0,
        min_size_class=65536,
        max_size_class=None,
        alignment=8388608,
        block_on_exhaustion=True,
        default_timeout=None,
        max_regions=None,
        prewarm_size=None,
        prewarm_count=0,
    ):
        max_bytes = _count("BufferPool", "max_bytes", max_bytes)
        min_size_class = _count("BufferPool", "min_size_class", min_size_class)
        alignment = _count("BufferPool", "alignment", alignment)
        max_size_class, max_regions = (
            None if value is None else _count("BufferPool", name, value)
            for name, value in (("max_size_class", max_size_class), ("max_regions", max_regions))
        )
        if min_size_class <= 0 or max_bytes < 0:
            raise RuntimeError("min_size_class is above 0, and max_bytes not below")
        if alignment <= 0 or alignment & (alignment - 1):
            raise RuntimeError(f"the alignment is a power of two, not {alignment}")
        self._store = store
        self._max_bytes = max_bytes
        self._least = min_size_class
        self._most = max_size_class
        self._block = block_on_exhaustion
        self._timeout = default_timeout
        self._max_regions = max_regions
        self._memory = _native.HostMemory()
        self._free = {}
        self._all = {}
        self._bytes = 0
        self._closed = False
        self._changed = threading.Condition()
        if prewarm_size is not None:
            self.prewarm(prewarm_size, prewarm_count)

    def _room(self, size):
        """Returns the length of the buffer for so many bytes."""
        if not 0 <= size < 1 << 48:
            raise RuntimeError(f"a buffer of {size} bytes is over the capacity of any pool")
        room = max(self._least, 1 << max(size - 1, 0).bit_length())
        if self._most is not None and room > self._most:
            # Above the largest class: rounded up to pages.
            room = max(-(-size // 4096) * 4096, self._least)
        if self._max_bytes and room > self._max_bytes:
            raise RuntimeError(f"a buffer of {room} bytes is over the capacity of this pool, {self._max_bytes}")
        return room

    def acquire(self, size, block=None, timeout=None):
        """Lends a buffer of at least `size` bytes; RuntimeError or TimeoutError when there is none. The wait for one ends
        after `timeout` seconds, the pool's `default_timeout`, or a minute."""
        return self.acquire_all([size], block, timeout)[0]

    def acquire_all(self, sizes, block=None, timeout=None, held=()):
        """Lends buffers for one call, all of them or none: a call that waits holds none of these.

        `held` are leases that the caller keeps meanwhile. RuntimeError, without a wait, if both together are over the
        capacity of the pool.
        """
        sizes = [_count("acquire", "size", size) for size in sizes]
        rooms = [self._room(size) for size in sizes]
        self._check_capacity(rooms, [lease._room for lease in held if lease._pool is self])
        block = self._block if block is None else block
        timeout = self._timeout if timeout is None else timeout
        timeout = DEFAULT_TIMEOUT_S if timeout is None else timeout
        until = time.monotonic() + timeout
        with self._changed:
            while True:
                addresses = self._find_all(rooms)
                if addresses is not None:
                    return [BufferLease(self, *one) for one in zip(addresses, rooms, sizes)]
                if not block:
                    raise RuntimeError(f"the pool is exhausted: no {sum(rooms)} bytes are left")
                left = until - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"no buffer of {sum(rooms)} bytes came back within {timeout} s")
                self._changed.wait(left)

    def _check_capacity(self, rooms, held):
        for most, needed, kept, unit in (
            (self._max_bytes, sum(rooms), sum(held), "bytes"),
            (self._max_regions, len(rooms), len(held), "regions"),
        ):
            if most and needed + kept > most:
                raise RuntimeError(
                    f"a call needs buffers of {needed} {unit} and holds {kept}, over the capacity of this pool, {most}: "
                    f"read less at a time, or make the pool with more max_{unit}"
                )

    def _find_all(self, rooms):
        """Returns an address for each, or None, and nothing is lent."""
        found = []
        try:
            for room in rooms:
                address = self._find(room)
                if address is None:
                    break
                found.append(address)
        finally:
            if len(found) < len(rooms):
                for address, room in zip(found, rooms):
                    self._free[room].append(address)
        return found if len(found) == len(rooms) else None

    def buffer(self, size, block=None, timeout=None):
        """Does the same, for `with`."""
        return self.acquire(size, block, timeout)

    def _find(self, room):
        if self._closed:
            raise RuntimeError("the pool was closed")
        free = self._free.setdefault(room, [])
        if free:
            return free.pop()
        if not self._shrink(room):
            return None
        address, code = self._memory.alloc(room), None
        try:
            code = self._store.register_buffer(address, room)
        finally:
            if code != 0:
                self._memory.free(address)
        if code != 0:
            raise RuntimeError(f"the store did not register {room} bytes")
        self._all[address] = room
        self._bytes += room
        return address

    def _is_full(self, room):
        bytes_are = self._max_bytes and self._bytes + room > self._max_bytes
        return bytes_are or (self._max_regions is not None and len(self._all) >= self._max_regions)

    def _shrink(self, room):
        """Frees buffers of other sizes until there is space. Returns True if there is."""
        for size, addresses in self._free.items():
            while addresses and size != room and self._is_full(room):
                self._drop(addresses.pop())
        return not self._is_full(room)

    def _drop(self, address):
        room = self._all.pop(address)
        self._bytes -= room
        self._store.unregister_buffer(address)
        self._memory.free(address)

    def _take_back(self, address, room):
        with self._changed:
            if self._closed:
                self._drop(address)
            else:
                self._free[room].append(address)
            self._changed.notify_all()

    def prewarm(self, size, count):
        """Registers so many buffers in advance."""
        leases = [self.acquire(size, block=False) for _ in range(_count("prewarm", "count", count))]
        for lease in leases:
            lease.release()

    def close(self):
        """Frees all buffers; RuntimeError while one is lent."""
        with self._changed:
            lent = len(self._all) - sum(map(len, self._free.values()))
            if lent:
                raise RuntimeError(f"the pool has {lent} active leases: release them first")
            self._end()

    def _end(self):
        """Frees all buffers that are not lent; the others are freed when they come back."""
        self._closed = True
        for addresses in self._free.values():
            while addresses:
                self._drop(addresses.pop())
        self._changed.notify_all()

    def __del__(self):
        if self._changed is not None:
            with self._changed:
                self._end()


RegisteredBufferPool = BufferPool
RegisteredBufferLease = BufferLease
RegisteredBufferLeaseView = BufferLeaseView
