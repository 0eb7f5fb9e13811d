//! Shared memory for peers on one host: frames with small payloads over two rings, the rest copied by whoever wants it.
//!
//! A client connects to the shard's Unix socket and gets, over it, the *channel* (a region with two record rings and
//! two doorbell flags), an eventfd for each side, and the shard's pool. From then on the socket carries only requests
//! to map segments, and its end: the kernel closes the socket of a killed process after that process's last
//! instruction, so its end means that nobody writes through the former mapping any more.
//!
//! Trust: only a process of the same user (or root) gets in. It may write the pool, as it could through `ptrace`
//! anyway; checksums, made by the writer and checked by each reader, show when it wrote where it should not.
//!
//! Segments are used without their owner's help, through a mapping or by the kernel's copies between processes; the
//! [`fence`] says when that has ended.
//!
//! Nothing here waits. What a shard does not answer within [`SETUP_DEADLINE`], because it is stopped, say, counts as
//! refused; an answer that comes later finds nobody who waits for it. Thread affinity: none; one thread at a time.

mod acceptor;
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
use std::time::{Duration, Instant};

use acceptor::Acceptor;
use asking::Questions;
use channel::{Channel, Side};
pub use fence::{CHUNK_BYTES, Extent, SLOTS};
use kvplane_proto::checksum::payload_checksum;
use kvplane_proto::frame::Header;
use kvplane_proto::{Limits, SegmentId};
use kvplane_sys::{CrossError, Interest, IoBuf, Poller, Readiness, Region, unix};
use one_sided::Owner;

use crate::table::Table;
use crate::token::{Source, Token};
use crate::turns::Turns;
use crate::types::{CloseCause, ConnectionId, Event, Input, Target};

/// How long setting up a connection, or mapping a segment, may take.
pub const SETUP_DEADLINE: Duration = Duration::from_secs(2);

/// What is at a shard's Unix socket, as a client finds it.
#[derive(Debug)]
pub struct Probe {
    /// The process that listens there, by the kernel's word; 0 where it is not visible from here.
    pub pid: i32,
    /// Whether the kernel copies between us and that process, or why not: tried, not guessed.
    pub cma: Result<(), CrossError>,
}

/// Connects to a shard's Unix socket as a client would, finds out what there is, and hangs up. Blocks up to
/// [`SETUP_DEADLINE`].
///
/// # Errors
/// As [`Shm::connect`], and when the shard does not answer in time.
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

/// Waits for what a shard that was called offers.
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

/// All shared-memory connections of one shard or client.
pub struct Shm {
    acceptor: Acceptor,
    /// The shard's pool, given to every client.
    pool: Option<Arc<Region>>,
    /// Connections. Shards that were called and have offered nothing yet have their positions here too.
    channels: Table<Channel>,
    questions: Questions,
    owner: Owner,
    events: VecDeque<Event>,
    /// Segments that clients want to map.
    wanted: VecDeque<(ConnectionId, SegmentId)>,
    /// Connections whose peers are to be woken.
    dirty: Turns,
    /// A payload on its way into a ring.
    along: Vec<u8>,
}

impl Shm {
    /// A driver without connections. `pool` is what clients get to map.
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

    /// Accepts connections from this listener, which is nonblocking.
    ///
    /// # Errors
    /// When the poller does not take it.
    pub fn listen(&mut self, poller: &Poller, listener: UnixListener) -> io::Result<()> {
        self.acceptor.listen(poller, listener)
    }

