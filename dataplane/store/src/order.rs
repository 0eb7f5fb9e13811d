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
//!   list, and are never evicted.
//! * Objects of a *group* share their accesses: a member that is due for eviction is spared if any member was accessed
//!   since it was considered last. When one is evicted, the others are evicted with it; those that are pinned by
//!   readers follow when they are unpinned.
//!
//! An object with neither pin nor group costs only the account's number. Permission to put is checked by the service,
//! and leases are assigned by the control plane.

mod groups;
mod shares;

use std::collections::{BTreeMap, BTreeSet};

use crate::entry::{ACCOUNTS, Entries, EntryId, Keep, Mark, Place};
use crate::eviction::{EvictionPolicy, Segment};
use groups::Groups;
pub use shares::{TenantLease, TenantUse};

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
    /// Space in the pool.
    Room,
    /// Entries, with their total number.
    Entries(u32),
}

/// Account of one tenant.
#[derive(Debug)]
struct Account<P> {
    number: u32,
    /// True if the tenant is configured.
    is_listed: bool,
    lease_granules: Option<u64>,
    weight: u32,
    used_granules: u64,
    stuck_granules: u64,
    hard_granules: u64,
    /// Entries that are not vacant.
    entries: u64,
    share_granules: u64,
    /// Last round in which its policy was asked.
    asked: u64,
    evicted_bytes: u64,
    refused: u64,
    policy: P,
    soft: Segment,
}

impl<P> Account<P> {
    const fn new(number: u32, policy: P) -> Self {
        Self {
            number,
            is_listed: true,
            lease_granules: None,
            weight: 1,
            used_granules: 0,
            stuck_granules: 0,
            hard_granules: 0,
            entries: 0,
            share_granules: 0,
            asked: 0,
            evicted_bytes: 0,
            refused: 0,
            policy,
            soft: Segment::new(Place::Kept, Place::KeptParked),
        }
    }
}

/// State of an object with a soft pin or a group.
#[derive(Clone, Copy, Debug)]
struct Retention {
    group: u64,
    soft_pin_ns: u64,
    /// End of its soft pin, and a number to distinguish those that end at the same time.
    until: (u64, u64),
    /// Accesses of the group when it was considered last.
    seen: u32,
    /// True if it is to be evicted when it is unpinned, because its group was evicted.
    follows: bool,
}

/// Eviction orders of all tenants.
#[derive(Debug)]
pub(crate) struct Order<P> {
    accounts: Vec<Account<P>>,
    numbers: BTreeMap<u32, u16>,
    /// Accounts with entries, in order.
    active: BTreeSet<u16>,
    pool_granules: u64,
    stuck_granules: u64,
    hard_granules: u64,
    shares_known: bool,
    rounds: u64,
    /// Clock that orders softly pinned objects.
    clock: u64,
    now_ns: u64,
    kept: BTreeMap<u32, Retention>,
    /// Soft pins by the time at which they end.
    until: BTreeMap<(u64, u64), u32>,
    groups: Groups,
}

impl<P: EvictionPolicy> Order<P> {
    /// Creates the order of a pool with one tenant, the default one.
    pub(crate) fn new(pool_granules: u64, policy: P) -> Self {
        Self {
            accounts: vec![Account::new(0, policy)],
            numbers: BTreeMap::from([(0, 0)]),
            active: BTreeSet::new(),
            pool_granules,
            stuck_granules: 0,
            hard_granules: 0,
            shares_known: false,
            rounds: 0,
            clock: 0,
            now_ns: 0,
            kept: BTreeMap::new(),
            until: BTreeMap::new(),
            groups: Groups::default(),
        }
    }

    /// Advances the time; it never goes back.
    pub(crate) fn tick(&mut self, now_ns: u64) {
        self.now_ns = self.now_ns.max(now_ns);
    }

    /// Returns the granules that no eviction would free.
    pub(crate) const fn stuck_granules(&self) -> u64 {
        self.stuck_granules
    }

