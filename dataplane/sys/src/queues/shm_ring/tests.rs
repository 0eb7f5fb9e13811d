//! Records arrive complete and in order; no write of a peer causes a panic or an access outside the ring.

use super::*;
use crate::region::{HugePages, RegionOptions};
use proptest::prelude::*;

const OFFSET: usize = 4096;

/// A region with guard bytes before and behind the ring.
fn place(capacity: usize) -> Arc<Region> {
    let bytes = OFFSET + bytes_needed(capacity) + OFFSET;
    let options = RegionOptions { huge: HugePages::Never, ..RegionOptions::new("shared ring", bytes) };
    let region = Region::allocate(&options).expect("memory");
    region.fill_with(0, OFFSET, &mut |_, chunk| chunk.fill(0xEE));
    region.fill_with(bytes - OFFSET, OFFSET, &mut |_, chunk| chunk.fill(0xEE));
    region
}

fn guards_hold(region: &Region) -> bool {
    let mut hold = true;
    for start in [0, region.bytes() - OFFSET] {
        region.read_with(start, OFFSET, &mut |_, chunk| hold &= chunk.iter().all(|&b| b == 0xEE));
    }
    hold
}

fn ends(region: &Arc<Region>, capacity: usize) -> (ShmProducer, ShmConsumer) {
    let producer = ShmProducer::new(Arc::clone(region), OFFSET, capacity);
    (producer, ShmConsumer::new(Arc::clone(region), OFFSET, capacity))
}

#[test]
fn the_longest_record_fits_and_one_more_is_full() {
    let region = place(64);
    let (mut producer, mut consumer) = ends(&region, 64);
    let longest = vec![7; producer.max_record_bytes()];
    for _ in 0..10 {
        assert_eq!(producer.push(&[&longest]), Ok(()));
        assert_eq!(producer.push(&[]), Err(Full));
        assert!(!consumer.is_empty());
        let mut out = Vec::new();
        assert_eq!((consumer.pop(&mut out), out == longest), (Ok(true), true));
        assert_eq!((consumer.pop(&mut out), consumer.is_empty()), (Ok(false), true));
    }
    assert!(guards_hold(&region));
}

#[test]
fn a_record_longer_than_the_written_bytes_is_permanent_corruption() {
    let region = place(64);
    let (mut producer, mut consumer) = ends(&region, 64);
    producer.push(&[b"abcd"]).expect("room");
    region.copy_in(OFFSET + HEADER_BYTES, &5u32.to_ne_bytes());
    let mut out = Vec::new();
    let error = consumer.pop(&mut out).expect_err("5 bytes do not fit in one slot of 8");
    assert_eq!(error, CorruptRing { position: 0, found: 5 });
    region.copy_in(OFFSET + HEADER_BYTES, &4u32.to_ne_bytes());
    assert_eq!(consumer.pop(&mut out), Err(error), "no second chance");
}

/// A position further ahead than the ring's capacity would let a record reach past the ring's end.
#[test]
fn a_producer_position_beyond_the_capacity_is_corruption() {
    for (tail, length) in [(72u64, 60u32), (4096, 100), (u64::MAX - 7, 100), (4, 0)] {
        let region = place(64);
        let (_, mut consumer) = ends(&region, 64);
        region.copy_in(OFFSET + HEADER_BYTES, &length.to_ne_bytes());
        region.copy_in(OFFSET + PRODUCER_AT, &tail.to_ne_bytes());
        let error = consumer.pop(&mut Vec::new()).expect_err("more than the ring holds");
        assert_eq!(error, CorruptRing { position: 0, found: tail });
    }
}

proptest! {
    /// Any mix of pushes and pops matches a queue, and the ring is full only when the queue's records fill it.
    #[test]
    fn matches_a_queue(
        steps in proptest::collection::vec(
            proptest::option::of(proptest::collection::vec(any::<u8>(), 0..100)), 0..300,
        ),
        split in 0usize..100,
    ) {
        let capacity = 256;
        let region = place(capacity);
        let (mut producer, mut consumer) = ends(&region, capacity);
        let mut model = std::collections::VecDeque::<Vec<u8>>::new();
        let mut out = Vec::new();
        for step in steps {
            let used: usize = model.iter().map(|record| record_bytes(record.len())).sum();
            match step {
                Some(record) => {
                    let parts = record.split_at(split.min(record.len()));
                    let fits = used + record_bytes(record.len()) <= capacity;
                    let pushed = producer.push(&[parts.0, parts.1]);
                    prop_assert_eq!(pushed.is_ok(), fits);
                    if fits {
                        model.push_back(record);
                    }
                }
                None => match model.pop_front() {
                    Some(record) => {
                        prop_assert_eq!(consumer.pop(&mut out), Ok(true));
                        prop_assert_eq!(&out, &record);
                    }
                    None => prop_assert_eq!(consumer.pop(&mut out), Ok(false)),
                },
            }
        }
        prop_assert!(guards_hold(&region));
    }

    /// Whatever a peer writes over header and data, both ends continue without panic, and bytes outside do not change.
    #[test]
    fn survives_a_hostile_peer(
        scribbles in proptest::collection::vec(
            (prop_oneof![Just(0usize), Just(PRODUCER_AT), 0usize..bytes_needed(64) - 8],
             prop_oneof![0u64..200, any::<u64>()]),
            1..40,
        ),
    ) {
        let region = place(64);
        let (mut producer, mut consumer) = ends(&region, 64);
        let mut out = Vec::new();
        for (at, value) in scribbles {
            producer.push(&[b"some", b"record"]).ok();
            region.copy_in(OFFSET + at, &value.to_ne_bytes());
            let popped = consumer.pop(&mut out);
            prop_assert!(out.len() <= 64, "a record longer than the ring: {popped:?}");
            prop_assert!(producer.tail - producer.seen_head <= 64);
        }
        prop_assert!(guards_hold(&region));
    }
}
