//! Plan of a resharding: the overlaps that make up one target rank's part, and the source of each.

use std::collections::BTreeMap;

use super::copies::{Copies, FragmentBox, Overlap};
use super::error::ReshardError;
use super::placement::{Fragment, Placement, Tensor};
use super::tensor_box::TensorBox;

/// Sources of the bytes of one rank.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Sorted by source part, and then by target fragment.
    overlaps: Vec<Overlap>,
    bytes: u64,
}

impl Plan {
    /// Creates the plan of the rank with that part of the target.
    ///
    /// # Errors
    /// When the placements are of different models, a tensor differs between them, or no source has a required box.
    pub fn new(source: &Placement, target: &Placement, part: usize) -> Result<Self, ReshardError> {
        if source.model() != target.model() {
            let (from, to) = (source.model(), target.model());
            return Err(ReshardError::Malformed(format!("the source is of {from:?}, and the target of {to:?}")));
        }
        let by_name: BTreeMap<&str, usize> =
            source.tensors().iter().enumerate().map(|(at, tensor)| (tensor.name.as_str(), at)).collect();
        let claims = source.claims();
        let mut load = vec![0u64; source.parts().len()];
        let (mut overlaps, mut bytes) = (Vec::new(), 0u64);
        for (at, fragment) in target.parts()[part].fragments.iter().enumerate() {
            let tensor = &target.tensors()[fragment.tensor];
            let participant = &target.parts()[part].participant;
            let gap = |missing: TensorBox| ReshardError::Gap {
                tensor: tensor.name.clone(),
                participant: participant.clone(),
                missing,
            };
            let Some(&from) = by_name.get(tensor.name.as_str()) else { return Err(gap(fragment.area.clone())) };
            check_same(&source.tensors()[from], tensor)?;
            let mut covered = 0;
            for (area, owners) in &claims[from] {
                let Some(common) = area.overlap(&fragment.area) else { continue };
                covered += common.elements();
                let amount = common.elements() * tensor.dtype.bytes();
                let (from_part, from_fragment) = least_loaded(owners, &load, part);
                load[from_part] = load[from_part].saturating_add(amount);
                let from = FragmentBox { part: from_part, fragment: from_fragment, area };
                let to = FragmentBox { part, fragment: at, area: &fragment.area };
                overlaps.push(Overlap::new(from, to, &common, tensor));
            }
            // Boxes of the source are disjoint, so each element is covered at most once.
            if covered != fragment.area.elements() {
                return Err(gap(first_gap(fragment, claims[from].keys().copied())));
            }
            bytes = bytes
                .checked_add(target.bytes(fragment))
                .ok_or_else(|| ReshardError::Malformed(format!("{participant:?} is to have more than 2^64 bytes")))?;
        }
        // The sort is stable: the overlaps of one source stay in the order of their target fragments.
        overlaps.sort_by_key(|overlap| overlap.source_part);
        Ok(Self { overlaps, bytes })
    }

    /// Returns the number of bytes to copy.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the source parts that the plan reads from.
    #[must_use]
    pub fn sources(&self) -> Vec<usize> {
        let mut parts: Vec<usize> = self.overlaps.iter().map(|overlap| overlap.source_part).collect();
        parts.dedup();
        parts
    }

    /// Returns the overlaps with one source part.
    #[must_use]
    pub fn from(&self, source_part: usize) -> &[Overlap] {
        let first = self.overlaps.partition_point(|overlap| overlap.source_part < source_part);
        let end = self.overlaps.partition_point(|overlap| overlap.source_part <= source_part);
        &self.overlaps[first..end]
    }

    /// Returns the copies from one source part. `from` has the addresses of its fragments, `to` those of the target's.
    #[must_use]
    pub fn copies<'a>(&'a self, source_part: usize, from: &'a [u64], to: &'a [u64]) -> Copies<'a> {
        Copies::new(self.from(source_part), from, to)
    }
}

/// Returns the owner of a box to read from: the one with the least to send, and among equals another one for each part,
/// so that not all ranks read from the first.
fn least_loaded(owners: &[(usize, usize)], load: &[u64], part: usize) -> (usize, usize) {
    let turn = part % owners.len();
    let in_turn = owners[turn..].iter().chain(&owners[..turn]);
    // A claimed box has at least one owner.
    in_turn.min_by_key(|(owner, _)| load[*owner]).copied().unwrap_or(owners[0])
}

fn first_gap<'a>(fragment: &Fragment, have: impl Iterator<Item = &'a TensorBox>) -> TensorBox {
    let mut left = vec![fragment.area.clone()];
    for area in have {
        left = left.iter().flat_map(|one| one.minus(area)).collect();
    }
    left.into_iter().min().unwrap_or_else(|| fragment.area.clone())
}

fn check_same(source: &Tensor, target: &Tensor) -> Result<(), ReshardError> {
    let what = if source.shape != target.shape {
        format!("shape {:?} and {:?}", source.shape, target.shape)
    } else if source.dtype != target.dtype {
        format!("{} and {}", source.dtype, target.dtype)
    } else if source.layout != target.layout {
        format!("layout {:?} and {:?}", source.layout, target.layout)
    } else {
        return Ok(());
    };
    Err(ReshardError::Differs { tensor: target.name.clone(), what })
}
