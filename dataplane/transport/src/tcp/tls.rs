//! TLS of a driver: detection by the first byte, handshakes, and received records.
//!
//! Records are received into a staging that all connections of a driver share, like that of frames: the receiving
//! connection owns it, and its unread bytes move out when another one needs it. Each record is decrypted in place and
//! its bytes are copied to their destination: a payload's into its memory, others into the staging of frames. Records
//! are decrypted one at a time, so that no byte of a payload is in the staging before the host has named its
//! destination.
//!
//! Bounded: of an unauthenticated peer only a part of a handshake is buffered, the number of handshake steps per round
//! is limited, and each handshake has a deadline.

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

/// Receive size of records, in bytes.
const ASK_BYTES: usize = 128 << 10;
/// Size of the staging in bytes: room behind a part of a record or of a handshake.
const ARRIVED_BYTES: usize = ASK_BYTES + HANDSHAKE_BYTES + RECORD_BYTES;
/// Receive size before TLS is detected, and in handshakes, in bytes.
const FIRST_BYTES: usize = 16 << 10;
/// Timeout of a handshake, and of the first byte of a peer that connects: that of a greeting.
const PATIENCE: Duration = Duration::from_nanos(Limits::HELLO_NS);
/// Limit of handshake steps in a round: each may take half a millisecond.
const STEPS_PER_ROUND: u32 = 4;
/// Limit of remembered addresses of peers that require TLS.
const ADDRESSES: usize = 4096;

/// TLS state of a driver.
pub(super) struct Tls {
    keychain: Option<Arc<Keychain>>,
    /// Receive staging of records.
    arrived: Staging,
    /// Peers that require TLS while our mode would allow plaintext.
    wanted_by: BTreeSet<SocketAddr>,
    /// Deadlines of handshakes and of silent peers, oldest first. Some have completed.
    begun: VecDeque<(Instant, ConnectionId)>,
    steps_left: u32,
    /// Scratch buffer: the plaintext of one record.
    pub(super) plain: Vec<u8>,
}

/// Next step of a connection's input.
pub(super) enum Turn {
    /// A record was decrypted: check for input again.
    Opened,
    /// More bytes have to be received.
    Receive,
    /// The budget of this round is used up.
    Later,
    /// A step of the handshake was run; `done` if it was the last.
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

    /// Sets the TLS keys and mode; connections use the keychain's contents at the time they begin.
    pub(super) fn set(&mut self, keychain: Arc<Keychain>) {
        self.keychain = Some(keychain);
    }

    pub(super) fn mode(&self) -> DataTls {
        self.keychain.as_ref().map_or(DataTls::Off, |keychain| keychain.mode())
    }

    /// Returns the initial encoding of an accepted connection.
    pub(super) fn wire_of_accepted(&self) -> Wire {
        if self.mode() == DataTls::Off { Wire::Plain } else { Wire::Unknown }
    }

    /// Returns the encoding of an outgoing connection to this address.
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

    /// Records that this peer requires TLS.
    pub(super) fn learn(&mut self, address: Option<SocketAddr>) {
        if self.wanted_by.len() >= ADDRESSES {
            self.wanted_by.clear();
        }
        self.wanted_by.extend(address);
    }

    /// Drops the bytes of a connection that is gone.
    pub(super) fn forget(&mut self, index: u32) {
        self.arrived.forget(index);
    }

    /// Starts the timeout of a handshake that is not complete.
    pub(super) fn await_handshake(&mut self, id: ConnectionId, connections: &Connections) {
        if self.begun.len() >= 2 * Limits::CONNECTIONS {
            self.begun.retain(|(_, id)| connections.awaits_handshake(*id));
        }
        self.begun.push_back((Instant::now() + PATIENCE, id));
    }

    /// Resets the budget of handshake steps for a new round.
    pub(super) const fn start_round(&mut self) {
        self.steps_left = STEPS_PER_ROUND;
    }

    /// Returns a connection whose handshake has timed out, if any, with its close cause.
    pub(super) fn next_late(&mut self, connections: &Connections) -> Option<(ConnectionId, CloseCause)> {
        while let Some(&(until, id)) = self.begun.front() {
            let open = connections.awaits_handshake(id);
            if open && until > Instant::now() {
                return None;
            }
            self.begun.pop_front();
            if open {
                let seconds = PATIENCE.as_secs();
                return Some((id, CloseCause::Tls(format!("the TLS handshake did not complete within {seconds} s"))));
            }
        }
        None
    }

    /// Receives records once, like [`super::reader::Reader::receive`]. Returns the number of bytes, or `None` if the
    /// socket is drained.
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

    /// Handles received bytes: inspects the first byte, runs a step of the handshake, or decrypts a record.
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
        // The received bytes are the beginning of frames.
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

    /// Runs the first step of an outgoing handshake. It costs little and does not count against the round's budget.
    pub(super) fn step_first(&mut self, index: u32, connections: &mut Connections) -> Result<Turn, CloseCause> {
        self.steps_left += 1;
        self.step(index, connections)
    }

    /// Runs a step of a handshake, within the round's budget.
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

    /// Decrypts a record and copies its bytes to their destination.
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
