"""Values of `mooncake.store`: enumerations, put options, and descriptors of replicas."""

import enum
import ipaddress
import mmap
import os
from collections.abc import Mapping, Sequence

from kvplane import _native
from mooncake._protocols import check_hints

INVALID_PARAMS = -600
#: Not supported: there is no shared file system for replicas.
NO_FILE_SYSTEM = -1601

#: Most replicas of an object; a `replica_num` above it is taken as this number, as replicas are best effort.
_MOST_REPLICAS = 8


class ObjectDataType(enum.IntEnum):
    """Data type of an object, as declared by its owner."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


class ReplicaStatus(enum.IntEnum):
    """State of a replica."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


class TaskStatus(enum.IntEnum):
    """State of a copy or move task."""

    PENDING = 0
    PROCESSING = 1
    FAILED = 2
    SUCCESS = 3


class TaskType(enum.IntEnum):
    """Kind of a task."""

    REPLICA_COPY = 0
    REPLICA_MOVE = 1


class SoftPinAction(enum.IntEnum):
    """Effect of a put on an object's soft pin."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


#: Default duration of a soft pin, in milliseconds.
_SOFT_PIN_MS = 1_800_000
#: Longest soft pin, and a value that the store rejects.
_SOFT_PIN_MOST_MS = 86_400_000
_REFUSED_MS = 2**32 - 1


def _is_count(value):
    return hasattr(value, "__index__") and 0 <= value.__index__() < 1 << 64


def _is_rows(value):
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def _is_texts(value):
    return _is_rows(value) and all(isinstance(one, str) for one in value)


def _is_truth(value):
    return value is None or hasattr(type(value), "__bool__")


def check_truth(call, name, value):
    """Raises TypeError for values that Mooncake does not accept as a truth value: text, lists."""
    if not _is_truth(value):
        raise TypeError(f"{call}(): {name} is bool, not {type(value).__name__}")


def several(values, call, name="keys", of="str"):
    """Returns a sequence of elements of a type as a list or a tuple. Text is a single value, and sets, dictionaries and
    iterators have no order or no length: TypeError for them."""
    kind = type(values)
    if kind is list or kind is tuple:
        return values
    one = isinstance(values, (str, bytes, bytearray, memoryview, Mapping))
    if one or not hasattr(kind, "__getitem__") or not hasattr(kind, "__len__"):
        raise TypeError(f"{call}(): {name} is a list of {of}, not {kind.__name__}")
    # Arrays of numpy have no truth value, and sums of their elements wrap.
    return values.tolist() if hasattr(kind, "tolist") else list(values)


def texts(values, call, name):
    """Does the same and checks the elements: returns a list of str."""
    found = []
    for value in several(values, call, name):
        if isinstance(value, bytes):
            value = value.decode()
        elif not isinstance(value, str):
            raise TypeError(f"{call}(): {name} is a list of str, and {type(value).__name__} is in it")
        found.append(value)
    return found


#: Attributes by kind: the type name in Mooncake's messages, the accepted values, and the conversion.
_COUNT = ("int", _is_count, lambda value: value.__index__())
_TRUTH = ("bool", _is_truth, bool)
_TEXTS = ("list[str]", _is_texts, list)
_MAYBE_TEXTS = (
    "Optional[list[str]]",
    lambda value: value is None or _is_texts(value),
    lambda value: value if value is None else list(value),
)
_ATTRIBUTES = {
    "replica_num": _COUNT,
    "nof_replica_num": _COUNT,
    "dfs_replica_num": _COUNT,
    "soft_pin_action": (
        "mooncake.store.SoftPinAction", lambda value: isinstance(value, SoftPinAction), lambda value: value
    ),
    "soft_pin_ttl_ms": (
        "Optional[int]",
        lambda value: value is None or _is_count(value),
        lambda value: value if value is None else value.__index__(),
    ),
    "with_hard_pin": _TRUTH,
    "with_soft_pin": _TRUTH,
    "preferred_segment": ("str", lambda value: isinstance(value, str), lambda value: value),
    "preferred_segments": _TEXTS,
    "preferred_nof_segments": _TEXTS,
    "prefer_alloc_in_same_node": _TRUTH,
    "data_type": (
        "mooncake.store.ObjectDataType", lambda value: isinstance(value, ObjectDataType), lambda value: value
    ),
    "group_ids": _MAYBE_TEXTS,
    "session_ids": _MAYBE_TEXTS,
    "residency_affinity_ids": _MAYBE_TEXTS,
    "preferred_hca_names": _MAYBE_TEXTS,
    "per_key_preferred_hca_names": (
        "Optional[list[list[str]]]",
        lambda value: value is None or (_is_rows(value) and all(map(_is_texts, value))),
        lambda value: value if value is None else [list(names) for names in value],
    ),
}


class ReplicateConfig:
    """Options of a put.

    A `replica_num` above 1 keeps further replicas, as far as slots have so many owners (`kvplane control --replicas`) and
    there is space; other counts have no effect. `preferred_segments` and `prefer_alloc_in_same_node` place objects of
    at least 1 MiB that are not longer than a stripe (64 MiB), as far as there is space.

    `group_ids` names the group of each key; the objects of a group are evicted and prefetched together. `session_ids`
    names the session of each key. Without a group, the session of an object is its group, which
    `kvplane.Store.retain_group` keeps in memory by that name. `residency_affinity_ids` names what is to be on one node:
    objects of one batch with the same name are placed together, as `prefer_alloc_in_same_node` does with all.
    `preferred_hca_names` and `per_key_preferred_hca_names` name network devices; a device that this host does not have is
    reported, and transfers use all devices that lead to a node.

    An attribute accepts the values of Mooncake's; there are no others.
    """

    def __init__(self):
        self.__dict__.update(
            replica_num=1,
            nof_replica_num=0,
            dfs_replica_num=0,
            soft_pin_action=SoftPinAction.PRESERVE,
            soft_pin_ttl_ms=None,
            with_hard_pin=False,
            preferred_segment="",
            preferred_segments=[],
            preferred_nof_segments=[],
            prefer_alloc_in_same_node=False,
            data_type=ObjectDataType.UNKNOWN,
            group_ids=None,
            session_ids=None,
            residency_affinity_ids=None,
            preferred_hca_names=None,
            per_key_preferred_hca_names=None,
        )

    def __setattr__(self, name, value):
        known = _ATTRIBUTES.get(name)
        if known is None:
            raise AttributeError(f"'mooncake.store.ReplicateConfig' object has no attribute {name!r}")
        kind, takes, kept_as = known
        if not takes(value):
            raise TypeError(
                f"({name}): incompatible function arguments. The following argument types are supported:\n"
                f"    1. (self: mooncake.store.ReplicateConfig, arg0: {kind}) -> None\n\nInvoked with: {value!r}"
            )
        if name == "with_soft_pin":
            name, value = "soft_pin_action", SoftPinAction.ENABLE if value else SoftPinAction.DISABLE
        self.__dict__[name] = value if name == "soft_pin_action" else kept_as(value)

    def __repr__(self):
        return f"ReplicateConfig({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    @property
    def with_soft_pin(self):
        """True if the object has a soft pin: the older spelling of `soft_pin_action`."""
        return self.soft_pin_action == SoftPinAction.ENABLE


class ExistOptions:
    """Options of a test for objects. It has no other attributes."""

    __slots__ = ("_ahead",)

    def __init__(self):
        self.prefetch_to_memory = False

    @property
    def prefetch_to_memory(self):
        """True if nodes are to read the objects that only their SSDs have into memory, for a get that follows."""
        return self._ahead

    @prefetch_to_memory.setter
    def prefetch_to_memory(self, wanted):
        check_truth("prefetch_to_memory", "arg0", wanted)
        self._ahead = bool(wanted)

    def __repr__(self):
        return f"ExistOptions: {{ prefetch_to_memory: {int(self._ahead)} }}"


class RangedReadSnapshot:
    """Versions of objects, for reads of their ranges."""

    def __init__(self, store, versions):
        #: Store that the versions are of.
        self._store = store
        #: Version by key, in bytes; None for keys without an object.
        self._versions = versions


#: Segments of this process by the names of its stores.
_OWN = {}
#: Host of the name of a store, and its address in the names of segments.
_LOCALHOST, _LOOPBACK = "localhost", "127.0.0.1"


def name_of_segment(hostname, segment):
    """Returns the name, `host:port`, of a store with this segment and the name that `setup` got: that name, with the
    segment's port where it has none. A host that is an address, and not the segment's, is replaced by that. A store
    without a segment has a port from 12300 to 14300, as with Mooncake."""
    host, port = split_name(hostname)
    if port:
        return hostname
    if not segment:
        return f"{host}:{12300 + os.getpid() % 2000}"
    listens, own_port = split_name(segment)
    try:
        leads = ipaddress.ip_address(host.strip("[]")) == ipaddress.ip_address(listens.strip("[]"))
    except ValueError:
        leads = host != _LOCALHOST or listens == _LOOPBACK
    return f"{host if leads else listens}:{own_port}"


def split_name(name):
    """Splits `host:port`; without a port it is empty. The host of an IPv6 address has brackets."""
    host, _, port = name.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if port.isdigit() and (bracketed or (host and ":" not in host)):
        return host, port
    return (f"[{name}]" if ":" in name and not name.startswith("[") else name), ""


def own_segment(name, segment):
    """Records that a store of this process has this name, and provides this segment to the cluster, if any."""
    _OWN.pop(name, None)
    if segment:
        _OWN[name] = segment


def disown_segment(segment):
    """Forgets the names of a segment that this process provides no more: another process may get its port."""
    for name in [name for name, own in list(_OWN.items()) if own == segment]:
        _OWN.pop(name, None)


def name_here(segment):
    """Returns the name of a segment in this process: that of its store if that is of this process, else its address."""
    return next((name for name, own in list(_OWN.items()) if own == segment), segment)


def segment_of(name):
    """Returns the segment with a name: an address, that of a store of this process, or `localhost` with a port."""
    if name in _OWN:
        return _OWN[name]
    host, port = split_name(name)
    return f"{_LOOPBACK}:{port}" if host == _LOCALHOST and port else name


def refused(config, keys):
    """Returns the code with which a `ReplicateConfig` is rejected for so many keys, or 0. Without a number of keys,
    groups are not checked."""
    if config is None:
        return 0
    if not isinstance(config, ReplicateConfig):
        raise TypeError(f"config is a ReplicateConfig, not {type(config).__name__}")
    # NVMe-oF and shared file systems are not supported.
    if config.replica_num == 0 or config.nof_replica_num > 0:
        return INVALID_PARAMS
    if config.dfs_replica_num > 0:
        return NO_FILE_SYSTEM
    names = config.preferred_hca_names or []
    if keys is not None:
        each = (config.group_ids, config.session_ids, config.residency_affinity_ids, config.per_key_preferred_hca_names)
        if any(column is not None and len(column) != keys for column in each):
            return INVALID_PARAMS
        if config.per_key_preferred_hca_names is not None:
            names = [*names, *(name for row in config.per_key_preferred_hca_names for name in row)]
    if names:
        check_hints("put", "", ",".join(names))
    return 0


def groups_of(config):
    """Returns the group of each key of a put, or None: that of `group_ids`, else its session."""
    if config is None:
        return None
    if config.group_ids and config.session_ids:
        return [group or session for group, session in zip(config.group_ids, config.session_ids)]
    return config.group_ids or config.session_ids or None


def group_number(name):
    """Returns the number of a group: a digest of its name, the same in every process and in `kvplane.Store`."""
    import hashlib

    return int.from_bytes(hashlib.blake2b(str(name).encode(), digest_size=8).digest(), "little") or 1


def kept(config, replace, group=0, together=False):
    """Converts a `ReplicateConfig` for the native module. With `together`, the objects of a batch are placed on one
    node."""
    if config is None:
        return (group, 0, False, 0, replace, 1, [], False, 0, 1) if replace or group else None
    if not isinstance(config, ReplicateConfig):
        raise TypeError(f"config is a ReplicateConfig, not {type(config).__name__}")
    pin = 0
    if config.soft_pin_action == SoftPinAction.ENABLE:
        wanted = config.soft_pin_ttl_ms
        pin = _SOFT_PIN_MS if wanted is None else min(int(wanted), _SOFT_PIN_MOST_MS)
    elif config.soft_pin_ttl_ms is not None:
        # A duration without a soft pin: Mooncake rejects this with -600.
        pin = _REFUSED_MS
    replicas = min(max(int(config.replica_num), 1), _MOST_REPLICAS)
    segments = [config.preferred_segment] if config.preferred_segment else []
    segments += [name for name in config.preferred_segments or () if name not in segments]
    segments = [segment_of(name) for name in segments]
    together = together or bool(config.prefer_alloc_in_same_node)
    kind = int(config.data_type)
    # Mooncake has no priorities of objects.
    return (group, pin, bool(config.with_hard_pin), kind, replace, replicas, segments, together, 0, replicas)


def put_batches(config, replace, count, rows=None):
    """Divides a batch of so many objects by their groups and affinities. Returns the indexes and the options of each part
    as the native module takes them. An affinity of one object has no effect; a group of one object is a group, because
    retentions name it. `rows` has the row of each object in the columns of the options; by default, its index."""
    rows = range(count) if rows is None else rows
    groups = groups_of(config)
    places = config.residency_affinity_ids if config is not None else None
    if not places or len({places[row] for row in rows}) == count:
        places = None
    if groups is None and places is None:
        return [(range(count), kept(config, replace))]
    members = {}
    for index, row in enumerate(rows):
        members.setdefault((groups and groups[row], places and places[row]), []).append(index)
    return [
        (indexes, kept(config, replace, group_number(group) if group else 0, bool(place) and len(indexes) > 1))
        for (group, place), indexes in members.items()
    ]


class BufferHandle(mmap.mmap):
    """Object in memory of its own, which lives as long as this, even after the store was closed."""

    def __new__(cls, size):
        # The kernel joins private mappings that are neighbours into one, and a process has a limit of them.
        return super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def ptr(self):
        """ptr(self: mooncake.store.BufferHandle) -> int"""
        return _native.buffer_address(self, True)[0]

    def size(self):
        """size(self: mooncake.store.BufferHandle) -> int"""
        return len(self)


class Descriptor:
    """Location of a replica's bytes."""

    def __init__(self):
        self.size = 0
        self.buffer_address = 0
        self.transport_endpoint = ""


