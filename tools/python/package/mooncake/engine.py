"""`mooncake.engine` on top of kvplane: Mooncake's names, arguments and error codes.

A peer with Mooncake's engine is reached over TCP; one with kvplane's engine over the native protocol, and on the same
host through shared memory. When a call returns, no transfer of it accesses memory any more, whatever the outcome.
"""

import enum
import sys
import threading
import weakref

from kvplane import _native
from mooncake import _devices, _protocols, _signatures
from mooncake._arrays import equal, field_rows, words
from mooncake._rpc import CoroRPCInterface, ReceivedData, ReceivedTensor, RpcInterface
from mooncake._rpc import create_rpc_client, create_rpc_server
from mooncake._scatter import ScatterTransferCompletionStatus, ScatterTransferTicket, close, complete, submit
from mooncake.shared_segment import SharedSegment

SUPPORT_EFA = False
SUPPORT_INTRA_NVLINK = False
SUPPORT_MNNVL = False
SUPPORT_MUSA = False
#: A hint does not choose a transport: the engine uses the fastest one that there is to a peer.
SUPPORT_MULTI_PROTOCOL = False


# Names whose values a driver answers, at their first use.
_FAMILIES = {"SUPPORT_CUDA": "cuda", "SUPPORT_HIP": "hip"}


def __getattr__(name):
    if name not in _FAMILIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _devices.is_available(_FAMILIES[name])


def __dir__():
    return sorted({*globals(), *_FAMILIES})


class TransferOpcode(enum.Enum):
    """Direction of a transfer. As with pybind11's enumerations, `int()` returns the number, and no number equals a
    member."""

    Read = 0
    Write = 1

    def __int__(self):
        return self.value

    __index__ = __int__


Read = TransferOpcode.Read
Write = TransferOpcode.Write


class TransferNotify:
    """Message that is delivered to a peer when a transfer is complete."""

    def __init__(self, name="", msg=""):
        if not isinstance(name, str) or not isinstance(msg, str):
            raise TypeError("TransferNotify(): name and msg are str")
        self.name = name
        self.msg = msg

    def __repr__(self):
        return f"TransferNotify({self.name!r}, {self.msg!r})"


class InnerTransferEngine:
    """Engine in the form for a store's `setup`, which needs none here."""

    def __init__(self, engine):
        self._engine = engine


def _say(text):
    print(f"kvplane: {text}", file=sys.stderr)


