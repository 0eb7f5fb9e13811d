"""The console scripts of the original, mapped onto `kvplane`. A flag without a meaning here is said, and goes by."""

import os
import pathlib
import shutil
import signal
import sys
import threading


def flags(words, known):
    """The flags of a command line as gflags takes them, `-name=value`, `--name value` or `--name`: those that are
    known by name; the others are said."""
    values, others, words = {}, [], list(words)
    while words:
        word = words.pop(0)
        if not word.startswith("-"):
            continue
        name, found, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if not found:
            value = words.pop(0) if words and not words[0].startswith("-") else "true"
        if name in known:
            values[name] = value
        else:
            others.append(name)
    if others:
        print(f"kvplane: without a meaning here, and ignored: {', '.join(sorted(set(others)))}", file=sys.stderr)
    return values


def program():
    """The program `kvplane`: what `KVPLANE_BINARY` names, beside this interpreter, or in the path."""
    named = os.environ.get("KVPLANE_BINARY")
    beside = pathlib.Path(sys.executable).parent / "kvplane"
    found = named or (str(beside) if beside.exists() else shutil.which("kvplane"))
    if found is None:
        sys.exit("kvplane: the program `kvplane` is not in the path; set KVPLANE_BINARY")
    return found


def become(*words):
    """Becomes the program `kvplane` with these arguments."""
    path = program()
    os.execv(path, [path, *words])


def _true(text):
    return text.lower() in ("true", "1", "yes", "on", "t", "y")


def master():
    """`mooncake_master`: a control plane on this host's loopback address."""
    known = {"port", "rpc_port", "metrics_port", "enable_http_metadata_server", "http_metadata_server_port"}
    known |= {"cluster_id", "enable_multi_tenants"}
    values = flags(sys.argv[1:], known)
    port = values.get("port") or values.get("rpc_port") or "50051"
    cluster = values.get("cluster_id") or ("kvplane" if port == "50051" else f"kvplane-{port}")
    home = pathlib.Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"))
    state = home / "kvplane" / cluster
    home.mkdir(parents=True, exist_ok=True)
    # It will hold the authority's key.
    for directory in (state.parent, state):
        directory.mkdir(mode=0o700, exist_ok=True)
    http = values.get("metrics_port", "9003")
    words = ["control", "--cluster", cluster, "--listen", f"127.0.0.1:{port}", "--state", str(state)]
    if _true(values.get("enable_http_metadata_server", "false")):
        # One HTTP server has both here: at the port of the metadata, which engines have in their configuration.
        http = values.get("http_metadata_server_port", "8080")
        words.append("--mooncake-metadata")
    if _true(values.get("enable_multi_tenants", "false")):
        words.append("--strict-tenants")
    become(*words, "--http", f"127.0.0.1:{http}")


def client():
    """`mooncake_client`: gives memory of this process to a cluster, until it is told to end."""
    from mooncake.store import MooncakeDistributedStore

    known = {"host", "master_server_address", "metadata_server", "protocol", "device_names", "global_segment_size"}
    known |= {"tenant_id", "local_buffer_size"}
    values = flags(sys.argv[1:], known)
    store = MooncakeDistributedStore()
    config = {
        "local_hostname": values.get("host", "localhost"),
        "metadata_server": values.get("metadata_server", "P2PHANDSHAKE"),
        "global_segment_size": values.get("global_segment_size", "4 GB"),
        "protocol": values.get("protocol", "tcp"),
        "rdma_devices": values.get("device_names", ""),
        "master_server_addr": values.get("master_server_address", ""),
        "tenant_id": values.get("tenant_id", "default"),
    }
    code = store.setup(config)
    if code != 0:
        return 1
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    print(f"ready: {config['global_segment_size']} of this process are the segment {store.get_hostname()}", flush=True)
    ended.wait()
    store.close()
    return 0


def transfer_engine_bench():
    """`transfer_engine_bench`: the same flags, over our engine."""
    become("transfer_engine_bench", *sys.argv[1:])


def topology_dump():
    """`transfer_engine_topology_dump`: which RDMA devices serve which memory, as JSON."""
    from mooncake.engine import TransferEngine

    print(TransferEngine().get_local_topology())
    return 0
