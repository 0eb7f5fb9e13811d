//! `kvplane-sim policies` and `kvplane-sim figures`.

use std::path::{Path, PathBuf};

use clap::Args;
use kvplane_conductor::copies::CopyConfig;
use kvplane_conductor::cost::DecodeModel;
use kvplane_conductor::policy::{Probability, Slo};
use kvplane_sim::{Faults, Outcome, SimConfig, SimGroups, name_sessions, side_by_side};
use kvplane_tools::sim::tokens;
use kvplane_tools::trace::{self, Request, Shape};

use crate::comparison::{OBJECTIVE, PolicyOutcome, Verdict, compare, refusing, works};
use crate::figures::{self, Traces, report};

/// Error of a command, as a sentence for the operator.
pub(crate) type Failure = Box<dyn std::error::Error>;

/// Simulate placement policies on a trace.
#[derive(Args)]
pub(crate) struct Policies {
    /// Trace files in Mooncake's format.
    #[arg(long, num_args = 1.., required_unless_present = "generate")]
    trace: Vec<PathBuf>,
    /// Generate a trace of this shape, as long as the published one.
    #[arg(long, value_enum)]
    generate: Option<Shape>,
    /// Seed of the generated trace.
    #[arg(long, default_value_t = 1, requires = "generate")]
    seed: u64,
    /// Arrival rates relative to the trace, as factors separated by commas.
    #[arg(long, value_delimiter = ',', default_value = "0.5,1,2,3")]
    load: Vec<f64>,
    /// Number of prefill instances.
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u64).range(1..=60))]
    prefill: u64,
    /// Number of decode instances. 0: only prefills are simulated.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=1000))]
    decode: u64,
    /// Cache of each prefill instance, in tokens.
    #[arg(long, default_value = "3M", value_parser = tokens)]
    cache: u64,
    /// Delay of cache events on their way to the Conductor, in milliseconds.
    #[arg(long, default_value_t = 0)]
    stale_ms: u64,
    /// Part of the cache events that is lost, from 0 to 1.
    #[arg(long, default_value_t = 0.0)]
    lost: f64,
    /// Largest relative error of predicted prefill times, such as 0.3.
    #[arg(long, default_value_t = 0.0)]
    prefill_error: f64,
    /// Time after the start at which an instance dies, in seconds. Default: none dies.
    #[arg(long)]
    death_s: Option<u64>,
    /// Replicate hot prefixes whose sources are busy, as the Conductor has the store do.
    #[arg(long)]
    copies: bool,
    /// Do not cache fetched blocks at the fetching instance.
    #[arg(long)]
    pass_through: bool,
    /// Treat the blocks of a prompt as cached at an instance from its placement on, before they are computed.
    #[arg(long)]
    at_once: bool,
    /// Actual duration of decode steps: milliseconds, nanoseconds for each resident token, microseconds for each
    /// request of the batch. The scheduler starts from the default.
    #[arg(long, value_name = "BASE_MS[,TOKEN_NS[,REQUEST_US]]", default_value = "26.2,36")]
    decode_truth: DecodeModel,
    /// Let the scheduler keep to its constants: it learns neither from reports nor from finished requests.
    #[arg(long)]
    constants: bool,
    /// Send the KV cache of a prompt from its prefill to its decode instance; else it is there at once.
    #[arg(long)]
    handover: bool,
    /// Name the session of each request: that of an earlier one whose prompt it continues.
    #[arg(long)]
    sessions: bool,
    /// Policies to simulate, by the beginning of their names, such as kvplane. Default: all, and the bounds.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Bandwidth of an instance's NICs, in bytes per second. Default: 87 GB/s.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1_000_000..))]
    nic: Option<u64>,
    /// Let pipeline groups of so many consecutive instances prefill long prompts. Default: none.
    #[arg(long, value_parser = clap::value_parser!(u64).range(2..=16))]
    groups: Option<u64>,
    /// Maximum length of a chunk that a stage of a group computes at a time, in tokens.
    #[arg(long, default_value_t = 4_096, requires = "groups")]
    #[arg(value_parser = clap::value_parser!(u32).range(1_024..=1_048_576))]
    chunk: u32,
    /// Overlap prefills with the fetch of their prefix, layer by layer.
    #[arg(long)]
    layer_wise: bool,
    /// Simulate admission too, with objectives of 30 s for the first token and 0.1 s for each further token.
    #[arg(long)]
    admission: bool,
    /// Probability with which an admitted request is to have its first token in time, in percent from 50 to 99.9.
    #[arg(long, default_value_t = Probability::DEFAULT, requires = "admission")]
    promise_percent: Probability,
    /// File to write the results to as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// File to write each request's result to, under every policy simulated, as comma-separated values.
    #[arg(long)]
    requests: Option<PathBuf>,
}

impl Policies {
    /// Returns the traces, with their names.
    fn traces(&self) -> Result<Vec<(String, Vec<Request>)>, Failure> {
        let mut traces = Vec::new();
        for path in &self.trace {
            traces.push((path.display().to_string(), trace::load(path)?.requests));
        }
        if let Some(shape) = self.generate {
            let generated = trace::generate(shape, shape.published_requests(), self.seed)?;
            traces.push((generated.label, generated.requests));
        }
        Ok(traces)
    }

