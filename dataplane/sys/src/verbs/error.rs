//! Why verbs refuse, in the words that tell an operator what to change.

use super::states::QueueState;
use std::fmt;
use std::io;

/// An error of the control path: finding devices, registering, connecting.
#[derive(Debug)]
pub enum VerbsError {
    /// libibverbs is not installed, or cannot be loaded.
    NoLibrary {
        /// What the loader said.
        detail: String,
    },
    /// A library of that name lacks a function.
    MissingSymbol {
        /// The function and its version.
        symbol: String,
    },
    /// The kernel has no verbs: `ib_uverbs` is not loaded.
    NoKernelSupport {
        /// What the library said.
        source: io::Error,
    },
    /// We may not open the device's file.
    NoPermission {
        /// The device.
        device: String,
        /// Its file.
        path: String,
    },
    /// The kernel knows the device, but its file is not there: we run in a container that was not given it.
    NoDeviceFile {
        /// The device.
        device: String,
        /// Its file.
        path: String,
    },
    /// There is no device of that name.
    UnknownDevice {
        /// The name asked for.
        name: String,
        /// The devices there are.
        known: Vec<String>,
    },
    /// The kernel did not let us pin that much memory.
    Memlock {
        /// What was to be registered.
        bytes: u64,
        /// This process's limit; `None` when it is unlimited, so that memory itself must be short.
        limit_bytes: Option<u64>,
    },
    /// Memory could not be registered.
    Register {
        /// The device.
        device: String,
        /// What was to be registered.
        bytes: u64,
        /// What the kernel said.
        source: io::Error,
    },
    /// No port of the device is active.
    NoActivePort {
        /// The device.
        device: String,
        /// Each port and its state.
        ports: String,
    },
    /// A port has no address that a peer could reach.
    NoGid {
        /// The device.
        device: String,
        /// The port.
        port: u8,
    },
    /// The device or the library cannot do this.
    NotOffered {
        /// The device.
        device: String,
        /// What it lacks.
        what: &'static str,
    },
    /// More was asked for than there is, or than can be.
    Limit {
        /// The device.
        device: String,
        /// Of what.
        what: &'static str,
        /// How much was asked for.
        wanted: u64,
        /// How much there is.
        offered: u64,
    },
    /// A queue pair was asked to do what its state does not allow.
    Transition {
        /// Where it is.
        from: QueueState,
        /// Where it should go.
        to: QueueState,
    },
    /// The device refused a call.
    Refused {
        /// The device.
        device: String,
        /// Which call, for what.
        what: String,
        /// What it said.
        source: io::Error,
    },
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
                write!(f, "there is no RDMA device {name:?}; there are none at all")
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
                write!(f, "{device}: {wanted} {what} asked for, {offered} is the most")
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

/// A flush that did not hand everything to the device. What was posted goes its way; what was not is still unsent and
/// its memory is held: move the queue pair to its error state and take its tokens with
/// [`abandon`](super::QueuePair::abandon), or flush again later.
#[derive(Debug)]
pub struct PostError {
    /// Requests that the device took.
    pub posted: usize,
    /// Requests that it did not take: they are still queued, in order, the first of them the one it refused.
    pub unsent: usize,
    /// Why.
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

/// Why a request was not queued. Nothing was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// As many requests as the queue holds are queued or on their way: retire completions first.
    Full,
    /// As many requests as one flush takes are queued: flush first.
    BatchFull,
    /// More pieces than the queue was made for.
    TooManyPieces {
        /// In the request.
        pieces: usize,
        /// At most.
        limit: usize,
    },
    /// More bytes inline than the queue was made for.
    TooLongInline {
        /// In the request.
        bytes: usize,
        /// At most.
        limit: usize,
    },
    /// Only what is sent can be inline; a read has to say where to.
    InlineRead,
    /// A piece's memory was registered with another protection domain than the queue's.
    OtherDomain,
    /// A piece of a run is not of the memory that the run is of.
    OtherMemory,
    /// A piece's memory was not registered for the device to write, and the request writes to it.
    NotWritable,
    /// The queue takes its receives from a shared receive queue.
    Shared,
    /// The queue pair is in a state in which the device would not take the request.
    State(QueueState),
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("the queue is full: retire completions first"),
            Self::BatchFull => f.write_str("as many requests as one flush takes are queued: flush first"),
            Self::TooManyPieces { pieces, limit } => {
                write!(f, "{pieces} pieces in a request, {limit} is the most")
            }
            Self::TooLongInline { bytes, limit } => write!(f, "{bytes} bytes inline, {limit} is the most"),
            Self::InlineRead => f.write_str("a read cannot be inline"),
            Self::OtherDomain => f.write_str("the memory is registered with another protection domain"),
            Self::OtherMemory => f.write_str("the piece is not of the memory that its run is of"),
            Self::NotWritable => f.write_str("the memory is registered read-only, and the request writes to it"),
            Self::Shared => f.write_str("the queue pair receives from a shared receive queue: post there"),
            Self::State(state) => write!(f, "the queue pair is in state {state:?}"),
        }
    }
}

impl std::error::Error for Refusal {}
