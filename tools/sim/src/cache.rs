//! Cache of a simulated node: a production store without bytes, in which a token takes one granule.

use std::ops::Range;

use kvplane_proto::digest::Digest;
use kvplane_proto::events::ObjectChange;
use kvplane_proto::ids::Version;
use kvplane_store::allocator::GRANULE_BYTES;
use kvplane_store::eviction::ChosenPolicy;
use kvplane_store::{Store, StoreConfig};

use crate::config::{SimConfig, Work};

/// Number of events that the store keeps between two reads: one prompt stores and evicts fewer blocks.
const EVENTS: usize = 1 << 14;

pub(crate) struct Cache {
    store: Store<ChosenPolicy>,
    next: u64,
    block_tokens: u64,
}

impl Cache {
    pub(crate) fn new(config: &SimConfig) -> Self {
        let block_tokens = u64::from(config.block_tokens);
        let pool_bytes = config.cache_tokens * GRANULE_BYTES;
        let objects = (config.cache_tokens / block_tokens * 4).clamp(1024, 1 << 24) as u32;
        let config = StoreConfig {
            max_objects: objects,
            max_object_bytes: (block_tokens * GRANULE_BYTES).min(pool_bytes),
            max_pins: 1,
            max_reservations: 1,
            eviction: config.eviction,
            ..StoreConfig::for_pool(pool_bytes)
        };
        let policy = config.policy();
        let mut store =
            Store::with_policy(config, Version(1), policy).expect("the limits follow from the cache's size");
        store.objects_mut().events_mut().keep(EVENTS);
        Self { store, next: 1, block_tokens }
    }

    /// Returns the length of the prefix of `blocks` that the cache has.
    pub(crate) fn prefix(&self, blocks: &[u64]) -> usize {
        blocks.iter().take_while(|block| self.has(**block)).count()
    }

    pub(crate) fn has(&self, block: u64) -> bool {
        self.store.exists(digest(block))
    }

    /// Touches the first `blocks` of a prompt, as a get does.
    pub(crate) fn touch(&mut self, work: &Work, blocks: usize) {
        work.blocks[..blocks].iter().for_each(|block| self.touch_block(*block));
    }

    pub(crate) fn touch_block(&mut self, block: u64) {
        if let Ok((pin, _)) = self.store.get(digest(block)) {
            self.store.unpin(pin).expect("the pin was just taken");
        }
    }

    /// Puts the missing blocks of a prompt up to `to`, except for those in `skip`.
    pub(crate) fn put(&mut self, work: &Work, to: usize, skip: &Range<usize>) {
        for (at, block) in work.blocks[..to].iter().enumerate().filter(|(at, _)| !skip.contains(at)) {
            let rest = u64::from(work.input_tokens).saturating_sub(at as u64 * self.block_tokens);
            let bytes = rest.clamp(1, self.block_tokens) * GRANULE_BYTES;
            if let Ok((reservation, _)) = self.store.reserve(digest(*block), bytes) {
                self.store.commit(reservation, 0).expect("no other put of it is in flight");
            }
        }
    }

    /// Takes the changes since the last call: blocks stored, blocks removed.
    pub(crate) fn changes(&mut self) -> (Vec<u64>, Vec<u64>) {
        let page = self.store.objects().events().read(self.next, EVENTS);
        self.next = page.next;
        let (mut stored, mut removed) = (Vec::new(), Vec::new());
        for event in page.events {
            match event.change {
                ObjectChange::Stored => stored.push(event.digest.0 as u64),
                ObjectChange::Removed | ObjectChange::Cleared => removed.push(event.digest.0 as u64),
            }
        }
        (stored, removed)
    }
}

fn digest(block: u64) -> Digest {
    Digest(u128::from(block))
}
