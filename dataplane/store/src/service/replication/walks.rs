//! Walks for objects that lack a replica, in memory and on the SSD.
//!
//! Objects that only the SSD has lack replicas after a start, when slots came back, or when the replica owner has
//! changed. Each is read into memory, where it stays like any object, and is replicated from there, as far as memory
//! has free room. Where there is none, a few at a time pass through memory: they leave it once they are replicated.

use kvplane_proto::Digest;
use kvplane_proto::ids::Version;
use kvplane_tier::RecordView;

use crate::Copies;
use crate::service::local::LocalStore;
use crate::service::shard::Shard;
use crate::service::tiering::NotBegun;

/// Entries that one step of the walk through memory looks at, and the pause after a failure.
const STEP: u32 = 256;
const REPEAT_NS: u64 = 500_000_000;
/// Entries of the SSD's index that one step looks at.
const SSD_STEP: usize = 256;
/// Most concurrent reads of objects to be replicated.
const READS_MOST: usize = 16;
/// Shortest pause of a walk while reads are in flight.
const WAIT_NS: u64 = 1_000_000;
/// Pause while objects pass through memory, and before the next walk after one that found objects.
const NO_ROOM_NS: u64 = 20_000_000;
const AGAIN_NS: u64 = 1_000_000_000;

/// Walk through memory: first for the objects without any replica, which the next loss of a node may take, then for
/// those that lack further ones.
#[derive(Debug, Default)]
pub(super) struct Walk {
    /// Position, and time of the next step.
    at: Option<u32>,
    due_ns: u64,
    /// True on the second way through memory, for objects that have a replica and lack further ones.
    is_second: bool,
    /// True if another walk is to follow.
    again: bool,
    /// True if no walk was completed since owners changed.
    unwalked: bool,
}

impl Walk {
    pub(super) const fn is_through(&self) -> bool {
        !self.unwalked
    }

    /// Begins the walk anew after owners have changed.
    pub(super) fn begin(&mut self, shard: &Shard) {
        self.unwalked = !shard.replicas.is_alone();
        (self.at, self.due_ns, self.again) = (self.unwalked.then_some(0), shard.now_ns, false);
        self.is_second = false;
    }

    /// Repeats the walk, to find an object that lacks a replica.
    pub(super) fn repeat(&mut self, shard: &Shard) {
        if shard.replicas.is_alone() {
            self.at = None;
        } else if self.at.is_none() {
            (self.at, self.is_second) = (Some(0), false);
            self.due_ns = shard.now_ns.saturating_add(REPEAT_NS);
        } else {
            self.again = true;
        }
    }

    /// Returns some objects that lack a replica, within a rate above 0.
    pub(super) fn step(&mut self, shard: &Shard, bytes_per_s: u64) -> Vec<(Digest, Version)> {
        let now_ns = shard.now_ns;
        let mut lack = Vec::new();
        let Some(at) = self.at.filter(|_| bytes_per_s > 0 && self.due_ns <= now_ns) else { return lack };
        let store = &shard.store;
        let (mut bytes, mut next) = (0u64, Some(at));
        let (replicas, is_second) = (&shard.replicas, self.is_second);
        let lacks = |digest: Digest, copies: Copies| {
            copies.at.is_empty() != is_second && replicas.lacks(digest, copies) && shard.ownership.owns(digest)
        };
        // A step looks at a part, so that a walk in which no object lacks a replica ends within a few steps.
        for _ in 0..16 {
            let Some(from) = next.filter(|_| lack.is_empty()) else { break };
            let found;
            (found, next) = store.objects().lacking(from, STEP, lacks);
            for digest in found {
                if let Some(object) = store.peek(digest) {
                    bytes += object.extent.bytes;
                    lack.push((digest, object.version));
                }
            }
        }
        self.due_ns = now_ns + (u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_s)) as u64;
        self.at = next;
        if next.is_some() {
            return lack;
        }
        if !self.is_second && shard.replicas.has_several() {
            (self.at, self.is_second) = (Some(0), true);
            return lack;
        }
        (self.unwalked, self.is_second) = (false, false);
        if core::mem::take(&mut self.again) {
            self.at = Some(0);
            self.due_ns = self.due_ns.max(now_ns.saturating_add(REPEAT_NS));
        }
        lack
    }

    /// Returns the time of the next step.
    pub(super) fn poll_timeout(&self, now_ns: u64) -> Option<u64> {
        (self.at.is_some() && self.due_ns > now_ns).then_some(self.due_ns)
    }
}

