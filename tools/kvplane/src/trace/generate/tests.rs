//! Tests that generated traces have the published statistics, within the tolerances stated here.

use std::collections::{HashMap, HashSet};

use super::*;
use crate::trace::TraceStats;

/// Asserts that `found` is within the fraction `tolerance` of `published`.
#[track_caller]
fn near(what: &str, found: f64, published: f64, tolerance: f64) {
    let off = (found - published).abs() / published;
    assert!(off <= tolerance, "{what}: {found} is {:.1} % off the published {published}", off * 100.0);
}

fn published(shape: Shape, seed: u64) -> TraceStats {
    TraceStats::of(&generate(shape, shape.published_requests(), seed).unwrap())
}

#[test]
fn conversation_has_the_published_shape() {
    for seed in [1, 2] {
        let stats = published(Shape::Conversation, seed);
        println!("{stats}");
        assert_eq!((stats.requests, stats.distinct_first_blocks, stats.unordered), (12_031, 1, 0));
        near("duration", stats.duration_s, 3_537.0, 0.01);
        near("mean input", stats.input_tokens.mean, 12_035.0, 0.05);
        near("p50 input", stats.input_tokens.p50, 6_909.0, 0.10);
        near("p90 input", stats.input_tokens.p90, 27_367.0, 0.10);
        near("p99 input", stats.input_tokens.p99, 85_401.0, 0.10);
        near("mean output", stats.output_tokens.mean, 342.6, 0.05);
        near("accesses", stats.block_accesses as f64, 288_500.0, 0.05);
        near("unique", stats.unique_blocks as f64, 182_790.0, 0.05);
        near("once", stats.accessed_once, 0.758, 0.03);
        near("hit by blocks", stats.infinite_cache.rate_blocks(), 0.3664, 0.05);
        near("hit by tokens", stats.infinite_cache.rate_tokens(), 0.3736, 0.05);
        near("gap p50", stats.reuse_gap_s.p50, 114.0, 0.10);
        near("gap p90", stats.reuse_gap_s.p90, 519.0, 0.15);
        near("gap p99", stats.reuse_gap_s.p99, 1_578.0, 0.15);
        near("timestamps", stats.distinct_timestamps as f64, 1_180.0, 0.01);
        assert_eq!(stats.largest_burst, 28);
        near("variation", stats.arrivals_variation, 0.25, 0.25);
    }
}

#[test]
fn tool_agent_has_the_published_shape() {
    let stats = published(Shape::ToolAgent, 1);
    println!("{stats}");
    assert_eq!((stats.requests, stats.distinct_first_blocks), (23_608, 3));
    near("duration", stats.duration_s, 3_537.0, 0.01);
    near("mean input", stats.input_tokens.mean, 8_596.0, 0.05);
    near("p50 input", stats.input_tokens.p50, 6_346.0, 0.10);
    near("p99 input", stats.input_tokens.p99, 61_525.0, 0.15);
    near("mean output", stats.output_tokens.mean, 182.0, 0.10);
    near("p50 output", stats.output_tokens.p50, 30.0, 0.15);
    near("hit by blocks", stats.infinite_cache.rate_blocks(), 0.553, 0.05);
}

#[test]
fn a_short_trace_is_the_same_world_shrunk() {
    let stats = TraceStats::of(&generate(Shape::Conversation, 1_000, 5).unwrap());
    assert_eq!((stats.requests, stats.distinct_first_blocks), (1_000, 1));
    near("hit by blocks", stats.infinite_cache.rate_blocks(), 0.3664, 0.25);
    near("rate", stats.arrivals_per_10_s.mean, 34.0, 0.10);
    for requests in [1, 2, 11, 50] {
        for shape in [Shape::Conversation, Shape::ToolAgent] {
            assert_eq!(generate(shape, requests, 5).unwrap().requests.len(), requests);
        }
    }
}

#[test]
fn the_seed_fixes_the_trace() {
    let trace = |seed| generate(Shape::ToolAgent, 300, seed).unwrap();
    assert_eq!(trace(9).requests, trace(9).requests);
    assert_ne!(trace(9).requests, trace(10).requests);
    assert_eq!(trace(9).label, "generated toolagent-like trace (300 requests, seed 9)");
}

#[test]
fn an_equal_id_means_an_equal_prefix() {
    let trace = generate(Shape::ToolAgent, 2_000, 4).unwrap();
    let mut parents: HashMap<u64, Option<u64>> = HashMap::new();
    let mut partial: HashMap<u64, u32> = HashMap::new();
    for request in &trace.requests {
        assert_eq!(request.blocks.len(), Request::blocks_of(request.input_tokens));
        let distinct: HashSet<_> = request.blocks.iter().collect();
        assert_eq!(distinct.len(), request.blocks.len());
        let mut parent = None;
        for &block in &request.blocks {
            assert_eq!(*parents.entry(block).or_insert(parent), parent, "block {block} has two prefixes");
            parent = Some(block);
        }
        // The id of a last partial block includes its remainder: only prompts of the same length may end in it.
        let remainder = request.input_tokens % crate::trace::BLOCK_TOKENS;
        let last = *request.blocks.last().unwrap();
        assert_eq!(*partial.entry(last).or_insert(remainder) == 0, remainder == 0);
    }
}

#[test]
fn sizes_have_limits() {
    for requests in [0, MAX_REQUESTS + 1] {
        let error = generate(Shape::Conversation, requests, 1).unwrap_err();
        assert_eq!(error, GenerateError::Requests { requests });
        assert!(error.to_string().contains(&requests.to_string()));
    }
}
