//! Puts: reserve, then commit or abort; expire when the deadline passes in between.

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::{ReservationId, Version};

use super::stats::size_class;
use super::{Extent, Store};
use crate::entry::{BYTES_MOST, Entry, Reserve, State};
use crate::errors::{CommitError, ReserveError, StaleReservation};
use crate::eviction::EvictionPolicy;

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

    /// Like [`Self::reserve`], with options of the object, and memory for its tail ([`super::Pool::tail_at`]). An
    /// object to be replaced stays until the new one is committed. A replica is hard pinned within the limits of hard
    /// pins, and kept without a pin beyond them.
    ///
    /// # Errors
    /// See [`Self::reserve`].
    pub fn reserve_for(&mut self, wanted: &Reserve) -> Result<(ReservationId, Extent), ReserveError> {
        let Reserve { digest, bytes, .. } = *wanted;
        if bytes == 0 {
            return Err(ReserveError::Empty);
        }
        let limit_bytes = self.config.max_object_bytes.min(BYTES_MOST);
        if bytes > limit_bytes {
            return Err(ReserveError::TooLarge { bytes, limit_bytes });
        }
        if !wanted.replace
            && let Some(id) = self.space.objects().find(digest)
        {
            self.counters.exists_conflicts += 1;
            self.space.access(id);
            return Err(ReserveError::Exists);
        }
        if self.reservations.is_full() {
            self.counters.reserve_refusals += 1;
            let limit = self.config.max_reservations;
            return Err(ReserveError::TooManyReservations { limit });
        }
        let reserved = self.space.reserve(wanted);
        let id = reserved.inspect_err(|_| self.counters.reserve_refusals += 1)?;
        Ok((self.reservations.insert(id), self.space.pool().extent(&self.space.objects().entries()[id])))
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
        let Some(id) = self.reservations.get(reservation) else {
            self.counters.stale_ids += 1;
            return Err(CommitError::Stale);
        };
        let entry = &self.space.objects().entries()[id];
        if entry.state() == State::Quarantined {
            return Err(CommitError::Expired);
        }
        self.reservations.remove(reservation);
        if let Some(former) = self.space.objects().find(entry.digest()) {
            if !entry.replaces() {
                self.counters.exists_conflicts += 1;
                self.space.release(id);
                return Err(CommitError::Exists);
            }
            // Its readers finish undisturbed: its bytes stay until the last pin is released.
            self.counters.replacements += 1;
            self.space.remove(former, false);
        }
        Ok(self.space.commit(id, version, checksum))
    }

    /// Returns the metadata of the object of a reservation; `None` if the reservation is stale.
    #[must_use]
    pub fn reserved(&self, reservation: ReservationId) -> Option<&Entry> {
        Some(&self.space.objects().entries()[self.reservations.get(reservation)?])
    }

    /// Fails a put whose deadline passed: its extent stays in quarantine until [`Store::abort`], since its writer may
    /// still be writing. Has no effect if it was expired before; a stale reservation is counted.
    pub fn expire(&mut self, reservation: ReservationId) {
        let Some(id) = self.reservations.get(reservation) else {
            self.counters.stale_ids += 1;
            return;
        };
        if self.space.objects().entries()[id].state() == State::Reserved {
            self.counters.expirations += 1;
            self.space.quarantine(id);
        }
    }

    /// Aborts a put and frees its extent: the host knows that its writer has stopped.
    ///
    /// # Errors
    /// The reservation is not held; only a counter changes.
    pub fn abort(&mut self, reservation: ReservationId) -> Result<(), StaleReservation> {
        let Some(id) = self.reservations.remove(reservation) else {
            self.counters.stale_ids += 1;
            return Err(StaleReservation);
        };
        self.counters.aborts += 1;
        self.space.release(id);
        Ok(())
    }
}
