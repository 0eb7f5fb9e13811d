//! TLS on a connection: what the first byte says, the handshake, and records on their way in.
//!
//! Records arrive in a place that all connections of a driver share, as frames do: it belongs to the one that receives,
//! and what that one has not opened moves out when another needs the place. Each is opened where it lies and its bytes
//! are put where they belong: a payload's into its memory, others into the staging of frames. One is opened at a time,
//! so that a payload's bytes are not in the staging before the host has said where they go.
//!
//! Bounded: of a peer that is not known yet a part of a handshake is kept, some handshakes go on in a round, and each
//! has a deadline.

use std::collections::{BTreeSet, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvplane_proto::frame::Header;
use kvplane_proto::message::{Kind, Operation};
use kvplane_proto::status::Status;
use kvplane_proto::{FrameFlags, Limits};
use kvplane_sys::{Gather, Scatter, net};
use kvplane_tls::{
    DataTls, FIRST_BYTE, HANDSHAKE_BYTES, Handshake, Keychain, OpenedRecord, RECORD_BYTES, Session, Step,
};

use super::Tcp;
use super::connection::{Connection, Expect};
use super::receive::Staging;
use crate::types::{CloseCause, ConnectionId, Event};

/// Bytes of records received at once.
const ASK_BYTES: usize = 128 << 10;
/// The place for them: behind a part of a record or of a handshake.
const ARRIVED_BYTES: usize = ASK_BYTES + HANDSHAKE_BYTES + RECORD_BYTES;
/// Asked for while it is not known whether TLS comes, and in handshakes.
const FIRST_BYTES: usize = 16 << 10;
/// How long a handshake may take, and a peer that connects may be silent: as long as for a greeting.
const PATIENCE: Duration = Duration::from_nanos(Limits::HELLO_NS);
/// Steps of handshakes in a round: each may be half a millisecond.
const STEPS_PER_ROUND: u32 = 4;
/// Addresses remembered of peers that want TLS.
const ADDRESSES: usize = 4096;

/// How bytes are on the wire.
pub(super) enum Wire {
    /// As they are.
    Plain,
    /// The peer has connected and its first byte says.
    Unknown,
    /// In records.
    Tls(Box<SealedStream>),
}

pub(super) struct SealedStream {
    stage: Stage,
    /// What came and was not used, while another connection has the shared place.
    arrived: Vec<u8>,
    /// Records that the kernel has not taken, the first of them in part.
    leaving: VecDeque<Vec<u8>>,
    leaving_at: usize,
    /// How many bytes had come and were not used when the handshake was last gone on with.
    stepped_at: Option<usize>,
}

enum Stage {
    Handshake(Box<Handshake>),
    Session(Box<Session>),
    /// It has failed, and the connection is about to be closed.
    Failed,
}

impl SealedStream {
    fn new(handshake: Box<Handshake>) -> Box<Self> {
        let stage = Stage::Handshake(handshake);
        Box::new(Self { stage, arrived: Vec::new(), leaving: VecDeque::new(), leaving_at: 0, stepped_at: None })
    }

    pub(super) const fn session(&mut self) -> Option<&mut Session> {
        match &mut self.stage {
            Stage::Session(session) => Some(session),
            Stage::Handshake(_) | Stage::Failed => None,
        }
    }

    /// Whether the kernel has taken everything.
    pub(super) fn has_left(&self) -> bool {
        self.leaving.is_empty()
    }

    /// Seals these bytes, at most a record's. How many bytes that is on the wire.
    pub(super) fn seal(&mut self, plain: &[u8]) -> Result<usize, CloseCause> {
        let Stage::Session(session) = &mut self.stage else { return Ok(0) };
        let (leaving, mut bytes) = (&mut self.leaving, 0);
        let sealed = session.seal(plain, |record| {
            bytes += record.len();
            leaving.push_back(record);
        });
        sealed.map_err(|error| CloseCause::Tls(error.to_string()))?;
        Ok(bytes)
    }

    /// One call. How many bytes left, and whether that was all it was given.
    pub(super) fn send(&mut self, socket: &impl AsFd) -> io::Result<(usize, bool)> {
        if self.leaving.is_empty() {
            return Ok((0, true));
        }
        let mut gather = Gather::new();
        for (position, record) in self.leaving.iter().enumerate() {
            if gather.is_full() {
                break;
            }
            gather.push_bytes(if position == 0 { &record[self.leaving_at..] } else { record });
        }
        let bytes = gather.send(socket.as_fd())?;
        let all = bytes == gather.bytes();
        self.leaving_at += bytes;
        while let Some(record) = self.leaving.pop_front_if(|record| record.len() <= self.leaving_at) {
            self.leaving_at -= record.len();
        }
        if self.leaving.is_empty() {
            self.leaving = VecDeque::new();
        }
        Ok((bytes, all))
    }

    /// Tells the peer that no more comes, as far as it goes: frames say their lengths, so nothing depends on it.
    pub(super) fn say_goodbye(&mut self, socket: &impl AsFd) {
        if self.has_left()
            && let Some(Ok(record)) = self.session().map(Session::close)
        {
            self.leaving.push_back(record);
            let _ = self.send(socket);
        }
    }
}

/// Where records arrive.
pub(super) struct RecordInput {
    /// Allocated with the first byte.
    bytes: Vec<u8>,
    owner: Option<u32>,
    start: usize,
    end: usize,
}

/// What a driver knows of TLS.
pub(super) struct Tls {
    keychain: Option<Arc<Keychain>>,
    arrived: RecordInput,
    /// Peers that want TLS where we would do without.
    wanted_by: BTreeSet<SocketAddr>,
    /// Handshakes, and peers that have said nothing, with the end of their time; the oldest first. Some are done.
    begun: VecDeque<(Instant, ConnectionId)>,
    steps_left: u32,
    /// A record's plain bytes, side by side.
    pub(super) plain: Vec<u8>,
}

impl Tls {
    pub(super) fn new() -> Self {
        let arrived = RecordInput { bytes: Vec::new(), owner: None, start: 0, end: 0 };
        let (wanted_by, begun) = (BTreeSet::new(), VecDeque::new());
        Self { keychain: None, arrived, wanted_by, begun, steps_left: STEPS_PER_ROUND, plain: Vec::new() }
    }

    pub(super) fn mode(&self) -> DataTls {
        self.keychain.as_ref().map_or(DataTls::Off, |keychain| keychain.mode())
    }

    /// How the bytes of a peer that connects to us are on the wire.
    pub(super) fn wire_of_accepted(&self) -> Wire {
        if self.mode() == DataTls::Off { Wire::Plain } else { Wire::Unknown }
    }

    pub(super) fn forget(&mut self, index: u32) {
        if self.arrived.owner == Some(index) {
            (self.arrived.owner, self.arrived.start, self.arrived.end) = (None, 0, 0);
        }
    }
}

/// What is to be done about a connection's input.
pub(super) enum Turn {
    /// Something was opened: look again.
    Opened,
    /// More has to be received.
    Receive,
    /// Not in this round.
    Later,
}

impl Tcp {
    /// Seals connections as this says, with what is in it when they begin.
    pub fn set_tls(&mut self, keychain: Arc<Keychain>) {
        self.tls.keychain = Some(keychain);
    }

    /// A connection that we asked for is there: plainly, or a handshake begins on it.
    pub(super) fn opened(&mut self, id: ConnectionId) {
        let Some(connection) = self.get(id) else { return };
        let address = net::peer_address(connection.socket.as_fd()).ok();
        let wanted = match self.tls.mode() {
            DataTls::Off => false,
            DataTls::Offer => address.is_some_and(|address| self.tls.wanted_by.contains(&address)),
            DataTls::Require => true,
        };
        let Some(keychain) = self.tls.keychain.clone().filter(|_| wanted) else {
            self.events.push_back(Event::Connected(id));
            return;
        };
        match Handshake::client(&keychain) {
            Ok(handshake) => {
                if let Some(connection) = self.get(id) {
                    connection.wire = Wire::Tls(SealedStream::new(handshake));
                }
                self.await_handshake(id);
                // Its first words cost little.
                self.tls.steps_left += 1;
                if let Err(why) = self.step(id) {
                    self.close(id, why);
                }
            }
            Err(error) => self.close(id, CloseCause::Tls(error.to_string())),
        }
    }

    /// Gives a handshake that has not begun or is not done its time.
    pub(super) fn await_handshake(&mut self, id: ConnectionId) {
        if self.tls.begun.len() >= 2 * Limits::CONNECTIONS {
            let (connections, generations) = (&self.connections, &self.generations);
            self.tls.begun.retain(|(_, id)| {
                let connection = connections[id.index as usize].as_ref();
                generations[id.index as usize] == id.generation && connection.is_some_and(|one| !one.is_agreed())
            });
        }
        self.tls.begun.push_back((Instant::now() + PATIENCE, id));
    }

    /// Another round has begun: handshakes go on, and end that take too long.
    pub(super) fn watch_handshakes(&mut self) {
        self.tls.steps_left = STEPS_PER_ROUND;
        while let Some(&(until, id)) = self.tls.begun.front() {
            let open = self.get(id).is_some_and(|connection| !connection.is_agreed());
            if open && until > Instant::now() {
                return;
            }
            self.tls.begun.pop_front();
            if open {
                let seconds = PATIENCE.as_secs();
                self.close(id, CloseCause::Tls(format!("the TLS handshake was not done after {seconds} s")));
            }
        }
    }

    /// Makes the shared place this connection's.
    fn claim_arrived(&mut self, index: u32) {
        let arrived = &mut self.tls.arrived;
        if arrived.owner == Some(index) {
            return;
        }
        if arrived.bytes.is_empty() {
            arrived.bytes = vec![0; ARRIVED_BYTES];
        }
        let owner = arrived.owner.and_then(|owner| self.connections[owner as usize].as_mut());
        if let Some(Wire::Tls(sealed)) = owner.map(|owner| &mut owner.wire) {
            sealed.arrived = arrived.bytes[arrived.start..arrived.end].to_vec();
        }
        (arrived.owner, arrived.start, arrived.end) = (Some(index), 0, 0);
        if let Some(Connection { wire: Wire::Tls(sealed), .. }) = self.connections[index as usize].as_mut() {
            let kept = core::mem::take(&mut sealed.arrived);
            arrived.bytes[..kept.len()].copy_from_slice(&kept);
            arrived.end = kept.len();
        }
    }

    /// Receives records once, as [`Tcp::receive`] does frames.
    pub(super) fn receive_sealed(&mut self, index: u32) -> Result<(), CloseCause> {
        self.claim_arrived(index);
        let arrived = &mut self.tls.arrived;
        let Some(connection) = self.connections[index as usize].as_mut() else { return Ok(()) };
        if arrived.start > 0 {
            arrived.bytes.copy_within(arrived.start..arrived.end, 0);
            (arrived.start, arrived.end) = (0, arrived.end - arrived.start);
        }
        let ask = if connection.is_agreed() { ASK_BYTES } else { FIRST_BYTES };
        let end = (arrived.end + ask).min(ARRIVED_BYTES);
        let mut scatter = Scatter::new();
        scatter.push_bytes(&mut arrived.bytes[arrived.end..end]);
        let asked = scatter.bytes();
        let received = match scatter.receive(connection.socket.as_fd()) {
            Ok(0) if connection.is_agreed() || !connection.asks => return Err(CloseCause::Peer),
            Ok(0) => {
                let text = "the peer ended the connection in the TLS handshake; if its --data-tls is off, start it \
                            with offer or require";
                return Err(CloseCause::Tls(text.to_owned()));
            }
            Ok(received) => received,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                connection.readable = false;
                return Ok(());
            }
            Err(error) => return Err(CloseCause::Kernel(error.raw_os_error().unwrap_or_default())),
        };
        connection.readable = received == asked || connection.ended;
        connection.budget_bytes = connection.budget_bytes.saturating_sub(received);
        arrived.end += received;
        self.moved_bytes += received;
        self.active.touch(index);
        Ok(())
    }

    /// Goes on with what came: looks at the first byte, does a step of the handshake, or opens a record.
    pub(super) fn open_next(&mut self, id: ConnectionId) -> Result<Turn, CloseCause> {
        let owns = self.tls.arrived.owner == Some(id.index);
        let Some(connection) = self.get(id) else { return Ok(Turn::Receive) };
        match &connection.wire {
            Wire::Plain => Ok(Turn::Receive),
            Wire::Unknown if !owns => Ok(Turn::Receive),
            Wire::Unknown => self.look_at_first_byte(id),
            Wire::Tls(sealed) if !owns && sealed.arrived.is_empty() => Ok(Turn::Receive),
            Wire::Tls(_) => {
                self.claim_arrived(id.index);
                if self.tls.arrived.start == self.tls.arrived.end {
                    return Ok(Turn::Receive);
                }
                if self.get(id).is_some_and(|connection| !connection.is_agreed()) {
                    return self.step(id);
                }
                self.open_record(id)
            }
        }
    }

    fn look_at_first_byte(&mut self, id: ConnectionId) -> Result<Turn, CloseCause> {
        let arrived = &mut self.tls.arrived;
        let Some(&first) = arrived.bytes[arrived.start..arrived.end].first() else { return Ok(Turn::Receive) };
        if first == FIRST_BYTE
            && let Some(keychain) = &self.tls.keychain
        {
            let handshake = Handshake::server(keychain).map_err(|error| CloseCause::Tls(error.to_string()))?;
            if let Some(connection) = self.get(id) {
                connection.wire = Wire::Tls(SealedStream::new(handshake));
            }
            return Ok(Turn::Opened);
        }
        // What came is the beginning of frames.
        let came = arrived.bytes[arrived.start..arrived.end].to_vec();
        self.tls.forget(id.index);
        self.claim(id.index);
        self.staging.take(&came)?;
        let refused = self.tls.mode() == DataTls::Require;
        if let Some(connection) = self.get(id) {
            (connection.wire, connection.must_be_refused) = (Wire::Plain, refused);
        }
        Ok(Turn::Opened)
    }

    /// A step of a handshake, of which there are few in a round where we did not ask for it.
    fn step(&mut self, id: ConnectionId) -> Result<Turn, CloseCause> {
        self.claim_arrived(id.index);
        let arrived = &mut self.tls.arrived;
        let Some(connection) = self.connections[id.index as usize].as_mut() else { return Ok(Turn::Receive) };
        let Wire::Tls(sealed) = &mut connection.wire else { return Ok(Turn::Receive) };
        if sealed.stepped_at == Some(arrived.end - arrived.start) {
            return Ok(Turn::Receive);
        }
        if self.tls.steps_left == 0 {
            self.again.push(id.index);
            return Ok(Turn::Later);
        }
        let Stage::Handshake(handshake) = core::mem::replace(&mut sealed.stage, Stage::Failed) else {
            return Ok(Turn::Receive);
        };
        self.tls.steps_left -= 1;
        let mut out = Vec::new();
        let result = handshake.advance(&mut arrived.bytes[arrived.start..arrived.end], &mut out);
        if !out.is_empty() {
            sealed.leaving.push_back(out);
        }
        let turn = match result {
            Ok((used, step)) => {
                arrived.start += used;
                sealed.stepped_at = Some(arrived.end - arrived.start);
                let done = matches!(step, Step::Done(_));
                sealed.stage = match step {
                    Step::More(handshake) => Stage::Handshake(handshake),
                    Step::Done(session) => Stage::Session(session),
                };
                if done && connection.asks {
                    self.events.push_back(Event::Connected(id));
                }
                if done { Turn::Opened } else { Turn::Receive }
            }
            Err(error) => {
                // The peer is told why, if there is room.
                let _ = sealed.send(&connection.socket);
                return Err(CloseCause::Tls(error.to_string()));
            }
        };
        self.mark_dirty(id.index);
        Ok(turn)
    }

    /// Opens a record and puts its bytes where they belong.
    fn open_record(&mut self, id: ConnectionId) -> Result<Turn, CloseCause> {
        self.claim(id.index);
        let arrived = &mut self.tls.arrived;
        let Some(connection) = self.connections[id.index as usize].as_mut() else { return Ok(Turn::Receive) };
        let Wire::Tls(sealed) = &mut connection.wire else { return Ok(Turn::Receive) };
        let Some(session) = sealed.session() else { return Ok(Turn::Receive) };
        let opened = session.open(&mut arrived.bytes[arrived.start..arrived.end]);
        let (taken, opened) = opened.map_err(|error| CloseCause::Tls(error.to_string()))?;
        arrived.start += taken;
        match opened {
            OpenedRecord::More => Ok(Turn::Receive),
            OpenedRecord::Nothing => Ok(Turn::Opened),
            OpenedRecord::Closed => Err(CloseCause::Peer),
            OpenedRecord::Data(mut plain) => {
                if let Expect::Payload(payload) = &mut connection.expect {
                    let here = payload.left_bytes.min(plain.len() as u64) as usize;
                    payload.put(&plain[..here]);
                    plain = &plain[here..];
                }
                self.staging.take(plain)?;
                Ok(Turn::Opened)
            }
        }
    }

    /// Whether this frame ends the connection: it should have come sealed, or says that we should have asked so.
    pub(super) fn ends_for_want_of_tls(&mut self, id: ConnectionId, header: &Header) -> bool {
        let mode = self.tls.mode();
        let Some(connection) = self.get(id) else { return false };
        if connection.must_be_refused {
            if let Kind::Request(operation) = header.kind {
                let reply = Header::reply(Kind::Reply(operation), header.request, Status::WantsTls);
                self.send(id, &reply, b"", None);
            }
            // It comes again with TLS, as whoever is not told to require it does: nobody has to do anything.
            if matches!(header.kind, Kind::Request(Operation::Hello)) && header.flags.has(FrameFlags::OFFERS_TLS) {
                self.close_after_sending(id, CloseCause::Closed);
                return true;
            }
            let text = "a peer connected without TLS, which --data-tls require wants; start it with --data-tls offer \
                        or require";
            self.close_after_sending(id, CloseCause::Tls(text.to_owned()));
            return true;
        }
        let plain = matches!(connection.wire, Wire::Plain);
        if !(connection.asks && plain && header.status == Status::WantsTls && mode == DataTls::Offer) {
            return false;
        }
        let address = net::peer_address(connection.socket.as_fd());
        if self.tls.wanted_by.len() >= ADDRESSES {
            self.tls.wanted_by.clear();
        }
        self.tls.wanted_by.extend(address.ok());
        self.close(id, CloseCause::Peer);
        true
    }
}

