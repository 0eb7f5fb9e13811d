//! Outputs of the client: lanes to connect and to end, requests to send, copies to make.

use std::sync::Arc;

use kvplane_client::{DeviceCopy, LaneEvent, LaneId, Local, Output, Path, PeerAddress, PeerKind, SliceId, Via};
use kvplane_proto::Status;
use kvplane_proto::frame::Header;
use kvplane_sys::{CrossError, Region};
use kvplane_transport::mooncake::wire::Dialect;
use kvplane_transport::shm::{MemoryRequest, SegmentMemory, SegmentOutcome, ShareError};
use kvplane_transport::{CloseCause, OutgoingPayload, Pieces};

use super::ClientSide;
use super::device_copies::expect_answers;
use super::files::FileRange;
use super::lanes::LaneLinks;
use super::pool_copies;
use super::pool_reads::PoolRead;
use super::segment_copies::SegmentCopy;
use crate::host::reactor::connections::{Connections, LentPayload};
use crate::host::reactor::links::{Link, Role};
use crate::host::reactor::{BYTES_PER_CLOCK, Reactor};
use crate::host::reports::Reports;

impl ClientSide {
    /// Carries out the client's outputs. Returns true if there were any.
    pub(crate) fn drain(&mut self, reactor: &mut Reactor, reports: &mut Reports, now_ns: u64) -> bool {
        let mut progress = false;
        loop {
            while let Some(output) = self.client.poll_output() {
                progress = true;
                if !matches!(output, Output::CopySegment { via: Via::Cma, .. }) {
                    self.cross(reactor, reports, now_ns.max(reactor.now_ns()));
                }
                self.output(reactor, reports, output, now_ns.max(reactor.now_ns()));
            }
            if !self.cross(reactor, reports, now_ns.max(reactor.now_ns())) {
                return progress;
            }
        }
    }

    fn output(&mut self, reactor: &mut Reactor, reports: &mut Reports, output: Output, now_ns: u64) {
        match output {
            Output::Connect { lane, address, path } => {
                if let Err(why) = self.connect(&mut reactor.connections, lane, &address, path, now_ns) {
                    reports.problem(why.to_string());
                    self.lane_ended(lane, &why, now_ns);
                }
            }
            Output::Send { lane, header, body, payload } => {
                self.send(&mut reactor.connections, lane, &header, body, payload);
            }
            Output::CopyOut { lane, slice, offset, local, checksum } => {
                let checksum = checksum.filter(|_| self.verify_shared);
                let read = PoolRead { lane, slice, offset, local, checksum };
                match self.buffers.offered(local.buffer) {
                    Some(place) => self.pool_reads.push(place, read),
                    None => copy_out(self, reactor, &read, now_ns),
                }
            }
            Output::CopyIn { lane, slice, offset, local } => {
                let pool = pool_of(&self.lanes, &reactor.connections, lane);
                let copied = pool.map(|pool| pool_copies::copy_in(pool, offset, &self.buffers, local));
                self.pool_copied(reactor, lane, slice, local, copied, now_ns);
            }
            Output::CopySegment { lane, slice, via: Via::Rdma, segment, offset, local, write } => {
                // If the lane is gone, the client knows it.
                let Some(Link::Rdma(id)) = self.lanes.get(lane) else { return };
                let Self { device_copies, client, buffers, .. } = self;
                let first = DeviceCopy { slice, segment, offset, local, write };
                device_copies.start(client, &mut reactor.connections.rdma, buffers, id, lane, first);
            }
            Output::CopySegment { lane, slice, via, segment, offset, local, write } => {
                let copy = SegmentCopy { slice, via, segment, offset, local, write };
                self.copy_segment(reactor, reports, lane, &copy, now_ns);
            }
            Output::FileTransfer { lane, slice, file, offset, local, write } => {
                self.files.start(lane, slice, FileRange { file, offset, write }, self.buffers.one(local));
            }
            Output::Reset { lane } if self.files.has(lane) => self.files.reset(lane),
            Output::Reset { lane } => match self.lanes.get(lane) {
                Some(link) => reactor.connections.close(link, CloseCause::Closed),
                None => self.client.lane_gone(lane, now_ns),
            },
            Output::Done { batch } => reports.batch_done(batch),
            Output::WantMap => reports.want_map(),
        }
    }

