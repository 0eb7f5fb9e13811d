//! RDMA devices of a host: those in use, the reasons why others are not, and their distance from memory.
//!
//! A connection is offered on a TCP connection of its own to the peer's data port: our half of it is a request there,
//! the peer's half the answer. After that the TCP connection carries no frames, but its end means that the peer is
//! gone. See [`super::connections::Connections::offer_rdma`].

use std::sync::Arc;

use kvplane_client::{Near, Place};
use kvplane_sys::device::Device;
use kvplane_sys::verbs::Verbs;
use kvplane_sys::{Poller, Region};
use kvplane_transport::{Rdma, RdmaOptions};

use super::near::{NearDevices, node_of_region};

/// RDMA devices for a host.
#[derive(Clone, Debug)]
pub struct RdmaDevices {
    /// Access to the verbs library.
    pub verbs: Verbs,
    /// Names of the devices to use, in the order of their numbers; empty for all.
    pub names: Vec<String>,
    /// Number of devices, from the first on, that are given to peers; the others stand in if none of those works. 0:
    /// all.
    pub preferred: u16,
    /// Distances of the devices from this machine's memory.
    pub near: Arc<NearDevices>,
    /// Settings of the driver.
    pub options: RdmaOptions,
}

/// Properties of the devices of a host.
pub(crate) struct DeviceFacts {
    /// Reasons why devices are not used.
    problems: Vec<String>,
    /// Distances of this machine's devices from its memory, by device name.
    near: Arc<NearDevices>,
    /// Distances by the numbers of the open devices.
    table: Near,
}

impl DeviceFacts {
    /// Opens the devices, as far as they can be opened; returns their driver and their properties.
    pub(crate) fn open(devices: Option<&RdmaDevices>, poller: &Poller) -> (Rdma, Self) {
        let mut driver = Rdma::new(devices.map(|devices| devices.options).unwrap_or_default());
        let near = devices.map(|devices| Arc::clone(&devices.near)).unwrap_or_default();
        let mut problems = Vec::new();
        if let Some(devices) = devices {
            open_each(&mut driver, devices, poller, &mut problems);
            driver.prefer(devices.preferred.into());
        }
        let table = near.table(driver.device_names());
        (driver, Self { problems, near, table })
    }

    /// Returns the reasons why devices were not opened.
    pub(crate) fn problems(&self) -> &[String] {
        &self.problems
    }

    /// Returns the distances of the devices from places of memory, by device number.
    pub(crate) const fn table(&self) -> &Near {
        &self.table
    }

    /// Returns the place of a NUMA node.
    pub(crate) fn place_of_node(&self, node: u32) -> Place {
        self.near.place_of_node(node)
    }

    /// Returns the place of a device's memory.
    pub(crate) fn place_of_device(&self, device: &Device) -> Place {
        self.near.place_of_device(device.info())
    }

    /// Returns the place of a region: by its location if one is given, else as the kernel reports it.
    pub(crate) fn place_of(&self, region: &Arc<Region>, location: Option<&str>) -> Place {
        match location.filter(|location| *location != "*") {
            _ if self.near.places.is_empty() => Place::UNKNOWN,
            Some(location) => self.near.place(location),
            None => node_of_region(region).map_or(Place::UNKNOWN, |node| self.near.place_of_node(node)),
        }
    }
}

/// Returns the bytes per second of each device, 0 if unknown.
pub(crate) fn speeds(driver: &Rdma) -> Vec<u64> {
    driver.devices().map(|(_, bits_per_second, _)| bits_per_second / 8).collect()
}

fn open_each(driver: &mut Rdma, devices: &RdmaDevices, poller: &Poller, problems: &mut Vec<String>) {
    let found = if devices.names.is_empty() {
        devices.verbs.devices().map(|found| found.into_iter().map(Ok).collect())
    } else {
        Ok(devices.names.iter().map(|name| devices.verbs.device(name)).collect::<Vec<_>>())
    };
    match found {
        Ok(found) if found.is_empty() => problems.push("there is no RDMA device".to_owned()),
        Ok(found) => {
            for device in found {
                let opened = device
                    .map_err(|error| error.to_string())
                    .and_then(|device| driver.add_device(poller, &device).map_err(|error| error.to_string()));
                problems.extend(opened.err());
            }
        }
        Err(error) => problems.push(error.to_string()),
    }
}
