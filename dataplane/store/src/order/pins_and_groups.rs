//! Soft pins and groups, which keep an object beyond its eviction policy.

use std::collections::BTreeMap;

use super::groups::{GroupId, Groups};
use crate::entry::{Entries, EntryId, Keep, Mark};

/// State of an object with a soft pin or a group.
#[derive(Clone, Copy, Debug)]
struct PinnedOrGrouped {
    group: u64,
    soft_pin_ns: u64,
    /// End of its soft pin, and a number to distinguish those that end at the same time.
    until: (u64, u64),
    /// Accesses of the group when it was considered last.
    seen: u32,
    /// True if it is to be evicted when it is unpinned, because its group was evicted.
    follows: bool,
}

/// Soft pins and groups of all objects that have one.
#[derive(Debug, Default)]
pub(super) struct PinsAndGroups {
    now_ns: u64,
    /// Clock that orders softly pinned objects.
    clock: u64,
    kept: BTreeMap<u32, PinnedOrGrouped>,
    /// Soft pins by the time at which they end.
    until: BTreeMap<(u64, u64), u32>,
    groups: Groups,
}

impl PinsAndGroups {
    /// Advances the time; it never goes back.
    pub(super) fn tick(&mut self, now_ns: u64) {
        self.now_ns = self.now_ns.max(now_ns);
    }

    /// Returns the number of softly pinned objects.
    pub(super) fn soft_pins(&self) -> usize {
        self.until.len()
    }

    /// Returns the stamp of an object that comes to the recent end of the softly pinned ones.
    pub(super) const fn next_stamp(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// Notes the soft pin and the group of an entry, if it has one; they begin with [`Self::begin`].
    pub(super) fn note(&mut self, entries: &mut Entries, id: EntryId, keep: &Keep) {
        if keep.group != 0 || keep.soft_pin_ns != 0 {
            let Keep { group, soft_pin_ns, .. } = *keep;
            self.kept.insert(id.0, PinnedOrGrouped { group, soft_pin_ns, until: (0, 0), seen: 0, follows: false });
            entries.set(id, Mark::Soft, soft_pin_ns != 0 && !keep.hard_pin);
        }
    }

    /// Forgets an entry that is about to be freed.
    pub(super) fn forget(&mut self, id: EntryId) {
        if !self.kept.is_empty() {
            self.kept.remove(&id.0);
        }
    }

    /// Begins the soft pin of an object that became live, and adds it to its group.
    pub(super) fn begin(&mut self, entries: &mut Entries, id: EntryId) {
        let Some(kept) = self.kept.get_mut(&id.0) else { return };
        if let Some(accesses) = self.groups.join((entries[id].account() as u16, kept.group), id) {
            kept.seen = accesses;
            entries.set(id, Mark::Grouped, true);
        }
        if entries[id].is(Mark::Soft) {
            kept.until = (self.now_ns.saturating_add(kept.soft_pin_ns), self.clock);
            self.until.insert(kept.until, id.0);
        }
    }

    /// Ends the soft pin of a live object, and removes it from its group.
    pub(super) fn end(&mut self, entries: &mut Entries, id: EntryId) {
        let entry = &entries[id];
        let (is_grouped, is_soft) = (entry.is(Mark::Grouped), entry.is(Mark::Soft) && !entry.is(Mark::Hard));
        if !is_grouped && !is_soft {
            return;
        }
        let Some(kept) = self.kept.get(&id.0) else { return };
        if is_grouped {
            self.groups.leave((entry.account() as u16, kept.group), id);
            entries.set(id, Mark::Grouped, false);
        }
        if is_soft {
            self.until.remove(&kept.until);
        }
    }

    /// Returns the group of an entry, 0 for none, and the end of its soft pin, 0 for none.
    pub(super) fn kept_of(&self, entries: &Entries, id: EntryId) -> (u64, u64) {
        let Some(kept) = self.kept.get(&id.0) else { return (0, 0) };
        (kept.group, if entries[id].is(Mark::Soft) { kept.until.0 } else { 0 })
    }

    /// Returns the present time.
    pub(super) const fn now_ns(&self) -> u64 {
        self.now_ns
    }

    /// Gives a live object a soft pin until this time.
    pub(super) fn pin_softly(&mut self, entries: &mut Entries, id: EntryId, until_ns: u64) {
        let kept = self.kept.entry(id.0);
        let kept = kept.or_insert(PinnedOrGrouped { group: 0, soft_pin_ns: 0, until: (0, 0), seen: 0, follows: false });
        kept.until = (until_ns, self.clock);
        self.until.insert(kept.until, id.0);
        entries.set(id, Mark::Soft, true);
    }

    /// Ends the soft pin of a live object before its time; returns the time at which it would have ended.
    pub(super) fn unpin_softly(&mut self, entries: &mut Entries, id: EntryId) -> u64 {
        entries.set(id, Mark::Soft, false);
        let Some(kept) = self.kept.get(&id.0) else { return 0 };
        self.until.remove(&kept.until);
        kept.until.0
    }

    /// Returns the objects of a tenant's group.
    pub(super) fn members(&self, group: GroupId) -> Vec<EntryId> {
        self.groups.members(group).collect()
    }

    /// Removes and returns an object whose soft pin has expired.
    pub(super) fn next_expired(&mut self) -> Option<EntryId> {
        let first = self.until.first_entry().filter(|first| first.key().0 <= self.now_ns)?;
        Some(EntryId(first.remove()))
    }

    /// Counts an access of a member of a group.
    pub(super) fn touch(&mut self, entries: &Entries, id: EntryId) {
        let Some(kept) = self.kept.get_mut(&id.0) else { return };
        kept.seen = self.groups.touch(group_of(entries, id, kept));
        kept.follows = false;
    }

    /// Returns true if another member of its group was accessed since it was considered last: that counts as an access
    /// of it, once.
    pub(super) fn is_spared(&mut self, entries: &Entries, id: EntryId) -> bool {
        if !entries[id].is(Mark::Grouped) {
            return false;
        }
        let Some(kept) = self.kept.get_mut(&id.0) else { return false };
        let accesses = self.groups.accesses(group_of(entries, id, kept));
        if kept.seen == accesses {
            return false;
        }
        (kept.seen, kept.follows) = (accesses, false);
        true
    }

    /// Returns the members of an evicted object's group that are to be evicted with it. Members pinned by readers are
    /// marked to follow when they are unpinned; softly and hard pinned ones stay.
    pub(super) fn mates(&mut self, entries: &Entries, id: EntryId) -> Vec<EntryId> {
        let Some(kept) = self.kept.get(&id.0).filter(|_| entries[id].is(Mark::Grouped)) else { return Vec::new() };
        let group = group_of(entries, id, kept);
        let accesses = self.groups.accesses(group);
        let mut going = Vec::new();
        for member in self.groups.members(group).filter(|member| *member != id) {
            let entry = &entries[member];
            if entry.is(Mark::Soft) || entry.is(Mark::Hard) {
                continue;
            }
            if entry.is_evictable() {
                going.push(member);
            } else if let Some(kept) = self.kept.get_mut(&member.0) {
                (kept.follows, kept.seen) = (true, accesses);
            }
        }
        going
    }

    /// Returns true if an object's group was evicted without it, and no member was accessed since.
    pub(super) fn is_to_follow(&mut self, entries: &Entries, id: EntryId) -> bool {
        let Some(kept) = self.kept.get_mut(&id.0) else { return false };
        core::mem::take(&mut kept.follows) && kept.seen == self.groups.accesses(group_of(entries, id, kept))
    }

    /// Asserts that soft pins and groups agree with the entries.
    pub(super) fn check(&self, entries: &Entries) {
        for (until, entry) in &self.until {
            assert!(entries[EntryId(*entry)].is(Mark::Soft), "a soft pin until {until:?} of {entry}");
        }
        self.groups.check(entries);
    }
}

fn group_of(entries: &Entries, id: EntryId, kept: &PinnedOrGrouped) -> GroupId {
    (entries[id].account() as u16, kept.group)
}

#[cfg(test)]
mod tests {
    use kvplane_proto::digest::Digest;
    use kvplane_proto::ids::Version;

