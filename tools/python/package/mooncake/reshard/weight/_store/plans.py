"""Plans of uploads and loads, and what writers have to show of theirs."""

import hashlib
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Tuple
from urllib.parse import quote
from uuid import uuid4

from mooncake.reshard import _checks
from mooncake.reshard.contracts import LeaseId, ParticipantId, PlacementId, RuntimeInstanceId, StoredFragmentSnapshotId
from mooncake.reshard.weight._planner.bound import RuntimeFragmentSnapshot, TransferPlan
from mooncake.reshard.weight._planner.ownership import (
    complete_parallel_source_replicas,
    has_dp_ownership,
    parallel_tensor_owner,
)
from mooncake.reshard.weight.binding import validate_runtime_binding
from mooncake.reshard.weight.placement import WeightPlacementManifest
from mooncake.reshard.weight.runtime import WeightRuntimeBindingManifest
from mooncake.reshard.weight.storage_manifest import StoredFragmentSnapshot, StoredWeightManifest
from mooncake.reshard.weight.types import PlacementFragment
from mooncake.reshard.weight.validation import grouped


class WeightStoreError(RuntimeError):
    """What the store refused, or does not have, or a writer or reader may not do; `codes` maps keys to codes."""

    def __init__(self, text, codes=None):
        self.codes = dict(codes or {})
        some = ", ".join(f"{key} ({code})" for key, code in sorted(self.codes.items())[:4])
        super().__init__(f"{text}: {some}" if some else text)


@dataclass(frozen=True)
class UploadOperation:
    """A fragment in memory, and the object that it becomes."""

    source_placement: PlacementFragment
    source_snapshot: RuntimeFragmentSnapshot
    source_participant_id: ParticipantId
    source_instance_id: RuntimeInstanceId
    target: StoredFragmentSnapshot
    source_generation: int
    source_lease_id: LeaseId

    def __post_init__(self):
        placed = _checks.instance(self.source_placement, "upload source placement", PlacementFragment)
        memory = _checks.instance(self.source_snapshot, "upload source snapshot", RuntimeFragmentSnapshot)
        target = _checks.instance(self.target, "upload target", StoredFragmentSnapshot)
        for name in ("source_participant_id", "source_instance_id", "source_lease_id"):
            _checks.text(getattr(self, name), name)
        _checks.u64(self.source_generation, "source_generation")
        for name in ("placement_fragment_id", "tensor_id", "global_offset", "local_shape", "nbytes"):
            if getattr(memory, name) != getattr(placed, name):
                raise ValueError(f"{name} of an upload's source differs from its memory's")
        for name in ("tensor_id", "global_offset", "local_shape", "nbytes", "aliases"):
            if getattr(target, name) != getattr(placed, name):
                raise ValueError(f"{name} of an upload's source differs from its target's")
        if target.object_offset != 0:
            raise ValueError("object_offset of an upload's target must be 0")
        if memory.lease_generation != self.source_generation:
            raise ValueError("source_generation of an upload differs from its memory's")


@dataclass(frozen=True)
class WeightUploadPlan:
    """All objects of a version of weights. Their keys are the plan's own, so no other writer changes them."""

    manifest: StoredWeightManifest
    source_placement_id: PlacementId
    source_placement_digest: str
    transaction_group_id: str
    control_key: str
    operations: Tuple[UploadOperation, ...]

    def __post_init__(self):
        _checks.instance(self.manifest, "manifest of an upload plan", StoredWeightManifest)
        for name in ("source_placement_id", "source_placement_digest", "transaction_group_id", "control_key"):
            _checks.text(getattr(self, name), name)
        found = _checks.items(self.operations, "operations of an upload plan", UploadOperation)
        object.__setattr__(self, "operations", found)
        if not found:
            raise ValueError("operations of an upload plan must not be empty")
        group, _, transaction = self.transaction_group_id.rpartition("/transactions/")
        if group != self.manifest.group_id or not transaction or "/" in transaction:
            raise ValueError("transaction_group_id of an upload plan does not belong to the manifest's group")
        if self.control_key != f"{self.transaction_group_id}/decision":
            raise ValueError("control_key of an upload plan does not belong to its transaction")
        order = lambda some: sorted(some, key=lambda one: one.fragment_id)
        if order(one.target for one in found) != order(self.manifest.fragments):
            raise ValueError("operations of an upload plan are not those of its manifest")
        if any(not one.target.object_key.startswith(f"{group}/payload/{transaction}/") for one in found):
            raise ValueError("an object of an upload plan does not belong to its transaction")

    @property
    def keys(self):
        """Returns the keys of all objects of weights."""
        return [one.target.object_key for one in self.operations]


@dataclass(frozen=True)
class UploadReceipt:
    """An object that a worker has written."""

    fragment_id: StoredFragmentSnapshotId
    object_key: str
    worker_id: str

    def __post_init__(self):
        for name in self.__dataclass_fields__:
            _checks.text(getattr(self, name), name)


@dataclass(frozen=True)
class WeightLoadPlan:
    """Copies from the objects of a manifest into memory."""

    manifest: StoredWeightManifest
    transfer: TransferPlan

    def __post_init__(self):
        _checks.instance(self.manifest, "manifest of a load plan", StoredWeightManifest)
        _checks.instance(self.transfer, "transfer of a load plan", TransferPlan)
        if self.transfer.source_manifest_identity != self.manifest.manifest_identity:
            raise ValueError("the transfer of a load plan is not from its manifest")


