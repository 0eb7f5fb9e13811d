"""Memory of a participant by ranges of tokens and heads: pages in any order, of any size, at any strides."""

from dataclasses import asdict, dataclass
from typing import Mapping, NamedTuple, Sequence, Tuple

from mooncake.reshard import _checks
from mooncake.reshard.geometry import boxes_exactly_cover
from mooncake.reshard.kv_cache.placement import KVCachePlacementManifest
from mooncake.reshard.kv_cache.runtime import KVCacheRuntimeBindingManifest, validate_runtime_binding
from mooncake.reshard.kv_cache.snapshot import KVCacheSnapshotDescriptor
from mooncake.reshard.kv_cache.types import KVCacheComponent, check_apart, check_texts, digest, several


@dataclass(frozen=True)
class KVCacheTransferLimits:
    """Limits of an operation and of its batches."""

    max_ranges: int = 100_000
    max_operations: int = 1_000_000
    max_bytes: int = 1 << 40
    max_batch_operations: int = 4096
    max_batch_bytes: int = 64 << 20
    max_validation_work: int = 10_000_000

    def __post_init__(self):
        for name in self.__dataclass_fields__:
            _checks.u64(getattr(self, name), name, 1)


DEFAULT_TRANSFER_LIMITS = KVCacheTransferLimits()


@dataclass(frozen=True)
class KVCacheRegisteredRegion:
    """Memory that is registered with the transfer engine of an endpoint, and stays so until all copies have ended."""

    region_id: str
    endpoint: str
    address: int
    nbytes: int

    def __post_init__(self):
        check_texts(self, "region_id", "endpoint")
        _checks.u64(self.address, "region address", 1)
        _checks.u64(self.nbytes, "region nbytes", 1)
        _checks.u64(self.address + self.nbytes, "region address end")


@dataclass(frozen=True)
class KVCacheResolvedRange:
    """Tokens and heads of one layer and component in a region: usually those of a page. In pages whose heads come first
    (HND), `head_stride_bytes` is the larger stride."""

    global_layer_id: int
    component: KVCacheComponent
    token_start: int
    token_count: int
    head_start: int
    head_count: int
    region_id: str
    offset_bytes: int
    token_stride_bytes: int
    head_stride_bytes: int

    def __post_init__(self):
        for name in ("global_layer_id", "token_start", "head_start", "offset_bytes"):
            _checks.u64(getattr(self, name), name)
        for name in ("token_count", "head_count", "token_stride_bytes", "head_stride_bytes"):
            _checks.u64(getattr(self, name), name, 1)
        _checks.u64(self.token_end, "resolved token end")
        _checks.u64(self.head_end, "resolved head end")
        check_texts(self, "region_id")
        _checks.instance(self.component, "component", KVCacheComponent)

    @property
    def token_end(self) -> int:
        """Returns the first token behind the range."""
        return self.token_start + self.token_count

    @property
    def head_end(self) -> int:
        """Returns the first head behind the range."""
        return self.head_start + self.head_count

    def offset(self, token, head) -> int:
        """Returns where in its region a head of a token begins."""
        tokens, heads = token - self.token_start, head - self.head_start
        return self.offset_bytes + tokens * self.token_stride_bytes + heads * self.head_stride_bytes

    def address(self, region, token, head) -> int:
        """Returns the address of a head of a token."""
        return region.address + self.offset(token, head)


class Rows(NamedTuple):
    """How many copies a rectangle of tokens and heads takes, and of how many bytes each."""

    tokens: int
    heads: int
    nbytes: int

    @classmethod
    def of(cls, tokens, heads, width, *strides):
        """Returns the fewest copies of a rectangle that is contiguous in each of several memories as far as their
        strides (of tokens, of heads) say."""
        by_head, by_token = ({one[1] for one in strides} == {width}), ({one[0] for one in strides} == {width})
        if by_head and {one[0] for one in strides} == {heads * width}:
            return cls(1, 1, tokens * heads * width)
        if by_token and {one[1] for one in strides} == {tokens * width}:
            return cls(1, 1, tokens * heads * width)
        if by_head:
            return cls(tokens, 1, heads * width)
        return cls(1, heads, tokens * width) if by_token else cls(tokens, heads, width)


