//! Placements: the boxes of tensors that each rank has.

use std::collections::BTreeMap;

use super::dtype::Dtype;
use super::error::ReshardError;
use super::tensor_box::TensorBox;

/// Maximum number of dimensions of a tensor.
pub const MAX_DIMENSIONS: usize = 16;
/// Maximum number of boxes of all ranks together.
pub const MAX_FRAGMENTS: usize = 1 << 22;

/// Description of a tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Tensor {
    pub name: String,
    /// Length in each dimension, in elements; none is 0.
    pub shape: Vec<u64>,
    /// Type of its elements.
    pub dtype: Dtype,
    /// Order and packing of its elements, as text; equal texts mean equal order.
    pub layout: String,
}

/// Box of a tensor that a rank has, in row-major order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fragment {
    /// Index of the tensor in the placement.
    pub tensor: usize,
    /// Box within the tensor.
    pub area: TensorBox,
}

/// Fragments of one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Part {
    /// Name of the rank.
    pub participant: String,
    pub fragments: Vec<Fragment>,
}

/// Map of ranks to fragments. Its constructor checks that boxes are within their tensors, and that the boxes of one
/// tensor are equal or disjoint, over all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    model: String,
    tensors: Vec<Tensor>,
    parts: Vec<Part>,
}

fn malformed<T>(what: String) -> Result<T, ReshardError> {
    Err(ReshardError::Malformed(what))
}

impl Tensor {
    fn check(&self) -> Result<TensorBox, ReshardError> {
        let name = &self.name;
        if self.shape.is_empty() || self.shape.len() > MAX_DIMENSIONS {
            let dimensions = self.shape.len();
            return malformed(format!(
                "tensor {name:?} has {dimensions} dimensions: it must have 1 to {MAX_DIMENSIONS}"
            ));
        }
        let whole = TensorBox::new(vec![0; self.shape.len()], self.shape.clone());
        let whole = whole.map_err(|why| ReshardError::Malformed(format!("tensor {name:?}: {why}")))?;
        match whole.elements().checked_mul(self.dtype.bytes()) {
            Some(_) => Ok(whole),
            None => malformed(format!("tensor {name:?} of {} has more than 2^64 bytes", self.dtype)),
        }
    }
}

impl Placement {
    /// Creates a placement after checking it. `model` is a name that source and target must have in common.
    ///
    /// # Errors
    /// When a name is used twice, a tensor or box is malformed, or two boxes of a tensor overlap and differ.
    pub fn new(model: String, tensors: Vec<Tensor>, parts: Vec<Part>) -> Result<Self, ReshardError> {
        let wholes: Vec<TensorBox> = tensors.iter().map(Tensor::check).collect::<Result<_, _>>()?;
        if let Some(name) = twice(tensors.iter().map(|tensor| tensor.name.as_str())) {
            return malformed(format!("tensor {name:?} is there twice"));
        }
        if let Some(name) = twice(parts.iter().map(|part| part.participant.as_str())) {
            return malformed(format!("participant {name:?} is there twice"));
        }
        let fragments: usize = parts.iter().map(|part| part.fragments.len()).sum();
        if fragments > MAX_FRAGMENTS {
            return malformed(format!("{fragments} fragments: at most {MAX_FRAGMENTS} are taken"));
        }
        for part in &parts {
            for (at, fragment) in part.fragments.iter().enumerate() {
                let who = &part.participant;
                let Some(tensor) = tensors.get(fragment.tensor) else {
                    return malformed(format!(
                        "fragment {at} of {who:?} is of tensor {}, which does not exist",
                        fragment.tensor
                    ));
                };
                let (name, area, shape) = (&tensor.name, &fragment.area, &tensor.shape);
                if area.shape().len() != shape.len() {
                    let (ours, theirs) = (area.shape().len(), shape.len());
                    return malformed(format!(
                        "tensor {name:?}: {who:?} has a box of {ours} dimensions, and the tensor has {theirs}"
                    ));
                }
                if wholes[fragment.tensor].overlap(area).as_ref() != Some(area) {
                    return malformed(format!("tensor {name:?}: {area} of {who:?} is not within its shape {shape:?}"));
                }
            }
        }
        let placement = Self { model, tensors, parts };
        placement.check_claims()?;
        Ok(placement)
    }

