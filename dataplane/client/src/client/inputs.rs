//! Inputs from the host: frames, connection events, finished copies and time.

use kvplane_proto::frame::Header;
use kvplane_proto::ids::RequestId;
use kvplane_proto::message::{CommitItem, Kind, Operation};
use kvplane_proto::status::Status;

use super::{Carrier, Client, LaneEvent};
use crate::network::{Cause, Endpoint, EndpointEvent, Refusal};
use crate::router::ProtocolViolation;
use crate::tables::{HeldHandle, SliceEvent, SliceState, slice_id};
use crate::traffic::Copies;
use crate::types::{LaneId, Path, PayloadTo, SliceId};

impl Client {
    /// Reports that the host has connected a lane. Starts the handshake with the peer.
    pub fn connected(&mut self, lane: LaneId, now_ns: u64) {
        self.router.traffic.network.host.now_ns = now_ns;
        if self.router.traffic.network.lanes.current(lane).is_none()
            || !self.router.traffic.network.lanes.step(lane.index, EndpointEvent::Connected)
        {
            return;
        }
        if !self.router.traffic.network.lanes[lane.index].path.is_greeted() {
            self.router.traffic.network.welcomed(lane.index);
            return;
        }
        let hello = self.router.traffic.network.hello_of(lane.index);
        let header = Header::request(Kind::Request(Operation::Hello), RequestId::default());
        self.router.sender().send_alone(lane, header, &hello);
    }

    /// Reports an event of a lane.
    pub fn lane_event(&mut self, lane: LaneId, event: LaneEvent<'_>, now_ns: u64) {
        let network = &mut self.router.traffic.network;
        match event {
            LaneEvent::CmaAllowed(allowed) => {
                if let Some(entry) = network.lanes.current(lane) {
                    entry.connection.cma = allowed;
                }
            }
            LaneEvent::Refused(status) => {
                if let Some(entry) = network.lanes.current(lane) {
                    entry.connection.refusal = Some(status);
                }
            }
            LaneEvent::PathRefused(why) => {
                network.host.now_ns = now_ns;
                network.path_refused(lane, why);
            }
            LaneEvent::PathUnavailable(why) => {
                network.host.now_ns = now_ns;
                let connects = network.lanes.current(lane).is_some_and(|entry| entry.state != Endpoint::Idle);
                if connects && network.close_path(lane.index, why) {
                    network.lanes[lane.index].connection.cause = Some(Cause::Withdrawn);
                }
                self.lane_gone(lane, now_ns);
            }
        }
    }

    /// Reports that a lane is gone and that no I/O of it is left, or that it could not be connected.
    pub fn lane_gone(&mut self, lane: LaneId, now_ns: u64) {
        let traffic = &mut self.router.traffic;
        traffic.network.host.now_ns = now_ns;
        let before = traffic.network.lanes.look(lane).map(|entry| entry.state);
        if before.is_none() || !traffic.network.lanes.step(lane.index, EndpointEvent::Gone) {
            traffic.books.counters.stale_frames += 1;
            return;
        }
        if before == Some(Endpoint::Ready) {
            traffic.note_fence(lane.index);
        }
        traffic.books.counters.lanes_lost += 1;
        traffic.network.lanes.set_alarm(&mut traffic.network.host.timers, lane.index, None);
        let slices = traffic.slices_on(lane.index);
        let entry = &mut traffic.network.lanes[lane.index];
        core::mem::take(&mut entry.connection.detached).into_iter().for_each(|wire| traffic.wires.free(wire));
        let (peer, refusal, cause) = (entry.peer, entry.connection.refusal.take(), entry.connection.cause);
        let greeted = entry.connection.greeted;
        entry.lost(now_ns);
        traffic.network.rail_lost(lane.index, cause);
        let waiting = traffic.stranded(lane.index);
        for index in slices {
            let wire = self.router.traffic.slices.at(index).wire;
            self.router.traffic.wires.free(wire);
            self.router.slice_lost(index, refusal, cause);
        }
        for index in waiting {
            if greeted || matches!(cause, Some(Cause::Deadline | Cause::Withdrawn)) {
                self.router.route(slice_id(index, self.router.traffic.slices.generation(index)));
            } else {
                self.router.slice_lost(index, refusal, cause);
            }
        }
        self.router.traffic.reclaim(peer);
    }

