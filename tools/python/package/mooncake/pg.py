"""Mooncake's backend of `torch.distributed`: process groups that go on when a rank fails, and take in others.

    import torch.distributed as dist
    from mooncake import pg                                     # registers "mooncake-cpu" and "mooncake"

    dist.init_process_group("mooncake-cpu", pg_options=pg.MooncakeBackendOptions(8))
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    pg.get_failed_ranks_hint(work)                              # ranks that the result lacks
    pg.recover_ranks(dist.group.WORLD, [3])                     # a replacement of rank 3 takes part again

It is written in Python above `kvplane.group`: one package for every torch from 2.0 on. The control plane is the one
that `KVPLANE_CONTROL` names; without it, rank 0 starts one on loopback, which outlives rank 0. The backend
"mooncake-cpu" takes tensors in host memory; "mooncake" also those of a device, which it copies to the host and back.
docs/process-groups.md has the semantics, and the differences from Mooncake's.
"""

import enum
import json
import os
import threading
import time
import warnings
import weakref

import torch
import torch.distributed as dist

from kvplane import Error, InvalidArgument
from kvplane.group import MAX_RANKS
from mooncake import _pg_process
from mooncake._pg_process import settings
from mooncake._pg_work import MooncakeWork, ProcessGroupError, seconds
from mooncake.engine import TransferEngine

__all__ = [
    "MooncakeBackendOptions",
    "MooncakeProcessGroup",
    "MooncakeWork",
    "ProcessGroupError",
    "ProposalStatus",
    "ProposeViewUpdateResponse",
    "SyncAfterFailureResponse",
    "SyncAfterFailureStatus",
    "ViewUpdateStatus",
    "activate_ranks",
    "createMooncakeBackend",
    "createMooncakeCpuBackend",
    "deactivate_ranks",
    "extend_group_size_to",
    "get_active_ranks",
    "get_current_epoch",
    "get_failed_ranks_hint",
    "get_local_success",
    "get_num_synced_ranks",
    "get_peer_state",
    "join_group",
    "recover_ranks",
    "set_collective_timeout_us",
    "set_device_filter",
    "set_fault_reconciliation_window_us",
    "set_host_ip",
    "set_p2p_timeout_us",
    "set_transfer_engine",
    "sync_after_failure",
]


def _base_of_backends():
    """Torch's class of backend objects; in torch 2.0, where Python makes none, that of all objects."""
    try:
        torch._C._distributed_c10d.Backend(0, 1)
    except TypeError:
        return object
    return torch._C._distributed_c10d.Backend


_Backend = _base_of_backends()
_ReduceOp = dist.ReduceOp
_REDUCTIONS = [
    (_ReduceOp.SUM, "sum"),
    (_ReduceOp.AVG, "avg"),
    (_ReduceOp.MIN, "min"),
    (_ReduceOp.MAX, "max"),
    (_ReduceOp.PRODUCT, "product"),
    (_ReduceOp.BAND, "and"),
    (_ReduceOp.BOR, "or"),
    (_ReduceOp.BXOR, "xor"),
]
#: Interval at which mirrors of active ranks that no call refreshes follow the views.
_MIRROR_S = 0.05
_DEFAULT_S = 1800.0


def _called(function, *arguments):
    """Calls `kvplane.group`, and converts its exceptions."""
    try:
        return function(*arguments)
    except Error as problem:
        raise ProcessGroupError(problem) from problem


class ProposalStatus(enum.Enum):
    """Outcome of a proposal to change a group's view."""

    Rejected = 0
    Applied = 1
    AppliedWithDroppedRanks = 2


#: The name in earlier versions.
ViewUpdateStatus = ProposalStatus


class SyncAfterFailureStatus(enum.Enum):
    """Outcome of `sync_after_failure`."""

    Reconciled = 0
    NoPending = 1
    Rejected = 2


class ProposeViewUpdateResponse:
    """Outcome of a proposal: `status`, the epoch of the view, ranks that failed meanwhile, the reason of a
    rejection."""

    def __init__(self, status, new_epoch, dropped_ranks, reject_reason):
        self.status, self.new_epoch = status, new_epoch
        self.dropped_ranks, self.reject_reason = dropped_ranks, reject_reason

    def __repr__(self):
        return f"<{self.status.name}, epoch {self.new_epoch}, dropped {self.dropped_ranks}, {self.reject_reason!r}>"


class SyncAfterFailureResponse:
    """Outcome of `sync_after_failure`: `status`, and the reason of a rejection."""

    def __init__(self, status, reject_reason):
        self.status, self.reject_reason = status, reject_reason


def _is_integer(value):
    return isinstance(value, int) and not isinstance(value, bool)


