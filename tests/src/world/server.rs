//! Host of a shard: accepts connections, passes frames to the service and replies to clients, and moves payloads both
//! ways.

use kvplane_client::Path;
use kvplane_proto::checksum::{PayloadChecksum, payload_checksum};
use kvplane_proto::digest::tenant_number;
use kvplane_proto::frame::{HEADER_BYTES, Header};
use kvplane_proto::message::{Kind, Operation};
use kvplane_proto::{FrameFlags, Status};
use kvplane_store::service::{self, CloseReason, Extents, Hold, Memory, MemoryExtent, Output, PayloadTo, PeerKey};

use crate::world::World;
use crate::world::check::{Rule, broken};
use crate::world::cluster::node::ShardIncarnation;
use crate::world::network::arrivals::decode;
use crate::world::network::pipe::{Destination, IncomingPayload, OutgoingFrame, Piece, Source};
use crate::world::network::{End, Way};
use crate::world::queue::Event;
use crate::world::scenario::Mischief;

/// Rounds after which a shard that always has something to do at one instant counts as one that never rests.
const ROUNDS_MOST: u32 = 10_000;

/// Request that was just passed to the service, for observers of its replies.
#[derive(Clone, Copy)]
pub(crate) struct ServedRequest<'a> {
    pub(crate) connection: u32,
    pub(crate) header: &'a Header,
    pub(crate) body: &'a [u8],
}

impl World {
    /// Handles a connection that reaches the shard.
    pub(crate) fn accept(&mut self, index: u32) {
        let Some(connection) = self.connections.get_mut(&index) else { return };
        let incarnation = connection.incarnation;
        if !self.incarnations[incarnation].alive || connection.client_end == End::Gone {
            connection.server_end = End::Gone;
            self.end_flight(index, Way::ToClient);
            self.forget_if_gone(index);
            return;
        }
        let peer = self.incarnations[incarnation].add_peer(index);
        connection.peer = peer;
        connection.server_end = End::Open;
        let path = match connection.path {
            Path::Shared => service::Path::Shared,
            _ => service::Path::Stream,
        };
        let client = connection.client;
        self.incarnations[incarnation].service.peer_joined(peer, path, self.now_ns);
        if path == service::Path::Stream && self.is_bound(client) {
            self.incarnations[incarnation].service.control().bind(peer, tenant_number(self.scenario.tenant));
        }
        let delay_ns = self.latency();
        self.after(delay_ns, Event::Connected(index));
        self.drain_service(incarnation, None);
    }

    /// Returns true if a client is bound to one tenant's objects. All keys are that tenant's, so that it gets the same
    /// results as the others; but a shard that has to read an object's tenant first delays such a client's requests.
    pub(crate) fn is_bound(&self, client: usize) -> bool {
        let drawn = (self.scenario.seed + client as u64).is_multiple_of(3);
        drawn && self.scenario.answers_late() && !self.scenario.quotas && client < self.scenario.clients
    }

    /// Delivers a piece to the shard.
    pub(crate) fn arrive_at_server(&mut self, index: u32, piece: Piece) {
        let Some(connection) = self.connections.get(&index) else { return };
        match (piece, connection.server_end) {
            (Piece::End, End::Open | End::Closing) => self.close_server_end(index),
            (Piece::Head(bytes), End::Open) => self.request_arrives(index, &bytes),
            (Piece::Chunk(bytes), End::Open | End::Closing) => self.put_arrives(index, &bytes),
            _ => {}
        }
    }

