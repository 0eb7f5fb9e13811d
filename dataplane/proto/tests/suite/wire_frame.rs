//! Frame header: its golden bytes, and every way in which it can be malformed.

use kvplane_proto::checksum::frame_checksum;
use kvplane_proto::frame::{FrameError, HEADER_BYTES, Header, MAGIC, VERSION};
use kvplane_proto::message::{Kind, Operation};
use kvplane_proto::{FrameFlags, Limits, RequestId, Status};
use proptest::prelude::*;

/// Golden bytes of a header in which all fields differ, so that swapped fields are detected. The last word was computed
/// by another implementation of CRC-32C.
const GOLDEN: &str = "\
    4b5650460585090001020304050607081112000021030000bbaa998800000000\
    887766554433221100ffeeddccbbaa990403020101020000efbeadde2d4a1978";

fn golden() -> Header {
    Header {
        kind: Kind::Reply(Operation::Get),
        status: Status::Busy,
        request: RequestId { index: 0x0403_0201, generation: 0x0807_0605 },
        body_bytes: 0x1211,
        items: 0x0321,
        payload_bytes: 0x8899_aabb,
        payload_checksum: 0x1122_3344_5566_7788,
        argument: 0x99aa_bbcc_ddee_ff00,
        deadline_us: 0x0102_0304,
        flags: FrameFlags::CHECKSUM | FrameFlags::REPLICATED,
        body_checksum: 0xdead_beef,
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the header's bytes with `bytes` at `at`, under a correct checksum.
fn altered(at: usize, bytes: &[u8]) -> [u8; HEADER_BYTES] {
    let mut out = golden().encode();
    out[at..at + bytes.len()].copy_from_slice(bytes);
    let checksum = frame_checksum(&out[..60]);
    out[60..].copy_from_slice(&checksum.to_le_bytes());
    out
}

#[test]
fn a_header_has_these_bytes() {
    assert_eq!(hex(&golden().encode()), GOLDEN);
    assert_eq!(Header::decode(&golden().encode()), Ok(golden()));
    assert_eq!(HEADER_BYTES, 64);
}

#[test]
fn a_bare_request_has_these_bytes() {
    let header = Header::request(Kind::Request(Operation::Abort), RequestId::default());
    assert_eq!(hex(&header.encode()), format!("4b5650460513{}a5cfc93f", "00".repeat(54)));
}

#[test]
fn builders_state_body_payload_and_argument() {
    let header = Header::reply(Kind::Reply(Operation::Put), RequestId { index: 1, generation: 2 }, Status::Exists)
        .with_body(b"abc", 1)
        .with_payload(9, Some(7))
        .with_argument(5);
    assert_eq!((header.body_bytes, header.items, header.body_checksum), (3, 1, 0x364b_3fb7));
    assert_eq!((header.payload_bytes, header.checksum(), header.argument), (9, Some(7), 5));
    assert_eq!((header.status, header.flags), (Status::Exists, FrameFlags::CHECKSUM));
    let unchecked = header.with_payload(9, None);
    assert_eq!(Header { flags: FrameFlags::NONE, ..unchecked }.checksum(), None);
    assert_eq!(header.check_body(b"abc"), Ok(()));
    let wrong = header.check_body(b"abd");
    assert!(matches!(wrong, Err(FrameError::BodyChecksum { stated: 0x364b_3fb7, .. })), "{wrong:?}");
    let empty = Header::request(Kind::Request(Operation::Exists), RequestId::default());
    assert_eq!(empty.check_body(b""), Ok(()));
    let stated = Header { body_checksum: 1, ..empty };
    assert_eq!(stated.check_body(b""), Err(FrameError::BodyChecksum { stated: 1, computed: 0 }));
}

#[test]
fn other_protocols_and_versions_are_distinguished_from_damage() {
    let mut bytes = golden().encode();
    bytes[..4].copy_from_slice(b"GET ");
    assert_eq!(Header::decode(&bytes), Err(FrameError::Magic(u32::from_le_bytes(*b"GET "))));
    let mut bytes = golden().encode();
    bytes[4] = VERSION + 1;
    // Without a correct checksum: the next version may compute another one.
    assert_eq!(Header::decode(&bytes), Err(FrameError::Version(VERSION + 1)));
    assert_ne!(MAGIC, 0);
}

#[test]
fn unknown_numbers_are_refused() {
    assert_eq!(Header::decode(&altered(5, &[0])), Err(FrameError::Kind(0)));
    assert_eq!(Header::decode(&altered(5, &[0x80])), Err(FrameError::Kind(0x80)));
    assert_eq!(Header::decode(&altered(5, &[15])), Err(FrameError::Kind(15)));
    assert_eq!(Header::decode(&altered(5, &[0xa0])), Err(FrameError::Kind(0xa0)));
    let beyond = Status::ALL.len() as u16;
    assert_eq!(Header::decode(&altered(6, &beyond.to_le_bytes())), Err(FrameError::Status(beyond)));
    for bit in 0..u32::BITS {
        let known = Header::decode(&altered(52, &(1u32 << bit).to_le_bytes())).is_ok();
        assert_eq!(known, bit <= 11 || (16..=21).contains(&bit), "bit {bit}");
    }
    assert_eq!(Header::decode(&altered(52, &0x1001u32.to_le_bytes())), Err(FrameError::Flags(0x1001)));
}

#[test]
fn every_length_has_its_limit() {
    let cases: [(usize, u64, usize, &str); 3] = [
        (16, Limits::BODY_BYTES as u64, 4, "body length"),
        (20, Limits::ITEMS_PER_FRAME as u64, 4, "item count"),
        (24, Limits::PAYLOAD_BYTES, 8, "payload length"),
    ];
    for (at, limit, width, field) in cases {
        assert!(Header::decode(&altered(at, &limit.to_le_bytes()[..width])).is_ok(), "{field} at its limit");
        let value = limit + 1;
        let found = Header::decode(&altered(at, &value.to_le_bytes()[..width]));
        assert_eq!(found, Err(FrameError::TooLong { field, value, limit }));
    }
}

#[test]
fn errors_say_the_numbers() {
    let errors = [
        (FrameError::Magic(0x2054_4547), "0x20544547"),
        (FrameError::Version(9), "frame version 9"),
        (FrameError::HeaderChecksum { stated: 1, computed: 2 }, "0x00000002"),
        (FrameError::BodyChecksum { stated: 1, computed: 2 }, "0x00000001"),
        (FrameError::Kind(77), "77"),
        (FrameError::Status(600), "600"),
        (FrameError::Flags(6), "0x6"),
        (FrameError::TooLong { field: "item count", value: 9000, limit: 4096 }, "item count is 9000"),
    ];
    for (error, expected) in errors {
        assert!(error.to_string().contains(expected), "{error}");
    }
}

#[test]
fn kinds_are_stable_and_invertible() {
    let names: Vec<String> = (0..=255)
        .filter_map(|code| Kind::from_code(code).map(|kind| (code, kind)))
        .map(|(code, kind)| {
            assert_eq!(kind.code(), code);
            format!("{code} {kind:?}")
        })
        .collect();
    let expected = [
        (1, "Hello"),
        (2, "Exists"),
        (3, "Size"),
        (4, "Remove"),
        (5, "Get"),
        (6, "Put"),
        (7, "Read"),
        (8, "Write"),
        (9, "OpenSegment"),
        (10, "ReadMany"),
        (11, "WriteMany"),
        (12, "Fence"),
        (13, "GetRange"),
        (14, "List"),
        (16, "Lookup"),
        (17, "Reserve"),
        (18, "Commit"),
        (19, "Abort"),
        (20, "Release"),
        (21, "Rdma"),
        (22, "Begin"),
        (23, "Fill"),
        (24, "Seal"),
        (25, "Discard"),
        (26, "Peek"),
        (27, "Prove"),
        (28, "RemoveCopy"),
        (29, "Retain"),
        (30, "Mesh"),
        (31, "MeshFrame"),
    ];
    let both = expected.iter().map(|(code, name)| format!("{code} Request({name})"));
    let both = both.chain(expected.iter().map(|(code, name)| format!("{} Reply({name})", code | 0x80)));
    assert_eq!(names, both.collect::<Vec<_>>());
}

fn any_header() -> impl Strategy<Value = Header> {
    let small = (0..Operation::ALL.len(), any::<bool>(), 0..Status::ALL.len(), any::<u64>(), any::<bool>());
    let lengths = (0..=Limits::BODY_BYTES as u32, 0..=Limits::ITEMS_PER_FRAME as u32, 0..=Limits::PAYLOAD_BYTES);
    let rest = (any::<u64>(), any::<u64>(), any::<u32>(), any::<u32>());
    (small, lengths, rest).prop_map(|((operation, reply, status, request, checked), lengths, rest)| {
        let operation = Operation::ALL[operation];
        Header {
            kind: if reply { Kind::Reply(operation) } else { Kind::Request(operation) },
            status: Status::ALL[status],
            request: RequestId::from_bits(request),
            body_bytes: lengths.0,
            items: lengths.1,
            payload_bytes: lengths.2,
            payload_checksum: rest.0,
            argument: rest.1,
            deadline_us: rest.2,
            flags: FrameFlags::NONE.with(FrameFlags::CHECKSUM, checked),
            body_checksum: rest.3,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn headers_survive_the_round_trip(header in any_header()) {
        prop_assert_eq!(Header::decode(&header.encode()), Ok(header));
    }

    #[test]
    fn every_flipped_bit_is_noticed(header in any_header(), bit in 0..HEADER_BYTES * 8) {
        let mut bytes = header.encode();
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(Header::decode(&bytes).is_err());
    }

    #[test]
    fn arbitrary_bytes_never_panic(
        mut bytes in prop::array::uniform32(any::<u8>()),
        mut tail in prop::array::uniform32(any::<u8>()),
        sealed in any::<bool>(),
    ) {
        let mut whole = [0; HEADER_BYTES];
        if sealed {
            // Magic and version are correct, and kinds, statuses, flags and lengths are near valid ones, so that the
            // checks of the fields are reached.
            bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
            bytes[4] = VERSION;
            bytes[5] &= 0x9f;
            (bytes[6], bytes[7]) = (bytes[6] % 32, 0);
            bytes[18..20].fill(0);
            bytes[22..24].fill(0);
            bytes[27..].fill(0);
            tail[21] &= 7;
            tail[22..24].fill(0);
        }
        whole[..32].copy_from_slice(&bytes);
        whole[32..].copy_from_slice(&tail);
        if sealed {
            let checksum = frame_checksum(&whole[..60]);
            whole[60..].copy_from_slice(&checksum.to_le_bytes());
        }
        if let Ok(header) = Header::decode(&whole) {
            prop_assert_eq!(header.encode(), whole, "what is accepted has one encoding");
            prop_assert!(header.payload_bytes <= Limits::PAYLOAD_BYTES);
            prop_assert!(header.body_bytes as usize <= Limits::BODY_BYTES);
        }
    }
}
