//! The World: nodes, a control plane and clients in one thread, with virtual time, one seed and no I/O.
//!
//! It hosts the code that runs in production ([`kvplane_client::Client`], [`kvplane_store::service::Service`],
//! [`kvplane_cluster::Cluster`]) and simulates everything around it: hosts, connections, memory, disks and clocks. One
//! seed decides all; its random streams (schedule, network, workload, faults) are salted, so that a change of one does
//! not reshuffle the others. The same seed gives the same history, event by event, which the trace's hash proves.
//!
//! A run has three parts: work under faults; a time without faults in which all open batches must end; and a last round
//! in which a fresh put and get of every key must work. `docs/testing.md` describes the limits of the model.

mod check;
mod client;
mod cluster;
mod far;
mod faults;
mod finish;
mod network;
mod pattern;
mod pool;
mod queue;
mod runner;
mod scenario;
mod segments;
mod server;
mod statistics;
mod trace;
mod workload;

use std::collections::BTreeMap;
use std::rc::Rc;

use check::{CheckResult, removal::Removals, segments::Segments, shadow::Shadow};
pub use check::{Rule, Violation};
use client::ClientHost;
use cluster::control::Control;
use cluster::memory::Memories;
use cluster::node::{Node, ShardIncarnation};
use cluster::quotas::SsdQuotas;
use faults::Trouble;
use kvplane_proto::ids::Slot;
use kvplane_proto::map::{ShardKey, SlotOwners};
use kvplane_proto::rng::Rng;
use network::Connection;
use queue::{Event, Queue};
pub use runner::{Failure, Outcome, SeedTest, number, run, run_seeds, run_with_lines};
use scenario::MS;
pub use scenario::{Mischief, Scenario};
pub use statistics::{FarCounts, MemoryCounts, QuotaCounts, Statistics};
use trace::Trace;

/// Random streams of one seed.
struct Streams {
    schedule: Rng,
    network: Rng,
    workload: Rng,
    faults: Rng,
    segments: Rng,
    disk: Rng,
    without: Rng,
    clocks: Rng,
    device: Rng,
    reports: Rng,
}

/// Whole simulation.
pub(crate) struct World {
    scenario: Scenario,
    now_ns: u64,
    queue: Queue,
    streams: Streams,
    trace: Trace,
    nodes: Vec<Node>,
    /// Every incarnation of every shard, ended ones included.
    incarnations: Vec<ShardIncarnation>,
    /// Disks by the lineage that they keep: they outlive their shards.
    disks: BTreeMap<usize, faults::disk::Disk>,
    /// Bytes of records that were damaged.
    damaged_bytes: Vec<faults::records::DamagedByte>,
    /// Kept memory.
    memories: Memories,
    /// Number of handovers.
    handovers: u32,
    ssd_quotas: SsdQuotas,
    clients: Vec<ClientHost>,
    control: Control,
    connections: BTreeMap<u32, Connection>,
    next_connection: u32,
    trouble: Trouble,
    shadow: Shadow,
    removals: Removals,
    /// Keys of objects that were acknowledged with two replicas, with the time.
    doubled: BTreeMap<usize, u64>,
    /// Time when migrating slots were seen last.
    moved_ns: u64,
    segments: Segments,
    /// Reports of complete imports that came, and may come again.
    reports: Vec<cluster::exports::ReceivedReport>,
    /// Slots that importers have reported: importer, former owner, slot.
    sent_reports: Vec<(usize, ShardKey, Slot)>,
    /// Owners by the newest epochs, and those that shards follow: computed once for all nodes.
    owners: BTreeMap<u64, Rc<SlotOwners>>,
    statistics: Statistics,
    violation: Option<Violation>,
    /// Number of timer calls at the current instant, to detect one that never rests.
    timers_now: u32,
}