    /// A position for a connection.
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
            // It may be in use already, so it is left as any other.
            self.remove(poller, id, false);
            self.channels.free(id);
            return Err(error);
        }
        Ok(id)
    }

    /// Takes an event of one of this driver's descriptors.
    pub fn ready(&mut self, poller: &Poller, token: Token, _readiness: &Readiness) {
        let id = ConnectionId { index: token.index, generation: token.generation };
        match token.source {
            Source::ShmListener => self.accept(poller),
            Source::ShmSocket if self.channels.get(id).is_some() => self.socket_readable(poller, id),
            Source::ShmSocket => self.offered(poller, id),
            // A doorbell has rung: the host looks at every ring by itself.
            _ => {}
        }
    }

    fn accept(&mut self, poller: &Poller) {
        // A peer that may not enter, or is gone already, is simply dropped; it sees the end of its socket.
        while let Some(socket) = self.acceptor.accept() {
            if let Some(fence) = self.owner.fence()
                && let Ok(channel) = setup::accept(UnixStream::from(socket), self.pool.as_ref(), fence)
                && let Ok(id) = self.add(poller, channel)
            {
                self.events.push_back(Event::Accepted(id));
            }
        }
    }

    /// The peer asks for a segment's memory, or answers, or is gone.
    fn socket_readable(&mut self, poller: &Poller, id: ConnectionId) {
        let Some(channel) = self.channels.get_mut(id) else { return };
        match channel.side {
            Side::Server => match setup::take_request(&channel.socket) {
                Ok(segment) => self.wanted.extend(segment.map(|segment| (id, segment))),
                Err(_) => self.close(poller, id, CloseCause::Peer),
            },
            Side::Client => match self.questions.take_answer(id, &channel.socket) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    // Its last words may say why, and are in the ring. The end would be told of again and again.
                    let _ = poller.remove(channel.socket.as_fd());
                    channel.hung_up = true;
                }
                Err(error) => self.close(poller, id, CloseCause::Setup(error.to_string())),
            },
        }
    }

    /// A client that wants to map a segment; answer with [`Self::offer_segment`].
    pub fn poll_wanted(&mut self) -> Option<(ConnectionId, SegmentId)> {
        self.wanted.pop_front()
    }

    /// Answers a client: the segment's region, to be mapped `writable` or not, or nothing where there is none to share.
    pub fn offer_segment(
        &mut self,
        poller: &Poller,
        id: ConnectionId,
        segment: SegmentId,
        region: Option<&Arc<Region>>,
        writable: bool,
    ) {
        let Some(channel) = self.channels.get_mut(id) else { return };
        if setup::offer_segment(&channel.socket, segment, region, writable).is_err() {
            self.close(poller, id, CloseCause::Peer);
        }
    }

    /// The pool of a connection's shard, for a client.
    #[must_use]
    pub fn pool(&self, id: ConnectionId) -> Option<&Arc<Region>> {
        self.channels.get(id)?.pool.as_ref()
    }

    /// False once a connection has ended, also before its end was taken from [`Self::poll_event`].
    #[must_use]
    pub fn is_open(&self, id: ConnectionId) -> bool {
        self.channels.get(id).is_some()
    }

    /// The next thing that happened. A connection counts, and its position is not another's, until its end was taken
    /// here.
    pub fn poll_event(&mut self) -> Option<Event> {
        let event = self.events.pop_front();
        if let Some(Event::Gone(id, _)) = event {
            self.channels.free(id);
        }
        event
    }

    /// A connection with input, at or after position `from`. One load for each connection.
    #[must_use]
    pub fn next_ready(&self, from: u32) -> Option<ConnectionId> {
        (from..self.channels.positions()).find_map(|index| {
            let channel = self.channels.at(index)?;
            (channel.hung_up || channel.has_input()).then(|| self.channels.id_at(index))
        })
    }

    /// The next frame of a connection; its body replaces `scratch`.
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

    /// Puts the payload of the last frame where it belongs, and says what it sums to, where the target wants that.
    ///
    /// # Panics
    /// When the memory is not of the payload's length.
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

    /// Queues a frame, and copies a payload of at most [`Limits::PAYLOAD_ALONG_BYTES`] to go along with it. It is there
    /// for the peer at once; the peer is woken by [`Self::flush`]. False when the connection is gone.
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

    /// Wakes the peers that were sent something; moves on what did not fit a ring before.
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

    /// Whether a full ring is waited for: the host must not park for long.
    #[must_use]
    pub fn is_overflowing(&self) -> bool {
        !self.dirty.is_empty()
    }

    /// Announces sleep to every peer. Look at [`Self::next_ready`] once more before parking.
    pub fn prepare_sleep(&self) {
        self.channels.iter().for_each(|(_, channel)| channel.own_bell.prepare_sleep());
    }

    /// The host is awake again.
    pub fn awake(&self) {
        self.channels.iter().for_each(|(_, channel)| channel.own_bell.awake());
    }

    /// Ends a connection. [`Event::Gone`] follows at once: no I/O of the kernel's is ever in flight on shared memory.
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
        // The peer has the same eventfd, and the socket may linger: closing ours would not end the watches.
        let _ = poller.remove(channel.own_bell.fd());
        let _ = poller.remove(channel.socket.as_fd());
        if channel.side == Side::Server && !hung_up {
            self.owner.linger(channel.leave());
        } else {
            channel.close();
        }
    }

    /// Connections whose end was not taken yet.
    #[must_use]
    pub const fn open(&self) -> usize {
        self.channels.len()
    }
}
