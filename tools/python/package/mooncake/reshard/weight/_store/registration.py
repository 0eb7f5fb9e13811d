"""Memory of fragments, pinned by the framework and registered with a store for the time of a transfer."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Tuple
from uuid import uuid4

from mooncake.reshard.lifetime import AllocationTokenSet, TerminalTransferState, release_tokens_after_terminal
from mooncake.reshard.weight._store.plans import WeightStoreError
from mooncake.reshard.weight.lifetime import acquire_weight_binding_token
from mooncake.reshard.weight.runtime import WeightRuntimeBindingManifest


@dataclass
class StoreRegistrationLease:
    """Fragments that stay pinned and registered over several transfers, until they are closed."""

    _owner: "StoreBufferRegistration" = field(repr=False)
    binding: WeightRuntimeBindingManifest
    fragment_ids: Tuple[str, ...]
    addresses: Tuple[Tuple[int, int], ...]
    _tokens: AllocationTokenSet = field(repr=False)
    _closed: bool = field(default=False, init=False, repr=False)

    @property
    def closed(self) -> bool:
        """Returns true if no transfer may use the memory any more."""
        return self._closed

    def validate(self, binding, fragments) -> None:
        """WeightStoreError unless the lease is open, and of exactly these fragments of this binding."""
        if self._closed:
            raise WeightStoreError("the registration lease is closed")
        if binding != self.binding:
            raise WeightStoreError("the registration lease is of another binding")
        if tuple(sorted(one.fragment_id for one in fragments)) != self.fragment_ids:
            raise WeightStoreError("the registration lease is of other fragments")
        if tuple(sorted(_ranges(fragments).items())) != self.addresses:
            raise WeightStoreError("the registration lease is of other addresses")

    def close(self, terminal_state: TerminalTransferState = TerminalTransferState.COMPLETED) -> None:
        """Unregisters the memory and releases its pins; idempotent. WeightStoreError if the store keeps some: the
        memory stays pinned then, until `drain_pending_registration`."""
        if not self._closed:
            self._closed = True
            self._owner.end([address for address, _ in self.addresses], self._tokens, terminal_state)


class Progress:
    """Whether a transfer has begun to use its memory."""

    begun = False


class StoreBufferRegistration:
    """Registrations with a store. While the store keeps memory that it should have given up, none is added."""

    def __init__(self, store):
        self._store = store
        self._lock = Lock()
        #: Addresses, pins and the end of the transfer, of memory that the store did not give up.
        self._pending = {}

    def pending_registration_ids(self):
        """Returns the ids of memory that the store did not give up."""
        with self._lock:
            return tuple(sorted(self._pending))

    def drain_pending_registration(self, pending_id):
        """Unregisters such memory again, and releases its pins."""
        # Until it is drained, nothing is added.
        with self._lock:
            found = self._pending.get(pending_id)
            if found is None:
                raise WeightStoreError(f"there is no pending registration {pending_id}")
            addresses, tokens, state = found
            left = self._unregister(addresses)
            self._pending[pending_id] = (tuple(left), tokens, state)
            if left:
                raise WeightStoreError(f"memory of the pending registration {pending_id} is registered still", left)
            try:
                release_tokens_after_terminal(tokens, state)
            except Exception as error:
                raise WeightStoreError(f"pins of a pending registration were not released: {error}") from error
            del self._pending[pending_id]

    def acquire(self, side, binding, fragment_ids, guards, transfer_id=None):
        """Pins and registers fragments. Returns a lease; WeightStoreError, and neither, if one of both fails."""
        ids = tuple(sorted(set(fragment_ids)))
        with self._lock:
            if self._pending:
                raise WeightStoreError(f"weights wait for the cleanup of pending registrations: {min(self._pending)}")
        try:
            found, tokens = acquire_weight_binding_token(
                transfer_id=transfer_id or uuid4().hex,
                expected_binding=binding,
                required_fragment_ids=ids,
                side=side,
                providers=guards,
            )
        except ValueError as error:
            raise WeightStoreError(str(error)) from error
        done = []
        try:
            ranges = _ranges([one for one in found.fragments if one.fragment_id in ids])
            for address, size in ranges.items():
                code = self._store.code("register_buffer", address, size)
                if code != 0:
                    raise WeightStoreError("memory was not registered", {address: code})
                done.append(address)
        except BaseException:
            self.end(done, tokens, TerminalTransferState.ABORTED)
            raise
        return StoreRegistrationLease(self, found, ids, tuple(sorted(ranges.items())), tokens)

    @contextmanager
    def held(self, side, binding, fragments, guards, lease=None, transfer_id=None):
        """Context manager of fragments that are pinned and registered: by a lease, or within it."""
        if lease is not None:
            if lease._owner is not self:
                raise WeightStoreError("the registration lease is of another store")
            lease.validate(binding, fragments)
            yield Progress()
            return
        lease = self.acquire(side, binding, [one.fragment_id for one in fragments], guards, transfer_id)
        progress, states = Progress(), TerminalTransferState
        try:
            yield progress
        except BaseException:
            lease.close(states.FAILED_DRAINED if progress.begun else states.ABORTED)
            raise
        lease.close()

    def end(self, addresses, tokens, state):
        """Unregisters memory and releases its pins, or keeps both for `drain_pending_registration`."""
        left = self._unregister(addresses)
        if left:
            pending_id = uuid4().hex
            with self._lock:
                self._pending[pending_id] = (tuple(left), tokens.handoff_to_pending(), state)
            raise WeightStoreError(f"memory is registered still; it stays pinned as {pending_id}", left)
        tokens.release_after_terminal(state)

    def _unregister(self, addresses):
        """Returns the addresses that the store keeps, with what it says."""
        left = {}
        for address in reversed(tuple(addresses)):
            try:
                code = self._store.code("unregister_buffer", address)
            except WeightStoreError as error:
                code = str(error)
            if code != 0:
                left[address] = code
        return left


def _ranges(fragments):
    """Returns lengths by address: aliases have one and the same memory."""
    found = {}
    for one in fragments:
        if found.setdefault(one.address, one.nbytes) != one.nbytes:
            raise WeightStoreError(f"fragments at {one.address} have different lengths")
    return found


__all__ = ["StoreBufferRegistration", "StoreRegistrationLease"]
