"""KV cache under another parallel layout: plans against the content of each token, through engines and a store."""

import contextlib
import ctypes
import dataclasses
import hashlib
import itertools
import random
import struct
import unittest

import bed
from mooncake.engine import TransferEngine
from mooncake.reshard import kv_cache
from mooncake.reshard.kv_cache import (
    KVCacheCompletion,
    KVCacheComponent,
    KVCacheDescriptor,
    KVCachePagedBuffer,
    KVCacheRegisteredRegion,
    KVCacheRuntimeTransferPlan,
    KVCacheSnapshotDescriptor,
    KVCacheStoreError,
    KVCacheStoreExecutor,
    KVCacheStoreFormat,
    KVCacheStoreManifest,
    KVCacheStoreRuntimeBinding,
    KVCacheTargetReceipt,
    KVCacheTransferEngineExecutor,
    KVCacheTransferLimits,
    paged_ranges,
    place_kv_cache,
    plan_kv_cache_store_load,
    plan_kv_cache_store_upload,
    plan_kv_cache_transfer_to_local_target,
    resolve_ranges,
)
from mooncake.store import MooncakeDistributedStore

KEY, VALUE = KVCacheComponent.KEY, KVCacheComponent.VALUE
#: A model of grouped queries, one whose tokens have one latent each (MLA), and one whose latent has two parts.
GROUPED = {"heads": 4, "key": 8, "value": 4}
LATENT = {"heads": 1, "key": 18, "value": 0}
LATENT_AND_ROPE = {"heads": 1, "key": 16, "value": 2}


def described(page=4, layers=5, dtype="bfloat16", heads=4, key=8, value=4):
    return KVCacheDescriptor(tuple(range(layers)), dtype, 2, page, heads, key, value)


def placed(name, descriptor, tp=1, pp=1, dp=1, stages=None):
    sizes = {"tp_size": tp, "pp_size": pp, "dp_size": dp, "stage_layers": stages}
    return place_kv_cache(descriptor, resource_id="kv", revision="1", placement_set_id=name, **sizes)


def snapshot(begin, count):
    return KVCacheSnapshotDescriptor(
        namespace="n", resource_id="kv", model_id="m", model_revision="1", token_start=begin, token_count=count,
        token_fingerprint=hashlib.sha256(b"tokens").hexdigest(), semantic_fingerprint=hashlib.sha256(b"m").hexdigest(),
    )  # fmt: skip


def element(layer, component, token, head, at):
    """The value of one element: no two of a cache are at places that a wrong copy would exchange."""
    return (layer * 7001 + (component is VALUE) * 11003 + token * 137 + head * 31 + at * 3 + 1) % 65536


class Memory:
    """Pages of one participant: of each layer and component a buffer of pages, in an order of their own."""

    def __init__(self, placement, name, tokens, filled=False, endpoint="", heads_first=False, gap=0):
        self.placement, self.part, self.tokens = placement, placement.part(name), tokens
        descriptor, size = placement.descriptor, placement.descriptor.page_size
        first, last = tokens[0] // size, -(-tokens[1] // size)
        pages = list(range(last - first + 2))
        random.Random(f"{name} {tokens}").shuffle(pages)
        self.pages, self.buffers, self.regions, at = pages[: last - first], {}, [], 0
        for layer, component in itertools.product(self.part.layer_ids, descriptor.components):
            width = descriptor.head_bytes(component)
            strides = (self.part.head_count * width, width) if not heads_first else (width, size * width)
            page = size * self.part.head_count * width + gap
            self.buffers[layer, component] = KVCachePagedBuffer("memory", at, page, *strides)
            at += page * len(pages)
        self.memory = bytearray(b"\xa5" * at)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.regions = [KVCacheRegisteredRegion("memory", endpoint or f"{name}:1", self.address, at)]
        self.ranges = paged_ranges(placement, name, tokens, self.buffers, self.pages)
        self.expected = bytearray(self.memory)
        for one in self.ranges:
            for token, head in itertools.product(
                range(one.token_start, one.token_end), range(one.head_start, one.head_end)
            ):
                values = [
                    element(one.global_layer_id, one.component, token, head, at)
                    for at in range(descriptor.head_dim(one.component))
                ]
                struct.pack_into(f"<{len(values)}H", self.expected, one.offset(token, head), *values)
        if filled:
            self.memory[:] = self.expected

    def binding(self, content, operation):
        name = self.part.participant_id
        return resolve_ranges(
            self.placement, content, name, self.regions, self.ranges, operation_id=operation, instance_id=f"i:{name}"
        )

    def store_binding(self):
        one = self.placement
        names = ("load", one.resource_id, one.placement_id, one.digest, "i", one.revision, self.part.participant_id)
        return KVCacheStoreRuntimeBinding(*names, tuple(self.regions), self.ranges)


