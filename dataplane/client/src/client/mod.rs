//! The client: what its host calls, and how those inputs are spread over its parts.

mod inputs;
mod metrics;

use std::sync::Arc;

use kvplane_proto::digest::Digest;
use kvplane_proto::frame::Header;
use kvplane_proto::ids::{BatchId, Epoch, RequestId, SLOTS, Slot};
use kvplane_proto::limits::Limits;
use kvplane_proto::map::ClusterMap;
use kvplane_proto::message::Operation;
use kvplane_proto::status::Status;
use kvplane_ticket::Credential;

pub use metrics::{ClientMetrics, RailMetrics};

use crate::counts::Counters;
use crate::host::HostSide;
use crate::intake::Intake;
use crate::network::{Cause, Network};
use crate::outbox::Outbox;
use crate::router::Router;
use crate::sender::push_merged;
use crate::tables::{Batches, NOWHERE, PutBook};
use crate::traffic::Traffic;
use crate::types::{
    Config, LaneId, Local, Near, Output, PeerAddress, PeerId, Place, RailAddress, Request, SliceId, SubmitError,
    SubmitOptions, TaskResult,
};

/// What becomes of a connection that an RDMA connection is to be talked about on.
pub enum Carrier {
    /// Send this, and wait.
    Send(Header, Vec<u8>),
    /// The peer knows us, and we know it: go on.
    Go,
    /// The peer refuses us, or is another: close it.
    Refused(Status, String),
}

