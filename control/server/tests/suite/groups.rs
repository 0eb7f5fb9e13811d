//! Tests of process groups over QUIC: founding, deaths, joiners, restarts of the control plane, bad input, rights.

use crate::durable::{ANYWHERE, spawn};
use crate::support;

use std::collections::BTreeSet;
use std::time::Duration;

use kvplane_group::*;
use kvplane_rpc::groups::*;
use kvplane_rpc::{
    Authority, CallError, Client, ClientConfig, Grant, ItemStream, LocalCluster, RefusalCode, Role, Scope,
};
use kvplane_server::{ControlConfig, ControlServer};
use support::{Scratch, client, get, run, start};

const INTERVAL: Duration = Duration::from_millis(100);

fn world() -> WorldName {
    WorldName { tenant: String::new(), world: "job".to_owned() }
}

fn process(rank: u8, incarnation: u64) -> Process {
    Process { id: ProcessId { rank: WorldRank(rank), incarnation }, address: format!("rank-{rank}:1") }
}

fn spec(ranks: u8) -> GroupSpec {
    let (order, name) = ((0..ranks).map(WorldRank).collect(), "g".to_owned());
    GroupSpec { name, order, max_size: 4, failure_mode: FailureMode::Automatic, is_joining: false }
}

fn ranks(of: &[u8]) -> RankSet<WorldRank> {
    of.iter().map(|rank| WorldRank(*rank)).collect()
}

/// Process that reaches all others but those that it finds to refuse connections, and follows what it is told.
struct FakeProcess {
    client: Client,
    process: Process,
    known: StatusRevision,
    status: Status,
    group: Option<GroupId>,
    epoch: u64,
    phase: Phase,
    refused: RankSet<WorldRank>,
    reports: u32,
}

impl FakeProcess {
    async fn register(local: &LocalCluster, rank: u8, incarnation: u64) -> Self {
        let (client, process) = (client(local, Role::Client).await, process(rank, incarnation));
        let status = Status { roster: 0, peers: Vec::new(), groups: Vec::new() };
        let (known, refused) = (StatusRevision::default(), RankSet::EMPTY);
        let mut fake =
            Self { client, process, known, status, group: None, epoch: 0, phase: Phase::Joining, refused, reports: 0 };
        fake.register_again().await;
        fake
    }

    async fn register_again(&mut self) {
        let call = RegisterProcess { world: world(), process: self.process.clone() };
        let reply = self.client.call(&call).await.expect("a free rank");
        self.known = StatusRevision::default();
        self.follow(reply.status.expect("a process that registers has no status"));
    }

    async fn attach(&mut self, spec: GroupSpec) -> Result<(), CallError> {
        let call = AttachMember { world: world(), process: self.process.id, spec };
        self.group = Some(self.client.call(&call).await?.group);
        self.phase = Phase::Ready;
        Ok(())
    }

    /// Reports once, and follows the status in the reply.
    async fn report(&mut self) -> Result<bool, CallError> {
        let (epoch, phase) = (self.epoch, self.phase);
        let groups = self.group.map(|group| MemberReport { group, epoch, phase });
        let all = self.status.peers.iter().map(|peer| peer.id.rank).collect();
        let linked = RankSet::without(all, self.refused);
        let (process, roster, overdue) = (self.process.id, self.status.roster, RankSet::EMPTY);
        let groups = groups.into_iter().collect();
        let report = Report { process, roster, linked, refused: self.refused, overdue, groups };
        self.reports += 1;
        let reply = self.client.call(&ReportProcess { world: world(), known: self.known, report }).await?;
        let is_new = reply.status.is_some();
        reply.status.into_iter().for_each(|status| self.follow(status));
        Ok(is_new)
    }

    fn follow(&mut self, status: WorldStatus) {
        if status.revision <= self.known {
            return;
        }
        (self.known, self.status) = (status.revision, status.status);
        let Some(group) = self.status.groups.iter().find(|group| Some(group.group) == self.group) else { return };
        assert!(group.view.epoch >= self.epoch, "the epoch went back from {} to {:?}", self.epoch, group.view);
        if group.view.epoch > self.epoch {
            self.epoch = group.view.epoch;
            let is_in = group.view.participants().contains(group.rank);
            self.phase = if is_in { Phase::Running { failed: RankSet::EMPTY } } else { Phase::Ready };
        }
        if group.is_changing && matches!(self.phase, Phase::Running { .. }) {
            self.phase = Phase::Fenced(Progress { completed: 0, has_result: true, is_prepared: false });
        }
    }

