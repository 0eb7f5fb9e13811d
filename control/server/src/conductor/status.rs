//! The Conductor's part of the status page: instances, models with their queues, hot prefixes, counters.

use kvplane_conductor::conductor::{Conductor, CopyState, DecodeStatus, FeedProgress, PoolRow};
use serde_json::{Value, json};

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

/// Returns what is learned of decodes.
fn decode_as_json(decode: &DecodeStatus) -> Value {
    json!({
        "base_ns": decode.base_ns,
        "token_ps": decode.token_ps,
        "request_ns": decode.request_ns,
        "reports": decode.reports,
        "error_permille": decode.error_permille,
        "output_p50": decode.output_p50,
        "output_p90": decode.output_p90,
        "output_error_permille": decode.output_error_permille,
        "output_within_permille": decode.output_within_permille,
    })
}

/// Returns the progress of a cache feed.
pub(crate) fn progress_as_json(progress: FeedProgress) -> Value {
    json!({ "next": progress.next, "newest": progress.newest, "unconfirmed": progress.unconfirmed })
}

/// Returns the progress of all cache feeds of a pool.
pub(crate) fn pool_progress_as_json(row: &PoolRow) -> Value {
    json!({
        "instances": row.feeds,
        "complete_instances": row.complete_feeds,
        "missing_batches": row.missing_batches,
    })
}

/// Returns the whole state as JSON. Names from outside are JSON strings in it, and nothing else.
pub(super) fn as_json(conductor: &mut Conductor, now_ns: u64) -> Value {
    let (table, hot) = (conductor.table(now_ns), conductor.hot(HOT, now_ns));
    let (counts, copies) = (conductor.counts(), conductor.copies());
    let instances = table.instances.iter().map(|row| {
        json!({
            "instance": &*row.status.instance,
            "tenant": row.status.tenant,
            "model": row.status.model,
            "block_tokens": row.status.block_tokens,
            "part": row.status.part.name(),
            "address": row.status.address,
            "suspect": row.suspect,
            "held": row.held,
            "degraded": row.status.degraded,
            "progress": row.progress.map(progress_as_json),
            "prefills": row.status.prefills,
            "wait_ns": row.status.wait_ns,
            "decode_tokens": row.status.decode_tokens,
            "decodes": row.status.decodes,
            "decode_factor_permille": row.status.decode_factor_permille,
            "silent_ns": row.status.silent_ns,
        })
    });
    let models = table.pools.iter().map(|row| {
        json!({
            "tenant": row.status.tenant,
            "model": row.status.model,
            "block_tokens": row.status.block_tokens,
            "instances": row.status.instances,
            "waiting": row.status.waiting,
            "requests": row.status.requests,
            "blocks": row.status.blocks,
            "forgotten_blocks": row.status.forgotten_blocks,
            "tokens": row.status.tokens,
            "reused_tokens": row.status.reused_tokens,
            "error_permille": row.status.error_permille,
            "mismatch": row.status.mismatch,
            "decode": decode_as_json(&row.status.decode),
            "sessions": row.status.sessions,
            "degraded": row.incomplete,
            "progress": pool_progress_as_json(row),
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
