"""Transfer engine: registered memory of this process and of peers, and transfers between them."""

import operator
from types import TracebackType
from typing import Any, Dict, List, Optional, Sequence, Tuple, Type

from kvplane import _native
from kvplane._buffers import DeviceMemory, Stream, common_stream, device_memory, exporter
from kvplane._errors import Error, InvalidArgument

_PLACES = {-1: InvalidArgument, -3: InvalidArgument, -7: InvalidArgument}


def _problem(code: int) -> Error:
    return _PLACES.get(code, Error)(code, _native.last_error() or f"error {code}")


class Batch:
    """Transfers in flight."""

    def __init__(self, engine: "_native.Engine", number: int):
        self._engine, self._number = engine, number
        self._ended = False

    def done(self) -> bool:
        """Returns True if all transfers have ended; raises when one failed."""
        if not self._ended:
            code = self._engine.status(self._number)
            self._ended = code != 0
            if code < 0:
                raise _problem(code)
        return self._ended

    def wait(self) -> None:
        """Waits until all transfers have ended; raises when one failed."""
        if not self._ended:
            code = self._engine.wait([self._number])
            self._ended = True
            if code < 0:
                raise _problem(code)


class TransferEngine:
    """Transfer engine: serves this process's registered memory, and reads and writes that of peers. Any number of
    threads may use one.

    `host` is the address on which peers reach it: loopback by default. With another address, anyone who reaches it can
    read and write the registered memory.

    Memory is of the host or of a device: an object with the buffer protocol, a tensor, an object with
    `__cuda_array_interface__` or DLPack, or an address as an integer. Where a call takes addresses of this process, it
    takes such objects, too. Work that was enqueued on a device before a transfer is done before its bytes are moved: on
    the stream that an object names, for tensors torch's current one, on `stream` where that is given (a handle of CUDA
    or HIP), and otherwise on the default stream, which waits for those that were not created as non-blocking.
    """

    def __init__(self, host: str = "127.0.0.1", metadata: str = "P2PHANDSHAKE"):
        try:
            self._engine = _native.Engine(host, metadata)
        except RuntimeError as problem:
            raise Error(-1, str(problem)) from None
        #: Owner of registered memory by its address.
        self._kept: Dict[int, Any] = {}

    @property
    def name(self) -> str:
        """Returns the name by which peers open its memory."""
        return self._engine.name()

    def register(self, buffer: Any, size: Optional[int] = None) -> Tuple[int, int]:
        """Registers memory until `unregister` or `close`: of an object, or `size` bytes at an address. Peers cannot
        write to a read-only object. Returns its address and length, which peers need."""
        owner: Any
        writable = True
        if size is not None:
            if not _is_address(buffer):
                raise TypeError(f"`size` goes with an address, int, and not with {type(buffer).__name__}")
            address, owner = operator.index(buffer), None
        else:
            owner = device_memory(buffer)
            if owner is not None:
                address, size = owner.address, owner.size
            else:
                memory = exporter(buffer)
                address, size = _native.buffer_address(memory, False)
                owner = memoryview(memory)
                writable = not owner.readonly
        self._check(self._engine.register([address], [size], "*", True, writable))
        self._kept[address] = owner
        return address, size

    def unregister(self, memory: Any) -> None:
        """Unregisters memory, by its address or its object. When this returns, nothing accesses it any more, peers
        included."""
        address, _, _ = _own(memory)
        self._check(self._engine.unregister([address]))
        self._kept.pop(address, None)

    def write(
        self,
        peer: str,
        ours: Sequence[Any],
        theirs: Sequence[int],
        sizes: Sequence[int],
        stream: Optional[int] = None,
    ) -> None:
        """Writes ranges to a peer's memory; returns when they are complete."""
        places, order = self._own(ours, sizes, stream)
        self._check(self._engine.transfer(peer, True, places, theirs, sizes, None, order))

    def read(
        self,
        peer: str,
        ours: Sequence[Any],
        theirs: Sequence[int],
        sizes: Sequence[int],
        stream: Optional[int] = None,
    ) -> None:
        """Reads ranges of a peer's memory; returns when they are complete."""
        places, order = self._own(ours, sizes, stream)
        self._check(self._engine.transfer(peer, False, places, theirs, sizes, None, order))

    def start(
        self,
        peer: str,
        write: bool,
        ours: Sequence[Any],
        theirs: Sequence[int],
        sizes: Sequence[int],
        stream: Optional[int] = None,
    ) -> Batch:
        """Starts transfers and returns at once."""
        places, order = self._own(ours, sizes, stream)
        return Batch(self._engine, self._check(self._engine.submit(peer, write, places, theirs, sizes, order)))

    def _own(
        self, ours: Sequence[Any], sizes: Sequence[int], stream: Optional[int]
    ) -> Tuple[List[int], Optional[Tuple[str, int]]]:
        """Returns the addresses of memory of this process, and the stream of the call."""
        places: List[int] = []
        streams: List[Optional[Stream]] = []
        for number, one in enumerate(ours):
            address, size, order = _own(one)
            if size is not None and number < len(sizes) and sizes[number] > size:
                what = f"{sizes[number]} bytes are more than the {size} of the object at {address:#x}"
                raise InvalidArgument(-1, what)
            places.append(address)
            streams.extend(order)
        if stream is not None:
            kept = (memory.location for memory in self._kept.values() if isinstance(memory, DeviceMemory))
            order = Stream(next(kept, "cuda:0"), stream)
        else:
            order = common_stream(streams)
        if order is not None and order.is_of_thread():
            # Another thread may begin the transfers, whose own stream it is not.
            self._check(self._engine.await_stream(*order))
            order = None
        return places, order

    def probe(self, peer: str) -> bool:
        """Returns True if a peer answers."""
        return self._engine.probe(peer) == 0

    def notify(self, peer: str, name: str, message: str) -> None:
        """Delivers a message to a peer."""
        self._check(self._engine.notify(peer, name, message))

    def notices(self) -> List[Tuple[str, str]]:
        """Returns the messages that peers delivered here, oldest first, and removes them."""
        return self._engine.notices()

    def close(self) -> None:
        """Closes the engine; transfers in flight are cancelled."""
        self._engine.close()
        self._kept.clear()

    def __enter__(self) -> "TransferEngine":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Any, trace: Optional[TracebackType]) -> None:
        self.close()

    @staticmethod
    def _check(code: int) -> int:
        if code < 0:
            raise _problem(code)
        return code


def _is_address(one: Any) -> bool:
    """Returns True for integers, numpy's included. Arrays and tensors have `__index__`, too, but also a length, or
    memory."""
    return hasattr(one, "__index__") and not hasattr(one, "__len__") and not hasattr(one, "data_ptr")


def _own(one: Any) -> Tuple[int, Optional[int], List[Optional[Stream]]]:
    """Returns the address of memory of this process; for an object also its length, and for that of a device its
    stream."""
    if _is_address(one):
        return operator.index(one), None, []
    memory = device_memory(one)
    if memory is not None:
        return memory.address, memory.size, [memory.stream()]
    address, size = _native.buffer_address(exporter(one), False)
    return address, size, []
