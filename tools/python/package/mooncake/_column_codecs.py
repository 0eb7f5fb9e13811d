"""Columns of Python objects as arrays: one value for each row of a batch, encoded by what the values are.

A codec encodes a column to payloads (arrays and pieces of memory) and metadata, decodes it, and selects rows of an
encoded one by reading no more than these rows need. Payloads of most codecs are `data`, the values one behind another;
`offsets`, where each row begins, and one more; and `nulls`, which rows are None.
"""

import json
import sys

import numpy as np

from mooncake._bundle_values import FlatArrays, Pieces, bytes_of, check_unmasked
from mooncake._number_types import as_type, is_kept

#: Types of a column without a value.
EMPTY_TYPE = "int64"
EMPTY_TENSOR = "torch.float32"
#: Layout of arrays of types that have no type in common: the bytes of each row.
_ROW_BYTES = "row_bytes"


def torch_if_loaded():
    """Returns torch if this process has imported it: else no value can be a tensor."""
    return sys.modules.get("torch")


def load_torch(what):
    """Returns torch; RuntimeError without it."""
    try:
        import torch
    except ImportError as error:
        raise RuntimeError(f"torch is required for {what}") from error
    return torch


def load_msgpack():
    """Returns msgpack, or None."""
    try:
        import msgpack
    except ImportError:
        return None
    return msgpack


def flat_spans(offsets):
    """Returns pairs of begin and end, from offsets in pairs."""
    return list(zip(map(int, offsets[0::2]), map(int, offsets[1::2])))


class Source:
    """Payloads of an encoded column in the store, as `select` reads them."""

    def __init__(self, read_rows, read_spans):
        #: (payload, row indices) -> array of these rows of a payload that is an array.
        self.rows = read_rows
        #: (payload, [(begin, end)]) -> bytes of these ranges one behind the other, in a buffer.
        self.spans = read_spans

    def within(self, prefix):
        """Returns the source of payloads whose names begin with a prefix."""
        return Source(
            lambda name, rows: self.rows(f"{prefix}{name}", rows),
            lambda name, spans: self.spans(f"{prefix}{name}", spans),
        )

    def bounds(self, name, rows):
        """Returns (begin, end) of each row, by an array of one more offset than rows."""
        if len(rows) and all(b == a + 1 for a, b in zip(rows, rows[1:])):
            offsets = self.rows(name, [*rows, rows[-1] + 1])
            return list(zip(map(int, offsets), map(int, offsets[1:])))
        return flat_spans(self.rows(name, [at for row in rows for at in (row, row + 1)]))


def _starts(sizes):
    """Returns offsets of values of these sizes, one behind the other."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _nulls(values):
    return np.asarray([value is None for value in values], np.bool_)


def _pick(values, rows):
    """Returns these rows of a list of metadata, which may be missing or short."""
    return [values[row] if row < len(values) else None for row in rows] if values else values


def _checked_offsets(payload, rows, name="offsets"):
    offsets = payload[name]
    if len(offsets) != rows + 1:
        raise ValueError(f"offsets length {len(offsets)} is not that of {rows} rows and one more")
    return offsets


class Scalars:
    """Numbers and truth values of one kind."""

    @staticmethod
    def encode(values, dtype=None):
        """Encodes; ValueError if they do not fit the type."""
        there = [value for value in values if value is not None]
        dtype = np.dtype(dtype) if dtype is not None else np.asarray(there).dtype if there else np.dtype(EMPTY_TYPE)
        if dtype.kind not in "biuf":
            raise ValueError(f"numbers of type {dtype} have no codec")
        data = as_type([0 if value is None else value for value in values], dtype)
        return {"data": data, "nulls": _nulls(values)}, {"dtype": str(dtype)}

    @staticmethod
    def decode(payload, rows, metadata):
        """Decodes to Python's numbers."""
        return [None if null else value.item() for value, null in zip(payload["data"], payload["nulls"])]

    @staticmethod
    def select(source, rows, metadata):
        """Selects rows."""
        return {name: source.rows(name, rows) for name in ("data", "nulls")}, metadata


