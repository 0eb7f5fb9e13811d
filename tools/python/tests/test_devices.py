"""Device pointers in `mooncake.engine`, over the driver for tests: its memory crashes the process that touches it."""

import os
import subprocess
import sys
import unittest

import bed
import device_driver

DRIVER = """
import ctypes
from device_driver import Driver
driver = Driver()
allocate = driver.allocate

def access(address, data, write):
    if write:
        driver.write(address, data)
    else:
        data[:] = driver.read(address, len(data))

def pattern(seed, size):
    return bytearray((seed + at * 7 + (at >> 8)) & 255 for at in range(size))
"""

ENGINE = """
import sys
from mooncake import engine as module
assert module.SUPPORT_CUDA is True and (module.SUPPORT_HIP or not driver.is_fake), "the drivers for tests answer"
from mooncake.engine import SUPPORT_CUDA, TransferEngine
SIZE = 3 << 20
host = bytearray(SIZE)
host_at = ctypes.addressof(ctypes.c_char.from_buffer(host))
prefill, decode = TransferEngine(), TransferEngine()
for engine in (prefill, decode):
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
caches = [allocate(SIZE) for _ in range(2)]
assert prefill.register_memory(host_at, SIZE, "cuda:0") == -1, "memory of the host is not on a device"
assert prefill.register_memory(caches[0], 2 * SIZE) < 0, "longer than the allocation"
assert prefill.register_memory(caches[0] + (64 << 30), SIZE) < 0, "nothing is allocated there"
assert prefill.batch_register_memory([caches[0]], [SIZE], "cuda:0") == 0
assert decode.batch_register_memory([caches[1], host_at], [SIZE, SIZE]) == 0
peer = f"127.0.0.1:{decode.get_rpc_port()}"

# Blocks of a request, in one call between device pointers: the transfer of vLLM's connector after a prefill.
access(caches[0], pattern(1, SIZE), True)
blocks = [(at, SIZE - at - 4096) for at in range(0, SIZE - 4096, 4096 * 5)]
ours, theirs = [caches[0] + at for at, _ in blocks], [caches[1] + at for _, at in blocks]
assert prefill.batch_transfer_sync_write(peer, ours, theirs, [4096] * len(blocks)) == 0
got = bytearray(SIZE)
access(caches[1], got, False)
sent = pattern(1, SIZE)
for here, there in blocks:
    assert got[there : there + 4096] == sent[here : here + 4096], (here, there)

# Whole layers, to the peer's host memory and back: the transfers of SGLang's connector.
assert prefill.transfer_sync_write(peer, caches[0], host_at, SIZE) == 0
assert bytes(host) == bytes(sent)
host[:] = pattern(9, SIZE)
assert prefill.transfer_sync_read(peer, caches[0], host_at, SIZE) == 0
access(caches[0], got, False)
assert got == pattern(9, SIZE)
for engine, addresses in ((prefill, [caches[0]]), (decode, [caches[1], host_at])):
    assert engine.batch_unregister_memory(addresses) == 0
assert prefill.transfer_sync_write(peer, caches[0], host_at, SIZE) < 0, "it is not registered any more"
print("passed")
"""

STREAMS = """
from mooncake.engine import TransferEngine
SIZE = 1 << 20
host = bytearray(SIZE)
host_at = ctypes.addressof(ctypes.c_char.from_buffer(host))
ours, theirs = TransferEngine(), TransferEngine()
for engine in (ours, theirs):
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
cache = allocate(SIZE)
assert ours.register_memory(cache, SIZE) == 0 and theirs.register_memory(host_at, SIZE) == 0
peer = f"127.0.0.1:{theirs.get_rpc_port()}"
stream = driver.stream() if driver.is_fake else 0

def launched(seed):
    # A kernel that is still running when the transfer begins, on a stream that the default one does not wait for.
    if driver.is_fake:
        driver.launch(stream, cache, SIZE, seed, 0.1)
    else:
        access(cache, pattern(seed, SIZE), True)

launched(3)
assert ours.transfer_write_on_cuda(peer, cache, host_at, SIZE, stream) is None
first = bytes(host)
assert first != bytes(SIZE) and first == driver.read(cache, SIZE), "the kernel's bytes were written"
launched(4)
assert ours.batch_transfer_write_on_cuda(peer, [cache], [host_at], [SIZE], stream_ptr=stream) is None
assert bytes(host) == driver.read(cache, SIZE) != first
launched(5)
assert ours.transfer_read_on_cuda(peer, cache, host_at, SIZE, stream) is None
assert driver.read(cache, SIZE) == bytes(host), "what arrives comes after the kernel"
assert ours.batch_transfer_read_on_cuda(peer, [cache], [host_at], [SIZE]) is None
for call in (
    lambda: ours.transfer_write_on_cuda(peer, cache, host_at + SIZE, 8, stream),
    lambda: ours.transfer_read_on_cuda("127.0.0.1:1", cache, host_at, 8, stream),
    lambda: TransferEngine().transfer_read_on_cuda(peer, cache, host_at, 8, stream),
):
    try:
        call()
    except RuntimeError as error:
        assert str(error)
    else:
        raise AssertionError("no error")
print("passed")
"""

