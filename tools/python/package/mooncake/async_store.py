"""`MooncakeDistributedStoreAsync`: every call of a store as a coroutine, with the prefix `async_`."""

import asyncio
import functools

from mooncake.store import MooncakeDistributedStore


class MooncakeDistributedStoreAsync(MooncakeDistributedStore):
    """Asynchronous store: `await store.async_get(key)`."""

    def __getattr__(self, name):
        call = getattr(type(self), name[6:], None) if name.startswith("async_") else None
        if not callable(call):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

        @functools.wraps(call)
        async def coroutine(*arguments, **keywords):
            work = functools.partial(call, self, *arguments, **keywords)
            return await asyncio.get_running_loop().run_in_executor(None, work)

        return coroutine