class MooncakeBackendOptions:
    """Options of a group, for `pg_options`:

        MooncakeBackendOptions(active_ranks[, is_extension[, max_group_size]])
        MooncakeBackendOptions(max_group_size[, is_extension[, auto_deactivate_on_failure, auto_sync_on_failure]])

    `active_ranks` is an int32 tensor into which the group writes whether each rank is active, for its life; its size is
    at least the group's largest. `is_extension` joins a group that exists. With both automatic options, ranks that fail
    are deactivated before the collective completes; without `auto_sync_on_failure`, at `sync_after_failure`; without
    both, at the caller's `deactivate_ranks`.
    """

    def __init__(
        self,
        *positional,
        active_ranks=None,
        is_extension=None,
        max_group_size=None,
        auto_deactivate_on_failure=None,
        auto_sync_on_failure=None,
    ):
        named = {
            "active_ranks": active_ranks,
            "is_extension": is_extension,
            "max_group_size": max_group_size,
            "auto_deactivate_on_failure": auto_deactivate_on_failure,
            "auto_sync_on_failure": auto_sync_on_failure,
        }
        # A tensor of one element converts to an integer: types decide, not conversions.
        if positional and isinstance(positional[0], torch.Tensor) or not positional and active_ranks is not None:
            order = ["active_ranks", "is_extension", "max_group_size"]
        else:
            order = ["max_group_size", "is_extension", "auto_deactivate_on_failure", "auto_sync_on_failure"]
        if len(positional) > len(order):
            raise TypeError(f"MooncakeBackendOptions takes {', '.join(order)}: {len(positional)} arguments are more")
        for name, value in zip(order, positional):
            if named[name] is not None:
                raise TypeError(f"MooncakeBackendOptions has {name} twice")
            named[name] = value
        self._check(named, order)
        self.active_ranks = named["active_ranks"]
        self.is_extension = bool(named["is_extension"])
        most = named["max_group_size"]
        self.max_group_size = most if most is not None and most > 0 else -1
        deactivates, syncs = named["auto_deactivate_on_failure"], named["auto_sync_on_failure"]
        self.auto_deactivate_on_failure = True if deactivates is None else deactivates
        self.auto_sync_on_failure = True if syncs is None else syncs

    @staticmethod
    def _check(named, order):
        others = [name for name, value in named.items() if value is not None and name not in order]
        if others:
            raise TypeError(f"MooncakeBackendOptions takes {', '.join(order)}, not {', '.join(others)} with them")
        if named["active_ranks"] is None and named["max_group_size"] is None:
            raise TypeError("MooncakeBackendOptions takes active_ranks, a tensor, or max_group_size, an integer, first")
        most = named["max_group_size"]
        if most is not None and not _is_integer(most):
            raise TypeError(f"max_group_size is {type(most).__name__}, not an integer")
        for name in ("is_extension", "auto_deactivate_on_failure", "auto_sync_on_failure"):
            if named[name] is not None and not isinstance(named[name], (bool, int)):
                raise TypeError(f"{name} is {type(named[name]).__name__}, not a bool")
        if (named["auto_deactivate_on_failure"] is None) != (named["auto_sync_on_failure"] is None):
            raise TypeError("auto_deactivate_on_failure and auto_sync_on_failure are passed both, or none of them")

    def failures(self):
        """Returns the failure mode of `kvplane.group`."""
        if self.auto_sync_on_failure and not self.auto_deactivate_on_failure:
            raise ValueError("auto_sync_on_failure needs auto_deactivate_on_failure")
        if not self.auto_deactivate_on_failure:
            return "manual"
        return "automatic" if self.auto_sync_on_failure else "deferred"


def _of_environment(size):
    """Options of a group that was made without any."""
    def flag(name):
        text = os.environ.get(name, "1").strip().lower()
        if text not in ("0", "1", "true", "false", "on", "off", "yes", "no"):
            raise ValueError(f"{name} is {text!r}, not 0 or 1")
        return text in ("1", "true", "on", "yes")

    deactivates = flag("MOONCAKE_PG_AUTO_DEACTIVATE_ON_FAILURE")
    return MooncakeBackendOptions(size, False, deactivates, flag("MOONCAKE_PG_AUTO_SYNC_ON_FAILURE"))


class _Mirrors:
    """Thread that has tensors of active ranks follow the views of their groups."""

    def __init__(self):
        self._lock, self._states, self._thread = threading.Lock(), weakref.WeakSet(), None

    def add(self, state):
        with self._lock:
            self._states.add(state)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvplane-mirrors", daemon=True)
                self._thread.start()

    def _run(self):
        while True:
            with self._lock:
                states = [state for state in self._states if state.group is not None]
                if not states:
                    self._thread = None
                    return
            for state in states:
                state.write_mirror()
            del states
            time.sleep(_MIRROR_S)


_MIRRORS = _Mirrors()


