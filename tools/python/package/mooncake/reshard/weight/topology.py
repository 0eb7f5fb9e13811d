"""Parallel sizes, and the participants at their ranks."""

from dataclasses import asdict, dataclass
from typing import Optional, Tuple

from mooncake.reshard import _checks
from mooncake.reshard.contracts import ParticipantId, TopologyId
from mooncake.reshard.weight.types import ParallelRank, rank_from_json

_SIZES = ("tp_size", "pp_size", "ep_size", "dp_size")


@dataclass(frozen=True)
class TopologyParticipant:
    """A participant and its rank."""

    participant_id: ParticipantId
    rank: ParallelRank

    def __post_init__(self):
        _checks.text(self.participant_id, "participant_id")
        _checks.instance(self.rank, "the rank of a participant", ParallelRank)


@dataclass(frozen=True, init=False)
class ParallelTopology:
    """The four sizes and the participants, which need not be as many as the product: axes may share workers, and a
    placement may be of one replica only."""

    tp_size: int
    pp_size: int
    ep_size: int
    dp_size: int
    participants: Tuple[TopologyParticipant, ...]
    topology_id: TopologyId

    def __init__(
        self,
        *,
        tp_size: int,
        pp_size: int,
        ep_size: int,
        dp_size: int,
        participants: Tuple[TopologyParticipant, ...],
        topology_id: Optional[TopologyId] = None,
    ):
        sizes = dict(zip(_SIZES, (tp_size, pp_size, ep_size, dp_size)))
        for name, size in sizes.items():
            object.__setattr__(self, name, _checks.integer(size, name, 1))
        found = _checks.items(participants, "participants of a topology", TopologyParticipant)
        if not found:
            raise ValueError("participants of a topology must not be empty")
        found = tuple(sorted(found, key=lambda one: one.participant_id))
        _checks.unique((one.participant_id for one in found), "topology participant_id")
        _checks.unique((one.rank for one in found), "topology parallel rank")
        for one in found:
            for name, size in sizes.items():
                if getattr(one.rank, name[:2]) >= size:
                    raise ValueError(f"{name[:2]} rank is out of range for participant {one.participant_id}")
        object.__setattr__(self, "participants", found)
        known = _checks.identity({"schema": "weight-parallel-topology", **self._content()})
        if topology_id not in (None, known):
            raise ValueError("topology_id does not match the canonical topology")
        object.__setattr__(self, "topology_id", known)

    def _content(self):
        sizes = {name: getattr(self, name) for name in _SIZES}
        return {**sizes, "participants": [asdict(one) for one in self.participants]}

    @property
    def world_size(self) -> int:
        """Returns the number of participants."""
        return len(self.participants)

    def size(self, kind):
        """Returns the size along an axis."""
        return getattr(self, f"{kind}_size")

    def participant(self, participant_id):
        """Returns a participant; ValueError if there is none of that name."""
        for one in self.participants:
            if one.participant_id == participant_id:
                return one
        raise ValueError(f"unknown topology participant: {participant_id}")

    def to_json(self):
        """Returns the topology as JSON."""
        return {**self._content(), "topology_id": self.topology_id}

    @classmethod
    def from_json(cls, value):
        """Parses a topology."""
        value = dict(_checks.fields(value, cls.__dataclass_fields__, "parallel topology"))
        _checks.text(value["topology_id"], "topology_id")
        found = []
        for at, one in enumerate(_checks.sequence(value["participants"], "topology participants")):
            one = _checks.fields(one, ("participant_id", "rank"), f"topology participant {at}")
            found.append(TopologyParticipant(one["participant_id"], rank_from_json(one["rank"], f"topology rank {at}")))
        return cls(**{**value, "participants": tuple(found)})


__all__ = ["ParallelTopology", "TopologyParticipant"]
