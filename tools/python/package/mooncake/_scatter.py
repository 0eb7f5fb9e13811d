"""Transfers of fragments of ranges, and tickets, which say whether bytes may still be moved."""

import enum
import operator
import os
import sys
import threading
import time

from kvplane import _native
from mooncake._types import several


class ScatterTransferCompletionStatus(enum.Enum):
    """What is known of a scatter transfer. As with pybind11's enumerations, `int()` returns the number, and no number
    equals a member."""

    #: All bytes were moved.
    COMPLETED = 0
    #: Not all bytes were moved, and no more will be, at either end: the memory is the caller's again.
    FAILED_DRAINED = 1
    #: Bytes may still be moved: the memory must stay. Also of a transfer whose outcome is not known here.
    COMPLETION_UNKNOWN = 2

    def __int__(self):
        return self.value

    __index__ = __int__


_UNKNOWN = ScatterTransferCompletionStatus.COMPLETION_UNKNOWN
#: Status by the code of the native module: 1 complete, 0 in flight, negative failed.
_STATUS = {1: ScatterTransferCompletionStatus.COMPLETED, 0: _UNKNOWN}
#: Interval at which an endless wait looks again, in milliseconds; a batch ends by its deadline.
_LOOK_MS = 60_000
#: Time for the peer's answer behind a write that failed, in milliseconds: of a look, and of a call that waits.
_GLANCE_MS, _FENCE_MS = 20, 1000


class ScatterTransferTicket:
    """Scatter transfer in flight, or its outcome. A transfer ends by the deadline of the engine (`MC_TRANSFER_TIMEOUT`,
    30 s), and from then on nothing accesses memory of this process.

    A write that has failed may still be on its way to its target, which may be halted. So it is `FAILED_DRAINED` when
    the target has answered a later request, which `drain` sends, and `status` with little patience, or when nobody
    listens there any more; it stays `COMPLETION_UNKNOWN` as long as the target is silent. `COMPLETION_UNKNOWN` for good
    are a write that was in flight or not answered when its engine was closed, and a transfer whose outcome is not known
    here: another call has taken it by the transfer's number, the engine has forgotten it, as one of 65,536 whose outcomes
    were never taken, or this is a process that was forked since."""

    def __init__(self, native=None, number=0, target=None):
        """`target` of a write: its endpoint, and an address in its memory."""
        self._native, self._number, self._target = native, number, target
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._status = _UNKNOWN if native is not None else ScatterTransferCompletionStatus.FAILED_DRAINED

    @property
    def status(self):
        """What is known now."""
        return self._look(0, _GLANCE_MS)

    @property
    def drained(self):
        """True if no byte will be moved any more."""
        return self.status is not _UNKNOWN

    def drain(self, arg0, /):
        """Waits until the transfer has ended and its target has answered, for at most so many milliseconds. Returns
        what is known then."""
        if not hasattr(arg0, "__index__") or int(arg0) < 0:
            raise TypeError(f"drain(): a number of milliseconds is int, 0 or above, not {arg0!r}")
        return self._look(min(int(arg0), 1 << 40), _GLANCE_MS)

    def _end(self, fence_ms):
        """Waits until the transfer has ended. Returns this."""
        while self._number and self._status is _UNKNOWN and self._is_asked():
            self._look(_LOOK_MS, fence_ms, fence_ms)
        return self

    def _is_asked(self):
        """Returns true while the engine knows more of the transfer than this; without a lock, which a process that was
        forked may have got locked."""
        return self._native is not None and os.getpid() == self._process

    def _withdrawn(self):
        """Records that the engine was closed, which withdraws what is in flight."""
        with self._lock:
            if self._status is _UNKNOWN and self._target is None:
                self._status = ScatterTransferCompletionStatus.FAILED_DRAINED
            self._native = None

    def _look(self, timeout_ms, least_ms, most_ms=1 << 40):
        """Waits for the end of the transfer; what is left of the time, from `least_ms` to `most_ms`, is for the answer of
        the target of a write that failed."""
        if self._status is not _UNKNOWN or not self._is_asked():
            return self._status
        until = time.monotonic() + timeout_ms / 1000
        # The outcome is told once: whoever is told keeps it for the others.
        if not self._lock.acquire(timeout=max(timeout_ms / 1000, 0.001)):
            return self._status
        try:
            native = self._native
            if self._number and native is not None:
                number = self._number
                code = native.wait_for(number, timeout_ms) if timeout_ms else native.status(number)
                if code == _native.NO_BATCH:
                    self._native, self._number = None, 0
                elif code:
                    self._ended(code)
            if self._status is _UNKNOWN and not self._number and self._native is not None:
                limit_ms = min(max(int((until - time.monotonic()) * 1000), least_ms), most_ms)
                if limit_ms and native.fence(*self._target, limit_ms) == 0:
                    self._status, self._native = ScatterTransferCompletionStatus.FAILED_DRAINED, None
            return self._status
        finally:
            self._lock.release()

    def _ended(self, code):
        self._number = 0
        if code == 1 or self._target is None:
            self._status = _STATUS.get(code, ScatterTransferCompletionStatus.FAILED_DRAINED)
            self._native = None

    def __del__(self):
        # Its memory may go with it.
        if getattr(self, "_status", None) is _UNKNOWN and self._is_asked():
            self._end(0)


