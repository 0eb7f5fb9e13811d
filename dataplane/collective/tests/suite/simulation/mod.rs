//! Simulation of a world whose processes run real members over real bytes: a network that breaks, processes that die,
//! stop and begin again, slow callers, and a control plane that restarts, in virtual time. A seed reproduces it.
//!
//! Checked at every step: a result is, byte for byte, that of the participants of the view that its completion names;
//! no two members of a view disagree about the view of an operation; sources stay as they are, and memory is the
//! caller's again afterwards; nothing waits beyond its deadline, and nothing grows. Checked at the end, after all
//! faults are over: all live members follow one view, and their operations advance.

mod network;
mod process;
mod sweep;
mod workload;

use std::collections::{BTreeMap, BTreeSet};

use kvplane_collective::{Member, MemberConfig, MemberCounts};
use kvplane_group::*;
use kvplane_proto::rng::Rng;

use crate::collectives::{LIMIT, THRESHOLDS};
use network::{Network, pair};
use process::{Habits, Process};
use workload::Workload;

pub(crate) const MS: u64 = 1_000_000;
/// Times of the members.
pub(crate) const CONFIG: MemberConfig = MemberConfig { verdict_ns: 400 * MS, thresholds: THRESHOLDS };
/// Shorter than the defaults, so that a simulation ends sooner.
const WORLD: WorldConfig = WorldConfig {
    interval_ns: 100 * MS,
    refused_ns: 250 * MS,
    overdue_ns: 300 * MS,
    silence_ns: 2_000 * MS,
    reconnect_ns: 300 * MS,
    fence_ns: 1_500 * MS,
    proposal_ns: 2_000 * MS,
    grace_ns: 500 * MS,
    forget_ns: 600_000 * MS,
    groups: 256,
    proposals: 64,
};

/// Fault of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Kill,
    Stop,
    /// It and its neighbour do not reach each other.
    CutPair,
    /// It and the control plane do not reach each other.
    CutOff,
    /// The control plane dies; the rank does not matter.
    KillControl,
    /// The control plane dies with the rank.
    KillBoth,
}

/// Event that is delivered at a time.
#[derive(Debug)]
enum Delivery {
    /// A frame may have arrived.
    Frame {
        from: WorldRank,
        to: WorldRank,
    },
    Report(Report),
    Status(ProcessId, Status),
}

pub(crate) struct Simulation {
    seed: u64,
    rng: Rng,
    pub(crate) now_ns: u64,
    ranks: u8,
    founders: u8,
    mode: FailureMode,
    workload: Workload,
    pub(crate) habits: Habits,
    world: Option<World>,
    term: u32,
    records: BTreeMap<GroupId, GroupRecord>,
    processes: BTreeMap<WorldRank, Process>,
    /// Ranks whose process was killed, and has no successor yet.
    killed: BTreeSet<WorldRank>,
    /// Pairs of ranks, and ranks, that are cut off from each other, and from the control plane.
    cut_pairs: BTreeSet<(WorldRank, WorldRank)>,
    cut_off: BTreeSet<WorldRank>,
    network: Network,
    deliveries: BTreeMap<(u64, u64), Delivery>,
    sent: u64,
    /// Frames that have arrived.
    pub(crate) frames: u64,
    /// Fault of a rank when so many frames have arrived.
    pub(crate) planned: Option<(u64, Fault, WorldRank)>,
    next_incarnation: u64,
    next_proposal: u64,
    pub(crate) views: BTreeMap<u64, View>,
    /// Operations that ended with a result.
    pub(crate) results: u64,
    /// Counters of all members whose processes have ended.
    pub(crate) counts: MemberCounts,
}

