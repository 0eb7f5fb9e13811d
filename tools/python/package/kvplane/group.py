"""Process groups: collectives among the processes of a job, which go on without the ones that fail.

    import numpy
    from kvplane.group import World

    with World("job-7", rank, "10.0.0.1:50051") as world:       # the control plane; by default, that of this user
        with world.group("all", range(4)) as group:             # returns when the four are there
            gradient = numpy.ones(1 << 20, numpy.float32)
            work = group.all_reduce(gradient)                   # in place, at once
            work.wait()                                         # it is the sum now
            print(work.failed, group.size)

A process that dies while a collective runs is left out: all others get the result of the same participants, and
`Work.failed` names the ranks that are missing. Another process can take the rank's place (`joining=True`, `Group.join`)
while the others go on. docs/process-groups.md has the semantics.

Arrays are those of numpy, tensors of torch in host memory, or any object with the buffer protocol or
`__array_interface__`; their memory is contiguous, and is not to be touched before the collective is done. All ranks of
a group begin its collectives in the same order.
"""

import operator
import time
from types import TracebackType
from typing import Any, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple, Type, Union

from kvplane import _native
from kvplane._arrays import Elements, elements, like, shape_of
from kvplane._errors import Error, Excluded, InvalidArgument, Mismatch, Timeout, Unreachable, raised

__all__ = [
    "MAX_RANKS",
    "Change",
    "Error",
    "Excluded",
    "Group",
    "InvalidArgument",
    "Mismatch",
    "Reconciliation",
    "Timeout",
    "Work",
    "World",
]

#: Most ranks of a world, and of a group.
MAX_RANKS = 64
#: Treatment of members that fail: deactivated before the collective completes, deactivated by `sync_after_failure`, or
#: by the caller.
FAILURE_MODES = ("automatic", "deferred", "manual")


#: Longest wait for a message of a rank that takes no part any more.
_BUFFERED_S = 0.5
#: Longest wait for collectives in flight, when a group is closed.
_DRAIN_S = 5.0


class Change(NamedTuple):
    """Outcome of a change of a group's view."""

    #: True if the view has the change, perhaps without `dropped`.
    applied: bool
    #: Epoch of the view that has it.
    epoch: int
    #: Ranks that failed meanwhile, and are not in the view.
    dropped: List[int]
    #: Reason why it was rejected.
    reason: str


class Reconciliation(NamedTuple):
    """Outcome of `Group.sync_after_failure`."""

    #: `reconciled`, `none_pending` or `rejected`.
    status: str
    #: Reason why it was rejected.
    reason: str


def _called(function: Any, *arguments: Any) -> Any:
    """Calls the native module, and converts its exceptions."""
    try:
        return function(*arguments)
    except RuntimeError as problem:
        raise raised(problem) from None


def _rank(rank: Any, below: int, what: str) -> int:
    number = operator.index(rank)
    if not 0 <= number < below:
        raise InvalidArgument(-600, f"{what} {number} is not a rank from 0 to {below - 1}")
    return number


class _NoPeer:
    """Work of a message whose peer takes no part in the group's view: it has ended, and names the peer."""

    def __init__(self, peer: int, epoch: int):
        self._peer, self._epoch = peer, epoch

    def wait(self, deadline: Optional[float] = None) -> bool:
        return True

    def is_done(self) -> bool:
        return True

    def failed(self) -> List[bool]:
        return [rank == self._peer for rank in range(self._peer + 1)]

    def epoch(self) -> int:
        return self._epoch

    def source(self) -> Optional[int]:
        return None


