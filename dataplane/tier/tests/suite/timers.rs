//! Tests of the tier's timer: it never requests a call that has nothing to do.

use crate::support;

use kvplane_tier::{Ack, Action, Output, Span, TierConfig};
use support::calls::put;
use support::small;
use support::world::World;

/// Completes the next operation if `wanted` accepts it; returns its action.
fn next_op(world: &mut World, wanted: fn(Action) -> bool) -> Option<Action> {
    loop {
        match world.tier.poll_output(world.now_ns, &mut world.memory)? {
            Output::Event(_) => {}
            Output::Block(op) if wanted(op.action) => {
                world.tier.complete(world.now_ns, op.id, Ok(op.bytes), &mut world.memory);
                return Some(op.action);
            }
            Output::Block(op) => return Some(op.action),
        }
    }
}

#[test]
fn no_timer_is_due_while_a_flush_is_in_flight() {
    let mut world = World::new(TierConfig { ops_in_flight: [4, 3, 1, 1], ..small(512) }, 1);
    world.until_recovered();
    world.settle();
    let is_write = |action| matches!(action, Action::Write { .. });
    let first = put(&mut world, 1, Span::pool(0, 400), Ack::Durable);
    world.tier.put(world.now_ns, &first, &mut world.memory).expect("room");
    // All writes complete, the flush does not.
    while next_op(&mut world, is_write).expect("a flush comes") != Action::Flush {}
    // Writes completed meanwhile need another flush, after that one.
    let second = put(&mut world, 2, Span::pool(512, 400), Ack::Buffered);
    world.tier.put(world.now_ns, &second, &mut world.memory).expect("room");
    while let Some(action) = next_op(&mut world, is_write) {
        assert_ne!(action, Action::Flush, "a flush is in flight");
    }
    world.now_ns += 10 * world.config.sync_interval_ns;
    assert_eq!(next_op(&mut world, is_write), None);
    let timeout = world.tier.poll_timeout();
    assert!(timeout.is_none_or(|at_ns| at_ns > world.now_ns), "{timeout:?} at {}", world.now_ns);
}
