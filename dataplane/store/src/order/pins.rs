//! Pins of live objects that are set and ended after their puts: soft pins, and retentions.

use kvplane_proto::message::ObjectPriority;

use super::retained::{ReleasedObject, RetentionId};
use super::{EXPIRED_AT_ONCE, Order};
use crate::entry::{Entries, EntryId, Keep, Mark};
use crate::eviction::EvictionPolicy;

impl<P: EvictionPolicy> Order<P> {
    /// Returns the number of retained objects.
    pub(crate) fn retained(&self) -> usize {
        self.retained.len()
    }

    /// Returns true if a retention keeps the object.
    pub(crate) fn is_retained(&self, id: EntryId) -> bool {
        self.retained.has(id)
    }

    /// Returns the objects of a tenant's group.
    pub(crate) fn group(&self, account: u16, group: u64) -> Vec<EntryId> {
        self.pins_and_groups.members((account, group))
    }

    /// Gives a live object a soft pin of this duration from now, in place of one that it has; 0 ends it. A hard pin of
    /// its put needs none.
    pub(crate) fn pin_softly(&mut self, entries: &mut Entries, id: EntryId, duration_ns: u64) {
        let until_ns = if duration_ns == 0 { 0 } else { self.pins_and_groups.now_ns().saturating_add(duration_ns) };
        if entries[id].is(Mark::Hard) {
            self.retained.set_soft(id, until_ns);
            return;
        }
        self.leave_list(entries, id);
        self.join_list(entries, id, until_ns);
    }

    /// Sets the priority of a live object, as whose newest object it counts from now on.
    pub(crate) fn set_priority(&mut self, entries: &mut Entries, id: EntryId, priority: ObjectPriority) {
        let entry = &entries[id];
        if entry.priority() == priority {
            return;
        }
        if entry.is(Mark::Hard) || entry.is(Mark::Soft) {
            return entries.set_priority(id, priority);
        }
        let was_protected = entry.is_protected();
        self.tenants.policy_of(entry).remove(entries, id);
        entries.set_priority(id, priority);
        let policy = self.tenants.policy_of(&entries[id]);
        policy.insert(entries, id);
        if was_protected {
            policy.access(entries, id);
        }
    }

    /// Adds a live object to a retention, which lasts for this duration from now at least. False if the object belongs
    /// to [`super::RETENTIONS_MOST`] others. An object with a hard pin of its put needs none.
    pub(crate) fn retain(&mut self, entries: &mut Entries, id: EntryId, number: u64, duration_ns: u64) -> bool {
        let account = entries[id].account() as u16;
        let until_ns = self.pins_and_groups.now_ns().saturating_add(duration_ns);
        self.end_expired(entries, (account, number));
        if self.retained.is_full((account, number), id) {
            return false;
        }
        if self.retained.has(id) {
            self.retained.add((account, number), id, until_ns, 0);
        } else if !entries[id].is(Mark::Hard) {
            let soft_until_ns = self.leave_list(entries, id);
            self.set_hard(entries, id, true);
            self.retained.add((account, number), id, until_ns, soft_until_ns);
        }
        true
    }

    /// Makes a tenant's retention last for this duration from now at least; returns the number of its objects.
    pub(crate) fn renew(&mut self, entries: &mut Entries, account: u16, number: u64, duration_ns: u64) -> usize {
        self.end_expired(entries, (account, number));
        let until_ns = self.pins_and_groups.now_ns().saturating_add(duration_ns);
        self.retained.extend((account, number), until_ns)
    }

    /// Ends a tenant's retention; returns the number of its objects.
    pub(crate) fn release(&mut self, entries: &mut Entries, account: u16, number: u64) -> usize {
        self.end_expired(entries, (account, number));
        let (count, ended) = self.retained.release((account, number));
        self.end_all(entries, &ended);
        count
    }

    /// Ends retentions whose time is over, up to [`EXPIRED_AT_ONCE`] objects of them; returns the number that is left.
    pub(crate) fn expire_retentions(&mut self, entries: &mut Entries) -> usize {
        for left in (0..EXPIRED_AT_ONCE).rev() {
            match self.retained.take_expired(self.pins_and_groups.now_ns()) {
                None => return left + 1,
                Some(ended) => self.end_all(entries, ended.as_slice()),
            }
        }
        0
    }

    /// Ends a retention whose time is over, if objects of it are left.
    fn end_expired(&mut self, entries: &mut Entries, id: RetentionId) {
        if self.retained.is_over(id, self.pins_and_groups.now_ns()) {
            let (_, ended) = self.retained.release(id);
            self.end_all(entries, &ended);
        }
    }

    fn end_all(&mut self, entries: &mut Entries, ended: &[ReleasedObject]) {
        for one in ended {
            self.set_hard(entries, one.entry, false);
            self.join_list(entries, one.entry, one.soft_until_ns);
        }
    }

    /// Removes an object from the softly pinned ones, or from the policy; returns the end of its soft pin, or 0.
    fn leave_list(&mut self, entries: &mut Entries, id: EntryId) -> u64 {
        let entry = &entries[id];
        if entry.is(Mark::Soft) {
            self.tenants.soft_of(entry).unlink(entries, id);
            return self.pins_and_groups.unpin_softly(entries, id);
        }
        self.tenants.policy_of(entry).remove(entries, id);
        0
    }

    /// Adds an object to the softly pinned ones, until this time, or to the policy if that is past.
    fn join_list(&mut self, entries: &mut Entries, id: EntryId, soft_until_ns: u64) {
        if soft_until_ns > self.pins_and_groups.now_ns() {
            self.pins_and_groups.pin_softly(entries, id, soft_until_ns);
            self.push_soft(entries, id);
        } else {
            self.tenants.policy_of(&entries[id]).insert(entries, id);
        }
    }

    fn set_hard(&mut self, entries: &mut Entries, id: EntryId, hard: bool) {
        self.tenants.discharge(&entries[id]);
        entries.set(id, Mark::Hard, hard);
        self.tenants.charge(&entries[id]);
    }
}

/// Returns how a live object is kept, for a process that takes it back from this one: a retention counts as a soft pin
/// for the rest of its time. The account is none that the other process knows.
pub(crate) fn keep_of<P: EvictionPolicy>(order: &Order<P>, entries: &Entries, id: EntryId) -> Keep {
    let (entry, now_ns) = (&entries[id], order.pins_and_groups.now_ns());
    let (group, soft_until_ns) = order.pins_and_groups.kept_of(entries, id);
    let retained_until_ns = order.retained.until_ns(id);
    let until_ns = retained_until_ns.unwrap_or(0).max(soft_until_ns);
    Keep {
        account: 0,
        group,
        soft_pin_ns: until_ns.saturating_sub(now_ns),
        hard_pin: entry.is(Mark::Hard) && retained_until_ns.is_none(),
        priority: entry.priority(),
    }
}
