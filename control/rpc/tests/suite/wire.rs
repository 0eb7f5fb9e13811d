//! Tests of the control protocol's encoding: golden frames, limits, and arbitrary input.

#[path = "support/conductor.rs"]
mod conductor;
#[path = "support/groups.rs"]
mod groups;
#[path = "support/p2p.rs"]
mod p2p;
#[path = "support/tiers.rs"]
mod tiers;

use std::net::SocketAddr;

use kvplane_proto::Digest;
use kvplane_proto::events::{ObjectChange, ObjectEvent, ObjectMedium};
use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use kvplane_proto::map::{ClusterMap, Member, ShardAddress};
use kvplane_rpc::codec::{CodecError, HEADER_BYTES, Header, Message, decode, encode};
use kvplane_rpc::limits::{LARGE_BODY_BYTES, PAGE_SEGMENTS, SMALL_BODY_BYTES};
use kvplane_rpc::message::*;
use kvplane_rpc::{Refusal, RefusalCode};
use proptest::prelude::*;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn member() -> Member {
    Member {
        node: NodeId(7),
        incarnation: Incarnation(2),
        weight: 100,
        failure_domain: "rack-1".to_owned(),
        host: "boot-id".to_owned(),
        shards: vec![ShardAddress {
            tcp: SocketAddr::from(([127, 0, 0, 1], 7001)),
            shm: Some("/run/kvplane/0".to_owned()),
        }],
    }
}

fn join() -> Join {
    Join { member: member(), capacity_bytes: 3, version: "v".to_owned() }
}

fn segment() -> Segment {
    Segment {
        name: "s".to_owned(),
        owner: SegmentOwner::Node { node: NodeId(7), incarnation: Incarnation(2) },
        kind: SegmentKind::Gpu,
        bytes: 4096,
        address: SocketAddr::from(([127, 0, 0, 1], 7001)),
        ttl_ns: 0,
    }
}

fn member_status() -> MemberStatus {
    MemberStatus {
        node: 7,
        incarnation: 2,
        state: "alive".to_owned(),
        weight: 100,
        shards: 1,
        failure_domain: "r".to_owned(),
        host: "h".to_owned(),
        version: "v".to_owned(),
        capacity_bytes: 3,
        silent_ns: Some(4),
        load: Some(Load { objects: 1, used_bytes: 2, capacity_bytes: 3 }),
    }
}

