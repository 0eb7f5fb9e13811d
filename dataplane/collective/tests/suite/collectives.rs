//! Operations and messages among members that all live, with frames in a random order between pairs.

use std::collections::{BTreeMap, VecDeque};

use half::{bf16, f16};
use kvplane_collective::*;
use kvplane_group::*;
use kvplane_proto::rng::Rng;
use proptest::prelude::*;

use crate::host::{Frame, Host, WorkEnd};

/// Small, so that small operations take every schedule.
pub(crate) const THRESHOLDS: Thresholds = Thresholds { one_shot_bytes: 64, one_shot_total: 256, halving_bytes: 512 };
pub(crate) const LIMIT: u64 = 64;

pub(crate) fn view_of(epoch: u64, members: usize) -> View {
    View {
        epoch,
        active: RankSet::first(members),
        failed: RankSet::EMPTY,
        incarnations: vec![Some(1); members],
        resolution: Resolution::default(),
    }
}

pub(crate) fn status_of(rank: usize, view: View) -> GroupStatus {
    let members = view.incarnations.len();
    GroupStatus {
        group: GroupId(3),
        rank: GroupRank(rank as u8),
        order: (0..members as u8).map(WorldRank).collect(),
        view,
        is_changing: false,
        members: vec![MemberState::Active; members],
        processes: vec![ProcessState::Healthy; members],
        outcomes: Vec::new(),
    }
}

/// Members and the frames between them.
pub(crate) struct Net {
    pub(crate) hosts: Vec<Host>,
    links: BTreeMap<(usize, usize), VecDeque<Frame>>,
    rng: Rng,
    /// Bytes of payload that each member sent.
    sent: Vec<u64>,
}

impl Net {
    pub(crate) fn new(members: usize, seed: u64) -> Self {
        let config = MemberConfig { thresholds: THRESHOLDS, ..MemberConfig::default() };
        let host = |rank: usize| {
            let mut member = Member::new(GroupId(3), GroupRank(rank as u8), 1, true, config);
            member.follow(&status_of(rank, view_of(1, members)), 0);
            Host::new(member)
        };
        Self {
            hosts: (0..members).map(host).collect(),
            links: BTreeMap::new(),
            rng: Rng::new(seed, "collectives"),
            sent: vec![0; members],
        }
    }

    /// Lets a member send a frame, if it has one for a peer in `room`.
    pub(crate) fn send(&mut self, at: usize, room: u64) -> bool {
        self.hosts[at].advance(0);
        let Some((to, frame)) = self.hosts[at].next_frame(RankSet::from_bits(room), LIMIT) else { return false };
        self.sent[at] += frame.payload.len() as u64;
        self.links.entry((at, usize::from(to.0))).or_default().push_back(frame);
        true
    }

    /// Lets a frame arrive.
    pub(crate) fn arrive(&mut self) -> bool {
        let arriving: Vec<_> = self.links.iter().filter(|(_, frames)| !frames.is_empty()).map(|(k, _)| *k).collect();
        if arriving.is_empty() {
            return false;
        }
        let pair = arriving[self.rng.below(arriving.len() as u64) as usize];
        let frame = self.links.get_mut(&pair).and_then(VecDeque::pop_front).expect("a frame");
        self.hosts[pair.1].take(frame);
        self.hosts[pair.1].advance(0);
        true
    }

    /// Lets members send and receive at random until nothing is left to do.
    pub(crate) fn settle(&mut self) {
        let members = self.hosts.len();
        loop {
            let (at, room) = (self.rng.below(members as u64) as usize, self.rng.next_u64());
            let has_moved = self.send(at, room) | self.arrive();
            if !has_moved && !(0..members).any(|at| self.send(at, u64::MAX)) {
                return;
            }
        }
    }

    pub(crate) fn ended(&mut self, rank: usize) -> WorkEnd {
        self.hosts[rank].ended.pop_front().unwrap_or_else(|| panic!("rank {rank} waits: {:?}", self.hosts[rank]))
    }
}

