"""The part of LMCache that its adapter for kvplane uses, for hosts without LMCache: an adapter's base class, whose
listeners are called as they are, bitmaps, results and keys. `install` must come before the adapter's import."""

import dataclasses
import os
import sys
import threading
import types


class Bitmap:
    """Bits of the keys of a task."""

    def __init__(self, size):
        self.bits = [False] * size

    def batched_set(self, indices):
        for index in indices:
            self.bits[index] = True

    def get_indices_list(self):
        return [index for index, is_set in enumerate(self.bits) if is_set]


@dataclasses.dataclass
class L2StoreResult:
    """Result of a store."""

    successful: bool
    transferred: int


class L2AdapterInterface:
    """Base class of adapters."""

    def __init__(self, max_capacity_bytes=0):
        self.listeners, self.used = [], 0

    def _notify_keys_stored(self, keys, sizes):
        self.used += sum(sizes)
        for listener in self.listeners:
            listener("stored", keys)

    def _notify_keys_accessed(self, keys):
        for listener in self.listeners:
            listener("accessed", keys)

    def _notify_keys_deleted(self, keys, sizes):
        self.used -= sum(sizes)
        for listener in self.listeners:
            listener("deleted", keys)


class L2AdapterConfigBase:
    """Base class of settings."""


class Notifier:
    """Descriptor that becomes readable."""

    def __init__(self):
        self._reading, self._writing = os.pipe()
        self._lock = threading.Lock()

    def fileno(self):
        return self._reading

    def notify(self):
        with self._lock:
            os.write(self._writing, b"1")

    def close(self):
        with self._lock:
            os.close(self._reading)
            os.close(self._writing)
            self._reading = self._writing = -1


@dataclasses.dataclass(frozen=True)
class Key:
    """Key of an object."""

    chunk_hash: bytes
    model_name: str = "model"
    kv_rank: int = 0x01000100
    object_group_id: int = 0
    cache_salt: str = ""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Layout of the objects of a group."""

    shapes: list
    dtypes: list


def install():
    """Has the modules imported in the place of LMCache's."""
    names = {
        "lmcache.lmcache_native": {"Bitmap": Bitmap},
        "lmcache.v1.distributed.internal_api": {"L2StoreResult": L2StoreResult},
        "lmcache.v1.distributed.l2_adapters.base": {"L2AdapterInterface": L2AdapterInterface},
        "lmcache.v1.distributed.l2_adapters.config": {"L2AdapterConfigBase": L2AdapterConfigBase},
        "lmcache.v1.platform": {"create_event_notifier": Notifier},
    }
    for name, members in names.items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            module = sys.modules.setdefault(".".join(parts[:count]), types.ModuleType(".".join(parts[:count])))
            module.__path__ = []
        vars(module).update(members)
