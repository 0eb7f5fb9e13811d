//! RDMA part of a descriptor: devices, the keys of buffers on each, and the matrix of locations and devices.
//!
//! Stock engines find the key of a buffer by the number of a device, and number devices in the order of their first
//! occurrence in the matrix, its rows sorted. So the lists of devices and of keys are written in that order.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::error::invalid;
use super::{Descriptor, DescriptorError, Protocol};
use crate::rdma_handshake::{GidBytes, gid_from_text, gid_to_text};

/// Name of the transport over RDMA.
pub const RDMA: &str = "rdma";
/// Most devices of a segment.
const MAX_DEVICES: usize = 256;

/// Device of a segment.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaDevice {
    pub name: String,
    /// LID of its port in an InfiniBand subnet; 0 for Ethernet.
    pub lid: u16,
    /// GID of its port.
    pub gid: GidBytes,
}

/// Keys of a buffer on one device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RdmaKey {
    /// Key for the engine's own requests; peers do not need it, but stock engines require it.
    pub local: u32,
    /// Key for the requests of peers.
    pub remote: u32,
}

/// Devices of a segment and the keys of its buffers.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RdmaSegment {
    pub devices: Vec<RdmaDevice>,
    /// Key of each buffer, in the descriptor's order, on each device; or none at all.
    pub keys: Vec<Vec<RdmaKey>>,
}

/// Matrix of locations and devices: for each location the preferred devices, then the others.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Matrix {
    rows: BTreeMap<String, [Vec<String>; 2]>,
}

/// Error of a text that is not a matrix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MalformedMatrix(String);

impl fmt::Display for MalformedMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the matrix of devices is not {{\"location\": [[preferred], [others]], ...}}: {}", self.0)
    }
}

impl std::error::Error for MalformedMatrix {}

impl Matrix {
    /// Decodes JSON: `{"cpu:0": [["mlx5_0"], ["mlx5_1"]]}`.
    ///
    /// # Errors
    /// If it has another shape, or names no device.
    pub fn decode(text: &str) -> Result<Self, MalformedMatrix> {
        let matrix: Self = serde_json::from_str(text).map_err(|error| MalformedMatrix(error.to_string()))?;
        match matrix.devices().len() {
            0 => Err(MalformedMatrix("it names no device".to_owned())),
            1..=MAX_DEVICES => Ok(matrix),
            devices => Err(MalformedMatrix(format!("it names {devices} devices, more than {MAX_DEVICES}"))),
        }
    }

    /// Creates a matrix with the same devices for all of these locations.
    #[must_use]
    pub fn uniform<'a>(locations: impl IntoIterator<Item = &'a str>, devices: &[String]) -> Self {
        let row = |location: &str| (location.to_owned(), [devices.to_vec(), Vec::new()]);
        Self { rows: locations.into_iter().map(row).collect() }
    }

    /// Returns the devices, in the order in which stock engines number them.
    #[must_use]
    pub fn devices(&self) -> Vec<String> {
        let mut devices: Vec<String> = Vec::new();
        for name in self.rows.values().flatten().flatten() {
            if !devices.contains(name) {
                devices.push(name.clone());
            }
        }
        devices
    }
}

#[derive(Serialize, Deserialize)]
struct Device {
    gid: String,
    #[serde(default)]
    lid: u16,
    name: String,
}

impl Descriptor {
    /// Returns the RDMA part of the descriptor.
    ///
    /// # Errors
    /// If it is invalid: a device without an address, or keys that are not one for each device.
    pub fn rdma(&self) -> Result<RdmaSegment, DescriptorError> {
        let listed = self.other.get("devices").cloned().unwrap_or(Value::Array(Vec::new()));
        let listed: Vec<Device> =
            serde_json::from_value(listed).map_err(|error| invalid("devices", error.to_string()))?;
        if listed.len() > MAX_DEVICES {
            return Err(invalid("devices", format!("has {} entries, more than {MAX_DEVICES}", listed.len())));
        }
        let mut devices = Vec::with_capacity(listed.len());
        for (index, Device { gid: text, lid, name }) in listed.into_iter().enumerate() {
            let gid =
                gid_from_text(&text).ok_or_else(|| invalid(format!("devices[{index}].gid"), format!("is {text:?}")))?;
            devices.push(RdmaDevice { name, lid, gid });
        }
        let mut keys = Vec::with_capacity(self.buffers.len());
        for (index, buffer) in self.buffers.iter().enumerate() {
            let (remote, local) = (numbers(&buffer.other, "rkey"), numbers(&buffer.other, "lkey"));
            let fits = |count: usize| count == 0 || count == devices.len();
            if !fits(remote.len()) || remote.len() != local.len() {
                let reason =
                    format!("and lkey have {} and {} entries for {} devices", remote.len(), local.len(), devices.len());
                return Err(invalid(format!("buffers[{index}].rkey"), reason));
            }
            keys.push(remote.into_iter().zip(local).map(|(remote, local)| RdmaKey { local, remote }).collect());
        }
        Ok(RdmaSegment { devices, keys })
    }

