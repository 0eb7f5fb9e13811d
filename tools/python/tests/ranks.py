"""Processes of a job, for tests of process groups: each runs the steps that a test sends it, and is killed at its end.

Groups are those of the native module, or of the stand-in `fake_groups`.
"""

import atexit
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
LONGEST_S = 60


def has_native():
    """True if the native module has process groups of its own."""
    from kvplane import _native

    return hasattr(_native, "GroupProcess")


def environment(fake):
    """Variables of a process that imports the packages and these tests; the stand-in's, if it is to be used."""
    paths = [str(HERE), *filter(None, sys.path)]
    return dict(os.environ, PYTHONPATH=os.pathsep.join(paths), KVPLANE_FAKE_GROUPS=str(int(fake)))


class Lines:
    """Process whose lines are read with a deadline."""

    def __init__(self, command, fake):
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment(fake)
        )
        self.lines = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        atexit.register(self.kill)

    def _read(self):
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def next(self, longest=LONGEST_S):
        """Next line; None at the end."""
        return self.lines.get(timeout=longest)

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        """Kills the process; idempotent."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        atexit.unregister(self.kill)
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                pipe.close()
            except OSError:
                pass


class FakeControl(Lines):
    """The stand-in's control plane."""

    def __init__(self):
        super().__init__([sys.executable, str(HERE / "fake_groups.py"), "control"], True)
        self.address = self.next().split(" on ")[1].strip()


class Rank(Lines):
    """A process of the job."""

    def __init__(self, module, fake):
        super().__init__([sys.executable, str(HERE / "ranks.py"), module], fake)

    def begin(self, step, *arguments):
        """Begins a step."""
        self.process.stdin.write(json.dumps([step, *arguments]) + "\n")
        self.process.stdin.flush()

    def end(self, longest=LONGEST_S):
        """Result of the step that was begun; AssertionError if it raised, or the process has ended."""
        line = self.next(longest)
        if line is None:
            raise AssertionError(f"the process has ended with {self.process.wait()}")
        kind, result = json.loads(line)
        if kind != "result":
            raise AssertionError(result)
        return result


class Job:
    """Processes that run the functions of a module."""

    def __init__(self, module, count, fake):
        self.module, self.fake = module, fake
        self.ranks = [Rank(module, fake) for _ in range(count)]

    def add(self):
        """Another process; returns its number."""
        self.ranks.append(Rank(self.module, self.fake))
        return len(self.ranks) - 1

    def run(self, step, *arguments, on=None):
        """Results of a step by all processes that live, or by some; arguments may be functions of the number."""
        numbers = [at for at, rank in enumerate(self.ranks) if rank.process.poll() is None] if on is None else on
        for at in numbers:
            self.ranks[at].begin(step, *(one(at) if callable(one) else one for one in arguments))
        results, problems = [], []
        for at in numbers:
            # The results of all ranks are read, or the next step would have them.
            try:
                results.append(self.ranks[at].end())
            except (AssertionError, queue.Empty) as problem:
                problems.append(f"process {at}: {problem or 'no result'}")
        if problems:
            raise AssertionError("\n".join(problems))
        return results

    def kill(self, number):
        """Kills a process, as `kill -9` does."""
        self.ranks[number].signal(signal.SIGKILL)
        self.ranks[number].process.wait()

    def close(self):
        for rank in self.ranks:
            rank.kill()


def until(condition, longest=LONGEST_S):
    """Waits for a condition."""
    end = time.monotonic() + longest
    while not condition():
        if time.monotonic() > end:
            raise AssertionError("the condition did not come true")
        time.sleep(0.01)


def serve(module):
    """Runs the steps that arrive at standard input."""
    import faulthandler

    faulthandler.register(signal.SIGUSR1)
    import importlib
    import traceback

    if os.environ["KVPLANE_FAKE_GROUPS"] == "1":
        import fake_groups

        fake_groups.install()
    steps = importlib.import_module(module)
    for line in sys.stdin:
        step, *arguments = json.loads(line)
        try:
            print(json.dumps(["result", getattr(steps, step)(*arguments)]), flush=True)
        except BaseException:
            print(json.dumps(["error", traceback.format_exc()]), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1])
