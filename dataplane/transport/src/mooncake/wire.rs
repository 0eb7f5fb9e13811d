//! Wire format of a Mooncake data connection: a request of 24 bytes, a status of 8, payloads without framing.
//!
//! A request names an absolute address of the answering process. Version 1 of the protocol answers a read with the
//! bytes alone, a write with no bytes, and a bad address by closing the connection. Version 2 answers each request with
//! a status first. The version of a request is a bit of its operation, so one server serves both.
//!
//! All numbers are little-endian. Decoding allocates no memory and trusts no length: the server compares it with the
//! registered memory. Source: Mooncake's transfer engine, 0.3.13.

use core::fmt;

/// Size of a request, in bytes.
pub const REQUEST_BYTES: usize = 24;
/// Size of a status, in bytes.
pub const STATUS_BYTES: usize = 8;

/// Status of a request that was carried out: "MCTV" in its upper half, as on the wire.
const STATUS_OK: u64 = 0x4d43_5456_0000_0000;
/// Status of a request whose range is not registered memory.
const STATUS_REJECTED: u64 = STATUS_OK | 1;
/// Bits that are equal in all statuses.
const STATUS_MAGIC_BITS: u64 = 0xffff_ffff_0000_0000;

const READ: u8 = 0;
const WRITE: u8 = 1;
const STATUS_BIT: u8 = 0x80;

/// Protocol version of a request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Hash)]
pub enum Dialect {
    /// Payloads only.
    V1,
    /// A status before each answer.
    V2,
}

/// A request to move a range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    /// Absolute address in the answering process.
    pub address: u64,
    /// Length of the range, in bytes.
    pub bytes: u64,
    /// True: write into that process. False: read from it.
    pub write: bool,
    /// Protocol version: V2 requests a status.
    pub dialect: Dialect,
}

/// Unknown operation of a received request. The connection cannot be read any further.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnknownOperation(pub u8);

impl fmt::Display for UnknownOperation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = self.0;
        write!(f, "not a Mooncake request: operation {found:#04x}, where 0, 1, 0x80 and 0x81 are known")
    }
}

impl core::error::Error for UnknownOperation {}

impl Request {
    /// Wire form. The last 7 bytes are padding and 0.
    #[must_use]
    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut out = [0; REQUEST_BYTES];
        out[0..8].copy_from_slice(&self.bytes.to_le_bytes());
        out[8..16].copy_from_slice(&self.address.to_le_bytes());
        let operation = if self.write { WRITE } else { READ };
        out[16] = if self.dialect == Dialect::V2 { operation | STATUS_BIT } else { operation };
        out
    }

    /// Reads a request. The padding may hold anything.
    ///
    /// A stock engine treats any operation but a write as a read. This decoder rejects an unknown operation: no engine
    /// sends one on purpose, and garbage must not be answered with memory contents.
    ///
    /// # Errors
    /// When the operation is unknown.
    pub fn decode(bytes: &[u8; REQUEST_BYTES]) -> Result<Self, UnknownOperation> {
        let word = |at: usize| u64::from_le_bytes(core::array::from_fn(|i| bytes[at + i]));
        let operation = bytes[16];
        if operation & !STATUS_BIT > WRITE {
            return Err(UnknownOperation(operation));
        }
        Ok(Self {
            bytes: word(0),
            address: word(8),
            write: operation & !STATUS_BIT == WRITE,
            dialect: if operation & STATUS_BIT != 0 { Dialect::V2 } else { Dialect::V1 },
        })
    }
}

/// Decoded status.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The request is done: a write's bytes are in place, a read's follow.
    Done,
    /// The range is not registered memory; the connection ends.
    Rejected,
    /// A status of a later version.
    Failed(u32),
    /// Not a status: the peer speaks version 1 and sent the requested payload.
    NotAStatus,
}

/// Wire form of a status.
#[must_use]
pub const fn encode_status(done: bool) -> [u8; STATUS_BYTES] {
    let word = if done { STATUS_OK } else { STATUS_REJECTED };
    word.to_le_bytes()
}

/// Reads a status.
#[must_use]
pub const fn decode_status(bytes: [u8; STATUS_BYTES]) -> Verdict {
    match u64::from_le_bytes(bytes) {
        STATUS_OK => Verdict::Done,
        STATUS_REJECTED => Verdict::Rejected,
        word if word & STATUS_MAGIC_BITS == STATUS_OK => Verdict::Failed(word as u32),
        _ => Verdict::NotAStatus,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Bytes as a stock engine of version 0.3.13 sends them.
    #[test]
    fn golden_bytes() {
        let request = Request { address: 0x7f00_0000_1000, bytes: 0x0012_3456, write: true, dialect: Dialect::V2 };
        let wire = [
            0x56, 0x34, 0x12, 0, 0, 0, 0, 0, //
            0, 0x10, 0, 0, 0, 0x7f, 0, 0, //
            0x81, 0, 0, 0, 0, 0, 0, 0,
        ];
        assert_eq!(request.encode(), wire);
        for (operation, write, dialect) in
            [(0, false, Dialect::V1), (1, true, Dialect::V1), (0x80, false, Dialect::V2), (0x81, true, Dialect::V2)]
        {
            let request = Request { write, dialect, ..request };
            assert_eq!(request.encode()[16], operation);
            assert_eq!(Request::decode(&request.encode()), Ok(request));
        }
        assert_eq!(encode_status(true), [0, 0, 0, 0, 0x56, 0x54, 0x43, 0x4d]);
        assert_eq!(encode_status(false), [1, 0, 0, 0, 0x56, 0x54, 0x43, 0x4d]);
        assert_eq!(decode_status([7, 0, 0, 0, 0x56, 0x54, 0x43, 0x4d]), Verdict::Failed(7));
        assert_eq!(decode_status([0; 8]), Verdict::NotAStatus);
    }

    #[test]
    fn padding_is_ignored() {
        let request = Request { address: 9, bytes: 8, write: false, dialect: Dialect::V1 };
        let mut wire = request.encode();
        wire[17..].fill(0xa5);
        assert_eq!(Request::decode(&wire), Ok(request));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_request_or_an_unknown_operation(bytes in any::<[u8; REQUEST_BYTES]>()) {
            match Request::decode(&bytes) {
                Ok(request) => prop_assert_eq!(&request.encode()[..17], &bytes[..17]),
                Err(UnknownOperation(operation)) => {
                    prop_assert_eq!(operation, bytes[16]);
                    prop_assert!(operation & 0x7f > 1);
                }
            }
        }

        #[test]
        fn statuses_are_distinguished_from_other_bytes(bytes in any::<[u8; STATUS_BYTES]>()) {
            let verdict = decode_status(bytes);
            prop_assert_eq!(verdict == Verdict::NotAStatus, bytes[4..] != [0x56, 0x54, 0x43, 0x4d]);
        }
    }
}
