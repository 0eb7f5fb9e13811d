//! Flushes: writes into memory of a peer's device that orders a NIC's writes only on request.
//!
//! Such a write is complete when the peer has flushed the device after it. One flush is requested at a time; it covers
//! all writes to its segment that were done before.

use std::collections::{BTreeMap, VecDeque};

use kvplane_proto::{SegmentId, Status};

/// Writes of a link that are not complete without a flush.
#[derive(Default)]
pub(in crate::rdma) struct Flushes {
    /// Writes that the device carries out, in order: token and segment.
    posted: VecDeque<(u64, SegmentId)>,
    /// Tokens of the writes that are done, by segment, whose flush was not requested yet.
    written: BTreeMap<SegmentId, Vec<u64>>,
    /// Segment whose flush was requested, and the tokens of the writes that it covers.
    requested: Option<(SegmentId, Vec<u64>)>,
}

impl Flushes {
    /// Returns true if no write waits for a flush.
    pub(super) fn is_idle(&self) -> bool {
        self.posted.is_empty() && self.written.is_empty() && self.requested.is_none()
    }

    /// Records a write that was posted.
    pub(super) fn posted(&mut self, token: u64, segment: SegmentId) {
        self.posted.push_back((token, segment));
    }

    /// Records the end of the write that was posted first; it was made if it was `good`, and else needs no flush.
    pub(super) fn written(&mut self, good: bool) {
        let first = self.posted.pop_front();
        if let Some((token, segment)) = first.filter(|_| good) {
            self.written.entry(segment).or_default().push(token);
        }
    }

    /// Returns the segment of the next flush to request from the peer; `None` if there is none, or one is outstanding.
    pub(super) fn next(&mut self) -> Option<SegmentId> {
        if self.requested.is_some() {
            return None;
        }
        let (segment, tokens) = self.written.pop_first()?;
        self.requested = Some((segment, tokens));
        Some(segment)
    }

    /// Takes the peer's reply; returns the tokens of the writes that it is about. A reply that was not requested is
    /// about none.
    pub(super) fn take_flushed(&mut self, segment: SegmentId) -> Vec<u64> {
        self.requested.take_if(|(of, _)| *of == segment).map(|(_, tokens)| tokens).unwrap_or_default()
    }

    /// Returns the tokens of the writes that are done and were not flushed, when the link ends.
    pub(super) fn into_unflushed(self) -> impl Iterator<Item = u64> {
        self.requested.into_iter().map(|(_, tokens)| tokens).chain(self.written.into_values()).flatten()
    }
}

/// Encodes the outcome of a flush.
pub(in crate::rdma) fn encode(outcome: Status) -> [u8; 2] {
    (outcome as u16).to_le_bytes()
}

/// Decodes the outcome of a flush; `None` if it has no meaning.
pub(in crate::rdma) fn decode(bytes: &[u8]) -> Option<Status> {
    Status::from_code(u16::from_le_bytes(bytes.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_flush_covers_all_writes_before_it() {
        let [one, other] = [1, 2].map(|index| SegmentId { index, generation: 1 });
        let mut flushes = Flushes::default();
        for (token, segment) in [(1, one), (2, one), (3, other), (4, one)] {
            flushes.posted(token, segment);
        }
        [true, false, true].into_iter().for_each(|good| flushes.written(good));
        assert_eq!((flushes.next(), flushes.next()), (Some(one), None));
        flushes.written(true);
        assert_eq!((flushes.take_flushed(other), flushes.take_flushed(one)), (vec![], vec![1]));
        assert_eq!((flushes.take_flushed(one), flushes.is_idle()), (vec![], false));
        assert_eq!((flushes.next(), flushes.take_flushed(one)), (Some(one), vec![4]));
        assert_eq!(flushes.next(), Some(other));
        assert_eq!(flushes.into_unflushed().collect::<Vec<_>>(), [3]);
        for outcome in [Status::Ok, Status::DeviceFailed] {
            assert_eq!(decode(&encode(outcome)), Some(outcome));
        }
        assert_eq!((decode(&[0]), decode(&[0xff, 0xff])), (None, None));
    }
}
