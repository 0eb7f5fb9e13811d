//! Moves of objects between the pool and the device pool.
//!
//! A move copies: the object stays where it is, pinned, while its host copies the bytes to the reserved destination.
//! When that is done the destination takes the place of the source in one step, as the same object of the same version:
//! it stays visible throughout, and readers of the source finish undisturbed. If the object was removed or replaced
//! meanwhile, the copy is dropped.

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::{PinId, ReservationId};

use super::Store;
use super::space::Space;
use super::stats::Counters;
use super::unchecked::UncheckedObjects;
use crate::entry::{Entry, EntryId, Mark};
use crate::eviction::EvictionPolicy;
use crate::generational::GenerationalTable;

/// Copy of the tail of an object that moves, inside the pool.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TailMove {
    /// Offset of the source.
    pub from: u64,
    /// Offset of the destination.
    pub to: u64,
    /// Length.
    pub bytes: u64,
}

/// Move of an object that has begun: see [`PoolMoves`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PoolMove {
    /// Digest of the object.
    pub digest: Digest,
    /// True if it moves into the device pool; false if it moves out of it.
    pub is_promotion: bool,
    /// Offset of the bytes in the pool that they are in.
    pub from: u64,
    /// Offset of the destination in the other pool.
    pub to: u64,
    /// Length of the object.
    pub bytes: u64,
    /// Checksum that its writer stated.
    pub checksum: u64,
    /// Copy of its tail, if it has one.
    pub tail: Option<TailMove>,
    pin: PinId,
    reservation: ReservationId,
}

/// Reason why an object does not move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NoMove {
    /// There is no such object in the pool that it would leave, or it must stay there.
    NotThere,
    /// The other pool has no room, or no handle is free.
    NoRoom,
}

/// Moves between the two pools of a store, with an eviction policy of type `P`.
pub struct PoolMoves<'a, P> {
    space: &'a mut Space<P>,
    unchecked: &'a mut UncheckedObjects,
    pins: &'a mut GenerationalTable<PinId>,
    reservations: &'a mut GenerationalTable<ReservationId>,
    counters: &'a mut Counters,
}

impl<P: EvictionPolicy> Store<P> {
    /// Returns true if an object is to be promoted when it is accessed: it is in the pool, the eviction policy ranks it
    /// among those that were accessed before, and nothing else keeps it there.
    #[must_use]
    pub fn is_hot(&self, digest: Digest) -> bool {
        self.objects().get(digest).is_some_and(|entry| entry.is_protected() && entry.may_be_promoted())
    }

    /// Returns the moves between the pool and the device pool.
    pub const fn moves(&mut self) -> PoolMoves<'_, P> {
        let Self { space, unchecked, pins, reservations, counters, .. } = self;
        PoolMoves { space, unchecked, pins, reservations, counters }
    }
}

