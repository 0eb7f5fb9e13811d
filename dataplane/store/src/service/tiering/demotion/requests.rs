//! Demotion on the request path: admission of puts, their waits for the SSD, and the writes that they cause.

use kvplane_proto::ids::Version;
use kvplane_proto::message::PutAck;
use kvplane_proto::{Digest, Status};

use super::{Admission, Demotion, is_for_ssd};
use crate::service::shard::Shard;
use crate::service::shard::deferrals::DeferredItem;
use crate::service::tiering::policy::WritePolicy;
use crate::service::tiering::ssd::Ssd;
use crate::service::types::CommittedObject;
use crate::{Replica, ReserveError};

/// Progress of the write of an object that is to be on the SSD before its former owner drops it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::service) enum MoveProgress {
    /// The object is on the SSD, or there is no SSD that accepts it.
    Kept,
    /// The object is being written.
    Waits,
    /// The backlog had no room.
    Refused,
}

impl Demotion {
    /// Checks that the SSD would accept an object of this length. A longer one is refused, so that its client stripes
    /// it: otherwise it would be lost when it is evicted from memory. A put session cannot be striped any more; its
    /// object may be kept in memory alone if the reply promises nothing of the SSD.
    pub(in crate::service) fn check_length(
        ssd: &Ssd,
        bytes: u64,
        asked: Option<PutAck>,
        is_session: bool,
    ) -> Result<(), Status> {
        let may_stay_in_memory = is_session && !ssd.is_awaited(asked);
        if ssd.takes(bytes) || may_stay_in_memory { Ok(()) } else { Err(Status::TooLarge) }
    }

    /// Checks that a put of this many bytes can be accepted now, of the account of a tenant with this weight:
    /// backpressure while the SSD cannot keep up.
    pub(in crate::service) fn may_put(
        &mut self,
        ssd: &Ssd,
        bytes: u64,
        asked: Option<PutAck>,
        account: u16,
        weight: u32,
        now_ns: u64,
    ) -> Result<(), Status> {
        let must_wait = ssd.policy.must_write(asked) && ssd.fits(bytes);
        if must_wait && !self.backlog.admits(account, weight, bytes, now_ns) {
            // The queued writes may be less than half of the backlog: delayed writes would not be started otherwise.
            self.pressed = true;
            return Err(Status::Busy);
        }
        Ok(())
    }

    /// Handles a put that found no memory, or exceeded its account's quota. Returns true if objects in the backlog take
    /// the memory, which is temporary: their writes are started, and the put is to be retried.
    pub(in crate::service) fn makes_room(&mut self, error: ReserveError, account: u16) -> bool {
        let passes = match error {
            ReserveError::NoSpace { .. } => self.backlog.objects() > 0,
            ReserveError::Quota { bytes, lease_bytes, .. } => bytes <= lease_bytes && self.backlog.holds_of(account),
            _ => false,
        };
        self.pressed |= passes;
        passes
    }

    /// Returns the acknowledgement level of a put of a stripe or stripe head that names none: it is written, whatever
    /// the policy. A stripe that went unwritten, because the SSD could not keep up or the object was new, would be lost
    /// to the others when it is evicted.
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

    /// Counts the put of an object, and returns true if its reply waits until the object is written.
    pub(in crate::service) fn awaits(ssd: &mut Ssd, made: &CommittedObject) -> bool {
        let seen = ssd.frequency.see(made.digest);
        let at_once = match ssd.policy.write {
            WritePolicy::Through => true,
            WritePolicy::Selective { times } => seen >= times,
            WritePolicy::Back { .. } => false,
        };
        // The put's own level takes precedence over the policy.
        (at_once || made.ack.is_some()) && ssd.is_awaited(made.ack) && ssd.takes(made.bytes)
    }

    /// Enqueues the write of an object that was put, as the policy says; `told` waits for it.
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

