"""Protocols that the original speaks, and what becomes of them here.

Bytes go by shared memory on one host, and by TCP between hosts.
"""

import sys

_OURS = {"", "tcp", "shm", "rpc_only"}
_ABSENT = {"ascend", "barex", "cxl", "efa", "hip", "maca", "musa", "nvlink", "nvlink_intra", "nvmeof"}
_ABSENT |= {"sunrise_link", "ub", "ubshmem"}


def refused(call, protocol, devices):
    """Whether a protocol cannot be had, which is said. RDMA on a host without devices is no refusal, but is said too."""
    name = protocol.lower()
    if name in _OURS:
        return False
    if name == "rdma":
        from kvplane import _native

        if not _native.topology()[1]:
            wanted = f" on {devices}" if devices else ""
            _say(f"{call}: no RDMA device on this host: not rdma{wanted}, but shared memory and TCP are used")
        return False
    why = "is not supported here" if name in _ABSENT else "is unknown"
    _say(f"{call}: the protocol {protocol!r} {why}; tcp and rdma are known")
    return True


def _say(text):
    print(f"kvplane: {text}", file=sys.stderr)
