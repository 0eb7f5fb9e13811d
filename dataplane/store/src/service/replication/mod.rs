//! Replication: further copies of objects at the replica owners of their slot.
//!
//! The *owner* of a slot orders all changes. After it has committed an object that is to be replicated, its client puts
//! the bytes at *replica owners* too, from the owner's pool: at as many as the object is to have replicas, the first
//! ones of the slot; where one cannot be reached, at another until it can. A replica owner serves such a replica to
//! readers that accept replicas, and becomes the owner of it, or passes it on to the new owner, when the owner has left
//! the map. Replica owners do not know of each other.
//!
//! Correctness: **a replica is never older than the version that the owner has acknowledged.** Each of the following
//! holds for every replica owner of a slot by itself:
//! * Before it sends anything, the owner records that the replica owner may have a replica
//!   ([`crate::Copies::at`]). When such an object is removed, replaced or evicted, the removal of the replica is
//!   *outstanding*. Until every such replica owner has acknowledged that it is gone, no removal and no put of that
//!   object is acknowledged.
//! * A client that gets an object learns which replica owners have a replica, and may read it there for a while (a
//!   lease). When a new map assigns other replica owners, the former ones get no removal requests any more; removals
//!   and puts of objects that they had replicas of are then acknowledged only when all such leases have expired. A
//!   client with an older map gets no lease.
//! * No replica of an object is sent to a replica owner while a removal of one is outstanding there, or while that of
//!   another version is at any replica owner: a client with a lease may read at all of them, and none is to have an
//!   older version than another. No removal is sent while a replica is being sent there. Requests that were given up on
//!   a lost connection are never carried out later: the client fences the connection.
//! * The replica owner accepts and drops replicas only while the newest map that it knows makes it a replica owner of
//!   this very incarnation of the owner ([`Relation`]), and only from a peer whose map is at least as new as that
//!   relation.
//! * When the owner changes, replicas are dropped, except those whose owner has left: a replica owner that is the new
//!   owner then owns them, and the first other one exports its replicas to the new owner, as in a migration. Both only
//!   if the map tells that nothing else happened in between. When other replica owners change, replicas stay.
//! * An owner that begins another incarnation has no records of replicas, and its former incarnation's replicas are
//!   void; unless it continues the former one by a handover ([`ShardKey::continues`]): then its image has the records,
//!   and what was in flight is outstanding. In the same way a replica owner that continues another has its replicas.
//!   Both sides see that from the incarnations alone, so they agree on it whatever maps they have missed.
//!
//! Replicas may be evicted from memory like any object: then there is one replica less than the owner's record says,
//! unless the replica owner has an SSD, where it records them. An object that the owner evicts while its SSD has it
//! keeps its replicas ([`crate::DetachedReplicas`]). The SSD records which objects are to be replicated, and the tail
//! how many times: the replicas are made again after a start. Objects that have no replica left come first.

mod heat;
mod outstanding;
mod owners;
mod pushes;
pub(in crate::service) mod records;
mod removals;
mod waits;
mod walks;
mod wishes;

use kvplane_proto::ids::{Epoch, SLOTS, Slot, Version};
use kvplane_proto::map::{ReplicaSet, SlotOwners};
use kvplane_proto::{Digest, FrameFlags, Status};
use kvplane_tier::SlotSet;

use self::heat::Heat;
use self::owners::ReplicaOwners;
use self::pushes::Pushes;
pub use self::pushes::copy_of;
use self::removals::ReplicaRemovals;
use self::walks::{SsdWalk, Walk};
use self::wishes::Wishes;
use super::fetches::{Fetch, FetchDone};
use super::kept_memory::LeftReplicas;
use super::local::LocalStore;
use super::shard::context::RequestContext;
use super::shard::deferrals::DeferredItem;
use super::shard::slot_table::SlotTable;
use super::shard::{Relation, ReplicaOwnersBySlot, Shard};
use super::types::CloseReason;
use crate::image::OutstandingReplica;
use crate::store::{OwnershipChange, ReplicaRole};
use crate::{ObjectView, Replica};
pub use kvplane_proto::events::ReplicaProgress;

