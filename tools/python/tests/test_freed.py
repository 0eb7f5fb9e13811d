"""Registered memory freed without unregistering: both sides get a negative error number and do not crash."""

import unittest

import bed

HEAD = """
import ctypes, subprocess, sys
from mooncake.engine import TransferEngine
from mooncake.store import MooncakeDistributedStore
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
SIZE = 8 << 20
def mapped(number=0):
    # Far from where the kernel places mappings without a fixed address, so that freed ranges stay unmapped.
    at = (16 + number) << 32
    assert libc.mmap(at, SIZE, 3, 0x100022, -1, 0) == at
    return at
def many(start, count):
    return [start + index * 4096 for index in range(count)]
def freed(at):
    assert libc.munmap(at, SIZE) == 0
def engine():
    made = TransferEngine()
    assert made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    return made
"""

#: An engine of another process: prints its memory address, and reads and writes on command.
PEER = (
    HEAD
    + """
us, at = engine(), mapped()
assert us.register_memory(at, SIZE) == 0
print(us.get_rpc_port(), at, flush=True)
for line in sys.stdin:
    target, theirs, size = line.split()
    there = (many(at, 8), many(int(theirs), 8), [4096] * 8)
    print([us.transfer_sync_read(target, at, int(theirs), int(size)),
        us.transfer_sync_write(target, at, int(theirs), int(size)),
        us.batch_transfer_sync_read(target, *there), us.batch_transfer_sync_write(target, *there)], flush=True)
"""
)

WITH_PEER = (
    HEAD
    + """
peer = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
port, there = peer.stdout.readline().split()
name, there = f"127.0.0.1:{port}", int(there)
us, at = engine(), mapped()
assert us.register_memory(at, SIZE) == 0
mine = f"127.0.0.1:{us.get_rpc_port()}"
def asked(size):
    peer.stdin.write(f"{mine} {at} {size}\\n")
    peer.stdin.flush()
    return eval(peer.stdout.readline())
"""
)


class Freed(unittest.TestCase):
    """What callers and peers see when registered memory was freed."""

    def setUp(self):
        bed.bed()

    def test_ours(self):
        out = bed.python(
            WITH_PEER
            + """
def all_of(size):
    return [us.transfer_sync_write(name, at, there, size), us.transfer_sync_read(name, at, there, size),
        us.batch_transfer_sync_write(name, many(at, 50), many(there, 50), [4096] * 50),
        us.transfer_sync_write(mine, at, at + SIZE - size, size)]
print(all_of(4096))
freed(at)
print({code < 0 for size in (16, 4096, 65536, SIZE // 2) for code in all_of(size)})
again = mapped(1)
assert us.unregister_memory(at) == 0 and us.register_memory(again, SIZE) == 0
print(us.transfer_sync_write(name, again, there, SIZE))
peer.kill()
peer.wait()
""",
            PEER,
        )
        self.assertEqual(out.split("\n")[:3], ["[0, 0, 0, 0]", "{True}", "0"])

    def test_memory_that_is_mapped_read_only(self):
        out = bed.python(
            WITH_PEER
            + """
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
fixed = mapped(1)
ctypes.memset(fixed, 7, SIZE)
assert libc.mprotect(fixed, SIZE, 1) == 0 and us.register_memory(fixed, SIZE) == 0
at = fixed
print([code < 0 for code in asked(4096)])
print(us.transfer_sync_read(name, fixed, there, 4096) < 0, us.transfer_sync_write(name, fixed, there, 4096))
print(set(ctypes.string_at(fixed, SIZE)))
peer.kill()
peer.wait()
""",
            PEER,
        )
        self.assertEqual(out.split("\n")[:3], ["[False, True, False, True]", "True 0", "{7}"])

    def test_part_of_ours(self):
        out = bed.python(
            WITH_PEER
            + """
assert libc.munmap(at + 65536, 4096) == 0
print([us.transfer_sync_write(name, at + offset, there, 4096) >= 0 for offset in (0, 61440, 61441, 65536, 69632)])
peer.kill()
peer.wait()
""",
            PEER,
        )
        self.assertEqual(out.strip(), "[True, True, False, False, True]")

    def test_ours_that_a_peer_uses(self):
        out = bed.python(
            WITH_PEER
            + """
print(asked(4096))
freed(at)
print({code < 0 for size in (16, 4096, 65536, SIZE // 2) for code in asked(size)})
# The connection still works.
other = mapped(1)
assert us.unregister_memory(at) == 0 and us.register_memory(other, SIZE) == 0
at = other
print(asked(65536))
peer.kill()
peer.wait()
""",
            PEER,
        )
        self.assertEqual(out.split("\n")[:3], ["[0, 0, 0, 0]", "{True}", "[0, 0, 0, 0]"])

    def test_the_store(self):
        out = bed.python(
            HEAD
            + """
store = MooncakeDistributedStore()
assert store.setup("localhost", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", "") == 0
at = mapped()
assert store.register_buffer(at, SIZE) == 0
assert store.upsert("there", b"x" * 100_000) == 0
assert store.batch_put_session_start(["session"], [100]) == [0]
freed(at)
print([store.put_from("freed", at, 100), store.put_from("freed", at, 1 << 20), store.get_into("there", at, 1 << 20)])
print(store.batch_put_from_multi_buffers(["freed"], [[at, at + 4096]], [[4096, 4096]]))
print(store.batch_get_into_multi_buffers(["there"], [[at, at + 65536]], [[65536, 65536]]))
print(store.get_into_ranges([at], [["there"]], [[[0]]], [[[0]]], [[[100]]]))
print(store.batch_put_from_multi_buffer_ranges(["session"], [[at]], [[100]], [[0]]))
print(store.is_exist("freed"), store.unregister_buffer(at))
"""
        )
        self.assertEqual(
            out.strip().split("\n"),
            ["[-600, -600, -600]", "[-600]", "[-600]", "[[[-600]]]", "[-600]", "0 0"],
        )


if __name__ == "__main__":
    unittest.main()
