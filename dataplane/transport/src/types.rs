//! Types of the interface between drivers and hosts.

use core::fmt;

use kvplane_proto::checksum::PayloadChecksum;
use kvplane_proto::frame::{FrameError, Header};
use kvplane_sys::{CorruptRing, IoBuf};

/// Id of a connection of a driver.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct ConnectionId {
    /// Index in the driver's table.
    pub index: u32,
    /// Generation of the connection at that index.
    pub generation: u32,
}

/// Event that a driver reports to its host.
#[derive(Debug)]
pub enum Event {
    /// A peer connected to us.
    Accepted(ConnectionId),
    /// A connection that we initiated is established.
    Connected(ConnectionId),
    /// The payload with this hold was sent, or never will be.
    Sent(u64),
    /// The connection is gone and none of its I/O is in flight.
    Gone(ConnectionId, CloseCause),
}

/// Reason why a connection is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CloseCause {
    /// We closed it.
    Closed,
    /// The peer closed it, or died.
    Peer,
    /// Error of the kernel: an errno.
    Kernel(i32),
    /// The peer sent bytes that are not a frame.
    Frame(FrameError),
    /// The peer corrupted the shared ring.
    Ring(CorruptRing),
    /// Setup failed; the text gives the reason.
    Setup(String),
    /// The RDMA device or the connection on it failed; the text names it and the reason.
    Rdma(String),
    /// TLS failed, or the peer is not trusted any more; the text gives the reason and the next step.
    Tls(String),
    /// The path to the peer is unavailable, and an early retry would fail too; the text gives the reason.
    Unavailable(String),
}

impl fmt::Display for CloseCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str("closed by us"),
            Self::Peer => f.write_str("closed by the peer"),
            Self::Kernel(errno) => write!(f, "{}", std::io::Error::from_raw_os_error(*errno)),
            Self::Frame(error) => write!(f, "{error}"),
            Self::Ring(error) => write!(f, "{error}"),
            Self::Setup(why) | Self::Rdma(why) | Self::Tls(why) | Self::Unavailable(why) => f.write_str(why),
        }
    }
}

/// Next step of a connection's input.
#[derive(Debug)]
pub enum Input {
    /// A frame; its body is in the caller's scratch. The host calls `receive_payload` if the header states a payload.
    Frame(Header),
    /// The payload of the last frame is at its destination; its checksum, if the target requested it.
    Payload(Option<u64>),
    /// No more input for now.
    Wait,
}

/// Destination of a frame's payload.
#[derive(Debug)]
pub enum Target {
    /// The payload is discarded.
    Discard,
    /// One buffer, of exactly the payload's length.
    Memory {
        /// Destination buffer.
        buffer: IoBuf,
        /// True to compute the payload's checksum.
        checksum: bool,
    },
    /// Several pieces of memory, in order, together of exactly the payload's length.
    Scatter {
        /// Destination pieces. Thousands of small ones are fine.
        buffers: Vec<IoBuf>,
        /// True to compute the payload's checksum, over all pieces.
        checksum: bool,
    },
}

impl Target {
    /// Returns the first piece of the destination, if any.
    #[must_use]
    pub fn first(&self) -> Option<&IoBuf> {
        match self {
            Self::Discard => None,
            Self::Memory { buffer, .. } => Some(buffer),
            Self::Scatter { buffers, .. } => buffers.first(),
        }
    }
}

/// Returns the checksum of all pieces, as one payload.
pub(crate) fn checksum_of_pieces(pieces: &[IoBuf]) -> u64 {
    let mut checksum = PayloadChecksum::new();
    for buffer in pieces {
        buffer.region().read_with(buffer.offset(), buffer.bytes(), &mut |_, part| checksum.update(part));
    }
    checksum.finish()
}

/// Memory of a payload, in order. A single piece is the common case and costs no allocation.
#[derive(Clone, Debug)]
pub enum Pieces {
    /// A single piece.
    One(IoBuf),
    /// Several pieces.
    Many(Vec<IoBuf>),
}

impl Pieces {
    /// Returns the pieces.
    #[must_use]
    pub const fn as_slice(&self) -> &[IoBuf] {
        match self {
            Self::One(buffer) => core::slice::from_ref(buffer),
            Self::Many(buffers) => buffers.as_slice(),
        }
    }

    /// Returns the total length of all pieces, in bytes. Visits each piece.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.as_slice().iter().map(IoBuf::bytes).sum()
    }
}

impl From<IoBuf> for Pieces {
    fn from(buffer: IoBuf) -> Self {
        Self::One(buffer)
    }
}

impl From<Vec<IoBuf>> for Pieces {
    fn from(buffers: Vec<IoBuf>) -> Self {
        Self::Many(buffers)
    }
}

/// A payload to send, with its hold. If its frame's header announces a checksum of value 0, the driver computes the
/// checksum.
#[derive(Debug)]
pub struct OutgoingPayload {
    /// Memory of the payload.
    pub buffers: Pieces,
    /// Reported by [`Event::Sent`]; `None` if the sender needs no report.
    pub hold: Option<u64>,
}
