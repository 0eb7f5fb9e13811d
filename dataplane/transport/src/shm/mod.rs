//! Shared-memory driver for peers on one machine: frames with small payloads over two rings; other payloads are copied
//! by their receiver.
//!
//! A client connects to the shard's Unix socket and receives over it the *channel* (a region with two record rings and
//! two doorbell flags), an eventfd for each side, and the shard's pool. From then on the socket carries only requests
//! to map segments, and its end of file: the kernel closes the socket of a killed process after that process's last
//! instruction, so end of file proves that the process no longer writes through its mapping.
//!
//! Trust: only a process of the same user (or root) is accepted. It may write the pool, as it could through `ptrace`
//! anyway; checksums, computed by the writer and verified by each reader, detect writes to wrong places.
//!
//! Segments are accessed without their owner's help, through a mapping or by the kernel's copies between processes; the
//! [`fence`] tells when that has ended.
//!
//! No call blocks, except [`probe`]. A request that a shard does not answer within [`SETUP_DEADLINE`], for example
//! because the shard is stopped, counts as refused; a later reply is dropped. Thread affinity: none; one thread at a
//! time.

mod acceptor;
mod answer;
mod asking;
mod channel;
mod fence;
mod one_sided;
mod setup;

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Instant;

use acceptor::Acceptor;
pub use answer::{MemoryRequest, SegmentMemory, SegmentOffer};
use asking::Questions;
pub use asking::SegmentOutcome;
use channel::{Channel, Side};
pub use fence::{CHUNK_BYTES, Extent, HoldError, SLOTS};
use kvplane_proto::checksum::payload_checksum;
use kvplane_proto::frame::Header;
use kvplane_proto::{Limits, SegmentId};
use kvplane_sys::{CrossError, Interest, IoBuf, Poller, Readiness, Region, unix};
use one_sided::Owner;
pub use one_sided::{ConnectionHold, SegmentHold};
pub use setup::{SETUP_DEADLINE, ShareError};

use crate::table::Table;
use crate::token::{Source, Token};
use crate::turns::Turns;
use crate::types::{CloseCause, ConnectionId, Event, Input, Target};

/// Result of probing a shard's Unix socket as a client.
#[derive(Debug)]
pub struct Probe {
    /// Process id of the listener as the kernel reports it; 0 if it is not visible from here.
    pub pid: i32,
    /// Result of a trial copy between us and that process by the kernel (CMA).
    pub cma: Result<(), CrossError>,
}

/// Connects to a shard's Unix socket as a client would, inspects the offer, and hangs up. Blocks up to
/// [`SETUP_DEADLINE`].
///
/// # Errors
/// Errors of [`Shm::connect`]; also a shard that does not answer in time.
pub fn probe(path: &str) -> io::Result<Probe> {
    let named = |error: io::Error| io::Error::new(error.kind(), format!("shared memory at {path}: {error}"));
    let socket = setup::call(path).map_err(|why| io::Error::other(why.to_string()))?;
    let offer = first_offer(&socket).map_err(named)?;
    let channel = offer.accept(socket);
    let pid = unix::peer_credentials(&channel.socket)?.pid;
    let cma = channel.view.as_ref().map_or(Err(CrossError::Gone), |view| view.ask_kernel(pid));
    channel.close();
    Ok(Probe { pid, cma })
}

/// Waits for the offer of a shard.
fn first_offer(socket: &UnixStream) -> io::Result<setup::Offer> {
    let until = Instant::now() + SETUP_DEADLINE;
    let poller = Poller::new()?;
    poller.add(socket.as_fd(), 0, Interest::Readable)?;
    let mut readiness = Vec::new();
    loop {
        match setup::take_offer(socket) {
            Ok(Some(offer)) => return Ok(offer),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(io::Error::other("the shard refused, or has ended"));
            }
            result => drop(result?),
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let seconds = SETUP_DEADLINE.as_secs();
            return Err(io::Error::new(io::ErrorKind::TimedOut, format!("no answer within {seconds} s")));
        }
        poller.wait(left, &mut readiness)?;
        readiness.clear();
    }
}

