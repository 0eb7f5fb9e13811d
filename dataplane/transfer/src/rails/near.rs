//! Affinity of RDMA devices to memory, from the machine's rail matrix or one that the operator gives, and its
//! announcement to peers.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kvplane_client::{Near, Nearness, Place};
use kvplane_engine::{NearDevices, PlaceName, RdmaDevices};
use kvplane_mooncake::{Descriptor, NativeDevice, NativePlace, NativeRails};
use kvplane_topology::plan::ShardSeat;
use kvplane_topology::rails::{GivenMatrix, Location, MAX_MATRIX_BYTES};
use kvplane_topology::{Machine, RailMatrix, rail_matrix};

use crate::error::{ArgumentError, Error};

/// Minimum number of devices that a shard opens, if the machine has as many: a single device must not be a single point
/// of failure.
const DEVICES_LEAST: usize = 2;

/// Returns the rail matrix of a machine, or the given one: as JSON, or the path of a JSON file.
///
/// # Errors
/// When it cannot be read, or does not fit the machine; the error names the row and the valid names.
pub(crate) fn matrix_of(machine: &Machine, given: Option<&str>) -> Result<RailMatrix, Error> {
    let matrix = rail_matrix(machine);
    let Some(given) = given else { return Ok(matrix) };
    let inline = given.trim_start().starts_with('{');
    let (path, text) = match inline {
        true => (None, given.to_owned()),
        false => (Some(PathBuf::from(given)), read(Path::new(given))?),
    };
    let fitted = GivenMatrix::parse(&text).and_then(|given| matrix.with_given(&given));
    let mut fitted = fitted.map_err(|why| ArgumentError::RailMatrix { path, why })?;
    fitted.notes.extend(matrix.differences(&fitted));
    Ok(fitted)
}

fn read(path: &Path) -> Result<String, Error> {
    let failed = |why| ArgumentError::RailMatrixFile { path: path.to_owned(), why };
    let bytes = std::fs::metadata(path).map_err(failed)?.len();
    if bytes > MAX_MATRIX_BYTES as u64 {
        return Err(ArgumentError::RailMatrixTooLong { path: path.to_owned(), bytes }.into());
    }
    Ok(std::fs::read_to_string(path).map_err(failed)?)
}

/// Returns the PCI address of a location that is a GPU.
fn pci_of(machine: &Machine, location: Location) -> Option<String> {
    let Location::Gpu(prefix, number) = location else { return None };
    let mut alike = machine.gpus.iter().filter(|gpu| gpu.usable() && gpu.prefix() == prefix);
    Some(alike.nth(number as usize)?.pci.function.to_string().to_lowercase())
}

/// Converts the matrix to places and devices. Devices that a row does not name rank after those that it names.
pub(crate) fn near_devices(machine: &Machine, matrix: &RailMatrix) -> NearDevices {
    let node_of = |location: Location| match location {
        Location::Cpu(node) | Location::Cxl(node) => Some(node),
        Location::Gpu(..) => None,
    };
    let places: Vec<PlaceName> = matrix
        .rows
        .iter()
        .map(|row| PlaceName {
            name: row.location.to_string(),
            node: node_of(row.location),
            pci: pci_of(machine, row.location),
        })
        .collect();
    let mut devices = HashMap::new();
    for device in &machine.rdma_devices {
        let node = machine.effective_node(device.numa_node);
        let nearness = |row: &kvplane_topology::rails::Row| {
            let tier = row.tiers.iter().position(|tier| tier.rails.contains(&device.name)).unwrap_or(row.tiers.len());
            let same_node = node.zip(node_of(row.location)).map(|(ours, theirs)| ours == theirs);
            Nearness { tier: u8::try_from(tier).unwrap_or(u8::MAX), same_node }
        };
        devices.insert(device.name.clone(), matrix.rows.iter().map(nearness).collect());
    }
    let reason = |name: &str, row: &kvplane_topology::rails::Row| {
        let tier = row.tiers.iter().find(|tier| tier.rails.iter().any(|rail| rail == name));
        tier.map_or("in no tier of its row".to_owned(), |tier| tier.reason.trim_end_matches('.').to_owned())
    };
    let reasons = |name: &String| (name.clone(), matrix.rows.iter().map(|row| reason(name, row)).collect());
    let why = devices.keys().map(reasons).collect();
    NearDevices { places, devices, why }
}

