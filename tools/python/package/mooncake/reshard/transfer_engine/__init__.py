"""Transfers of ranges by a transfer engine, of resources of any kind."""

from mooncake.reshard.lifetime import AllocationFence, AllocationLifetimeToken, TerminalTransferState
from mooncake.reshard.transfer_engine.contracts import (
    BufferRegistrationLease,
    TransferBatch,
    TransferBatchRange,
    TransferBatchReceipt,
    TransferDirection,
)
from mooncake.reshard.transfer_engine.errors import (
    TransferCompletionFailedError,
    TransferCompletionInterrupted,
    TransferCompletionUnknownError,
    TransferEngineError,
    TransferRegistrationCleanupPendingError,
)
from mooncake.reshard.transfer_engine.executor import (
    MooncakeTransferEngineExecutor,
    PendingTransferManager,
    TransferSubmission,
)

__all__ = [
    "AllocationFence",
    "AllocationLifetimeToken",
    "BufferRegistrationLease",
    "MooncakeTransferEngineExecutor",
    "PendingTransferManager",
    "TerminalTransferState",
    "TransferBatch",
    "TransferBatchRange",
    "TransferBatchReceipt",
    "TransferCompletionFailedError",
    "TransferCompletionInterrupted",
    "TransferCompletionUnknownError",
    "TransferDirection",
    "TransferEngineError",
    "TransferRegistrationCleanupPendingError",
    "TransferSubmission",
]
