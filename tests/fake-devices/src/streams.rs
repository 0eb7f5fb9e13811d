//! Streams: a thread each, which does the operations in order.

use crate::memory::copy_bytes;
use crate::state::{ILLEGAL_ADDRESS, SUCCESS, state};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Operation of a stream.
pub(crate) enum Operation {
    /// Copy of bytes; either side is device memory or the host's.
    Copy { to: u64, from: u64, bytes: u64 },
    /// Kernel that fills device memory with a pattern of its addresses after a delay.
    Fill { to: u64, bytes: u64, seed: u64, delay: Duration },
    /// Point of an event.
    Record(Arc<Event>, u64),
    /// Wait for a point of another stream.
    Wait(Arc<Event>, u64),
    /// End of the stream.
    End,
}

/// Event: its points in streams of one device.
#[derive(Debug)]
pub(crate) struct Event {
    /// Device of the context in which it was created.
    device: usize,
    points: Mutex<Points>,
    reached: Condvar,
}

/// Points of an event.
#[derive(Debug, Default)]
struct Points {
    /// Number of the last recorded one.
    recorded: u64,
    /// Number of the last reached one.
    reached: u64,
    /// Time at which the last one is done on a modelled copy engine.
    due: Option<Instant>,
}

impl Event {
    /// Creates an event without points.
    pub(crate) fn new(device: usize) -> Self {
        Self { device, points: Mutex::default(), reached: Condvar::new() }
    }

    /// Returns its device.
    pub(crate) const fn device(&self) -> usize {
        self.device
    }

    fn points(&self) -> MutexGuard<'_, Points> {
        self.points.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a point.
    pub(crate) fn begin(&self) -> u64 {
        let mut points = self.points();
        points.recorded += 1;
        points.due = None;
        points.recorded
    }

    /// Records a point that is done at this time.
    pub(crate) fn record_due(&self, due: Instant) {
        let mut points = self.points();
        points.recorded += 1;
        points.reached = points.recorded;
        points.due = Some(due);
    }

    fn reach(&self, point: u64) {
        let mut points = self.points();
        points.reached = points.reached.max(point);
        drop(points);
        self.reached.notify_all();
    }

    /// Returns the last recorded point.
    pub(crate) fn last(&self) -> u64 {
        self.points().recorded
    }

    /// Returns the time at which the last point is done on a modelled copy engine.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.points().due
    }

    /// Returns true if the last recorded point is reached.
    pub(crate) fn is_done(&self) -> bool {
        let points = self.points();
        points.reached >= points.recorded && points.due.is_none_or(|due| due <= Instant::now())
    }

    pub(crate) fn wait(&self, point: u64) {
        let mut points = self.points();
        while points.reached < point {
            points = self.reached.wait(points).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Queue of operations and the device that they are done on.
pub(crate) struct Stream {
    device: usize,
    queue: Mutex<VecDeque<Operation>>,
    filled: Condvar,
    /// Time at which its copies on modelled engines are done.
    due: Mutex<Option<Instant>>,
}

impl Stream {
    /// Creates a stream with its thread.
    pub(crate) fn new(device: usize, number: u64) -> Arc<Self> {
        let stream = Arc::new(Self { device, queue: Mutex::default(), filled: Condvar::new(), due: Mutex::default() });
        let worker = Arc::clone(&stream);
        let name = format!("fake-devices {number}");
        thread::Builder::new().name(name).spawn(move || worker.work(number)).expect("starts a thread");
        stream
    }

    /// Returns its device.
    pub(crate) const fn device(&self) -> usize {
        self.device
    }

    /// Returns the time at which what was enqueued so far is done on modelled engines: now, if it is done.
    pub(crate) fn due(&self) -> Instant {
        let due = *self.due.lock().unwrap_or_else(PoisonError::into_inner);
        due.unwrap_or_else(Instant::now).max(Instant::now())
    }

    /// Sets that time, if it is later than before.
    pub(crate) fn extend(&self, until: Instant) {
        let mut due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
        *due = Some(due.map_or(until, |due| due.max(until)));
    }

    /// Enqueues an operation.
    pub(crate) fn push(&self, operation: Operation) {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner).push_back(operation);
        self.filled.notify_one();
    }

    fn pop(&self) -> Operation {
        let mut queue = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(operation) = queue.pop_front() {
                return operation;
            }
            queue = self.filled.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn work(&self, number: u64) {
        let mut random = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        loop {
            match self.pop() {
                Operation::Copy { to, from, bytes } => {
                    let settings = state().settings;
                    random = next(random ^ settings.seed);
                    let started = Instant::now();
                    if settings.delay_ns > 0 {
                        thread::sleep(Duration::from_nanos(random % settings.delay_ns));
                    }
                    if settings.rate > 0 {
                        let takes = Duration::from_nanos(
                            (u128::from(bytes) * 1_000_000_000 / u128::from(settings.rate)) as u64,
                        );
                        thread::sleep(takes.saturating_sub(started.elapsed()));
                    }
                    self.copy(to, from, bytes);
                }
                Operation::Fill { to, bytes, seed, delay } => {
                    thread::sleep(delay);
                    self.fill(to, bytes, seed);
                }
                Operation::Record(event, point) => event.reach(point),
                Operation::Wait(event, point) => event.wait(point),
                Operation::End => return,
            }
        }
    }

    /// Does a copy. A side that is not allocated any more loses the device.
    fn copy(&self, to: u64, from: u64, bytes: u64) {
        let mut state = state();
        if state.lost[self.device] != SUCCESS {
            return;
        }
        let side = |address: u64| match state.memory.is_device(address) {
            true => state.memory.alias(address, bytes).map(|(at, allocation)| (at, Some(allocation))),
            false => Some((address as *mut u8, None)),
        };
        let (Some((to_bytes, to_memory)), Some((from_bytes, from_memory))) = (side(to), side(from)) else {
            state.lost[self.device] = ILLEGAL_ADDRESS;
            return;
        };
        let is_unpinned = |address: u64| !state.memory.is_device(address) && !state.is_pinned(address, bytes);
        let unpinned = u64::from(is_unpinned(to) || is_unpinned(from));
        state.unpinned += unpinned;
        state.copied_bytes += bytes;
        drop(state);
        // SAFETY: device memory is mapped by the allocations that are held; host memory by the caller's contract.
        unsafe { copy_bytes(to_bytes, from_bytes, bytes as usize) };
        drop((to_memory, from_memory));
    }

    fn fill(&self, to: u64, bytes: u64, seed: u64) {
        let mut state = state();
        let Some((alias, _allocation)) = state.memory.alias(to, bytes) else {
            state.lost[self.device] = ILLEGAL_ADDRESS;
            return;
        };
        drop(state);
        for offset in 0..bytes {
            // SAFETY: inside the allocation, which is held.
            unsafe { alias.wrapping_add(offset as usize).write(pattern(seed, offset)) };
        }
    }
}

/// Returns the byte at an offset of the pattern that the fake kernel writes.
pub(crate) const fn pattern(seed: u64, offset: u64) -> u8 {
    (next(seed ^ (offset / 8)) >> (offset % 8 * 8)) as u8
}

/// Returns the next number of a xorshift generator, mixed.
const fn next(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
