//! Indexes of other projects behind the same four calls.

use dynamo_kv_router::RadixTree;
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, RouterEvent,
};
use kv_index::{ChainBlockMap, ChainIndex, ContentHash, SequenceHash, StoredBlock};

use crate::events::Load;
use crate::subjects::Subject;

/// Index of `kv-index`: its run-length index, with the map of blocks for each worker that it requires.
pub(crate) struct ChainIndexOf<'a> {
    load: &'a Load,
    index: ChainIndex,
    maps: Vec<ChainBlockMap>,
    ids: Vec<u32>,
    blocks: Vec<StoredBlock>,
    hashes: Vec<SequenceHash>,
}

impl<'a> ChainIndexOf<'a> {
    pub(crate) fn new(workers: usize, load: &'a Load) -> Self {
        let index = ChainIndex::with_max_workers(workers);
        let ids = (0..workers).map(|at| index.intern_worker(&format!("w{at}")).expect("room for all workers"));
        let ids = ids.collect();
        let maps = (0..workers).map(|_| ChainBlockMap::default()).collect();
        Self { load, index, maps, ids, blocks: Vec::new(), hashes: Vec::new() }
    }
}

impl Subject for ChainIndexOf<'_> {
    fn store(&mut self, worker: u32, prompt: usize, blocks: usize) {
        let (rolling, contents) = (&self.load.prompts[prompt], &self.load.contents[prompt]);
        let pairs = rolling.iter().zip(contents).take(blocks);
        self.blocks.clear();
        self.blocks.extend(pairs.map(|(rolling, content)| StoredBlock {
            seq_hash: SequenceHash(*rolling),
            content_hash: ContentHash(*content),
        }));
        let at = worker as usize;
        self.index.apply_stored(self.ids[at], &self.blocks, None, &mut self.maps[at]).expect("a valid event");
    }

    fn remove(&mut self, worker: u32, prompt: usize, from: usize, to: usize) {
        self.hashes.clear();
        self.hashes.extend(self.load.prompts[prompt][from..to].iter().rev().map(|hash| SequenceHash(*hash)));
        let at = worker as usize;
        self.index.apply_removed(self.ids[at], &self.hashes, &mut self.maps[at]);
    }

    fn deepest(&mut self, prompt: usize) -> u64 {
        let mut best = 0;
        let contents = &self.load.contents[prompt];
        self.index.score_into(contents, |hash| *hash, false, |_, score| best = best.max(score));
        u64::from(best)
    }
}

/// Index of `dynamo-kv-router`: its tree for one thread.
pub(crate) struct RadixTreeOf<'a> {
    load: &'a Load,
    tree: RadixTree,
    events: u64,
}

impl<'a> RadixTreeOf<'a> {
    pub(crate) fn new(load: &'a Load) -> Self {
        Self { load, tree: RadixTree::new(), events: 0 }
    }

    fn apply(&mut self, worker: u32, data: KvCacheEventData) {
        self.events += 1;
        let event = KvCacheEvent { event_id: self.events, data, dp_rank: 0 };
        // A removal of a block that an earlier one removed too is refused; that costs little and changes nothing.
        let _ = self.tree.apply_event(RouterEvent::new(u64::from(worker), event));
    }
}

impl Subject for RadixTreeOf<'_> {
    fn store(&mut self, worker: u32, prompt: usize, blocks: usize) {
        let (rolling, contents) = (&self.load.prompts[prompt], &self.load.contents[prompt]);
        let pairs = rolling.iter().zip(contents).take(blocks);
        let blocks = pairs.map(|(rolling, content)| KvCacheStoredBlockData {
            block_hash: ExternalSequenceBlockHash(*rolling),
            tokens_hash: LocalBlockHash(*content),
            mm_extra_info: None,
        });
        let blocks = blocks.collect();
        self.apply(
            worker,
            KvCacheEventData::Stored(KvCacheStoreData { parent_hash: None, start_position: None, blocks }),
        );
    }

    fn remove(&mut self, worker: u32, prompt: usize, from: usize, to: usize) {
        let hashes = self.load.prompts[prompt][from..to].iter().rev();
        let block_hashes = hashes.map(|hash| ExternalSequenceBlockHash(*hash)).collect();
        self.apply(worker, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }));
    }

    fn deepest(&mut self, prompt: usize) -> u64 {
        let sequence = self.load.contents[prompt].iter().map(|hash| LocalBlockHash(*hash)).collect();
        let scores = self.tree.find_matches(sequence, false);
        u64::from(scores.scores.values().copied().max().unwrap_or(0))
    }
}
