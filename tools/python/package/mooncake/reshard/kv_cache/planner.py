"""Plans without addresses: which participant of the source has which layers and heads that one of the target needs."""

from dataclasses import asdict, dataclass, field
from typing import Optional, Tuple

from mooncake.reshard import _checks
from mooncake.reshard.contracts import ParticipantId, PlacementId
from mooncake.reshard.kv_cache.placement import KVCachePlacementManifest, KVCachePlacementPart
from mooncake.reshard.kv_cache.runtime import KVCacheRuntimeBindingManifest, validate_runtime_binding
from mooncake.reshard.kv_cache.snapshot import KVCacheSnapshotDescriptor, SnapshotId
from mooncake.reshard.kv_cache.types import MOST_ITEMS, KVCacheComponent, check_same_bytes, check_texts, digest, several

#: Limit of the comparisons of parts that a plan takes.
_MOST_WORK = 10_000_000


@dataclass(frozen=True)
class KVCacheTransferEdge:
    """Heads of one layer and component, which go from one participant to another."""

    source_participant_id: ParticipantId
    target_participant_id: ParticipantId
    global_layer_id: int
    component: KVCacheComponent
    global_head_start: int
    head_count: int
    source_head_offset: int
    target_head_offset: int
    head_dim: int
    itemsize: int

    def __post_init__(self):
        check_texts(self, "source_participant_id", "target_participant_id")
        for name in ("global_layer_id", "global_head_start", "source_head_offset", "target_head_offset"):
            _checks.u64(getattr(self, name), name)
        for name in ("head_count", "head_dim", "itemsize"):
            _checks.u64(getattr(self, name), name, 1)
        _checks.u64(self.inner_bytes, "inner_bytes")
        _checks.instance(self.component, "component", KVCacheComponent)

    @property
    def inner_bytes(self) -> int:
        """Returns the bytes of each token."""
        return self.head_count * self.head_dim * self.itemsize


@dataclass(frozen=True)
class KVCacheLogicalTransferPlan:
    """All edges into one participant of the target, from one replica (DP) of the source; or, as a writer has it, those
    from one participant."""

    source_placement: KVCachePlacementManifest = field(repr=False)
    target_placement: KVCachePlacementManifest = field(repr=False)
    target_participant_id: ParticipantId
    edges: Tuple[KVCacheTransferEdge, ...]
    expected_writer_ids: Tuple[ParticipantId, ...] = ()
    snapshot: Optional[KVCacheSnapshotDescriptor] = field(default=None, repr=False)

    def __post_init__(self):
        check_placements(self.source_placement, self.target_placement, self.snapshot)
        edges = several(self.edges, "logical plan edges", KVCacheTransferEdge)
        if not edges:
            raise ValueError("logical transfer plan must contain transfer edges")
        if any(edge.target_participant_id != self.target_participant_id for edge in edges):
            raise ValueError("logical plan contains a different target participant")
        object.__setattr__(self, "edges", edges)
        if len({self.source_placement.part(name).rank.dp for name in self.source_participant_ids}) != 1:
            raise ValueError("logical transfer plan must select exactly one source DP replica")
        every = edges_into(self.source_placement, self.target_part, self.source_dp_rank)
        writers = tuple(sorted({edge.source_participant_id for edge in every}))
        if tuple(sorted(self.expected_writer_ids or self.source_participant_ids)) != writers:
            raise ValueError(f"expected_writer_ids of a logical plan are not its writers: {', '.join(writers)}")
        object.__setattr__(self, "expected_writer_ids", writers)
        one = self.source_participant_ids[0] if len(self.source_participant_ids) == 1 else None
        if edges not in (every, tuple(edge for edge in every if edge.source_participant_id == one)):
            raise ValueError("logical plan edges differ from the canonical plan")

    @property
    def source_participant_ids(self) -> Tuple[ParticipantId, ...]:
        """Returns the participants whose edges the plan has."""
        return tuple(sorted({edge.source_participant_id for edge in self.edges}))

    @property
    def source_dp_rank(self) -> int:
        """Returns the replica that is read."""
        return self.source_placement.part(self.edges[0].source_participant_id).rank.dp

    @property
    def target_part(self) -> KVCachePlacementPart:
        """Returns the part that is filled."""
        return self.target_placement.part(self.target_participant_id)

    def _content(self):
        return {
            "schema": "kv-cache-logical-plan",
            "source_placement_id": self.source_placement.placement_id,
            "source_placement_digest": self.source_placement.digest,
            "target_placement_id": self.target_placement.placement_id,
            "target_placement_digest": self.target_placement.digest,
            "target_participant_id": self.target_participant_id,
            "source_dp_rank": self.source_dp_rank,
            "edges": [asdict(edge) for edge in self.edges],
            "expected_writer_ids": list(self.expected_writer_ids),
        }

    @property
    def plan_id(self) -> str:
        """Returns the id of the plan, of whatever content."""
        return _checks.identity(self._content())

    @property
    def digest(self) -> str:
        """Returns the SHA-256 of the plan and its snapshot."""
        snapshot = self.snapshot
        more = {
            "plan_id": self.plan_id,
            "snapshot_id": snapshot and snapshot.snapshot_id,
            "snapshot_digest": snapshot and snapshot.digest,
        }
        return digest({**self._content(), **more})

    def for_source(self, participant_id) -> "KVCacheLogicalTransferPlan":
        """Returns the plan of one writer; ValueError if it has nothing to write."""
        edges = tuple(edge for edge in self.edges if edge.source_participant_id == participant_id)
        if not edges:
            raise ValueError(f"source participant has no transfer edges: {participant_id}")
        ends = (self.source_placement, self.target_placement, self.target_participant_id)
        return KVCacheLogicalTransferPlan(*ends, edges, self.expected_writer_ids, self.snapshot)


