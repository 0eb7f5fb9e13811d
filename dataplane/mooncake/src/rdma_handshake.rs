//! Handshake of an RDMA connection between two engines: the JSON of connection requests and of their replies.
//!
//! The requester sends its half: the paths of both devices (`segment@device`), the numbers of its queue pairs, and the
//! address of its port. The reply has the same shape, seen from the other side; a reply with a reason is a refusal. A
//! side that sends `ready_ack` supports the third message, by which the requester confirms that its own queue pairs are
//! connected: the request again, with `ready_ack` true.

use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::descriptor::MAX_NAME_BYTES;

/// Longest request or reply that is read.
pub(crate) const MAX_BYTES: usize = 64 << 10;
/// Most queue pairs of a connection.
const MAX_QUEUE_PAIRS: usize = 256;

/// Address of a port: 16 bytes, like an IPv6 address.
pub type GidBytes = [u8; 16];

/// One side's half of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdmaHandshake {
    /// Device of the sender: `segment@device`.
    pub local_path: String,
    /// LID of the sender's port in an InfiniBand subnet; 0 for Ethernet.
    pub local_lid: u16,
    /// GID of the sender's port; `None` if the other side is to take it from the descriptor.
    pub local_gid: Option<GidBytes>,
    /// Device of the other side.
    pub peer_path: String,
    /// Numbers of the sender's queue pairs.
    pub queue_pairs: Vec<u32>,
    /// True if the sender's queue pairs are connected; `None` if it does not support the third message.
    pub ready: Option<bool>,
    /// Reason of a refusal; empty if there is a connection.
    pub refusal: String,
}

/// Error of bytes that are not a half of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MalformedHandshake(String);

impl fmt::Display for MalformedHandshake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the RDMA handshake cannot be read: {}", self.0)
    }
}

impl std::error::Error for MalformedHandshake {}

#[derive(Serialize, Deserialize, Default)]
#[serde(default)]
struct Wire {
    local_gid: String,
    local_lid: u16,
    local_nic_path: String,
    payload: String,
    peer_nic_path: String,
    qp_num: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ready_ack: Option<bool>,
    reply_msg: String,
}

impl RdmaHandshake {
    /// Creates a refusal.
    #[must_use]
    pub fn refused(reason: &str) -> Self {
        Self {
            local_path: String::new(),
            local_lid: 0,
            local_gid: None,
            peer_path: String::new(),
            queue_pairs: Vec::new(),
            ready: Some(false),
            refusal: reason.to_owned(),
        }
    }

    /// Decodes JSON.
    ///
    /// # Errors
    /// If it is not of the expected shape, or too long.
    pub fn decode(bytes: &[u8]) -> Result<Self, MalformedHandshake> {
        let malformed = |why: String| MalformedHandshake(why);
        if bytes.len() > MAX_BYTES {
            return Err(malformed(format!("it has {} bytes, more than {MAX_BYTES}", bytes.len())));
        }
        // Checked first to be an object: a list would be accepted for a struct, too.
        let object = serde_json::from_slice::<Map<String, Value>>(bytes);
        let wire = object.and_then(|object| serde_json::from_value::<Wire>(Value::Object(object)));
        let wire = wire.map_err(|error| malformed(error.to_string()))?;
        if wire.local_nic_path.len().max(wire.peer_nic_path.len()) > MAX_NAME_BYTES {
            return Err(malformed(format!("a path has more than {MAX_NAME_BYTES} bytes")));
        }
        if wire.qp_num.len() > MAX_QUEUE_PAIRS {
            return Err(malformed(format!("it has {} queue pairs, more than {MAX_QUEUE_PAIRS}", wire.qp_num.len())));
        }
        let local_gid = match wire.local_gid.as_str() {
            "" => None,
            text => Some(gid_from_text(text).ok_or_else(|| malformed(format!("local_gid is {text:?}")))?),
        };
        Ok(Self {
            local_path: wire.local_nic_path,
            local_lid: wire.local_lid,
            local_gid,
            peer_path: wire.peer_nic_path,
            queue_pairs: wire.qp_num,
            ready: wire.ready_ack,
            refusal: wire.reply_msg,
        })
    }

