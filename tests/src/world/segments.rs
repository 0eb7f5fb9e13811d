//! Segments: each shard serves one, and clients write their own cells of it, over streams or, on the same host,
//! directly.

use std::net::SocketAddr;

use kvplane_client::{LaneId, Local, PeerAddress, PeerKind, SegmentTarget, SliceId};
use kvplane_proto::ids::{Incarnation, NodeId, SegmentId, ShardId};
use kvplane_store::service::{SegmentInfo, Service};

use crate::world::World;
use crate::world::check::memory::Loan;
use crate::world::check::results::{TrackedTask, What};
use crate::world::check::segments::{CELLS, OF_SEGMENTS};
use crate::world::check::{Rule, broken};
use crate::world::scenario::{MS, Scenario};

/// Returns the bytes of each shard's segment.
pub(crate) const fn segment_bytes(scenario: &Scenario) -> u64 {
    scenario.clients as u64 * (scenario.object_bytes / CELLS as u64 * CELLS as u64)
}

/// Registers a shard's segment.
pub(crate) fn register(service: &mut Service, bytes: u64) -> SegmentId {
    let info = SegmentInfo { address: 1 << 40, bytes, writable: true, shareable: true, remote_accessible: true };
    service.segments_mut().register(info).expect("the first segment")
}

impl World {
    /// Writes some of a user's cells on some shard, with a short or a long deadline.
    pub(crate) fn write_cells(&mut self, client: usize) {
        let rng = &mut self.streams.segments;
        let (node, shard) = (rng.below(self.nodes.len() as u64) as usize, rng.below(u64::from(self.scenario.shards)));
        let first = rng.below(CELLS as u64) as usize;
        let cells = 1 + rng.below((CELLS - first) as u64) as usize;
        let most_ns = if rng.chance(0.5) { 20 * MS } else { 1000 * MS };
        let deadline_ns = self.now_ns + MS + rng.below(most_ns);
        let Some(&incarnation) = self.nodes[node].shards.get(shard as usize) else { return };
        let address = self.address_for(client, incarnation, node, shard as u16);
        let bytes = (cells * self.segments.cell_bytes()) as u64;
        let at = client * CELLS + first;
        let write = self.segments.begin(incarnation, at, cells);
        let Ok(Some(offset)) = self.clients[client].memory.lend(Loan::Put { write, bytes }, OF_SEGMENTS) else {
            self.segments.end(write, false);
            return;
        };
        let target = SegmentTarget {
            peer: self.clients[client].client.open_peer(address),
            segment: self.incarnations[incarnation].segment_id,
            offset: (at * self.segments.cell_bytes()) as u64,
            shareable: true,
            place: kvplane_client::Place::UNKNOWN,
        };
        let asked = TrackedTask { key: 0, what: What::Write { write, bytes, target }, offset: Some(offset) };
        self.submit(client, vec![asked], deadline_ns);
    }

    fn address_for(&self, client: usize, incarnation: usize, node: usize, shard: u16) -> PeerAddress {
        let member = self.nodes[node].member(node, self.scenario.shards);
        let tcp: SocketAddr = self.incarnations[incarnation].address;
        let here = member.host == format!("host-{}", client % self.scenario.hosts);
        PeerAddress {
            kind: PeerKind::Native,
            node: NodeId(member.node.0),
            incarnation: Incarnation(member.incarnation.0),
            shard: ShardId(shard),
            tcp,
            shm: member.shards[usize::from(shard)].shm.clone().filter(|_| here),
        }
    }

    /// Writes arriving bytes into a segment.
    pub(crate) fn land(&mut self, incarnation: usize, offset: u64, bytes: &[u8]) {
        let (from, cell_bytes) = (offset as usize, self.segments.cell_bytes());
        self.incarnations[incarnation].segment[from..from + bytes.len()].copy_from_slice(bytes);
        let cells = from / cell_bytes..(from + bytes.len()).div_ceil(cell_bytes);
        self.check_cells(incarnation, cells);
    }

    fn check_cells(&mut self, incarnation: usize, mut cells: core::ops::Range<usize>) {
        let segment = &self.incarnations[incarnation].segment;
        let checked = cells.try_for_each(|cell| self.segments.check(incarnation, cell, segment));
        self.require(checked);
    }

    /// Copies a client's bytes into a mapped segment.
    pub(crate) fn copy_segment(&mut self, index: usize, lane: LaneId, slice: SliceId, offset: u64, local: Local) {
        let connection = self.clients[index].lanes.get(&lane);
        let Some(incarnation) =
            connection.and_then(|index| self.connections.get(index)).map(|connection| connection.incarnation)
        else {
            self.violate(broken(
                Rule::Protocol,
                format!("client {index} copies over {lane:?}, which is not connected"),
            ));
            return;
        };
        match self.clients[index].memory.read(local.offset, local.bytes).map(<[u8]>::to_vec) {
            Ok(bytes) => self.land(incarnation, offset, &bytes),
            Err(violation) => self.violate(violation),
        }
        self.clients[index].client.copied(lane, slice, Ok(0), self.now_ns);
    }

    /// Handles the end of a write of cells.
    pub(crate) fn cells_written(&mut self, write: usize, done: bool) {
        let (incarnation, cells) = self.segments.end(write, done);
        self.check_cells(incarnation, cells);
    }

    /// Checks that the final bytes are those of the last writes.
    pub(crate) fn check_segments(&mut self) {
        for incarnation in 0..self.incarnations.len() {
            self.check_cells(incarnation, 0..self.scenario.clients * CELLS);
        }
    }
}
