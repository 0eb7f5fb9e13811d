//! What drivers and hosts say to each other.

use core::fmt;

use kvplane_proto::checksum::PayloadChecksum;
use kvplane_proto::frame::{FrameError, Header};
use kvplane_sys::{CorruptRing, IoBuf};

/// A connection of a driver.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub struct ConnectionId {
    /// Position in the driver's table.
    pub index: u32,
    /// Which connection at that position.
    pub generation: u32,
}

/// Something happened that the host did not ask for by a call.
#[derive(Debug)]
pub enum Event {
    /// A peer connected to us.
    Accepted(ConnectionId),
    /// A connection that we began is there.
    Connected(ConnectionId),
    /// The payload that was sent with this hold has left, or never will.
    Sent(u64),
    /// The connection is gone and none of its I/O is left.
    Gone(ConnectionId, CloseCause),
}

/// Why a connection is gone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CloseCause {
    /// We closed it.
    Closed,
    /// The peer closed it, or died.
    Peer,
    /// The kernel says: an errno.
    Kernel(i32),
    /// The peer sent what is not a frame.
    Frame(FrameError),
    /// The peer broke the shared ring.
    Ring(CorruptRing),
    /// It could not be set up: says why.
    Setup(String),
    /// The RDMA device or the connection on it failed: says which and why.
    Rdma(String),
    /// It cannot be sealed, or not be trusted any more: says why and what to do.
    Tls(String),
    /// There is no such way to the peer from here, and trying again soon would end the same: says why.
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

/// The next step of a connection's input.
#[derive(Debug)]
pub enum Input {
    /// A frame; its body is in the caller's scratch. Answer with `receive_payload` when the header states one.
    Frame(Header),
    /// The payload of the last frame is where it was sent to; its target wanted the checksum.
    Payload(Option<u64>),
    /// Nothing more at the moment.
    Wait,
}

/// Where the payload of a frame goes.
#[derive(Debug)]
pub enum Target {
    /// Nowhere.
    Discard,
    /// Into this memory, of exactly the payload's length.
    Memory {
        /// The memory.
        buffer: IoBuf,
        /// Whether to sum it up.
        checksum: bool,
    },
    /// Into these pieces of memory, in order, together of exactly the payload's length.
    Scatter {
        /// The memory. Thousands of small pieces are fine.
        buffers: Vec<IoBuf>,
        /// Whether to sum the payload up, as a whole.
        checksum: bool,
    },
}

impl Target {
    /// The first piece of its memory, if there is one.
    #[must_use]
    pub fn first(&self) -> Option<&IoBuf> {
        match self {
            Self::Discard => None,
            Self::Memory { buffer, .. } => Some(buffer),
            Self::Scatter { buffers, .. } => buffers.first(),
        }
    }
}

/// The checksum of all pieces, as one payload.
pub(crate) fn checksum_of_pieces(pieces: &[IoBuf]) -> u64 {
    let mut checksum = PayloadChecksum::new();
    for buffer in pieces {
        buffer.region().read_with(buffer.offset(), buffer.bytes(), &mut |_, part| checksum.update(part));
    }
    checksum.finish()
}

/// The memory of a payload, in order. One piece is the common case and costs no allocation.
#[derive(Clone, Debug)]
pub enum Pieces {
    /// In one piece.
    One(IoBuf),
    /// In several.
    Many(Vec<IoBuf>),
}

impl Pieces {
    /// The pieces.
    #[must_use]
    pub const fn as_slice(&self) -> &[IoBuf] {
        match self {
            Self::One(buffer) => core::slice::from_ref(buffer),
            Self::Many(buffers) => buffers.as_slice(),
        }
    }

    /// Bytes of all pieces. Looks at each.
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

/// A payload to send, and what to say when it has left. Where its frame's header announces a checksum of value 0, the
/// driver computes it.
#[derive(Debug)]
pub struct OutgoingPayload {
    /// The memory.
    pub buffers: Pieces,
    /// For [`Event::Sent`]; `None` when nobody needs to know.
    pub hold: Option<u64>,
}
