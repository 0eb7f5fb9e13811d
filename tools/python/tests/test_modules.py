"""The modules beside store and engine: configuration, HTTP services, console scripts, tensors, tables."""

import contextlib
import ctypes
import importlib.metadata
import io
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import unittest
import urllib.error
import urllib.request

import bed
from mooncake.mooncake_config import MooncakeConfig
from mooncake.store import EngramStore, EngramStoreConfig, MooncakeDistributedStore, parse_size


def opened():
    """Opens a store on the tests' cluster."""
    bed.bed()
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "") == 0
    return store


class Configurations(unittest.TestCase):
    """Files and the environment."""

    def test_a_file(self):
        values = {
            "local_hostname": "h",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": "127.0.0.1:50051",
            "global_segment_size": "4gb",
            "lokal_buffer_size": 5,
        }
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(values, file)
            file.flush()
            said = io.StringIO()
            with contextlib.redirect_stderr(said):
                config = MooncakeConfig.from_file(file.name)
        self.assertEqual(config.global_segment_size, 4 << 30)
        self.assertIn("did you mean 'local_buffer_size'", said.getvalue())
        with self.assertRaises(ValueError):
            MooncakeConfig.from_dict({"local_hostname": "h"})

    def test_sizes(self):
        for text, size in ((4096, 4096), ("64MB", 64 << 20), ("1.5 GB", 3 << 29), ("16", 16), ("2gib", 2 << 30)):
            self.assertEqual(parse_size(text), size)
        for text in ("", "many", "5 parsecs", -1, "-5"):
            with self.assertRaises(ValueError):
                parse_size(text)

    def test_the_version_that_callers_ask_for(self):
        self.assertEqual(importlib.metadata.version("mooncake-transfer-engine"), "0.3.14")


