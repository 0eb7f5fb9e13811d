//! Codec of snapshots: little-endian words, and decoding errors.

use std::fmt;

use super::{IndexError, PromptContext};

/// First bytes of a snapshot: "KVPX" and the format's version.
pub(super) const MAGIC: u64 = 0x0000_0002_5850_564b;
/// Error of decoding a snapshot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum SnapshotError {
    /// The snapshot ends too soon.
    Short {
        /// Offset at which more bytes were expected.
        at: usize,
    },
    /// The bytes have another format or version.
    Format {
        /// First eight bytes.
        found: u64,
    },
    /// The snapshot is damaged.
    Checksum {
        /// Checksum in the snapshot.
        stored: u64,
        /// Checksum of its bytes.
        computed: u64,
    },
    /// A value is out of range.
    Invalid {
        /// Name of the value.
        what: &'static str,
        value: u64,
    },
    /// A limit of the new index is too small.
    TooLarge {
        /// Limited items.
        what: &'static str,
        /// Their number.
        value: u64,
        most: u64,
    },
    /// The limits for the new index are out of range.
    Config(IndexError),
}

impl fmt::Display for SnapshotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short { at } => write!(f, "the snapshot ends at byte {at}; take a new one"),
            Self::Format { found } => write!(f, "not a snapshot: the bytes begin with {found:#x}, not {MAGIC:#x}"),
            Self::Checksum { stored, computed } => {
                write!(f, "the snapshot is damaged: its checksum is {stored:#x}, its bytes have {computed:#x}")
            }
            Self::Invalid { what, value } => write!(f, "the snapshot has {value} for {what}, which is out of range"),
            Self::TooLarge { what, value, most } => {
                write!(f, "the snapshot has {value} {what}, over the limit of {most}; raise it")
            }
            Self::Config(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for SnapshotError {}

pub(crate) fn invalid(what: &'static str, value: u64) -> SnapshotError {
    SnapshotError::Invalid { what, value }
}

pub(crate) fn put(out: &mut Vec<u8>, word: u64) {
    out.extend_from_slice(&word.to_le_bytes());
}

/// Writes a name, as [`Reader::name`] reads it.
pub(crate) fn put_name(out: &mut Vec<u8>, name: &str) {
    put(out, name.len() as u64);
    out.extend_from_slice(name.as_bytes());
}

/// Reader of a snapshot.
pub(crate) struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    pub(crate) const fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Returns the number of bytes read.
    pub(crate) const fn at(&self) -> usize {
        self.at
    }

    pub(crate) fn word(&mut self) -> Result<u64, SnapshotError> {
        let word = self.bytes[self.at..].first_chunk::<8>().ok_or(SnapshotError::Short { at: self.at })?;
        self.at += 8;
        Ok(u64::from_le_bytes(*word))
    }

    /// Reads the first word of a snapshot, which tells its format.
    pub(crate) fn format(&mut self, magic: u64) -> Result<(), SnapshotError> {
        let found = self.word()?;
        if found == magic { Ok(()) } else { Err(SnapshotError::Format { found }) }
    }

    pub(super) fn parts(&mut self) -> Result<[u16; 4], SnapshotError> {
        let word = self.word()?;
        Ok([word as u16, (word >> 16) as u16, (word >> 32) as u16, (word >> 48) as u16])
    }

    pub(crate) fn skip(&mut self, bytes: usize) -> Result<(), SnapshotError> {
        if self.bytes.len() - self.at < bytes {
            return Err(SnapshotError::Short { at: self.bytes.len() });
        }
        self.at += bytes;
        Ok(())
    }

    pub(crate) fn count(&mut self, what: &'static str, most: usize) -> Result<usize, SnapshotError> {
        let value = self.word()?;
        if value > most as u64 {
            return Err(SnapshotError::TooLarge { what, value, most: most as u64 });
        }
        Ok(value as usize)
    }

    pub(super) fn context(&mut self) -> Result<PromptContext, SnapshotError> {
        let block_tokens = u32::try_from(self.word()?).map_err(|_| invalid("tokens of a block", u64::MAX))?;
        let [tenant, model, lora, salt] = [self.name()?, self.name()?, self.name()?, self.name()?];
        Ok(PromptContext { tenant, model, lora, block_tokens, salt })
    }

    /// Reads a name of at most [`super::MAX_NAME_BYTES`].
    pub(crate) fn name(&mut self) -> Result<String, SnapshotError> {
        let bytes = self.count("bytes of a name", super::MAX_NAME_BYTES)?;
        let from = self.at;
        self.skip(bytes)?;
        String::from_utf8(self.bytes[from..from + bytes].to_vec()).map_err(|_| invalid("a name at byte", from as u64))
    }
}
