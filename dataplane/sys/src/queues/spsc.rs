//! Bounded single-producer single-consumer ring: the queue through which threads send to a shard.
//!
//! Head and tail are monotonic counters that a mask maps to slots. Each side owns one of them and caches the other's,
//! read again only when the cached value means full or empty, so that in a busy ring the two cores seldom access the
//! same cache line (the cached-index refinement of Lamport's queue, as in Lee, Bu and Chandranmenon, "B-Queue" and
//! Rigtorp's `SPSCQueue`).
//!
//! Invariant: the slots from head to tail hold values; only the consumer moves head, only the producer moves tail.
//!
//! The ring never blocks and does not wake its consumer: see [`crate::doorbell`].

use super::sync::{Arc, AtomicBool, AtomicUsize, Ordering, UnsafeCell};
use std::fmt;
use std::mem::MaybeUninit;

/// Largest capacity.
pub const MAX_CAPACITY: usize = 1 << 24;

/// Two cache lines: the adjacent-line prefetcher makes pairs of lines contend.
#[repr(align(128))]
struct CacheAligned<T>(T);

struct RingState<T> {
    head: CacheAligned<AtomicUsize>,
    tail: CacheAligned<AtomicUsize>,
    producer_gone: AtomicBool,
    consumer_gone: AtomicBool,
    capacity: usize,
    slots: Box<[UnsafeCell<MaybeUninit<T>>]>,
}

// SAFETY: a slot is touched by the producer only while it is outside head..tail and by the consumer only while it is
// inside; the release stores and acquire loads of head and tail hand it over. Values move between threads: T is Send.
unsafe impl<T: Send> Sync for RingState<T> {}

impl<T> RingState<T> {
    fn slot(&self, position: usize) -> &UnsafeCell<MaybeUninit<T>> {
        &self.slots[position & (self.slots.len() - 1)]
    }

    fn len(&self) -> usize {
        // Head first: it never passes the tail, so a tail read later is not behind it.
        let head = self.head.0.load(Ordering::Acquire);
        self.tail.0.load(Ordering::Acquire).wrapping_sub(head).min(self.capacity)
    }
}

impl<T> Drop for RingState<T> {
    fn drop(&mut self) {
        // Nobody else has the ring, so these are the last positions that were stored.
        let (mut head, tail) = (self.head.0.load(Ordering::Relaxed), self.tail.0.load(Ordering::Relaxed));
        while head != tail {
            // SAFETY: both sides are gone; the slots from head to tail hold values, each dropped once.
            self.slot(head).with_mut(|slot| unsafe { (*slot).assume_init_drop() });
            head = head.wrapping_add(1);
        }
    }
}

/// Producer of a ring. One thread at a time uses it.
pub struct Producer<T> {
    shared: Arc<RingState<T>>,
    tail: usize,
    seen_head: usize,
}

/// Consumer of a ring. One thread at a time uses it.
pub struct Consumer<T> {
    shared: Arc<RingState<T>>,
    head: usize,
    seen_tail: usize,
}

/// Creates a ring for `capacity` values, 1 to [`MAX_CAPACITY`]; allocates all of its memory.
pub fn channel<T: Send>(capacity: usize) -> (Producer<T>, Consumer<T>) {
    assert!((1..=MAX_CAPACITY).contains(&capacity), "a ring of {capacity} values");
    let slots = capacity.next_power_of_two();
    let shared = Arc::new(RingState {
        head: CacheAligned(AtomicUsize::new(0)),
        tail: CacheAligned(AtomicUsize::new(0)),
        producer_gone: AtomicBool::new(false),
        consumer_gone: AtomicBool::new(false),
        capacity,
        slots: (0..slots).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect(),
    });
    let producer = Producer { shared: Arc::clone(&shared), tail: 0, seen_head: 0 };
    (producer, Consumer { shared, head: 0, seen_tail: 0 })
}

impl<T> Producer<T> {
    /// Appends a value, or returns it if the ring is full.
    pub fn try_push(&mut self, value: T) -> Result<(), T> {
        if self.tail.wrapping_sub(self.seen_head) == self.shared.capacity {
            self.seen_head = self.shared.head.0.load(Ordering::Acquire);
            if self.tail.wrapping_sub(self.seen_head) == self.shared.capacity {
                return Err(value);
            }
        }
        // SAFETY: the slot at the tail is outside head..tail, so the consumer does not touch it, and only we write
        // tails (`&mut self`). It holds no value: the acquire load above saw it taken.
        self.shared.slot(self.tail).with_mut(|slot| unsafe { (*slot).write(value) });
        self.tail = self.tail.wrapping_add(1);
        self.shared.tail.0.store(self.tail, Ordering::Release);
        Ok(())
    }