    fn participants(&self) -> BTreeSet<u8> {
        let group = self.status.groups.iter().find(|group| Some(group.group) == self.group);
        group.map_or_else(BTreeSet::new, |group| group.view.participants().iter().map(|rank| rank.0).collect())
    }
}

/// Has processes report until all follow a view of these participants.
async fn until_view(processes: &mut [FakeProcess], participants: &[u8]) {
    let wanted: BTreeSet<u8> = participants.iter().copied().collect();
    until(processes, |process| process.participants() == wanted).await;
}

/// Has processes report until this holds for all of them.
async fn until(processes: &mut [FakeProcess], holds: impl Fn(&FakeProcess) -> bool) {
    loop {
        let mut has_changed = false;
        for process in &mut *processes {
            has_changed |= process.report().await.expect("a live process");
        }
        if processes.iter().all(&holds) {
            return;
        }
        // Changes are reported at once, as the link does.
        if !has_changed {
            tokio::time::sleep(INTERVAL).await;
        }
    }
}

async fn found(local: &LocalCluster, count: u8) -> Vec<FakeProcess> {
    let mut processes = Vec::new();
    for rank in 0..count {
        let mut process = FakeProcess::register(local, rank, 1).await;
        process.attach(spec(count)).await.expect("a good group");
        processes.push(process);
    }
    let all: Vec<u8> = (0..count).collect();
    until_view(&mut processes, &all).await;
    processes
}

fn refused_as<T: std::fmt::Debug>(outcome: Result<T, CallError>, code: RefusalCode, text: &str) {
    match outcome {
        Err(CallError::Refused(refusal)) => {
            assert_eq!(refusal.known_code(), Some(code), "{refusal}");
            assert!(refusal.reason.contains(text), "{refusal}");
        }
        other => panic!("{other:?} instead of {code:?}"),
    }
}

#[test]
fn survivors_get_a_view_soon_after_a_kill_and_a_successor_joins_them() {
    let (control, http) = start("test", |_| {});
    run(async {
        let mut processes = found(control.local(), 3).await;
        let epoch = processes[0].epoch;
        // Its connection ends with it, and its peers find that its address refuses connections.
        drop(processes.pop());
        for survivor in &mut processes {
            (survivor.refused, survivor.reports) = (ranks(&[2]), 0);
        }
        until_view(&mut processes, &[0, 1]).await;
        assert_eq!(processes[0].epoch, epoch + 1);
        // Without the refused connections, the silence would have to last for 300 intervals.
        assert!(processes[0].reports < 100, "{} reports", processes[0].reports);
        let page = tokio::task::spawn_blocking(move || get(http, "/metrics").1).await.expect("asked");
        for line in [
            "kvplane_worlds 1",
            "kvplane_world_processes 2",
            "kvplane_process_group_participants 2",
            "kvplane_process_group_view_changes_total 1",
            "kvplane_world_deaths_total{evidence=\"refused\"} 1",
            "kvplane_process_group_exclusions_total{cause=\"ended\"} 1",
        ] {
            assert!(page.lines().any(|other| other == line), "{line} is not in {page}");
        }

        // A new incarnation of the rank takes its place, once the others reach it and one proposes it.
        processes.iter_mut().for_each(|process| process.refused = RankSet::EMPTY);
        let mut next = FakeProcess::register(control.local(), 2, 2).await;
        next.attach(spec(3)).await.expect("a member of the group");
        let group = next.group.expect("attached");
        processes.push(next);
        let id = ProposalId { process: processes[0].process.id, number: 1 };
        let change = Change::Activate([GroupRank(2)].into_iter().collect());
        let propose = ProposeChange { world: world(), id, group, change };
        processes[0].client.call(&propose).await.expect("a good proposal");
        processes[0].client.call(&propose).await.expect("idempotent");
        until_view(&mut processes, &[0, 1, 2]).await;
        let outcomes = &processes[0].status.groups[0].outcomes;
        assert_eq!(outcomes[..], [(id, Outcome::Applied { epoch: epoch + 2, dropped: RankSet::EMPTY })]);
        let admin = client(control.local(), Role::Admin).await;
        let list = admin.call(&ListWorlds { after: None }).await.expect("listed");
        let [figures] = &list.worlds[..] else { panic!("{list:?}") };
        assert_eq!((figures.processes, figures.groups, figures.view_changes, figures.exclusions), (3, 1, 2, 1));
        let none = admin.call(&ListWorlds { after: Some(world()) }).await.expect("listed");
        assert_eq!(none, WorldList { worlds: Vec::new(), more: false });
        let shown = admin.call(&DescribeWorld { world: world() }).await.expect("described");
        assert_eq!(shown.processes.len(), 3);
        assert!(shown.processes.iter().all(|process| process.state == ProcessState::Healthy), "{shown:?}");
        assert_eq!(shown.groups[0].members, [MemberState::Active; 3]);

        // A world is forgotten with its last process and group.
        for process in &processes {
            let detach = DetachMember { world: world(), process: process.process.id, group };
            process.client.call(&detach).await.expect("a member");
            process.client.call(&detach).await.expect("idempotent");
        }
    });
}

