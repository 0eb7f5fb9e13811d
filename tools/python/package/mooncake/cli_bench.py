"""`transfer_engine_bench` by the name of the original's module."""

from mooncake.cli import transfer_engine_bench as main

__all__ = ["main"]
