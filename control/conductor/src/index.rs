//! The prefix index: who holds which beginnings of prompts, answered from the deepest holders down.
//!
//! A block is named by a rolling hash, which stands for itself and for everything before it. So a block's place proves
//! its whole prefix, and a question walks *runs*: rows of blocks stored in one go, of which it compares the last key
//! only. It ends as soon as nobody is left who holds everything so far, and it never lists the holders of a head that
//! everybody has: those are a bitset, cut down run by run until few are left.
//!
//! Hashes are salted by context, so that one table serves all tenants and models and no two of them meet. All memory
//! follows from [`IndexConfig`]; when it is full, the runs longest not stored are forgotten. One owner writes and
//! reads; a host that wants more cores shards by context or by first block.
//!
//! What it does not do: compute hashes, know about tokens, or check that a holder tells the truth.

mod arena;
mod blocks;
mod codec;
mod contexts;
mod find;
mod holders;
mod run;
mod snapshot;
mod table;

use std::fmt;

pub use codec::SnapshotError;
pub use find::{Match, PrefixMatches};

use blocks::Blocks;
use contexts::Contexts;
use holders::Holders;
use run::Record;

/// Runs that an update sweeps while somebody was retired.
const SWEEP: usize = 64;

/// Bit of a place in the table: the low bits are a run whose first block it is, not a block.
const FIRST: u32 = 1 << 31;
/// The most blocks that can be configured.
pub const MAX_BLOCKS: usize = 1 << 30;
/// The most holders that can be configured.
pub const MAX_HOLDERS: usize = 8_192;
/// The longest name of a context's part, in bytes.
pub const MAX_NAME_BYTES: usize = 256;

/// The index's limits; its memory follows from them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexConfig {
    /// Blocks of all contexts: up to [`MAX_BLOCKS`]. Each takes about 15 bytes.
    pub max_blocks: usize,
    /// Records of who holds which stretch of a run, 8 bytes each; a set of many holders counts as several.
    pub max_records: usize,
    /// Holders at one time, counting those retired a moment ago: up to [`MAX_HOLDERS`].
    pub max_holders: usize,
    /// Contexts: up to 65,534.
    pub max_contexts: usize,
    /// Salts the hashes, so that nobody can choose colliding ones. Draw it at start.
    pub seed: u64,
}

impl Default for IndexConfig {
    fn default() -> Self {
        Self { max_blocks: 8 << 20, max_records: 8 << 20, max_holders: 1_024, max_contexts: 1_024, seed: 0 }
    }
}

/// What blocks can be shared among: two requests of different contexts share nothing.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct ContextKey {
    /// Whose requests these are.
    pub tenant: String,
    /// The model.
    pub model: String,
    /// The LoRA adapter; empty for none.
    pub lora: String,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// What else goes into the hashes, such as a cache salt; empty for none.
    pub salt: String,
}

/// A context of this index.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct ContextId(u16);

impl ContextId {
    /// Its number.
    #[must_use]
    pub const fn number(self) -> u16 {
        self.0
    }
}

/// A holder of this index: an instance, or a rank of one, or a store node. Of an older incarnation it is refused.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct HolderId {
    slot: u16,
    generation: u32,
}

impl HolderId {
    /// Its place in sets of holders: below [`IndexConfig::max_holders`], used again by others later.
    #[must_use]
    pub const fn slot(self) -> u16 {
        self.slot
    }
}

/// Where blocks lie, nearest first.
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
    /// Will be there: an instance computes it or gets it, and no event has said so yet.
    Promised = 4,
}

/// A set of tiers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Tiers(u8);

impl Tiers {
    /// What an instance has itself or will have: all but the pool.
    pub const OWN: Self = Self(0b1_0111);
    /// What an instance has itself by what it said.
    pub const SAID: Self = Self(0b0_0111);
    /// What others can fetch from an instance.
    pub const FETCHED: Self = Self(0b0_0110);
    /// What others can fetch from anywhere.
    pub const SHARED: Self = Self(0b0_1110);
    /// All.
    pub const ALL: Self = Self(0b1_1111);

    /// Only `tier`.
    #[must_use]
    pub const fn only(tier: Tier) -> Self {
        Self(1 << tier as u16)
    }

    /// `tier` and those nearer.
    #[must_use]
    pub const fn up_to(tier: Tier) -> Self {
        Self((2 << tier as u16) - 1)
    }

    const fn has(self, tier: u16) -> bool {
        self.0 & (1 << tier) != 0
    }
}

/// What an event changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StoreOutcome {
    /// Blocks that nobody had before.
    pub new_blocks: usize,
    /// Blocks that were forgotten to make room.
    pub forgotten_blocks: usize,
}

/// What a removal found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RemovalOutcome {
    /// Blocks that the holder had in that tier.
    pub removed_blocks: usize,
    /// Blocks that nobody has.
    pub unknown_blocks: usize,
}

