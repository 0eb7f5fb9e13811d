"""Boxes of any number of dimensions: containment, overlap, and exact covers. A box is a pair of offset and shape."""

import heapq
from bisect import bisect_left, insort
from math import prod
from typing import Protocol, Tuple

from mooncake.reshard._compat import _strict_zip

#: Limit of the comparisons of boxes of three and more dimensions with each other.
_MAX_HIGH_DIMENSIONAL_PAIRWISE_COMPARISONS = 1_000_000


#: Offset and shape, or begin and end, along each dimension.
Box = Tuple[Tuple[int, ...], Tuple[int, ...]]


class LogicalBox(Protocol):
    """A box of a tensor."""

    @property
    def global_offset(self) -> Tuple[int, ...]: ...

    @property
    def local_shape(self) -> Tuple[int, ...]: ...


class OverlapRegion(Protocol):
    """A part of a box that is copied at once."""

    @property
    def overlap_offset(self) -> Tuple[int, ...]: ...

    @property
    def overlap_shape(self) -> Tuple[int, ...]: ...


def box_intersection(left_offset, left_shape, right_offset, right_shape):
    """Returns begin and end of what two boxes have in common; None for nothing. ValueError if they are of different
    dimensions, or no boxes."""
    sides = (left_offset, left_shape, right_offset, right_shape)
    if not left_offset or len(set(map(len, sides))) > 1:
        raise ValueError("boxes must have the same dimensions, and at least one")
    if min(left_offset + right_offset) < 0 or min(left_shape + right_shape) <= 0:
        raise ValueError("boxes must have offsets that are not negative, and positive shapes")
    begin = tuple(map(max, left_offset, right_offset))
    end = tuple(min(one + size, other + extent) for one, size, other, extent in _strict_zip(*sides))
    return (begin, end) if all(low < high for low, high in zip(begin, end)) else None


def box_contains(outer_offset, outer_shape, inner_offset, inner_shape):
    """Returns true if the second box is within the first."""
    sides = _strict_zip(outer_offset, outer_shape, inner_offset, inner_shape)
    return all(begin <= inner and inner + size <= begin + extent for begin, extent, inner, size in sides)


def boxes_overlap(boxes):
    """Returns true if any two boxes have a point in common.

    A sweep along the dimension with the most distinct sides. Up to two dimensions the boxes that it crosses are
    intervals of the other one, in order; beyond that they are compared one by one, and ValueError is raised when that
    gets too much.
    """
    if len(boxes) < 2:
        return False
    dims = range(len(boxes[0][0]))
    along = max(dims, key=lambda dim: len({(offset[dim], offset[dim] + shape[dim]) for offset, shape in boxes}))
    others = [dim for dim in dims if dim != along]
    if len(others) > 1:
        return _compared_overlap(boxes, along)
    across = others[0] if others else None
    events = []
    for offset, shape in boxes:
        side = (0, 1) if across is None else (offset[across], offset[across] + shape[across])
        # Ends come before begins at the same place: boxes that touch do not overlap.
        events += [(offset[along], 1, side), (offset[along] + shape[along], 0, side)]
    crossed = []
    for _, begins, side in sorted(events):
        at = bisect_left(crossed, side)
        if not begins:
            del crossed[at]
        elif (at < len(crossed) and crossed[at][0] < side[1]) or (at and crossed[at - 1][1] > side[0]):
            return True
        else:
            insort(crossed, side)
    return False


def _compared_overlap(boxes, along):
    ordered = sorted(boxes, key=lambda box: box[0][along])
    crossed, ends, compared = {}, [], 0
    for number, (offset, shape) in enumerate(ordered):
        while ends and ends[0][0] <= offset[along]:
            del crossed[heapq.heappop(ends)[1]]
        for other in crossed.values():
            if compared >= _MAX_HIGH_DIMENSIONAL_PAIRWISE_COMPARISONS:
                raise ValueError(f"high-dimensional overlap budget exceeded: {compared} comparisons of boxes")
            compared += 1
            sides = _strict_zip(offset, shape, *other)
            if all(begin < start + size and start < begin + extent for begin, extent, start, size in sides):
                return True
        crossed[number] = (offset, shape)
        heapq.heappush(ends, (offset[along] + shape[along], number))
    return False


def boxes_exactly_cover(container_offset, container_shape, boxes):
    """Returns true if boxes are within another one, and each point of it is in exactly one of them."""
    inside = all(box_contains(container_offset, container_shape, *box) for box in boxes)
    volume = sum(prod(shape) for _, shape in boxes)
    return bool(boxes) and inside and volume == prod(container_shape) and not boxes_overlap(boxes)


def regions_exactly_cover(target, regions):
    """Returns true if regions cover a box exactly."""
    boxes = tuple((region.overlap_offset, region.overlap_shape) for region in regions)
    return boxes_exactly_cover(target.global_offset, target.local_shape, boxes)


__all__ = [
    "Box",
    "LogicalBox",
    "OverlapRegion",
    "box_contains",
    "box_intersection",
    "boxes_exactly_cover",
    "boxes_overlap",
    "regions_exactly_cover",
]
