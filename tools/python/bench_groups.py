"""Measures collectives of process groups beside those of torch's gloo, alternating within one run.

    python bench_groups.py --control HOST:PORT [--ranks 2 4 8] [--rounds 3] [--json FILE]

Run it by an interpreter that imports `kvplane`, and `torch` for gloo; without torch only our side runs. Each number of
ranks has its own processes, which hold a group of either kind. A round runs some all_reduces (f32, sum) of each size on
one side, then on the other one; the figure is the median over the rounds of the median time of a call on rank 0. Sums
are compared with what they have to be.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
#: Seconds that a side runs a size in a round, at most, and calls at least and at most.
LONGEST_S, FEWEST, MOST = 0.6, 3, 300


def has_torch():
    """True if gloo can be measured."""
    try:
        import torch.distributed

        return torch.distributed.is_gloo_available()
    except ImportError:
        return False


class Ours:
    """Our group."""

    name = "kvplane"

    def __init__(self, rank, ranks, control, _store):
        from kvplane.group import World

        self.world = World(f"bench-{ranks}-{os.environ['BENCH_RUN']}", rank, control)
        self.group = self.world.group("all", range(ranks))

    def all_reduce(self, array):
        self.group.all_reduce(array).wait()

    def close(self):
        self.world.close()


class Gloo:
    """Gloo, as torch has it."""

    name = "gloo"

    def __init__(self, rank, ranks, _control, store):
        import torch.distributed as dist

        self.dist = dist
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)

    def all_reduce(self, array):
        import torch

        self.dist.all_reduce(torch.from_numpy(array))

    def close(self):
        self.dist.destroy_process_group()


def measure(side, array, calls, rank, ranks):
    """Median time of a call."""
    times = []
    for _ in range(calls):
        array[:] = rank + 1
        start = time.perf_counter()
        side.all_reduce(array)
        times.append(time.perf_counter() - start)
        expected = ranks * (ranks + 1) / 2
        if array[0] != expected or array[-1] != expected:
            raise SystemExit(f"{side.name}: {array[0]} and {array[-1]} instead of {expected}")
    return statistics.median(times)


def rank_side(arguments):
    """One rank."""
    import numpy

    rank, ranks = arguments.rank, arguments.ranks[0]
    kinds = [Ours, Gloo] if has_torch() else [Ours]
    sides = [kind(rank, ranks, arguments.control, arguments.store) for kind in kinds]
    found = []
    for size in arguments.sizes:
        array = numpy.zeros(size // 4, numpy.float32)
        calls = {}
        for side in sides:
            # All ranks run as many calls: rank 0 says how many, by a call of its own.
            once = measure(side, array, FEWEST, rank, ranks)
            number = numpy.zeros(1, numpy.float32)
            number[0] = min(MOST, max(FEWEST, LONGEST_S / once)) if rank == 0 else 0
            side.all_reduce(number)
            calls[side.name] = int(number[0])
        medians = {side.name: [] for side in sides}
        for _ in range(arguments.rounds):
            for side in sides:
                medians[side.name].append(measure(side, array, calls[side.name], rank, ranks))
        found.append({"ranks": ranks, "bytes": size, **{name: statistics.median(of) for name, of in medians.items()}})
    for side in sides:
        side.close()
    if rank == 0:
        print(json.dumps(found), flush=True)


def main():
    """Runs the ranks, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--control", help="address of the control plane; by default, that of this user")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        rank_side(arguments)
        return
    found = []
    run = os.environ.setdefault("BENCH_RUN", str(os.getpid()))
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, "--ranks", str(ranks), "--rounds", str(arguments.rounds)]
            command += ["--store", os.path.join(folder, "store"), "--sizes", *map(str, arguments.sizes)]
            command += ["--control", arguments.control] if arguments.control else []
            processes = [
                subprocess.Popen([*command, "--rank", str(rank)], stdout=subprocess.PIPE, text=True)
                for rank in range(ranks)
            ]
            try:
                output, _ = processes[0].communicate(timeout=600)
                for process in processes[1:]:
                    process.wait(timeout=60)
            finally:
                for process in processes:
                    process.kill()
        if processes[0].returncode:
            raise SystemExit(f"rank 0 of {ranks} ended with {processes[0].returncode}; run {run}")
        found += json.loads(output)
    print(f"{'ranks':>5} {'bytes':>11} {'kvplane':>12} {'gloo':>12} {'gloo / kvplane':>15}")
    for row in found:
        ours, gloo = row["kvplane"], row.get("gloo")
        other = f"{gloo * 1e6:10.1f}us {gloo / ours:15.2f}" if gloo else f"{'-':>12} {'-':>15}"
        print(f"{row['ranks']:>5} {row['bytes']:>11} {ours * 1e6:10.1f}us {other}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
