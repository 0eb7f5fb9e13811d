"""Measures collectives of process groups beside those of torch's gloo and of stock Mooncake, alternating in one run.

    python bench_groups.py [--control HOST:PORT | --stock FOLDER] [--ranks 2 4 8] [--rounds 3] [--json FILE]

Run it by an interpreter that imports `kvplane`, and `torch` for gloo; `--stock` takes a folder that `stock_pg.py` has
prepared. A side that does not load is left out, and the reason is printed. With `--stock` everything runs in a network
of its own, as stock Mooncake listens on every address, and with a control plane of its own: the program `kvplane`, from
KVPLANE_BINARY or the search path.

Each number of ranks has its own processes, which hold a group of each side. A round runs some all_reduces (f32, sum) of
each size on one side, then on the next one; the figure is the median over the rounds of the median time of a call on
rank 0. Sums are compared with what they have to be. Stock Mooncake's threads poll as long as there is a group, at half
a core of each idle rank. So its ranks create their group for each turn and leave it at the end, outside of the time
that is measured.

Limits: a turn has the calls of 0.6 s, at least 3 and at most 300. Beyond 16 MiB, where a call of stock
Mooncake may take up to a minute, a turn of it has one call, and one more to warm up in the first round. A side whose
turns of one size take longer than a minute together has fewer rounds of that size, down to one. The JSON has the median
of each round, in seconds.
"""

import argparse
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import stock_pg

SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
#: Seconds that a side runs a size in a round, at most, and calls at least and at most.
LONGEST_S, FEWEST, MOST = 0.6, 3, 300
#: Seconds of all rounds of a side with one size, beyond which it has fewer.
ALL_ROUNDS_S = 60
#: Bytes beyond which stock Mooncake has a single call a turn.
SLOW = 16 << 20
#: Seconds until a side has loaded, a rank waits for the others, and one number of ranks is done.
LOAD_S, MEETING_S, RUN_S = 120, 420, 900


class Ours:
    """Our group."""

    name = "kvplane"

    @staticmethod
    def load(_arguments):
        from kvplane.group import World

        return World

    def __init__(self, arguments, rank, ranks):
        self.world = self.load(arguments)(f"bench-{ranks}-{os.environ['BENCH_RUN']}", rank, arguments.control)
        self.group = self.world.group("all", range(ranks))

    def fewest(self, _size):
        return FEWEST

    def turn(self):
        return contextlib.nullcontext()

    def all_reduce(self, array):
        self.group.all_reduce(array).wait()

    def close(self):
        self.world.close()


class Gloo:
    """Gloo, as torch has it."""

    name = "gloo"

    @staticmethod
    def load(_arguments):
        import torch.distributed

        if not torch.distributed.is_gloo_available():
            raise ImportError("this torch has no gloo")
        return torch

    def __init__(self, arguments, rank, ranks):
        self.torch = self.load(arguments)
        self.dist = self.torch.distributed
        store = f"file://{arguments.folder}/gloo"
        self.dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)

    def fewest(self, _size):
        return FEWEST

    def turn(self):
        return contextlib.nullcontext()

    def all_reduce(self, array):
        self.dist.all_reduce(self.torch.from_numpy(array))

    def close(self):
        self.dist.destroy_process_group()


class Stock:
    """Stock Mooncake's group, which exists in its turns only."""

    name = "stock"

    @staticmethod
    def load(arguments):
        return stock_pg.load(arguments.stock)

    def __init__(self, arguments, rank, ranks):
        self.library, self.rank, self.ranks = self.load(arguments), rank, ranks
        self.folder, self.turns, self.group = arguments.folder, 0, None

    def fewest(self, size):
        return FEWEST if size <= SLOW else 1

    @contextlib.contextmanager
    def turn(self):
        self.turns += 1
        self.group = stock_pg.StockGroup(self.library, self.rank, self.ranks, f"{self.folder}/stock-{self.turns}")
        try:
            yield
        finally:
            self.group.close()

    def all_reduce(self, array):
        self.group.all_reduce(array)

    def close(self):
        pass


KINDS = {kind.name: kind for kind in (Ours, Gloo, Stock)}