/// Small number at a place of a member's source.
fn number(rank: usize, at: u64) -> u8 {
    ((rank as u64 * 3 + at) % 4 + 1) as u8
}

pub(crate) fn element(data_type: DataType, value: u32) -> Vec<u8> {
    match data_type {
        DataType::U8 | DataType::I8 => vec![value as u8],
        DataType::Bool => vec![u8::from(value != 0)],
        DataType::I16 => (value as i16).to_le_bytes().to_vec(),
        DataType::I32 => value.to_le_bytes().to_vec(),
        DataType::I64 => u64::from(value).to_le_bytes().to_vec(),
        DataType::F16 => f16::from_f32(value as f32).to_le_bytes().to_vec(),
        DataType::Bf16 => bf16::from_f32(value as f32).to_le_bytes().to_vec(),
        DataType::F32 => (value as f32).to_le_bytes().to_vec(),
        DataType::F64 => f64::from(value).to_le_bytes().to_vec(),
    }
}

/// Bytes of a source.
fn source(data_type: DataType, rank: usize, elements: u64) -> Vec<u8> {
    (0..elements).flat_map(|at| element(data_type, u32::from(number(rank, at)))).collect()
}

/// Reduction of the elements at `at` of all sources, combined one after the other.
fn reduced(data_type: DataType, reduction: Reduction, ranks: &[usize], at: u64) -> Vec<u8> {
    let mut parts = ranks.iter().map(|rank| element(data_type, u32::from(number(*rank, at))));
    let mut first = parts.next().expect("a rank");
    parts.for_each(|part| reduction.combine(data_type, &mut first, &part));
    if reduction == Reduction::Average {
        divide(data_type, &mut first, ranks.len() as u32);
    }
    first
}

/// Returns what a member finds in its target.
fn expected(operation: &Operation, rank: usize, members: usize) -> Vec<u8> {
    let (data_type, count) = (operation.data_type, operation.count);
    let all: Vec<_> = (0..members).collect();
    let own = || source(data_type, rank, count);
    let gathered = || (0..members).flat_map(|rank| source(data_type, rank, count)).collect();
    let is_root = operation.root().is_none_or(|root| usize::from(root.0) == rank);
    let root = operation.root().map_or(0, |root| usize::from(root.0));
    let part = |rank: usize, of: usize| {
        let from = count * of as u64;
        (from..from + count).flat_map(move |at| element(data_type, u32::from(number(rank, at))))
    };
    match &operation.collective {
        Collective::AllReduce { reduction } | Collective::Reduce { reduction, .. } if is_root => {
            (0..count).flat_map(|at| reduced(data_type, *reduction, &all, at)).collect()
        }
        Collective::AllReduce { .. } | Collective::Reduce { .. } => own(),
        Collective::Broadcast { .. } => source(data_type, root, count),
        Collective::AllGather => gathered(),
        Collective::Gather { .. } if is_root => gathered(),
        Collective::Gather { .. } | Collective::Barrier => Vec::new(),
        Collective::Scatter { .. } => part(root, rank).collect(),
        Collective::ReduceScatter { reduction } => {
            let from = count * rank as u64;
            (from..from + count).flat_map(|at| reduced(data_type, *reduction, &all, at)).collect()
        }
        Collective::AllToAll { .. } => {
            let bytes = |from: usize| {
                let before: u64 = (0..rank).map(|to| split(from, to)).sum();
                (before..before + split(from, rank)).flat_map(move |at| element(data_type, u32::from(number(from, at))))
            };
            (0..members).flat_map(bytes).collect()
        }
    }
}

/// Elements that a member sends to another one in an all-to-all; none to some.
fn split(from: usize, to: usize) -> u64 {
    (from as u64 * 5 + to as u64 * 3) % 17
}

fn for_rank(operation: &Operation, rank: usize, members: usize) -> Operation {
    let mut operation = operation.clone();
    if let Collective::AllToAll { sources, targets } = &mut operation.collective {
        *sources = (0..members).map(|to| split(rank, to)).collect();
        *targets = (0..members).map(|from| split(from, rank)).collect();
    }
    operation
}

