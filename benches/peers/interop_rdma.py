"""A stock Mooncake wheel and kvplane's C library read and write each other's segments over RDMA, every byte compared.

usage: interop_rdma.py run LIBRARY OURS THEIRS [SEED]   both directions; exit status 1 on a difference
       interop_rdma.py stock THEIRS BYTES               a stock engine that obeys the lines of its standard input

OURS and THEIRS are an address and devices: `10.77.0.1,rxe0,rxe2 10.77.0.2,rxe1,rxe3`; all of them must be used. Each
word of a buffer follows from its own address and a seed, so misplaced bytes are detected. The stock engine listens on
every address: run it in a machine of its own (`cargo x rig`).
"""
import ctypes
import json
import mmap
import os
import random
import subprocess
import sys
import threading
import time

import numpy as np

from interop import expect, pattern

for name in ("MC_FORCE_TCP", "MC_TCP_BIND_ADDRESS"):
    os.environ.pop(name, None)
SLOT = 1 << 16
BYTES = 2 << 20
# An emulated machine is slow.
PATIENCE_S = 600


class Memory:
    """Page-aligned memory, as NICs require."""

    def __init__(self, size):
        self.pages = mmap.mmap(-1, size)
        self.array = np.frombuffer(self.pages, dtype=np.uint8)
        self.addr, self.size = self.array.ctypes.data, size

    def part(self, at, size):
        return self.array[at : at + size]

    def fill(self, seed):
        self.array[:] = pattern(seed, self.addr, self.size)

    def holds(self, seed, at, length):
        return np.array_equal(self.part(at, length), pattern(seed, self.addr + at, length))


def stock(where, size):
    address, device = where.split(",", 1)
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    os.environ.setdefault("MC_GID_INDEX", "1")
    os.environ["MC_TCP_BIND_ADDRESS"] = address
    from mooncake.engine import TransferEngine

    memory, engine = Memory(size), TransferEngine()
    status = engine.initialize(f"{address}:17001", "P2PHANDSHAKE", "rdma", device)
    expect(f"the stock engine does not start over {device}: initialize gives {status}", status == 0)
    status = engine.register_memory(memory.addr, memory.size)
    expect(f"the stock engine does not take the memory: register_memory gives {status}", status == 0)
    print(json.dumps(dict(name=f"{address}:{engine.get_rpc_port()}", addr=memory.addr)), flush=True)
    for line in sys.stdin:
        word, *rest = json.loads(line)
        good = True
        if word == "fill":
            memory.fill(*rest)
        elif word == "holds":
            good = bool(memory.holds(*rest))
        elif word in ("read", "write"):
            name, triples = rest
            lists = [[memory.addr + at for at, _, _ in triples], [to for _, to, _ in triples], [n for _, _, n in triples]]
            one = engine.transfer_sync_read if word == "read" else engine.transfer_sync_write
            many = engine.batch_transfer_sync_read if word == "read" else engine.batch_transfer_sync_write
            outcome = one(name, *[list_[0] for list_ in lists]) if len(triples) == 1 else many(name, *lists)
            good = outcome == 0
        elif word == "compare":
            seed, base, pieces = rest
            good = all(np.array_equal(memory.part(at, n), pattern(seed, base + to, n)) for at, to, n in pieces)
        elif word == "place":
            seed, base, pieces = rest
            for at, to, n in pieces:
                memory.part(at, n)[:] = pattern(seed, base + to, n)
        print(json.dumps(dict(good=good)), flush=True)
    os._exit(0)


class Request(ctypes.Structure):
    _fields_ = [("opcode", ctypes.c_int), ("source", ctypes.c_void_p), ("target_id", ctypes.c_int32),
                ("target_offset", ctypes.c_uint64), ("length", ctypes.c_uint64)]


class Status(ctypes.Structure):
    _fields_ = [("status", ctypes.c_int), ("transferred_bytes", ctypes.c_uint64)]


class Ours:
    """An engine of the C library."""

    def __init__(self, library, where, size):
        address, device = where.split(",", 1)
        os.environ["MC_TE_FILTERS"] = device
        self.c = ctypes.CDLL(library)
        self.c.createTransferEngine.restype = self.c.installTransport.restype = ctypes.c_void_p
        self.c.allocateBatchID.restype = ctypes.c_uint64
        created = self.c.createTransferEngine(b"P2PHANDSHAKE", address.encode(), address.encode(), ctypes.c_uint64(0), 0)
        expect("our engine does not start", created)
        self.engine, self.memory = ctypes.c_void_p(created), Memory(size)
        matrix = (ctypes.c_char_p * 2)(json.dumps({"cpu:0": [device.split(","), []]}).encode(), None)
        expect("no transport rdma", self.c.installTransport(self.engine, b"rdma", matrix))
        status = self.c.registerLocalMemory(
            self.engine, ctypes.c_void_p(self.memory.addr), ctypes.c_size_t(size), b"cpu:0", 1)
        expect(f"our engine does not take the memory: {status}", status == 0)
        name = ctypes.create_string_buffer(256)
        expect("no name", self.c.getLocalIpAndPort(self.engine, name, ctypes.c_size_t(256)) == 0)
        self.name = name.value.decode()

    def open(self, name):
        self.peer = self.c.openSegment(self.engine, name.encode())
        expect(f"{name} cannot be opened: {self.peer}", self.peer > 0)

    def transfer(self, opcode, triples):
        """Returns true if the whole batch completed."""
        requests = (Request * len(triples))(
            *[Request(opcode, self.memory.addr + at, self.peer, to, length) for at, to, length in triples])
        batch = ctypes.c_uint64(self.c.allocateBatchID(self.engine, ctypes.c_size_t(len(triples))))
        status = self.c.submitTransfer(self.engine, batch, requests, ctypes.c_size_t(len(triples)))
        expect(f"not submitted: {status}", status == 0)
        good, found, end = True, Status(), time.monotonic() + PATIENCE_S
        for task in range(len(triples)):
            while True:
                self.c.getTransferStatus(self.engine, batch, ctypes.c_size_t(task), ctypes.byref(found))
                if found.status >= 4 or found.status == 2 or found.status == 3:
                    break
                expect("a transfer does not end", time.monotonic() < end)
                time.sleep(0.0005)
            good = good and found.status == 4
        self.c.freeBatchID(self.engine, batch)
        return good


