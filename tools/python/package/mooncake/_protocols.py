"""Mooncake's protocols, and their handling here.

Bytes are transferred over shared memory on one host, and over TCP between hosts.
"""

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


def _say(text):
    print(f"kvplane: {text}", file=sys.stderr)
