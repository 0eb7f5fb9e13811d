"""Memory behind the objects that callers pass: of the host, by the buffer protocol, or of a device."""

import ctypes
import math
import sys
from typing import Any, NamedTuple, Optional, Sequence, Tuple

from kvplane import _native

#: Device types of DLPack whose memory the CPU accesses: its own, and that pinned by CUDA and by ROCm.
_HOST_TYPES = (1, 3, 11)
#: Those of devices, with the stream on which a consumer's accesses are: CUDA, ROCm, memory that CUDA migrates.
_DEVICE_STREAMS = {2: 1, 10: 0, 13: 1}
#: Handles that stand for CUDA's default streams: that of all threads, and each thread's own.
_LEGACY, _PER_THREAD = 1, 2


class Stream(NamedTuple):
    """Stream of a caller: the location of its device, and its handle."""

    location: str
    handle: int

    def is_of_thread(self) -> bool:
        """Returns True for the default stream of each thread."""
        return self.handle == _PER_THREAD and self.location.startswith("cuda:")


class DeviceMemory(NamedTuple):
    """Memory of a device."""

    address: int
    size: int
    #: Device, as in locations: `cuda:0`.
    location: str
    #: Object that keeps the memory.
    owner: Any
    writable: bool = True

    def stream(self) -> Optional[Stream]:
        """Returns the stream that the owner's work is on now; None for the default one."""
        handle = _stream_of(self.owner)
        if handle is None:
            return None
        # HIP has one default stream, of number 0.
        default = handle in (0, 1, 2) if self.location.startswith("hip:") else handle == _LEGACY
        return None if default else Stream(self.location, handle)


def device_memory(value: Any) -> Optional[DeviceMemory]:
    """Returns the memory of a device behind a tensor, or an object with `__cuda_array_interface__` or DLPack; None if
    the object's memory is the host's. ValueError for memory that is not contiguous."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return None
    if is_tensor(value):
        if value.device.type == "cpu":
            return None
        _check_contiguous(value.is_contiguous())
        return _on_device(value.data_ptr(), value.numel() * value.element_size(), value)
    described = getattr(value, "__cuda_array_interface__", None)
    if described is not None:
        _check_cuda_array(described)
        size = math.prod(described["shape"]) * _item_size(described["typestr"])
        address, is_read_only = described["data"]
        return _on_device(address or 0, size, value)._replace(writable=not is_read_only)
    if hasattr(value, "__dlpack_device__") and value.__dlpack_device__()[0] not in _HOST_TYPES:
        address, size, capsule = _dlpack(value)
        return _on_device(address, size, value, capsule)
    return None


def exporter(value: Any) -> Any:
    """Returns `value`, or an object over the same memory of the host that has the buffer protocol.

    Torch tensors have it through numpy, whatever their type, and so have objects that support DLPack. ValueError for
    memory of a device, and for memory that is not contiguous.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return value
    memory = device_memory(value)
    if memory is not None:
        raise ValueError(f"the memory is on {memory.location}: copy it to host memory first")
    if is_tensor(value):
        return _of_tensor(value)
    if hasattr(value, "__dlpack__") and not hasattr(value, "__array_interface__") and not _has_buffer(value):
        address, size, capsule = _dlpack(value)
        array = (ctypes.c_char * size).from_address(address)
        array._keeper = capsule  # type: ignore[attr-defined]
        return array
    return value


def common_stream(streams: Sequence[Optional[Stream]]) -> Optional[Stream]:
    """Returns the one stream of all these. ValueError if there are several."""
    found = set(streams)
    if len(found) > 1:
        raise ValueError(f"the objects of one call are on {len(found)} streams: pass `stream`, or several calls")
    return found.pop() if found else None


def is_tensor(value: Any) -> bool:
    """Returns True for tensors of torch, without its import."""
    return all(hasattr(value, name) for name in ("data_ptr", "element_size", "numel", "is_contiguous", "device"))


def _has_buffer(value: Any) -> bool:
    try:
        memoryview(value).release()
    except (TypeError, BufferError):
        return False
    return True


def _on_device(address: int, size: int, owner: Any, keeper: Any = None) -> DeviceMemory:
    location = _native.location(address, size) if size else ""
    if size and not location:
        raise ValueError(f"{size} bytes at {address:#x} are no memory of a device: {_native.last_error()}")
    return DeviceMemory(address, size, location, owner if keeper is None else _Kept(owner, keeper))


class _Kept(NamedTuple):
    """Object that exported its memory by DLPack, and the export, which keeps it."""

    owner: Any
    capsule: Any


def _stream_of(owner: Any) -> Optional[int]:
    if isinstance(owner, _Kept):
        # The default stream waits for the work that is on the exporter's stream now.
        _dlpack(owner.owner)
        return None
    if is_tensor(owner):
        cuda = getattr(sys.modules.get("torch"), "cuda", None)
        return None if cuda is None else cuda.current_stream(owner.device).cuda_stream or None
    stream: Optional[int] = owner.__cuda_array_interface__.get("stream")
    if stream == 0:
        raise ValueError("stream 0 of __cuda_array_interface__ is ambiguous: 1 is the default stream, 2 the thread's")
    return stream


def _check_contiguous(contiguous: bool) -> None:
    if not contiguous:
        raise ValueError("the memory is not contiguous: call .contiguous() first, or copy it")


def _check_cuda_array(described: Any) -> None:
    if described.get("mask") is not None:
        raise ValueError("arrays with a mask are not supported")
    strides = described.get("strides")
    size = _item_size(described["typestr"])
    _check_contiguous(strides is None or _is_dense(described["shape"], strides, size))


def _item_size(typestr: str) -> int:
    return int(typestr[2:])


def _is_dense(shape: Sequence[int], strides: Sequence[int], step: int) -> bool:
    """Returns True if elements in the order of C follow each other without gaps."""
    if 0 in shape:
        return True
    for extent, stride in zip(reversed(shape), reversed(strides)):
        if extent > 1 and stride != step:
            return False
        step *= extent
    return True


class _Device(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("number", ctypes.c_int32)]


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    """DLPack's `DLTensor`, at the start of what a capsule holds."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


def _dlpack(value: Any) -> Tuple[int, int, Any]:
    """Exports an object. Returns address, length, and the capsule: it keeps the memory, and releases it at its end, as
    nobody has taken what it holds."""
    stream = _DEVICE_STREAMS.get(value.__dlpack_device__()[0])
    capsule = value.__dlpack__() if stream is None else value.__dlpack__(stream=stream)
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    tensor = _Tensor.from_address(pointer(capsule, b"dltensor"))
    shape = tensor.shape[: tensor.ndim]
    # Strides count elements.
    _check_contiguous(not tensor.strides or _is_dense(shape, tensor.strides[: tensor.ndim], 1))
    size = math.prod(shape) * ((tensor.dtype.bits * tensor.dtype.lanes + 7) // 8)
    return (tensor.data or 0) + tensor.byte_offset, size, capsule


def _of_tensor(tensor: Any) -> Any:
    import torch

    _check_contiguous(tensor.is_contiguous())
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
