//! Progress thread of the engine: drives batches in flight, and connections being established, while no thread waits.
//!
//! It is woken at once for a batch whose owner requested a notification. Otherwise it checks once a millisecond,
//! because most batches are waited for by the thread that submitted them, and a wake-up for each would cost more than
//! the transfer. Some time after the last batch it sleeps until the next one, and checks periodically for peers to
//! close.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use super::Driver;
use crate::batch::State;
use crate::error::Error;

/// Interval of the checks.
const TICK: Duration = Duration::from_millis(1);
/// Checks without anything in flight after which it sleeps.
const IDLE_TICKS: u32 = 20;
/// Longest sleep; bounds the delay of a lost wake-up.
const SLEEP: Duration = Duration::from_secs(10);
/// Longest sleep while device memory of peers is mapped: their memory is not free before it is unmapped here.
const SLEEP_MAPPING: Duration = Duration::from_secs(1);

impl Driver {
    /// Starts the thread, which ends with [`Self::stop`].
    ///
    /// # Errors
    /// When the kernel refuses a thread.
    pub(crate) fn start_progress(self: &Arc<Self>, number: usize) -> Result<JoinHandle<()>, Error> {
        let driver = Arc::clone(self);
        let builder = std::thread::Builder::new().name(format!("kvp-progress-{number}"));
        let body = move || {
            // After a panic, the first poll fails everything in flight, which wakes all waiters.
            let round = || {
                driver.poll();
                driver.progress();
            };
            while std::panic::catch_unwind(std::panic::AssertUnwindSafe(round)).is_err() {
                std::thread::sleep(TICK);
            }
        };
        let thread = builder.spawn(body)?;
        let _ = self.progress.set(thread.thread().clone());
        Ok(thread)
    }

    /// Cancels all batches in flight, waits for them, and ends the thread. No batch may be submitted any more.
    pub(crate) fn stop(&self) {
        self.with(super::Core::cancel_all);
        self.stopping.store(true, Ordering::SeqCst);
        while self.in_flight() > 0 {
            match self.try_core() {
                Some(core) => self.lead(core, false, None, || self.in_flight() == 0),
                None => std::thread::sleep(TICK),
            }
        }
        self.kick();
    }

    /// Lets the progress thread drive this batch until it is complete, because no thread waits for it.
    pub(crate) fn push(&self, state: &State) {
        if state.begin_push() {
            self.pushed.fetch_add(1, Ordering::SeqCst);
            if !self.led.load(Ordering::SeqCst) {
                self.kick();
            }
        }
    }

    /// Makes the thread drive at once.
    pub(super) fn kick(&self) {
        self.kicked.store(true, Ordering::SeqCst);
        self.wake_progress();
    }

    /// Makes the thread check after a tick whether any thread drives.
    pub(super) fn wake_progress(&self) {
        if let Some(thread) = self.progress.get() {
            thread.unpark();
        }
    }

    fn progress(&self) {
        let (mut idle, mut seen, mut departed) = (0, 0, 0);
        while !self.stopping.load(Ordering::SeqCst) {
            // The last batch that referenced a peer may have been another driver's.
            let departures = self.departures.count();
            let is_mapping = self.mapping.load(Ordering::Relaxed);
            if departures != departed || is_mapping && idle == IDLE_TICKS {
                departed = departures;
                self.poll();
            }
            let kicked = self.kicked.swap(false, Ordering::SeqCst);
            let busy = self.is_busy();
            idle = if busy || kicked { 0 } else { idle + 1 };
            let rounds = self.rounds.load(Ordering::Relaxed);
            let lonely = kicked || rounds == seen || self.pushed.load(Ordering::SeqCst) > 0;
            if busy
                && lonely
                && self.foreground.load(Ordering::SeqCst) == 0
                && let Some(core) = self.try_core()
            {
                self.lead(core, true, None, || !self.is_busy() || self.stopping.load(Ordering::SeqCst));
                self.hand_over();
            }
            seen = self.rounds.load(Ordering::Relaxed);
            if idle < IDLE_TICKS {
                std::thread::park_timeout(TICK);
                continue;
            }
            self.asleep.store(true, Ordering::SeqCst);
            // Either this sees the batch, or the submitting thread sees `asleep`.
            if !self.is_busy() && !self.stopping.load(Ordering::SeqCst) {
                std::thread::park_timeout(if is_mapping { SLEEP_MAPPING } else { SLEEP });
            }
            self.asleep.store(false, Ordering::SeqCst);
            idle = if self.is_busy() { 0 } else { IDLE_TICKS };
            // The thread that has just submitted most likely waits itself.
            seen = self.rounds.load(Ordering::Relaxed).wrapping_add(1);
            if idle == 0 && !self.kicked.load(Ordering::SeqCst) {
                std::thread::park_timeout(TICK);
            }
        }
    }
}
