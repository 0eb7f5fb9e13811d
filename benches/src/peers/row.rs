//! Measurement of one side at one cell, and its JSON.

use serde_json::{Value, json};

use super::cells::Cell;
use super::meter::Usage;

/// Figures that a side itself reports for a cell.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Figures {
    pub(crate) calls: u64,
    /// Duration of the measurement, in seconds.
    pub(crate) seconds: f64,
    /// Throughput in GB/s (10^9 bytes).
    pub(crate) gb_s: f64,
    /// Median and 99th percentile of a call.
    pub(crate) p50_us: Option<f64>,
    pub(crate) p99_us: Option<f64>,
}

/// Measurement.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) side: &'static str,
    pub(crate) version: String,
    pub(crate) pacing: &'static str,
    pub(crate) cell: Cell,
    pub(crate) round: usize,
    pub(crate) figures: Figures,
    pub(crate) usage: Usage,
}

impl Row {
    /// Returns the blocks per second.
    pub(crate) fn blocks_s(&self) -> f64 {
        self.figures.gb_s * 1e9 / self.cell.block_bytes as f64
    }

    /// Returns the CPU seconds of both processes per GB.
    pub(crate) fn cpu_s_per_gb(&self) -> f64 {
        self.usage.own_s / (self.figures.gb_s * self.figures.seconds).max(1e-12)
    }

    /// Returns the row as JSON for the results file.
    pub(crate) fn to_json(&self) -> Value {
        let round = |value: f64| (value * 1e4).round() / 1e4;
        let (figures, usage) = (&self.figures, &self.usage);
        json!({
            "peer": self.side, "version": self.version, "mode": self.pacing, "case": self.cell.op.word(),
            "size": self.cell.block_bytes, "batch": self.cell.batch, "round": self.round,
            "calls": figures.calls, "secs": round(figures.seconds), "GBps": round(figures.gb_s),
            "ops_s": round(self.blocks_s()), "p50_us": figures.p50_us.map(round), "p99_us": figures.p99_us.map(round),
            "cpu_cores": { "all": round(usage.own_s / figures.seconds.max(1e-9)) },
            "cpu_s_per_GB": round(self.cpu_s_per_gb()),
            "foreign_cores": round(usage.foreign_cores), "steal_cores": round(usage.steal_cores),
        })
    }
}
