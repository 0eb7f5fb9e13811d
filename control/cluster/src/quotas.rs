//! Quotas as leases: how much of each tenant's quota each shard may use by itself, so that nobody has to be asked when
//! something is put.
//!
//! Every shard says now and then what each tenant has there and may have; the answer is what it may have from then on.
//! A shard may have what its tenant uses there, and of what is not used anywhere a part in proportion to its pool.
//! Where it had to refuse puts lately, most of what is unused goes there: an object may be longer than a part by pools.
//!
//! Invariant, as long as a quota is not lowered: what all shards believe that they may have is never more than the
//! quota, whatever messages are lost. So a lease grows only by what no other shard may still believe to have: one that
//! is to shrink counts as it was until its shard has said that it knows. A shard asks again only after its last call is
//! over, and an answer that comes too late for its call is never used; so what it says is what it has.
//!
//! Leases have no end in time: a shard goes on with the last when the control plane is away, and what a node has ends
//! with its incarnation. No clock is looked at, so none can jump.

use std::collections::BTreeMap;

use kvplane_proto::digest::tenant_number;

use crate::tenants::Tenant;

/// A shard of one incarnation of a node.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ShardIncarnation {
    /// The node.
    pub node: u64,
    /// Its incarnation.
    pub incarnation: u64,
    /// The shard.
    pub shard: u16,
}

/// What a shard says of a tenant.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ShardUse {
    /// The tenant's number.
    pub number: u32,
    /// Bytes that its objects take there.
    pub used_bytes: u64,
    /// Bytes that they may take there, as the shard has it.
    pub lease_bytes: Option<u64>,
    /// Bytes that were evicted there.
    pub evicted_bytes: u64,
    /// Puts refused there.
    pub refused: u64,
}

/// What a shard may have of a tenant.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShardLease {
    /// The tenant's number.
    pub number: u32,
    /// Bytes that it may take there; without, whatever it gets.
    pub dram_bytes: Option<u64>,
    /// Its weight.
    pub weight: u32,
}

/// For so many of its reports after one with more refusals a shard counts as one that wants more.
const WANTS_FOR: u8 = 8;
/// Of what is not used anywhere, shards that want no more keep one in so many of what would be their part.
const KEEP_ONE_IN: u64 = 8;

#[derive(Debug, Default)]
struct Shard {
    pool_bytes: u64,
    /// Tenants for which it refused puts lately, and for how many reports that counts yet.
    wants: BTreeMap<u32, u8>,
    uses: BTreeMap<u32, ShardUse>,
    /// The most that it may believe to have, of each tenant with a quota.
    granted: BTreeMap<u32, u64>,
}

/// What all shards have and may have. In memory: they say it again.
#[derive(Debug, Default)]
pub struct Quotas {
    shards: BTreeMap<ShardIncarnation, Shard>,
}

