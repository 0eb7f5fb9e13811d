"""Client of the Conductor for schedulers and engines: `Scheduler`, `Instance`."""

import threading
import time
from types import TracebackType
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Type, Union

from kvplane import _native
from kvplane._errors import Closed, Timeout, Unreachable, error

_LOOK_S = 0.5
_UNREACHABLE, _LATE = -900, -901


class Prompt(NamedTuple):
    """Prompt: its number of tokens, and the rolling hashes of its full blocks, each of which covers everything before
    it.

    `lora` and `salt` stay empty where the engines' hashes depend on them already, as those of vLLM and SGLang do.
    """

    model: str
    tokens: int
    hashes: Sequence[int]
    block_tokens: int = 16
    tenant: str = ""
    lora: str = ""
    salt: str = ""

    @classmethod
    def of_tokens(
        cls,
        model: str,
        token_ids: Sequence[int],
        block_tokens: int = 16,
        *,
        seed: Optional[str] = "0",
        lora: str = "",
        salt: str = "",
        tenant: str = "",
    ) -> "Prompt":
        """Returns a prompt whose blocks are hashed like vLLM's (`sha256_cbor`); `seed` is the engines'
        `PYTHONHASHSEED`. With `seed=None` they have the Conductor's own token hashes: for engines of any hash scheme
        whose events contain tokens."""
        hashes = _native.block_hashes(token_ids, block_tokens, seed, lora, salt)
        return cls(model, len(token_ids), hashes, block_tokens, tenant)


class Terms(NamedTuple):
    """Service that a request gets. `flow`: name of the requests that share one fair share, such as those of one customer;
    `service_class`: class that an operator has set; `priority`: from -4 to 4, higher ones of a flow go first; `ttft`:
    objective for the first token, in seconds after the arrival; `output_tokens`: expected length of the output;
    `session`: name of the conversation whose next turn the request is."""

    flow: str = ""
    service_class: str = ""
    priority: Optional[int] = None
    ttft: Optional[float] = None
    output_tokens: int = 0
    session: str = ""


class DecodeSteps(NamedTuple):
    """Decode steps of an instance since its last report: their number, and seconds of all of them; the means over them
    of resident tokens of KV cache and of requests in the batch."""

    steps: int = 0
    took: float = 0.0
    tokens: int = 0
    requests: int = 0


class Source(NamedTuple):
    """Holder of a prefix of a prompt: an instance, or None for the shared store; and the number of tokens."""

    instance: Optional[str]
    tokens: int


class Stage(NamedTuple):
    """Stage of a pipeline group, for one prompt: the layers that it computes for each chunk, the reused tokens that it
    has to fetch (of its layers; the last stage of all), and its predicted wait and time, in seconds."""

    instance: str
    first_layer: int
    layers: int
    load_tokens: int
    wait: float
    busy: float


class Group(NamedTuple):
    """Pipeline group that prefills a prompt: its stages in order, and the maximum length of a chunk in tokens. Each
    stage passes each chunk on with the KV cache of all layers so far; the last one is `Booked.prefill`."""

    name: str
    chunk_tokens: int
    stages: List[Stage]


class Membership(NamedTuple):
    """Stage of an instance in a pipeline group, as it registers: `stage` counts from 0; `activation_bytes`: bytes that
    it passes on for each token beside KV cache, 0 for the default."""

    group: str
    stage: int
    stages: int
    chunk_tokens: int
    activation_bytes: int = 0


class Booked(NamedTuple):
    """Placement that the Conductor reserved: report the progress (`Scheduler.prefill_started` and the calls after
    it)."""

    reservation: int
    """0 where nothing was reserved (mode "advise")."""
    prefill: str
    decode: Optional[str]
    reuse_tokens: int
    sources: List[Source]
    keep: bool
    """True if blocks fetched from the sources are to be kept."""
    wait: float
    """Predicted seconds until the prefill begins; `prefill_time`: predicted seconds of the prefill."""
    prefill_time: float
    lease: float
    """Seconds that the reservation lasts without an update."""
    group: Optional[Group] = None
    """Pipeline group that prefills, for requests with `groups=True` only."""


