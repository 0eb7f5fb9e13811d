//! Quotas as leases: each shard leases a part of each tenant's quota, so that a put needs no round trip to the control
//! plane.
//!
//! Every shard periodically reports the use and the lease of each tenant; the reply is its lease from then on. A fair
//! lease covers the bytes that the tenant uses on the shard, and a part of the unused quota in proportion to the
//! shard's pool. Shards that recently rejected puts get most of the unused quota: an object may be larger than a part
//! by pool size.
//!
//! Invariant, unless a quota is lowered: the leases that all shards believe to have never exceed the quota in total,
//! whatever messages are lost. So a lease grows only by what no other shard may still believe to have: a lease that is
//! to shrink counts in full until its shard has reported the smaller one. A shard sends its next report only after its
//! last call is over, and never uses a reply that arrives after its call ended; so the reported lease is the lease in
//! use.
//!
//! Quotas of SSD bytes are leased in the same way, with one difference: what a shard has on its SSD survives restarts,
//! and a lease below it would evict it. So a lease covers what is there as long as all of the tenant's use is within
//! the quota, even while the leases of others are unknown or have to shrink first; all leases together may exceed the
//! quota for that time.
//!
//! Leases do not expire: a shard keeps its last lease while the control plane is unreachable, and the leases of a node
//! end with its incarnation. No clock is read, so a clock jump has no effect.

use std::collections::{BTreeMap, BTreeSet};

use bincode::{Decode, Encode};
use kvplane_proto::digest::tenant_number;
use kvplane_proto::ids::NodeId;
use kvplane_proto::map::Member;

use crate::cluster::Cluster;
use crate::state::MemberState;
use crate::tenants::{Tenant, TenantSsd};

/// Shard of one incarnation of a node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ShardIncarnation {
    pub node: u64,
    pub incarnation: u64,
    pub shard: u16,
}

/// Use of a tenant on a shard, as the shard reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct TenantFigures {
    pub number: u32,
    /// Bytes of the tenant's objects on the shard.
    pub used_bytes: u64,
    /// Lease that the shard uses, in bytes; none for a tenant without a quota.
    pub lease_bytes: Option<u64>,
    /// Bytes evicted on the shard.
    pub evicted_bytes: u64,
    /// Puts rejected on the shard.
    pub refused: u64,
}

/// Number of reports after one with new rejections for which a shard counts as wanting more.
const WANTS_FOR: u8 = 8;
/// Divisor of the fair part of the unused quota that a shard keeps while others want more.
const KEEP_ONE_IN: u64 = 8;

#[derive(Debug, Default)]
struct Shard {
    pool_bytes: u64,
    /// Tenants whose puts the shard recently rejected, and the number of reports for which that still counts.
    wants: BTreeMap<u32, u8>,
    uses: BTreeMap<u32, TenantFigures>,
    /// Upper bound of the lease that the shard may believe to have, of each tenant with a quota.
    granted: BTreeMap<u32, u64>,
    /// Tenants that were removed when the shard last reported.
    removed: BTreeSet<u32>,
}

/// Uses and leases of all shards. Not durable: shards report them again.
#[derive(Debug, Default)]
pub struct Quotas {
    shards: BTreeMap<ShardIncarnation, Shard>,
    /// True if leases cover what is there: see the module.
    covers_use: bool,
}

/// Quota of one tenant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TenantQuota {
    /// Number of the tenant.
    pub number: u32,
    /// Bytes for all shards; none for no limit.
    pub bytes: Option<u64>,
    /// Weight of the tenant, which is passed on with its leases.
    pub weight: u32,
}

impl TenantQuota {
    /// Returns a tenant's quota of memory.
    #[must_use]
    pub fn of_memory(tenant: &Tenant) -> Self {
        let number = tenant_number(tenant.name.as_bytes());
        Self { number, bytes: tenant.dram_bytes, weight: tenant.weight }
    }

    /// Returns a tenant's quota of SSD bytes.
    #[must_use]
    pub fn of_ssd(tenant: &Tenant, ssd: TenantSsd) -> Self {
        let number = tenant_number(tenant.name.as_bytes());
        Self { number, bytes: ssd.ssd_bytes, weight: ssd.weight.unwrap_or(1) }
    }
}

impl Quotas {
    /// Creates quotas of SSD bytes.
    #[must_use]
    pub fn of_ssds() -> Self {
        Self { covers_use: true, ..Self::default() }
    }

