"""Structured objects, batches of training data and their catalog, over a store of a real cluster."""

import gc
import json
import sys
import threading
import unittest
import unittest.mock
import warnings
import weakref

try:
    import numpy
except ImportError:
    numpy = None

import bed

if numpy is not None:
    from mooncake import structured_object_store as objects
    from mooncake._registrations import Registrations
    from mooncake.dataproto_catalog import DataProtoCatalog, DataProtoCatalogTransfer
    from mooncake.store import BufferPool, MooncakeDistributedStore, ReplicateConfig


def connected():
    """Returns a store of the shared cluster."""
    bed.bed()
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "") == 0
    return store


#: Code of a call whose owner of a key does not answer.
AWAY = -901


class Counting:
    """A store that counts its calls by name, fails those that a test names, and is cut off from owners of keys: it then
    answers as the store does when these do not."""

    def __init__(self, store):
        self._store = store
        self.calls = {}
        self.failing = set()
        #: Returns true for a key whose owner does not answer.
        self.away = lambda key: False

    def _cut(self, name, keys):
        """Returns the answer of a call of which an owner is away, or None."""
        if name in ("get", "is_exist", "remove") and self.away(keys):
            return b"" if name == "get" else AWAY
        if name == "batch_remove" and any(map(self.away, keys)):
            there = [key for key in keys if not self.away(key)]
            codes = dict(zip(there, self._store.batch_remove(there, True)))
            return [codes.get(key, AWAY) for key in keys]
        return None

    def __getattr__(self, name):
        call = getattr(self._store, name)

        def counted(*arguments, **keywords):
            self.calls[name] = self.calls.get(name, 0) + 1
            if name in self.failing:
                raise RuntimeError(f"{name} fails on purpose")
            cut = self._cut(name, arguments[0]) if arguments else None
            return call(*arguments, **keywords) if cut is None else cut

        return counted


@unittest.skipIf(numpy is None, "numpy is not installed")
class Case(unittest.TestCase):
    """A store, and a transfer under a prefix of its own."""

    def setUp(self):
        self.store = connected()
        self.addCleanup(self.store.close)
        self.counting = Counting(self.store)
        self.prefix = f"test/{self.id()}"
        self.transfer = objects.MooncakeBundleTransfer(self.counting, self.prefix)

    def left(self):
        """Returns the number of this test's objects, and removes them."""
        return self.store.remove_by_regex(f"^{self.prefix}/")


