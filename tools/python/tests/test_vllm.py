"""`kvplane.vllm` in vLLM's own classes: its factory, the base class of its tiers, its lookups, jobs and results."""

import mmap
import threading
import time
import types
import unittest

import bed
import frameworks

#: Bytes of a chunk, and chunks of the host memory.
SIZE, CHUNKS = 64 << 10, 64
_LONGEST_S = 60


class Engine:
    """Host memory of an engine with the tier, driven as vLLM's manager drives it."""

    def __init__(self, size=SIZE, chunks=CHUNKS, model="model", memory=None, **settings):
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        if "KvplaneTierManager" in settings.get("type", "KvplaneTierManager"):
            # Not about time: a busy machine may take long.
            settings.setdefault("deadline", 60.0)
        self.size = size
        self.memory = memory or mmap.mmap(-1, size * chunks)
        self.view = memoryview(self.memory).cast("B", (chunks, size))
        self.spec = spec(model)
        self.tier = SecondaryTierFactory.create_secondary_tier(
            {"type": "KvplaneTierManager", "module_path": "kvplane.vllm", **settings}, self.view, self.spec
        )
        self.results = {}
        self._last = 0

    def fill(self, chunk, seed):
        self.memory[chunk * self.size : (chunk + 1) * self.size] = bed.pattern(seed << 20, self.size)

    def chunk(self, chunk):
        return self.memory[chunk * self.size : (chunk + 1) * self.size]

    def job(self, keys, chunks, is_load):
        """Submits a job; returns its number."""
        import numpy
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self._last += 1
        ids = numpy.array(chunks, dtype=numpy.int32)
        job = TransferJob(self._last, keys, ids, is_load, request("jobs"))
        (self.tier.submit_load if is_load else self.tier.submit_store)(job)
        return self._last

    def result(self, number):
        """Waits for the result of a job."""
        until = time.monotonic() + _LONGEST_S
        while number not in self.results and time.monotonic() < until:
            self.results.update((one.job_id, one) for one in self.tier.get_finished_jobs())
            time.sleep(0.001)
        return self.results.pop(number)

    def lookup(self, keys, name="lookups"):
        """Steps until all lookups of a request have ended; returns the results and the number of steps."""
        from vllm.v1.kv_offload.base import LookupResult

        asking, until, steps = request(name), time.monotonic() + _LONGEST_S, 0
        while time.monotonic() < until:
            found = [self.tier.lookup(key, asking) for key in keys]
            self.tier.on_schedule_end(types.SimpleNamespace(new_req_ids=(), preempted_req_ids=()))
            steps += 1
            if LookupResult.RETRY not in found:
                break
            time.sleep(0.001)
        self.tier.on_request_finished(asking)
        return [one.name for one in found]

    def close(self):
        self.tier.shutdown()
        self.view.release()


def request(name):
    from vllm.v1.kv_offload.base import ReqContext

    return ReqContext(req_id=name)


def key(number, group=0):
    from vllm.v1.kv_offload.base import make_offload_key

    return make_offload_key(number.to_bytes(32, "big"), group)


def spec(model="model", events=False):
    """An offloading spec, as far as tiers look at one."""
    from vllm.v1.kv_offload.base import OffloadingKVEventsConfig
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )

    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layer.0", "layer.1"), 0),),
        worker_kv_bytes_per_block=SIZE,
        enable_kv_cache_events=events,
        extra_config={},
        engine_id="engine",
        model=OffloadingModelConfig(model, "float16"),
        cache=OffloadingCacheConfig(16, 1),
        parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True),
    )
    shown = OffloadingKVEventsConfig(enable_kv_cache_events=events, self_describing_kv_events=False)
    return types.SimpleNamespace(config=config, blocks_per_chunk=1, kv_events_config=shown)


class Region:
    """Host memory of an engine, as the manager of its blocks sees it."""

    def __init__(self):
        import numpy

        self.memory = numpy.zeros((CHUNKS, SIZE), dtype=numpy.int8)

    def put(self, chunk, value):
        import numpy

        self.memory[chunk] = numpy.frombuffer(value, dtype=numpy.int8)

    def create_kv_memoryview(self):
        return memoryview(self.memory)

    def cleanup(self):
        """Nothing is to be done."""


