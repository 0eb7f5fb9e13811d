"""Blocks of an engine's KV cache in the store: puts and gets by threads, for connectors that must not block.

A job is split into batches, each of which is one call: one request to each shard. Gets go before puts, and puts have a
limit of bytes that wait: what is beyond it is refused at once, so that a slow cluster does not pin the engine's memory.
"""

import collections
import threading
import time
from typing import Any, Callable, Deque, Dict, List, NamedTuple, Optional, Sequence, Tuple

from kvplane import _native
from kvplane._store import Store, _kept

#: Outcome of a job: the code of each block, and the seconds from its submission. A block that was got has its length, one
#: that was put 0, one that was there already `PRESENT`; errors are below 0.
Done = Callable[[List[int], float], None]
#: Columns of a job: keys, and addresses with sizes in registered memory.
Columns = Tuple[Sequence[str], Sequence[int], Sequence[int]]

#: Data type of the objects: `KVCACHE` of Mooncake's `ObjectDataType`.
_KIND = 1
#: Code of what was not begun, because this was closed.
_CLOSED = -1
#: Code of a block that was not put, because it is in the store already.
PRESENT = 1
#: Code of a block that is not in the store.
_NOT_FOUND = -704


class Counts(NamedTuple):
    """Numbers since the start."""

    put_blocks: int
    put_bytes: int
    #: Blocks that were in the store already.
    present_blocks: int
    #: Blocks that were not stored: an error, or no room.
    failed_blocks: int
    #: Blocks that were not stored because too many bytes waited.
    refused_blocks: int
    got_blocks: int
    got_bytes: int
    #: Blocks that were to be got and were not there any more, or could not be read.
    missed_blocks: int
    lookups: int
    looked_up_blocks: int
    found_blocks: int


class _Job:
    """Blocks that are put or got: the codes of its batches, until all have ended."""

    def __init__(self, blocks: int, batches: int, done: Done):
        self.codes = [_CLOSED] * blocks
        self._batches, self._done = batches, done
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def ended(self, first: int, codes: Sequence[int]) -> None:
        """Records the codes of a batch; the last one ends the job. Raises what the job's callback raises."""
        with self._lock:
            self.codes[first : first + len(codes)] = codes
            self._batches -= 1
            is_last = self._batches == 0
        if is_last:
            self._done(self.codes, time.monotonic() - self._began)


class _Batch(NamedTuple):
    job: _Job
    #: Index of its first block in the job.
    first: int
    #: Moves the blocks; returns a code for each.
    move: Callable[[], List[int]]
    blocks: int
    size: int
    is_put: bool


