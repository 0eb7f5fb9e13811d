//! Tenants, as calls see them: their records, and the quota leases of their shards.

use std::collections::BTreeMap;

use kvplane_cluster::{Cluster, Input, Quotas, Reply, ShardIncarnation, ShardUse, Tenant};
use kvplane_proto::digest::tenant_number;
use kvplane_rpc::message::{
    EmptyReply, LeaseOfTenant, RemoveTenant, SetTenant, SyncTenants, TenantLeases, TenantList, TenantStatus,
};
use kvplane_rpc::{Refusal, RefusalCode};

use crate::control::Control;

/// Most tenants in a shard's report.
const USES_MOST: usize = 4096;

impl Control {
    pub(crate) fn set_tenant_now(&self, call: SetTenant) -> Result<EmptyReply, Refusal> {
        let SetTenant { name, dram_bytes, weight } = call;
        match self.handle(Input::SetTenant { tenant: Tenant { name, dram_bytes, weight } })? {
            Reply::TenantSet => Ok(EmptyReply),
            reply => Err(Refusal::new(RefusalCode::ShuttingDown, format!("a bug: the cluster answered {reply:?}"))),
        }
    }

    pub(crate) fn remove_tenant_now(&self, call: RemoveTenant) -> Result<EmptyReply, Refusal> {
        if call.only_empty {
            let status = self.tenant_list()?.tenants.into_iter().find(|tenant| tenant.name == call.name);
            if let Some(status) = status.filter(|status| status.used_bytes > 0) {
                let reason =
                    format!("tenant {:?} has {} bytes: remove its objects first", call.name, status.used_bytes);
                return Err(Refusal::new(RefusalCode::AlreadyExists, reason));
            }
        }
        self.handle(Input::RemoveTenant { name: call.name }).map(|_| EmptyReply)
    }

    pub(crate) fn tenant_list(&self) -> Result<TenantList, Refusal> {
        self.with_quotas(|cluster, quotas, strict| {
            let mut tenants: BTreeMap<String, Tenant> =
                cluster.tenants().map(|tenant| (tenant.name.clone(), tenant.clone())).collect();
            let is_set = tenants.contains_key("");
            tenants.entry(String::new()).or_insert(Tenant { name: String::new(), dram_bytes: None, weight: 1 });
            let status = |tenant: Tenant| {
                let total = quotas.total(tenant_number(tenant.name.as_bytes()));
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
            TenantList { strict, pool_bytes: quotas.pool_bytes(), tenants }
        })
    }

    pub(crate) fn sync_tenants_now(&self, call: SyncTenants) -> Result<TenantLeases, Refusal> {
        let SyncTenants { node, incarnation, shard, pool_bytes, uses } = call;
        let shards = self.check_member(node, incarnation)?;
        if uses.len() > USES_MOST || usize::from(shard) >= shards {
            let reason = format!("node {node} has {shards} shards, and reports shard {shard}, or too many tenants");
            return Err(Refusal::new(RefusalCode::BadRequest, reason));
        }
        let uses = uses.into_iter().map(|one| ShardUse {
            number: one.number,
            used_bytes: one.used_bytes,
            lease_bytes: one.lease_bytes,
            evicted_bytes: one.evicted_bytes,
            refused: one.refused,
        });
        let uses = uses.collect();
        self.with_quotas(|cluster, quotas, strict| {
            let who = ShardIncarnation { node, incarnation, shard };
            let all_known = all_known(cluster, quotas, who);
            let leases = quotas.sync(who, pool_bytes, uses, cluster.tenants(), all_known);
            let of = |lease: kvplane_cluster::ShardLease| LeaseOfTenant {
                number: lease.number,
                dram_bytes: lease.dram_bytes,
                weight: lease.weight,
            };
            TenantLeases { strict, tenants: leases.into_iter().map(of).collect() }
        })
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
