"""Registry of the `mooncake_client` processes of this user on this host: maps their ports to control planes, for dummy
clients.

There is one file for each in the user's runtime directory, valid while a process holds its lock. Imports are local to
the functions that need them: importing the store stays cheap.
"""

import os
import stat


def directory():
    """Returns the user's runtime directory, where control planes of this user leave identities."""
    named = os.environ.get("XDG_RUNTIME_DIR")
    if named:
        return os.path.join(named, "kvplane")
    user = os.geteuid()
    session = f"/run/user/{user}"
    return os.path.join(session, "kvplane") if os.path.isdir(session) else f"/tmp/kvplane-{user}"


def _path(port):
    return os.path.join(directory(), f"mooncake-client-{port}.json")


def _private(path):
    """Returns True if no other user can have written there."""
    seen = os.lstat(path)
    return stat.S_ISDIR(seen.st_mode) and seen.st_uid == os.geteuid() and not seen.st_mode & 0o077


class Published:
    """Registry entry of a client, until it ends."""

    def __init__(self, file, path):
        self._file, self._path = file, path

    def close(self):
        """Removes the entry."""
        if self._file is not None:
            os.unlink(self._path)
            self._file.close()
            self._file = None


def publish(port, master, tenant="default"):
    """Registers the client at this port as one of this master's cluster; OSError if there is one already."""
    import fcntl
    import json

    place = directory()
    os.makedirs(place, mode=0o700, exist_ok=True)
    if not _private(place):
        raise OSError(f"{place} is not a directory of this user alone (mode 0700)")
    path = _path(port)
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "r+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise OSError(f"another mooncake_client of this user has the port {port}; choose another --port") from None
    if not os.path.exists(path):
        # Its last owner removed it between the two steps.
        file.close()
        return publish(port, master, tenant)
    file.truncate(0)
    cluster = os.environ.get("KVPLANE_CLUSTER", "")
    json.dump({"master": master, "cluster": cluster, "tenant": tenant, "pid": os.getpid()}, file)
    file.flush()
    return Published(file, path)


def find(address):
    """Returns the entry of the client at `host:port`, or None if none of this user runs there."""
    import fcntl
    import json

    port = address.rpartition(":")[2]
    if not port.isdigit():
        return None
    path = _path(int(port))
    try:
        if not _private(directory()):
            return None
        with open(path, encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                said = json.load(file)
                return said if isinstance(said, dict) else None
            # Nobody holds the lock: the file was left by a process that was killed.
            return None
    except (OSError, ValueError):
        return None