class Blobs:
    """Bytes, text, JSON and others with bytes of their own for each row."""

    def __init__(self, to_bytes, from_bytes):
        self._to_bytes = to_bytes
        self._from_bytes = from_bytes

    def encode(self, values):
        """Encodes."""
        parts, metadata = _media([None if value is None else self._to_bytes(value) for value in values])
        payload = {"data": _blob(parts), "offsets": _starts([len(part) for part in parts]), "nulls": _nulls(values)}
        return payload, metadata

    def decode(self, payload, rows, metadata):
        """Decodes."""
        offsets = _checked_offsets(payload, rows)
        data = memoryview(payload["data"])
        media = (metadata or {}).get("media_encodings") or [None] * rows
        part = lambda row: _from_media(data[int(offsets[row]) : int(offsets[row + 1])], media[row])
        return [None if payload["nulls"][row] else self._from_bytes(part(row)) for row in range(rows)]

    @staticmethod
    def select(source, rows, metadata):
        """Selects rows."""
        spans = source.bounds("offsets", rows)
        payload = {
            "data": source.spans("data", spans),
            "offsets": _starts([end - begin for begin, end in spans]),
            "nulls": source.rows("nulls", rows),
        }
        return payload, {**metadata, "media_encodings": _pick(metadata.get("media_encodings"), rows)}


def _blob(parts):
    return Pieces(tuple(bytes_of(part, "a value") for part in parts if len(part)), tuple(parts))


def is_image(value):
    """Returns true for an image of PIL."""
    return type(value).__module__.startswith("PIL.") and hasattr(value, "tobytes") and hasattr(value, "mode")


def is_bytes(value):
    """Returns true for bytes, bytearray and memoryview."""
    return isinstance(value, (bytes, bytearray, memoryview))


def _media(values):
    """Returns each value's bytes, and metadata if images of PIL are among them."""
    parts, images = [], []
    for value in values:
        image = is_image(value)
        parts.append(b"" if value is None else value.tobytes() if image else bytes_of(value, "a value"))
        about = {"kind": "pil_raw", "mode": value.mode, "size": list(value.size)} if image else None
        images.append({**about, "format": getattr(value, "format", None)} if about else None)
    return parts, {"media_encodings": images} if any(images) else {}


def _from_media(data, about):
    if not about:
        return bytes(data)
    from PIL import Image

    image = Image.frombytes(about["mode"], tuple(about["size"]), bytes(data))
    image.format = about.get("format")
    return image


class MediaLists:
    """Lists of bytes and images."""

    @staticmethod
    def encode(values):
        """Encodes."""
        items = [item for value in values for item in value or ()]
        parts, metadata = _media(items)
        payload = {
            "data": _blob(parts),
            "row_offsets": _starts([len(value or ()) for value in values]),
            "byte_offsets": _starts([len(part) for part in parts]),
            "nulls": _nulls(values),
        }
        return payload, metadata

    @staticmethod
    def decode(payload, rows, metadata):
        """Decodes."""
        begins = _checked_offsets(payload, rows, "row_offsets")
        data, offsets = memoryview(payload["data"]), payload["byte_offsets"]
        media = (metadata or {}).get("media_encodings") or [None] * (len(offsets) - 1)
        item = lambda at: _from_media(data[int(offsets[at]) : int(offsets[at + 1])], media[at])
        items = lambda row: [item(at) for at in range(int(begins[row]), int(begins[row + 1]))]
        return [None if payload["nulls"][row] else items(row) for row in range(rows)]

    @staticmethod
    def select(source, rows, metadata):
        """Selects rows."""
        ranges = source.bounds("row_offsets", rows)
        items = [at for begin, end in ranges for at in range(begin, end)]
        spans = source.bounds("byte_offsets", items)
        payload = {
            "data": source.spans("data", spans),
            "row_offsets": _starts([end - begin for begin, end in ranges]),
            "byte_offsets": _starts([end - begin for begin, end in spans]),
            "nulls": source.rows("nulls", rows),
        }
        return payload, {**metadata, "media_encodings": _pick(metadata.get("media_encodings"), items)}


