"""KV cache of a model as a whole: layers, heads and bytes, without ranks and addresses."""

import hashlib
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Tuple

from mooncake.reshard import _checks
from mooncake.reshard.contracts import RuntimeBindingFragment

#: Limit of the items of a list in a contract.
MOST_ITEMS = 100_000


class KVCacheComponent(str, Enum):
    """A part of what a token has in a layer."""

    KEY = "key"
    VALUE = "value"


class KVCacheLayout(str, Enum):
    """Order of the axes of a token: heads, then the dimensions of a head. Pages in another order are bound by their
    strides."""

    NHD = "nhd"


#: Memory of one layer and component.
KVCacheRuntimeBuffer = RuntimeBindingFragment


@dataclass(frozen=True)
class KVCacheRank:
    """Position of a participant along each parallel axis."""

    dp: int = 0
    pp: int = 0
    tp: int = 0

    def __post_init__(self):
        for name in ("dp", "pp", "tp"):
            _checks.u64(getattr(self, name), f"parallel rank {name}")


@dataclass(frozen=True)
class KVCacheDescriptor:
    """What all ranks have together. Latent attention (MLA) is one head, and `value_head_dim` 0 if its entries have no
    second part."""

    global_layer_ids: Tuple[int, ...]
    dtype: str
    itemsize: int
    page_size: int
    total_kv_heads: int
    key_head_dim: int
    value_head_dim: int
    layout: KVCacheLayout = KVCacheLayout.NHD

    def __post_init__(self):
        layers = numbers(self.global_layer_ids, "global_layer_ids")
        if not layers:
            raise ValueError("global_layer_ids must not be empty")
        object.__setattr__(self, "global_layer_ids", layers)
        _checks.text(self.dtype, "dtype")
        for name in ("itemsize", "page_size", "total_kv_heads", "key_head_dim"):
            _checks.u64(getattr(self, name), name, 1)
        _checks.u64(self.value_head_dim, "value_head_dim")
        for name in ("key_head_dim", "value_head_dim"):
            _checks.u64(getattr(self, name) * self.itemsize, f"{name} byte size")
        _checks.instance(self.layout, "layout", KVCacheLayout)

    @property
    def components(self) -> Tuple[KVCacheComponent, ...]:
        """Returns what each token has in each layer."""
        return tuple(KVCacheComponent) if self.value_head_dim else (KVCacheComponent.KEY,)

    def head_dim(self, component) -> int:
        """Returns the elements of a head."""
        return self.key_head_dim if component is KVCacheComponent.KEY else self.value_head_dim

    def head_bytes(self, component) -> int:
        """Returns the bytes of a head of one token in one layer."""
        return self.head_dim(component) * self.itemsize


def check_same_bytes(source, target):
    """ValueError if two descriptors are not of the same bytes for each token. Pages may have different sizes."""
    for one in fields(KVCacheDescriptor):
        ours, theirs = getattr(source, one.name), getattr(target, one.name)
        if one.name != "page_size" and ours != theirs:
            raise ValueError(
                f"source and target descriptors differ in {one.name}: {ours} and {theirs}; bytes are only copied"
            )


def numbers(value, name):
    """Returns numbers in order; ValueError if there are too many, or one is there twice."""
    found = _checks.integers(value, name, 0)
    if len(found) > MOST_ITEMS:
        raise ValueError(f"{name} has {len(found)} items, and the limit is {MOST_ITEMS}")
    _checks.unique(found, f"number in {name}")
    return tuple(sorted(_checks.u64(one, name) for one in found))


def several(value, name, kind):
    """Returns a sequence of objects of one class; ValueError if there are too many."""
    found = _checks.items(value, name, kind)
    if len(found) > MOST_ITEMS:
        raise ValueError(f"{name} has {len(found)} items, and the limit is {MOST_ITEMS}")
    return found


def check_texts(value, *names):
    """ValueError if a field is not a text, or empty."""
    for name in names:
        _checks.text(getattr(value, name), name)


def check_apart(spans, label):
    """ValueError if two spans of bytes have one in common."""
    end = 0
    for begin, behind in sorted(spans):
        if begin < end:
            raise ValueError(f"{label} overlap in memory at {begin:#x}")
        end = behind


def digest(value):
    """Returns the SHA-256 of a value as JSON."""
    return hashlib.sha256(_checks.canonical(value).encode()).hexdigest()


def placement_fragment_id(participant_id, global_layer_id, component, *, head_start, head_count):
    """Returns the id of a participant's heads of one layer and component."""
    return _checks.identity(
        {
            "schema": "kv-cache-placement-fragment",
            "participant_id": _checks.text(participant_id, "participant_id"),
            "global_layer_id": _checks.u64(global_layer_id, "global_layer_id"),
            "component": _checks.instance(component, "component", KVCacheComponent).value,
            "head_start": _checks.u64(head_start, "head_start"),
            "head_count": _checks.u64(head_count, "head_count", 1),
        }
    )


@dataclass(frozen=True)
class KVCacheModelDomain:
    """Name of KV that can be exchanged, whichever ranks have it: a revision of a model, and a fingerprint, which a
    framework defines, of all settings that change values."""

    namespace: str
    model_id: str
    model_revision: str
    semantic_fingerprint: str
    descriptor: KVCacheDescriptor

    def __post_init__(self):
        check_texts(self, "namespace", "model_id", "model_revision", "semantic_fingerprint")
        _checks.instance(self.descriptor, "descriptor", KVCacheDescriptor)

    @property
    def digest(self) -> str:
        """Returns the SHA-256 of the domain."""
        # The format is a constant of the contract, and not that of any object.
        return digest({**asdict(self), "object_format": "PLHD"})

    def logical_page_key(self, prefix, token_prefix_hash):
        """Returns the key of a page: `token_prefix_hash` is of all tokens up to its end."""
        _checks.text(prefix, "prefix")
        return f"{prefix}_{_checks.text(token_prefix_hash, 'token_prefix_hash')}_m{self.digest}"


__all__ = [
    "KVCacheComponent",
    "KVCacheDescriptor",
    "KVCacheLayout",
    "KVCacheModelDomain",
    "KVCacheRank",
    "KVCacheRuntimeBuffer",
    "placement_fragment_id",
]
