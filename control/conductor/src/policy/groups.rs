//! Pipeline groups from the perspective of a policy: plans of a prefill by a group, and what a placement costs the
//! other requests.

use std::sync::Arc;

use super::{Ask, Fetch, Placement, View};
use crate::cost::pipeline::{PrefixLoad, Stage, chunks, pipeline};

/// Pipeline group with all of its members.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupView {
    /// Name of the group.
    pub name: Arc<str>,
    /// Prefill instances in the order of their stages.
    pub members: Vec<usize>,
    /// Maximum length of a chunk, in tokens.
    pub chunk_tokens: u32,
    /// Layers of the model.
    pub layers: u32,
    /// Bytes of activations for each token that a stage passes on, beside KV cache.
    pub activation_bytes: u32,
}

/// Work of one stage of a pipeline group on a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagePlan {
    /// Prefill instance.
    pub instance: usize,
    /// First layer that it computes, from 0.
    pub first_layer: u32,
    /// Number of layers that it computes.
    pub layers: u32,
    /// Tokens of the reused prefix that it fetches: the KV cache of its layers; of all layers at the last stage.
    pub load_tokens: u32,
    /// Predicted time until its instance is free, in nanoseconds.
    pub wait_ns: u64,
    /// Predicted time from then until its last chunk is computed, in nanoseconds.
    pub busy_ns: u64,
    /// Predicted duration of the transfer of a chunk to the next stage, in nanoseconds; 0 for the last stage.
    pub sends_ns: u64,
}

/// Prefill of a prompt by a pipeline group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupPlan {
    /// Name of the group.
    pub name: Arc<str>,
    /// Maximum length of a chunk, in tokens.
    pub chunk_tokens: u32,
    /// Stages in order; the last one has the KV cache of the whole prompt at the end.
    pub stages: Vec<StagePlan>,
}

impl GroupPlan {
    /// Returns the bytes of the prefix that the stages fetch, without the last one, whose blocks are whole.
    #[must_use]
    pub fn loads_bytes(&self, token_bytes: u64) -> u64 {
        let layers: u32 = self.stages.iter().map(|stage| stage.layers).sum();
        let before_last = self.stages.iter().take(self.stages.len().saturating_sub(1));
        let bytes = |stage: &StagePlan| u64::from(stage.load_tokens) * token_bytes * u64::from(stage.layers);
        before_last.map(|stage| bytes(stage) / u64::from(layers.max(1))).sum()
    }

    /// Returns the time that all members spend together, in nanoseconds.
    #[must_use]
    pub fn work_ns(&self) -> u64 {
        self.stages.iter().fold(0, |sum_ns: u64, stage| sum_ns.saturating_add(stage.busy_ns))
    }
}

/// Requests that arrive at a pool, as far as is known from the last minute.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct OfferedLoad {
    /// Arrivals a second.
    pub per_s: f64,
    /// Mean duration of their prefills, in seconds.
    pub mean_s: f64,
}

impl OfferedLoad {
    /// Returns the sum of the times, in seconds, that requests which arrive from now on wait longer because `taken` of
    /// `servers` instances are busy for `for_s` seconds.
    ///
    /// The greatest of three estimates: work accumulates that the other instances cannot do meanwhile, and is done
    /// afterwards (a fluid model); and requests wait longer in a queue with fewer servers (Sakasegawa's approximation
    /// for M/M/c), but no longer than the backlog of a random walk lasts that began when the instances were taken; and,
    /// where all instances are busy, the work stays in their backlog until capacity to spare has done it.
    #[must_use]
    pub fn delay_s(&self, servers: usize, taken: usize, for_s: f64) -> f64 {
        let offered = self.per_s * self.mean_s;
        let (all, left) = (servers as f64, servers.saturating_sub(taken) as f64);
        if offered <= 0.0 || taken == 0 {
            return 0.0;
        }
        let backlog_s = (offered - left).max(0.0) * for_s;
        let spare = self.spare(servers);
        let fluid_s = (backlog_s * for_s + backlog_s * backlog_s / spare) / 2.0 / self.mean_s;
        let wait_s = |count: f64| {
            let busy = offered / count;
            if busy >= 1.0 {
                return f64::INFINITY;
            }
            self.mean_s * busy.powf((2.0 * (count + 1.0)).sqrt() - 1.0) / (count * (1.0 - busy))
        };
        let arrivals = self.per_s * for_s;
        let walk_s = self.mean_s * arrivals.sqrt() / left.max(1.0) / 2.0;
        let longer_s = if offered >= all { walk_s } else { (wait_s(left) - wait_s(all)).clamp(0.0, walk_s) };
        let work_s = taken as f64 * for_s;
        let all_busy = (offered / all).min(1.0).powf((2.0 * (all + 1.0)).sqrt() - 1.0);
        let stays_s = all_busy * self.per_s * work_s * work_s / (2.0 * all * spare);
        fluid_s.max(arrivals * longer_s).max(stays_s)
    }

