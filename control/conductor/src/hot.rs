//! Which beginnings of prompts come most: a table of fixed size that forgets at half-life.
//!
//! One that is new takes the place of the one that counts least, and its count as an upper bound (Metwally's
//! space-saving). Counts halve in a minute: instead of shrinking all that were made, those that are made grow.

use std::sync::Arc;

use crate::index::ContextId;

/// Beginnings that are counted.
const ROWS: usize = 64;
/// Blocks of a beginning that are remembered; longer ones are one with theirs.
const CHAIN: usize = 4_096;
/// In which counts halve.
const HALF_NS: f64 = 60e9;
/// From which growth on all counts are written anew.
const MOST: f64 = 1e100;

struct Row {
    context: ContextId,
    chain: Arc<[u64]>,
    /// What was counted, times what a count was worth then.
    count: f64,
    /// Of that, what may be another's.
    error: f64,
}

/// The counts.
#[derive(Default)]
pub struct HotTable {
    rows: Vec<Row>,
    /// When a count was worth 1.
    since_ns: u64,
}

/// A beginning that comes often.
#[derive(Clone, Debug, PartialEq)]
pub struct HotRow {
    /// How often a minute, of late; for certain.
    pub per_minute: f64,
    /// What its blocks can be shared among.
    pub context: ContextId,
    /// Rolling hashes of its blocks, one at least.
    pub chain: Arc<[u64]>,
}

impl HotTable {
    /// What a count is worth now.
    fn worth(&self, now_ns: u64) -> f64 {
        (now_ns.saturating_sub(self.since_ns) as f64 / HALF_NS).exp2()
    }

    /// The beginning `chain` came once more; an empty one is none.
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

    /// Those that came most for certain, `count` at most.
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
