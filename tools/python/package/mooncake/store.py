"""`mooncake.store` on top of kvplane: Mooncake's names, arguments and error codes.

Differences from Mooncake, none of which breaks a working program: every call is bounded by a deadline and blocks
without the GIL; when a call returns, no transfer accesses its memory, whatever the outcome; a call before `setup` or
after `close` returns a negative number.
"""

import os
import sys
import threading

from kvplane import _native
from mooncake import _clients, _protocols, _signatures
from mooncake._ranges import Ranges, Writing
from mooncake._segments import Pool, Segments
from mooncake._tensor_calls import TensorCalls
from mooncake._tensors import deserialize as _deserialize_tensor
from mooncake._tensors import metadata_size as _tensor_metadata_size
from mooncake._tensors import serialize as _serialize_tensor
from mooncake._types import (
    BufferHandle,
    Descriptor,
    DiskDescriptor,
    ExistOptions,
    MemoryDescriptor,
    MooncakeDistributedNoFRegister,
    MooncakeHostMemAllocator,
    ObjectDataType,
    ParallelAxis,
    QueryTaskResponse,
    RangedReadSnapshot,
    ReadTarget,
    ReplicaDescriptor,
    ReplicaStatus,
    ReplicateConfig,
    SoftPinAction,
    TaskStatus,
    TaskType,
    TensorParallelism,
    check_truth,
    disown_segment,
    group_number,
    groups_of,
    kept,
    name_here,
    name_of_segment,
    own_segment,
    put_batches,
    refused,
    segment_of,
    several,
    texts,
)
from mooncake.buffer_pool import BufferLease, BufferLeaseView, BufferPool
from mooncake._engram import EngramStore, EngramStoreConfig

_INVALID_KEY = -400
INVALID_PARAMS = -600
OBJECT_NOT_FOUND = -704
INTERNAL_ERROR = -1
NOT_SUPPORTED = -1012

RegisteredBufferPool = BufferPool
RegisteredBufferLease = BufferLease
RegisteredBufferLeaseView = BufferLeaseView

ACTIVATION = ObjectDataType.ACTIVATION
GENERAL = ObjectDataType.GENERAL
GRADIENT = ObjectDataType.GRADIENT
KVCACHE = ObjectDataType.KVCACHE
METADATA = ObjectDataType.METADATA
OPTIMIZER_STATE = ObjectDataType.OPTIMIZER_STATE
SAMPLE = ObjectDataType.SAMPLE
TENSOR = ObjectDataType.TENSOR
UNKNOWN = ObjectDataType.UNKNOWN
WEIGHT = ObjectDataType.WEIGHT
COMPLETE = ReplicaStatus.COMPLETE
INITIALIZED = ReplicaStatus.INITIALIZED
REMOVED = ReplicaStatus.REMOVED
UNDEFINED = ReplicaStatus.UNDEFINED
FAILED = TaskStatus.FAILED
PENDING = TaskStatus.PENDING
PROCESSING = TaskStatus.PROCESSING
SUCCESS = TaskStatus.SUCCESS
REPLICA_COPY = TaskType.REPLICA_COPY
REPLICA_MOVE = TaskType.REPLICA_MOVE



class _Missing:
    """Marker of an argument that was not given: one of the two forms of `setup` requires it."""

    def __repr__(self):
        return "..."


