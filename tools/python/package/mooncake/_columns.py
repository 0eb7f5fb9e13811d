"""Columns of a batch that are arrays of Python objects: the choice of their codec, and rows of mappings and lists.

A column whose rows are mappings or lists with tensors, arrays or bytes inside becomes a tree: inner nodes say which
rows have them, and each leaf is a column of its own. Other mappings and lists are MessagePack, or JSON where msgpack is
not installed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mooncake import _column_codecs as codecs
from mooncake._column_codecs import is_bytes, is_image, torch_if_loaded

#: Limits of a tree: beyond them a column is a leaf.
_MOST_KEYS = 64
_MOST_ITEMS = 8
_MOST_DEPTH = 32
#: What an encoder may raise for values that it does not take.
FAILURES = (TypeError, ValueError, OverflowError, RuntimeError, AttributeError, RecursionError)


class _Missing:
    """Marker of a row that does not have a key, or so many items."""

    def __repr__(self):
        return "<missing>"


MISSING = _Missing()


@dataclass
class EncodedColumn:
    """Payloads of a column, and the metadata that its decoder needs."""

    codec: str
    rows: int
    payload: dict
    metadata: dict = field(default_factory=dict)


class Columns:
    """Codecs of columns, by name."""

    def __init__(self, concatenates):
        blobs = codecs.Blobs(lambda value: value, lambda data: data)
        self.ragged = codecs.Ragged(concatenates)
        self.tensors = codecs.RaggedTensors(self.ragged)
        self.dicts = codecs.TensorDicts(self.tensors)
        self._codecs = {
            "ndarray": codecs.Scalars(),
            "typed_ragged": self.ragged,
            "ragged_tensor": self.tensors,
            "ragged_tensor_dict": self.dicts,
            "bytes_ragged": blobs,
            "media_bytes": blobs,
            "media_list_ragged": codecs.MediaLists(),
            "utf8_ragged": codecs.Blobs(lambda text: text.encode("utf-8"), lambda data: bytes(data).decode("utf-8")),
            "msgpack_ragged": codecs.Blobs(codecs.pack_msgpack, codecs.unpack_msgpack),
            "json_ragged": codecs.Blobs(codecs.pack_json, codecs.unpack_json),
        }

    # --- encoding --------------------------------------------------------------------------------------------------

    def encode(self, path, values):
        """Encodes a column by its values; ValueError if there is no codec for them."""
        tree = _Tree(values)
        if tree.needed():
            return self._encode_tree(path, tree, values)
        codec, error = self._choose(values)
        if codec is None:
            raise ValueError(f"unsupported structured non-tensor field {path}: {error}")
        return self._encode_as(codec, values)

    def encode_with(self, path, values, schema):
        """Encodes a column as its schema says; `auto` chooses, and converts arrays and scalars of numpy if it must."""
        if not schema.nullable and any(value is None for value in values):
            raise ValueError(f"the FieldSchema of {path!r} is not nullable, and there is a None")
        if schema.codec == "auto":
            return self._encode_auto(path, values)
        if schema.codec == "ragged_tensor_dict":
            payload, metadata = self.dicts.encode(values, schema.metadata.get("keys"))
        elif schema.codec in ("typed_ragged", "ndarray"):
            payload, metadata = self._codecs[schema.codec].encode(values, schema.metadata.get("dtype"))
        elif schema.codec in self._codecs:
            payload, metadata = self._codecs[schema.codec].encode(values)
        else:
            raise ValueError(f"no codec is called {schema.codec!r}: {', '.join(sorted(self._codecs))}")
        return EncodedColumn(schema.codec, len(values), payload, metadata)

    def _encode_auto(self, path, values):
        tried = []
        attempts = (lambda: self.encode(path, values), lambda: self.encode(path, [_plain(value) for value in values]))
        for attempt in attempts:
            try:
                return attempt()
            except FAILURES as error:
                tried.append(str(error))
        raise ValueError(f"unable to infer a safe codec for {path!r}: {'; '.join(tried)}")

    def _encode_as(self, codec, values):
        payload, metadata = self._codecs[codec].encode(values)
        return EncodedColumn(codec, len(values), payload, {**metadata, "schema_source": "inferred_from_runtime_values"})

    def _choose(self, values):
        """Returns the codec for values, or None with the reason."""
        there = [value for value in values if value is not None and value is not MISSING]
        torch, all_of = torch_if_loaded(), lambda test: all(map(test, there))
        if not there:
            return "json_ragged", ""
        if torch is not None and all_of(lambda value: isinstance(value, torch.Tensor)):
            kinds = sorted({str(value.dtype) for value in there})
            return ("ragged_tensor", "") if len(kinds) == 1 else (None, f"mixed tensor dtype: {', '.join(kinds)}")
        if all_of(lambda value: isinstance(value, np.ndarray) and value.dtype.kind in "biufc"):
            return "typed_ragged", ""
        if all_of(is_bytes):
            return "bytes_ragged", ""
        if all_of(is_image):
            return "media_bytes", ""
        if all_of(lambda value: isinstance(value, str)):
            return "utf8_ragged", ""
        if all_of(_is_number) and len({np.asarray(value).dtype.kind for value in there}) == 1:
            if np.asarray(there).dtype.kind in "biuf":
                return "ndarray", ""
        if all_of(lambda value: isinstance(value, (list, tuple))):
            if all_of(lambda value: all(is_bytes(item) or is_image(item) for item in value)) and any(there):
                return "media_list_ragged", ""
            if all_of(_is_numbers):
                return "typed_ragged", ""
        return self._choose_packed(there)

    def _choose_packed(self, there):
        errors = []
        for codec in ("msgpack_ragged", "json_ragged"):
            pack = codecs.pack_msgpack if codec == "msgpack_ragged" else codecs.pack_json
            try:
                for value in there:
                    pack(value)
                return codec, ""
            except FAILURES as error:
                errors.append(f"{codec}: {error}")
        return None, "; ".join(errors)

    def _encode_tree(self, path, tree, values):
        payload, nodes, leaves = {}, [], []
        for number, node in enumerate(tree.nodes):
            about = {"id": number, "path": node.path, "node_type": node.kind, "children": node.children}
            for name, column in (("missing", node.missing), ("nulls", node.nulls)):
                payload[f"node.{number}.{name}"] = np.asarray(column, np.bool_)
            if node.lengths is not None:
                payload[f"node.{number}.lengths"] = np.asarray(node.lengths, np.int64)
            nodes.append(about)
        for number, leaf in enumerate(tree.leaves):
            missing = [value is MISSING for value in leaf.values]
            column = [None if value is MISSING else value for value in leaf.values]
            codec, error = self._choose(column)
            if codec is None:
                raise ValueError(f"unsupported structured non-tensor field {path}{leaf.path}: {error}")
            encoded = self._encode_as(codec, column)
            payload.update({f"leaf.{number}.{name}": value for name, value in encoded.payload.items()})
            payload[f"leaf.{number}.missing"] = np.asarray(missing, np.bool_)
            leaves.append({"id": number, "path": leaf.path, "codec": codec, "metadata": encoded.metadata})
        metadata = {"structure_version": 1, "root": tree.root, "nodes": nodes, "leaves": leaves}
        metadata["schema_source"] = "inferred_from_runtime_values"
        return EncodedColumn("structured_recursive", len(values), payload, metadata)

    # --- decoding --------------------------------------------------------------------------------------------------

    def decode(self, codec, payload, rows, metadata):
        """Decodes a column to a list; ValueError for an unknown codec or inconsistent payloads."""
        if codec == "structured_recursive":
            return self._decode_tree(payload, rows, metadata)
        return self._of(codec).decode(payload, rows, metadata)

    def select(self, codec, source, rows, metadata):
        """Returns payloads and metadata of these rows."""
        if codec == "structured_recursive":
            return self._select_tree(source, rows, metadata)
        return self._of(codec).select(source, rows, metadata or {})

    def _of(self, codec):
        if codec not in self._codecs:
            raise ValueError(f"no codec is called {codec!r}: {', '.join(sorted(self._codecs))}")
        return self._codecs[codec]

    def _decode_tree(self, payload, rows, metadata):
        columns = {}
        for leaf in metadata["leaves"]:
            prefix = f"leaf.{leaf['id']}."
            some = {name[len(prefix) :]: value for name, value in payload.items() if name.startswith(prefix)}
            column = self.decode(leaf["codec"], some, rows, leaf["metadata"])
            missing = some["missing"]
            columns["leaf", leaf["id"]] = [MISSING if missing[row] else column[row] for row in range(rows)]
        # Children have greater numbers than their parents.
        for node in reversed(metadata["nodes"]):
            columns["node", node["id"]] = _join_rows(node, columns, payload, rows)
        return columns[tuple(metadata["root"])]

    def _select_tree(self, source, rows, metadata):
        payload, leaves = {}, []
        for node in metadata["nodes"]:
            names = ["missing", "nulls", *(["lengths"] if node["node_type"] == "list" else [])]
            for name in (f"node.{node['id']}.{name}" for name in names):
                payload[name] = source.rows(name, rows)
        for leaf in metadata["leaves"]:
            prefix = f"leaf.{leaf['id']}."
            some, about = self.select(leaf["codec"], source.within(prefix), rows, leaf["metadata"])
            payload.update({f"{prefix}{name}": value for name, value in some.items()})
            payload[f"{prefix}missing"] = source.rows(f"{prefix}missing", rows)
            leaves.append({**leaf, "metadata": about})
        return payload, {**metadata, "leaves": leaves}


def _join_rows(node, columns, payload, rows):
    """Returns a column of mappings or lists, from the columns of their values."""
    prefix = f"node.{node['id']}."
    missing, nulls = payload[f"{prefix}missing"], payload[f"{prefix}nulls"]
    children = [(name, columns[tuple(place)]) for name, place in node["children"]]
    joined = []
    for row in range(rows):
        if missing[row] or nulls[row]:
            joined.append(MISSING if missing[row] else None)
        elif node["node_type"] == "dict":
            joined.append({name: column[row] for name, column in children if column[row] is not MISSING})
        else:
            joined.append([column[row] for _, column in children[: int(payload[f"{prefix}lengths"][row])]])
    return joined


@dataclass
class _Node:
    path: str
    kind: str
    missing: list
    nulls: list
    lengths: Any = None
    #: Pairs of key or index, and place: ("node" or "leaf", its number).
    children: list = field(default_factory=list)


@dataclass
class _Leaf:
    path: str
    values: list


class _Tree:
    """Rows of mappings and lists, taken apart into columns."""

    def __init__(self, values):
        self.nodes = []
        self.leaves = []
        self.root = self._add("", list(values), 0)

    def needed(self):
        """Returns true if a leaf has what MessagePack and JSON do not have."""
        return bool(self.nodes) and any(_is_native(value) for leaf in self.leaves for value in leaf.values)

    def _add(self, path, values, depth):
        there = [value for value in values if value is not None and value is not MISSING]
        keys = _shared_keys(there) if depth < _MOST_DEPTH else None
        most = _most_items(there) if keys is None and depth < _MOST_DEPTH else None
        if keys is None and most is None:
            self.leaves.append(_Leaf(path, values))
            return ["leaf", len(self.leaves) - 1]
        missing, nulls = [value is MISSING for value in values], [value is None for value in values]
        node = _Node(path, "dict" if keys is not None else "list", missing, nulls)
        number = len(self.nodes)
        self.nodes.append(node)
        if keys is None:
            node.lengths = [len(value) if isinstance(value, (list, tuple)) else 0 for value in values]
        for name in range(most) if keys is None else keys:
            child = [_item(value, name) for value in values]
            node.children.append([name, self._add(f"{path}[{name!r}]", child, depth + 1)])
        return ["node", number]


def _item(value, name):
    """Returns the value of a key or an index; MISSING where there is none."""
    if isinstance(value, Mapping):
        return value.get(name, MISSING)
    if isinstance(value, (list, tuple)) and name < len(value):
        return value[name]
    return MISSING


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
    inner = lambda item: item is None or isinstance(item, (Mapping, list, tuple)) or _is_array(item)
    return most if most <= _MOST_ITEMS and all(inner(item) for value in there for item in value) else None


def _is_array(value):
    torch = torch_if_loaded()
    return isinstance(value, np.ndarray) or (torch is not None and isinstance(value, torch.Tensor))


def _is_native(value):
    """Returns true for a value, or a list of values, that are arrays, tensors, bytes or images."""
    if isinstance(value, (list, tuple)):
        return any(map(_is_native, value))
    return _is_array(value) or is_bytes(value) or is_image(value)


def _is_number(value):
    return isinstance(value, (bool, int, float, np.number, np.bool_))


def _is_numbers(value):
    """Returns true for a list of numbers of one kind, in rows of one length."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return array.dtype.kind in "biuf" and (array.size == 0 or _alike(value))


def _alike(value):
    """Returns true if numbers of a nested list keep their type in an array."""
    flat, pending = set(), [value]
    while pending:
        one = pending.pop()
        if isinstance(one, (list, tuple)):
            pending.extend(one)
        else:
            flat.add(np.asarray(one).dtype.kind)
    return len(flat) <= 1


def _plain(value):
    """Returns a value with arrays and scalars of numpy as lists and numbers."""
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def object_array(values):
    """Returns an array of objects, one for each value."""
    array = np.empty(len(values), object)
    for index, value in enumerate(values):
        array[index] = value
    return array
