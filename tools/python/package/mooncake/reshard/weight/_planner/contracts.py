"""Plans: which bytes of which fragment go where in which other one."""

from dataclasses import dataclass, field
from itertools import product
from typing import Any, Optional, Tuple

from mooncake.reshard import _checks
from mooncake.reshard.contracts import ParticipantId, PlacementFragmentId, PlacementId, ResourceId, RevisionId, TensorId
from mooncake.reshard.geometry import box_contains, regions_exactly_cover
from mooncake.reshard.weight._planner import geometry
from mooncake.reshard.weight.placement import WeightPlacementManifest
from mooncake.reshard.weight.storage_manifest import (
    StoredFragmentSnapshot,
    StoredManifestIdentity,
    StoredWeightManifest,
    validate_weight_manifest_snapshot,
)
from mooncake.reshard.weight.types import ParallelRank, PlacementFragment, TensorDescriptor
from mooncake.reshard.weight.validation import grouped


@dataclass(frozen=True)
class PipelineRouteGroup:
    """Operations from one pipeline stage to another."""

    source_pp: Optional[int]
    source_pipeline_stage_id: Optional[int]
    target_pp: int
    target_pipeline_stage_id: Optional[int]
    operation_indices: Tuple[int, ...]

    def __post_init__(self):
        for name in ("source_pp", "source_pipeline_stage_id", "target_pipeline_stage_id"):
            _checks.optional(getattr(self, name), f"pipeline route {name}")
        _checks.integer(self.target_pp, "pipeline route target_pp", 0)
        indices = tuple(_checks.integer(index, "an index of a pipeline route", 0) for index in self.operation_indices)
        _checks.unique(indices, "index of a pipeline route")
        object.__setattr__(self, "operation_indices", indices)


@dataclass(frozen=True)
class PlanningLimits:
    """Limits of a plan, and of the copies that it becomes."""

    max_transfer_regions: int = 1_000_000
    max_segments_per_region: int = 1_000_000
    max_total_lowered_segments: int = 10_000_000

    def __post_init__(self):
        for name in self.__dataclass_fields__:
            _checks.integer(getattr(self, name), f"planning limit {name}", 1)

    def check(self, regions):
        """ValueError if regions are beyond a limit."""
        if len(regions) > self.max_transfer_regions:
            raise ValueError(f"the plan exceeds max_transfer_regions: {self.max_transfer_regions}")
        total = 0
        for region in regions:
            if region.segment_count > self.max_segments_per_region:
                raise ValueError(f"a region exceeds max_segments_per_region: {region.segment_count}")
            total += region.segment_count
            if total > self.max_total_lowered_segments:
                raise ValueError(f"the plan exceeds max_total_lowered_segments: {self.max_total_lowered_segments}")