/// Selects the devices of a shard: peers get those that were dealt to its seat and are on its node or, if there is
/// none, all of them. Others replace them when none of those works.
#[must_use]
pub fn dealt(devices: &RdmaDevices, seat: &ShardSeat) -> RdmaDevices {
    let all = match devices.names.is_empty() {
        true => devices.verbs.devices().map(|all| all.iter().map(|one| one.name().to_owned()).collect()),
        false => Ok(devices.names.clone()),
    };
    let Ok(all): Result<Vec<String>, _> = all else { return devices.clone() };
    let local = seat.nics.iter().filter(|share| share.local && all.contains(&share.device));
    let mut names: Vec<String> = local.map(|share| share.device.clone()).collect();
    let preferred = names.len();
    if preferred == 0 {
        return RdmaDevices { names: all, ..devices.clone() };
    }
    let place = seat.numa_node.map_or(Place::UNKNOWN, |node| devices.near.place_of_node(node));
    let mut others: Vec<String> = all.into_iter().filter(|name| !names.contains(name)).collect();
    let table = devices.near.table(others.iter().map(String::as_str));
    let tiers: Vec<u8> = (0..others.len() as u16).map(|device| table.of(device, place).tier).collect();
    let mut order: Vec<usize> = (0..others.len()).collect();
    order.sort_by_key(|&other| tiers[other]);
    let spare = DEVICES_LEAST.saturating_sub(preferred);
    names.extend(order.into_iter().take(spare).map(|other| core::mem::take(&mut others[other])));
    RdmaDevices { names, preferred: preferred as u16, ..devices.clone() }
}

/// Returns the announcement of the devices of these names, in the order of their indices; `None` without devices.
pub(crate) fn told(near: &NearDevices, names: &[String]) -> Option<NativeRails> {
    if names.is_empty() || near.places.is_empty() {
        return None;
    }
    let table = near.table(names.iter().map(String::as_str));
    let numbers = || 0..names.len() as u16;
    let place = |(position, place): (usize, &PlaceName)| NativePlace {
        name: place.name.clone(),
        tiers: numbers().map(|device| table.of(device, Place::at(position)).tier).collect(),
        same_node: numbers().map(|device| table.of(device, Place::at(position)).same_node).collect(),
    };
    Some(NativeRails {
        devices: names.iter().map(|name| NativeDevice { name: name.clone() }).collect(),
        places: near.places.iter().enumerate().map(place).collect(),
        buffers: Vec::new(),
    })
}

/// Announcement of a peer: the affinity of its devices to its memory, and the location of each of its regions.
#[derive(Default)]
pub(crate) struct Theirs {
    pub(crate) near: Near,
    /// Names of its devices and locations, for messages.
    pub(crate) devices: Vec<String>,
    pub(crate) place_names: Vec<String>,
    places: HashMap<u64, Place>,
}

impl Theirs {
    /// Reads the announcement in a descriptor.
    pub(crate) fn of(descriptor: &Descriptor) -> Self {
        let native = descriptor.native.as_ref();
        let Some((native, rails)) = native.and_then(|native| Some((native, native.rails.as_ref()?))) else {
            return Self::default();
        };
        let nearness = |device: usize| {
            let one = |place: &NativePlace| Nearness { tier: place.tiers[device], same_node: place.same_node[device] };
            rails.places.iter().map(one).collect()
        };
        Self {
            near: Near::new((0..rails.devices.len()).map(nearness).collect()),
            devices: rails.devices.iter().map(|device| device.name.clone()).collect(),
            place_names: rails.places.iter().map(|place| place.name.clone()).collect(),
            places: native.regions.iter().copied().zip(rails.buffers.iter().map(|place| Place(*place))).collect(),
        }
    }

    /// Returns the location of the region with this id.
    pub(crate) fn place(&self, region: u64) -> Place {
        self.places.get(&region).copied().unwrap_or_default()
    }
}

/// Returns the affinity of the devices of the given machine, or of this one.
///
/// # Errors
/// When a given matrix does not fit.
pub(crate) fn discover(machine: Option<&Machine>, given: Option<&str>) -> Result<Arc<NearDevices>, Error> {
    let found = match machine {
        Some(machine) => Ok(machine.clone()),
        None => kvplane_engine::discover_machine(),
    };
    let machine = match found {
        Ok(machine) => machine,
        // Without it all devices count as equally near.
        Err(_) if given.is_none() => return Ok(Arc::default()),
        Err(error) => return Err(ArgumentError::Machine(error).into()),
    };
    Ok(Arc::new(near_devices(&machine, &matrix_of(&machine, given)?)))
}

#[cfg(test)]
mod tests {
    use kvplane_soft_verbs::{Loopback, SoftPort};
    use kvplane_topology::model::{LinkLayer, PortState, RdmaDevice, RdmaPort};
    use kvplane_topology::plan::QueueShare;
    use kvplane_topology::synthetic;

    use super::*;

