//! Connections of a host: the drivers that carry them, the role of each connection, and payloads that are being sent.
//!
//! Each driver owns its connections. Operations on a connection of any driver are here, by its [`Link`]; operations
//! that only one driver has are called on that driver.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use kvplane_client::LaneId;
use kvplane_proto::frame::Header;
use kvplane_proto::message::{Kind, Operation};
use kvplane_proto::{RequestId, SegmentId, Status};
use kvplane_store::service::{Hold, LeavingPayload};
use kvplane_sys::{Poller, Readiness, Region};
use kvplane_transport::mooncake::Lanes;
use kvplane_transport::mooncake::wire::Dialect;
use kvplane_transport::shm::SegmentOffer;
use kvplane_transport::{
    CloseCause, ConnectionId, Fault, Input, OutgoingPayload, Rdma, RdmaError, Shm, Source, Target, Token, rdma,
};

use super::devices::{DeviceFacts, RdmaDevices};
use super::links::{Link, Role, Roles};

/// Owner of a payload that is being sent.
#[derive(Debug)]
pub(crate) enum LentPayload {
    /// Memory that the service holds for an answer.
    Answer(Hold, LeavingPayload),
    /// Pinned memory that an answer was staged in under this number, and the service's hold.
    Staged(Hold, LeavingPayload, u32),
    /// Memory of the caller, for this request.
    Upload(RequestId),
}

/// Peer's answer to our offer of an RDMA connection.
pub(crate) enum OfferAnswer {
    /// Not an answer to an offer: the connection is closed.
    Broken,
    /// The peer's half, or a refusal that only the driver handles.
    Taken,
    /// A refusal that the client must be notified of.
    Refused(LaneId, Status),
}

/// All connections of a host.
pub(crate) struct Connections {
    pub(crate) poller: Poller,
    pub(crate) tcp: Fault,
    pub(crate) shm: Shm,
    pub(crate) rdma: Rdma,
    /// Lanes to stock engines.
    pub(crate) stock_lanes: Lanes,
    /// Properties of the devices of `rdma`.
    pub(crate) devices: DeviceFacts,
    roles: Roles,
    /// TCP connection that carried the offer of each RDMA connection.
    carriers: HashMap<ConnectionId, ConnectionId>,
    lent: slab::Slab<LentPayload>,
}

impl Connections {
    /// Creates an empty set of connections. `pool` is the memory that peers on this host may map.
    ///
    /// # Errors
    /// If the kernel refuses a poller.
    pub(crate) fn new(tcp: Fault, rdma: Option<&RdmaDevices>, pool: Option<Arc<Region>>) -> io::Result<Self> {
        let poller = Poller::new()?;
        let (rdma, devices) = DeviceFacts::open(rdma, &poller);
        Ok(Self {
            poller,
            tcp,
            shm: Shm::new(pool),
            rdma,
            stock_lanes: Lanes::new(),
            devices,
            roles: Roles::default(),
            carriers: HashMap::new(),
            lent: slab::Slab::new(),
        })
    }

    pub(crate) fn listen_tcp(&mut self, listener: TcpListener) -> io::Result<()> {
        self.tcp.listen(&self.poller, listener)
    }

    pub(crate) fn listen_shm(&mut self, listener: UnixListener) -> io::Result<()> {
        self.shm.listen(&self.poller, listener)
    }

    pub(crate) fn connect_tcp(&mut self, address: SocketAddr) -> Result<Link, CloseCause> {
        self.tcp.connect(&self.poller, address).map(Link::Tcp).map_err(|error| CloseCause::Setup(error.to_string()))
    }

    pub(crate) fn connect_shm(&mut self, path: &str, now_ns: u64) -> Result<Link, CloseCause> {
        self.shm.connect(&self.poller, path, now_ns).map(Link::Shm)
    }

    pub(crate) fn connect_stock(
        &mut self,
        address: SocketAddr,
        dialect: Dialect,
        now_ns: u64,
    ) -> Result<Link, CloseCause> {
        let link = self.stock_lanes.connect(&self.poller, address, dialect, now_ns);
        link.map(Link::Mooncake).map_err(|error| CloseCause::Setup(error.to_string()))
    }

    /// Returns the role of a connection.
    #[inline]
    pub(crate) fn role(&self, link: Link) -> Role {
        self.roles.get(link)
    }

    pub(crate) fn set_role(&mut self, link: Link, role: Role) {
        self.roles.set(link, role);
    }

    /// Returns true if there are connections to try without a call of the poller.
    pub(crate) fn are_worth_trying(&mut self) -> bool {
        self.tcp.try_active() || self.shm.open() > 0 || self.rdma.open() > 0
    }