class MemoryDescriptor:
    """Replica in memory."""

    def __init__(self, descriptor=None):
        self.buffer_descriptor = descriptor or Descriptor()


class DiskDescriptor:
    """Replica in a file."""

    def __init__(self, file_path="", object_size=0):
        self.file_path = file_path
        self.object_size = object_size


class ReplicaDescriptor:
    """Replica of an object."""

    def __init__(self, endpoint="", size=0):
        descriptor = Descriptor()
        descriptor.size = size
        descriptor.transport_endpoint = endpoint
        self._memory = MemoryDescriptor(descriptor)
        self.status = ReplicaStatus.COMPLETE

    def is_memory_replica(self):
        """is_memory_replica(self: mooncake.store.ReplicaDescriptor) -> bool"""
        return True

    def is_disk_replica(self):
        """is_disk_replica(self: mooncake.store.ReplicaDescriptor) -> bool

        Objects on an SSD are read like those in memory: by the shard that owns them.
        """
        return False

    def is_local_disk_replica(self):
        """is_local_disk_replica(self: mooncake.store.ReplicaDescriptor) -> bool"""
        return False

    def get_memory_descriptor(self):
        """get_memory_descriptor(self: mooncake.store.ReplicaDescriptor) -> mooncake.store.MemoryDescriptor"""
        return self._memory

    def get_disk_descriptor(self):
        """get_disk_descriptor(self: mooncake.store.ReplicaDescriptor) -> mooncake.store.DiskDescriptor"""
        raise RuntimeError("this replica is not in a file")


