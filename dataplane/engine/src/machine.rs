//! Discovery of the machine that this process runs on, from sysfs and hwloc.

use kvplane_topology::sysfs::SysfsError;
use kvplane_topology::{CpuSet, Machine, Sysfs, hwloc, merge};

/// Returns the machine as the kernel reports it, completed by libhwloc if it is installed. Notes list unknown
/// properties, differences between the two, and whether hwloc was used.
///
/// Blocks while it reads, some tens of milliseconds.
///
/// # Errors
/// If there is no sysfs.
pub fn discover_machine() -> Result<Machine, SysfsError> {
    let sysfs = Sysfs::system().read()?;
    Ok(complete(sysfs))
}

/// Adds the findings of libhwloc; without it, the machine is returned unchanged.
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

/// Returns the CPUs that the calling thread may run on, as the scheduler reports them, for [`PlanRequest::affinity`].
/// `None` on machines with CPU numbers above the limit of the query.
///
/// [`PlanRequest::affinity`]: kvplane_topology::PlanRequest::affinity
#[must_use]
pub fn scheduler_affinity(machine: &Machine) -> Option<CpuSet> {
    const ROOM: usize = 1_024;
    let fits = machine.cores.iter().all(|core| core.id < ROOM);
    fits.then(|| kvplane_sys::cpu::allowed_cores().into_iter().collect())
}
