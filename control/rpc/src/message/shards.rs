//! Messages about nodes' shards: nodes' reports, and operators' queries.
//!
//! A node reports each of its shards after a heartbeat, one per call, so that a report stays a small message however
//! many shards there are. Seeing a node's state needs no connection to the node. Counts are since the node's start.

/// Most kinds of request in one report.
pub const OPERATIONS_PER_REPORT: usize = 28;
/// Most slow operations in one report: the latest.
pub const SLOW_PER_REPORT: usize = 32;

/// Reports the state of a shard.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ReportShard {
    pub node: u64,
    pub incarnation: u64,
    pub shard: ShardFigures,
}

/// Requests the shards of all nodes, or of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ListShards {
    pub node: Option<u64>,
}

/// The reply to [`ListShards`].
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct ShardList {
    /// Nodes, by number.
    pub nodes: Vec<ShardNode>,
}

/// The last report of a node.
#[derive(Clone, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ShardNode {
    pub node: u64,
    pub incarnation: u64,
    /// Age of the report, in nanoseconds.
    pub age_ns: u64,
    /// Shards, by number.
    pub shards: Vec<ShardFigures>,
}

/// Requests the capacity of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct GetRoom;

/// Capacity of the cluster, were it empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct Room {
    /// Bytes of the pools and SSDs of all shards; none while a shard has not reported yet in its node's present
    /// incarnation.
    pub bytes: Option<u64>,
}

/// State of one shard. Its encoding is that of all fields in order, those of nested records included: fields are
/// append-only here, and the nested records do not change.
#[derive(Clone, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ShardFigures {
    pub shard: u16,
    /// Address that the shard listens on.
    pub address: String,
    /// Visible objects.
    pub objects: u64,
    /// Bytes of visible objects.
    pub object_bytes: u64,
    pub pool: PoolFigures,
    /// Open connections.
    pub connections: u64,
    pub gets: GetFigures,
    pub puts: PutFigures,
    /// Objects removed on request.
    pub removes: u64,
    pub evictions: EvictionFigures,
    pub trouble: TroubleFigures,
    pub thread: ThreadFigures,
    /// Histogram of the sizes of objects that became visible, by powers of two: up to 1 byte, 2, 4 and so on.
    pub sizes: Vec<u64>,
    /// SSD tier of the shard, if any.
    pub ssd: Option<SsdFigures>,
    /// Latencies, by kind of request.
    pub operations: Vec<OperationFigures>,
    pub slow: SlowLog,
    pub events: EventFigures,
    /// Replicated objects.
    pub copies: CopyFigures,
    /// Device pool of the shard, if any.
    pub device_pool: Option<DevicePoolFigures>,
    /// Damage of objects and replicas in memory.
    pub memory_damage: DamageFigures,
    /// Damage of records on the SSD.
    pub ssd_damage: DamageFigures,
    /// Far pool of the shard, if any.
    pub far_pool: Option<FarPoolFigures>,
}

/// Damage that a shard has found, and its repair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct DamageFigures {
    /// Objects, replicas or records that were damaged.
    pub found: u64,
    /// Those that are good again.
    pub repaired: u64,
    /// Those of which no other copy was found.
    pub lost: u64,
    /// Those whose repair is not over.
    pub outstanding: u64,
    /// Bytes that were compared with their checksums in search of damage.
    pub checked_bytes: u64,
    /// Completed passes of the scrub.
    pub passes: u64,
}

/// Memory pool of a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct PoolFigures {
    /// Bytes of the pool.
    pub bytes: u64,
    /// Bytes that are not free.
    pub used_bytes: u64,
    /// Largest free extent, in bytes.
    pub largest_free_bytes: u64,
    /// Bytes of pinned objects.
    pub pinned_bytes: u64,
    /// Bytes of reservations, expired ones included.
    pub reserved_bytes: u64,
    /// Pins held.
    pub pins: u64,
    /// Reservations held.
    pub reservations: u64,
}

/// Device pool of a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct DevicePoolFigures {
    /// Bytes of the device pool; 0 once its device is lost.
    pub bytes: u64,
    /// Bytes that are not free.
    pub used_bytes: u64,
    /// Visible objects in it.
    pub objects: u64,
    /// Gets answered from it.
    pub gets: u64,
    /// Objects that moved into it.
    pub promotions: u64,
    /// Objects that moved from it to memory.
    pub demotions: u64,
    /// Demotions on request.
    pub recalls: u64,
    /// Objects lost with the device.
    pub lost: u64,
}

/// Far pool of a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct FarPoolFigures {
    /// Bytes of the far pool.
    pub bytes: u64,
    /// Bytes that are not free.
    pub used_bytes: u64,
    /// Visible objects in it.
    pub objects: u64,
    /// Gets that found their object in it.
    pub hits: u64,
    /// Objects that moved from DRAM to it.
    pub demotions: u64,
    /// Objects that moved from it to DRAM.
    pub promotions: u64,
    /// Objects that were evicted from it.
    pub evictions: u64,
}

