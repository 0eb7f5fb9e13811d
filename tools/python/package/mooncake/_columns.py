"""Columns of a batch that are arrays of Python objects: the choice of their codec, and rows of mappings and lists.

A column whose rows are mappings or lists with tensors, arrays or bytes inside becomes a tree: inner nodes say which
rows have them, and each leaf is a column of its own. Other mappings and lists are MessagePack, or JSON where msgpack is
not installed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mooncake import _column_codecs as codecs
from mooncake._column_trees import MISSING, Tree, choose_leaf_codec, is_array, is_list_of_native, present

#: What an encoder may raise for values that it does not take.
FAILURES = (TypeError, ValueError, OverflowError, RuntimeError, AttributeError, RecursionError)


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
            "list_ragged": codecs.Lists(self),
        }

    # --- encoding --------------------------------------------------------------------------------------------------

    def encode(self, path, values):
        """Encodes a column by its values; ValueError if there is no codec for them."""
        tree = Tree(values)
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
        """Returns the codec for values, or None with the reason. Numbers that would change their type together are
        packed, one by one."""
        there = present(values)
        if not there:
            return "json_ragged", ""
        decision = choose_leaf_codec(there)
        if decision.codec == "ragged_tensor" and not decision.accepted:
            return None, decision.reason
        changes = (decision.codec == "ndarray" and not _are_alike(there)) or (
            decision.codec == "typed_ragged" and not _are_numbers(there)
        )
        if decision.accepted and decision.codec != "msgpack_ragged" and not changes:
            return decision.codec, ""
        if is_list_of_native(there):
            return "list_ragged", ""
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
            children = [list(pair) for pair in zip(node.children, node.places)]
            about = {"id": number, "path": node.path, "node_type": node.node_type, "children": children}
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


def _are_numbers(values):
    """Returns true for arrays of numbers, and for lists of numbers of one kind, each in rows of one length."""
    kinds = set()
    for value in values:
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, OverflowError):
            return False
        if isinstance(value, np.ndarray):
            if array.dtype.kind not in "biufc":
                return False
        elif array.size:
            if array.dtype.kind not in "biuf" or not _are_alike(value):
                return False
            kinds.add(array.dtype.kind)
    return len(kinds) < 2


def _are_alike(value):
    """Returns true if numbers of a list, also a nested one, keep their type in an array."""
    flat, pending = set(), [value]
    while pending:
        one = pending.pop()
        if isinstance(one, (list, tuple)):
            pending.extend(one)
        elif is_array(one):
            # It would come back as a list.
            return False
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
