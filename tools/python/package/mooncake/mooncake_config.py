"""`MooncakeConfig`: settings of a store, from a file or from the environment."""

import json
import logging
import os
import sys
from dataclasses import dataclass

DEFAULT_GLOBAL_SEGMENT_SIZE = 3355443200
DEFAULT_LOCAL_BUFFER_SIZE = 1073741824

logger = logging.getLogger(__name__)

_PROTOCOLS = {"tcp", "rdma", "efa", "nvmeof", "nvlink", "nvlink_intra", "musa", "hip", "barex", "cxl", "ascend"}
_PROTOCOLS |= {"ub", "ubshmem", "maca", "sunrise_link", "rpc_only", "shm"}
_REQUIRED = ("local_hostname", "metadata_server", "master_server_address")
_VARIABLES = {
    "local_hostname": ("MOONCAKE_LOCAL_HOSTNAME",),
    "metadata_server": ("MOONCAKE_TE_META_DATA_SERVER",),
    "global_segment_size": ("MOONCAKE_GLOBAL_SEGMENT_SIZE",),
    "local_buffer_size": ("MOONCAKE_LOCAL_BUFFER_SIZE",),
    "protocol": ("MOONCAKE_PROTOCOL",),
    "device_name": ("MOONCAKE_DEVICE",),
    "master_server_address": ("MOONCAKE_MASTER",),
    # Alternative name in SGLang.
    "enable_ssd_offload": ("MOONCAKE_OFFLOAD_ENABLED", "MOONCAKE_ENABLE_SSD_OFFLOAD"),
    "ssd_offload_path": ("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH",),
    "tenant_id": ("MOONCAKE_TENANT_ID",),
    "enable_client_http_server": ("MOONCAKE_ENABLE_CLIENT_HTTP_SERVER",),
    "client_http_port": ("MOONCAKE_CLIENT_HTTP_PORT",),
}
#: Keys that other components keep in the same file.
_OTHERS = {"mode", "enable_offload", "storage_root_dir", "transfer_timeout", "save_chunk_meta", "use_ascend_direct"}


def _parse_bool(value):
    if value is None or isinstance(value, (bool, int, float)):
        return bool(value)
    word = str(value).strip().lower()
    if word in ("1", "true", "yes", "on", "enable"):
        return True
    if word in ("", "0", "false", "no", "off", "disable"):
        return False
    raise ValueError(f"Invalid boolean value: {value!r} is neither true nor false")


def _parse_port(value):
    try:
        port = int(value)
    except (TypeError, ValueError):
        port = -1
    if not 0 <= port <= 65535:
        raise ValueError(f"client_http_port is a number up to 65535, not {value!r}")
    return port


def _parse_segment_size(value):
    from mooncake.store import parse_size

    return parse_size(value)


@dataclass
class MooncakeConfig:
    """Arguments of `MooncakeDistributedStore.setup`, by their names in files."""

    local_hostname: str
    metadata_server: str
    global_segment_size: int
    local_buffer_size: int
    protocol: str
    device_name: str
    master_server_address: str
    enable_ssd_offload: bool = False
    ssd_offload_path: str = ""
    tenant_id: str = "default"
    enable_client_http_server: bool = False
    client_http_port: int = 9300

    def __post_init__(self):
        for name in _REQUIRED:
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name} must be a non-empty string, not {value!r}")
        if not isinstance(self.protocol, str) or not self.protocol.strip():
            raise ValueError(f"Invalid protocol: {self.protocol!r}; write tcp or rdma")
        self.protocol = self.protocol.strip().lower()
        if self.protocol not in _PROTOCOLS:
            logger.warning("Unrecognised protocol %r; use tcp or rdma", self.protocol)
        for name in ("global_segment_size", "local_buffer_size"):
            if getattr(self, name) < 0:
                raise ValueError(f"Invalid {name}: {getattr(self, name)} is below 0")

    @staticmethod
    def from_file(file_path):
        """Reads a JSON file. Unknown keys are reported, with the nearest known key."""
        return MooncakeConfig.from_dict(_file(file_path), str(file_path))

    @staticmethod
    def from_dict(values, where="the configuration"):
        """Reads a dictionary, in the form of `from_file`."""
        from mooncake.store import unknown_key

        known = set(MooncakeConfig.__dataclass_fields__)
        for key in values:
            if key not in known and key not in _OTHERS:
                print(f"kvplane: {where}: {unknown_key(key, sorted(known))}", file=sys.stderr)
        missing = [name for name in _REQUIRED if name not in values]
        if missing:
            raise ValueError(f"Missing required config field: {missing[0]} ({where})")
        return MooncakeConfig(
            local_hostname=values["local_hostname"],
            metadata_server=values["metadata_server"],
            global_segment_size=_parse_segment_size(values.get("global_segment_size", DEFAULT_GLOBAL_SEGMENT_SIZE)),
            local_buffer_size=_parse_segment_size(values.get("local_buffer_size", DEFAULT_LOCAL_BUFFER_SIZE)),
            protocol=values.get("protocol", "tcp"),
            device_name=values.get("device_name", ""),
            master_server_address=values["master_server_address"],
            enable_ssd_offload=_parse_bool(values.get("enable_ssd_offload", False)),
            ssd_offload_path=values.get("ssd_offload_path") or "",
            tenant_id=values.get("tenant_id") or "default",
            enable_client_http_server=_parse_bool(values.get("enable_client_http_server", False)),
            client_http_port=_parse_port(values.get("client_http_port", 9300)),
        )

    @staticmethod
    def load_from_env():
        """Reads the file that `MOONCAKE_CONFIG_PATH` names, else `MOONCAKE_MASTER` and related variables."""
        path = os.getenv("MOONCAKE_CONFIG_PATH")
        if path:
            return MooncakeConfig.from_file(path)
        if not os.getenv("MOONCAKE_MASTER"):
            raise ValueError("Neither the environment variable 'MOONCAKE_CONFIG_PATH' nor 'MOONCAKE_MASTER' is set.")
        return MooncakeConfig.from_dict(_environment(), "the environment")


def _file(path):
    """Returns the values in a JSON file."""
    with open(path, encoding="utf-8") as file:
        try:
            values = json.load(file)
        except ValueError as error:
            raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} holds no JSON object")
    return values


def _environment():
    """Returns the values in the environment; the first variable of each that is set."""
    values = {"local_hostname": "localhost", "metadata_server": "P2PHANDSHAKE"}
    for name, variables in _VARIABLES.items():
        found = next((os.environ[variable] for variable in variables if variable in os.environ), None)
        if found is not None:
            values[name] = found
    return values


def overridden(path, over):
    """Returns the configuration of a file or, without one, of the environment, overridden by `over`."""
    path = path or os.getenv("MOONCAKE_CONFIG_PATH")
    values = {**(_file(path) if path else _environment()), **over}
    where = f"{path} and -D" if path and over else path or "-D and the environment" if over else "the environment"
    if not path and "master_server_address" not in values:
        raise ValueError("no configuration: name a file (--config, MOONCAKE_CONFIG_PATH), or set MOONCAKE_MASTER")
    return MooncakeConfig.from_dict(values, where)
