//! Primitives of the encodings of maps and of other durable records: numbers, texts, addresses, and the seal.
//!
//! All numbers are little-endian and of fixed width; a text is its length in one byte and its UTF-8 bytes. A sealed
//! encoding is: magic (4 bytes), format version (2), contents, CRC-64/NVME of everything before it (8).
//!
//! ```text
//! address: 4 u8 | 4 bytes | port u16, or 6 u8 | 16 bytes | port u16 | flow u32 | scope u32
//! ```
//!
//! Invariants: one value has one encoding; decoding never panics, and never reserves memory for more items than the
//! remaining bytes can hold. The checksum detects accidental damage, not forgery: connections are authenticated
//! elsewhere.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

pub use super::error::DecodeError;
pub use super::layout::{MAX_MAP_BYTES, put_member};

/// Overhead of a sealed encoding in bytes: magic, format and checksum.
pub const SEAL_BYTES: usize = 4 + 2 + 8;
/// Begins a sealed encoding at the end of `out`. The result is to be passed to [`seal`].
pub fn begin(out: &mut Vec<u8>, magic: u32, format: u16) -> usize {
    let start = out.len();
    out.extend_from_slice(&magic.to_le_bytes());
    out.extend_from_slice(&format.to_le_bytes());
    start
}

/// Completes a sealed encoding that [`begin`] began: appends the checksum.
pub fn seal(out: &mut Vec<u8>, start: usize) {
    let checksum = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, &out[start..]);
    out.extend_from_slice(&checksum.to_le_bytes());
}

/// Appends a text: its length in one byte, then its bytes.
///
/// # Panics
/// If the text is longer than 255 bytes: limits are checked before anything is encoded.
pub fn put_text(out: &mut Vec<u8>, text: &str) {
    assert!(text.len() <= 255, "a text of {} bytes reached the encoder", text.len());
    out.push(crate::narrowing::length_u8(text.len()));
    out.extend_from_slice(text.as_bytes());
}