class Manager:
    """vLLM's manager of tiered offloading, above host memory and the tier of a cluster."""

    def __init__(self, model):
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
        from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

        self.region = Region()
        primary = CPUPrimaryTierOffloadingManager(num_chunks=CHUNKS, mmap_region=self.region)
        config = {"type": "KvplaneTierManager", "module_path": "kvplane.vllm", "deadline": 60.0}
        tier = SecondaryTierFactory.create_secondary_tier(config, primary.get_kv_memoryview(), spec(model))
        self.manager = TieringOffloadingManager(primary, [tier])

    def step(self):
        self.manager.on_schedule_end(types.SimpleNamespace(new_req_ids=(), preempted_req_ids=()))
        time.sleep(0.001)

    def store(self, keys, name):
        """Stores blocks from the engine, as after a prefill, and steps until the tiers have them."""
        asking = request(name)
        self.manager.on_new_request(asking)
        prepared = self.manager.prepare_store(keys, asking)
        for number, chunk in enumerate(prepared.store_spec.chunk_ids):
            self.region.put(int(chunk), bed.pattern(number << 20, SIZE))
        self.manager.complete_store(keys, asking, True)
        self.manager.on_request_finished(asking)
        until = time.monotonic() + _LONGEST_S
        while self.manager._jobs and time.monotonic() < until:
            self.step()

    def load(self, keys, name):
        """Steps until blocks have been looked up, and those of the cluster are in host memory; returns the outcomes, and
        the bytes of those that are there."""
        from vllm.v1.kv_offload.base import LookupResult

        asking, until = request(name), time.monotonic() + _LONGEST_S
        self.manager.on_new_request(asking)
        waits = (LookupResult.RETRY, LookupResult.HIT_PENDING)
        while True:
            found = [self.manager.lookup(key, asking) for key in keys]
            if not any(one in waits for one in found) or time.monotonic() > until:
                break
            self.step()
        hits = [key for key, one in zip(keys, found) if one is LookupResult.HIT]
        chunks = self.manager.prepare_load(hits, asking).chunk_ids if hits else ()
        values = [self.region.memory[int(chunk)].tobytes() for chunk in chunks]
        if hits:
            self.manager.complete_load(hits, asking)
        self.manager.on_request_finished(asking)
        return [one.name for one in found], values