@dataclass(frozen=True)
class KVCacheResolvedRuntimeBinding:
    """All ranges of one participant, for one operation on a snapshot."""

    operation_id: str
    resource_id: str
    placement_id: str
    placement_digest: str
    instance_id: str
    revision: str
    participant_id: str
    snapshot_id: str
    snapshot_digest: str
    regions: Tuple[KVCacheRegisteredRegion, ...]
    ranges: Tuple[KVCacheResolvedRange, ...]

    def __post_init__(self):
        check_texts(self, "snapshot_id")
        _checks.digest_text(self.snapshot_digest, "snapshot_digest")
        check_binding(self)

    @property
    def digest(self) -> str:
        """Returns the SHA-256 of the binding."""
        return digest({"schema": "kv-cache-resolved-binding", **asdict(self)})


def check_binding(binding):
    """Checks what bindings have in common, and puts their regions and ranges in order."""
    names = ("operation_id", "resource_id", "placement_id", "instance_id", "revision", "participant_id")
    check_texts(binding, *names)
    _checks.digest_text(binding.placement_digest, "placement_digest")
    regions = several(binding.regions, "registered regions", KVCacheRegisteredRegion)
    ranges = several(binding.ranges, "resolved ranges", KVCacheResolvedRange)
    if not regions or not ranges:
        raise ValueError("resolved binding must contain regions and ranges")
    _checks.unique((one.region_id for one in regions), "registered region_id")
    if len({one.endpoint for one in regions}) != 1:
        raise ValueError("one runtime binding must use a single endpoint")
    key = lambda one: (
        *(one.global_layer_id, one.component.value, one.token_start, one.head_start),
        *(one.region_id, one.offset_bytes),
    )
    object.__setattr__(binding, "regions", tuple(sorted(regions, key=lambda one: one.region_id)))
    object.__setattr__(binding, "ranges", tuple(sorted(ranges, key=key)))


def check_ranges(placement, binding, tokens, expected, limits):
    """Returns the spans of memory of a binding. ValueError unless it is what is expected, and its ranges have each of
    the participant's heads of each token of the interval `tokens` once, within their regions and apart."""
    _checks.instance(limits, "limits", KVCacheTransferLimits)
    expected = {
        **expected,
        "resource_id": placement.resource_id,
        "placement_id": placement.placement_id,
        "placement_digest": placement.digest,
        "revision": placement.revision,
    }
    for name, value in expected.items():
        if getattr(binding, name) != value:
            raise ValueError(f"resolved binding {name} of {binding.participant_id} differs")
    if len(binding.ranges) > limits.max_ranges:
        raise ValueError(f"range count limit exceeded: {len(binding.ranges)} of {limits.max_ranges}")
    part, descriptor = placement.part(binding.participant_id), placement.descriptor
    regions, groups, spans = {one.region_id: one for one in binding.regions}, {}, []
    for one in binding.ranges:
        _check_range(one, regions, descriptor)
        if not tokens[0] <= one.token_start <= one.token_end <= tokens[1]:
            raise ValueError(f"resolved range is outside the token interval: {one.token_start} to {one.token_end}")
        if not part.head_start <= one.head_start <= one.head_end <= part.head_end:
            raise ValueError(f"resolved range contains unowned heads: {one.head_start} to {one.head_end}")
        groups.setdefault((one.global_layer_id, one.component), []).append(one)
        width = descriptor.head_bytes(one.component)
        strides = (one.token_stride_bytes, one.head_stride_bytes)
        rows = Rows.of(one.token_count, one.head_count, width, strides)
        if len(spans) + rows.tokens * rows.heads > limits.max_operations:
            raise ValueError(
                f"operation limit exceeded: ranges are in more than {limits.max_operations} pieces of memory"
            )
        base = regions[one.region_id].address
        for token in range(rows.tokens):
            for head in range(rows.heads):
                begin = base + one.offset(one.token_start + token, one.head_start + head)
                spans.append((begin, begin + rows.nbytes))
    check_apart(spans, f"resolved ranges of {binding.participant_id}")
    owned = {(layer, component) for layer in part.layer_ids for component in descriptor.components}
    if set(groups) != owned:
        layer, component = min(set(groups) ^ owned)
        raise ValueError(
            f"resolved binding of {binding.participant_id} misses or exceeds layer {layer}, {component.value}"
        )
    for (layer, component), some in groups.items():
        boxes = [((one.token_start, one.head_start), (one.token_count, one.head_count)) for one in some]
        wanted = ((tokens[0], part.head_start), (tokens[1] - tokens[0], part.head_count))
        if not boxes_exactly_cover(*wanted, boxes):
            raise ValueError(
                f"coverage of {binding.participant_id}, layer {layer}, {component.value} has a gap or overlap: it is "
                f"not exactly tokens {tokens[0]} to {tokens[1]} of heads {part.head_start} to {part.head_end}"
            )
    return spans


