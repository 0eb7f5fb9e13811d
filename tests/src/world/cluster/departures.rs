//! Nodes that leave in order: one by one, and all at once.
//!
//! As the agent does, a node drains or not, announces its end ([`Input::PrepareLeave`]), waits as [`MovesWait`] says,
//! and ends its incarnation.

use kvplane_cluster::{Input, Moves, MovesLeft, MovesWait, Rejection, Reply};
use kvplane_proto::ids::{Incarnation, NodeId};
use kvplane_proto::rng::Rng;
use kvplane_store::service::Tiering;

use crate::world::World;
use crate::world::faults::{FAULTS, Fault, Party};
use crate::world::queue::{Event, Message};
use crate::world::scenario::{Chances, MS, Mischief, Scenario};

/// Interval at which a leaving node checks if it may end.
const LOOK_NS: u64 = 20 * MS;
/// Longest wait without progress, and in all: a tenth of the real nodes' values, like all intervals of the control
/// plane here.
pub(crate) const PATIENCE_NS: u64 = 500 * MS;
pub(crate) const MOST_NS: u64 = 2_000 * MS;
/// Time between the end of an incarnation and the end of its process.
const EXIT_NS: u64 = 50 * MS;

/// Progress of a leaving node.
#[derive(Debug)]
pub(crate) enum Departure {
    /// The node drains, and waits until no object is left.
    Drains,
    /// The node is about to end, and waits for migrations.
    Waits { wait: MovesWait, news: Option<Moves> },
    /// The node has ended its incarnation.
    Ended,
}

impl Scenario {
    /// The scenario of a seed in which all nodes, which have disks, leave within moments, drained or not, and come back
    /// before others stop waiting for them: objects left behind in slots that a node does not get back are lost. No
    /// node dies, and all promised objects exist at the end.
    #[must_use]
    pub fn of_departures(seed: u64) -> Self {
        let rng = &mut Rng::new(seed, "departures");
        let mut scenario = Self::of_returns(seed).undisturbed();
        (scenario.nodes, scenario.keys) = (2 + rng.below(3) as usize, 60);
        // One node has space for all objects.
        scenario.tier.iter_mut().for_each(|tier| {
            (tier.config.max_records, tier.config.segments, tier.power) = (256, 64, false);
        });
        let mut weights = [0; FAULTS];
        weights[Fault::LeaveAll as usize] = 1;
        let fault_interval_ns = (20 + rng.below(40)) * MS;
        let (faults_from_ns, at_rest, faults_most) = (1000 * MS, true, Some(1 + rng.below(2)));
        scenario.chances =
            Chances { weights, fault_interval_ns, faults_from_ns, at_rest, faults_most, ..Chances::default() };
        scenario.settle_most_ns = 5000 * MS;
        scenario.announces = true;
        scenario
    }

    /// Like [`Self::of_departures`], with a host's bug.
    #[must_use]
    pub fn of_departures_with(seed: u64, mischief: Mischief) -> Self {
        Self { mischief: Some(mischief), ..Self::of_departures(seed) }
    }

    /// In half of the seeds whose nodes have disks, nodes announce that they leave. A random stream of its own decides,
    /// so that the other seeds stay as they were.
    pub(crate) fn announced(mut self) -> Self {
        let may = self.tier.is_some() && !self.undisturbed && self.mischief.is_none();
        self.announces |= may && Rng::new(self.seed, "announced").chance(0.5);
        self
    }
}

impl World {
    /// Starts the departure of a node; with `drain_ns` the node drains first, and checks after that time for the first
    /// time if its slots are gone.
    pub(crate) fn begin_departure(&mut self, node: usize, drain_ns: u64) {
        let incarnation = self.nodes[node].incarnation;
        let drains = drain_ns > 0;
        self.nodes[node].departure = Some(if drains { Departure::Drains } else { self.new_wait() });
        if drains {
            let input = Input::Drain { node: NodeId(node as u64 + 1), incarnation: Some(Incarnation(incarnation)) };
            self.tell_control(Party::Node(node), Message::Node(node, incarnation, input));
        }
        self.after(drain_ns, Event::Leave(node, incarnation));
    }

    /// Starts the departure of all nodes, each after a moment, and some of them drained.
    pub(crate) fn leave_all(&mut self) {
        for node in 0..self.nodes.len() {
            let (after_ns, drains) = (self.streams.faults.below(150 * MS), self.streams.faults.chance(0.7));
            let incarnation = self.nodes[node].incarnation;
            self.after(after_ns, Event::BeginLeave(node, incarnation, drains));
        }
    }