def operation(source, target, content, name="operation", limits=None, endpoints=None, **shape):
    """Plans all of a target. Returns the operation, and the memory of all participants by their names."""
    endpoints, tokens = endpoints or {}, (content.token_start, content.token_end)
    plans = [
        plan_kv_cache_transfer_to_local_target(source, target, part.participant_id, snapshot=content)
        for part in target.parts
        if part.layer_ids
    ]
    writers = sorted({writer for plan in plans for writer in plan.expected_writer_ids})
    of = {one: Memory(source, one, tokens, True, endpoints.get("source")) for one in writers}
    to = {
        plan.target_participant_id: Memory(
            target, plan.target_participant_id, tokens, False, endpoints.get("target"), **shape
        )
        for plan in plans
    }
    bindings = [[one.binding(content, name) for one in some.values()] for some in (of, to)]
    if endpoints:
        bindings = [
            [dataclasses.replace(one, instance_id=side) for one in some]
            for side, some in zip(("source", "target"), bindings)
        ]
        for side, some in zip((of, to), bindings):
            renamed = {one: dataclasses.replace(side[one].regions[0], region_id=one) for one in side}
            for at, one in enumerate(some):
                region = renamed[one.participant_id]
                ranges = tuple(dataclasses.replace(each, region_id=region.region_id) for each in one.ranges)
                some[at] = dataclasses.replace(one, regions=(region,), ranges=ranges)
    plan = KVCacheRuntimeTransferPlan(name, tuple(plans), *map(tuple, bindings), limits or KVCacheTransferLimits())
    return plan, of, to


