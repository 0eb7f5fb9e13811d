"""`mooncake.store` as its users call it: arguments, return values and error numbers."""

import contextlib
import ctypes
import gc
import io
import mmap
import pathlib
import sys
import threading
import time
import unittest
from unittest import mock

import bed
from kvplane import _native
import mooncake.store
from mooncake.store import BufferLease, BufferPool, MooncakeDistributedStore, ReplicateConfig, SoftPinAction


def opened(**kept):
    """Opens a store on the tests' cluster."""
    store = MooncakeDistributedStore()
    code = store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "127.0.0.1:50051", **kept)
    assert code == 0, code
    return store


class Case(unittest.TestCase):
    """A store, and a registered buffer of 1 MiB."""

    def setUp(self):
        bed.bed()
        self.store = opened()
        self.addCleanup(self.store.close)
        self.store.remove_all(True)
        self.buffer = bytearray(1 << 20)
        self.at = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        self.assertEqual(self.store.register_buffer(self.at, len(self.buffer)), 0)

    def fill(self, offset, size):
        """Fills the buffer with a pattern and returns it."""
        value = bed.pattern(offset + 1, size)
        self.buffer[offset : offset + size] = value
        return value


class Puts(Case):
    """Puts and gets by value."""

    def test_values_come_back_and_are_not_overwritten(self):
        self.assertEqual(self.store.put("k", b"hello"), 0)
        self.assertEqual(self.store.put("k", b"other"), 0)
        self.assertEqual(self.store.get("k"), b"hello")
        self.assertEqual(self.store.upsert("k", b"other"), 0)
        self.assertEqual(self.store.get("k"), b"other")
        self.assertEqual(self.store.get("no such"), b"")
        self.assertEqual(self.store.get_batch(["k", "no such"]), [b"other", b""])

    def test_all_kinds_of_buffers(self):
        for kind in (bytes, bytearray, memoryview):
            for size in (1, 4096, 65_535, 65_536, 3 << 20):
                value = bed.pattern(size, size)
                key = f"{kind.__name__}-{size}"
                self.assertEqual(self.store.put(key, kind(value)), 0)
                self.assertEqual(self.store.get(key), value)
                self.assertEqual(self.store.get_size(key), size)

    def test_numpy_arrays(self):
        try:
            import numpy
        except ImportError:
            self.skipTest("numpy is not installed")
        array = numpy.arange(50_000, dtype=numpy.float64)
        self.assertEqual(self.store.put("array", array), 0)
        self.assertTrue((numpy.frombuffer(self.store.get("array")) == array).all())
        with self.assertRaises((ValueError, BufferError)):
            self.store.put("gaps", array[::2])

    def test_numbers_of_errors(self):
        self.assertEqual(self.store.put("empty", b""), -600)
        self.assertEqual(self.store.put("", b"x"), -600)
        self.assertEqual(self.store.get_size("no such"), -704)
        self.assertEqual(self.store.remove("no such"), -704)
        self.assertEqual(self.store.put_batch(["a", "b"], [b"x"]), -600)
        self.assertEqual(self.store.remove_by_regex("("), -600)
        self.assertIsNone(self.store.get_buffer("no such"))

    def test_parts_and_batches(self):
        self.assertEqual(self.store.put_parts("parts", b"one", bytearray(b"two")), 0)
        self.assertEqual(self.store.get("parts"), b"onetwo")
        self.assertEqual(self.store.put_batch(["a", "b"], [b"1", b"22"]), 0)
        self.assertEqual(self.store.batch_is_exist(["a", "x", "b"]), [1, 0, 1])
        self.assertEqual(self.store.batch_is_exist([]), [])
        self.assertEqual(self.store.is_exist("a"), 1)
        self.assertEqual(self.store.batch_remove(["a", "x"], force=True), [0, -704])
        self.assertEqual(self.store.remove_by_regex("^b$"), 1)
        self.assertEqual(self.store.remove_all(), 1)

    def test_keys_that_cannot_be(self):
        store, at = self.store, self.at
        store.put("a", b"value")
        for key in ("", "x" * 5000):
            self.assertEqual(store.is_exist(key), 0)
            self.assertEqual(store.batch_is_exist(["a", key]), [1, 0])
            self.assertEqual(store.get_size(key), -704)
            self.assertEqual(store.remove(key), -704)
            self.assertEqual(store.batch_remove([key, "none"]), [-704, -704])
            self.assertEqual(store.get_into(key, at, 100), -704)
            self.assertEqual(store.batch_get_into([key, "a"], [at, at + 100], [100, 100]), [-704, 5])
            self.assertEqual(store.batch_get_into_multi_buffers([key], [[at]], [[100]]), [-704])
            self.assertEqual(store.get_into_ranges([at], [[key]], [[[0]]], [[[0]]], [[[1]]]), [[[-704]]])
            self.assertEqual(store.batch_get_session_start([key]), [-704])
            self.assertEqual(store.put_from(key, at, 8), -600)
            self.assertEqual(store.batch_put_from([key, "b"], [at, at], [8, 8]), [-600, 0])
            self.assertEqual(store.batch_put_from_multi_buffers([key], [[at]], [[8]]), [-600])
            self.assertEqual(store.batch_put_session_start([key, "s"], [8, 8]), [-600, 0])
            self.assertEqual(store.batch_put_session_revoke([key, "s"]), [-600, 0])

    def test_what_is_no_list_of_keys_is_not_taken_apart(self):
        store = self.store
        self.assertEqual(store.put_batch(["a", "b", "c"], [b"1", b"2", b"3"]), 0)
        for keys in ("abc", b"abc", {"a"}, {"a": 1}, {"a": 1}.keys(), iter(["a"]), (key for key in "a"), None, 5, [5]):
            for call in (
                lambda: store.batch_replica_clear(keys),
                lambda: store.batch_get_replica_desc(keys),
                lambda: store.batch_get_buffer(keys),
                lambda: store.get_batch(keys),
                lambda: store.put_batch(keys, [b"x"]),
                lambda: store.batch_is_exist(keys),
                lambda: store.batch_remove(keys),
                lambda: store.create_copy_task("a", keys),
                lambda: store.unmount_segment(keys),
                lambda: store.batch_put_from(keys, [self.at], [1]),
                lambda: store.batch_get_into(keys, [self.at], [1]),
                lambda: store.batch_get_session_start(keys),
                lambda: store.batch_get_session_end(keys),
                lambda: store.batch_put_session_start(keys, [1]),
                lambda: store.batch_put_session_end(keys),
                lambda: store.get_into_ranges([self.at], [keys], [[[0]]], [[[0]]], [[[1]]]),
            ):
                with self.assertRaises(TypeError, msg=repr(keys)):
                    call()
        self.assertEqual(store.batch_is_exist(("a", "b", "c")), [1, 1, 1])

    def test_a_batch_with_a_value_of_no_bytes_stores_nothing(self):
        for value in (b"", bytearray(), memoryview(b"")):
            self.assertEqual(self.store.put_batch(["b5", "b6"], [b"1", value]), -600)
            self.assertEqual(self.store.upsert_batch(["b5", "b6"], [b"1", value]), -600)
        self.assertEqual(self.store.batch_is_exist(["b5", "b6"]), [0, 0])

    def test_handles_outlive_the_store(self):
        value = bed.pattern(9, 100_000)
        self.store.put("handle", value)
        handle = self.store.get_buffer("handle")
        missing, again = self.store.batch_get_buffer(["no such", "handle"])
        self.store.close()
        self.assertIsNone(missing)
        self.assertEqual(bytes(handle), value)
        self.assertEqual(handle.size(), len(value))
        self.assertEqual(len(again), len(value))
        self.assertEqual(ctypes.string_at(handle.ptr(), len(value)), value)

    def test_types(self):
        for call in (
            lambda: self.store.put(5, b""),
            lambda: self.store.put("k", None),
            lambda: self.store.put("k", "text"),
            lambda: self.store.get(),
            lambda: self.store.get(key="k"),
            lambda: self.store.batch_is_exist("text"),
            lambda: self.store.get_into("k", -1, 5),
            lambda: self.store.get_into("k", "address", 5),
            lambda: self.store.register_buffer(1.5, 5),
            lambda: self.store.put("k", b"v", config=5),
            lambda: self.store.remove("k", "yes"),
            lambda: self.store.batch_remove(["k"], []),
            lambda: self.store.remove_all("yes"),
            lambda: self.store.query_task("x"),
            lambda: self.store.query_task((1,)),
            lambda: self.store.query_task(("a", "b")),
            lambda: self.store.query_task((-1, 2)),
        ):
            with self.assertRaises(TypeError):
                call()
        with self.assertRaises(TypeError) as caught:
            MooncakeDistributedStore().setup("h", "P", 0, 16 << 20, "tcp", "", "", enable_magic=True)
        self.assertIn("enable_magic", str(caught.exception))
        with self.assertRaises(TypeError):
            MooncakeDistributedStore().setup("h", "P")

    def test_outcomes_are_plain_numbers(self):
        self.store.put("k", b"v")
        codes = self.store.batch_get_into(["k", "x"], [self.at, self.at + 100], [10, 10])
        self.assertIs(type(codes), list)
        self.assertTrue(all(type(code) is int for code in codes))


