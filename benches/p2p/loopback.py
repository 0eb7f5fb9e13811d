"""P2P store on loopback, beside the transfer engine's own reads of the same size: the cost of the catalog, the shards and
their hashes without a slow link.

    PYTHONPATH=target/python-stage python3 benches/p2p/loopback.py [--mib 512] [--rounds 7] target/release/kvplane

`cargo x python` packs target/python-stage, of an optimised build. One process serves the bytes; this one reads them with
the engine, in one request for each shard, and fetches them with the store, in turns, into memory that was touched before.
All bytes are compared.
"""

import argparse
import array
import statistics
import subprocess
import sys
import tempfile
import time

from kvplane import TransferEngine
from kvplane.p2p import ObjectStore

NAME = "bench/loopback"


def pattern(size):
    """Fills a buffer whose words identify their location."""
    return array.array("Q", (at * 0x9E3779B97F4A7C15 & (1 << 64) - 1 for at in range(size // 8)))


def line(process):
    text = process.stdout.readline()
    if not text:
        sys.exit("a process ended")
    return text.strip()


def origin(directory, size, shard):
    data = pattern(size)
    with TransferEngine() as engine, ObjectStore(runtime_directory=directory, cluster="dev") as store:
        address, _ = engine.register(data)
        store.register(NAME, [memoryview(data)], shard_bytes=shard)
        print(engine.name, address, flush=True)
        sys.stdin.readline()


def measure(options, directory):
    size, shard = options.mib << 20, options.shard_mib << 20
    words = [sys.executable, __file__, "--mib", str(options.mib), "--shard-mib", str(options.shard_mib)]
    words += ["--origin", directory, options.program]
    source = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        peer, theirs = line(source).split()
        expected = memoryview(pattern(size)).cast("B")
        by_engine, by_store = bytearray(size), bytearray(size)
        engines, stores = [], []
        with TransferEngine() as engine, ObjectStore(runtime_directory=directory, cluster="dev") as store:
            ours, _ = engine.register(by_engine)
            places = range(0, size, shard)
            sizes = [min(shard, size - at) for at in places]
            for _ in range(options.rounds):
                start = time.perf_counter()
                engine.read(peer, [ours + at for at in places], [int(theirs) + at for at in places], sizes)
                engines.append(size / (time.perf_counter() - start) / 1e9)
                start = time.perf_counter()
                store.get_replica(NAME, [by_store])
                stores.append(size / (time.perf_counter() - start) / 1e9)
                store.delete_replica(NAME)
                if memoryview(by_engine) != expected or memoryview(by_store) != expected:
                    sys.exit("wrong bytes")
                by_store[:] = bytes(size)
        ratios = [ours / theirs for ours, theirs in zip(stores, engines)]
        show = lambda all: f"{statistics.median(all):.2f} ({min(all):.2f} .. {max(all):.2f})"
        print(f"{options.mib} MiB in shards of {options.shard_mib} MiB, {options.rounds} rounds")
        print(f"  transfer engine  {show(engines)} GB/s")
        print(f"  P2P store        {show(stores)} GB/s")
        print(f"  store / engine   {show(ratios)}  wanted: at least 0.9")
    finally:
        source.terminate()
        source.wait()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--shard-mib", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--origin", help=argparse.SUPPRESS)
    parser.add_argument("program")
    options = parser.parse_args()
    if options.origin:
        origin(options.origin, options.mib << 20, options.shard_mib << 20)
        return
    with tempfile.TemporaryDirectory() as directory:
        words = [options.program, "dev", "--pool", "16M", "--runtime-directory", directory]
        plane = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            while not line(plane).startswith("ready:"):
                pass
            measure(options, directory)
        finally:
            plane.terminate()
            plane.wait()


if __name__ == "__main__":
    main()
