"""Tensors of a model, how parallel axes divide them, and the fragments that ranks have."""

from dataclasses import asdict, dataclass
from math import prod
from typing import Literal, Optional, Tuple, Union

from mooncake.reshard import _checks
from mooncake.reshard.contracts import PlacementFragmentId, RuntimeBindingFragment, TensorId

ParallelAxisKind = Literal["dp", "pp", "ep", "tp"]
SplitAxisKind = Literal["ep", "tp"]
#: In the order in which axes of a tensor are kept.
KINDS = ("dp", "pp", "ep", "tp")


@dataclass(frozen=True)
class ParallelRank:
    """Position of a participant along each parallel axis."""

    dp: int = 0
    tp: int = 0
    pp: int = 0
    ep: int = 0

    def __post_init__(self):
        for kind in KINDS:
            _checks.integer(getattr(self, kind), f"parallel rank {kind}", 0)


def _check_kind(kind):
    if _checks.text(kind, "parallel axis kind") not in KINDS:
        raise ValueError(f"unsupported parallel axis kind: {kind}")


@dataclass(frozen=True)
class SplitAxis:
    """An axis whose ranks have the tensor together, cut along a dimension."""

    kind: SplitAxisKind
    dim: int

    def __post_init__(self):
        _check_kind(self.kind)
        if self.kind not in ("ep", "tp"):
            raise ValueError(f"{self.kind} cannot use split semantics")
        _checks.integer(self.dim, "split axis dim", 0)
        if self.kind == "ep" and self.dim != 0:
            raise ValueError("EP must split the leading dimension, that of the experts")


@dataclass(frozen=True)
class ReplicatedAxis:
    """An axis of whose ranks each has all of the tensor."""

    kind: ParallelAxisKind

    def __post_init__(self):
        _check_kind(self.kind)


@dataclass(frozen=True)
class OwnershipAxis:
    """An axis of whose ranks only some have the tensor."""

    kind: ParallelAxisKind

    def __post_init__(self):
        _check_kind(self.kind)


ParallelAxis = Union[SplitAxis, ReplicatedAxis, OwnershipAxis]
_SEMANTICS = {SplitAxis: "split", ReplicatedAxis: "replicated", OwnershipAxis: "ownership"}


def axis_to_json(axis):
    """Returns an axis as JSON."""
    found = {"semantics": _SEMANTICS[type(axis)], "kind": axis.kind}
    return {**found, "dim": axis.dim} if isinstance(axis, SplitAxis) else found


def axis_from_json(value, label):
    """Parses an axis."""
    semantics = _checks.mapping(value, label).get("semantics")
    kind = next((kind for kind, name in _SEMANTICS.items() if name == semantics), None)
    if kind is None:
        raise ValueError(f"unsupported parallel axis semantics: {semantics!r}")
    names = {"semantics", "kind", *(["dim"] if kind is SplitAxis else [])}
    value = _checks.fields(value, names, label)
    return kind(value["kind"], value["dim"]) if kind is SplitAxis else kind(value["kind"])


