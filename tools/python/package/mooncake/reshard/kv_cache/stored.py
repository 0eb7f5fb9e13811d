"""Layouts of pages in a store, and the plans that write pages under one layout and read them into another."""

from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Optional, Tuple

from mooncake.reshard import _checks
from mooncake.reshard.contracts import ParticipantId
from mooncake.reshard.kv_cache.placement import KVCachePlacementManifest, check_complete
from mooncake.reshard.kv_cache.resolved import (
    DEFAULT_TRANSFER_LIMITS,
    KVCacheRegisteredRegion,
    KVCacheResolvedRange,
    check_binding,
    check_ranges,
)
from mooncake.reshard.kv_cache.types import (
    MOST_ITEMS,
    KVCacheComponent,
    KVCacheDescriptor,
    KVCacheModelDomain,
    check_same_bytes,
    check_texts,
    digest,
    numbers,
    several,
)


class KVCacheStoreFormat(str, Enum):
    """Order of the axes in each component of a part: tokens (P), layers, heads, and the dimensions of a head."""

    PLHD = "PLHD"
    LPHD = "LPHD"
    HPLD = "HPLD"

    def strides(self, layers, tokens, heads, width):
        """Returns the bytes from layer to layer, from token to token and from head to head."""
        extents, found, step = {"P": tokens, "L": layers, "H": heads}, {}, width
        for axis in reversed(self.value[:-1]):
            found[axis] = step
            step *= extents[axis]
        return found["L"], found["P"], found["H"]


@dataclass(frozen=True)
class KVCacheStoreShard:
    """Layers and heads of one part of a page; its suffix names the part."""

    layer_ids: Tuple[int, ...]
    head_start: int
    head_count: int
    key_suffix: str

    def __post_init__(self):
        check_texts(self, "key_suffix")
        layers = numbers(self.layer_ids, "shard layers")
        if not layers:
            raise ValueError("shard layers must be nonempty and unique")
        _checks.u64(self.head_start, "head_start")
        _checks.u64(self.head_count, "head_count", 1)
        _checks.u64(self.head_start + self.head_count, "head_end")
        object.__setattr__(self, "layer_ids", layers)


@dataclass(frozen=True)
class KVCacheStoreFragment:
    """Where heads of one layer and component are in a part."""

    global_layer_id: int
    component: KVCacheComponent
    head_start: int
    head_count: int
    part_index: int
    part_offset: int
    token_stride_bytes: int
    head_stride_bytes: int

    def __post_init__(self):
        for name in ("global_layer_id", "head_start", "part_index", "part_offset"):
            _checks.u64(getattr(self, name), name)
        for name in ("head_count", "token_stride_bytes", "head_stride_bytes"):
            _checks.u64(getattr(self, name), name, 1)
        _checks.instance(self.component, "component", KVCacheComponent)


@dataclass(frozen=True)
class KVCacheStoreLayout:
    """How each page of a model is divided into parts. A part has keys, then values. Sizes and strides follow."""

    descriptor: KVCacheDescriptor
    object_format: KVCacheStoreFormat
    shards: Tuple[KVCacheStoreShard, ...]

    def __post_init__(self):
        _checks.instance(self.descriptor, "descriptor", KVCacheDescriptor)
        _checks.instance(self.object_format, "object_format", KVCacheStoreFormat)
        shards = several(self.shards, "Store shards", KVCacheStoreShard)
        if not shards or sum(len(one.layer_ids) for one in shards) * 2 > MOST_ITEMS:
            raise ValueError(f"a Store layout has shards, and at most {MOST_ITEMS} fragments")
        _checks.unique((one.key_suffix for one in shards), "key suffix of Store shards")
        shards = tuple(sorted(shards, key=lambda one: (one.layer_ids, one.head_start)))
        object.__setattr__(self, "shards", shards)
        check_complete(self.descriptor, shards, "the Store layout")
        if sum(self.part_sizes) > 1 << 40:
            raise ValueError(f"pages of {sum(self.part_sizes)} bytes are beyond the limit of 1 TiB")

    @property
    def token_count(self) -> int:
        """Returns the tokens of a page: all of them are there."""
        return self.descriptor.page_size

    @property
    def part_sizes(self) -> Tuple[int, ...]:
        """Returns the bytes of each part."""
        entry = sum(self.descriptor.head_bytes(component) for component in self.descriptor.components)
        return tuple(len(one.layer_ids) * self.token_count * one.head_count * entry for one in self.shards)

    @property
    def fragments(self) -> Tuple[KVCacheStoreFragment, ...]:
        """Returns where each layer and component is."""
        found = []
        for number, shard in enumerate(self.shards):
            begin, extents = 0, (len(shard.layer_ids), self.token_count, shard.head_count)
            for component in self.descriptor.components:
                width = self.descriptor.head_bytes(component)
                step, *strides = self.object_format.strides(*extents, width)
                for at, layer in enumerate(shard.layer_ids):
                    heads = (shard.head_start, shard.head_count)
                    found.append(KVCacheStoreFragment(layer, component, *heads, number, begin + at * step, *strides))
                begin += extents[0] * extents[1] * extents[2] * width
        return tuple(found)

    @property
    def digest(self) -> str:
        """Returns the SHA-256 of the layout."""
        return digest(asdict(self))

    @property
    def layout_id(self) -> str:
        """Returns the id of the layout."""
        return f"sha256:{self.digest}"


