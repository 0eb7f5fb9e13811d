"""Batches of ranges between memory of this process and of a peer, and the registrations that they need."""

from dataclasses import dataclass, fields
from enum import Enum
from typing import Optional, Tuple

from mooncake.reshard import _checks
from mooncake.reshard.contracts import LeaseId, RuntimeFragmentId


class TransferDirection(str, Enum):
    """Which end is the peer's: the source of a read, the target of a write."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True)
class TransferBatchRange:
    """Copies from one allocation into one other."""

    source_base_address: int
    source_capacity: int
    target_base_address: int
    target_capacity: int
    source_offsets: Tuple[int, ...]
    target_offsets: Tuple[int, ...]
    sizes: Tuple[int, ...]

    def __post_init__(self):
        for side in ("source", "target"):
            base = _checks.u64(getattr(self, f"{side}_base_address"), f"{side} address of a range", 1)
            capacity = _checks.u64(getattr(self, f"{side}_capacity"), f"{side} capacity of a range", 1)
            _checks.u64(base + capacity, f"{side} end of a range")
        for name, least in (("source_offsets", 0), ("target_offsets", 0), ("sizes", 1)):
            object.__setattr__(self, name, _checks.integers(getattr(self, name), f"{name} of a range", least))
        if not self.sizes or not len(self.sizes) == len(self.source_offsets) == len(self.target_offsets):
            raise ValueError("offsets and sizes of a range differ in number, or are empty")
        for side in ("source", "target"):
            capacity = getattr(self, f"{side}_capacity")
            if any(at + size > capacity for at, size in zip(getattr(self, f"{side}_offsets"), self.sizes)):
                raise ValueError(f"a range exceeds its {side} allocation")

    @property
    def operation_count(self) -> int:
        """Returns the number of copies."""
        return len(self.sizes)

    def addresses(self, side):
        """Returns the addresses of the copies at an end."""
        base = getattr(self, f"{side}_base_address")
        return tuple(base + at for at in getattr(self, f"{side}_offsets"))


@dataclass(frozen=True)
class TransferBatch:
    """Copies to or from one peer that are submitted at once."""

    endpoint: str
    source_addresses: Tuple[int, ...]
    target_addresses: Tuple[int, ...]
    sizes: Tuple[int, ...]
    ranges: Tuple[TransferBatchRange, ...] = ()

    def __post_init__(self):
        _checks.text(self.endpoint, "endpoint of a batch")
        for name in ("source_addresses", "target_addresses", "sizes"):
            object.__setattr__(self, name, _checks.integers(getattr(self, name), f"{name} of a batch", 1))
        if not self.sizes or not len(self.sizes) == len(self.source_addresses) == len(self.target_addresses):
            raise ValueError("addresses and sizes of a batch differ in number, or are empty")
        found = _checks.items(self.ranges, "ranges of a batch", TransferBatchRange)
        if not found:
            copies = zip(self.source_addresses, self.target_addresses, self.sizes)
            found = tuple(TransferBatchRange(of, size, to, size, (0,), (0,), (size,)) for of, to, size in copies)
        object.__setattr__(self, "ranges", found)
        if _flat(found) != (self.source_addresses, self.target_addresses, self.sizes):
            raise ValueError("ranges of a batch are not those of its addresses")

    @classmethod
    def from_ranges(cls, *, endpoint, ranges) -> "TransferBatch":
        """Returns a batch of ranges."""
        return cls(endpoint, *_flat(tuple(ranges)), tuple(ranges))

    @property
    def operation_count(self) -> int:
        """Returns the number of copies."""
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        """Returns the number of bytes."""
        return sum(self.sizes)


def _flat(ranges):
    of, to = (tuple(at for one in ranges for at in one.addresses(side)) for side in ("source", "target"))
    return of, to, tuple(size for one in ranges for size in one.sizes)


@dataclass(frozen=True)
class TransferBatchReceipt:
    """A batch that is complete."""

    endpoint: str
    direction: TransferDirection
    operation_count: int
    nbytes: int


@dataclass(frozen=True)
class BufferRegistrationLease:
    """What a peer says: that the allocation of a fragment is registered with its engine, for as long as a lease."""

    fragment_id: RuntimeFragmentId
    worker_id: str
    device: str
    address: int
    nbytes: int
    itemsize: int
    local_shape: Tuple[int, ...]
    strides_bytes: Tuple[int, ...]
    storage_address: int
    storage_nbytes: int
    storage_offset_bytes: int
    lease_generation: int
    runtime_lease_id: Optional[LeaseId] = None

    def __post_init__(self):
        for name in ("fragment_id", "worker_id", "device"):
            _checks.text(getattr(self, name), f"registration {name}")
        for name in ("address", "nbytes", "itemsize", "storage_address", "storage_nbytes"):
            _checks.u64(getattr(self, name), f"registration {name}", 1)
        for name in ("storage_offset_bytes", "lease_generation"):
            _checks.u64(getattr(self, name), f"registration {name}")
        for name in ("local_shape", "strides_bytes"):
            object.__setattr__(self, name, _checks.integers(getattr(self, name), f"registration {name}", 1))
        if not self.local_shape or len(self.local_shape) != len(self.strides_bytes):
            raise ValueError("registration local_shape and strides_bytes differ in number, or are empty")
        if self.address != self.storage_address + self.storage_offset_bytes:
            raise ValueError("a registration's address is not at its offset in the allocation")
        if self.storage_offset_bytes + self.nbytes > self.storage_nbytes:
            raise ValueError("a registration exceeds its allocation")
        if self.runtime_lease_id is not None:
            _checks.text(self.runtime_lease_id, "registration runtime_lease_id")

    @classmethod
    def from_fragment(cls, fragment, *, lease_generation, runtime_lease_id) -> "BufferRegistrationLease":
        """Returns the registration of a fragment of a binding."""
        names = [one.name for one in fields(cls)][:-2]
        values = {name: getattr(fragment, name) for name in names}
        return cls(**values, lease_generation=lease_generation, runtime_lease_id=runtime_lease_id)


__all__ = [
    "BufferRegistrationLease",
    "TransferBatch",
    "TransferBatchRange",
    "TransferBatchReceipt",
    "TransferDirection",
]
