"""Placements: which participant has which layers and heads of a KV cache."""

from dataclasses import asdict, dataclass, field
from typing import Optional, Sequence, Tuple

from mooncake.reshard import _checks
from mooncake.reshard._topology import Topology, check_parts
from mooncake.reshard.contracts import (
    ParticipantId,
    PlacementId,
    PlacementSetId,
    ResourceId,
    ResourceKind,
    RevisionId,
    TopologyId,
)
from mooncake.reshard.kv_cache.types import KVCacheDescriptor, KVCacheRank, check_texts, digest, numbers, several


@dataclass(frozen=True)
class KVCacheTopologyParticipant:
    """A participant and its rank."""

    participant_id: ParticipantId
    rank: KVCacheRank

    def __post_init__(self):
        check_texts(self, "participant_id")
        _checks.instance(self.rank, "the rank of a participant", KVCacheRank)


@dataclass(frozen=True, init=False)
class KVCacheTopology(Topology):
    """The three sizes and the participants, which may be those of some replicas (DP) only."""

    dp_size: int
    pp_size: int
    tp_size: int
    participants: Tuple[KVCacheTopologyParticipant, ...]
    topology_id: TopologyId

    _AXES, _SCHEMA, _PARTICIPANT = ("dp", "pp", "tp"), "kv-cache-topology", KVCacheTopologyParticipant

    def __init__(
        self,
        *,
        dp_size: int,
        pp_size: int,
        tp_size: int,
        participants: Tuple[KVCacheTopologyParticipant, ...],
        topology_id: Optional[TopologyId] = None,
    ):
        self._fill((dp_size, pp_size, tp_size), participants, topology_id)


@dataclass(frozen=True)
class KVCachePlacementPart:
    """Layers and heads of one participant. Where several have the same heads of the same layers, they are as many as
    `replica_count`, and each has another `replica_ordinal`."""

    resource_id: ResourceId
    revision: RevisionId
    placement_set_id: PlacementSetId
    topology_id: TopologyId
    participant_id: ParticipantId
    rank: KVCacheRank
    descriptor: KVCacheDescriptor
    layer_ids: Tuple[int, ...]
    head_start: int
    head_count: int
    replica_ordinal: int = 0
    replica_count: int = 1

    def __post_init__(self):
        check_texts(self, "resource_id", "revision", "placement_set_id", "topology_id", "participant_id")
        _checks.instance(self.rank, "the rank of a placement part", KVCacheRank)
        _checks.instance(self.descriptor, "the descriptor of a placement part", KVCacheDescriptor)
        layers = numbers(self.layer_ids, "layer_ids")
        unknown = set(layers) - set(self.descriptor.global_layer_ids)
        if unknown:
            raise ValueError(
                f"placement part of {self.participant_id} contains an unknown global layer: {min(unknown)}"
            )
        object.__setattr__(self, "layer_ids", layers)
        for name, least in (("head_start", 0), ("head_count", 1), ("replica_ordinal", 0), ("replica_count", 1)):
            _checks.u64(getattr(self, name), name, least)
        if self.head_end > self.descriptor.total_kv_heads:
            total = self.descriptor.total_kv_heads
            raise ValueError(
                f"head interval of {self.participant_id} exceeds total_kv_heads: {self.head_end} of {total}"
            )
        if self.replica_ordinal >= self.replica_count:
            raise ValueError(f"replica_ordinal of {self.participant_id} must be smaller than replica_count")

    @property
    def head_end(self) -> int:
        """Returns the first head behind those of this part."""
        return self.head_start + self.head_count