impl Connection {
    /// A header of ours; a plain greeting says besides that we would begin with TLS where we are told to.
    pub(super) fn greeting(&self, header: &Header, mode: DataTls) -> Header {
        let greets = matches!(header.kind, Kind::Request(Operation::Hello));
        let offers = greets && mode == DataTls::Offer && matches!(self.wire, Wire::Plain);
        Header { flags: header.flags.with(FrameFlags::OFFERS_TLS, offers), ..*header }
    }

    /// Whether it is known how bytes are on the wire, and keys are there where they are sealed.
    pub(super) const fn is_agreed(&self) -> bool {
        match &self.wire {
            Wire::Plain => true,
            Wire::Unknown => false,
            Wire::Tls(sealed) => matches!(sealed.stage, Stage::Session(_)),
        }
    }
}

impl Staging {
    /// Puts bytes behind those that are unread.
    fn take(&mut self, bytes: &[u8]) -> Result<(), CloseCause> {
        if bytes.is_empty() {
            return Ok(());
        }
        let room = self.room(bytes.len());
        if room.len() < bytes.len() {
            return Err(CloseCause::Setup(format!("{} bytes came where a frame's end should have", bytes.len())));
        }
        room.copy_from_slice(bytes);
        self.end += bytes.len();
        Ok(())
    }
}
