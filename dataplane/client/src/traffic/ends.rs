//! Ends: stalled and reset lanes, closed peers and completed slices, with their accounting.

use kvplane_proto::frame::Header;
use kvplane_proto::limits::Limits;
use kvplane_proto::message::{Bitmap, ReserveReply};
use kvplane_proto::status::Status;

use super::Traffic;
use crate::counts::SlowOperation;
use crate::network::{Cause, Endpoint, EndpointEvent, connection_number, is_change};
use crate::tables::{HeldHandle, NOWHERE, Slice, SliceEvent, SliceState, slice_id};
use crate::types::{Output, Path, PayloadTo, PeerId, Request, Transport, Via};

/// Stall detection: a lane is closed after a silence of this many times the expected time of its work.
const STALL_FACTOR: f64 = 8.0;
/// Slowest rate assumed in stall detection, in bytes per second: a lane is kept while its oldest slice may still arrive
/// at this rate.
const LEAST_BYTES_PER_SECOND: u64 = 4_000_000;
/// Stall detection: a lane is kept for this many times the longest silence of its rail, up to
/// [`Limits::RAIL_SILENCE_NS`].
const SILENCES: u64 = 4;

impl Traffic {
    /// Checks a lane next to other rails for a stall, while it has work: closes it if nothing has progressed for too
    /// long, together with the other stalled lanes of its rail. A dead port sends no error.
    pub(crate) fn check_stall(&mut self, lane: u32) {
        let limit_ns = |traffic: &Self, lane: u32| {
            let entry = &traffic.network.lanes[lane];
            let rail = &traffic.network.rails[entry.rail].rail;
            let rate = rail.rate();
            let usual_ns = rate.base_ns().max(rate.latency_ns());
            // The distance of the peer is unknown before a slice has completed.
            let least_ns = if usual_ns > 0.0 { Limits::STALL_NS } else { Limits::RAIL_HELLO_NS };
            // Lanes share their rail: the work of the other lanes may be served first.
            let (bulk, small) = rail.inflight_bytes();
            let work_ns = usual_ns + (bulk + small) as f64 / rate.bytes_per_ns();
            let silence_ns = rail.silence_ns().saturating_mul(SILENCES).min(Limits::RAIL_SILENCE_NS);
            // A payload shows no progress until all of it has arrived, and a stated speed may not be the real one.
            let whole_ns = match entry.list.first {
                NOWHERE => 0,
                first => traffic.slices.peek(first).load_bytes().saturating_mul(1_000_000_000) / LEAST_BYTES_PER_SECOND,
            };
            least_ns.max((work_ns * STALL_FACTOR) as u64).max(silence_ns).max(whole_ns)
        };
        let entry = &self.network.lanes[lane];
        if !entry.is_awaited() {
            return;
        }
        let stalled_ns = entry.progress_ns.saturating_add(limit_ns(self, lane));
        if stalled_ns > self.network.host.now_ns {
            self.network.lanes.set_alarm(&mut self.network.host.timers, lane, Some(stalled_ns));
            return;
        }
        let (rail, silent_ns) = (entry.rail, self.network.host.now_ns.saturating_sub(entry.progress_ns));
        for position in 0..self.network.rails[rail].lanes.len() {
            let other = self.network.rails[rail].lanes[position];
            let entry = &self.network.lanes[other];
            let silent_ns = self.network.host.now_ns.saturating_sub(entry.progress_ns);
            if entry.state == Endpoint::Ready && entry.is_awaited() && silent_ns >= limit_ns(self, other) / 2 {
                self.reset_lane(other, Cause::Peer);
                let transport = self.network.host.config.usual_transport(self.network.rails[rail].path);
                self.network.rails[rail].books.of(transport).stalls += 1;
            }
        }
        // Only after the loop, as it extends the limit.
        self.network.rails[rail].rail.gave_up(silent_ns);
    }

    /// Records a fence for a lane that ends, if the peer may still execute a change from it. Called before its slices
    /// leave it.
    pub(crate) fn note_fence(&mut self, lane: u32) {
        let entry = &self.network.lanes[lane];
        let (path, id, peer) = (entry.path, entry.id(lane), entry.peer.0);
        let unanswered = |index: &u32| {
            let slice = self.slices.peek(*index);
            // A write posted to our device may still be in the network.
            let copied = path == Path::Rdma && slice.state == SliceState::Copying;
            let wire = self.wires.get(slice.wire);
            copied && matches!(slice.request, Request::Write(..)) || wire.is_some_and(|wire| is_change(wire.operation))
        };
        if path.is_greeted() && self.slices_on(lane).iter().any(unanswered) {
            self.network.peers[peer].fences.add(connection_number(id));
        }
    }

