//! Boxes: an interval in each dimension of a tensor, counted in elements.

use std::fmt;

/// Box: offset and length by dimension. Never empty; offsets and the number of elements fit into 64 bits.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TensorBox {
    offset: Vec<u64>,
    shape: Vec<u64>,
}

/// Reason why offsets and lengths make no box.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum BoxError {
    /// Offset and shape have different numbers of dimensions.
    Dimensions { offset: usize, shape: usize },
    /// A length is 0.
    Empty { dimension: usize },
    /// An end, or the number of elements, does not fit into 64 bits.
    TooLarge { offset: Vec<u64>, shape: Vec<u64> },
}

impl fmt::Display for BoxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Dimensions { offset, shape } => {
                write!(f, "an offset of {offset} dimensions for a shape of {shape}")
            }
            Self::Empty { dimension } => {
                write!(f, "a length of 0 in dimension {dimension}: leave out what is empty")
            }
            Self::TooLarge { offset, shape } => write!(f, "{shape:?} from {offset:?} on is beyond 2^64"),
        }
    }
}

impl std::error::Error for BoxError {}

impl TensorBox {
    /// Creates a box from its offset and length in each dimension.
    ///
    /// # Errors
    /// When the numbers of dimensions differ, a length is 0, or a number does not fit into 64 bits.
    pub fn new(offset: Vec<u64>, shape: Vec<u64>) -> Result<Self, BoxError> {
        if offset.len() != shape.len() {
            return Err(BoxError::Dimensions { offset: offset.len(), shape: shape.len() });
        }
        if let Some(dimension) = shape.iter().position(|&length| length == 0) {
            return Err(BoxError::Empty { dimension });
        }
        if offset.iter().zip(&shape).any(|(&offset, &length)| offset.checked_add(length).is_none())
            || shape.iter().try_fold(1u64, |product, &length| product.checked_mul(length)).is_none()
        {
            return Err(BoxError::TooLarge { offset, shape });
        }
        Ok(Self { offset, shape })
    }

    /// Returns the offset in each dimension.
    #[must_use]
    pub fn offset(&self) -> &[u64] {
        &self.offset
    }

    /// Returns the length in each dimension.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// Returns the number of elements.
    #[must_use]
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Returns the end in a dimension.
    pub(super) fn end(&self, dimension: usize) -> u64 {
        self.offset[dimension] + self.shape[dimension]
    }

    /// Returns the intersection of two boxes of a tensor.
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

    /// Returns the difference to another box, as disjoint boxes.
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
    /// Formats the box as slices: `[0:4, 8:16]`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for dimension in 0..self.offset.len() {
            let comma = if dimension > 0 { ", " } else { "" };
            write!(f, "{comma}{}:{}", self.offset[dimension], self.end(dimension))?;
        }
        f.write_str("]")
    }
}
