//! Backlog of the SSD: objects that wait to be written, bounded in number and in bytes, and counted by account.

use std::collections::BTreeMap;

/// Objects pinned for writes, and their limits.
#[derive(Debug)]
pub(super) struct Backlog {
    most_bytes: u64,
    most: usize,
    objects: usize,
    bytes: u64,
    /// Number of objects by account.
    of: BTreeMap<u16, u32>,
}

impl Backlog {
    pub(super) const fn new(most_bytes: u64, most: usize) -> Self {
        Self { most_bytes, most, objects: 0, bytes: 0, of: BTreeMap::new() }
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

    /// Returns true if the backlog is more than half full: the rest is for puts while these objects are written.
    pub(super) const fn is_much(&self) -> bool {
        self.bytes > self.most_bytes / 2 || self.objects > self.most / 2
    }

    /// Returns true while objects that are charged to an account wait.
    pub(super) fn holds_of(&self, account: u16) -> bool {
        self.of.contains_key(&account)
    }

    /// Adds an object of an account.
    pub(super) fn add(&mut self, bytes: u64, account: u16) {
        self.objects += 1;
        self.bytes += bytes;
        *self.of.entry(account).or_default() += 1;
    }

    /// Removes an object of an account.
    pub(super) fn take(&mut self, bytes: u64, account: u16) {
        self.objects -= 1;
        self.bytes -= bytes;
        if let Some(held) = self.of.get_mut(&account) {
            *held = held.saturating_sub(1);
            if *held == 0 {
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
        backlog.add(60, 1);
        assert!(backlog.has_room(40) && !backlog.has_room(41) && backlog.is_much());
        backlog.add(10, 2);
        backlog.add(10, 2);
        assert!(!backlog.has_room(1), "three are as many as may wait");
        assert!(backlog.holds_of(1) && backlog.holds_of(2));
        backlog.take(60, 1);
        backlog.take(10, 2);
        assert!(!backlog.holds_of(1) && backlog.holds_of(2) && !backlog.is_much());
        assert_eq!((backlog.objects(), backlog.bytes()), (1, 10));
    }
}
