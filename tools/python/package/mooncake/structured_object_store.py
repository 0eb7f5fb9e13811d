"""Bundles of tensors, arrays and bytes as one object, and batches of training data (DataProto), in a store.

`MooncakeBundleTransfer` puts structured objects and reads them whole, by member, by row or by range. A DataProto is a
batch: tensors and arrays with one row for each sample (`batch`), columns of any values (`non_tensor_batch`), and
metadata; each stage of a pipeline appends its fields, and others read the fields and rows that they need by a handle
that is JSON. Needs numpy; torch only for tensors.
"""

import contextlib
import copy
import io
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, Protocol
from weakref import WeakSet

import numpy as np

from mooncake import _member_ranges, _tensors
from mooncake._bundle_moves import PARALLEL_BYTES, PARALLEL_CHUNKS, Configs, Moves
from mooncake._bundle_values import BundleTransferPolicy, Described, RawDestination, Tensor, TensorObject
from mooncake._bundle_values import check_unmasked, described_type
from mooncake._bundle_values import FlatArrays as _DirectCopyPayload
from mooncake._bundle_values import Pieces as _MultiBufferPayload
from mooncake._bundle_values import release as _release
from mooncake._bundles import CHUNK_BYTES as DEFAULT_BUNDLE_CHUNK_BYTES
from mooncake._bundles import Bundles, RemoteBundleRef, check_chunk_bytes, check_prefix, decode_json, encode_json
from mooncake._column_codecs import Source, torch_if_loaded
from mooncake._column_trees import MISSING, infer_structure  # noqa: F401 - names of the original's module
from mooncake._column_trees import choose_leaf_codec as _choose_leaf_codec  # noqa: F401 - likewise
from mooncake._column_trees import escape_key as _escape_key  # noqa: F401 - likewise
from mooncake._columns import FAILURES, Columns, object_array
from mooncake._fast_copy import concat_arrays_into as _concat_arrays_into
from mooncake._member_ranges import PreparedRangeLayoutChanged, PreparedStructuredMemberRanges, StructuredMemberRange
from mooncake._member_reads import MemberReads, Stage

__all__ = [
    "BundleStore",
    "BundleTransferPolicy",
    "DATAPROTO_REF_HANDLE_TYPE",
    "DATAPROTO_REF_HANDLE_VERSION",
    "DEFAULT_BUNDLE_CHUNK_BYTES",
    "FieldSchema",
    "MooncakeBundleTransfer",
    "MooncakeDataProtoRef",
    "PreparedRangeLayoutChanged",
    "PreparedStructuredMemberRanges",
    "RemoteBundleRef",
    "STRUCTURED_FIELD_SPECS_KEY",
    "StructuredFieldLocation",
    "StructuredMemberRange",
    "StructuredMemberSlice",
    "StructuredObjectPayload",
    "StructuredObjectReadSpec",
    "StructuredObjectResult",
    "export_dataproto_ref",
    "export_ref",
    "import_dataproto_ref",
    "import_ref",
    "is_dataproto_ref_handle",
    "raw_destination",
    "tensor_object_buffer",
]

#: Several puts at a time pay from these sizes on.
AUTO_PARALLEL_MIN_BYTES = PARALLEL_BYTES
AUTO_PARALLEL_MIN_CHUNKS = PARALLEL_CHUNKS
#: Key of a structured object's metadata under which the members are described.
STRUCTURED_FIELD_SPECS_KEY = "__mooncake_structured_fields__"
_WRAPPED = "__mooncake_wrapped_object__"
DATAPROTO_REF_HANDLE_TYPE = "mooncake_dataproto_ref"
DATAPROTO_REF_HANDLE_VERSION = 1
#: Key of a handle: the group of the store under which all objects of a batch are put.
STORAGE_GROUP_ID = "storage_group_id"
_SECTIONS = ("batch", "non_tensor_batch", "meta_info")


class BundleStore(Protocol):
    """The calls that a store must have; it is used better with `batch_put_from`, `put_batch`, `batch_get_into`,
    `get_into_ranges`, `register_buffer`, `put_tensor`, `pub_tensor` and `get_tensor`."""

    def put(self, key: str, value: Any, config: Any = None) -> int: ...

    def get(self, key: str) -> bytes: ...

    def remove(self, key: str, force: bool = False) -> int: ...


@dataclass(frozen=True)
class FieldSchema:
    """How a field is encoded: its codec, or `auto`; `metadata` may have its `section`, `dtype` and `keys`."""

    codec: str
    nullable: bool = True
    metadata: dict = field(default_factory=dict)


@dataclass(frozen=True, init=False)
class StructuredObjectPayload:
    """A structured object to put: metadata that is JSON, and members by name."""

    metadata: Mapping
    buffers: Mapping

    def __init__(self, metadata: Optional[Mapping] = None, buffers: Optional[Mapping] = None):
        if buffers is None:
            raise TypeError("StructuredObjectPayload requires buffers")
        object.__setattr__(self, "metadata", {} if metadata is None else metadata)
        object.__setattr__(self, "buffers", buffers)


@dataclass
class StructuredObjectResult:
    """A structured object that was read."""

    metadata: dict
    objects: dict


@dataclass(frozen=True)
class StructuredFieldLocation:
    """The stage and the member that a field of a batch is in."""

    stage: str
    member: str
    section: str


@dataclass
class MooncakeDataProtoRef:
    """A batch in the store: its stages, and where each field is."""

    batch_size: int
    stage_refs: dict
    field_index: dict
    meta_info: dict
    namespace: str = "default"
    partition: str = "default"
    global_indexes: Optional[list] = None
    encoded_non_tensor: dict = field(default_factory=dict)
    _storage_group_id: Optional[str] = field(default=None, repr=False)