class _State:
    """A group of kvplane, as a group of torch and its backend object share it."""

    def __init__(self, world, name, timeout, is_on_device):
        self.world, self.name, self.timeout, self.is_on_device = world, name, timeout, is_on_device
        self.group, self.problem = None, None
        self.order, self.max_size, self.mirror = [], 0, None
        self.failures, self.hooks, self.shrinks = "automatic", {}, 0
        #: Works of a coalescing block; None outside of one.
        self.coalesced = None
        #: Works that copy results at their end, oldest first: also of callers that do not wait for them.
        self.copying = []
        self._lock = threading.Lock()
        self._written = None

    def open(self, order, options, is_joining, name, declared):
        """Becomes a member of the group of this name."""
        self.order, self.failures = list(order), options.failures()
        self.max_size = options.max_group_size if options.max_group_size > 0 else declared
        if not len(order) <= self.max_size <= MAX_RANKS:
            raise ValueError(f"max_group_size is {self.max_size}: it is from the {len(order)} ranks to {MAX_RANKS}")
        self._open_mirror(options.active_ranks)
        given = {"max_size": self.max_size, "failures": self.failures, "deadline": min(self.timeout, 86_400.0)}
        if is_joining:
            self.group = _pg_process.join(self.world, name, order, **given)
        else:
            self.group = self.world.group(name, order, **given)
        self.write_mirror()
        if options.active_ranks is not None:
            _MIRRORS.add(self)

    def options_of(self, size):
        """Returns options of another group, of so many ranks, with the same failure mode."""
        return MooncakeBackendOptions(size, False, self.failures != "manual", self.failures == "automatic")

    def _open_mirror(self, tensor):
        if tensor is None:
            self.mirror = torch.zeros(self.max_size, dtype=torch.int32)
            return
        if tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(f"active_ranks is a contiguous tensor of int32, not of {tensor.dtype}")
        if tensor.numel() < self.max_size:
            raise ValueError(f"active_ranks has {tensor.numel()} elements: it needs the {self.max_size} of the group")
        self.mirror = tensor

    def write_mirror(self):
        """Writes which ranks are active into the tensor, if that has changed."""
        group = self.group
        if group is None:
            return
        with self._lock:
            seen = [int(state == "active") for state in group.members]
            if seen != self._written:
                self.mirror.view(-1)[: len(seen)].copy_(torch.tensor(seen, dtype=torch.int32))
                self._written = seen

    def member(self):
        """Returns the group; an error before `reconfigure`, and after the group was destroyed."""
        if self.group is None:
            raise RuntimeError(f"the group {self.name} was destroyed, or waits for reconfigure()")
        return self.group

    def copy_results(self):
        """Copies the results of collectives that have ended."""
        while self.copying and self.copying[0].is_completed():
            self.copying.pop(0)

    def leave(self):
        """Leaves the group. Idempotent."""
        self.copy_results()
        group, self.group = self.group, None
        if group is not None:
            _called(group.close)


class _Staged:
    """A tensor in the memory that a collective uses: its own, or a copy on the host, contiguous and without gaps."""

    def __init__(self, tensor, state, does_copy=False):
        if tensor.layout != torch.strided:
            raise _invalid("sparse tensors have no collectives")
        self.tensor = tensor.detach()
        self.host = self.tensor
        if self.tensor.device.type != "cpu":
            if not state.is_on_device:
                raise _invalid(f"the tensor is on {tensor.device}: mooncake-cpu takes tensors in host memory")
            self.host = self.tensor.cpu()
        if not self.host.is_contiguous():
            if not does_copy:
                raise _invalid(f"a tensor of shape {tuple(tensor.shape)} is not contiguous: call .contiguous() first")
            self.host = self.host.contiguous()

    def is_copied(self):
        return self.host.data_ptr() != self.tensor.data_ptr() or self.host.device != self.tensor.device

    def give_back(self):
        """Copies the host's copy to the tensor."""
        if self.is_copied():
            self.tensor.copy_(self.host.view(self.tensor.shape))


def _invalid(message):
    return ProcessGroupError(InvalidArgument(-600, message))


def _reduction(op):
    for known, name in _REDUCTIONS:
        if op == known:
            return name
    raise _invalid(f"{op} is not supported: the reductions are {', '.join(name for _, name in _REDUCTIONS)}")


def _one(tensors):
    if isinstance(tensors, torch.Tensor):
        return tensors
    if len(tensors) != 1:
        raise _invalid(f"one tensor is expected, not {len(tensors)}")
    return tensors[0]


def _list(tensors):
    """The one list of a list of lists, or a list of tensors."""
    if tensors and not isinstance(tensors[0], torch.Tensor):
        if len(tensors) != 1:
            raise _invalid(f"one list of tensors is expected, not {len(tensors)}")
        return list(tensors[0])
    return list(tensors)


def _joint(tensors):
    """Returns the tensor whose consecutive parts these are, without a copy; None if they are no such parts."""
    first = tensors[0]
    if first.device.type != "cpu" or not all(one.is_contiguous() for one in tensors):
        return None
    place = first.data_ptr()
    for one in tensors:
        if one.data_ptr() != place or one.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        place += one.numel() * one.element_size()
    count = sum(one.numel() for one in tensors)
    return first.detach().as_strided((count,), (1,), first.storage_offset())


class _Parts:
    """Tensors, one for each rank, in consecutive memory: their own if it is, else a copy."""

    def __init__(self, tensors, like, state, name):
        size, most = state.member().size, state.max_size
        if not size <= len(tensors) <= most:
            raise _invalid(f"{name} has {len(tensors)} tensors: one for each of {size} ranks, or more, up to {most}")
        for one in tensors:
            if one.dtype != like.dtype:
                raise _invalid(f"{name} has tensors of {one.dtype} and of {like.dtype}: they have the same type")
            if one.device != like.device:
                raise _invalid(f"{name} has tensors on {one.device} and on {like.device}")
        if like.device.type != "cpu" and not state.is_on_device:
            raise _invalid(f"{name} is on {like.device}: mooncake-cpu takes tensors in host memory")
        self.tensors = [one.detach() for one in tensors]
        self.counts = [one.numel() for one in tensors]
        self.host = _joint(self.tensors)
        self.is_copied = self.host is None
        if self.is_copied:
            # A copy of targets has their contents, too: the parts of ranks that are missing stay as they are.
            self.host = torch.cat([one.reshape(-1) for one in self.tensors]).cpu()

    def check_equal(self, count, name):
        """Rejects parts that have not all `count` elements."""
        for one in self.counts:
            if one != count:
                raise _invalid(f"{name} has tensors of {one} elements, not of {count}")

    def give_back(self):
        """Copies the parts to their tensors."""
        if self.is_copied:
            for one, part in zip(self.tensors, self.host.split(self.counts)):
                one.copy_(part.view(one.shape))


