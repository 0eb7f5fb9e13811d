//! TLS of a driver: what the first byte says, handshakes, and records on their way in.
//!
//! Records arrive in a place that all connections of a driver share, as frames do: it belongs to the one that receives,
//! and what that one has not opened moves out when another needs the place. Each is opened where it lies and its bytes
//! are put where they belong: a payload's into its memory, others into the staging of frames. One is opened at a time,
//! so that a payload's bytes are not in the staging before the host has said where they go.
//!
//! Bounded: of a peer that is not known yet a part of a handshake is kept, some handshakes go on in a round, and each
//! has a deadline.

use std::collections::{BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_proto::Limits;
use kvplane_sys::Scatter;
use kvplane_tls::{DataTls, FIRST_BYTE, HANDSHAKE_BYTES, Handshake, Keychain, RECORD_BYTES};

use super::connections::Connections;
use super::sealed::{SealedStream, Wire};
use super::staging::Staging;
use crate::types::{CloseCause, ConnectionId};

/// Bytes of records received at once.
const ASK_BYTES: usize = 128 << 10;
/// The place for them: behind a part of a record or of a handshake.
const ARRIVED_BYTES: usize = ASK_BYTES + HANDSHAKE_BYTES + RECORD_BYTES;
/// The same while it is not known whether TLS comes, and in handshakes.
const FIRST_BYTES: usize = 16 << 10;
/// How long a handshake may take, and a peer that connects may be silent: as long as for a greeting.
const PATIENCE: Duration = Duration::from_nanos(Limits::HELLO_NS);
/// Steps of handshakes in a round: each may be half a millisecond.
const STEPS_PER_ROUND: u32 = 4;
/// Addresses remembered of peers that want TLS.
const ADDRESSES: usize = 4096;

/// What a driver knows of TLS.
pub(super) struct Tls {
    keychain: Option<Arc<Keychain>>,
    /// Where records arrive.
    arrived: Staging,
    /// Peers that want TLS where we would do without.
    wanted_by: BTreeSet<SocketAddr>,
    /// Handshakes, and peers that have said nothing, with the end of their time; the oldest first. Some are done.
    begun: VecDeque<(Instant, ConnectionId)>,
    steps_left: u32,
    /// A record's plain bytes, side by side.
    pub(super) plain: Vec<u8>,
}

/// What is to be done about a connection's input.
pub(super) enum Turn {
    /// Something was opened: look again.
    Opened,
    /// More has to be received.
    Receive,
    /// Not in this round.
    Later,
    /// A step of the handshake was done, or all of it.
    Stepped { done: bool },
}

impl Tls {
    pub(super) const fn new() -> Self {
        Self {
            keychain: None,
            arrived: Staging::new(ARRIVED_BYTES),
            wanted_by: BTreeSet::new(),
            begun: VecDeque::new(),
            steps_left: STEPS_PER_ROUND,
            plain: Vec::new(),
        }
    }

    /// Seals connections as this says, with what is in it when they begin.
    pub(super) fn set(&mut self, keychain: Arc<Keychain>) {
        self.keychain = Some(keychain);
    }

    pub(super) fn mode(&self) -> DataTls {
        self.keychain.as_ref().map_or(DataTls::Off, |keychain| keychain.mode())
    }

    /// How the bytes of a peer that connects to us are on the wire.
    pub(super) fn wire_of_accepted(&self) -> Wire {
        if self.mode() == DataTls::Off { Wire::Plain } else { Wire::Unknown }
    }

    /// How the bytes are on the wire of a connection that we began, to this address.
    pub(super) fn wire_to(&self, address: Option<SocketAddr>) -> Result<Wire, CloseCause> {
        let wanted = match self.mode() {
            DataTls::Off => false,
            DataTls::Offer => address.is_some_and(|address| self.wanted_by.contains(&address)),
            DataTls::Require => true,
        };
        let Some(keychain) = self.keychain.as_ref().filter(|_| wanted) else { return Ok(Wire::Plain) };
        let handshake = Handshake::client(keychain).map_err(|error| CloseCause::Tls(error.to_string()))?;
        Ok(Wire::Tls(SealedStream::new(handshake)))
    }

    /// This peer wants TLS.
    pub(super) fn learn(&mut self, address: Option<SocketAddr>) {
        if self.wanted_by.len() >= ADDRESSES {
            self.wanted_by.clear();
        }
        self.wanted_by.extend(address);
    }

    /// The connection at this position is gone.
    pub(super) fn forget(&mut self, index: u32) {
        self.arrived.forget(index);
    }

    /// Gives a handshake that has not begun or is not done its time.
    pub(super) fn await_handshake(&mut self, id: ConnectionId, connections: &Connections) {
        if self.begun.len() >= 2 * Limits::CONNECTIONS {
            self.begun.retain(|(_, id)| connections.awaits_handshake(*id));
        }
        self.begun.push_back((Instant::now() + PATIENCE, id));
    }

    /// Another round has begun: handshakes go on.
    pub(super) const fn start_round(&mut self) {
        self.steps_left = STEPS_PER_ROUND;
    }

    /// A connection whose handshake takes too long, if there is one, and why it ends.
    pub(super) fn next_late(&mut self, connections: &Connections) -> Option<(ConnectionId, CloseCause)> {
        while let Some(&(until, id)) = self.begun.front() {
            let open = connections.awaits_handshake(id);
            if open && until > Instant::now() {
                return None;
            }
            self.begun.pop_front();
            if open {
                let seconds = PATIENCE.as_secs();
                return Some((id, CloseCause::Tls(format!("the TLS handshake was not done after {seconds} s"))));
            }
        }
        None
    }

    /// Receives records once, as [`super::reader::Reader::receive`] does frames. How many bytes came; none when the
    /// socket has nothing.
    pub(super) fn receive(&mut self, index: u32, connections: &mut Connections) -> Result<Option<usize>, CloseCause> {
        connections.claim_sealed(index, &mut self.arrived);
        let Some(connection) = connections.at_mut(index) else { return Ok(None) };
        let agreed = connection.is_agreed();
        let mut scatter = Scatter::new();
        scatter.push_bytes(self.arrived.room(if agreed { ASK_BYTES } else { FIRST_BYTES }));
        let asked = scatter.bytes();
        let received = scatter.receive(connection.socket.as_fd());
        if matches!(received, Ok(0)) && !agreed && connection.asks {
            let text = "the peer ended the connection in the TLS handshake; if its --data-tls is off, start it with \
                        offer or require";
            return Err(CloseCause::Tls(text.to_owned()));
        }
        let received = connection.reader.received(received, asked)?;
        self.arrived.filled(received.unwrap_or(0));
        Ok(received)
    }

    /// Goes on with what came: looks at the first byte, does a step of the handshake, or opens a record.
    pub(super) fn open_next(
        &mut self,
        index: u32,
        connections: &mut Connections,
        staging: &mut Staging,
    ) -> Result<Turn, CloseCause> {
        let owns = self.arrived.is_owner(index);
        let Some(connection) = connections.at_mut(index) else { return Ok(Turn::Receive) };
        match &connection.wire {
            Wire::Plain => Ok(Turn::Receive),
            Wire::Unknown if !owns => Ok(Turn::Receive),
            Wire::Unknown => self.look_at_first_byte(index, connections, staging),
            Wire::Tls(sealed) if !owns && !sealed.has_arrived() => Ok(Turn::Receive),
            Wire::Tls(_) => {
                connections.claim_sealed(index, &mut self.arrived);
                if self.arrived.unread().is_empty() {
                    return Ok(Turn::Receive);
                }
                if connections.at_mut(index).is_some_and(|connection| !connection.is_agreed()) {
                    return self.step(index, connections);
                }
                self.open_record(index, connections, staging)
            }
        }
    }

    fn look_at_first_byte(
        &mut self,
        index: u32,
        connections: &mut Connections,
        staging: &mut Staging,
    ) -> Result<Turn, CloseCause> {
        let Some(&first) = self.arrived.unread().first() else { return Ok(Turn::Receive) };
        if first == FIRST_BYTE
            && let Some(keychain) = &self.keychain
        {
            let handshake = Handshake::server(keychain).map_err(|error| CloseCause::Tls(error.to_string()))?;
            if let Some(connection) = connections.at_mut(index) {
                connection.wire = Wire::Tls(SealedStream::new(handshake));
            }
            return Ok(Turn::Opened);
        }
        // What came is the beginning of frames.
        let came = self.arrived.unread().to_vec();
        self.arrived.forget(index);
        connections.claim(index, staging);
        staging.take(&came)?;
        let refused = self.mode() == DataTls::Require;
        if let Some(connection) = connections.at_mut(index) {
            (connection.wire, connection.must_be_refused) = (Wire::Plain, refused);
        }
        Ok(Turn::Opened)
    }

    /// The first step of a handshake that we begin. It costs little, so it is not one of the round's.
    pub(super) fn step_first(&mut self, index: u32, connections: &mut Connections) -> Result<Turn, CloseCause> {
        self.steps_left += 1;
        self.step(index, connections)
    }

    /// A step of a handshake, of which there are few in a round where we did not ask for it.
    fn step(&mut self, index: u32, connections: &mut Connections) -> Result<Turn, CloseCause> {
        connections.claim_sealed(index, &mut self.arrived);
        let Some(connection) = connections.at_mut(index) else { return Ok(Turn::Receive) };
        let Wire::Tls(sealed) = &mut connection.wire else { return Ok(Turn::Receive) };
        if !sealed.can_step(&self.arrived) {
            return Ok(Turn::Receive);
        }
        if self.steps_left == 0 {
            return Ok(Turn::Later);
        }
        self.steps_left -= 1;
        sealed.step(&connection.socket, &mut self.arrived).map(|done| Turn::Stepped { done })
    }

    /// Opens a record and puts its bytes where they belong.
    fn open_record(
        &mut self,
        index: u32,
        connections: &mut Connections,
        staging: &mut Staging,
    ) -> Result<Turn, CloseCause> {
        connections.claim(index, staging);
        let Some(connection) = connections.at_mut(index) else { return Ok(Turn::Receive) };
        let Wire::Tls(sealed) = &mut connection.wire else { return Ok(Turn::Receive) };
        let payload = connection.reader.payload();
        let opened = sealed.open(&mut self.arrived, |mut plain| {
            if let Some(payload) = payload {
                let here = payload.left_bytes.min(plain.len() as u64) as usize;
                payload.put(&plain[..here]);
                plain = &plain[here..];
            }
            staging.take(plain)
        })?;
        Ok(if opened { Turn::Opened } else { Turn::Receive })
    }
}
