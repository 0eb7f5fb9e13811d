"""Copies between boxes: the overlap of two, and the strides by which it lies in each."""

from bisect import bisect_left, bisect_right
from math import prod

from mooncake.reshard import _checks
from mooncake.reshard._compat import _strict_zip
from mooncake.reshard.geometry import box_intersection


def itemsize(fragment):
    """Returns the bytes of an element of a fragment; ValueError if its length is no multiple."""
    size, rest = divmod(fragment.nbytes, prod(fragment.local_shape))
    if rest or size <= 0:
        raise ValueError(f"the byte size of the fragment {fragment.fragment_id} does not fit its shape")
    return size


def _overlap_box(source, target):
    """Returns offset and shape of what two fragments have in common; None for nothing."""
    found = box_intersection(source.global_offset, source.local_shape, target.global_offset, target.local_shape)
    if found is None:
        return None
    begin, end = found
    return begin, tuple(high - low for low, high in zip(begin, end))


def loops(source, target, offset, shape):
    """Returns how a box lies in two contiguous fragments: its offset in each, the bytes that are contiguous in both,
    and counts and strides of the loops around these."""
    size = itemsize(source)
    if itemsize(target) != size:
        raise ValueError("itemsize of source and target fragment differ")
    steps = [_checks.strides(one.local_shape, size) for one in (source, target)]
    places = []
    for one, strides in zip((source, target), steps):
        places.append(sum((at - of) * step for at, of, step in _strict_zip(offset, one.global_offset, strides)))
    inner, outer = shape[-1] * size, len(shape) - 1
    while outer and all(strides[outer - 1] == inner for strides in steps):
        outer -= 1
        inner *= shape[outer]
    return places[0], places[1], inner, shape[:outer], steps[0][:outer], steps[1][:outer]


class BoxIndex:
    """Source fragments of one tensor, those of equal boxes together, for queries by overlap."""

    def __init__(self, fragments):
        groups = {}
        for fragment in fragments:
            groups.setdefault((fragment.global_offset, fragment.local_shape), []).append(fragment)
        side = lambda dim, box: (box[0][dim], box[0][dim] + box[1][dim])
        dims = range(len(next(iter(groups))[0]))
        # Along the dimension that divides them most.
        self._dim = max(dims, key=lambda dim: len({side(dim, box) for box in groups}))
        rows = sorted((*side(self._dim, box), number, some) for number, (box, some) in enumerate(groups.items()))
        self._begins = [row[0] for row in rows]
        #: Greatest end of a row and of all before it.
        self._ends = []
        for row in rows:
            self._ends.append(max(row[1], self._ends[-1] if self._ends else row[1]))
        self._rows = rows

    def query(self, target):
        """Returns the groups that overlap a box along that dimension."""
        begin = target.global_offset[self._dim]
        end = begin + target.local_shape[self._dim]
        some = self._rows[bisect_right(self._ends, begin) : bisect_left(self._begins, end)]
        return [row[3] for row in some if row[1] > begin]
