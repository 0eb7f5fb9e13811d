//! Copies that are over, in the order in which they ended, told in runs: most end together and well.

use core::mem;

use kvplane_proto::Status;

use super::work::Work;
use crate::types::ConnectionId;

/// A copy that is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CopyCompletion {
    /// The connection that had it.
    pub connection: ConnectionId,
    /// The caller's name for it.
    pub token: u64,
    /// How it went.
    pub outcome: Result<(), Status>,
}

/// Copies that are over. Their memory is touched by nobody any more.
#[derive(Default, Debug)]
pub struct CopyCompletions {
    /// The callers' names for them.
    tokens: Vec<u64>,
    /// Whose they were, how they went, and where the next run begins.
    runs: Vec<(ConnectionId, Result<(), Status>, usize)>,
}

impl CopyCompletions {
    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Forgets them.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.runs.clear();
    }

    /// Those of one connection that went alike, in a row: connection, outcome, tokens.
    pub fn runs(&self) -> impl Iterator<Item = (ConnectionId, Result<(), Status>, &[u64])> {
        let mut from = 0;
        self.runs.iter().map(move |&(connection, outcome, until)| {
            let from = mem::replace(&mut from, until);
            (connection, outcome, &self.tokens[from..until])
        })
    }

    /// Each by itself.
    pub fn iter(&self) -> impl Iterator<Item = CopyCompletion> {
        self.runs().flat_map(|(connection, outcome, tokens)| {
            tokens.iter().map(move |&token| CopyCompletion { connection, token, outcome })
        })
    }

    /// One more.
    pub(super) fn push(&mut self, connection: ConnectionId, token: u64, outcome: Result<(), Status>) {
        self.tokens.push(token);
        self.until_here(connection, outcome);
    }

    /// Those of these requests that are copies and have succeeded, if all are: false where one is not.
    #[inline]
    pub(super) fn push_all(&mut self, connection: ConnectionId, works: &[u64]) -> bool {
        if !works.iter().fold(true, |all, &bits| all & Work::is_copy(bits)) {
            return false;
        }
        self.tokens.extend(works.iter().map(|&bits| bits & Work::MOST_TOKEN));
        self.until_here(connection, Ok(()));
        true
    }

    /// Puts those of another behind these.
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

    /// All behind the last run are of this one.
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
    fn those_alike_are_told_together_and_in_order() {
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
