//! Payloads that RDMA devices moved for peers of the service, by how near device and memory are.

use std::sync::Arc;

use kvplane_client::{NodeCounts, Place};
use kvplane_sys::Region;
use kvplane_transport::{ConnectionId, Rdma};

use crate::host::reactor::connections::Connections;
use crate::host::reactor::devices::DeviceFacts;
use crate::host::reactor::near::node_of_region;

/// An RDMA device of a host, and payloads that it moved for peers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceSnapshot {
    /// Its name.
    pub name: String,
    /// Bits per second; 0 when it is down or its speed is not known.
    pub bits_per_second: u64,
    /// Payloads between the pool and peers, by whether pool and device are on one NUMA node.
    pub served: NodeCounts,
}

/// Payloads moved for peers.
pub(super) struct ServedPayloads {
    /// The service's memory, and where it is.
    pool: Option<(Arc<Region>, Place)>,
    /// By device.
    counts: Vec<NodeCounts>,
}

impl ServedPayloads {
    /// None yet. The pool is registered with the devices: that brings its pages into memory, and so to a place.
    pub(super) fn new(connections: &mut Connections, pool: Option<&Arc<Region>>) -> Self {
        let counts = vec![NodeCounts::default(); connections.rdma.device_names().count()];
        let pool = pool.map(|pool| {
            connections.rdma.register(pool);
            let node = node_of_region(pool).filter(|_| !counts.is_empty());
            (Arc::clone(pool), node.map_or(Place::UNKNOWN, |node| connections.devices.place_of_node(node)))
        });
        Self { pool, counts }
    }

    /// A payload moves between a region and the peer of this connection.
    pub(super) fn count(&mut self, driver: &Rdma, devices: &DeviceFacts, id: ConnectionId, region: &Arc<Region>) {
        let (Some((device, _)), Some((pool, place))) = (driver.rail(id), &self.pool) else { return };
        let place = if Arc::ptr_eq(pool, region) { *place } else { Place::UNKNOWN };
        let same_node = devices.table().of(device as u16, place).same_node;
        if let Some(counts) = self.counts.get_mut(device) {
            counts.count(same_node);
        }
    }

    /// The devices that are open, with what they did for peers.
    pub(super) fn snapshot(&self, driver: &Rdma) -> Vec<DeviceSnapshot> {
        let device = |(number, (name, bits_per_second, _)): (usize, (&str, u64, Option<String>))| DeviceSnapshot {
            name: name.to_owned(),
            bits_per_second,
            served: self.counts.get(number).copied().unwrap_or_default(),
        };
        driver.devices().enumerate().map(device).collect()
    }
}
