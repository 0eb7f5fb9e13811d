//! What comes in: connections, frames, payloads, and their ends.

use std::sync::Arc;

use kvplane_client::{LaneId, PayloadTo as ClientPayload};
use kvplane_proto::Status;
use kvplane_proto::frame::Header;
use kvplane_proto::message::{Kind, Operation};
use kvplane_store::service::{Memory, PayloadTo as ServicePayload, Place};
use kvplane_sys::IoBuf;
use kvplane_transport::{CloseCause, ConnectionId, Input, Pieces, Target};

use super::roles::{LentPayload, Link, Role};
use super::{FRAMES_PER_ROUND, Host, HostConfig};

/// How a host takes input from one of its drivers.
pub(super) struct Inputs {
    pub(super) link: fn(ConnectionId) -> Link,
    /// The next connection that has some.
    pub(super) next: fn(&mut Host) -> Option<ConnectionId>,
    pub(super) input: fn(&mut Host, ConnectionId, &mut Vec<u8>) -> Input,
    /// Has a connection come again.
    pub(super) again: fn(&mut Host, ConnectionId),
}

impl Host {
    /// How connections over TCP begin.
    pub(super) fn set_up_tcp(&mut self, config: &HostConfig) {
        if let Some(keychain) = &config.tls {
            self.tcp.set_tls(Arc::clone(keychain));
        }
        if self.service.is_some() {
            self.tcp.limit_strangers(config.strangers);
        }
    }

    pub(super) fn accepted(&mut self, link: Link, now_ns: u64) {
        self.counters.accepted += 1;
        match &mut self.service {
            Some(service) => {
                self.roles.set(link, Role::Served);
                service.peer_joined(link.peer(), link.path(), now_ns);
            }
            None => self.close(link, CloseCause::Closed),
        }
    }

    pub(super) fn connected(&mut self, link: Link, now_ns: u64) {
        if let (Role::Asking(lane), Link::Tcp(id)) = (self.roles.get(link), link) {
            self.greet_carrier(id, lane);
            return;
        }
        if let (Role::Lane(lane, _), Some(client)) = (self.roles.get(link), &mut self.client) {
            client.connected(lane, now_ns);
            if let Link::Shm(id) = link {
                client.cma_allowed(lane, self.shm.process(id).is_some());
            }
        }
    }

    pub(super) fn sent(&mut self, hold: u64) {
        match self.lent.remove(hold as usize) {
            LentPayload::Answer(hold, leaving) => {
                if let Some(service) = &mut self.service {
                    service.left(&leaving, hold, self.rounds.now_ns());
                    service.sent(hold);
                }
            }
            LentPayload::Upload(request) => self.uploads.finish(request),
        }
    }

    pub(super) fn gone(&mut self, link: Link, why: &CloseCause, now_ns: u64) {
        let role = self.roles.get(link);
        self.roles.set(link, Role::None);
        match why {
            CloseCause::Closed | CloseCause::Peer => {}
            CloseCause::Frame(_) | CloseCause::Ring(_) => {
                self.counters.broken += 1;
                self.notices.problem(why.to_string());
            }
            CloseCause::Kernel(_) | CloseCause::Setup(_) | CloseCause::Rdma(_) | CloseCause::Unavailable(_) => {
                self.notices.problem(why.to_string());
            }
            CloseCause::Tls(text) => self.tls_failed(text),
        }
        if let Link::Rdma(id) = link {
            self.carried_gone(id);
        }
        if let Link::Shm(id) = link {
            self.regions.mapped.retain(|&(of, _), _| of != id);
            self.same_host.forget(id);
        }
        match role {
            Role::Served => {
                if let Some(service) = &mut self.service {
                    service.peer_gone(link.peer(), now_ns);
                }
            }
            Role::Carrier(id) => {
                self.rdma_work.leave_carrier(id);
                self.close(Link::Rdma(id), CloseCause::Peer);
            }
            Role::Lane(lane, _) | Role::Asking(lane) => {
                if let Some(entry) = self.lanes.get_mut(lane.index as usize) {
                    entry.take_if(|(held, _)| *held == lane);
                }
                self.lane_ended(lane, why, now_ns);
            }
            Role::None => {}
        }
    }

