"""HTTP server of a store's client, if enabled: health and metrics.

Serves `/health`, `/metrics` and `/metrics/summary` like Mooncake's client; on loopback, read only.
"""

import contextlib
import json
import os
import socket
import threading

from kvplane import _native
from mooncake import _http
from mooncake._http import Response

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_TEXT = "text/plain; charset=utf-8"
_LONGEST_S = 2


def totals(text):
    """Returns the sum of the series of each family without `le`: `{name: number}`."""
    found = {}
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        if series and not line.startswith("#") and 'le="' not in series:
            name = series.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


class ClientHttp:
    """Serves the state of a native store until it is closed."""

    def __init__(self, native, port):
        """Raises OSError when the port is taken."""
        self._native, self._process = native, os.getpid()
        routes = {
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/metrics/summary"): self._summary,
        }
        self._server = _http.listen("127.0.0.1", port, routes, "client")
        self.address = _http.address(self._server)
        self._ended = False
        self._thread = threading.Thread(target=self._serve, name="client-http", daemon=True)
        self._thread.start()

    def _serve(self):
        while not self._ended:
            self._server.handle_request()
        self._server.server_close()

    async def _health(self, _):
        code = self._native.check()
        state = {"status": "healthy" if code == 0 else "unhealthy", "code": code}
        if code != 0:
            state["error"] = _native.last_error()
        return Response(200 if code == 0 else 503, text=json.dumps(state), content_type="application/json")

    async def _metrics(self, _):
        return Response(text=self._native.metrics(), content_type=_PROMETHEUS)

    async def _summary(self, _):
        count = totals(self._native.metrics())
        lines = [
            f"calls: {count.get('kvplane_client_calls_total', 0):.0f},"
            f" {count.get('kvplane_client_calls_in_progress', 0):.0f} in progress",
            f"objects here: {count.get('kvplane_shard_objects', 0):.0f}",
            f"bytes here: {count.get('kvplane_shard_used_bytes', 0):.0f}"
            f" of {count.get('kvplane_shard_pool_bytes', 0):.0f}",
        ]
        return Response(text="\n".join(lines) + "\n", content_type=_TEXT)

    def close(self, wait=True):
        """Stops the server; the port is free afterwards, unless `wait` is false."""
        self._ended = True
        if self._process != os.getpid():
            # The thread belongs to the parent process.
            self._server.server_close()
            return
        # Wakes the thread; it may have ended with the interpreter.
        with contextlib.suppress(OSError), socket.create_connection(self._server.server_address[:2], 1):
            pass
        if wait and self._thread is not threading.current_thread():
            self._thread.join(_LONGEST_S)
