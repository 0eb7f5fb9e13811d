//! TCP over io_uring: frames both ways, payloads straight into their final memory.
//!
//! Each connection has at most one receive and one send in flight. Small frames are gathered: one send carries up to
//! [`MAX_VECTORS`] pieces of headers, bodies and payloads, and one receive may bring many frames. A payload that does
//! not fit the staging buffer is received in place; only what arrived together with its header is copied.
//!
//! The host calls [`Tcp::complete`] for each completion of the ring, then takes [`Tcp::poll_event`], then for each
//! connection of [`Tcp::next_ready`] takes [`Tcp::input`] until it says `Wait`, and at last [`Tcp::flush`].
//!
//! Invariant: a connection is reported as gone only when the ring holds no operation of it, so memory lent for its
//! payloads is free to use then. Thread affinity: the thread of the ring.

mod connection;
mod receive;
mod send;

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use connection::{Connection, State};
use kvplane_proto::Limits;
use kvplane_proto::frame::Header;
use kvplane_sys::{Completion, MAX_VECTORS, Ring, net};

use crate::token::{Source, Token};
use crate::types::{ConnectionId, Event, Gone, Outgoing};

const _: () = assert!(MAX_VECTORS >= 2);

/// How long no connection is accepted after the kernel refused to. A parked host comes by twice a second at least.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

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
    /// Connections that wait for frames: their receives are queued after the round's sends, which are what peers wait
    /// for.
    waiting: Vec<ConnectionId>,
    /// Kept for its memory.
    released: Vec<u64>,
    /// When to accept again, after the kernel refused to.
    accept_after: Option<Instant>,
    open: usize,
}

