//! How tenants share a pool: leases, weights, and who is furthest above its share.

use super::{Account, Order, Scarce};
use crate::allocator::GRANULE_BYTES;
use crate::entry::{ACCOUNTS, Entries, EntryId, Keep, Mark};
use crate::eviction::EvictionPolicy;

/// Tenants that nobody has told of get accounts while there are no more than so many.
const STRANGERS_UP_TO: usize = 256;

/// What a shard is told of a tenant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TenantLease {
    /// Its number: see [`kvplane_proto::digest::tenant_number`]. 0 is the default tenant, which there always is.
    pub number: u32,
    /// Bytes of this shard's pool that it may fill; without, as much as it gets.
    pub dram_bytes: Option<u64>,
    /// Its weight among those without. 0 counts as 1.
    pub weight: u32,
}

/// What a tenant has of a shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct TenantUse {
    /// Its number.
    pub number: u32,
    /// Bytes of the pool that its objects take, in whole granules.
    pub used_bytes: u64,
    /// What it may take, if that is limited.
    pub lease_bytes: Option<u64>,
    /// Bytes of its objects that were evicted.
    pub evicted_bytes: u64,
    /// Puts that were refused as it had no room left.
    pub refused: u64,
}

impl<P: EvictionPolicy> Order<P> {
    /// These tenants there are, beside the default one. Those that are no more keep what they have until it goes.
    /// More than [`ACCOUNTS`] have no place; those beyond are not known.
    pub(crate) fn set_tenants(&mut self, leases: &[TenantLease]) {
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

    /// The tenant's place, an old or a new one.
    fn place_for(&mut self, number: u32) -> Option<usize> {
        if let Some(at) = self.numbers.get(&number) {
            return Some(usize::from(*at));
        }
        let free = self.accounts.iter().position(|account| !account.is_listed && account.used_granules == 0);
        let at = match free {
            Some(at) => {
                self.numbers.remove(&self.accounts[at].number);
                at
            }
            None if self.accounts.len() < ACCOUNTS => self.accounts.len(),
            None => return None,
        };
        let account = Account::new(number, self.accounts[0].policy.anew());
        if at == self.accounts.len() {
            self.accounts.push(account);
        } else {
            self.accounts[at] = account;
        }
        self.numbers.insert(number, at as u16);
        Some(at)
    }

    /// The account of a tenant that nobody has told of: one of its own, without a lease, while there is room for such;
    /// else the default tenant's.
    pub(crate) fn stranger(&mut self, number: u32) -> u16 {
        if let Some(at) = self.numbers.get(&number) {
            return *at;
        }
        let full = self.accounts.len() >= STRANGERS_UP_TO;
        let free = self.accounts.iter().any(|account| !account.is_listed && account.used_granules == 0);
        let Some(at) = (!full || free).then(|| self.place_for(number)).flatten() else { return 0 };
        self.accounts[at].is_listed = false;
        at as u16
    }

    /// Whether so much more would be above a tenant's lease; then what it is and what of it cannot be freed.
    pub(crate) fn over_lease(&self, account: u16, granules: u64) -> Option<(u64, u64)> {
        let account = &self.accounts[usize::from(account)];
        let lease = account.lease_granules?;
        (account.used_granules + granules > lease).then_some((lease, account.stuck_granules))
    }

    /// What a tenant has that is hard pinned, and its lease if it has one.
    pub(crate) fn hard_pins_of(&self, account: u16) -> (u64, Option<u64>) {
        let account = &self.accounts[usize::from(account)];
        (account.hard_granules, account.lease_granules)
    }

    /// A put was refused for want of lease.
    pub(crate) fn count_refusal(&mut self, account: u16) {
        self.accounts[usize::from(account)].refused += 1;
    }

    /// Keeps a live object otherwise than so far, in which it was plain.
    pub(crate) fn keep_as(&mut self, entries: &mut Entries, id: EntryId, keep: &Keep) {
        if entries[id].account() == usize::from(keep.account) && keep.group == 0 && !keep.hard_pin {
            return;
        }
        self.remove(entries, id, false);
        self.account_for(entries, id, false);
        entries.set_account(id, keep.account);
        entries.set(id, Mark::Hard, keep.hard_pin);
        self.charge(entries, id, keep);
        self.insert(entries, id);
    }

    /// Whom an entry is charged to.
    pub(crate) fn tenant_of(&self, entries: &Entries, id: EntryId) -> u32 {
        self.accounts[entries[id].account()].number
    }

    /// Whether there are, or were, others than the default tenant.
    pub(crate) const fn has_tenants(&self) -> bool {
        self.accounts.len() > 1
    }

    /// What each tenant has.
    pub(crate) fn uses(&self) -> Vec<TenantUse> {
        let shown = self.accounts.iter().filter(|account| account.is_listed || account.used_granules > 0);
        let of = |account: &Account<P>| TenantUse {
            number: account.number,
            used_bytes: account.used_granules * GRANULE_BYTES,
            lease_bytes: account.lease_granules.map(|granules| granules * GRANULE_BYTES),
            evicted_bytes: account.evicted_bytes,
            refused: account.refused,
        };
        shown.map(of).collect()
    }

    /// Divides the pool, if that is to be done anew.
    pub(super) fn know_shares(&mut self) {
        if self.shares_known {
            return;
        }
        self.shares_known = true;
        let scaled = |part: u64, of: u64, whole: u64| (u128::from(whole) * u128::from(part) / u128::from(of)) as u64;
        let all: u64 = self.accounts.iter().filter_map(|account| account.lease_granules).sum();
        let (mut left, mut weights) = (self.pool_granules, 0);
        for at in &self.active {
            let account = &mut self.accounts[usize::from(*at)];
            match account.lease_granules {
                Some(lease) => {
                    let share = if all > self.pool_granules { scaled(lease, all, self.pool_granules) } else { lease };
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

    /// The active account that is furthest above its share of what is scarce, of those not asked in this round; it is
    /// asked now. `above`: only one that is above it.
    pub(super) fn furthest(&mut self, above: bool, scarce: Scarce) -> Option<usize> {
        let mut found: Option<(i128, usize)> = None;
        for at in self.active.iter().map(|at| usize::from(*at)) {
            let account = &self.accounts[at];
            let excess = match scarce {
                Scarce::Room => i128::from(account.used_granules) - i128::from(account.share_granules),
                // The same part of all entries as of all memory: many tiny objects are nobody else's burden.
                Scarce::Entries(all) => {
                    let share = i128::from(all) * i128::from(account.share_granules) / i128::from(self.pool_granules);
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
}
