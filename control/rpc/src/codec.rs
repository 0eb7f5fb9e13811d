//! Frames of the control protocol: a fixed header, then a body in bincode's fixed-integer layout.
//!
//! | bytes | field |
//! |---|---|
//! | 0..4 | magic `KVPC` |
//! | 4..6 | version, little-endian, 1 |
//! | 6..8 | kind of message |
//! | 8..12 | bytes of the body |
//!
//! The header is decoded by hand before anything is allocated, and a body is decoded under a limit that bounds every
//! allocation. Trailing bytes are an error, as bincode alone would ignore them. There is no checksum: TLS authenticates
//! every byte. Kinds and enum tags are append-only, and golden bytes in the tests pin the layout; another crate that
//! writes the same layout can replace bincode without a change on the wire.

use std::fmt;

use bincode::config;
use bincode::{Decode, Encode};

use kvplane_proto::narrowing::length_u32;

use crate::limits::{LARGE_BODY_BYTES, SMALL_BODY_BYTES};

/// Bytes of a header.
pub const HEADER_BYTES: usize = 12;

/// First bytes of every frame.
pub const MAGIC: [u8; 4] = *b"KVPC";

/// Version of the frame and of all bodies; ALPN carries it too, so a mismatch is found before a frame is sent.
pub const VERSION: u16 = 1;

/// A message: its kind and the size class of its body.
pub trait Message: Encode + Decode<()> {
    /// The kind in the header.
    const KIND: u16;
    /// True if the body's limit is [`LARGE_BODY_BYTES`] instead of [`SMALL_BODY_BYTES`].
    const LARGE: bool;

    /// The largest body, in bytes.
    const LIMIT_BYTES: usize = if Self::LARGE { LARGE_BODY_BYTES } else { SMALL_BODY_BYTES };
}

/// Error of encoding or decoding a message.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum CodecError {
    /// Fewer bytes than a header.
    Short { bytes: usize },
    /// The first bytes are not [`MAGIC`].
    Magic([u8; 4]),
    /// A frame of another version.
    Version(u16),
    /// A kind that is unknown or not expected here.
    Kind(u16),
    /// The body is, or would be, above its limit.
    TooLarge { kind: u16, bytes: usize, limit_bytes: usize },
    /// The frame holds more or fewer bytes than its header says, or than its body needs.
    Length {
        kind: u16,
        /// Bytes that the header announces, or that decoding consumed.
        expected_bytes: usize,
        /// Bytes that the frame holds.
        found_bytes: usize,
    },
    /// The body is malformed.
    Body {
        kind: u16,
        /// The decoder's error.
        reason: String,
    },
}

impl fmt::Display for CodecError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short { bytes } => {
                write!(f, "a frame of {bytes} bytes is shorter than its {HEADER_BYTES} byte header")
            }
            Self::Magic(found) => {
                write!(f, "a frame that starts with {found:02x?} is not of this protocol")
            }
            Self::Version(found) => {
                write!(f, "a frame of version {found}; this side speaks version {VERSION}")
            }
            Self::Kind(kind) => write!(f, "a message of kind {kind:#06x} is not expected here"),
            Self::TooLarge { kind, bytes, limit_bytes } => {
                write!(f, "a message of kind {kind:#06x} has a body of {bytes} bytes; the limit is {limit_bytes}")
            }
            Self::Length { kind, expected_bytes, found_bytes } => {
                write!(f, "a message of kind {kind:#06x} holds {found_bytes} bytes of body instead of {expected_bytes}")
            }
            Self::Body { kind, reason } => {
                write!(f, "a message of kind {kind:#06x} is malformed: {reason}")
            }
        }
    }
}

impl std::error::Error for CodecError {}

/// A decoded header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Kind of message.
    pub kind: u16,
    /// Bytes that follow the header.
    pub body_bytes: usize,
}