@dataclass(frozen=True)
class KVCacheStoreManifest:
    """Record of a layout, which readers find beside the pages that were written under it."""

    namespace: str
    model_id: str
    model_revision: str
    semantic_fingerprint: str
    layout: KVCacheStoreLayout

    def __post_init__(self):
        check_texts(self, "namespace", "model_id", "model_revision", "semantic_fingerprint")
        _checks.instance(self.layout, "layout", KVCacheStoreLayout)

    @property
    def model_domain(self) -> str:
        """Returns the digest of the domain, which all layouts of the model have in common."""
        names = (self.namespace, self.model_id, self.model_revision, self.semantic_fingerprint)
        return KVCacheModelDomain(*names, self.layout.descriptor).digest

    @property
    def manifest_key(self) -> str:
        """Returns the key of the record."""
        return f"kv/{self.model_domain}/manifests/{self.layout.digest}"

    @property
    def digest(self) -> str:
        """Returns the SHA-256 of the record."""
        return digest(asdict(self))


@dataclass(frozen=True)
class KVCacheStoreRuntimeBinding:
    """All ranges of one participant, for one operation on pages of a store."""

    operation_id: str
    resource_id: str
    placement_id: str
    placement_digest: str
    instance_id: str
    revision: str
    participant_id: str
    regions: Tuple[KVCacheRegisteredRegion, ...]
    ranges: Tuple[KVCacheResolvedRange, ...]

    def __post_init__(self):
        check_binding(self)


def check_store_binding(placement, binding, tokens, limits=DEFAULT_TRANSFER_LIMITS):
    """ValueError unless a binding has exactly a participant's heads of the tokens of an interval."""
    _checks.instance(placement, "placement", KVCachePlacementManifest)
    _checks.instance(binding, "binding", KVCacheStoreRuntimeBinding)
    check_ranges(placement, binding, tokens, {}, limits)


@dataclass(frozen=True)
class KVCacheStorePlanningLimits:
    """Limits of a layout, and of a plan for each page."""

    max_parts: int = 100_000
    max_fragments: int = 100_000
    max_bytes: int = 1 << 40

    def __post_init__(self):
        for name, most in (("max_parts", MOST_ITEMS), ("max_fragments", MOST_ITEMS), ("max_bytes", 1 << 40)):
            if _checks.u64(getattr(self, name), name, 1) > most:
                raise ValueError(f"{name} is at most {most}")

    def check(self, layout):
        """ValueError if a layout is beyond a limit."""
        fragments = sum(len(one.layer_ids) * 2 for one in layout.shards)
        found = (
            (len(layout.shards), self.max_parts),
            (fragments, self.max_fragments),
            (sum(layout.part_sizes), self.max_bytes),
        )
        for (count, most), name in zip(found, ("parts", "fragments", "bytes")):
            if count > most:
                raise ValueError(f"the Store layout has {count} {name}, and the limit is {most}")


_LIMITS = KVCacheStorePlanningLimits()


def _parts(placement, dp, limits):
    """Returns a replica (DP), the first one by default, and its parts that have layers."""
    _checks.instance(placement, "placement", KVCachePlacementManifest)
    _checks.instance(limits, "limits", KVCacheStorePlanningLimits)
    dp = placement.dp_ranks[0] if dp is None else dp
    if _checks.u64(dp, "dp_rank") not in placement.dp_ranks:
        raise ValueError(f"DP rank is absent from placement: {dp}")
    parts = [part for part in placement.parts if part.rank.dp == dp and part.layer_ids]
    return dp, sorted(parts, key=lambda part: (part.layer_ids, part.head_start, part.replica_ordinal))