def check_placements(source, target, snapshot):
    """ValueError if the bytes of two placements are not of the same KV."""
    for name, one in (("source_placement", source), ("target_placement", target)):
        _checks.instance(one, name, KVCachePlacementManifest)
    check_same_bytes(source.descriptor, target.descriptor)
    if snapshot is None:
        return
    _checks.instance(snapshot, "snapshot", KVCacheSnapshotDescriptor)
    for name, one in (("source", source), ("target", target)):
        if one.resource_id != snapshot.resource_id:
            raise ValueError(f"{name} placement resource_id differs from snapshot: {one.resource_id}")


def edges_into(source, target, dp):
    """Returns the edges that fill a part, layer by layer, from one replica of the source. Ranks with equal heads take
    turns, by the ordinals of the target's."""
    parts = [part for part in source.parts if part.rank.dp == dp]
    if len(parts) * len(target.layer_ids) > _MOST_WORK:
        raise ValueError(f"{len(parts)} parts of {len(target.layer_ids)} layers are beyond the limit of a plan")
    edges = []
    for layer in target.layer_ids:
        sources = {}
        for part in parts:
            if layer in part.layer_ids and part.head_start < target.head_end and target.head_start < part.head_end:
                sources.setdefault((part.head_start, part.head_end), []).append(part)
        for (begin, end), some in sorted(sources.items()):
            some.sort(key=lambda part: (part.replica_ordinal, part.participant_id))
            chosen = some[target.replica_ordinal % len(some)]
            begin, end = max(begin, target.head_start), min(end, target.head_end)
            for component in target.descriptor.components:
                edges.append(
                    KVCacheTransferEdge(
                        source_participant_id=chosen.participant_id,
                        target_participant_id=target.participant_id,
                        global_layer_id=layer,
                        component=component,
                        global_head_start=begin,
                        head_count=end - begin,
                        source_head_offset=begin - chosen.head_start,
                        target_head_offset=begin - target.head_start,
                        head_dim=target.descriptor.head_dim(component),
                        itemsize=target.descriptor.itemsize,
                    )
                )
        if len(edges) > MOST_ITEMS:
            raise ValueError(f"KV-cache logical plan has more than {MOST_ITEMS} edges")
    return tuple(edges)


def plan_kv_cache_transfer_to_local_target(
    source_placement: KVCachePlacementManifest,
    target_placement: KVCachePlacementManifest,
    target_participant_id: ParticipantId,
    *,
    source_dp_rank: Optional[int] = None,
    snapshot: Optional[KVCacheSnapshotDescriptor] = None,
) -> KVCacheLogicalTransferPlan:
    """Plans all that one participant of the target needs. Replicas (DP) of the target take turns with those of the
    source, unless `source_dp_rank` names one."""
    check_placements(source_placement, target_placement, snapshot)
    target = target_placement.part(target_participant_id)
    available = source_placement.dp_ranks
    if source_dp_rank is None:
        source_dp_rank = available[target.rank.dp % len(available)]
    if _checks.u64(source_dp_rank, "source_dp_rank") not in available:
        raise ValueError(f"source DP rank {source_dp_rank} is absent from placement")
    edges = edges_into(source_placement, target, source_dp_rank)
    ends = (source_placement, target_placement, target.participant_id)
    return KVCacheLogicalTransferPlan(*ends, edges, snapshot=snapshot)


