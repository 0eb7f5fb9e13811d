"""Ranges of members that are read again and again: planned once, and bound to each new object of the same layout."""

import json
import math
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from mooncake._bundle_moves import Destination, Piece
from mooncake._bundle_values import RawDestination, type_described

_ADDRESS_END = 1 << 64


@dataclass(frozen=True)
class StructuredMemberRange:
    """Bytes of a member, and the place for them in a destination. Both offsets, the length and the destination are
    multiples of `alignment`, a power of two, and of the member's element."""

    member_name: str
    source_byte_offset: int
    byte_length: int
    destination_byte_offset: int
    alignment: int = 1


class PreparedRangeLayoutChanged(ValueError):
    """The member has another type, shape or chunks than the one that the ranges were prepared for."""


@dataclass(frozen=True)
class PreparedStructuredMemberRanges:
    """Ranges of one member by chunk, without keys and addresses. `prepare_member_ranges` makes it."""

    member_name: str
    field_signature: str
    chunk_bytes: tuple
    chunk_indices: tuple
    destination_offsets: tuple
    source_offsets: tuple
    sizes: tuple
    destination_bytes: int
    alignment: int

    def __post_init__(self):
        if not isinstance(self.member_name, str) or not self.member_name:
            raise ValueError("prepared ranges have the name of a member")
        if not isinstance(self.field_signature, str):
            raise TypeError("prepared ranges have the signature of a member, as text")
        columns = (self.destination_offsets, self.source_offsets, self.sizes)
        for column in (self.chunk_bytes, self.chunk_indices, *columns):
            if not isinstance(column, tuple):
                raise TypeError("columns of prepared ranges are tuples")
        if not self.chunk_indices or any(len(column) != len(self.chunk_indices) for column in columns):
            raise ValueError("columns of prepared ranges are not empty and of one length")
        if _integer(self.alignment, "an alignment") <= 0 or _integer(self.destination_bytes, "a length") <= 0:
            raise ValueError("the alignment and the length of prepared ranges are above 0")
        if self.alignment % _width(json.loads(self.field_signature)):
            raise ValueError("the alignment of prepared ranges is a multiple of the member's element")
        places = []
        for index, *some in zip(self.chunk_indices, *columns):
            if not 0 <= _integer(index, "a chunk") < len(self.chunk_bytes):
                raise ValueError("prepared ranges name a chunk that does not exist")
            if any(not isinstance(column, tuple) for column in some):
                raise TypeError("columns of prepared ranges are tuples of tuples")
            if not some[0] or len({len(column) for column in some}) > 1:
                raise ValueError("ranges of a chunk are not empty and of one length")
            for to, of, size in zip(*some):
                if min(_integer(to, "an offset"), _integer(of, "an offset")) < 0 or _integer(size, "a length") <= 0:
                    raise ValueError("offsets of prepared ranges are not below 0, and lengths above")
                if of + size > self.chunk_bytes[index] or to + size > self.destination_bytes:
                    raise ValueError("a prepared range is past the end of its chunk or destination")
                places.append((to, to + size))
        _check_apart(places)

    def pieces(self, keys):
        """Returns the pieces to read, for the keys of the member's chunks."""
        found = []
        for index, *columns in zip(self.chunk_indices, self.source_offsets, self.sizes, self.destination_offsets):
            found += [Piece(keys[index], of, size, to, False) for of, size, to in zip(*columns)]
        return found


def _integer(value, label):
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{label} of a range is a number, not {value!r}")
    return int(value)


def _check_apart(places):
    places = sorted(places)
    if any(after[0] < before[1] for before, after in zip(places, places[1:])):
        raise ValueError("structured ranged destinations overlap")


def _width(spec):
    """Returns the bytes of a member's element; ValueError if it has none of a fixed length."""
    encoding = spec.get("encoding", "bytes")
    if encoding == "bytes":
        return 1
    if encoding != "ndarray":
        raise ValueError(f"ranges are of members that are bytes or arrays, not {encoding!r}")
    dtype = type_described(spec["dtype"])
    if dtype.hasobject or dtype.itemsize <= 0:
        raise ValueError(f"ranges of a member of type {dtype}")
    return dtype.itemsize


def _signature(spec):
    return json.dumps(spec, sort_keys=True, separators=(",", ":"))


def _check_destination(name, destination, size=1, alignment=1):
    if not isinstance(destination, RawDestination):
        kind = type(destination).__name__
        raise TypeError(f"the destination of {name} is a pre_registered raw_destination, not {kind}")
    address, room = _integer(destination.ptr, "an address"), _integer(destination.size, "a length")
    if destination.owner is None or destination.pre_registered is not True:
        raise ValueError(f"the destination of {name} is a pre_registered raw_destination with an owner")
    if address <= 0 or room < size or address + room > _ADDRESS_END:
        raise ValueError(f"the destination of {name} has {room} bytes at {address:#x}, and {size} are needed")
    if address % alignment:
        raise ValueError(f"the destination of {name} must be aligned to {alignment} bytes")


