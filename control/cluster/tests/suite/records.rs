//! Encoding of records: golden bytes, round trips, damage, arbitrary bytes.

use crate::support;

use kvplane_cluster::{
    CapabilitiesRecord, ClassRecord, ClientId, ConductorKey, ConductorRecord, Devices, EventsRecord, Header,
    InstanceDuty, InstanceRecord, MasterRecord, MemberRecord, MemberState, PlacementRecord, Record, RecordKey,
    SeedRecord, SegmentKind, SegmentOwner, StageRecord, Tenant, TenantSsd, WeightRecord, WorldGroup, WorldGroupKey,
    WorldKey, WorldRecord,
};
use kvplane_proto::ids::{Epoch, Incarnation, NodeId};
use kvplane_proto::map::codec::{begin, seal};
use proptest::prelude::*;
use support::{member, owned_by, segment};

fn bytes_of(record: &Record) -> Vec<u8> {
    let mut bytes = Vec::new();
    record.encode(&mut bytes);
    bytes
}

fn examples() -> [Record; 16] {
    let (capacity_bytes, version) = (1 << 30, "0.1.0".to_owned());
    let left = MemberState::Left;
    let mut client = segment("y", SegmentOwner::Client { client: ClientId(2) }, 77);
    client.kind = SegmentKind::Nvme;
    [
        Record::Header(Header { cluster: "prod".to_owned(), epoch: Epoch(9), replicas: 2 }),
        Record::Member(MemberRecord {
            member: member(1, 5, 7000),
            state: left,
            ended: Epoch(8),
            capacity_bytes,
            version,
        }),
        Record::Segment(segment("x", owned_by(1, 5), 0)),
        Record::Segment(client),
        Record::Tenant(Tenant { name: "acme".to_owned(), dram_bytes: Some(1 << 33), weight: 3 }),
        Record::TenantSsd("acme".to_owned(), TenantSsd { ssd_bytes: Some(1 << 40), weight: Some(7) }),
        Record::Devices(Devices {
            node: NodeId(1),
            incarnation: Incarnation(5),
            devices: 3 << 64 | 4,
            since: Epoch(6),
        }),
        Record::Conductor(ConductorRecord::Instance(engine(true))),
        Record::Conductor(ConductorRecord::Instance(engine(false))),
        Record::Conductor(ConductorRecord::Master(MasterRecord {
            name: "m@0".to_owned(),
            tenant: "acme".to_owned(),
            model: "llama".to_owned(),
            block_tokens: 16,
            publisher: "tcp://h:2".to_owned(),
        })),
        Record::Conductor(ConductorRecord::Placement(PlacementRecord {
            policy: "kvplane".to_owned(),
            ttft_ns: 7,
            tbt_ns: 0,
        })),
        Record::Conductor(ConductorRecord::Seed(seed("acme", "llama"))),
        Record::Conductor(ConductorRecord::Class(ClassRecord { name: "chat".to_owned(), priority: -2, ttft_ns: 7 })),
        Record::Conductor(ConductorRecord::Weight(weight("acme", "bot"))),
        Record::World(WorldRecord::Starts(7)),
        Record::World(WorldRecord::Group(WorldGroup {
            key: WorldGroupKey { tenant: "acme".to_owned(), world: "job".to_owned(), group: 9 },
            contents: vec![1, 2, 3],
        })),
    ]
}

/// Returns an instance that publishes events, or one that does not.
fn engine(publishes: bool) -> InstanceRecord {
    let events = EventsRecord {
        publisher: "tcp://h:1".to_owned(),
        replay: String::new(),
        topic: "kv".to_owned(),
        has_vllm_hashes: true,
    };
    InstanceRecord {
        name: "e@0".to_owned(),
        incarnation: 3,
        tenant: String::new(),
        model: "llama".to_owned(),
        block_tokens: 16,
        token_bytes: 0,
        pool_token_bytes: 327_680,
        duty: InstanceDuty::Mixed,
        capacity_tokens: 9,
        report_ns: 5,
        address: "h:80".to_owned(),
        held: !publishes,
        reports_cache: publishes,
        events: publishes.then_some(events),
        capabilities: None,
    }
}

fn seed(tenant: &str, model: &str) -> SeedRecord {
    SeedRecord { tenant: tenant.to_owned(), model: model.to_owned(), block_tokens: 16, seed: "0".to_owned() }
}

