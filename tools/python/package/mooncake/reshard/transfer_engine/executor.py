"""Execution of batches by a transfer engine, and transfers whose end was not seen."""

from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Optional, Tuple
from uuid import uuid4

from mooncake.reshard import _checks
from mooncake.reshard.lifetime import TerminalTransferState, release_tokens_after_terminal
from mooncake.reshard.transfer_engine.contracts import TransferBatch, TransferBatchReceipt, TransferDirection
from mooncake.reshard.transfer_engine.errors import (
    TransferCompletionFailedError,
    TransferCompletionInterrupted,
    TransferCompletionUnknownError,
    TransferEngineError,
    TransferRegistrationCleanupPendingError,
)


@dataclass
class _Pending:
    """Tickets in flight, and what is given up when they have ended."""

    tickets: tuple
    state: Optional[TerminalTransferState]
    addresses: Tuple[int, ...] = ()
    tokens: tuple = ()


class PendingTransferManager:
    """Transfers of an engine that may be in flight still, with their memory. While there is one, none is added."""

    def __init__(self, engine):
        self._engine = engine
        self._lock = Lock()
        self._busy = False
        self._pending = {}

    @property
    def engine_identity(self):
        """Returns what names the engine in this process."""
        return type(self._engine).__qualname__, id(self._engine)

    @contextmanager
    def reserved(self):
        """Context manager of the only transfer of this manager."""
        with self._lock:
            if self._pending:
                raise TransferEngineError(f"a transfer is pending: drain {min(self._pending)} first")
            if self._busy:
                raise TransferEngineError("another transfer is running")
            self._busy = True
        try:
            yield
        finally:
            self._busy = False

    def keep(self, tickets=(), state=None):
        """Keeps tickets that have not ended. Returns their id."""
        name = uuid4().hex
        with self._lock:
            self._pending[name] = _Pending(tuple(tickets), state)
        return name

    def attach(self, pending_transfer_id, addresses, tokens):
        """Adds memory that is registered for a transfer, and pins: both are given up when it has ended."""
        with self._lock:
            one = self._pending[pending_transfer_id]
            one.addresses += tuple(addresses)
            one.tokens += tuple(tokens)

    def pending_transfer_ids(self):
        """Returns the ids of transfers that were not seen to end."""
        with self._lock:
            return tuple(sorted(self._pending))

    def pending_transfer_status(self, pending_transfer_id):
        """Returns the name of what is known about a transfer."""
        with self._lock:
            return _status(self._get(pending_transfer_id), 0)

    def drain_pending_transfer(self, pending_transfer_id, *, timeout_ms=1000):
        """Waits for a transfer, for at most so long, and gives its memory up if it has ended. Returns the name of what
        is known. TransferRegistrationCleanupPendingError if the engine keeps some of the memory."""
        _checks.integer(timeout_ms, "timeout_ms", 0)
        with self._lock:
            one = self._get(pending_transfer_id)
            status = _status(one, timeout_ms)
            if status == "COMPLETION_UNKNOWN":
                return status
            left = unregister(self._engine, one.addresses)
            one.addresses = tuple(left)
            if left:
                raise TransferRegistrationCleanupPendingError(
                    f"the engine keeps memory: {left}", pending_transfer_id=pending_transfer_id
                )
            states = TerminalTransferState
            ended = states.COMPLETED if status == "COMPLETED" else states.FAILED_DRAINED
            release_tokens_after_terminal(one.tokens, one.state or ended)
            del self._pending[pending_transfer_id]
            return status

    def _get(self, name):
        if name not in self._pending:
            raise TransferEngineError(f"there is no pending transfer {name}")
        return self._pending[name]


def _status(pending, timeout_ms):
    """Returns COMPLETION_UNKNOWN while a ticket is in flight, FAILED_DRAINED if one failed, else COMPLETED."""
    found = {one.drain(timeout_ms).name for one in pending.tickets}
    if pending.state in (TerminalTransferState.ABORTED, TerminalTransferState.FAILED_DRAINED):
        found.add("FAILED_DRAINED")
    return next((name for name in ("COMPLETION_UNKNOWN", "FAILED_DRAINED") if name in found), "COMPLETED")


def unregister(engine, addresses):
    """Unregisters memory, the last one first. Returns what the engine says about memory that it keeps."""
    left = {}
    for address in reversed(tuple(addresses)):
        try:
            code = engine.unregister_memory(address)
        except Exception as error:
            code = f"{type(error).__name__}: {error}"
        if code != 0:
            left[address] = code
    return left


