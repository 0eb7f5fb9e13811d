//! TCP driver with direct system calls: frames both ways, payloads directly into their final memory.
//!
//! The host's poller reports the readiness of connections edge-triggered: a connection receives and sends until the
//! socket would block. A host that spins calls the poller only now and then, and receives on the recently active
//! connections that expect input ([`Tcp::try_active`]).
//!
//! Small frames are gathered: one call sends many pieces of headers, bodies and payloads, and one receive may return
//! many frames. A long payload is received in place; only the part that arrives together with its header is copied. The
//! bytes that one connection moves in a round are bounded, for fairness.
//!
//! The host calls [`Tcp::ready`] for each event of the poller, then takes [`Tcp::poll_event`], then for each connection
//! of [`Tcp::next_ready`] takes [`Tcp::input`] until it returns `Wait`, and at last calls [`Tcp::flush`].
//!
//! Invariant: the kernel refers to none of our memory when a call has returned, except for long payloads of zero-copy
//! sends, see [`ZeroCopyOptions`]. In either case a payload's hold is reported as sent, and a connection as gone, only
//! when its memory is free to use. Thread affinity: none; one thread at a time.

mod acceptor;
mod active;
mod connection;
mod connections;
mod input;
mod lending;
mod output;
mod output_staging;
mod reader;
mod sealed;
mod staging;
#[cfg(test)]
mod tests;
mod tls;
mod unauthenticated;
mod writer;

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use acceptor::Acceptor;
use active::Active;
use connection::{Connection, State};
use connections::Connections;
use kvplane_proto::Limits;
use kvplane_proto::frame::Header;
use kvplane_sys::{Interest, Poller, Readiness, net, stream};
pub use lending::{ZeroCopy, ZeroCopyCounters, ZeroCopyOptions};
use output::END_PATIENCE_NS;
use output_staging::{Frame, OutputStaging};
use reader::STAGING_BYTES;
use sealed::Wire;
use staging::Staging;
use tls::Tls;
use unauthenticated::UnauthenticatedConnections;
pub use unauthenticated::UnauthenticatedLimits;
use writer::ZeroCopyBooks;

use crate::token::{Source, Token};
use crate::turns::Rounds;
use crate::types::{CloseCause, ConnectionId, Event, OutgoingPayload};

/// Time that a peer has to read its last frames before its connection is closed.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// All TCP connections of one shard or client.
pub struct Tcp {
    acceptor: Acceptor,
    /// Limits on accepted connections whose peers are not authenticated yet, if set.
    unauthenticated: Option<UnauthenticatedConnections>,
    connections: Connections,
    events: VecDeque<Event>,
    rounds: Rounds,
    active: Active,
    /// Receive buffer of frames.
    staging: Staging,
    /// Send buffer of frames.
    output: OutputStaging,
    tls: Box<Tls>,
    zero_copy: ZeroCopyBooks,
    /// Connections that wait for zero-copy notifications, to be checked when those are overdue.
    waiting: Vec<u32>,
    /// Connections to close once their output is sent, each with its deadline; oldest first.
    closing: VecDeque<(Instant, ConnectionId)>,
    /// Time after which unacknowledged data ends a connection that this driver made, in milliseconds; 0: as long as the
    /// kernel retransmits.
    unacknowledged_ms: u32,
    /// Bytes moved since the last call of [`Tcp::take_moved_bytes`].
    moved_bytes: usize,
}

impl Tcp {
    /// Creates a driver without connections, with these options of zero-copy sends.
    #[must_use]
    pub fn new(zero_copy: ZeroCopyOptions) -> Self {
        Self {
            acceptor: Acceptor::new(),
            unauthenticated: None,
            connections: Connections::new(),
            events: VecDeque::new(),
            rounds: Rounds::new(),
            active: Active::new(),
            staging: Staging::new(STAGING_BYTES),
            output: OutputStaging::new(),
            tls: Box::new(Tls::new()),
            zero_copy: ZeroCopyBooks { options: zero_copy, counters: ZeroCopyCounters::default() },
            waiting: Vec::new(),
            closing: VecDeque::new(),
            unacknowledged_ms: 0,
            moved_bytes: 0,
        }
    }

    /// Limits accepted connections that are not authenticated yet; [`Self::trust`] exempts a connection.
    pub fn limit_unauthenticated(&mut self, limits: UnauthenticatedLimits) {
        self.unauthenticated = Some(UnauthenticatedConnections::new(limits));
    }

    /// Exempts a connection from the limits: its peer is authenticated.
    pub fn trust(&mut self, id: ConnectionId) {
        if let Some(unauthenticated) = &mut self.unauthenticated {
            unauthenticated.remove(id);
        }
    }

    /// Returns the number of unauthenticated connections, and how many were closed so far to make room for others.
    #[must_use]
    pub fn unauthenticated(&self) -> (usize, u64) {
        self.unauthenticated
            .as_ref()
            .map_or((0, 0), |unauthenticated| (unauthenticated.len(), unauthenticated.replaced()))
    }

