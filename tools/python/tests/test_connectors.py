"""Sequences of calls that vLLM's, SGLang's and LMCache's connectors make, between instances in processes of their own
whose memory is a device's. Every byte is compared."""

import asyncio
import multiprocessing
import os
import threading
import traceback
import unittest
from unittest import mock

import bed
import connectors
import device_driver
import fake_torch

_LONGEST_S = 120
_SPAWN = multiprocessing.get_context("spawn")


def _obey(kind, link):
    """Serves the calls of a `Peer` in its process."""
    try:
        instance, answer = kind(), ("done", None)
    except Exception:
        instance, answer = None, ("failed", traceback.format_exc())
    while True:
        link.send(answer)
        name, arguments = link.recv()
        try:
            answer = ("done", getattr(instance, name)(*arguments))
        except Exception:
            answer = ("failed", traceback.format_exc())


class Peer:
    """An instance in a process of its own: `peer.name(...)` calls its method."""

    def __init__(self, kind):
        self._link, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_obey, args=(kind, theirs), daemon=True)
        with mock.patch.dict(os.environ, device_driver.environment()):
            self._process.start()
        theirs.close()
        self._answer("__init__")

    def _answer(self, name):
        if not self._link.poll(_LONGEST_S):
            raise AssertionError(f"{name}: no answer after {_LONGEST_S} s")
        try:
            kind, answer = self._link.recv()
        except EOFError:
            self._process.join(_LONGEST_S)
            raise AssertionError(f"{name}: the process ended with {self._process.exitcode}") from None
        if kind == "failed":
            raise AssertionError(f"{name}: {answer}")
        return answer

    def __getattr__(self, name):
        def call(*arguments):
            self._link.send((name, arguments))
            return self._answer(name)

        return call

    def kill(self):
        self._process.kill()
        self._process.join()
        self._link.close()


class Instance:
    """Caches on a device, of an instance of an engine."""

    def __init__(self):
        self.driver = device_driver.Driver()
        self.caches = connectors.Caches(self.driver)

    def fill(self, seed):
        self.caches.fill(seed)

    def clear(self):
        self.caches.clear()

    def check(self, blocks, seed):
        self.caches.check(blocks, seed)

    def lose(self, code):
        self.driver.lose(code)

    def _end(self):
        self.caches.free()
        self.driver.check_released()


class VllmInstance(Instance):
    """Instance of vLLM with `MooncakeConnector`."""

    def __init__(self):
        super().__init__()
        self.worker = connectors.VllmWorker()

    def register(self, excess=0):
        sizes = self.caches.sizes
        sizes[-1] += excess
        try:
            self.worker.register_kv_caches(self.caches, sizes)
        except RuntimeError as error:
            return str(error)
        return None

    def metadata(self, request, blocks):
        return self.worker.metadata(request, blocks)

    def send(self, requests):
        """Serves requests, each with the blocks of this instance: all at once by the threads of the connector."""
        sent = [self.worker.senders.submit(self.worker.send_kv_to_decode, *request) for request in requests]
        return [one.result(_LONGEST_S) for one in sent]

    def compute_and_send(self, request, blocks, stream):
        """Launches kernels that write the blocks, and sends them before any has begun. Returns what they wrote."""
        for number, (at, block) in enumerate((at, block) for at in self.caches.places for block in blocks):
            place = at + block * self.caches.block_len
            self.driver.launch(stream, place, self.caches.block_len, number, 0.02)
        code = self.worker.send_kv_to_decode(request, blocks)
        return code, self.read(blocks)

    def read(self, blocks):
        size = self.caches.block_len
        return [self.driver.read(at + block * size, size) for at in self.caches.places for block in blocks]

    def free_unregistered(self):
        """Frees the caches, which are still registered, and allocates others at the same addresses."""
        self.caches.free()
        self.caches = connectors.Caches(self.driver)
        return self.caches.places == self.worker.bases

    def finish(self):
        codes = [self.worker.shutdown(), self.worker.engine.batch_unregister_memory(self.worker.bases)]
        del self.worker
        self._end()
        return codes