    /// Tells the client that a lane's connection is gone, or never was.
    pub(super) fn lane_ended(&mut self, lane: LaneId, why: &CloseCause, now_ns: u64) {
        let Some(client) = &mut self.client else { return };
        match why {
            CloseCause::Unavailable(why) => client.path_unavailable(lane, why, now_ns),
            CloseCause::Tls(_) => {
                client.refused(lane, Status::TlsFailed);
                client.lane_gone(lane, now_ns);
            }
            _ => client.lane_gone(lane, now_ns),
        }
    }

    /// A connection could not be sealed. Said now and then: whoever connects may have that as often as it likes.
    fn tls_failed(&mut self, text: &str) {
        self.counters.tls_failed += 1;
        if self.notices.may_log_tls(self.rounds.now_ns()) {
            tracing::warn!("a data connection ended: {text}");
        }
        self.notices.problem(text);
    }

    pub(super) fn close(&mut self, link: Link, why: CloseCause) {
        match link {
            Link::Tcp(id) => self.tcp.close(id, why),
            Link::Shm(id) => self.shm.close(&self.poller, id, why),
            Link::Rdma(id) => self.rdma_work.driver.close(id, why),
            Link::Mooncake(id) => self.stock_lanes.close(&self.poller, id, why),
        }
    }

    pub(super) fn take_tcp(&mut self) -> bool {
        self.take_inputs(&Inputs {
            link: Link::Tcp,
            next: |host| host.tcp.next_ready(host.rounds.now_ns()),
            input: |host, id, scratch| host.tcp.input(id, scratch, host.rounds.now_ns()),
            again: |host, id| host.tcp.ready_again(id),
        })
    }

    /// Takes what connections of one driver bring, whose payloads follow their frames. Inlined, so that what differs
    /// between drivers is known where it is called: this runs for every frame.
    #[inline(always)]
    pub(super) fn take_inputs(&mut self, driver: &Inputs) -> bool {
        let mut progress = false;
        // Those that use up their share come again in the next round.
        let mut again = Vec::new();
        while let Some(id) = (driver.next)(self) {
            let mut frames = 0;
            loop {
                if frames == FRAMES_PER_ROUND {
                    again.push(id);
                    break;
                }
                let mut scratch = core::mem::take(&mut self.scratch);
                let input = (driver.input)(self, id, &mut scratch);
                let now_ns = if matches!(input, Input::Wait) { self.rounds.now_ns() } else { self.arrival_ns() };
                let more = self.take_input((driver.link)(id), &input, &scratch, now_ns);
                self.scratch = scratch;
                if !more {
                    break;
                }
                progress = true;
                frames += 1;
                // At once, so that the limit on waiting answers holds between two frames.
                self.drain_service();
            }
        }
        for id in again {
            (driver.again)(self, id);
        }
        progress
    }

    /// One step of a connection whose payloads follow its frames; false when there was none.
    pub(super) fn take_input(&mut self, link: Link, input: &Input, body: &[u8], now_ns: u64) -> bool {
        match input {
            Input::Wait => return false,
            Input::Frame(header) => {
                let target = self.take_frame(link, header, body, now_ns);
                if header.payload_bytes > 0 {
                    match link {
                        Link::Tcp(id) => self.tcp.receive_payload(id, target),
                        Link::Rdma(id) => {
                            if self.roles.get(link) == Role::Served
                                && let Some(buffer) = target.first()
                            {
                                self.rdma_work.count_served(id, buffer.region());
                            }
                            self.rdma_work.driver.receive_payload(id, target);
                        }
                        Link::Mooncake(id) => self.stock_lanes.receive_payload(id, target),
                        // It has come along with its frame.
                        Link::Shm(id) => {
                            let arrived = self.shm.receive_payload(id, &target);
                            self.take_input(link, &arrived, &[], now_ns);
                        }
                    }
                }
            }
            Input::Payload(checksum) => match self.roles.get(link) {
                Role::Served => {
                    if let Some(service) = &mut self.service {
                        service.payload_done(link.peer(), *checksum, now_ns);
                    }
                }
                Role::Lane(lane, Some(slice)) => {
                    self.roles.set(link, Role::Lane(lane, None));
                    if let Some(client) = &mut self.client {
                        client.payload_done(slice, *checksum, now_ns);
                    }
                }
                Role::Lane(_, None) | Role::Asking(_) | Role::Carrier(_) | Role::None => {}
            },
        }
        true
    }

