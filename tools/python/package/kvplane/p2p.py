"""Tensors of a process that peers read: the three calls that checkpoint-engine's `P2PStore` has.

    from kvplane.p2p import P2PStore

    store = P2PStore("10.0.0.1")
    store.register_named_tensors({"layers.0": tensor})      # peers are told store.addr and the tensors' addresses
    store.batch_transfer_sync_read("10.0.0.2:15003", ours, theirs, lengths)

Who reads says which peer and which addresses. Objects that a cluster knows by name, and that go from peer to peer, are
those of `kvplane p2p`.
"""

from types import TracebackType
from typing import Any, Dict, List, Optional, Sequence, Tuple, Type

from kvplane._engine import TransferEngine
from kvplane._errors import InvalidArgument


class P2PStore:
    """Any number of threads may use one.

    `host` is the address that peers reach it at: loopback unless another is named. Then whoever reaches that address
    may read and write what is registered.
    """

    def __init__(self, host: str = "127.0.0.1"):
        self._engine = TransferEngine(host)
        self.named_tensors: Dict[str, Any] = {}
        self._places: Dict[str, Tuple[int, int]] = {}

    @property
    def addr(self) -> str:
        """What peers call it."""
        return self._engine.name

    def register_named_tensors(self, named_tensors: Dict[str, Any]) -> None:
        """Lets peers read tensors, or other objects with the buffer protocol; all of them, or none when it raises."""
        known = [name for name in named_tensors if name in self.named_tensors]
        if known:
            raise InvalidArgument(-1, f"{known[0]!r} is registered already: unregister it before")
        done: List[str] = []
        try:
            for name, tensor in named_tensors.items():
                self._places[name] = self._engine.register(tensor)
                done.append(name)
        except BaseException:
            for name in done:
                self._engine.unregister(self._places.pop(name)[0])
            raise
        self.named_tensors.update(named_tensors)

    def unregister_named_tensors(self, names: Sequence[str]) -> int:
        """Takes tensors back: how many. When it returns, no peer reads them any more."""
        names = list(names)
        for name in names:
            if name not in self._places:
                raise InvalidArgument(-1, f"{name!r} is not registered")
        for name in dict.fromkeys(names):
            self._engine.unregister(self._places[name][0])
            del self._places[name], self.named_tensors[name]
        return len(dict.fromkeys(names))

    def batch_transfer_sync_read(
        self, target_hostname: str, buf_ptrs: Sequence[int], remote_ptrs: Sequence[int], lens: Sequence[int]
    ) -> None:
        """Reads ranges of a peer's tensors into ranges of ours, given by addresses; returns when all are here.

        Raises when one was not read; then what is in ours is not said, and nothing is on its way any more.
        """
        if not len(buf_ptrs) == len(remote_ptrs) == len(lens):
            raise InvalidArgument(-1, f"{len(buf_ptrs)} of ours, {len(remote_ptrs)} of theirs, {len(lens)} lengths")
        self._engine.read(target_hostname, buf_ptrs, remote_ptrs, lens)

    def close(self) -> None:
        """Ends it: peers read nothing any more."""
        self._engine.close()
        self.named_tensors.clear()
        self._places.clear()

    def __enter__(self) -> "P2PStore":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Any, trace: Optional[TracebackType]) -> None:
        self.close()
