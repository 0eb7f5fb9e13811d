//! Table of the results: kvplane and peers for each cell, medians over the rounds, and the same as Markdown.

use super::cells::{Cell, human};
use super::row::Row;
use super::targets::{self, Metric, plain};
use crate::rounds::median;

/// Getter of a figure of a row.
type Take = fn(&Row) -> Option<f64>;

/// All rows of a run.
#[derive(Default)]
pub(crate) struct Results {
    rows: Vec<Row>,
}

impl Results {
    pub(crate) fn push(&mut self, row: Row) {
        self.rows.push(row);
    }

    /// Returns the measured cells, in order.
    pub(crate) fn cells(&self) -> Vec<Cell> {
        let mut cells = Vec::new();
        for row in &self.rows {
            if !cells.contains(&row.cell) {
                cells.push(row.cell);
            }
        }
        cells
    }

    /// Returns the sides that have figures, in order.
    pub(crate) fn sides(&self) -> Vec<&'static str> {
        let present = |name: &&&str| self.rows.iter().any(|row| row.side == **name);
        super::NAMES.iter().filter(present).copied().collect()
    }

    /// Returns a side's rows of a cell: those taken while the machine was quiet, or all if there are none.
    fn of(&self, cell: &Cell, side: &str) -> Vec<&Row> {
        let rows: Vec<&Row> = self.rows.iter().filter(|row| row.cell == *cell && row.side == side).collect();
        let quiet: Vec<&Row> = rows.iter().copied().filter(|row| row.usage.is_quiet()).collect();
        if quiet.is_empty() { rows } else { quiet }
    }

    /// Returns the median over rounds of the `value` of the rows.
    fn median(&self, cell: &Cell, side: &str, value: impl Fn(&Row) -> Option<f64>) -> Option<f64> {
        let mut values: Vec<f64> = self.of(cell, side).into_iter().filter_map(value).collect();
        if values.is_empty() { None } else { Some(median(&mut values)) }
    }

    /// Returns the median over rounds of kvplane's value divided by the peer's in the same round; over the quiet rounds
    /// if there are any.
    pub(crate) fn ratio(&self, cell: &Cell, ours: &str, peer: &str, metric: Metric) -> Option<f64> {
        let all = |side| self.rows.iter().filter(move |row| row.cell == *cell && row.side == side);
        let mut pairs: Vec<(bool, f64)> = Vec::new();
        for row in all(ours) {
            let Some(theirs) = all(peer).find(|theirs| theirs.round == row.round) else { continue };
            let values = value(row, metric).zip(value(theirs, metric)).filter(|(_, theirs)| *theirs > 0.0);
            let quiet = row.usage.is_quiet() && theirs.usage.is_quiet();
            pairs.extend(values.map(|(ours, theirs)| (quiet, ours / theirs)));
        }
        let any_quiet = pairs.iter().any(|(quiet, _)| *quiet);
        let mut ratios: Vec<f64> = pairs.iter().filter(|pair| pair.0 == any_quiet).map(|pair| pair.1).collect();
        if ratios.is_empty() { None } else { Some(median(&mut ratios)) }
    }

    /// Returns the median of kvplane's value alone: blocks per second for throughput.
    pub(crate) fn alone(&self, cell: &Cell, ours: &str, metric: Metric) -> Option<f64> {
        self.median(cell, ours, |row| match metric {
            Metric::Throughput => Some(row.blocks_s()),
            _ => value(row, metric),
        })
    }

    /// Formats the table of one cell: a line for each side, kvplane's first, with the ratio to each peer behind it.
    pub(crate) fn table(&self, cell: &Cell) -> String {
        let mut text = format!("{cell}\n");
        for side in self.sides() {
            let Some(gb_s) = self.median(cell, side, |row| Some(row.figures.gb_s)) else { continue };
            let number = |value: Option<f64>| value.map_or_else(|| String::from("-"), plain);
            let quiet = self.of(cell, side).iter().all(|row| row.usage.is_quiet());
            let foreign = self.median(cell, side, |row| Some(row.usage.foreign_cores)).unwrap_or(0.0);
            let pacing = self.of(cell, side).first().map_or("", |row| row.pacing);
            text += &format!(
                "  {side:<16} {pacing:<16} {:>8} {:>10} {:>10} {:>10} {:>9} {foreign:>7.2}{}",
                plain(gb_s),
                number(self.median(cell, side, |row| Some(row.blocks_s()))),
                number(self.median(cell, side, |row| row.figures.p50_us)),
                number(self.median(cell, side, |row| row.figures.p99_us)),
                number(self.median(cell, side, |row| Some(row.cpu_s_per_gb()))),
                if quiet { ' ' } else { '*' },
            );
            if let Some(ours) = targets::counterpart(side) {
                let ratio = |metric| number(self.ratio(cell, ours, side, metric));
                let (gb_s, p50, cpu) = (ratio(Metric::Throughput), ratio(Metric::P50), ratio(Metric::Cpu));
                text += &format!("  {gb_s:>8} {p50:>7} {cpu:>7}  {ours}");
            }
            text = format!("{}\n", text.trim_end());
        }
        text
    }

    /// Formats three tables, a line for each cell and a column for each side.
    pub(crate) fn markdown(&self) -> String {
        let sides = self.sides();
        let mut text = String::new();
        let figures: [(&str, Take); 3] = [
            ("GB/s", |row| Some(row.figures.gb_s)),
            ("p50 of a call, µs", |row| row.figures.p50_us),
            ("CPU seconds of both processes per GB", |row| Some(row.cpu_s_per_gb())),
        ];
        for (title, value) in figures {
            text += &format!("{title}:\n\n| | {} |\n|---|{}\n", sides.join(" | "), "---|".repeat(sides.len()));
            for cell in self.cells() {
                let name = format!("{} × {} {}", human(cell.block_bytes), cell.batch, cell.op.word());
                let figure = |side: &&str| self.median(&cell, side, value).map_or_else(|| "–".to_owned(), plain);
                let figures: Vec<String> = sides.iter().map(figure).collect();
                text += &format!("| {name} | {} |\n", figures.join(" | "));
            }
            text.push('\n');
        }
        text
    }
}

