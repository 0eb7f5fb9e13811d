"""Probes, snapshots of ranged reads, and the options of puts that Mooncake has since 0.3.14."""

import contextlib
import ctypes
import io
import random
import threading
import unittest

import bed
import kvplane
from mooncake import _ranges
from mooncake.store import ExistOptions, MooncakeDistributedStore, RangedReadSnapshot, ReplicateConfig


class Case(unittest.TestCase):
    """A store with registered memory."""

    def setUp(self):
        bed.bed()
        self.store = self.opened()
        self.memory = bytearray(1 << 16)
        self.at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.assertEqual(self.store.register_buffer(self.at, len(self.memory)), 0)
        self.prefix = self.id().rsplit(".", 1)[-1]

    def opened(self):
        store = MooncakeDistributedStore()
        self.assertEqual(store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", ""), 0)
        self.addCleanup(store.close)
        return store

    def key(self, number=0):
        return f"{self.prefix}/{number}"


class Probes(Case):
    """Tests for objects."""

    def test_probes(self):
        self.assertEqual(self.store.put(self.key(), b"value"), 0)
        self.assertEqual(self.store.probe_key(self.key()), 1)
        self.assertEqual(self.store.probe_key(self.key(1)), 0)
        self.assertEqual(self.store.batch_probe_key([self.key(), self.key(1)]), [1, 0])
        self.assertEqual(self.store.batch_probe_key([]), [])
        closed = MooncakeDistributedStore()
        self.assertEqual((closed.probe_key("k"), closed.batch_probe_key(["k"])), (-1, [-1]))

    def test_the_last_candidate_is_kept(self):
        keys = [self.key(number) for number in range(6)]
        for key in (*keys[:3], keys[5]):
            self.assertEqual(self.store.put(key, b"x" * 64), 0)
        probed = self.store.batch_probe_key(keys, policy="LastHitOnly", candidate_size=2)
        self.assertEqual(probed, [1, 1, 1, 0, 0, 1])
        self.assertEqual(self.store.batch_probe_key(keys, "LastHitOnly", 4), [-600] * 6)
        self.assertEqual(self.store.batch_probe_key(keys, "LastHitOnly", 0), [-600] * 6)
        self.assertEqual(self.store.batch_probe_key([], "LastHitOnly", 4), [])
        self.assertEqual(self.store.batch_probe_key(keys[3:5], "LastHitOnly"), [0, 0])
        with self.assertRaisesRegex(ValueError, "Unknown batch_probe_key policy: LongestPrefix"):
            self.store.batch_probe_key(keys, "LongestPrefix")

    def test_keys_in_other_sequences(self):
        class Row:
            """Sequence without a truth value, as arrays of numpy are."""

            def __init__(self, *keys):
                self._keys = keys

            def __len__(self):
                return len(self._keys)

            def __getitem__(self, at):
                return self._keys[at]

            def __bool__(self):
                raise ValueError("the truth value is ambiguous")

        self.assertEqual(self.store.put(self.key(), b"x"), 0)
        keys = Row(self.key(), self.key(1))
        self.assertEqual(self.store.batch_probe_key(keys, "LastHitOnly"), [1, 0])
        self.assertEqual(self.store.batch_probe_key(Row(), "LastHitOnly"), [])
        self.assertEqual(self.store.batch_is_exist(keys), [1, 0])
        self.assertEqual(self.store.get_batch(keys), [b"x", b""])
        with kvplane.Store() as plain:
            for call in (lambda name: plain.retain_group(name, 60), lambda name: plain.renew(name, 60), plain.release):
                for name in ([self.key()], None, b"bytes", 1.5):
                    with self.assertRaisesRegex(TypeError, "a group or a retention is a name"):
                        call(name)

    def test_options(self):
        options = ExistOptions()
        self.assertIs(options.prefetch_to_memory, False)
        options.prefetch_to_memory = True
        self.assertEqual(self.store.put(self.key(), b"value"), 0)
        self.assertEqual(self.store.is_exist(self.key(), options), 1)
        self.assertEqual(self.store.is_exist(self.key(1), options=options), 0)
        self.assertEqual(self.store.batch_is_exist([self.key(), self.key(1), ""], options), [1, 0, 0])
        self.assertEqual(self.store.batch_is_exist([], options), [])
        with self.assertRaises(TypeError):
            self.store.is_exist(self.key(), True)
        with self.assertRaises(TypeError):
            options.prefetch_to_memory = "yes"
        with self.assertRaises(AttributeError):
            options.prefetch_to_memroy = True

    def test_keys_of_a_configuration(self):
        store, said = MooncakeDistributedStore(), io.StringIO()
        self.addCleanup(store.close)
        config = {"local_hostname": "h", "metadata_server": "P2PHANDSHAKE", "enable_ssd_prefetch": "false"}
        with contextlib.redirect_stderr(said):
            self.assertEqual(store.setup({**config, "ssd_prefetch_dedup_ttl_sec": 30, "enable_embedded_master": True}), 0)
        self.assertIn("ssd_prefetch_dedup_ttl_sec has no effect", said.getvalue())
        self.assertIn("kvplane dev", said.getvalue())
        options = ExistOptions()
        options.prefetch_to_memory = True
        self.assertFalse(store._ahead("is_exist", options))
        self.assertTrue(self.store._ahead("is_exist", options))


class Snapshots(Case):
    """Reads of ranges of the objects of a snapshot."""

    def read(self, snapshot, keys, size=8, store=None):
        keys = [keys] if isinstance(keys, str) else keys
        places = [[number * size] for number in range(len(keys))]
        ranges = [keys], [places], [[[4]] * len(keys)], [[[size]] * len(keys)]
        codes = (store or self.store).get_into_ranges_from_snapshot(snapshot, [self.at], *ranges)
        return [one[0] for one in codes[0]], [bytes(self.memory[at[0] : at[0] + size]) for at in places]

    def test_reads(self):
        for number in range(3):
            self.assertEqual(self.store.put(self.key(number), bytes([number]) * 4096), 0)
        snapshot = self.store.prepare_get_into_ranges_snapshot([self.key(0), self.key(1), "no such key"])
        self.assertIsInstance(snapshot, RangedReadSnapshot)
        for _ in range(2):
            codes, seen = self.read(snapshot, [self.key(1), self.key(0)])
            self.assertEqual((codes, seen), ([8, 8], [b"\x01" * 8, b"\x00" * 8]))
        # Keys outside the snapshot are refused, whether there is an object or not.
        self.assertEqual(self.read(snapshot, [self.key(2), "no such key", "another"])[0], [-600, -704, -600])
        self.assertEqual(self.read(snapshot, [self.key(0)], 5000)[0], [-600])

    def test_a_replaced_object(self):
        self.assertEqual(self.store.put(self.key(), b"a" * 100), 0)
        snapshot = self.store.prepare_get_into_ranges_snapshot([self.key()])
        self.assertEqual(self.read(snapshot, self.key()), ([8], [b"a" * 8]))
        self.assertEqual(self.store.upsert(self.key(), b"b" * 100), 0)
        self.assertEqual(self.read(snapshot, self.key()), ([8], [b"b" * 8]))
        self.assertEqual(self.store.remove(self.key()), 0)
        self.assertEqual(self.read(snapshot, self.key())[0], [-704])
        self.assertEqual(self.store.put(self.key(), b"c" * 100), 0)
        self.assertEqual(self.read(snapshot, self.key()), ([8], [b"c" * 8]))

    def test_ranges_of_one_call_are_of_one_version(self):
        key = self.key()
        self.assertEqual(self.store.put(key, b"a" * 64), 0)
        snapshot = self.store.prepare_get_into_ranges_snapshot([key])
        self.assertEqual(self.store.upsert(key, b"b" * 64), 0)
        to, of, sizes = [[0, 8, 16]], [[0, 8, 60]], [[8, 8, 8]]
        codes = self.store.get_into_ranges_from_snapshot(snapshot, [self.at], [[key]], [to], [of], [sizes])
        self.assertEqual(codes, [[[8, 8, -600]]])
        self.assertEqual(self.memory[:16], b"b" * 16)

    def test_an_object_that_is_replaced_all_the_time_is_read(self):
        class Replacing:
            """A native store with another version at each of so many reads."""

            def __init__(self, native, put, turns):
                self._native, self._put, self.turns = native, put, turns

            def open_ranges(self, keys):
                return self._native.open_ranges(keys)

            def get_ranges(self, *arguments):
                if self.turns:
                    self.turns -= 1
                    self._put(self.turns)
                return self._native.get_ranges(*arguments)

        key, native = self.key(), self.store._native
        self.assertEqual(self.store.put(key, b"x" * 64), 0)
        snapshot = self.store.prepare_get_into_ranges_snapshot([key])
        columns = [0, 0], [0, 32], [self.at, self.at + 32], [32, 32]
        replacing = Replacing(native, lambda turn: self.store.upsert(key, bytes([turn]) * 64), 20)
        self.assertEqual(_ranges._of_versions(replacing, snapshot._versions, [key], columns), [32, 32])
        self.assertEqual((replacing.turns, self.memory[:64]), (0, bytes(64)))
        # One that is removed meanwhile is not there, and nobody waits for it.
        replacing = Replacing(native, lambda turn: turn % 2 or self.store.remove(key), 1)
        self.assertEqual(_ranges._of_versions(replacing, snapshot._versions, [key], columns), [-704, -704])

    def test_a_snapshot_is_of_its_store(self):
        snapshot = self.store.prepare_get_into_ranges_snapshot([self.key()])
        with self.assertRaisesRegex(ValueError, "belongs to another Store"):
            self.read(snapshot, self.key(), store=self.opened())
        with self.assertRaises(TypeError):
            self.read(object(), self.key())
        self.store.close()
        self.assertEqual(self.read(snapshot, self.key())[0], [-1])
        self.assertEqual(self.read(self.store.prepare_get_into_ranges_snapshot(["k"]), "k")[0], [-1])


class Options(Case):
    """Sessions, affinities and devices of puts."""

    def test_a_session_is_kept_by_its_name(self):
        config = ReplicateConfig()
        keys = [self.key(number) for number in range(4)]
        config.session_ids = [f"session of {self.prefix}"] * 3
        self.assertEqual(self.store.put_batch(keys[:3], [b"x" * 100] * 3, config), 0)
        config.session_ids = config.session_ids[:1]
        self.assertEqual(self.store.put(keys[3], b"x" * 100, config), 0)
        with kvplane.Store() as plain:
            self.assertEqual(plain.retain_group(config.session_ids[0], 60), 4)
            self.assertEqual(plain.release(config.session_ids[0]), 4)

    def test_each_key_of_a_batch_has_a_session_of_its_own(self):
        def start(keys, values, config):
            codes = self.store.batch_put_session_start(keys, [len(value) for value in values], config)
            at, sizes = [[self.at]] * len(keys), [[len(value)] for value in values]
            self.assertEqual(self.store.batch_put_from_multi_buffer_ranges(keys, at, sizes, [[0]] * len(keys)), [64] * 3)
            self.assertEqual(self.store.batch_put_session_end(keys), [0] * len(keys))
            return codes

        place = lambda keys, values, config: self.store.batch_put_from(keys, [self.at] * 3, [64] * 3, config)
        calls = {"put_batch": self.store.put_batch, "batch_put_from": place, "batch_put_session_start": start}
        for name, call in calls.items():
            for mine in (["a", "b", "c"], ["d", "d", "e"], ["f", "", ""]):
                sessions = [one and f"{self.prefix} {name} {one}" for one in mine]
                for attribute in ("session_ids", "group_ids"):
                    config = ReplicateConfig()
                    setattr(config, attribute, [one and f"{one} {attribute}" for one in sessions])
                    keys = [f"{name} {attribute} {mine} {number}" for number in range(3)]
                    self.assertIn(call(keys, [b"x" * 64] * 3, config), (0, [0] * 3))
                    with kvplane.Store() as plain:
                        for one in set(filter(None, getattr(config, attribute))):
                            kept = getattr(config, attribute).count(one)
                            self.assertEqual(plain.retain_group(one, 60), kept, (name, attribute, one))
                            self.assertEqual(plain.release(one), kept)
        config = ReplicateConfig()
        config.session_ids = ["a", "b"]
        self.assertEqual(self.store.batch_put_from([self.key(1), self.key(2)], [self.at], [64], config), [-600] * 2)
        self.assertEqual(self.store.batch_is_exist([self.key(1), self.key(2)]), [0, 0])

    def test_a_key_without_a_group_has_its_session(self):
        config, name = ReplicateConfig(), f"session of {self.prefix}"
        config.session_ids, config.group_ids = [name], [""]
        self.assertEqual(self.store.put(self.key(), b"x", config), 0)
        config.session_ids, config.group_ids = [name, name], ["", f"group of {self.prefix}"]
        self.assertEqual(self.store.put_batch([self.key(1), self.key(2)], [b"x", b"x"], config), 0)
        with kvplane.Store() as plain:
            self.assertEqual(plain.retain_group(name, 60), 2)
            plain.release(name)

    def test_a_group_comes_before_a_session(self):
        config = ReplicateConfig()
        config.session_ids, config.group_ids = [f"session of {self.prefix}"], [f"group of {self.prefix}"]
        self.assertEqual(self.store.put(self.key(), b"x" * 100, config), 0)
        with kvplane.Store() as plain:
            self.assertEqual(plain.retain_group(config.session_ids[0], 60), 0)
            self.assertEqual(plain.retain_group(config.group_ids[0], 60), 1)
            plain.release(config.group_ids[0])

    def test_affinities(self):
        config = ReplicateConfig()
        config.residency_affinity_ids = ["rank-0", "rank-0", "rank-1", ""]
        keys = [self.key(number) for number in range(4)]
        self.assertEqual(self.store.batch_put_from(keys, [self.at] * 4, [64] * 4, config), [0] * 4)
        self.assertEqual(self.store.batch_is_exist(keys), [1] * 4)
        self.assertEqual(self.store.batch_put_from(keys[:3], [self.at] * 3, [64] * 3, config), [-600] * 3)

    def test_counts_and_types(self):
        keys, values = [self.key(number) for number in range(2)], [b"x", b"y"]
        for name, value in (
            ("residency_affinity_ids", ["a"]), ("per_key_preferred_hca_names", [["mlx5_0"]]), ("group_ids", ["a"]),
            ("session_ids", ["a"]), ("session_ids", ["a"] * 3),
        ):  # fmt: skip
            config = ReplicateConfig()
            setattr(config, name, value)
            self.assertEqual(self.store.put_batch(keys, values, config), -600, name)
        config = ReplicateConfig()
        for name, value in (
            ("session_ids", "a"), ("session_ids", [1]), ("residency_affinity_ids", b"a"), ("preferred_hca_names", [5]),
            ("preferred_hca_names", "mlx5_0"), ("per_key_preferred_hca_names", ["mlx5_0"]),
        ):  # fmt: skip
            with self.assertRaisesRegex(TypeError, "incompatible function arguments", msg=name):
                setattr(config, name, value)
        config.per_key_preferred_hca_names = [["no_such_device"], []]
        config.preferred_hca_names = ("mlx5_9",)
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            self.assertEqual(self.store.put_batch(keys, values, config), 0)
        self.assertIn("no device mlx5_9, no_such_device", said.getvalue())


class Threads(Case):
    """Threads that replace the same objects beside those that probe and read their own."""

    def test_nobody_reads_two_versions_or_what_another_wrote(self):
        size, wrong, ended = 5000, [], threading.Event()

        def value(key, version):
            return (f"{key}:{version}:".encode() * size)[:size]

        def memory():
            found = bytearray(size)
            at = ctypes.addressof(ctypes.c_char.from_buffer(found))
            self.assertEqual(self.store.register_buffer(at, size), 0)
            return found, at

        def read(at, key, cut):
            """Reads an object in two ranges of one snapshot; True if both are there."""
            snapshot = self.store.prepare_get_into_ranges_snapshot([key])
            sizes = [[[cut, size - cut]]]
            ends = [[[0, cut]]]
            return self.store.get_into_ranges_from_snapshot(snapshot, [at], [[key]], ends, ends, sizes) == sizes

        def keeper(number):
            numbers, versions, (found, at) = random.Random(number), {}, memory()
            config, options = ReplicateConfig(), ExistOptions()
            config.session_ids, config.residency_affinity_ids = [f"session{number}"], ["rank"]
            options.prefetch_to_memory = True
            for turn in range(300):
                key = self.key(f"own{number}-{numbers.randrange(20)}")
                if numbers.random() < 0.5:
                    versions[key] = turn
                    self.store.upsert(key, value(key, turn), config)
                elif key in versions:
                    there = self.store.probe_key(key), self.store.is_exist(key, options)
                    if there != (1, 1) or not read(at, key, numbers.randrange(1, size)):
                        wrong.append((key, there))
                    elif found != value(key, versions[key]):
                        wrong.append((key, bytes(found[:20])))

        def replacer(number):
            numbers = random.Random(number)
            while not ended.is_set():
                self.store.upsert(self.key(numbers.randrange(4)), bytes([numbers.randrange(256)]) * size)

        def reader(number):
            found, at = memory()
            while not ended.is_set():
                if read(at, self.key(number), 1000) and len(set(found)) != 1:
                    wrong.append(("mixed", number))

        keepers = [threading.Thread(target=keeper, args=(number,)) for number in range(2)]
        others = [threading.Thread(target=replacer, args=(number,)) for number in range(2)]
        others.append(threading.Thread(target=reader, args=(0,)))
        for thread in (*keepers, *others):
            thread.start()
        for thread in keepers:
            thread.join()
        ended.set()
        for thread in others:
            thread.join()
        self.assertEqual(wrong, [])


if __name__ == "__main__":
    unittest.main()
