//! Tenants, as calls see them: their records, and the quota leases of their shards.

use std::collections::{BTreeMap, BTreeSet};

use kvplane_cluster::{Cluster, Quotas, ShardIncarnation, Tenant, TenantQuota};
use kvplane_proto::digest::tenant_number;
use kvplane_proto::ids::NodeId;
use kvplane_rpc::message::{
    SyncTenantSsds, SyncTenants, TenantLease, TenantLeases, TenantList, TenantSsd, TenantSsdLease, TenantSsdLeases,
    TenantSsdList, TenantSsdStatus, TenantStatus,
};
use kvplane_rpc::{Refusal, RefusalCode};

/// Most tenants in a shard's report.
const USES_MOST: usize = 4096;

/// Quota leases of all shards.
pub(crate) struct TenantQuotas {
    leases: Quotas,
    /// Leases of SSD bytes.
    ssd_leases: Quotas,
    /// True if only configured tenants may put.
    strict: bool,
}

impl TenantQuotas {
    /// Creates the quotas while no shard has a lease. With `strict` only configured tenants may put.
    pub(crate) fn new(strict: bool) -> Self {
        Self { leases: Quotas::default(), ssd_leases: Quotas::of_ssds(), strict }
    }

    /// Returns the members that have not reported what they have of the tenants, in memory or on SSDs.
    pub(crate) fn unreported(&self, cluster: &Cluster) -> BTreeSet<NodeId> {
        let mut nodes = self.leases.unreported(cluster);
        nodes.extend(self.ssd_leases.unreported(cluster));
        nodes
    }

    /// Returns the tenants of a cluster with their usage.
    pub(crate) fn list(&self, cluster: &Cluster) -> TenantList {
        let mut tenants: BTreeMap<String, Tenant> =
            cluster.tenants().map(|(tenant, _)| (tenant.name.clone(), tenant.clone())).collect();
        let is_set = tenants.contains_key("");
        tenants.entry(String::new()).or_insert(Tenant { name: String::new(), dram_bytes: None, weight: 1 });
        let status = |tenant: Tenant| {
            let total = self.leases.total(tenant_number(tenant.name.as_bytes()));
            TenantStatus {
                is_set: is_set || !tenant.name.is_empty(),
                name: tenant.name,
                dram_bytes: tenant.dram_bytes,
                weight: tenant.weight,
                used_bytes: total.used_bytes,
                leased_bytes: total.lease_bytes,
                evicted_bytes: total.evicted_bytes,
                refused: total.refused,
            }
        };
        let tenants = tenants.into_values().map(status).collect();
        TenantList { strict: self.strict, pool_bytes: self.leases.pool_bytes(), tenants }
    }

    /// Takes a shard's usage of its tenants, and returns its leases of their quotas. Its node has this number of
    /// shards.
    ///
    /// # Errors
    /// When the report names a shard that the node does not have, or too many tenants.
    pub(crate) fn sync(
        &mut self,
        call: SyncTenants,
        shards: usize,
        cluster: &Cluster,
    ) -> Result<TenantLeases, Refusal> {
        let SyncTenants { node, incarnation, shard, pool_bytes, uses } = call;
        let who = ShardIncarnation { node, incarnation, shard };
        check(who, uses.len(), shards)?;
        let all_known = self.leases.knows_all(cluster, Some(who));
        let quotas = cluster.tenants().map(|(tenant, _)| TenantQuota::of_memory(tenant));
        let leases = self.leases.sync(who, pool_bytes, uses, quotas, all_known).into_iter();
        let lease = |TenantQuota { number, bytes, weight }| TenantLease { number, dram_bytes: bytes, weight };
        Ok(TenantLeases { strict: self.strict, tenants: leases.map(lease).collect() })
    }

    /// Returns the use of SSDs by the tenants of a cluster.
    pub(crate) fn list_ssds(&self, cluster: &Cluster) -> TenantSsdList {
        let mut tenants: BTreeMap<String, TenantSsd> =
            cluster.tenants().map(|(tenant, ssd)| (tenant.name.clone(), ssd)).collect();
        tenants.entry(String::new()).or_default();
        let status = |(name, ssd): (String, TenantSsd)| {
            let total = self.ssd_leases.total(tenant_number(name.as_bytes()));
            TenantSsdStatus {
                name,
                ssd,
                used_bytes: total.used_bytes,
                leased_bytes: total.lease_bytes,
                evicted_bytes: total.evicted_bytes,
                refused: total.refused,
            }
        };
        let tenants = tenants.into_iter().map(status).collect();
        TenantSsdList { ssd_bytes: self.ssd_leases.pool_bytes(), tenants }
    }

    /// Takes the use of a shard's SSD by tenants, and returns its leases of their quotas. Its node has this number of
    /// shards.
    ///
    /// # Errors
    /// When the report names a shard that the node does not have, or too many tenants.
    pub(crate) fn sync_ssds(
        &mut self,
        call: SyncTenantSsds,
        shards: usize,
        cluster: &Cluster,
    ) -> Result<TenantSsdLeases, Refusal> {
        let SyncTenantSsds { node, incarnation, shard, ssd_bytes, uses } = call;
        let who = ShardIncarnation { node, incarnation, shard };
        check(who, uses.len(), shards)?;
        let leases = self.ssd_leases.sync_ssd(who, ssd_bytes, uses, cluster).into_iter();
        let lease = |TenantQuota { number, bytes, weight }| TenantSsdLease { number, ssd_bytes: bytes, weight };
        Ok(TenantSsdLeases { tenants: leases.map(lease).collect() })
    }

    /// Returns the tenants that were removed, and have no records on SSDs any more.
    pub(crate) fn freed(&self, cluster: &Cluster) -> Vec<String> {
        self.ssd_leases.freed_tenants(cluster)
    }

    /// Keeps only the incarnations that `keep` accepts.
    pub(crate) fn retain(&mut self, keep: impl Fn(u64, u64) -> bool) {
        self.leases.retain(&keep);
        self.ssd_leases.retain(keep);
    }
}

/// Checks that a report is of a shard of its node, and not of too many tenants.
fn check(who: ShardIncarnation, uses: usize, shards: usize) -> Result<(), Refusal> {
    let ShardIncarnation { node, shard, .. } = who;
    if uses > USES_MOST || usize::from(shard) >= shards {
        let reason = format!("node {node} has {shards} shards, and reports shard {shard}, or too many tenants");
        return Err(Refusal::new(RefusalCode::BadRequest, reason));
    }
    Ok(())
}
