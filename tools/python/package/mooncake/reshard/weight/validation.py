"""Checks of fragments with each other: of a part, of a complete placement, and of addresses."""

from itertools import product

from mooncake.reshard import _checks
from mooncake.reshard.geometry import boxes_exactly_cover, boxes_overlap
from mooncake.reshard.weight.types import KINDS, OwnershipAxis, ReplicatedAxis, SplitAxis, check_box


def grouped(values, key):
    """Returns lists of values by key, in order."""
    found = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return found


def check_fragments(tensors, fragments):
    """ValueError if fragments are there twice, are of no tensor, do not fit theirs, or overlap on a rank."""
    _checks.unique((tensor.tensor_id for tensor in tensors), "tensor_id")
    by_id = {tensor.tensor_id: tensor for tensor in tensors}
    _checks.unique((fragment.fragment_id for fragment in fragments), "fragment_id")
    for fragment in fragments:
        if fragment.tensor_id not in by_id:
            raise ValueError(f"unknown tensor_id: {fragment.tensor_id}")
        check_box(by_id[fragment.tensor_id], fragment)
    for (tensor, _), some in grouped(fragments, lambda one: (one.tensor_id, one.rank)).items():
        _checks.unique((one.box for one in some), f"logical fragment of {tensor} on a parallel rank")
        if boxes_overlap([one.box for one in some]):
            raise ValueError(f"logical fragment boxes overlap for tensor and parallel rank: {tensor}")


def check_alias_groups(tensors, fragments):
    """ValueError if a tensor of a group of aliases does not exist, or is in another group elsewhere."""
    known, by_tensor = {tensor.tensor_id for tensor in tensors}, grouped(fragments, lambda one: one.tensor_id)
    for group in {fragment.aliases for fragment in fragments if fragment.aliases}:
        unknown = sorted(set(group) - known)
        if unknown:
            raise ValueError(f"alias group references unknown tensor: {unknown[0]}")
        for tensor in group:
            if {one.aliases for one in by_tensor[tensor]} != {group}:
                raise ValueError(f"alias group is not declared consistently for tensor: {tensor}")


def covers(tensor, fragments):
    """Returns true if fragments are exactly the tensor."""
    boxes = [one.box for one in fragments]
    return boxes_exactly_cover((0,) * len(tensor.global_shape), tensor.global_shape, boxes)


def at(rank, kinds):
    """Returns a rank's coordinates along axes."""
    return tuple((kind, getattr(rank, kind)) for kind in kinds)


def check_complete(tensors, fragments, topology):
    """ValueError if a tensor is not where its axes say: each owner's replicas complete, each split along its axis."""
    if not tensors or not fragments:
        raise ValueError("a global weight placement must contain tensors and fragments")
    by_tensor = grouped(fragments, lambda one: one.tensor_id)
    for tensor in tensors:
        if tensor.tensor_id not in by_tensor:
            raise ValueError(f"global placement tensor is not fully covered: {tensor.tensor_id}")
        _check_undeclared(tensor, by_tensor[tensor.tensor_id], topology)
        _check_owners(tensor, by_tensor[tensor.tensor_id], topology)


def _check_owners(tensor, fragments, topology):
    owning, copied = tensor.kinds(OwnershipAxis), tensor.kinds(ReplicatedAxis)
    for owner, owned in grouped(fragments, lambda one: at(one.rank, owning)).items():
        ranks = [one.rank for one in topology.participants if at(one.rank, owning) == owner]
        replicas = grouped(owned, lambda one: at(one.rank, copied))
        if set(replicas) != {at(rank, copied) for rank in ranks}:
            raise ValueError(
                "global placement tensor is not fully covered: missing or unexpected replicated-axis participant for "
                + tensor.tensor_id
            )
        for replica, some in replicas.items():
            if not covers(tensor, some):
                raise ValueError(f"global placement tensor is not fully covered: {tensor.tensor_id}")
            _check_split(tensor, some, topology, [rank for rank in ranks if at(rank, copied) == replica])


