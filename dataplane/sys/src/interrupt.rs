//! Interruptible waits: a thread's blocking calls end early on request, for example after a signal.
//!
//! The caller of blocking code installs a predicate for the waits of its thread ([`watched`]). The waits call it every
//! [`LOOK`]; once it returns true, they cancel their operation and end. A thread without a predicate waits without
//! interruption.

use std::cell::Cell;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

/// Interval between calls of the predicate during a wait.
pub const LOOK: Duration = Duration::from_millis(50);

/// Time limit of waits for cleanup after a wait was interrupted.
const TIDY: Duration = Duration::from_millis(500);

#[derive(Clone, Copy)]
struct Watch {
    ask: fn() -> bool,
    next: Instant,
    ended: bool,
}

thread_local! {
    static WATCH: Cell<Option<Watch>> = const { Cell::new(None) };
}

/// Restores the previous predicate on drop, even if the work panics.
struct Before(Option<Watch>);

impl Drop for Before {
    fn drop(&mut self) {
        WATCH.set(self.0);
    }
}

/// Runs `work`. Its waits on this thread end early once `ask` has returned true; `ask` is called on this thread, while
/// no lock of ours is held, and may itself call functions that wait.
pub fn watched<T>(ask: fn() -> bool, work: impl FnOnce() -> T) -> T {
    let _before = Before(WATCH.replace(Some(Watch { ask, next: Instant::now() + LOOK, ended: false })));
    work()
}

/// Returns true if this thread's waits are interruptible.
#[must_use]
pub fn is_watched() -> bool {
    WATCH.get().is_some()
}

/// Returns true if this thread's waits were interrupted. Does not call the predicate.
#[must_use]
pub fn is_ended() -> bool {
    WATCH.get().is_some_and(|watch| watch.ended)
}

/// Returns true if this thread's waits have to end; calls the predicate if its interval has passed.
#[must_use]
pub fn ended() -> bool {
    let Some(watch) = WATCH.get() else { return false };
    if watch.ended || Instant::now() < watch.next {
        return watch.ended;
    }
    // The predicate's own waits are not interruptible by it.
    let before = Before(WATCH.replace(None));
    let ended = (watch.ask)();
    drop(before);
    WATCH.set(Some(Watch { ended, next: Instant::now() + LOOK, ..watch }));
    ended
}

/// Returns the longest uninterrupted step of a wait that may take `longest`.
#[must_use]
pub fn step(longest: Duration) -> Duration {
    if is_watched() { longest.min(LOOK) } else { longest }
}

/// Sleeps for `longest`; returns false if it was interrupted.
pub fn sleep(longest: Duration) -> bool {
    let until = Instant::now() + longest;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if ended() || left.is_zero() {
            return !is_ended();
        }
        std::thread::sleep(step(left));
    }
}

/// Reason why no value was received.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReceiveError {
    /// The wait timed out.
    TimedOut,
    /// The sender is gone.
    Disconnected,
    /// The wait was interrupted.
    Interrupted,
}

/// Waits for a value, for `longest` at most. After this thread's waits were interrupted the limit is short, because
/// such calls only clean up.
///
/// # Errors
/// The reason why no value was received.
pub fn receive<T>(from: &Receiver<T>, longest: Option<Duration>) -> Result<T, ReceiveError> {
    let tidies = is_ended();
    let longest = if tidies { Some(longest.map_or(TIDY, |longest| longest.min(TIDY))) } else { longest };
    if longest.is_none() && !is_watched() {
        return from.recv().map_err(|_| ReceiveError::Disconnected);
    }
    let until = longest.and_then(|longest| Instant::now().checked_add(longest));
    loop {
        let left = until.map_or(LOOK, |until| until.saturating_duration_since(Instant::now()));
        match from.recv_timeout(step(left)) {
            Ok(answer) => return Ok(answer),
            Err(RecvTimeoutError::Disconnected) => return Err(ReceiveError::Disconnected),
            Err(RecvTimeoutError::Timeout) => {}
        }
        if until.is_some_and(|until| Instant::now() >= until) {
            return Err(if tidies { ReceiveError::Interrupted } else { ReceiveError::TimedOut });
        }
        if !tidies && ended() {
            return Err(ReceiveError::Interrupted);
        }
    }
}

/// Runs `work`, which blocks without checking for interruption but has a time limit of its own. On a watched thread it
/// runs on another thread, so that the caller need not wait for its end. Returns `None` if the wait was interrupted
/// first, or no thread could be started.
pub fn aside<T: Send + 'static>(name: &str, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    if !is_watched() {
        return Some(work());
    }
    if is_ended() {
        return None;
    }
    let (done, wait) = sync_channel(1);
    let thread = std::thread::Builder::new().name(name.to_owned());
    // The receiver may be gone.
    thread.spawn(move || drop(done.send(work()))).ok()?;
    receive(&wait, None).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unwatched_threads_wait_without_interruption() {
        assert!(!is_watched() && !ended() && !is_ended());
        assert!(sleep(Duration::from_millis(1)));
        assert_eq!(step(Duration::MAX), Duration::MAX);
        let (send, wait) = sync_channel(1);
        send.send(7).expect("room");
        assert_eq!(receive(&wait, None), Ok(7));
        assert_eq!(receive(&wait, Some(Duration::from_millis(1))), Err(ReceiveError::TimedOut));
        drop(send);
        assert_eq!(receive(&wait, None), Err(ReceiveError::Disconnected));
        assert_eq!(aside("here", std::thread::current).map(|thread| thread.id()), Some(std::thread::current().id()));
    }

    #[test]
    fn waits_end_once_the_predicate_is_true() {
        let (kept, wait) = sync_channel::<()>(1);
        watched(
            || true,
            || {
                assert!(!is_ended() && !ended(), "it is not time to ask yet");
                assert_eq!(receive(&wait, None), Err(ReceiveError::Interrupted));
                assert!(is_ended() && !sleep(Duration::from_secs(3600)));
                assert_eq!(aside("never", || ()), None);
                // Waits during cleanup have a short limit, and receive values.
                assert_eq!(receive(&wait, None), Err(ReceiveError::Interrupted));
                kept.send(()).expect("room");
                assert_eq!(receive(&wait, None), Ok(()));
            },
        );
        assert!(!is_watched() && !is_ended());
    }

    #[test]
    fn waits_continue_while_the_predicate_is_false_and_it_may_wait_itself() {
        thread_local!(static ASKED: Cell<u32> = const { Cell::new(0) });
        fn ask() -> bool {
            ASKED.set(ASKED.get() + 1);
            assert!(!is_watched(), "a wait in here would ask again");
            assert!(sleep(Duration::from_millis(1)) && !watched(|| true, is_ended));
            false
        }
        watched(ask, || {
            assert!(sleep(3 * LOOK));
            assert_eq!(aside("elsewhere", || 3), Some(3));
            assert!(is_watched() && !is_ended());
        });
        assert!(ASKED.get() > 0);
    }

    #[test]
    fn a_panic_restores_the_previous_predicate() {
        let work = || watched(|| true, || panic!("on purpose"));
        assert!(std::panic::catch_unwind(work).is_err());
        assert!(!is_watched());
    }
}
