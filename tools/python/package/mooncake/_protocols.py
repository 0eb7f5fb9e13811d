"""Mooncake's protocols, and their handling here.

Bytes are transferred over shared memory on one host, and over TCP between hosts.
"""

import functools
import sys

_OURS = {"", "tcp", "shm", "rpc_only"}
_ABSENT = {"ascend", "barex", "cxl", "efa", "hip", "maca", "musa", "nvlink", "nvlink_intra", "nvmeof"}
_ABSENT |= {"sunrise_link", "ub", "ubshmem"}


def refused(call, protocol, devices):
    """Returns True if a protocol is unavailable, and reports it. RDMA on a host without devices is accepted, but
    reported."""
    name = protocol.lower()
    if name in _OURS:
        return False
    if name == "rdma":
        from kvplane import _native

        if not _native.topology()[1]:
            wanted = f" on {devices}" if devices else ""
            _say(f"{call}: no RDMA device on this host: uses shared memory and TCP instead of rdma{wanted}")
        return False
    why = "is not supported here" if name in _ABSENT else "is unknown"
    _say(f"{call}: the protocol {protocol!r} {why}; use tcp or rdma")
    return True


#: Transports that an engine uses, as hints name them.
_TRANSPORTS = {"", "tcp", "rdma", "shm", "hp_tcp"}
#: Devices and transports that were reported: a hint comes with every call.
_SAID = set()


def check_hints(call, transport, nic):
    """Reports a hint at a transport that is unavailable, and one at a device that this host does not have: once each. The
    transfer takes the transports and devices that there are. TypeError for hints that are no text."""
    if not transport and not nic:
        return
    for name, hint in (("transport_hint", transport), ("nic_hint", nic)):
        if not isinstance(hint, str):
            raise TypeError(f"{call}(): {name} is str, not {type(hint).__name__}")
    if transport.lower() not in _TRANSPORTS:
        why = "is not supported here" if transport.lower() in _ABSENT else "is unknown"
        _once(f"{call}: the transport {transport!r} {why}: the transfer uses others")
    if nic:
        missing = [name for name in nic.split(",") if name.strip() not in _devices()]
        if missing:
            _once(f"{call}: this host has no device {', '.join(missing)}: the transfer uses others")


@functools.lru_cache(maxsize=None)
def _devices():
    from kvplane import _native

    return frozenset(name for name, _ in _native.topology()[1])


def _once(text):
    if text not in _SAID and len(_SAID) < 1_000:
        _SAID.add(text)
        _say(text)


def _say(text):
    print(f"kvplane: {text}", file=sys.stderr)