#[test]
fn a_status_is_pushed_once_and_a_report_brings_what_is_not_known() {
    let (control, _) = start("test", |_| {});
    run(async {
        let mut processes = found(control.local(), 2).await;
        let (process, known) = (processes[0].process.id, processes[0].known);
        assert!(!processes[0].report().await.expect("alive"), "it has the newest status");
        let watch = WatchWorld { world: world(), process, known };
        let mut stream: ItemStream<WorldStatus> = processes[0].client.stream(&watch).await.expect("opened");
        // Another process begins, and the stream says so without a report.
        let other = FakeProcess::register(control.local(), 2, 1).await;
        let pushed = stream.next().await.expect("a status");
        assert!(pushed.revision > known);
        assert_eq!(pushed.status.peers.len(), 3);
        assert!(processes[0].report().await.expect("alive"), "the report names an older status");
        assert_eq!((processes[0].known, &processes[0].status), (pushed.revision, &pushed.status));
        // A second stream ends the first; it begins with the status that its process does not know.
        let mut second = processes[0].client.stream(&watch).await.expect("opened");
        assert_eq!(second.next().await.expect("a status"), pushed);
        assert!(stream.next().await.is_err(), "the first one is over");
        // A process that ends in order is gone for the others at once.
        let unregister = UnregisterProcess { world: world(), process: other.process.id };
        other.client.call(&unregister).await.expect("it ends");
        other.client.call(&unregister).await.expect("idempotent");
        assert_eq!(second.next().await.expect("a status").status.peers.len(), 2);
        let again = RegisterProcess { world: world(), process: other.process.clone() };
        refused_as(other.client.call(&again).await, RefusalCode::IncarnationEnded, "register another one");
    });
}

