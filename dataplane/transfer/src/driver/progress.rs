//! The engine's own thread: it drives what is in flight, and connections that are on their way, when nobody waits.
//!
//! Where somebody asked to be told, it is woken at once. Else it looks once a millisecond, as most batches are waited
//! for by who submitted them, and a wake-up for each would cost them more than the transfer. Some time after the last
//! batch it sleeps until there is another, and looks from time to time whether there are peers to be left.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use super::Driver;
use crate::batch::State;
use crate::error::Error;

/// How often it looks.
const TICK: Duration = Duration::from_millis(1);
/// Looks without anything in flight after which it sleeps.
const IDLE_TICKS: u32 = 20;
/// The longest sleep: bounds what a lost wake-up could cost.
const SLEEP: Duration = Duration::from_secs(10);

impl Driver {
    /// Starts the thread. It ends with [`Self::stop`].
    ///
    /// # Errors
    /// When the kernel gives no thread.
    pub(crate) fn start_progress(self: &Arc<Self>, number: usize) -> Result<JoinHandle<()>, Error> {
        let driver = Arc::clone(self);
        let builder = std::thread::Builder::new().name(format!("kvp-progress-{number}"));
        let body = move || {
            // After a panic the first thing it does is to end what was in flight, for those who wait.
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

    /// Withdraws all batches in flight, waits for them, and ends the thread. No batch may be submitted any more.
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

    /// Nobody waits for this batch: moves it on until it is done.
    pub(crate) fn push(&self, state: &State) {
        if state.begin_push() {
            self.pushed.fetch_add(1, Ordering::SeqCst);
            if !self.led.load(Ordering::SeqCst) {
                self.kick();
            }
        }
    }

    /// Has the thread drive at once.
    pub(super) fn kick(&self) {
        self.kicked.store(true, Ordering::SeqCst);
        self.wake_progress();
    }

    /// Has the thread look whether somebody drives, after a tick.
    pub(super) fn wake_progress(&self) {
        if let Some(thread) = self.progress.get() {
            thread.unpark();
        }
    }

    fn progress(&self) {
        let (mut idle, mut seen, mut departed) = (0, 0, 0);
        while !self.stopping.load(Ordering::SeqCst) {
            // The last batch that held a peer may have been another driver's.
            let departures = self.departures.count();
            if departures != departed {
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
            // Either this sees the batch, or who submits it sees that we sleep.
            if !self.is_busy() && !self.stopping.load(Ordering::SeqCst) {
                std::thread::park_timeout(SLEEP);
            }
            self.asleep.store(false, Ordering::SeqCst);
            idle = if self.is_busy() { 0 } else { IDLE_TICKS };
            // Who has just submitted most likely waits himself.
            seen = self.rounds.load(Ordering::Relaxed).wrapping_add(1);
            if idle == 0 && !self.kicked.load(Ordering::SeqCst) {
                std::thread::park_timeout(TICK);
            }
        }
    }
}
