"""Sparse matrices as tiles of coordinates and values, and the ranges of them that a rank of another layout reads.

A writer's entries are flat arrays in the order of tiles; a directory has the first entry of each tile, and one more for
the end. A reader first reads the places in the directory that its plan names, and then exactly its entries.
"""

from dataclasses import dataclass
from typing import Tuple

from mooncake.reshard import _checks
from mooncake.reshard.geometry import box_intersection
from mooncake.reshard.weight.types import PlacementFragment
from mooncake.reshard.weight.validation import grouped

DEFAULT_TILE_SHAPE = (128, 64)
#: Places of a directory that are read beyond need, to join two reads: at 4 bytes each, less than a request costs.
_MOST_GAP = 64


def _pair(value, name, least):
    found = _checks.integers(value, name, least)
    if len(found) != 2:
        raise ValueError(f"{name} must contain two integers, not {len(found)}")
    return found


def _tiles(offset, shape, tile):
    """Returns the first tile of a box, and the number of tiles that it touches, along both dimensions."""
    first = tuple(begin // size for begin, size in zip(offset, tile))
    last = (-(-(begin + extent) // size) for begin, extent, size in zip(offset, shape, tile))
    return first, tuple(end - begin for begin, end in zip(first, last))


@dataclass(frozen=True)
class TiledCOORecord:
    """A writer's box of a tensor, with its tiles, and the place of the first of them in the directory."""

    record_index: int
    tensor_id: str
    global_offset: Tuple[int, int]
    local_shape: Tuple[int, int]
    tile_origin: Tuple[int, int]
    tile_grid: Tuple[int, int]
    tile_base: int

    def __post_init__(self):
        _checks.text(self.tensor_id, "record tensor_id")
        for name in ("record_index", "tile_base"):
            _checks.integer(getattr(self, name), f"record {name}", 0)
        for name, least in (("global_offset", 0), ("local_shape", 1), ("tile_origin", 0), ("tile_grid", 1)):
            object.__setattr__(self, name, _pair(getattr(self, name), f"record {name}", least))

    @property
    def tile_count(self) -> int:
        """Returns the number of tiles."""
        return self.tile_grid[0] * self.tile_grid[1]


@dataclass(frozen=True)
class TiledCOOLayout:
    """The directory of tiles that a writer and its readers share: record by record, row by row."""

    tile_shape: Tuple[int, int]
    records: Tuple[TiledCOORecord, ...]
    total_tiles: int

    def __post_init__(self):
        object.__setattr__(self, "tile_shape", _pair(self.tile_shape, "tile_shape", 1))
        object.__setattr__(self, "records", _checks.items(self.records, "records of a tiled layout", TiledCOORecord))
        if not self.records:
            raise ValueError("records of a tiled layout must not be empty")
        base = 0
        for number, one in enumerate(self.records):
            if (one.record_index, one.tile_base) != (number, base):
                raise ValueError(f"record {one.record_index} of a tiled layout is not in the order of its directory")
            if (one.tile_origin, one.tile_grid) != _tiles(one.global_offset, one.local_shape, self.tile_shape):
                raise ValueError(f"tiles of record {number} differ from its box")
            base += one.tile_count
        if _checks.integer(self.total_tiles, "total_tiles") != base:
            raise ValueError(f"total_tiles of a tiled layout is {self.total_tiles}, and its records have {base}")

    @classmethod
    def build(cls, names, shapes, offsets, *, tile_shape=DEFAULT_TILE_SHAPE) -> "TiledCOOLayout":
        """Returns the layout of boxes of tensors, given by columns."""
        tile_shape = _pair(tile_shape, "tile_shape", 1)
        if not names or not len(names) == len(shapes) == len(offsets):
            raise ValueError("names, shapes and offsets of a tiled layout differ in length, or are empty")
        records, base = [], 0
        for number, (name, shape, offset) in enumerate(zip(names, shapes, offsets)):
            box = _pair(offset, "record global_offset", 0), _pair(shape, "record local_shape", 1)
            records.append(TiledCOORecord(number, name, *box, *_tiles(*box, tile_shape), base))
            base += records[-1].tile_count
        return cls(tile_shape, tuple(records), base)

    @classmethod
    def from_dict(cls, value) -> "TiledCOOLayout":
        """Parses what `to_dict` returns; other fields are of no concern."""
        _checks.mapping(value, "tiled layout")
        names = _checks.sequence(value.get("names"), "names of a tiled layout")
        flat = {}
        for field, least in (("shapes", 1), ("offsets", 0)):
            found = _checks.integers(value.get(field), f"{field} of a tiled layout", least)
            if len(found) != 2 * len(names):
                raise ValueError(f"{field} of a tiled layout must contain two integers for each name")
            flat[field] = list(zip(found[::2], found[1::2]))
        return cls.build(names, flat["shapes"], flat["offsets"], tile_shape=value.get("tile_shape"))

    def to_dict(self):
        """Returns the layout as JSON, with the pairs of all records one behind the other."""
        return {
            "tile_shape": list(self.tile_shape),
            "names": [one.tensor_id for one in self.records],
            "shapes": [number for one in self.records for number in one.local_shape],
            "offsets": [number for one in self.records for number in one.global_offset],
        }


@dataclass(frozen=True)
class TiledCOOIndexRange:
    """Contiguous places of the directory, and where they go in the reader's buffer of places."""

    source_index: int
    count: int
    destination_index: int


@dataclass(frozen=True)
class TiledCOOTileRun:
    """Contiguous tiles of a record in which a target has entries, and the positions of both ends among the places."""

    record: TiledCOORecord
    target: PlacementFragment
    first_tile: int
    last_tile: int
    first_offset_position: int
    last_offset_position: int


@dataclass(frozen=True)
class TiledCOOPayloadRange:
    """Contiguous entries, and where they go in the reader's arrays."""

    source_entry: int
    count: int
    destination_entry: int


@dataclass(frozen=True)
class BoundTiledCOOReadPlan:
    """A plan for one directory: of each run the number of its entries and the first of them in the reader's arrays."""

    read_plan: "TiledCOOReadPlan"
    counts: Tuple[int, ...]
    compact_entries: Tuple[int, ...]
    payload_ranges: Tuple[TiledCOOPayloadRange, ...]
    entry_count: int


@dataclass(frozen=True)
class TiledCOOReadPlan:
    """Runs of tiles, and the places of the directory that bound them.

    `offset_ranges` reads places into a buffer of `offset_buffer_elements`, with small gaps; of these,
    `offset_gather_indices` are the `offset_indices` that `bind_offsets` takes.
    """

    tile_runs: Tuple[TiledCOOTileRun, ...]
    offset_indices: Tuple[int, ...]
    offset_ranges: Tuple[TiledCOOIndexRange, ...]
    offset_gather_indices: Tuple[int, ...]
    offset_buffer_elements: int
    _offset_positions: Tuple[Tuple[int, int], ...]

    @property
    def empty(self) -> bool:
        """Returns true if there is nothing to read."""
        return not self.tile_runs

    def bind_offsets(self, values) -> BoundTiledCOOReadPlan:
        """Returns the entries to read, from what the directory has at `offset_indices`. ValueError for values that are
        no numbers of entries, or descend."""
        if len(values) != len(self.offset_indices):
            raise ValueError(f"{len(values)} tile offsets for a plan with {len(self.offset_indices)}")
        values = [_checks.integer(one, "a tile offset", 0) for one in values]
        if any(one > after for one, after in zip(values, values[1:])):
            raise ValueError("tile offsets must not descend")
        counts, begins, ranges, entries = [], [], [], 0
        for first, last in self._offset_positions:
            count = values[last] - values[first]
            counts.append(count)
            begins.append(entries if count else 0)
            if not count:
                continue
            if ranges and sum(ranges[-1][:2]) == values[first]:
                ranges[-1][1] += count
            else:
                ranges.append([values[first], count, entries])
            entries += count
        payload = tuple(TiledCOOPayloadRange(*one) for one in ranges)
        return BoundTiledCOOReadPlan(self, tuple(counts), tuple(begins), payload, entries)


def plan_tiled_coo_read(layout, targets) -> TiledCOOReadPlan:
    """Returns the plan that reads all tiles in which fragments of matrices have entries. Tiles at their edges have
    entries of others, which a reader leaves out."""
    if not isinstance(layout, TiledCOOLayout):
        raise TypeError(f"layout must be a TiledCOOLayout, not {type(layout).__name__}")
    targets = tuple(targets)
    if not all(isinstance(one, PlacementFragment) for one in targets):
        raise TypeError("targets must contain PlacementFragment")
    if any(len(one.global_offset) != 2 for one in targets):
        raise ValueError("targets of a tiled layout must have two dimensions")
    _checks.unique((one.placement_fragment_id for one in targets), "placement fragment among the targets")
    by_tensor, found = grouped(targets, lambda one: one.tensor_id), []
    for record in layout.records:
        for target in by_tensor.get(record.tensor_id, ()):
            common = box_intersection(record.global_offset, record.local_shape, *target.box)
            if common is not None:
                found += ((record, target, *run) for run in _runs(layout.tile_shape, record, *common))
    found.sort(key=lambda one: (one[0].record_index, one[1].placement_fragment_id, *one[2:]))
    indices = tuple(sorted({index for one in found for index in one[2:]}))
    position = {index: number for number, index in enumerate(indices)}
    runs = tuple(TiledCOOTileRun(*one, position[one[2]], position[one[3]]) for one in found)
    ranges, gather = [], []
    for index in indices:
        if not ranges or index - sum(ranges[-1][:2]) > _MOST_GAP:
            ranges.append([index, 0, sum(ranges[-1][1:]) if ranges else 0])
        ranges[-1][1] = index - ranges[-1][0] + 1
        gather.append(ranges[-1][2] + index - ranges[-1][0])
    size = sum(ranges[-1][1:]) if ranges else 0
    positions = tuple((run.first_offset_position, run.last_offset_position) for run in runs)
    return TiledCOOReadPlan(
        runs, indices, tuple(TiledCOOIndexRange(*one) for one in ranges), tuple(gather), size, positions
    )


def _runs(tile_shape, record, begin, end):
    """Yields first and last place of the contiguous tiles of a record that a box touches."""
    first, count = _tiles(begin, tuple(high - low for low, high in zip(begin, end)), tile_shape)
    row, column = (one - origin for one, origin in zip(first, record.tile_origin))
    width = record.tile_grid[1]
    if count[1] == width:
        yield record.tile_base + row * width, record.tile_base + (row + count[0]) * width
        return
    for number in range(row, row + count[0]):
        at = record.tile_base + number * width + column
        yield at, at + count[1]


__all__ = [
    "DEFAULT_TILE_SHAPE",
    "BoundTiledCOOReadPlan",
    "TiledCOOIndexRange",
    "TiledCOOLayout",
    "TiledCOOPayloadRange",
    "TiledCOOReadPlan",
    "TiledCOORecord",
    "TiledCOOTileRun",
    "plan_tiled_coo_read",
]
