//! Outcomes as numbers: those that Mooncake's users compare with; and the last failure of a thread in words.

use std::cell::RefCell;

use kvplane::{Error, Status, TransferError};

/// `INTERNAL_ERROR`: also what a call on something closed or forked returns.
pub(crate) const INTERNAL: i64 = -1;
/// `NO_AVAILABLE_HANDLE`: no room.
pub(crate) const NO_ROOM: i64 = -200;
/// `INVALID_KEY`.
pub(crate) const INVALID_KEY: i64 = -400;
/// `INVALID_PARAMS`.
pub(crate) const INVALID: i64 = -600;
/// `OBJECT_NOT_FOUND`.
pub(crate) const NOT_FOUND: i64 = -704;

/// What is said of a cluster without nodes.
pub(crate) const NO_NODE: &str = "no node gives memory to the cluster: start one (`kvplane node` or `kvplane dev`), or \
    set up a store with `global_segment_size` above 0, and call again";

thread_local! {
    static LAST: RefCell<String> = const { RefCell::new(String::new()) };
}

/// What the last failure of this thread was.
pub(crate) fn last() -> String {
    LAST.with(|last| last.borrow().clone())
}

/// Remembers why something failed, and gives its number back.
pub(crate) fn failed(code: i64, why: impl Into<String>) -> i64 {
    LAST.with(|last| *last.borrow_mut() = why.into());
    code
}

/// The number for an error of the store. Codes of which callers believe that a transfer may still touch their memory
/// are not among them: when a call of ours returns, none does.
pub(crate) fn store_code(error: &Error) -> i64 {
    let code = match error {
        Error::Status { status, .. } => status_code(*status),
        Error::Request(_)
        | Error::Argument(_)
        | Error::NoCertificate { .. }
        | Error::NoTickets { .. }
        | Error::Directory(_)
        | Error::Transfer(
            TransferError::AddressOverlapped { .. }
            | TransferError::AddressNotRegistered(_)
            | TransferError::Malformed(_),
        ) => INVALID,
        Error::Transfer(TransferError::TooManyRequests(_)) | Error::Memory(_) => NO_ROOM,
        Error::Discovery(_) | Error::Connect(_) | Error::Call(_) => -900,
        _ => INTERNAL,
    };
    match error.status() {
        Some(Status::NoOwner) => failed(code, NO_NODE),
        _ => failed(code, error.to_string()),
    }
}

const fn status_code(status: Status) -> i64 {
    match status {
        Status::Ok | Status::Exists => 0,
        Status::NotFound => NOT_FOUND,
        Status::NoSpace | Status::TooLarge | Status::PinLimit | Status::Busy | Status::NoOwner => NO_ROOM,
        Status::Empty | Status::BadRequest | Status::OutOfRange | Status::BufferTooSmall => INVALID,
        Status::DeadlineExceeded | Status::Cancelled => -901,
        Status::Unreachable | Status::WrongOwner => -900,
        Status::Corrupt => -801,
        Status::Unauthorized => -601,
        Status::Incompatible => -300,
        Status::Stale => -707,
        Status::Unsupported => -1012,
        Status::QuotaExceeded => -1700,
        Status::NoTenant => -1701,
        Status::Pending => -703,
        _ => INTERNAL,
    }
}

/// Remembers why a call of the transfer engine failed, and gives the number of its kind.
pub(crate) fn engine_code(error: &TransferError) -> i64 {
    failed(i64::from(error.code()), error.to_string())
}
