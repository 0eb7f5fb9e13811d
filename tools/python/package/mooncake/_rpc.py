"""Messages between processes: the `RpcInterface` of `mooncake.engine`.

Each message is a frame of a length and bytes over TCP, acknowledged by one number. Both ends must be of this package:
Mooncake's clients use another protocol. A server listens on loopback unless it is given another address.
"""

import select
import socket
import struct
import threading
import traceback

from kvplane._buffers import exporter

_MAGIC = 0x6B767270
_HEADER = struct.Struct("<IBQ")
_ANSWER = struct.Struct("<i")
_DATA, _TENSOR = 0, 1
_MOST_BYTES = 4 << 30
_MOST_CONNECTIONS = 256


class ReceivedData:
    """Received bytes, and their sender."""

    source_address = ""

    def __init__(self, source_address, value):
        self.source_address = source_address
        self._value = value

    @property
    def data_size(self):
        """Returns the number of bytes."""
        return len(self._value)

    def get_bytes(self):
        """get_bytes(self: mooncake.engine.ReceivedData) -> bytes"""
        return bytes(self._value)

    def get_memory_view(self):
        """get_memory_view(self: mooncake.engine.ReceivedData) -> memoryview"""
        return memoryview(self._value)


class ReceivedTensor:
    """Received tensor: its bytes, shape and type, and its sender."""

    source_address = ""
    shape = ()
    dtype = ""

    def __init__(self, source_address, value, shape, dtype):
        self.source_address = source_address
        self._value = value
        self.shape = shape
        self.dtype = dtype

    @property
    def total_bytes(self):
        """Returns the number of bytes."""
        return len(self._value)

    def get_data_size(self):
        """get_data_size(self: mooncake.engine.ReceivedTensor) -> int"""
        return len(self._value)

    def get_data_as_bytes(self):
        """get_data_as_bytes(self: mooncake.engine.ReceivedTensor) -> bytes"""
        return bytes(self._value)

    def get_memory_view(self):
        """get_memory_view(self: mooncake.engine.ReceivedTensor) -> memoryview"""
        return memoryview(self._value)


def _address(text):
    host, _, port = text.rpartition(":")
    return (host.strip("[]") or "127.0.0.1", int(port))


def _shut(connection):
    """Ends a connection, or the listening of a server: a thread that waits for it wakes, as it does not by a close."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def _is_ended(connection):
    """Returns True if the peer has ended an idle connection: then there is something to read, its end."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _bytes_of(tensor):
    """Returns the bytes of a tensor or an array, in the order of its elements."""
    if hasattr(tensor, "detach"):
        return memoryview(exporter(tensor.detach().cpu().contiguous())).cast("B") if tensor.numel() else b""
    try:
        return memoryview(tensor).cast("B")
    except (BufferError, TypeError, ValueError):
        # Elements without bytes, of a type that views do not know, or with gaps between them.
        return tensor.tobytes()


def _receive(connection, size):
    value = bytearray(size)
    view = memoryview(value)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionError("the peer closed the connection")
        view = view[count:]
    return value


