//! Counters of a client by rail, peer and transport, and time breakdowns of slow operations.
//!
//! Each slice costs a few additions when it ends. A histogram allocates its memory when its rail is first used. A rail
//! of the shared path has two sets of counts, one for each way of copying.

use std::collections::VecDeque;

use kvplane_proto::histogram::Histogram;
use kvplane_proto::status::Status;

use crate::types::{NodeCounts, Path, PeerId, Transport, Via};

/// Slow operations that are kept, the latest.
const SLOW_KEPT: usize = 64;

/// Counts of one transport on one rail.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RailCounts {
    /// Slices completed.
    pub operations: u64,
    /// Payload bytes of these slices.
    pub bytes: u64,
    /// Slices that failed on this rail and were retried.
    pub retries: u64,
    /// Slices that failed over from this rail to another rail or transport.
    pub failovers: u64,
    /// Times that the rail was paused.
    pub pauses: u64,
    /// Connections closed because nothing progressed on them for too long.
    pub stalls: u64,
    /// Slices that took longer than [`Config::slow_ns`](crate::Config::slow_ns), earlier attempts included.
    pub slow: u64,
    /// Times that the rail was found not to reach the peer from this host.
    pub unavailable: u64,
    /// Slices completed on a rail over devices, by whether our device and our memory are on one NUMA node.
    pub own_node: NodeCounts,
    /// Slices completed on a rail over devices, by whether the peer's device and its memory are on one NUMA node, as
    /// far as the peer reports it.
    pub peer_node: NodeCounts,
    /// Queueing time: from waiting for a lane to being bound to one.
    pub queue: Histogram,
    /// Service time: from being bound to completion.
    pub service: Histogram,
}

impl RailCounts {
    /// Returns true if nothing was counted.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        let troubles = self.retries + self.failovers + self.pauses + self.stalls + self.unavailable;
        self.operations + self.slow + troubles == 0
    }

    /// Adds the counts of another.
    pub fn add(&mut self, other: &Self) {
        self.operations += other.operations;
        self.bytes += other.bytes;
        self.retries += other.retries;
        self.failovers += other.failovers;
        self.pauses += other.pauses;
        self.stalls += other.stalls;
        self.slow += other.slow;
        self.unavailable += other.unavailable;
        self.own_node.add(&other.own_node);
        self.peer_node.add(&other.peer_node);
        self.queue.merge(&other.queue);
        self.service.merge(&other.service);
    }

    /// Returns the difference to `base`, an earlier state or a part of it.
    #[must_use]
    pub fn beyond(&self, base: &Self) -> Self {
        Self {
            operations: self.operations.saturating_sub(base.operations),
            bytes: self.bytes.saturating_sub(base.bytes),
            retries: self.retries.saturating_sub(base.retries),
            failovers: self.failovers.saturating_sub(base.failovers),
            pauses: self.pauses.saturating_sub(base.pauses),
            stalls: self.stalls.saturating_sub(base.stalls),
            slow: self.slow.saturating_sub(base.slow),
            unavailable: self.unavailable.saturating_sub(base.unavailable),
            own_node: self.own_node.beyond(&base.own_node),
            peer_node: self.peer_node.beyond(&base.peer_node),
            queue: self.queue.beyond(&base.queue),
            service: self.service.beyond(&base.service),
        }
    }
}

/// Slices that failed over from one transport to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Failovers {
    /// Transport that failed.
    pub from: Transport,
    /// Transport that took over.
    pub to: Transport,
    pub slices: u64,
}

/// Time breakdown of a slow slice.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlowOperation {
    /// Peer of the slice.
    pub peer: PeerId,
    /// Transport that carried the slice last.
    pub transport: Transport,
    /// Bytes of the slice.
    pub bytes: u64,
    /// Time at which the slice began.
    pub begun_ns: u64,
    /// Time at which the slice was last enqueued.
    pub queued_ns: u64,
    /// Time at which the slice was bound to a lane.
    pub posted_ns: u64,
    /// Time at which the slice left the lane's queue, for the wire or to be copied.
    pub sent_ns: u64,
    /// Time at which the slice ended.
    pub done_ns: u64,
    /// Number of earlier attempts that failed; ways of a segment that were found closed do not count.
    pub attempts: u8,
    /// Outcome of the slice.
    pub status: Status,
}