    fn connect(
        &mut self,
        connections: &mut Connections,
        lane: LaneId,
        address: &PeerAddress,
        path: Path,
        now_ns: u64,
    ) -> Result<(), CloseCause> {
        let link = match path {
            Path::Stream | Path::Rdma => connections.connect_tcp(address.tcp)?,
            Path::Shared => connections.connect_shm(address.shm.as_deref().unwrap_or_default(), now_ns)?,
            Path::Mooncake => {
                let dialect = match address.kind {
                    PeerKind::Mooncake { version: 0 | 1 } => Dialect::V1,
                    _ => Dialect::V2,
                };
                connections.connect_stock(address.tcp, dialect, now_ns)?
            }
            Path::MooncakeRdma => {
                let unknown = || CloseCause::Setup("this host reaches no stock engines over RDMA".to_owned());
                let offers = self.stock_offers.as_mut().ok_or_else(unknown)?;
                Link::Rdma(offers.connect(&mut connections.rdma, &self.client, lane, address)?)
            }
            Path::Local => {
                self.client.connected(lane, now_ns);
                return Ok(());
            }
            Path::File => {
                self.files.connect(lane);
                self.client.connected(lane, now_ns);
                return Ok(());
            }
        };
        self.lanes.set(lane, link);
        connections.set_role(link, if path == Path::Rdma { Role::Offering(lane) } else { Role::Lane(lane, None) });
        Ok(())
    }

    fn send(
        &mut self,
        connections: &mut Connections,
        lane: LaneId,
        header: &Header,
        body: core::ops::Range<usize>,
        payload: core::ops::Range<usize>,
    ) {
        let Some(link) = self.lanes.get(lane) else { return };
        let buffers: Option<Pieces> = match self.client.outbox().payload(payload) {
            [] => None,
            &[local] => Some(self.buffers.pieces(local)),
            locals => Some(self.buffers.all(locals).into()),
        };
        let body = self.client.outbox().body(body);
        if let Link::Shm(id) = link {
            // The payload is sent along with the frame.
            let payload = buffers.as_ref().map_or(&[][..], Pieces::as_slice);
            connections.shm.send(id, header, body, payload);
            return;
        }
        let payload = buffers.map(|buffers| {
            self.uploads.start(header.request);
            OutgoingPayload { buffers, hold: Some(connections.lend(LentPayload::Upload(header.request))) }
        });
        if let Link::Rdma(id) = link {
            expect_answers(&mut connections.rdma, id, &self.client, &self.buffers, header, body);
        }
        connections.send(link, header, body, payload);
    }

    /// Reports a copy between the caller's memory and a peer's pool; it fails as unsupported if the peer has shared no
    /// pool.
    fn pool_copied(
        &mut self,
        reactor: &mut Reactor,
        lane: LaneId,
        slice: SliceId,
        local: Local,
        copied: Option<Result<u64, Status>>,
        now_ns: u64,
    ) {
        match copied {
            Some(result) => {
                let now_ns = self.copied_at(reactor, local.bytes, now_ns);
                self.copied(&reactor.connections, lane, slice, result, now_ns);
            }
            None => {
                self.copied(&reactor.connections, lane, slice, Err(Status::Unsupported), now_ns);
            }
        }
    }

    /// Returns the end time of a copy of `bytes` that was made just now.
    fn copied_at(&self, reactor: &mut Reactor, bytes: u64, now_ns: u64) -> u64 {
        reactor.copied_ns(bytes, !self.client.outbox().is_empty()).max(now_ns)
    }

    /// Reports a completed or failed copy to the client. If the connection has ended meanwhile, a failure is not
    /// reported: the end of the connection is reported next, and the client then retries the tasks that waited for the
    /// copy. Returns false if the client does not wait for it any more.
    pub(super) fn copied(
        &mut self,
        connections: &Connections,
        lane: LaneId,
        slice: SliceId,
        result: Result<u64, Status>,
        now_ns: u64,
    ) -> bool {
        // True if the connection over shared memory has ended, and the client was not notified yet.
        let has_ended = || matches!(self.lanes.get(lane), Some(Link::Shm(id)) if !connections.shm.is_open(id));
        if result.is_err() && has_ended() {
            return false;
        }
        self.client.copied(lane, slice, result, now_ns)
    }

    /// Copies a range of a segment, now or batched with others of its kind; then reports it to the client.
    fn copy_segment(
        &mut self,
        reactor: &mut Reactor,
        reports: &mut Reports,
        lane: LaneId,
        copy: &SegmentCopy,
        now_ns: u64,
    ) {
        let shm = &mut reactor.connections.shm;
        let result = match (copy.via, self.lanes.get(lane)) {
            (Via::Own, _) => copy.make_own(&self.segments, &self.buffers),
            // The connection ended in this round. The client is notified in the next one, and then uses another path.
            (_, Some(Link::Shm(id))) if !shm.is_up(id) => return,
            (Via::Map, Some(Link::Shm(id))) if self.mapped.has(id, copy.segment) => {
                self.mapped.make(shm, id, copy, &self.buffers)
            }
            (Via::Map, Some(Link::Shm(id))) => {
                if let Err(refused) = self.mapped.request(shm, id, lane, copy, now_ns) {
                    if let Some(problem) = refused.problem {
                        reports.problem(problem);
                    }
                    self.copied(&reactor.connections, lane, copy.slice, Err(refused.status), now_ns);
                }
                return;
            }
            (Via::Cma, Some(Link::Shm(_))) => {
                // The batch is executed first if the copy does not fit.
                if !self.crossings.has_room_for(lane, copy) {
                    self.cross(reactor, reports, now_ns);
                }
                self.crossings.push(lane, copy);
                return;
            }
            // The lane is gone, and the client knows it.
            _ => return,
        };
        self.segment_copied(reactor, reports, lane, copy, result, now_ns);
    }

