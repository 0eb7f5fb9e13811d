//! Retained objects: hard pins that end, under numbers that their callers choose.
//!
//! A *retention* is a number of a tenant, with an end. It keeps a set of objects from being evicted until then, or
//! until it is released. Several retentions may have an object in common, such as the beginning of the prompts of
//! several sessions: it is kept until the last of them ends.

use std::collections::{BTreeMap, BTreeSet};

use crate::entry::EntryId;

/// Most retentions that one object may belong to.
pub(crate) const RETENTIONS_MOST: usize = 64;

/// Account of the tenant, and the tenant's number of the retention.
pub(super) type RetentionId = (u16, u64);

#[derive(Debug, Default)]
struct Retention {
    until_ns: u64,
    objects: BTreeSet<u32>,
}

/// Object of one retention or more.
#[derive(Debug)]
struct RetainedObject {
    retentions: BTreeSet<RetentionId>,
    /// End of the soft pin that it has besides; 0 for none.
    soft_until_ns: u64,
}

/// All retentions with live objects.
#[derive(Debug, Default)]
pub(super) struct RetentionTable {
    retentions: BTreeMap<RetentionId, Retention>,
    objects: BTreeMap<u32, RetainedObject>,
    until: BTreeSet<(u64, RetentionId)>,
}

/// Object that no retention keeps any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ReleasedObject {
    pub(super) entry: EntryId,
    /// End of the soft pin that it has besides; 0 for none.
    pub(super) soft_until_ns: u64,
}

impl RetentionTable {
    /// Returns the number of objects.
    pub(super) fn len(&self) -> usize {
        self.objects.len()
    }

    /// Returns true if a retention keeps the object.
    pub(super) fn has(&self, entry: EntryId) -> bool {
        self.objects.contains_key(&entry.0)
    }

    /// Returns the end of the last retention of an object; `None` if no retention keeps it.
    pub(super) fn until_ns(&self, entry: EntryId) -> Option<u64> {
        let object = self.objects.get(&entry.0)?;
        object.retentions.iter().filter_map(|id| self.retentions.get(id)).map(|retention| retention.until_ns).max()
    }

    /// Returns true if an object belongs to as many retentions as it may, without this one.
    pub(super) fn is_full(&self, id: RetentionId, entry: EntryId) -> bool {
        let full =
            |object: &RetainedObject| object.retentions.len() >= RETENTIONS_MOST && !object.retentions.contains(&id);
        self.objects.get(&entry.0).is_some_and(full)
    }

    /// Adds an object to a retention, which lasts until this time at least. The end of a soft pin that the object has
    /// counts if no retention had the object so far.
    pub(super) fn add(&mut self, id: RetentionId, entry: EntryId, until_ns: u64, soft_until_ns: u64) {
        self.retentions.entry(id).or_default().objects.insert(entry.0);
        let object = self.objects.entry(entry.0);
        let object = object.or_insert_with(|| RetainedObject { retentions: BTreeSet::new(), soft_until_ns });
        object.retentions.insert(id);
        self.extend(id, until_ns);
    }

    /// Sets the end of the soft pin that a retained object has besides.
    pub(super) fn set_soft(&mut self, entry: EntryId, until_ns: u64) {
        if let Some(object) = self.objects.get_mut(&entry.0) {
            object.soft_until_ns = until_ns;
        }
    }

    /// Makes a retention last until this time at least; returns the number of its objects.
    pub(super) fn extend(&mut self, id: RetentionId, until_ns: u64) -> usize {
        let Some(retention) = self.retentions.get_mut(&id) else { return 0 };
        if until_ns > retention.until_ns {
            self.until.remove(&(retention.until_ns, id));
            retention.until_ns = until_ns;
            self.until.insert((until_ns, id));
        }
        retention.objects.len()
    }

    /// Ends a retention; returns the number of its objects, and those that no other retention keeps.
    pub(super) fn release(&mut self, id: RetentionId) -> (usize, Vec<ReleasedObject>) {
        let Some(retention) = self.retentions.remove(&id) else { return (0, Vec::new()) };
        self.until.remove(&(retention.until_ns, id));
        let mut ended = Vec::new();
        for entry in &retention.objects {
            let Some(object) = self.objects.get_mut(entry) else { continue };
            object.retentions.remove(&id);
            if object.retentions.is_empty() {
                ended.push(ReleasedObject { entry: EntryId(*entry), soft_until_ns: object.soft_until_ns });
                self.objects.remove(entry);
            }
        }
        (retention.objects.len(), ended)
    }

