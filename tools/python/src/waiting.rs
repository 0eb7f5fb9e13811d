//! Calls that wait: without the interpreter's lock, and on the main thread with an eye on signals.
//!
//! Python runs handlers of signals on its main thread only, and only where somebody asks it to. So whoever waits there
//! asks every 50 ms. A handler that returns lets the call go on; when one raises, as that of Ctrl-C does, what is under
//! way is withdrawn, and the exception raised when nothing touches the caller's memory any more. A handler may make
//! calls of its own, also on the same object.

use std::cell::{Cell, RefCell};

use kvplane::interrupt;
use pyo3::prelude::*;

thread_local! {
    /// What a handler raised.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
    /// Whether this is the main thread, of which process.
    static MAIN: Cell<(u32, bool)> = const { Cell::new((0, false)) };
}

/// Whether Python would run handlers here.
fn is_main() -> bool {
    let process = std::process::id();
    let (known, main) = MAIN.get();
    if known == process {
        return main;
    }
    // The main thread has the process's number. Who forks on another thread has the child's main thread there.
    let own = std::fs::read_link("/proc/thread-self").ok();
    let main = own.is_some_and(|path| path.file_name().is_some_and(|name| *name == *process.to_string()));
    MAIN.set((process, main));
    main
}

/// Has Python run the handlers of signals that have come; whether one raised.
fn ask() -> bool {
    // Threads without an interpreter, because it ends, have no handlers either.
    let Some(Err(error)) = Python::try_attach(|py| py.check_signals()) else { return false };
    RAISED.set(Some(error));
    true
}

/// Runs `work` without the interpreter's lock.
///
/// # Errors
/// What the handler of a signal raised meanwhile; then `work` has ended early.
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
