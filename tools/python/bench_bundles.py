"""Benchmarks bundles against puts and gets of the same bytes from and into registered memory, in turns in one run.

    PYTHONPATH=target/python-stage python bench_bundles.py BINARY [--mib 1024] [--members 1000] [--rounds 9]

`BINARY` is the program `kvplane`, which provides the cluster. Each round puts and reads one bundle, and as many objects
by `batch_put_from` and `batch_get_into`. Prints medians, and the medians of the rounds' ratios with their range. A
bundle is read into registered memory of the caller, as `batch_get_into` reads, and once more into memory of its own,
which the kernel has to provide.
"""

import argparse
import os
import subprocess
import tempfile
import time


def timed(call):
    """Returns the duration of a call in seconds, and its result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def measure(store, transfer, memory, size, count, turn):
    """Measures one round; the order alternates. Returns seconds by name."""
    import numpy

    at, half = memory.ctypes.data, size * count
    arrays = {f"m{index}": numpy.array(memory[index * size : (index + 1) * size]) for index in range(count)}
    into = {name: memory[half + index * size : half + (index + 1) * size] for index, name in enumerate(arrays)}
    keys = [f"plain/{turn}/{index}" for index in range(count)]
    places, targets = ([base + index * size for index in range(count)] for base in (at, at + half))
    times = {}

    def plain():
        times["batch_put_from"], codes = timed(lambda: store.batch_put_from(keys, places, [size] * count))
        assert codes == [0] * count, codes[:4]
        memory[half:] = 0
        times["batch_get_into"], codes = timed(lambda: store.batch_get_into(keys, targets, [size] * count))
        assert codes == [size] * count, codes[:4]
        assert (memory[:half] == memory[half:]).all()
        store.batch_remove(keys)

    def bundle():
        times["export"], ref = timed(lambda: transfer.put_object(arrays))
        memory[half:] = 0
        handle = {"manifest_key": ref.manifest_key}
        times["import"], _ = timed(lambda: transfer.materialize_into(transfer.read_spec(handle), into))
        assert (memory[:half] == memory[half:]).all()
        times["import, own memory"], result = timed(lambda: transfer.get_object(handle))
        assert all((result[name] == array).all() for name, array in arrays.items())
        transfer.remove_bundle(ref)

    for part in (plain, bundle) if turn % 2 else (bundle, plain):
        part()
    return times


def main():
    """Command line entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--members", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvplane-bundles-") as directory:
        os.environ["XDG_RUNTIME_DIR"] = directory
        pool = f"{arguments.mib * 2 + 256}m"
        command = [arguments.binary, "dev", "--pool", pool, "--end-with-stdin"]
        node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            while not node.stdout.readline().startswith("ready"):
                if node.poll() is not None:
                    raise SystemExit(f"kvplane dev ended with {node.returncode}")
            run(arguments)
        finally:
            node.stdin.close()
            node.wait()


def run(arguments):
    """Measures all rounds and prints a table."""
    import numpy
    from mooncake.store import MooncakeDistributedStore
    from mooncake.structured_object_store import MooncakeBundleTransfer

    size, count = (arguments.mib << 20) // arguments.members, arguments.members
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "") == 0
    transfer = MooncakeBundleTransfer(store, "bench")
    memory = numpy.zeros(2 * size * count, numpy.uint8)
    memory[: size * count] = numpy.random.default_rng(1).integers(0, 256, size * count, dtype=numpy.uint8)
    assert store.register_buffer(memory.ctypes.data, memory.nbytes) == 0
    # The first round touches the pool's memory.
    rounds = [measure(store, transfer, memory, size, count, turn) for turn in range(arguments.rounds + 1)][1:]
    middle = lambda values: sorted(values)[len(values) // 2]
    print(f"{count} members of {size} bytes, {arguments.rounds} rounds")
    print("| call | GB/s | beside | ratio |\n|---|---|---|---|")
    for name, other in (
        ("export", "batch_put_from"),
        ("import", "batch_get_into"),
        ("import, own memory", "batch_get_into"),
    ):
        speed = size * count / middle([one[name] for one in rounds]) / 1e9
        there = size * count / middle([one[other] for one in rounds]) / 1e9
        ratios = [one[other] / one[name] for one in rounds]
        spread = f"{middle(ratios):.2f} ({min(ratios):.2f} .. {max(ratios):.2f})"
        print(f"| {name} | {speed:.2f} | {other}: {there:.2f} | {spread} |")


if __name__ == "__main__":
    main()
