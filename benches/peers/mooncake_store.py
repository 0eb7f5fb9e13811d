"""Stock Mooncake's store from its wheel. usage: mooncake_store.py serve POOL_BYTES DIRECTORY
       mooncake_store.py client SERVER INDEX BUFFER_BYTES remote|dummy (stores.py)

The server is a master and one `mooncake_client` with the memory: `remote` clients, without memory of their own, connect
to it over TCP, and `dummy` clients share memory with it.
"""
import os
import sys
import time

os.environ.update(MC_FORCE_TCP="true", MC_LOG_LEVEL="ERROR", GLOG_minloglevel="2", MC_YLT_LOG_LEVEL="error")
os.environ.update(MC_TCP_BIND_ADDRESS="127.0.0.1")

from importlib.metadata import distributions  # noqa: E402
from mooncake.store import MooncakeDistributedStore  # noqa: E402
from stores import MOST_SOURCE_BYTES, Memory, Store, child, serve_client, serve_until_parent_goes, wait_for_port  # noqa: E402

MASTER, OWNER, METRICS = 17051, 17052, 17090
METADATA = "P2PHANDSHAKE"


class Mooncake(Store):
    def __init__(self, index, buffer_bytes, way):
        self.store, self.way = MooncakeDistributedStore(), way
        room = buffer_bytes + min(buffer_bytes, MOST_SOURCE_BYTES) + (64 << 20)
        if way == "dummy":
            failed = self.store.setup_dummy(room, 16 << 20, f"127.0.0.1:{OWNER}")
        else:
            name = f"127.0.0.1:{17100 + index}"
            failed = self.store.setup(name, METADATA, 0, 64 << 20, "tcp", "", f"127.0.0.1:{MASTER}")
        if failed:
            raise SystemExit(f"the {way} client does not start: {failed}")
        super().__init__(index, buffer_bytes)

    def memory(self, size):
        memory = Memory(size, self.store.alloc_from_mem_pool(size) if self.way == "dummy" else None)
        if self.store.register_buffer(memory.addr, size):
            raise SystemExit("the store does not take the memory")
        return memory

    def prepare_places(self, places, size):
        return [self.source.addr + at for at in places]

    def prepare_found(self, size, batch):
        return [self.found.addr + self.place_found(size, item) for item in range(batch)]

    def put(self, keys, places, size):
        if len(keys) == 1:
            return self.store.put_from(keys[0], places[0], size)
        return any(self.store.batch_put_from(keys, places, [size] * len(keys)))

    def get(self, keys, targets, size):
        if len(keys) == 1:
            return self.store.get_into(keys[0], targets[0], size) != size
        found = self.store.batch_get_into(keys, targets, [size] * len(keys))
        return found.count(size) != len(keys)

    def remove(self, keys):
        self.store.batch_remove(keys, True)


def touch(pool_bytes):
    """Fills the memory once, so that no put touches a page first."""
    size = 16 << 20
    client = Mooncake(90, size, "remote")
    count = 0
    while count < pool_bytes // size and not client.store.put_from(f"touch-{count}", client.source.addr, size):
        count += 1
    client.store.remove_all(True)
    client.store.close()


if sys.argv[1] == "client":
    _, _, _, index, buffer_bytes, way = sys.argv
    serve_client(Mooncake(int(index), int(buffer_bytes), way))

if sys.argv[1] == "touch":
    touch(int(sys.argv[2]))
    os._exit(0)

pool_bytes, folder = int(sys.argv[2]), sys.argv[3]
programs = os.path.dirname(sys.executable)


def program(name, *words):
    """The program behind its entry point, which is a script."""
    import mooncake

    real = os.path.join(os.path.dirname(mooncake.__file__), name)
    return child([real if os.path.exists(real) else os.path.join(programs, name), *words], f"{folder}/{name}.log")


master = program(
    "mooncake_master",
    f"--rpc_port={MASTER}",
    "--rpc_address=127.0.0.1",
    f"--metrics_port={METRICS}",
    "--enable_metric_reporting=false",
    "--client_ttl=3600",
)
wait_for_port(MASTER)
owner = program(
    "mooncake_client",
    f"--master_server_address=127.0.0.1:{MASTER}",
    "--host=127.0.0.1",
    f"--port={OWNER}",
    "--protocol=tcp",
    f"--metadata_server={METADATA}",
    f"--global_segment_size={pool_bytes}",
)
wait_for_port(OWNER)
time.sleep(1)
child([sys.executable, os.path.abspath(sys.argv[0]), "touch", str(pool_bytes)], f"{folder}/touch.log").wait()
names = [d for d in distributions() if (d.metadata["Name"] or "").lower().startswith("mooncake")]
version = "-".join((names[0].metadata["Name"], names[0].version))
serve_until_parent_goes([master, owner], version, "here")
