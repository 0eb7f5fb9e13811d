"""Signals during calls: handlers run while a call waits; one that raises ends the call with nothing in flight."""

import unittest

import bed

HEAD = """
import ctypes, os, signal, subprocess, sys, threading, time
import bed
from kvplane import _native
LONG = 3600

class Alarm:
    '''Runs a handler every 50 ms.'''
    def __init__(self, handler):
        signal.signal(signal.SIGALRM, handler)
    def __enter__(self):
        signal.setitimer(signal.ITIMER_REAL, 0.3, 0.05)
    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)

def raises(*_):
    # Only once: the cleanup of the call may wait for a moment, too.
    signal.setitimer(signal.ITIMER_REAL, 0)
    raise KeyboardInterrupt

def interrupted(call):
    '''Whether a call that would wait for an hour ends with Ctrl-C.'''
    try:
        with Alarm(raises):
            call()
    except KeyboardInterrupt:
        return True
    return False

def after(times, act, call):
    '''What a call returns during which handlers run and return; `act` is what the last of them does.'''
    runs = 0
    def handler(*_):
        nonlocal runs
        runs += 1
        if runs == times:
            act()
    with Alarm(handler):
        result = call()
    assert runs >= times, runs
    return result

class Stopped:
    '''A process that does not answer for a while.'''
    def __init__(self, process):
        self.process = process
    def go_on(self):
        self.process.send_signal(signal.SIGCONT)
    def __enter__(self):
        self.process.send_signal(signal.SIGSTOP)
        _, status = os.waitpid(self.process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), status
        return self
    def __exit__(self, *_):
        self.go_on()
"""

STORE = (
    HEAD
    + """
own = bed.Bed(memory="64m", cluster="stopped")
store = _native.Store(deadline=LONG, shared_memory=sys.argv[1] == "shm")
memory = bytearray(1 << 20)
at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert store.register(at, len(memory)) == 0
value = bed.pattern(1, len(memory))
assert store.put("there", value) == 0
"""
)

PEER = """
import ctypes, sys
from kvplane import _native
engine = _native.Engine("127.0.0.1", "P2PHANDSHAKE", False)
memory = bytearray(b"\\x07" * (8 << 20))
at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert engine.register([at], [len(memory)], "*") == 0
print(engine.address(), at, flush=True)
sys.stdin.read()
"""

ENGINE = (
    HEAD
    + """
os.environ["MC_TRANSFER_TIMEOUT"] = str(LONG)
peer = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
name, there = peer.stdout.readline().split()
there, size = int(there), 8 << 20
engine = _native.Engine("127.0.0.1", "P2PHANDSHAKE", False)
memory = bytearray(size)
at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert engine.register([at], [size], "*") == 0
assert engine.transfer(name, False, [at], [there], [size]) == 0
read = lambda: engine.transfer(name, False, [at], [there], [size])
"""
)