@dataclass(frozen=True)
class TransferRegion:
    """Strided copy of a box from one fragment to another: `inner_bytes` at a time, in loops from the outermost on."""

    tensor_id: TensorId
    source: Any
    target: Any
    overlap_offset: Tuple[int, ...]
    overlap_shape: Tuple[int, ...]
    source_base_offset: int
    target_base_offset: int
    inner_bytes: int
    outer_loop_counts: Tuple[int, ...]
    source_strides: Tuple[int, ...]
    target_strides: Tuple[int, ...]

    def __post_init__(self):
        for name, least in (
            ("overlap_offset", 0),
            ("overlap_shape", 1),
            ("outer_loop_counts", 1),
            ("source_strides", 0),
            ("target_strides", 0),
        ):
            object.__setattr__(self, name, _checks.integers(getattr(self, name), f"transfer region {name}", least))
        _checks.text(self.tensor_id, "transfer region tensor_id")
        if {self.source.tensor_id, self.target.tensor_id} != {self.tensor_id}:
            raise ValueError("a transfer region is of fragments of another tensor")
        dims = len(self.overlap_offset)
        if not dims or {len(self.overlap_shape), len(self.source.global_offset), len(self.target.global_offset)} != {
            dims
        }:
            raise ValueError("logical rank mismatch of a transfer region")
        for side, one in (("source", self.source), ("target", self.target)):
            if not box_contains(one.global_offset, one.local_shape, self.overlap_offset, self.overlap_shape):
                raise ValueError(f"a transfer region exceeds its {side} logical fragment")
        for name, least in (("source_base_offset", 0), ("target_base_offset", 0), ("inner_bytes", 1)):
            _checks.integer(getattr(self, name), f"transfer region {name}", least)
        if not len(self.outer_loop_counts) == len(self.source_strides) == len(self.target_strides):
            raise ValueError("outer loop rank mismatch of a transfer region")
        found = geometry.loops(self.source, self.target, self.overlap_offset, self.overlap_shape)
        mine = (self.source_base_offset, self.target_base_offset, self.inner_bytes)
        if (*mine, self.outer_loop_counts, self.source_strides, self.target_strides) != found:
            raise ValueError("loop geometry of a transfer region is not canonical: it does not match the overlap")

    @classmethod
    def between(cls, source, target, box):
        """Returns the copy of a box."""
        return cls(target.tensor_id, source, target, *box, *geometry.loops(source, target, *box))

    @property
    def segment_count(self):
        """Returns the number of contiguous copies."""
        count = 1
        for loop in self.outer_loop_counts:
            count *= loop
        return count

    @property
    def total_bytes(self):
        """Returns the number of bytes."""
        return self.inner_bytes * self.segment_count

    @property
    def source_offset(self):
        """Returns the first byte of the source."""
        return self.source_base_offset

    @property
    def target_offset(self):
        """Returns the first byte of the target."""
        return self.target_base_offset

    @property
    def nbytes(self):
        """Returns the bytes of one contiguous copy."""
        return self.inner_bytes

    @property
    def repeat(self):
        """Returns the number of contiguous copies."""
        return self.segment_count

    @property
    def source_stride(self):
        """Returns the one stride of the source, or 0 without a loop; ValueError for several loops."""
        return _only(self.source_strides)

    @property
    def target_stride(self):
        """Returns the one stride of the target, or 0 without a loop; ValueError for several loops."""
        return _only(self.target_strides)

    def validate_bounds(self):
        """ValueError if a copy is past the end of a fragment."""
        sides = (
            (self.source, self.source_base_offset, self.source_strides),
            (self.target, self.target_base_offset, self.target_strides),
        )
        for fragment, base, strides in sides:
            last = sum((count - 1) * stride for count, stride in zip(self.outer_loop_counts, strides))
            if base + last + self.inner_bytes > fragment.nbytes:
                raise ValueError(f"a transfer region exceeds the fragment {fragment.fragment_id}")

    def iter_segments(self, *, max_segments):
        """Yields source offset, target offset and length of each contiguous copy; ValueError for more than so many."""
        _checks.integer(max_segments, "max_segments", 1)
        if self.segment_count > max_segments:
            raise ValueError(f"a transfer region exceeds max_segments: {self.segment_count}, {max_segments}")
        for indices in product(*map(range, self.outer_loop_counts)):
            source = sum(index * stride for index, stride in zip(indices, self.source_strides))
            target = sum(index * stride for index, stride in zip(indices, self.target_strides))
            yield self.source_base_offset + source, self.target_base_offset + target, self.inner_bytes


def _only(strides):
    if len(strides) > 1:
        raise ValueError(f"a transfer region has {len(strides)} loops, and no single stride")
    return strides[0] if strides else 0


LogicalTransferRegion = TransferRegion
LogicalTransferOperation = TransferRegion
#: Copies of fragments that have memory; of those of a `StoredLoadOperation`, only the target has.
ExecutableTransferOperation = TransferRegion
LiveTransferOperation = TransferRegion
StoredLoadOperation = TransferRegion
#: Coordinates along the axes along which only some ranks have a tensor.
RuntimeTensorOwner = Tuple[Tuple[str, int], ...]


def routes(operations):
    """Returns operations by pipeline stages; those of objects of a store have no source stage."""
    stored = lambda one: isinstance(one, StoredFragmentSnapshot)
    place = lambda one: (None, None) if stored(one) else (one.rank.pp, one.pipeline_stage_id)
    route = lambda index: (*place(operations[index].source), *place(operations[index].target))
    found = grouped(range(len(operations)), route)
    order = lambda key: [-1 if number is None else number for number in key]
    return tuple(PipelineRouteGroup(*key, tuple(found[key])) for key in sorted(found, key=order))


