//! Messages about the SSD tiers of nodes: nodes' reports, and operators' orders.
//!
//! A node with SSDs reports after each heartbeat, and the reply carries its outstanding orders, so operating its SSDs
//! needs no connection to the node. Orders are numbered per node; a report names the last order that was carried out,
//! and later ones are repeated until then.

/// Most shards in one report, so that it stays a small message: further ones come in further reports.
pub const SHARDS_PER_REPORT: usize = 32;

/// Reports the SSD tiers of a node's shards. Reports of a node add up by shard.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ReportTiers {
    pub node: u64,
    pub incarnation: u64,
    /// Number of the last order that was carried out; 0 for none.
    pub carried_out: u64,
    /// The node's shards, or some of them: at most [`SHARDS_PER_REPORT`].
    pub shards: Vec<TierShard>,
}

/// The reply to [`ReportTiers`].
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct TierOrders {
    /// Outstanding orders, by number.
    pub orders: Vec<TierOrder>,
}

/// An order to every shard of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct TierOrder {
    /// Number of the order, above those of all earlier orders of the node.
    pub number: u64,
    pub action: TierAction,
}

/// Action of an order. Tags are append-only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub enum TierAction {
    /// Verify every record once; a paused pass continues.
    Verify {
        /// Rate in bytes a second over the whole node; 0 pauses.
        bytes_per_s: u64,
    },
    /// Reclaim until this share of each device is free.
    Reclaim {
        /// Percentage, at most 50; 0 ends the action.
        free_percent: u8,
    },
}

/// Requests the tiers of all nodes, or of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ListTiers {
    pub node: Option<u64>,
}

/// The reply to [`ListTiers`].
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct TierList {
    /// Nodes with SSDs, by number.
    pub nodes: Vec<TierNode>,
}

/// The last report of a node.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct TierNode {
    pub node: u64,
    pub incarnation: u64,
    /// Age of the report, in nanoseconds.
    pub age_ns: u64,
    /// Number of the last order that was carried out; 0 for none.
    pub carried_out: u64,
    /// Shards, by number.
    pub shards: Vec<TierShard>,
}

/// Sends an order to all nodes with SSDs, or to one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct OrderTiers {
    pub node: Option<u64>,
    pub action: TierAction,
}

/// The reply to [`OrderTiers`].
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct TiersOrdered {
    /// Nodes that got the order, each with the order's number.
    pub orders: Vec<(u64, u64)>,
}

/// State of one shard's tier. Counts are since the node's start. Its encoding is that of all fields in order, those of
/// nested records included: fields are append-only here, and the nested records do not change.
#[derive(Clone, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct TierShard {
    pub shard: u16,
    /// Path of the device or file.
    pub device: String,
    /// Version of the on-device format.
    pub format: u16,
    /// `serving`, `recovering`, or the reason for which the tier is degraded.
    pub state: String,
    /// Objects on the device.
    pub objects: u64,
    /// Log segments of the device.
    pub segments: LogSegments,
    /// Bytes of live records.
    pub live_bytes: u64,
    /// Bytes of segments with records that no live record takes.
    pub dead_bytes: u64,
    /// Bytes of objects that were written through or back.
    pub put_bytes: u64,
    /// Bytes written for them, for removals and by reclaim: over `put_bytes`, the write amplification.
    pub written_bytes: u64,
    pub gets: TierGets,
    pub prefetches: Prefetches,
    pub errors: TierErrors,
    pub budget: WriteBudget,
    pub scrub: ScrubFigures,
    /// Segments that an order to reclaim has still to free; 0 when it is done.
    pub wanted_free_segments: u32,
}

/// Log segments of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct LogSegments {
    /// All segments of the device.
    pub all: u32,
    /// Segments without records.
    pub free: u32,
    /// Full segments.
    pub sealed: u32,
    /// Segments being filled.
    pub open: u32,
    /// Segments with write errors.
    pub bad: u32,
    /// Bytes per segment.
    pub bytes_each: u64,
}

/// Gets of a shard, by the tier that answered them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct TierGets {
    /// Gets answered from memory.
    pub memory_hits: u64,
    /// Gets answered from the SSD.
    pub ssd_hits: u64,
    /// Gets that neither tier could answer.
    pub misses: u64,
}

/// Prefetches from the SSD into memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Prefetches {
    /// Objects that were prefetched.
    pub objects: u64,
    /// Prefetched objects that a get used.
    pub used: u64,
}

/// Errors of a device, and records found wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct TierErrors {
    /// Reads that the device failed.
    pub reads: u64,
    /// Writes that the device failed.
    pub writes: u64,
    /// Records found damaged.
    pub damaged: u64,
    /// Records found stale.
    pub stale: u64,
    /// Records found at the address of another.
    pub misdirected: u64,
    /// Records that the scrubber found damaged.
    pub quarantined: u64,
    /// Quarantined records that were rewritten from memory.
    pub rewritten: u64,
}

/// Use of a device's write budget.
#[derive(Clone, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct WriteBudget {
    /// Admission of writes at present: `all`, `selective`, `promised`.
    pub admission: String,
    /// Bytes written in the last day.
    pub day_bytes: u64,
    /// Budget of bytes written a day; 0 without a limit.
    pub bytes_per_day: u64,
    /// Objects that were not written because the budget was used up.
    pub not_written: u64,
}

/// Scrubber of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct ScrubFigures {
    /// Activity: `idle`, `background`, `verify`, `paused`.
    pub state: String,
    /// Bytes a second that the scrubber may read.
    pub bytes_per_s: u64,
    /// Objects on the device when the present pass began.
    pub objects: u64,
    /// Records read in the present pass.
    pub records: u64,
    /// Bytes of these records.
    pub bytes: u64,
    /// Damaged records of the present pass.
    pub bad_records: u64,
    /// Completed passes.
    pub passes: u64,
}
