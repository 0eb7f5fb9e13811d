//! Copies of what only the SSD has, where its put asked for one: after a start, when slots came back, or when the
//! second owner is another. Each object is read into memory, where it stays like any other, and is copied from there.
//!
//! Only as far as memory has room anyway: what would push others out has no copy until there is room.

use kvplane_proto::Digest;
use kvplane_tier::RecordView;

use super::super::Service;
use super::super::tiered::NotBegun;

/// Places of the SSD's index that one step looks at.
const STEP: usize = 256;
/// Objects that are read for their copies at the same time.
const READS_MOST: usize = 16;
/// The part of the pool that is left free.
const FREE_PART: u64 = 8;
/// How long a walk waits at least for reads that are under way.
const WAIT_NS: u64 = 1_000_000;
/// The next walk after one that found something, and after one that found no room for it.
const AGAIN_NS: u64 = 1_000_000_000;
const NO_ROOM_NS: u64 = 60_000_000_000;

/// The walk through what only the SSD has.
#[derive(Debug, Default)]
pub(super) struct SsdWalk {
    /// Where it is, and when it goes on.
    at: Option<usize>,
    due_ns: u64,
    /// An object lacked a copy; and one of these did not fit into memory.
    found: bool,
    no_room: bool,
}

impl Service {
    /// What the SSD has may lack copies.
    pub(in crate::service) fn walk_ssd_again(&mut self) {
        let can = self.tiered.is_some() && !self.copies.seconds.is_empty();
        self.copies.ssd = SsdWalk { at: can.then_some(0), due_ns: self.now_ns, ..SsdWalk::default() };
    }

    /// Has objects read that lack a copy, within the rate.
    pub(super) fn walk_ssd(&mut self) {
        let (rate, now_ns) = (self.moves.limits().bytes_per_s, self.now_ns);
        let (Some(tiered), Some(store)) = (&self.tiered, &self.store) else { return };
        let Some(at) = self.copies.ssd.at.filter(|_| rate > 0 && self.copies.ssd.due_ns <= now_ns) else { return };
        if !tiered.is_recovered() || tiered.copies_read() >= READS_MOST || !self.copies.queue.is_empty() {
            return;
        }
        let (views, next) = tiered.walk(at, STEP);
        let lacks = |view: &RecordView| {
            let digest = view.digest;
            let wanted = view.copied && self.ownership.owns(digest) && self.copies.seconds.contains_key(&digest.slot());
            wanted && !store.exists(digest)
        };
        let lacking: Vec<RecordView> = views.into_iter().filter(lacks).collect();
        let (mut bytes, mut free_bytes, mut waits) = (0, self.free_for_copies(), false);
        self.copies.ssd.found |= !lacking.is_empty();
        for view in lacking {
            let payload = u64::from(view.payload_bytes);
            if payload > free_bytes {
                self.copies.ssd.no_room = true;
                continue;
            }
            let full = self.tiered.as_ref().is_none_or(|tiered| tiered.copies_read() >= READS_MOST);
            match if full { Err(NotBegun::Full) } else { self.read_for_copy(&view) } {
                Ok(()) => {
                    bytes += payload;
                    free_bytes -= payload;
                }
                Err(NotBegun::Full) => {
                    // The walk stays here until the reads that are under way are over.
                    waits = true;
                    break;
                }
                // What is in its way goes; the next walk finds it.
                Err(NotBegun::Refused(_)) => {}
            }
        }
        let walk = &mut self.copies.ssd;
        let pause_ns = (u128::from(bytes) * 1_000_000_000 / u128::from(rate)) as u64;
        walk.due_ns = now_ns.saturating_add(pause_ns.max(if waits { WAIT_NS } else { 0 }));
        if waits {
            return;
        }
        walk.at = next;
        if next.is_none() && core::mem::take(&mut walk.found) {
            let pause_ns = if core::mem::take(&mut walk.no_room) { NO_ROOM_NS } else { AGAIN_NS };
            (walk.at, walk.due_ns) = (Some(0), now_ns.saturating_add(pause_ns));
        }
    }

    /// What may be read into the pool.
    fn free_for_copies(&self) -> u64 {
        let Some(store) = &self.store else { return 0 };
        store.stats().free_bytes.saturating_sub(store.config().pool_bytes / FREE_PART)
    }

    /// True for an object from the SSD that stays in memory, as its copy would leave together with it.
    pub(in crate::service) fn stays_for_copy(&self, digest: Digest) -> bool {
        let Some(store) = self.store.as_ref().filter(|store| store.exists(digest)) else { return false };
        let wanted = store.replica(digest).is_owed_a_copy();
        wanted
            && self.ownership.owns(digest)
            && self.copies.seconds.contains_key(&digest.slot())
            && self.free_for_copies() > 0
    }

    /// Whether an object in memory has its name on the SSD only, so far.
    pub(super) fn lacks_tail(&self, digest: Digest) -> bool {
        let object = self.store.as_ref().and_then(|store| store.peek(digest));
        let named = || self.on_ssd(digest).is_some_and(|view| view.key_bytes > 0);
        object.is_some_and(|object| !object.has_tail) && named()
    }

    /// When the walk goes on.
    pub(super) fn ssd_walk_timeout(&self) -> Option<u64> {
        let walk = &self.copies.ssd;
        (walk.at.is_some() && walk.due_ns > self.now_ns).then_some(walk.due_ns)
    }
}