class Work:
    """A collective that was begun. It keeps the arrays until it is done."""

    def __init__(self, work: Union["_native.GroupWork", _NoPeer], result: Any, keeps: Sequence[Elements]):
        self._work = work
        self._result = result
        self._keeps: Any = keeps
        #: True for a message whose source takes part no longer: its deadline is no error, and `failed` names the source.
        self._is_source_gone = False

    def done(self) -> bool:
        """Returns True if it has ended, with a result or an error."""
        if self._keeps is not None and self._work.is_done():
            self._keeps = None
        return self._keeps is None

    def wait(self, timeout: Optional[float] = None) -> bool:
        """Waits until it has ended, at most `timeout` seconds: it ends by the deadline that it was begun with. Returns
        False if it has not. Raises its error: Timeout with the ranks that it waited for, Mismatch if ranks began
        another collective, Excluded if this process is in the group's view no longer."""
        if timeout is not None and timeout < 0:
            raise InvalidArgument(-600, f"timeout is {timeout} s: it is 0 or more")
        try:
            ended: bool = _called(self._work.wait, timeout)
        except Timeout:
            if not self._is_source_gone:
                raise
            ended = True
        if ended:
            self._keeps = None
        return ended

    def result(self, timeout: Optional[float] = None) -> Any:
        """Waits as `wait` does, and returns the array with the result. Raises Timeout if it has not ended by then."""
        if not self.wait(timeout):
            raise Timeout(-901, f"the collective has not ended within {timeout} s; it goes on")
        return self._result

    def exception(self, timeout: Optional[float] = None) -> Optional[Error]:
        """Waits as `result` does, and returns the error, or None."""
        try:
            self.result(timeout)
        except Error as problem:
            if not self.done():
                raise
            return problem
        return None

    @property
    def failed(self) -> List[int]:
        """Returns the ranks that failed while it ran: the result is that of the others. Where failures are not
        `automatic`, so do those that failed before and are not deactivated yet."""
        return [rank for rank, has_failed in enumerate(self._work.failed()) if has_failed]

    @property
    def epoch(self) -> int:
        """Returns the epoch of the view whose participants contributed."""
        epoch: int = self._work.epoch()
        return epoch

    @property
    def source(self) -> Optional[int]:
        """Returns the rank that a message came from, or went to; None before the end, if it failed, and for a
        collective."""
        source: Optional[int] = self._work.source()
        return source


