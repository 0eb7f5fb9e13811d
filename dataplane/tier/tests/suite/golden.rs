//! Golden bytes of the on-disk format: a change of them needs a new format version.

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::{NodeId, ShardId, Version};
use kvplane_tier::format::{
    AWAY_MOST, FOOTER_ENTRY_BYTES, FilledNote, FooterEntry, FooterPage, Kind, RecordHeader, SegmentHeader, Shape,
    Superblock, SuperblockFound,
};
use proptest::prelude::*;

const UUID: u128 = 0x0011_2233_4455_6677_8899_aabb_ccdd_eeff;

fn hex(bytes: &[u8]) -> String {
    let lines = bytes.chunks(16).map(|line| line.iter().map(|byte| format!("{byte:02x}")).collect::<String>());
    lines.collect::<Vec<_>>().join("\n")
}

fn superblock() -> Superblock {
    Superblock {
        generation: 0x0102_0304,
        uuid: UUID,
        cluster: 0xabcd,
        node: NodeId(0x77),
        shard: ShardId(5),
        block_bytes: 4096,
        footer_page_bytes: 16_384,
        segment_bytes: 128 << 20,
        segments: 1000,
        chunk_bytes: 262_144,
    }
}

fn record() -> RecordHeader {
    RecordHeader {
        kind: Kind::Object,
        shape: Shape { payload_bytes: 300_000, key_bytes: 11, extent: true, names_parts: false, copied: false },
        pinned: true,
        twin: false,
        digest: Digest(0x0f0e_0d0c_0b0a_0908_0706_0504_0302_0100),
        version: Version(9),
        sequence: (1 << 40) + 2,
        generation: (1 << 40) + 1,
        offset: 0x0012_3400,
        payload_checksum: 0x1122_3344_5566_7788,
        durable_sequence: 1 << 40,
        durable_tombstones: 3,
        oldest_live: 0x0a0b_0c0d,
        away: 5,
        chunk_bytes: 262_144,
        body_checksum: 0xdead_beef,
    }
}

#[test]
fn the_superblock_is_as_documented() {
    assert_eq!(hex(&superblock().encode()), include_str!("golden/superblock.hex").trim());
    assert_eq!(Superblock::decode(&superblock().encode()), SuperblockFound::Kvplane(superblock()));
}

#[test]
fn the_segment_header_is_as_documented() {
    let filled = Some(FilledNote { generation: 1 << 40, last_tombstone: (1 << 40) + 77, tombstones: 9 });
    let header = SegmentHeader { segment: 7, generation: (1 << 40) + 1, oldest_live: 1 << 40, previous: 5, filled };
    let earlier = SegmentHeader { filled: None, ..header };
    assert_eq!(hex(&earlier.encode(UUID)), include_str!("golden/segment-of-before.hex").trim());
    assert_eq!(SegmentHeader::decode(&earlier.encode(UUID), UUID), Ok(earlier));
    assert_eq!(hex(&header.encode(UUID)), include_str!("golden/segment.hex").trim());
    assert_eq!(SegmentHeader::decode(&header.encode(UUID), UUID), Ok(header));
    assert!(SegmentHeader::decode(&header.encode(UUID), UUID + 1).is_err(), "another device");
}

#[test]
fn the_record_header_is_as_documented() {
    assert_eq!(hex(&record().encode(UUID)), include_str!("golden/record.hex").trim());
    assert_eq!(RecordHeader::decode(&record().encode(UUID), UUID, 1 << 20), Ok(record()));
    assert!(RecordHeader::decode(&record().encode(UUID), UUID, 1 << 10).is_err(), "too long");
}

#[test]
fn the_footer_page_is_as_documented() {
    let entry = |sequence, kind| FooterEntry {
        kind,
        shape: record().shape,
        pinned: sequence == 1,
        digest: record().digest,
        version: Version(9),
        sequence,
        unit: 64,
        away: 5,
        payload_checksum: record().payload_checksum,
        tenant: Some(if kind == Kind::Object { 0xfedc_ba98 } else { 0 }),
    };
    let entries = [entry(1, Kind::Object), entry(2, Kind::Tombstone)];
    let page = FooterPage {
        segment: 7,
        generation: 11,
        page: 1,
        pages: 2,
        entries: 2,
        durable_sequence: 10,
        names_tenants: true,
    };
    let mut bytes = vec![0xff; 512];
    page.encode(UUID, &entries, &mut bytes);
    assert_eq!(hex(&bytes[..176]), include_str!("golden/footer.hex").trim());
    assert!(bytes[176..].iter().all(|byte| *byte == 0));
    assert_eq!(FooterPage::decode(&bytes, UUID), Ok(page));
    assert!(FooterPage::entries(&bytes, 2).eq(entries));
}

