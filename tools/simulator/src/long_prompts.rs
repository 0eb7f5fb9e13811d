//! `kvplane-sim long-prompts`: time to the first token of long prompts that pipeline groups prefill, alone and among
//! the requests of a trace.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use kvplane_conductor::cost::pipeline::{DEFAULT_ACTIVATION_BYTES, DEFAULT_LAYERS};
use kvplane_conductor::policy::{
    Admission, Ask, Choice, GroupView, LateBinding, OfferedLoad, Policy, PrefillView, Slo, View,
};
use kvplane_proto::rng::{Rng, mix64};
use kvplane_sim::{RequestStatus, SimConfig, SimGroups, Work, run};
use kvplane_tools::trace::{self, BLOCK_TOKENS, Shape};
use serde::Serialize;

use crate::command::{Failure, write};
use crate::comparison::works;

/// Tokens of a prompt, and the prefill of one instance in seconds, of Figure 14 of FAST'25. The cost model is fitted to
/// these, so they are an input here.
const FIGURE_14: [(u32, f64); 4] = [(16_384, 2.05), (32_768, 4.48), (65_536, 10.58), (131_072, 27.52)];
/// Stages of the compared groups; 1 is a single instance.
const STAGES: [usize; 4] = [1, 2, 4, 8];
/// Least and greatest length of the long prompts among the requests of a trace, in tokens.
const LONG_TOKENS: (u32, u32) = (65_536, 131_072);

