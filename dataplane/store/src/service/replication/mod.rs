//! Objects that two owners have.
//!
//! The *owner* of a slot orders everything. After it has made an object visible of which a replica is wanted, its
//! client puts the bytes at the *replica owner* too, out of its own pool. That one serves such a replica to readers
//! that take one, and becomes the owner of it when the owner has left the map.
//!
//! What makes it right: **a replica is never older than what the owner has acknowledged.**
//! * The owner notes, before it sends anything, that the replica owner may have a replica (`Mark::Copied`). When such
//!   an object is removed, replaced or evicted, the removal of the replica is *owed*. Until the replica owner has said
//!   that it is gone, no removal and no put of that object is answered as done.
//! * A client that was given an object learns whether there is a replica, and may read that for a while (a lease).
//!   Where another node becomes the replica owner by a new map, the former one is not asked for removals any more: then
//!   what it had replicas of is acknowledged as gone only when all such leases are over. A client with an older map
//!   gets no lease.
//! * Nothing is sent of an object while a removal of its replica is owed, and no removal while something is being sent.
//!   What was given up on a lost connection is never carried out later: the client fences it.
//! * The replica owner takes and drops replicas only as long as the map that it has heard of makes it the replica owner
//!   of that very incarnation of the owner ([`Relation`]), and only from a peer with a map of that time.
//! * When owners change, replicas go, but for those whose owner has left: the replica owner then owns them, or keeps
//!   them for the new owner to fetch, as in a migration. Both only if the map tells that nothing else happened in
//!   between.
//! * An owner that begins another incarnation has no notes, and by another incarnation its replicas are void.
//!
//! Replicas are kept in memory only, and may be evicted like anything else: then there is one less than was thought. An
//! SSD notes of which objects replicas were asked for: they are made again after a start, as far as memory has room.

mod heat;
mod owed;
mod owners;
mod pushes;
mod waits;
mod walks;
mod wishes;

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::ids::{Epoch, SLOTS, Slot};
use kvplane_proto::map::{ShardKey, SlotOwners};
use kvplane_proto::{Digest, Limits, Status};

use self::heat::Heat;
use self::owed::OwedRemovals;
use self::owners::ReplicaOwners;
pub use self::pushes::copy_of;
use self::pushes::{Call, Pushes};
pub(super) use self::waits::CopyWaits;
use self::waits::Waits;
use self::walks::{SsdWalk, Walk};
pub use self::wishes::ReplicaProgress;
use self::wishes::Wishes;
use super::local::LocalStore;
use super::shard::context::RequestContext;
use super::shard::deferrals::DeferredItem;
use super::shard::{Relation, Shard};
use crate::Replica;
use crate::store::{Fate, Side};

/// What became of replicas so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CopyCounters {
    /// Copies that replica owners took.
    pub made: u64,
    /// Their bytes.
    pub made_bytes: u64,
    /// Times that an object was asked for so much that a copy of it was begun.
    pub hot: u64,
    /// Copies that they did not take, or not in time.
    pub failed: u64,
    /// Drops of copies that replica owners acknowledged.
    pub dropped: u64,
    /// Answers that were refused, as a replica owner did not say in time that it dropped a copy.
    pub refused: u64,
    /// Copies that were taken here as a replica owner.
    pub taken: u64,
    /// Gets of copies that were answered here.
    pub served: u64,
    /// Copies that became our own, as the owner left.
    pub inherited: u64,
    /// Drops that are owed to replica owners now.
    pub owed: u64,
    /// Slots of which this shard is the replica owner.
    pub second_slots: u64,
}

/// How long an object that is prefetched for its replica may stay without being read.
const AHEAD_NS: u64 = 10_000_000_000;

/// The owner's side of replication: replicas that are made, and those that have to go. What this shard has as the
/// replica owner of others, the store knows.
#[derive(Debug, Default)]
pub(super) struct Replication {
    /// Replicas that have to go before anything of their objects is acknowledged.
    owed: OwedRemovals,
    /// When a client learnt last that a replica owner has a replica; 0 for never.
    leased_ns: u64,
    owners: ReplicaOwners,
    /// Objects on their way, and those that are next.
    pushes: Pushes,
    waits: Waits,
    wishes: Wishes,
    /// Which objects are read most.
    heat: Heat,
    /// The search for objects that lack a replica, in memory and on the SSD.
    walk: Walk,
    ssd_walk: SsdWalk,
    calls: BTreeMap<u64, Call>,
    counters: CopyCounters,
}

impl Replication {
    /// What became of replicas so far, at a shard that is the replica owner of so many slots.
    pub(super) fn counters(&self, shard: &Shard) -> CopyCounters {
        let (owed, second_slots) = (self.owed.len() as u64, shard.replicas.relations() as u64);
        CopyCounters { owed, second_slots, ..self.counters }
    }

    /// From how many bytes a second on an object is hot; 0 for never.
    pub(super) fn set_heat(&mut self, bytes_per_s: u64) {
        self.heat.set_rate(bytes_per_s);
    }