@dataclass(frozen=True)
class StructuredMemberSlice:
    """Rows of a member, along axis 0."""

    axis: int
    start: int
    end: int
    step: int = 1

    def rows(self, count):
        """Returns the rows of a member that has `count`; ValueError if there is no such slice."""
        if self.axis != 0:
            raise ValueError(f"rows are sliced along axis=0, not {self.axis}")
        if self.step <= 0:
            raise ValueError(f"slice step must be positive, not {self.step}")
        return range(*slice(self.start, self.end, self.step).indices(count))


@dataclass(frozen=True)
class StructuredObjectReadSpec:
    """What to read of a structured object."""

    ref: Any
    member_names: Optional[tuple] = None
    member_slices: tuple = ()

    def select_members(self, names):
        """Returns the same for these members; None stands for all."""
        return StructuredObjectReadSpec(self.ref, None if names is None else tuple(names), self.member_slices)

    def slice_member(self, name, axis, start, end, step=1):
        """Returns the same with a slice of a member."""
        slices = {**dict(self.member_slices), name: StructuredMemberSlice(axis, start, end, step)}
        return StructuredObjectReadSpec(self.ref, self.member_names, tuple(slices.items()))

    def member_slice(self, name):
        """Returns the slice of a member, or None."""
        return dict(self.member_slices).get(name)


def tensor_object_buffer(ptr, size, owner=None, batch_size=None):
    """Returns registered memory with a tensor's header and bytes as a member to put, or as a destination."""
    return TensorObject(int(ptr), int(size), owner, batch_size)


def raw_destination(ptr, size, owner=None, *, pre_registered=False):
    """Returns memory as a destination; its owner must live as long as what was read."""
    return RawDestination(int(ptr), int(size), owner, pre_registered)


# --- handles -------------------------------------------------------------------------------------------------------


def is_dataproto_ref_handle(value):
    """Returns true for a handle of a batch."""
    return isinstance(value, Mapping) and value.get("type") == DATAPROTO_REF_HANDLE_TYPE


def export_dataproto_ref(ref):
    """Returns the handle of a batch, which is JSON. TypeError if its metadata is not; ValueError for NaN and infinity in
    it, and for keys that are one text."""
    if not isinstance(ref, MooncakeDataProtoRef):
        raise TypeError(f"a MooncakeDataProtoRef is exported, not {type(ref).__name__}")
    place = lambda at: {"stage": at.stage, "member": at.member, "section": at.section}
    handle = {
        "type": DATAPROTO_REF_HANDLE_TYPE,
        "version": DATAPROTO_REF_HANDLE_VERSION,
        "kind": "bundle_stages",
        "batch_size": int(ref.batch_size),
        "namespace": ref.namespace,
        "partition": ref.partition,
        "global_indexes": _json_value(ref.global_indexes),
        "stage_refs": {stage: {"manifest_key": one.manifest_key} for stage, one in ref.stage_refs.items()},
        "field_index": {name: place(location) for name, location in ref.field_index.items()},
        "meta_info": _json_value(ref.meta_info),
        "encoded_non_tensor": _json_value(ref.encoded_non_tensor),
    }
    if ref._storage_group_id is not None:
        handle[STORAGE_GROUP_ID] = ref._storage_group_id
    encode_json(handle, "a handle")
    return handle


def import_dataproto_ref(handle):
    """Returns the batch of a handle; ValueError if it is no handle, or not consistent."""
    if not is_dataproto_ref_handle(handle):
        raise ValueError("this is no handle of a DataProto")
    version = handle.get("version")
    if version not in (1, 2) or isinstance(version, bool):
        raise ValueError(f"unsupported DataProto handle version: {version!r}")
    if handle.get("kind") != "bundle_stages":
        raise ValueError(f"unsupported DataProto handle kind: {handle.get('kind')!r}")
    stages = {}
    for stage, one in _mapping_of(handle, "stage_refs").items():
        stages[_text(stage, "a stage")] = RemoteBundleRef(
            _text(_mapping(one, stage).get("manifest_key"), "a manifest_key"), {}
        )
    fields = {}
    for name, one in _mapping_of(handle, "field_index").items():
        one = _mapping(one, name)
        if one.get("section") not in ("batch", "non_tensor_batch"):
            raise ValueError(f"the field {name!r} is in no section: {one.get('section')!r}")
        stage, member = _text(one.get("stage"), "a stage"), _text(one.get("member"), "a member")
        if stage not in stages:
            raise ValueError(f"the field {name!r} is of an unknown stage {stage!r}")
        fields[_text(name, "a field")] = StructuredFieldLocation(stage, member, one["section"])
    group = handle.get(STORAGE_GROUP_ID)
    if version == 2 or group is not None:
        _text(group, STORAGE_GROUP_ID)
    return MooncakeDataProtoRef(
        batch_size=_count(handle.get("batch_size"), "batch_size"),
        stage_refs=stages,
        field_index=fields,
        meta_info=dict(_mapping_of(handle, "meta_info", {})),
        namespace=str(handle.get("namespace", "default")),
        partition=str(handle.get("partition", "default")),
        global_indexes=_indexes(handle.get("global_indexes")),
        encoded_non_tensor={
            name: _encoded(one, name) for name, one in _mapping_of(handle, "encoded_non_tensor", {}).items()
        },
        _storage_group_id=group,
    )


export_ref = export_dataproto_ref
import_ref = import_dataproto_ref


def _text(value, label):
    if not isinstance(value, str) or not value:
        raise ValueError(f"a DataProto handle: {label} is non-empty text, not {value!r}")
    return value


def _mapping(value, label):
    if not isinstance(value, Mapping):
        raise ValueError(f"a DataProto handle: {label} is a mapping, not {type(value).__name__}")
    return value


def _mapping_of(handle, name, missing=None):
    return _mapping(handle.get(name, missing), name)