def prepare(stage, selected, ranges, destinations):
    """Returns prepared ranges by member. KeyError for a member that is not selected, ValueError for ranges that do not
    fit, are not aligned, or overlap."""
    ranges = tuple(ranges)
    if not ranges:
        raise ValueError("there are no ranges")
    by_member, places = {}, []
    for one in ranges:
        if not isinstance(one, StructuredMemberRange):
            raise TypeError(f"ranges are StructuredMemberRange, not {type(one).__name__}")
        if one.member_name not in selected:
            raise KeyError(f"a range is of a member that is not selected: {one.member_name!r}")
        by_member.setdefault(one.member_name, []).append(one)
    if set(destinations) != set(by_member):
        raise ValueError("destinations and the members of ranges are not the same")
    prepared = {}
    for name, some in by_member.items():
        spec, destination = stage.spec(name), destinations[name]
        _check_destination(name, destination)
        prepared[name] = _prepare_member(name, spec, stage.payloads[name], some, destination)
        address = destination.ptr
        places += [(address + one.destination_byte_offset, address + _end(one)) for one in some]
    _check_apart(places)
    return prepared


def _end(one):
    return one.destination_byte_offset + one.byte_length


def _prepare_member(name, spec, payload, ranges, destination):
    sizes = tuple(chunk["bytes"] for chunk in payload["chunks"])
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    width, parts, aligned = _width(spec), {}, 1
    for one in ranges:
        of, to = _integer(one.source_byte_offset, "an offset"), _integer(one.destination_byte_offset, "an offset")
        length, alignment = _integer(one.byte_length, "a length"), _integer(one.alignment, "an alignment")
        if min(of, to) < 0 or length <= 0:
            raise ValueError("offsets of ranges are not below 0, and lengths above")
        if alignment <= 0 or alignment & (alignment - 1):
            raise ValueError(f"the alignment of a range is a power of two, not {alignment}")
        alignment = math.lcm(width, alignment)
        if any(value % alignment for value in (of, to, length, destination.ptr)):
            raise ValueError(f"a range of {name} must be aligned to {alignment} bytes")
        if of + length > starts[-1] or to + length > destination.size:
            raise ValueError(f"a range of {name} is past the end of the member or of the destination")
        aligned = math.lcm(aligned, alignment)
        index, end = bisect_right(starts, of) - 1, of + length
        while of < end:
            size = min(end, starts[index + 1]) - of
            if size:
                parts.setdefault(index, []).append((of - starts[index], to, size))
            of, to, index = of + size, to + size, index + 1
    columns = [[], [], []]
    for some in parts.values():
        merged = _merged(sorted(some))
        for column, values in zip(columns, zip(*merged)):
            column.append(values)
    of, to, lengths = map(tuple, columns)
    return PreparedStructuredMemberRanges(
        name, _signature(spec), sizes, tuple(parts), to, of, lengths, max(map(_end, ranges)), math.lcm(aligned, width)
    )


def _merged(parts):
    """Returns ranges with those merged that follow each other on both sides."""
    merged = [parts[0]]
    for of, to, size in parts[1:]:
        before = merged[-1]
        if (before[0] + before[2], before[1] + before[2]) == (of, to):
            merged[-1] = (*before[:2], before[2] + size)
        else:
            merged.append((of, to, size))
    return merged


def bind(stage, selected, prepared, destination):
    """Returns the destination and the pieces to read of prepared ranges; `PreparedRangeLayoutChanged` if the member is
    another than that they were prepared for."""
    if not isinstance(prepared, PreparedStructuredMemberRanges):
        raise TypeError(f"prepared ranges are PreparedStructuredMemberRanges, not {type(prepared).__name__}")
    name = prepared.member_name
    if name not in selected:
        raise KeyError(f"prepared ranges are of a member that is not selected: {name!r}")
    spec, chunks = stage.spec(name), stage.payloads[name]["chunks"]
    if _signature(spec) != prepared.field_signature or tuple(c["bytes"] for c in chunks) != prepared.chunk_bytes:
        raise PreparedRangeLayoutChanged(f"the layout of {name} changed: prepare its ranges again")
    _check_destination(name, destination, prepared.destination_bytes, prepared.alignment)
    place = Destination(destination.ptr, destination.size, destination, True)
    return place, prepared.pieces([chunk["key"] for chunk in chunks])