class TransferEngine:
    """Moves bytes between registered memory of this process and of peers. Any number of threads may use one."""

    TransferOpcode = TransferOpcode

    def __init__(self):
        self._native = None
        #: Tickets of its scatter transfers that somebody has.
        self._tickets = weakref.WeakSet()
        self._starting = threading.Lock()

    def __del__(self):
        native = getattr(self, "_native", None)
        if native is not None:
            close(native, list(self._tickets))

    def initialize(self, arg0, arg1, arg2, arg3, /):
        """Starts serving on the address of the first argument; the second is the rendezvous of peers. An address that
        no interface of this machine has is announced, and the engine listens on all addresses. A second call replaces
        the engine by another, without its registered memory."""
        arg3 = "" if arg3 is None else arg3
        for text in (arg0, arg1, arg2, arg3):
            if not isinstance(text, str):
                raise TypeError(f"initialize(): arguments are str, not {type(text).__name__}")
        if not self._starting.acquire(blocking=False):
            _say("initialize: this engine is being started already")
            return -1
        try:
            return self._start(arg0, arg1, arg2, arg3)
        finally:
            self._starting.release()

    def initialize_ext(self, arg0, arg1, arg2, arg3, arg4, /):
        """Like `initialize`, with the kind of metadata store as the last argument."""
        kind = "" if arg1 == "P2PHANDSHAKE" or "://" in arg1 or not arg4 else f"{arg4}://"
        return self.initialize(arg0, kind + arg1, arg2, arg3)

    def _start(self, host, metadata, protocol, devices):
        if _protocols.refused("initialize", protocol, devices):
            return -1
        try:
            started = _native.Engine(host, metadata)
        except RuntimeError as error:
            _say(f"initialize: {error}")
            return -1
        former, self._native = self._native, started
        tickets, self._tickets = self._tickets, weakref.WeakSet()
        if former is not None:
            close(former, list(tickets))
        return 0

    def get_rpc_port(self):
        """Returns the port that peers use with this host's address."""
        native = self._native
        return int(native.address().rpartition(":")[2] or 0) if native is not None else 0

    def get_engine(self):
        """Returns the engine, for a store's `setup`."""
        return InnerTransferEngine(self)

    def get_engine_ptr(self):
        """Returns a number that identifies the engine in this process."""
        return id(self._native) if self._native is not None else 0

    # --- memory ----------------------------------------------------------------------------------------------------

    def register_memory(self, buffer_addr, capacity, location="*", remote_accessible=True):
        """Registers memory: transfers can use it here, and peers can read and write it, unless it is not
        `remote_accessible`."""
        native = self._native
        return -1 if native is None else native.register([buffer_addr], [capacity], location, bool(remote_accessible))

    def batch_register_memory(self, buffer_addresses, capacities, location="*"):
        """Registers several ranges, or none when one is rejected."""
        native = self._native
        return -1 if native is None else native.register(buffer_addresses, capacities, location)

    def unregister_memory(self, arg0, /):
        """Unregisters memory. When this returns 0, nothing accesses it any more, peers included."""
        native = self._native
        return -1 if native is None else native.unregister([arg0])

    def batch_unregister_memory(self, arg0, /):
        """Unregisters several ranges."""
        native = self._native
        return -1 if native is None else native.unregister(arg0)

    def allocate_managed_buffer(self, arg0, /):
        """Allocates registered memory. Returns its address, 0 on failure."""
        native = self._native
        if native is None:
            return 0
        try:
            address = native.allocate(arg0)
        except (MemoryError, ValueError) as error:
            _say(f"allocate_managed_buffer: {error}")
            return 0
        return max(address, 0)

    def free_managed_buffer(self, arg0, arg1, /):
        """Frees memory of `allocate_managed_buffer`."""
        native = self._native
        return -1 if native is None else native.free(arg0)

    def write_bytes_to_buffer(self, arg0, arg1, arg2, /):
        """Copies the first `arg2` bytes of `arg1` to an address."""
        value = arg1.encode() if isinstance(arg1, str) else arg1
        try:
            _native.write_memory(arg0, value, arg2)
        except ValueError as error:
            _say(f"write_bytes_to_buffer: {error}")
            return -1
        return 0

    def read_bytes_from_buffer(self, arg0, arg1, /):
        """Copies `arg1` bytes from an address; ValueError if that is not mapped."""
        return _native.read_memory(arg0, arg1)

    def get_first_buffer_address(self, arg0, /):
        """Returns the address of a peer's first registered buffer, 0 when there is none."""
        native = self._native
        return 0 if native is None else max(native.first_buffer(arg0), 0)

    # --- transfers -------------------------------------------------------------------------------------------------
    #
    # `transport_hint` and `nic_hint` are hints: the engine uses the fastest path that there is to a peer, and all devices
    # that lead there. One at what does not exist here is reported.

    def transfer_sync_write(
        self, target_hostname, buffer, peer_buffer_address, length, transport_hint="", nic_hint=""
    ):
        """Writes to a peer's memory and waits. Returns 0 when the bytes are written."""
        hints = transport_hint, nic_hint
        return self._sync(target_hostname, True, [buffer], [peer_buffer_address], [length], hints)

    def transfer_sync_read(
        self, target_hostname, buffer, peer_buffer_address, length, transport_hint="", nic_hint=""
    ):
        """Reads from a peer's memory and waits. Returns 0 when the bytes have arrived."""
        hints = transport_hint, nic_hint
        return self._sync(target_hostname, False, [buffer], [peer_buffer_address], [length], hints)

    def transfer_sync(
        self, target_hostname, buffer, peer_buffer_address, length, opcode, notify=None, transport_hint="", nic_hint=""
    ):
        """Transfers and waits; a message is delivered to the peer when the bytes are written."""
        write, hints = _is_write(opcode), (transport_hint, nic_hint)
        return self._sync(target_hostname, write, [buffer], [peer_buffer_address], [length], hints, notify)

    def batch_transfer_sync_write(
        self, target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint="", nic_hint=""
    ):
        """Writes many ranges and waits. Returns 0 when all are written."""
        hints = transport_hint, nic_hint
        return self._sync(target_hostname, True, buffers, peer_buffer_addresses, lengths, hints)

    def batch_transfer_sync_read(
        self, target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint="", nic_hint=""
    ):
        """Reads many ranges and waits. Returns 0 when all have arrived."""
        hints = transport_hint, nic_hint
        return self._sync(target_hostname, False, buffers, peer_buffer_addresses, lengths, hints)

    def batch_transfer_sync(
        self,
        target_hostname,
        buffers,
        peer_buffer_addresses,
        lengths,
        opcode,
        notify=None,
        transport_hint="",
        nic_hint="",
    ):
        """Transfers many ranges and waits."""
        write, hints = _is_write(opcode), (transport_hint, nic_hint)
        return self._sync(target_hostname, write, buffers, peer_buffer_addresses, lengths, hints, notify)

    def _sync(self, target, write, ours, theirs, lengths, hints, notify=None):
        native = self._native
        if native is None:
            return -1
        _protocols.check_hints("transfer", *hints)
        if notify is not None and not isinstance(notify, TransferNotify):
            raise TypeError(f"notify is a TransferNotify, not {type(notify).__name__}")
        if len(lengths) == 0 and len(ours) == 0 and len(theirs) == 0:
            # There is nothing to move, but the peer has to exist.
            if notify is None:
                return 0 if native.probe(target) == 0 else -1
        elif native.transfer(target, write, ours, theirs, lengths) != 0:
            return -1
        if notify is None:
            return 0
        # After the bytes, and before this returns: the notified peer finds them.
        return 0 if native.notify(target, notify.name, notify.msg) == 0 else -1

    def transfer_submit_write(
        self, target_hostname, buffer, peer_buffer_address, length, transport_hint="", nic_hint=""
    ):
        """Starts a write. Returns its number for `transfer_check_status`, 0 on failure."""
        hints = transport_hint, nic_hint
        return self._submit(target_hostname, True, [buffer], [peer_buffer_address], [length], hints)

    def batch_transfer_async_write(
        self, target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint="", nic_hint=""
    ):
        """Starts many writes. Returns a number for `transfer_check_status`, 0 on failure."""
        hints = transport_hint, nic_hint
        return self._submit(target_hostname, True, buffers, peer_buffer_addresses, lengths, hints)

    def batch_transfer_async_read(
        self, target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint="", nic_hint=""
    ):
        """Starts many reads. Returns a number for `transfer_check_status`, 0 on failure."""
        hints = transport_hint, nic_hint
        return self._submit(target_hostname, False, buffers, peer_buffer_addresses, lengths, hints)

    def batch_transfer_async(
        self, target_hostname, buffers, peer_buffer_addresses, lengths, opcode, transport_hint="", nic_hint=""
    ):
        """Starts many transfers. Returns a number for `transfer_check_status`, 0 on failure."""
        write, hints = _is_write(opcode), (transport_hint, nic_hint)
        return self._submit(target_hostname, write, buffers, peer_buffer_addresses, lengths, hints)

    def _submit(self, target, write, ours, theirs, lengths, hints):
        native = self._native
        if native is None:
            return 0
        _protocols.check_hints("transfer", *hints)
        return max(native.submit(target, write, ours, theirs, lengths), 0)

    # --- transfers by arrays and pages -----------------------------------------------------------------------------

    def batch_transfer_sync_write_arrays(
        self, target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint="", nic_hint=""
    ):
        """Does what `batch_transfer_sync_write` does with arrays of 64-bit integers instead of lists."""
        columns = _columns(buffers, peer_buffer_addresses, lengths)
        return self._sync(target_hostname, True, *columns, (transport_hint, nic_hint))

    def batch_transfer_sync_read_arrays(
        self, target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint="", nic_hint=""
    ):
        """Does what `batch_transfer_sync_read` does with arrays of 64-bit integers instead of lists."""
        columns = _columns(buffers, peer_buffer_addresses, lengths)
        return self._sync(target_hostname, False, *columns, (transport_hint, nic_hint))

    def batch_transfer_async_write_arrays(
        self, target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint="", nic_hint=""
    ):
        """Does what `batch_transfer_async_write` does with arrays of 64-bit integers instead of lists."""
        columns = _columns(buffers, peer_buffer_addresses, lengths)
        return self._submit(target_hostname, True, *columns, (transport_hint, nic_hint))

    def batch_transfer_async_read_arrays(
        self, target_hostname, buffers, peer_buffer_addresses, lengths, transport_hint="", nic_hint=""
    ):
        """Does what `batch_transfer_async_read` does with arrays of 64-bit integers instead of lists."""
        columns = _columns(buffers, peer_buffer_addresses, lengths)
        return self._submit(target_hostname, False, *columns, (transport_hint, nic_hint))

    def batch_transfer_sync_write_pages(
        self, target_hostname, src_pages, dst_pages, fields, max_batch_size=0, transport_hint="", nic_hint=""
    ):
        """Writes fields of pages and waits. A row of `fields` is (base here, stride here, base there, stride there,
        length): for each row and each page, so many bytes from `base + src_page * stride` here go to `base + dst_page *
        stride` there. Transfers are made in batches of at most `max_batch_size`. Returns 0 when all are written."""
        return self._pages(target_hostname, True, src_pages, dst_pages, fields, max_batch_size, transport_hint, nic_hint)

    def batch_transfer_sync_read_pages(
        self, target_hostname, src_pages, dst_pages, fields, max_batch_size=0, transport_hint="", nic_hint=""
    ):
        """Does the same in the other direction: `src` is here, and receives what `dst` has there."""
        return self._pages(target_hostname, False, src_pages, dst_pages, fields, max_batch_size, transport_hint, nic_hint)

    def _pages(self, target, write, ours, theirs, fields, most, *hints):
        ours, theirs = words("src_pages", ours), words("dst_pages", theirs)
        equal("src_pages and dst_pages", ours, theirs)
        rows = field_rows(fields)
        if not hasattr(most, "__index__") or most < 0:
            raise TypeError(f"max_batch_size is int, 0 or above, not {most!r}")
        native = self._native
        if native is None:
            return -1
        _protocols.check_hints("transfer", *hints)
        if len(ours) == 0 or len(rows) == 0:
            return 0
        return 0 if native.transfer_pages(target, write, ours, theirs, rows, most) == 0 else -1

    # --- scatter, with tickets -------------------------------------------------------------------------------------

    def submit_scatter_write(
        self,
        endpoint,
        local_base_addresses,
        local_capacities,
        remote_base_addresses,
        remote_capacities,
        local_offsets,
        remote_offsets,
        lengths,
    ):
        """Starts writes of fragments of ranges. Returns a ticket, which says whether bytes may still be moved."""
        ends = local_base_addresses, local_capacities, remote_base_addresses, remote_capacities
        return self._kept(submit(self._native, endpoint, True, ends, (local_offsets, remote_offsets, lengths)))

    def _kept(self, ticket):
        self._tickets.add(ticket)
        return ticket

    def submit_scatter_read(
        self,
        endpoint,
        local_base_addresses,
        local_capacities,
        remote_base_addresses,
        remote_capacities,
        local_offsets,
        remote_offsets,
        lengths,
    ):
        """Starts reads of fragments of ranges. Returns a ticket, which says whether bytes may still be moved."""
        ends = local_base_addresses, local_capacities, remote_base_addresses, remote_capacities
        return self._kept(submit(self._native, endpoint, False, ends, (local_offsets, remote_offsets, lengths)))

    def scatter_transfer_sync_write_with_ticket(
        self,
        endpoint,
        local_base_addresses,
        local_capacities,
        remote_base_addresses,
        remote_capacities,
        local_offsets,
        remote_offsets,
        lengths,
    ):
        """Writes fragments of ranges and waits, at most until the engine's deadline. The ticket is COMPLETED, or
        FAILED_DRAINED if the target has answered a request since, or COMPLETION_UNKNOWN: bytes may be on their way."""
        ends = local_base_addresses, local_capacities, remote_base_addresses, remote_capacities
        return complete(self._native, endpoint, True, ends, (local_offsets, remote_offsets, lengths))

    def scatter_transfer_sync_read_with_ticket(
        self,
        endpoint,
        local_base_addresses,
        local_capacities,
        remote_base_addresses,
        remote_capacities,
        local_offsets,
        remote_offsets,
        lengths,
    ):
        """Reads fragments of ranges and waits. The ticket is COMPLETED or FAILED_DRAINED, and nothing is in flight: this
        engine ends every transfer by its deadline."""
        ends = local_base_addresses, local_capacities, remote_base_addresses, remote_capacities
        return complete(self._native, endpoint, False, ends, (local_offsets, remote_offsets, lengths))

    # --- in the order of a stream ----------------------------------------------------------------------------------

    def transfer_write_on_cuda(
        self, target_hostname, buffer, peer_buffer_address, length, stream_ptr=0, transport_hint="", nic_hint=""
    ):
        """Writes after the work that is on a stream of CUDA now, and returns when the bytes are written: work that is
        enqueued afterwards comes after them. RuntimeError if they are not."""
        columns = [buffer], [peer_buffer_address], [length]
        self._on_cuda(target_hostname, True, columns, stream_ptr, transport_hint, nic_hint)

    def transfer_read_on_cuda(
        self, target_hostname, buffer, peer_buffer_address, length, stream_ptr=0, transport_hint="", nic_hint=""
    ):
        """Reads after the work that is on a stream of CUDA now, and returns when the bytes have arrived. RuntimeError if
        they have not."""
        columns = [buffer], [peer_buffer_address], [length]
        self._on_cuda(target_hostname, False, columns, stream_ptr, transport_hint, nic_hint)

    def batch_transfer_write_on_cuda(
        self,
        target_hostname,
        buffers,
        peer_buffer_addresses,
        lengths,
        stream_ptr=0,
        transport_hint="",
        nic_hint="",
    ):
        """Does what `transfer_write_on_cuda` does for many ranges."""
        columns = buffers, peer_buffer_addresses, lengths
        self._on_cuda(target_hostname, True, columns, stream_ptr, transport_hint, nic_hint)

    def batch_transfer_read_on_cuda(
        self,
        target_hostname,
        buffers,
        peer_buffer_addresses,
        lengths,
        stream_ptr=0,
        transport_hint="",
        nic_hint="",
    ):
        """Does what `transfer_read_on_cuda` does for many ranges."""
        columns = buffers, peer_buffer_addresses, lengths
        self._on_cuda(target_hostname, False, columns, stream_ptr, transport_hint, nic_hint)

    def _on_cuda(self, target, write, columns, stream, *hints):
        if not _devices.is_available("cuda"):
            raise NotImplementedError("transfers in the order of a stream need CUDA, and no driver of it answers here")
        native = self._native
        if native is None:
            raise RuntimeError("the engine was not initialized")
        _protocols.check_hints("transfer", *hints)
        places = (_native.location(address, 1) for address in columns[0])
        place = next((place for place in places if place.startswith("cuda:")), "cuda:0")
        # 0 is the legacy default stream, which waits for the others that block.
        order = (place, stream) if stream else None
        if native.transfer(target, write, *columns, None, order) != 0:
            raise RuntimeError(f"transfer to {target}: {_native.last_error()}")

    # --- numbers of transfers --------------------------------------------------------------------------------------

    def transfer_check_status(self, arg0, /):
        """Returns 1 when every transfer of the batch is complete, 0 while one is in flight, -1 when one failed, -2 when
        one timed out. A batch that has ended is forgotten."""
        if not hasattr(arg0, "__index__"):
            raise TypeError(f"transfer_check_status(): a batch's number is int, not {type(arg0).__name__}")
        native = self._native
        if native is None:
            return -1
        code = native.status(arg0) if arg0 > 0 else -1
        return -1 if code == _native.NO_BATCH else code

    def get_batch_transfer_status(self, arg0, /):
        """Waits until all these batches have ended. Returns 0 when all succeeded."""
        native = self._native
        if native is None:
            return -1
        return 0 if native.wait(arg0) == 0 else -1

    # --- peers -----------------------------------------------------------------------------------------------------

    def send_probe(self, peer_server_name):
        """Returns 0 when the engine of this name answers."""
        native = self._native
        return -1 if native is None else native.probe(peer_server_name)

    def get_notifies(self):
        """Returns the messages that peers delivered, oldest first, and removes them."""
        native = self._native
        return [] if native is None else [TransferNotify(name, text) for name, text in native.notices()]

    def get_local_topology(self, device_name=None):
        """Returns the assignment of RDMA devices to memory, as JSON: `{place: [[preferred], [others]]}`."""
        import json

        places, devices = _native.topology()
        wanted = set(filter(None, (device_name or "").split(",")))
        devices = [(name, node) for name, node in devices if not wanted or name in wanted]
        matrix = {}
        for place in places:
            node = int(place.rsplit(":", 1)[1])
            near = [name for name, where in devices if where in (node, -1)]
            matrix[place] = [near, [name for name, _ in devices if name not in near]]
        return json.dumps(matrix)

    def warmup_efa_segment(self, segment_name):
        """Connects to a segment over EFA. Not supported."""
        raise NotImplementedError("EFA is not supported; connections are made when they are first used")


def _columns(ours, theirs, lengths):
    """Checks the columns of a batch in arrays."""
    ours, theirs = words("buffers", ours), words("peer_buffer_addresses", theirs)
    lengths = words("lengths", lengths)
    equal("buffers, peer_buffer_addresses and lengths", ours, theirs, lengths)
    return ours, theirs, lengths


def _is_write(opcode):
    if not isinstance(opcode, TransferOpcode):
        raise TypeError(f"opcode is TransferOpcode.Read or .Write, not {opcode!r}")
    return opcode == TransferOpcode.Write


_signatures.apply(sys.modules[__name__], "mooncake.engine")
