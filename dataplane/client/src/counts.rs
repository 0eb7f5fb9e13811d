//! What a client counts by rail, peer and transport, and where slow operations spent their time.
//!
//! Each slice costs a few additions when it ends. Histograms take their memory when their rail is first used. A rail of
//! the shared path has two pages of books, as it moves bytes in two ways.

use std::collections::VecDeque;

use kvplane_proto::histogram::Histogram;
use kvplane_proto::status::Status;

use crate::types::{NodeCounts, Path, PeerId, Transport, Via};

/// Slow operations that are kept: the latest.
const SLOW_KEPT: usize = 64;

/// What one transport did on one rail.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RailCounts {
    /// Slices done.
    pub operations: u64,
    /// Payload bytes of those.
    pub bytes: u64,
    /// Slices that it failed and that were sent again.
    pub retries: u64,
    /// Slices that it had and that another rail or transport took over.
    pub failovers: u64,
    /// Times that the rail was paused.
    pub pauses: u64,
    /// Connections that were given up as nothing moved on them for too long.
    pub silences: u64,
    /// Slices that took longer than [`Config::slow_ns`](crate::Config::slow_ns), earlier attempts included.
    pub slow: u64,
    /// Times that it was found not to lead to the peer from here.
    pub unavailable: u64,
    /// Slices done on a rail over devices, by whether our device and our memory are on one NUMA node.
    pub own_node: NodeCounts,
    /// The same of the peer's device and its memory, as far as the peer told.
    pub peer_node: NodeCounts,
    /// Time from waiting for a lane to being bound to one.
    pub queue: Histogram,
    /// Time from being bound to being done.
    pub service: Histogram,
}

impl RailCounts {
    /// Whether nothing was counted.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        let troubles = self.retries + self.failovers + self.pauses + self.silences + self.unavailable;
        self.operations + self.slow + troubles == 0
    }

    /// Adds what another counted.
    pub fn add(&mut self, other: &Self) {
        self.operations += other.operations;
        self.bytes += other.bytes;
        self.retries += other.retries;
        self.failovers += other.failovers;
        self.pauses += other.pauses;
        self.silences += other.silences;
        self.slow += other.slow;
        self.unavailable += other.unavailable;
        self.own_node.add(&other.own_node);
        self.peer_node.add(&other.peer_node);
        self.queue.merge(&other.queue);
        self.service.merge(&other.service);
    }

    /// What was counted beyond `base`, an earlier state or a part of it.
    #[must_use]
    pub fn beyond(&self, base: &Self) -> Self {
        Self {
            operations: self.operations.saturating_sub(base.operations),
            bytes: self.bytes.saturating_sub(base.bytes),
            retries: self.retries.saturating_sub(base.retries),
            failovers: self.failovers.saturating_sub(base.failovers),
            pauses: self.pauses.saturating_sub(base.pauses),
            silences: self.silences.saturating_sub(base.silences),
            slow: self.slow.saturating_sub(base.slow),
            unavailable: self.unavailable.saturating_sub(base.unavailable),
            own_node: self.own_node.beyond(&base.own_node),
            peer_node: self.peer_node.beyond(&base.peer_node),
            queue: self.queue.beyond(&base.queue),
            service: self.service.beyond(&base.service),
        }
    }
}

/// Slices that moved from one transport to another after a failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Failovers {
    /// What failed.
    pub from: Transport,
    /// What took over.
    pub to: Transport,
    /// How many.
    pub slices: u64,
}

/// Where a slow slice spent its time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlowOperation {
    /// To whom.
    pub peer: PeerId,
    /// What carried it last.
    pub transport: Transport,
    /// Bytes that it was to move.
    pub bytes: u64,
    /// When it began.
    pub begun_ns: u64,
    /// When it began to wait, the last time that it did.
    pub queued_ns: u64,
    /// When it was bound to a lane.
    pub posted_ns: u64,
    /// When it left the lane's queue, for the wire or to be copied.
    pub sent_ns: u64,
    /// When it ended.
    pub done_ns: u64,
    /// Times that it was sent before.
    pub attempts: u8,
    /// Its outcome.
    pub status: Status,
}