/// Golden bytes of every message; a changed line is a changed protocol and needs another version.
#[test]
fn golden_frames() {
    let load = Load { objects: 1, used_bytes: 2, capacity_bytes: 3 };
    let mut found = String::new();
    let mut show = |name: &str, frame: Result<Vec<u8>, CodecError>| {
        found.push_str(&format!("{name} {}\n", hex(&frame.expect("a small message"))));
    };
    show("Hello", encode(&Hello { software: "a 1".to_owned() }));
    show("Join", encode(&join()));
    show("Heartbeat", encode(&Heartbeat { node: 7, incarnation: 2, load }));
    show("SettleReport", encode(&SettleReport { node: 7, incarnation: 2, epoch: 9 }));
    show("Leave", encode(&Leave { node: 7, incarnation: Some(2) }));
    show("Drain", encode(&Drain { node: 7, incarnation: Some(2) }));
    show("Undrain", encode(&Undrain { node: 7, incarnation: None }));
    show_incarnations(&mut show);
    show("AttachDevices", encode(&AttachDevices { node: 7, incarnation: 2, devices: 3 << 64 | 4 }));
    show("GetMap", encode(&GetMap));
    show("WatchMap", encode(&WatchMap { known_epoch: None }));
    show("RegisterSegment", encode(&RegisterSegment { segment: segment() }));
    show("RenewSegments", encode(&RenewSegments { client: 5 }));
    let name = "s".to_owned();
    let owner = SegmentOwner::Client { client: ClientId(5) };
    show("UnregisterSegment", encode(&UnregisterSegment { owner, name }));
    show("GetSegment", encode(&GetSegment { name: "s".to_owned() }));
    show("ListSegments", encode(&ListSegments { after: Some("r".to_owned()), limit: 9 }));
    show("Status", encode(&Status));
    tiers::show_requests(&mut show);
    show_shard_requests(&mut show);
    show(
        "Welcome",
        encode(&Welcome {
            software: "b 1".to_owned(),
            state_id: 9,
            epoch: 1,
            heartbeat_interval_ns: 5,
            heartbeat_deadline_ns: 6,
        }),
    );
    let joined = JoinReply { epoch: 1, heartbeat_interval_ns: 2, heartbeat_deadline_ns: 3 };
    show("JoinReply", encode(&joined));
    show("Alive", encode(&Alive { epoch: 1, since: 1 }));
    show("LastIncarnation", encode(&LastIncarnation { incarnation: 9 }));
    show("LastMember", encode(&LastMember { incarnation: 9 }));
    show("DevicesKept", encode(&DevicesKept { since: 5 }));
    show("RenewReply", encode(&RenewReply { segments: 2 }));
    show("EmptyReply", encode(&EmptyReply));
    let map = ClusterMap { epoch: Epoch(3), replicas: 1, members: vec![], former: None };
    show("MapReply", encode(&MapReply { map }));
    show("SegmentReply", encode(&SegmentReply { segment: segment() }));
    show("SegmentList", encode(&SegmentList { segments: vec![segment()], more: true }));
    show(
        "StatusReply",
        encode(&StatusReply {
            software: "b 1".to_owned(),
            cluster: "dev".to_owned(),
            uptime_ns: 8,
            epoch: 1,
            replicas: 2,
            segments: 1,
            members: vec![member_status()],
        }),
    );
    tiers::show_replies(&mut show);
    show_shard_replies(&mut show);
    show("Refusal", encode(&Refusal::new(RefusalCode::NotFound, "no")));
    conductor::show_requests(&mut show);
    conductor::show_replies(&mut show);
    p2p::show_all(&mut show);
    groups::show_all(&mut show);
    show_tasks(&mut show);
    assert_eq!(found, include_str!("golden_frames.txt"));
    check_complete(&found);
}

/// Messages of a node about its incarnations before it is a member.
fn show_incarnations(show: Show<'_>) {
    let map = ClusterMap { epoch: Epoch(5), replicas: 1, members: vec![member()], former: None };
    show("OfferMap", encode(&OfferMap { join: join(), state: 9, map, devices: 3, since: 4 }));
    show("GetMoves", encode(&GetMoves { node: 7, ends: Some(2) }));
    show("Moves", encode(&Moves { unsettled: 2, behind: true, draining: true }));
    show("GetIncarnation", encode(&GetIncarnation { node: 7 }));
    show("GetLastMember", encode(&GetLastMember { node: 7 }));
}

pub(crate) type Show<'a> = &'a mut dyn FnMut(&str, Result<Vec<u8>, CodecError>);

fn shard_figures() -> ShardFigures {
    let operation = OperationFigures {
        operation: "get".to_owned(),
        ssd: true,
        count: 2,
        failed: 1,
        items: 3,
        sum_ns: 9,
        buckets: vec![(8, 2)],
    };
    let slow = SlowFigures { operation: "put".to_owned(), digest: Some(5), total_ns: 6, ..SlowFigures::default() };
    ShardFigures {
        shard: 1,
        address: "a".to_owned(),
        objects: 2,
        sizes: vec![1],
        ssd: Some(SsdFigures { hits: 4, ..SsdFigures::default() }),
        operations: vec![operation],
        slow: SlowLog { latest: vec![slow], ..SlowLog::default() },
        events: EventFigures { kept: true, next: 7, lost: 8 },
        copies: CopyFigures { elsewhere: 9, inherited: 10, ..CopyFigures::default() },
        device_pool: Some(DevicePoolFigures { bytes: 11, lost: 12, ..DevicePoolFigures::default() }),
        memory_damage: DamageFigures { found: 13, passes: 14, ..DamageFigures::default() },
        ssd_damage: DamageFigures { found: 15, passes: 16, ..DamageFigures::default() },
        far_pool: Some(FarPoolFigures { bytes: 13, evictions: 14, ..FarPoolFigures::default() }),
        ..ShardFigures::default()
    }
}

fn hot_shard() -> HotShard {
    let names = vec![ObjectFigures { digest: 5, tenant: b"t".to_vec(), key: b"key".to_vec() }];
    HotShard { shard: 1, over_ns: 8, hot: vec![HotFigures { digest: 5, gets: 6, bytes: 7 }], names }
}

