//! Accounts of tenants: leases and weights, use of the pool, and the tenant that exceeds its share the most.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_proto::tenants::TenantLease;

use super::Scarce;
use crate::allocator::{GRANULE_BYTES, MEMORY_KINDS, MemoryKind};
use crate::entry::{ACCOUNTS, Entries, Entry, EntryId, EvictionList, Mark};
use crate::eviction::{EvictionPolicy, PriorityLevels, Segment};

/// Number of accounts up to which tenants that are not configured get accounts of their own.
const UNCONFIGURED_MOST: usize = 256;

/// Usage of a shard by a tenant.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct TenantUse {
    pub number: u32,
    /// Bytes that its objects take, in whole granules, in the pool, near and far, and in the device pool.
    pub used_bytes: u64,
    /// Bytes that it may take, if limited.
    pub lease_bytes: Option<u64>,
    /// Bytes of its objects that were evicted.
    pub evicted_bytes: u64,
    /// Puts that were refused because of its quota.
    pub refused: u64,
}

/// Account of one tenant, with the eviction order of its objects.
#[derive(Debug)]
struct Account<P> {
    number: u32,
    /// True if the tenant is configured.
    is_listed: bool,
    lease_granules: Option<u64>,
    weight: u32,
    /// Granules that its objects take, by kind of memory.
    granules: [u64; MEMORY_KINDS],
    stuck_granules: u64,
    hard_granules: u64,
    /// Entries that are not vacant.
    entries: u64,
    share_granules: u64,
    /// Last round in which its policy was asked.
    asked: u64,
    evicted_bytes: u64,
    refused: u64,
    /// Orders of its objects, by kind of memory: of those that there are.
    orders: [Option<MemoryOrder<P>>; MEMORY_KINDS],
}

/// Order of a tenant's objects in one kind of memory.
#[derive(Debug)]
pub(super) struct MemoryOrder<P> {
    /// Objects without a soft or hard pin.
    pub(super) policy: PriorityLevels<P>,
    /// Softly pinned objects.
    pub(super) soft: Segment,
}

impl<P: EvictionPolicy> MemoryOrder<P> {
    fn new(policy: P) -> Self {
        Self {
            policy: PriorityLevels::new(policy),
            soft: Segment::new(EvictionList::SoftPinned, EvictionList::SoftPinnedParked),
        }
    }
}

impl<P: EvictionPolicy> Account<P> {
    /// Creates an account with orders of the kinds of memory that have granules.
    fn new(number: u32, policy: P, memory_granules: &[u64; MEMORY_KINDS]) -> Self {
        let of = |kind: MemoryKind| (memory_granules[kind as usize] > 0).then(|| MemoryOrder::new(policy.anew()));
        let (far, device) = (of(MemoryKind::Far), of(MemoryKind::Device));
        Self {
            number,
            is_listed: true,
            lease_granules: None,
            weight: 1,
            granules: [0; MEMORY_KINDS],
            stuck_granules: 0,
            hard_granules: 0,
            entries: 0,
            share_granules: 0,
            asked: 0,
            evicted_bytes: 0,
            refused: 0,
            orders: [Some(MemoryOrder::new(policy)), far, device],
        }
    }
}

impl<P> Account<P> {
    /// Returns the granules that its objects take in all kinds of memory.
    const fn used_granules(&self) -> u64 {
        let [near, far, device] = self.granules;
        near + far + device
    }

    /// Returns the order of its objects in the pool's near part.
    const fn near(&self) -> &MemoryOrder<P> {
        self.orders[MemoryKind::Near as usize].as_ref().expect("the pool has a near part")
    }
}

const _: () = assert!(MemoryKind::Near as usize == 0 && MemoryKind::Far as usize == 1);

/// Tenants of a shard: the account of each, with its lease, its use of the pool and the eviction order of its objects.
#[derive(Debug)]
pub struct Tenants<P> {
    accounts: Vec<Account<P>>,
    numbers: BTreeMap<u32, u16>,
    /// Accounts with entries, in order.
    active: BTreeSet<u16>,
    /// Size of each kind of memory.
    memory_granules: [u64; MEMORY_KINDS],
    /// Part of the pool, and of a lease, that may be hard pinned.
    hard_pin_percent: u8,
    /// Granules of the pool that no eviction would free.
    stuck_granules: u64,
    hard_granules: u64,
    shares_known: bool,
    rounds: u64,
}