/// Appends a text that may be longer than 255 bytes: its length in two bytes, then its bytes.
///
/// # Panics
/// If the text is longer than 65,535 bytes: limits are checked before anything is encoded.
pub fn put_long_text(out: &mut Vec<u8>, text: &str) {
    let length = u16::try_from(text.len()).expect("a text over its limit reached the encoder");
    out.extend_from_slice(&length.to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

/// Appends a socket address.
pub fn put_address(out: &mut Vec<u8>, address: &SocketAddr) {
    match address.ip() {
        IpAddr::V4(ip) => {
            out.push(4);
            out.extend_from_slice(&ip.octets());
        }
        IpAddr::V6(ip) => {
            out.push(6);
            out.extend_from_slice(&ip.octets());
        }
    }
    out.extend_from_slice(&address.port().to_le_bytes());
    if let SocketAddr::V6(address) = address {
        out.extend_from_slice(&address.flowinfo().to_le_bytes());
        out.extend_from_slice(&address.scope_id().to_le_bytes());
    }
}

/// Decoder that takes fields from the front of bytes received from a peer or read from a disk.
#[derive(Clone, Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    /// Opens a sealed encoding. Checks magic, format and checksum first, in this order, so that an encoding of another
    /// version is reported as such, not as damage.
    ///
    /// # Errors
    /// Returns an error if one of the three does not match, or the bytes are too short to hold them.
    pub fn open(bytes: &'a [u8], magic: u32, format: u16) -> Result<Self, DecodeError> {
        let left_bytes = bytes.len();
        let short = DecodeError::Truncated { wanted_bytes: SEAL_BYTES, left_bytes };
        let (body, checksum) = bytes.split_last_chunk::<8>().ok_or(short)?;
        let mut reader = Self { rest: body };
        if left_bytes < SEAL_BYTES {
            return Err(short);
        }
        let found = reader.u32()?;
        if found != magic {
            return Err(DecodeError::Magic { found, expected: magic });
        }
        let found = reader.u16()?;
        if found != format {
            return Err(DecodeError::Format { found, expected: format });
        }
        let stored = u64::from_le_bytes(*checksum);
        let computed = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, body);
        if stored != computed {
            return Err(DecodeError::Checksum { stored, computed });
        }
        Ok(reader)
    }

    /// Returns the number of bytes not read yet.
    #[must_use]
    pub const fn left_bytes(&self) -> usize {
        self.rest.len()
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], DecodeError> {
        let left_bytes = self.rest.len();
        let (field, rest) =
            self.rest.split_first_chunk::<N>().ok_or(DecodeError::Truncated { wanted_bytes: N, left_bytes })?;
        self.rest = rest;
        Ok(*field)
    }

    /// Reads the next byte.
    ///
    /// # Errors
    /// Returns [`DecodeError::Truncated`], as do the other readers of numbers.
    pub fn u8(&mut self) -> Result<u8, DecodeError> {
        self.take().map(u8::from_le_bytes)
    }

    /// Reads the next 16 bits. Errors as [`Self::u8`].
    pub fn u16(&mut self) -> Result<u16, DecodeError> {
        self.take().map(u16::from_le_bytes)
    }

    /// Reads the next 32 bits. Errors as [`Self::u8`].
    pub fn u32(&mut self) -> Result<u32, DecodeError> {
        self.take().map(u32::from_le_bytes)
    }

    /// Reads the next 64 bits. Errors as [`Self::u8`].
    pub fn u64(&mut self) -> Result<u64, DecodeError> {
        self.take().map(u64::from_le_bytes)
    }

    /// Reads the next text; `what` names it in errors.
    ///
    /// # Errors
    /// Returns an error if the text is truncated or not UTF-8.
    pub fn text(&mut self, what: &'static str) -> Result<String, DecodeError> {
        let wanted_bytes = usize::from(self.u8()?);
        self.text_of(wanted_bytes, what)
    }

    /// Reads the next text of [`put_long_text`]. Errors as [`Self::text`].
    pub fn long_text(&mut self, what: &'static str) -> Result<String, DecodeError> {
        let wanted_bytes = usize::from(self.u16()?);
        self.text_of(wanted_bytes, what)
    }

    fn text_of(&mut self, wanted_bytes: usize, what: &'static str) -> Result<String, DecodeError> {
        let left_bytes = self.rest.len();
        let (text, rest) =
            self.rest.split_at_checked(wanted_bytes).ok_or(DecodeError::Truncated { wanted_bytes, left_bytes })?;
        self.rest = rest;
        Ok(core::str::from_utf8(text).map_err(|_| DecodeError::Utf8 { what })?.to_owned())
    }

    /// Reads the next socket address.
    ///
    /// # Errors
    /// Returns an error if the address is truncated or its family is neither 4 nor 6.
    pub fn address(&mut self) -> Result<SocketAddr, DecodeError> {
        match self.u8()? {
            4 => {
                let ip = Ipv4Addr::from(self.take::<4>()?);
                Ok(SocketAddr::from((ip, self.u16()?)))
            }
            6 => {
                let ip = Ipv6Addr::from(self.take::<16>()?);
                let (port, flow, scope) = (self.u16()?, self.u32()?, self.u32()?);
                Ok(SocketAddrV6::new(ip, port, flow, scope).into())
            }
            family => Err(DecodeError::Field { what: "address family", found: family.into() }),
        }
    }

    /// Rejects a count of items that the remaining bytes cannot hold, before memory is reserved for them.
    ///
    /// # Errors
    /// [`DecodeError::Truncated`].
    pub fn bounded(&self, count: usize, item_bytes: usize) -> Result<usize, DecodeError> {
        let wanted_bytes = count * item_bytes;
        if wanted_bytes > self.rest.len() {
            return Err(DecodeError::Truncated { wanted_bytes, left_bytes: self.rest.len() });
        }
        Ok(count)
    }

    /// Completes decoding.
    ///
    /// # Errors
    /// Returns an error if bytes are left.
    pub const fn finish(&self) -> Result<(), DecodeError> {
        if self.rest.is_empty() { Ok(()) } else { Err(DecodeError::Trailing { left_bytes: self.rest.len() }) }
    }
}
