//! Statistics of a trace: lengths, sharing, reuse and bursts, as the published tables state them.
//!
//! The infinite-cache hit rate is the fraction that a cache which never evicts would have found; it bounds every
//! policy. Percentiles are by rank without interpolation: the value at index `floor(p * n)` of the sorted values.

use std::collections::HashMap;
use std::fmt;

use super::{HitCounts, Request, Trace};

/// Mean, percentiles and maximum of a set of numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize)]
pub struct Spread {
    /// Arithmetic mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// Largest value.
    pub max: f64,
}

impl Spread {
    /// Sorts `values` and computes their spread; all zero when there are none.
    fn of(values: &mut [u64], scale: f64) -> Self {
        let Some(last) = values.len().checked_sub(1) else { return Self::default() };
        values.sort_unstable();
        let rank = |p: f64| values[((p * values.len() as f64) as usize).min(last)] as f64 * scale;
        let sum: u128 = values.iter().map(|&value| u128::from(value)).sum();
        Self {
            mean: sum as f64 / values.len() as f64 * scale,
            p50: rank(0.5),
            p90: rank(0.9),
            p99: rank(0.99),
            max: values[last] as f64 * scale,
        }
    }
}

/// Statistics of one trace.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct TraceStats {
    /// Number of requests.
    pub requests: u64,
    /// Time from the first to the last timestamp, in seconds.
    pub duration_s: f64,
    /// Number of requests with a timestamp before their predecessor's.
    pub unordered: u64,
    /// Lengths of prompts, in tokens.
    pub input_tokens: Spread,
    /// Lengths of answers, in tokens.
    pub output_tokens: Spread,
    /// Number of blocks in all requests.
    pub block_accesses: u64,
    /// Number of distinct blocks among them.
    pub unique_blocks: u64,
    /// Fraction of the distinct blocks that occur only once.
    pub accessed_once: f64,
    /// Number of distinct first blocks.
    pub distinct_first_blocks: u64,
    /// Blocks and tokens that a cache which never evicts would have found.
    pub infinite_cache: HitCounts,
    /// Time from one access of a block to the next one of the same block, in seconds.
    pub reuse_gap_s: Spread,
    /// Number of distinct timestamps.
    pub distinct_timestamps: u64,
    /// Most requests with one timestamp.
    pub largest_burst: u64,
    /// Number of arrivals in each 10 s of the trace.
    pub arrivals_per_10_s: Spread,
    /// Standard deviation over mean of the arrivals in each 10 s.
    pub arrivals_variation: f64,
}

impl TraceStats {
    /// Computes the statistics in one pass, with memory in proportion to the distinct blocks and the accesses.
    #[must_use]
    pub fn of(trace: &Trace) -> Self {
        let requests = &trace.requests;
        let sharing = BlockSharing::of(requests);
        let arrivals = Arrivals::of(requests);
        let lengths = |length: fn(&Request) -> u32| {
            Spread::of(&mut requests.iter().map(|request| u64::from(length(request))).collect::<Vec<_>>(), 1.0)
        };
        Self {
            requests: requests.len() as u64,
            duration_s: arrivals.duration_ms as f64 / 1e3,
            unordered: trace.unordered,
            input_tokens: lengths(|request| request.input_tokens),
            output_tokens: lengths(|request| request.output_tokens),
            block_accesses: sharing.infinite_cache.blocks,
            unique_blocks: sharing.unique,
            accessed_once: if sharing.unique == 0 { 0.0 } else { sharing.once as f64 / sharing.unique as f64 },
            distinct_first_blocks: sharing.first_blocks,
            infinite_cache: sharing.infinite_cache,
            reuse_gap_s: sharing.reuse_gap_s,
            distinct_timestamps: arrivals.distinct,
            largest_burst: arrivals.largest_burst,
            arrivals_per_10_s: arrivals.per_10_s,
            arrivals_variation: arrivals.variation,
        }
    }
}

/// Sharing of blocks between requests.
struct BlockSharing {
    infinite_cache: HitCounts,
    unique: u64,
    once: u64,
    first_blocks: u64,
    reuse_gap_s: Spread,
}

