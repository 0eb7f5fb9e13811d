"""Runs Mooncake's own client tests against this package: `cargo x python --upstream CHECKOUT`, or this file by itself.

    python upstream.py CHECKOUT [FILE...]

CHECKOUT is a checkout of Mooncake, or the folder `mooncake-wheel/tests` of one, which lacks the files of `scripts`.
The files named below are run as they are,
against a `mooncake_master` and a `mooncake_client` of our own with a runtime directory of their own. What is known to
differ is listed here with its reason; anything else that fails, and anything listed that passes, is exit status 1.
Not a part of CI: the files are not this project's.
"""

import importlib.util
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile

_LONGEST_S = 600
_PLACE = "may: which node an object is on follows from its key, not from who put it: it may be on another segment"
_LEASE = "there are no leases: an object goes while others read it, who read on"
_COPY = "a second replica is with the second owner of its key, not on the segment that the task names"
_MOVE = "single keys are not moved: a node is emptied by draining it"
_FAKE = "its fake store records a pair, and the test expects a list: the original fails too"
#: Per file, the tests whose result differs, with the reason; the reason of flaky ones starts with `may: `.
FILES = {
    "test_import_structure.py": {},
    "test_cli.py": {},
    "test_mooncake_config.py": {},
    "test_http_metadata_server.py": {},
    "test_mooncake_store_service_api.py": {
        "test_handle_put_missing_value": "a body without a value is 400; the original's test expects 500",
        "test_reconfigure_decode_remount_unmounts_previous": _FAKE,
        "test_reconfigure_prefill_unmounts_segments": _FAKE,
        "test_unmount_shm_string_segment_id_coercion": _FAKE,
        "test_shutdown_during_setup_is_observed_before_success": (
            "its configuration lacks what `setup` is given: the original fails too"
        ),
    },
    "test_buffer_pool_native.py": {},
    "test_distributed_object_store.py": {
        "test_client_tear_down": "may: what a store that closes had is handed to other members, where there are any",
    },
    "test_replicated_distributed_object_store.py": {},
    "test_batch_replica_clear.py": {
        "test_clear_mixed_expired_and_active": _LEASE,
        "test_clear_with_active_lease": _LEASE,
        "test_clear_specific_segment_replica": _PLACE,
        "test_clear_with_segment_name_self": _PLACE,
    },
    "test_dummy_client.py": {},
    "test_ssd_offload_in_evict.py": {},
    "test_offload_on_eviction.py": {},
    "test_promotion_on_hit.py": {
        "test_promotion_after_repeated_hits": "SSDs belong to nodes: no client offloads, and no replica is of type LOCAL_DISK",
    },
    "transfer_engine_initiator_test.py": {},
    "test_copy_move_api.py": {
        "test_basic_copy_operation": _COPY,
        "test_concurrent_copy_operations": _COPY,
        "test_copy_to_exist_segments": _COPY,
        "test_basic_move_operation": _MOVE,
        "test_concurrent_move_operations": _MOVE,
    },
    "test_fast_copy.py": {},
    "test_put_get_tensor.py": {},
    "test_safetensor_functions.py": {},
    "test_dataproto_catalog.py": {},
    "test_structured_object_store.py": {
        "test_dataproto_helper_jagged_nested_batch_tensor_roundtrip": "may: this torch has no jagged layout",
    },
    "test_regmr_overhead.py": {},
    "test_tensor_api.py": {},
    "test_upsert_api.py": {},
    "test_async_store.py": {},
    "mooncake-reshard/tests": {
        "test_kv_cache_is_reserved_without_a_manifest_implementation": "it is implemented here, and in the original since 0.3.14",
    },
}
#: Files of the checkout's `scripts`, which are missing in a bare folder of tests.
_SCRIPTS = ("test_copy_move_api.py", "test_tensor_api.py", "test_upsert_api.py", "test_async_store.py")
#: Folders of the checkout, which are missing there, too.
_FOLDERS = ("mooncake-reshard/tests",)
#: Packages that test files import but kvplane does not need: a file is skipped if one is missing.
_NEEDS = {
    "test_fast_copy.py": ("numpy",),
    "test_put_get_tensor.py": ("torch", "numpy", "msgpack"),
    "test_safetensor_functions.py": ("torch", "safetensors"),
    "test_dataproto_catalog.py": ("numpy", "msgpack"),
    "test_structured_object_store.py": ("torch", "numpy", "msgpack", "pytest"),
    "test_regmr_overhead.py": ("torch", "numpy"),
    "test_tensor_api.py": ("torch", "numpy"),
    "test_upsert_api.py": ("torch", "numpy"),
    "test_async_store.py": ("torch", "numpy"),
    "mooncake-reshard/tests": ("pytest", "hypothesis"),
}
#: The transfer engine test, and the script of its peer, which `Cluster.pair` starts with a metadata server.
_PAIR, _TARGET = "transfer_engine_initiator_test.py", "transfer_engine_target.py"

