//! HTML page of one or several runs.

use std::io;
use std::path::Path;

use super::text::{OPERATION_HEAD, operation_rows, rows};
use super::{Operation, ReplayReport, TimelinePoint};
use crate::html::chart::{Chart, Series};
use crate::html::page::{Page, Table};
use crate::html::scale::{Axis, AxisSpacing, Unit, show};
use crate::latencies::HistogramPoint;

/// Most points of the timeline that are drawn; a longer one is thinned out.
const TIMELINE_POINTS: usize = 600;

const HOW_TO_READ: &str = "How to read the curves: the share on the left took longer than the time below. A curve \
    crosses 50 % at its p50, 1 % at its p99 and 0.1 % at its p99.9. One call is about all blocks of a \
    request that it concerns.";

/// Colour of the model's line where all runs share it: the neutral one.
const MODEL_COLOR: usize = 7;

/// Writes the page to `path`; blocks on file I/O.
///
/// # Errors
/// Returns the error of the file system, with the path.
pub fn write_html(reports: &[ReplayReport], path: &Path) -> io::Result<()> {
    std::fs::write(path, to_html(reports))
        .map_err(|error| io::Error::new(error.kind(), format!("cannot write report {}: {error}", path.display())))
}

/// Renders the page of `reports`, runs side by side.
#[must_use]
pub fn to_html(reports: &[ReplayReport]) -> String {
    page(reports).finish()
}

pub(super) fn page(reports: &[ReplayReport]) -> Page {
    let mut page = Page::new("kvplane replay", &subtitle(reports));
    for run in reports {
        page.heading(&run.title);
        page.figures(&key_figures(run));
    }
    page.heading("How it went");
    page.charts(&[hit_rate(&hit_rate_series(reports)), throughput(&throughput_series(reports))], "");
    page.heading("Latency of a call");
    let latencies = [Operation::Exists, Operation::Get, Operation::Put]
        .map(|operation| (operation, latency_series(reports, operation)));
    let charts: Vec<Chart<'_>> = latencies.iter().map(|(operation, series)| latency(*operation, series)).collect();
    page.charts(&charts, HOW_TO_READ);
    page.heading("Figures");
    let head = std::iter::once("figure".to_owned()).chain(reports.iter().map(|run| run.title.clone()));
    let summary = rows()
        .into_iter()
        .map(|(name, value)| std::iter::once(name.to_owned()).chain(reports.iter().map(value)).collect());
    page.table(&Table { caption: "Each run".into(), head: head.collect(), rows: summary.collect() });
    page.table(&Table {
        caption: "Each operation".into(),
        head: OPERATION_HEAD.map(str::to_owned).to_vec(),
        rows: operation_rows(reports),
    });
    page
}

fn subtitle(reports: &[ReplayReport]) -> String {
    let Some(run) = reports.first() else { return "No runs.".into() };
    let (block, pool) = (show(Unit::Bytes, run.block_bytes as f64), show(Unit::Bytes, run.pool_bytes as f64));
    let clients = if run.clients == 1 { "1 client".into() } else { format!("{} clients", run.clients) };
    format!("Trace: {}. {} requests, blocks of {block}, a pool of {pool}, {clients}.", run.trace, run.requests)
}

fn key_figures(run: &ReplayReport) -> Vec<(String, String, bool)> {
    let percent = |rate: f64| format!("{:.1} %", rate * 100.0);
    let mut figures = vec![
        ("hit rate, blocks".into(), percent(run.hits.rate_blocks()), false),
        ("hit rate, tokens".into(), percent(run.hits.rate_tokens()), false),
        (
            "against segmented LRU".into(),
            format!("{:+.2} points", run.model_gap() * 100.0),
            run.model_gap().abs() > 0.01,
        ),
        ("throughput".into(), format!("{:.2} GB/s", run.gigabytes_per_s()), false),
    ];
    for operation in &run.operations {
        if operation.operation != Operation::Exists {
            let name = format!("{} p50 / p99", operation.operation.name());
            // A line may break between the two values, not between a number and its unit.
            let time = |ns: u64| show(Unit::Nanoseconds, ns as f64).replace(' ', "\u{a0}");
            figures.push((name, format!("{} / {}", time(operation.p50_ns), time(operation.p99_ns)), false));
        }
    }
    figures.push((run.cpu_label().into(), format!("{:.2}", run.cpu_s_per_gigabyte()), false));
    figures.push(("bytes wrong".into(), run.bytes_wrong.to_string(), run.bytes_wrong > 0));
    figures
}

