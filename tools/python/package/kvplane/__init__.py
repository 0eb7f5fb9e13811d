"""kvplane for Python: objects of bytes in the memory of a cluster, and transfers between the memory of processes.

    import kvplane

    with kvplane.Store() as store:          # finds the `kvplane dev` of this user by itself
        store.put("key", b"value")
        assert store.get("key") == b"value"

Values and destinations are any objects with the buffer protocol (bytes, bytearray, memoryview, numpy arrays), torch
tensors in host memory, and what speaks DLPack. Calls wait without the interpreter's lock, each until its deadline at
most, and when one returns or raises, no transfer touches its memory any more.
"""

import atexit as _atexit
from typing import TYPE_CHECKING

from kvplane import _native
from kvplane._engine import Batch, TransferEngine
from kvplane._errors import (
    Closed,
    Corrupt,
    Error,
    InvalidArgument,
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

__version__ = _native.__version__
__all__ = [
    "AsyncStore",
    "Batch",
    "Closed",
    "Corrupt",
    "Error",
    "InvalidArgument",
    "NoSpace",
    "NotFound",
    "Piece",
    "QuotaExceeded",
    "Registration",
    "Replaced",
    "Store",
    "Timeout",
    "TransferEngine",
    "Unauthorized",
    "Unreachable",
]

# Threads of the interpreter must not come back from a transfer when there is no interpreter any more.
_atexit.register(_native.settle, 15.0)


def __getattr__(name: str) -> type:
    # asyncio takes longer to import than all of this.
    if name == "AsyncStore":
        from kvplane._async import AsyncStore

        return AsyncStore
    raise AttributeError(f"module 'kvplane' has no attribute {name!r}")