class Memory(Case):
    """Puts from, and gets into, the caller's memory."""

    def test_registering(self):
        self.assertEqual(self.store.register_buffer(self.at, len(self.buffer)), -600)
        self.assertEqual(self.store.register_buffer(self.at + 4096, 4096), -600)
        self.assertEqual(self.store.register_buffer(0, 4096), -600)
        self.assertEqual(self.store.register_buffer(self.at, 0), -600)
        self.assertEqual(self.store.register_buffer(2**64 - 4096, 8192), -600)
        self.assertEqual(self.store.unregister_buffer(self.at + 1), -600)
        self.assertEqual(self.store.unregister_buffer(self.at), 0)
        self.assertEqual(self.store.unregister_buffer(self.at), -600)

    def test_round_trip(self):
        value = self.fill(0, 4096)
        self.assertEqual(self.store.put_from("k", self.at, 4096), 0)
        self.assertEqual(self.store.get_into("k", self.at + 8192, 8192), 4096)
        self.assertEqual(self.buffer[8192 : 8192 + 4096], value)
        self.assertEqual(self.store.get_into("k", self.at, 100), -600)
        self.assertEqual(self.store.get_into("no such", self.at, 100), -704)

    def test_batches(self):
        keys = [f"block-{index}" for index in range(64)]
        values = [self.fill(index * 4096, 4096) for index in range(64)]
        places = [self.at + index * 4096 for index in range(64)]
        self.assertEqual(self.store.batch_put_from(keys, places, [4096] * 64), [0] * 64)
        there = [self.at + (128 + index) * 4096 for index in range(64)]
        self.assertEqual(self.store.batch_get_into(keys, there, [4096] * 64), [4096] * 64)
        for index, value in enumerate(values):
            start = (128 + index) * 4096
            self.assertEqual(self.buffer[start : start + 4096], value)
        self.assertEqual(self.store.batch_put_from(["d", "d"], places[:2], [4, 4]), [0, 0])
        self.assertEqual(self.store.batch_put_from(["a", "b"], places[:1], [4]), [-600, -600])
        self.assertEqual(self.store.batch_get_into([], [], []), [])

    def test_one_bad_item_does_not_spoil_the_others(self):
        self.store.put_batch(["a", "b"], [b"aa", b"bbb"])
        codes = self.store.batch_get_into(
            ["a", "", "b", "no such", "a", "b"],
            [self.at, self.at, 4096, self.at + 8, self.at + 16, self.at + 16],
            [10, 10, 10, 10, 10, 10],
        )
        self.assertEqual(codes[0], 2)
        self.assertLess(codes[1], 0)
        self.assertEqual(codes[2], -600)
        self.assertEqual(codes[3], -704)
        self.assertEqual(codes[4:], [2, 3])

    def test_pieces(self):
        value = self.fill(0, 300)
        pointers, sizes = [[self.at, self.at + 100]], [[100, 200]]
        self.assertEqual(self.store.batch_put_from_multi_buffers(["m"], pointers, sizes), [0])
        there = [[self.at + 1000, self.at + 2000, self.at + 3000]]
        self.assertEqual(self.store.batch_get_into_multi_buffers(["m"], there, [[150, 50, 100]]), [300])
        got = self.buffer[1000:1150] + self.buffer[2000:2050] + self.buffer[3000:3100]
        self.assertEqual(got, value)
        self.assertEqual(self.store.batch_get_into_multi_buffers(["m"], there, [[100, 50, 100]]), [-600])
        self.assertEqual(self.store.put_from_with_metadata("meta", self.at + 10, self.at, 90, 10), 0)
        self.assertEqual(self.store.get("meta"), value[:100])

    def test_memory_that_is_not_registered(self):
        mapped = mmap.mmap(-1, 1 << 16)
        mapped[:5] = b"hello"
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self.assertEqual(self.store.put_from("mapped", address, 5), 0)
        self.assertEqual(self.store.get("mapped"), b"hello")
        self.assertEqual(self.store.get_into("mapped", address, 5), -600)
        for address in (0, 4096, 2**63, 2**64 - 2):
            self.assertEqual(self.store.put_from("bad", address, 16), -600)
        self.assertEqual(self.store.put_from("bad", self.at, 2**63), -600)
        self.assertEqual(self.store.get_into("mapped", self.at, 2**63), -600)
        self.assertEqual(self.store.is_exist("bad"), 0)

    def test_memory_that_was_freed(self):
        # Large enough that no other allocation can fill the hole.
        size = 1 << 30
        mapped = mmap.mmap(-1, size)
        address = _native.buffer_address(mapped, True)[0]
        mapped.close()
        self.assertEqual(self.store.register_buffer(address, size), -600)
        self.assertEqual(self.store.put_from("freed", address, size), -600)

    def test_memory_that_cannot_be_written(self):
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ)
        address = _native.buffer_address(page, False)[0]
        self.assertEqual(self.store.register_buffer(address, 4096), 0)
        self.store.put("k", b"value")
        self.assertEqual(self.store.get_into("k", address, 4096), -600)
        self.assertEqual(self.store.put_from("zeros", address, 4096), 0)
        self.store.unregister_buffer(address)

    def test_upsert(self):
        self.fill(0, 200)
        self.assertEqual(self.store.batch_put_from(["u"], [self.at], [100]), [0])
        self.assertEqual(self.store.batch_upsert_from(["u"], [self.at], [200]), [0])
        self.assertEqual(self.store.get_size("u"), 200)
        self.assertEqual(self.store.upsert_from("u", self.at, 50), 0)
        self.assertEqual(self.store.get_size("u"), 50)

    def test_configuration(self):
        self.fill(0, 4096)
        config = ReplicateConfig()
        config.with_hard_pin = True
        config.soft_pin_action = SoftPinAction.ENABLE
        config.group_ids = ["one", "two", "one"]
        config.preferred_segment = self.store.get_hostname()
        places = [self.at, self.at + 8, self.at + 16]
        self.assertEqual(self.store.batch_put_from(["a", "b", "c"], places, [8] * 3, config), [0] * 3)
        self.assertEqual(self.store.batch_is_exist(["a", "b", "c"]), [1] * 3)
        keys, values = ["e", "f", "g"], [b"1", b"22", b"333"]
        self.assertEqual(self.store.put_batch(keys, values, config), 0)
        self.assertEqual(self.store.get_batch(keys), values)
        told = []
        put = lambda keys, values, kept: told.append((keys, values, kept[0])) or [-len(key) for key in keys]
        codes = mooncake.store._grouped(put, (["e", "ff", "ggg"], values), config, False)
        self.assertEqual(codes, [-1, -2, -3])
        self.assertEqual([part[:2] for part in told], [(["e", "ggg"], [b"1", b"333"]), (["ff"], [b"22"])])
        self.assertNotEqual(told[0][2], told[1][2])
        self.assertTrue(hasattr(config, "session_ids"))
        config.soft_pin_action, config.soft_pin_ttl_ms = SoftPinAction.DISABLE, 1000
        self.assertEqual(self.store.put("d", b"x", config), -600)
        for wrong in (-1, 1 << 64, "soon"):
            with self.assertRaises(TypeError):
                config.soft_pin_ttl_ms = wrong

    def test_configurations_that_are_refused(self):
        store, at = self.store, self.at
        self.fill(0, 64)

        def config(**values):
            made = ReplicateConfig()
            for name, value in values.items():
                setattr(made, name, value)
            return made

        both = (
            ({"replica_num": 0}, -600),
            ({"nof_replica_num": 1}, -600),
            ({"dfs_replica_num": 1}, -1601),
            ({"dfs_replica_num": 1, "group_ids": ["g"] * 3}, -1601),
            ({"group_ids": []}, -600),
            ({"group_ids": ["g"] * 3}, -600),
            ({"replica_num": 0, "dfs_replica_num": 1}, -600),
        )
        one, two = [({"group_ids": ["g", "h"]}, -600)], [({"group_ids": ["g"]}, -600)]
        for values, code in [*both, *one]:
            wrong = config(**values)
            self.assertEqual(store.put("k", b"x", wrong), code, values)
            self.assertEqual(store.upsert("k", b"x", config=wrong), code)
            self.assertEqual(store.put_parts("k", b"x", b"y", config=wrong), code)
            self.assertEqual(store.put_from("k", at, 8, wrong), code)
            self.assertEqual(store.upsert_from("k", at, 8, wrong), code)
        for values, code in [*both, *two]:
            wrong = config(**values)
            self.assertEqual(store.put_batch(["k", "l"], [b"1", b"2"], wrong), code, values)
            self.assertEqual(store.put_batch([], [], wrong), 0)
            self.assertEqual(store.batch_put_from(["k", "l"], [at, at], [8, 8], wrong), [code] * 2)
            self.assertEqual(store.batch_put_from([], [], [], wrong), [])
            pieces = [[at], [at]], [[8], [8]]
            self.assertEqual(store.batch_put_from_multi_buffers(["k", "l"], *pieces, wrong), [code] * 2)
            self.assertEqual(store.batch_put_session_start(["k", "l"], [8, 8], wrong), [code] * 2)
        self.assertEqual(store.batch_is_exist(["k", "l"]), [0, 0])
        self.assertEqual(store.put("k", b"x", config(group_ids=["g"])), 0)
        self.assertEqual(store.put_batch(["l", "m"], [b"1", b"2"], config(group_ids=["g", "h"])), 0)
        self.assertEqual(store.put("n", b"x", config(group_ids=None, replica_num=5)), 0)


    def test_parts_of_all_lengths(self):
        large = [bed.pattern(seed << 20, size) for seed, size in ((1, 1 << 20), (2, 70_000), (3, (64 << 10) - 1))]
        for number, parts in enumerate((
            [b"head", large[0], b"", bytearray(large[1]), b"middle", memoryview(large[2]), b"tail"],
            [large[0]],
            [b"short"] * 3,
            [large[1][at : at + 50] for at in range(0, 70_000, 50)],
        )):  # fmt: skip
            key = f"parts/{number}"
            self.assertEqual(self.store.put_parts(key, *parts), 0)
            self.assertEqual(self.store.get(key), b"".join(parts))
            # Existing objects stay, and are replaced.
            self.assertEqual(self.store.put_parts(key, large[0], b"other"), 0)
            self.assertEqual(self.store.get(key), b"".join(parts))
            self.assertEqual(self.store.upsert_parts(key, b"other", large[1]), 0)
            self.assertEqual(self.store.get(key), b"other" + large[1])
        for nothing in ((), (b"", b"")):
            self.assertEqual(self.store.put_parts("nothing", *nothing), -600)

    def test_long_parts_are_not_copied(self):
        # A copy in this process's own memory would be over its limit, and end the process.
        bed.python(
            """
import re, resource
import bed
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "") == 0
value = bytes(64 << 20)
assert store.put_parts("first", b"head", value[:1 << 20]) == 0
with open("/proc/self/status") as status:
    used = int(re.search(r"VmData:\\s+(\\d+) kB", status.read())[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + (32 << 20), resource.RLIM_INFINITY))
assert store.put_parts("long", b"head", value, b"tail") == 0
assert store.get_size("long") == len(value) + 8
store.close()
"""
        )

    def test_memory_that_is_not_registered_in_a_batch(self):
        memory, size = mmap.mmap(-1, 3 << 20), 1024
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        memory[:] = bed.pattern(9, len(memory))
        keys = [f"unregistered/{number}" for number in range(3000)]
        places = [at + number * size for number in range(3000)]
        places[7] = 4096
        codes = self.store.batch_put_from(keys, places, [size] * 3000)
        self.assertEqual([number for number, code in enumerate(codes) if code], [7])
        self.assertEqual(codes[7], -600)
        values = self.store.get_batch(keys)
        for number in (0, 6, 8, 1500, 2999):
            self.assertEqual(values[number], memory[number * size : (number + 1) * size])
        self.assertEqual(values[7], b"")
        # With registered and other pieces of one object, and an object of which a part is nowhere.
        pieces = [[self.at, at], [at, 4096], [self.at + 64, self.at]]
        self.buffer[:128] = bed.pattern(5, 128)
        names = ["mixed", "nowhere", "own"]
        self.assertEqual(self.store.batch_put_from_multi_buffers(names, pieces, [[64, 64]] * 3), [0, -600, 0])
        self.assertEqual(self.store.get("mixed"), self.buffer[:64] + memory[:64])
        self.assertEqual(self.store.get("own"), self.buffer[64:128] + self.buffer[:64])

    def test_sizes_of_a_pool(self):
        with _pool(self.store) as pool:
            with pool.acquire(bed.Word(70_000)) as lease:
                self.assertEqual((lease.size, len(lease.buffer)), (70_000, 70_000))
            pool.prewarm(bed.Word(4096), bed.Word(1))
            for call in (lambda: pool.acquire(1.5), lambda: pool.acquire("5"), lambda: pool.prewarm(4096.0, 1),
                         lambda: pool.prewarm(4096, 1.0), lambda: BufferPool(self.store, max_bytes=1.5)):  # fmt: skip
                with self.assertRaisesRegex(TypeError, "is int, not"):
                    call()

    def test_buffers_of_one_call_come_together(self):
        with _pool(self.store) as pool:
            for sizes, held in (([65536] * 5, []), ([65536] * 2, [pool.acquire(65536) for _ in range(3)])):
                with self.assertRaisesRegex(RuntimeError, "over the capacity of this pool, 262144"):
                    pool.acquire_all(sizes, held=held)
            del held
            one = pool.acquire(65536)
            with self.assertRaisesRegex(RuntimeError, "exhausted: no 262144 bytes"):
                pool.acquire_all([65536] * 4, block=False)
            with self.assertRaisesRegex(TimeoutError, "within 0.01 s"):
                pool.acquire_all([65536] * 4, timeout=0.01)
            # Buffers that cannot be lent together are not lent at all.
            others = [pool.acquire(65536, block=False) for _ in range(3)]
            with mock.patch("mooncake.buffer_pool.DEFAULT_TIMEOUT_S", 0), self.assertRaises(TimeoutError):
                pool.acquire(1)
            threading.Timer(0.01, lambda: [lease.release() for lease in (one, *others)]).start()
            leases = pool.acquire_all([65536] * 4)
            self.assertEqual(len({lease.ptr for lease in leases}), 4)
            for lease in leases:
                lease.release()
        pool = BufferPool(self.store, max_regions=1)
        pool.acquire(65536).release()
        # A free buffer of another size makes room.
        pool.acquire(1 << 20).release()
        pool.close()

    def test_a_pool_that_is_dropped_unregisters_its_memory(self):
        places = []
        for _ in range(3):
            pool = BufferPool(self.store)
            lease = pool.acquire(70_000)
            places.append(lease.ptr)
            del pool
            # The lease keeps the pool, and is the last that does.
            self.assertEqual(self.store.put_from("leased", lease.ptr, 10), 0)
            self.store.remove("leased")
            del lease
            self.assertEqual(self.store.get_into("no such", places[-1], 10), -600)
        loop = [BufferPool(self.store)]
        loop += [loop, loop[0].acquire(70_000)]
        places.append(loop[2].ptr)
        del loop
        gc.collect()
        with self.assertRaisesRegex(RuntimeError, "min_size_class is above 0"):
            BufferPool(self.store, min_size_class=0)
        for place in places:
            self.assertEqual(self.store.unregister_buffer(place), -600)

    def test_many_handles_are_few_mappings(self):
        keys = [f"handle/{at}" for at in range(3000)]
        self.assertEqual(self.store.put_batch(keys, [b"x" * 16] * 3000), 0)
        count = lambda: pathlib.Path("/proc/self/maps").read_bytes().count(b"\n")
        before = count()
        handles = self.store.batch_get_buffer(keys)
        self.assertLess(count() - before, 300)
        self.assertEqual({bytes(handle) for handle in handles}, {b"x" * 16})
        places = {handle.ptr() for handle in handles}
        self.assertEqual((len(places), handles[7].size()), (3000, 16))
        self.assertFalse(memoryview(handles[7]).readonly)


