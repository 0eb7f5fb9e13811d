"""Process groups: collectives, views, members that fail and join; by processes, on the native module and on the
stand-in."""

import array
import importlib.util
import itertools
import os
import pathlib
import signal
import socket
import sys
import tempfile
import unittest

import ranks

_NUMBERS = itertools.count(1)


class _Suite:
    """The tests; `fake` says whose groups they use."""

    fake = True

    @classmethod
    def setUpClass(cls):
        if not cls.fake and not ranks.has_native():
            raise unittest.SkipTest("the native module has no process groups")
        cls.control = ranks.FakeControl() if cls.fake else None
        if cls.fake:
            cls.address = cls.control.address
        else:
            import bed

            cls.address = bed.bed().control

    @classmethod
    def tearDownClass(cls):
        if cls.control is not None:
            cls.control.kill()

    def job(self, count, world=None):
        """Processes with a world of their own."""
        job = ranks.Job("group_steps", count, self.fake)
        self.addCleanup(job.close)
        self.world = world or f"world-{type(self).__name__}-{next(_NUMBERS)}"
        job.run("open_world", self.world, lambda at: at, self.address)
        return job

    def group(self, count, **options):
        job = self.job(count)
        self.assertEqual(job.run("open_group", "all", list(range(count)), options), list(range(count)))
        return job

    def test_collectives(self):
        job = self.group(4)
        self.assertEqual(job.run("status", "all")[2][:3], [4, [True] * 4, ["active"] * 4])
        cases = {"sum": 10, "avg": 2.5, "min": 1, "max": 4, "product": 24}
        for reduction, expected in cases.items():
            found = job.run("collective", "all", "all_reduce", "f32", lambda at: [at + 1.0] * 3, reduction)
            self.assertEqual([one[:2] for one in found], [[[expected] * 3, []]] * 4, reduction)
        for reduction, expected in {"and": 8, "or": 15, "xor": 7}.items():
            found = job.run("collective", "all", "all_reduce", "i32", lambda at: [8 | at | (at & 1) << 2], reduction)
            values = [8 | at | (at & 1) << 2 for at in range(4)]
            wanted = {"and": 8, "or": values[0] | values[1] | values[2] | values[3],
                      "xor": values[0] ^ values[1] ^ values[2] ^ values[3]}[reduction]
            self.assertEqual([one[0] for one in found], [[wanted]] * 4, (reduction, expected))
        for kind in ("u8", "i8", "i16", "i64", "f64"):
            found = job.run("collective", "all", "all_reduce", kind, lambda at: [at], "sum")
            self.assertEqual([one[0] for one in found], [[6]] * 4, kind)
        found = job.run("collective", "all", "reduce", "i32", lambda at: [at], 2)
        self.assertEqual(found[2][0], [6])
        found = job.run("collective", "all", "broadcast", "i64", lambda at: [at, at], 3)
        self.assertEqual([one[0] for one in found], [[3, 3]] * 4)
        found = job.run("parts", "all", "all_gather", "i32", lambda at: [at, -at], 8)
        self.assertEqual([one[0] for one in found], [[0, 0, 1, -1, 2, -2, 3, -3]] * 4)
        found = job.run("parts", "all", "reduce_scatter", "i32", lambda at: [at + part for part in range(8)], 2)
        self.assertEqual([one[0] for one in found], [[6 + 8 * at, 10 + 8 * at] for at in range(4)])
        found = job.run("parts", "all", "all_to_all", "i32", lambda at: [10 * at + to for to in range(4)], 4)
        self.assertEqual([one[0] for one in found], [[10 * of + at for of in range(4)] for at in range(4)])
        self.assertEqual(job.run("barrier", "all"), [[]] * 4)
        self.assertEqual(job.run("ring", "all"), [[(at - 1) % 4, 7] for at in range(4)])
        self.assertEqual(job.run("begin_and_forget", "all", 20), [[4]] * 4)

    def test_parts_of_unequal_size(self):
        job = self.group(3)
        # Rank r sends s + 1 elements to rank s, and gets r + 1 of each.
        values = lambda at: [100 * at + to for to in range(3) for _ in range(to + 1)]  # noqa: E731
        counts = lambda at: [at + 1] * 3  # noqa: E731
        found = job.run("parts", "all", "all_to_all", "i32", values, lambda at: 3 * (at + 1), [1, 2, 3], counts)
        for at in range(3):
            self.assertEqual(found[at][0], [100 * of + at for of in range(3) for _ in range(at + 1)])

    def test_arrays_without_elements(self):
        job = self.group(3)
        for name, more in (("all_reduce", "sum"), ("reduce", 1), ("broadcast", 1)):
            self.assertEqual(job.run("collective", "all", name, "i32", [], more), [[[], [], 1]] * 3, name)
        for name in ("all_gather", "reduce_scatter", "all_to_all"):
            self.assertEqual(job.run("parts", "all", name, "f32", [], 0), [[[], []]] * 3, name)
        for name in ("gather", "scatter"):
            self.assertEqual(job.run("parts", "all", name, "f32", [], 0, 1), [[[], []]] * 3, name)
        # Rank 1 has nothing for the others, and gets nothing.
        counts = lambda at: [0, 0, 0] if at == 1 else [1, 0, 1]  # noqa: E731
        values = lambda at: [] if at == 1 else [10 * at, 10 * at + 2]  # noqa: E731
        found = job.run("parts", "all", "all_to_all", "i32", values, lambda at: 0 if at == 1 else 2, counts, counts)
        self.assertEqual([one[0] for one in found], [[0, 20], [], [2, 22]])
        self.assertEqual([one[0] for one in job.run("collective", "all", "all_reduce", "i32", [1], "sum")], [[3]] * 3)

    def test_gather_and_scatter(self):
        job = self.group(3)
        job.ranks[0].begin("parts", "all", "gather", "i32", [5], 3, 0)
        for at in (1, 2):
            job.ranks[at].begin("parts", "all", "gather", "i32", [5 + at], 0, 0)
        self.assertEqual(job.ranks[0].end()[0], [5, 6, 7])
        for at in (1, 2):
            job.ranks[at].end()
        found = job.run("parts", "all", "scatter", "i32", lambda at: [1, 2, 3] if at == 1 else [], 1, 1)
        self.assertEqual([one[0] for one in found], [[1], [2], [3]])

    def test_a_rank_that_is_killed(self):
        job = self.group(4)
        job.run("collective", "all", "all_reduce", "i32", lambda at: [at + 1], "sum")
        # The survivors are in the collective when rank 1 dies.
        job.run("begin", "all", "all_reduce", "i32", lambda at: [at + 1], "sum", on=[0, 2, 3])
        job.kill(1)
        self.assertEqual([one[:2] for one in job.run("end")], [[[8], [1]]] * 3)
        size, active, members, *_ = job.run("status", "all")[0]
        self.assertEqual((size, active), (4, [True, False, True, True]))
        self.assertNotEqual(members[1], "active")
        # Arrays have room for rank 1, and its part stays as it was.
        found = job.run("parts", "all", "all_gather", "i32", lambda at: [at], 4)
        self.assertEqual(found, [[[0, 77, 2, 3], []]] * 3)

    def test_arrays_that_do_not_shrink_with_the_group(self):
        job = self.group(3)
        job.kill(2)
        job.run("barrier", "all")
        self.assertEqual(job.run("status", "all")[0][0], 2)
        self.assertEqual(job.run("parts", "all", "all_gather", "i32", lambda at: [at], 3), [[[0, 1, 77], []]] * 2)
        found = job.run("parts", "all", "all_to_all", "i32", lambda at: [at, at, 9], 3, [1, 1, 1], [1, 1, 1])
        self.assertEqual(found, [[[0, 1, 77], []]] * 2)
        # Without counts, the division is the same as before.
        found = job.run("parts", "all", "all_to_all", "i32", lambda at: [at, at, 9], 3)
        self.assertEqual(found, [[[0, 1, 77], []]] * 2)
        found = job.run("parts", "all", "reduce_scatter", "i32", lambda at: [at, 10, 9], 1)
        self.assertEqual([one[0] for one in found], [[1], [20]])

    def test_rank_zero_is_no_special_one(self):
        job = self.group(3)
        job.kill(0)
        found = job.run("collective", "all", "all_reduce", "i32", lambda at: [at], "sum")
        self.assertEqual([one[0] for one in found], [[3]] * 2)
        self.assertEqual([one[0] for one in job.run("collective", "all", "all_reduce", "i32", [1], "sum")], [[2]] * 2)

    def test_a_replacement(self):
        job = self.group(3)
        job.kill(1)
        found = job.run("collective", "all", "all_reduce", "i32", lambda at: [at + 1], "sum")
        self.assertEqual([one[0] for one in found], [[4]] * 2)
        new = job.add()
        job.run("open_world", self.world, 1, self.address, on=[new])
        job.run("open_group", "all", [0, 1, 2], {"joining": True}, on=[new])
        # A joiner is alone until it has joined.
        self.assertEqual(job.run("collective", "all", "all_reduce", "i32", [5], "sum", on=[new])[0][0], [5])
        job.ranks[new].begin("join", "all")
        self.assertEqual(job.run("propose", "all", True, [1], on=[0, 2]), [[True, [], ""]] * 2)
        self.assertEqual(job.ranks[new].end(), 3)
        found = job.run("collective", "all", "all_reduce", "i32", [1], "sum")
        self.assertEqual([one[:2] for one in found], [[[3], []]] * 3)

    def test_a_group_that_grows(self):
        job = self.job(2)
        job.run("open_group", "all", [0, 1], {"max_size": 4})
        self.assertEqual(job.run("status", "all")[0][0], 2)
        new = job.add()
        job.run("open_world", self.world, 2, self.address, on=[new])
        other = job.run("refused", "open_group", "all", [1, 0, 2], {"max_size": 4, "joining": True}, on=[new])[0]
        self.assertIn(other[0], ("NotFound", "Mismatch", "Conflict"))
        job.run("open_group", "all", [0, 1, 2], {"max_size": 4, "joining": True}, on=[new])
        self.assertEqual(job.run("status", "all", on=[new])[0][0], 3)
        job.ranks[new].begin("join", "all")
        job.run("propose", "all", True, [2], on=[0, 1])
        job.ranks[new].end()
        self.assertEqual([one[0] for one in job.run("status", "all")], [3] * 3)
        self.assertEqual(job.run("parts", "all", "all_gather", "i32", lambda at: [at], 3), [[[0, 1, 2], []]] * 3)

    def test_failures_that_the_caller_deactivates(self):
        job = self.group(3, failures="manual")
        job.kill(2)
        for _ in range(2):
            found = job.run("collective", "all", "all_reduce", "i32", lambda at: [at + 1], "sum")
            self.assertEqual([one[:2] for one in found], [[[3], [2]]] * 2)
        self.assertEqual(job.run("status", "all")[0][2], ["active"] * 3)
        self.assertIn(job.run("sync", "all")[0], ("reconciled", "none_pending"))
        self.assertEqual([one[0] for one in job.run("propose", "all", False, [2])], [True] * 2)
        found = job.run("collective", "all", "all_reduce", "i32", lambda at: [at + 1], "sum")
        self.assertEqual([one[:2] for one in found], [[[3], []]] * 2)
        new = job.add()
        job.run("open_world", self.world, 2, self.address, on=[new])
        job.run("open_group", "all", [0, 1, 2], {"failures": "manual", "joining": True}, on=[new])
        # Members with which a joiner has no collectives yet have not failed.
        found = job.run("collective", "all", "all_reduce", "i32", [5], "sum", on=[new])
        self.assertEqual([one[:2] for one in found], [[[5], []]])

    def test_a_member_that_leaves(self):
        job = self.group(3)
        self.assertTrue(job.run("propose", "all", False, [2], on=[2])[0][0])
        job.run("close_group", "all", on=[2])
        self.assertEqual(job.run("await_active", "all", [True, True, False], on=[0, 1]), [True] * 2)
        self.assertEqual([one[0] for one in job.run("collective", "all", "all_reduce", "i32", [1], "sum", on=[0, 1])],
                         [[2]] * 2)
        self.assertEqual(job.run("status", "all", on=[0])[0][0], 2)

    def test_messages_of_a_dead_rank(self):
        job = self.group(3)
        job.kill(2)
        found = job.run("exchange", "all", 2, False, [9], on=[0, 1])
        self.assertEqual(found, [[[9], [2]]] * 2)
        found = job.run("exchange", "all", 2, True, [9], on=[0, 1])
        self.assertEqual([one[1] for one in found], [[2]] * 2)

    def test_messages_of_a_rank_that_is_deactivated(self):
        # Rank 2 lives, and is connected.
        job = self.group(3)
        job.run("propose", "all", False, [2], on=[0])
        self.assertEqual(job.run("await_active", "all", [True, True, False], on=[0, 1]), [True] * 2)
        for does_send in (True, False):
            found = job.run("exchange", "all", 2, does_send, [9], on=[1])
            self.assertEqual(found, [[[9], [2]]], does_send)

    def test_a_root_that_is_dead(self):
        job = self.group(3)
        job.kill(1)
        for name in ("broadcast", "reduce"):
            found = job.run("collective", "all", name, "i32", lambda at: [at], 1)
            self.assertEqual([one[:2] for one in found], [[[0], [1]], [[2], [1]]], name)

    def test_messages_from_any_rank(self):
        job = self.group(3)
        job.ranks[0].begin("receive_from_any", "all", 2)
        job.run("exchange", "all", 0, True, lambda at: [10 * at], on=[1, 2])
        self.assertEqual(job.ranks[0].end(), [[10, 1], [20, 2]])
        name, code, waited, _ = job.run("refused", "exchange", "all", None, False, [0], 0, 0.2, on=[0])[0]
        self.assertEqual((name, code, waited), ("Timeout", -901, []))

    def test_tags_keep_messages_apart(self):
        job = self.group(2)
        job.ranks[1].begin("exchange", "all", 0, False, [0], 5)
        job.run("exchange", "all", 1, True, [55], 5, on=[0])
        self.assertEqual(job.ranks[1].end()[0], [55])

    def test_several_groups(self):
        job = self.group(4)
        job.run("open_group", "odd", [3, 1], {}, on=[1, 3])
        job.run("open_group", "even", [0, 2], {}, on=[0, 2])
        self.assertEqual(job.run("status", "odd", on=[1, 3])[0][5], 1)
        found = job.run("collective", "odd", "broadcast", "i32", lambda at: [at], 0, on=[1, 3])
        self.assertEqual([one[0] for one in found], [[3]] * 2)
        found = job.run("collective", "even", "all_reduce", "i32", lambda at: [at], "sum", on=[0, 2])
        self.assertEqual([one[0] for one in found], [[2]] * 2)
        self.assertEqual(job.run("barrier", "all"), [[]] * 4)

    def test_ranks_that_disagree(self):
        job = self.group(2)
        for first, second in (
            (["all_reduce", "i32", [1], "sum"], ["all_reduce", "i64", [1], "sum"]),
            (["all_reduce", "i32", [1], "sum"], ["all_reduce", "i32", [1, 2], "sum"]),
            (["all_reduce", "i32", [1], "sum"], ["all_reduce", "i32", [1], "max"]),
            (["all_reduce", "i32", [1], "sum"], ["broadcast", "i32", [1], 0]),
        ):
            job.ranks[0].begin("refused", "collective", "all", *first)
            job.ranks[1].begin("refused", "collective", "all", *second)
            for at in range(2):
                name, code, others, _ = job.ranks[at].end()
                self.assertEqual((name, code), ("Mismatch", -1800), (first, second))
                self.assertTrue(others)

    def test_a_deadline(self):
        job = self.group(2)
        name, code, waited, _ = job.run("refused", "barrier", "all", 0.2, on=[0])[0]
        self.assertEqual((name, code, waited), ("Timeout", -901, [1]))

    def test_a_founding_member_that_does_not_come(self):
        job = self.job(1)
        found = job.run("refused", "open_group", "all", [0, 1], {"deadline": 0.3})[0]
        self.assertEqual(found[:3], ["Timeout", -901, [1]])

    def test_two_processes_with_one_rank(self):
        job = self.job(1)
        second = job.add()
        name, code, *_ = job.run("refused", "open_world", self.world, 0, self.address, on=[second])[0]
        self.assertEqual((name, code), ("Conflict", -705))
        job.kill(0)
        # The place of one that died is free.
        ranks.until(lambda: not job.run("refused", "open_world", self.world, 0, self.address, on=[second])[0])

    def test_numpy(self):
        if importlib.util.find_spec("numpy") is None:
            self.skipTest("numpy is not installed")
        job = self.group(2)
        for found in job.run("numpy_types", "all"):
            self.assertEqual(found.pop("gathered"), [[2, 2], [0.0, 0.0, 1.0, 1.0]])
            self.assertEqual(found.pop("bool"), 6)
            self.assertEqual(set(found.values()), {18.0}, found)


