//! Segment: named, registered memory of a process, which peers read and write by offset.
//!
//! A segment consists of one or more regions; a peer addresses `(segment, offset)` of one region. A peer that opens the
//! segment by name receives its descriptor.

use core::fmt;

use crate::ids::SegmentId;
use crate::limits::Limits;

/// One registered region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionDescriptor {
    /// Id of the region, for reads and writes.
    pub segment: SegmentId,
    /// Address in the owner's process: an identity for people and for Mooncake's tools, never dereferenced by peers.
    pub address: u64,
    /// Length of the region.
    pub bytes: u64,
    /// True if a peer on the same host can map the region.
    pub shareable: bool,
    /// True if peers may write the region.
    pub writable: bool,
}

/// Descriptor of a segment: everything that a peer needs to use it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentDescriptor {
    /// Name of the segment in the catalog.
    pub name: String,
    /// Regions of the segment that peers may use.
    pub regions: Vec<RegionDescriptor>,
}

/// Error of a body that is not a segment descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentError {
    /// The body is shorter or longer than its fields require.
    Length(usize),
    /// The name is too long or not UTF-8.
    Name,
    /// The descriptor has more regions than the limit.
    Regions(usize),
}

impl fmt::Display for SegmentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length(bytes) => write!(f, "a segment descriptor of {bytes} bytes has the wrong length"),
            Self::Name => write!(f, "the segment's name is not UTF-8 of at most {} bytes", Limits::NAME_BYTES),
            Self::Regions(count) => {
                write!(f, "a segment of {count} regions is over the limit of {}", Limits::REGIONS_PER_SEGMENT)
            }
        }
    }
}

impl std::error::Error for SegmentError {}

const REGION_BYTES: usize = 32;
/// Bits of a region's fourth word; the others are reserved and zero.
const SHAREABLE: u64 = 1;
const WRITABLE: u64 = 2;

const fn flags(region: &RegionDescriptor) -> u64 {
    region.shareable as u64 * SHAREABLE + region.writable as u64 * WRITABLE
}

impl SegmentDescriptor {
    /// Encodes the descriptor for the wire.
    ///
    /// # Panics
    /// If the name or the regions exceed the limits; registration rejects such segments.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        assert!(self.name.len() <= Limits::NAME_BYTES, "segment name of {} bytes", self.name.len());
        assert!(self.regions.len() <= Limits::REGIONS_PER_SEGMENT, "segment of {} regions", self.regions.len());
        let mut out = Vec::with_capacity(4 + self.name.len() + self.regions.len() * REGION_BYTES);
        out.extend_from_slice(&crate::narrowing::length_u16(self.name.len()).to_le_bytes());
        out.extend_from_slice(&crate::narrowing::length_u16(self.regions.len()).to_le_bytes());
        out.extend_from_slice(self.name.as_bytes());
        for region in &self.regions {
            for word in [region.segment.to_bits(), region.address, region.bytes, flags(region)] {
                out.extend_from_slice(&word.to_le_bytes());
            }
        }
        out
    }

    /// Decodes a descriptor.
    ///
    /// # Errors
    /// Returns an error if the body is not a complete descriptor within the limits.
    pub fn decode(body: &[u8]) -> Result<Self, SegmentError> {
        let (fixed, rest) = body.split_at_checked(4).ok_or(SegmentError::Length(body.len()))?;
        let name_bytes = usize::from(u16::from_le_bytes([fixed[0], fixed[1]]));
        let count = usize::from(u16::from_le_bytes([fixed[2], fixed[3]]));
        if name_bytes > Limits::NAME_BYTES {
            return Err(SegmentError::Name);
        }
        if count > Limits::REGIONS_PER_SEGMENT {
            return Err(SegmentError::Regions(count));
        }
        let (name, regions) = rest.split_at_checked(name_bytes).ok_or(SegmentError::Length(body.len()))?;
        if regions.len() != count * REGION_BYTES {
            return Err(SegmentError::Length(body.len()));
        }
        let regions = regions
            .chunks_exact(REGION_BYTES)
            .map(|record| {
                let word = |at: usize| {
                    let mut word = [0; 8];
                    word.copy_from_slice(&record[at * 8..at * 8 + 8]);
                    u64::from_le_bytes(word)
                };
                RegionDescriptor {
                    segment: SegmentId::from_bits(word(0)),
                    address: word(1),
                    bytes: word(2),
                    shareable: word(3) & SHAREABLE != 0,
                    writable: word(3) & WRITABLE != 0,
                }
            })
            .collect();
        Ok(Self { name: core::str::from_utf8(name).map_err(|_| SegmentError::Name)?.to_owned(), regions })
    }
}
