"""Weights under another parallel layout: placements, plans against plain slicing, and reads of published weights."""

import contextlib
import itertools
import json
import random
import unittest

import bed
from kvplane.p2p import ObjectStore, Part
from mooncake.reshard import geometry
from mooncake.reshard.weight import (
    OwnershipAxis,
    ParallelRank,
    ParallelTopology,
    PlacementFragment,
    PlanningLimits,
    ReplicatedAxis,
    SplitAxis,
    StoredFragment,
    TensorDescriptor,
    TopologyParticipant,
    WeightManifest,
    WeightPlacementManifest,
    execute_local_plan,
    plan_placement_transfer,
    plan_placement_transfer_to_local_target,
    plan_stored_transfer_to_target_placement,
    read_placement,
    weight_placement_from_json,
    weight_placement_to_json,
)

SHAPES = {"a": (24, 12, 4), "b": (24, 12, 4), "norm": (12,)}
ITEM = 2


def sides(extent, count):
    """Cuts an extent into parts: begin and length of each."""
    return [(extent * part // count, extent * (part + 1) // count - extent * part // count) for part in range(count)]


def tensor(name):
    """A matrix for each expert, split along ep and tp, or a vector that all have; each on one pipeline stage."""
    layer = {"a": 0, "b": 1}.get(name, 0)
    if name == "norm":
        axes = (ReplicatedAxis("dp"), OwnershipAxis("pp"), ReplicatedAxis("ep"), ReplicatedAxis("tp"))
    else:
        axes = (ReplicatedAxis("dp"), OwnershipAxis("pp"), SplitAxis("ep", 0), SplitAxis("tp", 1))
    dims = () if name == "norm" else (0, 1)
    return TensorDescriptor(name, SHAPES[name], "bfloat16", ITEM, dims, "plain", axes, layer_id=layer)


def placement(tp=1, pp=1, ep=1, dp=1, name="set"):
    """The placement of all tensors under a layout."""
    ranks = [ParallelRank(d, t, p, e) for d, p, e, t in itertools.product(*map(range, (dp, pp, ep, tp)))]
    people = [TopologyParticipant(f"d{r.dp}-p{r.pp}-e{r.ep}-t{r.tp}", r) for r in ranks]
    topology = ParallelTopology(tp_size=tp, pp_size=pp, ep_size=ep, dp_size=dp, participants=tuple(people))
    tensors, fragments = [tensor(one) for one in SHAPES], []
    for one, rank in itertools.product(tensors, ranks):
        if rank.pp != one.layer_id % pp:
            continue
        offset, shape = [0] * len(one.global_shape), list(one.global_shape)
        for axis in one.parallel_axes:
            if isinstance(axis, SplitAxis):
                count = {"ep": ep, "tp": tp}[axis.kind]
                offset[axis.dim], shape[axis.dim] = sides(shape[axis.dim], count)[getattr(rank, axis.kind)]
        size = ITEM
        for extent in shape:
            size *= extent
        fragments.append(PlacementFragment(one.tensor_id, tuple(offset), tuple(shape), size, rank))
    return WeightPlacementManifest.from_fragments(
        resource_id="model", revision="1", weight_generation=3, placement_set_id=name, topology=topology,
        tensors=tensors, fragments=fragments,
    )  # fmt: skip


def content(fragment):
    """A fragment's bytes: each element is determined by its tensor and its index in it."""
    base = bed.pattern(ord(fragment.tensor_id[0]) << 32, 1 << 13)
    whole, out = SHAPES[fragment.tensor_id], bytearray()
    spans = [range(begin, begin + extent) for begin, extent in zip(fragment.global_offset, fragment.local_shape)]
    for index in itertools.product(*spans):
        at = 0
        for number, extent in zip(index, whole):
            at = at * extent + number
        out += base[at * ITEM : at * ITEM + ITEM]
    return bytes(out)


class Plans(unittest.TestCase):
    """Plans, executed in memory."""

    def check(self, source, target, plan):
        """Executes a plan and compares all bytes of the target's fragments."""
        sources = {one.fragment_id: content(one) for one in source.fragments}
        wanted = {operation.target.fragment_id: operation.target for operation in plan.operations}
        targets = {name: bytearray(one.nbytes) for name, one in wanted.items()}
        execute_local_plan(plan, sources, targets)
        for name, one in wanted.items():
            self.assertEqual(bytes(targets[name]), content(one), one)
        return wanted

    def test_layouts_in_both_directions(self):
        numbers = random.Random(7)
        sizes = lambda: {kind: numbers.choice((1, 2, 3)) for kind in ("tp", "pp", "ep", "dp")}
        for _ in range(12):
            layouts = sizes(), sizes()
            layouts = [{**one, "pp": min(one["pp"], 2)} for one in layouts]
            source, target = (placement(**one, name=name) for one, name in zip(layouts, ("source", "target")))
            wanted = self.check(source, target, plan_placement_transfer(source, target))
            self.assertEqual(set(wanted), {one.fragment_id for one in target.fragments})

    def test_one_participant_reads_only_what_it_needs(self):
        source, target = placement(tp=4, ep=2, name="source"), placement(tp=3, dp=2, name="target")
        part = target.parts[-1]
        plan = plan_placement_transfer_to_local_target(source, target, part.participant_id)
        wanted = self.check(source, target, plan)
        self.assertEqual(set(wanted), {one.fragment_id for one in part.fragments})
        self.assertEqual(plan.total_bytes, sum(one.nbytes for one in part.fragments))
        with self.assertRaisesRegex(ValueError, "unknown target participant"):
            plan_placement_transfer_to_local_target(source, target, "nobody")

    def test_objects_of_a_store_as_source(self):
        target, fragments, at = placement(tp=3, ep=2, name="target"), [], 0
        for name, shape in SHAPES.items():
            size = ITEM
            for extent in shape:
                size *= extent
            fragments.append(StoredFragment(name, name, (0,) * len(shape), shape, "g/payload/0", at, size))
            at += size
        manifest = WeightManifest(
            "default", "model", "1", 3, "g", "g/manifest", target.tensors, tuple(fragments), "2026-11-29T00:00:00Z"
        )
        self.assertEqual(WeightManifest.from_json(manifest.to_json()), manifest)
        self.check(manifest, target, plan_stored_transfer_to_target_placement(manifest, target))

    def test_limits_and_missing_buffers(self):
        source, target = placement(tp=4, name="source"), placement(tp=3, name="target")
        for limits in (PlanningLimits(max_transfer_regions=2), PlanningLimits(max_segments_per_region=3)):
            with self.assertRaisesRegex(ValueError, "exceeds max_"):
                plan_placement_transfer(source, target, planning_limits=limits)
        plan = plan_placement_transfer(source, target)
        sources = {one.fragment_id: content(one) for one in source.fragments}
        targets = {one.fragment_id: bytearray(one.nbytes) for one in target.fragments}
        some = next(iter(targets))
        for bad in ({**targets, some: bytearray(1)}, {name: one for name, one in targets.items() if name != some}):
            with self.assertRaisesRegex(ValueError, "buffer"):
                execute_local_plan(plan, sources, bad)
            self.assertFalse(any(any(one) for one in bad.values()))

    def test_json_keeps_placements_and_their_ids(self):
        one = placement(tp=2, pp=2, ep=2, dp=2)
        again = weight_placement_from_json(weight_placement_to_json(one))
        self.assertEqual((again, again.placement_id, again.digest), (one, one.placement_id, one.digest))
        changed = json.loads(weight_placement_to_json(one))
        changed["parts"][0]["fragments"][0]["local_shape"][0] -= 1
        with self.assertRaises(ValueError):
            weight_placement_from_json(json.dumps(changed))


class Boxes(unittest.TestCase):
    """Overlap of boxes against a comparison of all pairs."""

    def test_random_boxes(self):
        numbers = random.Random(3)
        for turn in range(600):
            dims = turn % 4 + 1
            box = lambda: (
                tuple(numbers.randrange(6) for _ in range(dims)),
                tuple(numbers.randrange(1, 4) for _ in range(dims)),
            )
            boxes = [box() for _ in range(numbers.randrange(6))]
            meets = lambda one, other: all(
                a < b + n and b < a + m for a, m, b, n in zip(one[0], one[1], other[0], other[1])
            )
            expected = any(meets(*pair) for pair in itertools.combinations(boxes, 2))
            self.assertIs(geometry.boxes_overlap(boxes), expected, boxes)


class Reads(unittest.TestCase):
    """A rank of the target reads what ranks of the source published."""

    def test_a_checkpoint_is_read_under_another_layout(self):
        bed.bed()
        source, target = placement(tp=4, ep=2, name="source"), placement(tp=3, pp=2, name="target")
        with contextlib.ExitStack() as stack:
            writer, reader = stack.enter_context(ObjectStore()), stack.enter_context(ObjectStore())
            parts = {}
            for part in source.parts:
                name = f"py/placement/{part.participant_id}"
                writer.register(name, [bytearray(b"".join(map(content, part.fragments)))])
                parts[part.participant_id] = Part(name)
            for part in target.parts:
                memory = bytearray(sum(one.nbytes for one in part.fragments))
                read_placement(reader, source, target, part.participant_id, parts, memory, deadline=60)
                self.assertEqual(bytes(memory), b"".join(map(content, part.fragments)))
            with self.assertRaisesRegex(ValueError, "unknown target participant"):
                read_placement(reader, source, target, "nobody", parts, bytearray(8))
