//! Upgrades of running nodes: two processes, each with its end of the handover's sequence
//! ([`kvplane_cluster::handover`]), a socket between them, and what they share: the memory of the node.
//!
//! Either process, or both, are killed at any step, a step takes any time, and what is sent to a process that has ended
//! is lost. The descriptor of the claim keeps third processes out while a process that has it lives.

use std::collections::VecDeque;

use kvplane_cluster::handover::{RunningEnd, RunningInput, RunningStep, SuccessorEnd, SuccessorInput, SuccessorStep};
use kvplane_cluster::{Input, MovesWait};
use kvplane_proto::ids::{Incarnation, NodeId};

use crate::world::World;
use crate::world::check::{Rule, broken};
use crate::world::cluster::departures::{Departure, MOST_NS, PATIENCE_NS};
use crate::world::faults::Party;
use crate::world::queue::{Event, Message};
use crate::world::scenario::{MS, Mischief, US};

/// Deadline of a message that its sender has ready: a tenth of the real processes' one.
const REPLY_NS: u64 = 500 * MS;
/// Deadline of a successor that is to serve: it may wait for a control plane.
const SERVES_NS: u64 = 9_000 * MS;
/// Interval at which a process that is to stop checks if slots still migrate.
const LOOK_NS: u64 = 20 * MS;

/// Message between the processes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Word {
    Hello,
    Offer,
    Ready,
    Refused,
    Passed,
    Taken,
    Go,
    Serves,
    /// The end of the other process, as its socket shows it.
    Closed,
}

/// Next step of a handover.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Turn {
    /// The running process reads a message.
    Running,
    /// The successor reads a message.
    Successor,
    /// The running process stops, unless slots still migrate.
    Stop,
    /// The successor has mapped the memory.
    Mapped,
    /// A deadline of the running process, which was set at this step.
    RunningDeadline(u32),
    /// A deadline of the successor, which was set at this step.
    SuccessorDeadline(u32),
}

impl Turn {
    /// Returns true for a turn of the process that serves the node.
    pub(crate) const fn is_of_running(self) -> bool {
        matches!(self, Self::Running | Self::Stop | Self::RunningDeadline(_))
    }

    pub(crate) const fn word(self) -> u64 {
        match self {
            Self::Running => 0,
            Self::Successor => 1,
            Self::Stop => 2,
            Self::Mapped => 3,
            Self::RunningDeadline(step) => 4 + 2 * step as u64,
            Self::SuccessorDeadline(step) => 5 + 2 * step as u64,
        }
    }
}

/// Process of a handover: its end of the sequence, and its side of the socket.
#[derive(Debug)]
struct Process<E> {
    /// `None` once the process has ended.
    end: Option<E>,
    inbox: VecDeque<Word>,
    /// Number of inputs so far, so that an old deadline is no deadline.
    step: u32,
}

/// Handover of a node.
#[derive(Debug)]
pub(crate) struct Handover {
    number: u32,
    running: Process<RunningEnd>,
    successor: Process<SuccessorEnd>,
    /// The successor has the claim's descriptor.
    has_claim: bool,
    /// Turns until a process is killed, and which: the running one, the successor.
    doom: Option<(u32, bool, bool)>,
}

impl Handover {
    /// Returns true if a process has the claim of the memory: no third one can use it.
    pub(crate) const fn is_claimed(&self) -> bool {
        self.running.end.is_some() || self.successor.end.is_some() && self.has_claim
    }

    fn serving(&self) -> usize {
        let runs = self.running.end.is_some_and(|end| end.may_serve());
        usize::from(runs) + usize::from(self.successor.end.is_some_and(|end| end.may_serve()))
    }
}

