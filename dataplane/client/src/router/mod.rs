//! Router: decides where slices go, and handles their outcomes. A slice is made of a request, routed, retried within
//! its budget, and completed exactly once.
//!
//! Every retry is bounded: by the batch's deadline if time can heal the failure (the owner is unreachable, busy, or has
//! changed), else by the budget of attempts.

mod making;
mod replies;

use kvplane_proto::digest::Digest;
use kvplane_proto::ids::{BatchId, RequestId, Version};
use kvplane_proto::limits::Limits;
use kvplane_proto::map::{MAX_REPLICA_OWNERS, ReplicaSet};
use kvplane_proto::message::RetainItem;
use kvplane_proto::status::Status;

use crate::network::{Cause, Endpoint, is_suspect};
use crate::placement::Placement;
use crate::replicas::Replicas;
use crate::sender::{FlushOutcome, Sender};
use crate::tables::{HeldHandle, NOWHERE, ReplicaUse, Resend, Slice, SliceEvent, SliceState, readable, slice_id};
use crate::traffic::Traffic;
use crate::types::{Local, Output, Path, PeerId, Request, SegmentTarget, SliceId};

const PARK_FIRST_NS: u64 = 10_000_000;
const PARK_LAST_NS: u64 = 500_000_000;
/// Longest backoff from a busy peer: its queues drain soon.
const PARK_BUSY_NS: u64 = 80_000_000;

/// Way in which a request is hedged whose peer does not reply.
#[derive(Clone, Copy)]
enum Hedge {
    /// It is sent to the other owner of its object, with this use of the replica owner.
    At(ReplicaUse),
    /// It ends as unreachable: its caller sends the queries of its objects one by one, each with a hedge of its own.
    Separately,
}

/// The peer has sent a frame that violates the protocol.
pub(crate) struct ProtocolViolation;

/// Routing layer: the traffic, and the state that decides where it goes.
pub(crate) struct Router {
    pub(crate) traffic: Traffic,
    pub(crate) placement: Placement,
    pub(crate) replicas: Replicas,
}

impl Router {
    pub(crate) fn new(traffic: Traffic) -> Self {
        Self { traffic, placement: Placement::default(), replicas: Replicas::new() }
    }

