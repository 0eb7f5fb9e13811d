//! Waiting for SIGINT or SIGTERM, or for the end of the parent where that was asked for.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::Failure;

/// How often free memory is given back.
const TIDY: Duration = Duration::from_secs(60);

/// Waits until the process is told to stop, looking at `watch` now and then: an error from it ends the wait. Free
/// memory goes back to the kernel meanwhile.
pub(crate) fn wait(mut watch: impl FnMut() -> Result<(), Failure>) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let mut interrupt = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())?;
        let mut tidied = Instant::now();
        let mut terminate = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
        loop {
            tokio::select! {
                _ = interrupt.recv() => return Ok(()),
                _ = terminate.recv() => return Ok(()),
                () = tokio::time::sleep(Duration::from_millis(500)) => {
                    watch()?;
                    if tidied.elapsed() > TIDY {
                        tidied = Instant::now();
                        kvplane::give_back_free_memory();
                    }
                }
            }
        }
    })
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