fn collectives() -> impl Strategy<Value = Collective> {
    let reduction = proptest::sample::select(Reduction::all().collect::<Vec<_>>());
    let root = (0u8..8).prop_map(GroupRank);
    prop_oneof![
        4 => reduction.clone().prop_map(|reduction| Collective::AllReduce { reduction }),
        2 => (reduction.clone(), root.clone()).prop_map(|(reduction, root)| Collective::Reduce { reduction, root }),
        1 => root.clone().prop_map(|root| Collective::Broadcast { root }),
        1 => Just(Collective::AllGather),
        1 => root.clone().prop_map(|root| Collective::Gather { root }),
        1 => root.prop_map(|root| Collective::Scatter { root }),
        2 => reduction.prop_map(|reduction| Collective::ReduceScatter { reduction }),
        1 => Just(Collective::AllToAll { sources: Vec::new(), targets: Vec::new() }),
        1 => Just(Collective::Barrier),
    ]
}

/// An operation that is well-formed among so many members.
fn fit(collective: Collective, data_type: DataType, count: u64, members: usize) -> Operation {
    let within = |root: GroupRank| GroupRank(root.0 % members as u8);
    let collective = match collective {
        Collective::Reduce { reduction, root } => Collective::Reduce { reduction, root: within(root) },
        Collective::Broadcast { root } => Collective::Broadcast { root: within(root) },
        Collective::Gather { root } => Collective::Gather { root: within(root) },
        Collective::Scatter { root } => Collective::Scatter { root: within(root) },
        other => other,
    };
    let mut operation = Operation { collective, data_type, count, places: members as u8 };
    if operation.reduction().is_some_and(|reduction| !reduction.is_of(data_type)) {
        let is_float = data_type.is_float();
        operation.data_type = if is_float { DataType::I32 } else { DataType::F32 };
    }
    operation
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn operations_give_every_member_its_result(
        members in 1usize..=9,
        calls in proptest::collection::vec(
            (collectives(), proptest::sample::select(DataType::all().collect::<Vec<_>>()), 0u64..300),
            1..4,
        ),
        seed in any::<u64>(),
    ) {
        let mut net = Net::new(members, seed);
        let operations: Vec<_> =
            calls.into_iter().map(|(collective, data_type, size)| fit(collective, data_type, size, members)).collect();
        for (rank, host) in net.hosts.iter_mut().enumerate() {
            for operation in &operations {
                let operation = for_rank(operation, rank, members);
                let (bytes, _) = operation.buffer_bytes(GroupRank(rank as u8));
                let elements = bytes / operation.data_type.bytes() as u64;
                host.submit(&operation, source(operation.data_type, rank, elements), 1).expect("well-formed");
            }
        }
        net.settle();
        for rank in 0..members {
            for operation in &operations {
                let (_, outcome, target) = net.ended(rank);
                prop_assert_eq!(outcome.map(|completion| completion.failed), Ok(RankSet::EMPTY));
                prop_assert_eq!(target, expected(operation, rank, members), "rank {} of {:?}", rank, operation);
            }
            prop_assert_eq!(net.hosts[rank].kept(), 0);
            prop_assert_eq!(net.hosts[rank].member.counts().unexpected, 0);
        }
    }

    #[test]
    fn messages_arrive_in_the_order_of_their_tags(
        messages in proptest::collection::vec((0usize..3, 0usize..3, 0i32..2, 0usize..300), 1..20),
        seed in any::<u64>(),
    ) {
        let mut net = Net::new(3, seed);
        let mut awaited = Vec::new();
        for (number, (from, to, tag, bytes)) in messages.into_iter().enumerate() {
            if from == to {
                continue;
            }
            let payload = vec![number as u8; bytes];
            net.hosts[from].send(GroupRank(to as u8), tag, payload.clone(), u64::MAX);
            awaited.push((from, to, tag, payload));
            if seed % 3 == 0 {
                net.settle();
            }
        }
        let mut works = Vec::new();
        for (from, to, tag, payload) in &awaited {
            let work = net.hosts[*to].receive(Some(GroupRank(*from as u8)), *tag, payload.len(), u64::MAX);
            works.push((*to, work, payload.clone()));
        }
        net.settle();
        for (to, work, payload) in works {
            let found = net.hosts[to].ended.iter().find(|(ended, ..)| *ended == work);
            let (_, outcome, target) = found.expect("the message arrived");
            prop_assert!(outcome.is_ok());
            prop_assert_eq!(target, &payload);
        }
        prop_assert!(net.hosts.iter().all(|host| host.member.waiting() == 0 && host.kept() == 0));
    }
}

