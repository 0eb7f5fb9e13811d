"""Which ranks of the source a tensor is read from."""

from mooncake.reshard.weight.types import OwnershipAxis
from mooncake.reshard.weight.validation import at, covers, grouped


def parallel_tensor_owner(tensor, fragment):
    """Returns a fragment's coordinates along the axes along which only some ranks have the tensor."""
    return at(fragment.rank, tensor.kinds(OwnershipAxis))


def has_dp_ownership(tensor):
    """Returns true if only some replicas have the tensor."""
    return "dp" in tensor.kinds(OwnershipAxis)


def _owners(tensor, fragments):
    """Returns the owners of a tensor that have all of it, and the number of all owners."""
    found = grouped(fragments, lambda one: parallel_tensor_owner(tensor, one))
    # Ranks with equal boxes count once.
    distinct = lambda some: list({one.box: one for one in some}.values())
    return sorted(owner for owner, some in found.items() if covers(tensor, distinct(some))), len(found)


def complete_parallel_source_replicas(source_tensors, source_fragments):
    """Returns the replicas that have all tensors that each replica has, with the owner of each tensor. ValueError if
    there is none."""
    tensors = [tensor for tensor in source_tensors.values() if not has_dp_ownership(tensor)]
    if not tensors:
        return {}
    replicas = {}
    for dp, some in sorted(_by_replica_and_tensor(source_fragments).items()):
        owners = {tensor.tensor_id: _owners(tensor, some.get(tensor.tensor_id, ())) for tensor in tensors}
        if all(complete and len(complete) == count for complete, count in owners.values()):
            replicas[dp] = {name: complete[0] for name, (complete, _) in owners.items()}
    if not replicas:
        raise ValueError("the source has no complete DP replica: its tensors are not fully covered")
    return replicas


def _by_replica_and_tensor(fragments):
    found = {}
    for one in fragments:
        found.setdefault(one.rank.dp, {}).setdefault(one.tensor_id, []).append(one)
    return found


def complete_dp_owned_source_owners(source_tensors, source_fragments):
    """Returns the one owner of each tensor that only some replicas have. ValueError if it is not one, or incomplete."""
    owned = [tensor for tensor in source_tensors.values() if has_dp_ownership(tensor)]
    found, owners = grouped(source_fragments, lambda one: one.tensor_id) if owned else {}, {}
    for tensor in owned:
        complete, count = _owners(tensor, found.get(tensor.tensor_id, ()))
        if not complete:
            raise ValueError(f"a DP-owned source tensor has no complete declared owner: {tensor.tensor_id}")
        if count != 1:
            raise ValueError(f"a DP-owned source tensor has ambiguous declared owners: {tensor.tensor_id}")
        owners[tensor.tensor_id] = complete[0]
    return owners


def check_target(tensors, fragments):
    """ValueError if a tensor of the target is not complete where it is."""
    replicas = _by_replica_and_tensor(fragments)
    for tensor in tensors.values():
        if has_dp_ownership(tensor):
            places = [[one for some in replicas.values() for one in some.get(tensor.tensor_id, ())]]
        else:
            places = [some.get(tensor.tensor_id, ()) for some in replicas.values()]
        for some in places:
            complete, count = _owners(tensor, some)
            if not count or len(complete) != count:
                raise ValueError(f"target tensor is not fully covered: {tensor.tensor_id}")


class Sources:
    """The choice of the ranks that a target reads from."""

    def __init__(self, tensors, fragments):
        self._tensors = tensors
        self._owners = complete_dp_owned_source_owners(tensors, fragments)
        self._replicas = complete_parallel_source_replicas(tensors, fragments)

    def takes(self, target, source):
        """Returns true if a target fragment reads from this source fragment: targets take turns with replicas."""
        tensor = self._tensors[target.tensor_id]
        owner = parallel_tensor_owner(tensor, source)
        if has_dp_ownership(tensor):
            return owner == self._owners[tensor.tensor_id]
        dps = sorted(self._replicas)
        dp = dps[target.rank.dp % len(dps)]
        return source.rank.dp == dp and owner == self._replicas[dp][tensor.tensor_id]
