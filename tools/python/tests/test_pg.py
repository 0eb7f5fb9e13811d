"""`mooncake.pg` with torch: options, and what torch calls of a backend, by processes on the stand-in and on the native
module. Skipped without torch (`cargo x python --torch` has one)."""

import ast
import importlib.util
import os
import pathlib
import re
import signal
import socket
import stat
import sys
import tempfile
import unittest

import ranks

SIZE = 3


HAS_TORCH = importlib.util.find_spec("torch") is not None
GOLDEN = ranks.HERE.parent / "golden" / "mooncake-pg-3b5a594.txt"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Surface(unittest.TestCase):
    """The names of Mooncake's module, from the source: torch is not needed."""

    def setUp(self):
        import kvplane

        source = pathlib.Path(kvplane.__file__).parent.parent / "mooncake" / "pg.py"
        self.place, self.body = source, ast.parse(source.read_text(encoding="utf-8")).body
        self.found = {}
        for item in self.body:
            if isinstance(item, (ast.FunctionDef, ast.ClassDef)):
                self.found[item.name] = item
            elif isinstance(item, ast.Assign):
                alias = item.value.id if isinstance(item.value, ast.Name) else None
                self.found[item.targets[0].id] = self.found.get(alias, item)

    def test_every_name_and_parameter(self):
        for line in GOLDEN.read_text(encoding="utf-8").splitlines():
            name, inside = re.fullmatch(r"([\w.]+)(.*)", line).groups()
            owner, _, attribute = name.partition(".")
            self.assertIn(owner, self.found, line)
            item = self.found[owner]
            if isinstance(item, ast.ClassDef) and inside.startswith("("):
                item = next(one for one in item.body if getattr(one, "name", "") == "__init__")
            if inside.startswith("("):
                taken = [one.arg for one in (*item.args.args, *item.args.kwonlyargs) if one.arg != "self"]
                wanted = inside.strip("()").split(", ")
                named = [one for one in wanted if not re.fullmatch(r"arg\d", one)]
                self.assertLessEqual(set(named), set(taken), line)
                self.assertTrue(item.args.vararg or len(taken) >= len(wanted), line)
            elif inside:
                values = {one.targets[0].id: one.value.value for one in item.body if isinstance(one, ast.Assign)}
                self.assertEqual(f" = {values.get(attribute)}", inside, line)
            elif attribute:
                self.assertIn(f"self.{attribute}", ast.unparse(item), line)

    def test_the_stub(self):
        source = pathlib.Path(self.place).with_suffix(".pyi").read_text(encoding="utf-8")
        stub = {one.name: one for one in ast.parse(source).body if isinstance(one, (ast.FunctionDef, ast.ClassDef))}
        exported = next(one for one in self.body if isinstance(one, ast.Assign) and one.targets[0].id == "__all__")
        names = {one.value for one in exported.value.elts} - {"ViewUpdateStatus"}
        self.assertEqual(set(stub), names)
        for name, one in stub.items():
            if isinstance(one, ast.FunctionDef):
                parameters = [[each.arg for each in item.args.args] for item in (one, self.found[name]) if
                              isinstance(item, ast.FunctionDef)]
                self.assertEqual(parameters[0], parameters[-1], name)

    def test_what_is_exported(self):
        exported = next(one for one in self.body if isinstance(one, ast.Assign) and one.targets[0].id == "__all__")
        names = {line.partition("(")[0].partition(".")[0].split()[0] for line in GOLDEN.read_text().splitlines()}
        self.assertLessEqual(names, {one.value for one in exported.value.elts})


