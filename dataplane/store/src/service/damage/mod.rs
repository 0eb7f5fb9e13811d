//! Damage: objects in memory whose bytes do not match their checksums any more, and records on the SSD that cannot be
//! read whole.
//!
//! * [`Scrub`] compares objects in memory with their checksums: those that a reader, a replica owner or the SSD found
//!   damaged, and in the background all others. The SSD has a scrub of its own.
//! * [`Repairs`] gets the bytes of damaged objects from another node that has them, [`RecordRepairs`] those of damaged
//!   records.
//!
//! A damaged object stays what it is: it exists, it can be removed and replaced, and only its bytes are not lent. A get
//! of it waits for the good bytes. Where they come from does not matter: they are good if their length and checksum are
//! those that the object was put with. An object that the SSD has as well leaves memory and is read from there. One of
//! which no node has good bytes is removed: it is a miss.

mod inquiry;
mod readers;
mod records;
mod repairs;
mod scrub;

use kvplane_proto::ids::Version;
use kvplane_proto::{Digest, Status};

use self::readers::{Readers, serve, turn_away};
use self::records::{RecordRepairs, damaged_records, lost_records};
use self::repairs::Repairs;
pub use self::scrub::ScrubPace;
use self::scrub::{Check, Finding, Scrub};
use super::fetches::{Fetch, FetchDone};
use super::local::LocalStore;
use super::shard::Shard;
use super::shard::context::RequestContext;
use super::shard::stream_read::Reader;
use super::types::PoolBytes;
use kvplane_proto::FrameFlags;

/// Counters of damaged records on the SSD and of their repair.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RecordRepairCounters {
    /// Records that could not be read whole, of objects and of replicas.
    pub damaged: u64,
    /// Those whose objects are in memory, and are written to the SSD again, with the bytes of another node.
    pub repaired: u64,
    /// Those whose objects no other node had. A replica is only made again.
    pub lost: u64,
    /// Those whose repair is not over.
    pub outstanding: u64,
}

/// Counters of damage in memory and of its repair.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RepairCounters {
    /// Objects that were compared with their checksums.
    pub checked: u64,
    /// Bytes of these.
    pub checked_bytes: u64,
    /// Passes of the scrub through memory.
    pub passes: u64,
    /// Objects, and replicas of other owners' objects, that were damaged.
    pub damaged: u64,
    /// Damaged ones whose bytes are good again, or are read from the SSD.
    pub repaired: u64,
    /// Damaged ones that were removed, as no other node had good bytes. A replica is only made again.
    pub lost: u64,
    /// Damaged ones whose repair is not over.
    pub outstanding: u64,
    /// Damaged records on the SSD.
    pub records: RecordRepairCounters,
}

/// Objects that may be damaged, and those that are.
#[derive(Debug, Default)]
pub(super) struct Damage {
    scrub: Scrub,
    repairs: Repairs,
    records: RecordRepairs,
    damaged: u64,
    on_ssd: u64,
    /// Number of damaged objects and records that were reported to the operator.
    reported: u64,
}

impl Damage {
    /// Sets the pace of the scrub.
    pub(super) const fn set_scrub(&mut self, pace: ScrubPace, now_ns: u64) {
        self.scrub.set_pace(pace, now_ns);
    }

    /// Returns the counters, with those of the records on the SSD.
    pub(super) fn counters(&self, local: &LocalStore) -> RepairCounters {
        let (repaired, lost) = self.records.counts();
        let lost = lost + lost_records(local);
        let (damaged, outstanding) = damaged_records(local);
        let records = RecordRepairCounters { damaged, repaired, lost, outstanding };
        RepairCounters { records, ..self.memory_counters() }
    }

    fn memory_counters(&self) -> RepairCounters {
        let (checked, checked_bytes, passes) = self.scrub.counts();
        let (repaired, lost) = self.repairs.counts();
        let outstanding = self.repairs.len() as u64;
        let (damaged, repaired) = (self.damaged, repaired + self.on_ssd);
        let records = RecordRepairCounters::default();
        RepairCounters { checked, checked_bytes, passes, damaged, repaired, lost, outstanding, records }
    }

