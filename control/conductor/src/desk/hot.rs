//! Which beginnings of prompts are reused most: counted as requests are placed ([`crate::hot`]), named by the hash of
//! their last block.

use super::{Desk, PoolKey};
use crate::index::Tiers;

/// Holders that are counted at most.
const HOLDERS: usize = 1_024;
/// How often a minute a beginning comes that counts.
pub(super) const LEAST: f64 = 0.5;

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
    /// Whether the Conductor has had it copied to second nodes of the store.
    pub copied: bool,
}

impl Desk {
    /// The beginnings of prompts that are reused most, of all models, `count` at most; those of less than one request
    /// in two minutes are left out.
    pub fn hot(&mut self, count: usize, now_ns: u64) -> Vec<HotPrefix> {
        let mut found = Vec::new();
        for (number, pool) in &mut self.pools {
            for row in pool.hot.most(count, now_ns).into_iter().take_while(|row| row.per_minute >= LEAST) {
                // The context is one of this index's, and the chain no longer than a prompt.
                let scratch = self.scratch.found_mut();
                let index = pool.conductor.index();
                let _: Result<(), _> = index.find(row.context, &row.chain, HOLDERS, Tiers::SHARED, scratch);
                let whole = || scratch.matches().iter().filter(|found| found.blocks as usize == row.chain.len());
                let instances = whole().filter(|found| pool.conductor.instance_of(found.holder).is_some()).count();
                let stored = whole().any(|found| pool.store.values().any(|holder| *holder == found.holder));
                let hash = row.chain.last().copied().unwrap_or_default();
                found.push(HotPrefix {
                    pool: pool.key.clone(),
                    hash,
                    tokens: row.chain.len() as u64 * u64::from(pool.key.block_tokens),
                    per_minute: row.per_minute,
                    holders: instances,
                    stored,
                    copied: self.copies.is_copied(&(*number, row.context, hash)),
                });
            }
        }
        found.sort_by(|one, other| other.per_minute.total_cmp(&one.per_minute));
        found.truncate(count);
        found
    }
}
