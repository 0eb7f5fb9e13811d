//! Departure of a member in order: it stays until the others have completed what it has completed, because they may
//! still need its frames, or its result.

use kvplane_group::{GroupRank, RankSet};

/// See the module's documentation.
#[derive(Clone, Debug, Default)]
pub(crate) struct Departure {
    /// Peers that have completed the member's last operation, once it leaves.
    released_by: Option<RankSet<GroupRank>>,
}

impl Departure {
    /// Begins, or begins again in another view.
    pub(crate) const fn begin(&mut self) {
        self.released_by = Some(RankSet::EMPTY);
    }

    pub(crate) const fn has_begun(&self) -> bool {
        self.released_by.is_some()
    }

    /// A peer does not need this member any more.
    pub(crate) fn note_release(&mut self, peer: GroupRank) {
        if let Some(released_by) = &mut self.released_by {
            released_by.insert(peer);
        }
    }

    /// True once none of the peers needs this member.
    pub(crate) fn is_released(&self, peers: RankSet<GroupRank>) -> bool {
        self.released_by.is_some_and(|released_by| released_by.contains_all(peers))
    }
}
