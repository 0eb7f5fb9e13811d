"""Transfers by arrays, by pages and by fragments with tickets, between an engine of this process and one of another."""

import array
import contextlib
import ctypes
import io
import os
import signal
import struct
import subprocess
import sys
import threading
import unittest

import bed
from kvplane import _native
from mooncake import _scatter
from mooncake.engine import (
    SUPPORT_CUDA,
    ScatterTransferCompletionStatus,
    ScatterTransferTicket,
    TransferEngine,
)
from test_mooncake_engine import SIZE, Peer

COMPLETED = ScatterTransferCompletionStatus.COMPLETED
FAILED_DRAINED = ScatterTransferCompletionStatus.FAILED_DRAINED
COMPLETION_UNKNOWN = ScatterTransferCompletionStatus.COMPLETION_UNKNOWN
_LONGEST_MS = 60_000

#: A peer that serves its memory over TCP only: on one host, bytes reach a stopped process otherwise.
_OVER_TCP = """
import ctypes, sys
from kvplane import _native
engine = _native.Engine("127.0.0.1", "P2PHANDSHAKE", shared_memory=False)
memory = bytearray(int(sys.argv[1]))
at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert engine.register([at], [len(memory)], "*") == 0
print(engine.address(), at, flush=True)
sys.stdin.read()
"""


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
        assert cls.engine.register_memory(cls.at, SIZE) == 0

    @classmethod
    def tearDownClass(cls):
        assert cls.engine.unregister_memory(cls.at) == 0
        cls.peer.close()

    def setUp(self):
        self.memory[:] = bytes(SIZE)


class Arrays(Pair):
    """Columns of a batch in arrays."""

    def test_both_directions(self):
        count, size = 300, 1000
        value = bed.pattern(5, count * size)
        self.memory[: len(value)] = value
        ours = [self.at + index * size for index in range(count)]
        theirs = [self.peer.at + index * size for index in reversed(range(count))]
        for kind in "Qq":
            columns = [array.array(kind, column) for column in (ours, theirs, [size] * count)]
            self.assertEqual(self.engine.batch_transfer_sync_write_arrays(self.peer.name, *columns), 0)
            expected = b"".join(value[at : at + size] for at in reversed(range(0, len(value), size)))
            self.assertEqual(self.peer.read(0, len(value)), expected)
            columns[0] = array.array(kind, [address + (1 << 21) for address in ours])
            self.assertEqual(self.engine.batch_transfer_sync_read_arrays(self.peer.name, *columns), 0)
            self.assertEqual(self.memory[1 << 21 : (1 << 21) + len(value)], value)
        number = self.engine.batch_transfer_async_write_arrays(self.peer.name, *columns)
        self.assertEqual(self.engine.get_batch_transfer_status([number]), 0)
        number = self.engine.batch_transfer_async_read_arrays(self.peer.name, *columns)
        self.assertEqual(self.engine.get_batch_transfer_status([number]), 0)
        empty = [array.array("Q")] * 3
        self.assertEqual(self.engine.batch_transfer_sync_read_arrays(self.peer.name, *empty), 0)
        self.assertEqual(self.engine.batch_transfer_sync_read_arrays("127.0.0.1:1", *empty), -1)

    def test_arrays_are_lists_too(self):
        self.memory[:8] = b"12345678"
        columns = [array.array("Q", [number]) for number in (self.at, self.peer.at, 8)]
        self.assertEqual(self.engine.batch_transfer_sync_write(self.peer.name, *columns), 0)
        self.assertEqual(self.peer.read(0, 8), b"12345678")
        with self.assertRaises(TypeError):
            self.engine.batch_transfer_sync_write(self.peer.name, array.array("q", [-1]), *columns[1:])
        with self.assertRaises(TypeError):
            self.engine.batch_transfer_sync_write(self.peer.name, array.array("d", [1.0]), *columns[1:])

    def test_wrong_arrays_are_refused(self):
        one = array.array("Q", [1])
        for columns, error, said in (
            ((array.array("I", [1]), one, one), TypeError, "buffers must hold 8-byte integers"),
            ((one, array.array("d", [1.0]), one), TypeError, "peer_buffer_addresses must hold 8-byte integers"),
            ((one, one, array.array("Q", [1, 2])), ValueError, "must have the same length"),
            (([1], one, one), TypeError, "buffers is an array with the buffer protocol, not list"),
            ((one, one, memoryview(bytes(32)).cast("Q", (2, 2))), TypeError, "lengths must be a one-dimensional array"),
            ((memoryview(bytes(32)).cast("Q")[::2], one, one), TypeError, "buffers must be contiguous"),
        ):
            with self.assertRaisesRegex(error, said):
                self.engine.batch_transfer_sync_write_arrays(self.peer.name, *columns)