def _check_split(tensor, fragments, topology, ranks):
    axes = [axis for axis in tensor.parallel_axes if isinstance(axis, SplitAxis)]
    if not axes:
        return
    kinds = [axis.kind for axis in axes]
    expected, found = {at(rank, kinds) for rank in ranks}, {at(one.rank, kinds) for one in fragments}
    every = all({dict(one)[kind] for one in expected} == set(range(topology.size(kind))) for kind in kinds)
    if not every or found != expected:
        raise ValueError(
            "global placement tensor is not fully covered: missing or unexpected split-axis participant for "
            + tensor.tensor_id
        )
    along = [sorted({getattr(one.rank, kind) for one in fragments}) for kind in kinds]
    if {tuple(number for _, number in one) for one in found} != set(product(*along)):
        raise ValueError(
            "a non-Cartesian split-axis participant mapping cannot prove which rank has which part of a dimension: "
            + tensor.tensor_id
        )
    for axis in axes:
        _check_along(tensor, axis, fragments)


def _check_along(tensor, axis, fragments):
    """ValueError unless the ranks of an axis have disjoint parts of its dimension, which are all of it."""
    parts = []
    for some in grouped(fragments, lambda one: getattr(one.rank, axis.kind)).values():
        sides = ((one.global_offset[axis.dim], one.local_shape[axis.dim]) for one in some)
        parts += _joined(sorted({(begin, begin + extent) for begin, extent in sides}))
    end = 0
    for part in sorted(parts):
        if part[0] != end:
            break
        end = part[1]
    else:
        if end == tensor.global_shape[axis.dim]:
            return
    where = f"{tensor.tensor_id}: {axis.kind} -> dim {axis.dim}"
    raise ValueError(f"split-axis rank geometry conflicts with the declared dimension: {where}")


def _joined(intervals):
    found = []
    for begin, end in intervals:
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((begin, end))
    return found


def _check_undeclared(tensor, fragments, topology):
    """ValueError if a tensor differs along an axis that it does not declare: only tp and ep may, where they follow from
    the ones that it declares."""
    declared = [axis.kind for axis in tensor.parallel_axes]
    varying = [kind for kind in declared if len({getattr(one.rank, kind) for one in fragments}) > 1]
    for kind in KINDS:
        if kind in declared or topology.size(kind) == 1:
            continue
        along = {getattr(one.rank, kind) for one in fragments}
        if kind in ("dp", "pp") or len(along) == 1:
            raise ValueError(
                "global placement tensor requires explicit parallel semantics for active undeclared "
                f"{kind} axis: {tensor.tensor_id}"
            )
        if not varying:
            raise ValueError(f"global placement tensor varies across undeclared {kind} axis: {tensor.tensor_id}")
        for ranks in grouped((one.rank for one in fragments), lambda rank: at(rank, varying)).values():
            if len({getattr(rank, kind) for rank in ranks}) > 1:
                raise ValueError(
                    f"global placement tensor varies independently across undeclared {kind} axis: {tensor.tensor_id}"
                )


def check_addresses(instance_id, tensors, placements, bindings):
    """ValueError if memory of fragments overlaps that are not aliases, or allocations overlap."""
    by_id = {tensor.tensor_id: tensor for tensor in tensors}
    fragments = {one.placement_fragment_id: one for one in placements}
    for space, some in grouped(bindings, lambda one: (one.worker_id, one.device)).items():
        where = f"in {(instance_id, *space)}"
        for one, other in _overlaps(some, lambda bound: (bound.address, bound.nbytes)):
            if not _aliases(fragments, by_id, one, other):
                raise ValueError(
                    f"runtime binding address ranges overlap: {one.fragment_id}, {other.fragment_id} {where}"
                )
        allocation = lambda bound: (bound.storage_address, bound.storage_nbytes)
        for one, other in _overlaps(some, allocation):
            if allocation(one) != allocation(other):
                raise ValueError(
                    f"runtime binding storage allocation ranges overlap: {one.fragment_id}, {other.fragment_id} {where}"
                )


def _overlaps(bindings, interval):
    """Returns pairs whose intervals (address, length) overlap."""
    active, found = [], []
    for one in sorted(bindings, key=interval):
        active = [other for other in active if sum(interval(other)) > interval(one)[0]]
        found += [(other, one) for other in active]
        active.append(one)
    return found


def _aliases(fragments, tensors, one, other):
    left, right = fragments[one.placement_fragment_id], fragments[other.placement_fragment_id]
    same = (one.address, one.nbytes, left.aliases, left.box) == (other.address, other.nbytes, right.aliases, right.box)
    return same and bool(left.aliases) and tensors[left.tensor_id].alike() == tensors[right.tensor_id].alike()
