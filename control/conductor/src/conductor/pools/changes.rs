//! Changes of caches and of the shared store, applied to a pool's index.
//!
//! Blocks whose events contain tokens are indexed by token hash, so that engines of all hash schemes share them;
//! [`super::aliases`] maps engine hashes to token hashes, for parents, removals, requests by hash, and blocks of the
//! store. All other blocks are indexed by engine hash: those without tokens, those behind an unknown parent, and those
//! for which the table has no room.

use std::sync::Arc;

use super::aliases::{AliasOutcome, NamedBlock, PartialBlock};
use super::{Pool, event_context};
use crate::conductor::cache_feed::{BlockChange, StoredTokens};
use crate::conductor::error::ConductorError;
use crate::engine::tokens::{ROOT, token_hash};
use crate::index::{BlockTier, ContextId, HolderId, PrefixIndex, PrefixMatches, PromptContext, Tier, Tiers};
use crate::scheduler::SchedulerError;

/// Hashes by which the index knows a stored block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IndexedBy {
    EngineHash,
    TokenHash,
    /// Requests that came before its token hash was known still have its engine hash.
    Both,
}

/// Number of aliases that are examined for each new one when the table is full.
const FULL_LOOKS: usize = 8;
/// Tiers of an instance's own blocks.
const INSTANCE_TIERS: [Tier; 3] = [Tier::Gpu, Tier::Dram, Tier::Ssd];

impl Pool {
    /// Applies a change of an instance's cache. Returns the number of stored blocks that are found by engine hash only.
    pub(in crate::conductor) fn change_cache(
        &mut self,
        at: usize,
        change: BlockChange,
    ) -> Result<usize, ConductorError> {
        match change {
            BlockChange::Cleared => {
                self.scheduler.cleared(at)?;
                Ok(0)
            }
            BlockChange::StoredTokens(stored) => self.stored_tokens(at, stored),
            BlockChange::Stored { lora, salt, tier, parent, hashes } => {
                let key = PromptContext { lora, salt, ..event_context(&self.key) };
                let (context, hashes) = self.context(&key, Arc::from(hashes))?;
                let parent = match parent {
                    Some(parent) => self.context(&key, Arc::from([parent]))?.1.first().copied(),
                    None => None,
                };
                self.stored_by_hash(at, context, tier, parent, &hashes)
            }
            BlockChange::Moved { from, to, hashes } => {
                if from != to {
                    hashes.into_iter().try_for_each(|hash| self.moved(at, from.into(), to.into(), hash))?;
                }
                Ok(0)
            }
            BlockChange::Removed { lora, salt, tier, hashes } => {
                let key = PromptContext { lora, salt, ..event_context(&self.key) };
                let (context, hashes) = self.context(&key, Arc::from(hashes))?;
                let tier = tier.map(Tier::from);
                // A block without an alias was stored by its engine hash, and one with an alias may have been, before
                // the alias was known.
                let aliased = self.names.aliased(context, &hashes);
                for tier in INSTANCE_TIERS.into_iter().filter(|held| tier.is_none_or(|tier| tier == *held)) {
                    self.scheduler.removed(at, context, tier, &hashes)?;
                    if !aliased.is_empty() {
                        self.scheduler.removed(at, context, tier, &aliased)?;
                    }
                }
                Ok(0)
            }
        }
    }

    /// Notes that a block of an instance moved from one tier to another, if it is known in the former one.
    fn moved(&mut self, at: usize, from: Tier, to: Tier, engine_hash: u64) -> Result<(), ConductorError> {
        let holder = self.scheduler.holder(at)?;
        let mut found = PrefixMatches::default();
        // The block may have been stored before its token hash was known.
        let alias = self.names.key_of(self.names.plain, engine_hash).filter(|key| *key != engine_hash);
        for key in alias.into_iter().chain([engine_hash]) {
            // In this order the block stays in its run: one without holders would leave it, and come back as a run of
            // its own.
            if self.reported(key, &mut found)?.contains(&(holder, from)) {
                self.change(holder, to, key, true)?;
                self.change(holder, from, key, false)?;
            }
        }
        Ok(())
    }

