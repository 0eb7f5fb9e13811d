//! Mailbox of a group link's thread: events since it looked last. It holds levels, so it never grows.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kvplane_rpc::CallError;
use kvplane_rpc::groups::{MemberAttached, WorldReply, WorldStatus};

/// Events since the thread looked last.
#[derive(Debug, Default)]
pub(super) struct Mail {
    /// The state of the process has changed.
    pub(super) report: bool,
    /// The newest status of the stream.
    pub(super) status: Option<WorldStatus>,
    /// The reply to the call in flight.
    pub(super) reply: Option<Result<WorldReply, CallError>>,
    /// The reply to the call in flight that attaches a member again.
    pub(super) attached: Option<Result<MemberAttached, CallError>>,
    /// The stream has ended.
    pub(super) is_stream_over: bool,
    /// The link is to end.
    pub(super) stop: bool,
}

impl Mail {
    const fn is_empty(&self) -> bool {
        let Self { report, status, reply, attached, is_stream_over, stop } = self;
        !*report && status.is_none() && reply.is_none() && attached.is_none() && !*is_stream_over && !*stop
    }
}

/// Mailbox with the wake-up of its thread.
#[derive(Debug, Default)]
pub(super) struct Mailbox {
    mail: Mutex<Mail>,
    filled: Condvar,
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, Mail> {
        // The mail is consistent at every point.
        self.mail.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the mail, and wakes the thread.
    pub(super) fn put(&self, change: impl FnOnce(&mut Mail)) {
        change(&mut self.lock());
        self.filled.notify_one();
    }

    /// Waits for mail, until this time at the latest, and takes it.
    pub(super) fn take_by(&self, at: Instant) -> Mail {
        let mut mail = self.lock();
        loop {
            let wait = at.saturating_duration_since(Instant::now());
            if !mail.is_empty() || wait.is_zero() {
                return std::mem::take(&mut *mail);
            }
            mail = self.filled.wait_timeout(mail, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Signal with which any thread of a process has its link report at once, because the state of the process has changed.
/// Clones are the same signal.
#[derive(Clone, Debug, Default)]
pub struct ReportSignal(pub(super) Arc<Mailbox>);

impl ReportSignal {
    /// Makes a signal, for one link.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Has the link report at once, or as soon as the report in flight is answered. Never blocks; before the link
    /// begins, and after it has ended, nothing happens.
    pub fn raise(&self) {
        self.0.put(|mail| mail.report = true);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn mail_is_taken_once_and_a_signal_wakes_the_thread() {
        let signal = ReportSignal::new();
        signal.raise();
        signal.raise();
        assert!(signal.0.take_by(Instant::now()).report);
        assert!(signal.0.take_by(Instant::now()).is_empty());
        let other = signal.clone();
        let raiser = std::thread::spawn(move || other.raise());
        assert!(signal.0.take_by(Instant::now() + Duration::from_secs(60)).report);
        raiser.join().expect("no panic");
    }
}
