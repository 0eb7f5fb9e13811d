//! Which RDMA devices a transfer engine uses, and why not.

use kvplane_engine::RdmaDevices;
use kvplane_sys::verbs::Verbs;
use kvplane_transport::RdmaOptions;

use crate::error::Error;

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
    /// first. Empty for all.
    pub devices: Vec<String>,
    /// Where devices come from; `None` for this machine's own.
    pub verbs: Option<Verbs>,
}

impl RdmaConfig {
    /// RDMA in this mode, over all devices of this machine.
    #[must_use]
    pub fn of(mode: RdmaUse) -> Self {
        Self { mode, ..Self::default() }
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
        for name in &self.devices {
            verbs.device(name).map_err(|error| error.to_string())?;
        }
        Ok(RdmaDevices { verbs, names: self.devices.clone(), options: RdmaOptions::default() })
    }

    /// The devices for the engine's hosts; none where there are none, or they are not to be used.
    ///
    /// # Errors
    /// When they are required and there is none, or none that can be used: says why.
    pub(crate) fn devices(&self) -> Result<Option<RdmaDevices>, Error> {
        let found = self.find();
        if self.mode == RdmaUse::Require {
            let devices = found.clone().map_err(|why| Error::Argument(format!("RDMA is required: {why}")))?;
            usable(&devices).map_err(|why| Error::Argument(format!("RDMA is required: {why}")))?;
        }
        Ok(found.ok())
    }

    /// The names of the devices that can be used now, or why there are none.
    pub(super) fn usable(&self) -> Result<String, String> {
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
