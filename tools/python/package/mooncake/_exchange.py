"""Messages between all ranks of a process group, two collectives for each call.

First every rank sends every other a head: which call it makes, with which shapes, and how much it will send. Then come
the messages, by an all-to-all with splits. A source that is no participant of the group's view leaves its part as it
was, which is 0: a head or a message that does not begin with its mark is missing. The group also names sources that
failed during the operation, of whose messages a part may be there.

Works over torch's process groups with tensors of host memory, and over those of `kvplane`.
"""

import datetime
import sys
import threading
import time
from typing import NamedTuple

import numpy

from kvplane import Mismatch
from mooncake import _experts

#: The calls of a buffer, by number.
KINDS = ("connect", "barrier", "dispatch", "combine", "elastic dispatch", "elastic combine")
#: First word of a head and of a message: a mark, the version of the format, and the kind of the call.
_MARK, _VERSION = 0x4B564550 << 32, 1
#: Wait for a source without a limit: the longest deadline that `kvplane.group` takes.
_LONGEST_S = 86_400.0
#: Time for which ranks whose views of the group differ try to agree, and interval of their attempts.
_AGREE_S, _AGREE_AGAIN_S = 30.0, 0.05


class Call(NamedTuple):
    """What all ranks of a call have to agree on; 0 where a call has no such number."""

    kind: int
    number: int
    num_experts: int = 0
    num_max_tokens: int = 0
    hidden: int = 0
    num_topk: int = 0
    #: Bytes of an element, and of the scales of a row.
    element_bytes: int = 0
    scale_bytes: int = 0

    def mark(self):
        """The first word of heads and messages."""
        return _MARK | _VERSION << 16 | self.kind


#: A head: the call, then rows and pairs of the message that follows.
HEAD_WORDS = len(Call._fields) + 2


def encode_head(call, rows, pairs):
    """Returns a head of `HEAD_WORDS` little-endian words of 64 bits."""
    return numpy.array([call.mark(), *call[1:], rows, pairs], "<i8")


def decode_head(words):
    """Returns call, rows and pairs; None where nothing was received."""
    if not words[0]:
        return None
    mark = int(words[0])
    kind = mark & 0xFFFF
    if mark >> 16 != (_MARK | _VERSION << 16) >> 16 or kind >= len(KINDS):
        raise ValueError(f"a head that begins with {mark:#x}: a rank has another version of this package")
    return Call(kind, *map(int, words[1 : len(Call._fields)])), int(words[-2]), int(words[-1])


class RankMismatch(RuntimeError):
    """Ranks make different calls. Every rank of the call gets this error, and nothing was received.

    `rank` is the other rank, `field` what differs (a name of `Call`), `theirs` and `ours` its values.
    """

    def __init__(self, rank, field, theirs, ours):
        self.rank, self.field, self.theirs, self.ours = rank, field, theirs, ours
        if field == "kind":
            super().__init__(f"rank {rank} calls {theirs}, this rank {ours}")
        else:
            super().__init__(f"{field} is {theirs} at rank {rank}, and {ours} at this rank")


class SourceTimeout(TimeoutError):
    """The call's time was up, and the group ended the operation for all: nothing was received.

    `ranks` are the sources that are known to be missing; none where the group does not say which.
    """

    def __init__(self, kind, timeout, ranks):
        self.ranks = ranks
        missing = f": {', '.join(f'rank {rank}' for rank in ranks)}" if ranks else ""
        limit = "its group's limit" if timeout is None else f"{timeout:g} s"
        super().__init__(f"{kind} was not complete after {limit}{missing}")


class _TorchGroup:
    """A process group of torch, whatever its backend, whose tensors lie in host memory."""

    def __init__(self, group):
        import torch
        import torch.distributed

        self._torch, self._group = torch, group
        self.rank = group.rank()

    def present(self):
        """Ranks of the group now: it may have lost its last ones, or got others."""
        return self._group.size()

    def start(self, source, target, sent, received, timeout):
        """Begins an all-to-all of bytes; returns its work."""
        torch = self._torch
        target, source = torch.from_numpy(target), torch.from_numpy(source)
        if timeout is None:
            return torch.distributed.all_to_all_single(target, source, received, sent, self._group, async_op=True)
        options = torch.distributed.AllToAllOptions()
        options.timeout = datetime.timedelta(seconds=timeout)
        return self._group.alltoall_base(target, source, received, sent, options)

    def wait(self, work, timeout):
        """Waits; returns ranks that failed, as far as the group says. TimeoutError when the time is up."""
        try:
            ended = work.wait() if timeout is None else work.wait(datetime.timedelta(seconds=timeout))
        except RuntimeError as error:
            if isinstance(error.__cause__, TimeoutError):
                # The cause is `kvplane.Timeout`, which names ranks.
                raise error.__cause__ from error
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                raise TimeoutError(str(error)) from error
            raise
        if ended is False:
            raise TimeoutError("the operation is still in flight")
        # Works of `mooncake.pg` say who failed; other groups end an operation as a whole.
        hint = getattr(work, "failed_ranks_hint", None)
        return () if hint is None else [rank for rank, failed in enumerate(hint().tolist()) if failed]

    @staticmethod
    def is_done(work):
        """Whether the group does not use the work's memory any more."""
        return work.is_completed()

    @staticmethod
    def missing():
        """Ranks that are known not to be there."""
        return ()