class Services(unittest.TestCase):
    """HTTP, and console scripts."""

    def serve(self, module, *arguments):
        """Starts a service and returns its address."""
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
        command = [sys.executable, "-m", module, "--port", "0", *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        self.addCleanup(process.stdout.close)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process.stdout.readline().split()[-1]

    @staticmethod
    def ask(method, url, body=None):
        """Sends a request; returns status and body."""
        request = urllib.request.Request(url, data=body, method=method)
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read()

    def test_metadata(self):
        url = self.serve("mooncake.http_metadata_server") + "/metadata?key=mooncake/ram/a"
        self.assertEqual(self.ask("GET", url)[0], 404)
        self.assertEqual(self.ask("PUT", url, b"value")[0], 200)
        self.assertEqual(self.ask("GET", url), (200, b"value"))
        self.assertEqual(self.ask("DELETE", url)[0], 200)
        self.assertEqual(self.ask("DELETE", url)[0], 404)
        self.assertEqual(self.ask("GET", url.split("?")[0])[0], 400)

    def test_the_store_service(self):
        bed.bed()
        words = [f"-D{key}={value}" for key, value in (
            ("local_hostname", "localhost"),
            ("metadata_server", "P2PHANDSHAKE"),
            ("master_server_address", bed.bed().control),
            ("global_segment_size", "0"),
        )]
        url = self.serve("mooncake.mooncake_store_service", *words)
        body = json.dumps({"key": "rest/key", "value": "text"}).encode()
        self.assertEqual(self.ask("PUT", url + "/api/put", body)[0], 200)
        self.assertEqual(self.ask("GET", url + "/api/get/rest%2Fkey"), (200, b"text"))
        self.assertEqual(self.ask("GET", url + "/api/exist/rest%2Fkey")[1], b'{"exists": true}')
        self.assertEqual(self.ask("DELETE", url + "/api/remove/rest%2Fkey")[0], 200)
        self.assertEqual(self.ask("GET", url + "/api/get/rest%2Fkey")[0], 404)
        self.assertEqual(self.ask("PUT", url + "/api/put", b"{")[0], 400)
        self.assertEqual(self.ask("GET", url + "/health")[0], 200)

    def test_the_master_becomes_a_control_plane(self):
        with tempfile.TemporaryDirectory() as directory:
            echo = pathlib.Path(directory) / "echo"
            echo.write_text('#!/bin/sh\necho "$@"\n')
            echo.chmod(0o755)
            script = """
import os, sys
os.environ.update(KVPLANE_BINARY=sys.argv[1], XDG_STATE_HOME=sys.argv[2])
sys.argv = ["mooncake_master", "--rpc_port=7000", "-metrics_port", "7001", "--eviction_ratio=0.1"]
from mooncake import cli
cli.master()
"""
            said = bed.python(script, echo, directory)
        self.assertIn("control --cluster kvplane-7000 --listen 127.0.0.1:7000", said)
        self.assertIn("--http 127.0.0.1:7001", said)

    def test_a_cluster_by_the_original_s_names(self):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found, tempfile.TemporaryDirectory() as directory:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
            found.close()
            environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
            environment.update(XDG_RUNTIME_DIR=directory, XDG_STATE_HOME=directory)
            environment.pop("KVPLANE_CLUSTER", None)

            def start(call, *words):
                script = f"import sys; from mooncake import cli; sys.argv[0] = {call!r}; sys.exit(cli.{call}())"
                command = [sys.executable, "-c", script, *words]
                process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
                self.addCleanup(process.stdout.close)
                self.addCleanup(process.wait)
                self.addCleanup(process.kill)
                return process

            master = start("master", f"--port={port}", "--metrics_port=0")
            self.assertIn(f"127.0.0.1:{port}", master.stdout.readline())
            client = start("client", f"--master_server_address=127.0.0.1:{port}", "--global_segment_size=16MB")
            self.assertIn("ready", client.stdout.readline())
            script = f"""
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "127.0.0.1:{port}") == 0
assert store.put("k", b"value") == 0
print(store.get("k"), store.get_replica_desc("k")[0].is_memory_replica())
"""
            done = subprocess.run(
                [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
            )
            self.assertEqual(done.stdout.split(), ["b'value'", "True"], done.stderr)
            for process in (client, master):
                process.terminate()
                process.wait(30)

    def test_modules_by_the_original_s_names(self):
        from mooncake import cli, cli_bench, cli_client, transfer_engine_topology_dump

        self.assertIs(cli.main, cli.master)
        self.assertIs(cli_client.main, cli.client)
        self.assertIs(cli_bench.main, cli.transfer_engine_bench)
        self.assertIs(transfer_engine_topology_dump.main, cli.topology_dump)
        said = bed.python("import runpy; runpy.run_module('mooncake.transfer_engine_topology_dump', run_name='main')")
        self.assertEqual(said, "")

    def test_arrays_behind_each_other(self):
        import array
        import ctypes

        from mooncake._fast_copy import concat_arrays_into

        arrays = [array.array("i", range(count)) for count in (3, 0, 1000, 7)]
        whole = b"".join(one.tobytes() for one in arrays)
        memory = ctypes.create_string_buffer(len(whole) + 1)
        at = ctypes.addressof(memory)
        self.assertEqual(concat_arrays_into(arrays, at, len(whole)), len(whole))
        self.assertEqual(memory.raw, whole + b"\0")
        self.assertEqual(concat_arrays_into(arrays, at, len(whole), 2, 1, 4), 4000)
        self.assertEqual(memory.raw[:4000], arrays[2].tobytes())
        self.assertEqual(concat_arrays_into(arrays, at, len(whole), 9), 0)
        with self.assertRaisesRegex(ValueError, f"need {len(whole)} bytes, got {len(whole) - 1}"):
            concat_arrays_into(arrays, at, len(whole) - 1)
        with self.assertRaisesRegex(TypeError, r"arrays\[1\]"):
            concat_arrays_into([arrays[0], 5], at, len(whole))
        with self.assertRaises(TypeError):
            concat_arrays_into(tuple(arrays), at, len(whole))

    def test_the_topology(self):
        said = bed.python("from mooncake import cli; cli.topology_dump()")
        self.assertIn("cpu:0", json.loads(said))


class Tables(unittest.TestCase):
    """Engram, and tensors."""

    def test_rows(self):
        try:
            import numpy
        except ImportError:
            self.skipTest("numpy is not installed")
        store = opened()
        self.addCleanup(store.close)
        config = EngramStoreConfig()
        config.table_vocab_sizes, config.embedding_dim = [100, 50], 16
        tables = [numpy.random.default_rng(at).random((rows, 16), dtype=numpy.float32) for at, rows in enumerate((100, 50))]
        engram = EngramStore(3, config, store)
        engram.remove_from_store()
        engram.populate(tables)
        ids = numpy.stack([numpy.arange(12).reshape(3, 4) * 7, numpy.arange(12).reshape(3, 4) * 3], axis=2)
        rows = engram.lookup(ids)
        self.assertEqual(rows.shape, (3, 4, 2, 16))
        for head in range(2):
            self.assertTrue((rows[:, :, head] == tables[head][ids[:, :, head]]).all())
        with self.assertRaises(IndexError):
            engram.lookup(ids + 90)
        self.assertEqual(engram.remove_from_store(), 2)

    def test_tables_that_do_not_fit_leave_nothing(self):
        try:
            import numpy
        except ImportError:
            self.skipTest("numpy is not installed")
        bed.bed()
        # Without a local buffer, no call copies through the client.
        store = MooncakeDistributedStore()
        self.assertEqual(store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", ""), 0)
        self.addCleanup(store.close)
        config = EngramStoreConfig()
        config.table_vocab_sizes, config.embedding_dim = numpy.array([4, 4]), numpy.int64(3)
        engram = EngramStore(numpy.int32(7), config, store)
        self.assertEqual(engram.get_store_keys(), ["engram:l7:h0", "engram:l7:h1"])
        for layer in ("7", 1.5, None, True):
            with self.assertRaisesRegex(TypeError, "layer_id is int, not"):
                EngramStore(layer, config, store)
        good, small = numpy.arange(12, dtype=numpy.float32).reshape(4, 3), numpy.zeros((2, 3), numpy.float32)
        for tables, kind in (
            ([good, small], ValueError), ([good], ValueError), (None, TypeError), ([good, good + 1j], TypeError),
            ([good, [["1"] * 3] * 4], TypeError), ([good, numpy.full((4, 3), None)], TypeError),
        ):  # fmt: skip
            with self.assertRaises(kind):
                engram.populate(tables)
            self.assertEqual(store.batch_is_exist(engram.get_store_keys()), [0, 0])
        good.flags.writeable = False
        engram.populate([good, good])
        self.assertEqual(store.unregister_buffer(good.ctypes.data), -600, "it stayed registered")
        for ids in (
            [[[1.0, 2.0]]], [[[1.9, 2]]], [[["1", "2"]]], [[[True, False]]], [[[1 + 5j, 0]]],
            numpy.array([[[10**30, 0]]], object),
        ):  # fmt: skip
            with self.assertRaisesRegex(TypeError, "row_ids are integers"):
                engram.lookup(ids)
        for ids in (numpy.array([[[2**63, 0]]], numpy.uint64), numpy.array([[[-1, 0]]], numpy.int8)):
            with self.assertRaises(IndexError):
                engram.lookup(ids)
        self.assertEqual(engram.lookup(numpy.zeros((0, 3, 2))).shape, (0, 3, 2, 3))
        for kind in (numpy.uint8, numpy.int16, numpy.uint64):
            self.assertEqual(engram.lookup(numpy.array([[[3, 1]]], kind)).tolist(), [[[[9, 10, 11], [3, 4, 5]]]])
        self.assertEqual(engram.remove_from_store(), 2)

    def test_sizes_of_tables(self):
        for sizes, dim, kind in (
            ([0], 3, ValueError), ([-4], 3, ValueError), ([4.7], 3, TypeError), ("45", 3, TypeError), ([4], 0, ValueError),
            ([4], 2.5, TypeError), ([4], "3", TypeError), ([], 3, ValueError), ([True], 3, TypeError), (None, 3, TypeError),
            ([4], None, TypeError), ([2**62], 2**40, ValueError), (4, 3, TypeError),
        ):  # fmt: skip
            config = EngramStoreConfig()
            config.table_vocab_sizes, config.embedding_dim = sizes, dim
            with self.assertRaises(kind, msg=f"{sizes!r} {dim!r}"):
                EngramStore(0, config)
        with self.assertRaises(AttributeError):
            config.embeding_dim = 3
        config.table_vocab_sizes, config.embedding_dim = (4,), 3
        for wrong in ((0, None), (0, config, "a store")):
            with self.assertRaises(TypeError):
                EngramStore(*wrong)
        self.assertEqual(EngramStore(0, config).get_table_vocab_sizes(), [4])

    def test_the_module_of_tables(self):
        from mooncake import engram

        self.assertIs(engram.EngramStore, EngramStore)
        self.assertIs(engram.EngramStoreConfig, EngramStoreConfig)

    def test_the_example(self):
        bed.bed()
        try:
            import numpy  # noqa: F401
        except ImportError:
            self.skipTest("numpy is not installed")
        example = pathlib.Path(__file__).resolve().parent.parent / "examples" / "kv_layers.py"
        said = bed.python(
            "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')",
            example,
            "--layers=4",
            "--tokens=64",
        )
        self.assertIn("every value equal", said)

    def test_tensors(self):
        try:
            import torch
        except ImportError:
            store = opened()
            self.addCleanup(store.close)
            with self.assertRaisesRegex(ImportError, "torch"):
                store.put_tensor("t", None)
            self.skipTest("torch is not installed")
        store = opened()
        self.addCleanup(store.close)
        kinds = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
        for kind in kinds:
            for shape in ((2, 3, 4), (1000, 64), (), (0, 3)):
                tensor = torch.arange(int(torch.tensor(shape).prod()) if shape else 1).reshape(shape).to(kind)
                key = f"tensor-{kind}-{shape}"
                self.assertEqual(store.upsert_tensor(key, tensor), 0)
                got = store.get_tensor(key)
                self.assertEqual((got.dtype, got.shape), (tensor.dtype, tensor.shape))
                self.assertTrue(torch.equal(got, tensor))
        whole = torch.arange(40.0).reshape(10, 4)
        self.assertEqual(store.put_tensor_with_tp("split", whole, 0, 3, 0), 0)
        parts = [store.get_tensor_with_tp("split", rank, 3) for rank in range(3)]
        self.assertTrue(torch.equal(torch.cat(parts), whole))
        self.assertIsNone(store.get_tensor("no such"))
        self.assertEqual(store.put_tensor("t", b"bytes"), -600)
        self.assertEqual(store.put("noise", b"x" * 400), 0)
        self.assertIsNone(store.get_tensor("noise"))

    def test_what_needs_efa_says_so(self):
        from mooncake.engine import TransferEngine

        with self.assertRaisesRegex(NotImplementedError, "EFA"):
            TransferEngine().warmup_efa_segment("peer")

    def test_shared_segments(self):
        from mooncake.engine import SharedSegment

        name = f"kvplane-test-{os.getpid()}"
        one, blob = SharedSegment.create(name, 8192, 2, 0)
        other, _ = SharedSegment.create(name, 8192, 2, 1)
        other.complete([blob.decode()])
        self.assertTrue(one.ready() and other.ready())
        ctypes.memmove(one.base_addr(), b"hello", 5)
        self.assertEqual(ctypes.string_at(other.base_addr(), 5), b"hello")
        del one
        self.assertFalse(os.path.exists(f"/dev/shm/{name}"))


class Messages(unittest.TestCase):
    """The RPC interface."""

    def test_data_goes_and_comes(self):
        from mooncake.engine import RpcInterface, create_rpc_client

        got, server = [], RpcInterface()
        server.initialize("127.0.0.1:0")
        server.set_data_receive_callback(lambda data: got.append((data.get_bytes(), data.data_size)))
        self.assertTrue(server.start_server())
        self.addCleanup(server.stop_server)
        port = server._server.getsockname()[1]
        client = create_rpc_client()
        value = bed.pattern(1, 100_000)
        self.assertEqual(client.send_data(f"127.0.0.1:{port}", value), 0)
        self.assertEqual(client.send_data("127.0.0.1:1", b"x"), -1)
        self.assertEqual(got, [(value, len(value))])

    def served(self, address="127.0.0.1:0"):
        from mooncake.engine import RpcInterface

        server, got = RpcInterface(), []
        server.initialize(address)
        server.set_data_receive_callback(lambda data: got.append(data.get_bytes()))
        server.set_tensor_receive_callback(lambda data: got.append((data.shape, data.dtype, data.get_data_as_bytes())))
        self.assertTrue(server.start_server())
        self.addCleanup(server.stop_server)
        return server, "127.0.0.1:%d" % server._server.getsockname()[1], got

    def test_a_server_that_stops_serves_no_connection(self):
        from mooncake.engine import create_rpc_client

        server, address, got = self.served()
        client = create_rpc_client()
        self.assertEqual(client.send_data(address, b"1"), 0)
        server.stop_server()
        self.assertEqual(client.send_data(address, b"2"), -1)
        # A client that had a connection finds the next server of the address.
        other, _, also = self.served(address)
        self.assertEqual(client.send_data(address, b"3"), 0)
        other.stop_server()
        self.served(address)
        self.assertEqual(client.send_data(address, b"4"), 0)
        self.assertEqual((got, also), ([b"1"], [b"3"]))
        self.assertEqual(client.send_data("127.0.0.1:99999", b"5"), -1)

    def test_a_callback_that_raises(self):
        from mooncake.engine import create_rpc_client

        server, address, got = self.served()
        take, client = server._on_data, create_rpc_client()

        def fail(_):
            raise KeyError("of the callback")

        server.set_data_receive_callback(fail)
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            self.assertEqual(client.send_data(address, b"1"), -1)
        self.assertIn("of the callback", said.getvalue())
        (connection,) = client._pool[address]
        server.set_data_receive_callback(take)
        self.assertEqual(client.send_data(address, b"2"), 0)
        self.assertEqual((got, client._pool[address]), ([b"2"], [connection]))

    def test_tensors_without_elements_and_with_gaps(self):
        from mooncake.engine import create_rpc_client

        _, address, got = self.served()
        client = create_rpc_client()

        class Array:
            """An array whose bytes no view has."""

            shape, dtype = (0, 3), "float64"

            def tobytes(self):
                return b""

        self.assertEqual(client.send_tensor(address, Array()), 0)
        self.assertEqual(got, [([0, 3], "float64", b"")])
        try:
            import numpy
        except ImportError:
            return
        several = [numpy.zeros((0, 3)), numpy.arange(16.0).reshape(4, 4)[:, ::2], numpy.zeros(2, numpy.complex64)]
        for one in [*several, numpy.zeros(2, "datetime64[s]"), numpy.zeros(())]:
            self.assertEqual(client.send_tensor(address, one), 0)
            self.assertEqual(got[-1], (list(one.shape), str(one.dtype), one.tobytes()))


if __name__ == "__main__":
    unittest.main()
