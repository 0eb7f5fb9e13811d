"""A small HTTP server for the services of this package: on loopback unless it is told that all may come."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

#: Longest body that is taken.
MOST_BYTES = 128 << 20
_TIMEOUT_S = 30


class Handler(BaseHTTPRequestHandler):
    """Answers by `routes`: a function of the request for each method."""

    protocol_version = "HTTP/1.1"
    timeout = _TIMEOUT_S
    #: Method -> function(handler) -> (status, body), where the body is bytes or something for JSON.
    routes = {}

    def _answer(self):
        try:
            status, body = self.routes[self.command](self)
        except KeyError:
            status, body = 405, {"error": f"{self.command} is not served here"}
        except ValueError as error:
            status, body = 400, {"error": str(error)}
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    do_GET = do_PUT = do_POST = do_DELETE = _answer

    def body(self):
        """The request's body; ValueError when it is too long or has no length."""
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 <= length <= MOST_BYTES:
            # What is not read would be taken for the next request.
            self.close_connection = True
            raise ValueError(f"a body of {length} bytes is over the limit of {MOST_BYTES}")
        return self.rfile.read(length)

    def log_message(self, *_):
        """Says nothing of requests."""


def serve(host, port, routes, what, open_to_network=False):
    """Serves until it is interrupted. Beyond loopback only where that was asked for: nobody is asked who they are."""
    local = host in ("127.0.0.1", "localhost", "::1", "")
    if not local and not open_to_network:
        print(
            f"kvplane: {what}: listening on 127.0.0.1 and not on {host}, as whoever reaches it may use it;"
            " --without-authentication opens it",
            file=sys.stderr,
        )
        host = "127.0.0.1"
    server = ThreadingHTTPServer((host or "127.0.0.1", port), type("Routes", (Handler,), {"routes": routes}))
    server.daemon_threads = True
    print(f"{what} on http://{server.server_address[0]}:{server.server_address[1]}", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
    return 0
