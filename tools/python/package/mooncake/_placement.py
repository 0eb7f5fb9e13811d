"""Physical experts: which of them to choose when ranks are gone.

Names as in SGLang: a *logical expert* is one of the model's, a *physical expert* a place that holds the weights of one.
The tables of placement are those of an expert load balancer (EPLB).
"""

import numpy

from mooncake import _expert_arrays


class ExpertPlacement:
    """The physical experts of a layer: `physical_to_logical_map[p]` is the logical expert whose weights `p` holds, -1
    for none. Physical expert `p` of `P` lives on rank `p // (P / num_ranks)`, as `Buffer` has it.

    Choices are made in turn, for each logical expert from physical expert to physical expert, continued from call to
    call, beginning with `rank`: over all calls with the same active ranks, no physical expert of a logical expert gets
    more than one token more than another, and ranks do not begin with the same. One thread at a time may call.
    """

    def __init__(self, physical_to_logical_map, num_logical_experts, num_ranks, rank=0):
        placed = numpy.array(_expert_arrays.array_of(physical_to_logical_map, "physical_to_logical_map", ["int64"], 1))
        if num_ranks < 1 or not len(placed) or len(placed) % num_ranks:
            raise ValueError(f"{len(placed)} physical experts cannot be divided among {num_ranks} ranks evenly")
        wrong = numpy.nonzero((placed < -1) | (placed >= num_logical_experts))[0]
        if len(wrong):
            raise ValueError(
                f"physical expert {wrong[0]} holds logical expert {placed[wrong[0]]}, of {num_logical_experts}"
            )
        self.physical_to_logical_map = placed
        self.num_logical_experts, self.num_physical_experts, self.num_ranks = (
            num_logical_experts,
            len(placed),
            num_ranks,
        )
        self._turns = numpy.full(num_logical_experts, rank, numpy.int64)

    def logical_to_physical(self, active_ranks=None):
        """Returns `logical_to_all_physical_map`, of (logical experts, most physical experts of one), ascending and
        padded with -1, and `logical_to_all_physical_map_num_valid`: those on ranks that are not 0 in `active_ranks`
        (int32 of ranks; None: all)."""
        on = numpy.ones(self.num_ranks, bool)
        if active_ranks is not None:
            on = _expert_arrays.array_of(active_ranks, "active_ranks", ["int32"], 1) != 0
            if len(on) != self.num_ranks:
                raise ValueError(f"active_ranks has {len(on)} elements, there are {self.num_ranks} ranks")
        there = numpy.repeat(on, self.num_physical_experts // self.num_ranks) & (self.physical_to_logical_map >= 0)
        physical = numpy.nonzero(there)[0]
        logical = self.physical_to_logical_map[physical]
        order = numpy.argsort(logical, kind="stable")
        counts = numpy.bincount(logical, minlength=self.num_logical_experts)
        table = numpy.full((self.num_logical_experts, max(1, counts.max(initial=0))), -1, numpy.int64)
        table[logical[order], _places(counts)] = physical[order]
        return table, counts

    def lost_logical_experts(self, active_ranks):
        """Returns the logical experts without a physical expert on an active rank, ascending."""
        return numpy.nonzero(self.logical_to_physical(active_ranks)[1] == 0)[0]

    def topk_ids_logical_to_physical(self, topk_ids, active_ranks=None):
        """Returns the physical experts for tokens' choices of logical ones, int64 of (tokens, choices), of the kind of
        `topk_ids`: on active ranks only. -1 stays -1, and a choice of a lost expert becomes -1."""
        logical = _expert_arrays.array_of(topk_ids, "topk_ids", ["int64"], 2)
        wrong = numpy.argwhere((logical < -1) | (logical >= self.num_logical_experts))
        if len(wrong):
            token, choice = wrong[0]
            raise ValueError(
                f"topk_ids[{token}, {choice}] is {logical[token, choice]}: a logical expert is 0 to "
                f"{self.num_logical_experts - 1}, or -1 for none"
            )
        table, counts = self.logical_to_physical(active_ranks)
        chosen = logical.reshape(-1)
        asked = numpy.nonzero(chosen >= 0)[0]
        order = asked[numpy.argsort(chosen[asked], kind="stable")]
        experts, each = chosen[order], numpy.bincount(chosen[asked], minlength=self.num_logical_experts)
        turns = self._turns[experts] + _places(each)
        physical = numpy.full(len(chosen), -1, numpy.int64)
        physical[order] = table[experts, turns % numpy.maximum(counts[experts], 1)]
        self._turns += each
        return _expert_arrays.like(topk_ids, physical.reshape(logical.shape), "int64")


def _places(counts):
    """0, 1, 2 and so on for each of the counts, one after another."""
    return numpy.arange(counts.sum()) - numpy.repeat(numpy.cumsum(counts) - counts, counts)