impl Quotas {
    /// A shard says what tenants have there: what they may have from now on. `all_known`: every shard of every member
    /// has said something; until then nothing grows, as nobody knows what the others have.
    pub fn sync<'a>(
        &mut self,
        who: ShardIncarnation,
        pool_bytes: u64,
        uses: Vec<ShardUse>,
        tenants: impl Iterator<Item = &'a Tenant>,
        all_known: bool,
    ) -> Vec<ShardLease> {
        let shard = self.shards.entry(who).or_default();
        shard.pool_bytes = pool_bytes;
        shard.granted = uses.iter().filter_map(|one| Some((one.number, one.lease_bytes?))).collect();
        shard.note_refusals(&uses);
        shard.uses = uses.into_iter().map(|one| (one.number, one)).collect();
        let pools: u64 = self.shards.values().map(|shard| shard.pool_bytes).sum();
        let mut leases = Vec::new();
        for tenant in tenants {
            let number = tenant_number(tenant.name.as_bytes());
            let dram_bytes = tenant.dram_bytes.map(|quota| self.lease(who, number, quota, pools, all_known));
            leases.push(ShardLease { number, dram_bytes, weight: tenant.weight });
        }
        leases
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
        let lease = fair.min(most);
        // Until it says so, it may not have heard of less.
        shard.granted.insert(number, lease.max(had));
        lease
    }

    /// Keeps only incarnations that `keep` says: what others had is free again.
    pub fn retain(&mut self, keep: impl Fn(u64, u64) -> bool) {
        self.shards.retain(|incarnation, _| keep(incarnation.node, incarnation.incarnation));
    }

    /// Whether a shard has said anything.
    #[must_use]
    pub fn knows(&self, who: ShardIncarnation) -> bool {
        self.shards.contains_key(&who)
    }

    /// What a tenant has over all shards; its leases are summed where it has any.
    #[must_use]
    pub fn total(&self, number: u32) -> ShardUse {
        let mut total = ShardUse { number, ..ShardUse::default() };
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

    /// Numbers of all tenants that have, or had, anything anywhere.
    #[must_use]
    pub fn numbers(&self) -> Vec<u32> {
        let mut numbers: Vec<u32> = self.shards.values().flat_map(|shard| shard.uses.keys().copied()).collect();
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    /// Bytes of all pools.
    #[must_use]
    pub fn pool_bytes(&self) -> u64 {
        self.shards.values().map(|shard| shard.pool_bytes).sum()
    }
}

impl Shard {
    /// Compares what a shard refused with what it said the last time; an incarnation begins with none.
    fn note_refusals(&mut self, uses: &[ShardUse]) {
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

    /// A shard as it is: what it has, and what it believes to be allowed.
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
        let uses = vec![ShardUse { number, used_bytes, lease_bytes, refused, ..ShardUse::default() }];
        let who = ShardIncarnation { node: at as u64, incarnation: 1, shard: 0 };
        let leases = quotas.sync(who, 100 + at as u64 * 50, uses, [&tenant].into_iter(), all_known);
        if answered {
            real.lease = leases[0].dram_bytes;
            real.used = real.used.min(real.lease.unwrap_or(0));
        }
    }

    /// Which shard, whether it gets its answer, how much it wants, whether the control plane forgets all before.
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
                    // The control plane forgets; shards go on with what they have.
                    (quotas, seen) = (Quotas::default(), [false; 4]);
                }
                seen[at] = true;
                // Whoever wants more takes what it may.
                reals[at].used = wants.min(reals[at].lease.unwrap_or(0));
                reals[at].refused += u64::from(wants > reals[at].used);
                sync(&mut quotas, &mut reals, at, answered, seen == [true; 4]);
                let all: u64 = reals.iter().filter_map(|real| real.lease).sum();
                prop_assert!(all <= QUOTA, "{reals:?}");
            }
            // When nothing is lost any more, nearly all of the quota is to be had, and where it is wanted.
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

    #[test]
    fn what_is_unused_goes_where_puts_are_refused_and_comes_back() {
        let (mut quotas, mut reals) = (Quotas::default(), [Real::default(); 4]);
        let round = |quotas: &mut Quotas, reals: &mut [Real; 4]| {
            (0..4).for_each(|at| sync(quotas, reals, at, true, true));
        };
        for _ in 0..3 {
            round(&mut quotas, &mut reals);
        }
        let fair = reals.map(|real| real.lease);
        assert!(fair[1] < Some(QUOTA / 3), "{fair:?}");
        // One object that is longer than any part. The others are told of less, say that they heard it, and then it has
        // more.
        reals[1].refused += 1;
        for _ in 0..3 {
            round(&mut quotas, &mut reals);
        }
        assert!(reals[1].lease > Some(QUOTA * 8 / 10), "{reals:?}");
        assert!(reals.iter().all(|real| real.lease > Some(0)), "{reals:?}");
        // Two share it.
        reals[2].refused += 1;
        for _ in 0..3 {
            round(&mut quotas, &mut reals);
        }
        assert!(reals[1].lease > Some(QUOTA / 3) && reals[2].lease > Some(QUOTA / 3), "{reals:?}");
        for _ in 0..12 {
            round(&mut quotas, &mut reals);
        }
        assert_eq!(reals.map(|real| real.lease), fair, "nobody wants more");
    }

    #[test]
    fn what_a_node_had_is_free_when_its_incarnation_is_over() {
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
