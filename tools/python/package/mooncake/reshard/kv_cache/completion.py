"""Receipts of an operation, and who waits for all of them."""

import math
import threading
import time
from dataclasses import dataclass
from typing import Optional

from mooncake.reshard import _checks
from mooncake.reshard.kv_cache.transfer import KVCacheRuntimeTransferPlan
from mooncake.reshard.kv_cache.types import check_texts


@dataclass(frozen=True)
class KVCacheWriterReceipt:
    """What a writer has written to one target. Unless `quiesced`, bytes may still be in flight."""

    operation_id: str
    transfer_digest: str
    writer_id: str
    target_id: str
    success: bool
    completed_bytes: int
    quiesced: bool
    error: Optional[str] = None

    def __post_init__(self):
        check_texts(self, "operation_id", "writer_id", "target_id")
        _checks.u64(self.completed_bytes, "completed_bytes")
        if type(self.quiesced) is not bool:
            raise ValueError("receipt success and quiesced must be booleans")
        _check_outcome(self)
        if self.success and not self.quiesced:
            raise ValueError("success requires quiescence and no error")


@dataclass(frozen=True)
class KVCacheTargetReceipt:
    """What a target found when it checked its bytes."""

    operation_id: str
    transfer_digest: str
    target_id: str
    success: bool
    error: Optional[str] = None

    def __post_init__(self):
        check_texts(self, "operation_id", "target_id")
        _check_outcome(self)


def _check_outcome(receipt):
    _checks.digest_text(receipt.transfer_digest, "transfer_digest")
    if type(receipt.success) is not bool:
        raise ValueError("receipt success and quiesced must be booleans")
    if not receipt.success:
        _checks.text(receipt.error, "failure error")
    elif receipt.error is not None:
        raise ValueError("success requires quiescence and no error")


class KVCacheCompletion:
    """All receipts of an operation: first those of the writers, then those of the targets. Any failure, and the
    deadline, ends it; a retry has another operation id. Callable from any thread."""

    def __init__(self, plan: KVCacheRuntimeTransferPlan, *, timeout_seconds: float = 60.0):
        self.plan = _checks.instance(plan, "plan", KVCacheRuntimeTransferPlan)
        number = isinstance(timeout_seconds, (int, float)) and not isinstance(timeout_seconds, bool)
        if not number or not math.isfinite(timeout_seconds) or timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds must be positive and finite, not {timeout_seconds!r}")
        self._until = time.monotonic() + timeout_seconds
        self._writers, self._targets = {}, {}
        self._error = None
        self._lock = threading.RLock()

    def _written(self):
        return len(self._writers) == len(self.plan.expected_writers)

    def _complete(self):
        return self._error is None and self._written() and len(self._targets) == len(self.plan.target_bindings)

    @property
    def error(self) -> Optional[str]:
        """Returns why the operation failed."""
        with self._lock:
            if self._error is None and not self._complete() and time.monotonic() >= self._until:
                self._error = "runtime operation completion deadline expired"
            return self._error

    @property
    def state(self) -> str:
        """Returns `pending`, `writers_done`, `complete` or `failed`."""
        with self._lock:
            if self.error is not None:
                return "failed"
            if self._complete():
                return "complete"
            return "writers_done" if self._written() else "pending"

    @property
    def can_activate(self) -> bool:
        """Returns true if all is written and checked."""
        return self.state == "complete"

    def fail(self, reason) -> None:
        """Ends the operation; ValueError if it is complete."""
        _checks.text(reason, "failure reason")
        with self._lock:
            if self._complete():
                raise ValueError("completed operation is terminal")
            self._error = self._error or reason

    def record_writer(self, receipt: KVCacheWriterReceipt) -> None:
        """Takes a writer's receipt; one that comes again is the same. ValueError if it is not of this operation."""
        _checks.instance(receipt, "receipt", KVCacheWriterReceipt)
        key = (receipt.writer_id, receipt.target_id)
        with self._lock:
            if key not in self.plan.expected_writers:
                raise ValueError(f"receipt writer/target is not expected: {key}")
            if not self._is_new(receipt, self._writers, key):
                return
            expected = self.plan.writer_bytes(*key)
            if receipt.completed_bytes > expected or (receipt.success and receipt.completed_bytes != expected):
                raise ValueError(
                    f"writer receipt byte count differs from plan: {receipt.completed_bytes}, not {expected}"
                )
            self._writers[key] = receipt
            self._error = receipt.error

    def record_target(self, receipt: KVCacheTargetReceipt) -> None:
        """Takes a target's receipt, after those of all writers."""
        _checks.instance(receipt, "receipt", KVCacheTargetReceipt)
        with self._lock:
            if receipt.target_id not in {one.participant_id for one in self.plan.target_bindings}:
                raise ValueError(f"target participant is not expected: {receipt.target_id}")
            if not self._is_new(receipt, self._targets, receipt.target_id):
                return
            if not self._written():
                raise ValueError("all expected writers must finish before target validation")
            self._targets[receipt.target_id] = receipt
            self._error = receipt.error

    def _is_new(self, receipt, known, key):
        if (receipt.operation_id, receipt.transfer_digest) != (self.plan.operation_id, self.plan.digest):
            raise ValueError("receipt belongs to a different operation or transfer")
        if key in known:
            if known[key] != receipt:
                raise ValueError(f"conflicting duplicate receipt: {key}")
            return False
        if self.error is not None:
            raise ValueError(f"failed operation is terminal: {self._error}")
        return True


__all__ = ["KVCacheCompletion", "KVCacheTargetReceipt", "KVCacheWriterReceipt"]
