//! Exact expectations of single calls: bad input, proposals, and the control plane's successor.

use kvplane_group::*;

const MS: u64 = 1_000_000;

fn process(rank: u8, incarnation: u64) -> Process {
    Process { id: ProcessId { rank: WorldRank(rank), incarnation }, address: format!("rank-{rank}") }
}

fn spec(ranks: &[u8]) -> GroupSpec {
    let order = ranks.iter().map(|rank| WorldRank(*rank)).collect();
    GroupSpec { name: "g".into(), order, max_size: 4, failure_mode: FailureMode::Automatic, is_joining: false }
}

/// World and the records that its driver has made durable.
struct Host {
    world: World,
    records: Vec<GroupRecord>,
    now_ns: u64,
}

impl Host {
    fn new() -> Self {
        Self { world: World::start("job", WorldConfig::default(), vec![], 1, 7, 0), records: Vec::new(), now_ns: 0 }
    }

    fn call(&mut self, input: Input) -> Result<Reply, Rejection> {
        let reply = self.world.handle(input, self.now_ns);
        while let Some(output) = self.world.poll_output() {
            if let Output::Persist(record) = output {
                self.records = vec![record];
            }
        }
        reply
    }

    fn register(&mut self, rank: u8, incarnation: u64) -> ProcessId {
        let process = process(rank, incarnation);
        let id = process.id;
        self.call(Input::Register { process }).expect("a free rank");
        id
    }

    fn attach(&mut self, process: ProcessId, spec: GroupSpec) -> Result<GroupId, Rejection> {
        match self.call(Input::Attach { process, spec })? {
            Reply::Attached { group, .. } => Ok(group),
            Reply::Done => panic!("an attached process has a rank"),
        }
    }

    /// Lets a process report that it reaches all of `linked`.
    fn report(&mut self, process: ProcessId, linked: &[u8], group: GroupId, epoch: u64, phase: Phase) {
        let roster = self.world.status(process).expect("registered").roster;
        let linked = linked.iter().map(|rank| WorldRank(*rank)).collect();
        let (refused, overdue, groups) = (RankSet::EMPTY, RankSet::EMPTY, vec![MemberReport { group, epoch, phase }]);
        let report = Report { process, roster, linked, refused, overdue, groups };
        self.call(Input::Report { report }).expect("a live process");
    }

    fn view(&self) -> View {
        self.world.groups().next().expect("a group").1.clone()
    }
}

/// Returns a host with a group of so many members, which run.
fn founded(ranks: &[u8]) -> (Host, Vec<ProcessId>, GroupId) {
    let mut host = Host::new();
    let members: Vec<ProcessId> = ranks.iter().map(|rank| host.register(*rank, 1)).collect();
    let groups: Vec<GroupId> = members.iter().map(|member| host.attach(*member, spec(ranks)).expect("good")).collect();
    let group = groups[0];
    assert!(groups.iter().all(|other| *other == group), "founders meet in one group");
    for member in &members {
        assert_eq!(host.view().epoch, 0, "the founders are not complete");
        host.report(*member, ranks, group, 0, Phase::Ready);
    }
    assert_eq!((host.view().epoch, host.view().active.len()), (1, ranks.len()));
    (host, members, group)
}

fn running() -> Phase {
    Phase::Running { failed: RankSet::EMPTY }
}

fn fenced(completed: u64) -> Phase {
    Phase::Fenced(Progress { completed, has_result: true, is_prepared: false })
}

#[test]
fn bad_descriptions_are_refused_by_name() {
    let mut host = Host::new();
    let one = host.register(0, 1);
    let mut refused = |spec: GroupSpec| host.attach(one, spec).expect_err("bad");
    assert!(matches!(refused(spec(&[])), Rejection::GroupSize { members: 0, .. }));
    assert!(matches!(refused(spec(&[0, 1, 2, 3, 4])), Rejection::GroupSize { members: 5, max_size: 4, .. }));
    assert!(matches!(refused(GroupSpec { max_size: 65, ..spec(&[0]) }), Rejection::GroupSize { limit: 64, .. }));
    assert!(matches!(refused(spec(&[0, 1, 1])), Rejection::DuplicateRank { rank: WorldRank(1) }));
    assert!(matches!(refused(spec(&[1, 2])), Rejection::NotNamed { rank: WorldRank(0) }));
    assert!(matches!(refused(spec(&[0, 64])), Rejection::RankBeyondLimit { rank: 64, limit: 64 }));
    assert!(matches!(refused(GroupSpec { name: String::new(), ..spec(&[0]) }), Rejection::GroupName { bytes: 0, .. }));
    let joins = GroupSpec { is_joining: true, ..spec(&[0]) };
    assert!(matches!(refused(joins), Rejection::NoGroupToJoin));
    let beyond = host.call(Input::Register { process: process(64, 1) });
    assert!(matches!(beyond, Err(Rejection::RankBeyondLimit { rank: 64, .. })), "{beyond:?}");
}

