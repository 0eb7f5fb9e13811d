//! Messages: golden bytes of every record and handshake, round trips, and rejected encodings.

use kvplane_proto::ids::{Incarnation, NodeId, PinId, ReservationId};
use kvplane_proto::message::{
    Bitmap, CommitItem, CommitReply, DigestItem, GetItem, Hello, HelloError, IdItem, Item, LookupReply, ObjectName,
    ObjectPriority, PutAck, PutItem, PutOptions, ReadItem, RegionDescriptor, ReserveReply, RunItem, SegmentDescriptor,
    SegmentError, SizeReply, Welcome, WriteItem, decode_items, decode_puts, encode_items,
};
use kvplane_proto::{Digest, Epoch, ItemFlags, Limits, RequestId, SegmentId, ShardId, Status, Version};

const DIGEST: Digest = Digest(0xd0d1_d2d3_d4d5_d6d7_d8d9_dadb_dcdd_dedf);
const DIGEST_HEX: &str = "dfdedddcdbdad9d8d7d6d5d4d3d2d1d0";
const REQUEST: RequestId = RequestId { index: 0x0a0b_0c0d, generation: 0x0102_0304 };
const SEGMENT: SegmentId = SegmentId { index: 0x1a1b_1c1d, generation: 0x1112_1314 };
const PIN: PinId = PinId { index: 0x2a2b_2c2d, generation: 0x2122_2324 };
const RESERVATION: ReservationId = ReservationId { index: 0x3a3b_3c3d, generation: 0x3132_3334 };

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn check<T: Item + PartialEq + std::fmt::Debug + Copy>(item: T, expected: &[&str]) {
    let mut bytes = Vec::new();
    item.encode(&mut bytes);
    assert_eq!(hex(&bytes), expected.concat(), "{item:?}");
    assert_eq!(bytes.len(), T::BYTES);
    assert_eq!(T::decode(&bytes), Some(item));
    assert_eq!(T::decode(&bytes[1..]), None, "too short");
    bytes.push(0);
    assert_eq!(T::decode(&bytes), None, "too long");
}

#[test]
fn requests_items_have_these_bytes() {
    let words = ["8877665544332211", "0099aabbccddeeff"];
    let (first, second) = (0x1122_3344_5566_7788, 0xffee_ddcc_bbaa_9900);
    check(DigestItem { digest: DIGEST }, &[DIGEST_HEX]);
    check(
        GetItem { digest: DIGEST, request: REQUEST, capacity_bytes: first },
        &[DIGEST_HEX, "0d0c0b0a04030201", words[0]],
    );
    check(
        ReadItem { request: REQUEST, segment: SEGMENT, offset: first, bytes: second },
        &["0d0c0b0a04030201", "1d1c1b1a14131211", words[0], words[1]],
    );
    check(WriteItem { segment: SEGMENT, offset: first }, &["1d1c1b1a14131211", words[0]]);
    check(
        RunItem { segment: SEGMENT, offset: first, stride_bytes: second, bytes: 0x0102_0304, ranges: 0x0a0b_0c0d },
        &["1d1c1b1a14131211", words[0], words[1], "04030201", "0d0c0b0a"],
    );
    let options = PutOptions {
        tenant: 0x0102_0304,
        group: second,
        soft_pin_ms: 0x0203_0405,
        hard_pin: true,
        data_type: 7,
        replace: true,
        ack: Some(PutAck::Durable),
        priority: ObjectPriority::LOWEST,
        ..PutOptions::default()
    };
    let item = PutItem { key_bytes: 0x0a0b, tenant_bytes: 0x0c, ..PutItem::plain(DIGEST, first) };
    let (replicas, waits, zeros) = ("00", "00", "00".repeat(16));
    check(
        item.with_options(&options),
        &[
            DIGEST_HEX, words[0], words[1], "04030201", "05040302", "0b0a", "0c", "07", "33", replicas, "fc", waits,
            &zeros,
        ],
    );
    // A put that waits for all of its replicas is the same as in the version before.
    for (replicas, wait_replicas, expected, read) in [
        (2, 0, "0002fc00", 0),
        (2, 2, "4002fc00", 2),
        (2, 9, "4002fc00", 2),
        (5, 5, "4005fc00", 5),
        (5, 3, "4005fc03", 3),
        (9, 8, "4008fc00", 8),
    ] {
        let options = PutOptions { replicas, wait_replicas, priority: ObjectPriority::LOWEST, ..PutOptions::default() };
        let item = PutItem::plain(DIGEST, first).with_options(&options);
        let mut bytes = Vec::new();
        item.encode(&mut bytes);
        // Flags, replicas, priority, and the number that the reply waits for.
        assert_eq!(hex(&bytes[44..48]), expected, "{replicas} and {wait_replicas}");
        assert_eq!((item.options().wait_replicas, item.options().replicas), (read, replicas.min(8)));
    }
    check(CommitItem { reservation: RESERVATION, checksum: first }, &["3d3c3b3a34333231", words[0]]);
    check(IdItem { id: PIN.to_bits() }, &["2d2c2b2a24232221"]);
}