    fn segment_copied(
        &mut self,
        reactor: &mut Reactor,
        reports: &mut Reports,
        lane: LaneId,
        copy: &SegmentCopy,
        result: Result<u64, Status>,
        now_ns: u64,
    ) {
        if result.is_ok() {
            let counters = &mut reports.counters;
            let count = if copy.via == Via::Map { &mut counters.map_bytes } else { &mut counters.local_bytes };
            *count += copy.local.bytes;
        }
        let now_ns = self.copied_at(reactor, copy.local.bytes, now_ns);
        self.copied(&reactor.connections, lane, copy.slice, result, now_ns);
    }

    /// Makes the copies whose segments have been mapped; copies whose segment cannot be mapped, or not in time, are
    /// `Unsupported` over this path. Returns true if there were any.
    pub(crate) fn take_mapped(&mut self, reactor: &mut Reactor, reports: &mut Reports, now_ns: u64) -> bool {
        let mut progress = false;
        while let Some(SegmentOutcome { id, segment, wanted, memory }) = reactor.connections.shm.poll_mapped() {
            progress = true;
            let region = match (wanted, memory) {
                (MemoryRequest::Region, Ok(SegmentMemory::Region(region))) => Ok(region),
                (MemoryRequest::Region, Ok(_)) => Err(ShareError::NotShared),
                (MemoryRequest::Region, Err(why)) => Err(why),
                (MemoryRequest::Device { .. }, memory) => {
                    self.peer_memory.take_answer((id, segment), memory);
                    continue;
                }
            };
            let waiting = self.mapped.take_waiting(id, segment);
            let mapped = region.map(|region| self.mapped.set(id, segment, region));
            for (lane, copy) in waiting {
                // The copy is of another generation of the lane: the client knows that it has ended.
                if self.lanes.get(lane) != Some(Link::Shm(id)) {
                    continue;
                }
                let result = match mapped {
                    Ok(()) => self.mapped.make(&reactor.connections.shm, id, &copy, &self.buffers),
                    Err(_) => Err(Status::Unsupported),
                };
                self.segment_copied(reactor, reports, lane, &copy, result, now_ns);
            }
            if let Err(why) = mapped {
                reports.problem(why.to_string());
            }
        }
        progress
    }

    /// Executes the batch of copies by the kernel; returns true if there were any.
    fn cross(&mut self, reactor: &mut Reactor, reports: &mut Reports, now_ns: u64) -> bool {
        if self.crossings.is_empty() {
            return false;
        }
        let mut crossings = core::mem::take(&mut self.crossings);
        if let Some((lane, Link::Shm(id))) = crossings.lane().and_then(|lane| Some((lane, self.lanes.get(lane)?))) {
            let crossed = crossings.make(&reactor.connections.shm, id, &self.buffers, now_ns);
            let now_ns = self.copied_at(reactor, BYTES_PER_CLOCK, now_ns);
            match crossed {
                Ok(()) => {
                    for (copy, outcome) in crossings.outcomes() {
                        reports.counters.cma_bytes += if outcome.is_ok() { copy.local.bytes } else { 0 };
                        self.copied(&reactor.connections, lane, copy.slice, outcome, now_ns);
                    }
                }
                Err(CrossError::Gone) => reactor.connections.close(Link::Shm(id), CloseCause::Peer),
                Err(error) => {
                    reports.problem(error.to_string());
                    self.client.lane_event(lane, LaneEvent::CmaAllowed(false), now_ns);
                    for copy in crossings.copies() {
                        self.copied(&reactor.connections, lane, copy.slice, Err(Status::Unsupported), now_ns);
                    }
                }
            }
        }
        crossings.clear();
        self.crossings = crossings;
        true
    }
}

/// Copies a range of a peer's pool to the memory of a get, and reports it to the client.
pub(super) fn copy_out(side: &mut ClientSide, reactor: &mut Reactor, read: &PoolRead, now_ns: u64) {
    let PoolRead { lane, slice, offset, local, checksum } = *read;
    let pool = pool_of(&side.lanes, &reactor.connections, lane);
    let copied = pool.map(|pool| pool_copies::copy_out(pool, offset, &side.buffers, local, checksum));
    side.pool_copied(reactor, lane, slice, local, copied, now_ns);
}

/// Returns the mapped pool of a lane's shard; `None` if the shard has shared none, or the lane has ended.
fn pool_of<'a>(lanes: &LaneLinks, connections: &'a Connections, lane: LaneId) -> Option<&'a Arc<Region>> {
    let Some(Link::Shm(id)) = lanes.get(lane) else { return None };
    connections.shm.pool(id)
}