class _Collectives:
    """The collectives of a group, by the names that torch calls: for the group, and for its backend object."""

    _state = None

    # Arguments are (tensors, options), or (tensor, ..., timeout), depending on the caller and torch's version.

    def _deadline(self, opts, timeout=None, configured=None):
        found = seconds(timeout)
        if found is None and opts is not None:
            found = seconds(getattr(opts, "timeout", None))
        if found is None:
            found = settings.collective_s if configured is None else configured
        return self._state.timeout if found is None else found

    def _reduction_of(self, opts, op):
        if op is None and opts is not None:
            op = getattr(opts, "reduceOp", opts)
        return _reduction(_ReduceOp.SUM if op is None else op)

    def _root_of(self, opts, root):
        found = root if root is not None else opts if _is_integer(opts) else getattr(opts, "rootRank", 0)
        return found + getattr(opts, "rootTensor", 0)

    def _begin(self, function, *arguments, outputs=(), finish=None, peer=None, is_message=False):
        self._state.copy_results()
        return self._made([_called(function, *arguments)], outputs, finish, peer, is_message)

    def _made(self, works, outputs, finish=None, peer=None, is_message=False):
        made = MooncakeWork(self._state, works, outputs, finish, peer, is_message)
        if finish is not None:
            self._state.copying.append(made)
        if self._state.coalesced is not None:
            self._state.coalesced.append(made)
        return made

    def _all(self, works):
        """Returns one work of several."""
        return _Several(self._state, works)

    def _narrowed(self, room, then):
        """Returns the end of a collective whose tensor has no room for the highest ranks, as its caller knows that they
        failed before the group does: an error if they take part."""
        group = self._state.member()

        def finish():
            active = [rank for rank, takes_part in enumerate(group.active) if takes_part and rank >= room]
            if active:
                raise _invalid(f"a tensor has room for {room} ranks, and rank {active[0]} is active")
            then()

        return finish

    def allreduce(self, tensors, opts=None, op=None, timeout=None):
        """Combines tensors of all ranks in place."""
        if getattr(opts, "sparseIndices", None) is not None:
            raise _invalid("sparse tensors have no collectives")
        tensor = _one(tensors)
        staged, reduction = _Staged(tensor, self._state), self._reduction_of(opts, op)
        group, deadline = self._state.member(), self._deadline(opts, timeout)
        finish = staged.give_back if staged.is_copied() else None
        return self._begin(group.all_reduce, staged.host, reduction, deadline, outputs=[tensor], finish=finish)

    def allreduce_coalesced(self, tensors, opts=None):
        """Combines several tensors of all ranks, those of a type at once."""
        kinds = {}
        for tensor in tensors:
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        works = []
        for several in kinds.values():
            flat = torch.cat([one.detach().reshape(-1) for one in several])
            work = self.allreduce([flat], opts)
            works.append(work)
            work.also(_split_back(flat, several))
            self._state.copying.append(work)
        return self._all(works)

    def reduce(self, tensors, opts=None, root=None, op=None, timeout=None):
        """Combines tensors of all ranks in place at the root."""
        tensor = _one(tensors)
        staged, reduction = _Staged(tensor, self._state), self._reduction_of(opts, op)
        root, group = self._root_of(opts, root), self._state.member()
        finish = staged.give_back if staged.is_copied() and group.rank == root else None
        deadline = self._deadline(opts, timeout)
        return self._begin(group.reduce, staged.host, root, reduction, deadline, outputs=[tensor], finish=finish)

    def broadcast(self, tensors, opts=None, root=None, timeout=None):
        """Copies the root's tensor to all ranks."""
        tensor = _one(tensors)
        staged = _Staged(tensor, self._state)
        root, group = self._root_of(opts, root), self._state.member()
        finish = staged.give_back if staged.is_copied() and group.rank != root else None
        deadline = self._deadline(opts, timeout)
        return self._begin(group.broadcast, staged.host, root, deadline, outputs=[tensor], finish=finish)

    def allgather(self, outputs, inputs, opts=None, timeout=None):
        """Copies the tensors of all ranks to a list of tensors at each."""
        given, targets = _one(inputs), _list(outputs)
        parts = _Parts(targets, given, self._state, "the output")
        parts.check_equal(given.numel(), "the output")
        group, deadline = self._state.member(), self._deadline(opts, timeout)
        source = _Staged(given, self._state, True).host
        return self._begin(
            group.all_gather, source, parts.host, deadline, outputs=targets, finish=parts.give_back
        )

    def _allgather_base(self, output, input, opts=None, timeout=None):
        """Copies the tensors of all ranks to consecutive parts of one tensor at each."""
        source, target = _Staged(input, self._state), _Staged(output, self._state)
        group, deadline = self._state.member(), self._deadline(opts, timeout)
        finish = target.give_back if target.is_copied() else None
        into, room = target.host, _room(output, input, group)
        if room < group.size:
            into = target.host.new_empty(group.size * input.numel())
            finish = _joined(self._narrowed(room, lambda: _copy_front(into, target.host)), finish)
        return self._begin(group.all_gather, source.host, into, deadline, outputs=[output], finish=finish)

    all_gather_single = all_gather_into_tensor = _allgather_base

    def allgather_into_tensor_coalesced(self, outputs, inputs, opts=None):
        """Gathers several tensors."""
        return self._all([self._allgather_base(*both, opts) for both in zip(outputs, inputs)])

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def allgather_coalesced(self, outputs, inputs, opts=None):
        """Gathers several tensors to lists of tensors."""
        several = [[one[at] for one in outputs] for at in range(len(inputs))]
        return self._all([self.allgather([targets], [given], opts) for targets, given in zip(several, inputs)])

    def gather(self, outputs, inputs, opts=None, root=None, timeout=None):
        """Copies the tensors of all ranks to the root's list."""
        given, group = _one(inputs), self._state.member()
        root, deadline = self._root_of(opts, root), self._deadline(opts, timeout)
        source = _Staged(given, self._state, True).host
        if group.rank != root:
            return self._begin(group.gather, source, None, root, deadline)
        targets = _list(outputs)
        parts = _Parts(targets, given, self._state, "the output")
        parts.check_equal(given.numel(), "the output")
        arguments = source, parts.host, root, deadline
        return self._begin(group.gather, *arguments, outputs=targets, finish=parts.give_back)

    def gather_single(self, output, input, opts=None):
        """Copies the tensors of all ranks to consecutive parts of the root's."""
        group, root = self._state.member(), self._root_of(opts, None)
        source, deadline = _Staged(input, self._state).host, self._deadline(opts)
        if group.rank != root:
            return self._begin(group.gather, source, None, root, deadline)
        target = _Staged(output, self._state)
        arguments = source, target.host, root, deadline
        return self._begin(group.gather, *arguments, outputs=[output], finish=target.give_back)

    gather_into_tensor = gather_single

    def scatter(self, outputs, inputs, opts=None, root=None, timeout=None):
        """Copies each rank's tensor of the root's list to it."""
        output, group = _one(outputs), self._state.member()
        root, deadline = self._root_of(opts, root), self._deadline(opts, timeout)
        target, source = _Staged(output, self._state, True), None
        if group.rank == root:
            parts = _Parts(_list(inputs), output, self._state, "the input")
            parts.check_equal(output.numel(), "the input")
            source = parts.host
        arguments = target.host, source, root, deadline
        return self._begin(group.scatter, *arguments, outputs=[output], finish=target.give_back)

    def reduce_scatter(self, outputs, inputs, opts=None, op=None, timeout=None):
        """Combines the lists of all ranks, and gives each rank its part."""
        output = _one(outputs)
        parts = _Parts(_list(inputs), output, self._state, "the input")
        parts.check_equal(output.numel(), "the input")
        target = _Staged(output, self._state, True)
        arguments = parts.host, target.host, self._reduction_of(opts, op), self._deadline(opts, timeout)
        group = self._state.member()
        return self._begin(group.reduce_scatter, *arguments, outputs=[output], finish=target.give_back)

    def _reduce_scatter_base(self, output, input, opts=None, op=None, timeout=None):
        """Combines the tensors of all ranks, and gives each rank its part."""
        source, target = _Staged(input, self._state), _Staged(output, self._state)
        group, whole, finish = self._state.member(), source.host, target.give_back
        room = _room(input, output, group)
        if room < group.size:
            whole = source.host.new_zeros(group.size * output.numel())
            _copy_front(source.host, whole)
            finish = _joined(self._narrowed(room, lambda: None), finish)
        arguments = whole, target.host, self._reduction_of(opts, op), self._deadline(opts, timeout)
        return self._begin(group.reduce_scatter, *arguments, outputs=[output], finish=finish)

    reduce_scatter_single = reduce_scatter_tensor = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(self, outputs, inputs, opts=None):
        """Combines and scatters several tensors."""
        return self._all([self._reduce_scatter_base(*both, opts) for both in zip(outputs, inputs)])

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def alltoall(self, outputs, inputs, opts=None, timeout=None):
        """Sends a tensor to each rank, and receives one of each; they may differ in size."""
        if not inputs or not outputs:
            raise _invalid("alltoall has lists of tensors that are not empty")
        ours = _Parts(list(inputs), inputs[0], self._state, "the input")
        theirs = _Parts(list(outputs), inputs[0], self._state, "the output")
        group, deadline = self._state.member(), self._deadline(opts, timeout)
        arguments = ours.host, theirs.host, ours.counts, theirs.counts, deadline
        return self._begin(group.all_to_all, *arguments, outputs=list(outputs), finish=theirs.give_back)

    def alltoall_base(self, output, input, output_split_sizes=(), input_split_sizes=(), opts=None, timeout=None):
        """Sends a part of a tensor to each rank, and receives one of each. Splits count rows."""
        source, target = _Staged(input, self._state), _Staged(output, self._state)
        group, deadline = self._state.member(), self._deadline(opts, timeout)
        to = _row_counts(input, input_split_sizes, group, "input_split_sizes")
        of = _row_counts(output, output_split_sizes, group, "output_split_sizes")
        arguments = source.host, target.host, to, of, deadline
        return self._begin(group.all_to_all, *arguments, outputs=[output], finish=target.give_back)

    all_to_all_single = alltoall_base

    def barrier(self, opts=None, timeout=None):
        """Ends when all ranks have begun it."""
        return self._begin(self._state.member().barrier, self._deadline(opts, timeout))

    def send(self, tensors, peer, tag=0):
        """Sends a tensor to a rank."""
        tensor = _one(tensors)
        source = _Staged(tensor, self._state, True)
        deadline = self._deadline(None, None, settings.message_s)
        arguments = source.host, peer, tag, deadline
        return self._begin(self._state.member().send, *arguments, outputs=[tensor], peer=peer, is_message=True)

    def recv(self, tensors, peer, tag=0):
        """Receives a tensor of a rank; of any, if `peer` is None."""
        tensor = _one(tensors)
        target = _Staged(tensor, self._state, True)
        deadline = self._deadline(None, None, settings.message_s)
        arguments = target.host, peer, tag, deadline
        group = self._state.member()
        given = {"outputs": [tensor], "finish": target.give_back, "peer": peer, "is_message": True}
        return self._begin(group.receive, *arguments, **given)

    def recv_anysource(self, tensors, tag=0):
        """Receives a tensor of any rank, which the work names."""
        return self.recv(tensors, None, tag)

    recv_anysource_ = recvAnysource = recv_anysource

    def getBackendName(self):
        """Returns the name of the backend."""
        return "mooncake"

    def name(self):
        """Returns the name of the backend."""
        return "mooncake"

    def start_coalescing(self):
        """Begins a block of collectives that have one work."""
        self._state.coalesced = []

    def end_coalescing(self):
        """Ends the block, and returns its work."""
        works, self._state.coalesced = self._state.coalesced or [], None
        return self._all(works)

    def rank(self):
        """Returns this process's rank in the group."""
        return self._rank if self._state.group is None else self._state.group.rank

    def size(self):
        """Returns the highest active rank plus one."""
        return self._size if self._state.group is None else self._state.group.size

    @property
    def supports_reconfigure(self):
        """True: `reconfigure` replaces the members of the group."""
        return True

    @property
    def supports_shrinking(self):
        """True: `shrink` makes a group without some ranks."""
        return True

    @property
    def supports_abort_hooks(self):
        """True: `abort` calls the hooks."""
        return True

    @property
    def supports_coalescing(self):
        """False: torch begins the parts of a batch one by one, which then run together."""
        return False

    @property
    def supports_splitting(self):
        """False: `new_group` makes smaller groups."""
        return False

    @property
    def supports_window(self):
        """False: there are no one-sided windows."""
        return False

    def get_reconfigure_handle(self):
        """Returns the text that names this process in the `reconfigure` of others."""
        return json.dumps({"world": self._state.world.name, "rank": self._state.world.rank})

    def reconfigure(self, opts):
        """Makes this the group of the processes that the handles name: ranks are positions in a list, or those in the
        order of the world for a set. All of them call it with the same `uuid`. Returns a work that is complete."""
        handles = [json.loads(one) for one in opts.handles]
        state = self._state
        if any(one["world"] != state.world.name for one in handles):
            raise _invalid(f"a handle is of another job than {state.world.name}")
        order = [one["rank"] for one in handles]
        if not isinstance(opts.handles, list):
            order.sort()
        if state.world.rank not in order:
            raise _invalid(f"the handles {order} do not have this process, rank {state.world.rank}")
        options = state.options_of(max(len(order), 1))
        timeout, state.timeout = state.timeout, seconds(opts.timeout) or state.timeout
        try:
            state.leave()
            _called(state.open, order, options, False, f"{state.name}/reconfigured/{opts.uuid}", len(order))
        finally:
            state.timeout = timeout
        state.problem = None
        return self._made([], [])

    def shrink(self, ranks_to_exclude, shrink_flags=0, opts_override=None):
        """Returns a backend object of a group of the others, whose ranks follow each other without gaps. All of them
        call it."""
        state, excluded = self._state, set(ranks_to_exclude)
        order = [one for rank, one in enumerate(state.order) if rank not in excluded]
        state.shrinks += 1
        smaller = _State(state.world, f"{state.name}/shrunk/{state.shrinks}", state.timeout, state.is_on_device)
        name = f"{smaller.name}/{'-'.join(map(str, order))}"
        _called(smaller.open, order, state.options_of(len(order)), False, name, len(order))
        return _BackendObject(smaller, smaller.group.rank, len(order))

    def get_error(self):
        """Returns the kind of the last error of a collective, as torch's `ErrorType`."""
        kinds = torch._C._distributed_c10d.ErrorType
        if self._state.problem is None:
            return kinds.SUCCESS
        return kinds.TIMEOUT if self._state.problem.code == -901 else kinds.COMM_ERROR

    def register_abort_hook(self, hook_id, hook):
        """Has `abort` call a function."""
        self._state.hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id):
        """Forgets a function that `abort` calls."""
        self._state.hooks.pop(hook_id, None)

    def abort(self):
        """Calls the hooks, and leaves the group: the collectives of the others go on without this rank."""
        for hook in list(self._state.hooks.values()):
            hook()
        self._state.leave()

    def shutdown(self):
        """Leaves the group. Idempotent."""
        self._state.leave()

    def set_timeout(self, timeout):
        """Sets the seconds within which collectives end, unless their call says otherwise."""
        self._state.timeout = seconds(timeout) or _DEFAULT_S

    _set_default_timeout = set_timeout


