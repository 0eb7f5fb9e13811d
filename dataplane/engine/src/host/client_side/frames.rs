//! Arrivals for the client: connections of its lanes and their ends, answers, and completed copies.

use std::io;

use kvplane_client::{Carrier, LaneEvent, LaneId, PayloadTo};
use kvplane_proto::Status;
use kvplane_proto::frame::Header;
use kvplane_proto::message::{Kind, Operation};
use kvplane_transport::{CloseCause, ConnectionId, Pieces, Target};

use super::ClientSide;
use crate::host::reactor::Reactor;
use crate::host::reactor::connections::{Connections, OfferAnswer};
use crate::host::reactor::links::{Link, Role};
use crate::host::reports::Reports;

impl ClientSide {
    /// Handles a connection for a lane that is established.
    pub(crate) fn connected(&mut self, connections: &mut Connections, link: Link, now_ns: u64) {
        match (connections.role(link), link) {
            // Sends our identity, if the peer requires it, before the peer allocates anything for us.
            (Role::Offering(lane), Link::Tcp(carrier)) => {
                let step = self.client.carrier_connected(lane);
                self.go_on_with_carrier(connections, carrier, lane, step, now_ns);
            }
            (Role::Lane(lane, _), link) => {
                self.client.connected(lane, now_ns);
                if let Link::Shm(id) = link {
                    let allowed = connections.shm.process(id).is_some();
                    self.client.lane_event(lane, LaneEvent::CmaAllowed(allowed), now_ns);
                }
            }
            _ => {}
        }
    }

    /// Handles the end of a connection, which had this role.
    pub(crate) fn gone(&mut self, link: Link, role: Role, why: &CloseCause, now_ns: u64) {
        if let Link::Shm(id) = link {
            self.mapped.forget(id);
            self.peer_memory.forget(id);
            self.pool_reads.forget(id);
        }
        if let Role::Lane(lane, _) | Role::Offering(lane) = role {
            self.lanes.end(lane);
            self.lane_ended(lane, why, now_ns);
        }
    }

    /// Reports to the client that a lane's connection has ended, or was never established.
    pub(super) fn lane_ended(&mut self, lane: LaneId, why: &CloseCause, now_ns: u64) {
        match why {
            CloseCause::Unavailable(why) => self.client.lane_event(lane, LaneEvent::PathUnavailable(why), now_ns),
            CloseCause::Tls(_) => {
                self.client.lane_event(lane, LaneEvent::Refused(Status::TlsFailed), now_ns);
                self.client.lane_gone(lane, now_ns);
            }
            _ => self.client.lane_gone(lane, now_ns),
        }
    }

    /// Takes a frame that arrived on a lane; returns the target of its payload.
    pub(crate) fn take_frame(
        &mut self,
        connections: &mut Connections,
        reports: &mut Reports,
        link: Link,
        header: &Header,
        body: &[u8],
        now_ns: u64,
    ) -> Target {
        let lane = match connections.role(link) {
            Role::Lane(lane, _) => lane,
            // The peer has replied to our identity, before it is offered an RDMA connection.
            Role::Offering(lane) => {
                if let Link::Tcp(carrier) = link {
                    let step = self.client.carrier_frame(lane, header, body);
                    self.go_on_with_carrier(connections, carrier, lane, step, now_ns);
                }
                return Target::Discard;
            }
            Role::None | Role::Served | Role::Carrier(_) => return Target::Discard,
        };
        let takes_payload = matches!(
            header.kind,
            Kind::Reply(Operation::Put | Operation::Write | Operation::WriteMany | Operation::Fill)
        );
        if takes_payload && self.uploads.is_unfinished(header.request) {
            // Accepting the answer would end a request whose memory is still being sent.
            reports.broken();
            reports.problem("the peer answered before the payload was sent");
            connections.close(link, CloseCause::Closed);
            return Target::Discard;
        }
        let checksum = header.checksum().is_some();
        match self.client.frame(lane, header, body, now_ns) {
            PayloadTo::Discard => {
                connections.set_role(link, Role::Lane(lane, None));
                Target::Discard
            }
            PayloadTo::Local { local, slice } => {
                connections.set_role(link, Role::Lane(lane, Some(slice)));
                match self.buffers.pieces(local) {
                    Pieces::One(buffer) => Target::Memory { buffer, checksum },
                    Pieces::Many(buffers) => Target::Scatter { buffers, checksum },
                }
            }
            PayloadTo::Scatter { slice } => {
                connections.set_role(link, Role::Lane(lane, Some(slice)));
                let locals = self.client.scatter(slice);
                Target::Scatter { buffers: self.buffers.all(locals), checksum }
            }
        }
    }