    /// Returns true if an instance has a block, by its reports.
    fn has_reported(&mut self, at: usize, key: u64) -> Result<bool, ConductorError> {
        let holder = self.scheduler.holder(at)?;
        let mut found = PrefixMatches::default();
        Ok(self.reported(key, &mut found)?.iter().any(|(known, _)| *known == holder))
    }

    /// Notes that the hashes of an instance, and of these holders of a block, cover no more than a block's own tokens.
    fn note_page_hashes(&mut self, at: usize, others: &[(HolderId, Tier)]) {
        let others = others.iter().filter_map(|(holder, _)| self.scheduler.instance_of(*holder));
        self.names.page_hashed.extend(others.chain([at]));
    }

    /// Notes blocks that an event names by engine hash only.
    fn stored_by_hash(
        &mut self,
        at: usize,
        context: ContextId,
        tier: BlockTier,
        parent: Option<u64>,
        hashes: &[u64],
    ) -> Result<usize, ConductorError> {
        // Hashes that do not cover what is before their block tell nothing without tokens.
        if context == self.names.plain && self.names.page_hashed.contains(&at) {
            return Ok(hashes.len());
        }
        // A block whose hash names several is not known, nor are those behind it.
        let parent = match parent.map(|parent| self.names.key_of(context, parent)) {
            Some(None) => return Ok(hashes.len()),
            parent => parent.flatten(),
        };
        let keys: Vec<u64> = hashes.iter().map_while(|hash| self.names.key_of(context, *hash)).collect();
        self.scheduler.stored(at, context, tier.into(), parent, &keys)?;
        let by_token = keys.iter().zip(hashes).filter(|(key, hash)| key != hash).count();
        Ok(hashes.len() - by_token)
    }

    /// Notes blocks with their contents.
    fn stored_tokens(&mut self, at: usize, stored: StoredTokens) -> Result<usize, ConductorError> {
        let StoredTokens { tier, parent, hashes, contents, part_tokens } = stored;
        let plain = self.names.plain;
        self.names.with_tokens.insert(at);
        if !self.names.aliases.has_room(hashes.len()) {
            self.sweep_aliases(hashes.len().saturating_mul(FULL_LOOKS));
        }
        let known = self.names.aliases.len();
        let parent_block = parent.map(|parent| self.names.aliases.get(parent));
        let (before, mut is_ambiguous) = match parent_block {
            None => (Some(ROOT), false),
            // The hash of a page may be that of another one, behind which nobody has reported it.
            Some(Some(NamedBlock::Full(hash)))
                if !self.names.page_hashed.contains(&at) || self.has_reported(at, hash)? =>
            {
                (Some(hash), false)
            }
            Some(known) => (None, known == Some(NamedBlock::Several)),
        };
        let (mut keys, mut promised) = (Vec::with_capacity(hashes.len()), Vec::new());
        if let Some(mut before) = before {
            for (place, (engine_hash, content)) in hashes.iter().zip(&contents).enumerate() {
                let hash = token_hash(before, *content);
                let is_partial = part_tokens > 0 && place + 1 == hashes.len();
                let block = if is_partial {
                    NamedBlock::Partial(PartialBlock { hash, tokens: part_tokens })
                } else {
                    NamedBlock::Full(hash)
                };
                match self.learn(at, *engine_hash, block)? {
                    IndexedBy::EngineHash => {
                        is_ambiguous = self.names.is_ambiguous(*engine_hash);
                        break;
                    }
                    IndexedBy::TokenHash => {}
                    IndexedBy::Both => promised.push(*engine_hash),
                }
                keys.push(hash);
                before = hash;
            }
        }
        let start = before.filter(|hash| *hash != ROOT);
        self.scheduler.stored(at, plain, tier.into(), start, &keys)?;
        if !promised.is_empty() {
            self.scheduler.stored(at, plain, tier.into(), None, &promised)?;
        }
        // A hash that became ambiguous within this event: its removal would not be understood.
        let named = hashes.iter().zip(&keys).filter(|_| is_ambiguous);
        for (_, key) in named.filter(|(engine_hash, _)| self.names.is_ambiguous(**engine_hash)) {
            for tier in INSTANCE_TIERS {
                self.scheduler.removed(at, plain, tier, &[*key])?;
            }
        }
        // One look for each new alias bounds the dead ones by the live ones.
        self.sweep_aliases(self.names.aliases.len() - known);
        is_ambiguous |= self.names.page_hashed.contains(&at) && keys.len() < hashes.len();
        // A partial block without an alias would count as a full one.
        let full = hashes.len() - usize::from(part_tokens > 0);
        let rest = &hashes[keys.len().min(full)..full];
        if is_ambiguous {
            // Hashes that do not cover what is before their block name others elsewhere.
            for hash in &hashes[keys.len()..] {
                self.learn(at, *hash, NamedBlock::Several)?;
            }
            return Ok(rest.len());
        }
        if rest.is_empty() {
            return Ok(0);
        }
        let parent = keys.last().copied().or(parent);
        self.scheduler.stored(at, plain, tier.into(), parent, rest)?;
        Ok(rest.len())
    }