class _Several(MooncakeWork):
    """Several works as one."""

    def __init__(self, state, works):
        super().__init__(state, (), [one for work in works for one in work._outputs])
        self._several = works

    def wait(self, timeout=None):
        """Waits until all have ended."""
        longest = seconds(timeout)
        until = None if longest is None else time.monotonic() + longest
        for work in self._several:
            left = None if until is None else max(until - time.monotonic(), 1e-6)
            try:
                if not work.wait(left):
                    return False
            except ProcessGroupError as problem:
                self._problem = self._problem or problem
            self._hint |= work._hint
        self._is_done = True
        if self._problem is not None:
            raise self._problem
        return True

    def is_completed(self):
        """Returns True if all have ended."""
        if not self._is_done and all([work.is_completed() for work in self._several]):
            try:
                self.wait()
            except ProcessGroupError:
                pass
        return self._is_done


def _room(whole, part, group):
    """Number of ranks whose parts a tensor has room for."""
    return whole.numel() // part.numel() if part.numel() else group.size


def _copy_front(source, target):
    count = min(source.numel(), target.numel())
    target.view(-1)[:count].copy_(source.view(-1)[:count])


def _joined(first, second):
    def both():
        for one in (first, second):
            if one is not None:
                one()

    return both


def _split_back(flat, several):
    def give_back():
        for one, part in zip(several, flat.split([one.numel() for one in several])):
            one.detach().copy_(part.view(one.shape))

    return give_back