def _count(value, label):
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise ValueError(f"a DataProto handle: {label} is a number, 0 or above, not {value!r}")
    return int(value)


def _encoded(value, name):
    """Returns the description of an encoded column; ValueError if it is none."""
    value = dict(_mapping(value, f"the column {name!r}"))
    _text(value.get("codec"), f"the codec of {name!r}")
    if "rows" in value:
        _count(value["rows"], f"rows of {name!r}")
    if value.get("metadata") is not None:
        _mapping(value["metadata"], f"metadata of {name!r}")
    for part, member in _mapping(value.get("payload_members"), f"payload_members of {name!r}").items():
        _text(member, f"the member of {part!r} of {name!r}")
    return value


def _indexes(value):
    if value is None:
        return None
    if not isinstance(value, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in value):
        raise ValueError(f"a DataProto handle: global_indexes are a list of numbers, not {value!r}")
    return list(value)


def _json_value(value):
    """Returns a value with arrays and numbers of numpy as JSON's; TypeError for others, ValueError for what JSON cannot
    tell apart or does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"a DataProto handle is JSON, which has no {value}")
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, (np.generic, np.ndarray)):
        return _json_value(value.tolist())
    if isinstance(value, Mapping):
        found = {str(key): _json_value(item) for key, item in value.items()}
        if len(found) != len(value):
            both = [key for key in value if not isinstance(key, str) and str(key) in value]
            raise ValueError(f"a DataProto handle is JSON, whose keys are text: {both} are there twice as such")
        return found
    if isinstance(value, (list, tuple)):
        return [_json_value(item) for item in value]
    raise TypeError(f"a DataProto handle is JSON, and {type(value).__name__} is not")


def _resolve(ref):
    if isinstance(ref, MooncakeDataProtoRef):
        return ref
    if is_dataproto_ref_handle(ref):
        return import_dataproto_ref(ref)
    raise TypeError(f"a MooncakeDataProtoRef or its handle, not {type(ref).__name__}")


# --- members -------------------------------------------------------------------------------------------------------


def _has_tensor_codec_helpers():
    """Returns true if tensors are put with the store's header, and false if as files of torch."""
    return True


def _member(value, takes_tensors):
    """Returns a member's specification and its payload."""
    if isinstance(value, TensorObject):
        return {"encoding": "torch_tensor"}, value
    if isinstance(value, (_DirectCopyPayload, _MultiBufferPayload)):
        if value.dtype is None or value.shape is None:
            return {"encoding": "bytes"}, value
        return {"encoding": "ndarray", "dtype": value.dtype, "shape": list(value.shape)}, value
    torch = torch_if_loaded()
    if torch is not None and isinstance(value, torch.Tensor):
        return _nested_member(value, torch) if value.is_nested else _tensor_member(value, torch, takes_tensors)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError("an array of objects is no member: a batch's non_tensor_batch takes it")
        check_unmasked(value, "a member")
        array = np.asarray(value, order="C")
        spec = {"encoding": "ndarray", "dtype": described_type(array.dtype), "shape": list(array.shape)}
        return spec, array.reshape(-1).view(np.uint8)
    if isinstance(value, np.generic) and not isinstance(value, bytes):
        spec, payload = _member(np.asarray(value), takes_tensors)
        return {**spec, "scalar": True}, payload
    return {"encoding": "bytes"}, value


def _tensor_member(value, torch, takes_tensors):
    spec = {"encoding": "torch_tensor", "dtype": str(value.dtype), "shape": list(value.shape)}
    spec["element_size"] = value.element_size()
    if takes_tensors:
        return spec, Tensor(value)
    if not _has_tensor_codec_helpers():
        return spec, Described(_saved(value, torch), {"format": "torch_save"})
    return spec, Described(_tensor_pieces([value]), {"metadata_bytes": _tensors.HEADER_BYTES})