@dataclass(frozen=True)
class PlacementExecutorPlan:
    """A participant that has a part in a plan, with all its fragments."""

    placement_id: PlacementId
    participant_id: ParticipantId
    rank: ParallelRank
    placement_fragment_ids: Tuple[PlacementFragmentId, ...]

    def __post_init__(self):
        object.__setattr__(self, "placement_fragment_ids", tuple(self.placement_fragment_ids))
        if not self.placement_id or not self.participant_id or not self.placement_fragment_ids:
            raise ValueError("identifiers of a placement executor must not be empty")
        _checks.unique(self.placement_fragment_ids, "fragment of a placement executor")


@dataclass(frozen=True)
class LogicalTransferPlan:
    """Copies that fill all fragments of the target's participants, from a placement or from objects of a store."""

    resource_id: ResourceId
    revision: RevisionId
    source_placement: Optional[WeightPlacementManifest]
    target_placement: WeightPlacementManifest
    source_tensors: Tuple[TensorDescriptor, ...]
    target_tensors: Tuple[TensorDescriptor, ...]
    operations: Tuple[TransferRegion, ...]
    source_manifest: Optional[StoredWeightManifest] = None
    planning_limits: PlanningLimits = field(default_factory=PlanningLimits)
    source_executors: Tuple[PlacementExecutorPlan, ...] = ()
    target_executors: Tuple[PlacementExecutorPlan, ...] = ()
    source_manifest_identity: Optional[StoredManifestIdentity] = field(init=False)

    def __post_init__(self):
        for name in ("source_tensors", "target_tensors", "operations", "source_executors", "target_executors"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.resource_id or not self.revision:
            raise ValueError("identifiers of a transfer plan must not be empty")
        _checks.instance(self.target_placement, "target placement", WeightPlacementManifest)
        _checks.instance(self.planning_limits, "planning_limits", PlanningLimits)
        self._check_source()
        kind = PlacementFragment if self.source_placement is not None else StoredFragmentSnapshot
        for one in _checks.items(self.operations, "operations of a transfer plan", TransferRegion):
            if not isinstance(one.target, PlacementFragment) or not isinstance(one.source, kind):
                raise ValueError("an operation of a transfer plan is not between its source and its target")
            one.validate_bounds()
        self.planning_limits.check(self.operations)
        executors = (*self.source_executors, *self.target_executors)
        _checks.items(executors, "executors of a transfer plan", PlacementExecutorPlan)
        self.validate_source_manifest_snapshot()
        self._check_side("target", self.target_placement, self.target_executors)
        selected = {name for one in self.target_executors for name in one.placement_fragment_ids}
        by_target = grouped(self.operations, lambda one: one.target.fragment_id)
        for fragment in self.target_placement.fragments:
            name = fragment.fragment_id
            if name in selected and not regions_exactly_cover(fragment, by_target.get(name, ())):
                raise ValueError(f"logical target fragment is not fully covered: {name}")
        self._check_target_tensors()
        self.validate_source_placement_snapshot()

    def _check_source(self):
        sources = ((self.source_placement, WeightPlacementManifest), (self.source_manifest, StoredWeightManifest))
        given = [_checks.instance(one, "source of a plan", kind) for one, kind in sources if one is not None]
        if len(given) != 1:
            raise ValueError("a transfer plan has exactly one source: a placement or a manifest")
        identity = None
        if self.source_manifest is not None:
            object.__setattr__(self, "source_manifest", validate_weight_manifest_snapshot(self.source_manifest))
            identity = self.source_manifest.manifest_identity
        object.__setattr__(self, "source_manifest_identity", identity)
        for one in (given[0], self.target_placement):
            if (one.resource_id, one.revision) != (self.resource_id, self.revision):
                raise ValueError("identity of a transfer plan's source or target differs")
        if given[0].weight_generation != self.target_placement.weight_generation:
            raise ValueError("weight_generation differs between source and target of a transfer plan")

    def _check_target_tensors(self):
        names, tensors = {one.participant_id for one in self.target_executors}, {}
        for part in self.target_placement.parts:
            if part.participant_id in names:
                tensors.update((tensor.tensor_id, tensor) for tensor in part.tensors)
        if self.target_tensors != tuple(sorted(tensors.values(), key=lambda one: one.tensor_id)):
            raise ValueError("logical target tensor catalog differs from the placement")

    def _check_side(self, side, placement, executors):
        """ValueError if executors and operations are not of the placement's participants and fragments."""
        if not executors:
            raise ValueError(f"the plan has no {side} executor metadata")
        parts = {part.participant_id: part for part in placement.parts}
        owners = {
            fragment.fragment_id: (part.participant_id, fragment)
            for part in placement.parts
            for fragment in part.fragments
        }
        used = set()
        for operation in self.operations:
            fragment = getattr(operation, side)
            name, known = owners.get(fragment.fragment_id, (None, None))
            if known != fragment:
                raise ValueError(f"logical plan and {side} placement fragment snapshots differ")
            used.add(name)
        _checks.unique((one.participant_id for one in executors), f"{side} executor participant")
        for one in executors:
            part = parts.get(one.participant_id)
            if part is None or one.placement_id != placement.placement_id or one.rank != part.rank:
                raise ValueError(f"logical {side} executor differs from the {side} placement")
            if one.placement_fragment_ids != tuple(sorted(fragment.fragment_id for fragment in part.fragments)):
                raise ValueError(f"logical {side} executor fragments differ from the {side} placement")
        if used != {one.participant_id for one in executors}:
            raise ValueError(f"logical {side} executors differ from the planned operations")

    def validate_source_manifest_snapshot(self):
        """ValueError if the plan reads what its manifest does not have."""
        manifest = self.source_manifest
        if manifest is None:
            return
        if validate_weight_manifest_snapshot(manifest).manifest_identity != self.source_manifest_identity:
            raise ValueError("the source manifest of the plan was changed")
        if self.source_tensors != tuple(sorted(manifest.tensors, key=lambda one: one.tensor_id)):
            raise ValueError("logical plan source tensor catalog differs from the manifest")
        known = {fragment.fragment_id: fragment for fragment in manifest.fragments}
        if any(known.get(one.source.fragment_id) != one.source for one in self.operations):
            raise ValueError("logical plan and source manifest fragment snapshots differ")

    def validate_source_placement_snapshot(self):
        """ValueError if the plan reads what its placement does not have."""
        placement = self.source_placement
        if placement is None:
            return
        if self.source_tensors != placement.tensors:
            raise ValueError("logical plan source tensor catalog differs from the placement")
        self._check_side("source", placement, self.source_executors)

    @property
    def total_bytes(self):
        """Returns the number of bytes to copy."""
        return sum(operation.total_bytes for operation in self.operations)

    @property
    def source_placement_id(self):
        """Returns the id of the source placement, if there is one."""
        return None if self.source_placement is None else self.source_placement.placement_id

    @property
    def target_placement_id(self):
        """Returns the id of the target placement."""
        return self.target_placement.placement_id

    @property
    def pipeline_routes(self):
        """Returns the operations by pipeline stages."""
        return routes(self.operations)

    def operation_indices_for_executor(self, executor, side):
        """Returns the operations that a participant reads from or writes to."""
        if side not in ("source", "target"):
            raise ValueError(f"side of an executor is source or target, not {side!r}")
        if executor not in getattr(self, f"{side}_executors"):
            raise ValueError(f"this {side} executor is not part of the plan")
        names = set(executor.placement_fragment_ids)
        found = (index for index, one in enumerate(self.operations) if getattr(one, side).fragment_id in names)
        return tuple(found)


__all__ = [
    "LogicalTransferPlan",
    "PlanningLimits",
    "PipelineRouteGroup",
    "PlacementExecutorPlan",
    "LogicalTransferOperation",
    "LogicalTransferRegion",
    "ExecutableTransferOperation",
    "LiveTransferOperation",
    "RuntimeTensorOwner",
    "StoredLoadOperation",
    "routes",
    "TransferRegion",
]
