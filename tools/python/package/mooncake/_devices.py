"""Devices whose driver answers.

A driver that was initialized does not work in a forked child, and programs fork after their imports. So a process that
has not loaded a driver asks it in another process.
"""

import ctypes
import functools
import os
import subprocess
import sys

_LIBRARIES = {"cuda": "libcuda.so.1", "hip": "libamdhip64.so"}
_LONGEST_S = 60
_PROBE = "import sys; from kvplane import _native; print(len(_native.devices(sys.argv[1])))"


@functools.lru_cache(maxsize=None)
def is_available(family):
    """Returns True if the driver of a family answers, and has a device. Waits for the driver at the first call."""
    try:
        ctypes.CDLL(_LIBRARIES[family])
    except OSError:
        return False
    command = [sys.executable, "-c", _PROBE, family]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    try:
        answer = subprocess.run(command, env=environment, capture_output=True, timeout=_LONGEST_S, check=True)
        return int(answer.stdout) > 0
    except (OSError, ValueError, subprocess.SubprocessError):
        return False