fn node_events() -> NodeEvents {
    let event = ObjectEvent {
        change: ObjectChange::Removed,
        medium: ObjectMedium::Ssd,
        digest: Digest(u128::MAX - 1),
        bytes: 3,
    };
    NodeEvents {
        node: 7,
        incarnation: 2,
        shard: 1,
        part: EventReport::SnapshotGoesOn,
        first: 4,
        lost: 5,
        events: vec![event],
        names: vec![EventName { at: 0, tenant: b"t".to_vec(), key: b"key".to_vec() }],
    }
}

fn show_shard_requests(show: Show<'_>) {
    show("ReportShard", encode(&ReportShard { node: 7, incarnation: 2, shard: shard_figures() }));
    show("ListShards", encode(&ListShards { node: Some(7) }));
    show("GetRoom", encode(&GetRoom));
    show("ReportHot", encode(&ReportHot { node: 7, incarnation: 2, shard: hot_shard() }));
    show("ListHot", encode(&ListHot { node: Some(7) }));
    show("WatchOrders", encode(&WatchOrders { node: 7, incarnation: 2 }));
    let found = vec![KeyFound { address: "a".to_owned(), memory: Some((1, 2)), ssd: None }];
    show("AnswerOrder", encode(&AnswerOrder { node: 7, incarnation: 2, number: 3, found }));
    show("ReportEvents", encode(&ReportEvents { events: node_events() }));
    show("WatchEvents", encode(&WatchEvents));
    show("RemoveTenant", encode(&RemoveTenant { name: "t".to_owned(), only_empty: true }));
    show("ListTenants", encode(&ListTenants));
    let used = TenantFigures { number: 1, used_bytes: 2, lease_bytes: Some(3), evicted_bytes: 4, refused: 5 };
    let sync = SyncTenants { node: 7, incarnation: 2, shard: 1, pool_bytes: 9, uses: vec![used] };
    show("SyncTenants", encode(&sync));
    show("ListTenantSsds", encode(&ListTenantSsds));
    let sync = SyncTenantSsds { node: 7, incarnation: 2, shard: 1, ssd_bytes: 9, uses: vec![used] };
    show("SyncTenantSsds", encode(&sync));
    let change = TenantChange {
        name: "t".to_owned(),
        dram_bytes: Some(Some(5)),
        weight: Some(6),
        ssd_bytes: Some(None),
        ssd_weight: Some(7),
    };
    show("SetTenant", encode(&SetTenant { change }));
    show("GetTicket", encode(&GetTicket { holder: 1, tenant: Some("t".to_owned()) }));
    show("GetTicketKeys", encode(&GetTicketKeys { node: 7, incarnation: 2 }));
    show("RotateTickets", encode(&RotateTickets));
}

fn show_shard_replies(show: Show<'_>) {
    let node = ShardNode { node: 7, incarnation: 2, age_ns: 5, shards: vec![shard_figures()] };
    show("ShardList", encode(&ShardList { nodes: vec![node] }));
    show("Room", encode(&Room { bytes: Some(7) }));
    show("HotList", encode(&HotList { nodes: vec![(7, vec![hot_shard()])] }));
    show("NodeOrder", encode(&NodeOrder { number: 3, order: Order::Find { digests: vec![6] } }));
    show("Events", encode(&Events { events: node_events() }));
    let tenant = TenantStatus {
        name: "t".to_owned(),
        is_set: true,
        dram_bytes: Some(1),
        weight: 2,
        used_bytes: 3,
        leased_bytes: Some(4),
        evicted_bytes: 5,
        refused: 6,
    };
    show("TenantList", encode(&TenantList { strict: true, pool_bytes: 8, tenants: vec![tenant] }));
    let lease = TenantLease { number: 1, dram_bytes: Some(2), weight: 3 };
    show("TenantLeases", encode(&TenantLeases { strict: true, tenants: vec![lease] }));
    let status = TenantSsdStatus {
        name: "t".to_owned(),
        ssd: TenantSsd { ssd_bytes: Some(2), weight: None },
        used_bytes: 3,
        leased_bytes: Some(4),
        evicted_bytes: 5,
        refused: 6,
    };
    show("TenantSsdList", encode(&TenantSsdList { ssd_bytes: 8, tenants: vec![status] }));
    let lease = TenantSsdLease { number: 1, ssd_bytes: Some(2), weight: 3 };
    show("TenantSsdLeases", encode(&TenantSsdLeases { tenants: vec![lease] }));
    let ticket = TicketReply { wanted: true, ticket: vec![1], secret: vec![2], valid_ns: 3 };
    show("TicketReply", encode(&ticket));
    let key = TicketKey { id: 4, secret: [5; 32], until: 6 };
    let keys = TicketKeys { seconds: 7, keys: vec![key; 1], ticket: ticket.clone() };
    assert!(!format!("{keys:?}").contains("5, 5"), "secrets are not shown");
    show("TicketKeys", encode(&keys));
    let full = TicketKeys { keys: vec![keys.keys[0].clone(); KEYS_PER_REPLY], ..keys };
    encode(&full).expect("the most keys of a reply fit into a small message");
}

