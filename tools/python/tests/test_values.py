"""Values the interface accepts and returns: configurations, attributes, enumerations, names, HTTP bodies."""

import asyncio
import contextlib
import ctypes
import http.client
import inspect
import io
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import types
import unittest

import bed
from mooncake import _http, mooncake_store_service
from mooncake.engine import TransferEngine, TransferOpcode
from mooncake.mooncake_config import MooncakeConfig, _parse_bool
from mooncake.store import KVCACHE, MooncakeDistributedStore, ReplicateConfig, SoftPinAction, parse_size


class Attributes(unittest.TestCase):
    """Attributes of `ReplicateConfig` behave as with pybind11."""

    def test_wrong_types_are_refused(self):
        config = ReplicateConfig()
        wrong = (
            ("replica_num", "x"), ("replica_num", 1.5), ("replica_num", -1), ("replica_num", None),
            ("data_type", 300), ("data_type", 1), ("soft_pin_action", 1), ("soft_pin_ttl_ms", "1"),
            ("soft_pin_ttl_ms", -1), ("preferred_segments", "abc"), ("preferred_segments", [1]),
            ("preferred_segment", None), ("group_ids", "ab"), ("group_ids", b"ab"), ("with_hard_pin", "yes"),
        )  # fmt: skip
        for name, value in wrong:
            before = getattr(config, name)
            with self.assertRaisesRegex(TypeError, "incompatible function arguments", msg=name):
                setattr(config, name, value)
            self.assertEqual(getattr(config, name), before)
        for name in ("replica_nums", "session_id", "prefered_segment"):
            self.assertFalse(hasattr(config, name))
            with self.assertRaises(AttributeError):
                setattr(config, name, 1)

    def test_right_types_are_taken(self):
        config = ReplicateConfig()
        given = (
            ("replica_num", 2), ("replica_num", True), ("data_type", KVCACHE), ("soft_pin_ttl_ms", None),
            ("soft_pin_ttl_ms", 5), ("preferred_segments", ["a", "b"]), ("group_ids", None), ("group_ids", ["a"]),
            ("with_hard_pin", 1), ("preferred_segment", "h:1"),
        )  # fmt: skip
        for name, value in given:
            setattr(config, name, value)
            self.assertEqual(getattr(config, name), value)
        self.assertIs(config.with_hard_pin, True)
        config.preferred_segments = ("a", "b")
        self.assertEqual(config.preferred_segments, ["a", "b"])
        config.with_soft_pin = True
        self.assertIs(config.soft_pin_action, SoftPinAction.ENABLE)
        self.assertTrue(config.with_soft_pin)
        self.assertIn("replica_num=1", repr(config))


