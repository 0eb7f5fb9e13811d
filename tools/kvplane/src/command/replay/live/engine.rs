//! Mock inference engine: a process whose prefills take as long as the cost model says, with KV blocks in a buffer of
//! its own, and with real bytes fetched from and put into the store.
//!
//! The process serves one prompt after the other. Prompts and reports are lines of JSON on standard input and output.
//! The process reports changes of its cache to the Conductor itself, as engines do ([`super::reporter`]). It ends with
//! its input.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Args;
use kvplane::rpc::Role;
use kvplane::rpc::conductor::{
    InstanceCapabilities, InstancePart, PipelineMembership, RegisterCapabilities, RegisterInstance,
};
use kvplane::{Buffer, Client, ClientConfig, Control, ControlLink, HugePages, Region, RegionOptions, Slice};
use kvplane_conductor::cost::PrefillModel;
use kvplane_proto::rng::mix64;
use kvplane_tools::pattern;
use kvplane_tools::trace::BLOCK_TOKENS;
use serde::{Deserialize, Serialize};

use super::super::Way;
use super::reporter::{CacheChange, CacheReporter};
use super::stage::PromptStage;
use crate::command::Failure;

/// Prompt to serve.
#[derive(Serialize, Deserialize)]
pub(super) struct Prompt {
    pub(super) id: u64,
    pub(super) tokens: u32,
    /// Number of leading blocks that are reused: those in the engine's cache, and those to fetch from the store.
    pub(super) reuse: usize,
    /// Rolling hashes of the prompt's blocks.
    pub(super) hashes: Vec<u64>,
    /// Stage that the engine is, if a pipeline group serves the prompt.
    pub(super) stage: Option<PromptStage>,
}

/// Report about a prompt.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(super) enum EngineReport {
    /// The prefill begins.
    Started { id: u64 },
    /// The first token is computed.
    Done {
        id: u64,
        /// Tokens that were not computed.
        reused_tokens: u32,
        took_ns: u64,
        /// Blocks that were in the engine's cache (`local`) or fetched from the store (`fetched`).
        local: u64,
        fetched: u64,
        /// Bytes that differ from the expected pattern.
        wrong: u64,
    },
}

/// Serve prompts from standard input as an inference engine; started by `kvplane replay --conductor`.
#[derive(Args)]
pub(crate) struct Engine {
    /// Name of the instance.
    #[arg(long)]
    pub(super) name: String,
    #[arg(long)]
    pub(super) cluster: String,
    #[arg(long)]
    pub(super) runtime_directory: Option<PathBuf>,
    #[arg(long, value_enum)]
    pub(super) transport: Way,
    /// Size of a block of 512 tokens, in bytes.
    #[arg(long)]
    pub(super) block_bytes: usize,
    /// Capacity of the engine's cache, in blocks.
    #[arg(long)]
    pub(super) blocks: usize,
    /// Pipeline group of the engine.
    #[arg(long, requires_all = ["stage", "stages", "chunk"])]
    pub(super) group: Option<String>,
    /// Stage of the engine in the group, from 0.
    #[arg(long)]
    pub(super) stage: Option<u32>,
    /// Number of stages of the group.
    #[arg(long)]
    pub(super) stages: Option<u32>,
    /// Maximum length of a chunk, in tokens.
    #[arg(long)]
    pub(super) chunk: Option<u32>,
}

/// Returns the model that engines with blocks of this size serve; a name for each size keeps stores from mixing them.
pub(super) fn model(block_bytes: usize) -> String {
    format!("replay-{block_bytes}")
}

/// Returns the rolling hash of a block of a trace, whose ids are chained already.
pub(super) const fn hash_of(block: u64) -> u64 {
    mix64(block ^ 0x6b76_706c_616e_6531)
}

fn key_of(model: &str, hash: u64) -> String {
    format!("{model}@tp_rank:0@{hash:016x}")
}

