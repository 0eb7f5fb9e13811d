//! Reports of a host to its embedder: counters, completed batches, freed memory, the need of a newer map, and the last
//! problem.

use std::collections::VecDeque;

use kvplane_proto::{BatchId, SegmentId};
use kvplane_transport::{CloseCause, ZeroCopyCounters};

/// Least time between two log lines about TLS failures.
const TLS_AGAIN_NS: u64 = 1_000_000_000;

/// Counters of a host.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostCounters {
    /// Rounds that made progress.
    pub busy_rounds: u64,
    /// Parks.
    pub parks: u64,
    /// Frames that violated the protocol, ours or a peer's view of it.
    pub broken: u64,
    /// Connections accepted.
    pub accepted: u64,
    /// Accepted connections that were closed in favour of newer ones before they had authenticated.
    pub replaced_unauthenticated: u64,
    /// Connections that ended because the TLS handshake failed, or a record was invalid.
    pub tls_failed: u64,
    /// Bytes of segments that this host copied through mappings of its peers' memory.
    pub map_bytes: u64,
    /// Bytes of segments that the kernel copied between processes (CMA).
    pub cma_bytes: u64,
    /// Bytes of segments that were copied within this process.
    pub local_bytes: u64,
    /// Copies by RDMA devices between this host's memory and its peers' segments.
    pub rdma_copies: u64,
    /// Copies from and to device memory of peers that is mapped here.
    pub peer_memory: PeerMemoryCounters,
    /// Gets into memory of devices that copy engines carry out from mapped pools.
    pub pool_reads: PoolReadCounters,
    /// Payloads that were sent over TCP without a copy, or should have been.
    pub zero_copy: ZeroCopyCounters,
}

/// Counters of copies from and to mapped device memory of peers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerMemoryCounters {
    /// Bytes copied to memory of peers.
    pub written_bytes: u64,
    /// Bytes copied from memory of peers.
    pub read_bytes: u64,
    /// Batches of these copies, each one call of the driver where it can.
    pub batches: u64,
    /// Segments that a peer did not share, or that could not be mapped: their requests are staged.
    pub refused: u64,
    /// Mappings at present.
    pub mappings: u64,
}

impl PeerMemoryCounters {
    /// Adds the counters of another host.
    pub const fn add(&mut self, other: &Self) {
        let Self { written_bytes, read_bytes, batches, refused, mappings } = *other;
        self.written_bytes += written_bytes;
        self.read_bytes += read_bytes;
        self.batches += batches;
        self.refused += refused;
        self.mappings += mappings;
    }
}

/// Counters of gets into memory of devices over shared memory: copy engines read the mapped pools of nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolReadCounters {
    /// Bytes that copy engines have read, or are reading.
    pub bytes: u64,
    /// Gets whose bytes were copied into pinned memory first, because their part of the pool is not pinned.
    pub copied_reads: u64,
    /// Pools that a driver has refused to pin, counted once for each connection.
    pub refused: u64,
    /// Bytes of mapped pools that are pinned at present.
    pub pinned_bytes: u64,
}

impl PoolReadCounters {
    /// Adds the counters of another host.
    pub const fn add(&mut self, other: &Self) {
        let Self { bytes, copied_reads, refused, pinned_bytes } = *other;
        self.bytes += bytes;
        self.copied_reads += copied_reads;
        self.refused += refused;
        self.pinned_bytes += pinned_bytes;
    }
}

/// Counters, and reports that were not taken yet.
#[derive(Default)]
pub(crate) struct Reports {
    pub(crate) counters: HostCounters,
    done: VecDeque<BatchId>,
    unregistered: Vec<SegmentId>,
    wants_map: bool,
    last_problem: Option<String>,
    /// Time from which on the log may report a TLS failure again.
    tls_again_ns: u64,
}

impl Reports {
    pub(crate) fn batch_done(&mut self, batch: BatchId) {
        self.done.push_back(batch);
    }

    pub(crate) fn take_done(&mut self) -> Option<BatchId> {
        self.done.pop_front()
    }

    /// Reports that a segment is no longer in use.
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

    /// Records the text of a problem.
    pub(crate) fn problem(&mut self, what: impl Into<String>) {
        self.last_problem = Some(what.into());
    }

    /// Counts a frame that violated the protocol.
    pub(crate) const fn broken(&mut self) {
        self.counters.broken += 1;
    }

    /// Records the end of a connection, and its cause.
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

    /// Records a TLS failure. Log lines about it are rate-limited, as a peer may cause it as often as it likes.
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

    /// Returns true if the log may report a TLS failure; then not again for a while.
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
    fn unexpected_ends_of_connections_are_problems() {
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
