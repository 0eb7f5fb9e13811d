//! Footer of a sealed segment: a list of its records, in pages from the segment's end towards its start.
//!
//! An entry holds what the index holds, with the payload's checksum, so that a get need not read the record's head.
//! Page 0 is the last of the segment; each page stands for itself, so that reading and writing need one page of memory.
//! A footer is written only after the records that it lists are durable.

use kvplane_proto::checksum::frame_checksum;
use kvplane_proto::digest::Digest;
use kvplane_proto::ids::Version;
use kvplane_proto::narrowing::{length_u32, low_u8, low_u64};
use kvplane_proto::rng::mix64;

use super::{
    AWAY_MOST, Flaw, Kind, RecordHeader, Shape, check_start, put16, put32, put64, put128, seeded, start, word16,
    word32, word64, word128,
};

/// Bytes of a page's header.
pub const FOOTER_HEADER_BYTES: usize = 64;
/// Bytes of an entry.
pub const FOOTER_ENTRY_BYTES: usize = 56;
const MAGIC: [u8; 4] = *b"KVTF";
const CHECKSUM_AT: usize = 60;
const EXTENT: u8 = 1;
const PINNED: u8 = 2;
const NAMES_PARTS: u8 = 8;
const COPIED: u8 = 16;
/// Bits of the kind in its byte, and of the blocks between head and payload in their word: the others have the number
/// of the tenant.
const KIND_BITS: u32 = 3;
const AWAY_BITS: u32 = 5;
/// Offset of the mark in a page's header that its entries name tenants.
const TENANTS_AT: usize = 40;

const _: () = assert!(AWAY_MOST as u32 == (1 << AWAY_BITS) - 1 && KIND_BITS + AWAY_BITS == 8);

/// One record of the segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct FooterEntry {
    pub kind: Kind,
    pub shape: Shape,
    /// True if the object is hard-pinned: reclaim keeps it.
    pub pinned: bool,
    pub digest: Digest,
    pub version: Version,
    pub sequence: u64,
    /// Offset of the record in units of [`UNIT_BYTES`](super::UNIT_BYTES), from the segment's start.
    pub unit: u32,
    /// Blocks between an extent's head and its payload: see [`Shape::payload_at`].
    pub away: u8,
    /// CRC-64/NVME of the whole payload.
    pub payload_checksum: u64,
    /// Number of the tenant that the object is charged to; `None` if a version wrote the footer that named no tenants.
    pub tenant: Option<u32>,
}

impl FooterEntry {
    /// Returns the entry of a record that begins at `unit` of its segment, of the tenant with this number.
    #[must_use]
    pub const fn of(record: &RecordHeader, unit: u32, tenant: Option<u32>) -> Self {
        Self {
            kind: record.kind,
            shape: record.shape,
            pinned: record.pinned,
            digest: record.digest,
            version: record.version,
            sequence: record.sequence,
            unit,
            away: record.away,
            payload_checksum: record.payload_checksum,
            tenant,
        }
    }

    /// Encodes the entry.
    pub fn encode(&self, out: &mut [u8]) {
        put128(out, 0, self.digest.0);
        put64(out, 16, self.version.0);
        put64(out, 24, self.sequence);
        put32(out, 32, self.unit);
        put32(out, 36, self.shape.payload_bytes);
        put16(out, 40, self.shape.key_bytes);
        let tenant = self.tenant.unwrap_or(0);
        out[42] = self.kind.code() | low_u8((tenant >> (32 - AWAY_BITS)).into()) << KIND_BITS;
        let flag = |flag, set| if set { flag } else { 0 };
        let (extent, names_parts) = (flag(EXTENT, self.shape.extent), flag(NAMES_PARTS, self.shape.names_parts));
        out[43] = extent | names_parts | flag(PINNED, self.pinned) | flag(COPIED, self.shape.copied);
        put32(out, 44, u32::from(self.away) | tenant << AWAY_BITS);
        put64(out, 48, self.payload_checksum ^ self.bond());
    }

    /// Returns a value that is mixed into the checksum, so that a checksum stored beside another object's digest does
    /// not match.
    const fn bond(&self) -> u64 {
        let name = mix64(low_u64(self.digest.0) ^ mix64((self.digest.0 >> 64) as u64));
        mix64(mix64(name ^ self.version.0) ^ self.sequence)
    }