    use super::*;
    use crate::allocator::Allocator;
    use crate::entry::Reserve;

    /// Returns the entries of live objects that are kept like this.
    fn live(pins: &mut PinsAndGroups, kept: &[Keep]) -> (Entries, Vec<EntryId>) {
        let mut entries = Entries::new(kept.len() as u32);
        let block = Allocator::new(256, 1).allocate(1).expect("the pool is empty");
        let mut ids = Vec::new();
        for (at, keep) in kept.iter().enumerate() {
            let id = entries.reserve(&Reserve { keep: *keep, ..Reserve::plain(Digest(at as u128), 1) }, block);
            pins.note(&mut entries, id, keep);
            entries.commit(id, Version(1), 0);
            pins.begin(&mut entries, id);
            ids.push(id);
        }
        (entries, ids)
    }

    #[test]
    fn soft_pins_expire_in_order_and_not_before_their_time() {
        let mut pins = PinsAndGroups::default();
        pins.tick(100);
        let keep = |soft_pin_ns| Keep { soft_pin_ns, ..Keep::default() };
        let (mut entries, ids) = live(&mut pins, &[keep(20), keep(0), keep(10), keep(30)]);
        assert_eq!(ids.iter().filter(|id| entries[**id].is(Mark::Soft)).count(), 3);
        pins.end(&mut entries, ids[3]);
        pins.tick(109);
        assert_eq!((pins.next_expired(), pins.soft_pins()), (None, 2));
        pins.tick(130);
        pins.tick(105);
        assert_eq!([(); 3].map(|()| pins.next_expired()), [Some(ids[2]), Some(ids[0]), None]);
    }

    #[test]
    fn members_of_a_group_are_spared_once_per_access_and_follow_each_other() {
        let mut pins = PinsAndGroups::default();
        let keep = |group| Keep { group, ..Keep::default() };
        let (mut entries, ids) = live(&mut pins, &[keep(7), keep(7), keep(7), keep(8)]);
        assert!(!pins.is_spared(&entries, ids[0]));
        pins.touch(&entries, ids[1]);
        assert!(pins.is_spared(&entries, ids[0]) && !pins.is_spared(&entries, ids[0]));
        entries.pin(ids[2]);
        assert_eq!(pins.mates(&entries, ids[0]), [ids[1]]);
        entries.unpin(ids[2]);
        assert!(pins.is_to_follow(&entries, ids[2]) && !pins.is_to_follow(&entries, ids[2]));
        pins.end(&mut entries, ids[1]);
        assert_eq!(pins.mates(&entries, ids[0]), [ids[2]]);
        pins.check(&entries);
    }
}