    /// Returns the number of values in the ring; the consumer may be removing some.
    pub fn len(&self) -> usize {
        self.shared.len()
    }

    /// Returns true if the ring holds no value.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns true if the consumer was dropped: pushed values will not be consumed.
    pub fn peer_gone(&self) -> bool {
        self.shared.consumer_gone.load(Ordering::Acquire)
    }
}

impl<T> Consumer<T> {
    /// Removes the oldest value.
    pub fn try_pop(&mut self) -> Option<T> {
        if self.head == self.seen_tail {
            self.seen_tail = self.shared.tail.0.load(Ordering::Acquire);
            if self.head == self.seen_tail {
                return None;
            }
        }
        // SAFETY: the slot at the head is inside head..tail: the producer wrote it before the tail we acquired, and
        // does not touch it until we move the head. It is read out once.
        let value = self.shared.slot(self.head).with(|slot| unsafe { (*slot).assume_init_read() });
        self.head = self.head.wrapping_add(1);
        self.shared.head.0.store(self.head, Ordering::Release);
        Some(value)
    }

    /// Returns the number of values in the ring; the producer may be adding some.
    pub fn len(&self) -> usize {
        self.shared.len()
    }

    /// Returns true if the ring is empty.
    pub fn is_empty(&self) -> bool {
        self.head == self.seen_tail && self.len() == 0
    }

    /// Returns true if the producer was dropped. Values pushed before can still be popped: check for values after this.
    pub fn peer_gone(&self) -> bool {
        self.shared.producer_gone.load(Ordering::Acquire)
    }
}

impl<T> Drop for Producer<T> {
    fn drop(&mut self) {
        self.shared.producer_gone.store(true, Ordering::Release);
    }
}

impl<T> Drop for Consumer<T> {
    fn drop(&mut self) {
        self.shared.consumer_gone.store(true, Ordering::Release);
        // Values may hold memory or reply channels: they are dropped now, not when the producer ends.
        while self.try_pop().is_some() {}
    }
}

impl<T> fmt::Debug for Producer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Producer({} of {})", self.len(), self.shared.capacity)
    }
}

impl<T> fmt::Debug for Consumer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Consumer({} of {})", self.len(), self.shared.capacity)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::thread;

    /// Every value arrives once and in order, through many wraps of a ring whose capacity is not a power of two. Boxed,
    /// so that a value that is read twice or before it was written is detected (certainly by miri).
    #[test]
    fn two_threads_see_every_value_in_order() {
        let values: u64 = if cfg!(miri) { 300 } else { 200_000 };
        let (mut producer, mut consumer) = channel::<Box<u64>>(5);
        let sender = thread::spawn(move || {
            for value in 0..values {
                let mut value = Box::new(value);
                while let Err(back) = producer.try_push(value) {
                    value = back;
                    thread::yield_now();
                }
            }
        });
        for expected in 0..values {
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
    }

    #[test]
    fn a_full_ring_gives_the_value_back() {
        let (mut producer, mut consumer) = channel(3);
        for value in 0..3 {
            producer.try_push(value).expect("room");
        }
        assert_eq!((producer.try_push(9), producer.len()), (Err(9), 3));
        assert_eq!((consumer.try_pop(), producer.try_push(3)), (Some(0), Ok(())));
        assert_eq!((consumer.len(), consumer.is_empty()), (3, false));
        let rest: Vec<_> = std::iter::from_fn(|| consumer.try_pop()).collect();
        assert_eq!((rest, producer.is_empty()), (vec![1, 2, 3], true));
    }

    #[test]
    fn dropping_the_consumer_frees_what_is_in_the_ring_at_once() {
        let value = Arc::new(());
        let (mut producer, consumer) = channel(4);
        producer.try_push(Arc::clone(&value)).expect("room");
        drop(consumer);
        assert_eq!((Arc::strong_count(&value), producer.peer_gone()), (1, true));
        // This value is not consumed; it is dropped with the ring.
        producer.try_push(Arc::clone(&value)).expect("room");
        drop(producer);
        assert_eq!(Arc::strong_count(&value), 1);
    }
}