    fn request_arrives(&mut self, index: u32, bytes: &[u8]) {
        let Some(header) = decode(bytes) else {
            self.close_server_end(index);
            return;
        };
        let body = &bytes[HEADER_BYTES..];
        let Some(connection) = self.connections.get(&index) else { return };
        let (incarnation, peer) = (connection.incarnation, connection.peer);
        if self.scenario.has(Mischief::SwallowRemove) && header.kind == Kind::Request(Operation::Remove) {
            self.forge_remove(index, &header, body);
            return;
        }
        if self.scenario.has(Mischief::KeepCopies) && self.forge_drop(index, &header) {
            return;
        }
        if self.scenario.has(Mischief::SwallowFence) && header.kind == Kind::Request(Operation::Fence) {
            let reply = Header::reply(Kind::Reply(Operation::Fence), header.request, Status::Ok);
            self.send(index, Way::ToClient, OutgoingFrame::new(&reply, &[], None));
            return;
        }
        self.look_before_commits(index, &header, body);
        let forged = self.forge_replace(&header, body);
        let told = forged.as_deref().unwrap_or(body);
        let to = match self.is_report(index, &header) {
            true => self.pass_report(index, &header, told),
            false => self.incarnations[incarnation].service.request(peer, &header, told, self.now_ns),
        };
        self.write_tails(incarnation);
        self.detail(u64::from(header.kind.code()), || {
            format!("incarnation {incarnation} receives {:?}: {to:?}", header.kind)
        });
        let destination = match to {
            PayloadTo::Discard => Destination::Discard,
            PayloadTo::Extent(MemoryExtent { memory: Memory::Segment(_), offset, .. }) => {
                Destination::Segment { offset }
            }
            PayloadTo::Extent(extent) => Destination::Pool { offset: extent.offset },
            PayloadTo::Extents(_) => {
                self.violate(broken(Rule::Protocol, "ranges are gathered, which no client here does".to_owned()));
                return;
            }
        };
        self.observe_request(index, &header, body, destination);
        self.observe_begun(index, &header, body);
        if header.payload_bytes > 0
            && let Some(connection) = self.connections.get_mut(&index)
        {
            let receiving = IncomingPayload { header, destination, done: 0, checksum: PayloadChecksum::new() };
            connection.to_server.receiving = Some(receiving);
        }
        self.drain_service(incarnation, Some(ServedRequest { connection: index, header: &header, body }));
    }

    /// Writes arriving payload bytes to their destination.
    fn put_arrives(&mut self, index: u32, bytes: &[u8]) {
        let Some(connection) = self.connections.get_mut(&index) else { return };
        let (incarnation, peer) = (connection.incarnation, connection.peer);
        let Some(receiving) = &mut connection.to_server.receiving else { return };
        let from = receiving.done;
        receiving.done += bytes.len() as u64;
        receiving.checksum.update(bytes);
        let (header, sum) = (receiving.header, receiving.checksum.finish());
        let destination = receiving.destination;
        let done = receiving.done == header.payload_bytes;
        if done {
            connection.to_server.receiving = None;
        }
        if let Destination::Pool { offset } = destination {
            let at = offset + from;
            let lent = self.incarnations[incarnation].ledger.check(
                index,
                crate::world::check::ledger::Use::Write,
                at,
                bytes.len() as u64,
            );
            self.require(lent);
            self.incarnations[incarnation].pool.copy_in(at, bytes);
        }
        if let Destination::Segment { offset } = destination {
            self.land(incarnation, offset + from, bytes);
        }
        if done {
            let digest = self.connections.get(&index).and_then(|connection| connection.held.put_digest());
            let trusted = self.scenario.has(Mischief::TrustPutChecksum) && digest.is_some();
            let sum = if trusted { header.payload_checksum } else { sum };
            self.look_before_put(index);
            self.incarnations[incarnation].service.payload_done(peer, Some(sum), self.now_ns);
            self.observe_put_made(index);
            self.drain_service(incarnation, Some(ServedRequest { connection: index, header: &header, body: &[] }));
            self.observe_put_end(index);
            if self.scenario.has(Mischief::DuplicatePut) {
                self.put_again(index, &header, destination, digest);
            }
        }
    }

    /// Carries out the outputs of the service.
    pub(crate) fn drain_service(&mut self, incarnation: usize, asked: Option<ServedRequest<'_>>) {
        let mut rounds = 0;
        while self.drain_outputs(incarnation, asked)
            | self.drive_tier(incarnation)
            | self.drive_device(incarnation)
            | self.drive_pool(incarnation)
            | self.drive_fetches(incarnation)
        {
            rounds += 1;
            if rounds > ROUNDS_MOST {
                self.violate(broken(Rule::Liveness, format!("incarnation {incarnation} never rests")));
                return;
            }
        }
        if self.scenario.quotas {
            self.check_quota(incarnation);
        }
        self.arm_service(incarnation);
    }

