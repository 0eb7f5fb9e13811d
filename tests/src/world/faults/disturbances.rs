//! Additional faults: whole nodes that are halted or silent, restarts of everything, and a lost state of the control
//! plane beside nodes that come and go with their disks.

use kvplane_cluster::Input;
use kvplane_proto::ids::{Incarnation, NodeId};
use kvplane_proto::rng::Rng;
use kvplane_store::service::PutAck;

use crate::world::World;
use crate::world::faults::disk::DiskFaults;
use crate::world::faults::{Fault, Party};
use crate::world::queue::Event;
use crate::world::scenario::{Chances, MS, Mischief, Scenario, US};

impl Scenario {
    /// Returns the scenario without halted or silent nodes, and without restarts of everything.
    #[must_use]
    pub fn undisturbed(mut self) -> Self {
        self.undisturbed = true;
        self
    }

    /// In some seeds in which clients may be bound to a tenant, all objects belong to a tenant other than the default
    /// one. In some, of any kind, nodes are halted and silent now and then, and everything restarts at once. Random
    /// streams of their own decide, so that the others stay as they were.
    pub(crate) fn disturbed(mut self) -> Self {
        let rng = &mut Rng::new(self.seed, "disturbances");
        let none = self.undisturbed || self.mischief.is_some();
        if !none && self.answers_late() && Rng::new(self.seed, "tenant").chance(0.3) {
            self.tenant = b"tenant";
        }
        let weights = &mut self.chances.weights;
        // Members that report late have nothing to offer after a loss of the state.
        if none || weights[Fault::LoseControl as usize] > 0 || weights.iter().sum::<u64>() == 0 || !rng.chance(0.4) {
            return self;
        }
        weights[Fault::HaltNode as usize] = rng.below(3);
        weights[Fault::SilenceNode as usize] = rng.below(3);
        // Objects without disks are lost then.
        weights[Fault::CrashAll as usize] = if self.keeps && self.tier.is_none() { 0 } else { rng.below(2) };
        weights[Fault::Evidence as usize] = rng.below(4);
        let rng = &mut Rng::new(self.seed, "one-way loss");
        weights[Fault::LoseOneWay as usize] = rng.below(3);
        weights[Fault::HalfOpen as usize] = rng.below(3);
        self
    }

