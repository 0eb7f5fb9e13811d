//! Verbs end to end: the same cases on software devices and on the RDMA devices of this machine, if any.
//!
//! With `RIG=1` in the environment real devices must exist; without it, and without devices, those cases are skipped
//! with a message.

mod bed;
mod cable;
mod device_memory;
mod refusals;
mod soft;
mod suite;

use kvplane_soft_verbs::{Loopback, SoftPort};
use kvplane_sys::verbs::{Device, Verbs, VerbsError};

#[test]
fn all_cases_hold_on_two_software_devices() {
    let fabric = Loopback::new(&[SoftPort::default(); 2]);
    let devices = fabric.verbs().devices().expect("devices");
    for (name, case) in suite::CASES {
        eprintln!("loopback: {name}");
        case(&devices[0], &devices[1]);
    }
    assert_eq!((fabric.violations(), fabric.registered(0), fabric.registered(1)), (0, 0, 0));
}

#[test]
fn all_cases_hold_on_one_software_device() {
    let fabric = Loopback::new(&[SoftPort::default()]);
    let device = fabric.verbs().device("loop0").expect("device");
    for (name, case) in suite::CASES {
        eprintln!("loopback, alone: {name}");
        case(&device, &device);
    }
    assert_eq!((fabric.violations(), fabric.registered(0)), (0, 0));
}

/// Returns the usable devices of this machine; prints why the others are not usable.
fn real_devices() -> Result<Vec<Device>, VerbsError> {
    let mut devices = Verbs::open()?.devices()?;
    devices.retain(|device| match device.open().and_then(|open| open.active_port()) {
        Ok(_) => true,
        Err(error) => {
            eprintln!("{error}");
            false
        }
    });
    Ok(devices)
}

#[test]
fn all_cases_hold_on_real_devices() {
    let wanted = std::env::var_os("RIG").is_some();
    let devices = match real_devices() {
        Ok(devices) if !devices.is_empty() => devices,
        Ok(_) if !wanted => return eprintln!("skipped: no RDMA device with an active port"),
        Err(error) if !wanted => return eprintln!("skipped: {error}"),
        other => panic!("RIG is set, but there is no usable RDMA device: {other:?}"),
    };
    let last = devices.last().expect("one at least");
    if wanted {
        refusals::are_explained();
        cable::pulled_and_put_back(&devices[0], last);
    }
    for (name, case) in suite::CASES {
        eprintln!("{} to {}: {name}", devices[0].name(), last.name());
        case(&devices[0], last);
    }
}