class Meeting:
    """Point at which the ranks wait for each other between the turns: files, so that no side takes part."""

    def __init__(self, folder, rank, ranks):
        self.folder, self.rank, self.ranks, self.number = pathlib.Path(folder), rank, ranks, 0

    def attempt(self, action):
        """Runs an action that all ranks run, and waits until all have. Returns its result, and the first rank's problem
        if it failed on any."""
        result, problem = None, ""
        try:
            result = action()
        except Exception as failure:  # Whatever a side raises is the reason for which it is left out.
            problem = f"rank {self.rank}: {type(failure).__name__}: {failure}"
        self.number += 1
        own = self.folder / f"met-{self.number}-{self.rank}"
        own.with_suffix(".new").write_text(problem, encoding="utf-8")
        own.with_suffix(".new").rename(own)
        until, problems = time.monotonic() + MEETING_S, []
        for rank in range(self.ranks):
            other = self.folder / f"met-{self.number}-{rank}"
            while not other.exists():
                if time.monotonic() > until:
                    raise SystemExit(f"rank {self.rank}: rank {rank} is not done within {MEETING_S} s")
                time.sleep(0.002)
            problems.append(other.read_text(encoding="utf-8"))
        return result, next(filter(None, problems), None)


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


class Size:
    """Turns of one side with one size, on one rank."""

    def __init__(self, side, array, rank, ranks, rounds):
        import numpy

        self.side, self.array, self.rank, self.ranks = side, array, rank, ranks
        self.calls, self.rounds, self.medians = 0, rounds, []
        self.one = numpy.zeros(1, numpy.float32)

    def turn(self):
        """Runs a round's calls; before those of the first one, finds how many there are."""
        with self.side.turn():
            # All ranks are there afterwards, and the connections.
            measure(self.side, self.one, FEWEST, self.rank, self.ranks)
            if not self.calls:
                self._plan()
            self.medians.append(measure(self.side, self.array, self.calls, self.rank, self.ranks))

    def _plan(self):
        fewest = self.side.fewest(self.array.nbytes)
        once = measure(self.side, self.array, fewest, self.rank, self.ranks)
        calls = int(min(MOST, max(fewest, LONGEST_S / once)))
        rounds = int(min(self.rounds, max(1, ALL_ROUNDS_S / (calls * once))))
        # All ranks run as many: rank 0 says how many, by calls of their own.
        self.calls, self.rounds = self._of_rank_0(calls), self._of_rank_0(rounds)

    def _of_rank_0(self, number):
        self.one[0] = number if self.rank == 0 else 0
        self.side.all_reduce(self.one)
        return int(self.one[0])


