//! Targets of the transfer engine, each with its cells, and the verdicts of a run.

use super::cells::{Cell, Op, SCATTER};
use super::report::Results;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// Most misses that are listed one by one.
const MOST_NAMED: usize = 6;

/// Compared figure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Metric {
    /// Throughput in GB/s.
    Throughput,
    /// Median time of a call.
    P50,
    /// CPU seconds per GB, of both processes.
    Cpu,
}

impl Metric {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Throughput => "GB/s",
            Self::P50 => "p50",
            Self::Cpu => "CPU per GB",
        }
    }
}

/// Bound on a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ValueLimit {
    /// Minimum.
    AtLeast(f64),
    /// Maximum.
    AtMost(f64),
}

impl ValueLimit {
    /// Returns true if a value is within the bound.
    pub(crate) fn holds(self, value: f64) -> bool {
        match self {
            Self::AtLeast(bound) => value >= bound,
            Self::AtMost(bound) => value <= bound,
        }
    }

    /// Returns the margin of a value: above 1 the bound is met.
    fn margin(self, value: f64) -> f64 {
        match self {
            Self::AtLeast(bound) => value / bound,
            Self::AtMost(bound) => bound / value.max(1e-12),
        }
    }
}

impl std::fmt::Display for ValueLimit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::AtLeast(bound) => write!(f, "at least {bound}"),
            Self::AtMost(bound) => write!(f, "at most {bound}"),
        }
    }
}

/// Target: kvplane against a peer, as a ratio, or kvplane alone.
pub(crate) struct Target {
    pub(crate) ours: &'static [&'static str],
    /// Peer; `None` for an absolute value: blocks per second for throughput, µs for latency.
    pub(crate) peer: Option<&'static str>,
    pub(crate) metric: Metric,
    pub(crate) wanted: ValueLimit,
    /// Cells of the target, in words and as a condition.
    pub(crate) cells: &'static str,
    pub(crate) applies: fn(&Cell) -> bool,
}

const TCP: &[&str] = &["ours tcp"];
const TCP_PARKED: &[&str] = &["ours tcp parked"];
const TCP_BOTH: &[&str] = &["ours tcp", "ours tcp parked"];
const SAME_HOST: &[&str] = &["ours shm", "ours cma"];
const MAPPED: &[&str] = &["ours shm"];

const fn everywhere(_: &Cell) -> bool {
    true
}

const fn scatter(cell: &Cell) -> bool {
    cell.block_bytes == SCATTER.0 && cell.batch == SCATTER.1
}

/// All targets.
pub(crate) const ALL: [Target; 15] = [
    ratio(TCP_BOTH, "mooncake tcp", Metric::Throughput, ValueLimit::AtLeast(2.0), "all", everywhere),
    ratio(TCP_BOTH, "mooncake tcp", Metric::P50, ValueLimit::AtMost(0.333), "4 KiB and 64 KiB", |cell| {
        cell.block_bytes <= 64 * KIB
    }),
    ratio(TCP_BOTH, "mooncake tcp", Metric::Cpu, ValueLimit::AtMost(0.5), "all", everywhere),
    ratio(TCP_BOTH, "mooncake tcp", Metric::Throughput, ValueLimit::AtLeast(10.0), "4 KiB x 1024", scatter),
    ratio(TCP, "nixl tcp", Metric::Throughput, ValueLimit::AtLeast(1.0), "all", everywhere),
    ratio(TCP, "ucx tcp", Metric::Throughput, ValueLimit::AtLeast(1.0), "reads x 1; writes from x 16", like_perftest),
    ratio(TCP_BOTH, "gloo", Metric::Throughput, ValueLimit::AtLeast(1.0), "all", everywhere),
    ratio(TCP, "iperf3", Metric::Throughput, ValueLimit::AtLeast(0.95), "from 64 KiB x 16", |cell| {
        cell.block_bytes >= 64 * KIB && cell.batch >= 16
    }),
    alone(TCP, Metric::Throughput, ValueLimit::AtLeast(250_000.0), "4 KiB x 128, blocks/s", |cell| {
        cell.block_bytes == 4 * KIB && cell.batch == 128
    }),
    ratio(TCP, "raw spinning", Metric::P50, ValueLimit::AtMost(1.3), "4 KiB x 1", small_single),
    ratio(TCP_PARKED, "raw blocking", Metric::P50, ValueLimit::AtMost(1.0), "4 KiB x 1", small_single),
    ratio(SAME_HOST, "nixl auto", Metric::Throughput, ValueLimit::AtLeast(1.0), "all", everywhere),
    ratio(
        SAME_HOST,
        "ucx shm",
        Metric::Throughput,
        ValueLimit::AtLeast(1.0),
        "reads x 1; writes from x 16",
        like_perftest,
    ),
    ratio(MAPPED, "memcpy", Metric::Throughput, ValueLimit::AtLeast(0.9), "from 1 MiB", |cell| cell.block_bytes >= MIB),
    alone(MAPPED, Metric::P50, ValueLimit::AtMost(2.5), "4 KiB x 1, µs", small_single),
];

const fn small_single(cell: &Cell) -> bool {
    cell.block_bytes == 4 * KIB && cell.batch == 1
}

