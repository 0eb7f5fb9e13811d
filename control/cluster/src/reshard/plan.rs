//! Which overlaps make up what one rank is to have, and from whom each comes.

use std::collections::BTreeMap;

use super::copies::{Copies, FragmentBox, Overlap};
use super::error::ReshardError;
use super::placement::{Fragment, Placement, Tensor};
use super::tensor_box::TensorBox;

/// Where the bytes of one rank come from.
#[derive(Clone, Debug)]
pub struct Plan {
    /// In order of the parts they come from, and for each in the order of the fragments they go to.
    overlaps: Vec<Overlap>,
    bytes: u64,
}

impl Plan {
    /// For the rank with that part of the target.
    ///
    /// # Errors
    /// When the placements are of different models, a tensor differs between them, or no source has what is wanted.
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
            // Boxes of the source are apart from each other, so what is covered is covered once.
            if covered != fragment.area.elements() {
                return Err(gap(first_gap(fragment, claims[from].keys().copied())));
            }
            bytes = bytes
                .checked_add(target.bytes(fragment))
                .ok_or_else(|| ReshardError::Malformed(format!("{participant:?} is to have more than 2^64 bytes")))?;
        }
        // Stable: those of one source stay in order of their fragments.
        overlaps.sort_by_key(|overlap| overlap.source_part);
        Ok(Self { overlaps, bytes })
    }

    /// All bytes that are copied.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The parts of the source that something comes from.
    #[must_use]
    pub fn sources(&self) -> Vec<usize> {
        let mut parts: Vec<usize> = self.overlaps.iter().map(|overlap| overlap.source_part).collect();
        parts.dedup();
        parts
    }

    /// What comes from one part of the source.
    #[must_use]
    pub fn from(&self, source_part: usize) -> &[Overlap] {
        let first = self.overlaps.partition_point(|overlap| overlap.source_part < source_part);
        let end = self.overlaps.partition_point(|overlap| overlap.source_part <= source_part);
        &self.overlaps[first..end]
    }

    /// The copies from one part of the source. `from` says where its fragments begin, `to` where ours do.
    #[must_use]
    pub fn copies<'a>(&'a self, source_part: usize, from: &'a [u64], to: &'a [u64]) -> Copies<'a> {
        Copies::new(self.from(source_part), from, to)
    }
}

/// Who is asked of those who have the same box: the one with the least to give, and of equals another one for each
/// part, so that not all ranks ask the first.
fn least_loaded(owners: &[(usize, usize)], load: &[u64], part: usize) -> (usize, usize) {
    let turn = part % owners.len();
    let in_turn = owners[turn..].iter().chain(&owners[..turn]);
    // There is at least one.
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
