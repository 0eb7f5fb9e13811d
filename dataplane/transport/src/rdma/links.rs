//! All links of a driver and their devices: scheduling, setup and shutdown of links.
//!
//! To end a link, its queue pair is moved to the error state: the device accepts no more requests, from us or from the
//! peer, and flushes the posted ones as completions. After the last completion the queue pair is destroyed, and only
//! then are copies, holds and the end itself reported. The wait for an unresponsive device is bounded: destroying a
//! queue pair ends its requests too.

use core::fmt;
use std::collections::HashMap;

use kvplane_proto::rng::mix64;
use kvplane_proto::{SegmentId, Status};
use kvplane_sys::cpu;
use kvplane_sys::verbs::{RetiredRequest, VerbsError};

use super::arrive::ReceivedMessage;
use super::books::Books;
use super::link::{Link, State};
use super::nic::{EndpointId, Nic};
use super::segments::Segments;
use crate::table::Table;
use crate::turns::Rounds;
use crate::types::{CloseCause, ConnectionId, Event};

const PACKET_NUMBER_BITS: u32 = 24;
/// Timeout for the completions of a closing link, in nanoseconds.
const DRAIN_NS: u64 = 1_000_000_000;
/// Timeout for the device's last-receive event after all completions have arrived, in nanoseconds.
const LAST_RECEIVE_NS: u64 = 20_000_000;

/// Error of a connection attempt.
#[derive(Debug)]
pub enum RdmaError {
    /// No usable device; the text gives the reason.
    NoDevice(String),
    /// All connections of the device are in use; their number.
    Full(usize),
    /// The peer's half is malformed or incompatible.
    Peer(Status, String),
    /// The device reported an error.
    Verbs(VerbsError),
}

impl fmt::Display for RdmaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDevice(why) | Self::Peer(_, why) => f.write_str(why),
            Self::Full(links) => write!(f, "all {links} connections of the device are in use"),
            Self::Verbs(error) => write!(f, "{error}"),
        }
    }
}

impl std::error::Error for RdmaError {}

impl From<VerbsError> for RdmaError {
    fn from(error: VerbsError) -> Self {
        Self::Verbs(error)
    }
}

/// Links of a driver and their devices.
pub(super) struct Links {
    pub(super) nics: Vec<Nic>,
    pub(super) table: Table<Box<Link>>,
    pub(super) rounds: Rounds,
    pub(super) books: Books,
    /// Links that wait for resources held by other links of their device.
    starved: Vec<u32>,
    /// Links that end when their device holds none of their requests any more.
    closing: Vec<u32>,
    /// Retired requests and received messages of the completions that are being handled.
    pub(super) retired: Vec<(u32, RetiredRequest)>,
    pub(super) received: Vec<ReceivedMessage>,
    /// Number of links created so far.
    made: u64,
}

impl Links {
    pub(super) fn new() -> Self {
        Self {
            nics: Vec::new(),
            table: Table::new(),
            rounds: Rounds::new(),
            books: Books::default(),
            starved: Vec::new(),
            closing: Vec::new(),
            retired: Vec::new(),
            received: Vec::new(),
            made: 0,
        }
    }

    /// Returns a link, its device, and the shared state.
    #[inline]
    pub(super) fn parts(&mut self, id: ConnectionId) -> Option<(&mut Link, &mut Nic, &mut Books)> {
        let link = &mut **self.table.get_mut(id)?;
        let nic = &mut self.nics[link.nic as usize];
        Some((link, nic, &mut self.books))
    }

    /// Returns the parts of a link if it is open, see [`Self::parts`].
    #[inline]
    pub(super) fn open_parts(&mut self, id: ConnectionId) -> Option<(&mut Link, &mut Nic, &mut Books)> {
        self.parts(id).filter(|(link, _, _)| link.state == State::Open)
    }

