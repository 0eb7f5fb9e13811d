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
mod compare;
mod find;
mod run;
mod snapshot;
mod table;
mod update;

use std::collections::BTreeMap;
use std::fmt;

use kvplane_proto::rng::mix64;

pub use find::{Match, PrefixMatches};
pub use snapshot::SnapshotError;

use arena::Arena;
use run::Runs;
use table::Table;

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

/// Makes keys of hashes: the same hash has another key in every context.
#[derive(Clone, Copy)]
struct Salt(u64);

impl Salt {
    fn key(self, hash: u64) -> u64 {
        mix64(hash ^ self.0)
    }
}

/// The index.
pub struct PrefixIndex {
    config: IndexConfig,
    table: Table,
    arena: Arena,
    runs: Runs,
    contexts: BTreeMap<ContextKey, ContextId>,
    salts: Vec<Salt>,
    generations: Vec<u32>,
    live: Vec<u64>,
    /// Slots that nobody has, the next to be used last.
    spare: Vec<u16>,
    /// Slots of those retired, and whether the broom has been at the first run since.
    dying: Vec<(u16, bool)>,
    broom: usize,
    hand: usize,
    blocks: usize,
    forgotten_blocks: usize,
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
        let arena_blocks = config.max_blocks.next_multiple_of(arena::UNIT);
        Ok(Self {
            table: Table::new(arena_blocks),
            arena: Arena::new(arena_blocks),
            runs: Runs::new(config.max_holders),
            contexts: BTreeMap::new(),
            salts: Vec::new(),
            generations: vec![0; config.max_holders],
            live: vec![0; config.max_holders.div_ceil(64)],
            spare: (0..config.max_holders as u16).rev().collect(),
            dying: Vec::new(),
            broom: 0,
            hand: 0,
            blocks: 0,
            forgotten_blocks: 0,
            config,
        })
    }

    /// The context named `key`, made if it is new.
    ///
    /// # Errors
    /// When a name is too long, or there are too many contexts.
    pub fn context(&mut self, key: &ContextKey) -> Result<ContextId, IndexError> {
        if let Some(id) = self.contexts.get(key) {
            return Ok(*id);
        }
        for name in [&key.tenant, &key.model, &key.lora, &key.salt] {
            if name.len() > MAX_NAME_BYTES {
                return Err(IndexError::LongName { bytes: name.len() });
            }
        }
        if self.salts.len() == self.config.max_contexts {
            return Err(IndexError::TooManyContexts { most: self.config.max_contexts });
        }
        let id = ContextId(self.salts.len() as u16);
        self.salts.push(salt_of(self.config.seed, id));
        self.contexts.insert(key.clone(), id);
        Ok(id)
    }

    /// The context named `key`, if there is one.
    #[must_use]
    pub fn find_context(&self, key: &ContextKey) -> Option<ContextId> {
        self.contexts.get(key).copied()
    }

    /// A new holder, who holds nothing.
    ///
    /// # Errors
    /// When there are too many.
    pub fn register(&mut self) -> Result<HolderId, IndexError> {
        if self.spare.is_empty() {
            // Those retired wait to be swept out of every run; two rounds do it.
            self.sweep(2 * self.runs.places() + 2);
        }
        let Some(slot) = self.spare.pop() else {
            return Err(IndexError::TooManyHolders { most: self.config.max_holders });
        };
        self.live[usize::from(slot) / 64] |= 1 << (slot % 64);
        Ok(HolderId { slot, generation: self.generations[usize::from(slot)] })
    }

    /// Forgets a holder and everything it held. Takes effect at once and costs nothing now: its traces are swept out
    /// with later events. A publisher that cleared all its blocks is retired and registered again.
    ///
    /// # Errors
    /// When it is not registered.
    pub fn retire(&mut self, holder: HolderId) -> Result<(), IndexError> {
        let slot = self.slot(holder)?;
        self.live[usize::from(slot) / 64] &= !(1 << (slot % 64));
        self.generations[usize::from(slot)] += 1;
        self.dying.push((slot, false));
        Ok(())
    }

    /// How much there is. Costs time in proportion to the runs with many holders.
    #[must_use]
    pub fn stats(&self) -> IndexStats {
        let (table, arena, runs) = (self.table.bytes(), self.arena.bytes(), self.runs.bytes());
        let share = |bytes: usize, of: usize, all: usize| (bytes as u128 * of as u128 / all.max(1) as u128) as usize;
        let all = self.config.max_blocks;
        let headers = self.runs.used() * size_of::<run::RunHeader>();
        let holders = runs.saturating_sub(self.runs.places() * size_of::<run::RunHeader>());
        IndexStats {
            blocks: self.blocks,
            runs: self.runs.used(),
            records: self.runs.held(),
            forgotten_blocks: self.forgotten_blocks,
            used_bytes: share(table, self.blocks, all)
                + share(arena, self.arena.used_blocks(), all)
                + headers
                + holders,
            reserved_bytes: table + arena + runs,
        }
    }

    fn salt(&self, context: ContextId) -> Result<Salt, IndexError> {
        self.salts.get(usize::from(context.0)).copied().ok_or(IndexError::UnknownContext)
    }

    fn slot(&self, holder: HolderId) -> Result<u16, IndexError> {
        let known = self.generations.get(usize::from(holder.slot)) == Some(&holder.generation);
        if known && self.live_bit(holder.slot) { Ok(holder.slot) } else { Err(IndexError::UnknownHolder) }
    }

    fn live_bit(&self, slot: u16) -> bool {
        run::bit(&self.live, slot)
    }

    fn holder(&self, slot: u16) -> HolderId {
        HolderId { slot, generation: self.generations[usize::from(slot)] }
    }

    /// The run and the offset of the block with `key`.
    fn locate(&self, context: ContextId, key: u64) -> Option<(u32, u16)> {
        let place = self.table.find(key, |place| {
            if place & FIRST == 0 {
                self.arena.key(place as usize) == key
            } else {
                self.runs.get(place & !FIRST).first == key
            }
        })?;
        let (run, offset) = if place & FIRST == 0 {
            let run = self.arena.run_of(place);
            (run, (place - self.runs.get(run).start) as u16)
        } else {
            (place & !FIRST, 0)
        };
        (self.runs.get(run).context == context.0).then_some((run, offset))
    }

    /// Frees the slots that the broom has been everywhere for.
    fn finish_dying(&mut self) {
        let spare = &mut self.spare;
        self.dying.retain_mut(|(slot, started)| {
            if *started {
                spare.push(*slot);
            }
            !std::mem::replace(started, true)
        });
    }
}

fn salt_of(seed: u64, context: ContextId) -> Salt {
    Salt(mix64(seed ^ mix64(u64::from(context.0) + 1)))
}