class Parts(Case):
    """Ranges of objects, and sessions."""

    def test_ranges(self):
        value = self.fill(0, 1000)
        self.store.put("r", value)
        result = self.store.get_into_ranges(
            [self.at + 4096], [["r", "no such"]], [[[0, 50], [90]]], [[[2, 500], [0]]], [[[10, 40], [5]]]
        )
        self.assertEqual(result, [[[10, 40], [-704]]])
        self.assertEqual(self.buffer[4096:4106], value[2:12])
        self.assertEqual(self.buffer[4146:4186], value[500:540])
        past = self.store.get_into_ranges([self.at], [["r"]], [[[0]]], [[[990]]], [[[30]]])
        self.assertEqual(past, [[[-600]]])
        uneven = self.store.get_into_ranges([self.at], [["r", "r"]], [[[0], []]], [[[0, 1], []]], [[[], []]])
        self.assertEqual(uneven, [[[-600], []]])

    def test_ranges_whose_lists_differ_in_length(self):
        get, at = self.store.get_into_ranges, self.at
        self.store.put("r", b"0123456789")
        for lists, expected in (
            (([at], [["r"], ["r"]], [[[0]]], [[[0]]], [[[1]]]), [[[-600]]]),
            (([at, at], [["r"]], [[[0]]], [[[0]]], [[[1]]]), [[[-600]], [[-600]]]),
            (([at], [["r", "r"]], [[[0]]], [[[0]]], [[[1]]]), [[[-600], [-600]]]),
            (([at], [["r"]], [[[0, 1]]], [[[0]]], [[[1]]]), [[[-600, -600]]]),
            (([at], [["r"]], [[[0]]], [[[0]]], [[[1, 2, 3]]]), [[[-600]]]),
            (([at], [["r", "r"]], [[[0], [1, 2]]], [[[0], [1]]], [[[1], [1, 1]]]), [[[1], [-600, -600]]]),
            (([at, at], [["r"], ["r"]], [[[0]], [[1, 2]]], [[[0]]], [[[1]], [[1, 1]]]), [[[-600]], [[-600, -600]]]),
            (([at], [], [], [], []), [[[-600]]]),
            (([at], [["r"]], [[]], [[]], [[]]), [[[-600]]]),
            (([at], [["r"]], [[[]]], [[[]]], [[[]]]), [[[]]]),
            (([at], [[]], [[]], [[]], [[]]), [[]]),
            (([], [], [], [], []), []),
        ):
            self.assertEqual(get(*lists), expected, lists)

    def test_reading_layer_by_layer(self):
        value = self.fill(0, 8192)
        self.store.put("layers", value)
        self.assertEqual(self.store.batch_get_session_start(["layers", "no such"]), [0, -704])
        for layer in range(8):
            target = [[self.at + 65536, self.at + 70000]]
            sizes, offsets = [[512, 512]], [[layer * 1024, layer * 1024 + 512]]
            got = self.store.batch_get_into_multi_buffer_ranges(["layers"], target, sizes, offsets)
            self.assertEqual(got, [1024])
            both = self.buffer[65536 : 65536 + 512] + self.buffer[70000 : 70000 + 512]
            self.assertEqual(both, value[layer * 1024 : layer * 1024 + 1024])
        nobody = self.store.batch_get_into_multi_buffer_ranges(["no such"], [[self.at]], [[3]], [[0]])
        self.assertEqual(nobody, [-600])
        self.assertEqual(self.store.remove("layers"), 0)
        gone = self.store.batch_get_into_multi_buffer_ranges(["layers"], [[self.at]], [[3]], [[0]])
        self.assertEqual(gone, [-704])
        self.assertEqual(self.store.batch_get_session_end(["layers"]), 0)

    def test_a_session_never_mixes_versions(self):
        """A session reads only the object it started with; a new one under the key needs a new session."""
        get, at = self.store.batch_get_into_multi_buffer_ranges, self.at + 65536
        for old, new in ((b"a" * 100, b"b" * 100), (b"c" * 10, b"d" * 100)):
            self.store.upsert("versions", old)
            self.assertEqual(self.store.batch_get_session_start(["versions"]), [0])
            self.assertEqual(get(["versions"], [[at]], [[5]], [[0]]), [5])
            self.store.upsert("versions", new)
            self.assertEqual(get(["versions"], [[at]], [[5]], [[5]]), [-704])
            self.assertEqual(get(["versions"], [[at]], [[5]], [[0]]), [-704])
            self.assertEqual(self.store.batch_get_session_start([b"versions"]), [0])
            self.assertEqual(get(["versions"], [[at]], [[5]], [[5]]), [5])
            self.assertEqual(self.buffer[65536 : 65536 + 5], new[5:10])
            self.assertEqual(self.store.batch_get_session_end(["versions"]), 0)
            self.assertEqual(get(["versions"], [[at]], [[5]], [[5]]), [-600])

    def test_writing_layer_by_layer(self):
        value = self.fill(0, 4096)
        self.store.put("there", b"x")
        self.assertEqual(self.store.batch_put_session_start(["w", "there"], [4096, 5]), [0, -705])
        for layer in (3, 1, 0, 2):
            at = self.at + layer * 1024
            done = self.store.batch_put_from_multi_buffer_ranges(["w"], [[at]], [[1024]], [[layer * 1024]])
            self.assertEqual(done, [1024])
            self.assertEqual(self.store.is_exist("w"), 0)
        self.assertEqual(self.store.batch_put_session_end(["w", "no such"]), [0, -600])
        self.assertEqual(self.store.get("w"), value)
        self.assertEqual(self.store.batch_put_session_start(["gone"], [10]), [0])
        self.assertEqual(self.store.batch_put_session_revoke(["gone"]), [0])
        self.assertEqual(self.store.is_exist("gone"), 0)


    def test_a_key_has_one_session(self):
        store, value = self.store, self.fill(0, 8)
        self.assertEqual(store.batch_put_session_start(["w", "w"], [8, 8]), [0, -705])
        self.assertEqual(store.batch_put_from_multi_buffer_ranges(["w"], [[self.at]], [[8]], [[0]]), [8])
        self.assertEqual(store.batch_put_session_start(["w", "v"], [9, 9]), [-600, 0])
        self.assertEqual(store.batch_put_session_end(["w"]), [0])
        self.assertEqual(store.get("w"), value)
        self.assertEqual(store.batch_put_session_start(["w"], [8]), [-705])
        for _ in range(2):
            self.assertEqual(store.batch_put_session_revoke(["v"]), [0])
            self.assertEqual(store.batch_put_session_start(["v"], [8]), [0])
        self.assertEqual(store.batch_put_session_start(["zero"], [0]), [-600])
        self.assertEqual(store.batch_put_session_start(["x", "y"], [4]), [-600, -600])