_MISSING = _Missing()
#: Duration for which probed objects are kept, in milliseconds: that of Mooncake's leases.
_PROBED_MS = 10_000
#: Local buffer of a configuration that names none.
_LOCAL_BUFFER_BYTES = 16 << 20
#: Limit of sizes: 64 bits, as for files and addresses.
_MOST_BYTES = 2**63 - 1
#: Keys of the dictionary form, with alternative spellings in use.
_KEYS = {
    "local_hostname": "local_hostname",
    "metadata_server": "metadata_server",
    "global_segment_size": "global_segment_size",
    "local_buffer_size": "local_buffer_size",
    "protocol": "protocol",
    "rdma_devices": "rdma_devices",
    "device_name": "rdma_devices",
    "master_server_addr": "master_server_addr",
    "master_server_address": "master_server_addr",
    "ipc_socket_path": "ipc_socket_path",
    "enable_ssd_offload": "enable_ssd_offload",
    "ssd_offload_path": "ssd_offload_path",
    "tenant_id": "tenant_id",
    "enable_client_http_server": "enable_client_http_server",
    "client_http_port": "client_http_port",
    "enable_ssd_prefetch": "enable_ssd_prefetch",
}
#: Keys of Mooncake's whose subject is decided elsewhere here, with the place.
_ELSEWHERE = {
    "ssd_prefetch_cooldown_sec": "nodes limit the memory of prefetched objects themselves",
    "ssd_prefetch_dedup_ttl_sec": "a prefetch joins the one that is in flight",
    "enable_egm_store_pool": "a pool in device memory is that of a node: kvplane node --device-pool",
    "egm_numa_nodes": "a pool in device memory is that of a node: kvplane node --device-pool",
    "enable_embedded_master": "start `kvplane dev` or mooncake_master",
}
#: Keys that other components keep in the same dictionary, without a meaning for the store.
_OTHERS = {"save_chunk_meta", "transfer_timeout", "storage_root_dir", "mooncake_prefer_local_alloc", "use_exists_sync"}
_UNITS = {"": 1, "b": 1, "k": 1 << 10, "kb": 1 << 10, "m": 1 << 20, "mb": 1 << 20, "g": 1 << 30, "gb": 1 << 30}
_UNITS.update({"t": 1 << 40, "tb": 1 << 40, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40})


def _say(text):
    print(f"kvplane: {text}", file=sys.stderr)


