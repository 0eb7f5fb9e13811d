//! Tests of random work with crashes: never a wrong byte, never a removed key back, and every durable object is found.

use crate::support;

use kvplane_proto::digest::Digest;
use kvplane_proto::rng::Rng;
use kvplane_tier::{Ack, Priority, TierConfig};
use support::device::Faults;
use support::model::Promise;
use support::small;
use support::world::World;

const KEYS: u64 = 60;

fn seeds() -> core::ops::Range<u64> {
    let read = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let first = read("KVPLANE_SEED").unwrap_or(1);
    first..first + read("KVPLANE_SEEDS").unwrap_or(40)
}

fn digest(key: u64) -> Digest {
    Digest::of(b"", format!("key-{key}").as_bytes())
}

fn config(rng: &mut Rng) -> TierConfig {
    let mut config = small(if rng.chance(0.5) { 512 } else { 4096 });
    config.durable_writes = rng.chance(0.3);
    config.max_records = if rng.chance(0.2) { 30 } else { 200 };
    config.hot_hits = rng.below(3) as u8;
    config.footer_page_bytes = if rng.chance(0.5) { config.block_bytes.max(512) } else { 4096 };
    config.footer_pages = if config.footer_page_bytes == 512 { 24 } else { 4 };
    config.groups = 2 + rng.below(4) as u32;
    config
}

fn bytes(world: &mut World) -> u32 {
    let most = match world.rng.below(10) {
        0..6 => 2000,
        6..9 => 20_000,
        _ => u64::from(world.config.max_object_bytes),
    };
    let bytes = 1 + world.rng.below(most) as u32;
    // Payloads that fill their blocks take whole blocks, however short they are.
    if world.rng.chance(0.3) { bytes.next_multiple_of(world.config.block_bytes).min(100 << 10) } else { bytes }
}

/// Runs one action of a caller, of the device, or of time.
fn act(world: &mut World) {
    let key = digest(world.rng.below(KEYS));
    let ack = if world.rng.chance(0.4) { Ack::Durable } else { Ack::Buffered };
    match world.rng.below(20) {
        0..5 => {
            let (bytes, pinned) = (bytes(world), world.rng.chance(0.05));
            let _ = world.put(key, bytes, pinned, ack);
        }
        5..7 => {
            let _ = world.remove(key, ack);
        }
        7..10 => {
            world.get(key, Priority::Get);
        }
        10 => world.now_ns += world.rng.below(30_000),
        _ => {
            world.step();
        }
    }
    world.pump();
}

fn work(world: &mut World, actions: u64) {
    for _ in 0..actions {
        act(world);
    }
}

#[test]
fn no_promised_object_is_lost_and_no_removed_one_returns_over_crashes() {
    for seed in seeds() {
        let mut rng = Rng::new(seed, "scenario");
        let config = config(&mut rng);
        // An index that is too small for the device gives up the oldest objects at a restart.
        let strict = config.max_records > 100;
        let mut world = World::new(config, seed);
        world.is_honest = true;
        world.until_recovered();
        for round in 0..6 {
            let actions = rng.below(1200);
            work(&mut world, actions);
            world.tier.check();
            let power = rng.chance(0.6);
            world.restart(power);
            if rng.chance(0.3) {
                // A second restart, during recovery.
                for _ in 0..rng.below(60) {
                    world.step();
                }
                world.restart(power);
            }
            let promise = if power { Promise::Durable } else { Promise::Buffered };
            while !world.tier.is_recovered() {
                let shown = world.check_shown(promise);
                shown.unwrap_or_else(|error| panic!("seed {seed}, round {round}, shown too early: {error}"));
                assert!(world.step(), "seed {seed}: recovery does not end");
            }
            world.tier.check();
            if let Err(error) = world.verify(promise, strict) {
                panic!("KVPLANE_SEED={seed} KVPLANE_SEEDS=1, round {round}: {error}");
            }
        }
        world.settle();
        assert!(world.tier.is_idle(), "seed {seed}: {:?}", world.tier);
    }
}

