//! `kvplane sim`: simulations without a cluster.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use kvplane_tools::sim::published::SIZES;
use kvplane_tools::sim::report::{self, CacheReport};
use kvplane_tools::sim::{Cell, Keeper, Row, tokens};
use kvplane_tools::trace::{self, Shape, Trace};

use crate::command::Failure;

/// Run a simulation.
#[derive(Args)]
pub(crate) struct Sim {
    #[command(subcommand)]
    what: What,
}

#[derive(Subcommand)]
enum What {
    /// Simulate a cache on a trace: hit rates by eviction policy and size, beside Belady's bound and the paper's
    /// figures.
    Cache(Cache),
}

#[derive(Args)]
struct Cache {
    /// Trace files in Mooncake's format.
    #[arg(long, num_args = 1.., conflicts_with = "generate", required_unless_present = "generate")]
    trace: Vec<PathBuf>,
    /// Generate a trace of this shape instead of reading one.
    #[arg(long, value_enum)]
    generate: Option<Shape>,
    /// Seed of a generated trace.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of requests to use, from the trace's beginning. Default: all.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    requests: Option<u64>,
    /// Sizes of the cache in tokens, separated by commas; `k` and `M` are thousands and millions. Default: those of the
    /// paper's Figure 9 and 3M, which is about 1 TB for a model of 70 billion parameters.
    #[arg(long, value_delimiter = ',', value_parser = tokens)]
    tokens: Vec<u64>,
    /// File to write the results to as JSON; `-` is standard output.
    #[arg(long)]
    json: Option<String>,
    /// File to write a page with plots to, as HTML.
    #[arg(long)]
    html: Option<PathBuf>,
    /// File to write the tables to, as Markdown.
    #[arg(long)]
    markdown: Option<PathBuf>,
}

impl Sim {
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self.what {
            What::Cache(cache) => cache.run(),
        }
    }
}

impl Cache {
    fn run(self) -> Result<(), Failure> {
        let mut sizes = self.tokens.clone();
        if sizes.is_empty() {
            sizes = SIZES.to_vec();
            sizes.push(3_000_000);
        }
        sizes.sort_unstable();
        sizes.dedup();
        let reports: Vec<CacheReport> = self.traces()?.iter().map(|trace| simulate(trace, &sizes)).collect();
        match self.json.as_deref() {
            Some("-") => println!("{:#}", report::to_json(&reports)),
            Some(path) => {
                print!("{}", report::to_text(&reports));
                std::fs::write(path, format!("{:#}\n", report::to_json(&reports)))
                    .map_err(|error| format!("{path}: {error}"))?;
            }
            None => print!("{}", report::to_text(&reports)),
        }
        if let Some(path) = &self.html {
            report::write_html(&reports, path)?;
        }
        if let Some(path) = &self.markdown {
            std::fs::write(path, report::to_markdown(&reports))
                .map_err(|error| format!("{}: {error}", path.display()))?;
        }
        Ok(())
    }

    fn traces(&self) -> Result<Vec<Trace>, Failure> {
        let mut traces = Vec::new();
        if let Some(shape) = self.generate {
            let requests = self.requests.unwrap_or(shape.published_requests() as u64);
            traces.push(trace::generate(shape, usize::try_from(requests)?, self.seed)?);
        }
        for path in &self.trace {
            let mut trace = trace::load(path)?;
            if let Some(requests) = self.requests {
                trace.requests.truncate(usize::try_from(requests)?);
            }
            traces.push(trace);
        }
        Ok(traces)
    }
}

fn simulate(trace: &Trace, sizes: &[u64]) -> CacheReport {
    let row = |keeper: Keeper| {
        let cells = sizes.iter().map(|&tokens| Cell { tokens, hits: keeper.replay(&trace.requests, tokens) });
        Row { keeper, cells: cells.collect() }
    };
    CacheReport {
        trace: trace.label.clone(),
        requests: trace.requests.len(),
        sizes: sizes.to_vec(),
        rows: Keeper::all().into_iter().map(row).collect(),
    }
}
