//! Connections: ordered, delayed, cut, corrupted, duplicated.
//!
//! A connection has two ends that close one after the other, as sockets do: pieces in flight may still arrive, or the
//! tail is lost, and then the other side sees the end. A shared-memory connection carries the same frames, through
//! rings: without corruption, loss or partitions, and its end is seen only when a process has died or has unmapped the
//! pool.

pub(crate) mod arrivals;
pub(crate) mod copy;
pub(crate) mod pipe;

use std::collections::VecDeque;

use kvplane_client::{LaneId, Path, PeerAddress};
use kvplane_proto::frame::Header;
use kvplane_store::service::PeerKey;

use crate::world::World;
use crate::world::check::ledger::Use;
use crate::world::check::observe::HeldHandles;
use crate::world::faults::Party;
use crate::world::network::pipe::{OutgoingFrame, Piece, Pipe, Source, StagedBytes};
use crate::world::queue::Event;
use crate::world::scenario::{MS, Mischief, US};

/// Most bytes in flight in one direction between the two hosts.
const WINDOW_BYTES: u64 = 64 << 10;

/// Direction of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Way {
    ToServer,
    ToClient,
}

/// State of one end.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End {
    /// Not connected yet.
    Opening,
    Open,
    /// The host is ending its I/O.
    Closing,
    Gone,
}

/// Connection of a client to a shard's incarnation.
pub(crate) struct Connection {
    pub(crate) client: usize,
    pub(crate) lane: LaneId,
    pub(crate) incarnation: usize,
    pub(crate) peer: PeerKey,
    pub(crate) path: Path,
    pub(crate) client_end: End,
    pub(crate) server_end: End,
    pub(crate) to_server: Pipe,
    pub(crate) to_client: Pipe,
    pub(crate) held: HeldHandles,
    /// The client has released a handle twice, for which the shard closes the connection.
    pub(crate) repeats: bool,
    /// Latest frames over shared memory that released a handle.
    pub(crate) given_back: VecDeque<(Header, Vec<u8>)>,
}

impl Connection {
    pub(crate) fn pipe(&mut self, way: Way) -> &mut Pipe {
        match way {
            Way::ToServer => &mut self.to_server,
            Way::ToClient => &mut self.to_client,
        }
    }
}

impl World {
    /// Connects a lane on the client's host.
    pub(crate) fn connect(&mut self, client: usize, lane: LaneId, address: &PeerAddress, path: Path) {
        let incarnation =
            self.incarnations.iter().position(|incarnation| incarnation.alive && incarnation.address == address.tcp);
        let node = incarnation.map(|incarnation| self.incarnations[incarnation].node);
        let cut = node.is_some_and(|node| self.is_apart(self.party_of(client), Party::Node(node)));
        let unreachable = path == Path::Stream && cut;
        let delay_ns = self.latency();
        let Some(incarnation) = incarnation.filter(|_| !unreachable) else {
            let wait_ns = if unreachable { 300 * MS } else { delay_ns };
            let generation = self.clients[client].incarnation;
            self.after(wait_ns, Event::Refused(client, generation, lane));
            return;
        };
        let index = self.next_connection;
        self.next_connection += 1;
        let connection = Connection {
            client,
            lane,
            incarnation,
            peer: PeerKey { index: u32::MAX, generation: 0 },
            path,
            client_end: End::Opening,
            server_end: End::Opening,
            to_server: Pipe::default(),
            to_client: Pipe::default(),
            held: HeldHandles::default(),
            repeats: false,
            given_back: VecDeque::new(),
        };
        self.connections.insert(index, connection);
        self.clients[client].lanes.insert(lane, index);
        self.after(delay_ns, Event::Accept(index));
    }

    /// Draws the one-way latency of the network, with jitter and now and then a spike.
    pub(crate) fn latency(&mut self) -> u64 {
        let base_ns = self.scenario.latency_ns;
        let rng = &mut self.streams.network;
        let spike_ns = if rng.chance(self.scenario.chances.spike) { rng.below(100 * MS) } else { 0 };
        base_ns / 2 + rng.below(base_ns) + spike_ns
    }

    /// Enqueues a frame and wakes the sender.
    pub(crate) fn send(&mut self, index: u32, way: Way, frame: OutgoingFrame) {
        let Some(connection) = self.connections.get_mut(&index) else { return };
        connection.pipe(way).queue.push_back(frame);
        self.wake_sender(index, way);
    }

