"""Binding of plans: from copies between fragments to copies between memory."""

from dataclasses import replace

from mooncake.reshard import _checks
from mooncake.reshard.weight._planner.attested import RuntimeBindingAttestation
from mooncake.reshard.weight._planner.bound import TransferPlan, executors_of
from mooncake.reshard.weight._planner.contracts import LogicalTransferPlan
from mooncake.reshard.weight.binding import validate_runtime_binding, validate_runtime_binding_subset
from mooncake.reshard.weight.runtime import WeightRuntimeBindingManifest
from mooncake.reshard.weight.storage_manifest import StoredFragmentSnapshot, validate_weight_manifest_snapshot


def bind_logical_transfer_plan(logical_plan, target_bindings, *, source_bindings=(), source_manifest=None):
    """Returns a plan with the addresses of bindings. ValueError if one is missing, or not of the plan's placements.

    A plan whose source is in a store needs its manifest as it is now, and no bindings of the source.
    """
    _checks.instance(logical_plan, "logical_plan", LogicalTransferPlan)
    manifest = _manifest(logical_plan, source_manifest)
    logical_plan.validate_source_manifest_snapshot()
    logical_plan.validate_source_placement_snapshot()
    given = (logical_plan.target_placement, target_bindings, logical_plan.target_executors)
    targets = _attested("target", *given)
    sources = _attested("source", logical_plan.source_placement, source_bindings, logical_plan.source_executors)
    operations = []
    for one in logical_plan.operations:
        source = one.source
        if not isinstance(source, StoredFragmentSnapshot):
            source = sources[source.placement_fragment_id].bound(source)
        target = targets[one.target.placement_fragment_id].bound(one.target)
        operations.append(replace(one, source=source, target=target))
    return TransferPlan(
        resource_id=logical_plan.resource_id,
        revision=logical_plan.revision,
        weight_generation=logical_plan.target_placement.weight_generation,
        target_placement=logical_plan.target_placement,
        operations=tuple(operations),
        planning_limits=logical_plan.planning_limits,
        source_executors=() if manifest else executors_of([one.source for one in operations]),
        target_executors=executors_of([one.target for one in operations]),
        source_manifest=manifest,
        source_manifest_identity=logical_plan.source_manifest_identity,
    )


def _manifest(plan, given):
    if plan.source_manifest is None:
        if given is not None:
            raise ValueError("a plan between placements takes no source manifest")
        return None
    if given is None:
        raise ValueError("a plan whose source is stored requires the source manifest")
    found = validate_weight_manifest_snapshot(given)
    if found.manifest_identity != plan.source_manifest_identity:
        raise ValueError("the source manifest is not that of the plan")
    return found


def _attested(side, placement, bindings, executors):
    """Returns the checked binding of each fragment of a side's participants."""
    bindings = _checks.items(bindings, f"{side} runtime bindings", WeightRuntimeBindingManifest)
    if placement is None:
        if bindings:
            raise ValueError(f"the plan has no {side} placement, and takes no {side} bindings")
        return {}
    if not bindings:
        raise ValueError(f"the plan requires {side} runtime bindings")
    validate_runtime_binding_subset(placement, bindings)
    required, found = {one.participant_id for one in executors}, {}
    missing = required - {one.participant_id for one in bindings}
    if missing:
        raise ValueError(f"missing {side} runtime binding participant: {min(missing)}")
    for binding in bindings:
        if binding.participant_id in required:
            attestation = RuntimeBindingAttestation(placement, binding)
            found.update((one.placement_fragment_id, attestation) for one in binding.fragments)
    return found


def resolve_executor_plans(plan, placement, binding, side):
    """Returns a participant's workers in a plan. ValueError if its binding is not the one of the plan."""
    _checks.instance(plan, "plan", TransferPlan)
    if side not in ("source", "target"):
        raise ValueError(f"side of an executor is source or target, not {side!r}")
    executors = getattr(plan, f"{side}_executors")
    if not executors:
        raise ValueError(f"the transfer plan has no {side} executor metadata")
    validate_runtime_binding(placement, binding)
    names = (binding.instance_id, binding.participant_id)
    expected = tuple(one for one in executors if (one.instance_id, one.participant_id) == names)
    if not expected:
        raise ValueError(f"{side} executor snapshot mismatch: the plan has no executor {names}")
    attestation, used = RuntimeBindingAttestation(placement, binding), set()
    used.update(name for one in expected for name in one.fragment_ids)
    part = next(one for one in placement.parts if one.participant_id == binding.participant_id)
    bound = [one for one in map(attestation.bound, part.fragments) if one.fragment_id in used]
    if executors_of(bound) != expected:
        raise ValueError(f"{side} executor snapshot mismatch: the binding is not that of the plan")
    return expected


def resolve_executor_plan(plan, placement, binding, side):
    """Returns a participant's only worker in a plan; ValueError if it has several."""
    found = resolve_executor_plans(plan, placement, binding, side)
    if len(found) != 1:
        raise ValueError(f"{side} executor snapshot contains {len(found)} workers")
    return found[0]


__all__ = ["bind_logical_transfer_plan", "resolve_executor_plan", "resolve_executor_plans"]