/// LRU cache of the engine's blocks.
struct Cache {
    places: HashMap<u64, (usize, u64)>,
    by_use: BTreeMap<u64, u64>,
    free: Vec<usize>,
    uses: u64,
}

impl Cache {
    fn new(blocks: usize) -> Self {
        Self { places: HashMap::new(), by_use: BTreeMap::new(), free: (0..blocks).rev().collect(), uses: 0 }
    }

    /// Returns the position of a block, if it is cached, and marks it as used.
    fn touch(&mut self, hash: u64) -> Option<usize> {
        let (place, used) = self.places.get_mut(&hash)?;
        self.by_use.remove(used);
        self.uses += 1;
        *used = self.uses;
        self.by_use.insert(self.uses, hash);
        Some(*place)
    }

    /// Allocates a position for a block; returns it with the block evicted for it. Blocks used since `from` are not
    /// evicted.
    fn take(&mut self, hash: u64, from: u64) -> Option<(usize, Option<u64>)> {
        let gone = if self.free.is_empty() {
            let (used, gone) = self.by_use.first_key_value().map(|(used, gone)| (*used, *gone))?;
            if used > from {
                return None;
            }
            self.by_use.remove(&used);
            let (place, _) = self.places.remove(&gone)?;
            self.free.push(place);
            Some(gone)
        } else {
            None
        };
        let place = self.free.pop()?;
        self.uses += 1;
        self.places.insert(hash, (place, self.uses));
        self.by_use.insert(self.uses, hash);
        Some((place, gone))
    }
}

pub(super) struct ServingThread {
    client: Client,
    reporter: CacheReporter,
    buffer: Buffer,
    /// Memory of the blocks of one chunk, if the engine is in a pipeline group.
    scratch: Option<Buffer>,
    block_bytes: usize,
    model: String,
    cache: Cache,
    costs: PrefillModel,
}

impl Engine {
    fn registration(&self, incarnation: u64) -> RegisterInstance {
        RegisterInstance {
            incarnation,
            token_bytes: (self.block_bytes as u64).div_ceil(u64::from(BLOCK_TOKENS)),
            ..RegisterInstance::new(self.name.clone(), model(self.block_bytes), BLOCK_TOKENS, InstancePart::Prefill)
        }
    }

    /// Returns the engine's stage in a pipeline group, if it is in one.
    fn membership(&self) -> Option<PipelineMembership> {
        let (group, stage, stages) = (self.group.clone()?, self.stage?, self.stages?);
        Some(PipelineMembership { group, stage, stages, chunk_tokens: self.chunk?, activation_bytes: 0 })
    }

    pub(crate) fn run(self) -> Result<(), Failure> {
        let control =
            Control::Local { cluster: self.cluster.clone(), runtime_directory: self.runtime_directory.clone() };
        let config = ClientConfig { control: control.clone(), ..ClientConfig::local(&self.cluster) };
        let mut client = Client::connect(&self.transport.allow(config, &[])?)?;
        let bytes = self.block_bytes.checked_mul(self.blocks).ok_or("the cache does not fit into memory")?;
        let options = RegionOptions { huge: HugePages::Try, ..RegionOptions::new("replay-engine", bytes) };
        let buffer = client.register(Region::allocate(&options)?);
        let scratch = match self.chunk {
            None => None,
            Some(chunk) => {
                let bytes = self.block_bytes * chunk.div_ceil(BLOCK_TOKENS) as usize;
                let options = RegionOptions { huge: HugePages::Try, ..RegionOptions::new("replay-chunk", bytes) };
                Some(client.register(Region::allocate(&options)?))
            }
        };
        let incarnation = u64::try_from(SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos())?;
        let link = ControlLink::to(&control, Role::Client)?;
        let stage = self.membership();
        match &stage {
            None => link.call(self.registration(incarnation))?,
            Some(_) => {
                let capabilities = InstanceCapabilities { stage: stage.clone(), ..InstanceCapabilities::default() };
                link.call(RegisterCapabilities { register: self.registration(incarnation), capabilities })?
            }
        };
        let reporter = CacheReporter::start(link, self.name.clone(), incarnation)?;
        let mut serving = ServingThread {
            client,
            reporter,
            buffer,
            scratch,
            block_bytes: self.block_bytes,
            model: model(self.block_bytes),
            cache: Cache::new(self.blocks),
            costs: PrefillModel::default(),
        };
        let mut out = std::io::stdout().lock();
        for line in std::io::stdin().lock().lines() {
            let prompt: Prompt = serde_json::from_str(&line?)?;
            let mut say = |said: &EngineReport| -> Result<(), Failure> {
                writeln!(out, "{}", serde_json::to_string(said)?)?;
                Ok(out.flush()?)
            };
            match &prompt.stage {
                Some(stage) => serving.serve_stage(&prompt, stage, &mut say)?,
                None => serving.serve(&prompt, &mut say)?,
            }
        }
        serving.reporter.end()
    }
}

