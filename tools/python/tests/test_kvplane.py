"""The kvplane interface: `kvplane.Store`, `kvplane.AsyncStore`, `kvplane.TransferEngine`."""

import asyncio
import unittest

import bed
import kvplane


class Stores(unittest.TestCase):
    """The store, with and without asyncio."""

    def setUp(self):
        bed.bed()
        self.store = kvplane.Store()
        self.addCleanup(self.store.close)
        self.store.clear()

    def test_values(self):
        value = bed.pattern(1, 5 << 20)
        self.store.put("k", value)
        self.assertEqual(self.store.get("k"), value)
        self.store.put(b"k", b"other")
        self.assertEqual(self.store.size("k"), len(value))
        self.store.put("k", b"other", replace=True, keep=60, group="g", kind=1)
        self.assertEqual(self.store.get("k"), b"other")
        self.assertIsNone(self.store.get("no such"))
        self.assertIsNone(self.store.size("no such"))
        self.assertEqual(self.store.exists_many(["k", "no such"]), [True, False])
        self.assertTrue(self.store.remove("k"))
        self.assertFalse(self.store.remove("k"))

    def test_buffers(self):
        self.store.put("k", bytearray(b"hello"))
        into = bytearray(10)
        self.assertEqual(self.store.get_into("k", into), 5)
        self.assertEqual(into[:5], b"hello")
        self.assertIsNone(self.store.get_into("no such", into))
        with self.assertRaises(kvplane.InvalidArgument):
            self.store.get_into("k", bytearray(2))
        with self.assertRaises((BufferError, TypeError)):
            self.store.get_into("k", b"read-only")
        with self.assertRaises(ValueError):
            self.store.put("", b"x")
        with self.assertRaises(TypeError):
            self.store.put("k", 5)

    def test_registered_memory(self):
        memory = bytearray(bed.pattern(5, 1 << 16))
        with self.store.register(memory) as registered:
            items = [(f"block-{at}", registered[at : at + 4096]) for at in range(0, 1 << 15, 4096)]
            self.store.put_from(items)
            there = [(key, registered[(1 << 15) + piece.address - registered.address :][:2]) for key, piece in items]
            there = [(key, kvplane.Piece(address, 4096)) for key, (address, _) in there]
            self.assertEqual(self.store.get_many_into(there), [4096] * 8)
            self.assertEqual(memory[: 1 << 15], memory[1 << 15 :])
        self.store.put_many({"a": b"1", "b": bytearray(b"2")})
        self.assertEqual(self.store.get_many(["a", "b", "c"]), [b"1", b"2", None])
        self.assertEqual(self.store.remove_matching("^block-"), 8)

    def test_a_piece_keeps_its_memory(self):
        with self.store.register(bytearray(b"A" * 4096)) as memory:
            piece = memory[0:100]
            self.store.put_from([("piece", piece)])
        with self.assertRaises(kvplane.InvalidArgument):
            self.store.put_from([("gone", piece)])
        with self.assertRaises(kvplane.InvalidArgument):
            self.store.get_many_into([("piece", piece)])
        self.assertFalse(self.store.exists("gone"))
        piece = self.store.register(bytearray(b"B" * 4096))[10:20]
        others = [bytearray(b"C" * 4096) for _ in range(100)]
        self.store.put_from([("kept", piece)])
        self.assertEqual((self.store.get("kept"), len(others)), (b"B" * 10, 100))
        memory = bytearray(4096)
        registered = self.store.register(memory)
        with self.assertRaises(kvplane.InvalidArgument):
            self.store.register(memory)
        self.store.put_from([("twice", registered[0:1])])
        del registered
        # The memory may be freed, so it is unregistered.
        self.store.register(memory).close()

    def test_closed(self):
        self.store.close()
        with self.assertRaises(kvplane.Closed):
            self.store.get("k")

    def test_asyncio(self):
        async def work():
            async with await kvplane.AsyncStore.connect() as store:
                values = {f"a-{index}": bed.pattern(index, 10_000) for index in range(40)}
                await asyncio.gather(*(store.put(key, value) for key, value in values.items()))
                self.assertEqual(await store.get_many(list(values)), list(values.values()))
                self.assertEqual(await store.exists_many(["a-0", "x"]), [True, False])
                self.assertIsNone(await store.get("x"))
                with self.assertRaises(kvplane.InvalidArgument):
                    await store.put("", b"x")
                self.assertTrue(await store.remove("a-0"))

        asyncio.run(work())

    def test_numpy(self):
        try:
            import numpy
        except ImportError:
            self.skipTest("numpy is not installed")
        array = numpy.arange(100_000, dtype=numpy.float32).reshape(100, 1000)
        self.store.put("array", array)
        into = numpy.zeros_like(array)
        self.assertEqual(self.store.get_into("array", into), array.nbytes)
        self.assertTrue((into == array).all())

    def test_a_member(self):
        with kvplane.Store(memory=16 << 20) as store:
            store.put("k", b"v")
            self.assertEqual(store.get("k"), b"v")


    def test_iterators(self):
        with self.store.register(bytearray(b"12345678")) as memory:
            self.store.put_from((f"iterator/{at}", memory[at : at + 4]) for at in (0, 4))
            self.assertEqual(self.store.get("iterator/4"), b"5678")
            self.assertEqual(self.store.get_many_into(iter([("iterator/4", memory[0:4])])), [4])
        self.store.put_from(iter([]))
        self.assertEqual(self.store.get_many_into(iter([])), [])

    def test_numbers_of_numpys_kind(self):
        self.store.put("number", b"1", replicas=bed.Word(1), wait=bed.Word(1), kind=bed.Word(3), priority=bed.Word(2))
        self.assertEqual(self.store.retain(bed.Word(7), ["number"], 5), [True])
        self.assertEqual(self.store.release(7), 1)

    def test_numbers_that_are_none(self):
        for name, value in (("replicas", "3"), ("replicas", 2.5), ("replicas", True), ("wait", "1"), ("priority", 1.0),
                            ("kind", "1"), ("keep", "5")):  # fmt: skip
            with self.assertRaisesRegex(TypeError, f"^{name} is "):
                self.store.put("number", b"1", **{name: value})
        for name, value in (("replicas", 9), ("replicas", 0), ("wait", 2), ("kind", 256), ("keep", -1)):
            with self.assertRaises(ValueError):
                self.store.put("number", b"1", **{name: value})
        for name in (2.5, True, None):
            with self.assertRaisesRegex(TypeError, "a name, str, or a number"):
                self.store.retain(name, ["number"], 5)


