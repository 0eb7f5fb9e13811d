//! Messages about all instances of the Conductor: what who watches them is told.

use bincode::{Decode, Encode};

use crate::message::conductor::InstancePart;

/// Asks for all instances, and again when something changes: the reply is a stream of [`InstanceTable`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub struct WatchInstances;

/// All instances and models.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
pub struct InstanceTable {
    /// Changes when an instance comes, goes, is doubted or believed again.
    pub version: u64,
    /// Instances, by name.
    pub instances: Vec<InstanceStatus>,
    /// Models, each with its queue.
    pub models: Vec<ModelStatus>,
}

/// An instance.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct InstanceStatus {
    /// Its name.
    pub instance: String,
    /// Its incarnation.
    pub incarnation: u64,
    /// Whose it is.
    pub tenant: String,
    /// The model it serves.
    pub model: String,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// What it does.
    pub part: InstancePart,
    /// Where routers reach it.
    pub address: String,
    /// Whether it missed reports, and is not chosen.
    pub doubted: bool,
    /// Whether something of its cache is not known.
    pub degraded: bool,
    /// Prefills booked there.
    pub prefills: u32,
    /// Until these are done.
    pub wait_ns: u64,
    /// Tokens of KV cache of decodes booked there.
    pub decode_tokens: u64,
    /// These decodes.
    pub decodes: u32,
    /// How long ago it was heard of.
    pub silent_ns: u64,
}

/// A model.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ModelStatus {
    /// Whose.
    pub tenant: String,
    /// The model.
    pub model: String,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Instances that serve it.
    pub instances: u64,
    /// Requests that wait.
    pub waiting: u64,
    /// Requests that wait or are booked.
    pub requests: u64,
    /// Blocks in the index.
    pub blocks: u64,
    /// Blocks that the index forgot for want of room.
    pub forgotten_blocks: u64,
    /// Tokens of prompts that were placed.
    pub tokens: u64,
    /// Of these, reused by prediction.
    pub reused_tokens: u64,
    /// Mean relative error of late predictions of prefills, in thousandths.
    pub error_permille: u32,
    /// Whether hashes of requests and of events seem to be of different kinds.
    pub mismatch: bool,
}
