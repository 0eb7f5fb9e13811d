//! The Conductor's part of the status page: instances, models with their queues, hot prefixes, counters.

use kvplane_conductor::conductor::{Conductor, CopyState};
use serde_json::{Value, json};

use super::convert::part_name;

/// Most hot prefixes shown.
const HOT: usize = 20;

/// Returns figures of the replicas of hot prefixes.
fn copies_as_json(copies: &CopyState) -> Value {
    json!({
        "most_bytes": copies.config.most_bytes,
        "bytes": copies.bytes,
        "prefixes": copies.prefixes,
        "coming": copies.coming,
        "made": copies.counts.made,
        "failed": copies.counts.failed,
    })
}

/// Returns the whole state as JSON. Names from outside are JSON strings in it, and nothing else.
pub(super) fn as_json(conductor: &mut Conductor, now_ns: u64) -> Value {
    let (table, hot) = (conductor.table(now_ns), conductor.hot(HOT, now_ns));
    let (counts, copies) = (conductor.counts(), conductor.copies());
    let instances = table.instances.iter().map(|row| {
        json!({
            "instance": &*row.name,
            "tenant": row.pool.tenant,
            "model": row.pool.model,
            "block_tokens": row.pool.block_tokens,
            "part": part_name(row.part),
            "address": row.address,
            "suspect": row.suspect,
            "held": row.held,
            "degraded": row.degraded,
            "prefills": row.prefills,
            "wait_ns": row.wait_ns,
            "decode_tokens": row.decode_tokens,
            "decodes": row.decodes,
            "silent_ns": row.silent_ns,
        })
    });
    let models = table.pools.iter().map(|row| {
        json!({
            "tenant": row.key.tenant,
            "model": row.key.model,
            "block_tokens": row.key.block_tokens,
            "instances": row.instances,
            "waiting": row.waiting,
            "requests": row.requests,
            "blocks": row.blocks,
            "forgotten_blocks": row.forgotten_blocks,
            "tokens": row.hits.tokens,
            "reused_tokens": row.hits.reused,
            "error_permille": row.error_permille,
            "mismatch": row.mismatch,
            "degraded": row.incomplete,
        })
    });
    let hot = hot.iter().map(|row| {
        json!({
            "tenant": row.pool.tenant,
            "model": row.pool.model,
            // Numbers of 64 bits are not exact in JavaScript.
            "hash": format!("{:016x}", row.hash),
            "tokens": row.tokens,
            "per_minute": row.per_minute,
            "holders": row.holders,
            "stored": row.stored,
            "copied": row.copied,
        })
    });
    json!({
        "instances": instances.collect::<Vec<_>>(),
        "models": models.collect::<Vec<_>>(),
        "hot": hot.collect::<Vec<_>>(),
        "copies": copies_as_json(&copies),
        "counts": {
            "placed": counts.placed + counts.placed_later,
            "queued": counts.queued,
            "refused": counts.refused,
            "expired": counts.expired,
            "orphaned": counts.orphaned,
            "event_gaps": counts.gaps,
        },
    })
}
