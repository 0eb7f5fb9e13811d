"""Plans whose copies have addresses: what a process has to do, and the binding under which it may."""

from dataclasses import dataclass, field, fields
from typing import Optional, Tuple

from mooncake.reshard import _checks
from mooncake.reshard.contracts import (
    LeaseId,
    ParticipantId,
    PlacementFragmentId,
    PlacementId,
    ResourceId,
    RevisionId,
    RuntimeFragmentId,
    RuntimeInstanceId,
    TensorId,
)
from mooncake.reshard.geometry import regions_exactly_cover
from mooncake.reshard.weight import validation
from mooncake.reshard.weight._planner.attested import BoundWeightFragment, RuntimeBindingAttestation
from mooncake.reshard.weight._planner.contracts import PipelineRouteGroup, PlanningLimits, TransferRegion, routes
from mooncake.reshard.weight.placement import WeightPlacementManifest
from mooncake.reshard.weight.storage_manifest import (
    StoredFragmentSnapshot,
    StoredManifestIdentity,
    StoredWeightManifest,
    validate_weight_manifest_snapshot,
)
from mooncake.reshard.weight.types import ParallelRank


@dataclass(frozen=True)
class RuntimeFragmentSnapshot:
    """Box and memory of a fragment as they were when a plan was made."""

    placement_fragment_id: PlacementFragmentId
    fragment_id: RuntimeFragmentId
    tensor_id: TensorId
    global_offset: Tuple[int, ...]
    local_shape: Tuple[int, ...]
    address: int
    nbytes: int
    worker_id: str
    endpoint: str
    device: str
    itemsize: int
    strides_bytes: Tuple[int, ...]
    storage_address: int
    storage_nbytes: int
    storage_offset_bytes: int
    lease_generation: int

    @classmethod
    def from_fragment(cls, fragment: BoundWeightFragment) -> "RuntimeFragmentSnapshot":
        """Returns the snapshot of a bound fragment."""
        generation = fragment.lease_generation
        return cls.from_attested_pair(fragment.placement, fragment.binding, lease_generation=generation)

    @classmethod
    def from_attested_pair(cls, placement_fragment, runtime_fragment, *, lease_generation):
        """Returns the snapshot of a fragment and its memory."""
        names = [one.name for one in fields(cls) if one.name != "lease_generation"]
        of_box = ("tensor_id", "global_offset", "local_shape")
        value = lambda name: getattr(placement_fragment if name in of_box else runtime_fragment, name)
        return cls(**{name: value(name) for name in names}, lease_generation=lease_generation)

    def matches(self, fragment) -> bool:
        """Returns true if a fragment of a binding has the same memory still."""
        names = (one.name for one in fields(self) if one.name not in ("tensor_id", "global_offset", "lease_generation"))
        return all(getattr(self, name) == getattr(fragment, name) for name in names)


@dataclass(frozen=True)
class ExecutorTransferPlan:
    """A worker of a participant that has a part in a plan, with the fragments that copies use."""

    instance_id: RuntimeInstanceId
    placement_id: PlacementId
    participant_id: ParticipantId
    placement_digest: str
    runtime_lease_id: Optional[LeaseId]
    worker_id: str
    rank: ParallelRank
    fragment_ids: Tuple[RuntimeFragmentId, ...]
    fragment_snapshots: Tuple[RuntimeFragmentSnapshot, ...]
    attestation: Optional[RuntimeBindingAttestation] = field(default=None, compare=False, repr=False)

    def __post_init__(self):
        for name in ("instance_id", "placement_id", "participant_id", "worker_id"):
            _checks.text(getattr(self, name), f"executor plan {name}")
        _checks.digest_text(self.placement_digest, "executor plan placement_digest")
        if self.runtime_lease_id is not None:
            _checks.text(self.runtime_lease_id, "executor plan runtime_lease_id")
        object.__setattr__(self, "fragment_ids", tuple(self.fragment_ids))
        found = _checks.items(self.fragment_snapshots, "executor plan fragment_snapshots", RuntimeFragmentSnapshot)
        object.__setattr__(self, "fragment_snapshots", found)
        if not self.fragment_ids:
            raise ValueError("executor plan fragment_ids must not be empty")
        _checks.unique(self.fragment_ids, "fragment_id of an executor plan")
        if tuple(one.fragment_id for one in found) != self.fragment_ids:
            raise ValueError("executor plan fragment_snapshots are not those of its fragment_ids")
        if self.attestation is not None:
            _checks.instance(self.attestation, "attestation of an executor plan", RuntimeBindingAttestation)


