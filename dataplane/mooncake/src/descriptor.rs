//! Segment descriptors: the JSON in which an engine publishes the memory that it serves and how to reach it.
//!
//! Decoding accepts the output of stock engines and ignores unknown keys; encoding writes JSON that stock engines read.
//! The key `kvplane` is ours: stock engines ignore it, and our engines find in it how to use our own protocol. Keys of
//! other transports are kept unchanged; those of RDMA (`devices`, `rkey`, `priority_matrix`) are read and written by
//! [`Descriptor::rdma`] and [`Descriptor::set_rdma`].
//!
//! ```
//! use kvplane_mooncake::Descriptor;
//!
//! let text = r#"{"buffers":[{"addr":4096,"length":64,"name":"cpu:0"}],"name":"127.0.0.1:15000","protocol":"tcp",
//!     "tcp_data_port":15001}"#;
//! let descriptor = Descriptor::decode(text.as_bytes(), 1 << 20)?;
//! assert_eq!(descriptor.buffers[0].address, 4096);
//! assert_eq!(descriptor.tcp_proto_version, 1, "the default is version 1");
//! # Ok::<(), kvplane_mooncake::DescriptorError>(())
//! ```

mod error;
mod native;
mod rails;
mod rdma;
mod wire;

use serde_json::{Map, Value};

pub use error::DescriptorError;
pub use native::{NATIVE_VERSION, Native};
pub use rails::{NativeDevice, NativePlace, NativeRails};
pub use rdma::{MalformedMatrix, Matrix, RDMA, RdmaDevice, RdmaKey, RdmaSegment};

use error::invalid;

/// Most buffers in a descriptor.
pub const MAX_BUFFERS: usize = 1 << 16;
/// Longest name, location, host or path in a descriptor.
pub const MAX_NAME_BYTES: usize = 4096;
/// Name of the transport over TCP.
pub const TCP: &str = "tcp";

/// Descriptor of a segment.
#[derive(Clone, Debug, PartialEq)]
pub struct Descriptor {
    /// Name of the segment: with peer-to-peer handshakes, the address on which its daemon listens.
    pub name: String,
    /// Transports over which the segment is reached.
    pub protocol: Protocol,
    /// Registered memory.
    pub buffers: Vec<Buffer>,
    /// Port of the TCP data server; 0 if there is none.
    pub tcp_data_port: u16,
    /// Host of the TCP data server; empty means the host of the segment's name.
    pub tcp_data_host: String,
    /// Version of the TCP data protocol: 1, or 2 for writes that are acknowledged.
    pub tcp_proto_version: u32,
    /// Time of writing, for people.
    pub timestamp: String,
    /// Name of the RDMA server; empty for TCP.
    pub rdma_server_name: String,
    /// Addresses for our own protocol; `None` for a stock peer, or if its version differs from ours.
    pub native: Option<Native>,
    /// Unknown keys, unchanged.
    pub other: Map<String, Value>,
}

/// Transports of a segment: a stock engine writes one name, or a list if it serves several.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(untagged)]
pub enum Protocol {
    /// One transport.
    One(String),
    /// Several transports; then each buffer names its own.
    Many(Vec<String>),
}

impl Protocol {
    /// Returns true if `name` is one of the transports.
    #[must_use]
    pub fn includes(&self, name: &str) -> bool {
        self.names().iter().any(|found| found == name)
    }

    fn names(&self) -> &[String] {
        match self {
            Self::One(name) => std::slice::from_ref(name),
            Self::Many(names) => names,
        }
    }
}

/// Range of registered memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    /// Location of the memory, or the engine's name for it: not empty.
    pub name: String,
    /// Address of the first byte in the serving process: not 0.
    pub address: u64,
    /// Bytes: not 0, and the range must not exceed the address space.
    pub length: u64,
    /// Transport of the buffer, if the segment has several.
    pub protocol: Option<String>,
    /// Unknown keys, such as `rkey`, unchanged.
    pub other: Map<String, Value>,
}

impl Buffer {
    /// Creates a buffer of the segment's only transport.
    #[must_use]
    pub fn new(name: &str, address: u64, length: u64) -> Self {
        Self { name: name.to_owned(), address, length, protocol: None, other: Map::new() }
    }
}

