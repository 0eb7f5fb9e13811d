//! The whole index as bytes, and back: little-endian, versioned, with a checksum at the end.
//!
//! Ids of contexts and holders stay what they were, so whoever has them can go on. Restoring takes the limits of the
//! new index; what does not fit is an error, never a part.

use std::fmt;

use kvplane_proto::checksum::payload_checksum;

use super::run::{FREE, Record, TIERS};
use super::{ContextId, ContextKey, FIRST, IndexConfig, IndexError, PrefixIndex, salt_of};

/// The first bytes of a snapshot: "KVPX" and the format's version.
const MAGIC: u64 = 0x0000_0001_5850_564b;
/// Bytes of a record of a holder.
const RECORD_BYTES: usize = 8;

/// Why bytes are no snapshot of an index that fits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SnapshotError {
    /// It ends too soon, at this byte.
    Short {
        /// Where more was expected.
        at: usize,
    },
    /// It is of another format or version.
    Format {
        /// The first eight bytes.
        found: u64,
    },
    /// It was damaged.
    Checksum {
        /// What it says.
        stored: u64,
        /// What its bytes have.
        computed: u64,
    },
    /// A number in it cannot be.
    Invalid {
        /// What it is of.
        what: &'static str,
        /// The number.
        value: u64,
    },
    /// The index it should go into is too small.
    TooLarge {
        /// What there is too much of.
        what: &'static str,
        /// How much.
        value: u64,
        /// The limit.
        most: u64,
    },
    /// The limits for the new index cannot be.
    Config(IndexError),
}

impl fmt::Display for SnapshotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Short { at } => write!(f, "the snapshot ends at byte {at}; take a new one"),
            Self::Format { found } => write!(f, "these bytes begin with {found:#x}, a snapshot with {MAGIC:#x}"),
            Self::Checksum { stored, computed } => {
                write!(f, "the snapshot is damaged: its checksum is {stored:#x}, its bytes have {computed:#x}")
            }
            Self::Invalid { what, value } => write!(f, "the snapshot says {value} for {what}, which cannot be"),
            Self::TooLarge { what, value, most } => {
                write!(f, "the snapshot has {value} {what}, the index takes {most}; raise its limit")
            }
            Self::Config(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for SnapshotError {}

impl PrefixIndex {
    /// Everything in it. Time and bytes in proportion to its blocks, 8 bytes each and 24 a run.
    #[must_use]
    pub fn snapshot(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.blocks * 8 + self.runs.used() * 32 + 64);
        put(&mut out, MAGIC);
        put(&mut out, self.config.seed);
        let mut names: Vec<(&ContextKey, ContextId)> = self.contexts.iter().map(|(key, id)| (key, *id)).collect();
        names.sort_unstable_by_key(|(_, id)| *id);
        put(&mut out, names.len() as u64);
        for (key, _) in names {
            put(&mut out, u64::from(key.block_tokens));
            for name in [&key.tenant, &key.model, &key.lora, &key.salt] {
                put(&mut out, name.len() as u64);
                out.extend_from_slice(name.as_bytes());
            }
        }
        put(&mut out, self.generations.len() as u64);
        for (slot, generation) in self.generations.iter().enumerate() {
            put(&mut out, u64::from(*generation) << 1 | u64::from(self.live_bit(slot as u16)));
        }
        put(&mut out, self.runs.used() as u64);
        for run in self.runs.ids() {
            self.put_run(&mut out, run);
        }
        let checksum = payload_checksum(&out);
        put(&mut out, checksum);
        out
    }

    fn put_run(&self, out: &mut Vec<u8>, run: u32) {
        let header = self.runs.get(run);
        let bits = (0..TIERS).flat_map(|tier| {
            let record = move |slot| Record { slot, tier: tier as u16, start: 0, end: header.len };
            self.runs.slots_of(run, tier).into_iter().map(record)
        });
        let records: Vec<Record> = self.runs.records(run).iter().copied().chain(bits).collect();
        let records: Vec<Record> = records.into_iter().filter(|record| self.live_bit(record.slot)).collect();
        put(out, u64::from(header.context) << 48 | u64::from(header.len) << 32 | records.len() as u64);
        for key in self.arena.keys(header.start, usize::from(header.len)) {
            put(out, *key);
        }
        for Record { slot, tier, start, end } in records {
            [slot, tier, start, end].into_iter().for_each(|part| out.extend_from_slice(&part.to_le_bytes()));
        }
    }

    /// The index that `bytes` are a snapshot of, with the limits of `config`; its seed is the snapshot's.
    ///
    /// # Errors
    /// When the bytes are damaged, of another format, or do not fit.
    pub fn restore(config: IndexConfig, bytes: &[u8]) -> Result<Self, SnapshotError> {
        let Some((body, checksum)) = bytes.split_last_chunk::<8>() else {
            return Err(SnapshotError::Short { at: bytes.len() });
        };
        let mut reader = Reader { bytes: body, at: 0 };
        let found = reader.word()?;
        if found != MAGIC {
            return Err(SnapshotError::Format { found });
        }
        let (stored, computed) = (u64::from_le_bytes(*checksum), payload_checksum(body));
        if stored != computed {
            return Err(SnapshotError::Checksum { stored, computed });
        }
        let mut index = Self::new(IndexConfig { seed: reader.word()?, ..config }).map_err(SnapshotError::Config)?;
        for id in 0..reader.count("contexts", config.max_contexts)? {
            let key = reader.context()?;
            index.salts.push(salt_of(index.config.seed, ContextId(id as u16)));
            index.contexts.insert(key, ContextId(id as u16));
        }
        index.spare.clear();
        for slot in 0..reader.count("holders", config.max_holders)? {
            let word = reader.word()?;
            // Who was being swept out is out: no record of it was written.
            index.generations[slot] = (word >> 1) as u32;
            index.live[slot / 64] |= (word & 1) << (slot % 64);
        }
        index.spare = (0..config.max_holders as u16).rev().filter(|slot| !index.live_bit(*slot)).collect();
        for _ in 0..reader.count("runs", u32::MAX as usize)? {
            index.take_run(&mut reader)?;
        }
        if reader.at == body.len() { Ok(index) } else { Err(invalid("bytes after the last run", reader.at as u64)) }
    }

    fn take_run(&mut self, reader: &mut Reader<'_>) -> Result<(), SnapshotError> {
        let word = reader.word()?;
        let (context, len, records) = ((word >> 48) as u16, (word >> 32) as u16, word as u32 as usize);
        if usize::from(context) >= self.salts.len() {
            return Err(invalid("a context", u64::from(context)));
        }
        if len == 0 || records == 0 {
            // Nobody held it any more when the snapshot was taken.
            return reader.skip(usize::from(len) * 8 + records * RECORD_BYTES);
        }
        let id = self.runs.next_id();
        let most = self.config.max_blocks as u64;
        let full = SnapshotError::TooLarge { what: "blocks", value: (self.blocks + usize::from(len)) as u64, most };
        let (start, cap) = self.arena.allocate(usize::from(len), id).ok_or(full)?;
        if cap < usize::from(len) {
            return Err(full);
        }
        let id = self.runs.add(context, start, cap);
        for at in 0..u32::from(len) {
            let key = reader.word()?;
            if self.locate(ContextId(context), key).is_some() {
                return Err(invalid("a key that is there twice", key));
            }
            self.arena.set((start + at) as usize, key);
            if at == 0 {
                self.runs.get_mut(id).first = key;
            }
            self.table.insert(key, if at == 0 { FIRST | id } else { start + at });
            let header = self.runs.get_mut(id);
            (header.last, header.len) = (key, at as u16 + 1);
        }
        self.blocks += usize::from(len);
        for _ in 0..records {
            let [slot, tier, start, end] = reader.parts()?;
            let whole = start < end && end <= len && usize::from(tier) < TIERS && self.live_bit(slot);
            if !whole || context == FREE {
                return Err(invalid("a holder's record", u64::from(slot)));
            }
            self.cover_whole(id, Record { slot, tier, start, end });
        }
        Ok(())
    }
}

