//! Checksums of a payload's chunks, which a record lists if there are several.

use kvplane_proto::checksum::joined_payload_checksum;

use crate::memory::{Memory, Span, sum};

/// Checksums of the current payload; their memory is reused for the next one.
#[derive(Debug, Default)]
pub(crate) struct ChunkSums {
    sums: Vec<u64>,
}

impl ChunkSums {
    /// Computes the checksum of each chunk, if there are several, and returns the checksum of the whole payload.
    pub(crate) fn compute(&mut self, payload: Span, chunk_bytes: u32, memory: &dyn Memory) -> u64 {
        self.sums.clear();
        if payload.bytes <= chunk_bytes {
            return sum(memory, payload);
        }
        let (mut at, mut whole) = (0, 0);
        while at < payload.bytes {
            let bytes = chunk_bytes.min(payload.bytes - at);
            let part = sum(memory, payload.part(at, bytes));
            whole = if at == 0 { part } else { joined_payload_checksum(whole, part, u64::from(bytes)) };
            self.sums.push(part);
            at += bytes;
        }
        whole
    }

    /// Returns one checksum for each chunk; none if the payload is a single chunk.
    pub(crate) fn as_slice(&self) -> &[u64] {
        &self.sums
    }
}
