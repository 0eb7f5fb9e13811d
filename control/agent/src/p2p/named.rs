//! Resharding by names, for callers that have manifests and know the names under which the ranks registered their
//! bytes.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvplane_cluster::reshard::{Placement, ReshardError};
use kvplane_engine::Region;

use super::ranges::{ReadBytes, ReadOptions};
use super::reshard::{PartSource, Resharding};
use super::{P2pStore, placement_from_json};
use crate::error::Error;

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

/// Source and target of [`P2pStore::reshard_named`]: two manifests in JSON, and the name of a rank of the target.
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
    let part = placement.part(participant).map_err(|error| refused(&error))?;
    Ok(placement.packed(part).map_err(|error| refused(&error))?.1)
}

fn refused(error: &ReshardError) -> Error {
    Error::Argument(error.to_string())
}

impl P2pStore {
    /// Like [`Self::reshard`], from manifests in JSON: reads the fragments of this rank of the target from the `parts`
    /// that overlap with them; other parts may be missing. The rank's fragments begin at the offsets `to`, or are
    /// packed and fill the memory.
    ///
    /// # Errors
    /// Errors of [`Self::reshard`]; also an invalid manifest, or an object that does not exist or differs in size
    /// from its rank.
    pub fn reshard_named(
        &self,
        names: ReshardNames<'_>,
        parts: &[NamedPart],
        memory: &Arc<Region>,
        to: Option<&[u64]>,
        options: &ReadOptions<'_>,
    ) -> Result<ReadBytes, Error> {
        let ReshardNames { source, target, participant } = names;
        let named = |what: &str, error: Error| Error::Argument(format!("of the {what}: {error}"));
        let source = placement_from_json(source).map_err(|error| named("source", error))?;
        let target = placement_from_json(target).map_err(|error| named("target", error))?;
        let resharding = Resharding::new(&source, &target, participant).map_err(|error| refused(&error))?;
        let mut from = BTreeMap::new();
        for part in resharding.plan().sources() {
            let name = &source.parts()[part].participant;
            let mut known = parts.iter().filter(|one| one.participant == *name);
            match (known.next(), known.next()) {
                (Some(one), None) => from.insert(part, self.part_source(&source, part, one)?),
                (Some(_), Some(_)) => return Err(Error::Argument(format!("part {name:?} is given twice"))),
                (None, _) => continue,
            };
        }
        let (packed, bytes) = target.packed(resharding.part()).map_err(|error| refused(&error))?;
        let to = match to {
            Some(to) => to,
            None if bytes == memory.bytes() as u64 => &packed,
            None => {
                let what = format!("{participant:?} has {bytes} bytes, and the memory {}", memory.bytes());
                return Err(Error::Argument(what));
            }
        };
        self.reshard(&resharding, &from, memory, to, options)
    }

    fn part_source(&self, source: &Placement, part: usize, named: &NamedPart) -> Result<PartSource, Error> {
        let (buffer, object) = (named.buffer, self.find(&named.object, named.version)?);
        let offsets = match &named.offsets {
            Some(offsets) => offsets.clone(),
            None => {
                let (packed, bytes) = source.packed(part).map_err(|error| refused(&error))?;
                let size = object.layout.sizes().get(buffer).copied().unwrap_or(0);
                if size != bytes {
                    return Err(Error::Argument(format!(
                        "buffer {buffer} of {:?} has {size} bytes, and {:?} {bytes}: give the offsets of its fragments",
                        named.object, named.participant
                    )));
                }
                packed
            }
        };
        Ok(PartSource { object, buffer, offsets })
    }
}
