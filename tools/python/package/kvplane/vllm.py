"""Secondary tier of vLLM's tiered KV-cache offloading: blocks that leave the host memory of an engine go to a cluster,
from which every engine of the same model loads them.

vLLM loads the class by its module path; `docs/integrations/vllm.md` has the configuration. This module needs vLLM, and
nothing else in the package imports it.
"""

import collections
from typing import TYPE_CHECKING, Any, ClassVar, Collection, Deque, Dict, Iterable, List, Optional, Tuple

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import TIER_LABEL, JobResult, SecondaryTierManager, TransferJob

from kvplane import _native
from kvplane._blocks import BlockStore, Counts

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

_PREFIX = "vllm:kv_offload_kvplane_"
#: Counters by their name in `Counts`.
_COUNTERS = {
    "put_blocks": "Blocks that were put into the cluster.",
    "put_bytes": "Bytes of the blocks that were put into the cluster, including those that were there already.",
    "present_blocks": "Blocks that were not sent, because the cluster had them already.",
    "failed_blocks": "Blocks that were not put: an error, or no room.",
    "refused_blocks": "Blocks that were not put, because too many bytes waited (pending_bytes).",
    "got_blocks": "Blocks that were loaded from the cluster.",
    "got_bytes": "Bytes of the blocks that were loaded from the cluster.",
    "missed_blocks": "Blocks that were found and could not be loaded afterwards.",
    "lookups": "Requests for the presence of blocks, each for all new blocks of one request.",
    "looked_up_blocks": "Blocks whose presence was asked for.",
    "found_blocks": "Blocks that were found.",
}
_PENDING = _PREFIX + "pending_bytes"


