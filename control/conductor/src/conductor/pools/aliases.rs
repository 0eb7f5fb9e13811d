//! Aliases of a pool: engine hashes whose token hashes are known, since an event contained both.
//!
//! An alias is kept while its block has a holder in the prefix index: removals name blocks by engine hash, and one
//! that could not be resolved would leave a block in the index that its holder does not have. A full table therefore
//! accepts no new alias, and the blocks are indexed by engine hash alone.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, Hasher};

use kvplane_proto::rng::mix64;

use crate::index::{Reader, SnapshotError, invalid, put};

/// Stands for the token hashes of an ambiguous engine hash.
const SEVERAL: u64 = 0;

/// Partial block: the last one of a prompt, with fewer tokens than a block has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PartialBlock {
    /// Its token hash.
    pub(super) hash: u64,
    /// Number of its tokens.
    pub(super) tokens: u32,
}

/// Block that an engine hash names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NamedBlock {
    /// The full block with this token hash.
    Full(u64),
    /// A partial block.
    Partial(PartialBlock),
    /// Several blocks: the engine hashes no more than the tokens of the block.
    Several,
}

/// Outcome of [`Aliases::learn`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AliasOutcome {
    /// The alias is new.
    New,
    /// It was known.
    Known,
    /// The engine hash named the block with this token hash, and is ambiguous from now on.
    Contradicts(u64),
    /// The engine hash is ambiguous, or there is no room.
    Refused,
}

/// Hashes keys that are hashes already, with a secret seed.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyMixer(u64);

impl KeyMixer {
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed)
    }
}

impl BuildHasher for KeyMixer {
    type Hasher = Self;

    fn build_hasher(&self) -> Self {
        *self
    }
}

impl Hasher for KeyMixer {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|byte| self.write_u64(u64::from(*byte)));
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = mix64(self.0 ^ key);
    }
}

/// Aliases, at most as many as the index has blocks.
#[derive(Clone)]
pub(in crate::conductor) struct Aliases {
    /// Token hashes of full blocks, by engine hash.
    full: HashMap<u64, u64, KeyMixer>,
    partial: HashMap<u64, PartialBlock, KeyMixer>,
    /// Engine hashes, those first that were not examined for longest.
    order: VecDeque<u64>,
    most: usize,
}

impl Aliases {
    pub(super) fn new(most: usize, seed: u64) -> Self {
        let mixer = KeyMixer::new(seed);
        Self { full: HashMap::with_hasher(mixer), partial: HashMap::with_hasher(mixer), order: VecDeque::new(), most }
    }

    /// Writes all aliases to a snapshot: engine hash, token hash, tokens of a partial block or 0.
    pub(in crate::conductor) fn put(&self, out: &mut Vec<u8>) {
        let count = self.full.len() + self.partial.len();
        out.reserve(8 + count * 24);
        put(out, count as u64);
        // The tables are read in their own order: a lookup for each alias would take twenty times as long.
        for (engine_hash, hash) in &self.full {
            [*engine_hash, *hash, 0].into_iter().for_each(|word| put(out, word));
        }
        for (engine_hash, PartialBlock { hash, tokens }) in &self.partial {
            [*engine_hash, *hash, u64::from(*tokens)].into_iter().for_each(|word| put(out, word));
        }
    }

    /// Reads the aliases of a snapshot, at most `most`.
    pub(in crate::conductor) fn read(reader: &mut Reader<'_>, most: usize, seed: u64) -> Result<Self, SnapshotError> {
        let mut aliases = Self::new(most, seed);
        for _ in 0..reader.count("aliases", most)? {
            let (engine_hash, hash, tokens) = (reader.word()?, reader.word()?, reader.word()?);
            let tokens = u32::try_from(tokens).map_err(|_| invalid("tokens of a partial block", tokens))?;
            let block = match (hash, tokens) {
                (SEVERAL, 0) => NamedBlock::Several,
                (_, 0) => NamedBlock::Full(hash),
                _ => NamedBlock::Partial(PartialBlock { hash, tokens }),
            };
            if aliases.learn(engine_hash, block) != AliasOutcome::New {
                return Err(invalid("an engine hash that it has already", engine_hash));
            }
        }
        Ok(aliases)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.order.len()
    }

    /// Returns true if partial blocks are known.
    pub(super) fn has_partial(&self) -> bool {
        !self.partial.is_empty()
    }

    /// Returns the block that an engine hash names, if known.
    pub(super) fn get(&self, engine_hash: u64) -> Option<NamedBlock> {
        match self.full.get(&engine_hash) {
            Some(&SEVERAL) => Some(NamedBlock::Several),
            Some(hash) => Some(NamedBlock::Full(*hash)),
            None => self.partial.get(&engine_hash).copied().map(NamedBlock::Partial),
        }
    }

    /// Notes that an engine hash names a block.
    pub(super) fn learn(&mut self, engine_hash: u64, block: NamedBlock) -> AliasOutcome {
        match self.get(engine_hash) {
            Some(known) if known == block => return AliasOutcome::Known,
            Some(NamedBlock::Several) => return AliasOutcome::Refused,
            Some(NamedBlock::Full(former) | NamedBlock::Partial(PartialBlock { hash: former, .. })) => {
                self.partial.remove(&engine_hash);
                self.full.insert(engine_hash, SEVERAL);
                return AliasOutcome::Contradicts(former);
            }
            None if self.order.len() >= self.most => return AliasOutcome::Refused,
            None => self.order.push_back(engine_hash),
        }
        match block {
            NamedBlock::Full(hash) => drop(self.full.insert(engine_hash, hash)),
            NamedBlock::Partial(part) => drop(self.partial.insert(engine_hash, part)),
            NamedBlock::Several => drop(self.full.insert(engine_hash, SEVERAL)),
        }
        AliasOutcome::New
    }

    /// Returns true if this many new aliases fit.
    pub(super) fn has_room(&self, coming: usize) -> bool {
        self.order.len() + coming <= self.most
    }

    /// Examines the `looks` aliases that were not examined for longest, and drops those whose blocks have no holder.
    pub(super) fn sweep(&mut self, looks: usize, mut is_held: impl FnMut(u64) -> bool) {
        for _ in 0..looks.min(self.order.len()) {
            let Some(engine_hash) = self.order.pop_front() else { return };
            let held = match self.get(engine_hash) {
                Some(NamedBlock::Full(hash) | NamedBlock::Partial(PartialBlock { hash, .. })) => is_held(hash),
                // Forgotten, the hash would name one of its blocks again.
                Some(NamedBlock::Several) => self.order.len() < self.most / 2,
                None => false,
            };
            if held {
                self.order.push_back(engine_hash);
            } else {
                self.full.remove(&engine_hash);
                self.partial.remove(&engine_hash);
            }
        }
    }
}