impl Simulation {
    pub(crate) fn new(seed: u64, (ranks, founders): (u8, u8), mode: FailureMode, workload: Workload) -> Self {
        let mut simulation = Self {
            seed,
            rng: Rng::new(seed, "collectives"),
            now_ns: 0,
            ranks,
            founders,
            mode,
            workload,
            habits: Habits { late: 500, pause_ns: 3 * MS, has_messages: true, timeout_ns: (100 * MS, 600 * MS) },
            world: None,
            term: 0,
            records: BTreeMap::new(),
            processes: BTreeMap::new(),
            killed: (founders..ranks).map(WorldRank).collect(),
            cut_pairs: BTreeSet::new(),
            cut_off: BTreeSet::new(),
            network: Network::default(),
            deliveries: BTreeMap::new(),
            sent: 0,
            frames: 0,
            planned: None,
            next_incarnation: 1,
            next_proposal: 0,
            views: BTreeMap::new(),
            results: 0,
            counts: MemberCounts::default(),
        };
        simulation.start_control();
        (0..founders).for_each(|at| {
            let rank = simulation.order()[usize::from(at)];
            simulation.begin(rank, false);
        });
        let founding: BTreeSet<_> = simulation.processes.keys().copied().collect();
        simulation.killed = (0..ranks).map(WorldRank).filter(|rank| !founding.contains(rank)).collect();
        simulation
    }

    /// Ranks of the world by rank in the group: in half of the seeds the other way round.
    fn order(&self) -> Vec<WorldRank> {
        let at = |at: u8| if self.seed % 2 == 1 { self.ranks - 1 - at } else { at };
        (0..self.ranks).map(|rank| WorldRank(at(rank))).collect()
    }

    fn world_ranks(&self) -> impl Iterator<Item = WorldRank> + use<> {
        (0..self.ranks).map(WorldRank)
    }

    pub(crate) fn start_control(&mut self) {
        self.term += 1;
        let records = self.records.values().cloned().collect();
        self.world = Some(World::start("job", WORLD, records, self.term, 7, self.now_ns));
    }

    pub(crate) fn kill_control(&mut self) {
        self.world = None;
        self.deliveries.retain(|_, delivery| matches!(delivery, Delivery::Frame { .. }));
    }

    fn begin(&mut self, rank: WorldRank, is_joiner: bool) {
        let id = ProcessId { rank, incarnation: self.next_incarnation };
        self.next_incarnation += 1;
        let former = self.processes.insert(rank, Process::new(id, is_joiner, self.seed));
        self.count(former);
        self.killed.remove(&rank);
    }

    fn count(&mut self, ended: Option<Process>) {
        let Some(counts) = ended.and_then(|process| Some(process.member()?.counts())) else { return };
        self.counts.completed += counts.completed;
        self.counts.ended += counts.ended;
        self.counts.repeated += counts.repeated;
        self.counts.fetched += counts.fetched;
        self.counts.stale += counts.stale;
        self.counts.unexpected += counts.unexpected;
        self.counts.kept += counts.kept;
    }

    fn begin_again(&mut self, rank: WorldRank) {
        let joins = self.records.values().any(|record| record.view.epoch > 0);
        self.begin(rank, joins);
    }

    pub(crate) fn kill(&mut self, rank: WorldRank) {
        let former = self.processes.remove(&rank);
        if former.is_some() {
            self.count(former);
            self.killed.insert(rank);
            self.break_connections(rank);
        }
    }

    fn break_connections(&mut self, rank: WorldRank) {
        for peer in self.world_ranks() {
            self.disconnect(rank, peer);
        }
    }

    fn disconnect(&mut self, one: WorldRank, other: WorldRank) {
        if !self.network.disconnect(one, other) {
            return;
        }
        for (at, peer) in [(one, other), (other, one)] {
            let Some(process) = self.processes.get_mut(&at) else { continue };
            process.outbox.remove(&peer);
            let peer = process.rank_of(peer);
            if let (Some(host), Some(peer)) = (&mut process.host, peer) {
                host.member.lose(RankSet::single(peer));
                host.drain();
            }
        }
    }

    pub(crate) fn stop(&mut self, rank: WorldRank, is_stopped: bool) {
        if let Some(process) = self.processes.get_mut(&rank) {
            process.is_stopped = is_stopped;
        }
    }