def _short(value):
    """Returns a value for messages, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def parse_size(text):
    """Parses bytes from `4096`, `"64MB"` or `"4gb"`; ValueError for anything else."""
    if isinstance(text, int):
        size = int(text)
    else:
        word = str(text).strip().lower()
        number = word.rstrip("abcdefghijklmnopqrstuvwxyz ")
        unit = _UNITS.get(word[len(number):].strip())
        if unit is None:
            raise ValueError(f"{_short(text)} is not a size: give 4096, 64MB or 4gb")
        try:
            size = int(number) * unit if number.isdigit() and len(number) < 20 else int(float(number) * unit)
        except (ValueError, OverflowError):
            raise ValueError(f"{_short(text)} is not a size: give 4096, 64MB or 4gb") from None
    if not 0 <= size <= _MOST_BYTES:
        raise ValueError(f"{_short(text)} is not a size: it is negative, or above {_MOST_BYTES}")
    return size


def unknown_key(key, known):
    """Returns the message for an unknown key of a configuration, with the nearest known key."""
    import difflib

    near = difflib.get_close_matches(key, known, 1)
    return f"the key {key!r} is unknown" + (f"; did you mean {near[0]!r}?" if near else "")


class MooncakeDistributedStore(TensorCalls, Ranges, Segments):
    """Client of the store of a cluster. Any number of threads may use one object."""

    def __init__(self):
        self._native = None
        self._hostname = ""
        #: Address of the segment of `setup`, if there is one.
        self._segment = ""
        self._setting_up = threading.Lock()
        #: False if `setup` got a local buffer of 0 bytes: puts that copy are then rejected.
        self._copies = True
        #: True if the last `setup` failed because there was no control plane, so that a retry may succeed.
        self._away = False
        self._reading = {}
        self._writing = Writing()
        self._registered_pool = None
        self._pool = Pool()
        self._http = None
        #: False if a configuration has `enable_ssd_prefetch` off: `ExistOptions` then prefetch nothing.
        self._prefetches = True

    def __del__(self):
        http, native = getattr(self, "_http", None), getattr(self, "_native", None)
        if http is not None:
            http.close(wait=False)
        if native is not None:
            native.close()
            disown_segment(self._segment)

    # --- setup -----------------------------------------------------------------------------------------------------

    def setup(
        self,
        local_hostname=_MISSING,
        metadata_server=_MISSING,
        global_segment_size=_MISSING,
        local_buffer_size=_MISSING,
        protocol=_MISSING,
        rdma_devices=_MISSING,
        master_server_addr=_MISSING,
        engine=None,
        enable_ssd_offload=False,
        ssd_offload_path="",
        tenant_id="default",
        enable_client_http_server=False,
        client_http_port=9300,
        *,
        config=_MISSING,
    ):
        """Connects to a cluster, and provides it with `global_segment_size` bytes of this process's memory.

        Also takes a single argument, a dictionary of these names. Returns within five seconds if the control plane does
        not answer, and prints the reason to standard error.
        """
        if config is _MISSING and isinstance(local_hostname, dict):
            config = local_hostname
        if config is not _MISSING:
            return self._setup_dict(config)
        given = {
            "local_hostname": local_hostname,
            "metadata_server": metadata_server,
            "global_segment_size": global_segment_size,
            "local_buffer_size": local_buffer_size,
            "protocol": protocol,
            "rdma_devices": rdma_devices,
            "master_server_addr": master_server_addr,
        }
        missing = [name for name, value in given.items() if value is _MISSING]
        if missing:
            raise TypeError(f"setup(): incompatible function arguments: {', '.join(missing)} missing")
        for name in ("local_hostname", "metadata_server", "protocol", "rdma_devices", "master_server_addr"):
            if not isinstance(given[name], str):
                raise TypeError(f"setup(): {name} is str, not {type(given[name]).__name__}")
        for name in ("global_segment_size", "local_buffer_size"):
            if isinstance(given[name], (str, bytes, float)) or not hasattr(given[name], "__index__"):
                raise TypeError(f"setup(): {name} is int, not {type(given[name]).__name__}")
            if not 0 <= int(given[name]) <= _MOST_BYTES:
                raise TypeError(f"setup(): {name} is from 0 to {_MOST_BYTES}, not {_short(given[name])}")
        code = self._connect(
            local_hostname,
            int(global_segment_size),
            (protocol, rdma_devices),
            master_server_addr,
            "" if tenant_id == "default" else tenant_id,
            enable_ssd_offload,
        )
        self._allow_copies(code, int(local_buffer_size))
        return self._serve(code, enable_client_http_server, client_http_port)

    def _allow_copies(self, code, local_buffer_size):
        """Allows puts that copy after a setup that succeeded, unless there is no local buffer for them."""
        if code != 0:
            return
        self._copies = local_buffer_size > 0
        if not self._copies:
            _say("setup: local_buffer_size is 0: puts are rejected, except those from registered memory")

    def _setup_dict(self, config):
        if not isinstance(config, dict):
            raise TypeError(f"setup(): config is dict, not {type(config).__name__}")
        values = {}
        for key, value in config.items():
            name = _KEYS.get(key)
            if name is not None:
                values[name] = value
            elif key in _ELSEWHERE:
                _say(f"setup: {key} has no effect: {_ELSEWHERE[key]}")
            elif key not in _OTHERS:
                _say(f"setup: {unknown_key(str(key), _KEYS)}")
        for name in ("local_hostname", "metadata_server"):
            if name not in values:
                _say(f"setup: the configuration has no {name!r}")
                return INVALID_PARAMS
        try:
            segment = parse_size(values.get("global_segment_size", 0))
            local_buffer = parse_size(values.get("local_buffer_size", _LOCAL_BUFFER_BYTES))
        except ValueError as error:
            _say(f"setup: {error}")
            return INVALID_PARAMS
        tenant = str(values.get("tenant_id", "default"))
        offload = str(values.get("enable_ssd_offload", "")).lower() in ("1", "true", "yes", "on")
        code = self._connect(
            str(values["local_hostname"]),
            segment,
            (str(values.get("protocol", "tcp")), str(values.get("rdma_devices", ""))),
            str(values.get("master_server_addr", "")),
            "" if tenant == "default" else tenant,
            offload,
        )
        self._allow_copies(code, local_buffer)
        self._prefetches = str(values.get("enable_ssd_prefetch", "true")).lower() in ("1", "true", "yes", "on", "enable")
        served = str(values.get("enable_client_http_server", "")).lower() in ("1", "true", "yes", "on", "enable")
        return self._serve(code, served, values.get("client_http_port", 9300))

    def _serve(self, code, wanted, port):
        """Returns the code of a setup; if it succeeded and the HTTP server is enabled, starts that server."""
        if code == 0 and wanted:
            from mooncake._client_http import ClientHttp

            try:
                self._http = ClientHttp(self._native, int(port))
            except (OSError, OverflowError, ValueError) as error:
                # The store works without it.
                _say(f"setup: no HTTP server of this client on port {port}: {error}")
        return code

    def _connect(self, *arguments):
        # A second call does not wait: it may come from a signal handler, which the first call waits for.
        if not self._setting_up.acquire(blocking=False):
            _say("setup: this store is being set up already")
            return INTERNAL_ERROR
        try:
            return self._connect_alone(*arguments)
        finally:
            self._setting_up.release()

    def _connect_alone(self, hostname, segment, protocol, master, tenant, offload, cluster=None):
        if self._native is not None:
            _say("setup: this store was set up already; close it first")
            return INTERNAL_ERROR
        self._away = False
        if _protocols.refused("setup", *protocol):
            return INVALID_PARAMS
        if offload:
            _say("setup: only nodes have SSDs: start one with `kvplane node --ssd`; clients offload nothing")
        try:
            native = _native.Store(master=master or None, cluster=cluster, tenant=tenant)
        except (ConnectionError, ValueError) as error:
            _say(f"setup: {error}")
            self._away = isinstance(error, ConnectionError)
            return -900
        if segment > 0:
            joined = native.join(segment, hostname)
            if not isinstance(joined, str):
                _say(f"setup: {_native.last_error()}")
                native.close()
                return joined
        self._native = native
        self._segment = joined if segment > 0 else ""
        self._hostname = name_of_segment(hostname, self._segment)
        own_segment(self._hostname, self._segment)
        return 0

    def setup_dummy(self, mem_pool_size, local_buffer_size, server_address):
        """Connects without memory of its own: the address is that of a `mooncake_client` on this host, or of the
        control plane. Shared memory is used in any case where a node is on this host. `mem_pool_size` bounds
        `alloc_from_mem_pool`."""
        for size in (mem_pool_size, local_buffer_size):
            if not hasattr(size, "__index__") or not 0 <= int(size) <= _MOST_BYTES:
                raise TypeError(f"setup_dummy(): sizes are int, from 0 to {_MOST_BYTES}, not {_short(size)}")
        if not isinstance(server_address, str):
            raise TypeError(f"setup_dummy(): server_address is str, not {type(server_address).__name__}")
        client = _clients.find(server_address)
        if client is None:
            code = self._connect("localhost", 0, ("tcp", ""), server_address, "", False)
        else:
            tenant = client.get("tenant", "default")
            tenant, cluster = "" if tenant == "default" else tenant, client.get("cluster") or None
            code = self._connect("localhost", 0, ("tcp", ""), client.get("master", ""), tenant, False, cluster)
        if code == 0:
            self._pool.open(int(mem_pool_size))
        return code

    def init_all(self, arg0, arg1, arg2, /):
        """Connects to the control plane of this host with the default settings."""
        return self._connect("localhost", int(arg2), (arg0, arg1), "", "", False)

    def close(self):
        """Closes the store. Calls of other threads in progress end first."""
        native, self._native = self._native, None
        http, self._http = self._http, None
        self._copies = True
        if http is not None:
            http.close()
        self._reading = {}
        self._writing = Writing()
        self._pool.close()
        if native is not None:
            native.close()
        disown_segment(self._segment)
        return 0

    def health_check(self):
        """Returns 0 when the cluster answers, 1 before `setup`, 2 when it does not answer."""
        native = self._native
        if native is None:
            return 1
        return 0 if native.check() == 0 else 2

    def get_hostname(self):
        """Returns the name of this process, `host:port`, as `setup` got it; without a port, with that of its segment.
        Wherever this process names a segment, it may name its own like this."""
        return self._hostname

    # --- single objects --------------------------------------------------------------------------------------------

    def put(self, key, value, config=None):
        """Stores bytes under a key. An existing object is left unchanged, which is no error."""
        native = self._native
        if native is None:
            return _unset()
        return refused(config, 1) or self._copied(native.put, key, value, _kept_one(config, False))

    def upsert(self, key, value, config=None):
        """Stores bytes under a key and replaces an existing object."""
        native = self._native
        if native is None:
            return _unset()
        return refused(config, 1) or self._copied(native.put, key, value, _kept_one(config, True))

    def put_parts(self, key, *args, config=None):
        """Stores several buffers as one object."""
        native = self._native
        if native is None:
            return _unset()
        return refused(config, 1) or self._copied(native.put_parts, key, args, _kept_one(config, False))

    def upsert_parts(self, key, *args, config=None):
        """Stores several buffers as one object and replaces an existing object."""
        native = self._native
        if native is None:
            return _unset()
        return refused(config, 1) or self._copied(native.put_parts, key, args, _kept_one(config, True))

    def _copied(self, put, *arguments):
        """Puts bytes that are copied first; returns Mooncake's code."""
        return _code(put(*arguments)) if self._copies else INVALID_PARAMS

    def put_batch(self, keys, values, config=None):
        """Stores many objects. Returns 0 when all exist, else the first error code."""
        return self._put_batch(keys, values, config, False)

    def upsert_batch(self, keys, values, config=None):
        """Stores many objects and replaces existing ones. Returns 0 when all succeeded, else the first error code."""
        return self._put_batch(keys, values, config, True)

    def _put_batch(self, keys, values, config, replace):
        native, keys = self._native, several(keys, "put_batch")
        if native is None:
            return _unset()
        if len(keys) != len(values):
            return INVALID_PARAMS
        code = refused(config, len(keys)) if keys else 0
        if code != 0 or not self._copies or any(_is_empty(value) for value in values):
            return code or INVALID_PARAMS
        codes = _grouped(native.put_many, (keys, values), config, replace) if keys else ()
        return next((_code(code) for code in codes if code < 0), 0)

    def get(self, arg0, /):
        """Returns the bytes under a key; empty when there are none."""
        native = self._native
        if native is None:
            return b""
        value = native.get(arg0)
        return value if type(value) is bytes else b""

    def get_batch(self, arg0, /):
        """Returns the bytes under many keys."""
        native, arg0 = self._native, several(arg0, "get_batch")
        if native is None:
            return [b""] * len(arg0)
        return [value if type(value) is bytes else b"" for value in native.get_many(arg0)]

    def get_buffer(self, arg0, /):
        """Returns an object in memory of its own; None when there is none."""
        native = self._native
        if native is None:
            return None
        for _ in range(4):
            size = native.sizes([arg0])[0]
            if size <= 0:
                return None
            handle = BufferHandle(size)
            got = native.receive(arg0, handle)
            if got == size:
                return handle
            if got == OBJECT_NOT_FOUND:
                return None
        return None

    def batch_get_buffer(self, arg0, /):
        """Returns many objects in memory of their own."""
        native = self._native
        keys = list(several(arg0, "batch_get_buffer"))
        if native is None or not keys:
            return [None] * len(keys)
        sizes = native.sizes(keys)
        some = [number for number, size in enumerate(sizes) if size > 0]
        handles = [BufferHandle(sizes[number]) for number in some]
        codes = native.receive_many([keys[number] for number in some], handles) if some else ()
        found = [None] * len(keys)
        for number, handle, code in zip(some, handles, codes):
            # An object that was replaced by one of another length between the two requests is requested by itself.
            same = code == sizes[number]
            found[number] = handle if same else None if code == OBJECT_NOT_FOUND else self.get_buffer(keys[number])
        return found

    def is_exist(self, key, options=None):
        """Returns 1 when there is an object, 0 when not, a negative number when its owner does not answer. Does not count
        as an access: nothing is kept from being evicted by it."""
        native = self._native
        if native is None:
            return _unset()
        return _key_codes(native.exists([key], self._ahead("is_exist", options)), 0)[0]

    def batch_is_exist(self, keys, options=None):
        """Returns the same for many keys, with one request to each shard."""
        native, keys = self._native, several(keys, "batch_is_exist")
        if native is None:
            return [_unset()] * len(keys)
        return _key_codes(native.exists(keys, self._ahead("batch_is_exist", options)), 0)

    def _ahead(self, call, options):
        """Returns True if a test for objects is to prefetch them."""
        if options is None:
            return False
        if not isinstance(options, ExistOptions):
            raise TypeError(f"{call}(): options is ExistOptions, not {type(options).__name__}")
        return options.prefetch_to_memory and self._prefetches

    def probe_key(self, key):
        """Does what `is_exist` does without options."""
        return self.is_exist(key)

    def batch_probe_key(self, keys, policy="none", candidate_size=1):
        """Does what `batch_is_exist` does without options. With the policy `LastHitOnly`, each `candidate_size` keys are
        a candidate, and the objects of the last one of which all exist are kept in memory for ten seconds."""
        native, keys = self._native, several(keys, "batch_probe_key")
        if policy not in ("none", "LastHitOnly"):
            raise ValueError(f"Unknown batch_probe_key policy: {policy}")
        if not hasattr(candidate_size, "__index__") or int(candidate_size) < 0:
            raise TypeError(f"batch_probe_key(): candidate_size is int, 0 or above, not {_short(candidate_size)}")
        if native is None:
            return [_unset()] * len(keys)
        if policy == "LastHitOnly" and keys and (candidate_size == 0 or len(keys) % candidate_size):
            return [INVALID_PARAMS] * len(keys)
        codes = _key_codes(native.exists(keys), 0)
        if policy == "LastHitOnly":
            starts = range(len(keys) - candidate_size, -1, -candidate_size) if keys else ()
            last = next((at for at in starts if all(code == 1 for code in codes[at : at + candidate_size])), None)
            if last is not None:
                # Best effort, as leases are: memory has limits for what it retains.
                native.retain(_retention(), keys[last : last + candidate_size], _PROBED_MS)
        return codes

    def get_size(self, arg0, /):
        """Returns the length of an object."""
        native = self._native
        if native is None:
            return _unset()
        return _key_codes(native.sizes([arg0]), OBJECT_NOT_FOUND)[0]

    def remove(self, key, force=False):
        """Removes an object. There are no leases: it is removed even while others read it, whose reads complete; force
        has no effect."""
        check_truth("remove", "force", force)
        native = self._native
        if native is None:
            return _unset()
        return _key_codes(native.remove([key]), OBJECT_NOT_FOUND)[0]

    def batch_remove(self, keys, force=False):
        """Removes many objects."""
        check_truth("batch_remove", "force", force)
        native, keys = self._native, several(keys, "batch_remove")
        if native is None:
            return [_unset()] * len(keys)
        return _key_codes(native.remove(keys), OBJECT_NOT_FOUND)

    def remove_by_regex(self, regex_pattern, force=False):
        """Removes the objects whose keys match. Returns their number."""
        check_truth("remove_by_regex", "force", force)
        native = self._native
        return _unset() if native is None else native.remove_matching(regex_pattern)

    def remove_all(self, force=False):
        """Removes all objects of this tenant. Returns their number."""
        check_truth("remove_all", "force", force)
        native = self._native
        return _unset() if native is None else native.remove_all()

    # --- memory of the caller's ------------------------------------------------------------------------------------

    def register_buffer(self, buffer_ptr, size):
        """Registers memory as source of puts and destination of gets."""
        native = self._native
        if native is None:
            return _unset()
        return native.register(buffer_ptr, size)

    def unregister_buffer(self, buffer_ptr):
        """Unregisters memory. When this returns, no call uses it any more."""
        native = self._native
        if native is None:
            return _unset()
        return native.unregister(buffer_ptr)

    def put_from(self, key, buffer_ptr, size, config=None):
        """Stores memory under a key."""
        return self._put_from([key], [buffer_ptr], [size], config, False)[0]

    def upsert_from(self, key, buffer_ptr, size, config=None):
        """Stores memory under a key and replaces an existing object."""
        return self._put_from([key], [buffer_ptr], [size], config, True)[0]

    def batch_put_from(self, keys, buffer_ptrs, sizes, config=None):
        """Stores many objects; 0 for each that exists afterwards."""
        return self._put_from(keys, buffer_ptrs, sizes, config, False)

    def batch_upsert_from(self, keys, buffer_ptrs, sizes, config=None):
        """Stores many objects and replaces existing ones."""
        return self._put_from(keys, buffer_ptrs, sizes, config, True)

    def batch_put_from_multi_buffers(self, keys, all_buffer_ptrs, all_sizes, config=None):
        """Stores many objects, each from several pieces of memory."""
        native, keys = self._native, several(keys, "batch_put_from_multi_buffers")
        if native is None:
            return [_unset()] * len(keys)
        return _each(native.put_from_pieces, keys, all_buffer_ptrs, all_sizes, config, False)

    def put_from_with_metadata(self, key, buffer_ptr, metadata_buffer_ptr, size, metadata_size, config=None):
        """Stores metadata followed by data as one object."""
        pointers, sizes = [[metadata_buffer_ptr, buffer_ptr]], [[metadata_size, size]]
        return self.batch_put_from_multi_buffers([key], pointers, sizes, config)[0]

    def _put_from(self, keys, pointers, sizes, config, replace):
        native, keys = self._native, several(keys, "batch_put_from")
        if native is None:
            return [_unset()] * len(keys)
        return _each(native.put_from, keys, pointers, sizes, config, replace)

    def get_into(self, key, buffer_ptr, size):
        """Reads an object into registered memory. Returns its length."""
        native = self._native
        if native is None:
            return _unset()
        return _key_codes(native.get_into([key], [buffer_ptr], [size]), OBJECT_NOT_FOUND)[0]

    def batch_get_into(self, keys, buffer_ptrs, sizes):
        """Reads many objects. Returns the length of each."""
        native, keys = self._native, several(keys, "batch_get_into")
        if native is None:
            return [_unset()] * len(keys)
        return _key_codes(native.get_into(keys, buffer_ptrs, sizes), OBJECT_NOT_FOUND)

    def batch_get_into_multi_buffers(self, keys, all_buffer_ptrs, all_sizes, prefer_alloc_in_same_node=False):
        """Reads many objects, each into several pieces of registered memory. Returns the length of each."""
        check_truth("batch_get_into_multi_buffers", "prefer_alloc_in_same_node", prefer_alloc_in_same_node)
        native, keys = self._native, several(keys, "batch_get_into_multi_buffers")
        if native is None:
            return [_unset()] * len(keys)
        return _key_codes(native.get_into_pieces(keys, all_buffer_ptrs, all_sizes), OBJECT_NOT_FOUND)

    # --- where objects are -----------------------------------------------------------------------------------------

    def get_replica_desc(self, key):
        """Returns the locations of an object; an empty list when there is none."""
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys):
        """Returns the same for many keys; keys without an object are left out."""
        native, keys = self._native, list(several(keys, "batch_get_replica_desc"))
        if native is None:
            return {}
        sizes = native.sizes(keys)
        found = [(key, size) for key, size in zip(keys, sizes) if size >= 0]
        places = native.replicas([key for key, _ in found])
        described = zip(found, places)
        here = {place: name_here(place) for place in {place for shards in places for place in shards}}
        return {
            key: [ReplicaDescriptor(here[place], size) for place in shards]
            for (key, size), shards in described if shards
        }

    def batch_replica_clear(self, keys, segment_name=""):
        """Removes the replicas of objects. Returns the keys of those that were removed. With a segment, only the
        replicas on it: an object with a single replica is removed, and one with two keeps the owner's when the other is
        cleared. The owner's replica of two stays, because the owner orders all changes of the object."""
        native, keys = self._native, list(several(keys, "batch_replica_clear"))
        if native is None or not keys:
            return []
        if not segment_name:
            return [key for key, code in zip(keys, native.remove(keys)) if code == 0]
        owner = segment_of(segment_name)
        places = dict(zip(keys, native.replicas(keys)))
        alone = [key for key, shards in places.items() if shards == [owner]]
        twice = [key for key, shards in places.items() if shards[1:] == [owner]]
        gone = {key for key, code in zip(alone, native.remove(alone)) if code == 0} if alone else set()
        gone.update(key for key, code in zip(twice, native.remove_copies(twice) if twice else []) if code == 1)
        return [key for key in keys if key in gone]

    def create_copy_task(self, key, targets):
        """Replicates an object to a second node, as if it had been put with two replicas. The node follows from the
        key; the targets only have to exist, and may be empty. A cluster that keeps a single replica (`kvplane control
        --replicas 1`) answers -1012. Returns (id, error code)."""
        targets = texts(targets, "create_copy_task", "targets")
        if self._native is None:
            return ((0, 0), _unset())
        targets = [segment_of(target) for target in targets]
        number, code = self._native.create_copy_task([key], targets)
        return ((0, number), code)

    def create_move_task(self, key, source, target):
        """Not supported: the owner of an object follows from its key, and a node is emptied by draining it. Segments that
        make no sense are INVALID_PARAMS, as in the original. Returns (id, error code)."""
        native = self._native
        if native is None:
            return ((0, 0), _unset())
        if self.is_exist(key) != 1:
            return ((0, 0), OBJECT_NOT_FOUND)
        source, target = segment_of(source), segment_of(target)
        makes_sense = source != target and source in native.replicas([key])[0] and _native.has_segment(native, target)
        return ((0, 0), NOT_SUPPORTED if makes_sense else INVALID_PARAMS)

    def query_task(self, task_id):
        """Returns the state of a task: (state, 0), or (None, error code)."""
        high, number = _task_numbers(task_id)
        if self._native is None:
            return (None, _unset())
        seen, code = self._native.task(number) if high == 0 else (None, -1400)
        if seen is None:
            return (None, code)
        state, objects, copied, created, updated, message = seen
        task = QueryTaskResponse()
        task.id, task.status = (0, number), TaskStatus(state)
        task.created_at_ms_epoch, task.last_updated_at_ms_epoch = created, updated
        task.message = message or f"{copied} of {objects} objects are replicated"
        return (task, 0)

    def begin_weight_snapshot(self, snapshot, adapter):
        """Returns a writer of a version of weights, which readers see when it is committed: a `WeightStoreWriter` of
        `mooncake.reshard.weight`. `snapshot` is a `WeightSnapshotDescriptor`, `adapter` has the methods of a
        `WeightSnapshotAdapter`."""
        from mooncake.reshard.weight import store

        return store.begin_weight_snapshot(self, snapshot, adapter)

    def get_offload_rpc_read_count(self):
        """Returns the number of reads from other clients' disks: always 0."""
        return 0

    def _get_pyclient_capsule(self):
        raise NotImplementedError("a capsule holds a C++ object of the original; there is none behind this store")

    _pybind11_conduit_v1_ = None


