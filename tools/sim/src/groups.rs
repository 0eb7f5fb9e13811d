//! Prefills by pipeline groups in a simulated cluster: every chunk at every stage is an event.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use kvplane_conductor::cost::pipeline::{Chunk, DEFAULT_LAYERS, PrefixLoad, Span, chunks, prefill_span};
use kvplane_conductor::policy::{GroupPlan, Placement};
use kvplane_conductor::scheduler::{InstanceCapabilities, PipelineMembership, Progress};

use crate::config::SimConfig;
use crate::events::Event;
use crate::world::{FetchedPrefix, Job, World};

/// Progress of one stage on a prompt.
struct StageRun {
    prefix: FetchedPrefix,
    /// Time at which its instance began, while it works on the prompt.
    since_ns: Option<u64>,
    computes: bool,
    /// Chunks that have arrived from the stage before, and chunks that it has computed.
    arrived: usize,
    done: usize,
}

/// Prompt that a pipeline group prefills.
struct GroupRun {
    plan: Arc<GroupPlan>,
    chunks: Vec<Chunk>,
    cached: u32,
    stages: Vec<StageRun>,
    /// Time at which the first stage began.
    began_ns: u64,
    /// Number of the run, so that events of an earlier one of the same request are recognized.
    number: u64,
}

/// Prompts that pipeline groups prefill, by request.
#[derive(Default)]
pub(crate) struct GroupRuns {
    runs: BTreeMap<usize, GroupRun>,
    last: u64,
}

/// Returns the capabilities of a simulated instance: the first ones form groups of consecutive instances.
pub(crate) fn capabilities(config: &SimConfig, instance: usize) -> InstanceCapabilities {
    let stage =
        config.groups.filter(|groups| instance / groups.stages < config.prefill / groups.stages).map(|groups| {
            PipelineMembership {
                group: format!("g{}", instance / groups.stages),
                stage: (instance % groups.stages) as u32,
                stages: groups.stages as u32,
                chunk_tokens: groups.chunk_tokens,
                activation_bytes: 0,
            }
        });
    InstanceCapabilities { layer_wise: config.layer_wise, layers: DEFAULT_LAYERS, stage }
}

/// Returns the part of the model's layers that so many are.
fn part_of(layers: u32) -> f64 {
    f64::from(layers) / f64::from(DEFAULT_LAYERS)
}

