//! Seeded generator of traces with the published shapes, for machines without the published traces.
//!
//! *Conversation*: requests arrive in quanta of 3 s with bursts; all begin with one shared head block; a request opens
//! a session with a fresh prompt or is a later turn of one: its prompt extends the previous prompt, or branches off
//! from a point in the middle, or repeats it. The tables are quantiles of Mooncake's published conversation trace
//! (FAST'25), and the probabilities are set so that the statistics that matter to a cache agree: lengths, sharing,
//! reuse gaps, blocks used once.
//!
//! *Tool and agent*: two more kinds of request that share a long head and nothing else, in the published proportions
//! of heads.
//!
//! A trace shorter than the published one is a scaled-down version of it: the arrival rate stays and the time between
//! turns shrinks with the number of requests, so that hit rates, and pools in proportion to the working set, carry
//! over. The label states that the trace is generated; it is no substitute for the published trace in a published
//! figure.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fmt;

use kvplane_proto::rng::Rng;

use super::{MAX_REQUESTS, Request, Trace};

mod tables;

use tables::Quantiles;

/// Interval between arrival times, in milliseconds.
const QUANTUM_MS: u64 = 3_000;
/// Number of quanta of a published trace.
const PUBLISHED_QUANTA: f64 = 1_180.0;
/// Largest burst, as a multiple of the mean arrivals of a quantum: 28 of 10.2.
const BURST: f64 = 2.75;
/// Length of the longest prompt, in tokens.
const MAX_INPUT_TOKENS: u32 = 126_195;
/// Length of the longest answer, in tokens.
const MAX_OUTPUT_TOKENS: u32 = 2_000;

/// Shape of a generated trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Shape {
    /// Like Mooncake's conversation trace.
    Conversation,
    /// Like Mooncake's toolagent trace.
    #[value(name = "toolagent")]
    ToolAgent,
}

impl Shape {
    /// Returns the number of requests of the published trace.
    #[must_use]
    pub const fn published_requests(self) -> usize {
        match self {
            Self::Conversation => 12_031,
            Self::ToolAgent => 23_608,
        }
    }

    /// Returns the name in labels and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Conversation => "conversation",
            Self::ToolAgent => "toolagent",
        }
    }

    const fn kinds(self) -> &'static [Kind] {
        match self {
            Self::Conversation => &[Kind::Session],
            Self::ToolAgent => &[Kind::Session, Kind::LongHead, Kind::ShortHead],
        }
    }
}

/// Error of the generator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GenerateError {
    /// The number of requests is not between 1 and [`MAX_REQUESTS`].
    Requests {
        /// Requested number.
        requests: usize,
    },
}

impl fmt::Display for GenerateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self::Requests { requests } = self;
        write!(f, "cannot generate {requests} requests: give from 1 to {MAX_REQUESTS}")
    }
}

impl std::error::Error for GenerateError {}

/// Kind of a prompt, by its head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// One shared block, then a conversation.
    Session,
    /// Twelve shared blocks and a little more.
    LongHead,
    /// Five shared blocks and a little more.
    ShortHead,
}

impl Kind {
    const fn head_blocks(self) -> usize {
        match self {
            Self::Session => 1,
            Self::LongHead => 12,
            Self::ShortHead => 5,
        }
    }

    const fn input_tokens(self) -> Quantiles {
        match self {
            Self::Session => tables::SESSION_INPUT_TOKENS,
            Self::LongHead => tables::LONG_HEAD_INPUT_TOKENS,
            Self::ShortHead => tables::SHORT_HEAD_INPUT_TOKENS,
        }
    }

    const fn output_tokens(self) -> Quantiles {
        match self {
            Self::Session => tables::SESSION_OUTPUT_TOKENS,
            Self::LongHead => tables::LONG_HEAD_OUTPUT_TOKENS,
            Self::ShortHead => tables::SHORT_HEAD_OUTPUT_TOKENS,
        }
    }

    /// Draws the kind of the next request.
    fn draw(shape: Shape, rng: &mut Rng) -> Self {
        match (shape, rng.unit()) {
            (Shape::ToolAgent, u) if u < 0.39 => Self::LongHead,
            (Shape::ToolAgent, u) if u < 0.54 => Self::ShortHead,
            _ => Self::Session,
        }
    }
}

/// Later turn that is due: ordered by time, then by the order in which it was planned.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Due {
    at_ms: u64,
    order: u64,
    turn: u32,
    input_tokens: u32,
    blocks: Vec<u64>,
}

/// Generates `requests` requests of the given shape. The same arguments give the same trace, everywhere and always.
///
/// # Errors
/// Fails if `requests` is 0 or more than [`MAX_REQUESTS`].
pub fn generate(shape: Shape, requests: usize, seed: u64) -> Result<Trace, GenerateError> {
    if requests == 0 || requests > MAX_REQUESTS {
        return Err(GenerateError::Requests { requests });
    }
    let mut generator = Generator::new(shape, requests, seed);
    let mut generated = Vec::with_capacity(requests);
    for (quantum, count) in arrivals(shape, requests, seed).into_iter().enumerate() {
        for _ in 0..count {
            generated.push(generator.request(quantum as u64 * QUANTUM_MS));
        }
    }
    let label = format!("generated {}-like trace ({requests} requests, seed {seed})", shape.name());
    Ok(Trace { label, requests: generated, unordered: 0 })
}

