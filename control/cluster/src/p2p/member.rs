//! Member of a swarm: its shards, its fetches and uploads, and its speed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bincode::{Decode, Encode};

use super::ranks::RankJoin;
use super::shards::{Interval, ShardSet};

/// Location of a member, as labels; an empty label is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct PeerLocation {
    pub host: String,
    pub rack: String,
}

/// Announcement that a process holds an object, or wants to fetch it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Hold {
    /// Id of the process: a random number that it drew.
    pub client: u64,
    /// Segment name by which peers open its memory.
    pub segment: String,
    /// By buffer: its address in the segment.
    pub addresses: Vec<u64>,
    /// True if the process published the object: the schedule spares it.
    pub origin: bool,
    /// Shards that it has.
    pub have: Vec<Interval>,
    /// Shards that it wants.
    pub want: Vec<Interval>,
    pub place: PeerLocation,
    /// Maximum upload rate in bytes per second; 0 for no limit.
    pub upload_bytes_per_second: u64,
    /// Maximum download rate in bytes per second; 0 for no limit.
    pub download_bytes_per_second: u64,
}

/// Failed fetch of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct FetchFailure {
    pub shard: u32,
    /// Number of the member that was the source.
    pub source: u64,
    /// True if the bytes do not match the shard's hash; otherwise the source could not be reached, or did not serve
    /// the shard.
    pub corrupt: bool,
}

/// State of a member, for operators.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
pub struct ObjectMember {
    /// Number of the member.
    pub member: u64,
    /// Segment in which it serves.
    pub segment: String,
    /// True if it published the object.
    pub origin: bool,
    /// Number of shards that it has.
    pub have: u32,
    /// Number of shards that it lacks and wants.
    pub need: u32,
    /// Reason that no member fetches from it any more; empty if it is healthy.
    pub excluded: String,
}

/// Fetch of a shard in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShardFetch {
    pub(super) from: u64,
    pub(super) since_ns: u64,
    /// Number of fetches of the member at that time, including this one.
    pub(super) along: u32,
    /// True if the fetch takes longer than usual: it no longer occupies a place of its source, and does not count as a
    /// copy.
    pub(super) late: bool,
    /// True if the shard may be fetched from another source.
    pub(super) stuck: bool,
}

/// Time by which a member with a rate limit may run ahead of it.
const AHEAD_NS: u64 = 50_000_000;

/// Rate limit in bytes per second: each grant delays the next by the time that its bytes take.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rate {
    bytes_per_second: u64,
    free_ns: u64,
}

impl Rate {
    pub(super) const fn of(bytes_per_second: u64) -> Self {
        Self { bytes_per_second, free_ns: 0 }
    }

    /// Returns true if the member must wait. Running a little ahead keeps the link busy until the next look.
    pub(super) fn is_blocked(&self, now_ns: u64) -> bool {
        self.free_ns > now_ns.saturating_add(AHEAD_NS)
    }

    pub(super) const fn is_set(&self) -> bool {
        self.bytes_per_second > 0
    }

    pub(super) fn spend(&mut self, now_ns: u64, bytes: u64) {
        if self.bytes_per_second > 0 {
            let takes = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second);
            let takes = u64::try_from(takes).unwrap_or(u64::MAX);
            self.free_ns = self.free_ns.max(now_ns).saturating_add(takes);
        }
    }
}

/// Moving average: each new value has a weight of one quarter.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MovingAverage(u64);

impl MovingAverage {
    pub(super) const fn ns(self) -> Option<u64> {
        if self.0 == 0 { None } else { Some(self.0) }
    }

    pub(super) fn learn(&mut self, took_ns: u64) {
        let took_ns = took_ns.max(1);
        self.0 = if self.0 == 0 { took_ns } else { (self.0 / 4 * 3 + took_ns / 4).max(1) };
    }
}

/// State of a member.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) client: u64,
    pub(super) segment: Arc<str>,
    pub(super) addresses: Vec<u64>,
    pub(super) origin: bool,
    pub(super) place: PeerLocation,
    pub(super) have: ShardSet,
    /// Shards that it lacks and wants, and that may be granted.
    pub(super) need: ShardSet,
    pub(super) coming: BTreeMap<u32, ShardFetch>,
    /// Number of times that each shard was taken from a source that took too long.
    pub(super) retried: BTreeMap<u32, u32>,
    /// Fetches from this member: receiver and shard.
    pub(super) serving: BTreeSet<(u64, u32)>,
    /// Number of fetches from this member that take longer than usual.
    pub(super) serving_late: u32,
    pub(super) up: Rate,
    pub(super) down: Rate,
    /// Typical durations of its fetches, and of fetches from it.
    pub(super) fetched: MovingAverage,
    pub(super) served: MovingAverage,
    /// Sources that it could not reach: the end of each ban, and the number of failures.
    pub(super) bans: BTreeMap<u64, (u64, u32)>,
    /// True while it leaves: no further fetch from it begins.
    pub(super) leaving: bool,
    /// True if a fetch from it failed, and it has not reported since.
    pub(super) suspect: bool,
    /// Description of the corrupt bytes that it served.
    pub(super) corrupt: Option<String>,
    /// Rank of the member, if it fetches by a schedule.
    pub(super) rank: Option<RankJoin>,
    pub(super) lease_ns: u64,
}

impl Member {
    /// Returns the number of its fetches in flight that are not late.
    pub(super) fn fetching(&self) -> u32 {
        self.coming.values().filter(|coming| !coming.late).count() as u32
    }

    /// Returns the number of fetches from it that are not late.
    pub(super) fn serves(&self) -> u32 {
        self.serving.len() as u32 - self.serving_late
    }

    /// Returns true if other members may fetch from it.
    pub(super) fn is_source(&self) -> bool {
        !self.leaving && !self.suspect && self.corrupt.is_none()
    }

    /// Returns true if its shards count as copies.
    pub(super) fn counts(&self) -> bool {
        !self.origin && self.is_source()
    }
}
