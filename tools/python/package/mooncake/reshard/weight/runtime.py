"""Where a participant has its part of a placement in memory."""

from dataclasses import dataclass
from typing import Tuple

from mooncake.reshard import _checks
from mooncake.reshard.contracts import (
    LeaseId,
    ParticipantId,
    PlacementId,
    ResourceId,
    ResourceKind,
    RevisionId,
    RuntimeBindingFragment,
    RuntimeInstanceId,
)


@dataclass(frozen=True)
class WeightRuntimeBindingManifest:
    """Addresses of one participant's fragments, as long as its lease lasts."""

    resource_id: ResourceId
    placement_id: PlacementId
    placement_digest: str
    instance_id: RuntimeInstanceId
    generation: int
    lease_id: LeaseId
    revision: RevisionId
    participant_id: ParticipantId
    fragments: Tuple[RuntimeBindingFragment, ...]

    @property
    def resource_kind(self) -> ResourceKind:
        """Returns the kind: weights."""
        return ResourceKind.MODEL_WEIGHT

    def __post_init__(self):
        for name in ("resource_id", "placement_id", "instance_id", "lease_id", "revision", "participant_id"):
            _checks.text(getattr(self, name), name)
        _checks.digest_text(self.placement_digest, "placement_digest")
        _checks.u64(self.generation, "generation")
        found = _checks.items(self.fragments, "WeightRuntimeBindingManifest fragments", RuntimeBindingFragment)
        found = tuple(sorted(found, key=lambda one: one.placement_fragment_id))
        _checks.unique((one.placement_fragment_id for one in found), "placement fragment in runtime binding")
        _checks.unique((one.fragment_id for one in found), "runtime fragment_id in runtime binding")
        object.__setattr__(self, "fragments", found)


__all__ = ["WeightRuntimeBindingManifest"]
