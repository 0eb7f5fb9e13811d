//! Messages of the Conductor: registration and reports of instances, and placement requests of schedulers. Those that
//! the Conductor itself takes and returns are its types.
//!
//! All times are spans in nanoseconds: clocks of different processes are never compared. Fields are append-only.

use bincode::{Decode, Encode};
pub use kvplane_conductor::conductor::{
    AssignedGroup, AssignedStage, Assignment, BlockChange, CacheBatch, CacheReport, CacheTaken, CacheWanted,
    CandidateStatus, DecodeStatus, EventSource, FetchSource, GroupAssignment, InstanceCapabilities, InstanceLoad,
    InstancePart, InstanceRegistered, InstanceStatus, InstanceTable, ModelStatus, PipelineMembership,
    PlacementExplained, PlacementNotice, PrefixHolder, PrefixHolders, RegisterCapabilities, RegisterInstance,
    RequestExplained, RequestStep, RequestTerms, Schedule, ScheduleMode, ScheduleOnTerms, ScheduleRefusal,
    ScheduleReply, ScheduleWithGroups, StoredTokens,
};
pub use kvplane_conductor::cost::DecodeSteps;
pub use kvplane_conductor::index::{BlockTier, PromptContext};
pub use kvplane_conductor::scheduler::RequestOutput;

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
    pub load: InstanceLoad,
}

/// A numbered batch of changes of an instance's cache.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ReportCache {
    pub tenant: String,
    pub instance: String,
    pub incarnation: u64,
    pub batch: CacheBatch,
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

/// Requests the reasons for a request's placement.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ExplainRequest {
    pub request: String,
}

/// Requests the reasons for a request's placement, with the pipeline groups that prefill.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ExplainPlacement {
    pub request: String,
}

/// Subscribes to the table of instances: the reply is a stream of [`InstanceTable`], one for each change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct WatchInstances;
