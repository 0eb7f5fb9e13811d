//! Tests of scrubbing and of reclaim on request: every record is verified whatever else is done, damage is found and
//! never served, the rate is kept, and the requested segments are freed.

use crate::support;

use std::collections::BTreeSet;

use kvplane_proto::digest::Digest;
use kvplane_tier::{Ack, Priority, ScrubState, TierConfig};
use proptest::prelude::*;
use support::small;
use support::world::World;

fn digest(key: u64) -> Digest {
    Digest::of(b"", &key.to_le_bytes())
}

fn world(seed: u64) -> World {
    let mut world = World::new(TierConfig { max_records: 400, ..small(512) }, seed);
    world.until_recovered();
    world.settle();
    world
}

/// Puts an object, as soon as there is room.
fn put(world: &mut World, key: u64, bytes: u32) {
    for _ in 0..10_000 {
        if world.put(digest(key), bytes, false, Ack::Buffered).is_ok() {
            return;
        }
        if !world.step() {
            world.now_ns = world.tier.poll_timeout().map_or(world.now_ns, |at_ns| at_ns.max(world.now_ns));
        }
    }
    panic!("no room for {bytes} bytes");
}

/// Damages an object's payload on the device.
fn damage(world: &mut World, key: u64, bytes: u32) {
    let mut pattern = vec![0; bytes as usize];
    let version = world.tier.locate(digest(key)).expect("it is there").version.0;
    support::model::fill(digest(key), version, &mut pattern);
    let probe = &pattern[..pattern.len().min(48)];
    let at = world.device.bytes().windows(probe.len()).position(|window| window == probe).expect("it is written");
    world.device.flip(at + probe.len() / 2, 3);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn a_pass_finds_all_damage_while_objects_are_put_and_removed(
        seed in any::<u64>(),
        sizes in prop::collection::vec(100..30_000u32, 1..24),
        damaged in prop::collection::btree_set(0..24u64, 0..6),
        others in prop::collection::vec((0..4u8, 0..12u64, 100..9000u32), 0..40),
    ) {
        let mut world = world(seed);
        for (key, bytes) in (0..).zip(&sizes) {
            put(&mut world, key, *bytes);
        }
        world.settle();
        let damaged: BTreeSet<u64> = damaged.into_iter().filter(|key| (*key as usize) < sizes.len()).collect();
        world.device_fails = true;
        for key in &damaged {
            damage(&mut world, *key, sizes[*key as usize]);
        }
        let before = world.tier.stats();
        world.tier.scrub_once(world.now_ns, 10_000_000);
        let mut others = others.into_iter();
        for _ in 0..100_000 {
            if world.tier.scrub_report().state == ScrubState::Idle {
                break;
            }
            match others.next() {
                Some((0 | 1, key, bytes)) => drop(world.put(digest(100 + key), bytes, false, Ack::Buffered)),
                Some((2, key, _)) => drop(world.remove(digest(100 + key), Ack::Buffered)),
                Some((_, key, _)) => drop(world.get(digest(100 + key), Priority::Get)),
                None => {}
            }
            if !world.step() {
                world.now_ns = world.tier.poll_timeout().map_or(world.now_ns, |at_ns| at_ns.max(world.now_ns));
            }
        }
        let report = world.tier.scrub_report();
        prop_assert_eq!((report.state, report.ordered_passes), (ScrubState::Idle, 1), "{:?}", report);
        prop_assert!(report.pass.records >= sizes.len() as u64 && report.pass.overlooked == 0, "{:?}", report);
        let expected: BTreeSet<Digest> = damaged.iter().map(|key| digest(*key)).collect();
        prop_assert_eq!(&world.quarantined, &expected);
        prop_assert_eq!(report.pass.bad_records, damaged.len() as u64);
        prop_assert_eq!(world.tier.stats().damage.damaged - before.damage.damaged, damaged.len() as u64);
        for key in 0..sizes.len() as u64 {
            prop_assert_eq!(world.tier.locate(digest(key)).is_some(), !damaged.contains(&key), "object {}", key);
        }
        world.settle();
    }
}

#[test]
fn a_pass_keeps_its_rate_can_be_paused_and_leaves_gets_alone() {
    let mut world = world(5);
    (0..20).for_each(|key| put(&mut world, key, 20_000));
    world.settle();
    let start_ns = world.now_ns;
    world.tier.scrub_once(start_ns, 1_000_000);
    let mut pauses = 0;
    while world.tier.scrub_report().ordered_passes == 0 {
        if world.tier.scrub_report().pass.records == 10 && pauses == 0 {
            pauses += 1;
            world.tier.scrub_once(world.now_ns, 0);
            world.settle();
            assert_eq!(world.tier.scrub_report().state, ScrubState::Paused);
            world.tier.scrub_once(world.now_ns, 1_000_000);
        }
        if !world.step() {
            world.get(digest(3), Priority::Get);
            while world.step() {}
            world.now_ns = world.tier.poll_timeout().map_or(world.now_ns, |at_ns| at_ns.max(world.now_ns));
        }
    }
    let report = world.tier.scrub_report();
    assert_eq!((report.pass.records, report.pass.objects, pauses), (20, 20, 1));
    assert!(report.pass.bytes >= 20 * 20_000);
    let least_ns = (report.pass.bytes - 24_000) * 1000;
    assert!(world.now_ns - start_ns >= least_ns, "{} ns for {} bytes", world.now_ns - start_ns, report.pass.bytes);
}

#[test]
fn reclaim_on_request_makes_room_and_then_rests() {
    let mut world = world(7);
    (0..55).for_each(|key| put(&mut world, key, 20_000));
    world.settle();
    let before = world.tier.stats();
    assert!(before.free_segments < 4 && before.dead_bytes > 0, "{before:?}");
    world.tier.reclaim_until(100);
    assert_eq!(world.tier.stats().wanted_free_segments, 4, "at most half");
    world.settle();
    let after = world.tier.stats();
    assert!(after.free_segments >= 4 && after.evicted > before.evicted, "{after:?}");
    assert_eq!(world.tier.stats().wanted_free_segments, 0);
    assert_eq!(after.segments, 8);
}
