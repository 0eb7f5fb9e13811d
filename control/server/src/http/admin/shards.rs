//! Shards as JSON.

use kvplane_rpc::message::{DamageFigures, OperationFigures, ShardFigures, SlowFigures};
use serde_json::{Value, json};

use crate::cluster::view::View;

/// Returns the shards of all reporting nodes.
pub(super) fn all(view: &View) -> Value {
    let nodes: Vec<Value> = view
        .shards
        .iter()
        .map(|node| {
            json!({
                "node": node.node,
                "incarnation": node.incarnation,
                "age_ns": node.age_ns,
                "shards": node.shards.iter().map(shard_json).collect::<Vec<_>>(),
            })
        })
        .collect();
    json!({ "cluster": view.cluster, "epoch": view.epoch, "nodes": nodes })
}

/// Returns a shard with all its counters.
#[must_use]
pub fn shard_json(shard: &ShardFigures) -> Value {
    json!({
        "shard": shard.shard,
        "address": shard.address,
        "objects": shard.objects,
        "object_bytes": shard.object_bytes,
        "pool": {
            "bytes": shard.pool.bytes,
            "used_bytes": shard.pool.used_bytes,
            "largest_free_bytes": shard.pool.largest_free_bytes,
            "pinned_bytes": shard.pool.pinned_bytes,
            "reserved_bytes": shard.pool.reserved_bytes,
        },
        "pins": shard.pool.pins,
        "reservations": shard.pool.reservations,
        "connections": shard.connections,
        "gets": { "hits": shard.gets.hits, "misses": shard.gets.misses, "bytes": shard.gets.bytes },
        "puts": {
            "objects": shard.puts.objects,
            "bytes": shard.puts.bytes,
            "conflicts": shard.puts.conflicts,
            "refusals": shard.puts.refusals,
            "expirations": shard.puts.expirations,
            "aborts": shard.puts.aborts,
        },
        "removes": shard.removes,
        "evictions": { "objects": shard.evictions.objects, "bytes": shard.evictions.bytes },
        "trouble": {
            "wrong_owner": shard.trouble.wrong_owner,
            "corrupt": shard.trouble.corrupt,
            "broken_frames": shard.trouble.broken,
        },
        "thread": { "parks": shard.thread.parks, "cpu_ns": shard.thread.cpu_ns },
        "ssd": shard.ssd.map(|ssd| json!({
            "objects": ssd.objects,
            "live_bytes": ssd.live_bytes,
            "bytes": ssd.bytes,
            "hits": ssd.hits,
            "hit_bytes": ssd.hit_bytes,
            "misses": ssd.misses,
            "promotions": ssd.promotions,
            "writes": ssd.writes,
            "write_bytes": ssd.write_bytes,
            "writes_lost": ssd.writes_lost,
            "backlog": ssd.backlog,
            "reclaimed": ssd.reclaimed,
        })),
        "device_pool": shard.device_pool.map(|pool| json!({
            "bytes": pool.bytes,
            "used_bytes": pool.used_bytes,
            "objects": pool.objects,
            "gets": pool.gets,
            "promotions": pool.promotions,
            "demotions": pool.demotions,
            "recalls": pool.recalls,
            "lost": pool.lost,
        })),
        "damage": { "memory": damage_json(&shard.memory_damage), "ssd": damage_json(&shard.ssd_damage) },
        "far_pool": shard.far_pool.map(|pool| json!({
            "bytes": pool.bytes,
            "used_bytes": pool.used_bytes,
            "objects": pool.objects,
            "hits": pool.hits,
            "demotions": pool.demotions,
            "promotions": pool.promotions,
            "evictions": pool.evictions,
        })),
        "operations": shard.operations.iter().map(operation_json).collect::<Vec<_>>(),
        "slow": {
            "after_ns": shard.slow.after_ns,
            "count": shard.slow.count,
            "latest": shard.slow.latest.iter().map(slow_json).collect::<Vec<_>>(),
        },
        "copies": {
            "elsewhere": shard.copies.elsewhere,
            "here": shard.copies.here,
            "second_slots": shard.copies.second_slots,
            "made": shard.copies.made,
            "failed": shard.copies.failed,
            "outstanding": shard.copies.outstanding,
            "refused": shard.copies.refused,
            "served": shard.copies.served,
            "inherited": shard.copies.inherited,
        },
        "events": { "kept": shard.events.kept, "next": shard.events.next, "lost": shard.events.lost },
    })
}

fn damage_json(damage: &DamageFigures) -> Value {
    json!({
        "found": damage.found,
        "repaired": damage.repaired,
        "lost": damage.lost,
        "outstanding": damage.outstanding,
        "checked_bytes": damage.checked_bytes,
        "passes": damage.passes,
    })
}

fn operation_json(one: &OperationFigures) -> Value {
    json!({
        "operation": one.operation,
        "tier": if one.ssd { "ssd" } else { "memory" },
        "count": one.count,
        "failed": one.failed,
        "items": one.items,
        "sum_ns": one.sum_ns,
        "p50_ns": one.quantile_ns(0.5),
        "p90_ns": one.quantile_ns(0.9),
        "p99_ns": one.quantile_ns(0.99),
        "p999_ns": one.quantile_ns(0.999),
    })
}

fn slow_json(slow: &SlowFigures) -> Value {
    json!({
        "operation": slow.operation,
        "status": slow.status,
        "digest": slow.digest.map(|digest| format!("{digest:032x}")),
        "bytes": slow.bytes,
        "age_ns": slow.age_ns,
        "total_ns": slow.total_ns,
        "stages": {
            "receive_ns": slow.receive_ns,
            "ssd_ns": slow.ssd_ns,
            "send_ns": slow.send_ns,
            "else_ns": slow.total_ns.saturating_sub(slow.receive_ns + slow.ssd_ns + slow.send_ns),
        },
    })
}