    /// A replica was taken here.
    pub(super) const fn count_taken(&mut self) {
        self.counters.taken += 1;
    }

    /// A replica is given to a reader.
    pub(super) const fn count_served(&mut self) {
        self.counters.served += 1;
    }

    /// True where all that lacked a replica when owners changed was found since.
    pub(super) const fn has_walked(&self) -> bool {
        self.walk.is_through()
    }

    /// Objects that are gone leave owed removals behind. To be called before anything is acknowledged.
    pub(super) fn note_orphans(&mut self, shard: &mut Shard) {
        let Some(store) = shard.store.as_mut().filter(|store| store.has_orphans()) else { return };
        for digest in store.take_orphans() {
            if shard.replicas.has_owner(digest) {
                self.owed.owe(digest);
            }
        }
        self.owed.bound();
    }

    /// True where the replica owner may have a replica that has to go before anything of its object is acknowledged.
    pub(super) fn owes(&self, digest: Digest) -> bool {
        self.owed.has(digest)
    }

    /// True where any replica has to go.
    pub(super) fn owes_any(&mut self, shard: &mut Shard) -> bool {
        self.note_orphans(shard);
        self.owed.len() > 0
    }

    /// An object of ours is to have no replica any more: one that the replica owner may have has to go.
    pub(super) fn give_up(&mut self, shard: &mut Shard, digest: Digest) {
        let had = shard.store.as_mut().is_some_and(|store| store.want_no_copy(digest));
        if had && shard.replicas.has_owner(digest) {
            self.owed.owe(digest);
        }
    }

    /// A map came, or nothing is known of owners any more: this shard is the replica owner of other slots, and other
    /// shards are of ours. What was there is not to be trusted if that `missed` something. Gives the relations that
    /// ended.
    pub(super) fn follow(
        &mut self,
        shard: &mut Shard,
        epoch: Epoch,
        missed: bool,
        owners: Option<&SlotOwners>,
    ) -> BTreeMap<Slot, Relation> {
        let me = shard.ownership.key();
        let (mut relations, mut replica_owners) = (BTreeMap::new(), BTreeMap::new());
        if let Some(owners) = owners {
            for slot in (0..SLOTS as u16).map(Slot) {
                let (Some(owner), Some(second)) = (owners.owner(slot), owners.second(slot)) else { continue };
                if owner == me {
                    replica_owners.insert(slot, second);
                } else if second == me {
                    let before = shard.replicas.relation(slot).filter(|before| before.owner == owner && !missed);
                    relations.insert(slot, before.copied().unwrap_or(Relation { owner, since: epoch }));
                }
            }
        }
        let former = shard.replicas.relate(relations);
        let owns = |slot: Slot| owners.is_some_and(|owners| owners.owner(slot) == Some(me));
        self.change_owners(shard, epoch, replica_owners, missed, &owns);
        shard.replicas.keep_inherited(|slot| owns(slot) && !missed);
        former.into_iter().filter(|(slot, before)| shard.replicas.relation(*slot) != Some(before)).collect()
    }

    /// Replicas and objects become what they are by the owners that are now known. Of the slots of `cleared` only
    /// replicas are kept; those of `exported` are for their new owners to fetch. Gives the replicas that became objects
    /// of our own.
    pub(super) fn reassign(
        &mut self,
        shard: &mut Shard,
        ended: &BTreeMap<Slot, Relation>,
        cleared: &BTreeSet<Slot>,
        exported: &BTreeSet<Slot>,
    ) -> Vec<Digest> {
        let mut inherited = Vec::new();
        let Some(store) = &mut shard.store else { return inherited };
        let replicas = &shard.replicas;
        let gone = store.reassign(|digest, side| {
            let (slot, copy) = (digest.slot(), side == Side::Copy);
            match (copy, ended.contains_key(&slot)) {
                (false, _) if cleared.contains(&slot) => Fate::Goes,
                (false, _) => Fate::Stays,
                (true, false) if replicas.relation(slot).is_some() => Fate::Stays,
                (true, true) if replicas.has_inherited(slot) => {
                    inherited.push(digest);
                    Fate::Own
                }
                (true, true) if exported.contains(&slot) => Fate::Own,
                (true, _) => Fate::Goes,
            }
        });
        shard.counters.dropped_objects += gone;
        self.counters.inherited += inherited.len() as u64;
        inherited
    }

