//! Fences: a peer learns which lanes are over before it gets any further request.
//!
//! What a peer has received on a lane that we gave up, and not yet carried out, it would carry out when it comes to it:
//! a write perhaps after a newer one to the same range that went over another lane. No reset of ours prevents that, as
//! a kernel keeps what it has received, and a reset may be lost. So a lane that ends while something unanswered on it
//! changes what the peer holds is named in a [`Operation::Fence`], which every other lane of the peer sends before it
//! asks anything more, once. Where writes follow frames in order nothing waits for the answer; where we write
//! ourselves, requests do. What the peer has answered is not repeated on other lanes: it has ended those for good.
//!
//! Greetings come first on a lane, so a lane with anything unanswered is known to the peer: one that it does not know
//! is over there, and nobody has to remember it.

use core::ops::Range;
use std::collections::VecDeque;

use kvplane_proto::message::Operation;

use crate::types::LaneId;

/// Lanes to one peer that ended with something unanswered.
#[derive(Default)]
pub(crate) struct Fences {
    /// Those that the peer has not said are over, oldest first, as the peer knows them.
    open: VecDeque<u64>,
    /// How many came before those.
    answered: u64,
}

impl Fences {
    /// A lane, as the peer knows it, is over.
    pub(crate) fn add(&mut self, connection: u64) {
        self.open.push_back(connection);
    }

    /// Whether the peer has nothing left to be told.
    pub(crate) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    /// How many lanes the peer has not said are over.
    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }

    /// How many lanes the peer has said are over.
    pub(crate) const fn answered(&self) -> u64 {
        self.answered
    }

    /// How many lanes are over.
    pub(crate) fn count(&self) -> u64 {
        self.answered + self.open.len() as u64
    }

    /// Lanes that the peer has not said are over, by their places among those.
    pub(crate) fn range(&self, which: Range<usize>) -> impl Iterator<Item = u64> {
        self.open.range(which).copied()
    }

    /// The peer has said that so many lanes are over, counted from the first.
    pub(crate) fn answer(&mut self, until: u64) {
        let over = until.saturating_sub(self.answered) as usize;
        self.open.drain(..over);
        self.answered = self.answered.max(until);
    }
}

/// A lane as its peer knows it: its positions and generations never come together twice.
pub(crate) const fn connection_number(lane: LaneId) -> u64 {
    (lane.generation as u64) << 32 | lane.index as u64
}

/// Whether a request changes what the peer holds: carried out late, it would undo what came after it.
pub(crate) const fn is_change(operation: Operation) -> bool {
    matches!(
        operation,
        Operation::Write
            | Operation::WriteMany
            | Operation::Put
            | Operation::Remove
            | Operation::RemoveCopy
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
    fn what_was_answered_is_told_to_nobody_again() {
        let mut fences = Fences::default();
        (1..=4).for_each(|connection| fences.add(connection));
        fences.answer(3);
        assert_eq!((fences.answered(), fences.count(), fences.len()), (3, 4, 1));
        assert_eq!(fences.range(0..1).collect::<Vec<_>>(), [4]);
        // Another lane was told less, and its answer comes later.
        fences.answer(2);
        assert_eq!((fences.answered(), fences.count()), (3, 4));
        fences.answer(4);
        assert!(fences.is_empty());
    }
}
