"""The Conductor, as schedulers and engines talk to it: `Scheduler`, `Instance`."""

import threading
import time
from types import TracebackType
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Type, Union

from kvplane import _native
from kvplane._errors import Closed, Timeout, Unreachable, error

_LOOK_S = 0.5
_UNREACHABLE, _LATE = -900, -901


class Prompt(NamedTuple):
    """A prompt: its tokens, and the rolling hashes of its full blocks, each of which proves everything before it.

    `lora` and `salt` stay empty where engines' hashes depend on them already, as those of vLLM and SGLang do.
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
        seed: str = "0",
        lora: str = "",
        salt: str = "",
        tenant: str = "",
    ) -> "Prompt":
        """A prompt whose blocks are hashed as vLLM does (`sha256_cbor`); `seed` is the engines' `PYTHONHASHSEED`."""
        hashes = _native.block_hashes(token_ids, block_tokens, seed, lora, salt)
        return cls(model, len(token_ids), hashes, block_tokens, tenant)


class Source(NamedTuple):
    """Who has the beginning of a prompt: an instance, or None for the shared store; and how many tokens."""

    instance: Optional[str]
    tokens: int


class Booked(NamedTuple):
    """The Conductor has booked the request: say how it fares (`Scheduler.prefill_started` and those after it)."""

    reservation: int
    """0 where nothing was booked (mode "advise")."""
    prefill: str
    decode: Optional[str]
    reuse_tokens: int
    sources: List[Source]
    keep: bool
    """Whether what is fetched from the sources is kept."""
    wait: float
    """Predicted: seconds until the prefill begins, and that it takes."""
    prefill_time: float
    lease: float
    """Seconds that the reservation lasts without an update."""


class Local(NamedTuple):
    """The Conductor could not be asked: this side's rule says so, by the last table. Say when it `ended`."""

    prefill: str
    decode: Optional[str]


class Refused(NamedTuple):
    """Not served. `why`: "ttft", "tbt", "no instance", "full", "waited" or "lost"; worth trying again after so long."""

    why: str
    retry_after: float


Decision = Union[Booked, Local, Refused]


class Holder(NamedTuple):
    """What an instance has of a prompt's beginning, in tokens; each tier counts those before it too."""

    instance: str
    gpu_tokens: int
    dram_tokens: int
    ssd_tokens: int
    degraded: bool
    """Whether something of its cache is not known."""


class Candidate(NamedTuple):
    """An instance as it is weighed for a request; times in seconds, `factor` beside the model's times."""

    instance: str
    takes: bool
    held_tokens: int
    wait: float
    egress_wait: float
    factor: float


class Explained(NamedTuple):
    """Why a request went where it went; `answer` is None for one that waits."""

    answer: Optional[Decision]
    now: Optional[Booked]
    candidates: List[Candidate]
    pooled_tokens: int


class InstanceRow(NamedTuple):
    """An instance, as everybody sees it. One that is doubted, or held by an operator, is not to be chosen."""

    instance: str
    incarnation: int
    tenant: str
    model: str
    block_tokens: int
    part: str
    address: str
    doubted: bool
    degraded: bool
    prefills: int
    wait: float
    decode_tokens: int
    decodes: int
    silent: float


class ModelRow(NamedTuple):
    """A model; `error` is the mean relative error of predicted prefill times."""

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


class Table(NamedTuple):
    """Instances and models. `version` changes when an instance comes, goes, is doubted or believed again."""

    version: int
    instances: List[InstanceRow]
    models: List[ModelRow]


def _booked(found: Dict[str, Any]) -> Booked:
    found["sources"] = [Source(*source) for source in found["sources"]]
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
    # Where there is no error there is an answer.
    assert found is not None
    return found


def _table(found: Dict[str, Any]) -> Table:
    instances = [InstanceRow(**row) for row in found["instances"]]
    return Table(found["version"], instances, [ModelRow(**row) for row in found["models"]])


