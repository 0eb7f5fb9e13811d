//! Messages of the Conductor: instances that register and report, schedulers that ask who should serve a request.
//!
//! All times are spans in nanoseconds: nobody's clock is compared with another's. Fields are append-only.

use bincode::{Decode, Encode};

pub use crate::message::instance_table::{InstanceStatus, InstanceTable, ModelStatus, WatchInstances};

/// What blocks can be shared among.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct PromptContext {
    /// Whose requests these are; empty for the default tenant's.
    pub tenant: String,
    /// The model.
    pub model: String,
    /// The LoRA adapter; empty for none.
    pub lora: String,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// What else the hashes depend on; empty for nothing.
    pub salt: String,
}

/// What an instance does. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum InstancePart {
    /// Prefills.
    Prefill,
    /// Decodes.
    Decode,
    /// Both.
    Mixed,
}

/// An instance registers. The same again does no harm.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RegisterInstance {
    /// Its name, unique in the cluster.
    pub instance: String,
    /// Its incarnation: larger each time that it starts.
    pub incarnation: u64,
    /// Whose requests it serves; empty for the default tenant's.
    pub tenant: String,
    /// The model it serves.
    pub model: String,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Bytes of KV cache of a token; 0 for the default.
    pub token_bytes: u64,
    /// What it does.
    pub part: InstancePart,
    /// Tokens of KV cache that it has room for when it decodes.
    pub capacity_tokens: u64,
    /// How often it will report its load; 0 for never.
    pub report_ns: u64,
    /// Where routers reach it.
    pub address: String,
    /// Where it publishes events over ZeroMQ; none for over this connection, or not at all.
    pub events: Option<EventSource>,
}

/// Where an engine publishes its KV events over ZeroMQ.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct EventSource {
    /// `tcp://HOST:PORT` of its publisher.
    pub publisher: String,
    /// The same of its replay socket; empty for none.
    pub replay: String,
    /// The topic to subscribe to; empty for all.
    pub topic: String,
}

/// The answer to [`RegisterInstance`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct InstanceRegistered {
    /// Whether nothing is known of its cache: it sends a snapshot, if it reports its cache itself.
    pub fresh: bool,
    /// After how long without a report it is not chosen any more; 0 for never.
    pub doubted_after_ns: u64,
}

/// An instance goes. One that is not there does no harm.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct DeregisterInstance {
    /// Whose it is.
    pub tenant: String,
    /// Its name.
    pub instance: String,
    /// Its incarnation.
    pub incarnation: u64,
}

/// How busy an instance is: a call, or a datagram, of which one may be lost.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ReportLoad {
    /// Whose it is.
    pub tenant: String,
    /// Its name.
    pub instance: String,
    /// Its incarnation.
    pub incarnation: u64,
    /// Grows with each report: one that comes late changes nothing.
    pub seq: u64,
    /// Tokens of prompts that wait there or are computed, without cached ones.
    pub queued_tokens: u64,
    /// Tokens of KV cache of requests that it decodes.
    pub decode_tokens: u64,
    /// These requests.
    pub decodes: u32,
}

/// Where blocks are. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum BlockTier {
    /// GPU memory.
    Gpu,
    /// Memory of the host.
    Dram,
    /// Solid-state drives.
    Ssd,
}

/// A numbered batch of changes of an instance's cache.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ReportCache {
    /// Whose it is.
    pub tenant: String,
    /// Its name.
    pub instance: String,
    /// Its incarnation.
    pub incarnation: u64,
    /// The batch's number: one more than that of the one before.
    pub seq: u64,
    /// What kind of batch.
    pub kind: CacheReport,
    /// What changed, in order.
    pub changes: Vec<BlockChange>,
}

/// What kind of batch. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum CacheReport {
    /// Follows the one before.
    Goes,
    /// Begins with an empty cache: all that is there follows.
    Snapshot,
    /// Batches before it are lost for good.
    Lost,
}

/// A change of an instance's cache. Tags are append-only.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum BlockChange {
    /// Blocks are there.
    Stored {
        /// The LoRA adapter; empty for none.
        lora: String,
        /// What else their hashes depend on.
        salt: String,
        /// Where.
        tier: BlockTier,
        /// The block before the first.
        parent: Option<u64>,
        /// Rolling hashes, in the order of the prompt.
        hashes: Vec<u64>,
    },
    /// Blocks are there no more.
    Removed {
        /// The LoRA adapter; empty for none.
        lora: String,
        /// What else their hashes depend on.
        salt: String,
        /// Where; everywhere where that is not said.
        tier: Option<BlockTier>,
        /// Their hashes.
        hashes: Vec<u64>,
    },
    /// Nothing is there.
    Cleared,
}

/// The answer to [`ReportCache`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct CacheTaken {
    /// The number of the batch that comes next.
    pub next: u64,
    /// What is wanted besides.
    pub wanted: CacheWanted,
}

/// What is wanted of who reports a cache. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum CacheWanted {
    /// Nothing.
    Nothing,
    /// The batches from the next on, again; this one was not taken.
    Replay,
    /// A snapshot, when it can be had.
    Snapshot,
}

/// Asks who has how much of the beginning of a prompt.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct QueryPrefix {
    /// The context.
    pub context: PromptContext,
    /// Rolling hashes of its blocks.
    pub hashes: Vec<u64>,
    /// How many to name at most.
    pub most: u32,
    /// The furthest tier that counts.
    pub tier: BlockTier,
}

