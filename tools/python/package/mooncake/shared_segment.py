"""Memory that several processes of one host share by name: `SharedSegment`."""

import mmap
import os

from kvplane import _native


class SharedSegment:
    """Named piece of shared memory, the same for all ranks of a group on one host."""

    def __init__(self):
        raise TypeError("SharedSegment: No constructor defined; use SharedSegment.create")

    @classmethod
    def create(cls, name, size, world_size, rank_id, owner_rank=0, device_id=0, mmap=True, host_register=False):
        """create(name: str, size: int, world_size: int, rank_id: int, owner_rank: int = 0, device_id: int = 0, \
mmap: bool = True, host_register: bool = False) -> tuple[mooncake.engine.SharedSegment, bytes]"""
        if host_register:
            raise NotImplementedError("SharedSegment: its memory is not registered with CUDA devices")
        if size <= 0 or not 0 <= rank_id < world_size or not 0 <= owner_rank < world_size:
            raise ValueError("size is above 0, and ranks are below world_size")
        if not name or "/" in name:
            raise ValueError(f"{name!r} is not a name of shared memory")
        segment = object.__new__(cls)
        segment._name, segment._size, segment._map = name, size, None
        segment._owner = rank_id == owner_rank
        if segment._owner:
            segment._open(os.O_CREAT)
        return segment, f"{rank_id}:{name}".encode()

    def _open(self, flags):
        handle = os.open(f"/dev/shm/{self._name}", os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        try:
            if flags:
                os.ftruncate(handle, self._size)
            if os.fstat(handle).st_size < self._size:
                raise ValueError(f"the shared memory {self._name!r} is shorter than {self._size} bytes")
            self._map = mmap.mmap(handle, self._size)
        finally:
            os.close(handle)

    def complete(self, blobs):
        """complete(self: mooncake.engine.SharedSegment, blobs: list[str]) -> None

        All ranks have called `create`: ranks other than the owner open the owner's memory.
        """
        if self._map is None:
            self._open(0)

    def ready(self):
        """ready(self: mooncake.engine.SharedSegment) -> bool"""
        return self._map is not None

    def base_addr(self):
        """base_addr(self: mooncake.engine.SharedSegment) -> int"""
        return _native.buffer_address(self._map, True)[0] if self._map is not None else 0

    def device_addr(self):
        """device_addr(self: mooncake.engine.SharedSegment) -> int"""
        raise NotImplementedError("SharedSegment: its memory has no address on a CUDA device")

    def size(self):
        """size(self: mooncake.engine.SharedSegment) -> int"""
        return self._size

    @staticmethod
    def supported(mmap=True, host_register=False):
        """supported(mmap: bool = True, host_register: bool = False) -> bool"""
        return bool(mmap) and not host_register

    def __del__(self):
        if getattr(self, "_owner", False):
            try:
                os.unlink(f"/dev/shm/{self._name}")
            except OSError:
                pass