class Instance:
    """An instance that has registered, until `close`. Any number of threads may use one.

    An instance whose cache is followed over ZeroMQ (`publisher`) does not report it here. After a restart of the
    Conductor it is still registered, and its next `report_cache` is told that a snapshot is wanted. One that was silent
    for too long is lost, which raises `NotFound`: then register again.
    """

    def __init__(self, scheduler: "Scheduler", tenant: str, name: str, incarnation: int, fresh: bool, doubted_after: float):
        self._scheduler, self._of = scheduler, (tenant, name, incarnation)
        self._loads, self._batch, self._lock = 0, 1, threading.Lock()
        self.name = name
        self.incarnation = incarnation
        self.fresh = fresh
        """Whether nothing is known of its cache: it begins with `report_cache(..., snapshot=True)`."""
        self.doubted_after = doubted_after
        """Seconds without a report after which it is not chosen any more; 0 for never."""

    def report_load(self, queued_tokens: int, decode_tokens: int = 0, decodes: int = 0) -> None:
        """How busy it is: tokens of prompts that wait or are computed, tokens of KV cache of decodes, and these."""
        with self._lock:
            self._loads += 1
            number = self._loads
        load = (queued_tokens, decode_tokens, decodes)
        _check(self._scheduler._native().report_load((*self._of, number), load))

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
        """What became of its cache: blocks `removed`, then blocks `stored` in the order of a prompt, after `parent`.

        With `snapshot` nothing that was said before counts any more. True when something is not known and a snapshot is
        wanted, as after a report that was lost.
        """
        changes: List[Tuple[str, str, str, Optional[str], Optional[int], Sequence[int]]] = []
        if removed:
            changes.append(("removed", lora, salt, removed_tier, None, list(removed)))
        if stored:
            changes.append(("stored", lora, salt, tier, parent, list(stored)))
        # One after the other: batches are numbered.
        with self._lock:
            kind = "snapshot" if snapshot else "goes"
            code, following, wanted = self._report(self._batch, kind, changes)
            if code == 0 and wanted == "replay":
                # What is missing between was never heard, and nobody has it any more: it counts as lost.
                code, following, wanted = self._report(self._batch, "lost", changes)
            if code == 0:
                self._batch = following
            elif code in (_UNREACHABLE, _LATE):
                # It may have been taken; if it was not, the next one leaves a gap, which is found out.
                self._batch += 1
        _check(code)
        return wanted != "nothing"

    def _report(self, number: int, kind: str, changes: Sequence[Any]) -> Tuple[int, int, str]:
        return self._scheduler._native().report_cache((*self._of, number), kind, changes)

    def close(self) -> None:
        """It goes. What is booked there is lost, and its requests are told so."""
        _check(self._scheduler._native().deregister(*self._of))

    def __enter__(self) -> "Instance":
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], value: Any, trace: Optional[TracebackType]) -> None:
        self.close()


def _check(code: int) -> None:
    if code < 0:
        raise error(code)


