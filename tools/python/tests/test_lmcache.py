"""`kvplane.lmcache` in LMCache's own classes: its plug-in factory, the base class of its adapters, keys and results."""

import ctypes
import os
import select
import threading
import unittest

import bed
import frameworks

SIZE, SLOTS = 64 << 10, 64
_LONGEST_S = 60


class Object:
    """Memory of an object, as an adapter sees it."""

    def __init__(self, memory, offset, size=SIZE):
        self.data_ptr = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + offset
        self.byte_array = memoryview((ctypes.c_ubyte * size).from_address(self.data_ptr))
        self._size = size

    def get_size(self):
        return self._size


class Server:
    """Memory of a cache server with the adapter."""

    def __init__(self, arena=True, **settings):
        from lmcache.v1.distributed.internal_api import L1MemoryDesc
        from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
        from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig, _create_plugin_adapter

        self.memory = bytearray(SIZE * SLOTS)
        self.at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        config = PluginL2AdapterConfig.from_dict(
            {"module_path": "kvplane.lmcache", "class_name": "KvplaneL2Adapter", "adapter_params": settings}
        )
        assert isinstance(config, L2AdapterConfigBase)
        described = L1MemoryDesc(self.at, len(self.memory), 4096) if arena else None
        self.adapter = _create_plugin_adapter(config, described)
        self.adapter.set_backend_identity("kvplane")

    def object(self, slot, size=SIZE):
        return Object(self.memory, slot * SIZE, size)

    def fill(self, slot, seed):
        self.memory[slot * SIZE : (slot + 1) * SIZE] = bed.pattern(seed << 20, SIZE)

    def slot(self, slot):
        return bytes(self.memory[slot * SIZE : (slot + 1) * SIZE])

    def store(self, keys, slots):
        return self.stored(self.adapter.submit_store_task(keys, [self.object(slot) for slot in slots]))

    def stored(self, task):
        while True:
            found = self.adapter.pop_completed_store_tasks()
            if task in found:
                return found[task]
            self._wait(self.adapter.get_store_event_fd())

    def lookup(self, keys):
        task = self.adapter.submit_lookup_and_lock_task(keys, {})
        return self._result(self.adapter.query_lookup_and_lock_result, task, self.adapter.get_lookup_and_lock_event_fd())

    def load(self, keys, objects):
        task = self.adapter.submit_load_task(keys, objects)
        return self._result(self.adapter.query_load_result, task, self.adapter.get_load_event_fd())

    def _result(self, query, task, event):
        while True:
            found = query(task)
            if found is not None:
                assert query(task) is None, "a result is told once"
                return found.get_indices_list()
            self._wait(event)

    @staticmethod
    def _wait(event):
        ready, _, _ = select.select([event], [], [], _LONGEST_S)
        assert ready, "no event"
        try:
            os.read(event, 8)
        except BlockingIOError:
            pass

    def close(self):
        self.adapter.close()


class Case(unittest.TestCase):
    """Servers and keys."""

    def server(self, **settings):
        # Not about time: a busy machine may take long.
        server = Server(**{"namespace": self.id(), "deadline": 60.0, **settings})
        self.addCleanup(server.close)
        return server

    @staticmethod
    def key(number, **more):
        from lmcache.v1.distributed.api import ObjectKey

        return ObjectKey(number.to_bytes(32, "big"), "org/model", 0x01000100, **more)


