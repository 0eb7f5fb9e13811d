"""Arguments and results of the calls of expert parallelism: torch tensors in host memory, or numpy arrays.

numpy has neither bfloat16 nor float8: arrays of uint16 (or `ml_dtypes.bfloat16`) and of uint8 stand for them.
"""

import sys

import numpy

from kvplane._buffers import is_tensor

#: Element types: name in torch, and in numpy.
_KINDS = {
    "bfloat16": numpy.uint16,
    "float8_e4m3fn": numpy.uint8,
    "float32": numpy.float32,
    "int32": numpy.int32,
    "int64": numpy.int64,
}


def kind_of(value):
    """The name of an element type: of an array as torch names what it stands for, if that is known."""
    name = str(value.dtype).rsplit(".", 1)[-1]
    return {"uint16": "bfloat16", "uint8": "float8_e4m3fn"}.get(name, name)


def array_of(value, name, kinds, dimensions):
    """Returns a numpy array over the memory of an argument.

    TypeError if it is neither tensor nor array, lies on a device or has another element type than `kinds`; ValueError
    if it has another number of dimensions or is not contiguous.
    """
    if is_tensor(value):
        if value.device.type != "cpu":
            raise TypeError(f"{name} is on {value.device}: these calls are for tensors in host memory")
        contiguous = value.is_contiguous()
    elif isinstance(value, numpy.ndarray):
        contiguous = value.flags.c_contiguous
    else:
        raise TypeError(f"{name} is a {type(value).__name__}, not a tensor or an array")
    kind = kind_of(value)
    if kind not in kinds:
        raise TypeError(f"{name} is of {value.dtype}, not {' or '.join(kinds)}")
    if len(value.shape) != dimensions:
        raise ValueError(f"{name} has {len(value.shape)} dimensions, not {dimensions}")
    if not contiguous:
        raise ValueError(f"{name} is not contiguous: its elements must lie one after another")
    return memory_of(value)


def memory_of(value):
    """Returns a numpy array over the memory of a tensor or array, whatever its layout."""
    kind = kind_of(value)
    if is_tensor(value):
        torch = sys.modules["torch"]
        value = value.detach()
        if kind in ("bfloat16", "float8_e4m3fn"):
            value = value.view(torch.int16 if kind == "bfloat16" else torch.uint8)
        value = value.numpy()
    return value.view(_KINDS[kind]) if kind in _KINDS else value


def like(sample, array, kind):
    """Returns a numpy array as a tensor of an element type if `sample` is one; else as it is.

    bfloat16 and float8 get the type of `sample`, if that is an array of the same.
    """
    if is_tensor(sample):
        torch = sys.modules["torch"]
        # torch has no unsigned words in older versions.
        tensor = torch.from_numpy(array.view(numpy.int16) if kind == "bfloat16" else array)
        return tensor.view(getattr(torch, kind)) if kind in ("bfloat16", "float8_e4m3fn") else tensor
    return array.view(sample.dtype) if kind_of(sample) == kind else array


def bytes_of(array):
    """Returns the rows of a contiguous two-dimensional array as bytes."""
    return array.view(numpy.uint8).reshape(array.shape[0], array.shape[1] * array.itemsize)
