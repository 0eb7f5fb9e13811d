"""Tiled sparse matrices: reads of ranks against all entries of a matrix."""

import random
import unittest

from mooncake.reshard.geometry import box_intersection
from mooncake.reshard.weight import ParallelRank, PlacementFragment, TiledCOOLayout, plan_tiled_coo_read


def fragment(name, offset, shape):
    """A rank's box of a matrix."""
    return PlacementFragment(name, offset, shape, 2 * shape[0] * shape[1], ParallelRank())


class Writer:
    """Entries of random matrices in the order of a layout, and their directory."""

    def __init__(self, numbers, layout):
        self.layout, self.entries, self.directory = layout, [], [0]
        for record in layout.records:
            tiles = {}
            for row in range(record.local_shape[0]):
                for column in range(record.local_shape[1]):
                    if numbers.random() < 0.2:
                        at = record.global_offset[0] + row, record.global_offset[1] + column
                        tile = tuple(one // size for one, size in zip(at, layout.tile_shape))
                        tiles.setdefault(tile, []).append((record.record_index, record.tensor_id, *at))
            rows, columns = (range(o, o + n) for o, n in zip(record.tile_origin, record.tile_grid))
            for tile in ((row, column) for row in rows for column in columns):
                self.entries += tiles.get(tile, ())
                self.directory.append(len(self.entries))

    def read(self, plan):
        """What a reader gets that follows a plan: entries of each run."""
        buffer = [None] * plan.offset_buffer_elements
        for one in plan.offset_ranges:
            places = self.directory[one.source_index : one.source_index + one.count]
            buffer[one.destination_index : one.destination_index + one.count] = places
        bound = plan.bind_offsets([buffer[index] for index in plan.offset_gather_indices])
        got = [None] * bound.entry_count
        for one in bound.payload_ranges:
            some = self.entries[one.source_entry : one.source_entry + one.count]
            got[one.destination_entry : one.destination_entry + one.count] = some
        runs = zip(plan.tile_runs, bound.compact_entries, bound.counts)
        return bound, [(run, got[at : at + count]) for run, at, count in runs]


class Tiles(unittest.TestCase):
    """Plans of reads."""

    def test_each_entry_is_read_by_the_targets_that_have_it(self):
        numbers = random.Random(11)
        for turn in range(200):
            tile = (numbers.randrange(1, 6), numbers.randrange(1, 6))
            names, shapes, offsets = [], [], []
            for name in "ab"[: numbers.randrange(1, 3)]:
                # Writers cut the matrix along its columns, at any place.
                cut, width = numbers.randrange(1, 20), 21
                for offset, extent in ((0, cut), (cut, width - cut)):
                    names.append(name)
                    shapes.append((numbers.randrange(1, 20), extent))
                    offsets.append((numbers.randrange(4), offset))
            layout = TiledCOOLayout.build(names, shapes, offsets, tile_shape=tile)
            self.assertEqual(TiledCOOLayout.from_dict(layout.to_dict()), layout)
            writer = Writer(numbers, layout)
            self.assertEqual(len(writer.directory), layout.total_tiles + 1)
            boxes = {("a", (r, c), (9, 7)) for r in (0, 9) for c in (0, 7, 14)} | {("b", (2, 3), (5, 30))}
            targets = [fragment(*box) for box in numbers.sample(sorted(boxes), numbers.randrange(1, len(boxes)))]
            bound, runs = writer.read(plan_tiled_coo_read(layout, targets))
            for target in targets:
                sides = list(zip(target.global_offset, target.local_shape))
                inside = lambda one: one[1] == target.tensor_id and all(
                    begin <= at < begin + size for at, (begin, size) in zip(one[2:], sides)
                )
                got = [one for run, some in runs if run.target == target for one in some]
                self.assertEqual(len(set(got)), len(got))
                self.assertEqual(set(filter(inside, writer.entries)), set(filter(inside, got)))
                # Nothing is read of tiles that the target does not touch.
                for run, some in runs:
                    for one in some:
                        self.assertEqual(one[0], run.record.record_index)
                        begin = tuple(at // size * size for at, size in zip(one[2:], tile))
                        box = run.target.global_offset, run.target.local_shape
                        self.assertIsNotNone(box_intersection(begin, tile, *box), one)
            self.assertEqual(bound.entry_count, sum(bound.counts))

    def test_near_places_are_read_together_and_far_ones_apart(self):
        layout = TiledCOOLayout.build("a", [(4, 400)], [(0, 0)], tile_shape=(1, 1))
        near = [fragment("a", (0, 0), (1, 1)), fragment("a", (0, 60), (1, 1))]
        far = [fragment("a", (0, 0), (1, 1)), fragment("a", (0, 200), (1, 1))]
        self.assertEqual([len(plan_tiled_coo_read(layout, some).offset_ranges) for some in (near, far)], [1, 2])
        self.assertEqual(plan_tiled_coo_read(layout, near).offset_indices, (0, 1, 60, 61))
        whole = plan_tiled_coo_read(layout, [fragment("a", (1, 0), (2, 400))])
        self.assertEqual([(one.first_tile, one.last_tile) for one in whole.tile_runs], [(400, 1200)])
        self.assertTrue(plan_tiled_coo_read(layout, [fragment("b", (0, 0), (1, 1))]).empty)

    def test_bad_input(self):
        layout = TiledCOOLayout.build("ab", [(4, 4)] * 2, [(0, 0)] * 2, tile_shape=(2, 2))
        one = fragment("a", (0, 0), (2, 4))
        plan = plan_tiled_coo_read(layout, [one])
        for bad in ([1], [2, 1], [0, -1], [0, True]):
            with self.assertRaises(ValueError):
                plan.bind_offsets(bad)
        for kind, bad in (
            (TypeError, lambda: plan_tiled_coo_read("layout", [one])),
            (TypeError, lambda: plan_tiled_coo_read(layout, ["a"])),
            (ValueError, lambda: plan_tiled_coo_read(layout, [one, one])),
            (ValueError, lambda: plan_tiled_coo_read(layout, [PlacementFragment("a", (0,), (4,), 8, ParallelRank())])),
            (ValueError, lambda: TiledCOOLayout(layout.tile_shape, layout.records, 7)),
            (ValueError, lambda: TiledCOOLayout(layout.tile_shape, layout.records[::-1], 8)),
            (ValueError, lambda: TiledCOOLayout((1, 2), layout.records, 8)),
            (ValueError, lambda: TiledCOOLayout.build("a", [(0, 4)], [(0, 0)])),
            (ValueError, lambda: TiledCOOLayout.build("ab", [(4, 4)], [(0, 0)])),
            (ValueError, lambda: TiledCOOLayout.from_dict({**layout.to_dict(), "shapes": [4, 4, 4]})),
            (ValueError, lambda: TiledCOOLayout.from_dict({})),
        ):
            with self.assertRaises(kind):
                bad()
