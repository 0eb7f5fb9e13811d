//! Client side of Mooncake's protocol: client frames become requests to a stock engine, and its answers become frames.
//!
//! A connection is a lane of the client; the protocol has no handshake. A read or write of a segment carries the peer's
//! absolute address in its `offset`; the segment's id is ignored. All other operations are answered `Unsupported`.
//! Requests are answered in the order in which they were sent.
//!
//! The driver closes the gaps of the protocol:
//!
//! * *A write of version 1 has no answer.* The driver sends a read of its first byte behind it: the server handles
//!   requests in order, so that byte proves that the write is in place. `Ok` means visible, with every peer.
//! * *A rejected request ends its connection.* The requests behind it are not at fault: the driver reconnects and sends
//!   them again, and the client sees only the one failure. No byte of a rejected payload is sent after the client has
//!   received the rejection.
//! * *A server of version 1 rejects by closing the connection.* The oldest request is sent once more over another
//!   connection; if that closes too, the request's address is rejected.
//! * *A peer may announce version 2 and speak version 1.* Such a server treats a write as a read and its payload as
//!   requests, so the first write over a connection is preceded by a small read as a probe, unless an earlier answer
//!   has shown the version. If the peer speaks version 1, the driver remembers it and closes the lane with an error
//!   that names the version; the client's next lane uses version 1.
//!
//! Request deadlines are the client's: when one expires, the client resets the lane, and the driver does not access the
//! caller's memory from then on.

mod input;
mod lane;

use std::collections::{BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::os::fd::AsFd;

use kvplane_proto::frame::Header;
use kvplane_proto::message::{Kind as FrameKind, Operation};
use kvplane_proto::{Limits, Status};
use kvplane_sys::{Poller, net};
use lane::{Expect, Lane, SendOutcome, State};

use super::wire::Dialect;
use crate::table::Table;
use crate::token::{Source, Token};
use crate::turns::Turns;
use crate::types::{CloseCause, ConnectionId, Event, OutgoingPayload, Target};

/// Timeout for connecting, in nanoseconds.
const CONNECT_NS: u64 = 5_000_000_000;
/// Limit of remembered version 1 peers.
const PEERS_KNOWN: usize = 4_096;

/// Counters of the lanes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LaneCounters {
    /// Requests that a peer rejected.
    pub rejected: u64,
    /// Reconnects of the driver, after a rejection or after a version 1 server closed a connection.
    pub reconnects: u64,
    /// Peers that speak an older version than they announce.
    pub downgrades: u64,
}

/// All connections of one host to stock engines. Thread affinity: one thread at a time, the one that owns the poller.
pub struct Lanes {
    connections: Table<Lane>,
    /// Connections that may have something to send.
    due: Turns,
    events: VecDeque<Event>,
    /// Connections that may have input to take.
    ready: Turns,
    /// Peers that speak version 1, whatever they announce. A server of version 2 understands version 1 too.
    older: BTreeSet<SocketAddr>,
    counters: LaneCounters,
    /// Lower bound of the deadlines of all connections.
    deadline_ns: Option<u64>,
    now_ns: u64,
}

