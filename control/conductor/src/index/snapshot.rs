//! Snapshot of the whole index: little-endian, versioned, with a checksum at the end.
//!
//! Ids of contexts and holders stay valid. Restoring applies the limits of the new index; a snapshot that exceeds them
//! is an error, and is never restored in part.

use kvplane_proto::checksum::payload_checksum;

use super::codec::{MAGIC, Reader, SnapshotError, invalid, put, put_name};
use super::{IndexConfig, PrefixIndex};

impl PrefixIndex {
    /// Takes a snapshot. Time and size are proportional to the number of blocks: 8 bytes per block and 24 per run.
    #[must_use]
    pub fn snapshot(&self) -> Vec<u8> {
        let mut out = self.snapshot_body();
        let checksum = payload_checksum(&out);
        put(&mut out, checksum);
        out
    }

    /// Takes a snapshot without its checksum, for a caller that computes it elsewhere, over more than the index: the
    /// checksum takes longer than the copy.
    pub(crate) fn snapshot_body(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.blocks.snapshot_bytes() + 64);
        put(&mut out, MAGIC);
        put(&mut out, self.config.seed);
        let names = self.contexts.names();
        put(&mut out, names.len() as u64);
        for key in names {
            put(&mut out, u64::from(key.block_tokens));
            for name in [&key.tenant, &key.model, &key.lora, &key.salt] {
                put_name(&mut out, name);
            }
        }
        self.holders.put(&mut out);
        self.blocks.put(&mut out, &self.holders);
        out
    }

    /// Restores an index from a snapshot, with the limits of `config`; the seed is the snapshot's.
    ///
    /// # Errors
    /// When the bytes are damaged, of another format, or exceed a limit.
    pub fn restore(config: IndexConfig, bytes: &[u8]) -> Result<Self, SnapshotError> {
        Self::restore_body(config, body_of(bytes)?)
    }

    /// Restores an index from a snapshot without its checksum, which the caller has checked.
    ///
    /// # Errors
    /// When the bytes are of another format, exceed a limit, or have a value out of range.
    pub(crate) fn restore_body(config: IndexConfig, body: &[u8]) -> Result<Self, SnapshotError> {
        let mut reader = Reader::new(body);
        reader.format(MAGIC)?;
        let mut index = Self::new(IndexConfig { seed: reader.word()?, ..config }).map_err(SnapshotError::Config)?;
        for _ in 0..reader.count("contexts", config.max_contexts)? {
            let key = reader.context()?;
            index.contexts.add(key);
        }
        index.holders.restore(&mut reader)?;
        index.blocks.restore(&mut reader, index.contexts.count(), &index.holders)?;
        if reader.at() == body.len() { Ok(index) } else { Err(invalid("bytes after the last run", reader.at() as u64)) }
    }
}

/// Checks format and checksum of a snapshot, and returns it without the checksum.
///
/// # Errors
/// When the bytes are too few, damaged or of another format.
fn body_of(bytes: &[u8]) -> Result<&[u8], SnapshotError> {
    let Some((body, checksum)) = bytes.split_last_chunk::<8>() else {
        return Err(SnapshotError::Short { at: bytes.len() });
    };
    Reader::new(body).format(MAGIC)?;
    let (stored, computed) = (u64::from_le_bytes(*checksum), payload_checksum(body));
    if stored == computed { Ok(body) } else { Err(SnapshotError::Checksum { stored, computed }) }
}
