//! Messages between a scheduler and the Conductor in Python's form: dictionaries of plain values, times in seconds.

use std::time::Duration;

use kvplane::Decision;
use kvplane::rpc::conductor::{
    AssignedGroup, AssignedStage, Assignment, BlockChange, BlockTier, CacheWanted, CandidateStatus, FetchSource,
    GroupAssignment, InstancePart, InstanceStatus, InstanceTable, ModelStatus, PlacementExplained, PrefixHolders,
    PromptContext, RequestExplained, RequestStep, ScheduleRefusal, ScheduleReply,
};
use pyo3::prelude::*;

/// Converts seconds to nanoseconds; 0 for negative values and NaN.
pub(crate) fn nanoseconds(seconds: f64) -> u64 {
    // A cast from a float saturates.
    (seconds * 1e9) as u64
}

fn seconds(nanoseconds: u64) -> f64 {
    Duration::from_nanos(nanoseconds).as_secs_f64()
}

/// Sharing context of blocks: tenant, model, LoRA adapter, tokens of a block, salt.
#[derive(FromPyObject)]
pub(crate) struct Context(String, String, String, u32, String);

impl Context {
    pub(crate) fn out(self) -> PromptContext {
        let Self(tenant, model, lora, block_tokens, salt) = self;
        PromptContext { tenant, model, lora, block_tokens, salt }
    }
}

/// Change of a cache: kind (`stored`, `removed`, `cleared`), LoRA adapter, salt, tier, parent block, hashes.
#[derive(FromPyObject)]
pub(crate) struct Change(String, String, String, Option<String>, Option<u64>, Vec<u64>);

impl Change {
    /// Converts the change; `None` if its kind or tier is unknown.
    pub(crate) fn out(self) -> Option<BlockChange> {
        let Self(what, lora, salt, tier, parent, hashes) = self;
        let tier = match tier {
            Some(tier) => Some(tier_of(&tier)?),
            None => None,
        };
        match what.as_str() {
            "stored" => Some(BlockChange::Stored { lora, salt, tier: tier?, parent, hashes }),
            "removed" => Some(BlockChange::Removed { lora, salt, tier, hashes }),
            "cleared" => Some(BlockChange::Cleared),
            _ => None,
        }
    }
}

pub(crate) fn tier_of(name: &str) -> Option<BlockTier> {
    match name {
        "gpu" => Some(BlockTier::Gpu),
        "dram" => Some(BlockTier::Dram),
        "ssd" => Some(BlockTier::Ssd),
        _ => None,
    }
}

pub(crate) fn part_of(name: &str) -> Option<InstancePart> {
    match name {
        "prefill" => Some(InstancePart::Prefill),
        "decode" => Some(InstancePart::Decode),
        "mixed" => Some(InstancePart::Mixed),
        _ => None,
    }
}

pub(crate) fn step_of(name: &str, reused_tokens: u32, took: f64) -> Option<RequestStep> {
    match name {
        "prefill_started" => Some(RequestStep::PrefillStarted),
        "prefill_done" => Some(RequestStep::PrefillDone { reused_tokens, took_ns: nanoseconds(took) }),
        "decoding" => Some(RequestStep::Decoding),
        "alive" => Some(RequestStep::Alive),
        "ended" => Some(RequestStep::Ended),
        _ => None,
    }
}

pub(crate) const fn wanted_name(wanted: CacheWanted) -> &'static str {
    match wanted {
        CacheWanted::Nothing => "nothing",
        CacheWanted::Replay => "replay",
        CacheWanted::Snapshot => "snapshot",
    }
}

const fn why_name(why: ScheduleRefusal) -> &'static str {
    match why {
        ScheduleRefusal::Ttft => "ttft",
        ScheduleRefusal::Tbt => "tbt",
        ScheduleRefusal::NoInstance => "no instance",
        ScheduleRefusal::Full => "full",
        ScheduleRefusal::Waited => "waited",
        ScheduleRefusal::Lost => "lost",
    }
}

/// Placement of a request as the Conductor reserved it.
#[derive(IntoPyObject)]
pub(crate) struct BookedPlacement {
    reservation: u64,
    prefill: String,
    decode: Option<String>,
    reuse_tokens: u32,
    sources: Vec<(Option<String>, u32)>,
    keep: bool,
    wait: f64,
    prefill_time: f64,
    lease: f64,
    group: Option<GroupDict>,
}

