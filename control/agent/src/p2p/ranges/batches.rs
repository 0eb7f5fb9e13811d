//! Batches: copies of a read, divided into groups of limited size.

use kvplane_cluster::reshard::Copy;

/// Limit of copies in one batch.
const BATCH: usize = 4096;
/// Limit of bytes in one batch; longer copies are split, so that several peers share them.
const BATCH_BYTES: u64 = 64 << 20;

/// Batches of copies, in order.
pub(super) struct Batches<I: Iterator<Item = Copy>> {
    copies: I,
    rest: Option<Copy>,
}

impl<I: Iterator<Item = Copy>> Batches<I> {
    pub(super) const fn of(copies: I) -> Self {
        Self { copies, rest: None }
    }
}

impl<I: Iterator<Item = Copy>> Iterator for Batches<I> {
    type Item = Vec<Copy>;

    fn next(&mut self) -> Option<Vec<Copy>> {
        let (mut batch, mut bytes) = (Vec::new(), 0);
        while batch.len() < BATCH && bytes < BATCH_BYTES {
            let Some(mut copy) = self.rest.take().or_else(|| self.copies.next()) else { break };
            let now = copy.bytes.min(BATCH_BYTES - bytes);
            if now < copy.bytes {
                self.rest = Some(Copy {
                    source_offset: copy.source_offset + now,
                    target_offset: copy.target_offset + now,
                    bytes: copy.bytes - now,
                });
                copy.bytes = now;
            }
            bytes += now;
            batch.push(copy);
        }
        (!batch.is_empty()).then_some(batch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_limited_in_copies_and_bytes() {
        let copy = |first: u64, bytes| Copy { source_offset: first, target_offset: first + 7, bytes };
        let batches: Vec<Vec<Copy>> =
            Batches::of([copy(0, 10), copy(10, 2 * BATCH_BYTES), copy(0, 5)].into_iter()).collect();
        let rest = copy(2 * BATCH_BYTES, 10);
        let expected = [
            vec![copy(0, 10), copy(10, BATCH_BYTES - 10)],
            vec![copy(BATCH_BYTES, BATCH_BYTES)],
            vec![rest, copy(0, 5)],
        ];
        assert_eq!(batches, expected);
        let sizes: Vec<usize> = Batches::of((0..5000).map(|at| copy(at, 1))).map(|batch| batch.len()).collect();
        assert_eq!(sizes, [BATCH, 5000 - BATCH]);
        assert_eq!(Batches::of(std::iter::empty()).count(), 0);
    }
}