/// Counters of replication.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CopyCounters {
    /// Replicas that replica owners accepted.
    pub made: u64,
    /// Bytes of those replicas.
    pub made_bytes: u64,
    /// Times that an object became hot, so that a replica of it was begun.
    pub hot: u64,
    /// Replicas that replica owners did not accept, or not in time.
    pub failed: u64,
    /// Removals of replicas that replica owners acknowledged.
    pub dropped: u64,
    /// Requests that failed because a replica owner did not acknowledge a removal in time.
    pub refused: u64,
    /// Replicas accepted here as a replica owner.
    pub taken: u64,
    /// Gets that were answered here from replicas.
    pub served: u64,
    /// Replicas that became objects of this shard because the owner left.
    pub inherited: u64,
    /// Removals that replica owners still have to acknowledge.
    pub outstanding: u64,
    /// Slots for which this shard is a replica owner.
    pub second_slots: u64,
}

/// Time for which an object that is prefetched to be replicated may stay without being read.
const AHEAD_NS: u64 = 10_000_000_000;

/// Conditions at the replica owner that a reply waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct CopyWaits {
    pub(super) drop: bool,
    pub(super) copy: bool,
}

impl CopyWaits {
    /// Returns how many times the reply's item is settled.
    pub(super) fn count(self) -> usize {
        usize::from(self.drop) + usize::from(self.copy)
    }
}

/// Numbers of replica owners by two maps.
struct Renumbering<'a> {
    former: &'a ReplicaOwnersBySlot,
    now: &'a ReplicaOwnersBySlot,
}

impl Renumbering<'_> {
    /// Returns the present numbers of those replica owners of a slot that remain, of a set by the former numbers.
    fn renumber(&self, slot: Slot, at: ReplicaSet) -> ReplicaSet {
        let (Some(former), Some(now)) = (self.former.get(slot), self.now.get(slot)) else { return ReplicaSet::NONE };
        let had = |number: usize| former.get(number).filter(|_| at.has(number));
        let remaining = (0..former.len()).filter_map(had);
        let numbers = remaining.filter_map(|owner| now.iter().position(|other| other == owner));
        numbers.fold(ReplicaSet::NONE, ReplicaSet::with)
    }
}

/// Owner's side of replication: replicas to be made, and those to be removed. Replicas that this shard has as a replica
/// owner are recorded in the store.
#[derive(Debug, Default)]
pub(super) struct Replication {
    /// Removals of replicas that have to be done before a request for their objects is acknowledged.
    pub(super) removals: ReplicaRemovals,
    /// Replicas in flight, and those to be sent next.
    pushes: Pushes,
    owners: ReplicaOwners,
    wishes: Wishes,
    /// Read bandwidth of hot objects.
    heat: Heat,
    /// Walks for objects that lack a replica, in memory and on the SSD.
    walk: Walk,
    ssd_walk: SsdWalk,
    /// Counters, without those of the components.
    counters: CopyCounters,
}

impl Replication {
    /// Returns the counters of a shard, including its state as a replica owner.
    pub(super) fn counters(&self, shard: &Shard) -> CopyCounters {
        let (pushes, removals) = (self.pushes.counters(), self.removals.counters());
        CopyCounters {
            made: pushes.made,
            made_bytes: pushes.made_bytes,
            failed: pushes.failed,
            dropped: removals.done,
            refused: removals.refused,
            outstanding: self.removals.len() as u64,
            second_slots: shard.replicas.relations() as u64,
            ..self.counters
        }
    }

    /// Sets the read bandwidth from which an object is hot; 0 for never.
    pub(super) fn set_heat(&mut self, bytes_per_s: u64) {
        self.heat.set_rate(bytes_per_s);
    }

    /// Counts a replica that was accepted here.
    pub(super) const fn count_taken(&mut self) {
        self.counters.taken += 1;
    }

