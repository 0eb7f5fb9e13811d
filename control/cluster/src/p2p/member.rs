//! One member of a swarm: what it has, what it fetches, whom it serves, and how fast.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::ranks::RankJoin;
use super::shards::{Interval, ShardSet};

/// Where a member is, by labels; empty ones say nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Its host.
    pub host: String,
    /// Its rack.
    pub rack: String,
}

/// A process announces that it holds an object, or is about to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hold {
    /// The number that the process drew.
    pub client: u64,
    /// The name by which peers open its memory.
    pub segment: String,
    /// By buffer: its address there.
    pub addresses: Vec<u64>,
    /// Whether it brought the object, and did not fetch it: it is then spared.
    pub origin: bool,
    /// What it has.
    pub have: Vec<Interval>,
    /// What it wants to have.
    pub want: Vec<Interval>,
    /// Where it is.
    pub place: Place,
    /// Most bytes per second that others fetch from it; 0 for no limit.
    pub upload_bytes_per_second: u64,
    /// Most bytes per second that it fetches; 0 for no limit.
    pub download_bytes_per_second: u64,
}

/// Why a shard was not fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// What arrived is not what it should be.
    Corrupt,
    /// The source could not be reached, or did not serve.
    Unreachable,
}

/// A shard that was not fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Which.
    pub shard: u32,
    /// From which member.
    pub source: u64,
    /// Why.
    pub kind: FailureKind,
}

/// A member as operators see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberReport {
    /// Its number.
    pub member: u64,
    /// Where it serves.
    pub segment: String,
    /// Whether it brought the object.
    pub origin: bool,
    /// Shards that it has.
    pub have: u32,
    /// Shards that it lacks and wants.
    pub need: u32,
    /// Why nothing is fetched from it any more; empty where it is in order.
    pub excluded: String,
}

/// What a member is fetching.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShardFetch {
    pub(super) from: u64,
    pub(super) since_ns: u64,
    /// What the member was fetching then, with this.
    pub(super) along: u32,
    /// It takes longer than others do: whoever serves it may serve others besides, and it counts as nobody's.
    pub(super) late: bool,
    /// It may be fetched from elsewhere.
    pub(super) stuck: bool,
}

/// How far ahead of its time a member with a limit may go.
const AHEAD_NS: u64 = 50_000_000;

/// A limit of bytes per second: after each grant nothing more for as long as that takes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rate {
    bytes_per_second: u64,
    free_ns: u64,
}

impl Rate {
    pub(super) const fn of(bytes_per_second: u64) -> Self {
        Self { bytes_per_second, free_ns: 0 }
    }

    /// Whether it must wait. What is granted a little ahead keeps the link busy until it is looked at again.
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

/// An average that forgets: a quarter of what is new.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Typical(u64);

impl Typical {
    pub(super) const fn ns(self) -> Option<u64> {
        if self.0 == 0 { None } else { Some(self.0) }
    }

    pub(super) fn learn(&mut self, took_ns: u64) {
        let took_ns = took_ns.max(1);
        self.0 = if self.0 == 0 { took_ns } else { (self.0 / 4 * 3 + took_ns / 4).max(1) };
    }
}

/// A member.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) client: u64,
    pub(super) segment: Arc<str>,
    pub(super) addresses: Vec<u64>,
    pub(super) origin: bool,
    pub(super) place: Place,
    pub(super) have: ShardSet,
    /// What it lacks, wants, and may be told to fetch.
    pub(super) need: ShardSet,
    pub(super) coming: BTreeMap<u32, ShardFetch>,
    /// How often each shard was taken from a source that took too long.
    pub(super) retried: BTreeMap<u32, u32>,
    /// Who fetches what from it.
    pub(super) serving: BTreeSet<(u64, u32)>,
    /// How many of those are late.
    pub(super) serving_late: u32,
    pub(super) up: Rate,
    pub(super) down: Rate,
    /// How long what it fetched took, and what was fetched from it.
    pub(super) fetched: Typical,
    pub(super) served: Typical,
    /// Sources that it could not reach, and until when they are left alone.
    pub(super) bans: BTreeMap<u64, (u64, u32)>,
    /// It goes: nothing more is fetched from it.
    pub(super) leaving: bool,
    /// Somebody could not reach it, and it has not been heard since.
    pub(super) doubted: bool,
    /// What is wrong with its bytes.
    pub(super) corrupt: Option<String>,
    /// Which rank it is, if it fetches by a schedule.
    pub(super) rank: Option<RankJoin>,
    pub(super) lease_ns: u64,
}

impl Member {
    /// Fetches that count.
    pub(super) fn fetching(&self) -> u32 {
        self.coming.values().filter(|coming| !coming.late).count() as u32
    }

    /// Fetches from it that count.
    pub(super) fn serves(&self) -> u32 {
        self.serving.len() as u32 - self.serving_late
    }

    /// Whether others may fetch from it.
    pub(super) fn is_source(&self) -> bool {
        !self.leaving && !self.doubted && self.corrupt.is_none()
    }

    /// Whether what it has counts as copies that others can have.
    pub(super) fn counts(&self) -> bool {
        !self.origin && self.is_source()
    }
}
