//! Messages of the Conductor: registration and reports of instances, and placement requests of schedulers.
//!
//! All times are spans in nanoseconds: clocks of different processes are never compared. Fields are append-only.

use bincode::{Decode, Encode};

pub use crate::message::instance_table::{InstanceStatus, InstanceTable, ModelStatus, WatchInstances};

/// Context within which blocks can be shared.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct PromptContext {
    /// Tenant of the requests; empty for the default tenant.
    pub tenant: String,
    pub model: String,
    /// The LoRA adapter; empty for none.
    pub lora: String,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Further input of the hashes; empty for none.
    pub salt: String,
}

/// Role of an instance. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum InstancePart {
    /// Prefill only.
    Prefill,
    /// Decode only.
    Decode,
    /// Prefill and decode.
    Mixed,
}

/// Registers an instance. Idempotent.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RegisterInstance {
    /// Name of the instance, unique in the cluster.
    pub instance: String,
    /// Incarnation of the instance: greater after each start.
    pub incarnation: u64,
    /// Tenant whose requests the instance serves; empty for the default tenant.
    pub tenant: String,
    /// Model that the instance serves.
    pub model: String,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Bytes of KV cache per token; 0 for the default.
    pub token_bytes: u64,
    /// Role of the instance.
    pub part: InstancePart,
    /// Tokens of KV cache that fit the instance when it decodes.
    pub capacity_tokens: u64,
    /// Interval of its load reports; 0 for none.
    pub report_ns: u64,
    /// Address for routers.
    pub address: String,
    /// Publisher of its events over ZeroMQ; none if events come over this connection, or not at all.
    pub events: Option<EventSource>,
}

/// ZeroMQ endpoints at which an engine publishes its KV events.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct EventSource {
    /// `tcp://HOST:PORT` of the publisher.
    pub publisher: String,
    /// `tcp://HOST:PORT` of the replay socket; empty for none.
    pub replay: String,
    /// The topic to subscribe to; empty for all.
    pub topic: String,
}

/// The reply to [`RegisterInstance`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct InstanceRegistered {
    /// True if the instance's cache is unknown: the instance sends a snapshot, if it reports its cache itself.
    pub fresh: bool,
    /// Time without a load report after which the instance is not chosen any more; 0 for no limit.
    pub suspect_after_ns: u64,
}

/// Deregisters an instance. Idempotent.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct DeregisterInstance {
    pub tenant: String,
    pub instance: String,
    pub incarnation: u64,
}

/// Reports the load of an instance: a call, or a datagram, which may be lost.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ReportLoad {
    pub tenant: String,
    pub instance: String,
    pub incarnation: u64,
    /// Sequence number, which grows with each report: an older report that arrives late is ignored.
    pub seq: u64,
    /// Tokens of prompts that are queued or being computed, without cached ones.
    pub queued_tokens: u64,
    /// Tokens of KV cache of the requests being decoded.
    pub decode_tokens: u64,
    /// Requests being decoded.
    pub decodes: u32,
}

/// Medium of blocks. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum BlockTier {
    /// GPU memory.
    Gpu,
    /// The host's memory.
    Dram,
    /// Solid-state drives.
    Ssd,
}

/// A numbered batch of changes of an instance's cache.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ReportCache {
    pub tenant: String,
    pub instance: String,
    pub incarnation: u64,
    /// Number of the batch: one more than the previous batch's.
    pub seq: u64,
    pub kind: CacheReport,
    /// The changes, in order.
    pub changes: Vec<BlockChange>,
}

/// Kind of a batch. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum CacheReport {
    /// Continues the previous batch.
    Goes,
    /// Starts from an empty cache: all blocks that the cache holds follow.
    Snapshot,
    /// Batches before this one are lost permanently.
    Lost,
}

/// A change of an instance's cache. Tags are append-only.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum BlockChange {
    /// Blocks were stored.
    Stored {
        /// The LoRA adapter; empty for none.
        lora: String,
        /// Further input of the hashes.
        salt: String,
        tier: BlockTier,
        /// Hash of the block before the first one.
        parent: Option<u64>,
        /// Rolling hashes, in the order of the prompt.
        hashes: Vec<u64>,
    },
    /// Blocks were removed.
    Removed {
        /// The LoRA adapter; empty for none.
        lora: String,
        /// Further input of the hashes.
        salt: String,
        /// The tier that lost them; none for all tiers.
        tier: Option<BlockTier>,
        hashes: Vec<u64>,
    },
    /// All blocks were removed.
    Cleared,
}

/// The reply to [`ReportCache`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct CacheTaken {
    /// Number of the next batch.
    pub next: u64,
    /// Batches that the control plane requests beside the next one.
    pub wanted: CacheWanted,
}

/// Request of the control plane to a process that reports a cache. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum CacheWanted {
    /// No request.
    Nothing,
    /// Resend the batches from the next number on; this batch was not applied.
    Replay,
    /// Send a snapshot, once it is available.
    Snapshot,
}

/// Requests the instances that hold the prefix of a prompt.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct QueryPrefix {
    pub context: PromptContext,
    /// Rolling hashes of the prompt's blocks.
    pub hashes: Vec<u64>,
    /// Most instances to return.
    pub most: u32,
    /// The slowest tier to count.
    pub tier: BlockTier,
}

/// The reply to [`QueryPrefix`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct PrefixHolders {
    /// Instances that hold some of the prefix, longest prefix first.
    pub holders: Vec<PrefixHolder>,
    /// Tokens of the prefix that the shared store and all instances hold together.
    pub pooled_tokens: u32,
}

