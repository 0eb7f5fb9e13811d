//! Driver of an initiator, by leader and followers: a waiting thread drives the I/O of all threads; the engine's
//! progress thread drives it while no thread waits.
//!
//! The initiator is behind a lock. A thread that waits for a batch and gets the lock *leads*: it runs rounds until its
//! batch is complete, and completes the batches of other threads on the way. Threads that wait meanwhile *follow*: they
//! sleep until their batch is complete or the leader leaves, which wakes one of them to lead. A thread that submits
//! while another leads puts its batch into the inbox and returns.
//!
//! A panic of a thread that holds the lock leaves no thread waiting: the next thread that takes the lock finds it
//! poisoned, drops the initiator, and fails everything in flight with an error that names the panic. Nothing can be
//! submitted afterwards.
//!
//! Invariant: every inbox entry and every batch in flight has a thread that drives it. A thread that releases the lock
//! checks the inbox again afterwards, and then wakes a follower.

pub(crate) mod copies;
mod core;
pub(crate) mod initiators;
mod progress;
#[cfg(test)]
mod tests;

use self::copies::Copies;
pub(crate) use self::core::Core;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use kvplane_client::{Request, SubmitOptions};
use kvplane_engine::{Doorbell, Initiator, Pacing, Region, cpu};
use kvplane_proto::{Limits, Status};
use kvplane_sys::device::{DeviceError, DeviceMemory, StreamHandle};
use kvplane_ticket::Credential;

use crate::batch::State;
use crate::config::TransferEngineConfig;
use crate::error::{Error, LimitError};
use crate::lock;
use crate::segment::peers::Departures;

/// Iterations of a follower's spin loop between two readings of the clock.
const FOLLOWER_SPINS: u32 = 64;
/// Longest sleep; bounds the delay of a lost wake-up.
const SLEEP_LONGEST: Duration = Duration::from_millis(100);

/// Requests of a batch to the initiator.
pub(crate) struct Work {
    /// Requests whose peer ids are positions among the batch's peers, [`State::remotes`].
    pub(crate) requests: Vec<Request>,
    pub(crate) options: SubmitOptions,
    /// Stream of the caller that copies from and to devices wait for.
    pub(crate) stream: Option<StreamHandle>,
}

enum Command {
    Submit(Arc<State>, Work),
    Cancel(Arc<State>),
}

/// Initiator, and the threads that take turns in driving it.
pub(crate) struct Driver {
    core: Mutex<Core>,
    inbox: Mutex<Vec<Command>>,
    inbox_filled: AtomicBool,
    /// Wakes a parked leader.
    doorbell: Doorbell,
    in_flight: AtomicUsize,
    /// True while connections are being established that no batch waits for: rails recover that way.
    connecting: AtomicBool,
    /// True while device memory of peers is mapped, which ends when they unregister it.
    mapping: AtomicBool,
    open_slices: AtomicUsize,
    most_in_flight: usize,
    /// Number of threads that wait for a batch, leading or following.
    foreground: AtomicUsize,
    /// Number of threads that want the lock for a short operation that cannot go through the inbox.
    wanted: AtomicUsize,
    led: AtomicBool,
    led_by_progress: AtomicBool,
    /// Rounds that threads of the caller have driven.
    rounds: AtomicU64,
    followers: Mutex<VecDeque<Thread>>,
    following: AtomicUsize,
    /// Number of batches in flight that no thread waits for, as declared by their owners.
    pushed: AtomicIsize,
    progress: OnceLock<Thread>,
    kicked: AtomicBool,
    asleep: AtomicBool,
    stopping: AtomicBool,
    departures: Departures,
    /// Reason why no batch can be submitted any more.
    broken: OnceLock<String>,
    /// Spin time of a follower before it sleeps. A leader that leads again at once would otherwise complete thousands
    /// of batches while a follower wakes for one.
    patience: Duration,
    /// Copies within this process by the driver's threads.
    pub(crate) copies: Copies,
}