#[test]
fn reply_items_have_these_bytes() {
    let words = ["8877665544332211", "0099aabbccddeeff", "0700000000000000", "0800000000000000"];
    let (first, second) = (0x1122_3344_5566_7788, 0xffee_ddcc_bbaa_9900);
    check(SizeReply { status: Status::NotFound, bytes: first }, &["0100000000000000", words[0]]);
    check(
        LookupReply {
            status: Status::Unsupported,
            pin: PIN,
            offset: first,
            bytes: second,
            version: Version(7),
            checksum: 8,
            flags: ItemFlags::REPLICATED,
        },
        &["1300000000000000", "2d2c2b2a24232221", words[0], words[1], words[2], words[3], "0100000000000000"],
    );
    check(
        ReserveReply { status: Status::NoSpace, reservation: RESERVATION, offset: first },
        &["0300000000000000", "3d3c3b3a34333231", words[0]],
    );
    let flags = ItemFlags::NONE;
    check(
        CommitReply { status: Status::Exists, version: Version(7), flags },
        &["0200000000000000", words[2], "0000000000000000"],
    );
}

#[test]
fn an_unknown_status_makes_the_whole_body_malformed() {
    let mut body = Vec::new();
    encode_items([SizeReply { status: Status::Ok, bytes: 1 }, SizeReply { status: Status::Ok, bytes: 2 }], &mut body);
    assert_eq!(decode_items::<SizeReply>(&body, 2).map(|items| items.len()), Some(2));
    for wrong in [Status::ALL.len() as u64, 1 << 16, u64::MAX] {
        body[16..24].copy_from_slice(&wrong.to_le_bytes());
        assert!(decode_items::<SizeReply>(&body, 2).is_none(), "status {wrong}");
    }
}

#[test]
fn a_body_is_exactly_its_items() {
    let mut body = Vec::new();
    encode_items((0..5).map(|id| IdItem { id }), &mut body);
    let items: Vec<u64> = decode_items::<IdItem>(&body, 5).expect("five").map(|item| item.id).collect();
    assert_eq!(items, [0, 1, 2, 3, 4]);
    for count in [0, 4, 6, u32::MAX] {
        assert!(decode_items::<IdItem>(&body, count).is_none(), "{count} items");
    }
    assert!(decode_items::<IdItem>(&body[1..], 5).is_none());
    let many = Limits::QUESTIONS_PER_FRAME + 1;
    assert!(decode_items::<IdItem>(&vec![0; many * 8], many as u32).is_none(), "over the limit of items");
    assert!(decode_items::<IdItem>(&vec![0; (many - 1) * 8], many as u32 - 1).is_some());
}

#[test]
fn bitmaps_have_these_bytes() {
    let bits = [true, false, false, true, false, false, false, true, false, true];
    let mut body = Vec::new();
    Bitmap::encode(bits, &mut body);
    assert_eq!(body, [0b1000_1001, 0b0000_0010]);
    let map = Bitmap::decode(&body, 10).expect("ten bits");
    assert_eq!((0..10).map(|index| map.get(index)).collect::<Vec<_>>(), bits);
    assert_eq!((map.len(), map.is_empty(), map.get(10), map.get(usize::MAX)), (10, false, false, false));
    assert!(Bitmap::decode(&body, 8).is_none() && Bitmap::decode(&body, 17).is_none());
    assert!(Bitmap::decode(&[], 0).is_some_and(|map| map.is_empty()));
    assert!(Bitmap::decode(&[], u32::MAX).is_none());
}

