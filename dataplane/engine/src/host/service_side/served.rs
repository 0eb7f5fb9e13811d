//! Payloads that RDMA devices moved for peers of the service, by distance between device and memory.

use std::sync::Arc;

use kvplane_client::{NodeCounts, Place};
use kvplane_sys::Region;
use kvplane_transport::rdma::device_memory;
use kvplane_transport::{ConnectionId, DeviceRegistration, Rdma};

use crate::host::reactor::connections::Connections;
use crate::host::reactor::devices::DeviceFacts;
use crate::host::reactor::near::node_of_region;

/// RDMA device of a host, and counters of payloads that it moved for peers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceSnapshot {
    /// Name of the device.
    pub name: String,
    /// Bits per second; 0 if it is down or its speed is unknown.
    pub bits_per_second: u64,
    /// Payloads between the pool and peers, by whether pool and device are on one NUMA node.
    pub served: NodeCounts,
    /// Registrations of segments of device memory with it, and those that it refused.
    pub registrations: Vec<DeviceRegistration>,
}

/// Counters of payloads moved for peers.
pub(super) struct ServedPayloads {
    /// Pool of the service, and its place.
    pool: Option<(Arc<Region>, Place)>,
    /// Counters by device.
    counts: Vec<NodeCounts>,
}

impl ServedPayloads {
    /// Creates the counters. The pool is registered with the devices: that brings its pages into memory, so that its
    /// place is known.
    pub(super) fn new(connections: &mut Connections, pool: Option<&Arc<Region>>) -> Self {
        let counts = vec![NodeCounts::default(); connections.rdma.device_names().count()];
        let pool = pool.map(|pool| {
            connections.rdma.register(pool);
            let node = node_of_region(pool).filter(|_| !counts.is_empty());
            (Arc::clone(pool), node.map_or(Place::UNKNOWN, |node| connections.devices.place_of_node(node)))
        });
        Self { pool, counts }
    }

    /// Counts a payload between a region and the peer of this connection.
    pub(super) fn count(&mut self, driver: &Rdma, devices: &DeviceFacts, id: ConnectionId, region: &Arc<Region>) {
        let (Some((device, _)), Some((pool, place))) = (driver.rail(id), &self.pool) else { return };
        let place = if Arc::ptr_eq(pool, region) { *place } else { Place::UNKNOWN };
        let same_node = devices.table().of(device as u16, place).same_node;
        if let Some(counts) = self.counts.get_mut(device) {
            counts.count(same_node);
        }
    }

    /// Returns the open devices, with their counters.
    pub(super) fn snapshot(&self, driver: &Rdma) -> Vec<DeviceSnapshot> {
        let all = device_memory::registrations(driver);
        let device = |(number, (name, bits_per_second, _)): (usize, (&str, u64, Option<String>))| DeviceSnapshot {
            name: name.to_owned(),
            bits_per_second,
            served: self.counts.get(number).copied().unwrap_or_default(),
            registrations: all.iter().filter(|one| one.nic == name).cloned().collect(),
        };
        driver.devices().enumerate().map(device).collect()
    }
}
