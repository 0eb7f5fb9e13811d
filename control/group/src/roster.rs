//! Roster of a world: the processes that are alive, and which of them reach each other.

use std::collections::{BTreeMap, VecDeque};

use bincode::{Decode, Encode};

use crate::config::WorldConfig;
use crate::counters::DeathCounts;
use crate::message::Report;
use crate::rank::{MAX_RANKS, RankSet, WorldRank};
use crate::rejection::Rejection;

/// Maximum length of a process's address, in bytes.
pub const MAX_ADDRESS_BYTES: usize = 512;
/// A process is allowed this many times the longest of the recent intervals between its reports.
const PACES: u64 = 3;
/// Most that late reports lengthen the silence of a process that a collective waited for, as a multiple of it.
const MOST_PATIENCE: u64 = 4;
/// Ended incarnations of a rank that are remembered, so that a process that was stopped cannot continue.
const REMEMBERED: usize = 8;

/// One run of the process of a rank. The incarnation is a number that the process draws at random.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ProcessId {
    pub rank: WorldRank,
    pub incarnation: u64,
}

/// A process that registers.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Process {
    pub id: ProcessId,
    /// Address at which the other processes connect to it.
    pub address: String,
}

/// State of a rank's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum ProcessState {
    /// No process has registered, or the last one is dead.
    Offline,
    /// Its process is alive, and not all other live ones reach it.
    Synced,
    /// Its process and all other healthy ones reach each other.
    Healthy,
}

/// A live process, for operators.
#[derive(Clone, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ProcessSummary {
    pub process: Process,
    pub state: ProcessState,
    /// Time since its last report, in nanoseconds.
    pub silent_ns: u64,
}

/// Longest of the recent intervals between the reports of a process. A machine that is busy delays the reports of live
/// processes: silence is judged by what has been usual there, as the accrual failure detector of Hayashibara et al.
/// (2004) does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Pace(u64);

impl Pace {
    /// Notes an interval. A long one is forgotten over the next ones: by half in about 44 reports.
    fn note(&mut self, interval_ns: u64) {
        self.0 = interval_ns.max(self.0 - self.0.div_ceil(64));
    }

    /// Returns the silence after which a process of this pace is dead that a collective waited for.
    fn overdue_ns(self, config: &WorldConfig) -> u64 {
        let most_ns = config.overdue_ns.saturating_mul(MOST_PATIENCE).min(config.silence_ns);
        self.0.saturating_mul(PACES).clamp(config.overdue_ns, most_ns.max(config.overdue_ns))
    }
}

/// A live process, and its last report.
#[derive(Debug)]
struct RosterEntry {
    process: Process,
    /// Version of the roster that has it first.
    since: u64,
    heard_ns: u64,
    pace: Pace,
    /// Version of the roster that its last report was about.
    roster: u64,
    linked: RankSet<WorldRank>,
    refused: RankSet<WorldRank>,
    overdue: RankSet<WorldRank>,
}

/// The processes of a world.
#[derive(Debug)]
pub(crate) struct Roster {
    registered: BTreeMap<WorldRank, RosterEntry>,
    ended: BTreeMap<WorldRank, VecDeque<u64>>,
    /// Grows with each change of the registered processes, and with each start of the control plane.
    roster: u64,
    /// Live processes that all reach each other.
    healthy: RankSet<WorldRank>,
}

impl Roster {
    /// Starts without processes. `term` is the number of this start.
    pub(crate) const fn new(term: u32) -> Self {
        let roster = ((term as u64) << 32) | 1;
        Self { registered: BTreeMap::new(), ended: BTreeMap::new(), roster, healthy: RankSet::EMPTY }
    }

    /// Registers a process. Returns false if it is registered already.
    pub(crate) fn register(&mut self, process: Process, now_ns: u64) -> Result<bool, Rejection> {
        let ProcessId { rank, incarnation } = process.id;
        if usize::from(rank.0) >= MAX_RANKS {
            return Err(Rejection::RankBeyondLimit { rank: rank.0, limit: MAX_RANKS });
        }
        if process.address.len() > MAX_ADDRESS_BYTES {
            return Err(Rejection::LongAddress { bytes: process.address.len(), limit: MAX_ADDRESS_BYTES });
        }
        if self.ended.get(&rank).is_some_and(|ended| ended.contains(&incarnation)) {
            return Err(Rejection::Ended { process: process.id });
        }
        if let Some(present) = self.registered.get_mut(&rank) {
            if present.process.id != process.id {
                return Err(Rejection::RankTaken { rank, by: present.process.id.incarnation });
            }
            present.heard_ns = now_ns;
            if present.process.address == process.address {
                return Ok(false);
            }
        }
        self.roster += 1;
        let registered = RosterEntry {
            process,
            since: self.roster,
            heard_ns: now_ns,
            pace: Pace::default(),
            roster: 0,
            linked: RankSet::EMPTY,
            refused: RankSet::EMPTY,
            overdue: RankSet::EMPTY,
        };
        self.registered.insert(rank, registered);
        self.find_healthy();
        Ok(true)
    }

