//! Shares of tenants in a pool: leases, weights, and the tenant that exceeds its share the most.

use super::{Account, Order, Scarce};
use crate::allocator::GRANULE_BYTES;
use crate::entry::{ACCOUNTS, Entries, EntryId, Keep, Mark};
use crate::eviction::EvictionPolicy;

/// Number of accounts up to which tenants that are not configured get accounts of their own.
const STRANGERS_UP_TO: usize = 256;

/// Configuration of a tenant at a shard.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TenantLease {
    /// Number of the tenant: see [`kvplane_proto::digest::tenant_number`]. 0 is the default tenant, which always
    /// exists.
    pub number: u32,
    /// Bytes of this shard's pool that it may fill; `None` for no limit.
    pub dram_bytes: Option<u64>,
    /// Weight among tenants without a lease. 0 counts as 1.
    pub weight: u32,
}

/// Usage of a shard by a tenant.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct TenantUse {
    pub number: u32,
    /// Bytes of the pool that its objects take, in whole granules.
    pub used_bytes: u64,
    /// Bytes that it may take, if limited.
    pub lease_bytes: Option<u64>,
    /// Bytes of its objects that were evicted.
    pub evicted_bytes: u64,
    /// Puts that were refused because of its quota.
    pub refused: u64,
}

impl<P: EvictionPolicy> Order<P> {
    /// Sets the tenants beside the default one. Tenants that are not listed any more keep their objects until these are
    /// evicted or removed. Tenants beyond [`ACCOUNTS`] are ignored.
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

    /// Returns the index of the tenant's account, existing or new.
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

    /// Returns the account of a tenant that is not configured: one of its own, without a lease, while there is room for
    /// such accounts; otherwise the default tenant's.
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

    /// Returns the lease, and the granules that cannot be freed, if this many more would exceed a tenant's lease.
    pub(crate) fn over_lease(&self, account: u16, granules: u64) -> Option<(u64, u64)> {
        let account = &self.accounts[usize::from(account)];
        let lease = account.lease_granules?;
        (account.used_granules + granules > lease).then_some((lease, account.stuck_granules))
    }

    /// Returns a tenant's hard pinned granules, and its lease if it has one.
    pub(crate) fn hard_pins_of(&self, account: u16) -> (u64, Option<u64>) {
        let account = &self.accounts[usize::from(account)];
        (account.hard_granules, account.lease_granules)
    }

    /// Counts a put that was refused because of the lease.
    pub(crate) fn count_refusal(&mut self, account: u16) {
        self.accounts[usize::from(account)].refused += 1;
    }

    /// Changes the account, group and pins of a live object that was plain so far.
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

    /// Returns the tenant that an entry is charged to.
    pub(crate) fn tenant_of(&self, entries: &Entries, id: EntryId) -> u32 {
        self.accounts[entries[id].account()].number
    }

    /// Returns true if there are, or were, tenants besides the default one.
    pub(crate) const fn has_tenants(&self) -> bool {
        self.accounts.len() > 1
    }

    /// Returns the usage of each tenant.
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

    /// Divides the pool among tenants, if the division is outdated.
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

    /// Returns the active account that exceeds its share of the scarce resource the most, of those not asked in this
    /// round, and marks it as asked. `above`: only an account that exceeds its share.
    pub(super) fn furthest(&mut self, above: bool, scarce: Scarce) -> Option<usize> {
        let mut found: Option<(i128, usize)> = None;
        for at in self.active.iter().map(|at| usize::from(*at)) {
            let account = &self.accounts[at];
            let excess = match scarce {
                Scarce::Room => i128::from(account.used_granules) - i128::from(account.share_granules),
                // The same fraction of all entries as of all memory, so that many tiny objects are no burden on other
                // tenants.
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