impl Lanes {
    /// Creates a driver without connections.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            connections: Table::new(),
            due: Turns::new(),
            events: VecDeque::new(),
            ready: Turns::new(),
            older: BTreeSet::new(),
            counters: LaneCounters { rejected: 0, reconnects: 0, downgrades: 0 },
            deadline_ns: None,
            now_ns: 0,
        }
    }

    /// Connects to a peer that announces `dialect`; [`Event::Connected`] or [`Event::Gone`] follows.
    ///
    /// # Errors
    /// When no socket is available or too many connections are open.
    pub fn connect(
        &mut self,
        poller: &Poller,
        address: SocketAddr,
        dialect: Dialect,
        now_ns: u64,
    ) -> std::io::Result<ConnectionId> {
        self.now_ns = now_ns;
        if self.connections.len() >= Limits::CONNECTIONS {
            let text = format!("{} connections are open, which is the limit", Limits::CONNECTIONS);
            return Err(std::io::Error::other(text));
        }
        let dialect = if self.older.contains(&address) { Dialect::V1 } else { dialect };
        let until_ns = now_ns.saturating_add(CONNECT_NS);
        // The token needs the index in the table, so the socket is registered after the insertion.
        let socket = net::tcp_socket(address)?;
        kvplane_sys::stream::start_connect(socket.as_fd(), address)?;
        let id = self.connections.insert(Lane::new(address, socket.into(), dialect, until_ns));
        let Some(connection) = self.connections.get_mut(id) else { return Ok(id) };
        let interest = kvplane_sys::Interest::BothEdges;
        if let Err(error) = poller.add(connection.stream.as_fd(), token(id).to_bits(), interest) {
            self.connections.take(id);
            self.connections.free(id);
            return Err(error);
        }
        self.alarm(until_ns);
        Ok(id)
    }

    /// Handles a readiness event of the poller for the socket of this token.
    pub fn ready(&mut self, token: Token, readable: bool, writable: bool) {
        let id = ConnectionId { index: token.index, generation: token.generation };
        if readable {
            self.mark_ready(id);
        }
        if writable {
            self.mark_due(id);
        }
    }

    /// Queues a client frame. Its request is sent by the next [`Self::flush`]. Returns false if the connection is gone;
    /// the payload's hold is then reported by [`Event::Sent`].
    pub fn send(&mut self, id: ConnectionId, header: &Header, body: &[u8], payload: Option<OutgoingPayload>) -> bool {
        let Some(connection) = self.connections.get_mut(id) else {
            self.events.extend(payload.and_then(|payload| payload.hold).map(Event::Sent));
            return false;
        };
        let FrameKind::Request(operation) = header.kind else { return true };
        match operation {
            Operation::Read => connection.read(header, body),
            Operation::Write => {
                if let Some(unused) = connection.write(header, body, payload) {
                    self.events.extend(unused.hold.map(Event::Sent));
                }
            }
            _ => {
                self.events.extend(payload.and_then(|payload| payload.hold).map(Event::Sent));
                connection.answer(operation, header, Status::Unsupported);
            }
        }
        if !connection.replies.is_empty() {
            self.mark_ready(id);
        }
        self.mark_due(id);
        true
    }

    fn mark_ready(&mut self, id: ConnectionId) {
        if self.connections.get(id).is_some() {
            self.ready.mark(id.index);
        }
    }

    fn mark_due(&mut self, id: ConnectionId) {
        if self.connections.get(id).is_some() {
            self.due.mark(id.index);
        }
    }

    /// Sends the queued requests. Returns true if there was work.
    pub fn flush(&mut self, poller: &Poller, now_ns: u64) -> bool {
        self.now_ns = now_ns;
        let mut progress = false;
        for _ in 0..self.due.len() {
            let Some(index) = self.due.pop() else { break };
            let id = self.connections.id_at(index);
            let Some(connection) = self.connections.get_mut(id) else { continue };
            progress = true;
            if let State::Connecting { again, .. } = connection.state {
                match net::take_socket_error(connection.stream.as_fd()) {
                    Ok(None) if net::peer_address(connection.stream.as_fd()).is_ok() => {
                        connection.state = State::Open;
                        self.events.extend((!again).then_some(Event::Connected(id)));
                        // Input that arrived before was not read.
                        self.mark_ready(id);
                    }
                    // The connection attempt is not decided yet.
                    Ok(None) => continue,
                    Ok(Some(error)) | Err(error) => {
                        self.close(poller, id, CloseCause::Kernel(error.raw_os_error().unwrap_or(0)));
                        continue;
                    }
                }
            }
            if let Some(SendOutcome::Again) = self.connections.get_mut(id).map(Lane::send) {
                self.mark_due(id);
            }
        }
        if self.poll_timeout().is_some_and(|at_ns| at_ns <= now_ns) {
            self.expire(poller, now_ns);
        }
        progress
    }

    /// Returns the next event. [`Event::Sent`] of a request precedes its answer: the host takes all events after each
    /// [`Self::input`] and before it handles the frame. The index of a connection is not reused until its
    /// [`Event::Gone`] has been returned here.
    pub fn poll_event(&mut self) -> Option<Event> {
        let event = self.events.pop_front();
        if let Some(Event::Gone(id, _)) = &event {
            self.connections.free(*id);
        }
        event
    }

    /// Returns a connection that may have input; each is returned once until new bytes arrive.
    pub fn next_ready(&mut self) -> Option<ConnectionId> {
        while let Some(index) = self.ready.pop() {
            if self.connections.at(index).is_some() {
                return Some(self.connections.id_at(index));
            }
        }
        None
    }

    /// Returns the number of connections that may have input.
    #[must_use]
    pub fn ready_len(&self) -> usize {
        self.ready.len()
    }

    /// Marks a connection ready again: it has more input than its budget of this round.
    pub fn ready_again(&mut self, id: ConnectionId) {
        self.mark_ready(id);
    }

    /// Returns true if there is work that does not wait for the poller.
    #[must_use]
    pub fn has_work(&self) -> bool {
        !self.events.is_empty() || !self.ready.is_empty() || !self.due.is_empty()
    }

    /// Returns the latest time for the next call of [`Self::flush`], in nanoseconds.
    #[must_use]
    pub const fn poll_timeout(&self) -> Option<u64> {
        self.deadline_ns
    }

    /// Lowers the next deadline to `at_ns`.
    fn alarm(&mut self, at_ns: u64) {
        self.deadline_ns = Some(self.deadline_ns.map_or(at_ns, |deadline_ns| deadline_ns.min(at_ns)));
    }

    /// Sets the destination of the payload of the last frame. [`Self::input`] then receives it.
    ///
    /// # Panics
    /// When no payload is expected or the memory does not have its length.
    pub fn receive_payload(&mut self, id: ConnectionId, target: Target) {
        let Some(connection) = self.connections.get_mut(id) else { return };
        let Expect::Decision { bytes } = connection.expect else {
            panic!("a payload destination was set although no payload is expected");
        };
        let buffer = match target {
            Target::Discard => None,
            // The protocol carries no checksum to compare with.
            Target::Memory { buffer, .. } => Some(buffer),
            Target::Scatter { .. } => panic!("the answer to a read of one range goes to one place"),
        };
        if let Some(buffer) = &buffer {
            assert_eq!(buffer.bytes() as u64, bytes, "memory of another length than the payload's");
        }
        connection.expect = Expect::Payload { buffer, left_bytes: bytes };
    }

    /// Closes a connection. Its memory is free when this returns; [`Event::Gone`] follows.
    pub fn close(&mut self, poller: &Poller, id: ConnectionId, why: CloseCause) {
        let Some(connection) = self.connections.take(id) else { return };
        let _ = poller.remove(connection.stream.as_fd());
        if !connection.queue.is_empty() {
            // No byte of an abandoned write may arrive later and overwrite a newer one.
            let _ = net::abort(connection.stream.as_fd());
        }
        self.events.extend(connection.queue.into_iter().filter_map(|entry| entry.hold).map(Event::Sent));
        self.events.push_back(Event::Gone(id, why));
    }

    /// Returns the number of connections whose [`Event::Gone`] was not taken yet.
    #[must_use]
    pub const fn open(&self) -> usize {
        self.connections.len()
    }

    /// Returns the counters.
    #[must_use]
    pub const fn counters(&self) -> &LaneCounters {
        &self.counters
    }

    fn expire(&mut self, poller: &Poller, now_ns: u64) {
        let late = self
            .connections
            .iter()
            .filter(|(_, connection)| connection.deadline_ns().is_some_and(|at_ns| at_ns <= now_ns));
        let late: Vec<ConnectionId> = late.map(|(id, _)| id).collect();
        for id in late {
            match self.connections.get_mut(id).map(|connection| (&connection.expect, connection.address)) {
                Some((Expect::Status { .. }, address)) => self.downgrade(poller, id, address),
                Some((_, address)) => {
                    let seconds = CONNECT_NS / 1_000_000_000;
                    self.close(poller, id, CloseCause::Setup(format!("{address} did not answer within {seconds} s")));
                }
                None => {}
            }
        }
        self.deadline_ns = self.connections.iter().filter_map(|(_, connection)| connection.deadline_ns()).min();
    }

    /// Records that the peer speaks version 1 although it announced version 2, and closes the lane.
    fn downgrade(&mut self, poller: &Poller, id: ConnectionId, address: SocketAddr) {
        self.counters.downgrades += 1;
        if self.older.len() >= PEERS_KNOWN {
            self.older.pop_first();
        }
        self.older.insert(address);
        let text = format!(
            "{address} answers in version 1 of Mooncake's data protocol although it announces version 2: \
             version 1 is used from now on"
        );
        self.close(poller, id, CloseCause::Setup(text));
    }
}

impl Default for Lanes {
    fn default() -> Self {
        Self::new()
    }
}

const fn token(id: ConnectionId) -> Token {
    Token { source: Source::MooncakeLane, index: id.index, generation: id.generation }
}