#[test]
fn a_ring_sends_no_more_than_it_has_to() {
    for members in [2, 3, 4, 7, 8] {
        let mut net = Net::new(members, 1);
        let count = 100_000;
        let collective = Collective::AllReduce { reduction: Reduction::Sum };
        let operation = Operation { collective, data_type: DataType::F32, count, places: members as u8 };
        for (rank, host) in net.hosts.iter_mut().enumerate() {
            host.submit(&operation, source(DataType::F32, rank, count), 1).expect("well-formed");
        }
        net.settle();
        let least = 2 * (members as u64 - 1) * count * 4 / members as u64;
        for (rank, sent) in net.sent.clone().into_iter().enumerate() {
            assert!(sent <= least + least / 100, "rank {rank} of {members} sent {sent} bytes instead of {least}");
            assert!(net.ended(rank).1.is_ok());
        }
    }
}

#[test]
fn members_that_call_different_operations_learn_who_called_what() {
    let mut net = Net::new(3, 5);
    let sum = |count| Operation {
        collective: Collective::AllReduce { reduction: Reduction::Sum },
        data_type: DataType::I32,
        count,
        places: 3,
    };
    let calls = [
        [sum(4), sum(5), sum(6)],
        [sum(4), sum(4), sum(4)],
        [
            sum(4),
            Operation { collective: Collective::Broadcast { root: GroupRank(1) }, ..sum(4) },
            Operation { collective: Collective::Barrier, ..sum(0) },
        ],
        [sum(300), Operation { data_type: DataType::F32, ..sum(300) }, sum(300)],
    ];
    for call in &calls {
        for (rank, host) in net.hosts.iter_mut().enumerate() {
            let bytes = call[rank].buffer_bytes(GroupRank(rank as u8)).0 as usize;
            host.submit(&call[rank], vec![1; bytes], 1).expect("well-formed");
        }
    }
    net.settle();
    for rank in 0..3 {
        let outcomes: Vec<_> = calls.iter().map(|_| net.ended(rank).1).collect();
        for at in [0, 2, 3] {
            assert!(
                matches!(outcomes[at], Err(Failure::Mismatch { .. })),
                "rank {rank}, call {at}: {:?}",
                outcomes[at]
            );
        }
        assert!(outcomes[1].is_ok(), "the sequence goes on: {:?}", outcomes[1]);
    }
}

#[test]
fn messages_of_another_size_are_named() {
    let mut net = Net::new(2, 5);
    net.hosts[0].send(GroupRank(1), 0, vec![1; 200], u64::MAX);
    net.hosts[1].receive(None, 0, 100, u64::MAX);
    net.settle();
    let wrong = Err(Failure::MessageSize { rank: GroupRank(0), message: 200, room: 100 });
    assert_eq!(net.ended(1).1, wrong);
    assert!(matches!(net.ended(0).1, Err(Failure::MessageSize { rank: GroupRank(1), message: 200, room: 100 })));
}

