//! Tests of false lengths: records and footers with valid checksums that claim to reach past the limit of an object,
//! the end of the segment or of the device. The model device refuses any operation outside of itself.

use crate::support;

use kvplane_proto::digest::Digest;
use kvplane_proto::rng::Rng;
use kvplane_tier::format::{
    AWAY_MOST, FIRST_SEGMENT_OFFSET, FooterEntry, FooterPage, Kind, RECORD_HEADER_BYTES, RecordHeader,
};
use kvplane_tier::{Ack, RecoveryReport, TierConfig};
use support::model::Promise;
use support::world::World;
use support::{UUID, small};

const BLOCK: u32 = 512;
const SEGMENT: u64 = 64 << 10;
const MOST: u32 = 20_000;
const KEYS: u64 = 24;

/// Name of a false statement, and the function that makes it.
type Lie<T> = (&'static str, fn(&mut T));

/// Creates some sealed segments and an open one, everything durable.
fn filled(seed: u64) -> World {
    let config = TierConfig { segment_bytes: SEGMENT, max_object_bytes: MOST, ..small(BLOCK) };
    let mut world = World::new(config, seed);
    world.until_recovered();
    let mut rng = Rng::new(seed, "lengths");
    for key in 0..KEYS {
        let digest = Digest::of(b"", &key.to_le_bytes());
        let bytes = 1 + rng.below(12_000) as u32;
        while let Err(error) = world.put(digest, bytes, false, Ack::Durable) {
            assert!(world.step(), "{error}");
        }
    }
    world.settle();
    world.device_fails = true;
    world
}

/// Recovers from the device's contents; every byte that is served is right, whatever else is lost.
fn recovered(world: &mut World, what: &str) -> RecoveryReport {
    world.restart(true);
    world.until_recovered();
    assert_eq!(world.refused, None, "{what}");
    world.tier.check();
    let report = world.reports.last().cloned().expect("a report");
    world.verify(Promise::Nothing, false).unwrap_or_else(|error| panic!("{what}: {error}"));
    report
}

/// Returns the offsets and headers of objects in unsealed segments.
fn heads(world: &World) -> Vec<(usize, RecordHeader)> {
    let bytes = world.device.bytes();
    let is_sealed = |at: usize| {
        let segment = (at as u64 - FIRST_SEGMENT_OFFSET) / SEGMENT;
        let end = (FIRST_SEGMENT_OFFSET + (segment + 1) * SEGMENT) as usize;
        let page = &bytes[end - world.config.footer_page_bytes as usize..end];
        FooterPage::decode(page, UUID).is_ok()
    };
    let places = (FIRST_SEGMENT_OFFSET as usize..bytes.len() - RECORD_HEADER_BYTES).step_by(64);
    let headers = places.filter_map(|at| {
        let fixed = bytes[at..at + RECORD_HEADER_BYTES].try_into().ok()?;
        let header = RecordHeader::decode(fixed, UUID, MOST).ok()?;
        (header.kind == Kind::Object && header.offset == at as u64).then_some((at, header))
    });
    headers.filter(|(at, _)| !is_sealed(*at)).collect()
}

#[test]
fn a_record_that_reaches_past_an_end_is_no_record() {
    let lies: [Lie<RecordHeader>; 6] = [
        ("a payload of 4 GiB", |header| header.shape.payload_bytes = u32::MAX),
        ("a payload one byte above the limit", |header| header.shape.payload_bytes = MOST + 1),
        ("a payload one block longer", |header| {
            header.shape.payload_bytes = MOST.min(header.shape.payload_bytes + BLOCK);
        }),
        ("a key of 64 KiB", |header| header.shape.key_bytes = u16::MAX),
        ("a payload far away", |header| (header.shape.extent, header.away) = (true, AWAY_MOST)),
        ("chunks of one byte", |header| header.chunk_bytes = 1),
    ];
    let mut counted = 0;
    for seed in 0..12 {
        for (what, lie) in lies {
            let mut world = filled(seed);
            let heads = heads(&world);
            let (at, mut header) = *heads.last().expect("an open segment has records");
            lie(&mut header);
            world.device.put(at, &header.encode(UUID));
            let report = recovered(&mut world, &format!("seed {seed}: {what} at {at}"));
            counted += report.damaged_headers + report.torn_records;
        }
    }
    assert!(counted >= 12 * 5, "{counted} of {} lies were counted", 12 * 6);
}

#[test]
fn a_footer_that_reaches_past_an_end_gives_nothing_from_there() {
    let lies: [Lie<FooterEntry>; 5] = [
        ("a payload of 4 GiB", |entry| entry.shape.payload_bytes = u32::MAX),
        ("a payload past the segment", |entry| {
            (entry.shape.payload_bytes, entry.unit) = (MOST, (SEGMENT / 64) as u32 - 8);
        }),
        ("a record past the device", |entry| entry.unit = u32::MAX),
        ("a key of 64 KiB", |entry| entry.shape.key_bytes = u16::MAX),
        ("a payload far behind the last head", |entry| {
            (entry.shape.extent, entry.unit, entry.away) = (true, (SEGMENT / 64) as u32 - 8, AWAY_MOST);
        }),
    ];
    for seed in 0..12 {
        for (what, lie) in lies {
            let mut world = filled(seed);
            let page_bytes = world.config.footer_page_bytes as usize;
            let ends = (1..=u64::from(world.config.segments)).map(|n| (FIRST_SEGMENT_OFFSET + n * SEGMENT) as usize);
            let mut lied = 0;
            for at in ends.map(|end| end - page_bytes) {
                let mut page = world.device.bytes()[at..at + page_bytes].to_vec();
                let Ok(header) = FooterPage::decode(&page, UUID) else { continue };
                let mut entries: Vec<FooterEntry> = FooterPage::entries(&page, header.entries).collect();
                let victim = entries.iter_mut().find(|entry| entry.kind == Kind::Object).expect("an object");
                lie(victim);
                header.encode(UUID, &entries, &mut page);
                world.device.put(at, &page);
                lied += 1;
            }
            assert!(lied > 0, "seed {seed} sealed nothing");
            let report = recovered(&mut world, &format!("seed {seed}: {what}"));
            // Not each one is counted: a false entry in a segment that reclaim has emptied is never read.
            assert!(report.given_up > 0, "seed {seed}: {what}: {report} after {lied} lies");
        }
    }
}
