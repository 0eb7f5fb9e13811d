"""Connectors of inference engines, as far as they call `mooncake.engine` and `mooncake.store`: the calls of vLLM's,
SGLang's and LMCache's in their order, with the threads that they make them from. Memory is a device's.

Messages that the engines send each other by ZMQ or HTTP go through a pipe here.
"""

import asyncio
import concurrent.futures
import math
import queue
import threading

import bed
import fake_torch
from mooncake.engine import TransferEngine

#: Byte of blocks that nothing has been written to.
GUARD = 0xEE


def groups(ours, theirs):
    """Returns the runs of blocks that are consecutive on both sides, as all connectors join them."""
    found = []
    for here, there in zip(ours, theirs):
        if found and found[-1][0][-1] + 1 == here and found[-1][1][-1] + 1 == there:
            found[-1][0].append(here)
            found[-1][1].append(there)
        else:
            found.append(([here], [there]))
    return found


class Caches:
    """KV caches on a device: a tensor for each layer, of blocks; two layers share an allocation."""

    def __init__(self, driver, layers=4, blocks=24, shape=(16, 2, 64)):
        kind = fake_torch.float16
        self.driver, self.blocks = driver, blocks
        self.block_len = math.prod(shape) * kind.itemsize
        size = blocks * self.block_len
        self.allocations = [driver.allocate(2 * size) for _ in range(layers // 2)]
        places = [base + half * size for base in self.allocations for half in range(2)]
        self.tensors = [fake_torch.Tensor(self, at, (blocks, *shape), kind, device="cuda") for at in places]

    @property
    def places(self):
        return [tensor.data_ptr() for tensor in self.tensors]

    @property
    def sizes(self):
        return [tensor.numel() * tensor.element_size() for tensor in self.tensors]

    def value(self, seed, layer, block):
        """Returns the bytes of a block: no two have the same."""
        return bed.pattern(((seed * 64 + layer) * 1024 + block) << 24, self.block_len)

    def fill(self, seed):
        """Computes the blocks of all layers."""
        for layer, at in enumerate(self.places):
            self.driver.write(at, b"".join(self.value(seed, layer, block) for block in range(self.blocks)))

    def clear(self):
        for at, size in zip(self.places, self.sizes):
            self.driver.write(at, bytes([GUARD]) * size)

    def check(self, blocks, seed):
        """Checks that each of these blocks is that block of a peer's caches, and that no other was touched."""
        nothing = bytes([GUARD]) * self.block_len
        for layer, (at, size) in enumerate(zip(self.places, self.sizes)):
            found = self.driver.read(at, size)
            for block in range(self.blocks):
                there = found[block * self.block_len :][: self.block_len]
                wanted = self.value(seed, layer, blocks[block]) if block in blocks else nothing
                assert there == wanted, f"block {block} of layer {layer}"

    def free(self):
        for base in self.allocations:
            self.driver.free(base)


# --- vLLM: MooncakeConnector ---------------------------------------------------------------------------------------


class VllmWorker:
    """`MooncakeConnectorWorker` of a prefill or a decode instance."""

    SENDERS = 10

    def __init__(self, protocol="rdma", host="127.0.0.1"):
        self.engine = TransferEngine()
        if self.engine.initialize(host, "P2PHANDSHAKE", protocol, "") != 0:
            raise RuntimeError("Mooncake Transfer Engine initialization failed.")
        self.host, self.rpc_port = host, self.engine.get_rpc_port()
        self.senders = concurrent.futures.ThreadPoolExecutor(self.SENDERS, "vllm-mooncake-sender")
        self.bases, self.block_len = [], 0

    def register_kv_caches(self, caches, lengths=None):
        bases, sizes = [], []
        for tensor in caches.tensors:
            if tensor.data_ptr() not in bases:
                bases.append(tensor.data_ptr())
                sizes.append(tensor.numel() * tensor.element_size())
        if self.engine.batch_register_memory(bases, lengths or sizes) != 0:
            raise RuntimeError("Mooncake batch memory registration failed.")
        self.bases, self.block_len = bases, caches.block_len

    def metadata(self, request, blocks):
        """Returns what a decode instance requests blocks with: `MooncakeAgentMetadata`."""
        return {"host": self.host, "port": self.rpc_port, "request": request, "bases": self.bases, "blocks": blocks}

    def send_kv_to_decode(self, metadata, blocks):
        """Writes the blocks of a request; returns the code. Called by the threads of `senders`."""
        ours, theirs, lengths = [], [], []
        for mine, others in zip(self.bases, metadata["bases"]):
            for here, there in groups(blocks, metadata["blocks"]):
                ours.append(mine + here[0] * self.block_len)
                theirs.append(others + there[0] * self.block_len)
                lengths.append(self.block_len * len(here))
        session = f"{metadata['host']}:{metadata['port']}"
        return self.engine.batch_transfer_sync_write(session, ours, theirs, lengths)

    def shutdown(self):
        self.senders.shutdown()
        return self.engine.batch_unregister_memory(self.bases)


# --- SGLang: PD disaggregation -------------------------------------------------------------------------------------


class SglangEngine:
    """`MooncakeTransferEngine` of SGLang."""

    def __init__(self, host="127.0.0.1", device=None, protocol="rdma"):
        self.engine = TransferEngine()
        # With a deadline, as the engine may hang at its start.
        starter = concurrent.futures.ThreadPoolExecutor(1)
        started = starter.submit(self.engine.initialize, host, "P2PHANDSHAKE", protocol, device or "")
        if started.result(timeout=60) != 0:
            raise RuntimeError("Mooncake Transfer Engine initialization failed.")
        starter.shutdown()
        self.session_id = f"{host}:{self.engine.get_rpc_port()}"
        self.has_batches = hasattr(self.engine, "batch_register_memory")

    def _quiet(self, call, *arguments):
        try:
            return call(*arguments)
        except Exception:
            return -1

    def register(self, at, size):
        return self._quiet(self.engine.register_memory, at, size)

    def deregister(self, at):
        return self._quiet(self.engine.unregister_memory, at)

    def batch_register(self, places, sizes):
        return self._quiet(self.engine.batch_register_memory, places, sizes)

    def batch_deregister(self, places):
        return self._quiet(self.engine.batch_unregister_memory, places)

    def transfer_sync(self, session, ours, theirs, size):
        return self._quiet(self.engine.transfer_sync_write, session, ours, theirs, size)

    def batch_transfer_sync(self, session, ours, theirs, sizes):
        return self._quiet(self.engine.batch_transfer_sync_write, session, ours, theirs, sizes)

    def send_probe(self, session):
        return self._quiet(self.engine.send_probe, session)


class SglangManager:
    """`MooncakeKVManager`: registers the caches and the auxiliary memory of the host; a prefill instance serves
    requests from queues with a thread each, and writes the layers of one in an executor."""

    QUEUES = 4

    def __init__(self, caches, aux, state):
        self.wrapped = SglangEngine()
        self.caches, self.aux, self.state = caches, aux, state
        # Failures are logged, so what is not registered shows at the first transfer.
        self.codes = [self.wrapped.batch_register(caches.places, caches.sizes)]
        self.codes.append(self.wrapped.batch_register([aux.data_ptr()], [aux.numel() * aux.element_size()]))
        self.codes.append(self.wrapped.register(*state))
        self.failed, self.status, self.lock = set(), {}, threading.Lock()
        self.queues = [queue.Queue() for _ in range(self.QUEUES)]
        self.workers = []

    def arguments(self):
        """Returns what a decode instance registers with a prefill instance: `KVArgsRegisterInfo`."""
        return {
            "session": self.wrapped.session_id,
            "kv": self.caches.places,
            "aux": self.aux.data_ptr(),
            "state": self.state[0],
            "block_len": self.caches.block_len,
        }

    def start(self):
        for one in self.queues:
            executor = concurrent.futures.ThreadPoolExecutor(4)
            thread = threading.Thread(target=self._work, args=(one, executor), daemon=True)
            thread.start()
            self.workers.append((thread, executor))

    def _work(self, requests, executor):
        while True:
            request = requests.get()
            if request is None:
                return
            session, room = request["to"]["session"], request["room"]
            if session in self.failed:
                # Blacklisted until a probe of it is answered.
                code = -1
            else:
                code = self._send(executor, request)
            with self.lock:
                if code != 0:
                    self.failed.add(session)
                self.status[room] = code
            request["done"].set()

    def _send(self, executor, request):
        to, tokens = request["to"], request.get("tokens")
        send = self._layer_of_slices if tokens else self._layer
        layers = [executor.submit(send, request, layer) for layer in range(len(self.caches.places))]
        for layer in concurrent.futures.as_completed(layers):
            if layer.result() != 0:
                for other in layers:
                    other.cancel()
                return layer.result()
        code = self.wrapped.transfer_sync(to["session"], self.state[0], to["state"], self.state[1])
        if code != 0:
            return code
        length = 64
        here, there = (at + index * length for at, index in zip((self.aux.data_ptr(), to["aux"]), request["aux"]))
        return self.wrapped.batch_transfer_sync(to["session"], [here], [there], [length])

    def _layer(self, request, layer):
        """`send_kvcache` of one layer: runs of pages."""
        size, ours, theirs = self.caches.block_len, self.caches.places[layer], request["to"]["kv"][layer]
        runs = groups(request["ours"], request["theirs"])
        here, there = [ours + run[0] * size for run, _ in runs], [theirs + run[0] * size for _, run in runs]
        sizes = [size * len(run) for run, _ in runs]
        return self.wrapped.batch_transfer_sync(request["to"]["session"], here, there, sizes)

    def _layer_of_slices(self, request, layer):
        """`send_kvcache_slice` of one layer, for instances of unequal tensor parallelism: a slice of each token."""
        size, tokens = self.caches.block_len, request["tokens"]
        ours, theirs, part = self.caches.places[layer], request["to"]["kv"][layer], size // tokens // 2
        here, there = [], []
        for mine, others in zip(request["ours"], request["theirs"]):
            for token in range(tokens):
                here.append(ours + mine * size + token * 2 * part)
                there.append(theirs + others * size + token * 2 * part)
        return self.wrapped.batch_transfer_sync(request["to"]["session"], here, there, [part] * len(here))

    def send(self, room, to, ours, theirs, aux, tokens=None):
        """Enqueues a request; returns the event of its end."""
        done = threading.Event()
        request = {"room": room, "to": to, "ours": ours, "theirs": theirs, "aux": aux, "tokens": tokens, "done": done}
        self.queues[room % self.QUEUES].put(request)
        return done

    def probe_failed(self):
        """Probes the blacklisted sessions, and takes off those that answer."""
        codes = {session: self.wrapped.send_probe(session) for session in self.failed}
        with self.lock:
            self.failed -= {session for session, code in codes.items() if code == 0}
        return codes

    def close(self):
        for one in self.queues:
            one.put(None)
        for thread, executor in self.workers:
            thread.join(60)
            executor.shutdown()
        codes = [self.wrapped.batch_deregister(places) for places in (self.caches.places, [self.aux.data_ptr()])]
        return [*codes, self.wrapped.deregister(self.state[0])]


# --- LMCache: the transfer channel ---------------------------------------------------------------------------------


class LmcacheChannel:
    """`MooncakeTeChannel`: asynchronous reads whose status a coroutine polls."""

    def __init__(self, places, sizes, protocol="tcp", host="127.0.0.1"):
        self.engine = TransferEngine()
        if self.engine.initialize(host, "P2PHANDSHAKE", protocol, "") != 0:
            raise RuntimeError("initialize failed")
        self.session = f"{host}:{self.engine.get_rpc_port()}"
        self.places = places
        for at, size in zip(places, sizes):
            if self.engine.register_memory(at, size) != 0:
                raise RuntimeError(f"register_memory failed for {at:#x}")

    async def read(self, session, ours, theirs, sizes):
        """Reads ranges; returns the last status: 1 complete, -1 failed, -2 timed out."""
        number = self.engine.batch_transfer_async_read(session, ours, theirs, sizes)
        if number == 0:
            return -1
        while True:
            status = self.engine.transfer_check_status(number)
            if status != 0:
                return status
            await asyncio.sleep(0.001)

    def close(self):
        return [self.engine.unregister_memory(at) for at in self.places]