class Group:
    """A process group, as one of its members: `World.group` makes it. Ranks are those in the group.

    Each collective returns a `Work` at once, and those of a group run in the order in which they were begun. `deadline`
    is the seconds within which one ends, the group's by default: a process that is alive and slow is waited for until
    then, a dead one is not. Where `target` is left out, it is a new array of numpy, or of torch for a tensor, and the
    parts of ranks that are missing are zeros in it; they are left as they were in one that was passed. The part of a
    rank that failed during the collective may be written in part. Arrays with a part for each rank have `size` parts, or
    more, at most `max_size`: then they need not shrink with the group.
    """

    def __init__(self, group: "_native.ProcessGroup", deadline: float, failures: str = "automatic"):
        self._group, self._failures = group, failures
        #: Seconds within which a collective ends, unless its call says otherwise.
        self.deadline = deadline
        #: Works whose arrays are still in use, oldest first.
        self._running: List[Work] = []
        self._is_open = True

    @property
    def name(self) -> str:
        """Returns the group's name in its world."""
        name: str = self._group.name
        return name

    @property
    def rank(self) -> int:
        """Returns this process's rank."""
        rank: int = self._group.rank
        return rank

    @property
    def max_size(self) -> int:
        """Returns the most members that the group may ever have."""
        most: int = self._group.max_size
        return most

    @property
    def epoch(self) -> int:
        """Returns the epoch of the group's view, which grows with each change."""
        epoch: int = self._group.epoch
        return epoch

    @property
    def size(self) -> int:
        """Returns the highest active rank plus one, which is the number of parts in gathered arrays; for a joiner that
        has not joined yet, the number of ranks that it named."""
        return int(self._group.size())

    @property
    def active(self) -> List[bool]:
        """Returns whether each rank takes part."""
        return list(self._group.active())

    @property
    def members(self) -> List[str]:
        """Returns each rank's state: `absent`, `inactive`, `awaiting` or `active`."""
        return list(self._group.member_states())

    @property
    def peers(self) -> List[bool]:
        """Returns whether each rank's process is alive and connected to this one."""
        return list(self._group.peer_states())

    def all_reduce(self, array: Any, reduction: str = "sum", deadline: Optional[float] = None) -> Work:
        """Combines the arrays of all ranks, in place."""
        whole = elements(array, "array", True)
        kind = whole.reduced(reduction)
        return self._begin("all_reduce", array, [whole], deadline, whole.address, whole.length, kind, reduction)

    def reduce(self, array: Any, root: int = 0, reduction: str = "sum", deadline: Optional[float] = None) -> Work:
        """Combines the arrays of all ranks, in place at the root."""
        whole = elements(array, "array", self._is_at(root))
        kind = whole.reduced(reduction)
        return self._begin("reduce", array, [whole], deadline, whole.address, whole.length, kind, reduction, root)

    def broadcast(self, array: Any, root: int = 0, deadline: Optional[float] = None) -> Work:
        """Copies the root's array to all ranks."""
        whole = elements(array, "array", not self._is_at(root)).moved()
        return self._begin("broadcast", array, [whole], deadline, whole.address, whole.length, whole.data_type, root)

    def all_gather(self, source: Any, target: Any = None, deadline: Optional[float] = None) -> Work:
        """Copies the arrays of all ranks, in the order of the ranks, to all."""
        if target is None:
            target = like(source, [self.size, *shape_of(source)])
        parts, whole = self._whole(source, target, "source", "target", True)
        numbers = parts.address, whole.address, parts.length, self._parts(whole, parts), parts.data_type
        return self._begin("all_gather", target, [parts, whole], deadline, *numbers)

    def gather(self, source: Any, target: Any = None, root: int = 0, deadline: Optional[float] = None) -> Work:
        """Copies the arrays of all ranks, in the order of the ranks, to the root. The others pass no target."""
        if self._is_at(root):
            if target is None:
                target = like(source, [self.size, *shape_of(source)])
            parts, whole = self._whole(source, target, "source", "target", True)
            kept, address, number = [parts, whole], whole.address, self._parts(whole, parts)
        else:
            parts = elements(source, "source").moved()
            kept, address, number = [parts], 0, self.max_size
        numbers = parts.address, address, parts.length, number, parts.data_type, root
        return self._begin("gather", target, kept, deadline, *numbers)

    def scatter(self, target: Any, source: Any = None, root: int = 0, deadline: Optional[float] = None) -> Work:
        """Copies each rank's part of the root's source to its target. The others pass no source."""
        if self._is_at(root):
            if source is None:
                raise InvalidArgument(-600, f"rank {root} is the root of the scatter, and passes no source")
            parts, whole = self._whole(target, source, "target", "source", False)
            kept, address, number = [parts, whole], whole.address, self._parts(whole, parts)
        else:
            parts = elements(target, "target", True).moved()
            kept, address, number = [parts], 0, self.max_size
        numbers = address, parts.address, parts.length, number, parts.data_type, root
        return self._begin("scatter", target, kept, deadline, *numbers)

    def reduce_scatter(
        self, source: Any, target: Any, reduction: str = "sum", deadline: Optional[float] = None
    ) -> Work:
        """Combines the arrays of all ranks, and gives each rank its part: as many elements as its target has."""
        whole, part = elements(source, "source"), elements(target, "target", True)
        self._same_type(whole, part)
        self._fits(whole, part, "source", "target")
        number = self._parts(whole, part)
        numbers = whole.address, part.address, part.length, number, part.reduced(reduction), reduction
        return self._begin("reduce_scatter", target, [whole, part], deadline, *numbers)

    def all_to_all(
        self,
        source: Any,
        target: Any,
        source_counts: Optional[Sequence[int]] = None,
        target_counts: Optional[Sequence[int]] = None,
        deadline: Optional[float] = None,
    ) -> Work:
        """Sends a part of the source to each rank, and receives one of each. Counts are numbers of elements by rank;
        without them, the arrays are divided evenly by `max_size`, which stays when ranks fail or join."""
        ours, theirs = elements(source, "source"), elements(target, "target", True)
        self._same_type(ours, theirs)
        to = self._counts(ours, source_counts, "source")
        of = self._counts(theirs, target_counts, "target")
        ours, theirs, scale = ours.moved(), theirs.moved(), ours.item
        scale //= ours.item
        to, of = [count * scale for count in to], [count * scale for count in of]
        numbers = ours.address, theirs.address, to, of, ours.data_type
        return self._begin("all_to_all", target, [ours, theirs], deadline, *numbers)

    def barrier(self, deadline: Optional[float] = None) -> Work:
        """Ends when all ranks have begun it."""
        return self._begin("barrier", None, [], deadline)

    def send(self, array: Any, peer: int, tag: int = 0, deadline: Optional[float] = None) -> Work:
        """Sends an array to a rank, whose `receive` has the same tag and number of elements. If the rank fails, the
        work ends, and `failed` names it."""
        return self._message("send", array, elements(array, "array").moved(), peer, tag, deadline)

    def receive(
        self, array: Any, peer: Optional[int] = None, tag: int = 0, deadline: Optional[float] = None
    ) -> Work:
        """Receives an array from a rank; from any without `peer`: then `Work.source` says from which, and the failure
        of a rank does not end the work before its deadline."""
        return self._message("receive", array, elements(array, "array", True).moved(), peer, tag, deadline)

    def join(self, deadline: float = 30.0) -> None:
        """Makes this member ready, and waits until another one has activated it. Until then, the collectives of a
        joiner have itself as their only participant."""
        _called(self._group.join, self._seconds(deadline))

    def activate(self, ranks: Union[int, Iterable[int]], deadline: float = 20.0) -> Change:
        """Has ranks take part from the next view on. Waits until each of them is ready and reaches all others; any
        number of members may ask for the same."""
        return self._change(True, ranks, deadline)

    def deactivate(self, ranks: Union[int, Iterable[int]], deadline: float = 20.0) -> Change:
        """Has ranks take part no longer."""
        return self._change(False, ranks, deadline)

    def sync_after_failure(self, deadline: float = 30.0) -> Reconciliation:
        """Waits until the control plane has decided which ranks failed; in a group whose failures are `deferred`, they
        are deactivated then. Where they are `manual`, the caller deactivates them, and this says whether there are
        any."""
        if self._failures == "manual":
            # The native module answers here that none is pending, whoever failed: it has nothing to decide.
            return Reconciliation("reconciled" if self._missing() else "none_pending", "")
        return Reconciliation(*_called(self._group.sync_after_failure, self._seconds(deadline)))

    def await_peers(self, ranks: Union[int, Iterable[int]], deadline: float = 30.0) -> bool:
        """Waits until the processes of ranks are alive and connected, as they are before they are activated. Returns
        False if they are not by then."""
        named = self._named(ranks)
        until = time.monotonic() + self._seconds(deadline)
        while not all(self.peers[rank] for rank in named):
            if time.monotonic() >= until:
                return False
            time.sleep(0.005)
        return True

    def close(self) -> None:
        """Leaves the group, after the collectives that were begun have ended, or 5 s: then those end with an error.
        Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        until = time.monotonic() + _DRAIN_S
        for work in self._running:
            try:
                work.wait(max(until - time.monotonic(), 0.0))
            except Error:
                # A caller that waits for the work gets its error, too.
                pass
        _called(self._group.detach)
        self._running.clear()

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Any, trace: Optional[TracebackType]) -> None:
        self.close()

    def _await_founding(self, count: int, seconds: float) -> None:
        """Waits until all founding members are there."""
        until = time.monotonic() + seconds
        while not self.epoch:
            if time.monotonic() >= until:
                missing = [rank for rank, state in enumerate(self.members[:count]) if state == "absent"]
                self.close()
                raise Timeout(-901, f"ranks {missing} are not in the group {self.name!r} after {seconds} s", missing)
            time.sleep(0.002)

    def _begin(self, name: str, result: Any, keeps: Sequence[Elements], deadline: Optional[float], *given: Any) -> Work:
        seconds = self.deadline if deadline is None else self._seconds(deadline)
        # A caller may drop a work without a wait; the arrays have to stay until the work has ended.
        while self._running and self._running[0].done():
            self._running.pop(0)
        work = Work(_called(getattr(self._group, name), *given, seconds), result, keeps)
        self._running.append(work)
        return work

    def _message(
        self, name: str, array: Any, whole: Elements, peer: Optional[int], tag: int, deadline: Optional[float]
    ) -> Work:
        numbers = whole.address, whole.length, whole.data_type
        if peer is None:
            return self._begin(name, array, [whole], deadline, *numbers, None, operator.index(tag))
        number = self._peer(peer)
        # The native module ends a message to a peer whose connection is lost. A rank that was deactivated, or has not
        # joined yet, may be connected: there a message would count as sent, or be waited for until the deadline.
        is_gone = not self.active[number]
        if is_gone and name == "send":
            return Work(_NoPeer(number, self.epoch), array, [])
        if is_gone:
            # A message that the rank sent before it was deactivated has arrived, or arrives soon.
            deadline = min(self.deadline if deadline is None else self._seconds(deadline), _BUFFERED_S)
        work = self._begin(name, array, [whole], deadline, *numbers, number, operator.index(tag))
        work._is_source_gone = is_gone
        return work

    def _missing(self) -> Set[int]:
        """Active members that take part no longer, and that nobody has deactivated."""
        pairs = zip(self.members, self.active)
        return {rank for rank, (state, takes_part) in enumerate(pairs) if state == "active" and not takes_part}

    def _change(self, activate: bool, ranks: Union[int, Iterable[int]], deadline: float) -> Change:
        named = self._named(ranks)
        status, epoch, dropped, reason = _called(self._group.propose, activate, named, self._seconds(deadline))
        return Change(status != "rejected", epoch, list(dropped), reason)

    def _named(self, ranks: Union[int, Iterable[int]]) -> List[int]:
        several = [ranks] if isinstance(ranks, int) else list(ranks)
        return [_rank(rank, self.max_size, "member") for rank in several]

    def _is_at(self, root: int) -> bool:
        return _rank(root, self.max_size, "the root") == self.rank

    def _peer(self, peer: int) -> int:
        number = _rank(peer, self.max_size, "the peer")
        if number == self.rank:
            raise InvalidArgument(-600, f"rank {number} is this process: it does not send to itself")
        return number

    @staticmethod
    def _seconds(deadline: float) -> float:
        seconds = float(deadline)
        if not 0 < seconds <= 86_400:
            raise InvalidArgument(-600, f"deadline is {deadline} s: it is more than 0, at most 86400")
        return seconds

    @staticmethod
    def _same_type(source: Elements, target: Elements) -> None:
        if source.kind != target.kind:
            what = f"source has elements of type {source.kind}, target of {target.kind}: they have the same"
            raise InvalidArgument(-600, what)

    def _fits(self, whole: Elements, part: Elements, of_whole: str, of_part: str) -> None:
        """Checks that there is a part for each rank; those of ranks beyond the highest active one are not used."""
        size = self.size
        parts, rest = divmod(whole.length, part.length) if part.length else (size, whole.length)
        if rest or not size <= parts <= self.max_size:
            what = f"{of_whole} has {whole.length} elements, not the {size} x {part.length} of {size} ranks and {of_part}"
            raise InvalidArgument(-600, what)

    def _parts(self, whole: Elements, part: Elements) -> int:
        """Returns the number of parts that an array has room for: the group may grow before its collective begins."""
        return whole.length // part.length if part.length else self.max_size

    def _whole(self, part: Any, whole: Any, of_part: str, of_whole: str, writes: bool) -> Tuple[Elements, Elements]:
        """Returns the elements of one rank's part and of all ranks' parts; `writes` if the whole is the target."""
        one, several = elements(part, of_part, not writes), elements(whole, of_whole, writes)
        self._same_type(one, several)
        self._fits(several, one, of_whole, of_part)
        return one.moved(), several.moved()

    def _counts(self, whole: Elements, counts: Optional[Sequence[int]], name: str) -> List[int]:
        size = self.size
        if counts is None:
            each, rest = divmod(whole.length, self.max_size)
            if rest:
                what = f"{name} has {whole.length} elements, which the group's {self.max_size} ranks do not share evenly"
                raise InvalidArgument(-600, f"{what}: name {name}_counts")
            return [each] * size
        numbers = [operator.index(count) for count in counts]
        if not size <= len(numbers) <= self.max_size or min(numbers) < 0 or sum(numbers) != whole.length:
            what = f"{name}_counts are {numbers}: {size} numbers of 0 or more that add up to {name}'s {whole.length}"
            raise InvalidArgument(-600, what)
        return numbers[:size]


class World:
    """This process as a rank of a world, the processes of one job. Its groups are closed with it.

    `name` is the same for all processes of the job, and no other job of the same control plane has it. `control` is the
    address of the control plane; by default, that of this user on this host. `host` is the address on which the other
    processes reach this one: loopback by default; `devices` are RDMA devices for those of other hosts, the best first.

    Conflict if another live process has the rank; a process takes the place of one that died.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        control: Optional[str] = None,
        *,
        host: Optional[str] = None,
        cluster: Optional[str] = None,
        certificates: Optional[str] = None,
        runtime_directory: Optional[str] = None,
        devices: Optional[Sequence[str]] = None,
    ):
        if not name:
            raise InvalidArgument(-600, "the name of a world is empty")
        self.name = name
        self.rank = _rank(rank, MAX_RANKS, "rank")
        more = {"cluster": cluster, "certificates": certificates, "runtime_directory": runtime_directory}
        given: Any = {key: value for key, value in more.items() if value is not None}
        if devices:
            given["devices"] = list(devices)
        try:
            self._process = _native.GroupProcess(control, name, self.rank, host, **given)
        except ConnectionError as problem:
            raise Unreachable(-900, str(problem)) from None
        except RuntimeError as problem:
            raise raised(problem) from None
        self._groups: List[Group] = []

    def group(
        self,
        name: str,
        order: Iterable[int],
        *,
        max_size: Optional[int] = None,
        failures: str = "automatic",
        joining: bool = False,
        deadline: float = 30.0,
    ) -> Group:
        """Returns a group with the world's ranks of `order`, whose positions are the ranks in the group. All its
        founding members call this with the same arguments, and it returns when all have.

        `max_size` reserves room for ranks that join later. `failures` is the treatment of members that fail:
        `automatic` has them deactivated before the collective that they failed in completes, `deferred` at
        `sync_after_failure`, `manual` at the caller's `deactivate`; their contribution is missing at once in each.
        `joining` becomes a member of a group that exists: its order is that group's, or continues it; a joiner never
        creates one. `deadline` is the default of the group's collectives, and bounds this call.
        """
        ranks = [_rank(rank, MAX_RANKS, "member") for rank in order]
        most = len(ranks) if max_size is None else operator.index(max_size)
        if not 1 <= len(ranks) <= most <= MAX_RANKS:
            what = f"{len(ranks)} ranks in a group of at most {most}: it has 1 or more, and max_size is at most {MAX_RANKS}"
            raise InvalidArgument(-600, what)
        if len(set(ranks)) != len(ranks):
            raise InvalidArgument(-600, f"order is {ranks}: a rank is in it twice")
        if self.rank not in ranks:
            raise InvalidArgument(-600, f"order is {ranks}: it has not the rank of this process, {self.rank}")
        if failures not in FAILURE_MODES:
            raise InvalidArgument(-600, f"failures is {failures!r}: it is one of {', '.join(FAILURE_MODES)}")
        seconds = Group._seconds(deadline)
        group = Group(_called(self._process.attach, name, ranks, most, failures, joining), seconds, failures)
        if not joining:
            group._await_founding(len(ranks), seconds)
        self._groups = [one for one in self._groups if one._is_open]
        self._groups.append(group)
        return group

    def close(self) -> None:
        """Leaves all groups, and the world. Idempotent."""
        groups, self._groups = self._groups, []
        try:
            for group in groups:
                group.close()
        finally:
            _called(self._process.close)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Any, trace: Optional[TracebackType]) -> None:
        self.close()
