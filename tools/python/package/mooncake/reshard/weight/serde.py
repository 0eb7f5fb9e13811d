"""Placements as JSON, with exactly the fields of the contract."""

from mooncake.reshard import _checks
from mooncake.reshard.contracts import ResourceKind
from mooncake.reshard.weight.part import WeightPlacementPart
from mooncake.reshard.weight.placement import WeightPlacementManifest
from mooncake.reshard.weight.topology import ParallelTopology
from mooncake.reshard.weight.types import PlacementFragment, TensorDescriptor, rank_from_json

_FIELDS = (
    "resource_kind",
    "resource_id",
    "revision",
    "weight_generation",
    "placement_set_id",
    "placement_id",
    "topology",
    "tensors",
    "parts",
)


def weight_placement_to_json(placement):
    """Returns a placement as JSON text, always in the same form."""
    return _checks.canonical(_checks.instance(placement, "placement", WeightPlacementManifest).to_json())


def weight_placement_from_json(value):
    """Parses a placement; ValueError for other fields, or for a placement that contradicts itself."""
    manifest = _checks.fields(_checks.parse(value, "placement manifest"), _FIELDS, "placement manifest")
    if manifest["resource_kind"] != ResourceKind.MODEL_WEIGHT.value:
        raise ValueError(f"resource_kind of a placement must be model_weight, not {manifest['resource_kind']!r}")
    _checks.text(manifest["placement_id"], "placement_id")
    topology = ParallelTopology.from_json(manifest["topology"])
    tensors = _checks.sequence(manifest["tensors"], "placement tensors")
    tensors = [TensorDescriptor.from_json(one, f"placement tensor {at}") for at, one in enumerate(tensors)]
    _checks.unique((tensor.tensor_id for tensor in tensors), "tensor_id in placement JSON")
    by_id, used, parts = {tensor.tensor_id: tensor for tensor in tensors}, set(), []
    shared = {name: manifest[name] for name in _FIELDS[1:5]}
    for at, one in enumerate(_checks.sequence(manifest["parts"], "placement parts")):
        one = _checks.fields(one, ("participant_id", "rank", "fragments"), f"placement part {at}")
        fragments = _checks.sequence(one["fragments"], "placement part fragments")
        fragments = [PlacementFragment.from_json(each, f"placement fragment {at}") for at, each in enumerate(fragments)]
        local = {fragment.tensor_id for fragment in fragments}
        if not local <= set(by_id):
            raise ValueError(f"unknown tensor_id in placement part: {min(local - set(by_id))}")
        used |= local
        rank = rank_from_json(one["rank"], f"placement part rank {at}")
        made = {"topology_id": topology.topology_id, "participant_id": one["participant_id"], "rank": rank}
        tensors_of = tuple(by_id[name] for name in sorted(local))
        parts.append(WeightPlacementPart(**shared, **made, tensors=tensors_of, fragments=tuple(fragments)))
    if used != set(by_id):
        raise ValueError(f"placement JSON contains an unreferenced tensor: {min(set(by_id) - used)}")
    more = {"topology": topology, "parts": tuple(parts), "placement_id": manifest["placement_id"]}
    return WeightPlacementManifest(**shared, **more)


__all__ = ["weight_placement_from_json", "weight_placement_to_json"]