impl World {
    /// Starts a successor of a running node.
    pub(crate) fn upgrade_node(&mut self, node: usize) {
        let at = &self.nodes[node];
        if !at.up || !at.joined || at.departure.is_some() || at.handover.is_some() || !at.is_member(node) {
            return;
        }
        let kept = self.scenario.kept.unwrap_or_default();
        let rng = &mut self.streams.faults;
        let victims = [(true, false), (false, true), (true, true)][rng.below(3) as usize];
        let turns = 1 + rng.below(10) as u32;
        let doom = rng.chance(kept.handover_kill).then_some((turns, victims.0, victims.1));
        self.handovers += 1;
        let number = self.handovers;
        self.nodes[node].handover = Some(Handover {
            number,
            running: Process { end: Some(RunningEnd::default()), inbox: [Word::Hello].into(), step: 0 },
            successor: Process { end: Some(SuccessorEnd::default()), inbox: VecDeque::new(), step: 0 },
            has_claim: false,
            doom,
        });
        self.detail(node as u64, || format!("UPGRADE of node {node}: handover {number}, kills {doom:?}"));
        self.later(node, number, Turn::Running);
    }

    /// Gives a process its turn, after a time.
    fn later(&mut self, node: usize, number: u32, turn: Turn) {
        let rng = &mut self.streams.faults;
        let longest_ns = if rng.chance(0.05) && !self.scenario.keeps { 800 * MS } else { 3 * MS };
        let wait_ns = 1 + rng.below(longest_ns);
        self.after(wait_ns, Event::Handover(node, number, turn));
    }

    /// Carries out a turn of one of the two processes of a handover.
    pub(crate) fn handover(&mut self, node: usize, number: u32, turn: Turn) {
        if self.handover_of(node, number).is_none() || self.is_doomed_in_handover(node, number, turn) {
            return;
        }
        let Some(at) = self.handover_of(node, number) else { return };
        match turn {
            Turn::Running => {
                let Some(word) = at.running.inbox.pop_front() else { return };
                let fits = !self.streams.faults.chance(0.1);
                let input = match word {
                    Word::Hello => RunningInput::Hello { fits },
                    Word::Ready => RunningInput::Ready,
                    Word::Taken => RunningInput::Taken,
                    Word::Serves => RunningInput::Serves,
                    _ => RunningInput::Lost,
                };
                self.running_input(node, number, input);
            }
            Turn::Successor => {
                let Some(word) = at.successor.inbox.pop_front() else { return };
                let input = match word {
                    Word::Offer => SuccessorInput::Offered,
                    Word::Passed => SuccessorInput::Passed,
                    Word::Go => SuccessorInput::Go,
                    _ => SuccessorInput::Lost,
                };
                self.successor_input(node, number, input);
            }
            Turn::Stop => self.stop_for_successor(node, number),
            Turn::Mapped => {
                let fails = self.streams.faults.chance(0.05);
                self.successor_input(node, number, if fails { SuccessorInput::Lost } else { SuccessorInput::Mapped });
            }
            Turn::RunningDeadline(step) if at.running.step == step => {
                self.running_input(node, number, RunningInput::Lost);
            }
            Turn::SuccessorDeadline(step) if at.successor.step == step => {
                self.successor_input(node, number, SuccessorInput::Lost);
            }
            Turn::RunningDeadline(_) | Turn::SuccessorDeadline(_) => {}
        }
        self.check_handover(node, number);
    }

    fn handover_of(&mut self, node: usize, number: u32) -> Option<&mut Handover> {
        self.nodes[node].handover.as_mut().filter(|handover| handover.number == number)
    }

    /// Kills what is to be killed at this turn. Returns true if the turn is over: its process is among the victims. The
    /// other process goes on with its turn, as a process does whose peer dies.
    fn is_doomed_in_handover(&mut self, node: usize, number: u32, turn: Turn) -> bool {
        let is_calm = self.trouble.calm;
        // Where objects stay, only processes without memory in use are killed.
        let may = !is_calm && (!self.scenario.keeps || !self.nodes[node].up);
        let Some(at) = self.handover_of(node, number) else { return true };
        let Some((left, running, successor)) = &mut at.doom else { return false };
        *left = left.saturating_sub(1);
        if *left > 0 || !may {
            return false;
        }
        let (running, successor) = (*running, *successor);
        at.doom = None;
        self.statistics.memory.killed += 1;
        self.detail(number.into(), || format!("KILL in handover {number}: running {running}, successor {successor}"));
        if running {
            self.end_running(node, number);
        }
        if successor {
            self.end_successor(node, number, true);
        }
        if turn.is_of_running() { running } else { successor }
    }

