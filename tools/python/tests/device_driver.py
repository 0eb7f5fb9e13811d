"""The driver of devices, as another library of a program uses it beside ours: allocations, kernels, and bytes behind
the back of the product.

That is the driver for tests, whose memory crashes a process that touches it, or with `KVPLANE_GPU` the machine's own.
"""

import ctypes
import os
import pathlib
import unittest

#: CUDA's legacy default stream.
DEFAULT_STREAM = 1
_COUNTERS = "contexts allocations pinned streams events without_context unpinned copied_bytes calls".split()


def _folder():
    """Returns a folder with the drivers for tests, under their names; None where they were not built."""
    binary = pathlib.Path(os.environ["KVPLANE_BINARY"])
    folder = binary.parent / "fake-devices"
    for built, name in (("cuda", "libcuda.so.1"), ("hip", "libamdhip64.so"), ("npu", "libascendcl.so")):
        file = binary.parent / f"libkvplane_fake_{built}.so"
        if not file.exists():
            return None
        folder.mkdir(exist_ok=True)
        if not (folder / name).exists():
            (folder / name).symlink_to(file)
    return folder


def environment():
    """Returns what a process with devices has in its environment. Skips the test where there are none."""
    if os.environ.get("KVPLANE_GPU"):
        try:
            if ctypes.CDLL("libcuda.so.1").cuInit(0) != 0:
                raise OSError("the driver of cuda devices does not answer")
        except OSError as error:
            raise unittest.SkipTest(str(error)) from None
        return {}
    folder = _folder()
    if folder is None:
        raise unittest.SkipTest("the drivers for tests are not built")
    return {"LD_LIBRARY_PATH": str(folder)}


class Driver:
    """The driver in this process, with the primary context of one device."""

    def __init__(self, device=0):
        self._library = ctypes.CDLL("libcuda.so.1")
        self.is_fake = hasattr(self._library, "kvplane_fake_access")
        self._device, self._context, self._streams = device, ctypes.c_void_p(), 0
        self._call("cuInit", 0)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def _call(self, name, *arguments):
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise OSError(f"{name} returned {code}")

    def _within(self, name, *arguments):
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call(name, *arguments)
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def allocate(self, size):
        """Allocates device memory; returns its address."""
        address = ctypes.c_uint64()
        self._within("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address):
        """Frees such memory."""
        self._within("cuMemFree_v2", ctypes.c_uint64(address))

    def read(self, address, size):
        """Returns bytes of the device."""
        data = (ctypes.c_char * size)()
        if self.is_fake:
            self._access(address, data, size, False)
        else:
            self._within("cuMemcpyDtoH_v2", data, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return data.raw

    def write(self, address, value):
        """Replaces bytes of the device."""
        data = (ctypes.c_char * len(value)).from_buffer_copy(value)
        if self.is_fake:
            self._access(address, data, len(value), True)
        else:
            self._within("cuMemcpyHtoD_v2", ctypes.c_uint64(address), data, ctypes.c_size_t(len(value)))

    def _access(self, address, data, size, write):
        known = self._library.kvplane_fake_access(ctypes.c_uint64(address), data, ctypes.c_uint64(size), int(write))
        assert known == 1, f"{size} bytes at {address:#x} are not allocated"

    # --- the driver for tests only ---------------------------------------------------------------------------------

    def stream(self):
        """Creates a stream, which stays."""
        self._streams += 1
        self._library.kvplane_fake_stream.restype = ctypes.c_uint64
        return self._library.kvplane_fake_stream(ctypes.c_size_t(self._device))

    def launch(self, stream, address, size, seed, delay_s):
        """Launches a kernel that writes `pattern(seed)` after a delay."""
        numbers = [self._device, stream, address, size, seed, int(delay_s * 1e9)]
        assert self._library.kvplane_fake_fill(*map(ctypes.c_uint64, numbers)) == 0

    def lose(self, code):
        """Makes every call of the device return a code; 0 brings it back."""
        self._library.kvplane_fake_lose(ctypes.c_size_t(self._device), code)

    def counters(self):
        """Returns what is in use, and how often the driver was misused."""
        values = (ctypes.c_uint64 * len(_COUNTERS))()
        self._library.kvplane_fake_counters(values)
        return dict(zip(_COUNTERS, values))

    def check_released(self):
        """Checks that only what this object itself holds is in use, and that the driver was not misused."""
        if self.is_fake:
            found = self.counters()
            own = {"contexts": 1, "streams": self._streams, "calls": found["calls"]}
            expected = {**dict.fromkeys(_COUNTERS, 0), **own, "copied_bytes": found["copied_bytes"]}
            assert found == expected, found
