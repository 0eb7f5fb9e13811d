"""Values that a bundle takes besides bytes and arrays, and arrays over memory of a pool."""

import ctypes
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np


@dataclass(frozen=True)
class BundleTransferPolicy:
    """Way in which payloads are put.

    `max_inflight_put` bounds the puts of one payload at a time; `put_mode` is `batch`, `parallel`, or `auto`: in
    parallel where that pays. `copy_mode` is `copy` (`store.put` for each chunk), `zero_copy` (from the caller's memory,
    which is registered for the call), or `auto`.
    """

    max_inflight_put: int = 1
    put_mode: str = "auto"
    copy_mode: str = "auto"

    def checked(self, max_inflight_put=None):
        """Returns the policy, with another bound if one is given; ValueError if it makes no sense."""
        inflight = self.max_inflight_put if max_inflight_put is None else max_inflight_put
        if inflight < 1:
            raise ValueError(f"max_inflight_put is 1 or more, not {inflight}")
        if self.put_mode not in ("auto", "batch", "parallel"):
            raise ValueError(f"put_mode is auto, batch or parallel, not {self.put_mode!r}")
        if self.copy_mode not in ("auto", "zero_copy", "copy"):
            raise ValueError(f"copy_mode is auto, zero_copy or copy, not {self.copy_mode!r}")
        return BundleTransferPolicy(inflight, self.put_mode, self.copy_mode)


@dataclass(frozen=True)
class Tensor:
    """A tensor of torch, as the store's tensor calls take it."""

    tensor: Any


@dataclass(frozen=True)
class TensorObject:
    """Registered memory with a tensor's header and bytes: source of a put, or destination of a get."""

    ptr: int
    size: int
    owner: Any = None
    batch_size: Optional[int] = None

    def __len__(self):
        if self.batch_size is None:
            raise TypeError("a tensor_object_buffer of a batch needs its batch_size")
        return self.batch_size


@dataclass(frozen=True)
class Pieces:
    """Memory in several pieces, one payload together. With a type and a shape it is read as an array."""

    buffers: tuple
    owners: tuple = ()
    dtype: Optional[str] = None
    shape: Optional[tuple] = None

    @property
    def nbytes(self):
        """Returns the length in bytes."""
        return sum(len(buffer) for buffer in self.buffers)


@dataclass(frozen=True)
class FlatArrays:
    """One-dimensional arrays of one type, one payload together, that are concatenated in staging memory."""

    arrays: list
    dtype: str
    shape: tuple

    @property
    def nbytes(self):
        """Returns the length in bytes."""
        return sum(array.nbytes for array in self.arrays)

    @classmethod
    def from_flat_arrays(cls, arrays, dtype, total_elems):
        """Returns the payload of arrays that are contiguous already."""
        return cls(list(arrays), np.dtype(dtype).str, (int(total_elems),))

    def pieces(self):
        """Returns the same as pieces."""
        views = tuple(bytes_of(array, "array") for array in self.arrays)
        return Pieces(views, tuple(self.arrays), self.dtype, self.shape)


@dataclass(frozen=True)
class Described:
    """A payload with further entries of its description in the manifest."""

    value: Any
    about: dict


@dataclass(frozen=True)
class RawDestination:
    """Memory as destination of a get, by address; `pre_registered` if its owner registered it with the store."""

    ptr: int
    size: int
    owner: Any = None
    pre_registered: bool = False


def described_type(dtype):
    """Returns the description of an array's type as JSON: text, or a list of the fields of a structured type. TypeError
    for a type that has none, or contains objects."""
    try:
        # A structured type without fields, or with fields that overlap, has no such list.
        described = dtype.descr if dtype.names is not None else dtype.str
        same = not dtype.hasobject and type_described(described) == dtype
    except ValueError:
        same = False
    if not same:
        raise TypeError(f"arrays of type {dtype} cannot be stored: the type has no description that is read back as itself")
    return described


def type_described(described):
    """Returns the type of a description; ValueError or TypeError if it is none."""
    if isinstance(described, str):
        return np.dtype(described)
    if not isinstance(described, list) or not all(isinstance(one, (list, tuple)) for one in described):
        raise ValueError(f"a type of arrays is described by text or a list of fields, not {described!r}")
    return np.lib.format.descr_to_dtype(_fields(described))


def _fields(described):
    """Returns fields as numpy describes them: tuples, which JSON has as lists."""
    fields = []
    for name, kind, *shape in described:
        name = tuple(name) if isinstance(name, list) else name
        kind = _fields(kind) if isinstance(kind, list) else kind
        fields.append((name, kind, *(tuple(sizes) for sizes in shape)))
    return fields


def check_unmasked(value, label):
    """TypeError for a masked array with values that are masked: its mask is not stored."""
    if np.ma.is_masked(value):
        raise TypeError(f"{label} is a masked array, whose mask is not stored: put data and mask as two arrays")


class PoolMemory:
    """A lease of a pool, released once: by `release`, or with the last array over it."""

    def __init__(self, lease):
        self._lease = lease

    def release(self):
        """Returns the memory to its pool. Arrays over it must not be used any more."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release()

    def __del__(self):
        self.release()


class PoolArray(np.ndarray):
    """Array over memory of a pool; views of it keep the memory, too."""

    @classmethod
    def over(cls, lease, size):
        """Returns the first `size` bytes of a lease, which the array owns from now on."""
        # By address: an exported buffer would forbid to release the lease while the array exists.
        memory = (ctypes.c_uint8 * size).from_address(int(lease.ptr))
        array = np.frombuffer(memory, np.uint8).view(cls)
        array._mooncake_pool_owner = PoolMemory(lease)
        return array

    def __array_finalize__(self, source):
        self._mooncake_pool_owner = getattr(source, "_mooncake_pool_owner", None)


def release(value):
    """Releases the memory of pools behind arrays, in any nesting of mappings, sequences and arrays of objects."""
    pending, seen = [value], set()
    while pending:
        value = pending.pop()
        owner = getattr(value, "_mooncake_pool_owner", None)
        if id(value if owner is None else owner) in seen:
            continue
        if owner is not None:
            seen.add(id(owner))
            owner.release()
        elif isinstance(value, np.ndarray):
            if value.dtype == object:
                seen.add(id(value))
                pending.extend(value.flat)
        elif isinstance(value, (list, tuple)):
            seen.add(id(value))
            pending.extend(value)
        elif hasattr(value, "values") and hasattr(value, "keys"):
            seen.add(id(value))
            pending.extend(value.values())


def bytes_of(value, label):
    """Returns a value's bytes as a memoryview; TypeError if it is no contiguous buffer."""
    try:
        view = memoryview(value)
    except TypeError:
        raise TypeError(f"{label} is bytes, an array or another buffer, not {type(value).__name__}") from None
    if view.format == "B" and view.ndim == 1 and view.c_contiguous:
        return view
    if not view.c_contiguous:
        raise TypeError(f"{label} is not contiguous")
    return view.cast("B") if view.nbytes else memoryview(b"")


def address_of(view):
    """Returns the address of a memoryview's bytes, also of a read-only one."""
    return np.frombuffer(view, np.uint8).ctypes.data
