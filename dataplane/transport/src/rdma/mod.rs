//! RDMA driver: frames in messages, payloads by RDMA write and read, one-sided access to segments.
//!
//! A *link* is one reliable connection between a port of ours and one of the peer's. It carries the same frames as a
//! stream. A frame travels in messages; each side posts receives for which the other holds *credits*. A short payload
//! is part of the message. A long payload that answers a request is written into the memory that the request offered,
//! before the answer, which the connection's ordering keeps behind it; any other long payload is read by its receiver.
//! Segments are read and written one-sided by the client, once it has their key.
//!
//! A connection is set up by two messages that the host carries over another channel ([`Rdma::offer`],
//! [`Rdma::accept`], [`Rdma::complete`]); the host also closes the link when that channel reports that the peer is
//! gone.
//!
//! The host calls [`Rdma::poll`] in each round, then takes [`Rdma::poll_event`] and [`Rdma::take_copied`], then for
//! each connection of [`Rdma::next_ready`] takes [`Rdma::input`] until it returns `Wait`, and at last calls
//! [`Rdma::flush`]. Before it parks it calls [`Rdma::prepare_sleep`].
//!
//! Invariants: a device accesses only memory that is registered with it, and a registration lives as long as requests
//! on it. Memory lent to a connection is returned, and the end of the connection reported, only when the device holds
//! none of its requests any more. Trust: a peer that has a key may use it as long as the registration lives; peers get
//! keys of published segments and of single payloads.
//!
//! Thread affinity: none; one thread at a time. No call blocks except for the registration of memory.

mod arrive;
mod books;
pub mod device_memory;
mod ended;
mod foreign;
mod foreign_peer;
mod idle;
mod link;
mod links;
mod mixing;
mod nic;
mod options;
mod pieces;
mod segments;
mod setup;
mod wire;
mod work;

use core::fmt;
use std::io;
use std::sync::Arc;

use kvplane_proto::frame::Header;
use kvplane_proto::{RequestId, SegmentId, Status};
use kvplane_sys::device::Backing;
use kvplane_sys::verbs::Device;
use kvplane_sys::{Poller, Region};

use crate::token::{Source, Token};
use crate::types::{CloseCause, ConnectionId, Event, Input, OutgoingPayload, Pieces, Target};
pub use books::RdmaCounters;
pub use device_memory::DeviceRegistration;
pub use ended::{CopyCompletion, CopyCompletions};
pub use foreign::{FOREIGN_QUEUE_PAIRS, ForeignDevice, ForeignHalf};
pub use foreign_peer::{ForeignBuffer, ForeignPeer};
use idle::IdleWatch;
pub use link::RdmaCopy;
use link::{Frame, GRANT_LEAST, Next, State};
use links::Links;
pub use links::RdmaError;
use nic::Nic;
pub use nic::{ObstacleKind, RegistrationObstacle, RegistrationPath};
pub use options::RdmaOptions;
use segments::Segments;
use setup::MESSAGE_BYTES_LEAST;
pub use setup::{answer_status, refusal};

/// Size from which each device registers a region on a thread of its own.
const ALONE_BYTES: usize = 256 << 20;

/// All RDMA devices and connections of one host.
pub struct Rdma {
    options: RdmaOptions,
    links: Links,
    /// Our published segments, which peers access one-sided.
    segments: Segments,
    idle: IdleWatch,
    /// True if the poller reported an event of a device.
    told: bool,
    /// Number of devices, from the first, that are preferred for connections of peers; 0: all.
    preferred: usize,
}

impl Rdma {
    /// Creates a driver without devices. Settings below the working minimum are raised to it.
    #[must_use]
    pub fn new(options: RdmaOptions) -> Self {
        let options = options.raised(GRANT_LEAST, MESSAGE_BYTES_LEAST);
        Self {
            options,
            links: Links::new(),
            segments: Segments::default(),
            idle: IdleWatch::new(options.keepalive_ns),
            told: false,
            preferred: 0,
        }
    }

