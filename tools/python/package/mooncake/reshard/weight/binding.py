"""Checks of addresses against the placement that they are of."""

from mooncake.reshard import _checks
from mooncake.reshard.contracts import validate_resource_binding_identity
from mooncake.reshard.weight import validation
from mooncake.reshard.weight.placement import WeightPlacementManifest
from mooncake.reshard.weight.runtime import WeightRuntimeBindingManifest


def validate_runtime_binding(placement, binding):
    """ValueError if a binding is not of exactly one participant's fragments, contiguous and apart from each other."""
    _checks.instance(placement, "placement", WeightPlacementManifest)
    _checks.instance(binding, "binding", WeightRuntimeBindingManifest)
    validate_resource_binding_identity(placement, binding)
    if placement.revision != binding.revision:
        raise ValueError("revision of the placement and of the runtime binding differ")
    part = next((one for one in placement.parts if one.participant_id == binding.participant_id), None)
    if part is None:
        raise ValueError(f"unknown runtime binding participant: {binding.participant_id}")
    placed = {one.placement_fragment_id: one for one in part.fragments}
    bound = {one.placement_fragment_id: one for one in binding.fragments}
    for names, label in ((set(bound) - set(placed), "unknown"), (set(placed) - set(bound), "missing")):
        if names:
            raise ValueError(f"{label} placement fragment in runtime binding: {min(names)}")
    tensors = {tensor.tensor_id: tensor for tensor in placement.tensors}
    for name, fragment in placed.items():
        itemsize = tensors[fragment.tensor_id].itemsize
        expected = {
            "byte size": (bound[name].nbytes, fragment.nbytes),
            "local_shape": (bound[name].local_shape, fragment.local_shape),
            "itemsize": (bound[name].itemsize, itemsize),
            "stride": (bound[name].strides_bytes, _checks.strides(fragment.local_shape, itemsize)),
        }
        for label, (one, other) in expected.items():
            if one != other:
                raise ValueError(
                    f"runtime binding {label} does not match the contiguous placement of {name}: {one}, {other}"
                )
    validation.check_addresses(binding.instance_id, placement.tensors, part.fragments, binding.fragments)


def validate_runtime_binding_subset(placement, bindings):
    """ValueError if bindings are not of different participants that have something, apart from each other."""
    found = _checks.items(bindings, "runtime bindings", WeightRuntimeBindingManifest)
    _checks.unique((one.participant_id for one in found), "runtime binding participant")
    for one in found:
        validate_runtime_binding(placement, one)
    parts = {part.participant_id: part for part in placement.parts}
    for instance, some in validation.grouped(found, lambda one: one.instance_id).items():
        placements = [fragment for one in some for fragment in parts[one.participant_id].fragments]
        fragments = [fragment for one in some for fragment in one.fragments]
        validation.check_addresses(instance, placement.tensors, placements, fragments)
    unknown = {one.participant_id for one in found if not parts[one.participant_id].fragments}
    if unknown:
        raise ValueError(f"unknown runtime binding participant: {min(unknown)}")


def validate_runtime_bindings(placement, bindings):
    """ValueError if bindings are not of exactly the participants that have something, apart from each other."""
    found = _checks.items(bindings, "runtime bindings", WeightRuntimeBindingManifest)
    validate_runtime_binding_subset(placement, found)
    missing = {part.participant_id for part in placement.parts if part.fragments}
    missing -= {one.participant_id for one in found}
    if missing:
        raise ValueError(f"missing runtime binding participant: {min(missing)}")


__all__ = ["validate_runtime_binding", "validate_runtime_binding_subset", "validate_runtime_bindings"]