class Others(Case):
    """Cluster information, buffer pools, and closing."""

    def test_replicas(self):
        self.store.put("k", b"value")
        (replica,) = self.store.get_replica_desc("k")
        self.assertTrue(replica.is_memory_replica())
        descriptor = replica.get_memory_descriptor().buffer_descriptor
        self.assertEqual(descriptor.size, 5)
        self.assertRegex(descriptor.transport_endpoint, r"^127\.0\.0\.1:\d+$")
        self.assertEqual(list(self.store.batch_get_replica_desc(["k", "x"])), ["k"])
        self.assertEqual(self.store.get_replica_desc("x"), [])
        self.assertEqual(self.store.create_copy_task("x", ["a"]), ((0, 0), -704))
        self.assertEqual(self.store.create_copy_task("k", ["a"]), ((0, 0), -1012))
        end = descriptor.transport_endpoint
        for key, source, target, code in (
            ("x", end, "b", -704), ("k", end, "b", -600), ("k", "a", end, -600), ("k", end, end, -600),
        ):  # fmt: skip
            self.assertEqual(self.store.create_move_task(key, source, target), ((0, 0), code))
        self.assertEqual(self.store.query_task((1, 2)), (None, -1400))
        self.assertEqual(self.store.query_task((0, 2)), (None, -1400))
        self.assertEqual(self.store.batch_replica_clear(["k", "x"]), ["k"])

    def test_pool(self):
        with _pool(self.store) as pool:
            with pool.buffer(1000) as lease:
                view = lease.buffer
                view[:5] = b"hello"
                with self.assertRaises(RuntimeError):
                    pool.close()
                del view
                self.assertEqual(self.store.put_from("k", lease.ptr, 5), 0)
                first = lease.ptr
            with pool.buffer(2000) as lease:
                self.assertEqual(lease.ptr, first)
            leases = [pool.acquire(65536) for _ in range(4)]
            with self.assertRaises(RuntimeError):
                pool.acquire(1, block=False)
            with self.assertRaises(TimeoutError):
                pool.acquire(1, timeout=0.01)
            threading.Timer(0.05, leases[0].release).start()
            pool.acquire(1, timeout=10).release()
            view = leases[1].buffer
            with self.assertRaises(RuntimeError):
                leases[1].release()
            del view
            for lease in leases:
                lease.release()

    def test_a_lease_that_no_pool_made(self):
        # Neither the failing constructor nor the finalizer of the partial object prints anything.
        problems = []
        with mock.patch.object(sys, "unraisablehook", problems.append):
            with self.assertRaises(TypeError):
                BufferLease()
            gc.collect()
        self.assertEqual(problems, [])

    def test_before_setup_and_after_close(self):
        for store in (MooncakeDistributedStore(), self.store):
            store.close()
            self.assertEqual(store.put("k", b"x"), -1)
            self.assertEqual(store.get("k"), b"")
            self.assertEqual(store.batch_is_exist(["k"]), [-1])
            self.assertEqual(store.register_buffer(self.at, 10), -1)
            self.assertEqual(store.batch_get_into(["k"], [self.at], [1]), [-1])
            self.assertEqual(store.health_check(), 1)
            self.assertEqual(store.close(), 0)

    def test_health_and_name(self):
        self.assertEqual(self.store.health_check(), 0)
        self.assertRegex(self.store.get_hostname(), r"^\w+:\d+$")

    def test_a_store_without_a_local_buffer_copies_nothing(self):
        other = MooncakeDistributedStore()
        self.addCleanup(other.close)
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            self.assertEqual(other.setup("localhost", "P2PHANDSHAKE", 0, 0, "tcp", "", ""), 0)
            self.assertEqual(self.store.setup("localhost", "P2PHANDSHAKE", 0, 0, "tcp", "", ""), -1)
        self.assertEqual(said.getvalue().count("local_buffer_size is 0"), 1)
        codes = other.put("k", b"x"), other.put_parts("k", b"x", b"y"), other.put_batch(["k"], [b"x"])
        codes += other.upsert("k", b"x"), other.upsert_parts("k", b"x"), other.upsert_batch(["k"], [b"x"])
        self.assertEqual(codes, (-600,) * 6)
        self.assertEqual(other.is_exist("k"), 0)
        self.assertEqual(self.store.put("k", b"value"), 0)
        self.assertEqual(other.get("k"), b"value")
        self.assertEqual(other.register_buffer(self.at, 4096), 0)
        self.addCleanup(other.unregister_buffer, self.at)
        self.assertEqual(other.put_from("from", self.at, 100), 0)
        self.assertEqual(self.store.get_size("from"), 100)

    def test_what_a_store_held_for_others_outlives_it(self):
        other = MooncakeDistributedStore()
        self.addCleanup(other.close)
        self.assertEqual(other.setup("localhost:12346", "P2PHANDSHAKE", 32 << 20, 16 << 20, "tcp", "", ""), 0)
        values = {f"handed-{index}": f"{index}-".encode() * 700 for index in range(100)}
        self.assertEqual({self.store.put(key, value) for key, value in values.items()}, {0})
        begun = time.monotonic()
        self.assertEqual(other.close(), 0)
        self.assertLess(time.monotonic() - begun, 10)
        self.assertEqual({key: self.store.get(key) for key in values}, values)

    def test_the_name_is_the_one_of_the_memory(self):
        other = MooncakeDistributedStore()
        self.addCleanup(other.close)
        self.assertEqual(other.setup("localhost:12345", "P2PHANDSHAKE", 32 << 20, 16 << 20, "tcp", "", ""), 0)
        name = other.get_hostname()
        keys = [f"named-{index}" for index in range(200)]
        self.assertEqual({self.store.put(key, key.encode()) for key in keys}, {0})
        described = self.store.batch_get_replica_desc(keys)
        ends = {
            key: found[0].get_memory_descriptor().buffer_descriptor.transport_endpoint
            for key, found in described.items()
        }
        there = sorted(key for key, end in ends.items() if end == name)
        self.assertEqual(name, "localhost:12345")
        self.assertTrue(there)
        cleared = self.store.batch_replica_clear(keys, name)
        self.assertEqual(sorted(cleared), there)
        self.assertEqual(other.close(), 0)
        self.assertEqual(mooncake.store.segment_of(name), "127.0.0.1:12345")

    def test_a_name_without_a_port_gets_that_of_the_memory(self):
        other = MooncakeDistributedStore()
        self.addCleanup(other.close)
        self.assertEqual(other.setup("localhost", "P2PHANDSHAKE", 32 << 20, 16 << 20, "tcp", "", ""), 0)
        name = other.get_hostname()
        host, _, port = name.partition(":")
        self.assertEqual(host, "localhost")
        self.assertIn(int(port), range(12_300, 14_300))
        keys = [f"moves-{index}" for index in range(50)]
        self.assertEqual({self.store.put(key, b"value") for key in keys}, {0})
        (more,) = other.allocate_and_mount_segment(4 << 20)["segment_ids"]

        def end(key):
            (replica,) = self.store.get_replica_desc(key)
            return replica.get_memory_descriptor().buffer_descriptor.transport_endpoint

        # Some objects migrate to the segments that have just been mounted: their place is another one a moment later.
        key, before = None, None
        while key is None or end(key) != before:
            key, before = next((key, place) for key in keys if (place := end(key)) != more)
            answer = self.store.create_move_task(key, before, more)
        self.assertEqual(answer, ((0, 0), -1012))
        # Another process knows the segment by its address, and finds it under this name, too.
        seen = bed.python(
            f"""
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "") == 0
keys = [f"elsewhere-{{index}}" for index in range(200)]
assert store.put_batch(keys, [key.encode() for key in keys]) == 0
ends = {{
    key: found[0].get_memory_descriptor().buffer_descriptor.transport_endpoint
    for key, found in store.batch_get_replica_desc(keys).items()
}}
there = sorted(key for key, end in ends.items() if end == "127.0.0.1:{port}")
print(len(there) > 0, sorted(store.batch_replica_clear(keys, "{name}")) == there)
"""
        )
        self.assertEqual(seen.strip(), "True True")

    def test_a_segment_of_this_process(self):
        mounted = self.store.allocate_and_mount_segment(32 << 20)
        self.assertEqual((mounted["ret"], mounted["allocated_size"]), (0, 32 << 20))
        # The segment gets its slots later while those of a departed member are still being moved.
        keys, owners, until = [], set(), time.monotonic() + 60
        while mounted["segment_ids"][0] not in owners and time.monotonic() < until:
            some = [f"spread-{len(keys) + index}" for index in range(200)]
            self.assertEqual({self.store.put(key, key.encode()) for key in some}, {0})
            found = self.store.batch_get_replica_desc(some).values()
            owners = {one[0].get_memory_descriptor().buffer_descriptor.transport_endpoint for one in found}
            keys += some
        self.assertIn(mounted["segment_ids"][0], owners)
        self.assertEqual(self.store.unmount_segment(mounted["segment_ids"], 10), 0)
        self.assertEqual(self.store.unmount_segment(["nobody"]), -1)
        for key in keys:
            self.assertEqual(self.store.get(key), key.encode())


