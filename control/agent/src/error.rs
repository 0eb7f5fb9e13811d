//! Errors of this crate.

mod argument;
mod mooncake;

use core::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use kvplane_client::SubmitError;
use kvplane_engine::{RegionError, ShardError};
use kvplane_proto::Status;
use kvplane_rpc::{CallError as ControlError, ConnectError, IdentityError, LocalError, RefusalCode, Role};
use kvplane_sys::private_files::FileError;
use kvplane_topology::sysfs::SysfsError;
use kvplane_transfer::Error as TransferError;
use kvplane_transfer::error::code_of_status;

use crate::data_tls::DataTlsError;
use crate::group::GroupLinkError;
use crate::link::ControlLinkError;
use crate::node::NodeConfigError;
use crate::node::handover::HandoverError;
use crate::p2p::{P2pError, ReshardingError};
use crate::tickets::TicketIssueError;
pub use argument::ArgumentError;

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
    /// An argument of a call of a client, or a setting of a client, is invalid.
    Argument(ArgumentError),
    /// A setting of a node is invalid.
    NodeConfig(NodeConfigError),
    /// A node was not handed over to another process.
    Handover(HandoverError),
    /// The process is not part of its world any more.
    Group(GroupLinkError),
    /// The P2P store does not do what a call requests.
    P2p(P2pError),
    /// The cluster's name, the certificates or the key are invalid, or the system has no random numbers.
    Identity(IdentityError),
    /// No control link could be established, or it accepts no call.
    ControlLink(ControlLinkError),
    /// The tickets of the control plane cannot be used.
    TicketIssue(TicketIssueError),
    /// Data connections cannot use TLS.
    DataTls(DataTlsError),
    /// The machine could not be discovered.
    Machine(SysfsError),
    /// There is no cluster map yet.
    NoMap,
    /// The node has not appeared in the cluster map.
    NotInMap {
        /// Time that the node waited.
        after: Duration,
    },
    /// The control plane does not know this node, and was offered the map that the node follows.
    MapOffered,
    /// The Conductor is unreachable, and no instance that could take its place is known.
    NoInstance {
        /// Model of the request.
        model: String,
    },
    /// A thread of this library has ended.
    ThreadEnded {
        /// Thread that has ended.
        thread: LibraryThread,
        /// True if the thread ended before it had started its work.
        starting: bool,
    },
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
            Self::Argument(error) => write!(f, "{error}"),
            Self::NodeConfig(error) => write!(f, "{error}"),
            Self::Handover(error) => write!(f, "{error}"),
            Self::Group(error) => write!(f, "{error}"),
            Self::P2p(error) => write!(f, "{error}"),
            Self::Identity(error) => write!(f, "{error}"),
            Self::ControlLink(error) => write!(f, "{error}"),
            Self::TicketIssue(error) => write!(f, "{error}"),
            Self::DataTls(error) => write!(f, "{error}"),
            Self::Machine(error) => write!(f, "{error}"),
            Self::NoMap => f.write_str("there is no cluster map yet"),
            Self::NotInMap { after } => write!(f, "the node was not in the map after {} s", after.as_secs()),
            Self::MapOffered => f.write_str(
                "the control plane does not know this node, and may have lost its state: it was offered the map that \
                 the node follows",
            ),
            Self::NoInstance { model } => {
                write!(f, "the Conductor is unreachable, and no instance of model {model:?} is known")
            }
            Self::ThreadEnded { thread, starting } => f.write_str(match (thread, starting) {
                (LibraryThread::Client, true) => "the client's thread ended",
                (LibraryThread::Client, false) => "the client's thread has ended",
                (LibraryThread::ControlLink, true) => "the control link's thread ended",
                (LibraryThread::ControlLink, false) => "the control link's thread has ended",
            }),
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

    /// Returns true if the control plane did not answer a call: it was not reached, or not in time. The call may have
    /// taken effect.
    #[must_use]
    pub const fn is_unanswered(&self) -> bool {
        matches!(self, Self::Call(error) if is_unanswered(error))
    }

    /// Returns true if no control plane answered, as while it starts: a retry may succeed. False where a control plane
    /// answered and refused this caller.
    #[must_use]
    pub fn is_control_away(&self) -> bool {
        match self {
            Self::Discovery(error) => matches!(error, LocalError::NotPublished { .. } | LocalError::Stale { .. }),
            Self::Connect(ConnectError::Call(error)) | Self::Call(error) => {
                is_unanswered(error) || error.refusal() == Some(RefusalCode::ShuttingDown)
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
            Self::Request(_) | Self::Argument(_) | Self::NodeConfig(_) | Self::P2p(_) | Self::Group(_) => -1,
            Self::Identity(_) | Self::NoCertificate { .. } | Self::NoTickets { .. } | Self::TicketIssue(_) => -1,
            Self::ControlLink(_) | Self::DataTls(_) | Self::Machine(_) | Self::Directory(_) => -1,
            Self::NoMap | Self::NotInMap { .. } | Self::MapOffered | Self::NoInstance { .. } => -1,
            Self::ThreadEnded { .. } | Self::Handover(_) => -1,
            Self::Shard(ShardError::Busy) => -4,
            Self::Status { status, .. } => code_of_status(*status),
            Self::Discovery(_) | Self::Connect(_) | Self::Call(_) => -200,
            Self::Memory(_) => -302,
            Self::Shard(_) | Self::System(_) => -102,
            Self::Transfer(error) => error.code(),
        }
    }
}

