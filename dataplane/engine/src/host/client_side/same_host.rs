//! Memory of other processes on this host that copy engines reach without the help of its owner: pools of nodes, and
//! device memory of peers.

use std::sync::Arc;

use kvplane_proto::Status;
use kvplane_sys::device::{Device, Family};
use kvplane_transport::{CloseCause, ConnectionId};

use super::ClientSide;
use super::buffers::PartPlace;
use super::outputs::copy_out;
use super::peer_memory::PeerMemory;
use super::pool_reads::{PoolRead, PoolSource};
use crate::host::reactor::Reactor;
use crate::host::reactor::links::Link;

/// Memory on this host, with the client and the connections of its host.
pub(crate) struct SameHost<'a> {
    side: &'a mut ClientSide,
    reactor: &'a mut Reactor,
}

impl<'a> SameHost<'a> {
    /// Creates the view of a host.
    pub(crate) const fn new(side: &'a mut ClientSide, reactor: &'a mut Reactor) -> Self {
        Self { side, reactor }
    }

    /// Returns the device memory of peers.
    pub(crate) const fn peer_memory(&mut self) -> PeerMemory<'_> {
        let ClientSide { client, lanes, peer_memory, .. } = &mut *self.side;
        PeerMemory { mappings: peer_memory, client, lanes, shm: &mut self.reactor.connections.shm }
    }

    /// Offers a buffer of pieces: the gets into it whose bytes are in mapped pools are returned by [`Self::next_read`],
    /// until it is removed.
    pub(crate) fn offer(&mut self, buffer: u32, place: PartPlace) {
        self.side.buffers.offer(buffer, place);
    }

    /// Returns a read that waits to be carried out; its get may have ended since.
    pub(crate) fn next_read(&mut self) -> Option<(PartPlace, PoolRead)> {
        self.side.pool_reads.next()
    }

    /// Returns the pinned bytes of a read for a device; `None` if this thread has to copy them.
    pub(crate) fn pin(&mut self, read: &PoolRead, device: &Arc<Device>) -> Option<PoolSource> {
        let Some(Link::Shm(id)) = self.side.lanes.get(read.lane) else { return None };
        self.side.pool_reads.pin(&self.reactor.connections.shm, id, read, device)
    }

    /// Carries out a read on this thread: into the get's own memory.
    pub(crate) fn copy_out(&mut self, read: &PoolRead) {
        let now_ns = self.reactor.now_ns();
        copy_out(self.side, self.reactor, read, now_ns);
    }

    /// Ends a read that a copy engine has made, or failed to make. Returns true if the get has its bytes by it; if not,
    /// the client may make it anew, also after a read that succeeded.
    pub(crate) fn read_ended(&mut self, read: &PoolRead, result: Result<(), Status>) -> bool {
        let now_ns = self.reactor.now_ns();
        let copied = result.map(|()| 0);
        self.side.copied(&self.reactor.connections, read.lane, read.slice, copied, now_ns) && result.is_ok()
    }

    /// Gives up a connection over shared memory: its gets are made anew over another one.
    pub(crate) fn give_up(&mut self, connection: ConnectionId) {
        self.reactor.connections.close(Link::Shm(connection), CloseCause::Closed);
    }

    /// Gives back the windows of a driver none of whose devices has a buffer any more.
    pub(crate) fn close_family(&mut self, family: Family) {
        self.side.pool_reads.close_family(family);
    }

    /// Returns and clears the text of the last refusal to pin.
    pub(crate) const fn take_problem(&mut self) -> Option<String> {
        self.side.pool_reads.take_problem()
    }
}