    pub(crate) fn wake_sender(&mut self, index: u32, way: Way) {
        let Some(connection) = self.connections.get_mut(&index) else { return };
        if !connection.pipe(way).pumping {
            connection.pipe(way).pumping = true;
            let delay_ns = self.streams.network.below(2 * US);
            self.after(delay_ns, Event::Pump(index, way));
        }
    }

    /// Sends one piece: a head, or a chunk of a payload.
    pub(crate) fn pump(&mut self, index: u32, way: Way) {
        let Some(connection) = self.connections.get_mut(&index) else { return };
        let sending = match way {
            Way::ToServer => connection.client_end == End::Open,
            Way::ToClient => matches!(connection.server_end, End::Open | End::Closing),
        };
        let pipe = connection.pipe(way);
        pipe.pumping = false;
        if !sending || pipe.flight_bytes >= WINDOW_BYTES {
            return;
        }
        let Some(frame) = pipe.queue.front_mut() else {
            self.after_last_answer(index, way);
            return;
        };
        let piece = if frame.head_sent {
            self.next_chunk(index, way)
        } else {
            frame.head_sent = true;
            Some(Piece::Head(frame.head.clone()))
        };
        let Some(piece) = piece else { return };
        let bytes = self.fly(index, way, piece);
        self.finish_frame(index, way);
        let Some(connection) = self.connections.get_mut(&index) else { return };
        connection.pipe(way).pumping = true;
        let slowness = self.slowness(index);
        self.after((US + bytes / 8) * slowness, Event::Pump(index, way));
    }

    /// Reads the next bytes of the payload at the head of the queue.
    fn next_chunk(&mut self, index: u32, way: Way) -> Option<Piece> {
        let most = 1 + self.streams.network.below(self.scenario.chunk_bytes);
        let connection = self.connections.get_mut(&index)?;
        let (client, incarnation) = (connection.client, connection.incarnation);
        let frame = connection.pipe(way).queue.front_mut()?;
        let source = frame.payload.as_ref()?;
        let bytes = most.min(source.bytes() - frame.sent);
        let from = frame.sent;
        frame.sent += bytes;
        let read = match source {
            Source::Copy(copy) | Source::Staged(StagedBytes { bytes: copy, .. }) => {
                Ok(copy[from as usize..(from + bytes) as usize].to_vec())
            }
            Source::Local(local) => self.clients[client].memory.read(local.offset + from, bytes).map(<[u8]>::to_vec),
            Source::Pool { offset, .. } => {
                let incarnation = &self.incarnations[incarnation];
                incarnation
                    .ledger
                    .check(index, Use::Read, offset + from, bytes)
                    .map(|()| incarnation.pool.bytes(offset + from, bytes))
            }
        };
        match read {
            Ok(bytes) => Some(Piece::Chunk(bytes)),
            Err(violation) => {
                self.violate(violation);
                None
            }
        }
    }

    /// Puts a piece in flight, perhaps corrupted; returns its length.
    pub(crate) fn fly(&mut self, index: u32, way: Way, mut piece: Piece) -> u64 {
        let delay_ns = self.latency() * self.slowness(index);
        let Some(connection) = self.connections.get_mut(&index) else { return 0 };
        let chances = &self.scenario.chances;
        let rng = &mut self.streams.network;
        let (bytes, chance): (&mut [u8], f64) = match &mut piece {
            Piece::Head(bytes) => (bytes, chances.corrupt_head),
            Piece::Chunk(bytes) => (bytes, chances.corrupt_chunk),
            Piece::End => (&mut [], 0.0),
        };
        let calm = self.trouble.calm || connection.path == Path::Shared;
        if !calm && rng.chance(chance) {
            let at = rng.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1 << rng.below(8);
        }
        let length = bytes.len() as u64;
        let pipe = connection.pipe(way);
        pipe.flight_bytes += length;
        pipe.flight.push_back(piece);
        pipe.last_arrival_ns = (pipe.last_arrival_ns + 1).max(self.now_ns + delay_ns);
        let arrival_ns = pipe.last_arrival_ns;
        self.at(arrival_ns, Event::Deliver(index, way));
        length
    }