class Fake(_Suite, unittest.TestCase):
    """On the stand-in: the Python layer."""


class Native(_Suite, unittest.TestCase):
    """On the native module."""

    fake = False


class ControlPlanes(unittest.TestCase):
    """A job's own control plane."""

    def program(self, text):
        """Has a script in the place of the program."""
        folder = tempfile.TemporaryDirectory(prefix="kvplane-group-")
        self.addCleanup(folder.cleanup)
        path = pathlib.Path(folder.name) / "kvplane"
        path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        path.chmod(0o700)
        kept = os.environ.get("KVPLANE_BINARY")
        os.environ["KVPLANE_BINARY"] = str(path)
        self.addCleanup(os.environ.pop if kept is None else os.environ.__setitem__, "KVPLANE_BINARY", kept)

    def test_it_outlives_its_process_and_ends_when_idle(self):
        self.program(f'exec "{sys.executable}" "{ranks.HERE / "fake_groups.py"}" "$@"')
        script = (
            "import time; from kvplane._program import start_control_plane as start\n"
            "print(start('job', 1.0), flush=True); time.sleep(60)"
        )
        starter = ranks.Lines([sys.executable, "-c", script], True)
        self.addCleanup(starter.kill)
        host, _, port = starter.next().strip().rpartition(":")
        self.assertEqual(host, "127.0.0.1")
        starter.signal(signal.SIGKILL)
        starter.process.wait()
        socket.create_connection((host, int(port)), timeout=30).close()

        def is_gone():
            try:
                socket.create_connection((host, int(port)), timeout=1).close()
            except OSError:
                return True
            return False

        ranks.until(is_gone)

    def test_one_that_does_not_begin(self):
        from kvplane import Unreachable
        from kvplane._program import start_control_plane

        self.program("echo no such flag; exit 3")
        with self.assertRaisesRegex(Unreachable, "(?s)control --cluster job .* ended with 3: no such flag"):
            start_control_plane("job", 1.0)
        self.program("sleep 60")
        with self.assertRaisesRegex(Unreachable, "has not begun within 0.2 s"):
            start_control_plane("job", 1.0, 0.2)
        os.environ["KVPLANE_BINARY"] = ""
        self.addCleanup(os.environ.__setitem__, "PATH", os.environ["PATH"])
        os.environ["PATH"] = "/nowhere"
        with self.assertRaisesRegex(Unreachable, "set KVPLANE_BINARY, or KVPLANE_CONTROL"):
            start_control_plane("job", 1.0)


