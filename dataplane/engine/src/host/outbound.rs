//! What goes out: answers, requests, connections to make and to end.

use kvplane_proto::client::{LaneId, Output as ClientOutput, Path, PeerAddress};
use kvplane_store::service::{CloseReason, Output as ServiceOutput, PeerKey};
use kvplane_transport::{Gone, Outgoing};

use super::Host;
use super::roles::{Lent, Link, Role};

impl Host {
    pub(super) fn drain_outputs(&mut self, now_ns: u64) -> bool {
        let mut progress = self.drain_service();
        while let Some(output) = self.client.as_mut().and_then(kvplane_proto::client::Client::poll_output) {
            progress = true;
            self.client_output(output, now_ns);
        }
        progress
    }

    pub(super) fn drain_service(&mut self) -> bool {
        let mut progress = false;
        while let Some(output) = self.service.as_mut().and_then(kvplane_store::service::Service::poll_output) {
            progress = true;
            self.service_output(output);
        }
        progress
    }

    fn service_output(&mut self, output: ServiceOutput) {
        match output {
            ServiceOutput::Frame { peer, header, body, payload } => {
                let payload = payload.map(|(place, hold)| {
                    let buffers = self.memory(place).into();
                    Outgoing { buffers, hold: Some(self.lent.insert(Lent::Answer(hold)) as u64) }
                });
                let Some(service) = &self.service else { return };
                match Link::of_peer(peer) {
                    Link::Tcp(id) => self.tcp.send(id, &header, service.body(body), payload),
                    Link::Shm(id) => self.shm.send(id, &header, service.body(body)),
                };
            }
            ServiceOutput::Close { peer, reason } => {
                self.counters.broken += 1;
                self.last_problem = Some(reason.to_string());
                self.close_served(peer, reason);
            }
            ServiceOutput::Unregistered { segment } => {
                if let Some(entry) = self.segments.get_mut(segment.index as usize) {
                    // The position may be a successor's by now.
                    entry.take_if(|(generation, _)| *generation == segment.generation);
                }
                self.unregistered.push(segment);
            }
        }
    }

    /// Ends a peer's connection: after the answers that say why, unless it is the peer's not reading that it is ended
    /// for.
    fn close_served(&mut self, peer: PeerKey, reason: CloseReason) {
        let heard = matches!(reason, CloseReason::Refused(_) | CloseReason::Malformed(_));
        match Link::of_peer(peer) {
            Link::Tcp(id) if !heard => self.tcp.close(id, Gone::Closed),
            Link::Tcp(id) => self.tcp.close_after_sending(id, Gone::Closed),
            Link::Shm(id) => {
                self.shm.flush(&self.poller);
                self.shm.close(&self.poller, id, Gone::Closed);
            }
        }
    }

    fn client_output(&mut self, output: ClientOutput, now_ns: u64) {
        match output {
            ClientOutput::Connect { lane, address, path } => self.connect(lane, &address, path, now_ns),
            ClientOutput::Send { lane, header, body, payload } => {
                let Some(link) = self.link_of(lane) else { return };
                let payload = payload.map(|local| {
                    let buffers = self.local(local).into();
                    self.uploads.start(header.request);
                    Outgoing { buffers, hold: Some(self.lent.insert(Lent::Upload(header.request)) as u64) }
                });
                let Some(client) = &self.client else { return };
                match link {
                    Link::Tcp(id) => self.tcp.send(id, &header, client.body(body), payload),
                    Link::Shm(id) => self.shm.send(id, &header, client.body(body)),
                };
            }
            ClientOutput::CopyOut { lane, slice, offset, local, checksum } => {
                self.copy_out(lane, slice, offset, local, checksum, now_ns);
            }
            ClientOutput::CopyIn { lane, slice, offset, local } => self.copy_in(lane, slice, offset, local, now_ns),
            ClientOutput::CopySegment { lane, slice, segment, offset, local, write } => {
                self.copy_segment(lane, slice, (segment, offset), local, write, now_ns);
            }
            ClientOutput::Reset { lane } => match self.link_of(lane) {
                Some(link) => self.close(link, Gone::Closed),
                None => {
                    if let Some(client) = &mut self.client {
                        client.lane_gone(lane, now_ns);
                    }
                }
            },
            ClientOutput::Done { batch } => self.done.push_back(batch),
            ClientOutput::WantMap => self.map_wanted = true,
        }
    }

    fn connect(&mut self, lane: LaneId, address: &PeerAddress, path: Path, now_ns: u64) {
        let link = match path {
            Path::Stream => self.tcp.connect(&self.poller, address.tcp).map(Link::Tcp),
            Path::Shared => self.shm.connect(&self.poller, address.shm.as_deref().unwrap_or_default()).map(Link::Shm),
        };
        match link {
            Ok(link) => {
                let index = lane.index as usize;
                if self.lanes.len() <= index {
                    self.lanes.resize(index + 1, None);
                }
                self.lanes[index] = Some((lane, link));
                self.roles.set(link, Role::Lane(lane, None));
            }
            Err(error) => {
                self.last_problem = Some(error.to_string());
                if let Some(client) = &mut self.client {
                    client.lane_gone(lane, now_ns);
                }
            }
        }
    }

    /// The connection of a lane, unless it is one of the lane's former lives.
    pub(super) fn link_of(&self, lane: LaneId) -> Option<Link> {
        let (held, link) = (*self.lanes.get(lane.index as usize)?)?;
        (held == lane).then_some(link)
    }
}
