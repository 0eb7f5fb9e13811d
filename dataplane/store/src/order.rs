//! Whose objects go first: an eviction order for each tenant, pins, groups, and how tenants share a pool.
//!
//! Each tenant with an account has an eviction policy of its own. When room is needed, the tenant that is furthest
//! above its share loses an object, by its own policy; so nobody's burst costs those who are within their shares. A
//! share is
//! the tenant's lease of memory where it has one (scaled down where all leases together are more than the pool); those
//! without divide by weight what is left. Who is alone has everything. A tenant at its lease makes room among its own
//! objects.
//!
//! * *Softly pinned* objects are in no policy until their time is over, but in a list of their own, and go when
//!   nothing else of their tenant would do, or when it is above its share. *Hard pinned* ones are in no list, and
//!   never go.
//! * Objects of a *group* share their accesses: one of them that comes to go is spared if any was asked for since it
//!   was
//!   looked at last. When one goes, the others go with it: those that are held follow when they are let go.
//!
//! What has neither pin nor group costs nothing here but the account's number. Not here: who may put (the service), and
//! how leases are divided (the control plane).

mod groups;
mod shares;

use std::collections::{BTreeMap, BTreeSet};

use crate::entry::{ACCOUNTS, Entries, EntryId, Keep, Mark, Place};
use crate::eviction::{EvictionPolicy, Segment};
use groups::Groups;
pub use shares::{TenantLease, TenantUse};

/// How far eviction goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reach {
    /// Objects that are not pinned, and softly pinned ones of tenants above their shares.
    Plain,
    /// Softly pinned ones too.
    Soft,
}

/// What there is not enough of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Scarce {
    /// Room in the pool.
    Room,
    /// Entries, of which there are so many in all.
    Entries(u32),
}

/// One tenant's account.
#[derive(Debug)]
struct Account<P> {
    number: u32,
    /// Whether the tenant is one of those that there are.
    is_listed: bool,
    lease_granules: Option<u64>,
    weight: u32,
    used_granules: u64,
    stuck_granules: u64,
    hard_granules: u64,
    /// Entries that are not vacant.
    entries: u64,
    share_granules: u64,
    /// The round of asking in which it had nothing to give.
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

/// What is remembered of an object with a soft pin or a group.
#[derive(Clone, Copy, Debug)]
struct Retention {
    group: u64,
    soft_pin_ns: u64,
    /// When its soft pin ends, and which of those that end then it is.
    until: (u64, u64),
    /// The group's accesses when it was looked at last.
    seen: u32,
    /// It goes when it is let go, as its group has gone.
    follows: bool,
}

/// The eviction orders of all tenants.
#[derive(Debug)]
pub(crate) struct Order<P> {
    accounts: Vec<Account<P>>,
    numbers: BTreeMap<u32, u16>,
    /// Accounts that use anything, in order.
    active: BTreeSet<u16>,
    pool_granules: u64,
    stuck_granules: u64,
    hard_granules: u64,
    shares_known: bool,
    rounds: u64,
    /// Orders softly pinned objects.
    clock: u64,
    now_ns: u64,
    kept: BTreeMap<u32, Retention>,
    /// Soft pins by the time at which they end.
    until: BTreeMap<(u64, u64), u32>,
    groups: Groups,
}

impl<P: EvictionPolicy> Order<P> {
    /// Of a pool with one tenant, the default one.
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

    /// What time it is; it never goes back.
    pub(crate) fn tick(&mut self, now_ns: u64) {
        self.now_ns = self.now_ns.max(now_ns);
    }

    /// Granules that no eviction would free.
    pub(crate) const fn stuck_granules(&self) -> u64 {
        self.stuck_granules
    }

    /// Granules of hard pinned objects, also of those that are being written.
    pub(crate) const fn hard_granules(&self) -> u64 {
        self.hard_granules
    }

    /// Objects whose soft pins last.
    pub(crate) fn soft_pins(&self) -> usize {
        self.until.len()
    }

    /// An entry was reserved.
    pub(crate) fn charge(&mut self, entries: &mut Entries, id: EntryId, keep: &Keep) {
        if keep.group != 0 || keep.soft_pin_ns != 0 {
            let Keep { group, soft_pin_ns, .. } = *keep;
            self.kept.insert(id.0, Retention { group, soft_pin_ns, until: (0, 0), seen: 0, follows: false });
            entries.set(id, Mark::Soft, soft_pin_ns != 0 && !keep.hard_pin);
        }
        self.account_for(entries, id, true);
    }

    /// An entry is about to fall vacant.
    pub(crate) fn discharge(&mut self, entries: &Entries, id: EntryId) {
        self.account_for(entries, id, false);
        if !self.kept.is_empty() {
            self.kept.remove(&id.0);
        }
    }

    /// Enters an entry into the accounts, or takes it out of them.
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

    /// Does something to an entry that may make it stick, or come loose.
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

    /// An object became live.
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

    /// An object was asked for.
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

    /// A live object goes, pinned or not; `to_make_room` where the policy may remember it.
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

    /// The last pin of a live object went. Whether it is to go now, as its group has gone.
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

    /// Softly pinned objects whose time is over become as others, the newest of them.
    pub(crate) fn expire(&mut self, entries: &mut Entries) {
        while let Some(first) = self.until.first_entry().filter(|first| first.key().0 <= self.now_ns) {
            let id = EntryId(first.remove());
            let at = entries[id].account();
            self.accounts[at].soft.unlink(entries, id);
            entries.set(id, Mark::Soft, false);
            self.accounts[at].policy.insert(entries, id);
        }
    }

    /// The object that goes next for anybody who needs what is scarce.
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

    /// The object of a tenant that goes next to make room for another of the same.
    pub(crate) fn victim_of(&mut self, entries: &mut Entries, account: u16) -> Option<EntryId> {
        let at = usize::from(account);
        self.plain_victim(entries, at).or_else(|| self.soft_victim(entries, at))
    }

    /// Whether an object may go where neighbours are cleared away.
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

    /// One of its group was asked for since it was looked at: that counts for it too, once.
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

    /// The account of the tenant with this number, if there is such a tenant.
    pub(crate) fn account_of(&self, number: u32) -> Option<u16> {
        let at = *self.numbers.get(&number)?;
        self.accounts[usize::from(at)].is_listed.then_some(at)
    }

    /// Asserts lists and accounts; how many entries are in the eviction orders or hard pinned.
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
        assert_eq!(self.stuck_granules, stuck.iter().sum::<u64>(), "what no eviction frees");
        assert_eq!(self.hard_granules, hard.iter().sum::<u64>(), "what is hard pinned");
        for (until, entry) in &self.until {
            assert!(entries[EntryId(*entry)].is(Mark::Soft), "a soft pin until {until:?} of {entry}");
        }
        self.groups.check(entries);
        in_order + hard_live
    }
}

const _: () = assert!(ACCOUNTS <= u16::MAX as usize);