def rank_side(arguments):
    """One rank. Rank 0 writes a line of JSON for each size, and one for each side that fails, to the file `found`."""
    import numpy

    rank, ranks = arguments.rank, arguments.ranks[0]
    meeting, sides = Meeting(arguments.folder, rank, ranks), []

    def say(**what):
        if rank == 0:
            with open(os.path.join(arguments.folder, "found"), "a", encoding="utf-8") as file:
                file.write(json.dumps(what) + "\n")

    for name in arguments.sides:
        side, problem = meeting.attempt(lambda kind=KINDS[name]: kind(arguments, rank, ranks))
        if problem:
            say(note=f"{name}: left out with {ranks} ranks: {problem}")
        else:
            sides.append(side)
    for size in arguments.sizes:
        array = numpy.zeros(size // 4, numpy.float32)
        parts = [Size(side, array, rank, ranks, arguments.rounds) for side in sides]
        for number in range(arguments.rounds):
            for part in parts:
                if part.side not in sides or number >= part.rounds:
                    continue
                _, problem = meeting.attempt(part.turn)
                if problem:
                    say(note=f"{part.side.name}: left out with {ranks} ranks from {size} bytes on: {problem}")
                    sides.remove(part.side)
        done = {part.side.name: part for part in parts if part.side in sides}
        say(
            ranks=ranks,
            bytes=size,
            **{name: statistics.median(part.medians) for name, part in done.items()},
            calls={name: part.calls for name, part in done.items()},
            rounds={name: part.medians for name, part in done.items()},
        )
    for side in sides:
        side.close()


def loads(name, arguments):
    """True if a side loads, which a process of its own tries; otherwise prints why not."""
    command = [sys.executable, __file__, "--load", name, *(["--stock", arguments.stock] if arguments.stock else [])]
    try:
        output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        tried = subprocess.run(command, env=environment(name), timeout=LOAD_S, check=False, **output)
        problem = None
        if tried.returncode:
            problem = (tried.stderr.strip().splitlines() or [f"ended with {tried.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        problem = f"has not loaded within {LOAD_S} s"
    if problem:
        print(f"{name}: skipped: {problem}", flush=True)
    return not problem


def environment(*sides):
    """Environment of a process with these sides."""
    return {**os.environ, **(stock_pg.ENVIRONMENT if Stock.name in sides else {})}


def run(arguments, sides, ranks, found):
    """Runs the ranks, prints a line for each size, and appends it to `found`. Returns the reason if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--ranks", str(ranks), "--rounds", str(arguments.rounds)]
        command += ["--folder", folder, "--sizes", *map(str, arguments.sizes), "--sides", *sides]
        command += ["--control", arguments.control] if arguments.control else []
        command += ["--stock", arguments.stock] if arguments.stock else []
        logs = [pathlib.Path(folder, f"log-{rank}") for rank in range(ranks)]
        processes = []
        for rank in range(ranks):
            with open(logs[rank], "wb") as log:
                words = [*command, "--rank", str(rank)]
                processes.append(subprocess.Popen(words, env=environment(*sides), stdout=log, stderr=log))
        until, problem, shown = time.monotonic() + RUN_S, None, 0
        try:
            while True:
                codes = [process.poll() for process in processes]
                lines = read_lines(os.path.join(folder, "found"))
                for line in lines[shown:]:
                    show(json.loads(line), found)
                shown = len(lines)
                failed = next((rank for rank, code in enumerate(codes) if code), None)
                if failed is not None:
                    last = (read_lines(logs[failed]) or [""])[-1]
                    problem = f"rank {failed} of {ranks} ended with {codes[failed]}: {last}"
                elif time.monotonic() > until:
                    problem = f"{ranks} ranks have not ended within {RUN_S} s"
                if problem or None not in codes:
                    return problem
                time.sleep(0.05)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def read_lines(path):
    """Complete lines of a file that may not be there yet."""
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    return text[: text.rfind("\n") + 1].splitlines()


def show(row, found):
    """Prints a row of the table, or a note."""
    if "note" in row:
        print(row["note"], flush=True)
        return
    found.append(row)
    line = f"{row['ranks']:>5} {row['bytes']:>11}"
    for name in KINDS:
        line += f" {row[name] * 1e6:12.1f}us" if name in row else f" {'-':>14}"
    for name in (Gloo.name, Stock.name):
        both = name in row and Ours.name in row
        line += f" {row[name] / row[Ours.name]:16.2f}" if both else f" {'-':>16}"
    print(line, flush=True)


def parsed():
    """Arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--control", help="address of the control plane; by default, that of this user")
    parser.add_argument("--stock", metavar="FOLDER", help="folder with stock Mooncake, which stock_pg.py has prepared")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="bytes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--own-network", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--load", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--sides", nargs="+", choices=KINDS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.control and arguments.stock and arguments.rank is None:
        parser.error("--stock runs in a network of its own, which reaches no control plane outside: without --control")
    return arguments


def main():
    """Runs the ranks, and prints a table."""
    arguments = parsed()
    if arguments.load:
        KINDS[arguments.load].load(arguments)
        return
    if arguments.rank is not None:
        rank_side(arguments)
        return
    kinds = [name for name in KINDS if name != Stock.name]
    if arguments.stock and not arguments.own_network:
        words = stock_pg.own_network()
        if words:
            os.execvp(words[0], [*words, sys.executable, *sys.argv, "--own-network"])
        print("stock: skipped: it listens everywhere, and this user has no network namespace for it", flush=True)
    elif arguments.stock:
        kinds.append(Stock.name)
    sides = [name for name in kinds if loads(name, arguments)]
    named = os.environ.setdefault("BENCH_RUN", str(os.getpid()))
    if arguments.stock and Ours.name in sides:
        from kvplane._program import start_control_plane

        # That of an earlier run may be there for a minute more.
        arguments.control = start_control_plane(f"bench-{named}", 60.0)
    titles = [f"{name} / {Ours.name}" for name in (Gloo.name, Stock.name)]
    print(f"{'ranks':>5} {'bytes':>11}", *(f"{name:>14}" for name in KINDS), *(f"{title:>16}" for title in titles))
    found, problems = [], []
    for ranks in arguments.ranks:
        problem = run(arguments, sides, ranks, found)
        if problem:
            print(problem, flush=True)
            problems.append(problem)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(found, file)
    if problems or not sides:
        raise SystemExit("no side loads" if not sides else "; ".join(problems))


if __name__ == "__main__":
    main()
