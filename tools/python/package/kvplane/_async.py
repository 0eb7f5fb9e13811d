"""Asynchronous client of the store: `AsyncStore`."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple, Type, Union

from kvplane._errors import Closed
from kvplane._store import Key, Piece, Registration, Store


class AsyncStore:
    """Asynchronous client of the store: every blocking call of `Store`, as a coroutine.

    Calls run on threads of this object, as many as the native module serves concurrently. A coroutine that is cancelled
    returns at once; its transfer continues in the background, and keeps its memory alive until it has ended.
    """

    _THREADS = 16

    def __init__(self, control: Optional[str] = None, **settings: Any):
        self._store = Store(control, **settings)
        self._threads = ThreadPoolExecutor(self._THREADS, thread_name_prefix="kvplane")

    @classmethod
    async def connect(cls, control: Optional[str] = None, **settings: Any) -> "AsyncStore":
        """Connects without blocking the event loop."""
        return await asyncio.get_running_loop().run_in_executor(None, lambda: cls(control, **settings))

    async def _run(self, call: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        try:
            work = asyncio.get_running_loop().run_in_executor(self._threads, lambda: call(*arguments, **keywords))
        except RuntimeError:
            # The threads accept no calls after `close`.
            raise Closed(-1, "the store was closed") from None
        return await work

    async def put(self, key: Key, value: Any, **how: Any) -> None:
        """See `Store.put`."""
        await self._run(self._store.put, key, value, **how)

    async def put_many(self, items: Dict[Key, Any], **how: Any) -> None:
        """See `Store.put_many`."""
        await self._run(self._store.put_many, items, **how)

    async def put_from(self, items: Iterable[Tuple[Key, Piece]], **how: Any) -> None:
        """See `Store.put_from`."""
        await self._run(self._store.put_from, list(items), **how)

    async def get(self, key: Key) -> Optional[bytes]:
        """See `Store.get`."""
        return await self._run(self._store.get, key)

    async def get_into(self, key: Key, buffer: Any) -> Optional[int]:
        """See `Store.get_into`."""
        return await self._run(self._store.get_into, key, buffer)

    async def get_many(self, keys: Sequence[Key]) -> List[Optional[bytes]]:
        """See `Store.get_many`."""
        return await self._run(self._store.get_many, keys)

    async def get_many_into(self, items: Iterable[Tuple[Key, Piece]]) -> List[Optional[int]]:
        """See `Store.get_many_into`."""
        return await self._run(self._store.get_many_into, list(items))

    async def exists(self, key: Key) -> bool:
        """See `Store.exists`."""
        return await self._run(self._store.exists, key)

    async def exists_many(self, keys: Sequence[Key]) -> List[bool]:
        """See `Store.exists_many`."""
        return await self._run(self._store.exists_many, keys)

    async def size(self, key: Key) -> Optional[int]:
        """See `Store.size`."""
        return await self._run(self._store.size, key)

    async def remove(self, key: Key) -> bool:
        """See `Store.remove`."""
        return await self._run(self._store.remove, key)

    async def remove_many(self, keys: Sequence[Key]) -> List[bool]:
        """See `Store.remove_many`."""
        return await self._run(self._store.remove_many, keys)

    async def remove_matching(self, pattern: str) -> int:
        """See `Store.remove_matching`."""
        return await self._run(self._store.remove_matching, pattern)

    async def clear(self) -> int:
        """See `Store.clear`."""
        return await self._run(self._store.clear)

    async def soft_pin(self, keys: Sequence[Key], seconds: float = 1800.0) -> List[bool]:
        """See `Store.soft_pin`."""
        return await self._run(self._store.soft_pin, keys, seconds)

    async def soft_unpin(self, keys: Sequence[Key]) -> List[bool]:
        """See `Store.soft_unpin`."""
        return await self._run(self._store.soft_unpin, keys)

    async def set_priority(self, keys: Sequence[Key], priority: int) -> List[bool]:
        """See `Store.set_priority`."""
        return await self._run(self._store.set_priority, keys, priority)

    async def retain(self, retention: Union[str, int], keys: Sequence[Key], seconds: float) -> List[bool]:
        """See `Store.retain`."""
        return await self._run(self._store.retain, retention, keys, seconds)

    async def retain_group(self, group: Union[str, int], seconds: float) -> int:
        """See `Store.retain_group`."""
        return await self._run(self._store.retain_group, group, seconds)

    async def renew(self, retention: Union[str, int], seconds: float) -> int:
        """See `Store.renew`."""
        return await self._run(self._store.renew, retention, seconds)

    async def release(self, retention: Union[str, int]) -> int:
        """See `Store.release`."""
        return await self._run(self._store.release, retention)

    def register(self, buffer: Any) -> Registration:
        """See `Store.register`; does not block."""
        return self._store.register(buffer)

    async def close(self) -> None:
        """See `Store.close`."""
        await asyncio.get_running_loop().run_in_executor(None, self._store.close)
        self._threads.shutdown(wait=False)

    async def __aenter__(self) -> "AsyncStore":
        return self

    async def __aexit__(self, kind: Optional[Type[BaseException]], value: Any, trace: Optional[TracebackType]) -> None:
        await self.close()
