//! Puts: reserve, then commit or abort; expire when the deadline passes in between.

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::{PinId, ReservationId, Version};

use super::{Extent, Store};
use crate::allocator::GRANULE_BYTES;
use crate::entry::{BYTES_MOST, Entries, EntryId, Keep, Mark, Replica, Reserve, State};
use crate::errors::{CommitError, ReserveError, StaleReservation};
use crate::events::{Change, Medium};
use crate::eviction::EvictionPolicy;
use crate::store::stats::size_class;

impl<P: EvictionPolicy> Store<P> {
    /// Reserves memory for an object of `bytes`, evicting unused objects if necessary. Its writer may write the extent
    /// until the reservation is committed or aborted; no other reader or writer uses it until then.
    ///
    /// # Errors
    /// See [`ReserveError`]. A refusal of a request that cannot succeed evicts nothing, except that if pinned or
    /// reserved extents fragment the pool into blocks that are all too small, some objects (at most about twice
    /// `bytes`) may have been evicted before that is known.
    pub fn reserve(&mut self, digest: Digest, bytes: u64) -> Result<(ReservationId, Extent), ReserveError> {
        self.reserve_for(&Reserve::plain(digest, bytes))
    }

    /// Like [`Self::reserve`], with options of the object, and memory for its tail ([`Self::reserved_tail`]). An object
    /// to be replaced stays until the new one is committed. A replica is hard pinned within the limits of hard pins,
    /// and kept without a pin beyond them.
    ///
    /// # Errors
    /// See [`Self::reserve`].
    pub fn reserve_for(&mut self, wanted: &Reserve) -> Result<(ReservationId, Extent), ReserveError> {
        let Reserve { digest, bytes, tail_bytes, mut keep, .. } = *wanted;
        if bytes == 0 {
            return Err(ReserveError::Empty);
        }
        let limit_bytes = self.config.max_object_bytes.min(BYTES_MOST);
        if bytes > limit_bytes {
            return Err(ReserveError::TooLarge { bytes, limit_bytes });
        }
        if !wanted.replace
            && let Some(id) = self.index.find(&self.entries, digest)
        {
            self.counters.exists_conflicts += 1;
            self.order.access(&mut self.entries, id);
            return Err(ReserveError::Exists);
        }
        if self.reservations.is_full() {
            self.counters.reserve_refusals += 1;
            let limit = self.config.max_reservations;
            return Err(ReserveError::TooManyReservations { limit });
        }
        let together = bytes + u64::from(tail_bytes);
        keep.hard_pin &= wanted.replica != Replica::Second || self.may_pin(together, keep.account);
        let wanted = &Reserve { keep, ..*wanted };
        let leased = if wanted.moves { Ok(()) } else { self.within_lease(together, &keep) };
        let room = leased.and_then(|()| self.room_with_tail(wanted));
        let room = room.inspect_err(|_| self.counters.reserve_refusals += 1)?;
        let block = room.block;
        let id = self.entries.reserve(&Reserve { tail_bytes: room.tail_bytes, ..*wanted }, block);
        self.allocator.set_owner(block, id.0);
        if let Some(class) = room.class {
            self.give_slot(class, id);
        }
        self.granules[State::Reserved as usize] += self.entries[id].granules();
        self.order.charge(&mut self.entries, id, &keep);
        let (index, generation) = self.reservations.insert(id.0);
        self.drain();
        Ok((ReservationId { index, generation }, self.extent(id)))
    }

    /// Makes a reserved object visible, with the `checksum` of its bytes, and assigns its version.
    ///
    /// # Errors
    /// See [`CommitError`], which states for each error the state of the reservation.
    ///
    /// # Panics
    /// If the 2^64 versions are used up.
    pub fn commit(&mut self, reservation: ReservationId, checksum: u64) -> Result<Version, CommitError> {
        let version = Version(self.next_version);
        let bytes = self.show(reservation, checksum, version)?;
        self.counters.sizes[size_class(bytes)] += 1;
        self.next_version = self.next_version.checked_add(1).expect("versions are not used up");
        self.counters.puts += 1;
        Ok(version)
    }

    /// Like [`Store::commit`], for an object that was committed before and is read back with its former version.
    ///
    /// # Errors
    /// See [`Store::commit`].
    pub fn restore(&mut self, reservation: ReservationId, checksum: u64, version: Version) -> Result<(), CommitError> {
        self.show(reservation, checksum, version).map(|_| ())
    }

