"""CPUs of a NUMA node."""

import os


def cpus_of(node):
    """Returns the CPUs of a node that this process may run on; empty when there is no such node."""
    try:
        with open(f"/sys/devices/system/node/node{int(node)}/cpulist", encoding="ascii") as file:
            text = file.read().strip()
    except OSError:
        return set()
    cpus = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus & os.sched_getaffinity(0)
