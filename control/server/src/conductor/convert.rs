//! Conversions between messages and the Conductor's types.

use kvplane_conductor::conductor::{
    Ack, Answer, AssignedInstances, CacheBatch, CacheChange, CacheEvent, CacheRequest, Candidate, ConductorError,
    Holdings, InstanceRow, InstanceSpec, Mode, Part, PoolRow, Publisher, ScheduleRequest, Step, Table, Why,
};
use kvplane_conductor::index::{ContextKey, Tier};
use kvplane_conductor::scheduler::SchedulerError;
use kvplane_rpc::conductor::{
    Assignment, BlockChange, BlockTier, CacheReport, CacheTaken, CacheWanted, CandidateStatus, EventSource,
    FetchSource, InstancePart, InstanceStatus, InstanceTable, ModelStatus, PrefixHolder, PrefixHolders, PromptContext,
    RegisterInstance, ReportCache, RequestStep, Schedule, ScheduleMode, ScheduleRefusal, ScheduleReply,
};
use kvplane_rpc::{Refusal, RefusalCode};

pub(crate) fn refusal(error: &ConductorError) -> Refusal {
    let code = match error {
        ConductorError::Bad { .. } => RefusalCode::BadRequest,
        ConductorError::UnknownInstance { .. }
        | ConductorError::UnknownRequest { .. }
        | ConductorError::UnknownReservation { .. }
        | ConductorError::UnknownModel { .. }
        | ConductorError::Scheduler(SchedulerError::UnknownInstance { .. } | SchedulerError::UnknownRequest { .. }) => {
            RefusalCode::NotFound
        }
        ConductorError::Conflict { .. } => RefusalCode::AlreadyExists,
        ConductorError::StaleIncarnation { .. } => RefusalCode::StaleIncarnation,
        ConductorError::Limit { .. } | ConductorError::Scheduler(_) => RefusalCode::LimitReached,
    };
    Refusal::new(code, error.to_string())
}

pub(crate) fn context_in(context: PromptContext) -> ContextKey {
    let PromptContext { tenant, model, lora, block_tokens, salt } = context;
    ContextKey { tenant, model, lora, block_tokens, salt }
}

/// Converts a registration; `is_vllm` is true if the instance hashes as vLLM does.
pub(crate) fn spec_in(call: RegisterInstance, is_vllm: bool) -> InstanceSpec {
    let events = |EventSource { publisher, replay, topic }| Publisher { publisher, replay, topic, is_vllm };
    InstanceSpec {
        name: call.instance,
        incarnation: call.incarnation,
        tenant: call.tenant,
        model: call.model,
        block_tokens: call.block_tokens,
        token_bytes: call.token_bytes,
        part: match call.part {
            InstancePart::Prefill => Part::Prefill,
            InstancePart::Decode => Part::Decode,
            InstancePart::Mixed => Part::Mixed,
        },
        capacity_tokens: call.capacity_tokens,
        report_ns: call.report_ns,
        address: call.address,
        events: call.events.map(events),
    }
}

fn tier_in(tier: BlockTier) -> Tier {
    match tier {
        BlockTier::Gpu => Tier::Gpu,
        BlockTier::Dram => Tier::Dram,
        BlockTier::Ssd => Tier::Ssd,
    }
}

/// Returns the instance, its incarnation, and its batch.
pub(crate) fn batch_in(call: ReportCache) -> (String, u64, CacheBatch) {
    let change = match call.kind {
        CacheReport::Goes => CacheChange::Goes,
        CacheReport::Snapshot => CacheChange::Snapshot,
        CacheReport::Lost => CacheChange::Lost,
    };
    let event = |change| match change {
        BlockChange::Stored { lora, salt, tier, parent, hashes } => {
            CacheEvent::Stored { lora, salt, tier: tier_in(tier), parent, hashes }
        }
        BlockChange::Removed { lora, salt, tier, hashes } => {
            CacheEvent::Removed { lora, salt, tier: tier.map(tier_in), hashes }
        }
        BlockChange::Cleared => CacheEvent::Cleared,
    };
    let events = call.changes.into_iter().map(event).collect();
    (call.instance, call.incarnation, CacheBatch { seq: call.seq, change, events })
}

pub(crate) fn ack_out(ack: Ack) -> CacheTaken {
    let wanted = match ack.wanted {
        CacheRequest::Nothing => CacheWanted::Nothing,
        CacheRequest::Replay => CacheWanted::Replay,
        CacheRequest::Snapshot => CacheWanted::Snapshot,
    };
    CacheTaken { next: ack.next, wanted }
}

pub(crate) fn holdings_out(holdings: &Holdings) -> PrefixHolders {
    let holder = |held: &kvplane_conductor::conductor::PrefixHolding| PrefixHolder {
        instance: held.instance.to_string(),
        gpu_tokens: held.gpu_tokens,
        dram_tokens: held.dram_tokens,
        ssd_tokens: held.ssd_tokens,
        degraded: held.degraded,
    };
    // Instances whose cache is not indexed may hold the prefix all the same, so they are returned as degraded.
    let unknown = |name: &std::sync::Arc<str>| PrefixHolder {
        instance: name.to_string(),
        gpu_tokens: 0,
        dram_tokens: 0,
        ssd_tokens: 0,
        degraded: true,
    };
    let holders = holdings.holders.iter().map(holder).chain(holdings.unknown.iter().map(unknown)).collect();
    PrefixHolders { holders, pooled_tokens: holdings.pooled_tokens }
}