/// Draws the number of requests that arrive in each quantum: Poisson with one large burst; no quantum is empty while
/// there are requests enough.
fn arrivals(shape: Shape, requests: usize, seed: u64) -> Vec<u64> {
    let mut rng = Rng::new(seed, "trace arrivals");
    let mean = shape.published_requests() as f64 / PUBLISHED_QUANTA;
    let quanta = ((requests as f64 / mean).round() as usize).clamp(1, requests);
    let mut counts: Vec<u64> = (0..quanta).map(|_| poisson(mean, &mut rng).max(1)).collect();
    let burst = rng.below(quanta as u64) as usize;
    if quanta > 20 {
        counts[burst] = (mean * BURST).round() as u64;
    }
    let mut total: u64 = counts.iter().sum();
    while total != requests as u64 {
        let at = rng.below(quanta as u64) as usize;
        if (at == burst && quanta > 20) || (total > requests as u64 && counts[at] == 1) {
            continue;
        }
        if total < requests as u64 {
            counts[at] += 1;
            total += 1;
        } else {
            counts[at] -= 1;
            total -= 1;
        }
    }
    counts
}

/// Draws a Poisson number by Knuth's product of uniforms; the means here are at most 20.
fn poisson(mean: f64, rng: &mut Rng) -> u64 {
    let limit = (-mean).exp();
    let mut product = rng.unit();
    let mut count = 0;
    while product > limit {
        product *= rng.unit();
        count += 1;
    }
    count
}

/// State between requests. Random streams are separate, so that tuning one table leaves the draws of the others alone.
struct Generator {
    shape: Shape,
    kinds: Rng,
    lengths: Rng,
    turns: Rng,
    /// Factor of the time between turns.
    gap_scale: f64,
    next_block: u64,
    planned: u64,
    heads: Vec<Vec<u64>>,
    due: BinaryHeap<Reverse<Due>>,
}

impl Generator {
    fn new(shape: Shape, requests: usize, seed: u64) -> Self {
        let mut next_block = 0;
        let heads = shape.kinds().iter().map(|kind| fresh(&mut next_block, kind.head_blocks())).collect();
        Self {
            shape,
            kinds: Rng::new(seed, "trace kinds"),
            lengths: Rng::new(seed, "trace lengths"),
            turns: Rng::new(seed, "trace turns"),
            gap_scale: (requests as f64 / shape.published_requests() as f64).min(1.0),
            next_block,
            planned: 0,
            heads,
            due: BinaryHeap::new(),
        }
    }

    fn request(&mut self, now_ms: u64) -> Request {
        let kind = Kind::draw(self.shape, &mut self.kinds);
        let later_turn = if kind == Kind::Session { self.take_due(now_ms) } else { None };
        let (turn, input_tokens, blocks) = match later_turn {
            Some(due) => {
                let turn = due.turn + 1;
                let (input_tokens, blocks) = self.later_prompt(&due);
                (turn, input_tokens, blocks)
            }
            None => {
                let input_tokens = kind.input_tokens().draw(&mut self.lengths) as u32;
                let head = self.heads[kind as usize].clone();
                (1, input_tokens, self.extend(head, input_tokens))
            }
        };
        if kind == Kind::Session {
            self.plan(now_ms, turn, input_tokens, &blocks);
        }
        let output_tokens = (kind.output_tokens().draw(&mut self.lengths) as u32).clamp(1, MAX_OUTPUT_TOKENS);
        Request { timestamp_ms: now_ms, input_tokens, output_tokens, blocks }
    }

    fn take_due(&mut self, now_ms: u64) -> Option<Due> {
        if self.due.peek()?.0.at_ms > now_ms {
            return None;
        }
        self.due.pop().map(|Reverse(due)| due)
    }

    /// Returns the prompt of the turn after `due`: an extension, a repetition, or a branch from a point in the middle.
    fn later_prompt(&mut self, due: &Due) -> (u32, Vec<u64>) {
        let full = (due.input_tokens / super::BLOCK_TOKENS) as usize;
        let way = self.turns.unit();
        if way < tables::REPEAT {
            return (due.input_tokens, due.blocks.clone());
        }
        let added = tables::TURN_ADDED_TOKENS.draw(&mut self.lengths) as u32;
        let input_tokens = (due.input_tokens + added).min(MAX_INPUT_TOKENS);
        let branches = way < tables::REPEAT + tables::BRANCH && full > 1;
        // Some branches start right at the head, most keep a good part.
        let kept = if branches { 1 + self.turns.below(full as u64 - 1) as usize } else { full };
        (input_tokens, self.extend(due.blocks[..kept].to_vec(), input_tokens))
    }

    /// Extends `prefix` with fresh blocks up to the length `input_tokens`.
    fn extend(&mut self, mut prefix: Vec<u64>, input_tokens: u32) -> Vec<u64> {
        let missing = Request::blocks_of(input_tokens).saturating_sub(prefix.len());
        prefix.extend(fresh(&mut self.next_block, missing));
        prefix
    }

    /// Draws if and when the session continues after this turn.
    fn plan(&mut self, now_ms: u64, turn: u32, input_tokens: u32, blocks: &[u64]) {
        // Sessions with long prompts continue less often: otherwise prompts of later turns outgrow the published ones.
        let taper = (tables::TAPER_TOKENS / f64::from(input_tokens)).min(1.0);
        let goes_on = if turn == 1 { tables::SECOND_TURN } else { tables::FURTHER_TURN };
        if !self.turns.chance(goes_on * taper) {
            return;
        }
        let gap_ms = tables::TURN_GAP_S.draw(&mut self.turns) * self.gap_scale * 1e3;
        let at_ms = now_ms + (gap_ms as u64).max(1);
        self.planned += 1;
        let order = self.planned;
        self.due.push(Reverse(Due { at_ms, order, turn, input_tokens, blocks: blocks.to_vec() }));
    }
}

/// Returns the next `count` block ids.
fn fresh(next_block: &mut u64, count: usize) -> Vec<u64> {
    let first = *next_block;
    *next_block += count as u64;
    (first..*next_block).collect()
}

#[cfg(test)]
mod tests;