#[test]
fn footers_of_before_name_no_tenants() {
    let bytes: Vec<u8> = include_str!("golden/footer-of-before.hex")
        .split_whitespace()
        .flat_map(|line| (0..line.len()).step_by(2).map(|at| u8::from_str_radix(&line[at..at + 2], 16).expect("hex")))
        .collect();
    let page = [bytes, vec![0; 512 - 176]].concat();
    let found = FooterPage::decode(&page, UUID).expect("a page of an earlier version");
    assert!(!found.names_tenants);
    let tenants: Vec<_> = FooterPage::entries(&page, found.entries).map(|entry| (entry.away, entry.tenant)).collect();
    assert_eq!(tenants, [(5, None), (5, None)]);
}

proptest! {
    #[test]
    fn no_flipped_bit_of_a_structure_passes(bit in 0..8 * 104usize) {
        let mut bytes = record().encode(UUID);
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(RecordHeader::decode(&bytes, UUID, 1 << 20).is_err());
        let header = SegmentHeader { segment: 7, generation: 8, oldest_live: 9, previous: 5, filled: None };
        let mut bytes = header.encode(UUID);
        bytes[bit / 8 % 64] ^= 1 << (bit % 8);
        prop_assert!(SegmentHeader::decode(&bytes, UUID).is_err());
        let mut bytes = superblock().encode();
        bytes[bit / 8] ^= 1 << (bit % 8);
        let is_ours = matches!(Superblock::decode(&bytes), SuperblockFound::Kvplane(_));
        prop_assert!(!is_ours);
    }

    #[test]
    fn any_bytes_are_read_without_harm(bytes in prop::collection::vec(any::<u8>(), 512), magic in 0..4usize) {
        let mut bytes = bytes;
        bytes[..6].copy_from_slice([b"KVTS\x02\0", b"KVTG\x02\0", b"KVTR\x02\0", b"KVTF\x02\0"][magic]);
        let fixed = |len: usize| bytes[..len].to_vec();
        let _ = Superblock::decode(&fixed(128).try_into().expect("128 bytes"));
        let _ = SegmentHeader::decode(&fixed(64).try_into().expect("64 bytes"), UUID);
        let _ = RecordHeader::decode(&fixed(104).try_into().expect("104 bytes"), UUID, 1 << 20);
        let _ = FooterPage::decode(&bytes, UUID);
    }

    #[test]
    fn records_survive_encoding(
        digest in any::<u128>(), version in any::<u64>(), sequence in any::<u64>(), offset in any::<u64>(),
        payload_bytes in 1..1u32 << 20, key_bytes in 0..4096u16, extent in any::<bool>(), pinned in any::<bool>(),
        away in 0..=AWAY_MOST, names_parts in any::<bool>(), copied in any::<bool>(), tenant in any::<u32>(),
    ) {
        let shape = Shape { payload_bytes, key_bytes, extent, names_parts, copied };
        let away = if extent { away } else { 0 };
        let header = RecordHeader {
            shape, away, pinned, offset, sequence, digest: Digest(digest), version: Version(version), ..record()
        };
        prop_assert_eq!(RecordHeader::decode(&header.encode(UUID), UUID, 1 << 20), Ok(header));
        let (listed, mut entry) = (FooterEntry::of(&header, 5, Some(tenant)), [0; FOOTER_ENTRY_BYTES]);
        listed.encode(&mut entry);
        prop_assert_eq!(FooterEntry::decode(&entry, true), Some(listed));
        let (chunk, block) = (262_144, 4096);
        let (whole, most) = (shape.record_bytes(chunk, block), shape.most_bytes(chunk, block));
        prop_assert!(whole >= shape.head_bytes(chunk) + u64::from(payload_bytes) && whole <= most);
        prop_assert_eq!((whole % 64, most % 64), (0, 0));
        let at = shape.payload_at(8192 + 64, away, chunk, block);
        prop_assert!(at >= 8192 + 64 + shape.head_bytes(chunk));
        prop_assert!(!extent || at.is_multiple_of(u64::from(block)));
    }
}