    pub(crate) fn cut(&mut self, one: WorldRank, other: WorldRank) {
        if one != other {
            self.cut_pairs.insert(pair(one, other));
            self.disconnect(one, other);
        }
    }

    pub(crate) fn cut_off(&mut self, rank: WorldRank) {
        self.cut_off.insert(rank);
    }

    fn deliver(&mut self, delivery: Delivery, most_ns: u64) {
        let at = self.now_ns + 10_000 + self.rng.below(most_ns);
        self.deliver_at(delivery, at);
    }

    fn deliver_at(&mut self, delivery: Delivery, at_ns: u64) {
        self.sent += 1;
        self.deliveries.insert((at_ns, self.sent), delivery);
    }

    fn is_cut(&self, one: WorldRank, other: WorldRank) -> bool {
        self.cut_pairs.contains(&pair(one, other))
    }

    fn spec(&self, is_joining: bool) -> GroupSpec {
        let mut order = self.order();
        if !is_joining {
            order.truncate(usize::from(self.founders));
        }
        GroupSpec { name: "g".into(), order, max_size: self.ranks, failure_mode: self.mode, is_joining }
    }

    /// Lets the control plane process an input, and carries out its outputs.
    fn input(&mut self, input: Input) -> Result<Reply, Rejection> {
        let Some(world) = &mut self.world else { return Ok(Reply::Done) };
        let reply = world.handle(input, self.now_ns);
        let mut changed = Vec::new();
        let mut has_new_view = false;
        while let Some(output) = world.poll_output() {
            match output {
                Output::Persist(record) => {
                    let view = &record.view;
                    if view.epoch > 0 {
                        // A group that grows is made durable again in its view.
                        let is_same = |known: &View| {
                            (known.active, known.failed, known.resolution)
                                == (view.active, view.failed, view.resolution)
                        };
                        let known = self.views.insert(view.epoch, view.clone());
                        assert!(known.as_ref().is_none_or(is_same), "two views of epoch {}", view.epoch);
                        has_new_view |= known.is_none();
                    }
                    self.records.insert(record.group, record);
                }
                Output::Forget(group) => {
                    self.records.remove(&group);
                }
                Output::Changed(rank) => changed.push(rank),
            }
        }
        for rank in changed {
            self.send_status(rank);
        }
        if has_new_view {
            self.check_agreement();
        }
        reply
    }

    fn send_status(&mut self, rank: WorldRank) {
        let Some(world) = &self.world else { return };
        let Some(process) = world.process(rank) else { return };
        let status = world.status(process).expect("a registered process");
        if !self.cut_off.contains(&rank) {
            self.deliver(Delivery::Status(process, status), 3 * MS);
        }
    }

    fn report_of(&self, rank: WorldRank) -> Option<Report> {
        let process = self.processes.get(&rank)?;
        let refused = self.killed.iter().copied().filter(|peer| !self.is_cut(rank, *peer)).collect();
        let overdue = process.member().map(|member| process.in_world(member.overdue())).unwrap_or_default();
        let groups = process.member().map(Member::report).into_iter().collect();
        let linked = self.network.peers(rank).union(RankSet::single(rank));
        Some(Report { process: process.id, roster: process.roster, linked, refused, overdue, groups })
    }

    /// Lets a process continue, send and report.
    fn drive(&mut self, rank: WorldRank, is_tick: bool) {
        let Some(process) = self.processes.get_mut(&rank).filter(|process| !process.is_stopped) else { return };
        process.advance(self.now_ns, &self.workload, self.habits);
        self.check_results(rank);
        self.send_frames(rank, is_tick);
        // Sending may have ended something.
        let Some(process) = self.processes.get_mut(&rank) else { return };
        process.advance(self.now_ns, &self.workload, self.habits);
        self.check_results(rank);
        let Some(process) = self.processes.get_mut(&rank) else { return };
        process.check_limits(self.now_ns);
        let state = process.member().map(|member| (member.report(), member.overdue()));
        let has_changed = state != process.reported;
        process.reported = state;
        let is_periodic = is_tick && (self.now_ns / MS + u64::from(rank.0) * 7).is_multiple_of(100);
        if (is_periodic || has_changed)
            && !self.cut_off.contains(&rank)
            && self.world.is_some()
            && let Some(report) = self.report_of(rank)
        {
            self.deliver(Delivery::Report(report), 3 * MS);
        }
    }