    /// Processes the report of a shard; returns its leases of these quotas. `all_known` is true once every shard of
    /// every member has reported; until then no lease grows, because the leases of the others are unknown.
    pub fn sync(
        &mut self,
        who: ShardIncarnation,
        pool_bytes: u64,
        uses: Vec<TenantFigures>,
        quotas: impl Iterator<Item = TenantQuota>,
        all_known: bool,
    ) -> Vec<TenantQuota> {
        let shard = self.shards.entry(who).or_default();
        shard.pool_bytes = pool_bytes;
        shard.granted = uses.iter().filter_map(|one| Some((one.number, one.lease_bytes?))).collect();
        shard.note_refusals(&uses);
        shard.uses = uses.into_iter().map(|one| (one.number, one)).collect();
        let pools: u64 = self.shards.values().map(|shard| shard.pool_bytes).sum();
        let mut leases = Vec::new();
        for quota in quotas {
            let bytes = quota.bytes.map(|bytes| self.lease(who, quota.number, bytes, pools, all_known));
            leases.push(TenantQuota { bytes, ..quota });
        }
        leases
    }

    /// Like [`Self::sync`], with the quotas of SSD bytes of a cluster's tenants. A tenant that was removed has one of
    /// 0, so that its records are evicted.
    pub fn sync_ssd(
        &mut self,
        who: ShardIncarnation,
        ssd_bytes: u64,
        uses: Vec<TenantFigures>,
        cluster: &Cluster,
    ) -> Vec<TenantQuota> {
        let all_known = self.knows_all(cluster, Some(who));
        let quotas = cluster.tenants().map(|(tenant, ssd)| TenantQuota::of_ssd(tenant, ssd));
        let quotas = quotas.filter(|quota| quota.bytes.is_some() || quota.weight != 1);
        let removed = cluster.removed_tenants().map(|name| tenant_number(name.as_bytes()));
        let removed: BTreeSet<u32> = removed.collect();
        let none = removed.iter().map(|number| TenantQuota { number: *number, bytes: Some(0), weight: 1 });
        let quotas: Vec<TenantQuota> = quotas.chain(none).collect();
        let leases = self.sync(who, ssd_bytes, uses, quotas.into_iter(), all_known);
        self.shards.entry(who).or_default().removed = removed;
        leases
    }

    /// Returns the tenants that were removed, and of which no SSD has any record, as far as all shards of all live
    /// members have reported.
    #[must_use]
    pub fn freed_tenants(&self, cluster: &Cluster) -> Vec<String> {
        let mut removed = cluster.removed_tenants().peekable();
        if removed.peek().is_none() || !self.knows_all(cluster, None) {
            return Vec::new();
        }
        let number = |name: &str| tenant_number(name.as_bytes());
        // A shard that does not have the lease yet may still write records; and so may one whose last report is of
        // before the tenant was set and removed again, as it may have got other leases since.
        let is_free = |shard: &Shard, number: u32| {
            let has_none = |one: &TenantFigures| one.used_bytes == 0 && one.lease_bytes == Some(0);
            let is_known = shard.removed.contains(&number);
            shard.pool_bytes == 0 || is_known && shard.uses.get(&number).is_some_and(has_none)
        };
        let is_freed = |name: &&str| self.shards.values().all(|shard| is_free(shard, number(name)));
        removed.filter(is_freed).map(str::to_owned).collect()
    }

    /// Returns true if every shard of every live member, except `but`, has reported.
    #[must_use]
    pub fn knows_all(&self, cluster: &Cluster, but: Option<ShardIncarnation>) -> bool {
        cluster.members().filter(|view| view.state.is_live()).all(|view| self.knows_member(view.member, but))
    }

    /// Returns the members whose use is unknown: dead ones, whose SSDs may come back with records, and those of which a
    /// shard has not reported, also because the control plane has restarted since.
    #[must_use]
    pub fn unreported(&self, cluster: &Cluster) -> BTreeSet<NodeId> {
        let there = cluster.members().filter(|view| view.state != MemberState::Left);
        let unknown = there.filter(|view| !view.state.is_live() || !self.knows_member(view.member, None));
        unknown.map(|view| view.member.node).collect()
    }

    /// Returns true if every shard of a member, except `but`, has reported.
    fn knows_member(&self, member: &Member, but: Option<ShardIncarnation>) -> bool {
        let (node, incarnation) = (member.node.0, member.incarnation.0);
        (0..member.shards.len()).all(|shard| {
            let of = ShardIncarnation { node, incarnation, shard: shard as u16 };
            Some(of) == but || self.knows(of)
        })
    }

