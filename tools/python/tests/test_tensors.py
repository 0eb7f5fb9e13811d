"""The tensor calls, with as much of torch as they use: `fake_torch`. With torch itself: `test_modules.Tables`."""

import ctypes
import sys
import unittest
from unittest import mock

import bed
import fake_torch
from mooncake.store import (
    MooncakeDistributedStore,
    ParallelAxis,
    ReadTarget,
    ReplicateConfig,
    TensorParallelism,
    _deserialize_tensor,
    _serialize_tensor,
    _tensor_metadata_size,
)

HEADER = 304


def tensor(seed, *shape, kind=fake_torch.float32):
    """A tensor whose bytes say where they belong."""
    count = kind.itemsize
    for extent in shape:
        count *= extent
    return fake_torch.of(bed.pattern(seed << 32, count), shape, kind)


def axis(kind, rank, size, split=None):
    one = ParallelAxis()
    one.kind, one.rank, one.size, one.split_dim = kind, rank, size, split
    return one


def axes(*several):
    one = TensorParallelism()
    one.axes = list(several)
    return one


class Tensors(unittest.TestCase):
    def setUp(self):
        bed.bed()
        patch = mock.patch.dict(sys.modules, {"torch": fake_torch})
        patch.start()
        self.addCleanup(patch.stop)
        self.store = MooncakeDistributedStore()
        self.assertEqual(self.store.setup("localhost", "P2PHANDSHAKE", 0, 0, "tcp", "", ""), 0)
        self.addCleanup(self.store.close)

    def same(self, got, wanted):
        self.assertIsNotNone(got)
        self.assertEqual((got.dtype, got.shape, got.raw()), (wanted.dtype, wanted.shape, wanted.raw()))

    def test_one_by_one(self):
        kinds = [getattr(fake_torch, name) for name in ("float32", "bfloat16", "float16", "int64", "uint8", "bool")]
        for seed, kind in enumerate(kinds):
            for shape in ((2, 3, 4), (1000, 64), (), (0, 3), (1,) * 8):
                with self.subTest(f"{kind} {shape}"):
                    one, key = tensor(seed, *shape, kind=kind), f"one-{kind}-{shape}"
                    self.assertEqual(self.store.put_tensor(key, one), 0)
                    self.same(self.store.get_tensor(key), one)
                    self.assertEqual(self.store.get_size(key), HEADER + len(one.raw()))
        other = tensor(9, 5, 5)
        # What is there stays, until it is to be replaced.
        self.assertEqual(self.store.put_tensor("one-torch.float32-(2, 3, 4)", other), 0)
        self.same(self.store.get_tensor("one-torch.float32-(2, 3, 4)"), tensor(0, 2, 3, 4))
        self.assertEqual(self.store.upsert_tensor("one-torch.float32-(2, 3, 4)", other), 0)
        self.same(self.store.get_tensor("one-torch.float32-(2, 3, 4)"), other)
        config = ReplicateConfig()
        config.with_soft_pin = True
        self.assertEqual(self.store.pub_tensor("one-pub", other, config), 0)
        self.assertEqual(self.store.upsert_pub_tensor("one-pub", tensor(8, 3), config), 0)
        self.same(self.store.get_tensor("one-pub"), tensor(8, 3))

    def test_gaps_and_devices(self):
        one = tensor(1, 6, 7)
        gaps = fake_torch.Tensor(one, one.data_ptr(), one.shape, one.dtype, gaps=True)
        far = fake_torch.Tensor(one, one.data_ptr(), one.shape, one.dtype, device="cuda")
        for key, made in (("gaps", gaps), ("far", far)):
            self.assertEqual(self.store.put_tensor(key, made), 0)
            self.same(self.store.get_tensor(key), one)

    def test_what_is_no_tensor(self):
        self.assertEqual(self.store.put_tensor("bad", b"bytes"), -600)
        self.assertEqual(self.store.put_tensor("bad", None), -600)
        with self.assertRaisesRegex(TypeError, "complex64"):
            self.store.put_tensor("bad", tensor(1, 2, kind=fake_torch.complex64))
        with self.assertRaisesRegex(ValueError, "9 dimensions"):
            self.store.put_tensor("bad", tensor(1, *[1] * 9))
        self.assertIsNone(self.store.get_tensor("bad"))
        head, _, _, _ = _serialize_tensor(tensor(1, 4))
        for noise in (b"x" * 400, head, head[:-1], b"", head.replace(b"\x4e\x4f", b"\x4e\x50", 1) + bytes(16)):
            if noise:
                self.assertEqual(self.store.upsert("noise", noise), 0)
                self.assertIsNone(self.store.get_tensor("noise"))
            with self.assertRaises(ValueError):
                _deserialize_tensor(noise)

    def test_serialized(self):
        one = tensor(3, 4, 5, kind=fake_torch.int64)
        head, address, size, kept = _serialize_tensor(one)
        self.assertEqual((len(head), _tensor_metadata_size(), size), (HEADER, HEADER, 160))
        self.same(_deserialize_tensor(head + ctypes.string_at(address, size)), kept)

    def test_many(self):
        keys, several = ["many-a", "many-b"], [tensor(1, 3, 4), tensor(2, 70_000)]
        self.assertEqual(self.store.batch_put_tensor(keys, several), [0, 0])
        self.assertEqual(self.store.batch_put_tensor(keys, several[:1]), [-600, -600])
        got = self.store.batch_get_tensor([*keys, "many-none"])
        self.same(got[0], several[0])
        self.same(got[1], several[1])
        self.assertIsNone(got[2])
        self.assertEqual(self.store.batch_upsert_tensor(keys, several[::-1]), [0, 0])
        self.same(self.store.get_tensor("many-a"), several[1])
        self.assertEqual(self.store.batch_pub_tensor(["many-c"], several[:1], ReplicateConfig()), [0])
        self.assertEqual(self.store.batch_upsert_pub_tensor(["many-c"], several[1:]), [0])
        self.same(self.store.get_tensor("many-c"), several[1])

    def test_in_registered_memory(self):
        memory = bytearray(1 << 20)
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.assertEqual(self.store.register_buffer(at, len(memory)), 0)
        one, two = tensor(4, 10, 10), tensor(5, 7)
        for place, made in ((0, one), (4096, two)):
            raw = _serialize_tensor(made)[0] + made.raw()
            memory[place : place + len(raw)] = raw
        self.assertEqual(self.store.put_tensor_from("in-a", at, HEADER + 400), 0)
        self.assertEqual(self.store.upsert_tensor_from("in-a", at + 4096, HEADER + 28), 0)
        self.same(self.store.get_tensor("in-a"), two)
        sizes = [HEADER + 400, HEADER + 28]
        self.assertEqual(self.store.batch_put_tensor_from(["in-b", "in-c"], [at, at + 4096], sizes), [0, 0])
        self.assertEqual(self.store.batch_upsert_tensor_from(["in-b", "in-c"], [at, at + 4096], sizes), [0, 0])
        got = self.store.get_tensor_into("in-b", at + 8192, 4096)
        self.same(got, one)
        # The tensor is the memory: there is no copy.
        self.assertEqual(got.data_ptr(), at + 8192 + HEADER)
        several = self.store.batch_get_tensor_into(["in-c", "no such"], [at + 16384, at + 20480], [4096, 4096])
        self.same(several[0], two)
        self.assertIsNone(several[1])
        self.assertIsNone(self.store.get_tensor_into("in-b", at, 100))
        self.assertIsNone(self.store.get_tensor_into("in-b", 4096, 4096))
        self.assertEqual(self.store.unregister_buffer(at), 0)

    def test_parts_of_one_axis(self):
        whole = tensor(6, 10, 6)
        for split in (0, 1, -1):
            key = f"split-{split}"
            self.assertEqual(self.store.put_tensor_with_tp(key, whole, 0, 3, split), 0)
            parts = [self.store.get_tensor_with_tp(key, rank, 3, split) for rank in range(3)]
            self.same(fake_torch.cat(parts, split), whole)
        self.assertEqual(self.store.put_tensor_with_tp("unsplit", whole), 0)
        self.same(self.store.get_tensor_with_tp("unsplit"), whole)
        for size, split in ((3, 2), (3, -3), (11, 0)):
            self.assertEqual(self.store.put_tensor_with_tp("bad-split", whole, 0, size, split), -600)
        self.assertEqual(self.store.batch_put_tensor_with_tp(["batch"], [whole], 0, 2), [0])
        self.same(self.store.batch_get_tensor_with_tp(["batch"], 1, 2)[0], whole.tensor_split(2, 0)[1])
        self.assertEqual(self.store.batch_pub_tensor_with_tp(["pub"], [whole], ReplicateConfig(), 0, 2), [0])
        self.same(self.store.get_tensor("pub_tp_0"), whole.tensor_split(2, 0)[0])

    def test_parts_of_several_axes(self):
        whole = tensor(7, 8, 4)
        parts = whole.tensor_split(2, 1)
        for name, several in (
            ("tp", lambda rank: axes(axis("tp", rank, 2, 1))),
            ("tp-ep", lambda rank: axes(axis("tp", rank, 2, 1), axis("ep", 1, 4))),
            ("ep-tp", lambda rank: axes(axis("ep", 1, 4), axis("tp", rank, 2, 1))),
            ("dp-pp-tp", lambda rank: axes(axis("dp", 1, 2), axis("pp", 0, 2), axis("tp", rank, 2, 1))),
        ):
            with self.subTest(name):
                for rank in range(2):
                    self.assertEqual(self.store.put_tensor_with_parallelism(name, parts[rank], several(rank)), 0)
                shard, full = ReadTarget(), ReadTarget()
                shard.mode, shard.parallelism = "shard", several(1)
                full.mode, full.parallelism = "full", several(0)
                self.same(self.store.get_tensor_with_parallelism(name, shard), parts[1])
                self.same(self.store.get_tensor_with_parallelism(name, full), whole)
                self.same(self.store.batch_get_tensor_with_parallelism([name], [full])[0], whole)
        several = [axes(axis("tp", rank, 2, 1)) for rank in range(2)]
        codes = self.store.batch_upsert_tensor_with_parallelism(["tp", "tp"], parts[::-1], several)
        self.assertEqual(codes, [0, 0])
        self.same(self.store.get_tensor("tp_tp_0"), parts[1])
        with self.assertRaisesRegex(ValueError, "axis"):
            self.store.put_tensor_with_parallelism("bad", whole, axes(axis("tp", 2, 2)))
        wrong = ReadTarget()
        with self.assertRaisesRegex(ValueError, "mode"):
            wrong.mode = "half"
            self.store.get_tensor_with_parallelism("tp", wrong)

    def test_after_close(self):
        self.store.close()
        self.assertEqual(self.store.put_tensor("late", tensor(1, 2)), -1)
        self.assertIsNone(self.store.get_tensor("late"))
        self.assertEqual(self.store.batch_get_tensor(["late"]), [None])


if __name__ == "__main__":
    unittest.main()