impl World {
    pub(crate) fn new(scenario: Scenario, kept_lines: usize) -> Self {
        let scenario = scenario.disturbed().announced();
        let seed = scenario.seed;
        let streams = Streams {
            schedule: Rng::new(seed, "schedule"),
            network: Rng::new(seed, "network"),
            workload: Rng::new(seed, "workload"),
            faults: Rng::new(seed, "faults"),
            segments: Rng::new(seed, "segments"),
            disk: Rng::new(seed, "disk events"),
            without: Rng::new(seed, "without disks"),
            clocks: Rng::new(seed, "clocks"),
            device: Rng::new(seed, "device copies"),
            reports: Rng::new(seed, "reports of imports"),
        };
        let mut world = Self {
            now_ns: MS,
            queue: Queue::default(),
            streams,
            trace: Trace::new(kept_lines),
            nodes: Vec::new(),
            incarnations: Vec::new(),
            disks: BTreeMap::new(),
            damaged_bytes: Vec::new(),
            memories: Memories::new(),
            handovers: 0,
            ssd_quotas: SsdQuotas::default(),
            clients: Vec::new(),
            control: Control::new(&scenario),
            connections: BTreeMap::new(),
            next_connection: 0,
            trouble: Trouble::default(),
            shadow: Shadow::new(scenario.keys, |key| scenario.tenant_of(key)),
            removals: Removals::new(scenario.keys),
            doubled: BTreeMap::new(),
            moved_ns: 0,
            segments: Segments::new(scenario.object_bytes),
            reports: Vec::new(),
            sent_reports: Vec::new(),
            owners: BTreeMap::new(),
            statistics: Statistics::default(),
            violation: None,
            timers_now: 0,
            scenario,
        };
        world.populate();
        world
    }

    fn populate(&mut self) {
        self.start_control();
        for client in 0..self.scenario.clients {
            let client = ClientHost::new(client, 1, &self.scenario, &mut self.streams.faults);
            self.clients.push(client);
            self.begin_client(self.clients.len() - 1);
        }
        // Created after the users' clients, as each shard has one of its own.
        for node in 0..self.scenario.nodes {
            let node = Node::new(node, &self.scenario, &mut self.streams.faults);
            self.nodes.push(node);
            let joins_ns = self.scenario.joins_ns(self.nodes.len() - 1);
            if joins_ns > 0 {
                self.after(joins_ns, Event::StartNode(self.nodes.len() - 1));
            } else {
                self.start_node(self.nodes.len() - 1);
            }
        }
        self.schedule_fault();
    }

    /// Processes events up to `until_ns`, until a rule is broken, or until `done` returns true.
    pub(crate) fn run_until(&mut self, until_ns: u64, mut done: impl FnMut(&Self) -> bool) {
        while self.violation.is_none() && !done(self) {
            let Some((at_ns, event)) = self.queue.pop(until_ns) else {
                self.now_ns = self.now_ns.max(until_ns);
                return;
            };
            if at_ns > self.now_ns {
                self.timers_now = 0;
            }
            self.now_ns = at_ns;
            self.trace.events += 1;
            self.step(event);
            if self.trace.events.is_multiple_of(512) {
                let incarnation = self.streams.schedule.below(self.incarnations.len() as u64) as usize;
                self.incarnations[incarnation].check_store();
            }
        }
    }

    fn step(&mut self, event: Event) {
        if let Some(until_ns) = self.busy_until(&event) {
            self.at(until_ns, event);
            return;
        }
        self.note(&event);
        match event {
            Event::ClientTimer(client, incarnation) => self.client_timer(client, incarnation),
            Event::ServiceTimer(incarnation) => self.service_timer(incarnation),
            Event::Pump(connection, way) => self.pump(connection, way),
            Event::Deliver(connection, way) => self.deliver(connection, way),
            Event::Accept(connection) => self.accept(connection),
            Event::Connected(connection) => self.connected(connection),
            Event::Refused(client, incarnation, lane) => self.refused(client, incarnation, lane),
            Event::ResetDone(connection) => self.reset_done(connection),
            Event::CopyChunk(client, incarnation) => self.copy_chunk(client, incarnation),
            Event::GhostChunk(client) => self.ghost_chunk(client),
            Event::LateTail(incarnation, offset, bytes) => self.write_tail(incarnation, offset, &bytes),
            Event::Act(client, incarnation) => self.act(client, incarnation),
            Event::Cancel(client, incarnation, batch) => self.cancel(client, incarnation, batch),
            Event::PollMap(client, incarnation) => self.poll_map(client, incarnation),
            Event::Agent(node, incarnation) => self.agent(node, incarnation),
            Event::ControlTimer(incarnation) => self.control_timer(incarnation),
            Event::ToControl(message) => self.control_hears(&message),
            Event::FromControl(party, message) => self.party_hears(party, &message),
            Event::Disk(incarnation, op) => self.disk_done(incarnation, op),
            Event::TierRefused(incarnation) => self.tier_refused(incarnation),
            Event::DevicePiece(incarnation, copy) => self.device_piece(incarnation, copy),
            Event::DeviceCopied(incarnation, copy) => self.device_copied(incarnation, copy),
            Event::DeviceGarbage(incarnation, offset, bytes) => self.device_garbage(incarnation, offset, bytes),
            Event::Fault => self.fault(),
            Event::StartNode(node) => self.start_node(node),
            Event::StartClient(client) => self.start_client(client),
            Event::StartControl => self.start_control(),
            Event::Recover(node) => self.nodes[node].slowness = 1,
            Event::BeginLeave(node, incarnation, drains) => self.begin_leave(node, incarnation, drains),
            Event::Leave(node, incarnation) => self.leave(node, incarnation),
            Event::Depart(node, incarnation) => self.depart(node, incarnation),
            Event::Handover(node, number, turn) => self.handover(node, number, turn),
            Event::ReportAgain(number) => self.report_again(number),
        }
    }