    fn send_frames(&mut self, rank: WorldRank, is_tick: bool) {
        self.empty_outbox(rank, is_tick);
        let most = 1 + self.rng.below(6) as usize;
        let limit = LIMIT << self.rng.below(2);
        loop {
            let Some(process) = self.processes.get_mut(&rank) else { return };
            let Some(host) = &mut process.host else { return };
            let mut room = RankSet::EMPTY;
            for (at, peer) in process.order.iter().enumerate() {
                let waiting =
                    self.network.waiting(rank, *peer) + process.outbox.get(peer).map_or(0, |frames| frames.len());
                if *peer != rank && self.network.is_connected(rank, *peer) && waiting < most && self.rng.below(5) > 0 {
                    room.insert(GroupRank(at as u8));
                }
            }
            let Some((to, frame)) = host.next_frame(room, limit) else { break };
            assert!(room.contains(to), "a frame without room");
            let to = process.order[usize::from(to.0)];
            process.outbox.entry(to).or_default().push_back(frame);
            if self.rng.below(8) > 0 {
                self.empty_outbox(rank, true);
            }
        }
    }

    /// Sends the frames that the member has given, unless they are of no use any longer.
    fn empty_outbox(&mut self, rank: WorldRank, is_all: bool) {
        if !is_all && self.rng.below(2) == 0 {
            return;
        }
        let Some(process) = self.processes.get_mut(&rank) else { return };
        let outbox = std::mem::take(&mut process.outbox);
        let Some(member) = process.member() else { return };
        let frames = outbox.into_iter().flat_map(|(to, frames)| frames.into_iter().map(move |frame| (to, frame)));
        let frames: Vec<_> = frames.filter(|(_, frame)| member.may_send(&frame.head)).collect();
        for (to, frame) in frames {
            // Some are on their way for longer than a change of the view takes.
            let most_ns = if self.rng.below(60) == 0 { 40 * MS } else { MS };
            let at_ns = self.now_ns + 5_000 + self.rng.below(most_ns);
            let at_ns = self.network.send(rank, to, at_ns, frame);
            self.deliver_at(Delivery::Frame { from: rank, to }, at_ns);
        }
    }

    fn apply(&mut self, delivery: Delivery) {
        match delivery {
            Delivery::Frame { from, to } => self.arrive(from, to),
            Delivery::Report(report) => self.apply_report(report),
            Delivery::Status(to, status) => {
                let Some(process) = self.processes.get_mut(&to.rank).filter(|process| process.id == to) else { return };
                if process.is_stopped {
                    self.deliver(Delivery::Status(to, status), 20 * MS);
                } else if !self.cut_off.contains(&to.rank) {
                    process.follow(&status, self.now_ns);
                    self.drive(to.rank, false);
                }
            }
        }
    }

    /// Lets the next frame of a connection arrive. A process that is stopped takes none.
    fn arrive(&mut self, from: WorldRank, to: WorldRank) {
        let Some(process) = self.processes.get_mut(&to).filter(|process| !process.is_stopped) else { return };
        let Some(frame) = self.network.receive(from, to, self.now_ns) else { return };
        let Some(host) = &mut process.host else { return };
        host.take(frame);
        self.frames += 1;
        if let Some((_, fault, rank)) = self.planned.take_if(|(at, ..)| *at == self.frames) {
            self.fail(fault, rank);
        }
        self.drive(to, false);
        // The sender has room again.
        self.drive(from, false);
    }