@dataclass(frozen=True)
class KVCacheStoreUploadPlan:
    """Layout of a placement as it is, and who writes each part: of ranks with equal heads, the first one."""

    source_placement: KVCachePlacementManifest
    source_dp_rank: int
    layout: KVCacheStoreLayout
    part_writers: Tuple[ParticipantId, ...]


@dataclass(frozen=True)
class KVCacheStoreLoadRange:
    """What one participant reads of a part."""

    participant_id: ParticipantId
    fragment: KVCacheStoreFragment

    def __post_init__(self):
        check_texts(self, "participant_id")
        _checks.instance(self.fragment, "fragment", KVCacheStoreFragment)


@dataclass(frozen=True)
class KVCacheStoreLoadPlan:
    """What all participants of one replica (DP) read of each page."""

    target_placement: KVCachePlacementManifest
    layout: KVCacheStoreLayout
    target_dp_rank: int
    ranges: Tuple[KVCacheStoreLoadRange, ...]

    @property
    def digest(self) -> str:
        """Returns the SHA-256 of what the plan follows from."""
        return digest(
            {
                "placement_id": self.target_placement.placement_id,
                "placement_digest": self.target_placement.digest,
                "layout_id": self.layout.layout_id,
                "target_dp_rank": self.target_dp_rank,
            }
        )


def plan_kv_cache_store_upload(
    source_placement: KVCachePlacementManifest,
    *,
    object_format: KVCacheStoreFormat,
    source_dp_rank: Optional[int] = None,
    limits: KVCacheStorePlanningLimits = _LIMITS,
) -> KVCacheStoreUploadPlan:
    """Plans the writes of pages: each rank writes its part as it has it."""
    dp, parts = _parts(source_placement, source_dp_rank, limits)
    parts = [part for part in parts if part.replica_ordinal == 0]
    staged = source_placement.topology.pp_size > 1
    suffix = lambda rank: f"{rank.tp}_{rank.pp}" if staged else str(rank.tp)
    shards = [KVCacheStoreShard(one.layer_ids, one.head_start, one.head_count, suffix(one.rank)) for one in parts]
    layout = KVCacheStoreLayout(source_placement.descriptor, object_format, tuple(shards))
    limits.check(layout)
    return KVCacheStoreUploadPlan(source_placement, dp, layout, tuple(part.participant_id for part in parts))


def plan_kv_cache_store_load(
    layout: KVCacheStoreLayout,
    target_placement: KVCachePlacementManifest,
    *,
    target_dp_rank: Optional[int] = None,
    limits: KVCacheStorePlanningLimits = _LIMITS,
) -> KVCacheStoreLoadPlan:
    """Plans the reads of pages that were written under a layout, for each rank of a replica. The target's own pages may
    have another size."""
    _checks.instance(layout, "layout", KVCacheStoreLayout)
    dp, parts = _parts(target_placement, target_dp_rank, limits)
    check_same_bytes(layout.descriptor, target_placement.descriptor)
    limits.check(layout)
    found, total, fragments = [], 0, {}
    for one in layout.fragments:
        fragments.setdefault((one.global_layer_id, one.component), []).append(one)
    for part in parts:
        for layer in part.layer_ids:
            for component in layout.descriptor.components:
                for one in fragments[layer, component]:
                    begin = max(one.head_start, part.head_start)
                    count = min(one.head_start + one.head_count, part.head_end) - begin
                    if count <= 0:
                        continue
                    at = one.part_offset + (begin - one.head_start) * one.head_stride_bytes
                    mine = replace(one, head_start=begin, head_count=count, part_offset=at)
                    found.append(KVCacheStoreLoadRange(part.participant_id, mine))
                    total += count * layout.token_count * layout.descriptor.head_bytes(component)
        if len(found) > limits.max_fragments or total > limits.max_bytes:
            raise ValueError(f"the plan of a load exceeds its limits: {len(found)} ranges, {total} bytes of each page")
    return KVCacheStoreLoadPlan(target_placement, layout, dp, tuple(found))


__all__ = [
    "KVCacheStoreFormat",
    "KVCacheStoreFragment",
    "KVCacheStoreLayout",
    "KVCacheStoreLoadPlan",
    "KVCacheStoreLoadRange",
    "KVCacheStoreManifest",
    "KVCacheStorePlanningLimits",
    "KVCacheStoreRuntimeBinding",
    "KVCacheStoreShard",
    "KVCacheStoreUploadPlan",
    "plan_kv_cache_store_load",
    "plan_kv_cache_store_upload",
]