class Plans(unittest.TestCase):
    """Plans, whose writes are copies within this process."""

    def check(self, plan, of, to):
        for one in plan.writes:
            ctypes.memmove(one.target_address, one.source_address, one.nbytes)
        for memory in to.values():
            self.assertEqual(memory.memory, memory.expected, memory.part.participant_id)
        for memory in of.values():
            self.assertEqual(memory.memory, memory.expected)

    def test_layouts_in_both_directions(self):
        layouts = [
            {"tp": 1},
            {"tp": 4},
            {"tp": 8},
            {"tp": 2, "pp": 2, "stages": (3, 2)},
            {"tp": 2, "pp": 3, "stages": (1, 0, 4)},
            {"tp": 4, "pp": 5, "dp": 2},
        ]
        content = snapshot(6, 21)
        for (model, (one, other)), page in zip(
            itertools.product((GROUPED, LATENT, LATENT_AND_ROPE), itertools.permutations(layouts, 2)),
            itertools.cycle(((4, 4), (4, 16), (16, 4), (5, 3))),
        ):
            source = placed("source", described(page[0], **model), **one)
            target = placed("target", described(page[1], **model), **other)
            for shape in ({}, {"heads_first": True}, {"gap": 6}):
                with self.subTest(source=one, target=other, page=page, shape=shape, **model):
                    self.check(*operation(source, target, content, **shape))

    def test_equal_layouts_are_few_writes(self):
        source, target = placed("source", described(), tp=2), placed("target", described(), tp=2)
        plan, of, to = operation(source, target, snapshot(0, 16))
        self.check(plan, of, to)
        # A page of a layer and component each, at most; neighbours that are neighbours at both ends are one.
        self.assertLessEqual(len(plan.writes), 2 * 5 * 2 * 4)
        self.assertEqual(sum(one.nbytes for one in plan.writes), 16 * 5 * 4 * (8 + 4) * 2)

    def test_ranks_with_equal_heads_take_turns(self):
        source, target = placed("source", described(), tp=8), placed("target", described(), tp=8)
        plan, of, to = operation(source, target, snapshot(0, 8))
        self.check(plan, of, to)
        self.assertEqual({one for one, _ in plan.expected_writers}, {f"dp0-pp0-tp{tp}" for tp in range(8)})
        target = placed("target", described(), tp=8, dp=3)
        source = placed("source", described(), tp=4, dp=2)
        found = plan_kv_cache_transfer_to_local_target(source, target, "dp2-pp0-tp5")
        self.assertEqual((found.source_dp_rank, found.source_participant_ids), (0, ("dp0-pp0-tp2",)))
        found = plan_kv_cache_transfer_to_local_target(source, target, "dp2-pp0-tp5", source_dp_rank=1)
        self.assertEqual(found.source_participant_ids, ("dp1-pp0-tp2",))

    def test_batches_of_limited_size(self):
        limits = KVCacheTransferLimits(max_batch_bytes=48)
        plan, of, to = operation(placed("s", described()), placed("t", described()), snapshot(0, 16), limits=limits)
        self.check(plan, of, to)
        self.assertLessEqual(max(one.nbytes for one in plan.writes), 48)

    def test_json_keeps_operations(self):
        source, target = placed("source", described(), tp=2, pp=5), placed("target", described(8), tp=4)
        plan, _, _ = operation(source, target, snapshot(3, 9))
        text = kv_cache.kv_cache_runtime_transfer_to_json(plan)
        self.assertEqual(kv_cache.kv_cache_runtime_transfer_from_json(text), plan)
        for wrong in (
            text[:-1],
            text.replace("operation", "other", 1),
            text.replace('"digest":"', '"digest":"0', 1),
            "[]",
        ):
            with self.assertRaises(ValueError):
                kv_cache.kv_cache_runtime_transfer_from_json(wrong)
        with self.assertRaisesRegex(ValueError, "wire limits exceed receiver policy: max_bytes"):
            kv_cache.kv_cache_runtime_transfer_from_json(text, limits=KVCacheTransferLimits(max_bytes=10))
        latent = placed("source", described(**LATENT), tp=2)
        self.assertEqual(kv_cache.kv_cache_placement_from_json(kv_cache.kv_cache_placement_to_json(latent)), latent)


