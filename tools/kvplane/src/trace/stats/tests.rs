//! Tests of the statistics: by hand, and on the published traces if they are available.

use std::path::PathBuf;

use super::*;
use crate::trace::load;

fn request(timestamp_ms: u64, input_tokens: u32, blocks: &[u64]) -> Request {
    Request { timestamp_ms, input_tokens, output_tokens: 10, blocks: blocks.to_vec() }
}

#[test]
fn a_small_trace_by_hand() {
    let requests = vec![
        request(0, 1024, &[0, 1]),
        request(0, 1100, &[0, 1, 2]),
        request(25_000, 600, &[0, 3]),
        // Block 9 breaks the prefix: block 1 behind it is no hit, though it is known.
        request(31_000, 1536, &[0, 9, 1]),
    ];
    let stats = TraceStats::of(&Trace { label: "t".into(), requests, unordered: 0 });
    assert_eq!((stats.block_accesses, stats.unique_blocks, stats.distinct_first_blocks), (10, 5, 1));
    assert_eq!(stats.accessed_once, 3.0 / 5.0);
    assert_eq!(stats.infinite_cache.hit_blocks, 2 + 1 + 1);
    assert_eq!(stats.infinite_cache.hit_tokens, 1024 + 512 + 512);
    assert_eq!(stats.infinite_cache.tokens, 1024 + 1100 + 600 + 1536);
    // Gaps: 0 and 1 after 0 s, block 0 after 25 s and 6 s, block 1 after 31 s.
    assert_eq!((stats.reuse_gap_s.p50, stats.reuse_gap_s.max), (6.0, 31.0));
    assert_eq!((stats.distinct_timestamps, stats.largest_burst, stats.duration_s), (3, 2, 31.0));
    // Windows: 2, 0, 1, 1.
    assert_eq!((stats.arrivals_per_10_s.mean, stats.arrivals_per_10_s.max), (1.0, 2.0));
    assert!((stats.arrivals_variation - 0.5f64.sqrt()).abs() < 1e-12);
}

#[test]
fn an_empty_or_far_flung_trace_is_described_too() {
    let empty = TraceStats::of(&Trace { label: "t".into(), requests: vec![], unordered: 0 });
    assert_eq!((empty.requests, empty.arrivals_per_10_s), (0, Spread::default()));
    let requests = vec![request(0, 1, &[0]), request(u64::MAX, 1, &[0])];
    let far = TraceStats::of(&Trace { label: "t".into(), requests, unordered: 0 });
    assert_eq!(far.infinite_cache.hit_blocks, 1);
}

/// Returns the path of a published trace, if it is available.
pub(crate) fn published(name: &str) -> Option<PathBuf> {
    let beside = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/data/traces"));
    let directory = std::env::var_os("KVPLANE_TRACES").map_or(beside, PathBuf::from);
    let path = directory.join(name);
    if !path.exists() {
        println!("skipped: {} is not there; set KVPLANE_TRACES to a directory that has it", path.display());
        return None;
    }
    Some(path)
}

fn near(found: f64, published: f64, within: f64) {
    assert!((found - published).abs() <= within, "found {found}, published {published}");
}

#[test]
fn the_published_conversation_trace() {
    let Some(path) = published("conversation_trace.jsonl") else { return };
    let stats = TraceStats::of(&load(&path).unwrap());
    assert_eq!((stats.requests, stats.block_accesses, stats.unique_blocks), (12_031, 288_500, 182_790));
    near(stats.input_tokens.mean, 12_035.1, 0.1);
    near(stats.output_tokens.mean, 342.6, 0.1);
    let input = stats.input_tokens;
    assert_eq!((input.p50, input.p90, input.p99, input.max), (6_909.0, 27_367.0, 85_401.0, 126_195.0));
    let output = stats.output_tokens;
    assert_eq!((output.p50, output.p90, output.p99, output.max), (350.0, 597.0, 1_120.0, 2_000.0));
    near(stats.infinite_cache.rate_blocks(), 0.3664, 1e-4);
    near(stats.infinite_cache.rate_tokens(), 0.3736, 1e-4);
    near(stats.accessed_once, 0.758, 1e-3);
    let gap = stats.reuse_gap_s;
    assert_eq!([gap.p50, gap.p90, gap.p99].map(f64::round), [114.0, 519.0, 1_578.0]);
    assert_eq!((stats.distinct_timestamps, stats.largest_burst, stats.distinct_first_blocks), (1_180, 28, 1));
    near(stats.arrivals_per_10_s.mean, 34.0, 0.1);
    near(stats.arrivals_variation, 0.25, 0.01);
    assert_eq!(stats.arrivals_per_10_s.max, 67.0);
}

#[test]
fn the_published_synthetic_trace() {
    let Some(path) = published("synthetic_trace.jsonl") else { return };
    let stats = TraceStats::of(&load(&path).unwrap());
    assert_eq!((stats.requests, stats.block_accesses, stats.unique_blocks), (3_993, 121_877, 43_924));
    near(stats.input_tokens.mean, 15_325.5, 0.1);
    near(stats.output_tokens.mean, 149.1, 0.1);
    near(stats.infinite_cache.rate_blocks(), 0.6396, 1e-4);
    near(stats.infinite_cache.rate_tokens(), 0.6512, 1e-4);
    near(stats.accessed_once, 0.584, 1e-3);
    assert_eq!(stats.distinct_first_blocks, 2_211);
}