    /// Returns the counters at the end of the first repair, and whenever the number of damaged objects and records has
    /// doubled.
    pub(super) fn poll_report(&mut self, local: &LocalStore) -> Option<RepairCounters> {
        let (records, outstanding) = damaged_records(local);
        let damaged = self.damaged + records;
        if damaged < (2 * self.reported).max(1) || self.repairs.len() > 0 || outstanding > 0 {
            return None;
        }
        self.reported = damaged;
        Some(self.counters(local))
    }

    /// Returns true if a get of an object in memory waits until its bytes are known to be good: they are being
    /// repaired, or the peer found them damaged.
    pub(super) fn delays(&self, shard: &Shard, context: &RequestContext, digest: Digest) -> bool {
        let suspects = context.flags.has(FrameFlags::SUM_REPLIES);
        if !suspects && self.repairs.len() == 0 {
            return false;
        }
        self.repairs.has(digest) || suspects && shard.peek(digest).is_some_and(|object| !object.is_on_device)
    }

    /// Makes a get wait until the bytes of its object are good, or the object is gone. A get for the repair of another
    /// copy does not wait for the repair of this one, which may wait for the other.
    pub(super) fn wait(
        &mut self,
        shard: &Shard,
        context: &RequestContext,
        digest: Digest,
        reader: Reader,
    ) -> Result<(), Status> {
        let timing = shard.answers.outputs.timing();
        if self.repairs.has(digest) {
            return if context.repairs() { Err(Status::NotFound) } else { self.repairs.wait(digest, (reader, timing)) };
        }
        self.scrub.check(digest, Some((reader, timing)))
    }

    /// Has an object checked that may be damaged.
    pub(super) fn suspect(&mut self, digest: Digest) {
        // With too many of them, the scrub finds it.
        let _ = self.scrub.check(digest, None);
    }

    /// Advances the checks by one step. Returns true if there was anything to do.
    pub(super) fn drive(&mut self, local: &mut LocalStore, pool: &dyn PoolBytes) -> bool {
        let progress = self.scrub.step(&mut local.shard, pool);
        while let Some(Finding { digest, version, check, readers }) = self.scrub.take_finding() {
            match check {
                Check::Damaged => self.damaged(local, digest, version, readers),
                Check::Whole => serve(local, digest, readers),
                Check::NotMade => turn_away(local, digest, readers, Status::Busy),
            }
        }
        self.records.drive(local) || progress
    }

    /// Acts on a damaged object: it is read from the SSD, or repaired, or removed.
    pub(super) fn damaged(&mut self, local: &mut LocalStore, digest: Digest, version: Version, readers: Readers) {
        let is_here = local.shard.peek(digest).is_some_and(|object| object.version == version);
        if !is_here || self.repairs.has(digest) {
            serve_or_wait(&mut self.repairs, local, digest, readers);
            return;
        }
        self.damaged += 1;
        if let Some(view) = local.on_ssd(digest).filter(|view| view.version == version) {
            self.on_ssd += 1;
            local.shard.store.drop_copy(digest);
            for (reader, timing) in readers {
                local.shard.answers.outputs.late(timing, digest);
                if let Err(status) = local.read(&view, reader) {
                    local.shard.turn_away(reader, status);
                }
            }
            return;
        }
        self.repairs.begin(local, digest, readers);
    }

    /// Returns the next request to another shard.
    pub(super) fn poll(&mut self, local: &mut LocalStore) -> Option<Fetch> {
        self.records.drive(local);
        self.repairs.poll(local).or_else(|| self.records.poll(local))
    }

    /// Handles the answer of another shard, or the failure to get one. Returns false if it belongs to no request of
    /// this component.
    pub(super) fn fetched(&mut self, local: &mut LocalStore, token: u64, done: &FetchDone) -> bool {
        self.repairs.fetched(local, token, done) || self.records.fetched(local, token, done)
    }

    /// Returns the time of the next action.
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        let timeouts = [self.scrub.poll_timeout(), self.repairs.poll_timeout(), self.records.poll_timeout()];
        timeouts.into_iter().flatten().min()
    }
}

/// Answers readers with the object, or makes them wait for its repair.
fn serve_or_wait(repairs: &mut Repairs, local: &mut LocalStore, digest: Digest, readers: Readers) {
    for (reader, timing) in readers {
        match repairs.has(digest) {
            true => {
                if let Err(status) = repairs.wait(digest, (reader, timing)) {
                    turn_away(local, digest, vec![(reader, timing)], status);
                }
            }
            false => serve(local, digest, vec![(reader, timing)]),
        }
    }
}
