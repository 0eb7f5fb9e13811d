//! `docs/wire.md` agrees with the code: operations and their numbers, flags, statuses, sizes, limits.

use kvplane_proto::frame::{HEADER_BYTES, VERSION};
use kvplane_proto::map::{MAX_REPLICA_OWNERS, ReplicaSet};
use kvplane_proto::message::{
    CommitItem, CommitReply, DigestItem, FillItem, GetItem, IdItem, Item, KeyItem, ListItem, ListReply, LookupReply,
    Operation, PutItem, RangeItem, ReadItem, ReserveReply, RetainItem, RetainReply, RunItem, SizeReply, VersionItem,
    WriteItem,
};
use kvplane_proto::{FrameFlags, Limits, Status};

const DOCUMENT: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/wire.md"));

fn has_row(cells: &[&str]) -> bool {
    DOCUMENT.lines().any(|line| {
        let row: Vec<&str> = line.split('|').map(str::trim).filter(|cell| !cell.is_empty()).collect();
        row.len() >= cells.len() && row.iter().zip(cells).all(|(found, wanted)| found == wanted)
    })
}

#[test]
fn every_operation_is_described_under_its_number() {
    for &operation in Operation::ALL {
        let (number, name) = ((operation as u8).to_string(), format!("`{operation:?}`"));
        assert!(has_row(&[&number, &name]), "docs/wire.md has no row for {number} {name}");
    }
}

#[test]
fn every_flag_is_described_under_its_bit() {
    let flags = [
        ("CHECKSUM", FrameFlags::CHECKSUM),
        ("SUM_REPLIES", FrameFlags::SUM_REPLIES),
        ("PREFETCH", FrameFlags::PREFETCH),
        ("HEADS", FrameFlags::HEADS),
        ("UNCOMMITTED", FrameFlags::UNCOMMITTED),
        ("OF_VERSION", FrameFlags::OF_VERSION),
        ("READ_REPLICA", FrameFlags::READ_REPLICA),
        ("REPLICATE", FrameFlags::REPLICATE),
        ("REPLICA_LEASE", FrameFlags::REPLICA_LEASE),
        ("REPLICATED", FrameFlags::REPLICATED),
        ("OFFERS_TLS", FrameFlags::OFFERS_TLS),
        ("REPLICA_OWNERS", FrameFlags::REPLICA_OWNERS),
    ];
    for (bit, (name, flag)) in (0..).zip(flags) {
        assert_eq!(flag.bits(), 1 << bit, "{name} has a bit of its own");
        let (bit, name) = (i32::to_string(&bit), format!("`{name}`"));
        assert!(has_row(&[&bit, &name]), "docs/wire.md has no row for {bit} {name}");
    }
    let further = FrameFlags::NONE.with_replicas(ReplicaSet::first(MAX_REPLICA_OWNERS).without(0));
    assert!(has_row(&["16 to 21", "replica owners 2 to 7"]), "docs/wire.md has no row for the replica owners");
    assert_eq!(further.bits(), 0x3f << 16);
    let known = flags.iter().fold(further, |all, (_, flag)| all | *flag);
    let unknown = (0..32).map(|bit| 1 << bit).filter(|bit| known.bits() & bit == 0);
    unknown.for_each(|bit| assert!(FrameFlags::from_bits(bit).is_none(), "a flag without a row: {bit:#x}"));
}

#[test]
fn every_status_is_described_under_its_number() {
    for &status in Status::ALL {
        let (number, name) = ((status as u16).to_string(), format!("`{status:?}`"));
        assert!(has_row(&[&number, &name]), "docs/wire.md has no row for {number} {name}");
    }
}

#[test]
fn every_record_is_described_with_its_size() {
    let records = [
        ("DigestItem", DigestItem::BYTES),
        ("VersionItem", VersionItem::BYTES),
        ("GetItem", GetItem::BYTES),
        ("SizeReply", SizeReply::BYTES),
        ("RetainItem", RetainItem::BYTES),
        ("RetainReply", RetainReply::BYTES),
        ("RangeItem", RangeItem::BYTES),
        ("ListItem", ListItem::BYTES),
        ("ListReply", ListReply::BYTES),
        ("KeyItem", KeyItem::BYTES),
        ("ReadItem", ReadItem::BYTES),
        ("WriteItem", WriteItem::BYTES),
        ("RunItem", RunItem::BYTES),
        ("LookupReply", LookupReply::BYTES),
        ("PutItem", PutItem::BYTES),
        ("ReserveReply", ReserveReply::BYTES),
        ("CommitItem", CommitItem::BYTES),
        ("CommitReply", CommitReply::BYTES),
        ("IdItem", IdItem::BYTES),
        ("FillItem", FillItem::BYTES),
    ];
    for (name, bytes) in records {
        assert!(
            has_row(&[&format!("`{name}`"), &bytes.to_string()]),
            "docs/wire.md has no row for {name}, {bytes} bytes"
        );
    }
}

#[test]
fn the_limits_are_those_of_the_code() {
    let limits: [(&str, u64); 16] = [
        ("items of a frame", Limits::ITEMS_PER_FRAME as u64),
        ("items of an `Exists`, `Size` or `Remove`", Limits::QUESTIONS_PER_FRAME as u64),
        ("put sessions of a shard", Limits::PUT_SESSIONS as u64),
        ("separate ranges of a put session", Limits::PUT_SESSION_RANGES as u64),
        ("longest time without a write to a put session, in milliseconds", Limits::PUT_SESSION_IDLE_MOST_MS.into()),
        ("ranges of a gathered request", Limits::RANGES_PER_FRAME as u64),
        ("bytes of all ranges of a gathered request", Limits::GATHER_BYTES),
        ("bytes of a body", Limits::BODY_BYTES as u64),
        ("bytes of a payload", Limits::PAYLOAD_BYTES),
        ("bytes of a name", Limits::NAME_BYTES as u64),
        ("bytes of a key", Limits::KEY_BYTES as u64),
        ("milliseconds of a soft pin", Limits::SOFT_PIN_MS.into()),
        ("regions of a segment", Limits::REGIONS_PER_SEGMENT as u64),
        ("requests open on one connection", Limits::REQUESTS_PER_CONNECTION as u64),
        ("milliseconds from connecting to the greeting", Limits::HELLO_NS / 1_000_000),
        ("milliseconds that a reservation lasts", Limits::RESERVATION_NS / 1_000_000),
    ];
    for (name, value) in limits {
        assert!(has_row(&[name, &value.to_string()]), "docs/wire.md has no row for {name}, {value}");
    }
    let text = DOCUMENT.split_whitespace().collect::<Vec<_>>().join(" ");
    for said in [format!("This is version {VERSION}"), format!("a header of {HEADER_BYTES} bytes")] {
        assert!(text.contains(&said), "docs/wire.md does not say: {said}");
    }
}
