"""Copies between the memories of participants: what a plan becomes once all ranges are known."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple, Tuple

from mooncake.reshard import _checks
from mooncake.reshard.kv_cache.planner import KVCacheLogicalTransferPlan, edges_into
from mooncake.reshard.kv_cache.resolved import (
    KVCacheResolvedRuntimeBinding,
    KVCacheTransferLimits,
    Rows,
    resolved_spans,
)
from mooncake.reshard.kv_cache.types import check_apart, digest, several


class Copy(NamedTuple):
    """Contiguous copy from one region to another."""

    source_region: str
    source_offset: int
    target_region: str
    target_offset: int
    nbytes: int


def by_component(ranges):
    """Returns ranges by layer and component, in the order of their tokens."""
    found = {}
    for one in sorted(ranges, key=lambda one: one.token_start):
        found.setdefault((one.global_layer_id, one.component), []).append(one)
    return found


def copies(sources, targets, heads, width, budget):
    """Yields the copies of an interval of heads of one layer and component, whose ranges are in the order of their
    tokens; `width` is the bytes of a head. ValueError beyond a budget of pieces."""
    starts = [one.token_start for one in sources]
    longest = max((one.token_count for one in sources), default=0)
    for target in targets:
        first = bisect_right(starts, target.token_start - longest)
        for source in sources[first : bisect_left(starts, target.token_end)]:
            budget.take(1)
            begin, end = max(source.token_start, target.token_start), min(source.token_end, target.token_end)
            low = max(source.head_start, target.head_start, heads[0])
            high = min(source.head_end, target.head_end, heads[1])
            if end <= begin or high <= low:
                continue
            strides = [(one.token_stride_bytes, one.head_stride_bytes) for one in (source, target)]
            rows = Rows.of(end - begin, high - low, width, *strides)
            budget.take(rows.tokens * rows.heads)
            for token in range(begin, begin + rows.tokens):
                for head in range(low, low + rows.heads):
                    of, to = source.offset(token, head), target.offset(token, head)
                    yield Copy(source.region_id, of, target.region_id, to, rows.nbytes)


def merged(found, most):
    """Yields copies, those that continue the one before at both ends together with it, up to `most` bytes each."""
    last = None
    for one in found:
        if last is not None and last.nbytes + one.nbytes <= most:
            size = last.nbytes
            behind = (last.source_region, last.source_offset + size, last.target_region, last.target_offset + size)
            if behind == one[:4]:
                last = last._replace(nbytes=size + one.nbytes)
                continue
        if last is not None:
            yield from _split(last, most)
        last = one
    if last is not None:
        yield from _split(last, most)


def _split(one, most):
    for at in range(0, one.nbytes, most):
        size = min(most, one.nbytes - at)
        yield one._replace(source_offset=one.source_offset + at, target_offset=one.target_offset + at, nbytes=size)


class Budget:
    """Pieces that an operation may still take."""

    def __init__(self, limits):
        self._most = self._left = limits.max_validation_work

    def take(self, count):
        """ValueError if that many are not left."""
        self._left -= count
        if self._left < 0:
            raise ValueError(f"work limit exceeded: copies take more than {self._most} pieces")


@dataclass(frozen=True)
class KVCacheWrite:
    """Write of one writer into memory of a target."""

    source_participant_id: str
    target_participant_id: str
    endpoint: str
    source_address: int
    target_address: int
    nbytes: int


@dataclass(frozen=True)
class KVCacheRuntimeTransferPlan:
    """One operation: all participants of the target are filled, each by one plan. Its writes follow from plans and
    bindings, which every process that has a part in it can check and turn into the same writes."""

    operation_id: str
    logical_plans: Tuple[KVCacheLogicalTransferPlan, ...]
    source_bindings: Tuple[KVCacheResolvedRuntimeBinding, ...]
    target_bindings: Tuple[KVCacheResolvedRuntimeBinding, ...]
    limits: KVCacheTransferLimits = field(default_factory=KVCacheTransferLimits)
    writes: Tuple[KVCacheWrite, ...] = field(init=False, repr=False)
    digest: str = field(init=False)

    def __post_init__(self):
        _checks.text(self.operation_id, "operation_id")
        _checks.instance(self.limits, "limits", KVCacheTransferLimits)
        plans = several(self.logical_plans, "logical plans", KVCacheLogicalTransferPlan)
        plans = tuple(sorted(plans, key=lambda plan: plan.target_participant_id))
        _check_plans(plans)
        writers = {name for plan in plans for name in plan.source_participant_ids}
        sources = _bindings(self.source_bindings, writers, "source")
        targets = _bindings(self.target_bindings, {plan.target_participant_id for plan in plans}, "target")
        _check_memory(plans[0], sources, targets, self.operation_id, self.limits)
        content = {
            "schema": "kv-cache-runtime-transfer",
            "operation_id": self.operation_id,
            "plans": [plan.digest for plan in plans],
            "sources": [one.digest for one in sources],
            "targets": [one.digest for one in targets],
        }
        found = {"logical_plans": plans, "source_bindings": sources, "target_bindings": targets}
        found.update(writes=tuple(_writes(plans, sources, targets, self.limits)), digest=digest(content))
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @property
    def expected_writers(self) -> Tuple[Tuple[str, str], ...]:
        """Returns who writes to whom."""
        pairs = ((name, one.target_participant_id) for one in self.logical_plans for name in one.expected_writer_ids)
        return tuple(sorted(pairs))

    def writer_bytes(self, writer, target) -> int:
        """Returns the bytes that one participant writes to another."""
        pair = (writer, target)
        return sum(one.nbytes for one in self.writes if (one.source_participant_id, one.target_participant_id) == pair)


def _check_plans(plans):
    if not plans:
        raise ValueError("runtime operation must contain logical plans")
    first = plans[0]
    if first.snapshot is None:
        raise ValueError("runtime execution requires an explicit snapshot")
    filled = sorted(part.participant_id for part in first.target_placement.parts if part.layer_ids)
    if [plan.target_participant_id for plan in plans] != filled:
        raise ValueError("runtime operation must cover every target participant exactly once")
    for plan in plans:
        same = (plan.source_placement.digest, plan.target_placement.digest, plan.snapshot)
        if same != (first.source_placement.digest, first.target_placement.digest, first.snapshot):
            raise ValueError("runtime operation plans disagree on placement or snapshot")
        if plan.edges != edges_into(plan.source_placement, plan.target_part, plan.source_dp_rank):
            raise ValueError("runtime execution requires complete local-target plans")


def _bindings(values, expected, label):
    found = several(values, f"{label} bindings", KVCacheResolvedRuntimeBinding)
    names = [one.participant_id for one in found]
    if sorted(names) != sorted(expected):
        raise ValueError(
            f"{label} binding participants differ from selected operation: {names}, not {sorted(expected)}"
        )
    return tuple(sorted(found, key=lambda one: one.participant_id))


def _check_memory(plan, sources, targets, operation_id, limits):
    spans, pairs, pieces = {}, set(), 0
    for placement, some in ((plan.source_placement, sources), (plan.target_placement, targets)):
        for one in some:
            found = resolved_spans(placement, plan.snapshot, one, operation_id, limits)
            pieces += len(found)
            if pieces > limits.max_operations:
                raise ValueError(f"operation limit exceeded: more than {limits.max_operations} pieces of memory")
            spans.setdefault(one.instance_id, []).extend(found)
            pairs.add((one.instance_id, one.regions[0].endpoint))
    for at, label in ((0, "runtime instance must use one endpoint"), (1, "endpoint must be of one runtime instance")):
        if len({pair[at] for pair in pairs}) != len(pairs):
            raise ValueError(f"one {label}")
    for instance, some in spans.items():
        check_apart(some, f"resolved ranges of instance {instance}")


def _writes(plans, sources, targets, limits):
    sources, targets = ({one.participant_id: one for one in some} for some in (sources, targets))
    regions = lambda binding: {one.region_id: one for one in binding.regions}
    ranges = {name: by_component(one.ranges) for name, one in sources.items()}
    budget, total, count = Budget(limits), 0, 0
    for plan in plans:
        target = targets[plan.target_participant_id]
        to, into = regions(target), by_component(target.ranges)
        for writer in plan.source_participant_ids:
            of, found = regions(sources[writer]), []
            for edge in plan.edges:
                if edge.source_participant_id == writer:
                    key = (edge.global_layer_id, edge.component)
                    heads = (edge.global_head_start, edge.global_head_start + edge.head_count)
                    width = edge.head_dim * edge.itemsize
                    found.append(copies(ranges[writer][key], into[key], heads, width, budget))
            for one in merged((one for some in found for one in some), limits.max_batch_bytes):
                total, count = total + one.nbytes, count + 1
                if total > limits.max_bytes:
                    raise ValueError(f"byte limit exceeded: more than {limits.max_bytes}")
                if count > limits.max_operations:
                    raise ValueError(f"operation limit exceeded: more than {limits.max_operations} writes")
                region = to[one.target_region]
                yield KVCacheWrite(
                    *(writer, plan.target_participant_id, region.endpoint),
                    of[one.source_region].address + one.source_offset,
                    region.address + one.target_offset,
                    one.nbytes,
                )


__all__ = ["KVCacheRuntimeTransferPlan", "KVCacheWrite"]
