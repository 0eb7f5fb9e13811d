//! Stop conditions of a process: SIGINT, SIGTERM, or the end of the parent process.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc::Receiver;

use crate::command::Failure;

/// Interval at which a waiting process checks the components that it runs.
const LOOK: Duration = Duration::from_millis(500);
/// Interval at which free memory is returned to the kernel.
const TIDY: Duration = Duration::from_secs(60);

/// Handler of the signals that stop the process. From [`Self::listen`] on, a signal no longer ends the process by
/// itself, so that a start in progress is not left half done.
pub(crate) struct Stop {
    runtime: Runtime,
    interrupt: Signal,
    terminate: Signal,
    told: bool,
}

impl Stop {
    /// Starts to handle the signals.
    pub(crate) fn listen() -> Result<Self, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let signals = runtime.block_on(async { [SignalKind::interrupt(), SignalKind::terminate()].map(signal) });
        let [interrupt, terminate] = signals;
        Ok(Self { runtime, interrupt: interrupt?, terminate: terminate?, told: false })
    }

    /// Returns true if a signal has arrived, or arrives within this time.
    pub(crate) fn comes_within(&mut self, wait: Duration) -> bool {
        let Self { runtime, interrupt, terminate, told } = self;
        *told = *told
            || runtime.block_on(async {
                tokio::select! {
                    _ = interrupt.recv() => true,
                    _ = terminate.recv() => true,
                    () = tokio::time::sleep(wait) => false,
                }
            });
        *told
    }

    /// Waits for a signal or a request, and calls `watch` at intervals: an error from it ends the wait. Returns the
    /// request; `None` for a signal.
    pub(crate) fn wait_or_receive<T>(
        &mut self,
        requests: &mut Receiver<T>,
        mut watch: impl FnMut() -> Result<(), Failure>,
    ) -> Result<Option<T>, Failure> {
        let mut tidied = Instant::now();
        loop {
            let Self { runtime, interrupt, terminate, told } = self;
            let (signalled, request) = runtime.block_on(async {
                tokio::select! {
                    biased;
                    _ = interrupt.recv() => (true, None),
                    _ = terminate.recv() => (true, None),
                    Some(request) = requests.recv() => (false, Some(request)),
                    () = tokio::time::sleep(LOOK) => (false, None),
                }
            });
            *told |= signalled;
            if *told {
                return Ok(None);
            }
            if request.is_some() {
                return Ok(request);
            }
            watch()?;
            if tidied.elapsed() > TIDY {
                tidied = Instant::now();
                kvplane::give_back_free_memory();
            }
        }
    }

    /// Waits for a signal, and calls `watch` at intervals: an error from it ends the wait. Returns free memory to the
    /// kernel meanwhile.
    pub(crate) fn wait(&mut self, mut watch: impl FnMut() -> Result<(), Failure>) -> Result<(), Failure> {
        let mut tidied = Instant::now();
        while !self.comes_within(LOOK) {
            watch()?;
            if tidied.elapsed() > TIDY {
                tidied = Instant::now();
                kvplane::give_back_free_memory();
            }
        }
        Ok(())
    }
}

/// Waits for a signal that stops the process: see [`Stop::wait`].
pub(crate) fn wait(watch: impl FnMut() -> Result<(), Failure>) -> Result<(), Failure> {
    Stop::listen()?.wait(watch)
}

/// Watches standard input, which the parent process holds open: the flag becomes true once the parent has ended.
pub(crate) fn parent_gone() -> Arc<AtomicBool> {
    let gone = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&gone);
    // The thread ends with standard input, or with the process.
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        seen.store(true, Ordering::Relaxed);
    });
    gone
}
