//! Leases of tenants' quotas: after each heartbeat, every shard reports the usage of its tenants, in memory and on its
//! SSD, and receives their leases until the next exchange.

use kvplane_engine::{ShardHandle, TierUse};
use kvplane_rpc::message::{SyncTenantSsds, SyncTenants, TenantFigures};

use crate::link::ControlLink;

/// Exchanges usage and leases for each shard. After a failure a shard keeps its leases; the next heartbeat tries again.
pub(crate) fn exchange(link: &ControlLink, node: u64, incarnation: u64, shards: &[ShardHandle]) {
    for (number, shard) in shards.iter().enumerate() {
        let Ok((pool_bytes, uses)) = shard.tenants().in_memory() else { continue };
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
        let _ = shard.tenants().lease_memory(answer.tenants, answer.strict);
    }
    for (number, shard) in shards.iter().enumerate() {
        exchange_ssd(link, node, incarnation, number as u16, shard);
    }
}

/// Exchanges usage and leases of the SSD of a shard. A shard without one reports that it has none; one whose SSD is in
/// recovery does not know its usage yet.
fn exchange_ssd(link: &ControlLink, node: u64, incarnation: u64, number: u16, shard: &ShardHandle) {
    let Ok(Some(usage)) = shard.tenants().on_ssd() else { return };
    let figures = |one: TierUse| TenantFigures {
        number: one.number,
        used_bytes: one.used_bytes,
        lease_bytes: one.limit_bytes,
        evicted_bytes: one.evicted_bytes,
        refused: one.refused,
    };
    let uses = usage.tenants.into_iter().map(figures).collect();
    let call = SyncTenantSsds { node, incarnation, shard: number, ssd_bytes: usage.bytes, uses };
    // A control plane of an earlier release does not know this call: then there are no quotas of SSD bytes.
    let Ok(answer) = link.call(call) else { return };
    let _ = shard.tenants().lease_ssd(answer.tenants);
}