    /// Machine of two nodes: loop0 and loop1 on node 0, loop2 on node 1, loop3 without a node and slow.
    fn machine() -> Machine {
        let mut machine = synthetic::parse("numa:2 core:4 pu:1").unwrap();
        let port = |speed_mbps| RdmaPort {
            number: 1,
            state: PortState::Active,
            physical_state: None,
            link_layer: LinkLayer::Ethernet,
            speed_mbps: Some(speed_mbps),
            active_mtu_bytes: None,
            netdev: None,
        };
        let device = |(name, numa_node, speed): (&str, Option<u32>, u64)| RdmaDevice {
            name: name.to_owned(),
            numa_node,
            pci: None,
            driver: None,
            ports: vec![port(speed)],
        };
        let all = [("loop0", Some(0), 100_000), ("loop1", Some(0), 100_000), ("loop2", Some(1), 100_000)];
        machine.rdma_devices = all.into_iter().chain([("loop3", None, 10_000)]).map(device).collect();
        machine
    }

    fn devices(names: &[&str]) -> RdmaDevices {
        RdmaDevices {
            verbs: Loopback::new(&[SoftPort::default(); 4]).verbs(),
            names: names.iter().map(|name| (*name).to_owned()).collect(),
            preferred: 0,
            near: discover(Some(&machine()), None).unwrap(),
            options: kvplane_transport::RdmaOptions::default(),
        }
    }

    fn seat(node: u32, nics: &[(&str, bool)]) -> ShardSeat {
        let share = |&(device, local): &(&str, bool)| QueueShare {
            device: device.to_owned(),
            queue: 0,
            numa_node: None,
            local,
        };
        ShardSeat {
            shard: 0,
            core: None,
            numa_node: Some(node),
            nics: nics.iter().map(share).collect(),
            drives: Vec::new(),
            reason: String::new(),
        }
    }

    #[test]
    fn a_matrix_becomes_tiers_and_nodes() {
        let near = devices(&[]).near;
        let table = near.table(["loop0", "loop2", "loop3", "other"].into_iter());
        let at = |device: u16, node: u32| table.of(device, near.place_of_node(node));
        assert_eq!((at(0, 0).tier, at(0, 0).same_node), (0, Some(true)));
        assert_eq!((at(0, 1).same_node, at(1, 1).tier, at(1, 1).same_node), (Some(false), 0, Some(true)));
        assert!(at(0, 1).tier > 0 && at(1, 0).tier > 0);
        // A tenth of the others' speed: it ranks behind all others, wherever it is.
        assert!(at(2, 0).tier > at(1, 0).tier && at(2, 0).same_node.is_none());
        assert_eq!(at(3, 0), Nearness::default(), "nothing is known of a device that is not in the machine");
        assert!(near.why["loop0"][0].contains("node 0"), "{:?}", near.why["loop0"]);
    }

    #[test]
    fn shards_get_the_devices_of_their_node_and_a_spare() {
        let names = |devices: &RdmaDevices, seat: &ShardSeat| {
            let dealt = dealt(devices, seat);
            (dealt.names, dealt.preferred)
        };
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let all = devices(&[]);
        let near = seat(0, &[("loop0", true), ("loop1", true), ("loop2", false)]);
        assert_eq!(names(&all, &near), (owned(&["loop0", "loop1"]), 2));
        // A single device: the nearest of the others replaces it.
        assert_eq!(names(&all, &seat(0, &[("loop1", true)])), (owned(&["loop1", "loop0"]), 1));
        assert_eq!(names(&all, &seat(1, &[("loop2", true)])).1, 1);
        // No device on its node, or none that may be used: all.
        assert_eq!(names(&all, &seat(1, &[("loop0", false)])), (owned(&["loop0", "loop1", "loop2", "loop3"]), 0));
        assert_eq!(names(&devices(&["loop2", "loop3"]), &near), (owned(&["loop2", "loop3"]), 0));
        assert_eq!(names(&devices(&["loop2", "loop0"]), &near), (owned(&["loop0", "loop2"]), 1));
    }

    #[test]
    fn a_matrix_is_read_from_a_file_or_inline() {
        let machine = machine();
        let text = r#"{"cpu:0":[["loop2"],["loop0"]]}"#;
        let path = std::env::temp_dir().join(format!("kvplane-matrix-{}", std::process::id()));
        std::fs::write(&path, text).unwrap();
        let by_path = discover(Some(&machine), path.to_str()).unwrap();
        std::fs::remove_file(&path).unwrap();
        let inline = discover(Some(&machine), Some(text)).unwrap();
        for near in [by_path, inline] {
            let table = near.table(["loop2", "loop0", "loop1"].into_iter());
            let tiers = [0, 1, 2].map(|device| table.of(device, near.place("cpu:0")).tier);
            assert_eq!(tiers, [0, 1, 2], "what a row does not name comes last");
        }
        let mut gone = machine.clone();
        gone.rdma_devices[2].ports[0].state = PortState::Down;
        let error = discover(Some(&gone), Some(text)).unwrap_err().to_string();
        assert!(error.contains("loop2") && error.contains("cannot be used: no active port"), "{error}");
    }
}
