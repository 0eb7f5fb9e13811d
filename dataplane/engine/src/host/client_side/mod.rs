//! The client's side of a host: requests that leave, their answers, and copies that the client has this host make.
//!
//! A request goes [`Client::submit`](kvplane_client::Client::submit) → [`ClientSide::drain`] (the client's outputs: a
//! lane to connect, a frame to send, a copy to make) → a driver. Its answer comes as a frame for the lane:
//! [`ClientSide::take_frame`] → [`Client::frame`](kvplane_client::Client::frame), which names the memory that its
//! payload goes to.
//!
//! [`ClientSide`] owns the client and what it needs of a host: the connections of its lanes, the caller's memory by
//! name, uploads in flight, and a component for each kind of copy.

pub(crate) mod buffers;
mod crossings;
mod device_copies;
pub(crate) mod files;
pub(crate) mod foreign;
mod frames;
mod lanes;
mod outputs;
mod pool_copies;
mod segment_copies;
mod uploads;

use std::io;
use std::sync::Arc;

use kvplane_client::Client;
use kvplane_proto::RequestId;
use kvplane_sys::Region;

use self::buffers::Buffers;
use self::crossings::Crossings;
use self::device_copies::DeviceCopies;
use self::files::HostFiles;
use self::foreign::{StockEngines, StockOffers};
use self::lanes::LaneLinks;
use self::segment_copies::MappedSegments;
use self::uploads::Uploads;
use super::reactor::connections::Connections;
use super::reactor::{Absence, devices};
use super::segments::SegmentRegions;

/// A client, and what it needs of a host.
pub(crate) struct ClientSide {
    client: Client,
    lanes: LaneLinks,
    buffers: Buffers,
    uploads: Uploads,
    /// Segments of this process, which its own requests use.
    segments: SegmentRegions,
    mapped: MappedSegments,
    crossings: Crossings,
    device_copies: DeviceCopies,
    files: HostFiles,
    stock_offers: Option<StockOffers>,
    /// Whether copies over shared memory are summed up and checked.
    verify_shared: bool,
}

impl ClientSide {
    /// This client over these connections. `stock` are the stock engines that it reaches over RDMA, and this host's
    /// number among those that do.
    ///
    /// # Errors
    /// When the kernel gives no descriptor, or does not let it be watched.
    pub(crate) fn new(
        mut client: Client,
        connections: &Connections,
        stock: Option<&(Arc<dyn StockEngines>, u64)>,
        verify_shared: bool,
    ) -> io::Result<Self> {
        client.set_rdma(devices::speeds(&connections.rdma), connections.devices.table().clone());
        let stock_offers = stock.map(|(engines, number)| StockOffers::new(engines, &connections.poller, *number));
        Ok(Self {
            client,
            lanes: LaneLinks::default(),
            buffers: Buffers::default(),
            uploads: Uploads::default(),
            segments: SegmentRegions::default(),
            mapped: MappedSegments::default(),
            crossings: Crossings::default(),
            device_copies: DeviceCopies::default(),
            files: HostFiles::default(),
            stock_offers: stock_offers.transpose()?,
            verify_shared,
        })
    }

    /// The client.
    pub(crate) const fn client(&mut self) -> &mut Client {
        &mut self.client
    }

    /// The files.
    pub(crate) const fn files(&mut self) -> &mut HostFiles {
        &mut self.files
    }

    /// The memory of segments of this process.
    pub(crate) const fn segments(&mut self) -> &mut SegmentRegions {
        &mut self.segments
    }

    /// Gives memory the first free name.
    pub(crate) fn add_buffer(&mut self, connections: &mut Connections, region: Arc<Region>) -> u32 {
        let buffer = self.buffers.vacant();
        // Now, so that the first transfer need not wait for it.
        connections.rdma.register(&region);
        self.set_place(connections, buffer, &region, None);
        self.buffers.set(buffer, region);
        buffer
    }

    /// Gives memory this name, in place of what had it.
    pub(crate) fn set_buffer(
        &mut self,
        connections: &mut Connections,
        buffer: u32,
        region: Arc<Region>,
        location: &str,
    ) {
        connections.rdma.register(&region);
        self.set_place(connections, buffer, &region, Some(location));
        if let Some(former) = self.buffers.set(buffer, region) {
            self.unpin(connections, &former);
        }
    }

    /// Registering has brought its pages into memory, if there is a device.
    fn set_place(&mut self, connections: &Connections, buffer: u32, region: &Arc<Region>, location: Option<&str>) {
        self.client.set_buffer_place(buffer, connections.devices.place_of(region, location));
    }

    /// Forgets memory.
    pub(crate) fn remove_buffer(&mut self, connections: &mut Connections, buffer: u32) {
        if let Some(region) = self.buffers.remove(buffer) {
            self.files.forget(&region);
            self.unpin(connections, &region);
        }
    }

    /// The caller's memory by name.
    pub(crate) const fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    /// The same, for memory in parts to get a name, or lose it.
    pub(crate) const fn buffers_mut(&mut self) -> &mut Buffers {
        &mut self.buffers
    }

    /// Unpins memory that has no name any more.
    fn unpin(&self, connections: &mut Connections, region: &Arc<Region>) {
        let mut held = self.buffers.regions().chain(self.segments.regions());
        if !held.any(|held| Arc::ptr_eq(held, region)) {
            connections.rdma.forget(region);
        }
    }

    /// The thread that drives the host was away.
    pub(crate) fn was_away(&mut self, absence: &Absence) {
        self.client.was_away(absence.since_ns, absence.now_ns);
    }

    /// The payload of a request has left, or never will.
    pub(crate) fn upload_over(&mut self, request: RequestId) {
        self.uploads.finish(request);
    }

    /// Lets go of mappings whose segments are gone, now and then.
    pub(crate) fn sweep(&mut self, connections: &Connections, now_ns: u64) {
        self.mapped.sweep(&connections.shm, now_ns);
    }

    /// The client's timers that are due.
    pub(crate) fn run_timers(&mut self, now_ns: u64) {
        if self.client.poll_timeout().is_some_and(|at_ns| at_ns <= now_ns) {
            self.client.handle_timeout(now_ns);
        }
    }

    /// When the client's next timer is.
    pub(crate) fn poll_timeout(&self) -> Option<u64> {
        self.client.poll_timeout()
    }

    /// The host is about to park. Whether it may.
    pub(crate) fn prepare_sleep(&self) -> bool {
        self.stock_offers.as_ref().is_none_or(StockOffers::prepare_sleep)
    }

    /// The host does not park any more.
    pub(crate) fn awake(&self) {
        if let Some(offers) = &self.stock_offers {
            offers.awake();
        }
    }
}
