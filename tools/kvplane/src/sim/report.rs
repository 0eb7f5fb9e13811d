//! Hit rates of a trace in three forms: a table on the terminal, JSON, and an HTML page.

use std::fmt::Write as _;
use std::io;
use std::path::Path;

use serde_json::{Value, json};

use super::published::figure_9;
use super::{Keeper, Row};
use crate::html::chart::{Chart, Series};
use crate::html::page::{Page, Table};
use crate::html::scale::{Axis, AxisSpacing, Unit};
use crate::trace::HitCounts;

/// Hit rates of one trace.
#[derive(Clone, Debug)]
pub struct CacheReport {
    /// Path of the trace, or "generated ...".
    pub trace: String,
    /// Number of requests.
    pub requests: usize,
    /// Sizes of caches in tokens, ascending.
    pub sizes: Vec<u64>,
    /// One row for each rule.
    pub rows: Vec<Row>,
}

impl CacheReport {
    /// Returns the published rate of this trace at each size.
    fn published(&self) -> Vec<Option<f64>> {
        let whole =
            self.rows.first().and_then(|row| row.cells.first()).map_or_else(HitCounts::default, |cell| cell.hits);
        self.sizes.iter().map(|size| figure_9(self.requests, whole, *size)).collect()
    }

    /// Returns name and rate by tokens at each size, the published ones last; `None` where there is none.
    fn lines(&self) -> Vec<(String, Vec<Option<f64>>)> {
        let line = |row: &Row| {
            let rates = row.cells.iter().map(|cell| Some(cell.hits.rate_tokens()));
            (row.keeper.name(), rates.collect())
        };
        let mut lines: Vec<(String, Vec<Option<f64>>)> = self.rows.iter().map(line).collect();
        let published = self.published();
        if published.iter().any(Option::is_some) {
            lines.push(("published, LRU".to_owned(), published));
        }
        lines
    }

    fn cells(&self) -> (Vec<String>, Vec<Vec<String>>) {
        let head = std::iter::once("tokens".to_owned()).chain(self.sizes.iter().map(|size| short(*size))).collect();
        let rows = self.lines().into_iter().map(|(name, rates)| {
            let rates = rates.into_iter().map(|rate| rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.3}")));
            std::iter::once(name).chain(rates).collect()
        });
        (head, rows.collect())
    }
}

/// Formats a count of tokens as in the paper's figure: `100k`, `3M`.
fn short(tokens: u64) -> String {
    match tokens {
        0..1_000 => tokens.to_string(),
        1_000..1_000_000 if tokens.is_multiple_of(1_000) => format!("{}k", tokens / 1_000),
        _ if tokens.is_multiple_of(1_000_000) => format!("{}M", tokens / 1_000_000),
        _ => tokens.to_string(),
    }
}

/// Formats the reports as aligned text: fractions of tokens found.
#[must_use]
pub fn to_text(reports: &[CacheReport]) -> String {
    let mut out = String::new();
    for report in reports {
        let label: String = report.trace.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
        let _ = writeln!(out, "trace: {label}, {} requests; share of tokens found", report.requests);
        let (head, rows) = report.cells();
        let width = rows.iter().map(|row| row[0].len()).max().unwrap_or(0).max(head[0].len());
        for row in std::iter::once(&head).chain(&rows) {
            let _ = write!(out, "{:<width$}", row[0]);
            for cell in &row[1..] {
                let _ = write!(out, " {cell:>6}");
            }
            out.push('\n');
        }
        out.push('\n');
    }
    out
}

/// Formats the reports as Markdown tables, for the documentation.
#[must_use]
pub fn to_markdown(reports: &[CacheReport]) -> String {
    let mut out = String::new();
    for report in reports {
        let (head, rows) = report.cells();
        let _ = writeln!(out, "| {} |\n|---|{}", head.join(" | "), "---|".repeat(head.len() - 1));
        for row in &rows {
            let _ = writeln!(out, "| {} |", row.join(" | "));
        }
        out.push('\n');
    }
    out
}

