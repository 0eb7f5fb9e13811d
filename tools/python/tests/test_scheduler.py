"""`kvplane.Scheduler` against a live Conductor: booking, reports, explanations, and routing by the last table."""

import os
import threading
import time
import unittest

import bed
import kvplane
from kvplane import _native

_LONGEST_S = 30


def prompt(seed, blocks=200, model="m"):
    """A prompt of blocks of 16 tokens, whose hashes are those of its seed."""
    return kvplane.Prompt(model, blocks * 16 + 1, [seed * 1_000_003 + at for at in range(blocks)])


class Conductor:
    """A bed with a Conductor, separate from the one that other tests share."""

    def __init__(self):
        directory = os.environ.get("XDG_RUNTIME_DIR")
        self.bed = bed.Bed(memory="16m", cluster="conductor", more=["--conductor", "--shards", "1"])
        self.runtime = os.environ["XDG_RUNTIME_DIR"] + "/kvplane"
        if directory is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = directory

    def line(self):
        """Opens a scheduler on this Conductor."""
        return kvplane.Scheduler(cluster="conductor", runtime_directory=self.runtime, budget=20)


def wait_until(what):
    """Waits until `what` returns true."""
    end = time.monotonic() + _LONGEST_S
    while not what():
        if time.monotonic() > end:
            raise AssertionError(f"not within {_LONGEST_S} s")
        time.sleep(0.01)