#[test]
fn calls_are_served_while_recovery_runs() {
    for seed in seeds() {
        let mut rng = Rng::new(seed, "scenario");
        let mut world = World::new(config(&mut rng), seed);
        world.until_recovered();
        for round in 0..4 {
            work(&mut world, 600);
            world.settle();
            world.restart(true);
            world.until_open();
            // Calls during recovery win over the records that recovery finds later.
            let (mut removed, mut put) = (Vec::new(), Vec::new());
            for key in 0..KEYS {
                let digest = digest(key);
                match rng.below(4) {
                    0 => {
                        while world.remove(digest, Ack::Durable).is_err() {
                            assert!(world.step());
                        }
                    }
                    1 => {
                        if world.put(digest, 700, false, Ack::Durable).is_ok() {
                            put.push(digest);
                        }
                        continue;
                    }
                    _ => continue,
                }
                removed.push(digest);
                for digest in &removed {
                    assert_eq!(world.tier.locate(*digest), None, "seed {seed}: {digest} is back");
                }
                if rng.chance(0.5) {
                    world.step();
                }
            }
            world.until_recovered();
            for digest in &removed {
                assert_eq!(world.tier.locate(*digest), None, "seed {seed}, round {round}: {digest} is back");
            }
            for digest in &put {
                assert_eq!(world.tier.locate(*digest).map(|view| view.payload_bytes), Some(700), "seed {seed}");
            }
            world.tier.check();
            world.settle();
            world.verify(Promise::Durable, false).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        }
    }
}

#[test]
fn a_failing_device_costs_objects_but_never_gives_wrong_ones() {
    for seed in seeds() {
        let mut rng = Rng::new(seed, "scenario");
        let mut world = World::new(config(&mut rng), seed);
        world.until_recovered();
        (world.device_fails, world.is_honest) = (true, true);
        for round in 0..5 {
            let kinds = rng.below(8);
            let rate = |kind: u64, rate| if kinds & kind != 0 { rate } else { 0.0 };
            world.device.faults = Faults {
                read_error: rate(1, 0.02),
                write_error: rate(2, 0.01),
                short: rate(4, 0.02),
                ..Faults::default()
            };
            work(&mut world, 800);
            world.tier.check();
            let power = rng.chance(0.5);
            world.restart(power);
            if rng.chance(0.5) {
                world.device.faults = Faults::default();
            }
            while !world.tier.is_recovered() && world.refused.is_none() {
                assert!(world.step(), "seed {seed}: recovery does not end");
            }
            if world.refused.is_some() {
                // Both superblocks could not be read.
                world.device.faults = Faults::default();
                world.restart(power);
                world.until_recovered();
            }
            world.tier.check();
            let promise = if power { Promise::Durable } else { Promise::Buffered };
            let verdict = world.verify(promise, false);
            let report = world.reports.last();
            verdict.unwrap_or_else(|error| panic!("seed {seed}, round {round}: {error}; {report:?}"));
        }
    }
}

#[test]
fn a_device_that_lies_never_gives_wrong_bytes() {
    let (mut lies, mut seen) = (0, 0);
    for seed in seeds() {
        let mut rng = Rng::new(seed, "scenario");
        let mut world = World::new(config(&mut rng), seed);
        world.until_recovered();
        world.device_fails = true;
        for _ in 0..4 {
            world.device.faults = Faults { lost: 0.01, misdirected: 0.01, ..Faults::default() };
            work(&mut world, 900);
            world.device.faults = Faults::default();
            let stats = world.tier.stats();
            seen += stats.damage.damaged + stats.damage.stale + stats.damage.misdirected;
            world.restart(rng.chance(0.5));
            world.until_recovered();
            world.tier.check();
            // Acknowledgements are void here; the bytes were verified with each get.
            let _ = world.verify(Promise::Durable, false);
        }
        lies += world.device.lies;
    }
    assert!(lies > 20 && seen > 0, "{lies} lies, {seen} seen");
}