/// Simulate pipeline groups that prefill long prompts.
#[derive(Args)]
pub(crate) struct LongPrompts {
    /// Trace file in Mooncake's format, some of whose prompts are replaced by long ones. Default: a generated trace of
    /// the conversation's shape.
    #[arg(long)]
    trace: Option<PathBuf>,
    /// Number of requests of the generated trace.
    #[arg(long, default_value_t = 3_000, value_parser = clap::value_parser!(u64).range(20..=100_000))]
    requests: u64,
    /// Seed of the generated trace and of the long prompts.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Part of the prompts that is replaced by prompts of 64k to 128k tokens without a cached prefix, in percent.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=100))]
    long_percent: u64,
    /// Arrival rates relative to the trace, as factors separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "0.25,0.5,0.75,1")]
    load: Vec<f64>,
    /// Maximum length of a chunk, in tokens.
    #[arg(long, default_value_t = 4_096, value_parser = clap::value_parser!(u32).range(1_024..=1_048_576))]
    chunk: u32,
    /// File to write the results to as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

/// Time to the first token of one prompt on an idle cluster of eight instances.
#[derive(Clone, Debug, Serialize)]
struct IdleRow {
    tokens: u32,
    cached_percent: u32,
    layer_wise: bool,
    /// Seconds by number of stages.
    ttft_s: [f64; STAGES.len()],
    /// Seconds of one instance in Figure 14, to which the cost model is fitted.
    figure_14_s: Option<f64>,
}

/// Times to the first token of a trace with long prompts.
#[derive(Clone, Debug, Serialize)]
struct MixedRow {
    load: f64,
    stages: usize,
    mean_s: f64,
    p50_s: f64,
    p99_s: f64,
    short_mean_s: f64,
    short_p99_s: f64,
    long_mean_s: f64,
    /// Prompts that a group prefilled.
    by_groups: usize,
    unserved: usize,
}

/// Returns the time to the first token that the policy predicts on an idle cluster, where other holders can provide
/// `cached` tokens.
fn idle_s(tokens: u32, cached: u32, stages: usize, layer_wise: bool, chunk_tokens: u32) -> f64 {
    let config = SimConfig::default();
    let layer_wise = layer_wise.then_some(DEFAULT_LAYERS);
    let one = PrefillView { alive: true, factor: 1.0, layer_wise, ..PrefillView::default() };
    let prefill = vec![one; config.prefill];
    let group = GroupView {
        name: "g".into(),
        members: (0..stages).collect(),
        chunk_tokens,
        layers: DEFAULT_LAYERS,
        activation_bytes: DEFAULT_ACTIVATION_BYTES,
    };
    let groups = if stages > 1 { vec![group] } else { Vec::new() };
    let view = View {
        now_ns: 0,
        prefill: &prefill,
        decode: &[],
        model: &config.truth,
        decode_model: &config.decode_model,
        slo: Slo::NONE,
        tbt_limit_ns: u64::MAX,
        token_bytes: config.token_bytes,
        nic_bytes_s: config.nic_bytes_s,
        block_tokens: config.block_tokens,
        pooled: cached,
        ahead_ns: 0,
        placed: 0,
        fastest_decode: None,
        decode_after_ns: 0,
        busiest_ns: 0,
        admission: Admission::NOW,
        busiest_fetch_ns: 0,
        holding_decode: None,
        output_tokens: 0,
        hands_over: false,
        cache_tokens: 0,
        groups: &groups,
        offered: OfferedLoad::default(),
        queued: 0,
    };
    let ask = Ask { id: 1, arrival_ns: 0, tokens, ttft_ns: None, admitted: false, groups: true };
    match LateBinding::default().choose_now(&ask, &view) {
        Choice::Place(placement) => placement.takes_ns() as f64 / 1e9,
        Choice::Wait | Choice::AwaitPrefix { .. } | Choice::Refuse { .. } => f64::NAN,
    }
}

fn idle_rows(chunk_tokens: u32) -> Vec<IdleRow> {
    let mut rows = Vec::new();
    for (cached_percent, layer_wise) in [(0, false), (50, false), (50, true)] {
        for (tokens, published_s) in FIGURE_14 {
            let cached = tokens / 100 * cached_percent / BLOCK_TOKENS * BLOCK_TOKENS;
            let ttft_s = STAGES.map(|stages| idle_s(tokens, cached, stages, layer_wise, chunk_tokens));
            let figure_14_s = (cached_percent == 0).then_some(published_s);
            rows.push(IdleRow { tokens, cached_percent, layer_wise, ttft_s, figure_14_s });
        }
    }
    rows
}

impl LongPrompts {
    /// Returns the requests with the long prompts among them, each with true if it is one.
    fn mixed(&self) -> Result<(String, Vec<(bool, Work)>), Failure> {
        let loaded = match &self.trace {
            Some(path) => trace::load(path)?,
            None => trace::generate(Shape::Conversation, usize::try_from(self.requests)?, self.seed)?,
        };
        let mut rng = Rng::new(self.seed, "long prompts");
        let mut replace = |work: Work| {
            if rng.below(100) >= self.long_percent {
                return (false, work);
            }
            let (least, most) = (LONG_TOKENS.0 / BLOCK_TOKENS, LONG_TOKENS.1 / BLOCK_TOKENS);
            let blocks = u64::from(least) + rng.below(u64::from(most - least) + 1);
            let first = rng.below(u64::MAX);
            let blocks: Arc<[u64]> = (0..blocks).map(|at| mix64(first ^ mix64(at))).collect();
            let input_tokens = blocks.len() as u32 * BLOCK_TOKENS;
            (true, Work { input_tokens, blocks, ..work })
        };
        let works = works(&loaded.requests).into_iter().map(&mut replace).collect();
        Ok((loaded.label, works))
    }

    fn mixed_row(&self, works: &[(bool, Work)], load: f64, stages: usize) -> MixedRow {
        let trace: Vec<Work> = works.iter().map(|(_, work)| work.clone()).collect();
        let groups = (stages > 1).then_some(SimGroups { stages, chunk_tokens: self.chunk });
        let config = SimConfig { load, groups, ..SimConfig::default() };
        let all = run(&trace, &config, Box::new(LateBinding::default()));
        let (short, long) = (all.of(|at| !works[at].0), all.of(|at| works[at].0));
        let quantiles = all.ttft_quantiles_s(&[0.5, 0.99]);
        MixedRow {
            load,
            stages,
            mean_s: all.mean_ttft_s(),
            p50_s: quantiles[0],
            p99_s: quantiles[1],
            short_mean_s: short.mean_ttft_s(),
            short_p99_s: short.ttft_quantiles_s(&[0.99])[0],
            long_mean_s: long.mean_ttft_s(),
            by_groups: all.requests.iter().filter(|request| request.stages > 1).count(),
            unserved: all.requests.len() - all.count(RequestStatus::Served),
        }
    }

