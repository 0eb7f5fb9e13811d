"""Batches of many values, and stores that are opened before their cluster has a node."""

import os
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import bed
import kvplane
from test_mooncake_store import Case, opened


class Counted:
    """Wraps a native store and counts its calls by name."""

    def __init__(self, native):
        self._native = native
        self.calls = []

    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self._native, name)


class Batches(Case):
    """A batch is one native call, whatever the number of values."""

    #: Values below 64 KiB are packed together; larger ones are sent from their own memory.
    SIZES = (1, 7, 4096, 65_535, 65_536, 65_537, 300_000, 64, 3, 1 << 20)

    def test_values_of_all_lengths_go_and_come_in_one_batch(self):
        keys = [f"batch-{number}" for number in range(len(self.SIZES))]
        values = [bed.pattern(size + 1, size) for size in self.SIZES]
        kinds = (bytes, bytearray, memoryview)
        given = [kinds[number % 3](value) for number, value in enumerate(values)]
        counted = Counted(self.store._native)
        self.store._native = counted
        self.assertEqual(self.store.put_batch(keys, given), 0)
        self.assertEqual(self.store.get_batch(keys), values)
        self.assertEqual(counted.calls, ["put_many", "get_many"])
        counted.calls.clear()
        handles = self.store.batch_get_buffer(keys)
        self.assertEqual([bytes(handle) for handle in handles], values)
        self.assertEqual(counted.calls, ["sizes", "receive_many"])
        self.assertEqual([self.store.get(key) for key in keys], values)

    def test_what_is_there_stays_unless_it_is_to_be_replaced(self):
        self.assertEqual(self.store.put_batch(["a", "b"], [b"1", b"2"]), 0)
        self.assertEqual(self.store.put_batch(["b", "c"], [b"3", b"4"]), 0)
        self.assertEqual(self.store.get_batch(["a", "b", "c"]), [b"1", b"2", b"4"])
        self.assertEqual(self.store.upsert_batch(["b", "c"], [b"5", b"6" * 70_000]), 0)
        self.assertEqual(self.store.get_batch(["c", "b"]), [b"6" * 70_000, b"5"])

    def test_one_bad_item_costs_the_others_nothing(self):
        keys = ["good", "", "x" * 5000, "not put", "also good"]
        values = [b"1", b"2", b"3", b"5" * 70_000]
        self.assertEqual(self.store.put_batch([*keys[:3], keys[4]], values), -600)
        self.assertEqual(self.store.get_batch(keys), [b"1", b"", b"", b"", b"5" * 70_000])
        found = self.store.batch_get_buffer(keys)
        self.assertEqual([handle and bytes(handle) for handle in found], [b"1", None, None, None, b"5" * 70_000])
        self.assertEqual(self.store.batch_is_exist(keys), [1, 0, 0, 0, 1])
        self.assertEqual(self.store.put_batch(["a"], []), -600)
        self.assertEqual(self.store.put_batch([], []), 0)
        self.assertEqual(self.store.get_batch([]), [])
        self.assertEqual(self.store.batch_get_buffer([]), [])

    def test_wrong_types_are_type_errors_and_nothing_is_stored(self):
        for call in (
            lambda: self.store.put_batch(["t", 5], [b"1", b"2"]),
            lambda: self.store.put_batch(["t", "u"], [b"1", "text"]),
            lambda: self.store.put_batch("tu", [b"1", b"2"]),
            lambda: self.store.get_batch(["t", None]),
            lambda: self.store.get_batch("text"),
        ):
            with self.assertRaises(TypeError):
                call()
        self.assertEqual(self.store.batch_is_exist(["t", "u"]), [0, 0])

    def test_the_same_key_twice_and_more_keys_than_a_request_takes(self):
        self.assertEqual(self.store.put_batch(["twice", "twice"], [b"first", b"second"]), 0)
        self.assertIn(self.store.get("twice"), (b"first", b"second"))
        self.assertEqual(len(set(self.store.get_batch(["twice", "twice"]))), 1)
        keys = [f"many-{number}" for number in range(9_000)]
        self.assertEqual(self.store.put_batch(keys[::2], [key.encode() for key in keys[::2]]), 0)
        expected = [key.encode() if number % 2 == 0 else b"" for number, key in enumerate(keys)]
        self.assertEqual(self.store.get_batch(keys), expected)
        asked = [keys[number * 7919 % 9_000] for number in range(40_000)]
        there = [int(int(key[5:]) % 2 == 0) for key in asked]
        self.assertEqual(self.store.batch_is_exist(asked), there)
        self.assertEqual(self.store.batch_is_exist(tuple(asked[:1000])), there[:1000])
        self.assertTrue(all(type(code) is int for code in self.store.batch_is_exist(keys)))

    def test_values_that_are_replaced_while_they_are_read_are_one_or_the_other(self):
        keys = [f"changing-{number}" for number in range(64)]
        values = [bed.pattern(size, size) for size in (100, 70_000, 5_000)]
        self.assertEqual(self.store.put_batch(keys, [values[0]] * 64), 0)
        stop = threading.Event()

        def replace():
            other, turn = opened(), 0
            while not stop.is_set():
                turn += 1
                other.upsert_batch(keys, [values[turn % 3]] * 64)
            other.close()

        thread = threading.Thread(target=replace)
        thread.start()
        try:
            for _ in range(50):
                self.assertTrue(all(value in values for value in self.store.get_batch(keys)))
        finally:
            stop.set()
            thread.join()

    def test_our_own_interface(self):
        store = kvplane.Store()
        self.addCleanup(store.close)
        store.put_many({"m": b"1", "n": bytearray(70_000)})
        self.assertEqual(store.get_many(["m", "no such", "n"]), [b"1", None, bytes(70_000)])
        found = store.exists_many(["m", "no such", b"n"])
        self.assertEqual(found, [True, False, True])
        self.assertTrue(all(type(one) is bool for one in found))
        with self.assertRaises(kvplane.InvalidArgument):
            store.exists_many(["m", ""])
        with self.assertRaises(kvplane.InvalidArgument):
            store.put_many({"m": b"1", "": b"2"})