def _row_counts(tensor, splits, group, name):
    """Numbers of elements by rank, from numbers of rows; without them, rows are divided evenly by the group's size."""
    size, most = group.size, group.max_size
    rows = tensor.shape[0] if tensor.dim() else tensor.numel()
    if not splits:
        if rows % size:
            raise _invalid(f"{rows} rows cannot be split evenly among {size} ranks: pass {name}")
        splits = [rows // size] * size
    if not size <= len(splits) <= most or sum(splits) != rows or min(splits) < 0:
        what = f"{size} numbers of 0 or more, or up to {most} of them, that add up to {rows} rows"
        raise _invalid(f"{name} are {list(splits)}: {what}")
    each = tensor.numel() // rows if rows else 0
    return [rows * each for rows in splits]


class _BackendObject(_Collectives, _Backend):
    """Backend object of a group: torch's functional collectives and compiled code call it from C++."""

    def __init__(self, state, rank, size):
        if _Backend is not object:
            _Backend.__init__(self, rank, size)
        self._state, self._rank, self._size = state, rank, size


class MooncakeProcessGroup(_Collectives, dist.ProcessGroup):
    """Process group of torch over one of `kvplane.group`."""

    def __init__(self, opts, options, is_on_device):
        rank, size = opts.group_rank, opts.group_size
        try:
            super().__init__(opts.store, rank, size)
        except TypeError:
            # Before torch 2.6, a group with a store has options of C++ besides.
            super().__init__(rank, size)
        self._rank, self._size = rank, size
        if not opts.group_id:
            raise ValueError("the group has no group_id")
        if size > MAX_RANKS:
            raise ValueError(f"a group of {size} ranks: it has at most {MAX_RANKS}")
        options = _of_environment(size) if options is None else options
        if not isinstance(options, MooncakeBackendOptions):
            raise TypeError(f"pg_options is {type(options).__name__}, not MooncakeBackendOptions")
        options.failures()
        named = list(opts.global_ranks_in_group)
        order = named or list(range(size))
        timeout = seconds(opts.timeout) or _DEFAULT_S
        try:
            if named:
                world = _pg_process.world_of_subgroup(opts.store, order[rank])
            else:
                world = _pg_process.world(opts.store, rank, rank == 0 and not options.is_extension)
            # Groups of a device and of the host with the same id are not the same.
            group_id = f"{'device' if is_on_device else 'cpu'}:{opts.group_id}"
            self._state = _State(world, group_id, timeout, is_on_device)
            if not getattr(opts, "enable_reconfigure", False):
                self._open(opts.store, order, options)
        except Error as problem:
            raise ProcessGroupError(problem) from problem
        self._backend = _BackendObject(self._state, rank, size)
        kind = dist.ProcessGroup.BackendType.CUSTOM
        devices = _devices() if is_on_device else ["cpu"]
        for device in devices if _Backend is not object else ():
            self._register_backend(torch.device(device), kind, self._backend)
        if hasattr(self, "_set_default_backend"):
            self._set_default_backend(kind)
        if hasattr(self, "_set_group_name"):
            self._set_group_name(opts.group_id)

    def _open(self, store, order, options):
        state = self._state
        if options.is_extension:
            name = _pg_process.current_name(store)
        else:
            name = _pg_process.founding_name(store, state.name, len(order))
        state.open(order, options, options.is_extension, name, len(order))

    def _get_backend(self, device):
        return self._backend

    def _start_coalescing(self, device=None):
        self.start_coalescing()

    def _end_coalescing(self, device=None):
        return self.end_coalescing()

    def new_window(self, tensor=None):
        """Not supported."""
        raise NotImplementedError("one-sided windows are not supported: use send and recv")


def _devices():
    """Types of devices that torch may use here, and the host."""
    accelerator = getattr(torch._C, "_get_accelerator", lambda: torch.device("cpu"))()
    return list(dict.fromkeys(["cuda", accelerator.type, "cpu"]))


def createMooncakeBackend(opts, options=None):
    """Makes a group for tensors of a device, or of the host; torch calls it."""
    return MooncakeProcessGroup(opts, options, True)


def createMooncakeCpuBackend(opts, options=None):
    """Makes a group for tensors in host memory; torch calls it."""
    return MooncakeProcessGroup(opts, options, False)


def _register():
    devices = tuple(device for device in _devices() if device != "cpu")
    for name, create, types in (("mooncake-cpu", createMooncakeCpuBackend, ("cpu",)),
                                ("mooncake", createMooncakeBackend, devices)):
        try:
            dist.Backend.register_backend(name, create, extended_api=True, devices=types)
        except TypeError:
            # Torch 2.0 takes every backend for all devices.
            dist.Backend.register_backend(name, create, extended_api=True)


_register()


def set_host_ip(host):
    """Sets the address on which the other processes reach this one: loopback by default. For groups that are made
    afterwards."""
    settings.host = host


def set_device_filter(filters):
    """Names the NICs that groups use, by RDMA device."""
    names = list(filters)
    if not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"{names} are no names of devices")
    os.environ["MC_TE_FILTERS"] = ",".join(names)
    settings.devices = names


