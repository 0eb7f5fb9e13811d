"""Mooncake's own process groups, by the C interface of its package, as a peer to measure beside; for `bench_groups.py`.

    python stock_pg.py FOLDER [VERSION]

Installs the package for CUDA into a folder of its own: the other one has no process groups. Its library runs over TCP
and without a GPU, but asks the loader for CUDA's runtime, whose package is installed beside it, and for its driver, for
which a stand-in is compiled. Needs a C compiler, `nm` and `readelf` of binutils, and of the distribution what Debian
calls libibverbs1, ibverbs-providers, libnuma1 and libcurl4.

A process that loads the library has `ENVIRONMENT` from its start, and is in a network of its own (`own_network`): the
library listens on every address, without authentication. As long as it is in a group its threads poll, also while
nothing is called.
"""

import ctypes
import os
import pathlib
import re
import subprocess
import sys
import time

from torch_cpu import NO_DEVICE, needed, prepare, symbols

VERSION = "0.3.14"
PACKAGE = "mooncake-transfer-engine-cuda13"
#: Package of CUDA's runtime, of the version that the library was built for.
RUNTIME = "nvidia-cuda-runtime>=13,<14"
#: TCP even where there are RDMA devices, and a log of errors only.
ENVIRONMENT = {"MC_FORCE_TCP": "1", "MC_LOG_LEVEL": "ERROR"}
LIBRARY, DRIVER, CUDART = "libmooncake_pg.so", "libcuda.so.1", "libcudart.so.13"
#: Functions of the driver; those of the runtime begin with `cuda`.
OF_DRIVER = re.compile(r"^cu[A-Z]")

#: Numbers of the interface: tools/capi/include/mooncake_pg.h.
_MAGIC, _CONFIG_VERSION, _UNSET, _CPU, _FLOAT32, _SUM = 0x20B6DE6B, 1, -(2**31), 0, 9, 0
_ADDRESS_BYTES = 256
#: Longest wait for rank 0's coordinator, and for an operation, in seconds.
_MEETING_S, _OPERATION_S = 60, 300
#: Words that start a program in a network namespace with loopback only, as root and as another user.
_LOOPBACK = ["sh", "-c", 'PATH="$PATH:/usr/sbin:/sbin" && ip link set lo up && exec "$@"', "sh"]
_NETWORKS = [["unshare", "--net", *_LOOPBACK], ["unshare", "--user", "--map-root-user", "--net", *_LOOPBACK]]


class Failed(Exception):
    """A call of the library did not succeed."""