impl World<'_> {
    /// Begins the prefill of a placed request by a pipeline group.
    pub(crate) fn place_group(&mut self, id: usize, placement: &Placement, plan: &Arc<GroupPlan>) {
        let work = &self.trace[id];
        let last = plan.stages.len() - 1;
        let mut stages = Vec::new();
        let mut cached_blocks = work.blocks.len();
        for (at, stage) in plan.stages.iter().enumerate() {
            let part = if at == last { 1.0 } else { part_of(stage.layers) };
            let sources: Vec<usize> = (0..self.nodes.len()).filter(|other| *other != stage.instance).collect();
            let prefix = self.fetch(id, stage.instance, placement.reuse, &sources, part, stage.layers);
            cached_blocks = cached_blocks.min(prefix.blocks.end);
            stages.push(StageRun { prefix, since_ns: None, computes: false, arrived: 0, done: 0 });
        }
        let cached = (cached_blocks as u32 * self.config.block_tokens).min(placement.reuse);
        let factor = self.prefill_factor();
        let truth = &self.config.truth;
        let until_ns = |end| (truth.predict_ns(end, cached) as f64 * factor) as u64;
        let chunks = chunks(work.input_tokens, cached, plan.chunk_tokens, until_ns);
        stages[0].arrived = chunks.len();
        let began_ns = self.events.now_ns();
        self.runs.last += 1;
        let number = self.runs.last;
        for (stage, run) in stages.iter().enumerate() {
            let instance = plan.stages[stage].instance;
            self.await_prefix(id, instance, &run.prefix, 0);
            let job = Job { id, prefix: run.prefix.clone(), keep: false, found: None, stage: Some(stage) };
            self.nodes[instance].queue.push_back(job);
        }
        self.runs.runs.insert(id, GroupRun { plan: Arc::clone(plan), chunks, cached, stages, began_ns, number });
        plan.stages.iter().for_each(|stage| self.start(stage.instance));
    }

    /// Begins the work of an instance that is a stage.
    pub(crate) fn begin_stage(&mut self, id: usize, stage: usize) {
        let now_ns = self.events.now_ns();
        let Some(run) = self.runs.runs.get_mut(&id) else { return };
        run.stages[stage].since_ns = Some(now_ns);
        if stage == 0 {
            run.began_ns = now_ns;
            let _ = self.scheduler.update(id as u64, Progress::PrefillStarted, now_ns);
        }
        self.advance_stage(id, stage);
    }

    /// Lets a stage compute its next chunk, if that has arrived.
    fn advance_stage(&mut self, id: usize, stage: usize) {
        let now_ns = self.events.now_ns();
        let Some(run) = self.runs.runs.get_mut(&id) else { return };
        let (state, own_layers) = (&mut run.stages[stage], run.plan.stages[stage].layers);
        if state.since_ns.is_none() || state.computes || state.done >= state.arrived {
            return;
        }
        state.computes = true;
        let chunk = run.chunks[state.done];
        let computes_ns = (chunk.computes_ns as f64 * part_of(own_layers)) as u64;
        let load = if state.done == 0 { state.prefix.load() } else { PrefixLoad::default() };
        let overlap = self.config.layer_wise.then_some(own_layers);
        let Span { ends_ns, .. } = prefill_span(now_ns, load, computes_ns, overlap);
        let number = run.number;
        let is_last = state.done + 1 == run.chunks.len();
        self.events.at(ends_ns, Event::ChunkComputed { id, number, stage });
        if is_last {
            self.wake_before(ends_ns);
        }
    }

    /// Notes that a stage has computed a chunk, and passes it on.
    pub(crate) fn chunk_computed(&mut self, id: usize, number: u64, stage: usize) {
        let now_ns = self.events.now_ns();
        let Some(run) = self.runs.runs.get_mut(&id).filter(|run| run.number == number) else { return };
        let plan = run.plan.stages[stage];
        if !self.nodes[plan.instance].alive {
            return;
        }
        let state = &mut run.stages[stage];
        state.computes = false;
        let chunk = run.chunks[state.done];
        state.done += 1;
        let is_done = state.done == run.chunks.len();
        let since_ns = state.since_ns.unwrap_or(now_ns);
        let (is_last, chunk_tokens) = (stage + 1 == run.stages.len(), run.plan.chunk_tokens);
        if !is_last {
            let sends_ns = (plan.sends_ns as f64 * f64::from(chunk.tokens) / f64::from(chunk_tokens)) as u64;
            let arrives_ns = self.nodes[plan.instance].send(sends_ns, now_ns);
            self.events.at(arrives_ns, Event::ChunkArrived { id, number, stage: stage + 1 });
        }
        if !is_done {
            self.advance_stage(id, stage);
            return;
        }
        let node = &mut self.nodes[plan.instance];
        node.working = None;
        node.computed_ns += now_ns - since_ns;
        self.progress[id].outcome.prefill_ns += now_ns - since_ns;
        if is_last && let Some(run) = self.runs.runs.remove(&id) {
            let skip: Range<usize> = run.stages[stage].prefix.blocks.clone();
            self.progress[id].outcome.stages = run.stages.len() as u32;
            self.finish_prefill(id, plan.instance, run.cached, now_ns - run.began_ns, &skip);
        }
        self.start(plan.instance);
    }

    /// Notes that a chunk has arrived at a stage.
    pub(crate) fn chunk_arrived(&mut self, id: usize, number: u64, stage: usize) {
        if let Some(run) = self.runs.runs.get_mut(&id).filter(|run| run.number == number) {
            run.stages[stage].arrived += 1;
            self.advance_stage(id, stage);
        }
    }

    /// Ends the prefills of the groups that a lost instance was in; the other members are free again.
    pub(crate) fn lose_groups(&mut self, instance: usize) {
        let is_in = |run: &GroupRun| run.plan.stages.iter().any(|stage| stage.instance == instance);
        let lost: Vec<usize> = self.runs.runs.iter().filter(|(_, run)| is_in(run)).map(|(id, _)| *id).collect();
        for id in lost {
            let Some(run) = self.runs.runs.remove(&id) else { continue };
            for stage in &run.plan.stages {
                let node = &mut self.nodes[stage.instance];
                node.queue.retain(|job| job.id != id);
                node.working.take_if(|working| working.0 == id);
            }
            run.plan.stages.iter().for_each(|stage| self.start(stage.instance));
        }
    }
}