    /// Makes this a descriptor of a segment over RDMA, as stock engines write it. Its devices are those of the matrix,
    /// in the order of [`Matrix::devices`].
    pub fn set_rdma(&mut self, segment: &RdmaSegment, matrix: &Matrix) {
        self.protocol = Protocol::One(RDMA.to_owned());
        let device = |device: &RdmaDevice| {
            let RdmaDevice { name, lid, gid } = device;
            serde_json::json!({ "gid": gid_to_text(gid), "lid": lid, "name": name })
        };
        self.other.insert("devices".to_owned(), segment.devices.iter().map(device).collect());
        self.other.insert("priority_matrix".to_owned(), serde_json::json!(matrix));
        for (buffer, keys) in self.buffers.iter_mut().zip(&segment.keys) {
            buffer.other.insert("rkey".to_owned(), keys.iter().map(|key| key.remote).collect());
            buffer.other.insert("lkey".to_owned(), keys.iter().map(|key| key.local).collect());
        }
    }
}

/// Returns the numbers of a list; other values are skipped, so that the count shows them.
fn numbers(map: &Map<String, Value>, key: &str) -> Vec<u32> {
    let list = map.get(key).and_then(Value::as_array);
    list.into_iter().flatten().filter_map(|value| u32::try_from(value.as_u64()?).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Buffer;

    fn segment() -> RdmaSegment {
        let device = |name: &str, last| {
            let mut gid = GidBytes::default();
            gid[15] = last;
            RdmaDevice { name: name.to_owned(), lid: 7, gid }
        };
        let key = |local, remote| RdmaKey { local, remote };
        RdmaSegment {
            devices: vec![device("m0", 1), device("m1", 2)],
            keys: vec![vec![key(1, 2), key(3, u32::MAX)], Vec::new()],
        }
    }

    fn descriptor() -> Descriptor {
        let mut descriptor = Descriptor::tcp("127.0.0.1:5", "127.0.0.1", 6);
        descriptor.buffers = vec![Buffer::new("cpu:0", 4096, 100), Buffer::new("cpu:1", 8192, 100)];
        descriptor
    }

    #[test]
    fn the_rdma_part_survives_encoding() {
        let mut descriptor = descriptor();
        let names = ["m0".to_owned(), "m1".to_owned()];
        descriptor.set_rdma(&segment(), &Matrix::uniform(["cpu:0", "cpu:1"], &names));
        let text = descriptor.encode(1 << 20).expect("a good one");
        for part in [
            r#""protocol":"rdma""#,
            r#"{"gid":"00:00:00:00:00:00:00:00:00:00:00:00:00:00:00:01","lid":7,"name":"m0"}"#,
            r#""rkey":[2,4294967295]"#,
            r#""lkey":[1,3]"#,
            r#""priority_matrix":{"cpu:0":[["m0","m1"],[]],"cpu:1":[["m0","m1"],[]]}"#,
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
        let read = Descriptor::decode(text.as_bytes(), 1 << 20).expect("a descriptor");
        assert_eq!(read.rdma(), Ok(segment()));
        assert!(read.protocol.includes(RDMA) && read.tcp_data_port == 6, "engines of ours may still take the port");
    }

    #[test]
    fn keys_that_do_not_fit_the_devices_are_refused() {
        let mut descriptor = descriptor();
        descriptor.set_rdma(&segment(), &Matrix::default());
        descriptor.buffers[0].other.insert("rkey".to_owned(), serde_json::json!([1]));
        assert!(descriptor.rdma().is_err_and(|error| error.to_string().contains("buffers[0].rkey")));
        descriptor.other.insert("devices".to_owned(), serde_json::json!([{ "name": "m0", "gid": "x" }]));
        assert!(descriptor.rdma().is_err_and(|error| error.to_string().contains("devices[0].gid")));
        let plain = RdmaSegment { devices: Vec::new(), keys: vec![Vec::new(); 2] };
        assert_eq!(self::descriptor().rdma(), Ok(plain));
    }

    #[test]
    fn matrices_name_devices_in_the_order_of_their_rows() {
        let text = r#"{"cpu:1":[["b"],["a","c"]],"cpu:0":[["c"],[]]}"#;
        assert_eq!(Matrix::decode(text).expect("a matrix").devices(), ["c", "b", "a"]);
        for bad in ["", "[]", r#"{"cpu:0":[["a"]]}"#, r#"{"cpu:0":[["a"],[],[]]}"#, r#"{"cpu:0":[[],[]]}"#, "{}"] {
            let error = Matrix::decode(bad).expect_err(bad).to_string();
            assert!(error.contains("preferred"), "{error}");
        }
    }
}
