"""Forward passes of a small mixture of experts over four processes, one of which is killed in the middle.

    python moe_forward.py [--control ADDRESS] [--steps 12] [--kill 2]

Needs numpy, and a control plane: `kvplane dev`. Each process has a quarter of the experts, and replicas of those of the
next process. A step sends each token to the processes that have its experts, and the results back. When a process dies,
the step in which that happened is repeated, with the replicas of its experts: the answer is right from then on.
"""

import argparse
import subprocess
import sys
import uuid

import numpy
from kvplane.group import World

RANKS, EXPERTS, TOKENS, WIDTH, CHOSEN = 4, 8, 64, 32, 2
OWN = EXPERTS // RANKS


def weights(expert):
    """Weights of an expert, the same wherever it is."""
    drawn = numpy.random.default_rng(1000 + expert)
    return drawn.standard_normal((WIDTH, WIDTH), dtype=numpy.float32) / numpy.float32(WIDTH**0.5)


def tokens_of(rank, step):
    """Tokens that a process has in a step, the experts of each, and their shares in the result."""
    drawn = numpy.random.default_rng([rank, step])
    tokens = drawn.standard_normal((TOKENS, WIDTH), dtype=numpy.float32)
    experts = numpy.argsort(drawn.random((TOKENS, EXPERTS)), axis=1)[:, :CHOSEN]
    shares = drawn.random((TOKENS, CHOSEN), dtype=numpy.float32)
    return tokens, experts, shares


def dense(tokens, experts, shares):
    """The result by one process that has all experts."""
    out = numpy.zeros_like(tokens)
    for token, chosen, share in zip(range(len(tokens)), experts, shares):
        for expert, part in zip(chosen, share):
            out[token] += part * numpy.tanh(tokens[token] @ weights(expert))
    return out


def holder(expert, takes_part):
    """The process that computes an expert: its first one, or the next, which has a replica."""
    first = expert // OWN
    found = next((rank for rank in (first, (first - 1) % RANKS) if takes_part[rank]), None)
    if found is None:
        raise SystemExit(f"expert {expert} and its replica are lost")
    return found


def exchange(group, source, counts, failed):
    """Sends rows to each process, and returns those of each, with their numbers."""
    counts = numpy.asarray(counts, numpy.int64)
    theirs = numpy.zeros(RANKS, numpy.int64)
    work = group.all_to_all(counts, theirs, [1] * RANKS, [1] * RANKS)
    work.wait()
    failed |= set(work.failed)
    width = source.shape[1]
    target = numpy.zeros((int(theirs.sum()), width), source.dtype)
    work = group.all_to_all(source, target, (counts * width).tolist(), (theirs * width).tolist())
    work.wait()
    failed |= set(work.failed)
    return target, theirs


def forward(group, step):
    """One attempt at a step: the result, and the ranks that failed in it."""
    tokens, experts, shares = tokens_of(group.rank, step)
    # All members that live agree on those that take part: they get the same sum.
    takes_part = numpy.zeros(RANKS, numpy.int32)
    takes_part[group.rank] = 1
    group.all_reduce(takes_part, "max").wait()
    failed = set()
    chosen = experts.ravel()
    holders = numpy.array([holder(expert, takes_part) for expert in chosen])
    order = numpy.argsort(holders, kind="stable")
    # A row is a token and the number of its expert.
    rows = numpy.empty((len(chosen), WIDTH + 1), numpy.float32)
    rows[:, :WIDTH] = tokens[order // CHOSEN]
    rows[:, WIDTH] = chosen[order]
    counts = numpy.bincount(holders, minlength=RANKS)
    received, numbers = exchange(group, rows, counts, failed)
    computed = numpy.empty((len(received), WIDTH), numpy.float32)
    for expert in numpy.unique(received[:, WIDTH]).astype(int):
        mine = received[:, WIDTH] == expert
        computed[mine] = numpy.tanh(received[mine, :WIDTH] @ weights(expert))
    returned, _ = exchange(group, computed, numbers, failed)
    if failed or len(returned) != len(rows):
        return None, failed
    out = numpy.zeros_like(tokens)
    numpy.add.at(out, order // CHOSEN, shares.ravel()[order, None] * returned)
    return out, failed


def member(arguments):
    """One of the processes. It takes a step when it reads a line."""
    with World(arguments.world, arguments.rank, arguments.control) as world, world.group("moe", range(RANKS)) as group:
        print("ready", flush=True)
        for step, _ in zip(range(arguments.steps), sys.stdin):
            attempts, out = 0, None
            while out is None:
                attempts += 1
                out, _ = forward(group, step)
            difference = float(abs(out - dense(*tokens_of(group.rank, step))).max())
            there = "".join("01"[one] for one in group.active)
            print(f"step {step} rank {group.rank}: active {there}, attempts {attempts}, off by {difference:.1e}", flush=True)
            if difference > 1e-4:
                sys.exit(1)


def main():
    """Starts the processes, and kills one."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--control")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kill", type=int, default=2, help="the rank that is killed; -1: none")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--world", default=f"moe-{uuid.uuid4().hex}", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank is not None:
        return member(arguments)
    command = [sys.executable, __file__, "--world", arguments.world, "--steps", str(arguments.steps)]
    command += ["--control", arguments.control] if arguments.control else []
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = {rank: subprocess.Popen([*command, "--rank", str(rank)], **pipes) for rank in range(RANKS)}
    try:
        for process in processes.values():
            if process.stdout.readline() != "ready\n":
                raise SystemExit("a process has not begun")
        for step in range(arguments.steps):
            for process in processes.values():
                process.stdin.write("\n")
                process.stdin.flush()
            if step == arguments.steps // 2 and arguments.kill in processes:
                # The process ends while the others are in the step.
                processes[arguments.kill].kill()
                processes.pop(arguments.kill).wait()
            for rank, process in processes.items():
                line = process.stdout.readline()
                if not line or "off by" not in line:
                    raise SystemExit(f"rank {rank} has ended in step {step}")
                print(line, end="")
        print(f"{arguments.steps} steps, right at all of {len(processes)} processes")
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    return None


if __name__ == "__main__":
    main()