class Vllm(unittest.TestCase):
    """`MooncakeConnector`: decode instances request blocks, prefill instances write them."""

    def instance(self):
        peer = Peer(VllmInstance)
        self.addCleanup(peer.kill)
        return peer

    @staticmethod
    def requests(decode):
        """Returns eight requests of three blocks, some in runs and some scattered, and the source of each block."""
        theirs = [list(range(3 * number, 3 * number + 3)) for number in range(8)]
        scattered = [[23 - first, (7 * second) % 24, third] for first, second, third in theirs]
        ours = [theirs[number] if number % 2 else scattered[number] for number in range(8)]
        asked = [(decode.metadata(f"request-{number}", theirs[number]), ours[number]) for number in range(8)]
        return asked, {there: here for one in range(8) for here, there in zip(ours[one], theirs[one])}

    def test_blocks_of_many_requests_go_from_prefill_to_decode(self):
        prefill, decode = self.instance(), self.instance()
        for one in (prefill, decode):
            self.assertIsNone(one.register())
        for seed in (1, 2):
            prefill.fill(seed)
            decode.clear()
            requests, blocks = self.requests(decode)
            self.assertEqual(prefill.send(requests[:5]), [0] * 5)
            some = {there: blocks[there] for there in range(15)}
            decode.check(some, seed)
            self.assertEqual(prefill.send(requests[5:]), [0] * 3)
            decode.check(blocks, seed)
        self.assertEqual([prefill.send([]), prefill.send([(decode.metadata("none", []), [])])], [[], [0]])
        for one in (prefill, decode):
            self.assertEqual(one.finish(), [0, -3])

    def test_what_was_launched_before_is_what_arrives(self):
        if os.environ.get("KVPLANE_GPU"):
            self.skipTest("kernels that are late need the driver for tests")
        prefill, decode = self.instance(), self.instance()
        for one in (prefill, decode):
            one.register()
            one.clear()
        blocks = [3, 4, 9]
        code, sent = prefill.compute_and_send(decode.metadata("r", blocks), blocks, device_driver.DEFAULT_STREAM)
        self.assertEqual(code, 0)
        self.assertNotIn(bytes([connectors.GUARD]) * len(sent[0]), sent)
        self.assertEqual(decode.read(blocks), sent)

    def test_caches_that_cannot_be_registered_are_an_error_and_none_of_them_is(self):
        prefill, decode = self.instance(), self.instance()
        self.assertEqual(prefill.register(1), "Mooncake batch memory registration failed.")
        decode.register()
        decode.clear()
        self.assertEqual(prefill.send([(decode.metadata("r", [0]), [0])]), [0], "no layers, nothing to send")
        self.assertIsNone(prefill.register())
        prefill.fill(3)
        self.assertEqual(prefill.send([(decode.metadata("r", [1]), [2])]), [0])
        decode.check({1: 2}, 3)

    def test_a_decode_instance_that_died_fails_its_requests_only(self):
        prefill, decode, other = (self.instance() for _ in range(3))
        for one in (prefill, decode, other):
            one.register()
            one.clear()
        prefill.fill(4)
        (asked, blocks), (others, _) = self.requests(decode), self.requests(other)
        self.assertEqual(prefill.send(asked[:2]), [0, 0])
        decode.kill()
        # Requests to the dead one and to another at the same time.
        codes = prefill.send([*asked[2:4], *others[:6]])
        self.assertEqual([code == 0 for code in codes], [False] * 2 + [True] * 6)
        other.check({there: blocks[there] for there in range(18)}, 4)
        restarted = self.instance()
        restarted.register()
        restarted.clear()
        self.assertEqual(prefill.send(self.requests(restarted)[0]), [0] * 8)
        restarted.check(blocks, 4)
        self.assertEqual(prefill.finish(), [0, -3])

    def test_caches_that_were_freed_fail_transfers_and_harm_no_process(self):
        for at_decode in (False, True):
            prefill, decode = self.instance(), self.instance()
            for one in (prefill, decode):
                one.register()
                one.fill(5)
            same = (decode if at_decode else prefill).free_unregistered()
            asked, blocks = self.requests(decode)
            self.assertTrue(all(code != 0 for code in prefill.send(asked)), f"{same} {at_decode}")
            # An instance goes on with memory that it registers.
            one = decode if at_decode else prefill
            self.assertEqual(one.finish()[0], 0)

    def test_a_lost_device_fails_transfers_and_harms_no_process(self):
        if os.environ.get("KVPLANE_GPU"):
            self.skipTest("a device that is lost needs the driver for tests")
        for at_decode in (False, True):
            prefill, decode = self.instance(), self.instance()
            for one in (prefill, decode):
                one.register()
                one.clear()
            asked, _ = self.requests(decode)
            self.assertEqual(prefill.send(asked[:1]), [0])
            lost = decode if at_decode else prefill
            lost.lose(719)
            codes = prefill.send(asked)
            # Memory of a peer on this host is mapped: the device that copies is the sender's, which is not lost.
            if not at_decode:
                self.assertTrue(all(code != 0 for code in codes), codes)
            lost.lose(0)
            self.assertEqual(lost.read([23]), [bytes([connectors.GUARD]) * 4096] * 4, "the process still answers")


