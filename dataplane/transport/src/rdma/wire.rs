//! Wire format of messages between two RDMA drivers: the envelope of a frame, and places in memory.
//!
//! ```text
//!  0 magic u32 "KVPR"   4 version u8   5 kind u8   6 payload u8   7 flags u8
//!  8 credits u16       10 sources u16 12 offers u16 14 zero u16
//! 16 content bytes u32 20 zero u32    24 token u64
//! ```
//!
//! Little-endian, fixed layout, 32 bytes, followed by the content. The content of a frame is a *record*: `offers` and
//! then `sources` places of 32 bytes, the frame's header and body, and its payload if that is short. A record that is
//! longer than a message is continued in messages of kind `More`. The link's hardware checks its packets; the frame's
//! own checksums are verified nevertheless.

use core::fmt;

use kvplane_proto::frame::HEADER_BYTES;
use kvplane_proto::{Limits, RequestId, Status};

/// Size of an envelope, in bytes.
pub(super) const ENVELOPE_BYTES: usize = 32;
/// Size of a place, in bytes.
pub(super) const PLACE_BYTES: usize = 32;
/// Size of the reply about a segment's key, in bytes.
pub(super) const KEY_BYTES: usize = 32;
/// Size of the reply about the key of a part of a segment, in bytes.
pub(super) const PART_KEY_BYTES: usize = KEY_BYTES + 16;
/// First bytes of every message.
const MAGIC: u32 = u32::from_le_bytes(*b"KVPR");
/// Version of this layout.
pub(super) const VERSION: u8 = 1;
/// Largest payload that is part of its frame's record, in bytes.
pub(super) const EAGER_BYTES: usize = 4096;
/// Limit of places that a frame names as sources of its own payload.
pub(super) const SOURCES: usize = 16;
/// Limit of places that a frame offers for answers.
pub(super) const OFFERS: usize = 2048;
/// Largest record, in bytes.
pub(super) const RECORD_BYTES: usize =
    (OFFERS + SOURCES) * PLACE_BYTES + HEADER_BYTES + Limits::BODY_BYTES + EAGER_BYTES;
/// Flag: the record is continued in the next message of kind `More`.
const FLAG_MORE: u8 = 1;
/// Flag: another part of the payload follows this one.
const FLAG_PARTS: u8 = 2;

/// Kind of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum MessageKind {
    /// A frame, or the start of its record.
    Frame = 1,
    /// Continuation of a record.
    More = 2,
    /// Credits only.
    Credit = 3,
    /// The payload with this token was fetched, or its current part was.
    Pulled = 4,
    /// Announces the next part of the payload with this token.
    Part = 5,
    /// Requests the key of this segment; with an offset of eight bytes, that of the part around it.
    AskKey = 6,
    /// Reply to `AskKey`.
    Key = 7,
    /// Notifies the peer that this segment is gone.
    SegmentGone = 8,
    /// Requests that the writes into this segment become visible on the device whose memory it is.
    Flush = 9,
    /// Reply to `Flush`.
    Flushed = 10,
}

/// Transfer method of a frame's payload.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum PayloadKind {
    /// No payload.
    None = 0,
    /// The payload is part of the record.
    Eager = 1,
    /// The payload was written into the memory that the request offered.
    Pushed = 2,
    /// The payload is at the sources, to be fetched.
    Pull = 3,
}

/// A decoded envelope.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Envelope {
    pub(super) kind: MessageKind,
    pub(super) payload: PayloadKind,
    /// The record is continued in the next message.
    pub(super) more: bool,
    /// The sources are only a part of the payload.
    pub(super) parts: bool,
    /// Receives that the sender of the message has reposted since its last message.
    pub(super) credits: u16,
    pub(super) sources: u16,
    pub(super) offers: u16,
    /// Bytes after the envelope in this message.
    pub(super) content_bytes: u32,
    /// Token of the payload, or id of a segment.
    pub(super) token: u64,
}

/// A range of memory that its owner opens to the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RemoteRange {
    /// Request whose answer goes there; zero for sources.
    pub(super) request: RequestId,
    pub(super) address: u64,
    pub(super) bytes: u64,
    pub(super) key: u32,
}

