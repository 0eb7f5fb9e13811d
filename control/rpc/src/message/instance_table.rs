//! Messages about all instances of the Conductor, for watchers.

use bincode::{Decode, Encode};

use crate::message::conductor::InstancePart;

/// Subscribes to the table of instances: the reply is a stream of [`InstanceTable`], one for each change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct WatchInstances;

/// All instances and models.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct InstanceTable {
    /// Changes when an instance comes, goes, becomes suspect or is trusted again.
    pub version: u64,
    /// Instances, by name.
    pub instances: Vec<InstanceStatus>,
    /// Models, each with its queue.
    pub models: Vec<ModelStatus>,
}

/// State of an instance.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct InstanceStatus {
    pub instance: String,
    pub incarnation: u64,
    pub tenant: String,
    pub model: String,
    /// Tokens per block.
    pub block_tokens: u32,
    pub part: InstancePart,
    /// Address for routers.
    pub address: String,
    /// True if the instance missed reports, so it is not chosen.
    pub suspect: bool,
    /// True if the index of the instance's cache is incomplete.
    pub degraded: bool,
    /// Prefills booked at the instance.
    pub prefills: u32,
    /// Time until these prefills are done, in nanoseconds.
    pub wait_ns: u64,
    /// Tokens of KV cache of the decodes booked at the instance.
    pub decode_tokens: u64,
    /// Decodes booked at the instance.
    pub decodes: u32,
    /// Time since its last message, in nanoseconds.
    pub silent_ns: u64,
}

/// State of a model.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ModelStatus {
    pub tenant: String,
    pub model: String,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Instances that serve the model.
    pub instances: u64,
    /// Queued requests.
    pub waiting: u64,
    /// Queued and booked requests.
    pub requests: u64,
    /// Blocks in the index.
    pub blocks: u64,
    /// Blocks that the index dropped because it was full.
    pub forgotten_blocks: u64,
    /// Tokens of placed prompts.
    pub tokens: u64,
    /// Tokens of placed prompts that were predicted to be reused.
    pub reused_tokens: u64,
    /// Mean relative error of recent predictions of prefills, in thousandths.
    pub error_permille: u32,
    /// True if requests and events seem to use different hashes.
    pub mismatch: bool,
}
