//! What the network of these tests is: TCP, or RDMA where `KVPLANE_TEST_TRANSPORT=rdma` asks for it.
//!
//! The same tests then run over RDMA. In the rig (docs/rig.md) that is the machine's own devices, the first half of
//! them for one end and the rest for the other, so that all payload crosses the wire; elsewhere it is software devices,
//! which are of one process. Whoever starts several processes needs the rig.

#![allow(dead_code, reason = "several test programs share this file, and each uses a part")]

use std::sync::LazyLock;

use kvplane_transfer::verbs::{Loopback, SoftPort, Verbs};
use kvplane_transfer::{RdmaConfig, RdmaUse};

/// Whether RDMA takes the place of TCP.
pub(crate) fn over_rdma() -> bool {
    std::env::var("KVPLANE_TEST_TRANSPORT").is_ok_and(|name| name == "rdma")
}

/// The two ends of a connection, which have devices of their own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum End {
    Asks,
    Serves,
}

/// RDMA devices of this machine; none outside of the rig.
fn installed() -> usize {
    std::env::var("RIG_RXE").ok().and_then(|text| text.parse().ok()).unwrap_or(0)
}

/// Connections that this machine's devices gave up so far as the other end did not answer: emulated ones do when their
/// machine stands still for half a second.
pub(crate) fn connections_given_up() -> u64 {
    let counter = |number| format!("/sys/class/infiniband/rxe{number}/ports/1/hw_counters/retry_exceeded_err");
    let read = |number| std::fs::read_to_string(counter(number)).ok()?.trim().parse::<u64>().ok();
    (0..installed()).filter_map(read).sum()
}

/// What the machine's devices have counted, by device and name.
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

/// Where devices come from: `None` for the machine's own.
pub(crate) fn verbs() -> Option<Verbs> {
    static FABRIC: LazyLock<Loopback> = LazyLock::new(|| Loopback::new(&[SoftPort::default(); 4]));
    (!over_rdma() || installed() == 0).then(|| Verbs::loopback(&FABRIC))
}

/// Whether the devices are those of an emulated machine.
pub(crate) fn on_emulated_devices() -> bool {
    over_rdma() && verbs().is_none()
}

/// The names of the devices of one end.
pub(crate) fn devices(end: End) -> Vec<String> {
    let (count, prefix) = if verbs().is_some() { (4, "loop") } else { (installed(), "rxe") };
    assert!(count >= 2, "two ends take two RDMA devices, and this machine has {count}");
    let numbers = if end == End::Asks { 0..count / 2 } else { count / 2..count };
    numbers.map(|number| format!("{prefix}{number}")).collect()
}

/// The same for programs of their own: none where the network is TCP.
pub(crate) fn installed_devices(end: End) -> Vec<String> {
    if !over_rdma() {
        return Vec::new();
    }
    assert!(installed() > 0, "KVPLANE_TEST_TRANSPORT=rdma takes the rig here: cargo x test --rig --machine over-rdma");
    devices(end)
}

/// Settings of one end that has RDMA.
pub(crate) fn rdma(end: End, mode: RdmaUse) -> RdmaConfig {
    RdmaConfig { devices: devices(end), verbs: verbs(), ..RdmaConfig::of(mode) }
}

/// Settings of one end: RDMA in this mode where it takes the place of TCP, else none.
pub(crate) fn instead_of_tcp(end: End, mode: RdmaUse) -> RdmaConfig {
    if over_rdma() { rdma(end, mode) } else { RdmaConfig::of(RdmaUse::Never) }
}
