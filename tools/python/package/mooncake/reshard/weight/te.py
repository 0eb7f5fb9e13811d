"""Execution of bound plans by transfer engines: a rank reads what it needs, or writes what others need of it."""

from contextlib import contextmanager
from dataclasses import dataclass
from uuid import uuid4

from mooncake.reshard import _checks
from mooncake.reshard.lifetime import TerminalTransferState, release_tokens_after_terminal
from mooncake.reshard.transfer_engine import (
    BufferRegistrationLease,
    MooncakeTransferEngineExecutor,
    TransferBatch,
    TransferBatchRange,
    TransferCompletionFailedError,
    TransferCompletionInterrupted,
    TransferCompletionUnknownError,
    TransferDirection,
    TransferEngineError,
    TransferRegistrationCleanupPendingError,
)
from mooncake.reshard.transfer_engine.executor import unregister
from mooncake.reshard.weight._planner.attested import BoundWeightFragment
from mooncake.reshard.weight._planner.bound import TransferPlan
from mooncake.reshard.weight.binding import validate_runtime_binding
from mooncake.reshard.weight.lifetime import (
    WeightAllocationGuardProvider,
    WeightAllocationGuardProviders,
    acquire_weight_binding_token,
)
from mooncake.reshard.weight.validation import grouped

MemoryRegistrationLease = BufferRegistrationLease
_STATES = TerminalTransferState


@dataclass(frozen=True)
class DirectReadReceipt:
    """What a worker has read from one endpoint."""

    source_endpoint: str
    target_worker_id: str
    operation_count: int
    nbytes: int


@dataclass(frozen=True)
class DirectTransferReceipt:
    """What a worker has written to one endpoint."""

    source_worker_id: str
    target_endpoint: str
    operation_count: int
    nbytes: int


