"""The part of torch that the tensor calls use, for machines without torch: contiguous tensors in host memory."""

import ctypes
import math
import types


class dtype:
    """An element type."""

    def __init__(self, name, size):
        self.name, self.itemsize = name, size

    def __repr__(self):
        return f"torch.{self.name}"


_SIZES = {"float32": 4, "float64": 8, "int8": 1, "uint8": 1, "int16": 2, "int32": 4, "int64": 8, "bool": 1}
_SIZES.update({"float16": 2, "bfloat16": 2, "complex64": 8})
for _name, _size in _SIZES.items():
    globals()[_name] = dtype(_name, _size)


class Tensor:
    """A tensor over memory that another object owns; `gaps` marks one that is not contiguous."""

    def __init__(self, keeper, address, shape, kind, gaps=False, device="cpu"):
        self._keeper, self._address, self.shape, self.dtype, self._gaps = keeper, address, tuple(shape), kind, gaps
        self.device = types.SimpleNamespace(type=device)

    def dim(self):
        return len(self.shape)

    def numel(self):
        return math.prod(self.shape)

    def element_size(self):
        return self.dtype.itemsize

    def data_ptr(self):
        return self._address

    def raw(self):
        """The tensor's bytes."""
        return ctypes.string_at(self._address, self.numel() * self.element_size())

    def detach(self):
        return self

    def cpu(self):
        return of(self.raw(), self.shape, self.dtype)

    def is_contiguous(self):
        return not self._gaps

    def contiguous(self):
        return of(self.raw(), self.shape, self.dtype) if self._gaps else self

    clone = cpu

    def new_empty(self, shape, dtype):
        return empty([shape] if isinstance(shape, int) else shape, dtype)

    def view(self, kind):
        count = self.numel() * self.element_size() // kind.itemsize
        return Tensor(self._keeper, self._address, (count,), kind)

    def reshape(self, *shape):
        shape = shape[0] if isinstance(shape[0], (list, tuple)) else shape
        assert math.prod(shape) == self.numel(), (shape, self.shape)
        return Tensor(self._keeper, self._address, shape, self.dtype)

    def narrow(self, axis, start, length):
        axis %= self.dim()
        assert 0 <= start <= start + length <= self.shape[axis], (start, length, self.shape)
        inner = math.prod(self.shape[axis + 1 :]) * self.element_size()
        row, raw = self.shape[axis] * inner, self.raw()
        rows = [raw[at * row + start * inner :][: length * inner] for at in range(math.prod(self.shape[:axis]))]
        return of(b"".join(rows), (*self.shape[:axis], length, *self.shape[axis + 1 :]), self.dtype)

    def tensor_split(self, parts, axis):
        axis %= self.dim()
        least, more = divmod(self.shape[axis], parts)
        inner = math.prod(self.shape[axis + 1 :]) * self.element_size()
        outer, row, raw, start, made = math.prod(self.shape[:axis]), self.shape[axis] * inner, self.raw(), 0, []
        for part in range(parts):
            count = least + (part < more)
            rows = [raw[at * row + start * inner :][: count * inner] for at in range(outer)]
            made.append(of(b"".join(rows), (*self.shape[:axis], count, *self.shape[axis + 1 :]), self.dtype))
            start += count
        return made


def of(raw, shape, kind):
    """Builds a tensor from bytes."""
    keeper = (ctypes.c_char * max(len(raw), 1)).from_buffer_copy(raw.ljust(1, b"\0"))
    return Tensor(keeper, ctypes.addressof(keeper), shape, kind)


def empty(shape, dtype):
    return of(bytes(math.prod(shape) * dtype.itemsize), shape, dtype)


def frombuffer(buffer, dtype, count, offset):
    view = memoryview(buffer)
    assert not view.readonly and offset + count * dtype.itemsize <= view.nbytes
    keeper = (ctypes.c_char * view.nbytes).from_buffer(buffer)
    return Tensor(keeper, ctypes.addressof(keeper) + offset, (count,), dtype)


def cat(tensors, axis=0):
    first = tensors[0]
    axis %= first.dim()
    outer, rows = math.prod(first.shape[:axis]), []
    for at in range(outer):
        for one in tensors:
            row = math.prod(one.shape[axis:]) * one.element_size()
            rows.append(one.raw()[at * row :][:row])
    shape = (*first.shape[:axis], sum(one.shape[axis] for one in tensors), *first.shape[axis + 1 :])
    return of(b"".join(rows), shape, first.dtype)
