//! Process of the control plane: the pure cluster, a disk, and messages that may be lost, late, duplicated and
//! reordered.
//!
//! It carries out outputs in the order that [`kvplane_cluster::Output`] demands, and may be killed between any two of
//! them; it restarts from the state that it made durable, encoded and decoded.

use std::collections::BTreeMap;
use std::rc::Rc;

use kvplane_cluster::{Change, Cluster, ClusterConfig, Input, Output, Record, RecordKey};
use kvplane_proto::ids::Epoch;
use kvplane_proto::map::ClusterMap;

use crate::world::World;
use crate::world::check::epochs::Epochs;
use crate::world::check::{Rule, broken};
use crate::world::cluster::tickets::Tickets;
use crate::world::faults::Party;
use crate::world::queue::{Event, Message};
use crate::world::scenario::{MS, Mischief, Scenario};

/// Control plane.
pub(crate) struct Control {
    config: ClusterConfig,
    pub(crate) cluster: Option<Cluster>,
    pub(crate) incarnation: u32,
    disk: BTreeMap<RecordKey, Vec<u8>>,
    pub(crate) published: Option<Rc<ClusterMap>>,
    pub(crate) epochs: Epochs,
    armed_ns: u64,
    /// Its disk was lost: at its start the cluster may be new, or have lost its state.
    lost: bool,
    pub(crate) tickets: Tickets,
}

/// Time for members to offer their maps after the state was lost.
const ADOPTION_NS: u64 = 1000 * MS;

impl Control {
    pub(crate) fn new(scenario: &Scenario) -> Self {
        let mut config = ClusterConfig::new("world");
        config.replicas = scenario.replicas;
        config.heartbeat_interval_ns = 100 * MS;
        config.unanswered_after_ns = 200 * MS;
        config.suspect_after_ns = 300 * MS;
        config.heartbeat_deadline_ns = 600 * MS;
        config.restart_grace_ns = 1000 * MS;
        config.settle_most_ns = scenario.settle_most_ns;
        Self {
            config,
            cluster: None,
            incarnation: 0,
            disk: BTreeMap::new(),
            published: None,
            epochs: Epochs::default(),
            armed_ns: u64::MAX,
            lost: false,
            tickets: Tickets::default(),
        }
    }

    /// Loses the whole durable state.
    pub(crate) fn lose(&mut self) {
        self.disk.clear();
        self.tickets.lose();
        self.lost = true;
    }

    fn persist(&mut self, changes: &[Change]) {
        for change in changes {
            match change {
                Change::Put(record) => {
                    let mut bytes = Vec::new();
                    record.encode(&mut bytes);
                    self.disk.insert(record.key(), bytes);
                }
                Change::Remove(key) => {
                    self.disk.remove(key);
                }
            }
        }
    }
}

impl World {
    pub(crate) fn start_control(&mut self) {
        if self.control.cluster.is_some() {
            return;
        }
        let records: Result<Vec<Record>, _> = self.control.disk.values().map(|bytes| Record::decode(bytes)).collect();
        let started = records.map_err(|error| error.to_string()).and_then(|records| {
            let mut config = self.control.config.clone();
            config.adoption_wait_ns = self.control.lost.then_some(ADOPTION_NS);
            Cluster::new(config, records, self.now_ns).map_err(|error| error.to_string())
        });
        match started {
            Ok(cluster) => {
                self.control.incarnation += 1;
                self.start_tickets();
                self.forget_quotas();
                self.control.cluster = Some(cluster);
                self.control.armed_ns = u64::MAX;
                self.carry_out();
            }
            Err(error) => self.violate(broken(Rule::Epoch, format!("the control plane does not start again: {error}"))),
        }
    }

    pub(crate) fn crash_control(&mut self) {
        self.control.cluster = None;
        self.control.published = None;
    }

    /// Carries out the cluster's outputs; returns false if the process died in between.
    pub(crate) fn carry_out(&mut self) -> bool {
        while let Some(output) = self.control.cluster.as_mut().and_then(Cluster::poll_output) {
            match output {
                Output::Persist(changes) => {
                    if !self.scenario.has(Mischief::PublishBeforePersist) || self.control.disk.is_empty() {
                        self.control.persist(&changes);
                    }
                    let chance = self.scenario.chances.control_crash_in_publish;
                    if !self.trouble.calm && self.streams.faults.chance(chance) {
                        self.crash_control();
                        let down_ns = self.streams.faults.below(200 * MS);
                        self.after(down_ns, Event::StartControl);
                        return false;
                    }
                }
                Output::Adopt { state, changes } => {
                    self.control.persist(&changes);
                    self.trouble.forgot = false;
                    self.detail(state, || format!("the control plane adopts state {state}"));
                    self.statistics.adoptions += 1;
                }
                Output::MemberLost { node, incarnation } => {
                    if self.scenario.kept.is_some() {
                        // Others have its slots meanwhile, and memory is not reconciled.
                        self.doubled.clear();
                    }
                    self.detail(node.0, || format!("LOST node {} in incarnation {}", node.0, incarnation.0));
                }
                Output::MapChanged(map) => self.publish(map),
                // The World's clients keep the map that they know.
                Output::BeganEmpty => {}
            }
        }
        self.arm_control();
        self.control.cluster.is_some()
    }