class Local(NamedTuple):
    """Placement by the local rule with the last table, because the Conductor is unreachable. Report its end
    (`ended`)."""

    prefill: str
    decode: Optional[str]


class Refused(NamedTuple):
    """Rejection. `why`: "ttft", "tbt", "no instance", "full", "waited" or "lost"; retry after `retry_after` seconds.

    "full" and "waited" are limits of the control plane: `--conductor-queued`, `--conductor-requests` and
    `--conductor-prompt-blocks`; `--conductor-wait`."""

    why: str
    retry_after: float


Decision = Union[Booked, Local, Refused]


class Holder(NamedTuple):
    """Prefix of a prompt that an instance holds, in tokens; each tier includes those before it."""

    instance: str
    gpu_tokens: int
    dram_tokens: int
    ssd_tokens: int
    degraded: bool
    """True if the index of its cache is incomplete."""


class Candidate(NamedTuple):
    """Instance as evaluated for a request; times in seconds, `factor` scales the model's times."""

    instance: str
    takes: bool
    held_tokens: int
    wait: float
    egress_wait: float
    factor: float


class Explained(NamedTuple):
    """Explanation of a placement; `answer` is None for a queued request."""

    answer: Optional[Decision]
    now: Optional[Booked]
    candidates: List[Candidate]
    pooled_tokens: int


class InstanceRow(NamedTuple):
    """Instance, as all clients see it. An instance that is suspect, or held by an operator, must not be chosen."""

    instance: str
    incarnation: int
    tenant: str
    model: str
    block_tokens: int
    part: str
    address: str
    suspect: bool
    degraded: bool
    prefills: int
    wait: float
    decode_tokens: int
    decodes: int
    silent: float
    decode_factor: float
    """Duration of its decode steps relative to the model's."""


class ModelRow(NamedTuple):
    """Model; `error` is the mean relative error of predicted prefill times.

    A decode step is learned to take `decode_base` seconds, `decode_token` for each resident token of KV cache and
    `decode_request` for each request, with the mean relative error `decode_error`. Outputs have a median of `output_p50`
    tokens and a 90th percentile of `output_p90`, which are 0 while too few requests have finished; `output_error` is the
    mean error of expected ones. `sessions` are those whose next turn is expected."""

    tenant: str
    model: str
    block_tokens: int
    instances: int
    waiting: int
    requests: int
    blocks: int
    forgotten_blocks: int
    tokens: int
    reused_tokens: int
    error: float
    mismatch: bool
    decode_base: float
    decode_token: float
    decode_request: float
    decode_error: float
    output_p50: int
    output_p90: int
    output_error: float
    sessions: int


class Table(NamedTuple):
    """Instances and models. `version` changes when an instance comes, goes, becomes suspect or is trusted again."""

    version: int
    instances: List[InstanceRow]
    models: List[ModelRow]


def _booked(found: Dict[str, Any]) -> Booked:
    found["sources"] = [Source(*source) for source in found["sources"]]
    if found["group"] is not None:
        group = found["group"]
        stages = [Stage(**stage) for stage in group["stages"]]
        found["group"] = Group(group["name"], group["chunk_tokens"], stages)
    return Booked(**found)


def _decision(found: Dict[str, Any]) -> Optional[Decision]:
    if found["booked"] is not None:
        return _booked(found["booked"])
    if found["local"] is not None:
        return Local(*found["local"])
    if found["refused"] is not None:
        return Refused(*found["refused"])
    return None


def _there(found: Optional[Dict[str, Any]]) -> Dict[str, Any]:
    # Without an error there is a result.
    assert found is not None
    return found


def _table(found: Dict[str, Any]) -> Table:
    instances = [InstanceRow(**row) for row in found["instances"]]
    return Table(found["version"], instances, [ModelRow(**row) for row in found["models"]])


