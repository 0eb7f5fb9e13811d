"""Steps of the ranks of a job, for `test_experts_group.py`."""

import numpy
from kvplane.group import World
from mooncake.mooncake_ep_buffer import Buffer

from test_experts import Scenario

STATE = {}


def open_buffer(name, rank, size, control):
    """Makes a buffer over a group of all ranks."""
    STATE["world"] = World(name, rank, control)
    STATE["group"] = STATE["world"].group("experts", range(size))
    STATE["buffer"] = Buffer(STATE["group"])
    STATE["mask"] = numpy.ones(size, numpy.int32)


def open_joiner(name, rank, size, control):
    """Makes a member of the group that exists."""
    STATE["world"] = World(name, rank, control)
    STATE["group"] = STATE["world"].group("experts", range(size), joining=True)


def join(size):
    """Waits until another member has activated this one, and makes a buffer."""
    STATE["group"].join(30)
    STATE["buffer"] = Buffer(STATE["group"])
    STATE["mask"] = numpy.ones(size, numpy.int32)


def activate(rank):
    """Activates a rank that joins."""
    assert STATE["group"].await_peers(rank)
    return STATE["group"].activate(rank).applied


def update():
    """Takes the members as they are, all of which take part again."""
    STATE["buffer"].update_ep_member()
    STATE["mask"][:] = 1


def passes(seeds, size):
    """Dispatches and combines for some seeds; returns the mask of active ranks, and for each seed the ranks without
    which the result is the dense computation's."""
    buffer, mask, found = STATE["buffer"], STATE["mask"], []
    for seed in seeds:
        scenario, rank = Scenario(seed, size), buffer.rank
        topk_idx, weights = scenario.topk_idx[rank], scenario.weights[rank]
        arguments = topk_idx, mask, scenario.capacity, scenario.experts, 10_000_000
        x, _, handle, _, hook = buffer.dispatch(scenario.x[rank], *arguments, use_fp8=False, return_recv_hook=True)
        hook()
        made = scenario.compute(rank, x, False)
        out, _, _ = buffer.combine(made, topk_idx, weights, mask, 10_000_000, handle)
        alive = {one for one in range(size) if mask[one]}
        numpy.testing.assert_array_equal(out, scenario.dense(rank, alive, False))
        found.append([one for one in range(size) if not mask[one]])
    return found
