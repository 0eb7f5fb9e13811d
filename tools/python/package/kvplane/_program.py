"""The program `kvplane`, and control planes that this package starts with it."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import List, Optional

from kvplane._errors import Unreachable

_READY = "control plane of "
#: Control planes that this process started: it reaps those that end before it.
_STARTED: "List[subprocess.Popen[bytes]]" = []


def program() -> Optional[str]:
    """Returns the path of the program: from `KVPLANE_BINARY`, beside this interpreter, or in the search path; None if
    it is nowhere."""
    named = os.environ.get("KVPLANE_BINARY")
    beside = pathlib.Path(sys.executable).parent / "kvplane"
    return named or (str(beside) if beside.exists() else shutil.which("kvplane"))


def start_control_plane(cluster: str, idle: float, deadline: float = 30.0) -> str:
    """Starts a control plane on loopback, and returns its address. It is a process of its own, which outlives this one
    and any signal to its terminal, keeps its state in memory, and ends when no client has been connected for `idle`
    seconds. Unreachable if it does not begin within `deadline` seconds."""
    path = program()
    if path is None:
        what = "the program `kvplane` is not in the path: set KVPLANE_BINARY, or KVPLANE_CONTROL to a control plane"
        raise Unreachable(-900, what)
    command = [path, "control", "--cluster", cluster, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"]
    command += ["--stop-when-idle", f"{idle:g}"]
    # The output is a file, as a pipe would end with this process.
    with tempfile.TemporaryFile(mode="w+") as said:
        started = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
        )
        until = time.monotonic() + deadline
        while True:
            ended = started.poll()
            said.seek(0)
            text = said.read()
            for line in text.splitlines(keepends=True):
                if line.startswith(_READY) and line.endswith("\n"):
                    _STARTED.append(started)
                    return line.split(" on ", 1)[1].split()[0]
            if ended is not None:
                raise Unreachable(-900, f"{' '.join(command)} ended with {ended}: {text.strip()}")
            if time.monotonic() >= until:
                started.kill()
                started.wait()
                raise Unreachable(-900, f"{' '.join(command)} has not begun within {deadline} s: {text.strip()}")
            time.sleep(0.01)
