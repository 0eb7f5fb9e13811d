"""A stock Mooncake wheel and kvplane read and write each other's segments, every byte compared.

usage: interop.py run KVPLANE [SEED]       all stages, both directions, protocols v1 and v2; exit status 1 on a difference
       interop.py initiator NAME BYTES SEED
       interop.py target BYTES             a stock target that obeys `fill`, `zero` and `check` on standard input

Runs in a network namespace of its own, because the stock engine listens on every address. The bytes are those of
`kvplane tebench --op_type write_seed`: each word follows from its offset in the target, so misplaced bytes are detected.
"""
import json
import os
import random
import subprocess
import sys
import threading
import time

import numpy as np

os.environ.update(MC_FORCE_TCP="true", MC_LOG_LEVEL="ERROR", GLOG_minloglevel="2", MC_TCP_BIND_ADDRESS="127.0.0.1")
WORD = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15
TARGET_SEED = 0x746562656E636801
BYTES = 8 << 20
ROUNDS = 60
PATIENCE_S = 180


def mix(word):
    word = (word + STEP) & WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)


def pattern(seed, at, size):
    """Returns `size` bytes of the pattern from offset `at` on."""
    start, first, last = mix(seed ^ 0x6B76706C616E6531), at // 8, (at + size + 7) // 8
    index = np.arange(last - first, dtype=np.uint64) + np.uint64(first)
    word = np.uint64(start) + index * np.uint64(STEP)
    word ^= ((word & np.uint64(0xFFFFFFFF)) * np.uint64(0x85EBCA6B)) << np.uint64(32)
    word ^= word >> np.uint64(32)
    return word.view(np.uint8)[at % 8 :][:size]


class Memory:
    def __init__(self, size):
        self.array = np.zeros(size, dtype=np.uint8)
        self.addr, self.size = self.array.ctypes.data, size

    def part(self, at, size):
        return self.array[at : at + size]


def engine_with(memory, port):
    from mooncake.engine import TransferEngine

    engine = TransferEngine()
    if engine.initialize(f"127.0.0.1:{port}", "P2PHANDSHAKE", "tcp", ""):
        raise SystemExit("the stock engine does not start")
    if engine.register_memory(memory.addr, memory.size):
        raise SystemExit("the stock engine does not take the memory")
    return engine


def ranges(rng, size, largest=1 << 20):
    """Draws a random range: small, large or odd."""
    length = min(size, 1 << rng.randrange(1, largest.bit_length())) - rng.randrange(2)
    length = max(1, length)
    return rng.randrange(size - length + 1), length


def cuts(rng, size):
    """Splits the whole range in random pieces, in random order."""
    points = sorted({0, size, *(rng.randrange(1, size) for _ in range(200))})
    pieces = [(a, b - a) for a, b in zip(points, points[1:])]
    rng.shuffle(pieces)
    return pieces


def expect(what, good):
    if not good:
        raise SystemExit(f"interop: {what}")


def expect_soon(what, good):
    """Waits for bytes: version 1 acknowledges no write, so they may still be in flight when the writer is done."""
    end = time.monotonic() + (2.0 if os.environ.get("MC_TCP_PROTO") == "1" else 0.0)
    while not good():
        expect(what, time.monotonic() < end)
        time.sleep(0.01)


def initiator(name, size, seed):
    """Tests the stock engine against a target with the pattern, which has the pattern again at the end."""
    rng, memory = random.Random(seed), Memory(size)
    engine = engine_with(memory, 17002)
    expect(f"no probe of {name}", engine.send_probe(name) == 0)
    base = engine.get_first_buffer_address(name)
    expect(f"{name} names no buffer", base != 0)
    origin = None
    for at, length in [ranges(rng, size) for _ in range(ROUNDS)]:
        memory.part(at, length)[:] = 0
        expect("a read failed", engine.transfer_sync_read(name, memory.addr + at, base + at, length) == 0)
        found = memory.part(at, length)
        if origin is None:
            origin = 0 if np.array_equal(found, pattern(TARGET_SEED, at, length)) else base
        expect(f"read of {length} bytes at {at}", np.array_equal(found, pattern(TARGET_SEED, origin + at, length)))
    for number, (at, length) in enumerate(ranges(rng, size) for _ in range(ROUNDS)):
        memory.part(at, length)[:] = pattern(number, at, length)
        expect("a write failed", engine.transfer_sync_write(name, memory.addr + at, base + at, length) == 0)

        def is_back():
            memory.part(at, length)[:] = 0
            expect("a read failed", engine.transfer_sync_read(name, memory.addr + at, base + at, length) == 0)
            return np.array_equal(memory.part(at, length), pattern(number, at, length))

        expect_soon(f"write of {length} bytes at {at}", is_back)
    pieces = cuts(rng, size)
    memory.array[:] = pattern(TARGET_SEED, origin, size)
    batch = [[start + at for at, _ in pieces] for start in (memory.addr, base)] + [[length for _, length in pieces]]
    expect("a batch of writes failed", engine.batch_transfer_sync_write(name, *batch) == 0)

    def all_is_back():
        memory.array[:] = 0
        expect("a batch of reads failed", engine.batch_transfer_sync_read(name, *batch) == 0)
        return np.array_equal(memory.array, pattern(TARGET_SEED, origin, size))

    expect_soon("a batch came back wrong", all_is_back)
    outside = engine.transfer_sync_write(name, memory.addr, base + size, 64)
    # Version 1 has no reply to a write, so the stock engine cannot notice the failure.
    expect("a write beyond the buffer was taken", outside != 0 or os.environ.get("MC_TCP_PROTO") == "1")
    os._exit(0)


