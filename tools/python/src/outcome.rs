//! Outcomes as numbers, those that Mooncake's users compare with; and the message of a thread's last failure.

use std::cell::RefCell;

use kvplane::{ControlLinkError, Error, Status, TransferError};

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

/// Returns the code of a store error. Codes that suggest a transfer may still access the caller's memory are not used:
/// when a call returns, none does.
pub(crate) fn store_code(error: &Error) -> i64 {
    let code = match error {
        Error::Status { status, .. } => status_code(*status),
        Error::Request(_)
        | Error::Argument(_)
        | Error::NodeConfig(_)
        | Error::P2p(_)
        | Error::Identity(_)
        | Error::NoCertificate { .. }
        | Error::NoTickets { .. }
        | Error::TicketIssue(_)
        | Error::DataTls(_)
        | Error::Directory(_)
        | Error::ControlLink(ControlLinkError::Addresses { .. })
        | Error::Transfer(
            TransferError::AddressOverlapped { .. }
            | TransferError::AddressNotRegistered(_)
            | TransferError::Argument(_)
            | TransferError::Malformed(_),
        ) => INVALID,
        Error::Transfer(TransferError::TooManyRequests(_)) | Error::Memory(_) => NO_ROOM,
        Error::Discovery(_)
        | Error::Connect(_)
        | Error::Call(_)
        | Error::ControlLink(_)
        | Error::NoMap
        | Error::NotInMap { .. }
        | Error::MapOffered
        | Error::NoInstance { .. } => -900,
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

/// Records the error of a transfer engine call, and returns its code.
pub(crate) fn engine_code(error: &TransferError) -> i64 {
    failed(i64::from(error.code()), error.to_string())
}
