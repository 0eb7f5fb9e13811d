//! Table in the format of Mooncake's tebench, with two more columns behind it, and the same rows as JSON.

use serde_json::{Value, json};

use super::counts::{DeadlineGroup, Slow, Transport};
use super::devices::Device;
use super::qos::Report;
use super::stats::CaseStats;

/// Length of the rule below the header, in dashes.
const RULE: usize = 160;

/// Names and widths of the columns. The first eight are those of Mooncake's tebench.
const COLUMNS: [(&str, usize); 10] = [
    ("BlkSize (B)", 14),
    ("Batch", 8),
    ("BW (GB/s)", 14),
    ("Avg Inst GB/s", 18),
    ("Avg Lat (us)", 14),
    ("Avg Tx (us)", 14),
    ("P99 Tx (us)", 14),
    ("P999 Tx (us)", 14),
    ("P50 Tx (us)", 14),
    ("CPU s/GB", 14),
];

fn line(cells: &[String; COLUMNS.len()]) -> String {
    let padded: String = COLUMNS.iter().zip(cells).map(|((_, width), cell)| format!("{cell:<width$}")).collect();
    padded.trim_end().to_owned()
}

/// Formats the header and the rule below it, two lines without a last line feed.
#[must_use]
pub fn header() -> String {
    format!("{}\n{}", line(&COLUMNS.map(|(name, _)| name.to_owned())), "-".repeat(RULE))
}

/// Formats one case as a line, without a line feed.
#[must_use]
pub fn row(stats: &CaseStats) -> String {
    line(&[
        stats.case.block_bytes.to_string(),
        stats.case.batch.to_string(),
        format!("{:.6}", stats.bandwidth_gb_s),
        format!("{:.1}", stats.average_instant_gb_s),
        format!("{:.1}", stats.average_latency_us),
        format!("{:.1}", stats.average_transfer_us),
        format!("{:.1}", stats.p99_transfer_us),
        format!("{:.1}", stats.p999_transfer_us),
        format!("{:.1}", stats.p50_transfer_us),
        stats.cpu_s_per_gb.map_or_else(|| "-".to_owned(), |cpu_s| format!("{cpu_s:.3}")),
    ])
}

/// Measurements that are reported beside the cases.
#[derive(Clone, Debug, Default)]
pub struct Beside {
    /// Records of classes of service.
    pub qos: Vec<Report>,
    /// Groups of threads with and without deadlines.
    pub deadlines: Vec<DeadlineGroup>,
    /// Counters of the transports.
    pub transports: Vec<Transport>,
    /// Counters of the local RDMA devices.
    pub devices: Vec<Device>,
    /// Slow transfers.
    pub slow: Vec<Slow>,
}

/// Formats all cases as JSON. `label` describes the run (operation, transport, machine).
#[must_use]
pub fn to_json(label: &str, cases: &[CaseStats], beside: &Beside) -> Value {
    let Beside { qos, deadlines, transports, devices, slow } = beside;
    let mut all = json!({ "schema_version": 1, "label": label, "cases": cases, "transports": transports });
    if !qos.is_empty() {
        all["qos"] = json!(qos);
    }
    if !devices.is_empty() {
        all["devices"] = json!(devices);
    }
    if !slow.is_empty() {
        all["slow"] = json!(slow);
    }
    if !deadlines.is_empty() {
        all["deadlines"] = json!(deadlines);
    }
    all
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::sweep::Case;
    use super::*;

    /// Builds a case with round figures.
    pub(crate) fn sample(threads: u64, block_bytes: u64, batch: u64) -> CaseStats {
        let transfer_us = 8.0 + block_bytes as f64 * batch as f64 / 6e3;
        let bandwidth_gb_s = block_bytes as f64 * batch as f64 * threads as f64 / transfer_us / 1e3;
        CaseStats {
            case: Case { threads, block_bytes, batch },
            batches: 1000,
            bandwidth_gb_s,
            average_instant_gb_s: bandwidth_gb_s / threads as f64,
            average_latency_us: transfer_us * 1.05,
            average_transfer_us: transfer_us,
            p50_transfer_us: transfer_us * 0.9,
            p99_transfer_us: transfer_us * 2.5,
            p999_transfer_us: transfer_us * 6.0,
            cpu_s_per_gb: Some(0.25),
        }
    }

    #[test]
    fn the_header_is_the_known_one_and_ours_behind_it() {
        let header = header();
        let (names, rule) = header.split_once('\n').unwrap();
        let known = "BlkSize (B)   Batch   BW (GB/s)     Avg Inst GB/s     Avg Lat (us)  Avg Tx (us)   P99 Tx (us)   \
             P999 Tx (us)";
        assert_eq!(names.split_at(known.len()), (known, "  P50 Tx (us)   CPU s/GB"));
        assert_eq!(rule, "-".repeat(160));
    }

    #[test]
    fn cells_stand_below_their_names() {
        let stats = CaseStats { bandwidth_gb_s: 5.25, average_instant_gb_s: 5.31, ..sample(1, 4096, 1) };
        let (names, row) = (header(), row(&stats));
        let cell = |name: &str| row[names.find(name).unwrap()..].split(' ').next().unwrap();
        assert_eq!(["BlkSize", "Batch", "BW", "Avg Inst"].map(cell), ["4096", "1", "5.250000", "5.3"]);
        assert_eq!(["Avg Lat", "Avg Tx", "P99 Tx", "CPU s/GB"].map(cell), ["9.1", "8.7", "21.7", "0.250"]);
        let unmeasured = super::row(&CaseStats { cpu_s_per_gb: None, ..stats });
        assert!(unmeasured.ends_with(" -"));
    }

    #[test]
    fn json_rows_name_their_case() {
        let json = to_json("read, tcp", &[sample(2, 4096, 8)], &Beside::default());
        let case = &json["cases"][0];
        assert_eq!((&case["threads"], &case["block_bytes"], &case["batch"]), (&json!(2), &json!(4096), &json!(8)));
        assert_eq!(case["cpu_s_per_gb"], 0.25);
        assert_eq!((&json["transports"], json.get("qos")), (&json!([]), None));
    }
}