def set_transfer_engine(engine):
    """Has the other processes reach this one on the host of a `mooncake.engine.TransferEngine`, which is initialized;
    groups have connections of their own. None sets the default again: loopback. For groups that are made afterwards."""
    if engine is None:
        settings.host = None
        return
    if not isinstance(engine, TransferEngine):
        raise TypeError(f"{type(engine).__name__} is no TransferEngine of mooncake.engine")
    if not engine.get_engine_ptr():
        raise RuntimeError("the TransferEngine is not initialized")
    settings.host = engine._native.name().rpartition(":")[0].strip("[]")


def _timeout(us):
    if us is not None and us < 0:
        raise ValueError(f"a timeout of {us} us: it is 0 (torch's timeout of the group) or more")
    return seconds(us / 1e6)


def set_collective_timeout_us(us):
    """Sets the time within which a collective ends, unless its call says otherwise: a rank that is alive and slow is
    waited for until then. 0: the timeout that torch's group has."""
    settings.collective_s = _timeout(us)


def set_p2p_timeout_us(us):
    """Sets the time within which a send or receive ends. 0: the timeout that torch's group has."""
    settings.message_s = _timeout(us)


def set_fault_reconciliation_window_us(us):
    """Sets the longest wait of `sync_after_failure`."""
    settings.reconciliation_s = _timeout(us)


