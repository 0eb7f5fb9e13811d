//! Checkpoints: the index of a shard as of one pack of its log.
//!
//! A header, a row for each pack that an entry names, the entries, and a checksum of all of it. An entry is that of the
//! pack, with the pack's row in the place of the kind and the version of the format's next use.

use kvplane_proto::checksum::PayloadChecksum;
use kvplane_proto::ids::{Incarnation, NodeId, ShardId};
use kvplane_proto::map::ShardKey;
use kvplane_proto::narrowing::length_u32;

use super::pack::{ENTRY_BYTES, Entry};
use super::{Flaw, Stream, check_start, put16, put32, put64, seeded, start, word16, word32, word64};

const MAGIC: [u8; 4] = *b"KVSC";
const HEADER_BYTES: usize = 32;
/// Length of the row of a pack.
pub const PACK_ROW_BYTES: usize = 40;
/// Length of an entry with the row of its pack.
const PLACED_BYTES: usize = ENTRY_BYTES + 8;

/// Pack that entries of a checkpoint name.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct PackRow {
    pub shard: ShardKey,
    pub number: u64,
    /// Its length.
    pub bytes: u64,
    /// Time at which it was written, by the store's clock, in milliseconds.
    pub written_ms: u64,
}

/// Checkpoint that is being made.
#[derive(Debug)]
pub struct CheckpointWriter {
    bytes: Vec<u8>,
    entries: u32,
}

impl CheckpointWriter {
    /// Begins a checkpoint with these packs.
    #[must_use]
    pub fn new(packs: &[PackRow]) -> Self {
        let mut bytes = vec![0; HEADER_BYTES + packs.len() * PACK_ROW_BYTES];
        start(&mut bytes, MAGIC);
        put32(&mut bytes, 16, length_u32(packs.len()));
        for (at, pack) in packs.iter().enumerate() {
            let row = &mut bytes[HEADER_BYTES + at * PACK_ROW_BYTES..][..PACK_ROW_BYTES];
            put64(row, 0, pack.shard.node.0);
            put64(row, 8, pack.shard.incarnation.0);
            put64(row, 16, pack.number);
            put64(row, 24, pack.written_ms);
            put32(row, 32, kvplane_proto::narrowing::to_u32(pack.bytes));
            put16(row, 36, pack.shard.shard.0);
        }
        Self { bytes, entries: 0 }
    }

    /// Appends an entry of the pack in this row.
    pub fn push(&mut self, entry: &Entry, row: u32) {
        entry.encode(&mut self.bytes);
        self.bytes.extend_from_slice(&u64::from(row).to_le_bytes());
        self.entries += 1;
    }

    /// Returns the bytes of the checkpoint under this number.
    #[must_use]
    pub fn seal(mut self, stream: Stream, number: u64) -> Vec<u8> {
        put64(&mut self.bytes, 8, number);
        put32(&mut self.bytes, 20, self.entries);
        let sum = seeded(stream, number, &[&self.bytes]);
        self.bytes.extend_from_slice(&sum.to_le_bytes());
        self.bytes
    }
}

/// Checkpoint that is being read: its entries come one after the other, and count once [`Self::finish`] has succeeded.
#[derive(Debug)]
pub struct CheckpointReader {
    bytes: Vec<u8>,
    packs: Vec<PackRow>,
    at: usize,
    checksum: PayloadChecksum,
}

impl CheckpointReader {
    /// Begins to read a checkpoint of this number.
    ///
    /// # Errors
    /// If the bytes cannot be one.
    pub fn new(stream: Stream, number: u64, bytes: Vec<u8>) -> Result<Self, Flaw> {
        check_start(&bytes, MAGIC)?;
        if bytes.len() < HEADER_BYTES + 8 {
            return Err(Flaw::Short);
        }
        let (packs, entries) = (word32(&bytes, 16) as usize, word32(&bytes, 20) as usize);
        let at = HEADER_BYTES + packs * PACK_ROW_BYTES;
        if bytes.len() != at + entries * PLACED_BYTES + 8 || word64(&bytes, 8) != number {
            return Err(Flaw::Short);
        }
        let row = |at: usize| {
            let row = &bytes[HEADER_BYTES + at * PACK_ROW_BYTES..][..PACK_ROW_BYTES];
            PackRow {
                shard: ShardKey {
                    node: NodeId(word64(row, 0)),
                    incarnation: Incarnation(word64(row, 8)),
                    shard: ShardId(word16(row, 36)),
                },
                number: word64(row, 16),
                bytes: u64::from(word32(row, 32)),
                written_ms: word64(row, 24),
            }
        };
        let packs = (0..packs).map(row).collect();
        let mut checksum = PayloadChecksum::new();
        checksum.update(&stream.encode());
        checksum.update(&number.to_le_bytes());
        checksum.update(&bytes[..at]);
        Ok(Self { packs, at, checksum, bytes })
    }

    /// Returns the packs.
    #[must_use]
    pub fn packs(&self) -> &[PackRow] {
        &self.packs
    }

    /// Returns the next entry, with its pack.
    ///
    /// # Errors
    /// If its values are out of range.
    pub fn next_entry(&mut self) -> Result<Option<(Entry, PackRow)>, Flaw> {
        if self.at + 8 == self.bytes.len() {
            return Ok(None);
        }
        let placed = &self.bytes[self.at..][..PLACED_BYTES];
        self.checksum.update(placed);
        self.at += PLACED_BYTES;
        let row = usize::try_from(word64(placed, ENTRY_BYTES)).map_err(|_| Flaw::Values)?;
        let pack = *self.packs.get(row).ok_or(Flaw::Values)?;
        Ok(Some((Entry::decode(&placed[..ENTRY_BYTES], pack.bytes)?, pack)))
    }

    /// Returns true once all entries were returned, and the checksum of all is right.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.at + 8 == self.bytes.len() && self.checksum.finish() == word64(&self.bytes, self.at)
    }
}
