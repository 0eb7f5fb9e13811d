"""Contracts of all resources that are resharded: ids, kinds, manifests, and where a fragment is in memory."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NewType, Optional, Protocol, Tuple

from mooncake.reshard import _checks

ResourceId = NewType("ResourceId", str)
PlacementId = NewType("PlacementId", str)
ParticipantId = NewType("ParticipantId", str)
PlacementFragmentId = NewType("PlacementFragmentId", str)
RuntimeFragmentId = NewType("RuntimeFragmentId", str)
TensorId = NewType("TensorId", str)
TopologyId = NewType("TopologyId", str)
PlacementSetId = NewType("PlacementSetId", str)
RevisionId = NewType("RevisionId", str)
RuntimeInstanceId = NewType("RuntimeInstanceId", str)
LeaseId = NewType("LeaseId", str)
StoredFragmentSnapshotId = NewType("StoredFragmentSnapshotId", str)
#: The name that 0.3.13 has for it.
StoredFragmentId = StoredFragmentSnapshotId


class ResourceKind(str, Enum):
    """What a resource is."""

    MODEL_WEIGHT = "model_weight"
    KV_CACHE = "kv_cache"


class ResourceManifest(Protocol):
    """Description of a resource."""

    @property
    def resource_id(self) -> ResourceId: ...

    @property
    def resource_kind(self) -> ResourceKind: ...


class PlacementManifest(ResourceManifest, Protocol):
    """Which participant has which part of a resource, without addresses."""

    @property
    def placement_id(self) -> PlacementId: ...

    @property
    def digest(self) -> str: ...


class RuntimeBindingManifest(ResourceManifest, Protocol):
    """Where a participant has its part of a placement, for as long as a lease lasts."""

    @property
    def placement_id(self) -> PlacementId: ...

    @property
    def placement_digest(self) -> str: ...

    @property
    def instance_id(self) -> RuntimeInstanceId: ...

    @property
    def generation(self) -> int: ...

    @property
    def lease_id(self) -> LeaseId: ...


class StoredResourceManifest(ResourceManifest, Protocol):
    """A resource in a store."""

    namespace: str
    group_id: str
    manifest_key: str
    created_at: str


def validate_resource_binding_identity(placement, binding):
    """ValueError if a binding is not of exactly this placement."""
    pairs = {
        "resource_kind": (placement.resource_kind, binding.resource_kind),
        "resource_id": (placement.resource_id, binding.resource_id),
        "placement_id": (placement.placement_id, binding.placement_id),
        "placement digest": (placement.digest, binding.placement_digest),
    }
    for name, (one, other) in pairs.items():
        if one != other:
            raise ValueError(f"{name} of the placement and of the runtime binding differ")


@dataclass(frozen=True)
class RuntimeBindingFragment:
    """Memory of one fragment: a contiguous view of an allocation, which `owner` keeps in this process."""

    placement_fragment_id: PlacementFragmentId
    fragment_id: RuntimeFragmentId
    address: int
    nbytes: int
    worker_id: str
    endpoint: str
    device: str
    itemsize: int
    local_shape: Tuple[int, ...]
    strides_bytes: Tuple[int, ...]
    storage_address: int
    storage_nbytes: int
    storage_offset_bytes: int
    owner: Optional[object] = field(default=None, compare=False, repr=False)

    def __post_init__(self):
        for name in ("placement_fragment_id", "fragment_id", "worker_id", "endpoint", "device"):
            _checks.text(getattr(self, name), name)
        _range(self.address, self.nbytes)
        _checks.integer(self.itemsize, "runtime itemsize", 1)
        shape = self._numbers("local_shape", 1)
        steps = self._numbers("strides_bytes", 0)
        if len(steps) != len(shape):
            raise ValueError("the runtime stride has another rank than local_shape")
        if any(extent > 1 and step == 0 for extent, step in zip(shape, steps)):
            raise ValueError("a runtime stride of 0 along more than one element")
        # Along a single element the distance to the next has no meaning.
        usual = _checks.strides(shape, self.itemsize)
        steps = tuple(plain if extent == 1 else step for extent, step, plain in zip(shape, steps, usual))
        object.__setattr__(self, "local_shape", shape)
        object.__setattr__(self, "strides_bytes", steps)
        _range(self.storage_address, self.storage_nbytes)
        _checks.u64(self.storage_offset_bytes, "storage_offset_bytes")
        if self.storage_offset_bytes > _checks.MOST - self.storage_address:
            raise ValueError("a runtime address must fit in 64-bit numbers")
        if self.address != self.storage_address + self.storage_offset_bytes:
            raise ValueError("the runtime address must equal storage_address plus storage_offset_bytes")
        if self.storage_offset_bytes > self.storage_nbytes - self.nbytes:
            raise ValueError("the runtime view exceeds storage allocation bounds")

    def _numbers(self, name, least):
        value = getattr(self, name)
        if type(value) not in (tuple, list):
            raise ValueError(f"runtime {name} must be a tuple or list")
        return _checks.integers(value, f"runtime {name}", least)

    def __reduce__(self):
        # The owner keeps memory of this process, and means nothing in another one.
        names = [name for name in self.__dataclass_fields__ if name != "owner"]
        return type(self), tuple(getattr(self, name) for name in names)


def _range(address, nbytes):
    _checks.u64(address, "address", 1)
    _checks.u64(nbytes, "nbytes", 1)
    if nbytes > _checks.MOST - address:
        raise ValueError("an address range must fit in 64-bit numbers")


__all__ = [
    "LeaseId",
    "ParticipantId",
    "PlacementFragmentId",
    "PlacementId",
    "PlacementManifest",
    "PlacementSetId",
    "ResourceId",
    "ResourceKind",
    "ResourceManifest",
    "RevisionId",
    "RuntimeBindingManifest",
    "RuntimeBindingFragment",
    "RuntimeFragmentId",
    "RuntimeInstanceId",
    "StoredFragmentId",
    "StoredFragmentSnapshotId",
    "TensorId",
    "TopologyId",
    "StoredResourceManifest",
    "validate_resource_binding_identity",
]
