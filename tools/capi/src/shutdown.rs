//! Graceful shutdown of engines on SIGTERM and SIGINT.
//!
//! A thread waits for SIGTERM and SIGINT. When one arrives, the engines that enabled this are removed from the metadata
//! store, so that peers do not look for them any more; then the signal has its default effect. A program with its own
//! handler for these signals destroys its engines itself and does not enable this.

use std::ffi::c_void;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use crate::engine::Engine;
use crate::handles::ProcessLocal;

/// Addresses of the engines to withdraw.
static WATCHED: Mutex<Vec<usize>> = Mutex::new(Vec::new());
static STARTED: OnceLock<bool> = OnceLock::new();

/// Adds an engine to those that are withdrawn on a signal.
pub(crate) fn watch(engine: *mut c_void) {
    let started = STARTED.get_or_init(|| match Signals::new([SIGTERM, SIGINT]) {
        Ok(signals) => thread::Builder::new().name("kvplane-signals".to_owned()).spawn(|| wait(signals)).is_ok(),
        Err(_) => false,
    });
    let mut watched = WATCHED.lock().unwrap_or_else(PoisonError::into_inner);
    if *started && !watched.contains(&(engine as usize)) {
        watched.push(engine as usize);
    }
}

/// Removes an engine that is being destroyed.
pub(crate) fn forget(engine: *mut c_void) {
    WATCHED.lock().unwrap_or_else(PoisonError::into_inner).retain(|&held| held != engine as usize);
}

fn wait(mut signals: Signals) {
    let Some(signal) = signals.forever().next() else { return };
    // Held until the end: no engine is destroyed meanwhile, because destroying forgets it first.
    let watched = WATCHED.lock().unwrap_or_else(PoisonError::into_inner);
    for &engine in watched.iter() {
        // SAFETY: an engine in the list is alive: `destroyTransferEngine` takes it out, under the lock, before it ends.
        let engine = unsafe { &*(engine as *const ProcessLocal<Engine>) };
        if let Some(engine) = engine.get() {
            engine.engine.directory().withdraw();
        }
    }
    let _ = emulate_default_handler(signal);
}
