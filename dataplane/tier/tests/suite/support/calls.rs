//! Tier on a device, for tests that make one call after the other.

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;
use kvplane_tier::{Ack, Event, Output, Put, PutError, PutReceipt, Span, TierConfig, Token};

use super::world::World;

pub(crate) fn digest(key: u64) -> Digest {
    Digest::of(b"", &key.to_le_bytes())
}

pub(crate) fn world(config: TierConfig) -> World {
    let mut world = World::new(config, 1);
    world.until_recovered();
    world.settle();
    world
}

/// Runs until no operation is in flight; returns the events.
pub(crate) fn settle(world: &mut World) -> Vec<Event> {
    let mut events = Vec::new();
    loop {
        while let Some(output) = world.tier.poll_output(world.now_ns, &mut world.memory) {
            match output {
                Output::Block(op) => world.device.submit(op, &world.memory),
                Output::Event(event) => events.push(event),
            }
        }
        let Some((id, result)) = world.device.step(&mut world.memory) else { return events };
        world.tier.complete(world.now_ns, id, result, &mut world.memory);
    }
}

pub(crate) fn put<'a>(world: &mut World, key: u64, payload: Span, ack: Ack) -> Put<'a> {
    for at in 0..u64::from(payload.bytes) {
        world.memory.pool[(payload.offset + at) as usize] = (payload.offset + at * 7 + key) as u8;
    }
    let (version, token) = (Version(key + 1), Token(key));
    Put {
        digest: digest(key),
        key: b"a key",
        tenant: super::tenant_of(b"a key"),
        version,
        payload,
        checksum: None,
        pinned: false,
        hits: 0,
        names_parts: false,
        copied: false,
        ack,
        token,
    }
}

pub(crate) fn take(world: &mut World, put: &Put<'_>) -> Result<PutReceipt, PutError> {
    world.tier.put(world.now_ns, put, &mut world.memory)
}