class Adapter(Case):
    """An adapter in the tests' cluster."""

    def setUp(self):
        frameworks.load("lmcache")
        bed.bed()

    def test_stores_are_found_and_loaded_by_another_server(self):
        for arena in (True, False):
            namespace = f"{self.id()} {arena}"
            first, second = (self.server(arena=arena, namespace=namespace) for _ in range(2))
            keys = [self.key(number) for number in range(20)]
            for slot in range(20):
                first.fill(slot, slot)
            stored = first.store(keys, range(20))
            self.assertEqual((stored.is_successful(), stored.bytes_transferred()), (True, 20 * SIZE))
            self.assertEqual(second.lookup([*keys, self.key(99)]), list(range(20)))
            order = list(reversed(range(40, 60)))
            self.assertEqual(second.load(keys, [second.object(slot) for slot in order]), list(range(20)))
            for number, slot in enumerate(order):
                self.assertEqual(second.slot(slot), bed.pattern(number << 20, SIZE))
            self.assertEqual(second.slot(39), bytes(SIZE))
            second.adapter.submit_unlock(keys)

    def test_each_part_of_a_key_counts(self):
        server = self.server()
        self.assertTrue(server.store([self.key(1)], [0]).is_successful())
        others = [self.key(2), self.key(1, object_group_id=1), self.key(1, cache_salt="user")]
        self.assertEqual(server.lookup([self.key(1), *others]), [0])

    def test_events_have_descriptors_of_their_own(self):
        adapter = self.server().adapter
        events = {adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()}
        self.assertEqual(len(events), 3)

    def test_a_store_that_ends_while_results_are_fetched_is_not_lost(self):
        server = Server()
        self.addCleanup(server.adapter.close)
        results = server.adapter._stored
        self.assertEqual(server.adapter.pop_completed_store_tasks(), {})
        server.adapter._finish(results, 7, "ended", 0)
        self.assertEqual(server.adapter.pop_completed_store_tasks(), {7: "ended"})
        self.assertEqual(server.adapter.pop_completed_store_tasks(), {})

    def test_objects_that_are_there_are_not_sent(self):
        server = self.server()
        self.assertEqual(server.store([self.key(1)], [0]).bytes_transferred(), SIZE)
        again = server.store([self.key(1), self.key(2)], [0, 1])
        self.assertEqual((again.is_successful(), again.bytes_transferred()), (True, SIZE))
        self.assertEqual(server.adapter.get_usage().total_bytes_used, 2 * SIZE)

    def test_other_lengths_are_misses(self):
        server = self.server()
        self.assertTrue(server.store([self.key(1)], [0]).is_successful())
        self.assertEqual(server.load([self.key(1)], [server.object(5, SIZE // 2)]), [])
        self.assertEqual(server.load([self.key(1), self.key(2)], [server.object(5), server.object(6)]), [0])

    def test_locks_end_with_the_last_unlock(self):
        import kvplane

        server = self.server()
        keys = [self.key(number) for number in range(3)]
        self.assertTrue(server.store(keys, range(3)).is_successful())
        self.assertEqual(server.lookup(keys), [0, 1, 2])
        (lock,) = {one for locks in server.adapter._locks.values() for one in locks}
        with kvplane.Store() as store:
            self.assertEqual(store.renew(lock.number, 60), 3)
            server.adapter.submit_unlock(keys[:2])
            server.adapter._blocks.drain()
            self.assertEqual(store.renew(lock.number, 60), 3)
            server.adapter.submit_unlock(keys[2:])
            server.adapter._blocks.drain()
            self.assertEqual(store.renew(lock.number, 60), 0)
        self.assertEqual(server.adapter.report_status()["locked_blocks"], 0)
        # Keys without a lock, and locks that nobody ends.
        server.adapter.submit_unlock(keys)
        server.lookup(keys)
        server.adapter._forget_locks(server.adapter._ends[0].until)
        self.assertEqual(server.adapter.report_status()["locked_blocks"], 0)

    def test_stores_beyond_the_limit_fail_at_once(self):
        server = self.server(pending_bytes=2 * SIZE, workers=1)
        gate, entered = threading.Event(), threading.Event()
        server.adapter._blocks.later(lambda: (entered.set(), gate.wait(_LONGEST_S)))
        self.assertTrue(entered.wait(_LONGEST_S))
        waits = server.adapter.submit_store_task([self.key(1), self.key(2)], [server.object(0), server.object(1)])
        self.assertFalse(server.store([self.key(3)], [2]).is_successful())
        gate.set()
        self.assertTrue(server.stored(waits).is_successful())
        status = server.adapter.report_status()
        self.assertEqual((status["refused_blocks"], status["put_blocks"], status["is_healthy"]), (1, 2, True))

    def test_removals_and_listeners(self):
        server, told = self.server(), []

        class Listener:
            def on_l2_keys_stored(self, keys, sizes):
                told.append(("stored", len(keys), sum(sizes)))

            def on_l2_keys_accessed(self, keys):
                told.append(("accessed", len(keys)))

            def on_l2_keys_deleted(self, keys):
                told.append(("deleted", len(keys)))

        server.adapter.register_listener(Listener())
        keys = [self.key(number) for number in range(3)]
        server.store(keys, range(3))
        server.load(keys[:2], [server.object(5), server.object(6)])
        server.adapter.delete([*keys[:2], self.key(9)])
        self.assertEqual(told, [("stored", 3, 3 * SIZE), ("accessed", 2), ("deleted", 2)])
        self.assertEqual(server.lookup(keys), [2])
        self.assertEqual(server.adapter.get_usage().total_bytes_used, SIZE)

    def test_settings_that_are_refused(self):
        for settings, said in (
            ({"workerz": 1}, "did you mean 'workers'"), ({"workers": "many"}, "workers is not 'many'"),
            ({"replicas": True}, "replicas is not True"), ({"lock_seconds": -1}, "lock_seconds"),
            ({"workers": 0}, "above 0"), ({"prefetch": 1}, "prefetch is not 1"),
        ):  # fmt: skip
            with self.assertRaisesRegex(ValueError, said):
                Server(**settings)

    def test_after_close(self):
        server = self.server()
        server.close()
        self.assertEqual(server.adapter.pop_completed_store_tasks(), {})

    def test_a_close_with_stores_in_flight(self):
        server = self.server(workers=1)
        gate, entered = threading.Event(), threading.Event()
        server.adapter._blocks.later(lambda: (entered.set(), gate.wait(_LONGEST_S)))
        self.assertTrue(entered.wait(_LONGEST_S))
        for number in range(4):
            server.adapter.submit_store_task([self.key(number)], [server.object(number)])
        closing = threading.Thread(target=server.close)
        closing.start()
        gate.set()
        closing.join(_LONGEST_S)
        self.assertFalse(closing.is_alive())


class OwnCluster(Case):
    """An adapter in a cluster that dies."""

    def setUp(self):
        frameworks.load("lmcache")

    def test_a_cluster_that_dies_fails_what_is_in_flight(self):
        with bed.own(memory="64m", cluster="dies", more=("--shards", "1")) as cluster:
            server = self.server(deadline=3.0, workers=2)
            keys = [self.key(number) for number in range(16)]
            for slot in range(16):
                server.fill(slot, slot)
            self.assertTrue(server.store(keys, range(16)).is_successful())
            self.assertEqual(server.lookup(keys), list(range(16)))
            tasks = [
                server.adapter.submit_load_task(keys, [server.object(32 + slot) for slot in range(16)]) for _ in range(10)
            ]
            waits = server.adapter.submit_store_task([self.key(99)], [server.object(0)])
            cluster.process.kill()
            event = server.adapter.get_load_event_fd()
            for task in tasks:
                for slot in server._result(server.adapter.query_load_result, task, event):
                    self.assertEqual(server.slot(32 + slot), bed.pattern(slot << 20, SIZE))
            server.stored(waits)
            self.assertFalse(server.store([self.key(100)], [0]).is_successful())
            self.assertEqual(server.lookup(keys), [])
            self.assertEqual(server.load(keys[:1], [server.object(60)]), [])
            self.assertFalse(server.adapter.report_status()["is_healthy"])
            server.close()


if __name__ == "__main__":
    unittest.main()