impl<P: EvictionPolicy> PoolMoves<'_, P> {
    /// Begins to move an object into the device pool, where it takes free space only. The move is to be finished,
    /// cancelled or abandoned.
    ///
    /// # Errors
    /// See [`NoMove`].
    pub fn promote(&mut self, digest: Digest) -> Result<PoolMove, NoMove> {
        self.begin(digest, Entry::may_be_promoted)
    }

    /// Begins to move an object out of the device pool. Others are evicted from the pool to make room for it.
    ///
    /// # Errors
    /// See [`NoMove`].
    pub fn demote(&mut self, digest: Digest) -> Result<PoolMove, NoMove> {
        self.begin(digest, Entry::is_on_device)
    }

    fn begin(&mut self, digest: Digest, may_move: fn(&Entry) -> bool) -> Result<PoolMove, NoMove> {
        let found = self.unchecked.find_to_lend(self.space, digest);
        let entries = self.space.objects().entries();
        let old = found.filter(|id| may_move(&entries[*id])).ok_or(NoMove::NotThere)?;
        if self.pins.is_full() || self.reservations.is_full() {
            return Err(NoMove::NoRoom);
        }
        // Pinned first, so that making room does not evict it; and accessed before, as policies expect of every pin.
        self.space.access(old);
        let view = self.space.pin(old);
        let Some(new) = self.space.reserve_elsewhere(old) else {
            self.space.unpin(old);
            return Err(NoMove::NoRoom);
        };
        let (pool, entries) = (self.space.pool(), self.space.objects().entries());
        let to = pool.extent(&entries[new]).offset;
        // The shorter of the two places: both are long enough for the tail.
        let bytes = pool.tail_room(&entries[old]).min(pool.tail_room(&entries[new]));
        let tail = view.has_tail.then(|| TailMove { from: view.tail_at, to: pool.tail_at(&entries[new]), bytes });
        Ok(PoolMove {
            digest,
            is_promotion: !view.is_on_device,
            from: view.extent.offset,
            to,
            bytes: view.extent.bytes,
            checksum: view.checksum,
            tail,
            pin: self.pins.insert(old),
            reservation: self.reservations.insert(new),
        })
    }

    /// Finishes a move whose bytes and tail were copied. Returns false if the object was removed, replaced or pinned
    /// meanwhile: then the copy is dropped.
    ///
    /// # Panics
    /// If the move has ended before.
    pub fn finish(&mut self, one: &PoolMove) -> bool {
        // An object that was pinned meanwhile stays in memory.
        let entries = self.space.objects().entries();
        let stays =
            |old: &EntryId| one.is_promotion && [Mark::Soft, Mark::Hard].into_iter().any(|mark| entries[*old].is(mark));
        let Some(old) = self.source(one).filter(|old| !stays(old)) else {
            self.cancel(one);
            return false;
        };
        let new = self.reservations.remove(one.reservation).expect("a move reserves its destination");
        self.space.supersede(old, new);
        let Counters { promotions, demotions, .. } = self.counters;
        *(if one.is_promotion { promotions } else { demotions }) += 1;
        self.release(one);
        true
    }

    /// Cancels a move: nothing is copied any more, and the object stays where it is.
    ///
    /// # Panics
    /// See [`Self::finish`].
    pub fn cancel(&mut self, one: &PoolMove) {
        let new = self.reservations.remove(one.reservation).expect("a move reserves its destination");
        self.space.release(new);
        self.release(one);
    }

    /// Cancels a move whose bytes are damaged, and drops the object.
    ///
    /// # Panics
    /// See [`Self::finish`].
    pub fn drop_object(&mut self, one: &PoolMove) {
        if let Some(old) = self.source(one) {
            self.space.remove(old, true);
        }
        self.cancel(one);
    }

    /// Gives a move up whose copy may never end, because the device is lost: a destination in the pool may still be
    /// written to, and is not used again.
    ///
    /// # Panics
    /// See [`Self::finish`].
    pub fn abandon(&mut self, one: &PoolMove) {
        if one.is_promotion {
            return self.cancel(one);
        }
        let new = self.reservations.get(one.reservation).expect("a move reserves its destination");
        self.space.quarantine(new);
        self.release(one);
    }

    /// Returns the entry of a move's object, unless it was removed or replaced.
    fn source(&self, one: &PoolMove) -> Option<EntryId> {
        let old = self.pins.get(one.pin).expect("a move pins its object");
        self.space.objects().entries()[old].is_live().then_some(old)
    }

    fn release(&mut self, one: &PoolMove) {
        let old = self.pins.remove(one.pin).expect("a move pins its object");
        self.space.unpin(old);
    }

    /// Returns the object that leaves the device pool next, by the eviction policy.
    pub fn victim(&mut self) -> Option<Digest> {
        let id = self.space.device_victim()?;
        Some(self.space.objects().entries()[id].digest())
    }

    /// Removes every object of the device pool, which is lost and not used any more. Returns their number. Walks the
    /// arena.
    pub fn lose_device(&mut self) -> u64 {
        let mut lost = 0;
        for id in (0..self.space.objects().entries().touched()).map(EntryId) {
            let entry = &self.space.objects().entries()[id];
            if entry.is_live() && entry.is_on_device() {
                self.space.remove(id, true);
                lost += 1;
            }
        }
        self.counters.lost_with_device += lost;
        self.space.close_device();
        lost
    }
}