/// Remote key of a segment, or the reason why there is none.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct SegmentKey {
    pub(super) status: Status,
    pub(super) writable: bool,
    /// Writes are complete only when the owner has flushed the device whose memory it is.
    pub(super) flush: bool,
    pub(super) key: u32,
    /// Address of the segment's first byte.
    pub(super) address: u64,
    /// Length of the segment.
    pub(super) bytes: u64,
    /// Offset of the first byte that the key is for.
    pub(super) start: u64,
    /// Offset behind the last byte that the key is for.
    pub(super) end: u64,
}

/// Decoding error of a message. The link that received it cannot be used any further.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WireError {
    Short(usize),
    Magic(u32),
    Version(u8),
    Field(&'static str, u64),
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Short(bytes) => write!(f, "an RDMA message of {bytes} bytes does not have its stated length"),
            Self::Magic(found) => write!(f, "not an RDMA message of kvplane: it starts with {found:#010x}"),
            Self::Version(found) => {
                write!(f, "RDMA message version {found}, but this build speaks {VERSION}: upgrade the older side")
            }
            Self::Field(field, value) => write!(f, "{field} of an RDMA message is {value}, which has no meaning"),
        }
    }
}

impl MessageKind {
    const ALL: [Self; 10] = [
        Self::Frame,
        Self::More,
        Self::Credit,
        Self::Pulled,
        Self::Part,
        Self::AskKey,
        Self::Key,
        Self::SegmentGone,
        Self::Flush,
        Self::Flushed,
    ];
}

impl Envelope {
    pub(super) const fn new(kind: MessageKind, token: u64) -> Self {
        Self {
            kind,
            payload: PayloadKind::None,
            more: false,
            parts: false,
            credits: 0,
            sources: 0,
            offers: 0,
            content_bytes: 0,
            token,
        }
    }

    /// Encodes the envelope.
    pub(super) fn encode(&self) -> [u8; ENVELOPE_BYTES] {
        let mut out = [0; ENVELOPE_BYTES];
        out[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4] = VERSION;
        out[5] = self.kind as u8;
        out[6] = self.payload as u8;
        out[7] = if self.more { FLAG_MORE } else { 0 } | if self.parts { FLAG_PARTS } else { 0 };
        out[8..10].copy_from_slice(&self.credits.to_le_bytes());
        out[10..12].copy_from_slice(&self.sources.to_le_bytes());
        out[12..14].copy_from_slice(&self.offers.to_le_bytes());
        out[16..20].copy_from_slice(&self.content_bytes.to_le_bytes());
        out[24..32].copy_from_slice(&self.token.to_le_bytes());
        out
    }

    /// Decodes the envelope at the front of a message of `message_bytes` bytes, and validates it as far as possible
    /// without the content.
    pub(super) fn decode(front: &[u8], message_bytes: usize) -> Result<Self, WireError> {
        let Some(bytes) = front.first_chunk::<ENVELOPE_BYTES>() else { return Err(WireError::Short(message_bytes)) };
        let magic = word32(bytes, 0);
        if magic != MAGIC {
            return Err(WireError::Magic(magic));
        }
        if bytes[4] != VERSION {
            return Err(WireError::Version(bytes[4]));
        }
        let kind = MessageKind::ALL.into_iter().find(|kind| *kind as u8 == bytes[5]);
        let payloads = [PayloadKind::None, PayloadKind::Eager, PayloadKind::Pushed, PayloadKind::Pull];
        let payload = payloads.into_iter().find(|payload| *payload as u8 == bytes[6]);
        if bytes[7] & !(FLAG_MORE | FLAG_PARTS) != 0 {
            return Err(WireError::Field("the flags", bytes[7].into()));
        }
        let envelope = Self {
            kind: kind.ok_or(WireError::Field("the kind", bytes[5].into()))?,
            payload: payload.ok_or(WireError::Field("the payload's kind", bytes[6].into()))?,
            more: bytes[7] & FLAG_MORE != 0,
            parts: bytes[7] & FLAG_PARTS != 0,
            credits: word16(bytes, 8),
            sources: word16(bytes, 10),
            offers: word16(bytes, 12),
            content_bytes: word32(bytes, 16),
            token: word64(bytes, 24),
        };
        envelope.check(message_bytes)?;
        Ok(envelope)
    }