impl ServingThread {
    fn serve(
        &mut self,
        prompt: &Prompt,
        say: &mut dyn FnMut(&EngineReport) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let began = Instant::now();
        say(&EngineReport::Started { id: prompt.id })?;
        let (from, hashes) = (self.cache.uses, &prompt.hashes);
        let local = hashes.iter().map_while(|hash| self.cache.touch(*hash)).count();
        let (places, gone) = self.take_places(&hashes[local..], from);
        let new = &hashes[local..local + places.len()];
        let wanted = prompt.reuse.saturating_sub(local).min(new.len());
        let (fetched, wrong) = self.fetch(&new[..wanted], &places)?;
        let reused_tokens = u32::try_from(local + fetched)?.saturating_mul(BLOCK_TOKENS).min(prompt.tokens);
        let took = Duration::from_nanos(self.costs.predict_ns(prompt.tokens, reused_tokens));
        // The fetch took place beside the computation.
        std::thread::sleep(took.saturating_sub(began.elapsed()));
        let took_ns = u64::try_from(began.elapsed().as_nanos())?;
        let (id, own, brought) = (prompt.id, local as u64, fetched as u64);
        say(&EngineReport::Done { id, reused_tokens, took_ns, local: own, fetched: brought, wrong })?;
        self.store(&new[fetched..], &places[fetched..])?;
        let parent = local.checked_sub(1).map(|at| hashes[at]);
        if new.is_empty() && gone.is_empty() {
            return Ok(());
        }
        self.reporter.tell(CacheChange { parent, stored: new.to_vec(), evicted: gone })
    }

    /// Takes places in the cache for the blocks of a prompt behind those that it has, until it is full. Returns
    /// the places, and the blocks evicted for them; blocks used since `from` are not evicted.
    pub(super) fn take_places(&mut self, hashes: &[u64], from: u64) -> (Vec<usize>, Vec<u64>) {
        let (mut places, mut gone) = (Vec::new(), Vec::new());
        for hash in hashes {
            // A cached block after a gap is computed again, in its position.
            let place = match self.cache.touch(*hash) {
                Some(place) => Some((place, None)),
                None => self.cache.take(*hash, from),
            };
            let Some((place, evicted)) = place else { break };
            places.push(place);
            gone.extend(evicted);
        }
        (places, gone)
    }

    /// Returns the number of uses of cached blocks so far.
    pub(super) const fn uses(&self) -> u64 {
        self.cache.uses
    }

    /// Returns the place of a block, if it is cached, and marks it as used.
    pub(super) fn touch(&mut self, hash: u64) -> Option<usize> {
        self.cache.touch(hash)
    }

    pub(super) const fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    pub(super) const fn client(&mut self) -> &mut Client {
        &mut self.client
    }

    /// Returns the memory of the cache.
    pub(super) const fn cache_buffer(&self) -> &Buffer {
        &self.buffer
    }

    /// Returns the memory of one chunk; that of the cache for an engine in no pipeline group, which is never a stage.
    pub(super) fn scratch(&self) -> &Buffer {
        self.scratch.as_ref().unwrap_or(&self.buffer)
    }

