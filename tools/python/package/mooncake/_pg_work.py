"""Works of torch over those of `kvplane.group`."""

import threading
import time

import torch
import torch.distributed as dist

from kvplane.group import Error


class ProcessGroupError(RuntimeError):
    """A collective failed, or was begun with invalid arguments. `code` and `ranks` are those of `kvplane.Error`, its
    cause."""

    def __init__(self, cause):
        super().__init__(str(cause))
        self.code = cause.code
        self.ranks = cause.ranks


def seconds(timeout):
    """Returns a timedelta of torch in seconds; None for one that is not set."""
    value = timeout.total_seconds() if hasattr(timeout, "total_seconds") else timeout
    return None if value is None or value <= 0 else min(float(value), 86_400.0)


class MooncakeWork(dist.Work):
    """One or several collectives of a group, and what is left to do at their end."""

    def __init__(self, state, works, outputs, finish=None, peer=None, is_message=False):
        super().__init__()
        self._state = state
        self._works = works
        self._outputs = outputs
        self._finish = finish
        self._peer = peer
        self._is_message = is_message
        self._hint = torch.zeros(state.max_size, dtype=torch.int32)
        self._problem = None
        self._is_done = False
        self._lock = threading.Lock()
        self._future = None

    def also(self, finish):
        """Adds a step at the end of a work that nobody has waited for yet."""
        first = self._finish
        self._finish = finish if first is None else lambda: (first(), finish())

    def _end(self, works):
        """Ends once: copies results, notes which ranks failed, and writes the mirror of active ranks."""
        with self._lock:
            if self._is_done:
                return
            for work in works:
                for rank in work.failed:
                    self._hint[rank] = 1
            if self._is_message and self._peer is None:
                self._peer = works[0].source
            self._state.write_mirror()
            finish, self._finish = self._finish, None
            if finish is not None and self._problem is None and not (self._is_message and self._hint.any()):
                try:
                    finish()
                except ProcessGroupError as problem:
                    self._problem = problem
            self._works = ()
            self._is_done = True

    def _fail(self, problem):
        if self._is_message and problem.ranks and problem.code not in (-901, -1800):
            # The peer is gone: that is told by the hint, as for collectives.
            for rank in problem.ranks:
                self._hint[rank] = 1
            return
        self._problem = self._problem or ProcessGroupError(problem)
        self._problem.__cause__ = self._problem.__cause__ or problem
        self._state.problem = self._problem

    def wait(self, timeout=None):
        """Waits until the collective has ended, at most `timeout`. Returns False if it has not."""
        longest = seconds(timeout)
        until = None if longest is None else time.monotonic() + longest
        works = self._works
        for work in works:
            try:
                if not work.wait(None if until is None else max(until - time.monotonic(), 0.0)):
                    return False
            except Error as problem:
                self._fail(problem)
        self._end(works)
        if self._problem is not None:
            raise self._problem
        return True

    def is_completed(self):
        """Returns True if the collective has ended."""
        if not self._is_done and all(work.done() for work in self._works):
            try:
                self.wait()
            except ProcessGroupError:
                pass
        return self._is_done

    def is_success(self):
        """Returns True if it has ended without an error, and a message's peer has not failed."""
        return self.is_completed() and self._problem is None and not (self._is_message and bool(self._hint.any()))

    def exception(self):
        """Returns its error, or None."""
        return self._problem

    def result(self):
        """Returns the tensors with the results."""
        self.wait()
        return list(self._outputs)

    def synchronize(self):
        """Waits, as `wait` does."""
        self.wait()

    def block_current_stream(self):
        """Waits, as `wait` does: results are staged by the host."""
        self.wait()

    def source_rank(self):
        """Returns the rank that a message came from, or went to."""
        if not self._is_message:
            raise RuntimeError("a collective has no source")
        if self._peer is None:
            raise RuntimeError("the message has not arrived: its source is not known")
        return self._peer

    _source_rank = source_rank

    def get_future(self):
        """Returns a future of torch that has the results."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._future = torch.futures.Future()
        if self.is_completed():
            self._complete()
        else:
            threading.Thread(target=self._complete, name="kvplane-future", daemon=True).start()
        return self._future

    def _complete(self):
        try:
            self.wait()
        except Exception as problem:
            self._future.set_exception(problem)
            return
        self._future.set_result(list(self._outputs))

    def failed_ranks_hint(self):
        """Returns a mask of the ranks that failed while it ran, as int32."""
        self.is_completed()
        return self._hint

    def local_success(self):
        """Returns True if no rank has failed in it."""
        if self._is_message:
            return self.is_success()
        self.is_completed()
        return self._problem is None and not bool(self._hint.any())