class _OwnGroup:
    """A `kvplane.group.Group`."""

    def __init__(self, group):
        self._group = group
        self.rank = group.rank

    def present(self):
        """As that of `_TorchGroup`."""
        return self._group.size

    def start(self, source, target, sent, received, timeout):
        """As that of `_TorchGroup`."""
        return self._group.all_to_all(source, target, sent, received, _LONGEST_S if timeout is None else timeout)

    @staticmethod
    def wait(work, timeout):
        """As that of `_TorchGroup`. The operation ends by its own deadline."""
        del timeout
        work.wait()
        return work.failed

    @staticmethod
    def is_done(work):
        """As that of `_TorchGroup`."""
        return work.done()

    def missing(self):
        """As that of `_TorchGroup`."""
        return [rank for rank, there in enumerate(self._group.peers) if not there and rank != self.rank]


def _group_of(group):
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "distributed") and isinstance(group, torch.distributed.ProcessGroup):
        return _TorchGroup(group)
    if hasattr(group, "all_to_all") and hasattr(group, "peers"):
        return _OwnGroup(group)
    raise TypeError(f"a {type(group).__name__} is neither a process group of torch nor a kvplane.group.Group")


class Flight:
    """A call whose messages are in flight."""

    def __init__(self, exchange, call, timeout, mask, parts, work):
        self._exchange, self._call, self._timeout, self._mask = exchange, call, timeout, mask
        self._parts, self._work = parts, work

    def messages(self):
        """Waits for the messages; returns their arrays by source, None for a source without one."""
        self._exchange.finish(self._work, self._call, self._timeout, self._mask)
        found = []
        for source, (memory, sections) in enumerate(self._parts):
            message = None
            if sections is not None:
                mark, *arrays = _experts.views(memory, sections)
                if mark[0] == self._call.mark():
                    message = arrays
                else:
                    self._mask[source] = 0
            found.append(message if self._mask[source] else None)
        return found


