"""HTTP service of a store.

| request | what it does |
|---|---|
| `PUT /api/put` with `{"key": ..., "value": ...}` | stores a text; with `"replicas"`, a number, so many replicas |
| `GET /api/get/KEY` | its bytes |
| `GET /api/exist/KEY` | `{"exists": true}` |
| `DELETE /api/remove/KEY`, `DELETE /api/remove_all` | removes |
| `POST /api/mount` with `{"size": ...}`, `POST /api/unmount` with `{"segment_ids": [...]}` | gives memory, takes it back |
| `POST /api/mount_shm`, `unmount_shm`, `unmount_local_disk`, `reconfigure` | as the original has them |
| `GET /health` | whether the cluster answers |
"""

import argparse
import asyncio
import functools
import logging
import signal
import sys
import threading

from mooncake import _http
from mooncake._http import Response, reply
from mooncake.mooncake_config import MooncakeConfig, overridden
from mooncake.store import INVALID_PARAMS, OBJECT_NOT_FOUND, MooncakeDistributedStore, ReplicateConfig

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_MOST_GRACE_S = 3600
_MOST_REPLICAS = 8


def _shm_name_to_path(name):
    """Returns the path of the shared memory of this name; None for an invalid name."""
    if not isinstance(name, str):
        return None
    plain = name[1:] if name.startswith("/") else name
    return None if not plain or "/" in plain or plain in (".", "..") else f"/dev/shm/{plain}"