class Array(bytearray):
    """Memory with the method that arrays of numpy have whatever their length."""

    def __index__(self):
        if len(self) == 1:
            return self[0]
        raise TypeError("only integer scalar arrays can be converted to a scalar index")


class Engines(unittest.TestCase):
    """The transfer engine."""

    def test_arrays_in_the_place_of_addresses(self):
        bed.bed()
        with kvplane.TransferEngine() as one, kvplane.TransferEngine() as other:
            for size in (1, 4096):
                ours, theirs = Array(bed.pattern(3, size)), Array(size)
                here, _ = one.register(ours)
                there, _ = other.register(theirs)
                one.write(other.name, [ours], [there], [size])
                self.assertEqual(ours, theirs)
                theirs[:] = bytes(size)
                one.read(other.name, [ours], [there], [size])
                self.assertEqual(ours, theirs)
                one.start(other.name, True, [bed.Word(here)], [bed.Word(there)], [bed.Word(size)]).wait()
                with self.assertRaises(kvplane.InvalidArgument):
                    one.write(other.name, [ours], [there], [size + 1])
                with self.assertRaises(TypeError):
                    one.register(Array(1), 1)
                one.unregister(ours)
                other.unregister(theirs)
                with self.assertRaises(kvplane.InvalidArgument):
                    one.write(other.name, [here], [there], [size])

    def test_two_engines(self):
        bed.bed()
        with kvplane.TransferEngine() as one, kvplane.TransferEngine() as other:
            ours, theirs = bytearray(bed.pattern(2, 8192)), bytearray(8192)
            (here, size), (there, _) = one.register(ours), other.register(theirs)
            one.write(other.name, [here], [there], [size])
            self.assertEqual(ours, theirs)
            batch = one.start(other.name, False, [here], [there + 4096], [4096])
            batch.wait()
            self.assertTrue(batch.done())
            self.assertEqual(ours[:4096], theirs[4096:])
            self.assertTrue(one.probe(other.name))
            one.notify(other.name, "from", "one")
            self.assertEqual(other.notices(), [("from", "one")])
            with self.assertRaises(kvplane.InvalidArgument):
                one.write(other.name, [here], [there], [size + 1])
            one.unregister(here)


if __name__ == "__main__":
    unittest.main()
