//! Comparison of classes of service: goodput, fairness, isolation; as lines and as a record.
//!
//! * goodput: throughput times the fraction of batches within the class's objective;
//! * fairness: Jain's index of throughput by weight (Jain, Chiu and Hawe, 1984): 1 where all classes have their share,
//!   1/n where one has everything;
//! * isolation leakage: throughput that a class lost against a run by itself, as a fraction of that; 0 when it lost
//!   none.
//!
//! Records and lines have the fields of Mooncake's tebench, schema version 1. Its `gbps` are GB/s (10^9 bytes).

use std::fmt::{self, Write as _};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::classes::Class;

/// Measurements of one class.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Sample {
    /// Completed batches.
    pub operations: u64,
    /// Bytes of the completed batches.
    pub transferred_bytes: u64,
    /// Mean of its threads' durations, in seconds.
    pub duration_s: f64,
    /// 99th percentile of the time of a batch, in µs.
    pub p99_us: f64,
    /// Batches within the class's objective.
    pub within_slo: u64,
}

/// Results of one class.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct ClassReport {
    name: String,
    threads: u64,
    slo_us: u64,
    weight: f64,
    operations: u64,
    transferred_bytes: u64,
    throughput_gbps: f64,
    p99_us: f64,
    slo_attainment: Option<f64>,
    goodput_gbps: f64,
    weighted_goodput_gbps: f64,
    isolated_throughput_gbps: Option<f64>,
    isolation_leakage: Option<f64>,
}

/// Results of the classes of one case: one record.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Report {
    schema_version: u32,
    /// Size of a request, in bytes; 0 where classes differ.
    pub block_size: u64,
    /// Number of requests of a batch; 0 where classes differ.
    pub batch_size: u64,
    /// Number of threads of all classes.
    pub num_threads: u64,
    aggregate_throughput_gbps: f64,
    weighted_goodput_gbps: f64,
    jain_fairness: f64,
    max_isolation_leakage: Option<f64>,
    link_capacity_gbps: Option<f64>,
    total_utilization: Option<f64>,
    classes: Vec<ClassReport>,
}

impl ClassReport {
    fn new(class: &Class, sample: &Sample) -> Self {
        let throughput = ratio(sample.transferred_bytes as f64 / 1e9, sample.duration_s);
        let attained = (class.slo_us > 0).then(|| ratio(sample.within_slo as f64, sample.operations as f64));
        let goodput = throughput * attained.unwrap_or(1.0);
        Self {
            name: class.name.clone(),
            threads: class.threads,
            slo_us: class.slo_us,
            weight: class.weight,
            operations: sample.operations,
            transferred_bytes: sample.transferred_bytes,
            throughput_gbps: throughput,
            p99_us: sample.p99_us,
            slo_attainment: attained,
            goodput_gbps: goodput,
            weighted_goodput_gbps: goodput * class.weight,
            isolated_throughput_gbps: class.isolated_gb_s,
            isolation_leakage: class.isolated_gb_s.map(|alone| (1.0 - throughput / alone).max(0.0)),
        }
    }
}

impl Report {
    /// Summarizes a case: each class with its sample. `block_size` and `batch_size` are 0 where classes differ in them;
    /// `link_gb_s` is the link's capacity, 0 if unknown.
    #[must_use]
    pub fn new(block_size: u64, batch_size: u64, classes: &[(Class, Sample)], link_gb_s: f64) -> Self {
        let reports: Vec<_> = classes.iter().map(|(class, sample)| ClassReport::new(class, sample)).collect();
        let shares: Vec<f64> = reports.iter().map(|report| report.throughput_gbps / report.weight).collect();
        let aggregate = reports.iter().map(|report| report.throughput_gbps).sum();
        let link_capacity_gbps = (link_gb_s > 0.0).then_some(link_gb_s);
        Self {
            schema_version: 1,
            block_size,
            batch_size,
            num_threads: reports.iter().map(|report| report.threads).sum(),
            aggregate_throughput_gbps: aggregate,
            weighted_goodput_gbps: reports.iter().map(|report| report.weighted_goodput_gbps).sum(),
            jain_fairness: jain_index(&shares),
            max_isolation_leakage: reports.iter().filter_map(|report| report.isolation_leakage).reduce(f64::max),
            link_capacity_gbps,
            total_utilization: link_capacity_gbps.map(|capacity| aggregate / capacity),
            classes: reports,
        }
    }

    /// Formats the lines for operators and scripts, without a last line feed.
    #[must_use]
    pub fn lines(&self) -> String {
        let shown = |value: Option<f64>| value.map_or_else(|| "N/A".to_owned(), |value| format!("{value:.6}"));
        let mut text = format!(
            "  [qos-summary] throughput={:.6} GB/s weighted_goodput={:.6} GB/s jain_fairness={:.6} \
             max_isolation_leakage={} total_utilization={}",
            self.aggregate_throughput_gbps,
            self.weighted_goodput_gbps,
            self.jain_fairness,
            shown(self.max_isolation_leakage),
            shown(self.total_utilization)
        );
        for class in &self.classes {
            // Writing to a string does not fail.
            let _ = write!(
                text,
                "\n  [qos-class] name={} threads={} operations={} transferred_bytes={} throughput={:.6} GB/s \
                 p99_us={:.1} slo_attainment={} isolation_leakage={}",
                class.name,
                class.threads,
                class.operations,
                class.transferred_bytes,
                class.throughput_gbps,
                class.p99_us,
                shown(class.slo_attainment),
                shown(class.isolation_leakage)
            );
        }
        text
    }

