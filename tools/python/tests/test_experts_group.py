"""Expert parallelism among processes that are killed, over `kvplane.group`: native groups, and the stand-in's."""

import importlib.util
import itertools
import os
import pathlib
import subprocess
import sys
import unittest

from test_experts import HAS_NUMPY

HAS_GROUPS = unittest.skipUnless(importlib.util.find_spec("kvplane.group"), "there is no kvplane.group")
_NUMBERS = itertools.count(1)


class _Suite:
    """The tests; `fake` says whose groups they use."""

    fake = True

    @classmethod
    def setUpClass(cls):
        import ranks

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

    def job(self, size):
        """Processes with buffers."""
        import ranks

        job = ranks.Job("expert_steps", size, self.fake)
        self.addCleanup(job.close)
        self.name = f"experts-{type(self).__name__}-{next(_NUMBERS)}"
        job.run("open_buffer", self.name, lambda at: at, size, self.address)
        return job

    def test_without_failures(self):
        for size in (2, 4):
            self.assertEqual(self.job(size).run("passes", list(range(20)), size), [[[]] * 20] * size)

    def test_processes_that_are_killed(self):
        """One after another, the last rank among them, while the others are in a call."""
        job = self.job(4)
        self.assertEqual(job.run("passes", [0, 1], 4), [[[], []]] * 4)
        for killed, gone in ((3, [3]), (0, [0, 3])):
            left = [rank for rank in range(4) if rank not in gone]
            for rank in left:
                job.ranks[rank].begin("passes", list(range(10)), 4)
            job.kill(killed)
            for rank in left:
                # From the first call on, whose ranks wait for the one that was killed.
                self.assertEqual(job.ranks[rank].end(), [gone] * 10)

    def test_a_process_takes_the_place_of_one_that_was_killed(self):
        """The last rank, so that the group is smaller meanwhile."""
        job = self.job(3)
        name = self.name
        for rank in range(2):
            job.ranks[rank].begin("passes", [0, 1, 2], 3)
        job.kill(2)
        for rank in range(2):
            self.assertEqual(job.ranks[rank].end(), [[2]] * 3)
        new = job.add()
        job.run("open_joiner", name, 2, 3, self.address, on=[new])
        job.ranks[new].begin("join", 3)
        self.assertEqual(job.run("activate", 2, on=[0]), [True])
        for rank in range(2):
            job.ranks[rank].begin("update")
        for rank in (0, 1, new):
            job.ranks[rank].end()
        self.assertEqual(job.run("passes", list(range(10)), 3), [[[]] * 10] * 3)


@HAS_NUMPY
@HAS_GROUPS
class Native(_Suite, unittest.TestCase):
    """Groups of the native module."""

    fake = False

    def test_example(self):
        example = pathlib.Path(__file__).resolve().parents[1] / "examples" / "mixture_of_experts.py"
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)), OMP_NUM_THREADS="1")
        command = [sys.executable, str(example), "--control", self.address]
        done = subprocess.run(command, env=environment, timeout=240, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("pass 9: 0 of 96 tokens lack an output; processes [1, 1, 1, 0]", done.stdout)


@HAS_NUMPY
@HAS_GROUPS
class StandIn(_Suite, unittest.TestCase):
    """Groups of the stand-in."""


if __name__ == "__main__":
    unittest.main()
