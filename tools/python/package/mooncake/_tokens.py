"""Dispatch of each token once to each rank that has experts of it, in the layouts of DeepEP's elastic buffers.

Pure functions over numpy arrays. Tokens arrive ordered by source, and by their number there. *Expanded*, a token lies
once for each of its local experts, grouped by expert, each group padded with zeros to a multiple of the alignment.
"""

from typing import NamedTuple, Optional

import numpy

from mooncake import _experts, _floats


def check_distinct(topk_idx):
    """ValueError for a token that chooses an expert twice."""
    ordered = numpy.sort(topk_idx, axis=1)
    twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if twice.any():
        token, place = numpy.argwhere(twice)[0]
        raise ValueError(f"token {token} chooses expert {ordered[token, place]} twice")


def first_choices(topk_idx, experts_per_rank):
    """Returns for each choice whether it is the first one of its token on its rank, and that rank (-1 without one)."""
    ranks = numpy.where(topk_idx < 0, -1, topk_idx // experts_per_rank)
    first = ranks >= 0
    for choice in range(1, ranks.shape[1]):
        first[:, choice] &= (ranks[:, :choice] != ranks[:, choice : choice + 1]).all(axis=1)
    return first, ranks


def slots(topk_idx, experts_per_rank, num_ranks, rank, capacity):
    """Returns where the tokens of `rank` lie among those of each receiver, at the first choice of each; else -1."""
    first, ranks = first_choices(topk_idx, experts_per_rank)
    found = numpy.full(topk_idx.shape, -1, numpy.int32)
    for receiver in range(num_ranks):
        here = first & (ranks == receiver)
        found[here] = rank * capacity + numpy.arange(here.sum())
    return found


def dispatch_sections(rows, choices, weighted, scale_bytes, row_bytes):
    """Sections of a message: number of each token at its source, its local experts, weights, scales, tokens."""
    return (
        _experts.Section("<i4", (rows,)),
        _experts.Section("<i4", (rows, choices)),
        _experts.Section("<f4", (rows, choices if weighted else 0)),
        _experts.Section("u1", (rows, scale_bytes)),
        _experts.Section("u1", (rows, row_bytes)),
    )


def fill_dispatch(sections, rank, share, routing, weights, scales, data):
    """Writes the message to a rank."""
    tokens, experts, into_weights, into_scales, into_data = sections
    tokens[:] = share.tokens
    local = routing.topk_idx[share.tokens] - rank * routing.experts_per_rank
    experts[:] = numpy.where((local >= 0) & (local < routing.experts_per_rank), local, -1)
    if weights is not None:
        into_weights[:] = weights[share.tokens]
    into_scales[:] = scales[share.tokens]
    into_data[:] = data[share.tokens]


class Received(NamedTuple):
    """What a rank has after a dispatch: a row for each token, as the sources sent it."""

    #: Tokens of the sources up to each.
    of_ranks: numpy.ndarray
    #: Tokens of each local expert, and rows that it gets when expanded.
    counts: numpy.ndarray
    aligned: numpy.ndarray
    #: (tokens, choices): local experts or -1; weights, if there are any.
    experts: numpy.ndarray
    weights: Optional[numpy.ndarray]
    scales: numpy.ndarray
    data: numpy.ndarray
    #: (tokens, 2 + choices): number of the token in the world; its source and first choice here; rows when expanded.
    metadata: numpy.ndarray


def receive(messages, choices, num_local_experts, capacity, alignment, weighted, scale_bytes, row_bytes):
    """Puts the messages together, by source; None for a source without one."""
    none = _experts.views(numpy.empty(0, numpy.uint8), dispatch_sections(0, choices, weighted, scale_bytes, row_bytes))
    parts = [none if message is None else message for message in messages]
    tokens, experts, weights, scales, data = map(numpy.concatenate, zip(*parts))
    source = numpy.repeat(numpy.arange(len(parts)), [len(part[0]) for part in parts])
    counts = numpy.bincount(experts[experts >= 0], minlength=num_local_experts)
    aligned = -(-counts // alignment) * alignment
    metadata = numpy.full((len(tokens), 2 + choices), -1, numpy.int32)
    metadata[:, 0] = source * capacity + tokens
    metadata[:, 1] = source * choices + (experts >= 0).argmax(axis=1)
    # Expanded rows are in the order of the tokens within an expert.
    token, choice = numpy.nonzero(experts >= 0)
    expert = experts[token, choice]
    order = numpy.argsort(expert, kind="stable")
    _, within = _experts.spans(numpy.cumsum(aligned) - aligned, counts)
    metadata[token[order], 2 + choice[order]] = within
    of_ranks = numpy.cumsum([len(part[0]) for part in parts]).astype(numpy.int32)
    return Received(of_ranks, counts, aligned, experts, weights if weighted else None, scales, data, metadata)


def combine_sections(rows, choices, weighted, row_bytes):
    """Sections of a message: token and choice of each row at its source, weights, rows."""
    return (
        _experts.Section("<i8", (rows,)),
        _experts.Section("<f4", (rows, choices if weighted else 0)),
        _experts.Section("u1", (rows, row_bytes)),
    )


def outputs(x, weights, metadata, of_ranks, source, capacity, expanded, reduce):
    """Returns the keys (token, choice), weights and rows (bfloat16) that go back to a source.

    Of an expanded layout, the rows of a token are added up here if `reduce`, and go back one by one if not.
    """
    choices = metadata.shape[1] - 2
    mine = slice(of_ranks[source - 1] if source else 0, of_ranks[source])
    part = metadata[mine]
    tokens = (part[:, 0] % capacity).astype(numpy.int64)
    keys = tokens * choices + part[:, 1] % choices
    if not expanded:
        return keys, None if weights is None else weights[mine], x[mine]
    rows = part[:, 2:]
    theirs = None
    if weights is not None:
        theirs = numpy.where(rows >= 0, weights[rows] if len(weights) else 0, numpy.float32(0))
    if not reduce:
        token, choice = numpy.nonzero(rows >= 0)
        return tokens[token] * choices + choice, None, x[rows[token, choice]]
    sums = numpy.zeros((len(part), x.shape[1]), numpy.float32)
    _experts.weighted_sum(rows, x, None, sums)
    return keys, theirs, _floats.f32_to_bf16(sums)
