"""Expert parallelism: layouts against a slow model, and dispatch then combine against the dense computation."""

import importlib
import inspect
import os
import pathlib
import struct
import sys
import threading
import unittest

try:
    import numpy
    import thread_groups
    from kvplane import Mismatch
    from mooncake import _exchange, _experts, _floats, ep
    from mooncake.mooncake_ep_buffer import Buffer
except ImportError as missing:
    numpy = None
    if missing.name != "numpy":
        raise

#: Seeds of the property tests.
SEEDS = int(os.environ.get("KVPLANE_EXPERT_SEEDS", "150"))
FIRST = int(os.environ.get("KVPLANE_EXPERT_SEED", "0"))
HAS_NUMPY = unittest.skipUnless(numpy, "numpy is not installed")


def bf16(values):
    """bfloat16 of one number, one at a time: half of the last place, ties to even."""
    (bits,) = struct.unpack("<I", struct.pack("<f", values))
    whole, rest = bits >> 16, bits & 0xFFFF
    return whole + (rest > 0x8000 or (rest == 0x8000 and whole & 1))


class Scenario:
    """What a seed draws: ranks, experts, tokens with their choices, and masks."""

    def __init__(self, seed, ranks=None):
        draw = self.draw = numpy.random.default_rng(seed)
        self.seed = seed
        self.ranks = ranks or int(draw.choice([1, 2, 3, 4, 8]))
        self.experts = self.ranks * int(draw.integers(1, 5))
        self.local = self.experts // self.ranks
        self.capacity = int(draw.integers(1, 13))
        self.hidden = int(draw.choice([128, 256]))
        self.choices = int(draw.integers(1, min(self.experts, 6) + 1))
        masked = draw.choice([0.0, 0.3, 1.0], p=[0.4, 0.5, 0.1])
        # Some experts are chosen by nobody, and some ranks have no tokens.
        popular = draw.random(self.experts) < draw.choice([0.4, 1.0])
        self.x, self.topk_idx, self.weights = [], [], []
        for _ in range(self.ranks):
            tokens = int(draw.integers(0, self.capacity + 1))
            scores = draw.random((tokens, self.experts)) * (0.01 + popular)
            chosen = numpy.argsort(-scores, axis=1)[:, : self.choices].astype(numpy.int64)
            chosen[draw.random(chosen.shape) < masked] = -1
            chosen[~popular[chosen] & (draw.random(chosen.shape) < 0.8)] = -1
            values = draw.standard_normal((tokens, self.hidden)) * 10.0 ** draw.integers(-3, 3, (tokens, 1))
            self.x.append(_floats.f32_to_bf16(values.astype(numpy.float32)))
            self.topk_idx.append(numpy.ascontiguousarray(chosen))
            self.weights.append(draw.random(chosen.shape).astype(numpy.float32))

    def expert(self, expert, words):
        """What an expert makes of rows of bfloat16."""
        values = _floats.bf16_to_f32(words)
        factor = numpy.float32(1 + expert / 8)
        return _floats.f32_to_bf16(values * factor + numpy.float32(expert) - values * values)

    def dense(self, rank, alive, quantized):
        """The sum for every token of a rank, token by token, over the experts on the ranks of `alive`."""
        words = self.x[rank]
        if quantized:
            codes, scales = _floats.scaled_to_e4m3(words)
            values = _floats.e4m3_to_f32(codes) * numpy.repeat(scales, 128, axis=1)
            words = _floats.f32_to_bf16(values)
        out = numpy.zeros((len(words), self.hidden), numpy.float32)
        for token, row in enumerate(self.topk_idx[rank]):
            for choice, expert in enumerate(row):
                if expert >= 0 and expert // self.local in alive:
                    made = self.expert(int(expert), words[token : token + 1])
                    out[token] += _floats.bf16_to_f32(made)[0] * self.weights[rank][token, choice]
        return _floats.f32_to_bf16(out)

    def compute(self, rank, received, quantized):
        """The local experts' outputs, in the layout of a dispatch."""
        words = received
        if quantized:
            codes, scales = received
            values = _floats.e4m3_to_f32(codes) * numpy.repeat(scales, 128, axis=2)
            words = _floats.f32_to_bf16(values)
        out = numpy.empty(words.shape, numpy.uint16)
        for local in range(self.local):
            out[local] = self.expert(rank * self.local + local, words[local])
        return out