STORE = """
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "127.0.0.1:50051") == 0
store.remove_all(True)
SIZE = 8 << 20
cache = allocate(SIZE)
assert store.put_from("k", cache, 4096) < 0, "it is not registered"
assert store.register_buffer(cache, 2 * SIZE) < 0, "longer than the allocation"
assert store.register_buffer(cache, SIZE) == 0

# Blocks of layers, as vLLM's store connector puts and loads them.
access(cache, pattern(3, SIZE), True)
keys = [f"block-{at}" for at in range(32)]
pointers = [[cache + layer * (2 << 20) + at * 8192 for layer in range(4)] for at in range(32)]
sizes = [[8192] * 4 for _ in keys]
assert store.batch_put_from_multi_buffers(keys, pointers, sizes) == [0] * 32
assert store.batch_put_from(["whole"], [cache], [SIZE]) == [0]
sent = pattern(3, SIZE)
first = b"".join(bytes(sent[layer * (2 << 20) : layer * (2 << 20) + 8192]) for layer in range(4))
assert store.get("block-0") == first
access(cache, bytearray(SIZE), True)
assert store.batch_get_into_multi_buffers(keys, pointers, sizes) == [4 * 8192] * 32
got = bytearray(SIZE)
access(cache, got, False)
for place in pointers:
    for at in place:
        assert got[at - cache : at - cache + 8192] == sent[at - cache : at - cache + 8192], at - cache
assert store.batch_get_into(["whole", "none"], [cache, cache], [SIZE, SIZE])[0] == SIZE
access(cache, got, False)
assert got == sent
assert store.get_into("whole", cache, 100) < 0, "too small"
assert store.unregister_buffer(cache) == 0
store.close()
print("passed")
"""