    /// Encodes JSON.
    #[must_use]
    pub fn encode(&self) -> String {
        let wire = Wire {
            local_gid: self.local_gid.as_ref().map(gid_to_text).unwrap_or_default(),
            local_lid: self.local_lid,
            local_nic_path: self.local_path.clone(),
            payload: String::new(),
            peer_nic_path: self.peer_path.clone(),
            qp_num: self.queue_pairs.clone(),
            ready_ack: self.ready,
            reply_msg: self.refusal.clone(),
        };
        serde_json::to_string(&wire).unwrap_or_default()
    }
}

/// Returns the path of an engine's device.
#[must_use]
pub fn nic_path(segment: &str, device: &str) -> String {
    format!("{segment}@{device}")
}

/// Returns the segment and the device of a path.
#[must_use]
pub fn split_nic_path(path: &str) -> Option<(&str, &str)> {
    path.split_once('@').filter(|(segment, device)| !segment.is_empty() && !device.is_empty())
}

/// Formats a port's address as stock engines write it: sixteen bytes in hexadecimal, with colons between.
#[must_use]
pub fn gid_to_text(gid: &GidBytes) -> String {
    gid.map(|byte| format!("{byte:02x}")).join(":")
}

/// Parses a port's address: the inverse of [`gid_to_text`].
#[must_use]
pub fn gid_from_text(text: &str) -> Option<GidBytes> {
    let mut parts = text.split(':');
    let mut gid = GidBytes::default();
    for byte in &mut gid {
        *byte = u8::from_str_radix(parts.next()?, 16).ok()?;
    }
    parts.next().is_none().then_some(gid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn halves_are_as_stock_engines_have_them() {
        let text = r#"{"local_gid":"00:00:00:00:00:00:00:00:00:00:ff:ff:0a:00:00:01","local_lid":0,
            "local_nic_path":"a:1@mlx5_0","payload":"","peer_nic_path":"b:2@mlx5_1","qp_num":[123,124],
            "ready_ack":false,"reply_msg":""}"#;
        let half = RdmaHandshake::decode(text.as_bytes()).expect("a half");
        assert_eq!(
            (half.queue_pairs.as_slice(), half.ready, half.local_gid.map(|gid| gid[12])),
            ([123, 124].as_slice(), Some(false), Some(10))
        );
        let compact: String = text.split_whitespace().collect();
        assert_eq!(half.encode(), compact);
        let old =
            RdmaHandshake::decode(br#"{"local_nic_path":"a@b","peer_nic_path":"c@d","qp_num":[1]}"#).expect("old");
        assert_eq!((old.ready, old.local_gid), (None, None));
        assert!(!old.encode().contains("ready_ack"));
        for bad in ["", "[]", r#"{"qp_num":[-1]}"#, r#"{"local_gid":"1:2"}"#, r#"{"qp_num":"x"}"#] {
            assert!(RdmaHandshake::decode(bad.as_bytes()).is_err(), "{bad}");
        }
        let many = format!("{{\"qp_num\":{:?}}}", vec![1; 257]);
        assert!(RdmaHandshake::decode(many.as_bytes()).is_err_and(|error| error.to_string().contains("257")));
    }

    #[test]
    fn paths_have_two_parts() {
        assert_eq!(split_nic_path(&nic_path("127.0.0.1:5", "rxe0")), Some(("127.0.0.1:5", "rxe0")));
        assert_eq!((split_nic_path("rxe0"), split_nic_path("a@"), split_nic_path("@b")), (None, None, None));
    }

    proptest! {
        #[test]
        fn any_half_travels(
            paths in ("\\PC{0,40}", "\\PC{0,40}"),
            gid: Option<GidBytes>,
            lid: u16,
            queue_pairs in proptest::collection::vec(any::<u32>(), 0..20),
            ready: Option<bool>,
            refusal in "\\PC*",
        ) {
            let half = RdmaHandshake {
                local_path: paths.0,
                local_lid: lid,
                local_gid: gid,
                peer_path: paths.1,
                queue_pairs,
                ready,
                refusal,
            };
            prop_assert_eq!(RdmaHandshake::decode(half.encode().as_bytes()), Ok(half));
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = RdmaHandshake::decode(&bytes);
        }
    }
}
