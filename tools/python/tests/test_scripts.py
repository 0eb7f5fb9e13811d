"""Mooncake's console scripts: how flags are translated, a master's two ports, dummy clients on a client's port."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import unittest
import urllib.request

import bed

_SCRIPT = "import sys; from mooncake import cli; sys.argv[0] = {call!r}; sys.exit(cli.{call}())"


def environment(directory, **more):
    """An environment with its own runtime directory."""
    known = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    known.update(XDG_RUNTIME_DIR=directory, XDG_STATE_HOME=directory, PYTHONUNBUFFERED="1")
    for name in ("KVPLANE_CLUSTER", "KVPLANE_CERTS"):
        known.pop(name, None)
    return dict(known, **more)


def free_ports(count):
    """Distinct ports that are free for both TCP and UDP."""
    held = []
    while len(held) < 2 * count:
        stream = socket.socket()
        stream.bind(("127.0.0.1", 0))
        datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            datagrams.bind(stream.getsockname())
        except OSError:
            stream.close()
            datagrams.close()
            continue
        held += [stream, datagrams]
    ports = [one.getsockname()[1] for one in held[::2]]
    for one in held:
        one.close()
    return ports


def ask(url):
    """Sends a request; returns status and body."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.status, answer.read()


class Flags(unittest.TestCase):
    """Flag translation, observed through a program that prints its arguments."""

    def setUp(self):
        self.directory = tempfile.TemporaryDirectory()
        self.addCleanup(self.directory.cleanup)
        self.place = pathlib.Path(self.directory.name)
        self.echo = self.place / "echo"
        self.echo.write_text('#!/bin/sh\necho "$@"\n')
        self.echo.chmod(0o755)

    def run_script(self, call, *words, **more):
        """Runs a script; returns exit status, standard output and standard error."""
        known = environment(self.directory.name, KVPLANE_BINARY=str(self.echo), **more)
        done = subprocess.run(
            [sys.executable, "-c", _SCRIPT.format(call=call), *words],
            env=known, capture_output=True, text=True, timeout=60, check=False,
        )
        self.assertNotIn("Traceback", done.stderr)
        return done.returncode, done.stdout, done.stderr

    def test_help_and_version_start_nothing(self):
        for call in ("master", "client", "topology_dump"):
            code, said, _ = self.run_script(call, "--help")
            self.assertEqual((code, "control --cluster" in said), (0, False))
            self.assertIn("Mooncake's flags that", said)
            code, said, _ = self.run_script(call, "--version")
            self.assertEqual(code, 0)
            self.assertIn("0.3.14", said)
            self.assertEqual(len(said.splitlines()), 1)

    def test_ports(self):
        for words, listens in (
            ((), "127.0.0.1:50051"),
            (("--port=7000", "--rpc_port=7001"), "127.0.0.1:7001"),
            (("--rpc_port=0", "--port=7000"), "127.0.0.1:7000"),
            (("--rpc_port", "7001", "--rpc_port=0"), "127.0.0.1:50051"),
            (("--rpc_address=::1", "--port=7000"), "[::1]:7000"),
        ):
            _, said, _ = self.run_script("master", *words)
            self.assertIn(f"--listen {listens} ", said)
            self.assertIn("--replicas 2", said)
        _, said, _ = self.run_script("master", "--replicas=1")
        self.assertIn("--replicas 1", said)
        code, _, said = self.run_script("master", "--port=abc")
        self.assertEqual(code, 1)
        self.assertIn("--port=abc", said)

    def test_beyond_loopback(self):
        code, _, said = self.run_script("master", "--rpc_address=10.0.0.1")
        self.assertEqual(code, 1)
        self.assertIn("KVPLANE_CERTS", said)
        certificates = self.place / "plane"
        certificates.mkdir()
        code, _, said = self.run_script("master", "--rpc_address=10.0.0.1", KVPLANE_CERTS=str(certificates))
        self.assertEqual(code, 1)
        self.assertIn("ca.pem", said)
        for name in ("ca.pem", "control.pem", "control.key"):
            (certificates / name).write_text("")
        _, said, _ = self.run_script("master", "--rpc_address=10.0.0.1", KVPLANE_CERTS=str(certificates))
        self.assertIn("--listen 10.0.0.1:50051", said)
        self.assertIn(f"--identity {certificates}", said)
        words = ("--enable_ha=true", "--etcd_endpoints=http://a:2379;b:2379")
        _, said, _ = self.run_script("master", *words, KVPLANE_CERTS=str(certificates))
        self.assertIn("--state etcd://a:2379,b:2379", said)
        code, _, said = self.run_script("master", *words)
        self.assertEqual((code, "KVPLANE_CERTS" in said), (1, True))
        _, printed, said = self.run_script("master", "--metrics_host=0.0.0.0")
        self.assertIn("--http 127.0.0.1:9003", printed)
        self.assertIn("--http_token_file", said)

    def test_silent_members(self):
        for words, silence in (
            ((), None),
            (("--client_active_ttl_sec=5",), (5000, 10_000)),
            (("--client_ttl=5", "--client_suspicion_ttl_sec=7"), (5000, 12_000)),
            (("--client_suspicion_ttl_sec=7",), (10_000, 17_000)),
        ):
            _, said, _ = self.run_script("master", *words)
            if silence is None:
                self.assertNotIn("--suspect-ms", said)
            else:
                self.assertIn("--suspect-ms {} --dead-ms {}".format(*silence), said)
        code, _, said = self.run_script("master", "--client_active_ttl_sec=soon")
        self.assertEqual(code, 1)
        self.assertIn("--client_active_ttl_sec=soon", said)

    def test_events_of_objects(self):
        _, said, _ = self.run_script("master", "--kv_events_bind_endpoint=tcp://127.0.0.1:5557")
        self.assertNotIn("--kv-events", said)
        for endpoint, place in (
            ("tcp://127.0.0.1:7557", "127.0.0.1:7557"), ("tcp://*:7557", "127.0.0.1:7557"), ("tcp://[::1]:7", "[::1]:7"),
        ):
            words = ("--enable_kv_events", f"--kv_events_bind_endpoint={endpoint}")
            _, said, _ = self.run_script("master", *words)
            self.assertIn(f"--kv-events {place}", said)
        for endpoint in ("tcp://10.0.0.1:5557", "ipc://events", "5557"):
            code, _, said = self.run_script("master", "--enable_kv_events", f"--kv_events_bind_endpoint={endpoint}")
            self.assertEqual((code, len(said.splitlines())), (1, 1), said)

    def test_addresses_of_interfaces(self):
        _, said, _ = self.run_script("master", "--rpc_interface=lo")
        self.assertIn("--listen 127.0.0.1:50051", said)
        code, _, said = self.run_script("master", "--rpc_interface=nothing0")
        self.assertEqual((code, len(said.splitlines())), (1, 1), said)
        code, _, said = self.run_script("master", "--enable_ha", "--ha_backend_type=k8s")
        self.assertEqual((code, "--ha_backend_type=k8s" in said), (1, True))

    def test_files(self):
        yaml, other = self.place / "m.yaml", self.place / "m.json"
        yaml.write_text("# a comment\nrpc_port: 7000\nmetrics_port: 7001 # here\neviction_ratio: 0.1\n")
        _, printed, said = self.run_script("master", f"--config_path={yaml}", "--metrics_port=7002")
        self.assertIn("--listen 127.0.0.1:7000", printed)
        self.assertIn("--http 127.0.0.1:7002", printed)
        self.assertIn("eviction_ratio", said)
        other.write_text(json.dumps({"rpc_port": 7003, "enable_multi_tenants": True}))
        _, printed, _ = self.run_script("master", f"--config_path={other}")
        self.assertIn("--listen 127.0.0.1:7003", printed)
        self.assertIn("--strict-tenants", printed)
        for words in (("--config_path=/nowhere",), ("--flagfile=/nowhere",), ("--enable_ha=perhaps",)):
            code, printed, said = self.run_script("master", *words)
            self.assertEqual((code, printed, len(said.splitlines())), (1, "", 1))

    def test_the_bench_takes_logging_flags(self):
        words = ("-logtostderr", "-v=1", "--mode=target", "-minloglevel", "2", "--threads", "3")
        code, printed, said = self.run_script("transfer_engine_bench", *words)
        self.assertEqual((code, printed), (0, "transfer_engine_bench --mode=target --threads 3\n"))
        self.assertEqual(len(said.splitlines()), 1)
        self.assertIn("logtostderr, minloglevel, v", said)


