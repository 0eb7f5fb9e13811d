//! Tests of the simulated caches: against the independent models, by hand, and on the published traces.

use super::*;
use crate::model::{self, Policy};
use crate::trace::generate::{Shape, generate};

fn request(blocks: &[u64]) -> Request {
    Request { timestamp_ms: 0, input_tokens: blocks.len() as u32 * 512, output_tokens: 1, blocks: blocks.to_vec() }
}

fn policy(eviction: Eviction, tails: bool, leaves_first: bool) -> Keeper {
    Keeper::Policy { eviction, tails, leaves_first }
}

#[test]
fn the_store_has_the_hits_of_the_models() {
    let mut requests = generate(Shape::Conversation, 800, 5).unwrap().requests;
    // The models charge the same for every block.
    requests.iter_mut().for_each(|request| request.input_tokens = request.blocks.len() as u32 * 512);
    for blocks in [50, 400, 3_000] {
        for (eviction, judge) in [(Eviction::Lru, Policy::Lru), (Eviction::SegmentedLru, Policy::SegmentedLru)] {
            let found = policy(eviction, true, false).replay(&requests, blocks * 512);
            assert_eq!(found, model::simulate(judge, &requests, 512, blocks * 512).counts, "{eviction}, {blocks}");
        }
    }
}

#[test]
fn no_policy_exceeds_the_bound_and_an_unlimited_cache_finds_all() {
    let trace = generate(Shape::Conversation, 800, 7).unwrap();
    let infinite = crate::trace::TraceStats::of(&trace).infinite_cache;
    for keeper in Keeper::all() {
        let endless = keeper.replay(&trace.requests, 100_000_000);
        let all = !matches!(keeper, Keeper::Policy { tails: false, .. });
        assert!(endless.hit_blocks <= infinite.hit_blocks && (!all || endless == infinite), "{}", keeper.name());
        for tokens in [20_000, 200_000] {
            let bound = Keeper::Belady.replay(&trace.requests, tokens).hit_tokens;
            assert!(keeper.replay(&trace.requests, tokens).hit_tokens <= bound, "{} at {tokens}", keeper.name());
        }
    }
}

#[test]
fn tails_are_not_kept_and_leaves_go_first() {
    let mut tail = request(&[1, 2]);
    tail.input_tokens = 700;
    let requests = [tail.clone(), tail];
    assert_eq!(policy(Eviction::Lru, true, false).replay(&requests, 2048).hit_blocks, 2);
    assert_eq!(policy(Eviction::Lru, false, false).replay(&requests, 2048).hit_blocks, 1);
    // The cache has room for three blocks, and 4 needs one. The oldest is 1, the last block that depends on it is 3.
    let requests = [request(&[1, 2, 3]), request(&[4]), request(&[1, 2, 3])];
    assert_eq!(policy(Eviction::Lru, true, false).replay(&requests, 3 * 512).hit_blocks, 0);
    assert_eq!(policy(Eviction::Lru, true, true).replay(&requests, 3 * 512).hit_blocks, 2);
}

#[test]
fn the_bound_keeps_the_block_with_the_soonest_use() {
    // The cache has room for one block: 1 is used sooner than 2, and 3 never again.
    let requests = [request(&[1]), request(&[2]), request(&[3]), request(&[1]), request(&[2])];
    assert_eq!(Keeper::Belady.replay(&requests, 512).hit_blocks, 1);
    assert_eq!(Keeper::Belady.replay(&requests, 1024).hit_blocks, 2);
}

/// Hit rates by tokens of an independent simulation of the published traces.
#[test]
fn the_published_traces() {
    let cases = [
        ("conversation_trace.jsonl", Keeper::Belady, 3_000_000, 0.360),
        ("conversation_trace.jsonl", policy(Eviction::Lru, true, false), 10_000_000, 0.291),
        ("conversation_trace.jsonl", policy(Eviction::SegmentedLru, false, false), 10_000_000, 0.304),
        ("synthetic_trace.jsonl", Keeper::Belady, 3_000_000, 0.560),
        ("synthetic_trace.jsonl", policy(Eviction::SegmentedLru, false, false), 10_000_000, 0.598),
    ];
    for (name, keeper, tokens, expected) in cases {
        let Some(path) = crate::trace::stats::tests::published(name) else { return };
        let requests = crate::trace::load(&path).unwrap().requests;
        let found = keeper.replay(&requests, tokens).rate_tokens();
        assert!((found - expected).abs() < 0.006, "{name}, {} at {tokens}: {found}, not {expected}", keeper.name());
    }
}