class QueryTaskResponse:
    """State of a copy or move task."""

    def __init__(self):
        self.id = (0, 0)
        self.type = TaskType.REPLICA_COPY
        self.status = TaskStatus.PENDING
        self.created_at_ms_epoch = 0
        self.last_updated_at_ms_epoch = 0
        self.assigned_client = (0, 0)
        self.message = ""


class ParallelAxis:
    """Axis along which a tensor is split: `tp`, `dp`, `ep` or `pp`."""

    def __init__(self, kind="", rank=0, size=1, split_dim=None, expert_id=None, stage_id=None):
        self.kind = kind
        self.rank = rank
        self.size = size
        self.split_dim = split_dim
        self.expert_id = expert_id
        self.stage_id = stage_id


class TensorParallelism:
    """Split of a tensor: its axes."""

    def __init__(self, axes=None):
        self.axes = list(axes or [])


class ReadTarget:
    """Form in which a get returns a tensor: `as_stored`, `shard` or `full`."""

    def __init__(self, mode="as_stored", parallelism=None):
        self.mode = mode
        self.parallelism = parallelism

    @property
    def mode(self):
        """One of the three, in lower case; others raise RuntimeError."""
        return self._mode

    @mode.setter
    def mode(self, mode):
        if not isinstance(mode, str):
            raise TypeError(f"ReadTarget.mode is str, not {type(mode).__name__}")
        if mode.lower() not in ("as_stored", "shard", "full"):
            raise RuntimeError(f"Unsupported ReadTarget mode: {mode!r}; use as_stored, shard or full")
        self._mode = mode.lower()