class Exchange:
    """Calls of one buffer over a process group. Calls of the ranks are in the same order; one thread at a time."""

    def __init__(self, group):
        self._group = _group_of(group)
        #: Ranks of the calls: those that the group has had, of which some may be gone.
        self.size = self._group.present()
        self._number = 0
        # Operations in flight, and their memory, which must outlive them even when nobody waits for them.
        self._in_flight = []
        self._lock = threading.Lock()

    @property
    def rank(self):
        """This process's rank in the group."""
        return self._group.rank

    def connect(self, timeout):
        """Agrees with the other ranks on a first call, from which those that have joined count as the others do, and on
        the number of ranks, which never falls: a rank that is gone may return. Returns the ranks that took part."""
        with self._lock:
            until, differed = time.monotonic() + _AGREE_S, None
            while True:
                try:
                    return self._connect(timeout if differed is None else min(timeout, _AGREE_S))
                except SourceTimeout as error:
                    # After a mismatch: some rank did not begin again, as it makes another call.
                    raise differed or error from None
                except (RuntimeError, ValueError) as error:
                    # A rank began before it had the view of the others, in which the group is larger. The operation has
                    # ended for all of them, so all begin again.
                    is_mismatch = isinstance(error, Mismatch) or isinstance(error.__cause__, Mismatch)
                    if not is_mismatch or time.monotonic() > until:
                        raise
                    differed = error
                time.sleep(_AGREE_AGAIN_S)

    def _connect(self, timeout):
        self.size = max(self.size, self._group.present())
        self._number = -1
        mask = numpy.ones(self.size, numpy.int32)
        heads = self._heads(self._next("connect"), [(self.size, 0)] * self.size, mask, timeout)
        self.size = max(rows for _, rows, _ in filter(None, heads))
        return numpy.pad(mask, (0, self.size - len(mask)))

    def agree(self, kind, timeout):
        """A call without messages; returns the ranks that took part, as a mask of int32."""
        with self._lock:
            mask = numpy.ones(self.size, numpy.int32)
            call = self._next(kind)
            self._heads(call, [(0, 0)] * self.size, mask, timeout)
            return mask

    def start(self, kind, shape, sizes, sections, fill, mask, timeout):
        """Sends messages and returns the `Flight`.

        `shape` are the fields of `Call` from `num_experts` on; `sizes` rows and pairs of the message to each rank;
        `sections(rows, pairs)` the sections of a message; `fill(rank, arrays)` writes the one to a rank. `mask` has 1
        for each rank that takes part: others are sent nothing and what they send is left out; a source that is missing
        becomes 0. `timeout` in seconds, or None.
        """
        with self._lock:
            call = self._next(kind, *shape)
            there = numpy.ones(self.size, numpy.int32)
            try:
                heads = self._heads(call, [size if on else (0, 0) for size, on in zip(sizes, mask)], there, timeout)
            finally:
                mask[there == 0] = 0
            mark = _experts.Section("<i8", (1,))
            out = [(mark, *sections(*(size if on else (0, 0)))) for size, on in zip(sizes, mask)]
            # The group leaves out a rank that takes part no longer, so nothing is for it.
            sent = [_experts.message_bytes(one) if here else 0 for one, here in zip(out, there)]
            source = numpy.empty(sum(sent), numpy.uint8)
            for rank, memory in enumerate(_split(source, sent)):
                if mask[rank]:
                    first, *arrays = _experts.views(memory, out[rank])
                    first[0] = call.mark()
                    fill(rank, arrays)
                elif there[rank]:
                    memory[:] = 0
                    _experts.views(memory, out[rank])[0][0] = call.mark()
            into = [None if head is None else (mark, *sections(*head[1:])) for head in heads]
            received = [0 if one is None else _experts.message_bytes(one) for one in into]
            target = numpy.zeros(sum(received), numpy.uint8)
            work = self._begin(source, target, sent, received, timeout)
            return Flight(self, call, timeout, mask, list(zip(_split(target, received), into)), work)

    def finish(self, work, call, timeout, mask):
        """Waits for an operation; sources that failed become 0 in `mask`."""
        try:
            for rank in self._group.wait(work, timeout):
                if rank < self.size:
                    mask[rank] = 0
        except TimeoutError as error:
            # `kvplane.Timeout` names them.
            missing = [rank for rank in getattr(error, "ranks", ()) or self._group.missing() if rank < self.size]
            for rank in missing:
                mask[rank] = 0
            raise SourceTimeout(KINDS[call.kind], timeout, missing) from error

    def _next(self, kind, *shape):
        self._number += 1
        return Call(KINDS.index(kind), self._number, *shape)

    def _heads(self, call, sizes, mask, timeout):
        """Exchanges heads; returns (call, rows, pairs) by source, None for one without."""
        source = numpy.stack([encode_head(call, *size) for size in sizes]).view(numpy.uint8).reshape(-1)
        target = numpy.zeros_like(source)
        each = [HEAD_WORDS * 8] * self.size
        work = self._begin(source, target, each, each, timeout)
        self.finish(work, call, timeout, mask)
        # A part of a head may have arrived from a source that failed meanwhile.
        words = target.view("<i8").reshape(self.size, HEAD_WORDS)
        heads = [decode_head(one) if on else None for one, on in zip(words, mask)]
        # Each rank has all heads, so all ranks or none go on.
        for rank, head in enumerate(heads):
            if head is None:
                mask[rank] = 0
                continue
            for field, theirs, ours in zip(Call._fields, head[0], call):
                if theirs != ours:
                    names = (KINDS[theirs], KINDS[ours]) if field == "kind" else (theirs, ours)
                    raise RankMismatch(rank, field, *names)
        return heads

    def _begin(self, source, target, sent, received, timeout):
        while True:
            size = self._group.present()
            ours, theirs = ([*one[:size], *[0] * (size - len(one))] for one in (sent, received))
            try:
                work = self._group.start(source[: sum(ours)], target[: sum(theirs)], ours, theirs, timeout)
                break
            except (RuntimeError, ValueError):
                # Counts that do not fit: the group has another size than a moment ago.
                if self._group.present() == size:
                    raise
        ended = self._group.is_done
        self._in_flight = [*(one for one in self._in_flight if not ended(one[0])), (work, source, target)]
        return work


def _split(memory, sizes):
    """Returns consecutive parts of an array."""
    ends = numpy.cumsum(sizes, dtype=numpy.int64)
    return [memory[end - size : end] for end, size in zip(ends.tolist(), sizes)]