class Signals(unittest.TestCase):
    def setUp(self):
        bed.bed()

    def store(self, script, *arguments):
        return bed.python(STORE + script + "\nstore.close()\nown.close()\n", *arguments).split("\n")

    def engine(self, script):
        return bed.python(ENGINE + script + "\npeer.kill()\npeer.wait()\n", PEER).split("\n")

    def test_puts_and_gets(self):
        for way in ("shm", "tcp"):
            with self.subTest(way):
                out = self.store(
                    """
calls = [lambda: store.get("there"), lambda: store.put("new", value), lambda: store.put("short", b"x"),
    lambda: store.get_into(["there"], [at], [len(memory)]), lambda: store.put_from(["new"], [at], [len(memory)]),
    lambda: store.get_many(["there", "there"]), lambda: store.put_many(["a", "b"], [value, b"x"]),
    lambda: store.receive("there", memory), lambda: store.exists(["there"]), lambda: store.sizes(["there"]),
    lambda: store.remove(["no such"]), lambda: store.check(), lambda: store.remove_matching("no such"),
    lambda: store.get_ranges(["there"], [0], [5], [at], [100]), lambda: store.begin(["session"], [100])]
with Stopped(own.process):
    print([interrupted(call) for call in calls])
    memory[:] = bytes(len(memory))
# No cancelled transfer arrives later, and the object is still usable.
print([store.get("there") == value for _ in range(20)] == [True] * 20, not any(memory), store.put("again", value))
""",
                    way,
                )
                self.assertEqual(out[:2], [str([True] * 15), "True True 0"])

    def test_a_handler_that_returns_lets_a_call_go_on(self):
        out = self.store(
            """
with Stopped(own.process) as stopped:
    print(after(5, stopped.go_on, lambda: store.get("there")) == value)
with Stopped(own.process) as stopped:
    print(after(5, stopped.go_on, lambda: store.put_from(["more"], [at], [len(memory)])))
""",
            "tcp",
        )
        self.assertEqual(out[:2], ["True", "[0]"])

    def test_a_handler_may_call_and_close(self):
        out = self.store(
            """
other = bed.Bed(memory="16m", cluster="other")
second = _native.Store(cluster="other")
assert second.put("second", b"here") == 0
seen = []
def inner():
    # A call made by the handler is ended by a signal, too; the outer call is not.
    seen.append(second.get("second"))
    stopped.go_on()
    seen.append(len(store.get("there")))
os.environ["XDG_RUNTIME_DIR"] = own.directory.name
with Stopped(own.process) as stopped:
    print(after(3, inner, lambda: store.get("there")) == value, seen)
def closes(*_):
    store.close()
    raises()
signal.signal(signal.SIGALRM, closes)
with Stopped(own.process) as stopped:
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        print(store.get("there"))
    except KeyboardInterrupt:
        print("closed", store.get("there"))
second.close()
other.close()
""",
            "shm",
        )
        self.assertEqual(out[:2], [f"True [b'here', {1 << 20}]", "closed -1"])

    def test_other_threads_go_on(self):
        out = self.store(
            """
got = []
thread = threading.Thread(target=lambda: got.append(store.get("there") == value))
with Stopped(own.process) as stopped:
    thread.start()
    print(interrupted(lambda: store.get("there")))
thread.join()
print(got)
""",
            "tcp",
        )
        self.assertEqual(out[:2], ["True", "[True]"])

    def test_transfers(self):
        out = self.engine(
            """
with Stopped(peer) as stopped:
    number = engine.submit(name, False, [at], [there], [size])
    calls = [read, lambda: engine.transfer(name, True, [at], [there], [size]), lambda: engine.wait([number])]
    print([interrupted(call) for call in calls])
    memory[:] = bytes(size)
print(read(), memory == b"\\x07" * size or any(memory), engine.status(number) == _native.NO_BATCH)
with Stopped(peer) as stopped:
    print(after(5, stopped.go_on, read))
"""
        )
        self.assertEqual(out[:3], ["[True, True, True]", "0 True True", "0"])

    def test_nothing_arrives_after_a_transfer_was_interrupted(self):
        out = self.engine(
            """
for _ in range(5):
    with Stopped(peer):
        assert interrupted(read), "the call ended by itself"
        memory[:] = bytes(size)
    time.sleep(0.1)
    assert not any(memory), "bytes arrived later"
print(read(), memory == b"\\x07" * size)
"""
        )
        self.assertEqual(out[0], "0 True")

    def test_an_engine_that_does_not_answer(self):
        out = self.engine(
            """
import socket
silent = socket.create_server(("127.0.0.1", 0))
quiet = "127.0.0.1:%d" % silent.getsockname()[1]
handlers = 0
def count():
    global handlers
    handlers += 1
# A handshake has its own deadline, so the count of handler runs is all that can be observed.
print(after(3, count, lambda: engine.probe(quiet)) < 0, interrupted(lambda: engine.probe(quiet)), handlers)
print(interrupted(lambda: engine.transfer(quiet, True, [at], [there], [16])), read())
"""
        )
        self.assertEqual(out[:2], ["True True 1", "True 0"])

    def test_setup_without_an_answer(self):
        out = bed.python(
            HEAD
            + """
from mooncake.store import MooncakeDistributedStore
own = bed.Bed(memory="16m", cluster="stopped")
setup = lambda: MooncakeDistributedStore().setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", own.control)
handlers = []
with Stopped(own.process):
    print(after(5, lambda: handlers.append(1), setup), interrupted(setup), interrupted(_native.Objects))
print(handlers, setup())
own.close()
"""
        )
        self.assertEqual(out.strip().split("\n")[-2:], ["-900 True True", "[1] 0"])

    def test_objects_of_peers(self):
        out = bed.python(
            HEAD
            + """
from kvplane.p2p import ObjectStore
source = subprocess.Popen([sys.executable, "-c", '''
import sys
from kvplane.p2p import ObjectStore
store = ObjectStore(shared_memory=False)
store.register("signals", [bytearray(b"v" * (16 << 20))], shard_bytes=1 << 20)
print("ready", flush=True)
sys.stdin.read()
'''], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
assert source.stdout.readline() == "ready\\n"
ours = bytearray(16 << 20)
with ObjectStore(shared_memory=False) as store:
    with Stopped(source) as stopped:
        print(interrupted(lambda: store.get_replica("signals", [ours], deadline=LONG)))
        ours[:] = bytes(len(ours))
    time.sleep(0.1)
    print(any(ours), store.get_replica("signals", [ours]), ours == b"v" * len(ours))
source.kill()
source.wait()
"""
        )
        self.assertEqual(out.strip().split("\n"), ["True", f"False {16 << 20} True"])

    def test_a_scheduler_that_waits(self):
        out = bed.python(
            HEAD
            + """
from kvplane import Scheduler
own = bed.Bed(memory="16m", cluster="conductor", more=["--conductor", "--shards", "1"])
with Scheduler(cluster="conductor") as scheduler:
    print(interrupted(lambda: [None for _ in scheduler.watch()]))
line = _native.Scheduler(cluster="conductor")
print(interrupted(lambda: line.table_after(1 << 40, LONG)))
line.close()
own.close()
"""
        )
        self.assertEqual(out.strip().split("\n"), ["True", "True"])


if __name__ == "__main__":
    unittest.main()