    /// Gives the running process an input, and carries out what follows.
    fn running_input(&mut self, node: usize, number: u32, input: RunningInput) {
        let mut next = Some(input);
        while let Some(input) = next.take() {
            let Some(at) = self.handover_of(node, number) else { return };
            let Some(end) = &mut at.running.end else { return };
            let step = end.handle(input);
            at.running.step += 1;
            let (count, waits) = (at.running.step, !end.may_serve());
            self.detail(number.into(), || format!("handover {number}: {input:?} -> {step:?}"));
            match step {
                RunningStep::Wait if waits => {
                    let within_ns = if input == RunningInput::Went { SERVES_NS } else { REPLY_NS };
                    self.after(within_ns, Event::Handover(node, number, Turn::RunningDeadline(count)));
                }
                RunningStep::Wait => self.end_handover_if_over(node, number),
                RunningStep::Refuse => {
                    self.statistics.memory.refused += 1;
                    self.say_to_successor(node, number, Word::Refused);
                }
                RunningStep::Offer => _ = self.say_to_successor(node, number, Word::Offer),
                RunningStep::Stop => {
                    let wait = MovesWait::new(self.now_ns, PATIENCE_NS, MOST_NS);
                    self.nodes[node].departure = Some(Departure::Waits { wait, news: None });
                    self.later(node, number, Turn::Stop);
                }
                RunningStep::Pass => {
                    let sent = self.say_to_successor(node, number, Word::Passed);
                    if let Some(at) = self.handover_of(node, number).filter(|_| sent) {
                        at.has_claim = true;
                    }
                    next = Some(if sent { RunningInput::Passed } else { RunningInput::Lost });
                }
                RunningStep::Go => {
                    let sent = self.say_to_successor(node, number, Word::Go);
                    next = Some(if sent { RunningInput::Went } else { RunningInput::Lost });
                }
                RunningStep::Resume => {
                    self.statistics.memory.resumed += 1;
                    self.begin_node(node, false, true);
                    next = Some(RunningInput::Resumed);
                }
                RunningStep::End => self.end_running(node, number),
            }
        }
    }

    /// Gives the successor an input, and carries out what follows.
    fn successor_input(&mut self, node: usize, number: u32, input: SuccessorInput) {
        let serves_early = self.scenario.has(Mischief::ServeEarly) && input == SuccessorInput::Passed;
        let Some(at) = self.handover_of(node, number) else { return };
        let Some(end) = &mut at.successor.end else { return };
        let step = end.handle(input);
        at.successor.step += 1;
        let count = at.successor.step;
        self.detail(number.into(), || format!("handover {number}: successor, {input:?} -> {step:?}"));
        match step {
            SuccessorStep::Map => self.later(node, number, Turn::Mapped),
            SuccessorStep::Ask => self.say_to_running(node, number, Word::Ready),
            SuccessorStep::Confirm => {
                self.say_to_running(node, number, Word::Taken);
                self.after(REPLY_NS, Event::Handover(node, number, Turn::SuccessorDeadline(count)));
            }
            SuccessorStep::Serve => {
                self.statistics.memory.upgrades += 1;
                self.begin_node(node, false, true);
                self.say_to_running(node, number, Word::Serves);
            }
            SuccessorStep::Wait => {}
            SuccessorStep::End => self.end_successor(node, number, false),
        }
        // A host that takes the claim for the last word.
        if serves_early {
            self.begin_node(node, false, true);
        }
    }

    /// Sends the successor a message; returns false if it has ended.
    fn say_to_successor(&mut self, node: usize, number: u32, word: Word) -> bool {
        let Some(at) = self.handover_of(node, number).filter(|at| at.successor.end.is_some()) else { return false };
        at.successor.inbox.push_back(word);
        self.later(node, number, Turn::Successor);
        true
    }

    fn say_to_running(&mut self, node: usize, number: u32, word: Word) {
        let Some(at) = self.handover_of(node, number).filter(|at| at.running.end.is_some()) else { return };
        at.running.inbox.push_back(word);
        self.later(node, number, Turn::Running);
    }