/// Returns true if a call was not answered.
const fn is_unanswered(error: &ControlError) -> bool {
    matches!(error, ControlError::Unreachable { .. } | ControlError::Deadline { .. } | ControlError::Lost { .. })
}

/// Thread that this library starts, and that calls depend on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum LibraryThread {
    /// Thread of an asynchronous client.
    Client,
    /// Thread of a control link.
    ControlLink,
}

/// Maps the variants that both enums have onto each other; the others are the transfer engine's own.
impl From<TransferError> for Error {
    fn from(error: TransferError) -> Self {
        match error {
            TransferError::Status { what, status, cause } => Self::Status { what, status, cause },
            TransferError::Request(error) => Self::Request(error),
            TransferError::Directory(error) => Self::Directory(error),
            TransferError::Shard(error) => Self::Shard(error),
            TransferError::Memory(error) => Self::Memory(error),
            TransferError::System(error) => Self::System(error),
            error => Self::Transfer(error),
        }
    }
}

impl From<ReshardingError> for Error {
    fn from(error: ReshardingError) -> Self {
        Self::P2p(P2pError::Resharding(error))
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
    ArgumentError => Argument,
    NodeConfigError => NodeConfig,
    HandoverError => Handover,
    GroupLinkError => Group,
    P2pError => P2p,
    IdentityError => Identity,
    ControlLinkError => ControlLink,
    TicketIssueError => TicketIssue,
    DataTlsError => DataTls,
    SysfsError => Machine,
    LocalError => Discovery,
    ConnectError => Connect,
    ControlError => Call,
    FileError => Directory,
    ShardError => Shard,
    RegionError => Memory,
    std::io::Error => System,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_say_what_ended_and_what_is_missing() {
        let says = |error: Error, text: &str| assert_eq!(error.to_string(), text);
        let thread = LibraryThread::Client;
        says(Error::ThreadEnded { thread, starting: true }, "the client's thread ended");
        says(Error::ThreadEnded { thread, starting: false }, "the client's thread has ended");
        says(Error::NoMap, "there is no cluster map yet");
        says(Error::NotInMap { after: Duration::from_secs(10) }, "the node was not in the map after 10 s");
        let instance = Error::NoInstance { model: "llama".to_owned() };
        says(instance, "the Conductor is unreachable, and no instance of model \"llama\" is known");
    }
}