@dataclass(frozen=True)
class KVCachePreparedTransferEdge:
    """An edge at addresses: of each token, `nbytes` go from one row to another."""

    endpoint: str
    global_layer_id: int
    component: KVCacheComponent
    source_base_address: int
    source_capacity: int
    target_base_address: int
    target_capacity: int
    source_row_stride: int
    target_row_stride: int
    source_head_offset_bytes: int
    target_head_offset_bytes: int
    nbytes: int

    @property
    def is_full_row(self) -> bool:
        """Returns true if rows are copied whole: then neighbouring ones are one copy."""
        heads = (self.source_head_offset_bytes, self.target_head_offset_bytes)
        return heads == (0, 0) and self.nbytes == self.source_row_stride == self.target_row_stride


@dataclass(frozen=True)
class KVCachePreparedTransferPlan:
    """Edges at addresses, for one writer; which tokens, and where, is a matter of page tables."""

    source_placement_id: PlacementId
    source_placement_digest: str
    target_placement_id: PlacementId
    target_placement_digest: str
    snapshot_id: Optional[SnapshotId]
    snapshot_digest: Optional[str]
    page_size: int
    edges: Tuple[KVCachePreparedTransferEdge, ...]


def prepare_kv_cache_transfer(
    logical_plan: KVCacheLogicalTransferPlan,
    source_binding: KVCacheRuntimeBindingManifest,
    target_binding: KVCacheRuntimeBindingManifest,
) -> KVCachePreparedTransferPlan:
    """Attaches addresses to the plan of one writer, after a check of whose they are. Both ends have pages of one size:
    others are resolved token by token (`KVCacheRuntimeTransferPlan`)."""
    _checks.instance(logical_plan, "logical_plan", KVCacheLogicalTransferPlan)
    source, target = logical_plan.source_placement, logical_plan.target_placement
    _checks.instance(source_binding, "source_binding", KVCacheRuntimeBindingManifest)
    _checks.instance(target_binding, "target_binding", KVCacheRuntimeBindingManifest)
    if logical_plan.source_participant_ids != (source_binding.participant_id,):
        raise ValueError("prepare requires a plan restricted to one source participant")
    if target_binding.participant_id != logical_plan.target_participant_id:
        raise ValueError("target binding participant differs from logical plan")
    sizes = (source.descriptor.page_size, target.descriptor.page_size)
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"pages have {sizes[0]} tokens at the source and {sizes[1]} at the target: resolve ranges instead"
        )
    validate_runtime_binding(source, source_binding, snapshot=logical_plan.snapshot)
    validate_runtime_binding(target, target_binding, snapshot=logical_plan.snapshot)
    content = (source_binding.snapshot_id, source_binding.snapshot_digest)
    if content != (target_binding.snapshot_id, target_binding.snapshot_digest):
        raise ValueError("source and target runtime binding snapshot identities differ")
    endpoints = {one.fragment.endpoint for one in target_binding.buffers}
    if len(endpoints) != 1:
        raise ValueError("one KV binding must use a single transfer endpoint")
    prepared = []
    for edge in logical_plan.edges:
        ours, theirs = (
            binding.buffer(edge.global_layer_id, edge.component).fragment
            for binding in (source_binding, target_binding)
        )
        offset = lambda buffer, heads: buffer.storage_offset_bytes + heads * buffer.strides_bytes[1]
        prepared.append(
            KVCachePreparedTransferEdge(
                endpoint=theirs.endpoint,
                global_layer_id=edge.global_layer_id,
                component=edge.component,
                source_base_address=ours.storage_address,
                source_capacity=ours.storage_nbytes,
                target_base_address=theirs.storage_address,
                target_capacity=theirs.storage_nbytes,
                source_row_stride=ours.strides_bytes[0],
                target_row_stride=theirs.strides_bytes[0],
                source_head_offset_bytes=offset(ours, edge.source_head_offset),
                target_head_offset_bytes=offset(theirs, edge.target_head_offset),
                nbytes=edge.inner_bytes,
            )
        )
    names = (source.placement_id, source.digest, target.placement_id, target.digest, *content)
    return KVCachePreparedTransferPlan(*names, page_size=sizes[0], edges=tuple(prepared))


__all__ = [
    "KVCacheLogicalTransferPlan",
    "KVCachePreparedTransferEdge",
    "KVCachePreparedTransferPlan",
    "KVCacheTransferEdge",
    "plan_kv_cache_transfer_to_local_target",
    "prepare_kv_cache_transfer",
]