def _get_pyclient_from_wrapper(wrapper):
    """_get_pyclient_from_wrapper(wrapper: mooncake::MooncakeStorePyWrapper) -> object"""
    return wrapper._get_pyclient_capsule()


def bind_to_numa_node(node):
    """bind_to_numa_node(node: int) -> None

    Restricts the calling thread to this node's CPUs.
    """
    from kvplane._numa import cpus_of

    cpus = cpus_of(node)
    if cpus:
        os.sched_setaffinity(0, cpus)


def get_alloc_func_addr():
    """get_alloc_func_addr() -> int"""
    raise NotImplementedError("no allocator for CUDA memory pools: register memory that torch allocated")


def get_free_func_addr():
    """get_free_func_addr() -> int"""
    raise NotImplementedError("no allocator for CUDA memory pools: register memory that torch allocated")


def _unset():
    return INTERNAL_ERROR


def _code(code):
    """Returns Mooncake's code for this one: Mooncake does not distinguish malformed keys from other invalid
    arguments."""
    return INVALID_PARAMS if code == -400 else code


def _key_codes(codes, number):
    """Returns the same for many codes; `number` is Mooncake's code for an invalid object."""
    return [number if code == _INVALID_KEY else code for code in codes] if _INVALID_KEY in codes else codes


