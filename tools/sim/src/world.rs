//! Simulated cluster: its state, and the effect of each event.

use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use kvplane_conductor::cost::pipeline::{DEFAULT_LAYERS, PrefixLoad, prefill_span};
use kvplane_conductor::cost::transfer_ns;
use kvplane_conductor::index::{ContextId, IndexConfig, PromptContext, Tier};
use kvplane_conductor::policy::{Choice, Fetch, Placement, Policy};
use kvplane_conductor::scheduler::{
    ExcludedInstances, Foreign, InstanceNumbers, Next, Progress, Request, RequestOutput, Scheduler, SchedulerConfig,
    Scratch, ServiceTerms,
};
use kvplane_proto::rng::{Rng, mix64};

use crate::cache::Cache;
use crate::config::{DETECTED_NS, SimConfig, Work};
use crate::copies::{CopyTraffic, LOOK_NS};
use crate::decode::{Decode, FinishedDecode};
use crate::events::{Event, EventQueue};
use crate::groups::{GroupRuns, capabilities};
use crate::outcome::{Outcome, ReplicaSample, RequestOutcome, RequestStatus};

/// Time before the end of a prefill at which its instance accepts the next request, as of the policy `kvplane`.
const AHEAD_NS: u64 = 60_000_000;
/// Interval between two samples of the load.
const SAMPLE_NS: u64 = 10_000_000_000;
/// Interval between two load reports of a decode instance.
const REPORT_NS: u64 = 1_000_000_000;
/// Interval between two samples of replicas.
const REPLICAS_NS: u64 = 30_000_000_000;

/// Fetch of a prefix.
#[derive(Clone)]
pub(crate) struct FetchedPrefix {
    /// Range of the prompt's blocks that are fetched.
    pub(crate) blocks: Range<usize>,
    /// Time at which a prefill can begin: the first layer has arrived, or all have without layer-wise overlap.
    first_ns: u64,
    /// Time at which all blocks have arrived.
    ready_ns: u64,
    /// Duration of the transfer, without waiting.
    moves_ns: u64,
}

impl FetchedPrefix {
    /// Returns the prefix of a prompt of which nothing is fetched.
    const fn nothing(now_ns: u64) -> Self {
        Self { blocks: 0..0, first_ns: now_ns, ready_ns: now_ns, moves_ns: 0 }
    }

    /// Returns the transfer, with times since the start of the simulation.
    pub(crate) const fn load(&self) -> PrefixLoad {
        PrefixLoad { queued_ns: self.ready_ns.saturating_sub(self.moves_ns), moves_ns: self.moves_ns }
    }
}

pub(crate) struct Job {
    pub(crate) id: usize,
    pub(crate) prefix: FetchedPrefix,
    /// True if fetched blocks are kept.
    pub(crate) keep: bool,
    /// Number of blocks that it reuses, if that was determined at its placement.
    pub(crate) found: Option<usize>,
    /// Stage of a pipeline group that it is, if it is one.
    pub(crate) stage: Option<usize>,
}

pub(crate) struct Node {
    pub(crate) alive: bool,
    pub(crate) cache: Cache,
    pub(crate) queue: VecDeque<Job>,
    /// Request in progress: number, cached tokens, duration.
    pub(crate) working: Option<(usize, u32, u64)>,
    /// Blocks of the request in progress that were fetched and are not kept.
    skip: Range<usize>,
    pub(crate) egress_until_ns: u64,
    /// Time for which its NIC was busy with sending.
    sent_ns: u64,
    pub(crate) computed_ns: u64,
}

impl Node {
    /// Sends bytes that occupy its NIC for `took_ns`; returns the time at which they have arrived.
    pub(crate) fn send(&mut self, took_ns: u64, now_ns: u64) -> u64 {
        self.egress_until_ns = self.egress_until_ns.max(now_ns) + took_ns;
        self.sent_ns += took_ns;
        self.egress_until_ns
    }

