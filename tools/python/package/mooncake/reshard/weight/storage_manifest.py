"""Weights in a store: which object has which box of which tensor."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Tuple

from mooncake.reshard import _checks
from mooncake.reshard.contracts import ResourceId, ResourceKind, RevisionId, StoredFragmentSnapshotId, TensorId
from mooncake.reshard.geometry import boxes_exactly_cover
from mooncake.reshard.weight.types import TensorDescriptor, check_aliases, check_box
from mooncake.reshard.weight.validation import grouped

_TEXTS = ("namespace", "resource_id", "revision", "group_id", "manifest_key")


@dataclass(frozen=True)
class StoredManifestIdentity:
    """Which manifest of which content."""

    namespace: str
    resource_id: ResourceId
    revision: RevisionId
    weight_generation: int
    group_id: str
    manifest_key: str
    content_sha256: str

    def __post_init__(self):
        for name in _TEXTS:
            _checks.text(getattr(self, name), name)
        _checks.digest_text(self.content_sha256, "content_sha256")
        _checks.u64(self.weight_generation, "weight_generation")


@dataclass(frozen=True)
class StoredFragmentSnapshot:
    """A box of a tensor as a range of an object."""

    fragment_id: StoredFragmentSnapshotId
    tensor_id: TensorId
    global_offset: Tuple[int, ...]
    local_shape: Tuple[int, ...]
    object_key: str
    object_offset: int
    nbytes: int
    aliases: Tuple[TensorId, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "global_offset", _checks.integers(self.global_offset, "global_offset", 0))
        object.__setattr__(self, "local_shape", _checks.integers(self.local_shape, "local_shape", 1))
        for name in ("fragment_id", "tensor_id", "object_key"):
            _checks.text(getattr(self, name), name)
        _checks.integer(self.object_offset, "object_offset", 0)
        _checks.integer(self.nbytes, "nbytes", 1)
        object.__setattr__(self, "aliases", check_aliases(self.aliases, self.tensor_id))

    @property
    def box(self):
        """Returns offset and shape."""
        return self.global_offset, self.local_shape

    @classmethod
    def from_json(cls, value, label):
        """Parses a fragment."""
        return cls(**_checks.fields(value, cls.__dataclass_fields__, label))


@dataclass(frozen=True)
class StoredWeightManifest:
    """All tensors of a generation of weights, each complete, in objects of one group."""

    namespace: str
    resource_id: ResourceId
    revision: RevisionId
    weight_generation: int
    group_id: str
    manifest_key: str
    tensors: Tuple[TensorDescriptor, ...]
    fragments: Tuple[StoredFragmentSnapshot, ...]
    created_at: str
    manifest_digest: str = field(init=False)

    def __post_init__(self):
        for name in (*_TEXTS, "created_at"):
            _checks.text(getattr(self, name), name)
        for name, kind in (("tensors", TensorDescriptor), ("fragments", StoredFragmentSnapshot)):
            object.__setattr__(self, name, _checks.items(getattr(self, name), f"StoredWeightManifest {name}", kind))
        _checks.u64(self.weight_generation, "weight_generation")
        if self.manifest_key != f"{self.group_id}/manifest":
            raise ValueError("manifest_key does not belong to the manifest's group")
        if any(not one.object_key.startswith(f"{self.group_id}/payload/") for one in self.fragments):
            raise ValueError("a payload object_key does not belong to the manifest's group")
        self._check_fragments()
        self._check_aliases()
        for key, some in grouped(self.fragments, lambda one: one.object_key).items():
            some = sorted(some, key=lambda one: one.object_offset)
            for one, after in zip(some, some[1:]):
                if after.object_offset < one.object_offset + one.nbytes:
                    raise ValueError(
                        f"stored fragment object ranges overlap: {one.fragment_id}, {after.fragment_id} in {key}"
                    )
        object.__setattr__(self, "manifest_digest", hashlib.sha256(self.to_json().encode()).hexdigest())

    def _check_fragments(self):
        _checks.unique((tensor.tensor_id for tensor in self.tensors), "tensor_id")
        _checks.unique((one.fragment_id for one in self.fragments), "fragment_id")
        tensors, found = {tensor.tensor_id: tensor for tensor in self.tensors}, {}
        for one in self.fragments:
            if one.tensor_id not in tensors:
                raise ValueError(f"unknown tensor_id: {one.tensor_id}")
            check_box(tensors[one.tensor_id], one)
            found.setdefault(one.tensor_id, []).append(one.box)
        for name, boxes in found.items():
            _checks.unique(boxes, f"fragment geometry of {name}")
        for name, tensor in tensors.items():
            shape = tensor.global_shape
            if not boxes_exactly_cover((0,) * len(shape), shape, found.get(name, ())):
                raise ValueError(f"tensor is not fully covered: {name}")

    def _check_aliases(self):
        tensors = {tensor.tensor_id: tensor for tensor in self.tensors}
        some = [one for one in self.fragments if one.aliases]
        for (group, *_), members in grouped(some, lambda one: (one.aliases, one.box, one.nbytes)).items():
            unknown = sorted(set(group) - set(tensors))
            if unknown:
                raise ValueError(f"a stored alias references an unknown tensor: {unknown[0]}")
            if {one.tensor_id for one in members} != set(group):
                raise ValueError(f"a stored alias group is incomplete for one geometry: {', '.join(group)}")
            if len({tensors[name].alike() for name in group}) > 1:
                raise ValueError(f"tensors of a stored alias group differ: {', '.join(group)}")

    @property
    def resource_kind(self) -> ResourceKind:
        """Returns the kind: weights."""
        return ResourceKind.MODEL_WEIGHT

    @property
    def manifest_identity(self) -> StoredManifestIdentity:
        """Returns where the manifest is, and the digest of what it says."""
        return StoredManifestIdentity(
            self.namespace,
            self.resource_id,
            self.revision,
            self.weight_generation,
            self.group_id,
            self.manifest_key,
            self.manifest_digest,
        )

    def to_json(self):
        """Returns the manifest as JSON text, always in the same form."""
        found = {name: getattr(self, name) for name in (*_TEXTS, "weight_generation", "created_at")}
        found["resource_kind"] = self.resource_kind.value
        found["tensors"] = [tensor.to_json() for tensor in self.tensors]
        found["fragments"] = [asdict(one) for one in self.fragments]
        return json.dumps(found, sort_keys=True, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def from_json(cls, value):
        """Parses a manifest from text or bytes."""
        return cls.from_dict(_checks.parse(value, "weight manifest"))

    @classmethod
    def from_dict(cls, raw):
        """Parses a manifest; ValueError for other fields, or for a manifest that contradicts itself."""
        names = {*cls.__dataclass_fields__, "resource_kind"} - {"manifest_digest"}
        raw = dict(_checks.fields(raw, names, "weight manifest"))
        if raw.pop("resource_kind") != ResourceKind.MODEL_WEIGHT.value:
            raise ValueError("resource_kind of a weight manifest must be model_weight")
        for name, kind in (("tensors", TensorDescriptor), ("fragments", StoredFragmentSnapshot)):
            some = _checks.sequence(raw[name], f"StoredWeightManifest {name}")
            raw[name] = tuple(kind.from_json(one, f"stored {name[:-1]} {at}") for at, one in enumerate(some))
        return cls(**raw)


def validate_weight_manifest_snapshot(manifest):
    """Returns a manifest that was checked again from what it has now."""
    _checks.instance(manifest, "weight manifest", StoredWeightManifest)
    names = [name for name in StoredWeightManifest.__dataclass_fields__ if name != "manifest_digest"]
    try:
        return StoredWeightManifest(**{name: getattr(manifest, name) for name in names})
    except (AttributeError, TypeError) as error:
        raise ValueError(f"the weight manifest is incomplete: {error}") from error


#: The names that 0.3.13 has for the two.
StoredFragment = StoredFragmentSnapshot
WeightManifest = StoredWeightManifest

__all__ = [
    "StoredFragment",
    "StoredFragmentSnapshot",
    "StoredManifestIdentity",
    "StoredWeightManifest",
    "WeightManifest",
    "validate_weight_manifest_snapshot",
]