    /// Counts a get that was answered from a replica.
    pub(super) const fn count_served(&mut self) {
        self.counters.served += 1;
    }

    /// Returns true if all objects that lacked a replica since owners last changed were found.
    pub(super) const fn has_walked(&self) -> bool {
        self.walk.is_through()
    }

    /// Follows a map, or the loss of one: updates the slots for which this shard is a replica owner, and the replica
    /// owners of its own slots. If maps were `missed`, no replica can be trusted. Returns the relations that ended.
    pub(super) fn follow(
        &mut self,
        shard: &mut Shard,
        epoch: Epoch,
        missed: bool,
        owners: Option<&SlotOwners>,
    ) -> SlotTable<Relation> {
        let me = shard.ownership.key();
        if missed {
            shard.store.objects_mut().orphan_all_detached();
        }
        let (mut relations, mut replica_owners) = (SlotTable::default(), ReplicaOwnersBySlot::default());
        if let Some(owners) = owners {
            for slot in (0..SLOTS as u16).map(Slot) {
                let (Some(owner), others) = (owners.owner(slot), owners.replica_owners(slot)) else { continue };
                if owner == me && !others.is_empty() {
                    replica_owners.add(slot, others);
                } else if others.contains(&me) {
                    let before = shard.replicas.relation(slot).filter(|before| before.owner == owner && !missed);
                    relations.insert(slot, before.copied().unwrap_or(Relation { owner, since: epoch }));
                }
            }
        }
        let mut ended = shard.replicas.relate(relations);
        // A successor has everything that its predecessor knew of replicas, which stay. From now on requests that the
        // predecessor sent are refused; one that is being received ends with its connection.
        let is_succeeded = |slot: Slot, before: &Relation| {
            let now = shard.replicas.relation(slot).filter(|_| !missed);
            now.is_some_and(|now| now.owner != before.owner && now.owner.continues(before.owner))
        };
        let succeeded: Vec<Slot> =
            ended.iter().filter(|(slot, before)| is_succeeded(*slot, before)).map(|(slot, _)| slot).collect();
        if !succeeded.is_empty() {
            for peer in shard.sessions.select(|session| session.copies) {
                shard.close(peer, CloseReason::Refused(Status::WrongOwner));
            }
            succeeded.into_iter().for_each(|slot| _ = ended.remove(slot));
        }
        let owns = |slot: Slot| owners.is_some_and(|owners| owners.owner(slot) == Some(me));
        self.change_owners(shard, epoch, replica_owners, missed, &owns);
        shard.replicas.keep_inherited(|slot| owns(slot) && !missed);
        ended.retain(|slot, before| shard.replicas.relation(slot) != Some(before));
        ended
    }

    /// Assigns replicas and objects their role by the new owners. Of the slots of `cleared` only replicas are kept;
    /// those of `exported` are kept for their new owners to fetch. Returns the replicas that became objects of this
    /// shard.
    pub(super) fn reassign(
        &mut self,
        shard: &mut Shard,
        ended: &SlotTable<Relation>,
        cleared: &SlotSet,
        exported: &SlotSet,
    ) -> Vec<Digest> {
        let mut inherited = Vec::new();
        let store = &mut shard.store;
        let replicas = &shard.replicas;
        let gone = store.reassign(|digest, role| {
            let (slot, copy) = (digest.slot(), role == ReplicaRole::Replica);
            match (copy, ended.has(slot)) {
                (false, _) if cleared.has(slot) => OwnershipChange::Dropped,
                (false, _) => OwnershipChange::Unchanged,
                (true, false) if replicas.relation(slot).is_some() => OwnershipChange::Unchanged,
                (true, true) if replicas.has_inherited(slot) => {
                    inherited.push(digest);
                    OwnershipChange::Promoted
                }
                (true, true) if exported.has(slot) => OwnershipChange::Promoted,
                (true, _) => OwnershipChange::Dropped,
            }
        });
        shard.counters.dropped_objects += gone;
        self.counters.inherited += inherited.len() as u64;
        inherited
    }

