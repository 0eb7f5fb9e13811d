//! Indexes under measurement, and kvplane's as one of them.

use kvplane_conductor::index::{
    ContextId, HolderId, IndexConfig, PrefixIndex, PrefixMatches, PromptContext, Tier, Tiers,
};

use crate::events::Load;
use crate::rivals::{ChainIndexOf, RadixTreeOf};

/// Index under measurement.
pub(crate) trait Subject {
    /// Records that a worker stored the first `blocks` of a prompt.
    fn store(&mut self, worker: u32, prompt: usize, blocks: usize);
    /// Records that a worker evicted the blocks `from..to` of a prompt, the last first.
    fn remove(&mut self, worker: u32, prompt: usize, from: usize, to: usize);
    /// Returns the most blocks of a prompt that any worker has.
    fn deepest(&mut self, prompt: usize) -> u64;
    /// Describes its memory.
    fn memory(&self) -> Option<String> {
        None
    }
}

type Make = for<'a> fn(usize, &'a Load) -> Box<dyn Subject + 'a>;

/// Returns all indexes, kvplane's first.
pub(crate) fn all() -> [(&'static str, Make); 3] {
    [
        ("kvplane", |workers, load| Box::new(Kvplane::new(workers, load))),
        ("kv-index 2.0", |workers, load| Box::new(ChainIndexOf::new(workers, load))),
        ("dynamo-kv-router 1.6", |_, load| Box::new(RadixTreeOf::new(load))),
    ]
}

struct Kvplane<'a> {
    load: &'a Load,
    index: PrefixIndex,
    context: ContextId,
    holders: Vec<HolderId>,
    found: PrefixMatches,
    reversed: Vec<u64>,
}

impl<'a> Kvplane<'a> {
    fn new(workers: usize, load: &'a Load) -> Self {
        let config = IndexConfig { max_blocks: load.blocks, max_holders: workers, seed: 42, ..IndexConfig::default() };
        let mut index = PrefixIndex::new(config).expect("limits that can be");
        let (tenant, model) = ("default".into(), "m".into());
        let key = PromptContext { tenant, model, block_tokens: 16, ..PromptContext::default() };
        let context = index.context(&key).expect("the first context");
        let holders = (0..workers).map(|_| index.register().expect("room for all holders")).collect();
        Self { load, index, context, holders, found: PrefixMatches::default(), reversed: Vec::new() }
    }
}

impl Subject for Kvplane<'_> {
    fn store(&mut self, worker: u32, prompt: usize, blocks: usize) {
        let hashes = &self.load.prompts[prompt][..blocks];
        let holder = self.holders[worker as usize];
        self.index.stored(self.context, holder, Tier::Gpu, None, hashes).expect("a known holder");
    }

    fn remove(&mut self, worker: u32, prompt: usize, from: usize, to: usize) {
        self.reversed.clear();
        self.reversed.extend(self.load.prompts[prompt][from..to].iter().rev());
        let holder = self.holders[worker as usize];
        self.index.removed(self.context, holder, Tier::Gpu, &self.reversed).expect("a known holder");
    }

    fn deepest(&mut self, prompt: usize) -> u64 {
        let hashes = &self.load.prompts[prompt];
        self.index.find(self.context, hashes, 8, Tiers::OWN, &mut self.found).expect("a known context");
        u64::from(self.found.best_blocks())
    }

    fn memory(&self) -> Option<String> {
        let stats = self.index.stats();
        Some(format!(
            "{} blocks in {} runs, {} records; {:.1} bytes a block with keys, table, runs and holders, {:.1} reserved",
            stats.blocks,
            stats.runs,
            stats.records,
            stats.used_bytes as f64 / stats.blocks as f64,
            stats.reserved_bytes as f64 / stats.blocks as f64
        ))
    }
}
