"""`ElasticBuffer` against a slow model, and the choice of physical experts when ranks are gone."""

import unittest

try:
    import numpy
    import thread_groups
    from mooncake import _floats, ep
    from mooncake.mooncake_elastic_buffer import ElasticBuffer
except ImportError as missing:
    numpy = None
    if missing.name != "numpy":
        raise

from test_experts import FIRST, HAS_NUMPY, SEEDS, Scenario


def words_of(x):
    """bfloat16 of what a dispatch was given: the rows themselves, or float8 with scales."""
    if not isinstance(x, tuple):
        return x
    values = _floats.e4m3_to_f32(x[0]) * numpy.repeat(numpy.ascontiguousarray(x[1]), 128, axis=1)
    return _floats.f32_to_bf16(values)


def experts_of(scenario, rank, row):
    """The local experts that a token chooses on a rank, each with its choice."""
    return [(int(e) - rank * scenario.local, k) for k, e in enumerate(row) if e >= 0 and e // scenario.local == rank]


def outputs(scenario, rank, words, row, weights, chosen):
    """What a rank makes of one token for the choices of `chosen`, weighted: a list of rows of float32."""
    made = []
    for local, choice in chosen:
        out = _floats.bf16_to_f32(scenario.expert(rank * scenario.local + local, words[None]))[0]
        made.append(_floats.bf16_to_f32(_floats.f32_to_bf16(out * weights[choice])))
    return made


def expected(scenario, source, alive, words, bias, one_by_one):
    """The combined rows of a source: sums of each rank in the order of its first choice, rounded unless one by one."""
    out = numpy.zeros((len(words), scenario.hidden), numpy.float32)
    for one in bias:
        out += _floats.bf16_to_f32(one)
    for token, row in enumerate(scenario.topk_idx[source]):
        parts = []
        for rank in alive:
            chosen = experts_of(scenario, rank, row)
            made = outputs(scenario, rank, words[token], row, scenario.weights[source][token], chosen)
            if one_by_one:
                parts += [(choice, value) for (_, choice), value in zip(chosen, made)]
            elif chosen:
                total = numpy.zeros(scenario.hidden, numpy.float32)
                for value in made:
                    total += value
                parts.append((chosen[0][1], _floats.bf16_to_f32(_floats.f32_to_bf16(total))))
        for _, value in sorted(parts, key=lambda part: part[0]):
            out[token] += value
    return _floats.f32_to_bf16(out)


@HAS_NUMPY
class Property(unittest.TestCase):
    """Random routings with every option, and dead ranks."""

    def check(self, seed, deaths=0):
        scenario = Scenario(seed)
        draw, ranks, capacity = scenario.draw, scenario.ranks, scenario.capacity
        victims = draw.permutation(ranks)[: min(deaths, ranks - 1)]
        # Operations of a rank: 0 connects, 1 and 2 are a dispatch, 3 and 4 another by its handle, 5 and 6 a combine.
        died = {int(rank): int(draw.choice([1, 2, 5, 6])) for rank in victims}
        expanded, quantized, sync, later, columns, reduce = (bool(draw.integers(0, 2)) for _ in range(6))
        weighted = not expanded or reduce
        alignment = int(draw.choice([1, 4]))
        bias = [_floats.f32_to_bf16(draw.standard_normal((capacity, scenario.hidden))) for _ in range(draw.integers(3))]
        world = thread_groups.World(ranks, deaths=died.items())
        given = [_floats.scaled_to_e4m3(x) if quantized else x for x in scenario.x]

        def body(group):
            rank = group.rank
            buffer = ElasticBuffer(group, allow_multiple_reduction=reduce)
            stats = numpy.ones(scenario.local, numpy.int32)
            result = buffer.dispatch(
                given[rank],
                scenario.topk_idx[rank],
                scenario.weights[rank],
                scenario.experts,
                capacity,
                alignment,
                do_expand=expanded,
                do_cpu_sync=sync,
                async_with_compute_stream=later,
                cumulative_local_expert_recv_stats=stats,
                use_tma_aligned_col_major_sf=columns,
                previous_event=buffer.capture(),
            )
            result[4].current_stream_wait()
            again = buffer.dispatch(given[rank], handle=result[3], topk_weights=scenario.weights[rank])
            recv_x, _, weights, handle, _ = result
            words = words_of(recv_x)
            made = numpy.zeros(words.shape, numpy.uint16)
            count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
            for place, row in enumerate(self.local_rows(scenario, rank, handle, count)):
                if expanded:
                    for (local, choice), at in zip(*row):
                        value = outputs(scenario, rank, words[at], None, {0: weights[at]}, [(local, 0)])[0]
                        made[at] = _floats.f32_to_bf16(value)
                else:
                    total = numpy.zeros(scenario.hidden, numpy.float32)
                    for value in outputs(scenario, rank, words[place], None, weights[place], row[0]):
                        total += value
                    made[place] = _floats.f32_to_bf16(total)
            mine = [one[: len(scenario.x[rank])].copy() for one in bias]
            combined, returned, event = buffer.combine(
                made,
                handle,
                weights if weighted else None,
                async_with_compute_stream=later,
                bias=tuple(mine) if len(mine) > 1 else mine[0] if mine else None,
            )
            event.current_stream_wait()
            return result, again, stats, combined, returned, buffer.active_ranks.copy(), mine

        for rank, result in enumerate(world.run(body)):
            self.assertEqual(result is None, rank in died)
            if result is not None:
                there = [r for r in range(ranks) if died.get(r, 9) > 2]
                options = expanded, quantized, sync, columns, alignment
                self.check_dispatch(scenario, rank, there, given, result[0], *options)
                stats, combined, returned, active, mine = result[2:]
                counts = [
                    sum((row == rank * scenario.local + e).any() for r in there for row in scenario.topk_idx[r])
                    for e in range(scenario.local)
                ]
                self.assertEqual(stats.tolist(), [1 + count for count in counts])
                alive = [r for r in range(ranks) if r not in died]
                self.assertEqual(active.tolist(), [int(r in alive) for r in range(ranks)])
                words = words_of(given[rank])
                wanted = expected(scenario, rank, alive, words, mine, expanded and not reduce)
                numpy.testing.assert_array_equal(combined, wanted)
                if weighted:
                    owner = scenario.topk_idx[rank] // scenario.local
                    on = (scenario.topk_idx[rank] >= 0) & numpy.isin(owner, alive)
                    numpy.testing.assert_array_equal(returned, numpy.where(on, scenario.weights[rank], 0))
                else:
                    self.assertIsNone(returned)
                first, again = result[0], result[1]
                for one, two in zip(self.arrays(first[0]), self.arrays(again[0])):
                    numpy.testing.assert_array_equal(two[: len(one)], one[: len(two)])
                numpy.testing.assert_array_equal(
                    again[3].recv_src_metadata[: len(first[3].recv_src_metadata)], first[3].recv_src_metadata
                )

    @staticmethod
    def arrays(x):
        return x if isinstance(x, tuple) else (x,)

    @staticmethod
    def local_rows(scenario, rank, handle, count):
        """For each token: its local experts with their choices, and its rows when expanded."""
        for number, _, *rows in handle.recv_src_metadata[:count].tolist():
            source, token = divmod(number, scenario.capacity)
            chosen = experts_of(scenario, rank, scenario.topk_idx[source][token])
            yield chosen, [rows[choice] for _, choice in chosen]

    def check_dispatch(self, scenario, rank, there, given, result, expanded, quantized, sync, columns, alignment):
        recv_x, recv_topk_idx, recv_weights, handle, _ = result
        tokens = [
            (r, t) for r in there for t, row in enumerate(scenario.topk_idx[r]) if experts_of(scenario, rank, row)
        ]
        sums = [sum(source <= r for source, _ in tokens) for r in range(scenario.ranks)]
        self.assertEqual(handle.psum_num_recv_tokens_per_scaleup_rank.tolist(), sums)
        rows = [
            [
                (e, place)
                for place, (r, t) in enumerate(tokens)
                for e, _ in experts_of(scenario, rank, scenario.topk_idx[r][t])
                if e == local
            ]
            for local in range(scenario.local)
        ]
        counts = [len(one) for one in rows]
        aligned = [-(-count // alignment) * alignment for count in counts]
        begins = [sum(aligned[:local]) for local in range(scenario.local)]
        self.assertEqual(handle.num_unaligned_recv_tokens_per_expert.tolist(), counts)
        self.assertEqual(handle.num_recv_tokens_per_expert_list, aligned if sync else [])
        ends = [begin + (count if expanded else size) for begin, count, size in zip(begins, counts, aligned)]
        self.assertEqual(handle.psum_num_recv_tokens_per_expert.tolist(), ends)
        size = sum(aligned) if expanded else len(tokens)
        data = self.arrays(recv_x)
        if sync:
            self.assertEqual([len(one) for one in data], [size] * len(data))
        else:
            self.assertEqual(len(handle.recv_src_metadata), scenario.ranks * scenario.capacity)
        if quantized and columns and size:
            self.assertEqual((data[1].strides[0], data[1].strides[1] % 16), (4, 0))
        used = set()
        for place, (source, token) in enumerate(tokens):
            chosen = experts_of(scenario, rank, scenario.topk_idx[source][token])
            number, first, *at = handle.recv_src_metadata[place].tolist()
            self.assertEqual(number, source * scenario.capacity + token)
            self.assertEqual(first, source * scenario.choices + chosen[0][1])
            wanted = [-1] * scenario.choices
            for local, choice in chosen:
                wanted[choice] = local
            self.assertEqual(recv_topk_idx[place].tolist(), wanted)
            slots = [-1] * scenario.choices
            for local, choice in chosen if expanded else ():
                slots[choice] = begins[local] + [p for _, p in rows[local]].index(place)
            self.assertEqual(at, slots)
            weights = scenario.weights[source][token]
            if not expanded:
                self.assertEqual(recv_weights[place].tolist(), weights.tolist())
            for row, choice in [(s, c) for c, s in enumerate(slots) if s >= 0] if expanded else [(place, 0)]:
                used.add(row)
                for mine, theirs in zip(data, self.arrays(given[source])):
                    self.assertEqual(mine[row].tolist(), theirs[token].tolist())
                if expanded:
                    self.assertEqual(recv_weights[row], weights[choice])
        unused = [row for row in range(len(data[0])) if row not in used]
        self.assertFalse(data[0][unused].any())
        self.assertTrue((handle.recv_src_metadata[len(tokens) :] == -1).all())
        if len(scenario.x[rank]):
            # The first choice of each receiver has the place there, the others none.
            slots = handle.dst_buffer_slot_idx
            for receiver in range(scenario.ranks):
                sent = [t for t, row in enumerate(scenario.topk_idx[rank]) if experts_of(scenario, receiver, row)]
                for at, token in enumerate(sent):
                    choice = experts_of(scenario, receiver, scenario.topk_idx[rank][token])[0][1]
                    self.assertEqual(slots[token, choice], rank * scenario.capacity + at)

    def test_dispatch_and_combine_equal_the_slow_model(self):
        for seed in range(FIRST, FIRST + SEEDS):
            with self.subTest(f"KVPLANE_EXPERT_SEED={seed}"):
                self.check(seed)

    def test_with_dead_ranks(self):
        for seed in range(FIRST, FIRST + SEEDS // 2):
            with self.subTest(f"KVPLANE_EXPERT_SEED={seed}"):
                self.check(seed, deaths=1 + seed % 2)


@HAS_NUMPY
class Calls(unittest.TestCase):
    """Sizes, names that have no meaning here, and arguments that make no sense."""

    def test_sizes(self):
        class Pair:
            def size(self):
                return 2

        # As Mooncake's wheel answers.
        workspace = ElasticBuffer.get_buffer_size_hint(Pair(), 0, 0)
        self.assertEqual(workspace % 64, 0)
        row = 2 * 4096 + 128  # 8 choices: weights, experts, and a number each
        self.assertEqual(
            ElasticBuffer.get_buffer_size_hint(Pair(), 64, 4096, 8, allow_hybrid_mode=False),
            workspace + 4 * 2 * 2 * 64 * 8 * row,
        )
        self.assertEqual(
            ElasticBuffer.get_buffer_size_hint(Pair(), 64, 4096, 8, use_fp8_dispatch=True),
            workspace + 2 * 4 * 2 * 2 * 64 * 8 * (4096 + 128 + 128),
        )
        self.assertEqual(ElasticBuffer.get_engram_storage_size_hint(10, 100, 2), 224 * 12)
        self.assertEqual(ElasticBuffer.get_engram_storage_size_hint(10, 256, 2, numpy.uint8), 288 * 12)
        self.assertEqual(ElasticBuffer.get_pp_buffer_size_hint(100, 3), 128 * 3 * 4)
        self.assertEqual(ElasticBuffer.get_agrs_buffer_size_hint(Pair(), 12345), 12345)

    def test_names(self):
        def body(group):
            buffer = ElasticBuffer(group, num_max_tokens_per_rank=4, hidden=128, num_topk=2)
            self.assertEqual(buffer.get_logical_domain_size(), (1, 2))
            self.assertEqual(buffer.get_physical_domain_size(), (2, 1))
            self.assertEqual((buffer.scaleout_rank_idx, buffer.scaleup_rank_idx), (0, group.rank))
            self.assertEqual(buffer.num_bytes, ElasticBuffer.get_buffer_size_hint(group, 4, 128, 2))
            buffer.barrier()
            buffer.update_ep_member()
            buffer.capture().synchronize()
            for name in ("get_theoretical_num_sms", "pp_send", "engram_fetch", "all_gather", "get_comm_stream"):
                with self.assertRaisesRegex(NotImplementedError, f"ElasticBuffer.{name} is for buffers on devices: "):
                    getattr(buffer, name)(1, 2)
            buffer.destroy()
            for call in (buffer.barrier, lambda: buffer.combine(None, None), lambda: buffer.dispatch(None)):
                with self.assertRaisesRegex(RuntimeError, "destroyed"):
                    call()
            return True

        self.assertEqual(thread_groups.World(2).run(body), [True, True])

    def test_bad_arguments(self):
        x, topk_idx = numpy.zeros((2, 128), numpy.uint16), numpy.array([[0, 1], [-1, -1]])
        weights = numpy.ones((2, 2), numpy.float32)

        def body(group):
            buffer = ElasticBuffer(group)

            def refused(error, text, *arguments, **options):
                with self.assertRaisesRegex(error, text):
                    buffer.dispatch(*arguments, **options)

            refused(ValueError, "topk_idx is missing", x)
            refused(ValueError, "num_experts is missing", x, topk_idx)
            refused(ValueError, "topk_weights has the shape", x, topk_idx, weights[:1], 2)
            refused(ValueError, "more than num_max_tokens_per_rank, 1", x, topk_idx, weights, 2, 1)
            refused(ValueError, "expert_alignment is 0", x, topk_idx, weights, 2, 2, 0)
            refused(ValueError, "token 0 chooses expert 1 twice", x, topk_idx * 0 + 1, None, 2)
            refused(ValueError, "an expert is 0 to 1", x, topk_idx + 1, None, 2)
            refused(TypeError, "x is of uint16, not float8_e4m3fn", (x, x), topk_idx, None, 2)
            codes = x.astype(numpy.uint8)
            refused(ValueError, "scales of the shape", (codes, weights[:1]), topk_idx, None, 2)
            stats = numpy.zeros(3, numpy.int32)
            refused(
                ValueError,
                "3 elements, this rank 2 experts",
                x,
                topk_idx,
                None,
                2,
                cumulative_local_expert_recv_stats=stats,
            )
            _, _, got, handle, _ = buffer.dispatch(x, topk_idx, weights, 2)
            refused(ValueError, "topk_idx is that of the handle", x, topk_idx, handle=handle)
            refused(ValueError, "do_cpu_sync is for", x, handle=handle, do_cpu_sync=True)
            refused(ValueError, "not expanded", x, handle=handle, do_expand=True)
            refused(ValueError, "num_experts is 4, and 2 in the handle", x, handle=handle, num_experts=4)
            small = ElasticBuffer(group, num_bytes=10)
            with self.assertRaisesRegex(ValueError, "the buffer was made for 10"):
                small.dispatch(x, topk_idx, weights, 2)
            for text, arguments, options in (
                ("x has 0 rows, the dispatch of the handle 1", (x[:0], handle), {}),
                ("topk_weights has the shape", (x[:1], handle, weights[:, :1].copy()), {}),
                ("bias has the shape", (x[:1], handle), {"bias": x[:1]}),
            ):
                with self.assertRaisesRegex(ValueError, text):
                    buffer.combine(*arguments, **options)
            single = ElasticBuffer(group, allow_multiple_reduction=False)
            expanded = single.dispatch(x, topk_idx, weights, 2, do_expand=True)
            with self.assertRaisesRegex(ValueError, "allow_multiple_reduction=False"):
                single.combine(expanded[0], expanded[3], expanded[2])
            return True

        self.assertEqual(thread_groups.World(1).run(body), [True])


@HAS_NUMPY
class Placement(unittest.TestCase):
    """Physical experts of ranks that are there."""

    def test_tokens_of_dead_ranks_go_to_other_physical_experts_evenly(self):
        for seed in range(FIRST, FIRST + SEEDS):
            with self.subTest(f"KVPLANE_EXPERT_SEED={seed}"):
                draw = numpy.random.default_rng(seed)
                ranks, logical = int(draw.integers(1, 9)), int(draw.integers(1, 20))
                physical = ranks * int(draw.integers(1, 7))
                placed = draw.integers(-1, logical, physical)
                active = draw.integers(0, 2, ranks).astype(numpy.int32)
                placement = ep.ExpertPlacement(placed, logical, ranks, rank=int(draw.integers(0, ranks)))
                there = {
                    e: [p for p in range(physical) if placed[p] == e and active[p // (physical // ranks)]]
                    for e in range(logical)
                }
                lost = placement.lost_logical_experts(active)
                self.assertEqual(lost.tolist(), [e for e in there if not there[e]])
                table, counts = placement.logical_to_physical(active)
                self.assertEqual([row[:count].tolist() for row, count in zip(table, counts)], list(there.values()))
                self.assertTrue(all((row[count:] == -1).all() for row, count in zip(table, counts)))
                chosen = numpy.zeros(physical, int)
                for _ in range(5):
                    topk_ids = draw.integers(-1, logical, (int(draw.integers(0, 9)), 3))
                    got = placement.topk_ids_logical_to_physical(topk_ids, active)
                    self.assertEqual(got.shape, topk_ids.shape)
                    for wanted, one in zip(topk_ids.ravel().tolist(), got.ravel().tolist()):
                        self.assertEqual(one == -1, wanted == -1 or not there[wanted])
                        if one >= 0:
                            self.assertIn(one, there[wanted])
                            chosen[one] += 1
                for several in there.values():
                    self.assertLessEqual(numpy.ptp(chosen[several]) if several else 0, 1)

    def test_ranks_begin_with_different_physical_experts(self):
        chosen = [
            ep.ExpertPlacement(numpy.array([0, 0, 0, 0]), 1, 4, rank).topk_ids_logical_to_physical(numpy.array([[0]]))
            for rank in range(4)
        ]
        self.assertEqual([int(one[0, 0]) for one in chosen], [0, 1, 2, 3])

    def test_a_dispatch_goes_on_without_a_rank(self):
        """Four ranks, each logical expert on two: after one is gone, the result is whole again."""
        scenario = Scenario(0)
        while scenario.ranks != 4 or min(map(len, scenario.x)) < 2:
            scenario = Scenario(scenario.seed + 1)
        # Physical expert p holds logical expert p modulo 4; 8 of them on 4 ranks.
        placed, dead = numpy.array([0, 1, 2, 3, 0, 1, 2, 3]), 1

        def body(group):
            rank = group.rank
            buffer, mask = ep.Buffer(group), numpy.ones(4, numpy.int32)
            placement = ep.ExpertPlacement(placed, 4, 4, rank)
            logical = numpy.maximum(scenario.topk_idx[rank], 0) % 4
            logical = logical[:, :1].copy()
            weights = numpy.full(logical.shape, 1, numpy.float32)
            results = []
            for _ in range(2):
                chosen = placement.topk_ids_logical_to_physical(logical, mask)
                arguments = chosen, mask, scenario.capacity, 8, 1_000_000
                x, _, handle, _, _ = buffer.dispatch(scenario.x[rank], *arguments, use_fp8=False)
                for local in range(2):
                    x[local] = scenario.expert(int(placed[2 * rank + local]), x[local])
                results.append(buffer.combine(x, chosen, weights, mask, 1_000_000, handle)[0])
            return logical, results, placement.lost_logical_experts(mask).tolist()

        # Dies between its first dispatch and its first combine.
        results = thread_groups.World(4, deaths=[(dead, 3)]).run(body)
        self.assertIsNone(results[dead])
        for rank in {0, 2, 3}:
            logical, (first, second), lost = results[rank]
            self.assertEqual(lost, [])
            for token, expert in enumerate(logical[:, 0].tolist()):
                wanted = scenario.expert(expert, scenario.x[rank][token : token + 1])[0]
                numpy.testing.assert_array_equal(second[token], wanted)
                self.assertIn(first[token].tolist(), [wanted.tolist(), [0] * scenario.hidden])

    def test_bad_arguments(self):
        for text, arguments in (
            ("3 physical experts cannot be divided among 2 ranks evenly", ([0, 1, 2], 3, 2)),
            ("physical expert 1 holds logical expert 5, of 3", ([0, 5], 3, 2)),
            ("cannot be divided among 0 ranks", ([0, 1], 2, 0)),
        ):
            with self.assertRaisesRegex(ValueError, text):
                ep.ExpertPlacement(numpy.array(arguments[0]), *arguments[1:])
        placement = ep.ExpertPlacement(numpy.array([0, 1]), 2, 2)
        with self.assertRaisesRegex(ValueError, r"topk_ids\[0, 1\] is 2: a logical expert is 0 to 1"):
            placement.topk_ids_logical_to_physical(numpy.array([[0, 2]]))
        with self.assertRaisesRegex(ValueError, "active_ranks has 3 elements, there are 2 ranks"):
            placement.lost_logical_experts(numpy.ones(3, numpy.int32))


if __name__ == "__main__":
    unittest.main()
