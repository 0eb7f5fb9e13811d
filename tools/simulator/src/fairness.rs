//! `kvplane-sim fairness`: what the other tenants of a model notice when one sends many times its share.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use kvplane_conductor::policy::LateBinding;
use kvplane_conductor::scheduler::ServiceTerms;
use kvplane_proto::rng::{Rng, mix64};
use kvplane_sim::{SimConfig, Work, run};
use kvplane_tools::trace;

use crate::command::Failure;
use crate::comparison::works;

/// Greatest time by which a repeated request arrives later than the original.
const SPREAD_NS: u64 = 60_000_000_000;

/// Simulate tenants of one model, of which one sends many times its share.
#[derive(Args)]
pub(crate) struct Fairness {
    /// Trace files in Mooncake's format.
    #[arg(long, num_args = 1.., required = true)]
    trace: Vec<PathBuf>,
    /// Number of tenants, among which the conversations of the trace are divided.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(2..=1000))]
    tenants: u64,
    /// Ratio of the requests that the first tenant sends to its share.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(2..=100))]
    flood: u64,
    /// Arrival rates of the trace without the flood, as factors separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "0.5,0.8,1")]
    load: Vec<f64>,
}

/// One run: what is sent, and whether the tenants are flows.
struct Case {
    label: &'static str,
    flood: bool,
    flows: bool,
}

const CASES: [Case; 4] = [
    Case { label: "share", flood: false, flows: false },
    Case { label: "share, flows", flood: false, flows: true },
    Case { label: "flood", flood: true, flows: false },
    Case { label: "flood, flows", flood: true, flows: true },
];

impl Fairness {
    pub(crate) fn run(self) -> Result<(), Failure> {
        if self.load.iter().any(|load| !(0.01..=100.0).contains(load)) {
            return Err("--load takes factors from 0.01 to 100".into());
        }
        for path in &self.trace {
            let works = works(&trace::load(path)?.requests);
            let head = [
                "case",
                "load",
                "others: mean TTFT s",
                "p50",
                "p99",
                "longest",
                "hit",
                "prefill s",
                "first: mean TTFT s",
                "p99",
            ];
            println!("{}\n{}", path.display(), head.join("\t"));
            for load in &self.load {
                for case in &CASES {
                    let (is_first, works): (Vec<bool>, Vec<Work>) = self.divided(&works, case).into_iter().unzip();
                    let config = SimConfig { load: *load, ..SimConfig::default() };
                    let done = run(&works, &config, Box::new(LateBinding::default()));
                    let (others, first) = (done.of(|at| !is_first[at]), done.of(|at| is_first[at]));
                    let (rest, own) = (others.ttft_quantiles_s(&[0.5, 0.99, 1.0]), first.ttft_quantiles_s(&[0.99]));
                    println!(
                        "{}\t{load}x\t{:.3}\t{:.2}\t{:.2}\t{:.1}\t{:.3}\t{:.3}\t{:.3}\t{:.2}",
                        case.label,
                        others.mean_ttft_s(),
                        rest[0],
                        rest[1],
                        rest[2],
                        others.hit(),
                        others.prefill_s(),
                        first.mean_ttft_s(),
                        own[0]
                    );
                }
            }
        }
        Ok(())
    }

    /// Divides the requests among the tenants, those of one conversation to one; adds the flood. Marks those of the
    /// first tenant.
    fn divided(&self, works: &[Work], case: &Case) -> Vec<(bool, Work)> {
        let mut rng = Rng::new(1, "fairness");
        let mut all = Vec::new();
        for work in works {
            // All prompts of a trace may have the first block in common.
            let conversation = work.blocks.get(1).or(work.blocks.first()).copied().unwrap_or(0);
            let tenant = mix64(conversation) % self.tenants;
            let flow: Arc<str> = if case.flows { format!("tenant-{tenant}").into() } else { "".into() };
            let terms = ServiceTerms { flow, ..ServiceTerms::default() };
            all.push((tenant == 0, Work { terms: terms.clone(), ..work.clone() }));
            for copy in 1..if case.flood && tenant == 0 { self.flood } else { 1 } {
                let arrival_ns = work.arrival_ns + rng.below(SPREAD_NS);
                let blocks = work.blocks.iter().map(|block| mix64(block ^ mix64(copy))).collect();
                all.push((true, Work { arrival_ns, blocks, terms: terms.clone(), ..work.clone() }));
            }
        }
        all.sort_by_key(|(_, work)| work.arrival_ns);
        all
    }
}