fn weight(tenant: &str, flow: &str) -> WeightRecord {
    WeightRecord { tenant: tenant.to_owned(), flow: flow.to_owned(), weight: 300 }
}

#[test]
fn weights_of_different_flows_have_different_keys() {
    let digests = [weight("", "ab"), weight("a", "b"), weight("ab", "")].map(|weight| weight.digest());
    assert!(digests[0] != digests[1] && digests[1] != digests[2] && digests[0] != digests[2]);
    assert_eq!(weight("a", "b").digest(), WeightRecord { weight: 1, ..weight("a", "b") }.digest());
}

#[test]
fn seeds_of_different_models_have_different_keys() {
    let digests: std::collections::BTreeSet<u128> =
        [seed("", "ab"), seed("a", "b"), seed("ab", ""), SeedRecord { block_tokens: 32, ..seed("", "ab") }]
            .iter()
            .map(SeedRecord::digest)
            .collect();
    assert_eq!(digests.len(), 4);
    assert_eq!(seed("", "ab").digest(), SeedRecord { seed: "1".to_owned(), ..seed("", "ab") }.digest());
}

#[test]
fn keys_of_groups_sort_like_their_bytes() {
    let key = |tenant: &str, world: &str, group| {
        let key = WorldGroupKey { tenant: tenant.to_owned(), world: world.to_owned(), group };
        RecordKey::World(WorldKey::Group(key))
    };
    let mut keys = vec![key("", "a", 2), key("", "ab", 1), key("a", "", 3), key("a", "b", 256), key("b", "a", 1)];
    keys.push(RecordKey::World(WorldKey::Starts));
    keys.push(RecordKey::Conductor(ConductorKey::Placement));
    keys.sort_unstable();
    assert!(keys.is_sorted_by_key(RecordKey::to_bytes));
}