class Pages(Pair):
    """Fields of pages."""

    PAGES, FIELDS, LENGTH = 40, 3, 512

    def fields(self):
        """A row for each field: pages are 2 KiB here, and 4 KiB and in another place there."""
        rows = [
            (self.at + field * self.LENGTH, 2048, self.peer.at + (1 << 20) + field * 600, 4096, self.LENGTH)
            for field in range(self.FIELDS)
        ]
        return memoryview(struct.pack(f"{5 * len(rows)}q", *sum(rows, ()))).cast("q", (len(rows), 5))

    def test_both_directions(self):
        value = bed.pattern(9, self.PAGES * 2048)
        self.memory[: len(value)] = value
        src = array.array("q", range(self.PAGES))
        dst = array.array("q", reversed(range(self.PAGES)))
        for most in (0, 7):
            self.peer.close()
            type(self).peer = Peer()
            write = self.engine.batch_transfer_sync_write_pages(self.peer.name, src, dst, self.fields(), most)
            self.assertEqual(write, 0)
            for page in (0, 1, self.PAGES - 1):
                for field in range(self.FIELDS):
                    at = page * 2048 + field * self.LENGTH
                    there = (1 << 20) + (self.PAGES - 1 - page) * 4096 + field * 600
                    self.assertEqual(self.peer.read(there, self.LENGTH), value[at : at + self.LENGTH])
            self.memory[: len(value)] = bytes(len(value))
            read = self.engine.batch_transfer_sync_read_pages(self.peer.name, src, dst, self.fields(), max_batch_size=most)
            self.assertEqual(read, 0)
            for page in range(self.PAGES):
                at, bytes_of = page * 2048, self.FIELDS * self.LENGTH
                self.assertEqual(self.memory[at : at + bytes_of], value[at : at + bytes_of])
                # Bytes outside all fields have not changed.
                self.assertEqual(self.memory[at + bytes_of : at + 2048], bytes(2048 - bytes_of))
            self.memory[: len(value)] = value

    def test_wrong_pages_are_refused(self):
        one, call = array.array("q", [0]), self.engine.batch_transfer_sync_write_pages

        def rows(*numbers):
            return memoryview(struct.pack(f"{len(numbers)}q", *numbers)).cast("q", (len(numbers) // 5, 5))

        good = rows(self.at, 0, self.peer.at, 0, 8)
        for pages, fields, kind, error in (
            ((one, array.array("q", [0, 1])), good, ValueError, "same length"),
            ((one, one), rows(self.at, 0, self.peer.at, 0, 0), ValueError, "positive length"),
            ((one, one), rows(self.at, -1, self.peer.at, 0, 8), ValueError, "non-negative strides"),
            ((one, one), memoryview(bytes(32)).cast("B").cast("q", (1, 4)), TypeError, r"\[rows, 5\] array"),
            ((one, one), array.array("q", [1] * 5), TypeError, r"\[rows, 5\] array"),
        ):
            with self.assertRaisesRegex(kind, error):
                call(self.peer.name, *pages, fields)
        self.assertEqual(call(self.peer.name, one, one, good), 0)
        self.assertEqual(call(self.peer.name, one, one, rows(self.at, 0, self.peer.at + SIZE, 0, 8)), -1)
        self.assertEqual(call("127.0.0.1:1", one, one, good), -1)
        none = array.array("q")
        self.assertEqual(call("127.0.0.1:1", none, none, good), 0)
        # A page whose address is beyond 64 bits.
        self.assertEqual(call(self.peer.name, array.array("q", [4]), one, rows(0, 1 << 62, self.peer.at, 0, 8)), -1)


def _stop(process):
    """Stops a process of ours; returns when all of its threads have stopped."""
    os.kill(process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


class Tickets(Pair):
    """Fragments of ranges, and what their tickets say."""

    def ranges(self):
        """Two ranges with three fragments."""
        bases = [self.at, self.at + (1 << 20)], [1 << 20] * 2, [self.peer.at, self.peer.at + (1 << 20)], [1 << 20] * 2
        return (*bases, [[0, 5000], [100]], [[7, 9000], [0]], [[100, 50], [1000]])

    def test_both_directions(self):
        self.memory[:] = bed.pattern(3, SIZE)
        for call in ("scatter_transfer_sync_write_with_ticket", "submit_scatter_write"):
            ticket = getattr(self.engine, call)(self.peer.name, *self.ranges())
            self.assertIsInstance(ticket, ScatterTransferTicket)
            self.assertIs(ticket.drain(_LONGEST_MS), COMPLETED)
            self.assertEqual((ticket.status, ticket.drained), (COMPLETED, True))
            for at, to, size in ((0, 7, 100), (5000, 9000, 50), ((1 << 20) + 100, 1 << 20, 1000)):
                self.assertEqual(self.peer.read(to, size), self.memory[at : at + size])
        before = bytes(self.memory)
        self.memory[:] = bytes(SIZE)
        for call in ("scatter_transfer_sync_read_with_ticket", "submit_scatter_read"):
            self.assertIs(getattr(self.engine, call)(self.peer.name, *self.ranges()).drain(_LONGEST_MS), COMPLETED)
            for at, size in ((0, 100), (5000, 50), ((1 << 20) + 100, 1000)):
                self.assertEqual(self.memory[at : at + size], before[at : at + size])

    def test_sums_of_words_that_wrap_stay_within_the_range(self):
        self.memory[:] = bed.pattern(5, SIZE)
        before, ours, theirs = self.peer.read(0, 2048), self.at + 1000, self.peer.at + 1000
        for offset, length in ((bed.Word(-8), bed.Word(16)), (bed.Word(60), bed.Word(8)), (bed.Word(8), bed.Word(-4))):
            said = io.StringIO()
            with contextlib.redirect_stderr(said):
                ticket = self.engine.scatter_transfer_sync_write_with_ticket(
                    self.peer.name, [ours], [64], [theirs], [64], [[offset]], [[offset]], [[length]]
                )
            self.assertIs(ticket.status, FAILED_DRAINED)
            self.assertIn("not within range 0", said.getvalue())
        self.assertEqual(self.peer.read(0, 2048), before)
        with contextlib.redirect_stderr(said):
            ends = [bed.Word(-8)], [64], [theirs], [64]
            ticket = self.engine.submit_scatter_write(self.peer.name, *ends, [[4]], [[4]], [[8]])
        self.assertIs(ticket.status, FAILED_DRAINED)
        self.assertIn("address space", said.getvalue())
        for base in (-8, 2**64):
            with self.assertRaisesRegex(TypeError, "not an address or length"):
                self.engine.submit_scatter_write(self.peer.name, [base], *ends[1:], [[4]], [[4]], [[8]])
        ticket = self.engine.submit_scatter_write(
            self.peer.name, [bed.Word(ours)], [bed.Word(64)], [bed.Word(theirs)], [64], [[bed.Word(8)]], [[bed.Word(8)]], [[bed.Word(16)]]
        )
        self.assertIs(ticket.drain(_LONGEST_MS), COMPLETED)
        self.assertEqual(self.peer.read(1008, 16), self.memory[1008:1024])
        try:
            import numpy
        except ImportError:
            return
        for kind in (numpy.uint8, numpy.int32, numpy.int64, numpy.uint64):
            rows = [numpy.array([8], kind)], [numpy.array([8], kind)], [numpy.array([16], kind)]
            ticket = self.engine.submit_scatter_write(self.peer.name, [ours], [64], [theirs], [64], *rows)
            self.assertIs(ticket.drain(_LONGEST_MS), COMPLETED, kind)

    def test_numbers_and_names(self):
        self.assertEqual([int(one) for one in (COMPLETED, FAILED_DRAINED, COMPLETION_UNKNOWN)], [0, 1, 2])
        self.assertEqual(COMPLETED.name, "COMPLETED")
        self.assertFalse(COMPLETED == 0)

    def test_what_cannot_be_started_is_drained(self):
        ranges = self.ranges()
        cases = [
            ("127.0.0.1:1", ranges, "127.0.0.1:1"),
            (self.peer.name, ([self.at], [8], [self.peer.at + SIZE], [8], [[0]], [[0]], [[8]]), self.peer.name),
            (self.peer.name, ([], [], [], [], [], [], []), "at least one fragment"),
        ]
        for at, value, reason in (
            (1, [1 << 20], "lists of ranges"), (4, [[0, 5000]], "lists of ranges"), (4, [[0], [100]], "lists of fragments"),
            (6, [[100, 50], [1 << 21]], "not within range 1"), (5, [[1 << 20, 9000], [0]], "not within range 0"),
            (6, [[100, 0], [1000]], "not within range 0"), (4, [[-1, 5000], [100]], "not within range 0"),
        ):  # fmt: skip
            wrong = list(ranges)
            wrong[at] = value
            cases.append((self.peer.name, wrong, reason))
        for endpoint, wrong, reason in cases:
            said = io.StringIO()
            with contextlib.redirect_stderr(said):
                ticket = self.engine.submit_scatter_write(endpoint, *wrong)
            self.assertEqual((ticket.status, ticket.drained, ticket.drain(0)), (FAILED_DRAINED, True, FAILED_DRAINED))
            self.assertIn(reason, said.getvalue())
        with contextlib.redirect_stderr(io.StringIO()):
            self.assertIs(TransferEngine().submit_scatter_read(self.peer.name, *ranges).status, FAILED_DRAINED)
        with self.assertRaises(TypeError):
            self.engine.submit_scatter_read(self.peer.name, *ranges).drain("soon")
        for place, value, message in (
            (0, "0x7f", r"local_base_addresses is a list of int, not str"),
            (1, (size for size in [1]), r"local_capacities is a list of int, not generator"),
            (4, [None], r"local_offsets\[0\] is a list of int, not NoneType"),
            (6, [["1"]], r"lengths\[0\] is a list of int, and str is in it"),
        ):
            wrong = [*ranges]
            wrong[place] = value
            with self.assertRaisesRegex(TypeError, message):
                self.engine.submit_scatter_read(self.peer.name, *wrong)

    def test_a_stopped_peer_is_unknown_until_it_goes_on(self):
        peer = subprocess.Popen(
            [sys.executable, "-c", _OVER_TCP, str(SIZE)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))),
        )  # fmt: skip
        for cleanup in (peer.stdin.close, peer.stdout.close, peer.wait, peer.kill):
            self.addCleanup(cleanup)
        name, there = peer.stdout.readline().split()
        native = _native.Engine("127.0.0.1", "P2PHANDSHAKE", shared_memory=False)
        self.addCleanup(native.close)
        memory = bytearray(bed.pattern(1, SIZE))
        at = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.assertEqual(native.register([at], [SIZE], "*"), 0)
        ends, whole = ([at], [SIZE], [int(there)], [SIZE]), ([[0]], [[0]], [[SIZE]])
        self.assertIs(_scatter.submit(native, name, True, ends, whole).drain(_LONGEST_MS), COMPLETED)
        _stop(peer)
        try:
            ticket = _scatter.submit(native, name, True, ends, whole)
            self.assertIs(ticket.drain(50), COMPLETION_UNKNOWN)
            self.assertEqual((ticket.status, ticket.drained), (COMPLETION_UNKNOWN, False))
        finally:
            os.kill(peer.pid, signal.SIGCONT)
        seen = []
        threads = [threading.Thread(target=lambda: seen.append(ticket.drain(_LONGEST_MS))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(seen, [COMPLETED] * 4)
        self.assertTrue(ticket.drained)
        # A killed peer leaves no doubt.
        _stop(peer)
        ticket = _scatter.submit(native, name, True, ends, whole)
        peer.kill()
        peer.wait()
        self.assertIs(ticket.drain(_LONGEST_MS), FAILED_DRAINED)

    def test_a_write_that_failed_is_unknown_until_its_target_answers(self):
        class Silent:
            """Engine whose transfers have timed out, and whose peer answers at last."""

            asked = []

            def wait_for(self, number, timeout_ms):
                return -2

            def status(self, number):
                return -2

            def fence(self, target, address, limit_ms):
                self.asked.append((target, address, limit_ms))
                return 0 if len(self.asked) > 2 else -2

        write, read = ScatterTransferTicket(Silent(), 1, ("peer", 4096)), ScatterTransferTicket(Silent(), 2)
        self.assertEqual((read.status, read.drained), (FAILED_DRAINED, True))
        self.assertIs(write.status, COMPLETION_UNKNOWN)
        self.assertIs(write.drain(500), COMPLETION_UNKNOWN)
        self.assertIs(write.drain(0), FAILED_DRAINED)
        self.assertIs(write.drain(0), FAILED_DRAINED)
        self.assertEqual([(target, address) for target, address, _ in Silent.asked], [("peer", 4096)] * 3)
        self.assertTrue(400 < Silent.asked[1][2] <= 500 and Silent.asked[2][2] < 100, Silent.asked)

    def test_an_outcome_that_is_not_known_is_unknown(self):
        ticket = self.engine.submit_scatter_write(self.peer.name, *self.ranges())
        while self.engine.transfer_check_status(ticket._number) == 0:
            os.sched_yield()
        for _ in range(2):
            self.assertEqual((ticket.status, ticket.drained), (COMPLETION_UNKNOWN, False))
            self.assertIs(ticket.drain(_LONGEST_MS), COMPLETION_UNKNOWN)
        del ticket
        kept = self.engine.submit_scatter_write(self.peer.name, *self.ranges())
        ended = self.engine.scatter_transfer_sync_write_with_ticket(self.peer.name, *self.ranges())
        with kept._lock:
            child = os.fork()
            if child == 0:
                known = kept.drain(_LONGEST_MS), kept.status, ended.status
                del kept
                os._exit(0 if known == (COMPLETION_UNKNOWN, COMPLETION_UNKNOWN, COMPLETED) else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertIs(kept.drain(_LONGEST_MS), COMPLETED)

    def test_a_closed_engine_leaves_nothing_in_flight(self):
        engine = TransferEngine()
        self.assertEqual(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), 0)
        at = engine.allocate_managed_buffer(SIZE)
        ranges = [at], [SIZE], [self.peer.at], [SIZE], [[0]], [[0]], [[SIZE]]
        ticket = engine.submit_scatter_write(self.peer.name, *ranges)
        engine.__del__()
        # Of a write that was in flight, the peer may have the bytes.
        self.assertIn(ticket.status, (COMPLETED, COMPLETION_UNKNOWN))

    def test_closing_asks_for_outcomes_first(self):
        class Closing:
            """Engine with two transfers: one that has ended, and one in flight."""

            closed = False

            def status(self, number):
                return -1 if self.closed else 1 - number % 2

            def close(self):
                self.closed = True

        native = Closing()
        ended, flying = ScatterTransferTicket(native, 2), ScatterTransferTicket(native, 1)
        _scatter.close(native, [ended, flying])
        self.assertEqual((ended.status, flying.status), (COMPLETED, FAILED_DRAINED))


class Memory(Pair):
    """Memory that peers cannot access, and calls with hints."""

    def test_memory_of_this_engine_only(self):
        private = bytearray(4096)
        at = ctypes.addressof(ctypes.c_char.from_buffer(private))
        self.assertEqual(self.engine.register_memory(at, 4096, remote_accessible=False), 0)
        self.addCleanup(self.engine.unregister_memory, at)
        private[:4] = b"mine"
        self.assertEqual(self.engine.transfer_sync_write(self.peer.name, at, self.peer.at, 4), 0)
        self.assertEqual(self.peer.read(0, 4), b"mine")
        self.assertEqual(self.engine.transfer_sync_read(self.peer.name, at + 8, self.peer.at, 4), 0)
        self.assertEqual(private[8:12], b"mine")
        here = f"127.0.0.1:{self.engine.get_rpc_port()}"
        self.assertEqual(self.peer.ask("send", here, 0, at, 4), "-1")
        self.assertEqual(self.peer.ask("send", here, 0, self.at, 4), "0")

    def test_hints(self):
        words = (self.peer.name, self.at, self.peer.at, 4)
        for hints, reason in (
            (("tcp", ""), ""), (("shm",), ""), (("rdma", "no_such_device"), "no device no_such_device"),
            (("nvlink",), "'nvlink' is not supported here"), (("pigeon",), "'pigeon' is unknown"),
        ):  # fmt: skip
            said = io.StringIO()
            with contextlib.redirect_stderr(said):
                self.assertEqual(self.engine.transfer_sync_write(*words, *hints), 0)
                self.assertEqual(self.engine.transfer_sync_read(*words, *hints), 0)
            self.assertIn(reason, said.getvalue())
            self.assertEqual(len(said.getvalue().splitlines()), 1 if reason else 0)
        with self.assertRaises(TypeError):
            self.engine.transfer_sync_write(*words, nic_hint=3)

    def test_streams_need_a_driver(self):
        if SUPPORT_CUDA:
            self.skipTest("a driver answers")
        with self.assertRaisesRegex(NotImplementedError, "no driver"):
            self.engine.transfer_write_on_cuda(self.peer.name, self.at, self.peer.at, 4)
        with self.assertRaisesRegex(NotImplementedError, "no driver"):
            self.engine.batch_transfer_read_on_cuda(self.peer.name, [self.at], [self.peer.at], [4], stream_ptr=7)


if __name__ == "__main__":
    unittest.main()
