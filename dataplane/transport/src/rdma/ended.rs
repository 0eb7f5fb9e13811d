//! Completed copies in completion order, stored as runs of equal outcome: most complete together and successfully.

use core::mem;

use kvplane_proto::Status;

use super::work::Work;
use crate::types::ConnectionId;

/// A completed copy.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CopyCompletion {
    /// Connection that carried it.
    pub connection: ConnectionId,
    /// Token of the caller.
    pub token: u64,
    /// Outcome of the copy.
    pub outcome: Result<(), Status>,
}

/// List of completed copies. The device does not access their memory any more.
#[derive(Default, Debug)]
pub struct CopyCompletions {
    /// Tokens of the callers.
    tokens: Vec<u64>,
    /// Runs: connection, outcome, and the index in `tokens` at which the run ends.
    runs: Vec<(ConnectionId, Result<(), Status>, usize)>,
}

impl CopyCompletions {
    /// Returns true if the list is empty.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Clears the list.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.runs.clear();
    }

    /// Returns the runs of consecutive copies with equal connection and outcome: connection, outcome, tokens.
    pub fn runs(&self) -> impl Iterator<Item = (ConnectionId, Result<(), Status>, &[u64])> {
        let mut from = 0;
        self.runs.iter().map(move |&(connection, outcome, until)| {
            let from = mem::replace(&mut from, until);
            (connection, outcome, &self.tokens[from..until])
        })
    }

    /// Returns each completed copy.
    pub fn iter(&self) -> impl Iterator<Item = CopyCompletion> {
        self.runs().flat_map(|(connection, outcome, tokens)| {
            tokens.iter().map(move |&token| CopyCompletion { connection, token, outcome })
        })
    }

    /// Appends a completed copy.
    pub(super) fn push(&mut self, connection: ConnectionId, token: u64, outcome: Result<(), Status>) {
        self.tokens.push(token);
        self.until_here(connection, outcome);
    }

    /// Appends successful copies if all of these requests are copies; returns false if one is not, and appends nothing.
    #[inline]
    pub(super) fn push_all(&mut self, connection: ConnectionId, works: &[u64]) -> bool {
        if !works.iter().fold(true, |all, &bits| all & Work::is_copy(bits)) {
            return false;
        }
        self.tokens.extend(works.iter().map(|&bits| bits & Work::MOST_TOKEN));
        self.until_here(connection, Ok(()));
        true
    }

    /// Appends the copies of another list.
    #[inline]
    pub(super) fn append(&mut self, other: &mut Self) {
        if self.is_empty() {
            mem::swap(self, other);
            return;
        }
        let before = self.tokens.len();
        self.tokens.append(&mut other.tokens);
        self.runs
            .extend(other.runs.drain(..).map(|(connection, outcome, until)| (connection, outcome, before + until)));
    }

    /// Makes all tokens behind the last run a run of this connection and outcome.
    #[inline]
    fn until_here(&mut self, connection: ConnectionId, outcome: Result<(), Status>) {
        let until = self.tokens.len();
        match self.runs.last_mut() {
            Some(last) if (last.0, last.1) == (connection, outcome) => last.2 = until,
            _ => self.runs.push((connection, outcome, until)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: ConnectionId = ConnectionId { index: 1, generation: 1 };
    const THERE: ConnectionId = ConnectionId { index: 2, generation: 1 };

    #[test]
    fn copies_with_equal_outcomes_form_runs_in_order() {
        let mut ended = CopyCompletions::default();
        let works: Vec<u64> = (0..5).map(|token| Work::Copy(token).to_bits()).collect();
        assert!(ended.push_all(HERE, &works));
        assert!(!ended.push_all(HERE, &[Work::Copy(5).to_bits(), Work::CopyPart.to_bits()]), "a part is no copy");
        ended.push(HERE, 5, Ok(()));
        ended.push(HERE, 6, Err(Status::Stale));
        ended.push(THERE, 7, Err(Status::Stale));
        let runs: Vec<_> = ended.runs().map(|(id, outcome, tokens)| (id, outcome, tokens.to_vec())).collect();
        let expected = [
            (HERE, Ok(()), vec![0, 1, 2, 3, 4, 5]),
            (HERE, Err(Status::Stale), vec![6]),
            (THERE, Err(Status::Stale), vec![7]),
        ];
        assert_eq!(runs, expected);
        let (mut all, mut more) = (CopyCompletions::default(), CopyCompletions::default());
        more.push(THERE, 8, Ok(()));
        all.append(&mut ended);
        all.append(&mut more);
        assert!(ended.is_empty() && more.is_empty());
        assert_eq!(all.iter().map(|copied| copied.token).collect::<Vec<_>>(), (0..9).collect::<Vec<_>>());
        assert_eq!(all.runs().last(), Some((THERE, Ok(()), &[8][..])));
    }
}