class Lists:
    """Lists of any values: all items are one column."""

    def __init__(self, columns):
        #: Codecs of the column of the items.
        self._columns = columns

    def encode(self, values):
        """Encodes; ValueError if there is no codec for the items together."""
        items = self._columns.encode(": items of its lists", [item for value in values for item in value or ()])
        payload = {"row_offsets": _starts([len(value or ()) for value in values]), "nulls": _nulls(values)}
        payload.update({f"items.{name}": part for name, part in items.payload.items()})
        return payload, {"items": {"codec": items.codec, "metadata": items.metadata}}

    def decode(self, payload, rows, metadata):
        """Decodes."""
        begins, about = _checked_offsets(payload, rows, "row_offsets"), metadata["items"]
        parts = {name.removeprefix("items."): part for name, part in payload.items() if name.startswith("items.")}
        items = self._columns.decode(about["codec"], parts, int(begins[-1]), about["metadata"])
        return [None if payload["nulls"][row] else items[int(begins[row]) : int(begins[row + 1])] for row in range(rows)]

    def select(self, source, rows, metadata):
        """Selects rows."""
        ranges, about = source.bounds("row_offsets", rows), metadata["items"]
        items = [at for begin, end in ranges for at in range(begin, end)]
        parts, chosen = self._columns.select(about["codec"], source.within("items."), items, about["metadata"])
        payload = {"row_offsets": _starts([end - begin for begin, end in ranges]), "nulls": source.rows("nulls", rows)}
        payload.update({f"items.{name}": part for name, part in parts.items()})
        return payload, {**metadata, "items": {**about, "metadata": chosen}}