    /// Passes the poller's readiness to the driver of the connection.
    pub(crate) fn ready(&mut self, token: Token, readiness: &Readiness) {
        match token.source {
            Source::TcpListener | Source::TcpConnection => self.tcp.ready(&self.poller, token, readiness),
            Source::RdmaCompletions | Source::RdmaEvents => self.rdma.ready(token),
            Source::ShmListener | Source::ShmSocket | Source::ShmDoorbell => {
                self.shm.ready(&self.poller, token, readiness);
            }
            Source::MooncakeLane => self.stock_lanes.ready(token, readiness.readable, readiness.writable),
            _ => {}
        }
    }

    /// Sends a frame, with a payload behind it. Over shared memory the payload is sent along with the frame: see
    /// [`Shm::send`].
    #[inline]
    pub(crate) fn send(&mut self, link: Link, header: &Header, body: &[u8], payload: Option<OutgoingPayload>) {
        match link {
            Link::Tcp(id) => self.tcp.send(id, header, body, payload),
            Link::Shm(id) => self.shm.send(id, header, body, &[]),
            Link::Rdma(id) => self.rdma.send(id, header, body, payload),
            Link::Mooncake(id) => self.stock_lanes.send(id, header, body, payload),
        };
    }

    /// Records the owner of a payload that is being sent; returns the number by which the driver holds it.
    #[inline]
    pub(crate) fn lend(&mut self, payload: LentPayload) -> u64 {
        self.lent.insert(payload) as u64
    }

    /// Returns the owner of a payload that has left, or never will.
    #[inline]
    pub(crate) fn take_back(&mut self, hold: u64) -> LentPayload {
        self.lent.remove(hold as usize)
    }

    /// Sets the target of the last frame's payload. Over shared memory the payload has arrived with its frame, and is
    /// received now: returns the result of [`Shm::receive_payload`].
    #[inline]
    pub(crate) fn receive_payload(&mut self, link: Link, target: Target) -> Option<Input> {
        match link {
            Link::Tcp(id) => self.tcp.receive_payload(id, target),
            Link::Rdma(id) => self.rdma.receive_payload(id, target),
            Link::Mooncake(id) => self.stock_lanes.receive_payload(id, target),
            Link::Shm(id) => return Some(self.shm.receive_payload(id, &target)),
        }
        None
    }

    /// Sets the target of a payload that its connection has waited for.
    pub(crate) fn receive_late(&mut self, link: Link, target: Target) {
        self.receive_payload(link, target);
        match link {
            Link::Tcp(id) => self.tcp.ready_again(id),
            Link::Rdma(id) => self.rdma.ready_again(id),
            Link::Shm(_) | Link::Mooncake(_) => {}
        }
    }

    /// Closes a connection at once.
    pub(crate) fn close(&mut self, link: Link, why: CloseCause) {
        match link {
            Link::Tcp(id) => self.tcp.close(id, why),
            Link::Shm(id) => self.shm.close(&self.poller, id, why),
            Link::Rdma(id) => self.rdma.close(id, why),
            Link::Mooncake(id) => self.stock_lanes.close(&self.poller, id, why),
        }
    }

    /// Closes a connection after its queued frames were sent.
    pub(crate) fn close_after_sending(&mut self, link: Link, why: CloseCause) {
        match link {
            Link::Tcp(id) => self.tcp.close_after_sending(id, why),
            Link::Rdma(id) => self.rdma.close_after_sending(id, why),
            Link::Shm(id) => {
                self.shm.flush(&self.poller);
                self.shm.close(&self.poller, id, why);
            }
            Link::Mooncake(_) => self.close(link, why),
        }
    }

    /// Handles the end of a connection; returns its role. An RDMA connection and the TCP connection that carried its
    /// offer end together.
    pub(crate) fn gone(&mut self, link: Link) -> Role {
        let role = self.roles.get(link);
        self.roles.set(link, Role::None);
        if let Link::Rdma(id) = link
            // If the carrier ended before, its place may belong to another connection by now.
            && let Some(carrier) = self.carriers.remove(&id)
            && self.roles.get(Link::Tcp(carrier)) == Role::Carrier(id)
        {
            self.roles.set(Link::Tcp(carrier), Role::None);
            self.tcp.close(carrier, CloseCause::Closed);
        }
        if let Role::Carrier(id) = role {
            self.carriers.remove(&id);
            self.rdma.close(id, CloseCause::Peer);
        }
        role
    }

