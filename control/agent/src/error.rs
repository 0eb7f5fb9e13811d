//! Errors of this crate.

use core::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use kvplane_client::SubmitError;
use kvplane_engine::{RegionError, ShardError};
use kvplane_proto::Status;
use kvplane_rpc::{CallError as ControlError, ConnectError, LocalError, RefusalCode, Role};
use kvplane_sys::private_files::FileError;
use kvplane_transfer::Error as TransferError;
use kvplane_transfer::error::code_of_status;

/// Error of a call.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The store or a peer refused the operation.
    Status {
        /// Operation that failed.
        what: String,
        /// Status of the reply.
        status: Status,
        /// Last connection failure, where that is the likely cause.
        cause: Option<String>,
    },
    /// The request is malformed; nothing was done.
    Request(SubmitError),
    /// A setting or an argument is invalid; the text names it and the reason.
    Argument(String),
    /// The directory of certificates has none of a role that may do this.
    NoCertificate {
        /// Directory of certificates.
        directory: PathBuf,
        /// Sufficient roles, the usual one first.
        wanted: Vec<Role>,
        /// Roles that the directory has a certificate of.
        found: Vec<Role>,
    },
    /// Segments shared here would be readable by anyone, because this control plane issues no tickets to authenticate
    /// peers.
    NoTickets {
        /// Address that would be listened on.
        listen: SocketAddr,
    },
    /// No local control plane was found, or it is not trusted.
    Discovery(LocalError),
    /// The control plane is unreachable.
    Connect(ConnectError),
    /// The control plane refused the call.
    Call(ControlError),
    /// A shard failed to start, or does not answer.
    Shard(ShardError),
    /// The transfer engine failed, with an error that only it has.
    Transfer(TransferError),
    /// The directory of sockets is unusable.
    Directory(FileError),
    /// Memory could not be allocated or registered.
    Memory(RegionError),
    /// A system call failed.
    System(std::io::Error),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status { what, status, cause: Some(cause) } => write!(f, "{what}: {status} ({cause})"),
            Self::Status { what, status, cause: None } => write!(f, "{what}: {status}"),
            Self::Request(error) => write!(f, "{error}"),
            Self::Argument(why) => f.write_str(why),
            Self::NoCertificate { directory, wanted, found } => {
                let names = |roles: &[Role], ending: &str, or: &str| {
                    let names: Vec<String> = roles.iter().map(|role| format!("{role}{ending}")).collect();
                    names.join(or)
                };
                let usual = wanted.first().map_or("client", |role| role.name());
                let there = match found[..] {
                    [] => String::new(),
                    _ => format!(", which has {}", names(found, ".pem", " and ")),
                };
                write!(
                    f,
                    "this needs a certificate of role {}: there is no {} in {}{there}; `kvplane ctl cert issue \
                     {usual}` makes one",
                    names(wanted, "", " or "),
                    names(wanted, ".pem", " or "),
                    directory.display(),
                )
            }
            Self::NoTickets { listen } => write!(
                f,
                "segments shared on {listen} would be open to every peer, as this control plane issues no tickets: \
                 listen on a loopback address, or run kvplane control without --no-tickets"
            ),
            Self::Discovery(error) => write!(f, "{error}"),
            Self::Connect(error) => write!(f, "{error}"),
            Self::Call(error) => write!(f, "{error}"),
            Self::Shard(error) => write!(f, "{error}"),
            Self::Transfer(error) => write!(f, "{error}"),
            Self::Directory(error) => write!(f, "{error}"),
            Self::Memory(error) => write!(f, "{error}"),
            Self::System(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for Error {}

impl Error {
    /// Error of a call whose wait was ended before there was an outcome: see [`kvplane_sys::interrupt`].
    pub(crate) fn interrupted() -> Self {
        let what = "the call was interrupted before it had an outcome".to_owned();
        Self::Status { what, status: Status::Cancelled, cause: None }
    }

    /// Returns true if no control plane answered, as while it starts: a retry may succeed. False where a control plane
    /// answered and refused this caller.
    #[must_use]
    pub fn is_control_away(&self) -> bool {
        match self {
            Self::Discovery(error) => matches!(error, LocalError::NotPublished { .. } | LocalError::Stale { .. }),
            Self::Connect(ConnectError::Call(error)) | Self::Call(error) => {
                let away = matches!(
                    error,
                    ControlError::Unreachable { .. } | ControlError::Deadline { .. } | ControlError::Lost { .. }
                );
                away || error.refusal() == Some(RefusalCode::ShuttingDown)
            }
            _ => false,
        }
    }

    /// Returns true if a known control plane does not answer, as while it restarts. False where none was ever started.
    #[must_use]
    pub fn may_restart(&self) -> bool {
        self.is_control_away() && !matches!(self, Self::Discovery(LocalError::NotPublished { .. }))
    }

    /// Returns the delay after which the control plane may admit a node that it refused for now: the node's id still
    /// belongs to a former incarnation, or the control plane is adopting the map of a lost state. `None` where waiting
    /// does not help.
    #[must_use]
    pub fn join_again_after(&self) -> Option<Duration> {
        let (Self::Connect(ConnectError::Call(error)) | Self::Call(error)) = self else { return None };
        error.retry_after()
    }

    /// Returns the status, if a store or a peer replied with one.
    #[must_use]
    pub const fn status(&self) -> Option<Status> {
        match self {
            Self::Status { status, .. } => Some(*status),
            Self::Transfer(error) => error.status(),
            _ => None,
        }
    }

    /// Returns the error code that Mooncake's C interface uses for errors of this kind; always negative.
    #[must_use]
    pub fn code(&self) -> i32 {
        match self {
            Self::Request(SubmitError::TooMany { .. } | SubmitError::Busy { .. }) => -2,
            Self::Request(_) | Self::Argument(_) | Self::NoCertificate { .. } | Self::NoTickets { .. } => -1,
            Self::Directory(_) => -1,
            Self::Shard(ShardError::Busy) => -4,
            Self::Status { status, .. } => code_of_status(*status),
            Self::Discovery(_) | Self::Connect(_) | Self::Call(_) => -200,
            Self::Memory(_) => -302,
            Self::Shard(_) | Self::System(_) => -102,
            Self::Transfer(error) => error.code(),
        }
    }
}

/// Maps the variants that both enums have onto each other; the others are the transfer engine's own.
impl From<TransferError> for Error {
    fn from(error: TransferError) -> Self {
        match error {
            TransferError::Status { what, status, cause } => Self::Status { what, status, cause },
            TransferError::Request(error) => Self::Request(error),
            TransferError::Argument(why) => Self::Argument(why),
            TransferError::Directory(error) => Self::Directory(error),
            TransferError::Shard(error) => Self::Shard(error),
            TransferError::Memory(error) => Self::Memory(error),
            TransferError::System(error) => Self::System(error),
            error => Self::Transfer(error),
        }
    }
}

macro_rules! from {
    ($($source:ty => $variant:ident,)*) => {
        $(impl From<$source> for Error {
            fn from(error: $source) -> Self {
                Self::$variant(error)
            }
        })*
    };
}

from! {
    SubmitError => Request,
    LocalError => Discovery,
    ConnectError => Connect,
    ControlError => Call,
    FileError => Directory,
    ShardError => Shard,
    RegionError => Memory,
    std::io::Error => System,
}