/// Formats the line above the tables.
pub(crate) fn header() -> String {
    format!(
        "  {:<16} {:<16} {:>8} {:>10} {:>10} {:>10} {:>9} {:>7}   {:>8} {:>7} {:>7}  of",
        "", "waits by", "GB/s", "blocks/s", "p50 us", "p99 us", "CPU s/GB", "foreign", "GB/s /", "p50 /", "CPU /"
    )
}

fn value(row: &Row, metric: Metric) -> Option<f64> {
    match metric {
        Metric::Throughput => Some(row.figures.gb_s),
        Metric::P50 => row.figures.p50_us,
        Metric::Cpu => Some(row.cpu_s_per_gb()),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::cells::Op;
    use super::super::meter::Usage;
    use super::super::row::Figures;
    use super::*;

    /// Builds a row of reads of 4 KiB blocks.
    pub(crate) fn row(side: &'static str, batch: u64, round: usize, gb_s: f64, p50_us: f64) -> Row {
        let cell = Cell { op: Op::Read, block_bytes: 4096, batch };
        let figures = Figures { calls: 9, seconds: 1.0, gb_s, p50_us: Some(p50_us), p99_us: None };
        let usage = Usage { own_s: 1.0, foreign_cores: 0.5, steal_cores: 0.0 };
        Row { side, version: "1".to_owned(), pacing: "spin", cell, round, figures, usage }
    }

    fn results() -> Results {
        let mut results = Results::default();
        for (round, (ours, theirs)) in [(2.0, 1.0), (9.0, 3.0), (4.0, 1.0)].into_iter().enumerate() {
            results.push(row("ours tcp", 1, round, ours, 5.0));
            results.push(row("mooncake tcp", 1, round, theirs, 50.0));
        }
        results
    }

    #[test]
    fn ratios_are_of_the_same_round() {
        let results = results();
        let cell = results.cells()[0];
        assert_eq!(results.ratio(&cell, "ours tcp", "mooncake tcp", Metric::Throughput), Some(3.0));
        assert_eq!(results.ratio(&cell, "ours tcp", "gloo", Metric::P50), None);
    }

    #[test]
    fn columns_stand_below_their_names() {
        let table = results().table(&results().cells()[0]);
        let header = header();
        let lines: Vec<&str> = table.lines().collect();
        assert_eq!(lines[0], "4 KiB x 1 read");
        let end = header.find("GB/s").unwrap() + 4;
        assert!(lines[1].starts_with("  ours tcp ") && lines[1][..end].ends_with(" 4.000"), "{table}");
        assert!(lines[2].contains("0.50*") && lines[2].ends_with("3.000   0.100   0.333  ours tcp"), "{table}");
    }

    #[test]
    fn markdown_has_a_column_for_each_side() {
        let text = results().markdown();
        assert!(text.starts_with("GB/s:\n\n| | ours tcp | mooncake tcp |\n|---|---|---|\n"));
        assert!(text.contains("| 4 KiB × 1 read | 4.000 | 1.000 |"));
    }
}