    /// Returns true if the time of a retention is over that has not lost all of its objects yet.
    pub(super) fn is_over(&self, id: RetentionId, now_ns: u64) -> bool {
        self.retentions.get(&id).is_some_and(|retention| retention.until_ns <= now_ns)
    }

    /// Takes one object out of the first retention whose time is over; returns none if there is none. The object is
    /// among the result if no other retention keeps it.
    pub(super) fn take_expired(&mut self, now_ns: u64) -> Option<Option<ReleasedObject>> {
        let (_, id) = *self.until.first().filter(|(until_ns, _)| *until_ns <= now_ns)?;
        let retention = self.retentions.get_mut(&id)?;
        let entry = retention.objects.pop_first()?;
        if retention.objects.is_empty() {
            self.release(id);
        }
        let object = self.objects.get_mut(&entry)?;
        object.retentions.remove(&id);
        let released = ReleasedObject { entry: EntryId(entry), soft_until_ns: object.soft_until_ns };
        let is_released = object.retentions.is_empty();
        if is_released {
            self.objects.remove(&entry);
        }
        Some(is_released.then_some(released))
    }

    /// Forgets an object that is about to leave.
    pub(super) fn forget(&mut self, entry: EntryId) {
        let Some(object) = self.objects.remove(&entry.0) else { return };
        for id in object.retentions {
            let Some(retention) = self.retentions.get_mut(&id) else { continue };
            retention.objects.remove(&entry.0);
            if retention.objects.is_empty() {
                self.until.remove(&(retention.until_ns, id));
                self.retentions.remove(&id);
            }
        }
    }

    /// Asserts that the tables agree; calls `object` with each retained object.
    pub(super) fn check(&self, mut object: impl FnMut(EntryId)) {
        assert_eq!(self.until.len(), self.retentions.len(), "each retention has an end");
        for (id, retention) in &self.retentions {
            assert!(!retention.objects.is_empty() && self.until.contains(&(retention.until_ns, *id)), "{id:?}");
            let knows = |entry: &u32| self.objects.get(entry).is_some_and(|object| object.retentions.contains(id));
            assert!(retention.objects.iter().all(knows), "{id:?} and its objects");
        }
        for (entry, known) in &self.objects {
            assert!((1..=RETENTIONS_MOST).contains(&known.retentions.len()), "retentions of {entry}");
            object(EntryId(*entry));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_kept_until_the_last_of_its_retentions_ends() {
        let mut retained = RetentionTable::default();
        let (one, other) = ((0, 1), (0, 2));
        retained.add(one, EntryId(7), 10, 0);
        retained.add(one, EntryId(8), 20, 5);
        retained.add(other, EntryId(7), 30, 0);
        assert_eq!((retained.len(), retained.take_expired(9)), (2, None));
        assert!(retained.is_over(one, 20) && !retained.is_over(other, 20));
        // One object at a time: the first has another retention.
        assert_eq!(retained.take_expired(20), Some(None));
        let second = ReleasedObject { entry: EntryId(8), soft_until_ns: 5 };
        assert_eq!((retained.take_expired(20), retained.is_over(one, 20)), (Some(Some(second)), false));
        assert_eq!((retained.has(EntryId(7)), retained.extend(other, 15)), (true, 1), "never shortened");
        assert_eq!(retained.take_expired(29), None);
        assert_eq!(retained.release(other), (1, vec![ReleasedObject { entry: EntryId(7), soft_until_ns: 0 }]));
        assert_eq!((retained.release(other), retained.len()), ((0, Vec::new()), 0));
        retained.check(|_| panic!("nothing is retained"));
    }

    #[test]
    fn a_retention_ends_with_its_last_object() {
        let mut retained = RetentionTable::default();
        for number in 0..RETENTIONS_MOST as u64 {
            retained.add((0, number), EntryId(7), 10, 0);
        }
        assert!(retained.is_full((0, 99), EntryId(7)) && !retained.is_full((0, 0), EntryId(7)));
        retained.check(|entry| assert_eq!(entry, EntryId(7)));
        retained.forget(EntryId(7));
        assert_eq!((retained.extend((0, 0), 20), retained.take_expired(100)), (0, None));
        retained.check(|_| panic!("nothing is retained"));
    }
}
