//! End of the last operation of a member, which is kept for peers that lack its result.

use std::collections::VecDeque;

use kvplane_group::{GroupRank, RankSet};

use crate::frame::{AbortCause, FrameKind};
use crate::operation::Signature;
use crate::span::Span;
use crate::work::{Output, WorkId};

/// End of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OperationEnd {
    /// It is in the work buffer.
    Result { work: WorkId, span: Span },
    /// It ended without one.
    Aborted { cause: AbortCause, signature: Option<Signature> },
}

/// A peer that has requested the result.
#[derive(Clone, Copy, Debug)]
struct Serving {
    to: GroupRank,
    operation: u64,
    sent: u64,
}

/// Frame of a result for a peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ResultFrame {
    pub(crate) to: GroupRank,
    pub(crate) operation: u64,
    pub(crate) kind: FrameKind,
    pub(crate) payload: Option<(WorkId, Span)>,
}

/// The result of the last operation, and the peers that get it.
#[derive(Clone, Debug, Default)]
pub(crate) struct KeptResult {
    last: Option<OperationEnd>,
    serving: Vec<Serving>,
}

impl KeptResult {
    pub(crate) const fn is_some(&self) -> bool {
        self.last.is_some()
    }

    /// Forgets it: nobody lacks it any longer.
    pub(crate) fn forget(&mut self, outputs: &mut VecDeque<Output>) {
        self.serving.clear();
        if let Some(OperationEnd::Result { work, .. }) = self.last.take() {
            outputs.push_back(Output::Release(work));
        }
    }

    /// Keeps that of the next operation instead.
    pub(crate) fn replace(&mut self, kept: OperationEnd, outputs: &mut VecDeque<Output>) {
        self.forget(outputs);
        self.last = Some(kept);
    }

    /// Sends nothing more in this view.
    pub(crate) fn stop_serving(&mut self) {
        self.serving.clear();
    }

    /// Serves a peer that requests the result of an operation, the last of `completed` or an earlier one. Returns how
    /// it ended if there is none.
    pub(crate) fn serve(
        &mut self,
        to: GroupRank,
        operation: u64,
        completed: u64,
    ) -> Option<(AbortCause, Option<Signature>)> {
        match self.last {
            Some(OperationEnd::Result { .. }) if operation == completed => {
                if !self.serving.iter().any(|serving| serving.to == to) {
                    self.serving.push(Serving { to, operation, sent: 0 });
                }
                None
            }
            Some(OperationEnd::Aborted { cause, signature }) if operation == completed => Some((cause, signature)),
            // It was given up here, while the peer did not come for it.
            _ => Some((AbortCause::Deadline { peer: to }, None)),
        }
    }

    /// Returns the next frame for a peer in `room`, with a payload of at most `limit` bytes.
    pub(crate) fn next_frame(&mut self, room: RankSet<GroupRank>, limit: u64) -> Option<ResultFrame> {
        let at = self.serving.iter().position(|serving| room.contains(serving.to))?;
        let Some(OperationEnd::Result { work, span }) = self.last else { return None };
        let serving = &mut self.serving[at];
        let (offset, bytes) = (serving.sent, limit.min(span.bytes - serving.sent));
        serving.sent += bytes;
        let (to, operation, is_all) = (serving.to, serving.operation, serving.sent == span.bytes);
        if is_all {
            self.serving.remove(at);
        }
        let payload = (bytes > 0).then(|| (work, span.part(offset, bytes)));
        Some(ResultFrame { to, operation, kind: FrameKind::Result { offset, total: span.bytes }, payload })
    }
}
