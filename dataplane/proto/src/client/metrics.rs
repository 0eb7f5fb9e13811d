//! What a client counts by rail, peer and path, and where slow operations spent their time.
//!
//! Each slice costs a few additions when it ends. Histograms take their memory when their rail is first used.

use std::collections::VecDeque;

use super::Client;
use super::path::Path;
use super::table::NOWHERE;
use super::types::{PeerId, Request};
use crate::sched::{Health, Histogram};
use crate::status::Status;

/// Slow operations that are kept: the latest.
const SLOW_KEPT: usize = 64;

/// The books of one rail.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct RailCounts {
    /// Slices done.
    pub operations: u64,
    /// Payload bytes of those.
    pub bytes: u64,
    /// Slices that it failed and that were sent again.
    pub retries: u64,
    /// Slices that it had and that another rail or path took over.
    pub failovers: u64,
    /// Times that it was paused.
    pub pauses: u64,
    /// Times that it was found not to lead to the peer from here.
    pub unavailable: u64,
    /// Time from waiting for a lane to being bound to one.
    pub queue: Histogram,
    /// Time from being bound to being done.
    pub service: Histogram,
}

/// A rail as it stands.
#[derive(Clone, Copy, Debug)]
pub struct RailMetrics<'a> {
    /// Whose rail.
    pub peer: PeerId,
    /// Of which path.
    pub path: Path,
    /// Its number among the rails of that path.
    pub number: usize,
    /// Whether it is in use.
    pub health: Health,
    /// What it serves at the moment, by measurement.
    pub bytes_per_second: u64,
    /// Its fixed latency, by measurement.
    pub latency_ns: u64,
    /// Bytes posted and not done.
    pub inflight_bytes: u64,
    /// Why it does not lead to the peer from here, until it was found to again.
    pub unavailable: Option<&'a str>,
    /// What happened on it.
    pub counts: &'a RailCounts,
}

/// Slices that moved from one path to another after a failure.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Failovers {
    /// The path that failed.
    pub from: Path,
    /// The path that took over.
    pub to: Path,
    /// How many.
    pub slices: u64,
}

/// Where a slow slice spent its time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlowOperation {
    /// To whom.
    pub peer: PeerId,
    /// Over which path.
    pub path: Path,
    /// Bytes that it was to move.
    pub bytes: u64,
    /// When it began to wait, the last time that it did.
    pub queued_ns: u64,
    /// When it was bound to a lane.
    pub posted_ns: u64,
    /// When it ended.
    pub done_ns: u64,
    /// Times that it was sent before.
    pub attempts: u8,
    /// Its outcome.
    pub status: Status,
}

/// What is counted beside the rails.
#[derive(Default)]
pub(super) struct Books {
    failovers: Vec<Failovers>,
    slow: VecDeque<SlowOperation>,
}

impl Client {
    /// Every rail of every peer, with what it did.
    pub fn rail_metrics(&self) -> impl Iterator<Item = RailMetrics<'_>> {
        self.peers.iter().enumerate().flat_map(move |(peer, entry)| {
            entry.groups.iter().flat_map(move |group| {
                group.rails.iter().enumerate().map(move |(number, &rail)| {
                    let entry = &self.rails[rail as usize];
                    let (bulk, small) = entry.rail.inflight_bytes();
                    RailMetrics {
                        peer: PeerId(peer as u32),
                        path: group.path,
                        number,
                        health: entry.rail.health(),
                        bytes_per_second: (entry.rail.rate().bytes_per_ns() * 1e9) as u64,
                        latency_ns: entry.rail.rate().latency_ns() as u64,
                        inflight_bytes: bulk + small,
                        unavailable: group.unavailable.as_ref().map(|(_, why)| why.as_str()),
                        counts: &entry.counts,
                    }
                })
            })
        })
    }

    /// Slices that changed their path after a failure, by the paths.
    #[must_use]
    pub fn failovers(&self) -> &[Failovers] {
        &self.books.failovers
    }

    /// The latest slices that took longer than [`Config::slow_ns`](super::Config::slow_ns), oldest first.
    pub fn slow_operations(&self) -> impl Iterator<Item = &SlowOperation> {
        self.books.slow.iter()
    }

    /// A peer's id is free for another, to which these would be ascribed.
    pub(super) fn forget_slow(&mut self, peer: PeerId) {
        self.books.slow.retain(|slow| slow.peer != peer);
    }

    /// A slice is to be sent again after its rail failed it.
    pub(super) fn count_retry(&mut self, index: u32) {
        let rail = self.slices.at(index).rail;
        if rail != NOWHERE {
            self.rails[rail as usize].counts.retries += 1;
        }
    }

    /// A slice moves from the rail that it was on to another.
    pub(super) fn count_failover(&mut self, from: u32, to: u32) {
        self.rails[from as usize].counts.failovers += 1;
        let path = |rail: u32| {
            let rail = &self.rails[rail as usize];
            self.peers[rail.peer as usize].groups.get(usize::from(rail.group)).map(|group| group.path)
        };
        let (Some(from), Some(to)) = (path(from), path(to)) else { return };
        if from == to {
            return;
        }
        match self.books.failovers.iter_mut().find(|entry| (entry.from, entry.to) == (from, to)) {
            Some(entry) => entry.slices += 1,
            // As many entries as there are pairs of paths.
            None => self.books.failovers.push(Failovers { from, to, slices: 1 }),
        }
    }

    /// A slice that was on a rail has ended, and has left it.
    pub(super) fn count_end(&mut self, slice: &super::table::Slice, status: Status) {
        if slice.rail == NOWHERE {
            return;
        }
        let now_ns = self.now_ns;
        let config = &self.config;
        let bytes = slice.load_bytes();
        let entry = &mut self.rails[slice.rail as usize];
        if status == Status::Ok {
            let moved = if matches!(slice.request, Request::Get(..)) { slice.bytes } else { slice.weight_bytes() };
            entry.rail.done(moved, config.is_small(bytes), slice.posted_ns, now_ns);
            entry.counts.operations += 1;
            entry.counts.bytes += moved;
            entry.counts.queue.add(slice.posted_ns.saturating_sub(slice.queued_ns));
            entry.counts.service.add(now_ns.saturating_sub(slice.posted_ns));
            self.peers[slice.peer as usize].retries.earn();
        }
        if now_ns.saturating_sub(slice.queued_ns) >= config.slow_ns {
            let path = self.peers[slice.peer as usize].groups.get(usize::from(slice.group)).map(|group| group.path);
            let Some(path) = path else { return };
            if self.books.slow.len() == SLOW_KEPT {
                self.books.slow.pop_front();
            }
            self.books.slow.push_back(SlowOperation {
                peer: PeerId(slice.peer),
                path,
                bytes: slice.weight_bytes(),
                queued_ns: slice.queued_ns,
                posted_ns: slice.posted_ns,
                done_ns: now_ns,
                attempts: slice.attempts,
                status,
            });
        }
    }
}