    /// Returns the first `bytes` of a block of the chunk's memory.
    pub(super) fn scratch_slice(&self, at: usize, bytes: usize) -> Slice {
        self.scratch().slice(at * self.block_bytes, bytes)
    }

    /// Returns the number of blocks of a chunk.
    pub(super) fn scratch_blocks(&self) -> usize {
        (self.scratch().region().bytes() / self.block_bytes).max(1)
    }

    pub(super) fn tell(&mut self, change: CacheChange) -> Result<(), Failure> {
        self.reporter.tell(change)
    }

    /// Fetches blocks of a prefix into the chunk's memory, and verifies them; returns the number of blocks without a
    /// gap, and of wrong bytes.
    pub(super) fn fetch_prefix(&mut self, hashes: &[u64]) -> Result<(usize, u64), Failure> {
        let buffer = self.scratch().clone();
        self.fetch_into(hashes, &(0..hashes.len()).collect::<Vec<_>>(), &buffer)
    }

    fn slice(&self, place: usize) -> Slice {
        self.buffer.slice(place * self.block_bytes, self.block_bytes)
    }

    pub(super) fn seed_of(&self, hash: u64) -> Result<u64, Failure> {
        Ok(pattern::seed_of(self.client.digest(key_of(&self.model, hash).as_bytes())?))
    }

    /// Fetches blocks from the store and verifies them; returns the number of blocks without a gap, and of wrong bytes.
    fn fetch(&mut self, hashes: &[u64], places: &[usize]) -> Result<(usize, u64), Failure> {
        let buffer = self.buffer.clone();
        self.fetch_into(hashes, places, &buffer)
    }

    fn fetch_into(&mut self, hashes: &[u64], places: &[usize], buffer: &Buffer) -> Result<(usize, u64), Failure> {
        if hashes.is_empty() {
            return Ok((0, 0));
        }
        let items: Vec<(String, Slice)> = hashes
            .iter()
            .zip(places)
            .map(|(hash, place)| (key_of(&self.model, *hash), buffer.slice(place * self.block_bytes, self.block_bytes)))
            .collect();
        let (mut there, mut wrong) = (0, 0);
        for (at, outcome) in self.client.batch_get_into(&items)?.into_iter().enumerate() {
            let Some(got) = outcome? else { break };
            let seed = self.seed_of(hashes[at])?;
            if got.bytes != self.block_bytes as u64 {
                wrong += self.block_bytes as u64;
            }
            let from = places[at] * self.block_bytes;
            buffer.region().read_with(from, self.block_bytes, &mut |offset, part| {
                wrong += pattern::check(seed, offset, part).err().map_or(0, |mismatch| mismatch.wrong_bytes);
            });
            there += 1;
        }
        Ok((there, wrong))
    }

    /// Fills in computed blocks, whose time has passed already, and puts them into the store too.
    fn store(&mut self, hashes: &[u64], places: &[usize]) -> Result<(), Failure> {
        for (hash, place) in hashes.iter().zip(places) {
            let seed = self.seed_of(*hash)?;
            self.buffer.region().fill_with(place * self.block_bytes, self.block_bytes, &mut |offset, part| {
                pattern::fill(seed, offset, part);
            });
        }
        self.put_all(hashes, places)
    }

    /// Puts cached blocks into the store.
    pub(super) fn put_all(&mut self, hashes: &[u64], places: &[usize]) -> Result<(), Failure> {
        let items = hashes.iter().zip(places).map(|(hash, place)| (key_of(&self.model, *hash), self.slice(*place)));
        let items: Vec<(String, Slice)> = items.collect();
        if !items.is_empty() {
            // A put that the store refuses for lack of memory is only logged.
            self.client.batch_put_from(&items)?.into_iter().filter_map(Result::err).for_each(|error| {
                tracing::debug!(%error, "a block was not stored");
            });
        }
        Ok(())
    }
}
