//! TCP by direct calls: frames both ways, payloads straight into their final memory.
//!
//! The host's poller says which sockets are ready, and says it once: a connection receives and sends until the kernel
//! has no more for it. A host that spins asks the poller now and then only, and receives on the connections that
//! expect something and were active last ([`Tcp::try_active`]).
//!
//! Small frames are gathered: one call carries many pieces of headers, bodies and payloads, and one receive may bring
//! many frames. A long payload is received in place; only what arrived together with its header is copied. What one
//! connection moves in a round is bounded, so that no other waits for long.
//!
//! The host calls [`Tcp::ready`] for each event of the poller, then takes [`Tcp::poll_event`], then for each
//! connection of [`Tcp::next_ready`] takes [`Tcp::input`] until it says `Wait`, and at last [`Tcp::flush`].
//!
//! Invariant: the kernel refers to no memory of ours when a call has returned, but for long payloads that are sent
//! without a copy, as [`ZeroCopyOptions`] say. Either way a payload's hold is reported as sent, and a connection as
//! gone, when its memory is free to use. Thread affinity: none; one thread at a time.

mod active;
mod connection;
mod outstanding;
mod receive;
mod sealed;
mod send;
mod strangers;
#[cfg(test)]
mod tests;
mod zero_copy;

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use active::Active;
use connection::{Connection, Frame, State};
use kvplane_proto::Limits;
use kvplane_proto::frame::Header;
use kvplane_sys::{Interest, Poller, Readiness, net, stream};

use sealed::Wire;
pub use strangers::StrangerLimits;
use strangers::Strangers;

use crate::token::{Source, Token};
use crate::types::{CloseCause, ConnectionId, Event, OutgoingPayload};
pub use zero_copy::{ZeroCopy, ZeroCopyCounters, ZeroCopyOptions};

/// How long no connection is accepted after the kernel refused to. A parked host comes by twice a second at least.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long a peer has to read what is sent to it before its connection is closed.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// Connections accepted at once; the others are announced again.
const ACCEPTED_AT_ONCE: usize = 64;

/// All TCP connections of one shard or client.
pub struct Tcp {
    listener: Option<TcpListener>,
    connections: Vec<Option<Connection>>,
    generations: Vec<u32>,
    free: Vec<u32>,
    events: VecDeque<Event>,
    /// Connections with input to take.
    ready: VecDeque<u32>,
    /// Connections with output to send.
    dirty: VecDeque<u32>,
    /// Connections with more input than their share of this round.
    again: Vec<u32>,
    active: Active,
    staging: receive::Staging,
    send_staging: send::Staging,
    /// Kept for their memory.
    spare_bodies: Vec<Vec<u8>>,
    /// Bytes moved since they were last asked for.
    moved_bytes: usize,
    /// When to accept again, after the kernel refused to.
    accept_after: Option<Instant>,
    /// Connections that are closed once their output has left, and when they are closed in any case; oldest first.
    closing: VecDeque<(Instant, ConnectionId)>,
    open: usize,
    zero_copy: ZeroCopyOptions,
    zero_copy_counters: ZeroCopyCounters,
    /// Connections that wait for notices, to be looked at when they wait too long.
    waiting: Vec<u32>,
    tls: Box<sealed::Tls>,
    /// Accepted connections whose peers are not known yet, where that counts.
    strangers: Option<Strangers>,
    /// How many of those had to go for others.
    crowded_out: u64,
}

impl Tcp {
    /// A driver without connections that sends without a copy as these options say.
    #[must_use]
    pub fn new(zero_copy: ZeroCopyOptions) -> Self {
        Self {
            listener: None,
            connections: Vec::new(),
            generations: Vec::new(),
            free: Vec::new(),
            events: VecDeque::new(),
            ready: VecDeque::new(),
            dirty: VecDeque::new(),
            again: Vec::new(),
            active: Active::new(),
            staging: receive::Staging::new(),
            send_staging: send::Staging::new(),
            spare_bodies: Vec::new(),
            moved_bytes: 0,
            accept_after: None,
            closing: VecDeque::new(),
            open: 0,
            zero_copy,
            zero_copy_counters: ZeroCopyCounters::default(),
            waiting: Vec::new(),
            tls: Box::new(sealed::Tls::new()),
            strangers: None,
            crowded_out: 0,
        }
    }

