//! Members through changes of the view, deadlines and lost connections, step by step.

use kvplane_collective::*;
use kvplane_group::*;

use crate::collectives::{LIMIT, Net, THRESHOLDS, status_of, view_of};
use crate::host::Host;

const MEMBERS: usize = 3;

fn barrier() -> Operation {
    Operation { collective: Collective::Barrier, data_type: DataType::U8, count: 0, places: MEMBERS as u8 }
}

fn broadcast(count: u64) -> Operation {
    let collective = Collective::Broadcast { root: GroupRank(2) };
    Operation { collective, data_type: DataType::U8, count, places: MEMBERS as u8 }
}

/// Fences a member.
fn fence(net: &mut Net, rank: usize) {
    let epoch = net.hosts[rank].member.view().epoch;
    let view = View { epoch, ..view_of(epoch, MEMBERS) };
    net.hosts[rank].member.follow(&GroupStatus { is_changing: true, ..status_of(rank, view) }, 0);
    net.hosts[rank].drain();
}

/// Lets a member follow the second view.
fn follow(net: &mut Net, rank: usize, active: u64, completed: u64, holder: Option<u8>) {
    let resolution = Resolution { completed, holder: holder.map(GroupRank) };
    let view = View { active: RankSet::from_bits(active), resolution, ..view_of(2, MEMBERS) };
    net.hosts[rank].member.follow(&status_of(rank, view), 0);
    net.hosts[rank].drain();
}

fn submit(net: &mut Net, rank: usize, operation: &Operation) {
    let (bytes, _) = operation.buffer_bytes(GroupRank(rank as u8));
    net.hosts[rank].submit(operation, vec![rank as u8 + 1; bytes as usize], 1_000).expect("well-formed");
    net.hosts[rank].advance(0);
}

/// Lets a member's deadline and the time for a verdict pass.
fn expire(net: &mut Net, rank: usize) {
    let host = &mut net.hosts[rank];
    for _ in 0..2 {
        let due_ns = host.member.poll_timeout().expect("an operation waits");
        host.member.handle_timeout(due_ns);
        host.drain();
    }
}

#[test]
fn an_operation_whose_result_nobody_keeps_is_not_taken_for_complete() {
    let mut net = Net::new(MEMBERS, 1);
    let operation = Operation { collective: Collective::AllGather, count: 400, ..barrier() };
    submit(&mut net, 1, &operation);
    fence(&mut net, 1);
    // The others gave it up, and count it as ended.
    follow(&mut net, 1, 0b111, 1, Some(0));
    net.hosts[1].advance(0);
    assert_eq!(net.ended(1).1, Err(Failure::EndedElsewhere));
    assert_eq!(net.hosts[1].member.next_number(), 2);
}

#[test]
fn a_barrier_that_its_holder_gave_up_is_not_passed() {
    let mut net = Net::new(MEMBERS, 1);
    submit(&mut net, 0, &barrier());
    submit(&mut net, 1, &barrier());
    expire(&mut net, 0);
    assert!(matches!(net.ended(0).1, Err(Failure::Deadline { .. })));
    for rank in 0..2 {
        fence(&mut net, rank);
        follow(&mut net, rank, 0b011, 1, Some(0));
    }
    net.settle();
    assert!(matches!(net.ended(1).1, Err(Failure::OthersDeadline { rank: GroupRank(0), .. })));
}

#[test]
fn every_operation_that_was_given_up_in_a_fence_has_its_number() {
    let mut net = Net::new(MEMBERS, 1);
    fence(&mut net, 0);
    for number in 1..=3 {
        assert_eq!(net.hosts[0].member.next_number(), number);
        submit(&mut net, 0, &barrier());
        expire(&mut net, 0);
        assert!(matches!(net.ended(0).1, Err(Failure::Deadline { .. })));
    }
    (1..MEMBERS).for_each(|rank| fence(&mut net, rank));
    (0..MEMBERS).for_each(|rank| follow(&mut net, rank, 0b111, 0, None));
    net.settle();
    for rank in 0..MEMBERS {
        (rank > 0).then(|| (0..3).for_each(|_| submit(&mut net, rank, &barrier())));
        assert_eq!(net.hosts[rank].member.next_number(), 4);
        submit(&mut net, rank, &barrier());
    }
    net.settle();
    for rank in 1..MEMBERS {
        (0..3).for_each(|_| assert!(matches!(net.ended(rank).1, Err(Failure::OthersDeadline { .. }))));
    }
    (0..MEMBERS).for_each(|rank| assert!(net.ended(rank).1.is_ok(), "the sequence goes on at rank {rank}"));
}