impl Header {
    /// Decodes the header from the first [`HEADER_BYTES`] of `frame`.
    ///
    /// # Errors
    /// When `frame` is shorter than a header, or of another protocol or version.
    pub fn decode(frame: &[u8]) -> Result<Self, CodecError> {
        let Some(header) = frame.first_chunk::<HEADER_BYTES>() else {
            return Err(CodecError::Short { bytes: frame.len() });
        };
        let [m0, m1, m2, m3, v0, v1, k0, k1, b0, b1, b2, b3] = *header;
        if [m0, m1, m2, m3] != MAGIC {
            return Err(CodecError::Magic([m0, m1, m2, m3]));
        }
        let version = u16::from_le_bytes([v0, v1]);
        if version != VERSION {
            return Err(CodecError::Version(version));
        }
        let kind = u16::from_le_bytes([k0, k1]);
        Ok(Self { kind, body_bytes: u32::from_le_bytes([b0, b1, b2, b3]) as usize })
    }

    /// Checks that the header announces an `M` of an allowed size.
    ///
    /// # Errors
    /// [`CodecError::Kind`], [`CodecError::TooLarge`].
    pub fn expect<M: Message>(self) -> Result<Self, CodecError> {
        if self.kind != M::KIND {
            return Err(CodecError::Kind(self.kind));
        }
        check_size(self.kind, self.body_bytes, M::LIMIT_BYTES)?;
        Ok(self)
    }
}

fn check_size(kind: u16, bytes: usize, limit_bytes: usize) -> Result<(), CodecError> {
    if bytes > limit_bytes {
        return Err(CodecError::TooLarge { kind, bytes, limit_bytes });
    }
    Ok(())
}

/// Encodes `message` as a frame.
///
/// # Errors
/// [`CodecError::TooLarge`] when the body is above the limit of its kind.
pub fn encode<M: Message>(message: &M) -> Result<Vec<u8>, CodecError> {
    let body = bincode::encode_to_vec(message, config::legacy())
        .map_err(|error| CodecError::Body { kind: M::KIND, reason: error.to_string() })?;
    check_size(M::KIND, body.len(), M::LIMIT_BYTES)?;
    let mut frame = Vec::with_capacity(HEADER_BYTES + body.len());
    frame.extend_from_slice(&MAGIC);
    frame.extend_from_slice(&VERSION.to_le_bytes());
    frame.extend_from_slice(&M::KIND.to_le_bytes());
    // Below LIMIT_BYTES, which fits u32.
    frame.extend_from_slice(&length_u32(body.len()).to_le_bytes());
    frame.extend_from_slice(&body);
    Ok(frame)
}

/// Decodes the message in `frame`, which must hold exactly one.
///
/// # Errors
/// See [`CodecError`].
pub fn decode<M: Message>(frame: &[u8]) -> Result<M, CodecError> {
    let header = Header::decode(frame)?.expect::<M>()?;
    let body = &frame[HEADER_BYTES..];
    check_length(M::KIND, header.body_bytes, body.len())?;
    decode_body(body)
}

fn check_length(kind: u16, expected_bytes: usize, found_bytes: usize) -> Result<(), CodecError> {
    if expected_bytes != found_bytes {
        return Err(CodecError::Length { kind, expected_bytes, found_bytes });
    }
    Ok(())
}

/// Decodes a message from `body`, its bytes without the header.
///
/// # Errors
/// [`CodecError::Body`], [`CodecError::Length`].
pub fn decode_body<M: Message>(body: &[u8]) -> Result<M, CodecError> {
    // The limit counts the memory of decoded containers, which may be above their bytes on the wire: the factor leaves
    // room for that, and still bounds the allocation that a hostile length can cause.
    let decoded = if M::LARGE {
        bincode::decode_from_slice(body, config::legacy().with_limit::<{ 4 * LARGE_BODY_BYTES }>())
    } else {
        bincode::decode_from_slice(body, config::legacy().with_limit::<{ 4 * SMALL_BODY_BYTES }>())
    };
    let (message, consumed) = decoded.map_err(|error| CodecError::Body { kind: M::KIND, reason: error.to_string() })?;
    check_length(M::KIND, consumed, body.len())?;
    Ok(message)
}

const _: () = assert!(LARGE_BODY_BYTES <= u32::MAX as usize);
