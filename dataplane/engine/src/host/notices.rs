//! Notices of a host to its embedder: batches that are done, memory that is free, the need of a newer map, and the
//! last problem.

use std::collections::VecDeque;

use kvplane_proto::{BatchId, SegmentId};

/// How long the log says nothing of connections that could not be sealed after one was.
const TLS_AGAIN_NS: u64 = 1_000_000_000;

/// Notices that were not taken yet.
#[derive(Default)]
pub(super) struct Notices {
    done: VecDeque<BatchId>,
    unregistered: Vec<SegmentId>,
    wants_map: bool,
    last_problem: Option<String>,
    /// When the log may say again that a connection could not be sealed.
    tls_again_ns: u64,
}

impl Notices {
    pub(super) fn batch_done(&mut self, batch: BatchId) {
        self.done.push_back(batch);
    }

    pub(super) fn take_done(&mut self) -> Option<BatchId> {
        self.done.pop_front()
    }

    /// Nothing uses a segment any more.
    pub(super) fn segment_free(&mut self, segment: SegmentId) {
        self.unregistered.push(segment);
    }

    pub(super) fn take_free(&mut self) -> Option<SegmentId> {
        self.unregistered.pop()
    }

    pub(super) const fn want_map(&mut self) {
        self.wants_map = true;
    }

    pub(super) const fn take_map_wanted(&mut self) -> bool {
        core::mem::replace(&mut self.wants_map, false)
    }

    /// Something went wrong: what, in words.
    pub(super) fn problem(&mut self, what: impl Into<String>) {
        self.last_problem = Some(what.into());
    }

    pub(super) fn last_problem(&self) -> Option<&str> {
        self.last_problem.as_deref()
    }

    /// True if the log may say that a connection could not be sealed; then not again for a while.
    pub(super) const fn may_log_tls(&mut self, now_ns: u64) -> bool {
        let may = now_ns >= self.tls_again_ns;
        if may {
            self.tls_again_ns = now_ns.saturating_add(TLS_AGAIN_NS);
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notices_are_taken_once() {
        let mut notices = Notices::default();
        let batch = BatchId { index: 1, generation: 2 };
        notices.batch_done(batch);
        notices.want_map();
        assert_eq!((notices.take_done(), notices.take_done()), (Some(batch), None));
        assert!(notices.take_map_wanted() && !notices.take_map_wanted());
        assert!(notices.may_log_tls(5) && !notices.may_log_tls(5 + TLS_AGAIN_NS - 1));
        assert!(notices.may_log_tls(5 + TLS_AGAIN_NS));
    }
}
