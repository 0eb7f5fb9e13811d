//! What a replay measured, and its three forms: a table on the terminal, JSON, and an HTML page.
//!
//! The structs hold what was counted; every rate is computed from them in one place, here, so that the three forms
//! cannot disagree. A report says what was run, whether the trace was generated, and how far the store is from its
//! model.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Value, json};

use crate::histogram::{Histogram, HistogramPoint};
use crate::trace::HitCounts;

mod page;
mod text;

pub use page::{to_html, write_html};
pub use text::to_text;

/// The operations a replay performs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Operation {
    /// A batch-exists over a request's blocks.
    Exists,
    /// Getting the hit prefix.
    Get,
    /// Putting the rest.
    Put,
}

impl Operation {
    /// The name in tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Exists => "exists",
            Self::Get => "get",
            Self::Put => "put",
        }
    }
}

/// One kind of operation over a whole run.
#[derive(Clone, Debug, Serialize)]
pub struct OperationReport {
    /// Which one.
    pub operation: Operation,
    /// Calls timed, each of one or more items.
    pub calls: u64,
    /// Objects asked about or moved.
    pub items: u64,
    /// Payload moved, in bytes.
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
    /// The longest call, in nanoseconds.
    pub max_ns: u64,
    /// The distribution.
    pub histogram: Vec<HistogramPoint>,
}

impl OperationReport {
    /// Describes the calls timed in `latency`, which together moved `items` objects of `bytes` bytes.
    #[must_use]
    pub fn new(operation: Operation, latency: &Histogram, items: u64, bytes: u64) -> Self {
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

/// Where a run stood at one time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TimelinePoint {
    /// Since the start of the replay, in seconds.
    pub t_s: f64,
    /// Requests done by then.
    pub requests: u64,
    /// Share of blocks found by then, 0 to 1.
    pub hit_rate_blocks: f64,
    /// What the segmented-LRU model had found after the same requests.
    pub model_hit_rate_blocks: f64,
    /// Payload moved since the point before, in GB/s (10^9 bytes).
    pub gigabytes_per_s: f64,
}

/// One run of a replay.
#[derive(Clone, Debug, Serialize)]
pub struct ReplayReport {
    /// What this run is called, e.g. the transport: heads its column.
    pub title: String,
    /// The trace: a path, or "generated ...".
    pub trace: String,
    /// How blocks were to travel.
    pub transport: String,
    /// How they did: payload bytes by transport.
    pub carried: BTreeMap<String, u64>,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Bytes of the pool.
    pub pool_bytes: u64,
    /// Clients that replayed at the same time.
    pub clients: u32,
    /// From the first request to the last answer, in seconds.
    pub wall_s: f64,
    /// Requests replayed.
    pub requests: u64,
    /// Blocks and tokens asked for and found.
    pub hits: HitCounts,
    /// The segmented-LRU model of the same capacity: what the store is held to.
    pub model_segmented_lru: HitCounts,
    /// The plain LRU model of the same capacity.
    pub model_lru: HitCounts,
    /// Bytes read that were not what had been written. Anything but 0 is a bug.
    pub bytes_wrong: u64,
    /// Objects evicted by the store.
    pub evictions: u64,
    /// CPU time of the clients, in seconds.
    pub cpu_s_client: f64,
    /// CPU time of the server, in seconds, where it can be told apart.
    pub cpu_s_server: Option<f64>,
    /// Each kind of operation.
    pub operations: Vec<OperationReport>,
    /// How the run went, ascending in time.
    pub timeline: Vec<TimelinePoint>,
}

impl ReplayReport {
    /// Payload moved by all operations, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.operations.iter().map(|operation| operation.bytes).sum()
    }

    /// Payload per second of wall time, in GB/s (10^9 bytes); 0 for a run that took no time.
    #[must_use]
    pub fn gigabytes_per_s(&self) -> f64 {
        if self.wall_s > 0.0 { self.bytes() as f64 / 1e9 / self.wall_s } else { 0.0 }
    }

    /// CPU seconds of clients and server per 10^9 bytes moved; 0 when nothing was.
    #[must_use]
    pub fn cpu_s_per_gigabyte(&self) -> f64 {
        let cpu_s = self.cpu_s_client + self.cpu_s_server.unwrap_or(0.0);
        if self.bytes() == 0 { 0.0 } else { cpu_s / (self.bytes() as f64 / 1e9) }
    }

    /// How far the store's hit rate by blocks is above (or, negative, below) the segmented-LRU model's.
    #[must_use]
    pub fn model_gap(&self) -> f64 {
        self.hits.rate_blocks() - self.model_segmented_lru.rate_blocks()
    }

    /// Whether the CPU time includes the server's.
    const fn cpu_label(&self) -> &'static str {
        if self.cpu_s_server.is_some() { "CPU s per GB" } else { "CPU s per GB, client only" }
    }
}

/// The runs as JSON: all that was counted, and the rates under `derived`.
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
