"""P2P objects transferred by name, and tensors that peers read, in the interface of checkpoint-engine's store."""

import json
import threading
import unittest

import bed
import kvplane
from kvplane import _native
from kvplane.p2p import ObjectStore, P2PStore, Part, reshard_bytes


def address(buffer):
    return _native.buffer_address(buffer, False)[0]


SHARD = 64 << 10
# Neither size is a multiple of the shard size.
SIZES = [5 * SHARD + 9, 100]


def filled(seed):
    return [bytearray(bed.pattern((seed << 40) + (at << 32), size)) for at, size in enumerate(SIZES)]


class Objects(unittest.TestCase):
    def setUp(self):
        bed.bed()

    def test_an_object_goes_on_from_who_has_fetched_it(self):
        name, theirs, ours = "py/goes-on", filled(1), [bytearray(size) for size in SIZES]
        with ObjectStore() as second:
            with ObjectStore() as first:
                self.assertEqual(first.register(name, theirs, shard_bytes=SHARD, about=b"two of them"), 1)
                found = second.find(name)
                self.assertEqual((found.version, found.sizes, found.shards, found.about), (1, SIZES, 7, b"two of them"))
                seen, lock = [], threading.Lock()

                def progress(have, missing):
                    with lock:
                        seen.append((have, missing))

                self.assertEqual(second.get_replica(name, ours, progress=progress), sum(SIZES))
                self.assertEqual(ours, theirs)
                self.assertEqual(len(seen), 7)
                self.assertIn((7, 0), seen)
                self.assertEqual(sorted(member.shards for member in first.members(name)), [7, 7])
                self.assertTrue(any(one.name == name and one.members == 2 for one in first.list("py/")))
                # Memory that is served cannot be resized.
                with self.assertRaises(BufferError):
                    theirs[0].append(1)
                first.unregister(name)
                theirs[0].append(1)
            with ObjectStore() as third:
                again = [bytearray(size) for size in SIZES]
                third.get_replica(name, again)
                self.assertEqual(again, ours)
                second.delete_replica(name)
                with self.assertRaises(kvplane.InvalidArgument):
                    second.unregister(name)

    def test_some_shards_and_then_the_rest(self):
        name, theirs, ours = "py/some", filled(2), [bytearray(size) for size in SIZES]
        with ObjectStore() as source, ObjectStore() as reader:
            source.register(name, theirs, shard_bytes=SHARD)
            wanted = reader.covering(name, 0, SHARD + 1, SHARD)
            self.assertEqual(wanted, (1, 2))
            self.assertEqual(reader.get_replica(name, ours, shards=[wanted]), 2 * SHARD)
            self.assertEqual(reader.get_replica(name, ours, shards=[(2, 2)], deadline=60.0), SHARD)
            with self.assertRaises(kvplane.InvalidArgument):
                reader.get_replica(name, [bytearray(size) for size in SIZES], shards=[(4, 1)])

            def fails(have, missing):
                raise RuntimeError("no progress")

            with self.assertRaises(RuntimeError):
                reader.get_replica(name, ours, shards=[(4, 1)], progress=fails)
            self.assertEqual([one.shards for one in source.members(name) if not one.origin], [4])
            self.assertEqual(ours[0][SHARD : 3 * SHARD], theirs[0][SHARD : 3 * SHARD])
            reader.delete_replica(name)
            self.assertEqual(reader.get_replica(name, ours, resume=True), sum(SIZES) - 4 * SHARD)
            self.assertEqual(ours, theirs)

    def test_ranks_fetch_from_each_other(self):
        name, theirs = "py/ranks", filled(9)
        ours = [[bytearray(size) for size in SIZES] for _ in range(3)]
        got = [0] * 3
        with ObjectStore() as source, ObjectStore() as one, ObjectStore() as two, ObjectStore() as three:
            source.register(name, theirs, shard_bytes=SHARD)

            def fetch(rank, store):
                got[rank] = store.get_replica(name, ours[rank], rank=rank, ranks=3, job="load", patience=60.0)

            threads = [threading.Thread(target=fetch, args=each) for each in enumerate([one, two, three])]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            self.assertEqual(got, [sum(SIZES)] * 3)
            self.assertEqual(ours, [theirs] * 3)
            with self.assertRaises(kvplane.InvalidArgument):
                two.get_replica(name, [bytearray(size) for size in SIZES], rank=0)

    def test_what_two_ranks_wrote_is_read_by_one_and_by_three(self):
        rows, columns = 24, 4096
        whole = bed.pattern(7 << 40, rows * columns)

        def manifest(*cuts):
            boxes = [
                {"tensor_id": "w", "global_offset": [first, 0], "local_shape": [end - first, columns]}
                for first, end in zip(cuts, cuts[1:])
            ]
            parts = [{"participant_id": f"tp{at}", "fragments": [box]} for at, box in enumerate(boxes)]
            tensors = [{"tensor_id": "w", "global_shape": [rows, columns], "dtype": "uint8"}]
            return {"resource_id": "m", "revision": "1", "tensors": tensors, "parts": parts}

        written, one, three = manifest(0, 12, 24), manifest(0, 24), manifest(0, 8, 16, 24)
        halves = [bytearray(whole[: 12 * columns]), bytearray(b"head" + whole[12 * columns :])]
        parts = {"tp0": "py/reshard/tp0", "tp1": Part("py/reshard/tp1", offsets=[4])}
        with ObjectStore() as source, ObjectStore() as reader:
            for at, half in enumerate(halves):
                source.register(f"py/reshard/tp{at}", [half], shard_bytes=8 * columns)
            memory = bytearray(reshard_bytes(one, "tp0"))
            read = reader.reshard(written, one, "tp0", parts, memory)
            self.assertEqual(memory, whole)
            # All shards are verified by hash except the one that also has bytes of no tensor.
            self.assertEqual(read, (24 * columns, 16 * columns + 4))
            memory = bytearray(8 * columns + 2)
            read = reader.reshard(json.dumps(written), three, "tp1", parts, memory, offsets=[2])
            self.assertEqual(memory[2:], whole[8 * columns : 16 * columns])
            self.assertEqual(read, (8 * columns, 4 * columns))
            with self.assertRaises(kvplane.InvalidArgument):
                reader.reshard(written, three, "tp1", parts, memory)
            with self.assertRaises(kvplane.InvalidArgument):
                reader.reshard(written, three, "tp9", parts, memory)
            with self.assertRaises(kvplane.InvalidArgument):
                reshard_bytes("{", "tp0")
            halves[0][5] ^= 1
            with self.assertRaises(kvplane.NotFound):
                reader.reshard(written, one, "tp0", parts, bytearray(24 * columns))

    def test_versions_and_numpy_arrays(self):
        try:
            import numpy
        except ImportError:
            self.skipTest("numpy is not there")
        name = "py/versions"
        one, two = (numpy.arange(seed, seed + 1000, dtype=numpy.float32) for seed in (1, 2))
        with ObjectStore() as source, ObjectStore() as reader:
            self.assertEqual((source.register(name, [one]), source.register(name, [two])), (1, 2))
            got = numpy.zeros(1000, numpy.float32)
            reader.get_replica(name, [got])
            self.assertTrue((got == two).all())
            other = numpy.zeros(1000, numpy.float32)
            reader.get_replica(name, [other], 1)
            self.assertTrue((other == one).all())
            with self.assertRaises(kvplane.Error):
                source.register(name, [got + 1], 1)
            source.unregister(name)
            self.assertEqual([(one.version, one.members) for one in reader.list(name)], [(1, 2), (2, 1)])

    def test_what_cannot_be_is_said(self):
        theirs = filled(3)
        with ObjectStore() as source, ObjectStore() as reader:
            with self.assertRaisesRegex(kvplane.NotFound, "no member has an object"):
                reader.find("py/nobody's")
            source.register("py/wrong", theirs, shard_bytes=SHARD)
            with self.assertRaisesRegex(kvplane.InvalidArgument, "buffer 0 has"):
                reader.get_replica("py/wrong", [bytearray(1), bytearray(100)])
            with self.assertRaises((BufferError, TypeError)):
                reader.get_replica("py/wrong", [bytes(SIZES[0]), bytearray(100)])
            with self.assertRaises(kvplane.InvalidArgument):
                source.register("py/other", theirs[:1] + [bytearray()])
            with self.assertRaisesRegex(kvplane.Error, "does not match its hash"):
                theirs[0][SHARD] ^= 1
                reader.get_replica("py/wrong", [bytearray(size) for size in SIZES])
            theirs[0][SHARD] ^= 1

            def stop(have, missing):
                raise RuntimeError(f"{have} and {missing}")

            with ObjectStore() as other:
                other.register("py/right", theirs, shard_bytes=SHARD)
                with self.assertRaises(RuntimeError):
                    reader.get_replica("py/right", [bytearray(size) for size in SIZES], progress=stop)
                with self.assertRaises(kvplane.InvalidArgument):
                    reader.unregister("py/right")
        with self.assertRaisesRegex(kvplane.Error, "closed"):
            source.find("py/wrong")
        with self.assertRaises(kvplane.Unreachable):
            ObjectStore("127.0.0.1:1")


