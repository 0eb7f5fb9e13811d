"""The planner's calls."""

from mooncake.reshard import _checks
from mooncake.reshard.geometry import boxes_exactly_cover
from mooncake.reshard.weight._planner import geometry
from mooncake.reshard.weight._planner.contracts import (
    LogicalTransferPlan,
    PlacementExecutorPlan,
    PlanningLimits,
    TransferRegion,
)
from mooncake.reshard.weight._planner.ownership import Sources, check_target
from mooncake.reshard.weight.placement import WeightPlacementManifest
from mooncake.reshard.weight.storage_manifest import StoredWeightManifest
from mooncake.reshard.weight.types import ParallelRank
from mooncake.reshard.weight.validation import grouped


def plan_placement_transfer(source_placement, target_placement, *, planning_limits=None):
    """Returns the plan from one placement to another, for all participants of the target."""
    return _Planner(source_placement, target_placement, planning_limits).all()


def plan_placement_transfer_to_local_target(
    source_placement, target_placement, target_participant_id=None, *, planning_limits=None
):
    """Returns the plan for one participant of the target, which must be named unless it is the only one."""
    _checks.instance(target_placement, "target placement", WeightPlacementManifest)
    if target_participant_id is None:
        if target_placement.topology.world_size != 1:
            raise ValueError("target_participant_id is required for a target of several participants")
        target_participant_id = target_placement.parts[0].participant_id
    part = next((one for one in target_placement.parts if one.participant_id == target_participant_id), None)
    if part is None:
        raise ValueError(f"unknown target participant: {target_participant_id}")
    return _Planner(source_placement, target_placement, planning_limits).part(part)


def plan_stored_transfer_to_target_placement(source_manifest, target_placement, *, planning_limits=None):
    """Returns the plan from objects of a store to a placement."""
    _checks.instance(source_manifest, "source manifest", StoredWeightManifest)
    return _Planner(source_manifest, target_placement, planning_limits).all()


class _Planner:
    """A source and a target of one generation of the same weights."""

    def __init__(self, source, target, limits):
        self._stored = isinstance(source, StoredWeightManifest)
        if not self._stored:
            _checks.instance(source, "source placement", WeightPlacementManifest)
        _checks.instance(target, "target placement", WeightPlacementManifest)
        for name in ("resource_id", "revision", "weight_generation"):
            if getattr(source, name) != getattr(target, name):
                raise ValueError(f"source and target {name} differ")
        self._source = source
        self._target = target
        self._limits = limits or PlanningLimits()
        self._source_tensors = {tensor.tensor_id: tensor for tensor in source.tensors}

    def all(self):
        """Returns the plan for all participants."""
        tensors = {tensor.tensor_id: tensor for tensor in self._target.tensors}
        missing = sorted(set(self._source_tensors) - set(tensors))
        if missing:
            raise ValueError(f"target manifests are missing tensors: {', '.join(missing)}")
        self._check_known(tensors)
        check_target(tensors, self._target.fragments)
        return self._plan(tensors, self._target.fragments, None)

    def part(self, part):
        """Returns the plan for one participant."""
        tensors = {tensor.tensor_id: tensor for tensor in part.tensors}
        self._check_known(tensors)
        if not part.fragments:
            raise ValueError("the local target manifest has no fragments")
        return self._plan(tensors, part.fragments, part.participant_id)

    def _check_known(self, tensors):
        unknown = sorted(set(tensors) - set(self._source_tensors))
        if unknown:
            raise ValueError(f"target manifests contain unknown tensors: {', '.join(unknown)}")
        for name, tensor in tensors.items():
            source = self._source_tensors[name]
            if source.layout_fingerprint != tensor.layout_fingerprint:
                raise ValueError(f"layout mismatch for tensor {name}")
            same = ("global_shape", "dtype", "itemsize", "layer_id", "expert_id")
            if any(getattr(source, one) != getattr(tensor, one) for one in same):
                raise ValueError(f"tensor descriptor mismatch: {name}")

    def _plan(self, tensors, fragments, participant):
        regions = self._regions(fragments)
        by_name = lambda some: tuple(sorted(some, key=lambda one: one.tensor_id))
        executors = () if self._stored else _executors(self._source, regions, "source", None)
        return LogicalTransferPlan(
            resource_id=self._target.resource_id,
            revision=self._target.revision,
            source_placement=None if self._stored else self._source,
            target_placement=self._target,
            source_tensors=by_name(self._source_tensors.values()),
            target_tensors=by_name(tensors.values()),
            operations=regions,
            source_manifest=self._source if self._stored else None,
            planning_limits=self._limits,
            source_executors=executors,
            target_executors=_executors(self._target, regions, "target", participant),
        )

    def _regions(self, targets):
        """Returns the copies that fill fragments, in order."""
        sources = None if self._stored else Sources(self._source_tensors, self._source.fragments)
        by_tensor = grouped(sorted(self._source.fragments, key=_order), lambda one: one.tensor_id)
        indexes, regions = {name: geometry.BoxIndex(some) for name, some in by_tensor.items()}, []
        for target in targets:
            overlaps = []
            for some in indexes[target.tensor_id].query(target) if target.tensor_id in indexes else ():
                chosen = next((one for one in some if sources is None or sources.takes(target, one)), None)
                box = None if chosen is None else geometry._overlap_box(chosen, target)
                if box is not None:
                    overlaps.append((box, chosen))
            if len(regions) + len(overlaps) > self._limits.max_transfer_regions:
                raise ValueError(f"the plan exceeds max_transfer_regions: {self._limits.max_transfer_regions}")
            if not boxes_exactly_cover(*target.box, [box for box, _ in overlaps]):
                raise ValueError(f"target fragment is not fully covered: {target.fragment_id}")
            regions += [TransferRegion.between(source, target, box) for box, source in overlaps]
        key = lambda one: (one.target.fragment_id, one.target_offset, one.source.fragment_id, one.source_offset)
        self._limits.check(regions)
        return tuple(sorted(regions, key=key))


def _order(fragment):
    """Of source fragments with equal boxes, the first in this order is read."""
    rank = getattr(fragment, "rank", ParallelRank())
    return (rank.dp, rank.pp, rank.ep, rank.tp, getattr(fragment, "object_key", ""), fragment.fragment_id)


def _executors(placement, regions, side, participant):
    """Returns the participants of a placement that have a part in copies."""
    used, found = {getattr(region, side).fragment_id for region in regions}, []
    for part in placement.parts:
        names = tuple(sorted(fragment.fragment_id for fragment in part.fragments))
        if participant in (None, part.participant_id) and used.intersection(names):
            found.append(PlacementExecutorPlan(placement.placement_id, part.participant_id, part.rank, names))
    return tuple(sorted(found, key=lambda one: (one.rank.dp, one.rank.pp, one.rank.ep, one.rank.tp)))


__all__ = [
    "plan_placement_transfer",
    "plan_placement_transfer_to_local_target",
    "plan_stored_transfer_to_target_placement",
]
