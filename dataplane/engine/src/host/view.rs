//! What whoever drives a host sees of it: its two sides, what has ended, and what was counted.

use std::sync::mpsc::SyncSender;

use kvplane_client::Client;
use kvplane_proto::{BatchId, Digest, SegmentId};
use kvplane_store::service::Service;
use kvplane_transport::FaultCounters;
use kvplane_transport::mooncake::{LaneCounters, ServerCounters};

use super::{Host, HostCounters, PoolView};

impl Host {
    /// The answering side.
    pub const fn service(&mut self) -> Option<&mut Service> {
        self.service.as_mut()
    }

    /// The names of these objects: see [`kvplane_store::service::Inspection::names_of`].
    #[must_use]
    pub fn names_of(&self, digests: &[Digest]) -> Vec<(usize, Vec<u8>, Vec<u8>)> {
        match (&self.service, &self.regions.pool) {
            (Some(service), Some(pool)) => service.inspect().names_of(digests, &PoolView(pool)),
            _ => Vec::new(),
        }
    }

    /// The asking side.
    pub const fn client(&mut self) -> Option<&mut Client> {
        self.client.as_mut()
    }

    /// A batch that has completed since the last call.
    pub fn poll_done(&mut self) -> Option<BatchId> {
        self.notices.take_done()
    }

    /// A segment that nothing uses any more.
    pub fn poll_unregistered(&mut self) -> Option<SegmentId> {
        self.notices.take_free()
    }

    /// Whether a newer cluster map is wanted; asked once.
    pub const fn take_map_wanted(&mut self) -> bool {
        self.notices.take_map_wanted()
    }

    /// The last connection's end that was not of our asking, in words.
    #[must_use]
    pub fn last_problem(&self) -> Option<&str> {
        self.notices.last_problem()
    }

    /// What happened so far.
    #[must_use]
    pub const fn counters(&self) -> &HostCounters {
        &self.counters
    }

    /// Faults made by plan so far.
    #[must_use]
    pub fn faults(&self) -> FaultCounters {
        self.tcp.counters()
    }

    /// What stock engines asked for.
    #[must_use]
    pub const fn stock_served(&self) -> &ServerCounters {
        self.stock_server.counters()
    }

    /// What stock engines were asked for.
    #[must_use]
    pub const fn stock_asked(&self) -> &LaneCounters {
        self.stock_lanes.counters()
    }

    /// Says to `bell` when there are new events of the service's objects.
    pub fn follow(&mut self, bell: Option<SyncSender<()>>) {
        self.follower = bell.map(|bell| (bell, 0));
    }

    /// Tells the follower if there is something new.
    pub(crate) fn tell_follower(&mut self) {
        if let (Some((bell, told)), Some(service)) = (&mut self.follower, &self.service) {
            let next = service.inspect().next_event();
            if next != *told {
                *told = next;
                // A full one is not read yet; its reader will see this too.
                let _ = bell.try_send(());
            }
        }
    }

    /// Connections open, by any driver.
    #[must_use]
    pub const fn connections(&self) -> usize {
        self.tcp.open()
            + self.shm.open()
            + self.rdma_work.driver.open()
            + self.stock_lanes.open()
            + self.stock_server.open()
    }
}
