//! Tests that reclaim ends, whatever the limits are, however hot or short the objects, and however many of them are
//! pinned.

use crate::support;

use kvplane_proto::digest::Digest;
use kvplane_proto::rng::Rng;
use kvplane_tier::{Ack, Priority, PutError, TierConfig};
use support::small;
use support::world::World;

fn seeds() -> core::ops::Range<u64> {
    let read = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let first = read("KVPLANE_SEED").unwrap_or(1);
    first..first + read("KVPLANE_SEEDS").unwrap_or(60)
}

fn digest(key: u64) -> Digest {
    Digest::of(b"", &key.to_le_bytes())
}

/// Draws any valid limits, as far as they concern reclaim: often every record is hot, and nearly all segments are to be
/// free.
fn config(rng: &mut Rng) -> TierConfig {
    let mut config = small(if rng.chance(0.5) { 512 } else { 4096 });
    config.segments = 4 + rng.below(12) as u32;
    let most = u64::from(config.segments) - 2;
    config.free_segments_low = if rng.chance(0.5) { most as u32 } else { 2 + rng.below(most - 1) as u32 };
    config.footer_page_bytes = if rng.chance(0.5) { config.block_bytes } else { 4096 };
    config.footer_pages = 1 + rng.below(12) as u32;
    config.max_object_bytes = [3000, 40 << 10, 100 << 10, 180 << 10][rng.below(4) as usize];
    config.copy_bytes = config.max_object_bytes.next_multiple_of(4096) * (1 + rng.below(3) as u32);
    let most = [30, 200, 3000][rng.below(3) as usize];
    config.max_records = 4 + rng.below(most) as u32;
    config.group_bytes = 4096 << rng.below(4);
    config.max_moves = 1 + rng.below(30) as u32;
    config.reinsert_percent = if rng.chance(0.5) { 75 } else { rng.below(76) as u8 };
    config.hot_hits = if rng.chance(0.6) { 0 } else { rng.below(4) as u8 };
    config.validate().expect("limits that may be");
    config
}

/// Puts an object, unless it is refused again and again, which is expected with some limits.
fn put(world: &mut World, key: u64, bytes: u32, pinned: bool) {
    for _ in 0..200 {
        match world.put(digest(key), bytes, pinned, Ack::Buffered) {
            Ok(_) => return world.pump(),
            Err(PutError::Full | PutError::Busy) => {}
            Err(error) => panic!("{error}"),
        }
        if !world.step() {
            let Some(at) = world.tier.poll_timeout().filter(|at| *at > world.now_ns) else { return };
            world.now_ns = at;
        }
    }
}

#[test]
fn reclaim_ends_whatever_the_limits() {
    for seed in seeds() {
        let mut rng = Rng::new(seed, "rest");
        let mut world = World::new(config(&mut rng), seed);
        world.until_recovered();
        let (pinned, steps) = ([0.0, 0.1, 1.0][rng.below(3) as usize], rng.below(6));
        let most = [300, 4000, u64::from(world.config.max_object_bytes)][rng.below(3) as usize];
        let most = most.min(world.config.max_object_bytes.into());
        let mut left = 3 * world.config.device_bytes();
        for key in 0..4 * u64::from(world.config.max_records).min(400) {
            let bytes = 1 + rng.below(most) as u32;
            put(&mut world, key, bytes, rng.chance(pinned));
            for _ in 0..steps {
                world.step();
            }
            if rng.chance(0.5) {
                world.get(digest(key - rng.below(key.min(40) + 1)), Priority::Get);
                world.pump();
            }
            left = left.saturating_sub(bytes.into());
            if left == 0 {
                break;
            }
        }
        let reclaims = world.tier.stats().reclaims;
        for turn in 0.. {
            assert!(
                turn < 60_000,
                "seed {seed}: {} turns and no end: {:?}",
                world.tier.stats().reclaims - reclaims,
                world.config
            );
            if !world.step() {
                match world.tier.poll_timeout() {
                    Some(at) if at > world.now_ns => world.now_ns = at,
                    Some(_) => panic!("seed {seed}: a timeout in the past does nothing"),
                    None => break,
                }
            }
        }
        world.tier.check();
    }
}

/// Copies are batched even if the device is idle: a block for each would be twenty times their size.
#[test]
fn short_copies_share_blocks() {
    let limits = TierConfig { hot_hits: 0, free_segments_low: 6, max_records: 1000, ..small(4096) };
    let mut world = World::new(TierConfig { max_moves: 16, ops_in_flight: [4, 3, 1, 8], ..limits }, 1);
    world.until_recovered();
    for key in 0..250 {
        put(&mut world, key, 100, false);
    }
    world.settle();
    let before = world.tier.stats();
    let large = world.config.max_object_bytes;
    for key in 1000..1008 {
        put(&mut world, key, large, false);
        world.settle();
    }
    let after = world.tier.stats();
    let (copies, groups) = (after.reinserted - before.reinserted, after.groups - before.groups);
    assert!(copies > 100 && groups < copies / 8, "{copies} copies in {groups} groups");
}