#[test]
fn members_find_together_that_a_root_is_gone() {
    let mut net = Net::new(MEMBERS, 1);
    for rank in 0..2 {
        fence(&mut net, rank);
        follow(&mut net, rank, 0b011, 0, None);
    }
    submit(&mut net, 0, &broadcast(8));
    submit(&mut net, 0, &broadcast(8));
    net.settle();
    assert!(net.hosts[0].ended.is_empty(), "a member that has not called would be two operations behind");
    submit(&mut net, 1, &broadcast(8));
    submit(&mut net, 1, &broadcast(8));
    net.settle();
    for rank in [0, 0, 1, 1] {
        assert_eq!(net.ended(rank).1, Err(Failure::RootGone { root: GroupRank(2) }));
    }
}

#[test]
fn a_connection_that_was_lost_while_a_view_was_decided_has_failed_in_it() {
    for is_linked in [false, true] {
        let mut net = Net::new(MEMBERS, 1);
        fence(&mut net, 0);
        net.hosts[0].member.lose(RankSet::single(GroupRank(1)));
        if is_linked {
            net.hosts[0].member.link(RankSet::single(GroupRank(1)));
        }
        follow(&mut net, 0, 0b111, 0, None);
        let failed = if is_linked { RankSet::EMPTY } else { RankSet::single(GroupRank(1)) };
        assert_eq!(net.hosts[0].member.report().phase, Phase::Running { failed });
    }
}

#[test]
fn a_peer_that_takes_no_bytes_is_overdue() {
    let mut net = Net::new(MEMBERS, 1);
    let all: Vec<_> = (0..MEMBERS).collect();
    all.iter().for_each(|rank| submit(&mut net, *rank, &broadcast(4_000)));
    // All have begun, and the root has no room for its bytes at the first member of the chain.
    while all.iter().any(|rank| net.send(*rank, if *rank == 2 { 0b010 } else { 0b111 })) || net.arrive() {}
    net.hosts[2].member.handle_timeout(1_000);
    assert_eq!(net.hosts[2].member.overdue(), RankSet::single(GroupRank(0)));
}

#[test]
fn a_member_whose_caller_is_late_follows_what_the_others_gave_up() {
    let mut net = Net::new(MEMBERS, 1);
    for _ in 0..4 {
        (0..2).for_each(|rank| submit(&mut net, rank, &barrier()));
        net.settle();
        expire(&mut net, 0);
        net.settle();
    }
    fence(&mut net, 2);
    let progress = Progress { completed: 4, has_result: true, is_prepared: false };
    assert_eq!(net.hosts[2].member.report().phase, Phase::Fenced(progress), "it would be excluded");
    assert_eq!(net.hosts[2].member.next_number(), 1);
}

#[test]
fn a_member_leaves_only_when_the_others_have_completed_what_it_has() {
    let mut net = Net::new(2, 1);
    let barrier = Operation { places: 2, ..barrier() };
    (0..2).for_each(|rank| submit(&mut net, rank, &barrier));
    assert!(net.send(0, u64::MAX) && net.arrive() && net.send(1, u64::MAX));
    net.hosts[1].advance(0);
    assert!(net.ended(1).1.is_ok(), "its own frame is still on the way");
    net.hosts[1].member.leave();
    assert!(!net.hosts[1].member.may_leave(), "rank 0 has not completed the operation");
    assert!(net.send(1, u64::MAX), "the request to leave");
    assert!(!net.hosts[1].member.may_leave());
    net.settle();
    assert!(net.ended(0).1.is_ok());
    assert!(net.hosts[1].member.may_leave());
}

#[test]
fn a_member_that_leaves_does_not_wait_for_peers_that_are_gone() {
    let mut net = Net::new(2, 1);
    net.hosts[0].member.leave();
    assert!(!net.hosts[0].member.may_leave());
    net.hosts[0].member.lose(RankSet::single(GroupRank(1)));
    assert!(net.hosts[0].member.may_leave());
}

#[test]
fn messages_of_peers_that_are_gone_end_at_once() {
    let peer = GroupRank(1);
    let mut net = Net::new(MEMBERS, 1);
    let host = &mut net.hosts[0];
    host.member.lose(RankSet::single(peer));
    host.send(peer, 0, vec![1; 10], u64::MAX);
    host.drain();
    host.receive(Some(peer), 0, 10, u64::MAX);
    (0..2).for_each(|_| assert_eq!(net.ended(0).1, Err(Failure::PeerLost { rank: peer })));
    let host = &mut net.hosts[0];
    host.member.link(RankSet::single(peer));
    host.receive(Some(peer), 0, 10, u64::MAX);
    assert!(host.ended.is_empty(), "the connection exists again");
}

