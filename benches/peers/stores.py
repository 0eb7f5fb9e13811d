"""Common parts of the drivers of other stores: memory with bytes that identify their location, timed loops, the protocol.

`kvplane-bench stores` starts a script as `serve POOL_BYTES DIRECTORY` once, and as `client SERVER INDEX BUFFER_BYTES
[WAY]` for each client; SERVER is the server's JSON line. Both print one JSON line when they are ready, with the processes
whose CPU time counts. A client answers each line on standard input with one JSON line:

  put SIZE BATCH SECONDS MOST ROUND   new keys, at most MOST calls    -> calls, begin, end, p50_us, p99_us, p999_us
  get SIZE BATCH SECONDS              the keys put last, in turns     -> the same
  check SIZE BATCH                    reads some calls' keys again    -> checked_bytes, or error
  clear                               removes the objects

Keys and lists of addresses are created before the clock starts. Standard library alone.
"""
import ctypes
import gc
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from array import array

LINE = 64
SHIFTS = 61  # each call begins some lines further on, so that its bytes differ from those of the call before
MARGIN = LINE * SHIFTS
CHECKED_BYTES = 512 << 20
MOST_SOURCE_BYTES = 128 << 20
libc = ctypes.CDLL(None)
libc.memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]


class Memory:
    """A range of memory by address, and as a view. Anonymous unless it exists already."""

    def __init__(self, size, addr=None):
        if addr is None:
            self.map = mmap.mmap(-1, size)
            self.map.madvise(mmap.MADV_HUGEPAGE)
            addr = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.addr, self.size = addr, size
        self.view = memoryview((ctypes.c_char * size).from_address(addr)).cast("B")
        ctypes.memset(addr, 1, size)

    def fill(self, index):
        """Fills the memory; every word identifies the client and its offset."""
        step = 8 << 20
        for at in range(0, self.size, step):
            size = min(step, self.size - at)
            words = array("Q", range((index << 40) + at, (index << 40) + at + size, 8))
            self.view[at : at + size] = memoryview(words).cast("B")


class Store:
    """One client. Subclasses implement put, get and remove; `slack` is space in `found` beside the values."""

    slack = 0

    def __init__(self, index, buffer_bytes):
        self.index, self.source_bytes = index, min(buffer_bytes, MOST_SOURCE_BYTES)
        self.source, self.found = self.memory(self.source_bytes + MARGIN), self.memory(buffer_bytes + self.slack)
        self.source.fill(index)
        self.keys, self.ready, self.calls = [], [], 0

    def memory(self, size):
        return Memory(size)

    def prepare(self, keys, size):
        """Prepares the arguments of a call beside addresses, before the clock starts."""
        return keys

    def places(self, size, batch, call):
        """Returns the offsets of a call's values in the source. Items beyond its end reuse it."""
        slots, shift = self.source_bytes // size, LINE * (call % SHIFTS)
        return [shift + (item % slots) * size for item in range(batch)]

    def place_found(self, size, item):
        """Returns the offset of a batch's item in `found`."""
        return item * size

    def run(self, words):
        if words[0] == "clear":
            for keys in self.keys:
                self.remove(keys)
            self.keys, self.ready = [], []
            return {}
        size, batch = int(words[1]), int(words[2])
        if words[0] == "check":
            return self.check(size, batch)
        seconds = float(words[3])
        sources = [self.prepare_places(self.places(size, batch, call), size) for call in range(SHIFTS)]
        if words[0] == "put":
            most, prefix = int(words[4]), f"{int(words[5]):04d}{self.index:02d}"
            self.keys = [[f"{prefix}{call:06d}{item:04d}" for item in range(batch)] for call in range(most)]
            self.ready = [self.prepare(keys, size) for keys in self.keys]
            answer = timed(lambda call: self.put(self.ready[call], sources[call % SHIFTS], size), most, seconds)
            self.calls = answer.get("calls", 0)
            self.keys, self.ready = self.keys[: self.calls], self.ready[: self.calls]
            return answer
        targets = self.prepare_found(size, batch)
        ready, calls = self.ready, self.calls
        return timed(lambda call: self.get(ready[call % calls], targets, size), 1 << 40, seconds)

    def check(self, size, batch):
        checked, targets = 0, self.prepare_found(size, batch)
        for call in range(0, self.calls, max(1, self.calls // 8)):
            ctypes.memset(self.found.addr, 0xEE, self.found.size)
            if self.get(self.ready[call], targets, size):
                return dict(error=f"call {call} cannot be read again")
            for item, at in enumerate(self.places(size, batch, call)):
                if libc.memcmp(self.found.addr + self.place_found(size, item), self.source.addr + at, size):
                    return dict(error=f"wrong bytes in item {item} of call {call}")
            checked += batch * size
            if checked >= CHECKED_BYTES:
                break
        return dict(checked_bytes=checked)


def timed(call, most, seconds):
    """Repeats a call until the time is over; `call` gets its number and returns a true value on failure."""
    clock, samples = time.perf_counter, []
    gc.disable()
    begin, start = time.time(), clock()
    before, end = start, start + seconds
    for number in range(most):
        if call(number):
            gc.enable()
            return dict(error=f"call {number} failed")
        after = clock()
        samples.append(after - before)
        before = after
        if after >= end:
            break
    finish = time.time()
    gc.enable()
    samples.sort()
    at = lambda share: round(samples[min(len(samples) - 1, int(share * len(samples)))] * 1e6, 2)
    return dict(calls=len(samples), begin=begin, end=finish, p50_us=at(0.5), p99_us=at(0.99), p999_us=at(0.999))


def say(**fields):
    print(json.dumps(fields), flush=True)


def serve_client(store):
    say(ready=True, pids=[os.getpid()])
    for line in sys.stdin:
        try:
            say(**store.run(line.split()))
        except Exception as problem:  # the benchmark decides what an error means
            say(error=repr(problem)[:200])
    os._exit(0)


def child(argv, log):
    """A server's process, which ends when this script does."""
    file = open(log, "wb")
    pid = os.getpid()

    def tie():
        libc.prctl(1, signal.SIGKILL)
        if os.getppid() != pid:
            os._exit(1)

    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=file, stderr=file, preexec_fn=tie)


def wait_for_port(port, patience=30):
    import socket

    end = time.time() + patience
    while time.time() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"nobody listens on port {port}")


def serve_until_parent_goes(children, version, said):
    say(ready=True, version=version, said=said, pids=[one.pid for one in children])
    sys.stdin.read()
    for one in children:
        one.kill()
    os._exit(0)