def target(size):
    memory = Memory(size)
    engine = engine_with(memory, 17001)
    print(json.dumps(dict(name=f"127.0.0.1:{engine.get_rpc_port()}", addr=memory.addr)), flush=True)
    origin = 0
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "zero":
            memory.array[:] = 0
        elif word == "fill":
            memory.array[:] = pattern(TARGET_SEED, origin, size)
        at, length = [int(value) for value in rest] or (0, size)
        good = True
        if word == "check":
            fits = [start for start in (0, memory.addr)
                    if np.array_equal(memory.part(at, length), pattern(TARGET_SEED, start + at, length))]
            good, origin = bool(fits), (fits or [0])[0]
            beside = memory.array.copy()
            beside[at : at + length] = 0
            good = good and not beside.any()
        print(json.dumps(dict(good=good)), flush=True)
    os._exit(0)


class Child:
    """A process whose replies have a deadline."""

    def __init__(self, words):
        self.process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.timer = threading.Timer(PATIENCE_S, self.process.kill)
        self.timer.start()

    def until(self, wanted):
        for line in self.process.stdout:
            if wanted in line:
                return line
        raise SystemExit(f"interop: {self.process.args[:4]} ended before it said {wanted!r}")

    def ask(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return json.loads(self.until("good"))["good"]

    def end(self):
        self.timer.cancel()
        self.process.kill()
        self.process.wait()


def run_checked(words, what):
    outcome = subprocess.run(words, timeout=PATIENCE_S, stdout=subprocess.DEVNULL)
    expect(f"{what}: exit status {outcome.returncode} from {' '.join(map(str, words))}", outcome.returncode == 0)


def stock_asks(kvplane, seed):
    ours = Child([kvplane, "tebench", f"--total_buffer_size={BYTES}", "--xport_type=tcp"])
    try:
        name = ours.until("--target_seg_name=").split("--target_seg_name=")[1].split()[0]
        run_checked([sys.executable, __file__, "initiator", name, str(BYTES), str(seed)], "stock initiator")
    finally:
        ours.end()


def we_ask(kvplane, seed):
    rng, stock = random.Random(seed), Child([sys.executable, __file__, "target", str(BYTES)])
    try:
        name = json.loads(stock.until("name"))["name"]

        def tebench(operation, at, block, batch):
            run_checked(
                [kvplane, "tebench", "--backend=mooncake", f"--target_seg_name={name}", *operation,
                 f"--total_buffer_size={BYTES}", f"--target_offset={at}", "--duration=0.02",
                 f"--start_block_size={block}", f"--max_block_size={block}", f"--start_batch_size={batch}",
                 f"--max_batch_size={batch}", "--json=-"], "our initiator")

        for _ in range(8):
            batch = rng.choice([1, 3, 16])
            at, length = ranges(rng, BYTES // batch, 1 << 19)
            expect("zero", stock.ask("zero"))
            tebench(["--op_type=write_seed"], at, length, batch)
            written = f"{at} {length * batch}"
            expect_soon(f"our write of {batch} x {length} bytes at {at}", lambda: stock.ask(f"check {written}"))
            expect("fill", stock.ask("fill"))
            tebench(["--op_type=read_verify"], at, length, batch)
            tebench(["--check_consistency=true"], at, length, batch)
    finally:
        stock.end()


def run(kvplane, seed):
    for proto in (2, 1):
        for what, stage in [("stock reads and writes ours", stock_asks), ("we read and write stock", we_ask)]:
            os.environ["MC_TCP_PROTO"] = str(proto)
            stage(kvplane, seed)
            print(f"interop: v{proto}, {what}: every byte right (seed {seed})", flush=True)


if __name__ == "__main__":
    role, *words = sys.argv[1:]
    if role == "run":
        run(words[0], int(words[1]) if len(words) > 1 else random.SystemRandom().randrange(1 << 32))
    elif role == "initiator":
        initiator(words[0], int(words[1]), int(words[2]))
    elif role == "target":
        target(int(words[0]))
    else:
        raise SystemExit(__doc__)
