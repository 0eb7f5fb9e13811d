//! Demotion as requests meet it: whether a put may come now, or never, what its answer waits for, and what is written
//! because of it.

use kvplane_proto::ids::Version;
use kvplane_proto::message::PutAck;
use kvplane_proto::{Digest, Status};

use super::{Admission, Demotion, is_for_ssd};
use crate::ReserveError;
use crate::service::shard::Shard;
use crate::service::shard::deferrals::DeferredItem;
use crate::service::tiering::policy::WritePolicy;
use crate::service::tiering::ssd::Ssd;
use crate::service::types::CommittedObject;

/// Progress of an object that is to be on the SSD before its former owner drops it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::service) enum MoveProgress {
    /// It is there, or the SSD, if there is one, does not take it.
    Kept,
    /// It is being written.
    Waits,
    /// There was no room for it among what waits.
    Refused,
}

impl Demotion {
    /// A check that the SSD would take an object of so many bytes. A longer one is refused, so that its client puts it
    /// in stripes: else it would be gone when memory drops it. A put session cannot be striped any more; where an
    /// answer promises nothing of the SSD its object may be kept in memory alone.
    pub(in crate::service) fn may_be_so_long(
        ssd: &Ssd,
        bytes: u64,
        asked: Option<PutAck>,
        is_session: bool,
    ) -> Result<(), Status> {
        let may_stay_in_memory = is_session && !ssd.is_awaited(asked);
        if ssd.takes(bytes) || may_stay_in_memory { Ok(()) } else { Err(Status::TooLarge) }
    }

    /// A check that a put of so many bytes is to be taken up now, and does not come at a time when the SSD cannot keep
    /// up.
    pub(in crate::service) fn may_put(&mut self, ssd: &Ssd, bytes: u64, asked: Option<PutAck>) -> Result<(), Status> {
        if ssd.policy.must_write(asked) && ssd.fits(bytes) && !self.backlog.has_room(bytes) {
            // What waits may be less than half of what may: then nothing else would have it written before its time.
            self.pressed = true;
            return Err(Status::Busy);
        }
        Ok(())
    }

    /// A put found no room in memory, or none in what its account may take. True where objects wait for the SSD, which
    /// are in the way for a while only: they get in line, and the put is to come again.
    pub(in crate::service) fn makes_room(&mut self, error: ReserveError, account: u16) -> bool {
        let passes = match error {
            ReserveError::NoSpace { .. } => self.backlog.objects() > 0,
            ReserveError::Quota { bytes, lease_bytes, .. } => bytes <= lease_bytes && self.backlog.holds_of(account),
            _ => false,
        };
        self.pressed |= passes;
        passes
    }

    /// What the put of a part of a longer object, or of what names the parts, waits for where it asked for nothing:
    /// that it is written, whatever the policy. One that went unwritten, as the SSD could not keep up or nobody had
    /// seen it before, would be lost to the others with the next that memory has to make room for.
    pub(in crate::service) fn ack_of_parts(ssd: &Ssd) -> Option<PutAck> {
        if ssd.is_degraded() {
            return None;
        }
        match (ssd.policy.write, ssd.policy.ack) {
            (WritePolicy::Back { .. }, _) => None,
            (WritePolicy::Through | WritePolicy::Selective { .. }, PutAck::Memory) => Some(PutAck::Buffered),
            (WritePolicy::Through | WritePolicy::Selective { .. }, ack) => Some(ack),
        }
    }

    /// Counts that an object was put, and says whether its answer waits until it is written.
    pub(in crate::service) fn awaits(ssd: &mut Ssd, made: &CommittedObject) -> bool {
        let seen = ssd.frequency.see(made.digest);
        let at_once = match ssd.policy.write {
            WritePolicy::Through => true,
            WritePolicy::Selective { times } => seen >= times,
            WritePolicy::Back { .. } => false,
        };
        // What the put itself says is not up to the policy.
        (at_once || made.ack.is_some()) && ssd.is_awaited(made.ack) && ssd.takes(made.bytes)
    }

