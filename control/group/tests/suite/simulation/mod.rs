//! Simulation of a world: processes that run collectives, a network that breaks, and a control plane that restarts, in
//! virtual time. A seed reproduces it.
//!
//! Checked at every step: no two members of a view disagree about who contributed to an operation that both completed,
//! every result has the ranks of one view, a view's epoch never goes back, and no status changes unannounced. Checked
//! at the end, after all faults are over: all live members follow one view, and their operations advance.

mod process;

use std::collections::{BTreeMap, BTreeSet};

use kvplane_group::*;
use kvplane_proto::rng::Rng;

use process::{Frame, Member};

const MS: u64 = 1_000_000;
/// Shorter than the defaults, so that a simulation ends sooner.
const CONFIG: WorldConfig = WorldConfig {
    interval_ns: 100 * MS,
    refused_ns: 250 * MS,
    overdue_ns: 500 * MS,
    silence_ns: 4_000 * MS,
    reconnect_ns: 300 * MS,
    fence_ns: 3_000 * MS,
    proposal_ns: 3_000 * MS,
    grace_ns: 1_000 * MS,
    forget_ns: 600_000 * MS,
    groups: 256,
    proposals: 64,
};

/// Event that is delivered at a time.
#[derive(Debug)]
enum Delivery {
    Frame(WorldRank, u64, Frame),
    Broken { at: WorldRank, peer: WorldRank },
    Report(Report),
    Status(ProcessId, Status),
}

pub(crate) struct Simulation {
    rng: Rng,
    now_ns: u64,
    ranks: u8,
    world: Option<World>,
    config: WorldConfig,
    term: u32,
    records: BTreeMap<GroupId, GroupRecord>,
    members: BTreeMap<WorldRank, Member>,
    /// Ranks whose process was killed, and has no successor yet.
    killed: BTreeSet<WorldRank>,
    /// Pairs of ranks, and ranks, that are cut off from each other, and from the control plane.
    cut_pairs: BTreeSet<(WorldRank, WorldRank)>,
    cut_off: BTreeSet<WorldRank>,
    deliveries: BTreeMap<(u64, u64), Delivery>,
    sent: u64,
    next_incarnation: u64,
    next_proposal: u64,
    views: BTreeMap<u64, View>,
    /// Status of each process as it was announced last.
    announced: BTreeMap<ProcessId, Status>,
    mode: FailureMode,
    seed: u64,
}

impl Simulation {
    pub(crate) fn new(seed: u64, ranks: u8, mode: FailureMode) -> Self {
        let mut simulation = Self {
            rng: Rng::new(seed, "groups"),
            now_ns: 0,
            ranks,
            world: None,
            config: CONFIG,
            term: 0,
            records: BTreeMap::new(),
            members: BTreeMap::new(),
            killed: BTreeSet::new(),
            cut_pairs: BTreeSet::new(),
            cut_off: BTreeSet::new(),
            deliveries: BTreeMap::new(),
            sent: 0,
            next_incarnation: 1,
            next_proposal: 0,
            views: BTreeMap::new(),
            announced: BTreeMap::new(),
            mode,
            seed,
        };
        simulation.start_control();
        (0..ranks).for_each(|rank| simulation.begin(WorldRank(rank), false));
        simulation
    }

    pub(crate) fn start_control(&mut self) {
        self.term += 1;
        let records = self.records.values().cloned().collect();
        self.announced.clear();
        self.world = Some(World::start("job", self.config, records, self.term, 7, self.now_ns));
    }

    pub(crate) fn kill_control(&mut self) {
        self.world = None;
        self.deliveries.retain(|_, delivery| !matches!(delivery, Delivery::Report(_) | Delivery::Status(..)));
    }

    fn begin(&mut self, rank: WorldRank, is_joiner: bool) {
        let id = ProcessId { rank, incarnation: self.next_incarnation };
        self.next_incarnation += 1;
        self.members.insert(rank, Member::new(id, is_joiner));
        self.killed.remove(&rank);
    }

    pub(crate) fn kill(&mut self, rank: WorldRank) {
        if self.members.remove(&rank).is_some() {
            self.killed.insert(rank);
            self.break_connections(rank);
        }
    }

    fn break_connections(&mut self, rank: WorldRank) {
        for peer in (0..self.ranks).map(WorldRank).filter(|peer| *peer != rank) {
            self.deliver(Delivery::Broken { at: peer, peer: rank }, 1);
        }
    }

    pub(crate) fn stop(&mut self, rank: WorldRank, is_stopped: bool) {
        if let Some(member) = self.members.get_mut(&rank) {
            member.is_stopped = is_stopped;
        }
    }