class SglangInstance(Instance):
    """Instance of SGLang with a `MooncakeKVManager`: auxiliary memory of the host, and a state on the device."""

    def __init__(self):
        super().__init__()
        self.aux = fake_torch.of(bytes(64 * 16), (16, 64), fake_torch.uint8)
        self.state = self.driver.allocate(4096), 4096
        self.manager = connectors.SglangManager(self.caches, self.aux, self.state)
        self.manager.start()

    def registered(self):
        return self.manager.codes

    def arguments(self):
        return self.manager.arguments()

    def fill(self, seed):
        super().fill(seed)
        self.driver.write(self.state[0], bed.pattern(seed << 40, 4096))
        aux = bed.pattern(seed << 44, 64 * 16)
        self.aux = fake_torch.of(aux, (16, 64), fake_torch.uint8)
        self.manager.wrapped.batch_deregister([self.manager.aux.data_ptr()])
        self.manager.aux = self.aux
        assert self.manager.wrapped.batch_register([self.aux.data_ptr()], [64 * 16]) == 0

    def send(self, to, requests):
        """Serves requests `(room, ours, theirs, aux, tokens)`; returns the status of each room."""
        events = [self.manager.send(room, to, *rest) for room, *rest in requests]
        assert all(event.wait(_LONGEST_S) for event in events)
        return [self.manager.status[room] for room, *_ in requests]

    def check_rest(self, seed, rows):
        """Checks the state, and rows of the auxiliary memory by those of the peer."""
        assert self.driver.read(*self.state) == bed.pattern(seed << 40, 4096)
        sent, here = bed.pattern(seed << 44, 64 * 16), self.aux.raw()
        for there, row in rows.items():
            assert here[there * 64 :][:64] == sent[row * 64 :][:64], (there, row)

    def check_slices(self, blocks, seed, tokens):
        """Checks the first half of each token of these blocks, and that the other halves were not touched."""
        size, part = self.caches.block_len, self.caches.block_len // tokens // 2
        for layer, at in enumerate(self.caches.places):
            for there, here in blocks.items():
                found, sent = self.driver.read(at + there * size, size), self.caches.value(seed, layer, here)
                for token in range(tokens):
                    start = 2 * token * part
                    assert found[start : start + part] == sent[start : start + part], (layer, there, token)
                    assert found[start + part : start + 2 * part] == bytes([connectors.GUARD]) * part

    def probe_failed(self):
        return list(self.manager.probe_failed().values())

    def deregister(self):
        return self.manager.wrapped.batch_deregister(self.caches.places)

    def register(self):
        return self.manager.wrapped.batch_register(self.caches.places, self.caches.sizes)

    def load_weights(self, source, seeds):
        """Reads the layers of another instance as a loader of weights does; each by itself, then all together."""
        wrapped = self.manager.wrapped
        engine, places, sizes = wrapped.engine, self.caches.places, self.caches.sizes
        code = engine.batch_transfer_sync_read(source["session"], places[:1], source["kv"][:1], sizes[:1])
        return [code, engine.batch_transfer_sync_read(source["session"], places, source["kv"], sizes)]

    def finish(self):
        codes = self.manager.close()
        del self.manager
        self.driver.free(self.state[0])
        self._end()
        return codes


