//! RDMA: frames by messages, payloads by writes and reads of the device, segments without their owner's help.
//!
//! A *link* is one reliable connection between a port of ours and one of the peer's. It carries the same frames as a
//! stream. A frame travels in messages, for which each side keeps receives that the other has *credits* for. A short
//! payload comes along. A long one that answers a request is written to where the request offered memory, before the
//! answer, which the connection's order keeps behind it; any other is read by whoever wants it. Segments are read and
//! written by the asking side alone, once it has their key.
//!
//! Connections are set up by two messages that the host carries over another channel ([`Rdma::offer`],
//! [`Rdma::accept`], [`Rdma::complete`]); it also closes the link when that channel says that the peer is gone.
//!
//! The host calls [`Rdma::poll`] in each round, then takes [`Rdma::poll_event`] and [`Rdma::take_copied`], then for
//! each connection of [`Rdma::next_ready`] takes [`Rdma::input`] until it says `Wait`, and at last [`Rdma::flush`].
//! Before it parks it calls [`Rdma::prepare_sleep`].
//!
//! Invariants: a device touches only memory that is registered with it, and registrations live as long as requests on
//! them. What a connection was lent is given back only when the device holds nothing of it any more, and so is its end
//! reported. Trust: a peer that is told a key may use it as long as the registration lives; keys are told for published
//! segments and for single payloads.
//!
//! Thread affinity: none; one thread at a time. Nothing blocks except registering memory.

mod arrive;
mod copies;
mod credits;
mod end;
mod ended;
mod endpoints;
mod foreign;
mod foreign_peer;
mod idle;
mod input;
mod link;
mod memory;
mod mixing;
mod nic;
mod offer;
mod pieces;
mod pull;
mod send;
mod setup;
mod wire;

use core::fmt;
use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;

use kvplane_proto::frame::Header;
use kvplane_proto::{RequestId, SegmentId, Status};
use kvplane_sys::verbs::{Device, VerbsError};
use kvplane_sys::{Poller, Region};

use crate::token::{Source, Token};
use crate::types::{ConnectionId, Event, OutgoingPayload, Pieces};
pub use copies::RdmaCopy;
use copies::Segment;
use credits::GRANT_LEAST;
pub use ended::{CopyCompletion, CopyCompletions};
pub use foreign::{FOREIGN_QUEUE_PAIRS, ForeignDevice, ForeignHalf};
pub use foreign_peer::{ForeignBuffer, ForeignPeer};
use link::{Frame, Link, State};
use nic::Nic;
use offer::MESSAGE_BYTES_LEAST;
use wire::{EAGER_BYTES, OFFERS, Place};

/// At the latest every so many requests one is announced by the device; the last of each flush is.
const SIGNAL_EVERY: u32 = 32;
/// Completions of one lot.
const LOT: usize = nic::POLLED;
/// Records kept for their memory, and the longest of them.
const SPARES: usize = 16;
const SPARE_BYTES: usize = 16 << 10;

/// Settings of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RdmaOptions {
    /// Connections of one device.
    pub endpoints: u32,
    /// Receives of one device, which its connections share.
    pub receives: u32,
    /// Receives that one connection is granted.
    pub grant: u16,
    /// Length of a receive, and of the longest message.
    pub message_bytes: u32,
    /// Messages of one device that may be on their way.
    pub send_slots: u32,
    /// Requests of one connection that may be under way.
    pub send_depth: u32,
    /// Regions of memory that are registered with one device, beside published segments. The bytes of others are
    /// copied through buffers.
    pub regions: u32,
    /// An idle connection's peer is asked for a sign of life after so long, and again after as long.
    pub keepalive_ns: u64,
}

impl Default for RdmaOptions {
    fn default() -> Self {
        Self {
            endpoints: 64,
            receives: 1024,
            grant: 16,
            message_bytes: 8192,
            send_slots: 128,
            send_depth: 128,
            regions: 65_536,
            keepalive_ns: 10_000_000_000,
        }
    }
}