impl<P: EvictionPolicy> Tenants<P> {
    /// Creates the account of the default tenant.
    pub(super) fn new(memory_granules: [u64; MEMORY_KINDS], hard_pin_percent: u8, policy: P) -> Self {
        Self {
            accounts: vec![Account::new(0, policy, &memory_granules)],
            numbers: BTreeMap::from([(0, 0)]),
            active: BTreeSet::new(),
            memory_granules,
            hard_pin_percent,
            stuck_granules: 0,
            hard_granules: 0,
            shares_known: false,
            rounds: 0,
        }
    }

    /// Sets the tenants beside the default one: see [`TenantLease`]. Tenants that are not listed any more keep their
    /// objects until these are evicted or removed. Tenants beyond [`ACCOUNTS`] are ignored.
    pub fn set(&mut self, leases: &[TenantLease]) {
        for account in &mut self.accounts {
            (account.is_listed, account.lease_granules, account.weight) = (account.number == 0, None, 1);
        }
        for lease in leases {
            let Some(at) = self.place_for(lease.number) else { continue };
            let account = &mut self.accounts[at];
            account.is_listed = true;
            account.lease_granules = lease.dram_bytes.map(|bytes| bytes / GRANULE_BYTES);
            account.weight = lease.weight.max(1);
        }
        self.shares_known = false;
    }

    /// Returns the index of the tenant's account, existing or new.
    fn place_for(&mut self, number: u32) -> Option<usize> {
        if let Some(at) = self.numbers.get(&number) {
            return Some(usize::from(*at));
        }
        let free = self.accounts.iter().position(|account| !account.is_listed && account.used_granules() == 0);
        let at = match free {
            Some(at) => {
                self.numbers.remove(&self.accounts[at].number);
                at
            }
            None if self.accounts.len() < ACCOUNTS => self.accounts.len(),
            None => return None,
        };
        let policy = self.accounts[0].near().policy.anew_policy();
        let account = Account::new(number, policy, &self.memory_granules);
        if at == self.accounts.len() {
            self.accounts.push(account);
        } else {
            self.accounts[at] = account;
        }
        self.numbers.insert(number, at as u16);
        Some(at)
    }

    /// Returns the account of the tenant with this number, if it is configured.
    #[must_use]
    pub fn account_of(&self, number: u32) -> Option<u16> {
        let at = *self.numbers.get(&number)?;
        self.accounts[usize::from(at)].is_listed.then_some(at)
    }

    /// Returns the account of the tenant with this number, if it has one.
    #[must_use]
    pub fn known_account(&self, number: u32) -> Option<u16> {
        self.numbers.get(&number).copied()
    }

    /// Returns the number of the tenant with this account.
    #[must_use]
    pub fn number(&self, account: u16) -> u32 {
        self.accounts[usize::from(account)].number
    }

    /// Returns the account to charge for a tenant that is not configured: one of its own, without a lease, while there
    /// is room for such accounts; otherwise the default tenant's.
    pub fn account_of_unconfigured(&mut self, number: u32) -> u16 {
        if let Some(at) = self.numbers.get(&number) {
            return *at;
        }
        let full = self.accounts.len() >= UNCONFIGURED_MOST;
        let free = self.accounts.iter().any(|account| !account.is_listed && account.used_granules() == 0);
        let Some(at) = (!full || free).then(|| self.place_for(number)).flatten() else { return 0 };
        self.accounts[at].is_listed = false;
        at as u16
    }

    /// Returns the lease, and the granules that cannot be freed, if this many more would exceed a tenant's lease.
    pub(crate) fn over_lease(&self, account: u16, granules: u64) -> Option<(u64, u64)> {
        let account = &self.accounts[usize::from(account)];
        let lease = account.lease_granules?;
        (account.used_granules() + granules > lease).then_some((lease, account.stuck_granules))
    }