class MooncakeHostMemAllocator:
    """Allocator of memory that peers on this host can map."""

    def __init__(self):
        self._memory = _native.HostMemory()

    def alloc(self, size, /):
        """alloc(self: mooncake.store.MooncakeHostMemAllocator, arg0: int) -> int

        Returns the address, or 0 when there is no memory.
        """
        try:
            return self._memory.alloc(size)
        except (MemoryError, ValueError):
            return 0

    def free(self, ptr, /):
        """free(self: mooncake.store.MooncakeHostMemAllocator, arg0: int) -> int"""
        return 0 if self._memory.free(ptr) else -1


class MooncakeDistributedNoFRegister:
    """Registers NVMe-oF targets with Mooncake's master. Not supported."""

    def real_register(self, *arguments):
        """real_register(self: mooncake.store.MooncakeDistributedNoFRegister, arg0: str, arg1: int, arg2: str, \
arg3: int, arg4: int, arg5: int, arg6: str) -> int"""
        raise NotImplementedError("objects are not kept on NVMe-oF targets; give nodes an SSD: kvplane node --ssd")

    def real_unregister_by_endpoint(self, *arguments):
        """real_unregister_by_endpoint(self: mooncake.store.MooncakeDistributedNoFRegister, arg0: str, arg1: int, \
arg2: str, arg3: int, arg4: str) -> int"""
        raise NotImplementedError("objects are not kept on NVMe-oF targets; give nodes an SSD: kvplane node --ssd")
