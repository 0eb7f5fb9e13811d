"""Metadata server of transfer engines: `GET`, `PUT` and `DELETE /metadata?key=KEY`.

`kvplane control --mooncake-metadata` serves the same. Nothing is durable: engines publish at their start.
"""

import argparse
import enum
import sys
import threading

from mooncake._http import Response, address, listen, reply

_MOST_KEYS = 65_536
_MOST_BYTES = 1 << 20


class KVPoll(enum.Enum):
    """State of a server."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4


class KVBootstrapServer:
    """Metadata server, with keys and values in `store`, within limits. `run` serves on a thread until `close`."""

    def __init__(self, port, host="127.0.0.1"):
        self.port, self.host = port, host
        self.store = {}
        self.thread = None
        self._lock = threading.Lock()
        self._server = None

    async def _handle_metadata(self, request):
        key = (request.query.get("key") or "").strip()
        if not key:
            return reply(400, error="the request names no key: /metadata?key=KEY")
        if request.method == "GET":
            return self._get(key)
        if request.method == "PUT":
            return self._put(key, await request.read())
        if request.method == "DELETE":
            return self._delete(key)
        return reply(405, error=f"{request.method} is not served here")

    def _get(self, key):
        with self._lock:
            value = self.store.get(key)
        if value is None:
            return Response(404, text="metadata not found", content_type="application/json")
        return Response(body=value, content_type="application/json")

    def _put(self, key, value):
        with self._lock:
            if len(value) > _MOST_BYTES or (key not in self.store and len(self.store) >= _MOST_KEYS):
                return reply(507, error="too long, or too many keys")
            self.store[key] = value
        return Response(text="metadata updated", content_type="application/json")

    def _delete(self, key):
        with self._lock:
            value = self.store.pop(key, None)
        if value is None:
            return Response(404, text="metadata not found", content_type="application/json")
        return Response(text="metadata deleted", content_type="application/json")

    def listen(self, open_to_network=False):
        """Binds the port; OSError when it is taken."""
        routes = {("*", "/metadata"): self._handle_metadata}
        self._server = listen(self.host, self.port, routes, "metadata server", open_to_network)
        self.port = self._server.server_address[1]
        return self._server

    def run(self):
        """Serves on a thread, which is returned; OSError when the port is taken."""
        server = self._server or self.listen()
        self.thread = threading.Thread(target=server.serve_forever, name="metadata server", daemon=True)
        self.thread.start()
        return self.thread

    def close(self):
        """Stops the server."""
        server, self._server = self._server, None
        if server is not None:
            if self.thread is not None:
                server.shutdown()
                self.thread.join(2)
            server.server_close()

    def poll(self):
        """Returns True while it serves."""
        return KVPoll.Success if self.thread is not None and self.thread.is_alive() else KVPoll.Failed


def server(host, port, open_to_network):
    """Creates a listening metadata server, to be served by `serve_forever`."""
    return KVBootstrapServer(port, host).listen(open_to_network)


def parse_args():
    """Parses Mooncake's command line."""
    parser = argparse.ArgumentParser(description="HTTP metadata server of transfer engines")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--log-level", default="INFO", help="without effect")
    parser.add_argument("--without-authentication", action="store_true", help="allow a host beyond loopback")
    return parser.parse_args()


def main():
    """Serves until it is interrupted."""
    arguments = parse_args()
    try:
        listening = server(arguments.host, arguments.port, arguments.without_authentication)
    except (OSError, OverflowError) as error:
        sys.exit(f"kvplane: metadata server: {arguments.host}:{arguments.port}: {error}")
    print(f"metadata server on {address(listening)}", flush=True)
    try:
        listening.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        listening.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