    /// Writes the tails of objects for which the service has just allocated memory; others may have moved for that.
    pub(super) fn write_tails(&mut self, incarnation: usize) {
        self.check_moves(incarnation);
        while let Some(tail) = self.incarnations[incarnation].service.poll_tail() {
            let bytes = self.incarnations[incarnation].service.body(tail.bytes).to_vec();
            if self.scenario.has(Mischief::LateTails) {
                let delay_ns = self.latency();
                self.after(delay_ns, Event::LateTail(incarnation, tail.offset, bytes.into()));
            } else {
                self.write_tail(incarnation, tail.offset, &bytes);
            }
        }
    }

    /// Writes a tail; no peer may use its range.
    pub(super) fn write_tail(&mut self, incarnation: usize, offset: u64, bytes: &[u8]) {
        let free = self.incarnations[incarnation].ledger.is_free(offset, bytes.len() as u64);
        self.require(free);
        self.incarnations[incarnation].pool.copy_in(offset, bytes);
    }

    fn drive_pool(&mut self, incarnation: usize) -> bool {
        let now_ns = self.now_ns;
        let ShardIncarnation { service, pool, .. } = &mut self.incarnations[incarnation];
        service.drive_pool(pool, now_ns)
    }

    fn drain_outputs(&mut self, incarnation: usize, asked: Option<ServedRequest<'_>>) -> bool {
        let mut any = false;
        self.write_tails(incarnation);
        while let Some(output) = self.incarnations[incarnation].service.poll_output() {
            any = true;
            match output {
                Output::Frame { peer, header, body, payload } => {
                    let body = self.incarnations[incarnation].service.body(body).to_vec();
                    let payload = payload.map(|(extents, hold)| match extents {
                        Extents::One(extent) => (extent, hold),
                        Extents::Many(range) => (self.incarnations[incarnation].service.extents(range)[0], hold),
                    });
                    self.answer(incarnation, peer, header, &body, payload, asked);
                }
                Output::Close { peer, reason } => self.close_peer(incarnation, peer, reason),
                Output::Unregistered { .. } => {}
            }
        }
        any
    }

    fn answer(
        &mut self,
        incarnation: usize,
        peer: PeerKey,
        mut header: Header,
        body: &[u8],
        payload: Option<(MemoryExtent, Hold)>,
        asked: Option<ServedRequest<'_>>,
    ) {
        let Some(index) = self.incarnations[incarnation].connection_of(peer) else {
            if let Some((_, hold)) = payload {
                self.incarnations[incarnation].service.sent(hold);
            }
            return;
        };
        let staged = payload.filter(|(extent, _)| extent.memory == Memory::DevicePool);
        if let Some((extent, _)) = payload.filter(|_| staged.is_none())
            && header.flags.has(FrameFlags::CHECKSUM)
            && header.payload_checksum == 0
        {
            header.payload_checksum =
                payload_checksum(&self.incarnations[incarnation].bytes(extent.offset, extent.bytes));
        }
        self.observe_answer(index, &header, body, payload.map(|(extent, _)| extent), asked);
        if self.scenario.has(Mischief::WrongVersion) && header.kind == Kind::Reply(Operation::Get) {
            header.argument = header.argument.saturating_sub(1);
        }
        self.detail(header.argument, || {
            format!("incarnation {incarnation} answers {:?} {:?}", header.kind, header.status)
        });
        if let Some(staged) = staged {
            self.stage_reply(incarnation, peer, (header, body), staged);
            return;
        }
        let source = payload.map(|(extent, hold)| {
            let early = self.scenario.has(Mischief::ReleasePinEarly);
            if early {
                self.incarnations[incarnation].service.sent(hold);
            }
            Source::Pool { offset: extent.offset, bytes: extent.bytes, hold: (!early).then_some(hold) }
        });
        let copy = self.is_repeated(index, &header).then(|| {
            let bytes = payload.map(|(extent, _)| self.incarnations[incarnation].bytes(extent.offset, extent.bytes));
            OutgoingFrame::new(&header, body, bytes.map(Source::Copy))
        });
        self.send(index, Way::ToClient, OutgoingFrame::new(&header, body, source));
        if let Some(copy) = copy {
            self.send(index, Way::ToClient, copy);
        }
    }