def _check_range(one, regions, descriptor):
    if one.component not in descriptor.components:
        raise ValueError(f"resolved range of a {one.component.value}, which tokens do not have")
    if one.region_id not in regions:
        raise ValueError(f"resolved range references an unknown registered region: {one.region_id}")
    region, width = regions[one.region_id], descriptor.head_bytes(one.component)
    if min(one.token_stride_bytes, one.head_stride_bytes) < width:
        raise ValueError(f"resolved range strides overlap: they are below the {width} bytes of a head")
    end = one.offset(one.token_end - 1, one.head_end - 1) + width
    if end > region.nbytes:
        raise ValueError(f"range exceeds registered region bounds: {end} of {region.nbytes}")
    for value in (region.address + one.offset_bytes, one.token_stride_bytes, one.head_stride_bytes):
        if value % descriptor.itemsize:
            raise ValueError(f"resolved range addresses and strides must be item aligned: {value}")


def validate_resolved_runtime_binding(
    placement: KVCachePlacementManifest,
    snapshot: KVCacheSnapshotDescriptor,
    binding: KVCacheResolvedRuntimeBinding,
    *,
    operation_id: str,
    limits: KVCacheTransferLimits = DEFAULT_TRANSFER_LIMITS,
) -> None:
    """ValueError unless a binding has exactly a participant's tokens and heads of a snapshot."""
    resolved_spans(placement, snapshot, binding, operation_id, limits)


def resolved_spans(placement, snapshot, binding, operation_id, limits):
    """Does what `validate_resolved_runtime_binding` does, and returns the spans of memory."""
    _checks.instance(placement, "placement", KVCachePlacementManifest)
    _checks.instance(snapshot, "snapshot", KVCacheSnapshotDescriptor)
    _checks.instance(binding, "binding", KVCacheResolvedRuntimeBinding)
    if snapshot.resource_id != placement.resource_id:
        raise ValueError("snapshot resource_id differs from placement")
    content = {"snapshot_id": snapshot.snapshot_id, "snapshot_digest": snapshot.digest}
    expected = {"operation_id": _checks.text(operation_id, "operation_id"), **content}
    return check_ranges(placement, binding, (snapshot.token_start, snapshot.token_end), expected, limits)


