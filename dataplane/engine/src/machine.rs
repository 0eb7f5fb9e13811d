//! The machine that this process runs on, from all sources there are.

use kvplane_topology::sysfs::SysfsError;
use kvplane_topology::{CpuSet, Machine, Sysfs, hwloc, merge};

/// What the kernel says of this machine, completed by libhwloc where it is installed. Notes say what is unknown, where
/// the two differ, and whether hwloc was asked.
///
/// Blocks while it reads, some tens of milliseconds.
///
/// # Errors
/// When there is no sysfs.
pub fn discover_machine() -> Result<Machine, SysfsError> {
    let sysfs = Sysfs::system().read()?;
    Ok(complete(sysfs))
}

/// Adds what libhwloc knows; a machine without it stays as it is.
fn complete(sysfs: Machine) -> Machine {
    let Ok(xml) = kvplane_sys::hwloc::export_xml() else { return sysfs };
    match hwloc::parse(&xml) {
        Ok(from_hwloc) => merge::merge(from_hwloc, sysfs),
        Err(error) => {
            let mut machine = sysfs;
            machine.notes.push(format!("libhwloc is not used: {error}."));
            machine
        }
    }
}

/// CPUs that the calling thread may run on, as the scheduler says: what [`PlanRequest::affinity`] takes. `None` on
/// machines with CPU numbers beyond those that the question has room for.
///
/// [`PlanRequest::affinity`]: kvplane_topology::PlanRequest::affinity
#[must_use]
pub fn scheduler_affinity(machine: &Machine) -> Option<CpuSet> {
    const ROOM: usize = 1_024;
    let fits = machine.cores.iter().all(|core| core.id < ROOM);
    fits.then(|| kvplane_sys::cpu::allowed_cores().into_iter().collect())
}