    pub(super) fn take_shm(&mut self) -> bool {
        let mut progress = false;
        let mut from = 0;
        while let Some(id) = self.shm.next_ready(from) {
            from = id.index + 1;
            for _ in 0..FRAMES_PER_ROUND {
                let mut scratch = core::mem::take(&mut self.scratch);
                let input = self.shm.input(&self.poller, id, &mut scratch);
                let now_ns = if matches!(input, Input::Wait) { self.rounds.now_ns() } else { self.arrival_ns() };
                let more = self.take_input(Link::Shm(id), &input, &scratch, now_ns);
                self.scratch = scratch;
                if !more {
                    break;
                }
                progress = true;
            }
        }
        progress
    }

    /// Gives a frame to whoever it is for; says where its payload goes.
    fn take_frame(&mut self, link: Link, header: &Header, body: &[u8], now_ns: u64) -> Target {
        let checksum = header.checksum().is_some();
        match self.roles.get(link) {
            Role::Served if header.kind == Kind::Request(Operation::Rdma) => {
                self.answer_rdma(link, header, body, now_ns);
                Target::Discard
            }
            Role::Served => {
                let Some(service) = &mut self.service else { return Target::Discard };
                let to = service.request(link.peer(), header, body, now_ns);
                // Before the payload, which over shared memory is here already, and ends the reservation.
                self.write_tails();
                let Some(service) = &mut self.service else { return Target::Discard };
                if let (Kind::Request(Operation::Hello | Operation::Prove), Link::Tcp(id)) = (header.kind, link)
                    && service.inspect().is_welcome(link.peer())
                {
                    self.tcp.trust(id);
                }
                let target = match to {
                    ServicePayload::Discard => Target::Discard,
                    ServicePayload::Place(place) => Target::Memory { buffer: self.memory(place), checksum },
                    ServicePayload::Places(range) => Target::Scatter { buffers: self.memories(range), checksum },
                };
                self.target_there(link, target)
            }
            Role::Lane(lane, _) => {
                let takes_payload = matches!(
                    header.kind,
                    Kind::Reply(Operation::Put | Operation::Write | Operation::WriteMany | Operation::Fill)
                );
                if takes_payload && self.uploads.is_unfinished(header.request) {
                    // Taken as the answer, it would end a request whose memory is still being sent.
                    self.counters.broken += 1;
                    self.notices.problem("the peer answered before it was sent the payload");
                    self.close(link, CloseCause::Closed);
                    return Target::Discard;
                }
                let Some(client) = &mut self.client else { return Target::Discard };
                match client.frame(lane, header, body, now_ns) {
                    ClientPayload::Discard => {
                        self.roles.set(link, Role::Lane(lane, None));
                        Target::Discard
                    }
                    ClientPayload::Local { local, slice } => {
                        self.roles.set(link, Role::Lane(lane, Some(slice)));
                        match self.regions.buffers.pieces(local) {
                            Pieces::One(buffer) => Target::Memory { buffer, checksum },
                            Pieces::Many(buffers) => Target::Scatter { buffers, checksum },
                        }
                    }
                    ClientPayload::Scatter { slice } => {
                        self.roles.set(link, Role::Lane(lane, Some(slice)));
                        let locals = client.scatter(slice);
                        Target::Scatter { buffers: self.regions.buffers.all(locals), checksum }
                    }
                }
            }
            Role::Carrier(id) => {
                self.take_rdma_answer(id, header, body, now_ns);
                Target::Discard
            }
            Role::Asking(lane) => {
                self.take_carrier_frame(link, lane, header, body);
                Target::Discard
            }
            Role::None => Target::Discard,
        }
    }

    /// The memory behind the places of a gathered payload.
    ///
    /// # Panics
    /// As [`Self::memory`].
    pub(super) fn memories(&self, range: core::ops::Range<usize>) -> Vec<IoBuf> {
        let Some(service) = &self.service else { return Vec::new() };
        service.places(range).iter().map(|&place| self.memory(place)).collect()
    }

    /// The memory behind a place that the service named.
    ///
    /// # Panics
    /// When the service names memory that it was not given.
    pub(super) fn memory(&self, place: Place) -> IoBuf {
        let region = match place.memory {
            Memory::Pool => self.regions.pool.as_ref(),
            Memory::Segment(segment) => self.segment(segment),
        };
        let region = region.expect("the service names only memory that the host gave it");
        IoBuf::new(std::sync::Arc::clone(region), place.offset as usize, place.bytes as usize)
    }
}