impl Tcp {
    /// A driver without connections.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            listener: None,
            connections: Vec::new(),
            generations: Vec::new(),
            free: Vec::new(),
            events: VecDeque::new(),
            ready: VecDeque::new(),
            dirty: VecDeque::new(),
            waiting: Vec::new(),
            released: Vec::new(),
            accept_after: None,
            open: 0,
        }
    }

    /// Accepts connections from this listener.
    ///
    /// # Errors
    /// When the ring has no room.
    pub fn listen(&mut self, ring: &mut Ring, listener: TcpListener) -> std::io::Result<()> {
        self.listener = Some(listener);
        self.arm_accept(ring)
    }

    fn arm_accept(&mut self, ring: &mut Ring) -> std::io::Result<()> {
        let Some(listener) = &self.listener else { return Ok(()) };
        let token = Token { source: Source::TcpListener, index: 0, generation: 0 };
        ring.accept(listener.as_fd(), token.to_bits()).map_err(std::io::Error::other)
    }

    /// Connects to a peer; [`Event::Connected`] or [`Event::Gone`] follows.
    ///
    /// # Errors
    /// When no socket can be had or the table is full.
    pub fn connect(&mut self, ring: &mut Ring, address: SocketAddr) -> std::io::Result<ConnectionId> {
        let stream = TcpStream::from(net::tcp_socket(address)?);
        let id = self.add(stream, State::Connecting)?;
        let token = Token { source: Source::TcpConnect, index: id.index, generation: id.generation };
        let connection = self.connections[id.index as usize].as_mut().expect("a connection that was just added");
        connection.connect_in_flight = true;
        let queued = ring.connect(connection.stream.as_fd(), address, token.to_bits());
        if queued.is_err() {
            connection.connect_in_flight = false;
            self.close(ring, id, Gone::Kernel(16));
        }
        Ok(id)
    }

    fn add(&mut self, stream: TcpStream, state: State) -> std::io::Result<ConnectionId> {
        if self.open >= Limits::CONNECTIONS {
            let text = format!("{} connections are open, which is the limit of a shard", Limits::CONNECTIONS);
            return Err(std::io::Error::other(text));
        }
        let connection = Connection::new(stream, state)?;
        let index = self.free.pop().unwrap_or_else(|| {
            self.connections.push(None);
            self.generations.push(0);
            self.connections.len() as u32 - 1
        });
        let generation = &mut self.generations[index as usize];
        *generation = generation.wrapping_add(1);
        self.connections[index as usize] = Some(connection);
        self.open += 1;
        Ok(ConnectionId { index, generation: *generation })
    }

    /// Takes a completion of one of this driver's operations.
    pub fn complete(&mut self, ring: &mut Ring, token: Token, completion: &Completion) {
        if token.source == Source::TcpListener {
            self.accepted(ring, completion);
            return;
        }
        let id = ConnectionId { index: token.index, generation: token.generation };
        if self.get(id).is_none() {
            return;
        }
        match token.source {
            Source::TcpConnect => self.connect_done(ring, id, completion.result),
            Source::TcpReceive => self.receive_done(ring, id, completion.result),
            Source::TcpSend => self.send_done(ring, id, completion.result),
            _ => {}
        }
        self.reap(id);
    }

    fn accepted(&mut self, ring: &mut Ring, completion: &Completion) {
        if let Some(socket) = ring.accepted(completion) {
            // A refused connection is closed by its drop; the peer sees that and tries again later.
            if net::set_nodelay(socket.as_fd()).is_ok()
                && let Ok(id) = self.add(TcpStream::from(socket), State::Open)
            {
                self.events.push_back(Event::Accepted(id));
                self.start_receive(ring, id);
            }
        }
        if completion.more {
            return;
        }
        // Out of descriptors, the next attempt fails like this one: not before some may have been closed.
        if completion.result < 0 || self.arm_accept(ring).is_err() {
            self.accept_after = Some(Instant::now() + ACCEPT_PAUSE);
        }
    }

    fn connect_done(&mut self, ring: &mut Ring, id: ConnectionId, result: i32) {
        let Some(connection) = self.get(id) else { return };
        connection.connect_in_flight = false;
        if connection.state != State::Connecting {
            return;
        }
        if result < 0 {
            self.close(ring, id, Gone::Kernel(-result));
            return;
        }
        connection.state = State::Open;
        self.events.push_back(Event::Connected(id));
        self.start_receive(ring, id);
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

    /// Whether [`Self::poll_event`] has something.
    #[must_use]
    pub fn has_event(&self) -> bool {
        !self.events.is_empty()
    }

    /// A connection that may have input; each is named once until new bytes arrive.
    pub fn next_ready(&mut self) -> Option<ConnectionId> {
        while let Some(index) = self.ready.pop_front() {
            if let Some(connection) = self.connections[index as usize].as_mut() {
                connection.ready = false;
                return Some(ConnectionId { index, generation: self.generations[index as usize] });
            }
        }
        None
    }

    /// Queues a frame. It leaves with the next [`Self::flush`]. False when the connection is gone; the payload's hold
    /// is then reported as sent.
    pub fn send(&mut self, id: ConnectionId, header: &Header, body: &[u8], payload: Option<Outgoing>) -> bool {
        let Some(connection) = self.get(id).filter(|connection| connection.state != State::Closing) else {
            if let Some(hold) = payload.and_then(|payload| payload.hold) {
                self.events.push_back(Event::Sent(hold));
            }
            return false;
        };
        connection.queue_frame(header, body, payload);
        if !connection.dirty {
            connection.dirty = true;
            self.dirty.push_back(id.index);
        }
        true
    }

    /// Starts sending what is queued, then receiving where nothing was left to take.
    pub fn flush(&mut self, ring: &mut Ring) {
        for _ in 0..self.dirty.len() {
            let Some(index) = self.dirty.pop_front() else { break };
            let generation = self.generations[index as usize];
            if let Some(connection) = self.connections[index as usize].as_mut() {
                connection.dirty = false;
                self.start_send(ring, ConnectionId { index, generation });
            }
        }
        if self.accept_after.is_some_and(|at| at <= Instant::now()) {
            let armed = self.arm_accept(ring).is_ok();
            self.accept_after = (!armed).then(|| Instant::now() + ACCEPT_PAUSE);
        }
        let mut waiting = core::mem::take(&mut self.waiting);
        for id in waiting.drain(..) {
            // The last receive brought less than was asked for, so the socket is empty, or it was just opened.
            let likely = self.get(id).is_some_and(|connection| connection.last_receive_full);
            self.start_receive_if(ring, id, likely);
        }
        self.waiting = waiting;
    }

    /// Ends a connection: its operations are cut short, and [`Event::Gone`] follows when the last has completed.
    pub fn close(&mut self, ring: &mut Ring, id: ConnectionId, why: Gone) {
        let Some(connection) = self.get(id) else { return };
        if connection.state == State::Closing {
            return;
        }
        connection.state = State::Closing;
        connection.gone = Some(why);
        // Queued but not yet submitted operations must reach the kernel while the descriptor is ours.
        let _ = ring.submit();
        let _ = connection.stream.shutdown(std::net::Shutdown::Both);
        if connection.connect_in_flight {
            let token = Token { source: Source::TcpConnect, index: id.index, generation: id.generation };
            let _ = ring.cancel(token.to_bits());
        }
        self.reap(id);
    }

    /// Sends what is queued, then closes: for a refusal that the peer should read.
    pub fn close_after_sending(&mut self, ring: &mut Ring, id: ConnectionId, why: Gone) {
        self.start_send(ring, id);
        let Some(connection) = self.get(id) else { return };
        if connection.send_in_flight && connection.closing_after_send.is_none() {
            connection.closing_after_send = Some(why);
        } else {
            self.close(ring, id, why);
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
        self.connections[id.index as usize].as_mut()
    }

    /// Frees a closing connection whose last operation has completed.
    fn reap(&mut self, id: ConnectionId) {
        let Some(connection) = self.get(id) else { return };
        if connection.state != State::Closing || connection.is_busy() {
            return;
        }
        let Some(connection) = self.connections[id.index as usize].take() else { return };
        for hold in connection.holds() {
            self.events.push_back(Event::Sent(hold));
        }
        self.events.push_back(Event::Gone(id, connection.gone.unwrap_or(Gone::Closed)));
    }

    /// Names a connection again in the next round: it has more input than its share of this one.
    pub fn ready_again(&mut self, id: ConnectionId) {
        if self.get(id).is_some() {
            self.mark_ready(id.index);
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
}

impl Default for Tcp {
    fn default() -> Self {
        Self::new()
    }
}
