//! What a client counts by rail, peer and transport, and where slow operations spent their time.
//!
//! Each slice costs a few additions when it ends. Histograms take their memory when their rail is first used. A rail of
//! the shared path has two pages of books, as it moves bytes in two ways.

use std::collections::VecDeque;

use kvplane_proto::histogram::Histogram;
use kvplane_proto::status::Status;

use super::Client;
use super::near::{NodeCounts, Place};
use super::options::RailDevices;
use super::path::{Path, Transport, Via};
use super::table::{NOWHERE, Slice};
use super::types::{PeerId, Request};
use crate::sched::Health;

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
    /// Slices that took longer than [`Config::slow_ns`](super::Config::slow_ns), earlier attempts included.
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

/// A rail as it stands, and what one transport did on it.
#[derive(Clone, Copy, Debug)]
pub struct RailMetrics<'a> {
    /// Whose rail.
    pub peer: PeerId,
    /// Of which path.
    pub path: Path,
    /// What carried the slices that were counted. A rail is told of once for each transport that was used on it, and
    /// once when none was.
    pub transport: Transport,
    /// Its number among the rails of that path.
    pub number: usize,
    /// The devices at both ends, of a rail over RDMA.
    pub devices: Option<RailDevices>,
    /// Whether it is in use.
    pub health: Health,
    /// What it serves at the moment, by measurement: all transports of the rail.
    pub bytes_per_second: u64,
    /// Its fixed latency, by measurement: all transports of the rail.
    pub latency_ns: u64,
    /// Bytes posted and not done: with the first transport of a rail for all of them, else 0.
    pub inflight_bytes: u64,
    /// Why it does not lead to the peer from here, until it was found to again.
    pub unavailable: Option<&'a str>,
    /// What happened on it.
    pub counts: &'a RailCounts,
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
pub(super) struct RailBooks {
    main: RailCounts,
    /// Only the shared path has a second way to move bytes, and only what is used costs memory.
    cma: Option<Box<RailCounts>>,
}

impl RailBooks {
    pub(super) fn of(&mut self, transport: Transport) -> &mut RailCounts {
        match transport {
            Transport::Cma => self.cma.get_or_insert_default(),
            _ => &mut self.main,
        }
    }

    /// The pages that have something on them; the first one, under its `usual` name, when none has.
    fn pages(&self, path: Path, usual: Transport) -> impl Iterator<Item = (Transport, &RailCounts)> {
        let main = if self.main.is_empty() { usual } else { Transport::of(path, Via::Map) };
        let first = Some((main, &self.main)).filter(|_| self.cma.is_none() || !self.main.is_empty());
        first.into_iter().chain(self.cma.as_deref().map(|cma| (Transport::Cma, cma)))
    }
}

/// What is counted beside the rails.
#[derive(Default)]
pub(super) struct Books {
    failovers: Vec<Failovers>,
    slow: VecDeque<SlowOperation>,
    /// What rails counted that are gone with their peers.
    departed: Vec<(Transport, RailCounts)>,
}

