"""`mooncake.engine` as its users call it, between an engine of this process and one of another."""

import ctypes
import json
import socket
import subprocess
import sys
import threading
import time
import unittest

import bed
from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode

SIZE = 4 << 20

PEER = """
import ctypes, sys
from mooncake.engine import TransferEngine
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
memory = bytearray(int(sys.argv[1]))
at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert engine.register_memory(at, len(memory)) == 0
managed = engine.allocate_managed_buffer(65536)
print(engine.get_rpc_port(), at, managed, flush=True)
for line in sys.stdin:
    command, *rest = line.split()
    if command == "read":
        print(bytes(memory[int(rest[0]) : int(rest[0]) + int(rest[1])]).hex(), flush=True)
    elif command == "notices":
        print([(one.name, one.msg) for one in engine.get_notifies()], flush=True)
    elif command == "send":
        target, ours, theirs, size = rest
        print(engine.transfer_sync_write(target, at + int(ours), int(theirs), int(size)), flush=True)
"""


class Peer:
    """An engine in a separate process."""

    def __init__(self):
        import os

        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
        command = [sys.executable, "-c", PEER, str(SIZE)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        port, at, managed = self.process.stdout.readline().split()
        self.name, self.at, self.managed = f"127.0.0.1:{port}", int(at), int(managed)

    def ask(self, *words):
        """Sends a command and returns the answer."""
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def read(self, offset, size):
        """Reads bytes of the peer's memory."""
        return bytes.fromhex(self.ask("read", offset, size))

    def close(self):
        """Stops the process."""
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Open(unittest.TestCase):
    """Batches whose status is never queried."""

    def test_those_that_ended_make_room(self):
        engine = TransferEngine()
        self.assertEqual(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), 0)
        memory = bytearray(4096)
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.assertEqual(engine.register_memory(at, len(memory)), 0)
        own = f"127.0.0.1:{engine.get_rpc_port()}"
        submitted = [engine.batch_transfer_async_write(own, [at], [at], [0]) for _ in range((1 << 16) + 100)]
        self.assertTrue(all(number > 0 for number in submitted))
        self.assertEqual(engine.get_batch_transfer_status([submitted[-1]]), 0)