class Names(unittest.TestCase):
    """Enumerations, signatures and host names."""

    def test_opcodes(self):
        self.assertEqual(str(TransferOpcode.Write), "TransferOpcode.Write")
        self.assertFalse(TransferOpcode.Write == 1)
        self.assertEqual((int(TransferOpcode.Write), TransferOpcode.Read.value), (1, 0))
        self.assertIs(TransferOpcode(1), TransferOpcode.Write)

    def test_the_signature_has_no_addresses(self):
        self.assertNotIn("object at", str(inspect.signature(MooncakeDistributedStore.setup)))

    def test_host_names(self):
        bed.bed()
        for given, wanted in (
            ("h:5", "h:5"), ("[::1]:5", "[::1]:5"), ("[::1]", r"\[::1\]:\d+"), ("::1", r"\[::1\]:\d+"), ("h", r"h:\d+"),
        ):  # fmt: skip
            store = MooncakeDistributedStore()
            self.addCleanup(store.close)
            self.assertEqual(store.setup(given, "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", ""), 0)
            name = store.get_hostname()
            self.assertTrue(name == wanted or __import__("re").fullmatch(wanted, name), name)

    def test_a_client_s_http_server(self):
        bed.bed()
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            store, said = MooncakeDistributedStore(), io.StringIO()
            with contextlib.redirect_stderr(said):
                setup = ("h", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "")
                self.assertEqual(store.setup(*setup, enable_client_http_server=True, client_http_port=port), 0)
            self.assertIn(f"no HTTP server of this client on port {port}", said.getvalue())
            store.close()
        config = {"local_hostname": "h", "metadata_server": "P2PHANDSHAKE", "global_segment_size": 4 << 20}
        config.update(enable_client_http_server="true", client_http_port=port)
        self.assertEqual(store.setup(config), 0)
        self.addCleanup(store.close)
        self.assertEqual(store.put("http", b"value"), 0)

        def ask(path):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            with contextlib.closing(connection):
                connection.request("GET", path)
                answer = connection.getresponse()
                return answer.status, answer.read().decode()

        self.assertEqual(ask("/health"), (200, '{"status": "healthy", "code": 0}'))
        status, text = ask("/metrics")
        self.assertEqual(status, 200)
        for name in (
            "kvplane_client_calls_total",
            "kvplane_client_registered_bytes",
            "kvplane_client_pool_read_bytes_total",
            "kvplane_client_pool_pinned_bytes",
            "kvplane_shard_pool_bytes",
        ):
            self.assertRegex(text, rf"(?m)^{name}(\{{.*\}})? \d+$")
        status, text = ask("/metrics/summary")
        self.assertEqual(status, 200)
        self.assertRegex(text, r"calls: \d+, 0 in progress\n")
        self.assertEqual(ask("/nothing")[0], 404)
        store.close()
        with self.assertRaises(OSError):
            ask("/health")
        # The port is released, and a forked child does not wait for its parent's thread.
        self.assertEqual(store.setup(config), 0)
        child = os.fork()
        if child == 0:
            os._exit(store.close())
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertEqual(ask("/health")[0], 200)

    def test_numbers_that_are_no_addresses(self):
        bed.bed()
        store, engine = MooncakeDistributedStore(), TransferEngine()
        self.addCleanup(store.close)
        self.assertEqual(store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", ""), 0)
        self.assertEqual(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), 0)
        for number in (-1, 1 << 64, "x", 1.5, None):
            for call in (
                lambda: store.register_buffer(number, 1), lambda: store.register_buffer(4096, number),
                lambda: store.unregister_buffer(number), lambda: store.put_from("k", number, 1),
                lambda: store.get_into("k", 4096, number), lambda: store.batch_get_into(["k"], [number], [1]),
                lambda: engine.register_memory(number, 1), lambda: engine.register_memory(4096, number),
                lambda: engine.unregister_memory(number), lambda: engine.free_managed_buffer(number, 1),
                lambda: engine.transfer_sync_write("127.0.0.1:1", number, 1, 1),
                lambda: engine.read_bytes_from_buffer(number, 1), lambda: engine.read_bytes_from_buffer(1, number),
                lambda: engine.write_bytes_to_buffer(number, b"x", 1),
                lambda: engine.get_batch_transfer_status([number]),
            ):  # fmt: skip
                with self.assertRaises(TypeError, msg=repr(number)):
                    call()
        memory = bytearray(4096)
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.assertEqual(store.register_buffer(at, len(memory)), 0)
        self.assertEqual(store.upsert("k", bytes(100)), 0)
        for to, of, size in (((1 << 64) - 1, 0, 10), (0, (1 << 64) - 1, 10), (0, 0, (1 << 64) - 1), (4090, 0, 10)):
            self.assertEqual(store.get_into_ranges([at], [["k"]], [[[to]]], [[[of]]], [[[size]]]), [[[-600]]])
        # Numbers whose sums wrap, as numpy's do, and those that are no offset: nothing outside the destination is written.
        before, ranges = bytes(memory), ([["k"]], [[[bed.Word(-8)]]], [[[0]]], [[[4]]])
        snapshot = store.prepare_get_into_ranges_snapshot(["k"])
        self.assertEqual(store.get_into_ranges([at + 100], *ranges), [[[-600]]])
        self.assertEqual(store.get_into_ranges_from_snapshot(snapshot, [bed.Word(at + 100)], *ranges), [[[-600]]])
        for offset in (-8, 1.5, "0", None):
            with self.assertRaises(TypeError):
                store.get_into_ranges([at + 100], [["k"]], [[[offset]]], [[[0]]], [[[4]]])
        self.assertEqual(memory, before)
        self.assertEqual(store.get_into_ranges([bed.Word(at)], [["k"]], [[[bed.Word(8)]]], [[[bed.Word(0)]]], [[[bed.Word(4)]]]), [[[4]]])
        self.assertEqual(store.unregister_buffer(at), 0)

    def test_sizes_that_are_none(self):
        store = MooncakeDistributedStore()
        with contextlib.redirect_stderr(io.StringIO()):
            for size in ("9" * 400, "1e400", "9e30gb", 1 << 70, "nan"):
                config = {"local_hostname": "h", "metadata_server": "P2PHANDSHAKE", "global_segment_size": size}
                self.assertEqual(store.setup(config), -600)
        for size in (1 << 70, -1):
            with self.assertRaises(TypeError):
                store.setup("h", "P2PHANDSHAKE", size, 0, "tcp", "", "")
            with self.assertRaises(TypeError):
                store.setup_dummy(size, 0, "")
        self.assertEqual(parse_size(str(1 << 53 | 1)), 1 << 53 | 1)

    def test_asyncio_after_close(self):
        import kvplane

        async def work():
            store = await kvplane.AsyncStore.connect()
            await store.close()
            with self.assertRaises(kvplane.Closed):
                await store.get("k")

        bed.bed()
        asyncio.run(work())


