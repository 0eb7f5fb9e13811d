//! Kept memory: a pool that outlives the process, with an image of its objects for the next one.
//!
//! The image says by which map the shard served its slots last. Its objects count as those on an SSD do
//! ([`super::tiering`]): by the first map that gives this shard slots, those of a slot are served again if no other
//! shard can have had the slot meanwhile. Unlike an SSD, memory is not reconciled with the changes of interim owners:
//! the objects of all other slots are dropped. Until that map, nothing is allocated in the pool, and the image stays
//! valid.
//!
//! A process that continues the former one by a handover also continues its replication: the image has the replicas of
//! other owners' objects, and which replica owners may have replicas of its own ones. Owners and replica owners see the
//! handover from the incarnations ([`ShardKey::continues`]), so they expect both. Where the image does not count, or
//! does not say enough, all that replica owners may have is outstanding. Any other process takes objects without
//! replicas back, and no replica.
//!
//! Bytes are never trusted: each object is compared with its checksum before its bytes are lent the first time, and
//! each tail before its object is served.

use core::fmt;
use std::sync::Arc;

use kvplane_proto::Digest;
use kvplane_proto::checksum::payload_checksum;
use kvplane_proto::ids::{Epoch, Incarnation, NodeId, SLOTS, ShardId, Slot, Version};
use kvplane_proto::map::{ReplicaSet, ShardKey};
use kvplane_tier::SlotSet;

use super::shard::Shard;
use super::shard::tail::tail_within;
use super::tiering::reconciliation::verdict::{SlotJudge, SlotVerdict, distrust};
use super::tiering::{Tiering, VoidCause};
use super::types::{MapStanding, PoolBytes};
use crate::Replica;
use crate::image::{ImageContents, ImageError, ImageOrigin, KeptObject, MemoryIdentity, OutstandingReplica};
use crate::store::{KeptCounters, KeptObjects, PoolSums, TakeBackError, former_objects};

/// Image of a former process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct FormerImage {
    /// Process that wrote it.
    pub origin: ImageOrigin,
    /// Objects, and extents that are not used.
    pub contents: ImageContents,
    /// True if another incarnation of the node was a member since it was written: none of its objects count.
    pub is_void: bool,
}

impl FormerImage {
    /// Compares the image with the incarnation of the node that was a member of the cluster last: one that another
    /// incarnation wrote is a copy of earlier files, or the node ran without this memory since.
    pub fn expect_member(&mut self, last: Incarnation) {
        self.is_void |= self.origin.incarnation != last;
    }
}

/// Difference between the memory of a former process and that of this one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum LayoutChange {
    /// The files are those of another shard.
    Shard { former: ShardId, now: ShardId },
    /// The node has another number of shards.
    Shards { former: u16, now: u16 },
    /// The pool has another size, in bytes.
    Pool { former: u64, now: u64 },
    /// Space is allocated in other units, in bytes.
    Unit { former: u64, now: u64 },
}

impl LayoutChange {
    /// Returns the first difference that decides about the places of objects, if there is one.
    pub(super) fn between(former: &MemoryIdentity, now: &MemoryIdentity) -> Option<Self> {
        if former.shard != now.shard {
            return Some(Self::Shard { former: former.shard, now: now.shard });
        }
        if former.shards != now.shards {
            return Some(Self::Shards { former: former.shards, now: now.shards });
        }
        let (units, pools) = ((former.unit_bytes, now.unit_bytes), (former.pool_bytes, now.pool_bytes));
        let pool = (pools.0 != pools.1).then_some(Self::Pool { former: pools.0, now: pools.1 });
        pool.or_else(|| (units.0 != units.1).then_some(Self::Unit { former: units.0, now: units.1 }))
    }
}

impl fmt::Display for LayoutChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shard { former, now } => write!(f, "the files of shard {now} are those of shard {former}"),
            Self::Shards { former, now } => {
                write!(f, "the node has another number of shards: {now}, and {former} before")
            }
            Self::Pool { former, now } => {
                write!(f, "the pool of the shard has another size: {now} bytes, and {former} before")
            }
            Self::Unit { former, now } => write!(
                f,
                "memory is allocated in other units: {now} bytes, and {former} before (a node with SSDs has larger \
                 ones than a node without)"
            ),
        }
    }
}