    /// Returns the length of the prefix of a prompt that it has or fetched.
    fn found(&self, work: &Work, fetched: &Range<usize>) -> usize {
        let known = |(at, block): &(usize, &u64)| fetched.contains(at) || self.cache.has(**block);
        work.blocks.iter().enumerate().take_while(known).count()
    }
}

/// Progress of a request of the trace.
#[derive(Clone)]
pub(crate) struct RequestProgress {
    pub(crate) outcome: RequestOutcome,
    /// Its last placement.
    placement: Option<Placement>,
    /// End of its wait, while it is queued.
    waits_until_ns: Option<u64>,
}

/// Simulated cluster on which the scheduler under test serves a trace.
pub(crate) struct World<'a> {
    pub(crate) config: &'a SimConfig,
    pub(crate) trace: &'a [Work],
    pub(crate) scheduler: Scheduler,
    scratch: Scratch,
    pub(crate) context: ContextId,
    pub(crate) nodes: Vec<Node>,
    decodes: Vec<Decode>,
    pub(crate) events: EventQueue,
    pub(crate) progress: Vec<RequestProgress>,
    pub(crate) runs: GroupRuns,
    pub(crate) open: usize,
    rng: Rng,
    pub(crate) outcome: Outcome,
    uses: BTreeMap<u64, u64>,
    pub(crate) copied: Option<CopyTraffic>,
}

/// Serves `trace`, which is in the order of arrival, on a cluster that `policy` schedules.
#[must_use]
pub fn run(trace: &[Work], config: &SimConfig, policy: Box<dyn Policy>) -> Outcome {
    let mut world = World::new(trace, config, policy);
    while let Some(event) = world.events.pop() {
        world.handle(event);
        world.assign();
    }
    world.finish()
}

/// Returns the settings of the scheduler for a trace.
fn books(trace: &[Work], config: &SimConfig) -> SchedulerConfig {
    let blocks: usize = trace.iter().map(|work| work.blocks.len()).sum();
    let index = IndexConfig { max_blocks: blocks.max(1024), max_holders: 64, ..IndexConfig::default() };
    SchedulerConfig {
        index,
        block_tokens: config.block_tokens,
        token_bytes: config.token_bytes,
        nic_bytes_s: config.nic_bytes_s,
        slo: config.slo,
        decode_model: config.decode_constants,
        learns: config.learns,
        hands_over: config.hands_over,
        keeps_fetched: !config.pass_through,
        ..SchedulerConfig::default()
    }
}

