"""Tensors as objects: a header of 304 bytes, then the bytes. The layout is the original's.

torch is imported by the calls that need it, and never before.
"""

import struct

MAGIC = 0x4D4F4F4E
HEADER_BYTES = 304
#: Magic, version, header's length, type, dimensions, layout, flags, where the bytes begin, how many.
_HEAD = struct.Struct("<IHHiiIIQQ")
_SHAPES = struct.Struct("<8q8q")
_NAMES = [
    "float32",
    "float64",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "bool",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
]


def load_torch():
    """torch, or an ImportError that says what needs it."""
    try:
        import torch
    except ImportError as error:
        raise ImportError("the tensor calls of a store need torch, which is not installed") from error
    return torch


def metadata_size():
    """_tensor_metadata_size() -> int"""
    return HEADER_BYTES


def header(tensor, torch):
    """The header of a contiguous tensor."""
    name = str(tensor.dtype).rsplit(".", 1)[-1]
    if name not in _NAMES:
        raise TypeError(f"a tensor of {tensor.dtype} cannot be stored")
    if tensor.dim() > 8:
        raise ValueError(f"a tensor of {tensor.dim()} dimensions cannot be stored: at most 8")
    shape = list(tensor.shape) + [-1] * (8 - tensor.dim())
    count = tensor.numel() * tensor.element_size()
    head = _HEAD.pack(MAGIC, 1, HEADER_BYTES, _NAMES.index(name), tensor.dim(), 0, 0, HEADER_BYTES, count)
    return (head + _SHAPES.pack(*shape, *shape)).ljust(HEADER_BYTES, b"\0")


def raw(tensor, torch):
    """Address and length of a tensor's bytes in this process's memory."""
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def contiguous(tensor, torch):
    """The tensor in this process's memory, without gaps."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a torch.Tensor, not {type(tensor).__name__}")
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    return tensor.contiguous()


def serialize(arg0, /):
    """_serialize_tensor(arg0: object) -> tuple

    Header, address, length, and the tensor that keeps the memory.
    """
    torch = load_torch()
    tensor = contiguous(arg0, torch)
    return (header(tensor, torch), *raw(tensor, torch), tensor)


def parse(buffer):
    """Type, shape, where the bytes begin and how many, of a header; ValueError when it is none."""
    if len(buffer) < HEADER_BYTES:
        raise ValueError(f"an object of {len(buffer)} bytes is no tensor")
    magic, version, size, kind, dims, _, _, offset, count = _HEAD.unpack_from(buffer)
    whole = magic == MAGIC and version == 1 and 0 <= kind < len(_NAMES) and 0 <= dims <= 8
    if not whole or offset < size or offset + count > len(buffer):
        raise ValueError("the object is no tensor, or one of another version")
    shape = list(_SHAPES.unpack_from(buffer, _HEAD.size)[8 : 8 + dims])
    if any(extent < 0 for extent in shape):
        raise ValueError("the object is a tensor of a shape that cannot be")
    return _NAMES[kind], shape, offset, count


def view(buffer, torch):
    """A tensor over a writable buffer that holds one with its header."""
    name, shape, offset, count = parse(buffer)
    kind = getattr(torch, name, None)
    if kind is None:
        raise TypeError(f"this torch has no type {name}")
    if count == 0:
        return torch.empty(shape, dtype=kind)
    flat = torch.frombuffer(buffer, dtype=torch.uint8, count=count, offset=offset)
    if offset % flat.new_empty(0, dtype=kind).element_size():
        flat = flat.clone()
    return flat.view(kind).reshape(shape)


def deserialize(arg0, /):
    """_deserialize_tensor(arg0: bytes) -> object"""
    return view(bytearray(arg0), load_torch())