    /// Returns true if the network duplicates a reply.
    pub(crate) fn is_repeated(&mut self, index: u32, header: &Header) -> bool {
        let again = !self.trouble.calm && self.streams.network.chance(self.scenario.chances.duplicate_reply);
        let stream = self.connections.get(&index).is_some_and(|connection| connection.path == Path::Stream);
        // A client with a ticket does not accept a shard that repeats its challenge or its proof, so these are not
        // duplicated.
        let proves = matches!(header.kind, Kind::Reply(Operation::Hello | Operation::Prove)) && self.scenario.tickets;
        again && stream && !proves
    }

    fn close_peer(&mut self, incarnation: usize, peer: PeerKey, reason: CloseReason) {
        let Some(index) = self.incarnations[incarnation].connection_of(peer) else { return };
        self.detail(u64::from(peer.index), || format!("incarnation {incarnation} closes connection {index}: {reason}"));
        let repeats = self.connections.get(&index).is_some_and(|connection| connection.repeats);
        if let (CloseReason::Malformed(_), false) = (reason, repeats) {
            self.violate(broken(Rule::Protocol, format!("an honest client was cut off: {reason}")));
        }
        if reason == CloseReason::Fenced && self.scenario.has(Mischief::GoOnAfterFence) {
            return;
        }
        let stream = self.connections.get(&index).is_some_and(|connection| connection.path == Path::Stream);
        if reason == CloseReason::Fenced && stream {
            // No further byte of the connection is taken.
            self.close_server_end(index);
            return;
        }
        if let Some(connection) = self.connections.get_mut(&index) {
            connection.server_end = End::Closing;
        }
        self.wake_sender(index, Way::ToClient);
    }

    /// Closes the shard's end once none of its I/O is left: the peer's handles are released.
    pub(crate) fn close_server_end(&mut self, index: u32) {
        self.removals_cut_off(index);
        let Some(connection) = self.connections.get_mut(&index) else { return };
        let (incarnation, peer) = (connection.incarnation, connection.peer);
        connection.server_end = End::Gone;
        connection.to_server.drop_flight();
        let unsent: Vec<OutgoingFrame> = connection.to_client.queue.drain(..).collect();
        for frame in unsent {
            match frame.payload {
                Some(Source::Pool { hold: Some(hold), .. }) => self.incarnations[incarnation].service.sent(hold),
                Some(Source::Staged(staged)) => self.release_staged(incarnation, &staged),
                _ => {}
            }
        }
        self.incarnations[incarnation].ledger.end_all(index);
        self.incarnations[incarnation].drop_peer(peer);
        self.incarnations[incarnation].service.peer_gone(peer, self.now_ns);
        self.end_flight(index, Way::ToClient);
        self.forget_if_gone(index);
        self.drain_service(incarnation, None);
    }

    fn arm_service(&mut self, index: usize) {
        let incarnation = &mut self.incarnations[index];
        let Some(at_ns) =
            incarnation.service.poll_timeout().filter(|&at_ns| incarnation.alive && at_ns < incarnation.armed_ns)
        else {
            return;
        };
        incarnation.armed_ns = at_ns;
        self.at(at_ns, Event::ServiceTimer(index));
    }

    pub(crate) fn service_timer(&mut self, index: usize) {
        let now_ns = self.now_ns;
        let incarnation = &mut self.incarnations[index];
        if !incarnation.alive {
            return;
        }
        incarnation.armed_ns = u64::MAX;
        if incarnation.service.poll_timeout().is_some_and(|at_ns| at_ns <= now_ns) {
            incarnation.service.handle_timeout(now_ns);
            self.count_timer("a shard");
        }
        self.drain_service(index, None);
    }
}