    /// Drops aliases whose blocks have no holder, among the next `looks` ones.
    fn sweep_aliases(&mut self, looks: usize) {
        let (plain, aliases) = (self.names.plain, &mut self.names.aliases);
        // Restored blocks that are not confirmed yet may be removed by engine hash later.
        self.scheduler.index().with_hidden(|index| {
            let is_held = |key| index.held_by_anybody(plain, &[key], Tiers::ALL).is_ok_and(|blocks| blocks > 0);
            aliases.sweep(looks, is_held);
        });
    }

    /// Notes that an engine hash of an instance names a block; returns the hashes by which the block is to be indexed.
    fn learn(&mut self, at: usize, engine_hash: u64, block: NamedBlock) -> Result<IndexedBy, ConductorError> {
        let learned = self.names.aliases.learn(engine_hash, block);
        let mut found = PrefixMatches::default();
        match (learned, block) {
            (AliasOutcome::Known, _) => Ok(IndexedBy::TokenHash),
            (AliasOutcome::Refused, _) => {
                if self.names.is_ambiguous(engine_hash) {
                    self.note_page_hashes(at, &[]);
                }
                Ok(IndexedBy::EngineHash)
            }
            (AliasOutcome::Contradicts(former), _) => {
                // Removals do not tell which of the blocks they mean, so none of them counts.
                let holders = self.reported(former, &mut found)?;
                for (holder, tier) in &holders {
                    self.change(*holder, *tier, former, false)?;
                }
                self.note_page_hashes(at, &holders);
                self.names.store.remove(former);
                Ok(IndexedBy::EngineHash)
            }
            // Nearly all blocks are new under either hash.
            (AliasOutcome::New, NamedBlock::Full(_)) if !self.index_has(engine_hash, Tiers::ALL) => {
                Ok(IndexedBy::TokenHash)
            }
            (AliasOutcome::New, NamedBlock::Full(hash)) => {
                let promised = Tiers::only(Tier::Promised);
                let is_promised = self.index_has(engine_hash, promised);
                // The store, and engines without tokens in their events, may have reported the block before.
                for (holder, tier) in self.reported(engine_hash, &mut found)? {
                    // Of an engine that reports tokens there was no room for the alias: its block may be another page
                    // of the same tokens.
                    let other = self.scheduler.instance_of(holder).filter(|other| *other != at);
                    if other.is_some_and(|other| self.names.with_tokens.contains(&other)) {
                        continue;
                    }
                    self.change(holder, tier, hash, true)?;
                    if !is_promised {
                        self.change(holder, tier, engine_hash, false)?;
                    }
                    if tier == Tier::Pool {
                        self.names.store.insert(hash, engine_hash);
                    }
                }
                Ok(if is_promised { IndexedBy::Both } else { IndexedBy::TokenHash })
            }
            (AliasOutcome::New, _) => Ok(IndexedBy::TokenHash),
        }
    }