#[test]
fn messages_that_have_arrived_outlive_their_sender_and_not_its_incarnation() {
    let peer = GroupRank(1);
    let mut net = Net::new(MEMBERS, 1);
    for byte in [7, 8] {
        net.hosts[1].send(GroupRank(0), 0, vec![byte; 10], u64::MAX);
    }
    net.settle();
    net.hosts[0].member.lose(RankSet::single(peer));
    net.hosts[0].receive(Some(peer), 0, 10, u64::MAX);
    let (_, outcome, target) = net.ended(0);
    assert!(outcome.is_ok());
    assert_eq!(target, [7; 10]);
    let mut view = view_of(2, MEMBERS);
    view.incarnations[1] = Some(2);
    net.hosts[0].member.follow(&status_of(0, view), 0);
    net.hosts[0].drain();
    assert_eq!(net.hosts[0].kept(), 0, "the second message was of the former incarnation");
    net.hosts[0].member.link(RankSet::single(peer));
    net.hosts[0].receive(Some(peer), 0, 10, u64::MAX);
    assert!(net.hosts[0].ended.is_empty());
}

#[test]
fn messages_of_members_that_a_view_excludes_end() {
    let mut net = Net::new(MEMBERS, 1);
    net.hosts[0].receive(Some(GroupRank(2)), 0, 10, u64::MAX);
    fence(&mut net, 0);
    follow(&mut net, 0, 0b011, 0, None);
    assert_eq!(net.ended(0).1, Err(Failure::PeerLost { rank: GroupRank(2) }));
}

#[test]
fn an_operation_without_memory_ends_at_all_members() {
    let mut net = Net::new(MEMBERS, 1);
    let mut works = Vec::new();
    for host in &mut net.hosts {
        works.push(host.submit(&broadcast(400), vec![1; 400], 1_000).expect("well-formed"));
        host.advance(0);
    }
    let host = &mut net.hosts[0];
    host.member.lack_memory(WorkId(works[0].0 + 1), 77);
    host.drain();
    assert!(host.ended.is_empty(), "another operation lacks it");
    host.member.lack_memory(works[0], 77);
    host.drain();
    net.settle();
    let rank = GroupRank(0);
    assert_eq!(net.ended(0).1, Err(Failure::NoMemory { rank, bytes: Some(77) }));
    (1..MEMBERS).for_each(|at| assert_eq!(net.ended(at).1, Err(Failure::NoMemory { rank, bytes: None })));
}

#[test]
fn active_members_that_failed_before_are_named_in_each_operation() {
    let mut net = Net::new(MEMBERS, 1);
    let gone = RankSet::single(GroupRank(2));
    for rank in 0..2 {
        let view = View { failed: gone, ..view_of(2, MEMBERS) };
        net.hosts[rank].member.follow(&status_of(rank, view), 0);
        submit(&mut net, rank, &barrier());
    }
    net.settle();
    for rank in 0..2 {
        let completion = net.ended(rank).1.expect("two members are enough");
        assert_eq!((completion.failed, completion.participants), (gone, RankSet::first(2)));
    }
}

#[test]
fn a_joiner_runs_alone_until_it_is_ready() {
    let config = MemberConfig { thresholds: THRESHOLDS, ..MemberConfig::default() };
    let alone = RankSet::single(GroupRank(2));
    let mut host = Host::new(Member::new(GroupId(3), GroupRank(2), 1, false, config));
    for operation in [barrier(), broadcast(400)] {
        let bytes = operation.buffer_bytes(GroupRank(2)).0 as usize;
        host.submit(&operation, vec![3; bytes], 1_000).expect("well-formed");
        host.advance(0);
        let (_, outcome, _) = host.ended.pop_front().expect("nobody else takes part");
        assert_eq!(outcome.map(|completion| (completion.participants, completion.failed)), Ok((alone, RankSet::EMPTY)));
        assert_eq!(host.member.next_number(), 1, "it is no operation of the group");
    }
    host.member.set_ready();
    host.submit(&barrier(), Vec::new(), 1_000).expect("well-formed");
    host.advance(0);
    assert!(host.ended.is_empty(), "it waits for its activation");
}

#[test]
fn a_request_to_leave_is_answered_once_its_operation_is_complete() {
    let mut net = Net::new(MEMBERS, 1);
    let mut held = None;
    for rank in 0..MEMBERS {
        submit(&mut net, rank, &barrier());
    }
    for rank in 0..MEMBERS {
        while let Some((to, frame)) = net.hosts[rank].next_frame(RankSet::from_bits(u64::MAX), LIMIT) {
            if (rank, to.0) == (2, 0) {
                held = Some(frame);
            } else {
                net.hosts[usize::from(to.0)].take(frame);
            }
        }
    }
    net.hosts[1].advance(0);
    assert!(net.ended(1).1.is_ok());
    net.hosts[1].member.leave();
    net.settle();
    assert!(!net.hosts[1].member.may_leave(), "rank 0 has begun the operation, and lacks a frame");
    net.hosts[0].take(held.expect("a frame of rank 2 for rank 0"));
    net.settle();
    assert!(net.ended(0).1.is_ok());
    assert!(net.hosts[1].member.may_leave());
}
