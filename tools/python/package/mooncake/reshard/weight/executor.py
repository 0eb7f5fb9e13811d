"""Execution of plans: copies between memory of this process, and reads from the ranks that published their weights."""

from mooncake.reshard import _checks
from mooncake.reshard.weight._planner.contracts import LogicalTransferPlan
from mooncake.reshard.weight.placement import WeightPlacementManifest
from mooncake.reshard.weight.serde import weight_placement_to_json


def execute_local_plan(plan, sources, targets):
    """Copies a plan's bytes between buffers of this process.

    `sources` and `targets` map ids of fragments to contiguous buffers of their lengths; those of an object of a store,
    to the bytes of the fragment. ValueError, before a byte is copied, if one is missing or of another length.
    """
    _checks.instance(plan, "plan", LogicalTransferPlan)
    views = {}
    for side, buffers in (("source", sources), ("target", targets)):
        for operation in plan.operations:
            fragment = getattr(operation, side)
            if (side, fragment.fragment_id) in views:
                continue
            if fragment.fragment_id not in buffers:
                raise ValueError(f"the plan's {side} fragment {fragment.fragment_id} has no buffer")
            view = memoryview(buffers[fragment.fragment_id]).cast("B")
            if len(view) != fragment.nbytes:
                raise ValueError(f"the buffer of {fragment.fragment_id} has {len(view)} bytes, not {fragment.nbytes}")
            views[side, fragment.fragment_id] = view
    for operation in plan.operations:
        source, target = views["source", operation.source.fragment_id], views["target", operation.target.fragment_id]
        for of, to, size in operation.iter_segments(max_segments=operation.segment_count):
            target[to : to + size] = source[of : of + size]


def read_placement(store, source_placement, target_placement, participant_id, parts, memory, **options):
    """Reads a participant's fragments of the target into memory, from the ranks that wrote under the source's layout.

    `store` is a `kvplane.p2p.ObjectStore`; `parts` maps participants of the source to the objects, or `Part`s of
    objects, of their bytes. The fragments lie one directly behind the other, in the order of the target's part, unless
    `offsets=` has those; `deadline=` is in seconds. Returns what `ObjectStore.reshard` returns.
    """
    for name, one in (("source placement", source_placement), ("target placement", target_placement)):
        _checks.instance(one, name, WeightPlacementManifest)
    if participant_id not in {part.participant_id for part in target_placement.parts}:
        raise ValueError(f"unknown target participant: {participant_id}")
    source, target = map(weight_placement_to_json, (source_placement, target_placement))
    return store.reshard(source, target, participant_id, parts, memory, **options)


__all__ = ["execute_local_plan", "read_placement"]
