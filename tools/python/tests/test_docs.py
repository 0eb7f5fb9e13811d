"""The examples in docs/python.md: every name in them exists, and the scheduler example runs unchanged."""

import ast
import builtins
import inspect
import os
import pathlib
import re
import sys
import unittest

import kvplane
import mooncake
import test_scheduler

PAGE = pathlib.Path(__file__).resolve().parents[3] / "docs" / "python.md"


def examples():
    """Python code blocks of the page: the line number and text of each."""
    found, block, begun = [], [], 0
    for number, line in enumerate(PAGE.read_text().splitlines(), 1):
        if line == "```python":
            block, begun = [], number + 1
        elif line == "```" and begun:
            found.append((begun, "\n".join(block)))
            begun = 0
        elif begun:
            block.append(line)
    return found


def tree_of(text, number):
    """Parses an example; `await` and `async with` are allowed at top level."""
    code = "\n" * (number - 1) + text
    return compile(code, str(PAGE), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def unbound(tree):
    """Names that are used but never bound."""
    made, used = set(dir(builtins)), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            made.update((one.asname or one.name).split(".")[0] for one in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            made.add(node.name)
        elif type(node).__name__ in ("MatchAs", "MatchStar") and node.name:
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
    return sorted(used - made)


class Calls(unittest.TestCase):
    """Calls of `mooncake` that raise NotImplementedError are those that the page lists."""

    def test_calls_that_are_not_there_are_listed(self):
        text = PAGE.read_text()
        start = text.index("These calls exist and raise `NotImplementedError`:")
        listed = set(re.findall(r"`(?:\w+\.)*(\w+)`", text[start : text.index("\n\nWhere a call takes", start)]))
        raising = set()
        for path in pathlib.Path(mooncake.__file__).parent.glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef) and any(map(_raises_not_implemented, ast.walk(node))):
                    raising.add(node.name)
        # `_of_devices` makes the calls of ElasticBuffer, and `_on_cuda` is behind the four of a stream.
        raising -= {"_of_devices", "call", "_on_cuda"}
        self.assertLess({"warmup_efa_segment", "device_addr"}, raising)
        self.assertEqual(raising - listed, set())
        for name in listed - raising:
            self.assertRegex(name, "_on_cuda$|^(batch_|host_register|SharedSegment|pg|ElasticBuffer|NotImplementedError)|_get")


def _raises_not_implemented(node):
    raised = node.exc if isinstance(node, ast.Raise) else None
    return getattr(getattr(raised, "func", raised), "id", "") == "NotImplementedError"


@unittest.skipIf(sys.version_info < (3, 10), "the examples have `match`, which Python 3.10 brought")
class Examples(unittest.TestCase):
    """Examples work as copied from the page."""

    def test_every_name_is_made_or_imported(self):
        checked = 0
        for number, text in examples():
            tree = tree_of(text, number)
            self.assertEqual(unbound(tree), [], f"in the example at line {number} of {PAGE.name}")
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom):
                    try:
                        module = __import__(node.module, fromlist=["*"])
                    except ModuleNotFoundError as error:
                        # An interpreter without numpy does not have the modules that need it.
                        self.assertEqual(error.name, "numpy")
                        continue
                    missing = [one.name for one in node.names if not hasattr(module, one.name)]
                    self.assertEqual(missing, [], f"line {number}: {node.module}")
            checked += 1
        self.assertGreater(checked, 1)

    def test_every_keyword_of_ours_is_known(self):
        seen = set()
        for number, text in examples():
            for node in ast.walk(tree_of(text, number)):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                if not isinstance(node.func.value, ast.Name) or node.func.value.id != "kvplane":
                    continue
                known = inspect.signature(getattr(kvplane, node.func.attr)).parameters
                for keyword in node.keywords:
                    self.assertIn(keyword.arg, known, f"line {node.lineno}: kvplane.{node.func.attr}")
                    seen.add(keyword.arg)
        # The page shows the keywords that a cluster with tenants, certificates and encrypted connections needs.
        self.assertLessEqual({"cluster", "certificates", "tenant", "data_tls"}, seen)

    def test_the_schedulers_example_runs(self):
        text = next(text for _, text in examples() if "with Scheduler() as scheduler" in text)
        # The example watches the instance table without end; one iteration is enough here.
        text = re.sub(r"(scheduler\.watch\(\):[^\n]*\n +)\.\.\.", r"\1break", text)
        conductor = test_scheduler.Conductor()
        before = {name: os.environ.get(name) for name in ("XDG_RUNTIME_DIR", "KVPLANE_CLUSTER")}
        os.environ["XDG_RUNTIME_DIR"] = str(pathlib.Path(conductor.runtime).parent)
        os.environ["KVPLANE_CLUSTER"] = "conductor"
        try:
            exec(compile(text, str(PAGE), "exec"), {})  # noqa: S102
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
            conductor.bed.close()


if __name__ == "__main__":
    unittest.main()
