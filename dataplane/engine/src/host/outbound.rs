//! What goes out: answers, requests, connections to make and to end.

use kvplane_client::{DeviceCopy, LaneId, Output as ClientOutput, Path, PeerAddress, PeerKind, Via};
use kvplane_store::service::{CloseReason, Output as ServiceOutput, PeerKey, Places};
use kvplane_sys::IoBuf;
use kvplane_transport::mooncake::wire::Dialect;
use kvplane_transport::{CloseCause, OutgoingPayload, Pieces};

use super::Host;
use super::roles::{LentPayload, Link, Role};
use super::same_host::SegmentCopy;

impl Host {
    pub(super) fn drain_outputs(&mut self, now_ns: u64) -> bool {
        let mut progress = self.drain_service();
        loop {
            while let Some(output) = self.client.as_mut().and_then(kvplane_client::Client::poll_output) {
                progress = true;
                if !matches!(output, ClientOutput::CopySegment { via: Via::Cma, .. }) {
                    self.cross(now_ns.max(self.rounds.now_ns()));
                }
                self.client_output(output, now_ns.max(self.rounds.now_ns()));
            }
            if !self.cross(now_ns.max(self.rounds.now_ns())) {
                return progress;
            }
        }
    }

    /// Writes the tails of objects for which the service has just made room.
    #[inline]
    pub(super) fn write_tails(&mut self) {
        let (Some(service), Some(pool)) = (&mut self.service, &self.regions.pool) else { return };
        while let Some(tail) = service.poll_tail() {
            pool.copy_in(tail.offset as usize, service.body(tail.bytes));
        }
    }

    pub(super) fn drain_service(&mut self) -> bool {
        let mut progress = false;
        self.write_tails();
        while let Some(output) = self.service.as_mut().and_then(kvplane_store::service::Service::poll_output) {
            progress = true;
            self.service_output(output);
        }
        progress
    }

    fn service_output(&mut self, output: ServiceOutput) {
        match output {
            ServiceOutput::Frame { peer, header, body, payload } => {
                let payload = payload.map(|(places, hold)| {
                    let buffers: Pieces = match places {
                        Places::One(place) => self.memory(place).into(),
                        Places::Many(range) => self.memories(range).into(),
                    };
                    (buffers, hold)
                });
                let Some(service) = &mut self.service else { return };
                // Freed without being unregistered: touching it would end the process.
                if let Some((buffers, hold)) = &payload
                    && !IoBuf::all_mapped(buffers.as_slice())
                {
                    service.refuse_read(peer, &header, *hold);
                    return;
                }
                let payload = payload.map(|(buffers, hold)| {
                    let leaving = service.leaving(&header, self.rounds.now_ns());
                    OutgoingPayload { buffers, hold: Some(self.lent.insert(LentPayload::Answer(hold, leaving)) as u64) }
                });
                match Link::of_peer(peer) {
                    Link::Tcp(id) => self.tcp.send(id, &header, service.body(body), payload),
                    Link::Shm(id) => self.shm.send(id, &header, service.body(body), &[]),
                    Link::Rdma(id) => {
                        if let Some(buffer) = payload.as_ref().and_then(|payload| payload.buffers.as_slice().first()) {
                            self.rdma_work.count_served(id, buffer.region());
                        }
                        self.rdma_work.driver.send(id, &header, service.body(body), payload)
                    }
                    Link::Mooncake(_) => unreachable!("the service answers no stock engine"),
                };
            }
            ServiceOutput::Close { peer, reason } => {
                if reason != CloseReason::Fenced {
                    self.counters.broken += 1;
                    self.notices.problem(reason.to_string());
                }
                self.close_served(peer, reason);
            }
            ServiceOutput::Unregistered { segment } => {
                self.segment_left(segment);
            }
        }
    }

    /// Ends a peer's connection: after the answers that say why, unless it is the peer's not reading that it is ended
    /// for.
    fn close_served(&mut self, peer: PeerKey, reason: CloseReason) {
        let heard = matches!(reason, CloseReason::Refused(_) | CloseReason::Malformed(_));
        match Link::of_peer(peer) {
            Link::Tcp(id) if !heard => self.tcp.close(id, CloseCause::Closed),
            Link::Tcp(id) => self.tcp.close_after_sending(id, CloseCause::Closed),
            Link::Rdma(id) if !heard => self.rdma_work.driver.close(id, CloseCause::Closed),
            Link::Rdma(id) => self.rdma_work.driver.close_after_sending(id, CloseCause::Closed),
            Link::Shm(id) => {
                self.shm.flush(&self.poller);
                self.shm.close(&self.poller, id, CloseCause::Closed);
            }
            Link::Mooncake(_) => unreachable!("the service answers no stock engine"),
        }
    }