    /// Opens a device and returns its position. Registers (pins) the memory of its messages.
    ///
    /// # Errors
    /// When the device cannot be opened or its memory cannot be registered: names the reason and the next step. A port
    /// that is down is not an error: it may come up.
    pub fn add_device(&mut self, poller: &Poller, device: &Device) -> Result<usize, RdmaError> {
        let nic = Nic::open(device, &self.options)?;
        let index = self.links.nics.len();
        nic.watch(poller, index as u32).map_err(|error| RdmaError::NoDevice(format!("{}: {error}", device.name())))?;
        self.links.nics.push(nic);
        Ok(index)
    }

    /// Returns the devices, by position: name, bits per second (0 if down or unknown), and why the device is unusable,
    /// if it is.
    pub fn devices(&self) -> impl Iterator<Item = (&str, u64, Option<String>)> {
        self.links.nics.iter().map(|nic| {
            let speed = nic.port.as_ref().map_or(0, |(port, _)| port.bits_per_second);
            (nic.context.name(), speed, nic.obstacle())
        })
    }

    /// Returns the names of the devices, by position.
    pub fn device_names(&self) -> impl Iterator<Item = &str> {
        self.links.nics.iter().map(|nic| nic.context.name())
    }

    /// Prefers the first `devices` devices for connections of peers, as long as one of those reaches the peer. 0: any.
    pub const fn prefer(&mut self, devices: usize) {
        self.preferred = devices;
    }

    /// Returns the device of a connection, by position, and the bandwidth of its slower port in bits per second.
    #[must_use]
    pub fn rail(&self, id: ConnectionId) -> Option<(usize, u64)> {
        let link = self.links.table.get(id)?;
        Some((link.nic as usize, link.path.bits_per_second))
    }

    /// Handles a readiness event of one of this driver's descriptors.
    pub fn ready(&mut self, token: Token) {
        let Some(nic) = self.links.nics.get(token.index as usize) else { return };
        if token.source == Source::RdmaEvents {
            self.told = true;
            return;
        }
        nic.completions.hear();
    }

    /// Handles events and completions of the devices. Returns true if there were any.
    pub fn poll(&mut self, now_ns: u64) -> bool {
        let mut progress = false;
        let told = core::mem::take(&mut self.told);
        for nic in 0..self.links.nics.len() {
            if told || self.links.is_closing() || self.links.nics[nic].failed.is_some() {
                self.links.take_events(nic);
            }
            progress |= self.links.take_completions(nic, &mut self.segments);
        }
        progress |= self.links.finish_closing(now_ns);
        self.idle.look(&mut self.links, self.preferred, now_ns);
        progress
    }

    /// Returns the next event. A connection counts as open, and its index is not reused, until its [`Event::Gone`] has
    /// been returned here.
    pub fn poll_event(&mut self) -> Option<Event> {
        let event = self.links.books.events.pop_front();
        if let Some(Event::Gone(id, _)) = &event {
            self.links.table.free(*id);
        }
        event
    }

    /// Returns true if there is work that does not wait for an event.
    #[must_use]
    pub fn has_work(&self) -> bool {
        self.links.has_work()
    }

    /// Returns true if a closing link waits for a device, which does not signal the poller: the host must not park for
    /// long.
    #[must_use]
    pub const fn is_closing(&self) -> bool {
        self.links.is_closing()
    }

    /// Returns a connection that may have input; each is returned once until new input arrives.
    #[inline]
    pub fn next_ready(&mut self) -> Option<ConnectionId> {
        while let Some(index) = self.links.rounds.ready.pop() {
            if self.links.table.at(index).is_some() {
                return Some(self.links.table.id_at(index));
            }
        }
        None
    }

    /// Marks a connection ready for the next round: it has more input than its budget of this one.
    pub fn ready_again(&mut self, id: ConnectionId) {
        self.links.rounds.again.push(id.index);
    }

