//! Client: the interface to the host, which dispatches its inputs to the layers below.

pub(crate) mod direct;
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
use crate::intake::{self, Intake};
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

/// Next step on a TCP connection over which an RDMA connection is set up.
pub enum Carrier {
    /// Send this frame, and wait for the reply.
    Send(Header, Vec<u8>),
    /// Authentication is complete or not needed: set up the RDMA connection.
    Go,
    /// Close the connection: the peer refused it, or is not the expected one.
    Refused(Status, String),
}

/// Event of a lane that the host has detected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LaneEvent<'a> {
    /// Availability of CMA copies between this process and the peer; unavailable until this event.
    CmaAllowed(bool),
    /// The peer refuses the connection: slices queued for it fail with this status, or are retried later.
    Refused(Status),
    /// The peer does not support the purpose of this lane: its path is not retried for a while, and slices queued for
    /// it take another path, or fail if there is none. The host reports the lane gone after that.
    PathRefused(&'a str),
    /// The lane's path does not reach its peer from this host, and an early retry would fail the same way. Includes
    /// [`Client::lane_gone`]. If the peer has another path, that is used for a while, and no slice is charged an
    /// attempt.
    PathUnavailable(&'a str),
}

/// Peers of each slot, for a client that uses them instead of a map; `None` for a slot that no peer serves.
#[derive(Clone, Debug)]
pub struct SourcePeers {
    /// Epoch of the requests.
    pub epoch: Epoch,
    /// Peer that serves the objects of each slot.
    pub sources: Vec<Option<PeerId>>,
}

impl SourcePeers {
    /// Returns the peer of each slot.
    pub fn each(peer_of: impl FnMut(Slot) -> Option<PeerId>) -> Vec<Option<PeerId>> {
        (0..SLOTS as u16).map(Slot).map(peer_of).collect()
    }
}

/// Client side of the data path. Single-threaded; owned by one host loop.
pub struct Client {
    pub(crate) router: Router,
    pub(crate) intake: Intake,
}

/// Validates requests that the caller submits in several batches, as [`Client::submit_puts`] validates those of one.
///
/// # Errors
/// Returns an error if any request is invalid.
pub fn check_requests(client: &Client, requests: &[Request], puts: &PutBook) -> Result<(), SubmitError> {
    intake::check(requests, puts.len(), &client.router.traffic.network)
}

impl Client {
    /// Creates a client without peers.
    #[must_use]
    pub fn new(config: Config) -> Self {
        let network = Network::new(HostSide::new(config));
        Self { router: Router::new(Traffic::new(network)), intake: Intake::new() }
    }

    /// Routes by `map` from now on, unless the map in use is as new or newer.
    pub fn set_map(&mut self, map: ClusterMap, now_ns: u64) {
        self.router.traffic.network.host.now_ns = now_ns;
        if self.router.placement.set_map(map) {
            self.router.replicas.end_leases();
            self.router.leave_departed();
            self.router.unpark(u64::MAX);
        }
    }

    /// Routes by `map` from now on, whatever the epoch of the one in use: `map` is of another cluster state, and epochs
    /// of different states cannot be compared.
    pub fn adopt_map(&mut self, map: ClusterMap, now_ns: u64) {
        self.router.placement.forget_map();
        self.set_map(map, now_ns);
    }

    /// Pulls the objects of each slot from these peers from now on. For a client of an importer, which uses no map;
    /// requests about replicas name their peer.
    pub fn set_sources(&mut self, peers: SourcePeers, now_ns: u64) {
        self.router.traffic.network.host.now_ns = now_ns;
        self.router.placement.set_sources(peers.epoch, peers.sources);
        self.router.unpark(u64::MAX);
    }

    /// Returns the epoch of the map in use; 0 before the first.
    #[must_use]
    pub fn epoch(&self) -> Epoch {
        self.router.placement.epoch()
    }

    /// Authenticates with this ticket from now on, also on connected lanes. Shards that require tickets refuse a client
    /// without one.
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

    /// Opens the peer at this address. Returns the existing peer if the address is known.
    pub fn open_peer(&mut self, address: PeerAddress) -> PeerId {
        self.open_peer_over(address, &[])
    }

    /// Opens the peer at this address, reached over these rails (at most [`Limits::RAILS`]; further ones are ignored).
    /// Its own address identifies the peer and is not used besides them. A known peer keeps its present rails.
    pub fn open_peer_over(&mut self, address: PeerAddress, rails: &[RailAddress]) -> PeerId {
        let peer =
            self.router.traffic.network.peer_at(address, &rails[..rails.len().min(Limits::RAILS)], Near::default());
        self.router.traffic.network.peers[peer.0].pinned = true;
        peer
    }

    /// Opens the peer at this address, with the locality of its devices: see [`Near::pairs`]. A known peer keeps its
    /// present rails.
    pub fn open_peer_near(&mut self, address: PeerAddress, near: Near) -> PeerId {
        let peer = self.router.traffic.network.peer_at(address, &[], near);
        self.router.traffic.network.peers[peer.0].pinned = true;
        peer
    }

    /// Closes a peer that the caller opened. Requests in flight to its segments end with [`Status::Stale`], as soon as
    /// no I/O touches their memory any more. The id is invalid from now on and may be reused for another peer; a peer
    /// that the map in use names too stays connected for that. Returns false if the caller has no such peer open.
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

    /// Sets the place of a host's buffer, by the host's number of the place, and whether it is memory of a device. Only
    /// RDMA devices access that: its reads and writes take no other path, and end with [`Status::Unsupported`] where
    /// there is none.
    pub fn set_buffer(&mut self, buffer: u32, place: Place, is_device: bool) {
        let network = &mut self.router.traffic.network;
        network.locality.set_place(buffer, place);
        network.device_buffers.set(buffer, is_device);
    }

    /// Sets the RDMA devices of this host (see [`Config::rdma`]) and their locality. Applies to peers opened from now
    /// on.
    pub fn set_rdma(&mut self, bytes_per_second: Vec<u64>, near: Near) {
        self.router.traffic.network.host.config.rdma = bytes_per_second;
        self.router.traffic.network.locality.set_near(near);
    }

    /// Returns the network path of a lane, if its peer was opened with several: the host connects from its local
    /// address.
    #[must_use]
    pub fn rail_of(&self, lane: LaneId) -> Option<&RailAddress> {
        self.router.traffic.network.rail_of(lane)
    }

    /// Submits a batch with a deadline. Results are in the order of `requests`.
    ///
    /// The caller keeps the memory of the requests alive and untouched until the batch is complete.
    ///
    /// # Errors
    /// Returns an error if any request is invalid; then none has any effect.
    pub fn submit(&mut self, requests: &[Request], deadline_ns: u64, now_ns: u64) -> Result<BatchId, SubmitError> {
        self.submit_puts(requests, &PutBook::new(), &SubmitOptions::until(deadline_ns), now_ns)
    }

    /// Submits a batch with options, and with a book of puts that holds the names and options of its objects.
    ///
    /// # Errors
    /// Returns an error if any request is invalid; then none has any effect.
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
        // A batch that is already late sends no frames: ending it afterwards would reset lanes that others use.
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

    /// Tests which of these objects exist, with a deadline. The tasks of the batch are internal: when it is complete,
    /// [`Batches::found`] and [`Batches::unanswered`] return the results for the objects.
    ///
    /// # Errors
    /// Returns an error if there are no objects, or too many; then the call has no effect.
    pub fn submit_asks(&mut self, digests: &[Digest], deadline_ns: u64, now_ns: u64) -> Result<BatchId, SubmitError> {
        if digests.len() > Limits::BATCH_REQUESTS {
            return Err(SubmitError::TooMany { requests: digests.len(), limit: Limits::BATCH_REQUESTS });
        }
        let Router { placement, traffic, .. } = &mut self.router;
        let owner_of = |digest| placement.owner_peer(&mut traffic.network, digest);
        let requests = self.intake.existence.fill(digests, owner_of);
        let id = self.submit(&requests, deadline_ns, now_ns)?;
        // The buffers of the previous batch are reused for the next one.
        core::mem::swap(&mut self.router.traffic.batches.at(id.index).existence, &mut self.intake.existence);
        Ok(id)
    }

    /// Cancels a batch. It completes when no I/O touches its memory any more, with `Cancelled` for the tasks that had
    /// not completed.
    pub fn cancel(&mut self, batch: BatchId, now_ns: u64) {
        self.router.traffic.network.host.now_ns = now_ns;
        self.router.end_batch(batch, Status::Cancelled, Cause::Withdrawn);
    }

    /// Releases a complete batch and its results.
    ///
    /// # Panics
    /// If the batch is not complete: its memory may still be in use.
    pub fn release(&mut self, batch: BatchId) {
        self.router.traffic.batches.release(batch);
    }

    /// Returns the batches that are not released yet, with their state and results.
    #[must_use]
    pub const fn batches(&self) -> &Batches {
        &self.router.traffic.batches
    }

    /// Returns a task that has completed since the last call, by its batch and position, if [`Config::report_tasks`] is
    /// set. No I/O touches its memory any more. To be drained before its batch is released.
    pub fn poll_finished(&mut self) -> Option<(BatchId, u32, TaskResult)> {
        while let Some((batch, task)) = self.router.traffic.network.host.outbox.take_report() {
            if let Some(entry) = self.router.traffic.batches.get(batch) {
                return Some((batch, task, entry.results[task as usize]));
            }
        }
        None
    }

    /// Takes the encoded [`SegmentDescriptor`](kvplane_proto::message::SegmentDescriptor) in the reply to a
    /// [`Request::OpenSegment`] of this batch; the last one's, if there were several. To be called before the batch is
    /// released.
    pub fn take_description(&mut self, batch: BatchId) -> Option<Vec<u8>> {
        self.router.traffic.batches.take_description(batch)
    }

    /// Returns the next action for the host. The host reads a frame's [`Outbox::body`] and [`Outbox::payload`] before
    /// it polls further.
    pub fn poll_output(&mut self) -> Option<Output> {
        self.router.traffic.network.host.outbox.recycle();
        // A flush may move a slice to another lane, which is then flushed in its turn.
        while self.router.traffic.network.host.outbox.is_empty() && self.router.traffic.network.is_dirty() {
            self.router.flush_dirty();
        }
        self.router.traffic.network.host.outbox.pop()
    }

    /// Returns the pending outputs, and the bytes of the frames among them.
    #[must_use]
    pub const fn outbox(&self) -> &Outbox {
        &self.router.traffic.network.host.outbox
    }

    /// Returns the time at which [`Self::handle_timeout`] has to be called, in the host's nanoseconds; valid after
    /// `poll_output` has returned `None`.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<u64> {
        self.router.traffic.network.host.timers.next_ns()
    }

    /// Returns the destination of the reply payload of this request, if it is one range, so that a host can have it
    /// received in place.
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

    /// Returns the destinations of the payload of gathered reads, in order: ranges of the caller's memory, adjacent
    /// ones merged. To be called directly after the [`PayloadTo::Scatter`](crate::PayloadTo::Scatter) that named the
    /// slice.
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

    /// Returns the counters.
    #[must_use]
    pub const fn counters(&self) -> &Counters {
        &self.router.traffic.books.counters
    }

    /// Returns the metrics of rails, peers and transports.
    #[must_use]
    pub const fn metrics(&self) -> ClientMetrics<'_> {
        ClientMetrics::new(&self.router.traffic.network, &self.router.traffic.books)
    }
}