    fn client_output(&mut self, output: ClientOutput, now_ns: u64) {
        match output {
            ClientOutput::Connect { lane, address, path } => self.connect(lane, &address, path, now_ns),
            ClientOutput::Send { lane, header, body, payload } => {
                let Some(link) = self.link_of(lane) else { return };
                let Some(client) = &self.client else { return };
                let buffers: Option<Pieces> = match client.outbox().payload(payload) {
                    [] => None,
                    &[local] => Some(self.regions.buffers.pieces(local)),
                    locals => Some(self.regions.buffers.all(locals).into()),
                };
                if let Link::Shm(id) = link {
                    let payload = buffers.as_ref().map_or(&[][..], Pieces::as_slice);
                    self.shm.send(id, &header, client.outbox().body(body), payload);
                    return;
                }
                let payload = buffers.map(|buffers| {
                    self.uploads.start(header.request);
                    OutgoingPayload {
                        buffers,
                        hold: Some(self.lent.insert(LentPayload::Upload(header.request)) as u64),
                    }
                });
                match link {
                    Link::Tcp(id) => self.tcp.send(id, &header, client.outbox().body(body), payload),
                    Link::Shm(_) => unreachable!("its payloads go along with their frames"),
                    Link::Rdma(id) => {
                        let body = client.outbox().body(body);
                        super::rdma::expect_answers(
                            &mut self.rdma_work.driver,
                            id,
                            client,
                            &self.regions.buffers,
                            &header,
                            body,
                        );
                        self.rdma_work.driver.send(id, &header, body, payload)
                    }
                    Link::Mooncake(id) => self.stock_lanes.send(id, &header, client.outbox().body(body), payload),
                };
            }
            ClientOutput::CopyOut { lane, slice, offset, local, checksum } => {
                self.copy_out(lane, slice, offset, local, checksum, now_ns);
            }
            ClientOutput::CopyIn { lane, slice, offset, local } => self.copy_in(lane, slice, offset, local, now_ns),
            ClientOutput::CopySegment { lane, slice, via: Via::Rdma, segment, offset, local, write } => {
                self.start_rdma_copies(lane, DeviceCopy { slice, segment, offset, local, write });
            }
            ClientOutput::CopySegment { lane, slice, via, segment, offset, local, write } => {
                let copy = SegmentCopy { slice, via, segment, offset, local, write };
                self.copy_segment(lane, &copy, now_ns);
            }
            ClientOutput::FileTransfer { lane, slice, file, offset, local, write } => {
                self.start_file((lane, slice), (file, offset), local, write);
            }
            ClientOutput::Reset { lane } if self.file_work.has(lane) => self.reset_files(lane),
            ClientOutput::Reset { lane } => match self.link_of(lane) {
                Some(link) => self.close(link, CloseCause::Closed),
                None => {
                    if let Some(client) = &mut self.client {
                        client.lane_gone(lane, now_ns);
                    }
                }
            },
            ClientOutput::Done { batch } => self.notices.batch_done(batch),
            ClientOutput::WantMap => self.notices.want_map(),
        }
    }

    fn connect(&mut self, lane: LaneId, address: &PeerAddress, path: Path, now_ns: u64) {
        let refused = |error: std::io::Error| CloseCause::Setup(error.to_string());
        let link = match path {
            Path::Stream | Path::Rdma => self.tcp.connect(&self.poller, address.tcp).map(Link::Tcp).map_err(refused),
            Path::Shared => {
                let path = address.shm.as_deref().unwrap_or_default();
                self.shm.connect(&self.poller, path, now_ns).map(Link::Shm)
            }
            Path::Mooncake => {
                let dialect = match address.kind {
                    PeerKind::Mooncake { version: 0 | 1 } => Dialect::V1,
                    _ => Dialect::V2,
                };
                let link = self.stock_lanes.connect(&self.poller, address.tcp, dialect, now_ns);
                link.map(Link::Mooncake).map_err(refused)
            }
            Path::MooncakeRdma => self.connect_foreign(lane, address).map(Link::Rdma),
            Path::Local => {
                if let Some(client) = &mut self.client {
                    client.connected(lane, now_ns);
                }
                return;
            }
            Path::File => {
                self.connect_files(lane, now_ns);
                return;
            }
        };
        match link {
            Ok(link) => {
                let index = lane.index as usize;
                if self.lanes.len() <= index {
                    self.lanes.resize(index + 1, None);
                }
                self.lanes[index] = Some((lane, link));
                let role = if path == Path::Rdma { Role::Asking(lane) } else { Role::Lane(lane, None) };
                self.roles.set(link, role);
            }
            Err(why) => {
                self.notices.problem(why.to_string());
                self.lane_ended(lane, &why, now_ns);
            }
        }
    }

    /// The connection of a lane, unless it is one of the lane's former incarnations.
    pub(super) fn link_of(&self, lane: LaneId) -> Option<Link> {
        let (held, link) = (*self.lanes.get(lane.index as usize)?)?;
        (held == lane).then_some(link)
    }
}
