//! Transfers of fields of pages: expanded into requests batch by batch, so that a long list of pages costs no memory of
//! its own.

use kvplane::{Opcode, SegmentHandle, TransferRequest};

use crate::outcome::failed;

/// Most requests of a batch, where the caller does not say: a fraction of what a batch may have, in about 3 MB.
const BATCH: usize = 1 << 16;

/// Field of a page: its bytes at both ends.
#[derive(Clone, Copy, Debug)]
struct Field {
    our_base: u64,
    our_stride: u64,
    their_base: u64,
    their_stride: u64,
    length: u64,
}

/// Pages at both ends, and the fields of each.
#[derive(Debug)]
pub(super) struct Pages {
    ours: Vec<u64>,
    theirs: Vec<u64>,
    fields: Vec<Field>,
}

impl Pages {
    /// Checks pages and fields; `fields` has five numbers for each: base and stride here, base and stride there, and
    /// the length.
    ///
    /// # Errors
    /// The error code, when the lists have other lengths, or a field has no bytes.
    pub(super) fn of(ours: Vec<u64>, theirs: Vec<u64>, fields: &[u64]) -> Result<Self, i64> {
        if ours.len() != theirs.len() {
            return Err(failed(-1, format!("{} pages here and {} there", ours.len(), theirs.len())));
        }
        let (rows, []) = fields.as_chunks::<5>() else {
            return Err(failed(-1, format!("{} numbers are no fields, which have five each", fields.len())));
        };
        let field = |row: &[u64; 5]| {
            let [our_base, our_stride, their_base, their_stride, length] = *row;
            Field { our_base, our_stride, their_base, their_stride, length }
        };
        let fields: Vec<Field> = rows.iter().map(field).collect();
        if fields.iter().any(|field| field.length == 0) {
            return Err(failed(-1, "a field of no bytes".to_owned()));
        }
        Ok(Self { ours, theirs, fields })
    }

    /// Returns the batches of requests, each with at most `most` of them, 0 for the default: field by field, and the
    /// pages of each in order. A batch with an address beyond 64 bits is an error.
    pub(super) fn batches(
        &self,
        opcode: Opcode,
        target: SegmentHandle,
        most: u64,
    ) -> impl Iterator<Item = Result<Vec<TransferRequest>, i64>> {
        let most = usize::try_from(most).ok().filter(|most| (1..=BATCH).contains(most)).unwrap_or(BATCH);
        let total = self.ours.len() * self.fields.len();
        (0..total).step_by(most).map(move |first| {
            let last = total.min(first + most);
            (first..last).map(|index| self.request(index, opcode, target)).collect()
        })
    }

    fn request(&self, index: usize, opcode: Opcode, target: SegmentHandle) -> Result<TransferRequest, i64> {
        let (field, page) = (&self.fields[index / self.ours.len()], index % self.ours.len());
        let at = |base: u64, stride: u64, page: u64| {
            let offset = stride.checked_mul(page).and_then(|offset| base.checked_add(offset));
            offset.ok_or_else(|| failed(-1, format!("page {page} of a field at {base:#x} is beyond the address space")))
        };
        Ok(TransferRequest {
            opcode,
            source: at(field.our_base, field.our_stride, self.ours[page])?,
            target,
            target_offset: at(field.their_base, field.their_stride, self.theirs[page])?,
            length: field.length,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(pages: &Pages, most: u64) -> Vec<Vec<(u64, u64, u64)>> {
        let batches = pages.batches(Opcode::Write, SegmentHandle::LOCAL, most);
        let place = |request: &TransferRequest| (request.source, request.target_offset, request.length);
        batches.map(|batch| batch.expect("within the address space").iter().map(place).collect()).collect()
    }

    #[test]
    fn fields_of_pages_become_requests_in_batches() {
        let fields = vec![100, 10, 1000, 20, 4, 500, 1, 5000, 2, 8];
        let pages = Pages::of(vec![0, 3], vec![1, 2], &fields).expect("they fit");
        let all = vec![(100, 1020, 4), (130, 1040, 4), (500, 5002, 8), (503, 5004, 8)];
        assert_eq!(places(&pages, 0).concat(), all);
        assert_eq!(places(&pages, 3), [all[..3].to_vec(), all[3..].to_vec()]);
        let none = Pages::of(Vec::new(), Vec::new(), &[1, 1, 1, 1, 1]).expect("no pages are no error");
        assert!(places(&none, 0).is_empty());
    }

    #[test]
    fn pages_that_do_not_fit_are_refused() {
        for (ours, theirs, fields) in [
            (vec![1], vec![], vec![0, 0, 0, 0, 1]),
            (vec![1], vec![1], vec![0, 0, 0, 0]),
            (vec![1], vec![1], vec![0, 0, 0, 0, 0]),
        ] {
            assert_eq!(Pages::of(ours, theirs, &fields).expect_err("refused"), -1);
        }
        let far = Pages::of(vec![2], vec![0], &[0, 1 << 63, 0, 0, 1]).expect("only the sum is too large");
        assert_eq!(far.batches(Opcode::Read, SegmentHandle::LOCAL, 0).next().expect("one").expect_err("too far"), -1);
    }
}