impl Driver {
    /// # Errors
    /// When the kernel refuses a descriptor.
    pub(crate) fn new(
        mut initiator: Initiator,
        config: &TransferEngineConfig,
        departures: Departures,
    ) -> Result<Arc<Self>, Error> {
        let patience = match config.pacing {
            Pacing::Spin => Duration::MAX,
            Pacing::Adaptive { window_ns } => Duration::from_nanos(window_ns),
            Pacing::Park => Duration::ZERO,
        };
        let doorbell = Doorbell::new()?;
        initiator.watch(doorbell.clone())?;
        Ok(Arc::new(Self {
            core: Mutex::new(Core::new(initiator, departures.clone())),
            inbox: Mutex::new(Vec::new()),
            inbox_filled: AtomicBool::new(false),
            doorbell,
            in_flight: AtomicUsize::new(0),
            connecting: AtomicBool::new(false),
            mapping: AtomicBool::new(false),
            open_slices: AtomicUsize::new(0),
            most_in_flight: config.batches,
            foreground: AtomicUsize::new(0),
            wanted: AtomicUsize::new(0),
            led: AtomicBool::new(false),
            led_by_progress: AtomicBool::new(false),
            rounds: AtomicU64::new(0),
            followers: Mutex::new(VecDeque::new()),
            following: AtomicUsize::new(0),
            pushed: AtomicIsize::new(0),
            progress: OnceLock::new(),
            kicked: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            departures,
            broken: OnceLock::new(),
            patience,
            copies: Copies::new(config.slow_ns()),
        }))
    }

    /// Reserves capacity for a batch of this many slices, which is released when the batch is complete.
    ///
    /// # Errors
    /// When the limits of batches or slices in flight are reached, or the driver is broken.
    pub(crate) fn admit(&self, slices: usize) -> Result<(), Error> {
        if let Some(why) = self.broken.get() {
            let (what, cause) = ("submit a batch".to_owned(), Some(why.clone()));
            return Err(Error::Status { what, status: Status::Unreachable, cause });
        }
        let batches = self.in_flight.fetch_add(1, Ordering::SeqCst);
        let open = self.open_slices.fetch_add(slices, Ordering::Relaxed);
        if batches < self.most_in_flight && open.saturating_add(slices) <= Limits::OPEN_SLICES {
            return Ok(());
        }
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
        self.open_slices.fetch_sub(slices, Ordering::Relaxed);
        let most_batches = self.most_in_flight;
        Err(LimitError::InFlight { batches, most_batches, slices: open, further_slices: slices }.into())
    }

    /// Starts an admitted batch. Posts its I/O at once, unless another thread holds the lock.
    pub(crate) fn submit(&self, state: &Arc<State>, work: Work) {
        let _alarm = Alarm(self);
        match self.try_core() {
            Some(mut core) => {
                self.drain(&mut core);
                core.begin(self, state, work);
                core.post(self);
                self.rounds.fetch_add(1, Ordering::Relaxed);
                self.release(core);
            }
            None => self.leave_for_leader(Command::Submit(Arc::clone(state), work)),
        }
        if state.is_background() {
            self.push(state);
        }
        self.hand_over();
    }

    pub(crate) fn cancel(&self, state: &Arc<State>) {
        let _alarm = Alarm(self);
        match self.try_core() {
            Some(mut core) => {
                self.drain(&mut core);
                core.cancel(state);
                core.post(self);
                self.release(core);
            }
            None => self.leave_for_leader(Command::Cancel(Arc::clone(state))),
        }
    }

    fn leave_for_leader(&self, command: Command) {
        let mut inbox = lock(&self.inbox);
        inbox.push(command);
        self.inbox_filled.store(true, Ordering::SeqCst);
        drop(inbox);
        self.doorbell.ring();
        // The leader may have checked the inbox for the last time before that.
        if let Some(core) = self.try_core() {
            self.release(core);
        }
    }

    fn drain(&self, core: &mut Core) {
        while self.inbox_filled.load(Ordering::SeqCst) {
            self.empty_inbox(core);
            core.obey(self);
        }
    }

    fn empty_inbox(&self, core: &mut Core) {
        let mut inbox = lock(&self.inbox);
        self.inbox_filled.store(false, Ordering::SeqCst);
        core.todo.extend(inbox.drain(..));
    }