    /// Handles the reply to gathered reads, whose payload follows. Returns `None` if it violates the protocol.
    ///
    /// The request stays in flight until the payload has arrived, because it holds the slices that the payload is for.
    pub(crate) fn on_many_payload(&mut self, header: &Header) -> Option<PayloadTo> {
        let unchecked = header.checksum().is_none();
        if unchecked && self.network.host.config.checksum_segments {
            return None;
        }
        let wire = self.wires.at(header.request.index);
        let slices = &mut self.slices;
        // A duplicate reply finds slices that are receiving already.
        let asked = wire.slices.iter().all(|&index| slices.at(index).state == SliceState::Requested);
        let bytes: u64 = wire.slices.iter().map(|&index| slices.at(index).weight_bytes()).sum();
        if !asked || header.payload_bytes != bytes {
            return None;
        }
        for &index in &wire.slices {
            let slice = slices.at(index);
            slice.answer.bytes = slice.weight_bytes();
            slice.step(SliceEvent::Payload);
        }
        let first = wire.slices[0];
        slices.at(first).answer.expected_checksum = header.checksum();
        Some(PayloadTo::Scatter { slice: slice_id(first, slices.generation(first)) })
    }

    /// Handles the reply to an existence query of many objects. Returns `None` if it violates the protocol.
    pub(crate) fn existence_answered(&mut self, index: u32, header: &Header, body: &[u8]) -> Option<()> {
        let slice = self.slices.peek(index);
        let Request::Asks(_, from, count) = slice.request else { return None };
        if header.items != count {
            return None;
        }
        let (there, heads) = Bitmap::decode_two(body, count)?;
        self.batches.at(slice.batch.index).existence.answer(from as usize, &there, heads.as_ref());
        Some(())
    }

    /// Handles the reply to a reservation: the host copies the slice's bytes, or the failure is returned.
    pub(crate) fn reserved(&mut self, index: u32, item: &ReserveReply) -> Option<Status> {
        let id = slice_id(index, self.slices.generation(index));
        let slice = self.slices.at(index);
        if item.status != Status::Ok {
            return Some(item.status);
        }
        let local = slice.request.source().expect("only puts and fills make reservations");
        slice.answer.held = HeldHandle::Reservation(item.reservation);
        slice.step(SliceEvent::Place);
        let lane = self.network.lanes[slice.link.lane].id(slice.link.lane);
        self.network.host.outbox.push(Output::CopyIn { lane, slice: id, offset: item.offset, local });
        None
    }

    /// Counts a retry of a slice that failed on its rail.
    pub(crate) fn count_retry(&mut self, index: u32) {
        let slice = self.slices.at(index);
        if slice.link.rail != NOWHERE {
            let entry = &mut self.network.rails[slice.link.rail];
            entry.books.of(Transport::of(entry.path, slice.way.via)).retries += 1;
        }
    }

    /// Counts a failover, if a slice is bound to another rail or transport than before.
    pub(crate) fn rebound(&mut self, index: u32, last: u32, via: Via) {
        let slice = self.slices.peek(index);
        let lane = &self.network.lanes[slice.link.lane];
        let next = match slice.request {
            Request::Read(target, _) | Request::Write(target, _) if lane.path == Path::Shared => lane
                .way(&self.network.host.config, target.segment, target.shareable)
                .unwrap_or(self.network.host.config.usual_via()),
            _ => self.network.host.config.usual_via(),
        };
        let (from, to) = (Transport::of(self.network.rails[last].path, via), Transport::of(lane.path, next));
        if (last, from) == (slice.link.rail, to) {
            return;
        }
        self.network.rails[last].books.of(from).failovers += 1;
        if from == to {
            return;
        }
        self.books.count_failover(from, to);
    }

