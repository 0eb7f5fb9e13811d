//! Replay of a trace against the store itself, without memory behind it.

use std::collections::HashSet;

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;
use kvplane_store::allocator::GRANULE_BYTES;
use kvplane_store::eviction::{Eviction, EvictionPolicy};
use kvplane_store::{Store, StoreConfig};

use super::leaves::LeavesFirst;
use super::{block_tokens, is_full};
use crate::trace::{BLOCK_TOKENS, HitCounts, Request};

/// Returns the digest under which a block is stored. Ids of blocks are dense; the index spreads digests by itself.
pub(super) fn digest_of(block: u64) -> Digest {
    Digest(u128::from(block))
}

pub(super) fn replay(
    requests: &[Request],
    tokens: u64,
    eviction: Eviction,
    tails: bool,
    leaves_first: bool,
) -> HitCounts {
    let different: HashSet<u64> = requests.iter().flat_map(|request| request.blocks.iter().copied()).collect();
    let pool_bytes = tokens * GRANULE_BYTES;
    let config = StoreConfig {
        max_objects: u32::try_from(different.len()).unwrap_or(u32::MAX).clamp(16, 1 << 26),
        max_object_bytes: pool_bytes.min(u64::from(BLOCK_TOKENS) * GRANULE_BYTES),
        max_pins: 1,
        max_reservations: 1,
        eviction,
        ..StoreConfig::for_pool(pool_bytes)
    };
    let policy = config.policy();
    let valid = "the sizes were checked";
    if leaves_first {
        let policy = LeavesFirst::new(policy, requests);
        drive(Store::with_policy(config, Version(1), policy).expect(valid), requests, tails)
    } else {
        drive(Store::with_policy(config, Version(1), policy).expect(valid), requests, tails)
    }
}

/// Replays the requests: for each, gets the longest existing prefix, then puts the rest, in order.
fn drive<P: EvictionPolicy>(mut store: Store<P>, requests: &[Request], tails: bool) -> HitCounts {
    let mut counts = HitCounts::default();
    for request in requests {
        let found = request.blocks.iter().take_while(|block| store.exists(digest_of(**block))).count();
        for block in &request.blocks[..found] {
            let (pin, _) = store.get(digest_of(*block)).expect("it was there, and nothing is pinned");
            store.unpin(pin).expect("a pin just given");
        }
        for (at, block) in request.blocks.iter().enumerate().skip(found) {
            if tails || is_full(request, at) {
                // A put of an existing block is an access; a block larger than the cache is not kept.
                let bytes = block_tokens(request, at) * GRANULE_BYTES;
                if let Ok((reservation, _)) = store.reserve(digest_of(*block), bytes) {
                    store.commit(reservation, 0).expect("nobody else puts it");
                }
            }
        }
        counts.add(request, found);
    }
    counts
}
