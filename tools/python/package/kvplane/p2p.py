"""Big objects that go from peer to peer, by name; and tensors of a process that peers read by address.

Objects (`docs/p2p.md`): who registers one serves it from where it is, without a copy, and who fetches it serves on what
has arrived; its source sends it about once. Shards are checked by hash.

    from kvplane.p2p import ObjectStore

    with ObjectStore() as store:                          # finds the control plane of this user by itself
        store.register("models/a", [weights])             # numpy arrays, tensors of torch: anything with bytes

    with ObjectStore() as store:                          # elsewhere, many times
        sizes = store.find("models/a").sizes
        buffers = [numpy.empty(size, numpy.uint8) for size in sizes]
        store.get_replica("models/a", buffers, progress=lambda have, missing: print(have, missing))

Tensors by address: the three calls that checkpoint-engine's `P2PStore` has.

    from kvplane.p2p import P2PStore

    store = P2PStore("10.0.0.1")
    store.register_named_tensors({"layers.0": tensor})      # peers are told store.addr and the tensors' addresses
    store.batch_transfer_sync_read("10.0.0.2:15003", ours, theirs, lengths)

Who reads says which peer and which addresses.
"""

import json
from types import TracebackType
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Type, Union

from kvplane import _native
from kvplane._buffers import exporter
from kvplane._engine import TransferEngine
from kvplane._errors import InvalidArgument, Unreachable, error


class Object(NamedTuple):
    """What an object is."""

    name: str
    version: int
    #: Bytes of each of its buffers.
    sizes: List[int]
    shard_bytes: int
    shards: int
    #: What who registered it says of it.
    about: bytes


class Listed(NamedTuple):
    """An object in a listing."""

    name: str
    version: int
    bytes: int
    shard_bytes: int
    shards: int
    #: Processes that hold it or fetch it.
    members: int


class Member(NamedTuple):
    """A process that holds an object, or fetches it."""

    #: Where it serves.
    peer: str
    #: Whether it registered the object.
    origin: bool
    #: Shards that it has.
    shards: int
    #: Why nobody fetches from it any more; empty where it is in order.
    excluded: str


class Part(NamedTuple):
    """Where a rank that wrote a checkpoint has its bytes."""

    #: The object that it registered.
    name: str
    #: The newest unless it is said.
    version: Optional[int] = None
    #: In which of its buffers they are.
    buffer: int = 0
    #: Where each of its fragments begins there; without, one directly after the other in the manifest's order.
    offsets: Optional[Sequence[int]] = None


class Resharded(NamedTuple):
    """What `ObjectStore.reshard` has read."""

    bytes: int
    #: Those of them that are of shards which were read as a whole, and match their hashes.
    checked: int


def _text(manifest: Union[str, Mapping[str, Any]]) -> str:
    return manifest if isinstance(manifest, str) else json.dumps(manifest)


def reshard_bytes(target: Union[str, Mapping[str, Any]], participant: str) -> int:
    """How many bytes a rank of a manifest has: so much memory `ObjectStore.reshard` takes for it."""
    return _done(_native.Objects.packed_bytes(_text(target), participant))


def _done(result: Any) -> Any:
    if isinstance(result, int) and result < 0:
        raise error(result)
    return result