    /// Lets all that has arrived at a process be processed: it was stopped.
    fn catch_up(&mut self) {
        let pairs: Vec<_> = self.world_ranks().flat_map(|from| self.world_ranks().map(move |to| (from, to))).collect();
        for (from, to) in pairs {
            let is_running = self.processes.get(&to).is_some_and(|process| !process.is_stopped);
            if is_running && self.network.waiting(from, to) > 0 {
                self.arrive(from, to);
            }
        }
    }

    /// Applies a report as the host of the control plane does, and as its process does with the answer.
    fn apply_report(&mut self, report: Report) {
        let process = report.process;
        if self.cut_off.contains(&process.rank) || self.world.is_none() {
            return;
        }
        let has_group = !report.groups.is_empty();
        let is_joiner = self.processes.get(&process.rank).is_some_and(|found| found.is_joiner);
        match self.input(Input::Report { report }) {
            Ok(_) if has_group => {}
            Ok(_) => {
                let spec = self.spec(is_joiner);
                let _ = self.input(Input::Attach { process, spec });
            }
            Err(Rejection::UnknownProcess { .. }) => {
                let address = format!("rank-{}", process.rank.0);
                let _ = self.input(Input::Register { process: kvplane_group::Process { id: process, address } });
                let spec = self.spec(is_joiner || self.records.values().any(|record| record.view.epoch > 0));
                let _ = self.input(Input::Attach { process, spec });
            }
            // It was declared dead, and has found out: it begins again.
            Err(Rejection::Ended { .. }) => {
                if self.processes.get(&process.rank).is_some_and(|found| found.id == process) {
                    self.break_connections(process.rank);
                    self.begin_again(process.rank);
                }
            }
            Err(other) => panic!("{other}"),
        }
        self.send_status(process.rank);
    }

    fn propose(&mut self) {
        let proposer = self.processes.values().find(|process| process.host.is_some() && !process.is_stopped);
        let Some((id, group)) = proposer.and_then(|process| Some((process.id, process.member()?.report().group)))
        else {
            return;
        };
        let waits = |process: &&Process| process.host.is_some() && !process.participates();
        let waiting: RankSet<GroupRank> =
            self.processes.values().filter(waits).filter_map(|process| Some(process.member()?.rank())).collect();
        let change = match waiting.is_empty() {
            true if self.mode == FailureMode::Deferred => Change::DeactivateFailed,
            true => return,
            false => Change::Activate(waiting),
        };
        self.next_proposal += 1;
        let id = ProposalId { process: id, number: self.next_proposal };
        let _ = self.input(Input::Propose { id, group, change });
    }

    fn propose_exclusion(&mut self, rank: WorldRank) {
        let Some(process) = self.processes.get(&rank) else { return };
        let Some(member) = process.member() else { return };
        self.next_proposal += 1;
        let id = ProposalId { process: process.id, number: self.next_proposal };
        let (group, change) = (member.report().group, Change::Deactivate(RankSet::single(member.rank())));
        let _ = self.input(Input::Propose { id, group, change });
    }

    /// Connects processes that can be.
    fn connect(&mut self) {
        let can = |simulation: &Self, rank| {
            simulation.processes.get(&rank).is_some_and(|process: &Process| !process.is_stopped)
        };
        for one in self.world_ranks() {
            for other in self.world_ranks().filter(|other| *other > one) {
                if self.network.is_connected(one, other)
                    || self.is_cut(one, other)
                    || !can(self, one)
                    || !can(self, other)
                    || self.rng.below(10) > 0
                {
                    continue;
                }
                self.network.connect(one, other);
                for (at, peer) in [(one, other), (other, one)] {
                    let Some(process) = self.processes.get_mut(&at) else { continue };
                    let peer = process.rank_of(peer);
                    if let (Some(host), Some(peer)) = (&mut process.host, peer) {
                        host.member.link(RankSet::single(peer));
                    }
                }
            }
        }
    }