/// What a host has found out about a lane.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LaneEvent<'a> {
    /// Whether the kernel copies between us and the peer of this connection; until it says so, it does not.
    CmaAllowed(bool),
    /// The peer of a lane that is being connected refuses us: what waits for it fails with this, or waits in its turn.
    Refused(Status),
    /// The peer said that it does not do what this lane is for: for a while its path is not tried, and what waited for
    /// it goes elsewhere, or ends where there is no other. The host reports the lane gone after that.
    PathRefused(&'a str),
    /// The lane's path does not lead to its peer from here, and trying again soon would end the same. As
    /// [`Client::lane_gone`]; where the peer has another path, that is used for a while and no slice is charged.
    PathUnavailable(&'a str),
}

/// The peers of each slot, for a client that uses no map: by the map of an epoch; none where nobody serves a slot.
#[derive(Clone, Debug)]
pub struct SourcePeers {
    /// The epoch of the requests.
    pub epoch: Epoch,
    /// The peer that serves the objects of each slot.
    pub sources: Vec<Option<PeerId>>,
    /// The peer that keeps replicas of the objects of each slot.
    pub replica_keepers: Vec<Option<PeerId>>,
}

impl SourcePeers {
    /// The peer of each slot.
    pub fn each(peer_of: impl FnMut(Slot) -> Option<PeerId>) -> Vec<Option<PeerId>> {
        (0..SLOTS as u16).map(Slot).map(peer_of).collect()
    }
}

/// The requesting side of the data path. Single-threaded; owned by one host loop.
pub struct Client {
    pub(crate) router: Router,
    pub(crate) intake: Intake,
}

impl Client {
    /// A client that knows nobody yet.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let network = Network::new(HostSide::new(config));
        Self { router: Router::new(Traffic::new(network)), intake: Intake::new() }
    }

    /// Routes by `map` from now on, unless a newer one is in use.
    pub fn set_map(&mut self, map: ClusterMap, now_ns: u64) {
        self.router.traffic.network.host.now_ns = now_ns;
        if self.router.placement.set_map(map) {
            self.router.replicas.end_leases();
            self.router.leave_departed();
            self.router.unpark(u64::MAX);
        }
    }

    /// Routes by `map` from now on, whatever the epoch of the one in use: it is of another state of the control plane,
    /// whose epochs say nothing about those of the first.
    pub fn adopt_map(&mut self, map: ClusterMap, now_ns: u64) {
        self.router.placement.forget_map();
        self.set_map(map, now_ns);
    }

    /// Asks these peers for the objects of each slot from now on, and takes replicas of what it owns to those that keep
    /// them. For a client of former owners: a map is not used.
    pub fn set_sources(&mut self, peers: SourcePeers, now_ns: u64) {
        self.router.traffic.network.host.now_ns = now_ns;
        self.router.placement.set_replica_keepers(peers.replica_keepers);
        self.router.placement.set_sources(peers.epoch, peers.sources);
        self.router.unpark(u64::MAX);
    }

    /// Epoch of the map in use; 0 before the first.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.router.placement.epoch()
    }

    /// Proves this ticket from now on, also on what is connected. Without one, shards that want tickets refuse us.
    pub fn set_credential(&mut self, credential: Arc<Credential>, now_ns: u64) {
        self.router.traffic.network.host.now_ns = now_ns;
        if !self.router.traffic.network.handshakes.set_credential(credential) {
            return;
        }
        for lane in 0..self.router.traffic.network.lanes.len() as u32 {
            if let Some((id, header, body)) = self.router.traffic.network.prove_again(lane) {
                self.router.sender().send_alone(id, header, &body);
            }
        }
    }

    /// The peer at this address; the same one when it is known already.
    pub fn open_peer(&mut self, address: PeerAddress) -> PeerId {
        self.open_peer_over(address, &[])
    }

    /// The peer at this address, reached over these rails (at most [`Limits::RAILS`]; further ones are not used); its
    /// own address names it and is not used beside them. A peer that is known already keeps the rails that it has.
    pub fn open_peer_over(&mut self, address: PeerAddress, rails: &[RailAddress]) -> PeerId {
        let peer =
            self.router.traffic.network.peer_at(address, &rails[..rails.len().min(Limits::RAILS)], Near::default());
        self.router.traffic.network.peers[peer.0].pinned = true;
        peer
    }

    /// The peer at this address, whose devices are this near to its memory: see [`Near::pairs`]. A peer that is known
    /// already keeps what it has.
    pub fn open_peer_near(&mut self, address: PeerAddress, near: Near) -> PeerId {
        let peer = self.router.traffic.network.peer_at(address, &[], near);
        self.router.traffic.network.peers[peer.0].pinned = true;
        peer
    }

    /// Leaves a peer that the caller opened. What is still asked of its segments ends with [`Status::Stale`], as soon
    /// as nothing touches its memory any more. The id means nothing from now on, and another peer may get it; a peer
    /// that the map in use names as well stays for that. False for an id that the caller has not open.
    pub fn close_peer(&mut self, peer: PeerId, now_ns: u64) -> bool {
        self.router.traffic.network.host.now_ns = now_ns;
        let entry = self.router.traffic.network.peers.get_mut(peer.0).filter(|entry| entry.pinned);
        let Some(entry) = entry else { return false };
        entry.pinned = false;
        if self.router.placement.names(&self.router.traffic.network, peer) {
            return true;
        }
        let slices = &self.router.traffic.slices;
        let parked = self.router.traffic.network.host.timers.take_parked(|id| {
            slices.get(id.index, id.generation).is_some_and(|slice| slice.request.peer() == Some(peer))
        });
        self.router.depart(peer);
        for id in parked {
            self.router.route(id);
        }
        true
    }

    /// Says where a buffer of the host's is, by the host's number of the place.
    pub fn set_buffer_place(&mut self, buffer: u32, place: Place) {
        self.router.traffic.network.locality.set_place(buffer, place);
    }

    /// Which RDMA devices this host has (see [`Config::rdma`]), and how near they are to its memory. For peers that are
    /// opened from now on.
    pub fn set_rdma(&mut self, bytes_per_second: Vec<u64>, near: Near) {
        self.router.traffic.network.host.config.rdma = bytes_per_second;
        self.router.traffic.network.locality.set_near(near);
    }

    /// The way that a lane takes, where its peer was opened with several: the host connects from that address.
    #[must_use]
    pub fn rail_of(&self, lane: LaneId) -> Option<&RailAddress> {
        self.router.traffic.network.rail_of(lane)
    }

    /// Takes in a batch, to be complete by `deadline_ns`. Results come in the order of `requests`.
    ///
    /// The caller keeps the memory of the requests alive and untouched until the batch is complete.
    ///
    /// # Errors
    /// When any request is malformed; then none has any effect.
    pub fn submit(&mut self, requests: &[Request], deadline_ns: u64, now_ns: u64) -> Result<BatchId, SubmitError> {
        self.submit_puts(requests, &PutBook::new(), &SubmitOptions::until(deadline_ns), now_ns)
    }

    /// As [`Self::submit`], with more to say about the batch, and a book in which puts say more about their objects.
    ///
    /// # Errors
    /// When any request is malformed; then none has any effect.
    pub fn submit_puts(
        &mut self,
        requests: &[Request],
        puts: &PutBook,
        options: &SubmitOptions,
        now_ns: u64,
    ) -> Result<BatchId, SubmitError> {
        let deadline_ns = options.deadline_ns;
        self.router.traffic.network.host.now_ns = now_ns;
        let Traffic { network, slices, batches, .. } = &mut self.router.traffic;
        self.intake.take_in(requests, puts.len(), slices.len(), network)?;
        let id = batches.open(requests.len(), puts, options, self.router.placement.epoch());
        // Nothing is sent for what is late: ending it afterwards would cost others their lane.
        let late = deadline_ns <= now_ns;
        for stretch in self.intake.stretches() {
            match stretch.whole {
                true => self.router.make_whole(id, stretch.tasks(), requests, !late),
                false => self.router.cut(id, stretch.tasks(), requests, !late),
            }
        }
        if late {
            self.router.end_batch(id, Status::DeadlineExceeded, Cause::Deadline);
            return Ok(id);
        }
        let Traffic { network, batches, .. } = &mut self.router.traffic;
        let is_open = |batch| !batches.is_complete(batch);
        network.host.timers.add_deadline(deadline_ns, id, batches.len(), is_open);
        Ok(id)
    }

    /// Asks which of these objects are there, to be known by `deadline_ns`. The batch's tasks are none of the caller's:
    /// when it is complete, [`Batches::found`] and [`Batches::unanswered`] tell of the objects.
    ///
    /// # Errors
    /// When there are none, or too many; then nothing was done.
    pub fn submit_asks(&mut self, digests: &[Digest], deadline_ns: u64, now_ns: u64) -> Result<BatchId, SubmitError> {
        if digests.len() > Limits::BATCH_REQUESTS {
            return Err(SubmitError::TooMany { requests: digests.len(), limit: Limits::BATCH_REQUESTS });
        }
        let Router { placement, traffic, .. } = &mut self.router;
        let owner_of = |digest| placement.owner_peer(&mut traffic.network, digest);
        let requests = self.intake.existence.fill(digests, owner_of);
        let id = self.submit(&requests, deadline_ns, now_ns)?;
        // What the batch had is of use for the next one.
        core::mem::swap(&mut self.router.traffic.batches.at(id.index).existence, &mut self.intake.existence);
        Ok(id)
    }

    /// Withdraws a batch. It completes, with `Cancelled` for what was not done, when nothing touches its memory any
    /// more.
    pub fn cancel(&mut self, batch: BatchId, now_ns: u64) {
        self.router.traffic.network.host.now_ns = now_ns;
        self.router.end_batch(batch, Status::Cancelled, Cause::Withdrawn);
    }

    /// Forgets a complete batch.
    ///
    /// # Panics
    /// When the batch is not complete: its memory may still be in use.
    pub fn release(&mut self, batch: BatchId) {
        self.router.traffic.batches.release(batch);
    }

    /// The batches that were not released yet: whether they are complete, and their results.
    #[must_use]
    pub const fn batches(&self) -> &Batches {
        &self.router.traffic.batches
    }

    /// A task that has ended since the last call, by its batch and position, where [`Config::report_tasks`] asks for
    /// it. Nothing touches its memory any more. To be drained before its batch is released.
    pub fn poll_finished(&mut self) -> Option<(BatchId, u32, TaskResult)> {
        while let Some((batch, task)) = self.router.traffic.network.host.outbox.take_report() {
            if let Some(entry) = self.router.traffic.batches.get(batch) {
                return Some((batch, task, entry.results[task as usize]));
            }
        }
        None
    }

    /// The encoded [`SegmentDescriptor`](kvplane_proto::message::SegmentDescriptor) that answered a
    /// [`Request::OpenSegment`] of this batch; the last one's, where there were several. To be taken before the batch
    /// is released.
    pub fn take_description(&mut self, batch: BatchId) -> Option<Vec<u8>> {
        self.router.traffic.batches.take_description(batch)
    }

    /// The next thing for the host to do. Ask for a frame's [`Outbox::body`] and [`Outbox::payload`] before draining
    /// further.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.router.traffic.network.host.outbox.recycle();
        // A flush may send a slice to another lane, which is then flushed in its turn.
        while self.router.traffic.network.host.outbox.is_empty() && self.router.traffic.network.is_dirty() {
            self.router.flush_dirty();
        }
        self.router.traffic.network.host.outbox.pop()
    }

    /// What was decided already for the host to do, and the bytes of the frames among it.
    #[must_use]
    pub const fn outbox(&self) -> &Outbox {
        &self.router.traffic.network.host.outbox
    }

    /// When [`Self::handle_timeout`] wants to be called, in the host's nanoseconds; to be asked when `poll_output` has
    /// returned `None`.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        self.router.traffic.network.host.timers.next_ns()
    }

    /// Where the payload of the answer to this request goes, if it is one range: a host may have it put there.
    #[must_use]
    pub fn answer_memory(&self, request: RequestId) -> Option<Local> {
        let wire = self.router.traffic.wires.get(request)?;
        match (wire.operation, &wire.slices[..]) {
            (Operation::Get | Operation::GetRange | Operation::Read, &[slice]) if slice != NOWHERE => {
                self.router.traffic.slices.peek(slice).request.local()
            }
            _ => None,
        }
    }

    /// Where the payload of gathered reads goes, in order: ranges of the caller's memory, neighbours as one. To be
    /// called at once after the [`PayloadTo::Scatter`](crate::PayloadTo::Scatter) that named the slice.
    pub fn scatter(&mut self, slice: SliceId) -> &[Local] {
        let mut pieces = self.router.traffic.network.host.outbox.take_pieces();
        let wire = self.router.traffic.slices.get(slice.index, slice.generation).map(|slice| slice.wire);
        if let Some(wire) = wire.and_then(|wire| self.router.traffic.wires.get(wire)) {
            for &index in &wire.slices {
                if let Request::Read(_, local) = self.router.traffic.slices.peek(index).request {
                    push_merged(&mut pieces, local);
                }
            }
        }
        self.router.traffic.network.host.outbox.give_pieces(pieces)
    }

    /// What happened so far.
    #[must_use]
    pub const fn counters(&self) -> &Counters {
        &self.router.traffic.books.counters
    }

    /// What rails, peers and transports did.
    #[must_use]
    pub const fn metrics(&self) -> ClientMetrics<'_> {
        ClientMetrics::new(&self.router.traffic.network, &self.router.traffic.books)
    }
}