/// Stage of a pipeline group.
#[derive(IntoPyObject)]
struct StageDict {
    instance: String,
    first_layer: u32,
    layers: u32,
    load_tokens: u32,
    wait: f64,
    busy: f64,
}

/// Pipeline group that prefills a request.
#[derive(IntoPyObject)]
struct GroupDict {
    name: String,
    chunk_tokens: u32,
    stages: Vec<StageDict>,
}

impl GroupDict {
    fn of(group: AssignedGroup) -> Self {
        let stage = |stage: AssignedStage| StageDict {
            instance: stage.instance.to_string(),
            first_layer: stage.first_layer,
            layers: stage.layers,
            load_tokens: stage.load_tokens,
            wait: seconds(stage.wait_ns),
            busy: seconds(stage.busy_ns),
        };
        let (name, chunk_tokens) = (group.name.to_string(), group.chunk_tokens);
        Self { name, chunk_tokens, stages: group.stages.into_iter().map(stage).collect() }
    }
}

impl BookedPlacement {
    fn of(assignment: Assignment, group: Option<AssignedGroup>) -> Self {
        let source = |source: FetchSource| (source.instance.map(|name| name.to_string()), source.tokens);
        Self {
            reservation: assignment.reservation,
            prefill: assignment.prefill.to_string(),
            decode: assignment.decode.map(|name| name.to_string()),
            reuse_tokens: assignment.reuse_tokens,
            sources: assignment.sources.into_iter().map(source).collect(),
            keep: assignment.keep,
            wait: seconds(assignment.wait_ns),
            prefill_time: seconds(assignment.prefill_ns),
            lease: seconds(assignment.lease_ns),
            group: group.map(GroupDict::of),
        }
    }
}

/// Placement of a request: one of the three.
#[derive(Default, IntoPyObject)]
pub(crate) struct DecisionDict {
    booked: Option<BookedPlacement>,
    local: Option<(String, Option<String>)>,
    refused: Option<(&'static str, f64)>,
}

impl DecisionDict {
    pub(crate) fn of(decision: Decision) -> Self {
        match decision {
            Decision::Booked(assignment) => Self::booked(assignment, None),
            Decision::BookedGroup(GroupAssignment { assignment, group }) => Self::booked(assignment, Some(group)),
            Decision::Local { prefill, decode } => Self { local: Some((prefill, decode)), ..Self::default() },
            Decision::Refused { why, retry_after } => {
                Self { refused: Some((why_name(why), retry_after.as_secs_f64())), ..Self::default() }
            }
        }
    }

    fn booked(assignment: Assignment, group: Option<AssignedGroup>) -> Self {
        Self { booked: Some(BookedPlacement::of(assignment, group)), ..Self::default() }
    }

