//! Tests of tombstones of replacements that are written late, or not at all, beside removals and other replacements.

use crate::support;

use kvplane_proto::ids::Version;
use kvplane_tier::{Ack, Action, Event, Fault, OpId, Output, Put, Removal, Span, Token};
use support::calls::{digest, put, settle, take, world};
use support::small;
use support::world::World;

/// Returns the writes that are submitted once a group has waited long enough; none of them is carried out.
fn ops(world: &mut World) -> Vec<OpId> {
    world.now_ns += world.config.group_delay_ns;
    let mut ops = Vec::new();
    while let Some(output) = world.tier.poll_output(world.now_ns, &mut world.memory) {
        if let Output::Block(op) = output {
            assert!(matches!(op.action, Action::Write { .. }), "{op:?}");
            ops.push(op.id);
        }
    }
    ops
}

/// Removes an object by the tombstone of a replacement; returns the write of the tombstone.
fn struck_out(world: &mut World) -> OpId {
    let one = put(world, 1, Span::pool(0, 400), Ack::Durable);
    take(world, &one).expect("room");
    settle(world);
    let replaced = world.tier.remove_replaced(world.now_ns, digest(1), Ack::Buffered, Token(6), &mut world.memory);
    assert_eq!((replaced, world.tier.locate(digest(1))), (Ok(Removal::Pending), None));
    assert!(world.tier.may_find(digest(1)), "its tombstone may fail");
    let ops = ops(world);
    assert_eq!(ops.len(), 1, "one group");
    ops[0]
}

fn complete(world: &mut World, op: OpId, result: Result<u32, Fault>) {
    world.tier.complete(world.now_ns, op, result, &mut world.memory);
}

#[test]
fn an_object_removed_during_its_replacement_is_not_restored() {
    let mut world = world(small(512));
    let replacement = struck_out(&mut world);
    let removal = world.tier.remove(world.now_ns, digest(1), Ack::Buffered, Token(7), &mut world.memory);
    assert_eq!(removal, Ok(Removal::Pending), "the tombstone in flight may fail");
    world.now_ns += world.config.group_delay_ns;
    // The later write completes first.
    let events = settle(&mut world);
    assert!(events.contains(&Event::Removed { token: Token(7) }), "{events:?}");
    complete(&mut world, replacement, Err(Fault::Io));
    let events = settle(&mut world);
    assert!(events.contains(&Event::RemoveFailed { token: Token(6), fault: Fault::Io }), "{events:?}");
    assert_eq!(world.tier.locate(digest(1)), None, "it was removed");
    world.tier.check();
}

#[test]
fn a_failed_replacement_restores_no_object_that_a_later_one_removed() {
    for is_first_over_first in [true, false] {
        let mut world = world(small(512));
        let first = struck_out(&mut world);
        let second = world.tier.remove_replaced(world.now_ns, digest(1), Ack::Buffered, Token(7), &mut world.memory);
        assert_eq!(second, Ok(Removal::Pending));
        world.now_ns += world.config.group_delay_ns;
        if is_first_over_first {
            complete(&mut world, first, Err(Fault::Io));
            assert_eq!(world.tier.locate(digest(1)), None, "the second may be written");
            settle(&mut world);
        } else {
            settle(&mut world);
            complete(&mut world, first, Err(Fault::Io));
        }
        assert_eq!(world.tier.locate(digest(1)), None, "the second is written");
        world.tier.check();
    }
}

#[test]
fn a_replaced_object_is_restored_if_tombstone_and_replacement_fail() {
    let mut world = world(small(512));
    let replacement = struck_out(&mut world);
    let new = Put { version: Version(9), ..put(&mut world, 1, Span::pool(0, 400), Ack::Buffered) };
    take(&mut world, &new).expect("room");
    let record = ops(&mut world);
    complete(&mut world, replacement, Err(Fault::Io));
    assert_eq!(world.tier.locate(digest(1)).map(|view| view.version), Some(Version(9)));
    record.into_iter().for_each(|op| complete(&mut world, op, Err(Fault::Io)));
    assert_eq!(world.tier.locate(digest(1)).map(|view| view.version), Some(Version(2)), "the former one");
    settle(&mut world);
    world.tier.check();
}