/// The books of one rail, a page for each transport.
#[derive(Default)]
pub(crate) struct RailBooks {
    main: RailCounts,
    /// Only the shared path has a second way to move bytes, and only what is used costs memory.
    cma: Option<Box<RailCounts>>,
}

impl RailBooks {
    pub(crate) fn of(&mut self, transport: Transport) -> &mut RailCounts {
        match transport {
            Transport::Cma => self.cma.get_or_insert_default(),
            _ => &mut self.main,
        }
    }

    /// The pages that have something on them; the first one, under its `usual` name, when none has.
    pub(crate) fn pages(&self, path: Path, usual: Transport) -> impl Iterator<Item = (Transport, &RailCounts)> {
        let main = if self.main.is_empty() { usual } else { Transport::of(path, Via::Map) };
        let first = Some((main, &self.main)).filter(|_| self.cma.is_none() || !self.main.is_empty());
        first.into_iter().chain(self.cma.as_deref().map(|cma| (Transport::Cma, cma)))
    }
}

/// What is counted beside the rails.
#[derive(Default)]
pub(crate) struct Books {
    pub(crate) counters: Counters,
    failovers: Vec<Failovers>,
    slow: VecDeque<SlowOperation>,
    /// What rails counted that are gone with their peers.
    departed: Vec<(Transport, RailCounts)>,
}

impl Books {
    /// A slice moved from one transport to another.
    pub(crate) fn count_failover(&mut self, from: Transport, to: Transport) {
        match self.failovers.iter_mut().find(|entry| (entry.from, entry.to) == (from, to)) {
            Some(entry) => entry.slices += 1,
            // As many entries as there are pairs of transports.
            None => self.failovers.push(Failovers { from, to, slices: 1 }),
        }
    }

    /// Slices that changed their transport after a failure, by the transports.
    pub(crate) fn failovers(&self) -> &[Failovers] {
        &self.failovers
    }

    /// A slice was slow.
    pub(crate) fn remember_slow(&mut self, slow: SlowOperation) {
        if self.slow.len() == SLOW_KEPT {
            self.slow.pop_front();
        }
        self.slow.push_back(slow);
    }

    /// The latest slow slices, oldest first.
    pub(crate) fn slow(&self) -> impl Iterator<Item = &SlowOperation> {
        self.slow.iter()
    }

    /// A peer's id is free for another, to which these would be ascribed.
    pub(crate) fn forget_slow(&mut self, peer: PeerId) {
        self.slow.retain(|slow| slow.peer != peer);
    }

    /// A rail of this path is free for another peer: what it counted stays in the sums.
    pub(crate) fn keep(&mut self, path: Path, books: &RailBooks) {
        for (transport, counts) in books.pages(path, Transport::of(path, Via::Map)) {
            if counts.is_empty() {
                continue;
            }
            match self.departed.iter_mut().find(|(other, _)| *other == transport) {
                Some((_, sum)) => sum.add(counts),
                // As many entries as there are transports.
                None => self.departed.push((transport, counts.clone())),
            }
        }
    }

    /// What the rails of peers that were left had counted, by transport.
    pub(crate) fn departed(&self) -> &[(Transport, RailCounts)] {
        &self.departed
    }
}

/// What a client counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Frames that no open request wanted any more.
    pub stale_frames: u64,
    /// Slices sent again: after a lost lane, a wrong or busy owner, or a wrong checksum.
    pub retries: u64,
    /// Gets that asked the replica owner as the first did not answer.
    pub second_asked: u64,
    /// Gets that asked the replica owner as one of two that have the object.
    pub second_chosen: u64,
    /// Lanes reset from our side: a deadline, a withdrawal, a map without the peer, or a peer that misbehaved.
    pub resets: u64,
    /// Lanes that were lost or could not be connected.
    pub lanes_lost: u64,
    /// Requests that told a peer which lanes are over.
    pub fences: u64,
    /// Payloads that did not match their checksum.
    pub corrupt: u64,
}
