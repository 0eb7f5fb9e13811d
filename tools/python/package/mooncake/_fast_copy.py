"""Concatenation of arrays in memory, under the name of Mooncake's module."""

import ctypes


def concat_arrays_into(arrays, dest_ptr, dest_size, start=0, count=-1, nthreads=1, /):
    """Copies `arrays[start:start+count]` one after the other to an address with space for `dest_size` bytes, without
    the GIL; a negative count takes all of the rest. Returns the number of bytes copied. A single thread copies:
    `nthreads` is an upper bound."""
    if not isinstance(arrays, list):
        raise TypeError(f"concat_arrays_into(): arrays is a list, not {type(arrays).__name__}")
    start = min(max(start, 0), len(arrays))
    chosen = arrays[start:] if count < 0 else arrays[start : start + count]
    views = []
    for index, array in enumerate(chosen, start):
        try:
            view = memoryview(array)
        except TypeError:
            raise TypeError(f"arrays[{index}] is not an ndarray") from None
        if not view.c_contiguous:
            raise ValueError(f"arrays[{index}] is not C-contiguous")
        views.append((array, view.nbytes))
    needed = sum(size for _, size in views)
    if needed > dest_size:
        raise ValueError(f"destination buffer too small: need {needed} bytes, got {dest_size}")
    from kvplane import _native

    at = dest_ptr
    for array, size in views:
        if size:
            ctypes.memmove(at, _native.buffer_address(array, False)[0], size)
            at += size
    return needed