    fn lease(&mut self, who: ShardIncarnation, number: u32, quota: u64, pools: u64, all_known: bool) -> u64 {
        let used_by = |shard: &Shard| shard.uses.get(&number).map_or(0, |one| one.used_bytes);
        let used: u64 = self.shards.values().map(used_by).sum();
        let granted_to = |shard: &Shard| shard.granted.get(&number).copied().unwrap_or(0);
        let others: u64 = self.shards.iter().filter(|(other, _)| **other != who).map(|(_, one)| granted_to(one)).sum();
        let part =
            |whole: u64, share: u64, of: u64| (u128::from(whole) * u128::from(share) / u128::from(of.max(1))) as u64;
        let wanting = self.shards.values().filter(|shard| shard.wants.contains_key(&number));
        let wanting: u64 = wanting.map(|shard| shard.pool_bytes).sum();
        let covers_use = self.covers_use;
        let Some(shard) = self.shards.get_mut(&who) else { return 0 };
        let (here, had) = (used_by(shard), granted_to(shard));
        let fair = match quota.checked_sub(used) {
            None => part(quota, here, used),
            Some(free) if wanting == 0 => here + part(free, shard.pool_bytes, pools),
            Some(free) if !shard.wants.contains_key(&number) => {
                here + part(free, shard.pool_bytes, pools) / KEEP_ONE_IN
            }
            Some(free) => {
                let kept = part(free, pools - wanting, pools) / KEEP_ONE_IN;
                here + part(free - kept, shard.pool_bytes, wanting)
            }
        };
        let most = if all_known { quota.saturating_sub(others) } else { had };
        let covered = match covers_use {
            false => 0,
            true if used > quota => part(quota, here, used),
            true => here,
        };
        let lease = fair.min(most).max(covered);
        // Until its next report, the shard may not have received a smaller lease.
        shard.granted.insert(number, lease.max(had));
        lease
    }

    /// Keeps only the incarnations for which `keep` returns true: the leases of the others are free again.
    pub fn retain(&mut self, keep: impl Fn(u64, u64) -> bool) {
        self.shards.retain(|incarnation, _| keep(incarnation.node, incarnation.incarnation));
    }

    /// Returns true if a shard has reported.
    #[must_use]
    pub fn knows(&self, who: ShardIncarnation) -> bool {
        self.shards.contains_key(&who)
    }

    /// Returns the use of a tenant over all shards; its leases are summed if it has any.
    #[must_use]
    pub fn total(&self, number: u32) -> TenantFigures {
        let mut total = TenantFigures { number, ..TenantFigures::default() };
        for one in self.shards.values().filter_map(|shard| shard.uses.get(&number)) {
            total.used_bytes += one.used_bytes;
            total.evicted_bytes += one.evicted_bytes;
            total.refused += one.refused;
            if let Some(lease) = one.lease_bytes {
                *total.lease_bytes.get_or_insert(0) += lease;
            }
        }
        total
    }