    /// Returns the granules of hard pinned objects, including those being written.
    pub(crate) const fn hard_granules(&self) -> u64 {
        self.hard_granules
    }

    /// Returns the number of softly pinned objects.
    pub(crate) fn soft_pins(&self) -> usize {
        self.until.len()
    }

    /// Charges a reserved entry.
    pub(crate) fn charge(&mut self, entries: &mut Entries, id: EntryId, keep: &Keep) {
        if keep.group != 0 || keep.soft_pin_ns != 0 {
            let Keep { group, soft_pin_ns, .. } = *keep;
            self.kept.insert(id.0, Retention { group, soft_pin_ns, until: (0, 0), seen: 0, follows: false });
            entries.set(id, Mark::Soft, soft_pin_ns != 0 && !keep.hard_pin);
        }
        self.account_for(entries, id, true);
    }

    /// Discharges an entry that is about to be freed.
    pub(crate) fn discharge(&mut self, entries: &Entries, id: EntryId) {
        self.account_for(entries, id, false);
        if !self.kept.is_empty() {
            self.kept.remove(&id.0);
        }
    }

    /// Adds an entry to the accounts, or removes it.
    fn account_for(&mut self, entries: &Entries, id: EntryId, enter: bool) {
        let entry = &entries[id];
        let (granules, at) = (entry.granules(), entry.account());
        let account = &mut self.accounts[at];
        let stuck = if entry.is_stuck() { granules } else { 0 };
        let hard = if entry.is(Mark::Hard) { granules } else { 0 };
        if enter {
            if account.used_granules == 0 {
                self.active.insert(at as u16);
                self.shares_known = false;
            }
            account.used_granules += granules;
            account.stuck_granules += stuck;
            account.hard_granules += hard;
            account.entries += 1;
            self.stuck_granules += stuck;
            self.hard_granules += hard;
        } else {
            account.used_granules -= granules;
            account.stuck_granules -= stuck;
            account.hard_granules -= hard;
            account.entries -= 1;
            self.stuck_granules -= stuck;
            self.hard_granules -= hard;
            if account.used_granules == 0 {
                self.active.remove(&(at as u16));
                self.shares_known = false;
            }
        }
    }

    /// Applies a step to an entry that may change whether it can be evicted.
    pub(crate) fn stick<T>(&mut self, entries: &mut Entries, id: EntryId, step: impl FnOnce(&mut Entries) -> T) -> T {
        let before = entries[id].is_stuck();
        let done = step(entries);
        let (entry, after) = (&entries[id], entries[id].is_stuck());
        let account = &mut self.accounts[entry.account()];
        if after && !before {
            account.stuck_granules += entry.granules();
            self.stuck_granules += entry.granules();
        } else if before && !after {
            account.stuck_granules -= entry.granules();
            self.stuck_granules -= entry.granules();
        }
        done
    }

    /// Inserts an object that became live.
    pub(crate) fn insert(&mut self, entries: &mut Entries, id: EntryId) {
        let at = entries[id].account();
        if let Some(kept) = self.kept.get_mut(&id.0) {
            if let Some(accesses) = self.groups.join((at as u16, kept.group), id) {
                kept.seen = accesses;
                entries.set(id, Mark::Grouped, true);
            }
            if entries[id].is(Mark::Soft) {
                kept.until = (self.now_ns.saturating_add(kept.soft_pin_ns), self.clock);
                self.until.insert(kept.until, id.0);
            }
        }
        if entries[id].is(Mark::Hard) {
            return;
        }
        if entries[id].is(Mark::Soft) {
            self.push_soft(entries, id);
        } else {
            self.accounts[at].policy.insert(entries, id);
        }
    }

    fn push_soft(&mut self, entries: &mut Entries, id: EntryId) {
        self.clock += 1;
        entries[id].stamp = self.clock;
        self.accounts[entries[id].account()].soft.push(entries, id);
    }