    /// Returns the next input of a connection. The body of a frame replaces `scratch`. After a frame with a payload,
    /// the host calls [`Self::receive_payload`] before it calls this again.
    pub fn input(&mut self, id: ConnectionId, scratch: &mut Vec<u8>) -> Input {
        let Some((link, nic, books)) = self.links.open_parts(id) else { return Input::Wait };
        if link.shutdown.after_send.is_some() {
            return Input::Wait;
        }
        match link.next_input() {
            Next::Frame => {}
            Next::Payload(checksum) => return Input::Payload(checksum),
            Next::Wait => return Input::Wait,
        }
        let taken = link.take_frame(nic, books, scratch);
        // Receives were reposted; credits may be due.
        self.links.rounds.dirty.mark(id.index);
        match taken {
            Ok(Some(header)) => Input::Frame(header),
            Ok(None) => Input::Wait,
            Err(why) => {
                self.close(id, why);
                Input::Wait
            }
        }
    }

    /// Sets the destination of the payload of the last frame. [`Self::input`] then delivers it.
    ///
    /// # Panics
    /// When no payload is expected or the memory does not have its length.
    pub fn receive_payload(&mut self, id: ConnectionId, target: Target) {
        let Some((link, _, _)) = self.links.parts(id) else { return };
        if link.intake.place_payload(target) {
            self.links.rounds.dirty.mark(id.index);
        }
        self.links.rounds.ready.mark(id.index);
    }

    /// Offers memory for the answer to a request that the next [`Self::send`] on this connection carries. Has no effect
    /// where a direct write brings no benefit: the payload is then fetched.
    pub fn expect_answer(&mut self, id: ConnectionId, request: RequestId, pieces: Pieces) {
        if let Some((link, nic, _)) = self.links.open_parts(id) {
            link.places.offer(request, pieces, nic);
        }
    }

    /// Queues a frame, which the next [`Self::flush`] sends. Returns false if the connection is gone; the payload's
    /// hold is then reported by [`Event::Sent`].
    pub fn send(&mut self, id: ConnectionId, header: &Header, body: &[u8], payload: Option<OutgoingPayload>) -> bool {
        let Some((link, nic, books)) = self.links.open_parts(id) else {
            let hold = payload.and_then(|payload| payload.hold);
            self.links.books.events.extend(hold.map(Event::Sent));
            return false;
        };
        nic.endpoints.touch(link.endpoint);
        let mut kept = books.take_spare();
        kept.extend_from_slice(body);
        let offers = link.places.take_offers();
        link.push(Frame { header: *header, body: kept, payload, offers });
        self.links.rounds.dirty.mark(id.index);
        true
    }

    /// Posts everything that can be posted: one doorbell for each connection.
    pub fn flush(&mut self) {
        self.links.flush();
    }

    /// Arms the devices to wake the poller with the next completion. Returns false if a completion has arrived already:
    /// the host must not park then.
    ///
    /// # Errors
    /// When a device is gone.
    pub fn prepare_sleep(&mut self) -> io::Result<bool> {
        for nic in self.links.nics.iter().filter(|nic| nic.failed.is_none()) {
            nic.completions.arm()?;
        }
        let mut progress = false;
        for nic in 0..self.links.nics.len() {
            progress |= self.links.take_completions(nic, &mut self.segments);
        }
        Ok(!progress && !self.has_work())
    }

    /// Deregisters (unpins) memory that is not used any more.
    pub fn forget(&mut self, region: &Arc<Region>) {
        self.links.nics.iter_mut().for_each(|nic| nic.memory.forget(region));
    }

    /// Registers memory with all devices now instead of at its first use.
    ///
    /// A large region is registered by one thread per device, because pinning takes long.
    pub fn register(&mut self, region: &Arc<Region>) {
        let (first, others) = match &mut self.links.nics[..] {
            [] => return,
            [first, others @ ..] if region.bytes() >= ALONE_BYTES => (first, others),
            nics => return nics.iter_mut().for_each(|nic| _ = nic.memory.ensure(region)),
        };
        std::thread::scope(|scope| {
            for nic in others {
                let memory = &mut nic.memory;
                let builder = std::thread::Builder::new().name("kvp-register".to_owned());
                // If no thread can be spawned, the region is registered at its first use.
                let _ = builder.spawn_scoped(scope, move || memory.ensure(region));
            }
            first.memory.ensure(region);
        });
    }

