"""Weights in a store: versions that become visible at once, bindings of plans, and writers that do not end."""

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import unittest
from dataclasses import replace

import bed
import test_reshard as layouts
from mooncake.reshard import _checks
from mooncake.reshard.lifetime import TerminalTransferState
from mooncake.reshard.weight import (
    RuntimeBindingFragment,
    StoredWeightManifest,
    TransferPlan,
    WeightRuntimeBindingManifest,
    WeightSnapshotDescriptor,
    WeightStore,
    WeightStoreError,
    bind_logical_transfer_plan,
    plan_placement_transfer,
    plan_placement_transfer_to_local_target,
    plan_weight_upload,
    resolve_executor_plan,
    resolve_executor_plans,
)
from mooncake.reshard.weight.lifetime import AcquiredWeightBinding, weight_allocation_fence
from mooncake.reshard.weight.placement import WeightPlacementManifest
from mooncake.store import MooncakeDistributedStore


def version(placement, number):
    """The same placement of another version: `revision`, and with a `number` of its own."""
    return WeightPlacementManifest.from_fragments(
        resource_id=placement.resource_id, revision=f"r/{number}", weight_generation=number,
        placement_set_id=placement.placement_set_id, topology=placement.topology, tensors=placement.tensors,
        fragments=placement.fragments,
    )  # fmt: skip


class Token:
    """A pin that remembers its end."""

    def __init__(self, fence, ends):
        self.fence, self._ends = fence, ends

    def release_after_terminal(self, terminal_state):
        """Notes the end."""
        self._ends.append(terminal_state)


class Memory:
    """Memory of a participant, contiguous in the order of its fragments; its own guard provider and adapter."""

    def __init__(self, placement, participant, filled=False, instance="instance", salt=0, workers=1):
        part = next(one for one in placement.parts if one.participant_id == participant)
        self.buffer = ctypes.create_string_buffer(max(sum(one.nbytes for one in part.fragments), 1))
        self.base, self.ends, self.fragments, at = ctypes.addressof(self.buffer), [], [], 0
        self.part, self.placement, self.salt = part, placement, salt
        for number, one in enumerate(part.fragments):
            if filled:
                self.buffer[at : at + one.nbytes] = self.expected(one)
            found = RuntimeBindingFragment(
                one.placement_fragment_id, f"{participant}/{number}", self.base + at, one.nbytes,
                f"{participant}-w{number % workers}", "endpoint", "cpu", layouts.ITEM, one.local_shape,
                _checks.strides(one.local_shape, layouts.ITEM), self.base, len(self.buffer), at, self,
            )  # fmt: skip
            self.fragments.append(found)
            at += one.nbytes
        self.binding = WeightRuntimeBindingManifest(
            placement.resource_id, placement.placement_id, placement.digest, instance, 1, "lease", placement.revision,
            participant, tuple(self.fragments),
        )  # fmt: skip

    def expected(self, fragment):
        """Content of a fragment in this version."""
        return bytes(byte ^ self.salt for byte in layouts.content(fragment))

    def acquire(self, *, transfer_id, expected_binding, required_fragment_ids):
        """Pins fragments."""
        fence = weight_allocation_fence(self.binding, required_fragment_ids, token_id=transfer_id)
        return AcquiredWeightBinding(self.binding, Token(fence, self.ends))

    @property
    def guards(self):
        """Providers with this one."""
        return {(self.binding.instance_id, self.binding.participant_id): self}

    def check(self, case):
        """Compares all bytes."""
        at = 0
        for one in self.part.fragments:
            case.assertEqual(self.buffer[at : at + one.nbytes], self.expected(one), one)
            at += one.nbytes


class Adapter:
    """A framework whose tensors are names of participants."""

    def __init__(self, placement, salt=0):
        names = [part.participant_id for part in placement.parts if part.fragments]
        self.placement = placement
        self.memory = {name: Memory(placement, name, True, salt=salt) for name in names}
        self.bindings = [one.binding for one in self.memory.values()]

    def export_source(self, snapshot):
        """The source is the framework itself."""
        return self

    def resolve_fragment_ids(self, *, tensor_id, tensor, source):
        """Fragments that a participant has of a tensor."""
        part = self.memory[tensor].part
        return [one.placement_fragment_id for one in part.fragments if one.tensor_id == tensor_id]

    def source_allocation_guards(self, binding):
        """The participant's memory."""
        return self.memory[binding.participant_id].guards

    def tensors(self, plan):
        """Pairs of tensor and participant that the plan reads."""
        found = [(one.source_placement.tensor_id, one.source_participant_id) for one in plan.operations]
        return list(dict.fromkeys(found))