/// Reason why none of the objects of an image are served.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Discard {
    /// There is no valid image of them.
    Image(ImageError),
    /// Places in the pool are other ones.
    Layout(LayoutChange),
    /// They may not be the newest.
    Void(VoidCause),
    /// Another incarnation of the node was a member since: the files are a copy, or the node ran without this memory.
    OtherIncarnation,
    /// The node ran with its SSD and without this memory.
    OtherOpening,
    /// The store did not take them.
    TakeBack(TakeBackError),
}

impl fmt::Display for Discard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Image(error) => error.fmt(f),
            Self::Layout(change) => change.fmt(f),
            Self::Void(cause) => cause.fmt(f),
            Self::OtherIncarnation => f.write_str(
                "the node ran without it since, or its files were copied or restored: another process of the node was \
                 the last one",
            ),
            Self::OtherOpening => f.write_str("the node ran without it since, with the same SSD or with another one"),
            Self::TakeBack(error) => error.fmt(f),
        }
    }
}

/// Objects of the former process: what became of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct KeptReport {
    /// Objects that are served again, and their bytes.
    pub objects: u64,
    /// Bytes of these.
    pub bytes: u64,
    /// Objects that were dropped because others may have changed their slots, or have them now.
    pub dropped: u64,
    /// Objects that were dropped because the shard takes fewer than the former process's: those that were due for
    /// eviction first.
    pub left_out: u64,
    /// Objects that were dropped because their bytes, or their tails, were damaged.
    pub damaged: u64,
    /// Objects that were read, and were whole.
    pub checked: u64,
    /// Bytes that are not used, because a process that had mapped the pool did not let go of them.
    pub withheld_bytes: u64,
    /// Reason why none is served, if so.
    pub discard: Option<Discard>,
}

/// Replicas that other shards may have of a former process's objects, beside those that the objects' records name.
#[derive(Debug, Default)]
pub(super) struct LeftReplicas {
    /// Replicas to be removed before a request for their objects is acknowledged.
    pub(super) outstanding: Vec<OutstandingReplica>,
    /// Objects of which replica owners have dropped replicas that clients may still read by their leases.
    pub(super) lapsed: Vec<Digest>,
}

/// Kept memory of a shard.
#[derive(Debug)]
pub(super) struct KeptMemory {
    /// Image of the former process, until a map decides about its objects.
    found: Option<Box<FormerImage>>,
    sums: Arc<dyn PoolSums>,
    /// Newest map received.
    standing: Option<(Epoch, MapStanding)>,
    report: Option<KeptReport>,
    untold: bool,
    /// Number of damaged objects at the last report of damage.
    damage_told: u64,
    /// Extents that no process of this host's present run may use.
    withheld: Vec<crate::Extent>,
    /// True once a map with slots has decided.
    is_decided: bool,
    left: Option<LeftReplicas>,
}

/// Former process whose replication this one continues, if it does, and the map by which it does.
struct Predecessor<'a> {
    continues: bool,
    /// Replicas of other owners' objects are as they were, and so are the numbers of replica owners.
    origin: ImageOrigin,
    /// Incarnations by the former process's map.
    members: Vec<(NodeId, Incarnation)>,
    judge: &'a SlotJudge<'a>,
}

impl Predecessor<'_> {
    /// Returns true if no slot has had other owners, or replica owners, since the former process.
    fn is_same_layout(&self) -> bool {
        self.judge.standing.since <= self.origin.epoch
    }

    /// Returns true if a shard is the one that the former process knew under this node, or continues it; `None` if the
    /// former process knew none.
    fn is_continued(&self, shard: ShardKey) -> Option<bool> {
        let at = self.members.binary_search_by_key(&shard.node, |(node, _)| *node).ok()?;
        Some(shard.incarnation.continues(self.members[at].1))
    }

    /// Returns true if the owner of this slot, for which this shard is a replica owner now, was its owner when the
    /// former process ended, and has been since.
    fn had_owner(&self, slot: Slot, owner: ShardKey) -> bool {
        let told = self.judge.owners.filter(|owners| owners.from <= self.origin.epoch);
        let was = if self.is_same_layout() { Some(owner) } else { told.and_then(|owners| owners.owner_before(slot)) };
        was.is_some_and(|was| (was.node, was.shard) == (owner.node, owner.shard))
            && self.is_continued(owner) == Some(true)
    }

    /// Removes the replicas from an image that cannot be kept, and the records of the others; returns these.
    fn take_records(&self, shard: &Shard, contents: &mut ImageContents) -> Vec<(Digest, Version, ReplicaSet)> {
        contents.retain(shard.store.config().unit_bytes, |object| {
            let relation = shard.replicas.relation(object.digest.slot());
            !object.replica
                || self.continues && relation.is_some_and(|now| self.had_owner(object.digest.slot(), now.owner))
        });
        let own = contents.objects.iter().filter(|object| !object.replica && !object.at.is_empty());
        if self.continues { own.map(|object| (object.digest, object.version, object.at)).collect() } else { Vec::new() }
    }

    /// Records again which replica owners may have replicas of the objects that were taken back. Returns what they may
    /// have beside.
    fn restore_records(
        &self,
        shard: &mut Shard,
        records: Vec<(Digest, Version, ReplicaSet)>,
        outstanding: Vec<OutstandingReplica>,
    ) -> LeftReplicas {
        let is_owned = |digest: Digest| (self.judge.owned)(digest.slot().0);
        let mut left = LeftReplicas { outstanding, lapsed: Vec::new() };
        left.outstanding.retain(|replica| is_owned(replica.digest));
        for (digest, version, at) in records.into_iter().filter(|(digest, ..)| is_owned(*digest)) {
            let owners = shard.replicas.owners_of(digest.slot()).to_vec();
            for (number, owner) in owners.into_iter().enumerate() {
                // By another layout the numbers are those of other replica owners.
                if !self.is_same_layout() {
                    left.outstanding.push(OutstandingReplica { digest, owner });
                } else if at.has(number) && self.is_continued(owner) == Some(false) {
                    left.lapsed.push(digest);
                } else if at.has(number)
                    && !(self.is_continued(owner) == Some(true)
                        && shard.store.objects_mut().note_copy(digest, version, number, true))
                {
                    left.outstanding.push(OutstandingReplica { digest, owner });
                }
            }
        }
        // What was being sent may be there, or not.
        for OutstandingReplica { digest, owner } in &left.outstanding {
            let number = shard.replicas.owners_of(digest.slot()).iter().position(|now| now.continues(*owner));
            if let Some((number, object)) = number.zip(shard.peek(*digest)) {
                shard.store.objects_mut().note_copy(*digest, object.version, number, false);
            }
        }
        left
    }
}

/// Returns everything that replica owners may have of the objects of these slots.
fn all_replicas(shard: &Shard, owned: &dyn Fn(u16) -> bool) -> LeftReplicas {
    let slots = (0..SLOTS as u16).filter(|slot| owned(*slot)).map(Slot);
    let of = |slot: Slot| {
        let owners = shard.replicas.owners_of(slot).iter();
        owners.map(move |owner| OutstandingReplica { digest: slot.first_digest(), owner: *owner })
    };
    LeftReplicas { outstanding: slots.flat_map(of).collect(), lapsed: Vec::new() }
}

impl KeptMemory {
    pub(super) fn new(found: Result<Option<FormerImage>, Discard>, sums: Arc<dyn PoolSums>) -> Self {
        let (found, discard) = found.map_or_else(|discard| (None, Some(discard)), |found| (found, None));
        let withheld = found.as_ref().map_or_else(Vec::new, |found| found.contents.withheld.clone());
        // Without a former process there is nothing to decide.
        let report = found.is_none().then(|| KeptReport { discard, ..KeptReport::default() });
        Self {
            found: found.map(Box::new),
            sums,
            standing: None,
            report,
            untold: discard.is_some(),
            damage_told: 0,
            withheld,
            is_decided: false,
            left: None,
        }
    }

    /// Returns the replicas that other shards may have, once, after the objects were decided about.
    pub(super) const fn take_left_replicas(&mut self) -> Option<LeftReplicas> {
        self.left.take()
    }

    /// Notes the newest map received.
    pub(super) const fn heard(&mut self, epoch: Epoch, standing: MapStanding) {
        self.standing = Some((epoch, standing));
    }

    /// Returns true if no map has decided about the former process's objects yet.
    pub(super) const fn is_pending(&self) -> bool {
        self.found.is_some()
    }

    /// Returns true if the pending image counts, and a map was received: the present incarnation is a member, which the
    /// next process has to find in the image.
    pub(super) fn is_inherited(&self) -> bool {
        self.standing.is_some() && self.found.as_ref().is_some_and(|found| !found.is_void)
    }

    /// Returns what became of the former process's objects, with what readers found since.
    pub(super) fn report(&self, shard: &Shard) -> Option<KeptReport> {
        let KeptCounters { checked, damaged, .. } = former_objects(&shard.store);
        self.report.map(|report| KeptReport { checked, damaged: report.damaged + damaged, ..report })
    }

    /// Like [`Self::report`], once.
    pub(super) fn poll_report(&mut self) -> Option<KeptReport> {
        self.report.filter(|_| core::mem::take(&mut self.untold))
    }

    /// Returns the number of damaged objects when the first was found, and whenever it has doubled.
    pub(super) fn poll_damage(&mut self, shard: &Shard) -> Option<u64> {
        let damaged = self.report(shard)?.damaged;
        if damaged < (2 * self.damage_told).max(1) {
            return None;
        }
        self.damage_told = damaged;
        Some(damaged)
    }

    /// Returns the newest map received, and its standing.
    pub(super) const fn standing(&self) -> Option<(Epoch, MapStanding)> {
        self.standing
    }

    /// Decides about the former process's objects by a map that gives this shard slots, before they are served.
    pub(super) fn weigh(&mut self, shard: &mut Shard, tiering: Option<&Tiering>, judge: &SlotJudge<'_>) {
        if judge.epoch == Epoch(0) || !judge.has_slots() {
            return;
        }
        let is_first = !core::mem::replace(&mut self.is_decided, true);
        let Some(found) = self.found.take() else {
            if is_first && judge.me.incarnation.is_successor() {
                self.left = Some(all_replicas(shard, judge.owned));
            }
            return;
        };
        let FormerImage { origin, mut contents, is_void } = *found;
        let all = contents.objects.len() as u64;
        let mut report = KeptReport::default();
        // The SSD of a replica owner does not keep replicas over a restart.
        let (now, former) = (judge.me.incarnation, origin.incarnation);
        let continues = !is_void && now > former && now.continues(former) && tiering.is_none();
        let members = core::mem::take(&mut contents.members);
        let predecessor = Predecessor { continues, origin, members, judge };
        let outstanding = core::mem::take(&mut contents.outstanding);
        let records = predecessor.take_records(shard, &mut contents);
        if continues {
            KeptObjects::from(&mut shard.store).continue_versions(&contents);
        }
        let served = match is_void {
            true => self.withhold(shard, &mut contents, &mut report).and(Err(Discard::OtherIncarnation)),
            false => self.serve(shard, tiering, judge, origin, &mut contents, &mut report),
        };
        match served {
            Ok(()) if continues => self.left = Some(predecessor.restore_records(shard, records, outstanding)),
            Ok(()) => {}
            Err(discard) => report = KeptReport { dropped: all, discard: Some(discard), ..KeptReport::default() },
        }
        if self.left.is_none() && judge.me.incarnation.is_successor() {
            self.left = Some(all_replicas(shard, judge.owned));
        }
        self.withheld = contents.withheld;
        report.withheld_bytes = self.withheld.iter().map(|extent| extent.bytes).sum();
        (self.report, self.untold) = (Some(report), true);
    }

    fn serve(
        &self,
        shard: &mut Shard,
        tiering: Option<&Tiering>,
        judge: &SlotJudge<'_>,
        origin: ImageOrigin,
        contents: &mut ImageContents,
        report: &mut KeptReport,
    ) -> Result<(), Discard> {
        let unit_bytes = shard.store.config().unit_bytes;
        if let Some(cause) = distrust(origin.state, origin.epoch, judge.epoch, judge.standing) {
            self.withhold(shard, contents, report)?;
            return Err(Discard::Void(cause));
        }
        // A device counts its openings: each of them may have changed what memory does not know.
        let opening = opening_of(tiering);
        if opening.saturating_sub(1) != origin.opening || (opening == 0) != (origin.opening == 0) {
            self.withhold(shard, contents, report)?;
            return Err(Discard::OtherOpening);
        }
        let mut known = SlotSet::none();
        for slot in (0..kvplane_proto::ids::SLOTS as u16).map(Slot) {
            if judge.judge(slot, origin.epoch, origin.state) == SlotVerdict::Known {
                known.insert(slot);
            }
        }
        let before = contents.objects.len();
        contents.retain(unit_bytes, |object| object.replica || known.has(object.digest.slot()));
        report.dropped = (before - contents.objects.len()) as u64;
        let (pool_bytes, before) = (shard.store.config().pool_bytes, contents.objects.len());
        contents.retain(unit_bytes, |object| has_whole_tail(object, pool_bytes, &*self.sums));
        report.damaged = (before - contents.objects.len()) as u64;
        self.take_back(shard, contents, report)
    }

    /// Takes none of the objects back. Memory that other processes may still access is not used in any case.
    fn withhold(
        &self,
        shard: &mut Shard,
        contents: &mut ImageContents,
        report: &mut KeptReport,
    ) -> Result<(), Discard> {
        contents.retain(shard.store.config().unit_bytes, |_| false);
        self.take_back(shard, contents, report)
    }

    fn take_back(&self, shard: &mut Shard, contents: &ImageContents, report: &mut KeptReport) -> Result<(), Discard> {
        KeptObjects::from(&mut shard.store).take_back(contents, &self.sums).map_err(Discard::TakeBack)?;
        let taken = former_objects(&shard.store);
        (report.objects, report.bytes) = (taken.objects, taken.bytes);
        report.left_out = (contents.objects.len() as u64).saturating_sub(taken.objects);
        Ok(())
    }

    /// Returns the image of this shard's objects at the end of its process: `None` while that of the former process
    /// still counts. With `lends`, processes may still access the pool through their mappings. `outstanding` are the
    /// replicas at replica owners that are to be removed, or in flight.
    pub(super) fn image(
        &self,
        shard: &mut Shard,
        tiering: Option<&Tiering>,
        pool: &dyn PoolBytes,
        lends: bool,
        outstanding: Vec<OutstandingReplica>,
    ) -> Option<FormerImage> {
        if self.is_pending() {
            return None;
        }
        let ownership = &shard.ownership;
        let origin = ImageOrigin {
            incarnation: ownership.identity().incarnation,
            state: self.standing.map_or(0, |(_, standing)| standing.state),
            epoch: ownership.epoch(),
            opening: opening_of(tiering),
        };
        let (owned, members) = (ownership.owned().clone(), ownership.incarnations().collect());
        let replicas = &shard.replicas;
        let is_kept = |digest: Digest, replica: Replica| match replica {
            Replica::Second => replicas.relation(digest.slot()).is_some(),
            Replica::None | Replica::First | Replica::Awaited => owned.has(digest.slot()),
        };
        let mut contents = KeptObjects::from(&mut shard.store).collect(is_kept, lends);
        (contents.members, contents.outstanding) = (members, outstanding);
        for object in contents.objects.iter_mut().filter(|object| object.tail.bytes > 0) {
            let tail = tail_within(object.tail.offset, pool.bytes(), |at, into| pool.read(at, into));
            (object.tail.bytes, object.tail.checksum) = (tail.len() as u32, payload_checksum(&tail));
        }
        for extent in &self.withheld {
            if !contents.withheld.contains(extent) {
                contents.withheld.push(*extent);
            }
        }
        Some(FormerImage { origin, contents, is_void: false })
    }
}

/// Returns the number of the present opening of the SSD; 0 without one.
pub(super) fn opening_of(tiering: Option<&Tiering>) -> u64 {
    tiering.map_or(0, |tiering| tiering.ssd.opening())
}

/// Returns true if an object has no tail, or one whose bytes match its checksum.
fn has_whole_tail(object: &KeptObject, pool_bytes: u64, sums: &dyn PoolSums) -> bool {
    let tail = &object.tail;
    let is_inside = tail.offset.checked_add(tail.bytes.into()).is_some_and(|end| end <= pool_bytes);
    tail.bytes == 0 || is_inside && sums.checksum(tail.offset, tail.bytes.into()) == tail.checksum
}