    /// Records an access of an object.
    #[inline]
    pub(crate) fn access(&mut self, entries: &mut Entries, id: EntryId) {
        if entries[id].is(Mark::Grouped) {
            self.touch_group(entries, id);
        }
        self.access_alone(entries, id);
    }

    fn touch_group(&mut self, entries: &Entries, id: EntryId) {
        let Some(kept) = self.kept.get_mut(&id.0) else { return };
        kept.seen = self.groups.touch((entries[id].account() as u16, kept.group));
        kept.follows = false;
    }

    #[inline]
    fn access_alone(&mut self, entries: &mut Entries, id: EntryId) {
        let entry = &entries[id];
        let at = entry.account();
        if entry.is(Mark::Hard) {
            return;
        }
        if entry.is(Mark::Soft) {
            self.accounts[at].soft.unlink(entries, id);
            self.push_soft(entries, id);
        } else {
            self.accounts[at].policy.access(entries, id);
        }
    }

    /// Removes a live object, pinned or not; `to_make_room` if the policy may remember it.
    pub(crate) fn remove(&mut self, entries: &mut Entries, id: EntryId, to_make_room: bool) {
        let at = entries[id].account();
        if entries[id].is(Mark::Grouped)
            && let Some(kept) = self.kept.get(&id.0)
        {
            self.groups.leave((at as u16, kept.group), id);
            entries.set(id, Mark::Grouped, false);
        }
        let entry = &entries[id];
        if to_make_room {
            self.accounts[at].evicted_bytes += entry.bytes();
        }
        if entry.is(Mark::Hard) {
            return;
        }
        if entry.is(Mark::Soft) {
            if let Some(kept) = self.kept.get(&id.0) {
                self.until.remove(&kept.until);
            }
            self.accounts[at].soft.unlink(entries, id);
        } else if to_make_room {
            self.accounts[at].policy.evict(entries, id);
        } else {
            self.accounts[at].policy.remove(entries, id);
        }
    }

    /// Handles the release of a live object's last pin. Returns true if it is to be evicted now, because its group was.
    pub(crate) fn unpinned(&mut self, entries: &mut Entries, id: EntryId) -> bool {
        let entry = &entries[id];
        let at = entry.account();
        if entry.is(Mark::Hard) {
            return false;
        }
        let (is_soft, is_grouped) = (entry.is(Mark::Soft), entry.is(Mark::Grouped));
        if is_soft {
            self.accounts[at].soft.unpark(entries, id);
        } else {
            self.accounts[at].policy.unpinned(entries, id);
        }
        is_grouped && self.is_to_follow(at as u16, id) && !is_soft
    }

    /// Moves softly pinned objects whose pin has expired to the policy, as its newest.
    pub(crate) fn expire(&mut self, entries: &mut Entries) {
        while let Some(first) = self.until.first_entry().filter(|first| first.key().0 <= self.now_ns) {
            let id = EntryId(first.remove());
            let at = entries[id].account();
            self.accounts[at].soft.unlink(entries, id);
            entries.set(id, Mark::Soft, false);
            self.accounts[at].policy.insert(entries, id);
        }
    }

    /// Returns the next object to be evicted for any tenant that needs the scarce resource.
    pub(crate) fn victim(&mut self, entries: &mut Entries, reach: Reach, scarce: Scarce) -> Option<EntryId> {
        self.know_shares();
        self.rounds += 1;
        while let Some(at) = self.furthest(true, scarce) {
            let found = self.plain_victim(entries, at).or_else(|| self.soft_victim(entries, at));
            if found.is_some() {
                return found;
            }
        }
        self.rounds += 1;
        while let Some(at) = self.furthest(false, scarce) {
            let found = self.plain_victim(entries, at);
            if found.is_some() {
                return found;
            }
        }
        self.rounds += 1;
        while let Some(at) = (reach == Reach::Soft).then(|| self.furthest(false, scarce)).flatten() {
            let found = self.soft_victim(entries, at);
            if found.is_some() {
                return found;
            }
        }
        None
    }

