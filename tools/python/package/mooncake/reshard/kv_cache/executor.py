"""Execution of transfer plans by a transfer engine: each writer pushes its bytes into the targets' memory."""

import threading

from mooncake.reshard import _checks
from mooncake.reshard.kv_cache.completion import KVCacheWriterReceipt
from mooncake.reshard.kv_cache.resolved import KVCacheRegisteredRegion, KVCacheResolvedRuntimeBinding
from mooncake.reshard.kv_cache.transfer import KVCacheRuntimeTransferPlan

#: Limit of operations whose receipts are kept for a repeated call.
_MOST_RESULTS = 4096


class KVCacheTransferEngineExecutor:
    """Writer of one process, with its `mooncake.engine.TransferEngine`. One call at a time.

    A transfer that fails has been withdrawn when its ticket says so, and memory is free again. An engine without
    tickets leaves it open whether bytes are in flight: the executor then refuses all further work.
    """

    def __init__(self, engine, *, instance_id: str, endpoint: str):
        self.engine = engine
        self.instance_id = _checks.text(instance_id, "instance_id")
        self.endpoint = _checks.text(endpoint, "endpoint")
        self._regions, self._results = {}, {}
        self._uncertain = False
        self._lock = threading.RLock()

    def _check_certain(self):
        if self._uncertain:
            raise RuntimeError("bytes may be in flight, or memory half registered: replace the engine")

    def register_region(self, region: KVCacheRegisteredRegion) -> None:
        """Registers memory; a region that is registered stays as it is. RuntimeError if the engine refuses."""
        _checks.instance(region, "region", KVCacheRegisteredRegion)
        if region.endpoint != self.endpoint:
            raise ValueError(f"region endpoint differs from local executor: {region.endpoint}, not {self.endpoint}")
        with self._lock:
            self._check_certain()
            if self._regions.get(region.region_id) == region:
                return
            if region.region_id in self._regions:
                raise ValueError(f"registered region_id is already bound: {region.region_id}")
            for one in self._regions.values():
                if region.address < one.address + one.nbytes and one.address < region.address + region.nbytes:
                    raise ValueError(f"registered regions overlap: {region.region_id} and {one.region_id}")
            self._native(self.engine.register_memory, region.address, region.nbytes)
            self._regions[region.region_id] = region

    def unregister_region(self, region_id: str) -> None:
        """Gives memory up; KeyError if there is none of that name."""
        with self._lock:
            self._check_certain()
            self._native(self.engine.unregister_memory, self._regions[region_id].address)
            del self._regions[region_id]

    def _native(self, call, *arguments):
        # An exception in between leaves open which transfers the engine has made.
        self._uncertain = True
        code = call(*arguments)
        if code != 0:
            raise RuntimeError(f"the engine's {call.__name__} failed: {code}")
        self._uncertain = False

    def validate_local_binding(self, binding: KVCacheResolvedRuntimeBinding) -> None:
        """ValueError if a binding is not of this process, or of memory that is not registered here."""
        _checks.instance(binding, "binding", KVCacheResolvedRuntimeBinding)
        with self._lock:
            self._check_certain()
            if binding.instance_id != self.instance_id:
                raise ValueError(f"binding instance differs from local executor: {binding.instance_id}")
            for one in binding.regions:
                if self._regions.get(one.region_id) != one:
                    raise ValueError(f"binding region is not registered with this executor: {one.region_id}")

    def execute(self, plan: KVCacheRuntimeTransferPlan, writer_id: str, *, warmup: bool = False):
        """Writes all of a writer's bytes. Returns a receipt for each target; those of an operation that was executed
        before are returned again. A failure is in the receipts."""
        _checks.instance(plan, "plan", KVCacheRuntimeTransferPlan)
        _checks.text(writer_id, "writer_id")
        if type(warmup) is not bool:
            raise ValueError("warmup must be a boolean")
        with self._lock:
            self._check_certain()
            digest, found = self._results.get(plan.operation_id, (plan.digest, {}))
            if digest != plan.digest:
                raise ValueError(f"operation_id was already used with a different transfer: {plan.operation_id}")
            if writer_id not in found:
                binding = next((one for one in plan.source_bindings if one.participant_id == writer_id), None)
                if binding is None:
                    raise ValueError(f"writer is not selected by runtime transfer: {writer_id}")
                self.validate_local_binding(binding)
                found[writer_id] = self._write(plan, writer_id, warmup)
                self._results[plan.operation_id] = (plan.digest, found)
                while len(self._results) > _MOST_RESULTS:
                    del self._results[next(iter(self._results))]
            return found[writer_id]

    def _write(self, plan, writer_id, warmup):
        writes = [one for one in plan.writes if one.source_participant_id == writer_id]
        done = dict.fromkeys(sorted({one.target_participant_id for one in writes}), 0)
        error = None
        try:
            for endpoint in sorted({one.endpoint for one in writes}) if warmup else ():
                if self.engine.send_probe(endpoint) != 0:
                    raise RuntimeError(f"{endpoint} cannot be reached")
            for batch in _batches(writes, plan.limits):
                # An exception in the call leaves this set.
                self._uncertain = True
                ended, drained = _submit(self.engine, batch)
                self._uncertain = not drained
                if not ended:
                    raise RuntimeError(f"a batch of {len(batch)} writes to {batch[0].endpoint} failed")
                for one in batch:
                    done[one.target_participant_id] += one.nbytes
        except Exception as failure:  # The receipt has it.
            error = f"{type(failure).__name__}: {failure}"
        outcome = {"success": error is None, "quiesced": not self._uncertain, "error": error}
        names = (plan.operation_id, plan.digest, writer_id)
        return tuple(KVCacheWriterReceipt(*names, name, completed_bytes=size, **outcome) for name, size in done.items())


def _submit(engine, batch):
    """Writes a batch. Returns whether all is written, and whether nothing is in flight."""
    endpoint, sizes = batch[0].endpoint, [one.nbytes for one in batch]
    ours, theirs = [one.source_address for one in batch], [one.target_address for one in batch]
    scatter = getattr(engine, "scatter_transfer_sync_write_with_ticket", None)
    if scatter is None:
        ended = engine.batch_transfer_sync_write(endpoint, ours, theirs, sizes) == 0
        return ended, ended
    ticket = scatter(endpoint, ours, sizes, theirs, sizes, [[0]] * len(batch), [[0]] * len(batch), [[n] for n in sizes])
    return int(ticket.status) == 0, bool(ticket.drained)


def _batches(writes, limits):
    batch, size = [], 0
    for one in writes:
        full = len(batch) == limits.max_batch_operations or size + one.nbytes > limits.max_batch_bytes
        if batch and (full or one.endpoint != batch[0].endpoint):
            yield batch
            batch, size = [], 0
        batch.append(one)
        size += one.nbytes
    if batch:
        yield batch


__all__ = ["KVCacheTransferEngineExecutor"]
