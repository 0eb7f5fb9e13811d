"""Expert parallelism over torch's gloo, with tensors; skipped without torch."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

RANK = pathlib.Path(__file__).resolve().parent / "torch_experts.py"


@unittest.skipUnless(
    importlib.util.find_spec("torch") and importlib.util.find_spec("numpy"), "torch or numpy is not installed"
)
class Gloo(unittest.TestCase):
    """Ranks as processes."""

    def check(self, size):
        environment = dict(
            os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1"
        )
        with tempfile.TemporaryDirectory() as folder:
            ranks = []
            try:
                for rank in range(size):
                    command = [sys.executable, str(RANK), str(rank), str(size), os.path.join(folder, "store")]
                    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
                    ranks.append(subprocess.Popen(command, env=environment, **pipes))
                for rank, process in enumerate(ranks):
                    said, _ = process.communicate(timeout=240)
                    self.assertEqual((process.returncode, said.splitlines()[-1:]), (0, ["passed"]), f"{rank}: {said}")
            finally:
                for process in ranks:
                    process.kill()
                    process.wait()

    def test_two_ranks(self):
        self.check(2)

    def test_four_ranks(self):
        self.check(4)


if __name__ == "__main__":
    unittest.main()
