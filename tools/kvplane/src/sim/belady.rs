//! Belady's bound: the hits of a cache that knows all future requests.
//!
//! After Belady, "A study of replacement algorithms for a virtual-storage computer" (IBM Systems Journal, 1966), with
//! bypass: a block whose next use is later than that of all cached blocks is not kept. Of two blocks with the next use
//! in the same request the later one is evicted first, as it is of no use without those before it. For blocks of one
//! size no algorithm finds more; the partial last blocks, all others being equal, hardly matter.

use std::collections::{BTreeSet, HashMap};

use super::block_tokens;
use crate::trace::{HitCounts, Request};

/// Next use of a block: the request, the position in it, and the block.
type NextUse = (usize, usize, u64);

pub(super) fn replay(requests: &[Request], tokens: u64) -> HitCounts {
    let next = next_uses(requests);
    let mut held: BTreeSet<NextUse> = BTreeSet::new();
    let mut keys: HashMap<u64, (NextUse, u64)> = HashMap::new();
    let (mut used, mut counts) = (0, HitCounts::default());
    for (request, next) in requests.iter().zip(&next) {
        let found = request.blocks.iter().take_while(|block| keys.contains_key(block)).count();
        counts.add(request, found);
        for (at, (&block, &wanted)) in request.blocks.iter().zip(next).enumerate() {
            if let Some((key, size)) = keys.remove(&block) {
                held.remove(&key);
                used -= size;
            }
            if let Some(wanted) = wanted {
                let (key, size) = ((wanted, at, block), block_tokens(request, at));
                held.insert(key);
                keys.insert(block, (key, size));
                used += size;
            }
        }
        while used > tokens {
            let (_, _, block) = held.pop_last().expect("what is used is held");
            let (_, size) = keys.remove(&block).expect("what is held has a key");
            used -= size;
        }
    }
    counts
}

/// Returns for each block of each request the next request that contains it.
fn next_uses(requests: &[Request]) -> Vec<Vec<Option<usize>>> {
    let mut later: HashMap<u64, usize> = HashMap::new();
    let mut next: Vec<Vec<Option<usize>>> = Vec::with_capacity(requests.len());
    for (index, request) in requests.iter().enumerate().rev() {
        next.push(request.blocks.iter().map(|block| later.get(block).copied()).collect());
        later.extend(request.blocks.iter().map(|block| (*block, index)));
    }
    next.reverse();
    next
}
