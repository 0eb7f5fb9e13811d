//! Boxes: an interval in each dimension of a tensor, counted in elements.

use std::fmt;

/// A box: where it begins and how long it is, by dimension. Never empty, and nothing in it is beyond 2^64 elements.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorBox {
    offset: Vec<u64>,
    shape: Vec<u64>,
}

impl TensorBox {
    /// One that begins here and is as long as that.
    ///
    /// # Errors
    /// When the numbers of dimensions differ, a length is 0, or it is more than can be counted.
    pub fn new(offset: Vec<u64>, shape: Vec<u64>) -> Result<Self, String> {
        if offset.len() != shape.len() {
            return Err(format!("an offset of {} dimensions for a shape of {}", offset.len(), shape.len()));
        }
        if let Some(at) = shape.iter().position(|&length| length == 0) {
            return Err(format!("a length of 0 in dimension {at}: leave out what is empty"));
        }
        if offset.iter().zip(&shape).any(|(&offset, &length)| offset.checked_add(length).is_none())
            || shape.iter().try_fold(1u64, |product, &length| product.checked_mul(length)).is_none()
        {
            return Err(format!("{shape:?} from {offset:?} on is beyond 2^64"));
        }
        Ok(Self { offset, shape })
    }

    /// Where it begins.
    #[must_use]
    pub fn offset(&self) -> &[u64] {
        &self.offset
    }

    /// How long it is.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// How many elements it has.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Where it ends in a dimension.
    pub(super) fn end(&self, dimension: usize) -> u64 {
        self.offset[dimension] + self.shape[dimension]
    }

    /// What two boxes of a tensor have in common.
    #[must_use]
    pub fn overlap(&self, other: &Self) -> Option<Self> {
        let mut common = Self { offset: Vec::with_capacity(self.offset.len()), shape: Vec::new() };
        for dimension in 0..self.offset.len().min(other.offset.len()) {
            let first = self.offset[dimension].max(other.offset[dimension]);
            let length = self.end(dimension).min(other.end(dimension)).checked_sub(first)?;
            if length == 0 {
                return None;
            }
            common.offset.push(first);
            common.shape.push(length);
        }
        (self.offset.len() == other.offset.len()).then_some(common)
    }

    /// What is left of it without another one: boxes that are apart from each other.
    #[must_use]
    pub fn minus(&self, other: &Self) -> Vec<Self> {
        let Some(common) = self.overlap(other) else { return vec![self.clone()] };
        let (mut rest, mut left) = (self.clone(), Vec::new());
        for dimension in 0..self.offset.len() {
            let (from, to) = (common.offset[dimension], common.end(dimension));
            for (first, end) in [(rest.offset[dimension], from), (to, rest.end(dimension))] {
                if first < end {
                    let mut slab = rest.clone();
                    (slab.offset[dimension], slab.shape[dimension]) = (first, end - first);
                    left.push(slab);
                }
            }
            (rest.offset[dimension], rest.shape[dimension]) = (from, to - from);
        }
        left
    }
}

impl fmt::Display for TensorBox {
    /// As slices are written: `[0:4, 8:16]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for dimension in 0..self.offset.len() {
            let comma = if dimension > 0 { ", " } else { "" };
            write!(f, "{comma}{}:{}", self.offset[dimension], self.end(dimension))?;
        }
        f.write_str("]")
    }
}
