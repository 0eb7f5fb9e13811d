//! HTML page of a run's cases: bandwidth and transfer times against the block size.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use super::stats::CaseStats;
use crate::html::chart::{Chart, Series};
use crate::html::page::{Page, Table};
use crate::html::scale::{Axis, AxisSpacing, Unit, show};

/// Writes the page of `cases` to `path`, with `label` as the description of the run; blocks on file I/O.
///
/// # Errors
/// Returns the error of the file system, with the path.
pub fn write_html(label: &str, cases: &[CaseStats], path: &Path) -> io::Result<()> {
    std::fs::write(path, page(label, cases).finish())
        .map_err(|error| io::Error::new(error.kind(), format!("cannot write plot {}: {error}", path.display())))
}

fn page(label: &str, cases: &[CaseStats]) -> Page {
    let mut page = Page::new("tebench", label);
    page.figures(&best(cases));
    page.heading("Against the block size");
    let bandwidth = series(cases, &[("", false, |case| case.bandwidth_gb_s)]);
    let times = series(
        cases,
        &[("p50", false, |case| case.p50_transfer_us * 1e3), ("p99", true, |case| case.p99_transfer_us * 1e3)],
    );
    let block = Axis { label: "block size", spacing: AxisSpacing::Logarithmic, unit: Unit::Bytes };
    page.charts(&[
        Chart {
            id: "bandwidth",
            title: "Bandwidth",
            description: "Bandwidth of all threads together against the block size, both logarithmic.",
            x: block,
            y: Axis { label: "GB/s", spacing: AxisSpacing::Logarithmic, unit: Unit::Plain },
            series: &bandwidth,
        },
        Chart {
            id: "transfer",
            title: "Time of a batch, p50 and p99",
            description: "Median and 99th percentile of the time of a batch against the block size, both logarithmic.",
            x: block,
            y: Axis { label: "time of a batch", spacing: AxisSpacing::Logarithmic, unit: Unit::Nanoseconds },
            series: &times,
        },
    ], "");
    page.heading("Figures");
    page.table(&table(cases));
    page
}

/// Plotted value of a case: name before the setting, true for a dashed line, getter.
type Figure<'a> = (&'a str, bool, fn(&CaseStats) -> f64);

/// Returns one line for each number of threads and batch size, and for each of `figures`.
fn series(cases: &[CaseStats], figures: &[Figure<'_>]) -> Vec<Series> {
    let mut groups: BTreeMap<(u64, u64), Vec<&CaseStats>> = BTreeMap::new();
    for case in cases {
        groups.entry((case.case.threads, case.case.batch)).or_default().push(case);
    }
    let mut series = Vec::new();
    for (color, ((threads, batch), mut group)) in groups.into_iter().enumerate() {
        group.sort_by_key(|case| case.case.block_bytes);
        for (name, dashed, value) in figures {
            let words = format!("{name} {}", setting(threads, batch));
            let points = group.iter().map(|case| (case.case.block_bytes as f64, value(case))).collect();
            series.push(Series { name: words.trim_start().to_owned(), points, color, dashed: *dashed });
        }
    }
    series
}

/// Formats the setting that the cases of one line share.
fn setting(threads: u64, batch: u64) -> String {
    let plural = if threads == 1 { "" } else { "s" };
    format!("{threads} thread{plural}, batch {batch}")
}

/// Returns the best bandwidth and the shortest median, with their cases.
fn best(cases: &[CaseStats]) -> Vec<(String, String, bool)> {
    let of = |case: &CaseStats| {
        let setting = setting(case.case.threads, case.case.batch);
        format!("{}, {setting}", show(Unit::Bytes, case.case.block_bytes as f64))
    };
    let fastest = cases.iter().max_by(|a, b| a.bandwidth_gb_s.total_cmp(&b.bandwidth_gb_s));
    let shortest = cases.iter().min_by(|a, b| a.p50_transfer_us.total_cmp(&b.p50_transfer_us));
    let bandwidth = fastest
        .map(|case| (format!("best bandwidth: {}", of(case)), format!("{:.2} GB/s", case.bandwidth_gb_s), false));
    let time = shortest
        .map(|case| (format!("best p50: {}", of(case)), show(Unit::Nanoseconds, case.p50_transfer_us * 1e3), false));
    bandwidth.into_iter().chain(time).collect()
}

fn table(cases: &[CaseStats]) -> Table {
    let head = ["block", "batch", "threads", "GB/s", "avg", "p50", "p99", "p99.9", "CPU s/GB"];
    let time = |us: f64| show(Unit::Nanoseconds, us * 1e3);
    let rows = cases.iter().map(|case| {
        vec![
            show(Unit::Bytes, case.case.block_bytes as f64),
            case.case.batch.to_string(),
            case.case.threads.to_string(),
            format!("{:.3}", case.bandwidth_gb_s),
            time(case.average_transfer_us),
            time(case.p50_transfer_us),
            time(case.p99_transfer_us),
            time(case.p999_transfer_us),
            case.cpu_s_per_gb.map_or_else(|| "-".to_owned(), |cpu_s| format!("{cpu_s:.3}")),
        ]
    });
    Table { caption: "Each case".into(), head: head.map(str::to_owned).to_vec(), rows: rows.collect() }
}

#[cfg(test)]
mod tests {
    use super::super::table::tests::sample;
    use super::*;
    use crate::html::well_formed;

    fn cases() -> Vec<CaseStats> {
        let sizes = (12..=26).map(|power| 1 << power);
        sizes.flat_map(|size| [sample(1, size, 1), sample(4, size, 1), sample(4, size, 16)]).collect()
    }

    #[test]
    fn the_page_is_well_formed_and_escaped() {
        for cases in [vec![], cases()] {
            let page = page("read <b> & 'tcp'", &cases);
            well_formed::check(page.body().trim());
            assert!(!page.finish().contains("<b>"));
        }
    }

    #[test]
    fn each_line_is_one_number_of_threads_and_batch_size() {
        let lines = series(&cases(), &[("", false, |case| case.bandwidth_gb_s)]);
        let names: Vec<_> = lines.iter().map(|line| line.name.as_str()).collect();
        assert_eq!(names, ["1 thread, batch 1", "4 threads, batch 1", "4 threads, batch 16"]);
        assert!(lines.iter().all(|line| line.points.len() == 15 && line.points.is_sorted_by_key(|point| point.0)));
    }

    /// Writes a sample page for visual inspection, if the environment variable is set.
    #[test]
    fn pages_to_look_at() {
        let Some(directory) = std::env::var_os("KVPLANE_SAMPLE_PAGES") else { return };
        let path = Path::new(&directory).join("tebench.html");
        write_html("read, tcp over loopback, 2 cores", &cases(), &path).unwrap();
    }
}