/// What the driver counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RdmaCounters {
    /// Messages sent.
    pub messages: u64,
    /// Requests handed to devices, messages among them.
    pub requests: u64,
    /// Times that requests were handed over.
    pub doorbells: u64,
    /// Completions of requests that devices announced: of one, and all before it on its connection.
    pub signalled: u64,
    /// Payload bytes written to where peers wanted their answers.
    pub pushed_bytes: u64,
    /// Payload bytes that went through bounce buffers.
    pub bounced_bytes: u64,
    /// Connections given up for others.
    pub evictions: u64,
    /// Times that the peer of an idle connection was asked for a sign of life.
    pub keepalives: u64,
}

/// Why there is no connection.
#[derive(Debug)]
pub enum RdmaError {
    /// There is no device that could be used: says why.
    NoDevice(String),
    /// As many connections as there may be are in use.
    Full(usize),
    /// The peer's half is not one, or does not fit.
    Peer(Status, String),
    /// The device refused.
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

/// What all links write to.
#[derive(Default)]
struct Books {
    events: VecDeque<Event>,
    copied: CopyCompletions,
    counters: RdmaCounters,
    problem: Option<String>,
    /// A message, for the moment.
    message: Vec<u8>,
    spares: Vec<Vec<u8>>,
}

impl Books {
    fn take_spare(&mut self) -> Vec<u8> {
        self.spares.pop().unwrap_or_default()
    }

    fn spare(&mut self, mut bytes: Vec<u8>) {
        if self.spares.len() < SPARES && bytes.capacity() <= SPARE_BYTES {
            bytes.clear();
            self.spares.push(bytes);
        }
    }
}

/// All RDMA devices and connections of one host.
pub struct Rdma {
    options: RdmaOptions,
    nics: Vec<Nic>,
    links: Vec<Option<Box<Link>>>,
    generations: Vec<u32>,
    free: Vec<u32>,
    ready: VecDeque<u32>,
    dirty: VecDeque<u32>,
    /// Links with more input than their share of this round.
    again: Vec<u32>,
    /// Links that wait for what others of their device have.
    starved: Vec<u32>,
    closing: Vec<u32>,
    segments: HashMap<SegmentId, Segment>,
    books: Books,
    retired: Vec<(u32, kvplane_sys::verbs::RetiredRequest)>,
    received: Vec<(Option<u32>, u32, u32, kvplane_sys::verbs::Status)>,
    /// The poller said that a device has something to tell.
    told: bool,
    open: usize,
    counter: u64,
    now_ns: u64,
    /// Of the devices, how many of the first peers are given.
    preferred: usize,
    /// When idle connections are looked at again.
    look_ns: u64,
}

impl Rdma {
    /// A driver without devices. Settings below what works are raised to it.
    #[must_use]
    pub fn new(options: RdmaOptions) -> Self {
        let options = RdmaOptions {
            grant: options.grant.max(GRANT_LEAST),
            message_bytes: options.message_bytes.max(MESSAGE_BYTES_LEAST),
            send_slots: options.send_slots.max(1),
            send_depth: options.send_depth.max(64),
            ..options
        };
        Self {
            options,
            nics: Vec::new(),
            links: Vec::new(),
            generations: Vec::new(),
            free: Vec::new(),
            ready: VecDeque::new(),
            dirty: VecDeque::new(),
            again: Vec::new(),
            starved: Vec::new(),
            closing: Vec::new(),
            segments: HashMap::new(),
            books: Books::default(),
            retired: Vec::new(),
            received: Vec::new(),
            told: false,
            open: 0,
            counter: 0,
            now_ns: 0,
            preferred: 0,
            look_ns: 0,
        }
    }

    /// Opens a device; returns its position. Pins the memory of its messages.
    ///
    /// # Errors
    /// When it cannot be opened, or its memory cannot be pinned: says why and what to do. A port that is down is not an
    /// error: it may come up.
    pub fn add_device(&mut self, poller: &Poller, device: &Device) -> Result<usize, RdmaError> {
        let nic = Nic::open(device, &self.options)?;
        let index = self.nics.len();
        nic.watch(poller, index as u32).map_err(|error| RdmaError::NoDevice(format!("{}: {error}", device.name())))?;
        self.nics.push(nic);
        Ok(index)
    }

