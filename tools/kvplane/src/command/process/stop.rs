//! Waiting for SIGINT or SIGTERM, or for the end of the parent where that was asked for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::command::Failure;

/// How often a process that waits looks after what it runs.
const LOOK: Duration = Duration::from_millis(500);
/// How often free memory is given back.
const TIDY: Duration = Duration::from_secs(60);

/// The signals that end the process in order. From [`Self::listen`] on they do not end it by themselves: what is being
/// started then is not left behind half done.
pub(crate) struct Stop {
    runtime: Runtime,
    interrupt: Signal,
    terminate: Signal,
    told: bool,
}

impl Stop {
    /// Begins to take note of them.
    pub(crate) fn listen() -> Result<Self, Failure> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let signals = runtime.block_on(async { [SignalKind::interrupt(), SignalKind::terminate()].map(signal) });
        let [interrupt, terminate] = signals;
        Ok(Self { runtime, interrupt: interrupt?, terminate: terminate?, told: false })
    }

    /// A signal has come, or comes within this time.
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

    /// Waits until one comes, looking at `watch` now and then: an error from it ends the wait. Free memory goes back to
    /// the kernel meanwhile.
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

/// Waits until the process is told to stop: see [`Stop::wait`].
pub(crate) fn wait(watch: impl FnMut() -> Result<(), Failure>) -> Result<(), Failure> {
    Stop::listen()?.wait(watch)
}

/// Watches standard input, which a parent holds open: true once the parent is gone.
pub(crate) fn parent_gone() -> Arc<AtomicBool> {
    let gone = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&gone);
    // Ends with standard input, or with the process.
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        seen.store(true, Ordering::Relaxed);
    });
    gone
}
