"""NIXL's agent with its UCX backend between two processes. usage: nixl_driver.py BUFFER_BYTES tcp|auto

One handle for a cell is posted repeatedly, which is NIXL's fast path. The initiator drives its own progress; the target
needs NIXL's spinning progress thread, because nothing else would drive it.
"""
import base64
import os
import sys

words = [word for word in sys.argv[1:] if word != "--target"]
os.environ.update(UCX_NET_DEVICES="lo", UCX_LOG_LEVEL="error", NIXL_LOG_LEVEL="ERROR")
if words[1] == "tcp":
    os.environ.update(UCX_TLS="tcp,self", UCX_SOCKADDR_TLS_PRIORITY="tcp")

from importlib.metadata import version  # noqa: E402
from nixl_cu12._api import nixl_agent, nixl_agent_config  # noqa: E402
from drive import GAP, Region, other_side, say, serve, spread, timed, wait_for_parent  # noqa: E402

is_target = "--target" in sys.argv
region = Region(int(words[0]) + GAP * 1024)
name = "target" if is_target else "initiator"
agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=is_target, enable_listen_thread=False, backends=[]))
agent.create_backend("UCX", {})
agent.register_memory([(region.addr, region.size, 0, name)], "DRAM")
if is_target:
    say(addr=region.addr, metadata=base64.b64encode(agent.get_agent_metadata()).decode())
    wait_for_parent()

child, there = other_side()
peer = agent.add_remote_agent(base64.b64decode(there["metadata"]))
peer = peer.decode() if isinstance(peer, bytes) else peer


def descriptors(addresses, size):
    return agent.get_xfer_descs([(address, size, 0) for address in addresses], "DRAM")


def measure(op, size, batch, seconds):
    local = descriptors(region.blocks(size, batch), size)
    remote = descriptors(spread(there["addr"], size, batch), size)
    handle = agent.initialize_xfer(op.upper(), local, remote, peer)

    def once():
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        return state != "DONE"

    try:
        return timed(once, seconds)
    finally:
        agent.release_xfer_handle(handle)


serve(measure, "nixl-cu12-" + version("nixl-cu12"), [os.getpid(), child.pid])
os._exit(0)