    fn publish(&mut self, map: ClusterMap) {
        // After a loss of the state the first map is empty: like real parties, those here keep the one they know.
        if self.control.lost && map.epoch == Epoch(0) {
            return;
        }
        let shares = |map: &ClusterMap| -> Vec<(u64, u64, u32)> {
            map.members.iter().map(|member| (member.node.0, member.incarnation.0, member.weight)).collect()
        };
        self.detail(map.epoch.0, || {
            let former = map.former.as_ref().map(|former| (former.since.0, former.from.0, former.began.clone()));
            format!("MAP {} of nodes, incarnations and shares {:?}, former {former:?}", map.epoch.0, shares(&map))
        });
        self.forget_moved_on(&map);
        let map = Rc::new(map);
        let published = self.control.epochs.publish(&map);
        self.require(published);
        self.statistics.epochs += 1;
        self.detail(map.epoch.0, || format!("epoch {} of {} members", map.epoch, map.members.len()));
        self.control.published = Some(Rc::clone(&map));
        for node in 0..self.nodes.len() {
            self.tell(Party::Node(node), Message::Map(Rc::clone(&map)));
        }
        for client in 0..self.scenario.clients {
            self.tell(Party::Client(client), Message::Map(Rc::clone(&map)));
        }
    }

    fn arm_control(&mut self) {
        let due_ns = self.control.cluster.as_ref().and_then(Cluster::poll_timeout);
        let Some(at_ns) = due_ns.filter(|&at_ns| at_ns < self.control.armed_ns) else { return };
        self.control.armed_ns = at_ns;
        let incarnation = self.control.incarnation;
        self.at(at_ns, Event::ControlTimer(incarnation));
    }

    pub(crate) fn control_timer(&mut self, incarnation: u32) {
        if self.control.incarnation != incarnation {
            return;
        }
        self.control.armed_ns = u64::MAX;
        let Some(cluster) = &mut self.control.cluster else { return };
        if cluster.poll_timeout().is_some_and(|at_ns| at_ns <= self.now_ns) {
            let _ = cluster.handle(Input::Tick, self.now_ns);
            self.count_timer("the control plane");
        }
        self.carry_out();
    }

    /// Delivers a message to the control plane. The reply leaves only after all outputs were carried out.
    pub(crate) fn control_hears(&mut self, message: &Message) {
        let now_ns = self.now_ns;
        let Some(cluster) = &mut self.control.cluster else { return };
        match message {
            Message::Node(node, incarnation, input) => {
                let answer = cluster.handle(input.clone(), now_ns);
                if self.carry_out() {
                    if answer.is_ok() && matches!(input, Input::Heartbeat { .. }) {
                        self.tell_tickets(Party::Node(*node));
                    }
                    self.tell(Party::Node(*node), Message::Answer(*incarnation, answer));
                }
            }
            Message::Fetch(party) => {
                if let Some(map) = self.control.published.clone() {
                    self.tell(*party, Message::Map(map));
                }
                if matches!(party, Party::Client(_)) {
                    self.tell_tickets(*party);
                }
            }
            Message::Ssd(report) => self.control_hears_ssd(report),
            Message::Answer(..) | Message::Map(_) | Message::Tickets(_) | Message::SsdLeases(..) => {}
        }
    }

    /// Delivers a message from the control plane.
    pub(crate) fn party_hears(&mut self, party: Party, message: &Message) {
        match (party, message) {
            (_, Message::Tickets(told)) => self.hear_tickets(party, told),
            (_, Message::SsdLeases(incarnation, call, leases)) => self.shard_hears_leases(*incarnation, *call, leases),
            (Party::Node(node), Message::Map(map)) => self.node_sees_map(node, map),
            (Party::Node(node), Message::Answer(incarnation, answer)) => self.agent_hears(node, *incarnation, answer),
            (Party::Client(client), Message::Map(map)) if self.clients[client].alive => {
                let host = &mut self.clients[client];
                let before = host.client.epoch();
                host.client.set_map((**map).clone(), self.now_ns);
                let after = host.client.epoch();
                self.require(Epochs::observe("a client", before, after));
                if after > before {
                    self.detail(after.0, || format!("client {client} goes from epoch {before} to {after}"));
                }
                self.drain_client(client);
            }
            _ => {}
        }
    }

    pub(crate) fn fetch_map(&mut self, client: usize) {
        self.tell_control(Party::Client(client), Message::Fetch(Party::Client(client)));
    }

    pub(crate) fn poll_map(&mut self, client: usize, incarnation: u32) {
        if self.is_client(client, incarnation) {
            self.fetch_map(client);
            self.after(300 * MS, Event::PollMap(client, incarnation));
        }
    }

    pub(crate) fn tell_control(&mut self, from: Party, message: Message) {
        let message = Rc::new(message);
        self.carry((from, Party::Control), Event::ToControl, &message);
    }

    pub(crate) fn tell(&mut self, to: Party, message: Message) {
        let message = Rc::new(message);
        self.carry((Party::Control, to), |message| Event::FromControl(to, message), &message);
    }

    /// Carries a message between the control plane and a party: it may be lost, delayed, duplicated or reordered.
    fn carry(&mut self, way: (Party, Party), event: impl Fn(Rc<Message>) -> Event, message: &Rc<Message>) {
        if self.cut(way.0, way.1).is_some() {
            return;
        }
        let (loss, double) = (self.scenario.chances.control_loss, self.scenario.chances.control_duplicate);
        let rng = &mut self.streams.network;
        let copies = if self.trouble.calm { 1 } else { u32::from(!rng.chance(loss)) + u32::from(rng.chance(double)) };
        for _ in 0..copies {
            let late = self.streams.network.chance(0.1);
            let extra_ns = if late { self.streams.network.below(150 * MS) } else { 0 };
            let delay_ns = self.latency() + extra_ns;
            self.after(delay_ns, event(Rc::clone(message)));
        }
    }
}
