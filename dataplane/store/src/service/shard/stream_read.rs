//! Gets: checks of object lengths, and the bytes that are returned.

use kvplane_proto::Status;
use kvplane_proto::ids::RequestId;
use kvplane_proto::message::Operation;

use super::deferrals::DeferredItem;
use crate::service::types::PeerKey;

/// Part of an object that a get reads.
#[derive(Clone, Copy, Debug)]
pub(in crate::service) enum ReadSpan {
    /// The whole object, if it is not longer than the capacity.
    Whole { capacity_bytes: u64 },
    /// A range of the object.
    Range { offset: u64, bytes: u64 },
}

impl ReadSpan {
    /// Checks that an object of this length can be returned.
    pub(in crate::service) const fn check(self, object_bytes: u64) -> Result<(), Status> {
        match self {
            Self::Whole { capacity_bytes } if object_bytes > capacity_bytes => Err(Status::BufferTooSmall),
            Self::Range { bytes: 0, .. } => Err(Status::Empty),
            Self::Range { offset, bytes } => match offset.checked_add(bytes) {
                Some(end) if end <= object_bytes => Ok(()),
                _ => Err(Status::OutOfRange),
            },
            Self::Whole { .. } => Ok(()),
        }
    }

    /// Returns the bytes that are returned of an object of this length.
    pub(in crate::service) const fn bytes_of(self, object_bytes: u64) -> u64 {
        match self {
            Self::Whole { .. } => object_bytes,
            Self::Range { bytes, .. } => bytes,
        }
    }

    pub(in crate::service) const fn operation(self) -> Operation {
        match self {
            Self::Whole { .. } => Operation::Get,
            Self::Range { .. } => Operation::GetRange,
        }
    }
}

/// Get over a stream: its peer, and the part of the object that it reads.
#[derive(Clone, Copy, Debug)]
pub(in crate::service) struct StreamRead {
    pub(in crate::service) peer: PeerKey,
    pub(in crate::service) request: RequestId,
    pub(in crate::service) wanted: ReadSpan,
    /// True where the head of a striped object is requested as such.
    pub(in crate::service) all: bool,
}

impl StreamRead {
    /// Checks that an object of this length can be returned.
    pub(in crate::service) const fn check(&self, object_bytes: u64, is_head: bool) -> Result<(), Status> {
        match (is_head, self.all, self.wanted) {
            (false, ..) | (true, true, ReadSpan::Whole { .. }) => self.wanted.check(object_bytes),
            (true, ..) => Err(Status::Striped),
        }
    }
}

/// Get that waits for its object to be in memory.
#[derive(Clone, Copy, Debug)]
pub(in crate::service) enum Reader {
    /// Answered with the object's bytes.
    Stream(StreamRead),
    /// Answered with an extent of the pool for the peer to copy from.
    Shared {
        item: DeferredItem,
        /// See [`StreamRead::all`].
        all: bool,
    },
}
