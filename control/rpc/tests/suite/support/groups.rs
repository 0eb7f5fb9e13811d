//! Messages of process groups, for tests of their encoding.

use kvplane_group::*;
use kvplane_rpc::codec::{decode, encode};
use kvplane_rpc::groups::*;

use super::Show;

fn world() -> WorldName {
    WorldName { tenant: "t".to_owned(), world: "job".to_owned() }
}

/// Most groups of a world that an operator may allow.
const MOST_GROUPS: usize = 1024;

const PROCESS: ProcessId = ProcessId { rank: WorldRank(3), incarnation: 9 };

fn process() -> Process {
    Process { id: PROCESS, address: "a:1".to_owned() }
}

fn spec() -> GroupSpec {
    let order = vec![WorldRank(3), WorldRank(0)];
    GroupSpec { name: "g".to_owned(), order, max_size: 4, failure_mode: FailureMode::Deferred, is_joining: true }
}

fn ranks<R: Rank>(ranks: &[u8]) -> RankSet<R> {
    ranks.iter().map(|rank| R::from_index(*rank)).collect()
}

fn view() -> View {
    View {
        epoch: 5,
        active: ranks(&[0, 1]),
        failed: ranks(&[1]),
        incarnations: vec![Some(9), None],
        resolution: Resolution { completed: 7, holder: Some(GroupRank(1)) },
    }
}

fn report() -> Report {
    let progress = Progress { completed: 7, has_result: true, is_prepared: false };
    let phases = [Phase::Joining, Phase::Ready, Phase::Running { failed: ranks(&[1]) }, Phase::Fenced(progress)];
    let groups = phases.map(|phase| MemberReport { group: GroupId(8), epoch: 5, phase }).to_vec();
    let (linked, refused, overdue) = (ranks(&[0, 1]), ranks(&[2]), ranks(&[63]));
    Report { process: PROCESS, roster: 6, linked, refused, overdue, groups }
}

fn status() -> WorldStatus {
    let id = ProposalId { process: PROCESS, number: 4 };
    let outcomes = [
        Outcome::Applied { epoch: 5, dropped: ranks(&[1]) },
        Outcome::NotReady { ranks: ranks(&[1]) },
        Outcome::NoMemberLeft,
        Outcome::Unchanged { epoch: 5 },
        Outcome::NotAutomatic,
    ];
    let group = GroupStatus {
        group: GroupId(8),
        rank: GroupRank(0),
        order: spec().order,
        view: view(),
        is_changing: true,
        members: vec![MemberState::Absent, MemberState::Inactive, MemberState::AwaitingActivation, MemberState::Active],
        processes: vec![ProcessState::Offline, ProcessState::Synced, ProcessState::Healthy],
        outcomes: outcomes.map(|outcome| (id, outcome)).to_vec(),
    };
    let revision = StatusRevision { start: 2, number: 11 };
    WorldStatus { revision, status: Status { roster: 6, peers: vec![process()], groups: vec![group] } }
}

pub(crate) fn show_all(show: Show<'_>) {
    let known = StatusRevision { start: 2, number: 10 };
    show("RegisterProcess", encode(&RegisterProcess { world: world(), process: process() }));
    show("UnregisterProcess", encode(&UnregisterProcess { world: world(), process: PROCESS }));
    show("ReportProcess", encode(&ReportProcess { world: world(), known, report: report() }));
    show("AttachMember", encode(&AttachMember { world: world(), process: PROCESS, spec: spec() }));
    show("DetachMember", encode(&DetachMember { world: world(), process: PROCESS, group: GroupId(8) }));
    let id = ProposalId { process: PROCESS, number: 4 };
    for change in [Change::Activate(ranks(&[1])), Change::Deactivate(ranks(&[0])), Change::DeactivateFailed] {
        show("ProposeChange", encode(&ProposeChange { world: world(), id, group: GroupId(8), change }));
    }
    show("WatchWorld", encode(&WatchWorld { world: world(), process: PROCESS, known }));
    show("ListWorlds", encode(&ListWorlds { after: Some(world()) }));
    show("DescribeWorld", encode(&DescribeWorld { world: world() }));
    show("WorldReply", encode(&WorldReply { status: None }));
    show("WorldStatus", encode(&status()));
    show("MemberAttached", encode(&MemberAttached { group: GroupId(8), rank: GroupRank(1) }));
    let (name, processes, groups, changing) = (world(), 2, 1, 1);
    let figures = WorldFigures { name, processes, groups, changing, view_changes: 5, exclusions: 6 };
    show("WorldList", encode(&WorldList { worlds: vec![figures], more: true }));
    let process = ProcessSummary { process: process(), state: ProcessState::Healthy, silent_ns: 12 };
    let group = GroupSummary {
        group: GroupId(8),
        spec: spec(),
        view: view(),
        changing_ns: Some(13),
        members: vec![MemberState::Active],
        proposals: 14,
    };
    show("WorldDescription", encode(&WorldDescription { processes: vec![process], groups: vec![group] }));
}

pub(crate) fn decode_as_all(frame: &[u8]) {
    let _ = decode::<RegisterProcess>(frame);
    let _ = decode::<UnregisterProcess>(frame);
    let _ = decode::<ReportProcess>(frame);
    let _ = decode::<AttachMember>(frame);
    let _ = decode::<DetachMember>(frame);
    let _ = decode::<ProposeChange>(frame);
    let _ = decode::<WatchWorld>(frame);
    let _ = decode::<ListWorlds>(frame);
    let _ = decode::<DescribeWorld>(frame);
    let _ = decode::<WorldReply>(frame);
    let _ = decode::<WorldStatus>(frame);
    let _ = decode::<MemberAttached>(frame);
    let _ = decode::<WorldList>(frame);
    let _ = decode::<WorldDescription>(frame);
}

/// The status of a process with the most groups, each with the most members and outcomes, fits.
#[test]
fn the_largest_status_fits() {
    let WorldStatus { revision, status: Status { roster, groups, .. } } = status();
    let all: RankSet<GroupRank> = RankSet::first(MAX_RANKS);
    let view = View { active: all, failed: all, incarnations: vec![Some(9); MAX_RANKS], ..view() };
    let group = GroupStatus {
        order: (0..64).map(WorldRank).collect(),
        view,
        members: vec![MemberState::Active; MAX_RANKS],
        processes: vec![ProcessState::Healthy; MAX_RANKS],
        outcomes: vec![groups[0].outcomes[0]; 256],
        ..groups[0].clone()
    };
    let peers = vec![Process { id: PROCESS, address: "a".repeat(MAX_ADDRESS_BYTES) }; MAX_RANKS];
    let groups = vec![group; MOST_GROUPS];
    let status = WorldStatus { revision, status: Status { roster, peers, groups } };
    let reply = WorldReply { status: Some(status) };
    assert_eq!(decode::<WorldReply>(&encode(&reply).expect("it fits")), Ok(reply));
    let groups = vec![report().groups[3]; MOST_GROUPS];
    let report = ReportProcess { world: world(), known: revision, report: Report { groups, ..report() } };
    assert_eq!(decode::<ReportProcess>(&encode(&report).expect("it fits")), Ok(report));
}
