"""Stock Mooncake's transfer engine from its wheel, over TCP, two processes. usage: mooncake_driver.py BUFFER_BYTES"""
import os
import sys

os.environ.update(MC_FORCE_TCP="true", MC_LOG_LEVEL="ERROR", GLOG_minloglevel="2", MC_TCP_BIND_ADDRESS="127.0.0.1")

from importlib.metadata import distributions  # noqa: E402
from mooncake.engine import TransferEngine  # noqa: E402
from drive import GAP, Region, other_side, say, serve, spread, timed, wait_for_parent  # noqa: E402

words = [word for word in sys.argv[1:] if word != "--target"]
SPARE = GAP * 1024
region = Region(int(words[0]) + SPARE)
engine = TransferEngine()
if engine.initialize("127.0.0.1:17001", "P2PHANDSHAKE", "tcp", "") != 0:
    raise SystemExit("the engine does not start")
if engine.register_memory(region.addr, region.size) != 0:
    raise SystemExit("the engine does not take the memory")

if "--target" in sys.argv:
    say(name=f"127.0.0.1:{engine.get_rpc_port()}", addr=region.addr)
    wait_for_parent()

child, there = other_side()
peer, base = there["name"], there["addr"]


def measure(op, size, batch, seconds):
    if batch == 1:
        one = engine.transfer_sync_write if op == "write" else engine.transfer_sync_read
        return timed(lambda: one(peer, region.addr, base, size), seconds)
    many = engine.batch_transfer_sync_write if op == "write" else engine.batch_transfer_sync_read
    local, remote, sizes = region.blocks(size, batch), spread(base, size, batch), [size] * batch
    return timed(lambda: many(peer, local, remote, sizes), seconds)


names = [d for d in distributions() if (d.metadata["Name"] or "").lower().startswith("mooncake")]
serve(measure, "-".join((names[0].metadata["Name"], names[0].version)), [os.getpid(), child.pid])
os._exit(0)
