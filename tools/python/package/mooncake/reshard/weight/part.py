"""What one participant has of a placement."""

from dataclasses import dataclass
from typing import Tuple

from mooncake.reshard import _checks
from mooncake.reshard.contracts import ParticipantId, PlacementSetId, ResourceId, RevisionId, TopologyId
from mooncake.reshard.weight.types import ParallelRank, PlacementFragment, TensorDescriptor
from mooncake.reshard.weight.validation import check_fragments


@dataclass(frozen=True)
class WeightPlacementPart:
    """Tensors and fragments of one participant."""

    resource_id: ResourceId
    revision: RevisionId
    weight_generation: int
    placement_set_id: PlacementSetId
    topology_id: TopologyId
    participant_id: ParticipantId
    rank: ParallelRank
    tensors: Tuple[TensorDescriptor, ...]
    fragments: Tuple[PlacementFragment, ...]

    def __post_init__(self):
        for name in ("resource_id", "revision", "placement_set_id", "topology_id", "participant_id"):
            _checks.text(getattr(self, name), name)
        _checks.u64(self.weight_generation, "weight_generation")
        _checks.instance(self.rank, "the rank of a placement part", ParallelRank)
        tensors = _checks.items(self.tensors, "WeightPlacementPart tensors", TensorDescriptor)
        fragments = _checks.items(self.fragments, "WeightPlacementPart fragments", PlacementFragment)
        if any(fragment.rank != self.rank for fragment in fragments):
            raise ValueError("the rank of a fragment differs from that of its part")
        used = {fragment.tensor_id for fragment in fragments}
        for tensor in tensors:
            if tensor.tensor_id not in used:
                raise ValueError(f"a placement part contains an unreferenced tensor: {tensor.tensor_id}")
        object.__setattr__(self, "tensors", tuple(sorted(tensors, key=lambda one: one.tensor_id)))
        fragments = tuple(sorted(fragments, key=lambda one: one.placement_fragment_id))
        object.__setattr__(self, "fragments", fragments)
        check_fragments(self.tensors, self.fragments)


__all__ = ["WeightPlacementPart"]
