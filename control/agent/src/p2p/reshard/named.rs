//! Resharding by names, for callers that have manifests and know the names under which the ranks registered their
//! bytes.

use std::collections::BTreeMap;

use kvplane_cluster::reshard::Placement;

use super::error::ReshardingError;
use super::manifest::{self, placement_from_json};
use super::{PartSource, Resharding};
use crate::error::Error;
use crate::p2p::catalog::Object;

/// Location of the bytes of a rank of the source.
#[derive(Clone, Debug)]
pub struct NamedPart {
    /// Rank, as named in the source's manifest.
    pub participant: String,
    /// Object that the rank registered.
    pub object: String,
    /// Version of the object; `None` for the newest.
    pub version: Option<u64>,
    /// Index of the buffer that holds the bytes.
    pub buffer: usize,
    /// Offset of each of the rank's fragments in the buffer; `None` if the fragments are packed, in the manifest's
    /// order, and fill the buffer.
    pub offsets: Option<Vec<u64>>,
}

/// Source and target of [`P2pStore::reshard_named`](crate::P2pStore::reshard_named): two manifests in JSON, and the
/// name of a rank of the target.
#[derive(Clone, Copy, Debug)]
pub struct ReshardNames<'a> {
    /// Manifest of the existing placement.
    pub source: &'a str,
    /// Manifest of the wanted placement.
    pub target: &'a str,
    /// Rank of the target that reads.
    pub participant: &'a str,
}

/// Returns the number of bytes of a rank of a placement, with its fragments packed.
///
/// # Errors
/// When the manifest is invalid, or has no such rank.
pub fn packed_bytes(manifest: &str, participant: &str) -> Result<u64, Error> {
    let placement = placement_from_json(manifest)?;
    let part = placement.part(participant).map_err(ReshardingError::Placement)?;
    Ok(placement.packed(part).map_err(ReshardingError::Placement)?.1)
}

impl ReshardNames<'_> {
    /// Parses the manifests: the source and the target.
    ///
    /// # Errors
    /// When one is invalid.
    pub(in crate::p2p) fn placements(&self) -> Result<(Placement, Placement), ReshardingError> {
        let source = manifest::read(self.source).map_err(ReshardingError::SourceManifest)?;
        let target = manifest::read(self.target).map_err(ReshardingError::TargetManifest)?;
        Ok((source, target))
    }
}

/// Returns the locations of the parts that are needed and given; `find` looks an object up, by name and version.
///
/// # Errors
/// When a part is given twice, or its object does not exist or differs in size from the part.
pub(in crate::p2p) fn part_sources(
    resharding: &Resharding<'_>,
    parts: &[NamedPart],
    find: impl Fn(&str, Option<u64>) -> Result<Object, Error>,
) -> Result<BTreeMap<usize, PartSource>, Error> {
    let source = resharding.source();
    let mut from = BTreeMap::new();
    for part in resharding.plan().sources() {
        let name = &source.parts()[part].participant;
        let mut known = parts.iter().filter(|one| one.participant == *name);
        match (known.next(), known.next()) {
            (Some(one), None) => {
                let object = find(&one.object, one.version)?;
                from.insert(part, part_source(source, part, one, object)?)
            }
            (Some(_), Some(_)) => return Err(ReshardingError::PartTwice { participant: name.clone() }.into()),
            (None, _) => continue,
        };
    }
    Ok(from)
}

fn part_source(
    source: &Placement,
    part: usize,
    named: &NamedPart,
    object: Object,
) -> Result<PartSource, ReshardingError> {
    let buffer = named.buffer;
    let offsets = match &named.offsets {
        Some(offsets) => offsets.clone(),
        None => {
            let (packed, bytes) = source.packed(part).map_err(ReshardingError::Placement)?;
            let buffer_bytes = object.layout.sizes().get(buffer).copied().unwrap_or(0);
            if buffer_bytes != bytes {
                let (object, participant) = (named.object.clone(), named.participant.clone());
                return Err(ReshardingError::PartBytes { object, buffer, buffer_bytes, participant, bytes });
            }
            packed
        }
    };
    Ok(PartSource { object, buffer, offsets })
}

/// Returns the offsets of a rank's fragments in memory of so many bytes: `to`, or those of packed fragments that fill
/// the memory.
///
/// # Errors
/// When packed fragments do not fill the memory.
pub(in crate::p2p) fn target_offsets(
    target: &Placement,
    part: usize,
    memory_bytes: u64,
    to: Option<&[u64]>,
) -> Result<Vec<u64>, ReshardingError> {
    let (packed, bytes) = target.packed(part).map_err(ReshardingError::Placement)?;
    match to {
        Some(to) => Ok(to.to_vec()),
        None if bytes == memory_bytes => Ok(packed),
        None => {
            let participant = target.parts()[part].participant.clone();
            Err(ReshardingError::MemoryBytes { participant, bytes, memory_bytes })
        }
    }
}