    pub(crate) fn run(self) -> Result<(), Failure> {
        if self.load.iter().any(|load| !(0.01..=100.0).contains(load)) {
            return Err("--load takes factors from 0.01 to 100".into());
        }
        if !(0.0..=1.0).contains(&self.lost) || !(0.0..=10.0).contains(&self.prefill_error) {
            return Err("--lost takes a part from 0 to 1, --prefill-error a factor from 0 to 10".into());
        }
        let faults = Faults {
            stale_ns: self.stale_ms.saturating_mul(1_000_000),
            lost: self.lost,
            prefill_error: self.prefill_error,
            death_ns: self.death_s.map(|seconds| seconds.saturating_mul(1_000_000_000)),
        };
        let mut all = Vec::new();
        let mut lines = vec![format!("trace,{}", PolicyOutcome::REQUEST_HEAD)];
        for (name, requests) in self.traces()? {
            let mut works = works(&requests);
            if self.sessions {
                let continued = name_sessions(&mut works);
                println!("{continued} of {} requests continue a session", works.len());
            }
            println!("{name}\n{}", PolicyOutcome::HEAD.join("\t"));
            let mut show = |outcome: &PolicyOutcome, whole: &Outcome| {
                println!("{}", outcome.cells().join("\t"));
                if self.requests.is_some() {
                    let label = name.replace([',', '"'], " ");
                    lines.extend(outcome.request_lines(&works, whole).map(|line| format!("{label},{line}")));
                }
                all.push(serde_json::json!({ "trace": name, "fared": outcome }));
            };
            let mut verdicts = Vec::new();
            for load in &self.load {
                let config = SimConfig {
                    prefill: usize::try_from(self.prefill)?,
                    decode: usize::try_from(self.decode)?,
                    cache_tokens: self.cache,
                    load: *load,
                    faults,
                    copies: self.copies.then(|| CopyConfig {
                        most_bytes: u64::MAX,
                        most_places: u32::try_from(self.prefill).unwrap_or(u32::MAX),
                        ..CopyConfig::default()
                    }),
                    pass_through: self.pass_through,
                    at_once: self.at_once,
                    decode_model: self.decode_truth,
                    learns: !self.constants,
                    hands_over: self.handover,
                    groups: self.groups.map(|stages| SimGroups { stages: stages as usize, chunk_tokens: self.chunk }),
                    layer_wise: self.layer_wise,
                    nic_bytes_s: self.nic.unwrap_or(SimConfig::default().nic_bytes_s),
                    ..SimConfig::default()
                };
                let mut outcomes = Vec::new();
                let is_meant = |name: &str| self.only.is_empty() || self.only.iter().any(|only| name.starts_with(only));
                compare(&works, &config, side_by_side(), is_meant, |outcome, whole| {
                    show(&outcome, whole);
                    outcomes.push(outcome);
                });
                verdicts.extend(Verdict::of(&outcomes));
                if self.admission {
                    let slo =
                        Slo { ttft_ns: OBJECTIVE.ttft_ns, tbt_ns: OBJECTIVE.tbt_ns, probability: self.promise_percent };
                    compare(&works, &SimConfig { slo, ..config }, refusing(), is_meant, |outcome, whole| {
                        show(&outcome, whole);
                    });
                }
            }
            println!("kvplane beside the best other policy\n{}", Verdict::HEAD.join("\t"));
            verdicts.iter().for_each(|verdict| println!("{}", verdict.cells().join("\t")));
        }
        if let Some(path) = &self.json {
            write(path, &format!("{:#}\n", serde_json::Value::Array(all)))?;
        }
        if let Some(path) = &self.requests {
            lines.push(String::new());
            write(path, &lines.join("\n"))?;
        }
        Ok(())
    }
}

/// Reproduce the paper's figures.
#[derive(Args)]
pub(crate) struct Figures {
    /// Trace files of Mooncake: the conversation trace, the synthetic one, or both; identified by their number of
    /// requests.
    #[arg(long, num_args = 1..=2, required = true)]
    trace: Vec<PathBuf>,
    /// File to write the results to as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// File to write a page with plots to, as HTML.
    #[arg(long)]
    html: Option<PathBuf>,
    /// File to write the tables to, as Markdown.
    #[arg(long)]
    markdown: Option<PathBuf>,
}

impl Figures {
    pub(crate) fn run(self) -> Result<(), Failure> {
        let mut loaded: Vec<Vec<Request>> = Vec::new();
        for path in &self.trace {
            loaded.push(trace::load(path)?.requests);
        }
        let of = |count: usize| loaded.iter().find(|requests| requests.len() == count).map(Vec::as_slice);
        let traces = Traces { conversation: of(12_031), synthetic: of(3_993) };
        if traces.conversation.is_none() && traces.synthetic.is_none() {
            return Err(
                "none of these is Mooncake's conversation trace (12,031 requests) or synthetic one (3,993)".into()
            );
        }
        let mut all = Vec::new();
        figures::all(traces, |figure| {
            print!("{}", report::to_text(std::slice::from_ref(&figure)));
            all.push(figure);
        });
        if let Some(path) = &self.json {
            write(path, &format!("{:#}\n", report::to_json(&all)))?;
        }
        if let Some(path) = &self.html {
            report::write_html(&all, path)?;
        }
        if let Some(path) = &self.markdown {
            write(path, &report::to_markdown(&all))?;
        }
        Ok(())
    }
}

pub(crate) fn write(path: &Path, text: &str) -> Result<(), Failure> {
    Ok(std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))?)
}