    pub(crate) fn begin_leave(&mut self, node: usize, incarnation: u64, drains: bool) {
        let at = &self.nodes[node];
        if self.is_node(node, incarnation) && at.departure.is_none() && at.handover.is_none() {
            self.begin_departure(node, if drains { LOOK_NS } else { 0 });
        }
    }

    fn new_wait(&self) -> Departure {
        Departure::Waits { wait: MovesWait::new(self.now_ns, PATIENCE_NS, MOST_NS), news: None }
    }

    /// Advances the departure of a node, if possible.
    pub(crate) fn leave(&mut self, node: usize, incarnation: u64) {
        if !self.is_node(node, incarnation) {
            return;
        }
        match self.nodes[node].departure {
            Some(Departure::Drains) if self.drain_goes_on(node) => {
                return self.after(LOOK_NS, Event::Leave(node, incarnation));
            }
            Some(Departure::Drains) => self.nodes[node].departure = Some(self.new_wait()),
            Some(Departure::Waits { .. }) => {}
            Some(Departure::Ended) | None => return,
        }
        if self.scenario.announces && !self.scenario.has(Mischief::LeaveAtOnce) && self.waits_for_moves(node) {
            return self.after(LOOK_NS, Event::Leave(node, incarnation));
        }
        self.nodes[node].departure = Some(Departure::Ended);
        // Like real hosts: an incarnation with disks keeps its slots for the next one.
        let input = Input::Restart { node: NodeId(node as u64 + 1), incarnation: Incarnation(incarnation) };
        self.tell_control(Party::Node(node), Message::Node(node, incarnation, input));
        self.after(EXIT_NS, Event::Depart(node, incarnation));
    }

    fn drain_goes_on(&self, node: usize) -> bool {
        // Objects left behind by an interrupted drain are lost.
        let late = self.now_ns >= self.scenario.faults_until_ns;
        self.scenario.keeps && !late && !self.moves_left(node).is_drained()
    }

    /// Announces the end of a node, and checks for slots that still migrate.
    fn waits_for_moves(&mut self, node: usize) -> bool {
        let incarnation = Incarnation(self.nodes[node].incarnation);
        let input = Input::PrepareLeave { node: NodeId(node as u64 + 1), incarnation };
        self.tell_control(Party::Node(node), Message::Node(node, incarnation.0, input));
        let (left, now_ns) = (self.moves_left(node), self.now_ns);
        match &mut self.nodes[node].departure {
            Some(Departure::Waits { wait, news }) => wait.is_over(left, *news, now_ns).is_none(),
            Some(Departure::Drains | Departure::Ended) | None => false,
        }
    }

    pub(crate) fn moves_left(&self, node: usize) -> MovesLeft {
        let mut left = MovesLeft::default();
        for incarnation in &self.nodes[node].shards {
            let service = &self.incarnations[*incarnation].service;
            let moves = service.inspect().move_counters();
            left.owned += moves.owned_slots;
            left.leaving += moves.exporting_slots;
            left.coming += moves.importing_slots;
            left.objects += service.store().stats().objects;
            left.imported += moves.imported;
            let tier = service.inspect().tier().map(Tiering::snapshot);
            left.recovering |= tier.is_some_and(|tier| tier.is_recovering());
        }
        left
    }

    /// Handles a reply of the control plane to a leaving node: the newest epoch, the migrations in flight, or that no
    /// other node can take its slots.
    pub(crate) fn departing_hears(&mut self, index: usize, answer: &Result<Reply, Rejection>) {
        let (moves, wait) = (self.moves_left(index), self.new_wait());
        let node = &mut self.nodes[index];
        match (answer, &mut node.departure) {
            (Ok(Reply::Moves(moves)), Some(Departure::Waits { news, .. })) => *news = Some(*moves),
            (Ok(Reply::Alive { epoch, .. }), Some(_)) if *epoch > node.epoch => {
                self.tell_control(Party::Node(index), Message::Fetch(Party::Node(index)));
            }
            (Err(Rejection::LastOwner { .. }), Some(Departure::Drains)) if moves.leaving == 0 => {
                node.departure = Some(wait);
            }
            _ => {}
        }
    }

    /// Ends a node that has left, and starts it again later.
    pub(crate) fn depart(&mut self, index: usize, incarnation: u64) {
        if self.is_node(index, incarnation) && self.scenario.kept.is_some() {
            self.depart_with_memory(index);
        } else if self.is_node(index, incarnation) {
            self.crash_node(index);
            let waited_for = self.scenario.chances.weights[Fault::LeaveAll as usize] > 0;
            let longest_ns = if self.streams.faults.chance(0.5) {
                50 * MS
            } else if waited_for {
                400 * MS
            } else {
                1000 * MS
            };
            let down_ns = self.streams.faults.below(longest_ns);
            self.after(down_ns, Event::StartNode(index));
        }
    }
}
