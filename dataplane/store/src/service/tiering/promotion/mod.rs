//! Promotion from the SSD to memory: reads into fresh extents of the pool, shared by all gets of the same object
//! meanwhile.
//!
//! A get of an object on the SSD reserves memory in the pool, reads the object into it, verifies it, and answers from
//! there. The policy decides whether the object then stays in memory.

mod names;
mod prefetch;
mod tails;
mod tenants;

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::ids::{ReservationId, Version};
use kvplane_proto::{Digest, Status};
use kvplane_tier::{Get, GetError, Memory, Priority, RecordView, Span, Token};

use self::names::Names;
use self::prefetch::PrefetchAccount;
pub(in crate::service) use self::prefetch::wanted_until_ns;
use self::tails::{Tails, tail_bytes_of};
pub(in crate::service) use self::tenants::KNOWN_MOST as TENANTS_KNOWN_MOST;
pub(in crate::service) use self::tenants::ObjectTenant;
use self::tenants::RecordTenants;
use super::fair::FairQueue;
use super::ssd::{Ssd, WaitingReaders};
use crate::service::shard::Shard;
use crate::service::shard::effects::Effect;
use crate::service::shard::rights::keeps_any;
use crate::service::shard::stream_read::Reader;
use crate::service::shard::timing::{About, Timing};
use crate::service::types::reserve_status;
use crate::{Replica, Reserve};

/// Most gets that wait for one read.
const READERS_MOST: usize = 1024;
/// Most objects that pass through memory to be replicated.
const PASSING_MOST: usize = 8;
/// Most gets that wait for their reads to begin: the sum of several clients' large batches.
const QUEUED_MOST: usize = 1 << 14;

/// Reason for which a read was not begun.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::service) enum NotBegun {
    /// The tier has its maximum of reads in flight.
    Full,
    /// The read will not be done.
    Refused(Status),
}

/// Read in flight in the tier.
#[derive(Debug)]
struct ReadCall {
    digest: Digest,
    version: Version,
    reservation: ReservationId,
    readers: WaitingReaders,
}

/// Objects being promoted, and other reads from the SSD.
#[derive(Debug)]
pub(in crate::service) struct Promotion {
    calls: BTreeMap<u64, ReadCall>,
    /// Token of the read in flight of each object.
    reading: BTreeMap<Digest, u64>,
    /// Gets that wait for a read to begin, while the tier has its maximum in flight: in proportion to the weights of
    /// their tenants.
    queued: FairQueue<(Digest, Reader, Timing)>,
    /// Objects that are read to be replicated.
    for_replicas: BTreeSet<Digest>,
    /// Those of which memory has no free room: they leave it once they are replicated.
    passing: BTreeSet<Digest>,
    prefetched: PrefetchAccount,
    tails: Tails,
    names: Names,
    tenants: RecordTenants,
}

impl Promotion {
    pub(super) fn new(prefetch_bytes: u64) -> Self {
        Self {
            calls: BTreeMap::new(),
            reading: BTreeMap::new(),
            queued: FairQueue::default(),
            for_replicas: BTreeSet::new(),
            passing: BTreeSet::new(),
            prefetched: PrefetchAccount::new(prefetch_bytes),
            tails: Tails::default(),
            names: Names::default(),
            tenants: RecordTenants::default(),
        }
    }

    /// Returns the number of objects being read.
    pub(super) fn reads(&self) -> usize {
        self.reading.len()
    }

    /// Returns the number of objects being read to be replicated.
    pub(in crate::service) fn replica_reads(&self) -> usize {
        self.for_replicas.len()
    }

