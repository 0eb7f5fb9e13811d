//! Messages about the SSD tiers of nodes: what nodes report, what operators see and order.
//!
//! A node with SSDs reports after each heartbeat, and is told in the answer what it has been ordered to do. So nobody
//! has to reach a node to operate its SSDs. Orders are numbered for each node; a report says the last one that was
//! carried out, and those after it are said again until then.

/// Shards in one report at most, so that it stays a small message: further ones come in further reports.
pub const SHARDS_PER_REPORT: usize = 32;

/// Says how the SSD tiers of a node's shards are. Reports of a node add up by shard.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct ReportTiers {
    /// Which member.
    pub node: u64,
    /// In which incarnation.
    pub incarnation: u64,
    /// The last order that was carried out; 0 for none.
    pub carried_out: u64,
    /// Its shards, or some of them: at most [`SHARDS_PER_REPORT`].
    pub shards: Vec<TierShard>,
}

/// The answer to [`ReportTiers`].
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct TierOrders {
    /// What is to be done, by number.
    pub orders: Vec<TierOrder>,
}

/// Something to be done by every shard of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct TierOrder {
    /// Above all earlier ones of that node.
    pub number: u64,
    /// What.
    pub action: TierAction,
}

/// What may be ordered. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub enum TierAction {
    /// Check every record once; what was paused goes on.
    Verify {
        /// How fast, in bytes a second over the whole node; 0 pauses.
        bytes_per_s: u64,
    },
    /// Reclaim until this part of each device is free.
    Reclaim {
        /// In percent, at most 50; 0 ends it.
        free_percent: u8,
    },
}

/// Asks for the tiers of all nodes, or of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct ListTiers {
    /// Which node.
    pub node: Option<u64>,
}

/// What nodes reported.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct TierList {
    /// By node; only those with SSDs.
    pub nodes: Vec<TierNode>,
}

/// What a node reported last.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct TierNode {
    /// Which node.
    pub node: u64,
    /// In which incarnation.
    pub incarnation: u64,
    /// How long ago, in nanoseconds.
    pub age_ns: u64,
    /// The last order that was carried out; 0 for none.
    pub carried_out: u64,
    /// By number.
    pub shards: Vec<TierShard>,
}

/// Orders something of all nodes with SSDs, or of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct OrderTiers {
    /// Which node.
    pub node: Option<u64>,
    /// What.
    pub action: TierAction,
}

/// The answer to [`OrderTiers`]: who was ordered, and the orders' numbers.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct TiersOrdered {
    /// Node and number of its order.
    pub orders: Vec<(u64, u64)>,
}

/// The tier of one shard. Counts are since the node's start. Fields are append-only.
#[derive(Clone, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct TierShard {
    /// Which shard.
    pub shard: u16,
    /// Its device or file.
    pub device: String,
    /// Version of what stands on it.
    pub format: u16,
    /// `serving`, `recovering`, or why nothing is written any more.
    pub state: String,
    /// Objects on it.
    pub objects: u64,
    /// Segments that it is cut into,
    pub segments: u32,
    /// without records,
    pub free_segments: u32,
    /// full,
    pub sealed_segments: u32,
    /// being filled,
    pub open_segments: u32,
    /// with write errors.
    pub bad_segments: u32,
    /// Bytes of a segment.
    pub segment_bytes: u64,
    /// Bytes of live records.
    pub live_bytes: u64,
    /// Bytes of segments with records that no live record takes.
    pub dead_bytes: u64,
    /// Objects' bytes given to it.
    pub put_bytes: u64,
    /// Bytes written for them, for removals and by reclaim: over `put_bytes`, the write amplification.
    pub written_bytes: u64,
    /// Gets that memory answered,
    pub memory_hits: u64,
    /// that the SSD answered,
    pub ssd_hits: u64,
    /// that nobody could answer.
    pub misses: u64,
    /// Objects read ahead,
    pub read_ahead: u64,
    /// and asked for then.
    pub read_ahead_used: u64,
    /// Reads that the device could not do.
    pub read_faults: u64,
    /// Writes that it could not do.
    pub write_faults: u64,
    /// Records found damaged,
    pub damaged: u64,
    /// to be old,
    pub stale: u64,
    /// to belong elsewhere.
    pub misdirected: u64,
    /// Records that the scrubber found not to be whole,
    pub quarantined: u64,
    /// and of those, written again from memory.
    pub rewritten: u64,
    /// What is written at the moment: `all`, `selective`, `promised`.
    pub admission: String,
    /// Bytes written in the last day.
    pub day_bytes: u64,
    /// Bytes that may be written a day; 0 without a limit.
    pub bytes_per_day: u64,
    /// Objects not written because of that.
    pub over_budget: u64,
    /// What the scrubber does: `idle`, `background`, `verify`, `paused`.
    pub scrub: String,
    /// Bytes a second that it may read.
    pub scrub_bytes_per_s: u64,
    /// Objects there were when its pass began,
    pub scrub_objects: u64,
    /// records read since then,
    pub scrub_records: u64,
    /// their bytes,
    pub scrub_bytes: u64,
    /// those that were not whole.
    pub scrub_bad: u64,
    /// Passes that came to their end.
    pub scrub_passes: u64,
    /// Segments that reclaim was ordered to free and has not yet; 0 when it is done.
    pub wanted_free_segments: u32,
}