@dataclass(frozen=True, init=False)
class KVCachePlacementManifest:
    """Complete placement of a KV cache, without addresses: each replica (DP) has all heads of all layers. Its id
    follows from the rest."""

    resource_id: ResourceId
    placement_id: PlacementId
    revision: RevisionId
    placement_set_id: PlacementSetId
    topology: KVCacheTopology
    descriptor: KVCacheDescriptor
    parts: Tuple[KVCachePlacementPart, ...]
    _digest: Optional[str] = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        *,
        resource_id: ResourceId,
        revision: RevisionId,
        placement_set_id: PlacementSetId,
        topology: KVCacheTopology,
        descriptor: KVCacheDescriptor,
        parts: Tuple[KVCachePlacementPart, ...],
        placement_id: Optional[PlacementId] = None,
    ):
        _checks.instance(topology, "topology", KVCacheTopology)
        shared = {
            "resource_id": _checks.text(resource_id, "resource_id"),
            "revision": _checks.text(revision, "revision"),
            "placement_set_id": _checks.text(placement_set_id, "placement_set_id"),
            "descriptor": _checks.instance(descriptor, "descriptor", KVCacheDescriptor),
        }
        parts = several(parts, "KVCachePlacementManifest parts", KVCachePlacementPart)
        parts = tuple(sorted(parts, key=lambda part: part.participant_id))
        check_parts(parts, topology, shared)
        for dp in sorted({part.rank.dp for part in parts}):
            check_complete(descriptor, [part for part in parts if part.rank.dp == dp], f"the placement of dp={dp}")
        for name, value in {**shared, "topology": topology, "parts": parts, "_digest": None}.items():
            object.__setattr__(self, name, value)
        known = _checks.identity(self._content())
        if placement_id not in (None, known):
            raise ValueError("placement_id does not match canonical logical content")
        object.__setattr__(self, "placement_id", known)

    def _content(self):
        return {
            "schema": "complete-kv-cache-placement",
            "resource_kind": self.resource_kind.value,
            "resource_id": self.resource_id,
            "revision": self.revision,
            "placement_set_id": self.placement_set_id,
            "topology": self.topology.to_json(),
            "descriptor": asdict(self.descriptor),
            "parts": [asdict(part) for part in self.parts],
        }

    @property
    def resource_kind(self) -> ResourceKind:
        """Returns the kind: KV cache."""
        return ResourceKind.KV_CACHE

    @property
    def digest(self) -> str:
        """Returns the SHA-256 of the content and the id."""
        if self._digest is None:
            object.__setattr__(self, "_digest", digest({**self._content(), "placement_id": self.placement_id}))
        return self._digest

    @property
    def dp_ranks(self) -> Tuple[int, ...]:
        """Returns the replicas (DP) that are placed."""
        return tuple(sorted({part.rank.dp for part in self.parts}))

    def part(self, participant_id) -> KVCachePlacementPart:
        """Returns a participant's part; ValueError if there is none of that name."""
        for part in self.parts:
            if part.participant_id == participant_id:
                return part
        raise ValueError(f"unknown KV-cache participant: {participant_id}")


def check_complete(descriptor, shards, label):
    """ValueError unless shards (`layer_ids`, `head_start`, `head_count`, perhaps replicas) have all heads of all
    layers, and those that have a head in common are replicas of each other."""
    by_layer = {layer: {} for layer in descriptor.global_layer_ids}
    for shard in shards:
        sides = (shard.head_start, shard.head_start + shard.head_count)
        for layer in shard.layer_ids:
            if layer not in by_layer:
                raise ValueError(f"{label} contains an unknown global layer: {layer}")
            by_layer[layer].setdefault(sides, []).append(shard)
    for layer, found in by_layer.items():
        head = 0
        for (begin, end), some in sorted(found.items()):
            if begin < head:
                raise ValueError(
                    f"{label}: layer {layer}: overlapping replica head intervals must match exactly: {head}"
                )
            if begin > head:
                raise ValueError(f"{label} misses layer={layer} head={head}")
            head = end
            counts = {getattr(one, "replica_count", 1) for one in some}
            ordinals = {getattr(one, "replica_ordinal", 0) for one in some}
            if counts != {len(some)} or ordinals != set(range(len(some))):
                raise ValueError(
                    f"{label}: layer {layer}: overlapping KV heads must be an exact declared replica set, and "
                    f"{len(some)} have head {begin} of {min(counts)} declared"
                )
        if head != descriptor.total_kv_heads:
            raise ValueError(f"{label} misses layer={layer} head={head}")


