"""Mooncake's module for expert parallelism: names that its extension module has, as far as they have a meaning here,
and those of `mooncake.pg`, where torch is there. `mooncake.mooncake_ep_buffer` and `mooncake.mooncake_elastic_buffer`
have the buffers; `ExpertPlacement` is this package's own."""

from mooncake._exchange import RankMismatch, SourceTimeout
from mooncake._placement import ExpertPlacement
from mooncake.mooncake_elastic_buffer import ElasticBuffer, EPHandle, calculate_elastic_buffer_size
from mooncake.mooncake_ep_buffer import Buffer, EventHandle, EventOverlap, get_ep_buffer_size_hint

#: Queue pairs of a buffer on a device, which are divided among ranks; there are none here.
MAX_QP_COUNT = 256

__all__ = [
    "MAX_QP_COUNT",
    "Buffer",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "ExpertPlacement",
    "RankMismatch",
    "SourceTimeout",
    "calculate_elastic_buffer_size",
    "get_ep_buffer_size_hint",
]


def __getattr__(name):
    # `mooncake.ep` has all names of `mooncake.pg`, which is imported when one of them is used.
    if not name.startswith("_"):
        try:
            from mooncake import pg
        except ImportError as error:
            raise AttributeError(f"module 'mooncake.ep' has no attribute {name!r}: {error}") from error
        if hasattr(pg, name):
            return getattr(pg, name)
    raise AttributeError(f"module 'mooncake.ep' has no attribute {name!r}")
