//! Who drives an initiator: whichever thread waits, for everybody; the engine's own thread when nobody does.
//!
//! The initiator is behind a lock. A thread that waits for a batch and gets the lock *leads*: it runs rounds until its
//! batch is done, and completes the batches of others on the way. Threads that wait meanwhile *follow*: they sleep
//! until their batch is done or the leader leaves, which wakes one of them to lead. A thread that submits while
//! another leads leaves its batch in the inbox and goes on.
//!
//! A panic of a thread that has the lock leaves nobody waiting: whoever takes the lock next finds it poisoned, lets go
//! of the initiator, and ends what was in flight with an error that says so. Nothing can be submitted afterwards.
//!
//! Invariant: no inbox entry and no batch in flight is left without somebody who looks after it. Whoever gives the lock
//! back looks at the inbox again afterwards, and then for a follower.

mod core;
mod progress;
#[cfg(test)]
mod tests;

pub(crate) use self::core::Core;

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicIsize, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, TryLockError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use kvplane_client::{Request, SubmitOptions};
use kvplane_engine::{Doorbell, Initiator, Pacing, Region, cpu};
use kvplane_proto::{Limits, Status};
use kvplane_ticket::Credential;

use crate::batch::State;
use crate::config::TransferEngineConfig;
use crate::error::Error;
use crate::lock;
use crate::memory::copies::Copies;
use crate::segment::peers::Departures;

/// Looks at a leader that may be about to leave, between two looks at the clock.
const FOLLOWER_SPINS: u32 = 64;
/// The longest sleep: bounds what a lost wake-up could cost.
const SLEEP_LONGEST: Duration = Duration::from_millis(100);

/// What a batch asks of the initiator.
pub(crate) struct Work {
    /// Their peers are positions among those of the batch, [`State::remotes`].
    pub(crate) requests: Vec<Request>,
    pub(crate) options: SubmitOptions,
}

enum Command {
    Submit(Arc<State>, Work),
    Cancel(Arc<State>),
}

/// An initiator and those who take turns in driving it.
pub(crate) struct Driver {
    core: Mutex<Core>,
    inbox: Mutex<Vec<Command>>,
    inbox_filled: AtomicBool,
    /// Wakes a parked leader.
    doorbell: Doorbell,
    in_flight: AtomicUsize,
    /// Connections are on their way, for which no batch may wait: rails that were gone come back so.
    connecting: AtomicBool,
    open_slices: AtomicUsize,
    most_in_flight: usize,
    /// Threads that wait for a batch, leading or following.
    foreground: AtomicUsize,
    /// Threads that want the lock for something short that cannot be left in the inbox.
    wanted: AtomicUsize,
    led: AtomicBool,
    led_by_progress: AtomicBool,
    /// Times that a thread of the caller's moved something on.
    rounds: AtomicU64,
    followers: Mutex<VecDeque<Thread>>,
    following: AtomicUsize,
    /// Batches in flight for which nobody waits, by their owners' word.
    pushed: AtomicIsize,
    progress: OnceLock<Thread>,
    kicked: AtomicBool,
    asleep: AtomicBool,
    stopping: AtomicBool,
    departures: Departures,
    /// Why nothing can be submitted any more.
    broken: OnceLock<String>,
    /// How long a follower looks on before it sleeps. A leader that comes back at once would otherwise do thousands of
    /// batches while a follower wakes for one.
    patience: Duration,
    /// What its threads copied within this process.
    pub(crate) copies: Copies,
}

impl Driver {
    /// # Errors
    /// When the kernel gives no descriptor.
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

    /// Takes a place for a batch of this many slices; it is given back when the batch is done.
    ///
    /// # Errors
    /// When as many are in flight as may be, or nothing can be asked any more.
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
        Err(Error::TooManyRequests(format!(
            "{batches} batches with {open} slices are in flight, and {slices} slices more would be over the limits of \
             {} and {}: wait for some to be done",
            self.most_in_flight,
            Limits::OPEN_SLICES
        )))
    }

    /// Starts a batch that was admitted. Posts its I/O at once, unless another thread is at it.
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
        // The leader may have looked for the last time before that.
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

    /// Moves I/O on without waiting, if nobody else does.
    pub(crate) fn poll(&self) {
        let _alarm = Alarm(self);
        if let Some(mut core) = self.try_core() {
            self.drain(&mut core);
            core.post(self);
            self.rounds.fetch_add(1, Ordering::Relaxed);
            self.release(core);
        }
    }

    /// Does something to the initiator that is over soon; waits for the leader to make room.
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

    /// A thread panicked while it had the lock: what it left half done is not looked at, all ends.
    fn bury<'a>(&self, mut core: MutexGuard<'a, Core>) -> MutexGuard<'a, Core> {
        self.core.clear_poison();
        self.empty_inbox(&mut core);
        core.fail(self, "a thread panicked while it moved transfers on: end the engine and start another");
        core
    }

    /// Gives the lock back, and leaves nothing behind in the inbox.
    fn release(&self, core: MutexGuard<'_, Core>) {
        drop(core);
        fence(Ordering::SeqCst);
        while self.inbox_filled.load(Ordering::SeqCst) {
            // Whoever has it now looks after it in turn.
            let Some(mut core) = self.try_core() else { return };
            self.drain(&mut core);
            core.post(self);
            drop(core);
            fence(Ordering::SeqCst);
        }
    }

    /// Waits until a batch is done; false when `until` was first.
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

    /// Runs rounds until `enough`, or until the lock is wanted by somebody who has precedence.
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

    /// Sleeps until the batch is done or there may be nobody who leads.
    fn follow(&self, state: &State, until: Option<Instant>) {
        if self.look_on(state, until) {
            return;
        }
        let me = std::thread::current();
        lock(&self.followers).push_back(me.clone());
        self.following.fetch_add(1, Ordering::SeqCst);
        if state.watch_thread(me.clone()) {
            // Whoever had the lock may have left before it could see us; whoever has it now will.
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

    /// Looks on while another thread leads; whether there is no need to sleep.
    fn look_on(&self, state: &State, until: Option<Instant>) -> bool {
        let start = Instant::now();
        loop {
            for _ in 0..FOLLOWER_SPINS {
                if state.is_done() {
                    return true;
                }
                if !self.led.load(Ordering::Relaxed) {
                    // The lock is free, or somebody has it for a moment.
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

    /// Whether somebody has to drive.
    fn is_busy(&self) -> bool {
        self.in_flight.load(Ordering::SeqCst) > 0 || self.connecting.load(Ordering::Relaxed)
    }

    /// Finds somebody to lead where nobody does and something is in flight.
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

    /// A batch is done: nothing touches its memory any more.
    fn done(&self, state: &State, problem: Option<&str>) {
        self.open_slices.fetch_sub(state.slices, Ordering::Relaxed);
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
        if state.end_push() {
            self.pushed.fetch_sub(1, Ordering::SeqCst);
        }
        state.finish(problem);
    }

    /// Batches in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::SeqCst)
    }
}

/// Resets what says that a thread leads, also where it panics.
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

/// The same for a thread that waits.
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

/// Where the thread panics, wakes everybody who may find the lock poisoned and see to it. Made before the lock is
/// taken, so that it is free again by then.
struct Alarm<'a>(&'a Driver);

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            lock(&self.0.followers).iter().for_each(Thread::unpark);
            self.0.kick();
        }
    }
}
