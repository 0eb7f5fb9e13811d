//! Tests of an index that is small for the device: more and shorter objects than it was sized for, until long after it
//! is full.

use crate::support;

use kvplane_proto::digest::Digest;
use kvplane_proto::rng::Rng;
use kvplane_tier::{Ack, Priority, PutError, TierConfig};
use support::small;
use support::world::World;

fn digest(key: u64) -> Digest {
    Digest::of(b"", &key.to_le_bytes())
}

/// Puts an object, retrying as long as that is useful; panics when it is refused for good.
fn put(world: &mut World, key: u64, bytes: u32, pinned: bool, ack: Ack) {
    for _ in 0..10_000 {
        match world.put(digest(key), bytes, pinned, ack) {
            Ok(_) => return world.pump(),
            Err(PutError::Full | PutError::Busy) => {}
            Err(error) => panic!("{error}"),
        }
        if !world.step() {
            let at = world.tier.poll_timeout().filter(|at| *at > world.now_ns);
            world.now_ns = at.unwrap_or_else(|| panic!("put {key} is refused for good: {:?}", world.tier.stats()));
        }
    }
    panic!("put {key} is refused time and again: {:?}", world.tier.stats());
}

/// Draws any valid limits, as far as they concern sizes and numbers.
fn config(rng: &mut Rng) -> TierConfig {
    let mut config = small(if rng.chance(0.5) { 512 } else { 4096 });
    config.segments = 4 + rng.below(20) as u32;
    config.free_segments_low = 2 + rng.below(u64::from(config.segments) - 3) as u32;
    config.footer_page_bytes = if rng.chance(0.5) { config.block_bytes } else { 4096 };
    config.footer_pages = 1 + rng.below(4) as u32;
    let most = [8, 100, 400][rng.below(3) as usize];
    config.max_records = 1 + rng.below(most) as u32;
    config.durable_writes = rng.chance(0.3);
    config.groups = 2 + rng.below(4) as u32;
    config.group_bytes = 4096 << rng.below(4);
    config.max_waiters = 2 + rng.below(40) as u32;
    config.max_reads = 1 + rng.below(6) as u32;
    config.max_moves = 1 + rng.below(5) as u32;
    config.reinsert_percent = rng.below(76) as u8;
    config.hot_hits = rng.below(4) as u8;
    config.validate().expect("limits that may be");
    config
}

#[test]
fn puts_of_short_objects_succeed_whatever_the_limits() {
    for seed in 1..=60 {
        let mut rng = Rng::new(seed, "crowded");
        let mut world = World::new(config(&mut rng), seed);
        world.until_recovered();
        let (pins, reads) = (rng.chance(0.3), rng.below(4));
        for key in 0..3 * u64::from(world.config.max_records) + 100 {
            let ack = if rng.chance(0.2) { Ack::Durable } else { Ack::Buffered };
            let most = if rng.chance(0.9) { 300 } else { 8000 };
            let bytes = 1 + rng.below(most) as u32;
            // From time to time, a key that exists already.
            let key = if rng.chance(0.1) { key / 2 } else { key };
            put(&mut world, key, bytes, pins, ack);
            for _ in 0..reads {
                world.get(digest(key - rng.below(key.min(400) + 1)), Priority::Get);
                world.pump();
            }
        }
        world.tier.check();
    }
}

/// The index evicts the oldest few objects, not all, to make room for the next one.
#[test]
fn a_full_index_evicts_a_small_part_at_a_time() {
    let mut world = World::new(TierConfig { segments: 20, ..small(4096) }, 1);
    world.until_recovered();
    let mut least = u64::MAX;
    for key in 0..3000 {
        put(&mut world, key, 100, false, Ack::Buffered);
        for _ in 0..4 {
            world.step();
        }
        if key > 1000 {
            least = least.min(world.tier.walk(0, 1000).0.len() as u64);
        }
    }
    assert!(least > u64::from(world.config.max_records) * 3 / 4, "{least} of {}", world.config.max_records);
}