class ObjectStore:
    """Shares objects with peers. Any number of threads may use one.

    `master` is the control plane's address; without one, this user's on this host. `listen` is where peers reach this
    process: another address than a loopback one needs a control plane that makes tickets. Without it, it is the address
    of this host that leads to a control plane on another host, else a loopback one. `host` and `rack` are
    labels: one copy of an object comes to a host, and sources in the same rack go first.
    """

    def __init__(
        self,
        master: Optional[str] = None,
        *,
        cluster: Optional[str] = None,
        certificates: Optional[str] = None,
        runtime_directory: Optional[str] = None,
        tenant: str = "",
        listen: Optional[str] = None,
        host: Optional[str] = None,
        rack: str = "",
        shared_memory: bool = True,
    ):
        try:
            self._objects = _native.Objects(
                master, cluster, certificates, runtime_directory, tenant, listen, host, rack, shared_memory
            )
        except ConnectionError as problem:
            raise Unreachable(-900, str(problem)) from None
        # What is served must neither go nor move.
        self._kept: Dict[Tuple[str, int], List[memoryview]] = {}

    @property
    def name(self) -> str:
        """What peers call it."""
        return self._objects.name()

    def register(
        self,
        name: str,
        buffers: Sequence[Any],
        version: Optional[int] = None,
        *,
        shard_bytes: Optional[int] = None,
        about: bytes = b"",
    ) -> int:
        """Publishes an object and serves it from where it is; its version, the next one unless it is said.

        Buffers are cut into shards of `shard_bytes`, the pieces in which they travel; of as many as suit the object
        unless that is said: at least 256 shards of 64 KiB to 64 MiB, where it is long enough.
        The buffers must stay as they are until `unregister` has returned.
        """
        views, addresses, sizes = self._places(buffers, False)
        version = _done(self._objects.register(name, addresses, sizes, version, shard_bytes, about))
        self._kept[name, version] = views
        return version

    def unregister(self, name: str, version: Optional[int] = None) -> None:
        """Stops serving an object, of the newest version held here where none is said. Waits for who reads it."""
        held = [(one, number) for one, number in self._kept if one == name and version in (None, number)]
        if not held:
            raise InvalidArgument(-600, f"object {name!r} is not held here")
        newest = max(held)
        _done(self._objects.unregister(*newest))
        del self._kept[newest]

    def delete_replica(self, name: str, version: Optional[int] = None) -> None:
        """Stops being a source of an object that was fetched: as `unregister`."""
        self.unregister(name, version)

    def find(self, name: str, version: Optional[int] = None) -> Object:
        """What an object is, of the newest version where none is said; raises `NotFound`."""
        return Object(name, *_done(self._objects.find(name, version)))

    def list(self, prefix: str = "") -> List[Listed]:
        """Objects whose names begin so, by name and version."""
        return [Listed(*one) for one in _done(self._objects.list(prefix))]

    def members(self, name: str, version: Optional[int] = None) -> List[Member]:
        """Who holds an object or fetches it."""
        return [Member(*one) for one in _done(self._objects.members(name, version))]

    def covering(
        self, name: str, buffer: int, offset: int, size: int, version: Optional[int] = None
    ) -> Tuple[int, int]:
        """The shards that hold a range of a buffer, as `get_replica` takes them: the first, and how many."""
        return _done(self._objects.covering(name, version, (buffer, offset, size)))

    def get_replica(
        self,
        name: str,
        buffers: Sequence[Any],
        version: Optional[int] = None,
        *,
        shards: Optional[Sequence[Tuple[int, int]]] = None,
        resume: bool = False,
        rank: Optional[int] = None,
        ranks: Optional[int] = None,
        job: str = "",
        patience: float = 2.0,
        deadline: Optional[float] = None,
        progress: Optional[Callable[[int, int], Any]] = None,
    ) -> int:
        """Fetches an object into memory as long as its buffers, checks it, and serves it until `delete_replica`.

        `shards` are those that are wanted, as runs: the first, and how many. With `resume`, what is in the memory is
        looked at first, and what is right is not fetched. `progress` is called by threads of the call with how many
        shards are there and how many missing; what it raises is raised here when the fetch has ended. The bytes that
        were fetched are the answer. When it raises, nothing is held, and what has arrived is in the memory.

        Where some shards of the version are held here already, others are fetched into the same buffers; when that
        raises, what was held and what has arrived is held. One `delete_replica` is for all of them.

        Where several processes fetch the same object at about the same time, each says which one it is, from 0 on, as
        `rank`, and how many there are, as `ranks`, and all of them the same `job`: they fetch it from each other by a
        schedule. Another one that is not there or does not get on is waited for `patience` seconds, and as long again
        for each rank before it; then others are asked.

        Until `deadline` seconds are over, parts that no source has are waited for: who had them may be starting again.
        Without one it is an hour, and 12 s for such parts.
        """
        if (rank is None) != (ranks is None):
            raise InvalidArgument(-600, "rank and ranks go together: which one this is, and how many there are")
        seat = None if rank is None or ranks is None else (job, rank, ranks, patience)
        views, addresses, sizes = self._places(buffers, True)
        if version is None:
            version = self.find(name).version
        runs = None if shards is None else [(int(first), int(count)) for first, count in shards]
        got = self._objects.get(name, version, addresses, sizes, runs, resume, seat, deadline, progress)
        _done(got)
        self._kept[name, version] = views
        return got

    def reshard(
        self,
        source: Union[str, Mapping[str, Any]],
        target: Union[str, Mapping[str, Any]],
        participant: str,
        parts: Mapping[str, Union[str, Part]],
        memory: Any,
        *,
        offsets: Optional[Sequence[int]] = None,
        deadline: Optional[float] = None,
    ) -> Resharded:
        """Reads into memory what a rank is to have of a checkpoint that was written under another parallel layout.

        `source` and `target` are manifests (`docs/p2p.md`), as JSON or what becomes it: who wrote which boxes of which
        tensors, and who is to have which. `parts` says for each rank of the source that we need something of where it
        is: the name of an object whose only buffer has the rank's fragments one directly after the other, or a `Part`.
        Ours come into `memory` like that, which is as long (`reshard_bytes`), or each where `offsets` says.

        Shards all of whose bytes we read are compared with their hashes; a source whose bytes are wrong is asked no
        more. When it raises, some of the memory is written. Until `deadline` seconds are over, ranks that nobody serves
        are waited for; without one it is an hour, and 3 s where nobody holds what is wanted.
        """
        views, addresses, sizes = self._places([memory], True)
        named = [
            (rank, part, None, 0, None) if isinstance(part, str) else (rank, *part) for rank, part in parts.items()
        ]
        manifests = _text(source), _text(target)
        place = addresses[0], sizes[0]
        read = self._objects.reshard(manifests, participant, named, place, offsets, deadline)
        del views
        return Resharded(*_done(read))

    def close(self) -> None:
        """Stops serving everything, without waiting for readers; they fetch elsewhere what they lack."""
        if self._objects.close():
            self._kept.clear()

    def __enter__(self) -> "ObjectStore":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Any, trace: Optional[TracebackType]) -> None:
        self.close()

    @staticmethod
    def _places(buffers: Sequence[Any], written: bool) -> Tuple[List[memoryview], List[int], List[int]]:
        memories = [exporter(buffer) for buffer in buffers]
        places = [_native.buffer_address(memory, written) for memory in memories]
        # A view keeps what can be resized as it is.
        views = [memoryview(memory) for memory in memories]
        return views, [address for address, _ in places], [size for _, size in places]


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