class Ragged:
    """Arrays and lists of numbers, of any shapes."""

    def __init__(self, concatenates):
        #: Returns true if arrays are concatenated where they are put.
        self._concatenates = concatenates

    def encode(self, values, dtype=None):
        """Encodes; ValueError if a row has no numbers, or one that the type does not have, TypeError if one is a masked
        array."""
        for value in values:
            check_unmasked(value, "a row of a column")
        regular = self.encode_regular(values, dtype)
        if regular is not None:
            return regular
        if dtype is None:
            dtype, arrays = self._in_common(values)
        else:
            dtype, arrays = np.dtype(dtype), None
        if dtype is not None and dtype.kind not in "biufc":
            raise ValueError(f"arrays of type {dtype} have no codec")
        if arrays is None:
            arrays = [None if value is None else as_type(value, dtype) for value in values]
        flat = [array.reshape(-1) for array in arrays if array is not None]
        most = max((array.ndim for array in arrays if array is not None), default=0)
        shapes = np.zeros((len(arrays), max(most, 1)), np.int64)
        dims = np.zeros(len(arrays), np.int16)
        for row, array in enumerate(arrays):
            if array is not None and array.ndim:
                shapes[row, : array.ndim] = array.shape
                dims[row] = array.ndim
        are = [isinstance(value, np.ndarray) for value in values]
        lists = any(value is not None and not array for value, array in zip(values, are))
        form = "list" if lists and not any(are) else "mixed" if lists else "ndarray"
        metadata = {"dtype": str(dtype), "max_ndim": most, "shape_policy": "ragged", "row_format": form}
        metadata["physical_layout"] = "contiguous_flat"
        if form == "mixed":
            metadata["ndarray_rows"] = are
        if any(value.dtype != dtype for value, array in zip(values, are) if array):
            metadata["row_dtypes"] = [str(value.dtype) if array else None for value, array in zip(values, are)]
        if dtype is None:
            metadata.update(dtype="uint8", physical_layout=_ROW_BYTES)
            dtype, flat = np.dtype(np.uint8), [array.view(np.uint8) for array in flat]
            offsets = _starts([0 if array is None else array.nbytes for array in arrays])
        else:
            offsets = _starts([0 if array is None else array.size for array in arrays])
        return self._payload(flat, dtype, offsets, shapes, dims, _nulls(values)), metadata

    @staticmethod
    def _in_common(values):
        """Returns the type of arrays and lists of numbers, and these in that type, as they are without it: each comes back
        as what it is. The type is None if arrays have none in common that keeps their values; ValueError for lists then.
        """
        arrays = [None if value is None else np.asarray(value, order="C") for value in values]
        there = [array for array in arrays if array is not None]
        is_list = lambda value: value is not None and not isinstance(value, np.ndarray)
        lists = [array for value, array in zip(values, arrays) if is_list(value)]
        kinds = {array.dtype for array in there if array.size or array.dtype.kind != "f"} or {a.dtype for a in there}
        dtype = np.result_type(*kinds) if kinds else np.dtype(EMPTY_TYPE)
        if dtype.kind not in "biufc":
            return dtype, None
        mixed = any(array.size and array.dtype.kind != dtype.kind for array in lists)
        if mixed or not all(is_kept(value, array) for value, array in zip(values, arrays) if is_list(value)):
            raise ValueError(
                f"lists of several kinds of numbers would come back as {dtype}: name a dtype in the metadata of the "
                "FieldSchema, or use the codec auto"
            )
        if all(array.dtype == dtype for array in there):
            return dtype, arrays
        try:
            return dtype, [None if array is None else as_type(array, dtype) for array in arrays]
        except ValueError:
            if lists:
                raise
            return None, arrays

    def encode_regular(self, values, dtype=None):
        """Encodes two or more arrays of one shape and type; returns None for other rows."""
        if len(values) < 2 or not all(isinstance(value, np.ndarray) for value in values):
            return None
        first = values[0]
        dtype = np.dtype(dtype or first.dtype)
        if dtype.kind not in "biufc" or any(v.shape != first.shape or v.dtype != dtype for v in values):
            return None
        flat = [np.asarray(value, order="C").reshape(-1) for value in values]
        shapes = np.tile(np.asarray(first.shape or (0,), np.int64), (len(values), 1))
        dims = np.full(len(values), first.ndim, np.int16)
        offsets = np.arange(len(values) + 1, dtype=np.int64) * first.size
        metadata = {"dtype": str(dtype), "max_ndim": first.ndim, "shape_policy": "regular", "row_format": "ndarray"}
        metadata["physical_layout"] = "contiguous_flat"
        return self._payload(flat, dtype, offsets, shapes, dims, np.zeros(len(values), np.bool_)), metadata

    def _payload(self, flat, dtype, offsets, shapes, dims, nulls):
        flat = [array for array in flat if array.size]
        data = FlatArrays.from_flat_arrays(flat, dtype, int(offsets[-1]))
        if not flat or not self._concatenates():
            data = data.pieces()
        return {"data": data, "offsets": offsets, "shapes": shapes, "ndims": dims, "nulls": nulls}

    @staticmethod
    def decode(payload, rows, metadata=None):
        """Decodes; arrays are views of the payload."""
        metadata = metadata or {}
        dtype = np.dtype(metadata.get("dtype", EMPTY_TYPE))
        data, offsets = payload["data"], _checked_offsets(payload, rows)
        if not isinstance(data, np.ndarray) or data.dtype != dtype:
            data = np.frombuffer(data, dtype)
        form, arrays, kinds = metadata.get("row_format"), metadata.get("ndarray_rows") or (), metadata.get("row_dtypes")
        values = []
        for row in range(rows):
            if payload["nulls"][row]:
                values.append(None)
                continue
            shape = payload["shapes"][row, : int(payload["ndims"][row])].tolist()
            value = data[int(offsets[row]) : int(offsets[row + 1])]
            if metadata.get("physical_layout") == _ROW_BYTES:
                value = value.view(kinds[row])
                value = value if value.flags.aligned else value.copy()
            value = value.reshape(shape)
            if form == "list" or (form == "mixed" and not arrays[row]):
                value = value.tolist()
            elif kinds and kinds[row]:
                # The type in common has each of its values; a complex one has no imaginary part then.
                kind = np.dtype(kinds[row])
                value = (value.real if kind.kind != "c" else value).astype(kind, copy=False)
            values.append(value)
        return values

    @staticmethod
    def select(source, rows, metadata, kind=None):
        """Selects rows; `kind` is the type of the elements."""
        kind = np.dtype(kind or metadata.get("dtype", EMPTY_TYPE))
        ranges = source.bounds("offsets", rows)
        data = source.spans("data", [(begin * kind.itemsize, end * kind.itemsize) for begin, end in ranges])
        payload = {name: source.rows(name, rows) for name in ("shapes", "ndims", "nulls")}
        payload["data"] = np.frombuffer(data, kind)
        payload["offsets"] = _starts([end - begin for begin, end in ranges])
        chosen = {name: _pick(metadata.get(name), rows) for name in ("ndarray_rows", "row_dtypes")}
        return payload, {**metadata, **chosen}


