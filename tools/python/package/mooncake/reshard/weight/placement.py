"""A complete placement of a model's weights."""

import hashlib
from dataclasses import asdict, dataclass, field
from typing import Optional, Sequence, Tuple

from mooncake.reshard import _checks
from mooncake.reshard._topology import check_parts
from mooncake.reshard.contracts import PlacementId, PlacementSetId, ResourceId, ResourceKind, RevisionId
from mooncake.reshard.weight import validation
from mooncake.reshard.weight.part import WeightPlacementPart
from mooncake.reshard.weight.topology import ParallelTopology
from mooncake.reshard.weight.types import PlacementFragment, TensorDescriptor


@dataclass(frozen=True, init=False)
class WeightPlacementManifest:
    """Which participant has which boxes of which tensors, of one generation of weights; complete, without addresses.
    Its id follows from the rest."""

    resource_id: ResourceId
    placement_id: PlacementId
    revision: RevisionId
    weight_generation: int
    placement_set_id: PlacementSetId
    topology: ParallelTopology
    parts: Tuple[WeightPlacementPart, ...]
    tensors: Tuple[TensorDescriptor, ...]
    fragments: Tuple[PlacementFragment, ...]
    _digest: Optional[str] = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        *,
        resource_id: ResourceId,
        revision: RevisionId,
        weight_generation: int,
        placement_set_id: PlacementSetId,
        topology: ParallelTopology,
        parts: Tuple[WeightPlacementPart, ...],
        placement_id: Optional[PlacementId] = None,
    ):
        shared = {
            "resource_id": _checks.text(resource_id, "resource_id"),
            "revision": _checks.text(revision, "revision"),
            "weight_generation": _checks.u64(weight_generation, "weight_generation"),
            "placement_set_id": _checks.text(placement_set_id, "placement_set_id"),
        }
        _checks.instance(topology, "topology", ParallelTopology)
        parts = _checks.items(parts, "WeightPlacementManifest parts", WeightPlacementPart)
        parts = tuple(sorted(parts, key=lambda part: part.participant_id))
        check_parts(parts, topology, shared)
        tensors = {}
        for tensor in (tensor for part in parts for tensor in part.tensors):
            if tensors.setdefault(tensor.tensor_id, tensor) != tensor:
                raise ValueError(f"placement part tensor descriptor mismatch: {tensor.tensor_id}")
        tensors = tuple(sorted(tensors.values(), key=lambda one: one.tensor_id))
        fragments = (fragment for part in parts for fragment in part.fragments)
        fragments = tuple(sorted(fragments, key=lambda one: one.placement_fragment_id))
        validation.check_fragments(tensors, fragments)
        validation.check_alias_groups(tensors, fragments)
        validation.check_complete(tensors, fragments, topology)
        found = {**shared, "topology": topology, "parts": parts, "tensors": tensors, "fragments": fragments}
        for name, value in {**found, "_digest": None}.items():
            object.__setattr__(self, name, value)
        known = _checks.identity({"schema": "complete-weight-placement", **self._content()})
        if placement_id is not None and _checks.text(placement_id, "placement_id") != known:
            raise ValueError("placement_id does not match the canonical logical content")
        object.__setattr__(self, "placement_id", known)

    def _content(self):
        part = lambda one: {
            "participant_id": one.participant_id,
            "rank": asdict(one.rank),
            "fragments": [fragment.to_json() for fragment in one.fragments],
        }
        return {
            "resource_id": self.resource_id,
            "revision": self.revision,
            "weight_generation": self.weight_generation,
            "placement_set_id": self.placement_set_id,
            "topology": self.topology.to_json(),
            "tensors": [tensor.to_json() for tensor in self.tensors],
            "parts": [part(one) for one in self.parts],
        }

    def to_json(self):
        """Returns the placement as JSON."""
        return {**self._content(), "resource_kind": self.resource_kind.value, "placement_id": self.placement_id}

    @property
    def resource_kind(self) -> ResourceKind:
        """Returns the kind: weights."""
        return ResourceKind.MODEL_WEIGHT

    @property
    def digest(self) -> str:
        """Returns the SHA-256 of the JSON form."""
        if self._digest is None:
            from mooncake.reshard.weight import serde

            digest = hashlib.sha256(serde.weight_placement_to_json(self).encode()).hexdigest()
            object.__setattr__(self, "_digest", digest)
        return self._digest

    @classmethod
    def from_fragments(
        cls,
        *,
        resource_id: ResourceId,
        revision: RevisionId,
        weight_generation: int,
        placement_set_id: PlacementSetId,
        topology: ParallelTopology,
        tensors: Sequence[TensorDescriptor],
        fragments: Sequence[PlacementFragment],
        placement_id: Optional[PlacementId] = None,
    ) -> "WeightPlacementManifest":
        """Returns the placement of fragments, each of the participant at its rank."""
        tensors = _checks.items(tensors, "placement tensors", TensorDescriptor)
        fragments = _checks.items(fragments, "placement fragments", PlacementFragment)
        by_id = {tensor.tensor_id: tensor for tensor in tensors}
        _checks.unique((tensor.tensor_id for tensor in tensors), "tensor_id in placement tensors")
        used = {fragment.tensor_id for fragment in fragments}
        for names, label in ((used - set(by_id), "unknown tensor_id"), (set(by_id) - used, "unreferenced tensor")):
            if names:
                raise ValueError(f"a global placement contains an {label}: {min(names)}")
        names = {one.rank: one.participant_id for one in topology.participants}
        by_rank = validation.grouped(fragments, lambda one: one.rank)
        for rank, some in by_rank.items():
            if rank not in names:
                raise ValueError(f"placement fragment rank has no topology participant: {some[0].fragment_id}")
        shared = {
            "resource_id": resource_id,
            "revision": revision,
            "weight_generation": weight_generation,
            "placement_set_id": placement_set_id,
        }
        parts = []
        for rank, name in names.items():
            some = tuple(by_rank.get(rank, ()))
            local = tuple(by_id[one] for one in sorted({fragment.tensor_id for fragment in some}))
            made = {"topology_id": topology.topology_id, "participant_id": name, "rank": rank}
            parts.append(WeightPlacementPart(**shared, **made, tensors=local, fragments=some))
        return cls(**shared, topology=topology, parts=tuple(parts), placement_id=placement_id)


__all__ = ["WeightPlacementManifest"]
