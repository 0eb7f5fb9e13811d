"""Benchmarks the calls of inference engines on our wheel and on Mooncake's, alternating within one run.

    python bench.py --ours PYTHON --stock PYTHON [--rounds 3]

`PYTHON` are interpreters that import `mooncake`: ours from our wheels, the other from the original's. Each side has a
cluster of its own of two processes: one that has the memory, one that calls. Objects are compared byte for byte.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

STORE_CALLS = ("put 4K", "get 4K", "exist x1024", "put_batch 4K x512",
               "get_batch 4K x512", "put_from 64K x128", "get_into 64K x128", "put_from 1M x64",
               "get_into 1M x64", "put_multi 64K x128", "get_multi 64K x128", "put_multi 1M x64", "get_multi 1M x64")
ENGINE_CALLS = ("write 4K x1024", "read 4K x1024", "write 64M", "read 64M", "batch write 64M", "batch read 64M")
#: The same with shared memory disabled on our side; Mooncake can only use TCP here.
OVER_TCP = {name: f"{name}, TCP" for name in ENGINE_CALLS}


def pattern(numpy, size, seed):
    """Random bytes from a seed."""
    return numpy.random.default_rng(seed).integers(0, 256, size, dtype=numpy.uint8)


def timed(call, most=12, longest=1.5):
    """The median time of a call, in seconds."""
    times, until = [], time.perf_counter() + longest
    while len(times) < 3 or (len(times) < most and time.perf_counter() < until):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


def store_side(master):
    """Runs the store's calls and returns their times."""
    import numpy
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 256 << 20, "tcp", "", master) == 0
    size = 64 << 20
    memory = numpy.concatenate([pattern(numpy, size, 1), numpy.zeros(size, numpy.uint8)])
    at = memory.ctypes.data
    assert store.register_buffer(at, memory.nbytes) == 0
    results, value = {}, memory[:4096].tobytes()
    for name, turns, call in (
        ("put 4K", 200, lambda turn: store.put(f"small-{turn}", value)),
        ("get 4K", 200, lambda turn: store.get(f"small-{turn}")),
    ):
        call(turns)  # connects
        results[name] = timed(lambda turns=iter(range(turns)): call(next(turns)), most=turns)
    assert store.get("small-1") == value
    keys = [f"small-{index % 300}" for index in range(1024)]
    singly = {key: store.is_exist(key) for key in set(keys)}
    assert store.batch_is_exist(keys) == [singly[key] for key in keys]
    results["exist x1024"] = timed(lambda: store.batch_is_exist(keys), most=200)
    some, values = [f"many-{index}" for index in range(512)], [value] * 512
    times = []
    for turn in range(5):
        start = time.perf_counter()
        assert store.put_batch([f"{key}-{turn}" for key in some], values) == 0
        times.append(time.perf_counter() - start)
    results["put_batch 4K x512"] = sorted(times)[2]
    assert store.get_batch([f"{key}-0" for key in some]) == values
    results["get_batch 4K x512"] = timed(lambda: store.get_batch([f"{key}-0" for key in some]))
    for label, block, count in (("64K x128", 65536, 128), ("1M x64", 1 << 20, 64)):
        places = [at + index * block for index in range(count)]
        into = [at + size + index * block for index in range(count)]
        for kind in ("from", "multi"):
            written, turn = [], 0
            names = lambda number: [f"{kind}-{label}-{number}-{index}" for index in range(count)]
            for turn in range(4):
                some, half = names(turn), block // 2
                start = time.perf_counter()
                if kind == "from":
                    codes = store.batch_put_from(some, places, [block] * count)
                else:
                    pieces = [[place, place + half] for place in places]
                    codes = store.batch_put_from_multi_buffers(some, pieces, [[half, half]] * count)
                written.append(time.perf_counter() - start)
                assert codes == [0] * count, codes[:4]
                store.remove_by_regex(f"^{kind}-{label}-{turn - 1}-") if turn > 0 else None
            results[f"put_{kind} {label}"] = sorted(written[1:])[1]
            memory[size:] = 0
            if kind == "from":
                get = lambda: store.batch_get_into(some, into, [block] * count)
                name = f"get_into {label}"
            else:
                pieces = [[place, place + half] for place in into]
                get = lambda: store.batch_get_into_multi_buffers(some, pieces, [[half, half]] * count)
                name = f"get_multi {label}"
            assert get() == [block] * count
            assert (memory[size : size + block * count] == memory[: block * count]).all(), name
            results[name] = timed(get)
            time.sleep(0.1)
            store.remove_all(True)
    print(json.dumps(results), flush=True)
    os._exit(0)