def _state_of(group):
    if group is None:
        group = dist.group.WORLD
    state = getattr(group, "_state", None)
    if not isinstance(state, _State):
        raise TypeError(f"{type(group).__name__} is no group of a mooncake backend")
    return state


def get_active_ranks(backend):
    """Returns the int32 tensor that says which ranks are active, and follows the group's view: before `wait` of a work
    returns, and otherwise within 50 ms."""
    state = _state_of(backend)
    state.member()
    state.write_mirror()
    _MIRRORS.add(state)
    return state.mirror


def get_num_synced_ranks(backend):
    """Returns the number of ranks that are active or could be activated."""
    return sum(_ready(_state_of(backend).member()))


def extend_group_size_to(backend, size):
    """Has no effect, as in Mooncake: a group grows when ranks are activated."""
    warnings.warn("extend_group_size_to has no effect: activate_ranks lets a group grow", stacklevel=2)


def _ready(group):
    return [alive and state in ("awaiting", "active") for alive, state in zip(group.peers, group.members)]


def get_peer_state(backend, ranks):
    """Returns whether each rank is active, or ready to be activated: its process is connected and has called
    `join_group`."""
    group = _state_of(backend).member()
    ready = _ready(group)
    for rank in ranks:
        if not 0 <= rank < len(ready):
            raise _invalid(f"rank {rank} is not a rank from 0 to {len(ready) - 1}")
    return [ready[rank] for rank in ranks]


def _propose(backend, activate, ranks):
    state = _state_of(backend)
    group = state.member()
    change = _called(group.activate if activate else group.deactivate, list(ranks))
    state.write_mirror()
    if not change.applied:
        status = ProposalStatus.Rejected
    else:
        status = ProposalStatus.AppliedWithDroppedRanks if change.dropped else ProposalStatus.Applied
    return ProposeViewUpdateResponse(status, change.epoch, change.dropped, change.reason)


def activate_ranks(backend, ranks):
    """Has ranks take part from the group's next view on: waits until they are ready. All active ranks may ask."""
    return _propose(backend, True, ranks)


recover_ranks = activate_ranks


def deactivate_ranks(backend, ranks):
    """Has ranks take part no longer."""
    return _propose(backend, False, ranks)


def join_group(backend):
    """Has this process take part in the group: waits until an active rank has activated it."""
    state = _state_of(backend)
    _called(state.member().join, state.timeout)
    state.write_mirror()


def _work_of(work):
    if not isinstance(work, MooncakeWork):
        raise TypeError(f"{type(work).__name__} is no work of a mooncake backend")
    return work


def get_failed_ranks_hint(work):
    """Returns an int32 tensor that says which ranks failed while a collective or message ran."""
    return _work_of(work).failed_ranks_hint()


def get_local_success(work):
    """Returns True if no rank has failed in a collective or message."""
    return _work_of(work).local_success()


def get_current_epoch(backend):
    """Returns the epoch of the group's view, which grows with each change."""
    return _state_of(backend).member().epoch


def sync_after_failure(backend):
    """Waits until the control plane has decided which ranks failed; deactivates them where that is left to this call."""
    state = _state_of(backend)
    found = _called(state.member().sync_after_failure, settings.reconciliation_s or 30.0)
    state.write_mirror()
    status = {"reconciled": SyncAfterFailureStatus.Reconciled, "none_pending": SyncAfterFailureStatus.NoPending}
    return SyncAfterFailureResponse(status.get(found.status, SyncAfterFailureStatus.Rejected), found.reason)
