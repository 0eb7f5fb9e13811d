//! Hottest prefixes: a table of fixed size whose counts decay exponentially.
//!
//! A new prefix replaces the one with the least count, and inherits that count as an upper bound of its error
//! (space-saving algorithm, Metwally et al.). Counts halve every minute: instead of scaling all old counts down, the
//! weight of new ones grows.

use std::sync::Arc;

use crate::index::ContextId;

/// Number of prefixes in the table.
const ROWS: usize = 64;
/// Maximum number of blocks that are stored of a prefix; longer prefixes with the same beginning share a row.
const CHAIN: usize = 4_096;
/// Half-life of counts, in nanoseconds.
const HALF_NS: f64 = 60e9;
/// Weight beyond which all counts are rescaled.
const MOST: f64 = 1e100;

struct Row {
    context: ContextId,
    chain: Arc<[u64]>,
    /// Sum of the weights at the times of the counts.
    count: f64,
    /// Upper bound of the part that may belong to other prefixes.
    error: f64,
}

/// Table of hot prefixes.
#[derive(Default)]
pub struct HotTable {
    rows: Vec<Row>,
    /// Time at which a count had the weight 1.
    since_ns: u64,
}

/// Prefix with its rate.
#[derive(Clone, Debug, PartialEq)]
pub struct HotRow {
    /// Recent rate per minute; a lower bound.
    pub per_minute: f64,
    /// Context within which its blocks can be shared.
    pub context: ContextId,
    /// Rolling hashes of its blocks, at least one.
    pub chain: Arc<[u64]>,
}

impl HotTable {
    /// Returns the weight of a count now.
    fn worth(&self, now_ns: u64) -> f64 {
        (now_ns.saturating_sub(self.since_ns) as f64 / HALF_NS).exp2()
    }

    /// Counts an occurrence of the prefix `chain`; an empty one is ignored.
    pub fn note(&mut self, context: ContextId, chain: &[u64], now_ns: u64) {
        let chain = &chain[..chain.len().min(CHAIN)];
        if chain.is_empty() {
            return;
        }
        let mut worth = self.worth(now_ns);
        if worth > MOST {
            self.rows.iter_mut().for_each(|row| (row.count, row.error) = (row.count / worth, row.error / worth));
            (self.since_ns, worth) = (now_ns, 1.0);
        }
        let same = |row: &&mut Row| row.context == context && row.chain.last() == chain.last();
        if let Some(row) = self.rows.iter_mut().find(same) {
            row.count += worth;
            return;
        }
        let chain: Arc<[u64]> = chain.into();
        if self.rows.len() < ROWS {
            self.rows.push(Row { context, chain, count: worth, error: 0.0 });
        } else if let Some(least) = self.rows.iter_mut().min_by(|one, other| one.count.total_cmp(&other.count)) {
            *least = Row { context, chain, count: least.count + worth, error: least.count };
        }
    }

    /// Returns the prefixes with the greatest certain rate, at most `count`.
    #[must_use]
    pub fn most(&self, count: usize, now_ns: u64) -> Vec<HotRow> {
        let per_minute = std::f64::consts::LN_2 * 60e9 / HALF_NS / self.worth(now_ns);
        let row = |row: &Row| {
            let per_minute = (row.count - row.error) * per_minute;
            HotRow { per_minute, context: row.context, chain: Arc::clone(&row.chain) }
        };
        let mut found: Vec<HotRow> = self.rows.iter().map(row).collect();
        found.sort_by(|one, other| other.per_minute.total_cmp(&one.per_minute));
        found.truncate(count);
        found
    }
}
