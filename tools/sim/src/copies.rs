//! Proactive replication of hot prefixes between simulated caches, by the Conductor's rule
//! ([`kvplane_conductor::copies`]).

use std::sync::Arc;

use kvplane_conductor::copies::{Copies, CopyConfig, CopyOrder, PrefixFetch, Sources};
use kvplane_conductor::cost::transfer_ns;
use kvplane_conductor::hot::HotTable;
use kvplane_conductor::scheduler::ServiceTerms;

use crate::config::Work;
use crate::events::Event;
use crate::world::World;

/// Interval between decisions about replicas.
pub(crate) const LOOK_NS: u64 = 1_000_000_000;
/// Number of prefixes that are considered.
const ROWS: usize = 64;

/// Fetches by prefix, and replicas made.
pub(crate) struct CopyTraffic {
    table: HotTable,
    copies: Copies<u64>,
}

impl CopyTraffic {
    pub(crate) fn new(config: CopyConfig) -> Self {
        Self { table: HotTable::default(), copies: Copies::new(config) }
    }
}

impl World<'_> {
    /// Notes that a request fetches missing blocks of its first `blocks`.
    pub(crate) fn note_fetch(&mut self, id: usize, blocks: usize) {
        if let Some(copied) = &mut self.copied {
            copied.table.note(self.context, &self.trace[id].blocks[..blocks], self.events.now_ns());
        }
    }

    /// Begins the replications that pay off now.
    pub(crate) fn replicate_hot(&mut self) {
        let Some(mut copied) = self.copied.take() else { return };
        let block_bytes = u64::from(self.config.block_tokens) * self.config.token_bytes;
        let mut all: Vec<PrefixFetch<u64>> = Vec::new();
        let mut chains: Vec<Arc<[u64]>> = Vec::new();
        for row in copied.table.most(ROWS, self.events.now_ns()) {
            let alive = || self.nodes.iter().filter(|node| node.alive);
            let held = |node: &crate::world::Node| node.cache.prefix(&row.chain);
            // Blocks that every instance has are never fetched.
            let head = alive().map(held).min().unwrap_or(0);
            let places = alive().filter(|node| held(node) == row.chain.len()).count() as u32;
            let key = row.chain.last().copied().unwrap_or(0);
            let made = copied.copies.copies_of(&key);
            let bytes = (row.chain.len() - head) as u64 * block_bytes;
            if bytes > 0 && places > 0 {
                let places = places.saturating_sub(made).max(1);
                all.push(PrefixFetch { key, per_s: row.per_minute / 60.0, bytes, pieces: 1, places });
                chains.push(row.chain);
            }
        }
        let nodes = self.nodes.iter().filter(|node| node.alive).count() as u32;
        let sources = Sources { nodes, nic_bytes_s: self.config.nic_bytes_s };
        for order in copied.copies.decide(&all, sources, self.events.now_ns()) {
            let CopyOrder::Copy(key) = order else { continue };
            let at = all.iter().position(|one| one.key == key);
            let begun = at.is_some_and(|at| self.begin_copy(key, &chains[at]));
            if !begun {
                copied.copies.ended(key, false, self.events.now_ns());
            }
        }
        self.copied = Some(copied);
        if self.open > 0 {
            self.events.at(self.events.now_ns() + LOOK_NS, Event::Copies);
        }
    }

    /// Sends a prefix from its least busy holder to the least busy instance without it; returns false if either is
    /// missing.
    fn begin_copy(&mut self, key: u64, chain: &Arc<[u64]>) -> bool {
        let whole = |at: &usize| self.nodes[*at].cache.prefix(chain) == chain.len();
        let alive: Vec<usize> = (0..self.nodes.len()).filter(|at| self.nodes[*at].alive).collect();
        let least = |at: &usize| (self.nodes[*at].egress_until_ns.max(self.events.now_ns()), *at);
        let source = alive.iter().copied().filter(whole).min_by_key(least);
        let target = alive.iter().copied().filter(|at| !whole(at)).min_by_key(least);
        let (Some(source), Some(target)) = (source, target) else { return false };
        let lacks = chain.iter().filter(|block| !self.nodes[target].cache.has(**block)).count() as u64;
        let block_bytes = u64::from(self.config.block_tokens) * self.config.token_bytes;
        let took_ns = lacks * transfer_ns(block_bytes, self.config.nic_bytes_s);
        let ready_ns = self.nodes[source].send(took_ns, self.events.now_ns());
        self.events.at(ready_ns, Event::Copied { instance: target, key, chain: Arc::clone(chain) });
        true
    }

    /// Completes a replication.
    pub(crate) fn copy_came(&mut self, instance: usize, key: u64, chain: &Arc<[u64]>) {
        let alive = self.nodes[instance].alive;
        if alive {
            let tokens = chain.len() as u32 * self.config.block_tokens;
            let (blocks, terms) = (Arc::clone(chain), ServiceTerms::default());
            let work = Work { arrival_ns: 0, input_tokens: tokens, output_tokens: 0, blocks, terms };
            self.nodes[instance].cache.put(&work, chain.len(), &(0..0));
            self.tell(instance);
            self.outcome.copied += 1;
        }
        if let Some(copied) = &mut self.copied {
            copied.copies.ended(key, alive, self.events.now_ns());
        }
    }
}