def paired(placement, bindings, side):
    """Returns bindings that were checked against a placement, each of another participant."""
    _checks.instance(placement, f"{side} placement", WeightPlacementManifest)
    found = tuple(bindings)
    if not found:
        raise WeightStoreError(f"{side} runtime bindings must not be empty")
    names = set()
    for one in found:
        if not isinstance(one, WeightRuntimeBindingManifest):
            raise WeightStoreError(f"{side} runtime bindings must contain WeightRuntimeBindingManifest")
        if one.participant_id in names:
            raise WeightStoreError(f"duplicate {side} runtime binding participant: {one.participant_id}")
        names.add(one.participant_id)
        check_pair(placement, one, side)
    return found


def check_pair(placement, binding, side):
    """WeightStoreError if a binding is not of a placement."""
    try:
        validate_runtime_binding(placement, binding)
    except ValueError as error:
        raise WeightStoreError(f"invalid {side} runtime binding: {error}") from error


def plan_weight_upload(source_placement, source_bindings, *, namespace="default", key_prefix="weights"):
    """Returns the plan that writes each box of each tensor once, from a replica that has all of them.

    ValueError if no replica is complete and of one generation, or tensors have owners along dp.
    """
    _checks.text(namespace, "namespace")
    if type(key_prefix) is not str or not key_prefix.strip("/"):
        raise ValueError(f"key_prefix must have a part that is not empty, not {key_prefix!r}")
    bindings = paired(source_placement, source_bindings, "source")
    part = lambda text: quote(text, safe="._-")
    names = (namespace, source_placement.resource_id, source_placement.revision)
    group = "/".join((key_prefix.strip("/"), *map(part, names), str(source_placement.weight_generation)))
    transaction, operations = uuid4().hex, []
    for placed, bound, binding in _chosen(source_placement, bindings):
        name = f"{placed.tensor_id}|{placed.global_offset}|{placed.local_shape}"
        name = StoredFragmentSnapshotId(hashlib.sha256(name.encode()).hexdigest()[:24])
        key = f"{group}/payload/{transaction}/{name}"
        box = (placed.tensor_id, placed.global_offset, placed.local_shape)
        target = StoredFragmentSnapshot(name, *box, key, 0, placed.nbytes, placed.aliases)
        generation = binding.generation
        memory = RuntimeFragmentSnapshot.from_attested_pair(placed, bound, lease_generation=generation)
        who = (binding.participant_id, binding.instance_id)
        operations.append(UploadOperation(placed, memory, *who, target, generation, binding.lease_id))
    manifest = StoredWeightManifest(
        namespace=namespace,
        resource_id=source_placement.resource_id,
        revision=source_placement.revision,
        weight_generation=source_placement.weight_generation,
        group_id=group,
        manifest_key=f"{group}/manifest",
        tensors=source_placement.tensors,
        fragments=tuple(one.target for one in operations),
        # For people: nothing compares it with a clock.
        created_at=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
    scope = f"{group}/transactions/{transaction}"
    identity = (source_placement.placement_id, source_placement.digest)
    return WeightUploadPlan(manifest, *identity, scope, f"{scope}/decision", tuple(operations))


def _chosen(placement, bindings):
    """Returns the fragments to write, with their memory and binding, in order of tensors and boxes."""
    tensors = {one.tensor_id: one for one in placement.tensors}
    if any(map(has_dp_ownership, tensors.values())):
        raise ValueError("an upload of weights requires tensors that each DP replica has; some have owners along dp")
    parts = {part.participant_id: part for part in placement.parts}
    sources = []
    for binding in bindings:
        memory = {one.placement_fragment_id: one for one in binding.fragments}
        fragments = parts[binding.participant_id].fragments
        sources += [(one, memory[one.placement_fragment_id], binding) for one in fragments]
    _checks.unique((bound.fragment_id for _, bound, _ in sources), "source fragment_id")
    try:
        replicas = complete_parallel_source_replicas(tensors, [placed for placed, _, _ in sources])
    except ValueError as error:
        raise ValueError("the source has no complete generation-consistent DP replica") from error
    owner = lambda one: parallel_tensor_owner(tensors[one.tensor_id], one)
    of, generations = {}, {}
    for dp, owners in replicas.items():
        of[dp] = [one for one in sources if one[0].rank.dp == dp and owner(one[0]) == owners[one[0].tensor_id]]
        found = {binding.generation for _, _, binding in of[dp]}
        if len(found) == 1:
            generations[dp] = found.pop()
    if not generations:
        raise ValueError("the source has no complete generation-consistent DP replica")
    if len(set(generations.values())) > 1:
        raise ValueError("complete DP replicas of the source have inconsistent lease generations")

    def order(one):
        placed, bound, _ = one
        return (placed.rank.pp, placed.rank.ep, placed.rank.tp, bound.worker_id, bound.fragment_id)

    by_box = grouped(sorted(of[min(generations)], key=order), lambda one: (one[0].tensor_id, *one[0].box))
    return [by_box[box][0] for box in sorted(by_box)]


__all__ = [
    "UploadOperation",
    "UploadReceipt",
    "WeightLoadPlan",
    "WeightStoreError",
    "WeightUploadPlan",
    "plan_weight_upload",
]
