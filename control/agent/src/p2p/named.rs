//! Resharding by names, for callers that have manifests and know under which names the ranks registered their bytes.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvplane_cluster::reshard::{Placement, ReshardError};
use kvplane_engine::Region;

use super::ranges::{ReadBytes, ReadOptions};
use super::reshard::{PartSource, Resharding};
use super::{P2pStore, placement_from_json};
use crate::error::Error;

/// Where a rank of the source has its bytes, by name.
#[derive(Clone, Debug)]
pub struct NamedPart {
    /// The rank, as the source's manifest calls it.
    pub participant: String,
    /// The object that it registered.
    pub object: String,
    /// Its version; the newest unless it is said.
    pub version: Option<u64>,
    /// In which of its buffers the bytes are.
    pub buffer: usize,
    /// Where each of the rank's fragments begins there; without, one directly after the other in the manifest's order,
    /// and nothing else.
    pub offsets: Option<Vec<u64>>,
}

/// Source and target of [`P2pStore::reshard_named`]: two manifests in JSON, and a rank of the target by its name.
#[derive(Clone, Copy, Debug)]
pub struct ReshardNames<'a> {
    /// The manifest of the placement that there is.
    pub source: &'a str,
    /// The manifest of the placement that is to be.
    pub target: &'a str,
    /// The rank of the target that reads.
    pub participant: &'a str,
}

/// How many bytes a rank of a placement has, one fragment directly after the other.
///
/// # Errors
/// When the manifest is none, or has no such rank.
pub fn packed_bytes(manifest: &str, participant: &str) -> Result<u64, Error> {
    let placement = placement_from_json(manifest)?;
    let part = placement.part(participant).map_err(|error| refused(&error))?;
    Ok(placement.packed(part).map_err(|error| refused(&error))?.1)
}

fn refused(error: &ReshardError) -> Error {
    Error::Argument(error.to_string())
}

impl P2pStore {
    /// As [`Self::reshard`], from manifests in JSON of the source and of the target: reads what the rank of that name
    /// is to have of the `parts` that it overlaps with; others may be missing. Our fragments begin at `to`, or lie one
    /// directly after the other and fill the memory.
    ///
    /// # Errors
    /// As there, when a manifest makes no sense, or an object is not there or has not the size of its rank.
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
                (Some(_), Some(_)) => return Err(Error::Argument(format!("it is said twice where {name:?} is"))),
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
                        "buffer {buffer} of {:?} has {size} bytes, and {:?} {bytes}: say where its fragments begin",
                        named.object, named.participant
                    )));
                }
                packed
            }
        };
        Ok(PartSource { object, buffer, offsets })
    }
}
