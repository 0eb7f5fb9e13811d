"""A small HTTP server for the services of this package: on loopback unless it is told that all may come."""

import asyncio
import json
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

#: Longest body that is taken.
MOST_BYTES = 128 << 20
_MOST_LINE = 1024
_TIMEOUT_S = 30


class Response:
    """What a handler answers: bytes, or a text."""

    def __init__(self, status=200, text=None, body=None, content_type="application/octet-stream"):
        self.status, self.text, self.content_type = status, text, content_type
        self.body = text.encode() if text is not None else body or b""


def reply(code, /, **fields):
    """An answer in JSON."""
    return Response(code, text=json.dumps(fields), content_type="application/json")


class Request:
    """A request, as the handlers of the services take it."""

    def __init__(self, handler, rest):
        self._handler = handler
        self.method = handler.command
        self.query = {name: values[0] for name, values in parse_qs(urlsplit(handler.path).query).items()}
        self.match_info = {"key": rest}

    async def read(self):
        """The body."""
        return self._handler.body()

    async def json(self):
        """The body as JSON; ValueError when it is none."""
        return json.loads(self._handler.body())


class Handler(BaseHTTPRequestHandler):
    """Answers by `routes`: for a method and path, a coroutine function of the request. A path that ends with a slash has
    a key behind it; a method `*` is any."""

    protocol_version = "HTTP/1.1"
    timeout = _TIMEOUT_S
    #: (method, path) -> coroutine function(Request) -> Response
    routes = {}
    #: Where coroutines run; without it, each request has a loop of its own.
    loop = None
    _read = False

    def _found(self):
        path = urlsplit(self.path).path
        methods = {}
        for (method, place), call in self.routes.items():
            keyed = place.endswith("/") and path.startswith(place) and len(path) > len(place)
            if path == place or keyed:
                methods[method] = (call, unquote(path[len(place) :]) if keyed else "")
        if not methods:
            return None, "not found"
        return methods.get(self.command) or methods.get("*"), f"{self.command} is not served here"

    def _answer(self):
        self._read = False
        try:
            found, why = self._found()
            if found is None:
                answer = reply(404 if why == "not found" else 405, error=why)
            else:
                work = found[0](Request(self, found[1]))
                answer = self._run(work)
        except ValueError as error:
            answer = reply(400, error=str(error))
        except Exception as error:  # Whatever it was, who asked is told, and the connection goes on.
            answer = reply(500, error=f"{type(error).__name__}: {error}")
        if not self._read and (self.headers.get("Content-Length", "0") != "0" or self._chunked()):
            # What was not read would be taken for the next request.
            self.close_connection = True
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(answer.body)

    do_GET = do_PUT = do_POST = do_DELETE = do_PATCH = _answer

    def _run(self, work):
        if self.loop is None:
            return asyncio.run(work)
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def _chunked(self):
        return self.headers.get("Transfer-Encoding", "").lower() == "chunked"

    def body(self):
        """The request's body; ValueError when it is too long, cut short or not understood."""
        raw = self._chunks() if self._chunked() else self._whole()
        self._read = True
        return raw

    def _whole(self):
        text = self.headers.get("Content-Length") or "0"
        if not text.isdigit():
            raise ValueError(f"{text!r} is no Content-Length")
        if int(text) > MOST_BYTES:
            raise ValueError(f"a body of {text} bytes is over the limit of {MOST_BYTES}")
        return self._exactly(int(text))

    def _chunks(self):
        parts, total = [], 0
        while True:
            line = self.rfile.readline(_MOST_LINE).split(b";")[0].strip()
            try:
                size = int(line, 16)
            except ValueError:
                raise ValueError("a chunk has no length") from None
            total += size
            if size < 0 or total > MOST_BYTES:
                raise ValueError(f"a body of {total} bytes is over the limit of {MOST_BYTES}")
            if size == 0:
                # Trailers, which say nothing here, end with an empty line.
                for _ in range(64):
                    if not self.rfile.readline(_MOST_LINE).strip():
                        return b"".join(parts)
                raise ValueError("too many trailers")
            parts.append(self._exactly(size))
            self.rfile.readline(_MOST_LINE)

    def _exactly(self, size):
        raw = self.rfile.read(size)
        if len(raw) != size:
            raise ValueError(f"the body ended after {len(raw)} of {size} bytes")
        return raw

    def log_message(self, *_):
        """Says nothing of requests."""


class Server(ThreadingHTTPServer):
    """Many connections at once; they end with the process."""

    daemon_threads = True

    def handle_error(self, request, client_address):
        """Who went away while they were answered is no error of this process."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError, socket.timeout)):
            super().handle_error(request, client_address)


def listen(host, port, routes, what, open_to_network=False, loop=None):
    """A server that listens. Beyond loopback only where that was asked for: nobody is asked who they are."""
    local = host in ("127.0.0.1", "localhost", "::1", "")
    if not local and not open_to_network:
        print(
            f"kvplane: {what}: listening on 127.0.0.1 and not on {host}, as whoever reaches it may use it;"
            " --without-authentication opens it",
            file=sys.stderr,
        )
        host = "127.0.0.1"
    family = {"address_family": socket.AF_INET6} if ":" in host else {}
    handler = type("Routes", (Handler,), {"routes": routes, "loop": loop})
    return type("Listening", (Server,), family)((host or "127.0.0.1", port), handler)


def address(server):
    """Its address, for people and programs."""
    host, port = server.server_address[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
