"""Reads of a structured object's members: arrays, tensors and bytes, whole or by rows, into memory of their own or the
caller's."""

import ctypes
import io
import math
from weakref import WeakSet

import numpy as np

from mooncake import _tensors
from mooncake._bundle_moves import Destination, fresh
from mooncake._bundle_values import RawDestination, TensorObject, type_described
from mooncake._column_codecs import load_torch

#: Members up to this length share memory, in blocks of at most `_BLOCK_BYTES`.
_SHARED_BYTES = 4 << 20
_BLOCK_BYTES = 64 << 20
_ALIGNMENT = 64


class Stage:
    """One structured object that is read: its manifest and the specifications of its members."""

    def __init__(self, manifest, metadata, specs):
        self.metadata = metadata
        self.payloads = manifest["buffers"]
        self._specs = specs

    def spec(self, name):
        """Returns the specification of a member; KeyError if there is none of that name."""
        if name not in self.payloads:
            raise KeyError(f"unknown bundle buffers: {[name]}")
        return self._specs.get(name, {"encoding": "bytes"})


class Block:
    """Memory for several members."""

    def __init__(self):
        self._wanted = []
        self._size = 0

    def take(self, size):
        """Reserves bytes; returns their offset, or None if the block is full."""
        if self._size and self._size + size > _BLOCK_BYTES:
            return None
        offset, self._size = self._size, -(-(self._size + size) // _ALIGNMENT) * _ALIGNMENT
        return offset

    def memory(self):
        """Allocates the block, once."""
        if self._wanted == []:
            self._wanted = [fresh(self._size)]
        return self._wanted[0]


class _Read:
    """One member's read: where its bytes go, which spans of the payload these are, and what they become."""

    def __init__(self, name, spans, size, finish, place=None, pooled=False):
        self.name = name
        self.spans = spans
        self.size = size
        #: Returns the value, from the array of the bytes that were allocated here (None for memory that existed). It must
        #: not refer to this read: a cycle of references would keep the memory.
        self.finish = finish
        #: (destination, offset) in memory that exists; None: to be allocated.
        self.place = place
        self._existed = place is not None
        #: True if the value keeps memory of a pool until it is released.
        self.pooled = pooled

    def value(self):
        """Returns what was read, when all of it is there."""
        if self._existed:
            return self.finish(None)
        place, offset = self.place
        return self.finish(place.owner[offset : offset + self.size])


def row_spans(rows, size, at=0):
    """Returns the ranges of rows of `size` bytes behind the offset `at`, adjacent ones merged."""
    if isinstance(rows, range) and rows.step == 1:
        return [(at + rows.start * size, at + rows.stop * size)] if len(rows) and size else []
    spans = []
    for row in rows if size else ():
        begin = at + row * size
        if spans and spans[-1][1] == begin:
            spans[-1] = (spans[-1][0], begin + size)
        else:
            spans.append((begin, begin + size))
    return spans


class MemberReads:
    """Reads of members of structured objects, all of a call in as few requests as possible."""

    def __init__(self, bundles, moves):
        self._bundles = bundles
        self._moves = moves

    def read(self, stage, names, rows=None, destinations=None, raw=(), held=None):
        """Returns the values of members by name.

        `rows` maps names to the rows to read, `destinations` names to memory; members in `raw` that are bytes are
        returned as an array of bytes without a copy. `held` are the leases of a pool that the caller has for the same
        call, a `WeakSet`, which gets those of this one.
        """
        rows, destinations = rows or {}, destinations or {}
        values, reads, tensors = dict.fromkeys(names), [], []
        alone = len(values) == 1
        for name in values:
            spec, payload = stage.spec(name), stage.payloads[name]
            arguments = (name, payload, spec, rows.get(name), destinations.get(name))
            encoding = spec.get("encoding", "bytes")
            if encoding == "bytes":
                reads.append(self._bytes(*arguments, name in raw))
            elif encoding == "ndarray":
                reads.append(self._array(*arguments))
            elif encoding != "torch_tensor":
                raise ValueError(f"unsupported structured field encoding: {encoding!r} of {name}")
            elif payload.get("kind") == "tensor" and rows.get(name) is None and destinations.get(name) is None:
                tensors.append(name)
            else:
                reads.append(self._tensor(*arguments))
        array = alone and stage.spec(next(iter(values))).get("encoding") == "ndarray"
        ranges = any(isinstance(destinations.get(name), (TensorObject, RawDestination)) for name in values)
        self._lease([one for one in reads if one.pooled], WeakSet() if held is None else held)
        self._move(stage, reads, array, ranges)
        for one in reads:
            values[one.name] = one.value()
        if tensors:
            keys = [stage.payloads[name]["key"] for name in tensors]
            values.update(zip(tensors, self._moves.get_tensors(keys)))
        return values

    def spans(self, stage, name, spans):
        """Returns ranges of a member's bytes, one behind the other."""
        into = fresh(sum(end - begin for begin, end in spans))
        self._moves.get([(Destination.of(into), self._bundles.pieces(stage.payloads[name], spans))])
        return into

    def bytes(self, payload):
        """Returns all bytes of a payload."""
        into = fresh(payload["bytes"])
        self._moves.get([(Destination.of(into), self._bundles.pieces(payload, [(0, payload["bytes"])]))])
        return into

    def _lease(self, reads, held):
        """Finds places in memory of a pool, if there is one."""
        for one, array in zip(reads, self._moves.leases([one.size for one in reads], held)):
            if array is not None:
                one.place = Destination.of(array), 0

    def _move(self, stage, reads, array, ranges):
        blocks, placed = [], {}
        for one in reads:
            if one.place is None:
                one.place = self._allocate(one, blocks, len(reads))
        for one in reads:
            place, offset = one.place if not isinstance(one.place[0], Block) else self._in_block(one)
            pieces = self._bundles.pieces(stage.payloads[one.name], one.spans, offset)
            placed.setdefault(id(place.owner), (place, []))[1].extend(pieces)
            one.place = (place, offset)
        self._moves.get(list(placed.values()), array, ranges)

    def _allocate(self, one, blocks, count):
        if one.size > _SHARED_BYTES or count == 1:
            return Destination.of(fresh(one.size)), 0
        offset = blocks[-1].take(one.size) if blocks else None
        if offset is None:
            blocks.append(Block())
            offset = blocks[-1].take(one.size)
        return blocks[-1], offset

    def _in_block(self, one):
        block, offset = one.place
        return Destination.of(block.memory()), offset

    # --- bytes and arrays ------------------------------------------------------------------------------------------

    def _bytes(self, name, payload, spec, rows, destination, raw):
        if rows is not None:
            raise ValueError(f"structured bytes member {name} does not support slicing")
        if destination is not None:
            raise ValueError(f"structured bytes member {name} does not support destinations")
        size = payload["bytes"]

        def finish(memory):
            pooled = getattr(memory, "_mooncake_pool_owner", None) is not None
            return memory if raw or pooled else memory.tobytes()

        return _Read(name, [(0, size)], size, finish, pooled=True)

    def _array(self, name, payload, spec, rows, destination):
        dtype, shape = spec.get("dtype"), spec.get("shape")
        if not isinstance(dtype, (str, list)) or not isinstance(shape, list):
            raise ValueError(f"structured ndarray member {name} has no dtype or no shape")
        dtype, shape = type_described(dtype), tuple(map(int, shape))
        if dtype.hasobject or dtype.itemsize * math.prod(shape) != payload["bytes"]:
            raise ValueError(f"structured ndarray member {name} is not of {payload['bytes']} bytes: {dtype}, {shape}")
        if rows is None:
            spans = [(0, payload["bytes"])] if payload["bytes"] else []
        else:
            spans = row_spans(rows, payload["bytes"] // shape[0] if shape[0] else 0)
            shape = (len(rows), *shape[1:])
        size = dtype.itemsize * math.prod(shape)
        if destination is None:
            array = lambda memory: memory.view(dtype).reshape(shape)
            # An element of the array is a copy: memory of a pool is returned with the array.
            finish = (lambda memory: array(memory)[()]) if spec.get("scalar") else array
            return _Read(name, spans, size, finish, pooled=True)
        target = _array_at(name, destination, dtype, shape)
        registered = isinstance(destination, RawDestination) and destination.pre_registered
        place = Destination(target.ctypes.data, target.nbytes, target, registered)
        return _Read(name, spans, size, lambda _: target, (place, 0))

    # --- tensors ---------------------------------------------------------------------------------------------------

    def _tensor(self, name, payload, spec, rows, destination):
        if destination is not None and not isinstance(destination, (TensorObject, RawDestination)):
            if not spec.get("nested") and payload.get("format") != "torch_save":
                raise ValueError(f"structured tensor member {name} takes tensor_object_buffer or raw_destination")
        if spec.get("nested") or payload.get("format") == "torch_save":
            return self._saved(name, payload, spec, rows, destination)
        if rows is not None:
            return self._tensor_rows(name, payload, spec, rows, destination)
        size = payload["bytes"]
        if destination is None:
            return _Read(name, [(0, size)], size, lambda memory: _tensors.view(memory, load_torch("a tensor")))
        place = _tensor_place(name, destination, size)
        finish = lambda _: _tensor_in(destination, size, spec)
        return _Read(name, [(0, size)], size, finish, (place, 0))

    def _saved(self, name, payload, spec, rows, destination):
        """Reads a nested tensor, or one that was put as a file of torch: whole, and selects rows afterwards."""
        if destination is not None:
            raise ValueError(f"structured tensor member {name} is nested or a file, and does not support destinations")

        def finish(data):
            torch = load_torch("a tensor")
            if spec.get("nested"):
                return _nested(data, spec, rows, torch)
            tensor = torch.load(io.BytesIO(data.tobytes()), weights_only=True)
            return tensor if rows is None else tensor[list(rows)]

        return _Read(name, [(0, payload["bytes"])], payload["bytes"], finish)

    def _tensor_rows(self, name, payload, spec, rows, destination):
        offset, shape = payload.get("metadata_bytes"), spec.get("shape")
        if not isinstance(offset, int) or not isinstance(shape, list) or not shape:
            raise ValueError(f"structured tensor member {name} has no rows, or no description of them")
        head = fresh(offset)
        self._moves.get([(Destination.of(head), self._bundles.pieces(payload, [(0, offset)]))], ranges=True)
        head = _tensors.with_rows(head.tobytes(), len(rows))
        width = (payload["bytes"] - offset) // shape[0] if shape[0] else 0
        size = offset + width * len(rows)
        spans = row_spans(rows, width, offset)
        if destination is None:
            memory = fresh(size)
            memory[:offset] = np.frombuffer(head, np.uint8)
            finish = lambda _: _tensors.view(memory, load_torch("a tensor"))
            return _Read(name, spans, size, finish, (Destination.of(memory), offset))
        place = _tensor_place(name, destination, size)
        ctypes.memmove(destination.ptr, head, offset)
        return _Read(name, spans, size, lambda _: _tensor_in(destination, size, spec), (place, offset))


def _check_room(name, destination, size):
    """ValueError if memory given by its address cannot hold a member."""
    if destination.size < size:
        raise ValueError(f"the destination of {name} has {destination.size} bytes, and {size} are needed")
    if size and not 0 < destination.ptr <= (1 << 64) - size:
        raise ValueError(f"the destination of {name} is at {destination.ptr:#x}, where no memory is")


def _array_at(name, destination, dtype, shape):
    """Returns a caller's destination as an array; ValueError if it does not fit."""
    if isinstance(destination, RawDestination):
        size = dtype.itemsize * math.prod(shape)
        _check_room(name, destination, size)
        memory = (ctypes.c_uint8 * size).from_address(destination.ptr)
        memory.owner = destination.owner
        return np.frombuffer(memory, np.uint8, size).view(dtype).reshape(shape) if size else np.empty(shape, dtype)
    if not isinstance(destination, np.ndarray):
        raise TypeError(f"the destination of {name} is an array or raw_destination, not {type(destination).__name__}")
    if destination.shape != shape:
        raise ValueError(f"{name}: destination shape mismatch: {destination.shape}, and {shape} is needed")
    if destination.dtype != dtype:
        raise ValueError(f"{name}: destination dtype mismatch: {destination.dtype}, and {dtype} is needed")
    if not destination.flags.c_contiguous or not destination.flags.writeable:
        raise ValueError(f"the destination of {name} is not contiguous, or not writeable")
    return destination


def _tensor_place(name, destination, size):
    _check_room(name, destination, size)
    registered = isinstance(destination, RawDestination) and destination.pre_registered
    return Destination(destination.ptr, size, destination, registered)


def _tensor_in(destination, size, spec):
    """Returns what a read into a caller's memory returns: a tensor over it where its type is known."""
    if isinstance(destination, RawDestination) or "dtype" not in spec:
        return destination
    memory = (ctypes.c_uint8 * size).from_address(destination.ptr)
    memory.owner = destination.owner
    return _tensors.view(memory, load_torch("a tensor"))


def _nested(data, spec, rows, torch):
    """Returns a jagged tensor from the tensors that it consists of; ValueError if they are inconsistent."""
    sizes = spec.get("part_bytes")
    if spec.get("format") != "tensor_parts" or not isinstance(sizes, list):
        whole = torch.load(io.BytesIO(data.tobytes()), weights_only=True)
    else:
        if len(sizes) != (3 if spec.get("has_lengths") else 2) or sum(sizes) != len(data):
            raise ValueError("the parts of a nested tensor are not those that its description names")
        ends = np.cumsum(sizes)
        parts = [_tensors.view(bytearray(data[end - size : end]), torch) for size, end in zip(sizes, ends)]
        lengths = parts[2] if len(parts) == 3 else None
        dim = int(spec.get("ragged_idx", 1))
        whole = torch.nested.nested_tensor_from_jagged(parts[0], offsets=parts[1], lengths=lengths, jagged_dim=dim)
    if rows is None:
        return whole
    some, dim = whole.unbind(), int(getattr(whole, "_ragged_idx", 1))
    chosen = [some[row] for row in rows]
    values = torch.cat(chosen, dim - 1) if chosen else whole.values().narrow(dim - 1, 0, 0)
    offsets = torch.tensor(np.cumsum([0, *(part.shape[dim - 1] for part in chosen)]), dtype=torch.int64)
    return torch.nested.nested_tensor_from_jagged(values, offsets=offsets, jagged_dim=dim)
