//! The tests of engines once more, with engines whose memory is a device's: in processes of their own, over the driver
//! for tests.

use std::process::Command;

use crate::network;
use crate::rig::on_devices;

/// Tests that are run: all of these modules but [`HOST_ONLY`].
const MODULES: [&str; 6] = ["completion::", "memory::", "names::", "stopped::", "threads::", "trouble::"];

/// Tests about memory of the host, with the reason.
const HOST_ONLY: [(&str, &str); 4] = [
    ("memory::the_location_of_memory_is_detected_or_taken_as_given", "NUMA nodes are places of the host's memory"),
    (
        "names::an_engine_without_a_native_descriptor_is_reached_as_a_stock_one",
        "stock engines see no memory of devices",
    ),
    (
        "stopped::a_late_reply_of_a_stopped_owner_is_not_taken_for_another_memorys",
        "it is about copies that a thread makes in mapped memory",
    ),
    (
        "stopped::other_peers_are_not_delayed_by_a_stopped_owner",
        "shared memory alone is no path to a device of the same process",
    ),
];

#[test]
fn engines_with_memory_of_devices_pass_the_tests_of_engines() {
    if on_devices() || network::over_rdma() {
        return;
    }
    for (name, reason) in HOST_ONLY {
        println!("not on devices: {name}: {reason}");
    }
    for module in MODULES {
        // Names of modules are parts of others' names.
        let skips = HOST_ONLY.iter().map(|(name, _)| *name).chain(["device_"]).flat_map(|name| ["--skip", name]);
        let mut child = Command::new(std::env::current_exe().unwrap());
        let child = child.arg(module).args(skips).arg("--test-threads=2").env("KVPLANE_TEST_MEMORY", "device");
        let done = child.output().unwrap();
        let printed = [done.stdout, done.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
        assert!(done.status.success() && printed.contains(" passed; 0 failed"), "{module} {printed}");
    }
}
