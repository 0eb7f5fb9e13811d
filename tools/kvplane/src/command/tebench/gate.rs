//! Barrier at which the threads of a case wait for one another before the measurement begins. A thread that fails,
//! panics or cannot be started releases the others, which end at once.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Barrier of one case.
pub(super) struct Gate {
    state: Mutex<State>,
    opened: Condvar,
}

struct State {
    awaited: usize,
    given_up: bool,
}

impl Gate {
    /// Creates a barrier that opens when this many threads have arrived.
    pub(super) const fn new(threads: usize) -> Self {
        Self { state: Mutex::new(State { awaited: threads, given_up: false }), opened: Condvar::new() }
    }

    /// Releases all waiting threads, because not all will arrive.
    pub(super) fn give_up(&self) {
        self.lock().given_up = true;
        self.opened.notify_all();
    }

    /// Announces a thread at the barrier; if it panics before it has passed, the barrier is given up.
    pub(super) const fn enter(&self) -> WayIn<'_> {
        WayIn { gate: self }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Announced thread, which has yet to pass the barrier.
pub(super) struct WayIn<'a> {
    gate: &'a Gate,
}

impl WayIn<'_> {
    /// Waits until all threads have arrived, if this one is ready itself; returns true if all are ready.
    pub(super) fn pass(self, ready: bool) -> bool {
        if !ready {
            self.gate.give_up();
            return false;
        }
        let mut state = self.gate.lock();
        state.awaited = state.awaited.saturating_sub(1);
        if state.awaited == 0 {
            self.gate.opened.notify_all();
        }
        let waits = |state: &mut State| state.awaited > 0 && !state.given_up;
        let state = self.gate.opened.wait_while(state, waits).unwrap_or_else(PoisonError::into_inner);
        !state.given_up
    }
}

impl Drop for WayIn<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.gate.give_up();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_threads_pass_together_or_none() {
        for bad in [None, Some("fails"), Some("panics"), Some("never comes")] {
            let gate = Gate::new(3);
            let passed = std::thread::scope(|scope| {
                let good: Vec<_> = (0..2).map(|_| scope.spawn(|| gate.enter().pass(true))).collect();
                let third = scope.spawn(|| match bad {
                    None => gate.enter().pass(true),
                    Some("fails") => gate.enter().pass(false),
                    Some("panics") => {
                        let _way_in = gate.enter();
                        panic!("a test's");
                    }
                    Some(_) => {
                        gate.give_up();
                        false
                    }
                });
                let _ = third.join();
                good.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Vec<bool>>()
            });
            assert_eq!(passed, [bad.is_none(); 2], "{bad:?}");
        }
    }
}