class RaggedTensors:
    """Tensors of one type, of any shapes."""

    def __init__(self, ragged):
        self._ragged = ragged

    def encode(self, values):
        """Encodes; ValueError for several types, or one that numpy does not have."""
        torch = load_torch("a column of tensors")
        arrays, kinds = [], []
        for value in values:
            if value is None:
                arrays.append(None)
                continue
            tensor = torch.as_tensor(value).detach()
            if str(tensor.dtype) in ("torch.bfloat16",) or "float8" in str(tensor.dtype):
                raise ValueError(f"a column of tensors of {tensor.dtype} has no codec: numpy has no such type")
            if tensor.dtype not in kinds:
                kinds.append(tensor.dtype)
            arrays.append(tensor.cpu().contiguous().numpy())
        if len(kinds) > 1:
            raise ValueError(f"mixed tensor dtype: {', '.join(map(str, kinds))}")
        kind = str(kinds[0]) if kinds else EMPTY_TENSOR
        payload, metadata = self._ragged.encode(arrays, self._numpy(kind))
        return payload, {**metadata, "dtype": kind, "row_format": "ndarray"}

    @staticmethod
    def _numpy(kind):
        name = kind.split(".")[-1]
        return np.dtype({"half": "float16", "float": "float32", "double": "float64"}.get(name, name))

    def decode(self, payload, rows, metadata=None):
        """Decodes; tensors share memory where it can be written to."""
        torch = load_torch("a column of tensors")
        metadata = metadata or {}
        kind = self._numpy(metadata.get("dtype", EMPTY_TENSOR))
        values = self._ragged.decode(payload, rows, {"dtype": str(kind), "row_format": "ndarray"})
        own = lambda array: array if array.flags.writeable else array.copy()
        return [None if value is None else torch.from_numpy(np.asarray(own(value))) for value in values]

    def select(self, source, rows, metadata):
        """Selects rows."""
        kind = self._numpy(metadata.get("dtype", EMPTY_TENSOR))
        return self._ragged.select(source, rows, metadata, kind)


