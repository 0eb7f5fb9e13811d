"""P2P store: large objects that are copied from peer to peer, by name; and tensors of a process that peers read by
address.

Objects (`docs/p2p.md`): a process that registers an object serves it in place, without a copy; a process that fetches
it serves what has arrived; the origin sends it about once. Shards are verified by hash.

    from kvplane.p2p import ObjectStore

    with ObjectStore() as store:                          # discovers the control plane of this user
        store.register("models/a", [weights])             # numpy arrays, torch tensors: anything with a buffer

    with ObjectStore() as store:                          # on many other hosts
        sizes = store.find("models/a").sizes
        buffers = [numpy.empty(size, numpy.uint8) for size in sizes]
        store.get_replica("models/a", buffers, progress=lambda have, missing: print(have, missing))

Tensors by address: the three calls of checkpoint-engine's `P2PStore`.

    from kvplane.p2p import P2PStore

    store = P2PStore("10.0.0.1")
    store.register_named_tensors({"layers.0": tensor})      # peers need store.addr and the addresses of the tensors
    store.batch_transfer_sync_read("10.0.0.2:15003", ours, theirs, lengths)

The reader names the peer and the addresses.
"""

import json
from types import TracebackType
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Type, Union

from kvplane import _native
from kvplane._buffers import exporter
from kvplane._engine import TransferEngine
from kvplane._errors import InvalidArgument, Unreachable, error


class Object(NamedTuple):
    """Object as recorded in the catalog."""

    name: str
    version: int
    #: Length of each of its buffers, in bytes.
    sizes: List[int]
    shard_bytes: int
    shards: int
    #: Description, as given at its registration.
    about: bytes


class Listed(NamedTuple):
    """Object in a listing."""

    name: str
    version: int
    bytes: int
    shard_bytes: int
    shards: int
    #: Number of processes that hold or fetch it.
    members: int


class Member(NamedTuple):
    """Process that holds or fetches an object."""

    #: Name of the segment that it serves.
    peer: str
    #: True if it registered the object.
    origin: bool
    #: Number of shards that it has.
    shards: int
    #: Reason why no peer fetches from it any more; empty if it is healthy.
    excluded: str


class Part(NamedTuple):
    """Location of the bytes of a rank that wrote a checkpoint."""

    #: Object that the rank registered.
    name: str
    #: Version; None for the newest.
    version: Optional[int] = None
    #: Index of the buffer that holds the bytes.
    buffer: int = 0
    #: Offset of each of the rank's fragments in the buffer; None if they are packed in the manifest's order.
    offsets: Optional[Sequence[int]] = None


class Resharded(NamedTuple):
    """Result of `ObjectStore.reshard`."""

    bytes: int
    #: Number of bytes of shards that were read completely and match their hashes.
    checked: int


def _text(manifest: Union[str, Mapping[str, Any]]) -> str:
    return manifest if isinstance(manifest, str) else json.dumps(manifest)


def reshard_bytes(target: Union[str, Mapping[str, Any]], participant: str) -> int:
    """Returns the number of bytes of a rank of a manifest, which is the memory that `ObjectStore.reshard` needs for
    it."""
    return _done(_native.Objects.packed_bytes(_text(target), participant))


def _done(result: Any) -> Any:
    if isinstance(result, int) and result < 0:
        raise error(result)
    return result


