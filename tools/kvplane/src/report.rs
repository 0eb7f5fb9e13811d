//! Measurements of a replay, and their three forms: a table on the terminal, JSON, and an HTML page.
//!
//! The structs hold the counts; every rate is computed from them in one place, here, so that the three forms cannot
//! disagree. A report names the trace and the settings of the run, states if the trace was generated, and compares the
//! store with its model.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Value, json};

use crate::latencies::{HistogramPoint, Latencies};
use crate::trace::HitCounts;

mod page;
mod text;

pub use page::{to_html, write_html};
pub use text::to_text;

/// Operation of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Operation {
    /// Batched exists over a request's blocks.
    Exists,
    /// Batched get of the hit prefix.
    Get,
    /// Batched put of the rest.
    Put,
}

impl Operation {
    /// Returns the name in tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exists => "exists",
            Self::Get => "get",
            Self::Put => "put",
        }
    }
}

/// Measurements of one operation over a whole run.
#[derive(Clone, Debug, Serialize)]
pub struct OperationReport {
    /// Measured operation.
    pub operation: Operation,
    /// Number of timed calls, each of one or more items.
    pub calls: u64,
    /// Number of objects checked or moved.
    pub items: u64,
    /// Payload bytes moved.
    pub bytes: u64,
    /// Mean time of a call, in nanoseconds.
    pub mean_ns: f64,
    /// Median time of a call, in nanoseconds.
    pub p50_ns: u64,
    /// 90th percentile, in nanoseconds.
    pub p90_ns: u64,
    /// 99th percentile, in nanoseconds.
    pub p99_ns: u64,
    /// 99.9th percentile, in nanoseconds.
    pub p999_ns: u64,
    /// Longest call, in nanoseconds.
    pub max_ns: u64,
    /// Distribution of the times.
    pub histogram: Vec<HistogramPoint>,
}

impl OperationReport {
    /// Summarizes the calls timed in `latency`, which together moved `items` objects of `bytes` bytes.
    #[must_use]
    pub fn new(operation: Operation, latency: &Latencies, items: u64, bytes: u64) -> Self {
        Self {
            operation,
            calls: latency.count(),
            items,
            bytes,
            mean_ns: latency.mean_ns(),
            p50_ns: latency.percentile_ns(0.5),
            p90_ns: latency.percentile_ns(0.9),
            p99_ns: latency.percentile_ns(0.99),
            p999_ns: latency.percentile_ns(0.999),
            max_ns: latency.max_ns(),
            histogram: latency.points(),
        }
    }
}

/// Progress of a run at one time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TimelinePoint {
    /// Time since the start of the replay, in seconds.
    pub t_s: f64,
    /// Number of requests completed by then.
    pub requests: u64,
    /// Fraction of blocks found by then, 0 to 1.
    pub hit_rate_blocks: f64,
    /// Fraction of blocks that the segmented-LRU model had found after the same requests.
    pub model_hit_rate_blocks: f64,
    /// Payload moved since the point before, in GB/s (10^9 bytes).
    pub gigabytes_per_s: f64,
}

/// Report of one run of a replay.
#[derive(Clone, Debug, Serialize)]
pub struct ReplayReport {
    /// Title of the run, e.g. its transport; the heading of its column.
    pub title: String,
    /// Path of the trace, or "generated ...".
    pub trace: String,
    /// Requested transport of blocks.
    pub transport: String,
    /// Payload bytes moved, by transport.
    pub carried: BTreeMap<String, u64>,
    /// Size of a block, in bytes.
    pub block_bytes: u64,
    /// Size of the pool, in bytes.
    pub pool_bytes: u64,
    /// Number of clients that replayed at the same time.
    pub clients: u32,
    /// Time from the first request to the last reply, in seconds.
    pub wall_s: f64,
    /// Number of requests replayed.
    pub requests: u64,
    /// Blocks and tokens requested and found.
    pub hits: HitCounts,
    /// Counts of the segmented-LRU model of the same capacity, which the store has to match.
    pub model_segmented_lru: HitCounts,
    /// Counts of the plain LRU model of the same capacity.
    pub model_lru: HitCounts,
    /// Number of bytes read that differ from the bytes written. Any value but 0 is a bug.
    pub bytes_wrong: u64,
    /// Number of objects evicted by the store.
    pub evictions: u64,
    /// CPU time of the clients, in seconds.
    pub cpu_s_client: f64,
    /// CPU time of the server, in seconds; `None` if it is not measured separately.
    pub cpu_s_server: Option<f64>,
    /// Measurements of each operation.
    pub operations: Vec<OperationReport>,
    /// Progress of the run, ascending in time.
    pub timeline: Vec<TimelinePoint>,
}

impl ReplayReport {
    /// Returns the payload moved by all operations, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.operations.iter().map(|operation| operation.bytes).sum()
    }

    /// Returns the payload per second of wall time, in GB/s (10^9 bytes); 0 for a run that took no time.
    #[must_use]
    pub fn gigabytes_per_s(&self) -> f64 {
        if self.wall_s > 0.0 { self.bytes() as f64 / 1e9 / self.wall_s } else { 0.0 }
    }

    /// Returns the CPU seconds of clients and server per 10^9 bytes moved; 0 if none were moved.
    #[must_use]
    pub fn cpu_s_per_gigabyte(&self) -> f64 {
        let cpu_s = self.cpu_s_client + self.cpu_s_server.unwrap_or(0.0);
        if self.bytes() == 0 { 0.0 } else { cpu_s / (self.bytes() as f64 / 1e9) }
    }

    /// Returns the difference of the store's hit rate by blocks and the segmented-LRU model's; negative if the store is
    /// below.
    #[must_use]
    pub fn model_gap(&self) -> f64 {
        self.hits.rate_blocks() - self.model_segmented_lru.rate_blocks()
    }

    /// Returns the label of the CPU time, which may exclude the server's.
    const fn cpu_label(&self) -> &'static str {
        if self.cpu_s_server.is_some() { "CPU s per GB" } else { "CPU s per GB, client only" }
    }
}

/// Formats the runs as JSON: all counts, and the rates under `derived`.
#[must_use]
pub fn to_json(reports: &[ReplayReport]) -> Value {
    let runs = reports.iter().map(|report| {
        let mut run = serde_json::to_value(report).unwrap_or(Value::Null);
        run["derived"] = json!({
            "hit_rate_blocks": report.hits.rate_blocks(),
            "hit_rate_tokens": report.hits.rate_tokens(),
            "model_segmented_lru_hit_rate_blocks": report.model_segmented_lru.rate_blocks(),
            "model_segmented_lru_hit_rate_tokens": report.model_segmented_lru.rate_tokens(),
            "model_lru_hit_rate_blocks": report.model_lru.rate_blocks(),
            "model_lru_hit_rate_tokens": report.model_lru.rate_tokens(),
            "gigabytes_per_s": report.gigabytes_per_s(),
            "cpu_s_per_gigabyte": report.cpu_s_per_gigabyte(),
        });
        run
    });
    json!({ "schema_version": 1, "runs": runs.collect::<Vec<_>>() })
}

#[cfg(test)]
pub(crate) mod tests;
