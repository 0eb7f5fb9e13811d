//! Quotas of SSD bytes: an operator who sets and removes tenants, the reports of shards and the leases that they get.
//!
//! Objects belong to three tenants in turn. The last one never has a quota: whatever the quotas of the others, none of
//! its objects is evicted for them.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_cluster::{Input, Quotas, ShardIncarnation, TenantChange, TenantFigures, TenantQuota, TenantSsd};
use kvplane_proto::digest::tenant_number;
use kvplane_proto::rng::Rng;
use kvplane_proto::tenants::TenantSsdLease;
use kvplane_store::service::PutAck;

use crate::world::World;
use crate::world::check::{Rule, broken};
use crate::world::faults::{FAULTS, Fault, Party};
use crate::world::queue::Message;
use crate::world::scenario::{Chances, MS, Mischief, Scenario};

/// Tenants to which keys belong in turn.
const TENANTS: [&str; 3] = ["first", "second", "without quota"];
/// Deadline of a report.
const CALL_NS: u64 = 300 * MS;

/// Report of a shard, and its reply.
#[derive(Clone, Debug)]
pub(crate) struct SsdReport {
    /// Incarnation of the shard, as the World counts them.
    pub(crate) incarnation: usize,
    call: u64,
    who: ShardIncarnation,
    ssd_bytes: u64,
    uses: Vec<TenantFigures>,
}

/// Use of a tenant, and its limit, when a shard was last checked.
type SeenUse = BTreeMap<u32, (u64, Option<u64>)>;

/// Quotas at the control plane, and what shards have reported.
#[derive(Debug)]
pub(crate) struct SsdQuotas {
    quotas: Quotas,
    /// Calls in flight, with their deadlines, by incarnation.
    calls: BTreeMap<usize, (u64, u64)>,
    next_call: u64,
    seen: BTreeMap<usize, SeenUse>,
    /// Tenants that were removed, and neither set nor reported as free of records since.
    removed: BTreeSet<String>,
}

impl Default for SsdQuotas {
    fn default() -> Self {
        Self {
            quotas: Quotas::of_ssds(),
            calls: BTreeMap::new(),
            next_call: 0,
            seen: BTreeMap::new(),
            removed: BTreeSet::new(),
        }
    }
}

impl Scenario {
    /// The scenario of a seed in which tenants have quotas of SSD bytes, which an operator changes, and are removed and
    /// set again, while nodes and the control plane die.
    #[must_use]
    pub fn of_quotas(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "quotas");
        let mut scenario = Self::of_tiers(seed);
        if let Some(tier) = &mut scenario.tier {
            tier.suit(Mischief::BelieveDisks);
            (tier.config.segments, tier.without) = (64, 0.0);
            tier.policy.ack = [PutAck::Durable, PutAck::Buffered][rng.below(2) as usize];
            tier.power = tier.policy.ack == PutAck::Durable && rng.chance(0.5);
        }
        (scenario.quotas, scenario.keys, scenario.batches) = (true, [12, 32][rng.below(2) as usize], 200);
        scenario.replace_chance = [0.0, 0.2][rng.below(2) as usize];
        (scenario.nodes, scenario.clients) = (1 + rng.below(2) as usize, 3);
        let mut weights = [0; FAULTS];
        weights[Fault::SetQuota as usize] = 6;
        weights[Fault::CrashNode as usize] = rng.below(3);
        weights[Fault::CrashControl as usize] = rng.below(2);
        weights[Fault::PartitionControl as usize] = rng.below(2);
        let control_loss = [0.0, 0.2][rng.below(2) as usize];
        let fault_interval_ns = (30 + rng.below(100)) * MS;
        scenario.chances = Chances { control_loss, fault_interval_ns, weights, ..Chances::default() };
        scenario.undisturbed()
    }

    /// Like [`Self::of_quotas`], with a host's bug.
    #[must_use]
    pub fn of_quotas_with(seed: u64, mischief: Mischief) -> Self {
        Self { mischief: Some(mischief), ..Self::of_quotas(seed) }
    }

    /// Returns the tenant of a key's objects.
    pub(crate) fn tenant_of(&self, key: usize) -> &'static [u8] {
        if self.quotas { TENANTS[key % TENANTS.len()].as_bytes() } else { self.tenant }
    }

    /// Returns true if an object may be evicted from SSDs, or refused there, because of its tenant's quota.
    pub(crate) fn may_exceed(&self, key: usize) -> bool {
        self.quotas && key % TENANTS.len() < TENANTS.len() - 1
    }
}