    /// Runs for a time, with faults if `chaos` is greater than 0: one in so many milliseconds.
    pub(crate) fn run(&mut self, duration_ms: u64, chaos: u64) {
        let until = self.now_ns + duration_ms * MS;
        while self.now_ns < until {
            if chaos > 0 && self.rng.below(chaos) == 0 {
                self.break_something();
            }
            self.step();
        }
    }

    /// Runs for a millisecond.
    pub(crate) fn step(&mut self) {
        let next = self.now_ns + MS;
        while let Some(entry) = self.deliveries.first_entry().filter(|entry| entry.key().0 <= next) {
            self.now_ns = self.now_ns.max(entry.key().0);
            let delivery = entry.remove();
            self.apply(delivery);
        }
        self.now_ns = next;
        let at = self.now_ns / MS;
        self.connect();
        self.catch_up();
        self.world_ranks().for_each(|rank| self.drive(rank, true));
        if at.is_multiple_of(20) {
            let _ = self.input(Input::Tick);
        }
        if at.is_multiple_of(50) {
            self.propose();
        }
    }

    fn fail(&mut self, fault: Fault, rank: WorldRank) {
        match fault {
            Fault::Kill => self.kill(rank),
            Fault::Stop => self.stop(rank, true),
            Fault::CutPair => self.cut(rank, WorldRank((rank.0 + 1) % self.ranks)),
            Fault::CutOff => self.cut_off(rank),
            Fault::KillControl => self.kill_control(),
            Fault::KillBoth => {
                self.kill_control();
                self.kill(rank);
            }
        }
    }

    /// Begins a fault, or ends one: there are at most two of them, so that the group works most of the time.
    fn break_something(&mut self) {
        let rank = WorldRank(self.rng.below(u64::from(self.ranks)) as u8);
        let other = WorldRank(self.rng.below(u64::from(self.ranks)) as u8);
        let stopped = self.processes.values().filter(|process| process.is_stopped).count();
        let faults = self.killed.len() + stopped + self.cut_pairs.len() + self.cut_off.len();
        let is_full = faults + usize::from(self.world.is_none()) >= 2;
        match self.rng.below(14) {
            0 | 1 if !is_full && self.processes.len() > 1 => self.kill(rank),
            2 if !is_full => self.stop(rank, true),
            3 if !is_full => self.cut(rank, other),
            4 if !is_full => self.cut_off(rank),
            5 if !is_full => self.kill_control(),
            // A connection that breaks and comes back.
            6..=9 => self.disconnect(rank, other),
            10 => self.propose_exclusion(rank),
            _ => self.end_fault(),
        }
    }

    /// Ends one of the faults, if there are some.
    fn end_fault(&mut self) {
        let first = self.rng.below(5);
        for kind in first..first + 5 {
            let has_ended = match kind % 5 {
                0 => self.killed.first().copied().map(|rank| self.begin_again(rank)).is_some(),
                1 => {
                    let stopped = self.processes.values_mut().find(|process| process.is_stopped);
                    stopped.map(|process| process.is_stopped = false).is_some()
                }
                2 => self.cut_pairs.pop_first().is_some(),
                3 => self.cut_off.pop_first().is_some(),
                _ if self.world.is_none() => {
                    self.start_control();
                    true
                }
                _ => false,
            };
            if has_ended {
                return;
            }
        }
    }

    /// Ends all faults, and the pauses of callers.
    pub(crate) fn heal(&mut self) {
        self.cut_pairs.clear();
        self.cut_off.clear();
        (self.habits.late, self.habits.pause_ns) = (0, 25 * MS);
        if self.world.is_none() {
            self.start_control();
        }
        for rank in self.world_ranks() {
            self.stop(rank, false);
            if self.killed.contains(&rank) {
                self.begin_again(rank);
            }
        }
    }

    /// Ends all processes, and returns the counters of their members.
    pub(crate) fn end(mut self) -> MemberCounts {
        for process in std::mem::take(&mut self.processes).into_values() {
            self.count(Some(process));
        }
        self.counts
    }

