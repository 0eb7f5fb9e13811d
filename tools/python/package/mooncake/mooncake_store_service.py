"""A store behind HTTP.

| request | what it does |
|---|---|
| `PUT /api/put` with `{"key": ..., "value": ...}` | stores a text |
| `GET /api/get/KEY` | its bytes |
| `GET /api/exist/KEY` | `{"exists": true}` |
| `DELETE /api/remove/KEY`, `DELETE /api/remove_all` | removes |
| `GET /health` | whether the cluster answers |
"""

import argparse
import json
import sys
from urllib.parse import unquote, urlsplit

from mooncake._http import serve
from mooncake.mooncake_config import MooncakeConfig


class MooncakeStoreService:
    """The service, over one store."""

    def __init__(self, config):
        from mooncake.store import MooncakeDistributedStore

        self.store = MooncakeDistributedStore()
        code = self.store.setup(
            config.local_hostname,
            config.metadata_server,
            config.global_segment_size,
            config.local_buffer_size,
            config.protocol,
            config.device_name or "",
            config.master_server_address,
            tenant_id=config.tenant_id,
        )
        if code != 0:
            raise RuntimeError(f"the store could not be set up: error {code}")

    @staticmethod
    def _name(request, prefix):
        path = urlsplit(request.path).path
        return unquote(path[len(prefix) :]) if path.startswith(prefix) and len(path) > len(prefix) else None

    def get(self, request):
        """Gets, and whether there is something."""
        if urlsplit(request.path).path == "/health":
            code = self.store.health_check()
            return (200 if code == 0 else 503), {"health": code}
        key = self._name(request, "/api/get/")
        if key is not None:
            value = self.store.get(key)
            return (200, value) if value else (404, {"error": "Key not found"})
        key = self._name(request, "/api/exist/")
        if key is not None:
            return 200, {"exists": self.store.is_exist(key) == 1}
        return 404, {"error": "not found"}

    def put(self, request):
        """Stores."""
        raw = request.body()
        if urlsplit(request.path).path != "/api/put":
            return 404, {"error": "not found"}
        said = json.loads(raw)
        key, value = said.get("key"), said.get("value")
        if not isinstance(key, str) or not isinstance(value, str) or not key or not value:
            return 400, {"error": "Missing key or value"}
        code = self.store.put(key, value.encode())
        return (200, {"status": "success"}) if code == 0 else (500, {"error": f"PUT failed: {code}"})

    def delete(self, request):
        """Removes."""
        if urlsplit(request.path).path == "/api/remove_all":
            return 200, {"status": "success", "removed": self.store.remove_all()}
        key = self._name(request, "/api/remove/")
        if key is None:
            return 404, {"error": "not found"}
        code = self.store.remove(key)
        return (200, {"status": "success"}) if code == 0 else (404, {"error": f"Remove failed: {code}"})

    def close(self):
        """Ends the store."""
        self.store.close()


def main():
    """The command line of the original."""
    parser = argparse.ArgumentParser(description="A store behind HTTP")
    parser.add_argument("--config", help="a JSON file; without it, MOONCAKE_CONFIG_PATH or MOONCAKE_MASTER")
    parser.add_argument("-D", "--define", action="append", default=[], help="key=value, instead of the file's")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--max-wait-time", type=float, default=60, help="without effect")
    parser.add_argument("--without-authentication", action="store_true", help="allow a host beyond loopback")
    arguments = parser.parse_args()
    values = {}
    if arguments.config:
        with open(arguments.config, encoding="utf-8") as file:
            values = json.load(file)
    for definition in arguments.define:
        key, found, value = definition.partition("=")
        if not found:
            parser.error(f"-D {definition}: write key=value")
        values[key] = value
    config = MooncakeConfig.from_dict(values) if values else MooncakeConfig.load_from_env()
    service = MooncakeStoreService(config)
    routes = {"GET": service.get, "PUT": service.put, "POST": service.put, "DELETE": service.delete}
    try:
        return serve(arguments.host, arguments.port, routes, "store service", arguments.without_authentication)
    finally:
        service.close()


if __name__ == "__main__":
    sys.exit(main())
