//! Connections to processes of other hosts, over the drivers of the transfer engine: TCP, with TLS if it is configured,
//! and RDMA connections that are set up over it.
//!
//! A TCP connection carries the first messages. Frames then follow on it, or on an RDMA connection that both sides have
//! set up with these messages; the TCP connection stays open, because its end is the first sign of a peer's death. No
//! call blocks.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use kvplane_proto::frame::Header;
use kvplane_proto::message::{Kind, Operation};
use kvplane_proto::{RequestId, Status};
use kvplane_sys::verbs::Device;
use kvplane_sys::{Poller, Readiness, Region, cpu};
use kvplane_tls::Keychain;
use kvplane_transport::{
    CloseCause, ConnectionId, Event, Input, OutgoingPayload, Rdma, RdmaOptions, Source, Target, Tcp, Token,
    UnauthenticatedLimits, ZeroCopy, ZeroCopyOptions,
};

use crate::error::MeshError;
use crate::hello::{Hello, Welcome};

/// Connection that carries the frames of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wire {
    /// The TCP connection with this id.
    Tcp(ConnectionId),
    /// The RDMA connection with this id.
    Rdma(ConnectionId),
}

/// Event of a connection.
pub(crate) enum NetworkEvent {
    /// An outgoing TCP connection is established.
    Connected(ConnectionId),
    /// A peer introduced itself; or sent a message that is to be refused with this status.
    Hello(ConnectionId, Result<Hello, Status>),
    /// A peer answered; `None`: with nothing that is an answer.
    Answer(ConnectionId, Option<Welcome>),
    /// Frames may have arrived.
    Input(Wire),
    /// The RDMA connection is established.
    RdmaUp(ConnectionId),
    /// The payload with this hold was sent, or never will be.
    Sent(u64),
    /// The connection has ended.
    Gone(Wire, CloseCause),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Accepted; the hello has not arrived.
    Greeting,
    /// The hello was answered, or will be.
    Greeted,
    /// We have connected.
    Asking,
}

/// Connections of one process to those of other hosts.
pub(crate) struct Network {
    tcp: Tcp,
    rdma: Option<Rdma>,
    address: SocketAddr,
    /// Connections that carry no frames yet.
    phases: HashMap<ConnectionId, Phase>,
    events: VecDeque<NetworkEvent>,
    scratch: Vec<u8>,
}

impl Network {
    /// Starts to listen.
    ///
    /// # Errors
    /// When the listener cannot be watched, or a device cannot be opened.
    pub(crate) fn start(
        poller: &Poller,
        listener: TcpListener,
        tls: Option<Arc<Keychain>>,
        devices: &[Device],
    ) -> Result<Self, MeshError> {
        // Payloads are copied before a send returns, and so into the kernel from memory in the cache.
        let mut tcp = Tcp::new(ZeroCopyOptions { when: ZeroCopy::Never, ..ZeroCopyOptions::default() });
        tcp.limit_unauthenticated(UnauthenticatedLimits { of_address: 128, total: 256, ..Default::default() });
        if let Some(keychain) = tls {
            tcp.set_tls(keychain);
        }
        let failed = |source| MeshError::Kernel { what: "TCP port of the mesh", source };
        let address = listener.local_addr().map_err(failed)?;
        tcp.listen(poller, listener).map_err(failed)?;
        let rdma = match devices {
            [] => None,
            devices => {
                let mut rdma = Rdma::new(RdmaOptions::default());
                for device in devices {
                    rdma.add_device(poller, device).map_err(MeshError::Rdma)?;
                }
                Some(rdma)
            }
        };
        Ok(Self { tcp, rdma, address, phases: HashMap::new(), events: VecDeque::new(), scratch: Vec::new() })
    }

    /// Returns the address of the port.
    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connects to a peer; an event follows.
    ///
    /// # Errors
    /// When the kernel refuses at once.
    pub(crate) fn connect(&mut self, poller: &Poller, address: SocketAddr) -> io::Result<ConnectionId> {
        let id = self.tcp.connect(poller, address)?;
        self.phases.insert(id, Phase::Asking);
        Ok(id)
    }

