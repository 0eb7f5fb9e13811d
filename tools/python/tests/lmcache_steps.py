"""Cases of `kvplane.lmcache` with stand-ins for LMCache, run by `test_lmcache_steps.py` in a process of its own."""

import ctypes
import threading
import time
import types
import unittest

import fake_lmcache

fake_lmcache.install()

from kvplane.lmcache import KvplaneL2Adapter, KvplaneL2AdapterConfig  # noqa: E402

SIZE = 4096
_LONGEST_S = 60
_BYTE = types.SimpleNamespace(itemsize=1)


def key(number, **more):
    return fake_lmcache.Key(number.to_bytes(32, "big"), **more)


class Object:
    """Memory of an object."""

    def __init__(self, size=SIZE):
        self._memory = (ctypes.c_ubyte * size)()
        self.data_ptr, self.byte_array, self._size = ctypes.addressof(self._memory), memoryview(self._memory), size

    def get_size(self):
        return self._size


class Adapter(unittest.TestCase):
    """Adapters in the cluster of the process that runs this."""

    def adapter(self, **settings):
        adapter = KvplaneL2Adapter(KvplaneL2AdapterConfig(**{"namespace": self.id(), "deadline": 60.0, **settings}))
        self.addCleanup(adapter.close)
        return adapter

    @staticmethod
    def wait(query):
        end = time.monotonic() + _LONGEST_S
        while True:
            found = query()
            if found is not None:
                return found
            assert time.monotonic() < end, "the task does not end"
            time.sleep(0.001)

    def store(self, adapter, keys, sizes=None):
        task = adapter.submit_store_task(keys, [Object(size) for size in sizes or [SIZE] * len(keys)])
        done = self.wait(lambda: adapter.pop_completed_store_tasks().get(task))
        return done.successful, done.transferred

    def lookup(self, adapter, keys, layouts=None):
        task = adapter.submit_lookup_and_lock_task(keys, layouts or {})
        return self.wait(lambda: adapter.query_lookup_and_lock_result(task)).get_indices_list()

    def load(self, adapter, keys, size=SIZE):
        task = adapter.submit_load_task(keys, [Object(size) for _ in keys])
        return self.wait(lambda: adapter.query_load_result(task)).get_indices_list()

    def test_listeners_that_raise(self):
        adapter = self.adapter(workers=2)

        def listen(*_):
            raise RuntimeError("of a listener")

        adapter.listeners.append(listen)
        for number in range(6):
            self.assertEqual(self.store(adapter, [key(number)]), (True, SIZE))
            self.assertEqual(self.load(adapter, [key(number)]), [0])
        adapter._blocks.drain()
        self.assertIn("of a listener", adapter.report_status()["last_problem"])
        self.assertTrue(adapter.report_status()["is_healthy"])
        adapter.listeners.clear()
        self.assertEqual(self.lookup(adapter, [key(0), key(9)]), [0])

    def test_another_length_replaces(self):
        adapter, half = self.adapter(), {0: fake_lmcache.Layout([(2, SIZE // 4)], [_BYTE])}
        self.assertEqual(self.store(adapter, [key(1)]), (True, SIZE))
        other = self.adapter()
        self.assertEqual(self.lookup(other, [key(1)]), [0])
        self.assertEqual(self.lookup(other, [key(1)], half), [])
        self.assertEqual(self.lookup(other, [key(1)], {0: fake_lmcache.Layout([(SIZE,)], [_BYTE])}), [0])
        self.assertEqual(self.lookup(other, [key(1)], {0: fake_lmcache.Layout([(SIZE,)], [object()])}), [0])
        self.assertEqual(self.lookup(other, [key(1)], {1: half[0]}), [0])
        self.assertEqual(self.store(other, [key(1)], [SIZE // 2]), (True, SIZE // 2))
        self.assertEqual(self.lookup(other, [key(1)], half), [0])
        self.assertEqual(self.load(other, [key(1)], SIZE // 2), [0])
        # Objects that this adapter moves may be longer than their tensors.
        self.assertEqual(self.store(other, [key(2)], [SIZE // 2 + 64]), (True, SIZE // 2 + 64))
        self.assertEqual(self.lookup(other, [key(2)], half), [0])

    def test_tasks_after_a_close_end(self):
        adapter = self.adapter()
        adapter.close()
        self.assertEqual(self.store(adapter, [key(1)]), (False, 0))
        self.assertEqual(self.lookup(adapter, [key(1)]), [])
        self.assertEqual(self.load(adapter, [key(1)]), [])
        adapter.close()
        self.assertFalse(adapter.report_status()["is_healthy"])

    def test_lookups_that_wait_at_a_close_end(self):
        adapter, gate, entered = self.adapter(workers=1), threading.Event(), threading.Event()
        adapter._blocks.later(lambda: (entered.set(), gate.wait(_LONGEST_S)))
        self.assertTrue(entered.wait(_LONGEST_S))
        task = adapter.submit_lookup_and_lock_task([key(1)], {})
        closing = threading.Thread(target=adapter.close)
        closing.start()
        gate.set()
        closing.join(_LONGEST_S)
        self.assertEqual(self.wait(lambda: adapter.query_lookup_and_lock_result(task)).get_indices_list(), [])

    def test_namespaces_are_apart(self):
        one, two = self.adapter(namespace=f"{self.id()}a"), self.adapter(namespace=f"{self.id()}a/b")
        self.assertEqual(self.store(one, [key(1, model_name="b/model")]), (True, SIZE))
        self.assertEqual(self.lookup(two, [key(1, model_name="model")]), [])
        self.assertEqual(self.store(self.adapter(namespace="a b/%é"), [key(1)]), (True, SIZE))

    def test_namespaces_that_no_key_can_have(self):
        for namespace in ("x" * 1025, "/" * 400, "\ud800"):
            with self.assertRaisesRegex(ValueError, "namespace"):
                KvplaneL2AdapterConfig(namespace=namespace)

    def test_a_key_that_is_in_a_task_repeatedly_is_counted_once(self):
        adapter = self.adapter()
        self.assertEqual(self.store(adapter, [key(1)] * 3), (True, SIZE))
        self.assertEqual(adapter.used, SIZE)
        self.assertEqual(self.load(adapter, [key(1)]), [0])


if __name__ == "__main__":
    unittest.main()
