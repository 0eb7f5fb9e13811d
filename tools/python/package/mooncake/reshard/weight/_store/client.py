"""Store of weights: versions of a model as objects, written by the ranks of one layout and read by those of another."""

from mooncake.reshard import _checks
from mooncake.reshard.weight._planner.api import plan_stored_transfer_to_target_placement
from mooncake.reshard.weight._planner.binding import bind_logical_transfer_plan, resolve_executor_plans
from mooncake.reshard.weight._store.backend import StoreBackend, default_config_factory
from mooncake.reshard.weight._store.plans import (
    UploadReceipt,
    WeightLoadPlan,
    WeightStoreError,
    WeightUploadPlan,
    check_pair,
    paired,
    plan_weight_upload,
)
from mooncake.reshard.weight._store.registration import StoreBufferRegistration, StoreRegistrationLease
from mooncake.reshard.weight._store.snapshot import WeightStoreWriter
from mooncake.reshard.weight._store.transaction import WeightUploadTransaction
from mooncake.reshard.weight.runtime import WeightRuntimeBindingManifest
from mooncake.reshard.weight.storage_manifest import StoredWeightManifest

_IDENTITY = ("resource_id", "revision", "weight_generation")


class WeightStore:
    """Weights in a `mooncake.store.MooncakeDistributedStore`. Callable from any thread.

    A version is `PREFIX/NAMESPACE/RESOURCE/REVISION/GENERATION`: objects of weights below `payload/`, and `manifest`,
    which is put when all of them are there. Objects never change: another version has other keys.
    """

    def __init__(
        self,
        store,
        *,
        key_prefix="weights",
        config_factory=None,
        max_range_bytes=64 << 20,
        max_ranges_per_request=1024,
        max_region_segments=1_000_000,
    ):
        self.store = StoreBackend(store)
        self.key_prefix = _checks.text(key_prefix, "key_prefix").strip("/")
        self.config_factory = config_factory or default_config_factory
        self.max_range_bytes = _checks.integer(max_range_bytes, "max_range_bytes", 1)
        self.max_ranges_per_request = _checks.integer(max_ranges_per_request, "max_ranges_per_request", 1)
        self.max_region_segments = _checks.integer(max_region_segments, "max_region_segments", 1)
        self.registration = StoreBufferRegistration(self.store)
        self._transaction = WeightUploadTransaction(self.store, self.config_factory, self.max_ranges_per_request)

    # --- writers ---------------------------------------------------------------------------------------------------

    def begin_weight_snapshot(self, snapshot, adapter) -> WeightStoreWriter:
        """Returns a writer of a snapshot, whose tensors an adapter of the framework finds."""
        return WeightStoreWriter(self, snapshot, adapter)

    def plan_upload(self, source_placement, source_bindings, *, namespace="default") -> WeightUploadPlan:
        """Returns a plan that all writers of a version share: see `plan_weight_upload`."""
        return plan_weight_upload(source_placement, source_bindings, namespace=namespace, key_prefix=self.key_prefix)

    def upload(
        self,
        plan,
        source_placement,
        source_binding,
        *,
        source_worker_id=None,
        source_allocation_guards=None,
        registration_lease=None,
        transfer_id=None,
    ):
        """Writes what a worker of a participant has to. Returns receipts, one for each object.

        The worker is named where a binding has several; memory is pinned by guards, or by a lease of
        `register_weight_buffers`. WeightStoreError if the binding is not the plan's, or the store refuses something.
        """
        self._check_plan(plan, WeightUploadPlan)
        check_pair(source_placement, source_binding, "source")
        identity = (source_placement.placement_id, source_placement.digest)
        if identity != (plan.source_placement_id, plan.source_placement_digest):
            raise WeightStoreError("the source placement is not that of the upload plan")
        mine = [one for one in plan.operations if one.source_participant_id == source_binding.participant_id]
        if not mine:
            return ()
        worker = _worker("source", {one.source_snapshot.worker_id for one in mine}, source_worker_id)
        mine = [one for one in mine if one.source_snapshot.worker_id == worker]
        memory = {one.placement_fragment_id: one for one in source_binding.fragments}
        lease = (source_binding.instance_id, source_binding.lease_id, source_binding.generation)
        for one in mine:
            name = one.source_placement.placement_fragment_id
            if (one.source_instance_id, one.source_lease_id, one.source_generation) != lease:
                raise WeightStoreError(f"the lease of the source is not that of the upload plan: {name}")
            if name not in memory or not one.source_snapshot.matches(memory[name]):
                raise WeightStoreError(f"the memory of the source is not that of the upload plan: {name}")
        self._transaction.check_writable(plan)
        fragments = [memory[one.source_placement.placement_fragment_id] for one in mine]
        pinned = (source_allocation_guards, registration_lease, transfer_id)
        with self.registration.held("source", source_binding, fragments, *pinned) as progress:
            for begin in range(0, len(mine), self.max_ranges_per_request):
                some = slice(begin, begin + self.max_ranges_per_request)
                keys = [one.target.object_key for one in mine[some]]
                config = self.config_factory([plan.manifest.group_id] * len(keys), "payload")
                progress.begun = True
                places = [one.address for one in fragments[some]], [one.nbytes for one in fragments[some]]
                codes = self.store.codes("batch_put_from", keys, *places, config)
                wrong = {key: code for key, code in codes.items() if code != 0}
                if wrong:
                    raise WeightStoreError("weights were not written", wrong)
        # Of an abort in between, whatever was written after it is removed.
        self._transaction.check_writable(plan)
        return tuple(UploadReceipt(one.target.fragment_id, one.target.object_key, worker) for one in mine)

    def commit_upload(self, plan, receipts, *, decided=lambda: None) -> StoredWeightManifest:
        """Makes a version visible once the receipts of all its writers are there. Returns its manifest; repeatable.

        `decided` is called before the store gets the decision. WeightStoreError if something is missing, or another
        plan has been published as this version: what this one has written is removed then.
        """
        self._check_plan(plan, WeightUploadPlan)
        return self._transaction.commit(plan, receipts, decided)

    def abort_upload(self, plan, receipts) -> None:
        """Removes what the writers of a plan have written. WeightStoreError if it is committed."""
        self._check_plan(plan, WeightUploadPlan)
        self._transaction.abort(plan, receipts)

    def finalize_upload_transaction(self, plan) -> None:
        """Ends a plan of which a writer does not know how it ended, and removes what is left of an abort."""
        self._check_plan(plan, WeightUploadPlan)
        self._transaction.finalize(plan)

    # --- readers ---------------------------------------------------------------------------------------------------

    def load_manifest(self, manifest_key: str) -> StoredWeightManifest:
        """Reads the manifest of a version. WeightStoreError if there is none: the version is not committed."""
        found = self._transaction.manifest(manifest_key)
        if found is None:
            raise WeightStoreError(f"there is no weight manifest {manifest_key}")
        return found

    def plan_load(self, manifest, target_placement, target_bindings) -> WeightLoadPlan:
        """Returns a plan that fills the memory of all participants of a layout from a version."""
        _checks.instance(manifest, "manifest", StoredWeightManifest)
        bindings = paired(target_placement, target_bindings, "target")
        self._check_version(manifest, target_placement)
        logical = plan_stored_transfer_to_target_placement(manifest, target_placement)
        return WeightLoadPlan(manifest, bind_logical_transfer_plan(logical, bindings, source_manifest=manifest))

    def load(
        self,
        plan,
        target_placement,
        target_binding,
        *,
        target_worker_id=None,
        target_allocation_guards=None,
        registration_lease=None,
        transfer_id=None,
    ) -> None:
        """Fills the memory of a worker of a participant. WeightStoreError if the binding is not the plan's, or if the
        version is not committed, or removed: the memory counts for nothing then."""
        self._check_plan(plan, WeightLoadPlan)
        check_pair(target_placement, target_binding, "target")
        self._check_version(plan.manifest, target_placement)
        try:
            executors = resolve_executor_plans(plan.transfer, target_placement, target_binding, "target")
        except ValueError as error:
            raise WeightStoreError(str(error)) from error
        worker = _worker("target", {one.worker_id for one in executors}, target_worker_id)
        if self.load_manifest(plan.manifest.manifest_key) != plan.manifest:
            raise WeightStoreError(f"the committed manifest is not that of the plan: {plan.manifest.manifest_key}")
        memory, by_target = {one.fragment_id: one for one in target_binding.fragments}, {}
        for executor in executors:
            if executor.worker_id != worker:
                continue
            for index in plan.transfer.operation_indices_for_executor(executor, "target"):
                one = plan.transfer.operations[index]
                if one.segment_count > self.max_region_segments:
                    counts = f"{one.segment_count}, {self.max_region_segments}"
                    raise WeightStoreError(f"a copy of {one.tensor_id} exceeds max_region_segments: {counts}")
                by_target.setdefault(one.target.fragment_id, []).append(one)
        fragments = [memory[name] for name in sorted(by_target)]
        pinned = (target_allocation_guards, registration_lease, transfer_id)
        with self.registration.held("target", target_binding, fragments, *pinned) as progress:
            keys = sorted({one.source.object_key for some in by_target.values() for one in some})
            ranges = self.store.call("prepare_get_into_ranges_snapshot", keys)
            batch = []
            for fragment in fragments:
                for piece in self._pieces(by_target[fragment.fragment_id]):
                    batch.append((fragment.address, *piece))
                    if len(batch) == self.max_ranges_per_request:
                        progress.begun = True
                        self._read(ranges, batch)
                        batch = []
            if batch:
                progress.begun = True
                self._read(ranges, batch)

    def _pieces(self, operations):
        """Yields key, offset in memory, offset in the object, and length of each range of a fragment."""
        for one in sorted(operations, key=lambda one: (one.target_offset, one.source.object_key, one.source_offset)):
            for of, to, size in one.iter_segments(max_segments=self.max_region_segments):
                for begin in range(0, size, self.max_range_bytes):
                    length = min(self.max_range_bytes, size - begin)
                    yield one.source.object_key, to + begin, one.source.object_offset + of + begin, length

    def _read(self, snapshot, batch):
        by_memory = {}
        for address, key, *piece in batch:
            by_memory.setdefault(address, {}).setdefault(key, []).append(piece)
        column = lambda at: [[[piece[at] for piece in some] for some in by.values()] for by in by_memory.values()]
        keys, sizes = [list(by) for by in by_memory.values()], column(2)
        places = (list(by_memory), keys, column(0), column(1), sizes)
        found, wrong = self.store.call("get_into_ranges_from_snapshot", snapshot, *places), {}
        for some, codes, wanted in zip(keys, found, sizes):
            wrong.update((key, got) for key, got, expected in zip(some, codes, wanted) if list(got) != expected)
        shapes = lambda nested: [len(one) for one in nested]
        if shapes(found) != shapes(keys) or wrong:
            raise WeightStoreError("weights were not read whole", wrong)

    # --- memory ----------------------------------------------------------------------------------------------------

    def register_weight_buffers(
        self, binding, *, fragment_ids, allocation_guards, side, transfer_id=None
    ) -> StoreRegistrationLease:
        """Pins and registers fragments for several transfers, until the lease is closed."""
        if not isinstance(binding, WeightRuntimeBindingManifest):
            raise WeightStoreError("binding must be a WeightRuntimeBindingManifest")
        return self.registration.acquire(side, binding, fragment_ids, allocation_guards, transfer_id)

    def pending_registration_ids(self):
        """Returns the ids of memory that the store did not give up, and that stays pinned."""
        return self.registration.pending_registration_ids()

    def drain_pending_registration(self, pending_registration_id: str) -> None:
        """Unregisters such memory again, and releases its pins. WeightStoreError if the store keeps some."""
        self.registration.drain_pending_registration(pending_registration_id)

    @staticmethod
    def _check_plan(plan, kind):
        if not isinstance(plan, kind):
            raise WeightStoreError(f"plan must be a {kind.__name__}, not {type(plan).__name__}")

    @staticmethod
    def _check_version(manifest, placement):
        for name in _IDENTITY:
            if getattr(manifest, name) != getattr(placement, name):
                raise WeightStoreError(f"{name} of the target placement differs from the manifest's")


def begin_weight_snapshot(store, snapshot, adapter) -> WeightStoreWriter:
    """Returns a writer of a snapshot in a store: see `WeightStoreWriter`."""
    return WeightStore(store).begin_weight_snapshot(snapshot, adapter)


def _worker(side, workers, given):
    """Returns the worker of a binding that a call is for."""
    if given is None and len(workers) == 1:
        return next(iter(workers))
    if given is None:
        raise WeightStoreError(f"{side}_worker_id is required: the binding has {len(workers)} workers")
    if given not in workers:
        raise WeightStoreError(f"unknown {side} worker: {given}")
    return given


__all__ = ["WeightStore", "begin_weight_snapshot"]
