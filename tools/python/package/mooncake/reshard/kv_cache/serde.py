"""Contracts as JSON, with exactly the fields of their classes and the digests that they must have."""

import json
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from typing import Union, get_args, get_origin, get_type_hints

from mooncake.reshard import _checks
from mooncake.reshard.contracts import ResourceKind, RuntimeBindingFragment
from mooncake.reshard.kv_cache.completion import KVCacheTargetReceipt, KVCacheWriterReceipt
from mooncake.reshard.kv_cache.placement import KVCachePlacementManifest, KVCachePlacementPart
from mooncake.reshard.kv_cache.planner import KVCacheLogicalTransferPlan, KVCacheTransferEdge
from mooncake.reshard.kv_cache.resolved import (
    DEFAULT_TRANSFER_LIMITS,
    KVCacheResolvedRuntimeBinding,
    KVCacheTransferLimits,
)
from mooncake.reshard.kv_cache.runtime import KVCacheRuntimeBindingManifest
from mooncake.reshard.kv_cache.snapshot import KVCacheSnapshotDescriptor
from mooncake.reshard.kv_cache.stored import KVCacheStoreLayout, KVCacheStoreManifest
from mooncake.reshard.kv_cache.transfer import KVCacheRuntimeTransferPlan

#: Limit of a text in bytes.
_MOST = 16 << 20
#: Fields that do not go into JSON: memory that a process keeps.
_PRIVATE = {RuntimeBindingFragment: {"owner"}}


def _dump(value):
    text = _checks.canonical(value)
    if len(text) > _MOST:
        raise ValueError(f"KV-cache JSON of {len(text)} bytes is beyond the limit of {_MOST}")
    return text


def _load(value, names, label):
    if type(value) is not str or len(value) > _MOST or len(value.encode()) > _MOST:
        raise ValueError(f"{label} must be JSON text of at most {_MOST} bytes")
    try:
        return dict(_checks.fields(_checks.parse(value, label), names, label))
    except RecursionError as error:
        raise ValueError(f"{label} is nested too deeply") from error


def _names(kind):
    return {one.name for one in fields(kind) if one.init} - _PRIVATE.get(kind, set())


def _plain(value):
    """Returns a dataclass as JSON."""
    if is_dataclass(value):
        return {name: _plain(getattr(value, name)) for name in sorted(_names(type(value)))}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _parsed(kind, value, label):
    """Returns a value of a class; the constructors of dataclasses check theirs."""
    if get_origin(kind) is tuple:
        return tuple(_parsed(get_args(kind)[0], one, label) for one in _checks.sequence(value, label))
    if get_origin(kind) is Union:
        return value if value is None else _parsed(get_args(kind)[0], value, label)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        value = _checks.fields(value, _names(kind), label)
        return kind(**{name: _parsed(hints[name], one, f"{label} {name}") for name, one in value.items()})
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(_checks.text(value, label))
    return value


def _same(found, value, label):
    if found != _checks.text(value, label):
        raise ValueError(f"{label} does not match content")


def _kind(value):
    if value != ResourceKind.KV_CACHE.value:
        raise ValueError(f"resource_kind must be kv_cache, not {value!r}")


def _pair(kind, label):
    """Returns the functions of a class that is JSON by its fields alone."""
    write = lambda value: _dump(_plain(_checks.instance(value, label, kind)))
    read = lambda value: _parsed(kind, _load(value, _names(kind), label), label)
    return write, read


kv_cache_part_to_json, kv_cache_part_from_json = _pair(KVCachePlacementPart, "KV-cache placement part")
kv_cache_writer_receipt_to_json, kv_cache_writer_receipt_from_json = _pair(KVCacheWriterReceipt, "writer receipt")
kv_cache_target_receipt_to_json, kv_cache_target_receipt_from_json = _pair(KVCacheTargetReceipt, "target receipt")


def kv_cache_placement_to_json(placement: KVCachePlacementManifest) -> str:
    """Returns a placement as JSON text, always in the same form."""
    content = _checks.instance(placement, "placement", KVCachePlacementManifest)
    more = {"resource_kind": placement.resource_kind.value, "placement_digest": placement.digest}
    return _dump({**_plain(content), **more})


def kv_cache_placement_from_json(value: str) -> KVCachePlacementManifest:
    """Parses a placement; ValueError for other fields, or for a placement that contradicts itself."""
    names = _names(KVCachePlacementManifest)
    value = _load(value, {*names, "resource_kind", "placement_digest"}, "KV-cache placement")
    _kind(value["resource_kind"])
    hints = get_type_hints(KVCachePlacementManifest)
    found = KVCachePlacementManifest(**{name: _parsed(hints[name], value[name], name) for name in names})
    _same(found.digest, value["placement_digest"], "placement_digest")
    return found


