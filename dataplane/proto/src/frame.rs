//! Frame layout: a header of 64 bytes, a body of items, a payload.
//!
//! ```text
//!  0 magic u32 "KVPF"   4 version u8   5 kind u8        6 status u16
//!  8 request id u64    16 body bytes u32               20 items u32
//! 24 payload bytes u64                  32 payload checksum u64
//! 40 argument u64                       48 deadline us u32  52 flags u32
//! 56 body checksum u32                  60 header checksum u32 (of bytes 0..60)
//! ```
//!
//! Little-endian, fixed layout. The header has a checksum of its own, so a length is trusted only if the header is
//! intact. The payload's checksum travels with it and is verified by the side that stores the bytes. A decoder
//! allocates nothing.

use core::fmt;

use crate::checksum::frame_checksum;
use crate::flags::FrameFlags;
use crate::ids::RequestId;
use crate::limits::Limits;
use crate::message::{Kind, Operation};
use crate::status::Status;

/// Length of a header in bytes.
pub const HEADER_BYTES: usize = 64;
/// First bytes of every frame.
pub const MAGIC: u32 = u32::from_le_bytes(*b"KVPF");
/// Version of the frame layout and of the messages in it.
pub const VERSION: u8 = 5;

/// A decoded header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Operation of the frame, as a request or as a reply.
    pub kind: Kind,
    /// Outcome of the request, in replies; `Ok` in requests.
    pub status: Status,
    /// Request id, chosen by the client and echoed in the reply.
    pub request: RequestId,
    /// Length of the body in bytes.
    pub body_bytes: u32,
    /// Number of items in the body.
    pub items: u32,
    /// Length of the payload in bytes.
    pub payload_bytes: u64,
    /// CRC-64/NVME of the payload, valid under [`FrameFlags::CHECKSUM`].
    pub payload_checksum: u64,
    /// Epoch of the client's map in requests; a version, a length or a count in replies, as documented with each
    /// operation.
    pub argument: u64,
    /// Time left to complete the request in microseconds; 0 for the default of the limits.
    pub deadline_us: u32,
    /// Flags of the frame.
    pub flags: FrameFlags,
    /// CRC-32C of the body.
    pub body_checksum: u32,
}

/// Error of a malformed frame. The connection that delivered it cannot be read any further.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FrameError {
    /// The bytes do not begin with [`MAGIC`]: another protocol.
    Magic(u32),
    /// The frame has a version that this build does not support.
    Version(u8),
    /// The header's checksum does not match.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    HeaderChecksum { stated: u32, computed: u32 },
    /// The body's checksum does not match.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    BodyChecksum { stated: u32, computed: u32 },
    /// The kind is unknown to this version.
    Kind(u8),
    /// The status is unknown to this version.
    Status(u16),
    /// A flag is unknown to this version.
    Flags(u32),
    /// A length or a count exceeds its limit.
    #[allow(missing_docs, reason = "the fields are named for what they hold")]
    TooLong { field: &'static str, value: u64, limit: u64 },
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Magic(found) => {
                write!(f, "not a kvplane frame: starts with {found:#010x} instead of {MAGIC:#010x}")
            }
            Self::Version(found) => {
                write!(f, "frame version {found}, but this build speaks {VERSION}: upgrade the older side")
            }
            Self::HeaderChecksum { stated, computed } => {
                write!(f, "header checksum {computed:#010x} does not match the stated {stated:#010x}")
            }
            Self::BodyChecksum { stated, computed } => {
                write!(f, "body checksum {computed:#010x} does not match the stated {stated:#010x}")
            }
            Self::Kind(found) => write!(f, "unknown frame kind {found}"),
            Self::Status(found) => write!(f, "unknown status {found}"),
            Self::Flags(found) => write!(f, "unknown flags {found:#x}"),
            Self::TooLong { field, value, limit } => {
                write!(f, "{field} is {value}, over the limit of {limit}")
            }
        }
    }
}

impl std::error::Error for FrameError {}

impl Header {
    /// Returns a request of `kind` without body and payload.
    #[must_use]
    pub const fn request(kind: Kind, request: RequestId) -> Self {
        Self {
            kind,
            status: Status::Ok,
            request,
            body_bytes: 0,
            items: 0,
            payload_bytes: 0,
            payload_checksum: 0,
            argument: 0,
            deadline_us: 0,
            flags: FrameFlags::NONE,
            body_checksum: 0,
        }
    }

    /// Returns the reply to a request of `kind`, without body and payload.
    #[must_use]
    pub const fn reply(kind: Kind, request: RequestId, status: Status) -> Self {
        let mut header = Self::request(kind, request);
        header.status = status;
        header
    }

    /// Sets the fields that describe the body: its length, item count and checksum.
    #[must_use]
    pub fn with_body(mut self, body: &[u8], items: usize) -> Self {
        assert!(body.len() <= Limits::BODY_BYTES, "body of {} bytes is over the limit of a frame", body.len());
        assert!(items <= self.most_items(), "body of {items} items is over the limit of its operation");
        self.body_bytes = crate::narrowing::length_u32(body.len());
        self.items = crate::narrowing::length_u32(items);
        self.body_checksum = frame_checksum(body);
        self
    }

