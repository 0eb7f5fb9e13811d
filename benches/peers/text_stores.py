"""redis and memcached over TCP, at their fastest. usage: text_stores.py redis|memcached ... (stores.py)

A batch is a pipeline of SETs or GETs, for memcached one multi-key `get`; the commands are built before the clock starts,
values are sent with sendmsg directly from their memory, and replies are received in one piece into preallocated memory.
No client library is faster. Large batches are sent in pieces of 8 MiB, the next requested before one has arrived: with
all at once redis would first copy them all into its reply.
"""
import os
import socket
import subprocess
import sys

from stores import Store, child, serve_client, serve_until_parent_goes, wait_for_port

PIECE_BYTES = 8 << 20
MOST_PARTS = 1000  # the kernel takes 1024
KIND, ROLE = sys.argv[1], sys.argv[2]
PORTS = dict(redis=16379, memcached=16380)


class Text(Store):
    slack = 4 << 20

    def __init__(self, port, index, buffer_bytes):
        super().__init__(index, buffer_bytes)
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.answers = memoryview(bytearray(1 << 16))

    def piece(self, size):
        return min(max(1, PIECE_BYTES // size), MOST_PARTS // 2)

    def stride(self, size):
        return len(self.head(size)) + size + 2

    def place_found(self, size, item):
        count = self.piece(size)
        return (item // count) * (count * self.stride(size) + self.tail) + (item % count) * self.stride(size) + len(self.head(size))

    def prepare(self, keys, size):
        count, pieces = self.piece(size), []
        for first in range(0, len(keys), count):
            some = [key.encode() for key in keys[first : first + count]]
            sets = [self.set_head(key, size) for key in some]
            sets = [sets[0]] + [b"\r\n" + head for head in sets[1:]]
            pieces.append((sets, self.ask(some), len(some)))
        return pieces

    def prepare_places(self, places, size):
        return [self.source.view[at : at + size] for at in places]

    def prepare_found(self, size, batch):
        count, targets = self.piece(size), []
        for first in range(0, batch, count):
            some = min(count, batch - first)
            at = self.place_found(size, first) - len(self.head(size))
            targets.append(self.found.view[at : at + some * self.stride(size) + self.tail])
        return targets

    def put(self, pieces, places, size):
        first = 0
        for sets, _, count in pieces:
            parts = [None] * (2 * count + 1)
            parts[0:-1:2], parts[1::2], parts[-1] = sets, places[first : first + count], b"\r\n"
            self.send(parts)
            first += count
        return self.receive(self.answers[: len(self.stored) * first]) != self.stored * first

    def get(self, pieces, targets, size):
        begins, last = self.head(size)[:5], len(pieces) - 1
        self.socket.sendall(pieces[0][1])
        for number, target in enumerate(targets):
            if number < last:
                self.socket.sendall(pieces[number + 1][1])
            if self.receive(target, whole=False)[:5] != begins:
                return True
        return False

    def send(self, parts):
        sent, total = self.socket.sendmsg(parts), sum(map(len, parts))
        for part in parts:
            if sent >= total:
                break
            if sent >= len(part):
                sent, total = sent - len(part), total - len(part)
                continue
            self.socket.sendall(memoryview(part)[sent:])
            total -= len(part)
            sent = 0

    def receive(self, target, whole=True):
        got = 0
        while got < len(target):
            count = self.socket.recv_into(target[got:], len(target) - got, socket.MSG_WAITALL)
            if count == 0:
                raise EOFError("the server has gone")
            got += count
        return bytes(target) if whole else bytes(target[:8])

    def remove(self, keys):
        for first in range(0, len(keys), 100):
            some = [key.encode() for key in keys[first : first + 100]]
            self.socket.sendall(b"".join(map(self.delete, some)))
            self.receive(self.answers[: len(self.deleted) * len(some)])


class Redis(Text):
    stored, deleted, tail = b"+OK\r\n", b":1\r\n", 0

    def head(self, size):
        return b"$%d\r\n" % size

    def set_head(self, key, size):
        return b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, size)

    def ask(self, keys):
        return b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key) for key in keys)

    def delete(self, key):
        return b"*2\r\n$3\r\nDEL\r\n$%d\r\n%s\r\n" % (len(key), key)


class Memcached(Text):
    stored, deleted, tail = b"STORED\r\n", b"DELETED\r\n", 5

    def head(self, size):
        return b"VALUE " + b"k" * 16 + b" 0 %d\r\n" % size

    def set_head(self, key, size):
        return b"set %s 0 0 %d\r\n" % (key, size)

    def ask(self, keys):
        return b"get " + b" ".join(keys) + b"\r\n"

    def delete(self, key):
        return b"delete %s\r\n" % key


if ROLE == "client":
    port, index, buffer_bytes = map(int, sys.argv[3:6])
    serve_client((Redis if KIND == "redis" else Memcached)(port, index, buffer_bytes))

pool_bytes, folder, port = int(sys.argv[3]), sys.argv[4], PORTS[KIND]
if KIND == "redis":
    version = subprocess.run(["redis-server", "--version"], capture_output=True, text=True).stdout.split()[2]
    # Freed memory stays with the process, as in the other stores.
    os.environ["MALLOC_CONF"] = "dirty_decay_ms:-1,muzzy_decay_ms:-1"
    words = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no", "--dir", folder]
    server = child(["redis-server", *words, "--protected-mode", "no"], f"{folder}/redis.log")
else:
    version = subprocess.run(["memcached", "-V"], capture_output=True, text=True).stdout.split()[-1]
    words = ["-l", "127.0.0.1", "-p", str(port), "-U", "0", "-m", str((2 * pool_bytes) >> 20), "-I", "128m"]
    words += ["-t", str(os.cpu_count() or 1)] + (["-u", "root"] if os.geteuid() == 0 else [])
    server = child(["memcached", *words], f"{folder}/memcached.log")
wait_for_port(port)
serve_until_parent_goes([server], f"{KIND}-{version.replace('v=', '')}", str(port))