class RpcInterface:
    """Sends data and tensors to peers, and receives theirs."""

    def __init__(self):
        self._timeout = 30
        self._listen = ""
        self._server = None
        #: Connections of the server.
        self._served = set()
        self._on_data = None
        self._on_tensor = None
        self._pool = {}
        self._room = 0
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(_MOST_CONNECTIONS)

    def initialize(self, listen_address="", thread_count=0, timeout_seconds=30, pool_size=100):
        """initialize(self: mooncake.engine.RpcInterface, listen_address: str = '', thread_count: int = 0, \
timeout_seconds: int = 30, pool_size: int = 100) -> bool"""
        self._timeout, self._room = timeout_seconds, pool_size
        self._listen = listen_address
        return True

    def initialize_client(self, pool_size=100, timeout_seconds=30):
        """initialize_client(self: mooncake.engine.RpcInterface, pool_size: int = 100, timeout_seconds: int = 30) \
-> bool"""
        self._timeout, self._room = timeout_seconds, pool_size
        return True

    def initialize_server(self, listen_address, thread_count=8, timeout_seconds=30):
        """initialize_server(self: mooncake.engine.RpcInterface, listen_address: str, thread_count: int = 8, \
timeout_seconds: int = 30) -> bool"""
        self._timeout, self._listen = timeout_seconds, listen_address
        return True

    def set_data_receive_callback(self, arg0, /):
        """set_data_receive_callback(self: mooncake.engine.RpcInterface, arg0: Callable) -> None"""
        self._on_data = arg0

    def set_tensor_receive_callback(self, arg0, /):
        """set_tensor_receive_callback(self: mooncake.engine.RpcInterface, arg0: Callable) -> None"""
        self._on_tensor = arg0

    def start_server(self):
        """start_server(self: mooncake.engine.RpcInterface) -> bool"""
        if self._server is not None or not self._listen:
            return False
        host, port = _address(self._listen)
        try:
            self._server = socket.create_server((host, port))
        except OSError:
            return False
        self._served = set()
        threading.Thread(target=self._accept, args=(self._server, self._served), daemon=True).start()
        return True

    def start_server_async(self):
        """start_server_async(self: mooncake.engine.RpcInterface) -> bool"""
        return self.start_server()

    def stop_server(self):
        """stop_server(self: mooncake.engine.RpcInterface) -> None"""
        server, self._server = self._server, None
        if server is not None:
            _shut(server)
            server.close()
            with self._lock:
                served = list(self._served)
            # Their threads close them.
            for connection in served:
                _shut(connection)

    def _accept(self, server, served):
        while True:
            try:
                connection, peer = server.accept()
            except OSError:
                return
            if not self._slots.acquire(blocking=False):
                connection.close()
                continue
            with self._lock:
                served.add(connection)
                is_over = self._server is not server
            if is_over:
                _shut(connection)
            threading.Thread(target=self._serve, args=(connection, peer, served), daemon=True).start()

    def _serve(self, connection, peer, served):
        source = f"{peer[0]}:{peer[1]}"
        try:
            with connection:
                while True:
                    magic, kind, size = _HEADER.unpack(_receive(connection, _HEADER.size))
                    if magic != _MAGIC or size > _MOST_BYTES:
                        return
                    connection.settimeout(self._timeout)
                    value = _receive(connection, size)
                    connection.settimeout(None)
                    connection.sendall(_ANSWER.pack(self._taken(kind, source, value)))
        except (OSError, ValueError):
            pass
        finally:
            with self._lock:
                served.discard(connection)
            self._slots.release()

    def _taken(self, kind, source, value):
        try:
            return self._take(kind, source, value)
        except Exception:
            # The sender gets an error for this message, and the connection continues.
            traceback.print_exc()
            return -1

    def _take(self, kind, source, value):
        if kind == _DATA and self._on_data is not None:
            self._on_data(ReceivedData(source, value))
            return 0
        if kind == _TENSOR and self._on_tensor is not None:
            import json

            (head,) = struct.unpack_from("<I", value)
            said = json.loads(bytes(value[4 : 4 + head]))
            self._on_tensor(ReceivedTensor(source, value[4 + head :], said["shape"], said["dtype"]))
            return 0
        return -1

    def _send(self, target, kind, parts):
        connection = None
        try:
            with self._lock:
                idle = self._pool.setdefault(target, [])
                while idle and connection is None:
                    connection = idle.pop()
                    if _is_ended(connection):
                        connection.close()
                        connection = None
            if connection is None:
                connection = socket.create_connection(_address(target), self._timeout)
            connection.sendall(_HEADER.pack(_MAGIC, kind, sum(len(part) for part in parts)))
            for part in parts:
                connection.sendall(part)
            (code,) = _ANSWER.unpack(_receive(connection, _ANSWER.size))
        except (OSError, OverflowError, ValueError):
            if connection is not None:
                connection.close()
            return -1
        with self._lock:
            if len(self._pool[target]) < self._room:
                self._pool[target].append(connection)
                return code
        connection.close()
        return code

    def send_data(self, target_address, data):
        """send_data(self: mooncake.engine.RpcInterface, target_address: str, data: object) -> int"""
        value = data.encode() if isinstance(data, str) else memoryview(data).cast("B")
        return self._send(target_address, _DATA, [value])

    def send_tensor(self, target_address, tensor):
        """send_tensor(self: mooncake.engine.RpcInterface, target_address: str, tensor: object) -> int"""
        import json

        said = json.dumps({"shape": list(tensor.shape), "dtype": str(tensor.dtype)}).encode()
        return self._send(target_address, _TENSOR, [struct.pack("<I", len(said)), said, _bytes_of(tensor)])

    def send_data_async(self, target_address, data, loop):
        """send_data_async(self: mooncake.engine.RpcInterface, target_address: str, data: object, loop: object) \
-> object"""
        return loop.run_in_executor(None, self.send_data, target_address, data)

    def send_tensor_async(self, target_address, tensor, loop):
        """send_tensor_async(self: mooncake.engine.RpcInterface, target_address: str, tensor: object, loop: object) \
-> object"""
        return loop.run_in_executor(None, self.send_tensor, target_address, tensor)


CoroRPCInterface = RpcInterface


def create_rpc_client(local_rank=0, world_size=1):
    """create_rpc_client(local_rank: int = 0, world_size: int = 1) -> mooncake.engine.RpcInterface"""
    client = RpcInterface()
    client.initialize_client()
    return client


def create_rpc_server(local_rank=0, world_size=1):
    """create_rpc_server(local_rank: int = 0, world_size: int = 1) -> mooncake.engine.RpcInterface"""
    server = RpcInterface()
    server.initialize(f"127.0.0.1:{8000 + local_rank}")
    return server
