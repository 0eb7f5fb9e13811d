//! Table on the terminal: one column for each run, then one line for each operation.

use std::fmt::Write as _;

use super::ReplayReport;
use crate::html::scale::{Unit, show};

/// Formatter of one row's value of a run.
type Cell = Box<dyn Fn(&ReplayReport) -> String>;

/// Returns the summary figures of a run: (name, value). Shared with the page, so that both show the same.
pub(super) fn rows() -> Vec<(&'static str, Cell)> {
    let percent = |rate: f64| format!("{:.2} %", rate * 100.0);
    vec![
        ("transport", Box::new(|run| run.transport.clone())),
        ("requests", Box::new(|run| run.requests.to_string())),
        ("clients", Box::new(|run| run.clients.to_string())),
        ("block", Box::new(|run| show(Unit::Bytes, run.block_bytes as f64))),
        ("pool", Box::new(|run| show(Unit::Bytes, run.pool_bytes as f64))),
        ("wall time", Box::new(|run| format!("{:.2} s", run.wall_s))),
        ("hit rate, blocks", Box::new(move |run| percent(run.hits.rate_blocks()))),
        ("hit rate, tokens", Box::new(move |run| percent(run.hits.rate_tokens()))),
        ("segmented LRU model, blocks", Box::new(move |run| percent(run.model_segmented_lru.rate_blocks()))),
        ("segmented LRU model, tokens", Box::new(move |run| percent(run.model_segmented_lru.rate_tokens()))),
        ("LRU model, blocks", Box::new(move |run| percent(run.model_lru.rate_blocks()))),
        ("LRU model, tokens", Box::new(move |run| percent(run.model_lru.rate_tokens()))),
        ("evictions", Box::new(|run| run.evictions.to_string())),
        ("moved", Box::new(|run| format!("{:.2} GB", run.bytes() as f64 / 1e9))),
        ("carried by", Box::new(carried)),
        ("throughput", Box::new(|run| format!("{:.3} GB/s", run.gigabytes_per_s()))),
        ("CPU, clients", Box::new(|run| format!("{:.2} s", run.cpu_s_client))),
        (
            "CPU, server",
            Box::new(|run| run.cpu_s_server.map_or("not measured".into(), |cpu_s| format!("{cpu_s:.2} s"))),
        ),
        ("CPU s per GB", Box::new(|run| format!("{:.3}", run.cpu_s_per_gigabyte()))),
        ("bytes wrong", Box::new(|run| run.bytes_wrong.to_string())),
    ]
}

/// Formats the bytes that each transport moved.
fn carried(run: &ReplayReport) -> String {
    let used = run.carried.iter().filter(|(_, bytes)| **bytes > 0);
    used.map(|(transport, bytes)| format!("{transport} {:.2} GB", *bytes as f64 / 1e9)).collect::<Vec<_>>().join(", ")
}

/// Headings of the table of operations.
pub(super) const OPERATION_HEAD: [&str; 11] =
    ["run", "operation", "calls", "items", "GB", "mean", "p50", "p90", "p99", "p99.9", "max"];

/// Returns the rows of the table of operations, under [`OPERATION_HEAD`].
pub(super) fn operation_rows(reports: &[ReplayReport]) -> Vec<Vec<String>> {
    let time = |ns: f64| show(Unit::Nanoseconds, ns);
    let lines = reports.iter().flat_map(|run| run.operations.iter().map(move |operation| (run, operation)));
    lines
        .map(|(run, operation)| {
            vec![
                run.title.clone(),
                operation.operation.name().to_owned(),
                operation.calls.to_string(),
                operation.items.to_string(),
                format!("{:.2}", operation.bytes as f64 / 1e9),
                time(operation.mean_ns),
                time(operation.p50_ns as f64),
                time(operation.p90_ns as f64),
                time(operation.p99_ns as f64),
                time(operation.p999_ns as f64),
                time(operation.max_ns as f64),
            ]
        })
        .collect()
}

/// Formats the runs as aligned text, ending in a line feed.
#[must_use]
pub fn to_text(reports: &[ReplayReport]) -> String {
    let mut out = String::new();
    let mut traces: Vec<&str> = reports.iter().map(|run| run.trace.as_str()).collect();
    traces.dedup();
    for trace in traces {
        let _ = writeln!(out, "trace: {}", printable(trace));
    }
    let mut summary = vec![std::iter::once(String::new()).chain(reports.iter().map(|run| run.title.clone())).collect()];
    for (name, value) in rows() {
        summary.push(std::iter::once(name.to_owned()).chain(reports.iter().map(value)).collect());
    }
    aligned(&mut out, &summary, 1);
    out.push('\n');
    let mut operations = vec![OPERATION_HEAD.map(str::to_owned).to_vec()];
    operations.extend(operation_rows(reports));
    aligned(&mut out, &operations, 2);
    out
}

/// Replaces control characters, so that a file's name cannot control the terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// Appends `rows` in columns, the first `left` of them aligned to the left and the others to the right.
fn aligned(out: &mut String, rows: &[Vec<String>], left: usize) {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let widths: Vec<usize> = (0..columns).map(|column| width(column).unwrap_or(0)).collect();
    for row in rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate() {
            let (cell, width) = (printable(cell), widths[column]);
            let _ = if column < left { write!(line, "{cell:<width$}  ") } else { write!(line, "{cell:>width$}  ") };
        }
        out.push_str(line.trim_end());
        out.push('\n');
    }
}
