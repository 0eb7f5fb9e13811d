"""Conversion of values to objects with the buffer protocol."""

from typing import Any


def exporter(value: Any) -> Any:
    """Returns `value`, or an object over the same memory that has the buffer protocol.

    Torch tensors have it through numpy, whatever their type, and so have objects that support DLPack.
    """
    if isinstance(value, (bytes, bytearray, memoryview)):
        return value
    if hasattr(value, "data_ptr") and hasattr(value, "element_size"):
        return _of_tensor(value)
    if hasattr(value, "__dlpack__") and not hasattr(value, "__array_interface__"):
        import numpy

        return numpy.from_dlpack(value)
    return value


def _of_tensor(tensor: Any) -> Any:
    import torch

    if tensor.device.type != "cpu":
        raise ValueError(f"the tensor is on {tensor.device}: copy it to host memory first")
    if not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous: call .contiguous() first")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