class Configurations(unittest.TestCase):
    """Configuration from the environment, and invalid configurations."""

    def test_the_environment(self):
        known = {
            "MOONCAKE_MASTER": "h:1",
            "MOONCAKE_OFFLOAD_ENABLED": "enable",
            "MOONCAKE_ENABLE_CLIENT_HTTP_SERVER": "on",
            "MOONCAKE_CLIENT_HTTP_PORT": "9400",
        }
        os.environ.update(known)
        try:
            config = MooncakeConfig.load_from_env()
        finally:
            for name in known:
                del os.environ[name]
        self.assertEqual((config.enable_ssd_offload, config.enable_client_http_server), (True, True))
        self.assertEqual((config.client_http_port, config.local_hostname), (9400, "localhost"))

    def test_words(self):
        for word, wanted in (("enable", True), ("Disable", False), (None, False), (2, True), ("", False)):
            self.assertIs(_parse_bool(word), wanted)
        with self.assertRaisesRegex(ValueError, "Invalid boolean"):
            _parse_bool("perhaps")
        base = {"local_hostname": "h", "metadata_server": "m", "master_server_address": "a"}
        with self.assertRaisesRegex(ValueError, "Invalid protocol"):
            MooncakeConfig.from_dict({**base, "protocol": " "})
        with self.assertLogs("mooncake.mooncake_config", "WARNING") as logs:
            self.assertEqual(MooncakeConfig.from_dict({**base, "protocol": "Foo"}).protocol, "foo")
        self.assertIn("Unrecognised protocol", logs.output[0])

    def test_the_metadata_server_in_a_process(self):
        from mooncake.http_metadata_server import KVBootstrapServer, KVPoll

        server = KVBootstrapServer(0, "127.0.0.1")
        self.assertIs(server.poll(), KVPoll.Failed)
        server.run()
        self.addCleanup(server.close)
        self.assertIs(server.poll(), KVPoll.Success)
        asked = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        self.addCleanup(asked.close)
        for method, body, status in (("PUT", b"v", 200), ("GET", None, 200), ("DELETE", None, 200), ("GET", None, 404)):
            asked.request(method, "/metadata?key=k", body)
            answer = asked.getresponse()
            answer.read()
            self.assertEqual(answer.status, status)
        server.close()
        self.assertIs(server.poll(), KVPoll.Failed)


