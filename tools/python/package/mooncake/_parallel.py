"""How a tensor is split over the axes of a parallel job: checks of axes, names of parts, and the lists of parts.

Names and rules are the original's. Where a tensor-parallel axis is the only one, the key of a part is `KEY_tp_RANK`; with
several axes it names each of them, in the order dp, tp, ep, pp.
"""

from collections import namedtuple

#: The kinds of axes in the order in which keys have them; the index is the number in a tensor's header.
KINDS = ("dp", "tp", "ep", "pp")
#: More parts than any job has: a size above it is a mistake, and would be that many lookups.
MOST_PARTS = 1 << 16

#: One axis: `split` is the dimension that it splits, `number` the expert of an ep axis and the stage of a pp axis.
Axis = namedtuple("Axis", "kind rank size split number", defaults=(None, None))


def _whole(value):
    return hasattr(value, "__index__")


def _axis(given):
    """An axis as it is used here, or None where it breaks a rule of its kind."""
    kind = str(getattr(given, "kind", "")).lower()
    rank, size, split = (getattr(given, name, None) for name in ("rank", "size", "split_dim"))
    if kind not in KINDS or not _whole(rank) or not _whole(size) or not 0 <= rank < size <= MOST_PARTS:
        return None
    if (kind == "tp") != (split is not None) or (split is not None and (not _whole(split) or split < 0)):
        return None
    number = {"ep": "expert_id", "pp": "stage_id"}.get(kind)
    number = getattr(given, number, None) if number else None
    if kind in ("ep", "pp") and not _whole(number):
        return None
    return Axis(kind, int(rank), int(size), split, number)


def axes_of(parallelism):
    """The axes of a `TensorParallelism` in the order of `KINDS`; None where one is malformed, or a kind comes twice."""
    given = getattr(parallelism, "axes", parallelism)
    axes = [_axis(one) for one in given] if isinstance(given, (list, tuple)) else []
    if not axes or None in axes or len({axis.kind for axis in axes}) != len(axes):
        return None
    return tuple(sorted(axes, key=lambda axis: KINDS.index(axis.kind)))


def tensor_axis(axes):
    """The tensor-parallel axis, or None."""
    return next((axis for axis in axes if axis.kind == "tp"), None)


def writer_axis(writer):
    """A writer's partition as an axis; None where it is malformed."""
    rank, size, split = (getattr(writer, name, None) for name in ("rank", "size", "split_dim"))
    if not (_whole(rank) and _whole(size) and _whole(split)) or not 0 <= rank < size <= MOST_PARTS or split < 0:
        return None
    return Axis("tp", int(rank), int(size), int(split))


def at_rank(axes, rank, size):
    """The axes of another part along the tensor-parallel axis."""
    return tuple(axis._replace(rank=rank, size=size) if axis.kind == "tp" else axis for axis in axes)


def part_key(key, axes):
    """The key of the part that the axes name."""
    if len(axes) == 1 and axes[0].kind == "tp":
        return f"{key}_tp_{axes[0].rank}"
    for axis in axes:
        key += f"__{axis.kind}_{axis.rank}of{axis.size}"
        if axis.split is not None:
            key += f"_sd{axis.split}"
        if axis.number is not None:
            key += f"_{'eid' if axis.kind == 'ep' else 'sid'}{axis.number}"
    return key


def writer_key(key, axis):
    """The key of the part of one writer."""
    return f"{key}__writer_{axis.rank}of{axis.size}_sd{axis.split}"


def is_uniform(shape, axis):
    """Whether a tensor of this shape can be split along the axis into parts of the same size."""
    return axis.split < len(shape) and shape[axis.split] % axis.size == 0


def narrowed(tensor, axis):
    """The part of a whole tensor that is the axis's."""
    extent = tensor.shape[axis.split]
    start, end = extent * axis.rank // axis.size, extent * (axis.rank + 1) // axis.size
    return tensor.narrow(axis.split, start, end - start).contiguous()


def manifest(axis):
    """What is stored beside the parts, so that readers with another number of ranks find them."""
    import json

    return json.dumps({"split_dim": axis.split, "size": axis.size}).encode()


def manifest_axis(value):
    """The axis of a manifest with rank 0, or None where the bytes are no manifest."""
    import json

    try:
        said = json.loads(value)
        split, size = said["split_dim"], said["size"]
    except (ValueError, KeyError, TypeError):
        return None
    good = type(split) is int and type(size) is int and 0 <= split and 0 < size <= MOST_PARTS
    return Axis("tp", 0, size, split) if good else None
