//! Groups: objects that are evicted together, and whose accesses count for all of them.

use std::collections::{BTreeMap, BTreeSet};

use crate::entry::{Entries, EntryId, Mark};

/// Most members of a group; further objects belong to no group.
pub(crate) const GROUP_MOST: usize = 1024;

/// Account of the tenant, and the tenant's number of the group.
pub(super) type GroupId = (u16, u64);

#[derive(Debug, Default)]
struct Group {
    members: BTreeSet<u32>,
    /// Number of accesses of all members.
    accesses: u32,
}

/// Groups with live members.
#[derive(Debug, Default)]
pub(super) struct Groups {
    groups: BTreeMap<GroupId, Group>,
}

impl Groups {
    /// Adds an entry to a group, if there is room; returns the group's accesses.
    pub(super) fn join(&mut self, group: GroupId, id: EntryId) -> Option<u32> {
        if group.1 == 0 {
            return None;
        }
        let group = self.groups.entry(group).or_default();
        (group.members.len() < GROUP_MOST).then(|| {
            group.members.insert(id.0);
            group.accesses
        })
    }

    /// Removes a member; with the last one, the group.
    pub(super) fn leave(&mut self, id: GroupId, entry: EntryId) {
        if let Some(group) = self.groups.get_mut(&id) {
            group.members.remove(&entry.0);
            if group.members.is_empty() {
                self.groups.remove(&id);
            }
        }
    }

    /// Counts an access; returns the new number.
    pub(super) fn touch(&mut self, id: GroupId) -> u32 {
        self.groups.get_mut(&id).map_or(0, |group| {
            group.accesses = group.accesses.wrapping_add(1);
            group.accesses
        })
    }

    pub(super) fn accesses(&self, id: GroupId) -> u32 {
        self.groups.get(&id).map_or(0, |group| group.accesses)
    }

    /// Returns the members of a group.
    pub(super) fn members(&self, id: GroupId) -> impl Iterator<Item = EntryId> {
        self.groups.get(&id).into_iter().flat_map(|group| group.members.iter().copied().map(EntryId))
    }

    pub(super) fn check(&self, entries: &Entries) {
        for (id, group) in &self.groups {
            assert!(!group.members.is_empty() && group.members.len() <= GROUP_MOST, "group {id:?}");
            for member in &group.members {
                let entry = &entries[EntryId(*member)];
                assert!(entry.is(Mark::Grouped) && entry.account() == usize::from(id.0), "{entry:?} in {id:?}");
            }
        }
    }
}