def _is_empty(value):
    return not value if type(value) is bytes else memoryview(value).nbytes == 0


def _task_numbers(task_id):
    """Returns the two numbers of a task id: unsigned 64-bit integers, as Mooncake takes them."""
    numbers = tuple(task_id) if isinstance(task_id, (tuple, list)) else ()
    if len(numbers) != 2 or not all(hasattr(one, "__index__") and 0 <= int(one) < 1 << 64 for one in numbers):
        raise TypeError(f"query_task(): task_id is tuple[int, int], not {_short(task_id)}")
    return int(numbers[0]), int(numbers[1])


def _retention():
    """Returns the number of a retention that no other call uses."""
    import secrets

    return secrets.randbits(63) + 1


def _kept_one(config, replace):
    if config is None:
        return kept(None, replace)
    groups = groups_of(config) if isinstance(config, ReplicateConfig) else None
    return kept(config, replace, group_number(groups[0]) if groups and groups[0] else 0)


def _each(put, keys, pointers, sizes, config, replace):
    """Puts in one batch or, with group names, in one batch for each group."""
    code = refused(config, len(keys))
    if code != 0:
        return [code] * len(keys)
    return _key_codes(_grouped(put, (keys, pointers, sizes), config, replace), INVALID_PARAMS)


def _grouped(put, columns, config, replace):
    """Puts in one batch or, with names of groups or affinities, in one batch for each."""
    batches = put_batches(config, replace, len(columns[0]))
    # Columns of different lengths are rejected as a whole.
    if len(batches) == 1 or len(set(map(len, columns))) > 1:
        return put(*columns, batches[0][1])
    codes = [0] * len(columns[0])
    for indexes, options in batches:
        some = [[values[index] for index in indexes] for values in columns]
        for index, code in zip(indexes, put(*some, options)):
            codes[index] = code
    return codes


_signatures.apply(sys.modules[__name__], "mooncake.store")