    /// An object was put: it goes to the SSD by the policy; `told` waits for that.
    pub(in crate::service) fn keep(
        &mut self,
        ssd: &mut Ssd,
        shard: &mut Shard,
        made: &CommittedObject,
        told: Option<DeferredItem>,
    ) {
        let wanted = match ssd.policy.write {
            WritePolicy::Selective { times } => ssd.frequency.estimate(made.digest) >= times,
            WritePolicy::Through | WritePolicy::Back { .. } => true,
        };
        if told.is_some() || wanted && self.admits(ssd, made.digest) {
            self.hold(ssd, shard, made.digest, told, made.ack);
        }
    }

    /// The answer where it is asked again whether a version was made that was: its first answer may have waited for the
    /// SSD, wait still, or have been a refusal.
    pub(in crate::service) fn kept(&self, ssd: &Ssd, shard: &Shard, digest: Digest, version: Version) -> Status {
        let writing = self.writing.contains(&(digest, version)) && !self.is_paused(digest, version);
        if writing || ssd.removals.has(digest) {
            return Status::Busy;
        }
        let here = shard.peek(digest).is_some_and(|now| now.version >= version);
        let there = ssd.tier.locate(digest).is_some_and(|view| view.version >= version);
        // One that was taken back leaves nothing; neither does one that was removed since, which nobody can tell.
        if here || there { Status::Ok } else { Status::Stale }
    }

    /// An object in memory is read: by now it may be worth being written.
    pub(in crate::service) fn note_get(&mut self, ssd: &mut Ssd, shard: &mut Shard, digest: Digest) {
        let seen = ssd.frequency.see(digest);
        let wanted = match ssd.policy.write {
            WritePolicy::Selective { times } => seen >= times,
            // There may have been no room when it was put.
            WritePolicy::Through => {
                let counters = &ssd.counters;
                counters.writes_skipped + counters.writes_over_budget + counters.writes_failed > 0
            }
            // One whose write failed time and again.
            WritePolicy::Back { .. } => ssd.counters.writes_failed > 0 && !ssd.is_degraded(),
        };
        if !wanted || self.is_writing(digest) || ssd.locate(digest).is_some() {
            return;
        }
        // A get must not fill the backlog that puts wait for; a later get finds room.
        let bytes = shard.peek(digest).map_or(0, |object| object.extent.bytes);
        if self.backlog.has_room(bytes) && self.admits(ssd, digest) {
            self.hold(ssd, shard, digest, None, None);
        }
    }

    /// True where the day's bytes allow for an object that nobody was promised.
    fn admits(&self, ssd: &mut Ssd, digest: Digest) -> bool {
        let admits = match self.budget.admission() {
            Admission::Full => true,
            Admission::Selective => ssd.frequency.estimate(digest) >= 2,
            Admission::Promised => false,
        };
        ssd.counters.writes_over_budget += u64::from(!admits);
        admits
    }

    /// The answer to a put of an object that is there already, and that would wait for the SSD: to come again while the
    /// object is on its way there, and at once that the SSD did not take it. Nothing where it is there, or the put does
    /// not wait.
    pub(in crate::service) fn awaits_ssd(
        &mut self,
        ssd: &mut Ssd,
        shard: &mut Shard,
        digest: Digest,
        asked: Option<PutAck>,
    ) -> Option<Status> {
        self.write_at_once(ssd, digest, asked);
        if !ssd.is_awaited(asked) {
            return None;
        }
        let version = shard.store.as_ref()?.peek(digest).map(|object| object.version);
        if version.is_some_and(|version| self.is_paused(digest, version)) {
            return Some(Status::NoSpace);
        }
        if self.is_writing(digest) {
            return Some(Status::Busy);
        }
        // What was never to be written is promised to nobody, unless this put says itself what it wants.
        if asked.is_none() || version.is_none() || ssd.tier.locate(digest).is_some() {
            return None;
        }
        self.hold(ssd, shard, digest, None, asked);
        self.write_at_once(ssd, digest, asked);
        Some(if self.is_writing(digest) { Status::Busy } else { Status::NoSpace })
    }