impl World {
    /// An operator sets, changes or removes a tenant; now and then with settings that contradict each other.
    pub(crate) fn set_quota(&mut self) {
        let rng = &mut self.streams.faults;
        let name = TENANTS[rng.below(TENANTS.len() as u64 - 1) as usize].to_owned();
        let capacity = 40 * self.scenario.object_bytes;
        let ssd_bytes = [Some(0), Some(capacity / 16), Some(capacity / 4), Some(capacity), None][rng.below(5) as usize];
        let weight = [None, Some(1), Some(1000), Some(0), Some(1001)][rng.below(5) as usize];
        let removes = rng.chance(0.3);
        let ssd = TenantSsd { ssd_bytes, weight };
        self.detail(u64::from(removes), || format!("tenant {name}: removed {removes}, {ssd:?}"));
        if removes {
            if self.order(Input::RemoveTenant { name: name.clone() }) == Some(true) {
                self.ssd_quotas.removed.insert(name);
            }
            return;
        }
        let before = self.ssd_of(&name);
        let change = TenantChange {
            name: name.clone(),
            weight: Some(if weight == Some(1001) { 0 } else { 1 }),
            ssd_bytes: Some(ssd_bytes),
            ssd_weight: weight,
            ..TenantChange::default()
        };
        let Some(is_taken) = self.order(Input::SetTenant { change }) else { return };
        if is_taken {
            self.ssd_quotas.removed.remove(&name);
        }
        // A weight that is not given stays, also while the tenant is kept off the SSDs.
        let kept = before.and_then(|before| before.weight);
        let ssd = TenantSsd { weight: weight.or(kept), ..ssd };
        let contradicts = weight.is_some_and(|weight| weight == 0 || weight > 1000 || ssd_bytes == Some(0));
        let expected = if contradicts { before } else { Some(ssd) };
        let found = self.ssd_of(&name);
        if is_taken == contradicts || found != expected {
            let what = format!("{ssd:?} was set after {before:?}: taken {is_taken}, and it is {found:?}");
            self.violate(broken(Rule::Quota, what));
        }
    }

    /// Passes an order of an operator to the control plane; returns true if it was taken, and `None` if no control
    /// plane runs.
    fn order(&mut self, input: Input) -> Option<bool> {
        let is_taken = self.control.cluster.as_mut()?.handle(input, self.now_ns).is_ok();
        self.carry_out();
        Some(is_taken)
    }

    fn ssd_of(&self, name: &str) -> Option<TenantSsd> {
        self.control.cluster.as_ref()?.tenants().find(|(tenant, _)| tenant.name == name).map(|(_, ssd)| ssd)
    }

    /// Reports the use of each of a node's SSDs, unless a report is in flight.
    pub(crate) fn report_ssds(&mut self, node: usize) {
        if !self.scenario.quotas || !self.nodes[node].joined {
            return;
        }
        for incarnation in self.nodes[node].shards.clone() {
            let waits = self.ssd_quotas.calls.get(&incarnation).is_some_and(|(_, until_ns)| *until_ns > self.now_ns);
            let at = &mut self.incarnations[incarnation];
            let (shard, usage) = (at.shard, at.service.control().ssd_usage());
            let Some(usage) = usage.filter(|_| !waits) else { continue };
            let figures = |one: &kvplane_tier::TierUse| TenantFigures {
                number: one.number,
                used_bytes: one.used_bytes,
                lease_bytes: one.limit_bytes,
                evicted_bytes: one.evicted_bytes,
                refused: one.refused,
            };
            let uses = usage.tenants.iter().map(figures).collect();
            let who = ShardIncarnation { node: node as u64 + 1, incarnation: self.nodes[node].incarnation, shard };
            self.ssd_quotas.next_call += 1;
            let call = self.ssd_quotas.next_call;
            self.ssd_quotas.calls.insert(incarnation, (call, self.now_ns + CALL_NS));
            let report = SsdReport { incarnation, call, who, ssd_bytes: usage.bytes, uses };
            self.tell_control(Party::Node(node), Message::Ssd(Box::new(report)));
        }
    }

    /// Handles a report at the control plane.
    pub(crate) fn control_hears_ssd(&mut self, report: &SsdReport) {
        let SsdReport { incarnation, call, who, ssd_bytes, uses } = report.clone();
        let Some(cluster) = &mut self.control.cluster else { return };
        let is_member = |who: ShardIncarnation| {
            cluster.members().any(|view| (view.member.node.0, view.member.incarnation.0) == (who.node, who.incarnation))
        };
        if !is_member(who) {
            return;
        }
        self.ssd_quotas.quotas.retain(|node, of| is_member(ShardIncarnation { node, incarnation: of, shard: 0 }));
        let leases = self.ssd_quotas.quotas.sync_ssd(who, ssd_bytes, uses, cluster);
        let forgets = self.scenario.has(Mischief::ForgetRemovals);
        let freed = self.ssd_quotas.quotas.freed_tenants(cluster);
        let known: Vec<u32> = cluster.tenants().map(|(tenant, _)| tenant_number(tenant.name.as_bytes())).collect();
        let lease = |TenantQuota { number, bytes, weight }| TenantSsdLease { number, ssd_bytes: bytes, weight };
        let is_told = |quota: &TenantQuota| !forgets || known.contains(&quota.number);
        let leases = leases.into_iter().filter(is_told).map(lease).collect();
        for name in freed {
            self.check_freed(&name);
            self.ssd_quotas.removed.remove(&name);
            self.order(Input::TenantFreed { name });
        }
        if self.carry_out() {
            self.tell(Party::Node(who.node as usize - 1), Message::SsdLeases(incarnation, call, leases));
        }
    }

