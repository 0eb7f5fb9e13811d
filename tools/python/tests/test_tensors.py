"""The tensor calls, tested with `fake_torch`. `test_modules.Tables` tests them with torch itself."""

import contextlib
import ctypes
import io
import sys
import types
import unittest
from unittest import mock

import bed
import fake_torch
import kvplane
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
    """A tensor whose bytes depend on their position."""
    count = kind.itemsize
    for extent in shape:
        count *= extent
    return fake_torch.of(bed.pattern(seed << 32, count), shape, kind)


def axis(kind, rank, size, split=None, number=None):
    one = ParallelAxis()
    one.kind, one.rank, one.size, one.split_dim = kind, rank, size, split
    one.expert_id, one.stage_id = number if kind == "ep" else None, number if kind == "pp" else None
    return one


def target(mode, parallelism=None):
    one = ReadTarget()
    one.mode, one.parallelism = mode, parallelism
    return one


def axes(*several):
    one = TensorParallelism()
    one.axes = list(several)
    return one


def _raw(one):
    """A tensor's object."""
    head, address, size, _ = _serialize_tensor(one)
    return head + ctypes.string_at(address, size)


class Tensors(unittest.TestCase):
    def setUp(self):
        bed.bed()
        patch = mock.patch.dict(sys.modules, {"torch": fake_torch})
        patch.start()
        self.addCleanup(patch.stop)
        self.store = MooncakeDistributedStore()
        self.assertEqual(self.store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", ""), 0)
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
        # An existing tensor stays unless it is to be replaced.
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
        for unknown, why in ((tensor(1, 2, kind=fake_torch.complex64), "complex64"), (tensor(1, *[1] * 9), "9 dimensions")):
            said = io.StringIO()
            with contextlib.redirect_stderr(said):
                self.assertEqual(self.store.put_tensor("bad", unknown), -600)
                # The other items of the batch are stored and have their own results.
                codes = self.store.batch_upsert_tensor(["first", "bad", "last"], [tensor(1, 2), unknown, tensor(2, 2)])
            self.assertEqual(codes, [0, -600, 0])
            self.assertIn(why, said.getvalue())
            self.same(self.store.get_tensor("last"), tensor(2, 2))
            with self.assertRaisesRegex((TypeError, ValueError), why):
                _serialize_tensor(unknown)
        self.assertIsNone(self.store.get_tensor("bad"))
        head, _, _, _ = _serialize_tensor(tensor(1, 4))
        # A shape that the bytes do not have.
        self.assertEqual(self.store.put("shape", _serialize_tensor(tensor(1, 5))[0].replace(b"\x14", b"\x10") + bytes(16)), 0)
        self.assertIsNone(self.store.get_tensor("shape"))
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

    def test_many_are_put_in_one_batch(self):
        keys, several, native = [f"batch-{at}" for at in range(20)], [tensor(at, 8) for at in range(20)], self.store._native
        calls = []

        class Counted:
            def __getattr__(self, name):
                if "put" in name:
                    calls.append(name)
                return getattr(native, name)

        self.store._native = Counted()
        try:
            for put, count in (
                (self.store.batch_put_tensor, 1),
                (self.store.batch_upsert_tensor, 1),
                (self.store.batch_pub_tensor, 1),
                (lambda *some: self.store.batch_put_tensor_with_tp(*some, 0, 4), 1),
                (lambda *some: self.store.batch_put_tensor_with_parallelism(*some, [axes(axis("tp", 0, 2, 0))] * 20), 2),
            ):
                calls.clear()
                self.assertEqual(put(keys, several), [0] * 20)
                self.assertEqual(len(calls), count, calls)
        finally:
            self.store._native = native
        for got, wanted in zip(self.store.batch_get_tensor(keys), several):
            self.same(got, wanted)
        self.same(self.store.batch_get_tensor_with_tp(keys, 3, 4)[2], several[2].tensor_split(4, 0)[3])

    def test_groups_and_sessions(self):
        with kvplane.Store() as store:
            for attribute in ("group_ids", "session_ids"):
                name, config, two = f"tensors-{attribute}", ReplicateConfig(), ReplicateConfig()
                setattr(config, attribute, [name])
                setattr(two, attribute, [name, f"{name}-other"])
                keys, several = [f"{name}-0", f"{name}-1"], [tensor(1, 4), tensor(2, 4)]
                self.assertEqual(self.store.pub_tensor(f"{name}-one", several[0], config), 0)
                self.assertEqual(store.retain_group(name, 5), 1)
                self.assertEqual(self.store.pub_tensor_with_tp(f"{name}-parts", several[0], config, 0, 4), 0)
                self.assertEqual(store.retain_group(name, 5), 5)
                self.assertEqual(self.store.batch_pub_tensor(keys, several, two), [0, 0])
                self.assertEqual((store.retain_group(name, 5), store.retain_group(f"{name}-other", 5)), (6, 1))
                self.assertEqual(self.store.batch_pub_tensor(keys, several, config), [-600, -600])
                self.assertEqual(self.store.batch_pub_tensor_with_tp(keys, several, config, 0, 2), [-600, -600])
                whole = [axes(axis("tp", 0, 2, 0)), None]
                keys = [f"{name}-a", f"{name}-b"]
                self.assertEqual(self.store.batch_put_tensor_with_parallelism(keys, several, whole, two), [0, 0])
                # The part and its manifest, and the other tensor.
                self.assertEqual((store.retain_group(name, 5), store.retain_group(f"{name}-other", 5)), (8, 2))
                memory = bytearray(b"".join(_raw(one) for one in several))
                place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
                places, sizes = [place, place + len(memory) // 2], [len(memory) // 2] * 2
                keys = [f"{name}-c", f"{name}-d"]
                put = self.store.batch_put_tensor_with_parallelism_from
                self.assertEqual(put(keys, places, sizes, None, two), [0, 0])
                self.assertEqual((store.retain_group(name, 5), store.retain_group(f"{name}-other", 5)), (9, 3))
                self.same(self.store.get_tensor(keys[1]), several[1])

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
        # The tensor is a view of the memory, not a copy.
        self.assertEqual(got.data_ptr(), at + 8192 + HEADER)
        several = self.store.batch_get_tensor_into(["in-c", "no such"], [at + 16384, at + 20480], [4096, 4096])
        self.same(several[0], two)
        self.assertIsNone(several[1])
        self.assertIsNone(self.store.get_tensor_into("in-b", at, 100))
        self.assertIsNone(self.store.get_tensor_into("in-b", 4096, 4096))
        self.assertEqual(self.store.unregister_buffer(at), 0)

    def registered(self, *several):
        """Registered memory with these tensors and their headers: where each begins, how long it is, and a place behind."""
        memory = bytearray(1 << 20)
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.assertEqual(self.store.register_buffer(at, len(memory)), 0)
        # The cleanup also holds the memory, which has no owner once this method returns.
        self.addCleanup(lambda _memory: self.store.unregister_buffer(at), memory)
        pointers, sizes, end = [], [], 0
        for made in several:
            raw = _serialize_tensor(made)[0] + made.raw()
            memory[end : end + len(raw)] = raw
            pointers.append(at + end)
            sizes.append(len(raw))
            end += len(raw) + 4096
        return pointers, sizes, at + end

    def test_memory_that_holds_no_tensor_of_this_size_is_refused(self):
        good = tensor(4, 10, 10)
        (at, other), (size, _), free = self.registered(good, tensor(5, 7))
        calls = ["put_tensor_from", "upsert_tensor_from", "put_tensor_with_parallelism_from"]
        calls += ["upsert_tensor_with_parallelism_from", "put_tensor_with_tp_from"]
        bad = ((at, 100), (at, size - 1), (at, size + 1), (other, size), (free, 4096), (0, size), (4096, size))
        for number, (place, count) in enumerate(bad):
            for name in calls:
                with self.subTest(name=name, place=number):
                    key = f"held-{name}-{number}"
                    self.assertEqual(getattr(self.store, name)(key, place, count), -600)
                    keys, pointers, sizes = [f"{key}-bad", f"{key}-good"], [place, at], [count, size]
                    # One invalid item fails the whole batch.
                    codes = getattr(self.store, f"batch_{name}")(keys, pointers, sizes)
                    self.assertEqual(codes, [-600, -600])
                    self.assertEqual(self.store.batch_is_exist([key, *keys]), [0, 0, 0])
            self.assertEqual(self.store.put_tensor_with_tp_from(f"parts-{number}", place, count, 0, 2), -600)
            codes = self.store.batch_put_tensor_with_tp_from([f"p-{number}", f"q-{number}"], [place, at], [count, size], 0, 2)
            self.assertEqual(codes, [-600, 0])
            self.same(self.store.get_tensor_with_tp(f"q-{number}", 1, 2), good.tensor_split(2, 0)[1])

    def test_whole_tensors_in_memory_are_stored_in_parts(self):
        one, two = tensor(4, 8, 6), tensor(5, 12, 3)
        pointers, sizes, free = self.registered(one, two)
        for rank in (0, 3):
            # All parts are stored, whatever the rank of the caller.
            key = f"from-{rank}"
            self.assertEqual(self.store.put_tensor_with_tp_from(key, pointers[0], sizes[0], rank, 4, 0), 0)
            self.assertEqual(self.store.put_tensor_with_tp_from(f"{key}-1", pointers[0], sizes[0], rank, 2, 1), 0)
            for part, wanted in enumerate(one.tensor_split(4, 0)):
                self.same(self.store.get_tensor_with_tp(key, part, 4, 0), wanted)
                self.same(self.store.get_tensor_with_tp_into(key, free, 4096, part, 4), wanted)
            self.same(self.store.get_tensor_with_tp(f"{key}-1", 1, 2, 1), one.tensor_split(2, 1)[1])
        keys = ["from-a", "from-b"]
        self.assertEqual(self.store.batch_put_tensor_with_tp_from(keys, pointers, sizes, 1, 2), [0, 0])
        for part in range(2):
            got = self.store.batch_get_tensor_with_tp(keys, part, 2)
            for found, whole in zip(got, (one, two)):
                self.same(found, whole.tensor_split(2, 0)[part])
        self.assertEqual(self.store.put_tensor_with_tp_from("from-c", pointers[1], sizes[1]), 0)
        self.same(self.store.get_tensor("from-c"), two)
        self.assertEqual(self.store.batch_put_tensor_with_tp_from(keys, pointers, sizes[:1], 1, 2), [-600, -600])

    def test_parts_are_read_by_others_than_those_they_were_made_for(self):
        whole, read = tensor(6, 8, 6), self.store.get_tensor_with_parallelism
        # A call with one axis writes no manifest beside the parts; the parts describe themselves.
        self.assertEqual(self.store.put_tensor_with_tp("quarters", whole, 0, 4, 0), 0)
        for size in (1, 2, 4, 8):
            for rank in range(size):
                wanted = axes(axis("tp", rank, size, 0))
                self.same(read("quarters", target("shard", wanted)), whole.tensor_split(size, 0)[rank])
                self.same(read("quarters", target("full", wanted)), whole)
        # A manifest left by earlier parts does not hide these.
        for rank, part in enumerate(whole.tensor_split(3, 1)):
            self.assertEqual(self.store.put_tensor_with_parallelism("again", part, axes(axis("tp", rank, 3, 1))), 0)
        self.store.batch_remove([f"again_tp_{rank}" for rank in range(3)])
        self.assertEqual(self.store.put_tensor_with_tp("again", whole, 0, 2, 1), 0)
        self.same(read("again", target("full", axes(axis("tp", 0, 1, 1)))), whole)
        # A part that other ranks would split differently is not returned.
        for size in (3, 5, 16):
            self.assertIsNone(read("quarters", target("shard", axes(axis("tp", 0, size, 0)))))
            stage = axis("pp", 0, 2, None, 7)
            for rank in range(2):
                several = axes(stage, axis("tp", rank, 2, 0))
                self.assertEqual(self.store.upsert_tensor_with_parallelism("stage", whole, several), 0)
            self.assertIsNone(read("stage", target("shard", axes(stage, axis("tp", 0, size, 0)))))
        # Along another axis nothing is found, not even the part stored under that key.
        self.assertIsNone(read("quarters", target("shard", axes(axis("tp", 1, 4, 1)))))
        # A writer part belongs to the rank at its position.
        for rank in range(3):
            code = self.store.put_tensor_with_parallelism("by-writers", whole, writer_partition=axis("tp", rank, 3, 1))
            self.assertEqual(code, 0)
        for rank, wanted in enumerate(whole.tensor_split(3, 1)):
            self.same(read("by-writers", target("shard", axes(axis("tp", rank, 3, 1)))), wanted)
        self.assertIsNone(read("by-writers", target("shard", axes(axis("tp", 0, 2, 1)))))

    def test_targets(self):
        self.assertEqual((ReadTarget().mode, target("FULL").mode, target("Shard").mode), ("as_stored", "full", "shard"))
        with self.assertRaisesRegex(RuntimeError, "Unsupported ReadTarget mode.*half"):
            target("half")
        with self.assertRaises(TypeError):
            target(3)

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

    def test_parts_of_one_parallel_axis(self):
        whole = tensor(7, 8, 4)
        parts = whole.tensor_split(2, 1)
        several = [axes(axis("tp", rank, 2, 1)) for rank in range(2)]
        for rank in range(2):
            self.assertEqual(self.store.put_tensor_with_parallelism("tp", parts[rank], several[rank]), 0)
        read = self.store.get_tensor_with_parallelism
        self.same(read("tp", target("shard", several[1])), parts[1])
        self.same(read("tp", target("FULL", several[0])), whole)
        self.same(self.store.batch_get_tensor_with_parallelism(["tp"], [target("full", several[0])])[0], whole)
        # Readers with a different number of ranks get their part of the whole tensor.
        for size in (1, 4):
            for rank in range(size):
                wanted = whole.narrow(1, rank * 4 // size, 4 // size)
                self.same(read("tp", target("shard", axes(axis("tp", rank, size, 1)))), wanted)
            self.same(read("tp", target("full", axes(axis("tp", 0, size, 1)))), whole)
        self.assertIsNone(read("tp", target("full", axes(axis("tp", 0, 2, 0)))))
        self.assertIsNone(read("tp", target("shard", axes(axis("tp", 1, 2, 0)))))
        codes = self.store.batch_upsert_tensor_with_parallelism(["tp", "tp"], parts[::-1], several)
        self.assertEqual(codes, [0, 0])
        self.same(self.store.get_tensor("tp_tp_0"), parts[1])

    def test_parts_of_several_axes(self):
        # The argument is the whole tensor, and each rank stores its part.
        for name, shape, size, split, more in (
            ("dp-tp", (8, 8), 2, 0, [axis("dp", 1, 2)]),
            ("tp-ep", (6, 9), 3, 1, [axis("ep", 1, 4, None, 17)]),
            ("dp-pp-tp", (2, 4, 5), 4, 1, [axis("dp", 0, 3), axis("pp", 0, 2, None, 3)]),
        ):
            whole = tensor(8, *shape)
            for order in (1, -1):
                with self.subTest(name=name, order=order):
                    key = f"{name}{order}"
                    several = [axes(*[*more, axis("tp", rank, size, split)][::order]) for rank in range(size)]
                    for one in several:
                        self.assertEqual(self.store.put_tensor_with_parallelism(key, whole, one), 0)
                    parts = whole.tensor_split(size, split)
                    for rank, one in enumerate(several):
                        got = self.store.get_tensor_with_parallelism(key, target("shard", one))
                        self.same(got, parts[rank])
                    full = target("full", several[-1])
                    self.same(self.store.get_tensor_with_parallelism(key, full), whole)
                    other = axes(*more, axis("tp", 0, 1, split))
                    self.same(self.store.get_tensor_with_parallelism(key, target("shard", other)), whole)
                    # No part with these axes has been stored.
                    alien = axes(axis("dp", 2, 3), axis("tp", 0, size, split))
                    self.assertIsNone(self.store.get_tensor_with_parallelism(key, target("full", alien)))
        stage = axes(axis("pp", 1, 2, None, 5), axis("dp", 0, 2))
        self.assertEqual(self.store.put_tensor_with_parallelism("stage", whole, stage), 0)
        self.same(self.store.get_tensor_with_parallelism("stage", target("shard", stage)), whole)
        self.assertIsNone(self.store.get_tensor_with_parallelism("stage", target("full", stage)))

    def test_axes_that_cannot_be(self):
        whole = tensor(7, 9, 4)
        put, read = self.store.put_tensor_with_parallelism, self.store.get_tensor_with_parallelism
        for several in (
            [axis("tp", 2, 2, 0)],
            [axis("tp", -1, 2, 0)],
            [axis("tp", 0, 0, 0)],
            [axis("tp", 0, 2)],
            [axis("tp", 0, 2, 2)],
            [axis("tp", 0, 2, -1)],
            [axis("xp", 0, 2, 0)],
            [axis("dp", 0, 2, 0)],
            [axis("ep", 0, 2)],
            [axis("pp", 0, 2)],
            [axis("dp", 0, 2), axis("dp", 1, 2)],
            [axis("dp", 0, 2), axis("tp", 0, 2, 0)],
            [axis("dp", 0, 2), axis("tp", 1, 3, 1)],
            [],
        ):
            with self.subTest([vars(one) for one in several]):
                self.assertEqual(put("bad", whole, axes(*several)), -600)
                self.assertEqual(self.store.batch_put_tensor_with_parallelism(["bad"], [whole], [axes(*several)]), [-600])
                for mode in ("shard", "full"):
                    self.assertIsNone(read("bad", target(mode, axes(*several))))
        self.assertEqual(put("bad", whole, axes(axis("tp", 0, 3, 0)), None, axis("tp", 0, 3, 0)), -600)
        self.assertEqual(self.store.batch_put_tensor_with_parallelism(["a", "b"], [whole]), [-600, -600])
        self.assertEqual(self.store.put_tensor("whole", whole), 0)
        self.assertIsNone(read("whole", target("shard")))
        self.same(read("whole", target("full")), whole)

    def test_parts_of_writers(self):
        whole = tensor(3, 6, 5)
        for rank in range(3):
            code = self.store.put_tensor_with_parallelism("written", whole, writer_partition=axis("tp", rank, 3, 0))
            self.assertEqual(code, 0)
        self.same(self.store.get_tensor_with_parallelism("written", target("full")), whole)
        uneven = axis("tp", 0, 2, 1)
        self.assertEqual(self.store.put_tensor_with_parallelism("uneven", whole, writer_partition=uneven), -600)

    def test_parts_in_registered_memory(self):
        whole = tensor(4, 8, 6)
        raw = _serialize_tensor(whole)[0] + whole.raw()
        memory = bytearray(1 << 16)
        memory[: len(raw)] = raw
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.assertEqual(self.store.register_buffer(at, len(memory)), 0)
        self.addCleanup(self.store.unregister_buffer, at)
        several = axes(axis("dp", 0, 2), axis("tp", 1, 2, 0))
        self.assertEqual(self.store.put_tensor_with_parallelism_from("in", at, len(raw), several), 0)
        into = self.store.get_tensor_with_parallelism_into
        self.same(into("in", at + 8192, 8192, target("shard", several)), whole.narrow(0, 4, 4))
        got = into("in", at + 8192, 8192, target("full", several))
        self.same(got, whole)
        self.assertEqual(got.data_ptr(), at + 8192 + HEADER)
        self.assertIsNone(into("in", at + 8192, len(raw) - 1, target("full", several)))
        uneven = axes(axis("dp", 0, 2), axis("tp", 1, 3, 0))
        self.assertEqual(self.store.put_tensor_with_parallelism_from("uneven", at, len(raw), uneven), -600)
        self.assertEqual(self.store.put_tensor_with_parallelism_from("short", at, 100, several), -600)
        self.assertEqual(self.store.batch_get_tensor_into(["in", "other"], [at], [8192]), [-600, -600])

    def test_files_of_safetensors(self):
        files, one, two = {}, tensor(1, 3), tensor(2, 4)
        stored = types.ModuleType("safetensors.torch")
        stored.save_file = lambda tensors, name: files.update({name: tensors})

        def load_file(name):
            if name not in files:
                raise FileNotFoundError(name)
            return files[name]

        stored.load_file = load_file
        modules = {"safetensors": types.ModuleType("safetensors"), "safetensors.torch": stored}
        with mock.patch.dict(sys.modules, modules), contextlib.redirect_stderr(io.StringIO()):
            self.assertEqual(self.store.save_tensor_to_safetensor("no such"), -1100)
            self.assertEqual(self.store.put_tensor("saved", one), 0)
            self.assertEqual(self.store.save_tensor_to_safetensor("saved"), 0)
            self.assertEqual(list(files), ["saved"])
            self.assertIsNone(self.store.load_tensor_from_safetensor("saved", "no such file"))
            self.assertIsNone(self.store.load_tensor_from_safetensor(None, "no such file"))
            files["several"], files["empty"] = {"one": one, "two": two}, {}
            self.assertIsNone(self.store.load_tensor_from_safetensor("one", "empty"))
            self.same(self.store.load_tensor_from_safetensor("two", "several"), two)
            self.same(self.store.get_tensor("two"), two)
            # A key that is missing in the file selects its first tensor.
            self.same(self.store.load_tensor_from_safetensor("three", "several"), one)
            self.same(self.store.get_tensor("three"), one)
            self.same(self.store.load_tensor_from_safetensor(None, "several"), one)
            self.same(self.store.get_tensor("several"), one)

    def test_after_close(self):
        self.store.close()
        self.assertEqual(self.store.put_tensor("late", tensor(1, 2)), -1)
        self.assertIsNone(self.store.get_tensor("late"))
        self.assertEqual(self.store.batch_get_tensor(["late"]), [None])


if __name__ == "__main__":
    unittest.main()