impl Descriptor {
    /// Creates a descriptor of a TCP segment that is reached at `data_host` and `data_port`, without buffers.
    #[must_use]
    pub fn tcp(name: &str, data_host: &str, data_port: u16) -> Self {
        Self {
            name: name.to_owned(),
            protocol: Protocol::One(TCP.to_owned()),
            buffers: Vec::new(),
            tcp_data_port: data_port,
            tcp_data_host: data_host.to_owned(),
            tcp_proto_version: 2,
            timestamp: String::new(),
            rdma_server_name: String::new(),
            native: None,
            other: Map::new(),
        }
    }

    /// Decodes a descriptor of at most `max_bytes`.
    ///
    /// # Errors
    /// If it is longer, is not JSON of the expected shape, or has an invalid value: as in a stock engine, one bad
    /// buffer refuses the whole descriptor.
    pub fn decode(bytes: &[u8], max_bytes: usize) -> Result<Self, DescriptorError> {
        if bytes.len() > max_bytes {
            return Err(DescriptorError::TooLong { bytes: bytes.len(), limit: max_bytes });
        }
        let wire: wire::Descriptor = serde_json::from_slice(bytes)?;
        let descriptor = wire.into_descriptor()?;
        descriptor.check()?;
        Ok(descriptor)
    }

    /// Encodes the descriptor as one line of JSON of at most `max_bytes`.
    ///
    /// # Errors
    /// If it is longer, or has a value that [`Self::decode`] would refuse.
    pub fn encode(&self, max_bytes: usize) -> Result<String, DescriptorError> {
        self.check()?;
        let text = serde_json::to_string(&wire::DescriptorFields::new(self))?;
        if text.len() > max_bytes {
            return Err(DescriptorError::TooLong { bytes: text.len(), limit: max_bytes });
        }
        Ok(text)
    }

    fn check(&self) -> Result<(), DescriptorError> {
        for (what, text) in [
            ("name", &self.name),
            ("tcp_data_host", &self.tcp_data_host),
            ("timestamp", &self.timestamp),
            ("rdma_server_name", &self.rdma_server_name),
        ] {
            short(what, text)?;
        }
        let names = self.protocol.names();
        if names.is_empty() || names.iter().any(|name| name.is_empty() || name.len() > MAX_NAME_BYTES) {
            return Err(invalid("protocol", "names no transport".to_owned()));
        }
        if self.buffers.len() > MAX_BUFFERS {
            let reason = format!("has {} entries, more than {MAX_BUFFERS}", self.buffers.len());
            return Err(invalid("buffers", reason));
        }
        for (index, buffer) in self.buffers.iter().enumerate() {
            buffer.check().map_err(|(key, reason)| invalid(format!("buffers[{index}].{key}"), reason))?;
        }
        match &self.native {
            Some(native) => native.check(self.buffers.len()),
            None => Ok(()),
        }
    }
}

impl Buffer {
    fn check(&self) -> Result<(), (&'static str, String)> {
        if self.name.is_empty() || self.name.len() > MAX_NAME_BYTES {
            return Err(("name", format!("has {} bytes, not 1 to {MAX_NAME_BYTES}", self.name.len())));
        }
        if self.address == 0 {
            return Err(("addr", "is 0".to_owned()));
        }
        if self.length == 0 {
            return Err(("length", "is 0".to_owned()));
        }
        if self.address.checked_add(self.length).is_none() {
            let reason = format!("{} from {:#x} reaches beyond the last address", self.length, self.address);
            return Err(("length", reason));
        }
        Ok(())
    }
}

fn short(what: &str, text: &str) -> Result<(), DescriptorError> {
    if text.len() <= MAX_NAME_BYTES {
        return Ok(());
    }
    Err(invalid(what, format!("has {} bytes, more than {MAX_NAME_BYTES}", text.len())))
}

/// Formats a time as stock engines write it, in UTC: `2026-11-20 18:03:30.794847`. The calendar is Howard Hinnant's
/// `civil_from_days`.
#[must_use]
pub fn timestamp(since_epoch: std::time::Duration) -> String {
    let seconds = since_epoch.as_secs();
    // Days since 1 March of year 0; an era has 400 years, 146,097 days.
    let days = seconds / 86_400 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let micros = since_epoch.subsec_micros();
    format!("{year:04}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}.{micros:06}")
}

#[cfg(test)]
mod tests;