/// Prefix of a prompt that an instance holds, in tokens without a gap; each count includes the tiers before it.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct PrefixHolder {
    pub instance: String,
    /// Tokens on its GPU.
    pub gpu_tokens: u32,
    /// Tokens on its GPU or in its memory.
    pub dram_tokens: u32,
    /// Tokens on its GPU, in its memory or on its SSD.
    pub ssd_tokens: u32,
    /// True if the index of the instance's cache is incomplete.
    pub degraded: bool,
}

/// Mode of a placement. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum ScheduleMode {
    /// Books the request: at once if an instance is about to be free, otherwise later.
    Reserve,
    /// Books the request at once, even behind others.
    Now,
    /// Returns a placement without booking it.
    Advise,
}

/// Requests a placement for a request, and books it.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Schedule {
    /// Random number of the requester, under which it watches assignments.
    pub client: u64,
    /// Id of the request; a retry with the same id gets the same answer.
    pub request: String,
    pub context: PromptContext,
    /// Tokens of the prompt.
    pub tokens: u32,
    /// Rolling hashes of the prompt's full blocks.
    pub hashes: Vec<u64>,
    /// Longest wait; 0 for the Conductor's limit.
    pub wait_ns: u64,
    pub mode: ScheduleMode,
    /// Instances that must not be chosen.
    pub barred: Vec<String>,
}

/// The reply to [`Schedule`] and [`Reschedule`]. Tags are append-only.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum ScheduleReply {
    /// The request is placed.
    Assigned(Assignment),
    /// The request is queued; its placement is sent to the watcher of assignments, or in reply to a retry.
    Queued {
        reservation: u64,
        /// Requests ahead of it in the queue.
        position: u32,
        /// Estimated time until its placement.
        eta_ns: u64,
    },
    /// The request is rejected.
    Refused {
        why: ScheduleRefusal,
        /// Time after which a retry may succeed.
        retry_after_ns: u64,
    },
}

/// Reason for a rejection. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum ScheduleRefusal {
    /// The first token would miss its objective (TTFT).
    Ttft,
    /// Tokens would miss their objective (TBT).
    Tbt,
    /// No instance accepts requests.
    NoInstance,
    /// Too many requests are queued or booked.
    Full,
    /// The request was queued for its longest wait.
    Waited,
    /// The request's instance was lost; the request can be rescheduled.
    Lost,
}

/// Placement of a request.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Assignment {
    /// Id of the reservation; 0 if nothing was booked.
    pub reservation: u64,
    /// Instance for the prefill.
    pub prefill: String,
    /// Instance for decoding, if one was chosen.
    pub decode: Option<String>,
    /// Tokens of the prompt to reuse: the instance's own and fetched ones.
    pub reuse_tokens: u32,
    /// Sources of the tokens that the instance lacks, longest prefix first.
    pub sources: Vec<FetchSource>,
    /// True if the instance keeps the fetched blocks.
    pub keep: bool,
    /// Predicted time until the prefill begins.
    pub wait_ns: u64,
    /// Predicted duration of the prefill.
    pub prefill_ns: u64,
    /// Time that the reservation lasts without an update.
    pub lease_ns: u64,
}

/// Source of a prompt's prefix.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct FetchSource {
    /// The instance; none for the shared store.
    pub instance: Option<String>,
    /// Tokens of the prefix.
    pub tokens: u32,
}

/// Progress of a request. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum RequestStep {
    /// The prefill began.
    PrefillStarted,
    /// The prefill ended.
    PrefillDone {
        /// Tokens that were cached.
        reused_tokens: u32,
        /// Duration of the prefill.
        took_ns: u64,
    },
    /// Decoding began.
    Decoding,
    /// The request is still running: its lease is renewed.
    Alive,
    /// The request ended, by success or failure: its reservation is released.
    Ended,
}

/// Reports the progress of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct UpdateRequest {
    pub reservation: u64,
    pub step: RequestStep,
}

/// Requests another placement for a request, which keeps its place in the queue.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Reschedule {
    pub reservation: u64,
    /// Instances that have failed.
    pub failed: Vec<String>,
}

/// Subscribes to the placements of a client's queued requests: the reply is a stream of [`PlacementNotice`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct WatchAssignments {
    pub client: u64,
}

/// Placement or rejection of a queued request.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct PlacementNotice {
    pub request: String,
    pub answer: ScheduleReply,
}

/// Requests the reasons for a request's placement.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ExplainRequest {
    pub request: String,
}

/// The reply to [`ExplainRequest`], from the present state.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct RequestExplained {
    /// The answer that the request got.
    pub answer: ScheduleReply,
    /// The placement that the request would get now, if it had to be placed at once.
    pub now: Option<Assignment>,
    /// Instances, soonest free first.
    pub candidates: Vec<CandidateStatus>,
    /// Tokens of the prefix that the shared store and all instances hold together.
    pub pooled_tokens: u32,
}

/// An instance as a candidate for a request.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct CandidateStatus {
    pub instance: String,
    /// True if the instance may be chosen.
    pub takes: bool,
    /// Tokens of the prompt that the instance holds or will hold.
    pub held_tokens: u32,
    /// Time until everything booked at the instance is done.
    pub wait_ns: u64,
    /// Time until the instance's NIC is free.
    pub egress_wait_ns: u64,
    /// Ratio of the instance's times to the model's, in thousandths.
    pub factor_permille: u32,
}
