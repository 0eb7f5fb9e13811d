"""Weights between the memory of two transfer engines, by plans with addresses."""

import unittest
from dataclasses import replace

import test_reshard as layouts
from mooncake.engine import ScatterTransferCompletionStatus, TransferEngine
from mooncake.reshard.lifetime import TerminalTransferState
from mooncake.reshard.transfer_engine import (
    MooncakeTransferEngineExecutor,
    TransferBatch,
    TransferBatchRange,
    TransferDirection,
)
from mooncake.reshard.weight import (
    MemoryRegistrationLease,
    MooncakeTransferEngineReader,
    MooncakeTransferEngineSink,
    TransferCompletionFailedError,
    TransferCompletionInterrupted,
    TransferCompletionUnknownError,
    TransferEngineError,
    TransferRegistrationCleanupPendingError,
    bind_logical_transfer_plan,
    plan_placement_transfer,
)
from mooncake.reshard.weight.lifetime import acquire_weight_lifetime_tokens
from test_reshard_store import Memory

COMPLETED = TerminalTransferState.COMPLETED


class Slow:
    """An engine whose tickets are not seen to end for so many drains, and that keeps memory while it `keeps`."""

    class Ticket:
        """A ticket of the engine."""

        def __init__(self, ticket, owner):
            self._ticket, self._owner = ticket, owner

        def drain(self, timeout_ms):
            """What is known, later than it is known."""
            if self._owner.raises is not None:
                raise self._owner.raises
            if self._owner.drains:
                self._owner.drains -= 1
                return ScatterTransferCompletionStatus.COMPLETION_UNKNOWN
            return self._ticket.drain(60_000)

    def __init__(self, engine, drains=0, keeps=False):
        self._engine, self.drains, self.keeps, self.raises = engine, drains, keeps, None

    def __getattr__(self, name):
        return getattr(self._engine, name)

    def submit_scatter_read(self, *arguments):
        """Begins a read."""
        return self.Ticket(self._engine.submit_scatter_read(*arguments), self)

    def unregister_memory(self, address):
        """Refuses to, while it keeps."""
        return -1 if self.keeps else self._engine.unregister_memory(address)


