//! Messages about the objects that shards are asked for most, and the names of those that their reports speak of.
//!
//! A node sends one for each shard after its report: reports speak of objects by their digests, as their layout is
//! fixed.

/// Hot objects in one report at most: the hottest.
pub const HOT_PER_REPORT: usize = 16;
/// Bytes of a key or a tenant's name in a report at most; longer ones are cut.
pub const NAME_PER_REPORT_BYTES: usize = 256;

/// Says which objects a shard of a node was asked for most.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct ReportHot {
    /// Which member.
    pub node: u64,
    /// In which incarnation.
    pub incarnation: u64,
    /// Its shard.
    pub shard: HotShard,
}

/// Asks for what nodes reported so, or one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct ListHot {
    /// Which node.
    pub node: Option<u64>,
}

/// What nodes reported.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct HotList {
    /// The nodes, each with its shards by number.
    pub nodes: Vec<(u64, Vec<HotShard>)>,
}

/// One shard.
#[derive(Clone, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct HotShard {
    /// Which shard.
    pub shard: u16,
    /// Over how many nanoseconds the objects were counted.
    pub over_ns: u64,
    /// The objects that it was asked for most, the hottest first.
    pub hot: Vec<HotFigures>,
    /// Names of those, and of the objects of its slow requests, as far as they are in its memory with their names.
    pub names: Vec<ObjectFigures>,
}

/// An object that is asked for much.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct HotFigures {
    /// Its digest.
    pub digest: u128,
    /// How many gets asked for it: an estimate from samples,
    pub gets: u64,
    /// and how many bytes they asked for.
    pub bytes: u64,
}

/// An object and its name.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct ObjectFigures {
    /// Its digest.
    pub digest: u128,
    /// Its tenant; empty for the default one.
    pub tenant: Vec<u8>,
    /// Its key.
    pub key: Vec<u8>,
}

const _: () = {
    let names = (HOT_PER_REPORT + crate::message::shards::SLOW_PER_REPORT) * (2 * NAME_PER_REPORT_BYTES + 32);
    assert!(names + HOT_PER_REPORT * 32 + 64 < crate::limits::SMALL_BODY_BYTES, "a full report is a small message");
};