#[test]
fn groups_and_epochs_survive_a_kill_of_the_control_plane() {
    let scratch = Scratch::new();
    let state = scratch.path().join("state");
    run(async {
        let (child, local) = spawn(&state, ANYWHERE);
        let mut processes = found(&local, 3).await;
        let unregister = UnregisterProcess { world: world(), process: processes[2].process.id };
        processes.pop().expect("three").client.call(&unregister).await.expect("it ends");
        until_view(&mut processes, &[0, 1]).await;
        let (epoch, known) = (processes[0].epoch, processes[0].known);
        // In the middle of a change: one member is fenced, and the other has not heard of it.
        let (group, process) = (processes[0].group.expect("attached"), processes[0].process.id);
        let id = ProposalId { process, number: 1 };
        let change = Change::Deactivate([GroupRank(1)].into_iter().collect());
        processes[0].client.call(&ProposeChange { world: world(), id, group, change }).await.expect("good");
        processes[0].report().await.expect("alive");
        assert!(matches!(processes[0].phase, Phase::Fenced(_)));
        drop(child);

        let (child, local) = spawn(&state, ANYWHERE);
        for process in &mut processes {
            process.client = client(&local, Role::Client).await;
        }
        // Nobody registers again: the processes of a view are expected. The proposal is lost, and the view is repeated.
        until(&mut processes, |process| process.epoch > epoch).await;
        assert!(processes[0].known.start > known.start, "the revisions continue");
        until_view(&mut processes, &[0, 1]).await;
        drop(child);

        // After another restart, too; and a process without a group has to register.
        let (child, local) = spawn(&state, ANYWHERE);
        let mut lone = FakeProcess::register(&local, 3, 1).await;
        for process in &mut processes {
            process.client = client(&local, Role::Client).await;
        }
        until_view(&mut processes, &[0, 1]).await;
        assert!(lone.report().await.is_ok());
        drop(child);
        let (_child, local) = spawn(&state, ANYWHERE);
        lone.client = client(&local, Role::Client).await;
        refused_as(lone.report().await, RefusalCode::UnknownClient, "register");
        lone.register_again().await;
        lone.report().await.expect("alive");
    });
}

#[test]
fn a_group_that_has_no_view_yet_is_the_same_after_a_kill_of_the_control_plane() {
    let scratch = Scratch::new();
    let state = scratch.path().join("state");
    run(async {
        let (child, local) = spawn(&state, ANYWHERE);
        let mut processes = Vec::new();
        for rank in 0..2 {
            let mut process = FakeProcess::register(&local, rank, 1).await;
            process.attach(spec(3)).await.expect("a good group");
            processes.push(process);
        }
        let group = processes[0].group;
        drop(child);
        let (_child, local) = spawn(&state, ANYWHERE);
        // The third founder is the first one to attach.
        let mut third = FakeProcess::register(&local, 2, 1).await;
        third.attach(spec(3)).await.expect("a good group");
        for mut process in processes {
            process.client = client(&local, Role::Client).await;
            process.register_again().await;
            assert!(process.status.groups.is_empty(), "its attachment is to be repeated");
            process.attach(spec(3)).await.expect("the same group");
            assert_eq!((process.group, third.group), (group, group));
        }
    });
}

