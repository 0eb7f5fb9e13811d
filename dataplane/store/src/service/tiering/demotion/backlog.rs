//! Backlog of the SSD: objects that wait to be written, bounded in number and in bytes, and counted by account.
//!
//! A tenant that is alone may fill the backlog. While others want room and find none, each may have a part of it in
//! proportion to its weight, so that a burst of one does not keep the puts of the others out.

use std::collections::BTreeMap;

/// Time for which a tenant counts as wanting room after it found none: longer than clients pause between attempts.
const WANTS_FOR_NS: u64 = 1_000_000_000;

/// Objects of one account.
#[derive(Clone, Copy, Debug)]
struct AccountPart {
    objects: u32,
    bytes: u64,
    weight: u32,
    /// Until when it counts as wanting more.
    wants_until_ns: u64,
}

/// Objects pinned for writes, and their limits.
#[derive(Debug)]
pub(super) struct Backlog {
    most_bytes: u64,
    most: usize,
    objects: usize,
    bytes: u64,
    /// Accounts that have objects, or want room.
    of: BTreeMap<u16, AccountPart>,
    /// Until when any account wants room.
    wants_until_ns: u64,
}

impl Backlog {
    pub(super) const fn new(most_bytes: u64, most: usize) -> Self {
        Self { most_bytes, most, objects: 0, bytes: 0, of: BTreeMap::new(), wants_until_ns: 0 }
    }

    pub(super) const fn objects(&self) -> usize {
        self.objects
    }

    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns true if another object may be added.
    pub(super) const fn has_room(&self, bytes: u64) -> bool {
        // A single object may wait, however large it is.
        let little = self.objects == 0 || self.bytes.saturating_add(bytes) <= self.most_bytes;
        little && self.objects < self.most
    }

    /// Returns true if a put of a tenant may add an object; otherwise the tenant counts as wanting room for a while, if
    /// it has less than its part.
    pub(super) fn admits(&mut self, account: u16, weight: u32, bytes: u64, now_ns: u64) -> bool {
        let has_room = self.has_room(bytes);
        if has_room && self.wants_until_ns <= now_ns {
            return true;
        }
        self.of.retain(|_, held| held.objects > 0 || held.wants_until_ns > now_ns);
        let wants = |(of, held): (&u16, &AccountPart)| *of != account && held.wants_until_ns > now_ns;
        if has_room && !self.of.iter().any(wants) {
            return true;
        }
        let is_within = self.is_within_part(account, weight, bytes);
        if is_within && !has_room {
            let held =
                self.of.entry(account).or_insert(AccountPart { objects: 0, bytes: 0, weight, wants_until_ns: 0 });
            held.wants_until_ns = now_ns.saturating_add(WANTS_FOR_NS);
            self.wants_until_ns = self.wants_until_ns.max(held.wants_until_ns);
        }
        has_room && is_within
    }

    /// Returns true if an account has no more than its part of the backlog, with this many bytes more.
    fn is_within_part(&self, account: u16, weight: u32, bytes: u64) -> bool {
        let others = self.of.iter().filter(|(of, _)| **of != account).map(|(_, held)| u64::from(held.weight));
        let weights = others.sum::<u64>() + u64::from(weight.max(1));
        let part = |most: u64| u128::from(most) * u128::from(weight.max(1)) / u128::from(weights);
        let Some(held) = self.of.get(&account).filter(|held| held.objects > 0) else { return true };
        u128::from(held.bytes.saturating_add(bytes)) <= part(self.most_bytes)
            && u128::from(held.objects) < part(self.most as u64)
    }

    /// Returns true if the backlog is more than half full: the rest is for puts while these objects are written.
    pub(super) const fn is_much(&self) -> bool {
        self.bytes > self.most_bytes / 2 || self.objects > self.most / 2
    }

    /// Returns true while objects that are charged to an account wait.
    pub(super) fn holds_of(&self, account: u16) -> bool {
        self.of.get(&account).is_some_and(|held| held.objects > 0)
    }

    /// Adds an object of an account with this weight.
    pub(super) fn add(&mut self, bytes: u64, account: u16, weight: u32) {
        self.objects += 1;
        self.bytes += bytes;
        let held = self.of.entry(account).or_insert(AccountPart { objects: 0, bytes: 0, weight, wants_until_ns: 0 });
        (held.objects, held.bytes, held.weight) = (held.objects + 1, held.bytes + bytes, weight.max(1));
    }

    /// Removes an object of an account.
    pub(super) fn take(&mut self, bytes: u64, account: u16) {
        self.objects -= 1;
        self.bytes -= bytes;
        if let Some(held) = self.of.get_mut(&account) {
            held.objects = held.objects.saturating_sub(1);
            held.bytes = held.bytes.saturating_sub(bytes);
            if held.objects == 0 && held.wants_until_ns == 0 {
                self.of.remove(&account);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_object_waits_however_large_it_is_and_more_within_the_limits() {
        let mut backlog = Backlog::new(100, 3);
        assert!(backlog.has_room(1000));
        backlog.add(60, 1, 1);
        assert!(backlog.has_room(40) && !backlog.has_room(41) && backlog.is_much());
        backlog.add(10, 2, 1);
        backlog.add(10, 2, 1);
        assert!(!backlog.has_room(1), "three are as many as may wait");
        assert!(backlog.holds_of(1) && backlog.holds_of(2));
        backlog.take(60, 1);
        backlog.take(10, 2);
        assert!(!backlog.holds_of(1) && backlog.holds_of(2) && !backlog.is_much());
        assert_eq!((backlog.objects(), backlog.bytes()), (1, 10));
    }

    #[test]
    fn a_tenant_alone_has_the_whole_backlog_and_yields_parts_to_those_who_want_some() {
        let mut backlog = Backlog::new(100, 1000);
        let fill = |backlog: &mut Backlog, account, weight, now_ns| {
            let mut added = 0;
            while backlog.admits(account, weight, 10, now_ns) {
                backlog.add(10, account, weight);
                added += 1;
            }
            added
        };
        assert_eq!(fill(&mut backlog, 1, 1, 0), 10);
        assert_eq!(fill(&mut backlog, 2, 3, 0), 0, "there is no room yet, and it wants some");
        // As objects are written, the first gets none of the room until it is down to its quarter.
        for written in 1..=10 {
            backlog.take(10, 1);
            let added = (fill(&mut backlog, 1, 1, written), fill(&mut backlog, 2, 3, written));
            assert_eq!(added, if written <= 8 { (0, 1) } else { (1, 0) }, "{written}");
        }
        assert!(backlog.holds_of(1) && backlog.holds_of(2));
        (0..7).for_each(|_| backlog.take(10, 2));
        assert_eq!(fill(&mut backlog, 1, 1, 2 * WANTS_FOR_NS), 7, "the other has wanted nothing for a while");
    }
}