    /// Publishes memory for one-sided access by peers. Registers it with each device now, which takes as long as
    /// pinning; over a device that refuses, peers use frames.
    pub fn publish(&mut self, segment: SegmentId, memory: &Backing, bytes: u64, writable: bool) {
        self.segments.publish(segment, memory, bytes, writable, &mut self.links.nics);
    }

    /// Revokes peers' access to a segment: when this returns, no device grants access any more. Peers that have its key
    /// are notified by a message, so that they do not run into errors.
    pub fn retract(&mut self, segment: SegmentId) {
        if self.segments.retract(segment) {
            self.links.retract(segment);
        }
    }

    /// Copies between our memory and ranges of a peer's segments. The outcomes are returned by [`Self::take_copied`]:
    /// `Unsupported` means that the peer or our device cannot access the memory in this way; `Unreachable`, that the
    /// connection ended first, so the outcome is unknown. A run of copies costs much less than each alone.
    pub fn copy_many<'a>(&mut self, id: ConnectionId, copies: impl IntoIterator<Item = RdmaCopy<'a>>) {
        let mut copies = copies.into_iter();
        if let Some(first) = copies.next() {
            self.copy_all(id, first, copies);
        }
    }

    /// Copies `first` and then `copies`, see [`Self::copy_many`].
    #[inline]
    pub fn copy_all<'a>(
        &mut self,
        id: ConnectionId,
        first: RdmaCopy<'a>,
        mut copies: impl Iterator<Item = RdmaCopy<'a>>,
    ) {
        let Some((link, nic, books)) = self.links.open_parts(id) else {
            let all = core::iter::once(first).chain(copies);
            all.for_each(|copy| self.links.books.copied.push(id, copy.token, Err(Status::Unreachable)));
            return;
        };
        let mut failed = None;
        let mut next = Some(first);
        while let Some(copy) = next {
            let (posted, left) = link.copies.post_run(copy, &mut copies, &mut link.sends, nic);
            if posted > 0 {
                // If the queue is full, the next copy is kept until there is room.
                next = left.or_else(|| copies.next());
                continue;
            }
            next = copies.next();
            if let Err(why) = link.take_copy(id, &copy, nic, books) {
                books.copied.push(id, copy.token, Err(Status::Unreachable));
                failed = Some(why);
                break;
            }
        }
        let rest = next.into_iter().chain(copies);
        self.links.rounds.dirty.mark(id.index);
        if let Some(why) = failed {
            rest.for_each(|copy| self.links.books.copied.push(id, copy.token, Err(Status::Unreachable)));
            self.close(id, why);
        }
    }

    /// Appends the completed copies to `into`. The devices do not access their memory any more.
    pub fn take_copied(&mut self, into: &mut CopyCompletions) {
        into.append(&mut self.links.books.copied);
    }

    /// Closes a connection. [`Event::Gone`] follows when the device holds none of its requests any more.
    pub fn close(&mut self, id: ConnectionId, why: CloseCause) {
        self.links.close(id, why);
    }

    /// Sends queued frames, then closes the connection: for a rejection that the peer should read.
    pub fn close_after_sending(&mut self, id: ConnectionId, why: CloseCause) {
        let Some((link, _, _)) = self.links.parts(id) else { return };
        if link.state != State::Open || link.is_sent() {
            self.close(id, why);
        } else if link.shutdown.after_send.is_none() {
            link.shutdown.after_send = Some(why);
            self.links.rounds.dirty.mark(id.index);
        }
    }

    /// Returns and clears the reason why memory could not be registered.
    pub fn take_problem(&mut self) -> Option<String> {
        let refused = self.links.nics.iter_mut().find_map(|nic| nic.memory.take_problem());
        refused.or_else(|| self.segments.take_problem())
    }

    /// Returns the counters.
    #[must_use]
    pub const fn counters(&self) -> &RdmaCounters {
        &self.links.books.counters
    }

    /// Returns the number of connections whose [`Event::Gone`] was not taken yet.
    #[must_use]
    pub const fn open(&self) -> usize {
        self.links.table.len()
    }
}

impl fmt::Debug for Rdma {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Rdma({} devices, {} links)", self.links.nics.len(), self.links.table.len())
    }
}
