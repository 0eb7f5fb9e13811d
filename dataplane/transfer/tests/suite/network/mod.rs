//! Network of these tests: TCP, or RDMA with `KVPLANE_TEST_TRANSPORT=rdma`.
//!
//! The same tests then run over RDMA. In the rig (docs/rig.md) they use the machine's own devices, the first half for
//! one end and the rest for the other, so that all payload crosses the wire; elsewhere they use software devices, which
//! exist within one process. Tests that start several processes need the rig.

#![allow(dead_code, reason = "several test programs share this file, and each uses a part")]

use std::sync::LazyLock;

use kvplane_soft_verbs::{Loopback, SoftPort};
use kvplane_transfer::verbs::Verbs;
use kvplane_transfer::{RdmaConfig, RdmaUse};

/// Returns true if RDMA replaces TCP.
pub(crate) fn over_rdma() -> bool {
    std::env::var("KVPLANE_TEST_TRANSPORT").is_ok_and(|name| name == "rdma")
}

/// Ends of a connection, each with devices of its own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End {
    Asks,
    Serves,
}

/// Returns the number of RDMA devices of this machine; 0 outside of the rig.
fn installed() -> usize {
    std::env::var("RIG_RXE").ok().and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// Returns the number of connections that this machine's devices closed so far because the other end did not answer:
/// emulated devices do when their machine stalls for half a second.
pub(crate) fn connections_given_up() -> u64 {
    let counter = |number| format!("/sys/class/infiniband/rxe{number}/ports/1/hw_counters/retry_exceeded_err");
    let read = |number| std::fs::read_to_string(counter(number)).ok()?.trim().parse::<u64>().ok();
    (0..installed()).filter_map(read).sum()
}

/// Returns the counters of the machine's devices, by device and name.
pub(crate) fn device_counters() -> std::collections::BTreeMap<String, u64> {
    let mut counters = std::collections::BTreeMap::new();
    for number in 0..installed() {
        let folder = format!("/sys/class/infiniband/rxe{number}/ports/1/hw_counters");
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let value = std::fs::read_to_string(entry.path()).ok().and_then(|text| text.trim().parse().ok());
            counters.extend(value.map(|value| (format!("rxe{number} {}", entry.file_name().display()), value)));
        }
    }
    counters
}

/// Returns the provider of the devices: `None` for the machine's own.
pub(crate) fn verbs() -> Option<Verbs> {
    static FABRIC: LazyLock<Loopback> = LazyLock::new(|| Loopback::new(&[SoftPort::default(); 4]));
    (!over_rdma() || installed() == 0).then(|| FABRIC.verbs())
}

/// Returns true if the devices are those of an emulated machine.
pub(crate) fn on_emulated_devices() -> bool {
    over_rdma() && verbs().is_none()
}

/// Returns the names of the devices of one end.
pub(crate) fn devices(end: End) -> Vec<String> {
    let (count, prefix) = if verbs().is_some() { (4, "loop") } else { (installed(), "rxe") };
    assert!(count >= 2, "two ends take two RDMA devices, and this machine has {count}");
    let numbers = if end == End::Asks { 0..count / 2 } else { count / 2..count };
    numbers.map(|number| format!("{prefix}{number}")).collect()
}

/// Returns the same for separate programs: none where the network is TCP.
pub(crate) fn installed_devices(end: End) -> Vec<String> {
    if !over_rdma() {
        return Vec::new();
    }
    assert!(installed() > 0, "KVPLANE_TEST_TRANSPORT=rdma takes the rig here: cargo x test --rig --machine over-rdma");
    devices(end)
}

/// Returns the settings of one end with RDMA.
pub(crate) fn rdma(end: End, mode: RdmaUse) -> RdmaConfig {
    RdmaConfig { devices: devices(end), verbs: verbs(), ..RdmaConfig::of(mode) }
}

/// Returns the settings of one end: RDMA in this mode if it replaces TCP, else none.
pub(crate) fn instead_of_tcp(end: End, mode: RdmaUse) -> RdmaConfig {
    if over_rdma() { rdma(end, mode) } else { RdmaConfig::of(RdmaUse::Never) }
}
