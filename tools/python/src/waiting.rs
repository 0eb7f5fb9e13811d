//! Blocking calls: without the GIL, and on the main thread with signal handling.
//!
//! Python runs signal handlers on its main thread only, and only when it is polled. Therefore a call that blocks there
//! polls every 50 ms. If a handler returns, the call continues; if one raises, as Ctrl-C's does, the operation is
//! cancelled, and the exception raised when nothing accesses the caller's memory any more. A handler may make calls of
//! its own, also on the same object.

use std::cell::{Cell, RefCell};

use kvplane::interrupt;
use pyo3::prelude::*;

thread_local! {
    /// Exception that a handler raised.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
    /// Cached result of [`is_main`], with the process that it is valid for.
    static MAIN: Cell<(u32, bool)> = const { Cell::new((0, false)) };
}

/// Returns true if Python runs signal handlers on this thread.
fn is_main() -> bool {
    let process = std::process::id();
    let (known, main) = MAIN.get();
    if known == process {
        return main;
    }
    // The main thread's id is that of the process. After a fork on another thread, that thread is the child's main
    // thread.
    let own = std::fs::read_link("/proc/thread-self").ok();
    let main = own.is_some_and(|path| path.file_name().is_some_and(|name| *name == *process.to_string()));
    MAIN.set((process, main));
    main
}

/// Lets Python run pending signal handlers. Returns true if one raised.
fn ask() -> bool {
    // During the interpreter's exit, threads cannot attach, and no handlers run.
    let Some(Err(error)) = Python::try_attach(|py| py.check_signals()) else { return false };
    RAISED.set(Some(error));
    true
}

/// Runs `work` without the GIL.
///
/// # Errors
/// The exception of a signal handler; then `work` was cancelled.
pub(crate) fn waiting<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> PyResult<T> {
    if !is_main() {
        return Ok(py.detach(work));
    }
    let result = py.detach(|| interrupt::watched(ask, work));
    match RAISED.take() {
        Some(error) => Err(error),
        None => Ok(result),
    }
}
