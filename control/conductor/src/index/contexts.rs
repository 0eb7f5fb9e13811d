//! Contexts, within which blocks can be shared. Each has a salt, so that the keys of two contexts never collide.

use std::collections::BTreeMap;

use kvplane_proto::rng::mix64;

use super::{ContextId, IndexError, MAX_NAME_BYTES, PromptContext};

/// Salt of a context: maps the hash of a block to its key in the table, which differs in every context.
#[derive(Clone, Copy)]
pub(super) struct Salt {
    context: u16,
    word: u64,
}

impl Salt {
    /// Returns the salt of a context, by its number, in an index with this seed.
    pub(super) fn of(seed: u64, context: u16) -> Self {
        Self { context, word: mix64(seed ^ mix64(u64::from(context) + 1)) }
    }

    pub(super) const fn context(self) -> u16 {
        self.context
    }

    pub(super) fn key(self, hash: u64) -> u64 {
        mix64(hash ^ self.word)
    }
}

/// Contexts of an index.
pub(super) struct Contexts {
    seed: u64,
    most: usize,
    ids: BTreeMap<PromptContext, ContextId>,
    /// Salts, by id.
    salts: Vec<Salt>,
}

impl Contexts {
    /// Creates an empty set of at most `most` contexts.
    pub(super) const fn new(seed: u64, most: usize) -> Self {
        Self { seed, most, ids: BTreeMap::new(), salts: Vec::new() }
    }

    /// Returns the context named `key`; creates it if it is new.
    pub(super) fn get_or_add(&mut self, key: &PromptContext) -> Result<ContextId, IndexError> {
        if let Some(id) = self.ids.get(key) {
            return Ok(*id);
        }
        for name in [&key.tenant, &key.model, &key.lora, &key.salt] {
            if name.len() > MAX_NAME_BYTES {
                return Err(IndexError::LongName { bytes: name.len() });
            }
        }
        if self.salts.len() == self.most {
            return Err(IndexError::TooManyContexts { most: self.most });
        }
        Ok(self.add(key.clone()))
    }

    /// Adds a new context, within the limit.
    pub(super) fn add(&mut self, key: PromptContext) -> ContextId {
        let id = ContextId(self.salts.len() as u16);
        self.salts.push(Salt::of(self.seed, id.0));
        self.ids.insert(key, id);
        id
    }

    pub(super) fn salt(&self, context: ContextId) -> Result<Salt, IndexError> {
        self.salts.get(usize::from(context.0)).copied().ok_or(IndexError::UnknownContext)
    }

    pub(super) const fn count(&self) -> usize {
        self.salts.len()
    }

    /// Returns the names in the order of ids.
    pub(super) fn names(&self) -> Vec<&PromptContext> {
        let mut names: Vec<(&PromptContext, ContextId)> = self.ids.iter().map(|(key, id)| (key, *id)).collect();
        names.sort_unstable_by_key(|(_, id)| *id);
        names.into_iter().map(|(key, _)| key).collect()
    }
}