#[test]
fn a_rank_has_one_live_process() {
    let mut host = Host::new();
    let first = host.register(0, 1);
    let second = host.call(Input::Register { process: process(0, 2) });
    assert!(matches!(second, Err(Rejection::RankTaken { by: 1, .. })), "{second:?}");
    host.call(Input::Unregister { process: first }).expect("it leaves");
    host.register(0, 2);
    let report = Report {
        process: first,
        roster: u64::MAX,
        linked: RankSet::EMPTY,
        refused: RankSet::EMPTY,
        overdue: RankSet::EMPTY,
        groups: vec![],
    };
    let late = host.call(Input::Report { report });
    assert!(matches!(late, Err(Rejection::Ended { .. })), "{late:?}");
}

#[test]
fn a_joiner_continues_the_order_or_is_refused() {
    let (mut host, members, group) = founded(&[0, 1]);
    let joiner = host.register(2, 1);
    let joins = |order: &[u8]| GroupSpec { is_joining: true, ..spec(order) };
    let other = host.attach(joiner, joins(&[1, 0, 2])).expect_err("another order");
    assert!(matches!(other, Rejection::OtherGroup { .. }), "{other:?}");
    assert_eq!(host.attach(joiner, joins(&[0, 1, 2])).expect("a continuation"), group);
    assert_eq!(host.view().epoch, 1, "it waits to be activated");
    for member in &members {
        host.report(*member, &[0, 1, 2], group, 1, running());
    }
    host.report(joiner, &[0, 1, 2], group, 1, Phase::Ready);
    let id = ProposalId { process: members[0], number: 1 };
    let change = Change::Activate(RankSet::single(GroupRank(2)));
    host.call(Input::Propose { id, group, change }).expect("a member");
    assert_eq!(host.view().epoch, 1, "members are fenced first");
    host.report(members[0], &[0, 1, 2], group, 1, fenced(5));
    host.report(members[1], &[0, 1, 2], group, 1, fenced(5));
    let view = host.view();
    assert_eq!((view.epoch, view.size(), view.resolution.completed), (2, 3, 5));
    let status = host.world.status(members[0]).expect("registered");
    let applied = (id, Outcome::Applied { epoch: 2, dropped: RankSet::EMPTY });
    assert_eq!(status.groups[0].outcomes, [applied]);
}

/// Returns a group of two members that run, and a joiner that is ready.
fn joined() -> (Host, Vec<ProcessId>, ProcessId, GroupId) {
    let (mut host, members, group) = founded(&[0, 1]);
    let joiner = host.register(2, 1);
    let order = GroupSpec { is_joining: true, ..spec(&[0, 1, 2]) };
    host.attach(joiner, order).expect("a continuation");
    for member in &members {
        host.report(*member, &[0, 1, 2], group, 1, running());
    }
    host.report(joiner, &[0, 1, 2], group, 1, Phase::Ready);
    (host, members, joiner, group)
}

#[test]
fn a_joiner_that_is_not_ready_any_more_is_left_out() {
    let (mut host, members, joiner, group) = joined();
    let id = ProposalId { process: members[0], number: 1 };
    let joins = RankSet::single(GroupRank(2));
    host.call(Input::Propose { id, group, change: Change::Activate(joins) }).expect("a member");
    host.report(joiner, &[0, 1, 2], group, 1, Phase::Joining);
    members.iter().for_each(|member| host.report(*member, &[0, 1, 2], group, 1, fenced(5)));
    assert_eq!((host.view().epoch, host.view().active.len()), (2, 2));
    let status = host.world.status(members[0]).expect("registered");
    assert_eq!(status.groups[0].outcomes, [(id, Outcome::Applied { epoch: 2, dropped: joins })]);
}

#[test]
fn a_report_of_an_earlier_view_that_arrives_late_changes_nothing() {
    let (mut host, _, joiner, group) = joined();
    let state = |host: &Host| host.world.status(joiner).expect("registered").groups[0].members[2];
    assert_eq!(state(&host), MemberState::AwaitingActivation);
    host.report(joiner, &[0, 1, 2], group, 2, Phase::Joining);
    host.report(joiner, &[0, 1, 2], group, 1, Phase::Ready);
    assert_eq!(state(&host), MemberState::Inactive);
}

