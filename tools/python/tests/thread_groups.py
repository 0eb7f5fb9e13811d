"""A process group whose ranks are threads of this process, for tests: the all-to-all of `kvplane.group.Group`.

Ranks die and stall where a test says, by the number of their operation; no clock is involved.
"""

import threading


class Killed(BaseException):
    """Ends the thread of a rank that dies, or one that stalls: then the rank lives on."""


class _Operation:
    """One collective, to which every participant has to come."""

    def __init__(self):
        self.calls, self.done, self.error = {}, False, None
        self.failed = set()
        #: Calls of ranks that died when they had sent a part.
        self.torn = {}


class World:
    """Ranks that share their operations. `deaths` are pairs of a rank and the number of its operation, counted from 0,
    in which it dies, when a part of what it sends has arrived; `stalls` likewise, for ranks that live and never come.
    """

    def __init__(self, size, deaths=(), stalls=()):
        self.size, self.deaths, self.stalls = size, set(deaths), set(stalls)
        self.alive = set(range(size))
        self._operations, self._changed = {}, threading.Condition()

    def run(self, body, timeout=60):
        """Calls `body(group)` in a thread for each rank; returns the results by rank, None of those that died."""
        results, errors = [None] * self.size, []

        def one(rank):
            try:
                results[rank] = body(Group(self, rank))
            except Killed:
                return
            except BaseException as error:
                errors.append(error)
            # A rank that has returned takes part no longer, so that nobody waits for it.
            self.leave(rank)

        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout)
            if thread.is_alive():
                raise AssertionError("a rank waits for ever")
        if errors:
            raise errors[0]
        return results

    def leave(self, rank):
        with self._changed:
            self.alive.discard(rank)
            for operation in self._operations.values():
                if not operation.done:
                    operation.failed.add(rank)
                    operation.calls.pop(rank, None)
            self._settle()

    def join(self, rank, number, call):
        with self._changed:
            operation = self._operations.setdefault(number, _Operation())
            operation.calls[rank] = call
            self._settle()
            return operation

    def wait(self, operation):
        with self._changed:
            assert self._changed.wait_for(lambda: operation.done, 60), "an operation never ends"
            if operation.error is not None:
                raise operation.error

    def tear(self, rank, number, call):
        """A rank dies in the middle of an operation."""
        with self._changed:
            self._operations.setdefault(number, _Operation()).torn[rank] = call
        self.leave(rank)

    def _settle(self):
        """Ends the operations to which all have come that will."""
        for number, operation in sorted(self._operations.items()):
            if operation.done:
                continue
            missing = self.alive - set(operation.calls)
            if missing and all((rank, number) in self.stalls for rank in missing):
                operation.error = Missed(sorted(missing))
                operation.done = True
            elif not missing:
                self._transfer(operation)
                operation.done = True
        self._changed.notify_all()

    def _transfer(self, operation):
        for reader, (_, target, _, received) in operation.calls.items():
            for writer, (source, _, sent, _) in operation.torn.items():
                if max(reader, writer) < min(len(sent), len(received)) and sent[reader] == received[writer]:
                    begin, into, part = sum(sent[:reader]), sum(received[:writer]), sent[reader] // 2
                    target[into : into + part] = source[begin : begin + part]
            for writer, (source, _, sent, _) in operation.calls.items():
                if max(reader, writer) >= min(len(sent), len(received)):
                    # The reader or the writer began when the other was gone, or not there yet.
                    continue
                if sent[reader] != received[writer]:
                    operation.error = ValueError(f"{writer} sends {sent[reader]}, {reader} takes {received[writer]}")
                    return
                begin, into = sum(sent[:reader]), sum(received[:writer])
                target[into : into + sent[reader]] = source[begin : begin + sent[reader]]


class Missed(TimeoutError):
    """As `kvplane.Timeout`."""

    def __init__(self, ranks):
        super().__init__("the deadline passed")
        self.ranks = ranks


class Group:
    """The group of one rank."""

    def __init__(self, world, rank):
        self._world, self.rank, self._number = world, rank, -1
        #: Bytes sent to other ranks.
        self.sent = 0

    @property
    def size(self):
        """The highest rank that is there, plus one."""
        return max(self._world.alive) + 1

    @property
    def peers(self):
        return [rank in self._world.alive for rank in range(self._world.size)]

    def all_to_all(self, source, target, source_counts, target_counts, deadline):
        assert source.dtype == target.dtype == "uint8" and 0 < deadline <= 86_400
        if not len(source_counts) == len(target_counts) == self.size:
            raise ValueError(f"{len(source_counts)} and {len(target_counts)} counts in a group of {self.size}")
        assert (sum(source_counts), sum(target_counts)) == (len(source), len(target))
        self._number += 1
        call = source, target, list(source_counts), list(target_counts)
        if (self.rank, self._number) in self._world.deaths:
            self._world.tear(self.rank, self._number, call)
            raise Killed
        if (self.rank, self._number) in self._world.stalls:
            raise Killed
        self.sent += sum(source_counts) - source_counts[self.rank]
        return Work(self._world, self._world.join(self.rank, self._number, call))


class Work:
    """As `kvplane.group.Work`."""

    def __init__(self, world, operation):
        self._world, self._operation = world, operation

    def wait(self, timeout=None):
        assert timeout is None
        self._world.wait(self._operation)
        return True

    def done(self):
        return self._operation.done

    @property
    def failed(self):
        return sorted(self._operation.failed)
