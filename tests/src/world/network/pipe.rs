//! One direction of a connection: frames in the queue, pieces in flight, and the payload being received.
//!
//! Bytes are read from memory when their piece is sent, not before, and reach their destination when the piece arrives.
//! So memory that is reused too early, on either side, really shows other bytes.

use std::collections::VecDeque;

use kvplane_client::{Local, SliceId};
use kvplane_proto::checksum::PayloadChecksum;
use kvplane_proto::frame::Header;
use kvplane_store::service::Hold;

/// Bytes that were copied from a device pool to memory of the host.
#[derive(Clone, Debug)]
pub(crate) struct StagedBytes {
    pub(crate) bytes: Vec<u8>,
    pub(crate) hold: Option<Hold>,
    /// Name of the copy in the ledger of the device.
    pub(crate) name: u32,
}

/// Source of a payload's bytes.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// Memory of the caller.
    Local(Local),
    /// Range of the shard's pool, with its pin.
    Pool { offset: u64, bytes: u64, hold: Option<Hold> },
    /// Bytes that were copied from the shard's device pool.
    Staged(StagedBytes),
    /// Copy of the bytes, for frames that the network duplicates.
    Copy(Vec<u8>),
}

impl Source {
    pub(crate) const fn bytes(&self) -> u64 {
        match self {
            Self::Local(local) => local.bytes,
            Self::Pool { bytes, .. } => *bytes,
            Self::Copy(bytes) | Self::Staged(StagedBytes { bytes, .. }) => bytes.len() as u64,
        }
    }
}

/// Frame in the send queue.
#[derive(Clone, Debug)]
pub(crate) struct OutgoingFrame {
    /// Header and body, encoded.
    pub(crate) head: Vec<u8>,
    pub(crate) payload: Option<Source>,
    pub(crate) head_sent: bool,
    /// Payload bytes that have left.
    pub(crate) sent: u64,
}

impl OutgoingFrame {
    pub(crate) fn new(header: &Header, body: &[u8], payload: Option<Source>) -> Self {
        let mut head = header.encode().to_vec();
        head.extend_from_slice(body);
        Self { head, payload, head_sent: false, sent: 0 }
    }
}

/// Piece in flight.
#[derive(Debug)]
pub(crate) enum Piece {
    Head(Vec<u8>),
    Chunk(Vec<u8>),
    /// The sender's end is closed.
    End,
}

/// Destination of an arriving payload.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Destination {
    Discard,
    Local { local: Local, slice: SliceId },
    Pool { offset: u64 },
    Segment { offset: u64 },
}

/// Arriving payload.
#[derive(Debug)]
pub(crate) struct IncomingPayload {
    pub(crate) header: Header,
    pub(crate) destination: Destination,
    pub(crate) done: u64,
    pub(crate) checksum: PayloadChecksum,
}

/// One direction.
#[derive(Default, Debug)]
pub(crate) struct Pipe {
    pub(crate) queue: VecDeque<OutgoingFrame>,
    pub(crate) flight: VecDeque<Piece>,
    pub(crate) flight_bytes: u64,
    pub(crate) last_arrival_ns: u64,
    pub(crate) pumping: bool,
    /// The connection is half-open: nothing arrives but the end.
    pub(crate) lost: bool,
    pub(crate) receiving: Option<IncomingPayload>,
}

impl Pipe {
    /// Drops the pieces in flight after the receiver's end. Frames in the queue belong to the sender.
    pub(crate) fn drop_flight(&mut self) {
        self.flight.clear();
        self.flight_bytes = 0;
        self.receiving = None;
    }
}