    /// Returns the status of a repeated commit of a version that was committed before: its first reply may have waited
    /// for the SSD, wait still, or have been a failure.
    pub(in crate::service) fn kept(&self, ssd: &Ssd, shard: &Shard, digest: Digest, version: Version) -> Status {
        let writing = self.writing.contains(&(digest, version)) && !self.retries.has(digest, version);
        if writing || ssd.removals.has(digest) {
            return Status::Busy;
        }
        let here = shard.peek(digest).is_some_and(|now| now.version >= version);
        let there = ssd.tier.locate(digest).is_some_and(|view| view.version >= version);
        // A dropped object leaves no trace; neither does one that was removed since, so that the two look the same.
        if here || there { Status::Ok } else { Status::Stale }
    }

    /// Counts a get of an object in memory, which may now qualify to be written.
    pub(in crate::service) fn note_get(&mut self, ssd: &mut Ssd, shard: &mut Shard, digest: Digest) {
        let seen = ssd.frequency.see(digest);
        let wanted = match ssd.policy.write {
            WritePolicy::Selective { times } => seen >= times,
            // The backlog may have been full when it was put.
            WritePolicy::Through => {
                let counters = &ssd.counters;
                counters.writes_skipped
                    + counters.writes_over_budget
                    + counters.writes_over_quota
                    + counters.writes_failed
                    > 0
            }
            // Its write may have failed for good.
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

    /// Returns true if the day's budget admits the write of an object that was not promised.
    fn admits(&self, ssd: &mut Ssd, digest: Digest) -> bool {
        let admits = match self.budget.admission() {
            Admission::Full => true,
            Admission::Selective => ssd.frequency.estimate(digest) >= 2,
            Admission::Promised => false,
        };
        ssd.counters.writes_over_budget += u64::from(!admits);
        admits
    }

    /// Returns the status of a put that would wait for the SSD, if the object exists already: busy while the object is
    /// being written, and a failure at once if the SSD did not accept it. `None` if it is on the SSD, or the put does
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
        let version = shard.peek(digest).map(|object| object.version);
        if version.is_some_and(|version| self.retries.has(digest, version)) {
            return Some(Status::NoSpace);
        }
        if self.is_writing(digest) {
            return Some(Status::Busy);
        }
        // Once: the next attempt may find room.
        if let Some(at) = self.over_quota.iter().position(|(of, at)| *of == digest && Some(*at) == version) {
            self.over_quota.remove(at);
            return Some(Status::QuotaExceeded);
        }
        // An object that was not to be written was promised to no client, unless this put itself names a level.
        if asked.is_none() || version.is_none() || ssd.tier.locate(digest).is_some() {
            return None;
        }
        self.hold(ssd, shard, digest, None, asked);
        self.write_at_once(ssd, digest, asked);
        Some(if self.is_writing(digest) { Status::Busy } else { Status::NoSpace })
    }

    /// Starts the delayed write of an object that a reply would wait for, with the level `asked`.
    fn write_at_once(&mut self, ssd: &Ssd, digest: Digest, asked: Option<PutAck>) {
        if !ssd.is_awaited(asked) || !self.is_writing(digest) {
            return;
        }
        // In order: versions that were replaced meanwhile end when they are dequeued.
        while let Some(at) = self.dirty.iter().position(|object| object.digest == digest) {
            if let Some(object) = self.dirty.remove(at) {
                self.queue(ssd, object);
            }
        }
        if ssd.policy.ack_of(asked) == PutAck::Durable {
            let waiting = self.writes.iter_mut().chain(self.retries.objects_mut());
            waiting.filter(|object| object.digest == digest).for_each(|object| object.ack = asked);
        }
    }

    /// Writes the record of an object in memory again if its replication flag is outdated: the next incarnation reads
    /// from the record which replicas it has to make.
    pub(in crate::service) fn write_promise(&mut self, ssd: &mut Ssd, shard: &mut Shard, digest: Digest) {
        let store = &shard.store;
        let promised = store.objects().replica(digest).is_owed_a_copy();
        let says_so = self.promise_of(ssd, digest).is_none_or(|says| says == promised);
        if store.exists(digest) && !says_so {
            self.hold(ssd, shard, digest, None, Some(PutAck::Buffered));
        }
    }

    /// Returns the replication flag of an object's record on the SSD, or of one in flight there. `None` without a
    /// record, and while a write is queued: it will carry the flag as of then.
    fn promise_of(&self, ssd: &Ssd, digest: Digest) -> Option<bool> {
        let mut waiting = self.writes.iter().chain(&self.dirty).chain(self.retries.objects());
        if waiting.any(|object| object.digest == digest) {
            return None;
        }
        let mut given = self.calls.values().rev().map(|call| &call.object);
        let given = given.find(|object| object.digest == digest).map(|object| object.copied);
        given.or_else(|| ssd.locate(digest).map(|view| view.copied))
    }

    /// Enqueues the writes of replicas that became objects of this shard, as far as the backlog has room. Those that
    /// are evicted first are lost with their former owner.
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
                // The slot's new ownership is not durable yet.
                return;
            }
            self.inherited.pop_front();
            if bytes.is_some() {
                self.write_moved(ssd, shard, digest);
            }
        }
    }

    /// Enqueues the write of a replica that was received. Under the selective policy replicas are in memory only: their
    /// owner alone counts the accesses.
    pub(in crate::service) fn keep_replica(&mut self, ssd: &mut Ssd, digest: Digest) {
        if matches!(ssd.policy.write, WritePolicy::Selective { .. }) || ssd.is_degraded() {
            return;
        }
        if ssd.replicas.is_open(digest.slot()) {
            self.replicas.push_back(digest);
        } else if !ssd.replicas.wait(digest) {
            ssd.counters.writes_skipped += 1;
        }
    }

    /// Enqueues the writes of replicas whose slots were opened for records.
    pub(in crate::service) fn keep_replicas(&mut self, replicas: Vec<Digest>) {
        self.replicas.extend(replicas);
    }

    /// Enqueues the writes of replicas, as far as the backlog has room.
    pub(super) fn write_replicas(&mut self, ssd: &mut Ssd, shard: &mut Shard) {
        while let Some(digest) = self.replicas.front().copied() {
            let replica = shard.peek(digest).filter(|object| object.replica == Replica::Second);
            let (bytes, is_open) = (replica.map(|object| object.extent.bytes), ssd.replicas.is_open(digest.slot()));
            if bytes.is_some_and(|bytes| is_open && ssd.fits(bytes) && !self.backlog.has_room(bytes)) {
                self.pressed = true;
                return;
            }
            self.replicas.pop_front();
            let Some(object) = replica else { continue };
            if !is_open {
                ssd.replicas.wait(digest);
                continue;
            }
            let is_there = ssd.locate_replica(digest).is_some_and(|view| view.version >= object.version);
            if !is_there && !self.is_writing(digest) && self.admits(ssd, digest) {
                self.hold(ssd, shard, digest, None, None);
            }
        }
    }

    /// Checks that a replica of this length can be accepted now: backpressure while the SSD cannot keep up.
    pub(in crate::service) fn may_keep_replica(
        &mut self,
        ssd: &Ssd,
        bytes: u64,
        account: u16,
        weight: u32,
        now_ns: u64,
    ) -> Result<(), Status> {
        if matches!(ssd.policy.write, WritePolicy::Selective { .. }) {
            return Ok(());
        }
        self.may_put(ssd, bytes, None, account, weight, now_ns)
    }

    /// Writes an object in memory that was migrated here, or is the replica of an owner that is gone, to the SSD as
    /// soon as possible, whatever the policy. The former owner's record may be the only one that survives a restart, or
    /// an eviction.
    pub(in crate::service) fn write_moved(&mut self, ssd: &mut Ssd, shard: &mut Shard, digest: Digest) -> MoveProgress {
        let Some(object) = shard.peek(digest) else { return MoveProgress::Kept };
        if !ssd.fits(object.extent.bytes) {
            return MoveProgress::Kept;
        }
        if self.is_writing(digest) {
            // If its write is delayed, it is started.
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

/// Checks a put where there is no SSD.
pub(in crate::service) const fn may_put_without_ssd(asked: Option<PutAck>) -> Result<(), Status> {
    if is_for_ssd(asked) { Err(Status::NoSsd) } else { Ok(()) }
}