def _tensor_pieces(values):
    """Returns tensors as pieces: each one's header, and its bytes where they are."""
    import ctypes

    buffers, owners = [], []
    for value in values:
        head, address, size, owner = _tensors.serialize(value)
        buffers += [memoryview(head), memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B")]
        owners.append(owner)
    return _MultiBufferPayload(tuple(buffers), tuple(owners))


def _nested_member(value, torch):
    if value.layout != torch.jagged:
        raise ValueError("a nested tensor is put in the layout torch.jagged only")
    spec = {"encoding": "torch_tensor", "dtype": str(value.dtype), "nested": True}
    parts = [value.values(), value.offsets(), *([] if value.lengths() is None else [value.lengths()])]
    if not _has_tensor_codec_helpers():
        return {**spec, "format": "torch_save"}, _saved(value, torch)
    sizes = [_tensors.HEADER_BYTES + part.numel() * part.element_size() for part in parts]
    spec.update(format="tensor_parts", part_bytes=sizes, has_lengths=len(parts) == 3)
    spec["ragged_idx"] = int(getattr(value, "_ragged_idx", 1))
    return spec, _tensor_pieces(parts)


def _saved(value, torch):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getbuffer()


def _metadata(payload, specs):
    """Returns a structured object's metadata as bytes; TypeError if it is not JSON."""
    if not isinstance(payload, Mapping):
        raise TypeError(f"metadata of a structured object is a mapping, not {type(payload).__name__}")
    if STRUCTURED_FIELD_SPECS_KEY in payload:
        raise ValueError(f"{STRUCTURED_FIELD_SPECS_KEY!r} is reserved in metadata")
    return encode_json({"layout": "structured", **payload, STRUCTURED_FIELD_SPECS_KEY: specs}, "metadata")


class MooncakeBundleTransfer:
    """Structured objects and batches in a store, under one prefix of its keys.

    Any number of threads may use one object. `buffer_pool` is memory that is registered already: puts are staged there,
    and arrays that are read lie there until `release_result`. Nothing is visible to others before all of it is there; a
    put that fails removes what it has put.
    """

    def __init__(self, store, key_prefix="bundle", default_chunk_bytes=DEFAULT_BUNDLE_CHUNK_BYTES, buffer_pool=None):
        self.store = store
        self.key_prefix = check_prefix(key_prefix)
        self.default_chunk_bytes = check_chunk_bytes(default_chunk_bytes)
        # By name, at each call: it may be replaced in this module.
        self._transport = Moves(store, buffer_pool, lambda *arguments: _concat_arrays_into(*arguments))
        self._bundle_store = Bundles(self._transport, self.key_prefix, self.default_chunk_bytes)
        self._reads = MemberReads(self._bundle_store, self._transport)

    def close(self):
        """Unregisters and frees the memory that puts were staged in, as the end of the object does; RuntimeError during
        a put. The caller's `buffer_pool` stays. A later put stages in new memory."""
        self._transport.close()

    # --- bundles and structured objects ----------------------------------------------------------------------------

    def put_bundle(
        self, meta, buffers, partition="default", chunk_bytes=None, policy=None, max_inflight_put=None, config=None
    ):
        """Puts bytes of metadata and named buffers."""
        return self._bundle_store.put_bundle(meta, buffers, partition, chunk_bytes, policy, max_inflight_put, config)

    def remove_bundle(self, ref):
        """Removes a bundle or a structured object."""
        self._bundle_store.remove_bundle(ref)

    def put_structured_object(
        self, payload, partition="default", chunk_bytes=None, policy=None, max_inflight_put=None, config=None
    ):
        """Puts metadata and members: bytes, arrays, tensors, and `tensor_object_buffer`s."""
        return self._put(payload, partition, chunk_bytes, policy, max_inflight_put, config)

    def _put(self, payload, partition, chunk_bytes, policy, max_inflight_put, config, old=None):
        takes = self._transport.takes_tensors(config)
        members = {name: _member(value, takes) for name, value in payload.buffers.items()}
        specs = {name: spec for name, (spec, _) in members.items()}
        metadata, continues = payload.metadata, None
        if old is not None:
            manifest = self._bundle_store.resolve_manifest(old)
            continues = (manifest, self._bundle_store.manifest_key(old, manifest))
            before = dict(self._stage(manifest).metadata)
            specs = {**before.pop(STRUCTURED_FIELD_SPECS_KEY, {}), **specs}
            metadata = {**before, **metadata}
        buffers = {name: value for name, (_, value) in members.items()}
        return self._bundle_store.put_bundle(
            _metadata(metadata, specs), buffers, partition, chunk_bytes, policy, max_inflight_put, config, continues
        )

    def put_object(self, obj, partition="default", chunk_bytes=None, policy=None, max_inflight_put=None, config=None):
        """Puts a mapping of members, or a single tensor or array."""
        wrapped = not isinstance(obj, Mapping)
        payload = StructuredObjectPayload({_WRAPPED: True} if wrapped else {}, {"value": obj} if wrapped else obj)
        return self._put(payload, partition, chunk_bytes, policy, max_inflight_put, config)

    def get_object(self, ref):
        """Reads what `put_object` put."""
        result = self.materialize(self.read_spec(ref))
        return result.objects["value"] if result.metadata.get(_WRAPPED) else result.objects

    def read_spec(self, ref):
        """Returns a specification that reads all of an object; it selects and slices members."""
        return StructuredObjectReadSpec(ref)

    def materialize(self, spec):
        """Reads the members that a specification selects."""
        return self.materialize_into(spec, None)

    def materialize_into(self, spec, destinations):
        """Reads members into memory of the caller's, by name; others into memory of their own.

        Members of up to 4 MiB that are read together share memory, which lives as long as one of them.
        """
        stage, selected = self._selected(spec)
        unknown = [name for name in destinations or () if name not in selected]
        unknown += [name for name, _ in spec.member_slices if name not in stage.payloads]
        if unknown:
            raise KeyError(f"destinations or slices of members that are not read: {unknown}")
        rows = {name: self._rows(stage, name, one) for name, one in spec.member_slices if name in selected}
        objects = self._reads.read(stage, selected, rows, destinations)
        return StructuredObjectResult(dict(stage.metadata), objects)

    def materialize_ranges_into(self, spec, ranges, destinations):
        """Reads ranges of members into registered destinations, one for each member."""
        stage, selected = self._selected(spec)
        prepared = _member_ranges.prepare(stage, selected, ranges, destinations)
        bind = lambda name, plan: _member_ranges.bind(stage, selected, plan, destinations[name])
        self._transport.get([bind(name, plan) for name, plan in prepared.items()], ranges=True)
        return StructuredObjectResult(dict(stage.metadata), dict(destinations))

    def prepare_member_ranges(self, spec, ranges, destination):
        """Returns ranges of one member as a plan that any object of the same layout can be read by."""
        stage, selected = self._selected(spec)
        ranges = tuple(ranges)
        names = {getattr(one, "member_name", None) for one in ranges}
        if len(names) > 1:
            raise ValueError(f"prepared ranges are of one member, not of {len(names)}")
        prepared = _member_ranges.prepare(stage, selected, ranges, dict.fromkeys(names, destination))
        return next(iter(prepared.values()))

    def materialize_prepared_ranges_into(self, spec, prepared, destination):
        """Reads an object by such a plan. `PreparedRangeLayoutChanged` if its layout is another."""
        stage, selected = self._selected(spec)
        place = _member_ranges.bind(stage, selected, prepared, destination)
        self._transport.get([place], ranges=True)
        return StructuredObjectResult(dict(stage.metadata), {prepared.member_name: destination})

    @staticmethod
    def release_result(result):
        """Returns the memory of a result to the buffer pool. Arrays of the result must not be used any more."""
        _release(result)

    def _selected(self, spec):
        """Returns an object's stage, and the names to read as keys of a dictionary, in their order."""
        if spec.member_names is not None and not spec.member_names:
            raise ValueError("the specification selected no members")
        stage = self._stage(self._bundle_store.resolve_manifest(spec.ref))
        selected = dict.fromkeys(stage.payloads if spec.member_names is None else spec.member_names)
        missing = [name for name in selected if name not in stage.payloads]
        if missing:
            raise KeyError(f"unknown bundle buffers: {missing}")
        return stage, selected

    def _stage(self, manifest):
        metadata = decode_json(self._reads.bytes(manifest["meta"]), "metadata of a structured object")
        specs = metadata.get(STRUCTURED_FIELD_SPECS_KEY, {})
        if not isinstance(specs, dict) or not all(isinstance(spec, dict) for spec in specs.values()):
            raise ValueError("members of a structured object are described by mappings")
        return Stage(manifest, metadata, specs)

    def _rows(self, stage, name, one):
        """Returns the rows of a slice of a member."""
        spec = stage.spec(name)
        if spec.get("encoding", "bytes") == "bytes":
            raise ValueError(f"structured bytes member {name} does not support slicing")
        if spec.get("nested"):
            # The number of rows is known when it has been read: the caller's end is within it.
            return one.rows(max(one.end, 0))
        shape = spec.get("shape")
        if not isinstance(shape, list) or not shape:
            raise ValueError(f"the member {name} has no rows")
        return one.rows(int(shape[0]))

    # --- batches ---------------------------------------------------------------------------------------------------

    def put(
        self,
        data,
        *,
        type="dataproto",
        namespace="default",
        partition="default",
        stage="default",
        chunk_bytes=None,
        policy=None,
        config=None,
        field_schemas=None,
    ):
        """Puts a batch: a DataProto or something like it, or with type `dict` a flat mapping, whose values go to the
        sections by their lengths and schemas."""
        data = _sections(data, field_schemas or {}) if _checked_type(type) == "dict" else data
        options = (chunk_bytes, policy, config, field_schemas)
        return self._put_stage(None, data, namespace, partition, stage, False, *options)

    def put_dataproto(
        self,
        data,
        *,
        namespace="default",
        partition="default",
        stage="default",
        chunk_bytes=None,
        policy=None,
        field_schemas=None,
        config=None,
    ):
        """Puts a DataProto, something with its three attributes, or a mapping."""
        options = (chunk_bytes, policy, config, field_schemas)
        return self._put_stage(None, data, namespace, partition, stage, False, *options)

    def append_dataproto_fields(
        self, ref, data, *, stage, overwrite=False, chunk_bytes=None, policy=None, field_schemas=None, config=None
    ):
        """Puts further fields of a batch, and returns the batch with them; the one before stays readable. With
        `overwrite`, all fields of an existing stage are replaced."""
        ref = _resolve(ref)
        options = (chunk_bytes, policy, config, field_schemas)
        return self._put_stage(ref, data, ref.namespace, ref.partition, stage, overwrite, *options)

    def _put_stage(self, ref, data, namespace, partition, stage, overwrite, chunk_bytes, policy, config, field_schemas):
        batch, columns, meta_info = _split(data)
        _check_sections(batch, columns, meta_info, field_schemas or {})
        count = _rows_of(batch, columns)
        if ref is not None and (batch or columns) and count != ref.batch_size:
            raise ValueError(f"the batch size {count} is not that of the batch appended to, {ref.batch_size}")
        buffers, places, encoded = self._encoded(stage, batch, columns, field_schemas or {})
        made = ref if ref is not None else MooncakeDataProtoRef(count, {}, {}, {}, namespace, partition)
        made = copy.copy(made)
        made.meta_info = {**made.meta_info, **meta_info}
        if ref is None:
            group = Configs.group(config)
            made._storage_group_id = f"structured-{uuid.uuid4().hex}" if group is None else group or None
        if not buffers:
            return made
        _check_replaced(made, places, stage, overwrite)
        if not overwrite:
            _check_apart(made, stage, buffers)
        if made._storage_group_id is not None:
            config = Configs.of_group(config, made._storage_group_id)
        about = {"version": 1, "namespace": namespace, "partition": partition, "stage": stage}
        about["batch_size"] = made.batch_size
        payload = StructuredObjectPayload({"layout": "dataproto_stage", "dataproto": about}, buffers)
        before = made.stage_refs.get(stage)
        new = self._put(payload, partition, chunk_bytes, policy, None, config, None if overwrite else before)
        if overwrite and before is not None:
            self.remove_bundle(before)
        made.stage_refs = {**made.stage_refs, stage: new}
        made.field_index = {**made.field_index, **places}
        kept = {name: one for name, one in made.encoded_non_tensor.items() if name not in places}
        made.encoded_non_tensor = {**kept, **encoded}
        return made

    def _encoded(self, stage, batch, columns, schemas):
        """Returns the members of fields, the location of each field, and what columns were encoded to."""
        buffers, places, encoded, fields = {}, {}, {}, {}

        def add(name, member, value):
            if member in buffers:
                raise _same_member(f"{fields[member]!r} and {name!r}", member)
            buffers[member], fields[member] = value, name

        for name, value in batch.items():
            places[name] = StructuredFieldLocation(stage, f"batch.{name}", "batch")
            add(name, places[name].member, value)
        for name, value in columns.items():
            member = f"non_tensor_batch.{name}"
            places[name] = StructuredFieldLocation(stage, member, "non_tensor_batch")
            column = _encoded_column(name, value, _schema_of(schemas, name))
            if column is None:
                add(name, member, value)
                continue
            members = {part: f"{member}.{part}" for part in column.payload}
            for part, one in column.payload.items():
                add(name, members[part], one)
            about = {"codec": column.codec, "rows": column.rows, "metadata": column.metadata}
            encoded[name] = {**about, "payload_members": members}
        return buffers, places, encoded

    def get(
        self,
        ref,
        *,
        type="dataproto",
        fields=None,
        batch_fields=None,
        non_tensor_fields=None,
        meta_info_keys=None,
        data_cls=None,
        destinations=None,
        rows=None,
    ):
        """Reads a batch, or fields and rows of it; with type `dict` as a flat mapping, with columns as lists."""
        flat = _checked_type(type) == "dict"
        names = (fields, batch_fields, non_tensor_fields)
        batch, columns, meta_info = self._get(ref, names, meta_info_keys, destinations, rows, flat)
        if not flat:
            return _as_class(batch, columns, meta_info, data_cls)
        merged = {**meta_info, **batch, **columns}
        if len(merged) != len(meta_info) + len(batch) + len(columns):
            both = sorted((set(meta_info) & (set(batch) | set(columns))) | (set(batch) & set(columns)))
            raise ValueError(f"Duplicate keys in the sections of a DataProto: {both}")
        listed = lambda value: value.tolist() if isinstance(value, np.ndarray) and value.dtype == object else value
        return {name: listed(value) if name in columns else value for name, value in merged.items()}

    def get_dataproto(
        self,
        ref,
        *,
        fields=None,
        batch_fields=None,
        non_tensor_fields=None,
        meta_info_keys=None,
        data_cls=None,
        destinations=None,
        rows=None,
    ):
        """Reads a batch, or fields and rows of it.

        `rows` is a slice, a `StructuredMemberSlice` or row numbers; `destinations` are arrays, `raw_destination`s or
        `tensor_object_buffer`s by field. Returns a mapping of the sections, or an object of `data_cls`.
        """
        names = (fields, batch_fields, non_tensor_fields)
        sections = self._get(ref, names, meta_info_keys, destinations, rows, False)
        return _as_class(*sections, data_cls)

    def _get(self, ref, names, meta_info_keys, destinations, rows, flat):
        ref = _resolve(ref)
        rows = None if rows is None else _row_numbers(rows, ref.batch_size)
        names = _chosen(ref, *names)
        _check_destinations(ref, names, destinations or {})
        sections, by_stage = {"batch": {}, "non_tensor_batch": {}}, {}
        for name in names:
            by_stage.setdefault(ref.field_index[name].stage, []).append(name)
        found, held = {}, WeakSet()
        for stage, some in by_stage.items():
            found.update(self._get_stage(ref, stage, some, destinations or {}, rows, flat, held))
        for name in names:
            sections[ref.field_index[name].section][name] = found[name]
        wanted = ref.meta_info if meta_info_keys is None else list(meta_info_keys)
        unknown = [key for key in wanted if key not in ref.meta_info]
        if unknown:
            raise KeyError(f"unknown keys of meta_info: {unknown}")
        return *sections.values(), {key: ref.meta_info[key] for key in wanted}

    def _get_stage(self, ref, stage, names, destinations, rows, flat, held):
        read = self._stage(self._bundle_store.resolve_manifest(ref.stage_refs[stage]))
        plain = {name: ref.field_index[name].member for name in names if name not in ref.encoded_non_tensor}
        encoded = {name: ref.encoded_non_tensor[name] for name in names if name in ref.encoded_non_tensor}
        into = {member: destinations[name] for name, member in plain.items() if name in destinations}
        members, parts = list(plain.values()), []
        if rows is None:
            parts = [member for one in encoded.values() for member in one["payload_members"].values()]
        chosen = None if rows is None else dict.fromkeys(members, rows)
        reads = lambda: self._reads.read(read, [*members, *parts], chosen, into, parts, held)
        values = reads() if members or parts else {}
        found = {name: values[member] for name, member in plain.items()}
        for name, one in encoded.items():
            payload, metadata = (
                {part: values.get(member) for part, member in one["payload_members"].items()},
                one.get("metadata"),
            )
            count = ref.batch_size if rows is None else len(rows)
            try:
                if rows is not None:
                    source = self._source(read, one["payload_members"], held)
                    payload, metadata = _COLUMNS.select(one["codec"], source, rows, metadata)
                column = _COLUMNS.decode(one["codec"], payload, count, metadata)
            except (AttributeError, LookupError, TypeError) as error:
                text = f"the column {name!r} is not what its handle describes, {one['codec']}"
                raise ValueError(f"{text}: {type(error).__name__}: {error}") from error
            found[name] = column if flat else object_array(column)
        return found

    def _source(self, stage, members, held):
        def rows(part, numbers):
            member = members[part]
            return self._reads.read(stage, [member], {member: numbers}, held=held)[member]

        return Source(rows, lambda part, spans: self._reads.spans(stage, members[part], spans))

    def dataproto_manifest_view(self, ref):
        """Returns a description of a batch: its fields with their types, shapes and codecs, and its stages."""
        ref = _resolve(ref)
        manifests = {stage: self._bundle_store.resolve_manifest(one) for stage, one in ref.stage_refs.items()}
        stages = {stage: self._stage(manifest) for stage, manifest in manifests.items()}
        views = {"batch": {}, "non_tensor_batch": {}}
        for name, at in ref.field_index.items():
            stage, encoded = stages[at.stage], ref.encoded_non_tensor.get(name)
            if encoded is None:
                spec = dict(stage.spec(at.member))
            else:
                members = dict(encoded["payload_members"])
                spec = {"encoding": "structured_non_tensor", "codec": encoded["codec"], "payload_members": members}
                spec["metadata"] = encoded.get("metadata")
                spec["payload_specs"] = {part: dict(stage.spec(member)) for part, member in members.items()}
            about = {"section": at.section, "stage": at.stage, "member": at.member, "spec": spec}
            views[at.section][name] = about
        stage_view = lambda stage, one: {
            "manifest_key": one.manifest_key,
            "dataproto": stages[stage].metadata.get("dataproto", {}),
        }
        return {
            "namespace": ref.namespace,
            "partition": ref.partition,
            "batch_size": ref.batch_size,
            "batch_fields": views["batch"],
            "non_tensor_fields": views["non_tensor_batch"],
            "meta_info_keys": list(ref.meta_info),
            "stages": {stage: stage_view(stage, one) for stage, one in ref.stage_refs.items()},
        }

    def cleanup_dataproto(self, ref):
        """Removes all objects of a batch. KeyError if a stage has no manifest any more, when those of the others are gone,
        too."""
        missing = None
        for stage in _resolve(ref).stage_refs.values():
            try:
                self.remove_bundle(stage)
            except KeyError as error:
                missing = error
        if missing is not None:
            raise missing

    def cleanup_dataproto_append(self, previous, appended):
        """Removes what `append_dataproto_fields` has put, if nobody uses the batch that it returned; the batch before
        stays, if it is still there. A second call has no effect."""
        previous, appended = _resolve(previous), _resolve(appended)
        for stage, one in appended.stage_refs.items():
            before = previous.stage_refs.get(stage)
            if before is not None and before.manifest_key == one.manifest_key:
                continue
            with contextlib.suppress(KeyError):
                self._bundle_store.remove_added(one, before)


_COLUMNS = Columns(lambda: _concat_arrays_into is not None)


def _checked_type(name):
    if name not in ("dataproto", "dict"):
        raise ValueError(f"unsupported Mooncake payload type: {name!r}")
    return name


def _schema_section(name, schema):
    section = schema.metadata.get("section")
    if section is not None and section not in _SECTIONS:
        raise ValueError(f"the FieldSchema of {name!r} names the section {section!r}: {', '.join(_SECTIONS)}")
    return section


def _schema_of(schemas, name):
    """Returns the schema of a column, if there is one that is not of another section."""
    schema = schemas.get(name)
    return schema if schema is not None and _schema_section(name, schema) in (None, "non_tensor_batch") else None


def _encoded_column(name, value, schema):
    """Returns a column encoded, or None if it is an array that is put as it is."""
    path = f"non_tensor_batch.{name}"
    if schema is not None:
        try:
            if not isinstance(value, (np.ndarray, Sequence)) or isinstance(value, (str, bytes, bytearray)):
                raise TypeError(f"a column is an array or a sequence, not {type(value).__name__}")
            if schema.codec != "auto" or not _is_plain(value):
                return _COLUMNS.encode_with(path, list(value), schema)
        except FAILURES as error:
            text = f"failed to encode non_tensor_batch field {name!r} with FieldSchema codec {schema.codec!r}: {error}"
            raise type(error)(text) from error
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.dtype == object):
        return _COLUMNS.encode(path, list(value))
    return None


