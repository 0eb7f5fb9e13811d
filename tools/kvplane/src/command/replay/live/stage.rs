//! Stage of a pipeline group in a mock engine: computes its layers of a prompt chunk by chunk, and passes the KV cache
//! of each chunk to the next stage through the store.
//!
//! The KV cache of a layer is an equal part of each block's bytes. A stage fills in the part of its layers and puts the
//! beginning of the block, up to its last layer, under a key of this prompt and stage, which the next stage fetches,
//! verifies and removes. So the last stage has whole blocks, of which each byte was passed on or filled in there.

use std::time::{Duration, Instant};

use kvplane::Slice;
use kvplane_conductor::cost::PrefillModel;
use kvplane_conductor::cost::pipeline::{Chunk, chunks};
use kvplane_tools::pattern;
use kvplane_tools::trace::BLOCK_TOKENS;
use serde::{Deserialize, Serialize};

use super::engine::{EngineReport, Prompt, ServingThread};
use super::reporter::CacheChange;
use crate::command::Failure;

/// Time limit for a chunk of the stage before.
const CHUNK_LIMIT: Duration = Duration::from_secs(60);
/// Interval at which the next chunk is looked for.
const LOOK: Duration = Duration::from_millis(1);

/// Stage that an instance is for one prompt.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct PromptStage {
    /// Stage, from 0, and the number of stages.
    pub(super) stage: usize,
    pub(super) stages: usize,
    pub(super) first_layer: u32,
    pub(super) layers: u32,
    /// Layers of all stages.
    pub(super) all_layers: u32,
    pub(super) chunk_tokens: u32,
    /// Part of the keys under which chunks are passed on; unique among all prompts.
    pub(super) key: String,
}

impl PromptStage {
    fn is_last(&self) -> bool {
        self.stage + 1 == self.stages
    }

    /// Returns the bytes of a block up to its first layer, and up to its last one.
    fn bytes(&self, block_bytes: usize) -> (usize, usize) {
        let up_to = |layer: u32| block_bytes * layer as usize / self.all_layers.max(1) as usize;
        (up_to(self.first_layer), up_to(self.first_layer + self.layers))
    }

    /// Returns the key of a block that a stage passes on.
    fn key_of(&self, stage: usize, hash: u64) -> String {
        format!("replay-pass@{}@{stage}@{hash:016x}", self.key)
    }
}

impl ServingThread {
    /// Serves one stage of a prompt.
    pub(super) fn serve_stage(
        &mut self,
        prompt: &Prompt,
        stage: &PromptStage,
        say: &mut dyn FnMut(&EngineReport) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let began = Instant::now();
        if stage.stage == 0 {
            say(&EngineReport::Started { id: prompt.id })?;
        }
        let hashes = &prompt.hashes;
        let from = self.uses();
        let local = hashes.iter().map_while(|hash| self.touch(*hash)).count();
        // Blocks of the reused prefix that are not here: their bytes pass through the scratch memory.
        let (mut fetched, mut wrong) = (0, 0);
        let reuse = prompt.reuse.min(hashes.len());
        let (mut places, mut gone) = (Vec::new(), Vec::new());
        if stage.is_last() {
            (places, gone) = self.take_places(&hashes[local.min(hashes.len())..], from);
        }
        for blocks in hashes[local.min(reuse)..reuse].chunks(self.scratch_blocks()) {
            let (there, differ) = self.fetch_prefix(blocks)?;
            (fetched, wrong) = (fetched + there, wrong + differ);
            if there < blocks.len() {
                return Err(format!("block {there} of the prefix of prompt {} is not in the store", prompt.id).into());
            }
            if stage.is_last() {
                self.keep(0, blocks.len(), places.get(fetched - there..).unwrap_or_default());
            }
        }
        let cached = u32::try_from(reuse)?.saturating_mul(BLOCK_TOKENS).min(prompt.tokens);
        let model = PrefillModel::default();
        let parts = chunks(prompt.tokens, cached, stage.chunk_tokens, |end| model.predict_ns(end, cached));
        let (mut at, mut free) = (reuse, Instant::now());
        for Chunk { tokens, computes_ns } in parts {
            let end = (at + tokens.div_ceil(BLOCK_TOKENS) as usize).min(hashes.len());
            wrong += self.serve_chunk(stage, &hashes[at..end], computes_ns, &mut free)?;
            if stage.is_last() {
                // Blocks that the cache has behind the reused prefix are computed again, and stay where they are.
                let new = at.max(local).min(end);
                self.keep(new - at, end - new, places.get(new.saturating_sub(local)..).unwrap_or_default());
            }
            at = end;
        }
        let took_ns = u64::try_from(began.elapsed().as_nanos())?;
        let (own, brought) = (local.min(reuse) as u64, fetched as u64);
        say(&EngineReport::Done {
            id: prompt.id,
            reused_tokens: cached,
            took_ns,
            local: own,
            fetched: brought,
            wrong,
        })?;
        if stage.is_last() {
            let new = &hashes[local.min(hashes.len())..][..places.len()];
            self.put_all(new, &places)?;
            if !new.is_empty() || !gone.is_empty() {
                let parent = local.checked_sub(1).map(|at| hashes[at]);
                self.tell(CacheChange { parent, stored: new.to_vec(), evicted: gone })?;
            }
        }
        Ok(())
    }