def owner_side(master):
    """Provides memory to the cluster and registers memory with an engine, until end of standard input."""
    import numpy
    from mooncake.engine import TransferEngine

    if master:
        from mooncake.store import MooncakeDistributedStore

        store = MooncakeDistributedStore()
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 1 << 30, 16 << 20, "tcp", "", master) == 0
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    memory = numpy.zeros(64 << 20, numpy.uint8)
    assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
    print(engine.get_rpc_port(), memory.ctypes.data, flush=True)
    sys.stdin.read()
    os._exit(0)


def engine_side(peer, there, way):
    """Runs the transfer engine's calls and returns their times."""
    import numpy
    from mooncake.engine import TransferEngine

    if way == "tcp":
        import functools

        from kvplane import _native

        _native.Engine = functools.partial(_native.Engine, shared_memory=False)
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    size = 64 << 20
    memory = numpy.concatenate([pattern(numpy, size, 2), numpy.zeros(size, numpy.uint8)])
    at = memory.ctypes.data
    assert engine.register_memory(at, memory.nbytes) == 0
    ours, theirs = [at + index * 4096 for index in range(1024)], [there + index * 4096 for index in range(1024)]
    into = [address + size for address in ours]
    results = {}
    calls = {
        "write 4K x1024": lambda: engine.batch_transfer_sync_write(peer, ours, theirs, [4096] * 1024),
        "read 4K x1024": lambda: engine.batch_transfer_sync_read(peer, into, theirs, [4096] * 1024),
        "write 64M": lambda: engine.transfer_sync_write(peer, at, there, size),
        "read 64M": lambda: engine.transfer_sync_read(peer, at + size, there, size),
        "batch write 64M": lambda: engine.batch_transfer_sync_write(peer, [at], [there], [size]),
        "batch read 64M": lambda: engine.batch_transfer_sync_read(peer, [at + size], [there], [size]),
    }
    for name, call in calls.items():
        assert call() == 0, name
        results[name] = timed(call)
    assert (memory[:size] == memory[size:]).all()
    print(json.dumps(results), flush=True)
    os._exit(0)


class Side:
    """Processes of one wheel."""

    def __init__(self, name, python, environment):
        self.name, self.python = name, python
        self.environment = dict(os.environ, **environment)
        self.directory = tempfile.TemporaryDirectory()
        self.environment["XDG_RUNTIME_DIR"] = self.environment["XDG_STATE_HOME"] = self.directory.name
        self.children = []

    def start(self, *words, **keywords):
        """Starts a process that exits when its standard input closes."""
        child = subprocess.Popen(words, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                 stderr=subprocess.DEVNULL, **keywords)
        self.children.append(child)
        return child

    def run(self, *words):
        """Runs one measurement."""
        command = [self.python, __file__, *map(str, words)]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{self.name}: {done.stdout}\n{done.stderr}")
        return json.loads(done.stdout.strip().splitlines()[-1])

    def close(self):
        """Stops the processes."""
        for child in reversed(self.children):
            child.kill()
            child.wait()
        self.children = []


def measure(side, port):
    """Measures all calls of one side once."""
    bin_ = os.path.dirname(side.python)
    side.start(os.path.join(bin_, "mooncake_master"), "--port", str(port), "--metrics_port", str(port + 1))
    time.sleep(2)
    master = f"127.0.0.1:{port}"
    owner = side.start(side.python, __file__, "owner", master)
    line = owner.stdout.readline().split()
    results = side.run("store", master)
    peer = f"127.0.0.1:{line[0]}"
    results.update(side.run("engine", peer, line[1], "any"))
    # Measured in the same run, because the load of the machine changes between runs.
    over_tcp = side.run("engine", peer, line[1], "tcp" if side.name == "ours" else "any")
    results.update({OVER_TCP[name]: taken for name, taken in over_tcp.items()})
    side.close()
    return results


def main():
    """Measures both sides alternately and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", required=True)
    parser.add_argument("--stock", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    sides = [Side("ours", arguments.ours, {}), Side("stock", arguments.stock, {"MC_FORCE_TCP": "1"})]
    times = {side.name: {} for side in sides}
    for turn in range(arguments.rounds):
        for number, side in enumerate(sides):
            for name, taken in measure(side, 51000 + 10 * (2 * turn + number)).items():
                times[side.name].setdefault(name, []).append(taken)
    print("| call | ours | stock 0.3.13 | ratio |\n|---|---|---|---|")
    for name in (*STORE_CALLS, *ENGINE_CALLS, *OVER_TCP.values()):
        ours, stock = (sorted(times[side][name])[len(times[side][name]) // 2] * 1e6 for side in ("ours", "stock"))
        print(f"| {name} | {ours:.0f} us | {stock:.0f} us | {stock / ours:.1f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["store"]:
        store_side(sys.argv[2])
    elif sys.argv[1:2] == ["owner"]:
        owner_side(sys.argv[2])
    elif sys.argv[1:2] == ["engine"]:
        engine_side(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        main()