    /// Returns true if there is work that does not wait for an event.
    pub(super) fn has_work(&self) -> bool {
        !self.books.events.is_empty()
            || !self.books.copied.is_empty()
            || !self.rounds.ready.is_empty()
            || !self.rounds.dirty.is_empty()
            || !self.rounds.again.is_empty()
    }

    /// Returns true if a closing link waits for a device, which does not signal the poller.
    pub(super) const fn is_closing(&self) -> bool {
        !self.closing.is_empty()
    }

    /// Creates a link with an unconnected queue pair: grants `grant` receives and reserves `send_depth` requests.
    pub(super) fn add(
        &mut self,
        nic: usize,
        grant: u16,
        send_depth: u32,
        segments: &mut Segments,
    ) -> Result<ConnectionId, RdmaError> {
        let nic_index = nic;
        let Some(nic) = self.nics.get(nic_index) else {
            return Err(RdmaError::NoDevice(format!("there is no RDMA device {nic_index}")));
        };
        if let Some(why) = nic.obstacle() {
            return Err(RdmaError::NoDevice(why));
        }
        if !nic.receives.can_grant(grant) || nic.endpoints.len() >= nic.endpoints.capacity() {
            self.evict(nic_index, segments);
        }
        let nic = &mut self.nics[nic_index];
        let full = RdmaError::Full(nic.links.len());
        if !nic.receives.can_grant(grant) {
            return Err(full);
        }
        let endpoint = nic.endpoints.insert().ok_or(full)?;
        let made = nic.queue_pair(send_depth).inspect_err(|_| {
            nic.endpoints.remove(endpoint);
        })?;
        nic.receives.grant(grant);
        let qp_num = made.qp_num();
        self.made += 1;
        let random = mix64(cpu::monotonic_ns() ^ mix64(self.made));
        let mut link = Link::new(nic_index as u32, endpoint, made, send_depth as usize);
        link.grant = grant;
        link.path.packet_number = random as u32 & ((1 << PACKET_NUMBER_BITS) - 1);
        let id = self.table.insert(Box::new(link));
        self.nics[nic_index].links.insert(qp_num, id.index);
        Ok(id)
    }

    /// Returns the number of links created so far.
    pub(super) const fn made(&self) -> u64 {
        self.made
    }

    /// Makes room on a device: closes the least recently used idle connection, if any.
    fn evict(&mut self, nic: usize, segments: &mut Segments) {
        let links = &self.table;
        let by_endpoint: HashMap<u32, u32> =
            self.nics[nic].links.values().filter_map(|&index| Some((links.at(index)?.endpoint.index, index))).collect();
        let idle = |id: EndpointId| {
            let link = by_endpoint.get(&id.index).and_then(|index| links.at(*index));
            link.is_some_and(|link| link.is_idle())
        };
        let victim = self.nics[nic].endpoints.victim(idle);
        let Some(&index) = victim.and_then(|victim| by_endpoint.get(&victim.index)) else { return };
        self.books.counters.evictions += 1;
        self.give_up(index, segments);
    }

    /// Ends a link at once, to make room for another; none of our requests is in flight on it.
    pub(super) fn give_up(&mut self, index: u32, segments: &mut Segments) {
        let Some(link) = self.table.at_mut(index) else { return };
        let nic = link.nic as usize;
        link.fail(CloseCause::Closed);
        // Completions that have just arrived are all that is left to handle.
        self.take_completions(nic, segments);
        self.finish(index);
    }

    /// Removes a link that was never reported to the host.
    pub(super) fn drop_unused(&mut self, id: ConnectionId) {
        self.finish(id.index);
        self.books.events.retain(|event| !matches!(event, Event::Gone(gone, _) if *gone == id));
        self.table.free(id);
    }

    /// Closes a connection. [`Event::Gone`] follows when the device holds none of its requests any more.
    pub(super) fn close(&mut self, id: ConnectionId, why: CloseCause) {
        let Some((link, _, _)) = self.parts(id) else { return };
        if link.state == State::Closing {
            return;
        }
        if link.fail(why) {
            self.closing.push(id.index);
        } else {
            self.finish(id.index);
        }
    }

