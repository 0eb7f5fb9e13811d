"""Expert parallelism: dispatch of tokens to the ranks of their experts, and combine of what the experts make of them.

The calls and layouts are those of Mooncake's `Buffer`, on tensors in host memory (or numpy arrays, see
`mooncake._expert_arrays`), over any process group that has an all-to-all with splits: torch's, or `kvplane`'s.
docs/expert-parallelism.md describes layouts and failures.
"""

import numpy

from mooncake import _expert_arrays, _exchange, _experts, _floats

#: Time for the ranks to find each other, when a buffer is made or its members are updated.
_CONNECT_S = 300.0


def get_ep_buffer_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts):
    """Bytes that Mooncake's buffers on devices need: two pairs of buffers, each for signals and for the tokens of all
    experts in bfloat16. Buffers here take memory as it is needed, and at most so much."""
    del num_ranks
    signals = 4 * num_experts
    tokens = num_experts * num_max_dispatch_tokens_per_rank * (2 * 16 + 2 * hidden)
    return 4 * (signals + tokens)


class EventHandle:
    """The end of a call, on which a caller waits; without one, it is over already. `stream_ptr` has no meaning here."""

    def __init__(self, stream_ptr=0):
        del stream_ptr
        self._finish = None

    @classmethod
    def _of(cls, finish):
        made = cls()
        made._finish = finish
        return made

    def current_stream_wait(self, stream_ptr=0):
        """Waits for the end of the call: the caller's thread is the stream. Raises what the call raises."""
        del stream_ptr
        self.synchronize()

    def synchronize(self):
        """Waits for the end of the call; raises what the call raises."""
        # An error leaves the event as it is, so that a second wait raises again.
        if self._finish is not None:
            self._finish()
            self._finish = None


class EventOverlap:
    """Waits for a call, also as a context manager, at whose end it waits. `extra_tensors` live as long as it does."""

    def __init__(self, event=None, extra_tensors=None):
        self.event = event
        self.extra_tensors = extra_tensors
        self._release = False

    def current_stream_wait(self, release_handle=False):
        """Waits for the end of the call, and gives up the event if `release_handle`. ValueError without an event."""
        if self.event is None:
            raise ValueError("there is no event to wait for")
        self.event.current_stream_wait()
        if release_handle:
            self.event = None

    def __call__(self, release_handle=False):
        """Says whether the context manager gives up the event at its end; returns itself."""
        self._release = release_handle
        return self

    def __enter__(self):
        return self

    def __exit__(self, exc_type, exc_val, exc_tb):
        if self.event is not None:
            self.current_stream_wait(self._release)
        self._release = False


def _once(finish):
    """Makes a function that runs once: a hook may be called again."""
    done = False

    def hook():
        nonlocal done
        if not done:
            finish()
            done = True

    return hook