class _Lookups(AsyncLookupManager):
    """Lookups of a tier: those of a request in a step are one batch."""

    def __init__(self, blocks: BlockStore, prefix: str, prefetch: bool, tier_type: str):
        self._blocks, self._prefix, self._prefetch = blocks, prefix, prefetch
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: List[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._blocks.exist([self._prefix + key.hex() for key in keys], self._prefetch)


class KvplaneTierManager(SecondaryTierManager):
    """Tier in a cluster of kvplane.

    Configuration, all of it optional: `control`, `cluster`, `certificates`, `tenant`, `data_tls` and `deadline` as of
    `kvplane.Store`; `replicas` and `priority` of the objects; `workers`, the number of threads that make calls;
    `batch_bytes`, the bytes of a call; `pending_bytes`, the bytes of stores that may wait: stores beyond it fail at once,
    so that they do not pin the host memory; `prefetch`, whether a lookup has nodes read blocks from their SSDs ahead of
    the load; `namespace`, a prefix of all keys; `enable_kv_events`, `locality` and `backpressure` as of vLLM's tiers.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: "OffloadingSpec",
        primary_kv_view: memoryview,
        tier_type: str,
        control: Optional[str] = None,
        cluster: Optional[str] = None,
        certificates: Optional[str] = None,
        tenant: str = "",
        data_tls: Optional[str] = None,
        deadline: float = 10.0,
        replicas: int = 1,
        priority: int = 0,
        workers: int = 4,
        batch_bytes: int = 16 << 20,
        pending_bytes: int = 1 << 30,
        prefetch: bool = True,
        namespace: str = "vllm",
        enable_kv_events: bool = False,
        locality: Optional[str] = "REMOTE",
        backpressure_detector: "Optional[BackpressureDetector]" = None,
    ):
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = Locality(locality) if locality is not None else None
        # Blocks of other models, layouts or ranks have other names: vLLM's own rule for files.
        names = FileMapper.from_offloading_spec(
            namespace, offloading_spec, blocks_per_file=offloading_spec.blocks_per_chunk, parallel_agnostic=True
        )
        self._prefix = f"{names.base_path}_r{names.rank}/"
        self._address, self._size = _native.buffer_address(primary_kv_view, True)
        self._blocks = BlockStore(
            control=control,
            cluster=cluster,
            certificates=certificates,
            tenant=tenant,
            data_tls=data_tls,
            deadline=deadline,
            replicas=replicas,
            priority=priority,
            workers=workers,
            batch_bytes=batch_bytes,
            pending_bytes=pending_bytes,
        )
        if not self._blocks.register(self._address, self._size):
            reason = _native.last_error()
            self._blocks.close()
            raise RuntimeError(f"the host memory of the engine cannot be registered: {reason}")
        self._lookups = _Lookups(self._blocks, self._prefix, prefetch, tier_type)
        #: Results of jobs, appended by the threads of the store; a deque's ends are atomic.
        self._results: Deque[Tuple[int, List[int], float]] = collections.deque()
        #: Keys of jobs in progress, and whether a job is a load.
        self._jobs: Dict[int, Tuple[Tuple[OffloadKey, ...], bool]] = {}
        events = enable_kv_events and offloading_spec.kv_events_config.enable_kv_cache_events
        self._events: Optional[List[OffloadingEvent]] = [] if events else None
        self._told = Counts(*[0] * len(Counts._fields))

    # --- lookups ---------------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    # --- jobs ------------------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        if not self._blocks.put(self._begin(job_metadata, False), self._ending(job_metadata)):
            self._results.append((job_metadata.job_id, [-200] * len(job_metadata.keys), 0.0))

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._blocks.get(self._begin(job_metadata, True), self._ending(job_metadata))

    def _begin(self, job: TransferJob, is_load: bool) -> Tuple[List[str], List[int], List[int]]:
        keys = tuple(job.keys)
        self._jobs[job.job_id] = keys, is_load
        size = self.block_size_bytes
        addresses = [self._address + int(chunk) * size for chunk in job.chunk_ids]
        return [self._prefix + key.hex() for key in keys], addresses, [size] * len(keys)

    def _ending(self, job: TransferJob) -> Any:
        return lambda codes, seconds: self._results.append((job.job_id, codes, seconds))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished = []
        while self._results:
            job_id, codes, seconds = self._results.popleft()
            keys, is_load = self._jobs.pop(job_id)
            finished.append(self._loaded(job_id, keys, codes, seconds) if is_load else self._stored(job_id, keys, codes, seconds))
        return finished

    def _stored(self, job_id: int, keys: Tuple[OffloadKey, ...], codes: List[int], seconds: float) -> JobResult:
        stored = [key for key, code in zip(keys, codes) if code >= 0]
        if self._events is not None and stored:
            self._events.append(OffloadingEvent(keys=stored, medium=self.medium, removed=False, locality=self.locality))
        size = len(stored) * self.block_size_bytes
        return JobResult(job_id, len(stored) == len(keys), transfer_time=seconds, transfer_bytes=size)

    def _loaded(self, job_id: int, keys: Tuple[OffloadKey, ...], codes: List[int], seconds: float) -> JobResult:
        size = self.block_size_bytes
        # A block of another length is another engine's: its bytes are no use here.
        loaded = [key for key, code in zip(keys, codes) if code == size]
        is_whole = len(loaded) == len(keys)
        if not is_whole:
            self._lookups.mark_miss([key for key, code in zip(keys, codes) if code != size])
        some = tuple(loaded) if loaded and not is_whole else None
        return JobResult(job_id, is_whole, some, transfer_time=seconds, transfer_bytes=len(loaded) * size)

    def take_events(self) -> Iterable[OffloadingEvent]:
        events, self._events = self._events or (), [] if self._events is not None else None
        return events

    def drain_jobs(self) -> None:
        """Waits until no call waits or touches the host memory. Each call has a deadline: where the cluster does not
        answer, the batches that wait take one each, shared among the threads."""
        self._blocks.drain()

    def shutdown(self) -> None:
        """Fails what waits, waits for the calls in progress, and leaves the cluster."""
        self._lookups.shutdown()
        self._blocks.close()

    # --- metrics ---------------------------------------------------------------------------------------------------

    @classmethod
    def build_metric_definitions(cls, extra_config: Dict[str, Any]) -> Dict[str, OffloadingMetricMetadata]:
        labels = (TIER_LABEL,)
        found: Dict[str, OffloadingMetricMetadata] = {
            _PREFIX + name: OffloadingCounterMetadata(documentation=about, labelnames=labels)
            for name, about in _COUNTERS.items()
        }
        about = "Bytes of stores that wait or are in progress."
        found[_PENDING] = OffloadingGaugeMetadata(documentation=about, labelnames=labels)
        return found

    def get_stats(self) -> "Optional[OffloadingConnectorStats]":
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

        counts, labels = self._blocks.counts(), (self.tier_type,)
        if counts == self._told and self._blocks.pending_bytes == 0:
            return None
        stats = OffloadingConnectorStats()
        for name, total, before in zip(Counts._fields, counts, self._told):
            if total != before:
                stats.increase_counter(_PREFIX + name, total - before, labels)
        stats.set_gauge(_PENDING, self._blocks.pending_bytes, labels)
        self._told = counts
        return stats