class Arguments(unittest.TestCase):
    """Invalid arguments are named before anything is sent."""

    def setUp(self):
        from kvplane import _native, group

        class Nothing:
            """Native classes that hold nothing."""

            rank, max_size, epoch, name = 1, 4, 1, "all"

            def __init__(self, *_, **__):
                pass

            def attach(self, *_):
                return self

            def size(self):
                return 3

            def close(self):
                pass

            detach = close

            def __getattr__(self, name):
                raise AssertionError(f"{name} was called")

        kept = getattr(_native, "GroupProcess", None)
        _native.GroupProcess = Nothing
        if kept is None:
            self.addCleanup(lambda: delattr(_native, "GroupProcess"))
        else:
            self.addCleanup(setattr, _native, "GroupProcess", kept)
        self.module = group
        self.world = group.World("w", 1)
        self.group = self.world.group("all", [0, 1, 2], max_size=4)

    def rejects(self, pattern, function, *arguments, **keywords):
        with self.assertRaisesRegex(self.module.InvalidArgument, pattern):
            function(*arguments, **keywords)

    def test_worlds_and_groups(self):
        self.rejects("rank 64 is not a rank from 0 to 63", self.module.World, "w", 64)
        self.rejects("65", self.module.World, "w", 65)
        self.rejects("70 ranks|not a rank", self.world.group, "g", range(70))
        self.rejects("max_size is at most 64", self.world.group, "g", [0, 1], max_size=65)
        self.rejects("3 ranks in a group of at most 2", self.world.group, "g", [0, 1, 2], max_size=2)
        self.rejects("twice", self.world.group, "g", [0, 1, 1])
        self.rejects("has not the rank of this process, 1", self.world.group, "g", [0, 2])
        self.rejects("failures is 'never'", self.world.group, "g", [0, 1], failures="never")
        self.rejects("deadline is 0 s", self.world.group, "g", [0, 1], deadline=0)

    def test_memory(self):
        view = memoryview(bytearray(16))
        self.rejects("array of shape .* is not contiguous", self.group.all_reduce, view[::2])
        self.rejects("array is read-only", self.group.all_reduce, b"abc")
        self.rejects("array is list", self.group.all_reduce, [1, 2])
        self.rejects("'mean' is no reduction", self.group.all_reduce, bytearray(3), "mean")
        self.rejects("u2 have no max", self.group.all_reduce, array.array("H", [1]), "max")

    def test_sizes(self):
        ints = lambda count: array.array("i", [0] * count)  # noqa: E731
        self.rejects("target has 5 elements, not the 3 x 2", self.group.all_gather, ints(2), ints(5))
        self.rejects("target has 10 elements, not the 3 x 2", self.group.all_gather, ints(2), ints(10))
        self.rejects("target has 4 elements, not the 3 x 2", self.group.all_gather, ints(2), ints(4))
        self.rejects("source has elements of type i4, target of f4", self.group.all_gather, ints(1),
                     array.array("f", [0] * 3))
        self.rejects("source has 5 elements, not the 3 x 1", self.group.reduce_scatter, ints(5), ints(1))
        self.rejects("group.s 4 ranks do not share evenly: name target_counts", self.group.all_to_all, ints(4), ints(3))
        for counts in ([1, 1], [1, 1, 2], [4, -1, 0], [1, 1, 1, 0, 0]):
            self.rejects("source_counts are .*add up to source's 3", self.group.all_to_all, ints(3), ints(3), counts)
        self.rejects("target_counts", self.group.all_to_all, ints(3), ints(3), [1, 1, 1], [3, 3, 3])
        self.rejects("passes no source", self.group.scatter, ints(1), None, 1)
        self.rejects("the root 4 is not a rank", self.group.broadcast, ints(1), 4)
        self.rejects("rank 1 is this process", self.group.send, ints(1), 1)
        self.rejects("member 4 is not a rank", self.group.activate, [4])


if __name__ == "__main__":
    unittest.main()