def executors_of(fragments):
    """Returns the workers of bound fragments, in the order of their ranks."""
    key = lambda one: (one.attestation.placement.placement_id, one.attestation.evidence.participant_id, one.worker_id)
    found, used = [], set()
    for (placement_id, participant_id, worker), some in validation.grouped(fragments, key).items():
        some = sorted({one.fragment_id: one for one in some}.values(), key=lambda one: one.fragment_id)
        first = some[0]
        if (first.rank, worker) in used:
            raise ValueError(f"duplicate executor rank and worker: {participant_id}, {worker}")
        used.add((first.rank, worker))
        made = ExecutorTransferPlan(
            instance_id=first.instance_id,
            placement_id=placement_id,
            participant_id=participant_id,
            placement_digest=first.attestation.placement.digest,
            runtime_lease_id=first.runtime_lease_id,
            worker_id=worker,
            rank=first.rank,
            fragment_ids=tuple(one.fragment_id for one in some),
            fragment_snapshots=tuple(map(RuntimeFragmentSnapshot.from_fragment, some)),
            attestation=first.attestation,
        )
        found.append(made)
    return tuple(sorted(found, key=lambda one: (one.rank.dp, one.rank.pp, one.rank.ep, one.rank.tp, one.worker_id)))


@dataclass(frozen=True)
class TransferPlan:
    """Copies from memory, or from objects of a store, into memory: of bindings that were checked, and complete for
    each participant of the target that has a part in them."""

    resource_id: ResourceId
    revision: RevisionId
    weight_generation: int
    target_placement: WeightPlacementManifest
    operations: Tuple[TransferRegion, ...]
    planning_limits: PlanningLimits = field(default_factory=PlanningLimits)
    source_executors: Tuple[ExecutorTransferPlan, ...] = ()
    target_executors: Tuple[ExecutorTransferPlan, ...] = ()
    source_manifest: Optional[StoredWeightManifest] = None
    source_manifest_identity: Optional[StoredManifestIdentity] = None
    source_stored_fragment_snapshots: Tuple[StoredFragmentSnapshot, ...] = field(init=False)

    def __post_init__(self):
        for name in ("operations", "source_executors", "target_executors"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        _checks.text(self.resource_id, "resource_id of a transfer plan")
        _checks.text(self.revision, "revision of a transfer plan")
        _checks.u64(self.weight_generation, "weight_generation of a transfer plan")
        _checks.instance(self.planning_limits, "planning_limits", PlanningLimits)
        _checks.instance(self.target_placement, "target placement", WeightPlacementManifest)
        self._check_identity("target placement", self.target_placement)
        _checks.items(self.operations, "operations of a transfer plan", TransferRegion)
        for one in self.operations:
            one.validate_bounds()
            if not isinstance(one.target, BoundWeightFragment):
                raise ValueError("the target of a transfer plan's operation has no memory")
        self.planning_limits.check(self.operations)
        stored = {isinstance(one.source, StoredFragmentSnapshot) for one in self.operations}
        if len(stored) > 1:
            raise ValueError("a transfer plan mixes stored and live source fragments")
        object.__setattr__(self, "source_stored_fragment_snapshots", ())
        if True in stored:
            self._check_stored()
        else:
            self._check_live()
        targets = [one.target for one in self.operations]
        self._check_side("target", targets, self.target_executors)
        self._check_target()
        self._check_apart()

    def _check_identity(self, label, one):
        mine = (self.resource_id, self.revision, self.weight_generation)
        if (one.resource_id, one.revision, one.weight_generation) != mine:
            raise ValueError(f"identity of the transfer plan and of its {label} differ")

    def _check_stored(self):
        if self.source_manifest is None or self.source_manifest_identity is None:
            raise ValueError("a stored transfer plan requires a source manifest and its identity")
        manifest = validate_weight_manifest_snapshot(self.source_manifest)
        object.__setattr__(self, "source_manifest", manifest)
        self._check_identity("source manifest", manifest)
        if manifest.manifest_identity != self.source_manifest_identity:
            raise ValueError("the source manifest differs from its identity in the transfer plan")
        if self.source_executors:
            raise ValueError("a stored source has no executors")
        known = {one.fragment_id: one for one in manifest.fragments}
        used = {one.source.fragment_id: one.source for one in self.operations}
        for name, one in used.items():
            if known.get(name) != one:
                raise ValueError(f"stored source fragment differs from the manifest: {name}")
        object.__setattr__(self, "source_stored_fragment_snapshots", tuple(known[name] for name in sorted(used)))

    def _check_live(self):
        if self.source_manifest is not None or self.source_manifest_identity is not None:
            raise ValueError("a live transfer plan has no source manifest")
        sources = [_checks.instance(one.source, "source of a copy", BoundWeightFragment) for one in self.operations]
        self._check_side("source", sources, self.source_executors)

    def _check_side(self, side, fragments, executors):
        """ValueError unless fragments are of bindings that were checked, and executors exactly their workers."""
        for one in fragments:
            if one.owner is not None or one.attestation is None:
                raise ValueError(f"a {side} fragment of a transfer plan lacks an attested runtime binding")
        for attestation in _attestations(fragments):
            self._check_identity(f"{side} placement", attestation.placement)
        _checks.items(executors, f"{side} executors", ExecutorTransferPlan)
        if executors != executors_of(fragments):
            raise ValueError(f"{side} executors differ from the operations and their attested bindings")

    def _check_target(self):
        attestations = _attestations(one.target for one in self.operations)
        if not attestations:
            raise ValueError("the transfer plan has no target")
        by_fragment = validation.grouped(self.operations, lambda one: one.target.placement_fragment_id)
        parts = {part.participant_id: part for part in self.target_placement.parts}
        for one in attestations:
            if one.placement != self.target_placement:
                raise ValueError("the placement of a target binding is not that of the transfer plan")
            for fragment in parts[one.evidence.participant_id].fragments:
                if not regions_exactly_cover(fragment, by_fragment.get(fragment.placement_fragment_id, ())):
                    raise ValueError(f"bound target fragment is not fully covered: {fragment.placement_fragment_id}")
        for instance, some in validation.grouped(attestations, lambda one: one.evidence.instance_id).items():
            placed = [fragment for one in some for fragment in parts[one.evidence.participant_id].fragments]
            bound = [fragment for one in some for fragment in one.evidence.fragments]
            validation.check_addresses(instance, self.target_placement.tensors, placed, bound)

    def _check_apart(self):
        """ValueError if a source and a target share an allocation: copies are not in place."""
        space = lambda one: (one.instance_id, one.worker_id, one.device)
        sides = []
        for side in ("source", "target"):
            found = (getattr(one, side) for one in self.operations)
            some = validation.grouped((one for one in found if isinstance(one, BoundWeightFragment)), space)
            allocations = lambda one: {(each.storage_address, each.storage_nbytes) for each in one}
            sides.append({where: allocations(one) for where, one in some.items()})
        for where in set(sides[0]) & set(sides[1]):
            end, last = 0, None
            # Allocations of one side may be equal; of those before, only one side's can reach to the next one.
            for begin, size, side in sorted((*one, side) for side in (0, 1) for one in sides[side][where]):
                if begin < end and last != side:
                    raise ValueError(f"source and target storage allocations overlap in {where}")
                end, last = max(end, begin + size), side

    @property
    def total_bytes(self) -> int:
        """Returns the number of bytes to copy."""
        return sum(one.total_bytes for one in self.operations)

    @property
    def regions(self) -> Tuple[TransferRegion, ...]:
        """Returns the operations."""
        return self.operations

    @property
    def pipeline_routes(self) -> Tuple[PipelineRouteGroup, ...]:
        """Returns the operations by pipeline stages."""
        return routes(self.operations)

    def operation_indices_for_executor(self, executor: ExecutorTransferPlan, side: str) -> Tuple[int, ...]:
        """Returns the operations that read from, or write to, the memory of a worker."""
        if side not in ("source", "target"):
            raise ValueError(f"side of an executor is source or target, not {side!r}")
        if executor not in getattr(self, f"{side}_executors"):
            raise ValueError(f"this {side} executor is not part of the plan")
        names = set(executor.fragment_ids)
        found = (index for index, one in enumerate(self.operations) if getattr(one, side).fragment_id in names)
        return tuple(found)


def _attestations(fragments):
    """Returns the bindings of fragments, each once."""
    found = {}
    for one in fragments:
        found.setdefault((one.attestation.placement.placement_id, one.attestation.evidence.participant_id), one)
    return [one.attestation for one in found.values()]


__all__ = ["ExecutorTransferPlan", "RuntimeFragmentSnapshot", "TransferPlan", "executors_of"]