    /// Returns the time at which the next prefetched object expires.
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        self.prefetched.poll_timeout()
    }

    /// Returns the tenant of an object, as far as it is known.
    pub(in crate::service) fn tenant_of(&self, ssd: &Ssd, shard: &Shard, digest: Digest) -> ObjectTenant {
        self.tenants.tenant_of(ssd, shard, digest)
    }

    /// Requests a read of the tail of an object on the SSD, to learn its tenant.
    pub(in crate::service) fn want_tenant(&mut self, digest: Digest) {
        self.tenants.want(digest);
    }

    /// Begins to read the name of an object, for an entry of a list's page.
    pub(in crate::service) fn read_name(
        &mut self,
        ssd: &mut Ssd,
        place: (u64, usize),
        digest: Digest,
    ) -> Result<(), GetError> {
        self.names.read(ssd, place, digest)
    }

    /// Counts a get of an object in memory, prefetched or not.
    pub(in crate::service) fn use_prefetched(&mut self, ssd: &mut Ssd, digest: Digest) {
        if self.prefetched.take(digest) {
            ssd.counters.prefetches_used += 1;
        }
    }

    /// Ends the prefetch of an object that was put again.
    pub(in crate::service) fn forget_prefetched(&mut self, digest: Digest) {
        self.prefetched.take(digest);
    }

    /// Begins to prefetch an object, if the account has room. One that is `needed` in memory is not counted if there is
    /// no room: few are needed at a time.
    pub(in crate::service) fn prefetch(
        &mut self,
        ssd: &mut Ssd,
        shard: &mut Shard,
        view: &RecordView,
        until_ns: u64,
        needed: bool,
    ) {
        let unit = shard.store.config().unit_bytes;
        // The memory that it takes of the pool, rounded up to units.
        let bytes = (u64::from(view.payload_bytes) + u64::from(tail_bytes_of(view))).next_multiple_of(unit);
        let digest = view.digest;
        if self.prefetched.extend(digest, until_ns) || self.reading.contains_key(&digest) {
            return;
        }
        let charged = if self.prefetched.has_room(bytes) { Some(bytes) } else { needed.then_some(0) };
        let charged = charged.filter(|_| self.begin_read(ssd, shard, view, Priority::Prefetch, None).is_ok());
        match charged {
            Some(charged) => {
                ssd.counters.prefetches += 1;
                self.prefetched.add(digest, charged, until_ns);
            }
            None => ssd.counters.prefetch_refusals += 1,
        }
    }

    /// Drops the prefetched objects that no get has read in time.
    pub(super) fn expire_prefetched(&mut self, ssd: &mut Ssd, shard: &mut Shard) {
        while let Some(digest) = self.prefetched.due(shard.now_ns) {
            let stays = stays_for_replica(shard, digest);
            let store = &mut shard.store;
            if self.reading.contains_key(&digest) {
                // Its memory is in use until the read ends; then it is dropped, unless a get comes before.
                self.prefetched.expire(digest);
                continue;
            }
            self.prefetched.take(digest);
            ssd.counters.prefetches_expired += 1;
            if ssd.locate(digest).is_some() && !stays {
                store.drop_copy(digest);
            }
        }
    }

    /// Answers a get with an object, if it is in memory now.
    fn serve(&self, ssd: &Ssd, shard: &mut Shard, digest: Digest, reader: Reader) {
        shard.serve(digest, reader, |shard| self.tenant_of(ssd, shard, digest).known());
    }

    /// Begins to read an object from the SSD, or joins a read in flight. If the tier has its maximum of reads in
    /// flight, the get waits.
    pub(in crate::service) fn read(
        &mut self,
        ssd: &mut Ssd,
        shard: &mut Shard,
        view: &RecordView,
        reader: Reader,
    ) -> Result<(), Status> {
        let digest = view.digest;
        let timing = shard.answers.outputs.timing();
        if let Some(waits) = ssd.damaged.wait(digest, (reader, timing)) {
            return waits;
        }
        self.use_prefetched(ssd, digest);
        ssd.frequency.see(digest);
        // Not before those that wait, except for gets that join a read.
        let may_begin = self.queued.is_empty() || self.reading.contains_key(&digest);
        let tenant = view.tenant.unwrap_or(0);
        let begun =
            if may_begin { self.join_or_begin(ssd, shard, view, (reader, timing)) } else { Err(NotBegun::Full) };
        match begun {
            Ok(()) => Ok(()),
            Err(NotBegun::Full) if self.may_queue(tenant) => {
                let bytes = view.payload_bytes.into();
                self.queued.push(tenant, ssd.weight_of(tenant), bytes, (digest, reader, timing));
                ssd.counters.reads_queued += 1;
                Ok(())
            }
            Err(NotBegun::Full) => Err(Status::Busy),
            Err(NotBegun::Refused(status)) => Err(status),
        }
    }

    /// Returns true if a get of a tenant may wait: one tenant has at most three quarters of the queue.
    fn may_queue(&self, tenant: u32) -> bool {
        self.queued.len() < QUEUED_MOST && self.queued.len_of(tenant) < QUEUED_MOST / 4 * 3
    }

    /// Begins the reads that waited, as far as the tier accepts them. Returns true if there was any progress.
    pub(super) fn begin_queued(&mut self, ssd: &mut Ssd, shard: &mut Shard) -> bool {
        let mut progress = false;
        while let Some((digest, reader, timing)) = self.queued.front().copied() {
            // Another read or a put may have brought it into memory meanwhile; it may have been removed, or its slot
            // lost.
            let here = shard.store.exists(digest);
            let view = ssd.locate_any(digest).filter(|_| !here);
            let begun = match view {
                // Its peer is gone.
                _ if shard.peer_of_reader(reader).is_none() => Err(NotBegun::Refused(Status::Cancelled)),
                _ if !keeps_any(shard, digest) => Err(NotBegun::Refused(Status::WrongOwner)),
                Some(_) if ssd.damaged.has(digest) => match ssd.damaged.wait(digest, (reader, timing)) {
                    Some(Err(status)) => Err(NotBegun::Refused(status)),
                    _ => Ok(()),
                },
                Some(view) => self.join_or_begin(ssd, shard, &view, (reader, timing)),
                None => Err(NotBegun::Refused(Status::NotFound)),
            };
            if begun == Err(NotBegun::Full) {
                return progress;
            }
            progress = true;
            self.queued.pop();
            match begun {
                Err(NotBegun::Refused(Status::NotFound)) => self.serve(ssd, shard, digest, reader),
                Err(NotBegun::Refused(status)) => shard.turn_away(reader, status),
                Err(NotBegun::Full) | Ok(()) => {}
            }
        }
        progress
    }

    /// Joins the read of an object, or begins one.
    fn join_or_begin(
        &mut self,
        ssd: &mut Ssd,
        shard: &mut Shard,
        view: &RecordView,
        reader: (Reader, Timing),
    ) -> Result<(), NotBegun> {
        if let Some(token) = self.reading.get(&view.digest)
            && let Some(call) = self.calls.get_mut(token)
            && call.version == view.version
        {
            if call.readers.len() == READERS_MOST {
                return Err(NotBegun::Refused(Status::Busy));
            }
            call.readers.push(reader);
            ssd.counters.reads_shared += 1;
            return Ok(());
        }
        self.begin_read(ssd, shard, view, Priority::Get, Some(reader))
    }

    /// Begins to read an object that is not being read.
    fn begin_read(
        &mut self,
        ssd: &mut Ssd,
        shard: &mut Shard,
        view: &RecordView,
        priority: Priority,
        reader: Option<(Reader, Timing)>,
    ) -> Result<(), NotBegun> {
        let refused = NotBegun::Refused;
        let store = &mut shard.store;
        let digest = view.digest;
        // The obstacle is temporary: pins and puts have deadlines.
        let tail_bytes = tail_bytes_of(view);
        let replica = match (ssd.replicas.is_open(digest.slot()), view.copied) {
            (true, _) => Replica::Second,
            (false, true) => Replica::First,
            (false, false) => Replica::None,
        };
        let plain = Reserve::plain(digest, view.payload_bytes.into());
        let wanted = Reserve { tail_bytes, head: view.names_parts, replica, ..plain };
        let (reservation, extent) = store.reserve_for(&wanted).map_err(|error| match reserve_status(error) {
            Status::NoSpace => refused(Status::Busy),
            status => refused(status),
        })?;
        let destination = Span::pool(extent.offset, view.payload_bytes);
        let token = ssd.new_token();
        let readers = reader.into_iter().collect();
        if let Err(error) = ssd.tier.get(&Get { digest, destination, priority, token }) {
            store.abort(reservation).expect("a reservation that was just made");
            return Err(match error {
                GetError::Busy => NotBegun::Full,
                _ => refused(Status::NotFound),
            });
        }
        self.calls.insert(token.0, ReadCall { digest, version: view.version, reservation, readers });
        self.reading.insert(digest, token.0);
        Ok(())
    }

    /// Begins to read an object that is to be replicated: it stays in memory, or until it is replicated if it `passes`.
    pub(in crate::service) fn read_for_replica(
        &mut self,
        ssd: &mut Ssd,
        shard: &mut Shard,
        view: &RecordView,
        passes: bool,
    ) -> Result<(), NotBegun> {
        if !self.reading.contains_key(&view.digest) {
            self.begin_read(ssd, shard, view, Priority::Background, None)?;
        }
        self.for_replicas.insert(view.digest);
        if passes {
            self.passing.insert(view.digest);
        }
        Ok(())
    }

    /// Returns true if another object may pass through memory to be replicated.
    pub(in crate::service) fn may_pass(&mut self, shard: &Shard) -> bool {
        let reading = &self.reading;
        self.passing.retain(|digest| reading.contains_key(digest) || shard.store.exists(*digest));
        self.passing.len() < PASSING_MOST
    }

    /// Drops an object from memory that was to pass through it, and is replicated.
    pub(in crate::service) fn end_pass(&mut self, ssd: &Ssd, shard: &mut Shard, digest: Digest) {
        if self.passing.remove(&digest) && ssd.locate(digest).is_some() {
            shard.store.drop_copy(digest);
        }
    }

    /// Handles the end of a read: with the object's version and checksum, or without the object.
    pub(super) fn read_done(&mut self, ssd: &mut Ssd, shard: &mut Shard, token: Token, found: Option<(Version, u64)>) {
        let Some(ReadCall { digest, version, reservation, readers }) = self.end_call(token) else { return };
        let kept = keeps_any(shard, digest);
        let store = &mut shard.store;
        // It may have been removed, or its slot lost, while it was read.
        let current = ssd.locate_any(digest).is_some_and(|view| view.version == version);
        let found = found.filter(|(read, _)| current && *read == version && kept);
        let restored = match found {
            Some((version, checksum)) => store.restore(reservation, checksum, version).is_ok(),
            None => {
                self.prefetched.take(digest);
                ssd.counters.misses += readers.len() as u64;
                store.abort(reservation).expect("a reservation that the shard holds");
                false
            }
        };
        if restored {
            ssd.counters.reads += 1;
            ssd.counters.hits += readers.len() as u64;
        }
        self.serve_all(ssd, shard, digest, readers);
        self.keep_or_drop(ssd, shard, digest, restored);
        if found.is_none() {
            // Its record may be gone.
            ssd.tell_of(shard, digest);
        }
    }

    /// Ends a read in the tier.
    fn end_call(&mut self, token: Token) -> Option<ReadCall> {
        let call = self.calls.remove(&token.0)?;
        if self.reading.get(&call.digest) == Some(&token.0) {
            self.reading.remove(&call.digest);
        }
        Some(call)
    }

    /// Answers gets that waited for a read with the object, if it is in memory now.
    fn serve_all(&self, ssd: &Ssd, shard: &mut Shard, digest: Digest, readers: WaitingReaders) {
        for (reader, timing) in readers {
            let about = About { digest: Some(digest), bytes: 0 };
            shard.answers.outputs.waited(timing, about, timing.arrived_ns, shard.now_ns);
            self.serve(ssd, shard, digest, reader);
        }
    }

    /// Keeps an object that was read in memory if it is read often enough; otherwise drops it once its readers are
    /// done.
    fn keep_or_drop(&mut self, ssd: &mut Ssd, shard: &mut Shard, digest: Digest, restored: bool) {
        let stays = stays_for_replica(shard, digest);
        let now_ns = shard.now_ns;
        let was_read_for_replica = self.for_replicas.remove(&digest);
        if !restored {
            self.prefetched.take(digest);
            return;
        }
        if shard.store.objects().is_copy(digest) {
            // The record is what this shard keeps of a replica that memory has evicted.
            shard.store.drop_copy(digest);
            return;
        }
        // Kept like an object that was put, if for a replica.
        let for_replica = was_read_for_replica || stays;
        if for_replica {
            self.prefetched.take(digest);
        }
        let kept = match self.prefetched.until_ns(digest) {
            // A prefetched object waits for a get, until it expires.
            Some(until_ns) if until_ns > now_ns => true,
            Some(_) => {
                self.prefetched.take(digest);
                ssd.counters.prefetches_expired += 1;
                false
            }
            None if for_replica => true,
            None if ssd.frequency.estimate(digest) >= ssd.policy.promote_times => {
                ssd.counters.promotions += 1;
                true
            }
            None => {
                ssd.counters.passed_through += 1;
                false
            }
        };
        if !kept {
            shard.store.drop_copy(digest);
            return;
        }
        self.tails.want(ssd, shard, digest);
        // Also of one that is kept to be read: the walk through the SSD passes over what memory has.
        if for_replica || shard.lacks_replica(digest) {
            shard.effects.note(Effect::LacksReplica);
        }
    }

    /// Begins to read tails, first those from which a request waits to learn the tenant, as far as the tier accepts
    /// reads. Returns true if there was any progress.
    pub(super) fn read_tails(&mut self, ssd: &mut Ssd, shard: &mut Shard) -> bool {
        let progress = self.tenants.read(ssd, shard);
        self.tails.read(ssd, shard) || progress
    }

    /// Handles the end of the read of a tail.
    pub(super) fn key_read(
        &mut self,
        ssd: &mut Ssd,
        shard: &mut Shard,
        token: Token,
        version: Version,
        memory: &mut dyn Memory,
    ) {
        let read = Some(version);
        if !self.names.done(ssd, shard, token, read) && !self.tenants.done(ssd, shard, token, read) {
            self.tails.done(ssd, shard, token, read, memory);
        }
    }

    /// Handles a read that found a damaged record. Gets of its object wait if the record may be repaired.
    pub(super) fn missed(
        &mut self,
        ssd: &mut Ssd,
        shard: &mut Shard,
        token: Token,
        record: &RecordView,
        memory: &mut dyn Memory,
    ) {
        let done = self.tails.done(ssd, shard, token, None, memory)
            || self.names.done(ssd, shard, token, None)
            || self.tenants.done(ssd, shard, token, None);
        let call = if done { None } else { self.end_call(token) };
        let mut readers = Vec::new();
        if let Some(call) = call {
            shard.store.abort(call.reservation).expect("a reservation that the shard holds");
            self.prefetched.take(call.digest);
            self.for_replicas.remove(&call.digest);
            readers = call.readers;
        }
        let readers = ssd.record_damaged(shard, record, readers);
        ssd.counters.misses += readers.len() as u64;
        self.serve_all(ssd, shard, record.digest, readers);
    }
}

/// Returns true if an object from the SSD stays in memory, because it lacks a replica and memory has free room.
fn stays_for_replica(shard: &Shard, digest: Digest) -> bool {
    shard.lacks_replica(digest) && shard.free_for_replicas() > 0
}