impl Client {
    /// Every rail of every peer, with what it did.
    pub fn rail_metrics(&self) -> impl Iterator<Item = RailMetrics<'_>> {
        let groups =
            self.peers.iter().enumerate().flat_map(|(peer, entry)| entry.groups.iter().map(move |g| (peer, g)));
        let rails =
            groups.flat_map(|(peer, group)| group.rails.iter().enumerate().map(move |rail| (peer, group, rail)));
        rails.flat_map(move |(peer, group, (number, &rail))| {
            let entry = &self.rails[rail as usize];
            let (bulk, small) = entry.rail.inflight_bytes();
            let pages = entry.books.pages(entry.path, self.usual_transport(entry.path));
            pages.enumerate().map(move |(page, (transport, counts))| RailMetrics {
                peer: PeerId(peer as u32),
                path: entry.path,
                transport,
                number,
                devices: entry.address.and_then(|address| address.rdma),
                health: entry.rail.health(),
                bytes_per_second: (entry.rail.rate().bytes_per_ns() * 1e9) as u64,
                latency_ns: entry.rail.rate().latency_ns() as u64,
                inflight_bytes: if page == 0 { bulk + small } else { 0 },
                unavailable: group.unavailable.as_ref().map(|(_, why)| why.as_str()),
                counts,
            })
        })
    }

    /// What the rails of peers that were left had counted, by transport.
    #[must_use]
    pub fn departed_metrics(&self) -> &[(Transport, RailCounts)] {
        &self.books.departed
    }

    /// Slices that changed their transport after a failure, by the transports.
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

    /// A rail is free for another peer: what it counted stays in the sums.
    pub(super) fn keep_books(&mut self, rail: u32) {
        let entry = &mut self.rails[rail as usize];
        let (path, books) = (entry.path, core::mem::take(&mut entry.books));
        for (transport, counts) in books.pages(path, Transport::of(path, Via::Map)) {
            if counts.is_empty() {
                continue;
            }
            match self.books.departed.iter_mut().find(|(other, _)| *other == transport) {
                Some((_, sum)) => sum.add(counts),
                // As many entries as there are transports.
                None => self.books.departed.push((transport, counts.clone())),
            }
        }
    }

    /// How peers on this host are expected to be copied from.
    pub(super) const fn usual_via(&self) -> Via {
        if self.config.shared { Via::Map } else { Via::Cma }
    }

    /// What a rail of this path is expected to use.
    pub(super) const fn usual_transport(&self, path: Path) -> Transport {
        Transport::of(path, self.usual_via())
    }

    /// A slice is to be sent again after its rail failed it.
    pub(super) fn count_retry(&mut self, index: u32) {
        let slice = self.slices.at(index);
        if slice.rail != NOWHERE {
            let entry = &mut self.rails[slice.rail as usize];
            entry.books.of(Transport::of(entry.path, slice.via)).retries += 1;
        }
    }

    /// A slice was bound to a lane that a rail had carried before, in a certain way: counts it if either is another
    /// now.
    pub(super) fn rebound(&mut self, index: u32, (last, via): (u32, Via)) {
        let slice = self.slices.peek(index);
        let lane = &self.lanes[slice.link.lane as usize];
        let next = match slice.request {
            Request::Read(target, _) | Request::Write(target, _) if lane.path == Path::Shared => {
                lane.way(&self.config, target.segment, target.shareable).unwrap_or(self.usual_via())
            }
            _ => self.usual_via(),
        };
        let (from, to) = (Transport::of(self.rails[last as usize].path, via), Transport::of(lane.path, next));
        if (last, from) == (slice.rail, to) {
            return;
        }
        self.rails[last as usize].books.of(from).failovers += 1;
        if from == to {
            return;
        }
        match self.books.failovers.iter_mut().find(|entry| (entry.from, entry.to) == (from, to)) {
            Some(entry) => entry.slices += 1,
            // As many entries as there are pairs of transports.
            None => self.books.failovers.push(Failovers { from, to, slices: 1 }),
        }
    }

    /// Whether memory at these places and the devices of a rail are on one node, at our end and at the peer's; none
    /// on a rail without devices.
    pub(super) fn nodes_of(
        &self,
        rail: u32,
        peer: usize,
        (ours, theirs): (Place, Place),
    ) -> Option<(Option<bool>, Option<bool>)> {
        let devices = self.rails[rail as usize].address?.rdma?;
        let near = &self.peers[peer].near;
        Some((self.near.of(devices.own, ours).same_node, near.of(devices.peer, theirs).same_node))
    }

    /// A slice that was on a rail has ended, and has left it.
    pub(super) fn count_end(&mut self, slice: &Slice, status: Status) {
        if slice.rail == NOWHERE {
            return;
        }
        let now_ns = self.now_ns;
        if matches!(status, Status::Ok | Status::NotFound) && slice.is_get_of_first() {
            self.got_after(slice.way.peer, now_ns.saturating_sub(slice.times.begun_ns));
        }
        let bytes = slice.load_bytes();
        let nodes = self.nodes_of(slice.rail, slice.way.peer as usize, self.places_of(&slice.request));
        let config = &self.config;
        let entry = &mut self.rails[slice.rail as usize];
        let transport = Transport::of(entry.path, slice.via);
        let counts = entry.books.of(transport);
        if status == Status::Ok {
            let moved = if matches!(slice.request, Request::Get(..) | Request::GetHead(..)) {
                slice.answer.bytes
            } else {
                slice.weight_bytes()
            };
            entry.rail.done(moved, config.is_small(bytes), slice.times.posted_ns, now_ns);
            counts.operations += if let Request::Asks(_, _, count) = slice.request { count.into() } else { 1 };
            counts.bytes += moved;
            if let Some((own, peer)) = nodes {
                counts.own_node.count(own);
                counts.peer_node.count(peer);
            }
            counts.queue.add(slice.times.posted_ns.saturating_sub(slice.times.queued_ns));
            counts.service.add(now_ns.saturating_sub(slice.times.posted_ns));
            self.peers[slice.way.peer as usize].retries.earn();
        }
        if now_ns.saturating_sub(slice.times.begun_ns) < config.slow_ns {
            return;
        }
        counts.slow += 1;
        if self.books.slow.len() == SLOW_KEPT {
            self.books.slow.pop_front();
        }
        self.books.slow.push_back(SlowOperation {
            peer: PeerId(slice.way.peer),
            transport,
            bytes: slice.weight_bytes(),
            begun_ns: slice.times.begun_ns,
            queued_ns: slice.times.queued_ns,
            posted_ns: slice.times.posted_ns,
            sent_ns: if slice.sent_ns < slice.times.posted_ns { now_ns } else { slice.sent_ns },
            done_ns: now_ns,
            attempts: slice.tries.attempts,
            status,
        });
    }
}

/// What a client counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counters {
    /// Frames that no open request wanted any more.
    pub stale_frames: u64,
    /// Slices sent again: after a lost lane, a wrong or busy owner, or a wrong checksum.
    pub retries: u64,
    /// Gets that asked the second owner as the first did not answer.
    pub second_asked: u64,
    /// Gets that asked the second owner as one of two that have the object.
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
