"""Transfer engine: registered memory of this process and of peers, and transfers between them."""

from types import TracebackType
from typing import Any, List, Optional, Sequence, Tuple, Type

from kvplane import _native
from kvplane._buffers import exporter
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
    """

    def __init__(self, host: str = "127.0.0.1", metadata: str = "P2PHANDSHAKE"):
        try:
            self._engine = _native.Engine(host, metadata)
        except RuntimeError as problem:
            raise Error(-1, str(problem)) from None
        self._kept: dict = {}

    @property
    def name(self) -> str:
        """Returns the name by which peers open its memory."""
        return self._engine.name()

    def register(self, buffer: Any) -> Tuple[int, int]:
        """Registers memory until `unregister` or `close`. Returns its address and length, which peers need."""
        memory = exporter(buffer)
        address, size = _native.buffer_address(memory, False)
        self._check(self._engine.register([address], [size], "*"))
        self._kept[address] = memoryview(memory)
        return address, size

    def unregister(self, address: int) -> None:
        """Unregisters memory. When this returns, nothing accesses it any more, peers included."""
        self._check(self._engine.unregister([address]))
        self._kept.pop(address, None)

    def write(self, peer: str, ours: Sequence[int], theirs: Sequence[int], sizes: Sequence[int]) -> None:
        """Writes ranges to a peer's memory; returns when they are complete."""
        self._check(self._engine.transfer(peer, True, ours, theirs, sizes))

    def read(self, peer: str, ours: Sequence[int], theirs: Sequence[int], sizes: Sequence[int]) -> None:
        """Reads ranges of a peer's memory; returns when they are complete."""
        self._check(self._engine.transfer(peer, False, ours, theirs, sizes))

    def start(self, peer: str, write: bool, ours: Sequence[int], theirs: Sequence[int], sizes: Sequence[int]) -> Batch:
        """Starts transfers and returns at once."""
        return Batch(self._engine, self._check(self._engine.submit(peer, write, ours, theirs, sizes)))

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
