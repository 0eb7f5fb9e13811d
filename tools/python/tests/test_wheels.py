"""The wheels install into an environment of their own, and the first lines of the documentation run there."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import bed

HERE = pathlib.Path(__file__).resolve().parent


class Wheels(unittest.TestCase):
    """Packed, installed, used."""

    def test_a_fresh_environment(self):
        import kvplane

        if subprocess.run([sys.executable, "-c", "import venv, ensurepip"], capture_output=True, check=False).returncode:
            self.skipTest("this Python makes no virtual environments")
        bed.bed()
        module = pathlib.Path(kvplane.__file__).parent / "_native.abi3.so"
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}

        def run(*words):
            done = subprocess.run(
                list(map(str, words)), env=environment, capture_output=True, text=True, timeout=180, check=False
            )
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            return done.stdout

        with tempfile.TemporaryDirectory() as directory:
            place = pathlib.Path(directory)
            run(sys.executable, HERE.parent / "wheel.py", "--module", module, "--out", place / "wheels")
            wheels = sorted((place / "wheels").iterdir())
            self.assertEqual(len(wheels), 2)
            run(sys.executable, "-m", "venv", place / "venv")
            python = place / "venv" / "bin" / "python"
            run(python, "-m", "pip", "--disable-pip-version-check", "install", "--no-index", *wheels)
            said = run(
                python,
                "-c",
                """
import importlib.metadata, kvplane
with kvplane.Store() as store:
    store.put("wheel", b"value", replace=True)
    print(store.get("wheel"))
from mooncake.store import MooncakeDistributedStore
from mooncake.engine import TransferEngine
print(importlib.metadata.version("mooncake-transfer-engine"))
""",
            )
            self.assertEqual(said.split(), ["b'value'", "0.3.13"])
            self.assertTrue((place / "venv" / "bin" / "mooncake_master").exists())


if __name__ == "__main__":
    unittest.main()