class Refusals(unittest.TestCase):
    """Layouts and memory that contradict."""

    def refused(self, text, call, *arguments, **options):
        with self.assertRaisesRegex(ValueError, text):
            call(*arguments, **options)

    def test_layouts(self):
        for sizes, text in (
            ({"tp": 3}, "4 KV heads cannot be divided over tp_size=3"),
            ({"tp": 6}, "4 KV heads cannot be divided over tp_size=6"),
            ({"pp": 2}, "5 layers cannot be divided over pp_size=2: give stage_layers"),
            ({"pp": 2, "stages": (3, 3)}, "are not 5 layers on 2 stages"),
            ({"pp": 2, "stages": (5,)}, "are not 5 layers on 2 stages"),
            ({"tp": 0}, "tp_size must be at least 1"),
            ({"tp": True}, "tp_size must be an integer"),
            ({"tp": 2**40}, "are more than 65536 participants"),
            ({"tp": 2**9, "dp": 2**9}, "are more than 65536 participants"),
        ):
            self.refused(text, placed, "s", described(), **sizes)
        for change, text in (
            ({"layers": 0}, "global_layer_ids must not be empty"),
            ({"page": 0}, "page_size must be at least 1"),
            ({"page": -4}, "page_size must be at least 1"),
            ({"heads": 1 << 64}, "total_kv_heads must fit in an unsigned 64-bit"),
            ({"key": 1 << 63}, "key_head_dim byte size"),
            ({"key": 0}, "key_head_dim must be at least 1"),
            ({"value": 2.0}, "value_head_dim must be an integer"),
            ({"dtype": ""}, "dtype must be a non-empty string"),
        ):
            self.refused(text, described, **change)

    def test_parts(self):
        parts = placed("s", described(), tp=2).parts
        assemble = lambda *some: kv_cache.assemble_kv_cache_placement(some, dp_size=1, pp_size=1, tp_size=2)
        self.assertEqual(assemble(*parts).parts, parts)
        change = dataclasses.replace
        self.refused("misses layer=0 head=2", assemble, parts[0], change(parts[1], head_start=3, head_count=1))
        self.refused("must match exactly", assemble, parts[0], change(parts[1], head_start=1, head_count=3))
        self.refused("exact declared replica set", assemble, parts[0], change(parts[1], head_start=0))
        self.refused("misses layer=4 head=2", assemble, parts[0], change(parts[1], layer_ids=(0, 1, 2, 3)))
        self.refused("descriptor differs", assemble, parts[0], change(parts[1], descriptor=described(8)))
        self.refused("exceeds total_kv_heads", change, parts[1], head_count=3)
        self.refused("unknown global layer: 9", change, parts[1], layer_ids=(0, 9))
        self.refused("at least one part", assemble)

    def test_other_bytes(self):
        source = placed("source", described())
        for change, name in (
            ({"dtype": "float16"}, "dtype: bfloat16 and float16"),
            ({"heads": 8}, "total_kv_heads"),
            ({"key": 4}, "key_head_dim"),
            ({"value": 0}, "value_head_dim"),
            ({"layers": 6}, "global_layer_ids"),
        ):
            target = placed("target", described(**change))
            self.refused(f"differ in {name}", plan_kv_cache_transfer_to_local_target, source, target, "dp0-pp0-tp0")
        target = placed("target", described())
        self.refused("unknown KV-cache participant: x", plan_kv_cache_transfer_to_local_target, source, target, "x")
        self.refused(
            "source DP rank 7 is absent",
            plan_kv_cache_transfer_to_local_target, source, target, "dp0-pp0-tp0", source_dp_rank=7,
        )  # fmt: skip
        layout = plan_kv_cache_store_upload(source, object_format=KVCacheStoreFormat.PLHD).layout
        self.refused("differ in dtype", plan_kv_cache_store_load, layout, placed("t", described(dtype="float16")))

    def test_memory(self):
        placement, content = placed("target", described(), tp=2), snapshot(0, 8)
        memory = Memory(placement, "dp0-pp0-tp1", (0, 8))
        good = memory.binding(content, "o")
        change, check = dataclasses.replace, kv_cache.validate_resolved_runtime_binding
        first, *others = good.ranges
        for wrong, text in (
            ({"token_start": 100}, "token interval"),
            ({"head_start": 0}, "unowned heads"),
            ({"region_id": "absent"}, "unknown registered region: absent"),
            ({"offset_bytes": 1 << 40}, "registered region bounds"),
            ({"offset_bytes": 1}, "item aligned"),
            ({"token_stride_bytes": 2}, "strides overlap"),
            ({"token_count": 3}, "has a gap or overlap"),
            ({"offset_bytes": others[0].offset_bytes}, "overlap in memory"),
        ):
            one = change(good, ranges=(change(first, **wrong), *others))
            self.refused(text, check, placement, content, one, operation_id="o")
        self.refused("has a gap", check, placement, content, change(good, ranges=others), operation_id="o")
        self.refused("operation_id", check, placement, content, good, operation_id="p")
        some = tuple(one for one in good.ranges if one.global_layer_id != 4)
        self.refused(
            "misses or exceeds layer 4", check, placement, content, change(good, ranges=some), operation_id="o"
        )
        limits = KVCacheTransferLimits(max_ranges=2)
        self.refused("range count limit", check, placement, content, good, operation_id="o", limits=limits)
        self.refused("in 2 pages of 4, not 1", paged_ranges, placement, "dp0-pp0-tp1", (0, 8), memory.buffers, [0])
        self.refused("no buffer of layer 0", paged_ranges, placement, "dp0-pp0-tp1", (0, 8), {}, [0, 1])
        self.refused("number of a page", paged_ranges, placement, "dp0-pp0-tp1", (0, 8), memory.buffers, [0, -1])