class Masters(unittest.TestCase):
    """`mooncake_master` with the real program."""

    def start(self, directory, call, *words):
        """Starts a script and returns its first line."""
        process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT.format(call=call), *words],
            env=environment(directory), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process, process.stdout.readline()

    def test_both_ports_of_a_master_and_its_clients(self):
        master, metrics, metadata, client = free_ports(4)
        with tempfile.TemporaryDirectory() as directory:
            words = (f"--port={master}", f"--metrics_port={metrics}", "--enable_http_metadata_server=true")
            process, line = self.start(directory, "master", *words, f"--http_metadata_server_port={metadata}")
            self.assertIn(f"127.0.0.1:{master}", line)
            address = f"--master_server_address=127.0.0.1:{master}"
            giver, line = self.start(directory, "client", address, f"--port={client}", "--global_segment_size=16MB")
            self.assertIn("ready", line)
            status, body = ask(f"http://127.0.0.1:{metrics}/get_all_segments")
            self.assertEqual(status, 200)
            self.assertTrue(body.strip())
            url = f"http://127.0.0.1:{metadata}/metadata?key=mooncake/ram/a"
            request = urllib.request.Request(url, data=b"value", method="PUT")
            with urllib.request.urlopen(request, timeout=10) as answer:
                self.assertEqual(answer.status, 200)
            self.assertEqual(ask(url), (200, b"value"))
            script = f"""
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
import ctypes, time
store = MooncakeDistributedStore()
assert store.setup_dummy(1 << 20, 0, "127.0.0.1:{client}") == 0
assert store.put("one", b"value") == 0 and store.get("one") == b"value"
two = ReplicateConfig()
two.replica_num = 2
# With one node there is no second owner; the put succeeds all the same.
assert store.put("two", b"value", two) == 0 and store.get("two") == b"value"
pointer = store.alloc_from_mem_pool(65536)
assert pointer and store.alloc_from_mem_pool(1 << 20) == 0
assert store.register_buffer(pointer, 65536) == 0
ctypes.memmove(pointer, b"x" * 65536, 65536)
assert store.put_from("three", pointer, 65536) == 0 and store.get("three") == b"x" * 65536
store.close()
assert store.alloc_from_mem_pool(1) == 0
print("ok")
"""
            done = subprocess.run(
                [sys.executable, "-c", script],
                env=environment(directory), capture_output=True, text=True, timeout=60, check=False,
            )
            self.assertEqual(done.stdout, "ok\n", done.stderr)
            # A second client cannot use the same port; a killed client releases it.
            again = subprocess.run(
                [sys.executable, "-c", _SCRIPT.format(call="client"), address, f"--port={client}",
                 "--global_segment_size=16MB"],
                env=environment(directory), capture_output=True, text=True, timeout=60, check=False,
            )
            self.assertEqual(again.returncode, 1)
            self.assertIn(f"port {client}", again.stderr)
            giver.kill()
            giver.wait()
            _, line = self.start(directory, "client", address, f"--port={client}", "--global_segment_size=16MB")
            self.assertIn("ready", line)
            # The metadata server exits with the control plane, even if that is killed.
            process.kill()
            process.wait()
            self.assertTrue(_goes(metadata))

    def test_a_client_waits_for_its_master(self):
        master, client = free_ports(2)
        with tempfile.TemporaryDirectory() as directory:
            words = (f"--master_server_address=127.0.0.1:{master}", f"--port={client}", "--global_segment_size=16MB")
            process = subprocess.Popen(
                [sys.executable, "-c", _SCRIPT.format(call="client"), *words],
                env=environment(directory), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for cleanup in (process.stdout.close, process.stderr.close, process.wait, process.kill):
                self.addCleanup(cleanup)
            self.assertTrue(any("waits for the master" in line for line in process.stderr))
            self.start(directory, "master", f"--port={master}", "--metrics_port=0")
            self.assertIn("ready", process.stdout.readline())
            # A waiting process stops on a signal.
            other = subprocess.Popen(
                [sys.executable, "-c", _SCRIPT.format(call="client"), f"--master_server_address=127.0.0.1:{client}"],
                env=environment(directory), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
            for cleanup in (other.stderr.close, other.wait, other.kill):
                self.addCleanup(cleanup)
            self.assertTrue(any("waits for the master" in line for line in other.stderr))
            other.terminate()
            self.assertEqual(other.wait(60), 1)

    def test_two_copies_with_two_clients(self):
        master, one, other = free_ports(3)
        with tempfile.TemporaryDirectory() as directory:
            self.start(directory, "master", f"--port={master}", "--metrics_port=0")
            address = f"--master_server_address=127.0.0.1:{master}"
            for port in (one, other):
                _, line = self.start(directory, "client", address, f"--port={port}", "--global_segment_size=32MB")
                self.assertIn("ready", line)
            script = f"""
import time
from mooncake.store import MooncakeDistributedStore, TaskStatus
store = MooncakeDistributedStore()
assert store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "127.0.0.1:{master}") == 0
assert store.put("k", b"value") == 0
for _ in range(100):
    (task, code) = store.create_copy_task("k", [])
    if code != -1012:
        break
    time.sleep(0.1)
assert code == 0, code
assert store.create_copy_task("k", ["127.0.0.1:1"]) == ((0, 0), -600)
for _ in range(200):
    seen, code = store.query_task(task)
    assert code == 0, code
    if seen.status in (TaskStatus.SUCCESS, TaskStatus.FAILED):
        break
    time.sleep(0.05)
print(seen.status == TaskStatus.SUCCESS, seen.message)
"""
            done = subprocess.run(
                [sys.executable, "-c", script],
                env=environment(directory), capture_output=True, text=True, timeout=90, check=False,
            )
            self.assertTrue(done.stdout.startswith("True"), done.stdout + done.stderr)


def _goes(port):
    """Waits until nothing listens on a port; returns whether that came true."""
    import time

    for _ in range(200):
        with socket.socket() as asked:
            if asked.connect_ex(("127.0.0.1", port)) != 0:
                return True
        time.sleep(0.05)
    return False


class Clients(unittest.TestCase):
    """Dummy clients connect through a client's port."""

    def test_only_what_runs_counts(self):
        script = """
import os, sys
os.environ["XDG_RUNTIME_DIR"] = sys.argv[1]
from mooncake import _clients
first = _clients.publish(5, "127.0.0.1:1")
assert _clients.find("127.0.0.1:5")["master"] == "127.0.0.1:1"
assert _clients.find("127.0.0.1:6") is None and _clients.find("name") is None
first.close()
first.close()
assert _clients.find("127.0.0.1:5") is None
os.makedirs(_clients.directory(), exist_ok=True)
path = os.path.join(_clients.directory(), "mooncake-client-7.json")
open(path, "w").write('{"master": "127.0.0.1:9"}')
assert _clients.find("127.0.0.1:7") is None
held = _clients.publish(7, "127.0.0.1:2")
assert _clients.find("h:7")["master"] == "127.0.0.1:2"
os.chmod(_clients.directory(), 0o777)
assert _clients.find("h:7") is None
try:
    _clients.publish(8, "")
except OSError as error:
    print("refused", error)
"""
        with tempfile.TemporaryDirectory() as directory:
            self.assertIn("refused", bed.python(script, directory))


if __name__ == "__main__":
    unittest.main()