    /// Offers a peer an RDMA connection for a lane, between our device of this number and the peer's. The offer is sent
    /// over a TCP connection, which carries no further frames.
    pub(crate) fn offer_rdma(
        &mut self,
        carrier: ConnectionId,
        lane: LaneId,
        own: u16,
        peer: u16,
    ) -> Result<Link, RdmaError> {
        let (id, offer) = self.rdma.offer(usize::from(own), peer)?;
        self.roles.set(Link::Tcp(carrier), Role::Carrier(id));
        self.roles.set(Link::Rdma(id), Role::Lane(lane, None));
        self.carriers.insert(id, carrier);
        let header = Header::request(Kind::Request(Operation::Rdma), RequestId::default()).with_body(&offer, 1);
        self.tcp.send(carrier, &header, &offer, None);
        Ok(Link::Rdma(id))
    }

    /// Takes a peer's answer to our offer of this RDMA connection.
    pub(crate) fn take_offer_answer(&mut self, id: ConnectionId, header: &Header, body: &[u8]) -> OfferAnswer {
        if header.kind != Kind::Reply(Operation::Rdma) {
            self.rdma.close(id, CloseCause::Closed);
            return OfferAnswer::Broken;
        }
        self.rdma.complete(id, body);
        match (header.status, self.roles.get(Link::Rdma(id))) {
            (Status::Unsupported | Status::Prove, Role::Lane(lane, _)) => OfferAnswer::Refused(lane, header.status),
            _ => OfferAnswer::Taken,
        }
    }

    /// Answers a peer's offer of an RDMA connection, which arrived over this TCP connection. Nothing is allocated for a
    /// peer that is not `welcome`.
    pub(crate) fn answer_offer(&mut self, carrier: ConnectionId, header: &Header, body: &[u8], welcome: bool) {
        let (accepted, answer) = if welcome { self.rdma.accept(body) } else { (None, rdma::refusal(Status::Prove)) };
        let status = rdma::answer_status(&answer);
        let reply = Header::reply(Kind::Reply(Operation::Rdma), header.request, status).with_body(&answer, 1);
        self.tcp.send(carrier, &reply, &answer, None);
        match accepted {
            Some(id) => {
                self.roles.set(Link::Tcp(carrier), Role::Carrier(id));
                self.carriers.insert(id, carrier);
            }
            None => {
                self.roles.set(Link::Tcp(carrier), Role::None);
                self.tcp.close_after_sending(carrier, CloseCause::Closed);
            }
        }
    }

    /// Answers a peer on this host that requests the memory of a segment.
    pub(crate) fn offer_segment(&mut self, id: ConnectionId, segment: SegmentId, offer: &SegmentOffer<'_>) {
        self.shm.offer_segment(&self.poller, id, segment, offer);
    }

    /// Expires requests that peers on this host have not answered in time.
    pub(crate) fn expire(&mut self, now_ns: u64) {
        if self.shm.poll_timeout().is_some_and(|at_ns| at_ns <= now_ns) {
            self.shm.expire(&self.poller, now_ns);
        }
    }

    /// Has the drivers other than that of stock lanes send their queues.
    pub(crate) fn flush(&mut self) {
        self.tcp.flush(&self.poller);
        self.shm.flush(&self.poller);
        self.rdma.flush();
    }

    /// Has the lanes to stock engines send their queues. Returns true if there was anything to send.
    pub(crate) fn flush_stock(&mut self, now_ns: u64) -> bool {
        self.stock_lanes.flush(&self.poller, now_ns)
    }

    /// Returns the number of open connections of all drivers.
    pub(crate) const fn open(&self) -> usize {
        self.tcp.open() + self.shm.open() + self.rdma.open() + self.stock_lanes.open()
    }

    /// Returns true if there is work that the poller does not report.
    pub(crate) fn have_work(&self) -> bool {
        self.shm.is_overflowing() || self.stock_lanes.has_work()
    }

    /// Returns true if a ring in shared memory has input.
    pub(crate) fn has_shared_input(&self) -> bool {
        self.shm.next_ready(0).is_some()
    }

    /// Prepares for the host to park. Returns true if it may.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        self.shm.prepare_sleep();
        // A device that cannot be armed is gone, and reports that by an event.
        self.rdma.prepare_sleep().unwrap_or(true)
    }

    /// Ends the announcement of a park.
    pub(crate) fn awake(&self) {
        self.shm.awake();
    }

    /// Returns the time of the next timer of a driver.
    pub(crate) fn poll_timeout(&self) -> Option<u64> {
        let timeouts = [self.tcp.poll_timeout(), self.shm.poll_timeout(), self.stock_lanes.poll_timeout()];
        timeouts.into_iter().flatten().min()
    }
}