def descriptor(placement):
    """The version of a placement."""
    return WeightSnapshotDescriptor(placement.resource_id, placement.revision, placement.weight_generation)


class Case(unittest.TestCase):
    """A store with a connection of its own."""

    def setUp(self):
        bed.bed()
        self.store = self.client()
        self.weights = WeightStore(self.store)

    def client(self):
        """Another connection."""
        store = MooncakeDistributedStore()
        self.assertEqual(store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", ""), 0)
        self.addCleanup(store.close)
        return store

    def refused(self, text, call, *arguments, **options):
        """A WeightStoreError with these words."""
        with self.assertRaisesRegex(WeightStoreError, text):
            call(*arguments, **options)

    def write(self, number, salt=0, **layout):
        """Writes a version; returns its manifest."""
        source = version(layouts.placement(**layout, name="source"), number)
        adapter = Adapter(source, salt)
        with self.store.begin_weight_snapshot(descriptor(source), adapter) as writer:
            for tensor, participant in adapter.tensors(writer.plan):
                writer.write_tensor(tensor, participant)
        self.addCleanup(self.store.remove_by_regex, f"^{writer.plan.manifest.group_id}/.*", True)
        return writer.plan.manifest

    def read(self, key, number, salt=0, client=None, **layout):
        """Reads a version under a layout and compares all of it."""
        weights = WeightStore(client or self.store)
        target = version(layouts.placement(**layout, name="target"), number)
        names = [part.participant_id for part in target.parts if part.fragments]
        memory = [Memory(target, name, salt=salt) for name in names]
        plan = weights.plan_load(weights.load_manifest(key), target, [one.binding for one in memory])
        for one in memory:
            weights.load(plan, target, one.binding, target_allocation_guards=one.guards)
            one.check(self)
            self.assertEqual(one.ends, [TerminalTransferState.COMPLETED])


class Versions(Case):
    """Snapshots that are committed, or not."""

    def test_a_version_is_read_under_other_layouts(self):
        manifest = self.write(1, tp=2, ep=2, dp=2)
        self.assertEqual(manifest.manifest_key, "weights/default/model/r%2F1/1/manifest")
        # Each box once: of two replicas, one.
        self.assertEqual(len(manifest.fragments), 2 * 4 + 1)
        other = self.client()
        for layout in ({"tp": 3}, {"tp": 2, "pp": 2}, {"ep": 3, "dp": 2}, {}):
            with self.subTest(layout):
                self.read(manifest.manifest_key, 1, client=other, **layout)
        again = self.weights.load_manifest(manifest.manifest_key)
        self.assertEqual((again, again.manifest_digest), (manifest, manifest.manifest_digest))

    def test_nothing_is_visible_before_the_commit(self):
        source = version(layouts.placement(tp=2), 2)
        adapter = Adapter(source)
        writer = self.store.begin_weight_snapshot(descriptor(source), adapter)
        key, receipts = writer.plan.manifest.manifest_key, []
        for tensor, participant in adapter.tensors(writer.plan):
            receipts += writer.write_tensor(tensor, participant)
        self.assertEqual(sorted(one.object_key for one in receipts), sorted(writer.plan.keys))
        self.refused("there is no weight manifest", self.weights.load_manifest, key)
        self.assertEqual(writer.commit(), writer.plan.manifest)
        self.read(key, 2, tp=3)
        for call in (writer.commit, lambda: writer.write_tensor("a", "d0-p0-e0-t0")):
            self.refused("committed already", call)
        writer.abort()
        self.read(key, 2)
        self.assertTrue(all(one.ends == [TerminalTransferState.COMPLETED] for one in adapter.memory.values()))

    def test_a_writer_that_fails_leaves_the_version_before(self):
        key = self.write(3, 1, tp=2).manifest_key
        source = version(layouts.placement(tp=2), 4)
        adapter = Adapter(source, 2)
        with self.assertRaises(KeyboardInterrupt):
            with self.store.begin_weight_snapshot(descriptor(source), adapter) as writer:
                first = adapter.tensors(writer.plan)[0][1]
                for tensor, participant in adapter.tensors(writer.plan):
                    if participant == first:
                        writer.write_tensor(tensor, participant)
                self.assertIn(1, self.store.batch_is_exist(writer.plan.keys))
                raise KeyboardInterrupt
        self.assertEqual(set(self.store.batch_is_exist(writer.plan.keys)), {0})
        self.refused("there is no weight manifest", self.weights.load_manifest, writer.plan.manifest.manifest_key)
        self.weights.finalize_upload_transaction(writer.plan)
        self.read(key, 3, 1, tp=3)
        # And the version can be written by another one.
        self.read(self.write(4, 2, tp=2).manifest_key, 4, 2)

    def test_a_store_that_refuses_some_objects_keeps_none(self):
        source = version(layouts.placement(tp=2), 5)
        adapter = Adapter(source)

        class Refusing:
            """The store, but for the last object of each batch."""

            def __getattr__(this, name):
                return getattr(self.store, name)

            def batch_put_from(this, keys, pointers, sizes, config):
                config.group_ids = config.group_ids[:-1]
                return [*self.store.batch_put_from(keys[:-1], pointers[:-1], sizes[:-1], config), -200]

        writer = WeightStore(Refusing()).begin_weight_snapshot(descriptor(source), adapter)
        with self.assertRaises(WeightStoreError) as found:
            for tensor, participant in adapter.tensors(writer.plan):
                writer.write_tensor(tensor, participant)
        self.assertEqual(list(found.exception.codes.values()), [-200])
        self.assertEqual(set(self.store.batch_is_exist(writer.plan.keys)), {0})
        ends = [end for one in adapter.memory.values() for end in one.ends]
        self.assertEqual(ends, [TerminalTransferState.FAILED_DRAINED])

    def test_of_two_writers_of_a_version_one_wins(self):
        source = version(layouts.placement(tp=2), 6)
        plans = []
        for salt in (1, 2):
            adapter, receipts = Adapter(source, salt), []
            plan = self.weights.plan_upload(source, adapter.bindings)
            for one in adapter.memory.values():
                receipts += self.weights.upload(plan, source, one.binding, source_allocation_guards=one.guards)
            plans.append((plan, receipts))
        (first, of_first), (second, of_second) = plans
        self.refused("missing upload receipts", self.weights.commit_upload, first, of_first[1:])
        self.assertEqual(self.weights.commit_upload(first, of_first), first.manifest)
        self.refused("another writer", self.weights.commit_upload, second, of_second)
        self.assertEqual(set(self.store.batch_is_exist(second.keys)), {0})
        self.refused("published already", self.weights.abort_upload, first, of_first)
        # A commit is repeatable, and what it has published stays.
        self.assertEqual(self.weights.commit_upload(first, of_first), first.manifest)
        self.read(first.manifest.manifest_key, 6, 1, tp=3)

    def test_of_commit_and_abort_the_first_one_counts(self):
        source = version(layouts.placement(), 7)
        adapter = Adapter(source)
        plan, (one,) = self.weights.plan_upload(source, adapter.bindings), adapter.memory.values()
        receipts = self.weights.upload(plan, source, one.binding, source_allocation_guards=one.guards)
        self.refused("no decision", self.weights.finalize_upload_transaction, plan)
        self.weights.abort_upload(plan, receipts)
        self.refused("decided before: abort", self.weights.commit_upload, plan, receipts)
        self.refused("was aborted", self.weights.upload, plan, source, one.binding, source_allocation_guards=one.guards)
        self.weights.abort_upload(plan, receipts)

    def test_a_commit_whose_answer_is_lost_is_repeated(self):
        source = version(layouts.placement(), 8)
        adapter = Adapter(source)

        class Losing:
            """The store, without the answers, and after the first put without the bytes."""

            puts = 0

            def __getattr__(this, name):
                return getattr(self.store, name)

            def put(this, key, value, config):
                this.puts += 1
                if this.puts != 2:
                    self.store.put(key, value, config)
                raise TimeoutError("no answer")

        writer = WeightStore(Losing()).begin_weight_snapshot(descriptor(source), adapter)
        for tensor, participant in adapter.tensors(writer.plan):
            writer.write_tensor(tensor, participant)
        self.refused("commit again", writer.commit)
        self.refused("commit again", writer.abort)
        self.assertEqual(writer.commit(), writer.plan.manifest)
        self.read(writer.plan.manifest.manifest_key, 8, tp=2)

    def test_a_process_that_is_killed_leaves_the_version_before(self):
        key = self.write(9, 1, tp=2).manifest_key
        program = f"""
            import sys
            sys.path.insert(0, {os.path.dirname(os.path.abspath(__file__))!r})
            import test_reshard_store as tests
            from mooncake.store import MooncakeDistributedStore
            source = tests.version(tests.layouts.placement(tp=2), 10)
            adapter, store = tests.Adapter(source, 2), MooncakeDistributedStore()
            assert store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "") == 0
            writer = store.begin_weight_snapshot(tests.descriptor(source), adapter)
            for tensor, participant in adapter.tensors(writer.plan):
                writer.write_tensor(tensor, participant)
            print("written", writer.plan.manifest.manifest_key, flush=True)
            sys.stdin.readline()
            writer.commit()
            print("committed", flush=True)
        """
        for killed in (True, False):
            command = [sys.executable, "-c", textwrap.dedent(program)]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
                word, new = child.stdout.readline().split()
                self.assertEqual(word, "written")
                self.refused("there is no weight manifest", self.weights.load_manifest, new)
                if killed:
                    child.send_signal(signal.SIGKILL)
                else:
                    child.communicate("\n", timeout=60)
                    self.assertEqual(child.returncode, 0)
            self.read(key, 9, 1, tp=3)
        self.read(new, 10, 2, tp=3)


class Refusals(Case):
    """Calls that make no sense, each with an error and without a trace."""

    def test_snapshots(self):
        source = version(layouts.placement(tp=2), 20)
        adapter = Adapter(source)
        for bad in ({"revision": ""}, {"weight_generation": -1}, {"namespace": 3}):
            with self.assertRaises(ValueError):
                replace(descriptor(source), **bad)
        with self.assertRaisesRegex(ValueError, "snapshot must be a WeightSnapshotDescriptor"):
            self.store.begin_weight_snapshot("model", adapter)
        other = replace(descriptor(source), revision="other")
        self.refused("revision of the snapshot differs", self.store.begin_weight_snapshot, other, adapter)
        with self.assertRaisesRegex(ValueError, "no complete generation-consistent DP replica"):
            half = Adapter(source)
            half.bindings = half.bindings[:1]
            self.store.begin_weight_snapshot(descriptor(source), half)
        begin = lambda: self.store.begin_weight_snapshot(descriptor(source), adapter)
        writer = begin()
        tensor, participant = adapter.tensors(writer.plan)[0]
        writer.write_tensor(tensor, participant)
        self.refused("duplicate fragment", writer.write_tensor, tensor, participant)
        self.refused("aborted already", writer.write_tensor, tensor, participant)
        self.refused("of no fragment", begin().write_tensor, "unknown", participant)
        self.refused("missing required fragments", begin().commit)

    def test_memory(self):
        source = version(layouts.placement(tp=2), 21)
        adapter = Adapter(source)
        plan = self.weights.plan_upload(source, adapter.bindings)
        one, other = adapter.memory.values()
        upload = lambda binding, guards: self.weights.upload(plan, source, binding, source_allocation_guards=guards)
        self.refused("guard providers are required", upload, one.binding, None)
        self.refused("missing source allocation guard provider", upload, one.binding, other.guards)
        self.refused("lease of the source", upload, replace(one.binding, lease_id="later"), one.guards)
        self.refused("lease of the source", upload, replace(one.binding, generation=2), one.guards)
        moved = Memory(source, one.part.participant_id, True)
        self.refused("memory of the source", upload, moved.binding, moved.guards)
        # A guard that pins other memory than the plan's.
        self.refused("address", upload, one.binding, dict.fromkeys(one.guards, moved))
        self.assertEqual(moved.ends, [TerminalTransferState.ABORTED])
        self.refused("plan must be a WeightUploadPlan", self.weights.upload, None, source, one.binding)
        self.assertEqual(set(self.store.batch_is_exist(plan.keys)), {0})

    def test_loads(self):
        manifest = self.write(22, tp=2)
        target = version(layouts.placement(tp=3), 22)
        memory = [Memory(target, part.participant_id) for part in target.parts]
        bindings = [one.binding for one in memory]
        self.refused("weight_generation|revision", self.weights.plan_load, manifest, layouts.placement(tp=3), [
            Memory(layouts.placement(tp=3), part.participant_id).binding for part in target.parts
        ])  # fmt: skip
        self.refused("duplicate target", self.weights.plan_load, manifest, target, bindings[:1] * 2)
        plan = self.weights.plan_load(manifest, target, bindings)
        one = memory[0]
        load = lambda: self.weights.load(plan, target, one.binding, target_allocation_guards=one.guards)
        load()
        one.check(self)
        self.refused("unknown target worker", self.weights.load, plan, target, one.binding, target_worker_id="nobody")
        self.store.remove(manifest.fragments[0].object_key, True)
        self.refused("weights were not read|prepare_get_into_ranges_snapshot", load)
        self.store.remove(manifest.manifest_key, True)
        self.refused("there is no weight manifest", load)
        self.store.put(manifest.manifest_key, b"{}")
        self.refused("invalid weight manifest", load)

    def test_a_lease_of_registrations(self):
        manifest = self.write(23, tp=2)
        target = version(layouts.placement(), 23)
        one = Memory(target, target.parts[0].participant_id)
        plan = self.weights.plan_load(manifest, target, [one.binding])
        ids = [each.fragment_id for each in one.binding.fragments]
        lease = self.weights.register_weight_buffers(
            one.binding, fragment_ids=ids, allocation_guards=one.guards, side="target"
        )
        for _ in range(2):
            self.weights.load(plan, target, one.binding, registration_lease=lease)
            one.check(self)
        self.assertEqual(one.ends, [])
        elsewhere = WeightStore(self.store)
        self.refused("of another store", elsewhere.load, plan, target, one.binding, registration_lease=lease)
        lease.close()
        lease.close()
        self.assertEqual(one.ends, [TerminalTransferState.COMPLETED])
        self.refused("closed", self.weights.load, plan, target, one.binding, registration_lease=lease)

    def test_memory_that_the_store_keeps_stays_pinned(self):
        source = version(layouts.placement(), 24)
        adapter = Adapter(source)
        (one,) = adapter.memory.values()

        class Keeping:
            """The store, but for `unregister_buffer`, while it keeps."""

            keeps = True

            def __getattr__(this, name):
                return getattr(self.store, name)

            def unregister_buffer(this, address):
                return -600 if this.keeps else self.store.unregister_buffer(address)

        weights = WeightStore(Keeping())
        plan = weights.plan_upload(source, adapter.bindings)
        upload = lambda: weights.upload(plan, source, one.binding, source_allocation_guards=one.guards)
        self.refused("stays pinned", upload)
        self.assertEqual(one.ends, [])
        self.refused("pending registrations", upload)
        (pending,) = weights.pending_registration_ids()
        self.refused("registered still", weights.drain_pending_registration, pending)
        weights.store._raw.keeps = False
        weights.drain_pending_registration(pending)
        self.assertEqual((one.ends, weights.pending_registration_ids()), ([TerminalTransferState.COMPLETED], ()))
        weights.abort_upload(plan, upload())


class Bindings(unittest.TestCase):
    """Plans with addresses."""

    def bound(self, of, to):
        """Source, target and the plan between their memory."""
        source, target = layouts.placement(**of, name="source"), layouts.placement(**to, name="target")
        make = lambda one, name, filled: [
            Memory(one, part.participant_id, filled, name) for part in one.parts if part.fragments
        ]
        memory = make(source, "of", True), make(target, "to", False)
        sides = [[one.binding for one in some] for some in memory]
        logical = plan_placement_transfer(source, target)
        return memory, logical, bind_logical_transfer_plan(logical, sides[1], source_bindings=sides[0])

    def test_copies_between_memory(self):
        for of, to in (({"tp": 4}, {"tp": 3, "pp": 2}), ({"ep": 2, "dp": 2}, {"tp": 2, "dp": 3})):
            with self.subTest((of, to)):
                (sources, targets), logical, plan = self.bound(of, to)
                facts = lambda one: (one.total_bytes, one.pipeline_routes)
                self.assertEqual(facts(plan), facts(logical))
                for side, some in (("source", sources), ("target", targets)):
                    indices = []
                    for one in some:
                        try:
                            found = resolve_executor_plan(plan, one.placement, one.binding, side)
                        except ValueError as error:
                            # A replica that nothing is read from.
                            self.assertIn("no executor", str(error))
                            continue
                        indices += plan.operation_indices_for_executor(found, side)
                    self.assertEqual(sorted(indices), list(range(len(plan.operations))))
                for one in plan.operations:
                    for source, target, size in one.iter_segments(max_segments=one.segment_count):
                        ctypes.memmove(one.target.address + target, one.source.address + source, size)
                for one in targets:
                    one.check(self)
                again = pickle.loads(pickle.dumps(plan))
                self.assertEqual(again, plan)

    def test_bindings_that_are_not_the_plans(self):
        (sources, targets), logical, plan = self.bound({"tp": 2}, {"tp": 3})
        of, to = ([one.binding for one in some] for some in (sources, targets))
        wrong = (
            ("requires target", (), of),
            ("missing target", to[:2], of),
            ("missing source", to, of[1:]),
            ("duplicate", to + to[:1], of),
            ("placement", of, of),
        )
        for text, target, source in wrong:
            with self.assertRaisesRegex(ValueError, text):
                bind_logical_transfer_plan(logical, target, source_bindings=source)
        with self.assertRaisesRegex(ValueError, "no source manifest"):
            bind_logical_transfer_plan(logical, to, source_bindings=of, source_manifest="manifest")
        moved = Memory(targets[0].placement, targets[0].part.participant_id, instance="to")
        for one in (replace(to[0], lease_id="later"), moved.binding):
            with self.assertRaisesRegex(ValueError, "snapshot mismatch"):
                resolve_executor_plans(plan, targets[0].placement, one, "target")
        with self.assertRaisesRegex(ValueError, "source or target"):
            resolve_executor_plans(plan, targets[0].placement, to[0], "side")

    def test_plans_that_contradict_themselves(self):
        _, logical, plan = self.bound({"tp": 2}, {"tp": 3})
        made = {name: getattr(plan, name) for name in TransferPlan.__dataclass_fields__}
        del made["source_stored_fragment_snapshots"]
        self.assertEqual(TransferPlan(**made), plan)
        wrong = (
            ("executors differ", {"source_executors": plan.source_executors[:1]}),
            ("executors differ|not fully covered", {"operations": plan.operations[:-1]}),
            ("has no memory", {"operations": logical.operations}),
            ("identity", {"revision": "other"}),
            ("max_transfer_regions", {"planning_limits": replace(plan.planning_limits, max_transfer_regions=1)}),
        )
        for text, changed in wrong:
            with self.assertRaisesRegex(ValueError, text):
                TransferPlan(**{**made, **changed})

    def test_copies_in_place_are_refused(self):
        source, target = layouts.placement(name="source"), layouts.placement(name="target")
        one = Memory(source, "d0-p0-e0-t0", instance="both")
        there = Memory(target, "d0-p0-e0-t0", instance="both")
        moved = tuple(
            replace(place, placement_fragment_id=named.placement_fragment_id)
            for place, named in zip(one.fragments, there.fragments)
        )
        logical = plan_placement_transfer_to_local_target(source, target)
        with self.assertRaisesRegex(ValueError, "allocations overlap"):
            there = replace(there.binding, fragments=moved)
            bind_logical_transfer_plan(logical, [there], source_bindings=[one.binding])

    def test_an_upload_plan_is_of_one_generation(self):
        source = layouts.placement(dp=2)
        bindings = [Memory(source, part.participant_id).binding for part in source.parts]
        plan = plan_weight_upload(source, bindings, key_prefix="/some/")
        self.assertTrue(plan.control_key.startswith("some/default/model/1/3/transactions/"))
        self.assertEqual(StoredWeightManifest.from_json(plan.manifest.to_json()), plan.manifest)
        with self.assertRaisesRegex(ValueError, "inconsistent lease generations"):
            plan_weight_upload(source, [bindings[0], replace(bindings[1], generation=2)])
        for bad in ({"namespace": ""}, {"key_prefix": "//"}):
            with self.assertRaises(ValueError):
                plan_weight_upload(source, bindings, **bad)
