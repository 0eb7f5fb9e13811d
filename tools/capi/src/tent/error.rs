//! Errors of TENT's interface, which C code sees as -1, and the lines on standard error that give their reasons.

use std::collections::BTreeSet;
use std::ffi::{c_int, c_void};
use std::fmt;
use std::sync::{Mutex, PoisonError};

use kvplane::TransferError;

use super::engine::{ENGINES, Engine};
use super::settings::SettingsError;
use crate::batches::BatchError;
use crate::handles::HandleError;
use crate::rim::guarded;

/// Result of a failed call.
pub(super) const FAILED: c_int = -1;
/// Maximum number of different lines that are printed.
const LINES: usize = 256;
/// Longest line: reasons may quote values of the program.
const LINE_BYTES: usize = 1024;

/// Lines printed so far.
static PRINTED: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

/// Error of a call.
#[derive(Debug)]
pub(crate) enum TentError {
    /// A pointer is null.
    Null { what: &'static str },
    /// A text does not end within its limit, or is not UTF-8.
    Text { what: &'static str, most: usize },
    /// A number has no meaning.
    Number { what: &'static str, number: i64 },
    /// The place for a text has too few bytes.
    Room { bytes: usize, needed: usize },
    /// No memory of this length can exist at the address.
    Range { address: u64, bytes: u64 },
    /// The engine has allocated no memory at this address.
    NotAllocated { address: u64 },
    /// No memory of this length is registered at this address.
    NotRegistered { address: u64, bytes: u64 },
    /// The memory is registered with other options.
    OtherOptions { address: u64 },
    /// The machine has no NUMA node of this location.
    NoNode { location: String },
    /// The value has a meaning for TENT, and none here.
    Unsupported { what: String, instead: &'static str },
    /// The engine's handle is unknown.
    Handle(HandleError),
    /// A batch refused the call.
    Batch(BatchError),
    /// The engine refused the call.
    Engine(TransferError),
    /// A setting is invalid.
    Settings(SettingsError),
}

impl fmt::Display for TentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null { what } => write!(f, "{what} is null"),
            Self::Text { what, most } => write!(f, "{what} is longer than {most} bytes, or not UTF-8"),
            Self::Number { what, number } => write!(f, "{what} must not be {number}"),
            Self::Room { bytes, needed } => write!(f, "the text needs {needed} bytes, and the place has {bytes}"),
            Self::Range { address, bytes } => write!(f, "there is no memory of {bytes} bytes at {address:#x}"),
            Self::NotAllocated { address } => write!(f, "nothing was allocated at {address:#x}"),
            Self::NotRegistered { address, bytes: 0 } => write!(f, "nothing is registered at {address:#x}"),
            Self::NotRegistered { address, bytes } => {
                write!(f, "no memory of {bytes} bytes is registered at {address:#x}")
            }
            Self::OtherOptions { address } => {
                write!(f, "the memory at {address:#x} is registered with other options: unregister it first")
            }
            Self::NoNode { location } => write!(f, "this machine has no NUMA node {location}"),
            Self::Unsupported { what, instead } => write!(f, "{what} is not supported: {instead}"),
            Self::Handle(error) => write!(f, "{error}"),
            Self::Batch(error) => write!(f, "{error}"),
            Self::Engine(error) => write!(f, "{error}"),
            Self::Settings(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for TentError {}

macro_rules! from {
    ($($source:ty => $variant:ident,)*) => {
        $(impl From<$source> for TentError {
            fn from(error: $source) -> Self {
                Self::$variant(error)
            }
        })*
    };
}

from! {
    HandleError => Handle,
    BatchError => Batch,
    TransferError => Engine,
    SettingsError => Settings,
}

/// Prints a line on standard error, unless it was printed before. After [`LINES`] of them no more are printed.
pub(super) fn print_once(call: &str, text: &dyn fmt::Display) {
    let mut line = format!("kvplane: {call}: {text}");
    line.truncate(line.floor_char_boundary(LINE_BYTES));
    let mut printed = PRINTED.lock().unwrap_or_else(PoisonError::into_inner);
    if printed.len() < LINES && !printed.contains(&line) {
        eprintln!("{line}");
        printed.insert(line);
    }
}

/// Runs the work of a call: 0, or -1 after an error or a panic.
pub(super) fn checked(call: &str, work: impl FnOnce() -> Result<(), TentError>) -> c_int {
    guarded(FAILED, || match work() {
        Ok(()) => 0,
        Err(error) => {
            print_once(call, &error);
            FAILED
        }
    })
}

/// Runs the work of a call on an engine: 0, or -1 after an error or a panic.
pub(super) fn with_engine(
    call: &str,
    engine: *mut c_void,
    work: impl FnOnce(&Engine) -> Result<(), TentError>,
) -> c_int {
    checked(call, || work(&*ENGINES.get(engine)?))
}
