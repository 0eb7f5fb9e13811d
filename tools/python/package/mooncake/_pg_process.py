"""This process as a rank of its jobs: the settings that `mooncake.pg` takes for all groups, the worlds that groups of
torch are in, and how the processes of a job find their control plane and the names of their groups in torch's store."""

import atexit
import json
import os
import threading
import time
import uuid

from kvplane import NotFound
from kvplane._program import start_control_plane
from kvplane.group import World

#: Seconds after which a control plane that rank 0 started ends, if no process of the job is left.
IDLE_S = 60.0
#: Longest wait of a joiner for the group that it names, beyond that for the group's name.
_JOIN_S = 5.0
_WORLD, _CLAIM = "kvplane/world", "kvplane/claim"
_FOUNDERS, _NAME, _CURRENT = "kvplane/founders", "kvplane/name/", "kvplane/current"


class Settings:
    """Settings of the process, for groups that are made after they were set."""

    host = None
    #: RDMA devices, the best first.
    devices = None
    #: Seconds within which a collective, a message and a reconciliation end; None: the group's timeout of torch.
    collective_s = None
    message_s = None
    reconciliation_s = None


settings = Settings()
_LOCK = threading.Lock()
#: Worlds by control plane and name, and the stores by which this process found them: the store of torch's first group
#: stays, as rank 0 may serve it.
_WORLDS = {}
_STORES = []


def _place():
    """Names this host's loopback interface: two processes with the same name reach each other on it."""
    with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
        return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"


def _text(value):
    return value.decode() if isinstance(value, bytes) else str(value)


def _publish(store):
    """Has a control plane for the job of a store, and tells the others where."""
    known = next(iter(_WORLDS), None)
    if known is not None:
        store.set(_WORLD, known)
        return
    configured = os.environ.get("KVPLANE_CONTROL")
    name = f"torch-{uuid.uuid4().hex}"
    found = {"control": configured, "world": name, "cluster": None, "place": None}
    if not configured:
        found["cluster"], found["place"] = name, _place()
        found["control"] = start_control_plane(name, IDLE_S)
    store.set(_WORLD, json.dumps(found))


def world(store, rank, publishes):
    """Returns this process's world: that of a store in which the first process of a group has published it, which is
    this one if it `publishes`. `rank` is this process's in the job."""
    with _LOCK:
        if publishes:
            _publish(store)
        store.wait([_WORLD])
        text = _text(store.get(_WORLD))
        known = _WORLDS.get(text)
        if known is None:
            known = _WORLDS[text] = _open(json.loads(text), rank)
            _STORES.append(store)
        if known.rank != rank:
            raise ValueError(f"this process is rank {known.rank} of its job, and makes a group as rank {rank}")
        return known


def _open(found, rank):
    if found["place"] is not None and found["place"] != _place():
        raise ValueError(
            f"rank {rank} is on another host than rank 0, whose control plane is on loopback: start one that both "
            "reach (`kvplane control`), and set KVPLANE_CONTROL to its address in all processes"
        )
    # A configured control plane may have another address on each host.
    control = os.environ.get("KVPLANE_CONTROL") if found["cluster"] is None else None
    control = control or found["control"]
    cluster, devices = found["cluster"], settings.devices
    return World(found["world"], rank, control, host=settings.host, cluster=cluster, devices=devices)


def world_of_subgroup(store, rank):
    """Returns this process's world for a group that is not torch's default one: the world of that, or, if that has
    another backend, one of all processes of the store that is below all prefixes."""
    with _LOCK:
        known = next(reversed(_WORLDS.values()), None)
    if known is not None:
        return known
    while getattr(store, "underlying_store", None) is not None:
        store = store.underlying_store
    return world(store, rank, store.add(_CLAIM, 1) == 1)


def founding_name(store, group_id, size):
    """Returns the name of a group that this process founds with others: a name of its own each time that torch makes a
    group with this id."""
    place = store.add(_FOUNDERS, 1) - 1
    generation, position = divmod(place, size)
    key = f"{_NAME}{generation}"
    if position == 0:
        name = f"{group_id}/{uuid.uuid4().hex}"
        store.set(key, name)
        store.set(_CURRENT, name)
    store.wait([key])
    return _text(store.get(key))


def current_name(store):
    """Returns the name of the group that a joiner of this store's group finds."""
    store.wait([_CURRENT])
    return _text(store.get(_CURRENT))


def join(joined, name, order, **options):
    """Returns the group of a joiner. Its founding members may be about to make it."""
    until = time.monotonic() + _JOIN_S
    while True:
        try:
            return joined.group(name, order, joining=True, **options)
        except NotFound:
            if time.monotonic() >= until:
                raise
            time.sleep(0.05)


@atexit.register
def close():
    """Leaves all worlds."""
    with _LOCK:
        while _WORLDS:
            _WORLDS.popitem()[1].close()
        _STORES.clear()


__all__ = ["close", "current_name", "founding_name", "join", "settings", "world", "world_of_subgroup"]
