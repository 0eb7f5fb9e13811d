//! Messages about nodes' shards: what nodes report of them, what operators see.
//!
//! A node reports each of its shards after a heartbeat, one a call, so that a report stays a small message however many
//! shards there are. So nobody has to reach a node to see how it does. Counts are since the node's start.

/// Kinds of request in one report at most.
pub const OPERATIONS_PER_REPORT: usize = 28;
/// Slow operations in one report at most: the latest.
pub const SLOW_PER_REPORT: usize = 32;

/// Says how a shard of a node does.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct ReportShard {
    /// Which member.
    pub node: u64,
    /// In which incarnation.
    pub incarnation: u64,
    /// Its shard.
    pub shard: ShardFigures,
}

/// Asks for the shards of all nodes, or of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct ListShards {
    /// Which node.
    pub node: Option<u64>,
}

/// What nodes reported.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct ShardList {
    /// By node.
    pub nodes: Vec<ShardNode>,
}

/// What a node reported last.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct ShardNode {
    /// Which node.
    pub node: u64,
    /// In which incarnation.
    pub incarnation: u64,
    /// How long ago, in nanoseconds.
    pub age_ns: u64,
    /// By number.
    pub shards: Vec<ShardFigures>,
}

/// Asks how much the cluster could hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct GetRoom;

/// How much the cluster could hold if it held nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Room {
    /// Bytes of the pools and SSDs of all shards; nothing while a shard has not told of itself in its node's
    /// incarnation.
    pub bytes: Option<u64>,
}

/// One shard. Fields are append-only.
#[derive(Clone, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct ShardFigures {
    /// Which shard.
    pub shard: u16,
    /// Where it listens.
    pub address: String,
    /// Visible objects,
    pub objects: u64,
    /// and their bytes.
    pub object_bytes: u64,
    /// Bytes of the pool,
    pub pool_bytes: u64,
    /// of those that are not free,
    pub used_bytes: u64,
    /// the largest free piece,
    pub largest_free_bytes: u64,
    /// pinned bytes,
    pub pinned_bytes: u64,
    /// and bytes of puts under way, expired ones included.
    pub reserved_bytes: u64,
    /// Pins held,
    pub pins: u64,
    /// and puts under way.
    pub reservations: u64,
    /// Connections.
    pub connections: u64,
    /// Gets that found their object in memory,
    pub hits: u64,
    /// and those that did not.
    pub misses: u64,
    /// Bytes given,
    pub get_bytes: u64,
    /// and taken in.
    pub put_bytes: u64,
    /// Objects that became visible.
    pub puts: u64,
    /// Puts of what was there already.
    pub put_conflicts: u64,
    /// Puts refused for want of space.
    pub put_refusals: u64,
    /// Puts whose deadline passed.
    pub put_expirations: u64,
    /// Puts given up.
    pub put_aborts: u64,
    /// Objects removed on request,
    pub removes: u64,
    /// evicted,
    pub evictions: u64,
    /// and the bytes of those.
    pub evicted_bytes: u64,
    /// Requests for keys of other shards.
    pub wrong_owner: u64,
    /// Payloads that did not match their checksum.
    pub corrupt: u64,
    /// Frames that broke the protocol.
    pub broken: u64,
    /// Times that it slept.
    pub parks: u64,
    /// CPU time of its thread, in nanoseconds.
    pub cpu_ns: u64,
    /// How many objects became visible of up to each power of two of bytes: 1, 2, 4 and so on.
    pub sizes: Vec<u64>,
    /// The SSD under it, if any.
    pub ssd: Option<SsdFigures>,
    /// How long requests took.
    pub operations: Vec<OperationFigures>,
    /// Requests that were slow.
    pub slow_count: u64,
    /// From when on one is slow, in nanoseconds.
    pub slow_after_ns: u64,
    /// The latest slow ones, oldest first.
    pub slow: Vec<SlowFigures>,
    /// Its events.
    pub events: EventFigures,
    /// Objects that two nodes have.
    pub copies: CopyFigures,
}

/// The SSD under a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct SsdFigures {
    /// Objects on it,
    pub objects: u64,
    /// and the bytes of their records.
    pub live_bytes: u64,
    /// Its size.
    pub bytes: u64,
    /// Gets that it answered,
    pub hits: u64,
    /// the bytes of those,
    pub hit_bytes: u64,
    /// and gets that it should have and could not.
    pub misses: u64,
    /// Objects that stayed in memory after they were read.
    pub promotions: u64,
    /// Objects given to it,
    pub writes: u64,
    /// and their bytes.
    pub write_bytes: u64,
    /// Objects that could not be written, or were not for want of room.
    pub writes_lost: u64,
    /// Objects that wait to be written.
    pub backlog: u64,
    /// Objects that it dropped to make room.
    pub reclaimed: u64,
}

/// Requests of one kind to one tier.
#[derive(Clone, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct OperationFigures {
    /// The kind, in lower case.
    pub operation: String,
    /// Whether they waited for the SSD.
    pub ssd: bool,
    /// How many there were,
    pub count: u64,
    /// of those, answered with something else than `Ok`,
    pub failed: u64,
    /// and the items that all of them named; of both tiers, and told with memory.
    pub items: u64,
    /// All their times, in nanoseconds.
    pub sum_ns: u64,
    /// Upper bounds in nanoseconds, and how many were below them and not below the one before.
    pub buckets: Vec<(u64, u64)>,
}

impl OperationFigures {
    /// An upper bound of the time that this share of all (0 to 1) stayed within; 0 when there were none.
    #[must_use]
    pub fn quantile_ns(&self, share: f64) -> u64 {
        let wanted = (self.count as f64 * share).ceil() as u64;
        let mut seen = 0u64;
        for (bound_ns, count) in &self.buckets {
            seen = seen.saturating_add(*count);
            if seen >= wanted {
                return *bound_ns;
            }
        }
        0
    }
}

/// A request that took long.
#[derive(Clone, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct SlowFigures {
    /// The kind, in lower case.
    pub operation: String,
    /// How it ended, in words.
    pub status: String,
    /// Of which object, where that is known: its digest.
    pub digest: Option<u128>,
    /// Bytes of the answer's payload.
    pub bytes: u64,
    /// How long before the report it arrived, in nanoseconds.
    pub age_ns: u64,
    /// All of it, in nanoseconds:
    pub total_ns: u64,
    /// its payload's arrival,
    pub receive_ns: u64,
    /// the SSD with the wait for its turn,
    pub ssd_ns: u64,
    /// and its answer's payload leaving.
    pub send_ns: u64,
}

/// Objects that two nodes have, as one of them sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct CopyFigures {
    /// Objects of its own of which the second owner may have a copy,
    pub elsewhere: u64,
    /// and copies that it has as a second owner.
    pub here: u64,
    /// Slots whose second owner it is.
    pub second_slots: u64,
    /// Copies that second owners took,
    pub made: u64,
    /// and those that they did not.
    pub failed: u64,
    /// Copies that second owners are to drop.
    pub owed: u64,
    /// Answers that were refused, as a copy was not gone in time.
    pub refused: u64,
    /// Gets answered with a copy.
    pub served: u64,
    /// Copies that became its own, as the first owner left.
    pub inherited: u64,
}

/// What a shard told of what it stores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct EventFigures {
    /// Whether it keeps events for anybody.
    pub kept: bool,
    /// The number of the next.
    pub next: u64,
    /// Those that were dropped before they were told.
    pub lost: u64,
}
