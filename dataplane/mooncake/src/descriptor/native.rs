//! Key `kvplane` of a descriptor: the addresses at which our engines reach each other by their own protocol.
//!
//! A reader ignores unknown keys. A change that older readers cannot ignore raises the version, and a reader that finds
//! another version than its own treats the peer as a stock one.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::error::invalid;
use super::rails::NativeRails;
use super::{DescriptorError, MAX_NAME_BYTES, short};

/// Version of the key that this crate writes and reads.
pub const NATIVE_VERSION: u32 = 1;

/// Addresses of an engine for our own protocol.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Native {
    /// Address on which its data protocol listens on TCP, if it does.
    #[serde(with = "address")]
    pub tcp: Option<SocketAddr>,
    /// Path of the Unix socket for peers on the same host; empty if there is none.
    #[serde(default)]
    pub shm: String,
    /// Identity of its host: the kernel's boot id.
    #[serde(default)]
    pub host: String,
    /// Process id of the engine, in its own namespace.
    #[serde(default)]
    pub pid: u32,
    /// Incarnation of the engine, so that a restarted one is not mistaken for its predecessor.
    pub incarnation: u64,
    /// Region id of each buffer, in the order of `buffers`; or none at all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub regions: Vec<u64>,
    /// RDMA devices of the engine, if it has some and knows their locations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rails: Option<NativeRails>,
    /// Unknown keys, unchanged.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Native {
    pub(super) fn check(&self, buffers: usize) -> Result<(), DescriptorError> {
        short("kvplane.shm", &self.shm)?;
        short("kvplane.host", &self.host)?;
        if self.shm.contains('\0') {
            return Err(invalid("kvplane.shm", "contains a zero byte".to_owned()));
        }
        if !self.regions.is_empty() && self.regions.len() != buffers {
            let reason = format!("has {} entries for {buffers} buffers", self.regions.len());
            return Err(invalid("kvplane.regions", reason));
        }
        if let Some(rails) = &self.rails {
            rails.check(buffers)?;
        }
        if self.other.contains_key("version") {
            return Err(invalid("kvplane.version", "is written by the encoder".to_owned()));
        }
        Ok(())
    }

    /// Decodes the JSON value of the key. Returns `None` if its version differs from ours.
    pub(super) fn from_value(mut value: Value) -> Result<Option<Self>, DescriptorError> {
        let version = value.as_object_mut().and_then(|map| map.remove("version"));
        let Some(version) = version.as_ref().and_then(Value::as_u64) else {
            return Err(invalid("kvplane.version", "is missing or not a number".to_owned()));
        };
        if version != u64::from(NATIVE_VERSION) {
            return Ok(None);
        }
        serde_json::from_value(value).map(Some).map_err(|error| invalid("kvplane", error.to_string()))
    }
}

/// Encoding of an address as `ip:port`, and of `None` as the empty string.
mod address {
    use super::{MAX_NAME_BYTES, SocketAddr};
    use serde::{Deserialize, Deserializer, Serializer, de};

    #[expect(clippy::ref_option, reason = "serde calls it with a reference to the field")]
    pub(super) fn serialize<S: Serializer>(address: &Option<SocketAddr>, to: S) -> Result<S::Ok, S::Error> {
        match address {
            Some(address) => to.collect_str(address),
            None => to.serialize_str(""),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<SocketAddr>, D::Error> {
        let text = String::deserialize(from)?;
        if text.is_empty() {
            return Ok(None);
        }
        let shown = text.get(..text.len().min(MAX_NAME_BYTES)).unwrap_or_default();
        text.parse().map(Some).map_err(|_| de::Error::custom(format!("tcp is {shown:?}, not ip:port")))
    }
}
