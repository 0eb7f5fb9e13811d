//! Sharing: objects are uploaded from memory to the shard's [`SharedTier`], and read from it if neither memory nor the
//! SSD has them.
//!
//! * [`Uploads`]: which objects are worth an upload, and their copies into packs.
//! * [`Reads`]: from the shared tier into memory.
//! * [`Removals`]: replies that wait until a removal is in the tier's log.
//!
//! The host calls [`Sharing::drive`] with its memory, and carries out the operations on the store.

mod reads;
mod removals;
mod uploads;

use std::collections::VecDeque;

use kvplane_proto::ids::Incarnation;
use kvplane_proto::map::{ShardKey, SlotOwners};
use kvplane_proto::{Digest, Status};
use kvplane_shared::{
    HeldObject, MapChange, OpId, Operation, Outcome, OwnerHistory, Owners, SharedEvent, SharedStats, SharedTier,
    SharedView, StoreError,
};

use self::reads::Reads;
use self::removals::Removals;
pub(super) use self::removals::SharedRemoval;
use self::uploads::Uploads;
use super::shard::Shard;
use super::shard::stream_read::Reader;
use super::shard::timing::Timing;
use super::tiering::Ssd;
use super::types::{CommittedObject, PoolMemory};

/// Time after all objects were forgotten in which none is uploaded: a client that removes what a list names finishes by
/// then, or begins again.
const QUIET_NS: u64 = 10_000_000_000;

/// Shared tier of a shard, and the traffic between it and memory.
pub(super) struct Sharing {
    tier: SharedTier,
    uploads: Uploads,
    reads: Reads,
    removals: Removals,
    history: OwnerHistory,
    /// Incarnation of the shard before the present one.
    last: Option<Incarnation>,
    /// Events for the operator.
    notices: VecDeque<SharedEvent>,
    /// Time until which nothing is uploaded, after all objects were forgotten.
    quiet_until_ns: u64,
}

/// Get that waited for an object, which may be in memory now.
pub(super) type WaitingReader = (Digest, Reader, Timing);

/// Most notices that wait for the host.
const NOTICES_MOST: usize = 256;

impl Sharing {
    /// Creates the state of a shard whose incarnation before was `last`, if there was one.
    pub(super) fn new(tier: SharedTier, last: Option<Incarnation>) -> Self {
        let uploads = Uploads::new(tier.config().upload);
        Self {
            tier,
            uploads,
            reads: Reads::default(),
            removals: Removals::default(),
            history: OwnerHistory::default(),
            last,
            notices: VecDeque::new(),
            quiet_until_ns: 0,
        }
    }

    /// Returns an object that can be read.
    pub(super) fn locate(&self, digest: Digest) -> Option<SharedView> {
        self.tier.locate(digest)
    }

    /// Returns true if a put or a removal of an object of this shard has to wait for a removal in the tier.
    pub(super) fn must_remove(&self, digest: Digest) -> bool {
        self.tier.owns(digest.slot()) && self.tier.may_have(digest)
    }

    /// Notes that an object was put or removed.
    pub(super) fn note_change(&mut self, digest: Digest) {
        self.tier.note_change(digest);
    }

    /// Notes that an object was imported. Returns true if the tier has the same bytes of it: nothing is removed then.
    pub(super) fn note_import(&mut self, made: &CommittedObject, checksum: u64) -> bool {
        self.tier.note_import(made.digest, made.bytes, checksum, made.version)
    }

    /// Checks that this many more removals can be taken.
    pub(super) fn may_remove(&self, removals: usize) -> Result<(), Status> {
        if self.tier.may_remove(removals) { Ok(()) } else { Err(Status::Busy) }
    }

    /// Removes an object; the reply of `cause` is settled when the removal is in the log.
    pub(super) fn remove(&mut self, digest: Digest, cause: SharedRemoval) {
        let token = self.removals.add(digest, cause);
        self.tier.remove(digest, token);
    }

    /// Returns true while a reply waits for the removal of an object.
    pub(super) fn is_removing(&self, digest: Digest) -> bool {
        self.removals.has(digest)
    }

    /// Counts a put of an object.
    pub(super) fn note_put(&mut self, digest: Digest, now_ns: u64) {
        self.uploads.note_put(digest, now_ns);
    }

    /// Counts a get of an object.
    pub(super) fn note_get(&mut self, digest: Digest, now_ns: u64) {
        if self.uploads.is_worth_it(digest) && self.tier.may_want(digest) {
            self.uploads.want(digest, now_ns);
        }
    }

    /// Begins to read an object, or joins a read in flight.
    pub(super) fn read(&mut self, shard: &mut Shard, view: &SharedView, reader: Reader) -> Result<(), Status> {
        self.reads.read(&mut self.tier, shard, view, reader)
    }