    /// Acts on a change of the replica owners: waits for the former ones end.
    fn change_owners(
        &mut self,
        shard: &mut Shard,
        epoch: Epoch,
        owners: ReplicaOwnersBySlot,
        missed: bool,
        owns: &dyn Fn(Slot) -> bool,
    ) {
        let has_successors = self.follow_successors(shard, &owners);
        // If a map was missed, no object is left here; but the replica owner may not have missed it, and may still have
        // replicas.
        self.removals.note_orphans(shard);
        // Refusals of replica owners by the former map do not apply to the new one.
        self.owners.forgive();
        self.removals.wake();
        if owners == *shard.replicas.owners() && !missed {
            if has_successors {
                self.owners.follow(owners.all());
                self.removals.bound();
                self.look_for_unreplicated(shard);
            }
            return;
        }
        let former = shard.replicas.assign(owners, epoch);
        let now = shard.replicas.owners();
        let same = |slot: Slot| former.get(slot) == now.get(slot);
        let over = self.removals.of_slots(|slot| !same(slot));
        self.pushes.void(|slot, owner| missed || !now.get(slot).is_some_and(|owners| owners.contains(&owner)));
        self.owners.follow(now.all());
        // Including slots that have no replica owner any more.
        let mut changed = SlotSet::none();
        let slots = former.slots().chain(now.slots());
        slots.filter(|slot| owns(*slot) && !same(*slot)).for_each(|slot| changed.insert(slot));
        self.removals.end_former(shard, over, missed, owns);
        // The former replica owners have dropped their replicas, or will before they follow the new map. Those that
        // remain keep them, under another number perhaps.
        let mut lapsed = Vec::new();
        let orders = Renumbering { former: &former, now: shard.replicas.owners() };
        let store = &mut shard.store;
        store.objects_mut().detached_mut().reassign(|digest, at| {
            let slot = digest.slot();
            let remaining = match (owns(slot), changed.has(slot)) {
                (false, _) => ReplicaSet::NONE,
                (true, false) => at,
                (true, true) => orders.renumber(slot, at),
            };
            if owns(slot) && remaining.count() < at.count() {
                lapsed.push(digest);
            }
            remaining
        });
        if !changed.is_empty() {
            store.reassign(|digest, role| {
                let ReplicaRole::Replicated(at) = role else { return OwnershipChange::Unchanged };
                if !changed.has(digest.slot()) {
                    return OwnershipChange::Unchanged;
                }
                let remaining = orders.renumber(digest.slot(), at);
                if remaining.count() < at.count() {
                    lapsed.push(digest);
                }
                OwnershipChange::Replicated(remaining)
            });
        }
        for digest in lapsed {
            self.removals.lapse(shard, digest, Vec::new());
        }
        self.removals.bound();
        // Replicas in flight since before the change may be written at replica owners that are ones again, without
        // being recorded here.
        for (digest, version, owner) in self.pushes.voided() {
            if shard.replicas.number_of(digest.slot(), owner).is_some() {
                self.removals.add(digest, version, owner);
            }
        }
        self.pushes.resume(&self.removals);
        self.look_for_unreplicated(shard);
    }

    /// Acts on replica owners that have handed their memory over: their successors have the replicas, except what was
    /// in flight. Returns true if there are any.
    fn follow_successors(&mut self, shard: &mut Shard, owners: &ReplicaOwnersBySlot) -> bool {
        let successors = shard.replicas.succeed(owners);
        if successors.is_empty() {
            return false;
        }
        self.removals.succeed(&successors);
        let in_flight: Vec<_> = self.pushes.in_flight().collect();
        for (digest, version, owner) in in_flight {
            let Some(next) = successors.get(&owner) else { continue };
            if let Some(number) = shard.replicas.number_of(digest.slot(), *next) {
                shard.store.objects_mut().note_copy(digest, version, number, false);
                self.removals.add(digest, version, *next);
            }
        }
        self.pushes.void(|_, owner| successors.contains_key(&owner));
        true
    }

