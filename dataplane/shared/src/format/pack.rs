//! Packs: payloads and tails of objects, one behind the other, and at the end an entry for each object and removal.

use kvplane_proto::Digest;
use kvplane_proto::checksum::{frame_checksum, payload_checksum};
use kvplane_proto::ids::Version;
use kvplane_proto::narrowing::{length_u32, to_u32};

use super::{Flaw, Stream, check_start, put16, put32, put64, put128, seeded, start, word16, word32, word64, word128};
use crate::types::NewObject;

/// Length of a pack's header.
pub const HEADER_BYTES: usize = 64;
/// Length of an entry.
pub const ENTRY_BYTES: usize = 56;
/// Length of a pack's trailer.
pub const TRAILER_BYTES: usize = 32;
const HEADER_MAGIC: [u8; 4] = *b"KVSP";
const TRAILER_MAGIC: [u8; 4] = *b"KVSE";
const IS_HEAD: u8 = 1;
const IS_REPLICATED: u8 = 2;

/// Kind of an entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EntryKind {
    /// An object.
    Object,
    /// A removal: earlier entries of the digest do not count.
    Removal,
    /// An object that was lost with its slot before the pack was written.
    Void,
}

/// Entry of a pack.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    pub digest: Digest,
    pub version: Version,
    pub kind: EntryKind,
    /// Start of the payload in the pack; the tail is behind it.
    pub offset: u32,
    pub bytes: u32,
    pub tail_bytes: u16,
    pub is_head: bool,
    pub is_replicated: bool,
    /// CRC-64 of the payload.
    pub checksum: u64,
    /// CRC-32C of the tail.
    pub tail_checksum: u32,
    pub tenant: u32,
}

impl Entry {
    /// Returns the entry of a removal.
    #[must_use]
    pub const fn removal(digest: Digest) -> Self {
        Self {
            digest,
            version: Version(0),
            kind: EntryKind::Removal,
            offset: 0,
            bytes: 0,
            tail_bytes: 0,
            is_head: false,
            is_replicated: false,
            checksum: 0,
            tail_checksum: 0,
            tenant: 0,
        }
    }

    /// Appends the entry.
    pub(super) fn encode(&self, into: &mut Vec<u8>) {
        let mut bytes = [0; ENTRY_BYTES];
        put128(&mut bytes, 0, self.digest.0);
        put64(&mut bytes, 16, self.version.0);
        put64(&mut bytes, 24, self.checksum);
        put32(&mut bytes, 32, self.offset);
        put32(&mut bytes, 36, self.bytes);
        put32(&mut bytes, 40, self.tail_checksum);
        put32(&mut bytes, 44, self.tenant);
        put16(&mut bytes, 48, self.tail_bytes);
        bytes[50] = match self.kind {
            EntryKind::Object => 1,
            EntryKind::Removal => 2,
            EntryKind::Void => 3,
        };
        bytes[51] = (u8::from(self.is_head) * IS_HEAD) | (u8::from(self.is_replicated) * IS_REPLICATED);
        into.extend_from_slice(&bytes);
    }

    /// Decodes an entry; `end` is the end of the payloads of its pack.
    pub(super) fn decode(bytes: &[u8], end: u64) -> Result<Self, Flaw> {
        let kind = match bytes[50] {
            1 => EntryKind::Object,
            2 => EntryKind::Removal,
            3 => EntryKind::Void,
            _ => return Err(Flaw::Values),
        };
        let entry = Self {
            digest: Digest(word128(bytes, 0)),
            version: Version(word64(bytes, 16)),
            kind,
            offset: word32(bytes, 32),
            bytes: word32(bytes, 36),
            tail_bytes: word16(bytes, 48),
            is_head: bytes[51] & IS_HEAD != 0,
            is_replicated: bytes[51] & IS_REPLICATED != 0,
            checksum: word64(bytes, 24),
            tail_checksum: word32(bytes, 40),
            tenant: word32(bytes, 44),
        };
        let entry_end = u64::from(entry.offset) + u64::from(entry.bytes) + u64::from(entry.tail_bytes);
        if kind == EntryKind::Object && (entry.bytes == 0 || entry_end > end) {
            return Err(Flaw::Values);
        }
        Ok(entry)
    }
}

/// Pack that is being filled.
#[derive(Debug)]
pub struct PackWriter {
    /// The pack's bytes, up to `end`; what is behind them is left from an earlier pack.
    bytes: Vec<u8>,
    end: usize,
    entries: Vec<Entry>,
}

impl PackWriter {
    /// Creates an empty pack; it grows as it is filled.
    #[must_use]
    pub fn new() -> Self {
        Self::within(Vec::new())
    }

    /// Creates an empty pack in the memory of an earlier one.
    #[must_use]
    pub fn within(mut memory: Vec<u8>) -> Self {
        let kept = memory.len().max(HEADER_BYTES);
        memory.resize(kept, 0);
        memory[..HEADER_BYTES].fill(0);
        Self { bytes: memory, end: HEADER_BYTES, entries: Vec::new() }
    }