@dataclass(frozen=True)
class TensorDescriptor:
    """A tensor of the model as a whole. Tensors of one layout have the same fingerprint, which a framework defines."""

    tensor_id: TensorId
    global_shape: Tuple[int, ...]
    dtype: str
    itemsize: int
    shard_dims: Tuple[int, ...]
    layout_fingerprint: str
    parallel_axes: Tuple[ParallelAxis, ...]
    layer_id: Optional[int] = None
    expert_id: Optional[int] = None

    def __post_init__(self):
        shape = _checks.integers(self.global_shape, "global_shape", 1)
        if not shape:
            raise ValueError("global_shape must not be empty")
        for name in ("tensor_id", "dtype", "layout_fingerprint"):
            _checks.text(getattr(self, name), name)
        _checks.integer(self.itemsize, "itemsize", 1)
        dims = _checks.integers(self.shard_dims, "shard_dims", 0)
        if len(set(dims)) != len(dims):
            raise ValueError("shard_dims must not contain duplicates")
        if list(dims) != sorted(dims):
            raise ValueError("shard_dims must be sorted")
        if any(dim >= len(shape) for dim in dims):
            raise ValueError("shard_dims contains an out-of-range dimension")
        axes = _checks.sequence(self.parallel_axes, "parallel_axes")
        if not all(isinstance(axis, tuple(_SEMANTICS)) for axis in axes):
            raise ValueError("parallel_axes must contain explicit axis values")
        axes = tuple(sorted(axes, key=lambda axis: KINDS.index(axis.kind)))
        self._check_axes(shape, dims, axes)
        for name in ("layer_id", "expert_id"):
            _checks.optional(getattr(self, name), name)
        for name, value in (("global_shape", shape), ("shard_dims", dims), ("parallel_axes", axes)):
            object.__setattr__(self, name, value)

    def _check_axes(self, shape, dims, axes):
        if len({axis.kind for axis in axes}) != len(axes):
            raise ValueError("parallel_axes must not contain duplicate kinds")
        split = [axis.dim for axis in axes if isinstance(axis, SplitAxis)]
        if len(set(split)) != len(split):
            raise ValueError("split axes must not share a dimension")
        if any(dim >= len(shape) for dim in split):
            raise ValueError("the dimension of a split axis is out of range")
        if sorted(split) != list(dims):
            raise ValueError("dimensions of split axes are not those of shard_dims")
        if self.expert_id is not None and any(isinstance(axis, SplitAxis) and axis.kind == "ep" for axis in axes):
            raise ValueError("an individually allocated expert needs an ownership axis for ep")

    def kinds(self, semantics):
        """Returns the kinds of this tensor's axes of one class."""
        return tuple(axis.kind for axis in self.parallel_axes if isinstance(axis, semantics))

    def alike(self):
        """Returns all but the name: aliases of one tensor are alike."""
        return (
            self.global_shape,
            self.dtype,
            self.itemsize,
            self.shard_dims,
            self.parallel_axes,
            self.layer_id,
            self.expert_id,
            self.layout_fingerprint,
        )

    def to_json(self):
        """Returns the tensor as JSON."""
        return {
            "tensor_id": self.tensor_id,
            "global_shape": list(self.global_shape),
            "dtype": self.dtype,
            "itemsize": self.itemsize,
            "shard_dims": list(self.shard_dims),
            "layout_fingerprint": self.layout_fingerprint,
            "parallel_axes": [axis_to_json(axis) for axis in self.parallel_axes],
            "layer_id": self.layer_id,
            "expert_id": self.expert_id,
        }

    @classmethod
    def from_json(cls, value, label):
        """Parses a tensor."""
        value = dict(_checks.fields(value, cls.__dataclass_fields__, label))
        axes = _checks.sequence(value["parallel_axes"], f"{label} parallel_axes")
        value["parallel_axes"] = tuple(axis_from_json(axis, f"{label} axis {at}") for at, axis in enumerate(axes))
        return cls(**value)


def check_aliases(aliases, tensor_id):
    """Returns a group of aliases, in order; ValueError if a tensor that has some is not among them."""
    found = _checks.sequence(aliases, "aliases")
    if not all(type(alias) is str and alias for alias in found):
        raise ValueError("aliases must contain non-empty strings")
    if len(set(found)) != len(found):
        raise ValueError("aliases must not contain duplicates")
    if found and len(found) < 2:
        raise ValueError("an alias group must contain at least two tensors")
    if found and tensor_id not in found:
        raise ValueError(f"an alias group must contain the tensor of its fragment, {tensor_id!r}")
    return tuple(sorted(found))