/// Gets of a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct GetFigures {
    /// Gets that found their object in memory.
    pub hits: u64,
    /// Gets that did not find their object in memory.
    pub misses: u64,
    /// Bytes that gets returned.
    pub bytes: u64,
}

/// Puts of a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct PutFigures {
    /// Bytes that puts wrote.
    pub bytes: u64,
    /// Objects that became visible.
    pub objects: u64,
    /// Puts of keys that existed already.
    pub conflicts: u64,
    /// Puts refused because the pool was full.
    pub refusals: u64,
    /// Puts whose deadline passed.
    pub expirations: u64,
    /// Puts that were aborted.
    pub aborts: u64,
}

/// Evictions from a shard's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct EvictionFigures {
    /// Objects evicted.
    pub objects: u64,
    /// Bytes of evicted objects.
    pub bytes: u64,
}

/// Requests and frames that a shard could not serve as they were.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct TroubleFigures {
    /// Requests for keys of other shards.
    pub wrong_owner: u64,
    /// Payloads that did not match their checksum.
    pub corrupt: u64,
    /// Frames that broke the protocol.
    pub broken: u64,
}

/// Thread of a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct ThreadFigures {
    /// Times that the thread parked.
    pub parks: u64,
    /// CPU time of the thread, in nanoseconds.
    pub cpu_ns: u64,
}

/// Slow requests of a shard.
#[derive(Clone, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct SlowLog {
    /// Slow requests.
    pub count: u64,
    /// Least duration of a slow request, in nanoseconds.
    pub after_ns: u64,
    /// The latest slow requests, oldest first.
    pub latest: Vec<SlowFigures>,
}

/// SSD tier of a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct SsdFigures {
    /// Objects on the SSD.
    pub objects: u64,
    /// Bytes of live records.
    pub live_bytes: u64,
    /// Size of the SSD.
    pub bytes: u64,
    /// Gets answered from the SSD.
    pub hits: u64,
    /// Bytes of those gets.
    pub hit_bytes: u64,
    /// Gets whose object the SSD held and could not return.
    pub misses: u64,
    /// Objects promoted to memory by a read.
    pub promotions: u64,
    /// Objects given to the SSD.
    pub writes: u64,
    /// Bytes of those objects.
    pub write_bytes: u64,
    /// Objects that were not written because of a fault or a full device.
    pub writes_lost: u64,
    /// Objects that wait to be written.
    pub backlog: u64,
    /// Objects dropped by reclaim to make room.
    pub reclaimed: u64,
}

/// Latency of one kind of request on one tier.
#[derive(Clone, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct OperationFigures {
    /// Kind of the request, in lower case.
    pub operation: String,
    /// True if the requests waited for the SSD.
    pub ssd: bool,
    /// Requests.
    pub count: u64,
    /// Requests with an answer other than `Ok`.
    pub failed: u64,
    /// Items named in these requests, of both tiers; counted with memory.
    pub items: u64,
    /// Sum of the latencies, in nanoseconds.
    pub sum_ns: u64,
    /// Histogram: upper bounds in nanoseconds, and the requests below each bound and not below the one before.
    pub buckets: Vec<(u64, u64)>,
}

impl OperationFigures {
    /// Returns an upper bound of the latency quantile `share` (0 to 1); 0 without requests.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a share of a count is at most the count, and a negative share or none saturates to 0"
    )]
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

/// A slow request.
#[derive(Clone, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct SlowFigures {
    /// Kind of the request, in lower case.
    pub operation: String,
    /// Status of the answer, in words.
    pub status: String,
    /// Digest of the object, if known.
    pub digest: Option<u128>,
    /// Bytes of the answer's payload.
    pub bytes: u64,
    /// Time between the request's arrival and the report, in nanoseconds.
    pub age_ns: u64,
    /// Total duration, in nanoseconds.
    pub total_ns: u64,
    /// Time to receive the request's payload.
    pub receive_ns: u64,
    /// Time on the SSD, its queue included.
    pub ssd_ns: u64,
    /// Time to send the answer's payload.
    pub send_ns: u64,
}

/// Replicated objects, as seen by one node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct CopyFigures {
    /// Own objects that the replica owner may hold a replica of.
    pub elsewhere: u64,
    /// Replicas that the shard holds as a replica owner.
    pub here: u64,
    /// Slots that the shard is the replica owner of.
    pub second_slots: u64,
    /// Replicas that replica owners stored.
    pub made: u64,
    /// Replicas that replica owners did not store.
    pub failed: u64,
    /// Replicas that replica owners have still to drop.
    pub outstanding: u64,
    /// Requests that were refused because a replica was not dropped in time.
    pub refused: u64,
    /// Gets answered from a replica.
    pub served: u64,
    /// Replicas that the shard took over as the owner left.
    pub inherited: u64,
}

/// Event log of a shard.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bincode::Encode, bincode::Decode)]
pub struct EventFigures {
    /// True if the shard buffers events for a subscriber.
    pub kept: bool,
    /// Number of the next event.
    pub next: u64,
    /// Events that were dropped before they were reported.
    pub lost: u64,
}