class Instance:
    """Registered instance, until `close`. Any number of threads may use one.

    An instance whose cache is followed over ZeroMQ (`publisher`) does not report it here. After a restart of the
    Conductor it is still registered, and its next `report_cache` returns that a snapshot is wanted. An instance that
    was silent for too long is dropped, which raises `NotFound`: then register again.
    """

    def __init__(self, scheduler: "Scheduler", tenant: str, name: str, incarnation: int, fresh: bool, suspect_after: float):
        self._scheduler, self._of = scheduler, (tenant, name, incarnation)
        self._loads, self._batch, self._lock = 0, 1, threading.Lock()
        self.name = name
        self.incarnation = incarnation
        self.fresh = fresh
        """True if nothing is known of its cache: begin with `report_cache(..., snapshot=True)`."""
        self.suspect_after = suspect_after
        """Seconds without a report after which it is not chosen any more; 0 for never."""

    def report_load(
        self, queued_tokens: int, decode_tokens: int = 0, decodes: int = 0, steps: DecodeSteps = DecodeSteps()
    ) -> None:
        """Reports its load: tokens of prompts that are queued or computed, tokens of KV cache of decodes, number of
        decodes; and its decode steps since the last report, by which their duration is learned."""
        with self._lock:
            self._loads += 1
            number = self._loads
        load = (queued_tokens, decode_tokens, decodes)
        _check(self._scheduler._native().report_load((*self._of, number), load, steps))

    def report_cache(
        self,
        *,
        stored: Sequence[int] = (),
        parent: Optional[int] = None,
        tier: str = "gpu",
        removed: Sequence[int] = (),
        removed_tier: Optional[str] = None,
        snapshot: bool = False,
        lora: str = "",
        salt: str = "",
    ) -> bool:
        """Reports changes of its cache: blocks `removed`, then blocks `stored` in the order of a prompt, after
        `parent`.

        A `snapshot` replaces everything reported before. Returns True when the index is incomplete and a snapshot is
        wanted, as after a report that was lost.
        """
        changes: List[Tuple[str, str, str, Optional[str], Optional[int], Sequence[int]]] = []
        if removed:
            changes.append(("removed", lora, salt, removed_tier, None, list(removed)))
        if stored:
            changes.append(("stored", lora, salt, tier, parent, list(stored)))
        # Serialized, because batches are numbered.
        with self._lock:
            kind = "snapshot" if snapshot else "goes"
            code, following, wanted = self._report(self._batch, kind, changes)
            if code == 0 and wanted == "replay":
                # The missing batches were never received, and cannot be repeated: they count as lost.
                code, following, wanted = self._report(self._batch, "lost", changes)
            if code == 0:
                self._batch = following
            elif code in (_UNREACHABLE, _LATE):
                # The report may have been received; if not, the next one shows a gap, which the Conductor detects.
                self._batch += 1
        _check(code)
        return wanted != "nothing"

    def _report(self, number: int, kind: str, changes: Sequence[Any]) -> Tuple[int, int, str]:
        return self._scheduler._native().report_cache((*self._of, number), kind, changes)

    def close(self) -> None:
        """Deregisters the instance. Requests that were placed on it are notified of the loss."""
        _check(self._scheduler._native().deregister(*self._of))

    def __enter__(self) -> "Instance":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Any, trace: Optional[TracebackType]) -> None:
        self.close()


def _check(code: int) -> None:
    if code < 0:
        raise error(code)