    /// Returns the replicas that replica owners may have and that no object's record names: they are to be removed, or
    /// were being sent.
    pub(super) fn outstanding(&mut self, shard: &mut Shard) -> Vec<OutstandingReplica> {
        self.removals.note_orphans(shard);
        let in_flight = self.pushes.in_flight().map(|(digest, _, owner)| (digest, owner));
        let all = self.removals.all().chain(in_flight);
        all.map(|(digest, owner)| OutstandingReplica { digest, owner }).collect()
    }

    /// Continues the replication of a former process, whose objects this shard has.
    pub(super) fn take_over(&mut self, shard: &mut Shard, left: LeftReplicas) {
        // Clients may have leases that the former process granted.
        self.removals.note_lease(shard.now_ns);
        let LeftReplicas { outstanding, mut lapsed } = left;
        for OutstandingReplica { digest, owner } in outstanding {
            let owners = shard.replicas.owners_of(digest.slot());
            match owners.iter().copied().find(|now| now.continues(owner)) {
                Some(now) => self.removals.add_any(digest, now),
                None => lapsed.push(digest),
            }
        }
        for digest in lapsed {
            self.removals.lapse(shard, digest, Vec::new());
        }
        self.removals.bound();
        self.look_for_unreplicated(shard);
    }

    /// Begins both walks anew: replica owners have changed, or slots are newly served.
    pub(super) fn look_for_unreplicated(&mut self, shard: &Shard) {
        self.removals.wake();
        self.walk.begin(shard);
        self.ssd_walk.begin(shard);
    }

    /// Begins the walk through the SSD anew: its objects may lack replicas.
    pub(super) fn walk_ssd_again(&mut self, shard: &Shard) {
        self.ssd_walk.begin(shard);
    }

    /// Repeats the walk through memory, to find an object that lacks a replica.
    pub(super) fn walk_again(&mut self, shard: &Shard) {
        self.walk.repeat(shard);
    }

    /// Returns the conditions that the reply of a put waits for.
    pub(super) fn waits_of(&mut self, shard: &mut Shard, digest: Digest) -> CopyWaits {
        self.removals.note_orphans(shard);
        let possible = shard.replicas.has_owner(digest);
        let copy = possible && shard.store.objects().replica(digest) == Replica::Awaited;
        CopyWaits { drop: self.removals.is_outstanding(digest), copy }
    }

    /// Acts on a commit: the object is replicated next if it is to be. `told` is settled once for each condition that
    /// is waited for.
    pub(super) fn replicate(
        &mut self,
        shard: &mut Shard,
        digest: Digest,
        version: Version,
        waits: CopyWaits,
        told: Option<DeferredItem>,
    ) {
        if let (true, Some(item)) = (waits.drop, told) {
            self.removals.wait(shard, digest, item);
        }
        let possible = shard.replicas.has_owner(digest);
        let replica = shard.store.objects().replica(digest);
        if !possible || !replica.is_owed_a_copy() {
            return;
        }
        if let (true, Some(item)) = (waits.copy, told) {
            self.pushes.wait(digest, version, item, shard.now_ns);
        }
        if !self.pushes.add(digest, version) {
            self.walk_again(shard);
            self.pushes.end_wait(shard, digest, version, true);
        }
    }