fn show_tasks(show: Show<'_>) {
    let (t, n) = ("t".to_owned(), "n".to_owned());
    let task = CreateTask { tenant: t.clone(), name: n.clone(), digests: vec![6], targets: vec!["s".to_owned()] };
    show("CreateTask", encode(&task));
    show("ListTasks", encode(&ListTasks { tenant: Some(t.clone()), id: Some(4), after: 5 }));
    show("CancelTask", encode(&CancelTask { tenant: None, id: 4 }));
    show("ReportSilence", encode(&ReportSilence { node: 4, incarnation: 5 }));
    let states = vec![
        ReplicaProgress::Elsewhere,
        ReplicaProgress::Missing,
        ReplicaProgress::Alone,
        ReplicaProgress::Coming,
        ReplicaProgress::There { bytes: 9 },
    ];
    show("AnswerCopies", encode(&AnswerCopies { node: 7, incarnation: 2, number: 3, states }));
    show("NodeOrder", encode(&NodeOrder { number: 3, order: Order::Copy { digests: vec![6] } }));
    show("TaskCreated", encode(&TaskCreated { id: 4 }));
    let task = TaskStatus {
        id: 4,
        tenant: t,
        name: n,
        state: TaskState::Failed,
        objects: 2,
        copied: 1,
        bytes: 8,
        created_ms: 9,
        updated_ms: 10,
        message: "m".to_owned(),
    };
    show("TaskList", encode(&TaskList { tasks: vec![task.clone()], more: true }));
    // The most tasks with the longest names fit a reply.
    let long = TaskStatus { name: "n".repeat(TASK_NAME_BYTES), tenant: "t".repeat(255), ..task };
    encode(&TaskList { tasks: vec![long; TASKS_PER_REPLY], more: true }).expect("a full list");
}

/// Reports with as many items as they may hold are small messages.
#[test]
fn full_reports_are_small() {
    let events = vec![node_events().events[0]; EVENTS_PER_REPORT];
    let name = |at| EventName { at, tenant: vec![b't'; 255], key: vec![b'k'; 4096] };
    let names = (0..EVENTS_PER_REPORT as u32).map(name).collect();
    encode(&ReportEvents { events: NodeEvents { events, names, ..node_events() } }).expect("a full report of events");
    let digests = vec![u128::MAX; OBJECTS_PER_ORDER];
    encode(&NodeOrder { number: 1, order: Order::Find { digests } }).expect("a full order");
    let states = vec![ReplicaProgress::There { bytes: u64::MAX }; OBJECTS_PER_ORDER];
    encode(&AnswerCopies { node: 1, incarnation: 1, number: 1, states }).expect("a full answer");
    let found = KeyFound { address: "[ffff:ffff:ffff:ffff::1]:65535".to_owned(), memory: Some((1, 1)), ssd: Some(1) };
    let found = vec![found; OBJECTS_PER_ORDER];
    encode(&AnswerOrder { node: 1, incarnation: 1, number: 1, found }).expect("a full answer");
    let figures = shard_figures();
    let operation = OperationFigures { buckets: vec![(1, 1); 112], ..figures.operations[0].clone() };
    let slow = SlowFigures { status: "s".repeat(64), ..figures.slow.latest[0].clone() };
    let shard = ShardFigures {
        sizes: vec![1; 32],
        operations: vec![operation; OPERATIONS_PER_REPORT],
        slow: SlowLog { latest: vec![slow; SLOW_PER_REPORT], ..figures.slow },
        ..figures
    };
    encode(&ReportShard { node: 1, incarnation: 1, shard }).expect("a full report of a shard");
}

