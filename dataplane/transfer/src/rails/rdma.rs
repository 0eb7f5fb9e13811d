//! Selection of the RDMA devices of a transfer engine, and the reasons against them.

use std::fmt;
use std::sync::Arc;

use kvplane_engine::RdmaDevices;
use kvplane_mooncake::Environment;
use kvplane_sys::verbs::{Device, Verbs, VerbsError};
use kvplane_topology::Machine;
use kvplane_transport::RdmaOptions;

use crate::error::{ArgumentError, Error};
use crate::rails::near;

/// Mode of RDMA.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RdmaUse {
    /// Used where both sides have devices; other transports elsewhere.
    #[default]
    Auto,
    /// Not used.
    Never,
    /// Used exclusively between hosts; an engine without a usable device does not start.
    Require,
}

/// Reason why a transfer engine has no usable RDMA devices.
#[derive(Debug)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub enum DevicesError {
    /// The settings switch RDMA off.
    Off,
    /// The machine has no verbs, or not a device of that name.
    Verbs(VerbsError),
    /// The machine has no device.
    NoDevice,
    /// A device is named twice.
    NamedTwice { name: String },
    /// No device passes the filter.
    Filtered {
        /// Existing devices.
        devices: Vec<String>,
        /// Devices that may be used.
        filters: Vec<String>,
    },
    /// No device is usable now.
    Unusable {
        /// Problem of each device.
        problems: Vec<VerbsError>,
    },
}

impl fmt::Display for DevicesError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("it is switched off here (rdma)"),
            Self::Verbs(error) => write!(f, "{error}"),
            Self::NoDevice => f.write_str("this machine has no RDMA device"),
            Self::NamedTwice { name } => write!(f, "the device {name} is named twice"),
            Self::Filtered { devices, filters } => write!(
                f,
                "none of the devices {} passes the filter {} (MC_TE_FILTERS)",
                devices.join(", "),
                filters.join(",")
            ),
            Self::Unusable { problems } => {
                let problems: Vec<String> = problems.iter().map(VerbsError::to_string).collect();
                f.write_str(&problems.join("; "))
            }
        }
    }
}

impl std::error::Error for DevicesError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Verbs(error) => Some(error),
            _ => None,
        }
    }
}

impl From<VerbsError> for DevicesError {
    fn from(error: VerbsError) -> Self {
        Self::Verbs(error)
    }
}

/// RDMA settings of a transfer engine.
#[derive(Clone, Debug, Default)]
pub struct RdmaConfig {
    /// Mode.
    pub mode: RdmaUse,
    /// Names of the devices to use, in the order of their indices: each connects to the peer's device of the same index
    /// first. All of them must exist, though their ports may be down. Empty for all devices.
    pub devices: Vec<String>,
    /// Filter where no devices are named: the devices that may be used, of those that exist. Empty for all. A transfer
    /// engine takes it from `MC_TE_FILTERS` unless it is set.
    pub filters: Vec<String>,
    /// Assignment of devices to memory: a matrix of Mooncake or a topology of TENT as JSON, or the path of such a file.
    /// `None` derives it from the locations of devices and memory. A transfer engine takes it from
    /// `MC_CUSTOM_TOPO_JSON` unless it is set.
    pub matrix: Option<String>,
    /// Provider of the devices; `None` for this machine's own.
    pub verbs: Option<Verbs>,
    /// Topology of the machine; `None` to discover it.
    pub machine: Option<Arc<Machine>>,
}

impl RdmaConfig {
    /// Returns the settings for this mode, over all devices of this machine.
    #[must_use]
    pub fn of(mode: RdmaUse) -> Self {
        Self { mode, ..Self::default() }
    }

    /// Fills in the settings that are not set from the environment.
    pub(crate) fn heed(&mut self, environment: &Environment) {
        if self.filters.is_empty() {
            self.filters.clone_from(&environment.device_filters);
        }
        if self.matrix.is_none() {
            self.matrix.clone_from(&environment.rail_matrix);
        }
    }

    /// Returns the devices, or the reason why there are none.
    fn find(&self) -> Result<RdmaDevices, DevicesError> {
        if self.mode == RdmaUse::Never {
            return Err(DevicesError::Off);
        }
        let verbs = match &self.verbs {
            Some(verbs) => verbs.clone(),
            None => Verbs::open()?,
        };
        let devices = verbs.devices()?;
        if devices.is_empty() {
            return Err(DevicesError::NoDevice);
        }
        for (number, name) in self.devices.iter().enumerate() {
            verbs.device(name)?;
            if self.devices[..number].contains(name) {
                return Err(DevicesError::NamedTwice { name: name.clone() });
            }
        }
        let names = if self.devices.is_empty() { self.filtered(&devices)? } else { self.devices.clone() };
        let (near, options) = (Arc::default(), RdmaOptions::default());
        Ok(RdmaDevices { verbs, names, preferred: 0, near, options })
    }

