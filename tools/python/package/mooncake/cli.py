"""Mooncake's console scripts, mapped onto `kvplane`. Flags without a meaning here are reported and ignored."""

import contextlib
import io
import os
import pathlib
import signal
import sys
import threading

from kvplane import _program

from mooncake._flags import configured, end, flags, port, said, truth


def program():
    """Returns the path of the program `kvplane`; ends this process if it is nowhere."""
    found = _program.program()
    if found is None:
        end("the program `kvplane` is not in the path; set KVPLANE_BINARY")
    return found


def become(*words):
    """Replaces this process by the program `kvplane` with these arguments."""
    path = program()
    sys.stdout.flush()
    os.execv(path, [path, *words])


_MASTER = {
    "port": "the port of the control plane, if --rpc_port is 0 (50051)",
    "rpc_port": "the port of the control plane (0: the value of --port)",
    "rpc_address": "its address (127.0.0.1); beyond loopback, KVPLANE_CERTS names its certificates",
    "rpc_interface": "the network interface whose IPv4 address it is, instead of --rpc_address",
    "metrics_port": "the port of /metrics, /health and /get_all_segments (9003)",
    "metrics_host": "its address (127.0.0.1); beyond loopback with --http_token_file",
    "http_token_file": "a file with the token that requests to that port must carry",
    "enable_http_metadata_server": "serve the metadata of transfer engines, too",
    "http_metadata_server_port": "the port of the metadata server (8080)",
    "http_metadata_server_host": "the address of the metadata server (127.0.0.1)",
    "without_authentication": "allow the metadata server on an address beyond loopback",
    "cluster_id": "the name of the cluster (kvplane; with another port, kvplane-PORT)",
    "enable_multi_tenants": "only configured tenants may put",
    "enable_ha": "keep the state in etcd, so that several masters may run",
    "etcd_endpoints": "the addresses of etcd: host:port;host:port",
    "ha_backend_type": "etcd, the only one",
    "ha_backend_connstring": "the addresses of etcd, instead of --etcd_endpoints",
    "client_active_ttl_sec": "silence after which a member is suspect, in seconds (3; 10 beside the other flag)",
    "client_ttl": "the former name of --client_active_ttl_sec",
    "client_suspicion_ttl_sec": "silence after that until a suspect member is dead, in seconds (3; as the first beside it)",
    "enable_kv_events": "publish events of objects over ZeroMQ, at --kv_events_bind_endpoint",
    "kv_events_bind_endpoint": "the loopback address of these events, tcp://127.0.0.1:5557",
    "replicas": "limit of replicas that replica_num may request (2)",
    "config_path": "a JSON or YAML file with flags; the command line takes precedence",
}


def master():
    """`mooncake_master`: a control plane, by default on this host's loopback address."""
    about = "a control plane of kvplane with the flags of Mooncake's master"
    values = flags(sys.argv[1:], _MASTER, about, "mooncake_master")
    if "config_path" in values:
        values = {**configured(values["config_path"], _MASTER), **values}
    if values.get("rpc_interface"):
        values["rpc_address"] = _address_of(values["rpc_interface"])
    number = port("rpc_port", values.get("rpc_port", "0")) or port("port", values.get("port", "50051"))
    cluster = values.get("cluster_id") or ("kvplane" if number == 50051 else f"kvplane-{number}")
    words = ["control", "--cluster", cluster, "--listen", _listen(values, number)]
    words += ["--replicas", values.get("replicas", "2")]
    words += _state(values, cluster) + _http(values) + _silence(values) + _events(values)
    if truth("enable_multi_tenants", values.get("enable_multi_tenants", "false")):
        words.append("--strict-tenants")
    program()
    if truth("enable_http_metadata_server", values.get("enable_http_metadata_server", "false")):
        _metadata(values)
    become(*words)


#: Name of the function in Mooncake.
main = master


def _at(host, number):
    return f"[{host.strip('[]')}]:{number}" if ":" in host else f"{host}:{number}"


def _local(host):
    return host in ("", "localhost", "::1", "[::1]") or host.startswith("127.")


def _listen(values, number):
    host = values.get("rpc_address", "")
    if not _local(host) and not os.environ.get("KVPLANE_CERTS"):
        end(
            f"--rpc_address={host} lets other hosts in, for which this control plane needs certificates: make them"
            " with `kvplane ctl cert`, and name their folder (ca.pem, control.pem, control.key) in KVPLANE_CERTS"
        )
    return _at("127.0.0.1" if host in ("", "localhost") else host, number)


def _certificates():
    """Returns the directory with this control plane's certificate, if there is one."""
    folder = os.environ.get("KVPLANE_CERTS")
    if not folder:
        return None
    missing = [name for name in ("ca.pem", "control.pem", "control.key") if not (pathlib.Path(folder) / name).exists()]
    return missing, folder