    /// The replica owners have changed: what waits for those of before is over.
    fn change_owners(
        &mut self,
        shard: &mut Shard,
        epoch: Epoch,
        owners: BTreeMap<Slot, ShardKey>,
        missed: bool,
        owns: &dyn Fn(Slot) -> bool,
    ) {
        // Where a map was missed nothing is left here; the replica owner may not have missed it, and have replicas
        // still.
        self.note_orphans(shard);
        // What replica owners refused by the map of before says nothing of this one.
        self.owners.forgive();
        self.owed.wake();
        if owners == *shard.replicas.owners() && !missed {
            return;
        }
        let former = shard.replicas.assign(owners, epoch);
        let now = shard.replicas.owners();
        let same = |slot: Slot| former.get(&slot) == now.get(&slot);
        let over = self.owed.of_slots(|slot| !same(slot));
        self.pushes.void(|slot| missed || !same(slot));
        self.owners.follow(now.values());
        // Also those that have none any more.
        let slots = former.keys().chain(now.keys()).copied();
        let changed: BTreeSet<Slot> = slots.filter(|slot| owns(*slot) && !same(*slot)).collect();
        for digest in over {
            let waiters = self.owed.end(digest);
            // The owner of the slot now may have inherited what was to go.
            let owned = owns(digest.slot());
            if missed || !owned {
                waiters.into_iter().for_each(|(item, _)| self.refuse_waiter(shard, item, Status::WrongOwner));
                if owned {
                    self.lapse(shard, digest, Vec::new());
                }
            } else {
                self.lapse(shard, digest, waiters);
            }
        }
        if missed {
            let late = self.owed.take_waiters();
            late.into_iter().for_each(|item| self.refuse_waiter(shard, item, Status::WrongOwner));
        }
        if let Some(store) = shard.store.as_mut().filter(|_| !changed.is_empty()) {
            // What they had of it they have dropped, or will before they are asked for it.
            let mut copied = Vec::new();
            store.reassign(|digest, side| {
                if side == Side::Copy || !changed.contains(&digest.slot()) {
                    return Fate::Stays;
                }
                if side == Side::Copied {
                    copied.push(digest);
                }
                Fate::Alone
            });
            for digest in copied.into_iter().filter(|digest| owns(digest.slot())) {
                self.lapse(shard, digest, Vec::new());
            }
            self.owed.bound();
        }
        // What is on its way since before owners changed may come to replica owners of now, without a note of ours.
        for digest in self.pushes.voided() {
            if shard.replicas.has_owner(digest) {
                self.owed.owe(digest);
            }
        }
        self.look_for_unreplicated(shard);
    }

    /// Replica owners are others, or slots are served that were not when they became so: both walks begin anew.
    pub(super) fn look_for_unreplicated(&mut self, shard: &Shard) {
        self.owed.wake();
        self.walk.begin(shard);
        self.ssd_walk.begin(shard);
    }

    /// What the SSD has may lack replicas.
    pub(super) fn walk_ssd_again(&mut self, shard: &Shard) {
        self.ssd_walk.begin(shard);
    }

    /// An object lacks a replica: the walk finds it.
    pub(super) fn walk_again(&mut self, shard: &Shard) {
        self.walk.repeat(shard);
    }

    /// A former replica owner may have a replica, and clients may have a lease on it: answers about the object wait
    /// until none reads it any more.
    fn lapse(&mut self, shard: &mut Shard, digest: Digest, waiters: Vec<(DeferredItem, u64)>) {
        let until_ns = self.leased_ns.saturating_add(Limits::COPY_LAPSE_NS);
        if self.leased_ns == 0 || until_ns <= shard.now_ns {
            waiters.into_iter().for_each(|(item, _)| shard.settle(item, |_, _| {}));
            return;
        }
        self.owed.lapse(digest, until_ns, waiters);
        self.waits.due(until_ns);
    }

    /// An object of ours is to have a replica, however it was put, and to have it again whenever it is lost, like one
    /// that was put with two. What is on an SSD only is read into memory first; what is neither here nor there
    /// `may_come` from a former owner.
    pub(in crate::service) fn want(
        &mut self,
        local: &mut LocalStore,
        digest: Digest,
        may_come: bool,
    ) -> ReplicaProgress {
        let wished = self.want_for_now(local, digest, may_come);
        if matches!(wished, ReplicaProgress::Coming | ReplicaProgress::There(_)) {
            local.write_promise(digest);
        }
        wished
    }

    /// A replica of an object of ours is wanted for as long as the object stays in memory: nothing is written to the
    /// SSD.
    fn want_for_now(&mut self, local: &mut LocalStore, digest: Digest, may_come: bool) -> ReplicaProgress {
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
        // A push of an older version, still in flight, makes no replica of this one and looks for none when it ends.
        let sending = self.pushes.is_sending(digest, version);
        let Some(store) = shard.store.as_mut().filter(|store| !store.is_copy(digest)) else {
            return ReplicaProgress::Elsewhere;
        };
        if store.is_copied(digest) && !sending {
            return ReplicaProgress::There(bytes);
        }
        if store.replica(digest) == Replica::None {
            store.want_copy(digest);
        }
        if !sending && !self.wishes.add(digest) {
            self.walk_again(shard);
        }
        ReplicaProgress::Coming
    }

    /// An object in memory is given to a client over a stream. One that is hot gets a replica, within the rate of what
    /// moves in the background. What clients of this host read out of the pool by themselves does not count: a replica
    /// elsewhere would not relieve it.
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
        let copied = shard.store.as_ref().is_none_or(|store| store.is_copied(digest) || store.is_copy(digest));
        if copied || context.fetches || !shard.replicas.has_owner(digest) {
            return;
        }
        if self.want_for_now(local, digest, false) == ReplicaProgress::Coming {
            self.counters.hot += 1;
        }
    }
}
