//! Prefix index: finds the instances that hold the longest prefix of a prompt.
//!
//! A block is identified by a rolling hash, which covers the block and everything before it. A matching block therefore
//! proves its whole prefix, and a lookup walks *runs*: sequences of blocks that were stored in one go, of which only
//! the last hash is compared, or the one at which the last prompt left the run. The walk ends once no holder of the
//! whole prefix is left, and it never lists the holders of a common head of all prompts: those are a bitset, which is
//! narrowed run by run until few holders are left.
//!
//! The keys of the table are hashes salted by context, so that one table serves all tenants and models and nobody can
//! choose where its blocks are. All memory follows from [`IndexConfig`]; when the index is full, the least recently
//! stored runs are evicted (CLOCK). The index has a single owner, which writes and reads; a host that needs more cores
//! shards by context or by first block.
//!
//! Out of scope: computing hashes, knowledge of tokens, and verification of the holders' reports.

mod arena;
mod blocks;
mod codec;
mod contexts;
mod find;
mod holders;
mod lists;
mod recent;
mod run;
mod snapshot;
mod table;

use std::fmt;

use bincode::{Decode, Encode};

pub use codec::SnapshotError;
pub(crate) use codec::{Reader, invalid, put, put_name};
pub use find::{Match, PrefixMatches};

use blocks::Blocks;
use contexts::Contexts;
use holders::Holders;
use run::Record;

/// Number of runs that an update sweeps while retired holders remain.
const SWEEP: usize = 64;

/// Flag of a place in the table: the low bits are a run, and the entry is its first block; else they are a block.
const FIRST: u32 = 1 << 31;
/// Maximum of [`IndexConfig::max_blocks`].
pub const MAX_BLOCKS: usize = 1 << 30;
/// Maximum of [`IndexConfig::max_holders`].
pub const MAX_HOLDERS: usize = 8_192;
/// Maximum length of each name in a context's key, in bytes.
pub const MAX_NAME_BYTES: usize = 256;

/// Limits of the index; its memory follows from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexConfig {
    /// Maximum number of blocks of all contexts: up to [`MAX_BLOCKS`]. Each takes about 14 bytes.
    pub max_blocks: usize,
    /// Maximum number of records of holders, 8 bytes each; a set of many holders counts as several.
    pub max_records: usize,
    /// Maximum number of holders, including recently retired ones: up to [`MAX_HOLDERS`].
    pub max_holders: usize,
    /// Maximum number of contexts: up to 65,534.
    pub max_contexts: usize,
    /// Seed of the salts of hashes: with a random seed, an attacker cannot choose colliding hashes. To be drawn at
    /// start.
    pub seed: u64,
}

impl Default for IndexConfig {
    fn default() -> Self {
        Self { max_blocks: 8 << 20, max_records: 8 << 20, max_holders: 1_024, max_contexts: 1_024, seed: 0 }
    }
}

/// Key of a context, within which blocks can be shared: requests of different contexts share nothing.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct PromptContext {
    /// Tenant of the requests.
    pub tenant: String,
    pub model: String,
    /// LoRA adapter; empty for none.
    pub lora: String,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Other inputs of the hashes, such as a cache salt; empty for none.
    pub salt: String,
}

/// Id of a context in an index.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct ContextId(u16);

impl ContextId {
    /// Returns the number of the context.
    #[must_use]
    pub const fn number(self) -> u16 {
        self.0
    }
}

/// Id of a holder in an index: an instance, a rank of one, or a store node. Ids of earlier incarnations are rejected.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct HolderId {
    slot: u16,
    generation: u32,
}

impl HolderId {
    /// Returns its slot in sets of holders: below [`IndexConfig::max_holders`], reused by later holders.
    #[must_use]
    pub const fn slot(self) -> u16 {
        self.slot
    }
}

/// Tier that blocks are in, nearest first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
#[repr(u16)]
pub enum Tier {
    /// GPU memory.
    Gpu = 0,
    /// Memory of the host.
    Dram = 1,
    /// Solid-state drives.
    Ssd = 2,
    /// The shared store.
    Pool = 3,
    /// Promised: an instance will compute or fetch the block, and no event has reported it yet.
    Promised = 4,
}

