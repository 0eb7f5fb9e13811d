//! Proposals to change the view of a group, in the order in which they arrived.

use core::fmt;
use std::collections::VecDeque;

use bincode::{Decode, Encode};

use crate::rank::{GroupRank, RankSet};
use crate::rejection::Rejection;
use crate::roster::ProcessId;

/// Outcomes of a group that are remembered for processes that have not seen them.
const REMEMBERED: usize = 256;

/// Names a proposal: a process numbers its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct ProposalId {
    pub process: ProcessId,
    pub number: u64,
}

/// A change of a view.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
pub enum Change {
    /// Ranks take part from the next view on. Waits until each of them is ready and reaches all others.
    Activate(RankSet<GroupRank>),
    /// Ranks take part no longer.
    Deactivate(RankSet<GroupRank>),
    /// The ranks that failed are deactivated.
    DeactivateFailed,
}

/// End of a proposal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Encode, Decode)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Outcome {
    /// The view of this epoch has the change, but for `dropped`: members that failed meanwhile.
    Applied { epoch: u64, dropped: RankSet<GroupRank> },
    /// Ranks were not ready, or did not reach all others, until the proposal's deadline.
    NotReady { ranks: RankSet<GroupRank> },
    /// The view would have no member.
    NoMemberLeft,
    /// There was nothing to change.
    Unchanged { epoch: u64 },
    /// Failed ranks are the caller's to deactivate in this group.
    NotAutomatic,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Applied { epoch, dropped } if dropped.is_empty() => write!(f, "applied by view {epoch}"),
            Self::Applied { epoch, dropped } => write!(f, "applied by view {epoch}, without ranks {dropped:?}"),
            Self::NotReady { ranks } => {
                write!(f, "ranks {ranks:?} were not ready, or did not reach all others, until the deadline")
            }
            Self::NoMemberLeft => f.write_str("the group would have no member left"),
            Self::Unchanged { epoch } => write!(f, "nothing to change in view {epoch}"),
            Self::NotAutomatic => f.write_str("in this group, the caller names the failed ranks that are deactivated"),
        }
    }
}

/// A proposal that waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Proposal {
    pub(crate) id: ProposalId,
    pub(crate) change: Change,
    pub(crate) until_ns: u64,
}

/// The proposals of a group.
#[derive(Clone, Debug, Default)]
pub(crate) struct Proposals {
    waiting: VecDeque<Proposal>,
    outcomes: VecDeque<(ProposalId, Outcome)>,
}

impl Proposals {
    /// Appends a proposal, unless it was made before. Fails if `limit` proposals wait.
    pub(crate) fn propose(&mut self, proposal: Proposal, limit: usize) -> Result<(), Rejection> {
        let is_known = self.waiting.iter().any(|waiting| waiting.id == proposal.id)
            || self.outcomes.iter().any(|(id, _)| *id == proposal.id);
        if is_known {
            return Ok(());
        }
        if self.waiting.len() >= limit {
            return Err(Rejection::TooManyProposals { limit });
        }
        self.waiting.push_back(proposal);
        Ok(())
    }

    /// Returns the number of proposals that wait.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Returns the oldest proposal that waits.
    pub(crate) fn first(&self) -> Option<Proposal> {
        self.waiting.front().copied()
    }

    /// Ends the oldest proposal that waits.
    pub(crate) fn end_first(&mut self, outcome: Outcome) {
        if let Some(proposal) = self.waiting.pop_front() {
            self.outcomes.push_back((proposal.id, outcome));
            if self.outcomes.len() > REMEMBERED {
                self.outcomes.pop_front();
            }
        }
    }

    /// Returns the outcomes of a process's proposals, oldest first.
    pub(crate) fn outcomes(&self, process: ProcessId) -> impl Iterator<Item = (ProposalId, Outcome)> {
        self.outcomes.iter().filter(move |(id, _)| id.process == process).copied()
    }
}
