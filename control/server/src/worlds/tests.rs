//! Cost of reports, and behavior when the disk fails.

use std::sync::Arc;

use kvplane_cluster::{Cluster, ClusterConfig};
use kvplane_group::{
    FailureMode, GroupId, GroupSpec, MAX_RANKS, MemberReport, Phase, Process, ProcessId, RankSet, Report, WorldRank,
};
use kvplane_rpc::RefusalCode;
use kvplane_rpc::groups::{AttachMember, RegisterProcess, ReportProcess, StatusRevision, WatchWorld, WorldName};

use super::{StoredWorlds, Worlds, WorldsConfig};
use crate::cluster::ClusterHost;
use crate::store::Store;

fn host() -> (Arc<ClusterHost>, Worlds) {
    let cluster = Cluster::new(ClusterConfig::new("test"), [], 0).expect("defaults are valid");
    let cluster = Arc::new(ClusterHost::new(cluster, Store::in_memory(1), None, false).expect("no disk"));
    let worlds = Worlds::new(WorldsConfig::default(), StoredWorlds::default(), Arc::clone(&cluster), 1);
    (cluster, worlds.expect("no disk"))
}

fn world() -> WorldName {
    WorldName { tenant: String::new(), world: "job".to_owned() }
}

const fn id(rank: u8) -> ProcessId {
    ProcessId { rank: WorldRank(rank), incarnation: 1 }
}

fn register(worlds: &Worlds, rank: u8) -> StatusRevision {
    let process = Process { id: id(rank), address: format!("rank-{rank}:1") };
    let reply = worlds.register(RegisterProcess { world: world(), process }).expect("a free rank");
    reply.status.expect("a process that registers has no status").revision
}

fn attach(worlds: &Worlds, rank: u8, members: u8) -> GroupId {
    let order = (0..members).map(WorldRank).collect();
    let (name, max_size, failure_mode) = ("g".to_owned(), 64, FailureMode::Automatic);
    let spec = GroupSpec { name, order, max_size, failure_mode, is_joining: false };
    worlds.attach(AttachMember { world: world(), process: id(rank), spec }).expect("a good group").group
}

fn report(worlds: &Worlds, rank: u8, group: GroupId, phase: Phase, known: StatusRevision) -> ReportProcess {
    let roster = worlds.core().worlds[&world()].world.status(id(rank)).expect("registered").roster;
    let groups = vec![MemberReport { group, epoch: u64::from(phase != Phase::Ready), phase }];
    let (linked, refused, overdue) = (RankSet::first(MAX_RANKS), RankSet::EMPTY, RankSet::EMPTY);
    let report = Report { process: id(rank), roster, linked, refused, overdue, groups };
    ReportProcess { world: world(), known, report }
}

#[test]
fn reports_without_news_send_nothing_and_write_nothing() {
    let (cluster, worlds) = host();
    let count = MAX_RANKS as u8;
    for rank in 0..count {
        register(&worlds, rank);
    }
    let groups: Vec<GroupId> = (0..count).map(|rank| attach(&worlds, rank, count)).collect();
    let mut streams: Vec<_> = (0..count)
        .map(|rank| {
            let known = StatusRevision::default();
            worlds.watch(&WatchWorld { world: world(), process: id(rank), known }).expect("registered")
        })
        .collect();
    let mut drain = || {
        let newest = |stream: &mut tokio::sync::mpsc::Receiver<_>| {
            let mut count = 0;
            while stream.try_recv().is_ok() {
                count += 1;
            }
            count
        };
        streams.iter_mut().map(newest).sum::<u64>()
    };
    for rank in 0..count {
        let call = report(&worlds, rank, groups[0], Phase::Ready, StatusRevision::default());
        worlds.report(call).expect("alive");
        drain();
    }
    let running = Phase::Running { failed: RankSet::EMPTY };
    let known: Vec<StatusRevision> = (0..count)
        .map(|rank| {
            let reply = worlds.report(report(&worlds, rank, groups[0], running, StatusRevision::default()));
            reply.expect("alive").status.expect("it knows none").revision
        })
        .collect();
    assert_eq!(worlds.core().worlds[&world()].world.counters().foundings, 1);
    drain();
    // Nothing is written: a broken disk would stop the control plane.
    cluster.lock().expect("no failure").break_store();
    let before = worlds.core().statuses;
    for round in 0..1_000 / MAX_RANKS + 1 {
        for rank in 0..count {
            let call = report(&worlds, rank, groups[0], running, known[usize::from(rank)]);
            let reply = worlds.report(call).expect("alive");
            assert!(reply.status.is_none(), "rank {rank} has the newest status in round {round}");
        }
    }
    assert_eq!((worlds.core().statuses, drain()), (before, 0));

    // One that is fenced by itself has a new view prepared, of which all get one status.
    let failed = Phase::Running { failed: RankSet::single(kvplane_group::GroupRank(1)) };
    worlds.report(report(&worlds, 0, groups[0], failed, known[0])).expect("alive");
    assert_eq!((worlds.core().statuses - before, drain()), (u64::from(count) + 1, u64::from(count)));
}

#[test]
fn a_view_that_cannot_be_made_durable_is_not_sent() {
    let (cluster, worlds) = host();
    let known = register(&worlds, 0);
    let group = attach(&worlds, 0, 1);
    let watch = WatchWorld { world: world(), process: id(0), known };
    let mut stream = worlds.watch(&watch).expect("registered");
    while stream.try_recv().is_ok() {}
    cluster.lock().expect("no failure").break_store();
    let refusal = worlds.report(report(&worlds, 0, group, Phase::Ready, known)).expect_err("the view is not durable");
    assert_eq!(refusal.known_code(), Some(RefusalCode::Storage));
    assert!(stream.try_recv().is_err(), "the view stays unpublished");
    let again = worlds.report(report(&worlds, 0, group, Phase::Ready, known));
    assert_eq!(again.expect_err("no more").known_code(), Some(RefusalCode::Storage));
}
