//! What operators tell the Conductor: who is to get no requests for now, and how it is to decide.

use bincode::{Decode, Encode};

/// Takes an instance out, or lets it take requests again: what it has goes on, and others may fetch from it. A later
/// incarnation of it begins like any other.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct HoldInstance {
    /// Its name.
    pub instance: String,
    /// Whether it is taken out.
    pub held: bool,
}

/// The answer to [`HoldInstance`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct InstanceHeld {
    /// Requests that are booked there; when there are none, it can be stopped.
    pub requests: u32,
}

/// How the Conductor decides. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum PlacementPolicy {
    /// By lot.
    Random,
    /// In turn.
    RoundRobin,
    /// The least loaded.
    LoadBalance,
    /// As SGLang's router does it.
    SglangLike,
    /// As Dynamo's router does it.
    DynamoLike,
    /// Algorithm 1 of the FAST'25 paper, without transfers.
    Local,
    /// Algorithm 1 of the FAST'25 paper.
    Algorithm1,
    /// Our own.
    Kvplane,
}

/// Says how the Conductor decides from now on, for every model. What is booked stays so. Until the control plane's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct SetPlacement {
    /// How.
    pub policy: PlacementPolicy,
    /// The time to the first token that is promised, in nanoseconds; 0 for no promise. Who cannot be served so is
    /// refused at once, by policies that refuse.
    pub ttft_ns: u64,
    /// The time between tokens that is promised; 0 for no promise.
    pub tbt_ns: u64,
}

/// Asks how the Conductor decides, and whom operators have taken out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ShowPlacement;

/// Asks which copies of hot prefixes the Conductor has had made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ShowCopies;

/// The answer to [`ShowCopies`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct CopiesShown {
    /// Bytes that copies may take; 0: none are made.
    pub most_bytes: u64,
    /// Whether the cluster keeps copies at all.
    pub possible: bool,
    /// Bytes of those that there are and that are being made.
    pub bytes: u64,
    /// Prefixes that have one.
    pub prefixes: u64,
    /// Those that are being made.
    pub coming: u64,
    /// Copies that were made, that could not be, and that do not count any more.
    pub made: u64,
    /// See `made`.
    pub failed: u64,
    /// See `made`.
    pub forgotten: u64,
}

/// The answer to [`ShowPlacement`].
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct Placement {
    /// How it decides, and what is promised.
    pub set: SetPlacement,
    /// Instances that are taken out.
    pub held: Vec<String>,
}
