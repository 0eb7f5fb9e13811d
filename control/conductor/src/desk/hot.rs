//! Which beginnings of prompts are reused most: counted as requests are placed, and forgotten at half-life.
//!
//! What a request reuses is one beginning, named by the hash of its last block. A table of fixed size counts them; one
//! that is new takes the place of the one that counts least, and its count as an upper bound (Metwally's
//! space-saving).
//! Counts halve in a minute: instead of shrinking all that were made, those that are made grow.

use std::sync::Arc;

use super::{Desk, PoolKey};
use crate::index::{ContextId, Tiers};
use crate::scheduler::Request;

/// Beginnings that are counted, for each pool.
const ROWS: usize = 64;
/// Blocks of a beginning that are remembered; longer ones are one with theirs.
const CHAIN: usize = 4_096;
/// In which counts halve.
const HALF_NS: f64 = 60e9;
/// From which growth on all counts are written anew.
const MOST: f64 = 1e100;
/// Holders that are counted at most.
const HOLDERS: usize = 1_024;

struct Row {
    context: ContextId,
    chain: Arc<[u64]>,
    /// What was counted, times what a count was worth then.
    count: f64,
    /// Of that, what may be another's.
    error: f64,
}

/// The counts of a pool.
#[derive(Default)]
pub(super) struct Hot {
    rows: Vec<Row>,
    /// When a count was worth 1.
    since_ns: u64,
}

/// A beginning of prompts that is reused often.
#[derive(Clone, Debug, PartialEq)]
pub struct HotPrefix {
    /// Of which model.
    pub pool: PoolKey,
    /// The hash of its last block.
    pub hash: u64,
    /// Its tokens.
    pub tokens: u64,
    /// Requests a minute that reuse it and nothing longer, of late; for certain.
    pub per_minute: f64,
    /// Instances that have all of it.
    pub holders: usize,
    /// Whether the shared store has all of it.
    pub stored: bool,
}

impl Hot {
    /// What a count is worth now.
    fn worth(&self, now_ns: u64) -> f64 {
        (now_ns.saturating_sub(self.since_ns) as f64 / HALF_NS).exp2()
    }

    /// A request reuses the first `blocks` of its prompt.
    pub(super) fn note(&mut self, request: &Request, blocks: usize, now_ns: u64) {
        let blocks = blocks.min(request.hashes.len()).min(CHAIN);
        let Some(chain) = request.hashes.get(..blocks).filter(|chain| !chain.is_empty()) else { return };
        let mut worth = self.worth(now_ns);
        if worth > MOST {
            self.rows.iter_mut().for_each(|row| (row.count, row.error) = (row.count / worth, row.error / worth));
            (self.since_ns, worth) = (now_ns, 1.0);
        }
        let same = |row: &&mut Row| row.context == request.context && row.chain.last() == chain.last();
        if let Some(row) = self.rows.iter_mut().find(same) {
            row.count += worth;
            return;
        }
        let chain: Arc<[u64]> = chain.into();
        if self.rows.len() < ROWS {
            self.rows.push(Row { context: request.context, chain, count: worth, error: 0.0 });
        } else if let Some(least) = self.rows.iter_mut().min_by(|one, other| one.count.total_cmp(&other.count)) {
            *least = Row { context: request.context, chain, count: least.count + worth, error: least.count };
        }
    }

    /// Those counted most for certain, and how often a minute.
    fn most(&self, count: usize, now_ns: u64) -> Vec<(f64, ContextId, Arc<[u64]>)> {
        let per_minute = std::f64::consts::LN_2 * 60e9 / HALF_NS / self.worth(now_ns);
        let certain = self.rows.iter().map(|row| ((row.count - row.error) * per_minute, row));
        let mut found: Vec<_> = certain.map(|(often, row)| (often, row.context, Arc::clone(&row.chain))).collect();
        found.sort_by(|one, other| other.0.total_cmp(&one.0));
        found.truncate(count);
        found
    }
}

impl Desk {
    /// The beginnings of prompts that are reused most, of all models, `count` at most; those of less than one request
    /// in two minutes are left out.
    pub fn hot(&mut self, count: usize, now_ns: u64) -> Vec<HotPrefix> {
        let mut found = Vec::new();
        for pool in self.pools.values_mut() {
            for (per_minute, context, chain) in pool.hot.most(count, now_ns) {
                if per_minute < 0.5 {
                    break;
                }
                // The context is one of this index's, and the chain no longer than a prompt.
                let scratch = self.scratch.found_mut();
                let _: Result<(), _> = pool.conductor.index().find(context, &chain, HOLDERS, Tiers::SHARED, scratch);
                let whole = || scratch.matches().iter().filter(|found| found.blocks as usize == chain.len());
                let instances = whole().filter(|found| pool.conductor.instance_of(found.holder).is_some()).count();
                let stored = whole().any(|found| pool.store.values().any(|holder| *holder == found.holder));
                found.push(HotPrefix {
                    pool: pool.key.clone(),
                    hash: chain.last().copied().unwrap_or_default(),
                    tokens: chain.len() as u64 * u64::from(pool.key.block_tokens),
                    per_minute,
                    holders: instances,
                    stored,
                });
            }
        }
        found.sort_by(|one, other| other.per_minute.total_cmp(&one.per_minute));
        found.truncate(count);
        found
    }
}