impl<'a> World<'a> {
    fn new(trace: &'a [Work], config: &'a SimConfig, policy: Box<dyn Policy>) -> Self {
        let valid = "the limits follow from the trace";
        let mut scheduler = Scheduler::new(books(trace, config), policy).expect(valid);
        let key = PromptContext { tenant: "sim".into(), block_tokens: config.block_tokens, ..PromptContext::default() };
        let context = scheduler.context(&key).expect(valid);
        for instance in 0..config.prefill {
            let at = scheduler.add_prefill().expect(valid);
            capabilities(config, instance).install(&mut scheduler, at).expect(valid);
        }
        for _ in 0..config.decode {
            scheduler.add_decode(config.decode_tokens, None);
        }
        let node = |_| Node {
            alive: true,
            cache: Cache::new(config),
            queue: VecDeque::new(),
            working: None,
            skip: 0..0,
            egress_until_ns: 0,
            sent_ns: 0,
            computed_ns: 0,
        };
        let lost = |work: &Work| RequestOutcome {
            status: RequestStatus::Lost,
            ttft_ns: 0,
            tbt_ns: 0,
            reused_tokens: 0,
            tokens: work.input_tokens,
            prefill_ns: 0,
            transfer_ns: 0,
            predicted_ns: 0,
            stages: 1,
        };
        let begun = |work| RequestProgress { outcome: lost(work), placement: None, waits_until_ns: None };
        let mut world = Self {
            config,
            trace,
            scheduler,
            scratch: Scratch::default(),
            context,
            nodes: (0..config.prefill).map(node).collect(),
            decodes: (0..config.decode).map(|_| Decode::default()).collect(),
            events: EventQueue::default(),
            progress: trace.iter().map(begun).collect(),
            runs: GroupRuns::default(),
            open: trace.len(),
            rng: Rng::new(config.seed, "sim"),
            outcome: Outcome::default(),
            uses: BTreeMap::new(),
            copied: config.copies.map(CopyTraffic::new),
        };
        for id in 0..trace.len() {
            world.events.at(world.arrival_ns(id), Event::Arrived { id });
        }
        world.events.at(SAMPLE_NS, Event::Sample);
        if config.decode > 0 {
            world.events.at(REPORT_NS, Event::Report);
        }
        if config.replicas {
            world.events.at(REPLICAS_NS, Event::Replicas);
        }
        if config.copies.is_some() {
            world.events.at(LOOK_NS, Event::Copies);
        }
        if let Some(death_ns) = config.faults.death_ns {
            world.events.at(death_ns, Event::Died { instance: 0 });
        }
        world
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Heard { instance, stored, removed } => {
                // An instance that was lost in the meantime is unknown.
                let _ = self.scheduler.removed(instance, self.context, Tier::Dram, &removed);
                let _ = self.scheduler.stored(instance, self.context, Tier::Dram, None, &stored);
            }
            Event::Arrived { id } => self.arrived(id),
            Event::Fetched { id, instance, blocks } => {
                if self.nodes[instance].alive {
                    self.nodes[instance].cache.put(&self.trace[id], blocks, &(0..0));
                    self.tell(instance);
                    self.start(instance);
                }
            }
            Event::FirstLayer { instance } => self.start(instance),
            Event::ChunkComputed { id, number, stage } => self.chunk_computed(id, number, stage),
            Event::ChunkArrived { id, number, stage } => self.chunk_arrived(id, number, stage),
            Event::Prefilled { id, instance } => self.prefilled(id, instance),
            Event::Decoded { instance, version } => {
                if self.decodes[instance].version == version {
                    self.decoded(instance);
                }
            }
            Event::HandedOver { id, instance } => self.join(id, instance),
            Event::Report => self.report(),
            Event::Died { instance } => {
                let node = &mut self.nodes[instance];
                node.alive = false;
                node.queue.clear();
                node.working = None;
                self.events.at(self.events.now_ns() + DETECTED_NS, Event::Detected { instance });
            }
            Event::Detected { instance } => {
                self.lose_groups(instance);
                let lost = self.scheduler.lose_prefill(instance).unwrap_or_default();
                lost.into_iter().for_each(|request| self.offer(request));
            }
            Event::Sample => self.sample(),
            Event::Replicas => self.replicas(),
            Event::Wake => {}
            Event::Waited { id } => self.end_wait(id),
            Event::Copies => self.replicate_hot(),
            Event::Copied { instance, key, chain } => self.copy_came(instance, key, &chain),
        }
    }

    fn arrived(&mut self, id: usize) {
        let work = &self.trace[id];
        if self.config.replicas {
            work.blocks.iter().for_each(|block| *self.uses.entry(*block).or_default() += 1);
        }
        let hashes: Arc<[u64]> = Arc::clone(&work.blocks);
        let (arrival_ns, tokens) = (self.events.now_ns(), work.input_tokens);
        self.offer(Request {
            id: id as u64,
            arrival_ns,
            tokens,
            context: self.context,
            hashes,
            barred: ExcludedInstances::default(),
            terms: ServiceTerms { groups: self.config.groups.is_some(), ..work.terms.clone() },
            admitted: false,
        });
    }

    fn offer(&mut self, request: Request) {
        let id = request.id as usize;
        let choice = self.scheduler.schedule(&request, self.events.now_ns(), &mut self.scratch);
        let booked = self.scheduler.commit(request, &choice, self.events.now_ns());
        match choice {
            Choice::Place(placement) if booked.is_ok() => self.place(id, &placement),
            Choice::Wait if booked.is_ok() => {
                let until_ns = self.events.now_ns().saturating_add(self.config.wait_ns);
                self.progress[id].waits_until_ns = Some(until_ns);
                self.events.at(until_ns, Event::Waited { id });
            }
            _ => self.end(id, RequestStatus::Refused),
        }
    }

    /// Ends a request that has waited for the maximum time since it was queued last.
    fn end_wait(&mut self, id: usize) {
        if self.progress[id].waits_until_ns.is_some_and(|until_ns| until_ns <= self.events.now_ns()) {
            let arrival_ns = self.arrival_ns(id);
            self.progress[id].outcome.ttft_ns = self.events.now_ns() - arrival_ns;
            self.end(id, RequestStatus::Waited);
        }
    }

    /// Returns the time at which a request of the trace arrives.
    fn arrival_ns(&self, id: usize) -> u64 {
        (self.trace[id].arrival_ns as f64 / self.config.load) as u64
    }

    /// Places the queued requests that the scheduler lets start.
    fn assign(&mut self) {
        while let Ok(Some(next)) = self.scheduler.poll(self.events.now_ns(), &mut self.scratch) {
            match next {
                Next::Goes { id, placement } => self.place(id as usize, &placement),
                Next::Refused { id, .. } => self.end(id as usize, RequestStatus::Refused),
            }
        }
    }

    fn place(&mut self, id: usize, placement: &Placement) {
        let progress = &mut self.progress[id];
        (progress.placement, progress.waits_until_ns) = (Some(placement.clone()), None);
        self.progress[id].outcome.predicted_ns = self.events.now_ns() + placement.takes_ns() - self.arrival_ns(id);
        if let Some(plan) = &placement.group {
            self.place_group(id, placement, plan);
            return;
        }
        let (at, layers) = (placement.prefill, DEFAULT_LAYERS);
        let (prefix, keep) = match placement.fetch {
            Fetch::Nothing => (FetchedPrefix::nothing(self.events.now_ns()), true),
            Fetch::One(source) => (self.fetch(id, at, placement.reuse, &[source], 1.0, layers), true),
            Fetch::Pool { keep } => {
                let all: Vec<usize> = (0..self.nodes.len()).filter(|other| *other != at).collect();
                let prefix = self.fetch(id, at, placement.reuse, &all, 1.0, layers);
                (prefix, keep && !self.config.pass_through)
            }
        };
        self.await_prefix(id, at, &prefix, if keep { prefix.blocks.end } else { 0 });
        let found = self.config.at_once.then(|| self.have_at_once(id, at, &prefix.blocks));
        self.nodes[at].queue.push_back(Job { id, prefix, keep, found, stage: None });
        self.start(at);
    }

    /// Notes the fetch of a prefix, of which an instance keeps the first `blocks` of the prompt.
    pub(crate) fn await_prefix(&mut self, id: usize, instance: usize, prefix: &FetchedPrefix, blocks: usize) {
        if prefix.blocks.is_empty() {
            return;
        }
        let transfer_ns = prefix.ready_ns - self.events.now_ns();
        self.progress[id].outcome.transfer_ns = self.progress[id].outcome.transfer_ns.max(transfer_ns);
        self.note_fetch(id, prefix.blocks.end);
        self.events.at(prefix.ready_ns, Event::Fetched { id, instance, blocks });
        if prefix.first_ns < prefix.ready_ns {
            self.events.at(prefix.first_ns, Event::FirstLayer { instance });
        }
    }

    /// Makes an instance hold all blocks of a prompt from now on; returns the number of its blocks that it had or
    /// fetched.
    fn have_at_once(&mut self, id: usize, at: usize, fetched: &Range<usize>) -> usize {
        let (node, work) = (&mut self.nodes[at], &self.trace[id]);
        let found = node.found(work, fetched);
        node.cache.touch(work, found);
        node.cache.put(work, work.blocks.len(), &(0..0));
        self.tell(at);
        found
    }

    /// Moves the blocks that `at` lacks of the first `tokens` of a prompt from `sources`, each block from one that has
    /// it; `part` of each block, which has so many layers. Returns the blocks that the prompt then has.
    pub(crate) fn fetch(
        &mut self,
        id: usize,
        at: usize,
        tokens: u32,
        sources: &[usize],
        part: f64,
        layers: u32,
    ) -> FetchedPrefix {
        let work = &self.trace[id];
        let wanted = (tokens.div_ceil(self.config.block_tokens) as usize).min(work.blocks.len());
        let here = self.nodes[at].cache.prefix(&work.blocks[..wanted]);
        let block_bytes = u64::from(self.config.block_tokens) * self.config.token_bytes;
        let block_ns = (transfer_ns(block_bytes, self.config.nic_bytes_s) as f64 * part) as u64;
        let (mut end, mut last, mut ready_ns, mut moved) = (here, None, self.events.now_ns(), 0);
        for block in &work.blocks[here..wanted] {
            let has = |source: &usize| self.nodes[*source].alive && self.nodes[*source].cache.has(*block);
            if !self.nodes[at].cache.has(*block) {
                let least = || sources.iter().copied().filter(has).min_by_key(|at| self.nodes[*at].egress_until_ns);
                let Some(source) = last.filter(has).or_else(least) else { break };
                last = Some(source);
                let node = &mut self.nodes[source];
                node.cache.touch_block(*block);
                ready_ns = ready_ns.max(node.send(block_ns, self.events.now_ns()));
                moved += 1;
            }
            end += 1;
        }
        // Blocks from several sources still arrive through one NIC.
        let moves_ns = moved * block_ns;
        let ready_ns = ready_ns.max(self.events.now_ns() + moves_ns);
        let load = PrefixLoad { queued_ns: ready_ns - moves_ns, moves_ns };
        let first_ns = load.ready_ns(self.config.layer_wise.then_some(layers));
        FetchedPrefix { blocks: here..end, first_ns, ready_ns, moves_ns }
    }

    /// Returns the ratio of the next prefill's duration to the model's.
    pub(crate) fn prefill_factor(&mut self) -> f64 {
        let prefill_error = 1.0 + self.config.faults.prefill_error;
        if prefill_error > 1.0 { prefill_error.powf(2.0 * self.rng.unit() - 1.0) } else { 1.0 }
    }

    /// Starts the next prefill of an instance if possible.
    pub(crate) fn start(&mut self, instance: usize) {
        let node = &mut self.nodes[instance];
        let Some(job) = node.queue.front() else { return };
        if !node.alive || node.working.is_some() || job.prefix.first_ns > self.events.now_ns() {
            return;
        }
        let id = job.id;
        let Some(Job { prefix, keep, found, stage, .. }) = node.queue.pop_front() else { return };
        if let Some(stage) = stage {
            node.working = Some((id, 0, 0));
            self.begin_stage(id, stage);
            return;
        }
        let work = &self.trace[id];
        let load = prefix.load();
        let found = found.unwrap_or_else(|| node.found(work, &prefix.blocks));
        node.cache.touch(work, found);
        node.skip = if keep { 0..0 } else { prefix.blocks };
        let cached = (found as u32 * self.config.block_tokens).min(work.input_tokens);
        let factor = self.prefill_factor();
        let computes_ns = (self.config.truth.predict_ns(work.input_tokens, cached) as f64 * factor) as u64;
        let overlap = self.config.layer_wise.then_some(DEFAULT_LAYERS);
        let now_ns = self.events.now_ns();
        let took_ns = prefill_span(now_ns, load, computes_ns, overlap).ends_ns - now_ns;
        let node = &mut self.nodes[instance];
        node.working = Some((id, cached, took_ns));
        node.computed_ns += took_ns;
        let _ = self.scheduler.update(id as u64, Progress::PrefillStarted, now_ns);
        self.events.at(now_ns + took_ns, Event::Prefilled { id, instance });
        self.wake_before(now_ns + took_ns);
    }

    /// Lets queued requests be offered again shortly before an instance is free: it accepts the next one then.
    pub(crate) fn wake_before(&mut self, free_ns: u64) {
        self.events.at(free_ns.saturating_sub(AHEAD_NS).max(self.events.now_ns()), Event::Wake);
    }

    fn prefilled(&mut self, id: usize, instance: usize) {
        let Some((_, reused, took_ns)) = self.nodes[instance].working.take_if(|working| working.0 == id) else {
            return;
        };
        let skip = std::mem::take(&mut self.nodes[instance].skip);
        self.progress[id].outcome.prefill_ns += took_ns;
        self.finish_prefill(id, instance, reused, took_ns, &skip);
        self.start(instance);
    }

    /// Ends the prefill of a request on an instance, which then holds its blocks without those in `skip`.
    pub(crate) fn finish_prefill(&mut self, id: usize, at: usize, reused: u32, took_ns: u64, skip: &Range<usize>) {
        let (work, arrival_ns) = (&self.trace[id], self.arrival_ns(id));
        self.nodes[at].cache.put(work, work.blocks.len(), skip);
        let served = &mut self.progress[id].outcome;
        served.reused_tokens = reused;
        served.ttft_ns = self.events.now_ns() - arrival_ns;
        self.tell(at);
        let _ = self.scheduler.update(id as u64, Progress::PrefillDone { reused, took_ns }, self.events.now_ns());
        let decode = self.progress[id].placement.as_ref().and_then(|placement| placement.decode);
        match decode {
            _ if self.decodes.is_empty() => self.end(id, RequestStatus::Served),
            Some(decode) if self.scheduler.takes_decode(id as u64, self.events.now_ns()) => {
                self.hand_over(id, at, decode);
            }
            _ => self.end(id, RequestStatus::RefusedLate),
        }
    }

    /// Sends the KV cache of a prompt from its prefill instance to its decode instance, if that takes time.
    fn hand_over(&mut self, id: usize, instance: usize, decode: usize) {
        if !self.config.hands_over {
            return self.join(id, decode);
        }
        let bytes = u64::from(self.trace[id].input_tokens) * self.config.token_bytes;
        let took_ns = transfer_ns(bytes, self.config.nic_bytes_s);
        let there_ns = self.nodes[instance].send(took_ns, self.events.now_ns());
        self.events.at(there_ns, Event::HandedOver { id, instance: decode });
    }

    /// Lets a request whose KV cache is there decode.
    fn join(&mut self, id: usize, instance: usize) {
        let work = &self.trace[id];
        self.decodes[instance].join(id, work.input_tokens, work.output_tokens);
        self.decoded(instance);
    }

    /// Advances a decode instance to the present time and admits waiting requests.
    fn decoded(&mut self, instance: usize) {
        let model = self.config.decode_model;
        for FinishedDecode { id, tbt_ns, decode_ns } in self.decodes[instance].advance(self.events.now_ns(), &model) {
            self.progress[id].outcome.tbt_ns = tbt_ns as u64;
            let output = RequestOutput { tokens: self.trace[id].output_tokens, decode_ns };
            self.end_with(id, RequestStatus::Served, Some(output));
        }
        for id in self.decodes[instance].admit(self.config.decode_tokens) {
            let _ = self.scheduler.update(id as u64, Progress::Decoding, self.events.now_ns());
        }
        if let Some(next_ns) = self.decodes[instance].next_ns(&model) {
            let version = self.decodes[instance].version;
            self.events.at(next_ns.max(self.events.now_ns() + 1), Event::Decoded { instance, version });
        }
    }

    /// Reports the load of all decode instances.
    fn report(&mut self) {
        for instance in 0..self.decodes.len() {
            self.decoded(instance);
            let decode = &mut self.decodes[instance];
            let (decode_tokens, decodes) = (decode.resident(), decode.requests());
            let load = Foreign { queued_tokens: 0, decode_tokens, decodes, steps: decode.take_steps() };
            let of = InstanceNumbers { prefill: None, decode: Some(instance) };
            // Decode instances do not die.
            let _ = self.scheduler.report_load(of, load);
        }
        if self.open > 0 {
            self.events.at(self.events.now_ns() + REPORT_NS, Event::Report);
        }
    }

    fn end(&mut self, id: usize, status: RequestStatus) {
        self.end_with(id, status, None);
    }

    /// Ends a request, of whose output the scheduler learns.
    fn end_with(&mut self, id: usize, status: RequestStatus, output: Option<RequestOutput>) {
        self.progress[id].outcome.status = status;
        self.progress[id].waits_until_ns = None;
        self.open -= 1;
        // A rejected request was never booked.
        let _ = self.scheduler.release(id as u64, output, self.events.now_ns());
    }

    /// Sends the changes of a cache to the Conductor.
    pub(crate) fn tell(&mut self, instance: usize) {
        let (stored, removed) = self.nodes[instance].cache.changes();
        let lost = self.config.faults.lost;
        if stored.is_empty() && removed.is_empty() || lost > 0.0 && self.rng.chance(lost) {
            return;
        }
        self.events.at(self.events.now_ns() + self.config.faults.stale_ns, Event::Heard { instance, stored, removed });
    }

    fn sample(&mut self) {
        let load: f64 = self.nodes.iter().map(|node| self.backlog_s(node)).sum();
        let alive = self.nodes.iter().filter(|node| node.alive).count().max(1);
        self.outcome.prefill_load.push(load / alive as f64);
        self.outcome.outputs.extend(self.scheduler.decodes().output_errors());
        self.outcome.decode_errors.push(self.scheduler.decodes().learned().error());
        if self.open > 0 && !self.events.is_empty() {
            self.events.at(self.events.now_ns() + SAMPLE_NS, Event::Sample);
        }
    }

    fn backlog_s(&self, node: &Node) -> f64 {
        let job = |id: usize, cached| self.config.truth.predict_ns(self.trace[id].input_tokens, cached) as f64 / 1e9;
        let queued = node.queue.iter().map(|job| {
            let reuse = self.progress[job.id].placement.as_ref().map_or(0, |placement| placement.reuse);
            (job.id, reuse)
        });
        queued.chain(node.working.map(|(id, cached, _)| (id, cached))).map(|(id, cached)| job(id, cached)).sum()
    }

    fn replicas(&mut self) {
        let mut ranked: Vec<(u64, u64)> = self.uses.iter().map(|(block, uses)| (*uses, *block)).collect();
        ranked.sort_unstable_by_key(|(uses, block)| (Reverse(*uses), mix64(*block)));
        let ranks = [1, 10, 100, 1000, 10_000].map(|rank: usize| {
            let block = ranked.get(rank - 1).map(|(_, block)| *block);
            block.map_or(0, |block| self.nodes.iter().filter(|node| node.cache.has(block)).count() as u32)
        });
        self.outcome.replicas.push(ReplicaSample { at_ns: self.events.now_ns(), ranks });
        if self.open > 0 {
            self.events.at(self.events.now_ns() + REPLICAS_NS, Event::Replicas);
        }
    }

    fn finish(mut self) -> Outcome {
        let computed: Vec<f64> = self.nodes.iter().map(|node| node.computed_ns as f64).collect();
        let mean = computed.iter().sum::<f64>() / computed.len().max(1) as f64;
        self.outcome.imbalance = computed.iter().copied().fold(0.0, f64::max) / mean.max(1.0);
        let sent: Vec<f64> = self.nodes.iter().map(|node| node.sent_ns as f64).collect();
        let mean = sent.iter().sum::<f64>() / sent.len().max(1) as f64;
        self.outcome.egress_imbalance = sent.iter().copied().fold(0.0, f64::max) / mean.max(1.0);
        let booked = (0..self.config.prefill).map(|at| self.scheduler.prefill_booked(at, self.events.now_ns()).1);
        self.outcome.left_booked_ns = booked.sum();
        self.outcome.requests = self.progress.into_iter().map(|progress| progress.outcome).collect();
        self.outcome
    }
}
