//! Errors as Mooncake's numbers.

use kvplane_proto::Status;
use kvplane_transfer::Error as TransferError;

use super::Error;
use crate::link::ControlLinkError;

/// `INTERNAL_ERROR`.
const INTERNAL: i64 = -1;
/// `NO_AVAILABLE_HANDLE`: no space.
const NO_ROOM: i64 = -200;
/// `INVALID_PARAMS`.
const INVALID: i64 = -600;

impl Error {
    /// Returns the number that Mooncake's store has for this error; 0 where the object exists already. Numbers that
    /// suggest a transfer may still access the caller's memory are not used: when a call returns, none does.
    #[must_use]
    pub const fn store_code(&self) -> i64 {
        match self {
            Self::Status { status, .. } => status_code(*status),
            Self::Request(_)
            | Self::Argument(_)
            | Self::NodeConfig(_)
            | Self::P2p(_)
            | Self::Identity(_)
            | Self::NoCertificate { .. }
            | Self::NoTickets { .. }
            | Self::TicketIssue(_)
            | Self::DataTls(_)
            | Self::Directory(_)
            | Self::ControlLink(ControlLinkError::Addresses { .. })
            | Self::Transfer(
                TransferError::AddressOverlapped { .. }
                | TransferError::AddressNotRegistered(_)
                | TransferError::Argument(_)
                | TransferError::Malformed(_),
            ) => INVALID,
            Self::Transfer(TransferError::TooManyRequests(_)) | Self::Memory(_) => NO_ROOM,
            Self::Discovery(_)
            | Self::Connect(_)
            | Self::Call(_)
            | Self::ControlLink(_)
            | Self::NoMap
            | Self::NotInMap { .. }
            | Self::MapOffered
            | Self::NoInstance { .. } => -900,
            _ => INTERNAL,
        }
    }
}

const fn status_code(status: Status) -> i64 {
    match status {
        Status::Ok | Status::Exists => 0,
        Status::NotFound => -704,
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