    /// Takes whoever connects to us for a stranger until [`Self::trust`].
    pub fn limit_strangers(&mut self, limits: StrangerLimits) {
        self.strangers = Some(Strangers::new(limits));
    }

    /// The peer of this connection has said who it is.
    pub fn trust(&mut self, id: ConnectionId) {
        if let Some(strangers) = &mut self.strangers {
            strangers.remove(id);
        }
    }

    /// How many strangers there are, and how many had to go for others so far.
    #[must_use]
    pub fn strangers(&self) -> (usize, u64) {
        (self.strangers.as_ref().map_or(0, Strangers::len), self.crowded_out)
    }

    /// Accepts connections from this listener, which is nonblocking.
    ///
    /// # Errors
    /// When the poller does not take it.
    pub fn listen(&mut self, poller: &Poller, listener: TcpListener) -> std::io::Result<()> {
        poller.add(listener.as_fd(), LISTENER.to_bits(), Interest::Readable)?;
        self.listener = Some(listener);
        Ok(())
    }

    /// Connects to a peer; [`Event::Connected`] or [`Event::Gone`] follows.
    ///
    /// # Errors
    /// When no socket can be had, the table is full, or the kernel knows at once that it cannot work.
    pub fn connect(&mut self, poller: &Poller, address: SocketAddr) -> std::io::Result<ConnectionId> {
        let socket = net::tcp_socket(address)?;
        stream::start_connect(socket.as_fd(), address)?;
        self.add(poller, socket, State::Connecting, Wire::Plain)
    }

    fn add(&mut self, poller: &Poller, socket: OwnedFd, state: State, wire: Wire) -> std::io::Result<ConnectionId> {
        if self.open >= Limits::CONNECTIONS {
            let text = format!("{} connections are open, which is the limit of a shard", Limits::CONNECTIONS);
            return Err(std::io::Error::other(text));
        }
        let index = self.free.last().copied().unwrap_or(self.connections.len() as u32);
        let generation = self.generations.get(index as usize).map_or(1, |last| last.wrapping_add(1));
        let token = Token { source: Source::TcpConnection, index, generation };
        poller.add(socket.as_fd(), token.to_bits(), Interest::BothEdges)?;
        if self.free.pop().is_none() {
            self.connections.push(None);
            self.generations.push(0);
        }
        self.generations[index as usize] = generation;
        self.connections[index as usize] = Some(Connection::new(socket, state, wire));
        self.open += 1;
        Ok(ConnectionId { index, generation })
    }

    /// Takes an event of one of this driver's descriptors.
    pub fn ready(&mut self, poller: &Poller, token: Token, readiness: &Readiness) {
        if token.source == Source::TcpListener {
            self.accept(poller);
            return;
        }
        let id = ConnectionId { index: token.index, generation: token.generation };
        if readiness.error && self.generations.get(id.index as usize) == Some(&id.generation) {
            self.settle(id.index);
        }
        let Some(connection) = self.get(id) else { return };
        if connection.state == State::Connecting {
            if !readiness.writable {
                return;
            }
            let error = net::take_socket_error(connection.socket.as_fd()).and_then(|error| error.map_or(Ok(()), Err));
            if let Err(error) = error {
                self.close(id, CloseCause::Kernel(error.raw_os_error().unwrap_or_default()));
                return;
            }
            connection.state = State::Open;
            self.opened(id);
        }
        let Some(connection) = self.get(id) else { return };
        // Where payloads are lent, an error without an end is a notice.
        connection.ended |= readiness.ended || readiness.error && connection.lent().is_none();
        if readiness.readable {
            connection.readable = true;
            self.mark_ready(id.index);
        }
        if let Some(connection) = self.get(id)
            && readiness.writable
        {
            connection.writable = true;
            if !connection.is_sent() {
                self.mark_dirty(id.index);
            }
        }
    }

