//! `kvplane sim`: simulations without a cluster.

mod cluster;

use std::fmt;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use kvplane_tools::sim::published::SIZES;
use kvplane_tools::sim::report::{self, CacheReport};
use kvplane_tools::sim::{Cell, Keeper, MAX_TOKENS, Row};
use kvplane_tools::trace::{self, Shape, Trace};

use self::cluster::{Figures, Policies};
use crate::command::Failure;
use crate::command::replay::GeneratedTrace;

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
    /// Simulate a cluster on a trace: the Conductor's placement policies, beside bounds that no scheduler beats.
    Policies(Policies),
    /// Reproduce figures of Mooncake's papers with the simulator.
    Figures(Figures),
}

#[derive(Args)]
struct Cache {
    /// Trace files in Mooncake's format.
    #[arg(long, num_args = 1.., conflicts_with = "generate", required_unless_present = "generate")]
    trace: Vec<PathBuf>,
    /// Generate a trace of this shape instead of reading one.
    #[arg(long, value_enum)]
    generate: Option<GeneratedTrace>,
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

/// Error of a text that is no number of tokens within [`MAX_TOKENS`].
#[derive(Clone, PartialEq, Eq, Debug)]
struct TokensError {
    text: String,
}

impl fmt::Display for TokensError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = &self.text;
        write!(f, "{text:?} is not a cache size: give tokens, from 1 to {MAX_TOKENS}, such as 100k or 3M")
    }
}

impl std::error::Error for TokensError {}

/// Parses a number of tokens: `10000`, `100k`, `3M`.
fn tokens(text: &str) -> Result<u64, TokensError> {
    let (digits, factor) = match text.as_bytes().last() {
        Some(b'k' | b'K') => (&text[..text.len() - 1], 1_000),
        Some(b'm' | b'M') => (&text[..text.len() - 1], 1_000_000),
        _ => (text, 1),
    };
    let tokens = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
    match tokens {
        Some(tokens @ 1..=MAX_TOKENS) => Ok(tokens),
        _ => Err(TokensError { text: text.to_owned() }),
    }
}

impl Sim {
    pub(crate) fn run(self) -> Result<(), Failure> {
        match self.what {
            What::Cache(cache) => cache.run(),
            What::Policies(policies) => policies.run(),
            What::Figures(figures) => figures.run(),
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
            let shape = Shape::from(shape);
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