/// Tier that an instance reports its blocks in. Tags are append-only.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Encode, Decode)]
pub enum BlockTier {
    /// GPU memory.
    Gpu,
    /// Memory of the host.
    Dram,
    /// Solid-state drives.
    Ssd,
}

impl From<BlockTier> for Tier {
    fn from(tier: BlockTier) -> Self {
        match tier {
            BlockTier::Gpu => Self::Gpu,
            BlockTier::Dram => Self::Dram,
            BlockTier::Ssd => Self::Ssd,
        }
    }
}

/// Set of tiers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tiers(u8);

impl Tiers {
    /// Tiers of the instance itself, including promised blocks: all but the pool.
    pub const OWN: Self = Self(0b1_0111);
    /// Tiers of the instance itself that it has reported.
    pub const SAID: Self = Self(0b0_0111);
    /// Tiers that peers can fetch from an instance.
    pub const FETCHED: Self = Self(0b0_0110);
    /// Tiers that can be fetched from any holder.
    pub const SHARED: Self = Self(0b0_1110);
    /// Tiers that events report: all but promised blocks.
    pub const REPORTED: Self = Self(0b0_1111);
    /// All tiers.
    pub const ALL: Self = Self(0b1_1111);

    /// Returns the set of `tier` alone.
    #[must_use]
    pub const fn only(tier: Tier) -> Self {
        Self(1 << tier as u16)
    }

    /// Returns the set of `tier` and the nearer ones.
    #[must_use]
    pub const fn up_to(tier: Tier) -> Self {
        Self((2 << tier as u16) - 1)
    }

    const fn has(self, tier: u16) -> bool {
        self.0 & (1 << tier) != 0
    }
}

/// Result of [`PrefixIndex::stored`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StoreOutcome {
    /// Blocks that were not in the index before.
    pub new_blocks: usize,
    /// Blocks that were evicted to make room.
    pub forgotten_blocks: usize,
}

/// Result of [`PrefixIndex::removed`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RemovalOutcome {
    /// Blocks that the holder had in that tier.
    pub removed_blocks: usize,
    /// Blocks that are not in the index.
    pub unknown_blocks: usize,
}

/// Reason for rejecting a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum IndexError {
    /// A limit of the configuration is out of range.
    Config {
        /// Name of the limit.
        field: &'static str,
        value: usize,
        /// Its maximum; the minimum is 1.
        most: usize,
    },
    /// The context does not belong to this index.
    UnknownContext,
    /// The holder was retired, or belongs to another index.
    UnknownHolder,
    /// The configured number of contexts is reached.
    TooManyContexts { most: usize },
    /// The configured number of holders is reached.
    TooManyHolders { most: usize },
    /// A name in the context's key is too long.
    LongName {
        /// Its length in bytes.
        bytes: usize,
    },
}

impl fmt::Display for IndexError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config { field, value, most } => write!(f, "{field} is {value}; it must be 1 to {most}"),
            Self::UnknownContext => write!(f, "unknown context; create it first"),
            Self::UnknownHolder => write!(f, "unknown holder; it was retired, register it again"),
            Self::TooManyContexts { most } => write!(f, "there are {most} contexts already; raise max_contexts"),
            Self::TooManyHolders { most } => write!(f, "there are {most} holders already; raise max_holders"),
            Self::LongName { bytes } => {
                write!(f, "a name of {bytes} bytes in the context; at most {MAX_NAME_BYTES}")
            }
        }
    }
}

impl std::error::Error for IndexError {}

/// Prefix index: contexts, holders, and the blocks that these hold.
pub struct PrefixIndex {
    config: IndexConfig,
    contexts: Contexts,
    holders: Holders,
    blocks: Blocks,
    /// Run at which the sweep for retired holders continues.
    broom: usize,
}