    /// Returns the names of the devices that pass the filter; empty for all.
    fn filtered(&self, devices: &[Device]) -> Result<Vec<String>, DevicesError> {
        let all: Vec<String> = devices.iter().map(|device| device.name().to_owned()).collect();
        let names: Vec<String> = all.iter().filter(|name| self.filters.contains(name)).cloned().collect();
        if names.is_empty() && !self.filters.is_empty() {
            return Err(DevicesError::Filtered { devices: all, filters: self.filters.clone() });
        }
        Ok(names)
    }

    /// Returns the devices for the engine's hosts; `None` where there are none, or RDMA is not to be used.
    ///
    /// # Errors
    /// When a named device does not exist; the error lists the existing ones. When a matrix does not fit the machine.
    /// When RDMA is required and no device exists or is usable; the error gives the reason.
    pub fn devices(&self) -> Result<Option<RdmaDevices>, Error> {
        let Some(devices) = self.chosen()? else { return Ok(None) };
        let near = near::discover(self.machine.as_deref(), self.matrix.as_deref())?;
        Ok(Some(RdmaDevices { near, ..devices }))
    }

    fn chosen(&self) -> Result<Option<RdmaDevices>, Error> {
        let found = self.find();
        if self.mode == RdmaUse::Require {
            let devices = found.map_err(ArgumentError::RdmaRequired)?;
            usable(&devices).map_err(ArgumentError::RdmaRequired)?;
            return Ok(Some(devices));
        }
        if self.mode == RdmaUse::Auto && !self.devices.is_empty() {
            let named = |why| ArgumentError::RdmaDevices { devices: self.devices.clone(), why };
            return Ok(Some(found.map_err(named)?));
        }
        Ok(found.ok())
    }

    /// Returns the names of the devices that are usable now.
    ///
    /// # Errors
    /// The reason why there are none.
    pub fn usable(&self) -> Result<String, DevicesError> {
        self.find().and_then(|devices| usable(&devices))
    }
}

/// Returns the names of the devices that are usable now, or the reason why none is.
fn usable(devices: &RdmaDevices) -> Result<String, DevicesError> {
    let all = devices.verbs.devices()?;
    let wanted = |name: &str| devices.names.is_empty() || devices.names.iter().any(|one| one == name);
    let (mut names, mut problems) = (Vec::new(), Vec::new());
    for device in all.iter().filter(|device| wanted(device.name())) {
        let port = device.open().and_then(|context| context.active_port().and_then(|port| context.gids(port.port)));
        match port {
            Ok(_) => names.push(device.name().to_owned()),
            Err(error) => problems.push(error),
        }
    }
    if names.is_empty() { Err(DevicesError::Unusable { problems }) } else { Ok(names.join(", ")) }
}

#[cfg(test)]
mod tests {
    use kvplane_soft_verbs::{Loopback, SoftPort};

    use super::*;

    fn config(mode: RdmaUse, devices: &[&str], filters: &[&str]) -> RdmaConfig {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let verbs = Loopback::new(&[SoftPort::default(); 3]).verbs();
        RdmaConfig { mode, devices: owned(devices), filters: owned(filters), verbs: Some(verbs), ..Default::default() }
    }

    #[test]
    fn named_devices_are_used_in_order_and_must_exist() {
        for mode in [RdmaUse::Auto, RdmaUse::Require] {
            let found = config(mode, &["loop2", "loop0"], &["loop1"]).devices().unwrap().unwrap();
            assert_eq!(found.names, ["loop2", "loop0"]);
            let error = config(mode, &["loop0", "mlx5_7"], &[]).devices().unwrap_err().to_string();
            assert!(error.contains("mlx5_7") && error.contains("loop0, loop1, loop2"), "{error}");
            let error = config(mode, &["loop0", "loop0"], &[]).devices().unwrap_err().to_string();
            assert!(error.contains("loop0 is named twice"), "{error}");
        }
        assert!(config(RdmaUse::Never, &["mlx5_7"], &[]).devices().unwrap().is_none());
        let all = config(RdmaUse::Auto, &[], &[]);
        assert_eq!(
            (all.devices().unwrap().unwrap().names.len(), all.usable().unwrap().as_str()),
            (0, "loop0, loop1, loop2")
        );
    }

    #[test]
    fn a_filter_selects_existing_devices() {
        let names = |filters: &[&str]| config(RdmaUse::Auto, &[], filters).devices().unwrap().map(|found| found.names);
        assert_eq!(names(&["mlx5_0", "loop2", "loop1"]).unwrap(), ["loop1", "loop2"]);
        assert!(names(&["mlx5_0"]).is_none());
        let error = config(RdmaUse::Require, &[], &["mlx5_0"]).devices().unwrap_err().to_string();
        assert!(error.contains("mlx5_0 (MC_TE_FILTERS)") && error.contains("loop0, loop1, loop2"), "{error}");
    }
}