    /// Converts the answer to a request, with the group that an explanation has beside it; empty for one that is
    /// queued.
    fn answered(answer: ScheduleReply, group: Option<AssignedGroup>) -> Self {
        match answer {
            ScheduleReply::Assigned(assignment) => Self::booked(assignment, group),
            ScheduleReply::AssignedGroup(GroupAssignment { assignment, group }) => {
                Self::booked(assignment, Some(group))
            }
            ScheduleReply::Refused { why, retry_after_ns } => {
                Self::of(Decision::Refused { why, retry_after: Duration::from_nanos(retry_after_ns) })
            }
            ScheduleReply::Queued { .. } => Self::default(),
        }
    }
}

/// Holders of a prefix: instance, tokens on its GPU, with its memory, with its SSD, and whether its index is degraded;
/// and the tokens of all together.
#[derive(IntoPyObject)]
pub(crate) struct Holders {
    holders: Vec<(String, u32, u32, u32, bool)>,
    pooled_tokens: u32,
}

impl Holders {
    pub(crate) fn of(found: PrefixHolders) -> Self {
        let holders = found.holders.into_iter();
        let holders = holders
            .map(|one| (one.instance.to_string(), one.gpu_tokens, one.dram_tokens, one.ssd_tokens, one.degraded));
        Self { holders: holders.collect(), pooled_tokens: found.pooled_tokens }
    }
}

/// Instance as evaluated for a placement.
#[derive(IntoPyObject)]
pub(crate) struct Candidate {
    instance: String,
    takes: bool,
    held_tokens: u32,
    wait: f64,
    egress_wait: f64,
    factor: f64,
}

/// Explanation of a placement.
#[derive(IntoPyObject)]
pub(crate) struct ExplanationDict {
    answer: DecisionDict,
    now: Option<BookedPlacement>,
    candidates: Vec<Candidate>,
    pooled_tokens: u32,
}

impl ExplanationDict {
    pub(crate) fn of(explained: PlacementExplained) -> Self {
        let PlacementExplained { explained: found, group, group_now } = explained;
        let RequestExplained { answer, now, candidates, pooled_tokens } = found;
        let candidate = |one: CandidateStatus| Candidate {
            instance: one.instance.to_string(),
            takes: one.takes,
            held_tokens: one.held_tokens,
            wait: seconds(one.wait_ns),
            egress_wait: seconds(one.egress_wait_ns),
            factor: f64::from(one.factor_permille) / 1000.0,
        };
        Self {
            answer: DecisionDict::answered(answer, group),
            now: now.map(|assignment| BookedPlacement::of(assignment, group_now)),
            candidates: candidates.into_iter().map(candidate).collect(),
            pooled_tokens,
        }
    }
}

/// Instance, as all clients see it.
#[derive(IntoPyObject)]
pub(crate) struct Row {
    instance: String,
    incarnation: u64,
    tenant: String,
    model: String,
    block_tokens: u32,
    part: &'static str,
    address: String,
    suspect: bool,
    degraded: bool,
    prefills: u32,
    wait: f64,
    decode_tokens: u64,
    decodes: u32,
    silent: f64,
    decode_factor: f64,
}

impl Row {
    fn of(row: InstanceStatus) -> Self {
        Self {
            instance: row.instance.to_string(),
            incarnation: row.incarnation,
            tenant: row.tenant,
            model: row.model,
            block_tokens: row.block_tokens,
            part: row.part.name(),
            address: row.address,
            suspect: row.suspect,
            degraded: row.degraded,
            prefills: row.prefills,
            wait: seconds(row.wait_ns),
            decode_tokens: row.decode_tokens,
            decodes: row.decodes,
            silent: seconds(row.silent_ns),
            decode_factor: f64::from(row.decode_factor_permille) / 1000.0,
        }
    }
}

/// Model, as all clients see it.
#[derive(IntoPyObject)]
pub(crate) struct Model {
    tenant: String,
    model: String,
    block_tokens: u32,
    instances: u64,
    waiting: u64,
    requests: u64,
    blocks: u64,
    forgotten_blocks: u64,
    tokens: u64,
    reused_tokens: u64,
    error: f64,
    mismatch: bool,
    decode_base: f64,
    decode_token: f64,
    decode_request: f64,
    decode_error: f64,
    output_p50: u32,
    output_p90: u32,
    output_error: f64,
    sessions: u64,
}

impl Model {
    fn of(row: ModelStatus) -> Self {
        Self {
            tenant: row.tenant,
            model: row.model,
            block_tokens: row.block_tokens,
            instances: row.instances,
            waiting: row.waiting,
            requests: row.requests,
            blocks: row.blocks,
            forgotten_blocks: row.forgotten_blocks,
            tokens: row.tokens,
            reused_tokens: row.reused_tokens,
            error: f64::from(row.error_permille) / 1000.0,
            mismatch: row.mismatch,
            decode_base: seconds(row.decode.base_ns),
            decode_token: row.decode.token_ps as f64 / 1e12,
            decode_request: seconds(row.decode.request_ns),
            decode_error: f64::from(row.decode.error_permille) / 1000.0,
            output_p50: row.decode.output_p50,
            output_p90: row.decode.output_p90,
            output_error: f64::from(row.decode.output_error_permille) / 1000.0,
            sessions: row.sessions,
        }
    }
}

/// Instances and models.
#[derive(IntoPyObject)]
pub(crate) struct Table {
    version: u64,
    instances: Vec<Row>,
    models: Vec<Model>,
}

impl Table {
    pub(crate) fn of(table: InstanceTable) -> Self {
        Self {
            version: table.version,
            instances: table.instances.into_iter().map(Row::of).collect(),
            models: table.models.into_iter().map(Model::of).collect(),
        }
    }
}
