"""Embedding tables in the store, by the name that the module has since Mooncake 0.3.14."""

from mooncake._engram import EngramStore, EngramStoreConfig

__all__ = ["EngramStore", "EngramStoreConfig"]