    /// Returns the time when the thread that the event needs is free; `None` if it is free now. Copies of shared memory
    /// occupy a client's only thread: until they are done it sees no frame, timer or request. A halted node sees
    /// nothing.
    fn busy_until(&self, event: &Event) -> Option<u64> {
        let halted = self.node_of(event).map(|node| self.nodes[node].halted_ns).filter(|ns| *ns > self.now_ns);
        if halted.is_some() {
            return halted;
        }
        let client = match event {
            Event::ClientTimer(client, _) | Event::Act(client, _) | Event::Cancel(client, ..) => *client,
            Event::Refused(client, ..) | Event::FromControl(faults::Party::Client(client), _) => *client,
            Event::Deliver(index, network::Way::ToClient) | Event::Connected(index) | Event::ResetDone(index) => {
                self.connections.get(index)?.client
            }
            _ => return None,
        };
        let client = self.clients.get(client).filter(|client| client.alive)?;
        client.copying.as_ref().map(|copy| copy.until_ns)
    }

    /// Returns the node whose process an event needs, if any.
    fn node_of(&self, event: &Event) -> Option<usize> {
        let party = match event {
            Event::ServiceTimer(incarnation)
            | Event::Disk(incarnation, _)
            | Event::TierRefused(incarnation)
            | Event::DeviceCopied(incarnation, _) => {
                return Some(self.incarnations[*incarnation].node);
            }
            Event::Agent(node, _) | Event::BeginLeave(node, ..) | Event::Leave(node, _) | Event::Depart(node, _) => {
                return Some(*node);
            }
            Event::Handover(node, _, turn) if turn.is_of_running() => return Some(*node),
            Event::FromControl(party, _) => *party,
            Event::ClientTimer(client, _) | Event::Refused(client, ..) | Event::CopyChunk(client, _) => {
                self.party_of(*client)
            }
            Event::Accept(index)
            | Event::Deliver(index, network::Way::ToServer)
            | Event::Pump(index, network::Way::ToClient) => {
                return self.connections.get(index).map(|connection| self.incarnations[connection.incarnation].node);
            }
            Event::Connected(index)
            | Event::ResetDone(index)
            | Event::Deliver(index, network::Way::ToClient)
            | Event::Pump(index, network::Way::ToServer) => self.party_of(self.connections.get(index)?.client),
            _ => return None,
        };
        if let faults::Party::Node(node) = party { Some(node) } else { None }
    }

    fn note(&mut self, event: &Event) {
        let (kind, one, two) = event.words();
        self.trace.fold(self.now_ns);
        self.trace.fold(kind << 56 ^ one << 28 ^ two);
        if !event.is_chatter() {
            self.trace.line(self.now_ns, || format!("{event:?}"));
        }
    }

    /// Adds a line of detail to the trace, and a number that stands for it to the hash.
    fn detail(&mut self, word: u64, line: impl FnOnce() -> String) {
        self.trace.fold(word);
        self.trace.line(self.now_ns, || format!("  {}", line()));
    }

    fn at(&mut self, at_ns: u64, event: Event) {
        let tie = self.streams.schedule.next_u64();
        self.queue.push(at_ns.max(self.now_ns), tie, event);
    }

    fn after(&mut self, ns: u64, event: Event) {
        self.at(self.now_ns + ns, event);
    }

    /// Keeps the first broken rule.
    fn require(&mut self, checked: CheckResult) {
        if let Err(violation) = checked {
            self.violate(violation);
        }
    }

    fn violate(&mut self, violation: Violation) {
        self.violation.get_or_insert(violation);
    }

    /// Counts a call of a timer: one that fires at the same instant again and again would busy-loop.
    fn count_timer(&mut self, who: &str) {
        self.timers_now += 1;
        if self.timers_now > 10_000 {
            self.violate(check::broken(Rule::Liveness, format!("the timer of {who} never rests")));
        }
    }
}

const fn slot_count(scenario: &Scenario) -> usize {
    (scenario.batch_requests as usize) * 4 + 4
}
