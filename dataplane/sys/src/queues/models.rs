//! Models of the queues for loom: every order of accesses of two threads.
//!
//! Each model is as small as what it shows: a wrap of the ring, a ring that was full, a sleep. `cargo x loom` runs
//! them.

use super::doorbell::Doorbell;
use super::shm_ring::{Full, ShmConsumer, ShmProducer, bytes_needed};
use super::spsc;
use super::sync::Region;
use loom::model::Builder;
use loom::{model, thread};
use std::sync::Arc;

/// Values arrive once and in order through a ring of one slot, which wraps at each of them. Boxed, so that loom and the
/// allocator see a value that is read twice, or not dropped.
#[test]
fn values_arrive_once_and_in_order() {
    model(|| {
        let (mut producer, mut consumer) = spsc::channel::<Box<u32>>(1);
        let sender = thread::spawn(move || {
            for value in 0..2 {
                let mut value = Box::new(value);
                while let Err(back) = producer.try_push(value) {
                    value = back;
                    thread::yield_now();
                }
            }
        });
        for expected in 0..2 {
            let value = loop {
                match consumer.try_pop() {
                    Some(value) => break value,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(*value, expected);
        }
        sender.join().expect("the sender ends");
        assert!(consumer.peer_gone() && consumer.try_pop().is_none());
    });
}

/// A consumer that sees its producer gone finds every value that was pushed before.
#[test]
fn a_producer_that_is_gone_has_left_its_values() {
    model(|| {
        let (mut producer, mut consumer) = spsc::channel(2);
        let sender = thread::spawn(move || producer.try_push(7).expect("room"));
        while !consumer.peer_gone() {
            thread::yield_now();
        }
        assert_eq!(consumer.try_pop(), Some(7));
        sender.join().expect("the sender ends");
    });
}

/// Each value is dropped once, by the consumer that ends or with the ring.
#[test]
fn values_of_a_consumer_that_ends_are_dropped_once() {
    model(|| {
        let value = Arc::new(());
        let (mut producer, consumer) = spsc::channel(2);
        let pushed = [Arc::clone(&value), Arc::clone(&value)];
        let sender = thread::spawn(move || {
            for value in pushed {
                producer.try_push(value).expect("room");
            }
        });
        drop(consumer);
        sender.join().expect("the sender ends");
        assert_eq!(Arc::strong_count(&value), 1);
    });
}

/// An owner that parks whenever its ring is empty receives the value: a lost wakeup would be a deadlock.
#[test]
fn no_wakeup_is_lost() {
    model(|| receive_asleep(1));
}

/// The flag of a doorbell that has rung is set again by the next sleep.
///
/// With more than three preemptions loom reports a deadlock that does not exist. The ringer's `swap` reads the `false`
/// of `awake` and so lies directly behind it; the next `prepare_sleep` stores its `true` behind both, and the ringer's
/// next `load`, after both fences, must see that. loom does not know that nothing lies between a `swap` and what it
/// read: to it the two stores are in no order, and the `load` may see the ringer's own `false`.
#[test]
fn no_second_wakeup_is_lost() {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(|| receive_asleep(2));
}

/// Sends values to an owner that parks whenever its ring is empty.
fn receive_asleep(values: u32) {
    let (mut producer, mut consumer) = spsc::channel(2);
    let bell = Doorbell::new().expect("eventfd");
    let ringer = bell.clone();
    let sender = thread::spawn(move || {
        for value in 0..values {
            producer.try_push(value).expect("room");
            ringer.ring();
        }
    });
    let mut expected = 0;
    while expected < values {
        if let Some(value) = consumer.try_pop() {
            assert_eq!(value, expected);
            expected += 1;
            continue;
        }
        bell.prepare_sleep();
        if consumer.is_empty() {
            bell.wait();
        }
        bell.awake();
        bell.drain();
    }
    sender.join().expect("the sender ends");
}

/// Records arrive whole and in order through a shared ring that is full after one of them.
#[test]
fn records_arrive_whole_and_in_order() {
    const CAPACITY: usize = 8;
    model(|| {
        let region = Arc::new(Region::new(bytes_needed(CAPACITY), &[0, 128], &[]));
        let mut producer = ShmProducer::new(Arc::clone(&region), 0, CAPACITY);
        let mut consumer = ShmConsumer::new(region, 0, CAPACITY);
        let sender = thread::spawn(move || {
            for value in 1..3u8 {
                while producer.push(&[&[value], &[value]]) == Err(Full) {
                    thread::yield_now();
                }
            }
        });
        let mut record = Vec::new();
        for expected in 1..3u8 {
            while !consumer.pop(&mut record).expect("an honest peer") {
                thread::yield_now();
            }
            assert_eq!(record, [expected, expected]);
        }
        sender.join().expect("the sender ends");
        assert!(consumer.is_empty());
    });
}