/// Formats the reports as JSON: all counts, and the rates under `derived`.
#[must_use]
pub fn to_json(reports: &[CacheReport]) -> Value {
    let one = |report: &CacheReport| {
        let row = |row: &Row| {
            let cells = row.cells.iter().map(|cell| {
                let mut value = serde_json::to_value(cell).unwrap_or(Value::Null);
                value["derived"] = json!({
                    "hit_rate_blocks": cell.hits.rate_blocks(),
                    "hit_rate_tokens": cell.hits.rate_tokens(),
                });
                value
            });
            json!({ "keeper": row.keeper.name(), "cells": cells.collect::<Vec<_>>() })
        };
        json!({
            "trace": report.trace,
            "requests": report.requests,
            "sizes_tokens": report.sizes,
            "rows": report.rows.iter().map(row).collect::<Vec<_>>(),
            "published_lru": report.published(),
        })
    };
    json!({ "schema_version": 1, "traces": reports.iter().map(one).collect::<Vec<_>>() })
}

/// Writes the page of `reports` to `path`; blocks on file I/O.
///
/// # Errors
/// Returns the error of the file system, with the path.
pub fn write_html(reports: &[CacheReport], path: &Path) -> io::Result<()> {
    std::fs::write(path, page(reports).finish())
        .map_err(|error| io::Error::new(error.kind(), format!("cannot write page {}: {error}", path.display())))
}

fn page(reports: &[CacheReport]) -> Page {
    let mut page = Page::new("What a cache finds", "Hit rates by eviction policy and size");
    for (number, report) in reports.iter().enumerate() {
        page.heading(&report.trace);
        let id = format!("trace-{number}");
        let series = series(report);
        page.charts(
            &[Chart {
                id: &id,
                title: "Share of tokens found",
                description: "Share of the prompts' tokens found in the cache, against its size in tokens.",
                x: Axis { label: "tokens", spacing: AxisSpacing::Logarithmic, unit: Unit::Plain },
                y: Axis { label: "tokens found", spacing: AxisSpacing::Linear, unit: Unit::Share },
                series: &series,
            }],
            "Dashed: Belady's bound, which knows the future, and what was published.",
        );
        let (head, rows) = report.cells();
        page.table(&Table { caption: "Share of tokens found".to_owned(), head, rows });
    }
    page
}

fn series(report: &CacheReport) -> Vec<Series> {
    let bound = Keeper::Belady.name();
    let lines = report.lines().into_iter().enumerate();
    lines
        .map(|(color, (name, rates))| {
            let points =
                report.sizes.iter().zip(rates).filter_map(|(size, rate)| Some((*size as f64, rate?))).collect();
            let dashed = name == bound || name.starts_with("published");
            Series { name, points, color, dashed }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::Cell;
    use super::*;
    use crate::html::well_formed;

    fn report() -> CacheReport {
        let sizes = vec![10_000, 100_000, 1_000_000];
        let whole = HitCounts { blocks: 288_500, hit_blocks: 1, tokens: 144_793_823, hit_tokens: 14_479_382 };
        let cells: Vec<Cell> = sizes.iter().map(|&tokens| Cell { tokens, hits: whole }).collect();
        let rows = Keeper::all().into_iter().map(|keeper| Row { keeper, cells: cells.clone() }).collect();
        CacheReport { trace: "a <trace>\u{7}".to_owned(), requests: 12_031, sizes, rows }
    }

    #[test]
    fn all_forms_say_the_same() {
        let text = to_text(&[report()]);
        assert!(text.contains("slru, no tails") && text.contains("  0.100") && !text.contains('\u{7}'), "{text}");
        assert!(text.contains("published, LRU") && text.contains("0.073"), "{text}");
        assert!(to_markdown(&[report()]).contains("| published, LRU | 0.045 | 0.073 | 0.087 |"));
        let json = to_json(&[report()]);
        assert_eq!(json["traces"][0]["rows"][0]["cells"][1]["tokens"], 100_000);
        assert_eq!(json["traces"][0]["published_lru"][2], 0.087);
        well_formed::check(page(&[report()]).body().trim());
    }

    #[test]
    fn an_unknown_trace_has_nothing_published() {
        let unknown = CacheReport { requests: 12_030, ..report() };
        assert!(!to_text(&[unknown]).contains("published"));
    }

    #[test]
    fn sizes_are_short() {
        assert_eq!([999, 10_000, 3_000_000, 1_234_567].map(short), ["999", "10k", "3M", "1234567"]);
    }
}