    /// Releases the memory of the frame at the head of the queue once its last byte has left.
    fn finish_frame(&mut self, index: u32, way: Way) {
        let Some(connection) = self.connections.get_mut(&index) else { return };
        let incarnation = connection.incarnation;
        let pipe = connection.pipe(way);
        let done = pipe.queue.front().is_some_and(|frame| {
            frame.head_sent && frame.payload.as_ref().is_none_or(|source| frame.sent == source.bytes())
        });
        if !done {
            return;
        }
        let frame = pipe.queue.pop_front();
        match frame.and_then(|frame| frame.payload) {
            Some(Source::Pool { offset, hold, .. }) => {
                self.incarnations[incarnation].ledger.end(index, Use::Read, offset);
                if let Some(hold) = hold.filter(|_| !self.scenario.has(Mischief::KeepPins)) {
                    self.incarnations[incarnation].service.sent(hold);
                    self.drain_service(incarnation, None);
                }
            }
            Some(Source::Staged(staged)) => {
                self.release_staged(incarnation, &staged);
                self.drain_service(incarnation, None);
            }
            _ => {}
        }
    }

    /// Closes the shard's end after everything is sent, if the shard wanted to close.
    fn after_last_answer(&mut self, index: u32, way: Way) {
        let Some(connection) = self.connections.get_mut(&index) else { return };
        if way == Way::ToServer || connection.server_end != End::Closing {
            return;
        }
        if connection.path == Path::Stream {
            self.close_server_end(index);
        } else if !connection.held.end_told {
            // The peer's mapping ends with its process or when it unmaps; the shard notices that by the end of its
            // socket.
            connection.held.end_told = true;
            self.fly(index, Way::ToClient, Piece::End);
        }
    }

    /// Delivers the next piece.
    pub(crate) fn deliver(&mut self, index: u32, way: Way) {
        let Some(connection) = self.connections.get(&index) else { return };
        let (client, node) = (connection.client, self.incarnations[connection.incarnation].node);
        let (from, to) = match way {
            Way::ToServer => (self.party_of(client), Party::Node(node)),
            Way::ToClient => (Party::Node(node), self.party_of(client)),
        };
        if connection.path == Path::Stream
            && let Some(heals_ns) = self.cut(from, to)
        {
            self.at(heals_ns, Event::Deliver(index, way));
            return;
        }
        let Some(connection) = self.connections.get_mut(&index) else { return };
        let pipe = connection.pipe(way);
        let Some(piece) = pipe.flight.pop_front() else { return };
        if let Piece::Head(bytes) | Piece::Chunk(bytes) = &piece {
            pipe.flight_bytes -= bytes.len() as u64;
        }
        let is_lost = pipe.lost && !matches!(piece, Piece::End);
        if !pipe.queue.is_empty() {
            self.wake_sender(index, way);
        }
        if is_lost {
            return;
        }
        match way {
            Way::ToServer => self.arrive_at_server(index, piece),
            Way::ToClient => self.arrive_at_client(index, piece),
        }
    }

    fn slowness(&self, index: u32) -> u64 {
        self.connections
            .get(&index)
            .map_or(1, |connection| self.nodes[self.incarnations[connection.incarnation].node].slowness)
    }

    /// Forgets the connection once both ends are gone.
    pub(crate) fn forget_if_gone(&mut self, index: u32) {
        let gone = |connection: &Connection| connection.client_end == End::Gone && connection.server_end == End::Gone;
        if self.connections.get(&index).is_some_and(gone) {
            self.connections.remove(&index);
        }
    }

    /// Ends the sender's side: nothing more is sent.
    pub(crate) fn end_flight(&mut self, index: u32, way: Way) {
        if let Some(connection) = self.connections.get_mut(&index) {
            connection.pipe(way).queue.clear();
            self.cut_flight(index, way);
        }
    }

    /// Shows the receiver the end, and perhaps loses the tail of the pieces in flight.
    pub(crate) fn cut_flight(&mut self, index: u32, way: Way) {
        let Some(connection) = self.connections.get_mut(&index) else { return };
        let stream = connection.path == Path::Stream;
        let pipe = connection.pipe(way);
        if stream && self.streams.network.chance(0.5) {
            let keep = self.streams.network.below(pipe.flight.len() as u64 + 1) as usize;
            pipe.flight.truncate(keep);
            pipe.flight_bytes = pipe
                .flight
                .iter()
                .map(|piece| if let Piece::Head(b) | Piece::Chunk(b) = piece { b.len() as u64 } else { 0 })
                .sum();
        }
        self.fly(index, way, Piece::End);
    }
}
