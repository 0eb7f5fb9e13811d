"""Parallel sizes, and the participants at their ranks."""

from dataclasses import dataclass
from typing import Optional, Tuple

from mooncake.reshard import _checks
from mooncake.reshard._topology import Topology
from mooncake.reshard.contracts import ParticipantId, TopologyId
from mooncake.reshard.weight.types import ParallelRank, rank_from_json


@dataclass(frozen=True)
class TopologyParticipant:
    """A participant and its rank."""

    participant_id: ParticipantId
    rank: ParallelRank

    def __post_init__(self):
        _checks.text(self.participant_id, "participant_id")
        _checks.instance(self.rank, "the rank of a participant", ParallelRank)


@dataclass(frozen=True, init=False)
class ParallelTopology(Topology):
    """The four sizes and the participants, which need not be as many as the product: axes may share workers, and a
    placement may be of one replica only."""

    tp_size: int
    pp_size: int
    ep_size: int
    dp_size: int
    participants: Tuple[TopologyParticipant, ...]
    topology_id: TopologyId

    _AXES, _SCHEMA, _PARTICIPANT = ("tp", "pp", "ep", "dp"), "weight-parallel-topology", TopologyParticipant

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
        self._fill((tp_size, pp_size, ep_size, dp_size), participants, topology_id)

    def size(self, kind):
        """Returns the size along an axis."""
        return getattr(self, f"{kind}_size")

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
