"""Bindings that were checked against their placement, and the fragments that they give addresses to."""

from dataclasses import dataclass, field, fields, replace
from typing import Mapping, Optional, Tuple

from mooncake.reshard import _checks
from mooncake.reshard.contracts import (
    LeaseId,
    ParticipantId,
    PlacementFragmentId,
    PlacementId,
    ResourceId,
    RevisionId,
    RuntimeBindingFragment,
    RuntimeInstanceId,
)
from mooncake.reshard.weight.binding import validate_runtime_binding
from mooncake.reshard.weight.placement import WeightPlacementManifest
from mooncake.reshard.weight.runtime import WeightRuntimeBindingManifest
from mooncake.reshard.weight.types import PlacementFragment


@dataclass(frozen=True)
class RuntimeBindingEvidence:
    """A binding without the owners of its memory: what may leave the process, and outlive them."""

    resource_id: ResourceId
    revision: RevisionId
    placement_id: PlacementId
    placement_digest: str
    instance_id: RuntimeInstanceId
    participant_id: ParticipantId
    generation: int
    lease_id: LeaseId
    fragments: Tuple[RuntimeBindingFragment, ...]

    def __post_init__(self):
        found = self.to_binding().fragments
        if any(one.owner is not None for one in found):
            raise ValueError("runtime binding evidence must not retain owners of allocations")
        object.__setattr__(self, "fragments", found)

    @classmethod
    def from_binding(cls, binding):
        """Returns the evidence of a binding."""
        values = {one.name: getattr(binding, one.name) for one in fields(cls)}
        return cls(**{**values, "fragments": tuple(replace(one, owner=None) for one in binding.fragments)})

    def to_binding(self) -> WeightRuntimeBindingManifest:
        """Returns the binding, without owners."""
        return WeightRuntimeBindingManifest(**{one.name: getattr(self, one.name) for one in fields(self)})


@dataclass(frozen=True, init=False)
class RuntimeBindingAttestation:
    """A binding that is exactly of a participant's fragments of a placement; ValueError if it is not."""

    placement: WeightPlacementManifest
    evidence: RuntimeBindingEvidence
    _placed: Mapping[PlacementFragmentId, PlacementFragment] = field(compare=False, repr=False)
    _bound: Mapping[PlacementFragmentId, RuntimeBindingFragment] = field(compare=False, repr=False)

    def __init__(self, placement, binding):
        _checks.instance(placement, "placement of an attestation", WeightPlacementManifest)
        _checks.instance(binding, "binding of an attestation", WeightRuntimeBindingManifest)
        validate_runtime_binding(placement, binding)
        evidence = RuntimeBindingEvidence.from_binding(binding)
        part = next(one for one in placement.parts if one.participant_id == evidence.participant_id)
        placed = {one.placement_fragment_id: one for one in part.fragments}
        bound = {one.placement_fragment_id: one for one in evidence.fragments}
        for name, value in zip(("placement", "evidence", "_placed", "_bound"), (placement, evidence, placed, bound)):
            object.__setattr__(self, name, value)

    def __reduce__(self):
        # The receiver checks it again.
        return type(self), (self.placement, self.evidence.to_binding())

    def validates(self, placement: PlacementFragment, binding: RuntimeBindingFragment) -> bool:
        """Returns true if a fragment and its memory are those of this binding."""
        name = placement.placement_fragment_id
        return self._placed.get(name) == placement and self._bound.get(name) == binding

    def worker_fragment_pairs(self, worker_id: str):
        """Returns the fragments of a worker, each with its memory."""
        found = (one for one in self.evidence.fragments if one.worker_id == worker_id)
        return tuple((self._placed[one.placement_fragment_id], one) for one in found)

    def binding_fragment(self, placement_fragment_id: PlacementFragmentId) -> RuntimeBindingFragment:
        """Returns the memory of a fragment; KeyError if it is another participant's."""
        return self._bound[placement_fragment_id]

    def bound(self, fragment: PlacementFragment) -> "BoundWeightFragment":
        """Returns a fragment with its memory; KeyError if it is another participant's."""
        one = self.evidence
        memory = self._bound[fragment.placement_fragment_id]
        return BoundWeightFragment(fragment, memory, one.instance_id, one.lease_id, one.generation, None, self)


def _of(part, name):
    return property(lambda self: getattr(getattr(self, part), name), doc=f"Returns {name} of the {part}.")


@dataclass(frozen=True)
class BoundWeightFragment:
    """A fragment of a placement in memory, for as long as a lease lasts."""

    placement: PlacementFragment
    binding: RuntimeBindingFragment
    instance_id: RuntimeInstanceId
    runtime_lease_id: LeaseId
    lease_generation: int
    owner: Optional[object] = field(default=None, compare=False, repr=False)
    attestation: Optional[RuntimeBindingAttestation] = field(default=None, compare=False, repr=False)

    def __post_init__(self):
        _checks.instance(self.placement, "placement of a bound fragment", PlacementFragment)
        _checks.instance(self.binding, "binding of a bound fragment", RuntimeBindingFragment)
        for name in ("placement_fragment_id", "nbytes"):
            if getattr(self.placement, name) != getattr(self.binding, name):
                raise ValueError(f"{name} of a bound fragment differs from its binding's")
        _checks.text(self.instance_id, "bound fragment instance_id")
        _checks.text(self.runtime_lease_id, "bound fragment runtime_lease_id")
        _checks.u64(self.lease_generation, "bound fragment lease_generation")
        if self.owner is not self.binding.owner:
            raise ValueError("owner of a bound fragment differs from its binding's")
        if self.attestation is None:
            return
        _checks.instance(self.attestation, "attestation of a bound fragment", RuntimeBindingAttestation)
        if not self.attestation.validates(self.placement, self.binding):
            raise ValueError("a bound fragment does not match its runtime binding attestation")
        one = self.attestation.evidence
        fence = (self.instance_id, self.runtime_lease_id, self.lease_generation)
        if fence != (one.instance_id, one.lease_id, one.generation):
            raise ValueError("the lease of a bound fragment differs from its attestation's")

    def __reduce__(self):
        # Memory of this process is no other's: the fragment travels without its owner.
        values = [getattr(self, one.name) for one in fields(self)]
        return type(self), tuple(None if one.name == "owner" else value for one, value in zip(fields(self), values))

    @property
    def box(self):
        """Returns offset and shape."""
        return self.placement.box

    placement_fragment_id = _of("placement", "placement_fragment_id")
    tensor_id = _of("placement", "tensor_id")
    global_offset = _of("placement", "global_offset")
    local_shape = _of("placement", "local_shape")
    rank = _of("placement", "rank")
    pipeline_stage_id = _of("placement", "pipeline_stage_id")
    aliases = _of("placement", "aliases")
    fragment_id = _of("binding", "fragment_id")
    nbytes = _of("binding", "nbytes")
    address = _of("binding", "address")
    worker_id = _of("binding", "worker_id")
    endpoint = _of("binding", "endpoint")
    device = _of("binding", "device")
    storage_address = _of("binding", "storage_address")
    storage_nbytes = _of("binding", "storage_nbytes")
    storage_offset_bytes = _of("binding", "storage_offset_bytes")


__all__ = ["BoundWeightFragment", "RuntimeBindingAttestation", "RuntimeBindingEvidence"]