    /// Checks that no two boxes of a tensor overlap and differ.
    fn check_claims(&self) -> Result<(), ReshardError> {
        for (tensor, claims) in self.tensors.iter().zip(self.claims()) {
            let mut boxes: Vec<(&TensorBox, usize)> =
                claims.iter().map(|(area, owners)| (*area, owners[0].0)).collect();
            // Sorted along the dimension with the most distinct offsets, only neighbours must be compared.
            let begins = |dimension: usize| {
                let mut all: Vec<u64> = boxes.iter().map(|(area, _)| area.offset()[dimension]).collect();
                all.sort_unstable();
                all.dedup();
                all.len()
            };
            let sweep = (0..tensor.shape.len()).max_by_key(|&dimension| begins(dimension)).unwrap_or(0);
            boxes.sort_by_key(|(area, _)| area.offset()[sweep]);
            for (at, &(first, owner)) in boxes.iter().enumerate() {
                let end = first.end(sweep);
                let near = boxes[at + 1..].iter().take_while(|(area, _)| area.offset()[sweep] < end);
                if let Some(&(second, other)) = near.into_iter().find(|(area, _)| area.overlap(first).is_some()) {
                    let name = |part: usize| self.parts[part].participant.clone();
                    let claims = Box::new([(name(owner), first.clone()), (name(other), second.clone())]);
                    return Err(ReshardError::Overlap { tensor: tensor.name.clone(), claims });
                }
            }
        }
        Ok(())
    }

    /// Returns, by tensor, each distinct box with its owners: part and fragment.
    pub(super) fn claims(&self) -> Vec<BTreeMap<&TensorBox, Vec<(usize, usize)>>> {
        let mut claims: Vec<BTreeMap<&TensorBox, Vec<(usize, usize)>>> = vec![BTreeMap::new(); self.tensors.len()];
        for (part, one) in self.parts.iter().enumerate() {
            for (at, fragment) in one.fragments.iter().enumerate() {
                claims[fragment.tensor].entry(&fragment.area).or_default().push((part, at));
            }
        }
        claims
    }

    /// Returns the name that source and target must have in common.
    #[must_use]
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Returns the tensors.
    #[must_use]
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Returns the parts, one per rank.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Returns the index of a rank's part.
    ///
    /// # Errors
    /// When the rank has none.
    pub fn part(&self, participant: &str) -> Result<usize, ReshardError> {
        self.parts.iter().position(|part| part.participant == participant).ok_or_else(|| {
            let some: Vec<&str> = self.parts.iter().take(8).map(|part| part.participant.as_str()).collect();
            let more = if self.parts.len() > 8 { ", …" } else { "" };
            let known = format!("{}{more}", some.join(", "));
            ReshardError::NoParticipant { participant: participant.to_owned(), known }
        })
    }

    /// Returns the size of a fragment in bytes.
    #[must_use]
    pub fn bytes(&self, fragment: &Fragment) -> u64 {
        fragment.area.elements() * self.tensors[fragment.tensor].dtype.bytes()
    }

    /// Returns the offset of each fragment of a part when they are packed without gaps, and the end of the last one.
    ///
    /// # Errors
    /// When the end is beyond 2^64 bytes.
    pub fn packed(&self, part: usize) -> Result<(Vec<u64>, u64), ReshardError> {
        let mut end = 0u64;
        let mut offsets = Vec::with_capacity(self.parts[part].fragments.len());
        for fragment in &self.parts[part].fragments {
            offsets.push(end);
            end = end.checked_add(self.bytes(fragment)).ok_or_else(|| {
                let who = &self.parts[part].participant;
                ReshardError::Malformed(format!("the fragments of {who:?} have more than 2^64 bytes together"))
            })?;
        }
        Ok((offsets, end))
    }
}

fn twice<'a>(names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let mut names: Vec<&str> = names.collect();
    names.sort_unstable();
    names.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
}
