"""The metadata server of transfer engines: `GET`, `PUT` and `DELETE /metadata?key=KEY`.

`kvplane control --mooncake-metadata` serves the same. Nothing is durable: engines publish at their start.
"""

import argparse
import sys
import threading
from urllib.parse import parse_qs, urlsplit

from mooncake._http import serve

_MOST_KEYS = 65_536
_MOST_BYTES = 1 << 20


class Metadata:
    """Keys and values, within limits."""

    def __init__(self):
        self._values = {}
        self._lock = threading.Lock()

    @staticmethod
    def _key(request):
        parts = urlsplit(request.path)
        if parts.path != "/metadata":
            return None
        key = parse_qs(parts.query).get("key", [""])[0]
        if not key:
            raise ValueError("the request names no key: /metadata?key=KEY")
        return key

    def get(self, request):
        """A value, or 404."""
        key = self._key(request)
        with self._lock:
            value = self._values.get(key)
        return (200, value) if value is not None else (404, b"metadata not found")

    def put(self, request):
        """Stores a value, within the limits."""
        value, key = request.body(), self._key(request)
        if key is None:
            return 404, b"not found"
        with self._lock:
            if len(value) > _MOST_BYTES or (key not in self._values and len(self._values) >= _MOST_KEYS):
                return 507, b"too long, or too many keys"
            self._values[key] = value
        return 200, b"metadata updated"

    def delete(self, request):
        """Removes a value, or 404."""
        key = self._key(request)
        with self._lock:
            value = self._values.pop(key, None)
        return (200, b"metadata deleted") if value is not None else (404, b"metadata not found")


def main():
    """The command line of the original."""
    parser = argparse.ArgumentParser(description="HTTP metadata server of transfer engines")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--log-level", default="INFO", help="without effect")
    parser.add_argument("--without-authentication", action="store_true", help="allow a host beyond loopback")
    arguments = parser.parse_args()
    metadata = Metadata()
    routes = {"GET": metadata.get, "PUT": metadata.put, "DELETE": metadata.delete}
    return serve(arguments.host, arguments.port, routes, "metadata server", arguments.without_authentication)


if __name__ == "__main__":
    sys.exit(main())
