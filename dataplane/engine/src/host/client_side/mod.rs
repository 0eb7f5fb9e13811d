//! Client's side of a host: outgoing requests, their answers, and copies that this host makes for the client.
//!
//! A request goes [`Client::submit`](kvplane_client::Client::submit) → [`ClientSide::drain`] (the client's outputs: a
//! lane to connect, a frame to send, a copy to make) → a driver. Its answer arrives as a frame on the lane:
//! [`ClientSide::take_frame`] → [`Client::frame`](kvplane_client::Client::frame), which names the memory that its
//! payload goes to.
//!
//! [`ClientSide`] owns the client and its resources in a host: the connections of its lanes, the caller's buffers,
//! uploads in flight, and a component for each kind of copy.

pub(crate) mod buffers;
mod crossings;
mod device_copies;
pub(crate) mod files;
pub(crate) mod foreign;
mod frames;
mod lanes;
mod outputs;
pub(crate) mod peer_memory;
mod pool_copies;
pub(crate) mod pool_reads;
pub(crate) mod same_host;
mod segment_copies;
mod uploads;

use std::io;
use std::sync::Arc;

use kvplane_client::{Client, Place};
use kvplane_proto::RequestId;
use kvplane_sys::Region;
use kvplane_sys::device::Backing;
use kvplane_transport::rdma::device_memory;

use self::buffers::Buffers;
use self::crossings::Crossings;
use self::device_copies::DeviceCopies;
use self::files::HostFiles;
use self::foreign::{StockEngines, StockOffers};
use self::lanes::LaneLinks;
use self::peer_memory::PeerMappings;
use self::pool_reads::PoolReads;
use self::segment_copies::MappedSegments;
use self::uploads::Uploads;
use super::reactor::connections::Connections;
use super::reactor::{Absence, devices};
use super::reports::Reports;
use super::segments::SegmentRegions;

/// Client and its resources in a host.
pub(crate) struct ClientSide {
    client: Client,
    lanes: LaneLinks,
    buffers: Buffers,
    uploads: Uploads,
    /// Segments of this process, which its own requests use.
    segments: SegmentRegions,
    mapped: MappedSegments,
    peer_memory: PeerMappings,
    pool_reads: PoolReads,
    crossings: Crossings,
    device_copies: DeviceCopies,
    files: HostFiles,
    stock_offers: Option<StockOffers>,
    /// True if checksums of copies over shared memory are computed and verified.
    verify_shared: bool,
}

