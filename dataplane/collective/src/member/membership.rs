//! Part of a member in its group: the view that it follows, whether it takes part, and the peers that failed in it.

use kvplane_group::{GroupId, GroupRank, GroupStatus, MemberReport, Phase, Progress, RankSet, View};

use super::control_frames::ControlFrames;
use crate::failure::Failure;
use crate::frame::FrameKind;
use crate::operation::Signature;

/// See the module's documentation.
#[derive(Clone, Debug)]
pub(crate) struct Membership {
    pub(crate) group: GroupId,
    pub(crate) rank: GroupRank,
    incarnation: u64,
    pub(crate) status: Option<GroupStatus>,
    pub(crate) view: View,
    pub(crate) is_ready: bool,
    pub(crate) is_fenced: bool,
    /// Epoch of the view that excluded the member, until it is ready again.
    pub(crate) excluded: Option<u64>,
    /// Peers with which the operation in flight failed.
    pub(crate) failed: RankSet<GroupRank>,
    /// Peers whose connection was lost since the view began, and has not been made again.
    lost: RankSet<GroupRank>,
    /// Peers that the operation in flight waited for until its deadline.
    pub(crate) overdue: RankSet<GroupRank>,
}

impl Membership {
    pub(crate) fn new(group: GroupId, rank: GroupRank, incarnation: u64, is_ready: bool) -> Self {
        Self {
            group,
            rank,
            incarnation,
            status: None,
            view: View::default(),
            is_ready,
            is_fenced: false,
            excluded: None,
            failed: RankSet::EMPTY,
            lost: RankSet::EMPTY,
            overdue: RankSet::EMPTY,
        }
    }

    /// True if the member takes part in the view's collectives.
    pub(crate) fn participates(&self) -> bool {
        self.view.participants().contains(self.rank)
            && self.view.incarnations.get(usize::from(self.rank.0)) == Some(&Some(self.incarnation))
    }

    /// The other participants of the view.
    pub(crate) fn others(&self) -> RankSet<GroupRank> {
        self.view.participants().without(RankSet::single(self.rank))
    }

    /// True if frames of a peer count in the present view: after a connection was lost, some are missing.
    pub(crate) fn hears(&self, from: GroupRank) -> bool {
        self.participates() && self.view.participants().contains(from) && !self.failed.contains(from)
    }

    /// Fails unless the rank is another member of the group.
    pub(crate) fn check_peer(&self, peer: GroupRank) -> Result<(), Failure> {
        let members = self.status.as_ref().map_or(0, |status| status.order.len());
        if peer == self.rank || usize::from(peer.0) >= members {
            return Err(Failure::NoPeer { rank: peer });
        }
        Ok(())
    }

    /// Enters a later view, and returns the former one.
    pub(crate) fn enter(&mut self, view: &View) -> View {
        let former = std::mem::replace(&mut self.view, view.clone());
        (self.is_fenced, self.failed, self.overdue) = (false, RankSet::EMPTY, RankSet::EMPTY);
        if self.participates() {
            // The view may have been decided while the connection existed, and nobody reports its loss again.
            self.failed = std::mem::take(&mut self.lost).intersection(self.others());
        }
        former
    }

    /// Notes lost connections.
    pub(crate) fn lose(&mut self, peers: RankSet<GroupRank>) {
        self.lost = self.lost.union(peers);
        if self.participates() {
            self.failed = self.failed.union(peers.intersection(self.others()));
        }
    }

    /// Notes connections that were made again.
    pub(crate) const fn link(&mut self, peers: RankSet<GroupRank>) {
        self.lost = self.lost.without(peers);
    }

    /// Sends a frame to all other participants. One that takes nothing does not learn it: its part in the view ends.
    pub(crate) fn tell(
        &mut self,
        control: &mut ControlFrames,
        operation: u64,
        kind: FrameKind,
        signature: Option<Signature>,
    ) {
        let refused = control.push_all(self.others(), operation, kind, signature);
        self.failed = self.failed.union(refused);
    }

    /// Returns what the control plane has to know.
    pub(crate) fn report(&self, progress: Progress) -> MemberReport {
        let phase = match (self.participates(), self.is_fenced) {
            (false, _) if self.is_ready => Phase::Ready,
            (false, _) => Phase::Joining,
            (true, true) => Phase::Fenced(progress),
            (true, false) => Phase::Running { failed: self.failed },
        };
        MemberReport { group: self.group, epoch: self.view.epoch, phase }
    }
}