    /// Drives I/O without waiting, unless another thread does.
    pub(crate) fn poll(&self) {
        let _alarm = Alarm(self);
        if let Some(mut core) = self.try_core() {
            self.drain(&mut core);
            core.post(self);
            self.rounds.fetch_add(1, Ordering::Relaxed);
            self.release(core);
        }
    }

    /// Runs a short operation on the initiator; the leader yields the lock for it.
    pub(crate) fn with<R>(&self, act: impl FnOnce(&mut Core) -> R) -> R {
        let _alarm = Alarm(self);
        self.wanted.fetch_add(1, Ordering::SeqCst);
        self.doorbell.ring();
        let core = self.core.lock();
        self.wanted.fetch_sub(1, Ordering::SeqCst);
        let mut core = core.unwrap_or_else(|poisoned| self.bury(poisoned.into_inner()));
        self.drain(&mut core);
        let result = act(&mut core);
        self.release(core);
        result
    }

    pub(crate) fn set_buffer(&self, index: u32, region: &Arc<Region>, location: &str) {
        self.with(|core| core.set_buffer(index, region, location));
    }

    pub(crate) fn set_device_buffer(&self, index: u32, memory: &Arc<DeviceMemory>) -> Result<(), DeviceError> {
        self.with(|core| core.set_device_buffer(index, memory))
    }

    pub(crate) fn set_credential(&self, credential: &Arc<Credential>) {
        self.with(|core| core.set_credential(credential));
    }

    pub(crate) fn remove_buffer(&self, index: u32) {
        self.with(|core| core.remove_buffer(index));
    }

    fn try_core(&self) -> Option<MutexGuard<'_, Core>> {
        match self.core.try_lock() {
            Ok(core) => Some(core),
            Err(TryLockError::Poisoned(poisoned)) => Some(self.bury(poisoned.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Handles a panic under the lock: the inconsistent state is discarded, and everything in flight fails.
    fn bury<'a>(&self, mut core: MutexGuard<'a, Core>) -> MutexGuard<'a, Core> {
        self.core.clear_poison();
        self.empty_inbox(&mut core);
        core.fail(self, "a thread panicked while it drove transfers: stop the engine and start another");
        core
    }

    /// Releases the lock, and leaves nothing behind in the inbox.
    fn release(&self, core: MutexGuard<'_, Core>) {
        drop(core);
        fence(Ordering::SeqCst);
        while self.inbox_filled.load(Ordering::SeqCst) {
            // The thread that holds the lock now checks the inbox in turn.
            let Some(mut core) = self.try_core() else { return };
            self.drain(&mut core);
            core.post(self);
            drop(core);
            fence(Ordering::SeqCst);
        }
    }

    /// Waits until a batch is complete; returns false at `until`.
    pub(crate) fn wait(&self, state: &State, until: Option<Instant>) -> bool {
        if state.is_done() {
            return true;
        }
        let foreground = Foreground::enter(self);
        if self.led_by_progress.load(Ordering::SeqCst) {
            self.doorbell.ring();
        }
        let done = loop {
            if state.is_done() {
                break true;
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                break false;
            }
            if self.wanted.load(Ordering::SeqCst) > 0 {
                std::thread::yield_now();
            } else if let Some(core) = self.try_core() {
                self.lead(core, false, until, || state.is_done());
            } else {
                self.follow(state, until);
            }
        };
        drop(foreground);
        self.hand_over();
        done
    }

    /// Runs rounds until `enough`, or until a thread with precedence wants the lock.
    fn lead(&self, mut core: MutexGuard<'_, Core>, progress: bool, until: Option<Instant>, enough: impl Fn() -> bool) {
        let led = LeaderGuard::begin(self, progress);
        let give_way =
            || self.wanted.load(Ordering::SeqCst) > 0 || progress && self.foreground.load(Ordering::SeqCst) > 0;
        loop {
            self.drain(&mut core);
            let left = until.map_or(SLEEP_LONGEST, |until| until.saturating_duration_since(Instant::now()));
            if enough() || give_way() || left.is_zero() {
                break;
            }
            core.round(self, left, || self.inbox_filled.load(Ordering::SeqCst) || give_way());
            self.rounds.fetch_add(1, Ordering::Relaxed);
        }
        drop(led);
        self.release(core);
    }

    /// Sleeps until the batch is complete, or there may be no leader.
    fn follow(&self, state: &State, until: Option<Instant>) {
        if self.look_on(state, until) {
            return;
        }
        let me = std::thread::current();
        lock(&self.followers).push_back(me.clone());
        self.following.fetch_add(1, Ordering::SeqCst);
        if state.watch_thread(me.clone()) {
            // The former holder of the lock may have left without seeing this follower; the present one will see it.
            match self.try_core() {
                Some(core) => self.release(core),
                None => {
                    let left = until.map_or(SLEEP_LONGEST, |until| until.saturating_duration_since(Instant::now()));
                    std::thread::park_timeout(left.min(SLEEP_LONGEST));
                }
            }
        }
        self.following.fetch_sub(1, Ordering::SeqCst);
        lock(&self.followers).retain(|other| other.id() != me.id());
        state.unwatch_thread(&me);
    }

    /// Spins while another thread leads. Returns true if there is no need to sleep.
    fn look_on(&self, state: &State, until: Option<Instant>) -> bool {
        let start = Instant::now();
        loop {
            for _ in 0..FOLLOWER_SPINS {
                if state.is_done() {
                    return true;
                }
                if !self.led.load(Ordering::Relaxed) {
                    // The lock is free, or held for a moment.
                    std::thread::yield_now();
                    return !self.patience.is_zero();
                }
                cpu::pause();
            }
            let now = Instant::now();
            if until.is_some_and(|until| now >= until) {
                return true;
            }
            if now.duration_since(start) >= self.patience {
                return false;
            }
        }
    }

    /// Returns true if a thread has to drive the initiator.
    fn is_busy(&self) -> bool {
        self.in_flight.load(Ordering::SeqCst) > 0 || self.connecting.load(Ordering::Relaxed)
    }

    /// Wakes a thread to lead if there is no leader and something is in flight.
    fn hand_over(&self) {
        fence(Ordering::SeqCst);
        if !self.is_busy() || self.led.load(Ordering::SeqCst) {
            return;
        }
        if self.following.load(Ordering::SeqCst) > 0
            && let Some(next) = lock(&self.followers).pop_front()
        {
            next.unpark();
        } else if self.pushed.load(Ordering::SeqCst) > 0 {
            self.kick();
        } else if self.asleep.load(Ordering::SeqCst) {
            self.wake_progress();
        }
    }

    /// Completes a batch: nothing accesses its memory any more.
    fn done(&self, state: &State, problem: Option<&str>) {
        self.open_slices.fetch_sub(state.slices, Ordering::Relaxed);
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
        if state.end_push() {
            self.pushed.fetch_sub(1, Ordering::SeqCst);
        }
        state.finish(problem);
    }

    /// Returns the number of batches in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::SeqCst)
    }
}