/// Walk through the objects that only the SSD has.
#[derive(Debug, Default)]
pub(super) struct SsdWalk {
    /// Position, and time of the next step.
    at: Option<usize>,
    due_ns: u64,
    /// True if an object lacked a replica.
    found: bool,
}

impl SsdWalk {
    /// Begins the walk anew, because objects on the SSD may lack replicas.
    pub(super) fn begin(&mut self, shard: &Shard) {
        let can = shard.tenants.has_ssd && !shard.replicas.is_alone();
        *self = Self { at: can.then_some(0), due_ns: shard.now_ns, ..Self::default() };
    }

    /// Repeats the walk: memory has evicted an object that lacks a replica.
    pub(super) fn repeat(&mut self, shard: &Shard) {
        if self.at.is_some() {
            self.found = true;
        } else {
            self.begin(shard);
            self.due_ns = self.due_ns.saturating_add(AGAIN_NS);
        }
    }

    /// Begins to read objects that lack a replica, within a rate.
    pub(super) fn step(&mut self, local: &mut LocalStore, bytes_per_s: u64) {
        let now_ns = local.shard.now_ns;
        let LocalStore { shard, tiering: Some(tiering), .. } = local else { return };
        let store = &shard.store;
        let Some(at) = self.at.filter(|_| bytes_per_s > 0 && self.due_ns <= now_ns) else { return };
        if !tiering.ssd.is_recovered() || tiering.promotion.replica_reads() >= READS_MOST {
            return;
        }
        let (views, next) = tiering.ssd.walk(at, SSD_STEP);
        let lacks = |view: &RecordView| {
            let digest = view.digest;
            let wanted = view.copied && shard.ownership.owns(digest) && shard.replicas.has_owner(digest);
            wanted && !store.exists(digest) && shard.replicas.lacks(digest, store.objects().copies(digest))
        };
        let lacking: Vec<RecordView> = views.into_iter().filter(lacks).collect();
        let (mut bytes, mut free_bytes) = (0, shard.free_for_replicas());
        let (mut waits, mut no_room) = (false, false);
        self.found |= !lacking.is_empty();
        for view in lacking {
            let payload = u64::from(view.payload_bytes);
            let passes = payload > free_bytes;
            if passes && !tiering.promotion.may_pass(shard) {
                // The walk pauses until some of them are replicated.
                no_room = true;
                break;
            }
            let full = tiering.promotion.replica_reads() >= READS_MOST;
            let begun = match full {
                true => Err(NotBegun::Full),
                false => tiering.promotion.read_for_replica(&mut tiering.ssd, shard, &view, passes),
            };
            match begun {
                Ok(()) => {
                    bytes += payload;
                    free_bytes = free_bytes.saturating_sub(payload);
                }
                Err(NotBegun::Full) => {
                    // The walk pauses until the reads in flight have ended.
                    waits = true;
                    break;
                }
                // The obstacle is temporary; the next walk finds the object.
                Err(NotBegun::Refused(_)) => {}
            }
        }
        let pause_ns = (u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_s)) as u64;
        let wait_ns = if waits { WAIT_NS } else { u64::from(no_room) * NO_ROOM_NS };
        self.due_ns = now_ns.saturating_add(pause_ns.max(wait_ns));
        if waits || no_room {
            return;
        }
        self.at = next;
        if next.is_none() && core::mem::take(&mut self.found) {
            (self.at, self.due_ns) = (Some(0), now_ns.saturating_add(AGAIN_NS));
        }
    }

    /// Returns the time of the next step.
    pub(super) fn poll_timeout(&self, now_ns: u64) -> Option<u64> {
        (self.at.is_some() && self.due_ns > now_ns).then_some(self.due_ns)
    }
}