    /// Starts to accept connections of this listener, which is nonblocking.
    ///
    /// # Errors
    /// When the listener cannot be registered with the poller.
    pub fn listen(&mut self, poller: &Poller, listener: TcpListener) -> std::io::Result<()> {
        self.acceptor.listen(poller, listener)
    }

    /// Connects to a peer; [`Event::Connected`] or [`Event::Gone`] follows.
    ///
    /// # Errors
    /// When no socket is available, the table is full, or the kernel rejects the connection at once.
    pub fn connect(&mut self, poller: &Poller, address: SocketAddr) -> std::io::Result<ConnectionId> {
        let socket = net::tcp_socket(address)?;
        if self.unacknowledged_ms > 0 {
            net::set_user_timeout(socket.as_fd(), self.unacknowledged_ms)?;
        }
        stream::start_connect(socket.as_fd(), address)?;
        self.add(poller, socket, State::Connecting, Wire::Plain)
    }

    fn add(&mut self, poller: &Poller, socket: OwnedFd, state: State, wire: Wire) -> std::io::Result<ConnectionId> {
        if self.connections.len() >= Limits::CONNECTIONS {
            let text = format!("{} connections are open, which is the limit of a shard", Limits::CONNECTIONS);
            return Err(std::io::Error::other(text));
        }
        let ConnectionId { index, generation } = self.connections.next_id();
        let token = Token { source: Source::TcpConnection, index, generation };
        poller.add(socket.as_fd(), token.to_bits(), Interest::BothEdges)?;
        Ok(self.connections.insert(Connection::new(socket, state, wire)))
    }

    /// Handles a readiness event of one of this driver's descriptors.
    pub fn ready(&mut self, poller: &Poller, token: Token, readiness: &Readiness) {
        if token.source == Source::TcpListener {
            self.accept(poller);
            return;
        }
        let id = ConnectionId { index: token.index, generation: token.generation };
        if readiness.error && self.connections.is_current(id) {
            self.settle(id.index);
        }
        let Some(connection) = self.connections.get(id) else { return };
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
        let Some(connection) = self.connections.get(id) else { return };
        // On a connection with zero-copy sends, an error without an end is a notification.
        let failed = readiness.error && connection.writer.lending.lent().is_none();
        connection.reader.ended |= readiness.ended || failed;
        if readiness.readable {
            connection.reader.readable = true;
            self.rounds.ready.mark(id.index);
        }
        if readiness.writable {
            connection.writer.writable = true;
            if !connection.is_sent() {
                self.rounds.dirty.mark(id.index);
            }
        }
    }