class Tensors(unittest.TestCase):
    def test_ranges_of_several_tensors_are_read(self):
        sizes = {"a": 100_000, "b": 1, "c": 64 << 10}
        with P2PStore() as trainer, P2PStore() as engine:
            theirs = {name: bytearray(bed.pattern(ord(name) << 20, size)) for name, size in sizes.items()}
            trainer.register_named_tensors(theirs)
            ours = bytearray(sum(sizes.values()))
            engine.register_named_tensors({"all": ours})
            base, at, pointers = address(ours), 0, []
            for size in sizes.values():
                pointers.append(base + at)
                at += size
            remote = [address(tensor) for tensor in theirs.values()]
            engine.batch_transfer_sync_read(trainer.addr, pointers, remote, list(sizes.values()))
            self.assertEqual(bytes(ours), b"".join(bytes(tensor) for tensor in theirs.values()))
            engine.batch_transfer_sync_read(trainer.addr, [], [], [])
            # Unregistered tensors cannot be read; the others still can.
            self.assertEqual(trainer.unregister_named_tensors(["a"]), 1)
            self.assertEqual(sorted(trainer.named_tensors), ["b", "c"])
            with self.assertRaises(kvplane.Error):
                engine.batch_transfer_sync_read(trainer.addr, pointers[:1], remote[:1], [100_000])
            engine.batch_transfer_sync_read(trainer.addr, pointers[1:], remote[1:], [1, 64 << 10])

    def test_all_or_none_are_registered(self):
        with P2PStore() as store:
            one = bytearray(4096)
            with self.assertRaises(kvplane.Error):
                store.register_named_tensors({"a": bytearray(10), "b": one, "again": one})
            self.assertEqual(store.named_tensors, {})
            store.register_named_tensors({"b": one})
            with self.assertRaises(kvplane.InvalidArgument):
                store.register_named_tensors({"b": bytearray(1)})
            with self.assertRaises(kvplane.InvalidArgument):
                store.unregister_named_tensors(["b", "nobody's"])
            with self.assertRaises(kvplane.InvalidArgument):
                store.batch_transfer_sync_read(store.addr, [1], [1, 2], [1])
            self.assertEqual(store.unregister_named_tensors(["b", "b"]), 1)


if __name__ == "__main__":
    unittest.main()