class Engines(unittest.TestCase):
    """Writes by transfer engines, from one to another."""

    def engine(self):
        engine = TransferEngine()
        self.assertEqual(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), 0)
        return engine, f"127.0.0.1:{engine.get_rpc_port()}"

    def opened(self, plan, engine, name):
        executor = KVCacheTransferEngineExecutor(engine[0], instance_id=name, endpoint=engine[1])
        for binding in getattr(plan, f"{name}_bindings"):
            for region in binding.regions:
                executor.register_region(region)
        return executor

    def test_layouts(self):
        engines = {"source": self.engine(), "target": self.engine()}
        endpoints = {name: engine[1] for name, engine in engines.items()}
        for number, (one, other, model) in enumerate((
            ({"tp": 2, "pp": 2, "stages": (3, 2)}, {"tp": 4}, GROUPED),
            ({"tp": 4}, {"tp": 8, "pp": 3, "stages": (1, 2, 2)}, GROUPED),
            ({"tp": 4}, {"tp": 2}, LATENT),
        )):  # fmt: skip
            source = placed("source", described(4, **model), **one)
            target = placed("target", described(16, **model), **other)
            limits = KVCacheTransferLimits(max_batch_operations=100)
            plan, of, to = operation(source, target, snapshot(2, 40), f"o{number}", limits, endpoints)
            executor, owner = (
                self.opened(plan, engines["source"], "source"),
                self.opened(plan, engines["target"], "target"),
            )
            for binding in plan.target_bindings:
                owner.validate_local_binding(binding)
            completion = KVCacheCompletion(plan)
            for name in of:
                for receipt in executor.execute(plan, name, warmup=True):
                    self.assertTrue(receipt.success and receipt.quiesced, receipt)
                    completion.record_writer(receipt)
                self.assertIs(executor.execute(plan, name), executor.execute(plan, name))
            self.assertEqual((completion.state, completion.error), ("writers_done", None))
            for name, memory in to.items():
                self.assertEqual(memory.memory, memory.expected, name)
                completion.record_target(KVCacheTargetReceipt(plan.operation_id, plan.digest, name, True))
            self.assertTrue(completion.can_activate)
            for side, some in ((executor, of), (owner, to)):
                for name in some:
                    side.unregister_region(name)

    def test_a_target_that_is_gone(self):
        engine = self.engine()
        endpoints = {"source": engine[1], "target": "127.0.0.1:1"}
        source, target = placed("source", described()), placed("target", described(), tp=2)
        plan, of, _ = operation(source, target, snapshot(0, 8), "gone", None, endpoints)
        executor = self.opened(plan, engine, "source")
        completion = KVCacheCompletion(plan)
        for receipt in executor.execute(plan, "dp0-pp0-tp0"):
            self.assertEqual((receipt.success, receipt.quiesced, receipt.completed_bytes), (False, True, 0))
            with contextlib.suppress(ValueError):
                completion.record_writer(receipt)
        self.assertEqual(completion.state, "failed")
        # Nothing is in flight: the memory is the caller's again, and the executor goes on.
        for name in of:
            executor.unregister_region(name)
        with self.assertRaisesRegex(ValueError, "not registered with this executor"):
            executor.validate_local_binding(plan.source_bindings[0])


