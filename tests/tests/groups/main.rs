//! Tests of links of processes to their world: founding, kills of a process and of the control plane, joiners, ends.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use kvplane::group_membership::*;
use kvplane::rpc::groups::{UnregisterProcess, WorldName};
use kvplane::rpc::{CallError, RefusalCode, Role, RuntimeDirectory};
use kvplane::{Control, ControlLink, Error, GroupLink, GroupLinkConfig, GroupLinkError, MemberHost, ReportSignal};
use kvplane_server::{ControlConfig, ControlHandle, ControlServer};

/// Longest wait for anything: far above what it takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// State of a process, as far as its link told it.
#[derive(Debug)]
struct FakeState {
    process: Process,
    /// Ranks that it finds to refuse connections.
    refused: RankSet<WorldRank>,
    status: Status,
    group: Option<GroupId>,
    epoch: u64,
    phase: Phase,
    /// Participants of each view that it followed, by epoch.
    views: BTreeMap<u64, Vec<u8>>,
    end: Option<GroupLinkError>,
}

#[derive(Clone)]
struct FakeProcess(Arc<(Mutex<FakeState>, Condvar)>);

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
    fn new(rank: u8, incarnation: u64) -> Self {
        let process =
            Process { id: ProcessId { rank: WorldRank(rank), incarnation }, address: format!("rank-{rank}:1") };
        let status = Status { roster: 0, peers: Vec::new(), groups: Vec::new() };
        let (refused, group, epoch, phase) = (RankSet::EMPTY, None, 0, Phase::Joining);
        let seen = FakeState { process, refused, status, group, epoch, phase, views: BTreeMap::new(), end: None };
        Self(Arc::new((Mutex::new(seen), Condvar::new())))
    }

    fn seen(&self) -> MutexGuard<'_, FakeState> {
        self.0.0.lock().expect("no panic of the host")
    }

    #[track_caller]
    fn wait_for<T>(&self, what: &str, found: impl Fn(&FakeState) -> Option<T>) -> T {
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
    fn wait_for_view(&self, participants: &[u8]) -> u64 {
        self.wait_for(&format!("a view of {participants:?}"), |seen| {
            let is_there = seen.views.get(&seen.epoch).is_some_and(|view| view == participants);
            (is_there && matches!(seen.phase, Phase::Running { .. })).then_some(seen.epoch)
        })
    }
}

/// A process with its link.
struct LinkedProcess {
    fake: FakeProcess,
    signal: ReportSignal,
    link: GroupLink,
}

impl LinkedProcess {
    fn begin(control: &Control, rank: u8, incarnation: u64, deadline: Duration) -> Result<Self, Error> {
        let (fake, signal) = (FakeProcess::new(rank, incarnation), ReportSignal::new());
        let process = fake.seen().process.clone();
        let config = GroupLinkConfig { tenant: String::new(), world: "job".to_owned(), process };
        let link = ControlLink::to_within(control, Role::Client, PATIENCE)?;
        let link = GroupLink::begin(link, &config, Box::new(fake.clone()), &signal, deadline)?;
        Ok(Self { fake, signal, link })
    }

    fn attached(control: &Control, rank: u8, incarnation: u64, ranks: u8) -> Self {
        let process = Self::begin(control, rank, incarnation, PATIENCE).expect("a free rank");
        process.attach(ranks);
        process
    }

    fn attach(&self, ranks: u8) {
        let (order, name) = ((0..ranks).map(WorldRank).collect(), "g".to_owned());
        let spec = GroupSpec { name, order, max_size: 4, failure_mode: FailureMode::Automatic, is_joining: false };
        let (group, _) = self.link.attach(&spec, PATIENCE).expect("a good group");
        let mut seen = self.fake.seen();
        (seen.group, seen.epoch, seen.phase) = (Some(group), 0, Phase::Ready);
        drop(seen);
        self.signal.raise();
    }

    fn find_refused(&self, ranks: &[u8]) {
        self.fake.seen().refused = ranks.iter().map(|rank| WorldRank(*rank)).collect();
        self.signal.raise();
    }
}

struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kvplane-groups-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a directory");
        Self(path)
    }

    fn control(&self) -> Control {
        Control::Local { cluster: "test".to_owned(), runtime_directory: Some(self.runtime()) }
    }

    fn runtime(&self) -> PathBuf {
        self.0.join("run")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

const PART: &str = "KVPLANE_TEST_GROUPS_PART";
const PLACE: &str = "KVPLANE_TEST_GROUPS_PLACE";

/// A child process, which is killed with SIGKILL.
struct ChildProcess(Child);

impl ChildProcess {
    /// Starts this program as a control plane, or as the process of rank 2 of three.
    fn start(part: &str, scratch: &Scratch) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("our own path"))
            .args(["--exact", "child", "--nocapture"])
            .envs([(PART, Path::new(part)), (PLACE, scratch.0.as_path())])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a child");
        let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines().map_while(Result::ok);
        assert!(lines.any(|line| line == "ready"), "the {part} ends early");
        Self(child)
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Not a test: the child process of one. Without its variable it does nothing.
#[test]
fn child() {
    let (Ok(part), Some(place)) = (std::env::var(PART), std::env::var_os(PLACE)) else { return };
    let scratch = std::mem::ManuallyDrop::new(Scratch(place.into()));
    let (_control, _process);
    if part == "control" {
        let mut config = ControlConfig::new("test");
        config.state_directory = Some(scratch.0.join("state"));
        config.cluster.adoption_wait_ns = Some(0);
        config.publish = Some(RuntimeDirectory::at(scratch.runtime()));
        _control = ControlServer::start(config).expect("a control plane");
    } else {
        _process = LinkedProcess::attached(&scratch.control(), 2, 1, 3);
    }
    println!("\nready");
    std::io::stdout().flush().expect("the parent reads");
    // The parent kills this process; if the parent has died, the pipe closes.
    let _ = std::io::stdin().read_line(&mut String::new());
}

fn control_plane(scratch: &Scratch) -> ControlHandle {
    let mut config = ControlConfig::new("test");
    config.publish = Some(RuntimeDirectory::at(scratch.runtime()));
    ControlServer::start(config).expect("a control plane")
}

fn refusal(error: &Error) -> Option<RefusalCode> {
    match error {
        Error::Call(error) => error.refusal(),
        _ => None,
    }
}

#[test]
fn a_killed_process_is_left_out_and_its_successor_is_activated() {
    let scratch = Scratch::new("kill");
    let _plane = control_plane(&scratch);
    let control = scratch.control();
    let killed = ChildProcess::start("process", &scratch);
    let (zero, one) = (LinkedProcess::attached(&control, 0, 1, 3), LinkedProcess::attached(&control, 1, 1, 3));
    let survivors = [&zero, &one];
    for process in survivors {
        assert_eq!(process.fake.wait_for_view(&[0, 1, 2]), 1);
    }
    drop(killed);
    for process in survivors {
        process.find_refused(&[2]);
    }
    for process in survivors {
        assert_eq!(process.fake.wait_for_view(&[0, 1]), 2);
    }

    for process in survivors {
        process.find_refused(&[]);
    }
    let two = LinkedProcess::attached(&control, 2, 2, 3);
    let group = zero.fake.seen().group.expect("attached");
    let ranks = [GroupRank(2)].into_iter().collect();
    let id = zero.link.propose(group, Change::Activate(ranks), PATIENCE).expect("a good proposal");
    for process in [&zero, &one, &two] {
        assert_eq!(process.fake.wait_for_view(&[0, 1, 2]), 3);
    }
    let outcome = zero.fake.wait_for("the outcome", |seen| {
        let outcomes = &seen.status.groups.first()?.outcomes;
        outcomes.iter().find(|(of, _)| *of == id).map(|(_, outcome)| *outcome)
    });
    assert_eq!(outcome, Outcome::Applied { epoch: 3, dropped: RankSet::EMPTY });

    // An end in order needs no silence: nobody finds that it refuses connections.
    two.link.close(PATIENCE).expect("the control plane answers");
    for process in survivors {
        assert_eq!(process.fake.wait_for_view(&[0, 1]), 4);
    }
    // Neither does a member that leaves its group alone.
    one.link.detach(group, PATIENCE).expect("a member");
    assert_eq!(zero.fake.wait_for_view(&[0]), 5);
    assert!(one.fake.seen().end.is_none());
}

#[test]
fn groups_go_on_over_a_kill_of_the_control_plane() {
    let scratch = Scratch::new("control");
    let plane = ChildProcess::start("control", &scratch);
    let control = scratch.control();
    let killed = ChildProcess::start("process", &scratch);
    let (zero, one) = (LinkedProcess::attached(&control, 0, 1, 3), LinkedProcess::attached(&control, 1, 1, 3));
    let survivors = [&zero, &one];
    for process in survivors {
        assert_eq!(process.fake.wait_for_view(&[0, 1, 2]), 1);
    }
    drop(plane);
    // The process dies while the control plane is away.
    drop(killed);
    for process in survivors {
        process.find_refused(&[2]);
    }
    let error = zero.link.detach(GroupId(1), Duration::from_millis(200)).expect_err("nobody answers");
    assert!(error.is_control_away(), "{error}");

    let _plane = ChildProcess::start("control", &scratch);
    for process in survivors {
        assert_eq!(process.fake.wait_for_view(&[0, 1]), 2);
    }
    let error = zero.link.detach(GroupId(1), PATIENCE).expect_err("no such group");
    assert_eq!(refusal(&error), Some(RefusalCode::NotFound), "{error}");
}

#[test]
fn a_control_plane_that_lost_its_state_gets_the_processes_registered_again() {
    let scratch = Scratch::new("lost");
    let plane = control_plane(&scratch);
    let control = scratch.control();
    let (zero, one) = (LinkedProcess::attached(&control, 0, 1, 2), LinkedProcess::attached(&control, 1, 1, 2));
    let processes = [&zero, &one];
    for process in processes {
        process.fake.wait_for_view(&[0, 1]);
    }
    drop(plane);
    let _plane = control_plane(&scratch);
    for process in processes {
        process.fake.wait_for("a status without the group", |seen| {
            (seen.status.groups.is_empty() && seen.status.peers.len() == 2).then_some(())
        });
        process.attach(2);
    }
    for process in processes {
        assert_eq!(process.fake.wait_for_view(&[0, 1]), 1);
    }
}

#[test]
fn a_rank_has_one_process_and_one_that_was_declared_dead_learns_it() {
    let scratch = Scratch::new("ends");
    let _plane = control_plane(&scratch);
    let control = scratch.control();
    let first = LinkedProcess::begin(&control, 0, 1, PATIENCE).expect("a free rank");
    let error =
        LinkedProcess::begin(&control, 0, 2, Duration::from_millis(100)).map(drop).expect_err("the rank is taken");
    assert_eq!(refusal(&error), Some(RefusalCode::AlreadyExists), "{error}");
    assert!(matches!(&error, Error::Call(CallError::Refused(refusal)) if refusal.reason.contains("rank 0")), "{error}");

    // As if its silence had lasted too long. The world lasts, as it has another process.
    let other = LinkedProcess::begin(&control, 1, 1, PATIENCE).expect("a free rank");
    let operator = ControlLink::to(&control, Role::Client).expect("a link");
    let (tenant, world) = (String::new(), "job".to_owned());
    let process = first.link.process();
    operator.call(UnregisterProcess { world: WorldName { tenant, world }, process }).expect("it ends");
    let end = first.fake.wait_for("the end", |seen| seen.end.clone());
    assert_eq!(end, GroupLinkError::Ended { process });
    let error = first.link.detach(GroupId(1), PATIENCE).expect_err("it is not part of its world");
    assert!(matches!(&error, Error::Group(GroupLinkError::Ended { .. })), "{error}");
    other.fake.wait_for("a world of one", |seen| (seen.status.peers.len() == 1).then_some(()));
    // Another incarnation has the rank now, and waits for nobody.
    LinkedProcess::begin(&control, 0, 2, Duration::from_secs(5)).expect("a free rank");
}