def kv_cache_runtime_binding_to_json(binding: KVCacheRuntimeBindingManifest) -> str:
    """Returns a binding as JSON text."""
    _checks.instance(binding, "binding", KVCacheRuntimeBindingManifest)
    return _dump({**_plain(binding), "resource_kind": binding.resource_kind.value})


def kv_cache_runtime_binding_from_json(value: str) -> KVCacheRuntimeBindingManifest:
    """Parses a binding."""
    value = _load(value, {*_names(KVCacheRuntimeBindingManifest), "resource_kind"}, "KV-cache runtime binding")
    _kind(value.pop("resource_kind"))
    return _parsed(KVCacheRuntimeBindingManifest, value, "KV-cache runtime binding")


def kv_cache_snapshot_to_json(snapshot: KVCacheSnapshotDescriptor) -> str:
    """Returns a snapshot as JSON text."""
    _checks.instance(snapshot, "snapshot", KVCacheSnapshotDescriptor)
    more = {"resource_kind": snapshot.resource_kind.value, "snapshot_digest": snapshot.digest}
    return _dump({**_plain(snapshot), **more})


def kv_cache_snapshot_from_json(value: str) -> KVCacheSnapshotDescriptor:
    """Parses a snapshot."""
    names = _names(KVCacheSnapshotDescriptor)
    value = _load(value, {*names, "resource_kind", "snapshot_digest"}, "KV-cache snapshot")
    _kind(value["resource_kind"])
    found = KVCacheSnapshotDescriptor(**{name: value[name] for name in names})
    _same(found.digest, value["snapshot_digest"], "snapshot_digest")
    return found


def kv_cache_logical_plan_to_json(plan: KVCacheLogicalTransferPlan) -> str:
    """Returns a plan and its placements as JSON text."""
    _checks.instance(plan, "plan", KVCacheLogicalTransferPlan)
    return _dump(
        {
            "source_placement_json": kv_cache_placement_to_json(plan.source_placement),
            "target_placement_json": kv_cache_placement_to_json(plan.target_placement),
            "target_participant_id": plan.target_participant_id,
            "snapshot_json": plan.snapshot and kv_cache_snapshot_to_json(plan.snapshot),
            "plan_id": plan.plan_id,
            "plan_digest": plan.digest,
            "edges": _plain(plan.edges),
            "expected_writer_ids": list(plan.expected_writer_ids),
        }
    )


def kv_cache_logical_plan_from_json(value: str) -> KVCacheLogicalTransferPlan:
    """Parses a plan; ValueError for one that its placements do not lead to."""
    names = ("source_placement_json", "target_placement_json", "target_participant_id", "snapshot_json")
    more = ("plan_id", "plan_digest", "edges", "expected_writer_ids")
    value = _load(value, {*names, *more}, "KV-cache logical plan")
    edges = _checks.sequence(value["edges"], "edges")
    found = KVCacheLogicalTransferPlan(
        source_placement=kv_cache_placement_from_json(value["source_placement_json"]),
        target_placement=kv_cache_placement_from_json(value["target_placement_json"]),
        target_participant_id=_checks.text(value["target_participant_id"], "target_participant_id"),
        edges=tuple(_parsed(KVCacheTransferEdge, edge, "edge") for edge in edges),
        expected_writer_ids=_checks.items(value["expected_writer_ids"], "expected_writer_ids", str),
        snapshot=None if value["snapshot_json"] is None else kv_cache_snapshot_from_json(value["snapshot_json"]),
    )
    _same(found.plan_id, value["plan_id"], "plan_id")
    _same(found.digest, value["plan_digest"], "plan_digest")
    return found


def _check_schema(value, schema):
    if value.pop("schema") != schema:
        raise ValueError(f"schema must be {schema}")


def kv_cache_resolved_binding_to_json(binding: KVCacheResolvedRuntimeBinding) -> str:
    """Returns the ranges of a participant as JSON text."""
    _checks.instance(binding, "binding", KVCacheResolvedRuntimeBinding)
    return _dump({"schema": "kv-cache-resolved-binding", "binding": asdict(binding), "digest": binding.digest})


def kv_cache_resolved_binding_from_json(value: str) -> KVCacheResolvedRuntimeBinding:
    """Parses the ranges of a participant."""
    value = _load(value, ("schema", "binding", "digest"), "resolved binding")
    _check_schema(value, "kv-cache-resolved-binding")
    found = _parsed(KVCacheResolvedRuntimeBinding, value["binding"], "resolved binding")
    _same(found.digest, value["digest"], "digest of a resolved binding")
    return found