    /// Grants a client that wants one a lease on the replicas of an object: at the replica owners that certainly have
    /// one, and had the same numbers already in the client's map. A client that knows of one replica owner only gets a
    /// lease on the replica there.
    pub(super) fn grant_lease(
        &mut self,
        shard: &Shard,
        context: &RequestContext,
        digest: Digest,
        object: &ObjectView,
    ) -> ReplicaSet {
        let wants = context.flags.has(FrameFlags::REPLICA_LEASE);
        let known = !object.copies.at.is_empty() && wants && context.epoch >= shard.replicas.since();
        if !known || !shard.ownership.owns(digest) || self.removals.is_outstanding(digest) {
            return ReplicaSet::NONE;
        }
        let owners = shard.replicas.owners_of(digest.slot());
        let is_there = |number: usize| owners.get(number).is_some_and(|owner| !self.pushes.has_at(digest, *owner));
        let there = ReplicaSet::of(|number| object.copies.at.has(number) && is_there(number));
        let named = if context.flags.has(FrameFlags::REPLICA_OWNERS) { there } else { there.and(ReplicaSet::FIRST) };
        if !named.is_empty() {
            self.removals.note_lease(shard.now_ns);
        }
        named
    }

    /// Returns the next request to a replica owner, within the rate of background work.
    pub(super) fn poll(&mut self, local: &mut LocalStore, bytes_per_s: u64) -> Option<Fetch> {
        confirm_detached(local);
        let lacking = local.shard.store.objects_mut().detached_mut().take_lacking();
        let (owned, replicas) = (&local.shard.ownership, &local.shard.replicas);
        if lacking.into_iter().any(|(digest, copies)| owned.owns(digest) && replicas.lacks(digest, copies)) {
            self.ssd_walk.repeat(&local.shard);
        }
        if local.shard.replicas.is_alone() {
            return None;
        }
        let Self { removals, pushes, owners, wishes, walk, ssd_walk, .. } = self;
        removals.note_orphans(&mut local.shard);
        let (is_sending, is_sending_in) =
            (|digest, owner| pushes.has_at(digest, owner), |slot, owner| pushes.has_in(slot, owner));
        let removal = removals.poll(&mut local.shard, owners, is_sending, is_sending_in);
        removal.or_else(|| pushes.poll(local, removals, owners, walk)).or_else(|| {
            if pushes.is_idle() {
                pushes.extend(wishes.next(&local.shard, bytes_per_s));
            }
            if pushes.is_idle() && pushes.has_room() {
                pushes.extend(walk.step(&local.shard, bytes_per_s));
            }
            if pushes.is_idle() {
                ssd_walk.step(local, bytes_per_s);
            }
            pushes.poll(local, removals, owners, walk)
        })
    }

    /// Handles the answer of a replica owner, or the failure to get one. Returns false if it belongs to no request of
    /// this component.
    pub(super) fn fetched(&mut self, shard: &mut Shard, token: u64, done: &FetchDone) -> bool {
        let Self { removals, pushes, owners, walk, .. } = self;
        if pushes.fetched(shard, removals, owners, walk, token, done) {
            return true;
        }
        let is_removal = removals.fetched(shard, owners, token, done);
        pushes.resume(removals);
        is_removal
    }

    /// Times out replies that have waited for a replica owner for too long.
    pub(super) fn expire_waits(&mut self, shard: &mut Shard) {
        if self.waits_until_ns().is_some_and(|until_ns| until_ns <= shard.now_ns) {
            self.removals.expire(shard);
            self.pushes.expire(shard);
        }
    }

    /// Returns the time at which a reply that waits for a replica owner times out.
    fn waits_until_ns(&self) -> Option<u64> {
        [self.removals.poll_timeout(), self.pushes.poll_timeout()].into_iter().flatten().min()
    }

    /// Returns the time of the next action.
    pub(super) fn poll_timeout(&self, shard: &Shard) -> Option<u64> {
        let (now_ns, due) = (shard.now_ns, self.waits_until_ns());
        if shard.replicas.is_alone() && due.is_none() {
            return None;
        }
        let busy = self.removals.len() > 0 || !self.pushes.is_idle();
        let retries = if busy { self.owners.poll_timeout(now_ns) } else { None };
        let walks = [self.walk.poll_timeout(now_ns), self.ssd_walk.poll_timeout(now_ns)];
        [due, retries, self.wishes.poll_timeout(now_ns)].into_iter().chain(walks).flatten().min()
    }