/// Every kind has a golden frame.
fn check_complete(found: &str) {
    let shown: Vec<&str> = found.lines().filter_map(|line| line.split(' ').next()).collect();
    for (_, name) in KINDS {
        assert!(shown.contains(name), "{name} has no golden frame");
    }
}

#[test]
fn kinds_are_distinct() {
    let mut kinds: Vec<u16> = KINDS.iter().map(|(kind, _)| *kind).collect();
    kinds.push(Refusal::KIND);
    let count = kinds.len();
    kinds.sort_unstable();
    kinds.dedup();
    assert_eq!(kinds.len(), count);
}

#[test]
fn refusal_codes_never_change() {
    let codes: Vec<(u16, String)> = RefusalCode::ALL.iter().map(|code| (*code as u16, format!("{code:?}"))).collect();
    let names: Vec<&str> = codes.iter().map(|(_, name)| name.as_str()).collect();
    assert_eq!(codes.iter().map(|(code, _)| *code).collect::<Vec<_>>(), (1..=15).collect::<Vec<_>>());
    assert_eq!(
        names,
        [
            "BadRequest",
            "NotPermitted",
            "UnknownMember",
            "StaleIncarnation",
            "LimitReached",
            "NotFound",
            "AlreadyExists",
            "Storage",
            "ShuttingDown",
            "TooLarge",
            "IncarnationEnded",
            "IncarnationReused",
            "NodeIdInUse",
            "UnknownClient",
            "NotReady"
        ]
    );
}

#[test]
fn a_member_survives_the_round_trip() {
    let join = join();
    assert_eq!(decode::<Join>(&encode(&join).expect("it fits")), Ok(join));
}

#[test]
fn wrong_headers_are_distinguished() {
    let good = encode(&Leave { node: 1, incarnation: None }).expect("it fits");
    let with = |at: usize, byte: u8| {
        let mut frame = good.clone();
        frame[at] = byte;
        decode::<Leave>(&frame).expect_err("a wrong header")
    };
    assert!(matches!(with(0, b'X'), CodecError::Magic(_)));
    assert_eq!(with(4, 2), CodecError::Version(2));
    assert_eq!(with(6, 5), CodecError::Kind(5));
    assert!(matches!(with(8, 1), CodecError::Length { .. }));
    let too_large = CodecError::TooLarge {
        kind: Leave::KIND,
        bytes: good.len() - HEADER_BYTES + (1 << 24),
        limit_bytes: SMALL_BODY_BYTES,
    };
    assert_eq!(with(11, 1), too_large);
    assert_eq!(decode::<Leave>(&good[..5]), Err(CodecError::Short { bytes: 5 }));
}

#[test]
fn trailing_bytes_are_an_error_even_when_announced() {
    let mut frame = encode(&Leave { node: 1, incarnation: None }).expect("it fits");
    frame.push(0);
    assert!(matches!(decode::<Leave>(&frame), Err(CodecError::Length { .. })));
    frame[8] += 1;
    assert!(matches!(decode::<Leave>(&frame), Err(CodecError::Length { .. })), "announced");
}

/// Without a limit these few bytes would make the decoder reserve terabytes, which aborts the process.
#[test]
fn a_hostile_length_is_an_error() {
    let list = SegmentList { segments: vec![], more: false };
    let mut frame = encode(&list).expect("it fits");
    frame[HEADER_BYTES..HEADER_BYTES + 8].copy_from_slice(&(1u64 << 40).to_le_bytes());
    assert!(matches!(decode::<SegmentList>(&frame), Err(CodecError::Body { .. })));
}

#[test]
fn a_body_above_its_limit_is_not_sent() {
    let name = "n".repeat(SMALL_BODY_BYTES);
    let error = encode(&GetSegment { name }).expect_err("too large");
    assert!(matches!(error, CodecError::TooLarge { limit_bytes: SMALL_BODY_BYTES, .. }));
    const { assert!(SMALL_BODY_BYTES < LARGE_BODY_BYTES) };
}

