//! Walks for objects that lack a replica: in memory, and on the SSD.
//!
//! What only the SSD has lacks replicas after a start, when slots came back, or when the replica owner is another. Each
//! such object is read into memory, where it stays like any other, and is replicated from there; only as far as memory
//! has room anyway: what would push others out has no replica until there is room.

use kvplane_proto::Digest;
use kvplane_proto::ids::Version;
use kvplane_tier::RecordView;

use crate::service::local::LocalStore;
use crate::service::shard::Shard;
use crate::service::tiering::NotBegun;

/// Entries that one step of the walk through memory looks at, and its pause when something did not go.
const STEP: u32 = 256;
const REPEAT_NS: u64 = 500_000_000;
/// Places of the SSD's index that one step looks at.
const SSD_STEP: usize = 256;
/// Objects that are read for their replicas at the same time.
const READS_MOST: usize = 16;
/// How long a walk waits at least for reads that are in flight.
const WAIT_NS: u64 = 1_000_000;
/// The next walk after one that found something, and after one that found no room for it.
const AGAIN_NS: u64 = 1_000_000_000;
const NO_ROOM_NS: u64 = 60_000_000_000;

/// The walk through memory.
#[derive(Debug, Default)]
pub(super) struct Walk {
    /// Where it is, and when it goes on.
    at: Option<u32>,
    due_ns: u64,
    /// Once more, when it is through.
    again: bool,
    /// It has not been through since owners changed.
    unwalked: bool,
}

impl Walk {
    pub(super) const fn is_through(&self) -> bool {
        !self.unwalked
    }

    /// Owners have changed: it begins anew.
    pub(super) fn begin(&mut self, shard: &Shard) {
        self.unwalked = !shard.replicas.is_alone();
        (self.at, self.due_ns, self.again) = (self.unwalked.then_some(0), shard.now_ns, false);
    }

    /// An object lacks a replica: it is to be found.
    pub(super) fn repeat(&mut self, shard: &Shard) {
        if shard.replicas.is_alone() {
            self.at = None;
        } else if self.at.is_none() {
            self.at = Some(0);
            self.due_ns = shard.now_ns.saturating_add(REPEAT_NS);
        } else {
            self.again = true;
        }
    }

    /// Some objects that lack a replica, within a rate above 0 that is counted from now on.
    pub(super) fn step(&mut self, shard: &Shard, bytes_per_s: u64) -> Vec<(Digest, Version)> {
        let now_ns = shard.now_ns;
        let mut lack = Vec::new();
        let Some(at) = self.at.filter(|_| bytes_per_s > 0 && self.due_ns <= now_ns) else { return lack };
        let Some(store) = &shard.store else { return lack };
        let (mut bytes, mut next) = (0u64, Some(at));
        // A round looks at a part; where nothing lacks a replica it comes around within a few.
        for _ in 0..16 {
            let Some(from) = next.filter(|_| lack.is_empty()) else { break };
            let found;
            (found, next) = store.uncopied(from, STEP);
            for digest in found.into_iter().filter(|digest| shard.ownership.owns(*digest)) {
                if let Some(object) = store.peek(digest) {
                    bytes += object.extent.bytes;
                    lack.push((digest, object.version));
                }
            }
        }
        self.due_ns = now_ns + (u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_s)) as u64;
        self.at = next;
        self.unwalked &= next.is_some();
        if next.is_none() && core::mem::take(&mut self.again) {
            self.at = Some(0);
            self.due_ns = self.due_ns.max(now_ns.saturating_add(REPEAT_NS));
        }
        lack
    }

    /// When it goes on.
    pub(super) fn poll_timeout(&self, now_ns: u64) -> Option<u64> {
        (self.at.is_some() && self.due_ns > now_ns).then_some(self.due_ns)
    }
}

/// The walk through what only the SSD has.
#[derive(Debug, Default)]
pub(super) struct SsdWalk {
    /// Where it is, and when it goes on.
    at: Option<usize>,
    due_ns: u64,
    /// An object lacked a replica; and one of these did not fit into memory.
    found: bool,
    no_room: bool,
}

impl SsdWalk {
    /// What the SSD has may lack replicas: it begins anew.
    pub(super) fn begin(&mut self, shard: &Shard) {
        let can = shard.tenants.has_ssd && !shard.replicas.is_alone();
        *self = Self { at: can.then_some(0), due_ns: shard.now_ns, ..Self::default() };
    }

    /// Has objects read that lack a replica, within a rate.
    pub(super) fn step(&mut self, local: &mut LocalStore, bytes_per_s: u64) {
        let now_ns = local.shard.now_ns;
        let LocalStore { shard, tiering: Some(tiering) } = local else { return };
        let Some(store) = &shard.store else { return };
        let Some(at) = self.at.filter(|_| bytes_per_s > 0 && self.due_ns <= now_ns) else { return };
        if !tiering.ssd.is_recovered() || tiering.promotion.replica_reads() >= READS_MOST {
            return;
        }
        let (views, next) = tiering.ssd.walk(at, SSD_STEP);
        let lacks = |view: &RecordView| {
            let digest = view.digest;
            let wanted = view.copied && shard.ownership.owns(digest) && shard.replicas.has_owner(digest);
            wanted && !store.exists(digest)
        };
        let lacking: Vec<RecordView> = views.into_iter().filter(lacks).collect();
        let (mut bytes, mut free_bytes, mut waits) = (0, shard.free_for_replicas(), false);
        self.found |= !lacking.is_empty();
        for view in lacking {
            let payload = u64::from(view.payload_bytes);
            if payload > free_bytes {
                self.no_room = true;
                continue;
            }
            let full = tiering.promotion.replica_reads() >= READS_MOST;
            let begun = match full {
                true => Err(NotBegun::Full),
                false => tiering.promotion.read_for_replica(&mut tiering.ssd, shard, &view),
            };
            match begun {
                Ok(()) => {
                    bytes += payload;
                    free_bytes -= payload;
                }
                Err(NotBegun::Full) => {
                    // The walk stays here until the reads that are in flight are over.
                    waits = true;
                    break;
                }
                // What is in its way goes; the next walk finds it.
                Err(NotBegun::Refused(_)) => {}
            }
        }
        let pause_ns = (u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_s)) as u64;
        self.due_ns = now_ns.saturating_add(pause_ns.max(if waits { WAIT_NS } else { 0 }));
        if waits {
            return;
        }
        self.at = next;
        if next.is_none() && core::mem::take(&mut self.found) {
            let pause_ns = if core::mem::take(&mut self.no_room) { NO_ROOM_NS } else { AGAIN_NS };
            (self.at, self.due_ns) = (Some(0), now_ns.saturating_add(pause_ns));
        }
    }

    /// When it goes on.
    pub(super) fn poll_timeout(&self, now_ns: u64) -> Option<u64> {
        (self.at.is_some() && self.due_ns > now_ns).then_some(self.due_ns)
    }
}
