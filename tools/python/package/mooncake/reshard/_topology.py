"""Participants of a parallel layout at their ranks, and the parts that they contribute to a placement."""

from dataclasses import asdict

from mooncake.reshard import _checks


class Topology:
    """Sizes along the parallel axes and the participants: the base of the topologies of each kind of resource, which
    name their axes, the class of their participants and the schema that is a part of their id."""

    _AXES, _SCHEMA, _PARTICIPANT = (), "", object

    def _fill(self, sizes, participants, topology_id):
        """Checks sizes and participants, and keeps them with the id that follows from them."""
        sizes = {f"{axis}_size": size for axis, size in zip(self._AXES, sizes)}
        for name, size in sizes.items():
            object.__setattr__(self, name, _checks.integer(size, name, 1))
        found = _checks.items(participants, "participants of a topology", self._PARTICIPANT)
        if not found:
            raise ValueError("participants of a topology must not be empty")
        found = tuple(sorted(found, key=lambda one: one.participant_id))
        _checks.unique((one.participant_id for one in found), "topology participant_id")
        _checks.unique((one.rank for one in found), "topology parallel rank")
        for one in found:
            for axis in self._AXES:
                if getattr(one.rank, axis) >= sizes[f"{axis}_size"]:
                    raise ValueError(f"{axis} rank is out of range for participant {one.participant_id}")
        object.__setattr__(self, "participants", found)
        known = _checks.identity({"schema": self._SCHEMA, **self._content()})
        if topology_id not in (None, known):
            raise ValueError("topology_id does not match the canonical topology")
        object.__setattr__(self, "topology_id", known)

    def _content(self):
        sizes = {f"{axis}_size": getattr(self, f"{axis}_size") for axis in self._AXES}
        return {**sizes, "participants": [asdict(one) for one in self.participants]}

    @property
    def world_size(self) -> int:
        """Returns the number of participants."""
        return len(self.participants)

    def participant(self, participant_id):
        """Returns a participant; ValueError if there is none of that name."""
        for one in self.participants:
            if one.participant_id == participant_id:
                return one
        raise ValueError(f"unknown topology participant: {participant_id}")

    def to_json(self):
        """Returns the topology as JSON."""
        return {**self._content(), "topology_id": self.topology_id}


def check_parts(parts, topology, shared):
    """ValueError unless parts are of exactly the participants of a topology, and agree in what they share."""
    _checks.unique((part.participant_id for part in parts), "placement participant")
    ranks, names = {one.participant_id: one.rank for one in topology.participants}, {p.participant_id for p in parts}
    for some, label in ((set(ranks) - names, "missing"), (names - set(ranks), "unknown")):
        if some:
            raise ValueError(f"{label} topology participant: {min(some)}")
    for part in parts:
        expected = {**shared, "topology_id": topology.topology_id, "rank": ranks[part.participant_id]}
        for name, value in expected.items():
            if getattr(part, name) != value:
                raise ValueError(f"placement part {name} differs: {part.participant_id}")
