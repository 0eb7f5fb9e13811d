//! Fences: a client tells a peer which of its lanes are closed before it sends the peer any further request.
//!
//! A peer executes a request that it has received on a closed lane when it comes to it: a write perhaps after a newer
//! write to the same range that went over another lane. Resetting the lane does not prevent that, because the peer's
//! kernel keeps the bytes it has received, and a reset may be lost. So a lane that ends while an unanswered request on
//! it changes the peer's state is named in a [`Operation::Fence`], which every other lane to the peer sends once,
//! before its next request. Where the peer executes frames in order, no request waits for the acknowledgement; where
//! the client writes by itself, requests do. A fence that the peer has acknowledged is not repeated on other lanes: the
//! peer has closed these connections for good.
//!
//! The handshake comes first on a lane, so the peer knows every lane with an unanswered request. A lane that it does
//! not know is closed at its end, and needs no record of it.

use core::ops::Range;
use std::collections::VecDeque;

use kvplane_proto::message::Operation;

use crate::types::LaneId;

/// Lanes to one peer that ended with unanswered requests.
#[derive(Default)]
pub(crate) struct Fences {
    /// Connection numbers of the lanes whose fences are not acknowledged, oldest first.
    open: VecDeque<u64>,
    /// Number of acknowledged fences before these.
    answered: u64,
}

impl Fences {
    /// Adds the connection number of a lane that has ended.
    pub(crate) fn add(&mut self, connection: u64) {
        self.open.push_back(connection);
    }

    /// Returns true if all fences are acknowledged.
    pub(crate) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// Returns the number of fences that are not acknowledged.
    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }

    /// Returns the number of acknowledged fences.
    pub(crate) const fn answered(&self) -> u64 {
        self.answered
    }

    /// Returns the number of all fences.
    pub(crate) fn count(&self) -> u64 {
        self.answered + self.open.len() as u64
    }

    /// Returns the connection numbers of unacknowledged fences, by their positions.
    pub(crate) fn range(&self, which: Range<usize>) -> impl Iterator<Item = u64> {
        self.open.range(which).copied()
    }

    /// Handles the acknowledgement of so many fences, counted from the first.
    pub(crate) fn answer(&mut self, until: u64) {
        let over = until.saturating_sub(self.answered) as usize;
        self.open.drain(..over);
        self.answered = self.answered.max(until);
    }
}

/// Returns the connection number of a lane: index and generation never repeat together.
pub(crate) const fn connection_number(lane: LaneId) -> u64 {
    (lane.generation as u64) << 32 | lane.index as u64
}

/// Returns true if a request changes the peer's state: executed late, it would undo later changes.
pub(crate) const fn is_change(operation: Operation) -> bool {
    matches!(
        operation,
        Operation::Write
            | Operation::WriteMany
            | Operation::Put
            | Operation::Remove
            | Operation::RemoveCopy
            | Operation::Retain
            | Operation::Commit
            | Operation::Fill
            | Operation::Seal
            | Operation::Discard
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn acknowledged_fences_are_not_repeated() {
        let mut fences = Fences::default();
        (1..=4).for_each(|connection| fences.add(connection));
        fences.answer(3);
        assert_eq!((fences.answered(), fences.count(), fences.len()), (3, 4, 1));
        assert_eq!(fences.range(0..1).collect::<Vec<_>>(), [4]);
        // A late acknowledgement of fewer fences, on another lane.
        fences.answer(2);
        assert_eq!((fences.answered(), fences.count()), (3, 4));
        fences.answer(4);
        assert!(fences.is_empty());
    }
}
