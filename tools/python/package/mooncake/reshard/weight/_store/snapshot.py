"""Snapshots of a model's weights: what a framework says about its tensors, and the writer that stores them."""

from dataclasses import dataclass
from typing import Optional, Protocol, Sequence, Tuple

from mooncake.reshard import _checks
from mooncake.reshard.contracts import PlacementFragmentId, ResourceId, RevisionId
from mooncake.reshard.weight._store.plans import UploadReceipt, WeightStoreError, WeightUploadPlan
from mooncake.reshard.weight.lifetime import WeightAllocationGuardProviders
from mooncake.reshard.weight.placement import WeightPlacementManifest
from mooncake.reshard.weight.runtime import WeightRuntimeBindingManifest
from mooncake.reshard.weight.storage_manifest import StoredWeightManifest


@dataclass(frozen=True)
class WeightSnapshotDescriptor:
    """Which version of which weights a snapshot is."""

    resource_id: ResourceId
    revision: RevisionId
    weight_generation: int
    namespace: str = "default"

    def __post_init__(self):
        for name in ("resource_id", "revision", "namespace"):
            _checks.text(getattr(self, name), name)
        _checks.u64(self.weight_generation, "weight_generation")


class WeightSnapshotSource(Protocol):
    """Placement of all weights, and the bindings of those that this process writes from."""

    placement: WeightPlacementManifest
    bindings: Sequence[WeightRuntimeBindingManifest]


class WeightSnapshotAdapter(Protocol):
    """Knowledge of a framework about its tensors."""

    def export_source(self, snapshot: WeightSnapshotDescriptor) -> WeightSnapshotSource:
        """Returns where the weights of a snapshot are."""

    def resolve_fragment_ids(
        self, *, tensor_id: str, tensor: object, source: WeightSnapshotSource
    ) -> Sequence[PlacementFragmentId]:
        """Returns the fragments that a tensor of the framework is."""

    def source_allocation_guards(
        self, binding: WeightRuntimeBindingManifest
    ) -> Optional[WeightAllocationGuardProviders]:
        """Returns the providers that pin the memory of a binding."""


class WeightStoreWriter:
    """Writes a snapshot, which readers see when it is committed, and not before.

    A context manager: leaving it commits, leaving it by an exception aborts. Not for several threads at once.
    """

    def __init__(self, weight_store, snapshot: WeightSnapshotDescriptor, adapter: WeightSnapshotAdapter):
        self.snapshot = _checks.instance(snapshot, "snapshot", WeightSnapshotDescriptor)
        self._store = weight_store
        self._adapter = adapter
        self._source = adapter.export_source(snapshot)
        self._placement = self._source.placement
        bindings = tuple(self._source.bindings)
        self._plan = weight_store.plan_upload(self._placement, bindings, namespace=snapshot.namespace)
        for name in ("resource_id", "revision", "weight_generation"):
            if getattr(self._placement, name) != getattr(snapshot, name):
                raise WeightStoreError(f"{name} of the snapshot differs from its source placement's")
        self._bindings = {one.participant_id: one for one in bindings}
        self._operations = {one.source_placement.placement_fragment_id: one for one in self._plan.operations}
        #: Fragments of each participant that no tensor has named so far: its memory is written with the last one.
        self._missing = {}
        for name, one in self._operations.items():
            self._missing.setdefault(one.source_participant_id, set()).add(name)
        self._receipts = []
        self._begun = self._decided = self._closed = self._committed = False

    @property
    def plan(self) -> WeightUploadPlan:
        """Returns the plan that the writer follows."""
        return self._plan

    def write_tensor(self, tensor_id: str, tensor: object) -> Tuple[UploadReceipt, ...]:
        """Adds a tensor. Returns receipts of what was written: all of a participant, with the last of its tensors,
        which so stay in memory until then.

        WeightStoreError if the tensor is of no fragment of the snapshot, or of one that was added before: the snapshot
        is aborted then, as when the store refuses something.
        """
        self._check_open()
        _checks.text(tensor_id, "tensor_id")
        found = tuple(
            self._adapter.resolve_fragment_ids(tensor_id=tensor_id, tensor=tensor, source=self._source)
        )
        if not found:
            raise WeightStoreError(f"the tensor is of no fragment: {tensor_id}")
        if len(set(found)) != len(found):
            raise WeightStoreError(f"the tensor is twice of the same fragment: {tensor_id}")
        written = []
        try:
            for name in found:
                written += self._add(tensor_id, name)
        except BaseException:
            self.abort()
            raise
        return tuple(written)

    def _add(self, tensor_id, name):
        operation = self._operations.get(name)
        if operation is None:
            raise WeightStoreError(f"the fragment is outside this snapshot: {name}")
        if operation.source_placement.tensor_id != tensor_id:
            raise WeightStoreError(f"the fragment is of another tensor than {tensor_id}: {name}")
        participant = operation.source_participant_id
        if name not in self._missing[participant]:
            raise WeightStoreError(f"duplicate fragment: {name}")
        self._missing[participant].remove(name)
        if self._missing[participant]:
            return ()
        binding = self._bindings[participant]
        guards = self._adapter.source_allocation_guards(binding)
        self._begun = True
        receipts = self._store.upload(self._plan, self._placement, binding, source_allocation_guards=guards)
        self._receipts += receipts
        return receipts

    def commit(self) -> StoredWeightManifest:
        """Makes the snapshot visible. Returns its manifest.

        WeightStoreError if fragments are missing, and the snapshot is aborted. After one that leaves open whether the
        store has the decision, only `commit` goes on.
        """
        self._check_open()
        missing = sorted(name for names in self._missing.values() for name in names)
        if missing:
            self.abort()
            raise WeightStoreError(f"the snapshot is missing required fragments: {', '.join(missing[:4])}")
        manifest = self._store.commit_upload(self._plan, self._receipts, decided=self._set_decided)
        self._closed = self._committed = True
        return manifest

    def _set_decided(self):
        self._decided = True

    def abort(self) -> None:
        """Removes what was written; idempotent, and nothing after a commit. WeightStoreError if the store has, or may
        have, the decision to commit, or keeps objects: another `abort` tries again then."""
        if self._closed:
            return
        if self._decided:
            raise WeightStoreError("the decision to commit may be in the store: commit again")
        if self._begun:
            # Also without a receipt: a participant whose upload failed has written some of its objects.
            self._store.abort_upload(self._plan, self._receipts)
        self._closed = True

    def _check_open(self):
        if self._closed:
            raise WeightStoreError(f"the snapshot is {'committed' if self._committed else 'aborted'} already")

    def __enter__(self):
        self._check_open()
        return self

    def __exit__(self, kind, value, trace):
        if kind is None:
            if not self._committed:
                self.commit()
        elif not self._decided:
            self.abort()
        return False


__all__ = ["WeightSnapshotAdapter", "WeightSnapshotDescriptor", "WeightSnapshotSource", "WeightStoreWriter"]