    fn deliver(&mut self, delivery: Delivery, most_ms: u64) {
        let at = self.now_ns + 10_000 + self.rng.below(most_ms * MS);
        self.sent += 1;
        self.deliveries.insert((at, self.sent), delivery);
    }

    fn is_cut(&self, one: WorldRank, other: WorldRank) -> bool {
        self.cut_pairs.contains(&(one.min(other), one.max(other)))
    }

    fn spec(&self, is_joining: bool) -> GroupSpec {
        let order = (0..self.ranks).map(WorldRank).collect();
        GroupSpec { name: "g".into(), order, max_size: self.ranks, failure_mode: self.mode, is_joining }
    }

    /// Lets the control plane process an input, and carries out its outputs.
    fn input(&mut self, input: Input) -> Result<Reply, Rejection> {
        let Some(world) = &mut self.world else { return Ok(Reply::Done) };
        let reply = world.handle(input, self.now_ns);
        let mut changed = Vec::new();
        while let Some(output) = world.poll_output() {
            match output {
                Output::Persist(record) => {
                    let view = &record.view;
                    if view.epoch > 0 {
                        // A group that grows is made durable again in its view.
                        let is_same = |known: View| {
                            (known.active, known.failed, known.resolution)
                                == (view.active, view.failed, view.resolution)
                        };
                        let known = self.views.insert(view.epoch, view.clone());
                        assert!(known.is_none_or(is_same), "two views of epoch {}", view.epoch);
                    }
                    self.records.insert(record.group, record);
                }
                Output::Forget(group) => {
                    self.records.remove(&group);
                }
                Output::Changed(rank) => changed.push(rank),
            }
        }
        let due_ns = world.poll_timeout();
        assert!(due_ns.is_none_or(|due_ns| due_ns > self.now_ns), "the next call is due already: {due_ns:?}");
        self.check_announced(&changed);
        for rank in changed {
            self.send_status(rank);
        }
        reply
    }

    /// Checks that the status of a process that was not announced is the same as before.
    fn check_announced(&mut self, changed: &[WorldRank]) {
        let Some(world) = &self.world else { return };
        for rank in (0..self.ranks).map(WorldRank) {
            let Some(process) = world.process(rank) else { continue };
            let status = world.status(process).expect("a registered process");
            let before = self.announced.insert(process, status.clone());
            assert!(
                changed.contains(&rank) || before.as_ref().is_none_or(|before| *before == status),
                "the status of {process:?} changed from {before:?} to {status:?} unannounced",
            );
        }
    }

    fn send_status(&mut self, rank: WorldRank) {
        let Some(world) = &self.world else { return };
        let Some(process) = world.process(rank) else { return };
        let status = world.status(process).expect("a registered process");
        if !self.cut_off.contains(&rank) {
            self.deliver(Delivery::Status(process, status), 3);
        }
    }

    fn report_of(&self, rank: WorldRank) -> Option<Report> {
        let member = self.members.get(&rank)?;
        let peers = (0..self.ranks).map(WorldRank);
        let reaches =
            |peer: &WorldRank| self.members.get(peer).is_some_and(|peer| !peer.is_stopped) && !self.is_cut(rank, *peer);
        let linked = peers.clone().filter(reaches).collect();
        let refused = self.killed.iter().copied().filter(|peer| !self.is_cut(rank, *peer)).collect();
        let awaited = |peer: &WorldRank| self.members.get(peer).is_some_and(|peer| peer.is_stopped);
        let overdue = peers.filter(awaited).collect();
        let groups = member.group.map(|group| MemberReport { group, epoch: member.view.epoch, phase: member.phase() });
        let (process, roster) = (member.id, member.roster);
        Some(Report { process, roster, linked, refused, overdue, groups: groups.into_iter().collect() })
    }

    /// Lets all processes continue, report and send.
    fn run_members(&mut self, is_periodic: bool) {
        for rank in (0..self.ranks).map(WorldRank) {
            let Some(member) = self.members.get_mut(&rank).filter(|member| !member.is_stopped) else { continue };
            let before = (member.phase(), member.view.epoch);
            if is_periodic {
                member.retry();
            }
            member.advance();
            let sent = std::mem::take(&mut member.sent);
            let has_changed = before != (member.phase(), member.view.epoch);
            let id = member.id;
            for (to, frame) in sent {
                if self.is_cut(rank, to) {
                    self.deliver(Delivery::Broken { at: rank, peer: to }, 1);
                } else if let Some(incarnation) = self.members.get(&to).map(|peer| peer.id.incarnation) {
                    self.deliver(Delivery::Frame(to, incarnation, frame), 12);
                } else {
                    self.deliver(Delivery::Broken { at: rank, peer: to }, 1);
                }
            }
            if (is_periodic || has_changed)
                && !self.cut_off.contains(&rank)
                && self.world.is_some()
                && let Some(report) = self.report_of(rank)
            {
                debug_assert_eq!(report.process, id);
                self.deliver(Delivery::Report(report), 3);
            }
        }
    }