class Tier(unittest.TestCase):
    """A tier in the tests' cluster."""

    def setUp(self):
        frameworks.load("vllm")
        bed.bed()

    def engine(self, **settings):
        engine = Engine(model=settings.pop("model", self.id()), **settings)
        self.addCleanup(engine.close)
        return engine

    def test_stores_are_found_and_loaded_by_another_engine(self):
        first, second = self.engine(), self.engine()
        keys = [key(number) for number in range(20)]
        for chunk in range(20):
            first.fill(chunk, chunk)
        stored = first.result(first.job(keys, range(20), False))
        self.assertTrue(stored.success)
        self.assertEqual(stored.transfer_bytes, 20 * SIZE)
        self.assertEqual(second.lookup([*keys, key(99)]), ["HIT"] * 20 + ["MISS"])
        order = list(reversed(range(40, 60)))
        loaded = second.result(second.job(keys, order, True))
        self.assertEqual((loaded.success, loaded.successful_keys, loaded.transfer_bytes), (True, None, 20 * SIZE))
        for number, chunk in enumerate(order):
            self.assertEqual(second.chunk(chunk), bed.pattern(number << 20, SIZE))
        # Chunks between them have not changed.
        self.assertEqual(second.chunk(39), bytes(SIZE))

    def test_blocks_pass_through_the_manager_of_vllm(self):
        first, second = Manager(self.id()), Manager(self.id())
        self.addCleanup(first.manager.shutdown)
        self.addCleanup(second.manager.shutdown)
        keys = [key(number) for number in range(12)]
        first.store(keys, "prefill")
        self.assertFalse(first.manager._jobs)
        found, values = second.load([*keys, key(99)], "another engine")
        self.assertEqual(found, ["HIT"] * 12 + ["MISS"])
        self.assertEqual(values, [bed.pattern(number << 20, SIZE) for number in range(12)])
        stats = second.manager.get_stats().reduce()
        self.assertEqual(stats["vllm:kv_offload_kvplane_got_blocks:('KvplaneTierManager',)"], 12)

    def test_other_models_and_groups_have_other_blocks(self):
        first, second = self.engine(), self.engine(model="another model")
        self.assertTrue(first.result(first.job([key(1)], [0], False)).success)
        self.assertEqual(second.lookup([key(1)]), ["MISS"])
        self.assertEqual(first.lookup([key(1), key(1, group=1)]), ["HIT", "MISS"])

    def test_a_load_of_what_is_gone_keeps_the_rest(self):
        import kvplane

        engine = self.engine()
        keys = [key(number) for number in range(4)]
        for chunk in range(4):
            engine.fill(chunk, chunk)
        self.assertTrue(engine.result(engine.job(keys, range(4), False)).success)
        self.assertEqual(engine.lookup(keys, "first"), ["HIT"] * 4)
        asking = request("second")
        until = time.monotonic() + _LONGEST_S
        while engine.tier.lookup(keys[2], asking).name == "RETRY" and time.monotonic() < until:
            engine.tier.on_schedule_end(None)
            time.sleep(0.001)
        with kvplane.Store() as store:
            self.assertTrue(store.remove(engine.tier._prefix + keys[2].hex()))
        result = engine.result(engine.job(keys, range(8, 12), True))
        self.assertFalse(result.success)
        self.assertEqual(set(result.successful_keys), {keys[0], keys[1], keys[3]})
        self.assertEqual(engine.chunk(11), bed.pattern(3 << 20, SIZE))
        # The request is not told again and again that it is there.
        self.assertEqual(engine.tier.lookup(keys[2], asking).name, "MISS")
        self.assertEqual(engine.lookup(keys[2:3], "third"), ["MISS"])

    def test_blocks_that_are_there_are_not_sent(self):
        engine = self.engine()
        keys = [key(number) for number in range(8)]
        self.assertTrue(engine.result(engine.job(keys[:6], range(6), False)).success)
        self.assertTrue(engine.result(engine.job(keys, range(8), False)).success)
        counts = engine.tier._blocks.counts()
        self.assertEqual((counts.put_blocks, counts.present_blocks), (14, 6))

    def test_stores_beyond_the_limit_fail_at_once(self):
        engine = self.engine(pending_bytes=4 * SIZE, workers=1)
        gate, entered = threading.Event(), threading.Event()
        engine.tier._blocks.later(lambda: (entered.set(), gate.wait(_LONGEST_S)))
        self.assertTrue(entered.wait(_LONGEST_S))
        waits = engine.job([key(number) for number in range(4)], range(4), False)
        refused = engine.result(engine.job([key(9)], [9], False))
        self.assertFalse(refused.success)
        stats = engine.tier.get_stats()
        name = "vllm:kv_offload_kvplane_"
        self.assertEqual(stats._values[name + "refused_blocks"], {("KvplaneTierManager",): 1})
        self.assertEqual(stats._values[name + "pending_bytes"], {("KvplaneTierManager",): 4 * SIZE})
        gate.set()
        self.assertTrue(engine.result(waits).success)
        engine.tier.drain_jobs()
        self.assertEqual(engine.tier._blocks.pending_bytes, 0)
        self.assertTrue(engine.result(engine.job([key(9)], [9], False)).success)

    def test_back_pressure_of_vllm(self):
        detector = {"backpressure_cls": "EMABackpressureDetector", "policy_cls": "DropStorePolicy"}
        engine = self.engine(backpressure=detector, locality="REMOTE")
        self.assertIsNotNone(engine.tier.bp_detector)
        self.assertTrue(engine.tier.bp_detector.should_store(1))

    def test_metrics_are_declared_and_told_once(self):
        from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

        engine = self.engine()
        declared = type(engine.tier).build_metric_definitions({})
        self.assertTrue(engine.result(engine.job([key(1), key(2)], [0, 1], False)).success)
        self.assertTrue(engine.result(engine.job([key(1)], [5], True)).success)
        stats = engine.tier.get_stats()
        self.assertEqual(stats.reduce()["vllm:kv_offload_kvplane_put_blocks:('KvplaneTierManager',)"], 2)
        for name, kind in stats._types.items():
            wanted = OffloadingGaugeMetadata if kind == "gauge" else OffloadingCounterMetadata
            self.assertIsInstance(declared[name], wanted)
            self.assertEqual(declared[name].labelnames, ("tier",))
        self.assertIsNone(engine.tier.get_stats())

    def test_events(self):
        from vllm.v1.kv_offload.base import Locality

        engine = self.engine(enable_kv_events=True)
        self.assertEqual(list(engine.tier.take_events()), [])
        engine.close()
        engine = Engine.__new__(Engine)
        engine.__dict__.update(results={}, _last=0, size=SIZE, memory=mmap.mmap(-1, SIZE * CHUNKS))
        engine.view = memoryview(engine.memory).cast("B", (CHUNKS, SIZE))
        from kvplane.vllm import KvplaneTierManager

        engine.tier = KvplaneTierManager(
            spec(self.id(), events=True), engine.view, "kvplane", deadline=60.0, enable_kv_events=True
        )
        self.addCleanup(engine.close)
        self.assertTrue(engine.result(engine.job([key(1)], [0], False)).success)
        (event,) = engine.tier.take_events()
        self.assertEqual((event.keys, event.removed, event.locality), ([key(1)], False, Locality.REMOTE))
        self.assertEqual(list(engine.tier.take_events()), [])

    def test_settings_that_are_refused(self):
        import kvplane

        for settings, error in (
            ({"workers": 0}, ValueError), ({"replicas": 9}, ValueError), ({"no_such_setting": 1}, TypeError),
            ({"pending_bytes": "1GB"}, ValueError), ({"control": "127.0.0.1:1"}, kvplane.Unreachable),
        ):  # fmt: skip
            with self.assertRaises(error, msg=str(settings)):
                Engine(**settings)

    def test_a_shutdown_ends_what_waits(self):
        engine = self.engine(workers=1)
        gate, entered = threading.Event(), threading.Event()
        engine.tier._blocks.later(lambda: (entered.set(), gate.wait(_LONGEST_S)))
        self.assertTrue(entered.wait(_LONGEST_S))
        waits = engine.job([key(1)], [0], False)
        closing = threading.Thread(target=engine.tier.shutdown)
        closing.start()
        gate.set()
        closing.join(_LONGEST_S)
        self.assertFalse(closing.is_alive())
        self.assertIn(engine.result(waits).success, (True, False))


