"""Registrations of memory with a store for the time of calls, shared by the calls of all threads: `Registrations`."""

import threading
import time
import weakref
from bisect import bisect_right, insort

#: Code of a registration of memory that is registered: its owner did so.
REGISTERED = -600
#: Longest wait for calls of other threads with memory that overlaps, in seconds.
_WAIT_S = 60


class _Busy(Exception):
    """Memory that overlaps a registration, and is not within it."""


class Registrations:
    """Memory that is registered while a call uses it. Registrations do not overlap: memory within one is counted there, and
    unregistered with its last user. Any number of threads may use one object."""

    _of_stores = weakref.WeakKeyDictionary()
    _lock_of_stores = threading.Lock()

    def __init__(self, store):
        # A bound method would keep the store, as a value of `_of_stores`.
        self._register = _method(store, "register_buffer")
        self._unregister = _method(store, "unregister_buffer")
        self._changed = threading.Condition()
        #: Addresses in their order, and for each the end and the number of users.
        self._begins = []
        self._ends = {}
        self._users = {}

    @classmethod
    def of(cls, store):
        """Returns the registrations of a store, the same for all who use it."""
        try:
            with cls._lock_of_stores:
                found = cls._of_stores.get(store)
                if found is None:
                    found = cls._of_stores[store] = cls(store)
                return found
        except TypeError:
            # One that cannot be referred to weakly, or has no hash.
            return cls(store)

    def take(self, groups):
        """Registers memory; returns what `give` takes back.

        `groups` are pairs of (address, size), and a list of such pairs within it: the parts that are used, which are
        registered one by one where the whole overlaps a registration. What its owner registered is left to the owner.
        Waits for calls that use memory that overlaps one of the parts; RuntimeError after a minute, and for memory that
        cannot be registered.
        """
        until = time.monotonic() + _WAIT_S
        with self._changed:
            while True:
                done = []
                try:
                    for whole, parts in groups:
                        self._take_group(whole, parts, done)
                    return done
                except _Busy:
                    # A call that waits holds nothing.
                    self._drop(done)
                except BaseException:
                    self._drop(done)
                    raise
                left = until - time.monotonic()
                if left <= 0:
                    raise RuntimeError(
                        f"memory that overlaps a call's was used by calls of other threads for {_WAIT_S} s: give each call "
                        "memory of its own, or register all of it once with register_buffer"
                    )
                self._changed.wait(left)

    def give(self, taken):
        """Ends the use of memory."""
        with self._changed:
            self._drop(taken)

    def _take_group(self, whole, parts, done):
        if self._overlaps(*whole):
            for part in parts:
                self._take(part, done)
        else:
            self._take(whole, done)

    def _overlaps(self, address, size):
        """Returns true if memory overlaps registrations without being within one."""
        return self._around(address, size) is None and self._before_end(address, size)

    def _around(self, address, size):
        """Returns the address of the registration that memory is within, or None."""
        at = bisect_right(self._begins, address) - 1
        begin = self._begins[at] if at >= 0 else None
        return begin if begin is not None and address + size <= self._ends[begin] else None

    def _before_end(self, address, size):
        """Returns true if a registration begins before the end of memory and ends behind its begin."""
        at = bisect_right(self._begins, address + size - 1) - 1
        return at >= 0 and self._ends[self._begins[at]] > address

    def _take(self, memory, done):
        address, size = memory
        begin = self._around(address, size)
        if begin is None:
            if self._before_end(address, size):
                raise _Busy
            code = self._register(address, size)
            if code == REGISTERED:
                return
            if code not in (None, 0):
                raise RuntimeError(f"register_buffer failed for {size} bytes: {code}")
            begin = address
            insort(self._begins, begin)
            self._ends[begin], self._users[begin] = address + size, 0
        self._users[begin] += 1
        done.append(begin)

    def _drop(self, taken):
        for begin in taken:
            self._users[begin] -= 1
            if self._users[begin] == 0:
                del self._users[begin], self._ends[begin], self._begins[bisect_right(self._begins, begin) - 1]
                self._unregister(begin)
        self._changed.notify_all()


def _method(store, name):
    """Returns a function that calls a store's method and does not keep the store, where that is possible."""
    try:
        kept = weakref.ref(store)
    except TypeError:
        kept = lambda: store
    return lambda *arguments: getattr(kept(), name)(*arguments)
