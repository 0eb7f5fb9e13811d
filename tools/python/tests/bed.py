"""Test bed: a `kvplane dev` with its own runtime directory, shared by the tests of a process."""

import contextlib
import functools
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
import time

_LONGEST_S = 60


def pattern(address, size):
    """Bytes that depend on the address: no two offsets of an object hold the same pattern."""
    out = bytearray(size)
    for at in range(0, size, 8):
        word = ((address + at) * 0x9E3779B97F4A7C15) & (2**64 - 1)
        out[at : at + 8] = word.to_bytes(8, "little")[: min(8, size - at)]
    return bytes(out)


@functools.total_ordering
class Word:
    """Number whose sums wrap at 2^64, as those of numpy's unsigned types do."""

    def __init__(self, value):
        self._value = value % 2**64

    def __index__(self):
        return self._value

    def __eq__(self, other):
        return self._value == int(other)

    def __lt__(self, other):
        return self._value < int(other)

    def __add__(self, other):
        return Word(self._value + int(other))

    __radd__ = __add__


class Bed:
    """A control plane and a node, found by XDG_RUNTIME_DIR; they exit with this process, even if it is killed."""

    def __init__(self, memory="256m", cluster="dev", more=()):
        self.directory = tempfile.TemporaryDirectory(prefix="kvplane-python-")
        os.environ["XDG_RUNTIME_DIR"] = self.directory.name
        os.environ.pop("KVPLANE_CLUSTER", None)
        os.environ.pop("KVPLANE_CERTS", None)
        binary = os.environ["KVPLANE_BINARY"]
        command = [binary, "dev", "--cluster", cluster, "--pool", memory, "--end-with-stdin", *more]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        lines = queue.Queue()
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()
        until = time.monotonic() + _LONGEST_S
        while True:
            line = lines.get(timeout=max(until - time.monotonic(), 0.1))
            if line is None:
                raise RuntimeError(f"kvplane dev ended with {self.process.wait()}")
            if "control plane of" in line:
                self.control = line.split(" on ")[1].split()[0]
            if line.startswith("ready"):
                return

    def _read(self, lines):
        for line in self.process.stdout:
            lines.put(line)
        lines.put(None)

    def close(self):
        """Stops the bed; idempotent."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.directory.cleanup()


@contextlib.contextmanager
def own(**settings):
    """Context manager of a bed of a test's own, which may end before; clients that are opened within find this one."""
    before = {name: os.environ.get(name) for name in ("XDG_RUNTIME_DIR", "KVPLANE_CLUSTER", "KVPLANE_CERTS")}
    found = Bed(**settings)
    try:
        yield found
    finally:
        found.close()
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_BED = None


def bed():
    """The bed that all tests of this process share."""
    global _BED
    if _BED is None:
        _BED = Bed()
    return _BED


def close():
    """Stops the shared bed, if one was started."""
    global _BED
    if _BED is not None:
        _BED.close()
        _BED = None


def python(script, *arguments, timeout=60, **keywords):
    """Runs a script in a separate interpreter and returns its output. Fails if the script fails."""
    here = str(pathlib.Path(__file__).resolve().parent)
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([*filter(None, sys.path), here]))
    command = [sys.executable, "-c", script, *map(str, arguments)]
    done = subprocess.run(
        command, env=environment, timeout=timeout, capture_output=True, text=True, check=False, **keywords
    )
    if done.returncode != 0:
        raise AssertionError(f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout
