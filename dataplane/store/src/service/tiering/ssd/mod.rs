//! SSD of a shard: the visibility of its records, and the state that its users share.

mod doubts;
mod lost;
mod removals;
mod replicas;
mod sweep;

use std::collections::BTreeMap;

use kvplane_proto::ids::Slot;
use kvplane_proto::message::PutAck;
use kvplane_proto::tenants::TenantSsdLease;
use kvplane_proto::{Digest, Status};
use kvplane_tier::{Ack, Memory, RecordView, Removal, RemoveError, TenantLimit, Tier, TierUse, Token};

use self::doubts::Doubts;
use self::lost::DamagedRecords;
pub(in crate::service) use self::lost::WaitingReaders;
pub(in crate::service) use self::removals::RemovalCause;
use self::removals::Removals;
use self::replicas::ReplicaRecords;
use self::sweep::Sweep;
use super::counters::TierCounters;
use super::policy::{Frequency, TierPolicy};
use crate::service::shard::Shard;
use crate::service::shard::deferrals::{DeferredItem, Replies};
use kvplane_proto::events::{ObjectChange, ObjectMedium};

/// Use of an SSD by tenants.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SsdUsage {
    /// Bytes that records can take; 0 without an SSD.
    pub bytes: u64,
    /// Use of each tenant that has records or a limit.
    pub tenants: Vec<TierUse>,
}

/// Tier of a shard, the visibility of its records, and removals from it.
#[derive(Debug)]
pub(in crate::service) struct Ssd {
    pub(super) tier: Tier,
    pub(in crate::service) policy: TierPolicy,
    /// Estimate of how often each object was put or read lately.
    pub(super) frequency: Frequency,
    pub(super) removals: Removals,
    /// Slots that went to other owners.
    pub(super) sweep: Sweep,
    /// Slots that may have had interim owners.
    pub(super) doubts: Doubts,
    /// Slots with records of replicas.
    pub(in crate::service) replicas: ReplicaRecords,
    /// Records that could not be read whole.
    pub(in crate::service) damaged: DamagedRecords,
    pub(super) counters: TierCounters,
    /// Weights of the tenants' requests for the device, where they are not 1.
    weights: BTreeMap<u32, u32>,
    tokens: u64,
}

impl Ssd {
    pub(super) fn new(tier: Tier, policy: TierPolicy) -> Self {
        Self {
            tier,
            policy,
            frequency: Frequency::new(),
            removals: Removals::default(),
            sweep: Sweep::new(),
            doubts: Doubts::new(),
            replicas: ReplicaRecords::new(),
            damaged: DamagedRecords::default(),
            counters: TierCounters::default(),
            weights: BTreeMap::new(),
            tokens: 0,
        }
    }

    /// Returns a token that no request to the tier has had so far.
    pub(super) const fn new_token(&mut self) -> Token {
        self.tokens += 1;
        Token(self.tokens)
    }

    /// Sets the leases and weights of tenants; tenants that are not listed have no limit, and weight 1.
    pub(in crate::service) fn set_tenants(&mut self, leases: &[TenantSsdLease]) {
        let limit = |lease: &TenantSsdLease| Some(TenantLimit { number: lease.number, bytes: lease.ssd_bytes? });
        self.tier.tenants().set_limits(&leases.iter().filter_map(limit).collect::<Vec<_>>());
        self.weights = leases.iter().map(|lease| (lease.number, lease.weight.max(1))).collect();
    }

    /// Returns the use of the device by tenants; `None` while recovery has not found all of it.
    pub(in crate::service) fn usage(&mut self) -> Option<SsdUsage> {
        let is_known = self.is_recovered() || self.is_degraded();
        let (bytes, tenants) = (self.tier.tenants().capacity_bytes(), self.tier.tenants().uses());
        is_known.then_some(SsdUsage { bytes, tenants })
    }

    /// Returns the weight of a tenant's requests for the device.
    pub(in crate::service) fn weight_of(&self, tenant: u32) -> u32 {
        self.weights.get(&tenant).copied().unwrap_or(1)
    }

    /// Returns the record of an object, if it is visible. A damaged one is, as long as it is being repaired.
    pub(in crate::service) fn locate(&self, digest: Digest) -> Option<RecordView> {
        self.locate_any(digest).filter(|_| !self.replicas.is_open(digest.slot()))
    }

    /// Returns the record of a replica that this shard has as a replica owner.
    pub(in crate::service) fn locate_replica(&self, digest: Digest) -> Option<RecordView> {
        if self.replicas.is_open(digest.slot()) { self.locate_any(digest) } else { None }
    }

    /// Returns the record of an object, or of a replica.
    pub(in crate::service) fn locate_any(&self, digest: Digest) -> Option<RecordView> {
        let view = self.tier.locate(digest).or_else(|| self.damaged.view(digest))?;
        (!self.is_void(&view)).then_some(view)
    }

    /// Returns true if a record is hidden from everybody: the object is being removed, or its slot belongs, or has
    /// belonged, to another owner.
    fn is_void(&self, view: &RecordView) -> bool {
        self.removals.has(view.digest) || self.sweep.hides(view) || self.doubts.hides(view)
    }

    /// Returns true if a record is hidden from lists: it is void, or a replica's.
    fn is_hidden(&self, view: &RecordView) -> bool {
        self.replicas.is_open(view.digest.slot()) || self.is_void(view)
    }

    /// Returns the visible records among `most` entries of the index from a position on, and the next position.
    pub(in crate::service) fn walk(&self, from: usize, most: usize) -> (Vec<RecordView>, Option<usize>) {
        let (mut views, next) = self.tier.walk(from, most);
        if next.is_none() {
            views.extend(self.damaged.views());
        }
        (views.into_iter().filter(|view| !self.is_hidden(view)).collect(), next)
    }

    /// Returns the visible records of a range of the order of lists.
    pub(in crate::service) fn between(&self, from: u64, to: u64) -> impl Iterator<Item = RecordView> {
        // Same filter as `locate`, applied to entries already read.
        let damaged = self.damaged.views().copied();
        let damaged = damaged.filter(move |view| (from..to).contains(&self.point_of(view.digest).into()));
        self.tier.between(from, to).chain(damaged).filter(|view| !self.is_hidden(view))
    }

    /// Returns the number of entries of the index.
    pub(in crate::service) fn places(&self) -> usize {
        self.tier.places()
    }

    /// Returns the position of an object in the order of lists.
    pub(in crate::service) fn point_of(&self, digest: Digest) -> u32 {
        self.tier.point_of(digest)
    }

    /// Returns the number of the present opening of the device, which counts them from 1.
    pub(in crate::service) const fn opening(&self) -> u64 {
        self.tier.incarnation()
    }

    /// Returns true once recovery has read every record.
    pub(in crate::service) fn is_recovered(&self) -> bool {
        self.tier.is_recovered()
    }

    /// Returns true while the SSD is in recovery after a start.
    pub(in crate::service) fn is_recovering(&self) -> bool {
        self.tier.is_recovering()
    }

    /// Returns true if a slot is in doubt, or was until a map assigned it to this shard.
    pub(in crate::service) fn is_doubted(&self, slot: Slot) -> bool {
        self.doubts.has(slot)
    }

    /// Returns true if records of served slots are hidden that reconciliation may yet make visible.
    pub(in crate::service) fn is_comparing(&self) -> bool {
        self.doubts.are_compared()
    }

    /// Returns true if the SSD is degraded: it takes no writes any more.
    pub(in crate::service) fn is_degraded(&self) -> bool {
        self.tier.degraded().is_some()
    }

    /// Returns true if an object of this length fits a record.
    pub(super) fn takes(&self, bytes: u64) -> bool {
        bytes <= u64::from(self.tier.config().max_object_bytes)
    }

    /// Returns true if the SSD accepts an object of this length now.
    pub(in crate::service) fn fits(&self, bytes: u64) -> bool {
        self.takes(bytes) && !self.is_degraded()
    }

    /// Returns true if the reply of a put waits for the SSD.
    pub(super) fn is_awaited(&self, asked: Option<PutAck>) -> bool {
        self.policy.ack_of(asked) != PutAck::Memory
    }

    /// Checks that the SSD can take the tombstones that a put, `replacing` or not, may need.
    pub(in crate::service) fn may_replace(&self, digest: Digest, replacing: bool) -> Result<(), Status> {
        let removes = replacing || may_stand(&self.tier, digest);
        let is_full = removes && !self.removals.has_room(1);
        let takes_none = self.is_degraded();
        // A degraded tier takes no tombstones, so that recovery has to find its records before a put can be decided.
        let is_late = !replacing && takes_none && self.tier.is_recovering();
        if is_full || is_late {
            return Err(Status::Busy);
        }
        // The record can be neither removed nor replaced: the put is refused before memory loses the object that it
        // has.
        if replacing && takes_none && self.tier.may_have(digest) { Err(Status::NoSpace) } else { Ok(()) }
    }

    /// Returns true if the SSD has, or may yet recover, a record that an object that was put, `replacing` or not, takes
    /// the place of. Such a record may be unknown, as during recovery.
    pub(in crate::service) fn must_remove(&self, digest: Digest, replacing: bool) -> bool {
        match self.tier.degraded() {
            // Also removes hidden records, and those that recovery found while the put was in flight.
            None => replacing || may_stand(&self.tier, digest),
            // A degraded tier takes no tombstones: records that it has, or may have, are in the way.
            Some(_) => replacing && self.tier.may_have(digest),
        }
    }

    /// Enqueues the removal of an object, and hides the object until it is written.
    pub(in crate::service) fn queue_removal(&mut self, digest: Digest, cause: RemovalCause) {
        self.damaged.forget(digest);
        self.removals.add(digest, cause);
    }

    /// Checks that this many more removals may be enqueued.
    pub(in crate::service) fn may_remove(&self, removals: usize) -> Result<(), Status> {
        if self.removals.has_room(removals) { Ok(()) } else { Err(Status::Busy) }
    }

    /// Removes objects; an item of a reply is settled with each removal that is written.
    pub(in crate::service) fn remove(
        &mut self,
        shard: &mut Shard,
        digests: &[Digest],
        answer: &impl Fn(usize) -> DeferredItem,
    ) {
        for (item, digest) in digests.iter().enumerate() {
            self.queue_removal(*digest, RemovalCause::Requested(answer(item)));
        }
        digests.iter().for_each(|digest| self.tell_of(shard, *digest));
    }

    /// Passes waiting removals to the tier, as far as it accepts them. Returns true if there was any progress.
    pub(super) fn give_removals(&mut self, shard: &mut Shard, memory: &mut dyn Memory) -> bool {
        let mut progress = false;
        while let Some((digest, cause)) = self.removals.next() {
            let ack = if self.policy.ack == PutAck::Durable { Ack::Durable } else { Ack::Buffered };
            let token = self.new_token();
            let taken = match cause {
                RemovalCause::Replaced { .. } => self.tier.remove_replaced(shard.now_ns, digest, ack, token, memory),
                RemovalCause::Requested(_) | RemovalCause::Replica(_) | RemovalCause::Swept => {
                    self.tier.remove(shard.now_ns, digest, ack, token, memory)
                }
            };
            if taken == Err(RemoveError::Busy) {
                break;
            }
            progress = true;
            self.removals.pass((taken == Ok(Removal::Pending)).then_some(token));
            match taken {
                Ok(Removal::Pending) => self.counters.removals += 1,
                Ok(Removal::Absent) => self.end_removal(shard, cause, true),
                Err(_) => {
                    self.counters.removals_unwritten += 1;
                    self.end_removal(shard, cause, false);
                }
            }
        }
        progress
    }

    /// Handles the outcome of a removal in the tier.
    pub(super) fn removed(&mut self, shard: &mut Shard, token: Token, is_written: bool) {
        self.counters.removals_unwritten += u64::from(!is_written);
        if let Some(cause) = self.removals.end(token) {
            self.end_removal(shard, cause, is_written);
        }
    }

    /// Ends a removal. One that is not on the SSD may be undone by a restart: the reply that waits for it fails.
    fn end_removal(&mut self, shard: &mut Shard, cause: RemovalCause, is_written: bool) {
        match cause {
            RemovalCause::Swept => self.sweep.waiting -= 1,
            // Without a tombstone it is gone as well: a restart makes all replica records void.
            RemovalCause::Replica(item) => shard.settle(item, |_, _| {}),
            RemovalCause::Requested(item) => shard.settle(item, |replies, _| {
                if let (Replies::Bits(_, status), false) = (replies, is_written) {
                    *status = Status::NoSpace;
                }
            }),
            RemovalCause::Replaced { told: Some(item), .. } if is_written => shard.settle(item, |_, _| {}),
            RemovalCause::Replaced { digest, version, told } => {
                if !is_written {
                    // The former version is still on the SSD, so that this one cannot take its place.
                    shard.drop_version(digest, version);
                    self.tell_of(shard, digest);
                }
                told.into_iter().for_each(|item| shard.refuse_put(item, Status::NoSpace));
            }
        }
    }

    /// Makes the records of a slot void that belongs to another owner from now on.
    pub(in crate::service) fn lose_slot(&mut self, slot: Slot) {
        self.doubts.forget(slot);
        self.sweep.lose(slot);
    }

    /// Ends the role of replica owner of a slot. Its replica records become those of objects of this shard, which owns
    /// the slot now or exports it, if it has them `inherited`; otherwise they are void.
    pub(in crate::service) fn end_replicas(&mut self, slot: Slot, inherited: bool) {
        if self.replicas.close(slot) && !inherited {
            self.lose_slot(slot);
        }
    }

    /// Returns true if the SSD has, or may yet recover, the record of a replica.
    pub(in crate::service) fn may_have_replica(&self, digest: Digest) -> bool {
        self.replicas.is_open(digest.slot()) && may_stand(&self.tier, digest)
    }

    /// Makes the records of all replicas in a slot void.
    pub(in crate::service) fn drop_replicas_in(&mut self, slot: Slot) {
        if self.replicas.is_open(slot) {
            self.end_replicas(slot, false);
            self.replicas.begin(slot);
        }
    }

    /// Opens the slots whose replicas may be recorded now: none of those that are `noted` on the device as this one's.
    /// Returns the replicas that waited for that.
    pub(super) fn open_replicas(&mut self, shard: &Shard, noted: impl Fn(Slot) -> bool) -> Vec<Digest> {
        if !self.replicas.is_due(shard.now_ns) || !self.is_recovered() || self.is_degraded() {
            return Vec::new();
        }
        let Self { replicas, sweep, doubts, .. } = self;
        replicas.open(shard.now_ns, &shard.exports, |slot| {
            // Slots that were swept stay in the set as long as the device may have records that cannot be read.
            let is_swept = sweep.at.is_none() || !sweep.slots.has(slot);
            let is_taken = noted(slot) || !is_swept || doubts.has(slot);
            !is_taken && !shard.ownership.owned().has(slot) && shard.replicas.relation(slot).is_some()
        })
    }

    /// Returns the time of the next action.
    pub(super) fn poll_timeout(&self) -> Option<u64> {
        let replicas = self.replicas.poll_timeout().filter(|_| self.is_recovered() && !self.is_degraded());
        [self.tier.poll_timeout(), replicas].into_iter().flatten().min()
    }

    /// Handles a record that could not be read whole, with the gets that wait for its object: if memory does not have
    /// the object and another owner of its slot may, it is to be repaired. Returns the gets that do not wait.
    pub(super) fn record_damaged(
        &mut self,
        shard: &mut Shard,
        view: &RecordView,
        readers: WaitingReaders,
    ) -> WaitingReaders {
        self.damaged.count();
        let digest = view.digest;
        let (objects, slot) = (shard.store.objects(), digest.slot());
        let is_replicated = view.copied || !objects.copies(digest).at.is_empty();
        let has_other = match self.replicas.is_open(slot) {
            true => shard.replicas.relation(slot).is_some(),
            false => shard.ownership.owns(digest) && shard.replicas.has_owner(digest) && is_replicated,
        };
        let is_repairable = has_other && !self.is_void(view) && !shard.store.exists(digest);
        let readers = if is_repairable { self.damaged.add(*view, readers) } else { readers };
        if !self.damaged.has(digest) && !shard.store.exists(digest) {
            shard.store.objects_mut().orphan_detached(digest);
            if !self.is_hidden(view) {
                self.damaged.lose();
            }
        }
        self.tell_of(shard, digest);
        readers
    }

    /// Removes some void records. Returns true if there was any progress.
    pub(super) fn sweep_void(&mut self, shard: &mut Shard) -> bool {
        let step = self.sweep.step(&self.tier, &mut self.removals, &mut self.doubts);
        self.counters.swept += step.void.len() as u64;
        step.void.iter().for_each(|digest| self.tell_of(shard, *digest));
        step.progress
    }

    /// Notifies subscribers of the present state of an object on the SSD. They do not follow replica records.
    pub(in crate::service) fn tell_of(&self, shard: &mut Shard, digest: Digest) {
        let events = shard.store.objects_mut().events_mut();
        if !events.is_kept() || self.replicas.is_open(digest.slot()) {
            return;
        }
        match self.locate(digest) {
            Some(view) => events.push(ObjectChange::Stored, ObjectMedium::Ssd, digest, view.payload_bytes.into()),
            None => events.push(ObjectChange::Removed, ObjectMedium::Ssd, digest, 0),
        }
    }
}

/// Notifies subscribers that the SSD's contents have changed as a whole, so that they start over.
pub(in crate::service) fn break_off_events(shard: &mut Shard) {
    let events = shard.store.objects_mut().events_mut();
    if events.is_kept() {
        events.break_off();
    }
}

/// Returns true if the SSD has a record of this digest, visible or hidden, or may yet recover one.
fn may_stand(tier: &Tier, digest: Digest) -> bool {
    tier.may_find(digest) || tier.locate(digest).is_some()
}

/// Notes the slots that a shard exports by the map that it follows now.
pub(in crate::service) fn note_exports(ssd: &mut Ssd, shard: &Shard) {
    let is_known = ssd.is_recovered() && !ssd.is_degraded() && !ssd.tier.is_untracked();
    let has_records = !is_known || ssd.tier.stats().objects > 0 || ssd.removals.len() > 0;
    ssd.replicas.note_exports(&shard.exports, !has_records && shard.store.objects().is_empty());
}