/// Statistics of the index.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IndexStats {
    /// Blocks with a holder.
    pub blocks: usize,
    /// Runs that these are in.
    pub runs: usize,
    /// Records of holders.
    pub records: usize,
    /// Blocks evicted for lack of room, in total.
    pub forgotten_blocks: usize,
    /// Bytes that the present blocks use: keys, table, runs and holders.
    pub used_bytes: usize,
    /// Bytes reserved.
    pub reserved_bytes: usize,
}

impl PrefixIndex {
    /// Creates an empty index.
    ///
    /// # Errors
    /// When a limit is 0 or too large.
    pub fn new(config: IndexConfig) -> Result<Self, IndexError> {
        let fields = [
            ("max_blocks", config.max_blocks, MAX_BLOCKS),
            ("max_records", config.max_records, u32::MAX as usize),
            ("max_holders", config.max_holders, MAX_HOLDERS),
            ("max_contexts", config.max_contexts, usize::from(u16::MAX) - 1),
        ];
        if let Some((field, value, most)) = fields.into_iter().find(|(_, value, most)| !(1..=*most).contains(value)) {
            return Err(IndexError::Config { field, value, most });
        }
        Ok(Self {
            contexts: Contexts::new(config.seed, config.max_contexts),
            holders: Holders::new(config.max_holders),
            blocks: Blocks::new(config.max_blocks, config.max_holders, config.seed),
            broom: 0,
            config,
        })
    }

    /// Returns the context named `key`; creates it if it is new.
    ///
    /// # Errors
    /// When a name is too long, or there are too many contexts.
    pub fn context(&mut self, key: &PromptContext) -> Result<ContextId, IndexError> {
        self.contexts.get_or_add(key)
    }

    /// Registers a holder, which holds nothing.
    ///
    /// # Errors
    /// When there are too many holders.
    pub fn register(&mut self) -> Result<HolderId, IndexError> {
        if self.holders.is_full() {
            // The slots of retired holders are free once they are swept out of every run; two rounds suffice.
            self.sweep(2 * self.blocks.places() + 2);
        }
        self.holders.register().ok_or(IndexError::TooManyHolders { most: self.config.max_holders })
    }

    /// Retires a holder and everything it holds. Takes effect at once, in constant time: its records are swept out by
    /// later updates. A publisher that cleared all its blocks is retired and registered again.
    ///
    /// # Errors
    /// When it is not registered.
    pub fn retire(&mut self, holder: HolderId) -> Result<(), IndexError> {
        self.holders.retire(holder)
    }

    /// Hides the holders in the slots `kept` from lookups, and retires all others: those of a restored index whose
    /// reports have not been confirmed yet. Blocks of a hidden holder are stored and removed as those of any other.
    /// Returns the hidden holders in the order of `kept`; none for a slot without a holder.
    pub fn hide_and_retire(&mut self, kept: &[u16]) -> Vec<Option<HolderId>> {
        for slot in (0..self.config.max_holders as u16).filter(|slot| !kept.contains(slot)) {
            let holder = self.holders.holder(slot);
            // A slot without a holder stays as it is.
            let _ = self.holders.retire(holder);
        }
        let hide = |slot: &u16| {
            let holder = (usize::from(*slot) < self.config.max_holders).then(|| self.holders.holder(*slot))?;
            self.holders.hide(holder).ok().map(|()| holder)
        };
        kept.iter().map(hide).collect()
    }

    /// Lets lookups answer a hidden holder. Idempotent.
    ///
    /// # Errors
    /// When it is not registered.
    pub fn show(&mut self, holder: HolderId) -> Result<(), IndexError> {
        self.holders.show(holder)
    }

    /// Calls `look` with an index whose lookups answer hidden holders, too: for decisions about what the index keeps,
    /// not for answers.
    pub fn with_hidden<R>(&mut self, look: impl FnOnce(&mut Self) -> R) -> R {
        self.holders.reveal();
        let found = look(self);
        self.holders.conceal();
        found
    }

    /// Returns the keys of all contexts, in the order of their creation.
    pub(crate) fn context_keys(&self) -> Vec<PromptContext> {
        self.contexts.names().into_iter().cloned().collect()
    }