def _state(values, cluster):
    """Returns the arguments for the state, and for the certificate of this control plane."""
    words = []
    shared = truth("enable_ha", values.get("enable_ha", "false"))
    certificates = _certificates()
    beyond = not _local(values.get("rpc_address", ""))
    if certificates is not None and (shared or beyond):
        missing, folder = certificates
        if missing:
            end(f"KVPLANE_CERTS={folder} has no {missing[0]}: make it with `kvplane ctl cert issue control`")
        words += ["--identity", folder]
    if shared:
        if values.get("ha_backend_type", "etcd") != "etcd":
            end(f"--ha_backend_type={values['ha_backend_type']}: the state is kept in etcd")
        endpoints = values.get("ha_backend_connstring") or values.get("etcd_endpoints", "")
        if not endpoints:
            end("--enable_ha needs --etcd_endpoints=host:port;host:port")
        if certificates is None:
            end("--enable_ha needs certificates, by which masters know each other: name their folder in KVPLANE_CERTS")
        names = [name.strip().split("://")[-1] for name in endpoints.replace(",", ";").split(";")]
        return [*words, "--state", "etcd://" + ",".join(name for name in names if name)]
    home = pathlib.Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"))
    state = home / "kvplane" / cluster
    home.mkdir(parents=True, exist_ok=True)
    # The directory will hold the authority's key.
    for directory in (state.parent, state):
        directory.mkdir(mode=0o700, exist_ok=True)
    return [*words, "--state", str(state)]


def _http(values):
    host, token = values.get("metrics_host", "127.0.0.1"), values.get("http_token_file")
    if not _local(host) and not token:
        print(
            f"kvplane: metrics on 127.0.0.1 and not on {host}, as anyone who reaches it could list and remove objects;"
            " --http_token_file=FILE opens it to requests with the token",
            file=sys.stderr,
        )
        host = "127.0.0.1"
    number = port("metrics_port", values.get("metrics_port", "9003"))
    words = ["--http", _at("127.0.0.1" if host == "localhost" else host, number)]
    return [*words, "--http-token-file", token] if token else words


def _address_of(interface):
    """Returns the IPv4 address of a network interface."""
    import fcntl
    import socket
    import struct

    get_address = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            return socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), get_address, request)[20:24])
        except OSError as error:
            end(f"--rpc_interface={interface} has no IPv4 address: {error.strerror}")


def _silence(values):
    """Returns the arguments for silent members, if any is given: one that is missing is as Mooncake derives it."""
    active = values.get("client_active_ttl_sec", values.get("client_ttl"))
    suspicion = values.get("client_suspicion_ttl_sec")
    if active is None and suspicion is None:
        return []
    seconds = []
    for name, text in (("client_active_ttl_sec", active or "10"), ("client_suspicion_ttl_sec", suspicion or active)):
        if not text.isdigit() or not 1 <= int(text) <= 600:
            end(f"--{name}={text} is not a number of seconds from 1 to 600")
        seconds.append(int(text))
    return ["--suspect-ms", str(1000 * seconds[0]), "--dead-ms", str(1000 * sum(seconds))]


def _events(values):
    """Returns the arguments for events of objects."""
    if not truth("enable_kv_events", values.get("enable_kv_events", "false")):
        return []
    endpoint = values.get("kv_events_bind_endpoint") or "tcp://127.0.0.1:5557"
    scheme, _, address = endpoint.rpartition("://")
    host, _, number = address.rpartition(":")
    if scheme not in ("", "tcp") or not host:
        end(f"--kv_events_bind_endpoint={endpoint} is not tcp://host:port")
    if host in ("*", "0.0.0.0", "[::]"):
        print(f"kvplane: events of objects on 127.0.0.1 and not on {host}: they have no authentication", file=sys.stderr)
        host = "127.0.0.1"
    elif not _local(host):
        end(f"--kv_events_bind_endpoint={endpoint}: events have no authentication, and stay on loopback")
    number = port("kv_events_bind_endpoint", number)
    return ["--kv-events", _at("127.0.0.1" if host == "localhost" else host, number)]


def _metadata(values):
    """Serves the metadata of transfer engines on a port of its own, in a process that ends with this one."""
    from mooncake.http_metadata_server import server

    number = port("http_metadata_server_port", values.get("http_metadata_server_port", "8080"))
    host = values.get("http_metadata_server_host", "127.0.0.1")
    everybody = truth("without_authentication", values.get("without_authentication", "false"))
    try:
        # Bound before this process becomes the control plane: a port that is taken ends it here.
        listening = server(host, number, everybody)
    except OSError as error:
        end(f"--http_metadata_server_port={number}: {error}")
    parent = os.getpid()
    if os.fork():
        listening.server_close()
        return
    _end_with(parent)
    # Inherited streams would stay open for processes that wait for their end.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        listening.serve_forever()
    finally:
        os._exit(0)


