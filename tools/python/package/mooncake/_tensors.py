"""Tensors as objects: a header of 304 bytes, then the bytes. The layout is Mooncake's.

torch is imported only by the calls that need it.
"""

import math
import struct

from mooncake import _parallel

MAGIC = 0x4D4F4F4E
HEADER_BYTES = 304
#: Magic, version, header length, type, dimensions, layout, flags, offset and number of the bytes.
_HEAD = struct.Struct("<IHHiiIIQQ")
_SHAPES = struct.Struct("<8q8q")
#: Number of axes of a part, then for each: kind, position, rank, size, dimension, number, length along the dimension.
_AXES = struct.Struct("<II")
_AXIS = struct.Struct("<6iq")
_FULL, _PART = 0, 1
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
    """Returns the torch module; raises ImportError with the reason if it is missing."""
    try:
        import torch
    except ImportError as error:
        raise ImportError("the tensor calls of a store need torch, which is not installed") from error
    return torch


def metadata_size():
    """_tensor_metadata_size() -> int"""
    return HEADER_BYTES


def header(tensor, torch, layout=None):
    """Returns the header of a contiguous tensor; for a part, `layout` is the shape of the whole tensor and the axes."""
    name = str(tensor.dtype).rsplit(".", 1)[-1]
    if name not in _NAMES:
        raise TypeError(f"a tensor of {tensor.dtype} cannot be stored")
    if tensor.dim() > 8:
        raise ValueError(f"a tensor of {tensor.dim()} dimensions cannot be stored: at most 8")
    whole, axes = layout or (tensor.shape, ())
    shapes = [extent for shape in (whole, tensor.shape) for extent in [*shape, *[-1] * (8 - tensor.dim())]]
    count = tensor.numel() * tensor.element_size()
    kind = _PART if layout else _FULL
    head = _HEAD.pack(MAGIC, 1, HEADER_BYTES, _NAMES.index(name), tensor.dim(), kind, 0, HEADER_BYTES, count)
    head += _SHAPES.pack(*shapes) + _AXES.pack(len(axes), 0)
    for position, axis in enumerate(axes):
        split, length = (-1, 0) if axis.split is None else (axis.split, tensor.shape[axis.split])
        numbers = _parallel.KINDS.index(axis.kind), position, axis.rank, axis.size, split, axis.number or 0
        head += _AXIS.pack(*numbers, length)
    return head.ljust(HEADER_BYTES, b"\0")


def axes_in(buffer):
    """Returns the axes of the part in a buffer; none for a whole tensor. ValueError when the buffer holds no tensor."""
    parse(buffer)
    if _HEAD.unpack_from(buffer)[5] != _PART:
        return ()
    at, axes = _HEAD.size + _SHAPES.size, []
    count, _ = _AXES.unpack_from(buffer, at)
    if count > len(_parallel.KINDS):
        raise ValueError(f"a part of a tensor with {count} axes")
    for index in range(count):
        kind, _, rank, size, split, number, _ = _AXIS.unpack_from(buffer, at + _AXES.size + index * _AXIS.size)
        if not 0 <= kind < len(_parallel.KINDS):
            raise ValueError(f"a part of a tensor with an axis of kind {kind}")
        kind = _parallel.KINDS[kind]
        split, number = (None if split < 0 else split), (number if kind in ("ep", "pp") else None)
        axes.append(_parallel.Axis(kind, rank, size, split, number))
    return tuple(sorted(axes, key=lambda axis: _parallel.KINDS.index(axis.kind)))


def raw(tensor, torch):
    """Returns address and length of a tensor's bytes in this process's memory."""
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def contiguous(tensor, torch):
    """Returns the tensor in this process's memory, contiguous."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a torch.Tensor, not {type(tensor).__name__}")
    tensor = tensor.detach()
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
    return tensor.contiguous()


def serialize(arg0, /):
    """_serialize_tensor(arg0: object) -> tuple

    Returns header, address, length, and the tensor that owns the memory.
    """
    torch = load_torch()
    tensor = contiguous(arg0, torch)
    return (header(tensor, torch), *raw(tensor, torch), tensor)


def parse(buffer):
    """Parses a header: type, shape, offset and number of the bytes; ValueError when it is malformed."""
    kind, shape, offset, count = parse_head(buffer)
    if offset + count > len(buffer):
        raise ValueError(f"an object of {len(buffer)} bytes is no tensor of {offset + count}")
    return kind, shape, offset, count


def whole_size(buffer):
    """Returns the length of header and bytes together, by the header alone; ValueError when it is malformed."""
    _, _, offset, count = parse_head(buffer)
    return offset + count


def parse_head(buffer):
    """Parses a header like `parse`, without the bytes behind it."""
    if len(buffer) < HEADER_BYTES:
        raise ValueError(f"an object of {len(buffer)} bytes is no tensor")
    magic, version, size, kind, dims, _, _, offset, count = _HEAD.unpack_from(buffer)
    known = magic == MAGIC and version == 1 and 0 <= kind < len(_NAMES) and 0 <= dims <= 8
    if not known or offset < size:
        raise ValueError("the object is no tensor, or one of another version")
    shape = list(_SHAPES.unpack_from(buffer, _HEAD.size)[8 : 8 + dims])
    if any(extent < 0 for extent in shape):
        raise ValueError("the object is a tensor of a shape that cannot be")
    return _NAMES[kind], shape, offset, count


def with_rows(head, rows):
    """Returns the header of a whole tensor with another extent along its first dimension."""
    kind, shape, offset, count = parse_head(head)
    if not shape:
        raise ValueError("a tensor without dimensions has no rows")
    size = count // shape[0] if shape[0] else 0
    changed = bytearray(head[:HEADER_BYTES])
    fields = list(_HEAD.unpack_from(changed))
    fields[-1] = size * rows
    _HEAD.pack_into(changed, 0, *fields)
    extents = list(_SHAPES.unpack_from(changed, _HEAD.size))
    extents[0] = extents[8] = rows
    _SHAPES.pack_into(changed, _HEAD.size, *extents)
    return bytes(changed)


def view(buffer, torch):
    """Returns a tensor over a writable buffer that holds one with its header."""
    name, shape, offset, count = parse(buffer)
    kind = getattr(torch, name, None)
    if kind is None:
        raise TypeError(f"this torch has no type {name}")
    if math.prod(shape) * torch.empty([0], dtype=kind).element_size() != count:
        raise ValueError(f"the object is a tensor of shape {shape} with {count} bytes")
    if count == 0:
        return torch.empty(shape, dtype=kind)
    flat = torch.frombuffer(buffer, dtype=torch.uint8, count=count, offset=offset)
    if offset % flat.new_empty(0, dtype=kind).element_size():
        flat = flat.clone()
    return flat.view(kind).reshape(shape)


def deserialize(arg0, /):
    """_deserialize_tensor(arg0: bytes) -> object"""
    return view(bytearray(arg0), load_torch())
