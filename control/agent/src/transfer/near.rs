//! Which RDMA devices are near which memory: from the machine's rail matrix, or one that the operator gives; and as
//! peers are told of it.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use kvplane_engine::{NearDevices, PlaceName, RdmaDevices};
use kvplane_mooncake::{Descriptor, NativeDevice, NativePlace, NativeRails};
use kvplane_proto::client::{Near, Nearness, Place};
use kvplane_topology::plan::ShardSeat;
use kvplane_topology::rails::{GivenMatrix, Location, MAX_MATRIX_BYTES};
use kvplane_topology::{Machine, RailMatrix, rail_matrix};

use crate::error::Error;

/// Devices that a shard opens at least, where there are as many: one that is alone must not be all that there is.
const DEVICES_LEAST: usize = 2;

/// The rail matrix of a machine, or the one that is given: as JSON, or the path of a file of it.
///
/// # Errors
/// When it cannot be read, or does not fit the machine: says which row and what there is.
pub(crate) fn matrix_of(machine: &Machine, given: Option<&str>) -> Result<RailMatrix, Error> {
    let matrix = rail_matrix(machine);
    let Some(given) = given else { return Ok(matrix) };
    let inline = given.trim_start().starts_with('{');
    let (source, text) = match inline {
        true => ("the rail matrix".to_owned(), given.to_owned()),
        false => (given.to_owned(), read(Path::new(given))?),
    };
    let fitted = GivenMatrix::parse(&text).and_then(|given| matrix.with_given(&given));
    let mut fitted = fitted.map_err(|error| Error::Argument(format!("{source}: {error}")))?;
    fitted.notes.extend(matrix.differences(&fitted));
    Ok(fitted)
}

fn read(path: &Path) -> Result<String, Error> {
    let failed = |why: String| Error::Argument(format!("cannot read the rail matrix {}: {why}", path.display()));
    let bytes = std::fs::metadata(path).map_err(|error| failed(error.to_string()))?.len();
    if bytes > MAX_MATRIX_BYTES as u64 {
        return Err(failed(format!("it has {bytes} bytes, and at most {MAX_MATRIX_BYTES} are read")));
    }
    std::fs::read_to_string(path).map_err(|error| failed(error.to_string()))
}

/// The matrix by places and devices. A device that a row does not name comes after all that it names.
pub(crate) fn near_devices(machine: &Machine, matrix: &RailMatrix) -> NearDevices {
    let node_of = |location: Location| match location {
        Location::Cpu(node) | Location::Cxl(node) => Some(node),
        Location::Gpu(..) => None,
    };
    let places: Vec<PlaceName> = matrix
        .rows
        .iter()
        .map(|row| PlaceName { name: row.location.to_string(), node: node_of(row.location) })
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

/// The devices of a shard: peers are given those that were dealt to its seat and are on its node, or, where there is
/// none, all of them. Others stand in when none of those works.
pub(crate) fn dealt(devices: &RdmaDevices, seat: &ShardSeat) -> RdmaDevices {
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

/// What peers are told of the devices of these names, in the order of their numbers; none where there are none.
pub(super) fn told(near: &NearDevices, names: &[String]) -> Option<NativeRails> {
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

/// What a peer told: how near its devices are to its memory, and where each of its regions is.
#[derive(Default)]
pub(super) struct Theirs {
    pub(super) near: Near,
    /// Names of its devices and its places, for people.
    pub(super) devices: Vec<String>,
    pub(super) place_names: Vec<String>,
    places: HashMap<u64, Place>,
}

impl Theirs {
    /// What a descriptor says.
    pub(super) fn of(descriptor: &Descriptor) -> Self {
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

    /// Where the region of this name is.
    pub(super) fn place(&self, region: u64) -> Place {
        self.places.get(&region).copied().unwrap_or_default()
    }
}

/// How near the devices are, from the machine that is given or this one.
///
/// # Errors
/// When a matrix is given and does not fit.
pub(crate) fn discover(machine: Option<&Machine>, given: Option<&str>) -> Result<Arc<NearDevices>, Error> {
    let found = match machine {
        Some(machine) => Ok(machine.clone()),
        None => crate::machine::discover_machine(),
    };
    let machine = match found {
        Ok(machine) => machine,
        // Without it all devices count as equally near.
        Err(_) if given.is_none() => return Ok(Arc::default()),
        Err(error) => return Err(error),
    };
    Ok(Arc::new(near_devices(&machine, &matrix_of(&machine, given)?)))
}
