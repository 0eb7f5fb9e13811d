//! Caches of prefill instances: blocks that they hold, will hold, and were ever sent. Each instance is a holder in two
//! indexes.
//!
//! The blocks of a placed request count for its instance at once, as promised; an event confirms a promise, or it
//! expires some time after the prefill.

use std::collections::VecDeque;
use std::sync::Arc;

use super::error::SchedulerError;
use super::request::Request;
use crate::index::{
    ContextId, HolderId, IndexConfig, IndexError, PrefixIndex, PrefixMatches, PromptContext, Tier, Tiers,
};

/// Prefill instance as a holder in both indexes.
#[derive(Clone, Copy)]
pub(super) struct CacheHolder {
    holder: HolderId,
    routed: HolderId,
    /// Tokens of all prompts that were ever routed to it; common prefixes count once.
    routed_tokens: u64,
}

/// Blocks that an instance should have although no event has reported them yet.
struct ExpectedBlocks {
    until_ns: u64,
    context: ContextId,
    holder: HolderId,
    hashes: Arc<[u64]>,
}

/// Caches of all prefill instances.
pub(super) struct Caches {
    index: PrefixIndex,
    /// Blocks that were ever routed to each instance, evicted or not.
    routed: PrefixIndex,
    /// Holders by number of the instance; none if the instance is gone.
    holders: Vec<Option<CacheHolder>>,
    /// Numbers of instances, by their slots in the index.
    by_slot: Vec<u32>,
    /// Numbers of instances, by their slots in the index of routed blocks.
    routed_by_slot: Vec<u32>,
    expected: VecDeque<ExpectedBlocks>,
}

impl Caches {
    pub(super) fn new(config: IndexConfig) -> Result<Self, IndexError> {
        Ok(Self {
            index: PrefixIndex::new(config)?,
            routed: PrefixIndex::new(config)?,
            holders: Vec::new(),
            by_slot: vec![u32::MAX; config.max_holders],
            routed_by_slot: vec![u32::MAX; config.max_holders],
            expected: VecDeque::new(),
        })
    }

    pub(super) const fn index(&mut self) -> &mut PrefixIndex {
        &mut self.index
    }

    /// Returns the number of blocks that any holder has.
    pub(super) fn blocks(&self) -> usize {
        self.index.stats().blocks
    }

    /// Returns a context of both indexes.
    pub(super) fn context(&mut self, key: &PromptContext) -> Result<ContextId, IndexError> {
        self.routed.context(key)?;
        self.index.context(key)
    }

    /// Registers a holder in both indexes, for an instance that has no number yet.
    pub(super) fn register(&mut self) -> Result<CacheHolder, IndexError> {
        let holder = self.index.register()?;
        match self.routed.register() {
            Ok(routed) => Ok(CacheHolder { holder, routed, routed_tokens: 0 }),
            Err(error) => {
                self.index.retire(holder)?;
                Err(error)
            }
        }
    }

    /// Makes `holder` the holder of the instance of this number.
    pub(super) fn enter(&mut self, instance: usize, holder: CacheHolder) {
        self.holders.resize(self.holders.len().max(instance + 1), None);
        self.holders[instance] = Some(holder);
        self.by_slot[usize::from(holder.holder.slot())] = instance as u32;
        self.routed_by_slot[usize::from(holder.routed.slot())] = instance as u32;
    }

    /// Replaces the index by a restored one, in which `kept` are the hidden holders of instances; the others get new
    /// ones. For a start: everything in the present index is dropped.
    pub(super) fn adopt(&mut self, mut index: PrefixIndex, kept: &[(usize, HolderId)]) -> Result<(), SchedulerError> {
        // Both indexes have the same contexts, by number.
        for key in index.context_keys() {
            self.routed.context(&key)?;
        }
        let mut adopted = Vec::new();
        for (instance, known) in self.holders.iter().enumerate() {
            let Some(known) = known else { continue };
            let holder = match kept.iter().find(|(at, _)| *at == instance) {
                Some((_, holder)) => *holder,
                None => index.register()?,
            };
            adopted.push((instance, CacheHolder { holder, ..*known }));
        }
        self.index = index;
        self.by_slot.fill(u32::MAX);
        adopted.into_iter().for_each(|(instance, holder)| self.enter(instance, holder));
        Ok(())
    }

    /// Removes an instance, with all blocks that it held.
    pub(super) fn lose(&mut self, instance: usize) -> Result<(), SchedulerError> {
        let lost = self.known(instance)?;
        self.holders[instance] = None;
        self.index.retire(lost.holder)?;
        self.routed.retire(lost.routed)?;
        Ok(())
    }

    fn known(&self, instance: usize) -> Result<CacheHolder, SchedulerError> {
        let known = self.holders.get(instance).copied().flatten();
        known.ok_or(SchedulerError::UnknownInstance { instance })
    }

    /// Returns the holder of an instance in the index.
    pub(super) fn holder(&self, instance: usize) -> Result<HolderId, SchedulerError> {
        Ok(self.known(instance)?.holder)
    }

    /// Returns the instance of a holder in the index, if it is an instance.
    pub(super) fn instance_of(&self, holder: HolderId) -> Option<usize> {
        let at = *self.by_slot.get(usize::from(holder.slot()))? as usize;
        self.known(at).ok().filter(|known| known.holder == holder).map(|_| at)
    }

