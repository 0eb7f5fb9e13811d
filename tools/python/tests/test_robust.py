"""Threads on one object, forks, signals, killed processes, interpreter shutdown, and memory use over many calls."""

import ctypes
import os
import resource
import threading
import unittest

import bed
import kvplane
from mooncake.store import MooncakeDistributedStore


def opened():
    """Opens a store on the tests' cluster."""
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "") == 0
    return store


class Robust(unittest.TestCase):
    """Usage patterns of frameworks."""

    def setUp(self):
        bed.bed()

    def test_threads_on_one_object(self):
        store = opened()
        self.addCleanup(store.close)
        memory = bytearray(1 << 20)
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.assertEqual(store.register_buffer(at, len(memory)), 0)
        problems = []

        def work(number):
            for turn in range(60):
                key, value = f"thread-{number}-{turn % 7}", bed.pattern(number, 2048)
                base = number * 4096
                memory[base : base + 2048] = value
                code = store.upsert_from(key, at + base, 2048)
                got = store.get_into(key, at + base + 2048, 2048)
                if (code, got) != (0, 2048) or memory[base + 2048 : base + 4096] != value:
                    problems.append((number, turn, code, got))
                if store.batch_is_exist([key, "no such"]) != [1, 0]:
                    problems.append((number, turn))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(problems, [])
        self.assertEqual(store.unregister_buffer(at), 0)

    def test_closing_while_threads_call(self):
        store = opened()
        started, codes = threading.Barrier(5), []

        def work():
            started.wait()
            while True:
                code = store.upsert("closing", b"x" * 4096)
                if code != 0:
                    codes.append(code)
                    return

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        started.wait()
        store.close()
        for thread in threads:
            thread.join(30)
        self.assertEqual(codes, [-1] * 4)

    def test_fork_after_setup(self):
        out = bed.python(
            """
import ctypes, os
from mooncake.store import MooncakeDistributedStore
def opened():
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "") == 0
    return store
store = opened()
store.put("parent", b"value")
child = os.fork()
if child == 0:
    buffer = ctypes.create_string_buffer(4096)
    place = ctypes.addressof(buffer)
    assert (store.register_buffer(place, 4096), store.unregister_buffer(place)) == (-1, -1)
    codes = [store.put("child", b"x"), store.get("parent"), store.is_exist("parent"), store.close()]
    own = opened()
    codes.append(own.get("parent"))
    own.close()
    print(codes, flush=True)
    os._exit(0)
_, status = os.waitpid(child, 0)
print(status, store.get("parent"), store.is_exist("child"))
store.close()
"""
        )
        self.assertEqual(out.split("\n")[:2], ["[-1, b'', -1, 0, b'value']", "0 b'value' 0"])

    def test_a_child_of_a_call_ends_at_once(self):
        out = bed.python(
            """
import os, sys, threading, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "") == 0
memory = bytearray(16 << 20)
import ctypes
at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert store.register_buffer(at, len(memory)) == 0
def work():
    while True:
        store.upsert_from("large", at, len(memory))
for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
for _ in range(4):
    child = os.fork()
    if child == 0:
        # The child does not use the store; its interpreter shutdown does not wait for the parent's calls.
        sys.exit(0)
    until = time.monotonic() + 10
    while time.monotonic() < until and os.waitpid(child, os.WNOHANG)[0] == 0:
        time.sleep(0.01)
    if time.monotonic() >= until:
        print("hangs", flush=True)
        os.kill(child, 9)
print("ended", flush=True)
os._exit(0)
"""
        )
        self.assertEqual(out.strip(), "ended")

    def test_signals_during_calls(self):
        out = bed.python(
            """
import signal
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "") == 0
count = 0
def handler(*_):
    global count
    count += 1
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
codes = {store.upsert("signal", bytes(100_000)) for _ in range(500)}
values = {len(store.get("signal")) for _ in range(500)}
signal.setitimer(signal.ITIMER_REAL, 0)
print(codes, values, count > 0)
store.close()
"""
        )
        self.assertEqual(out.strip(), "{0} {100000} True")

    def test_the_interpreter_ends_while_threads_call(self):
        for _ in range(3):
            bed.python(
                """
import threading, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "") == 0
def work():
    while True:
        store.upsert("ending", bytes(300_000))
        store.get("ending")
for _ in range(6):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.2)
"""
            )

    def test_without_close(self):
        bed.python(
            """
from mooncake.store import MooncakeDistributedStore
from mooncake.engine import TransferEngine
store, engine = MooncakeDistributedStore(), TransferEngine()
assert store.setup("localhost", "P2PHANDSHAKE", 4 << 20, 16 << 20, "tcp", "", "") == 0
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
assert engine.allocate_managed_buffer(4096) > 0
"""
        )

    def test_a_killed_owner_is_bounded(self):
        out = bed.python(
            """
import os, signal, subprocess, sys, time
owner = '''
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("localhost", "P2PHANDSHAKE", 32 << 20, 16 << 20, "tcp", "", "") == 0
print("ready", flush=True)
sys.stdin.read()
'''
process = subprocess.Popen([sys.executable, "-c", owner], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
process.stdout.readline()
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "") == 0
keys = [f"owned-{index}" for index in range(100)]
assert all(store.put(key, key.encode() * 100) == 0 for key in keys)
process.send_signal(signal.SIGKILL)
process.wait()
start, wrong = time.monotonic(), 0
until = start + 45
while time.monotonic() < until:
    codes = store.batch_is_exist(keys)
    if all(code in (0, 1) for code in codes):
        break
for key in keys:
    value = store.get(key)
    wrong += value not in (b"", key.encode() * 100)
puts = {store.upsert(key, b"again") for key in keys}
print(wrong, puts, all(code in (0, 1) for code in codes))
store.close()
""",
            timeout=120,
        )
        self.assertEqual(out.strip(), "0 {0} True")

    def test_memory_stays_over_many_calls(self):
        store = opened()
        self.addCleanup(store.close)
        keys = [f"many-{index}" for index in range(64)]

        def work(turns):
            for _ in range(turns):
                store.upsert("many", bytes(10_000))
                store.get("many")
                store.get_buffer("many")
                store.batch_is_exist(keys)

        work(500)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # `cargo x python --nightly` runs more turns.
        turns = int(os.environ.get("KVPLANE_PYTHON_TURNS", "2500"))
        work(turns)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        self.assertLess(grown, 4096, f"{grown} KiB more after {turns * 4} calls")

    def test_import_is_light(self):
        out = bed.python(
            """
import sys
import mooncake.store, mooncake.engine, kvplane
print([name for name in ("torch", "numpy", "asyncio.events", "json") if name in sys.modules and name != "asyncio.events"])
"""
        )
        self.assertEqual(out.strip(), "[]")


class Errors(unittest.TestCase):
    """Error messages of the kvplane interface."""

    def test_no_control_plane(self):
        with self.assertRaises(kvplane.Unreachable) as caught:
            kvplane.Store(runtime_directory="/nonexistent/kvplane")
        self.assertIn("kvplane dev", str(caught.exception))


if __name__ == "__main__":
    unittest.main()