fn invalid(what: &'static str, value: u64) -> SnapshotError {
    SnapshotError::Invalid { what, value }
}

fn put(out: &mut Vec<u8>, word: u64) {
    out.extend_from_slice(&word.to_le_bytes());
}

struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Reader<'_> {
    fn word(&mut self) -> Result<u64, SnapshotError> {
        let word = self.bytes[self.at..].first_chunk::<8>().ok_or(SnapshotError::Short { at: self.at })?;
        self.at += 8;
        Ok(u64::from_le_bytes(*word))
    }

    fn parts(&mut self) -> Result<[u16; 4], SnapshotError> {
        let word = self.word()?;
        Ok([word as u16, (word >> 16) as u16, (word >> 32) as u16, (word >> 48) as u16])
    }

    fn skip(&mut self, bytes: usize) -> Result<(), SnapshotError> {
        if self.bytes.len() - self.at < bytes {
            return Err(SnapshotError::Short { at: self.bytes.len() });
        }
        self.at += bytes;
        Ok(())
    }

    fn count(&mut self, what: &'static str, most: usize) -> Result<usize, SnapshotError> {
        let value = self.word()?;
        if value > most as u64 {
            return Err(SnapshotError::TooLarge { what, value, most: most as u64 });
        }
        Ok(value as usize)
    }

    fn context(&mut self) -> Result<ContextKey, SnapshotError> {
        let block_tokens = u32::try_from(self.word()?).map_err(|_| invalid("tokens of a block", u64::MAX))?;
        let [tenant, model, lora, salt] = [self.name()?, self.name()?, self.name()?, self.name()?];
        Ok(ContextKey { tenant, model, lora, block_tokens, salt })
    }

    fn name(&mut self) -> Result<String, SnapshotError> {
        let bytes = self.count("bytes of a name", super::MAX_NAME_BYTES)?;
        let from = self.at;
        self.skip(bytes)?;
        String::from_utf8(self.bytes[from..from + bytes].to_vec()).map_err(|_| invalid("a name at byte", from as u64))
    }
}
