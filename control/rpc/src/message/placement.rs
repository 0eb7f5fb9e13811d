//! Messages by which operators steer the Conductor: holding instances, the placement policy, classes, weights of flows.

use std::sync::Arc;

use bincode::{Decode, Encode};
pub use kvplane_conductor::conductor::{ClassTerms, LimitUse, MAX_PRIORITY};
pub use kvplane_conductor::policy::PlacementPolicy;
pub use kvplane_conductor::scheduler::{DEFAULT_FLOW_WEIGHT, MAX_FLOW_WEIGHT};

/// Holds an instance, or releases it: a held instance gets no new requests, its present ones continue, and others may
/// fetch blocks from it. A later incarnation starts without the hold.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct HoldInstance {
    pub instance: String,
    /// True to hold the instance, false to release it.
    pub held: bool,
}

/// The reply to [`HoldInstance`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct InstanceHeld {
    /// Requests booked at the instance; at 0 it can be stopped.
    pub requests: u32,
}

/// Sets the placement policy for every model, until the control plane ends. Booked requests keep their placement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct SetPlacement {
    pub policy: PlacementPolicy,
    /// Objective for the time to the first token, in nanoseconds; 0 for none. Policies with admission reject at once a
    /// request that would miss it.
    pub ttft_ns: u64,
    /// Objective for the time between tokens, in nanoseconds; 0 for none.
    pub tbt_ns: u64,
}

/// Sets the terms of a class of requests, or removes the class; durable.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct SetClass {
    /// Name of the class.
    pub class: String,
    /// Its terms; none to remove it.
    pub terms: Option<ClassTerms>,
}

/// Sets the weight of a flow, or resets it to the default; durable.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct SetWeight {
    /// Tenant whose requests the flow has; empty for the default tenant.
    pub tenant: String,
    /// Name of the flow; empty for that of requests without one.
    pub flow: String,
    /// Its weight, at least 1; none for the default.
    pub weight: Option<u32>,
}

/// Requests the classes, and the weights that were set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ShowService;

/// The reply to [`ShowService`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ServiceShown {
    /// Classes, by name.
    pub classes: Vec<(String, ClassTerms)>,
    /// Flows with a weight of their own.
    pub weights: Vec<SetWeight>,
}

/// Requests the placement policy and the held instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ShowPlacement;

/// Requests figures of the replicas of hot prefixes that the Conductor has had made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ShowCopies;

/// Requests the progress of the cache feeds of all instances that report their caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ShowFeeds;

/// Progress of an instance's cache feed.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct FeedShown {
    pub instance: Arc<str>,
    /// Number of the next batch to apply.
    pub next: u64,
    /// Number after the newest batch that is known to be published.
    pub newest: u64,
    /// True while its blocks are those of a snapshot that its publisher has not confirmed: none of them is answered.
    pub unconfirmed: bool,
    /// True while its cache is not completely known.
    pub degraded: bool,
}

/// The reply to [`ShowFeeds`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct FeedsShown {
    /// Feeds, by the names of their instances.
    pub feeds: Vec<FeedShown>,
}

/// The reply to [`ShowCopies`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct CopiesShown {
    /// Most bytes of such replicas; 0 if none are made.
    pub most_bytes: u64,
    /// True if the cluster keeps replicas at all.
    pub possible: bool,
    /// Bytes of present replicas and of those in progress.
    pub bytes: u64,
    /// Prefixes with a replica.
    pub prefixes: u64,
    /// Prefixes whose replication is in progress.
    pub coming: u64,
    /// Replications that succeeded.
    pub made: u64,
    /// Replications that failed.
    pub failed: u64,
    /// Replicas that do not count any more.
    pub forgotten: u64,
}

/// Requests the limits of the Conductor; the reply is [`LimitUse`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ShowLimits;

/// The reply to [`ShowPlacement`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Placement {
    /// The policy and the objectives.
    pub set: SetPlacement,
    /// Held instances, by name.
    pub held: Vec<String>,
}
