//! Randomized test: peers that send requests, lie, stall, disconnect and reconnect, in any order.
//!
//! Checked after every step: the store's invariants, and that no range is written while any other party may read or
//! write it. Checked at the end: every put was answered once or its connection closed, and every handle was released.

mod world;

use kvplane_proto::message::Operation;
use proptest::prelude::*;
use world::World;

#[derive(Clone, Debug)]
pub(super) enum Step {
    /// A connection is accepted, with or without a hello.
    Join {
        shared: bool,
        hello: bool,
    },
    /// A well-formed request about a key or a handle that a peer holds.
    Ask {
        peer: usize,
        operation: usize,
        key: u8,
        bytes: u64,
        pick: usize,
    },
    /// A valid header with a meaningless body.
    Garbage {
        peer: usize,
        operation: usize,
        reply: bool,
        items: u32,
        body: Vec<u8>,
        payload_bytes: u64,
        sum: bool,
    },
    /// A payload was received, good or bad.
    PayloadDone {
        peer: usize,
        good: bool,
    },
    /// A reply was sent.
    Sent(usize),
    /// A connection has ended.
    Gone(usize),
    /// Time passes.
    Pass {
        ms: u64,
    },
    /// The map changes.
    Own {
        epoch_back: bool,
        without: u8,
    },
    /// The shard's former incarnation was declared dead.
    NewIncarnation,
    Register {
        at: u64,
        writable: bool,
    },
    Unregister {
        pick: usize,
        evict: bool,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let operation = 0..Operation::ALL.len();
    let any_body = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..100),
        (0..5usize, prop::sample::select(vec![8usize, 16, 24, 32, 48]))
            .prop_map(|(count, bytes)| vec![0; count * bytes]),
    ];
    let ask = (0..5usize, 0..13usize, 0..6u8, prop_oneof![1..600u64, 1..6000u64], 0..64usize)
        .prop_map(|(peer, operation, key, bytes, pick)| Step::Ask { peer, operation, key, bytes, pick });
    let garbage = (
        0..5usize,
        operation,
        prop::bool::weighted(0.1),
        0..5u32,
        any_body,
        prop_oneof![Just(0), 1..9000u64],
        any::<bool>(),
    )
        .prop_map(|(peer, operation, reply, items, body, payload_bytes, sum)| Step::Garbage {
            peer,
            operation,
            reply,
            items,
            body,
            payload_bytes,
            sum,
        });
    let step = prop_oneof![
        6 => (any::<bool>(), prop::bool::weighted(0.9)).prop_map(|(shared, hello)| Step::Join { shared, hello }),
        30 => ask,
        2 => garbage,
        12 => (0..5usize, prop::bool::weighted(0.8)).prop_map(|(peer, good)| Step::PayloadDone { peer, good }),
        8 => (0..64usize).prop_map(Step::Sent),
        2 => (0..5usize).prop_map(Step::Gone),
        2 => (0..20_000u64).prop_map(|ms| Step::Pass { ms }),
        1 => (prop::bool::weighted(0.2), 0..12u8).prop_map(|(epoch_back, without)| Step::Own { epoch_back, without }),
        1 => Just(Step::NewIncarnation),
        6 => (0..3u64, prop::bool::weighted(0.8)).prop_map(|(at, writable)| Step::Register { at, writable }),
        4 => (0..8usize, prop::bool::weighted(0.2)).prop_map(|(pick, evict)| Step::Unregister { pick, evict }),
    ];
    prop::collection::vec(step, 0..150)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn no_handle_is_lost_or_lent_twice(steps in steps()) {
        let mut world = World::new();
        for step in &steps {
            world.play(step);
            world.check();
        }
        world.finish();
    }
}