def assemble_kv_cache_placement(
    parts: Sequence[KVCachePlacementPart], *, dp_size: int, pp_size: int, tp_size: int
) -> KVCachePlacementManifest:
    """Returns the placement of parts, which state who the participants are."""
    found = several(parts, "KV-cache placement parts", KVCachePlacementPart)
    if not found:
        raise ValueError("KV-cache placement must contain at least one part")
    people = tuple(KVCacheTopologyParticipant(part.participant_id, part.rank) for part in found)
    first = found[0]
    return KVCachePlacementManifest(
        resource_id=first.resource_id,
        revision=first.revision,
        placement_set_id=first.placement_set_id,
        topology=KVCacheTopology(dp_size=dp_size, pp_size=pp_size, tp_size=tp_size, participants=people),
        descriptor=first.descriptor,
        parts=found,
    )


#: Most participants of a placement that `place_kv_cache` makes: each is an object of several KiB.
_MOST_PARTICIPANTS = 1 << 16


def place_kv_cache(
    descriptor: KVCacheDescriptor,
    *,
    resource_id: ResourceId,
    revision: RevisionId,
    tp_size: int,
    pp_size: int = 1,
    dp_size: int = 1,
    stage_layers: Optional[Sequence[int]] = None,
    placement_set_id: PlacementSetId = "kv",
) -> KVCachePlacementManifest:
    """Returns the usual placement, as vLLM and SGLang have it: heads in order over TP, each of them on as many ranks as
    TP is larger than their number; layers in order over PP, by `stage_layers` numbers of them. Participants are named
    `dp0-pp0-tp0`. ValueError if heads or layers cannot be divided, or for more than 65,536 participants."""
    _checks.instance(descriptor, "descriptor", KVCacheDescriptor)
    for name, size in (("tp_size", tp_size), ("pp_size", pp_size), ("dp_size", dp_size)):
        _checks.u64(size, name, 1)
    if dp_size * pp_size * tp_size > _MOST_PARTICIPANTS:
        raise ValueError(
            f"dp_size={dp_size} x pp_size={pp_size} x tp_size={tp_size} are more than {_MOST_PARTICIPANTS} participants"
        )
    heads, layers = descriptor.total_kv_heads, descriptor.global_layer_ids
    if heads % tp_size and tp_size % heads:
        raise ValueError(f"{heads} KV heads cannot be divided over tp_size={tp_size}, nor each be on as many ranks")
    copies, count = max(tp_size // heads, 1), max(heads // tp_size, 1)
    if stage_layers is None:
        if len(layers) % pp_size:
            raise ValueError(f"{len(layers)} layers cannot be divided over pp_size={pp_size}: give stage_layers")
        stage_layers = [len(layers) // pp_size] * pp_size
    stage_layers = _checks.integers(stage_layers, "stage_layers", 0)
    if len(stage_layers) != pp_size or sum(stage_layers) != len(layers):
        raise ValueError(f"stage_layers {list(stage_layers)} are not {len(layers)} layers on {pp_size} stages")
    ranks = [(dp, pp, tp) for dp in range(dp_size) for pp in range(pp_size) for tp in range(tp_size)]
    people = [KVCacheTopologyParticipant(f"dp{dp}-pp{pp}-tp{tp}", KVCacheRank(dp, pp, tp)) for dp, pp, tp in ranks]
    topology = KVCacheTopology(dp_size=dp_size, pp_size=pp_size, tp_size=tp_size, participants=tuple(people))
    shared = {"resource_id": resource_id, "revision": revision, "placement_set_id": placement_set_id}
    parts = []
    for one in topology.participants:
        first = sum(stage_layers[: one.rank.pp])
        parts.append(
            KVCachePlacementPart(
                **shared,
                topology_id=topology.topology_id,
                participant_id=one.participant_id,
                rank=one.rank,
                descriptor=descriptor,
                layer_ids=layers[first : first + stage_layers[one.rank.pp]],
                head_start=one.rank.tp // copies * count,
                head_count=count,
                replica_ordinal=one.rank.tp % copies,
                replica_count=copies,
            )
        )
    return KVCachePlacementManifest(**shared, topology=topology, descriptor=descriptor, parts=tuple(parts))


__all__ = [
    "KVCachePlacementManifest",
    "KVCachePlacementPart",
    "KVCacheTopology",
    "KVCacheTopologyParticipant",
    "assemble_kv_cache_placement",
    "place_kv_cache",
]