/// Returns true for cells that are comparable with perftest, whose puts are a stream and whose gets come one by one.
fn like_perftest(cell: &Cell) -> bool {
    match cell.op {
        Op::Read => cell.batch == 1,
        Op::Write => cell.batch > 1,
    }
}

const fn ratio(
    ours: &'static [&'static str],
    peer: &'static str,
    metric: Metric,
    wanted: ValueLimit,
    cells: &'static str,
    applies: fn(&Cell) -> bool,
) -> Target {
    Target { ours, peer: Some(peer), metric, wanted, cells, applies }
}

const fn alone(
    ours: &'static [&'static str],
    metric: Metric,
    wanted: ValueLimit,
    cells: &'static str,
    applies: fn(&Cell) -> bool,
) -> Target {
    Target { ours, peer: None, metric, wanted, cells, applies }
}

/// Verdict of a run on a target with one side of kvplane.
#[derive(Debug, PartialEq)]
pub(crate) struct Verdict {
    pub(crate) title: String,
    pub(crate) met: usize,
    pub(crate) of: usize,
    /// Cells that missed the target, with their values; the worst first.
    pub(crate) missed: Vec<String>,
    /// Cell closest to the bound, or farthest beyond it.
    pub(crate) worst: String,
}

impl Verdict {
    /// Formats the verdict on a line, and the misses below it.
    pub(crate) fn text(&self) -> String {
        let word = if self.met == self.of { "met   " } else { "MISSED" };
        let mut text = format!("  {word} {:>2} of {:>2}  {}; worst {}\n", self.met, self.of, self.title, self.worst);
        if self.missed.len() > 1 {
            let named = self.missed.iter().take(MOST_NAMED).cloned().collect::<Vec<_>>().join(", ");
            let more = self.missed.len().saturating_sub(MOST_NAMED);
            text += &format!("           {named}{}\n", if more > 0 { format!(", {more} more") } else { String::new() });
        }
        text
    }
}

/// Returns the verdicts on all targets for which the run has figures.
pub(crate) fn verdicts(results: &Results) -> Vec<Verdict> {
    let pairs = ALL.iter().flat_map(|target| target.ours.iter().map(move |ours| (target, *ours)));
    pairs.filter_map(|(target, ours)| verdict(results, target, ours)).collect()
}

fn verdict(results: &Results, target: &Target, ours: &str) -> Option<Verdict> {
    let cells = results.cells().into_iter().filter(|cell| (target.applies)(cell));
    let value = |cell: &Cell| match target.peer {
        Some(peer) => results.ratio(cell, ours, peer, target.metric),
        None => results.alone(cell, ours, target.metric),
    };
    let mut values: Vec<(Cell, f64)> = cells.filter_map(|cell| Some((cell, value(&cell)?))).collect();
    values.sort_by(|a, b| target.wanted.margin(a.1).total_cmp(&target.wanted.margin(b.1)));
    let shown = |(cell, value): &(Cell, f64)| format!("{cell}: {}", plain(*value));
    let worst = shown(values.first()?);
    let missed: Vec<String> = values.iter().filter(|(_, value)| !target.wanted.holds(*value)).map(shown).collect();
    let against = target.peer.map_or_else(String::new, |peer| format!(" / {peer}"));
    let title = format!("{ours}{against}, {}, {}, {}", target.metric.name(), target.cells, target.wanted);
    Some(Verdict { title, met: values.len() - missed.len(), of: values.len(), missed, worst })
}

/// Formats a value with three significant digits.
pub(crate) fn plain(value: f64) -> String {
    match value {
        value if value >= 1000.0 => format!("{value:.0}"),
        value if value >= 100.0 => format!("{value:.1}"),
        value if value >= 10.0 => format!("{value:.2}"),
        value => format!("{value:.3}"),
    }
}

/// Returns the side of kvplane that a peer's line in the table is compared with.
pub(crate) fn counterpart(peer: &str) -> Option<&'static str> {
    match peer {
        "gloo" | "raw blocking" => Some("ours tcp parked"),
        "nixl auto" | "ucx shm" | "memcpy" => Some("ours shm"),
        _ if peer.starts_with("ours") => None,
        _ => Some("ours tcp"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::tests::row;
    use super::*;

    #[test]
    fn a_miss_is_named_with_its_value() {
        let mut results = Results::default();
        for (batch, ours, theirs) in [(1, 4.0, 1.0), (16, 3.0, 2.0)] {
            results.push(row("ours tcp", batch, 0, ours, 5.0));
            results.push(row("mooncake tcp", batch, 0, theirs, 50.0));
        }
        let verdicts = verdicts(&results);
        let throughput = &verdicts[0];
        assert_eq!((throughput.met, throughput.of), (1, 2));
        assert_eq!(throughput.missed, ["4 KiB x 16 read: 1.500"]);
        assert!(throughput.text().starts_with("  MISSED  1 of  2  ours tcp / mooncake tcp, GB/s, all, at least 2"));
        let p50 = verdicts.iter().find(|verdict| verdict.title.contains("p50")).unwrap();
        assert_eq!((p50.met, p50.of), (2, 2));
    }

    #[test]
    fn every_target_names_sides_that_exist() {
        for target in &ALL {
            assert!(target.ours.iter().chain(&target.peer).all(|name| super::super::NAMES.contains(name)));
            assert!(!target.cells.is_empty() && target.wanted.margin(1.0) > 0.0);
        }
    }
}