class Buffer:
    """Dispatch and combine over a process group; all its ranks make the same calls in the same order.

    `num_ep_buffer_bytes` limits what a dispatch may need by `get_ep_buffer_size_hint`; 0 is no limit. `disable_p2p`
    forbids access from device to device, which there is none of here. One thread at a time may call.
    """

    def __init__(self, group, num_ep_buffer_bytes=0, disable_p2p=False):
        self.group = self.backend = group
        self.num_ep_buffer_bytes = num_ep_buffer_bytes
        self.disable_p2p = disable_p2p
        self._exchange = _exchange.Exchange(group)
        self._combine_buffer = (None, None)
        self.connect()

    def connect(self, is_update=False):
        """Finds the group's ranks again; a call of all of them. `is_update` makes no difference here."""
        del is_update
        self._exchange.connect(_CONNECT_S)
        self.rank, self.group_size = self._exchange.rank, self._exchange.size

    def update_ep_member(self):
        """Takes the group's members as they are now: all ranks call it after a change of members, and a rank that has
        joined makes its buffer meanwhile. `group_size` grows with the group, and never falls."""
        self.connect(True)

    @staticmethod
    def get_ep_buffer_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts):
        """As the function of this module."""
        return get_ep_buffer_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    def dispatch(
        self,
        x,
        topk_idx,
        active_ranks,
        num_max_dispatch_tokens_per_rank,
        num_experts,
        timeout_us,
        use_fp8=None,
        async_finish=False,
        return_recv_hook=False,
    ):
        """Sends tokens to the ranks of their experts.

        `x` is bfloat16 of (tokens, hidden), `topk_idx` int64 of (tokens, choices), with -1 for none. `active_ranks`,
        int32 of (ranks), is changed in place: a source that does not answer within `timeout_us` (-1: without limit)
        becomes 0, and its tokens are absent; a rank that is 0 already is left out. None stands for all ranks, as does
        an array of another length. `use_fp8` is true unless it is set.

        Returns `recv_x`, `recv_count`, `handle`, `event` and `hook`. With `return_recv_hook` everything is received
        when `hook()` is called, with `async_finish` when the event is waited for, otherwise at once.

        TypeError and ValueError for arguments; `RankMismatch` when ranks make different calls; `SourceTimeout` when the
        group cannot go on without a source.
        """
        if async_finish and return_recv_hook:
            raise ValueError("async_finish and return_recv_hook exclude each other: one of them ends the call")
        rows = _expert_arrays.array_of(x, "x", ["bfloat16"], 2)
        chosen = _expert_arrays.array_of(topk_idx, "topk_idx", ["int64"], 2)
        capacity, ranks = _whole(num_max_dispatch_tokens_per_rank, "num_max_dispatch_tokens_per_rank"), self.group_size
        tokens, hidden = rows.shape
        if len(chosen) != tokens:
            raise ValueError(f"x has {tokens} tokens, topk_idx {len(chosen)}")
        if not chosen.shape[1]:
            raise ValueError("topk_idx has no choices: its second dimension is 0")
        if tokens > capacity:
            raise ValueError(f"x has {tokens} tokens: more than num_max_dispatch_tokens_per_rank, {capacity}")
        if hidden % _floats.SCALE_COLUMNS or not hidden:
            raise ValueError(f"x has {hidden} columns: they must be a multiple of {_floats.SCALE_COLUMNS}")
        experts = _whole(num_experts, "num_experts")
        if experts % ranks:
            raise ValueError(f"{experts} experts cannot be divided among {ranks} ranks evenly")
        needed = get_ep_buffer_size_hint(capacity, hidden, ranks, experts)
        if 0 < self.num_ep_buffer_bytes < needed:
            raise ValueError(
                f"a dispatch of {capacity} tokens of {hidden} columns to {experts} experts needs {needed} bytes, and "
                f"the buffer was made for {self.num_ep_buffer_bytes}"
            )
        mask = self._mask(active_ranks)
        timeout = _seconds(timeout_us)
        use_fp8 = use_fp8 is None or bool(use_fp8)
        routing = _experts.Routing(chosen, experts, ranks)
        shares = [routing.share(rank) if mask[rank] else _experts.NO_SHARE for rank in range(ranks)]

        if use_fp8:
            data, scales = _floats.scaled_to_e4m3(rows)
        else:
            data, scales = _expert_arrays.bytes_of(rows), numpy.empty((tokens, 0), numpy.float32)
        local, row_bytes, width = experts // ranks, data.shape[1], scales.shape[1]
        layout = _experts.ExpertLayout(local, ranks, capacity, row_bytes, width)
        flight = self._exchange.start(
            "dispatch",
            (experts, capacity, hidden, chosen.shape[1], 1 if use_fp8 else 2, 4 * width),
            [(len(share.tokens), len(share.rows)) for share in shares],
            lambda rows, pairs: _experts.dispatch_sections(rows, pairs, local, row_bytes, width),
            lambda rank, arrays: _experts.fill_dispatch(arrays, shares[rank], data, scales),
            mask,
            timeout,
        )

        def finish():
            layout.fill(flight.messages())

        kind = "float8_e4m3fn" if use_fp8 else "bfloat16"
        received = layout.data if use_fp8 else layout.data.view(numpy.uint16)
        received = _expert_arrays.like(x, received, kind)
        if use_fp8:
            received = received, _expert_arrays.like(x, layout.scales, "float32")
        count, src_info = _expert_arrays.like(x, layout.count, "int32"), _expert_arrays.like(x, layout.src_info, "int32")
        layout_range = _expert_arrays.like(x, layout.layout_range, "int64")
        handle = src_info, layout_range, capacity, hidden, experts
        event, hook = self._end(finish, async_finish, return_recv_hook, (x, topk_idx, received, count, handle))
        return received, count, handle, event, hook

    def combine(
        self,
        x,
        topk_idx,
        topk_weights,
        active_ranks,
        timeout_us,
        handle,
        zero_copy=False,
        async_finish=False,
        return_recv_hook=False,
        out=None,
    ):
        """Returns the experts' outputs to where their tokens came from, and adds them up there.

        `x` is bfloat16 in the layout of the dispatch that returned `handle`; with `zero_copy` it is in
        `get_next_combine_buffer(handle)`, whatever `x` is. Each token gets the sum, in float32 and in the order of its
        choices, of the outputs times `topk_weights` (float32 of (tokens, choices)); masked choices, and experts of
        ranks that are 0 in `active_ranks`, count as absent. `out`, if given, receives the result.

        Returns the result, `event` and `hook`. Errors, and when it is complete, as in `dispatch`.
        """
        if async_finish and return_recv_hook:
            raise ValueError("async_finish and return_recv_hook exclude each other: one of them ends the call")
        sources, ranges, capacity, hidden, experts = handle
        ranks, local = self.group_size, experts // self.group_size
        if zero_copy:
            owner, x = self._combine_buffer
            if owner is not sources:
                raise ValueError("zero_copy takes what get_next_combine_buffer(handle) returned for the same handle")
        outputs = _expert_arrays.array_of(x, "x", ["bfloat16"], 3)
        if outputs.shape != (local, ranks * capacity, hidden):
            raise ValueError(f"x has the shape {outputs.shape}, the handle {(local, ranks * capacity, hidden)}")
        chosen = _expert_arrays.array_of(topk_idx, "topk_idx", ["int64"], 2)
        weights = _expert_arrays.array_of(topk_weights, "topk_weights", ["float32"], 2)
        if chosen.shape != weights.shape:
            raise ValueError(f"topk_idx has the shape {chosen.shape}, topk_weights {weights.shape}")
        tokens = len(chosen)
        if tokens > capacity:
            raise ValueError(f"topk_idx has {tokens} tokens: more than num_max_dispatch_tokens_per_rank, {capacity}")
        _experts.Routing(chosen, experts, ranks)
        src_info = _expert_arrays.array_of(sources, "src_info of the handle", ["int32"], 2)
        layout_range = _expert_arrays.array_of(ranges, "layout_range of the handle", ["int64"], 2)
        if layout_range.shape != (local, ranks):
            raise ValueError(f"the handle is of a dispatch among {layout_range.shape[1]} ranks; there are {ranks}")
        if src_info.shape != (local, ranks * capacity):
            raise ValueError(f"src_info of the handle has the shape {src_info.shape}, x {outputs.shape}")
        spans = _experts.source_spans(layout_range, ranks * capacity)
        if out is None:
            combined = numpy.empty((tokens, hidden), numpy.uint16)
            out = _expert_arrays.like(x, combined, "bfloat16")
        else:
            combined = _expert_arrays.array_of(out, "out", ["bfloat16"], 2)
            if combined.shape != (tokens, hidden):
                raise ValueError(f"out has the shape {combined.shape}, the result {(tokens, hidden)}")
        mask = self._mask(active_ranks)
        timeout = _seconds(timeout_us)
        as_bytes = outputs.view(numpy.uint8)
        flight = self._exchange.start(
            "combine",
            (experts, capacity, hidden, chosen.shape[1], 2, 0),
            [(len(expert), 0) for expert, _ in spans],
            lambda rows, _: _experts.combine_sections(rows, 2 * hidden),
            lambda rank, arrays: _experts.fill_combine(arrays, as_bytes, src_info, *spans[rank], self.rank * local),
            mask,
            timeout,
        )

        def finish():
            arrivals = _experts.Arrivals()
            for message in flight.messages():
                if message is not None:
                    owners, theirs, data = message
                    _experts.tokens_in_range(theirs, tokens)
                    arrivals.add(owners.astype(numpy.int64) * tokens + theirs, data)
            wanted = numpy.where(chosen < 0, -1, chosen * tokens + numpy.arange(tokens)[:, None])
            rows, words = arrivals.find(wanted)
            sums = numpy.zeros((tokens, hidden), numpy.float32)
            _experts.weighted_sum(rows, words, weights, sums)
            combined[:] = _floats.f32_to_bf16(sums)

        event, hook = self._end(finish, async_finish, return_recv_hook, (x, topk_idx, topk_weights, handle, out))
        return out, event, hook

    def get_next_combine_buffer(self, handle):
        """Returns an array for the experts' outputs of a dispatch, which `combine(..., zero_copy=True)` sends.

        Mooncake raises NotImplementedError; DeepEP has it. It is the buffer's, and zeros when it is made; a call for
        another handle makes another.
        """
        sources, ranges, capacity, hidden, experts = handle
        owner, array = self._combine_buffer
        if owner is not sources:
            zeros = numpy.zeros((experts // self.group_size, self.group_size * capacity, hidden), numpy.uint16)
            array = _expert_arrays.like(sources, zeros, "bfloat16")
            self._combine_buffer = sources, array
        return array

    def _mask(self, active_ranks):
        if active_ranks is None:
            return numpy.ones(self.group_size, numpy.int32)
        mask = _expert_arrays.array_of(active_ranks, "active_ranks", ["int32"], 1)
        return mask if len(mask) == self.group_size else numpy.ones(self.group_size, numpy.int32)

    @staticmethod
    def _end(finish, async_finish, return_recv_hook, kept):
        """Event and hook of a call: it ends with one of them, or now."""
        if return_recv_hook:
            finish = _once(finish)
            return EventOverlap(EventHandle._of(finish)), finish
        if async_finish:
            return EventOverlap(EventHandle._of(finish), kept), None
        finish()
        return EventOverlap(EventHandle()), None


def _whole(value, name):
    """A number of things, at least 1."""
    if isinstance(value, bool) or int(value) != value or value < 1:
        raise ValueError(f"{name} is {value}: it must be a whole number of at least 1")
    return int(value)


def _seconds(timeout_us):
    """A limit in microseconds as seconds; None for -1."""
    if timeout_us == -1:
        return None
    if timeout_us < 0:
        raise ValueError(f"timeout_us is {timeout_us}: it must be at least 0, or -1 for no limit")
    return timeout_us / 1e6


__all__ = ["Buffer", "EventHandle", "EventOverlap", "get_ep_buffer_size_hint"]