fn hello() -> Hello {
    Hello {
        version_min: 1,
        version_max: 2,
        client: 0x1122_3344_5566_7788,
        connection: 0x0102_0304_0a0b_0c0d,
        node: NodeId(3),
        incarnation: Incarnation(4),
        shard: ShardId(0x0506),
        lane: 0x0708,
        fetches: false,
        cluster: "prod-é".into(),
    }
}

#[test]
fn the_handshake_has_these_bytes() {
    let expected = concat!(
        "0102",
        "0605",
        "0807",
        "0700",
        "8877665544332211",
        "0300000000000000",
        "0400000000000000",
        "0d0c0b0a04030201",
        "70726f642dc3a9"
    );
    assert_eq!(hex(&hello().encode()), expected);
    assert_eq!(Hello::decode(&hello().encode()), Ok(hello()));
    let welcome = Welcome {
        version: 1,
        node: NodeId(2),
        incarnation: Incarnation(3),
        shard: ShardId(0x0405),
        epoch: Epoch(6),
        pool_bytes: 0x1122_3344_5566_7788,
    };
    let expected =
        concat!("010000000000", "0504", "0200000000000000", "0300000000000000", "0600000000000000", "8877665544332211");
    assert_eq!(hex(&welcome.encode()), expected);
    assert_eq!(Welcome::decode(&welcome.encode()), Ok(welcome));
    assert_eq!(Welcome::decode(&welcome.encode()[1..]), Err(HelloError::Length(39)));
}

#[test]
fn a_truncated_hello_is_refused() {
    let bytes = hello().encode();
    for cut in 0..bytes.len() {
        assert_eq!(Hello::decode(&bytes[..cut]), Err(HelloError::Length(cut)));
    }
    let longer = [bytes.clone(), vec![0]].concat();
    assert_eq!(Hello::decode(&longer), Err(HelloError::Length(longer.len())));
    let mut other = bytes.clone();
    *other.last_mut().expect("a name") = 0xff;
    assert_eq!(Hello::decode(&other), Err(HelloError::Cluster), "not UTF-8");
    let mut long = Hello { cluster: "x".repeat(Limits::NAME_BYTES), ..hello() };
    assert_eq!(Hello::decode(&long.encode()), Ok(long.clone()));
    long.fetches = true;
    let mut bytes = long.encode();
    assert_eq!((bytes[6], bytes[7]), (255, 1));
    assert_eq!(Hello::decode(&bytes), Ok(long));
    bytes[7] = 2;
    assert_eq!(Hello::decode(&bytes), Err(HelloError::Flags(2)), "a flag of a later version");
}

fn descriptor() -> SegmentDescriptor {
    let region = |shareable| RegionDescriptor {
        segment: SEGMENT,
        address: 0x7f00_0000_0000,
        bytes: 0x1122_3344_5566_7788,
        shareable,
        writable: !shareable,
    };
    SegmentDescriptor { name: "seg".into(), regions: vec![region(true), region(false)] }
}

#[test]
fn a_segment_descriptor_has_these_bytes() {
    let region = "1d1c1b1a1413121100000000007f00008877665544332211";
    let expected = ["03000200", "736567", region, "0100000000000000", region, "0200000000000000"].concat();
    let bytes = descriptor().encode();
    assert_eq!(hex(&bytes), expected);
    assert_eq!(SegmentDescriptor::decode(&bytes), Ok(descriptor()));
    for cut in 0..bytes.len() {
        assert_eq!(SegmentDescriptor::decode(&bytes[..cut]), Err(SegmentError::Length(cut)));
    }
    let longer = [bytes.clone(), vec![0]].concat();
    assert_eq!(SegmentDescriptor::decode(&longer), Err(SegmentError::Length(longer.len())));
    let mut other = bytes.clone();
    other[4] = 0xff;
    assert_eq!(SegmentDescriptor::decode(&other), Err(SegmentError::Name));
    other[0..2].copy_from_slice(&256u16.to_le_bytes());
    assert_eq!(SegmentDescriptor::decode(&other), Err(SegmentError::Name));
    let mut many = bytes;
    many[2..4].copy_from_slice(&1025u16.to_le_bytes());
    assert_eq!(SegmentDescriptor::decode(&many), Err(SegmentError::Regions(1025)));
}