class Rest(unittest.TestCase):
    """The store service: every route, and malformed bodies."""

    @staticmethod
    def known(**more):
        """Builds the environment of a service."""
        names = {name: value for name, value in os.environ.items() if not name.startswith("MOONCAKE_")}
        names["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        return dict(names, **more)

    def start(self, *words, **more):
        """Opens a connection to a service."""
        command = [sys.executable, "-m", "mooncake.mooncake_store_service", "--port", "0", *words]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.known(**more)
        )
        for last in (self.process.stdout.close, self.process.stderr.close, self.process.wait, self.process.kill):
            self.addCleanup(last)
        port = int(self.process.stdout.readline().rsplit(":", 1)[1])
        asked = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        self.addCleanup(asked.close)
        return asked

    @staticmethod
    def ask(asked, method, path, body=None, **more):
        """Sends a request; returns status and decoded body."""
        asked.request(method, path, body, **more)
        answer = asked.getresponse()
        raw = answer.read()
        return answer.status, json.loads(raw) if answer.headers["Content-Type"] == "application/json" else raw

    def test_routes(self):
        bed.bed()
        # Configuration from the environment; -D overrides one of its values.
        asked = self.start("-Dglobal_segment_size=0", MOONCAKE_MASTER=bed.bed().control,
                           MOONCAKE_GLOBAL_SEGMENT_SIZE="no size")
        for body in (b"[]", b'"s"', b"7", b"{", b"", b'{"key": 1, "value": 2}', b'{"key": "k"}', b"\xff"):
            self.assertEqual(self.ask(asked, "PUT", "/api/put", body)[0], 400, body)
        pieces = iter([b'{"key": "chunked", ', b'"value": "text"}'])
        self.assertEqual(self.ask(asked, "PUT", "/api/put", pieces, encode_chunked=True)[0], 200)
        self.assertEqual(self.ask(asked, "GET", "/api/get/chunked"), (200, b"text"))
        self.assertEqual(self.ask(asked, "POST", "/api/mount", b'{"size": -1}')[0], 400)
        status, said = self.ask(asked, "POST", "/api/mount", json.dumps({"size": 16 << 20}))
        self.assertEqual((status, said["allocated_size"]), (200, 16 << 20))
        ids = json.dumps({"segment_ids": said["segment_ids"]})
        self.assertEqual(self.ask(asked, "POST", "/api/unmount", ids)[0], 200)
        for path, body, status in (
            ("/api/unmount", b"{}", 400),
            ("/api/mount_shm", b'{"name": "../x", "size": 5}', 400),
            ("/api/mount_shm", b'{"name": "x", "size": 4096}', 500),
            ("/api/unmount_shm", b'{"segment_ids": []}', 400),
            ("/api/unmount_local_disk", b"{}", 200),
            ("/api/unmount_local_disk", b'{"grace_period_seconds": -1}', 400),
            ("/api/reconfigure", b'{"mode": "prefill"}', 200),
            ("/api/reconfigure", b'{"mode": "decode"}', 400),
            ("/api/nowhere", b"{}", 404),
        ):
            self.assertEqual(self.ask(asked, "POST", path, body)[0], status, path)
        self.assertEqual(self.ask(asked, "PATCH", "/api/put", b"{}")[0], 405)
        self.process.send_signal(signal.SIGTERM)
        self.assertEqual(self.process.wait(30), 0)
        self.assertNotIn("Traceback", self.process.stderr.read())

    def test_texts_that_are_none(self):
        bed.bed()
        asked = self.start("-Dglobal_segment_size=0", MOONCAKE_MASTER=bed.bed().control)
        for body in (rb'{"key": "\ud800", "value": "v"}', rb'{"key": "k", "value": "\ud800"}', b"[" * 200_000):
            status, said = self.ask(asked, "PUT", "/api/put", body)
            self.assertEqual(status, 400, said)
        for method, path in (("GET", "/api/exist/"), ("GET", "/api/get/"), ("DELETE", "/api/remove/")):
            self.assertEqual(self.ask(asked, method, path + "%ff")[0], 400)
            self.assertEqual(self.ask(asked, method, path + "%ed%a0%80")[0], 400)

    def test_replicas(self):
        bed.bed()
        asked = self.start("-Dglobal_segment_size=0", MOONCAKE_MASTER=bed.bed().control)
        put = lambda **more: self.ask(asked, "PUT", "/api/put", json.dumps({"key": "replicated", "value": "v", **more}))
        self.assertEqual(put(replicas=2)[0], 200)
        self.assertEqual(self.ask(asked, "GET", "/api/get/replicated"), (200, b"v"))
        for wrong in (0, 9, "2", 1.5, True, None):
            self.assertEqual(put(replicas=wrong)[0], 400, wrong)

    def test_heads(self):
        bed.bed()
        asked = self.start("-Dglobal_segment_size=0", MOONCAKE_MASTER=bed.bed().control)
        self.assertEqual(self.ask(asked, "PUT", "/api/put", b'{"key": "head", "value": "12345"}')[0], 200)
        for path, status, length in (("/api/get/head", 200, "5"), ("/api/put", 405, None), ("/nowhere", 404, None)):
            asked.request("HEAD", path)
            answer = asked.getresponse()
            self.assertEqual((answer.status, answer.read()), (status, b""))
            self.assertIn(length, (None, answer.headers["Content-Length"]))
        self.assertEqual(self.ask(asked, "GET", "/api/get/head"), (200, b"12345"))

    def test_connections_at_once(self):
        listening = _http.listen("127.0.0.1", 0, {}, "test")
        self.addCleanup(listening.server_close)
        # Nothing accepts them: the kernel holds them.
        for _ in range(64):
            connection = socket.create_connection(listening.server_address, 20)
            self.addCleanup(connection.close)

    def test_configurations_that_are_none(self):
        with tempfile.TemporaryDirectory() as directory:
            broken, listed = pathlib.Path(directory) / "broken", pathlib.Path(directory) / "list"
            broken.write_text("{")
            listed.write_text("[]")
            for words in (("--config", "/nowhere"), ("--config", str(broken)), ("--config", str(listed)), ()):
                done = subprocess.run(
                    [sys.executable, "-m", "mooncake.mooncake_store_service", *words],
                    env=self.known(), capture_output=True, text=True, timeout=60, check=False,
                )
                self.assertEqual(done.returncode, 1)
                self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)


class EmptyObjects(unittest.TestCase):
    """A get of the store service between the puts and removals of others."""

    def get(self, values, exists):
        """Returns the answer where the store's calls return these, in turn."""
        service = mooncake_store_service.MooncakeStoreService(cli_config={"master_server_address": "127.0.0.1:1"})
        values, exists = iter(values), iter(exists)
        service.store = types.SimpleNamespace(get=lambda key: next(values), is_exist=lambda key: next(exists))
        answer = asyncio.run(service.handle_get(types.SimpleNamespace(match_info={"key": "k"})))
        return answer.status, answer.body

    def test_what_was_put_between_two_calls_is_not_empty(self):
        self.assertEqual(self.get([b"", b"value"], [1]), (200, b"value"))
        self.assertEqual(self.get([b"", b""], [1, 1]), (200, b""))
        self.assertEqual(self.get([b""], [0])[0], 404)
        self.assertEqual(self.get([b"", b""], [1, 0])[0], 404)
        self.assertEqual(self.get([b""], [-1])[0], 500)


if __name__ == "__main__":
    unittest.main()