class Sglang(unittest.TestCase):
    """PD disaggregation, and weights of a remote instance."""

    def instance(self):
        peer = Peer(SglangInstance)
        self.addCleanup(peer.kill)
        self.assertEqual(peer.registered(), [0, 0, 0])
        return peer

    def test_pages_states_and_auxiliary_rows_go_from_prefill_to_decode(self):
        prefill, decode = self.instance(), self.instance()
        prefill.fill(1)
        decode.clear()
        to = decode.arguments()
        pages = {there: (5 * there + 2) % 24 if there % 3 else there for there in range(20)}
        own = [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [11], list(range(12, 20))]
        rooms = [(room, [pages[at] for at in own[room]], own[room], (room, 15 - room)) for room in range(5)]
        self.assertEqual(prefill.send(to, rooms), [0] * 5)
        decode.check(pages, 1)
        decode.check_rest(1, {15 - room: room for room in range(5)})
        self.assertEqual(prefill.send(to, [(5, [8, 3], [20, 23], (5, 9), 16)]), [0])
        decode.check_slices({20: 8, 23: 3}, 1, 16)
        for one in (prefill, decode):
            self.assertEqual(one.finish(), [0, 0, 0])

    def test_a_session_that_failed_is_used_again_when_its_probe_is_answered(self):
        prefill, decode, dead = (self.instance() for _ in range(3))
        prefill.fill(2)
        decode.clear()
        to, gone = decode.arguments(), dead.arguments()
        dead.kill()
        self.assertEqual(decode.deregister(), 0)
        codes = prefill.send(to, [(0, [1], [2], (0, 0))]) + prefill.send(gone, [(1, [1], [2], (0, 0))])
        self.assertTrue(all(code != 0 for code in codes), codes)
        self.assertEqual(decode.register(), 0)
        self.assertEqual(prefill.send(to, [(2, [1], [2], (0, 0))]), [-1], "it is blacklisted")
        self.assertEqual(sorted(code == 0 for code in prefill.probe_failed()), [False, True])
        self.assertEqual(prefill.send(to, [(3, [1], [2], (3, 4))]), [0])
        self.assertEqual(prefill.send(gone, [(4, [1], [2], (0, 0))]), [-1])
        decode.check({2: 1}, 2)
        decode.check_rest(2, {4: 3})

    def test_weights_are_read_from_a_remote_instance(self):
        trainer, loader = self.instance(), self.instance()
        trainer.fill(3)
        loader.clear()
        self.assertEqual(loader.load_weights(trainer.arguments(), 3), [0, 0])
        loader.check({block: block for block in range(24)}, 3)


class LmcacheInstance:
    """Instance with LMCache's channel, over a few large chunks of a device."""

    CHUNKS, SIZE = 4, (1 << 20) + 4096

    def __init__(self):
        self.driver = device_driver.Driver()
        self.places = [self.driver.allocate(self.SIZE) for _ in range(self.CHUNKS)]
        self.channel = connectors.LmcacheChannel(self.places, [self.SIZE] * self.CHUNKS)

    def fill(self, seed):
        for number, at in enumerate(self.places):
            self.driver.write(at, bed.pattern((seed * 16 + number) << 32, self.SIZE))

    def where(self):
        return self.channel.session, self.places

    def read(self, session, theirs):
        """Reads each chunk by a coroutine of its own, and all of them by one, from two threads; returns all states."""

        async def work():
            each = [self.channel.read(session, [at], [there], [self.SIZE]) for at, there in zip(self.places, theirs)]
            return await asyncio.gather(*each)

        def other():
            alone.append(asyncio.run(self.channel.read(session, [], [], [])))

        alone = []
        thread = threading.Thread(target=other)
        thread.start()
        states = asyncio.run(work())
        thread.join(_LONGEST_S)
        return states, alone

    def check(self, seed):
        for number, at in enumerate(self.places):
            assert self.driver.read(at, self.SIZE) == bed.pattern((seed * 16 + number) << 32, self.SIZE), number

    def finish(self):
        codes = self.channel.close()
        del self.channel
        for at in self.places:
            self.driver.free(at)
        self.driver.check_released()
        return codes


class Lmcache(unittest.TestCase):
    """Asynchronous reads, polled by coroutines."""

    def test_a_read_is_complete_when_all_of_its_bytes_are_there(self):
        reader, writer = Peer(LmcacheInstance), Peer(LmcacheInstance)
        self.addCleanup(reader.kill)
        self.addCleanup(writer.kill)
        writer.fill(1)
        reader.fill(2)
        session, places = writer.where()
        states, alone = reader.read(session, places)
        self.assertEqual(states, [1] * 4)
        reader.check(1)
        self.assertEqual(reader.read(session, [at + (1 << 40) for at in places])[0], [-1] * 4)
        self.assertEqual(len(alone), 1)
        for one in (reader, writer):
            self.assertEqual(one.finish(), [0] * 4)


