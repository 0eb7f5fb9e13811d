//! Result rows and their tables: medians over the rounds, kvplane divided by others in the same round.

use serde_json::{Value, json};

use super::NAMES;
use super::cells::{Cell, Op};
use super::targets::{counterpart, plain};
use crate::peers::meter::Usage;
use crate::rounds::median;

/// Figures of a cell, of all clients of a side together.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Figures {
    pub(crate) calls: u64,
    pub(crate) seconds: f64,
    /// Throughput in GB/s (10^9 bytes).
    pub(crate) gb_s: f64,
    /// Median and 99th percentile of a call, the mean over the clients.
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
}

/// Measurement.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) side: &'static str,
    pub(crate) cell: Cell,
    pub(crate) op: Op,
    pub(crate) round: usize,
    pub(crate) figures: Figures,
    pub(crate) usage: Usage,
}

impl Row {
    /// Returns the CPU seconds of clients and servers per GB.
    pub(crate) fn cpu_s_per_gb(&self) -> f64 {
        self.usage.own_s / (self.figures.gb_s * self.figures.seconds).max(1e-12)
    }

    fn objects_s(&self) -> f64 {
        self.figures.gb_s * 1e9 / self.cell.size as f64
    }

    pub(crate) fn to_json(&self) -> Value {
        let (figures, usage, cell) = (&self.figures, &self.usage, &self.cell);
        json!({
            "peer": self.side, "case": self.op.word(), "size": cell.size, "batch": cell.batch,
            "clients": cell.clients, "round": self.round, "calls": figures.calls, "secs": figures.seconds,
            "GBps": figures.gb_s, "ops_s": self.objects_s(), "p50_us": figures.p50_us, "p99_us": figures.p99_us,
            "cpu_s_per_GB": self.cpu_s_per_gb(), "foreign_cores": usage.foreign_cores,
            "steal_cores": usage.steal_cores,
        })
    }
}

type Take = fn(&Row) -> f64;
const GB_S: Take = |row| row.figures.gb_s;
const CPU: Take = Row::cpu_s_per_gb;

/// All rows of a run.
#[derive(Default)]
pub(crate) struct Results {
    rows: Vec<Row>,
}

impl Results {
    pub(crate) fn push(&mut self, row: Row) {
        self.rows.push(row);
    }

    /// Returns the measured points, in order.
    pub(crate) fn points(&self) -> Vec<(Cell, Op)> {
        let mut points = Vec::new();
        for row in &self.rows {
            if !points.contains(&(row.cell, row.op)) {
                points.push((row.cell, row.op));
            }
        }
        points
    }

    fn of<'a>(&'a self, cell: &'a Cell, op: Op, side: &'a str) -> impl Iterator<Item = &'a Row> {
        self.rows.iter().filter(move |row| row.cell == *cell && row.op == op && row.side == side)
    }

    fn median(&self, cell: &Cell, op: Op, side: &str, take: Take) -> Option<f64> {
        let mut values: Vec<f64> = self.of(cell, op, side).map(take).collect();
        if values.is_empty() { None } else { Some(median(&mut values)) }
    }

    /// Returns the median over rounds of kvplane divided by the other store, in GB/s.
    pub(crate) fn ratio(&self, cell: &Cell, op: Op, ours: &str, theirs: &str) -> Option<f64> {
        self.ratio_of(cell, op, ours, theirs, GB_S)
    }

    fn ratio_of(&self, cell: &Cell, op: Op, ours: &str, theirs: &str, take: Take) -> Option<f64> {
        let pair =
            |row: &Row| Some(take(row) / self.of(cell, op, theirs).find(|other| other.round == row.round).map(take)?);
        let mut ratios: Vec<f64> = self.of(cell, op, ours).filter_map(pair).collect();
        if ratios.is_empty() { None } else { Some(median(&mut ratios)) }
    }

    /// Formats a line for each side, with kvplane's ratio behind the others.
    pub(crate) fn table(&self, cell: &Cell, op: Op) -> String {
        let mut text = format!("{cell}, {}\n", op.word());
        for side in NAMES {
            let Some(gb_s) = self.median(cell, op, side, GB_S) else { continue };
            let number = |take: Take| self.median(cell, op, side, take).map_or_else(String::new, plain);
            text += &format!(
                "  {side:<16} {:>8} {:>10} {:>9} {:>10} {:>9} {:>8}",
                plain(gb_s),
                number(Row::objects_s),
                number(|row| row.figures.p50_us),
                number(|row| row.figures.p99_us),
                number(CPU),
                number(|row| row.usage.foreign_cores),
            );
            if let Some(ours) = counterpart(side) {
                let ratio = |take| self.ratio_of(cell, op, ours, side, take).map_or_else(String::new, plain);
                text += &format!("  {:>8} {:>8}  {ours}", ratio(GB_S), ratio(CPU));
            }
            text.push('\n');
        }
        text
    }

    /// Formats two tables, a line for each point and a column for each side.
    pub(crate) fn markdown(&self) -> String {
        let sides: Vec<&str> = NAMES.into_iter().filter(|name| self.rows.iter().any(|row| row.side == *name)).collect();
        let mut text = String::new();
        for (title, take) in [("GB/s", GB_S), ("CPU seconds of clients and server per GB", CPU)] {
            text += &format!("{title}:\n\n| | {} |\n|---|{}\n", sides.join(" | "), "---|".repeat(sides.len()));
            for (cell, op) in self.points() {
                let figure = |side: &&str| self.median(&cell, op, side, take).map_or_else(|| "–".to_owned(), plain);
                let figures: Vec<String> = sides.iter().map(figure).collect();
                text += &format!("| {cell}, {} | {} |\n", op.word(), figures.join(" | "));
            }
            text.push('\n');
        }
        text
    }
}

/// Formats the line above the tables.
pub(crate) fn header() -> String {
    format!(
        "  {:<16} {:>8} {:>10} {:>9} {:>10} {:>9} {:>8}  {:>8} {:>8}  of",
        "", "GB/s", "objects/s", "p50 us", "p99 us", "CPU s/GB", "foreign", "GB/s /", "CPU /"
    )
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn row(side: &'static str, batch: u64, round: usize, gb_s: f64) -> Row {
        let cell = Cell { size: 4096, batch, clients: 1 };
        let figures = Figures { calls: 9, seconds: 1.0, gb_s, p50_us: 5.0, p99_us: 9.0 };
        let usage = Usage { own_s: 1.0, foreign_cores: 0.5, steal_cores: 0.0 };
        Row { side, cell, op: Op::Get, round, figures, usage }
    }

    #[test]
    fn ratios_are_of_the_same_round() {
        let mut results = Results::default();
        for (round, (ours, theirs)) in [(2.0, 1.0), (9.0, 3.0), (4.0, 1.0)].into_iter().enumerate() {
            results.push(row("ours tcp", 1, round, ours));
            results.push(row("redis", 1, round, theirs));
        }
        let (cell, op) = results.points()[0];
        assert_eq!(results.ratio(&cell, op, "ours tcp", "redis"), Some(3.0));
        assert_eq!(results.ratio(&cell, op, "ours tcp", "memcached"), None);
        assert!(results.markdown().contains("| 4 KiB x 1, 1 client, get | 4.000 | 1.000 |"));
        assert!(results.table(&cell, op).lines().nth(2).unwrap().ends_with("ours tcp"));
    }
}
