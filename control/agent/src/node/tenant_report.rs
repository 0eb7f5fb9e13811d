//! Leases of tenants' quotas: after each heartbeat, every shard reports the usage of its tenants and receives their
//! leases until the next exchange.

use kvplane_engine::ShardHandle;
use kvplane_rpc::message::{SyncTenants, TenantFigures};

use crate::link::ControlLink;

/// Exchanges usage and leases for each shard. After a failure a shard keeps its leases; the next heartbeat tries again.
pub(crate) fn exchange(link: &ControlLink, node: u64, incarnation: u64, shards: &[ShardHandle]) {
    for (number, shard) in shards.iter().enumerate() {
        let Ok((pool_bytes, uses)) = shard.tenants() else { continue };
        let figures = uses.iter().map(|one| TenantFigures {
            number: one.number,
            used_bytes: one.used_bytes,
            lease_bytes: one.lease_bytes,
            evicted_bytes: one.evicted_bytes,
            refused: one.refused,
        });
        let uses = figures.collect();
        let call = SyncTenants { node, incarnation, shard: number as u16, pool_bytes, uses };
        // A refusal is handled by the heartbeat.
        let Ok(answer) = link.call(call) else { return };
        // If the mailbox is full, the leases stay as they are until the next exchange.
        let _ = shard.set_tenants(answer.tenants, answer.strict);
    }
}