@unittest.skipUnless(HAS_TORCH, "torch is not installed")
class Options(unittest.TestCase):
    """Overloads of the options."""

    def setUp(self):
        import torch

        from mooncake import pg

        self.torch, self.options = torch, pg.MooncakeBackendOptions

    def test_overloads(self):
        tensor = self.torch.ones(1, dtype=self.torch.int32)
        for arguments, expected in (
            ((4,), (None, False, 4)),
            ((4, True), (None, True, 4)),
            ((-1,), (None, False, -1)),
            # One element does not make an integer of a tensor.
            ((tensor,), (tensor, False, -1)),
            ((tensor, True), (tensor, True, -1)),
            ((tensor, False, 8), (tensor, False, 8)),
        ):
            made = self.options(*arguments)
            self.assertIs(made.active_ranks, expected[0])
            self.assertEqual((made.is_extension, made.max_group_size), expected[1:])
        made = self.options(4, False, True, False)
        self.assertEqual((made.auto_deactivate_on_failure, made.auto_sync_on_failure), (True, False))
        self.assertEqual(made.failures(), "deferred")
        self.assertEqual(self.options(4, False, False, False).failures(), "manual")
        self.assertEqual(self.options(max_group_size=4, is_extension=True).max_group_size, 4)
        with self.assertRaises(ValueError):
            self.options(4, False, False, True).failures()

    def test_what_is_no_overload(self):
        tensor = self.torch.ones(1, dtype=self.torch.int32)
        for arguments in ((), (True,), ("4",), (tensor, tensor), (tensor, False, tensor), (4, False, True), (4,) * 5,
                          (tensor, False, 1, True, True)):
            with self.assertRaises(TypeError, msg=arguments):
                self.options(*arguments)
        with self.assertRaises(TypeError):
            self.options(4, active_ranks=tensor)

    def test_variables(self):
        from mooncake import pg

        for name in ("MOONCAKE_PG_AUTO_DEACTIVATE_ON_FAILURE", "MOONCAKE_PG_AUTO_SYNC_ON_FAILURE"):
            self.addCleanup(os.environ.pop, name, None)
        self.assertEqual(pg._of_environment(4).failures(), "automatic")
        os.environ["MOONCAKE_PG_AUTO_SYNC_ON_FAILURE"] = "0"
        self.assertEqual(pg._of_environment(4).failures(), "deferred")
        os.environ["MOONCAKE_PG_AUTO_DEACTIVATE_ON_FAILURE"] = "0"
        self.assertEqual(pg._of_environment(4).failures(), "manual")
        os.environ["MOONCAKE_PG_AUTO_SYNC_ON_FAILURE"] = "maybe"
        with self.assertRaisesRegex(ValueError, "AUTO_SYNC_ON_FAILURE is 'maybe'"):
            pg._of_environment(4)

    def test_settings(self):
        from mooncake import pg

        self.addCleanup(pg.set_collective_timeout_us, 0)
        pg.set_collective_timeout_us(2_500_000)
        self.assertEqual(pg.settings.collective_s, 2.5)
        with self.assertRaises(ValueError):
            pg.set_p2p_timeout_us(-1)
        with self.assertRaises(TypeError):
            pg.set_transfer_engine(3)
        from mooncake.engine import TransferEngine

        engine = TransferEngine()
        with self.assertRaisesRegex(RuntimeError, "not initialized"):
            pg.set_transfer_engine(engine)
        self.assertEqual(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), 0)
        self.addCleanup(pg.set_transfer_engine, None)
        pg.set_transfer_engine(engine)
        self.assertEqual(pg.settings.host, "127.0.0.1")
        with self.assertRaises(TypeError):
            pg.get_active_ranks(object())
        self.assertIs(pg.ViewUpdateStatus, pg.ProposalStatus)


