//! Reports of a host to its embedder: what it counted, batches that are done, memory that is free, the need of a newer
//! map, and the last problem.

use std::collections::VecDeque;

use kvplane_proto::{BatchId, SegmentId};
use kvplane_transport::{CloseCause, ZeroCopyCounters};

/// How long the log says nothing of connections that could not be sealed after one was.
const TLS_AGAIN_NS: u64 = 1_000_000_000;

/// What a host counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostCounters {
    /// Rounds that did something.
    pub busy_rounds: u64,
    /// Parks.
    pub parks: u64,
    /// Frames that broke the protocol, ours or a peer's view of it.
    pub broken: u64,
    /// Connections accepted.
    pub accepted: u64,
    /// Of those, closed for others that came before they had said who they are.
    pub crowded_out: u64,
    /// Connections that ended because they could not be sealed, or a record was wrong.
    pub tls_failed: u64,
    /// Segments' bytes that this host copied through mappings of its peers' memory.
    pub map_bytes: u64,
    /// The same by the kernel, between processes.
    pub cma_bytes: u64,
    /// The same within this process.
    pub local_bytes: u64,
    /// Copies between this host's memory and its peers' segments that RDMA devices made.
    pub rdma_copies: u64,
    /// Payloads that left over TCP without a copy, or should have.
    pub zero_copy: ZeroCopyCounters,
}

/// What was counted, and reports that were not taken yet.
#[derive(Default)]
pub(crate) struct Reports {
    pub(crate) counters: HostCounters,
    done: VecDeque<BatchId>,
    unregistered: Vec<SegmentId>,
    wants_map: bool,
    last_problem: Option<String>,
    /// When the log may say again that a connection could not be sealed.
    tls_again_ns: u64,
}

impl Reports {
    pub(crate) fn batch_done(&mut self, batch: BatchId) {
        self.done.push_back(batch);
    }

    pub(crate) fn take_done(&mut self) -> Option<BatchId> {
        self.done.pop_front()
    }

    /// Nothing uses a segment any more.
    pub(crate) fn segment_free(&mut self, segment: SegmentId) {
        self.unregistered.push(segment);
    }

    pub(crate) fn take_free(&mut self) -> Option<SegmentId> {
        self.unregistered.pop()
    }

    pub(crate) const fn want_map(&mut self) {
        self.wants_map = true;
    }

    pub(crate) const fn take_map_wanted(&mut self) -> bool {
        core::mem::replace(&mut self.wants_map, false)
    }

    /// Something went wrong: what, in words.
    pub(crate) fn problem(&mut self, what: impl Into<String>) {
        self.last_problem = Some(what.into());
    }

    /// A frame broke the protocol.
    pub(crate) const fn broken(&mut self) {
        self.counters.broken += 1;
    }

    /// A connection has ended, and why.
    pub(crate) fn connection_ended(&mut self, why: &CloseCause, now_ns: u64) {
        match why {
            CloseCause::Closed | CloseCause::Peer => {}
            CloseCause::Frame(_) | CloseCause::Ring(_) => {
                self.broken();
                self.problem(why.to_string());
            }
            CloseCause::Kernel(_) | CloseCause::Setup(_) | CloseCause::Rdma(_) | CloseCause::Unavailable(_) => {
                self.problem(why.to_string());
            }
            CloseCause::Tls(text) => self.tls_failed(text, now_ns),
        }
    }

    /// A connection could not be sealed. The log says so now and then only: a peer may cause it as often as it likes.
    fn tls_failed(&mut self, text: &str, now_ns: u64) {
        self.counters.tls_failed += 1;
        if self.may_log_tls(now_ns) {
            tracing::warn!("a data connection ended: {text}");
        }
        self.problem(text);
    }

    pub(crate) fn last_problem(&self) -> Option<&str> {
        self.last_problem.as_deref()
    }

    /// True if the log may say that a connection could not be sealed; then not again for a while.
    const fn may_log_tls(&mut self, now_ns: u64) -> bool {
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
    fn reports_are_taken_once() {
        let mut reports = Reports::default();
        let batch = BatchId { index: 1, generation: 2 };
        reports.batch_done(batch);
        reports.want_map();
        assert_eq!((reports.take_done(), reports.take_done()), (Some(batch), None));
        assert!(reports.take_map_wanted() && !reports.take_map_wanted());
        assert!(reports.may_log_tls(5) && !reports.may_log_tls(5 + TLS_AGAIN_NS - 1));
        assert!(reports.may_log_tls(5 + TLS_AGAIN_NS));
    }

    #[test]
    fn the_end_of_a_connection_is_a_problem_unless_it_was_wanted() {
        let mut reports = Reports::default();
        reports.connection_ended(&CloseCause::Closed, 1);
        reports.connection_ended(&CloseCause::Peer, 1);
        assert_eq!((reports.last_problem(), reports.counters.broken), (None, 0));
        reports.connection_ended(&CloseCause::Setup("no device".to_owned()), 1);
        assert!(reports.last_problem().is_some_and(|problem| problem.contains("no device")));
        reports.connection_ended(&CloseCause::Tls("no key".to_owned()), 1);
        assert_eq!((reports.last_problem(), reports.counters.tls_failed), (Some("no key"), 1));
    }
}