class Schedulers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.conductor = Conductor()
        cls.addClassCleanup(cls.conductor.bed.close)

    def setUp(self):
        self.scheduler = self.conductor.line()
        self.addCleanup(self.scheduler.close)

    def test_a_request_is_booked_told_of_and_explained(self):
        line = self.scheduler
        one = line.register("one", "m", capacity_tokens=1_000_000, report_every=60.0, address="10.0.0.1:80")
        self.assertTrue(one.fresh)
        self.assertEqual(one.suspect_after, 180.0)
        asked = prompt(1)
        self.assertFalse(one.report_cache(stored=asked.hashes[:100], tier="dram", snapshot=True))
        self.assertFalse(one.report_cache(removed=asked.hashes[80:100]))
        holders, pooled = line.query(asked)
        self.assertEqual((holders, pooled), ([("one", 0, 80 * 16, 80 * 16, False)], 80 * 16))

        # An engine may hold a partial last block of a prompt: only tokens in full blocks count.
        for tokens, counted in ((40, 32), (33, 32), (48, 48), (15, 0)):
            short = asked._replace(tokens=tokens, hashes=asked.hashes[: -(-tokens // 16)])
            holders, pooled = line.query(short)
            self.assertEqual((max([one.dram_tokens for one in holders], default=0), pooled), (counted, counted))

        booked = line.schedule("a", asked, wait=_LONGEST_S)
        self.assertIsInstance(booked, kvplane.Booked)
        self.assertEqual((booked.prefill, booked.decode, booked.reuse_tokens), ("one", "one", 80 * 16))
        self.assertEqual(line.schedule("a", asked).reservation, booked.reservation)
        with self.assertRaises(kvplane.Conflict):
            line.schedule("a", prompt(2))
        explained = line.explain("a")
        self.assertEqual(explained.answer, booked)
        self.assertEqual([(one.instance, one.takes) for one in explained.candidates], [("one", True)])
        line.prefill_started(booked)
        line.prefill_done(booked, 80 * 16, 0.25)
        line.decoding(booked)
        line.alive(booked)
        row = line.table().instances[0]
        self.assertEqual((row.instance, row.model, row.part, row.address), ("one", "m", "mixed", "10.0.0.1:80"))
        one.report_load(100, 200, 3, kvplane.DecodeSteps(steps=10, took=0.3, tokens=200, requests=3))
        line.ended(booked)

        def is_gone():
            try:
                line.explain("a")
            except kvplane.NotFound:
                return True
            return False

        wait_until(is_gone)
        with self.assertRaises(kvplane.NotFound):
            line.alive(booked)
        advised = line.schedule("b", prompt(3), mode="advise")
        self.assertEqual(advised.reservation, 0)
        line.ended(advised)

        one.close()
        wait_until(lambda: not line.table().instances)
        with self.assertRaises(kvplane.NotFound):
            one.report_load(1)

    def test_who_waits_is_told_and_other_threads_go_on(self):
        line = self.scheduler
        with line.register("one", "m", part="prefill"), line.register("two", "m", part="prefill"):
            first = line.schedule("1", prompt(1, 2_000), barred=["two"])
            self.assertEqual(first.prefill, "one")
            refused = line.schedule("2", prompt(2, 2_000), wait=0.05, barred=["two"])
            self.assertEqual(refused, kvplane.Refused("waited", 0.0))
            told = []
            other = prompt(3, 2_000)
            waiting = threading.Thread(target=lambda: told.append(line.schedule("3", other, barred=["two"])))
            waiting.start()
            # A waiting call blocks neither the interpreter nor the scheduler.
            wait_until(lambda: any(model.waiting for model in line.table().models))
            self.assertEqual(told, [])
            line.ended(first)
            waiting.join(_LONGEST_S)
            self.assertEqual(told[0].prefill, "one")
            line.ended(told[0])
            booked = line.schedule("4", other)
            again = line.reschedule(booked, [booked.prefill], "4", other)
            self.assertEqual({booked.prefill, again.prefill}, {"one", "two"})
            # No instance is left.
            self.assertEqual(line.reschedule(again, [again.prefill], "4", other).why, "no instance")

    def test_terms_of_a_request(self):
        line = self.scheduler
        with line.register("one", "m"):
            terms = kvplane.Terms(flow="bot", priority=-2, ttft=600.0, output_tokens=100, session="conversation-1")
            booked = line.schedule("a", prompt(1), terms=terms)
            self.assertIsInstance(booked, kvplane.Booked)
            # The end of a request is sent with the next one, and its output with it.
            line.ended(booked, output_tokens=300, decode_time=9.1)
            refused = line.schedule("b", prompt(2, 2_000), terms=kvplane.Terms(ttft=0.000001))
            self.assertEqual(refused.why, "ttft")
            with self.assertRaises(kvplane.NotFound):
                line.alive(booked)
            for bad in (kvplane.Terms(priority=5), kvplane.Terms(flow="x" * 129), kvplane.Terms(session="x" * 257)):
                with self.assertRaises(kvplane.InvalidArgument):
                    line.schedule("c", prompt(3), terms=bad)
            with self.assertRaisesRegex(kvplane.NotFound, "there is no class"):
                line.schedule("c", prompt(3), terms=kvplane.Terms(service_class="chat"))

    def test_bad_input_is_refused(self):
        line = self.scheduler
        with self.assertRaises(kvplane.NotFound):
            line.schedule("a", prompt(1, model="nobody's"))
        for wrong in (
            lambda: line.register("one", "m", part="both"),
            lambda: line.register("", "m"),
            lambda: line.schedule("a", prompt(1), mode="perhaps"),
            lambda: line.query(prompt(1), tier="tape"),
            lambda: line.replicate([]),
        ):
            with self.assertRaises(kvplane.InvalidArgument):
                wrong()
        with line.register("one", "m") as one:
            with self.assertRaises(kvplane.InvalidArgument):
                line.schedule("", prompt(1))
            with self.assertRaises(kvplane.InvalidArgument):
                line.schedule("a", kvplane.Prompt("m", 5, [1, 2, 3]))
            with self.assertRaises(kvplane.InvalidArgument):
                one.report_cache(stored=[1], tier="tape")
            with self.assertRaises(TypeError):
                line.schedule("a", kvplane.Prompt("m", 50, [-1]))
            with self.assertRaises(kvplane.Conflict):
                line.register("one", "m", incarnation=1)
        line.close()
        with self.assertRaises(kvplane.Closed):
            line.table()

    def test_hashes_are_those_of_vllm(self):
        tokens = list(range(40))
        hashes = kvplane.Prompt.of_tokens("m", tokens, 16).hashes
        self.assertEqual(len(hashes), 2)
        # A block's hash depends on all preceding blocks, the seed and the salt.
        self.assertEqual(kvplane.Prompt.of_tokens("m", tokens[:20], 16).hashes, hashes[:1])
        self.assertNotEqual(kvplane.Prompt.of_tokens("m", [9, *tokens[1:]], 16).hashes[1], hashes[1])
        self.assertNotEqual(kvplane.Prompt.of_tokens("m", tokens, 16, seed="1").hashes[0], hashes[0])
        self.assertNotEqual(kvplane.Prompt.of_tokens("m", tokens, 16, salt="s").hashes[0], hashes[0])
        with self.assertRaises(ValueError):
            _native.block_hashes(tokens, 0, "0", "", "")

    def test_token_hashes_depend_on_no_seed(self):
        tokens = list(range(40))

        def hashed(tokens, **names):
            return kvplane.Prompt.of_tokens("m", tokens, 16, seed=None, **names).hashes

        hashes = hashed(tokens)
        self.assertEqual(len(hashes), 2)
        self.assertNotEqual(hashes, kvplane.Prompt.of_tokens("m", tokens, 16).hashes)
        self.assertEqual(hashed(tokens[:20]), hashes[:1])
        self.assertNotEqual(hashed([9, *tokens[1:]])[1], hashes[1])
        for names in [{"lora": "l"}, {"salt": "s"}, {"lora": "l", "salt": "s"}]:
            self.assertNotEqual(hashed(tokens, **names)[0], hashes[0])


class Lost(unittest.TestCase):
    def test_without_the_conductor_the_last_table_decides(self):
        conductor = Conductor()
        self.addCleanup(conductor.bed.close)
        line = conductor.line()
        self.addCleanup(line.close)
        for name in ("one", "two"):
            line.register(name, "m")
        tables = line.watch(_LONGEST_S)
        wait_until(lambda: len(next(tables).instances) == 2)
        conductor.bed.close()
        local = line.schedule("a", prompt(1))
        self.assertIsInstance(local, kvplane.Local)
        self.assertIn(local.prefill, ("one", "two"))
        other = "two" if local.prefill == "one" else "one"
        self.assertEqual(line.schedule("b", prompt(1), barred=[local.prefill]), kvplane.Local(other, other))
        line.ended(local)
        with self.assertRaises(kvplane.Unreachable):
            line.schedule("c", prompt(1, model="nobody's"))
        with self.assertRaises(kvplane.Error):
            line.query(prompt(1))


if __name__ == "__main__":
    unittest.main()
