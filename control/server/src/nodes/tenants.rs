//! Tenants, as calls see them: their records, and the quota leases of their shards.

use std::collections::BTreeMap;

use kvplane_cluster::{Cluster, Quotas, ShardIncarnation, Tenant};
use kvplane_proto::digest::tenant_number;
use kvplane_rpc::message::{SyncTenants, TenantLeases, TenantList, TenantStatus};
use kvplane_rpc::{Refusal, RefusalCode};

/// Most tenants in a shard's report.
const USES_MOST: usize = 4096;

/// Quota leases of all shards.
pub(crate) struct TenantQuotas {
    leases: Quotas,
    /// True if only configured tenants may put.
    strict: bool,
}

impl TenantQuotas {
    /// Creates the quotas while no shard has a lease. With `strict` only configured tenants may put.
    pub(crate) fn new(strict: bool) -> Self {
        Self { leases: Quotas::default(), strict }
    }

    /// Returns the tenants of a cluster with their usage.
    pub(crate) fn list(&self, cluster: &Cluster) -> TenantList {
        let mut tenants: BTreeMap<String, Tenant> =
            cluster.tenants().map(|tenant| (tenant.name.clone(), tenant.clone())).collect();
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
        if uses.len() > USES_MOST || usize::from(shard) >= shards {
            let reason = format!("node {node} has {shards} shards, and reports shard {shard}, or too many tenants");
            return Err(Refusal::new(RefusalCode::BadRequest, reason));
        }
        let who = ShardIncarnation { node, incarnation, shard };
        let all_known = all_known(cluster, &self.leases, who);
        let tenants = self.leases.sync(who, pool_bytes, uses, cluster.tenants(), all_known);
        Ok(TenantLeases { strict: self.strict, tenants })
    }

    /// Keeps only the incarnations that `keep` accepts.
    pub(crate) fn retain(&mut self, keep: impl Fn(u64, u64) -> bool) {
        self.leases.retain(keep);
    }
}

/// Returns true if every shard of every member, except this one, has reported its tenants' usage.
fn all_known(cluster: &Cluster, quotas: &Quotas, but: ShardIncarnation) -> bool {
    let live = cluster.members().filter(|view| view.state.is_live());
    live.into_iter().all(|view| {
        let (node, incarnation) = (view.member.node.0, view.member.incarnation.0);
        (0..view.member.shards.len()).all(|shard| {
            let of = ShardIncarnation { node, incarnation, shard: shard as u16 };
            of == but || quotas.knows(of)
        })
    })
}
