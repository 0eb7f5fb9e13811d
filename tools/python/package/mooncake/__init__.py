"""The package that Mooncake's users import, above kvplane: `mooncake.store`, `mooncake.engine` and their neighbours."""

__all__ = ["BufferPool", "RegisteredBufferPool"]


def __getattr__(name):
    # Imported when asked for: `import mooncake.engine` does not need the store.
    if name in __all__:
        from mooncake import buffer_pool

        return getattr(buffer_pool, name)
    raise AttributeError(f"module 'mooncake' has no attribute {name!r}")