def model(scenario, rank, sources):
    """What a rank receives in a dispatch without float8, element by element, from the ranks of `sources`."""
    ranks, capacity = scenario.ranks, scenario.capacity
    x, src, ranges = {}, {}, {}
    for local in range(scenario.local):
        at = 0
        for source in range(ranks):
            begin = at
            if source in sources:
                for token, row in enumerate(scenario.topk_idx[source].tolist()):
                    if rank * scenario.local + local in row:
                        x[local, at], src[local, at] = scenario.x[source][token], token
                        at += 1
            ranges[local, source] = (begin << 32) | (at - begin)
    data = numpy.zeros((scenario.local, ranks * capacity, scenario.hidden), numpy.uint16)
    src_info = numpy.full((scenario.local, ranks * capacity), -1, numpy.int32)
    layout = numpy.zeros((scenario.local, ranks), numpy.int64)
    for place, row in x.items():
        data[place], src_info[place] = row, src[place]
    for place, value in ranges.items():
        layout[place] = value
    return data, src_info, layout


@HAS_NUMPY
class Property(unittest.TestCase):
    """Random routings, masks, empty experts and dead ranks."""

    def check(self, seed, deaths=0, masked=0):
        scenario = Scenario(seed)
        draw, ranks = scenario.draw, scenario.ranks
        # Operations of a rank: 0 connects, 1 and 2 are a dispatch, 3 and 4 a combine.
        victims = draw.permutation(ranks)[: min(deaths, ranks - 1)]
        died = {int(rank): int(draw.integers(1, 5)) for rank in victims}
        left_out = {int(rank) for rank in draw.permutation(ranks)[: min(masked, ranks - 1)]}
        quantized, hooks, zero_copy = (bool(draw.integers(0, 2)) for _ in range(3))
        world = thread_groups.World(ranks, deaths=died.items())

        def body(group):
            rank = group.rank
            buffer = Buffer(group)
            mask = numpy.ones(ranks, numpy.int32)
            mask[list(left_out)] = 0
            arguments = scenario.topk_idx[rank], mask, scenario.capacity, scenario.experts, 1_000_000
            received, count, handle, event, hook = buffer.dispatch(
                scenario.x[rank], *arguments, use_fp8=quantized, async_finish=not hooks, return_recv_hook=hooks
            )
            hook() if hooks else event.current_stream_wait()
            dispatched = mask.copy()
            made = scenario.compute(rank, received, quantized)
            if zero_copy:
                buffer.get_next_combine_buffer(handle)[:] = made
            out, event, hook = buffer.combine(
                None if zero_copy else made,
                scenario.topk_idx[rank],
                scenario.weights[rank],
                mask,
                1_000_000,
                handle,
                zero_copy=zero_copy,
                async_finish=not hooks,
                return_recv_hook=hooks,
            )
            hook() if hooks else event.current_stream_wait()
            return received, count, handle, dispatched, mask, out

        for rank, result in enumerate(world.run(body)):
            self.assertEqual(result is None, rank in died)
            if result is None:
                continue
            received, count, handle, dispatched, mask, out = result
            there = {r for r in range(ranks) if r not in left_out and died.get(r, 9) > 2}
            self.assertEqual([int(one) for one in dispatched], [int(r in there) for r in range(ranks)])
            # Ranks that are left out by all neither get tokens nor outputs.
            data, src_info, layout = model(scenario, rank, set() if rank in left_out else there)
            numpy.testing.assert_array_equal(handle[0], src_info)
            numpy.testing.assert_array_equal(handle[1], layout)
            numpy.testing.assert_array_equal(count, (layout & 0xFFFFFFFF).sum(axis=1))
            self.assertEqual(handle[2:], (scenario.capacity, scenario.hidden, scenario.experts))
            if quantized:
                codes, scales = _floats.scaled_to_e4m3(data.reshape(-1, scenario.hidden))
                used = src_info >= 0
                numpy.testing.assert_array_equal(received[0][used], codes.reshape(data.shape)[used])
                numpy.testing.assert_array_equal(received[1][used], scales.reshape(*data.shape[:2], -1)[used])
                self.assertEqual(received[1].strides[1], 4)
            else:
                numpy.testing.assert_array_equal(received, data)
            alive = {r for r in range(ranks) if r not in left_out and r not in died}
            self.assertEqual([int(one) for one in mask], [int(r in alive) for r in range(ranks)])
            dense = scenario.dense(rank, set() if rank in left_out else alive, quantized)
            numpy.testing.assert_array_equal(out, dense)

    def test_dispatch_and_combine_equal_the_dense_computation(self):
        for seed in range(FIRST, FIRST + SEEDS):
            with self.subTest(f"KVPLANE_EXPERT_SEED={seed}"):
                self.check(seed)

    def test_with_dead_ranks(self):
        for seed in range(FIRST, FIRST + SEEDS):
            with self.subTest(f"KVPLANE_EXPERT_SEED={seed}"):
                self.check(seed, deaths=1 + seed % 3)

    def test_with_masked_ranks(self):
        for seed in range(FIRST, FIRST + SEEDS // 3):
            with self.subTest(f"KVPLANE_EXPERT_SEED={seed}"):
                self.check(seed, deaths=seed % 2, masked=1 + seed % 2)


def dispatch(buffer, scenario, mask=None, **options):
    """A dispatch of a scenario's tokens without float8, unless the options say otherwise."""
    rank = buffer.rank
    arguments = dict(
        x=scenario.x[rank],
        topk_idx=scenario.topk_idx[rank],
        active_ranks=mask,
        num_max_dispatch_tokens_per_rank=scenario.capacity,
        num_experts=scenario.experts,
        timeout_us=-1,
        use_fp8=False,
    )
    return buffer.dispatch(**{**arguments, **options})


def combine(buffer, scenario, made, handle, mask=None, **options):
    rank = buffer.rank
    arguments = made, scenario.topk_idx[rank], scenario.weights[rank], mask, -1, handle
    return buffer.combine(*arguments, **options)


def fixed(ranks, experts, x, topk_idx, capacity):
    """A scenario of given tokens: `x` and `topk_idx` by rank."""
    made = object.__new__(Scenario)
    made.ranks, made.experts, made.local, made.capacity = ranks, experts, experts // ranks, capacity
    made.x = [numpy.array([[value] * 128 for value in one], numpy.uint16).reshape(-1, 128) for one in x]
    made.topk_idx = [numpy.array(one, numpy.int64).reshape(len(x[at]), -1) for at, one in enumerate(topk_idx)]
    made.weights = [numpy.ones(one.shape, numpy.float32) for one in made.topk_idx]
    made.hidden, made.choices = 128, made.topk_idx[0].shape[1]
    return made


@HAS_NUMPY
class Layouts(unittest.TestCase):
    """Layouts, element types and messages, as written down."""

    def test_layout_of_two_ranks(self):
        #                  rank 0: tokens 1, 2, 3              rank 1: tokens 4, 5
        one = fixed(2, 4, [[1, 2, 3], [4, 5]], [[[0, 2], [2, -1], [3, 0]], [[2, 3], [0, 2]]], 4)
        for rank, result in enumerate(thread_groups.World(2).run(lambda group: dispatch(Buffer(group), one))):
            received, count, (src_info, layout, *numbers), _, hook = result
            self.assertIsNone(hook)
            self.assertEqual(received.shape, (2, 8, 128))
            # Expert by expert: the tokens of rank 0, then those of rank 1.
            wanted = [[[1, 3, 5], []], [[1, 2, 4, 5], [3, 4]]][rank]
            sources = [[[0, 2, 1], []], [[0, 1, 0, 1], [2, 0]]][rank]
            spans = [[[(0, 2), (2, 1)], [(0, 0), (0, 0)]], [[(0, 2), (2, 2)], [(0, 1), (1, 1)]]][rank]
            for local in range(2):
                size = len(wanted[local])
                self.assertEqual(count[local], size)
                self.assertEqual(received[local, :, 0].tolist(), wanted[local] + [0] * (8 - size))
                self.assertEqual(src_info[local].tolist(), sources[local] + [-1] * (8 - size))
                self.assertEqual(layout[local].tolist(), [begin << 32 | length for begin, length in spans[local]])
            kinds = [one.dtype for one in (received, count, src_info, layout)]
            self.assertEqual(kinds, [numpy.uint16, numpy.int32, numpy.int32, numpy.int64])
            self.assertEqual(numbers, [4, 128, 4])

    def test_a_token_that_chooses_an_expert_twice(self):
        # Computed once, added for both choices.
        one = fixed(1, 2, [[0x3F80]], [[[1, 1]]], 1)
        one.weights = [numpy.array([[0.5, 2.0]], numpy.float32)]

        def body(group):
            buffer = Buffer(group)
            received, count, handle, *_ = dispatch(buffer, one)
            return count.tolist(), _floats.bf16_to_f32(combine(buffer, one, received, handle)[0])[0, 0]

        self.assertEqual(thread_groups.World(1).run(body), [([0, 1], 2.5)])

    def test_ranks_agree_again_where_one_began_with_an_older_view(self):
        """The operation ends for all of them with a mismatch, once."""

        class Late:
            def __init__(self, group):
                self._group, self._begun = group, False

            def __getattr__(self, name):
                return getattr(self._group, name)

            def all_to_all(self, *arguments):
                if self._begun:
                    return self._group.all_to_all(*arguments)
                self._begun = True
                raise Mismatch(-1800, "the ranks call different operations")

        self.assertEqual(thread_groups.World(3).run(lambda group: Buffer(Late(group)).group_size), [3, 3, 3])

    def test_a_token_is_sent_once_to_each_rank(self):
        for choices in (1, 4):
            one = fixed(2, 8, [range(100), range(100)], [[[4, 5, 6, 7][:choices]] * 100] * 2, 100)

            def body(group):
                buffer = Buffer(group)
                before = group.sent
                dispatch(buffer, one)
                return group.sent - before

            sent = thread_groups.World(2).run(body)
            rows = 100 * (256 + 4 + 4 * choices)
            self.assertEqual(sent[0], 8 * _exchange.HEAD_WORDS + 8 + 4 * 4 + rows)

    def test_bfloat16(self):
        draw = numpy.random.default_rng(1)
        bits = numpy.concatenate(
            [
                draw.integers(0, 2**32, 20_000, dtype=numpy.uint32),
                (draw.integers(0, 2**16, 5_000, dtype=numpy.uint32) << 16) | 0x8000,
                numpy.array([0, 0x80000000, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 1], numpy.uint32),
            ]
        )
        values = bits.view(numpy.float32)
        words = _floats.f32_to_bf16(values)
        for value, word in zip(values.tolist(), words.tolist()):
            self.assertEqual(word, 0x7FC0 if value != value else bf16(value), value)
        every = numpy.arange(2**16, dtype=numpy.uint32).astype(numpy.uint16)
        back = _floats.f32_to_bf16(_floats.bf16_to_f32(every))
        numbers = (every & 0x7FFF) <= 0x7F80
        numpy.testing.assert_array_equal(back[numbers], every[numbers])

    def test_float8(self):
        codes = numpy.arange(256, dtype=numpy.uint8)
        values = _floats.e4m3_to_f32(codes)
        # Sign, four bits of exponent with bias 7, three of mantissa; the largest code is not a number.
        for code in range(0x7F):
            exponent, mantissa = code >> 3, code & 7
            wanted = (mantissa / 8) * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
            self.assertEqual((values[code], values[code | 0x80]), (wanted, -wanted))
        self.assertEqual(values[0x7E], 448)
        self.assertTrue(numpy.isnan(values[[0x7F, 0xFF]]).all())
        numpy.testing.assert_array_equal(_floats.f32_to_e4m3(values), codes)
        # The nearest value, of two equally near ones the even code.
        middle = (values[:0x7E] + values[1:0x7F]) / 2
        even = codes[:0x7E] + (codes[:0x7E] & 1)
        numpy.testing.assert_array_equal(_floats.f32_to_e4m3(middle), even)
        numpy.testing.assert_array_equal(_floats.f32_to_e4m3(numpy.nextafter(middle, numpy.float32(0))), codes[:0x7E])
        above = numpy.nextafter(middle, numpy.float32(1000))
        numpy.testing.assert_array_equal(_floats.f32_to_e4m3(-above), codes[1:0x7F] | 0x80)
        large = numpy.array([464, 464.0001, 479, 1e30, numpy.inf, -numpy.inf, numpy.nan], numpy.float32)
        self.assertEqual(_floats.f32_to_e4m3(large).tolist(), [0x7E, 0x7F, 0x7F, 0x7F, 0x7F, 0xFF, 0x7F])

    def test_scales(self):
        draw = numpy.random.default_rng(2)
        values = draw.standard_normal((40, 384)).astype(numpy.float32) * 10.0 ** draw.integers(-8, 8, (40, 1))
        values[3, :128] = 0
        words = _floats.f32_to_bf16(values.astype(numpy.float32))
        codes, scales = _floats.scaled_to_e4m3(words)
        self.assertEqual((codes.shape, scales.shape), ((40, 384), (40, 3)))
        exact = _floats.bf16_to_f32(words)
        for row in range(40):
            for block in range(3):
                part = exact[row, 128 * block : 128 * (block + 1)]
                largest = max(numpy.float32(1e-4), numpy.float32(abs(part).max()))
                self.assertEqual(scales[row, block], largest / numpy.float32(448))
                wanted = _floats.f32_to_e4m3(part * (numpy.float32(448) / largest))
                self.assertEqual(codes[row, 128 * block : 128 * (block + 1)].tolist(), wanted.tolist())
        numpy.testing.assert_allclose(_floats.e4m3_to_f32(codes) * numpy.repeat(scales, 128, 1), exact, 0.07, 1e-6)

    def test_bytes_of_messages(self):
        call = _exchange.Call(_exchange.KINDS.index("dispatch"), 7, 4, 2, 128, 2, 2, 0)
        head = _exchange.encode_head(call, 1, 2)
        self.assertEqual(
            head.tobytes().hex(" ", 8),
            "020001005045564b 0700000000000000 0400000000000000 0200000000000000 8000000000000000 0200000000000000 "
            "0200000000000000 0000000000000000 0100000000000000 0200000000000000",
        )
        self.assertEqual(_exchange.decode_head(head), (call, 1, 2))
        self.assertIsNone(_exchange.decode_head(head * 0))
        for word in (1, head[0] + 1 << 16, int(head[0]) + 100, int(head[0]) + (1 << 16)):
            other = head.copy()
            other[0] = word
            with self.assertRaisesRegex(ValueError, "another version"):
                _exchange.decode_head(other)
        # Token 1 of this rank, for both experts of another.
        sections = _experts.dispatch_sections(1, 2, 2, 4, 1)
        memory = numpy.zeros(_experts.message_bytes(sections), numpy.uint8)
        share = _experts.Routing(numpy.array([[-1, 0], [3, 2]]), 4, 2).share(1)
        data, scales = numpy.array([[1, 2, 3, 4], [5, 6, 7, 8]], numpy.uint8), numpy.array([[1], [2]], numpy.float32)
        _experts.fill_dispatch(_experts.views(memory, sections), share, data, scales)
        wanted = "0100000001000000 0100000000000000 0000000000000000 0000004000000000 0506070800000000"
        self.assertEqual(memory.tobytes().hex(" ", 8), wanted)

    def test_size_hint(self):
        # Two pairs of a buffer to send from and one to receive in, with 32 bytes beside each token.
        hint = Buffer.get_ep_buffer_size_hint(128, 7168, 8, 288)
        self.assertEqual(hint, 4 * (4 * 288 + 288 * 128 * (32 + 2 * 7168)))
        self.assertEqual(ep.get_ep_buffer_size_hint(128, 7168, 8, 288), hint)


@HAS_NUMPY
class Examples(unittest.TestCase):
    """The examples of docs/expert-parallelism.md, as they stand there."""

    def test_examples(self):
        page = pathlib.Path(__file__).resolve().parents[3] / "docs" / "expert-parallelism.md"
        calls, placement = (
            part.partition("```")[0] for part in page.read_text(encoding="utf-8").split("```python\n")[1:]
        )

        def body(group):
            names = {"group": group, "feed_forward": lambda expert, rows: rows}
            exec(calls, names)
            return _floats.bf16_to_f32(names["combined"])[:, 0].tolist()

        self.assertEqual(thread_groups.World(4).run(body), [[1, 0.5, 1, 1]] * 4)
        names = {}
        exec(placement, names)
        # Experts 2 and 3 are with ranks 1 and 3, of which the second is there; experts 0 and 1 with ranks 0 and 2.
        self.assertEqual(names["physical"].tolist(), [[0, 6], [4, 7], [1, -1]])


@HAS_NUMPY
class Surface(unittest.TestCase):
    """Names, parameters and defaults, as recorded from Mooncake's sources at commit 3b5a594."""

    def test_names_and_parameters(self):
        golden = pathlib.Path(__file__).resolve().parent.parent / "golden" / "mooncake-ep-3b5a594.txt"
        lines = golden.read_text(encoding="utf-8").splitlines()
        for line in lines:
            with self.subTest(line):
                module, _, call = line.partition(" ")
                path, _, wanted = call.rstrip(")").partition("(")
                found = importlib.import_module(module)
                for name in path.split("."):
                    found = getattr(found, name)
                wanted = [one.partition("=")[::2] for one in wanted.split(", ") if one]
                taken = list(inspect.signature(found).parameters.values())
                if any(one.kind is one.VAR_POSITIONAL for one in taken):
                    continue
                taken = [one for one in taken if one.name != "self"]
                self.assertEqual([one.name for one in taken[: len(wanted)]], [name for name, _ in wanted])
                for one, (_, default) in zip(taken, wanted):
                    # The default type of an Engram is torch's; None stands for it.
                    known = "None" if default.startswith("torch.") else default
                    self.assertEqual("" if one.default is one.empty else repr(one.default), known)
                self.assertTrue(all(one.default is not one.empty for one in taken[len(wanted) :]))


@HAS_NUMPY
class Calls(unittest.TestCase):
    """Hooks, failures, and arguments that make no sense."""

    def test_hooks_complete_the_receive(self):
        one = Scenario(3)
        while one.ranks == 1 or not sum(map(len, one.x)):
            one = Scenario(one.seed + 1)

        def body(group):
            buffer, mask = Buffer(group), numpy.ones(one.ranks, numpy.int32)
            first = dispatch(buffer, one, return_recv_hook=True)
            second = dispatch(buffer, one, async_finish=True)
            for received, count, handle, _, _ in (first, second):
                self.assertFalse(count.any() or received.any() or handle[1].any())
            # In any order, and again.
            second[3].current_stream_wait()
            first[4]()
            first[4]()
            first[3].current_stream_wait()
            for at in range(2):
                numpy.testing.assert_array_equal(first[at], second[at])
            made = one.compute(buffer.rank, first[0], False)
            out = numpy.full((len(one.x[buffer.rank]), one.hidden), 7, numpy.uint16)
            result, event, hook = combine(buffer, one, made, first[2], mask, return_recv_hook=True, out=out)
            self.assertIs(result, out)
            self.assertTrue((out == 7).all())
            hook()
            with event:
                pass
            numpy.testing.assert_array_equal(out, one.dense(buffer.rank, set(range(one.ranks)), False))
            with combine(buffer, one, made, second[2], async_finish=True)[1](release_handle=True) as event:
                pass
            self.assertIsNone(event.event)
            with self.assertRaisesRegex(ValueError, "no event"):
                event.current_stream_wait()

        thread_groups.World(one.ranks).run(body)

    def test_a_slow_source_ends_the_call_for_all(self):
        one = fixed(3, 3, [[1], [2], [3]], [[[0]], [[1]], [[2]]], 1)
        for operation in (1, 2):
            both = threading.Barrier(2)

            def body(group):
                buffer, mask = Buffer(group), numpy.ones(3, numpy.int32)
                with self.assertRaises(ep.SourceTimeout) as caught:
                    dispatch(buffer, one, mask, timeout_us=2_000_000)
                both.wait(60)
                self.assertEqual((caught.exception.ranks, mask.tolist()), ([1], [1, 0, 1]))
                self.assertEqual(str(caught.exception), "dispatch was not complete after 2 s: rank 1")
                return True

            self.assertEqual(thread_groups.World(3, stalls=[(1, operation)]).run(body), [True, None, True])

    def test_calls_that_differ_are_named(self):
        one, other = fixed(2, 4, [[1], [2]], [[[0]], [[1]]], 1), fixed(2, 8, [[1], [2]], [[[0]], [[1]]], 1)

        def experts(group):
            with self.assertRaises(ep.RankMismatch) as caught:
                dispatch(Buffer(group), one if group.rank else other)
            error = caught.exception
            self.assertEqual((error.rank, error.field), (1 - group.rank, "num_experts"))
            return str(error)

        self.assertEqual(
            thread_groups.World(2).run(experts),
            [
                "num_experts is 4 at rank 1, and 8 at this rank",
                "num_experts is 8 at rank 0, and 4 at this rank",
            ],
        )

        def kinds(group):
            buffer = Buffer(group)
            received, _, handle, _, _ = dispatch(buffer, one)
            with self.assertRaises(ep.RankMismatch) as caught:
                combine(buffer, one, received, handle) if group.rank else dispatch(buffer, one)
            return str(caught.exception)

        texts = thread_groups.World(2).run(kinds)
        self.assertEqual(texts[0], "rank 1 calls combine, this rank dispatch")

    def test_members_that_change(self):
        """A rank that makes a new buffer while the others update theirs counts on with them."""
        one = fixed(2, 2, [[1], [2]], [[[1]], [[0]]], 1)

        def body(group):
            buffer = Buffer(group)
            dispatch(buffer, one)
            if group.rank:
                buffer = Buffer(group)
            else:
                buffer.update_ep_member()
            return int(dispatch(buffer, one)[0][0, 0, 0])

        self.assertEqual(thread_groups.World(2).run(body), [2, 1])

    def test_ranks_never_become_fewer(self):
        """The last rank is gone: its experts keep their numbers, also for a rank that makes its buffer afterwards."""
        one = fixed(3, 6, [[1, 2], [3], [4]], [[[0], [5]], [[2]], [[4]]], 2)

        def body(group):
            buffer, mask = Buffer(group), numpy.ones(3, numpy.int32)
            dispatch(buffer, one, mask)
            if group.rank:
                buffer = Buffer(group)
            else:
                buffer.update_ep_member()
            received, count, handle, _, _ = dispatch(buffer, one, mask)
            out = combine(buffer, one, received, handle, mask)[0]
            return buffer.group_size, mask.tolist(), count.tolist(), out[:, 0].tolist()

        results = thread_groups.World(3, deaths=[(2, 1)]).run(body)
        self.assertEqual(results, [(3, [1, 1, 0], [1, 0], [1, 0]), (3, [1, 1, 0], [1, 0], [3]), None])

    def test_masks_of_another_length_stand_for_all(self):
        one = fixed(2, 2, [[1], [2]], [[[1]], [[0]]], 1)

        def body(group):
            mask = numpy.zeros(5, numpy.int32)
            return int(dispatch(Buffer(group), one, mask)[0][0, 0, 0]), mask.tolist()

        self.assertEqual(thread_groups.World(2).run(body), [(2, [0] * 5), (1, [0] * 5)])

    def test_bad_arguments(self):
        one = fixed(1, 4, [[1, 2]], [[[0, 1], [2, 3]]], 2)
        x, topk_idx, weights = one.x[0], one.topk_idx[0], one.weights[0]

        def body(group):
            buffer = Buffer(group)

            def refused(error, text, **options):
                with self.assertRaisesRegex(error, text):
                    dispatch(buffer, one, **options)

            refused(TypeError, "x is of float32, not bfloat16", x=x.astype(numpy.float32))
            refused(TypeError, "x is a list, not a tensor or an array", x=[[1]])
            refused(ValueError, "x has 3 dimensions, not 2", x=x[None])
            refused(ValueError, "x is not contiguous", x=numpy.zeros((2, 256), numpy.uint16)[:, ::2])
            refused(ValueError, "x has 100 columns: they must be a multiple of 128", x=x[:, :100].copy())
            refused(ValueError, "x has 1 tokens, topk_idx 2", x=x[:1])
            refused(ValueError, "more than num_max_dispatch_tokens_per_rank, 1", num_max_dispatch_tokens_per_rank=1)
            refused(ValueError, "num_max_dispatch_tokens_per_rank is 0", num_max_dispatch_tokens_per_rank=0)
            refused(TypeError, "topk_idx is of int32, not int64", topk_idx=topk_idx.astype(numpy.int32))
            refused(ValueError, r"topk_idx\[1, 0\] is 4: an expert is 0 to 3, or -1", topk_idx=topk_idx + 2)
            refused(ValueError, r"topk_idx\[0, 0\] is -2", topk_idx=topk_idx - 2)
            refused(ValueError, "no choices", topk_idx=topk_idx[:, :0])
            refused(ValueError, "num_experts is 2.5", num_experts=2.5)
            refused(TypeError, "active_ranks is of int64, not int32", mask=numpy.ones(1, numpy.int64))
            refused(ValueError, "timeout_us is -2", timeout_us=-2)
            refused(ValueError, "exclude each other", async_finish=True, return_recv_hook=True)
            small = Buffer(group, num_ep_buffer_bytes=1000)
            with self.assertRaisesRegex(ValueError, "needs 9280 bytes, and the buffer was made for 1000"):
                dispatch(small, one)

            made, _, handle, _, _ = dispatch(buffer, one)
            empty = (made, topk_idx, weights, None, -1, handle)

            def wrong(error, text, at, value, **options):
                arguments = list(empty)
                if at is not None:
                    arguments[at] = value
                with self.assertRaisesRegex(error, text):
                    buffer.combine(*arguments, **options)

            wrong(ValueError, r"x has the shape \(4, 1, 128\), the handle \(4, 2, 128\)", 0, made[:, :1].copy())
            wrong(TypeError, "x is of float32", 0, made.astype(numpy.float32))
            wrong(ValueError, "topk_idx has the shape", 1, topk_idx[:, :1].copy())
            wrong(ValueError, r"topk_idx\[0, 0\] is 9", 1, topk_idx + 9)
            wrong(TypeError, "topk_weights is of float64", 2, weights.astype(numpy.float64))
            wrong(ValueError, "out has the shape", None, None, out=numpy.empty((1, 128), numpy.uint16))
            wrong(ValueError, "get_next_combine_buffer", None, None, zero_copy=True)
            wrong(ValueError, "exclude each other", None, None, async_finish=True, return_recv_hook=True)
            for range_of, text in (
                (3 << 32 | 1, "is 1 rows from 3 on; an expert has 2"),
                (-1, "rows from -1 on"),
                (1 << 31, "is 2147483648 rows from 0 on"),
            ):
                damaged = handle[0], numpy.full((4, 1), range_of), *handle[2:]
                wrong(ValueError, text, 5, damaged)
            wrong(ValueError, "src_info of the handle has the shape", 5, (handle[0][:, :1].copy(), *handle[1:]))
            wrong(ValueError, "among 2 ranks; there are 1", 5, (handle[0], numpy.zeros((4, 2), int), *handle[2:]))
            fewer = (made, topk_idx[:1], weights[:1], None, -1, handle)
            with self.assertRaisesRegex(ValueError, "outputs of token 1 arrive, and topk_idx has 1 tokens"):
                buffer.combine(*fewer)
            return True

        self.assertEqual(thread_groups.World(1).run(body), [True])

        def uneven(group):
            with self.assertRaisesRegex(ValueError, "4 experts cannot be divided among 3 ranks evenly"):
                dispatch(Buffer(group), one, x=x, topk_idx=topk_idx)
            return True

        one.x, one.topk_idx = one.x * 3, one.topk_idx * 3
        self.assertEqual(thread_groups.World(3).run(uneven), [True] * 3)


if __name__ == "__main__":
    sys.exit(unittest.main())