    /// Appends the record as one line to a file; blocks on file I/O.
    ///
    /// # Errors
    /// Returns the error of the file system, with the path.
    pub fn append(&self, path: &Path) -> Result<(), AppendError> {
        let failed = |source| AppendError { path: path.to_owned(), source };
        let line = serde_json::to_string(self).map_err(|error| failed(error.into()))?;
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        // The line is one write, so that concurrent runs do not mix their lines.
        file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes())).map_err(failed)
    }
}

/// Error of appending a record to a file.
#[derive(Debug)]
pub struct AppendError {
    /// Path of the file.
    pub path: PathBuf,
    /// Error of the file system.
    pub source: io::Error,
}

impl fmt::Display for AppendError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (path, source) = (self.path.display(), &self.source);
        write!(f, "cannot append to {path}: {source}")
    }
}

impl std::error::Error for AppendError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

/// Returns Jain's index: the square of the sum divided by n times the sum of squares; 0 if all values are 0.
#[must_use]
pub fn jain_index(values: &[f64]) -> f64 {
    let sum: f64 = values.iter().sum();
    let squares: f64 = values.iter().map(|value| value * value).sum();
    ratio(sum * sum, values.len() as f64 * squares)
}

fn ratio(part: f64, whole: f64) -> f64 {
    if whole > 0.0 { part / whole } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    fn class(name: &str, slo_us: u64, weight: f64, isolated_gb_s: Option<f64>) -> Class {
        Class { name: name.to_owned(), threads: 1, slo_us, weight, isolated_gb_s }
    }

    fn sample(gigabytes: u64, within_slo: u64) -> Sample {
        let transferred_bytes = gigabytes * 1_000_000_000;
        Sample { operations: 100, transferred_bytes, duration_s: 2.0, p99_us: 12.34, within_slo }
    }

    fn report() -> Report {
        let classes =
            [(class("gold", 50, 3.0, Some(4.0)), sample(6, 80)), (class("bulk", 0, 1.0, Some(0.5)), sample(2, 0))];
        Report::new(4096, 8, &classes, 16.0)
    }

    #[test]
    fn two_classes_by_hand() {
        let report = report();
        let figures = [report.aggregate_throughput_gbps, report.weighted_goodput_gbps, report.jain_fairness];
        // Gold has 3 GB/s of which 80 % count, three times; bulk 1 GB/s: each has one GB/s for each unit of weight.
        assert!((figures[0] - 4.0).abs() < 1e-9 && (figures[1] - 8.2).abs() < 1e-9, "{figures:?}");
        assert!((figures[2] - 1.0).abs() < 1e-9, "{figures:?}");
        assert_eq!((report.max_isolation_leakage, report.total_utilization), (Some(0.25), Some(0.25)));
        assert_eq!(report.classes[1].isolation_leakage, Some(0.0), "gains are no leakage");
    }

    #[test]
    fn lines_and_record_have_the_known_fields() {
        let lines = report().lines();
        let expected = "  [qos-summary] throughput=4.000000 GB/s weighted_goodput=8.200000 GB/s \
            jain_fairness=1.000000 max_isolation_leakage=0.250000 total_utilization=0.250000\n  \
            [qos-class] name=gold threads=1 operations=100 transferred_bytes=6000000000 throughput=3.000000 GB/s \
            p99_us=12.3 slo_attainment=0.800000 isolation_leakage=0.250000\n  \
            [qos-class] name=bulk threads=1 operations=100 transferred_bytes=2000000000 throughput=1.000000 GB/s \
            p99_us=12.3 slo_attainment=N/A isolation_leakage=0.000000";
        assert_eq!(lines, expected);
        let record: Value = serde_json::to_value(report()).unwrap();
        assert_eq!((&record["schema_version"], &record["block_size"]), (&1.into(), &4096.into()));
        assert_eq!((&record["num_threads"], &record["batch_size"]), (&2.into(), &8.into()));
        assert_eq!(record["classes"][0]["goodput_gbps"].as_f64().map(|value| (value * 10.0).round()), Some(24.0));
        assert_eq!(record["classes"][1]["slo_attainment"], Value::Null);
        let unknown = Report::new(0, 0, &[(class("a", 0, 1.0, None), Sample::default())], 0.0);
        let unknown: Value = serde_json::to_value(unknown).unwrap();
        for field in ["max_isolation_leakage", "link_capacity_gbps", "total_utilization"] {
            assert_eq!(unknown[field], Value::Null, "{field}");
        }
    }

    proptest! {
        #[test]
        fn the_index_is_between_one_nth_and_one(values in proptest::collection::vec(0.001f64..1e6, 1..20)) {
            let index = jain_index(&values);
            prop_assert!(index <= 1.0 + 1e-9 && index >= 1.0 / values.len() as f64 - 1e-9, "{index}");
            let doubled: Vec<f64> = values.iter().map(|value| value * 2.0).collect();
            prop_assert!((jain_index(&doubled) - index).abs() < 1e-9);
        }
    }

    #[test]
    fn the_index_at_its_ends() {
        assert_eq!((jain_index(&[]), jain_index(&[0.0, 0.0])), (0.0, 0.0));
        assert_eq!((jain_index(&[5.0, 5.0, 5.0, 5.0]), jain_index(&[7.0, 0.0, 0.0, 0.0])), (1.0, 0.25));
    }
}