class Pair(unittest.TestCase):
    """An engine of this process and a peer in another."""

    @classmethod
    def setUpClass(cls):
        bed.bed()
        cls.peer = Peer()
        cls.engine = TransferEngine()
        assert cls.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        cls.memory = bytearray(SIZE)
        cls.at = ctypes.addressof(ctypes.c_char.from_buffer(cls.memory))
        assert cls.engine.batch_register_memory([cls.at], [SIZE]) == 0

    @classmethod
    def tearDownClass(cls):
        assert cls.engine.batch_unregister_memory([cls.at]) == 0
        cls.peer.close()

    def test_one_range(self):
        for size in (1, 4096, 100_000, 1 << 20):
            value = bed.pattern(size, size)
            self.memory[:size] = value
            self.assertEqual(self.engine.transfer_sync_write(self.peer.name, self.at, self.peer.at + 64, size), 0)
            self.assertEqual(self.peer.read(64, size), value)
            self.memory[:size] = bytes(size)
            self.assertEqual(self.engine.transfer_sync_read(self.peer.name, self.at, self.peer.at + 64, size), 0)
            self.assertEqual(self.memory[:size], value)

    def test_many_ranges(self):
        count, size = 256, 4096
        value = bed.pattern(7, count * size)
        self.memory[: len(value)] = value
        ours = [self.at + index * size for index in range(count)]
        theirs = [self.peer.at + index * size for index in reversed(range(count))]
        self.assertEqual(self.engine.batch_transfer_sync_write(self.peer.name, ours, theirs, [size] * count), 0)
        expected = b"".join(value[at : at + size] for at in reversed(range(0, len(value), size)))
        self.assertEqual(self.peer.read(0, len(value)), expected)
        into = [self.at + (1 << 21) + index * size for index in range(count)]
        self.assertEqual(self.engine.batch_transfer_sync_read(self.peer.name, into, theirs, [size] * count), 0)
        self.assertEqual(self.memory[1 << 21 : (1 << 21) + len(value)], value)
        self.assertEqual(self.engine.batch_transfer_sync_read(self.peer.name, [], [], []), 0)
        self.assertEqual(self.engine.batch_transfer_sync_write(self.peer.name, ours[:1], theirs[:1], [0]), 0)

    def test_nothing_to_transfer(self):
        empty, write = ([], [], []), TransferOpcode.Write
        self.assertEqual(self.engine.batch_transfer_sync(self.peer.name, *empty, write, TransferNotify("no", "bytes")), 0)
        self.assertEqual(self.peer.ask("notices"), "[('no', 'bytes')]")
        self.assertEqual(self.engine.batch_transfer_sync_write(self.peer.name, *empty), 0)
        self.assertEqual(self.engine.batch_transfer_sync_write("127.0.0.1:1", *empty), -1)
        self.assertEqual(self.engine.batch_transfer_sync("127.0.0.1:1", *empty, write, TransferNotify("a", "b")), -1)

    def test_types(self):
        for number in ("x", 1.5, None):
            with self.assertRaisesRegex(TypeError, "number is int"):
                self.engine.transfer_check_status(number)
        with self.assertRaises(TypeError):
            TransferEngine().initialize("127.0.0.1", "P2PHANDSHAKE", None, "")
        self.assertEqual(TransferEngine().initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", None), 0)

    def test_status_looks_at_every_part(self):
        value = bed.pattern(3, 1 << 20)
        self.memory[: 1 << 20] = value
        self.engine.transfer_sync_write(self.peer.name, self.at, self.peer.at, 1 << 20)
        into = [self.at + (2 << 20) + index * (1 << 18) for index in range(4)]
        there = [self.peer.at + index * (1 << 18) for index in range(4)]
        number = self.engine.batch_transfer_async_read(self.peer.name, into, there, [1 << 18] * 4)
        self.assertGreater(number, 0)
        self.assertEqual(self._ended(number), 1)
        self.assertEqual(self.memory[2 << 20 : 3 << 20], value)
        self.assertEqual(self.engine.transfer_check_status(number), -1, "it was forgotten")
        number = self.engine.transfer_submit_write(self.peer.name, self.at, self.peer.at, 4096)
        self.assertEqual(self.engine.get_batch_transfer_status([number]), 0)
        self.assertEqual(self.engine.get_batch_transfer_status([]), 0)
        self.assertEqual(self.engine.transfer_submit_write("nobody:9", self.at, 0, 16), 0)
        bad = [*there[:3], self.peer.at + SIZE]
        self.assertEqual(self.engine.batch_transfer_async_read(self.peer.name, into, bad, [1 << 18] * 4), 0)

    def _ended(self, number):
        until = time.monotonic() + 30
        while time.monotonic() < until:
            code = self.engine.transfer_check_status(number)
            if code != 0:
                return code
            time.sleep(0.001)
        return 0

    def test_messages(self):
        notice = TransferNotify("job", json.dumps({"done": True}))
        code = self.engine.transfer_sync(
            self.peer.name, self.at, self.peer.at, 16, TransferOpcode.Write, notice
        )
        self.assertEqual(code, 0)
        nothing = TransferNotify("job", "failed")
        self.assertEqual(
            self.engine.transfer_sync(self.peer.name, self.at, self.peer.at, 0, TransferOpcode.Write, nothing), 0
        )
        expected = [("job", '{"done": true}'), ("job", "failed")]
        self.assertEqual(self.peer.ask("notices"), str(expected))
        self.assertEqual(self.peer.ask("notices"), "[]")
        self.assertEqual(self.engine.get_notifies(), [])

    def test_the_other_way_round(self):
        here = f"127.0.0.1:{self.engine.get_rpc_port()}"
        self.memory[: 1 << 16] = bed.pattern(11, 1 << 16)
        self.engine.transfer_sync_write(self.peer.name, self.at, self.peer.at, 1 << 16)
        self.memory[: 1 << 16] = bytes(1 << 16)
        self.assertEqual(self.peer.ask("send", here, 0, self.at, 1 << 16), "0")
        self.assertEqual(self.memory[: 1 << 16], bed.pattern(11, 1 << 16))

    def test_managed_buffers(self):
        address = self.engine.allocate_managed_buffer(8192)
        self.assertGreater(address, 0)
        self.assertEqual(self.engine.write_bytes_to_buffer(address, b"hello", 5), 0)
        self.assertEqual(self.engine.transfer_sync_write(self.peer.name, address, self.peer.managed, 5), 0)
        self.assertEqual(self.engine.transfer_sync_read(self.peer.name, address + 100, self.peer.managed, 5), 0)
        self.assertEqual(self.engine.read_bytes_from_buffer(address + 100, 5), b"hello")
        self.assertEqual(self.engine.free_managed_buffer(address, 8192), 0)
        self.assertEqual(self.engine.free_managed_buffer(address, 8192), -1)
        self.assertEqual(self.engine.write_bytes_to_buffer(4096, b"hello", 5), -1)
        with self.assertRaises(ValueError):
            self.engine.read_bytes_from_buffer(4096, 5)

    def test_bad_memory(self):
        outside = self.at + SIZE
        for ours, theirs, size in (
            (outside, self.peer.at, 16),
            (self.at, self.peer.at + SIZE, 16),
            (self.at, self.peer.at, SIZE + 1),
            (self.at, self.peer.at, 2**63),
            (0, self.peer.at, 16),
            (self.at, 0, 16),
            (2**64 - 8, self.peer.at, 16),
        ):
            self.assertEqual(self.engine.transfer_sync_write(self.peer.name, ours, theirs, size), -1)
        self.assertEqual(self.engine.batch_transfer_sync_write(self.peer.name, [self.at], [], [4]), -1)
        self.assertEqual(self.engine.register_memory(self.at, SIZE), -7)
        self.assertLess(self.engine.register_memory(0, 4096), 0)
        self.assertLess(self.engine.register_memory(4096, 4096), 0)
        self.assertEqual(self.engine.unregister_memory(5), -3)
        overlapping = self.engine.batch_transfer_sync_read(
            self.peer.name, [self.at, self.at + 8], [self.peer.at] * 2, [16, 16]
        )
        self.assertEqual(overlapping, -1)

    def test_types(self):
        for call in (
            lambda: self.engine.transfer_sync_write(5, self.at, self.peer.at, 4),
            lambda: self.engine.transfer_sync_write(self.peer.name, "x", self.peer.at, 4),
            lambda: self.engine.transfer_sync_write(self.peer.name, self.at, -5, 4),
            lambda: self.engine.batch_transfer_sync_read(self.peer.name, self.at, [1], [1]),
            lambda: self.engine.transfer_sync(self.peer.name, self.at, self.peer.at, 4, 1),
            lambda: self.engine.initialize("127.0.0.1"),
            lambda: self.engine.initialize(1, 2, 3, 4),
            lambda: self.engine.transfer_sync_write(self.peer.name, self.at, self.peer.at, 4, foo=1),
        ):
            with self.assertRaises(TypeError):
                call()

    def test_peers_that_are_not_there(self):
        start = time.monotonic()
        self.assertEqual(self.engine.transfer_sync_write("127.0.0.1:1", self.at, self.at, 4), -1)
        self.assertLess(self.engine.send_probe("127.0.0.1:1"), 0)
        self.assertEqual(self.engine.send_probe(self.peer.name), 0)
        self.assertEqual(self.engine.batch_transfer_async_read("127.0.0.1:1", [self.at], [self.at], [4]), 0)
        self.assertEqual(self.engine.get_first_buffer_address("127.0.0.1:1"), 0)
        self.assertEqual(self.engine.get_first_buffer_address(self.peer.name) in (self.peer.at, self.peer.managed), True)
        self.assertLess(time.monotonic() - start, 60)

    def test_many_threads(self):
        problems = []

        def work(number):
            base = number * (1 << 18)
            for _ in range(50):
                ours, theirs = self.at + base, self.peer.at + base
                if self.engine.transfer_sync_write(self.peer.name, ours, theirs, 1 << 16) != 0:
                    problems.append(number)
                if self.engine.transfer_sync_read(self.peer.name, ours + (1 << 17), theirs, 1 << 16) != 0:
                    problems.append(number)
                if self.memory[base : base + (1 << 16)] != self.memory[base + (1 << 17) : base + (1 << 17) + (1 << 16)]:
                    problems.append(f"{number} differs")

        for number in range(8):
            base = number * (1 << 18)
            self.memory[base : base + (1 << 16)] = bed.pattern(number, 1 << 16)
        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(problems, [])

    def test_topology(self):
        matrix = json.loads(self.engine.get_local_topology())
        self.assertIn("cpu:0", matrix)
        self.assertEqual([len(lists) for lists in matrix.values()], [2] * len(matrix))


class Ends(unittest.TestCase):
    """Peers that die, and engines that are not initialized."""

    def test_a_killed_peer_is_an_error_and_not_a_wait(self):
        bed.bed()
        peer, engine = Peer(), TransferEngine()
        self.addCleanup(peer.close)
        self.assertEqual(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), 0)
        at = engine.allocate_managed_buffer(1 << 20)
        self.assertEqual(engine.transfer_sync_write(peer.name, at, peer.at, 1 << 20), 0)
        peer.process.kill()
        peer.process.wait()
        start = time.monotonic()
        self.assertEqual(engine.transfer_sync_write(peer.name, at, peer.at, 1 << 20), -1)
        self.assertLess(time.monotonic() - start, 40)
        self.assertLess(engine.send_probe(peer.name), 0)
        self.assertEqual(engine.free_managed_buffer(at, 1 << 20), 0)

    def test_addresses_of_other_machines_are_announced(self):
        # Behind NAT and in containers, no local interface has the address at which peers reach the engine.
        for host in ("203.0.113.7", "203.0.113.7:12345", "0.0.0.0", "0.0.0.0:12345", "no-such-host.invalid"):
            with self.subTest(host):
                engine, peer = TransferEngine(), TransferEngine()
                self.assertEqual(engine.initialize(host, "P2PHANDSHAKE", "tcp", ""), 0)
                self.assertEqual(peer.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), 0)
                self.assertGreater(engine.get_rpc_port(), 0)
                # The engine is reachable at another address of this machine, too, and transfers bytes.
                at, there = peer.allocate_managed_buffer(4096), engine.allocate_managed_buffer(4096)
                self.assertEqual(peer.write_bytes_to_buffer(at, b"x" * 4096, 4096), 0)
                name = f"127.0.0.1:{engine.get_rpc_port()}"
                self.assertEqual(peer.transfer_sync_write(name, at, there, 4096), 0)
                self.assertEqual(engine.read_bytes_from_buffer(there, 4096), b"x" * 4096)

    def test_bare_ipv6_addresses(self):
        try:
            with socket.create_server(("::1", 0), family=socket.AF_INET6):
                pass
        except OSError as error:
            self.skipTest(f"no IPv6: {error}")
        for host in ("::1", "[::1]", "[::1]:12345", "::1%lo", "fd00::1234", "2001:db8::102", "fe80::1%lo"):
            with self.subTest(host):
                engine = TransferEngine()
                self.assertEqual(engine.initialize(host, "P2PHANDSHAKE", "tcp", ""), 0)
                self.assertEqual(engine.send_probe(f"[::1]:{engine.get_rpc_port()}"), 0)

    def test_initialize_again_starts_another_engine(self):
        engine = TransferEngine()
        self.assertEqual(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), 0)
        first = engine.get_rpc_port()
        self.assertEqual(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), 0)
        self.assertEqual(engine.send_probe(f"127.0.0.1:{engine.get_rpc_port()}"), 0)
        self.assertNotEqual(engine.get_rpc_port(), first)
        # A failed initialization keeps the running engine.
        self.assertEqual(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "carrier-pigeon", ""), -1)
        self.assertEqual(engine.send_probe(f"127.0.0.1:{engine.get_rpc_port()}"), 0)

    def test_before_initialize(self):
        engine = TransferEngine()
        self.assertEqual(engine.get_rpc_port(), 0)
        self.assertEqual(engine.register_memory(4096, 4096), -1)
        self.assertEqual(engine.transfer_sync_write("127.0.0.1:1", 1, 1, 1), -1)
        self.assertEqual(engine.get_notifies(), [])
        self.assertEqual(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "carrier-pigeon", ""), -1)


if __name__ == "__main__":
    unittest.main()