    /// Offers an RDMA connection; `None` if there is no usable device. Its half goes with the hello.
    pub(crate) fn offer_rdma(&mut self) -> Option<(ConnectionId, Vec<u8>)> {
        let rdma = self.rdma.as_mut()?;
        (0..rdma.devices().count()).find_map(|device| rdma.offer(device, 0).ok())
    }

    /// Accepts the half of an RDMA connection; returns the answer, too, which may be a refusal.
    pub(crate) fn accept_rdma(&mut self, half: &[u8]) -> (Option<ConnectionId>, Vec<u8>) {
        match &mut self.rdma {
            Some(rdma) if !half.is_empty() => rdma.accept(half),
            _ => (None, Vec::new()),
        }
    }

    /// Completes an offered RDMA connection with the peer's answer; an event follows.
    pub(crate) fn complete_rdma(&mut self, id: ConnectionId, answer: &[u8]) {
        if let Some(rdma) = &mut self.rdma {
            rdma.complete(id, answer);
        }
    }

    /// Registers memory with the RDMA devices.
    pub(crate) fn register(&mut self, region: &Arc<Region>) {
        if let Some(rdma) = &mut self.rdma {
            rdma.register(region);
        }
    }

    /// Deregisters memory from the RDMA devices.
    pub(crate) fn forget(&mut self, region: &Arc<Region>) {
        if let Some(rdma) = &mut self.rdma {
            rdma.forget(region);
        }
    }

    /// Sends a hello.
    pub(crate) fn say_hello(&mut self, id: ConnectionId, hello: &Hello) {
        let body = hello.encode();
        let header = Header::request(Kind::Request(Operation::Mesh), RequestId::default()).with_body(&body, 1);
        self.tcp.send(id, &header, &body, None);
    }

    /// Answers a hello. A refused connection is closed when the answer is sent.
    pub(crate) fn answer(&mut self, id: ConnectionId, welcome: &Welcome) {
        let body = welcome.encode();
        let header = Header::reply(Kind::Reply(Operation::Mesh), RequestId::default(), welcome.status);
        self.tcp.send(id, &header.with_body(&body, 1), &body, None);
        if welcome.status != Status::Ok {
            self.phases.remove(&id);
            self.tcp.close_after_sending(id, CloseCause::Closed);
        }
    }

    /// Notes that frames follow on this connection: its peer is known.
    pub(crate) fn open(&mut self, id: ConnectionId) {
        self.tcp.trust(id);
        self.phases.remove(&id);
    }

    /// Queues a frame; [`Self::flush`] sends it.
    pub(crate) fn send(&mut self, wire: Wire, header: &Header, payload: OutgoingPayload) -> bool {
        match (wire, &mut self.rdma) {
            (Wire::Tcp(id), _) => self.tcp.send(id, header, &[], Some(payload)),
            (Wire::Rdma(id), Some(rdma)) => rdma.send(id, header, &[], Some(payload)),
            (Wire::Rdma(_), None) => false,
        }
    }

    /// Sends what is queued.
    pub(crate) fn flush(&mut self, poller: &Poller) {
        self.tcp.flush(poller);
        if let Some(rdma) = &mut self.rdma {
            rdma.flush();
        }
    }

    /// Returns the next input of a channel's connection.
    pub(crate) fn input(&mut self, wire: Wire) -> Input {
        match (wire, &mut self.rdma) {
            (Wire::Tcp(id), _) => self.tcp.input(id, &mut self.scratch),
            (Wire::Rdma(id), Some(rdma)) => rdma.input(id, &mut self.scratch),
            (Wire::Rdma(_), None) => Input::Wait,
        }
    }

    /// Receives on a connection whose frames go over another one: only its end is expected.
    pub(crate) fn expect_end(&mut self, wire: Wire) {
        if let (Wire::Tcp(id), Input::Frame(_) | Input::Payload(_)) = (wire, self.input(wire)) {
            self.tcp.close(id, CloseCause::Setup("a frame arrived where none is expected".to_owned()));
        }
    }

    /// Sets the destination of the payload of the last frame.
    pub(crate) fn receive_payload(&mut self, wire: Wire, target: Target) {
        match (wire, &mut self.rdma) {
            (Wire::Tcp(id), _) => self.tcp.receive_payload(id, target),
            (Wire::Rdma(id), Some(rdma)) => rdma.receive_payload(id, target),
            (Wire::Rdma(_), None) => {}
        }
    }

