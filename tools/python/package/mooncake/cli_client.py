"""`mooncake_client` under the name of Mooncake's module."""

from mooncake.cli import client as main

__all__ = ["main"]