#[test]
fn a_join_names_exactly_one_member() {
    let empty = ClusterMap { epoch: Epoch(0), replicas: 1, members: vec![], former: None };
    let mut frame = encode(&MapReply { map: empty }).expect("it fits");
    frame[6..8].copy_from_slice(&Join::KIND.to_le_bytes());
    assert!(matches!(decode::<Join>(&frame), Err(CodecError::Body { .. })));
}

/// Decodes `frame` as every message; none may panic.
fn decode_as_all(frame: &[u8]) {
    let _ = Header::decode(frame);
    let _ = decode::<Hello>(frame);
    let _ = decode::<Join>(frame);
    let _ = decode::<Heartbeat>(frame);
    let _ = decode::<Leave>(frame);
    let _ = decode::<WatchMap>(frame);
    let _ = decode::<RegisterSegment>(frame);
    let _ = decode::<RenewSegments>(frame);
    let _ = decode::<UnregisterSegment>(frame);
    let _ = decode::<GetSegment>(frame);
    let _ = decode::<Welcome>(frame);
    let _ = decode::<JoinReply>(frame);
    let _ = decode::<Alive>(frame);
    let _ = decode::<RenewReply>(frame);
    let _ = decode::<ListSegments>(frame);
    let _ = decode::<MapReply>(frame);
    let _ = decode::<SegmentReply>(frame);
    let _ = decode::<SegmentList>(frame);
    let _ = decode::<StatusReply>(frame);
    let _ = decode::<Refusal>(frame);
    conductor::decode_as_all(frame);
    p2p::decode_as_all(frame);
    groups::decode_as_all(frame);
}

proptest! {
    #[test]
    fn arbitrary_frames_never_panic(frame in prop::collection::vec(any::<u8>(), 0..300)) {
        decode_as_all(&frame);
    }

    /// A valid header in front, so that bodies are reached; lengths in the body are often huge or small on purpose.
    #[test]
    fn arbitrary_bodies_never_panic(
        index in 0..KINDS.len(),
        words in prop::collection::vec(prop_oneof![Just(u64::MAX), Just(1 << 40), 0..9u64, any::<u64>()], 0..30),
        tail in prop::collection::vec(any::<u8>(), 0..8),
    ) {
        let mut body: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        body.extend_from_slice(&tail);
        let mut frame = b"KVPC\x01\x00".to_vec();
        frame.extend_from_slice(&KINDS[index].0.to_le_bytes());
        frame.extend_from_slice(&(body.len() as u32).to_le_bytes());
        frame.extend_from_slice(&body);
        decode_as_all(&frame);
    }

    #[test]
    fn encoded_list_decodes_to_itself(names in prop::collection::vec(".{0,20}", 0..20), bytes: u64, more: bool) {
        let segments = names.into_iter().map(|name| Segment { name, bytes, ..segment() }).collect();
        let list = SegmentList { segments, more };
        prop_assert_eq!(decode::<SegmentList>(&encode(&list).unwrap()), Ok(list));
    }

    #[test]
    fn a_cut_frame_is_an_error(cut in 0usize..1000) {
        let frame = encode(&join()).unwrap();
        let cut = cut % frame.len();
        prop_assert!(decode::<Join>(&frame[..cut]).is_err());
    }
}

/// The largest page of the longest names fits, on the wire and in the decoder's count of memory.
#[test]
fn a_full_page_survives_the_round_trip() {
    let longest = Segment { name: "n".repeat(255), ..segment() };
    let list = SegmentList { segments: vec![longest; PAGE_SEGMENTS], more: true };
    assert_eq!(decode::<SegmentList>(&encode(&list).expect("it fits")), Ok(list));
}

/// The largest member that a map may hold can join.
#[test]
fn the_largest_member_fits() {
    let mut join = join();
    join.member.failure_domain = "f".repeat(128);
    join.member.host = "h".repeat(64);
    let shard = ShardAddress { tcp: "[::1]:7001".parse().unwrap(), shm: Some("s".repeat(107)) };
    join.member.shards = vec![shard; 256];
    assert_eq!(decode::<Join>(&encode(&join).expect("it fits")), Ok(join));
}