class Scheduler:
    """A line to the Conductor of a cluster. Any number of threads may use one; calls wait without the interpreter's lock.

    Which cluster is said as to `Store`. A call that the Conductor does not answer within `budget` seconds is decided
    here, where that can be: `schedule` then goes by the last table of instances, and asks again after a moment.
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
        self, request: str, prompt: Prompt, *, wait: float = 60.0, mode: str = "reserve", barred: Sequence[str] = ()
    ) -> Decision:
        """Who serves a request, and books it; waits for an instance up to `wait` seconds.

        `request` is an id of the caller's: asked again with the same one, a request is booked once. `mode`: "reserve",
        "now" to be booked behind others rather than wait, "advise" to be told without a booking. `barred`: instances
        that it must not go to.
        """
        return self._decide((request, self._context(prompt), prompt.tokens, list(barred)), prompt, mode, wait, None)

    def reschedule(
        self, booked: Booked, failed: Sequence[str], request: str, prompt: Prompt, *, wait: float = 60.0
    ) -> Decision:
        """Where a booked request goes whose instances `failed`. It keeps its place among those who wait."""
        asked = (request, self._context(prompt), prompt.tokens, [])
        return self._decide(asked, prompt, "reserve", wait, (booked.reservation, list(failed)))

    def _decide(
        self,
        asked: Tuple[str, Tuple[str, str, str, int, str], int, List[str]],
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
        """Its prefill began."""
        self._update(booked, "prefill_started")

    def prefill_done(self, booked: Booked, reused_tokens: int, took: float) -> None:
        """Its prefill ended: tokens that were cached, and seconds that it took. Predictions learn from it."""
        self._update(booked, "prefill_done", reused_tokens, took)

    def decoding(self, booked: Booked) -> None:
        """It decodes."""
        self._update(booked, "decoding")

    def alive(self, booked: Booked) -> None:
        """It goes on: the lease is renewed."""
        self._update(booked, "alive")

    def ended(self, decision: Decision) -> None:
        """It ended, however: what was booked is released. Nothing happens for one that was not served."""
        if isinstance(decision, Booked) and decision.reservation:
            self._update(decision, "ended")
        elif isinstance(decision, Local):
            _check(self._native().ended(decision.prefill))

    def _update(self, booked: Booked, step: str, reused_tokens: int = 0, took: float = 0.0) -> None:
        _check(self._native().update(booked.reservation, step, reused_tokens, took))

    def query(self, prompt: Prompt, *, most: int = 8, tier: str = "ssd") -> Tuple[List[Holder], int]:
        """Who has how much of a prompt's beginning, most first, and how many tokens all and the store give together. Only
        full blocks count: of 40 tokens in blocks of 16, at most 32.

        `tier`: the furthest that counts, "gpu", "dram" or "ssd".
        """
        full = prompt.hashes[: prompt.tokens // max(prompt.block_tokens, 1)]
        code, found = self._native().query(self._context(prompt), full, most, tier)
        _check(code)
        found = _there(found)
        return [Holder(*holder) for holder in found["holders"]], found["pooled_tokens"]

    def explain(self, request: str) -> Explained:
        """Why a request went where it went, by what is known now; `NotFound` when it has ended."""
        code, found = self._native().explain(request)
        _check(code)
        found = _there(found)
        now = _booked(found["now"]) if found["now"] is not None else None
        candidates = [Candidate(**candidate) for candidate in found["candidates"]]
        return Explained(_decision(found["answer"]), now, candidates, found["pooled_tokens"])

    def table(self, wait: float = 5.0) -> Table:
        """Instances and models as they were told last; waits for the first table."""
        for table in self.watch(wait):
            return table
        raise Timeout(_LATE, f"no table of instances came within {wait} s")

    def watch(self, wait: float = 60.0) -> Iterator[Table]:
        """Each table that comes: once a second, and when an instance comes, goes or is doubted. Ends when none comes for
        `wait` seconds, as while the Conductor is away."""
        seen, until = 0, time.monotonic() + wait
        while True:
            # In steps, so that signals are seen.
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
        """Has objects of the store copied to a second node each; the task's number, as `kvplane ctl tasks` shows it."""
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
    ) -> Instance:
        """An instance comes. `part`: "prefill", "decode" or "mixed". `incarnation` grows each time that it starts (the time,
        unless it is said). `token_bytes`: of KV cache of a token. `capacity_tokens`: of KV cache that it has room for
        when it decodes. `report_every`: how often it will report its load, in seconds; 0 for never. `address`: where
        routers reach it. `publisher`, `replay`, `topic`: where it publishes KV events over ZeroMQ.
        """
        incarnation = time.time_ns() if incarnation is None else incarnation
        spec = (name, incarnation, tenant, model, block_tokens, token_bytes, part, capacity_tokens, report_every, address)
        events = (publisher, replay, topic) if publisher else None
        code, fresh, doubted_after = self._native().register(spec, events)
        _check(code)
        return Instance(self, tenant, name, incarnation, fresh, doubted_after)

    @property
    def client(self) -> int:
        """The number under which the Conductor knows this client."""
        return self._native().client()

    def close(self) -> None:
        """Ends the line."""
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