    /// Checks the results that a process has got.
    fn check_results(&mut self, rank: WorldRank) {
        let Some(process) = self.processes.get_mut(&rank) else { return };
        let finished = std::mem::take(&mut process.finished);
        if finished.is_empty() {
            return;
        }
        for finished in finished {
            let process::CallEnd { number, rank, operation, completion, target } = finished;
            let view = self.views.get(&completion.epoch).unwrap_or_else(|| panic!("no view {}", completion.epoch));
            let sets = (view.participants(), completion.failed);
            if let Err(wrong) = self.workload.check(number, rank, &operation, sets, &target) {
                panic!("seed {}, view {}: {wrong}", self.seed, completion.epoch);
            }
            self.results += 1;
        }
        self.check_agreement();
    }

    /// Checks that the members of the newest view agree about the view of each operation.
    fn check_agreement(&self) {
        let Some(view) = self.views.values().next_back() else { return };
        let is_in = |process: &&Process| {
            process.participates()
                && process.member().is_some_and(|member| {
                    let at = usize::from(member.rank().0);
                    view.participants().contains(member.rank()) && view.incarnations[at] == Some(process.id.incarnation)
                })
        };
        let mut agreed: BTreeMap<u64, (u64, WorldRank)> = BTreeMap::new();
        for process in self.processes.values().filter(is_in) {
            for (number, epoch) in process.results.iter().rev().take(8) {
                let (first, by) = *agreed.entry(*number).or_insert((*epoch, process.id.rank));
                assert_eq!(
                    first, *epoch,
                    "seed {}, operation {number}: {by:?} has it of another view than {:?}",
                    self.seed, process.id.rank
                );
            }
        }
    }

    /// Checks that all members follow one view of all ranks, and that their operations advance.
    pub(crate) fn check_healed(&mut self) {
        let before = self.results;
        self.run(2_000, 0);
        let epochs: BTreeSet<u64> = self.processes.values().map(|process| process.view().epoch).collect();
        assert_eq!(epochs.len(), 1, "seed {}: members follow views {epochs:?}", self.seed);
        let all = RankSet::first(usize::from(self.ranks));
        for process in self.processes.values() {
            assert_eq!(process.view().participants(), all, "seed {}: the view of {process:?}", self.seed);
            let host = process.host.as_ref().expect("a member");
            assert!(host.kept() <= 200, "{} payloads are kept in the end", host.kept());
        }
        let results = self.results - before;
        assert!(results > 10 * u64::from(self.ranks), "seed {}: {results} results in the end", self.seed);
    }
}

/// Number in a variable of the environment.
fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn simulate(seed: u64) -> MemberCounts {
    let ranks = 2 + (seed % 5) as u8;
    let founders = if seed.is_multiple_of(3) { ranks.min(2) } else { ranks };
    let mode = if seed % 4 == 3 { FailureMode::Deferred } else { FailureMode::Automatic };
    let mut simulation =
        Simulation::new(seed, (ranks, founders), mode, Workload::Random { seed, roots: ranks.min(founders) });
    simulation.run(200, 0);
    simulation.run(5_000, 60);
    simulation.heal();
    simulation.run(5_000, 0);
    simulation.check_healed();
    simulation.end()
}

/// `KVPLANE_COLLECTIVE_SEEDS` seeds, from `KVPLANE_SEED` on.
#[test]
fn seeds() {
    let mut all = MemberCounts::default();
    let (from, count) = (number("KVPLANE_SEED", 0), number("KVPLANE_COLLECTIVE_SEEDS", 20));
    for seed in from..from + count {
        println!("seed {seed}");
        let counts = simulate(seed);
        all.completed += counts.completed;
        all.ended += counts.ended;
        all.repeated += counts.repeated;
        all.fetched += counts.fetched;
        all.stale += counts.stale;
    }
    println!("{all:?}");
    let has_all = all.repeated > 0 && all.fetched > 0 && all.ended > 0 && all.stale > 0;
    assert!(has_all || count < 20, "faults have no effect: {all:?}");
}
