//! Targets of the store beside others, and the verdicts of a run.

use super::cells::{Cell, Op, human};
use super::report::Results;

pub(crate) use crate::peers::targets::plain;

const MIB: u64 = 1 << 20;
/// Most misses that are listed one by one.
const MOST_NAMED: usize = 12;

/// Target: minimum ratio of kvplane's GB/s to another store's, for some cells.
struct Target {
    ours: &'static str,
    theirs: &'static str,
    least: f64,
    cells: &'static str,
    applies: fn(&Cell) -> bool,
}

const ALL: [Target; 7] = [
    target("ours tcp", "mooncake remote", 3.0, "up to 1 MiB", |cell| cell.size <= MIB),
    target("ours tcp", "mooncake remote", 2.0, "above 1 MiB", |cell| cell.size > MIB),
    target("ours tcp", "redis", 1.0, "all", |_| true),
    target("ours tcp", "memcached", 1.0, "all", |_| true),
    target("ours shm", "mooncake dummy", 2.0, "up to 64 KiB", |cell| cell.size <= MIB / 16),
    target("ours shm", "mooncake dummy", 1.0, "above 64 KiB", |cell| cell.size > MIB / 16),
    target("ours shm", "memcpy", 0.9, "from 1 MiB", |cell| cell.size >= MIB),
];

const fn target(
    ours: &'static str,
    theirs: &'static str,
    least: f64,
    cells: &'static str,
    applies: fn(&Cell) -> bool,
) -> Target {
    Target { ours, theirs, least, cells, applies }
}

/// Returns a line for each target of which the run has figures, and the misses.
pub(crate) fn verdicts(results: &Results) -> Vec<String> {
    ALL.iter().filter_map(|target| verdict(results, target)).collect()
}

fn verdict(results: &Results, target: &Target) -> Option<String> {
    let points = results.points().into_iter().filter(|(cell, _)| (target.applies)(cell));
    let ratio = |(cell, op): (Cell, Op)| Some((results.ratio(&cell, op, target.ours, target.theirs)?, cell, op));
    let mut ratios: Vec<(f64, Cell, Op)> = points.filter_map(ratio).collect();
    ratios.sort_by(|one, other| one.0.total_cmp(&other.0));
    let worst = ratios.first()?.0;
    let missed: Vec<String> = ratios
        .iter()
        .filter(|(ratio, ..)| *ratio < target.least)
        .map(|(ratio, cell, op)| {
            format!("{} x {} x {} {} {}", human(cell.size), cell.batch, cell.clients, op.word(), plain(*ratio))
        })
        .collect();
    let word = if missed.is_empty() { "met   " } else { "MISSED" };
    let (met, of) = (ratios.len() - missed.len(), ratios.len());
    let named = missed.iter().take(MOST_NAMED).cloned().collect::<Vec<_>>().join(", ");
    let (ours, theirs, least, cells) = (target.ours, target.theirs, target.least, target.cells);
    let mut text =
        format!("  {word} {met:>2} of {of:>2}  {ours} / {theirs}, {cells}, at least {least}; worst {}", plain(worst));
    if !missed.is_empty() {
        text += &format!("\n           size x batch x clients: {named}");
        let more = missed.len().saturating_sub(MOST_NAMED);
        text += &if more > 0 { format!(", {more} more") } else { String::new() };
    }
    Some(text)
}

/// Returns the side of kvplane that another's line in the table is compared with.
pub(crate) fn counterpart(side: &str) -> Option<&'static str> {
    match side {
        "mooncake dummy" | "memcpy" => Some("ours shm"),
        _ if side.starts_with("ours") => None,
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
            results.push(row("ours tcp", batch, 0, ours));
            results.push(row("mooncake remote", batch, 0, theirs));
        }
        let lines = verdicts(&results);
        assert_eq!(lines.len(), 1);
        assert!(lines[0].starts_with("  MISSED  1 of  2  ours tcp / mooncake remote, up to 1 MiB, at least 3"));
        assert!(lines[0].contains("4 KiB x 16 x 1 get 1.500"), "{}", lines[0]);
    }

    #[test]
    fn every_target_names_sides_that_exist() {
        for target in &ALL {
            assert!([target.ours, target.theirs].iter().all(|name| super::super::NAMES.contains(name)));
        }
    }
}