    /// The devices, by position: name, bits per second (0 when down or not known), and why it cannot be used, if so.
    pub fn devices(&self) -> impl Iterator<Item = (&str, u64, Option<String>)> {
        self.nics.iter().map(|nic| {
            let speed = nic.port.as_ref().map_or(0, |(port, _)| port.bits_per_second);
            (nic.context.name(), speed, nic.obstacle())
        })
    }

    /// The names of the devices, by position.
    pub fn device_names(&self) -> impl Iterator<Item = &str> {
        self.nics.iter().map(|nic| nic.context.name())
    }

    /// The device of a connection by position, and the speed of the slower of its two ports in bits per second.
    #[must_use]
    pub fn rail(&self, id: ConnectionId) -> Option<(usize, u64)> {
        let link = self.links.get(id.index as usize)?.as_deref()?;
        (self.generations[id.index as usize] == id.generation).then_some((link.nic as usize, link.bits_per_second))
    }

    /// Takes an event of one of this driver's descriptors.
    pub fn ready(&mut self, token: Token) {
        let Some(nic) = self.nics.get_mut(token.index as usize) else { return };
        if token.source == Source::RdmaEvents {
            self.told = true;
            return;
        }
        // The queue itself is polled in each round anyway.
        while let Ok(Some(_)) = nic.channel.take() {}
    }

    /// The next thing that happened. A connection counts, and its position is not another's, until its end was taken
    /// here.
    pub fn poll_event(&mut self) -> Option<Event> {
        let event = self.books.events.pop_front();
        if let Some(Event::Gone(id, _)) = &event {
            self.free.push(id.index);
            self.open -= 1;
        }
        event
    }

    /// Whether there is something to do before anything else happens.
    #[must_use]
    pub fn has_work(&self) -> bool {
        !self.books.events.is_empty()
            || !self.books.copied.is_empty()
            || !self.ready.is_empty()
            || !self.dirty.is_empty()
            || !self.again.is_empty()
    }

    /// Whether a device is waited for that rings no bell: the host must not park for long.
    #[must_use]
    pub const fn is_closing(&self) -> bool {
        !self.closing.is_empty()
    }

    /// A connection that may have input; each is named once until something arrives.
    pub fn next_ready(&mut self) -> Option<ConnectionId> {
        while let Some(index) = self.ready.pop_front() {
            if let Some(link) = self.links[index as usize].as_deref_mut() {
                link.ready = false;
                return Some(ConnectionId { index, generation: self.generations[index as usize] });
            }
        }
        None
    }

    /// Names a connection again in the next round: it has more input than its share of this one.
    pub fn ready_again(&mut self, id: ConnectionId) {
        self.again.push(id.index);
    }

    /// Offers memory for the answer to a request that the next [`Self::send`] on this connection carries. Without
    /// effect where that is of no use: the payload is then fetched.
    pub fn expect_answer(&mut self, id: ConnectionId, request: RequestId, pieces: Pieces) {
        let Some((link, nic, _)) = self.parts(id) else { return };
        let buffers = pieces.as_slice();
        let short = pieces.bytes() <= EAGER_BYTES || link.offering.len() + buffers.len() > OFFERS;
        let usable = |buffer: &kvplane_sys::IoBuf| buffer.region().writable() && nic.memory.ensure(buffer.region());
        if link.state != State::Open || short || buffers.len() > wire::SOURCES || !buffers.iter().all(usable) {
            return;
        }
        for buffer in buffers.iter().filter(|buffer| !buffer.is_empty()) {
            let Some(memory) = nic.memory.get(buffer.region()) else { continue };
            let address = buffer.region().address() + buffer.offset() as u64;
            let (bytes, key) = (buffer.bytes() as u64, memory.remote_key());
            link.offering.push(Place { request, address, bytes, key });
        }
        link.offered.insert(request, pieces);
    }

    /// Queues a frame. It leaves with the next [`Self::flush`]. False when the connection is gone; the payload's hold
    /// is then reported as sent.
    pub fn send(&mut self, id: ConnectionId, header: &Header, body: &[u8], payload: Option<OutgoingPayload>) -> bool {
        let Some((link, nic, books)) = self.parts(id).filter(|(link, _, _)| link.state == State::Open) else {
            let hold = payload.and_then(|payload| payload.hold);
            self.books.events.extend(hold.map(Event::Sent));
            return false;
        };
        nic.endpoints.touch(link.endpoint);
        let mut kept = books.take_spare();
        kept.extend_from_slice(body);
        let offers = core::mem::take(&mut link.offering);
        let frame = Frame { header: *header, body: kept, payload, offers };
        link.extra_pieces += frame.extra_pieces();
        link.frames.push_back(frame);
        if link.asks {
            link.awaited += u64::from(header.replies());
        }
        self.mark_dirty(id.index);
        true
    }

