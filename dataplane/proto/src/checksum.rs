//! Checksums: CRC-64/NVME for payloads, CRC-32C for headers and bodies.
//!
//! The CRCs of two parts combine into the CRC of the whole, so slices that travel on different lanes are checked once.
//! The implementation picks the widest carry-less multiply that the processor supports, at run time.

use crc_fast::{CrcAlgorithm, Digest as Crc};

/// CRC-64/NVME of a payload in one piece.
#[must_use]
pub fn payload_checksum(bytes: &[u8]) -> u64 {
    crc_fast::checksum(CrcAlgorithm::Crc64Nvme, bytes)
}

/// CRC-32C (iSCSI) of a header or body.
#[must_use]
pub fn frame_checksum(bytes: &[u8]) -> u32 {
    crate::narrowing::low_u32(crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes))
}

/// Polynomial of CRC-64/NVME, lowest power in the highest bit.
const POLYNOMIAL: u64 = 0x9a6c_9329_ac4b_c9b5;
/// `x^(2^n)` modulo the polynomial, for each n.
const POWERS: [u64; 64] = {
    let mut powers = [1 << 62; 64];
    let mut n = 1;
    while n < 64 {
        powers[n] = product(powers[n - 1], powers[n - 1]);
        n += 1;
    }
    powers
};

/// Returns the product of two polynomials modulo that of the checksum, lowest power in the highest bit.
const fn product(a: u64, mut b: u64) -> u64 {
    let (mut sum, mut bit) = (0, 64);
    while bit > 0 {
        bit -= 1;
        sum ^= if a >> bit & 1 == 1 { b } else { 0 };
        b = b >> 1 ^ if b & 1 == 1 { POLYNOMIAL } else { 0 };
    }
    sum
}

/// Combines the payload checksums of two consecutive parts, given the length of the second in bytes: the first is
/// shifted by that length, which is a product with a power of x.
#[must_use]
pub const fn joined_payload_checksum(first: u64, second: u64, second_bytes: u64) -> u64 {
    // 2^3 bits per byte.
    let (mut shifted, mut left, mut n) = (first, second_bytes, 3);
    while left > 0 {
        if left & 1 == 1 {
            shifted = product(POWERS[n], shifted);
        }
        left >>= 1;
        n = (n + 1) % 64;
    }
    shifted ^ second
}

/// Incremental CRC-64/NVME of a payload that arrives piece by piece, in order.
#[derive(Clone, Debug)]
pub struct PayloadChecksum {
    crc: Crc,
}

impl PayloadChecksum {
    /// Creates the checksum of no bytes.
    #[must_use]
    pub fn new() -> Self {
        Self { crc: Crc::new(CrcAlgorithm::Crc64Nvme) }
    }

    /// Adds the next piece.
    pub fn update(&mut self, bytes: &[u8]) {
        self.crc.update(bytes);
    }

    /// Returns the checksum of all bytes added.
    #[must_use]
    pub fn finish(&self) -> u64 {
        self.crc.finalize()
    }
}

impl Default for PayloadChecksum {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_checksums() {
        // The check values of the CRC catalogue for "123456789".
        assert_eq!(payload_checksum(b"123456789"), 0xae8b_1486_0a79_9888);
        assert_eq!(frame_checksum(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn parts_join_to_the_whole() {
        let bytes: Vec<u8> = (0..5_000u32).map(|i| (i * 13) as u8).collect();
        for cut in [0, 1, 777, 4_096, 5_000] {
            let (first, second) = bytes.split_at(cut);
            let parts = (payload_checksum(first), payload_checksum(second));
            let joined = joined_payload_checksum(parts.0, parts.1, second.len() as u64);
            assert_eq!(joined, payload_checksum(&bytes), "cut at {cut}");
        }
    }

    #[test]
    fn pieces_equal_the_whole() {
        let bytes: Vec<u8> = (0..10_000u32).map(|i| (i * 7) as u8).collect();
        let mut pieces = PayloadChecksum::new();
        for chunk in bytes.chunks(977) {
            pieces.update(chunk);
        }
        assert_eq!(pieces.finish(), payload_checksum(&bytes));
    }
}
