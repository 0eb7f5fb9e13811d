//! Clock of a host: the monotonic time that a pure core takes as an argument.

use std::time::{Duration, Instant};

/// Monotonic time since a host's start, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostClock {
    started: Instant,
}

impl HostClock {
    /// Starts a clock at 0.
    pub(crate) fn start() -> Self {
        Self { started: Instant::now() }
    }

    /// Returns the time since the start.
    pub(crate) fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns the moment at which the clock has this time.
    pub(crate) fn instant(&self, time_ns: u64) -> Instant {
        self.started + Duration::from_nanos(time_ns)
    }

    /// Sleeps until the clock has this time; without one, forever.
    pub(crate) async fn sleep_until(&self, due_ns: Option<u64>) {
        match due_ns {
            Some(due_ns) => tokio::time::sleep_until(self.instant(due_ns).into()).await,
            None => std::future::pending().await,
        }
    }
}