    /// Returns true if a block has a holder in one of these tiers.
    fn index_has(&mut self, key: u64, tiers: Tiers) -> bool {
        let plain = self.names.plain;
        let held = |index: &mut PrefixIndex| index.held_by_anybody(plain, &[key], tiers);
        self.scheduler.index().with_hidden(held).is_ok_and(|blocks| blocks > 0)
    }

    /// Returns the holders of a block by their reports, those of restored blocks included, with the tiers that each has
    /// it in.
    fn reported(&mut self, key: u64, found: &mut PrefixMatches) -> Result<Vec<(HolderId, Tier)>, ConductorError> {
        let plain = self.names.plain;
        self.scheduler.index().with_hidden(|index| {
            index.find(plain, &[key], usize::MAX, Tiers::REPORTED, found).map_err(SchedulerError::from)?;
            let holders = found.matches().iter().map(|found| found.holder);
            let within = |holder, tier| index.blocks_within(found, holder, Tiers::only(tier)) > 0;
            let tiers = INSTANCE_TIERS.into_iter().chain([Tier::Pool]);
            let pairs = holders.flat_map(|holder| tiers.clone().map(move |tier| (holder, tier)));
            Ok(pairs.filter(|(holder, tier)| within(*holder, *tier)).collect())
        })
    }

    fn change(&mut self, holder: HolderId, tier: Tier, key: u64, there: bool) -> Result<(), ConductorError> {
        let (plain, index) = (self.names.plain, self.scheduler.index());
        let changed = if there {
            index.stored(plain, holder, tier, None, &[key]).map(|_| ())
        } else {
            index.removed(plain, holder, tier, &[key]).map(|_| ())
        };
        Ok(changed.map_err(SchedulerError::from)?)
    }

    /// Notes that a part of the shared store has a block, or has it no longer.
    pub(super) fn change_store(&mut self, part: u64, hash: u64, there: bool) -> Result<(), ConductorError> {
        let holder = match self.store.get(&part) {
            Some(holder) => *holder,
            None => {
                let holder = self.index().register().map_err(SchedulerError::from)?;
                self.store.insert(part, holder);
                holder
            }
        };
        let key = match self.names.aliases.get(hash) {
            Some(NamedBlock::Full(key)) => key,
            // Neither is a key of the index.
            Some(NamedBlock::Partial(_) | NamedBlock::Several) if there => return Ok(()),
            _ => hash,
        };
        self.change(holder, Tier::Pool, key, there)?;
        if key == hash {
            return Ok(());
        }
        if there {
            self.names.store.insert(key, hash);
            return Ok(());
        }
        // The block may have been stored before its token hash was known.
        self.change(holder, Tier::Pool, hash, false)?;
        if !self.index_has(key, Tiers::only(Tier::Pool)) {
            self.names.store.remove(key);
        }
        Ok(())
    }

    /// Notes that a part of the shared store was cleared.
    pub(super) fn clear_store(&mut self, part: u64) {
        let Some(holder) = self.store.remove(&part) else { return };
        let (plain, index) = (self.names.plain, self.scheduler.index());
        // The holder was registered with this index, and not retired since.
        let _: Result<(), _> = index.retire(holder);
        let pool = Tiers::only(Tier::Pool);
        self.names.store.retain(|key| index.held_by_anybody(plain, &[key], pool).is_ok_and(|held| held > 0));
    }
}