    /// Checks that no member has records of a tenant that the control plane takes for free of them.
    fn check_freed(&mut self, name: &str) {
        let number = tenant_number(name.as_bytes());
        for incarnation in 0..self.incarnations.len() {
            let at = &mut self.incarnations[incarnation];
            let node = &self.nodes[at.node];
            if !at.alive || !node.joined || !node.is_member(at.node) {
                continue;
            }
            let usage = at.service.control().ssd_usage();
            let one = usage.and_then(|usage| usage.tenants.into_iter().find(|one| one.number == number));
            if let Some(one) = one.filter(|one| one.used_bytes > 0) {
                let what = format!("{name} is free of records, and incarnation {incarnation} has {one:?}");
                self.violate(broken(Rule::Quota, what));
            }
        }
    }

    /// Forgets what shards have reported: the control plane's process is another one.
    pub(crate) fn forget_quotas(&mut self) {
        self.ssd_quotas.quotas = Quotas::of_ssds();
    }

    /// Handles leases at a shard: those of its last report only, in time.
    pub(crate) fn shard_hears_leases(&mut self, incarnation: usize, call: u64, leases: &[TenantSsdLease]) {
        let expected = self.ssd_quotas.calls.get(&incarnation).copied();
        if !self.incarnations[incarnation].alive
            || expected.is_none_or(|(of, until)| of != call || until <= self.now_ns)
        {
            return;
        }
        self.ssd_quotas.calls.remove(&incarnation);
        self.incarnations[incarnation].service.control().set_ssd_tenants(leases);
        self.drain_service(incarnation, None);
    }

    /// Checks that no tenant that is above its limit on a shard's SSD has more there than before.
    pub(crate) fn check_quota(&mut self, incarnation: usize) {
        let Some(usage) = self.incarnations[incarnation].service.control().ssd_usage() else { return };
        let now: SeenUse = usage.tenants.iter().map(|one| (one.number, (one.used_bytes, one.limit_bytes))).collect();
        let before = self.ssd_quotas.seen.insert(incarnation, now.clone());
        for (number, (used, limit)) in now {
            let former = before.as_ref().and_then(|before| before.get(&number));
            let grows = former.is_some_and(|(used_before, of)| *of == limit && used > *used_before);
            if grows && limit.is_some_and(|limit| used > limit) {
                let what = format!(
                    "incarnation {incarnation}: tenant {number} has {used} bytes of {limit:?}, and had {former:?}"
                );
                self.violate(broken(Rule::Quota, what));
            }
        }
    }

    /// Checks, after all faults, that no tenant has more than its quota on all SSDs together, and that the records of
    /// removed ones have gone.
    pub(crate) fn check_quotas(&mut self) {
        if !self.scenario.quotas || self.tiers_degraded() {
            return;
        }
        let mut totals: BTreeMap<u32, u64> = BTreeMap::new();
        for at in self.incarnations.iter_mut().filter(|at| at.alive) {
            for one in at.service.control().ssd_usage().into_iter().flat_map(|usage| usage.tenants) {
                *totals.entry(one.number).or_default() += one.used_bytes;
                self.statistics.quota.evicted_bytes += one.evicted_bytes;
                self.statistics.quota.refused += one.refused;
            }
        }
        let Some(cluster) = &self.control.cluster else { return };
        let used = |name: &str| totals.get(&tenant_number(name.as_bytes())).copied().unwrap_or(0);
        let mut wrong: Vec<String> = Vec::new();
        for (tenant, ssd) in cluster.tenants() {
            let used = used(&tenant.name);
            if ssd.ssd_bytes.is_some_and(|quota| used > quota) {
                wrong.push(format!("{} has {used} bytes of {ssd:?}", tenant.name));
            }
        }
        wrong.extend(self.ssd_quotas.removed.iter().map(|name| format!("{name} was removed, and its records stay")));
        if !wrong.is_empty() {
            self.violate(broken(Rule::Quota, wrong.join("; ")));
        }
    }
}