def _is_plain(value):
    return isinstance(value, np.ndarray) and value.dtype != object


def _split(data):
    """Returns the sections of a DataProto, of something like it, or of a mapping, which is its batch."""
    if isinstance(data, Mapping):
        inner = all(value is None or callable(getattr(value, "items", None)) for value in data.values())
        if not data or not set(data) <= set(_SECTIONS) or not inner:
            return dict(data), {}, {}
        sections = [data.get(name) for name in _SECTIONS]
    else:
        sections = [getattr(data, name, None) for name in _SECTIONS]
    return tuple(_items(section) for section in sections)


def _items(value):
    if value is None:
        return {}
    if not callable(getattr(value, "items", None)):
        raise TypeError(f"a section of a DataProto is a mapping, not {type(value).__name__}")
    return dict(value.items())


def _check_sections(batch, columns, meta_info, schemas):
    both = sorted(set(batch) & set(columns))
    if both:
        raise ValueError(f"DataProto batch and non_tensor_batch fields overlap: {both}")
    for name, schema in schemas.items():
        section = _schema_section(name, schema)
        there = [one for one, some in zip(_SECTIONS, (batch, columns, meta_info)) if name in some]
        if section is not None and there and section not in there:
            raise ValueError(
                f"the FieldSchema of {name!r} declares section {section!r}, and the field is in {there[0]!r}"
            )


