"""Pins, retentions and priorities of objects, on a node whose memory a flood of other objects fills."""

import asyncio
import os
import unittest

import bed
import kvplane
from mooncake.store import MooncakeDistributedStore, ReplicateConfig, SoftPinAction

_VALUE = bytes(64 << 10)


class Pins(unittest.TestCase):
    """A node of 16 MiB, of which a half may be hard pinned."""

    @classmethod
    def setUpClass(cls):
        before = os.environ.get("XDG_RUNTIME_DIR")
        cls.addClassCleanup(
            lambda: os.environ.pop("XDG_RUNTIME_DIR") if before is None else os.environ.update(XDG_RUNTIME_DIR=before)
        )
        node = bed.Bed(memory="16m", more=("--shards", "1", "--hard-pins", "50"))
        cls.addClassCleanup(node.close)

    def setUp(self):
        self.store = kvplane.Store()
        self.addCleanup(self.store.close)
        self.store.clear()

    def flood(self, name, **how):
        for at in range(1000):
            self.store.put(f"{name}-{at}", _VALUE, **how)

    def put(self, name, **how):
        keys = [f"{name}-{at}" for at in range(8)]
        self.store.put_many({key: _VALUE for key in keys}, **how)
        return keys

    def kept(self, keys):
        return sum(self.store.exists_many(keys))

    def test_a_soft_pin_outlasts_a_flood_until_it_is_ended(self):
        pinned, others = self.put("pinned"), self.put("other")
        self.assertEqual(self.store.soft_pin(pinned, 3600), [True] * 8)
        self.assertEqual(self.store.soft_pin(["no such"]), [False])
        self.flood("one")
        self.assertEqual((self.kept(pinned), self.kept(others)), (8, 0))
        self.assertEqual(self.store.soft_unpin(pinned), [True] * 8)
        self.flood("two")
        self.assertEqual(self.kept(pinned), 0)

    def test_a_retention_is_renewed_and_released_by_its_name(self):
        keys = self.put("session")
        self.assertEqual(self.store.retain("a session", keys + ["no such"], 3600), [True] * 8 + [False])
        self.assertEqual(self.store.renew("a session", 7200.5), 8)
        self.flood("one")
        self.assertEqual(self.kept(keys), 8)
        self.assertEqual((self.store.release("a session"), self.store.release("a session")), (8, 0))
        self.assertEqual(self.store.renew("a session", 1), 0)
        self.flood("two")
        self.assertEqual(self.kept(keys), 0)

    def test_a_group_is_retained_under_its_name(self):
        for at in range(8):
            self.store.put(f"agent-{at}", _VALUE, group="agent")
        self.assertEqual(self.store.retain_group("agent", 3600), 8)
        self.assertEqual(self.store.release("agent"), 8)
        self.store.put("numbered", _VALUE, group=7)
        self.assertEqual((self.store.retain_group(7, 3600), self.store.release(7)), (1, 1))

    def test_retentions_beyond_the_limit_raise_and_the_others_stay(self):
        keys = [f"many-{at}" for at in range(160)]
        self.store.put_many({key: _VALUE for key in keys})
        with self.assertRaises(kvplane.NoSpace):
            self.store.retain("much", keys, 3600)
        self.assertGreater(self.store.release("much"), 100)

    def test_lower_priorities_are_evicted_before_higher_ones(self):
        high, usual, low = self.put("high", priority=2), self.put("usual"), self.put("low", priority=-4)
        later = self.put("later")
        self.assertEqual(self.store.set_priority(later + ["no such"], 4), [True] * 8 + [False])
        for at in range(260):
            self.store.put(f"few-{at}", _VALUE, priority=-4)
        self.assertEqual((self.kept(high), self.kept(usual), self.kept(later)), (8, 8, 8))
        self.assertEqual(self.kept(low), 0)
        for at in range(1000):
            self.store.put(f"flood-{at}", _VALUE)
        self.assertEqual((self.kept(high), self.kept(later)), (8, 8))
        self.assertEqual(self.kept(usual), 0)

    def test_what_is_out_of_range_is_refused_with_the_range(self):
        for wrong in (-5, 5, 1 << 40):
            with self.assertRaisesRegex(ValueError, f"from -4 to 4, not {wrong}"):
                self.store.put("k", b"v", priority=wrong)
            with self.assertRaisesRegex(ValueError, "from -4 to 4"):
                self.store.set_priority(["k"], wrong)
        for wrong in (0, -1, 86_401):
            with self.assertRaisesRegex(ValueError, "at most 86400 s"):
                self.store.retain("r", ["k"], wrong)
            with self.assertRaises(ValueError):
                self.store.soft_pin(["k"], wrong)
        for wrong in (0, -1, 1 << 64):
            with self.assertRaisesRegex(ValueError, "a number from 1"):
                self.store.release(wrong)
        self.assertFalse(self.store.exists("k"))

    def test_asyncio(self):
        async def work():
            async with await kvplane.AsyncStore.connect() as store:
                await store.put("k", b"v", priority=1)
                self.assertEqual(await store.soft_pin(["k"]), [True])
                self.assertEqual(await store.soft_unpin(["k"]), [True])
                self.assertEqual(await store.set_priority(["k"], -1), [True])
                self.assertEqual(await store.retain("r", ["k"], 60), [True])
                self.assertEqual(await store.renew("r", 60), 1)
                self.assertEqual(await store.release("r"), 1)
                self.assertEqual(await store.retain_group("no such", 60), 0)

        asyncio.run(work())

    def test_mooncakes_soft_pins_outlast_a_flood(self):
        store = MooncakeDistributedStore()
        self.addCleanup(store.close)
        self.assertEqual(store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", ""), 0)
        pinned, older = ReplicateConfig(), ReplicateConfig()
        pinned.soft_pin_action = SoftPinAction.ENABLE
        older.with_soft_pin = True
        self.assertEqual(store.put("new", _VALUE, pinned), 0)
        self.assertEqual(store.put("older", _VALUE, older), 0)
        self.assertEqual(store.put("plain", _VALUE), 0)
        self.flood("one")
        self.assertEqual(store.batch_is_exist(["new", "older", "plain"]), [1, 1, 0])


if __name__ == "__main__":
    unittest.main()
