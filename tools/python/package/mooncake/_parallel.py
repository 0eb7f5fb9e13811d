"""Split of a tensor over the axes of a parallel job: validation of axes, names of parts, and manifests of parts.

Names and rules are Mooncake's. Where a tensor-parallel axis is the only one, the key of a part is `KEY_tp_RANK`; with
several axes it names each of them, in the order dp, tp, ep, pp.
"""

from collections import namedtuple

#: Kinds of axes in the order of the keys; the index is the number in a tensor's header.
KINDS = ("dp", "tp", "ep", "pp")
#: Limit of parts: a larger size is a mistake, and would cause that many lookups.
MOST_PARTS = 1 << 16

#: Axis: `split` is the dimension that it splits, `number` the expert of an ep axis and the stage of a pp axis.
Axis = namedtuple("Axis", "kind rank size split number", defaults=(None, None))


def _whole(value):
    return hasattr(value, "__index__")


def _axis(given):
    """Returns a given axis as an `Axis`, or None if it breaks a rule of its kind."""
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
    """Returns the axes of a `TensorParallelism` in the order of `KINDS`; None if one is malformed, or a kind occurs
    twice."""
    given = getattr(parallelism, "axes", parallelism)
    axes = [_axis(one) for one in given] if isinstance(given, (list, tuple)) else []
    if not axes or None in axes or len({axis.kind for axis in axes}) != len(axes):
        return None
    return tuple(sorted(axes, key=lambda axis: KINDS.index(axis.kind)))


def tensor_axis(axes):
    """Returns the tensor-parallel axis, or None."""
    return next((axis for axis in axes if axis.kind == "tp"), None)


def writer_axis(writer):
    """Returns a writer's partition as an axis; None if it is malformed."""
    rank, size, split = (getattr(writer, name, None) for name in ("rank", "size", "split_dim"))
    if not (_whole(rank) and _whole(size) and _whole(split)) or not 0 <= rank < size <= MOST_PARTS or split < 0:
        return None
    return Axis("tp", int(rank), int(size), int(split))


def at_rank(axes, rank, size):
    """Returns the axes of another part along the tensor-parallel axis."""
    return tuple(axis._replace(rank=rank, size=size) if axis.kind == "tp" else axis for axis in axes)


def part_key(key, axes):
    """Returns the key of the part that the axes name."""
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
    """Returns the key of the part of one writer."""
    return f"{key}__writer_{axis.rank}of{axis.size}_sd{axis.split}"


def is_uniform(shape, axis):
    """Returns True if a tensor of this shape can be split along the axis into parts of equal size."""
    return axis.split < len(shape) and shape[axis.split] % axis.size == 0


def narrowed(tensor, axis):
    """Returns the part of a whole tensor that belongs to the axis's rank."""
    extent = tensor.shape[axis.split]
    start, end = extent * axis.rank // axis.size, extent * (axis.rank + 1) // axis.size
    return tensor.narrow(axis.split, start, end - start).contiguous()


def manifest(axis):
    """Returns the manifest that is stored beside the parts, by which readers with another number of ranks find them."""
    import json

    return json.dumps({"split_dim": axis.split, "size": axis.size}).encode()


def manifest_axis(value):
    """Returns the axis of a manifest with rank 0, or None if the bytes are no manifest."""
    import json

    try:
        said = json.loads(value)
        split, size = said["split_dim"], said["size"]
    except (ValueError, KeyError, TypeError):
        return None
    good = type(split) is int and type(size) is int and 0 <= split and 0 < size <= MOST_PARTS
    return Axis("tp", 0, size, split) if good else None
