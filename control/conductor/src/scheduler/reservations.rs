//! Booked requests, and their leases.

use std::collections::BTreeMap;

use super::queue::promise::Promise;
use super::request::Request;
use crate::policy::Placement;

/// Booked request.
pub(super) struct Reservation {
    pub(super) request: Request,
    pub(super) placement: Placement,
    /// Promise of its first token, if it has an objective.
    pub(super) promise: Option<Promise>,
    pub(super) prefilled: bool,
    /// Tokens and requests that were resident when its decode began; `None` before.
    pub(super) batch: Option<(u64, u32)>,
    /// True if its duration is that of a transfer or a pipeline, of which the cost model learns nothing.
    pub(super) stalls: bool,
    /// Time of the booking, or of the last update.
    pub(super) touched_ns: u64,
}

/// Booked requests, by number.
pub(super) struct Reservations {
    booked: BTreeMap<u64, Reservation>,
    most: usize,
    lease_ns: u64,
    /// Lower bound of the first expiry of a lease.
    expires_ns: u64,
}

impl Reservations {
    /// Creates an empty set of at most `most` reservations, each with a lease of `lease_ns` since it was last touched.
    pub(super) const fn new(most: usize, lease_ns: u64) -> Self {
        Self { booked: BTreeMap::new(), most, lease_ns, expires_ns: 0 }
    }

    pub(super) fn is_full(&self) -> bool {
        self.booked.len() >= self.most
    }

    pub(super) fn get(&self, id: u64) -> Option<&Reservation> {
        self.booked.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: u64) -> Option<&mut Reservation> {
        self.booked.get_mut(&id)
    }

    pub(super) fn insert(&mut self, reservation: Reservation) {
        self.expires_ns = self.expires_ns.min(reservation.touched_ns.saturating_add(self.lease_ns));
        self.booked.insert(reservation.request.id, reservation);
    }

    pub(super) fn remove(&mut self, id: u64) -> Option<Reservation> {
        self.booked.remove(&id)
    }

    /// Returns the numbers of the reservations for which `is_meant` returns true.
    pub(super) fn ids_where(&self, is_meant: impl Fn(&Reservation) -> bool) -> Vec<u64> {
        self.booked.iter().filter(|(_, kept)| is_meant(kept)).map(|(id, _)| *id).collect()
    }

    /// Returns the numbers of the reservations whose lease has expired; `None` before the first one can have.
    pub(super) fn over(&self, now_ns: u64) -> Option<Vec<u64>> {
        let is_over = |kept: &Reservation| kept.touched_ns.saturating_add(self.lease_ns) <= now_ns;
        (now_ns >= self.expires_ns).then(|| self.ids_where(is_over))
    }

    /// Computes the first expiry again, after the expired reservations ([`Self::over`]) have been removed.
    pub(super) fn rearm(&mut self, now_ns: u64) {
        let next_ns = self.booked.values().map(|kept| kept.touched_ns).min().unwrap_or(now_ns);
        self.expires_ns = next_ns.saturating_add(self.lease_ns).max(now_ns + 1);
    }
}