/// Tells all clients of a shard that no request of theirs is served any more. They read end of file, and let go of the
/// pool: the end of their sockets proves it.
pub fn hang_up(shm: &Shm) {
    for (_, channel) in shm.channels.iter().filter(|(_, channel)| channel.side == Side::Server) {
        // A client that is gone already needs no goodbye.
        let _ = channel.socket.shutdown(std::net::Shutdown::Write);
    }
}

/// All shared-memory connections of one shard or client.
pub struct Shm {
    acceptor: Acceptor,
    /// Pool of the shard, shared with every client.
    pool: Option<Arc<Region>>,
    /// Connections, including the reserved entries of connection attempts without an offer so far.
    channels: Table<Channel>,
    questions: Questions,
    owner: Owner,
    events: VecDeque<Event>,
    /// Segments whose memory clients have requested.
    wanted: VecDeque<(ConnectionId, SegmentId, MemoryRequest)>,
    /// Connections whose peers have to be woken.
    dirty: Turns,
    /// Scratch buffer for a payload on its way into a ring.
    along: Vec<u8>,
}

impl Shm {
    /// Creates a driver without connections. `pool` is shared with clients.
    #[must_use]
    pub const fn new(pool: Option<Arc<Region>>) -> Self {
        Self {
            acceptor: Acceptor::new(),
            pool,
            channels: Table::new(),
            questions: Questions::new(),
            owner: Owner::new(),
            events: VecDeque::new(),
            wanted: VecDeque::new(),
            dirty: Turns::new(),
            along: Vec::new(),
        }
    }

    /// Starts to accept connections of this listener, which is nonblocking.
    ///
    /// # Errors
    /// When the listener cannot be registered with the poller.
    pub fn listen(&mut self, poller: &Poller, listener: UnixListener) -> io::Result<()> {
        self.acceptor.listen(poller, listener)
    }

    /// Reserves a table entry for a connection.
    fn reserve(&mut self) -> io::Result<ConnectionId> {
        if self.channels.len() + self.owner.lingering() >= Limits::CONNECTIONS {
            let text = format!("{} connections are open, which is the limit of a shard", Limits::CONNECTIONS);
            return Err(io::Error::other(text));
        }
        Ok(self.channels.reserve())
    }

    fn add(&mut self, poller: &Poller, channel: Channel) -> io::Result<ConnectionId> {
        let id = self.reserve()?;
        let token = |source| Token { source, index: id.index, generation: id.generation }.to_bits();
        let watched = poller
            .add(channel.socket.as_fd(), token(Source::ShmSocket), Interest::Readable)
            .and_then(|()| poller.add(channel.own_bell.fd(), token(Source::ShmDoorbell), Interest::ReadableEdge));
        self.channels.put(id, channel);
        if let Err(error) = watched {
            // The channel may be in use already, so it is left like any other.
            self.remove(poller, id, false);
            self.channels.free(id);
            return Err(error);
        }
        Ok(id)
    }

    /// Handles a readiness event of one of this driver's descriptors.
    pub fn ready(&mut self, poller: &Poller, token: Token, _readiness: &Readiness) {
        let id = ConnectionId { index: token.index, generation: token.generation };
        match token.source {
            Source::ShmListener => self.accept(poller),
            Source::ShmSocket if self.channels.get(id).is_some() => self.socket_readable(poller, id),
            Source::ShmSocket => self.offered(poller, id),
            // Doorbell: the host polls every ring by itself.
            _ => {}
        }
    }

    fn accept(&mut self, poller: &Poller) {
        // A peer that is not accepted, or is gone already, is dropped; it reads end of file.
        while let Some(socket) = self.acceptor.accept() {
            if let Some(fence) = self.owner.fence()
                && let Ok(channel) = setup::accept(UnixStream::from(socket), self.pool.as_ref(), fence)
                && let Ok(id) = self.add(poller, channel)
            {
                self.events.push_back(Event::Accepted(id));
            }
        }
    }