    /// Accounts for the end of a slice that was on a rail and has left it.
    pub(crate) fn count_end(&mut self, slice: &Slice, status: Status) {
        if slice.link.rail == NOWHERE {
            return;
        }
        let now_ns = self.network.host.now_ns;
        let bytes = slice.load_bytes();
        let places = self.network.locality.places_of(&slice.request);
        let nodes = self.network.nodes_of(slice.link.rail, slice.way.peer, places);
        let config = &self.network.host.config;
        let entry = &mut self.network.rails[slice.link.rail];
        let transport = Transport::of(entry.path, slice.way.via);
        let counts = entry.books.of(transport);
        if status == Status::Ok {
            let moved = if matches!(slice.request, Request::Get(..) | Request::GetHead(..) | Request::GetCopy(..)) {
                slice.answer.bytes
            } else {
                slice.weight_bytes()
            };
            entry.rail.done(moved, config.is_small(bytes), slice.times.posted_ns, now_ns);
            counts.operations += if let Request::Asks(_, _, count) = slice.request { count.into() } else { 1 };
            counts.bytes += moved;
            if let Some(nodes) = nodes {
                counts.own_node.count(nodes.own);
                counts.peer_node.count(nodes.peer);
            }
            counts.queue.add(slice.times.posted_ns.saturating_sub(slice.times.queued_ns));
            counts.service.add(now_ns.saturating_sub(slice.times.posted_ns));
            self.network.peers[slice.way.peer].retries.earn();
        }
        if now_ns.saturating_sub(slice.times.begun_ns) < config.slow_ns {
            return;
        }
        counts.slow += 1;
        self.books.remember_slow(SlowOperation {
            peer: PeerId(slice.way.peer),
            transport,
            bytes: slice.weight_bytes(),
            begun_ns: slice.times.begun_ns,
            queued_ns: slice.times.queued_ns,
            posted_ns: slice.times.posted_ns,
            sent_ns: if slice.sent_ns < slice.times.posted_ns { now_ns } else { slice.sent_ns },
            done_ns: now_ns,
            attempts: slice.tries.attempts,
            status,
        });
    }

    /// Frees the entry of a closed peer once its lanes are idle and empty.
    pub(crate) fn reclaim(&mut self, peer: PeerId) {
        let lanes = self.network.lanes_of(peer);
        let quiet = lanes.iter().all(|&lane| {
            let lane = &self.network.lanes[lane];
            lane.state == Endpoint::Idle && lane.list.first == NOWHERE
        });
        let entry = &mut self.network.peers[peer.0];
        let waits = entry.groups.iter().any(|group| !group.is_empty());
        if !entry.departed || entry.groups.is_empty() || !quiet || waits {
            return;
        }
        for group in core::mem::take(&mut entry.groups) {
            for &rail in &group.rails {
                let entry = &mut self.network.rails[rail];
                self.books.keep(entry.path, &core::mem::take(&mut entry.books));
            }
            self.network.rails.give_back(group.rails);
        }
        for &lane in &lanes {
            self.network.lanes.set_alarm(&mut self.network.host.timers, lane, None);
        }
        self.network.lanes.give_back(lanes);
        self.books.forget_slow(peer);
        self.network.peers.give_back(peer);
    }

    /// Requests the host to end a lane's I/O; no effect on a lane that is idle or being reset.
    pub(crate) fn reset_lane(&mut self, lane: u32, cause: Cause) {
        if self.network.lanes[lane].state == Endpoint::Idle || !self.network.lanes.step(lane, EndpointEvent::Reset) {
            return;
        }
        let entry = &mut self.network.lanes[lane];
        entry.connection.cause = Some(cause);
        let id = entry.id(lane);
        self.books.counters.resets += 1;
        self.note_fence(lane);
        self.network.host.outbox.push(Output::Reset { lane: id });
        self.network.lanes.set_alarm(&mut self.network.host.timers, lane, None);
    }

    /// Drains the group of a lost lane if no lane of the group is left or being connected: another path may serve its
    /// slices, and a failed attempt to connect is charged to them.
    pub(crate) fn stranded(&mut self, lane: u32) -> Vec<u32> {
        let rail = &self.network.rails[self.network.lanes[lane].rail];
        let (peer, number) = (rail.peer, rail.group);
        let group = &self.network.peers[peer].groups[usize::from(number)];
        let alive = group.rails.iter().flat_map(|&rail| &self.network.rails[rail].lanes).any(|&lane| {
            let lane = &self.network.lanes[lane];
            lane.state == Endpoint::Ready || lane.is_coming()
        });
        if alive {
            self.network.mark_group(peer, number);
            return Vec::new();
        }
        self.drain_group(peer, number)
    }

    /// Returns the time of the last sign of life of the peer that a get waits for.
    pub(crate) fn heard_ns(&self, index: u32) -> u64 {
        let slice = self.slices.peek(index);
        if slice.state == SliceState::Requested {
            return self.network.lanes[slice.link.lane].progress_ns;
        }
        // The get is queued for the peer: others are served before it.
        let Some(peer) = self.network.peers.get(slice.way.peer) else { return 0 };
        let lanes = peer.groups.iter().flat_map(|group| &group.rails).flat_map(|&rail| &self.network.rails[rail].lanes);
        let lanes = lanes.map(|&lane| &self.network.lanes[lane]).filter(|lane| lane.state == Endpoint::Ready);
        lanes.map(|lane| lane.progress_ns).max().unwrap_or(0)
    }
}