    /// Forgets all objects, as objects that only a list names are about to be removed. Returns false until that is
    /// durable: the caller is to try again.
    pub(super) fn forget(&mut self, now_ns: u64) -> bool {
        if now_ns >= self.quiet_until_ns && self.tier.has_any() {
            self.tier.forget_all();
            self.uploads.clear();
            self.quiet_until_ns = now_ns.saturating_add(QUIET_NS);
        }
        !self.tier.is_settling()
    }

    /// Begins another incarnation of the shard.
    pub(super) fn begin_incarnation(&mut self, incarnation: Incarnation, before: ShardKey) {
        self.last = Some(before.incarnation);
        self.uploads.clear();
        self.tier.begin_incarnation(incarnation);
    }

    /// Follows a map of this cluster state: slots are released and taken over.
    pub(super) fn follow(&mut self, shard: &Shard, state: u64, owners: &SlotOwners, missed: bool) {
        let me = shard.ownership.key();
        let map = Owners {
            state,
            epoch: owners.epoch,
            since: owners.since,
            from: owners.from,
            owner: &|slot| owners.owner(slot),
            owner_before: &|slot| owners.owner_before(slot),
            is_member: &|shard| owners.address(shard).is_some(),
            has_lasted: owners.has_lasted(me),
        };
        let (owned, sources) = self.history.follow(&map, me, self.last);
        let change = MapChange {
            state,
            epoch: owners.epoch,
            since: owners.since,
            owned,
            missed,
            sources,
            members: owners.incarnations().collect(),
        };
        self.tier.follow(change, shard.now_ns);
    }

    /// Lets the tier work: passes it objects to upload, and its operations to `start`. Returns the gets whose objects
    /// may be in memory now, and true if there was any progress.
    pub(super) fn drive(
        &mut self,
        shard: &mut Shard,
        ssd: Option<&Ssd>,
        memory: &mut dyn PoolMemory,
        start: &mut dyn FnMut(OpId, Operation),
    ) -> (Vec<WaitingReader>, bool) {
        let now_ns = shard.now_ns;
        let mut progress = false;
        if now_ns >= self.quiet_until_ns {
            progress |= self.uploads.drive(&mut self.tier, shard, ssd, memory);
        }
        progress |= self.tier.step(now_ns, &|view, checksum| held(shard, ssd, view, checksum));
        let mut done = Vec::new();
        while let Some(event) = self.tier.poll_event() {
            progress = true;
            match event {
                SharedEvent::Read { token, version, checksum, bytes } => {
                    self.reads.done(shard, token, Some((version, checksum, &bytes)), memory, &mut done);
                }
                SharedEvent::Missed { token } => self.reads.done(shard, token, None, memory, &mut done),
                SharedEvent::Removed { token, is_written } => self.removals.end(shard, token, is_written),
                notice if self.notices.len() < NOTICES_MOST => self.notices.push_back(notice),
                _ => {}
            }
        }
        while let Some((id, operation)) = self.tier.poll(now_ns) {
            progress = true;
            start(id, operation);
        }
        (done, progress)
    }

    /// Takes the result of an operation on the store.
    pub(super) fn complete(&mut self, now_ns: u64, id: OpId, result: Result<Outcome, StoreError>) {
        self.tier.complete(now_ns, id, result);
    }

    /// Writes what waits to be uploaded. Returns true once nothing is left, or the store fails.
    pub(super) fn close(&mut self, now_ns: u64) -> bool {
        self.tier.close(now_ns)
    }

    /// Writes what the next owner needs to find what the store has. Returns true once it is written, or if the store
    /// fails.
    pub(super) fn settle(&mut self, now_ns: u64) -> bool {
        self.tier.settle(now_ns)
    }

    /// Returns the counters.
    pub(super) fn stats(&self) -> SharedStats {
        let stats = self.tier.stats();
        SharedStats { skipped: stats.skipped + self.uploads.skipped(), ..stats }
    }

    /// Returns the next event for the operator.
    pub(super) fn poll_notice(&mut self) -> Option<SharedEvent> {
        self.notices.pop_front()
    }

    /// Returns the time at which [`Self::drive`] is to be called again at the latest.
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        let uploads = self.uploads.poll_timeout().map(|at_ns| at_ns.max(self.quiet_until_ns));
        [self.tier.poll_timeout(), uploads].into_iter().flatten().min()
    }
}

/// Returns what memory or the SSD has of an object of a former owner: a replica that this shard kept for that one, what
/// was migrated from it, or what this shard has itself kept over a restart.
fn held(shard: &Shard, ssd: Option<&Ssd>, view: &SharedView, checksum: u64) -> HeldObject {
    let SharedView { digest, version, bytes, .. } = *view;
    if let Some(object) = shard.peek(digest) {
        let is_same = object.extent.bytes == u64::from(bytes) && object.checksum == checksum;
        return if is_same { HeldObject::Same(object.version) } else { HeldObject::Other };
    }
    // The index of an SSD has no checksums.
    match ssd.and_then(|ssd| ssd.locate(digest)) {
        Some(record) if record.version != version => HeldObject::Other,
        _ => HeldObject::Absent,
    }
}
