"""Mooncake's Python package on top of kvplane: `mooncake.store`, `mooncake.engine` and related modules."""

__all__ = ["BufferPool", "RegisteredBufferPool"]


def __getattr__(name):
    # Imported on first use: `import mooncake.engine` does not need the store.
    if name in __all__:
        from mooncake import buffer_pool

        return getattr(buffer_pool, name)
    raise AttributeError(f"module 'mooncake' has no attribute {name!r}")