    fn check(&self, message_bytes: usize) -> Result<(), WireError> {
        if self.content_bytes as usize != message_bytes.wrapping_sub(ENVELOPE_BYTES) {
            return Err(WireError::Short(message_bytes));
        }
        if usize::from(self.sources) > SOURCES {
            return Err(WireError::Field("the number of sources", self.sources.into()));
        }
        if usize::from(self.offers) > OFFERS {
            return Err(WireError::Field("the number of offers", self.offers.into()));
        }
        if (self.payload == PayloadKind::Pull || self.kind == MessageKind::Part) != (self.sources > 0) {
            return Err(WireError::Field("the number of sources", self.sources.into()));
        }
        Ok(())
    }

    /// Returns the size of the places at the start of the record, in bytes.
    pub(super) fn places_bytes(&self) -> usize {
        (usize::from(self.offers) + usize::from(self.sources)) * PLACE_BYTES
    }
}

impl RemoteRange {
    pub(super) fn encode(&self, out: &mut Vec<u8>) {
        for word in [self.request.to_bits(), self.address, self.bytes, u64::from(self.key)] {
            out.extend_from_slice(&word.to_le_bytes());
        }
    }

    /// Decodes a place; returns `None` for an invalid range.
    fn decode(bytes: &[u8]) -> Option<Self> {
        let place = Self {
            request: RequestId::from_bits(word64(bytes, 0)),
            address: word64(bytes, 8),
            bytes: word64(bytes, 16),
            key: u32::try_from(word64(bytes, 24)).ok()?,
        };
        let whole = place.bytes > 0 && place.bytes <= Limits::PAYLOAD_BYTES;
        (whole && place.address.checked_add(place.bytes).is_some()).then_some(place)
    }

    /// Decodes all places of `bytes`, whose length is a multiple of the size of a place.
    pub(super) fn decode_all(bytes: &[u8]) -> Result<Vec<Self>, WireError> {
        let places: Option<Vec<Self>> = bytes.chunks_exact(PLACE_BYTES).map(Self::decode).collect();
        places.ok_or(WireError::Field("a place", 0))
    }
}

impl SegmentKey {
    pub(super) const fn refused(status: Status) -> Self {
        Self::whole(status, 0, 0, 0)
    }

    /// Returns a key that is for a whole segment, and permits to read it.
    pub(super) const fn whole(status: Status, key: u32, address: u64, bytes: u64) -> Self {
        Self { status, writable: false, flush: false, key, address, bytes, start: 0, end: bytes }
    }

    /// Returns true if the key is for the byte at this offset, or none of its segment can be.
    #[inline]
    pub(super) const fn is_of(&self, offset: u64) -> bool {
        !self.is_part() || offset >= self.bytes || (offset >= self.start && offset < self.end)
    }

    /// Returns true if the key is for a part of its segment only.
    pub(super) const fn is_part(&self) -> bool {
        self.start > 0 || self.end < self.bytes
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; if self.is_part() { PART_KEY_BYTES } else { KEY_BYTES }];
        out[0..2].copy_from_slice(&(self.status as u16).to_le_bytes());
        out[2] = self.writable.into();
        out[3] = self.flush.into();
        out[4..8].copy_from_slice(&self.key.to_le_bytes());
        out[8..16].copy_from_slice(&self.address.to_le_bytes());
        out[16..24].copy_from_slice(&self.bytes.to_le_bytes());
        if self.is_part() {
            out[32..40].copy_from_slice(&self.start.to_le_bytes());
            out[40..48].copy_from_slice(&self.end.to_le_bytes());
        }
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        if !matches!(bytes.len(), KEY_BYTES | PART_KEY_BYTES) {
            return Err(WireError::Short(bytes.len()));
        }
        let (code, length) = (word16(bytes, 0), word64(bytes, 16));
        let is_part = bytes.len() == PART_KEY_BYTES;
        let (start, end) = if is_part { (word64(bytes, 32), word64(bytes, 40)) } else { (0, length) };
        let key = Self {
            status: Status::from_code(code).ok_or(WireError::Field("the status", code.into()))?,
            writable: bytes[2] != 0,
            flush: bytes[3] != 0,
            key: word32(bytes, 4),
            address: word64(bytes, 8),
            bytes: length,
            start,
            end,
        };
        if key.address.checked_add(key.bytes).is_none() {
            return Err(WireError::Field("the segment's address", key.address));
        }
        if is_part && (start >= end || end > length) {
            return Err(WireError::Field("the part of the segment", start));
        }
        Ok(key)
    }
}

