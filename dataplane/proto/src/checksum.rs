//! Checksums: CRC-64/NVME for payloads, CRC-32C for headers and bodies.
//!
//! A CRC of two parts can be combined into the CRC of the whole, so slices that travel on different lanes are checked
//! once. The implementation picks the widest carry-less multiply the processor has at run time.

use crc_fast::{CrcAlgorithm, Digest as Crc};

/// CRC-64/NVME of a payload in one piece.
#[must_use]
pub fn payload_checksum(bytes: &[u8]) -> u64 {
    crc_fast::checksum(CrcAlgorithm::Crc64Nvme, bytes)
}

/// CRC-32C (iSCSI) of a header or body.
#[must_use]
pub fn frame_checksum(bytes: &[u8]) -> u32 {
    crc_fast::checksum(CrcAlgorithm::Crc32Iscsi, bytes) as u32
}

/// The payload checksum of two parts in a row, from that of each and the length of the second in bytes. Its cost does
/// not depend on the length.
#[must_use]
pub fn joined_payload_checksum(first: u64, second: u64, second_bytes: u64) -> u64 {
    crc_fast::checksum_combine(CrcAlgorithm::Crc64Nvme, first, second, second_bytes)
}

/// CRC-64/NVME of a payload that is seen piece by piece, in order.
#[derive(Clone, Debug)]
pub struct PayloadChecksum {
    crc: Crc,
}

impl PayloadChecksum {
    /// The checksum of nothing so far.
    #[must_use]
    pub fn new() -> Self {
        Self { crc: Crc::new(CrcAlgorithm::Crc64Nvme) }
    }

    /// Takes in the next piece.
    pub fn update(&mut self, bytes: &[u8]) {
        self.crc.update(bytes);
    }

    /// The checksum of everything seen.
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
