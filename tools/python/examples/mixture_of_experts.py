"""Forward passes of a mixture of experts over several processes, one of which is killed in the middle.

    python mixture_of_experts.py [--ranks 4] [--steps 10] [--control ADDRESS]

Needs numpy, and a control plane: `kvplane dev`. Each process has tokens of its own and two of the physical experts;
each logical expert is with two processes. In the middle of a pass the last process kills itself. The tokens that had
chosen its experts lack their outputs in that pass; from the next one on, others compute them, and the sums are right
again.
"""

import argparse
import multiprocessing
import os
import signal
import sys
import uuid

import numpy
from kvplane.group import World
from mooncake.ep import Buffer, ExpertPlacement

TOKENS, HIDDEN, INNER, CHOICES, LOCAL = 32, 256, 512, 2, 2
#: Longest wait for a process that lives.
TIMEOUT_US = 30_000_000


def bfloat16(values):
    """Rounds to bfloat16 words: what travels between the processes."""
    bits = numpy.ascontiguousarray(values, numpy.float32).view(numpy.uint32)
    return ((bits + (((bits >> 16) & 1) + numpy.uint32(0x7FFF))) >> 16).astype(numpy.uint16)


def float32(words):
    """Numbers of bfloat16 words."""
    return (words.astype(numpy.uint32) << numpy.uint32(16)).view(numpy.float32)


class Layer:
    """A router, and the weights of all logical experts, which every process here draws from one seed."""

    def __init__(self, experts):
        draw = numpy.random.default_rng(7)
        self.router = draw.standard_normal((HIDDEN, experts), numpy.float32) / HIDDEN**0.5
        self.up = draw.standard_normal((experts, HIDDEN, INNER), numpy.float32) / HIDDEN**0.5
        self.down = draw.standard_normal((experts, INNER, HIDDEN), numpy.float32) / INNER**0.5

    def route(self, x):
        """Logical experts of each token, and their weights."""
        scores = x @ self.router
        chosen = numpy.argsort(-scores, axis=1)[:, :CHOICES].astype(numpy.int64)
        weights = numpy.exp(numpy.take_along_axis(scores, chosen, axis=1))
        return numpy.ascontiguousarray(chosen), weights / weights.sum(axis=1, keepdims=True)

    def expert(self, number, x):
        """Output of a logical expert."""
        return numpy.maximum(x @ self.up[number], 0) @ self.down[number]

    def dense(self, x):
        """The layer's output, computed here alone."""
        chosen, weights = self.route(x)
        out = numpy.zeros_like(x)
        for token, (experts, shares) in enumerate(zip(chosen, weights)):
            for expert, share in zip(experts, shares):
                out[token] += share * float32(bfloat16(self.expert(expert, x[token : token + 1])))[0]
        return out


def run(rank, arguments, world_name, results):
    """One process."""
    ranks, victim, middle = arguments.ranks, arguments.ranks - 1, arguments.steps // 2
    experts = ranks * LOCAL // 2
    # Physical experts p and p + experts hold the same logical one, at processes far from one another.
    placed = numpy.arange(ranks * LOCAL) % experts
    layer, draw, found = Layer(experts), numpy.random.default_rng(rank), []
    with World(world_name, rank, arguments.control) as world, world.group("experts", range(ranks)) as group:
        buffer, placement = Buffer(group), ExpertPlacement(placed, experts, ranks, rank)
        active = numpy.ones(ranks, numpy.int32)
        for step in range(arguments.steps):
            words = bfloat16(draw.standard_normal((TOKENS, HIDDEN)))
            x = float32(words)
            chosen, weights = layer.route(x)
            physical = placement.topk_ids_logical_to_physical(chosen, active)
            received, counts, handle, _, hook = buffer.dispatch(
                words, physical, active, TOKENS, ranks * LOCAL, TIMEOUT_US, use_fp8=False, return_recv_hook=True
            )
            hook()
            if rank == victim and step == middle:
                os.kill(os.getpid(), signal.SIGKILL)
            for local in range(LOCAL):
                mine = received[local, : counts[local]]
                mine[:] = bfloat16(layer.expert(placed[rank * LOCAL + local], float32(mine)))
            out, _, _ = buffer.combine(received, physical, weights, active, TIMEOUT_US, handle)
            wanted = layer.dense(x)
            wrong = numpy.abs(float32(out) - wanted).max(axis=1) > 0.02 * numpy.abs(wanted).max()
            found.append((int(wrong.sum()), active.tolist()))
    results.put(found)


def main():
    """Starts the processes; exit status 0 if all sums are right but those of the pass with the kill."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--control", help="address of the control plane; by default, this user's")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results, name = context.SimpleQueue(), f"mixture-of-experts-{uuid.uuid4().hex}"
    processes = [context.Process(target=run, args=(rank, arguments, name, results)) for rank in range(arguments.ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    found = []
    while not results.empty():
        found.append(results.get())
    middle, right = arguments.steps // 2, len(found) == arguments.ranks - 1
    # Passes of the processes that are left.
    for step, several in enumerate(zip(*found)):
        wrong, there = sum(one for one, _ in several), several[0][1]
        print(f"pass {step}: {wrong} of {TOKENS * len(several)} tokens lack an output; processes {there}")
        right &= sum(there) == arguments.ranks - (step >= middle) and (wrong == 0 or step == middle)
    ends = [process.exitcode for process in processes]
    if not right or ends != [0] * (arguments.ranks - 1) + [-signal.SIGKILL]:
        sys.exit(f"not as it should be: the processes ended with {ends}")


if __name__ == "__main__":
    main()