class BlockStore:
    """Blocks in a store. Any number of threads may use one.

    `workers` threads make the calls, each with batches of at most `batch_bytes`. `pending_bytes` limits the bytes of puts
    that wait or are in progress. The other arguments are those of `kvplane.Store`; `replicas` and `priority` are those of
    its puts.
    """

    def __init__(
        self,
        *,
        workers: int = 4,
        batch_bytes: int = 16 << 20,
        pending_bytes: int = 1 << 30,
        replicas: int = 1,
        priority: int = 0,
        **connection: Any,
    ):
        for name, value in (("workers", workers), ("batch_bytes", batch_bytes), ("pending_bytes", pending_bytes)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} is a number above 0, not {value!r}")
        self._kept = _kept(False, False, 0.0, None, _KIND, replicas, None, priority)
        self._replacing = _kept(True, False, 0.0, None, _KIND, replicas, None, priority)
        self._batch_bytes, self._most_pending = batch_bytes, pending_bytes
        #: Calls that wait, each with what is called in its place if this is closed before.
        self._calls: Deque[Tuple[Callable[[], None], Callable[[], None]]] = collections.deque()
        self._gets: Deque[_Batch] = collections.deque()
        self._puts: Deque[_Batch] = collections.deque()
        self._changed = threading.Condition()
        self._pending_bytes = 0
        self._in_progress = 0
        self._is_closed = False
        self._problem = ""
        self._counts = dict.fromkeys(Counts._fields, 0)
        self._store = Store(**connection)
        self._native: "_native.Store" = self._store._native()
        self._threads = [
            threading.Thread(target=self._work, name=f"kvplane-blocks-{number}", daemon=True) for number in range(workers)
        ]
        for thread in self._threads:
            thread.start()

    def register(self, address: int, size: int) -> bool:
        """Registers memory that blocks are put from and got into. Returns False if it cannot be registered."""
        return self._native.register(address, size) == 0

    def unregister(self, address: int) -> None:
        """Unregisters memory. When this returns, no call uses it any more."""
        self._native.unregister(address)

    # --- lookups ---------------------------------------------------------------------------------------------------

    def exist(self, keys: Sequence[str], prefetch: bool = False) -> List[bool]:
        """Returns for each key whether there is a block, with one request to each shard. With `prefetch`, nodes begin to
        read the blocks that only their SSDs have. What cannot be asked for is not there."""
        found = [code == 1 for code in self._native.exists(keys, prefetch)] if keys else []
        self._count(lookups=1, looked_up_blocks=len(found), found_blocks=sum(found))
        return found

    def later(self, call: Callable[[], None], dropped: Callable[[], None] = lambda: None) -> None:
        """Has a thread make a call, before all puts and gets that wait. If this is closed before the call was begun,
        `dropped` is called in its place."""
        with self._changed:
            is_dropped = self._is_closed
            if not is_dropped:
                self._calls.append((call, dropped))
                self._in_progress += 1
                self._changed.notify()
        if is_dropped:
            dropped()

    def retain(self, number: int, keys: Sequence[str], seconds: float) -> None:
        """Keeps the blocks that are in memory there for so many seconds, as a retention of this number. Memory has limits
        for that: beyond them a block is evicted as others are."""
        self._native.retain(number, keys, int(seconds * 1000))

    def release(self, number: int) -> None:
        """Ends a retention."""
        self._native.extend(number, 0, False)

    def sizes(self, keys: Sequence[str]) -> List[int]:
        """Returns the length of each block; negative if there is none."""
        return self._native.sizes(keys) if keys else []

    # --- puts and gets ---------------------------------------------------------------------------------------------

    def put(self, blocks: Columns, done: Done) -> bool:
        """Puts blocks of registered memory. Blocks that are in the store already stay as they are, and no bytes of them
        are sent; an object of another length is replaced. Returns False, without calling `done`, if too many bytes
        wait."""
        keys, addresses, sizes = blocks

        def move(first: int, last: int) -> List[int]:
            return self._put_missing(
                keys[first:last],
                sizes[first:last],
                lambda at, kept: self._native.put_from(
                    [keys[first + index] for index in at],
                    [addresses[first + index] for index in at],
                    [sizes[first + index] for index in at],
                    kept,
                ),
            )

        return self._submit(sizes, move, done, True)

    def put_buffers(self, keys: Sequence[str], buffers: Sequence[Any], done: Done) -> bool:
        """Does the same with objects that have the buffer protocol, whose memory is not registered."""
        sizes = [memoryview(one).nbytes for one in buffers]

        def move(first: int, last: int) -> List[int]:
            return self._put_missing(
                keys[first:last],
                sizes[first:last],
                lambda at, kept: self._native.put_many(
                    [keys[first + index] for index in at], [buffers[first + index] for index in at], kept
                ),
            )

        return self._submit(sizes, move, done, True)

    def get(self, blocks: Columns, done: Done) -> None:
        """Gets blocks into registered memory. The code of a block is its length, which is that of the memory."""
        keys, addresses, sizes = blocks

        def move(first: int, last: int) -> List[int]:
            return self._native.get_into(keys[first:last], addresses[first:last], sizes[first:last])

        self._submit(sizes, move, done, False)

    def get_buffers(self, keys: Sequence[str], buffers: Sequence[Any], done: Done) -> None:
        """Does the same into writable objects with the buffer protocol, whose memory is not registered."""

        def move(first: int, last: int) -> List[int]:
            return self._native.receive_many(keys[first:last], buffers[first:last])

        self._submit([memoryview(one).nbytes for one in buffers], move, done, False)

    def remove(self, keys: Sequence[str]) -> List[bool]:
        """Removes blocks. Returns for each whether there was one."""
        return [code == 0 for code in self._native.remove(keys)] if keys else []

    def _put_missing(
        self, keys: Sequence[str], sizes: Sequence[int], put: Callable[[List[int], Any], List[int]]
    ) -> List[int]:
        # A lookup is some bytes for each block, and the put of a block that is there would send all of it.
        found = self._native.sizes(keys)
        missing = [at for at, length in enumerate(found) if length == _NOT_FOUND]
        # Gets could not read an object of another length, and would be told of it until it is evicted.
        others = [at for at, length in enumerate(found) if 0 <= length != sizes[at]]
        # A cluster that does not answer a lookup is not sent the blocks: one deadline for each batch is enough.
        codes = [PRESENT if length >= 0 else length for length in found]
        for some, kept in ((missing, self._kept), (others, self._replacing)):
            if some:
                for at, code in zip(some, put(some, kept)):
                    codes[at] = code
        self._count(present_blocks=sum(length == size for length, size in zip(found, sizes)))
        return codes

    def _submit(
        self, sizes: Sequence[int], move: Callable[[int, int], List[int]], done: Done, is_put: bool
    ) -> bool:
        cuts = self._cut(sizes)
        if not cuts:
            done([], 0.0)
            return True
        total = sum(sizes)
        job = _Job(len(sizes), len(cuts), done)
        batches = [
            _Batch(job, first, lambda first=first, last=last: move(first, last), last - first, sum(sizes[first:last]), is_put)
            for first, last in cuts
        ]
        with self._changed:
            if is_put:
                # One job is always taken, however long it is.
                if self._pending_bytes and self._pending_bytes + total > self._most_pending:
                    self._counts["refused_blocks"] += len(sizes)
                    return False
                self._pending_bytes += total
            if not self._is_closed:
                (self._puts if is_put else self._gets).extend(batches)
                self._in_progress += len(batches)
                self._changed.notify(len(batches))
                return True
            self._pending_bytes -= total if is_put else 0
        for batch in batches:
            job.ended(batch.first, [_CLOSED] * batch.blocks)
        return True

    def _cut(self, sizes: Sequence[int]) -> List[Tuple[int, int]]:
        """Returns the batches of blocks: a long job is divided among the threads."""
        limit = min(self._batch_bytes, max(sum(sizes) // len(self._threads), 1))
        cuts, first, held = [], 0, 0
        for at, size in enumerate(sizes):
            if held and held + size > limit:
                cuts.append((first, at))
                first, held = at, 0
            held += size
        if sizes:
            cuts.append((first, len(sizes)))
        return cuts

    def _work(self) -> None:
        # Buffers of a turn are released before the next one waits.
        while self._turn():
            pass

    def _turn(self) -> bool:
        """Waits for work and does a piece of it. Returns False at the end."""
        dropped: List[Callable[[], None]] = []
        with self._changed:
            while not (self._calls or self._gets or self._puts or self._is_closed):
                self._changed.wait()
            is_dropped = self._is_closed
            if is_dropped:
                dropped = [instead for _, instead in self._calls]
                self._calls.clear()
            call = self._calls.popleft()[0] if self._calls else None
            batch = (self._gets or self._puts).popleft() if call is None and (self._gets or self._puts) else None
        for one in [call] if call is not None else dropped:
            self._call(one)
        if batch is not None:
            self._move(batch, is_dropped)
        return call is not None or batch is not None

    def _move(self, batch: _Batch, is_dropped: bool) -> None:
        try:
            codes = [_CLOSED] * batch.blocks if is_dropped else batch.move()
        except Exception as problem:
            # The outcome is told in any case, or the engine's memory would stay pinned.
            codes, self._problem = [_CLOSED] * batch.blocks, repr(problem)
        else:
            if any(code < 0 and code != _NOT_FOUND for code in codes):
                self._problem = _native.last_error()
        self._count_batch(batch, codes)
        try:
            batch.job.ended(batch.first, codes)
        except BaseException as problem:
            # An error of the engine's own callback, even an exit: the other jobs need this thread.
            self._problem = repr(problem)
        self._ended(batch.size if batch.is_put else 0)

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as problem:
            self._problem = repr(problem)
        self._ended(0)

    def _ended(self, put_bytes: int) -> None:
        with self._changed:
            self._in_progress -= 1
            self._pending_bytes -= put_bytes
            self._changed.notify_all()

    def _count_batch(self, batch: _Batch, codes: Sequence[int]) -> None:
        good = sum(code >= 0 for code in codes)
        if batch.is_put:
            share = batch.size if good == batch.blocks else batch.size * good // batch.blocks
            self._count(put_blocks=good, put_bytes=share, failed_blocks=batch.blocks - good)
        else:
            moved = sum(code for code in codes if code > 0)
            self._count(got_blocks=good, got_bytes=moved, missed_blocks=batch.blocks - good)

    # --- state -----------------------------------------------------------------------------------------------------

    @property
    def pending_bytes(self) -> int:
        """Bytes of puts that wait or are in progress."""
        return self._pending_bytes

    @property
    def problem(self) -> str:
        """Message of the last put, get or callback that failed, other than by a block that is missing; empty if none
        did."""
        return self._problem

    def is_healthy(self) -> bool:
        """Returns True if the cluster answers."""
        return not self._is_closed and self._native.check() == 0

    def counts(self) -> Counts:
        """Returns the numbers since the start."""
        with self._changed:
            return Counts(**self._counts)

    def _count(self, **more: int) -> None:
        with self._changed:
            for name, number in more.items():
                self._counts[name] += number

    def drain(self) -> None:
        """Waits until no put or get waits or is in progress. Every call has a deadline, so this ends: where the cluster
        does not answer, each thread takes one deadline for every batch that waits."""
        with self._changed:
            while self._in_progress:
                self._changed.wait()

    def close(self) -> None:
        """Ends what waits as failed, waits for what is in progress, and closes the store. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        self._store.close()

    def metrics(self) -> Dict[str, int]:
        """Returns the counts and the bytes that wait, by name."""
        return {**self.counts()._asdict(), "pending_bytes": self._pending_bytes}