def resolve_contiguous_runtime_binding(
    placement: KVCachePlacementManifest,
    snapshot: KVCacheSnapshotDescriptor,
    binding: KVCacheRuntimeBindingManifest,
    *,
    operation_id: str,
    first_token_offset: int = 0,
) -> KVCacheResolvedRuntimeBinding:
    """Returns the ranges of buffers that have the tokens in order, the first one at `first_token_offset`."""
    validate_runtime_binding(placement, binding, snapshot=snapshot)
    _checks.u64(first_token_offset, "first_token_offset")
    part, regions, ranges = placement.part(binding.participant_id), [], []
    for one in binding.buffers:
        fragment = one.fragment
        if first_token_offset + snapshot.token_count > fragment.local_shape[0]:
            raise ValueError(
                f"snapshot exceeds the buffer of layer {one.global_layer_id}: {fragment.local_shape[0]} tokens"
            )
        place = (fragment.fragment_id, first_token_offset * fragment.strides_bytes[0], *fragment.strides_bytes[:2])
        heads = (part.head_start, part.head_count)
        regions.append(
            KVCacheRegisteredRegion(fragment.fragment_id, fragment.endpoint, fragment.address, fragment.nbytes)
        )
        ranges.append(
            KVCacheResolvedRange(
                one.global_layer_id, one.component, snapshot.token_start, snapshot.token_count, *heads, *place
            )
        )
    return resolve_ranges(
        placement,
        snapshot,
        binding.participant_id,
        regions,
        ranges,
        operation_id=operation_id,
        instance_id=binding.instance_id,
    )


class KVCachePagedBuffer(NamedTuple):
    """Pages of one layer and component in a region: where page 0 begins, and the strides from page to page, from token
    to token and from head to head, in bytes."""

    region_id: str
    offset_bytes: int
    page_stride_bytes: int
    token_stride_bytes: int
    head_stride_bytes: int


def paged_ranges(
    placement: KVCachePlacementManifest,
    participant_id: str,
    tokens: Tuple[int, int],
    buffers: Mapping[Tuple[int, KVCacheComponent], KVCachePagedBuffer],
    pages: Sequence[int],
) -> Tuple[KVCacheResolvedRange, ...]:
    """Returns the ranges of tokens (the first, and the first behind) that are in pages by a page table: `pages` are the
    numbers of those that have them, in order. The first token may be within its page."""
    part, size = placement.part(participant_id), placement.descriptor.page_size
    begin, end = _checks.u64(tokens[0], "the first token"), _checks.u64(tokens[1], "the token behind the last", 1)
    first = begin // size
    if len(pages) != -(-end // size) - first:
        raise ValueError(f"tokens {begin} to {end} are in {-(-end // size) - first} pages of {size}, not {len(pages)}")
    ranges = []
    for layer in part.layer_ids:
        for component in placement.descriptor.components:
            buffer = buffers.get((layer, component))
            if buffer is None:
                raise ValueError(f"no buffer of layer {layer}, {component.value} of {participant_id}")
            for number, page in enumerate(pages, first):
                _checks.u64(page, "the number of a page")
                token = max(begin, number * size)
                count = min(end, (number + 1) * size) - token
                inside = (token - number * size) * buffer.token_stride_bytes
                place = buffer.offset_bytes + page * buffer.page_stride_bytes + inside
                strides = (buffer.token_stride_bytes, buffer.head_stride_bytes)
                heads = (part.head_start, part.head_count)
                ranges.append(
                    KVCacheResolvedRange(layer, component, token, count, *heads, buffer.region_id, place, *strides)
                )
    return tuple(ranges)


def resolve_ranges(placement, snapshot, participant_id, regions, ranges, *, operation_id, instance_id):
    """Returns the binding of ranges, such as those of `paged_ranges`, once they are checked."""
    binding = KVCacheResolvedRuntimeBinding(
        operation_id=operation_id,
        resource_id=placement.resource_id,
        placement_id=placement.placement_id,
        placement_digest=placement.digest,
        instance_id=instance_id,
        revision=placement.revision,
        participant_id=participant_id,
        snapshot_id=snapshot.snapshot_id,
        snapshot_digest=snapshot.digest,
        regions=tuple(regions),
        ranges=tuple(ranges),
    )
    validate_resolved_runtime_binding(placement, snapshot, binding, operation_id=operation_id)
    return binding


__all__ = [
    "KVCachePagedBuffer",
    "KVCacheRegisteredRegion",
    "KVCacheResolvedRange",
    "KVCacheResolvedRuntimeBinding",
    "KVCacheTransferLimits",
    "paged_ranges",
    "resolve_contiguous_runtime_binding",
    "resolve_ranges",
    "validate_resolved_runtime_binding",
]