    /// Returns the writer of frames.
    pub(crate) const fn sender(&mut self) -> Sender<'_> {
        Sender { traffic: &mut self.traffic, placement: &self.placement }
    }

    /// Binds queued slices to lanes, and flushes the lanes with frames to send.
    pub(crate) fn flush_dirty(&mut self) {
        self.traffic.dispatch_dirty();
        // Each lane is flushed once; one whose window is full is marked dirty again by its next reply.
        for _ in 0..self.traffic.network.lanes.dirty() {
            let Some(lane) = self.traffic.network.lanes.take_dirty() else { return };
            self.flush(lane);
        }
    }

    /// Sends the frames of a lane, as far as its window allows.
    fn flush(&mut self, lane: u32) {
        if self.traffic.network.lanes[lane].state != Endpoint::Ready {
            return;
        }
        let open = self.sender().tell_fences(lane);
        self.sender().flush_held(lane);
        if !open {
            return;
        }
        loop {
            match self.sender().flush_one(lane) {
                FlushOutcome::Sent => {}
                FlushOutcome::Nothing => return,
                FlushOutcome::Unservable(id) => {
                    self.traffic.leave_lane(id.index);
                    self.route(id);
                }
                FlushOutcome::Closed(id) => {
                    self.traffic.leave_lane(id.index);
                    self.complete(id.index, Status::Unsupported);
                }
            }
        }
    }

    /// Routes a slice to a path of its peer, or completes it if there is none. Returns its target if further slices to
    /// the same segment would be routed in the same way.
    pub(crate) fn route(&mut self, id: SliceId) -> Option<SegmentTarget> {
        let slice = self.traffic.slices.get(id.index, id.generation)?;
        debug_assert!(slice.link.lane == NOWHERE && slice.state == SliceState::Queued, "a slice was routed twice");
        let request = slice.request;
        let failed_twice = (slice.tries.attempts >= 2).then_some(slice.way.group);
        let peer = match request {
            Request::Exists(digest)
            | Request::Prefetch(digest)
            | Request::Asks(digest, ..)
            | Request::Size(digest)
            | Request::Remove(digest)
            | Request::Get(digest, _)
            | Request::Put(digest, _)
            | Request::PutAs(digest, ..)
            | Request::GetRange(digest, ..)
            | Request::PeekRange(digest, ..)
            | Request::GetHead(digest, _)
            | Request::RemoveHead(digest)
            | Request::RemoveHeadOf(digest, _)
            | Request::Begin(digest, ..)
            | Request::Fill(digest, ..)
            | Request::Seal(digest, ..)
            | Request::Discard(digest, ..)
            | Request::RemoveCopy(digest)
            | Request::Retain(RetainItem { digest, .. })
            | Request::List(digest, _) => self.peer_for(id, digest),
            Request::Read(target, _) | Request::Write(target, _) => Some(target.peer),
            Request::OpenSegment(peer)
            | Request::PutCopy(.., peer)
            | Request::GetCopy(.., peer)
            | Request::ListCopy(_, peer)
            | Request::DropCopy(_, peer)
            | Request::EndExport(_, _, peer) => Some(peer),
        };
        let Some(peer) = peer else {
            self.complete(id.index, Status::NoOwner);
            return None;
        };
        if let Request::Asks(digest, ..) = request
            && self.placement.replica_owners(digest.slot()) > 0
            && is_suspect(&self.traffic.network, peer)
        {
            // Its caller queries each object by itself: the replicas may be at several shards.
            self.complete(id.index, Status::Unreachable);
            return None;
        }
        if self.traffic.network.asks_departed(&request)
            || request
                .incarnation()
                .is_some_and(|incarnation| incarnation != self.traffic.network.peers[peer.0].incarnation)
        {
            self.complete(id.index, Status::Stale);
            return None;
        }
        let Some(group) = self.traffic.network.pick_group(peer, &request, failed_twice) else {
            self.complete(id.index, Status::Unsupported);
            return None;
        };
        self.traffic.enter_group(id, peer, group);
        match request {
            Request::Read(target, _) | Request::Write(target, _) if failed_twice.is_none() => Some(target),
            _ => None,
        }
    }

    /// Returns the peer that serves a slice's object: the owner or a replica owner.
    pub(crate) fn peer_for(&mut self, id: SliceId, digest: Digest) -> Option<PeerId> {
        let slice = self.traffic.slices.peek(id.index);
        let (request, replica, number) = (slice.request, slice.tries.replica, slice.answer.replica_number);
        if slice.way.resend == Resend::ToDamaged {
            // The shard that sent damaged bytes gets the request again, with a report.
            let same = PeerId(slice.way.peer);
            let by_map = !self.placement.is_of_sources();
            let is_there = self.placement.names(&self.traffic.network, same) && !self.traffic.network.is_down(same);
            let reports = is_there || !by_map;
            self.traffic.slices.at(id.index).way.resend = if reports { Resend::ReportsDamage } else { Resend::Plain };
            if is_there && by_map {
                if matches!(replica, ReplicaUse::No | ReplicaUse::Chosen) {
                    self.watch(id, digest);
                }
                return Some(same);
            }
        }
        let several = self.placement.replica_owners(digest.slot()) > 0;
        if several && matches!(request, Request::Asks(..)) {
            self.watch(id, digest);
        }
        if !several || readable(&request).is_none() || self.placement.is_of_sources() {
            if matches!(replica, ReplicaUse::Chosen | ReplicaUse::Requested) {
                self.traffic.slices.at(id.index).tries.replica = ReplicaUse::Missed;
            }
            return self.placement.owner_peer(&mut self.traffic.network, digest);
        }
        let owner = self.placement.owner_peer(&mut self.traffic.network, digest)?;
        match replica {
            ReplicaUse::Missed => return Some(owner),
            ReplicaUse::No | ReplicaUse::Chosen if !self.traffic.network.is_down(owner) => {
                self.watch(id, digest);
                let other = self.placement.other_than_suspect(&mut self.traffic.network, digest, owner);
                let better = if other.is_none() { self.better_replica(id, digest, owner) } else { None };
                let counters = &mut self.traffic.books.counters;
                counters.second_asked += u64::from(other.is_some());
                counters.second_chosen += u64::from(better.is_some());
                let chosen = other.or(better);
                let slice = self.traffic.slices.at(id.index);
                slice.tries.replica = if chosen.is_some() { ReplicaUse::Chosen } else { ReplicaUse::No };
                slice.answer.replica_number = chosen.map_or(0, |(number, _)| number);
                return chosen.map(|(_, peer)| peer).or(Some(owner));
            }
            ReplicaUse::No | ReplicaUse::Chosen | ReplicaUse::Requested => {}
        }
        let first = if replica == ReplicaUse::Requested { number } else { 0 };
        let other = self.placement.reachable_replica(&mut self.traffic.network, digest, first);
        let slice = self.traffic.slices.at(id.index);
        slice.tries.replica = if other.is_some() { ReplicaUse::Requested } else { ReplicaUse::Missed };
        slice.answer.replica_number = other.map_or(0, |(number, _)| number);
        self.traffic.books.counters.second_asked += u64::from(other.is_some());
        other.map(|(_, peer)| peer).or(Some(owner))
    }

    /// Returns a replica owner if there is a lease on its replica and it is estimated to serve the get sooner than the
    /// owner and the others, or about as soon and the random choice selects it.
    fn better_replica(&mut self, id: SliceId, digest: Digest, owner: PeerId) -> Option<(u8, PeerId)> {
        let request = self.traffic.slices.peek(id.index).request;
        if !self.traffic.network.host.config.spread || !matches!(request, Request::Get(..)) {
            return None;
        }
        let held = self.replicas.held(digest, self.traffic.network.host.now_ns);
        let bytes = self.traffic.slices.peek(id.index).load_bytes();
        let (mut owners, mut estimates_ns) = ([None; MAX_REPLICA_OWNERS + 1], [0.0; MAX_REPLICA_OWNERS + 1]);
        let mut count = 1;
        for number in held.iter() {
            let network = &mut self.traffic.network;
            let Some(peer) = self.placement.replica_peer(network, digest, number) else { continue };
            if peer == owner || network.is_down(peer) {
                continue;
            }
            let Some(wait_ns) = network.wait_ns(peer, &request, bytes) else { continue };
            (owners[count], estimates_ns[count]) = (Some((number as u8, peer)), wait_ns);
            count += 1;
        }
        if count == 1 {
            return None;
        }
        estimates_ns[0] = self.traffic.network.wait_ns(owner, &request, bytes)?;
        let client = self.traffic.network.host.config.client;
        owners[self.replicas.choose(&estimates_ns[..count], client)]
    }

    /// Starts the hedging timer of a get or a query.
    fn watch(&mut self, id: SliceId, digest: Digest) {
        if self.traffic.network.host.config.hedge_ns > 0
            && self.placement.replica_peer(&mut self.traffic.network, digest, 0).is_some()
        {
            let begun_ns = self.traffic.slices.peek(id.index).times.begun_ns;
            let wait_ns = self
                .placement
                .owner_peer(&mut self.traffic.network, digest)
                .map_or(self.traffic.network.host.config.hedge_ns, |owner| self.hedge_after_ns(owner));
            self.traffic.unwatch(id);
            self.traffic.watch_until(id, begun_ns.saturating_add(wait_ns));
        }
    }

    /// Returns the hedging delay for a peer: its latency tail, clamped to between half of the setting and the setting.
    fn hedge_after_ns(&self, peer: PeerId) -> u64 {
        let network = &self.traffic.network;
        network.peers[peer.0].tail.estimate_ns(network.host.config.hedge_ns)
    }

    /// Records the latency of a get that a peer answered.
    fn got_after(&mut self, peer: u32, took_ns: u64) {
        let most_ns = self.traffic.network.host.config.hedge_ns;
        if let Some(peer) = self.traffic.network.peers.get_mut(peer).filter(|_| most_ns > 0) {
            peer.tail.took(took_ns, most_ns);
            self.replicas.answered();
        }
    }

    /// Hedges gets and queries whose timer has expired, to the replica owner. Their peer is suspect from now on, if
    /// nothing at all has arrived from it meanwhile.
    pub(crate) fn hedge(&mut self) {
        while let Some(id) = self.traffic.network.host.timers.due_watched(self.traffic.network.host.now_ns) {
            let Some(slice) = self.traffic.slices.get_mut(id.index, id.generation) else { continue };
            slice.hedge_ns = 0;
            let next = match slice.tries.replica {
                // The replicas of its objects may be at several shards.
                _ if matches!(slice.request, Request::Asks(..)) => Hedge::Separately,
                ReplicaUse::No => Hedge::At(ReplicaUse::Requested),
                // It was sent to the replica owner first: its hedge goes to the owner.
                ReplicaUse::Chosen => Hedge::At(ReplicaUse::Missed),
                ReplicaUse::Requested | ReplicaUse::Missed => continue,
            };
            let (state, peer) = (slice.state, PeerId(slice.way.peer));
            let waits = matches!(state, SliceState::Queued | SliceState::Requested);
            let after_ns =
                if waits && peer.0 < self.traffic.network.peers.len() { self.hedge_after_ns(peer) } else { 0 };
            // A peer that answers other requests is not silent; and without budget, no get is hedged.
            let again_ns = match self.traffic.heard_ns(id.index).saturating_add(after_ns) {
                silent_ns if silent_ns > self.traffic.network.host.now_ns => silent_ns,
                _ if !self.replicas.may_hedge() => {
                    self.traffic.network.host.now_ns.saturating_add(self.traffic.network.host.config.hedge_ns)
                }
                _ => 0,
            };
            if waits && again_ns > 0 {
                self.traffic.watch_until(id, again_ns);
                continue;
            }
            if let Some(silent) = self.traffic.network.peers.get_mut(peer.0).filter(|_| waits) {
                let host = &self.traffic.network.host;
                silent.suspect(after_ns, host.now_ns, host.config.hedge_ns);
            }
            match state {
                SliceState::Queued => {
                    self.traffic.network.host.timers.take_parked(|parked| parked == id);
                    self.traffic.leave_lane(id.index);
                    match next {
                        Hedge::At(replica) => {
                            self.traffic.slices.at(id.index).tries.replica = replica;
                            self.route(id);
                        }
                        Hedge::Separately => self.complete(id.index, Status::Unreachable),
                    }
                }
                SliceState::Requested => self.detach(id.index, next),
                SliceState::Receiving | SliceState::Copying | SliceState::Committing | SliceState::Done => {}
            }
        }
    }

    /// Detaches a get or a query from its request, whose late reply will be dropped, and hedges it. The connection is
    /// kept; if it is dead, that is detected no later than without hedging. Where a device may still write the caller's
    /// memory by itself, the request stays.
    fn detach(&mut self, index: u32, next: Hedge) {
        let slice = self.traffic.slices.peek(index);
        let (lane, wire) = (slice.link.lane, slice.wire);
        let entry = &mut self.traffic.network.lanes[lane];
        if !matches!(entry.path, Path::Stream | Path::Shared) || self.traffic.wires.get(wire).is_none() {
            return;
        }
        let progress_ns = entry.progress_ns;
        entry.connection.detached.push(wire);
        self.traffic.wires.leave(wire, index);
        self.traffic.slices.at(index).wire = RequestId::default();
        match next {
            Hedge::At(replica) => {
                self.traffic.slices.at(index).tries.replica = replica;
                self.send_again(index, None);
            }
            Hedge::Separately => {
                self.traffic.leave_lane(index);
                self.complete(index, Status::Unreachable);
            }
        }
        self.traffic.network.lanes[lane].progress_ns = progress_ns;
    }

    /// Handles an outcome from a replica owner that decides nothing: returns true, and the get goes to the next one, or
    /// back to the owner.
    pub(crate) fn back_to_owner(&mut self, index: u32, status: Status) -> bool {
        let decides = matches!(
            status,
            Status::Ok | Status::BufferTooSmall | Status::OutOfRange | Status::Striped | Status::Empty
        );
        let slice = self.traffic.slices.peek(index);
        if !slice.is_of_replica() || decides {
            return false;
        }
        let (replica, replica_number) = (slice.tries.replica, slice.answer.replica_number);
        if let Some(digest) = readable(&slice.request) {
            self.replicas.missed(digest, replica_number.into(), self.traffic.network.host.now_ns);
        }
        // While the owner is unreachable or silent, the next replica owner may have the object; after the last one, the
        // get goes back.
        let slice = self.traffic.slices.at(index);
        match replica {
            ReplicaUse::Requested => slice.answer.replica_number = replica_number.saturating_add(1),
            _ => slice.tries.replica = ReplicaUse::Missed,
        }
        self.send_again(index, None);
        true
    }

    /// Retries a slice, unless its budget is used up or its batch has ended.
    ///
    /// Time can heal a wrong owner, a missing ticket key, a busy owner and an unreachable one: these are bounded by the
    /// deadline. All other failures are bounded by the budget of attempts.
    pub(crate) fn retry(&mut self, index: u32, status: Status) {
        let slice = self.traffic.slices.at(index);
        let segment = matches!(slice.request, Request::Read(..) | Request::Write(..) | Request::OpenSegment(_));
        if status == Status::WrongOwner && segment {
            // A segment belongs to one incarnation of one process: no other map leads to it.
            self.traffic.leave_lane(index);
            self.complete(index, Status::Stale);
            return;
        }
        if matches!(slice.request, Request::Asks(..)) {
            // By another map its objects may belong to several shards: the caller queries each unanswered object again.
            self.traffic.leave_lane(index);
            let ended = self.traffic.ended(index);
            self.complete(index, ended.unwrap_or(status));
            if matches!(status, Status::WrongOwner | Status::Unreachable) {
                self.want_map();
            }
            return;
        }
        let request = self.traffic.slices.peek(index).request;
        let reports_damage = status == Status::Corrupt && matches!(request, Request::GetCopy(..));
        if self.placement.is_tried_once(&request) && !reports_damage {
            self.traffic.leave_lane(index);
            self.complete(index, status);
            return;
        }
        let slice = self.traffic.slices.at(index);
        slice.turn_to_replica(status);
        slice.note_damage(status);
        let slice = self.traffic.slices.peek(index);
        let (mut spent, mut heals) = (false, false);
        if !matches!(status, Status::WrongOwner | Status::NoKey | Status::Busy) {
            let counted = slice.tries.attempts.saturating_add(1);
            // A dead owner is replaced by the next map, and one that restarts comes back soon: losing it never uses up
            // the budget, but makes the slice prefer another path.
            heals = status == Status::Unreachable
                && self.placement.has_successors(&slice.request, self.traffic.network.host.config.fetches);
            let slice = self.traffic.slices.at(index);
            slice.tries.attempts =
                if heals { slice.tries.attempts.max(counted.min(Limits::ATTEMPTS / 2)) } else { counted };
            spent = slice.tries.attempts >= Limits::ATTEMPTS;
        }
        let slice = self.traffic.slices.at(index);
        if spent {
            self.traffic.leave_lane(index);
            let ended = self.traffic.ended(index);
            self.complete(index, ended.unwrap_or(status));
        } else {
            let peer = slice.way.peer;
            // Beyond the peer's retry budget the slice backs off, as for a busy peer. So does a slice that has lost its
            // owner more than once, to protect it from a tight loop with a peer that closes each connection when the
            // request arrives.
            let waits = matches!(status, Status::WrongOwner | Status::Busy | Status::NoKey | Status::TicketEnded)
                || heals && slice.tries.attempts >= Limits::ATTEMPTS / 2;
            let now_ns = self.traffic.network.host.now_ns;
            let within = self.traffic.network.peers.get_mut(peer).is_none_or(|peer| peer.retries.spend(now_ns));
            let most_ns = if status == Status::Busy || heals { PARK_BUSY_NS } else { PARK_LAST_NS };
            self.send_again(index, (waits || !within).then_some(most_ns));
        }
        if matches!(status, Status::WrongOwner | Status::Unreachable) {
            self.want_map();
        }
    }

    /// Requests a newer map from the host, unless that was done recently.
    fn want_map(&mut self) {
        let host = &mut self.traffic.network.host;
        if self.placement.wants_map(host.now_ns) {
            host.outbox.push(Output::WantMap);
        }
    }

    /// Requeues a slice: routes it again at once or, given a longest backoff, parks it first.
    pub(crate) fn send_again(&mut self, index: u32, later: Option<u64>) {
        self.traffic.leave_lane(index);
        if let Some(ended) = self.traffic.ended(index) {
            self.complete(index, ended);
            return;
        }
        self.traffic.books.counters.retries += 1;
        self.traffic.count_retry(index);
        let id = slice_id(index, self.traffic.slices.generation(index));
        let slice = self.traffic.slices.at(index);
        slice.step(SliceEvent::Requeue);
        slice.answer.held = HeldHandle::Nothing;
        (slice.answer.bytes, slice.answer.version, slice.answer.expected_checksum) = (0, 0, None);
        // A request to a closed peer does not back off: the id may be reused by then.
        let request = slice.request;
        if let Some(most_ns) = later.filter(|_| !self.traffic.network.asks_departed(&request)) {
            let slice = self.traffic.slices.at(index);
            let wait_ns = (PARK_FIRST_NS << slice.tries.parkings.min(16)).min(most_ns);
            slice.tries.parkings = slice.tries.parkings.saturating_add(1);
            let host = &mut self.traffic.network.host;
            host.timers.park(id, host.now_ns.saturating_add(wait_ns));
        } else {
            self.route(id);
        }
    }

    /// Routes the parked slices whose time has come.
    pub(crate) fn unpark(&mut self, now_ns: u64) {
        // The due slices are removed first, as a slice that is parked again waits for its next time.
        for id in self.traffic.network.host.timers.due_parked(now_ns) {
            self.route(id);
        }
    }

    /// Handles the loss of a slice's connection: the slice fails, is charged an attempt, or is rerouted for free.
    pub(crate) fn slice_lost(&mut self, index: u32, refusal: Option<Status>, cause: Option<Cause>) {
        match (refusal, cause) {
            (Some(status), _) => self.settle(index, status),
            (None, None | Some(Cause::Peer)) => self.retry(index, Status::Unreachable),
            (None, Some(Cause::Deadline | Cause::Withdrawn)) => self.send_again(index, None),
        }
    }

    /// Closes the peers that the map in use does not name any more: resets their lanes and reroutes their queued
    /// slices.
    pub(crate) fn leave_departed(&mut self) {
        for index in 0..self.traffic.network.peers.len() {
            let peer = &self.traffic.network.peers[index];
            if peer.pinned || peer.departed || self.placement.names(&self.traffic.network, PeerId(index)) {
                continue;
            }
            self.depart(PeerId(index));
        }
    }

    /// Closes a peer: resets its lanes, and reroutes the slices queued for it.
    pub(crate) fn depart(&mut self, peer: PeerId) {
        self.traffic.network.peers.depart(peer);
        for lane in self.traffic.network.lanes_of(peer) {
            self.traffic.reset_lane(lane, Cause::Withdrawn);
        }
        self.traffic.network.peers.leave_fences(peer);
        for number in 0..self.traffic.network.peers[peer.0].groups.len() as u8 {
            for slice in self.traffic.drain_group(peer.0, number) {
                self.route(slice_id(slice, self.traffic.slices.generation(slice)));
            }
        }
        self.traffic.reclaim(peer);
    }

    /// Splits a slice that several requests share: one of them may have caused the failure, so each is sent on its own.
    fn split(&mut self, slice: &Slice) {
        let (Request::Read(target, local) | Request::Write(target, local)) = slice.request else { return };
        let first = self.traffic.batches.at(slice.batch.index).slices.len();
        for task in slice.task..slice.task + slice.tasks {
            let (offset, bytes) = self.traffic.batches.at(slice.batch.index).overlap(task, local);
            let target = SegmentTarget { offset: target.offset + (offset - local.offset), ..target };
            let part = Local { buffer: local.buffer, offset, bytes };
            let request = match slice.request {
                Request::Read(..) => Request::Read(target, part),
                _ => Request::Write(target, part),
            };
            self.traffic.add_slice(slice.batch, task, request);
            self.traffic.batches.at(slice.batch.index).open_slices[task as usize] -= 1;
        }
        for position in first..first + slice.tasks as usize {
            let id = self.traffic.batches.at(slice.batch.index).slices[position];
            self.route(id);
        }
    }

    /// Completes a slice with its outcome.
    pub(crate) fn complete(&mut self, index: u32, status: Status) {
        if self.traffic.slices.peek(index).hedge_ns > 0 {
            self.traffic.unwatch(slice_id(index, self.traffic.slices.generation(index)));
        }
        let ended = self.traffic.slices.end(index);
        ended.step(SliceEvent::Finish);
        let slice = *ended;
        if slice.link.rail != NOWHERE && matches!(status, Status::Ok | Status::NotFound) && slice.is_get_of_owner() {
            let took_ns = self.traffic.network.host.now_ns.saturating_sub(slice.times.begun_ns);
            self.got_after(slice.way.peer, took_ns);
        }
        self.traffic.count_end(&slice, status);
        let batch = self.traffic.batches.at(slice.batch.index);
        if slice.tasks > 1 && batch.ended.is_none() && is_of_one(status) {
            self.split(&slice);
            return;
        }
        for task in slice.task..slice.task + slice.tasks {
            let shared = slice.request.local().filter(|_| slice.tasks > 1);
            let bytes = shared.map_or(slice.answer.bytes, |local| batch.overlap(task, local).1);
            let result = &mut batch.results[task as usize];
            result.from_replica = slice.is_of_replica();
            if result.status == Status::Ok {
                result.status = status;
            }
            if matches!(status, Status::Ok | Status::BufferTooSmall) {
                result.bytes += bytes;
            }
            if status == Status::Ok {
                let put = matches!(slice.request, Request::Put(..) | Request::PutAs(..) | Request::Seal(..));
                result.version = Version(slice.answer.version);
                let has_replicas = put || slice.request.is_get();
                result.replicas = if has_replicas { 1 + slice.answer.replicas.count() as u8 } else { 0 };
                let answering = ReplicaSet::NONE.with(slice.answer.replica_number.into());
                result.replica_owners = if result.from_replica { answering } else { slice.answer.replicas };
                if matches!(slice.request, Request::Begin(..)) {
                    result.incarnation = self.traffic.network.peers[slice.way.peer].incarnation;
                }
            }
            let open = &mut batch.open_slices[task as usize];
            *open -= 1;
            if *open == 0 {
                batch.remaining -= 1;
                if self.traffic.network.host.config.report_tasks {
                    self.traffic.network.host.outbox.report(slice.batch, task);
                }
                if batch.remaining == 0 {
                    self.traffic.network.host.outbox.push(Output::Done { batch: slice.batch });
                }
            }
        }
    }

    /// Ends a batch early: queued slices complete now, those in flight when their lane has been reset.
    pub(crate) fn end_batch(&mut self, id: BatchId, status: Status, cause: Cause) {
        let Some(batch) = self.traffic.batches.get_mut(id) else { return };
        if batch.remaining == 0 || batch.ended.is_some() {
            return;
        }
        batch.ended = Some(status);
        let slices = core::mem::take(&mut batch.slices);
        for &SliceId { index, generation } in &slices {
            let Some(slice) = self.traffic.slices.get(index, generation) else { continue };
            let lane = slice.link.lane;
            if slice.state == SliceState::Queued {
                self.traffic.leave_lane(index);
                self.complete(index, status);
            } else {
                self.traffic.reset_lane(lane, cause);
            }
        }
    }
}

/// Returns true if a single request of those that share a slice may have caused this outcome.
const fn is_of_one(status: Status) -> bool {
    matches!(
        status,
        Status::NotFound
            | Status::TooLarge
            | Status::BadRequest
            | Status::Unauthorized
            | Status::Stale
            | Status::OutOfRange
    )
}