class ObjectStore:
    """Store that shares objects with peers. Any number of threads may use one.

    `master` is the control plane's address; by default, that of this user on this host. `listen` is the address on
    which peers reach this process: an address beyond loopback requires a control plane that issues tickets. The default
    is the address of this host on the route to a control plane on another host, else loopback. `host` and `rack` are
    labels: an object is fetched to a host once, and peers in the same rack are preferred.
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
        # Served memory must neither be freed nor move.
        self._kept: Dict[Tuple[str, int], List[memoryview]] = {}

    @property
    def name(self) -> str:
        """Returns the segment name by which peers open its memory."""
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
        """Publishes an object and serves it in place. Returns its version, by default the next one.

        Buffers are divided into shards of `shard_bytes`, the unit of transfer; by default, of a size that suits the
        object: at least 256 shards of 64 KiB to 64 MiB, where it is long enough. The buffers must not change until
        `unregister` has returned.
        """
        views, addresses, sizes = self._places(buffers, False)
        version = _done(self._objects.register(name, addresses, sizes, version, shard_bytes, about))
        self._kept[name, version] = views
        return version

    def unregister(self, name: str, version: Optional[int] = None) -> None:
        """Stops serving an object, by default its newest version held here. Waits for reads in flight."""
        held = [(one, number) for one, number in self._kept if one == name and version in (None, number)]
        if not held:
            raise InvalidArgument(-600, f"object {name!r} is not held here")
        newest = max(held)
        _done(self._objects.unregister(*newest))
        del self._kept[newest]

    def delete_replica(self, name: str, version: Optional[int] = None) -> None:
        """Stops serving an object that was fetched. The same as `unregister`."""
        self.unregister(name, version)

    def find(self, name: str, version: Optional[int] = None) -> Object:
        """Looks up an object, by default its newest version; raises `NotFound`."""
        return Object(name, *_done(self._objects.find(name, version)))

    def list(self, prefix: str = "") -> List[Listed]:
        """Returns the objects whose names begin with this prefix, by name and version."""
        return [Listed(*one) for one in _done(self._objects.list(prefix))]

    def members(self, name: str, version: Optional[int] = None) -> List[Member]:
        """Returns the processes that hold or fetch an object."""
        return [Member(*one) for one in _done(self._objects.members(name, version))]

    def covering(
        self, name: str, buffer: int, offset: int, size: int, version: Optional[int] = None
    ) -> Tuple[int, int]:
        """Returns the shards that cover a range of a buffer, in the form of `get_replica`: the first, and their
        number."""
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
        """Fetches an object into memory of the length of its buffers, verifies it, and serves it until
        `delete_replica`.

        `shards` are the shards to fetch, as runs of first shard and count. With `resume`, the content of the memory is
        verified first, and matching shards are not fetched. `progress` is called by threads of the call with the
        numbers of present and missing shards; its exception is raised here when the fetch has ended. Returns the number
        of bytes that were fetched. When the call raises, nothing is held, and arrived shards are in the memory.

        If shards of the version are held here already, others are fetched into the same buffers; when the call raises,
        shards held before and arrived ones stay held. A single `delete_replica` covers all of them.

        If several processes fetch the same object at about the same time, each gives its number, from 0 on, as `rank`,
        the number of processes as `ranks`, and all of them the same `job`: they fetch the object from each other by a
        schedule. A rank that is missing or makes no progress is waited for up to `patience` seconds, and as long again
        for each rank before it; then other peers are used.

        Until `deadline` seconds have passed, the call waits for parts that no peer holds: their peer may be restarting.
        Without a deadline it takes at most an hour, and waits 12 s for such parts.
        """
        if (rank is None) != (ranks is None):
            raise InvalidArgument(-600, "rank and ranks must be given together")
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
        """Reads the fragments of a rank from a checkpoint that was written under another parallel layout into memory.

        `source` and `target` are manifests (`docs/p2p.md`), as JSON or as an object that converts to it: the boxes of
        tensors that each rank wrote, and those that each rank needs. `parts` gives for each needed rank of the source
        the location of its bytes: the name of an object whose only buffer has the rank's fragments packed, or a `Part`.
        The fragments are stored packed in `memory`, which has the length `reshard_bytes`, or at `offsets`.

        Shards that are read completely are verified against their hashes; a peer with wrong bytes is not used any more.
        When the call raises, the memory is partially written. Until `deadline` seconds have passed, the call waits for
        ranks that no peer serves; without a deadline it takes at most an hour, and waits 3 s if no peer holds the
        bytes.
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
        """Stops serving all objects, without waiting for readers; these fetch the missing shards from other peers."""
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
        # A view keeps a resizable object from being resized.
        views = [memoryview(memory) for memory in memories]
        return views, [address for address, _ in places], [size for _, size in places]


class P2PStore:
    """Registered tensors that peers read by address. Any number of threads may use one.

    `host` is the address on which peers reach it: loopback by default. With another address, anyone who reaches it can
    read and write the registered memory.
    """

    def __init__(self, host: str = "127.0.0.1"):
        self._engine = TransferEngine(host)
        self.named_tensors: Dict[str, Any] = {}
        self._places: Dict[str, Tuple[int, int]] = {}

    @property
    def addr(self) -> str:
        """Returns the name by which peers open its memory."""
        return self._engine.name

    def register_named_tensors(self, named_tensors: Dict[str, Any]) -> None:
        """Lets peers read tensors, or other objects with the buffer protocol; all of them, or none when it raises."""
        known = [name for name in named_tensors if name in self.named_tensors]
        if known:
            raise InvalidArgument(-1, f"{known[0]!r} is registered already: unregister it first")
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
        """Unregisters tensors. Returns their number. When it returns, no peer reads them any more."""
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
        """Reads ranges of a peer's tensors into local ranges, given by addresses; returns when all have arrived.

        Raises when a read failed; the content of the local ranges is then undefined, and nothing is in flight any more.
        """
        if not len(buf_ptrs) == len(remote_ptrs) == len(lens):
            raise InvalidArgument(-1, f"{len(buf_ptrs)} of ours, {len(remote_ptrs)} of theirs, {len(lens)} lengths")
        self._engine.read(target_hostname, buf_ptrs, remote_ptrs, lens)

    def close(self) -> None:
        """Closes the store: peers cannot read any more."""
        self._engine.close()
        self.named_tensors.clear()
        self._places.clear()

    def __enter__(self) -> "P2PStore":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Any, trace: Optional[TracebackType]) -> None:
        self.close()