    /// Decodes an entry of a page whose checksum matched, and which names tenants or not.
    #[must_use]
    pub fn decode(bytes: &[u8], names_tenants: bool) -> Option<Self> {
        let (kind, away) = (bytes[42], word32(bytes, 44));
        let tenant = away >> AWAY_BITS | u32::from(kind >> KIND_BITS) << (32 - AWAY_BITS);
        if !names_tenants && tenant != 0 {
            return None;
        }
        let entry = Self {
            kind: Kind::from_code(kind & ((1 << KIND_BITS) - 1))?,
            shape: Shape {
                payload_bytes: word32(bytes, 36),
                key_bytes: word16(bytes, 40),
                extent: bytes[43] & EXTENT != 0,
                names_parts: bytes[43] & NAMES_PARTS != 0,
                copied: bytes[43] & COPIED != 0,
            },
            pinned: bytes[43] & PINNED != 0,
            digest: Digest(word128(bytes, 0)),
            version: Version(word64(bytes, 16)),
            sequence: word64(bytes, 24),
            unit: word32(bytes, 32),
            away: low_u8(away.into()) & AWAY_MOST,
            payload_checksum: 0,
            tenant: names_tenants.then_some(tenant),
        };
        Some(Self { payload_checksum: word64(bytes, 48) ^ entry.bond(), ..entry })
    }
}

/// Header of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FooterPage {
    /// Number of the segment.
    pub segment: u32,
    /// Generation of the segment that the footer describes.
    pub generation: u64,
    /// Number of this page.
    pub page: u32,
    /// Number of pages of the footer.
    pub pages: u32,
    /// Number of entries of this page.
    pub entries: u32,
    /// Records up to this sequence were durable before the last record of the segment was appended.
    pub durable_sequence: u64,
    /// True if the entries name tenants: all do but those of earlier versions.
    pub names_tenants: bool,
}

impl FooterPage {
    /// Returns the number of entries that fit in a page of `page_bytes`.
    #[must_use]
    pub const fn capacity(page_bytes: u32) -> u32 {
        length_u32((page_bytes as usize - FOOTER_HEADER_BYTES) / FOOTER_ENTRY_BYTES)
    }

    /// Encodes a whole page: this header and `entries`, the rest zero.
    pub fn encode(&self, uuid: u128, entries: &[FooterEntry], out: &mut [u8]) {
        out.fill(0);
        for (entry, place) in entries.iter().zip(out[FOOTER_HEADER_BYTES..].chunks_exact_mut(FOOTER_ENTRY_BYTES)) {
            entry.encode(place);
        }
        let body = frame_checksum(&out[FOOTER_HEADER_BYTES..]);
        start(out, MAGIC);
        put32(out, 8, self.segment);
        put32(out, 12, self.page);
        put64(out, 16, self.generation);
        put32(out, 24, self.pages);
        put32(out, 28, self.entries);
        put64(out, 32, self.durable_sequence);
        out[TENANTS_AT] = self.names_tenants.into();
        put32(out, 56, body);
        let checksum = seeded(uuid, &out[..CHECKSUM_AT]);
        put32(out, CHECKSUM_AT, checksum);
    }

    /// Decodes a page's header and verifies the whole page.
    ///
    /// # Errors
    /// If the bytes are not a page of this device, or are damaged.
    pub fn decode(bytes: &[u8], uuid: u128) -> Result<Self, Flaw> {
        check_start(bytes, MAGIC)?;
        if word32(bytes, CHECKSUM_AT) != seeded(uuid, &bytes[..CHECKSUM_AT])
            || word32(bytes, 56) != frame_checksum(&bytes[FOOTER_HEADER_BYTES..])
        {
            return Err(Flaw::Checksum);
        }
        let page = Self {
            segment: word32(bytes, 8),
            generation: word64(bytes, 16),
            page: word32(bytes, 12),
            pages: word32(bytes, 24),
            entries: word32(bytes, 28),
            durable_sequence: word64(bytes, 32),
            names_tenants: bytes[TENANTS_AT] != 0,
        };
        let plausible = page.page < page.pages && page.entries <= Self::capacity(length_u32(bytes.len()));
        if plausible { Ok(page) } else { Err(Flaw::Values) }
    }

    /// Returns the entries of a page that was verified.
    pub fn entries(bytes: &[u8], entries: u32) -> impl Iterator<Item = FooterEntry> + '_ {
        let places = bytes[FOOTER_HEADER_BYTES..].chunks_exact(FOOTER_ENTRY_BYTES);
        let names_tenants = bytes[TENANTS_AT] != 0;
        places.take(entries as usize).filter_map(move |entry| FooterEntry::decode(entry, names_tenants))
    }
}