class Scheduler:
    """Client of the Conductor of a cluster. Any number of threads may use one; calls block without the GIL.

    The cluster is given as to `Store`. A call that the Conductor does not answer within `budget` seconds is decided
    locally, where possible: `schedule` then uses the last table of instances, and tries the Conductor again after a
    backoff.
    """

    def __init__(
        self,
        control: Optional[str] = None,
        *,
        cluster: Optional[str] = None,
        certificates: Optional[str] = None,
        runtime_directory: Optional[str] = None,
        budget: float = 1.0,
    ):
        try:
            line = _native.Scheduler(
                master=control,
                cluster=cluster,
                certificates=certificates,
                runtime_directory=runtime_directory,
                budget=budget,
            )
        except ConnectionError as problem:
            raise Unreachable(-900, str(problem)) from None
        self._open: Optional[_native.Scheduler] = line

    def _native(self) -> "_native.Scheduler":
        if self._open is None:
            raise Closed(-1, "the scheduler was closed")
        return self._open

    def schedule(
        self,
        request: str,
        prompt: Prompt,
        *,
        wait: float = 60.0,
        mode: str = "reserve",
        barred: Sequence[str] = (),
        terms: Terms = Terms(),
        groups: bool = False,
    ) -> Decision:
        """Places a request and reserves its instances; waits for an instance up to `wait` seconds.

        `request` is an id of the caller: repeated with the same id, a request is reserved once. `mode`: "reserve",
        "now" to be reserved behind other requests instead of waiting, "advise" for a placement without a reservation.
        `barred`: excluded instances. `terms`: the service that the request gets. `groups`: True if the caller can drive
        a pipeline group, which the answer may have (`Booked.group`).
        """
        asked = (request, self._context(prompt), prompt.tokens, list(barred), terms, groups)
        return self._decide(asked, prompt, mode, wait, None)

    def reschedule(
        self, booked: Booked, failed: Sequence[str], request: str, prompt: Prompt, *, wait: float = 60.0
    ) -> Decision:
        """Places a reserved request again whose instances `failed`. It keeps its position in the queue."""
        asked = (request, self._context(prompt), prompt.tokens, [], Terms(), False)
        return self._decide(asked, prompt, "reserve", wait, (booked.reservation, list(failed)))

    def _decide(
        self,
        asked: Tuple[str, Tuple[str, str, str, int, str], int, List[str], Terms, bool],
        prompt: Prompt,
        mode: str,
        wait: float,
        failed: Optional[Tuple[int, List[str]]],
    ) -> Decision:
        code, found = self._native().schedule(asked, prompt.hashes, mode, wait, failed)
        _check(code)
        decision = _decision(_there(found))
        assert decision is not None
        return decision

    def prefill_started(self, booked: Booked) -> None:
        """Reports that the prefill began."""
        self._update(booked, "prefill_started")

    def prefill_done(self, booked: Booked, reused_tokens: int, took: float) -> None:
        """Reports that the prefill ended: number of cached tokens, and seconds that it took. Predictions are adjusted
        by it."""
        self._update(booked, "prefill_done", reused_tokens, took)

    def decoding(self, booked: Booked) -> None:
        """Reports that the request decodes."""
        self._update(booked, "decoding")

    def alive(self, booked: Booked) -> None:
        """Renews the lease of the reservation."""
        self._update(booked, "alive")

    def ended(self, decision: Decision, output_tokens: int = 0, decode_time: float = 0.0) -> None:
        """Reports the end of the request, whatever its outcome: its reservation is released, with the next request or
        within some 20 ms. No effect for a rejected request.

        Of a request that has generated its whole output: `output_tokens`, their number, and `decode_time`, the seconds
        from the first to the last. The outputs and decode times of later requests are expected by it."""
        if isinstance(decision, Booked) and decision.reservation:
            output = (output_tokens, decode_time) if output_tokens else None
            _check(self._native().release(decision.reservation, output))
        elif isinstance(decision, Local):
            _check(self._native().ended(decision.prefill))

    def _update(self, booked: Booked, step: str, reused_tokens: int = 0, took: float = 0.0) -> None:
        _check(self._native().update(booked.reservation, step, reused_tokens, took))

    def query(self, prompt: Prompt, *, most: int = 8, tier: str = "ssd") -> Tuple[List[Holder], int]:
        """Returns the holders of a prefix of the prompt, longest first, and the number of tokens of all of them and the
        store together. Only full blocks count: of 40 tokens in blocks of 16, at most 32.

        `tier`: the lowest tier that counts, "gpu", "dram" or "ssd".
        """
        full = prompt.hashes[: prompt.tokens // max(prompt.block_tokens, 1)]
        code, found = self._native().query(self._context(prompt), full, most, tier)
        _check(code)
        found = _there(found)
        return [Holder(*holder) for holder in found["holders"]], found["pooled_tokens"]

    def explain(self, request: str) -> Explained:
        """Explains the placement of a request, by the present state; raises `NotFound` when the request has ended."""
        code, found = self._native().explain(request)
        _check(code)
        found = _there(found)
        now = _booked(found["now"]) if found["now"] is not None else None
        candidates = [Candidate(**candidate) for candidate in found["candidates"]]
        return Explained(_decision(found["answer"]), now, candidates, found["pooled_tokens"])

    def table(self, wait: float = 5.0) -> Table:
        """Returns the last table of instances and models; waits for the first one."""
        for table in self.watch(wait):
            return table
        raise Timeout(_LATE, f"received no table of instances within {wait} s")

    def watch(self, wait: float = 60.0) -> Iterator[Table]:
        """Yields each table as it arrives: once a second, and when an instance comes, goes or becomes suspect. Ends when
        none arrives for `wait` seconds, as while the Conductor is away."""
        seen, until = 0, time.monotonic() + wait
        while True:
            # In steps, so that signals are handled.
            left = until - time.monotonic()
            code, told = self._native().table_after(seen, max(min(left, _LOOK_S), 0.0))
            _check(code)
            if told is not None:
                seen, table = told
                yield _table(table)
                until = time.monotonic() + wait
            elif left <= 0:
                return

    def replicate(self, keys: Sequence[Union[str, bytes]], *, tenant: str = "") -> int:
        """Replicates objects of the store. Returns the number of the task, as `kvplane ctl tasks` shows it."""
        code, task = self._native().replicate(tenant, keys)
        _check(code)
        return task

    def register(
        self,
        name: str,
        model: str,
        *,
        block_tokens: int = 16,
        part: str = "mixed",
        incarnation: Optional[int] = None,
        tenant: str = "",
        token_bytes: int = 0,
        capacity_tokens: int = 0,
        report_every: float = 0.0,
        address: str = "",
        publisher: str = "",
        replay: str = "",
        topic: str = "",
        layer_wise: bool = False,
        layers: int = 0,
        stage: Optional[Membership] = None,
    ) -> Instance:
        """Registers an instance. `part`: "prefill", "decode" or "mixed". `incarnation` grows with each start (by
        default, the time). `token_bytes`: KV cache of a token, in bytes. `capacity_tokens`: capacity for the KV cache
        of decodes. `report_every`: interval of its load reports, in seconds; 0 for never. `address`: address for
        routers. `publisher`, `replay`, `topic`: endpoints of its KV events over ZeroMQ. `layer_wise`: True if it begins
        a prefill when the first of the `layers` of a fetched prefix has arrived. `stage`: its stage in a pipeline group.
        """
        incarnation = time.time_ns() if incarnation is None else incarnation
        spec = (name, incarnation, tenant, model, block_tokens, token_bytes, part, capacity_tokens, report_every, address)
        events = (publisher, replay, topic) if publisher else None
        code, fresh, suspect_after = self._native().register(spec, events, (layer_wise, layers, stage))
        _check(code)
        return Instance(self, tenant, name, incarnation, fresh, suspect_after)

    @property
    def client(self) -> int:
        """Returns the number by which the Conductor identifies this client."""
        return self._native().client()

    def close(self) -> None:
        """Closes the client."""
        line, self._open = self._open, None
        if line is not None:
            line.close()

    def __enter__(self) -> "Scheduler":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Any, trace: Optional[TracebackType]) -> None:
        self.close()

    @staticmethod
    def _context(prompt: Prompt) -> Tuple[str, str, str, int, str]:
        return (prompt.tenant, prompt.model, prompt.lora, prompt.block_tokens, prompt.salt)