    /// Returns the number of instances that the offered load leaves idle. A pool that is overloaded never catches up:
    /// at least a twentieth keeps what follows from it finite.
    fn spare(&self, servers: usize) -> f64 {
        (servers as f64 - self.per_s * self.mean_s).max(servers as f64 * 0.05)
    }
}

impl View<'_> {
    /// Returns the placement of a request on a pipeline group that reuses `reuse` tokens; `None` if the group cannot
    /// serve it, or if it has only one chunk.
    #[must_use]
    pub fn by_group(&self, ask: &Ask, group: &GroupView, reuse: u32) -> Option<Placement> {
        let until_ns = |end| self.model.predict_ns(end, reuse);
        let chunks = chunks(ask.tokens, reuse, group.chunk_tokens, until_ns);
        let longest = *chunks.first().filter(|_| chunks.len() > 1)?;
        let count = group.members.len() as u32;
        let (mut stages, mut plans) = (Vec::new(), Vec::new());
        let mut first_layer = 0;
        for (at, instance) in group.members.iter().enumerate() {
            let view = self.prefill.get(*instance)?;
            let is_last = at + 1 == group.members.len();
            // The first stages compute one layer more, if they cannot be divided evenly.
            let layers = group.layers / count + u32::from((at as u32) < group.layers % count);
            let load_tokens = reuse.saturating_sub(view.held);
            let part = if is_last { 1.0 } else { f64::from(layers) / f64::from(group.layers) };
            let moves_ns = (self.move_ns(load_tokens) as f64 * part) as u64;
            let queued_ns = if load_tokens == 0 { 0 } else { self.busiest_ns };
            let passed = f64::from(first_layer + layers) / f64::from(group.layers);
            let token_bytes = self.token_bytes as f64 * passed + f64::from(group.activation_bytes);
            let token_sends_ns = if is_last { 0.0 } else { token_bytes * 1e9 / self.nic_bytes_s.max(1) as f64 };
            let stage = Stage {
                free_ns: view.wait_ns,
                load: PrefixLoad { queued_ns, moves_ns },
                layers,
                factor: view.factor,
                layer_wise: view.layer_wise.is_some(),
                token_sends_ns,
            };
            plans.push(StagePlan {
                instance: *instance,
                first_layer,
                layers,
                load_tokens,
                wait_ns: view.wait_ns,
                busy_ns: 0,
                sends_ns: stage.sends_ns(longest),
            });
            stages.push(stage);
            first_layer += layers;
        }
        let spans = pipeline(&stages, &chunks);
        for (plan, span) in plans.iter_mut().zip(&spans) {
            plan.busy_ns = span.ends_ns.saturating_sub(plan.wait_ns);
        }
        let (first, last) = (spans.first()?, spans.last()?);
        let fetches = plans.iter().any(|plan| plan.load_tokens > 0);
        Some(Placement {
            prefill: *group.members.last()?,
            decode: self.fastest_decode.map(|(decode, _)| decode),
            reuse,
            fetch: if fetches { Fetch::Pool { keep: false } } else { Fetch::Nothing },
            wait_ns: first.begins_ns,
            prefill_ns: last.ends_ns.saturating_sub(first.begins_ns),
            group: Some(Arc::new(GroupPlan {
                name: Arc::clone(&group.name),
                chunk_tokens: group.chunk_tokens,
                stages: plans,
            })),
        })
    }

    /// Returns what a placement costs all requests together, in nanoseconds: its own time to the first token, and, with
    /// the weight `others`, the waits that later requests have because its instances are busy.
    #[must_use]
    pub fn total_cost_ns(&self, placement: &Placement, others: f64) -> u64 {
        let servers = self.alive().count().max(1);
        let work_ns = placement.work_ns() as f64;
        let taken = placement.group.as_ref().map_or(1, |plan| plan.stages.len());
        let later_s = self.offered.delay_s(servers, taken, work_ns / taken as f64 / 1e9);
        placement.takes_ns().saturating_add((later_s * 1e9 * others) as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_requests_are_delayed_by_instances_that_are_taken() {
        let load = |per_s| OfferedLoad { per_s, mean_s: 2.0 };
        assert!(load(0.0).delay_s(8, 8, 5.0).abs() < 1e-9);
        // All eight are taken for 5 s: the arrivals of this time wait half of it, and what has accumulated is done by
        // the part of the instances that later arrivals leave.
        let (per_s, offered) = (1.0, 2.0);
        let wanted = per_s * 25.0 / 2.0 * (1.0 + offered / (8.0 - offered));
        assert!((load(per_s).delay_s(8, 8, 5.0) - wanted).abs() < 1e-9);
        // Few are taken: the others have room.
        let delays: Vec<f64> = (0..=8).map(|taken| load(per_s).delay_s(8, taken, 5.0)).collect();
        assert!(delays.is_sorted() && delays[0] == 0.0 && delays[4] < 1.2, "{delays:?}");
        let loads: Vec<f64> = (0..60).map(|tenths| load(f64::from(tenths) / 10.0).delay_s(8, 4, 5.0)).collect();
        assert!(loads.is_sorted() && loads.iter().all(|delay| delay.is_finite()), "{loads:?}");
    }
}
