"""`transfer_engine_bench` under the name of Mooncake's module."""

from mooncake.cli import transfer_engine_bench as main

__all__ = ["main"]
