//! How things end: lanes that are silent or reset, peers that are gone, slices that are done; and what is counted then.

use kvplane_proto::frame::Header;
use kvplane_proto::limits::Limits;
use kvplane_proto::message::{Bitmap, ReserveReply};
use kvplane_proto::status::Status;

use super::Traffic;
use crate::counts::SlowOperation;
use crate::network::{Cause, Endpoint, EndpointEvent, connection_number, is_change};
use crate::tables::{HeldHandle, NOWHERE, Slice, SliceEvent, SliceState, slice_id};
use crate::types::{Output, Path, PayloadTo, PeerId, Request, Transport, Via};

/// A lane is given up when it is silent for so many times the time that its work should take.
const STALL_FACTOR: f64 = 8.0;
/// Nor while its oldest slice may still come at this rate.
const LEAST_BYTES_PER_SECOND: u64 = 4_000_000;
/// And not before it is silent for so many times the longest silence of its rail, up to [`Limits::RAIL_SILENCE_NS`].
const SILENCES: u64 = 4;

impl Traffic {
    /// A lane beside other rails is looked at while it has work: one that has not moved anything for too long is given
    /// up, as are the other lanes of its rail that have not. A port that is gone says nothing.
    pub(crate) fn check_stall(&mut self, lane: u32) {
        let limit_ns = |traffic: &Self, lane: u32| {
            let entry = &traffic.network.lanes[lane];
            let rail = &traffic.network.rails[entry.rail].rail;
            let rate = rail.rate();
            let usual_ns = rate.base_ns().max(rate.latency_ns());
            // How far away the peer is, is not known before something was served.
            let least_ns = if usual_ns > 0.0 { Limits::STALL_NS } else { Limits::RAIL_HELLO_NS };
            // Lanes share their rail: what the others have may be served before.
            let (bulk, small) = rail.inflight_bytes();
            let work_ns = usual_ns + (bulk + small) as f64 / rate.bytes_per_ns();
            let silence_ns = rail.silence_ns().saturating_mul(SILENCES).min(Limits::RAIL_SILENCE_NS);
            // Nothing is heard of a payload before all of it is there, and a stated speed need not be the real one.
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
                self.network.rails[rail].books.of(transport).silences += 1;
            }
        }
        // Only now, as it puts off when lanes are given up.
        self.network.rails[rail].rail.gave_up(silent_ns);
    }

    /// A lane ends: its peer is to be told, if it may still carry out something. Before its slices leave it.
    pub(crate) fn note_fence(&mut self, lane: u32) {
        let entry = &self.network.lanes[lane];
        let (path, id, peer) = (entry.path, entry.id(lane), entry.peer.0);
        let unanswered = |index: &u32| {
            let slice = self.slices.peek(*index);
            // What a device of ours was told to write may still be on the network.
            let copied = path == Path::Rdma && slice.state == SliceState::Copying;
            let wire = self.wires.get(slice.wire);
            copied && matches!(slice.request, Request::Write(..)) || wire.is_some_and(|wire| is_change(wire.operation))
        };
        if path.is_greeted() && self.slices_on(lane).iter().any(unanswered) {
            self.network.peers[peer].fences.add(connection_number(id));
        }
    }

    /// The payload of gathered reads follows. `None` when no honest peer sends that.
    ///
    /// The request stays open until the payload is there, because it says for whom the payload is.
    pub(crate) fn on_many_payload(&mut self, header: &Header) -> Option<PayloadTo> {
        let unchecked = header.checksum().is_none();
        if unchecked && self.network.host.config.checksum_segments {
            return None;
        }
        let wire = self.wires.at(header.request.index);
        let slices = &mut self.slices;
        // A second answer comes to slices that receive already.
        let asked = wire.slices.iter().all(|&index| slices.at(index).state == SliceState::Asked);
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

    /// A request for many objects has its answer. `None` when no honest peer says that.
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

    /// A shard has room for a slice's bytes: the host copies them. Or it has none, and why.
    pub(crate) fn reserved(&mut self, index: u32, item: &ReserveReply) -> Option<Status> {
        let id = slice_id(index, self.slices.generation(index));
        let slice = self.slices.at(index);
        if item.status != Status::Ok {
            return Some(item.status);
        }
        let local = slice.request.source().expect("a reservation is asked for puts and fills only");
        slice.answer.held = HeldHandle::Reservation(item.reservation);
        slice.step(SliceEvent::Place);
        let lane = self.network.lanes[slice.link.lane].id(slice.link.lane);
        self.network.host.outbox.push(Output::CopyIn { lane, slice: id, offset: item.offset, local });
        None
    }

    /// A slice is to be sent again after its rail failed it.
    pub(crate) fn count_retry(&mut self, index: u32) {
        let slice = self.slices.at(index);
        if slice.link.rail != NOWHERE {
            let entry = &mut self.network.rails[slice.link.rail];
            entry.books.of(Transport::of(entry.path, slice.way.via)).retries += 1;
        }
    }

    /// A slice was bound to a lane that a rail had carried before, in a certain way: counts it if either is another
    /// now.
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

    /// A slice that was on a rail has ended, and has left it.
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
            let moved = if matches!(slice.request, Request::Get(..) | Request::GetHead(..)) {
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

    /// Frees the place of a departed peer once nothing is left on its lanes.
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

    /// Asks the host to end a lane's I/O; nothing to do for one that is idle or being reset.
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

    /// What waits for a group of which no lane is left nor on its way has to know that one was lost: another path may
    /// serve, and an attempt to connect that failed is charged.
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

    /// When something was last heard of what a get waits for.
    pub(crate) fn heard_ns(&self, index: u32) -> u64 {
        let slice = self.slices.peek(index);
        if slice.state == SliceState::Asked {
            return self.network.lanes[slice.link.lane].progress_ns;
        }
        // It waits for its turn with the peer: others are served before.
        let Some(peer) = self.network.peers.get(slice.way.peer) else { return 0 };
        let lanes = peer.groups.iter().flat_map(|group| &group.rails).flat_map(|&rail| &self.network.rails[rail].lanes);
        let lanes = lanes.map(|&lane| &self.network.lanes[lane]).filter(|lane| lane.state == Endpoint::Ready);
        lanes.map(|lane| lane.progress_ns).max().unwrap_or(0)
    }
}