    /// Returns its entries.
    #[must_use]
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Returns its length, without the entries.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.end as u64
    }

    /// Appends an object whose payload `fill` writes. Returns false, and appends nothing, if the payload differs from
    /// the checksum that its writer stated.
    pub fn push(&mut self, object: &NewObject<'_>, fill: impl FnOnce(&mut [u8])) -> bool {
        let at = self.end;
        let payload_end = at + object.bytes as usize;
        let end = payload_end + object.tail.len();
        if self.bytes.len() < end {
            self.bytes.resize(end, 0);
        }
        let payload = &mut self.bytes[at..payload_end];
        fill(payload);
        let checksum = payload_checksum(payload);
        if object.checksum != 0 && object.checksum != checksum {
            return false;
        }
        self.bytes[payload_end..end].copy_from_slice(object.tail);
        self.end = end;
        self.entries.push(Entry {
            digest: object.digest,
            version: object.version,
            kind: EntryKind::Object,
            offset: to_u32(at as u64),
            bytes: object.bytes,
            tail_bytes: kvplane_proto::narrowing::length_u16(object.tail.len()),
            is_head: object.is_head,
            is_replicated: object.is_replicated,
            checksum,
            tail_checksum: frame_checksum(object.tail),
            tenant: object.tenant,
        });
        true
    }

    /// Appends a removal.
    pub fn remove(&mut self, digest: Digest) {
        self.entries.push(Entry::removal(digest));
    }

    /// Makes the objects void for which `is_lost` returns true.
    pub fn make_void(&mut self, is_lost: impl Fn(Digest) -> bool) {
        let objects = self.entries.iter_mut().filter(|entry| entry.kind == EntryKind::Object);
        objects.filter(|entry| is_lost(entry.digest)).for_each(|entry| entry.kind = EntryKind::Void);
    }

    /// Returns the bytes of the pack under this number, and its entries. `written_ms` is the store's time.
    #[must_use]
    pub fn seal(mut self, stream: Stream, number: u64, written_ms: u64) -> (Vec<u8>, Vec<Entry>) {
        let header = &mut self.bytes[..HEADER_BYTES];
        start(header, HEADER_MAGIC);
        put64(header, 8, number);
        put64(header, 16, written_ms);
        let sum = seeded(stream, number, &[&header[..HEADER_BYTES - 8]]);
        put64(header, HEADER_BYTES - 8, sum);
        let at = self.end;
        self.bytes.truncate(at);
        self.entries.iter().for_each(|entry| entry.encode(&mut self.bytes));
        let mut trailer = [0; TRAILER_BYTES];
        start(&mut trailer, TRAILER_MAGIC);
        put32(&mut trailer, 8, length_u32(self.entries.len()));
        put32(&mut trailer, 12, to_u32(at as u64));
        put64(&mut trailer, 16, written_ms);
        let sum = seeded(stream, number, &[&self.bytes[at..], &trailer[..TRAILER_BYTES - 8]]);
        put64(&mut trailer, TRAILER_BYTES - 8, sum);
        self.bytes.extend_from_slice(&trailer);
        (self.bytes, self.entries)
    }
}

impl Default for PackWriter {
    fn default() -> Self {
        Self::new()
    }
}

/// End of a pack: its entries and its trailer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PackEnd {
    entries: Vec<u8>,
    payloads_end: u64,
    /// Time at which the pack was written, by the store's clock, in milliseconds.
    pub written_ms: u64,
}

impl PackEnd {
    /// Returns the number of bytes at the end of a pack that have its entries and its trailer, by the last bytes of the
    /// pack.
    ///
    /// # Errors
    /// If these are not a trailer. The checksum is not checked yet.
    pub fn length(last: &[u8]) -> Result<u64, Flaw> {
        let trailer = last.len().checked_sub(TRAILER_BYTES).map(|at| &last[at..]).ok_or(Flaw::Short)?;
        check_start(trailer, TRAILER_MAGIC)?;
        Ok(u64::from(word32(trailer, 8)) * ENTRY_BYTES as u64 + TRAILER_BYTES as u64)
    }

    /// Decodes the end of a pack of `pack_bytes` bytes from its last bytes.
    ///
    /// # Errors
    /// If they are not whole, or not of this pack.
    pub fn decode(stream: Stream, number: u64, pack_bytes: u64, last: &[u8]) -> Result<Self, Flaw> {
        let length = Self::length(last)?;
        let at = usize::try_from(length).ok().and_then(|length| last.len().checked_sub(length)).ok_or(Flaw::Short)?;
        let (entries, trailer) = last[at..].split_at(last.len() - at - TRAILER_BYTES);
        if word64(trailer, TRAILER_BYTES - 8) != seeded(stream, number, &[entries, &trailer[..TRAILER_BYTES - 8]]) {
            return Err(Flaw::Checksum);
        }
        let payloads_end = u64::from(word32(trailer, 12));
        if payloads_end + length != pack_bytes {
            return Err(Flaw::Values);
        }
        Ok(Self { entries: entries.to_vec(), payloads_end, written_ms: word64(trailer, 16) })
    }

    /// Returns the number of entries.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.entries.len() / ENTRY_BYTES
    }

    /// Returns true if there are no entries.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns an entry.
    ///
    /// # Errors
    /// If its values are out of range.
    pub fn entry(&self, at: usize) -> Result<Entry, Flaw> {
        Entry::decode(&self.entries[at * ENTRY_BYTES..][..ENTRY_BYTES], self.payloads_end)
    }
}