    /// Makes a reserved object visible; returns its size.
    fn show(&mut self, reservation: ReservationId, checksum: u64, version: Version) -> Result<u64, CommitError> {
        let Some(id) = self.reserved(reservation) else { return Err(CommitError::Stale) };
        if self.entries[id].state() == State::Quarantined {
            return Err(CommitError::Expired);
        }
        self.reservations.remove(reservation.index, reservation.generation);
        let digest = self.entries[id].digest();
        if let Some(former) = self.index.find(&self.entries, digest) {
            if !self.entries[id].is(Mark::Replace) {
                self.counters.exists_conflicts += 1;
                self.release(id);
                return Err(CommitError::Exists);
            }
            // Its readers finish undisturbed: its bytes stay until the last pin is released.
            self.counters.replacements += 1;
            self.remove_entry(former);
        }
        self.change_state(id, |entries: &mut Entries, id| entries.commit(id, version, checksum));
        self.index.insert(digest, id);
        self.order.insert(&mut self.entries, id);
        let bytes = self.entries[id].bytes();
        self.counters.payload_bytes += bytes;
        self.counters.copies += u64::from(self.entries[id].is(Mark::Copy));
        self.events.push(Change::Stored, Medium::Memory, digest, bytes);
        Ok(bytes)
    }

    /// Sets the account, the group and the hard pin of a pinned object, for which they are known only now; the hard pin
    /// only within the limits. Soft pins have expired by then. False if its account has no room for it, even after
    /// evicting the account's other objects as for a put: then nothing is set.
    pub fn keep_as(&mut self, pin: PinId, keep: &Keep) -> bool {
        let Some(entry) = self.pins.get(pin.index, pin.generation) else { return true };
        let id = EntryId(entry);
        if self.entries[id].state() != State::Live {
            return true;
        }
        let bytes = self.entries[id].granules() * GRANULE_BYTES;
        let is_other = self.entries[id].account() != usize::from(keep.account);
        if is_other && self.within_lease(bytes, &Keep { hard_pin: false, ..*keep }).is_err() {
            return false;
        }
        let hard = keep.hard_pin && self.pin_limit(self.entries[id].granules(), keep.account).is_none();
        self.order.keep_as(&mut self.entries, id, &Keep { hard_pin: hard, soft_pin_ns: 0, ..*keep });
        true
    }

    /// Returns true if the commit of a reservation replaces an object; false if the reservation is stale.
    #[must_use]
    pub fn replaces(&self, reservation: ReservationId) -> bool {
        let entry = self.reservations.get(reservation.index, reservation.generation);
        entry.is_some_and(|entry| self.entries[EntryId(entry)].is(Mark::Replace))
    }

    /// Returns the digest and the size of a reservation; `None` if it is stale, which is counted.
    #[must_use]
    pub fn reserved_for(&mut self, reservation: ReservationId) -> Option<(Digest, u64)> {
        let id = self.reserved(reservation)?;
        Some((self.entries[id].digest(), self.entries[id].bytes()))
    }

    /// Returns the extent of a reservation; `None` if it is stale.
    #[must_use]
    pub fn reserved_extent(&self, reservation: ReservationId) -> Option<Extent> {
        let entry = self.reservations.get(reservation.index, reservation.generation)?;
        Some(self.extent(EntryId(entry)))
    }

    /// Fails a put whose deadline passed: its extent stays in quarantine until [`Store::abort`], since its writer may
    /// still be writing. Has no effect if it was expired before; a stale reservation is counted.
    pub fn expire(&mut self, reservation: ReservationId) {
        let Some(id) = self.reserved(reservation) else { return };
        if self.entries[id].state() == State::Reserved {
            self.counters.expirations += 1;
            self.change_state(id, Entries::expire);
        }
    }

    /// Aborts a put and frees its extent: the host knows that its writer has stopped.
    ///
    /// # Errors
    /// The reservation is not held; only a counter changes.
    pub fn abort(&mut self, reservation: ReservationId) -> Result<(), StaleReservation> {
        let Some(id) = self.reserved(reservation) else { return Err(StaleReservation) };
        self.reservations.remove(reservation.index, reservation.generation);
        self.counters.aborts += 1;
        self.release(id);
        Ok(())
    }

    /// Returns the entry of a reservation that is held; counts stale ones.
    fn reserved(&mut self, reservation: ReservationId) -> Option<EntryId> {
        let entry = self.reservations.get(reservation.index, reservation.generation);
        self.counters.stale_ids += u64::from(entry.is_none());
        entry.map(EntryId)
    }
}