    /// Handles a frame that arrived on a lane. Returns the destination to which the host reads its payload, if any.
    pub fn frame(&mut self, lane: LaneId, header: &Header, body: &[u8], now_ns: u64) -> PayloadTo {
        self.router.traffic.network.host.now_ns = now_ns;
        // Frames that still arrive on a lane being reset are dropped: its slices are retried when the lane is gone.
        if self.router.traffic.network.lanes.current(lane).is_none_or(|entry| entry.state == Endpoint::Resetting) {
            self.router.traffic.books.counters.stale_frames += 1;
            return PayloadTo::Discard;
        }
        let network = &mut self.router.traffic.network;
        let peer = network.lanes[lane.index].peer;
        network.peers[peer.0].heard(now_ns);
        match self.router.accept(lane, header, body) {
            Ok(payload) => payload,
            Err(ProtocolViolation) => {
                self.router.traffic.reset_lane(lane.index, Cause::Peer);
                PayloadTo::Discard
            }
        }
    }

    /// Reports that the payload of a frame is in the caller's memory; `checksum` is that of the bytes, if it was
    /// computed.
    pub fn payload_done(&mut self, slice: SliceId, checksum: Option<u64>, now_ns: u64) {
        self.router.traffic.network.host.now_ns = now_ns;
        let Some(entry) = self.router.traffic.slices.get(slice.index, slice.generation) else { return };
        if entry.state != SliceState::Receiving {
            return;
        }
        let good = entry.answer.expected_checksum.is_none() || entry.answer.expected_checksum == checksum;
        let wire = entry.wire;
        if self.router.traffic.wires.get(wire).is_some() {
            self.router.many_done(wire, good);
            return;
        }
        self.router.copy_outcome(slice.index, if good { Ok(()) } else { Err(Status::Corrupt) });
    }

    /// Reports that the host has finished a copy or a file transfer: `Ok` with the checksum of the bytes if the slice
    /// was a put, or the reason of the failure. `Unsupported` for a segment on the shared path reports that this way is
    /// closed. Returns false if the slice does not wait for the copy any more.
    pub fn copied(&mut self, lane: LaneId, slice: SliceId, result: Result<u64, Status>, now_ns: u64) -> bool {
        self.router.traffic.network.host.now_ns = now_ns;
        let live = self.router.traffic.network.lanes.current(lane).is_some();
        let Some(entry) = self.router.traffic.slices.get_mut(slice.index, slice.generation) else { return false };
        if !live || entry.link.lane != lane.index || entry.state != SliceState::Copying {
            return false;
        }
        let (held, expected) = (entry.answer.held, entry.answer.expected_checksum);
        debug_assert!(expected.is_none(), "shared copies are checked by the host");
        let stated = self.router.traffic.stated_checksum(slice.index);
        self.router.traffic.network.lanes.mark_dirty(lane.index);
        match (held, result) {
            (HeldHandle::Reservation(reservation), Ok(checksum)) if stated != 0 && stated != checksum => {
                self.router.traffic.network.lanes[lane.index].connection.settlements.aborts.push(reservation);
                self.router.settle(slice.index, Status::Corrupt);
            }
            (HeldHandle::Reservation(reservation), Ok(checksum)) => {
                let entry = self.router.traffic.slices.at(slice.index);
                entry.step(SliceEvent::Copied);
                let commit = CommitItem { reservation, checksum };
                self.router.traffic.network.lanes[lane.index]
                    .connection
                    .settlements
                    .commits
                    .push((slice.index, commit));
            }
            (HeldHandle::Reservation(reservation), Err(status)) => {
                self.router.traffic.network.lanes[lane.index].connection.settlements.aborts.push(reservation);
                self.router.settle(slice.index, status);
            }
            (HeldHandle::Pin(pin), result) => {
                self.router.traffic.network.lanes[lane.index].connection.settlements.releases.push(pin);
                self.router.copy_outcome(slice.index, result.map(|_| ()));
            }
            (HeldHandle::Nothing, Err(Status::Unsupported)) => self.router.way_closed(lane.index, slice.index),
            (HeldHandle::Nothing, result) => self.router.copy_outcome(slice.index, result.map(|_| ())),
        }
        true
    }