    /// Applies what a process reports about its peers. Returns true if the state of a process changed.
    pub(crate) fn report(&mut self, report: &Report, now_ns: u64) -> Result<bool, Rejection> {
        self.check(report.process)?;
        let Some(process) = self.registered.get_mut(&report.process.rank) else { return Ok(false) };
        process.pace.note(now_ns.saturating_sub(process.heard_ns));
        process.heard_ns = process.heard_ns.max(now_ns);
        if report.roster < process.roster {
            return Ok(false);
        }
        (process.refused, process.overdue) = (report.refused, report.overdue);
        if (process.roster, process.linked) == (report.roster, report.linked) {
            return Ok(false);
        }
        (process.roster, process.linked) = (report.roster, report.linked);
        Ok(self.find_healthy())
    }

    /// Finds the processes that all reach each other. Returns true if they are others than before.
    fn find_healthy(&mut self) -> bool {
        let before = self.healthy;
        self.healthy = self.connected(self.live());
        self.healthy != before
    }

    /// Fails unless this process is registered.
    pub(crate) fn check(&self, id: ProcessId) -> Result<(), Rejection> {
        let has_ended = self.ended.get(&id.rank).is_some_and(|ended| ended.contains(&id.incarnation));
        match self.registered.get(&id.rank) {
            Some(present) if present.process.id == id => Ok(()),
            _ if has_ended => Err(Rejection::Ended { process: id }),
            _ => Err(Rejection::UnknownProcess { process: id }),
        }
    }

    /// Ends a process: it cannot report any more.
    pub(crate) fn end(&mut self, id: ProcessId) {
        if self.registered.get(&id.rank).is_some_and(|present| present.process.id == id) {
            self.registered.remove(&id.rank);
            self.roster += 1;
            self.find_healthy();
        }
        let ended = self.ended.entry(id.rank).or_default();
        if !ended.contains(&id.incarnation) {
            ended.push_back(id.incarnation);
        }
        if ended.len() > REMEMBERED {
            ended.pop_front();
        }
    }

    /// Adds time in which the driver was late to the silence that every process is allowed.
    pub(crate) fn excuse(&mut self, late_ns: u64) {
        for process in self.registered.values_mut() {
            process.heard_ns = process.heard_ns.saturating_add(late_ns);
        }
    }

    /// Returns the pace that half of the processes exceed: where their machines are busy, that of each may be.
    fn usual_pace(&self) -> Pace {
        let mut paces: Vec<_> = self.registered.values().map(|process| process.pace).collect();
        paces.sort_unstable();
        paces.get(paces.len() / 2).copied().unwrap_or_default()
    }

    /// Returns the processes that are dead: silent, and silent for longer than the evidence of their peers demands.
    /// They are counted by that evidence.
    pub(crate) fn dead(&self, config: &WorldConfig, now_ns: u64, counts: &mut DeathCounts) -> Vec<ProcessId> {
        let silence = |process: &RosterEntry| now_ns.saturating_sub(process.heard_ns);
        let is_heard = |process: &&RosterEntry| silence(process) <= 2 * config.interval_ns;
        let claims = |claimed: fn(&RosterEntry) -> RankSet<WorldRank>, about: &RosterEntry| {
            let mut witnesses = self.registered.values().filter(is_heard);
            witnesses.any(|other| other.roster >= about.since && claimed(other).contains(about.process.id.rank))
        };
        let usual = self.usual_pace();
        let mut dead = Vec::new();
        for process in self.registered.values() {
            let silence = silence(process);
            let count = if silence >= config.refused_ns && claims(|other| other.refused, process) {
                &mut counts.refused
            } else if silence >= process.pace.max(usual).overdue_ns(config) && claims(|other| other.overdue, process) {
                &mut counts.overdue
            } else if silence >= config.silence_ns {
                &mut counts.silent
            } else {
                continue;
            };
            *count += 1;
            dead.push(process.process.id);
        }
        dead
    }