#: Runs in a separate interpreter: loads one file, runs its tests, prints one line of JSON. Without pytest, tests that
#: are not methods of a class are left out. Our package is imported first: some files put the checkout before it.
_ONE = """
import importlib.util, json, pathlib, sys, unittest
import mooncake.engine, mooncake.store
path = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(path.parent))
try:
    import pytest
except ImportError:
    pytest = None
if pytest is not None:
    class Seen:
        run, skipped, bad = 0, 0, set()
        def pytest_runtest_logreport(self, report):
            self.run += report.when == "call"
            self.skipped += report.skipped
            if report.failed:
                self.bad.add(report.nodeid.split("::")[-1].split("[")[0])
    seen = Seen()
    code = pytest.main([str(path), "-q", "-p", "no:cacheprovider"], plugins=[seen])
    if code in (0, 1):
        said = {"run": seen.run, "bad": sorted(seen.bad), "skipped": seen.skipped}
        print("\\nRESULT " + json.dumps(said), flush=True)
    sys.exit(0)
spec = importlib.util.spec_from_file_location(path.stem, path)
module = importlib.util.module_from_spec(spec)
sys.modules[path.stem] = module
sys.argv = [str(path)]
spec.loader.exec_module(module)
suite = unittest.defaultTestLoader.loadTestsFromModule(module)
result = unittest.TextTestRunner(stream=sys.stderr, verbosity=0).run(suite)
bad = sorted({str(getattr(test, "test_case", test)).split()[0] for test, _ in result.failures + result.errors})
print("\\nRESULT " + json.dumps({"run": result.testsRun, "bad": bad, "skipped": len(result.skipped)}), flush=True)
"""


