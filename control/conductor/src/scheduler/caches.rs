//! What prefill instances hold, will hold, and were ever sent: each is a holder of two indexes.
//!
//! What a placement makes an instance have counts for that instance at once, as promised; an event takes the promise
//! over, or it ends some time after the prefill.

use std::collections::VecDeque;
use std::sync::Arc;

use super::error::SchedulerError;
use super::request::Request;
use crate::index::{ContextId, ContextKey, HolderId, IndexConfig, IndexError, PrefixIndex, PrefixMatches, Tier, Tiers};

/// A prefill instance as both indexes know it.
#[derive(Clone, Copy)]
pub(super) struct CacheHolder {
    holder: HolderId,
    routed: HolderId,
    /// Tokens of all prompts that ever came here; what several begin with counts once.
    routed_tokens: u64,
}

/// Blocks that an instance should have though no event said so yet.
struct Promise {
    until_ns: u64,
    context: ContextId,
    holder: HolderId,
    hashes: Arc<[u64]>,
}

/// What prefill instances hold.
pub(super) struct Caches {
    index: PrefixIndex,
    /// What was ever sent where, evicted or not.
    routed: PrefixIndex,
    /// By number of the instance; none where it is gone.
    holders: Vec<Option<CacheHolder>>,
    /// Numbers of instances by their slots in the index.
    by_slot: Vec<u32>,
    /// The same in the index of what was routed.
    routed_by_slot: Vec<u32>,
    promises: VecDeque<Promise>,
}

impl Caches {
    pub(super) fn new(config: IndexConfig) -> Result<Self, IndexError> {
        Ok(Self {
            index: PrefixIndex::new(config)?,
            routed: PrefixIndex::new(config)?,
            holders: Vec::new(),
            by_slot: vec![u32::MAX; config.max_holders],
            routed_by_slot: vec![u32::MAX; config.max_holders],
            promises: VecDeque::new(),
        })
    }

    pub(super) const fn index(&mut self) -> &mut PrefixIndex {
        &mut self.index
    }

    /// A context of both indexes.
    pub(super) fn context(&mut self, key: &ContextKey) -> Result<ContextId, IndexError> {
        self.routed.context(key)?;
        self.index.context(key)
    }

    /// A new holder of both indexes, for an instance that has no number yet.
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

    /// The instance of this number is `holder` from now on.
    pub(super) fn enter(&mut self, instance: usize, holder: CacheHolder) {
        self.holders.resize(self.holders.len().max(instance + 1), None);
        self.holders[instance] = Some(holder);
        self.by_slot[usize::from(holder.holder.slot())] = instance as u32;
        self.routed_by_slot[usize::from(holder.routed.slot())] = instance as u32;
    }

    /// An instance is gone, with all that it held.
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

    /// The holder that an instance is in the index.
    pub(super) fn holder(&self, instance: usize) -> Result<HolderId, SchedulerError> {
        Ok(self.known(instance)?.holder)
    }

    /// The instance that a holder of the index is, if it is one.
    pub(super) fn instance_of(&self, holder: HolderId) -> Option<usize> {
        let at = *self.by_slot.get(usize::from(holder.slot()))? as usize;
        self.known(at).ok().filter(|known| known.holder == holder).map(|_| at)
    }

    /// Tokens of all prompts that were ever sent to an instance.
    pub(super) fn routed_tokens(&self, instance: usize) -> u64 {
        self.known(instance).map_or(0, |known| known.routed_tokens)
    }

    /// An instance has nothing any more, in no tier and no context.
    pub(super) fn clear(&mut self, instance: usize) -> Result<(), SchedulerError> {
        let former = self.known(instance)?;
        self.index.retire(former.holder)?;
        // One slot was just given back, so there is one; if not, the instance holds nothing for good.
        let holder = self.index.register()?;
        self.enter(instance, CacheHolder { holder, ..former });
        Ok(())
    }

    /// A request is placed on an instance, which will have all of its blocks but the first `passing`: those are there
    /// for this request only. Blocks of it that the instance had are the answer.
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

    /// A prefill is done: what was promised of its blocks counts until then, or until an event says so.
    pub(super) fn keep_promise(&mut self, instance: usize, request: &Request, until_ns: u64) {
        if let Ok(CacheHolder { holder, .. }) = self.known(instance) {
            let (context, hashes) = (request.context, Arc::clone(&request.hashes));
            self.promises.push_back(Promise { until_ns, context, holder, hashes });
        }
    }

    /// A request will not be prefilled on an instance.
    pub(super) fn break_promise(&mut self, instance: usize, request: &Request) -> Result<(), SchedulerError> {
        if let Ok(CacheHolder { holder, .. }) = self.known(instance) {
            self.index.removed(request.context, holder, Tier::Promised, &request.hashes)?;
        }
        Ok(())
    }

    /// Ends promises that events should have taken over by now.
    pub(super) fn expire(&mut self, now_ns: u64) {
        while self.promises.front().is_some_and(|promise| promise.until_ns <= now_ns) {
            let Some(promise) = self.promises.pop_front() else { break };
            // An instance that is gone took its promises along.
            let _ = self.index.removed(promise.context, promise.holder, Tier::Promised, &promise.hashes);
        }
    }

    /// Tells for each instance how many blocks of a prompt it has or will have.
    pub(super) fn each_held(&self, request: &Request, found: &mut PrefixMatches, mut tell: impl FnMut(usize, u32)) {
        // An unknown context has nothing cached.
        if self.index.find(request.context, &request.hashes, self.holders.len(), Tiers::OWN, found).is_err() {
            return;
        }
        for found in found.matches() {
            if let Some(at) = self.instance_of(found.holder) {
                tell(at, found.blocks);
            }
        }
    }

    /// Tells for each instance how many blocks of a prompt were ever sent there.
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

    /// Blocks of a prompt that all together have stored.
    pub(super) fn pooled_blocks(&self, request: &Request) -> u32 {
        self.index.held_by_anybody(request.context, &request.hashes, Tiers::SHARED).unwrap_or(0)
    }

    /// The most blocks of a prompt that any instance has.
    pub(super) fn best_blocks(&self, request: &Request) -> u32 {
        let mut found = PrefixMatches::default();
        // An unknown context has nothing cached.
        let _ = self.index.find(request.context, &request.hashes, 1, Tiers::OWN, &mut found);
        found.best_blocks()
    }
}

/// Blocks of a prompt that a holder has.
fn blocks_of(index: &PrefixIndex, request: &Request, holder: HolderId) -> u32 {
    let mut found = PrefixMatches::default();
    match index.find(request.context, &request.hashes, usize::MAX, Tiers::OWN, &mut found) {
        Ok(()) => index.blocks_within(&found, holder, Tiers::OWN),
        Err(_) => 0,
    }
}