    /// Slots have two owners, and one node falls silent for a while: halted, disconnected, or with messages lost in one
    /// direction. In other seeds one connection after the other becomes half-open. Objects that two nodes have are
    /// found meanwhile, and soon: gets are hedged. (Where the connection to one owner is half-open and the other owner
    /// is silent, a get waits.)
    #[must_use]
    pub fn of_silence(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "silence");
        let mut scenario = Self { undisturbed: true, shared_memory: false, ..Self::of_losses(seed) };
        (scenario.nodes, scenario.clients) = (3 + rng.below(2) as usize, 4);
        scenario.hedge_ns = [10 * MS, 60 * MS][rng.below(2) as usize];
        (scenario.batches, scenario.batch_requests, scenario.think_ns) = (800, [1, 4][rng.below(2) as usize], 2 * MS);
        scenario.latency_ns = [10 * US, 200 * US][rng.below(2) as usize];
        // A full window queues a get behind puts that wait for the silent node.
        scenario.lane_window_bytes = 64 << 20;
        let weights = &mut scenario.chances.weights;
        *weights = [0; crate::world::faults::FAULTS];
        if rng.chance(0.3) {
            weights[Fault::HalfOpen as usize] = 1;
        } else {
            weights[Fault::HaltNode as usize] = 1;
            weights[Fault::SilenceNode as usize] = 1;
            weights[Fault::LoseOneWay as usize] = 2;
            weights[Fault::Evidence as usize] = 2;
        }
        (scenario.chances.faults_most, scenario.chances.node_faults_most) = (None, Some(1));
        (scenario.chances.spike, scenario.chances.fault_interval_ns) = (0.0, 40 * MS);
        scenario.answers = true;
        scenario
    }

    /// Like [`Self::of_silence`], with a host's bug.
    #[must_use]
    pub fn of_silence_with(seed: u64, mischief: Mischief) -> Self {
        Self { mischief: Some(mischief), ..Self::of_silence(seed) }
    }

    /// Slots have two owners, nodes have disks, and all of them die once, with the control plane or without: at the end
    /// all promised objects exist, with their replicas.
    #[must_use]
    pub fn of_copies_again(seed: u64) -> Self {
        let mut scenario = Self { replicas: 2, undisturbed: true, ..Self::of_returns(seed) };
        scenario.chances.weights = [0; crate::world::faults::FAULTS];
        scenario.chances.weights[Fault::CrashAll as usize] = 1;
        scenario.chances.weights[Fault::Evidence as usize] = Rng::new(seed, "evidence").below(8);
        scenario
    }

    /// The control plane loses its state, once or several times, while nodes with disks die and come back. In half of
    /// the seeds objects are put that stay, and one node dies: all promised objects exist at the end.
    #[must_use]
    pub fn of_lost_state_with_disks(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "lost state with disks");
        let returns = rng.chance(0.5);
        let mut scenario = if returns { Self::of_returns(seed) } else { Self::of_absences(seed) };
        let weights = &mut scenario.chances.weights;
        // Members that do not report in time have nothing to offer.
        weights[Fault::PartitionControl as usize] = 0;
        weights[Fault::LoseControl as usize] = 2;
        weights[Fault::CrashControl as usize] = rng.below(2);
        weights[Fault::CrashNode as usize] = 2;
        if returns {
            // After the loss, no member may know of a drain that the control plane began.
            weights[Fault::LeaveNode as usize] = 0;
        }
        scenario.chances.fault_interval_ns = (60 + rng.below(200)) * MS;
        // A member that misses maps vouches for no slot, so promised objects may be gone; and a map that only one
        // member received is not adopted if that member does not report.
        (scenario.chances.control_loss, scenario.chances.control_crash_in_publish) = (0.0, 0.0);
        scenario.chances.faults_most = returns.then_some(2 + rng.below(3));
        scenario.chances.node_faults_most = returns.then_some(1);
        scenario
    }

    /// One shard whose disk loses writes of records that it has acknowledged, and crashes often: the loss of a removal
    /// is noticed if a record came after it in its segment, and then no removed object comes back.
    #[must_use]
    pub fn of_lost_writes(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "lost writes");
        let mut scenario = Self::of_tiers(seed);
        (scenario.nodes, scenario.shards, scenario.keys) = (1, 1, 16);
        (scenario.remove_weight, scenario.replace_chance, scenario.batches) = (60, 0.0, 300);
        if let Some(tier) = &mut scenario.tier {
            tier.suit(Mischief::BelieveDisks);
            tier.faults = DiskFaults { lost: 0.02 + 0.2 * rng.unit(), spares: true, ..DiskFaults::default() };
            (tier.policy.ack, tier.config.segments, tier.without) = (PutAck::Durable, 64, 0.0);
        }
        let mut weights = [0; crate::world::faults::FAULTS];
        weights[Fault::CrashNode as usize] = 1;
        let fault_interval_ns = (40 + rng.below(200)) * MS;
        scenario.chances = Chances { fault_interval_ns, weights, ..Chances::default() };
        scenario
    }

    /// One shard whose disk loses power often, with flushes that take as long as several groups, while users put and
    /// remove a lot: writes since the last flush may be done in part, the later without the earlier.
    #[must_use]
    pub fn of_power_failures(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "power failures");
        let mut scenario = Self::of_lost_writes(seed);
        (scenario.clients, scenario.batches, scenario.batch_requests) = (4, 600, 4);
        (scenario.think_ns, scenario.latency_ns) = (MS, 10 * US);
        (scenario.object_bytes, scenario.chunk_bytes, scenario.pool_bytes) = (2 << 10, 2 << 10, 64 << 10);
        if let Some(tier) = &mut scenario.tier {
            (tier.faults, tier.power) = (DiskFaults::default(), true);
            tier.latency_ns = [200 * US, 2 * MS][rng.below(2) as usize];
            tier.config.durable_writes = false;
        }
        scenario.chances.fault_interval_ns = (30 + rng.below(60)) * MS;
        scenario
    }
}