    /// Closes all connections of a device.
    pub(super) fn close_all(&mut self, nic: usize, why: &str) {
        let links: Vec<u32> = self.nics[nic].links.values().copied().collect();
        for index in links {
            self.close(self.table.id_at(index), CloseCause::Rdma(why.to_owned()));
        }
    }

    /// Finishes closing links whose requests have all been flushed. Returns true if any was finished.
    pub(super) fn finish_closing(&mut self, now_ns: u64) -> bool {
        let closing = core::mem::take(&mut self.closing);
        let before = closing.len();
        for index in closing {
            let Some(link) = self.table.at_mut(index) else { continue };
            let since_ns = *link.shutdown.since_ns.get_or_insert(now_ns);
            let nic = &self.nics[link.nic as usize];
            let waited_ns = now_ns.saturating_sub(since_ns);
            let given_back = link.sends.queue_pair.outstanding() == 0;
            // Destroying the queue pair discards its completions, including those of receives that other links need.
            let drained = given_back
                && nic.completions.is_emptied()
                && (link.shutdown.last_receive || waited_ns >= LAST_RECEIVE_NS);
            if drained || waited_ns >= DRAIN_NS || nic.failed.is_some() && given_back {
                self.finish(index);
            } else {
                self.closing.push(index);
            }
        }
        self.closing.len() != before
    }

    /// Destroys the queue pair and reports everything that it held.
    fn finish(&mut self, index: u32) {
        let Some(link) = self.table.take_if(index, |_| true) else { return };
        let id = self.table.id_at(index);
        let nic = &mut self.nics[link.nic as usize];
        nic.links.remove(&link.sends.queue_pair.qp_num());
        for spare in link.foreign.iter().flat_map(|foreign| &foreign.spares) {
            nic.links.remove(&spare.qp_num());
        }
        nic.endpoints.remove(link.endpoint);
        nic.receives.revoke(link.grant);
        link.end(id, nic, &mut self.books);
        self.wake_starved();
    }

    /// Posts everything that can be posted: one doorbell for each connection.
    pub(super) fn flush(&mut self) {
        for _ in 0..self.rounds.dirty.len() {
            let Some(index) = self.rounds.dirty.pop() else { break };
            let id = self.table.id_at(index);
            let Some((link, nic, books)) = self.parts(id) else { continue };
            match link.transmit(id, nic, books) {
                Ok(starved) => {
                    let ready = link.has_input();
                    let over = if link.is_sent() { link.shutdown.after_send.take() } else { None };
                    if starved {
                        self.starved.push(index);
                    }
                    if ready {
                        self.rounds.ready.mark(index);
                    }
                    if let Some(why) = over {
                        self.close(id, why);
                    }
                }
                Err(why) => self.close(id, why),
            }
        }
        for nic in &mut self.nics {
            nic.post_receives();
        }
        while let Some(index) = self.rounds.again.pop() {
            if self.table.at(index).is_some() {
                self.rounds.ready.mark(index);
            }
        }
        self.wake_starved();
    }

    /// Wakes the links that waited for resources of their device.
    fn wake_starved(&mut self) {
        for index in core::mem::take(&mut self.starved) {
            let Some(link) = self.table.at(index) else { continue };
            let arena = &self.nics[link.nic as usize].arena;
            if arena.has_slot() && arena.has_bounce() {
                self.rounds.dirty.mark(index);
            } else {
                self.starved.push(index);
            }
        }
    }

    /// Notifies the peers that have the key of our segment that it is gone.
    pub(super) fn retract(&mut self, segment: SegmentId) {
        for (id, link) in self.table.iter_mut() {
            if link.retract(segment) {
                self.rounds.dirty.mark(id.index);
            }
        }
    }
}