    /// Returns true if the pool's limit of hard pins allows this many more granules, of any tenant.
    #[must_use]
    pub const fn pins_allow(&self, granules: u64) -> bool {
        self.hard_granules + granules <= self.pin_share(self.near_granules())
    }

    /// Returns nothing if this many more granules may be hard pinned; otherwise the granules that are pinned, the
    /// limit, and true if it is the tenant's limit. All hard pinned objects together may take a share of the pool,
    /// those of a tenant with a lease the same share of the lease: otherwise the tenant could fill its lease with them,
    /// and no later put of it would ever find room.
    pub(crate) fn pin_limit(&self, granules: u64, account: u16) -> Option<(u64, u64, bool)> {
        let Account { hard_granules, lease_granules, .. } = &self.accounts[usize::from(account)];
        if let Some(lease) = *lease_granules
            && hard_granules + granules > self.pin_share(lease)
        {
            return Some((*hard_granules, self.pin_share(lease), true));
        }
        let limit = self.pin_share(self.near_granules());
        (!self.pins_allow(granules)).then_some((self.hard_granules, limit, false))
    }

    /// Returns nothing if this many more granules may be hard pinned; otherwise the bytes that are pinned, the limit,
    /// and true if it is the tenant's limit, in which case the refusal is counted.
    pub(crate) fn refused_pin(&mut self, granules: u64, account: u16) -> Option<(u64, u64, bool)> {
        let (pinned, limit, of_tenant) = self.pin_limit(granules, account)?;
        if of_tenant {
            self.count_refusal(account);
        }
        Some((pinned * GRANULE_BYTES, limit * GRANULE_BYTES, of_tenant))
    }

    /// Returns the size of the pool's near part.
    const fn near_granules(&self) -> u64 {
        self.memory_granules[MemoryKind::Near as usize]
    }

    /// Returns the granules, of this many, that may be hard pinned.
    const fn pin_share(&self, granules: u64) -> u64 {
        granules * self.hard_pin_percent as u64 / 100
    }

    /// Counts a put that was refused because of the lease.
    pub(crate) fn count_refusal(&mut self, account: u16) {
        self.accounts[usize::from(account)].refused += 1;
    }

    /// Returns the granules that no eviction would free.
    pub(crate) const fn stuck_granules(&self) -> u64 {
        self.stuck_granules
    }

    /// Returns the granules of hard pinned objects, including those being written.
    pub(crate) const fn hard_granules(&self) -> u64 {
        self.hard_granules
    }

    /// Returns the number of the tenant that an entry is charged to.
    pub(super) fn number_of(&self, entry: &Entry) -> u32 {
        self.accounts[entry.account()].number
    }

    /// Returns the order of an account's objects in one kind of memory, if there is such memory.
    #[inline]
    pub(super) fn order(&mut self, account: usize, kind: MemoryKind) -> Option<&mut MemoryOrder<P>> {
        self.accounts[account].orders[kind as usize].as_mut()
    }

    /// Returns the order that an entry without a hard pin is in, or is to be in.
    #[inline]
    fn order_of(&mut self, entry: &Entry) -> &mut MemoryOrder<P> {
        let order = self.accounts[entry.account()].orders[entry.memory() as usize].as_mut();
        order.expect("an entry is in memory that there is")
    }

    /// Returns the eviction policy of an entry without a soft or hard pin.
    #[inline]
    pub(super) fn policy_of(&mut self, entry: &Entry) -> &mut PriorityLevels<P> {
        &mut self.order_of(entry).policy
    }

    /// Returns the softly pinned objects that a softly pinned entry belongs to.
    #[inline]
    pub(super) fn soft_of(&mut self, entry: &Entry) -> &mut Segment {
        &mut self.order_of(entry).soft
    }

    /// Returns true if an entry was accessed since it came to its memory, as far as its policy knows; false for one
    /// that is not in the policy's order.
    pub(crate) fn was_accessed(&self, entry: &Entry) -> bool {
        let order = self.accounts[entry.account()].orders[entry.memory() as usize].as_ref();
        let is_ordered = !entry.is(Mark::Hard) && !entry.is(Mark::Soft);
        is_ordered && order.is_some_and(|order| order.policy.was_accessed(entry))
    }