    /// Returns the copies behind an [`Output::CopySegment`](crate::Output::CopySegment) of an RDMA lane that may be
    /// posted with it, for a host that posts several to the device in one batch. To be called before the next output is
    /// polled; copies that are left are returned as outputs.
    #[inline]
    pub fn copies(&mut self, lane: LaneId) -> Option<Copies<'_>> {
        let entry = self.router.traffic.network.lanes.current(lane)?;
        let (ready, peer) = (entry.path == Path::Rdma && entry.state == Endpoint::Ready, entry.peer.0);
        (ready && self.router.traffic.network.peers[peer].fences.is_empty())
            .then(|| self.router.traffic.copies_of(lane.index))
    }

    /// Reports the success of several copies of an RDMA lane, oldest first: [`Self::copied`] for each.
    // Not inlined: values that its caller keeps in registers would be spilled.
    #[inline(never)]
    pub fn all_copied(&mut self, lane: LaneId, slices: impl IntoIterator<Item = SliceId>, now_ns: u64) {
        self.router.traffic.network.host.now_ns = now_ns;
        let mut slices = slices.into_iter();
        match self.router.traffic.network.lanes.current(lane).map(|entry| entry.path) {
            Some(Path::Rdma) => {}
            Some(_) => {
                return slices.for_each(|slice| {
                    self.copied(lane, slice, Ok(0), now_ns);
                });
            }
            None => return,
        }
        let mut next = slices.next();
        while let Some(id) = next {
            next = match self.router.traffic.tally_for(lane.index, id) {
                Some(mut tally) => {
                    let next = self.router.traffic.end_alike(lane.index, id, &mut slices, &mut tally);
                    self.router.traffic.take_stock(lane.index, &tally);
                    next
                }
                None => {
                    self.copied(lane, id, Ok(0), now_ns);
                    slices.next()
                }
            };
        }
        self.router.traffic.network.lanes[lane.index].progress_ns = now_ns;
        self.router.traffic.network.mark_group_of(lane.index);
        self.router.traffic.network.lanes.mark_dirty(lane.index);
    }

    /// Reports that the TCP connection to set up an RDMA connection over is connected.
    pub fn carrier_connected(&self, lane: LaneId) -> Carrier {
        let network = &self.router.traffic.network;
        if !network.handshakes.has_credential() || network.lanes.look(lane).is_none() {
            return Carrier::Go;
        }
        let body = network.hello_of(lane.index);
        Carrier::Send(Header::request(Kind::Request(Operation::Hello), RequestId::default()).with_body(&body, 1), body)
    }

    /// Handles a frame on the TCP connection over which an RDMA connection is set up, before the host takes it over.
    pub fn carrier_frame(&mut self, lane: LaneId, header: &Header, body: &[u8]) -> Carrier {
        let network = &mut self.router.traffic.network;
        if network.lanes.look(lane).is_none() {
            return Carrier::Refused(Status::Cancelled, "the lane is closed".to_owned());
        }
        let refused = |refusal: Refusal| Carrier::Refused(refusal.status, refusal.why);
        match (header.kind, header.status) {
            (Kind::Reply(Operation::Hello), Status::Prove) => match network.challenged(lane.index, body) {
                Ok((header, body)) => Carrier::Send(header, body),
                Err(why) => refused(why),
            },
            (Kind::Reply(operation @ (Operation::Hello | Operation::Prove)), Status::Ok) => {
                match network.checked_welcome(lane.index, operation, body) {
                    Ok(_) => Carrier::Go,
                    Err(why) => refused(why),
                }
            }
            (_, status) => refused(Refusal::by_peer(status)),
        }
    }

    /// Reports that the host has polled nothing since then, so that nothing could progress: the peers are not blamed
    /// for the pause. To be called before the inputs that arrived meanwhile are handled.
    pub fn note_absence(&mut self, since_ns: u64, now_ns: u64) {
        self.router.traffic.network.host.now_ns = now_ns;
        self.router.traffic.network.note_absence(since_ns);
    }

    /// Processes deadlines, reconnects and parked slices. To be called at the time that `poll_timeout` returns.
    pub fn handle_timeout(&mut self, now_ns: u64) {
        self.router.traffic.network.host.now_ns = now_ns;
        while let Some(batch) = self.router.traffic.due_deadline() {
            self.router.end_batch(batch, Status::DeadlineExceeded, Cause::Deadline);
        }
        self.router.unpark(now_ns);
        self.router.hedge();
        while let Some(lane) = self.router.traffic.network.due_alarm() {
            match self.router.traffic.network.lanes[lane].state {
                Endpoint::Connecting | Endpoint::Greeting => self.router.traffic.reset_lane(lane, Cause::Peer),
                Endpoint::Idle => self.router.traffic.network.mark_group_of(lane),
                Endpoint::Ready => self.router.traffic.check_stall(lane),
                Endpoint::Resetting => {}
            }
        }
    }
}