OBJECTS = """
import fake_torch
import kvplane
SIZE = 1 << 20

class Array:
    # Object with `__cuda_array_interface__`.
    def __init__(self, address, size, read_only=False, **more):
        whole = {"data": (address, read_only), "shape": (size // 4, 4), "typestr": "|u1", "version": 3}
        self.__cuda_array_interface__ = {**whole, **more}

class Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("number", ctypes.c_int32)]

class Managed(ctypes.Structure):
    # DLPack's `DLManagedTensor`.
    _fields_ = [("data", ctypes.c_void_p), ("device", Device), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8)]
    _fields_ += [("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16), ("shape", ctypes.c_void_p)]
    _fields_ += [("strides", ctypes.c_void_p), ("offset", ctypes.c_uint64), ("context", ctypes.c_void_p)]
    _fields_ += [("deleter", ctypes.c_void_p)]

class Exported:
    # Object with DLPack: rows of 16-bit numbers, behind an offset.
    def __init__(self, address, size, kind=2, strides=None):
        self.kind, self.streams = kind, []
        self.shape = (ctypes.c_int64 * 2)(size // 8, 4)
        self.strides = strides and (ctypes.c_int64 * 2)(*strides)
        at = lambda array: array and ctypes.addressof(array)
        place = address - 64, Device(kind, 0), 2, 0, 16, 1, at(self.shape), at(self.strides), 64
        self.tensor = Managed(*place, None, None)

    def __dlpack_device__(self):
        return self.kind, 0

    def __dlpack__(self, stream=None):
        self.streams.append(stream)
        make = ctypes.pythonapi.PyCapsule_New
        make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return make(ctypes.addressof(self.tensor), b"dltensor", None)

def tensor(address, size, gaps=False):
    return fake_torch.Tensor(None, address, (size // 4, 2), fake_torch.float16, gaps, device="cuda")

def refused(kind, word, call, *arguments):
    try:
        call(*arguments)
    except kind as error:
        assert word in str(error), error
    else:
        raise AssertionError(f"{call} accepts {arguments}")

ours, theirs = allocate(3 * SIZE), allocate(3 * SIZE)
late = driver.stream() if driver.is_fake else None
one, other = kvplane.TransferEngine(), kvplane.TransferEngine()
arrays = [Array(ours, SIZE), Exported(ours + SIZE, SIZE), tensor(ours + 2 * SIZE, SIZE)]
assert [one.register(array) for array in arrays] == [(ours + at * SIZE, SIZE) for at in range(3)]
assert other.register(theirs, 3 * SIZE) == (theirs, 3 * SIZE)
host = (ctypes.c_char * SIZE)()
pinned = Exported(ctypes.addressof(host), SIZE, kind=3)
assert one.register(pinned) == (ctypes.addressof(host), SIZE) and pinned.streams == [None]
driver.write(ours, bytes(pattern(1, 3 * SIZE)))
places = [theirs + at * SIZE for at in range(3)]
one.write(other.name, arrays, places, [SIZE] * 3)
assert driver.read(theirs, 3 * SIZE) == bytes(pattern(1, 3 * SIZE))
assert set(arrays[1].streams) == {1}, "the exporter orders its work before the default stream's"
driver.write(theirs, bytes(pattern(2, 3 * SIZE)))
one.start(other.name, False, [*arrays, pinned], [*places, theirs], [SIZE] * 4).wait()
assert driver.read(ours, 3 * SIZE) == bytes(pattern(2, 3 * SIZE)) and host.raw == bytes(pattern(2, 3 * SIZE))[:SIZE]
one.write(other.name, [ours + 4096], [theirs], [100])
refused(kvplane.InvalidArgument, "more than", one.write, other.name, arrays[:1], places[:1], [SIZE + 1])
refused(kvplane.InvalidArgument, "", one.write, other.name, arrays[:1], [theirs + 3 * SIZE], [1])
for broken in (Array(ours, SIZE, strides=(8, 1)), tensor(ours, SIZE, True), Exported(ours, SIZE, strides=(8, 1))):
    refused(ValueError, "not contiguous", one.register, broken)
    refused(ValueError, "not contiguous", one.write, other.name, [broken], [theirs], [1])
one.write(other.name, [Array(ours, SIZE, strides=(4, 1))], [theirs], [1])
refused(ValueError, "ambiguous", one.write, other.name, [Array(ours, SIZE, stream=0)], [theirs], [1])
refused(ValueError, "memory of the host", one.register, Array(ctypes.addressof(host), SIZE))
refused(ValueError, "mask", one.register, Array(ours, SIZE, mask=1))
refused(ValueError, "exceed", one.register, Array(ours, 4 * SIZE))
if late is not None:
    # A kernel on a stream that no default stream waits for.
    for number, call in enumerate([lambda: one.write(other.name, [Array(ours, SIZE, stream=late)], [theirs], [SIZE]),
                                   lambda: one.write(other.name, [ours], [theirs], [SIZE], stream=late),
                                   lambda: one.write(other.name, [Array(ours, SIZE, stream=2)], [theirs], [SIZE])]):
        before = driver.read(ours, SIZE)
        driver.launch(late if number < 2 else 2, ours, SIZE, number, 0.05)
        call()
        assert driver.read(theirs, SIZE) == driver.read(ours, SIZE) != before, number
    mixed = [Array(ours, 4, stream=late), Array(ours, 4)]
    refused(ValueError, "2 streams", one.write, other.name, mixed, [theirs] * 2, [1] * 2)
for array in [arrays[0], ours + SIZE, arrays[2], pinned]:
    one.unregister(array)

store = kvplane.Store()
store.clear()
driver.write(ours, bytes(pattern(3, 3 * SIZE)))
sent = bytes(pattern(3, 3 * SIZE))
store.put("array", arrays[0])
store.put_many({"dlpack": arrays[1], "tensor": arrays[2], "bytes": b"value", "pinned": pinned})
parts = [sent[:SIZE], sent[SIZE : 2 * SIZE], sent[2 * SIZE :], b"value"]
assert store.get_many(["array", "dlpack", "tensor", "bytes"]) == parts
assert store.get("pinned") == host.raw
for number, array in enumerate(arrays):
    driver.write(ours, bytes(3 * SIZE))
    assert store.get_into("array", array) == SIZE
    wanted = bytes(number * SIZE) + sent[:SIZE] + bytes((2 - number) * SIZE)
    assert driver.read(ours, 3 * SIZE) == wanted, number
assert store.get_into("none", arrays[0]) is None
refused(BufferError, "read-only", store.get_into, "array", Array(ours, SIZE, read_only=True))
refused(kvplane.InvalidArgument, "", store.get_into, "array", Array(ours, SIZE - 4))
with store.register(Array(ours, 3 * SIZE, stream=late)) as memory:
    before = driver.read(ours, SIZE)
    if late is not None:
        driver.launch(late, ours, SIZE, 7, 0.05)
    store.put_from([("piece", memory[: SIZE])])
    assert store.get("piece") == driver.read(ours, SIZE) and (late is None or before != store.get("piece"))
    assert store.get_many_into([("array", memory[SIZE : 2 * SIZE])]) == [SIZE]
    assert driver.read(ours + SIZE, SIZE) == sent[:SIZE]
    # Registered memory is used as it is.
    store.put("inside", Array(ours + SIZE, SIZE))
    assert store.get("inside") == sent[:SIZE]
assert memory.closed
if late is not None:
    before = driver.read(ours, SIZE)
    driver.launch(late, ours, SIZE, 8, 0.05)
    store.put("late", Array(ours, SIZE, stream=late))
    assert store.get("late") == driver.read(ours, SIZE) != before
for each in (one, other, store):
    each.close()
del memory, arrays
for base in (ours, theirs):
    driver.free(base)
driver.check_released()
print("passed")
"""


