"""Dispatch and combine of expert parallelism: which token goes to which rank, and where it lies there.

Pure functions over numpy arrays: no group, no clock. `_exchange` carries the messages that these functions describe,
`mooncake_ep_buffer` and `mooncake_elastic_buffer` offer them. Expert `e` of `E` lives on rank `e // (E / R)`.

A token is sent once to each rank that has experts of it, however many; the experts' outputs return one by one and are
added up in float32 where the token came from, in the order of its choices.
"""

from typing import NamedTuple

import numpy

from mooncake import _floats

#: Width to which the sections of a message are padded, so that each is aligned for its type.
_ALIGNMENT = 8


class Section(NamedTuple):
    """Part of a message: an array of this type and shape."""

    kind: str
    shape: tuple

    @property
    def bytes(self):
        """Bytes of the array, without padding."""
        return int(numpy.prod(self.shape, dtype=numpy.int64)) * numpy.dtype(self.kind).itemsize


def message_bytes(sections):
    """Returns the bytes of a message."""
    return sum(-(-section.bytes // _ALIGNMENT) * _ALIGNMENT for section in sections)


def views(memory, sections):
    """Returns the arrays of a message in its memory, a one-dimensional array of uint8."""
    found, at = [], 0
    for section in sections:
        found.append(memory[at : at + section.bytes].view(section.kind).reshape(section.shape))
        at += -(-section.bytes // _ALIGNMENT) * _ALIGNMENT
    return found


class Share(NamedTuple):
    """What one rank gets of a dispatch."""

    #: Tokens that it gets, ascending, each once.
    tokens: numpy.ndarray
    #: Local expert and row in `tokens` of each pair of an expert and a token, ordered by expert, then by token.
    experts: numpy.ndarray
    rows: numpy.ndarray


class Routing:
    """Choices of experts by tokens, `topk_idx` of (tokens, choices); -1 chooses none.

    ValueError for a choice that is no expert. An expert that a token chooses twice computes it once.
    """

    def __init__(self, topk_idx, num_experts, num_ranks):
        self.topk_idx, self.num_experts, self.num_ranks = topk_idx, num_experts, num_ranks
        self.experts_per_rank = num_experts // num_ranks
        wrong = (topk_idx < -1) | (topk_idx >= num_experts)
        if wrong.any():
            token, choice = numpy.argwhere(wrong)[0]
            raise ValueError(
                f"topk_idx[{token}, {choice}] is {topk_idx[token, choice]}: an expert is 0 to {num_experts - 1}, or -1 "
                "for none"
            )
        tokens, choices = numpy.nonzero(topk_idx >= 0)
        # Pairs are sorted by expert, then by token.
        pairs = numpy.unique(topk_idx[tokens, choices] * max(len(topk_idx), 1) + tokens)
        self._experts, self._tokens = numpy.divmod(pairs, max(len(topk_idx), 1))
        firsts = numpy.arange(num_ranks + 1) * self.experts_per_rank
        self._bounds = numpy.searchsorted(self._experts, firsts)

    def share(self, rank):
        """Returns what a rank gets."""
        part = slice(self._bounds[rank], self._bounds[rank + 1])
        tokens, rows = numpy.unique(self._tokens[part], return_inverse=True)
        return Share(tokens, self._experts[part] - rank * self.experts_per_rank, rows.reshape(-1))


NO_SHARE = Share(*(numpy.empty(0, numpy.int64) for _ in range(3)))


# Dispatch into the layout of experts: each expert has room for `max` tokens of each rank.


def dispatch_sections(rows, pairs, experts, row_bytes, scales):
    """Sections of a message of `rows` tokens for `pairs` pairs of an expert and a token.

    In order: pairs of each local expert; number of each token at its source; row of each pair; scales; tokens.
    """
    return (
        Section("<i4", (experts,)),
        Section("<i4", (rows,)),
        Section("<i4", (pairs,)),
        Section("<f4", (rows, scales)),
        Section("u1", (rows, row_bytes)),
    )


def fill_dispatch(sections, share, data, scales):
    """Writes a message: `data` are the rows of all tokens as bytes, `scales` theirs (of width 0 without float8)."""
    counts, tokens, rows, into_scales, into_data = sections
    counts[:] = numpy.bincount(share.experts, minlength=len(counts))
    tokens[:] = share.tokens
    rows[:] = share.rows
    _take(scales, share.tokens, into_scales)
    _take(data, share.tokens, into_data)


class ExpertLayout:
    """Arrays of a dispatch at the rank of the experts, and where each source's tokens lie in them.

    An expert's tokens are grouped by source, ascending, those of a source in its order. Rows that are not used are 0,
    and -1 in `src_info`.
    """

    def __init__(self, experts, ranks, capacity, row_bytes, scales):
        rows = ranks * capacity
        self.data = numpy.zeros((experts, rows, row_bytes), numpy.uint8)
        #: (experts, rows, scales), of which the rows are contiguous.
        self.scales = numpy.zeros((experts, scales, rows), numpy.float32).transpose(0, 2, 1)
        self.count = numpy.zeros(experts, numpy.int32)
        self.src_info = numpy.full((experts, rows), -1, numpy.int32)
        self.layout_range = numpy.zeros((experts, ranks), numpy.int64)
        self._ranks = ranks

    def fill(self, messages):
        """Stores the messages, by source; None for a source without one."""
        experts, rows = self.src_info.shape
        counts = numpy.zeros((experts, self._ranks), numpy.int64)
        for source, message in enumerate(messages):
            if message is not None:
                counts[:, source] = message[0]
        begins = numpy.cumsum(counts, axis=1) - counts
        self.layout_range[:] = (begins << 32) | counts
        self.count[:] = counts.sum(axis=1)
        data = self.data.reshape(experts * rows, -1)
        scales = self.scales.transpose(0, 2, 1)
        for source, message in enumerate(messages):
            if message is None:
                continue
            _, tokens, taken, their_scales, their_data = message
            expert, place = spans(begins[:, source], counts[:, source])
            self.src_info[expert, place] = tokens[taken]
            data[expert * rows + place] = their_data[taken]
            if their_scales.shape[1]:
                scales[expert, :, place] = their_scales[taken]


def spans(begins, counts):
    """Returns the row (of `begins`) and the position of every element of the spans, span by span."""
    owner = numpy.repeat(numpy.arange(len(counts)), counts)
    within = numpy.arange(len(owner)) - numpy.repeat(numpy.cumsum(counts) - counts, counts)
    return owner, begins[owner] + within


# Combine from the layout of experts.


def source_spans(layout_range, rows):
    """Returns for each source the local expert and the place of each of its tokens, by a handle's `layout_range`.

    ValueError for a span that is not within the `rows` of an expert.
    """
    begins, counts = layout_range >> 32, layout_range & 0xFFFFFFFF
    wrong = (begins < 0) | (begins + counts > rows)
    if wrong.any():
        expert, source = numpy.argwhere(wrong)[0]
        begin, count = begins[expert, source], counts[expert, source]
        raise ValueError(
            f"layout_range[{expert}, {source}] of the handle is {count} rows from {begin} on; an expert has {rows}"
        )
    return [spans(begins[:, source], counts[:, source]) for source in range(layout_range.shape[1])]


def combine_sections(pairs, row_bytes):
    """Sections of a message: expert and token of each output, then the outputs."""
    return Section("<i4", (pairs,)), Section("<i4", (pairs,)), Section("u1", (pairs, row_bytes))


def fill_combine(sections, x, src_info, expert, place, first_expert):
    """Writes the message to a source: outputs `x`, (experts, rows, bytes), of the tokens at `expert` and `place`."""
    experts, tokens, data = sections
    experts[:] = expert + first_expert
    tokens[:] = src_info[expert, place]
    _take(x.reshape(-1, x.shape[2]), expert * x.shape[1] + place, data)


class Arrivals:
    """Rows that have arrived from all ranks, found by keys; a key is there once."""

    def __init__(self):
        self._keys, self._data = [], []

    def add(self, keys, data):
        """Adds rows of one rank."""
        self._keys.append(keys)
        self._data.append(data)

    def find(self, wanted):
        """Returns the row of each key, -1 where none has arrived, and all rows as words of 16 bits."""
        if not self._keys:
            return numpy.full(wanted.shape, -1), numpy.empty((0, 0), numpy.uint16)
        keys, data = numpy.concatenate(self._keys), numpy.concatenate(self._data).view(numpy.uint16)
        if not len(keys):
            return numpy.full(wanted.shape, -1), data
        order = numpy.argsort(keys, kind="stable")
        at = numpy.minimum(numpy.searchsorted(keys[order], wanted), len(keys) - 1)
        return numpy.where(keys[order][at] == wanted, order[at], -1), data


def tokens_in_range(tokens, count):
    """ValueError for a token that this rank does not have: the outputs are those of another dispatch."""
    if len(tokens) and not (tokens.min() >= 0 and tokens.max() < count):
        raise ValueError(
            f"outputs of token {tokens.max()} arrive, and topk_idx has {count} tokens: combine takes the topk_idx of "
            "the dispatch"
        )


def weighted_sum(rows, words, weights, out):
    """Adds up `words[rows[t, k]]` (bfloat16) in float32, times `weights[t, k]` if given, in the order of k; -1 is none.

    `out` is float32 of (tokens, columns), and keeps what it has as the first summand.
    """
    for choice in range(rows.shape[1]):
        tokens = numpy.nonzero(rows[:, choice] >= 0)[0]
        if not len(tokens):
            continue
        values = _floats.bf16_to_f32(words[rows[tokens, choice]])
        if weights is not None:
            values *= weights[tokens, choice][:, None]
        out[tokens] += values


def _take(source, rows, into):
    """Copies rows of a two-dimensional array."""
    if into.size:
        # Rows were checked; `clip` spares numpy a copy of the target.
        numpy.take(source, rows, axis=0, out=into, mode="clip")
