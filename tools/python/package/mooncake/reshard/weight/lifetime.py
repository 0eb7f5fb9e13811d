"""Pins of a participant's weights, by a provider that the framework has for it."""

from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from typing import Mapping, Protocol, Sequence, Tuple, runtime_checkable

from mooncake.reshard import _checks
from mooncake.reshard.contracts import ParticipantId, RuntimeFragmentId, RuntimeInstanceId
from mooncake.reshard.lifetime import (
    AllocationFence,
    AllocationLifetimeToken,
    AllocationTokenSet,
    TerminalTransferState,
)
from mooncake.reshard.weight.runtime import WeightRuntimeBindingManifest

#: What a pinned binding shares with the one that a plan was made for.
_SAME = (
    "resource_id",
    "revision",
    "placement_id",
    "placement_digest",
    "instance_id",
    "participant_id",
    "generation",
    "lease_id",
)


@dataclass(frozen=True)
class AcquiredWeightBinding:
    """The binding as it is while it is pinned, and the pin."""

    binding: WeightRuntimeBindingManifest
    token: AllocationLifetimeToken


@runtime_checkable
class WeightAllocationGuardProvider(Protocol):
    """What pins a participant's fragments, all or none."""

    def acquire(
        self,
        *,
        transfer_id: str,
        expected_binding: WeightRuntimeBindingManifest,
        required_fragment_ids: Sequence[RuntimeFragmentId],
    ) -> AcquiredWeightBinding: ...


WeightAllocationGuardProviders = Mapping[Tuple[RuntimeInstanceId, ParticipantId], WeightAllocationGuardProvider]


def acquire_weight_binding_token(*, transfer_id, expected_binding, required_fragment_ids, side, providers):
    """Pins fragments of a binding. Returns the binding as it is now, and the pin.

    ValueError, and no pin, if there is no provider for the binding's (instance, participant), or if the pinned memory
    is not the expected one.
    """
    if side not in ("source", "target"):
        raise ValueError(f"side of a pin is source or target, not {side!r}")
    required = tuple(sorted(set(required_fragment_ids)))
    if not required:
        raise ValueError(f"{side} allocation guard requires fragments")
    if providers is None:
        raise ValueError(f"{side} allocation guard providers are required")
    key = (expected_binding.instance_id, expected_binding.participant_id)
    provider = providers.get(key)
    if not isinstance(provider, WeightAllocationGuardProvider):
        raise ValueError(f"missing {side} allocation guard provider: {key}")
    found = provider.acquire(
        transfer_id=transfer_id, expected_binding=expected_binding, required_fragment_ids=required
    )
    if not isinstance(found, AcquiredWeightBinding):
        raise ValueError(f"{side} allocation guard returned {type(found).__name__}, not an AcquiredWeightBinding")
    tokens = AllocationTokenSet((found.token,))
    try:
        _check_same(expected_binding, found.binding, required)
        if found.token.fence != weight_allocation_fence(found.binding, required, token_id=found.token.fence.token_id):
            raise ValueError(f"the fence of the {side} allocation guard differs from its binding")
    except BaseException:
        tokens.release_after_terminal(TerminalTransferState.ABORTED)
        raise
    return found.binding, tokens


def weight_allocation_fence(binding, required_fragment_ids, *, token_id):
    """Returns the fence of fragments of a binding; ValueError if it does not have them."""
    wanted = tuple(sorted(required_fragment_ids))
    found = {one.fragment_id: one for one in binding.fragments}
    missing = sorted(set(wanted) - set(found))
    if missing:
        raise ValueError(f"the runtime binding is missing guarded fragments: {', '.join(missing)}")
    content = [_place(found[name]) for name in wanted]
    shared = {name: getattr(binding, name) for name in _SAME if name not in ("generation", "lease_id")}
    return AllocationFence(
        **shared,
        runtime_lease_id=binding.lease_id,
        runtime_generation=binding.generation,
        binding_digest=sha256(_checks.canonical(content).encode()).hexdigest(),
        fragment_ids=wanted,
        token_id=token_id,
    )


def _check_same(expected, fresh, required):
    for name in _SAME:
        if getattr(expected, name) != getattr(fresh, name):
            raise ValueError(f"acquired runtime binding {name} differs from the plan")
    sides = [{one.fragment_id: one for one in binding.fragments} for binding in (expected, fresh)]
    for name in required:
        if any(name not in side for side in sides):
            raise ValueError(f"acquired runtime binding has no fragment {name}")
        if _place(sides[0][name]) != _place(sides[1][name]):
            raise ValueError(f"acquired runtime binding address of {name} differs from the plan")


def _place(fragment):
    found = asdict(replace(fragment, owner=None))
    del found["owner"]
    return found


__all__ = [
    "AcquiredWeightBinding",
    "WeightAllocationGuardProvider",
    "WeightAllocationGuardProviders",
    "acquire_weight_binding_token",
    "weight_allocation_fence",
]