class _Suite:
    fake = True

    @classmethod
    def setUpClass(cls):
        if not HAS_TORCH:
            raise unittest.SkipTest("torch is not installed")
        if not cls.fake and not ranks.has_native():
            raise unittest.SkipTest("the native module has no process groups")
        cls.folder = tempfile.TemporaryDirectory(prefix="kvplane-pg-")
        cls.kept = os.environ.get("KVPLANE_BINARY")
        if cls.fake:
            program = os.path.join(cls.folder.name, "kvplane")
            with open(program, "w", encoding="utf-8") as file:
                file.write(f'#!/bin/sh\nexec "{sys.executable}" "{ranks.HERE / "fake_groups.py"}" "$@"\n')
            os.chmod(program, stat.S_IRWXU)
            os.environ["KVPLANE_BINARY"] = program
        cls.job = ranks.Job("pg_steps", SIZE, cls.fake)
        port = free_port()
        cls.begun = cls.job.run("init", port, lambda at: at, SIZE)

    @classmethod
    def tearDownClass(cls):
        if hasattr(cls, "job"):
            cls.job.close()
            cls.folder.cleanup()
        if getattr(cls, "kept", None) is not None:
            os.environ["KVPLANE_BINARY"] = cls.kept

    def test_init(self):
        self.assertEqual(self.begun, [["mooncake-cpu", at, SIZE] for at in range(SIZE)])

    def test_reductions(self):
        for kind in ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"):
            self.assertEqual(self.job.run("reduced", kind, "SUM", lambda at: at + 1), [[6] * 3] * SIZE, kind)
        self.assertEqual(self.job.run("reduced", "float32", "AVG", lambda at: at + 1.0), [[2.0] * 3] * SIZE)
        self.assertEqual(self.job.run("reduced", "int32", "BOR", lambda at: 1 << at), [[7] * 3] * SIZE)
        self.assertEqual(self.job.run("reduced", "int64", "MAX", lambda at: at), [[2] * 3] * SIZE)

    def test_splits(self):
        found = self.job.run("splits")
        self.assertEqual(found[0], [0.0, 100.0, 103.0, 200.0, 203.0, 206.0])
        for one in self.job.run("wrong_splits"):
            self.assertEqual(len(one), 3)
            for text in one:
                self.assertIn("add up to", text)

    def test_lists(self):
        for at, (received, part, gathered) in enumerate(self.job.run("lists")):
            self.assertEqual(received, [[10 * of + at] * (at + 1) for of in range(SIZE)])
            self.assertEqual((part, gathered), ([3.0 * at] * 2, [0, 1, 2]))

    def test_objects(self):
        everyone = [{"rank": at} for at in range(SIZE)]
        self.assertEqual(self.job.run("objects"), [[everyone, ["of 1"]]] * SIZE)

    def test_coalesced(self):
        self.assertEqual(self.job.run("coalesced"), [[[3.0] * 3, [3.0] * 2, [[0.0, 1.0, 2.0]] * 2]] * SIZE)

    def test_functional_collectives(self):
        for at, found in enumerate(self.job.run("functional")):
            self.assertEqual(found[:2], [[6.0, 6.0], [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]])
            self.assertEqual(found[2:], [[3.0 * at], [at, 10.0 + at, 20.0 + at]])

    def test_futures_and_data_parallel(self):
        self.assertEqual(self.job.run("future"), [[6.0, 6.0]] * SIZE)
        self.assertEqual(self.job.run("data_parallel"), [[[4.0] * 3]] * SIZE)

    def test_tensors_that_are_not_contiguous(self):
        self.assertEqual(self.job.run("not_contiguous"), [[True] * 3] * SIZE)
        found = self.job.run("message", lambda at: at == 0, lambda at: 1 - at, on=[0, 1])
        self.assertEqual(found[1], [[0.0, 2.0, 4.0, 6.0], [1.0, 3.0, 5.0, 7.0]])

    def test_a_message_from_any_rank(self):
        found = self.job.run("message_from_any", lambda at: at == 1, 0, on=[0, 1])
        self.assertEqual(found, [[1, [1.0] * 3], None])

    def test_shrink(self):
        import torch.distributed as dist

        if not hasattr(dist, "shrink_group"):
            self.skipTest("this torch has no shrink_group")
        # Excluded ranks end afterwards: torch counts groups differently on them.
        job = ranks.Job("pg_steps", SIZE, self.fake)
        self.addCleanup(job.close)
        job.run("init", free_port(), lambda at: at, SIZE)
        self.assertEqual(job.run("shrink")[:2], [[2, [2.0, 2.0]]] * 2)

    def test_reconfigure(self):
        import torch

        if not hasattr(torch._C._distributed_c10d, "ReconfigureOptions"):
            self.skipTest("this torch has no reconfigure")
        found = self.job.run("reconfigure", 1)
        self.assertEqual(found, [None, [1, 2, [2], True, "SUCCESS"], [0, 2, [2], True, "SUCCESS"]])


class Fake(_Suite, unittest.TestCase):
    """On the stand-in: the Python layer."""

    def test_z_rank_zero_is_killed(self):
        # The control plane that it started lives on.
        self.assertEqual(self.job.run("mirror", True), [[1] * SIZE] * SIZE)
        address = self.job.run("control")[0]
        self.job.ranks[0].signal(signal.SIGKILL)
        self.job.ranks[0].process.wait()
        self.assertEqual(self.job.run("mirror_follows", [0, 1, 1]), [[0, 1, 1]] * 2)
        self.assertEqual(self.job.run("survive", lambda at: at), [[[3], [0, 1, 1], SIZE]] * 2)
        self.assertEqual(self.job.run("control"), [address] * 2)


class Native(_Suite, unittest.TestCase):
    """On the native module."""

    fake = False
    test_z_rank_zero_is_killed = Fake.test_z_rank_zero_is_killed


if __name__ == "__main__":
    unittest.main()