    /// Requests a replica of an object of this shard, however it was put. Like that of an object put with two replicas,
    /// it is made again whenever it is lost. An object that is only on an SSD is read into memory first; one that is
    /// neither in memory nor on the SSD `may_come` from a former owner.
    pub(in crate::service) fn want(
        &mut self,
        local: &mut LocalStore,
        digest: Digest,
        may_come: bool,
    ) -> ReplicaProgress {
        let wished = self.want_for_now(local, digest, 1, may_come);
        if matches!(wished, ReplicaProgress::Coming | ReplicaProgress::There { .. }) {
            local.write_promise(digest);
        }
        wished
    }

    /// Requests so many replicas of an object of this shard, beside the owner's, for as long as the object stays in
    /// memory: the SSD does not record it. An object that is to have more keeps them.
    fn want_for_now(&mut self, local: &mut LocalStore, digest: Digest, wanted: u8, may_come: bool) -> ReplicaProgress {
        let shard = &mut local.shard;
        if !shard.ownership.owns(digest) {
            return ReplicaProgress::Elsewhere;
        }
        let object = shard.peek(digest).map(|object| (object.extent.bytes, object.version));
        let Some((bytes, version)) = object else {
            let Some(view) = local.on_ssd(digest) else {
                return if may_come { ReplicaProgress::Coming } else { ReplicaProgress::Missing };
            };
            local.prefetch(&view, local.shard.now_ns.saturating_add(AHEAD_NS), true);
            return ReplicaProgress::Coming;
        };
        if !shard.replicas.has_owner(digest) {
            return ReplicaProgress::Alone;
        }
        // A replica of an older version, still in flight, does not count, and its end does not trigger a walk.
        let sending = self.pushes.is_sending(digest, version);
        if shard.store.objects().is_copy(digest) {
            return ReplicaProgress::Elsewhere;
        }
        shard.store.objects_mut().want_copies(digest, wanted);
        if !shard.replicas.lacks(digest, shard.store.objects().copies(digest)) && !sending {
            return ReplicaProgress::There { bytes };
        }
        if !sending && !self.wishes.add(digest) {
            self.walk_again(shard);
        }
        ReplicaProgress::Coming
    }

    /// Counts an object in memory that is returned to a client over a stream. A hot object is replicated, within the
    /// rate of background work. Reads of clients on this host from the shared pool do not count: a replica elsewhere
    /// would not relieve this host of them.
    #[inline]
    pub(in crate::service) fn note_given(
        &mut self,
        local: &mut LocalStore,
        context: &RequestContext,
        digest: Digest,
        bytes: u64,
    ) {
        local.shard.note_get(digest, bytes);
        if self.heat.asked(digest, bytes, local.shard.now_ns) {
            self.replicate_hot(local, context, digest);
        }
    }

    #[cold]
    fn replicate_hot(&mut self, local: &mut LocalStore, context: &RequestContext, digest: Digest) {
        let shard = &local.shard;
        let objects = shard.store.objects();
        if objects.is_copy(digest) || context.fetches {
            return;
        }
        // An object that is hot here although its readers are spread over its replicas gets another one.
        let copies = objects.copies(digest);
        let is_complete = objects.replica(digest).is_owed_a_copy() && !shard.replicas.lacks(digest, copies);
        let wanted = if is_complete { copies.wanted + 1 } else { 1 };
        if usize::from(wanted) > shard.replicas.owners_of(digest.slot()).len() {
            return;
        }
        if self.want_for_now(local, digest, wanted, false) == ReplicaProgress::Coming {
            self.counters.hot += 1;
        }
    }
}

/// Compares the objects that memory has evicted since the last call with the SSD: if it does not have them, their
/// replicas are to be removed.
fn confirm_detached(local: &mut LocalStore) {
    for (digest, version) in local.shard.store.objects_mut().detached_mut().take_unconfirmed() {
        if local.on_ssd(digest).is_none_or(|view| view.version != version) {
            local.shard.store.objects_mut().orphan_detached(digest);
        }
    }
}
