//! Which RDMA devices a transfer engine uses, and why not.

use std::sync::Arc;

use kvplane_engine::RdmaDevices;
use kvplane_mooncake::Environment;
use kvplane_sys::verbs::{Device, Verbs};
use kvplane_topology::Machine;
use kvplane_transport::RdmaOptions;

use crate::error::Error;
use crate::rails::near;

/// Whether RDMA is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RdmaUse {
    /// Where both sides have devices; else other ways.
    #[default]
    Auto,
    /// Not at all.
    Never,
    /// Where there is a network between, nothing else is; an engine without a usable device does not start.
    Require,
}

/// RDMA of a transfer engine.
#[derive(Clone, Debug, Default)]
pub struct RdmaConfig {
    /// Whether it is used.
    pub mode: RdmaUse,
    /// Names of the devices to use, in the order of their numbers: each is connected to the peer's of the same number
    /// first. All of them must be there, though their ports may be down. Empty for all devices.
    pub devices: Vec<String>,
    /// Where no devices are named: those that may be used, of those that there are. Empty for all. A transfer engine
    /// takes it from `MC_TE_FILTERS` unless it is given.
    pub filters: Vec<String>,
    /// Which devices serve which memory: a matrix of Mooncake or a topology of TENT as JSON, or the path of a file of
    /// it. Without, it follows from where devices and memory are. A transfer engine takes it from
    /// `MC_CUSTOM_TOPO_JSON` unless it is given.
    pub matrix: Option<String>,
    /// Where devices come from; `None` for this machine's own.
    pub verbs: Option<Verbs>,
    /// What the machine is like; `None` to look at it.
    pub machine: Option<Arc<Machine>>,
}

impl RdmaConfig {
    /// RDMA in this mode, over all devices of this machine.
    #[must_use]
    pub fn of(mode: RdmaUse) -> Self {
        Self { mode, ..Self::default() }
    }

    /// Takes what is not given from the environment.
    pub(crate) fn heed(&mut self, environment: &Environment) {
        if self.filters.is_empty() {
            self.filters.clone_from(&environment.device_filters);
        }
        if self.matrix.is_none() {
            self.matrix.clone_from(&environment.rail_matrix);
        }
    }

    /// The devices there are, or why there are none.
    fn find(&self) -> Result<RdmaDevices, String> {
        if self.mode == RdmaUse::Never {
            return Err("it is switched off here (rdma)".to_owned());
        }
        let verbs = match &self.verbs {
            Some(verbs) => verbs.clone(),
            None => Verbs::open().map_err(|error| error.to_string())?,
        };
        let devices = verbs.devices().map_err(|error| error.to_string())?;
        if devices.is_empty() {
            return Err("this machine has no RDMA device".to_owned());
        }
        for (number, name) in self.devices.iter().enumerate() {
            verbs.device(name).map_err(|error| error.to_string())?;
            if self.devices[..number].contains(name) {
                return Err(format!("the device {name} is named twice"));
            }
        }
        let names = if self.devices.is_empty() { self.filtered(&devices)? } else { self.devices.clone() };
        let (near, options) = (Arc::default(), RdmaOptions::default());
        Ok(RdmaDevices { verbs, names, preferred: 0, near, options })
    }

    /// Those that the filters let through; none for all.
    fn filtered(&self, devices: &[Device]) -> Result<Vec<String>, String> {
        let all: Vec<String> = devices.iter().map(|device| device.name().to_owned()).collect();
        let names: Vec<String> = all.iter().filter(|name| self.filters.contains(name)).cloned().collect();
        if names.is_empty() && !self.filters.is_empty() {
            return Err(format!(
                "none of the devices {} is let through by the filter {} (MC_TE_FILTERS)",
                all.join(", "),
                self.filters.join(",")
            ));
        }
        Ok(names)
    }

    /// The devices for the engine's hosts; none where there are none, or they are not to be used.
    ///
    /// # Errors
    /// When a device is named that is not there: says which there are. When a matrix does not fit the machine. When
    /// they are required and there is none, or none that can be used: says why.
    pub fn devices(&self) -> Result<Option<RdmaDevices>, Error> {
        let Some(devices) = self.chosen()? else { return Ok(None) };
        let near = near::discover(self.machine.as_deref(), self.matrix.as_deref())?;
        Ok(Some(RdmaDevices { near, ..devices }))
    }

    fn chosen(&self) -> Result<Option<RdmaDevices>, Error> {
        let found = self.find();
        if self.mode == RdmaUse::Require {
            let devices = found.clone().map_err(|why| Error::Argument(format!("RDMA is required: {why}")))?;
            usable(&devices).map_err(|why| Error::Argument(format!("RDMA is required: {why}")))?;
        }
        if self.mode == RdmaUse::Auto && !self.devices.is_empty() {
            let named = self.devices.join(", ");
            return found.map(Some).map_err(|why| Error::Argument(format!("the RDMA devices {named}: {why}")));
        }
        Ok(found.ok())
    }

    /// The names of the devices that can be used now.
    ///
    /// # Errors
    /// Why there are none.
    pub fn usable(&self) -> Result<String, String> {
        self.find().and_then(|devices| usable(&devices))
    }
}

/// The names of the devices that can be used now, or why none can.
fn usable(devices: &RdmaDevices) -> Result<String, String> {
    let all = devices.verbs.devices().map_err(|error| error.to_string())?;
    let wanted = |name: &str| devices.names.is_empty() || devices.names.iter().any(|one| one == name);
    let (mut names, mut problems) = (Vec::new(), Vec::new());
    for device in all.iter().filter(|device| wanted(device.name())) {
        let port = device.open().and_then(|context| context.active_port().and_then(|port| context.gids(port.port)));
        match port {
            Ok(_) => names.push(device.name().to_owned()),
            Err(error) => problems.push(error.to_string()),
        }
    }
    if names.is_empty() { Err(problems.join("; ")) } else { Ok(names.join(", ")) }
}

#[cfg(test)]
mod tests {
    use kvplane_sys::verbs::{Loopback, SoftPort};

    use super::*;

    fn config(mode: RdmaUse, devices: &[&str], filters: &[&str]) -> RdmaConfig {
        let owned = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        let verbs = Verbs::loopback(&Loopback::new(&[SoftPort::default(); 3]));
        RdmaConfig { mode, devices: owned(devices), filters: owned(filters), verbs: Some(verbs), ..Default::default() }
    }

    #[test]
    fn devices_that_are_named_are_used_in_that_order_and_must_be_there() {
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
    fn a_filter_takes_what_is_there() {
        let names = |filters: &[&str]| config(RdmaUse::Auto, &[], filters).devices().unwrap().map(|found| found.names);
        assert_eq!(names(&["mlx5_0", "loop2", "loop1"]).unwrap(), ["loop1", "loop2"]);
        assert!(names(&["mlx5_0"]).is_none());
        let error = config(RdmaUse::Require, &[], &["mlx5_0"]).devices().unwrap_err().to_string();
        assert!(error.contains("mlx5_0 (MC_TE_FILTERS)") && error.contains("loop0, loop1, loop2"), "{error}");
    }
}