TENSORS = """
import sys
import fake_torch
sys.modules["torch"] = fake_torch
from mooncake.store import MooncakeDistributedStore

class DeviceTensor(fake_torch.Tensor):
    def raw(self):
        return driver.read(self._address, self.numel() * self.element_size())

def on_device(address, *shape, kind=fake_torch.float32, gaps=False):
    return DeviceTensor(None, address, shape, kind, gaps, device="cuda")

store = MooncakeDistributedStore()
assert store.get_tensor_into_cuda("k", None) == -1, "it is not set up"
assert store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "127.0.0.1:50051") == 0
store.remove_all(True)
ROWS, SIZE = 700, 700 * 1000 * 4
base = allocate(3 * SIZE)
value = bytes(pattern(5, SIZE))
driver.write(base, value + bytes(2 * SIZE))
assert store.put_tensor("device", on_device(base, ROWS, 1000)) == 0
assert store.get_tensor("device").raw() == value
assert store.put_tensor("host", fake_torch.of(value[::-1], (1000, ROWS), fake_torch.float32)) == 0
into = on_device(base + SIZE, ROWS, 1000)
assert store.get_tensor_into_cuda("device", into) == -600, "it is not registered"
assert store.register_buffer(base, 3 * SIZE) == 0
assert store.get_tensor_into_cuda("device", into) == SIZE
assert driver.read(base, 3 * SIZE) == value + value + bytes(SIZE)
other = on_device(base + 2 * SIZE, 1000, ROWS)
got = store.batch_get_tensor_into_cuda(["host", "none", "", "device"], [other] * 3 + [into])
assert got == [SIZE, -704, -704, SIZE], got
assert driver.read(base, 3 * SIZE) == value + value + value[::-1]
assert store.put("noise", b"x" * 400) == 0 and store.put("short", b"x") == 0
kinds = [on_device(base, ROWS, 999), on_device(base, ROWS, 1000, gaps=True)]
kinds.append(on_device(base, ROWS, 1000, kind=fake_torch.int32))
assert store.batch_get_tensor_into_cuda(["device"] * 3, kinds) == [-600] * 3
assert store.batch_get_tensor_into_cuda(["noise", "short"], [into] * 2) == [-600] * 2
assert store.batch_get_tensor_into_cuda([], []) == [] and store.batch_get_tensor_into_cuda(["a"], []) == [-600]
assert driver.read(base, 3 * SIZE) == value + value + value[::-1], "nothing else was written"
assert store.unregister_buffer(base) == 0
store.close()
driver.free(base)
driver.check_released()
print("passed")
"""