def _unblock_shutdown_signals():
    """Unblocks signals that a parent blocked, so that they end this service."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})


def _install_shutdown_signal_handlers(loop, shutdown_event):
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, lambda _number: shutdown_event.set(), number)


def _seconds(value, longest=_MOST_GRACE_S):
    return value if type(value) is int and 0 <= value <= longest else None


def _said(call):
    """Returns a handler that converts exceptions to error responses."""

    @functools.wraps(call)
    async def handle(self, request):
        try:
            return await call(self, request)
        except UnicodeEncodeError as error:
            # JSON can have halves of characters, which have no UTF-8.
            return reply(400, error=f"a text is no UTF-8: {error.reason}")
        except Exception as error:
            logger.error("%s: %s", call.__name__, error)
            return reply(500, error=str(error))

    return handle


def _handler(call):
    """Returns a handler of a JSON object that converts malformed bodies and exceptions to error responses."""
    call = _said(call)

    @functools.wraps(call)
    async def handle(self, request):
        try:
            said = await request.json()
        except ValueError as error:
            return reply(400, error=f"Malformed JSON body: {error}")
        if not isinstance(said, dict):
            return reply(400, error="Request body must be a JSON object")
        return await call(self, said)

    return handle


class MooncakeStoreService:
    """HTTP service of one store: `start_store_service`, `start_http_service`, `stop`."""

    def __init__(self, config_path=None, cli_config=None):
        self.store = None
        self.config = overridden(config_path, cli_config or {})
        self.current_mode = "prefill"
        self.mounted_segment_ids = []
        self.last_mount_info = {}
        self._state_lock = asyncio.Lock()
        self._server = None

    async def start_store_service(self, max_wait_time=60, shutdown_event=None):
        """Sets the store up, and retries each second until it succeeds or the time is over. Returns True if it
        succeeded."""
        loop = asyncio.get_running_loop()
        until = loop.time() + max_wait_time
        while shutdown_event is None or not shutdown_event.is_set():
            problem = self._setup()
            # Lets signals that arrived meanwhile be handled.
            await asyncio.sleep(0)
            if shutdown_event is not None and shutdown_event.is_set():
                break
            if problem is None:
                return True
            left = until - loop.time()
            logger.warning("the store is not set up yet: %s", problem)
            if left <= 0:
                return False
            await self._pause(min(_RETRY_S, left), shutdown_event)
        await self.stop()
        return False

    def _setup(self):
        config = self.config
        try:
            self.store = MooncakeDistributedStore()
            code = self.store.setup({
                "local_hostname": config.local_hostname,
                "metadata_server": config.metadata_server,
                "global_segment_size": config.global_segment_size,
                "local_buffer_size": config.local_buffer_size,
                "protocol": config.protocol,
                "rdma_devices": config.device_name,
                "master_server_addr": config.master_server_address,
                "enable_ssd_offload": config.enable_ssd_offload,
                "ssd_offload_path": config.ssd_offload_path,
                "tenant_id": config.tenant_id,
                "enable_client_http_server": config.enable_client_http_server,
                "client_http_port": config.client_http_port,
            })
        except Exception as error:
            self.store = None
            return str(error)
        if code == 0:
            return None
        self.store = None
        return f"error {code}"

    @staticmethod
    async def _pause(seconds, shutdown_event):
        if shutdown_event is None:
            await asyncio.sleep(seconds)
            return
        try:
            await asyncio.wait_for(shutdown_event.wait(), seconds)
        except asyncio.TimeoutError:
            pass

    async def start_http_service(self, port=8080, host="127.0.0.1", open_to_network=False):
        """Serves on threads until `stop`; OSError when the port is taken."""
        routes = {
            ("PUT", "/api/put"): self.handle_put,
            ("POST", "/api/put"): self.handle_put,
            ("GET", "/api/get/"): self.handle_get,
            ("GET", "/api/exist/"): self.handle_exist,
            ("DELETE", "/api/remove/"): self.handle_remove,
            ("DELETE", "/api/remove_all"): self.handle_remove_all,
            ("POST", "/api/mount"): self.handle_mount,
            ("POST", "/api/unmount"): self.handle_unmount,
            ("POST", "/api/mount_shm"): self.handle_mount_shm,
            ("POST", "/api/unmount_shm"): self.handle_unmount_shm,
            ("POST", "/api/unmount_local_disk"): self.handle_unmount_local_disk,
            ("POST", "/api/reconfigure"): self.handle_reconfigure,
            ("GET", "/health"): self.handle_health,
        }
        loop = asyncio.get_running_loop()
        self._server = _http.listen(host, port, routes, "store service", open_to_network, loop)
        threading.Thread(target=self._server.serve_forever, name="store service", daemon=True).start()
        print(f"store service on {_http.address(self._server)}", flush=True)
        return True

    async def _call(self, call, *arguments):
        return await asyncio.get_running_loop().run_in_executor(None, call, *arguments)

    @_handler
    async def handle_put(self, said):
        """Stores a text."""
        key, value = said.get("key"), said.get("value")
        if not isinstance(key, str) or not isinstance(value, str) or not key:
            return reply(400, error="Missing key or value: both are texts")
        replicas = said.get("replicas", 1)
        if type(replicas) is not int or not 1 <= replicas <= _MOST_REPLICAS:
            return reply(400, error=f"replicas is a whole number from 1 to {_MOST_REPLICAS}")
        config = ReplicateConfig()
        config.replica_num = replicas
        code = await self._call(self.store.put, key, value.encode(), config)
        if code == 0:
            return reply(200, status="success")
        return reply(400 if code == INVALID_PARAMS else 500, error=f"PUT operation failed: {code}")

    async def _exists(self, key):
        return await self._call(self.store.is_exist, key)

    @_said
    async def handle_get(self, request):
        """Returns the bytes of an object."""
        key = request.match_info["key"]
        # `get` returns the same for an object without bytes and for none. One that was put between the two calls
        # has bytes that the first did not see: it is read again, and is empty only if it is there after that, too.
        for _ in range(2):
            value = await self._call(self.store.get, key)
            if value:
                return Response(200, body=value)
            found = await self._exists(key)
            if found < 0:
                return reply(500, error="Exist check failed")
            if found == 0:
                return reply(404, error="Key not found")
        return reply(500, error="GET operation failed") if value is None else Response(200, body=b"")

    @_said
    async def handle_exist(self, request):
        """Returns whether there is an object."""
        found = await self._exists(request.match_info["key"])
        return reply(500, error="Exist check failed") if found < 0 else reply(200, exists=found > 0)

    @_said
    async def handle_remove(self, request):
        """Removes an object."""
        code = await self._call(self.store.remove, request.match_info["key"])
        if code == 0:
            return reply(200, status="success")
        return reply(404 if code == OBJECT_NOT_FOUND else 500, error=f"Remove operation failed: {code}")

    @_said
    async def handle_remove_all(self, _request):
        """Removes all objects."""
        count = await self._call(self.store.remove_all)
        if count < 0:
            return reply(500, error=f"RemoveAll operation failed: {count}")
        return reply(200, status=f"success removed {count} keys", removed=count)

    @_said
    async def handle_health(self, _request):
        """Returns whether the cluster answers."""
        code = await self._call(self.store.health_check)
        return reply(200 if code == 0 else 503, health=code)

    @_handler
    async def handle_mount(self, said):
        """Provides memory of this process to the cluster."""
        size = said.get("size")
        if type(size) is not int or not 0 < size < 1 << 63:
            return reply(400, error="Invalid size, must be a positive integer")
        protocol, location = said.get("protocol", self.config.protocol), said.get("location", "")
        result = await self._call(self.store.allocate_and_mount_segment, size, protocol, location)
        if result["ret"] != 0:
            return reply(500, error=f"Allocate and mount failed, ret={result['ret']}")
        ids = list(result["segment_ids"])
        return reply(200, status="success", segment_ids=ids, allocated_size=result["allocated_size"])

    @staticmethod
    def _segments(said):
        ids = said.get("segment_ids") or []
        ids = [ids] if isinstance(ids, str) else ids
        grace = _seconds(said.get("grace_period_seconds", 0))
        if not isinstance(ids, list) or not ids or not all(isinstance(one, str) for one in ids):
            return None, grace, reply(400, error="Missing segment_ids: a list of texts")
        wrong = reply(400, error=f"grace_period_seconds is a whole number up to {_MOST_GRACE_S}")
        return ids, grace, wrong if grace is None else None

    @_handler
    async def handle_unmount(self, said):
        """Takes memory back."""
        ids, grace, wrong = self._segments(said)
        if wrong is not None:
            return wrong
        code = await self._call(self.store.unmount_and_free_segment, ids, grace)
        return reply(200, status="success") if code == 0 else reply(500, error=f"Unmount and free failed, ret={code}")

    def _place(self, said, path):
        """Returns the path, size and further arguments for `mount_segment`; None if one is missing or invalid."""
        size, offset = said.get("size"), said.get("offset", 0)
        if not path or type(size) is not int or type(offset) is not int or size <= 0 or offset < 0:
            return None
        return path, size, offset, said.get("protocol", self.config.protocol), said.get("location", "")

    @_handler
    async def handle_mount_shm(self, said):
        """Provides named shared memory, where the store supports it."""
        place = self._place(said, _shm_name_to_path(said.get("name")))
        if place is None:
            return reply(400, error="Missing or invalid name or size")
        result = await self._call(self.store.mount_segment, *place)
        if result["ret"] != 0:
            return reply(500, error=f"Mount failed, ret={result['ret']}; /api/mount gives memory of this process")
        return reply(200, status="success", segment_ids=list(result["segment_ids"]))

    @_handler
    async def handle_unmount_shm(self, said):
        """Takes shared memory back, each segment by itself."""
        ids, grace, wrong = self._segments(said)
        if wrong is not None:
            return wrong
        async with self._state_lock:
            failed = await self._unmount(ids, grace)
            self.mounted_segment_ids = [one for one in self.mounted_segment_ids if one not in ids or one in failed]
            if not self.mounted_segment_ids:
                self.current_mode = "prefill"
        if failed:
            return reply(500, error="Unmount failed for one or more segments", failed_segment_ids=failed)
        return reply(200, status="success")

    async def _unmount(self, ids, grace=0):
        return [one for one in ids if await self._call(self.store.unmount_segment, [one], grace) != 0]

    @_handler
    async def handle_unmount_local_disk(self, said):
        """Prepares the end of this process: its disks do not serve any more."""
        grace = _seconds(said.get("grace_period_seconds", 0))
        if grace is None:
            return reply(400, error=f"Invalid grace_period_seconds: a whole number up to {_MOST_GRACE_S}")
        code = await self._call(self.store.unmount_local_disk_segment, grace)
        return reply(200, status="success") if code == 0 else reply(500, error=f"Unmount local disk failed, ret={code}")

    @_handler
    async def handle_reconfigure(self, said):
        """Switches between prefill, which provides no memory, and decode, which does."""
        mode = str(said.get("mode", "")).lower()
        if mode == "decode":
            place = self._place(said, said.get("path"))
            if place is None:
                return reply(400, error="Missing path or size for decode mode")
            async with self._state_lock:
                return await self._decode(place)
        if mode == "prefill":
            async with self._state_lock:
                return await self._prefill()
        return reply(400, error="Invalid mode. Use 'decode' or 'prefill'")

    async def _decode(self, place):
        before = list(self.mounted_segment_ids)
        # The new memory first: if that fails, the present memory continues to serve.
        result = await self._call(self.store.mount_segment, *place)
        if result["ret"] != 0:
            outcome = "keeping previous decode segments" if before else "rolled back to prefill"
            if not before:
                self.current_mode = "prefill"
                self.last_mount_info = {}
            return reply(500, error=f"Mount failed, ret={result['ret']}; {outcome}", mode=self.current_mode)
        failed = [one for one in before if await self._call(self.store.unmount_segment, [one]) != 0]
        self.mounted_segment_ids = [*result["segment_ids"], *failed]
        self.current_mode = "decode"
        self.last_mount_info = dict(zip(("path", "size", "offset", "protocol", "location"), place))
        return reply(200, status="success", mode="decode", segment_ids=self.mounted_segment_ids)

    async def _prefill(self):
        if self.mounted_segment_ids:
            code = await self._call(self.store.unmount_segment, self.mounted_segment_ids)
            if code != 0:
                return reply(500, error=f"Unmount failed, ret={code}")
        self.mounted_segment_ids = []
        self.current_mode = "prefill"
        self.last_mount_info = {}
        return reply(200, status="success", mode="prefill")

    async def stop(self):
        """Stops the server and the store."""
        server = getattr(self, "_server", None)
        if server is not None:
            self._server = None
            await self._call(server.shutdown)
            server.server_close()
        store, self.store = self.store, None
        if store is not None:
            code = await self._call(store.close)
            if code != 0:
                logger.warning("Mooncake service close returned %s", code)


def parse_arguments():
    """Parses Mooncake's command line."""
    parser = argparse.ArgumentParser(description="A store behind HTTP")
    parser.add_argument("--config", help="a JSON file; without it, MOONCAKE_CONFIG_PATH or MOONCAKE_MASTER")
    parser.add_argument("-D", "--define", action="append", default=[], help="key=value, before what the file has")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--max-wait-time", type=float, default=60, help="seconds until the cluster must answer")
    parser.add_argument("--without-authentication", action="store_true", help="allow a host beyond loopback")
    arguments = parser.parse_args()
    for definition in arguments.define:
        if "=" not in definition:
            parser.error(f"-D {definition}: write key=value")
    return arguments


async def main():
    """Serves until SIGINT or SIGTERM."""
    arguments = parse_arguments()
    service = MooncakeStoreService(arguments.config, dict(one.split("=", 1) for one in arguments.define))
    ended = asyncio.Event()
    _install_shutdown_signal_handlers(asyncio.get_running_loop(), ended)
    _unblock_shutdown_signals()
    try:
        if not await service.start_store_service(max_wait_time=arguments.max_wait_time, shutdown_event=ended):
            if ended.is_set():
                return
            raise RuntimeError(f"the store was not set up within {arguments.max_wait_time} s")
        host = getattr(arguments, "host", "127.0.0.1")
        await service.start_http_service(arguments.port, host, getattr(arguments, "without_authentication", False))
        await ended.wait()
    finally:
        await service.stop()


def sync_main():
    """Console script: reports an error in one line."""
    logging.basicConfig(level=logging.WARNING, format="kvplane: store service: %(message)s")
    try:
        asyncio.run(main())
    except (OSError, ValueError, RuntimeError, OverflowError) as error:
        print(f"kvplane: store service: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(sync_main())