/// Keeps every n-th element so that at most [`TIMELINE_POINTS`] remain, and the last one.
fn thinned<T: Copy>(points: &[T]) -> Vec<T> {
    let stride = points.len().div_ceil(TIMELINE_POINTS).max(1);
    let mut kept: Vec<T> = points.iter().copied().step_by(stride).collect();
    if stride > 1 {
        kept.extend(points.last());
    }
    kept
}

fn hit_rate_series(reports: &[ReplayReport]) -> Vec<Series> {
    let over = |run: &ReplayReport, rate: fn(&TimelinePoint) -> f64| {
        thinned(&run.timeline).iter().map(|point| (point.requests as f64, rate(point))).collect()
    };
    let line = |(color, run): (usize, &ReplayReport)| Series {
        name: run.title.clone(),
        points: over(run, |point| point.hit_rate_blocks),
        color,
        dashed: false,
    };
    let model = |(color, run): (usize, &ReplayReport)| Series {
        name: format!("{}: segmented LRU model", run.title),
        points: over(run, |point| point.model_hit_rate_blocks),
        color,
        dashed: true,
    };
    let mut series: Vec<Series> = reports.iter().enumerate().map(line).collect();
    // Runs of one trace in pools of one size have the same model, which is drawn once instead of two coinciding lines.
    if reports.windows(2).all(|pair| pair[0].model_segmented_lru == pair[1].model_segmented_lru) {
        let one = |run| Series { name: "segmented LRU model".into(), ..model((MODEL_COLOR, run)) };
        series.extend(reports.first().map(one));
    } else {
        series.extend(reports.iter().enumerate().map(model));
    }
    series
}

fn hit_rate(series: &[Series]) -> Chart<'_> {
    Chart {
        id: "hit-rate",
        title: "Hit rate, blocks, from the start",
        description: "Share of blocks found since the start of the replay against requests replayed, with the model's.",
        x: Axis { label: "requests replayed", spacing: AxisSpacing::Linear, unit: Unit::Plain },
        y: Axis { label: "blocks found", spacing: AxisSpacing::Linear, unit: Unit::Share },
        series,
    }
}

fn throughput_series(reports: &[ReplayReport]) -> Vec<Series> {
    let of = |(color, run): (usize, &ReplayReport)| Series {
        name: run.title.clone(),
        points: thinned(&run.timeline).iter().map(|point| (point.t_s, point.gigabytes_per_s)).collect(),
        color,
        dashed: false,
    };
    reports.iter().enumerate().map(of).collect()
}

fn throughput(series: &[Series]) -> Chart<'_> {
    Chart {
        id: "throughput",
        title: "Throughput",
        description: "Payload got and put per second against the time since the start.",
        x: Axis { label: "time, s", spacing: AxisSpacing::Linear, unit: Unit::Plain },
        y: Axis { label: "GB/s", spacing: AxisSpacing::Linear, unit: Unit::Plain },
        series,
    }
}

fn latency_series(reports: &[ReplayReport], operation: Operation) -> Vec<Series> {
    let of = |(color, run): (usize, &ReplayReport)| {
        let stats = run.operations.iter().find(|stats| stats.operation == operation)?;
        let points = slower_than(&stats.histogram);
        Some(Series { name: run.title.clone(), points, color, dashed: false })
    };
    reports.iter().enumerate().filter_map(of).collect()
}

/// Returns for each point the fraction of calls that took longer.
fn slower_than(histogram: &[HistogramPoint]) -> Vec<(f64, f64)> {
    let total: u64 = histogram.iter().map(|point| point.count).sum();
    let mut left = total;
    let mut points = Vec::with_capacity(histogram.len() + 1);
    if let Some(first) = histogram.first() {
        // No call was faster than the range before the first: the curve starts at 100 %.
        points.push((first.ns as f64 * 15.0 / 16.0, 1.0));
    }
    for point in histogram {
        left -= point.count;
        if left > 0 {
            points.push((point.ns as f64, left as f64 / total as f64));
        }
    }
    points
}

fn latency(operation: Operation, series: &[Series]) -> Chart<'_> {
    let (id, title, description) = match operation {
        Operation::Exists => ("exists", "exists", "Share of exists calls that took longer than a time."),
        Operation::Get => ("get", "get", "Share of get calls that took longer than a time."),
        Operation::Put => ("put", "put", "Share of put calls that took longer than a time."),
    };
    Chart {
        id,
        title,
        description,
        x: Axis { label: "time of a call", spacing: AxisSpacing::Logarithmic, unit: Unit::Nanoseconds },
        y: Axis { label: "calls slower than this", spacing: AxisSpacing::Logarithmic, unit: Unit::Share },
        series,
    }
}
