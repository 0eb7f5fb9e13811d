//! Outcomes as numbers, those that Mooncake's users compare with; and the message of a thread's last failure.

use std::cell::RefCell;

use kvplane::{Error, Status, TransferError};

/// `INTERNAL_ERROR`: also the result of a call on a closed object, or in a forked process.
pub(crate) const INTERNAL: i64 = -1;
/// `NO_AVAILABLE_HANDLE`: no space.
pub(crate) const NO_ROOM: i64 = -200;
/// `INVALID_KEY`.
pub(crate) const INVALID_KEY: i64 = -400;
/// `INVALID_PARAMS`.
pub(crate) const INVALID: i64 = -600;
/// `RPC_TIMEOUT`.
pub(crate) const TIMEOUT: i64 = -901;
/// `OBJECT_NOT_FOUND`.
pub(crate) const NOT_FOUND: i64 = -704;

/// Message for a cluster without nodes.
pub(crate) const NO_NODE: &str = "no node provides memory to the cluster: start one (`kvplane node` or `kvplane dev`), \
    or set up a store with `global_segment_size` above 0, and call again";

thread_local! {
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Returns the message of the last failure of this thread.
pub(crate) fn last() -> String {
    LAST.with(|last| last.borrow().clone())
}

/// Records the message of a failure, and returns its code.
pub(crate) fn failed(code: i64, why: impl Into<String>) -> i64 {
    LAST.with(|last| *last.borrow_mut() = why.into());
    code
}

/// Records the message of a store error, and returns its code.
pub(crate) fn store_code(error: &Error) -> i64 {
    let code = error.store_code();
    match error.status() {
        Some(Status::NoOwner) => failed(code, NO_NODE),
        _ => failed(code, error.to_string()),
    }
}

/// Records the error of a transfer engine call, and returns its code.
pub(crate) fn engine_code(error: &TransferError) -> i64 {
    failed(i64::from(error.code()), error.to_string())
}