    fn accept(&mut self, poller: &Poller) {
        for socket in self.acceptor.accept(poller) {
            // A refused connection is closed by its drop; the peer sees that and retries later.
            let address = net::peer_address(socket.as_fd()).map_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED), |at| at.ip());
            if net::set_nodelay(socket.as_fd()).is_ok()
                && let Ok(id) = self.add(poller, socket, State::Open, self.tls.wire_of_accepted())
            {
                if self.connections.awaits_handshake(id) {
                    self.tls.await_handshake(id, &self.connections);
                }
                self.events.push_back(Event::Accepted(id));
                if let Some(gone) =
                    self.unauthenticated.as_mut().and_then(|unauthenticated| unauthenticated.add(id, address))
                {
                    self.close(gone, CloseCause::Closed);
                }
            }
        }
    }

    /// Returns the next event. A connection counts as open, and its index is not reused, until its [`Event::Gone`] has
    /// been returned here.
    pub fn poll_event(&mut self) -> Option<Event> {
        let event = self.events.pop_front();
        if let Some(Event::Gone(id, _)) = &event {
            self.connections.free(*id);
        }
        event
    }

    /// Returns true if there is work that does not wait for an event.
    #[must_use]
    pub fn has_work(&self) -> bool {
        !self.events.is_empty() || !self.rounds.ready.is_empty() || !self.rounds.dirty.is_empty()
    }

    /// Marks recently active connections ready, so that [`Self::next_ready`] returns them: for a host that spins.
    /// Returns false if there are none; calling the poller is more useful then.
    pub fn try_active(&mut self) -> bool {
        let connections = &self.connections;
        let (tried, count) = self.active.next(|index| connections.at(index).is_some_and(Connection::expects));
        for &index in &tried[..count] {
            if let Some(connection) = self.connections.at_mut(index) {
                connection.reader.readable = true;
                self.rounds.ready.mark(index);
            }
        }
        count > 0
    }

    /// Returns the bytes sent and received since the last call of [`Self::take_moved_bytes`].
    #[must_use]
    pub const fn moved_bytes(&self) -> usize {
        self.moved_bytes
    }

    /// Returns and clears the bytes sent and received since the last call.
    pub const fn take_moved_bytes(&mut self) -> usize {
        core::mem::replace(&mut self.moved_bytes, 0)
    }

    /// Returns a connection that may have input; each is returned once until new bytes arrive.
    pub fn next_ready(&mut self) -> Option<ConnectionId> {
        while let Some(index) = self.rounds.ready.pop() {
            if let Some(connection) = self.connections.at_mut(index) {
                connection.reader.start_round();
                return Some(self.connections.id_at(index));
            }
        }
        None
    }

    /// Queues a frame, which the next [`Self::flush`] sends. Returns false if the connection is gone; the payload's
    /// hold is then reported by [`Event::Sent`].
    pub fn send(&mut self, id: ConnectionId, header: &Header, body: &[u8], payload: Option<OutgoingPayload>) -> bool {
        let Some(connection) = self.connections.get(id) else {
            if let Some(hold) = payload.and_then(|payload| payload.hold) {
                self.events.push_back(Event::Sent(hold));
            }
            return false;
        };
        let mut kept = self.output.take_spare();
        kept.extend_from_slice(body);
        let header = if connection.asks { connection.greeting(header, self.tls.mode()) } else { *header };
        connection.writer.push(Frame { header, body: kept, payload });
        if connection.asks {
            connection.awaited += u64::from(header.replies());
            self.active.touch(id.index);
        }
        if connection.writer.writable {
            self.rounds.dirty.mark(id.index);
        }
        true
    }

    /// Sends queued frames, and reschedules the connections that used up their budget of this round.
    pub fn flush(&mut self, poller: &Poller) {
        for _ in 0..self.rounds.dirty.len() {
            let Some(index) = self.rounds.dirty.pop() else { break };
            let id = self.connections.id_at(index);
            if self.connections.get(id).is_none() {
                continue;
            }
            self.transmit(id);
            if let Some(connection) = self.connections.at_mut(index)
                && connection.reader.paused
                && connection.backlog() < Limits::REPLIES_QUEUED / 2
            {
                connection.reader.paused = false;
                self.rounds.ready.mark(index);
            }
        }
        self.lose_patience();
        self.tls.start_round();
        while let Some((id, why)) = self.tls.next_late(&self.connections) {
            self.close(id, why);
        }
        while let Some(index) = self.rounds.again.pop() {
            if self.connections.at(index).is_some() {
                self.rounds.ready.mark(index);
            }
        }
        self.acceptor.resume(poller);
        if !self.closing.is_empty() {
            self.close_late();
        }
    }

    /// Closes the connections whose peers have not read their last frames in time.
    fn close_late(&mut self) {
        let now = Instant::now();
        while let Some(&(until, id)) = self.closing.front()
            && (until <= now || self.connections.get(id).is_none())
        {
            self.closing.pop_front();
            if let Some(why) = self.connections.get(id).and_then(|connection| connection.closing_after_send.take()) {
                self.close(id, why);
            }
        }
    }

    /// Closes a connection. [`Event::Gone`] follows the reports of its holds: at once, or when the kernel no longer
    /// refers to memory of zero-copy sends.
    pub fn close(&mut self, id: ConnectionId, why: CloseCause) {
        if self.connections.get(id).is_none() {
            return;
        }
        self.trust(id);
        self.active.forget(id.index);
        self.staging.forget(id.index);
        self.tls.forget(id.index);
        if self.end_lent(id, &why) {
            return;
        }
        let Some(mut connection) = self.connections.take_if(id.index, |_| true) else { return };
        // The shutdown reaches the peer even if a forked child still has the socket. Requests without a reply may be
        // repeated over another connection: the kernel must not deliver them later, after newer ones.
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
        self.events.extend(connection.writer.holds().map(Event::Sent));
        self.events.push_back(Event::Gone(id, why));
    }

    /// Sends queued frames, then closes the connection: for a rejection that the peer should read. A peer that does not
    /// read within two seconds is closed then.
    pub fn close_after_sending(&mut self, id: ConnectionId, why: CloseCause) {
        if self.connections.get(id).is_none() {
            return;
        }
        self.transmit(id);
        let Some(connection) = self.connections.get(id) else { return };
        let (quiet, first) = (connection.is_quiet(), connection.closing_after_send.is_none());
        connection.closing_after_send.get_or_insert_with(|| why.clone());
        if quiet {
            self.close(id, why);
        } else if first {
            let sent = connection.is_sent();
            self.closing.push_back((Instant::now() + LAST_WORDS, id));
            if sent {
                self.look_later(id.index, END_PATIENCE_NS);
            }
        }
    }

    /// Returns the number of connections whose [`Event::Gone`] was not taken yet.
    #[must_use]
    pub const fn open(&self) -> usize {
        self.connections.len()
    }

    /// Marks a connection ready for the next round: it has more input than its budget of this one.
    pub fn ready_again(&mut self, id: ConnectionId) {
        if self.connections.get(id).is_some() {
            self.rounds.again.push(id.index);
        }
    }
}

/// Ends connections that a driver makes from now on when data that it has sent is not acknowledged for so long, or
/// cannot be sent because the peer does not read. Without this call the kernel retransmits for many minutes.
pub fn limit_unacknowledged(tcp: &mut Tcp, within: Duration) {
    tcp.unacknowledged_ms = u32::try_from(within.as_millis()).unwrap_or(u32::MAX);
}

impl Default for Tcp {
    fn default() -> Self {
        Self::new(ZeroCopyOptions::default())
    }
}