    pub(crate) fn run(self) -> Result<(), Failure> {
        if self.load.iter().any(|load| !(0.01..=100.0).contains(load)) {
            return Err("--load takes factors from 0.01 to 100".into());
        }
        let idle = idle_rows(self.chunk);
        println!("one prompt on an idle cluster, TTFT in seconds, chunks of {} tokens", self.chunk);
        println!("tokens\tcached %\tlayer-wise\t1\t2\t4\t8\t1 in Figure 14 (input of the cost model)");
        for row in &idle {
            let times = row.ttft_s.map(|seconds| format!("{seconds:.2}")).join("\t");
            let published = row.figure_14_s.map_or("-".to_owned(), |seconds| format!("{seconds:.2}"));
            println!("{}\t{}\t{}\t{times}\t{published}", row.tokens, row.cached_percent, row.layer_wise);
        }
        let (label, works) = self.mixed()?;
        println!("{label}, {} % long prompts, TTFT in seconds", self.long_percent);
        println!("load\tstages\tmean\tp50\tp99\tshort: mean\tp99\tlong: mean\tby groups\tunserved");
        let mut mixed = Vec::new();
        for load in &self.load {
            for stages in STAGES {
                let row = self.mixed_row(&works, *load, stages);
                println!(
                    "{load}x\t{stages}\t{:.3}\t{:.2}\t{:.2}\t{:.3}\t{:.2}\t{:.2}\t{}\t{}",
                    row.mean_s,
                    row.p50_s,
                    row.p99_s,
                    row.short_mean_s,
                    row.short_p99_s,
                    row.long_mean_s,
                    row.by_groups,
                    row.unserved
                );
                mixed.push(row);
            }
        }
        if let Some(path) = &self.json {
            write(path, &format!("{:#}\n", serde_json::json!({ "idle": idle, "mixed": mixed })))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_stages_help_long_prompts_more_than_short_ones() {
        let rows = idle_rows(4_096);
        assert_eq!(rows.len(), 12);
        for row in &rows {
            assert!(row.ttft_s.is_sorted_by(|one, other| one > other), "{row:?}");
            if let Some(published_s) = row.figure_14_s {
                assert!((row.ttft_s[0] / published_s - 1.0).abs() < 0.06, "{row:?}");
            }
        }
        let gain = |row: &IdleRow| row.ttft_s[0] / row.ttft_s[3];
        assert!(rows[..4].iter().map(gain).is_sorted());
        for (without, with) in rows[4..8].iter().zip(&rows[8..]) {
            assert!(without.ttft_s.iter().zip(with.ttft_s).all(|(without, with)| with < *without), "{with:?}");
        }
    }

    #[test]
    fn long_prompts_among_others_are_prefilled_by_groups() {
        let (trace, json) = (None, None);
        let few = LongPrompts { trace, requests: 200, seed: 3, long_percent: 5, load: vec![0.3], chunk: 4_096, json };
        let (_, works) = few.mixed().unwrap();
        assert!((4..20).contains(&works.iter().filter(|(is_long, _)| *is_long).count()));
        let [alone, groups] = [1, 4].map(|stages| few.mixed_row(&works, 0.3, stages));
        assert!(alone.by_groups == 0 && groups.by_groups > 0 && groups.long_mean_s < alone.long_mean_s);
        assert_eq!(alone.unserved + groups.unserved, 0);
    }
}