class Cluster:
    """`mooncake_master` and, on request, a `mooncake_client`, with their own environment."""

    def __init__(self, directory):
        self.environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
        self.environment.update(XDG_RUNTIME_DIR=directory, XDG_STATE_HOME=directory, PYTHONUNBUFFERED="1")
        for name in ("KVPLANE_CLUSTER", "KVPLANE_CERTS", "MOONCAKE_CONFIG_PATH"):
            self.environment.pop(name, None)
        self.processes = []
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        self.address = f"127.0.0.1:{port}"
        self.start("master", f"--port={port}", "--metrics_port=0")
        self.client = False
        self.environment.update(MASTER_SERVER=self.address, MOONCAKE_MASTER=self.address, DEFAULT_KV_LEASE_TTL="500")
        self.environment.update(LOCAL_HOSTNAME="localhost", PROTOCOL="tcp", MC_METADATA_SERVER="P2PHANDSHAKE")

    def start(self, call, *words):
        """Starts a console script and waits for its first line."""
        script = f"import sys; from mooncake import cli; sys.argv[0] = 'mooncake_{call}'; sys.exit(cli.{call}())"
        self.run(f"mooncake_{call}", "-c", script, *words)

    def run(self, name, *words, until=""):
        """Starts an interpreter, waits for a line that contains these words, and returns it."""
        process = subprocess.Popen(
            [sys.executable, "-u", *words], env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.processes.append(process)
        for line in process.stdout:
            if until in line:
                return line
        self.close()
        sys.exit(f"{name} ended with {process.wait()}")

    def pair(self, folder):
        """Starts the peer of the transfer engine's test and sets the addresses in the environment."""
        said = self.run("metadata server", "-m", "mooncake.http_metadata_server", "--port=0", until="metadata server on")
        ports = []
        for _ in range(2):
            with socket.create_server(("127.0.0.1", 0)) as found:
                ports.append(found.getsockname()[1])
        self.environment.update(
            MC_METADATA_SERVER=f"http://{said.split()[-1].removeprefix('http://').rstrip('/')}/metadata",
            TARGET_SERVER_NAME=f"127.0.0.1:{ports[0]}", INITIATOR_SERVER_NAME=f"127.0.0.1:{ports[1]}",
        )
        self.run(_TARGET, str(folder / _TARGET), until="Target server ready")

    def give(self, path):
        """Starts the client whose port a file names. Other tests expect to be the only ones with memory."""
        if not self.client:
            self.client = True
            found = re.search(r"127\.0\.0\.1:(\d+)", path.read_text(encoding="utf-8"))
            port = found.group(1) if found else "50052"
            address = f"--master_server_address={self.address}"
            self.start("client", f"--port={port}", address, "--global_segment_size=1GB")

    def close(self):
        """Stops all processes, clients first."""
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()


def one(path, environment, differs):
    """Runs a file and prints the result; returns the number of unexpected outcomes."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ONE, str(path)], env=environment, cwd=path.parent, capture_output=True, text=True,
            timeout=_LONGEST_S, check=False,
        )
    except subprocess.TimeoutExpired:
        print(f"{path.name}: no end after {_LONGEST_S} s")
        return 1
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        print(f"{path.name}: could not be run\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return 1
    seen = json.loads(line[7:])
    bad = set(seen["bad"])
    wrong = sorted(bad - set(differs))
    better = sorted(name for name in set(differs) - bad if not differs[name].startswith("may: "))
    print(f"{path.name}: {seen['run']} run, {seen['skipped']} skipped, {len(bad) - len(wrong)} differ as listed")
    for name in wrong:
        print(f"  FAILED {name}")
    for name in better:
        print(f"  listed as different, and passes: {name}")
    if wrong:
        print(done.stdout[-6000:] + done.stderr[-3000:])
    return len(wrong) + len(better)


def main():
    """Command line entry point."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    root = pathlib.Path(sys.argv[1]).resolve()
    nested = root / "mooncake-wheel" / "tests"
    folders = [nested, root / "scripts"] if nested.is_dir() else [root]
    names = sys.argv[2:] or list(FILES)
    bad = 0
    with tempfile.TemporaryDirectory(prefix="kvplane-upstream-") as directory:
        cluster = Cluster(directory)
        try:
            for name in names:
                path = next(filter(pathlib.Path.exists, (folder / name for folder in [*folders, root])), None)
                missing = [package for package in _NEEDS.get(name, ()) if not importlib.util.find_spec(package)]
                if missing:
                    print(f"{name}: skipped: {', '.join(missing)} not installed")
                elif path is not None:
                    if "dummy" in name:
                        cluster.give(path)
                    if name == _PAIR:
                        cluster.pair(path.parent)
                    bad += one(path, cluster.environment, FILES.get(name, {}))
                elif name in (*_SCRIPTS, *_FOLDERS) and len(folders) == 1:
                    print(f"{name}: skipped: no whole checkout was given")
                else:
                    print(f"{name}: not in {folders[0]}")
                    bad += 1
        finally:
            cluster.close()
    print("upstream: as expected" if not bad else f"upstream: {bad} not as expected")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