class StoreInstance(Instance):
    """Instance whose connector keeps blocks in the store: vLLM's `MooncakeStoreConnector`, and SGLang's HiCache with
    its direct linker."""

    def __init__(self):
        from mooncake.store import MooncakeDistributedStore

        super().__init__()
        self.store = MooncakeDistributedStore()
        place = "localhost", "P2PHANDSHAKE", 0, 16 << 20, "rdma", "", "127.0.0.1:50051"
        assert self.store.setup(*place, None, enable_ssd_offload=False, tenant_id="default") == 0

    def warm_up(self, key):
        """Puts and gets a value as HiCache does before it begins."""
        value = bytes(4096)
        return [self.store.put(key, value), self.store.is_exist(key), self.store.get(key) == value]

    def register(self):
        return [self.store.register_buffer(at, size) for at, size in zip(self.caches.places, self.caches.sizes)]

    def _pieces(self, blocks):
        size = self.caches.block_len
        pointers = [[at + block * size for at in self.caches.places] for block in blocks]
        return pointers, [[size] * len(self.caches.places)] * len(blocks)

    def save(self, prefix, blocks):
        """Stores blocks that are not there yet, each of the pieces of all layers."""
        from mooncake.store import ReplicateConfig

        keys = [f"{prefix}@{block}" for block in blocks]
        missing = [at for at, there in enumerate(self.store.batch_is_exist(keys)) if there != 1]
        config = ReplicateConfig()
        config.group_ids = [f"{prefix}:{keys[at]}" for at in missing]
        pointers, sizes = self._pieces([blocks[at] for at in missing])
        return self.store.batch_put_from_multi_buffers([keys[at] for at in missing], pointers, sizes, config)

    def load(self, prefix, blocks, into):
        return self.store.batch_get_into_multi_buffers([f"{prefix}@{block}" for block in blocks], *self._pieces(into))

    def load_by_layer(self, prefix, blocks, into):
        """Reads blocks layer by layer under one session."""
        keys, size = [f"{prefix}@{block}" for block in blocks], self.caches.block_len
        begun, read = self.store.batch_get_session_start(keys), []
        for layer, at in enumerate(self.caches.places):
            pointers, offsets = [[at + block * size] for block in into], [[layer * size]] * len(keys)
            read.append(self.store.batch_get_into_multi_buffer_ranges(keys, pointers, [[size]] * len(keys), offsets))
        return begun, read, self.store.batch_get_session_end(keys)

    def save_pages(self, prefix, blocks):
        """Stores a page of each layer under a key of its own."""
        keys, places, sizes = self._pages(prefix, blocks)
        return self.store.batch_put_from(keys, places, sizes, None)

    def load_pages(self, prefix, blocks):
        return self.store.batch_get_into(*self._pages(prefix, blocks))

    def _pages(self, prefix, blocks):
        size = self.caches.block_len
        pages = [(layer, block) for layer in range(len(self.caches.places)) for block in blocks]
        keys = [f"{prefix}{layer}-{block}" for layer, block in pages]
        return keys, [self.caches.places[layer] + block * size for layer, block in pages], [size] * len(pages)

    def finish(self):
        codes = [self.store.unregister_buffer(at) for at in self.caches.places]
        codes.append(self.store.close())
        del self.store
        self._end()
        return codes


class Stores(unittest.TestCase):
    """Blocks that one instance stores and another loads."""

    def setUp(self):
        bed.bed()
        self.one, self.other = Peer(StoreInstance), Peer(StoreInstance)
        for peer in (self.one, self.other):
            self.addCleanup(peer.kill)
            self.assertEqual(peer.register(), [0] * 4)

    def end(self):
        for peer in (self.one, self.other):
            self.assertEqual(peer.finish(), [0] * 5)

    def test_blocks_are_loaded_by_another_instance(self):
        blocks, into = list(range(2, 18)), list(range(17, 1, -1))
        self.one.fill(6)
        self.other.clear()
        self.assertEqual(self.one.save("vllm", blocks), [0] * 16)
        self.assertEqual(self.one.save("vllm", blocks), [], "they exist")
        self.assertEqual(self.other.load("vllm", blocks, into), [4 * 4096] * 16)
        self.other.check(dict(zip(into, blocks)), 6)
        self.assertEqual(self.other.load("vllm", [2, 99], [0, 1]), [4 * 4096, -704])
        self.end()

    def test_layers_are_loaded_one_by_one(self):
        blocks, into = [1, 5, 3], [20, 21, 2]
        self.assertEqual(self.one.warm_up("sglang_warm_up"), [0, 1, True])
        self.one.fill(7)
        self.other.clear()
        self.assertEqual(self.one.save("sglang", blocks), [0] * 3)
        self.assertEqual(self.other.load_by_layer("sglang", blocks, into), ([0] * 3, [[4096] * 3] * 4, 0))
        self.other.check(dict(zip(into, blocks)), 7)
        self.assertEqual(self.other.load_by_layer("none", [1], [0]), ([-704], [[-600]] * 4, 0), "no session")
        self.other.clear()
        self.assertEqual(self.one.save_pages("page", [0, 9]), [0] * 8)
        self.assertEqual(self.other.load_pages("page", [0, 9]), [4096] * 8)
        self.other.check({0: 0, 9: 9}, 7)
        self.end()


if __name__ == "__main__":
    unittest.main()
