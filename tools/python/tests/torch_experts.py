"""One rank of `test_experts_torch`: `python torch_experts.py RANK SIZE STORE`, over torch's gloo."""

import datetime
import os
import sys

import numpy
import torch
import torch.distributed as dist
from mooncake import _floats
from mooncake.ep import RankMismatch, SourceTimeout
from mooncake.mooncake_elastic_buffer import ElasticBuffer
from mooncake.mooncake_ep_buffer import Buffer, EventOverlap
from test_elastic_buffer import words_of
from test_experts import Scenario


def bf16(words):
    return torch.from_numpy(words.view(numpy.int16)).view(torch.bfloat16)


def words(tensor):
    return tensor.view(torch.int16).numpy().view(numpy.uint16)


def check_conversions():
    """Element types convert as torch's, but for what is not a number or too large: its versions differ there."""
    draw = numpy.random.default_rng(1)
    bits = torch.from_numpy(draw.integers(-(2**31), 2**31, 200_000).astype(numpy.int32))
    values = torch.cat([bits.view(torch.float32), torch.randn(200_000), torch.randn(200_000) * 500])
    values = values[~values.isnan()]
    assert (_floats.f32_to_bf16(values.numpy()) == words(values.to(torch.bfloat16))).all()
    values = values[values.abs() <= 448]
    ours = _floats.f32_to_e4m3(values.numpy())
    assert (ours == values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()).all()
    x = (torch.randn(64, 512) * torch.logspace(-6, 4, 64)[:, None]).to(torch.bfloat16)
    codes, scales = _floats.scaled_to_e4m3(words(x))
    blocks = x.view(64, -1, 128)
    largest = blocks.abs().float().amax(dim=2).clamp(1e-4)
    # `448.0 / largest` would be a product with the reciprocal, which kernels do not take.
    factor = torch.div(torch.tensor(448.0), largest)[:, :, None]
    assert (codes == (blocks * factor).to(torch.float8_e4m3fn).view(64, 512).view(torch.uint8).numpy()).all()
    assert (scales == torch.div(largest, torch.tensor(448.0)).numpy()).all()


def check_buffer(group, rank, size, seed):
    """As `test_experts.Property`, with tensors."""
    scenario = Scenario(seed, size)
    buffer, mask = Buffer(group), torch.ones(size, dtype=torch.int32)
    x, topk_idx = bf16(scenario.x[rank]), torch.from_numpy(scenario.topk_idx[rank])
    weights = torch.from_numpy(scenario.weights[rank])
    quantized, hooks = bool(seed & 1), bool(seed & 2)
    received, count, handle, event, hook = buffer.dispatch(
        x, topk_idx, mask, scenario.capacity, scenario.experts, -1, quantized, not hooks, hooks
    )
    assert isinstance(event, EventOverlap)
    hook() if hooks else event.current_stream_wait()
    kinds = count.dtype, handle[0].dtype, handle[1].dtype
    assert kinds == (torch.int32, torch.int32, torch.int64), kinds
    if quantized:
        assert received[0].dtype == torch.float8_e4m3fn and received[1].dtype == torch.float32
        assert received[1].stride(1) == 1, received[1].stride()
        plain = received[0].view(torch.uint8).numpy(), received[1].numpy()
    else:
        assert received.dtype == torch.bfloat16
        plain = words(received)
    made = bf16(scenario.compute(rank, plain, quantized))
    out = torch.empty(len(x), scenario.hidden, dtype=torch.bfloat16)
    result, event, hook = buffer.combine(made, topk_idx, weights, mask, -1, handle, False, not hooks, hooks, out)
    hook() if hooks else event.current_stream_wait()
    assert result is out and mask.tolist() == [1] * size
    assert (words(out) == scenario.dense(rank, set(range(size)), quantized)).all(), seed


def check_elastic(group, rank, size, seed):
    """Dispatch and combine without experts: each token returns once from each rank that it was sent to."""
    scenario = Scenario(seed, size)
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=scenario.capacity)
    x, quantized = scenario.x[rank], bool(seed & 1)
    given = bf16(x)
    if quantized:
        codes, scales = _floats.scaled_to_e4m3(x)
        given = torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales)
        x = words_of((codes, scales))
    topk_idx = torch.from_numpy(scenario.topk_idx[rank])
    weights = torch.from_numpy(scenario.weights[rank])
    recv_x, recv_idx, recv_weights, handle, event = buffer.dispatch(given, topk_idx, weights, scenario.experts)
    event.current_stream_wait()
    assert recv_idx.dtype == torch.int64 and recv_weights.dtype == torch.float32
    if quantized:
        recv_x = bf16(words_of((recv_x[0].view(torch.uint8).numpy(), recv_x[1].numpy())))
    combined, returned, event = buffer.combine(recv_x, handle, recv_weights)
    owners = torch.where(topk_idx < 0, -1, topk_idx // scenario.local)
    times = [len(set(row) - {-1}) for row in owners.tolist()]
    wanted = numpy.zeros(x.shape, numpy.float32)
    for token, count in enumerate(times):
        for _ in range(count):
            wanted[token] += _floats.bf16_to_f32(x[token])
    assert (words(combined) == _floats.f32_to_bf16(wanted)).all(), seed
    assert (returned == torch.where(topk_idx < 0, 0, weights)).all()


def check_errors(group, rank, size):
    """Arguments, and ranks that differ."""
    buffer = Buffer(group)
    x, topk_idx = torch.zeros(4, 128, dtype=torch.bfloat16), torch.zeros(4, 2, dtype=torch.int64)
    for error, text, options in (
        (ValueError, "not contiguous", {"x": torch.zeros(4, 256, dtype=torch.bfloat16)[:, ::2]}),
        (TypeError, "x is of torch.float16, not bfloat16", {"x": x.half()}),
        (TypeError, "x is on meta", {"x": x.to("meta")}),
    ):
        arguments = {"x": x, "topk_idx": topk_idx, "active_ranks": None, "timeout_us": -1}
        try:
            buffer.dispatch(num_max_dispatch_tokens_per_rank=4, num_experts=size, **{**arguments, **options})
        except error as caught:
            assert text in str(caught), caught
        else:
            raise AssertionError(text)
    try:
        buffer.dispatch(x, topk_idx, None, 4 + (rank == 1), size, -1)
    except RankMismatch as error:
        assert (error.field, {error.theirs, error.ours}) == ("num_max_tokens", {4, 5}), error
    else:
        raise AssertionError("ranks that differ")


def check_timeout(group, rank, store):
    """A rank that does not come; the group's operation stays in flight, so this is the last check."""
    buffer = Buffer(group)
    x, topk_idx = torch.zeros(1, 128, dtype=torch.bfloat16), torch.zeros(1, 1, dtype=torch.int64)
    if rank == 1:
        store.wait(["late"], datetime.timedelta(seconds=60))
    else:
        try:
            buffer.dispatch(x, topk_idx, None, 1, group.size(), 200_000)
        except SourceTimeout as error:
            assert error.ranks == [], error
        else:
            raise AssertionError("no timeout")
        store.add("waited", 1)
        if store.add("waited", 0) == group.size() - 1:
            store.set("late", "yes")
        store.wait(["late"], datetime.timedelta(seconds=60))


def main(rank, size, path):
    store = dist.FileStore(path, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    group = dist.group.WORLD
    check_conversions()
    for seed in range(60):
        check_buffer(group, rank, size, seed)
        check_elastic(group, rank, size, seed)
    check_errors(group, rank, size)
    check_timeout(group, rank, store)
    print("passed", flush=True)
    # The group has an operation that never ends, for which its end would wait.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