pub(crate) fn asked_in(call: Schedule) -> ScheduleRequest {
    ScheduleRequest {
        client: call.client,
        request: call.request,
        context: context_in(call.context),
        tokens: call.tokens,
        hashes: call.hashes,
        wait_ns: call.wait_ns,
        mode: match call.mode {
            ScheduleMode::Reserve => Mode::Reserve,
            ScheduleMode::Now => Mode::Now,
            ScheduleMode::Advise => Mode::Advise,
        },
        barred: call.barred,
    }
}

pub(crate) fn step_in(step: RequestStep) -> Step {
    match step {
        RequestStep::PrefillStarted => Step::PrefillStarted,
        RequestStep::PrefillDone { reused_tokens, took_ns } => Step::PrefillDone { reused_tokens, took_ns },
        RequestStep::Decoding => Step::Decoding,
        RequestStep::Alive => Step::Alive,
        RequestStep::Ended => Step::Ended,
    }
}

pub(crate) fn assigned_out(assigned: &AssignedInstances) -> Assignment {
    let source = |source: &kvplane_conductor::conductor::Source| FetchSource {
        instance: source.instance.as_ref().map(ToString::to_string),
        tokens: source.tokens,
    };
    Assignment {
        reservation: assigned.reservation,
        prefill: assigned.prefill.to_string(),
        decode: assigned.decode.as_ref().map(ToString::to_string),
        reuse_tokens: assigned.reuse_tokens,
        sources: assigned.sources.iter().map(source).collect(),
        keep: assigned.keep,
        wait_ns: assigned.wait_ns,
        prefill_ns: assigned.prefill_ns,
        lease_ns: assigned.lease_ns,
    }
}

pub(crate) fn answer_out(answer: &Answer) -> ScheduleReply {
    match answer {
        Answer::Assigned(assigned) => ScheduleReply::Assigned(assigned_out(assigned)),
        Answer::Queued { reservation, position, eta_ns } => {
            ScheduleReply::Queued { reservation: *reservation, position: *position, eta_ns: *eta_ns }
        }
        Answer::Refused { why, retry_after_ns } => {
            let why = match why {
                Why::Ttft => ScheduleRefusal::Ttft,
                Why::Tbt => ScheduleRefusal::Tbt,
                Why::NoInstance => ScheduleRefusal::NoInstance,
                Why::Full => ScheduleRefusal::Full,
                Why::Waited => ScheduleRefusal::Waited,
                Why::Lost => ScheduleRefusal::Lost,
            };
            ScheduleReply::Refused { why, retry_after_ns: *retry_after_ns }
        }
    }
}

pub(crate) fn candidate_out(candidate: &Candidate) -> CandidateStatus {
    CandidateStatus {
        instance: candidate.instance.to_string(),
        takes: candidate.takes,
        held_tokens: candidate.held_tokens,
        wait_ns: candidate.wait_ns,
        egress_wait_ns: candidate.egress_wait_ns,
        factor_permille: candidate.factor_permille,
    }
}

/// Returns the name of an instance's role.
pub(super) const fn part_name(part: Part) -> &'static str {
    match part {
        Part::Prefill => "prefill",
        Part::Decode => "decode",
        Part::Mixed => "mixed",
    }
}

fn row_out(row: &InstanceRow) -> InstanceStatus {
    InstanceStatus {
        instance: row.name.to_string(),
        incarnation: row.incarnation,
        tenant: row.pool.tenant.clone(),
        model: row.pool.model.clone(),
        block_tokens: row.pool.block_tokens,
        part: match row.part {
            Part::Prefill => InstancePart::Prefill,
            Part::Decode => InstancePart::Decode,
            Part::Mixed => InstancePart::Mixed,
        },
        address: row.address.clone(),
        // A router that places requests by this table leaves out both kinds.
        suspect: row.suspect || row.held,
        degraded: row.degraded,
        prefills: row.prefills,
        wait_ns: row.wait_ns,
        decode_tokens: row.decode_tokens,
        decodes: row.decodes,
        silent_ns: row.silent_ns,
    }
}

fn model_out(row: &PoolRow) -> ModelStatus {
    ModelStatus {
        tenant: row.key.tenant.clone(),
        model: row.key.model.clone(),
        block_tokens: row.key.block_tokens,
        instances: row.instances as u64,
        waiting: row.waiting as u64,
        requests: row.requests as u64,
        blocks: row.blocks as u64,
        forgotten_blocks: row.forgotten_blocks as u64,
        tokens: row.hits.tokens,
        reused_tokens: row.hits.reused,
        error_permille: row.error_permille,
        mismatch: row.mismatch,
    }
}

pub(crate) fn table_out(table: &Table) -> InstanceTable {
    InstanceTable {
        version: table.version,
        instances: table.instances.iter().map(row_out).collect(),
        models: table.pools.iter().map(model_out).collect(),
    }
}