class TransferSubmission:
    """The batches of one transfer: see `MooncakeTransferEngineExecutor.submission`."""

    def __init__(self, executor):
        self._executor = executor
        self._open = True
        self._begun = False

    @property
    def physical_io_started(self) -> bool:
        """Returns true once a batch was submitted."""
        return self._begun

    def execute_batch(self, batch, direction) -> TransferBatchReceipt:
        """Executes a batch."""
        return self.execute_batches((batch,), direction)[0]

    def execute_batches(self, batches, direction, *, max_inflight_batches=1):
        """Executes batches in order, so many at a time. Returns their receipts, once all are complete.

        TransferCompletionFailedError if one fails: the ones in flight have ended then, and no other began.
        TransferCompletionUnknownError if one is in flight still, after all attempts to drain it.
        """
        if not self._open:
            raise TransferEngineError("the submission has ended")
        if not isinstance(direction, TransferDirection):
            raise TypeError(f"direction must be a TransferDirection, not {type(direction).__name__}")
        _checks.integer(max_inflight_batches, "max_inflight_batches", 1)
        flight, receipts = deque(), []
        try:
            for batch in batches:
                if not isinstance(batch, TransferBatch):
                    raise TypeError(f"batch must be a TransferBatch, not {type(batch).__name__}")
                if len(flight) == max_inflight_batches:
                    receipts.append(self._ended(*flight[0], direction))
                    flight.popleft()
                self._begun = True
                flight.append((batch, self._executor.submit(batch, direction)))
            while flight:
                receipts.append(self._ended(*flight[0], direction))
                flight.popleft()
        except BaseException as error:
            self._end([ticket for _, ticket in flight], error)
            raise
        return tuple(receipts)

    def _ended(self, batch, ticket, direction):
        status = self._executor.drained(ticket)
        if status != "COMPLETED":
            raise TransferCompletionFailedError(
                f"a batch of {batch.operation_count} copies with {batch.endpoint} did not complete: {status}"
            )
        return TransferBatchReceipt(batch.endpoint, direction, batch.operation_count, batch.nbytes)

    def _end(self, tickets, error):
        """Waits for what is in flight after a failure; raises if it is still, afterwards."""
        manager = self._executor.pending
        interrupted = None if isinstance(error, Exception) else error
        left = list(tickets)
        try:
            if interrupted is None:
                left = [one for one in tickets if self._executor.drained(one) == "COMPLETION_UNKNOWN"]
        except BaseException as second:
            interrupted = second
        if not left:
            return
        self._open = False
        name, identity = manager.keep(left), manager.engine_identity
        if interrupted is not None:
            raise TransferCompletionInterrupted(name, interrupted, engine_identity=identity) from interrupted
        raise TransferCompletionUnknownError(
            f"{len(left)} batches are in flight: {error}", pending_transfer_id=name, engine_identity=identity
        ) from error


class MooncakeTransferEngineExecutor:
    """Batches on a `mooncake.engine.TransferEngine`, one transfer at a time. Callable from any thread."""

    def __init__(self, engine, *, max_completion_drain_attempts=3, completion_drain_timeout_ms=1000):
        self.engine = engine
        attempts = _checks.integer(max_completion_drain_attempts, "max_completion_drain_attempts", 0)
        self.max_completion_drain_attempts = attempts
        self.completion_drain_timeout_ms = _checks.integer(
            completion_drain_timeout_ms, "completion_drain_timeout_ms", 0
        )
        self.pending = PendingTransferManager(engine)

    @property
    def engine_identity(self):
        """Returns what names the engine in this process."""
        return self.pending.engine_identity

    @contextmanager
    def submission(self):
        """Context manager of a transfer. TransferEngineError while there is another one, or a pending one."""
        with self.pending.reserved():
            found = TransferSubmission(self)
            try:
                yield found
            finally:
                found._open = False

    def execute_batch(self, batch, direction) -> TransferBatchReceipt:
        """Executes a transfer of one batch."""
        with self.submission() as found:
            return found.execute_batch(batch, direction)

    def submit(self, batch, direction):
        """Begins a batch. Returns its ticket."""
        ours, theirs = ("target", "source") if direction is TransferDirection.READ else ("source", "target")
        column = lambda side, name: [getattr(one, f"{side}_{name}") for one in batch.ranges]
        offsets = lambda side: [list(some) for some in column(side, "offsets")]
        call = self.engine.submit_scatter_read if ours == "target" else self.engine.submit_scatter_write
        ends = [column(side, name) for side in (ours, theirs) for name in ("base_address", "capacity")]
        return call(batch.endpoint, *ends, offsets(ours), offsets(theirs), [list(one.sizes) for one in batch.ranges])

    def drained(self, ticket):
        """Returns the name of a ticket's outcome, after so many attempts to drain it as the executor has."""
        status = ticket.drain(self.completion_drain_timeout_ms).name
        for _ in range(self.max_completion_drain_attempts):
            if status != "COMPLETION_UNKNOWN":
                break
            status = ticket.drain(self.completion_drain_timeout_ms).name
        return status

    def pending_transfer_ids(self):
        """Returns the ids of transfers that were not seen to end."""
        return self.pending.pending_transfer_ids()

    def pending_transfer_status(self, pending_transfer_id):
        """Returns the name of what is known about a transfer."""
        return self.pending.pending_transfer_status(pending_transfer_id)

    def drain_pending_transfer(self, pending_transfer_id, *, timeout_ms=1000):
        """Waits for a transfer, and gives its memory up: see `PendingTransferManager`."""
        return self.pending.drain_pending_transfer(pending_transfer_id, timeout_ms=timeout_ms)


__all__ = ["MooncakeTransferEngineExecutor", "PendingTransferManager", "TransferSubmission"]
