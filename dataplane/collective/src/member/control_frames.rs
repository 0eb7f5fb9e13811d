//! Frames without a step that wait for room at their receivers: aborts, requests and replies.

use std::collections::VecDeque;

use kvplane_group::{GroupRank, RankSet};

use crate::frame::FrameKind;
use crate::operation::Signature;

/// Frames that wait for one receiver, at most.
const MAX_WAITING: usize = 1024;

/// See the module's documentation. Each has its receiver, the number of its operation, its kind and a signature.
#[derive(Clone, Debug, Default)]
pub(crate) struct ControlFrames(VecDeque<(GroupRank, u64, FrameKind, Option<Signature>)>);

impl ControlFrames {
    pub(crate) fn push(&mut self, to: GroupRank, operation: u64, kind: FrameKind, signature: Option<Signature>) {
        // A peer that requests the same again and again, and takes nothing, gets one answer.
        let frame = (to, operation, kind, signature);
        if !self.0.contains(&frame) && self.0.iter().filter(|(other, ..)| *other == to).count() < MAX_WAITING {
            self.0.push_back(frame);
        }
    }

    /// Appends a frame for several receivers, and returns those for which too many wait.
    pub(crate) fn push_all(
        &mut self,
        to: RankSet<GroupRank>,
        operation: u64,
        kind: FrameKind,
        signature: Option<Signature>,
    ) -> RankSet<GroupRank> {
        let waiting = |to| self.0.iter().filter(|(other, ..)| *other == to).count();
        let full: RankSet<_> = to.iter().filter(|to| waiting(*to) >= MAX_WAITING).collect();
        to.without(full).iter().for_each(|to| self.push(to, operation, kind, signature));
        full
    }

    /// Takes the next frame for a receiver in `room`.
    pub(crate) fn next(&mut self, room: RankSet<GroupRank>) -> Option<(GroupRank, u64, FrameKind, Option<Signature>)> {
        let at = self.0.iter().position(|(to, ..)| room.contains(*to))?;
        self.0.remove(at)
    }

    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}