impl BlockSharing {
    fn of(requests: &[Request]) -> Self {
        struct BlockUse {
            last_ms: u64,
            accesses: u64,
            leads: bool,
        }
        let mut seen: HashMap<u64, BlockUse> = HashMap::new();
        let mut infinite_cache = HitCounts::default();
        let mut gaps_ms = Vec::new();
        for request in requests {
            let known = request.blocks.iter().take_while(|block| seen.contains_key(block)).count();
            infinite_cache.add(request, known);
            for (position, &block) in request.blocks.iter().enumerate() {
                let now_ms = request.timestamp_ms;
                let entry = seen.entry(block).or_insert(BlockUse { last_ms: now_ms, accesses: 0, leads: false });
                if entry.accesses > 0 {
                    gaps_ms.push(now_ms.saturating_sub(entry.last_ms));
                }
                entry.accesses += 1;
                entry.last_ms = now_ms;
                entry.leads |= position == 0;
            }
        }
        Self {
            infinite_cache,
            unique: seen.len() as u64,
            once: seen.values().filter(|seen| seen.accesses == 1).count() as u64,
            first_blocks: seen.values().filter(|seen| seen.leads).count() as u64,
            reuse_gap_s: Spread::of(&mut gaps_ms, 1e-3),
        }
    }
}

/// Arrivals of requests.
struct Arrivals {
    duration_ms: u64,
    distinct: u64,
    largest_burst: u64,
    per_10_s: Spread,
    variation: f64,
}

impl Arrivals {
    fn of(requests: &[Request]) -> Self {
        let mut times: Vec<u64> = requests.iter().map(|request| request.timestamp_ms).collect();
        times.sort_unstable();
        let (first, last) = (times.first().copied().unwrap_or(0), times.last().copied().unwrap_or(0));
        let bursts: Vec<u64> = times.chunk_by(|a, b| a == b).map(|burst| burst.len() as u64).collect();
        // Empty windows count as well, but a single distant timestamp must not take memory in proportion to its
        // distance.
        let mut windows: Vec<u64> =
            times.chunk_by(|a, b| a / 10_000 == b / 10_000).map(|window| window.len() as u64).collect();
        let spanned = (last / 10_000 - first / 10_000 + 1).min(windows.len() as u64 + 1_000_000) as usize;
        windows.resize(if times.is_empty() { 0 } else { spanned.max(windows.len()) }, 0);
        let per_10_s = Spread::of(&mut windows, 1.0);
        let squares: f64 = windows.iter().map(|&count| (count as f64 - per_10_s.mean).powi(2)).sum();
        let deviation = (squares / windows.len().max(1) as f64).sqrt();
        Self {
            duration_ms: last - first,
            distinct: bursts.len() as u64,
            largest_burst: bursts.iter().copied().max().unwrap_or(0),
            per_10_s,
            variation: if per_10_s.mean > 0.0 { deviation / per_10_s.mean } else { 0.0 },
        }
    }
}

impl fmt::Display for TraceStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tokens = |spread: &Spread| {
            format!(
                "mean {:.1}, p50 {:.0}, p90 {:.0}, p99 {:.0}, max {:.0}",
                spread.mean, spread.p50, spread.p90, spread.p99, spread.max
            )
        };
        writeln!(f, "requests        {} over {:.0} s", self.requests, self.duration_s)?;
        writeln!(f, "input tokens    {}", tokens(&self.input_tokens))?;
        writeln!(f, "output tokens   {}", tokens(&self.output_tokens))?;
        writeln!(
            f,
            "blocks          {} accesses, {} different, {:.1} % of them once",
            self.block_accesses,
            self.unique_blocks,
            self.accessed_once * 100.0
        )?;
        writeln!(f, "infinite cache  {}", self.infinite_cache)?;
        let gap = &self.reuse_gap_s;
        writeln!(f, "reuse gap       p50 {:.0} s, p90 {:.0} s, p99 {:.0} s", gap.p50, gap.p90, gap.p99)?;
        write!(
            f,
            "arrivals        {:.1} per 10 s (variation {:.2}), largest burst {}",
            self.arrivals_per_10_s.mean, self.arrivals_variation, self.largest_burst
        )
    }
}

#[cfg(test)]
pub(crate) mod tests;
