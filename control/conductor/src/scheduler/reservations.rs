//! Requests that are booked, and their leases.

use std::collections::BTreeMap;

use super::request::Request;
use crate::policy::Placement;

/// A booked request.
pub(super) struct Reservation {
    pub(super) request: Request,
    pub(super) placement: Placement,
    pub(super) prefilled: bool,
    pub(super) decoding: bool,
    /// When it was booked, or updated last.
    pub(super) touched_ns: u64,
}

/// Booked requests by number.
pub(super) struct Reservations {
    booked: BTreeMap<u64, Reservation>,
    most: usize,
    lease_ns: u64,
    /// No lease ends before.
    expires_ns: u64,
}

impl Reservations {
    /// None yet, and `most` at most, each for `lease_ns` after it was touched.
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

    /// Numbers of the reservations of which `is_meant` is true.
    pub(super) fn ids_where(&self, is_meant: impl Fn(&Reservation) -> bool) -> Vec<u64> {
        self.booked.iter().filter(|(_, kept)| is_meant(kept)).map(|(id, _)| *id).collect()
    }

    /// Numbers of the reservations whose leases have ended; nothing before it is time to look.
    pub(super) fn over(&self, now_ns: u64) -> Option<Vec<u64>> {
        let is_over = |kept: &Reservation| kept.touched_ns.saturating_add(self.lease_ns) <= now_ns;
        (now_ns >= self.expires_ns).then(|| self.ids_where(is_over))
    }

    /// Finds anew before when no lease ends, after those that were [`Self::over`] have been removed.
    pub(super) fn rearm(&mut self, now_ns: u64) {
        let next_ns = self.booked.values().map(|kept| kept.touched_ns).min().unwrap_or(now_ns);
        self.expires_ns = next_ns.saturating_add(self.lease_ns).max(now_ns + 1);
    }
}
