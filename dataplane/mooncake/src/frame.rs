//! Frames of the handshake protocol: a length, a type, JSON.
//!
//! ```text
//! offset 0   u64, little-endian: 1 + bytes of JSON
//! offset 8   u8: 0 connection, 1 metadata, 2 notify, 3 probe
//! offset 9   JSON
//! ```
//!
//! Engines from before types existed send no type: the length counts the JSON only, and its first byte is `{`. They
//! request a connection and expect an answer without a type. A length that no message can have ends the connection; so
//! TLS and HTTP, whose first bytes are such lengths, are rejected.

use std::fmt;

/// Bytes of length and type.
pub const HEAD_BYTES: usize = 9;
const LENGTH_BYTES: usize = 8;

/// Type of a request and its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An RDMA connection.
    Connection,
    /// The segment's descriptor.
    Metadata,
    /// A message for the engine's user.
    Notify,
    /// A liveness probe.
    Probe,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Connection, Self::Metadata, Self::Notify, Self::Probe];

    /// Returns the byte on the wire.
    #[must_use]
    pub fn code(self) -> u8 {
        self as u8
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Connection => "connection",
            Self::Metadata => "metadata",
            Self::Notify => "notify",
            Self::Probe => "probe",
        })
    }
}

/// First nine bytes of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Head {
    /// A frame with a type.
    Typed {
        /// Type of the frame.
        kind: Kind,
        /// Bytes of JSON that follow.
        body_bytes: usize,
    },
    /// A frame without a type, of which the first byte of JSON has been read.
    Untyped {
        /// Bytes of JSON that follow.
        body_bytes: usize,
    },
}

impl Head {
    /// Decodes a head. `max_bytes` limits the length field.
    ///
    /// # Errors
    /// If the length or the type is invalid.
    pub fn decode(bytes: [u8; HEAD_BYTES], max_bytes: usize) -> Result<Self, FrameError> {
        let [length @ .., first] = bytes;
        let length = u64::from_le_bytes(length);
        let counted = usize::try_from(length).ok().filter(|&counted| counted <= max_bytes);
        let body_bytes = counted.and_then(|counted| counted.checked_sub(1));
        let body_bytes = body_bytes.ok_or(FrameError::Length { length, limit: max_bytes })?;
        match Kind::ALL.get(usize::from(first)) {
            Some(&kind) => Ok(Self::Typed { kind, body_bytes }),
            None if first == b'{' => Ok(Self::Untyped { body_bytes }),
            None => Err(FrameError::Kind(first)),
        }
    }
}

/// Encodes length and type before `body_bytes` of JSON.
#[must_use]
pub fn head(kind: Kind, body_bytes: usize) -> [u8; HEAD_BYTES] {
    let mut bytes = [0; HEAD_BYTES];
    bytes[..LENGTH_BYTES].copy_from_slice(&(body_bytes as u64 + 1).to_le_bytes());
    bytes[LENGTH_BYTES] = kind.code();
    bytes
}

/// Encodes a whole frame.
#[must_use]
pub fn typed(kind: Kind, json: &str) -> Vec<u8> {
    [&head(kind, json.len())[..], json.as_bytes()].concat()
}

/// Encodes a whole frame without a type.
#[must_use]
pub fn untyped(json: &str) -> Vec<u8> {
    [&(json.len() as u64).to_le_bytes()[..], json.as_bytes()].concat()
}

/// Reason why a head is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameError {
    /// No message can have this length; often the sender speaks another protocol.
    Length {
        /// Length in the frame.
        length: u64,
        /// Greatest length allowed.
        limit: usize,
    },
    /// The type is unknown.
    Kind(u8),
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length { length, limit } => write!(
                f,
                "the message states a length of {length} bytes, not 1 to {limit}: the sender may not be a \
                 Mooncake engine, or MC_HANDSHAKE_MAX_LENGTH is too small"
            ),
            Self::Kind(code) => write!(f, "the message has type {code}, not 0 to 3"),
        }
    }
}

impl std::error::Error for FrameError {}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LIMIT: usize = 1 << 20;

    fn first(bytes: &[u8]) -> [u8; HEAD_BYTES] {
        bytes[..HEAD_BYTES].try_into().expect("nine bytes")
    }

    #[test]
    fn bytes_are_as_stock_engines_have_them() {
        assert_eq!(typed(Kind::Probe, "{}"), b"\x03\0\0\0\0\0\0\0\x03{}");
        assert_eq!(typed(Kind::Metadata, ""), b"\x01\0\0\0\0\0\0\0\x01");
        assert_eq!(untyped("{}"), b"\x02\0\0\0\0\0\0\0{}");
        let head = Head::decode(first(&typed(Kind::Notify, "{\"a\":1}")), LIMIT);
        assert_eq!(head, Ok(Head::Typed { kind: Kind::Notify, body_bytes: 7 }));
        let head = Head::decode(first(&untyped("{\"a\":1}")), LIMIT);
        assert_eq!(head, Ok(Head::Untyped { body_bytes: 6 }));
    }

    #[test]
    fn other_protocols_and_impossible_lengths_are_refused() {
        for bytes in [b"GET / HTT", b"PRI * HTT", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"SSH-2.0-O"] {
            assert!(matches!(Head::decode(*bytes, LIMIT), Err(FrameError::Length { .. })), "{bytes:?}");
        }
        let zero = [0; HEAD_BYTES];
        assert_eq!(Head::decode(zero, LIMIT), Err(FrameError::Length { length: 0, limit: LIMIT }));
        assert!(Head::decode(head(Kind::Probe, LIMIT), LIMIT).is_err());
        assert!(Head::decode(head(Kind::Probe, LIMIT - 1), LIMIT).is_ok());
        for code in [4, b'[', 0xfe, 0xff] {
            let mut bytes = head(Kind::Probe, 2);
            bytes[8] = code;
            assert_eq!(Head::decode(bytes, LIMIT), Err(FrameError::Kind(code)));
        }
    }

    proptest! {
        #[test]
        fn any_head_is_read_or_refused(bytes in any::<[u8; HEAD_BYTES]>(), limit in 0usize..1 << 30) {
            if let Ok(Head::Typed { body_bytes, .. } | Head::Untyped { body_bytes }) = Head::decode(bytes, limit) {
                prop_assert!(body_bytes < limit);
            }
        }
    }
}