class TensorDicts:
    """Mappings of names to tensors; each name is a column of its own."""

    def __init__(self, tensors):
        self._tensors = tensors

    def encode(self, values, keys=None):
        """Encodes rows with these keys, or with those that they have."""
        keys = None if keys is None else self._names(keys)
        found = {}
        for row, value in enumerate(values):
            if value is None:
                continue
            if not hasattr(value, "items"):
                raise TypeError(f"row {row} of a column of tensor mappings is {type(value).__name__}")
            empty = sorted(str(name) for name, tensor in value.items() if tensor is None)
            if empty:
                raise TypeError(f"row {row} of a column of tensor mappings has explicit None for {empty}")
            names = self._names(value)
            more = [] if keys is None else sorted(set(names) - set(keys))
            if more:
                raise ValueError(f"row {row} has keys not declared in metadata['keys'] of its FieldSchema: {more}")
            found.update(dict.fromkeys(names))
        keys = sorted(found) if keys is None else keys
        payload, about = {"null_mask": _nulls(values)}, {}
        for key in keys:
            column = [None if value is None else value.get(key) for value in values]
            some, about[key] = self._tensors.encode(column)
            payload.update({f"{key}.{name}": value for name, value in some.items()})
        return payload, {"keys": keys, "key_codecs": about}

    @staticmethod
    def _names(keys):
        names = list(keys)
        for name in names:
            if not isinstance(name, str):
                raise TypeError(f"keys of a column of tensor mappings are text, not {name!r}")
            if not name or any(separator in name for separator in "./\\"):
                raise ValueError(
                    f"keys of a column of tensor mappings must not be empty, and must not contain . / \\: {name!r}"
                )
        if len(set(names)) != len(names):
            raise ValueError(f"keys of a column of tensor mappings are there twice: {names}")
        return names

    def decode(self, payload, rows, metadata=None):
        """Decodes."""
        metadata, columns = metadata or {}, {}
        for key in metadata.get("keys", ()):
            prefix = f"{key}."
            some = {name[len(prefix) :]: value for name, value in payload.items() if name.startswith(prefix)}
            columns[key] = self._tensors.decode(some, rows, metadata["key_codecs"][key])
        row_of = lambda row: {key: column[row] for key, column in columns.items() if column[row] is not None}
        return [None if payload["null_mask"][row] else row_of(row) for row in range(rows)]

    def select(self, source, rows, metadata):
        """Selects rows."""
        payload, about = {"null_mask": source.rows("null_mask", rows)}, {}
        for key in metadata["keys"]:
            some, about[key] = self._tensors.select(source.within(f"{key}."), rows, metadata["key_codecs"][key])
            payload.update({f"{key}.{name}": value for name, value in some.items()})
        return payload, {**metadata, "key_codecs": about}


def pack_json(value):
    """Returns a value as JSON; TypeError or ValueError if it has none, or would come back as another value: keys of JSON
    are text."""
    packed = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    # After the conversion, which fails for values that contain themselves.
    _check_keys(value)
    return packed


def _check_keys(value):
    inner = [value]
    while inner:
        one = inner.pop()
        if isinstance(one, dict):
            others = [key for key in one if not isinstance(key, str)]
            if others:
                raise ValueError(
                    f"the keys of a mapping are text in JSON, and {others[0]!r} is {type(others[0]).__name__}: the codec "
                    "msgpack_ragged keeps it, which needs the package msgpack"
                )
            inner.extend(one.values())
        elif isinstance(one, (list, tuple)):
            inner.extend(one)


def unpack_json(data):
    """Parses JSON."""
    return json.loads(data)


def pack_msgpack(value):
    """Returns a value in MessagePack; TypeError, ValueError or OverflowError if it has no such form."""
    msgpack = load_msgpack()
    if msgpack is None:
        raise ValueError("msgpack is not installed")
    return msgpack.packb(value, use_bin_type=True)


def unpack_msgpack(data):
    """Parses MessagePack; RuntimeError without the package msgpack."""
    msgpack = load_msgpack()
    if msgpack is None:
        raise RuntimeError("msgpack is required to read this column, and is not installed")
    return msgpack.unpackb(data, raw=False, strict_map_key=False)