class Objects(Case):
    """Members of structured objects."""

    def members(self):
        arrays = {f"w{index}": numpy.arange(index * 7, dtype=numpy.float32).reshape(index, 7) for index in range(40)}
        return {**arrays, "raw": b"bytes", "scalar": numpy.asarray(3, numpy.int16), "bool": numpy.ones(3, numpy.bool_)}

    def test_members_come_back_in_one_request(self):
        members = self.members()
        ref = self.transfer.put_structured_object(objects.StructuredObjectPayload({"a": [1]}, members))
        self.assertEqual(self.counting.calls, {"put": 2, "put_batch": 1})
        result = self.transfer.materialize(self.transfer.read_spec({"manifest_key": ref.manifest_key}))
        self.assertEqual(self.counting.calls["batch_get_into"], 2)
        self.assertEqual(result.metadata["a"], [1])
        self.assertEqual(list(result.objects), list(members))
        for name, value in members.items():
            numpy.testing.assert_array_equal(result.objects[name], value, name)
            if name != "raw":
                self.assertEqual(result.objects[name].dtype, value.dtype)
                self.assertEqual(result.objects[name].shape, value.shape)
        self.transfer.remove_bundle(ref)
        self.assertEqual(self.left(), 0)

    def test_chunks_slices_and_destinations(self):
        array = numpy.arange(5000, dtype=numpy.int64).reshape(100, 50)
        for size in (1 << 26, 4096, 1000, 7):
            ref = self.transfer.put_object({"x": array}, chunk_bytes=size)
            spec = self.transfer.read_spec(ref)
            numpy.testing.assert_array_equal(self.transfer.materialize(spec).objects["x"], array)
            for start, end, step in ((0, 100, 1), (3, 9, 1), (5, 90, 7), (9, 9, 1), (-4, 100, 2)):
                sliced = self.transfer.materialize(spec.slice_member("x", 0, start, end, step)).objects["x"]
                numpy.testing.assert_array_equal(sliced, array[start:end:step])
            into = numpy.zeros((6, 50), numpy.int64)
            result = self.transfer.materialize_into(spec.slice_member("x", 0, 3, 9), {"x": into})
            self.assertIs(result.objects["x"], into)
            numpy.testing.assert_array_equal(into, array[3:9])
            self.transfer.remove_bundle(ref)

    def test_memory_of_the_caller_stays_registered(self):
        memory = numpy.zeros(1 << 16, numpy.uint8)
        self.assertEqual(self.store.register_buffer(memory.ctypes.data, memory.nbytes), 0)
        self.addCleanup(self.store.unregister_buffer, memory.ctypes.data)
        members = {name: numpy.full(1000, number, numpy.uint8) for number, name in enumerate("abc")}
        ref = self.transfer.put_object(members)
        into = {name: memory[at : at + 1000] for name, at in zip(members, (0, 4096, 8192))}
        self.transfer.materialize_into(self.transfer.read_spec(ref), into)
        for name, value in members.items():
            numpy.testing.assert_array_equal(into[name], value)
        self.assertEqual(self.store.put_from("still registered", memory.ctypes.data, 10), 0)
        self.assertEqual(self.store.remove("still registered"), 0)

    def test_a_pool_keeps_what_was_read_until_its_release(self):
        pool = BufferPool(self.store, max_bytes=1 << 20)
        transfer = objects.MooncakeBundleTransfer(self.store, self.prefix, buffer_pool=pool)
        ref = transfer.put_object({"x": numpy.arange(1000), "y": b"abc"})
        result = transfer.get_object(ref)
        numpy.testing.assert_array_equal(result["x"], numpy.arange(1000))
        self.assertEqual(bytes(result["y"]), b"abc")
        with self.assertRaises(RuntimeError):
            pool.close()
        transfer.release_result(result)
        pool.close()

    def test_a_read_that_needs_more_than_its_pool_has(self):
        members = {"a": numpy.ones(600 << 10, numpy.uint8), "b": numpy.ones(600 << 10, numpy.uint8)}
        ref = self.transfer.put_object(members)
        batch = self.transfer.put_dataproto({"a": members["a"][None]}, stage="one")
        batch = self.transfer.append_dataproto_fields(batch, {"b": members["b"][None]}, stage="two")
        for bound in ({"max_bytes": 1 << 20}, {"max_regions": 1}):
            # A wait would end the test: nobody else has a buffer.
            pool = BufferPool(self.store, **bound)
            transfer = objects.MooncakeBundleTransfer(self.store, self.prefix, buffer_pool=pool)
            for read in (lambda: transfer.get_object(ref), lambda: transfer.get_dataproto(batch)):
                with self.assertRaisesRegex(RuntimeError, "over the capacity of this pool"):
                    read()
            one = transfer.materialize(transfer.read_spec(ref).select_members(["b"])).objects["b"]
            self.assertTrue((one == 1).all())
            del one
            pool.close()
        pool = BufferPool(self.store, max_bytes=2 << 20)
        transfer = objects.MooncakeBundleTransfer(self.store, self.prefix, buffer_pool=pool)
        for _ in range(3):
            self.assertEqual(sorted(transfer.get_object(ref)), ["a", "b"])
            self.assertEqual(sorted(transfer.get_dataproto(batch)["batch"]), ["a", "b"])
        pool.close()

    def test_what_was_read_is_freed_with_its_last_reference(self):
        members = {"x": numpy.arange(1000), "y": b"abc", "one": numpy.float32(2)}
        single = numpy.arange(1000)
        column = [numpy.arange(number) for number in range(4)]
        batch = {"batch": {"x": numpy.ones((4, 100))}, "non_tensor_batch": {"c": column, "t": list("abcd")}}

        def pooled(max_bytes):
            pool = BufferPool(self.store, max_bytes=max_bytes)
            return objects.MooncakeBundleTransfer(self.store, self.prefix, buffer_pool=pool)

        transfers = [self.transfer, objects.MooncakeBundleTransfer(self.store, self.prefix), pooled(1 << 22)]
        refs = [self.transfer.put_object(members), self.transfer.put_object(single), self.transfer.put_dataproto(batch)]
        handle = {"manifest_key": refs[0].manifest_key}
        into = lambda transfer: transfer.materialize_into(transfer.read_spec(refs[1]), {"value": numpy.empty(1000, int)})
        reads = (
            lambda transfer: transfer.get_object(handle)["x"],
            lambda transfer: transfer.get_object(refs[1]),
            lambda transfer: transfer.materialize(transfer.read_spec(handle).slice_member("x", 0, 3, 9)).objects["x"],
            lambda transfer: into(transfer).objects["value"],
            lambda transfer: transfer.get_dataproto(refs[2])["batch"]["x"],
            lambda transfer: transfer.get_dataproto(refs[2])["non_tensor_batch"]["c"][3],
            lambda transfer: transfer.get_dataproto(refs[2], rows=[3, 1])["non_tensor_batch"]["c"][0],
        )
        gc.disable()
        self.addCleanup(gc.enable)
        for number, transfer in enumerate(transfers):
            for which, read in enumerate(reads):
                array = read(transfer)
                while isinstance(array.base, numpy.ndarray):
                    array = array.base
                seen = weakref.ref(array)
                del array
                self.assertIsNone(seen(), f"{number} {which}")
        sent = numpy.ones(1000)
        seen = weakref.ref(sent)
        for policy in (None, objects.BundleTransferPolicy(copy_mode="zero_copy")):
            self.transfer.remove_bundle(self.transfer.put_object({"x": sent}, policy=policy))
        del sent
        self.assertIsNone(seen())
        # Each read fits into the pool when the one before is gone.
        small = pooled(6 << 16)
        for _ in range(8):
            seen = small.get_object(handle)
        self.assertEqual(seen["x"].tolist(), members["x"].tolist())

    def test_memory_for_staging_goes_with_its_transfer(self):
        rows = [numpy.arange(number + 1) for number in range(4)]
        for number in range(4):
            # With a store of this package itself: others have no pool of the transfer's own.
            transfer = objects.MooncakeBundleTransfer(self.store, self.prefix)
            for _ in range(2):
                ref = transfer.put_dataproto({"batch": {}, "non_tensor_batch": {"c": rows}})
                seen = transfer.get_dataproto(ref)["non_tensor_batch"]["c"]
                numpy.testing.assert_array_equal(seen[3], rows[3])
                transfer.cleanup_dataproto(ref)
                if number % 2:
                    transfer.close()
            del transfer
        self.assertEqual(self.left(), 0)

    def test_a_put_that_fails_leaves_nothing(self):
        for call in ("put_batch", "put"):
            self.counting.failing = {call}
            with self.assertRaisesRegex(RuntimeError, "on purpose"):
                self.transfer.put_object({"x": numpy.arange(10), "y": b"abc"})
        self.counting.failing = set()
        self.assertEqual(self.left(), 0)

    def test_missing_and_malformed_objects(self):
        with self.assertRaisesRegex(KeyError, "no bundle"):
            self.transfer.get_object({"manifest_key": f"{self.prefix}/default/none/manifest"})
        ref = self.transfer.put_object({"x": numpy.arange(10)})
        self.store.remove(ref.manifest["buffers"]["x"]["key"])
        with self.assertRaisesRegex(RuntimeError, "-704"):
            self.transfer.get_object(ref)
        self.store.upsert(ref.manifest["buffers"]["x"]["key"], b"short")
        with self.assertRaisesRegex(RuntimeError, "5, not 80 bytes"):
            self.transfer.get_object(ref)
        with self.assertRaisesRegex(TypeError, "array of objects"):
            self.transfer.put_object({"x": numpy.asarray([object()])})
        other = objects.MooncakeBundleTransfer(self.store, "another prefix")
        with self.assertRaisesRegex(ValueError, "namespace"):
            other.get_object(ref)
        for junk in ("handle", None, 7, b"", [ref]):
            with self.assertRaisesRegex(TypeError, "a reference to a bundle is a RemoteBundleRef or its handle, not "):
                self.transfer.get_object(junk)

    def test_what_cannot_be_reached_is_not_gone(self):
        ref = self.transfer.put_object({"x": numpy.arange(10), "y": b"abc"})
        handle = {"manifest_key": ref.manifest_key}
        self.counting.away = lambda key: True
        for call in (self.transfer.get_object, self.transfer.remove_bundle):
            with self.assertRaisesRegex(RuntimeError, "owner of the key does not answer .*-901.*try again when"):
                call(handle)
        # One whose bytes alone do not come.
        self.counting.away = lambda key: False
        with unittest.mock.patch.object(self.counting, "_cut", lambda name, keys: b"" if name == "get" else None):
            with self.assertRaisesRegex(RuntimeError, "exists, and its bytes did not come"):
                self.transfer.get_object(handle)
        # The manifest stays as long as anything that only it names.
        self.counting.away = lambda key: key.endswith("/buffer/x")
        with self.assertRaisesRegex(RuntimeError, "1 objects were not removed"):
            self.transfer.remove_bundle(handle)
        self.counting.away = lambda key: False
        self.transfer.remove_bundle(handle)
        self.assertEqual(self.left(), 0)
        with self.assertRaisesRegex(KeyError, "no bundle"):
            self.transfer.remove_bundle(handle)

    def test_a_batch_is_removed_behind_a_stage_that_is_gone(self):
        first = self.transfer.put_dataproto({"a": numpy.arange(4)}, stage="one")
        second = self.transfer.append_dataproto_fields(first, {"b": numpy.arange(4)}, stage="two")
        self.transfer.cleanup_dataproto(first)
        with self.assertRaisesRegex(KeyError, "no bundle"):
            self.transfer.cleanup_dataproto(objects.export_ref(second))
        self.assertEqual(self.left(), 0)

    def test_a_configuration_applies_to_all_objects(self):
        config = ReplicateConfig()
        config.group_ids = ["g"]
        ref = self.transfer.put_object({"x": numpy.arange(10), "y": numpy.arange(3)}, config=config)
        self.assertEqual(config.group_ids, ["g"])
        numpy.testing.assert_array_equal(self.transfer.get_object(ref)["y"], numpy.arange(3))
        config.group_ids = ["g", "h"]
        with self.assertRaisesRegex(ValueError, "group_ids"):
            self.transfer.put_object({"x": b"abc"}, config=config)

    def test_scalars_of_numpy_keep_their_type(self):
        scalars = {"w": numpy.float32(3), "n": numpy.int64(-4), "b": numpy.bool_(True), "t": numpy.str_("ab")}
        found = self.transfer.get_object(self.transfer.put_object(scalars))
        self.assertEqual(found, scalars)
        self.assertEqual([type(found[name]) for name in scalars], [type(value) for value in scalars.values()])
        ref = self.transfer.put_object({"raw": numpy.bytes_(b"xyz")})
        self.assertEqual(self.transfer.get_object(ref)["raw"], b"xyz")

    def test_types_of_arrays_come_back(self):
        fields = [("x", "<i4"), ("y", "<f8", (2, 3)), ("z", [("a", "S3"), ("b", ">u2")])]
        for dtype in (
            numpy.dtype(fields), numpy.dtype([("x", "i1"), ("y", "f8")], align=True), numpy.dtype([(("title", "n"), "i4")]),
            numpy.dtype("datetime64[us]"), numpy.dtype("<U5"), numpy.dtype(">f4"), numpy.dtype("V7"),
        ):  # fmt: skip
            array = numpy.frombuffer(bed.pattern(1, 5 * dtype.itemsize), dtype)
            array = numpy.full(5, "abcde") if dtype.kind == "U" else array
            ref = json.loads(json.dumps(objects.export_ref(self.transfer.put_dataproto({"a": array}))))
            for rows in (None, [3, 1]):
                seen = self.transfer.get_dataproto(ref, rows=rows)["batch"]["a"]
                self.assertEqual(seen.dtype, dtype)
                # An indexed copy by numpy leaves the padding of a record undefined: the rows are cut from the bytes.
                size, whole = dtype.itemsize, array.tobytes()
                records = [whole[row * size : (row + 1) * size] for row in rows or range(len(array))]
                self.assertEqual(seen.tobytes(), b"".join(records))
            one = self.transfer.get_object(self.transfer.put_object({"a": array[2]}))["a"]
            self.assertEqual(numpy.asarray(one).dtype, numpy.asarray(array[2]).dtype)
        spread = numpy.dtype({"names": ["a", "b"], "formats": ["<i4", "<i4"], "offsets": [0, 2]})
        masked = numpy.ma.array([1, 2, 3], mask=[0, 1, 0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for put, value, text in (
                (self.transfer.put_object, {"a": numpy.zeros(2, spread)}, "no description"),
                (self.transfer.put_object, {"a": masked}, "mask is not stored"),
                (self.transfer.put_dataproto, {"a": masked}, "mask is not stored"),
            ):
                with self.assertRaisesRegex(TypeError, text):
                    put(value)
        for column in ([masked, masked], [masked, masked[:2]], [{"a": masked}, None]):
            with self.assertRaises((TypeError, ValueError)):
                self.transfer.put_dataproto({"batch": {}, "non_tensor_batch": {"c": column}})
        numpy.testing.assert_array_equal(
            self.transfer.get_object(self.transfer.put_object({"a": numpy.ma.array([1, 2])}))["a"], [1, 2]
        )

    def test_names_that_are_not_read_are_refused(self):
        ref = self.transfer.put_object({"a": numpy.arange(4), "b": numpy.arange(3)})
        spec, into = self.transfer.read_spec(ref), numpy.full(4, -1)
        for wrong, destinations in (
            (spec, {"A": into}), (spec.select_members(["b"]), {"a": into}), (spec.slice_member("A", 0, 0, 1), None),
        ):  # fmt: skip
            with self.assertRaisesRegex(KeyError, "not read.*[aA]"):
                self.transfer.materialize_into(wrong, destinations)
        with self.assertRaisesRegex(ValueError, "at 0x0, where no memory is"):
            self.transfer.materialize_into(spec, {"a": objects.raw_destination(0, 32)})
        for destination in (into, objects.tensor_object_buffer(into.ctypes.data, 32)):
            with self.assertRaisesRegex(TypeError, "pre_registered raw_destination, not"):
                ranges = [objects.StructuredMemberRange("a", 0, 8, 0)]
                self.transfer.materialize_ranges_into(spec, ranges, {"a": destination})
        handle = self.transfer.put_dataproto(
            {"batch": {"i": numpy.arange(4)}, "non_tensor_batch": {"c": list("abcd")}, "meta_info": {"k": 1}}
        )
        for keywords, kind, text in (
            ({"destinations": {"I": into}}, KeyError, "not read.*'I'"),
            ({"destinations": {"i": into}, "fields": ["c"]}, KeyError, "not read.*'i'"),
            ({"destinations": {"c": into}}, ValueError, "no destinations.*'c'"),
            ({"meta_info_keys": ["k", "K"]}, KeyError, "meta_info.*'K'"),
        ):
            with self.assertRaisesRegex(kind, text):
                self.transfer.get_dataproto(handle, **keywords)
        self.assertTrue((into == -1).all())
        self.transfer.get_dataproto(handle, destinations={"i": into}, meta_info_keys=["k"])
        self.assertEqual(into.tolist(), [0, 1, 2, 3])

    def test_a_bundle_that_the_pool_has_no_room_for(self):
        with bed.own(memory="64m"):
            store = MooncakeDistributedStore()
            self.assertEqual(store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", ""), 0)
            self.addCleanup(store.close)
            transfer = objects.MooncakeBundleTransfer(store, "big")
            parts = {f"w{number}": numpy.full(8 << 20, number, numpy.uint8) for number in range(20)}
            with self.assertRaisesRegex(RuntimeError, "evicted while it was put"):
                transfer.put_object(parts, chunk_bytes=1 << 20)
            self.assertEqual(store.remove_by_regex("^big/"), 0)
            some = {"w0": parts["w0"], "w1": parts["w1"]}
            seen = transfer.get_object(transfer.put_object(some, chunk_bytes=1 << 20))
            numpy.testing.assert_array_equal(seen["w1"], some["w1"])
            store.close()

    def test_copy_modes(self):
        members = {"x": numpy.arange(100), "y": b"abc" * 100}
        for mode, calls in (("copy", {"put": 4}), ("zero_copy", {"put": 2, "batch_put_from": 1})):
            self.counting.calls = {}
            policy = objects.BundleTransferPolicy(copy_mode=mode)
            ref = self.transfer.put_object(members, policy=policy)
            seen = {name: count for name, count in self.counting.calls.items() if "register" not in name}
            self.assertEqual(seen, calls)
            self.assertEqual(self.transfer.get_object(ref)["y"], members["y"])
        policy = objects.BundleTransferPolicy(max_inflight_put=4, put_mode="parallel")
        ref = self.transfer.put_object(members, policy=policy, chunk_bytes=50)
        numpy.testing.assert_array_equal(self.transfer.get_object(ref)["x"], members["x"])


class Ranges(Case):
    """Ranges that are prepared once and read from many objects."""

    def prepared(self, chunk_bytes=100):
        self.memory = numpy.zeros(4096, numpy.uint8)
        self.store.register_buffer(self.memory.ctypes.data, self.memory.nbytes)
        self.addCleanup(self.store.unregister_buffer, self.memory.ctypes.data)
        at = -self.memory.ctypes.data % 64
        self.into = self.memory[at : at + 2048]
        destination = objects.raw_destination(self.into.ctypes.data, 2048, self.memory, pre_registered=True)
        array = numpy.arange(256, dtype=numpy.int32)
        ref = self.transfer.put_object({"x": array, "y": array + 1}, chunk_bytes=chunk_bytes)
        return array, self.transfer.read_spec(ref), destination

    def range(self, of, length, to, name="x", **more):
        return objects.StructuredMemberRange(name, of, length, to, **more)

    def test_ranges_are_read_from_objects_of_the_same_layout(self):
        array, spec, destination = self.prepared()
        ranges = [self.range(400, 240, 0), self.range(0, 8, 240), self.range(640, 40, 1024)]
        plan = self.transfer.prepare_member_ranges(spec, ranges, destination)
        for more in range(3):
            ref = self.transfer.put_object({"x": array + more}, chunk_bytes=100)
            self.into[:] = 0
            result = self.transfer.materialize_prepared_ranges_into(self.transfer.read_spec(ref), plan, destination)
            self.assertIs(result.objects["x"], destination)
            words = self.into.view(numpy.int32)
            numpy.testing.assert_array_equal(words[:60], numpy.arange(100, 160) + more)
            numpy.testing.assert_array_equal(words[60:62], numpy.arange(2) + more)
            numpy.testing.assert_array_equal(words[256:266], numpy.arange(160, 170) + more)
        for other in (self.transfer.put_object({"x": array}), self.transfer.put_object({"x": array.astype("int64")})):
            with self.assertRaises(objects.PreparedRangeLayoutChanged):
                self.transfer.materialize_prepared_ranges_into(self.transfer.read_spec(other), plan, destination)

    def test_several_members_at_once(self):
        array, spec, destination = self.prepared()
        second = objects.raw_destination(destination.ptr + 1024, 1024, self.memory, pre_registered=True)
        ranges = [self.range(0, 16, 0), self.range(16, 16, 0, "y")]
        self.transfer.materialize_ranges_into(spec, ranges, {"x": destination, "y": second})
        words = self.into.view(numpy.int32)
        numpy.testing.assert_array_equal(words[:4], array[:4])
        numpy.testing.assert_array_equal(words[256:260], array[4:8] + 1)

    def test_ranges_that_make_no_sense(self):
        _, spec, destination = self.prepared()
        unregistered = objects.raw_destination(destination.ptr, 2048, self.memory)
        cases = (
            ([], destination, ValueError, "no ranges"),
            ([self.range(0, 8, 0), self.range(8, 8, 4)], destination, ValueError, "overlap"),
            ([self.range(2, 8, 0)], destination, ValueError, "aligned to 4"),
            ([self.range(0, 8, 8, alignment=16)], destination, ValueError, "aligned to 16"),
            ([self.range(0, 8, 0, alignment=3)], destination, ValueError, "power of two"),
            ([self.range(1020, 8, 0)], destination, ValueError, "past the end"),
            ([self.range(0, 8, 2044)], destination, ValueError, "past the end"),
            ([self.range(0, 0, 0)], destination, ValueError, "above"),
            ([self.range(True, 8, 0)], destination, TypeError, "number"),
            ([self.range(0, 8, 0, "z")], destination, KeyError, "not selected"),
            ([self.range(0, 8, 0), self.range(0, 8, 8, "y")], destination, ValueError, "one member"),
            ([self.range(0, 8, 0)], unregistered, ValueError, "pre_registered"),
        )  # fmt: skip
        for ranges, into, error, text in cases:
            with self.assertRaisesRegex(error, text):
                self.transfer.prepare_member_ranges(spec, ranges, into)


def columns():
    """Returns columns of six rows, of all kinds that need no torch."""
    return {
        "text": ["", "two", None, "vier", "ünf", "x" * 300],
        "blob": [b"", b"\x00\xff", None, bytearray(b"b"), memoryview(b"m"), b"z" * 100],
        "number": [1, None, -3, 4, 5, 2**40],
        "flag": [True, False, None, True, True, False],
        "ragged": [numpy.arange(n, dtype=numpy.int32) if n else None for n in range(6)],
        "regular": [numpy.full((2, 3), n, numpy.float16) for n in range(6)],
        "lists": [[1, 2], [], [3], None, [4, 5, 6], [7]],
        "json": [{"a": 1}, {"b": [1, {"c": None}]}, None, [1, "x"], {}, {"a": 2.5}],
        "mixed": [1, 2.5, "x", None, [1], {"a": 1}],
        "media": [[b"a", b"bc"], [], None, [b"d"], [b""], [b"e", b"f", b"g"]],
        "tree": [
            {"x": numpy.arange(3), "y": {"z": b"q"}, "l": [{"t": numpy.ones(2)}, {"t": None}]},
            {"x": numpy.arange(1), "y": {}},
            None,
            {"y": None, "l": []},
            {"x": None, "y": {"z": None}, "l": [None]},
            {"x": numpy.arange(0), "label": "six"},
        ],
    }


class Batches(Case):
    """Batches with columns of Python's values."""

    def assert_same(self, seen, expected, what=""):
        if isinstance(expected, numpy.ndarray):
            self.assertIsInstance(seen, numpy.ndarray, what)
            self.assertEqual(seen.dtype, expected.dtype, what)
            numpy.testing.assert_array_equal(seen, expected, what)
        elif isinstance(expected, dict):
            self.assertEqual(list(seen), list(expected), what)
            for key, value in expected.items():
                self.assert_same(seen[key], value, f"{what}.{key}")
        elif isinstance(expected, (list, tuple)):
            self.assertEqual(len(seen), len(expected), what)
            for number, (one, other) in enumerate(zip(seen, expected)):
                self.assert_same(one, other, f"{what}[{number}]")
        elif isinstance(expected, (bytearray, memoryview)):
            self.assertEqual(seen, bytes(expected), what)
        else:
            self.assertEqual((type(seen), seen), (type(expected), expected), what)

    def batch(self):
        dense = {"ids": numpy.arange(24).reshape(6, 4), "empty": numpy.zeros((6, 0))}
        return {"batch": dense, "non_tensor_batch": columns(), "meta_info": {"step": 7}}

    def test_all_kinds_of_columns_by_rows(self):
        batch = self.batch()
        ref = self.transfer.put_dataproto(batch, chunk_bytes=64)
        handle = json.loads(json.dumps(objects.export_ref(ref)))
        for rows in (None, slice(None), slice(1, 5), slice(0, 6, 2), [5, 0, 0, 3], [-1], [], slice(3, 3)):
            seen = self.transfer.get(handle, rows=rows)
            numbers = list(range(6)) if rows is None else list(range(6))[rows] if isinstance(rows, slice) else rows
            for name, value in batch["batch"].items():
                numpy.testing.assert_array_equal(seen["batch"][name], value[numbers] if numbers else value[:0])
            for name, column in columns().items():
                found = list(seen["non_tensor_batch"][name])
                self.assert_same(found, [column[number] for number in numbers], f"{name} {rows}")
        self.transfer.cleanup_dataproto(handle)
        self.assertEqual(self.left(), 0)

    def test_a_flat_mapping(self):
        data = {
            "ids": numpy.arange(6),
            **{name: columns()[name] for name in ("text", "ragged")},
            "step": 3,
            "tags": ["a"],
        }
        seen = self.transfer.get(self.transfer.put(data, type="dict"), type="dict")
        self.assertEqual((seen["step"], seen["tags"], seen["text"]), (3, ["a"], data["text"]))
        self.assertIsInstance(seen["ragged"], list)
        with self.assertRaisesRegex(ValueError, "ambiguous"):
            self.transfer.put({"a": numpy.arange(2), "b": numpy.arange(3)}, type="dict")

    def test_stages_append_fields_and_replace_them(self):
        first = self.transfer.put_dataproto({"a": numpy.arange(4)}, stage="one")
        second = self.transfer.append_dataproto_fields(first, {"b": numpy.arange(4) + 1}, stage="one")
        third = self.transfer.append_dataproto_fields(second, {"c": numpy.arange(4) + 2}, stage="two")
        self.assertEqual(list(self.transfer.get(first)["batch"]), ["a"])
        self.assertEqual(list(self.transfer.get(third)["batch"]), ["a", "b", "c"])
        for data, stage, text in (
            ({"a": numpy.arange(4)}, "three", "already exist"),
            ({"d": numpy.arange(5)}, "three", "batch size"),
        ):
            with self.assertRaisesRegex(ValueError, text):
                self.transfer.append_dataproto_fields(third, data, stage=stage)
        with self.assertRaisesRegex(ValueError, "must include"):
            self.transfer.append_dataproto_fields(third, {"a": numpy.arange(4)}, stage="one", overwrite=True)
        with self.assertRaisesRegex(ValueError, "other stages"):
            more = {"a": numpy.arange(4), "c": numpy.arange(4)}
            self.transfer.append_dataproto_fields(third, more, stage="two", overwrite=True)
        fourth = self.transfer.append_dataproto_fields(third, {"c": numpy.zeros(4)}, stage="two", overwrite=True)
        numpy.testing.assert_array_equal(self.transfer.get(fourth, rows=[1])["batch"]["c"], [0])
        # One that nobody publishes goes alone.
        fifth = self.transfer.append_dataproto_fields(fourth, {"d": numpy.arange(4)}, stage="one")
        for _ in range(2):
            self.transfer.cleanup_dataproto_append(fourth, fifth)
        self.assertEqual(list(self.transfer.get(fourth)["batch"]), ["a", "b", "c"])
        # Also where the manifest that it continues is lost: what others have of that one stays.
        fifth = self.transfer.append_dataproto_fields(fourth, {"d": numpy.arange(4)}, stage="one")
        sixth = self.transfer.append_dataproto_fields(fifth, {"e": numpy.arange(4)}, stage="one")
        self.store.remove(fourth.stage_refs["one"].manifest_key)
        self.transfer.cleanup_dataproto_append(objects.export_ref(fourth), sixth)
        self.assertEqual(list(self.transfer.get(fourth)["batch"]), ["a", "b", "c"])
        self.transfer.cleanup_dataproto(fourth)
        self.assertEqual(self.left(), 0)

    def test_rows_of_several_types_come_back_as_they_are(self):
        array = numpy.array
        big = 2**53 + 1
        for column in (
            [array([big]), array([0.5])],
            [array([2**63 + 1], numpy.uint64), None, array([[-1, 2]])],
            [array([True]), array([2]), array([1.5], numpy.float16), array(7, numpy.int8)],
            [array([big]), array([1 + 2j]), array([], numpy.complex64)],
            [array([1], ">i4"), array([1, 2], "<i8")],
            [[big], [0.5]], [[True], [1]], [[2**63], [-1]], [[2**63, -1], []], [[], [big, 2]], [[1.5], [], None],
        ):  # fmt: skip
            handle = objects.export_ref(self.transfer.put_dataproto({"batch": {}, "non_tensor_batch": {"c": column}}))
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for rows in (list(range(len(column))), [1, 0, 1]):
                    seen = list(self.transfer.get_dataproto(handle, rows=rows)["non_tensor_batch"]["c"])
                    self.assert_same(seen, [column[row] for row in rows], str(column))
                self.assert_same(list(self.transfer.get_dataproto(handle)["non_tensor_batch"]["c"]), column, str(column))

    def test_lists_of_arrays_of_any_length(self):
        array = lambda number: numpy.arange(number)
        for column in (
            [[array(at) for at in range(length)] for length in (0, 3, 8)],
            [[array(at) for at in range(length)] for length in (9, 1, 12)],
            [[array(1)] * 9, None, [], [array(2).astype(numpy.int8)]],
            [[{"a": array(2), "b": [array(at) for at in range(20)]}] * 10, [{"b": None}]],
            [{"l": [array(at) for at in range(9)]}, {"l": [array(3)]}, {}],
        ):
            handle = objects.export_ref(self.transfer.put_dataproto({"batch": {}, "non_tensor_batch": {"c": column}}))
            for rows in (None, [2 % len(column), 0, 1], []):
                expected = column if rows is None else [column[row] for row in rows]
                seen = list(self.transfer.get_dataproto(handle, rows=rows)["non_tensor_batch"]["c"])
                self.assert_same(seen, expected, str(rows))
        loop = []
        loop.append(loop)
        for column in ([[array(1)] * 9 + [5], [object()]], [loop, loop], [[array(1), 5], [2]]):
            with self.assertRaisesRegex(ValueError, "unsupported"):
                self.transfer.put_dataproto({"batch": {}, "non_tensor_batch": {"c": column}})

    def test_numbers_that_do_not_fit_the_type_of_a_schema(self):
        array = numpy.array

        def put(column, codec, dtype):
            metadata = {} if dtype is None else {"dtype": dtype}
            data = {"batch": {}, "non_tensor_batch": {"c": column}}
            schemas = {"c": objects.FieldSchema(codec, metadata=metadata)}
            ref = self.transfer.put_dataproto(data, field_schemas=schemas)
            return list(self.transfer.get_dataproto(ref)["non_tensor_batch"]["c"])

        for column, codec, dtype in (
            ([[300], [1]], "typed_ragged", "uint8"), ([[-1], [2]], "typed_ragged", "uint8"),
            ([[1.9], [2]], "typed_ragged", "uint8"), ([[2], [1]], "typed_ragged", "bool"),
            ([array([300]), array([1, 2])], "typed_ragged", "uint8"), ([array([float("nan")])], "typed_ragged", "int64"),
            ([array([2.0**63])], "typed_ragged", "int64"), ([array([2**64 - 1], "u8")], "typed_ragged", "int64"),
            ([array([1e300])], "typed_ragged", "float32"), ([[1e300]], "typed_ragged", "float32"),
            ([array([2**53 + 1])], "typed_ragged", "float64"), ([array([2**24 + 1])], "typed_ragged", "float32"),
            ([array([1j])], "typed_ragged", "float64"), ([array([3])], "typed_ragged", "bool"),
            ([[2**53 + 1], [0.5]], "typed_ragged", None), ([[True], [1]], "typed_ragged", None),
            ([[2**53 + 1, 0.5]], "typed_ragged", None), ([[1], array([0.5])], "typed_ragged", None),
            ([2.7, 1], "ndarray", "int8"), ([300, 1], "ndarray", "int8"), ([numpy.int64(300), 1], "ndarray", "int8"),
            ([2**53 + 1, 0.5], "ndarray", None),
        ):  # fmt: skip
            with self.assertRaisesRegex(ValueError, "does not fit the type|of several kinds", msg=f"{column} {dtype}"):
                put(column, codec, dtype)
        self.assertEqual(self.left(), 0)
        for column, codec, dtype, expected in (
            ([[1.0, 255], None], "typed_ragged", "uint8", [[1, 255], None]),
            ([[0.1], [2]], "typed_ragged", "float32", [[float(numpy.float32(0.1))], [2.0]]),
            ([array([1.0, -2.0]), array([3])], "typed_ragged", "int8", [array([1.0, -2.0]), array([3])]),
            ([array([2**53]), [1.0]], "typed_ragged", "float64", [array([2**53]), [1.0]]),
            ([array([float("inf")]), array([1 + 0j])], "typed_ragged", "float32", [array([float("inf")]), array([1 + 0j])]),
            ([[1], array([5], numpy.int8)], "typed_ragged", None, [[1], array([5], numpy.int8)]),
            ([1, 2.0, None], "ndarray", "int16", [1, 2, None]),
            ([float("nan"), 1.5], "ndarray", "float32", [float(numpy.float32("nan")), 1.5]),
        ):  # fmt: skip
            numpy.testing.assert_equal(put(column, codec, dtype), expected)

    def test_names_that_are_those_of_parts_of_a_column(self):
        numbers, tree = numpy.arange(2), [{"k": numpy.arange(1)}, {"k": numpy.arange(2)}]
        both = lambda first, second: {"batch": {}, "non_tensor_batch": {**first, **second}}
        self.counting.calls = {}
        for first, second in (
            ({"a": ["x", "yy"]}, {"a.data": numbers}),
            ({"a": ["x", "yy"]}, {"a.nulls": numbers}),
            ({"a": [numbers, numbers]}, {"a.shapes": numbers}),
            ({"a": tree}, {"a.leaf.0": ["p", "q"]}),
        ):
            for batch in (both(first, second), both(second, first)):
                with self.assertRaisesRegex(ValueError, "fields 'a.* have the same member, 'non_tensor_batch.a"):
                    self.transfer.put_dataproto(batch)
            self.assertEqual(self.counting.calls, {})
        for first, second in ((["x", "yy"], {"a.data": numbers}), (tree, {"a.leaf.0": ["p", "q"]})):
            ref = self.transfer.put_dataproto(both({"a": first}, {}), stage="one")
            with self.assertRaisesRegex(ValueError, "fields 'a' and one that is appended have the same member"):
                self.transfer.append_dataproto_fields(ref, both(second, {}), stage="one")
            # Another stage has members of its own.
            ref = self.transfer.append_dataproto_fields(ref, both(second, {}), stage="two")
            seen = self.transfer.get_dataproto(objects.export_ref(ref))["non_tensor_batch"]
            self.assert_same(list(seen["a"]), first)
            self.transfer.cleanup_dataproto(ref)
        self.assertEqual(self.left(), 0)

    def test_handles_that_are_none(self):
        put = lambda meta_info: self.transfer.put_dataproto({"batch": {"i": numpy.arange(2)}, "meta_info": meta_info})
        for meta_info, text in (
            ({"a": float("nan")}, "no nan"), ({"a": [float("-inf")]}, "no -inf"), ({"a": numpy.float32("inf")}, "no inf"),
            ({1: "a", "1": "b"}, r"\[1\] are there twice"), ({"a": {None: 1, "None": 2}}, r"\[None\] are there twice"),
        ):  # fmt: skip
            with self.assertRaisesRegex(ValueError, text):
                objects.export_ref(put(meta_info))
        self.assertEqual(objects.export_ref(put({1: numpy.float32(2)}))["meta_info"], {"1": 2.0})
        batch = {"batch": {"i": numpy.arange(4)}, "non_tensor_batch": {"c": ["a", "b", "c", "d"]}}
        handle = objects.export_ref(self.transfer.put_dataproto(batch))
        parts = handle["encoded_non_tensor"]["c"]["payload_members"]
        for name, values in (
            ("batch_size", (None, "4", 1.5, True, -1)),
            (
                "encoded_non_tensor",
                (
                    {"c": 5}, {"c": {}}, {"c": {"codec": 1, "payload_members": parts}}, {"c": {"codec": "utf8_ragged"}},
                    {"c": {"codec": "utf8_ragged", "payload_members": {"data": 5}}},
                    {"c": {"codec": "utf8_ragged", "payload_members": {"data": parts["data"]}}},
                    {"c": {"codec": "utf8_ragged", "rows": "x", "payload_members": parts}},
                    {"c": {"codec": "utf8_ragged", "metadata": 5, "payload_members": parts}},
                    {"c": {"codec": "typed_ragged", "metadata": {"dtype": "i8"}, "payload_members": parts}},
                    {"c": {"codec": "no such", "payload_members": parts}},
                ),
            ),
        ):  # fmt: skip
            for value in values:
                for rows in (None, [0, 1]):
                    with self.assertRaises(ValueError, msg=f"{name} {value} {rows}"):
                        self.transfer.get_dataproto({**handle, name: value}, rows=rows)
        del handle["batch_size"]
        with self.assertRaisesRegex(ValueError, "batch_size is a number, 0 or above, not None"):
            self.transfer.get_dataproto(handle)

    def test_json_holds_what_comes_back(self):
        put = lambda column: self.transfer.put_dataproto({"batch": {}, "non_tensor_batch": {"x": column}})
        with unittest.mock.patch.dict(sys.modules, {"msgpack": None}):
            for column in ([{1: 2}, {3: 4}], [{1: "a", "1": "b"}], [[{"a": {None: 1}}]], [{True: 1}]):
                with self.assertRaisesRegex(ValueError, "msgpack.* is not installed.*keys of a mapping are text"):
                    put(column)
            for column in ([{"1": "a", "b": [{"c": None}]}], [{}, None]):
                seen = self.transfer.get_dataproto(put(column))["non_tensor_batch"]["x"]
                self.assertEqual(list(seen), column)
        loop = {}
        loop["loop"] = loop
        for column in ([{1: 2**80}], [loop]):
            with self.assertRaises(ValueError):
                put(column)

    def test_columns_without_a_codec(self):
        for column, text in (([object()] * 2, "unsupported"), ([{1, 2}, None], "unsupported")):
            with self.assertRaisesRegex(ValueError, text):
                self.transfer.put_dataproto({"batch": {}, "non_tensor_batch": {"x": column}})
        schema = objects.FieldSchema("no such codec")
        with self.assertRaisesRegex(ValueError, "no such codec"):
            self.transfer.put({"x": [1, 2]}, type="dict", field_schemas={"x": schema})
        self.assertEqual(self.left(), 0)


@unittest.skipIf(numpy is None, "numpy is not installed")
class Structure(unittest.TestCase):
    """Codecs that the values of a column suggest, and columns that are taken apart."""

    def test_codecs_by_values(self):
        for values, wanted in (
            ([1, 2.0, None], ("ndarray", True)),
            ([[1, 2], [3]], ("typed_ragged", True)),
            ([numpy.arange(2), None], ("typed_ragged", True)),
            ([numpy.asarray([{}], object)], ("msgpack_ragged", False)),
            ([b"x", bytearray(b"y")], ("bytes_ragged", True)),
            ([[b"x"], []], ("media_list_ragged", True)),
            (["x", objects.MISSING, None], ("utf8_ragged", True)),
            ([{"a": 1}, [1, "x"]], ("msgpack_ragged", True)),
            ([{"a": 1}, object()], ("msgpack_ragged", False)),
            ([], ("msgpack_ragged", False)),
        ):
            decision = objects._choose_leaf_codec(values)
            self.assertEqual((decision.codec, decision.accepted), wanted, values)

    def test_columns_are_taken_apart(self):
        leaves, nodes = [], []
        rows = [{"a.b": 1, "l": [{"x": None}]}, None, {"l": [{"x": 2}, {}]}]
        objects.infer_structure("r", rows, leaves, nodes)
        self.assertEqual([(node.path, node.node_type, node.children) for node in nodes], [
            ("r", "dict", ["a.b", "l"]), ("r.l", "list", [0, 1]), ("r.l[0]", "dict", ["x"]), ("r.l[1]", "dict", []),
        ])  # fmt: skip
        self.assertEqual([node.row_mask for node in nodes[:2]], [[True, False, True], [True, False, True]])
        self.assertEqual(nodes[1].lengths, [1, 0, 2])
        self.assertEqual({leaf.path: leaf.values for leaf in leaves}, {
            "r.a\\.b": [1, None, objects.MISSING], "r.l[0].x": [None, None, 2],
        })  # fmt: skip
        deep = 1
        for _ in range(40):
            deep = {"a": deep}
        with self.assertRaisesRegex(ValueError, "32 levels"):
            objects.infer_structure("r", [deep], [], [])


class Catalog(Case):
    """Batches in a catalog."""

    def setUp(self):
        super().setUp()
        self.catalog = DataProtoCatalog()
        self.failures = []
        self.tracked = DataProtoCatalogTransfer(self.transfer, self.call)

    def call(self, method, *arguments, **keywords):
        result = getattr(self.catalog, method)(*arguments, **keywords)
        if self.failures and self.failures[0] == method:
            self.failures.pop(0)
            raise ConnectionError("the answer was lost")
        return result

    class Rows(dict):
        """A batch with a length."""

        def __len__(self):
            return 2

    def put(self, value, keys=("a", "b"), name="value"):
        batch = self.Rows({name: numpy.asarray(value)})
        return self.tracked.put(batch, partition="p", keys=keys, tags=[{"v": one} for one in value])

    def read(self, keys):
        plan = self.tracked.resolve("p", keys)
        found = []
        for group in plan["field_groups"]:
            for fragment, row in group["locations"]:
                batch = self.transfer.get(plan["handles"][fragment], rows=[row])["batch"]
                found.append({name: int(batch[name][0]) for name in group["fields"]})
        self.tracked.release_read(plan["read_token"])
        return found

    def test_batches_go_when_nobody_refers_to_them(self):
        self.put([1, 2])
        self.assertEqual(self.read(["b", "a"]), [{"value": 2}, {"value": 1}])
        plan = self.tracked.resolve("p", ["a"])
        self.put([3, 4])
        (handle,) = plan["handles"].values()
        self.assertEqual(self.transfer.get(handle)["batch"]["value"].tolist(), [1, 2])
        self.tracked.release_read(plan["read_token"])
        with self.assertRaises(KeyError):
            self.transfer.get(handle)
        self.assertEqual(self.tracked.list(), {"p": {"a": {"v": 3}, "b": {"v": 4}}})
        self.tracked.remove("p", ["a", "b"])
        self.assertEqual((self.tracked.list(), self.left()), ({}, 0))

    def test_appends(self):
        self.put([1, 2])
        plan = self.tracked.resolve("p", ["a", "b"])
        ((name, handle),) = plan["handles"].items()
        self.tracked.release_read(plan["read_token"])
        more = self.Rows({"more": numpy.asarray([5, 6])})
        options = {"partition": "p", "keys": ["a", "b"], "stage": "default"}
        self.tracked.append(name, handle, more, **options)
        self.assertEqual(self.read(["b"]), [{"value": 2, "more": 6}])
        with self.assertRaisesRegex(ValueError, "stale"):
            self.tracked.append(name, handle, more, **options)
        self.tracked.drain()
        self.assertEqual(self.left(), 0)
        with self.assertLogs("mooncake"), self.assertRaisesRegex(RuntimeError, "drained"):
            self.put([1, 2])

    def rejected(self, meanwhile):
        """Appends fields to a batch that changes meanwhile; what was appended is removed."""
        self.put([1, 2])
        plan = self.tracked.resolve("p", ["a", "b"])
        ((name, handle),) = plan["handles"].items()
        self.tracked.release_read(plan["read_token"])
        more = self.Rows({"more": numpy.asarray([5, 6])})

        def call(method, *arguments, **keywords):
            if method == "publish_append" and meanwhile:
                meanwhile.pop()(name, handle)
            return self.call(method, *arguments, **keywords)

        late = DataProtoCatalogTransfer(self.transfer, call)
        with self.assertRaisesRegex(ValueError, "stale DataProto append handle"):
            late.append(name, handle, more, partition="p", keys=["a", "b"], stage="default")
        return late

    def test_an_append_that_is_rejected(self):
        # The batch is replaced, and gone: nothing else of the transfer fails.
        late = self.rejected([lambda name, handle: self.put([3, 4])])
        late.put(self.Rows({"value": numpy.asarray([7, 8])}), partition="q", keys=["a", "b"])
        late.close()
        self.assertEqual(self.read(["a", "b"]), [{"value": 3}, {"value": 4}])
        late.remove("p", ["a", "b"])
        late.remove("q", ["a", "b"])
        self.assertEqual(self.left(), 0)
        # Another append was first: its batch has what both continue.
        other = {"partition": "p", "keys": ["a", "b"], "stage": "default"}
        fields = self.Rows({"other": numpy.asarray([7, 8])})
        late = self.rejected([lambda name, handle: self.tracked.append(name, handle, fields, **other)])
        self.assertEqual(self.read(["a", "b"]), [{"value": 1, "other": 7}, {"value": 2, "other": 8}])
        late.drain()
        self.assertEqual(self.left(), 0)

    def test_an_append_that_is_rejected_and_cannot_be_removed(self):
        def replace(name, handle):
            self.put([3, 4])
            self.counting.away = lambda key: True

        with self.assertLogs("mooncake"):
            late = self.rejected([replace])
        with self.assertLogs("mooncake"), self.assertRaisesRegex(RuntimeError, "1 removals of refused batches"):
            late.close()
        self.counting.away = lambda key: False
        late.close()
        self.assertEqual(self.read(["a"]), [{"value": 3}])
        late.drain()
        self.assertEqual(self.left(), 0)

    def test_batches_that_cannot_be_reached_are_removed_later(self):
        self.put([1, 2])
        self.counting.away = lambda key: True
        with self.assertLogs("mooncake") as said:
            self.tracked.remove("p", ["a", "b"])
        self.assertIn("a retired batch was not removed", said.output[0])
        with self.assertLogs("mooncake"), self.assertRaisesRegex(RuntimeError, "1 retired batches were not removed"):
            self.tracked.drain()
        self.counting.away = lambda key: False
        self.tracked.drain()
        self.assertEqual(self.left(), 0)

    def test_a_batch_without_a_handle_is_removed(self):
        class Batch:
            """A batch whose metadata is not JSON."""

            batch, non_tensor_batch, meta_info = {"value": numpy.asarray([1, 2])}, {}, {"x": float("nan")}

            def __len__(self):
                return 2

        with self.assertRaisesRegex(ValueError, "JSON, which has no nan"):
            self.tracked.put(Batch(), partition="p", keys=["a", "b"])
        self.assertEqual(self.left(), 0)
        self.tracked.drain()

    def test_a_refusal_is_raised_once(self):
        self.put([1, 2])
        empty = self.Rows()
        for _ in range(2):
            with self.assertLogs("mooncake"), self.assertRaisesRegex(ValueError, "exactly one DataProto stage"):
                self.tracked.put(empty, partition="p", keys=["c", "d"])
        self.put([3, 4])
        self.assertEqual(self.read(["a"]), [{"value": 3}])
        # One whose answers were lost, and that is refused when it is made again.
        catalog, self.catalog = self.catalog, DataProtoCatalog()
        self.catalog.drain()
        lost = [ConnectionError("no route")] * 2

        def unreachable(method, *arguments, **keywords):
            if lost and method == "publish":
                raise lost.pop()
            return self.call(method, *arguments, **keywords)

        tracked = DataProtoCatalogTransfer(self.transfer, unreachable)
        with self.assertLogs("mooncake"), self.assertRaises(ConnectionError):
            tracked.put(self.Rows({"value": numpy.asarray([1, 2])}), partition="p", keys=["a", "b"])
        with self.assertLogs("mooncake") as said:
            tracked.close()
        self.assertIn("was refused: the catalog was drained", said.output[0])
        tracked.close()
        # An answer that cannot be decoded says nothing: the publication is made again.
        self.catalog, lost[:] = catalog, [json.JSONDecodeError("no answer", "", 0)]
        with self.assertLogs("mooncake"):
            tracked.put(self.Rows({"value": numpy.asarray([5, 6])}), partition="p", keys=["a", "b"])
        self.assertEqual(self.read(["b"]), [{"value": 6}])
        self.tracked.drain()
        self.assertEqual(self.left(), 0)

    def test_lost_answers_publish_once(self):
        self.failures = ["publish", "ack_publication"]
        with self.assertLogs("mooncake"):
            self.put([1, 2])
        self.assertEqual(self.read(["a"]), [{"value": 1}])
        self.failures = ["publish", "publish"]
        with self.assertLogs("mooncake"), self.assertRaises(ConnectionError):
            self.put([3, 4])
        self.tracked.close()
        self.assertEqual(self.read(["a"]), [{"value": 3}])
        self.tracked.drain()
        self.assertEqual(self.left(), 0)


class Registering:
    """A store that registers memory as the real one does: none that overlaps."""

    def __init__(self):
        self.regions = {}

    def register_buffer(self, address, size):
        if any(address < begin + length and begin < address + size for begin, length in self.regions.items()):
            return -600
        self.regions[address] = size
        return 0

    def unregister_buffer(self, address):
        del self.regions[address]


@unittest.skipIf(numpy is None, "numpy is not installed")
class Registered(unittest.TestCase):
    """Registrations that calls share."""

    def setUp(self):
        self.store = Registering()
        self.kept = Registrations.of(self.store)

    def take(self, *parts, whole=None):
        begin, end = min(at for at, _ in parts), max(at + size for at, size in parts)
        return self.kept.take([(whole or (begin, end - begin), list(parts))])

    def test_memory_within_a_registration_keeps_it(self):
        self.assertIs(Registrations.of(self.store), self.kept)
        first = self.take((0, 10), (90, 10))
        second = self.take((20, 10), (40, 10))
        third = self.take((0, 10), (90, 10))
        self.kept.give(first)
        self.assertEqual(self.store.regions, {0: 100})
        self.kept.give(third)
        self.kept.give(second)
        self.assertEqual(self.store.regions, {})
        # Beyond one at either end, and around one: part by part.
        first = self.take((20, 10), (40, 10))
        others = [self.take((0, 10), (30, 5)), self.take((35, 5), (50, 10)), self.take((10, 5), (30, 10), (70, 10))]
        self.assertEqual(self.store.regions, {20: 30, 0: 10, 50: 10, 10: 5, 70: 10})
        self.kept.give(first)
        self.assertEqual(self.store.regions, {20: 30, 0: 10, 50: 10, 10: 5, 70: 10})
        for taken in others:
            self.kept.give(taken)
        self.assertEqual(self.store.regions, {})

    def test_memory_that_overlaps_waits(self):
        first, done = self.take((20, 20)), []
        waits = threading.Thread(target=lambda: done.append(self.take((10, 5), (30, 20))), daemon=True)
        waits.start()
        self.kept.give(first)
        waits.join(60)
        self.assertEqual(self.store.regions, {10: 40})
        self.kept.give(done.pop())
        first = self.take((20, 20))
        with unittest.mock.patch("mooncake._registrations._WAIT_S", 0):
            with self.assertRaisesRegex(RuntimeError, "memory of its own"):
                self.take((10, 5), (30, 20))
        self.assertEqual(self.store.regions, {20: 20})
        self.kept.give(first)
        self.assertEqual(self.store.regions, {})

    def test_memory_of_an_owner_and_failures(self):
        self.store.register_buffer(0, 100)
        self.kept.give(self.take((10, 20)))
        self.assertEqual(self.store.regions, {0: 100})
        with unittest.mock.patch.object(self.store, "register_buffer", lambda address, size: 0 if address < 300 else -5):
            with self.assertRaisesRegex(RuntimeError, "register_buffer failed for 10 bytes: -5"):
                self.store.regions[200] = 10
                self.kept.take([((200, 10), [(200, 10)]), ((300, 10), [(300, 10)])])
        self.assertEqual(self.store.regions, {0: 100})


class Threads(Case):
    """Calls of many threads on one transfer."""

    def in_threads(self, count, work):
        """Runs `work(number)` in threads; raises the first failure."""
        failures = []

        def one(number):
            try:
                work(number)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])

    def test_threads_read_into_slices_of_one_array(self):
        source = numpy.frombuffer(bed.pattern(1, 64_000), numpy.uint8)
        parts = {f"m{at}": source[at * 1000 : (at + 1) * 1000] for at in range(64)}
        ref = self.transfer.put_object(parts)
        rows = self.transfer.put_dataproto({"x": source.reshape(64, 1000)})
        memory = numpy.zeros(64_000, numpy.uint8)
        zero_copy = objects.BundleTransferPolicy(copy_mode="zero_copy")

        def work(number):
            names = [f"m{at}" for at in range(number, 64, 8)]
            into = {name: memory[int(name[1:]) * 1000 :][:1000] for name in names}
            own = memory[number * 8000 :][:8000].reshape(8, 1000)
            for _ in range(20):
                for value in into.values():
                    value[:] = 0
                self.transfer.materialize_into(self.transfer.read_spec(ref).select_members(names), into)
                for name, value in into.items():
                    numpy.testing.assert_array_equal(value, parts[name])
                self.transfer.remove_bundle(self.transfer.put_object({"x": source[number * 10 :]}, policy=zero_copy))
            turn.wait()
            for _ in range(20):
                own[:] = 0
                chosen = list(range(number * 8, number * 8 + 8))
                self.transfer.get_dataproto(rows, rows=chosen, destinations={"x": own})
                numpy.testing.assert_array_equal(own.reshape(-1), source[number * 8000 :][:8000])

        turn = threading.Barrier(8)
        self.in_threads(8, work)
        self.assertEqual(self.store.unregister_buffer(memory.ctypes.data), -600)

    def test_threads_put_and_get(self):
        def work(number):
            for turn in range(5):
                array = numpy.full(5000, number * 10 + turn)
                ref = self.transfer.put_object({"x": array, "y": array * 2})
                numpy.testing.assert_array_equal(self.transfer.get_object(ref)["y"], array * 2)
                self.transfer.remove_bundle(ref)

        self.in_threads(4, work)
        self.assertEqual(self.left(), 0)
