"""Small HTTP server for the services of this package: on loopback, unless it is opened to the network."""

import asyncio
import json
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

#: Limit of the length of a body.
MOST_BYTES = 128 << 20
_MOST_LINE = 1024
_TIMEOUT_S = 30


class Response:
    """Response of a handler: bytes, or a text."""

    def __init__(self, status=200, text=None, body=None, content_type="application/octet-stream"):
        self.status, self.text, self.content_type = status, text, content_type
        self.body = text.encode() if text is not None else body or b""


def reply(code, /, **fields):
    """Returns a JSON response."""
    return Response(code, text=json.dumps(fields), content_type="application/json")


class Request:
    """Request, in the form for the handlers of the services."""

    def __init__(self, handler, rest):
        self._handler = handler
        self.method = handler.method()
        query = parse_qs(urlsplit(handler.path).query, errors="strict")
        self.query = {name: values[0] for name, values in query.items()}
        self.match_info = {"key": rest}

    async def read(self):
        """Returns the body."""
        return self._handler.body()

    async def json(self):
        """Returns the body as JSON; ValueError when it is malformed."""
        try:
            return json.loads(self._handler.body())
        except RecursionError:
            raise ValueError("it is nested too deeply") from None


class Handler(BaseHTTPRequestHandler):
    """Request handler, by `routes`: maps method and path to a coroutine function of the request. A path that ends with
    a slash is followed by a key; a method `*` matches any."""

    protocol_version = "HTTP/1.1"
    timeout = _TIMEOUT_S
    #: (method, path) -> coroutine function(Request) -> Response
    routes = {}
    #: Event loop of the coroutines; without it, each request has a loop of its own.
    loop = None
    _read = False

    def method(self):
        """Returns the method by which a request is answered: a `HEAD` is a `GET` whose body is not sent."""
        return "GET" if self.command == "HEAD" else self.command

    def _found(self):
        path = urlsplit(self.path).path
        methods = {}
        for (method, place), call in self.routes.items():
            keyed = place.endswith("/") and path.startswith(place) and len(path) > len(place)
            if path == place or keyed:
                # Bytes that are no UTF-8 are an error: another key would be taken for this one.
                methods[method] = (call, unquote(path[len(place) :], errors="strict") if keyed else "")
        if not methods:
            return None, "not found"
        return methods.get(self.method()) or methods.get("*"), f"{self.command} is not served here"

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
        except Exception as error:  # The caller gets a reply, whatever the error; the connection continues.
            answer = reply(500, error=f"{type(error).__name__}: {error}")
        if not self._read and (self.headers.get("Content-Length", "0") != "0" or self._chunked()):
            # An unread body would be parsed as the next request.
            self.close_connection = True
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_PATCH = _answer

    def _run(self, work):
        if self.loop is None:
            return asyncio.run(work)
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    def _chunked(self):
        return self.headers.get("Transfer-Encoding", "").lower() == "chunked"

    def body(self):
        """Returns the request's body; ValueError when it is too long, truncated or malformed."""
        raw = self._chunks() if self._chunked() else self._whole()
        self._read = True
        return raw

    def _whole(self):
        text = self.headers.get("Content-Length") or "0"
        if not text.isdigit():
            raise ValueError(f"{text!r} is not a valid Content-Length")
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
                # Trailers, which are ignored, end with an empty line.
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
        """Logs no requests."""


class Server(ThreadingHTTPServer):
    """Server for concurrent connections, which end with the process."""

    daemon_threads = True
    #: Connections that the kernel holds until they are accepted: clients come in bursts, and a thread accepts them.
    request_queue_size = socket.SOMAXCONN

    def handle_error(self, request, client_address):
        """A client that disconnects during a response is no error of this process."""
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError, socket.timeout)):
            super().handle_error(request, client_address)


def listen(host, port, routes, what, open_to_network=False, loop=None):
    """Creates a listening server. Beyond loopback only if `open_to_network`: clients are not authenticated."""
    local = host in ("127.0.0.1", "localhost", "::1", "")
    if not local and not open_to_network:
        print(
            f"kvplane: {what}: listening on 127.0.0.1 and not on {host}, as anyone who reaches it can use it;"
            " --without-authentication opens it",
            file=sys.stderr,
        )
        host = "127.0.0.1"
    family = {"address_family": socket.AF_INET6} if ":" in host else {}
    handler = type("Routes", (Handler,), {"routes": routes, "loop": loop})
    return type("Listening", (Server,), family)((host or "127.0.0.1", port), handler)


def address(server):
    """Returns its URL, for messages and programs."""
    host, port = server.server_address[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