impl World {
    /// Halts or silences a node for a while, or restarts everything, each within a time.
    pub(crate) fn disturb(&mut self, fault: Fault, node: usize, (down_ns, longest_ns): (u64, u64)) {
        match fault {
            Fault::HaltNode if self.nodes[node].up => {
                let until_ns = (self.now_ns + down_ns).min(self.scenario.faults_until_ns);
                self.nodes[node].halted_ns = self.nodes[node].halted_ns.max(until_ns);
                self.detail(node as u64, || format!("node {node} is halted for {} ms", down_ns / MS));
            }
            Fault::SilenceNode => {
                self.detail(node as u64, || format!("node {node} is silent for {} ms", down_ns / MS));
                self.others_than(node).into_iter().for_each(|other| self.partition(other, Party::Node(node), down_ns));
            }
            Fault::LoseOneWay => {
                let from = down_ns.is_multiple_of(2);
                self.detail(node as u64, || {
                    format!(
                        "messages {} node {node} are lost for {} ms",
                        if from { "from" } else { "to" },
                        down_ns / MS
                    )
                });
                for other in self.others_than(node) {
                    let (one, other) = if from { (Party::Node(node), other) } else { (other, Party::Node(node)) };
                    self.part(one, other, false, down_ns);
                }
            }
            Fault::CrashAll => self.crash_all(longest_ns),
            Fault::Evidence => self.tell_of(node),
            _ => {}
        }
    }

    /// Returns all parties beside a node.
    fn others_than(&self, node: usize) -> Vec<Party> {
        let nodes = (0..self.nodes.len()).filter(|other| *other != node).map(Party::Node);
        let clients = (0..self.scenario.clients).map(Party::Client);
        nodes.chain(clients).chain([Party::Control]).collect()
    }

    /// Gives the control plane evidence about a node, from its ports and from a waiting peer.
    fn tell_of(&mut self, at: usize) {
        let (now_ns, node) = (self.now_ns, &self.nodes[at]);
        let (id, incarnation) = (NodeId(at as u64 + 1), Incarnation(node.incarnation));
        let is_deaf = node.halted_ns > now_ns || self.is_apart(Party::Control, Party::Node(at));
        let ports = match (node.up, is_deaf) {
            (false, _) => Input::Refused { node: id, incarnation },
            (true, true) => Input::Unanswered { node: id, incarnation },
            (true, false) => Input::Answered { node: id, incarnation },
        };
        let report = Input::Reported { node: id, incarnation };
        for evidence in [report, ports] {
            let Some(cluster) = &mut self.control.cluster else { return };
            // The control plane may know another incarnation of the node by now, or none.
            let _ = cluster.handle(evidence, now_ns);
            self.carry_out();
        }
    }

    /// Kills all nodes, with the control plane or without, and restarts them in any order.
    fn crash_all(&mut self, longest_ns: u64) {
        // Both replicas of every object die: only the promises of disks are left.
        self.doubled.clear();
        if self.streams.faults.chance(0.5) {
            self.crash_control();
            let down_ns = 1 + self.streams.faults.below(longest_ns);
            self.after(down_ns, Event::StartControl);
        }
        for node in (0..self.nodes.len()).filter(|node| self.nodes[*node].up).collect::<Vec<_>>() {
            self.crash_node(node);
            let down_ns = 1 + self.streams.faults.below(longest_ns);
            self.after(down_ns, Event::StartNode(node));
        }
    }
}
