"""`mooncake_client` by the name of the original's module."""

from mooncake.cli import client as main

__all__ = ["main"]