def check_box(tensor, fragment):
    """ValueError if a fragment is not within its tensor, or not of the length that its shape has."""
    name, dims = fragment.fragment_id, len(tensor.global_shape)
    if len(fragment.global_offset) != dims or len(fragment.local_shape) != dims:
        raise ValueError(f"fragment rank mismatch: {name}")
    sides = zip(fragment.global_offset, fragment.local_shape, tensor.global_shape)
    if any(offset + extent > total for offset, extent, total in sides):
        raise ValueError(f"fragment is out of bounds: {name}")
    size = prod(fragment.local_shape) * tensor.itemsize
    if fragment.nbytes != size:
        raise ValueError(f"fragment byte size mismatch: {name} has {fragment.nbytes}, and its shape {size}")


@dataclass(frozen=True, init=False)
class PlacementFragment:
    """A box of a tensor that a rank has, without an address. Its id follows from the rest, unless one is given."""

    tensor_id: TensorId
    global_offset: Tuple[int, ...]
    local_shape: Tuple[int, ...]
    nbytes: int
    rank: ParallelRank
    pipeline_stage_id: Optional[int]
    aliases: Tuple[TensorId, ...]
    placement_fragment_id: PlacementFragmentId

    def __init__(
        self,
        tensor_id: TensorId,
        global_offset: Tuple[int, ...],
        local_shape: Tuple[int, ...],
        nbytes: int,
        rank: ParallelRank,
        pipeline_stage_id: Optional[int] = None,
        aliases: Tuple[TensorId, ...] = (),
        placement_fragment_id: Optional[PlacementFragmentId] = None,
    ):
        values = {
            "tensor_id": _checks.text(tensor_id, "tensor_id"),
            "global_offset": _checks.integers(global_offset, "global_offset", 0),
            "local_shape": _checks.integers(local_shape, "local_shape", 1),
            "nbytes": _checks.u64(nbytes, "nbytes", 1),
            "rank": _checks.instance(rank, "rank", ParallelRank),
            "pipeline_stage_id": _checks.optional(pipeline_stage_id, "pipeline_stage_id"),
            "aliases": check_aliases(aliases, tensor_id),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        if placement_fragment_id is None:
            placement_fragment_id = _checks.identity({"schema": "weight-placement-fragment", **self._content()})
        name = _checks.text(placement_fragment_id, "placement_fragment_id")
        object.__setattr__(self, "placement_fragment_id", name)

    @property
    def fragment_id(self) -> PlacementFragmentId:
        """Returns the id, under the name that fragments of all kinds have."""
        return self.placement_fragment_id

    @property
    def box(self):
        """Returns offset and shape."""
        return self.global_offset, self.local_shape

    def _content(self):
        found = {
            "tensor_id": self.tensor_id,
            "global_offset": list(self.global_offset),
            "local_shape": list(self.local_shape),
            "nbytes": self.nbytes,
            "rank": asdict(self.rank),
            "aliases": list(self.aliases),
        }
        # Without one it is left out: ids do not depend on whether stages exist.
        if self.pipeline_stage_id is not None:
            found["pipeline_stage_id"] = self.pipeline_stage_id
        return found

    def to_json(self):
        """Returns the fragment as JSON."""
        return {"placement_fragment_id": self.placement_fragment_id, **self._content()}

    @classmethod
    def from_json(cls, value, label):
        """Parses a fragment."""
        names = set(cls.__dataclass_fields__) - {"pipeline_stage_id"}
        value = dict(_checks.fields(value, names, label, maybe={"pipeline_stage_id"}))
        value["rank"] = rank_from_json(value["rank"], f"{label} rank")
        _checks.text(value["placement_fragment_id"], "placement_fragment_id")
        return cls(**value)


def rank_from_json(value, label):
    """Parses a rank."""
    return ParallelRank(**_checks.fields(value, KINDS, label))


__all__ = [
    "OwnershipAxis",
    "ParallelAxis",
    "ParallelRank",
    "PlacementFragment",
    "ReplicatedAxis",
    "RuntimeBindingFragment",
    "SplitAxis",
    "TensorDescriptor",
]
