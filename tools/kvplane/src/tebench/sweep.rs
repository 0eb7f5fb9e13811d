//! Cases of a run: threads outermost, then block size, then batch size, each doubling from its start to its end.
//!
//! A case whose buffers do not fit is skipped, and the caller logs it: `block * batch * threads` may not exceed the
//! total buffer size.

use std::fmt;

/// Case: load of every iteration of every thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Case {
    /// Number of threads that submit.
    pub threads: u64,
    /// Size of a request, in bytes.
    pub block_bytes: u64,
    /// Number of requests of a batch.
    pub batch: u64,
}

impl Case {
    /// Returns the bytes that all threads together have in flight; `None` beyond 64 bits.
    #[must_use]
    pub const fn buffer_bytes(&self) -> Option<u64> {
        match self.block_bytes.checked_mul(self.batch) {
            Some(bytes) => bytes.checked_mul(self.threads),
            None => None,
        }
    }
}

/// Range of values that double from `start` up to `max`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First value, at least 1.
    pub start: u64,
    /// Largest value that is allowed.
    pub max: u64,
}

impl Range {
    fn values(self) -> impl Iterator<Item = u64> + Clone {
        std::iter::successors(Some(self.start), |value| value.checked_mul(2))
            .take_while(move |value| *value <= self.max)
    }

    fn check(self, name: &'static str) -> Result<(), SweepError> {
        if self.start == 0 {
            return Err(SweepError::Zero { name });
        }
        if self.start > self.max {
            return Err(SweepError::Reversed { name, start: self.start, max: self.max });
        }
        Ok(())
    }
}

/// Sweep with checked ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sweep {
    threads: Range,
    blocks: Range,
    batches: Range,
    total_buffer_bytes: u64,
}

/// Step of a sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Run this case.
    Run(Case),
    /// Log that this case does not fit, and continue.
    Skip {
        /// Case that does not fit.
        case: Case,
        /// Size of the buffer that it does not fit in.
        total_buffer_bytes: u64,
    },
}

/// Error about an invalid range of a sweep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SweepError {
    /// A start of 0 never doubles.
    Zero {
        /// Name of the range, as in the flags.
        name: &'static str,
    },
    /// The start is beyond the end.
    Reversed {
        /// Name of the range, as in the flags.
        name: &'static str,
        /// Start of the range.
        start: u64,
        /// End of the range.
        max: u64,
    },
}

impl fmt::Display for SweepError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero { name } => write!(f, "start_{name} is 0, it must be at least 1"),
            Self::Reversed { name, start, max } => {
                write!(f, "start_{name} is {start} and max_{name} is {max}: raise the maximum or lower the start")
            }
        }
    }
}

impl std::error::Error for SweepError {}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Self::Run(case) | Self::Skip { case, .. }) = self;
        let Case { threads, block_bytes, batch } = case;
        write!(f, "block {block_bytes} B, batch {batch}, threads {threads}")?;
        if let Self::Skip { total_buffer_bytes, .. } = self {
            write!(f, ": skipped, block * batch * threads is more than total_buffer_size {total_buffer_bytes}")?;
        }
        Ok(())
    }
}

impl Sweep {
    /// Creates a sweep after checking the ranges.
    ///
    /// # Errors
    /// Returns [`SweepError`] with the flag and its value.
    pub fn new(threads: Range, blocks: Range, batches: Range, total_buffer_bytes: u64) -> Result<Self, SweepError> {
        threads.check("num_threads")?;
        blocks.check("block_size")?;
        batches.check("batch_size")?;
        Ok(Self { threads, blocks, batches, total_buffer_bytes })
    }

    /// Returns the steps in order.
    pub fn steps(self) -> impl Iterator<Item = Step> {
        let Self { threads, blocks, batches, total_buffer_bytes } = self;
        threads.values().flat_map(move |threads| {
            blocks.values().flat_map(move |block_bytes| {
                batches.values().map(move |batch| {
                    let case = Case { threads, block_bytes, batch };
                    match case.buffer_bytes() {
                        Some(bytes) if bytes <= total_buffer_bytes => Step::Run(case),
                        _ => Step::Skip { case, total_buffer_bytes },
                    }
                })
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(start: u64, max: u64) -> Range {
        Range { start, max }
    }

    #[test]
    fn threads_then_blocks_then_batches() {
        let sweep = Sweep::new(range(1, 2), range(4096, 16_383), range(1, 2), 1 << 30).unwrap();
        let steps: Vec<_> = sweep
            .steps()
            .map(|step| match step {
                Step::Run(case) => (case.threads, case.block_bytes, case.batch),
                Step::Skip { .. } => panic!("{step}"),
            })
            .collect();
        let expected = [
            (1, 4096, 1),
            (1, 4096, 2),
            (1, 8192, 1),
            (1, 8192, 2),
            (2, 4096, 1),
            (2, 4096, 2),
            (2, 8192, 1),
            (2, 8192, 2),
        ];
        assert_eq!(steps, expected);
    }

    #[test]
    fn cases_beyond_the_buffer_are_skipped_with_the_numbers() {
        let sweep = Sweep::new(range(2, 2), range(1 << 20, 1 << 21), range(4, 4), 8 << 20).unwrap();
        let steps: Vec<_> = sweep.steps().collect();
        assert!(matches!(steps[0], Step::Run(_)), "exactly full still runs");
        let words = "block 2097152 B, batch 4, threads 2: skipped, block * batch * threads is more than \
            total_buffer_size 8388608";
        assert_eq!(steps[1].to_string(), words);
        // A product beyond 64 bits does not fit either.
        let huge = Sweep::new(range(2, 2), range(1 << 40, 1 << 40), range(1 << 40, 1 << 40), u64::MAX).unwrap();
        assert!(matches!(huge.steps().next(), Some(Step::Skip { .. })));
    }

    #[test]
    fn bad_ranges_are_named() {
        let fine = range(1, 1);
        let zero = Sweep::new(fine, range(0, 4), fine, 1).unwrap_err();
        assert_eq!(zero.to_string(), "start_block_size is 0, it must be at least 1");
        let reversed = Sweep::new(range(8, 4), fine, fine, 1).unwrap_err();
        assert!(reversed.to_string().starts_with("start_num_threads is 8 and max_num_threads is 4"));
        assert_eq!(Sweep::new(range(1, u64::MAX), fine, fine, 1).unwrap().steps().count(), 64);
    }
}
