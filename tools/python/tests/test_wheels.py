"""The wheels install into a fresh environment, and the first examples of the documentation run there."""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import bed

HERE = pathlib.Path(__file__).resolve().parent


class Wheels(unittest.TestCase):
    """Builds, installs and uses the wheels."""

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
            # The lines of the README, unchanged.
            readme = (HERE.parents[2] / "README.md").read_text(encoding="utf-8")
            quickstart = readme.split("```python\n", 1)[1].split("```", 1)[0]
            self.assertEqual(run(python, "-c", quickstart), "b'value'\n")
            said = run(
                python,
                "-c",
                """
import importlib.metadata
from mooncake.store import MooncakeDistributedStore
from mooncake.engine import TransferEngine
print(importlib.metadata.version("mooncake-transfer-engine"))
""",
            )
            self.assertEqual(said.split(), ["0.3.14"])
            self.assertTrue((place / "venv" / "bin" / "mooncake_master").exists())

    def test_the_pages_of_engines(self):
        """Python examples run unchanged, with the configuration that precedes them."""
        control = bed.bed().control
        pages = sorted((HERE.parents[2] / "docs" / "integrations").glob("*.md"))
        self.assertEqual(len(pages), 4)
        for page in pages:
            # The tests' cluster listens on a different port.
            text = page.read_text(encoding="utf-8").replace("127.0.0.1:50051", control)
            lines = text.split("```python\n", 1)[1].split("```", 1)[0]
            with tempfile.TemporaryDirectory() as directory:
                if "```json" in text:
                    config = text.split("```json\n", 1)[1].split("```", 1)[0]
                    (pathlib.Path(directory) / "mooncake.json").write_text(config, encoding="utf-8")
                known = {"MOONCAKE_MASTER": control, "MOONCAKE_GLOBAL_SEGMENT_SIZE": "64mb"}
                before = {name: os.environ.get(name) for name in known}
                os.environ.update(known)
                try:
                    self.assertEqual(bed.python(lines, cwd=directory), "found\n", page.name)
                finally:
                    for name, value in before.items():
                        os.environ.pop(name) if value is None else os.environ.update({name: value})


if __name__ == "__main__":
    unittest.main()
