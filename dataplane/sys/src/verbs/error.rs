//! Verbs errors, with texts that tell an operator the next step.

use super::states::QueueState;
use std::fmt;
use std::io;

/// Error of the control path: opening devices, registering memory, connecting.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum VerbsError {
    /// libibverbs is not installed, or cannot be loaded.
    NoLibrary {
        /// Error of the loader.
        detail: String,
    },
    /// The library lacks a function.
    MissingSymbol {
        /// Function and its version.
        symbol: String,
    },
    /// The kernel has no verbs: `ib_uverbs` is not loaded.
    NoKernelSupport { source: io::Error },
    /// The device's file may not be opened.
    NoPermission { device: String, path: String },
    /// The kernel knows the device, but its file is missing: this process runs in a container without access to it.
    NoDeviceFile { device: String, path: String },
    /// No device has that name.
    UnknownDevice {
        /// Requested name.
        name: String,
        /// Existing devices.
        known: Vec<String>,
    },
    /// The kernel did not allow to pin that much memory.
    Memlock {
        /// Size of the registration.
        bytes: u64,
        /// Limit of this process; `None` if it is unlimited, so that memory itself must be short.
        limit_bytes: Option<u64>,
    },
    /// Memory could not be registered.
    Register {
        device: String,
        /// Size of the registration.
        bytes: u64,
        source: io::Error,
    },
    /// No port of the device is active.
    NoActivePort {
        device: String,
        /// Each port with its state.
        ports: String,
    },
    /// A port has no address that a peer could reach.
    NoGid { device: String, port: u8 },
    /// The device or the library does not support an operation.
    NotOffered {
        device: String,
        /// Missing feature.
        what: &'static str,
    },
    /// A request exceeds a limit.
    Limit {
        device: String,
        /// Limited quantity.
        what: &'static str,
        /// Requested amount.
        wanted: u64,
        /// Available amount.
        offered: u64,
    },
    /// A queue pair's state does not allow a transition.
    Transition {
        /// Current state.
        from: QueueState,
        /// Requested state.
        to: QueueState,
    },
    /// The device rejected a call.
    Refused {
        device: String,
        /// Purpose of the call, as a verb phrase.
        what: String,
        source: io::Error,
    },
}

impl VerbsError {
    /// Returns true if the kernel took a registration for invalid: a range of a dma-buf that crosses a boundary between
    /// mappings of a device's memory is.
    #[must_use]
    pub fn is_invalid(&self) -> bool {
        matches!(self, Self::Register { source, .. } if source.raw_os_error() == Some(libc::EINVAL))
    }
}

impl fmt::Display for VerbsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLibrary { detail } => write!(
                f,
                "RDMA is off: cannot load libibverbs ({detail}); install libibverbs1 and ibverbs-providers (Debian), \
                 or libibverbs (Fedora)"
            ),
            Self::MissingSymbol { symbol } => {
                write!(f, "RDMA is off: libibverbs.so.1 lacks {symbol}; install the one of rdma-core 28 or newer")
            }
            Self::NoKernelSupport { source } => {
                write!(f, "RDMA is off: the kernel has no verbs ({source}); load the module ib_uverbs")
            }
            Self::NoPermission { device, path } => write!(
                f,
                "no permission for {device}: {path} cannot be opened for reading and writing; add the user to the \
                 group that owns it (often `rdma`), or give the container that device"
            ),
            Self::NoDeviceFile { device, path } => {
                write!(f, "{device} cannot be opened: there is no {path}; give the container that device")
            }
            Self::UnknownDevice { name, known } if known.is_empty() => {
                write!(f, "there is no RDMA device {name:?}, nor any other")
            }
            Self::UnknownDevice { name, known } => {
                write!(f, "there is no RDMA device {name:?}; there are {}", known.join(", "))
            }
            Self::Memlock { bytes, limit_bytes: Some(limit) } => write!(
                f,
                "cannot pin {bytes} bytes: this process may lock {limit} bytes in all; raise `ulimit -l` (KiB), \
                 `memlock` in /etc/security/limits.conf, LimitMEMLOCK= of the systemd unit, or give the container \
                 `--ulimit memlock=-1`"
            ),
            Self::Memlock { bytes, limit_bytes: None } => {
                write!(f, "cannot pin {bytes} bytes: memory is short, though locking it is not limited")
            }
            Self::Register { device, bytes, source } => {
                write!(f, "{device} cannot register {bytes} bytes: {source}")
            }
            Self::NoActivePort { device, ports } => {
                write!(f, "{device} has no active port ({ports}); check its cable and that its interface is up")
            }
            Self::NoGid { device, port } => write!(
                f,
                "{device} port {port} has no usable GID; for RoCE give its interface an IP address and bring it up"
            ),
            Self::NotOffered { device, what } => write!(f, "{device} does not offer {what}"),
            Self::Limit { device, what, wanted, offered } => {
                write!(f, "{device}: {wanted} {what} requested, at most {offered} supported")
            }
            Self::Transition { from, to } => write!(f, "a queue pair cannot go from {from:?} to {to:?}"),
            Self::Refused { device, what, source } => write!(f, "{device} refused to {what}: {source}"),
        }
    }
}