    /// Returns the numbers of all tenants that any shard reported.
    #[must_use]
    pub fn numbers(&self) -> Vec<u32> {
        let mut numbers: Vec<u32> = self.shards.values().flat_map(|shard| shard.uses.keys().copied()).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    /// Returns the size of all pools in bytes.
    #[must_use]
    pub fn pool_bytes(&self) -> u64 {
        self.shards.values().map(|shard| shard.pool_bytes).sum()
    }
}

impl Shard {
    /// Compares the rejections of a shard with those of its previous report; an incarnation begins with none.
    fn note_refusals(&mut self, uses: &[TenantFigures]) {
        self.wants.retain(|_, left| {
            *left -= 1;
            *left > 0
        });
        for one in uses {
            if one.refused > self.uses.get(&one.number).map_or(0, |before| before.refused) {
                self.wants.insert(one.number, WANTS_FOR);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Actual state of a shard: its use, and the lease that it believes to have.
    #[derive(Clone, Copy, Debug, Default)]
    struct Real {
        used: u64,
        lease: Option<u64>,
        refused: u64,
    }

    const QUOTA: u64 = 1000;

    fn sync(quotas: &mut Quotas, reals: &mut [Real], at: usize, answered: bool, all_known: bool) {
        let tenant = Tenant { name: "t".to_owned(), dram_bytes: Some(QUOTA), weight: 1 };
        let number = tenant_number(b"t");
        let real = &mut reals[at];
        let (used_bytes, lease_bytes, refused) = (real.used, real.lease, real.refused);
        let uses = vec![TenantFigures { number, used_bytes, lease_bytes, refused, ..TenantFigures::default() }];
        let who = ShardIncarnation { node: at as u64, incarnation: 1, shard: 0 };
        let of = [TenantQuota::of_memory(&tenant)];
        let leases = quotas.sync(who, 100 + at as u64 * 50, uses, of.into_iter(), all_known);
        if answered {
            real.lease = leases[0].bytes;
            real.used = real.used.min(real.lease.unwrap_or(0));
        }
    }

    /// Strategy of a step: shard, true if it gets its answer, wanted bytes, true if the control plane restarts.
    fn step() -> impl Strategy<Value = (usize, bool, u64, bool)> {
        (0..4usize, prop::bool::weighted(0.7), 0..400u64, prop::bool::weighted(0.03))
    }

    proptest! {
        #[test]
        fn shards_never_have_more_than_the_quota_whatever_is_lost(
            steps in prop::collection::vec(step(), 1..200),
        ) {
            let (mut quotas, mut reals) = (Quotas::default(), [Real::default(); 4]);
            let mut seen = [false; 4];
            for (at, answered, wants, restart) in steps {
                if restart {
                    // The control plane restarts; shards keep their leases.
                    (quotas, seen) = (Quotas::default(), [false; 4]);
                }
                seen[at] = true;
                // A shard that wants more uses its whole lease.
                reals[at].used = wants.min(reals[at].lease.unwrap_or(0));
                reals[at].refused += u64::from(wants > reals[at].used);
                sync(&mut quotas, &mut reals, at, answered, seen == [true; 4]);
                let all: u64 = reals.iter().filter_map(|real| real.lease).sum();
                prop_assert!(all <= QUOTA, "{reals:?}");
            }
            // Once no message is lost any more, nearly all of the quota is leased to the shard that wants it.
            for _ in 0..40 {
                for at in 0..4 {
                    reals[at].used = if at == 2 { reals[at].lease.unwrap_or(0) } else { 0 };
                    sync(&mut quotas, &mut reals, at, true, true);
                }
            }
            let all: u64 = reals.iter().filter_map(|real| real.lease).sum();
            prop_assert!(all <= QUOTA && reals[2].lease.unwrap_or(0) > QUOTA * 9 / 10, "{reals:?}");
        }
    }

    proptest! {
        #[test]
        fn leases_of_ssds_cover_what_is_there_and_come_down_to_the_quota(
            used in prop::collection::vec(0..400u64, 4), steps in prop::collection::vec(step(), 1..100),
        ) {
            // What restarted shards have found on their SSDs: nobody has a lease, or remembers one.
            let (mut quotas, mut seen) = (Quotas::of_ssds(), [false; 4]);
            let mut reals: [Real; 4] =
                core::array::from_fn(|at| Real { used: used[at], ..Real::default() });
            let within = used.iter().sum::<u64>() <= QUOTA;
            for (at, answered, _, restart) in steps {
                if restart {
                    (quotas, seen) = (Quotas::of_ssds(), [false; 4]);
                }
                seen[at] = true;
                sync(&mut quotas, &mut reals, at, answered, seen == [true; 4]);
                let is_covered = reals[at].lease.is_none() || reals[at].used == used[at];
                prop_assert!(!within || is_covered, "{:?} of {:?}", reals, used);
            }
            for _ in 0..40 {
                (0..4).for_each(|at| sync(&mut quotas, &mut reals, at, true, true));
            }
            let all: u64 = reals.iter().filter_map(|real| real.lease).sum();
            prop_assert!(all <= QUOTA, "{:?}", reals);
        }
    }

    #[test]
    fn unused_quota_moves_to_shards_that_reject_puts_and_back() {
        let (mut quotas, mut reals) = (Quotas::default(), [Real::default(); 4]);
        let round = |quotas: &mut Quotas, reals: &mut [Real; 4]| {
            (0..4).for_each(|at| sync(quotas, reals, at, true, true));
        };
        for _ in 0..3 {
            round(&mut quotas, &mut reals);
        }
        let fair = reals.map(|real| real.lease);
        assert!(fair[1] < Some(QUOTA / 3), "{fair:?}");
        // One object is larger than any part. The other shards get smaller leases and report them; then its shard gets
        // more.
        reals[1].refused += 1;
        for _ in 0..3 {
            round(&mut quotas, &mut reals);
        }
        assert!(reals[1].lease > Some(QUOTA * 8 / 10), "{reals:?}");
        assert!(reals.iter().all(|real| real.lease > Some(0)), "{reals:?}");
        // Two shards want more.
        reals[2].refused += 1;
        for _ in 0..3 {
            round(&mut quotas, &mut reals);
        }
        assert!(reals[1].lease > Some(QUOTA / 3) && reals[2].lease > Some(QUOTA / 3), "{reals:?}");
        for _ in 0..12 {
            round(&mut quotas, &mut reals);
        }
        assert_eq!(reals.map(|real| real.lease), fair, "no shard wants more");
    }

    #[test]
    fn leases_of_an_ended_incarnation_are_free_again() {
        let (mut quotas, mut reals) = (Quotas::default(), [Real::default(); 2]);
        for at in [0, 1, 0, 1, 0, 1] {
            sync(&mut quotas, &mut reals, at, true, true);
        }
        assert_eq!(reals.map(|real| real.lease), [Some(400), Some(600)]);
        quotas.retain(|node, _| node == 1);
        sync(&mut quotas, &mut reals, 1, true, true);
        assert_eq!(reals[1].lease, Some(QUOTA));
    }
}
