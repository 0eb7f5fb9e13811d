"""`BlockStore`, which the connectors share: callbacks that raise, objects of other lengths, calls after a close."""

import gc
import threading
import time
import unittest
import weakref

import bed
from kvplane._blocks import PRESENT, BlockStore

_LONGEST_S = 60
_CLOSED = -1


class Memory(bytearray):
    """Memory whose end can be seen."""


def until(holds):
    """Waits until a condition holds: for what a thread does soon after its last notice."""
    end = time.monotonic() + _LONGEST_S
    while not holds():
        assert time.monotonic() < end, "it does not come to hold"
        time.sleep(0.001)


class Blocks(unittest.TestCase):
    """A store of blocks in the tests' cluster."""

    def setUp(self):
        bed.bed()

    def blocks(self, **settings):
        store = BlockStore(deadline=60.0, **settings)
        self.addCleanup(store.close)
        return store

    def put(self, store, keys, buffers):
        told, ended = [], threading.Event()
        self.assertTrue(store.put_buffers(keys, buffers, lambda codes, _: (told.append(codes), ended.set())))
        self.assertTrue(ended.wait(_LONGEST_S))
        return told[0]

    def get(self, store, keys, buffers):
        told, ended = [], threading.Event()
        store.get_buffers(keys, buffers, lambda codes, _: (told.append(codes), ended.set()))
        self.assertTrue(ended.wait(_LONGEST_S))
        return told[0]

    def test_callbacks_that_raise(self):
        store = self.blocks(workers=2)
        for error in (RuntimeError("of the engine"), SystemExit(3), KeyboardInterrupt()):

            def fail(*_, error=error):
                raise error

            for _ in range(4):
                store.put_buffers([f"{self.id()} {error!r}"], [b"block"], fail)
                store.get_buffers([f"{self.id()} {error!r}"], [bytearray(5)], fail)
                store.later(fail)
            store.drain()
            self.assertIn(repr(error), store.problem)
        self.assertEqual([thread.is_alive() for thread in store._threads], [True, True])
        self.assertEqual(store.pending_bytes, 0)
        self.assertEqual(self.put(store, [self.id()], [b"after"]), [0])

    def test_an_object_of_another_length_is_replaced(self):
        store, key = self.blocks(), self.id()
        self.assertEqual(self.put(store, [key], [b"12345678"]), [0])
        self.assertEqual(self.put(store, [key], [b"abcdefgh"]), [PRESENT])
        self.assertEqual(self.put(store, [key, f"{key}/2"], [b"abcd", b"new"]), [0, 0])
        into = bytearray(4)
        self.assertEqual((self.get(store, [key], [into]), bytes(into)), ([4], b"abcd"))
        self.assertEqual(store.counts().present_blocks, 1)
        memory = bytearray(b"registered")
        import ctypes

        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.assertTrue(store.register(address, len(memory)))
        ended, told = threading.Event(), []
        store.put(([key], [address], [len(memory)]), lambda codes, _: (told.append(codes), ended.set()))
        self.assertTrue(ended.wait(_LONGEST_S))
        self.assertEqual((told, store.sizes([key])), ([[0]], [len(memory)]))
        store.unregister(address)

    def test_idle_threads_keep_no_memory(self):
        store = self.blocks(workers=1)
        memory = Memory(b"block")
        seen = weakref.ref(memory)
        self.assertEqual(self.put(store, [self.id()], [memory]), [0])
        del memory
        until(lambda: gc.collect() is not None and seen() is None)
        owner = Memory()
        seen = weakref.ref(owner)
        store.later(lambda owner=owner: None)
        del owner
        until(lambda: gc.collect() is not None and seen() is None)

    def test_what_is_begun_after_a_close_ends(self):
        store = self.blocks()
        gate, entered, told = threading.Event(), threading.Event(), []
        for _ in range(4):
            store.later(lambda: (entered.set(), gate.wait(_LONGEST_S)))
        self.assertTrue(entered.wait(_LONGEST_S))
        closing = threading.Thread(target=store.close)
        store.later(lambda: told.append("called"), lambda: told.append("dropped"))
        closing.start()
        until(lambda: store._is_closed)
        gate.set()
        closing.join(_LONGEST_S)
        self.assertFalse(closing.is_alive())
        store.later(lambda: told.append("called"), lambda: told.append("dropped"))
        self.assertEqual(told, ["dropped", "dropped"])
        self.assertEqual(self.put(store, ["k"], [b"1"]), [_CLOSED])
        self.assertEqual(self.get(store, ["k"], [bytearray(1)]), [_CLOSED])
        store.drain()


if __name__ == "__main__":
    unittest.main()