    /// Handles the completion of the payload of a lane's last frame.
    pub(crate) fn payload_done(
        &mut self,
        connections: &mut Connections,
        link: Link,
        checksum: Option<u64>,
        now_ns: u64,
    ) {
        if let Role::Lane(lane, Some(slice)) = connections.role(link) {
            connections.set_role(link, Role::Lane(lane, None));
            self.client.payload_done(slice, checksum, now_ns);
        }
    }

    fn go_on_with_carrier(
        &mut self,
        connections: &mut Connections,
        carrier: ConnectionId,
        lane: LaneId,
        step: Carrier,
        now_ns: u64,
    ) {
        match step {
            Carrier::Go => {
                let devices = self.client.rail_of(lane).and_then(|rail| rail.rdma);
                let (own, peer) = devices.map_or((0, 0), |devices| (devices.own, devices.peer));
                match connections.offer_rdma(carrier, lane, own, peer) {
                    Ok(link) => self.lanes.set(lane, link),
                    Err(error) => connections.close(Link::Tcp(carrier), CloseCause::Setup(error.to_string())),
                }
            }
            Carrier::Send(header, body) => connections.send(Link::Tcp(carrier), &header, &body, None),
            Carrier::Refused(status, why) => {
                self.client.lane_event(lane, LaneEvent::Refused(status), now_ns);
                connections.close(Link::Tcp(carrier), CloseCause::Setup(why));
            }
        }
    }

    /// Handles the peer's answer to an offer of an RDMA connection.
    pub(crate) fn offer_answered(&mut self, answer: &OfferAnswer, now_ns: u64) {
        match *answer {
            OfferAnswer::Refused(lane, Status::Unsupported) => {
                self.client.lane_event(lane, LaneEvent::PathRefused("the peer has no RDMA device"), now_ns);
            }
            OfferAnswer::Refused(lane, status) => self.client.lane_event(lane, LaneEvent::Refused(status), now_ns),
            OfferAnswer::Taken | OfferAnswer::Broken => {}
        }
    }

    /// Reports copies that RDMA devices have completed, or have failed, to the client. Returns true if there were any.
    pub(crate) fn take_device_copies(&mut self, reactor: &mut Reactor, reports: &mut Reports) -> bool {
        self.device_copies.take(&mut self.client, reactor, &mut reports.counters)
    }

    /// Takes answers of stock engines to offers of RDMA connections. Returns true if there were any.
    pub(crate) fn take_stock_answers(&mut self, connections: &mut Connections) -> bool {
        self.stock_offers.as_mut().is_some_and(|offers| offers.take_answers(&mut connections.rdma))
    }

    /// Reports completed file transfers to the client. Returns true if there were any.
    ///
    /// # Errors
    /// If the kernel's queue fails.
    pub(crate) fn take_files(&mut self, reactor: &mut Reactor, reports: &mut Reports) -> io::Result<bool> {
        if self.files.is_idle() {
            return Ok(false);
        }
        self.files.poll()?;
        let mut progress = false;
        while let Some((lane, slice, result)) = self.files.poll_done() {
            progress = true;
            let now_ns = reactor.arrival_ns();
            if !self.files.is_leaving(lane) {
                self.copied(&reactor.connections, lane, slice, result.map(|()| 0), now_ns);
            }
        }
        if let Some(problem) = self.files.take_problem() {
            reports.problem(problem);
        }
        for lane in self.files.take_gone() {
            progress = true;
            self.client.lane_gone(lane, reactor.now_ns());
        }
        Ok(progress)
    }
}
