//! Messages about hot objects, and the names of objects in shards' reports.
//!
//! A node sends one for each shard after the shard's report: reports name objects by their digests, as their layout is
//! fixed.

/// Most hot objects in one report: the hottest.
pub const HOT_PER_REPORT: usize = 16;
/// Most bytes of a key or a tenant's name in a report; longer ones are truncated.
pub const NAME_PER_REPORT_BYTES: usize = 256;

/// Reports the hot objects of a shard.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ReportHot {
    pub node: u64,
    pub incarnation: u64,
    pub shard: HotShard,
}

/// Requests the hot objects of all nodes, or of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ListHot {
    pub node: Option<u64>,
}

/// The reply to [`ListHot`].
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct HotList {
    /// Nodes, each with its shards by number.
    pub nodes: Vec<(u64, Vec<HotShard>)>,
}

/// Hot objects of one shard.
#[derive(Clone, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct HotShard {
    pub shard: u16,
    /// Time over which the gets were counted, in nanoseconds.
    pub over_ns: u64,
    /// The hottest objects, by gets.
    pub hot: Vec<HotFigures>,
    /// Names of these, and of the objects of slow requests, if the shard has them in memory with their names.
    pub names: Vec<ObjectFigures>,
}

/// A hot object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct HotFigures {
    pub digest: u128,
    /// Gets of the object: an estimate from samples.
    pub gets: u64,
    /// Bytes that those gets requested: an estimate from samples.
    pub bytes: u64,
}

/// Name of an object.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ObjectFigures {
    pub digest: u128,
    /// The tenant's name; empty for the default tenant.
    pub tenant: Vec<u8>,
    pub key: Vec<u8>,
}

const _: () = {
    let names = (HOT_PER_REPORT + crate::message::shards::SLOW_PER_REPORT) * (2 * NAME_PER_REPORT_BYTES + 32);
    assert!(names + HOT_PER_REPORT * 32 + 64 < crate::limits::SMALL_BODY_BYTES, "a full report is a small message");
};
