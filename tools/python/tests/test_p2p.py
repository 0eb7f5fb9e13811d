"""Tensors that peers read, as checkpoint-engine's store has them."""

import unittest

import bed
import kvplane
from kvplane import _native
from kvplane.p2p import P2PStore


def address(buffer):
    return _native.buffer_address(buffer, False)[0]


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
            # What was taken back is not read, and the rest is.
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
