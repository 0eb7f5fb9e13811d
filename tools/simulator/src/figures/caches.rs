//! Figures that follow from the order of requests alone: Table 2, Figures 8 and 9.

use kvplane_sim::{Order, SimConfig, bound};
use kvplane_store::eviction::Eviction;
use kvplane_tools::sim::Keeper;
use kvplane_tools::sim::published::SIZES;
use kvplane_tools::trace::{HitCounts, Request};

use super::{Curve, Figure, Line, Traces};
use crate::comparison::works;

/// Requests, mean input, mean output, fraction of tokens found by an unlimited cache.
const TABLE_2: [[f64; 4]; 2] = [[12_031.0, 12_035.0, 343.0, 0.40], [3_993.0, 15_325.0, 149.0, 0.66]];
/// Seconds of prefill for each request: with an unlimited cache, without a cache.
const FIGURE_8: [[f64; 2]; 2] = [[1.062, 1.661], [0.733, 2.022]];
/// Hit rates by tokens at the sizes of [`SIZES`].
const FIGURE_9: [[f64; SIZES.len()]; 2] = [
    [0.045, 0.073, 0.087, 0.120, 0.215, 0.247, 0.300, 0.326, 0.398, 0.401],
    [0.000, 0.012, 0.146, 0.234, 0.381, 0.435, 0.545, 0.589, 0.658, 0.658],
];

/// Cache size that no trace fills, in tokens.
const ENDLESS_TOKENS: u64 = 200_000_000;

fn lru(trace: &[Request], tokens: u64) -> HitCounts {
    Keeper::Policy { eviction: Eviction::Lru, tails: true, leaves_first: false }.replay(trace, tokens)
}

pub(super) fn table_2(traces: Traces<'_>) -> Option<Figure> {
    let mut lines = Vec::new();
    for (name, trace, at) in traces.each() {
        let count = trace.len().max(1) as f64;
        let mean = |tokens: fn(&Request) -> u32| trace.iter().map(|r| f64::from(tokens(r))).sum::<f64>() / count;
        let [requests, input, output, ratio] = TABLE_2[at];
        lines.push(Line::new(format!("{name}: requests"), requests, trace.len() as f64));
        lines.push(Line::new(format!("{name}: mean input tokens"), input, mean(|r| r.input_tokens)));
        lines.push(Line::new(format!("{name}: mean output tokens"), output, mean(|r| r.output_tokens)));
        let hit = lru(trace, ENDLESS_TOKENS).rate_tokens();
        lines.push(Line::new(format!("{name}: cache ratio"), ratio, hit));
    }
    (!lines.is_empty()).then_some(Figure {
        name: "Table 2",
        title: "What is in the traces",
        lines,
        why: "The released traces name blocks of 512 tokens, so sharing of less than a block is not seen: about half \
              a block for each request that hits.",
        axes: ("", false, ""),
        curves: Vec::new(),
    })
}

pub(super) fn figure_8(traces: Traces<'_>) -> Option<Figure> {
    let mut lines = Vec::new();
    for (name, trace, at) in traces.each() {
        let works = works(trace);
        let config = SimConfig::default();
        let cached = bound(&works, &config, Order::Fcfs).prefill_s();
        let sum: f64 = works.iter().map(|work| config.truth.predict_ns(work.input_tokens, 0) as f64 / 1e9).sum();
        let [with, without] = FIGURE_8[at];
        lines.push(Line::new(format!("{name}: endless shared cache"), with, cached));
        lines.push(Line::new(format!("{name}: no cache"), without, sum / works.len().max(1) as f64));
    }
    (!lines.is_empty()).then_some(Figure {
        name: "Figure 8",
        title: "Seconds of prefill a request",
        lines,
        why: "The cost model is fitted to Figure 14 and sees nothing of this figure. The rows of vLLM with its own \
              prefix cache or chunks need a model of that engine and are left out.",
        axes: ("", false, ""),
        curves: Vec::new(),
    })
}

pub(super) fn figure_9(traces: Traces<'_>) -> Option<Figure> {
    let (mut lines, mut curves) = (Vec::new(), Vec::new());
    for (name, trace, at) in traces.each() {
        let rates = SIZES.map(|size| lru(trace, size).rate_tokens());
        for ((size, paper), ours) in SIZES.iter().zip(FIGURE_9[at]).zip(rates) {
            lines.push(Line::new(format!("{name}: {size} tokens"), paper, ours));
        }
        let points = |rates: [f64; SIZES.len()]| SIZES.iter().map(|size| *size as f64).zip(rates).collect();
        curves.push(Curve { name: format!("{name}, ours"), points: points(rates), paper: false });
        curves.push(Curve { name: format!("{name}, paper"), points: points(FIGURE_9[at]), paper: true });
    }
    (!lines.is_empty()).then_some(Figure {
        name: "Figure 9",
        title: "Share of tokens found by an LRU cache of so many tokens",
        lines,
        why: "A constant offset on the conversation trace: sharing of less than a block of 512 tokens, which the \
              released trace does not show.",
        axes: ("tokens of the cache", true, "share of tokens found"),
        curves,
    })
}