    /// Charges an entry to its account.
    pub(super) fn charge(&mut self, entry: &Entry) {
        let (granules, at) = (entry.granules(), entry.account());
        let (stuck, hard) = parts_of(entry);
        let account = &mut self.accounts[at];
        if account.used_granules() == 0 {
            self.active.insert(at as u16);
            self.shares_known = false;
        }
        account.granules[entry.memory() as usize] += granules;
        account.stuck_granules += stuck;
        account.hard_granules += hard;
        account.entries += 1;
        self.hard_granules += hard;
        if entry.memory() == MemoryKind::Near {
            self.stuck_granules += stuck;
        }
    }

    /// Discharges an entry from its account.
    pub(super) fn discharge(&mut self, entry: &Entry) {
        let (granules, at) = (entry.granules(), entry.account());
        let (stuck, hard) = parts_of(entry);
        let account = &mut self.accounts[at];
        account.granules[entry.memory() as usize] -= granules;
        account.stuck_granules -= stuck;
        account.hard_granules -= hard;
        account.entries -= 1;
        self.hard_granules -= hard;
        if entry.memory() == MemoryKind::Near {
            self.stuck_granules -= stuck;
        }
        if account.used_granules() == 0 {
            self.active.remove(&(at as u16));
            self.shares_known = false;
        }
    }

    /// Applies a step to an entry that may change whether it can be evicted.
    pub(super) fn stick<T>(&mut self, entries: &mut Entries, id: EntryId, step: impl FnOnce(&mut Entries) -> T) -> T {
        let before = entries[id].is_stuck();
        let done = step(entries);
        let (entry, after) = (&entries[id], entries[id].is_stuck());
        let account = &mut self.accounts[entry.account()];
        let of_pool = if entry.memory() == MemoryKind::Near { entry.granules() } else { 0 };
        if after && !before {
            account.stuck_granules += entry.granules();
            self.stuck_granules += of_pool;
        } else if before && !after {
            account.stuck_granules -= entry.granules();
            self.stuck_granules -= of_pool;
        }
        done
    }

    /// Counts the eviction of an entry.
    pub(super) fn count_eviction(&mut self, entry: &Entry) {
        self.accounts[entry.account()].evicted_bytes += entry.bytes();
    }

    /// Returns true if the tenant of an entry exceeds its share.
    pub(super) fn is_above_share(&self, entry: &Entry) -> bool {
        let account = &self.accounts[entry.account()];
        account.granules[MemoryKind::Near as usize] > account.share_granules
    }

    /// Returns true if there are, or were, tenants besides the default one.
    #[must_use]
    pub const fn has_others(&self) -> bool {
        self.accounts.len() > 1
    }

    /// Returns the usage of each tenant.
    #[must_use]
    pub fn uses(&self) -> Vec<TenantUse> {
        let shown = self.accounts.iter().filter(|account| account.is_listed || account.used_granules() > 0);
        let of = |account: &Account<P>| TenantUse {
            number: account.number,
            used_bytes: account.used_granules() * GRANULE_BYTES,
            lease_bytes: account.lease_granules.map(|granules| granules * GRANULE_BYTES),
            evicted_bytes: account.evicted_bytes,
            refused: account.refused,
        };
        shown.map(of).collect()
    }

    /// Divides the pool among tenants, if the division is outdated.
    pub(super) fn know_shares(&mut self) {
        if self.shares_known {
            return;
        }
        self.shares_known = true;
        let scaled = |part: u64, of: u64, whole: u64| (u128::from(whole) * u128::from(part) / u128::from(of)) as u64;
        let all: u64 = self.accounts.iter().filter_map(|account| account.lease_granules).sum();
        let (pool_granules, mut weights) = (self.near_granules(), 0);
        let mut left = pool_granules;
        for at in &self.active {
            let account = &mut self.accounts[usize::from(*at)];
            match account.lease_granules {
                Some(lease) => {
                    let share = if all > pool_granules { scaled(lease, all, pool_granules) } else { lease };
                    account.share_granules = share;
                    left -= share;
                }
                None => weights += u64::from(account.weight),
            }
        }
        for at in &self.active {
            let account = &mut self.accounts[usize::from(*at)];
            if account.lease_granules.is_none() {
                account.share_granules = scaled(account.weight.into(), weights, left);
            }
        }
    }

