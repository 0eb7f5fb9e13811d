//! JSON of the descriptor: names and order of keys as stock engines write them.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::error::invalid;
use super::{DescriptorError, NATIVE_VERSION, Native, Protocol};

/// Descriptor as it is read: every key that a stock engine may omit is optional.
#[derive(Deserialize)]
pub(super) struct Descriptor {
    #[serde(default)]
    buffers: Vec<Buffer>,
    #[serde(default)]
    kvplane: Option<Value>,
    #[serde(default)]
    name: String,
    protocol: Protocol,
    #[serde(default)]
    rdma_server_name: String,
    #[serde(default)]
    tcp_data_host: String,
    #[serde(default)]
    tcp_data_port: u16,
    #[serde(default = "first_version")]
    tcp_proto_version: u32,
    #[serde(default)]
    timestamp: String,
    #[serde(flatten)]
    other: Map<String, Value>,
}

fn first_version() -> u32 {
    1
}

#[derive(Deserialize)]
struct Buffer {
    // Buffers of files and of some devices have no address; they are refused with their index.
    addr: Option<u64>,
    length: Option<u64>,
    #[serde(default)]
    name: String,
    #[serde(default)]
    protocol: Option<String>,
    #[serde(flatten)]
    other: Map<String, Value>,
}

impl Descriptor {
    pub(super) fn into_descriptor(self) -> Result<super::Descriptor, DescriptorError> {
        let native = match self.kvplane {
            None => None,
            Some(value) => Native::from_value(value)?,
        };
        let mut buffers = Vec::with_capacity(self.buffers.len());
        for (index, buffer) in self.buffers.into_iter().enumerate() {
            let missing = |key| invalid(format!("buffers[{index}].{key}"), "is missing".to_owned());
            buffers.push(super::Buffer {
                name: buffer.name,
                address: buffer.addr.ok_or_else(|| missing("addr"))?,
                length: buffer.length.ok_or_else(|| missing("length"))?,
                protocol: buffer.protocol,
                other: buffer.other,
            });
        }
        Ok(super::Descriptor {
            name: self.name,
            protocol: self.protocol,
            buffers,
            tcp_data_port: self.tcp_data_port,
            tcp_data_host: self.tcp_data_host,
            tcp_proto_version: self.tcp_proto_version,
            timestamp: self.timestamp,
            rdma_server_name: self.rdma_server_name,
            native,
            other: self.other,
        })
    }
}

/// Descriptor as it is written. Keys of objects are sorted, as stock engines do.
#[derive(Serialize)]
pub(super) struct DescriptorFields<'a> {
    buffers: Vec<BorrowedBuffer<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kvplane: Option<BorrowedNative<'a>>,
    name: &'a str,
    protocol: &'a Protocol,
    rdma_server_name: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    tcp_data_host: &'a str,
    tcp_data_port: u16,
    tcp_proto_version: u32,
    timestamp: &'a str,
    #[serde(flatten)]
    other: &'a Map<String, Value>,
}

#[derive(Serialize)]
struct BorrowedBuffer<'a> {
    addr: u64,
    length: u64,
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    protocol: Option<&'a str>,
    #[serde(flatten)]
    other: &'a Map<String, Value>,
}

#[derive(Serialize)]
struct BorrowedNative<'a> {
    version: u32,
    #[serde(flatten)]
    native: &'a Native,
}

impl<'a> DescriptorFields<'a> {
    pub(super) fn new(from: &'a super::Descriptor) -> Self {
        let buffer = |buffer: &'a super::Buffer| BorrowedBuffer {
            addr: buffer.address,
            length: buffer.length,
            name: &buffer.name,
            protocol: buffer.protocol.as_deref(),
            other: &buffer.other,
        };
        Self {
            buffers: from.buffers.iter().map(buffer).collect(),
            kvplane: from.native.as_ref().map(|native| BorrowedNative { version: NATIVE_VERSION, native }),
            name: &from.name,
            protocol: &from.protocol,
            rdma_server_name: &from.rdma_server_name,
            tcp_data_host: &from.tcp_data_host,
            tcp_data_port: from.tcp_data_port,
            tcp_proto_version: from.tcp_proto_version,
            timestamp: &from.timestamp,
            other: &from.other,
        }
    }
}