#[test]
fn a_claim_about_a_former_process_of_a_rank_does_not_count_against_the_next_one() {
    let mut host = Host::new();
    let (witness, former) = (host.register(0, 1), host.register(1, 1));
    let roster = host.world.status(witness).expect("registered").roster;
    let (linked, refused) = (RankSet::EMPTY, RankSet::single(WorldRank(1)));
    let claim = Report { process: witness, roster, linked, refused, overdue: RankSet::EMPTY, groups: vec![] };
    host.call(Input::Unregister { process: former }).expect("it leaves");
    host.register(1, 2);
    for at in 1..=4 {
        host.now_ns = at * 100 * MS;
        host.call(Input::Report { report: claim.clone() }).expect("a live process");
    }
    assert_eq!(host.world.process_state(WorldRank(1)), ProcessState::Synced);
    let roster = host.world.status(witness).expect("registered").roster;
    host.call(Input::Report { report: Report { roster, ..claim } }).expect("a live process");
    assert_eq!(host.world.process_state(WorldRank(1)), ProcessState::Offline, "this one is about the next process");
}

#[test]
fn a_claim_that_a_process_is_dead_counts_only_while_it_is_silent() {
    let (mut host, members, group) = founded(&[0, 1]);
    let claim = |host: &mut Host| {
        let roster = host.world.status(members[0]).expect("registered").roster;
        let groups = vec![MemberReport { group, epoch: 1, phase: running() }];
        let (linked, refused) = (RankSet::single(WorldRank(0)), RankSet::single(WorldRank(1)));
        let report = Report { process: members[0], roster, linked, refused, overdue: RankSet::EMPTY, groups };
        host.call(Input::Report { report }).expect("a live process");
    };
    for at in 1..=10 {
        host.now_ns = at * 100 * MS;
        claim(&mut host);
        host.report(members[1], &[0, 1], group, 1, running());
    }
    assert_eq!(host.world.process_state(WorldRank(1)), ProcessState::Synced, "it reports, so it lives");
    for at in 11..=13 {
        host.now_ns = at * 100 * MS;
        claim(&mut host);
    }
    assert_eq!(host.world.process_state(WorldRank(1)), ProcessState::Offline);
    host.report(members[0], &[0], group, 1, fenced(3));
    assert_eq!((host.view().epoch, host.view().active.bits()), (2, 1));
}

/// Returns the silence of the second member, in milliseconds, after which it is dead that a collective waits for, where
/// the reports of both have arrived at this interval.
fn silence_allowed_at(interval_ms: u64) -> u64 {
    let (mut host, members, group) = founded(&[0, 1]);
    for _ in 0..10 {
        for _ in 0..interval_ms / 50 {
            host.now_ns += 50 * MS;
            host.call(Input::Tick).expect("time advances");
        }
        members.iter().for_each(|member| host.report(*member, &[0, 1], group, 1, running()));
    }
    let heard_ns = host.now_ns;
    while host.world.process_state(WorldRank(1)) != ProcessState::Offline {
        host.now_ns += 50 * MS;
        let roster = host.world.status(members[0]).expect("registered").roster;
        let groups = vec![MemberReport { group, epoch: 1, phase: running() }];
        let (linked, refused, overdue) = (RankSet::first(2), RankSet::EMPTY, RankSet::single(WorldRank(1)));
        let report = Report { process: members[0], roster, linked, refused, overdue, groups };
        host.call(Input::Report { report }).expect("a live process");
    }
    (host.now_ns - heard_ns) / MS
}

#[test]
fn a_process_that_a_collective_waits_for_may_be_silent_for_longer_where_reports_arrive_late() {
    assert_eq!(silence_allowed_at(100), 750);
    assert_eq!(silence_allowed_at(200), 750);
    assert_eq!(silence_allowed_at(400), 1_200);
    assert_eq!(silence_allowed_at(700), 2_100);
}

#[test]
fn silence_during_a_pause_of_the_control_plane_does_not_count() {
    let (mut host, members, group) = founded(&[0, 1]);
    host.now_ns = 60_000 * MS;
    host.report(members[0], &[0, 1], group, 1, running());
    assert_eq!(host.world.process_state(WorldRank(1)), ProcessState::Healthy, "its reports may be waiting unread");
}

#[test]
fn a_successor_of_the_control_plane_finishes_a_flush() {
    let (mut host, members, group) = founded(&[0, 1]);
    host.world = World::start("job", WorldConfig::default(), host.records.clone(), 2, 8, host.now_ns);
    assert_eq!(host.view().epoch, 1);
    // Both were fenced by the former one, whose next view was not durable.
    host.report(members[0], &[0, 1], group, 1, fenced(7));
    assert_eq!(host.view().epoch, 1, "the other one may have come further");
    host.report(members[1], &[0, 1], group, 1, fenced(8));
    let view = host.view();
    assert_eq!((view.epoch, view.active.len()), (2, 2));
    assert_eq!(view.resolution, Resolution { completed: 8, holder: Some(GroupRank(1)) });
}

