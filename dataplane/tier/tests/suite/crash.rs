//! Tests with a crash after every single operation of the device, in a fixed history: every acknowledgement holds after
//! the restart, and recovering twice gives the same result.

use crate::support;

use std::collections::BTreeMap;

use kvplane_proto::digest::Digest;
use kvplane_proto::rng::Rng;
use kvplane_tier::{Ack, Priority, RecordView, TierConfig};
use support::model::Promise;
use support::small;
use support::world::World;

fn digest(key: u64) -> Digest {
    Digest::of(b"tenant", &key.to_le_bytes())
}

/// Fills the device about one and a half times with puts, overwrites, removals and gets, until `crash_after`
/// operations; returns true if all of it was done.
fn history(world: &mut World, crash_after: u64) -> bool {
    let mut rng = Rng::new(9, "history");
    world.until_recovered();
    for turn in 0..230u64 {
        let key = digest(rng.below(40));
        let ack = if turn % 3 == 0 { Ack::Durable } else { Ack::Buffered };
        let bytes = if turn % 11 == 0 { 70_000 } else { 1 + rng.below(12_000) as u32 };
        if turn % 5 == 4 {
            let _ = world.remove(key, ack);
        } else {
            let _ = world.put(key, bytes, turn % 17 == 0, ack);
        }
        world.get(digest(rng.below(40)), Priority::Get);
        for _ in 0..4 {
            if world.device.completions >= crash_after {
                return false;
            }
            world.step();
        }
        world.now_ns += 500;
    }
    true
}

fn all(world: &World) -> BTreeMap<Digest, RecordView> {
    let mut all = BTreeMap::new();
    let mut from = Some(0);
    while let Some(at) = from {
        let (views, next) = world.tier.walk(at, 7);
        all.extend(views.into_iter().map(|view| (view.digest, view)));
        from = next;
    }
    all
}

#[test]
fn a_crash_after_any_operation_keeps_what_was_promised() {
    for power in [true, false] {
        for block in [512, 4096] {
            let mut crash_after = 12;
            loop {
                let mut world = World::new(small(block), 77);
                let complete = history(&mut world, crash_after);
                world.restart(power);
                world.until_recovered();
                world.tier.check();
                let promise = if power { Promise::Durable } else { Promise::Buffered };
                let verdict = world.verify(promise, true);
                verdict.unwrap_or_else(|error| panic!("power {power}, after operation {crash_after}: {error}"));
                if complete {
                    assert!(crash_after > 600, "only {crash_after} operations");
                    break;
                }
                crash_after += if crash_after < 60 { 1 } else { 3 };
            }
        }
    }
}

#[test]
fn a_crash_while_a_version_is_rewritten_keeps_it() {
    for (power, bytes) in [(true, 3_000), (true, 70_000), (false, 3_000), (false, 70_000)] {
        for crash_after in 0.. {
            let mut world = World::new(small(4096), 78);
            world.until_recovered();
            world.settle();
            world.put_version(digest(1), 1, bytes, false, Ack::Durable).expect("there is room");
            world.settle();
            world.put_version(digest(1), 1, bytes, false, Ack::Durable).expect("there is room");
            let (begun, mut over) = (world.device.completions, false);
            while !over && world.device.completions < begun + crash_after {
                over = !world.step();
            }
            assert_eq!(world.tier.locate(digest(1)).map(|view| view.version.0), Some(1));
            world.restart(power);
            world.until_recovered();
            assert_eq!(world.tier.locate(digest(1)).map(|view| view.version.0), Some(1), "after {crash_after}");
            world.verify(Promise::Durable, true).expect("its bytes");
            // A removal covers both records.
            world.remove(digest(1), Ack::Durable).expect("it is there");
            world.settle();
            world.restart(power);
            world.until_recovered();
            assert!(world.tier.locate(digest(1)).is_none(), "after {crash_after}");
            if over {
                break;
            }
        }
    }
}

#[test]
fn recovering_twice_gives_the_same() {
    for seed in 0..20 {
        let mut world = World::new(small(512), seed);
        history(&mut world, 200 + 30 * seed);
        world.restart(true);
        world.until_recovered();
        let first = all(&world);
        // Before reclaim or a call has changed anything.
        world.restart(true);
        world.until_recovered();
        let second = all(&world);
        let kept = first.iter().filter(|(digest, view)| second.get(digest) == Some(view)).count();
        assert!(second.iter().all(|(digest, view)| first.get(digest) == Some(view)), "seed {seed}: more than before");
        assert_eq!(kept, first.len(), "seed {seed}");
        assert!(!first.is_empty());
    }
}

#[test]
fn a_clean_restart_scans_only_open_segments() {
    let mut world = World::new(TierConfig { segments: 24, ..small(4096) }, 4);
    // Not enough for reclaim to begin.
    history(&mut world, u64::MAX);
    world.settle();
    assert_eq!(world.tier.stats().reclaims, 0);
    let before = all(&world);
    world.restart(false);
    world.until_recovered();
    assert_eq!(all(&world), before);
    let report = world.reports.last().expect("a report");
    assert!(report.sealed_segments >= 3 && report.scanned_segments <= 2, "{report}");
    assert_eq!((report.torn_records, report.damaged_headers, report.unreadable_windows), (0, 0, 0), "{report}");
}

#[test]
fn interrupted_starts_cost_no_objects() {
    let mut world = World::new(small(4096), 5);
    world.until_recovered();
    for key in 0..3 {
        world.settle();
        world.put(digest(key), 3000, false, Ack::Durable).expect("there is room");
    }
    world.settle();
    for _ in 0..3 * world.tier.config().segments {
        world.restart(false);
        world.until_recovered();
        world.settle();
    }
    world.tier.check();
    world.verify(Promise::Durable, true).expect("nothing else was written");
    assert_eq!(all(&world).len(), 3, "objects made room for segments that nobody used");
}

/// Runs puts and removals, with operations of the device in between.
fn work(world: &mut World, rng: &mut Rng, turns: u64) {
    for _ in 0..turns {
        let key = digest(rng.below(12));
        let ack = if rng.chance(0.5) { Ack::Durable } else { Ack::Buffered };
        if rng.chance(0.6) {
            let _ = world.remove(key, ack);
        } else {
            let _ = world.put(key, 1 + rng.below(3_000) as u32, false, ack);
        }
        for _ in 0..rng.below(5) {
            world.step();
        }
        world.now_ns += 500;
    }
}

/// Removals that a power failure took before they were durable are not counted as lost by the start after the next, if
/// the one in between ended before it had written its findings to the device.
#[test]
fn removals_lost_in_a_power_failure_are_not_counted_two_starts_later() {
    for seed in 0..60 {
        let mut rng = Rng::new(seed, "two incarnations");
        let config = TierConfig { segment_bytes: 64 << 10, segments: 64, max_object_bytes: 4 << 10, ..small(512) };
        let mut world = World::new(config, seed);
        world.until_recovered();
        // Until the first segment is full: its note is being written to the header of the next segment but one.
        work(&mut world, &mut rng, 10);
        let free = world.tier.stats().free_segments;
        while world.tier.stats().free_segments == free {
            work(&mut world, &mut rng, 1);
        }
        for _ in 0..rng.below(8) {
            world.step();
        }
        world.restart(true);
        world.until_open();
        let turns = rng.below(12);
        work(&mut world, &mut rng, turns);
        world.restart(rng.chance(0.5));
        world.until_recovered();
        world.tier.check();
        let lost = world.reports.last().map(|report| report.lost_removals);
        assert_eq!(lost, Some(0), "seed {seed}");
        world.verify(Promise::Durable, true).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}