class _Config(ctypes.Structure):
    """`mooncakePgCommConfig_t`."""

    _fields_ = [
        ("structSize", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("groupId", ctypes.c_char_p),
        ("rank", ctypes.c_int),
        ("size", ctypes.c_int),
        ("maxGroupSize", ctypes.c_int),
        ("globalRanks", ctypes.POINTER(ctypes.c_int32)),
        ("globalRankCount", ctypes.c_size_t),
        ("deviceType", ctypes.c_int),
        ("deviceIndex", ctypes.c_int),
        ("idResolvePolicy", ctypes.c_int),
        ("autoDeactivateOnFailure", ctypes.c_int),
        ("autoSyncOnFailure", ctypes.c_int),
        ("activeRanksMirror", ctypes.POINTER(ctypes.c_int32)),
        ("activeRanksMirrorCount", ctypes.c_size_t),
        ("activeRanksMirrorIsDevice", ctypes.c_int),
        ("activeRanksMirrorDeviceIndex", ctypes.c_int),
        ("preferredGpuCollectiveBackend", ctypes.c_int),
    ]


def load(folder):
    """Loads the library from a folder that this script has prepared. OSError says what the loader does not find."""
    packages = pathlib.Path(folder).resolve() / "mooncake"
    # By its path, and for all: the loader may have another library of the driver's name already, as torch brings one.
    ctypes.CDLL(str(packages / DRIVER), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(packages / LIBRARY))
    library.mooncakePgGetLastError.restype = ctypes.c_char_p
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.mooncakePgAllReduceCpu.argtypes = [
        *(pointer, pointer, size, ctypes.c_int, ctypes.c_int, pointer, pointer, size, pointer)
    ]
    library.mooncakePgCompletionWait.argtypes = [pointer, ctypes.c_int64]
    library.mooncakePgContextInitialize.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
    library.mooncakePgContextSetHostIp.argtypes = [pointer, ctypes.c_char_p]
    library.mooncakePgContextLaunchCoordinator.argtypes = [pointer, ctypes.c_char_p, size]
    library.mooncakePgContextConnectCoordinator.argtypes = [pointer, ctypes.c_char_p]
    library.mooncakePgCommCreate.argtypes = [pointer, ctypes.POINTER(_Config), pointer]
    for destroy in ("Context", "Comm", "Completion"):
        getattr(library, f"mooncakePg{destroy}Destroy").argtypes = [pointer]
    return library


class StockGroup:
    """Membership of all ranks of a world in a group, on the CPU.

    Rank 0 launches the coordinator, and writes its address to the file `meeting`, where the others find it. Failed if a
    call does not succeed, or the address is not there in time.
    """

    def __init__(self, library, rank, ranks, meeting):
        self._library, self._ranks = library, ranks
        self._context, self._comm = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("ContextCreate", ctypes.byref(self._context))
        self._call("ContextSetHostIp", self._context, b"127.0.0.1")
        self._call("ContextInitialize", self._context, rank, ranks)
        if rank == 0:
            address = ctypes.create_string_buffer(_ADDRESS_BYTES)
            self._call("ContextLaunchCoordinator", self._context, address, _ADDRESS_BYTES)
            pathlib.Path(f"{meeting}.new").write_bytes(address.value)
            os.replace(f"{meeting}.new", meeting)
        self._call("ContextConnectCoordinator", self._context, _read_when_there(meeting))
        order = (ctypes.c_int32 * ranks)(*range(ranks))
        config = _Config(ctypes.sizeof(_Config), _MAGIC, _CONFIG_VERSION, b"cpu:all", rank, ranks, ranks, order, ranks)
        config.deviceType, config.deviceIndex = _CPU, _UNSET
        config.autoDeactivateOnFailure = config.autoSyncOnFailure = 1
        config.activeRanksMirrorDeviceIndex = _UNSET
        self._call("CommCreate", self._context, ctypes.byref(config), ctypes.byref(self._comm))
        self._failed = (ctypes.c_int32 * ranks)()

    def _call(self, name, *arguments):
        result = getattr(self._library, f"mooncakePg{name}")(*arguments)
        if result:
            text = (self._library.mooncakePgGetLastError() or b"").decode(errors="replace")
            raise Failed(f"mooncakePg{name} returned {result}: {text}")

    def all_reduce(self, array):
        """Sums a contiguous array of 32-bit floats in place. Failed as well if a rank has not taken part."""
        completion, at = ctypes.c_void_p(), array.ctypes.data
        kind = (at, at, array.size, _FLOAT32, _SUM)
        self._call("AllReduceCpu", *kind, self._comm, self._failed, self._ranks, ctypes.byref(completion))
        try:
            self._call("CompletionWait", completion, _OPERATION_S * 1_000_000)
        finally:
            self._call("CompletionDestroy", completion)
        if any(self._failed):
            raise Failed(f"ranks failed: {list(self._failed)}")

    def close(self):
        """Leaves the group and the world; its threads end."""
        self._call("CommDestroy", self._comm)
        self._call("ContextDestroy", self._context)


def _read_when_there(path):
    until = time.monotonic() + _MEETING_S
    while not os.path.exists(path):
        if time.monotonic() > until:
            raise Failed(f"rank 0 has launched no coordinator within {_MEETING_S} s")
        time.sleep(0.01)
    return pathlib.Path(path).read_bytes()


def own_network():
    """First words of a command that runs in a network with loopback only; None if there is none for this user."""
    for words in _NETWORKS:
        try:
            if subprocess.run([*words, "true"], stderr=subprocess.DEVNULL, timeout=60, check=False).returncode == 0:
                return words
        except OSError:
            return None
    return None


def stand_in(folder):
    """Compiles the stand-in of CUDA's driver beside the libraries that ask for it."""
    packages = folder / "mooncake"
    runtime = next((folder / "nvidia").rglob(CUDART), None)
    if runtime is None:
        sys.exit(f"the package of {RUNTIME} has no {CUDART}")
    # The libraries look into their own folder first.
    (packages / CUDART).symlink_to(os.path.relpath(runtime, packages))
    libraries = [packages / LIBRARY]
    libraries += [packages / name for name in needed(packages / LIBRARY) if (packages / name).is_file()]
    defined, undefined = set(), set()
    for path in libraries:
        defined |= set(symbols(path, "--defined-only"))
        undefined |= set(symbols(path, "--undefined-only"))
    lacking = sorted(name for name in undefined - defined if OF_DRIVER.match(name))
    source = folder / "stand_in.c"
    lines = [f"int {name}(void) {{ return {NO_DEVICE}; }}" for name in lacking]
    source.write_text("\n".join(lines) + "\n", encoding="utf-8")
    compiler = ["cc", "-shared", "-fPIC", "-fno-builtin", "-w", f"-Wl,-soname,{DRIVER}"]
    subprocess.run([*compiler, "-o", str(packages / DRIVER), str(source)], check=True)
    print(f"stock: {len(lines)} functions of CUDA's driver have stand-ins")


def main():
    """Command line entry point."""
    folder, version, done = prepare("stock", __doc__, VERSION)
    python = str(folder / "venv" / "bin" / "python")
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    subprocess.run([*command, "--target", str(folder), f"{PACKAGE}=={version}", RUNTIME], check=True)
    stand_in(folder)
    environment = {**os.environ, **ENVIRONMENT}
    seen = subprocess.run([sys.executable, __file__, "--load", str(folder)], env=environment, check=False)
    if seen.returncode:
        sys.exit(f"{PACKAGE} {version} was installed in {folder}, and its {LIBRARY} does not load")
    done.write_text("", encoding="utf-8")
    print(f"stock: {version} in {folder}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--load"]:
        load(sys.argv[2])
    else:
        main()