    fn accept(&mut self, poller: &Poller) {
        let Some(listener) = &self.listener else { return };
        let listener = listener.as_fd();
        let mut accepted = Vec::new();
        while accepted.len() < ACCEPTED_AT_ONCE {
            match stream::accept(listener) {
                Ok(Some(socket)) => accepted.push(socket),
                Ok(None) => break,
                Err(_) => {
                    // Out of descriptors, the next attempt fails like this one: not before some may have been closed.
                    let _ = poller.remove(listener);
                    self.accept_after = Some(Instant::now() + ACCEPT_PAUSE);
                    break;
                }
            }
        }
        for socket in accepted {
            // A refused connection is closed by its drop; the peer sees that and tries again later.
            let address = net::peer_address(socket.as_fd()).map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |at| at.ip());
            if net::set_nodelay(socket.as_fd()).is_ok()
                && let Ok(id) = self.add(poller, socket, State::Open, self.tls.wire_of_accepted())
            {
                if self.get(id).is_some_and(|connection| !connection.is_agreed()) {
                    self.await_handshake(id);
                }
                self.events.push_back(Event::Accepted(id));
                if let Some(gone) = self.strangers.as_mut().and_then(|strangers| strangers.add(id, address)) {
                    self.crowded_out += 1;
                    self.close(gone, CloseCause::Closed);
                }
            }
        }
    }

    fn accept_again(&mut self, poller: &Poller) {
        let (Some(at), Some(listener)) = (self.accept_after, &self.listener) else { return };
        if at <= Instant::now() {
            let watched = poller.add(listener.as_fd(), LISTENER.to_bits(), Interest::Readable).is_ok();
            self.accept_after = (!watched).then(|| Instant::now() + ACCEPT_PAUSE);
        }
    }

    /// The next thing that happened. A connection counts, and its position is not another's, until its end was taken
    /// here.
    pub fn poll_event(&mut self) -> Option<Event> {
        let event = self.events.pop_front();
        if let Some(Event::Gone(id, _)) = &event {
            self.free.push(id.index);
            self.open -= 1;
        }
        event
    }

    /// Whether there is something to do before anything else happens.
    #[must_use]
    pub fn has_work(&self) -> bool {
        !self.events.is_empty() || !self.ready.is_empty() || !self.dirty.is_empty()
    }

    /// Names the connections that are worth trying by [`Self::next_ready`]: for a host that spins. Whether there are
    /// any; if not, asking the poller is worth more.
    pub fn try_active(&mut self) -> bool {
        let connections = &self.connections;
        let (tried, count) =
            self.active.next(|index| connections[index as usize].as_ref().is_some_and(Connection::expects));
        for &index in &tried[..count] {
            if let Some(connection) = self.connections[index as usize].as_mut() {
                connection.readable = true;
                self.mark_ready(index);
            }
        }
        count > 0
    }

    /// Bytes sent and received since the last call of [`Self::take_moved_bytes`].
    #[must_use]
    pub const fn moved_bytes(&self) -> usize {
        self.moved_bytes
    }

    /// Bytes sent and received since the last call.
    pub const fn take_moved_bytes(&mut self) -> usize {
        core::mem::replace(&mut self.moved_bytes, 0)
    }

    /// A connection that may have input; each is named once until new bytes arrive.
    pub fn next_ready(&mut self) -> Option<ConnectionId> {
        while let Some(index) = self.ready.pop_front() {
            if let Some(connection) = self.connections[index as usize].as_mut() {
                connection.start_round();
                return Some(ConnectionId { index, generation: self.generations[index as usize] });
            }
        }
        None
    }

    /// Queues a frame. It leaves with the next [`Self::flush`]. False when the connection is gone; the payload's hold
    /// is then reported as sent.
    pub fn send(&mut self, id: ConnectionId, header: &Header, body: &[u8], payload: Option<OutgoingPayload>) -> bool {
        let mut kept = self.spare_bodies.pop().unwrap_or_default();
        let mode = self.tls.mode();
        let Some(connection) = self.get(id) else {
            if let Some(hold) = payload.and_then(|payload| payload.hold) {
                self.events.push_back(Event::Sent(hold));
            }
            return false;
        };
        kept.extend_from_slice(body);
        let header = if connection.asks { connection.greeting(header, mode) } else { *header };
        let frame = Frame { header, body: kept, payload };
        connection.extra_pieces += frame.extra_pieces();
        connection.frames.push_back(frame);
        let (asks, writable) = (connection.asks, connection.writable);
        if asks {
            connection.awaited += u64::from(header.replies());
            self.active.touch(id.index);
        }
        if writable {
            self.mark_dirty(id.index);
        }
        true
    }

    /// Sends what is queued, and lets connections that used up their share have the next round.
    pub fn flush(&mut self, poller: &Poller) {
        for _ in 0..self.dirty.len() {
            let Some(index) = self.dirty.pop_front() else { break };
            let id = ConnectionId { index, generation: self.generations[index as usize] };
            if let Some(connection) = self.get(id) {
                connection.dirty = false;
                self.transmit(id);
                self.resume(index);
            }
        }
        self.lose_patience();
        self.watch_handshakes();
        while let Some(index) = self.again.pop() {
            self.mark_ready(index);
        }
        self.accept_again(poller);
        if !self.closing.is_empty() {
            self.close_late();
        }
    }

    /// Closes the connections whose peers have not read their last words in time.
    fn close_late(&mut self) {
        let now = Instant::now();
        while let Some(&(until, id)) = self.closing.front()
            && (until <= now || self.get(id).is_none())
        {
            self.closing.pop_front();
            if let Some(why) = self.get(id).and_then(|connection| connection.closing_after_send.take()) {
                self.close(id, why);
            }
        }
    }

    /// Ends a connection; [`Event::Gone`] follows what it still held: at once, or when the kernel no longer refers to
    /// what was sent without a copy.
    pub fn close(&mut self, id: ConnectionId, why: CloseCause) {
        if self.get(id).is_none() {
            return;
        }
        self.trust(id);
        self.active.forget(id.index);
        self.staging.forget(id.index);
        self.tls.forget(id.index);
        if self.end_lent(id, &why) {
            return;
        }
        let Some(mut connection) = self.connections[id.index as usize].take() else { return };
        // Either way the peer learns of it even where a forked child still has the socket. What was asked and not
        // answered may be asked again elsewhere: the kernel must not deliver it later, over what came after it.
        let unanswered = connection.awaited > 0 && connection.closing_after_send.is_none();
        if let Wire::Tls(sealed) = &mut connection.wire
            && !unanswered
        {
            sealed.say_goodbye(&connection.socket);
        }
        let socket = connection.socket.as_fd();
        if !unanswered || net::abort(socket).is_err() {
            let _ = net::shutdown(socket);
        }
        self.events.extend(connection.holds().map(Event::Sent));
        self.events.push_back(Event::Gone(id, why));
    }

    /// Sends what is queued, then closes: for a refusal that the peer should read. One that does not read it within two
    /// seconds is closed then.
    pub fn close_after_sending(&mut self, id: ConnectionId, why: CloseCause) {
        if self.get(id).is_none() {
            return;
        }
        self.transmit(id);
        let Some(connection) = self.get(id) else { return };
        let (quiet, first) = (connection.is_quiet(), connection.closing_after_send.is_none());
        connection.closing_after_send.get_or_insert_with(|| why.clone());
        if quiet {
            self.close(id, why);
        } else if first {
            let sent = connection.is_sent();
            self.closing.push_back((Instant::now() + LAST_WORDS, id));
            if sent {
                self.end_later(id.index);
            }
        }
    }

    /// Connections whose end was not taken yet.
    #[must_use]
    pub const fn open(&self) -> usize {
        self.open
    }

    fn get(&mut self, id: ConnectionId) -> Option<&mut Connection> {
        if self.generations.get(id.index as usize) != Some(&id.generation) {
            return None;
        }
        self.connections[id.index as usize].as_mut().filter(|connection| connection.state != State::Ending)
    }

    /// Names a connection again in the next round: it has more input than its share of this one.
    pub fn ready_again(&mut self, id: ConnectionId) {
        if self.get(id).is_some() {
            self.again.push(id.index);
        }
    }

    fn mark_ready(&mut self, index: u32) {
        if let Some(connection) = self.connections[index as usize].as_mut()
            && !connection.ready
        {
            connection.ready = true;
            self.ready.push_back(index);
        }
    }

    fn mark_dirty(&mut self, index: u32) {
        if let Some(connection) = self.connections[index as usize].as_mut()
            && !connection.dirty
        {
            connection.dirty = true;
            self.dirty.push_back(index);
        }
    }
}

const LISTENER: Token = Token { source: Source::TcpListener, index: 0, generation: 0 };

impl Default for Tcp {
    fn default() -> Self {
        Self::new(ZeroCopyOptions::default())
    }
}