/// Who has how much.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct PrefixHolders {
    /// Those who have something, most first.
    pub holders: Vec<PrefixHolder>,
    /// Tokens that the shared store and all instances can give together.
    pub pooled_tokens: u32,
}

/// What an instance has of the beginning of a prompt, in tokens without a gap; each counts the tiers before it too.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct PrefixHolder {
    /// Who.
    pub instance: String,
    /// On its GPU.
    pub gpu_tokens: u32,
    /// In its memory.
    pub dram_tokens: u32,
    /// On its SSD.
    pub ssd_tokens: u32,
    /// Whether something of its cache is not known.
    pub degraded: bool,
}

/// How a request is to be answered. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum ScheduleMode {
    /// Booked: at once where an instance is about to be free, else later.
    Reserve,
    /// Booked at once, even behind others.
    Now,
    /// Not booked: only said.
    Advise,
}

/// Asks who should serve a request, and books it.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Schedule {
    /// Who asks: a number drawn by chance, under which assignments are watched.
    pub client: u64,
    /// The request's id; asked again with the same one, it is answered again.
    pub request: String,
    /// The context.
    pub context: PromptContext,
    /// Tokens of the prompt.
    pub tokens: u32,
    /// Rolling hashes of its full blocks.
    pub hashes: Vec<u64>,
    /// How long it may wait; 0 for the Conductor's limit.
    pub wait_ns: u64,
    /// How.
    pub mode: ScheduleMode,
    /// Instances that it must not go to.
    pub barred: Vec<String>,
}

/// The answer to [`Schedule`] and [`Reschedule`]. Tags are append-only.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub enum ScheduleReply {
    /// It goes there.
    Assigned(Assignment),
    /// It waits; what becomes of it is told to who watches assignments, or asks again.
    Queued {
        /// Its reservation.
        reservation: u64,
        /// How many go before it.
        position: u32,
        /// After how long it may go, as far as can be said.
        eta_ns: u64,
    },
    /// It is not served.
    Refused {
        /// Why.
        why: ScheduleRefusal,
        /// When it may be worth trying again.
        retry_after_ns: u64,
    },
}

/// Why a request is not served. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum ScheduleRefusal {
    /// The first token would come too late.
    Ttft,
    /// Tokens would come too slowly.
    Tbt,
    /// No instance takes requests.
    NoInstance,
    /// Too many requests wait or are booked.
    Full,
    /// It waited as long as it may.
    Waited,
    /// Its instance was lost; it can be rescheduled.
    Lost,
}

/// Where a request goes.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Assignment {
    /// Its reservation; 0 where nothing was booked.
    pub reservation: u64,
    /// Who prefills.
    pub prefill: String,
    /// Who decodes, where that is chosen too.
    pub decode: Option<String>,
    /// Tokens of the prompt to reuse, its own and fetched.
    pub reuse_tokens: u32,
    /// From whom the tokens that it lacks are fetched, most first.
    pub sources: Vec<FetchSource>,
    /// Whether what is fetched is kept.
    pub keep: bool,
    /// Predicted: until the prefill begins.
    pub wait_ns: u64,
    /// Predicted: the prefill.
    pub prefill_ns: u64,
    /// How long the reservation lasts without an update.
    pub lease_ns: u64,
}

/// Who has the beginning of a prompt.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct FetchSource {
    /// Who; none for the shared store.
    pub instance: Option<String>,
    /// Tokens from the beginning on.
    pub tokens: u32,
}

/// How a request fares. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum RequestStep {
    /// Its prefill began.
    PrefillStarted,
    /// Its prefill ended.
    PrefillDone {
        /// Tokens that were cached.
        reused_tokens: u32,
        /// How long it took.
        took_ns: u64,
    },
    /// It decodes.
    Decoding,
    /// It goes on: its lease is renewed.
    Alive,
    /// It ended, however: it is released.
    Ended,
}

/// Says how a request fares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct UpdateRequest {
    /// Its reservation.
    pub reservation: u64,
    /// How.
    pub step: RequestStep,
}

/// A request must go elsewhere. It keeps its place among those who wait.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Reschedule {
    /// Its reservation.
    pub reservation: u64,
    /// Instances that have failed.
    pub failed: Vec<String>,
}

/// Asks for what becomes of a client's requests that wait: the reply is a stream of [`PlacementNotice`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct WatchAssignments {
    /// The client's number.
    pub client: u64,
}

/// What became of a request.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct PlacementNotice {
    /// Its id.
    pub request: String,
    /// What.
    pub answer: ScheduleReply,
}

/// Asks why a request went where it went.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ExplainRequest {
    /// Its id.
    pub request: String,
}

/// Why, by what is known now.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct RequestExplained {
    /// What it was answered.
    pub answer: ScheduleReply,
    /// Where it would go now, if it had to go at once.
    pub now: Option<Assignment>,
    /// Instances, those that are free soonest first.
    pub candidates: Vec<CandidateStatus>,
    /// Tokens that can be had from anywhere.
    pub pooled_tokens: u32,
}

/// An instance as it is weighed for a request.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct CandidateStatus {
    /// Who.
    pub instance: String,
    /// Whether it may be chosen.
    pub takes: bool,
    /// Tokens of the prompt that it has or will have.
    pub held_tokens: u32,
    /// Until all that is booked there is done.
    pub wait_ns: u64,
    /// Until its NIC is free.
    pub egress_wait_ns: u64,
    /// Its times beside the model's, in thousandths.
    pub factor_permille: u32,
}