    /// Stops the shards of the running process once no slot migrates; it serves on if that takes too long.
    fn stop_for_successor(&mut self, node: usize, number: u32) {
        if !self.nodes[node].up {
            return;
        }
        let incarnation = Incarnation(self.nodes[node].incarnation);
        let input = Input::PrepareLeave { node: NodeId(node as u64 + 1), incarnation };
        self.tell_control(Party::Node(node), Message::Node(node, incarnation.0, input));
        let (left, now_ns) = (self.moves_left(node), self.now_ns);
        let over = match &mut self.nodes[node].departure {
            Some(Departure::Waits { wait, news }) => wait.is_over(left, *news, now_ns),
            _ => Some(u64::MAX),
        };
        match over {
            None => self.after(LOOK_NS, Event::Handover(node, number, Turn::Stop)),
            Some(0) if self.awaits_copy(node) => {
                self.after(100 * US, Event::Handover(node, number, Turn::Stop));
            }
            Some(0) => {
                self.nodes[node].departure = None;
                if self.end_shards(node) {
                    self.running_input(node, number, RunningInput::Stopped);
                } else {
                    self.statistics.memory.killed += 1;
                    self.end_running(node, number);
                }
            }
            Some(_) => {
                self.nodes[node].departure = None;
                self.running_input(node, number, RunningInput::CannotStop);
            }
        }
    }

    /// Ends the process that serves, or has served, the node.
    fn end_running(&mut self, node: usize, number: u32) {
        let Some(at) = self.handover_of(node, number) else { return };
        let Some(end) = at.running.end.take() else { return };
        let is_over = at.successor.end.is_some_and(|end| end.may_serve());
        if end.may_serve() && self.nodes[node].up {
            self.crash_node(node);
        }
        // The supervisor starts the unit again, unless another process is its main one by now.
        if !is_over {
            self.start_soon(node);
        }
        self.say_to_successor(node, number, Word::Closed);
        self.end_handover_if_over(node, number);
    }

    fn end_successor(&mut self, node: usize, number: u32, is_killed: bool) {
        let Some(at) = self.handover_of(node, number) else { return };
        let Some(end) = at.successor.end.take() else { return };
        if end.may_serve() && is_killed {
            if self.nodes[node].up {
                self.crash_node(node);
            }
            self.start_soon(node);
        }
        self.say_to_running(node, number, Word::Closed);
        self.end_handover_if_over(node, number);
    }

    fn start_soon(&mut self, node: usize) {
        let down_ns = 1 + self.streams.faults.below(200 * MS);
        self.after(down_ns, Event::StartNode(node));
    }

    /// Forgets a handover of which at most one process is left, which has nothing to do any more.
    fn end_handover_if_over(&mut self, node: usize, number: u32) {
        let Some(at) = self.handover_of(node, number) else { return };
        let is_over = match (&at.running.end, &at.successor.end) {
            (None, None) => true,
            (Some(end), None) => *end == RunningEnd::default() && at.running.inbox.is_empty(),
            (None, Some(end)) => end.may_serve(),
            (Some(_), Some(_)) => false,
        };
        if is_over {
            self.nodes[node].handover = None;
        }
    }

    /// Tells the other process of a handover that the one that served the node was killed.
    pub(crate) fn end_serving_process(&mut self, node: usize) {
        let Some(at) = &mut self.nodes[node].handover else { return };
        let number = at.number;
        if at.successor.end.is_some_and(|end| end.may_serve()) {
            at.successor.end = None;
            self.say_to_running(node, number, Word::Closed);
        } else if at.running.end.is_some_and(|end| end.may_serve()) {
            at.running.end = None;
            self.say_to_successor(node, number, Word::Closed);
        }
        self.end_handover_if_over(node, number);
    }

    /// Checks that at most one process of a handover may serve, and that none does that may not.
    fn check_handover(&mut self, node: usize, number: u32) {
        let is_up = self.nodes[node].up;
        let Some(at) = self.handover_of(node, number) else { return };
        let serving = at.serving();
        let has_third = is_up && serving == 0 && at.is_claimed();
        if serving > 1 || has_third {
            let what = format!("node {node} is served by {serving} processes of {at:?}, and up: {is_up}");
            self.violate(broken(Rule::Kept, what));
        }
    }
}
