//! Simulated decode instance: continuous batching, where the duration of a step follows from the batch.
//!
//! Between two changes of the batch all steps are assumed to be as long as the first one.

use std::collections::VecDeque;

use kvplane_conductor::cost::DecodeModel;

/// Request in the batch.
struct Member {
    id: usize,
    resident: u64,
    left: f64,
    /// Numbers of tokens and the time between them, in order.
    steps: Vec<(f64, f64)>,
}

#[derive(Default)]
pub(crate) struct Decode {
    batch: Vec<Member>,
    waiting: VecDeque<(usize, u64, u32)>,
    since_ns: u64,
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

    /// Advances the batch to `now_ns`; returns the finished requests, each with the mean of its longest tenth of times
    /// between tokens.
    pub(crate) fn advance(&mut self, now_ns: u64, model: &DecodeModel) -> Vec<(usize, f64)> {
        let step_ns = self.step_ns(model);
        let steps = (now_ns - self.since_ns) as f64 / step_ns;
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
                done.push((member.id, longest_tenth(&member.steps)));
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
            self.batch.push(Member { id, resident: tokens, left, steps: Vec::new() });
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
