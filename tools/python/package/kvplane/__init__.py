"""kvplane for Python: an object store in the memory of a cluster, and transfers between the memory of processes.

    import kvplane

    with kvplane.Store() as store:          # discovers the `kvplane dev` cluster of this user
        store.put("key", b"value")
        assert store.get("key") == b"value"

Values and destinations are any objects with the buffer protocol (bytes, bytearray, memoryview, numpy arrays), torch
tensors in host memory, and objects that support DLPack. Calls block without the GIL, each at most until its deadline,
and when a call returns or raises, no transfer accesses its memory any more.
"""

import atexit as _atexit
from typing import TYPE_CHECKING

from kvplane import _native
from kvplane._engine import Batch, TransferEngine
from kvplane._errors import (
    Closed,
    Conflict,
    Corrupt,
    Error,
    Excluded,
    InvalidArgument,
    Mismatch,
    NoSpace,
    NotFound,
    QuotaExceeded,
    Replaced,
    Timeout,
    Unauthorized,
    Unreachable,
)
from kvplane._store import Piece, Registration, Store

if TYPE_CHECKING:
    from kvplane._async import AsyncStore
    from kvplane._scheduler import (
        Booked,
        DecodeSteps,
        Group,
        Instance,
        Local,
        Membership,
        Prompt,
        Refused,
        Scheduler,
        Stage,
        Terms,
    )

__version__ = _native.__version__
__all__ = [
    "AsyncStore",
    "Batch",
    "Booked",
    "Closed",
    "Conflict",
    "Corrupt",
    "DecodeSteps",
    "Error",
    "Excluded",
    "Group",
    "Instance",
    "InvalidArgument",
    "Local",
    "Membership",
    "Mismatch",
    "NoSpace",
    "NotFound",
    "Piece",
    "Prompt",
    "QuotaExceeded",
    "Refused",
    "Registration",
    "Replaced",
    "Scheduler",
    "Stage",
    "Store",
    "Terms",
    "Timeout",
    "TransferEngine",
    "Unauthorized",
    "Unreachable",
]

# Names of the Conductor's clients, which are imported when they are used.
_SCHEDULING = (
    "Booked",
    "DecodeSteps",
    "Group",
    "Instance",
    "Local",
    "Membership",
    "Prompt",
    "Refused",
    "Scheduler",
    "Stage",
    "Terms",
)

# Threads must not return from a transfer into an interpreter that has exited.
_atexit.register(_native.settle, 15.0)


def __getattr__(name: str) -> type:
    # The import of asyncio takes longer than all of this.
    if name == "AsyncStore":
        from kvplane._async import AsyncStore

        return AsyncStore
    # Programs that only store objects need nothing of the Conductor.
    if name in _SCHEDULING:
        from kvplane import _scheduler

        return getattr(_scheduler, name)
    raise AttributeError(f"module 'kvplane' has no attribute {name!r}")
