//! Members through changes of the view, deadlines and lost connections, step by step.

use kvplane_collective::*;
use kvplane_group::*;

use crate::collectives::{Net, status_of, view_of};

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