#[test]
fn a_deadline_names_the_ranks_that_did_not_call() {
    let mut net = Net::new(3, 5);
    let barrier = Operation { collective: Collective::Barrier, data_type: DataType::U8, count: 0, places: 3 };
    for host in &mut net.hosts[..2] {
        host.submit(&barrier, Vec::new(), 1_000).expect("well-formed");
    }
    net.settle();
    let host = &mut net.hosts[0];
    assert_eq!(host.member.poll_timeout(), Some(1_000));
    host.member.handle_timeout(1_000);
    assert_eq!(host.member.overdue(), RankSet::single(GroupRank(2)));
    let verdict_ns = MemberConfig::default().verdict_ns;
    assert_eq!(host.member.poll_timeout(), Some(1_000 + verdict_ns));
    host.member.handle_timeout(1_000 + verdict_ns);
    host.drain();
    net.settle();
    let awaited = RankSet::single(GroupRank(2));
    assert_eq!(net.ended(0).1, Err(Failure::Deadline { awaited }));
    let others = Err(Failure::OthersDeadline { rank: GroupRank(0), awaited: GroupRank(2) });
    assert_eq!(net.ended(1).1, others);
    net.hosts[2].submit(&barrier, Vec::new(), 1_000).expect("well-formed");
    net.settle();
    assert_eq!(net.ended(2).1, others, "the rank that is late learns it at once");
}

#[test]
fn a_receiver_keeps_a_limited_number_of_short_messages_and_loses_none() {
    let mut net = Net::new(2, 5);
    for number in 0..200u8 {
        net.hosts[0].send(GroupRank(1), 0, vec![number; 8], u64::MAX);
    }
    net.settle();
    assert_eq!((net.hosts[1].kept(), net.hosts[0].ended.len()), (64, 0), "the others wait");
    for number in 0..200u8 {
        let work = net.hosts[1].receive(None, 0, 8, u64::MAX);
        net.settle();
        let (ended, outcome, bytes) = net.ended(1);
        assert_eq!((ended, outcome.is_ok(), bytes), (work, true, vec![number; 8]));
    }
    assert_eq!((net.hosts[1].kept(), net.hosts[0].ended.len()), (0, 200));
}

#[test]
fn a_send_ends_when_the_message_was_received() {
    for bytes in [0, 8, 300] {
        let mut net = Net::new(2, 5);
        net.hosts[0].send(GroupRank(1), 0, vec![1; bytes], u64::MAX);
        net.settle();
        assert!(net.hosts[0].ended.is_empty(), "{bytes} bytes without memory for them");
        net.hosts[1].receive(None, 0, bytes, u64::MAX);
        while net.hosts[1].ended.is_empty() {
            assert!(net.hosts[0].ended.is_empty(), "{bytes} bytes on their way");
            assert!(net.send(1, u64::MAX) || net.send(0, u64::MAX) || net.arrive());
        }
        net.hosts[1].member.leave();
        assert!(!net.hosts[1].member.may_leave(), "the sender has to know");
        net.settle();
        assert!(net.ended(0).1.is_ok());
    }
    // The receiver ends with the message in its connection, or without memory for it.
    for arrives in [false, true] {
        let mut net = Net::new(2, 5);
        net.hosts[0].send(GroupRank(1), 0, vec![1; 8], u64::MAX);
        assert!(net.send(0, u64::MAX) && (!arrives || net.arrive()));
        net.hosts[0].member.lose(RankSet::single(GroupRank(1)));
        net.hosts[0].drain();
        assert_eq!(net.ended(0).1, Err(Failure::PeerLost { rank: GroupRank(1) }));
    }
}

#[test]
fn memory_for_a_message_that_was_given_up_takes_the_next_one() {
    for is_accepted in [false, true] {
        let mut net = Net::new(2, 5);
        net.hosts[0].send(GroupRank(1), 0, vec![1; 300], 1_000);
        if is_accepted {
            net.hosts[1].receive(None, 0, 300, u64::MAX);
        }
        // The offer arrives; the acceptance, if there is one, does not leave.
        net.send(0, u64::MAX);
        net.arrive();
        net.hosts[0].member.handle_timeout(1_000);
        net.hosts[0].drain();
        assert!(matches!(net.ended(0).1, Err(Failure::Deadline { .. })));
        net.settle();
        net.hosts[0].send(GroupRank(1), 0, vec![2; 300], u64::MAX);
        if !is_accepted {
            net.hosts[1].receive(None, 0, 300, u64::MAX);
        }
        net.settle();
        assert_eq!(net.ended(1).2, vec![2; 300]);
        assert_eq!(net.hosts[1].kept(), 0);
    }
}
