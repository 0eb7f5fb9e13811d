//! Eviction across tenants: an eviction order for each tenant, pins, groups, and shares of the pool.
//!
//! Each tenant with an account has an eviction policy of its own. When room is needed, the tenant that exceeds its
//! share the most loses an object, by its own policy, so that a burst of one tenant does not cost those who are within
//! their shares. A share is the tenant's lease of memory if it has one (scaled down if all leases together exceed the
//! pool); tenants without a lease divide the rest by weight. A single tenant has the whole pool. A tenant at its lease
//! makes room among its own objects.
//!
//! * *Softly pinned* objects are in a list of their own instead of a policy until the pin expires. They are evicted
//!   when no other object of their tenant suffices, or when the tenant is above its share. *Hard pinned* ones are in no
//!   list, and are never evicted. *Retained* ones are hard pinned until their retentions end.
//! * Objects of a *group* share their accesses: a member that is due for eviction is spared if any member was accessed
//!   since it was considered last. When one is evicted, the others are evicted with it; those that are pinned by
//!   readers follow when they are unpinned.
//!
//! The accounts and policies of tenants are in `tenants`, soft pins and groups in `pins_and_groups`, retentions by
//! number in `retained`; [`Order`] keeps them in step. An object with neither pin nor group costs only the account's
//! number.
//! Permission to put is checked by the service, and leases are assigned by the control plane.

mod groups;
mod pins;
mod pins_and_groups;
mod retained;
mod tenants;

use crate::allocator::{Block, MEMORY_KINDS, MemoryKind};
use crate::entry::{Entries, EntryId, Keep, Mark};
use crate::eviction::EvictionPolicy;
pub(crate) use pins::keep_of;
use pins_and_groups::PinsAndGroups;
pub(crate) use retained::RETENTIONS_MOST;
use retained::RetentionTable;
pub use tenants::{TenantUse, Tenants};

/// Most objects whose pins are ended by one step: the others follow with the next ones.
const EXPIRED_AT_ONCE: usize = 1_024;

/// Limit of eviction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reach {
    /// Objects that are not pinned, and softly pinned ones of tenants above their shares.
    Plain,
    /// Softly pinned objects too.
    Soft,
}

/// Scarce resource.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Scarce {
    /// Space in a kind of memory.
    Room(MemoryKind),
    /// Entries, with their total number.
    Entries(u32),
}

/// Eviction orders of all tenants.
#[derive(Debug)]
pub(crate) struct Order<P> {
    tenants: Tenants<P>,
    pins_and_groups: PinsAndGroups,
    retained: RetentionTable,
}

impl<P: EvictionPolicy> Order<P> {
    /// Creates the order of memory of these sizes, by kind, with one tenant, the default one.
    pub(crate) fn new(memory_granules: [u64; MEMORY_KINDS], hard_pin_percent: u8, policy: P) -> Self {
        let tenants = Tenants::new(memory_granules, hard_pin_percent, policy);
        Self { tenants, pins_and_groups: PinsAndGroups::default(), retained: RetentionTable::default() }
    }

    /// Returns the accounts of tenants.
    #[inline]
    pub(crate) const fn tenants(&self) -> &Tenants<P> {
        &self.tenants
    }

    /// Returns the accounts of tenants, to be changed.
    #[inline]
    pub(crate) const fn tenants_mut(&mut self) -> &mut Tenants<P> {
        &mut self.tenants
    }

    /// Advances the time; it never goes back.
    pub(crate) fn tick(&mut self, now_ns: u64) {
        self.pins_and_groups.tick(now_ns);
    }

    /// Returns the number of softly pinned objects.
    pub(crate) fn soft_pins(&self) -> usize {
        self.pins_and_groups.soft_pins()
    }

    /// Returns the number of the tenant that an entry is charged to.
    pub(crate) fn tenant_of(&self, entries: &Entries, id: EntryId) -> u32 {
        self.tenants.number_of(&entries[id])
    }

    /// Charges a reserved entry.
    pub(crate) fn charge(&mut self, entries: &mut Entries, id: EntryId, keep: &Keep) {
        self.pins_and_groups.note(entries, id, keep);
        self.tenants.charge(&entries[id]);
    }

    /// Discharges an entry that is about to be freed.
    pub(crate) fn discharge(&mut self, entries: &Entries, id: EntryId) {
        self.tenants.discharge(&entries[id]);
        self.pins_and_groups.forget(id);
    }

    /// Applies a step to an entry that may change whether it can be evicted.
    pub(crate) fn stick<T>(&mut self, entries: &mut Entries, id: EntryId, step: impl FnOnce(&mut Entries) -> T) -> T {
        self.tenants.stick(entries, id, step)
    }