#: Ends an interpreter, or a child that was forked from it, while copies of a transfer are in flight.
EXIT = """
import os, sys
from mooncake.engine import TransferEngine
SIZE = 8 << 20
prefill, decode = TransferEngine(), TransferEngine()
for engine in (prefill, decode):
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
caches = [allocate(SIZE) for _ in range(2)]
assert prefill.register_memory(caches[0], SIZE) == 0 and decode.register_memory(caches[1], SIZE) == 0
peer = f"127.0.0.1:{decode.get_rpc_port()}"
if driver.is_fake:
    driver._library.kvplane_fake_set(ctypes.c_uint64(0), ctypes.c_uint64(20 << 20), ctypes.c_uint64(1))
batch = prefill.transfer_submit_write(peer, caches[0], caches[1], SIZE)
assert batch != 0
child = os.fork()
if child == 0:
    assert prefill.transfer_sync_write(peer, caches[0], caches[1], SIZE) < 0, "a forked child has no engine"
    assert prefill.register_memory(caches[1], SIZE) < 0
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print("passed")
"""

#: Registers a device pointer in a child whose parent's driver was initialized, by another library than ours.
FORKED = """
import os, sys
from mooncake.engine import TransferEngine
cache = allocate(1 << 20)
child = os.fork()
if child == 0:
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(cache, 1 << 20) < 0, "the driver cannot be used in a forked child"
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
print("passed")
"""


class Devices(unittest.TestCase):
    def run_script(self, script, **more):
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)), **more)
        command = [sys.executable, "-c", script]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)

    def test_device_pointers_are_registered_and_transferred(self):
        more = device_driver.environment()
        done = self.run_script(DRIVER + ENGINE, **more)
        self.assertEqual((done.returncode, done.stdout.strip()), (0, "passed"), done.stderr)

    def test_transfers_come_after_the_work_on_a_stream(self):
        more = device_driver.environment()
        done = self.run_script(DRIVER + STREAMS, **more)
        self.assertEqual((done.returncode, done.stdout.strip()), (0, "passed"), done.stderr)

    def test_an_interpreter_and_a_forked_child_end_with_copies_in_flight(self):
        more = device_driver.environment()
        done = self.run_script(DRIVER + EXIT, **more)
        self.assertEqual((done.returncode, done.stdout.strip()), (0, "passed"), done.stderr)

    def test_a_child_of_a_process_with_a_driver_gets_an_error(self):
        more = device_driver.environment()
        done = self.run_script(DRIVER + FORKED, **more)
        self.assertEqual((done.returncode, done.stdout.strip()), (0, "passed"), done.stderr)

    def test_objects_are_put_from_and_read_into_device_pointers(self):
        more = device_driver.environment()
        bed.bed()
        done = self.run_script(DRIVER + STORE, **more)
        self.assertEqual((done.returncode, done.stdout.strip()), (0, "passed"), done.stderr)

    def test_objects_of_all_kinds_are_registered_transferred_and_stored(self):
        more = device_driver.environment()
        bed.bed()
        done = self.run_script(DRIVER + OBJECTS, **more)
        self.assertEqual((done.returncode, done.stdout.strip()), (0, "passed"), done.stderr)

    def test_tensors_are_put_from_a_device_and_read_into_it(self):
        more = device_driver.environment()
        bed.bed()
        done = self.run_script(DRIVER + TENSORS, **more)
        self.assertEqual((done.returncode, done.stdout.strip()), (0, "passed"), done.stderr)

    def test_nothing_is_supported_without_a_driver(self):
        if os.environ.get("KVPLANE_GPU"):
            self.skipTest("this machine has a driver")
        script = "from mooncake.engine import SUPPORT_CUDA, SUPPORT_HIP; print(SUPPORT_CUDA, SUPPORT_HIP)"
        done = self.run_script(script)
        self.assertEqual((done.returncode, done.stdout.strip()), (0, "False False"), done.stderr)


if __name__ == "__main__":
    unittest.main()