    /// Sets the fields that describe the payload; `checksum` is `None` where the bytes are verified by other means.
    #[must_use]
    pub const fn with_payload(mut self, bytes: u64, checksum: Option<u64>) -> Self {
        self.payload_bytes = bytes;
        if let Some(checksum) = checksum {
            self.payload_checksum = checksum;
            self.flags = self.flags.with(FrameFlags::CHECKSUM, true);
        }
        self
    }

    /// Sets the argument.
    #[must_use]
    pub const fn with_argument(mut self, argument: u64) -> Self {
        self.argument = argument;
        self
    }

    /// Returns the payload checksum, if the frame has one.
    #[must_use]
    pub const fn checksum(&self) -> Option<u64> {
        if self.flags.has(FrameFlags::CHECKSUM) { Some(self.payload_checksum) } else { None }
    }

    /// Returns the number of reply frames of a request: one for each item if each item has a payload of its own, else
    /// one; none for `Abort`, `Release` and `MeshFrame`.
    #[must_use]
    pub const fn replies(&self) -> u32 {
        match self.kind {
            Kind::Request(Operation::Get | Operation::GetRange | Operation::Read) => self.items,
            Kind::Request(Operation::Abort | Operation::Release | Operation::MeshFrame) | Kind::Reply(_) => 0,
            Kind::Request(_) => 1,
        }
    }

    /// Returns the limit of items in the body for this operation.
    #[must_use]
    pub const fn most_items(&self) -> usize {
        let (Kind::Request(operation) | Kind::Reply(operation)) = self.kind;
        match operation {
            Operation::Exists | Operation::Size | Operation::Remove | Operation::RemoveCopy => {
                Limits::QUESTIONS_PER_FRAME
            }
            _ => Limits::ITEMS_PER_FRAME,
        }
    }

    /// Encodes the header for the wire.
    #[must_use]
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        out[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4] = VERSION;
        out[5] = self.kind.code();
        out[6..8].copy_from_slice(&(self.status as u16).to_le_bytes());
        out[8..16].copy_from_slice(&self.request.to_bits().to_le_bytes());
        out[16..20].copy_from_slice(&self.body_bytes.to_le_bytes());
        out[20..24].copy_from_slice(&self.items.to_le_bytes());
        out[24..32].copy_from_slice(&self.payload_bytes.to_le_bytes());
        out[32..40].copy_from_slice(&self.payload_checksum.to_le_bytes());
        out[40..48].copy_from_slice(&self.argument.to_le_bytes());
        out[48..52].copy_from_slice(&self.deadline_us.to_le_bytes());
        out[52..56].copy_from_slice(&self.flags.bits().to_le_bytes());
        out[56..60].copy_from_slice(&self.body_checksum.to_le_bytes());
        let checksum = frame_checksum(&out[..60]);
        out[60..64].copy_from_slice(&checksum.to_le_bytes());
        out
    }

    /// Decodes a header and validates everything that can be validated without the body.
    ///
    /// # Errors
    /// Returns an error if the bytes are not an intact header of this version within the limits.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, FrameError> {
        let magic = word32(bytes, 0);
        if magic != MAGIC {
            return Err(FrameError::Magic(magic));
        }
        // The version is checked before the checksum: another version may compute the checksum differently.
        if bytes[4] != VERSION {
            return Err(FrameError::Version(bytes[4]));
        }
        let (stated, computed) = (word32(bytes, 60), frame_checksum(&bytes[..60]));
        if stated != computed {
            return Err(FrameError::HeaderChecksum { stated, computed });
        }
        let code = u16::from_le_bytes([bytes[6], bytes[7]]);
        let flags = word32(bytes, 52);
        let header = Self {
            kind: Kind::from_code(bytes[5]).ok_or(FrameError::Kind(bytes[5]))?,
            status: Status::from_code(code).ok_or(FrameError::Status(code))?,
            request: RequestId::from_bits(word64(bytes, 8)),
            body_bytes: word32(bytes, 16),
            items: word32(bytes, 20),
            payload_bytes: word64(bytes, 24),
            payload_checksum: word64(bytes, 32),
            argument: word64(bytes, 40),
            deadline_us: word32(bytes, 48),
            flags: FrameFlags::from_bits(flags).ok_or(FrameError::Flags(flags))?,
            body_checksum: word32(bytes, 56),
        };
        header.check_limits()?;
        Ok(header)
    }

    fn check_limits(&self) -> Result<(), FrameError> {
        for (field, value, limit) in [
            ("body length", u64::from(self.body_bytes), Limits::BODY_BYTES as u64),
            ("item count", u64::from(self.items), self.most_items() as u64),
            ("payload length", self.payload_bytes, Limits::PAYLOAD_BYTES),
        ] {
            if value > limit {
                return Err(FrameError::TooLong { field, value, limit });
            }
        }
        Ok(())
    }

    /// Verifies the body against the checksum in the header.
    ///
    /// # Errors
    /// Returns an error if the checksum does not match.
    pub fn check_body(&self, body: &[u8]) -> Result<(), FrameError> {
        debug_assert_eq!(body.len(), self.body_bytes as usize);
        let computed = frame_checksum(body);
        if computed != self.body_checksum {
            return Err(FrameError::BodyChecksum { stated: self.body_checksum, computed });
        }
        Ok(())
    }
}

fn word32(bytes: &[u8; HEADER_BYTES], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn word64(bytes: &[u8; HEADER_BYTES], at: usize) -> u64 {
    u64::from(word32(bytes, at)) | u64::from(word32(bytes, at + 4)) << 32
}
