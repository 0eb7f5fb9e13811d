//! Simulated decode instance: continuous batching, where the duration of a step follows from the batch.
//!
//! Between two changes of the batch all steps are assumed to be as long as the first one.

use std::collections::VecDeque;

use kvplane_conductor::cost::{DecodeModel, DecodeSteps};

/// Request that has generated its output.
pub(crate) struct FinishedDecode {
    pub(crate) id: usize,
    /// Mean of its longest tenth of times between tokens.
    pub(crate) tbt_ns: f64,
    /// Time since its first step.
    pub(crate) decode_ns: u64,
}

/// Steps since the last report: their number, duration, and sums over them of resident tokens and of requests.
#[derive(Default)]
struct StepSums {
    steps: f64,
    took_ns: f64,
    tokens: f64,
    requests: f64,
}

/// Request in the batch.
struct Member {
    id: usize,
    resident: u64,
    left: f64,
    start_ns: u64,
    /// Numbers of tokens and the time between them, in order.
    steps: Vec<(f64, f64)>,
}

#[derive(Default)]
pub(crate) struct Decode {
    batch: Vec<Member>,
    waiting: VecDeque<(usize, u64, u32)>,
    since_ns: u64,
    unreported: StepSums,
    /// Number of changes of the batch; an event with an older version is stale.
    pub version: u64,
}

impl Decode {
    pub(crate) fn resident(&self) -> u64 {
        self.batch.iter().map(|member| member.resident).sum()
    }

    fn step_ns(&self, model: &DecodeModel) -> f64 {
        model.step_ns(self.resident(), self.batch.len()) as f64
    }

    /// Returns the number of requests in the batch.
    pub(crate) fn requests(&self) -> u32 {
        self.batch.len() as u32
    }

    /// Takes the steps since the last call, as an instance reports them.
    pub(crate) fn take_steps(&mut self) -> DecodeSteps {
        let StepSums { steps, took_ns, tokens, requests } = self.unreported;
        if steps < 1.0 {
            return DecodeSteps::default();
        }
        self.unreported = StepSums::default();
        let mean = |sum: f64| (sum / steps).round();
        let whole = steps.round();
        let (steps, took_ns) = (whole as u32, (took_ns / steps * whole) as u64);
        DecodeSteps { steps, took_ns, tokens: mean(tokens) as u64, requests: mean(requests) as u32 }
    }

    /// Advances the batch to `now_ns`; returns the finished requests.
    pub(crate) fn advance(&mut self, now_ns: u64, model: &DecodeModel) -> Vec<FinishedDecode> {
        let step_ns = self.step_ns(model);
        let steps = (now_ns - self.since_ns) as f64 / step_ns;
        if !self.batch.is_empty() {
            self.unreported.steps += steps;
            self.unreported.took_ns += steps * step_ns;
            self.unreported.tokens += steps * self.resident() as f64;
            self.unreported.requests += steps * self.batch.len() as f64;
        }
        self.since_ns = now_ns;
        for member in &mut self.batch {
            let tokens = steps.min(member.left);
            if tokens > 0.0 {
                member.steps.push((step_ns, tokens));
                member.left -= tokens;
                member.resident += tokens.round() as u64;
            }
        }
        let mut done = Vec::new();
        self.batch.retain(|member| {
            let over = member.left < 1e-6;
            if over {
                let (tbt_ns, decode_ns) = (longest_tenth(&member.steps), now_ns - member.start_ns);
                done.push(FinishedDecode { id: member.id, tbt_ns, decode_ns });
            }
            !over
        });
        done
    }

    pub(crate) fn join(&mut self, id: usize, tokens: u32, output: u32) {
        self.waiting.push_back((id, u64::from(tokens), output));
    }

    /// Admits waiting requests while there is room; returns the admitted ones.
    pub(crate) fn admit(&mut self, capacity: u64) -> Vec<usize> {
        let mut came = Vec::new();
        while let Some((id, tokens, output)) = self.waiting.front().copied() {
            let promised: f64 = self.batch.iter().map(|member| member.resident as f64 + member.left).sum();
            if !self.batch.is_empty() && promised as u64 + tokens + u64::from(output) > capacity {
                break;
            }
            self.waiting.pop_front();
            let left = f64::from(output.max(1));
            self.batch.push(Member { id, resident: tokens, left, start_ns: self.since_ns, steps: Vec::new() });
            came.push(id);
        }
        self.version += 1;
        came
    }

    /// Returns the time at which the next request finishes.
    pub(crate) fn next_ns(&self, model: &DecodeModel) -> Option<u64> {
        let least = self.batch.iter().map(|member| member.left).min_by(f64::total_cmp)?;
        Some(self.since_ns + (least * self.step_ns(model)).ceil() as u64)
    }
}

/// Returns the mean of the longest tenth of the times between tokens, the paper's criterion.
fn longest_tenth(steps: &[(f64, f64)]) -> f64 {
    let mut steps = steps.to_vec();
    steps.sort_by(|a, b| b.0.total_cmp(&a.0));
    let all: f64 = steps.iter().map(|step| step.1).sum();
    let mut wanted = (all / 10.0).max(1e-9);
    let (mut sum, mut count) = (0.0, 0.0);
    for (step_ns, tokens) in steps {
        let taken = tokens.min(wanted);
        sum += step_ns * taken;
        count += taken;
        wanted -= taken;
        if wanted <= 0.0 {
            break;
        }
    }
    if count > 0.0 { sum / count } else { 0.0 }
}