class _Direct:
    """Limits of an executor of plans, and what reads and writes share. One transfer at a time; from any thread."""

    def __init__(
        self,
        engine,
        *,
        max_batch_operations=1024,
        max_region_segments=1_000_000,
        max_total_lowered_segments=10_000_000,
        max_inflight_batches=1,
        max_completion_drain_attempts=3,
        completion_drain_timeout_ms=1000,
    ):
        self.engine = engine
        self.max_batch_operations = _checks.integer(max_batch_operations, "max_batch_operations", 1)
        self.max_region_segments = _checks.integer(max_region_segments, "max_region_segments", 1)
        total = _checks.integer(max_total_lowered_segments, "max_total_lowered_segments", 1)
        self.max_total_lowered_segments = total
        self.max_inflight_batches = _checks.integer(max_inflight_batches, "max_inflight_batches", 1)
        self.transfer_executor = MooncakeTransferEngineExecutor(
            engine,
            max_completion_drain_attempts=max_completion_drain_attempts,
            completion_drain_timeout_ms=completion_drain_timeout_ms,
        )

    def pending_transfer_ids(self):
        """Returns the ids of transfers that were not seen to end; their memory is pinned and registered."""
        return self.transfer_executor.pending_transfer_ids()

    def pending_transfer_status(self, pending_transfer_id):
        """Returns the name of what is known about a transfer."""
        return self.transfer_executor.pending_transfer_status(pending_transfer_id)

    def drain_pending_transfer(self, pending_transfer_id, *, timeout_ms=1000):
        """Waits for a transfer, for at most so long, and gives its memory up if it has ended."""
        return self.transfer_executor.drain_pending_transfer(pending_transfer_id, timeout_ms=timeout_ms)

    def _execute(self, plan, local, remote, worker, direction, transfer_id):
        """Executes a worker's copies. Returns its name, and copies and bytes by the peers' endpoints."""
        if not isinstance(plan, TransferPlan):
            raise TransferEngineError(f"plan must be a TransferPlan, not {type(plan).__name__}")
        executors = getattr(plan, f"{local.side}_executors")
        (binding,) = local.bindings
        mine = [one for one in executors if one.participant_id == binding.participant_id]
        if mine and not any(one.instance_id == binding.instance_id for one in mine):
            raise TransferEngineError(f"{local.side} executor snapshot mismatch: unknown instance")
        workers = {one.worker_id for one in mine}
        if not mine:
            return None, {}
        if worker is None and len(workers) > 1:
            raise TransferEngineError(f"{local.side}_worker_id is required: the binding has {len(workers)} workers")
        worker = next(iter(workers)) if worker is None else worker
        if worker not in workers:
            raise TransferEngineError(f"unknown {local.side} worker: {worker}")
        executor = next(one for one in mine if one.worker_id == worker)
        operations = [plan.operations[at] for at in plan.operation_indices_for_executor(executor, local.side)]
        self._check_limits(operations)
        for side in (local, remote):
            side.scope(plan, operations)
        with self.transfer_executor.submission() as submission:
            with self._pinned(submission, local, remote, transfer_id or uuid4().hex) as registered:
                if local.registrations is None:
                    self._register(local.allocations(), registered)
                receipts = submission.execute_batches(
                    self._batches(operations, remote.side), direction, max_inflight_batches=self.max_inflight_batches
                )
        found = grouped(receipts, lambda one: one.endpoint)
        totals = lambda some: (sum(one.operation_count for one in some), sum(one.nbytes for one in some))
        return worker, {endpoint: totals(found[endpoint]) for endpoint in sorted(found)}

    def _check_limits(self, operations):
        total = 0
        for one in operations:
            if not isinstance(one.source, BoundWeightFragment):
                raise TransferEngineError("the source of the plan is in a store: see WeightStore.load")
            total += one.segment_count
            if one.segment_count > self.max_region_segments:
                raise TransferEngineError(f"a copy of {one.tensor_id} exceeds max_region_segments: {one.segment_count}")
            if total > self.max_total_lowered_segments:
                raise TransferEngineError(f"the plan exceeds max_total_lowered_segments: {total}")

    @contextmanager
    def _pinned(self, submission, local, remote, transfer_id):
        """Context manager of the memory of both ends, pinned. Yields a list of addresses to unregister afterwards."""
        tokens, registered, manager = [], [], self.transfer_executor.pending
        state = _STATES.ABORTED
        try:
            for side in (local, remote):
                side.acquire(transfer_id, tokens)
            yield registered
            state = _STATES.COMPLETED
        except (TransferCompletionUnknownError, TransferCompletionInterrupted) as error:
            manager.attach(error.pending_transfer_id, registered, tokens)
            registered, tokens = [], []
            raise
        except BaseException:
            state = _STATES.FAILED_DRAINED if submission.physical_io_started else _STATES.ABORTED
            raise
        finally:
            left = unregister(self.engine, registered)
            if left:
                name = manager.keep(state=state)
                manager.attach(name, left, tokens)
                text = f"the engine keeps memory: {left}"
                raise TransferRegistrationCleanupPendingError(text, pending_transfer_id=name)
            release_tokens_after_terminal(tokens, state)

    def _register(self, allocations, registered):
        for address, size in allocations:
            code = self.engine.register_memory(address, size)
            if code != 0:
                raise TransferEngineError(f"memory at {address} was not registered: {code}")
            registered.append(address)

    def _batches(self, operations, remote):
        """Yields batches of copies with one peer each."""
        by_peer = grouped(operations, lambda one: getattr(one, remote).endpoint)
        for endpoint in sorted(by_peer):
            ranges, count = [], 0
            order = lambda one: (one.target.address + one.target_offset, one.source.address + one.source_offset)
            for one in sorted(by_peer[endpoint], key=order):
                copies = []
                for copy in one.iter_segments(max_segments=self.max_region_segments):
                    copies.append(copy)
                    if count + len(copies) == self.max_batch_operations:
                        yield TransferBatch.from_ranges(endpoint=endpoint, ranges=(*ranges, _range(one, copies)))
                        ranges, copies, count = [], [], 0
                if copies:
                    ranges.append(_range(one, copies))
                    count += len(copies)
            if ranges:
                yield TransferBatch.from_ranges(endpoint=endpoint, ranges=tuple(ranges))


def _range(operation, copies):
    of, to = operation.source, operation.target
    columns = (
        tuple(at + of.storage_offset_bytes for at, _, _ in copies),
        tuple(at + to.storage_offset_bytes for _, at, _ in copies),
        tuple(size for _, _, size in copies),
    )
    ends = (of.storage_address, of.storage_nbytes, to.storage_address, to.storage_nbytes)
    return TransferBatchRange(*ends, *columns)