    /// Returns the time after `now_ns` at which a process may be dead next, if no report arrives until then.
    pub(crate) fn due_ns(&self, config: &WorldConfig, now_ns: u64) -> Option<u64> {
        let usual = self.usual_pace();
        let times = |process: &RosterEntry| {
            let overdue_ns = process.pace.max(usual).overdue_ns(config);
            let thresholds = [config.refused_ns, overdue_ns, config.silence_ns];
            thresholds.map(|silence| process.heard_ns.saturating_add(silence))
        };
        self.registered.values().flat_map(times).filter(|at| *at > now_ns).min()
    }

    /// Registers a process that an earlier control plane knew: it may continue to report.
    pub(crate) fn expect(&mut self, process: Process, heard_ns: u64) {
        let registered = RosterEntry {
            since: self.roster,
            heard_ns,
            pace: Pace::default(),
            roster: 0,
            linked: RankSet::EMPTY,
            refused: RankSet::EMPTY,
            overdue: RankSet::EMPTY,
            process,
        };
        self.registered.insert(registered.process.id.rank, registered);
        self.find_healthy();
    }

    /// Returns the ranks with a live process.
    pub(crate) fn live(&self) -> RankSet<WorldRank> {
        self.registered.keys().copied().collect()
    }

    /// Returns the live incarnation of a rank.
    pub(crate) fn incarnation(&self, rank: WorldRank) -> Option<u64> {
        self.registered.get(&rank).map(|process| process.process.id.incarnation)
    }

    /// Returns the address of a rank's live process.
    pub(crate) fn address(&self, rank: WorldRank) -> Option<&str> {
        self.registered.get(&rank).map(|process| process.process.address.as_str())
    }

    /// Returns the processes that each live process reaches and is reached by, as far as both have reported since the
    /// later one registered; itself among them.
    fn links(&self) -> [RankSet<WorldRank>; MAX_RANKS] {
        let mut reaches = [RankSet::EMPTY; MAX_RANKS];
        for (rank, from) in &self.registered {
            let knows = |to: &WorldRank| self.registered.get(to).is_some_and(|to| from.roster >= to.since);
            reaches[usize::from(rank.0)] = from.linked.iter().filter(knows).collect();
            reaches[usize::from(rank.0)].insert(*rank);
        }
        let mut links = [RankSet::EMPTY; MAX_RANKS];
        for rank in self.registered.keys() {
            let is_mutual = |to: &WorldRank| reaches[usize::from(to.0)].contains(*rank);
            links[usize::from(rank.0)] = reaches[usize::from(rank.0)].iter().filter(is_mutual).collect();
        }
        links
    }

    /// Returns the largest part of `ranks` that the greedy rule finds in which all reach each other: the one with the
    /// fewest connections is left out, and of several the highest rank, until all are connected.
    pub(crate) fn connected(&self, ranks: RankSet<WorldRank>) -> RankSet<WorldRank> {
        let links = self.links();
        let mut rest = ranks.intersection(self.live());
        loop {
            let links = |rank: WorldRank| links[usize::from(rank.0)].intersection(rest).len();
            let fewest = rest.iter().min_by_key(|rank| (links(*rank), u8::MAX - rank.0));
            match fewest {
                Some(rank) if links(rank) < rest.len() => rest.remove(rank),
                _ => return rest,
            }
        }
    }

    /// Returns the state of a rank's process.
    pub(crate) fn state(&self, rank: WorldRank) -> ProcessState {
        match self.registered.contains_key(&rank) {
            false => ProcessState::Offline,
            true if self.healthy.contains(rank) => ProcessState::Healthy,
            true => ProcessState::Synced,
        }
    }

    /// Returns the live processes as operators see them.
    pub(crate) fn summaries(&self, now_ns: u64) -> impl Iterator<Item = ProcessSummary> {
        self.registered.iter().map(move |(rank, entry)| ProcessSummary {
            process: entry.process.clone(),
            state: self.state(*rank),
            silent_ns: now_ns.saturating_sub(entry.heard_ns),
        })
    }

    /// Returns the version of the roster.
    pub(crate) const fn roster(&self) -> u64 {
        self.roster
    }

    /// Returns the registered processes.
    pub(crate) fn peers(&self) -> impl Iterator<Item = Process> {
        self.registered.values().map(|entry| entry.process.clone())
    }
}
