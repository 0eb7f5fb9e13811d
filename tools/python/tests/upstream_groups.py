"""Runs Mooncake's own tests of process groups on CPUs against this package: `cargo x python --torch CHECKOUT`, or this
file by itself, with an interpreter that has torch.

    python upstream_groups.py [--spawn] CHECKOUT [NAME...]

CHECKOUT is a checkout of Mooncake, or its folder `mooncake-pg/tests`. NAMEs are parts of tests' names. The files are run
as they are, but for one thing: processes that they would spawn are forked from one that has imported torch, as its
import takes longer than their deadlines on two busy cores; `--spawn` spawns them. What is known to differ is listed here
with its reason; anything else that fails, and anything listed that passes, is exit status 1. Not a part of CI: the files
are not this project's.
"""

import multiprocessing
import multiprocessing.context
import os
import pathlib
import sys
import unittest

_FAULTS = "it preloads a C++ library into Mooncake's own transfer engine, to let its transfers fail"
#: Tests whose result differs, with the reason.
DIFFERENT = {
    "test_inplace_rejoin_collective": _FAULTS,
    "test_inplace_rejoin_p2p": _FAULTS,
}
_PRELOADED = ["torch", "torch.distributed", "torch.multiprocessing"]


class Process(multiprocessing.context.ForkServerProcess):
    """Process with the variables of the one that started it, not of the server that it is forked from."""

    def start(self):
        self._variables = dict(os.environ)
        super().start()

    def run(self):
        os.environ.update(self._variables)
        super().run()


def fork_instead():
    """Has `multiprocessing` fork processes that are to be spawned from a server that has imported torch."""
    contexts = multiprocessing.get_context
    server = contexts("forkserver")
    server.set_forkserver_preload(_PRELOADED)
    server.Process = Process

    def get_context(method=None):
        return server if method == "spawn" else contexts(method)

    multiprocessing.get_context = get_context


def tests_of(folder, names):
    """The CPU tests of a folder's files, whose names contain one of these, or all."""
    loader = unittest.TestLoader()
    found = unittest.TestSuite()

    def add(suite):
        for one in suite:
            if isinstance(one, unittest.TestSuite):
                add(one)
            elif "CPU" in one.id() and (not names or any(name in one.id() for name in names)):
                found.addTest(one)

    add(loader.discover(str(folder), "test_pg_*.py"))
    return found


def main():
    """Returns exit status 0 if everything passed but what is known to differ."""
    words = [word for word in sys.argv[1:] if word != "--spawn"]
    folder = pathlib.Path(words[0]).resolve()
    if (folder / "mooncake-pg" / "tests").is_dir():
        folder = folder / "mooncake-pg" / "tests"
    if not any(folder.glob("test_pg_*.py")):
        sys.exit(f"{folder} has no tests of process groups: name a checkout of Mooncake")
    if "--spawn" not in sys.argv[1:]:
        fork_instead()
    sys.path.insert(0, str(folder))
    suite = tests_of(folder, words[1:])
    count = suite.countTestCases()
    result = unittest.TextTestRunner(verbosity=2).run(suite)
    failed = {test.id().rpartition(".")[2] for test, _ in result.failures + result.errors + result.skipped}
    ran = {name for name in DIFFERENT if not words[1:] or any(part in name for part in words[1:])}
    unexpected = sorted(failed - set(DIFFERENT))
    passed = sorted(name for name in ran - failed if any(name in test for test in ran))
    for name in sorted(failed & set(DIFFERENT)):
        print(f"differs: {name}: {DIFFERENT[name]}")
    for name in unexpected:
        print(f"failed: {name}")
    for name in passed:
        print(f"passed, but is listed as different: {name}")
    print(f"groups: {count - len(failed)} of {count} of Mooncake's tests passed, {len(failed & set(DIFFERENT))} differ")
    return 1 if unexpected or passed else 0


if __name__ == "__main__":
    sys.exit(main())