    /// Closes a connection.
    pub(crate) fn close(&mut self, wire: Wire) {
        match (wire, &mut self.rdma) {
            (Wire::Tcp(id), _) => {
                self.phases.remove(&id);
                self.tcp.close(id, CloseCause::Closed);
            }
            (Wire::Rdma(id), Some(rdma)) => rdma.close(id, CloseCause::Closed),
            (Wire::Rdma(_), None) => {}
        }
    }

    /// Returns true if there is work that does not wait for an event of the poller.
    pub(crate) fn has_work(&self) -> bool {
        !self.events.is_empty() || self.tcp.has_work() || self.rdma.as_ref().is_some_and(Rdma::has_work)
    }

    /// Arms the RDMA devices to end a wait of the poller. Returns false if there is something already.
    pub(crate) fn prepare_sleep(&mut self) -> bool {
        let armed = self.rdma.as_mut().is_none_or(|rdma| rdma.prepare_sleep().unwrap_or(false));
        armed && !self.has_work()
    }

    /// Handles a readiness event of one of the drivers' descriptors.
    pub(crate) fn ready(&mut self, poller: &Poller, token: Token, readiness: &Readiness) {
        match (token.source, &mut self.rdma) {
            (Source::TcpListener | Source::TcpConnection, _) => self.tcp.ready(poller, token, readiness),
            (Source::RdmaCompletions | Source::RdmaEvents, Some(rdma)) => rdma.ready(token),
            _ => {}
        }
    }

    /// Runs a round of the drivers, and collects their events.
    pub(crate) fn round(&mut self, poller: &Poller) {
        if let Some(rdma) = &mut self.rdma {
            rdma.poll(cpu::monotonic_ns());
            while let Some(event) = rdma.poll_event() {
                self.events.push_back(match event {
                    Event::Accepted(id) | Event::Connected(id) => NetworkEvent::RdmaUp(id),
                    Event::Sent(hold) => NetworkEvent::Sent(hold),
                    Event::Gone(id, cause) => NetworkEvent::Gone(Wire::Rdma(id), cause),
                });
            }
            while let Some(id) = rdma.next_ready() {
                self.events.push_back(NetworkEvent::Input(Wire::Rdma(id)));
            }
        }
        self.take_tcp_events();
        while let Some(id) = self.tcp.next_ready() {
            match self.phases.get(&id) {
                None => self.events.push_back(NetworkEvent::Input(Wire::Tcp(id))),
                Some(&phase) => self.take_message(id, phase),
            }
        }
        self.flush(poller);
        self.take_tcp_events();
    }

    fn take_tcp_events(&mut self) {
        while let Some(event) = self.tcp.poll_event() {
            match event {
                Event::Accepted(id) => _ = self.phases.insert(id, Phase::Greeting),
                Event::Connected(id) => self.events.push_back(NetworkEvent::Connected(id)),
                Event::Sent(hold) => self.events.push_back(NetworkEvent::Sent(hold)),
                Event::Gone(id, cause) => {
                    self.phases.remove(&id);
                    self.events.push_back(NetworkEvent::Gone(Wire::Tcp(id), cause));
                }
            }
        }
    }

    /// Takes the first message of a connection.
    fn take_message(&mut self, id: ConnectionId, phase: Phase) {
        let Input::Frame(header) = self.tcp.input(id, &mut self.scratch) else { return };
        let event = match (phase, header.kind) {
            (Phase::Greeting, Kind::Request(Operation::Mesh)) if header.payload_bytes == 0 => {
                self.phases.insert(id, Phase::Greeted);
                NetworkEvent::Hello(id, Hello::decode(&self.scratch))
            }
            (Phase::Asking, Kind::Reply(Operation::Mesh)) if header.payload_bytes == 0 => {
                NetworkEvent::Answer(id, Welcome::decode(&self.scratch))
            }
            _ => return self.tcp.close(id, CloseCause::Setup("not a process of a mesh".to_owned())),
        };
        self.events.push_back(event);
        // Frames may have arrived behind the answer.
        self.tcp.ready_again(id);
    }

    /// Returns the next event.
    pub(crate) fn poll_event(&mut self) -> Option<NetworkEvent> {
        self.events.pop_front()
    }
}
