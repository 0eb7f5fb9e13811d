"""Elements behind the objects that callers pass to collectives: address, number and type."""

import math
import re
import struct
import sys
from typing import Any, List, NamedTuple, Optional, Sequence

from kvplane import _native
from kvplane._buffers import _has_buffer, _is_dense, is_tensor
from kvplane._errors import InvalidArgument

#: Types of elements that collectives reduce, by kind and size as in numpy's type strings.
_TYPES = {
    "b1": "bool",
    "u1": "u8",
    "i1": "i8",
    "i2": "i16",
    "i4": "i32",
    "i8": "i64",
    "f2": "f16",
    "f4": "f32",
    "f8": "f64",
}
#: Unsigned types, with the signed ones of the same size: sums, products and bit operations of both have the same bits.
_UNSIGNED = {"u2": "i16", "u4": "i32", "u8": "i64"}
#: Types by torch's names.
_TORCH = {
    "bool": "b1",
    "uint8": "u1",
    "int8": "i1",
    "int16": "i2",
    "int32": "i4",
    "int64": "i8",
    "uint16": "u2",
    "uint32": "u4",
    "uint64": "u8",
    "float16": "f2",
    "float32": "f4",
    "float64": "f8",
}
_SIGN_FREE = ("sum", "product", "and", "or", "xor")
#: Kinds of the buffer protocol's formats.
_KINDS = {"?": "b", "e": "f", "f": "f", "d": "f", "c": "u"}
REDUCTIONS = ("sum", "avg", "min", "max", "product", "and", "or", "xor")
_NATIVE_ORDER = "<" if sys.byteorder == "little" else ">"


class Elements(NamedTuple):
    """Contiguous memory of elements."""

    address: int
    length: int
    #: Kind and size as in numpy's type strings, `bf16`, or another name of a type that is not reduced.
    kind: str
    item: int
    #: Keeps the memory.
    owner: Any

    @property
    def size(self) -> int:
        """Returns the length in bytes."""
        return self.length * self.item

    def part(self, begin: int, end: int) -> "Elements":
        """Returns the elements from `begin` to `end`."""
        return self._replace(address=self.address + begin * self.item, length=end - begin)

    def reduced(self, reduction: str) -> str:
        """Returns the type by which a collective reduces the elements. InvalidArgument if it cannot."""
        if reduction not in REDUCTIONS:
            raise InvalidArgument(-600, f"{reduction!r} is no reduction: it is one of {', '.join(REDUCTIONS)}")
        if self.kind == "bf16":
            return "bf16"
        found = _TYPES.get(self.kind)
        if found is None and reduction in _SIGN_FREE:
            found = _UNSIGNED.get(self.kind)
        if found is None:
            what = f"elements of type {self.kind} have no {reduction}: convert them, to one of "
            raise InvalidArgument(-600, what + ", ".join([*_TYPES.values(), "bf16"]))
        return found

    def moved(self) -> "Elements":
        """Returns the elements in the form in which a collective moves them without a reduction: those of a type that
        collectives know, or bytes."""
        if self.kind == "bf16" or self.kind in _TYPES:
            return self
        return self._replace(kind="u1", item=1, length=self.size)

    @property
    def data_type(self) -> str:
        """Returns the type's name in collectives; of `moved` elements."""
        return "bf16" if self.kind == "bf16" else _TYPES[self.kind]


def elements(value: Any, name: str, writable: bool = False) -> Elements:
    """Returns the elements of an array, a tensor in host memory, or another object with the buffer protocol or
    `__array_interface__`. InvalidArgument, with the parameter's name, if they are not contiguous, not of the host, or
    read-only and to be written."""
    if is_tensor(value):
        return _of_tensor(value, name)
    described = getattr(value, "__array_interface__", None)
    if described is not None:
        return _of_array(value, described, name, writable)
    if not _has_buffer(value):
        what = f"{name} is {type(value).__name__}: it needs the buffer protocol or __array_interface__"
        raise InvalidArgument(-600, what)
    view = memoryview(value)
    if not view.c_contiguous:
        raise _not_contiguous(name, view.shape)
    if writable and view.readonly:
        raise _read_only(name)
    address = _native.buffer_address(value, writable)[0] if view.nbytes else 0
    kind = _kind(view.format, view.itemsize)
    # A view keeps a bytearray from being resized.
    return Elements(address, view.nbytes // view.itemsize, kind, view.itemsize, view)


def _not_contiguous(name: str, shape: Optional[Sequence[int]]) -> InvalidArgument:
    what = f"{name} of shape {tuple(shape or ())} is not contiguous: make it so first (numpy.ascontiguousarray,"
    return InvalidArgument(-600, what + " Tensor.contiguous)")


def _read_only(name: str) -> InvalidArgument:
    return InvalidArgument(-600, f"{name} is read-only, and the collective writes to it")


def _kind(form: str, size: int) -> str:
    code = form[-1:]
    if form[:1] in ("<", ">", "!") and struct.pack(form[0] + "H", 1) != struct.pack("=H", 1) and size > 1:
        return form
    if len(form.lstrip("@=<>!")) != 1:
        return form
    kind = _KINDS.get(code, "u" if code in "BHILQN" else "i" if code in "bhilqn" else "")
    return f"{kind}{size}" if kind else form


def _of_tensor(value: Any, name: str) -> Elements:
    if value.device.type != "cpu":
        raise InvalidArgument(-600, f"{name} is on {value.device}: copy it to host memory first")
    if not value.is_contiguous():
        raise _not_contiguous(name, value.shape)
    kind = str(value.dtype).rpartition(".")[2]
    kind = "bf16" if kind == "bfloat16" else _TORCH.get(kind, kind)
    return Elements(value.data_ptr(), value.numel(), kind, value.element_size(), value)


def _of_array(value: Any, described: Any, name: str, writable: bool) -> Elements:
    shape, form = described["shape"], described["typestr"]
    length = re.match(r"[0-9]+", form[2:])
    if form[1] == "O" or length is None:
        raise InvalidArgument(-600, f"{name} has elements of type {form}: those of Python objects are not moved")
    item = int(length[0])
    strides = described.get("strides")
    if strides is not None and not _is_dense(shape, strides, item):
        raise _not_contiguous(name, shape)
    data = described.get("data")
    if data is None:
        raise InvalidArgument(-600, f"{name} has an __array_interface__ without an address")
    address, is_read_only = data
    if writable and is_read_only:
        raise _read_only(name)
    kind = form[1:]
    if form[0] not in ("|", _NATIVE_ORDER) and item > 1:
        kind = form
    elif form[1] == "V":
        # Types of ml_dtypes have no kind of their own.
        kind = getattr(getattr(value, "dtype", None), "name", form)
        kind = "bf16" if kind == "bfloat16" else kind
    return Elements(address, math.prod(shape), kind, item, value)


def like(value: Any, shape: Sequence[int]) -> Any:
    """Returns a new array of zeros with the type of `value` and this shape; one of torch for a tensor."""
    if is_tensor(value):
        return value.new_zeros(tuple(shape))
    import numpy

    return numpy.zeros(tuple(shape), numpy.asarray(value).dtype)


def shape_of(value: Any) -> List[int]:
    """Returns the extents of an array."""
    shape = getattr(value, "shape", None)
    return list(memoryview(value).shape or ()) if shape is None else list(shape)