def _rows_of(batch, columns):
    sizes = {len(value) for some in (batch, columns) for value in some.values()}
    if len(sizes) > 1:
        raise ValueError(f"DataProto fields have inconsistent batch sizes: {sorted(sizes)}")
    return sizes.pop() if sizes else 0


def _check_replaced(ref, places, stage, overwrite):
    """ValueError if fields exist that would not be replaced as a whole stage."""
    both = sorted(set(ref.field_index) & set(places))
    if both and not overwrite:
        raise ValueError(f"DataProto fields already exist: {both}")
    left = [name for name, at in ref.field_index.items() if at.stage == stage and name not in places]
    if overwrite and left:
        raise ValueError(f"an overwrite of stage {stage!r} must include existing fields: {sorted(left)}")
    others = sorted(name for name in both if ref.field_index[name].stage != stage)
    if others:
        raise ValueError(f"DataProto fields already exist in other stages: {others}")


def _check_apart(ref, stage, members):
    """ValueError if a member of fields that are appended to a stage has the name of one that is there."""
    for name, place in ref.field_index.items():
        if place.stage != stage:
            continue
        encoded = ref.encoded_non_tensor.get(name)
        for member in [place.member] if encoded is None else encoded["payload_members"].values():
            if member in members:
                raise _same_member(f"{name!r} and one that is appended", member)