pub(super) fn word16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

pub(super) fn word32(bytes: &[u8], at: usize) -> u32 {
    u32::from(word16(bytes, at)) | u32::from(word16(bytes, at + 2)) << 16
}

pub(super) fn word64(bytes: &[u8], at: usize) -> u64 {
    u64::from(word32(bytes, at)) | u64::from(word32(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn kinds() -> impl Strategy<Value = MessageKind> {
        proptest::sample::select(MessageKind::ALL.to_vec())
    }

    #[test]
    fn the_layout_stays() {
        let envelope = Envelope {
            kind: MessageKind::Frame,
            payload: PayloadKind::Pull,
            more: true,
            parts: false,
            credits: 0x0102,
            sources: 3,
            offers: 0x0405,
            content_bytes: 0,
            token: 0x1122_3344_5566_7788,
        };
        let golden: [u8; ENVELOPE_BYTES] = [
            0x4b, 0x56, 0x50, 0x52, 1, 1, 3, 1, 0x02, 0x01, 3, 0, 0x05, 0x04, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x88, 0x77,
            0x66, 0x55, 0x44, 0x33, 0x22, 0x11,
        ];
        assert_eq!(envelope.encode(), golden);
        assert_eq!(Envelope::decode(&golden, ENVELOPE_BYTES), Ok(envelope));
        let mut out = Vec::new();
        let request = RequestId { index: 1, generation: 2 };
        RemoteRange { request, address: 0x10_0000, bytes: 0x2000, key: 0x0304_0506 }.encode(&mut out);
        let golden: [u8; PLACE_BYTES] =
            [1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0x20, 0, 0, 0, 0, 0, 0, 6, 5, 4, 3, 0, 0, 0, 0];
        assert_eq!(out, golden);
        let key = SegmentKey { writable: true, ..SegmentKey::whole(Status::Ok, 0x0a0b_0c0d, 0x5000, 0x600) };
        let golden: [u8; KEY_BYTES] = [
            0, 0, 1, 0, 0x0d, 0x0c, 0x0b, 0x0a, 0, 0x50, 0, 0, 0, 0, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0,
        ];
        assert_eq!((key.encode(), SegmentKey::decode(&golden)), (golden.to_vec(), Ok(key)));
        let part = SegmentKey { flush: true, start: 0x200, end: 0x400, ..key };
        let mut golden = golden.to_vec();
        golden[3] = 1;
        golden.extend_from_slice(&[0, 2, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0]);
        assert_eq!((part.encode(), SegmentKey::decode(&golden)), (golden, Ok(part)));
        let beyond = SegmentKey { end: 0x601, ..part };
        assert!(SegmentKey::decode(&beyond.encode()).is_err());
    }

    proptest! {
        #[test]
        fn envelopes_survive(kind in kinds(), credits: u16, token: u64, more: bool, content in 0usize..64) {
            let sources = u16::from(kind == MessageKind::Part);
            let content_bytes = content as u32;
            let envelope = Envelope { credits, more, sources, content_bytes, ..Envelope::new(kind, token) };
            let mut message = envelope.encode().to_vec();
            message.resize(ENVELOPE_BYTES + content, 0xaa);
            prop_assert_eq!(Envelope::decode(&message, message.len()), Ok(envelope));
            message.push(0);
            prop_assert!(Envelope::decode(&message, message.len()).is_err(), "longer than it says");
        }

        #[test]
        fn any_bytes_are_decoded_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = Envelope::decode(&bytes, bytes.len());
            let _ = SegmentKey::decode(&bytes);
            let _ = RemoteRange::decode_all(&bytes[..bytes.len() / PLACE_BYTES * PLACE_BYTES]);
        }
    }
}