class _Side:
    """One end of a transfer: its bindings, their pins, and registrations of their memory."""

    def __init__(self, side, placement, bindings, guards, registrations):
        self.side, self.placement, self.bindings, self.guards = side, placement, tuple(bindings), guards
        self.registrations = None
        if registrations is not None:
            found = list(registrations)
            if len({one.fragment_id for one in found}) != len(found):
                raise TransferEngineError(f"duplicate {side} registration lease")
            self.registrations = {one.fragment_id: one for one in found}

    def scope(self, plan, operations):
        """Takes the fragments of copies. TransferEngineError unless the bindings have them as the plan does."""
        self._fragments = {}
        given = {(one.instance_id, one.participant_id): one for one in self.bindings}
        if len(given) != len(self.bindings):
            raise TransferEngineError(f"duplicate {self.side} runtime binding participant")
        used = {getattr(one, self.side).fragment_id: getattr(one, self.side) for one in operations}
        participant = lambda one: (one.instance_id, one.attestation.evidence.participant_id)
        for key, some in grouped(used.values(), participant).items():
            if key not in given:
                raise TransferEngineError(f"{self.side} executor set is incomplete: {key[1]}")
            self._fragments[key] = some
            self._check(given[key], some)

    def _check(self, binding, some):
        try:
            validate_runtime_binding(self.placement, binding)
        except ValueError as error:
            raise TransferEngineError(f"invalid {self.side} runtime binding: {error}") from error
        memory, lease = {one.fragment_id: one for one in binding.fragments}, (binding.lease_id, binding.generation)
        for one in some:
            if memory.get(one.fragment_id) != one.binding or lease != (one.runtime_lease_id, one.lease_generation):
                raise TransferEngineError(f"{self.side} executor snapshot mismatch: {one.fragment_id}")
            if self.registrations is None:
                continue
            made = {"lease_generation": binding.generation, "runtime_lease_id": binding.lease_id}
            expected = BufferRegistrationLease.from_fragment(one.binding, **made)
            if self.registrations.get(one.fragment_id) != expected:
                raise TransferEngineError(f"{self.side} registration lease mismatch: {one.fragment_id}")

    def acquire(self, transfer_id, tokens):
        """Pins the fragments; what was pinned is in `tokens`, whatever happens."""
        for binding in self.bindings:
            some = self._fragments.get((binding.instance_id, binding.participant_id))
            if some is None:
                continue
            try:
                _, found = acquire_weight_binding_token(
                    transfer_id=transfer_id,
                    expected_binding=binding,
                    required_fragment_ids=[one.fragment_id for one in some],
                    side=self.side,
                    providers=self.guards,
                )
            except ValueError as error:
                raise TransferEngineError(str(error)) from error
            tokens += found.tokens

    def allocations(self):
        """Returns address and length of each allocation."""
        found = {(one.storage_address, one.storage_nbytes) for some in self._fragments.values() for one in some}
        return sorted(found)


class MooncakeTransferEngineReader(_Direct):
    """Reads by a rank of the target, from memory that the ranks of the source have registered."""

    def execute(
        self,
        plan,
        source_placement,
        source_bindings,
        target_placement,
        target_binding,
        *,
        target_worker_id=None,
        source_pre_registered=True,
        source_registrations=None,
        target_pre_registered=False,
        target_registrations=None,
        source_allocation_guards=None,
        target_allocation_guards=None,
        transfer_id=None,
    ):
        """Fills the memory of a worker of a participant. Returns a receipt for each endpoint.

        `source_registrations` are the peers' word that their memory is registered; the target's memory is registered
        for the time of the call, unless `target_registrations` say that it is. TransferEngineError if a binding is not
        the plan's, and its subclasses for transfers that fail.
        """
        if not source_pre_registered or source_registrations is None:
            raise TransferEngineError("source registration leases are required: peers register their memory")
        if target_pre_registered != (target_registrations is not None):
            raise TransferEngineError("target_registrations and target_pre_registered go together")
        remote = _Side("source", source_placement, source_bindings, source_allocation_guards, source_registrations)
        mine = (target_placement, [target_binding], target_allocation_guards, target_registrations)
        sides = (_Side("target", *mine), remote)
        worker, found = self._execute(plan, *sides, target_worker_id, TransferDirection.READ, transfer_id)
        return tuple(DirectReadReceipt(endpoint, worker, *totals) for endpoint, totals in found.items())


class MooncakeTransferEngineSink(_Direct):
    """Writes by a rank of the source, into memory that the ranks of the target have registered."""

    def execute(
        self,
        plan,
        source_placement,
        source_binding,
        target_placement,
        target_bindings,
        *,
        source_worker_id=None,
        target_registrations=None,
        source_pre_registered=False,
        source_registrations=None,
        source_allocation_guards=None,
        target_allocation_guards=None,
        transfer_id=None,
    ):
        """Writes what a worker of a participant has for others. Returns a receipt for each endpoint; the rest is as in
        `MooncakeTransferEngineReader.execute`, with the sides exchanged."""
        if target_registrations is None:
            raise TransferEngineError("target registration leases are required: peers register their memory")
        if source_pre_registered != (source_registrations is not None):
            raise TransferEngineError("source_registrations and source_pre_registered go together")
        remote = _Side("target", target_placement, target_bindings, target_allocation_guards, target_registrations)
        mine = (source_placement, [source_binding], source_allocation_guards, source_registrations)
        sides = (_Side("source", *mine), remote)
        worker, found = self._execute(plan, *sides, source_worker_id, TransferDirection.WRITE, transfer_id)
        return tuple(DirectTransferReceipt(worker, endpoint, *totals) for endpoint, totals in found.items())


__all__ = [
    "DirectReadReceipt",
    "DirectTransferReceipt",
    "MemoryRegistrationLease",
    "MooncakeTransferEngineReader",
    "MooncakeTransferEngineSink",
    "TransferCompletionFailedError",
    "TransferCompletionInterrupted",
    "TransferCompletionUnknownError",
    "TransferEngineError",
    "TransferRegistrationCleanupPendingError",
    "WeightAllocationGuardProvider",
    "WeightAllocationGuardProviders",
]