impl std::error::Error for VerbsError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::NoKernelSupport { source } | Self::Register { source, .. } | Self::Refused { source, .. } => {
                Some(source)
            }
            _ => None,
        }
    }
}

/// Error of a flush that did not pass everything to the device. Posted requests proceed; unsent ones stay queued with
/// their memory: move the queue pair to its error state and take their tokens with
/// [`abandon`](super::QueuePair::abandon), or flush again later.
#[derive(Debug)]
pub struct PostError {
    /// Requests that the device accepted.
    pub posted: usize,
    /// Requests that the device did not accept: still queued, in order; the first of them is the rejected one.
    pub unsent: usize,
    /// Error of the device.
    pub source: io::Error,
}

impl fmt::Display for PostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (posted, unsent, source) = (self.posted, self.unsent, &self.source);
        write!(f, "the device took {posted} requests and refused the next of {unsent}: {source}")
    }
}

impl std::error::Error for PostError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

/// Reason why a request was not queued. No state was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Refusal {
    /// The queue is full of queued and in-flight requests: retire completions first.
    Full,
    /// The batch of one flush is full: flush first.
    BatchFull,
    /// More pieces than the queue was created for.
    TooManyPieces { pieces: usize, limit: usize },
    /// More inline bytes than the queue was created for.
    TooLongInline { bytes: usize, limit: usize },
    /// Only outgoing data can be inline; a read needs a destination.
    InlineRead,
    /// A piece's memory was registered with another protection domain than the queue's.
    OtherDomain,
    /// A piece of a run is not in the memory of the run.
    OtherMemory,
    /// A piece's memory was not registered for local writes, and the request writes to it.
    NotWritable,
    /// The queue takes its receives from a shared receive queue.
    Shared,
    /// The device would reject the request in the queue pair's state.
    State(QueueState),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("the queue is full: retire completions first"),
            Self::BatchFull => f.write_str("the batch of one flush is full: flush first"),
            Self::TooManyPieces { pieces, limit } => {
                write!(f, "a request has {pieces} pieces, at most {limit} are supported")
            }
            Self::TooLongInline { bytes, limit } => write!(f, "{bytes} inline bytes, at most {limit} are supported"),
            Self::InlineRead => f.write_str("a read cannot be inline"),
            Self::OtherDomain => f.write_str("the memory is registered with another protection domain"),
            Self::OtherMemory => f.write_str("the piece is not in the memory of its run"),
            Self::NotWritable => f.write_str("the memory is registered read-only, and the request writes to it"),
            Self::Shared => f.write_str("the queue pair receives from a shared receive queue: post there"),
            Self::State(state) => write!(f, "the queue pair is in state {state:?}"),
        }
    }
}

impl std::error::Error for Refusal {}
