//! Ending engines in order when the process is asked to end.
//!
//! A thread waits for SIGTERM and SIGINT. When one comes, the engines that asked for it leave the metadata store, so
//! that peers do not look for them any more; then the signal does what it does by default. A program with a handler of
//! its own for these signals ends its engines itself and does not ask for this.

use std::ffi::c_void;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use crate::engine::Engine;

/// Addresses of the engines to end.
static WATCHED: Mutex<Vec<usize>> = Mutex::new(Vec::new());
static STARTED: OnceLock<bool> = OnceLock::new();

/// Ends this engine, too, when the process is asked to end.
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

/// The engine ends by itself.
pub(crate) fn forget(engine: *mut c_void) {
    WATCHED.lock().unwrap_or_else(PoisonError::into_inner).retain(|&held| held != engine as usize);
}

fn wait(mut signals: Signals) {
    let Some(signal) = signals.forever().next() else { return };
    // Held until the end: no engine is destroyed meanwhile, because destroying forgets it first.
    let watched = WATCHED.lock().unwrap_or_else(PoisonError::into_inner);
    for &engine in watched.iter() {
        // SAFETY: an engine in the list is alive: `destroyTransferEngine` takes it out, under the lock, before it ends.
        let engine = unsafe { &*(engine as *const Engine) };
        engine.engine.withdraw();
    }
    let _ = emulate_default_handler(signal);
}