#[test]
fn golden_record_bytes() {
    let hex = examples().map(|record| bytes_of(&record).iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    assert_eq!(hex, GOLDEN, "the encoding changed: that needs a new format number");
}
const GOLDEN: [&str; 16] = [
    "4b5643520100000900000000000000020470726f64dcd2888f3ff0a341",
    concat!(
        "4b564352010001040800000000000000000000400000000005302e312e3001000000000000000500",
        "0000000000000a0000000100067261636b2d3106626f6f742d3104c0000201581b0083d3a3455f81",
        "3af5",
    ),
    concat!(
        "4b564352010002000100000000000000050000000000000000001000000000000000000000000000",
        "0004c000020928230178521e419ced07ff12",
    ),
    concat!(
        "4b5643520100020102000000000000000200100000000000004d0000000000000004c000",
        "02092823",
        "0179a89e0f8d7427dd5e",
    ),
    "4b564352010008010000000002000000030000000461636d65b9304dbe8229f5d7",
    "4b56435201000c010000000000010000070000000461636d65cccb4e65901e15f3",
    "4b56435201000901000000000000000500000000000000040000000000000003000000000000000600000000000000673805be88a31ced",
    concat!(
        "4b5643520100100300000000000000100000000000000000000000000005000000000002090000000000000005000000000000000e",
        "0300654030000005006c6c616d610400683a383009007463703a2f2f683a31000002006b766dcf53d7bd25264f",
    ),
    concat!(
        "4b56435201001003000000000000001000000000000000000000000000050000000000020900000000000000050000000000000001",
        "0300654030000005006c6c616d610400683a3830bdb33fc4dcbd6dd5",
    ),
    "4b5643520100111000000003006d4030040061636d6505006c6c616d6109007463703a2f2f683a329bbe36f2322bceea",
    "4b56435201001207000000000000000000000000000000076b76706c616e65ce04ec50a9419605",
    "4b56435201001310000000040061636d6505006c6c616d61010030200ff029a516f79e",
    "4b564352010014fe0700000000000000040063686174a36811ec6d622be3",
    "4b5643520100152c010000040061636d650300626f74bc9ab732a9f3f62b",
    "4b56435201000a07000000e70dd762dbeafd11",
    "4b56435201000b09000000000000000461636d65036a6f6203000000010203255d1ac52c2ad4f5",
];

#[test]
fn capabilities_of_an_instance_have_golden_bytes_too() {
    let stage = StageRecord { group: "g".to_owned(), stage: 1, stages: 2, chunk_tokens: 1_024, activation_bytes: 0 };
    let capabilities = CapabilitiesRecord { layer_wise: true, layers: 40, stage: Some(stage) };
    let capabilities = Some(Box::new(capabilities));
    let record = Record::Conductor(ConductorRecord::Instance(InstanceRecord { capabilities, ..engine(false) }));
    let bytes = bytes_of(&record);
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    let golden = concat!(
        "4b564352010010030000000000000010000000000000000000000000000500000000000209000000000000000500000000000000",
        "110300654030000005006c6c616d610400683a383028000000010101000000020000000004000000000000010067dfd3a2e0d258",
        "734a"
    );
    assert_eq!(hex, golden);
    assert_eq!(Record::decode(&bytes), Ok(record));
    let capabilities = Some(Box::new(CapabilitiesRecord { layer_wise: true, layers: 0, stage: None }));
    let record = Record::Conductor(ConductorRecord::Instance(InstanceRecord { capabilities, ..engine(true) }));
    assert_eq!(Record::decode(&bytes_of(&record)), Ok(record));
}

#[test]
fn keys_sort_like_their_bytes() {
    let keys = [
        RecordKey::Header,
        RecordKey::Member(NodeId(1)),
        RecordKey::Member(NodeId(256)),
        RecordKey::Segment("a".to_owned()),
        RecordKey::Segment("b".to_owned()),
        RecordKey::Layout,
        RecordKey::Tenant(String::new()),
        RecordKey::Tenant("a".to_owned()),
        RecordKey::Devices(NodeId(1)),
        RecordKey::Devices(NodeId(256)),
        RecordKey::TenantSsd("a".to_owned()),
        RecordKey::Conductor(ConductorKey::Instance("a".to_owned())),
        RecordKey::Conductor(ConductorKey::Master("a".to_owned())),
        RecordKey::Conductor(ConductorKey::Placement),
        RecordKey::Conductor(ConductorKey::Seed(1)),
        RecordKey::Conductor(ConductorKey::Seed(256)),
        RecordKey::Conductor(ConductorKey::Class("a".to_owned())),
        RecordKey::Conductor(ConductorKey::Weight(1)),
        RecordKey::Conductor(ConductorKey::Weight(256)),
    ];
    assert!(keys.is_sorted() && keys.iter().map(RecordKey::to_bytes).is_sorted());
}

#[test]
fn suspicion_is_not_durable() {
    let [_, Record::Member(record), ..] = examples() else { panic!("the second example is a member") };
    let suspect = Record::Member(MemberRecord { state: MemberState::Suspect, ..record.clone() });
    let active = Record::Member(MemberRecord { state: MemberState::Active, ..record });
    assert_eq!(Record::decode(&bytes_of(&suspect)), Ok(active));
}

#[test]
fn texts_over_their_limit_are_rejected() {
    let mut bytes = Vec::new();
    let start = begin(&mut bytes, u32::from_le_bytes(*b"KVCR"), 1);
    bytes.extend_from_slice(&[0; 10]);
    bytes.push(65);
    bytes.extend_from_slice(&[b'c'; 65]);
    seal(&mut bytes, start);
    let refused = Record::decode(&bytes).unwrap_err().to_string();
    assert_eq!(refused, "stored record: length of the cluster name cannot be 65");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn records_survive_and_damage_is_noticed(which in 0usize..15, at: prop::sample::Index, flip in 1u8..) {
        let examples = examples();
        let record = &examples[which];
        let mut bytes = bytes_of(record);
        prop_assert_eq!(Record::decode(&bytes), Ok(record.clone()));
        let at = at.index(bytes.len());
        prop_assert!(Record::decode(&bytes[..at]).is_err());
        bytes[at] ^= flip;
        prop_assert!(Record::decode(&bytes).is_err());
    }

    /// Bytes with a valid checksum either are the unique encoding of a record or are rejected.
    #[test]
    fn arbitrary_bytes_never_panic(kind in 0u8..20, contents in prop::collection::vec(0u8..8, 0..200)) {
        let _ = Record::decode(&contents);
        let mut bytes = Vec::new();
        let start = begin(&mut bytes, u32::from_le_bytes(*b"KVCR"), 1);
        bytes.push(kind);
        bytes.extend_from_slice(&contents);
        seal(&mut bytes, start);
        if let Ok(record) = Record::decode(&bytes) {
            prop_assert_eq!(bytes_of(&record), bytes);
        }
    }
}
