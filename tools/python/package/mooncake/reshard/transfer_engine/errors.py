"""Failures of transfers, by what is known about their memory."""


class TransferEngineError(RuntimeError):
    """A transfer that was refused, or failed. Nothing uses its memory any more, except as a subclass says."""


class TransferCompletionFailedError(TransferEngineError):
    """A transfer of which a batch failed, and that has ended."""


class TransferCompletionUnknownError(TransferEngineError):
    """A transfer that is in flight still. Its memory stays pinned and registered until it is drained."""

    def __init__(self, message, *, pending_transfer_id, engine_identity):
        super().__init__(message)
        self.pending_transfer_id, self.engine_identity = pending_transfer_id, engine_identity


class TransferRegistrationCleanupPendingError(TransferEngineError):
    """A transfer that has ended, but whose memory the engine does not give up. It stays pinned until it is drained."""

    def __init__(self, message, *, pending_transfer_id):
        super().__init__(message)
        self.pending_transfer_id = pending_transfer_id


class TransferCompletionInterrupted(BaseException):
    """An interruption (such as KeyboardInterrupt) of the wait for a transfer that is in flight still."""

    def __init__(self, pending_transfer_id, interruption, *, engine_identity):
        super().__init__(str(interruption))
        self.pending_transfer_id, self.interruption = pending_transfer_id, interruption
        self.engine_identity = engine_identity


__all__ = [
    "TransferCompletionFailedError",
    "TransferCompletionInterrupted",
    "TransferCompletionUnknownError",
    "TransferEngineError",
    "TransferRegistrationCleanupPendingError",
]