class OwnCluster(unittest.TestCase):
    """A tier in a cluster that is full, or dies."""

    def setUp(self):
        frameworks.load("vllm")

    def test_a_full_cluster_has_what_it_says_it_has(self):
        import kvplane

        full = {"memory": "16m", "cluster": "full", "more": ("--shards", "1", "--hard-pins", "90")}
        with bed.own(**full), kvplane.Store() as store:
            engine = Engine(deadline=60.0)
            try:
                with self.assertRaises(kvplane.Error):
                    for number in range(1 << 12):
                        store.put(f"pinned/{number}", bytes(SIZE), pin=True)
                # More blocks than there is room for beside what may not go.
                keys = [key(number) for number in range(48)]
                for chunk in range(48):
                    engine.fill(chunk, chunk)
                engine.result(engine.job(keys, range(48), False))
                there = [one for one, said in zip(keys, engine.lookup(keys)) if said == "HIT"]
                self.assertLess(len(there), 48)
                for one in there:
                    self.assertTrue(engine.result(engine.job([one], [60], True)).success)
                    self.assertEqual(engine.chunk(60), bed.pattern(keys.index(one) << 20, SIZE))
                for name in [f"pinned/{at}" for at in range(number)]:
                    store.remove(name)
                self.assertTrue(engine.result(engine.job([key(50)], [0], False)).success)
            finally:
                engine.close()

    def test_a_cluster_that_dies_fails_loads_and_stores_in_flight(self):
        with bed.own(memory="64m", cluster="dies", more=("--shards", "1")) as cluster:
            engine = Engine(deadline=3.0, workers=2)
            keys = [key(number) for number in range(16)]
            for chunk in range(16):
                engine.fill(chunk, chunk)
            self.assertTrue(engine.result(engine.job(keys, range(16), False)).success)
            loads = [engine.job(keys, range(32, 48), True) for _ in range(20)]
            stores = [engine.job([key(100 + turn)], [turn], False) for turn in range(8)]
            cluster.process.kill()
            loads += [engine.job(keys, range(32, 48), True) for _ in range(2)]
            outcomes = [engine.result(number) for number in (*loads, *stores)]
            self.assertFalse(outcomes[21].success)
            self.assertNotIn("HIT", engine.lookup(keys[:2], "after"))
            if any(one.success for one in outcomes[:22]):
                for chunk in range(16):
                    self.assertEqual(engine.chunk(32 + chunk), bed.pattern(chunk << 20, SIZE))
            # Closing has an end although the cluster does not answer, with stores that wait.
            engine.job([key(200)], [0], False)
            closing = threading.Thread(target=engine.tier.shutdown)
            closing.start()
            closing.join(_LONGEST_S)
            self.assertFalse(closing.is_alive())
            engine.view.release()


if __name__ == "__main__":
    unittest.main()
