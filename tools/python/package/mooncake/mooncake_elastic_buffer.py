"""`ElasticBuffer`: DeepEP's second interface, as Mooncake has it, on tensors in host memory or numpy arrays.

docs/expert-parallelism.md describes layouts and failures.
"""

import os

import numpy

from kvplane._buffers import is_tensor
from mooncake import _expert_arrays, _exchange, _experts, _floats, _tokens
from mooncake.mooncake_ep_buffer import EventHandle, EventOverlap

#: Sizes of the workspace of Mooncake's buffers on devices, which the size hints count.
_RANKS, _EXPERTS, _CHANNELS, _TAGS, _GATHERS = 1024, 2048, 8 * 160, 16, 32


def _align(value, alignment):
    return -(-value // alignment) * alignment


def _workspace_bytes():
    """Bytes of the workspace on a device: barriers, counters of ranks and experts, and lists of channels."""
    barriers = _TAGS * (8 + 2 * 4 * _RANKS)
    ranks = _RANKS * (8 + 2 * 8 + 4 + 2 * 4 + 12 * _CHANNELS + 4 * (_GATHERS + 1))
    experts = _EXPERTS * (8 + 2 * 8 + 2 * 4)
    return _align(barriers + ranks + experts + 2 * 2 * 8, 32)


def calculate_elastic_buffer_size(
    num_ranks, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch, allow_hybrid_mode, allow_multiple_reduction
):
    """Bytes that Mooncake's elastic buffers on devices need; those here take memory as they need it."""
    num_topk = max(1, num_topk)
    row = _align(hidden * (1 if use_fp8_dispatch else 2), 32)
    scales = _align(-(-hidden // 128) * 4, 32) if use_fp8_dispatch else 0
    metadata = _align(8 * num_topk + 4 * (1 + num_topk), 32)
    dispatch = 2 * num_ranks * num_max_tokens_per_rank * num_topk * (row + scales + metadata)
    factor = (1 + (3 if allow_multiple_reduction else 4)) * (2 if allow_hybrid_mode and num_ranks > 1 else 1)
    return 2 * _workspace_bytes() + factor * dispatch


class EPHandle:
    """What a dispatch leaves for its combine, and for dispatches of other tokens by the same choices.

    `psum_num_recv_tokens_per_scaleup_rank`: tokens of all sources up to each. `psum_num_recv_tokens_per_expert`: sums
    of the experts' aligned counts up to each; expanded, the sum before the expert plus its own count.
    `recv_src_metadata` has a row for each token: its number (source times the most tokens of a rank, plus its number
    there), its source times choices plus its first choice here, and its rows of the expanded layout, -1 where there is
    none. `dst_buffer_slot_idx`: where each token lies among this rank's at its receivers, at its first choice of each.
    `native_handle` is the end of the dispatch, for which a combine waits.
    """

    def __init__(
        self,
        do_expand,
        num_experts,
        expert_alignment,
        num_max_tokens_per_rank,
        num_sms,
        topk_idx,
        num_recv_tokens_per_expert_list,
        psum_num_recv_tokens_per_scaleup_rank,
        psum_num_recv_tokens_per_expert,
        recv_src_metadata,
        dst_buffer_slot_idx,
        token_metadata_at_forward,
        channel_linked_list,
        native_handle=None,
        num_unaligned_recv_tokens_per_expert=None,
    ):
        if topk_idx is None:
            raise ValueError("a handle needs the topk_idx of its dispatch")
        self.do_expand = do_expand
        self.num_experts = num_experts
        self.expert_alignment = expert_alignment
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_sms = num_sms
        self.topk_idx = topk_idx
        self.num_recv_tokens_per_expert_list = num_recv_tokens_per_expert_list
        self.psum_num_recv_tokens_per_scaleup_rank = psum_num_recv_tokens_per_scaleup_rank
        self.psum_num_recv_tokens_per_expert = psum_num_recv_tokens_per_expert
        self.num_unaligned_recv_tokens_per_expert = num_unaligned_recv_tokens_per_expert
        self.recv_src_metadata = recv_src_metadata
        self.dst_buffer_slot_idx = dst_buffer_slot_idx
        self.token_metadata_at_forward = token_metadata_at_forward
        self.channel_linked_list = channel_linked_list
        self.native_handle = native_handle
        self.num_recv_tokens = int(recv_src_metadata.shape[0])


def _of_devices(name, instead):
    """A call that has no meaning without a device."""

    def call(self, *arguments, **keywords):
        raise NotImplementedError(f"ElasticBuffer.{name} is for buffers on devices: {instead}")

    call.__name__ = name
    call.__doc__ = f"Raises NotImplementedError: {instead}."
    return call


class ElasticBuffer:
    """Dispatch and combine over a process group; all its ranks make the same calls in the same order.

    The buffer holds no memory between calls: `num_bytes`, or the shape that it is made for, only limits what a dispatch
    may need by the size hint. `num_cpu_timeout_secs` limits the wait for a source. There is one domain of all ranks,
    whatever `allow_hybrid_mode` says, and every dispatch is deterministic. What is about streams, SMs and queue pairs
    of a device (`prefer_overlap_with_compute`, `sl_idx`, `num_allocated_qps`, `num_gpu_timeout_secs`, `num_sms`) is
    kept for callers that read it. One thread at a time may call.

    `active_ranks` (int32 of ranks, of this package) has 0 for each source that a call has missed; its tokens, and the
    outputs of its experts, are absent.
    """

    def __init__(
        self,
        group,
        num_bytes=None,
        num_max_tokens_per_rank=0,
        hidden=0,
        num_topk=0,
        use_fp8_dispatch=False,
        deterministic=False,
        allow_hybrid_mode=True,
        allow_multiple_reduction=True,
        prefer_overlap_with_compute=True,
        sl_idx=3,
        num_allocated_qps=0,
        num_cpu_timeout_secs=300,
        num_gpu_timeout_secs=100,
        explicitly_destroy=False,
    ):
        self.group = self.backend = group
        self.num_max_tokens_per_rank, self.hidden, self.num_topk = num_max_tokens_per_rank, hidden, num_topk
        self.use_fp8_dispatch, self.deterministic = use_fp8_dispatch, deterministic
        self.allow_hybrid_mode, self.allow_multiple_reduction = allow_hybrid_mode, allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.sl_idx = int(os.getenv("EP_OVERRIDE_RDMA_SL", sl_idx))
        self.num_allocated_qps = num_allocated_qps
        self.num_cpu_timeout_secs, self.num_gpu_timeout_secs = num_cpu_timeout_secs, num_gpu_timeout_secs
        self.explicitly_destroy = explicitly_destroy
        # Without a size and without a shape, nothing is known that could be a limit.
        self._limited = num_bytes is not None or bool(num_max_tokens_per_rank and hidden and num_topk)
        self._exchange = _exchange.Exchange(group)
        self._connect()
        if num_bytes is None:
            num_bytes = self._bytes(num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch)
        self.num_bytes = num_bytes

    def _connect(self):
        self.active_ranks = self._exchange.connect(self.num_cpu_timeout_secs)
        self.rank_idx, self.num_ranks = self._exchange.rank, self._exchange.size
        self.num_scaleout_ranks, self.num_scaleup_ranks = self.get_logical_domain_size()
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, self.num_scaleup_ranks)
        self.num_rdma_ranks, self.num_nvlink_ranks = self.get_physical_domain_size()

    def _bytes(self, num_max_tokens_per_rank, hidden, num_topk, use_fp8):
        modes = self.allow_hybrid_mode, self.allow_multiple_reduction
        return calculate_elastic_buffer_size(self.num_ranks, num_max_tokens_per_rank, hidden, num_topk, use_fp8, *modes)

    def update_ep_member(self):
        """Takes the group's members as they are now: all ranks call it after a change of members, and a rank that has
        joined makes its buffer meanwhile. `num_ranks` grows with the group, and never falls."""
        self._there()
        self._connect()

    def destroy(self):
        """Ends the use of the buffer; further calls raise RuntimeError."""
        self._exchange = None

    def _there(self):
        if self._exchange is None:
            raise RuntimeError("the ElasticBuffer was destroyed")
        return self._exchange

    @staticmethod
    def get_buffer_size_hint(
        group,
        num_max_tokens_per_rank,
        hidden,
        num_topk=0,
        use_fp8_dispatch=False,
        allow_hybrid_mode=True,
        allow_multiple_reduction=True,
    ):
        """Bytes that a buffer on devices needs for dispatches of this shape."""
        # `size` is a method of torch's groups, and a property of ours.
        ranks = group.size() if callable(group.size) else group.size
        shape = ranks, num_max_tokens_per_rank, hidden, num_topk
        return calculate_elastic_buffer_size(*shape, use_fp8_dispatch, allow_hybrid_mode, allow_multiple_reduction)

    @staticmethod
    def get_engram_storage_size_hint(num_entries, hidden, num_max_tokens_per_rank, dtype=None):
        """Bytes of a storage of entries, and of those that are fetched at a time. `dtype` is bfloat16 unless given."""
        size = 2 if dtype is None else numpy.dtype(dtype).itemsize if isinstance(dtype, (type, str)) else dtype.itemsize
        scales = 4 * -(-hidden // 128) if size <= 1 else 0
        return _align(hidden * size + scales, 32) * (num_entries + num_max_tokens_per_rank)

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes, num_max_inflight_tensors):
        """Bytes for tensors that are sent to and received from the ranks before and after."""
        return _align(num_max_tensor_bytes, 32) * num_max_inflight_tensors * 2 * 2

    @staticmethod
    def get_agrs_buffer_size_hint(group, num_max_session_bytes):
        """Bytes for a session of all-gathers and reduce-scatters."""
        del group
        return num_max_session_bytes

    def get_physical_domain_size(self):
        """Hosts and ranks of a host: `MOONCAKE_EP_NUM_LOCAL_RANKS` says how many these are, 1 unless it is set."""
        local = int(os.getenv("MOONCAKE_EP_NUM_LOCAL_RANKS", "0"))
        local = max(1, min(local, self._there().size))
        return -(-self._there().size // local), local

    def get_logical_domain_size(self):
        """Domains and ranks of a domain: always one domain, as nothing is forwarded from rank to rank."""
        return 1, self._there().size

    def barrier(self, use_comm_stream=True, with_cpu_sync=False, sequential=True):
        """Returns when all ranks have called it. The arguments choose among streams of a device; there is none here."""
        del use_comm_stream, with_cpu_sync, sequential
        self.active_ranks &= self._there().agree("barrier", self.num_cpu_timeout_secs)

    @staticmethod
    def capture():
        """An event that is over: calls of the caller's thread are over when they return."""
        return EventHandle()

    get_theoretical_num_sms = _of_devices("get_theoretical_num_sms", "a CPU has no SMs")
    get_comm_stream = _of_devices("get_comm_stream", "the caller's thread takes the place of streams")
    engram_write = _of_devices("engram_write", "mooncake.store.EngramStore keeps tables of entries")
    engram_fetch = _of_devices("engram_fetch", "mooncake.store.EngramStore keeps tables of entries")
    pp_set_config = _of_devices("pp_set_config", "send and receive by the process group")
    pp_send = _of_devices("pp_send", "send by the process group")
    pp_recv = _of_devices("pp_recv", "receive by the process group")
    create_agrs_session = _of_devices("create_agrs_session", "gather and scatter by the process group")
    destroy_agrs_session = _of_devices("destroy_agrs_session", "gather and scatter by the process group")
    agrs_new_session = _of_devices("agrs_new_session", "gather and scatter by the process group")
    agrs_set_config = _of_devices("agrs_set_config", "gather and scatter by the process group")
    agrs_get_inplace_tensor = _of_devices("agrs_get_inplace_tensor", "gather and scatter by the process group")
    all_gather = _of_devices("all_gather", "gather by the process group")

    def dispatch(
        self,
        x,
        topk_idx=None,
        topk_weights=None,
        num_experts=None,
        num_max_tokens_per_rank=None,
        expert_alignment=None,
        handle=None,
        do_expand=False,
        do_cpu_sync=None,
        num_sms=None,
        async_with_compute_stream=False,
        *,
        cumulative_local_expert_recv_stats=None,
        previous_event=None,
        previous_event_before_epilogue=None,
        do_handle_copy=True,
        do_zero_padding=True,
        use_tma_aligned_col_major_sf=False,
    ):
        """Sends each token once to each rank that has experts of it.

        `x` is bfloat16 of (tokens, hidden), or a pair of float8 e4m3fn and its scales (tokens, packs of four bytes).
        `topk_idx` int64 and `topk_weights` float32 (or None) of (tokens, choices). With a `handle`, the choices are
        those of its dispatch, and `topk_idx` is None.

        Returns `recv_x` of the kind of `x`; `recv_topk_idx`, local experts or -1; `recv_topk_weights`; the handle; and
        an event. Not expanded, there is a row for each token; expanded, one for each pair of a token and a local
        expert, grouped by expert, and one weight for each row; rows of padding are 0, whatever `do_zero_padding` says.
        With `do_cpu_sync`, the default without a handle, arrays have as many rows as arrived, and the call waits for
        them; otherwise as many as could, and with `async_with_compute_stream` they are filled when the event is waited
        for.

        `cumulative_local_expert_recv_stats`, int32 of the local experts, is increased by their tokens. The previous
        events are waited for before anything is sent, and before anything is stored.
        """
        del do_zero_padding  # Padding is 0 in any case.
        exchange = self._there()
        if handle is not None:
            if topk_idx is not None:
                raise ValueError("topk_idx is that of the handle: give one of them")
            if do_cpu_sync:
                raise ValueError("do_cpu_sync is for dispatches without a handle")
            if do_expand and not handle.do_expand:
                raise ValueError("do_expand, and the handle is of a dispatch that was not expanded")
            topk_idx, do_expand, do_cpu_sync = handle.topk_idx, handle.do_expand, False
            for name, given in (
                ("num_experts", num_experts),
                ("expert_alignment", expert_alignment),
                ("num_max_tokens_per_rank", num_max_tokens_per_rank),
            ):
                if given is not None and given != getattr(handle, name):
                    raise ValueError(f"{name} is {given}, and {getattr(handle, name)} in the handle")
            num_experts, expert_alignment = handle.num_experts, handle.expert_alignment
            num_max_tokens_per_rank = handle.num_max_tokens_per_rank
            num_sms = handle.num_sms if num_sms is None else num_sms
        elif topk_idx is None:
            raise ValueError("topk_idx is missing, and there is no handle that has it")
        if num_experts is None:
            raise ValueError("num_experts is missing: other ranks could not know what this one takes it for")
        alignment = 1 if expert_alignment is None else expert_alignment
        do_cpu_sync = True if do_cpu_sync is None else do_cpu_sync

        given, sf = x if isinstance(x, tuple) else (x, None)
        rows = _expert_arrays.array_of(given, "x", ["bfloat16"] if sf is None else ["float8_e4m3fn"], 2)
        chosen = _expert_arrays.array_of(topk_idx, "topk_idx", ["int64"], 2)
        weights = None
        if topk_weights is not None:
            weights = _expert_arrays.array_of(topk_weights, "topk_weights", ["float32"], 2)
            if weights.shape != chosen.shape:
                raise ValueError(f"topk_weights has the shape {weights.shape}, topk_idx {chosen.shape}")
        tokens, hidden = rows.shape
        capacity = num_max_tokens_per_rank or self.num_max_tokens_per_rank or tokens
        if len(chosen) != tokens:
            raise ValueError(f"x has {tokens} tokens, topk_idx {len(chosen)}")
        if not chosen.shape[1]:
            raise ValueError("topk_idx has no choices: its second dimension is 0")
        if tokens > capacity:
            raise ValueError(f"x has {tokens} tokens: more than num_max_tokens_per_rank, {capacity}")
        if num_experts < 1 or num_experts % self.num_ranks:
            raise ValueError(f"{num_experts} experts cannot be divided among {self.num_ranks} ranks evenly")
        if alignment < 1:
            raise ValueError(f"expert_alignment is {alignment}: it must be at least 1")
        choices = chosen.shape[1]
        needed = self._bytes(capacity, hidden, choices, sf is not None)
        if self._limited and needed > self.num_bytes:
            raise ValueError(
                f"a dispatch of {capacity} tokens of {hidden} columns needs {needed} bytes, and the buffer was made "
                f"for {self.num_bytes}"
            )
        scales = numpy.empty((tokens, 0), numpy.uint8)
        if sf is not None:
            packs = numpy.ascontiguousarray(_expert_arrays.memory_of(sf))
            if packs.ndim != 2 or len(packs) != tokens or packs.itemsize != 4:
                raise ValueError(f"scales of the shape {packs.shape} of {packs.dtype} for {tokens} tokens")
            scales = _expert_arrays.bytes_of(packs)
        stats = None
        local = num_experts // self.num_ranks
        if cumulative_local_expert_recv_stats is not None:
            name = "cumulative_local_expert_recv_stats"
            stats = _expert_arrays.array_of(cumulative_local_expert_recv_stats, name, ["int32"], 1)
            if len(stats) != local:
                raise ValueError(f"{name} has {len(stats)} elements, this rank {local} experts")
        routing = _experts.Routing(chosen, num_experts, self.num_ranks)
        _tokens.check_distinct(chosen)
        _wait(previous_event)
        mask = self.active_ranks
        shares = [routing.share(rank) if mask[rank] else _experts.NO_SHARE for rank in range(self.num_ranks)]
        data = _expert_arrays.bytes_of(rows)
        widths = weights is not None, scales.shape[1], data.shape[1]
        flight = exchange.start(
            "elastic dispatch",
            # Ranks agree on whether there are weights by the sign of the choices.
            (num_experts, capacity, hidden, choices if weights is None else -choices, rows.itemsize, scales.shape[1]),
            [(len(share.tokens), 0) for share in shares],
            lambda rows, _: _tokens.dispatch_sections(rows, choices, *widths),
            lambda rank, arrays: _tokens.fill_dispatch(arrays, rank, shares[rank], routing, weights, scales, data),
            mask,
            self.num_cpu_timeout_secs,
        )

        def receive():
            _wait(previous_event_before_epilogue)
            received = _tokens.receive(flight.messages(), choices, local, capacity, alignment, *widths)
            if stats is not None:
                stats[:] += received.counts
            return received

        received, finish = (receive(), None) if do_cpu_sync else (None, receive)
        most = self.num_ranks * capacity
        if do_expand:
            most = most * min(choices, local) + (alignment - 1) * local
            rows_out = int(received.aligned.sum()) if do_cpu_sync else _align(most, alignment)
        else:
            rows_out = len(received.data) if do_cpu_sync else most
        arrived = len(received.data) if do_cpu_sync else self.num_ranks * capacity
        out = _Arrays(
            rows_out, arrived, choices, local, self.num_ranks, widths, do_expand, use_tma_aligned_col_major_sf
        )

        def store():
            out.store(received if do_cpu_sync else finish())

        recv_x = _expert_arrays.like(given, out.data.view(rows.dtype), _expert_arrays.kind_of(given))
        if sf is not None:
            scales_out = out.scales_of(packs.dtype)
            recv_x = recv_x, _expert_arrays.like(sf, scales_out, "scales")
        recv_topk_idx = _expert_arrays.like(given, out.experts, "int64")
        recv_topk_weights = None if weights is None else _expert_arrays.like(given, out.weights, "float32")
        slots = _tokens.slots(chosen, local, self.num_ranks, self.rank_idx, capacity)
        made = EPHandle(
            do_expand,
            num_experts,
            alignment,
            capacity,
            num_sms,
            _copy(topk_idx) if do_handle_copy and handle is None else topk_idx,
            received.aligned.tolist() if do_cpu_sync else [],
            _expert_arrays.like(given, out.of_ranks, "int32"),
            _expert_arrays.like(given, out.of_experts, "int32"),
            _expert_arrays.like(given, out.metadata, "int32"),
            _expert_arrays.like(given, slots, "int32"),
            None,
            None,
            num_unaligned_recv_tokens_per_expert=_expert_arrays.like(given, out.counts, "int32"),
        )
        kept = x, topk_idx, topk_weights, recv_x, recv_topk_idx, recv_topk_weights, made
        event = self._end(store, async_with_compute_stream and not do_cpu_sync, kept)
        made.native_handle = event.event
        return recv_x, recv_topk_idx, recv_topk_weights, made, event

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        num_sms=None,
        async_with_compute_stream=False,
        *,
        bias=None,
        previous_event=None,
        previous_event_before_epilogue=None,
    ):
        """Returns rows to where their tokens came from, and adds them up there, in float32 and in the order of the
        tokens' choices. The rows are what is added: weights are the caller's to apply.

        `x` is bfloat16 in the layout of the dispatch that returned `handle`. `topk_weights`, float32 of (tokens,
        choices), expanded of (rows), only returns to the tokens' source. Expanded, the rows of a token are added up,
        and rounded, before they return, unless the buffer was made with `allow_multiple_reduction=False`. `bias` is one
        or two arrays of the result's shape, which are added.

        Returns the result, the weights of (tokens, choices) or None, and an event.
        """
        del num_sms
        exchange = self._there()
        # A dispatch that nobody has waited for yet ends here, so that the handle is filled.
        if handle.native_handle is not None:
            handle.native_handle.synchronize()
        words = _expert_arrays.array_of(x, "x", ["bfloat16"], 2)
        chosen = _expert_arrays.array_of(handle.topk_idx, "topk_idx of the handle", ["int64"], 2)
        of_ranks = _expert_arrays.memory_of(handle.psum_num_recv_tokens_per_scaleup_rank)
        metadata = _expert_arrays.memory_of(handle.recv_src_metadata)
        tokens, choices = chosen.shape
        arrived, hidden = int(of_ranks[-1]), words.shape[1]
        # Offsets are rows of `x`: what is shorter than they say is another array.
        least = int(metadata[:arrived, 2:].max(initial=-1)) + 1 if handle.do_expand else arrived
        if len(words) < least:
            raise ValueError(f"x has {len(words)} rows, the dispatch of the handle {least}")
        weights = None
        if topk_weights is not None:
            if handle.do_expand and not self.allow_multiple_reduction:
                raise ValueError("topk_weights cannot return with rows one by one (allow_multiple_reduction=False)")
            weights = _expert_arrays.array_of(topk_weights, "topk_weights", ["float32"], 1 if handle.do_expand else 2)
            if len(weights) < least or (not handle.do_expand and weights.shape[1] != choices):
                raise ValueError(f"topk_weights has the shape {weights.shape}, for {least} rows and {choices} choices")
        biases = [_expert_arrays.array_of(one, "bias", ["bfloat16"], 2) for one in _several(bias)]
        for one in biases:
            if one.shape != (tokens, hidden):
                raise ValueError(f"bias has the shape {one.shape}, the result {(tokens, hidden)}")
        _wait(previous_event)
        capacity, reduce = handle.num_max_tokens_per_rank, self.allow_multiple_reduction
        parts = [
            _tokens.outputs(words, weights, metadata, of_ranks, rank, capacity, handle.do_expand, reduce)
            for rank in range(self.num_ranks)
        ]
        shape = choices if weights is None else -choices

        def fill(rank, arrays):
            keys, into_weights, rows = arrays
            keys[:] = parts[rank][0]
            if weights is not None:
                into_weights[:] = parts[rank][1]
            rows[:] = _expert_arrays.bytes_of(numpy.ascontiguousarray(parts[rank][2]))

        flight = exchange.start(
            "elastic combine",
            (handle.num_experts, capacity, hidden, shape, 2, 0),
            [(len(keys), 0) for keys, _, _ in parts],
            lambda rows, _: _tokens.combine_sections(rows, choices, weights is not None, 2 * hidden),
            fill,
            self.active_ranks,
            self.num_cpu_timeout_secs,
        )
        combined = numpy.empty((tokens, hidden), numpy.uint16)
        returned = None if weights is None else numpy.zeros((tokens, choices), numpy.float32)

        def finish():
            _wait(previous_event_before_epilogue)
            arrivals = _experts.Arrivals()
            _, owners = _tokens.first_choices(chosen, handle.num_experts // self.num_ranks)
            for source, message in enumerate(flight.messages()):
                if message is None:
                    continue
                keys, theirs, data = message
                _experts.tokens_in_range(keys // max(choices, 1), tokens)
                arrivals.add(keys, data)
                if returned is not None:
                    token = keys // choices
                    returned[token] += numpy.where(owners[token] == source, theirs, 0)
            rows, data = arrivals.find(numpy.arange(tokens * choices).reshape(tokens, choices))
            sums = numpy.zeros((tokens, hidden), numpy.float32)
            for one in biases:
                sums += _floats.bf16_to_f32(one)
            _experts.weighted_sum(rows, data, None, sums)
            combined[:] = _floats.f32_to_bf16(sums)

        out = _expert_arrays.like(x, combined, "bfloat16")
        weights_out = None if returned is None else _expert_arrays.like(x, returned, "float32")
        event = self._end(finish, async_with_compute_stream, (x, topk_weights, out, weights_out, handle))
        return out, weights_out, event

    @staticmethod
    def _end(finish, later, kept):
        if later:
            return EventOverlap(EventHandle._of(finish), kept)
        finish()
        return EventOverlap(EventHandle())


class _Arrays:
    """Results of a dispatch, in arrays of the size that the caller gets."""

    def __init__(self, rows, tokens, choices, experts, ranks, widths, expanded, columns):
        weighted, self._scale_bytes, row_bytes = widths
        self._expanded, self._columns = expanded, columns
        self.data = numpy.zeros((rows, row_bytes), numpy.uint8)
        self._scales = numpy.zeros((rows, self._scale_bytes), numpy.uint8)
        if columns:
            # Packs of four bytes, column by column, each column padded to 16 bytes.
            packs = numpy.zeros((self._scale_bytes // 4, _align(rows, 4)), numpy.uint32)
            self._scales = packs.T[:rows]
        self.experts = numpy.full((tokens, choices), -1, numpy.int64)
        self.weights = numpy.zeros(rows if expanded else (rows, choices), numpy.float32) if weighted else None
        self.metadata = numpy.full((tokens, 2 + choices), -1, numpy.int32)
        self.of_ranks, self.of_experts = numpy.zeros(ranks, numpy.int32), numpy.zeros(experts, numpy.int32)
        self.counts = numpy.zeros(experts, numpy.int32)

    def scales_of(self, kind):
        """The scales as elements of a type of four bytes."""
        return self._scales.view(kind)

    def store(self, received):
        """Stores what was received."""
        count = len(received.data)
        self.of_ranks[:] = received.of_ranks
        self.counts[:] = received.counts
        ends = numpy.cumsum(received.aligned)
        self.of_experts[:] = ends - received.aligned + received.counts if self._expanded else ends
        self.experts[:count] = received.experts
        self.metadata[:count] = received.metadata
        if not self._expanded:
            self.metadata[:count, 2:] = -1
            place = token = slice(count)
            weights = received.weights
        else:
            token, choice = numpy.nonzero(received.metadata[:, 2:] >= 0)
            place = received.metadata[token, 2 + choice]
            weights = None if received.weights is None else received.weights[token, choice]
        self.data[place] = received.data[token]
        scales = received.scales[token]
        self._scales[place] = scales.view(numpy.uint32) if self._columns else scales
        if weights is not None:
            self.weights[place] = weights


def _several(bias):
    if bias is None:
        return ()
    return bias if isinstance(bias, tuple) else (bias,)


def _copy(value):
    return value.clone() if is_tensor(value) else value.copy()


def _wait(event):
    if event is not None:
        event.current_stream_wait()


__all__ = ["EPHandle", "ElasticBuffer", "EventOverlap", "calculate_elastic_buffer_size"]
