"""Steps of the ranks of a job with torch, for `test_pg.py`."""

import datetime
import os
import warnings

import torch
import torch.distributed as dist

from mooncake import pg

STATE = {}


def init(port, rank, size, backend="mooncake-cpu"):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group(backend, rank=rank, world_size=size)
    STATE.update(rank=rank, size=size)
    return [dist.get_backend(), dist.get_rank(), dist.get_world_size()]


def control():
    """Address of the job's control plane."""
    import json

    from mooncake import _pg_process

    return json.loads(next(iter(_pg_process._WORLDS)))["control"]


def reduced(kind, op, value):
    tensor = torch.full((3,), value, dtype=getattr(torch, kind))
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op))
    return tensor.tolist()


def splits():
    """Rank 0 gets one row more of each rank than the one before, the others two of each."""
    rank, size = STATE["rank"], STATE["size"]
    to = [rank + 1] + [2] * (size - 1)
    source = torch.arange(sum(to) * 3.0).view(-1, 3) + 100 * rank
    of = [other + 1 for other in range(size)] if rank == 0 else [2] * size
    target = torch.empty(sum(of), 3)
    dist.all_to_all_single(target, source, of, to)
    return target[:, 0].tolist()


def wrong_splits():
    size = STATE["size"]
    found = []
    for to, of in (([1] * (size - 1), [1] * size), ([1] * size, [2] + [1] * (size - 1)), ([3] + [0] * size, [1] * size)):
        try:
            dist.all_to_all_single(torch.empty(size), torch.empty(size), of, to)
        except (RuntimeError, ValueError) as problem:
            found.append(str(problem))
    return found


def lists():
    rank, size = STATE["rank"], STATE["size"]
    sent = [torch.full((to + 1,), 10 * rank + to) for to in range(size)]
    received = [torch.empty(rank + 1, dtype=torch.int64) for _ in range(size)]
    dist.all_to_all(received, sent)
    part = torch.empty(2)
    dist.reduce_scatter(part, [torch.full((2,), float(to)) for to in range(size)])
    gathered = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(gathered, torch.tensor([rank]))
    return [[one.tolist() for one in received], part.tolist(), [one.item() for one in gathered]]


def objects():
    found = [None] * STATE["size"]
    dist.all_gather_object(found, {"rank": STATE["rank"]})
    sent = [f"of {STATE['rank']}"]
    dist.broadcast_object_list(sent, src=1)
    return [found, sent]


def coalesced():
    first, second = torch.ones(3), torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.all_reduce_coalesced([first, second])
    outputs = [torch.empty(STATE["size"]) for _ in range(2)]
    with dist._coalescing_manager(async_ops=True) as block:
        for output in outputs:
            dist.all_gather_into_tensor(output, torch.full((1,), float(STATE["rank"])))
    block.wait()
    return [first.tolist(), second.tolist(), [one.tolist() for one in outputs]]


def functional():
    import torch.distributed._functional_collectives as functions

    rank, size, group = STATE["rank"], STATE["size"], dist.group.WORLD
    tensor = torch.ones(2) * (rank + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = [
            functions.all_reduce(tensor, "sum", group),
            functions.all_gather_tensor(tensor, 0, group),
            functions.reduce_scatter_tensor(torch.arange(float(size)), "sum", 0, group),
            functions.all_to_all_single(torch.arange(float(size)) + 10 * rank, [1] * size, [1] * size, group),
        ]
    return [one.tolist() for one in results]


def future():
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, async_op=True)
    return work.get_future().then(lambda done: done.value()[0] * 2).wait().tolist()


def data_parallel():
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
    model(torch.ones(2, 3) * (STATE["rank"] + 1)).sum().backward()
    return model.module.weight.grad.tolist()


def not_contiguous():
    found = []
    for call in (
        lambda: dist.all_reduce(torch.ones(4, 4).t()[::2]),
        lambda: dist.broadcast(torch.ones(4, 4).t()[::2], 0),
        lambda: dist.all_gather_into_tensor(torch.ones(9), torch.ones(3, 2)[:, 0]),
    ):
        try:
            call()
        except RuntimeError as problem:
            found.append("not contiguous" in str(problem))
    return found


def message(does_send, peer):
    """Messages need no contiguous tensors."""
    if does_send:
        dist.send(torch.arange(8.0).view(4, 2).t(), peer)
        return None
    target = torch.zeros(4, 2).t()
    dist.recv(target, peer)
    return target.tolist()


def message_from_any(does_send, peer):
    if does_send:
        dist.send(torch.full((3,), float(STATE["rank"])), peer)
        return None
    target = torch.zeros(3)
    source = dist.recv(target)
    return [source, target.tolist()]


def shrink():
    group = dist.new_group(list(range(STATE["size"])), backend="mooncake-cpu")
    if STATE["rank"] == STATE["size"] - 1:
        return None
    smaller = dist.shrink_group([STATE["size"] - 1], group=group)
    tensor = torch.ones(2)
    dist.all_reduce(tensor, group=smaller)
    return [smaller.size(), tensor.tolist()]


def reconfigure(first):
    """The ranks from `first` on make up the group, in reverse order."""
    group = dist.new_group(list(range(STATE["size"])), backend="mooncake-cpu")
    handles = [None] * STATE["size"]
    dist.all_gather_object(handles, group.get_reconfigure_handle())
    if STATE["rank"] < first:
        return None
    options = torch._C._distributed_c10d.ReconfigureOptions()
    options.uuid, options.handles = 7, list(reversed(handles[first:]))
    options.timeout = datetime.timedelta(seconds=30)
    group.reconfigure(options).wait()
    tensor = torch.tensor([STATE["rank"]])
    group.broadcast([tensor], 0).wait()
    return [group.rank(), group.size(), tensor.tolist(), group.supports_reconfigure, group.get_error().name]


def mirror(tensor_of_options):
    """A group with a tensor of the caller's; returns what is in it."""
    tensor = torch.full((STATE["size"],), 9, dtype=torch.int32)
    options = pg.MooncakeBackendOptions(tensor) if tensor_of_options else pg.MooncakeBackendOptions(STATE["size"])
    STATE["group"] = dist.new_group(list(range(STATE["size"])), backend="mooncake-cpu", pg_options=options)
    STATE["mirror"] = tensor
    return tensor.tolist() if tensor_of_options else pg.get_active_ranks(STATE["group"]).tolist()


def mirror_follows(expected):
    """Waits until the caller's tensor has these values, without a call that refreshes it."""
    import time

    until = time.monotonic() + 30
    while STATE["mirror"].tolist() != expected and time.monotonic() < until:
        time.sleep(0.01)
    return STATE["mirror"].tolist()


def survive(value):
    """A sum in the group of `mirror`."""
    tensor = torch.tensor([value])
    work = dist.all_reduce(tensor, group=STATE["group"], async_op=True)
    assert work.wait() and work.is_completed()
    return [tensor.tolist(), pg.get_active_ranks(STATE["group"]).tolist(), dist.get_world_size(STATE["group"])]


def destroy():
    dist.destroy_process_group()