def _end_with(parent):
    """Lets the kernel end this process when its parent ends, in any way."""
    import ctypes

    death_signal = 1
    ctypes.CDLL(None).prctl(death_signal, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


_CLIENT = {
    "host": "the name of this process",
    "port": "the port by which setup_dummy names this process (50052)",
    "master_server_address": "the control plane's address",
    "metadata_server": "the rendezvous of engines (P2PHANDSHAKE)",
    "protocol": "tcp or rdma",
    "device_names": "RDMA devices",
    "global_segment_size": "memory that this process provides (4 GB)",
    "local_buffer_size": "",
    "tenant_id": "the tenant",
    "enable_http_server": "serve /health, /metrics and /metrics/summary of this process on loopback (false)",
    "http_port": "the port of that HTTP server (9300)",
}


#: Interval at which `mooncake_client` looks for its master again, in seconds.
_AGAIN_S = 1.0


def client():
    """`mooncake_client`: provides memory of this process to a cluster, until it is stopped."""
    about = "provides memory of this process to a cluster, until it is stopped"
    values = flags(sys.argv[1:], _CLIENT, about, "mooncake_client")
    from mooncake import _clients
    from mooncake.store import MooncakeDistributedStore

    number = port("port", values.get("port", "50052"))
    store = MooncakeDistributedStore()
    config = {
        "local_hostname": values.get("host", "localhost"),
        "metadata_server": values.get("metadata_server", "P2PHANDSHAKE"),
        "global_segment_size": values.get("global_segment_size", "4 GB"),
        "protocol": values.get("protocol", "tcp"),
        "rdma_devices": values.get("device_names", ""),
        "master_server_addr": values.get("master_server_address", ""),
        "tenant_id": values.get("tenant_id", "default"),
        "enable_client_http_server": truth("enable_http_server", values.get("enable_http_server", "false")),
        "client_http_port": port("http_port", values.get("http_port", "9300")),
    }
    ended = threading.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, lambda *_: ended.set())
    code = store.setup(config)
    if code != 0 and store._away:
        print("kvplane: mooncake_client waits for the master, until it answers or this process is stopped", file=sys.stderr)
    while code != 0:
        # A master that starts later is found; other errors are permanent.
        if not store._away or ended.wait(_AGAIN_S):
            return 1
        with contextlib.redirect_stderr(io.StringIO()):
            code = store.setup(config)
    try:
        published = _clients.publish(number, config["master_server_addr"], config["tenant_id"])
    except OSError as error:
        store.close()
        end(f"--port={number}: {error}")
    print(f"ready: {config['global_segment_size']} of this process are the segment {store.get_hostname()}", flush=True)
    ended.wait()
    published.close()
    store.close()
    return 0


#: Flags of our program; Mooncake's also takes those of its logging library (-logtostderr, -v, -minloglevel).
_BENCH_KNOWN = {
    "local_server_name", "metadata_server", "mode", "operation", "protocol", "device_name", "nic_priority_matrix",
    "auto_discovery", "segment_id", "buffer_size", "batch_size", "block_size", "duration", "threads", "report_unit",
    "report_precision", "backend", "use_vram", "init_mem", "gpu_id", "open_to_network", "pacing", "help", "h",
}  # fmt: skip


def transfer_engine_bench():
    """`transfer_engine_bench`: the same flags, with kvplane's engine."""
    words, rest, others = [], list(sys.argv[1:]), []
    while rest:
        word = rest.pop(0)
        name = word.lstrip("-").partition("=")[0].replace("-", "_")
        if not word.startswith("-") or name in _BENCH_KNOWN:
            words.append(word)
            continue
        if name == "version":
            flags([word], {}, "", "transfer_engine_bench")
        others.append(name)
        # Its value, if that is a separate word: a word after a flag that is not itself a flag.
        if "=" not in word and rest and not rest[0].startswith("-"):
            rest.pop(0)
    if others:
        said(others)
    become("transfer_engine_bench", *words)


def topology_dump():
    """`transfer_engine_topology_dump`: the assignment of RDMA devices to memory, as JSON."""
    about = "the assignment of RDMA devices to memory, as JSON"
    known = {"device_name": "only these devices, separated by commas"}
    values = flags(sys.argv[1:], known, about, "transfer_engine_topology_dump")
    from mooncake.engine import TransferEngine

    print(TransferEngine().get_local_topology(values.get("device_name")))
    return 0
