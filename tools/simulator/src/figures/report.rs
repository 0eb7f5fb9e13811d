//! Figures as a table on the terminal, as Markdown, as JSON, and as an HTML page with plots.

use std::fmt::Write as _;
use std::io;
use std::path::Path;

use kvplane_tools::html::chart::{Chart, Series};
use kvplane_tools::html::page::{Page, Table};
use kvplane_tools::html::scale::{Axis, AxisSpacing, Unit};
use serde_json::{Value, json};

use super::Figure;

const HEAD: [&str; 4] = ["", "paper", "ours", "difference"];

fn rows(figure: &Figure) -> Vec<Vec<String>> {
    let show = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"));
    let row = |line: &super::Line| {
        let difference = line.difference().map_or_else(|| "-".to_owned(), |value| format!("{value:+.3}"));
        vec![line.label.clone(), show(line.paper), show(line.ours), difference]
    };
    figure.lines.iter().map(row).collect()
}

/// Formats the figures as aligned text.
#[must_use]
pub(crate) fn to_text(figures: &[Figure]) -> String {
    let mut out = String::new();
    for figure in figures {
        let _ = writeln!(out, "{}: {}", figure.name, figure.title);
        let rows = rows(figure);
        let width = rows.iter().map(|row| row[0].chars().count()).max().unwrap_or(0);
        let _ = writeln!(out, "  {:<width$} {:>12} {:>12} {:>12}", HEAD[0], HEAD[1], HEAD[2], HEAD[3]);
        for row in rows {
            let _ = writeln!(out, "  {:<width$} {:>12} {:>12} {:>12}", row[0], row[1], row[2], row[3]);
        }
        let _ = writeln!(out, "  {}\n", figure.why);
    }
    out
}

/// Formats the figures as tables in Markdown.
#[must_use]
pub(crate) fn to_markdown(figures: &[Figure]) -> String {
    let mut out = String::new();
    for figure in figures {
        let _ = writeln!(
            out,
            "### {}\n\n{}.\n\n| | paper | ours | difference |\n|---|---|---|---|",
            figure.name, figure.title
        );
        for row in rows(figure) {
            let _ = writeln!(out, "| {} |", row.join(" | "));
        }
        let _ = writeln!(out, "\n{}\n", figure.why);
    }
    out
}

/// Formats all values and curves as JSON.
#[must_use]
pub(crate) fn to_json(figures: &[Figure]) -> Value {
    json!({ "figures": figures })
}

/// Writes the page to `path`; blocks on file I/O.
///
/// # Errors
/// Returns the error of the file system, with the path.
pub(crate) fn write_html(figures: &[Figure], path: &Path) -> io::Result<()> {
    std::fs::write(path, page(figures).finish())
        .map_err(|error| io::Error::new(error.kind(), format!("cannot write page {}: {error}", path.display())))
}

pub(super) fn page(figures: &[Figure]) -> Page {
    let mut page = Page::new("Mooncake's figures, simulated", "The paper's values beside those of kvplane's simulator");
    for (number, figure) in figures.iter().enumerate() {
        page.heading(&format!("{}: {}", figure.name, figure.title));
        if !figure.curves.is_empty() {
            let id = format!("figure-{number}");
            let series: Vec<Series> =
                figure.curves.iter().enumerate().map(|(at, curve)| series(figure, at, curve)).collect();
            let spacing = if figure.axes.1 { AxisSpacing::Logarithmic } else { AxisSpacing::Linear };
            page.charts(
                &[Chart {
                    id: &id,
                    title: figure.title,
                    description: figure.why,
                    x: Axis { label: figure.axes.0, spacing, unit: Unit::Plain },
                    y: Axis { label: figure.axes.2, spacing: AxisSpacing::Linear, unit: Unit::Plain },
                    series: &series,
                }],
                "Dashed: as published.",
            );
        }
        page.table(&Table {
            caption: figure.why.to_owned(),
            head: HEAD.map(str::to_owned).to_vec(),
            rows: rows(figure),
        });
    }
    page
}

/// A published curve has the colour of the simulated one and is dashed.
fn series(figure: &Figure, at: usize, curve: &super::Curve) -> Series {
    let pairs = figure.curves.iter().any(|curve| curve.paper);
    Series {
        name: curve.name.clone(),
        points: curve.points.clone(),
        color: if pairs { at / 2 } else { at },
        dashed: curve.paper,
    }
}