def _same_member(fields, member):
    return ValueError(
        f"the fields {fields} have the same member, {member!r}: parts of a column are stored under its name with a suffix; "
        "rename one of the fields"
    )


def _chosen(ref, fields, batch_fields, non_tensor_fields):
    if fields is not None and (batch_fields is not None or non_tensor_fields is not None):
        raise ValueError("fields cannot be combined with batch_fields or non_tensor_fields")
    if fields is not None:
        names = list(fields)
    elif batch_fields is None and non_tensor_fields is None:
        names = list(ref.field_index)
    else:
        names = [*(batch_fields or ()), *(non_tensor_fields or ())]
    unknown = [name for name in names if name not in ref.field_index]
    if unknown:
        raise KeyError(f"unknown DataProto fields: {unknown}")
    return list(dict.fromkeys(names))


def _check_destinations(ref, names, destinations):
    """KeyError for a destination of a field that is not read, ValueError for one of a field without a place of its own."""
    unknown = [name for name in destinations if name not in names]
    if unknown:
        raise KeyError(f"destinations of fields that are not read: {unknown}")
    encoded = [name for name in destinations if name in ref.encoded_non_tensor]
    if encoded:
        raise ValueError(f"columns that are decoded have no destinations: {encoded}")


def _row_numbers(rows, count):
    """Returns rows as a range or a tuple of numbers; IndexError, TypeError or ValueError for others."""
    if isinstance(rows, StructuredMemberSlice):
        return rows.rows(count)
    if isinstance(rows, slice):
        start, end, step = rows.indices(count)
        return StructuredMemberSlice(0, start, end, step).rows(count)
    if isinstance(rows, (str, bytes, bytearray)) or not isinstance(rows, (Sequence, np.ndarray)):
        raise TypeError(f"rows are a slice, a StructuredMemberSlice or numbers, not {type(rows).__name__}")
    numbers = []
    for row in rows:
        if isinstance(row, (bool, np.bool_)) or not isinstance(row, (int, np.integer)):
            raise TypeError(f"row indices are numbers, not {row!r}")
        if not -count <= row < count:
            raise IndexError(f"row {row} is out of range for {count} rows")
        numbers.append(int(row) % count)
    return tuple(numbers)