#[test]
fn the_largest_descriptor_fits_a_body() {
    let region = descriptor().regions[0];
    let largest =
        SegmentDescriptor { name: "n".repeat(Limits::NAME_BYTES), regions: vec![region; Limits::REGIONS_PER_SEGMENT] };
    let bytes = largest.encode();
    assert!(bytes.len() <= Limits::BODY_BYTES, "{} bytes", bytes.len());
    assert_eq!(SegmentDescriptor::decode(&bytes), Ok(largest));
}

#[test]
fn the_largest_item_frame_fits_a_body() {
    let largest = [
        DigestItem::BYTES,
        GetItem::BYTES,
        SizeReply::BYTES,
        ReadItem::BYTES,
        WriteItem::BYTES,
        LookupReply::BYTES,
        ReserveReply::BYTES,
        CommitItem::BYTES,
        CommitReply::BYTES,
        IdItem::BYTES,
    ];
    let largest = largest.into_iter().max().unwrap_or(0);
    assert!(largest * Limits::ITEMS_PER_FRAME <= Limits::BODY_BYTES);
}

#[test]
fn handshake_and_segment_errors_say_the_numbers() {
    assert!(HelloError::Length(39).to_string().contains("39 bytes"));
    assert!(HelloError::Flags(6).to_string().contains("0x6"));
    assert!(SegmentError::Length(4).to_string().contains("4 bytes"));
    assert!(SegmentError::Name.to_string().contains("255"));
    assert!(SegmentError::Regions(1025).to_string().contains("1025"));
}

#[test]
fn puts_come_with_their_names() {
    let names = [
        ObjectName { tenant: b"", key: b"block-0" },
        ObjectName { tenant: b"somebody", key: &[0xff, 0, 7] },
        ObjectName::NONE,
    ];
    let item = |name: &ObjectName<'_>| match name {
        ObjectName { key: [], .. } => PutItem::plain(DIGEST, 9),
        name => PutItem::named(name, 9, &PutOptions::default()),
    };
    let mut body = Vec::new();
    encode_items(names.iter().map(item), &mut body);
    names.iter().for_each(|name| body.extend_from_slice(&[name.tenant, name.key].concat()));
    let puts: Vec<_> = decode_puts(&body, 3).expect("a good body").collect();
    assert_eq!(puts, names.iter().map(|name| (item(name), *name)).collect::<Vec<_>>());
    assert_eq!(puts[1].0.digest, Digest::of(b"somebody", &[0xff, 0, 7]));
    assert!(decode_puts(&body[..body.len() - 1], 3).is_none(), "a name is cut off");
    assert!(decode_puts(&body, 2).is_none() && decode_puts(&body, 4).is_none());
    let bad = |item: PutItem| {
        let mut body = Vec::new();
        item.encode(&mut body);
        body.resize(body.len() + item.name_bytes(), b'k');
        decode_puts(&body, 1).is_none()
    };
    let longest = PutItem { key_bytes: Limits::KEY_BYTES as u16, ..PutItem::plain(DIGEST, 1) };
    assert!(!bad(longest) && bad(PutItem { key_bytes: Limits::KEY_BYTES as u16 + 1, ..longest }));
    assert!(bad(PutItem { tenant_bytes: 3, ..PutItem::plain(DIGEST, 1) }), "a tenant without a key");
    let mut body = Vec::new();
    PutItem::plain(DIGEST, 1).encode(&mut body);
    for (byte, is_good) in [(4, true), (0xfc, true), (5, false), (0xfb, false)] {
        body[46] = byte;
        assert_eq!(decode_puts(&body, 1).is_some(), is_good, "priority {byte:#x}");
    }
    assert!(bad(PutItem { soft_pin_ms: Limits::SOFT_PIN_MS + 1, ..longest }));
}
