"""`MooncakeConfig`: what a store is set up with, from a file or from the environment."""

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
#: Keys that others keep in the same file.
_OTHERS = {"mode", "enable_offload", "storage_root_dir", "transfer_timeout", "save_chunk_meta", "use_ascend_direct"}


def _parse_bool(value):
    if isinstance(value, bool):
        return value
    word = str(value).strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("", "0", "false", "no", "off"):
        return False
    raise ValueError(f"{value!r} is neither true nor false")


def _parse_segment_size(value):
    from mooncake.store import parse_size

    return parse_size(value)


@dataclass
class MooncakeConfig:
    """The arguments of `MooncakeDistributedStore.setup`, by the names that files have for them."""

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
        for name in ("local_hostname", "metadata_server", "master_server_address"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{name} is a text that is not empty, not {value!r}")
        if not isinstance(self.protocol, str) or not self.protocol.strip():
            raise ValueError(f"protocol is a text that is not empty, not {self.protocol!r}")
        self.protocol = self.protocol.strip().lower()
        if self.protocol not in _PROTOCOLS:
            logger.warning("the protocol %r is not known", self.protocol)
        for name in ("global_segment_size", "local_buffer_size"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is not below 0, as {getattr(self, name)} is")

    @staticmethod
    def from_file(file_path):
        """From a JSON file. A key that means nothing is said, with the nearest that does."""
        with open(file_path, encoding="utf-8") as file:
            values = json.load(file)
        if not isinstance(values, dict):
            raise ValueError(f"{file_path} holds no JSON object")
        return MooncakeConfig.from_dict(values, str(file_path))

    @staticmethod
    def from_dict(values, where="the configuration"):
        """From a dictionary, as `from_file` has it from a file."""
        from mooncake.store import unknown_key

        known = set(MooncakeConfig.__dataclass_fields__)
        for key in values:
            if key not in known and key not in _OTHERS:
                print(f"kvplane: {where}: {unknown_key(key, sorted(known))}", file=sys.stderr)
        missing = [name for name in ("local_hostname", "metadata_server", "master_server_address") if name not in values]
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
            client_http_port=int(values.get("client_http_port", 9300)),
        )

    @staticmethod
    def load_from_env():
        """From the file that `MOONCAKE_CONFIG_PATH` names, else from `MOONCAKE_MASTER` and its neighbours."""
        path = os.getenv("MOONCAKE_CONFIG_PATH")
        if path:
            return MooncakeConfig.from_file(path)
        master = os.getenv("MOONCAKE_MASTER")
        if not master:
            raise ValueError("Neither the environment variable 'MOONCAKE_CONFIG_PATH' nor 'MOONCAKE_MASTER' is set.")
        return MooncakeConfig(
            local_hostname=os.getenv("MOONCAKE_LOCAL_HOSTNAME", "localhost"),
            metadata_server=os.getenv("MOONCAKE_TE_META_DATA_SERVER", "P2PHANDSHAKE"),
            global_segment_size=_parse_segment_size(os.getenv("MOONCAKE_GLOBAL_SEGMENT_SIZE", DEFAULT_GLOBAL_SEGMENT_SIZE)),
            local_buffer_size=_parse_segment_size(os.getenv("MOONCAKE_LOCAL_BUFFER_SIZE", DEFAULT_LOCAL_BUFFER_SIZE)),
            protocol=os.getenv("MOONCAKE_PROTOCOL", "tcp"),
            device_name=os.getenv("MOONCAKE_DEVICE", ""),
            master_server_address=master,
            enable_ssd_offload=_parse_bool(os.getenv("MOONCAKE_ENABLE_SSD_OFFLOAD", "")),
            ssd_offload_path=os.getenv("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", ""),
            tenant_id=os.getenv("MOONCAKE_TENANT_ID", "default"),
        )
