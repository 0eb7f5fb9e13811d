"""Common parts of the peers' drivers: memory, a timed loop, and the protocol with `kvplane-bench peers`.

A driver reports that it is ready with one JSON line, then answers each line `OP SIZE BATCH SECONDS` (OP: write or read) with one
JSON line: calls, secs, p50_us, p99_us, or error. It ends with its standard input. Standard library alone.
"""
import ctypes
import json
import mmap
import os
import subprocess
import sys
import time

GAP = 64  # bytes between blocks, so that no engine can merge them


class Region:
    """Anonymous memory, every page touched."""

    def __init__(self, size):
        self.size = size
        self.map = mmap.mmap(-1, size)
        self.map.madvise(mmap.MADV_HUGEPAGE)
        self.addr = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        ctypes.memset(self.addr, 1, size)

    def blocks(self, size, count):
        return [self.addr + i * (size + GAP) for i in range(count)]


def spread(base, size, count):
    return [base + i * (size + GAP) for i in range(count)]


def say(**fields):
    print(json.dumps(fields), flush=True)


def timed(call, seconds, least=3, most=400_000):
    """Repeats a call for about `seconds` after a warm-up; `call` returns a true value on failure."""
    clock = time.perf_counter
    start = clock()
    for _ in range(2000):
        if call():
            return dict(error="a call failed while warming up")
        if clock() - start > seconds / 3:
            break
    samples = []
    start = clock()
    end = start + seconds
    while True:
        before = clock()
        if call():
            return dict(error=f"call {len(samples)} failed")
        after = clock()
        samples.append(after - before)
        if (after >= end and len(samples) >= least) or len(samples) >= most:
            break
    return summary(samples, clock() - start)


def summary(samples, seconds):
    samples.sort()
    at = lambda share: round(samples[min(len(samples) - 1, int(share * len(samples)))] * 1e6, 2)
    return dict(calls=len(samples), secs=seconds, p50_us=at(0.50), p99_us=at(0.99))


def serve(measure, version, pids):
    """Answers commands until standard input ends."""
    say(ready=True, version=version, pids=pids)
    for line in sys.stdin:
        try:
            op, size, batch, seconds = line.split()
            say(**measure(op, int(size), int(batch), float(seconds)))
        except Exception as problem:  # the benchmark decides what an error means
            say(error=repr(problem)[:200])


def other_side(*extra):
    """Starts this script again as the target; returns the process, and its first JSON line."""
    words = [sys.executable, os.path.abspath(sys.argv[0]), "--target", *sys.argv[1:], *extra]
    child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for line in child.stdout:
        if line.startswith("{"):
            return child, json.loads(line)
    raise SystemExit("the target ended before it was ready")


def wait_for_parent():
    sys.stdin.read()
    os._exit(0)