def kv_cache_runtime_transfer_to_json(plan: KVCacheRuntimeTransferPlan) -> str:
    """Returns an operation as JSON text, without its writes."""
    _checks.instance(plan, "plan", KVCacheRuntimeTransferPlan)
    return _dump(
        {
            "schema": "kv-cache-runtime-transfer",
            "operation_id": plan.operation_id,
            "logical_plans": [kv_cache_logical_plan_to_json(one) for one in plan.logical_plans],
            "source_bindings": [kv_cache_resolved_binding_to_json(one) for one in plan.source_bindings],
            "target_bindings": [kv_cache_resolved_binding_to_json(one) for one in plan.target_bindings],
            "limits": asdict(plan.limits),
            "digest": plan.digest,
        }
    )


def kv_cache_runtime_transfer_from_json(
    value: str, *, limits: KVCacheTransferLimits = DEFAULT_TRANSFER_LIMITS
) -> KVCacheRuntimeTransferPlan:
    """Parses an operation, and finds its writes anew. ValueError if it has larger limits than these."""
    _checks.instance(limits, "limits", KVCacheTransferLimits)
    names = ("schema", "operation_id", "logical_plans", "source_bindings", "target_bindings", "limits", "digest")
    value = _load(value, names, "runtime transfer")
    _check_schema(value, "kv-cache-runtime-transfer")
    theirs = _parsed(KVCacheTransferLimits, value["limits"], "limits")
    for one in fields(KVCacheTransferLimits):
        if getattr(theirs, one.name) > getattr(limits, one.name):
            raise ValueError(f"wire limits exceed receiver policy: {one.name} is {getattr(theirs, one.name)}")
    several = lambda name, parse: tuple(map(parse, _checks.items(value[name], name, str)))
    found = KVCacheRuntimeTransferPlan(
        value["operation_id"],
        several("logical_plans", kv_cache_logical_plan_from_json),
        several("source_bindings", kv_cache_resolved_binding_from_json),
        several("target_bindings", kv_cache_resolved_binding_from_json),
        theirs,
    )
    _same(found.digest, value["digest"], "digest of a runtime transfer")
    return found


def kv_cache_store_layout_to_json(layout: KVCacheStoreLayout) -> str:
    """Returns a layout as JSON text."""
    _checks.instance(layout, "layout", KVCacheStoreLayout)
    return _dump({**asdict(layout), "layout_id": layout.layout_id, "layout_digest": layout.digest})


def kv_cache_store_layout_from_json(value: str) -> KVCacheStoreLayout:
    """Parses a layout."""
    return _layout(_load(value, {*_names(KVCacheStoreLayout), "layout_id", "layout_digest"}, "KV Store layout"))


def _layout(value):
    value = dict(_checks.fields(value, {*_names(KVCacheStoreLayout), "layout_id", "layout_digest"}, "KV Store layout"))
    identity, digest = value.pop("layout_id"), value.pop("layout_digest")
    found = _parsed(KVCacheStoreLayout, value, "KV Store layout")
    _same(found.layout_id, identity, "layout_id")
    _same(found.digest, digest, "layout_digest")
    return found


def kv_cache_store_manifest_to_json(manifest: KVCacheStoreManifest) -> str:
    """Returns the record of a layout as JSON text."""
    _checks.instance(manifest, "manifest", KVCacheStoreManifest)
    more = {"layout": json.loads(kv_cache_store_layout_to_json(manifest.layout))}
    more.update(model_domain=manifest.model_domain, manifest_digest=manifest.digest)
    return _dump({**asdict(manifest), **more})


def kv_cache_store_manifest_from_json(value: str) -> KVCacheStoreManifest:
    """Parses the record of a layout."""
    names = _names(KVCacheStoreManifest)
    value = _load(value, {*names, "model_domain", "manifest_digest"}, "KV Store manifest")
    found = KVCacheStoreManifest(**{name: value[name] for name in names - {"layout"}}, layout=_layout(value["layout"]))
    _same(found.model_domain, value["model_domain"], "model_domain")
    _same(found.digest, value["manifest_digest"], "manifest_digest")
    return found


__all__ = [
    "kv_cache_logical_plan_from_json",
    "kv_cache_logical_plan_to_json",
    "kv_cache_part_from_json",
    "kv_cache_part_to_json",
    "kv_cache_placement_from_json",
    "kv_cache_placement_to_json",
    "kv_cache_resolved_binding_from_json",
    "kv_cache_resolved_binding_to_json",
    "kv_cache_runtime_binding_from_json",
    "kv_cache_runtime_binding_to_json",
    "kv_cache_runtime_transfer_from_json",
    "kv_cache_runtime_transfer_to_json",
    "kv_cache_snapshot_from_json",
    "kv_cache_snapshot_to_json",
    "kv_cache_store_layout_from_json",
    "kv_cache_store_layout_to_json",
    "kv_cache_store_manifest_from_json",
    "kv_cache_store_manifest_to_json",
    "kv_cache_target_receipt_from_json",
    "kv_cache_target_receipt_to_json",
    "kv_cache_writer_receipt_from_json",
    "kv_cache_writer_receipt_to_json",
]
