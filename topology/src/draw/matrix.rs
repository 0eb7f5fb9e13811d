//! The rail matrix as a text table, and the reasons of all choices.

use super::{ROW_CHARACTERS, printable};
use crate::plan::ShardPlan;
use crate::rails::{Nearness, RailMatrix, Row, Tier, gigabits};

/// Formats one row per location and one column per rail, split into as many tables as the width requires; empty without
/// rails.
pub(super) fn table(matrix: &RailMatrix) -> String {
    if matrix.rails.is_empty() {
        return String::new();
    }
    let head = |name: &str| printable(name).chars().count();
    let first = matrix.rows.iter().map(|row| head(&row.location.to_string())).max().unwrap_or(0);
    let column = matrix.rails.iter().map(|rail| head(&rail.name)).max().unwrap_or(0).max(6);
    let per_table = ((ROW_CHARACTERS - first - 2) / (column + 1)).max(1);
    let mut out = String::from("rails: number of the tier, and how near the NIC is to the memory\n");
    for rails in matrix.rails.chunks(per_table) {
        let line = |out: &mut String, name: &str, cells: Vec<String>| {
            let cells: String = cells.iter().map(|cell| format!(" {cell:column$}")).collect();
            out.push_str(format!("  {name:first$}{cells}").trim_end());
            out.push('\n');
        };
        line(&mut out, "", rails.iter().map(|rail| printable(&rail.name)).collect());
        let speed = |rail: &crate::rails::Rail| {
            rail.speed_mbps.map_or("?".to_owned(), |mbps| gigabits(mbps).replace("b/s", ""))
        };
        line(&mut out, "", rails.iter().map(speed).collect());
        for row in &matrix.rows {
            let cells = rails.iter().map(|rail| cell(row, &rail.name)).collect();
            line(&mut out, &row.location.to_string(), cells);
        }
    }
    out.push_str(
        "sw: same PCI switch  root: same root complex  node: same NUMA node  dN: other node at distance N\n\
         ?: node unknown  =: as given  (): held back, slower than half of the fastest\n",
    );
    out
}

/// Formats a cell: the tier's number and a short word, such as `1 sw`.
fn cell(row: &Row, rail: &str) -> String {
    let Some(index) = tier_of(row, rail) else { return "-".to_owned() };
    let tier = &row.tiers[index];
    let word = match (tier.nearness, tier.distance) {
        (Nearness::SameSwitch, _) => "sw".to_owned(),
        (Nearness::SameRootComplex, _) => "root".to_owned(),
        (Nearness::SameNode, _) => "node".to_owned(),
        (Nearness::NodeUnknown, _) => "?".to_owned(),
        (Nearness::OtherNode, Some(distance)) => format!("d{distance}"),
        (Nearness::OtherNode, None) => "far".to_owned(),
        (Nearness::Given, _) => "=".to_owned(),
    };
    if tier.slow { format!("({} {word})", index + 1) } else { format!("{} {word}", index + 1) }
}

/// Returns the index of the tier that contains a rail.
pub(super) fn tier_of(row: &Row, rail: &str) -> Option<usize> {
    row.tiers.iter().position(|tier| tier.rails.iter().any(|one| one == rail))
}

/// Formats the reasons for each shard's placement and for each tier, in lines that end with a line feed.
#[must_use]
pub fn why(plan: &ShardPlan, matrix: &RailMatrix) -> String {
    let mut out = String::from("reasons for the placement of shards\n");
    for seat in &plan.shards {
        out.push_str(&format!("  shard {}: {}\n", seat.shard, printable(&seat.reason)));
    }
    for note in &plan.notes {
        out.push_str(&format!("  {}\n", printable(note)));
    }
    if !matrix.rails.is_empty() {
        out.push_str("reasons for the tiers of rails\n");
    }
    for row in matrix.rows.iter().filter(|row| !row.tiers.is_empty()) {
        out.push_str(&format!("  {}\n", row.location));
        for (index, tier) in row.tiers.iter().enumerate() {
            out.push_str(&tier_line(index, tier));
        }
    }
    for excluded in &matrix.excluded {
        out.push_str(&format!("  left out: {}: {}\n", printable(&excluded.name), printable(&excluded.reason)));
    }
    out
}

fn tier_line(index: usize, tier: &Tier) -> String {
    let rails: Vec<String> = tier.rails.iter().map(|rail| printable(rail)).collect();
    format!("    {}. {}: {}\n", index + 1, rails.join(" "), printable(&tier.reason))
}
