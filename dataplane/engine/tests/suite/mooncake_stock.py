"""Stock engine for mooncake_stock.rs: an engine of the wheel, on loopback.

initiate PORT ADDRESS BYTES   reads and writes memory of a data server at PORT.
serve BYTES                   serves memory of its own; prints its address, then checks what was written to it.
"""

import ctypes
import json
import mmap
import os
import socket
import struct
import sys
import threading
import time

os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")
os.environ.setdefault("MC_FORCE_TCP", "true")
os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
os.environ.setdefault("MC_TRANSFER_TIMEOUT", "5")

from mooncake.engine import TransferEngine  # noqa: E402


def memory(size):
    area = mmap.mmap(-1, size)
    return area, ctypes.addressof(ctypes.c_char.from_buffer(area))


def pattern(seed, size):
    return bytes((seed + i * 7 + (i >> 8) * 3) & 0xFF for i in range(size))


def start():
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1:17001", "P2PHANDSHAKE", "tcp", "") == 0
    return engine


def receive(connection, size):
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def daemon(port, address, size):
    """Answers a stock engine's request for the descriptor of the served memory."""
    listener = socket.create_server(("127.0.0.1", 0))
    name = "127.0.0.1:%d" % listener.getsockname()[1]
    descriptor = {
        "name": name,
        "protocol": "tcp",
        "tcp_data_host": "127.0.0.1",
        "tcp_data_port": port,
        "tcp_proto_version": 2,
        "rdma_server_name": "",
        "timestamp": "2026-01-01 00:00:00.000000",
        "buffers": [{"addr": address, "length": size, "name": name}],
    }

    def run():
        while True:
            connection, _ = listener.accept()
            with connection:
                try:
                    (length,) = struct.unpack("<Q", receive(connection, 8))
                    kind = receive(connection, length)[0]
                    body = json.dumps(descriptor if kind == 1 else {"status": "success"}).encode()
                    connection.sendall(struct.pack("<QB", 1 + len(body), kind) + body)
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(1)
                except (EOFError, OSError):
                    pass

    threading.Thread(target=run, daemon=True).start()
    return name


def initiate(port, address, size):
    unanswered = os.environ.get("MC_TCP_PROTO") == "1"
    name = daemon(port, address, size)
    engine = start()
    area, local = memory(size)
    assert engine.register_memory(local, size) == 0
    for round, count in enumerate([1, 7, 64, 4096, 65536, 65537, 1 << 20, size]):
        wanted = pattern(round, count)
        offset = (size - count) // 2
        area[:count] = wanted
        assert engine.transfer_sync_write(name, local, address + offset, count) == 0, count
        # In version 1 a write is complete when it is in the writer's socket buffer: it lands a moment later.
        for attempt in range(200 if unanswered else 1):
            area[:count] = b"\0" * count
            assert engine.transfer_sync_read(name, local, address + offset, count) == 0, count
            if area[:count] == wanted:
                break
            time.sleep(0.01)
        assert area[:count] == wanted, count
    area[:100] = pattern(99, 100)
    many = [(local + i, address + i * 1000, 1) for i in range(100)]
    assert engine.batch_transfer_sync_write(name, *[list(part) for part in zip(*many)]) == 0
    for bad, count in [(address - 1, 10), (address + size - 5, 10), (address + size, 1 << 20), (8, 8)]:
        # In version 1 the writer is not notified of a rejection.
        assert unanswered or engine.transfer_sync_write(name, local, bad, count) != 0, "a write outside"
        assert engine.transfer_sync_read(name, local, bad, count) != 0, "a read outside"
    time.sleep(0.2 if unanswered else 0)
    print("good", flush=True)


def serve(size):
    engine = start()
    area, address = memory(size)
    area[:] = pattern(1, size)
    assert engine.register_memory(address, size) == 0
    with socket.create_connection(("127.0.0.1", engine.get_rpc_port())) as connection:
        connection.sendall(struct.pack("<QB", 3, 1) + b"{}")
        (length,) = struct.unpack("<Q", receive(connection, 8))
        descriptor = json.loads(receive(connection, length)[1:])
    print(descriptor["tcp_data_port"], descriptor["tcp_proto_version"], address, flush=True)
    sys.stdin.readline()
    assert area[:] == pattern(2, size), "what was written is in place"
    print("good", flush=True)


arguments = [int(word) for word in sys.argv[2:]]
{"initiate": initiate, "serve": serve}[sys.argv[1]](*arguments)
sys.stdout.flush()
# A stock engine does not always end on its own.
os._exit(0)