/// Why a call was refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IndexError {
    /// A limit of the configuration that cannot be.
    Config {
        /// Which one.
        field: &'static str,
        /// Its value.
        value: usize,
        /// The most it may be; the least is 1.
        most: usize,
    },
    /// The context's id is not one of this index.
    UnknownContext,
    /// The holder was retired, or is of another index.
    UnknownHolder,
    /// There are as many contexts as were configured.
    TooManyContexts {
        /// The limit.
        most: usize,
    },
    /// There are as many holders as were configured.
    TooManyHolders {
        /// The limit.
        most: usize,
    },
    /// A part of the context's name is too long.
    LongName {
        /// Its length in bytes.
        bytes: usize,
    },
}

impl fmt::Display for IndexError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config { field, value, most } => write!(f, "{field} is {value}; it can be 1 to {most}"),
            Self::UnknownContext => write!(f, "unknown context; ask the index for its id first"),
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

/// The index: contexts, holders, and the blocks that these hold there.
pub struct PrefixIndex {
    config: IndexConfig,
    contexts: Contexts,
    holders: Holders,
    blocks: Blocks,
    /// The run at which sweeping out those who were retired goes on.
    broom: usize,
}

/// How much there is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IndexStats {
    /// Blocks that somebody holds.
    pub blocks: usize,
    /// Runs that they are in.
    pub runs: usize,
    /// Records of holders.
    pub records: usize,
    /// Blocks forgotten for want of room, ever.
    pub forgotten_blocks: usize,
    /// Bytes for as many blocks as there are: keys, table, runs and holders.
    pub used_bytes: usize,
    /// Bytes reserved.
    pub reserved_bytes: usize,
}

impl PrefixIndex {
    /// An empty index.
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
            blocks: Blocks::new(config.max_blocks, config.max_holders),
            broom: 0,
            config,
        })
    }

    /// The context named `key`, made if it is new.
    ///
    /// # Errors
    /// When a name is too long, or there are too many contexts.
    pub fn context(&mut self, key: &ContextKey) -> Result<ContextId, IndexError> {
        self.contexts.get_or_add(key)
    }

    /// A new holder, who holds nothing.
    ///
    /// # Errors
    /// When there are too many.
    pub fn register(&mut self) -> Result<HolderId, IndexError> {
        if self.holders.is_full() {
            // Those retired wait to be swept out of every run; two rounds do it.
            self.sweep(2 * self.blocks.places() + 2);
        }
        self.holders.register().ok_or(IndexError::TooManyHolders { most: self.config.max_holders })
    }

    /// Forgets a holder and everything it held. Takes effect at once and costs nothing now: its traces are swept out
    /// with later events. A publisher that cleared all its blocks is retired and registered again.
    ///
    /// # Errors
    /// When it is not registered.
    pub fn retire(&mut self, holder: HolderId) -> Result<(), IndexError> {
        self.holders.retire(holder)
    }

    /// How much there is. Costs time in proportion to the runs with many holders.
    #[must_use]
    pub fn stats(&self) -> IndexStats {
        self.blocks.stats()
    }

    /// `holder` has the blocks `hashes` in `tier`. Rolling hashes in the order of the prompt; `parent` is that of the
    /// block before the first, if there is one, and only helps to keep blocks together.
    ///
    /// When the index is full, the runs longest not stored go; [`StoreOutcome::forgotten_blocks`] counts their blocks.
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
        let mut before = parent.map(|hash| salt.key(hash)).and_then(|key| self.blocks.locate(context, key));
        while at < hashes.len() {
            let key = salt.key(hashes[at]);
            if let Some((run, offset)) = self.blocks.locate(context, key) {
                let blocks = self.blocks.matching(run, offset, salt, &hashes[at..]);
                let header = self.blocks.run_mut(run);
                header.touch();
                if offset + blocks < header.len && at + usize::from(blocks) < hashes.len() {
                    header.branch = offset + blocks;
                }
                let record = Record { slot, tier: tier as u16, start: offset, end: offset + blocks };
                self.blocks.cover(run, record, &self.holders);
                at += usize::from(blocks);
                before = Some((run, offset + blocks - 1));
            } else {
                let Some((run, start, end)) = self.blocks.extend(context, before, salt, &hashes[at..]) else { break };
                let record = Record { slot, tier: tier as u16, start, end };
                self.blocks.cover(run, record, &self.holders);
                at += usize::from(end - start);
                new_blocks += usize::from(end - start);
                before = Some((run, end - 1));
            }
            // A cut may have moved the end of what was just covered.
            if before.is_some_and(|(run, offset)| offset >= self.blocks.run(run).len) {
                before = self.blocks.locate(context, salt.key(hashes[at - 1]));
            }
        }
        self.blocks.make_room(self.config.max_records);
        Ok(StoreOutcome { new_blocks, forgotten_blocks: self.blocks.forgotten() - forgotten })
    }

    /// `holder` no longer has the blocks `hashes` in `tier`. What it did not have is counted and left.
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
            let Some((run, offset)) = self.blocks.locate(context, salt.key(hashes[at])) else {
                outcome.unknown_blocks += 1;
                at += 1;
                continue;
            };
            let (start, end, count) = self.blocks.neighbours(run, offset, salt, &hashes[at..]);
            outcome.removed_blocks += self.blocks.uncover(run, slot, tier as u16, start, end);
            at += count;
        }
        Ok(outcome)
    }

    /// Takes those who were retired out of the next `runs` runs; whoever is out of all of them frees its slot.
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
