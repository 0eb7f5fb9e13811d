//! Processes of a world without collectives: they reach all others but those that a test names, and follow their
//! status.

#![allow(dead_code, reason = "two test programs share this file, and each uses a part")]

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use kvplane::group_membership::*;
use kvplane::rpc::Role;
use kvplane::{Control, ControlLink, Error, GroupLink, GroupLinkConfig, GroupLinkError, MemberHost, ReportSignal};

/// Longest wait for anything: far above what it takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// State of a process, as far as its link told it.
#[derive(Debug)]
pub(crate) struct FakeState {
    pub(crate) process: Process,
    /// Ranks that it finds to refuse connections.
    pub(crate) refused: RankSet<WorldRank>,
    pub(crate) status: Status,
    pub(crate) group: Option<GroupId>,
    pub(crate) epoch: u64,
    pub(crate) phase: Phase,
    /// Participants of each view that it followed, by epoch.
    pub(crate) views: BTreeMap<u64, Vec<u8>>,
    pub(crate) end: Option<GroupLinkError>,
}

#[derive(Clone)]
pub(crate) struct FakeProcess(Arc<(Mutex<FakeState>, Condvar)>);

impl MemberHost for FakeProcess {
    fn report(&self) -> Report {
        let seen = self.seen();
        let peers: RankSet<WorldRank> = seen.status.peers.iter().map(|peer| peer.id.rank).collect();
        let (epoch, phase) = (seen.epoch, seen.phase);
        let groups = seen.group.map(|group| MemberReport { group, epoch, phase });
        Report {
            process: seen.process.id,
            roster: seen.status.roster,
            linked: peers.without(seen.refused),
            refused: seen.refused,
            overdue: RankSet::EMPTY,
            groups: groups.into_iter().collect(),
        }
    }

    fn follow(&mut self, status: &Status) {
        let mut guard = self.seen();
        let seen = &mut *guard;
        seen.status = status.clone();
        if let Some(group) = status.groups.iter().find(|group| Some(group.group) == seen.group) {
            assert!(group.view.epoch >= seen.epoch, "the epoch went back from {} to {:?}", seen.epoch, group.view);
            if group.view.epoch > seen.epoch {
                seen.epoch = group.view.epoch;
                let participants = group.view.participants();
                seen.views.insert(seen.epoch, participants.iter().map(|rank| rank.0).collect());
                let is_in = participants.contains(group.rank);
                seen.phase = if is_in { Phase::Running { failed: RankSet::EMPTY } } else { Phase::Ready };
            }
            if group.is_changing && matches!(seen.phase, Phase::Running { .. }) {
                seen.phase = Phase::Fenced(Progress { completed: 0, has_result: true, is_prepared: false });
            }
        }
        self.0.1.notify_all();
    }

    fn end(&mut self, reason: &GroupLinkError) {
        self.seen().end = Some(reason.clone());
        self.0.1.notify_all();
    }
}

impl FakeProcess {
    pub(crate) fn new(rank: u8, incarnation: u64) -> Self {
        let process =
            Process { id: ProcessId { rank: WorldRank(rank), incarnation }, address: format!("rank-{rank}:1") };
        let status = Status { roster: 0, peers: Vec::new(), groups: Vec::new() };
        let (refused, group, epoch, phase) = (RankSet::EMPTY, None, 0, Phase::Joining);
        let seen = FakeState { process, refused, status, group, epoch, phase, views: BTreeMap::new(), end: None };
        Self(Arc::new((Mutex::new(seen), Condvar::new())))
    }

    pub(crate) fn seen(&self) -> MutexGuard<'_, FakeState> {
        self.0.0.lock().expect("no panic of the host")
    }

    #[track_caller]
    pub(crate) fn wait_for<T>(&self, what: &str, found: impl Fn(&FakeState) -> Option<T>) -> T {
        let until = Instant::now() + PATIENCE;
        let mut seen = self.seen();
        loop {
            if let Some(found) = found(&seen) {
                return found;
            }
            let left = until.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "{what} does not happen: {seen:?}");
            seen = self.0.1.wait_timeout(seen, left).expect("no panic of the host").0;
        }
    }

    /// Waits until it takes part in a view of these participants; returns the epoch.
    #[track_caller]
    pub(crate) fn wait_for_view(&self, participants: &[u8]) -> u64 {
        self.wait_for(&format!("a view of {participants:?}"), |seen| {
            let is_there = seen.views.get(&seen.epoch).is_some_and(|view| view == participants);
            (is_there && matches!(seen.phase, Phase::Running { .. })).then_some(seen.epoch)
        })
    }
}

/// A process with its link.
pub(crate) struct LinkedProcess {
    pub(crate) fake: FakeProcess,
    pub(crate) signal: ReportSignal,
    pub(crate) link: GroupLink,
}

impl LinkedProcess {
    pub(crate) fn begin(control: &Control, rank: u8, incarnation: u64, deadline: Duration) -> Result<Self, Error> {
        let (fake, signal) = (FakeProcess::new(rank, incarnation), ReportSignal::new());
        let process = fake.seen().process.clone();
        let config = GroupLinkConfig { tenant: String::new(), world: "job".to_owned(), process };
        let link = ControlLink::to_within(control, Role::Client, PATIENCE)?;
        let link = GroupLink::begin(link, &config, Box::new(fake.clone()), &signal, deadline)?;
        Ok(Self { fake, signal, link })
    }

    pub(crate) fn attached(control: &Control, rank: u8, incarnation: u64, ranks: u8) -> Self {
        let process = Self::begin(control, rank, incarnation, PATIENCE).expect("a free rank");
        process.attach(ranks);
        process
    }

    pub(crate) fn attach(&self, ranks: u8) {
        let (order, name) = ((0..ranks).map(WorldRank).collect(), "g".to_owned());
        let spec = GroupSpec { name, order, max_size: 4, failure_mode: FailureMode::Automatic, is_joining: false };
        let (group, _) = self.link.attach(&spec, PATIENCE).expect("a good group");
        let mut seen = self.fake.seen();
        (seen.group, seen.epoch, seen.phase) = (Some(group), 0, Phase::Ready);
        drop(seen);
        self.signal.raise();
    }

    pub(crate) fn find_refused(&self, ranks: &[u8]) {
        self.fake.seen().refused = ranks.iter().map(|rank| WorldRank(*rank)).collect();
        self.signal.raise();
    }
}