#[test]
fn bad_input_is_named_and_loses_nothing() {
    let (control, _) = start("test", |config| {
        config.worlds.worlds = 2;
        config.worlds.world.groups = 1;
    });
    run(async {
        let mut processes = found(control.local(), 2).await;
        let caller = client(control.local(), Role::Client).await;
        let of = |world: &str| WorldName { tenant: String::new(), world: world.to_owned() };
        let register = |world: &WorldName, process| RegisterProcess { world: world.clone(), process };
        let (job, next) = (world(), of("next"));
        let outcome = caller.call(&register(&job, process(1, 9))).await;
        refused_as(outcome, RefusalCode::AlreadyExists, "rank 1 has a live process already");
        let outcome = caller.call(&register(&job, process(64, 1))).await;
        refused_as(outcome, RefusalCode::BadRequest, "limit of 64 ranks");
        refused_as(caller.call(&register(&next, process(64, 1))).await, RefusalCode::BadRequest, "64");
        let long = Process { address: "a".repeat(513), ..process(2, 1) };
        refused_as(caller.call(&register(&job, long)).await, RefusalCode::BadRequest, "513 bytes");
        for name in ["", "a\nb", &"n".repeat(129)] {
            refused_as(caller.call(&register(&of(name), process(0, 1))).await, RefusalCode::BadRequest, "name");
        }
        // A world that no process is in: it did not begin with the rejected ones.
        let id = process(0, 1).id;
        let attach = |world: &WorldName, spec| AttachMember { world: world.clone(), process: id, spec };
        refused_as(caller.call(&attach(&next, spec(2))).await, RefusalCode::UnknownClient, "\"next\"");
        let watch = WatchWorld { world: next.clone(), process: id, known: StatusRevision::default() };
        let mut stream = caller.stream(&watch).await.expect("opened");
        refused_as(stream.next().await, RefusalCode::UnknownClient, "\"next\"");
        let admin = client(control.local(), Role::Admin).await;
        refused_as(admin.call(&DescribeWorld { world: next.clone() }).await, RefusalCode::NotFound, "\"next\"");
        let unregister = UnregisterProcess { world: next.clone(), process: id };
        caller.call(&unregister).await.expect("nothing is left to end");
        assert_eq!(admin.call(&ListWorlds { after: None }).await.expect("listed").worlds.len(), 1);
        // One other world, and no third.
        caller.call(&register(&next, process(0, 1))).await.expect("room");
        let outcome = caller.call(&register(&of("third"), process(0, 1))).await;
        refused_as(outcome, RefusalCode::LimitReached, "2 worlds");
        caller.call(&unregister).await.expect("it ends");
        caller.call(&register(&of("third"), process(0, 1))).await.expect("the world before it is forgotten");

        let joining = |order: &[u8], max_size| GroupSpec {
            order: order.iter().map(|rank| WorldRank(*rank)).collect(),
            max_size,
            is_joining: true,
            ..spec(2)
        };
        let outcome = caller.call(&attach(&job, joining(&[1, 0, 2], 4))).await;
        refused_as(outcome, RefusalCode::AlreadyExists, "another order");
        refused_as(
            caller.call(&attach(&job, joining(&[0, 1], 3))).await,
            RefusalCode::AlreadyExists,
            "at most 4 members, and this process says 3",
        );
        let other = GroupSpec { name: "other".to_owned(), ..spec(2) };
        refused_as(caller.call(&attach(&job, other)).await, RefusalCode::LimitReached, "1 groups");
        let large = GroupSpec { max_size: 65, ..spec(2) };
        refused_as(caller.call(&attach(&job, large)).await, RefusalCode::BadRequest, "64");
        let (group, unknown) = (processes[0].group.expect("attached"), GroupId(1));
        let propose =
            |group, change| ProposeChange { world: world(), id: ProposalId { process: id, number: 9 }, group, change };
        let of_none = propose(group, Change::Activate(RankSet::EMPTY));
        refused_as(caller.call(&of_none).await, RefusalCode::BadRequest, "no rank");
        let of_other = propose(unknown, Change::DeactivateFailed);
        refused_as(caller.call(&of_other).await, RefusalCode::NotFound, "no group");
        // The group is as before.
        until_view(&mut processes, &[0, 1]).await;
        assert_eq!(processes[0].epoch, 1);
    });
}

#[test]
fn a_world_admits_clients_of_its_tenant() {
    let scratch = Scratch::new();
    let mut config = ControlConfig::new("test");
    config.state_directory = Some(scratch.path().join("state"));
    config.cluster.adoption_wait_ns = Some(0);
    let control = ControlServer::start(config).expect("a control plane");
    run(async {
        let local = control.local();
        let authority =
            Authority::load_or_generate(&scratch.path().join("state"), &local.cluster).expect("it is there");
        let acme = Scope::tenant("acme").expect("a good name");
        let identity = authority.grant(&Grant { scope: acme, ..Grant::of(Role::Client) }).expect("issued");
        let mut config = ClientConfig::local(local, Role::Client, "test").expect("an identity");
        config.identity = identity;
        let (caller, _) = Client::connect(&config, kvplane_proto::rng::Rng::new(1, "test")).await.expect("connected");
        let register = |tenant: &str| RegisterProcess {
            world: WorldName { tenant: tenant.to_owned(), ..world() },
            process: process(0, 1),
        };
        refused_as(caller.call(&register("")).await, RefusalCode::NotPermitted, "default tenant");
        refused_as(caller.call(&register("other")).await, RefusalCode::NotPermitted, "\"other\"");
        caller.call(&register("acme")).await.expect("its own tenant");
        // The same world name of another tenant is another world; and an operator does not take part.
        client(local, Role::Client).await.call(&register("")).await.expect("valid for all");
        for role in [Role::Admin] {
            let outcome = client(local, role).await.call(&register("")).await;
            refused_as(outcome, RefusalCode::NotPermitted, "register_process");
        }
        refused_as(caller.call(&ListWorlds { after: None }).await, RefusalCode::NotPermitted, "list_worlds");
    });
}