class Pages(unittest.TestCase):
    """Pages in a store, written under one layout and read under another."""

    def setUp(self):
        bed.bed()
        self.store = MooncakeDistributedStore()
        self.assertEqual(self.store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", ""), 0)
        self.addCleanup(self.store.close)
        self.executor = KVCacheStoreExecutor(self.store)
        self.kept = []

    def memory(self, *arguments, **options):
        memory = Memory(*arguments, **options)
        self.assertEqual(self.store.register_buffer(memory.address, len(memory.memory)), 0)
        # It stays registered, and so in memory, until the store is closed.
        self.kept.append(memory)
        return memory

    def upload(self, source, form, pages, begin=0):
        plan = plan_kv_cache_store_upload(source, object_format=form)
        manifest = KVCacheStoreManifest("n", "m", "1", "f", plan.layout)
        tokens = (begin, begin + len(pages) * source.descriptor.page_size)
        size = sum(
            self.executor.upload(plan, self.memory(source, name, tokens, True).store_binding(), pages, begin)
            for name in plan.part_writers
        )
        self.assertEqual(size, sum(plan.layout.part_sizes) * len(pages))
        return self.executor.manifest(self.executor.publish(manifest)), tokens

    def test_layouts(self):
        cases = itertools.product((GROUPED, LATENT), KVCacheStoreFormat)
        for number, (model, form) in enumerate(cases):
            source = placed("source", described(8, **model), tp=4, pp=2, stages=(3, 2))
            pages = [f"py/kv/{number}/{page}" for page in range(5)]
            manifest, tokens = self.upload(source, form, pages, begin=16)
            for page, sizes in ((8, {"tp": 2}), (16, {"tp": 8, "pp": 5}), (5, {"tp": 1, "pp": 2, "stages": (1, 4)})):
                target = placed("target", described(page, **model), **sizes)
                plan = plan_kv_cache_store_load(manifest.layout, target)
                for part in target.parts:
                    with self.subTest(form=form, page=page, part=part.participant_id, **model):
                        for shape in ({}, {"heads_first": True}):
                            memory = self.memory(target, part.participant_id, tokens, **shape)
                            read = self.executor.load(plan, memory.store_binding(), pages, 16)
                            self.assertEqual(memory.memory, memory.expected)
                            entry = sum(map(target.descriptor.head_bytes, target.descriptor.components))
                            self.assertEqual(read, 40 * len(part.layer_ids) * part.head_count * entry)

    def test_a_page_that_is_not_there(self):
        source, target = placed("source", described(), tp=2), placed("target", described())
        pages = ["py/kv/there", "py/kv/lost"]
        manifest, tokens = self.upload(source, KVCacheStoreFormat.LPHD, pages)
        memory = self.memory(target, "dp0-pp0-tp0", tokens)
        plan = plan_kv_cache_store_load(manifest.layout, target)
        self.store.remove("py/kv/lost_1", True)
        with self.assertRaisesRegex(KVCacheStoreError, "not read whole: py/kv/lost_1") as failure:
            self.executor.load(plan, memory.store_binding(), pages)
        self.assertEqual(list(failure.exception.codes), ["py/kv/lost_1"])
        with self.assertRaisesRegex(KVCacheStoreError, "no record"):
            self.executor.manifest("py/kv/nothing")
        for wrong, text in (
            ([], "must not be empty"),
            (pages[:1], "token interval"),
            ([pages[0]] * 2, "duplicate page"),
        ):
            with self.assertRaisesRegex(ValueError, text):
                self.executor.load(plan, memory.store_binding(), wrong)
        with self.assertRaisesRegex(ValueError, "multiples of 4 tokens, not at 2"):
            self.executor.load(plan, memory.store_binding(), pages, 2)
        with self.assertRaisesRegex(ValueError, "writes no part"):
            upload = plan_kv_cache_store_upload(
                placed("source", described(), tp=8), object_format=KVCacheStoreFormat.PLHD
            )
            other = Memory(upload.source_placement, "dp0-pp0-tp1", tokens)
            self.executor.upload(upload, other.store_binding(), pages)
        self.store.close()
        with self.assertRaises(KVCacheStoreError):
            self.executor.load(plan, memory.store_binding(), pages)


if __name__ == "__main__":
    unittest.main()