    /// Handles a segment request, a reply, or the peer's end of file.
    fn socket_readable(&mut self, poller: &Poller, id: ConnectionId) {
        let Some(channel) = self.channels.get_mut(id) else { return };
        match channel.side {
            Side::Server => match setup::take_request(&channel.socket) {
                Ok(request) => self.wanted.extend(request.map(|(segment, wanted)| (id, segment, wanted))),
                Err(_) => self.close(poller, id, CloseCause::Peer),
            },
            Side::Client => match self.questions.take_answer(id, &channel.socket) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    // The last frames in the ring may tell why. A level-triggered poller would report the end of file
                    // again and again.
                    let _ = poller.remove(channel.socket.as_fd());
                    channel.hung_up = true;
                }
                Err(error) => self.close(poller, id, CloseCause::Setup(error.to_string())),
            },
        }
    }

    /// Returns a client's request for the memory of a segment; [`Self::offer_segment`] answers it.
    pub fn poll_wanted(&mut self) -> Option<(ConnectionId, SegmentId, MemoryRequest)> {
        self.wanted.pop_front()
    }

    /// Answers a client: with the segment's memory, or with a refusal if there is none to share.
    pub fn offer_segment(&mut self, poller: &Poller, id: ConnectionId, segment: SegmentId, offer: &SegmentOffer<'_>) {
        let Some(channel) = self.channels.get_mut(id) else { return };
        if setup::offer_segment(&channel.socket, segment, offer).is_err() {
            self.close(poller, id, CloseCause::Peer);
        }
    }

    /// Returns the pool of a connection's shard, on the client side.
    #[must_use]
    pub fn pool(&self, id: ConnectionId) -> Option<&Arc<Region>> {
        self.channels.get(id)?.pool.as_ref()
    }

    /// Returns true if a connection is open; false once it has ended, even before [`Self::poll_event`] returned its
    /// end.
    #[must_use]
    pub fn is_open(&self, id: ConnectionId) -> bool {
        self.channels.get(id).is_some()
    }

    /// Returns the next event. A connection counts as open, and its index is not reused, until its [`Event::Gone`] has
    /// been returned here.
    pub fn poll_event(&mut self) -> Option<Event> {
        let event = self.events.pop_front();
        if let Some(Event::Gone(id, _)) = event {
            self.channels.free(id);
        }
        event
    }

    /// Returns a connection with input, at or after position `from`. Costs one load per connection.
    #[must_use]
    #[inline]
    pub fn next_ready(&self, from: u32) -> Option<ConnectionId> {
        (from..self.channels.positions()).find_map(|index| {
            let channel = self.channels.at(index)?;
            (channel.hung_up || channel.has_input()).then(|| self.channels.id_at(index))
        })
    }

    /// Returns the next frame of a connection; its body replaces `scratch`.
    pub fn input(&mut self, poller: &Poller, id: ConnectionId, scratch: &mut Vec<u8>) -> Input {
        let Some(channel) = self.channels.get_mut(id) else { return Input::Wait };
        if !channel.has_input() {
            if channel.hung_up {
                self.close(poller, id, CloseCause::Peer);
            }
            return Input::Wait;
        }
        match channel.take_frame(scratch) {
            Ok(Some(header)) => Input::Frame(header),
            Ok(None) => Input::Wait,
            Err(why) => {
                self.close(poller, id, why);
                Input::Wait
            }
        }
    }

    /// Copies the payload of the last frame to its destination, and returns its checksum if the target requests one.
    ///
    /// # Panics
    /// When the memory does not have the payload's length.
    pub fn receive_payload(&mut self, id: ConnectionId, target: &Target) -> Input {
        let Some(channel) = self.channels.get_mut(id) else { return Input::Wait };
        let payload = channel.take_along();
        let (buffers, checksum) = match target {
            Target::Discard => return Input::Payload(None),
            Target::Memory { buffer, checksum } => (std::slice::from_ref(buffer), *checksum),
            Target::Scatter { buffers, checksum } => (&buffers[..], *checksum),
        };
        let mut rest = payload;
        for buffer in buffers {
            let (part, after) = rest.split_at(buffer.bytes());
            buffer.region().copy_in(buffer.offset(), part);
            rest = after;
        }
        assert!(rest.is_empty(), "memory of another length than the payload's");
        Input::Payload(checksum.then(|| payload_checksum(payload)))
    }

    /// Queues a frame with a copy of a payload of at most [`Limits::PAYLOAD_ALONG_BYTES`]. The peer can read it at
    /// once; [`Self::flush`] wakes the peer. Returns false if the connection is gone.
    pub fn send(&mut self, id: ConnectionId, header: &Header, body: &[u8], payload: &[IoBuf]) -> bool {
        if self.channels.get(id).is_none() {
            return false;
        }
        let mut header = *header;
        let mut along = std::mem::take(&mut self.along);
        along.clear();
        for buffer in payload {
            buffer.region().read_with(buffer.offset(), buffer.bytes(), &mut |_, part| along.extend_from_slice(part));
        }
        if header.payload_bytes > 0 && header.checksum() == Some(0) {
            header.payload_checksum = payload_checksum(&along);
        }
        let Some(channel) = self.channels.get_mut(id) else { return false };
        channel.push(&header, body, &along);
        self.dirty.mark(id.index);
        self.along = along;
        true
    }

    /// Wakes the peers of frames sent since the last call; moves overflowed frames into their rings.
    pub fn flush(&mut self, poller: &Poller) {
        if self.acceptor.must_try_again() {
            self.accept(poller);
        }
        for _ in 0..self.dirty.len() {
            let Some(index) = self.dirty.pop() else { return };
            let Some(channel) = self.channels.at_mut(index) else { continue };
            channel.drain_overflow();
            channel.peer_bell.ring();
            if channel.is_overflowing() {
                self.dirty.mark(index);
            }
        }
    }

    /// Returns true if frames wait for room in a full ring: the host must not park for long.
    #[must_use]
    pub fn is_overflowing(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Announces sleep to every peer. The host checks [`Self::next_ready`] once more before parking.
    pub fn prepare_sleep(&self) {
        self.channels.iter().for_each(|(_, channel)| channel.own_bell.prepare_sleep());
    }

    /// Announces to every peer that the host is awake again.
    pub fn awake(&self) {
        self.channels.iter().for_each(|(_, channel)| channel.own_bell.awake());
    }

    /// Closes a connection. [`Event::Gone`] follows at once: no kernel I/O is ever in flight on shared memory.
    pub fn close(&mut self, poller: &Poller, id: ConnectionId, why: CloseCause) {
        if let Some(socket) = self.questions.hang_up(id) {
            let _ = poller.remove(socket.as_fd());
            self.events.push_back(Event::Gone(id, why.clone()));
        }
        if self.channels.get(id).is_some() {
            self.remove(poller, id, matches!(why, CloseCause::Peer));
            self.events.push_back(Event::Gone(id, why));
        }
    }

    fn remove(&mut self, poller: &Poller, id: ConnectionId, hung_up: bool) {
        let Some(channel) = self.channels.take(id) else { return };
        self.questions.forget(id);
        // The peer has the same eventfd, and the socket may linger: closing ours would not remove them from the poller.
        let _ = poller.remove(channel.own_bell.fd());
        let _ = poller.remove(channel.socket.as_fd());
        if channel.side == Side::Server && !hung_up {
            self.owner.linger(channel.leave());
        } else {
            channel.close();
        }
    }

    /// Returns the number of connections whose [`Event::Gone`] was not taken yet.
    #[must_use]
    pub const fn open(&self) -> usize {
        self.channels.len()
    }
}