class Setup(unittest.TestCase):
    """How the control plane is found, and the error if it is not."""

    def test_dictionaries(self):
        bed.bed()
        store = MooncakeDistributedStore()
        config = {
            "local_hostname": "localhost",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": bed.bed().control,
            "device_name": "",
            "global_segment_size": "0",
            "local_buffer_size": "16mb",
            "transfer_timeout": 1,
        }
        self.assertEqual(store.setup(config), 0)
        self.assertEqual(store.put("k", b"v"), 0)
        store.close()
        self.assertEqual(MooncakeDistributedStore().setup({"foo": "x"}), -600)

    def test_unknown_keys_and_protocols_are_said(self):
        bed.bed()
        said = bed.python(
            """
import contextlib, io
from mooncake.store import MooncakeDistributedStore
said = io.StringIO()
with contextlib.redirect_stderr(said):
    config = dict(local_hostname="h", metadata_server="P2PHANDSHAKE", master_server_adress="x")
    print(MooncakeDistributedStore().setup(config))
    print(MooncakeDistributedStore().setup("h", "P2PHANDSHAKE", 0, 16 << 20, "carrier-pigeon", "", ""))
print(said.getvalue())
"""
        )
        self.assertIn("did you mean 'master_server_addr", said)
        self.assertIn("carrier-pigeon", said)

    def test_protocols_that_cannot_be_had_are_said(self):
        bed.bed()
        said = bed.python(
            """
import contextlib, io
from kvplane import _native
from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore

def tried(protocol, kind):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        if kind is TransferEngine:
            code = kind().initialize("127.0.0.1", "P2PHANDSHAKE", protocol, "mlx5_0")
        else:
            code = kind().setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, protocol, "mlx5_0", "")
    return code, said.getvalue().splitlines()

for kind, refusal in (MooncakeDistributedStore, -600), (TransferEngine, -1):
    for protocol in "efa", "nvlink", "cxl", "hip", "barex", "ascend", "pigeon":
        code, lines = tried(protocol, kind)
        assert code == refusal and len(lines) == 1 and protocol in lines[0], (code, lines)
    assert tried("tcp", kind) == (0, []), kind
    for devices in [], [("mlx5_0", 0)]:
        _native.topology = lambda: (["cpu:0"], devices)
        code, lines = tried("rdma", kind)
        assert code == 0 and len(lines) == (0 if devices else 1), (code, lines)
        assert devices or all(word in lines[0] for word in ("rdma", "mlx5_0", "TCP")), lines
"""
        )
        self.assertEqual(said, "")

    def test_one_of_several_threads_sets_up(self):
        bed.bed()
        out = bed.python(
            """
import contextlib, io, threading
from mooncake.store import MooncakeDistributedStore
said, store, codes, together = io.StringIO(), MooncakeDistributedStore(), [], threading.Barrier(8)

def set_up():
    together.wait()
    codes.append(store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", ""))

with contextlib.redirect_stderr(said):
    threads = [threading.Thread(target=set_up) for _ in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
print(sorted(codes), said.getvalue().count("already"), store.put("k", b"v"))
store.close()
"""
        )
        self.assertEqual(out.strip(), "[-1, -1, -1, -1, -1, -1, -1, 0] 7 0")

    def test_an_address_where_nobody_listens(self):
        bed.bed()
        for address in ("127.0.0.1:1", "192.0.2.1:50051"):
            out = bed.python(
                f"""
import contextlib, io, time
from mooncake.store import MooncakeDistributedStore
said, start = io.StringIO(), time.monotonic()
with contextlib.redirect_stderr(said):
    code = MooncakeDistributedStore().setup("h", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "{address}")
print(code, time.monotonic() - start < 5, "{address}" in said.getvalue())
""",
                timeout=30,
            )
            self.assertEqual(out.split(), ["-900", "True", "True"])


def _pool(store):
    """A pool that closes itself."""
    import contextlib

    return contextlib.closing(BufferPool(store, max_bytes=1 << 18))


if __name__ == "__main__":
    unittest.main()