    /// Returns the tokens of all prompts that were ever routed to an instance.
    pub(super) fn routed_tokens(&self, instance: usize) -> u64 {
        self.known(instance).map_or(0, |known| known.routed_tokens)
    }

    /// Drops all blocks of an instance, in every tier and context.
    pub(super) fn clear(&mut self, instance: usize) -> Result<(), SchedulerError> {
        let former = self.known(instance)?;
        self.index.retire(former.holder)?;
        // A slot was just freed, so there is one; if not, the instance never holds anything again.
        let holder = self.index.register()?;
        self.enter(instance, CacheHolder { holder, ..former });
        Ok(())
    }

    /// Promises the blocks of a placed request to its instance, except for the first `passing`, which are there for
    /// this request only. Returns the number of its blocks that the instance had.
    pub(super) fn place(
        &mut self,
        instance: usize,
        request: &Request,
        passing: usize,
        block_tokens: u32,
    ) -> Result<u32, SchedulerError> {
        let CacheHolder { holder, routed, .. } = self.known(instance)?;
        let held_blocks = blocks_of(&self.index, request, holder);
        let known_tokens = blocks_of(&self.routed, request, routed).saturating_mul(block_tokens);
        if let Some(known) = &mut self.holders[instance] {
            known.routed_tokens += u64::from(request.tokens.saturating_sub(known_tokens));
        }
        let (fetched, promised) = request.hashes.split_at(passing.min(request.hashes.len()));
        self.index.stored(request.context, holder, Tier::Promised, fetched.last().copied(), promised)?;
        self.routed.stored(request.context, routed, Tier::Gpu, None, &request.hashes)?;
        Ok(held_blocks)
    }

    /// Notes that a prefill is done: its promised blocks count until `until_ns`, or until an event confirms them.
    pub(super) fn expect_blocks(&mut self, instance: usize, request: &Request, until_ns: u64) {
        if let Ok(CacheHolder { holder, .. }) = self.known(instance) {
            let (context, hashes) = (request.context, Arc::clone(&request.hashes));
            self.expected.push_back(ExpectedBlocks { until_ns, context, holder, hashes });
        }
    }

    /// Withdraws the promises of a request that will not be prefilled on its instance.
    pub(super) fn withdraw(&mut self, instance: usize, request: &Request) -> Result<(), SchedulerError> {
        if let Ok(CacheHolder { holder, .. }) = self.known(instance) {
            self.index.removed(request.context, holder, Tier::Promised, &request.hashes)?;
        }
        Ok(())
    }

    /// Ends the promises that events should have confirmed by now.
    pub(super) fn expire(&mut self, now_ns: u64) {
        while self.expected.front().is_some_and(|blocks| blocks.until_ns <= now_ns) {
            let Some(blocks) = self.expected.pop_front() else { break };
            // The promises of an instance that is gone ended with it.
            let _ = self.index.removed(blocks.context, blocks.holder, Tier::Promised, &blocks.hashes);
        }
    }

    /// Calls `tell` for each instance with the number of a prompt's blocks that it has or will have.
    pub(super) fn each_held(&self, request: &Request, found: &mut PrefixMatches, mut tell: impl FnMut(usize, u32)) {
        // A request of an unknown context has no cached blocks.
        if self.index.find(request.context, &request.hashes, self.holders.len(), Tiers::OWN, found).is_err() {
            return;
        }
        for found in found.matches() {
            if let Some(at) = self.instance_of(found.holder) {
                tell(at, found.blocks);
            }
        }
    }

    /// Calls `tell` for each instance with the number of a prompt's blocks that were ever routed there.
    pub(super) fn each_routed(&self, request: &Request, found: &mut PrefixMatches, mut tell: impl FnMut(usize, u32)) {
        if self.routed.find(request.context, &request.hashes, self.holders.len(), Tiers::OWN, found).is_err() {
            return;
        }
        for found in found.matches() {
            let slot = usize::from(found.holder.slot());
            let Some(at) = self.routed_by_slot.get(slot).map(|at| *at as usize) else { continue };
            if self.known(at).is_ok_and(|known| known.routed == found.holder) {
                tell(at, found.blocks);
            }
        }
    }

    /// Returns the number of a prompt's blocks that all holders can provide together.
    pub(super) fn pooled_blocks(&self, request: &Request) -> u32 {
        self.index.held_by_anybody(request.context, &request.hashes, Tiers::SHARED).unwrap_or(0)
    }

    /// Returns the maximum number of a prompt's blocks that an instance has.
    pub(super) fn best_blocks(&self, request: &Request) -> u32 {
        let mut found = PrefixMatches::default();
        // A request of an unknown context has no cached blocks.
        let _ = self.index.find(request.context, &request.hashes, 1, Tiers::OWN, &mut found);
        found.best_blocks()
    }
}

/// Returns the number of a prompt's blocks that a holder has.
fn blocks_of(index: &PrefixIndex, request: &Request, holder: HolderId) -> u32 {
    let mut found = PrefixMatches::default();
    match index.find(request.context, &request.hashes, usize::MAX, Tiers::OWN, &mut found) {
        Ok(()) => index.blocks_within(&found, holder, Tiers::OWN),
        Err(_) => 0,
    }
}
