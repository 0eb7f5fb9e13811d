//! Conversion of overlaps of boxes to copies of contiguous bytes.

use super::placement::Tensor;
use super::tensor_box::TensorBox;

/// One dimension of a regular set of copies: their number and strides, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Number of copies; at least 2.
    pub count: u64,
    /// Distance from one to the next at the source.
    pub source_stride: u64,
    /// Distance from one to the next at the target.
    pub target_stride: u64,
}

/// Bytes that a fragment of the target gets from one of the source: equal runs of bytes at equal distances.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overlap {
    /// Index of the source's part.
    pub source_part: usize,
    /// Index of the fragment in that part.
    pub source_fragment: usize,
    /// Index of the target's fragment.
    pub target_fragment: usize,
    /// Offset of the first run in the source's fragment, in bytes.
    pub source_offset: u64,
    /// Offset of the first run in the target's fragment, in bytes.
    pub target_offset: u64,
    /// Length of a run.
    pub run_bytes: u64,
    /// Strides of the runs, from the outermost dimension to the innermost; without any, there is one run.
    pub steps: Vec<Step>,
}

/// Box of a fragment, with its part and its index there.
#[derive(Clone, Copy)]
pub(super) struct FragmentBox<'a> {
    pub(super) part: usize,
    pub(super) fragment: usize,
    pub(super) area: &'a TensorBox,
}

/// Contiguous bytes to be copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// Offset at the source.
    pub source_offset: u64,
    /// Offset at the target.
    pub target_offset: u64,
    /// Length.
    pub bytes: u64,
}

/// Returns the stride of each dimension of a box in row-major order, in bytes.
fn strides(shape: &[u64], item_bytes: u64) -> Vec<u64> {
    let mut strides = vec![item_bytes; shape.len()];
    for dimension in (1..shape.len()).rev() {
        strides[dimension - 1] = strides[dimension] * shape[dimension];
    }
    strides
}

fn offset_of(common: &TensorBox, within: &TensorBox, strides: &[u64]) -> u64 {
    let apart = common.offset().iter().zip(within.offset()).map(|(inner, outer)| inner - outer);
    apart.zip(strides).map(|(elements, stride)| elements * stride).sum()
}

impl Overlap {
    /// Computes the overlap of two fragments of a tensor from their common box; each fragment is contiguous and
    /// row-major.
    pub(super) fn new(source: FragmentBox<'_>, target: FragmentBox<'_>, common: &TensorBox, tensor: &Tensor) -> Self {
        let (source_part, source_fragment, target_fragment) = (source.part, source.fragment, target.fragment);
        let (source, target) = (source.area, target.area);
        let (from, to) = (strides(source.shape(), tensor.dtype.bytes()), strides(target.shape(), tensor.dtype.bytes()));
        let (mut run_bytes, mut steps) = (tensor.dtype.bytes(), Vec::new());
        for dimension in (0..common.shape().len()).rev() {
            let count = common.shape()[dimension];
            let (source_stride, target_stride) = (from[dimension], to[dimension]);
            if count == 1 {
                continue;
            }
            if steps.is_empty() && source_stride == run_bytes && target_stride == run_bytes {
                run_bytes *= count;
            } else {
                steps.push(Step { count, source_stride, target_stride });
            }
        }
        steps.reverse();
        let (source_offset, target_offset) = (offset_of(common, source, &from), offset_of(common, target, &to));
        Self { source_part, source_fragment, target_fragment, source_offset, target_offset, run_bytes, steps }
    }

    /// Returns the number of runs.
    #[must_use]
    pub fn runs(&self) -> u64 {
        self.steps.iter().map(|step| step.count).product()
    }

    /// Returns the run of that number.
    fn run(&self, number: u64) -> Copy {
        let (mut rest, mut source_offset, mut target_offset) = (number, self.source_offset, self.target_offset);
        for step in self.steps.iter().rev() {
            let at = rest % step.count;
            rest /= step.count;
            source_offset += at * step.source_stride;
            target_offset += at * step.target_stride;
        }
        Copy { source_offset, target_offset, bytes: self.run_bytes }
    }
}

/// Iterator over copies; runs that are adjacent on both sides are merged.
#[derive(Clone, Debug)]
pub struct Copies<'a> {
    overlaps: &'a [Overlap],
    from: &'a [u64],
    to: &'a [u64],
    run: u64,
    /// Last copy, which the next run may extend.
    held: Option<Copy>,
}

impl<'a> Copies<'a> {
    pub(super) const fn new(overlaps: &'a [Overlap], from: &'a [u64], to: &'a [u64]) -> Self {
        Self { overlaps, from, to, run: 0, held: None }
    }

    fn next_run(&mut self) -> Option<Copy> {
        let (overlap, rest) = self.overlaps.split_first()?;
        let mut copy = overlap.run(self.run);
        copy.source_offset += self.from[overlap.source_fragment];
        copy.target_offset += self.to[overlap.target_fragment];
        self.run += 1;
        if self.run == overlap.runs() {
            (self.overlaps, self.run) = (rest, 0);
        }
        Some(copy)
    }
}

impl Iterator for Copies<'_> {
    type Item = Copy;

    fn next(&mut self) -> Option<Copy> {
        while let Some(copy) = self.next_run() {
            match &mut self.held {
                Some(held)
                    if held.source_offset + held.bytes == copy.source_offset
                        && held.target_offset + held.bytes == copy.target_offset =>
                {
                    held.bytes += copy.bytes;
                }
                held => {
                    if let Some(done) = held.replace(copy) {
                        return Some(done);
                    }
                }
            }
        }
        self.held.take()
    }
}