class Case(unittest.TestCase):
    """Two engines: that of a rank, and that of its peers."""

    def setUp(self):
        self.engines = {}
        for name in ("here", "there"):
            engine = TransferEngine()
            self.assertEqual(engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", ""), 0)
            self.engines[name] = (engine, f"127.0.0.1:{engine.get_rpc_port()}")

    def plan(self, of, to, remote):
        """Memory of both sides by participant, and the plan between it; the peers' memory is registered."""
        sides = {}
        for side, layout in (("source", of), ("target", to)):
            placement = layouts.placement(**layout, name=side)
            engine, endpoint = self.engines["there" if side == remote else "here"]
            sides[side] = {}
            for part in placement.parts:
                if not part.fragments:
                    continue
                one = Memory(placement, part.participant_id, side == "source", side)
                fragments = tuple(replace(each, endpoint=endpoint) for each in one.binding.fragments)
                one.binding = replace(one.binding, fragments=fragments)
                sides[side][part.participant_id] = one
                if side == remote:
                    self.assertEqual(engine.register_memory(one.base, len(one.buffer)), 0)
                    # With the memory, which so is not freed while it is registered.
                    self.addCleanup(lambda engine=engine, one=one: engine.unregister_memory(one.base))
        bindings = {side: [one.binding for one in some.values()] for side, some in sides.items()}
        placements = [next(iter(sides[side].values())).placement for side in ("source", "target")]
        logical = plan_placement_transfer(*placements)
        plan = bind_logical_transfer_plan(logical, bindings["target"], source_bindings=bindings["source"])
        return sides, bindings, placements, plan

    def leases(self, bindings):
        """The word of peers that their memory is registered."""
        return [
            MemoryRegistrationLease.from_fragment(
                fragment, lease_generation=one.generation, runtime_lease_id=one.lease_id
            )
            for one in bindings
            for fragment in one.fragments
        ]

    def guards(self, memory):
        """Providers of both sides."""
        found = {}
        for one in memory.values():
            found.update(one.guards)
        return found

    def read(self, reader, made, name, **options):
        """Reads what a participant needs."""
        sides, bindings, (source, target), plan = made
        given = {
            "source_registrations": self.leases(bindings["source"]),
            "source_allocation_guards": self.guards(sides["source"]),
            "target_allocation_guards": self.guards(sides["target"]),
            **options,
        }
        return reader.execute(plan, source, bindings["source"], target, sides["target"][name].binding, **given)


class Transfers(Case):
    """Reads and writes of all bytes."""

    def test_reads(self):
        engine, _ = self.engines["here"]
        there = self.engines["there"][1]
        for of, to in (({"tp": 4}, {"tp": 3, "pp": 2}), ({"tp": 2, "ep": 2}, {"dp": 2})):
            for options in ({}, {"max_batch_operations": 7}, {"max_batch_operations": 5, "max_inflight_batches": 4}):
                with self.subTest((of, to, options)):
                    made = self.plan(of, to, "source")
                    reader = MooncakeTransferEngineReader(engine, **options)
                    for name, one in made[0]["target"].items():
                        (receipt,) = self.read(reader, made, name)
                        one.check(self)
                        self.assertEqual((receipt.source_endpoint, receipt.nbytes), (there, len(one.buffer)))
                        self.assertEqual(one.ends, [COMPLETED])
                    self.assertEqual(reader.pending_transfer_ids(), ())
                    ends = {end for one in made[0]["source"].values() for end in one.ends}
                    self.assertEqual(ends, {COMPLETED})

    def test_writes(self):
        engine, _ = self.engines["here"]
        sides, bindings, placements, plan = self.plan({"tp": 4}, {"tp": 3, "pp": 2}, "target")
        sink, written = MooncakeTransferEngineSink(engine, max_batch_operations=9, max_inflight_batches=2), 0
        for one in sides["source"].values():
            for receipt in sink.execute(
                plan, placements[0], one.binding, placements[1], bindings["target"],
                target_registrations=self.leases(bindings["target"]),
                source_allocation_guards=self.guards(sides["source"]),
                target_allocation_guards=self.guards(sides["target"]),
            ):  # fmt: skip
                self.assertEqual(receipt.target_endpoint, self.engines["there"][1])
                written += receipt.nbytes
        self.assertEqual(written, plan.total_bytes)
        for one in sides["target"].values():
            one.check(self)

    def test_batches(self):
        made = self.plan({}, {}, "source")
        (of,), (to,) = (list(made[0][side].values()) for side in ("source", "target"))
        engine, _ = self.engines["here"]
        self.assertEqual(engine.register_memory(to.base, len(to.buffer)), 0)
        executor = MooncakeTransferEngineExecutor(engine)
        batch = TransferBatch(self.engines["there"][1], (of.base, of.base + 8), (to.base, to.base + 8), (8, 4))
        receipt = executor.execute_batch(batch, TransferDirection.READ)
        self.assertEqual((receipt.operation_count, receipt.nbytes), (2, 12))
        self.assertEqual(to.buffer[:13], of.buffer[:12] + b"\0")
        with executor.submission() as submission:
            with self.assertRaisesRegex(TransferEngineError, "another transfer"):
                executor.execute_batch(batch, TransferDirection.READ)
        with self.assertRaisesRegex(TransferEngineError, "has ended"):
            submission.execute_batch(batch, TransferDirection.READ)
        for bad in (
            lambda: TransferBatchRange(1, 8, 1, 8, (1,), (0,), (8,)),
            lambda: TransferBatchRange(1, 8, 1, 8, (0, 1), (0,), (1,)),
            lambda: TransferBatchRange(1 << 63, 1 << 63, 1, 8, (0,), (0,), (1,)),
            lambda: replace(batch, sizes=(8, 3)),
            lambda: TransferBatch("", (1,), (1,), (1,)),
            lambda: TransferBatch.from_ranges(endpoint="peer", ranges=()),
        ):
            with self.assertRaises(ValueError):
                bad()
        self.assertEqual(engine.unregister_memory(to.base), 0)


class Failures(Case):
    """Transfers that are refused, fail, or are not seen to end."""

    def test_a_peer_that_is_gone(self):
        self.engines["there"] = (self.engines["there"][0], "127.0.0.1:1")
        made = self.plan({"tp": 2}, {"tp": 3}, "source")
        reader = MooncakeTransferEngineReader(self.engines["here"][0], max_batch_operations=3, max_inflight_batches=2)
        name, one = next(iter(made[0]["target"].items()))
        with self.assertRaises(TransferCompletionFailedError):
            self.read(reader, made, name)
        self.assertEqual((one.ends, reader.pending_transfer_ids()), ([TerminalTransferState.FAILED_DRAINED], ()))

    def test_calls_that_make_no_sense(self):
        engine, _ = self.engines["here"]
        made = self.plan({"tp": 2}, {"tp": 3}, "source")
        sides, bindings, placements, plan = made
        reader, (name, *_) = MooncakeTransferEngineReader(engine), sides["target"]
        stale = self.leases([replace(one, generation=2) for one in bindings["source"]])
        for text, options in (
            ("source registration leases are required", {"source_registrations": None}),
            ("source registration lease mismatch", {"source_registrations": stale}),
            ("duplicate source registration", {"source_registrations": self.leases(bindings["source"]) * 2}),
            ("go together", {"target_pre_registered": True}),
            ("guard providers are required", {"target_allocation_guards": None}),
            ("missing source allocation guard", {"source_allocation_guards": {}}),
            ("unknown target worker", {"target_worker_id": "nobody"}),
        ):
            with self.assertRaisesRegex(TransferEngineError, text):
                self.read(reader, made, name, **options)
        moved = replace(sides["target"][name].binding, generation=2)
        given = {"source_registrations": self.leases(bindings["source"])}
        for text, source, target in (
            ("target executor snapshot mismatch", bindings["source"], moved),
            ("target executor snapshot mismatch", bindings["source"], replace(moved, instance_id="other")),
            ("source executor set is incomplete", bindings["source"][:0], sides["target"][name].binding),
        ):
            with self.assertRaisesRegex(TransferEngineError, text):
                reader.execute(plan, placements[0], source, placements[1], target, **given)
        missing = [name for name in self.guards(sides["source"])][:1]
        some = {key: one for key, one in self.guards(sides["source"]).items() if key not in missing}
        with self.assertRaisesRegex(ValueError, "missing source allocation guard"):
            acquire_weight_lifetime_tokens(
                transfer_id="t", plan=plan, bindings=bindings["source"], side="source", providers=some,
                rollback_finalizer=lambda sets, state: [one.release_after_terminal(state) for one in sets],
            )  # fmt: skip
        few = MooncakeTransferEngineReader(engine, max_total_lowered_segments=1)
        with self.assertRaisesRegex(TransferEngineError, "max_total_lowered_segments"):
            self.read(few, made, name)
        for bad in ({"max_inflight_batches": 0}, {"completion_drain_timeout_ms": -1}):
            with self.assertRaises(ValueError):
                MooncakeTransferEngineReader(engine, **bad)
        # Their pins are released, and the reader goes on.
        ends = {end for some in sides.values() for one in some.values() for end in one.ends}
        self.assertEqual(ends, {TerminalTransferState.ABORTED})
        self.read(reader, made, name)
        sides["target"][name].check(self)

    def test_a_transfer_that_is_not_seen_to_end_keeps_its_memory(self):
        engine = Slow(self.engines["here"][0], drains=1000)
        made = self.plan({"tp": 2}, {}, "source")
        reader = MooncakeTransferEngineReader(engine, max_completion_drain_attempts=1, completion_drain_timeout_ms=0)
        name, one = next(iter(made[0]["target"].items()))
        with self.assertRaises(TransferCompletionUnknownError) as found:
            self.read(reader, made, name)
        pending = found.exception.pending_transfer_id
        self.assertEqual((reader.pending_transfer_ids(), one.ends), ((pending,), []))
        self.assertEqual(reader.drain_pending_transfer(pending, timeout_ms=0), "COMPLETION_UNKNOWN")
        with self.assertRaisesRegex(TransferEngineError, "is pending"):
            self.read(reader, made, name)
        engine.drains, engine.keeps = 0, True
        with self.assertRaises(TransferRegistrationCleanupPendingError):
            reader.drain_pending_transfer(pending)
        self.assertEqual(one.ends, [])
        engine.keeps = False
        self.assertEqual(reader.drain_pending_transfer(pending), "COMPLETED")
        self.assertEqual((reader.pending_transfer_ids(), one.ends), ((), [COMPLETED]))
        one.check(self)
        with self.assertRaisesRegex(TransferEngineError, "no pending transfer"):
            reader.pending_transfer_status(pending)

    def test_an_interrupted_wait_keeps_its_memory(self):
        engine = Slow(self.engines["here"][0])
        made = self.plan({"tp": 2}, {}, "source")
        reader, (name, *_) = MooncakeTransferEngineReader(engine), made[0]["target"]
        engine.raises = KeyboardInterrupt()
        with self.assertRaises(TransferCompletionInterrupted) as found:
            self.read(reader, made, name)
        self.assertIsInstance(found.exception.interruption, KeyboardInterrupt)
        engine.raises = None
        self.assertEqual(reader.drain_pending_transfer(found.exception.pending_transfer_id), "COMPLETED")
        self.assertEqual(made[0]["target"][name].ends, [COMPLETED])

    def test_memory_that_the_engine_keeps_stays_pinned(self):
        engine = Slow(self.engines["here"][0], keeps=True)
        made = self.plan({"tp": 2}, {}, "source")
        reader, (name, *_) = MooncakeTransferEngineReader(engine), made[0]["target"]
        with self.assertRaises(TransferRegistrationCleanupPendingError) as found:
            self.read(reader, made, name)
        one = made[0]["target"][name]
        self.assertEqual(one.ends, [])
        one.check(self)
        engine.keeps = False
        self.assertEqual(reader.drain_pending_transfer(found.exception.pending_transfer_id), "COMPLETED")
        self.assertEqual(one.ends, [COMPLETED])