    fn apply(&mut self, delivery: Delivery) {
        match delivery {
            Delivery::Frame(to, incarnation, frame) => {
                let is_cut = self.is_cut(frame.from, to);
                if let Some(member) = self.members.get_mut(&to).filter(|to| to.id.incarnation == incarnation) {
                    if is_cut {
                        self.deliver(Delivery::Broken { at: frame.from, peer: to }, 1);
                    } else if member.is_stopped {
                        self.deliver(Delivery::Frame(to, incarnation, frame), 20);
                    } else {
                        member.receive(frame);
                    }
                }
            }
            Delivery::Broken { at, peer } => {
                if let Some(member) = self.members.get_mut(&at) {
                    member.note_broken(peer);
                }
            }
            Delivery::Report(report) => self.apply_report(report),
            Delivery::Status(to, status) => {
                let Some(member) = self.members.get_mut(&to.rank).filter(|member| member.id == to) else { return };
                if member.is_stopped {
                    self.deliver(Delivery::Status(to, status), 20);
                } else if !self.cut_off.contains(&to.rank) {
                    member.follow(&status);
                }
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
        match self.input(Input::Report { report }) {
            Ok(_) if has_group => {}
            Ok(_) => {
                let is_joiner = self.members.get(&process.rank).is_some_and(|member| member.is_joiner);
                let spec = self.spec(is_joiner);
                let _ = self.input(Input::Attach { process, spec });
            }
            Err(Rejection::UnknownProcess { .. }) => {
                let address = format!("rank-{}", process.rank.0);
                let _ = self.input(Input::Register { process: Process { id: process, address } });
                let is_joiner = self.members.get(&process.rank).is_some_and(|member| member.is_joiner);
                let spec = self.spec(is_joiner || has_group);
                let _ = self.input(Input::Attach { process, spec });
            }
            // It was declared dead, and has found out: it begins again.
            Err(Rejection::Ended { .. }) => {
                let is_present = self.members.get(&process.rank).is_some_and(|member| member.id == process);
                if is_present {
                    self.break_connections(process.rank);
                    let joins = self.records.values().any(|record| record.view.epoch > 0);
                    self.begin(process.rank, joins);
                }
            }
            Err(other) => panic!("{other}"),
        }
        self.send_status(process.rank);
    }

    /// Members propose to activate those that wait for it.
    fn propose(&mut self) {
        let proposer = self.members.values().find(|member| member.group.is_some() && !member.is_stopped);
        let Some((id, group)) = proposer.and_then(|member| Some((member.id, member.group?))) else { return };
        let waits = |member: &&Member| member.group.is_some() && !member.participates();
        let waiting: RankSet<GroupRank> = self.members.values().filter(waits).map(|member| member.rank).collect();
        if !waiting.is_empty() {
            self.next_proposal += 1;
            let id = ProposalId { process: id, number: self.next_proposal };
            let _ = self.input(Input::Propose { id, group, change: Change::Activate(waiting) });
        }
    }

    /// Runs for a time, with faults if `chaos` is greater than 0: one in so many milliseconds.
    pub(crate) fn run(&mut self, duration_ms: u64, chaos: u64) {
        let until = self.now_ns + duration_ms * MS;
        while self.now_ns < until {
            if chaos > 0 && self.rng.below(chaos) == 0 {
                self.break_something();
            }
            let next = self.now_ns + MS;
            while let Some(entry) = self.deliveries.first_entry().filter(|entry| entry.key().0 <= next) {
                self.now_ns = self.now_ns.max(entry.key().0);
                let delivery = entry.remove();
                self.apply(delivery);
                self.run_members(false);
                self.check();
            }
            self.now_ns = next;
            let is_periodic = (self.now_ns / MS).is_multiple_of(100);
            self.run_members(is_periodic);
            if (self.now_ns / MS).is_multiple_of(20) {
                let _ = self.input(Input::Tick);
            }
            if (self.now_ns / MS).is_multiple_of(250) {
                self.propose();
            }
        }
    }

    fn break_something(&mut self) {
        let rank = WorldRank(self.rng.below(u64::from(self.ranks)) as u8);
        let other = WorldRank(self.rng.below(u64::from(self.ranks)) as u8);
        match self.rng.below(14) {
            0 | 1 if self.members.len() > 1 => self.kill(rank),
            2 | 3 if self.killed.contains(&rank) => {
                let joins = self.records.values().any(|record| record.view.epoch > 0);
                self.begin(rank, joins);
            }
            4 => self.stop(rank, true),
            5 | 6 => self.stop(rank, false),
            7 if rank != other => {
                self.cut_pairs.insert((rank.min(other), rank.max(other)));
                self.deliver(Delivery::Broken { at: rank, peer: other }, 1);
                self.deliver(Delivery::Broken { at: other, peer: rank }, 1);
            }
            8 | 9 => {
                self.cut_pairs.pop_first();
            }
            10 => {
                self.cut_off.insert(rank);
            }
            11 => {
                self.cut_off.pop_first();
            }
            12 => self.kill_control(),
            _ if self.world.is_none() => self.start_control(),
            _ => {}
        }
    }

    /// Ends all faults.
    pub(crate) fn heal(&mut self) {
        self.cut_pairs.clear();
        self.cut_off.clear();
        if self.world.is_none() {
            self.start_control();
        }
        for rank in (0..self.ranks).map(WorldRank) {
            self.stop(rank, false);
            if self.killed.contains(&rank) {
                let joins = self.records.values().any(|record| record.view.epoch > 0);
                self.begin(rank, joins);
            }
        }
    }

    fn check(&self) {
        let Some(view) = self.views.values().next_back() else { return };
        let is_in = |member: &&Member| {
            view.participants().contains(member.rank)
                && view.incarnations[usize::from(member.rank.0)] == Some(member.id.incarnation)
        };
        let mut agreed: BTreeMap<u64, (RankSet<GroupRank>, WorldRank)> = BTreeMap::new();
        for member in self.members.values().filter(is_in) {
            for (operation, result) in &member.results {
                let is_of_a_view = self.views.values().rev().any(|view| view.participants() == *result);
                assert!(is_of_a_view, "operation {operation}: {result:?} is no view");
                let (first, by) = agreed.entry(*operation).or_insert((*result, member.id.rank));
                assert_eq!(
                    first, result,
                    "seed {}, operation {operation}: ranks {} and {}",
                    self.seed, by.0, member.id.rank.0
                );
            }
        }
    }

    fn furthest(&self) -> u64 {
        self.members.values().filter(|member| member.participates()).map(|member| member.completed).max().unwrap_or(0)
    }

    /// Checks that all members follow one view of all ranks, and that their operations advance.
    pub(crate) fn check_healed(&mut self) {
        let before = self.furthest();
        self.run(2_000, 0);
        let epochs: BTreeSet<u64> = self.members.values().map(|member| member.view.epoch).collect();
        assert_eq!(epochs.len(), 1, "seed {}: members follow views {epochs:?}", self.seed);
        let all = RankSet::first(usize::from(self.ranks));
        for member in self.members.values() {
            assert_eq!(member.view.participants(), all, "seed {}: the view of {member:?}", self.seed);
        }
        assert!(self.furthest() > before + 20, "seed {}: operations stand still at {before}", self.seed);
    }
}

/// Seeds of each test: `KVPLANE_GROUP_SEEDS` of them, from `KVPLANE_SEED` on.
fn seeds() -> std::ops::Range<u64> {
    let number = |name, default| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default);
    let from = number("KVPLANE_SEED", 0);
    from..from + number("KVPLANE_GROUP_SEEDS", 20)
}

fn simulate(seed: u64, mode: FailureMode) {
    let ranks = 2 + (seed % 5) as u8;
    let mut simulation = Simulation::new(seed, ranks, mode);
    simulation.run(1_000, 0);
    simulation.run(10_000, 150);
    simulation.heal();
    simulation.run(12_000, 0);
    simulation.check_healed();
}

#[test]
fn survivors_agree_whatever_fails() {
    for seed in seeds() {
        simulate(seed, FailureMode::Automatic);
    }
}

#[test]
fn survivors_agree_if_failed_members_stay_active() {
    for seed in seeds() {
        simulate(1_000_000 + seed, FailureMode::Deferred);
    }
}

#[test]
fn operations_continue_soon_after_a_kill() {
    let mut simulation = Simulation::new(3, 4, FailureMode::Automatic);
    simulation.run(1_000, 0);
    let before = simulation.furthest();
    assert!(before > 20, "{before} operations in a second");
    simulation.kill(WorldRank(0));
    simulation.run(500, 0);
    assert!(simulation.furthest() > before + 10, "no operation in half a second after the kill");
    assert!(simulation.views.values().next_back().is_some_and(|view| view.active.bits() == 0b1110));
}

#[test]
fn operations_continue_while_the_control_plane_is_away() {
    let mut simulation = Simulation::new(4, 4, FailureMode::Automatic);
    simulation.run(1_000, 0);
    simulation.kill_control();
    let before = simulation.furthest();
    simulation.run(1_000, 0);
    assert!(simulation.furthest() > before + 20, "operations need the control plane");
    simulation.start_control();
    simulation.run(1_000, 0);
    assert_eq!(simulation.views.len(), 1, "a restart changed the view");
}