    /// Inserts an object that became live.
    pub(crate) fn insert(&mut self, entries: &mut Entries, id: EntryId) {
        self.pins_and_groups.begin(entries, id);
        let entry = &entries[id];
        if entry.is(Mark::Hard) {
            return;
        }
        if entry.is(Mark::Soft) {
            self.push_soft(entries, id);
        } else {
            self.tenants.policy_of(entry).insert(entries, id);
        }
    }

    fn push_soft(&mut self, entries: &mut Entries, id: EntryId) {
        entries[id].stamp = self.pins_and_groups.next_stamp();
        self.tenants.soft_of(&entries[id]).push(entries, id);
    }

    /// Records an access of an object.
    #[inline]
    pub(crate) fn access(&mut self, entries: &mut Entries, id: EntryId) {
        if entries[id].is(Mark::Grouped) {
            self.pins_and_groups.touch(entries, id);
        }
        self.access_alone(entries, id);
    }

    #[inline]
    fn access_alone(&mut self, entries: &mut Entries, id: EntryId) {
        let entry = &entries[id];
        if entry.is(Mark::Hard) {
            return;
        }
        if entry.is(Mark::Soft) {
            self.tenants.soft_of(entry).unlink(entries, id);
            self.push_soft(entries, id);
        } else {
            self.tenants.policy_of(entry).access(entries, id);
        }
    }

    /// Removes a live object, pinned or not; `to_make_room` if the policy may remember it.
    pub(crate) fn remove(&mut self, entries: &mut Entries, id: EntryId, to_make_room: bool) {
        self.pins_and_groups.end(entries, id);
        self.retained.forget(id);
        if to_make_room {
            self.tenants.count_eviction(&entries[id]);
        }
        leave(self, entries, id, to_make_room);
    }

    /// Changes the account, group, pins and priority of a live object that was plain so far.
    pub(crate) fn keep_as(&mut self, entries: &mut Entries, id: EntryId, keep: &Keep) {
        let is_plain = keep.group == 0 && !keep.hard_pin && keep.priority == entries[id].priority();
        if entries[id].account() == usize::from(keep.account) && is_plain {
            return;
        }
        self.remove(entries, id, false);
        self.tenants.discharge(&entries[id]);
        entries.set_account(id, keep.account);
        entries.set(id, Mark::Hard, keep.hard_pin);
        entries.set_priority(id, keep.priority);
        self.charge(entries, id, keep);
        self.insert(entries, id);
    }

    /// Handles the release of a live object's last pin. Returns true if it is to be evicted now, because its group was.
    pub(crate) fn unpinned(&mut self, entries: &mut Entries, id: EntryId) -> bool {
        let entry = &entries[id];
        if entry.is(Mark::Hard) {
            return false;
        }
        let (is_soft, is_grouped) = (entry.is(Mark::Soft), entry.is(Mark::Grouped));
        if is_soft {
            self.tenants.soft_of(entry).unpark(entries, id);
        } else {
            self.tenants.policy_of(entry).unpinned(entries, id);
        }
        is_grouped && self.pins_and_groups.is_to_follow(entries, id) && !is_soft
    }

    /// Moves objects whose retentions have ended, and softly pinned ones whose pin has expired, to the policy, as its
    /// newest: at most [`EXPIRED_AT_ONCE`], so that no request pays for a million sessions that ended together. Returns
    /// false if there were no more.
    pub(crate) fn expire(&mut self, entries: &mut Entries) -> bool {
        let mut left = self.expire_retentions(entries);
        while left > 0 {
            let Some(id) = self.pins_and_groups.next_expired() else { return false };
            left -= 1;
            self.tenants.soft_of(&entries[id]).unlink(entries, id);
            entries.set(id, Mark::Soft, false);
            self.tenants.policy_of(&entries[id]).insert(entries, id);
        }
        true
    }