    /// Begins a round, in which each account is asked at most once.
    pub(super) const fn begin_round(&mut self) {
        self.rounds += 1;
    }

    /// Returns the active account that exceeds its share of the scarce resource the most, of those not asked in this
    /// round, and marks it as asked. `above`: only an account that exceeds its share.
    pub(super) fn furthest(&mut self, above: bool, scarce: Scarce) -> Option<usize> {
        let (mut found, pool_granules): (Option<(i128, usize)>, _) = (None, self.near_granules());
        for at in self.active.iter().map(|at| usize::from(*at)) {
            let account = &self.accounts[at];
            let excess = match scarce {
                Scarce::Room(kind @ MemoryKind::Near) => {
                    i128::from(account.granules[kind as usize]) - i128::from(account.share_granules)
                }
                // The same fraction of the memory as of the pool's near part.
                Scarce::Room(kind) => {
                    let (all, share) = (self.memory_granules[kind as usize], account.share_granules);
                    let share = i128::from(all) * i128::from(share) / i128::from(pool_granules);
                    i128::from(account.granules[kind as usize]) - share
                }
                // The same fraction of all entries as of all memory, so that many tiny objects are no burden on other
                // tenants.
                Scarce::Entries(all) => {
                    let share = i128::from(all) * i128::from(account.share_granules) / i128::from(pool_granules);
                    i128::from(account.entries) - share
                }
            };
            let wanted = account.asked != self.rounds && (!above || excess > 0);
            if wanted && found.is_none_or(|(most, _)| excess > most) {
                found = Some((excess, at));
            }
        }
        let (_, at) = found?;
        self.accounts[at].asked = self.rounds;
        Some(at)
    }

    /// Asserts lists and accounts; returns the number of entries in the eviction orders.
    pub(super) fn check(&self, entries: &Entries) -> usize {
        let (mut used, mut stuck) = (vec![[0; MEMORY_KINDS]; self.accounts.len()], vec![0; self.accounts.len()]);
        let (mut hard, mut held) = (vec![0; self.accounts.len()], vec![0; self.accounts.len()]);
        let mut stuck_in_pool = 0;
        for (_, entry) in entries.iter() {
            let (stuck_part, hard_part) = parts_of(entry);
            if entry.memory() == MemoryKind::Near {
                stuck_in_pool += stuck_part;
            }
            used[entry.account()][entry.memory() as usize] += entry.granules();
            stuck[entry.account()] += stuck_part;
            hard[entry.account()] += hard_part;
            held[entry.account()] += 1;
        }
        let mut in_order = 0;
        for (at, account) in self.accounts.iter().enumerate() {
            assert_eq!((account.granules, account.stuck_granules), (used[at], stuck[at]), "account {at}");
            assert_eq!((account.hard_granules, account.entries), (hard[at], held[at]), "account {at}");
            let is_used = account.used_granules() > 0;
            assert_eq!(self.active.contains(&(at as u16)), is_used, "account {at} is active");
            for order in account.orders.iter().flatten() {
                in_order += order.policy.check(entries) + order.soft.check(entries, true);
            }
        }
        assert_eq!(self.stuck_granules, stuck_in_pool, "granules of the pool that no eviction frees");
        assert_eq!(self.hard_granules, hard.iter().sum::<u64>(), "hard pinned granules");
        in_order
    }
}

/// Returns the granules of an entry that no eviction would free, and those that are hard pinned: all or none.
const fn parts_of(entry: &Entry) -> (u64, u64) {
    let granules = entry.granules();
    (if entry.is_stuck() { granules } else { 0 }, if entry.is(Mark::Hard) { granules } else { 0 })
}

const _: () = assert!(ACCOUNTS <= u16::MAX as usize);