/// Counts of one rail, by transport.
#[derive(Default)]
pub(crate) struct RailBooks {
    main: RailCounts,
    /// Only the shared path has a second way of copying, and memory is allocated on first use.
    cma: Option<Box<RailCounts>>,
}

impl RailBooks {
    pub(crate) fn of(&mut self, transport: Transport) -> &mut RailCounts {
        match transport {
            Transport::Cma => self.cma.get_or_insert_default(),
            _ => &mut self.main,
        }
    }

    /// Returns the counts of each transport that has any; if none has, the first one under its `usual` name.
    pub(crate) fn pages(&self, path: Path, usual: Transport) -> impl Iterator<Item = (Transport, &RailCounts)> {
        let main = if self.main.is_empty() { usual } else { Transport::of(path, Via::Map) };
        let first = Some((main, &self.main)).filter(|_| self.cma.is_none() || !self.main.is_empty());
        first.into_iter().chain(self.cma.as_deref().map(|cma| (Transport::Cma, cma)))
    }
}

/// Counts of a client besides those of its rails.
#[derive(Default)]
pub(crate) struct Books {
    pub(crate) counters: Counters,
    failovers: Vec<Failovers>,
    slow: VecDeque<SlowOperation>,
    /// Counts of the rails of closed peers.
    departed: Vec<(Transport, RailCounts)>,
}

impl Books {
    /// Counts a slice that failed over from one transport to another.
    pub(crate) fn count_failover(&mut self, from: Transport, to: Transport) {
        match self.failovers.iter_mut().find(|entry| (entry.from, entry.to) == (from, to)) {
            Some(entry) => entry.slices += 1,
            // Bounded by the number of pairs of transports.
            None => self.failovers.push(Failovers { from, to, slices: 1 }),
        }
    }

    /// Returns the slices that failed over to another transport, by pair of transports.
    pub(crate) fn failovers(&self) -> &[Failovers] {
        &self.failovers
    }

    /// Records a slow slice.
    pub(crate) fn remember_slow(&mut self, slow: SlowOperation) {
        if self.slow.len() == SLOW_KEPT {
            self.slow.pop_front();
        }
        self.slow.push_back(slow);
    }

    /// Returns the latest slow slices, oldest first.
    pub(crate) fn slow(&self) -> impl Iterator<Item = &SlowOperation> {
        self.slow.iter()
    }

    /// Forgets the slow slices of a peer whose id is about to be reused: they would be attributed to the next peer.
    pub(crate) fn forget_slow(&mut self, peer: PeerId) {
        self.slow.retain(|slow| slow.peer != peer);
    }

    /// Keeps the counts of a rail of this path in the totals, before its entry is reused for another peer.
    pub(crate) fn keep(&mut self, path: Path, books: &RailBooks) {
        for (transport, counts) in books.pages(path, Transport::of(path, Via::Map)) {
            if counts.is_empty() {
                continue;
            }
            match self.departed.iter_mut().find(|(other, _)| *other == transport) {
                Some((_, sum)) => sum.add(counts),
                // Bounded by the number of transports.
                None => self.departed.push((transport, counts.clone())),
            }
        }
    }

    /// Returns the counts of the rails of closed peers, by transport.
    pub(crate) fn departed(&self) -> &[(Transport, RailCounts)] {
        &self.departed
    }
}

/// Counters of a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Frames for requests that are no longer in flight.
    pub stale_frames: u64,
    /// Slices retried: after a lost lane, a wrong or busy owner, or a checksum mismatch.
    pub retries: u64,
    /// Gets and queries sent to the replica owner because the owner did not reply (hedge), is suspect, or is
    /// unreachable (failover).
    pub second_asked: u64,
    /// Gets sent to the replica owner because both owners have the object (spread).
    pub second_chosen: u64,
    /// Lanes reset by this client: after a deadline, a cancellation, a map without the peer, or a protocol violation.
    pub resets: u64,
    /// Lanes that were lost or could not be connected.
    pub lanes_lost: u64,
    /// Fence requests sent.
    pub fences: u64,
    /// Payloads with a checksum mismatch.
    pub corrupt: u64,
}
