"""Structure of a column of Python objects: the codec that its values suggest, and rows of mappings and lists, taken
apart into columns of their values.

Inner nodes of such a tree say which rows have a mapping or a list there, and each leaf is a column of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mooncake._column_codecs import is_bytes, is_image, torch_if_loaded

#: Limits of a tree: beyond them a column is a leaf.
_MOST_KEYS = 64
_MOST_ITEMS = 8
_MOST_DEPTH = 32


class _Missing:
    """Marker of a row that does not have a key, or so many items."""

    def __repr__(self):
        return "<missing>"


MISSING = _Missing()


@dataclass
class CodecDecision:
    """Codec that the values of a column suggest."""

    #: False if there is no codec for them; `codec` is then the nearest one.
    accepted: bool
    codec: str
    reason: str
    #: Kind of the values, in words.
    normalized_type: str
    metadata: dict = field(default_factory=dict)


@dataclass
class StructureNode:
    """Column of mappings (`dict`) or lists (`list`), whose values are columns of their own."""

    path: str
    node_type: str
    #: Keys, or indices, one for each column below.
    children: list
    #: Rows that are missing from the mapping or list above, and rows that are None.
    missing: list
    nulls: list
    #: Number of items of each row, of lists.
    lengths: Any = None
    #: Place of each child: ("node" or "leaf", its number).
    places: list = field(default_factory=list)

    @property
    def row_mask(self):
        """True for rows that have a mapping or a list."""
        return [not (missing or null) for missing, null in zip(self.missing, self.nulls)]


@dataclass
class StructureLeaf:
    """Column without a structure: one value for each row, None, or MISSING."""

    path: str
    values: list

    @property
    def decision(self):
        """Codec that the values suggest."""
        return choose_leaf_codec(self.values)


def choose_leaf_codec(values):
    """Returns the decision on a codec by the types of values; None and MISSING do not count. Nothing is encoded, so a
    codec of packed objects may still fail for what is in them."""
    there = present(values)
    if not there:
        return CodecDecision(False, "msgpack_ragged", "there are no values", "python object")
    torch, all_of = torch_if_loaded(), lambda test: all(map(test, there))
    if torch is not None and all_of(lambda value: isinstance(value, torch.Tensor)):
        kinds = sorted({str(value.dtype) for value in there})
        reason = "tensors of one dtype" if len(kinds) == 1 else f"mixed tensor dtype: {', '.join(kinds)}"
        return CodecDecision(len(kinds) == 1, "ragged_tensor", reason, "torch.Tensor", {"dtype": kinds[0]})
    if all_of(lambda value: isinstance(value, np.ndarray)):
        if all_of(lambda value: value.dtype.kind in "biufc"):
            return CodecDecision(True, "typed_ragged", "arrays of numbers", "numeric sequence")
        return CodecDecision(False, "msgpack_ragged", "arrays of other things than numbers", "python object")
    if all_of(is_bytes):
        return CodecDecision(True, "bytes_ragged", "bytes", "bytes-like")
    if all_of(is_image):
        return CodecDecision(True, "media_bytes", "images", "media")
    if all_of(lambda value: isinstance(value, str)):
        return CodecDecision(True, "utf8_ragged", "text", "str")
    if all_of(lambda value: isinstance(value, (bool, int, float, np.number, np.bool_))):
        dtype = _shared_dtype(there)
        return CodecDecision(dtype is not None, "ndarray", "numbers", "numeric scalar", {"dtype": str(dtype)})
    if all_of(lambda value: isinstance(value, (list, tuple))):
        if any(there) and all_of(lambda value: all(is_bytes(item) or is_image(item) for item in value)):
            return CodecDecision(True, "media_list_ragged", "lists of bytes and images", "media list")
        dtype = _shared_dtype(there)
        if dtype is not None:
            return CodecDecision(True, "typed_ragged", "lists of numbers", "numeric sequence", {"dtype": str(dtype)})
    if all_of(lambda value: isinstance(value, (Mapping, list, tuple))):
        return CodecDecision(True, "msgpack_ragged", "mappings and lists", "msgpack")
    return CodecDecision(False, "msgpack_ragged", "no codec is for values of these types", "python object")


def infer_structure(path, values, leaves, nodes, *, _depth=0):
    """Takes a column of mappings and lists apart: appends inner nodes, parents first, and leaves. ValueError for more
    levels than a tree has."""
    _add(path, list(values), leaves, nodes, _depth, True)


def escape_key(key):
    """Returns a key for a path, in which `.` and `[` separate keys and indices: a backslash goes before them."""
    return "".join(f"\\{one}" if one in "\\.[" else one for one in key)


def present(values):
    """Returns the values of the rows that have one."""
    return [value for value in values if value is not None and value is not MISSING]


class Tree:
    """Rows of mappings and lists, taken apart into columns. What is deeper than a tree is stays in a leaf."""

    def __init__(self, values):
        self.nodes = []
        self.leaves = []
        self.root = _add("", list(values), self.leaves, self.nodes, 0, False)

    def needed(self):
        """Returns true if a leaf has what MessagePack and JSON do not have."""
        return bool(self.nodes) and _is_any(_is_native, (value for leaf in self.leaves for value in leaf.values))


def _add(path, values, leaves, nodes, depth, bounded):
    """Appends a column and those of its values; returns its place. With `bounded`, ValueError for too many levels."""
    there = present(values)
    if depth > _MOST_DEPTH and bounded:
        raise ValueError(f"{path!r} is deeper than the {_MOST_DEPTH} levels of a tree")
    keys = _shared_keys(there) if depth < _MOST_DEPTH or bounded else None
    most = _most_items(there) if keys is None and (depth < _MOST_DEPTH or bounded) else None
    if keys is None and most is None:
        leaves.append(StructureLeaf(path, values))
        return ["leaf", len(leaves) - 1]
    missing, nulls = [value is MISSING for value in values], [value is None for value in values]
    children = list(range(most)) if keys is None else keys
    node = StructureNode(path, "dict" if keys is not None else "list", children, missing, nulls)
    number = len(nodes)
    nodes.append(node)
    if keys is None:
        node.lengths = [len(value) if isinstance(value, (list, tuple)) else 0 for value in values]
    for name in children:
        below = f"{path}[{name}]" if keys is None else f"{path}.{escape_key(name)}"
        child = [_item(value, name) for value in values]
        node.places.append(_add(below, child, leaves, nodes, depth + 1, bounded))
    return ["node", number]


def _item(value, name):
    """Returns the value of a key or an index: MISSING where the row lacks it, None where there is no row."""
    if isinstance(value, Mapping):
        return value.get(name, MISSING)
    if isinstance(value, (list, tuple)):
        return value[name] if name < len(value) else MISSING
    return None


def _shared_keys(there):
    """Returns the keys of rows that are all mappings with text as keys, and have few; else None."""
    if not there or not all(isinstance(value, Mapping) for value in there):
        return None
    keys = dict.fromkeys(key for value in there for key in value)
    return list(keys) if len(keys) <= _MOST_KEYS and all(isinstance(key, str) for key in keys) else None


def _most_items(there):
    """Returns the greatest length of rows that are all short lists of mappings, lists, arrays and tensors; else
    None."""
    if not there or not all(isinstance(value, (list, tuple)) for value in there):
        return None
    most = max(map(len, there))
    inner = lambda item: item is None or isinstance(item, (Mapping, list, tuple)) or is_array(item)
    return most if most <= _MOST_ITEMS and all(inner(item) for value in there for item in value) else None


def is_array(value):
    """Returns true for an array of numpy or a tensor of torch."""
    torch = torch_if_loaded()
    return isinstance(value, np.ndarray) or (torch is not None and isinstance(value, torch.Tensor))


def _is_native(value):
    """Returns true for a value, or a list of values, that are arrays, tensors, bytes or images."""
    if isinstance(value, (list, tuple)):
        return any(map(_is_native, value))
    return is_array(value) or is_bytes(value) or is_image(value)


def is_list_of_native(there):
    """Returns true for rows that are lists, with arrays, tensors, bytes or images in their items."""
    if not all(isinstance(value, (list, tuple)) for value in there):
        return False
    return _is_any(_has_native, there)


def _is_any(test, values):
    try:
        return any(map(test, values))
    except RecursionError:
        # One that contains itself: no codec has it.
        return False


def _has_native(value):
    """Returns true for what `_is_native` is true for, also in mappings."""
    if isinstance(value, Mapping):
        return any(map(_has_native, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_native, value))
    return _is_native(value)


def _shared_dtype(there):
    """Returns the dtype that numbers, or lists of numbers, have together; None for anything else."""
    try:
        dtype = np.result_type(*(np.asarray(value).dtype for value in there))
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return dtype if dtype.kind in "biuf" else None