    /// Computes a chunk in the scratch memory, once it has arrived, and passes it on. Returns the wrong bytes that
    /// arrived.
    fn serve_chunk(
        &mut self,
        stage: &PromptStage,
        hashes: &[u64],
        computes_ns: u64,
        free: &mut Instant,
    ) -> Result<u64, Failure> {
        let (from, to) = stage.bytes(self.block_bytes());
        let mut wrong = 0;
        if stage.stage > 0 {
            wrong = self.receive(stage, hashes, from)?;
        }
        // The stage computes beside its transfers: its time counts from when chunk and stage were both there.
        *free =
            (*free).max(Instant::now()) + Duration::from_nanos(computes_ns) * stage.layers / stage.all_layers.max(1);
        std::thread::sleep(free.saturating_duration_since(Instant::now()));
        for (at, hash) in hashes.iter().enumerate() {
            let seed = self.seed_of(*hash)?;
            let place = at * self.block_bytes();
            self.scratch().region().fill_with(place + from, to - from, &mut |offset, part| {
                pattern::fill(seed, from as u64 + offset, part);
            });
        }
        if !stage.is_last() {
            let items: Vec<(String, Slice)> = (0..hashes.len())
                .map(|at| (stage.key_of(stage.stage, hashes[at]), self.scratch_slice(at, to)))
                .collect();
            for put in self.client().batch_put_from(&items)? {
                put.map_err(|error| format!("a chunk could not be passed on: {error}"))?;
            }
        }
        Ok(wrong)
    }

    /// Fetches a chunk of the stage before, the first `bytes` of each block, and removes it from the store. Returns the
    /// wrong bytes.
    fn receive(&mut self, stage: &PromptStage, hashes: &[u64], bytes: usize) -> Result<u64, Failure> {
        let until = Instant::now() + CHUNK_LIMIT;
        let keys: Vec<String> = hashes.iter().map(|hash| stage.key_of(stage.stage - 1, *hash)).collect();
        let mut missing: Vec<usize> = (0..hashes.len()).collect();
        let mut wrong = 0;
        while !missing.is_empty() {
            let items: Vec<(&String, Slice)> =
                missing.iter().map(|at| (&keys[*at], self.scratch_slice(*at, bytes))).collect();
            let mut left = Vec::new();
            for (at, got) in missing.iter().zip(self.client().batch_get_into(&items)?) {
                match got? {
                    Some(got) if got.bytes == bytes as u64 => {
                        let seed = self.seed_of(hashes[*at])?;
                        let place = *at * self.block_bytes();
                        self.scratch().region().read_with(place, bytes, &mut |offset, part| {
                            wrong += pattern::check(seed, offset, part).err().map_or(0, |differs| differs.wrong_bytes);
                        });
                    }
                    Some(_) => wrong += bytes as u64,
                    None => left.push(*at),
                }
            }
            missing = left;
            if !missing.is_empty() {
                if Instant::now() > until {
                    return Err(format!("stage {} passed no chunk on within {CHUNK_LIMIT:?}", stage.stage - 1).into());
                }
                std::thread::sleep(LOOK);
            }
        }
        self.client().batch_remove(&keys)?;
        Ok(wrong)
    }

    /// Copies `count` blocks of the scratch memory, from number `first` on, to their places in the cache; those without
    /// a place are left out.
    fn keep(&self, first: usize, count: usize, places: &[usize]) {
        let bytes = self.block_bytes();
        for (at, place) in (first..first + count).zip(places) {
            let mut block = Vec::with_capacity(bytes);
            self.scratch().region().read_with(at * bytes, bytes, &mut |_, part| block.extend_from_slice(part));
            self.cache_buffer().region().fill_with(place * bytes, bytes, &mut |offset, part| {
                let from = offset as usize;
                part.copy_from_slice(&block[from..from + part.len()]);
            });
        }
    }
}