#[test]
fn records_survive_the_round_trip_and_damage_is_named() {
    let (host, _, _) = founded(&[2, 0, 1]);
    let record = &host.records[0];
    let bytes = record.to_bytes().expect("it has an encoding");
    assert_eq!(GroupRecord::from_bytes(&bytes).as_ref(), Ok(record));
    for length in 0..bytes.len() {
        assert!(GroupRecord::from_bytes(&bytes[..length]).is_err(), "{length} bytes of {}", bytes.len());
    }
    let later = [&[2], &bytes[1..]].concat();
    assert_eq!(GroupRecord::from_bytes(&later), Err(GroupRecordError::Format { found: Some(2), supported: 1 }));
    assert!(matches!(
        GroupRecord::from_bytes(&[&bytes[..], &[0]].concat()),
        Err(GroupRecordError::Malformed { reason }) if reason.contains('1')
    ));
    let changes: [fn(&mut GroupRecord); 6] = [
        |record| record.founders = 4,
        |record| record.founders = 0,
        |record| record.spec.order[0] = WorldRank(64),
        |record| record.view.active.insert(GroupRank(3)),
        |record| record.view.incarnations.clear(),
        |record| record.addresses[1] = Some("a".repeat(MAX_ADDRESS_BYTES + 1)),
    ];
    for change in changes {
        let mut damaged = record.clone();
        change(&mut damaged);
        let found = GroupRecord::from_bytes(&damaged.to_bytes().expect("it has an encoding"));
        assert!(matches!(found, Err(GroupRecordError::Contents { .. })), "{found:?} of {damaged:?}");
    }
}

#[test]
fn deaths_exclusions_and_view_changes_are_counted() {
    let (mut host, processes, group) = founded(&[0, 1, 2]);
    host.call(Input::Unregister { process: processes[2] }).expect("a live process");
    host.now_ns += 100 * MS;
    host.report(processes[0], &[1], group, 1, fenced(0));
    host.report(processes[1], &[0], group, 1, fenced(0));
    let counters = host.world.counters();
    assert_eq!((counters.foundings, counters.view_changes), (1, 1));
    assert_eq!(counters.view_change_ns, 100 * MS);
    host.call(Input::Unregister { process: processes[2] }).expect("it has ended before");
    assert_eq!(counters.exclusions, ExclusionCounts { ended: 1, ..ExclusionCounts::default() });
    // One is silent, and its peer finds that its address refuses connections.
    let roster = host.world.status(processes[0]).expect("registered").roster;
    let refused = [WorldRank(1)].into_iter().collect();
    for _ in 0..3 {
        host.now_ns += 100 * MS;
        let (linked, overdue) = (RankSet::EMPTY, RankSet::EMPTY);
        let report = Report { process: processes[0], roster, linked, refused, overdue, groups: vec![] };
        host.call(Input::Report { report }).expect("a live process");
    }
    assert_eq!(host.world.counters().deaths, DeathCounts { refused: 1, ..DeathCounts::default() });
    assert!(!host.world.is_empty());
    let summaries: Vec<_> = host.world.group_summaries().collect();
    assert_eq!(summaries.len(), 1);
    assert!(summaries[0].changing_ns.is_some(), "the survivor has not been fenced yet");
    let live: Vec<_> = host.world.process_summaries().map(|summary| summary.process.id).collect();
    assert_eq!(live, [processes[0]]);
}

#[test]
fn a_member_is_ready_again_only_after_it_knows_that_it_was_excluded() {
    let (mut host, members, group) = founded(&[0, 1]);
    // The founding view does not reach the second one, which has reported that it is ready for it.
    let number = |number| ProposalId { process: members[0], number };
    let second = RankSet::single(GroupRank(1));
    host.call(Input::Propose { id: number(1), group, change: Change::Deactivate(second) }).expect("a member");
    for _ in 0..WorldConfig::default().fence_ns / (100 * MS) {
        host.now_ns += 100 * MS;
        host.report(members[0], &[0, 1], group, 1, fenced(3));
        host.report(members[1], &[0, 1], group, 0, Phase::Ready);
    }
    assert_eq!((host.view().epoch, host.view().active.bits()), (2, 0b01), "it was not fenced in time");
    host.report(members[0], &[0, 1], group, 2, running());
    host.call(Input::Propose { id: number(2), group, change: Change::Activate(second) }).expect("a member");
    host.report(members[1], &[0, 1], group, 0, Phase::Ready);
    assert_eq!(host.world.status(members[0]).expect("registered").groups[0].view.epoch, 2);
    assert!(!host.world.status(members[0]).expect("registered").groups[0].is_changing, "it said that before");
    host.report(members[1], &[0, 1], group, 2, Phase::Ready);
    host.report(members[0], &[0, 1], group, 2, fenced(4));
    assert_eq!((host.view().epoch, host.view().active.bits()), (3, 0b11));
}
