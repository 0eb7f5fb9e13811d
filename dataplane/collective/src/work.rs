//! Values that pass between a member and its host.

use kvplane_group::{GroupRank, RankSet};

use crate::failure::Failure;
use crate::frame::Head;
use crate::span::{LocalStep, Placement, Span};

/// Names an operation or a message of a member, and its memory at the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkId(pub u64);

impl WorkId {
    /// Returns this name, and continues with the next one.
    pub(crate) const fn take(&mut self) -> Self {
        let taken = *self;
        self.0 += 1;
        taken
    }
}

/// Names a payload that the host keeps for later.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StashId(pub u64);

/// Work of the host on the payload of a frame. It comes before the next call of the member, and before the outputs; all
/// outputs are carried out before the next frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// It is not needed.
    Ignore,
    /// A copy is kept until a [`Output::Place`] or [`Output::Drop`] names it.
    Stash(StashId),
    /// It belongs to the memory of a work.
    Place(WorkId, Placement),
}

/// Frame for a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Outgoing {
    pub to: GroupRank,
    pub head: Head,
    /// Bytes of the memory of a work, which stay as they are until the frame was sent.
    pub payload: Option<(WorkId, Span)>,
}

/// End of an operation or a message with a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Epoch of the view whose participants contributed.
    pub epoch: u64,
    /// Those participants; of a message, none.
    pub participants: RankSet<GroupRank>,
    /// Participants of the first view of the operation that did not contribute to the result.
    pub failed: RankSet<GroupRank>,
    /// The peer of a message.
    pub peer: Option<GroupRank>,
}

/// Work of the host, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum Output {
    /// Provides a work buffer, in place of a former one, and does these steps.
    Begin { work: WorkId, work_bytes: u64, steps: Vec<LocalStep> },
    /// Places a payload that was kept, and drops it.
    Place { stash: StashId, work: WorkId, placement: Placement },
    /// Drops a payload that was kept.
    Drop(StashId),
    /// Does steps on the memory of a work.
    Run { work: WorkId, steps: Vec<LocalStep> },
    /// The work has ended: its source and target are the caller's again.
    Complete { work: WorkId, outcome: Result<Completion, Failure> },
    /// The work buffer is free.
    Release(WorkId),
}