class WithoutNodes(unittest.TestCase):
    """Stores of a cluster that no node has joined."""

    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="kvplane-python-")
        self.addCleanup(directory.cleanup)
        self.home, self.directory = directory.name, os.path.join(directory.name, "kvplane")
        state = os.path.join(directory.name, "state")
        words = ["control", "--cluster", "empty", "--state", state, "--runtime-directory", self.directory]
        command = [os.environ["KVPLANE_BINARY"], *words]
        self.control = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.addCleanup(self.control.stdout.close)
        self.addCleanup(self.control.wait)
        self.addCleanup(self.control.kill)
        for line in self.control.stdout:
            if line.startswith("control plane of"):
                break

    def open(self, **settings):
        store = kvplane.Store(cluster="empty", runtime_directory=self.directory, **settings)
        self.addCleanup(store.close)
        return store

    def test_the_first_call_waits_for_the_first_node(self):
        # Longer than any node takes to join, so that the node and not the deadline ends the wait.
        store, joined = self.open(deadline=60), []
        starts = threading.Timer(0.3, lambda: joined.append(self.open(memory=16 << 20)))
        starts.start()
        self.addCleanup(starts.join)
        store.put("early", b"value")
        self.assertEqual(store.get("early"), b"value")
        starts.join()
        self.assertEqual(len(joined), 1)

    def test_closing_waits_for_no_control_plane_that_is_gone(self):
        store = self.open(memory=16 << 20)
        store.put("k", b"value")
        self.control.kill()
        self.control.wait()
        self.assertEqual(store.get("k"), b"value")
        begun = time.monotonic()
        store.close()
        # Four seconds for its objects, one to deregister, plus the time in which in-flight calls notice the silence:
        # five to eight in all. Control plane calls have a deadline of ten seconds and start after the four.
        self.assertLess(time.monotonic() - begun, 13)

    def test_it_does_not_wait_for_ever_and_says_what_is_missing(self):
        store = self.open(deadline=0.2)
        for _ in range(20):
            with self.assertRaisesRegex(kvplane.NoSpace, "no node provides memory"):
                store.put("k", b"value")
        with self.assertRaisesRegex(kvplane.NoSpace, "no node provides memory"):
            store.exists_many(["a", "b"])
        # A node that joins later serves the next call.
        member, until = self.open(memory=16 << 20), time.monotonic() + 60
        while True:
            try:
                store.put("k", b"value")
                break
            except kvplane.NoSpace:
                self.assertLess(time.monotonic(), until)
        self.assertEqual(member.get("k"), b"value")

    def test_closing_ends_the_wait(self):
        store, ended = self.open(deadline=3_600), threading.Event()

        def put():
            with self.assertRaises(kvplane.Error):
                store.put("k", b"value")
            ended.set()

        thread = threading.Thread(target=put)
        thread.start()
        store.close()
        thread.join(60)
        self.assertTrue(ended.is_set())

    def test_a_check_of_health_does_not_wait(self):
        script = """
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "") == 0
print(store.health_check())
"""
        environment = dict(os.environ, XDG_RUNTIME_DIR=self.home)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        self.assertEqual(done.stdout.split(), ["2"], done.stderr)
