//! Requests on memory of devices, which RDMA devices carry out directly.

use super::Client;
use crate::types::Request;

/// Returns true if RDMA devices may carry out this read or write of device memory, as far as is known now: its buffer
/// is set as such, and one of the devices is connected to the peer or may be, and may access the segment.
#[must_use]
pub fn may_copy(client: &Client, request: &Request) -> bool {
    let (Request::Read(target, _) | Request::Write(target, _)) = request else { return false };
    let network = &client.router.traffic.network;
    network.device_buffers.has(request) && network.may_copy(target)
}