    /// Hands everything that can go to the devices: one doorbell for each connection.
    pub fn flush(&mut self) {
        for _ in 0..self.dirty.len() {
            let Some(index) = self.dirty.pop_front() else { break };
            let id = ConnectionId { index, generation: self.generations[index as usize] };
            let Some((link, nic, books)) = self.parts(id) else { continue };
            link.dirty = false;
            match link.transmit(id, nic, books) {
                Ok(starved) => {
                    let resumes = link.paused && link.backlog() < kvplane_proto::Limits::REPLIES_QUEUED / 2;
                    link.paused &= !resumes;
                    let ready = resumes || matches!(link.expect, link::Expect::Done(_));
                    let sent = link.is_sent() && link.queue_pair.outstanding() == 0;
                    let over = if sent { link.closing_after_send.take() } else { None };
                    if starved {
                        self.starved.push(index);
                    }
                    if ready {
                        self.mark_ready(index);
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
        while let Some(index) = self.again.pop() {
            self.mark_ready(index);
        }
        self.wake_starved();
    }

    /// Asks the devices to wake the poller with the next completion. False when something is there already: then the
    /// host does not park.
    ///
    /// # Errors
    /// When a device is gone.
    pub fn prepare_sleep(&mut self) -> io::Result<bool> {
        for nic in self.nics.iter().filter(|nic| nic.failed.is_none()) {
            nic.queue.arm().map_err(|error| io::Error::other(error.to_string()))?;
        }
        let mut progress = false;
        for nic in 0..self.nics.len() {
            progress |= self.take_completions(nic);
        }
        Ok(!progress && !self.has_work())
    }

    /// Lets go of memory that is not used any more: it is unpinned.
    pub fn forget(&mut self, region: &Arc<Region>) {
        self.nics.iter_mut().for_each(|nic| nic.memory.forget(region));
    }

    /// Why memory could not be registered, once.
    pub fn take_problem(&mut self) -> Option<String> {
        let refused = self.nics.iter_mut().find_map(|nic| nic.memory.take_problem());
        refused.or_else(|| self.books.problem.take())
    }

    /// What happened so far.
    #[must_use]
    pub const fn counters(&self) -> &RdmaCounters {
        &self.books.counters
    }

    /// Connections whose end was not taken yet.
    #[must_use]
    pub const fn open(&self) -> usize {
        self.open
    }

    /// A link, its device, and the books.
    fn parts(&mut self, id: ConnectionId) -> Option<(&mut Link, &mut Nic, &mut Books)> {
        if self.generations.get(id.index as usize) != Some(&id.generation) {
            return None;
        }
        let link = self.links[id.index as usize].as_deref_mut()?;
        let nic = &mut self.nics[link.nic as usize];
        Some((link, nic, &mut self.books))
    }

    fn mark_ready(&mut self, index: u32) {
        if let Some(link) = self.links[index as usize].as_deref_mut()
            && !core::mem::replace(&mut link.ready, true)
        {
            self.ready.push_back(index);
        }
    }

    fn mark_dirty(&mut self, index: u32) {
        if let Some(link) = self.links[index as usize].as_deref_mut()
            && !core::mem::replace(&mut link.dirty, true)
        {
            self.dirty.push_back(index);
        }
    }

    /// Those that waited may find now what they lacked.
    fn wake_starved(&mut self) {
        for index in core::mem::take(&mut self.starved) {
            let Some(link) = self.links[index as usize].as_deref() else { continue };
            let nic = &self.nics[link.nic as usize];
            if nic.has_slot() && nic.has_bounce() {
                self.mark_dirty(index);
            } else {
                self.starved.push(index);
            }
        }
    }
}

impl fmt::Debug for Rdma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rdma({} devices, {} links)", self.nics.len(), self.open)
    }
}