/// Marks the driver as led, and resets the mark when dropped, also in a panic.
struct LeaderGuard<'a>(&'a Driver);

impl<'a> LeaderGuard<'a> {
    fn begin(driver: &'a Driver, progress: bool) -> Self {
        driver.led.store(true, Ordering::SeqCst);
        driver.led_by_progress.store(progress, Ordering::SeqCst);
        Self(driver)
    }
}

impl Drop for LeaderGuard<'_> {
    fn drop(&mut self) {
        self.0.led_by_progress.store(false, Ordering::SeqCst);
        self.0.led.store(false, Ordering::SeqCst);
    }
}

/// Counts a waiting thread, and removes it when dropped, also in a panic.
struct Foreground<'a>(&'a Driver);

impl<'a> Foreground<'a> {
    fn enter(driver: &'a Driver) -> Self {
        driver.foreground.fetch_add(1, Ordering::SeqCst);
        Self(driver)
    }
}

impl Drop for Foreground<'_> {
    fn drop(&mut self) {
        self.0.foreground.fetch_sub(1, Ordering::SeqCst);
        drop(Alarm(self.0));
    }
}

/// Wakes, in a panic of the thread, all threads that have to find the lock poisoned and handle it. Created before the
/// lock is taken, so that the lock is free again by then.
struct Alarm<'a>(&'a Driver);

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            lock(&self.0.followers).iter().for_each(Thread::unpark);
            self.0.kick();
        }
    }
}