    /// Returns the next object to be evicted for any tenant that needs the scarce resource: one of that memory, or for
    /// entries of the pool's near part.
    pub(crate) fn victim(&mut self, entries: &mut Entries, reach: Reach, scarce: Scarce) -> Option<EntryId> {
        let kind = if let Scarce::Room(kind) = scarce { kind } else { MemoryKind::Near };
        self.tenants.know_shares();
        self.tenants.begin_round();
        while let Some(at) = self.tenants.furthest(true, scarce) {
            let found = self.plain_victim(entries, at, kind).or_else(|| self.soft_victim(entries, at, kind));
            if found.is_some() {
                return found;
            }
        }
        self.tenants.begin_round();
        while let Some(at) = self.tenants.furthest(false, scarce) {
            let found = self.plain_victim(entries, at, kind);
            if found.is_some() {
                return found;
            }
        }
        self.tenants.begin_round();
        while let Some(at) = (reach == Reach::Soft).then(|| self.tenants.furthest(false, scarce)).flatten() {
            let found = self.soft_victim(entries, at, kind);
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// Returns the next object of a tenant to be evicted for another of the same tenant: the coldest memory's first.
    pub(crate) fn victim_of(&mut self, entries: &mut Entries, account: u16) -> Option<EntryId> {
        let at = usize::from(account);
        for kind in [MemoryKind::Far, MemoryKind::Near, MemoryKind::Device] {
            let found = self.plain_victim(entries, at, kind).or_else(|| self.soft_victim(entries, at, kind));
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// Returns the next object to leave the device pool, of the tenant that exceeds its share there the most.
    pub(crate) fn device_victim(&mut self, entries: &mut Entries) -> Option<EntryId> {
        self.tenants.know_shares();
        self.tenants.begin_round();
        while let Some(at) = self.tenants.furthest(false, Scarce::Room(MemoryKind::Device)) {
            let found = self.plain_victim(entries, at, MemoryKind::Device);
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// Returns the members of an evicted object's group that are to be evicted with it. Members pinned by readers
    /// follow when they are unpinned; softly and hard pinned ones stay.
    pub(crate) fn mates(&mut self, entries: &Entries, id: EntryId) -> Vec<EntryId> {
        self.pins_and_groups.mates(entries, id)
    }

    /// Returns true if an object may be evicted to clear a run.
    pub(crate) fn may_go(&self, entries: &Entries, id: EntryId, reach: Reach) -> bool {
        let entry = &entries[id];
        let above = || self.tenants.is_above_share(entry);
        entry.is_evictable() && (!entry.is(Mark::Soft) || reach == Reach::Soft || above())
    }

    fn plain_victim(&mut self, entries: &mut Entries, at: usize, kind: MemoryKind) -> Option<EntryId> {
        loop {
            let id = self.tenants.order(at, kind)?.policy.victim(entries)?;
            if !self.is_spared(entries, id) {
                return Some(id);
            }
        }
    }

    fn soft_victim(&mut self, entries: &mut Entries, at: usize, kind: MemoryKind) -> Option<EntryId> {
        loop {
            let id = self.tenants.order(at, kind)?.soft.oldest_unpinned(entries)?;
            if !self.is_spared(entries, id) {
                return Some(id);
            }
        }
    }

    /// Returns true if an access of its group spares an object, which counts as an access of it.
    fn is_spared(&mut self, entries: &mut Entries, id: EntryId) -> bool {
        let is_spared = self.pins_and_groups.is_spared(entries, id);
        if is_spared {
            self.access_alone(entries, id);
        }
        is_spared
    }

    /// Asserts lists and accounts; returns the number of entries in the eviction orders or hard pinned.
    pub(crate) fn check(&self, entries: &Entries) -> usize {
        self.pins_and_groups.check(entries);
        self.retained.check(|id| assert!(entries[id].is_live() && entries[id].is(Mark::Hard), "{id:?} is retained"));
        let hard_live = entries.iter().filter(|(_, entry)| entry.is(Mark::Hard) && entry.is_live()).count();
        self.tenants.check(entries) + hard_live
    }
}

/// Removes an object from the order of its memory.
fn leave<P: EvictionPolicy>(order: &mut Order<P>, entries: &mut Entries, id: EntryId, to_make_room: bool) {
    let entry = &entries[id];
    if entry.is(Mark::Hard) {
        return;
    }
    if entry.is(Mark::Soft) {
        order.tenants.soft_of(entry).unlink(entries, id);
    } else if to_make_room {
        order.tenants.policy_of(entry).evict(entries, id);
    } else {
        order.tenants.policy_of(entry).remove(entries, id);
    }
}

/// Gives a live object, pinned or not, a block of another kind of memory, with room for a tail of this length behind
/// its bytes. It is the newest object there, and an accessed one if it `is_hot`. It keeps its pins and its group.
pub(crate) fn relocate<P: EvictionPolicy>(
    order: &mut Order<P>,
    entries: &mut Entries,
    id: EntryId,
    block: Block,
    tail_bytes: u32,
    is_hot: bool,
) {
    // The policy of the memory that makes room remembers it.
    leave(order, entries, id, !is_hot);
    order.tenants.discharge(&entries[id]);
    entries.relocate(id, block, tail_bytes);
    order.tenants.charge(&entries[id]);
    let entry = &entries[id];
    if entry.is(Mark::Hard) {
        return;
    }
    if entry.is(Mark::Soft) {
        return order.push_soft(entries, id);
    }
    let policy = order.tenants.policy_of(entry);
    policy.insert(entries, id);
    if is_hot {
        policy.access(entries, id);
    }
}