def _as_class(batch, columns, meta_info, data_cls):
    if data_cls is None or data_cls is dict:
        return {"batch": batch, "non_tensor_batch": columns, "meta_info": meta_info}
    try:
        if callable(getattr(data_cls, "from_dict", None)):
            return data_cls.from_dict(batch, columns, meta_info=meta_info)
        return data_cls(batch=batch, non_tensor_batch=columns, meta_info=meta_info)
    except TypeError as error:
        raise TypeError(
            f"a {data_cls.__name__} cannot be constructed from the sections of a DataProto: {error}"
        ) from error


# --- flat mappings ---------------------------------------------------------------------------------------------------


def _sections(data, schemas):
    """Returns the sections of a flat mapping: dense fields with one row for each sample are the batch, sequences of as
    many values are columns, and all else is metadata; schemas decide for their fields."""
    if not isinstance(data, Mapping):
        raise TypeError(f"a flat payload is a mapping, not {type(data).__name__}")
    named = {name: _schema_section(name, schemas[name]) for name in data if name in schemas}
    rows = _declared_rows(data, named)
    guess = rows == 0
    if guess:
        rows = _guessed_rows({name: value for name, value in data.items() if named.get(name) != "meta_info"})
    sections = {name: {} for name in _SECTIONS}
    for name, value in data.items():
        section = named.get(name)
        if section is None:
            dense = rows and _is_dense(value) and len(value) == rows
            column = guess and rows and _is_column(value) and len(value) == rows
            section = "batch" if dense else "non_tensor_batch" if column else "meta_info"
        sections[section][name] = _column(name, value, rows) if section == "non_tensor_batch" else value
    return sections


def _declared_rows(data, named):
    sizes = set()
    for name, section in named.items():
        if section in ("batch", "non_tensor_batch"):
            if not hasattr(data[name], "__len__"):
                raise ValueError(f"the field {name!r} has a row for each sample, and no length")
            sizes.add(len(data[name]))
    if len(sizes) > 1:
        raise ValueError(f"fields of a flat payload have inconsistent batch sizes: {sorted(sizes)}")
    return sizes.pop() if sizes else 0


def _guessed_rows(data):
    for test in (_is_dense, _is_column):
        sizes = {len(value) for value in data.values() if test(value)}
        if len(sizes) > 1:
            raise ValueError(
                f"fields of a flat payload have ambiguous batch sizes: {sorted(sizes)}; name the section of lists that"
                " are metadata by a FieldSchema"
            )
        if sizes:
            return sizes.pop()
    return 0


def _is_dense(value):
    torch = torch_if_loaded()
    if torch is not None and isinstance(value, torch.Tensor):
        return value.ndim > 0
    return isinstance(value, np.ndarray) and value.dtype != object and value.ndim > 0


def _is_column(value):
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _column(name, value, rows):
    if not _is_column(value):
        raise TypeError(f"the column {name!r} is an array or a sequence, not {type(value).__name__}")
    if len(value) != rows:
        raise ValueError(f"the column {name!r} has {len(value)} rows, not {rows}")
    return value if isinstance(value, np.ndarray) else object_array(list(value))


# --- names that tests of Mooncake use --------------------------------------------------------------------------------

_config_for_grouped_keys = Configs.for_keys
_decode_typed_ragged_values = _COLUMNS.ragged.decode
_encode_typed_ragged_regular_ndarray_rows = _COLUMNS.ragged.encode_regular


def _encode_typed_ragged_values(values, dtype_hint=None):
    return _COLUMNS.ragged.encode(values, dtype_hint)


def _encode_msgpack_ragged_values(path, values):
    return _COLUMNS._of("msgpack_ragged").encode(values)


def _decode_msgpack_ragged_values(payload, rows):
    return _COLUMNS._of("msgpack_ragged").decode(payload, rows, {})


def _encode_with_schema(path, value, schema):
    return _COLUMNS.encode_with(path, list(value), schema)


def _decode_manifest(payload):
    return decode_json(payload, "a manifest")