    /// An answer would wait for what may still wait to be written: it gets in line, and is written as `asked`.
    fn write_at_once(&mut self, ssd: &Ssd, digest: Digest, asked: Option<PutAck>) {
        if !ssd.is_awaited(asked) || !self.is_writing(digest) {
            return;
        }
        // In their order: those that were replaced meanwhile are let go when it is their turn.
        while let Some(at) = self.dirty.iter().position(|object| object.digest == digest) {
            self.writes.extend(self.dirty.remove(at));
        }
        if ssd.policy.ack_of(asked) == PutAck::Durable {
            let waiting = self.writes.iter_mut().chain(self.retries.objects_mut());
            waiting.filter(|object| object.digest == digest).for_each(|object| object.ack = asked);
        }
    }

    /// The record on the SSD of an object in memory says whether it has two owners, or is written once more.
    pub(in crate::service) fn write_promise(&mut self, ssd: &mut Ssd, shard: &mut Shard, digest: Digest) {
        let Some(store) = &shard.store else { return };
        let promised = store.replica(digest).is_owed_a_copy();
        let says_so = self.promise_of(ssd, digest).is_none_or(|says| says == promised);
        if store.exists(digest) && !says_so {
            self.hold(ssd, shard, digest, None, Some(PutAck::Buffered));
        }
    }

    /// Replicas that became objects of our own go to the SSD, as far as there is room among what waits. Those that
    /// memory gives up first are lost with their former owner.
    pub(super) fn write_inherited(&mut self, ssd: &mut Ssd, shard: &mut Shard) {
        while let Some(digest) = self.inherited.front().copied() {
            let bytes = shard.peek(digest).map(|object| object.extent.bytes);
            let (owned, is_heir) = (shard.ownership.owns(digest), shard.replicas.has_inherited(digest.slot()));
            let bytes = bytes.filter(|_| owned || is_heir);
            if bytes.is_some_and(|bytes| ssd.fits(bytes) && !self.backlog.has_room(bytes)) {
                self.pressed = true;
                return;
            }
            if bytes.is_some() && !owned {
                // That the slot is ours is not written down yet.
                return;
            }
            self.inherited.pop_front();
            if bytes.is_some() {
                self.write_moved(ssd, shard, digest);
            }
        }
    }

    /// An object that is in memory has moved here, or is the replica of an owner that is gone: the SSD is to have it as
    /// soon as it may be, whatever the policy. The former owner's record may be the only one that outlives a restart,
    /// or an eviction.
    pub(in crate::service) fn write_moved(&mut self, ssd: &mut Ssd, shard: &mut Shard, digest: Digest) -> MoveProgress {
        let Some(object) = shard.peek(digest) else { return MoveProgress::Kept };
        if !ssd.fits(object.extent.bytes) {
            return MoveProgress::Kept;
        }
        if self.is_writing(digest) {
            // One that was to wait for a while does not.
            self.pressed = true;
            return MoveProgress::Waits;
        }
        if ssd.locate(digest).is_some_and(|view| view.version >= object.version) {
            return MoveProgress::Kept;
        }
        self.hold(ssd, shard, digest, None, Some(PutAck::Buffered));
        if self.is_writing(digest) { MoveProgress::Waits } else { MoveProgress::Refused }
    }
}

/// A check of a put where there is no SSD.
pub(in crate::service) const fn may_put_without_ssd(asked: Option<PutAck>) -> Result<(), Status> {
    if is_for_ssd(asked) { Err(Status::NoSsd) } else { Ok(()) }
}