def close(native, tickets):
    """Closes an engine; its tickets say what came of their transfers."""
    asked = [ticket for ticket in tickets if ticket.status is _UNKNOWN and ticket._is_asked()]
    native.close()
    for ticket in asked:
        ticket._withdrawn()


def complete(native, endpoint, write, ends, fragments):
    """Does what `submit` does, and waits until the transfer has ended."""
    return submit(native, endpoint, write, ends, fragments)._end(_FENCE_MS)


def submit(native, endpoint, write, ends, fragments):
    """Starts a scatter transfer: fragments of ranges, each with base address and capacity at both ends. Returns its
    ticket. What cannot be started (lists of different lengths, a fragment that is not within its range, none at all, a
    peer that is not there) is reported, and its ticket says that nothing is in flight. TypeError for an argument that
    is no list."""
    try:
        ours, theirs, lengths = _places(ends, fragments)
    except ValueError as error:
        return _failed(endpoint, error)
    if native is None:
        return _failed(endpoint, "the engine was not initialized")
    number = native.submit(endpoint, write, ours, theirs, lengths)
    target = (endpoint, theirs[0]) if write else None
    return ScatterTransferTicket(native, number, target) if number > 0 else _failed(endpoint, _native.last_error())


def _failed(endpoint, reason):
    print(f"kvplane: scatter transfer with {endpoint}: {reason}", file=sys.stderr)
    return ScatterTransferTicket()


#: Largest address.
_LAST = (1 << 64) - 1
#: Names of the lists of ranges, and of those of each range's fragments.
_ENDS = ("local_base_addresses", "local_capacities", "remote_base_addresses", "remote_capacities")
_FRAGMENTS = ("local_offsets", "remote_offsets", "lengths")


def _places(ends, fragments):
    """Returns the addresses at both ends and the lengths of all fragments; ValueError for what makes no sense."""
    ends = [_numbers(column, name) for name, column in zip(_ENDS, ends)]
    for base in (*ends[0], *ends[2]):
        if not 0 <= base <= _LAST:
            raise TypeError(f"{base} is not an address or length: these go from 0 to 2^64 - 1")
    fragments = [_rows(column, name) for name, column in zip(_FRAGMENTS, fragments)]
    if len({len(column) for column in (*ends, *fragments)}) > 1:
        raise ValueError("the lists of ranges have different lengths")
    ours, theirs, sizes = [], [], []
    for number, row in enumerate(zip(*ends, *fragments)):
        our_base, our_room, their_base, their_room, our_offsets, their_offsets, lengths = row
        if not len(our_offsets) == len(their_offsets) == len(lengths):
            raise ValueError(f"the lists of fragments of range {number} have different lengths")
        for at, to, length in zip(our_offsets, their_offsets, lengths):
            if length <= 0 or at < 0 or to < 0 or at + length > our_room or to + length > their_room:
                raise ValueError(f"a fragment of {length} bytes at {at} and {to} is not within range {number}")
            if our_base > _LAST - at - length or their_base > _LAST - to - length:
                raise ValueError(f"range {number} is not within the address space, which ends at 2^64")
            ours.append(our_base + at)
            theirs.append(their_base + to)
            sizes.append(length)
    if not sizes:
        raise ValueError("a scatter transfer has at least one fragment")
    return ours, theirs, sizes


def _numbers(column, name):
    """Returns a list of numbers as Python's, whose sums do not wrap as those of numpy's types; TypeError for anything
    else."""
    found = []
    for one in several(column, "scatter", name, "int"):
        try:
            found.append(operator.index(one))
        except TypeError:
            raise TypeError(f"scatter(): {name} is a list of int, and {type(one).__name__} is in it") from None
    return found


def _rows(column, name):
    """Does the same with a list of lists of numbers."""
    rows = several(column, "scatter", name, "lists of int")
    return [_numbers(row, f"{name}[{number}]") for number, row in enumerate(rows)]