impl ClientSide {
    /// Creates the client's side over these connections. `stock` are the stock engines that it reaches over RDMA, and
    /// this host's number among the hosts that reach them.
    ///
    /// # Errors
    /// If the kernel refuses a descriptor, or refuses to watch it.
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
            peer_memory: PeerMappings::default(),
            pool_reads: PoolReads::default(),
            crossings: Crossings::default(),
            device_copies: DeviceCopies::default(),
            files: HostFiles::default(),
            stock_offers: stock_offers.transpose()?,
            verify_shared,
        })
    }

    /// Returns the client.
    pub(crate) const fn client(&mut self) -> &mut Client {
        &mut self.client
    }

    /// Returns the files.
    pub(crate) const fn files(&mut self) -> &mut HostFiles {
        &mut self.files
    }

    /// Returns the memory of segments of this process.
    pub(crate) const fn segments(&mut self) -> &mut SegmentRegions {
        &mut self.segments
    }

    /// Registers memory under the first free index.
    pub(crate) fn add_buffer(&mut self, connections: &mut Connections, region: Arc<Region>) -> u32 {
        let buffer = self.buffers.vacant(|_| false);
        // Registered now, so that the first transfer need not wait for it.
        connections.rdma.register(&region);
        self.set_place(connections, buffer, &region, None);
        self.buffers.set(buffer, region.into());
        buffer
    }

    /// Registers memory under this index, replacing the memory that had it. Memory of a device is for requests that
    /// RDMA devices carry out, if all of them accept it.
    pub(crate) fn set_buffer(&mut self, connections: &mut Connections, buffer: u32, memory: Backing, location: &str) {
        match &memory {
            Backing::Host(region) => {
                connections.rdma.register(region);
                self.set_place(connections, buffer, region, Some(location));
            }
            Backing::Device(memory) => {
                let is_accepted = device_memory::register(&mut connections.rdma, memory);
                let place = connections.devices.place_of_device(memory.device());
                self.client.set_buffer(buffer, place, is_accepted);
            }
        }
        if let Some(former) = self.buffers.set(buffer, memory) {
            self.unpin(connections, &former);
        }
    }

    /// Sets the location of a buffer. Registering has brought its pages into memory, if there is a device.
    fn set_place(&mut self, connections: &Connections, buffer: u32, region: &Arc<Region>, location: Option<&str>) {
        self.client.set_buffer(buffer, connections.devices.place_of(region, location), false);
    }

    /// Unregisters memory.
    pub(crate) fn remove_buffer(&mut self, connections: &mut Connections, buffer: u32) {
        let Some(memory) = self.buffers.remove(buffer) else { return };
        match &memory {
            Backing::Host(region) => self.files.forget(region),
            Backing::Device(_) => self.client.set_buffer(buffer, Place::UNKNOWN, false),
        }
        self.unpin(connections, &memory);
    }

    /// Returns the caller's buffers.
    pub(crate) const fn buffers(&self) -> &Buffers {
        &self.buffers
    }

    /// Returns the caller's buffers, for pieces to be added or removed.
    pub(crate) const fn buffers_mut(&mut self) -> &mut Buffers {
        &mut self.buffers
    }

    /// Unpins memory that is no longer registered.
    fn unpin(&self, connections: &mut Connections, memory: &Backing) {
        match memory {
            Backing::Host(region) => {
                let mut held = self.buffers.regions().chain(self.segments.regions());
                if !held.any(|held| Arc::ptr_eq(held, region)) {
                    connections.rdma.forget(region);
                }
            }
            Backing::Device(memory) => {
                if !self.buffers.devices().any(|held| Arc::ptr_eq(held, memory)) {
                    device_memory::forget(&mut connections.rdma, memory);
                }
            }
        }
    }

    /// Informs the client that the thread that drives the host was descheduled.
    pub(crate) fn note_absence(&mut self, absence: &Absence) {
        self.client.note_absence(absence.since_ns, absence.now_ns);
    }

    /// Ends the upload of a request's payload, which has left, or never will.
    pub(crate) fn upload_over(&mut self, request: RequestId) {
        self.uploads.finish(request);
    }

    /// Periodically drops mappings whose segments are gone, and unpins what nothing uses any more.
    pub(crate) fn sweep(&mut self, connections: &Connections, reports: &mut Reports, now_ns: u64) {
        self.mapped.sweep(&connections.shm, now_ns);
        self.peer_memory.sweep(&connections.shm, now_ns);
        self.pool_reads.unpin();
        reports.counters.peer_memory = self.peer_memory.counters();
        reports.counters.pool_reads = self.pool_reads.counters();
    }

    /// Runs the client's timers that are due.
    pub(crate) fn run_timers(&mut self, now_ns: u64) {
        if self.client.poll_timeout().is_some_and(|at_ns| at_ns <= now_ns) {
            self.client.handle_timeout(now_ns);
        }
    }

    /// Returns the time of the client's next timer: at once, while there is something to unpin.
    pub(crate) fn poll_timeout(&self) -> Option<u64> {
        if self.pool_reads.is_unpinning() { Some(0) } else { self.client.poll_timeout() }
    }

    /// Prepares for the host to park. Returns true if it may.
    pub(crate) fn prepare_sleep(&self) -> bool {
        self.stock_offers.as_ref().is_none_or(StockOffers::prepare_sleep)
    }

    /// Ends the announcement of a park.
    pub(crate) fn awake(&self) {
        if let Some(offers) = &self.stock_offers {
            offers.awake();
        }
    }
}
