//! Helpers of transfers: settings from the arguments of Mooncake's users, requests from lists, topology.

use std::net::SocketAddr;
use std::time::Duration;

use kvplane::{Environment, Opcode, OwnAddress, SegmentHandle, TransferEngineConfig, TransferRequest};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;

use crate::outcome::failed;

/// Default deadline of a transfer in seconds; `MC_TRANSFER_TIMEOUT` overrides it.
const TIMEOUT_S: u64 = 30;

/// Returns the settings of an engine. With a loopback address, only this host can reach it.
///
/// # Errors
/// `RuntimeError` with the invalid setting.
pub(crate) fn config(host: &str, metadata: &str) -> PyResult<TransferEngineConfig> {
    let environment = Environment::of_process().map_err(|error| PyRuntimeError::new_err(error.to_string()))?;
    let p2p = metadata == "P2PHANDSHAKE";
    let OwnAddress { listen, announce, port } = OwnAddress::resolve(host, environment.bind);
    Ok(TransferEngineConfig {
        listen: SocketAddr::new(listen, if p2p { 0 } else { port.unwrap_or(0) }),
        open_to_network: !listen.is_loopback(),
        announce,
        metadata: metadata.to_owned(),
        name: (!p2p).then(|| host.to_owned()),
        deadline: Duration::from_secs(timeout()?),
        // Names come from peers: a name of a file would let them read and write files here.
        files: false,
        environment,
        ..TransferEngineConfig::default()
    })
}

fn timeout() -> PyResult<u64> {
    match std::env::var("MC_TRANSFER_TIMEOUT") {
        Ok(text) if !text.is_empty() => match text.parse() {
            Ok(seconds @ 1..=86_400) => Ok(seconds),
            _ => Err(PyRuntimeError::new_err(format!("MC_TRANSFER_TIMEOUT is {text:?}, not 1 to 86400 seconds"))),
        },
        _ => Ok(TIMEOUT_S),
    }
}

/// Returns transfers of one direction between this process and one peer.
///
/// # Errors
/// The error code, when the lists differ in length.
pub(crate) fn requests(
    opcode: Opcode,
    target: SegmentHandle,
    ours: &[u64],
    theirs: &[u64],
    lengths: &[u64],
) -> Result<Vec<TransferRequest>, i64> {
    if ours.len() != theirs.len() || ours.len() != lengths.len() {
        let (ours, theirs, lengths) = (ours.len(), theirs.len(), lengths.len());
        let unequal = format!(
            "{ours} local addresses, {theirs} remote ones and {lengths} lengths: the lists must have equal length"
        );
        return Err(failed(-1, unequal));
    }
    let request = |((source, target_offset), length): ((&u64, &u64), &u64)| TransferRequest {
        opcode,
        source: *source,
        target,
        target_offset: *target_offset,
        length: *length,
    };
    Ok(ours.iter().zip(theirs).zip(lengths).map(request).collect())
}

/// Names of locations, and devices with their NUMA nodes, -1 if unknown.
pub(crate) type Topology = (Vec<String>, Vec<(String, i64)>);

/// Returns the machine's memory locations and RDMA devices.
///
/// # Errors
/// `ValueError`, when there is no sysfs.
pub(crate) fn topology() -> PyResult<Topology> {
    let machine = kvplane::discover_machine().map_err(|error| PyValueError::new_err(error.to_string()))?;
    let mut places: Vec<String> = machine.numa_nodes.iter().map(|node| format!("cpu:{}", node.id)).collect();
    if places.is_empty() {
        places.push("cpu:0".to_owned());
    }
    let device = |node: Option<u32>| node.map_or(-1, i64::from);
    let devices = machine.rdma_devices.iter().map(|found| (found.name.clone(), device(found.numa_node))).collect();
    Ok((places, devices))
}