    /// Returns the next object of a tenant to be evicted for another of the same tenant.
    pub(crate) fn victim_of(&mut self, entries: &mut Entries, account: u16) -> Option<EntryId> {
        let at = usize::from(account);
        self.plain_victim(entries, at).or_else(|| self.soft_victim(entries, at))
    }

    /// Returns true if an object may be evicted to clear a run.
    pub(crate) fn may_go(&self, entries: &Entries, id: EntryId, reach: Reach) -> bool {
        let entry = &entries[id];
        let account = &self.accounts[entry.account()];
        let above = account.used_granules > account.share_granules;
        entry.is_evictable() && (!entry.is(Mark::Soft) || reach == Reach::Soft || above)
    }

    fn plain_victim(&mut self, entries: &mut Entries, at: usize) -> Option<EntryId> {
        loop {
            let id = self.accounts[at].policy.victim(entries)?;
            if !self.is_spared(entries, id) {
                return Some(id);
            }
        }
    }

    fn soft_victim(&mut self, entries: &mut Entries, at: usize) -> Option<EntryId> {
        loop {
            let id = self.accounts[at].soft.oldest_unpinned(entries)?;
            if !self.is_spared(entries, id) {
                return Some(id);
            }
        }
    }

    /// Returns true if another member of its group was accessed since it was considered last: that counts as an access
    /// of it, once.
    fn is_spared(&mut self, entries: &mut Entries, id: EntryId) -> bool {
        if !entries[id].is(Mark::Grouped) {
            return false;
        }
        let Some(kept) = self.kept.get_mut(&id.0) else { return false };
        let accesses = self.groups.accesses((entries[id].account() as u16, kept.group));
        if kept.seen == accesses {
            return false;
        }
        (kept.seen, kept.follows) = (accesses, false);
        self.access_alone(entries, id);
        true
    }

    /// Returns the account of the tenant with this number, if it is configured.
    pub(crate) fn account_of(&self, number: u32) -> Option<u16> {
        let at = *self.numbers.get(&number)?;
        self.accounts[usize::from(at)].is_listed.then_some(at)
    }

    /// Asserts lists and accounts; returns the number of entries in the eviction orders or hard pinned.
    pub(crate) fn check(&self, entries: &Entries) -> usize {
        let (mut used, mut stuck) = (vec![0; self.accounts.len()], vec![0; self.accounts.len()]);
        let (mut hard, mut held) = (vec![0; self.accounts.len()], vec![0; self.accounts.len()]);
        let mut hard_live = 0;
        for (_, entry) in entries.iter() {
            used[entry.account()] += entry.granules();
            stuck[entry.account()] += if entry.is_stuck() { entry.granules() } else { 0 };
            hard[entry.account()] += if entry.is(Mark::Hard) { entry.granules() } else { 0 };
            held[entry.account()] += 1;
            hard_live += usize::from(entry.is(Mark::Hard) && entry.state() == crate::entry::State::Live);
        }
        let mut in_order = 0;
        for (at, account) in self.accounts.iter().enumerate() {
            assert_eq!((account.used_granules, account.stuck_granules), (used[at], stuck[at]), "account {at}");
            assert_eq!((account.hard_granules, account.entries), (hard[at], held[at]), "account {at}");
            assert_eq!(self.active.contains(&(at as u16)), used[at] > 0, "account {at} is active");
            in_order += account.policy.check(entries) + account.soft.check(entries, true);
        }
        assert_eq!(self.stuck_granules, stuck.iter().sum::<u64>(), "granules that no eviction frees");
        assert_eq!(self.hard_granules, hard.iter().sum::<u64>(), "hard pinned granules");
        for (until, entry) in &self.until {
            assert!(entries[EntryId(*entry)].is(Mark::Soft), "a soft pin until {until:?} of {entry}");
        }
        self.groups.check(entries);
        in_order + hard_live
    }
}

const _: () = assert!(ACCOUNTS <= u16::MAX as usize);
