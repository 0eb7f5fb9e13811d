"""Memory of a participant with one contiguous buffer for each layer and component."""

from dataclasses import dataclass
from math import prod
from typing import Optional, Tuple

from mooncake.reshard import _checks
from mooncake.reshard.contracts import (
    ParticipantId,
    PlacementId,
    ResourceId,
    ResourceKind,
    RevisionId,
    RuntimeInstanceId,
    validate_resource_binding_identity,
)
from mooncake.reshard.kv_cache.placement import KVCachePlacementManifest
from mooncake.reshard.kv_cache.snapshot import KVCacheSnapshotDescriptor, SnapshotId
from mooncake.reshard.kv_cache.types import (
    KVCacheComponent,
    KVCacheRuntimeBuffer,
    check_apart,
    check_texts,
    placement_fragment_id,
    several,
)


@dataclass(frozen=True)
class KVCacheBufferBinding:
    """Buffer of one layer and component."""

    global_layer_id: int
    component: KVCacheComponent
    fragment: KVCacheRuntimeBuffer

    def __post_init__(self):
        _checks.u64(self.global_layer_id, "global_layer_id")
        _checks.instance(self.component, "component", KVCacheComponent)
        _checks.instance(self.fragment, "fragment", KVCacheRuntimeBuffer)


@dataclass(frozen=True)
class KVCacheRuntimeBindingManifest:
    """Buffers of one participant, for one operation: whoever owns them keeps them until it has ended."""

    resource_id: ResourceId
    placement_id: PlacementId
    placement_digest: str
    instance_id: RuntimeInstanceId
    revision: RevisionId
    participant_id: ParticipantId
    buffers: Tuple[KVCacheBufferBinding, ...]
    snapshot_id: Optional[SnapshotId] = None
    snapshot_digest: Optional[str] = None

    @property
    def resource_kind(self) -> ResourceKind:
        """Returns the kind: KV cache."""
        return ResourceKind.KV_CACHE

    def __post_init__(self):
        check_texts(self, "resource_id", "placement_id", "instance_id", "revision", "participant_id")
        _checks.digest_text(self.placement_digest, "placement_digest")
        if (self.snapshot_id is None) != (self.snapshot_digest is None):
            raise ValueError("snapshot_id and snapshot_digest must be provided together")
        if self.snapshot_id is not None:
            check_texts(self, "snapshot_id")
            _checks.digest_text(self.snapshot_digest, "snapshot_digest")
        found = several(self.buffers, "KVCacheRuntimeBindingManifest buffers", KVCacheBufferBinding)
        found = tuple(sorted(found, key=lambda one: (one.global_layer_id, one.component.value)))
        _checks.unique(((one.global_layer_id, one.component.value) for one in found), "KV-cache buffer binding")
        _checks.unique((one.fragment.placement_fragment_id for one in found), "placement fragment in runtime binding")
        _checks.unique((one.fragment.fragment_id for one in found), "runtime fragment_id in runtime binding")
        object.__setattr__(self, "buffers", found)

    def buffer(self, global_layer_id, component) -> KVCacheBufferBinding:
        """Returns a buffer; ValueError if there is none of that layer and component."""
        for one in self.buffers:
            if (one.global_layer_id, one.component) == (global_layer_id, component):
                return one
        raise ValueError(f"missing KV-cache buffer: layer={global_layer_id} component={component.value}")


#: Other name of the same class.
KVCacheRuntimeBinding = KVCacheRuntimeBindingManifest


def validate_runtime_binding(
    placement: KVCachePlacementManifest,
    binding: KVCacheRuntimeBindingManifest,
    *,
    snapshot: Optional[KVCacheSnapshotDescriptor] = None,
) -> None:
    """ValueError if a binding is not of exactly one participant's layers, contiguous and apart from each other."""
    _checks.instance(placement, "placement", KVCachePlacementManifest)
    _checks.instance(binding, "binding", KVCacheRuntimeBindingManifest)
    validate_resource_binding_identity(placement, binding)
    if placement.revision != binding.revision:
        raise ValueError("revision of the placement and of the runtime binding differ")
    if snapshot is not None:
        _checks.instance(snapshot, "snapshot", KVCacheSnapshotDescriptor)
        if (binding.snapshot_id, binding.snapshot_digest) != (snapshot.snapshot_id, snapshot.digest):
            raise ValueError("runtime binding snapshot_id or snapshot digest differs")
    part, descriptor = placement.part(binding.participant_id), placement.descriptor
    expected = {(layer, component) for layer in part.layer_ids for component in descriptor.components}
    found = {(one.global_layer_id, one.component) for one in binding.buffers}
    if expected != found:
        layer, component = min(expected ^ found)
        raise ValueError(f"runtime binding buffer membership differs: layer {layer}, {component.value}")
    for one in binding.buffers:
        fragment, label = one.fragment, f"layer {one.global_layer_id}, {one.component.value}"
        heads = {"head_start": part.head_start, "head_count": part.head_count}
        shape = (*fragment.local_shape[:1], part.head_count, descriptor.head_dim(one.component))
        checks = {
            "placement_fragment_id": placement_fragment_id(
                part.participant_id, one.global_layer_id, one.component, **heads
            ),
            "itemsize": descriptor.itemsize,
            "local_shape": shape,
            "nbytes": prod(shape) * descriptor.itemsize,
            "strides_bytes": _checks.strides(shape, descriptor.itemsize),
        }
        for name, value in checks.items():
            if getattr(fragment, name) != value:
                raise ValueError(
                    f"runtime binding {name} differs from the contiguous NHD rows of {label}: "
                    f"{getattr(fragment, name)}, not {value}"
                )
    _check_memory([binding])


def validate_runtime_bindings(placement: KVCachePlacementManifest, bindings) -> None:
    """ValueError if bindings are not of exactly the participants that have layers, apart from each other in memory."""
    found = several(bindings, "runtime bindings", KVCacheRuntimeBindingManifest)
    _checks.unique((one.participant_id for one in found), "runtime binding participant")
    by_instance = {}
    for one in found:
        validate_runtime_binding(placement, one)
        by_instance.setdefault(one.instance_id, []).append(one)
    expected = {part.participant_id for part in placement.parts if part.layer_ids}
    names = {one.participant_id for one in found}
    for some, label in ((expected - names, "missing"), (names - expected, "unknown")):
        if some:
            raise ValueError(f"{label} runtime binding participant: {min(some)}")
    for some in by_instance.values():
        _check_memory(some)


def _check_memory(bindings):
    """ValueError if buffers of one instance overlap, or are in allocations that overlap and are not the same one.
    Equal addresses of several workers or devices are different memory."""
    spaces = {}
    for fragment in (one.fragment for binding in bindings for one in binding.buffers):
        spaces.setdefault((fragment.worker_id, fragment.device), []).append(fragment)
    for (worker, device), some in spaces.items():
        where = f"of worker {worker} on {device}"
        check_apart([(one.address, one.address + one.nbytes) for one in some], f"buffers overlap: those {where}")
        allocations = {(one.storage_address, one.storage_address + one.storage_nbytes) for one in some}
        check_apart(allocations, f"each backing allocation is one, and some {where}")


__all__ = [
    "KVCacheBufferBinding",
    "KVCacheRuntimeBinding",
    "KVCacheRuntimeBindingManifest",
    "validate_runtime_binding",
    "validate_runtime_bindings",
]
