//! Counters of a handshake daemon. One thread writes, any thread reads.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::connection::ConnectionOutcome;
use crate::frame::Kind;

/// Counters of a daemon since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Connections accepted.
    pub accepted: u64,
    /// Descriptors sent.
    pub descriptors: u64,
    /// Notices accepted.
    pub notices: u64,
    /// Notices refused because there was no room, or as malformed.
    pub refused_notices: u64,
    /// Probes answered.
    pub probes: u64,
    /// RDMA connections made, and confirmations that a peer's half of one is connected.
    pub connections: u64,
    /// RDMA connections refused.
    pub refused_connections: u64,
    /// Connections closed because the peer speaks another protocol.
    pub malformed: u64,
    /// Connections closed at a deadline.
    pub expired: u64,
    /// Connections evicted to make room for new ones or for requests.
    pub evicted: u64,
}

#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) accepted: AtomicU64,
    descriptors: AtomicU64,
    notices: AtomicU64,
    refused_notices: AtomicU64,
    probes: AtomicU64,
    connections: AtomicU64,
    refused_connections: AtomicU64,
    pub(super) malformed: AtomicU64,
    pub(super) expired: AtomicU64,
    pub(super) evicted: AtomicU64,
}

/// Increments a counter.
pub(super) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

impl Tally {
    pub(super) fn answered(&self, answered: ConnectionOutcome) {
        count(match answered {
            ConnectionOutcome::Typed(Kind::Metadata) => &self.descriptors,
            ConnectionOutcome::Typed(Kind::Notify) => &self.notices,
            ConnectionOutcome::Typed(Kind::Probe) => &self.probes,
            ConnectionOutcome::Typed(Kind::Connection) => &self.connections,
            ConnectionOutcome::RefusedConnection => &self.refused_connections,
            ConnectionOutcome::RefusedNotice => &self.refused_notices,
        });
    }

    pub(super) fn read(&self) -> Counts {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            accepted: read(&self.accepted),
            descriptors: read(&self.descriptors),
            notices: read(&self.notices),
            refused_notices: read(&self.refused_notices),
            probes: read(&self.probes),
            connections: read(&self.connections),
            refused_connections: read(&self.refused_connections),
            malformed: read(&self.malformed),
            expired: read(&self.expired),
            evicted: read(&self.evicted),
        }
    }
}