class Child:
    """The stock engine in a process of its own, whose replies have a deadline."""

    def __init__(self, words):
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.timer = threading.Timer(PATIENCE_S, self.process.kill)
        self.timer.start()

    def until(self, wanted):
        for line in self.process.stdout:
            if line.startswith("{") and wanted in line:
                return json.loads(line)
        raise SystemExit(f"interop: the stock engine ended before it said {wanted!r}")

    def ask(self, *words):
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        return self.until("good")["good"]


def slots(rng, count):
    """Draws random lengths and offsets, in slots that do not overlap: (local, remote, length)."""
    for slot in rng.sample(range(BYTES // SLOT), count):
        length = max(1, (1 << rng.randrange(1, SLOT.bit_length() - 1)) - rng.randrange(2))
        yield slot * SLOT + rng.randrange(SLOT - length + 1), slot * SLOT + rng.randrange(SLOT - length + 1), length


def stock_asks(ours, child, rng):
    base = ours.memory.addr
    for round_ in range(12):
        seed, pieces = rng.randrange(1 << 40), list(slots(rng, rng.choice([1, 1, 3, 16])))
        ours.memory.fill(seed)
        wanted = [(at, base + to, n) for at, to, n in pieces]
        expect("the stock engine's read failed", child.ask("read", ours.name, wanted))
        expect("the stock engine read wrong bytes", child.ask("compare", seed, base, pieces))
        child.ask("place", seed + 1, base, pieces)
        expect("the stock engine's write failed", child.ask("write", ours.name, wanted))
        now = pattern(seed, base, BYTES).copy()
        for _, to, n in pieces:
            now[to : to + n] = pattern(seed + 1, base + to, n)
        expect("the stock engine wrote wrong bytes", np.array_equal(ours.memory.array, now))


def we_ask(ours, child, rng, base):
    for round_ in range(12):
        seed, pieces = rng.randrange(1 << 40), list(slots(rng, rng.choice([1, 1, 3, 16])))
        child.ask("fill", seed)
        wanted = [(at, base + to, n) for at, to, n in pieces]
        ours.memory.array[:] = 0
        expect("our read failed", ours.transfer(0, wanted))
        for at, to, n in pieces:
            expect("we read wrong bytes", np.array_equal(ours.memory.part(at, n), pattern(seed, base + to, n)))
            ours.memory.part(at, n)[:] = pattern(seed + 1, base + to, n)
        expect("our write failed", ours.transfer(1, wanted))
        for _, to, n in pieces:
            expect("we wrote wrong bytes", child.ask("holds", seed + 1, to, n))
        at = sorted((to, n) for _, to, n in pieces)
        gaps = zip([0] + [to + n for to, n in at], [to for to, _ in at] + [BYTES])
        expect("we wrote beside it", all(child.ask("holds", seed, a, b - a) for a, b in gaps if a < b))


def packets(device):
    with open(f"/sys/class/infiniband/{device}/ports/1/hw_counters/sent_pkts") as counter:
        return int(counter.read())


def run(library, ours_at, theirs_at, seed):
    devices = sorted(ours_at.split(",")[1:] + theirs_at.split(",")[1:])
    before = [packets(device) for device in devices]
    child = Child([sys.executable, __file__, "stock", theirs_at, str(BYTES)])
    said = child.until("name")
    ours = Ours(library, ours_at, BYTES)
    print(f"interop: ours is {ours.name}, the stock engine {said['name']}", flush=True)
    ours.open(said["name"])
    rng = random.Random(seed)
    for number in range(2):
        stock_asks(ours, child, rng)
        print(f"interop: rdma, stock reads and writes ours: every byte right (seed {seed}, round {number})", flush=True)
        we_ask(ours, child, rng, said["addr"])
        print(f"interop: rdma, we read and write stock: every byte right (seed {seed}, round {number})", flush=True)
    sent = [packets(device) - count for device, count in zip(devices, before)]
    print("interop: rdma, packets sent:", ", ".join(f"{a} {b}" for a, b in zip(devices, sent)), flush=True)
    expect("a device was not used", all(sent))
    child.process.kill()
    child.process.wait()
    began = time.monotonic()
    expect("a transfer to a dead engine is said to be done", not ours.transfer(1, [(0, said["addr"], 1 << 20)]))
    print(f"interop: rdma, the stock engine was killed: an error after {time.monotonic() - began:.1f} s", flush=True)
    os._exit(0)


if __name__ == "__main__":
    role, *words = sys.argv[1:]
    if role == "run":
        run(*words[:3], int(words[3]) if len(words) > 3 else random.SystemRandom().randrange(1 << 32))
    elif role == "stock":
        stock(words[0], int(words[1]))
    else:
        raise SystemExit(__doc__)