    /// Returns statistics, in time proportional to the number of runs with many holders.
    #[must_use]
    pub fn stats(&self) -> IndexStats {
        self.blocks.stats()
    }

    /// Notes that `holder` has the blocks `hashes` in `tier`. The hashes are rolling, in the order of the prompt;
    /// `parent` is that of the block before the first, if there is one, and only helps to keep blocks together.
    ///
    /// When the index is full, the least recently stored runs are evicted; [`StoreOutcome::forgotten_blocks`] counts
    /// their blocks.
    ///
    /// # Errors
    /// Unknown context or holder: nothing changes.
    pub fn stored(
        &mut self,
        context: ContextId,
        holder: HolderId,
        tier: Tier,
        parent: Option<u64>,
        hashes: &[u64],
    ) -> Result<StoreOutcome, IndexError> {
        let salt = self.contexts.salt(context)?;
        let slot = self.holders.slot(holder)?;
        self.sweep(SWEEP);
        let forgotten = self.blocks.forgotten();
        let (mut at, mut new_blocks) = (0, 0);
        let mut before = parent.and_then(|hash| self.blocks.locate(salt, hash));
        while at < hashes.len() {
            let (run, start, end) = if let Some((run, offset)) = self.blocks.enter(salt, hashes[at]) {
                let (blocks, _) = self.blocks.follow(run, offset, salt, &hashes[at..]);
                self.blocks.run_mut(run).touch();
                (run, offset, offset + blocks)
            } else {
                let Some((run, start, end)) = self.blocks.extend(salt, before, &hashes[at..]) else { break };
                new_blocks += usize::from(end - start);
                (run, start, end)
            };
            if start == 0 {
                self.blocks.note_first(run, salt);
                before.into_iter().for_each(|before| self.blocks.note_branch(before, run));
            }
            self.blocks.cover(run, Record { slot, tier: tier as u16, start, end }, &self.holders);
            at += usize::from(end - start);
            before = Some((run, end - 1));
            // A cut may have moved the end of the stretch that was just covered.
            if before.is_some_and(|(run, offset)| offset >= self.blocks.run(run).len) {
                before = self.blocks.locate(salt, hashes[at - 1]);
            }
        }
        self.blocks.make_room(self.config.max_records);
        Ok(StoreOutcome { new_blocks, forgotten_blocks: self.blocks.forgotten() - forgotten })
    }

    /// Notes that `holder` no longer has the blocks `hashes` in `tier`. Blocks that it did not have are counted and
    /// ignored.
    ///
    /// # Errors
    /// Unknown context or holder: nothing changes.
    pub fn removed(
        &mut self,
        context: ContextId,
        holder: HolderId,
        tier: Tier,
        hashes: &[u64],
    ) -> Result<RemovalOutcome, IndexError> {
        let salt = self.contexts.salt(context)?;
        let slot = self.holders.slot(holder)?;
        self.sweep(SWEEP);
        let mut outcome = RemovalOutcome::default();
        let mut at = 0;
        while at < hashes.len() {
            let Some((run, offset)) = self.blocks.locate(salt, hashes[at]) else {
                outcome.unknown_blocks += 1;
                at += 1;
                continue;
            };
            let (start, end, count) = self.blocks.neighbours(run, offset, &hashes[at..]);
            outcome.removed_blocks += self.blocks.uncover(run, slot, tier as u16, start, end);
            at += count;
        }
        Ok(outcome)
    }

    /// Removes the retired holders from the next `runs` runs; a holder that is out of all runs frees its slot.
    fn sweep(&mut self, runs: usize) {
        if !self.holders.has_retired() {
            return;
        }
        for _ in 0..runs {
            let places = self.blocks.places();
            if self.broom >= places {
                self.broom = 0;
                self.holders.end_sweep();
                if !self.holders.has_retired() || places == 0 {
                    return;
                }
            }
            self.blocks.sweep_run(self.broom as u32, &self.holders);
            self.broom += 1;
        }
    }
}
