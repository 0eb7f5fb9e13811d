//! Keys and values of central metadata: addresses of daemons, and descriptors of segments.
//!
//! | key | value |
//! |---|---|
//! | `mooncake/[cluster/]rpc_meta/<server>` | [`RpcMeta`] |
//! | `mooncake/[cluster/]ram/<segment>` | the segment's descriptor |
//! | `mooncake/[cluster/]<segment>` | the descriptor of a segment whose name contains `/`, such as `nvmeof/x` |

use std::fmt;

use serde::{Deserialize, Serialize};

/// Returns the key of a server's [`RpcMeta`]. `cluster` is empty for none.
#[must_use]
pub fn rpc_meta(cluster: &str, server: &str) -> String {
    format!("{}rpc_meta/{server}", prefix(cluster))
}

/// Returns the key of a segment's descriptor. `cluster` is empty for none.
#[must_use]
pub fn segment(cluster: &str, segment: &str) -> String {
    let ram = if segment.contains('/') { "" } else { "ram/" };
    format!("{}{ram}{segment}", prefix(cluster))
}

fn prefix(cluster: &str) -> String {
    match cluster.trim_end_matches('/') {
        "" => "mooncake/".to_owned(),
        cluster => format!("mooncake/{cluster}/"),
    }
}

/// Address on which a server's handshake daemon listens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RpcMeta {
    /// IP address or host name, without brackets.
    #[serde(rename = "ip_or_host_name")]
    pub host: String,
    /// Port of the daemon.
    #[serde(rename = "rpc_port")]
    pub port: u16,
}

/// Error of a value that is not the address of a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MalformedRpcMeta(String);

impl fmt::Display for MalformedRpcMeta {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the metadata of a server cannot be read: {}", self.0)
    }
}

impl std::error::Error for MalformedRpcMeta {}

impl RpcMeta {
    /// Decodes JSON.
    ///
    /// # Errors
    /// If it is not an object with host and port.
    pub fn decode(bytes: &[u8]) -> Result<Self, MalformedRpcMeta> {
        serde_json::from_slice(bytes).map_err(|error| MalformedRpcMeta(error.to_string()))
    }

    /// Encodes JSON.
    #[must_use]
    pub fn encode(&self) -> String {
        serde_json::json!({ "ip_or_host_name": self.host, "rpc_port": self.port }).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_as_stock_engines_have_them() {
        assert_eq!(rpc_meta("", "node-1:12345"), "mooncake/rpc_meta/node-1:12345");
        assert_eq!(rpc_meta("blue", "a"), "mooncake/blue/rpc_meta/a");
        assert_eq!(segment("", "a"), "mooncake/ram/a");
        assert_eq!(segment("blue/", "a"), "mooncake/blue/ram/a");
        assert_eq!(segment("", "nvmeof/x"), "mooncake/nvmeof/x");
    }

    #[test]
    fn values_are_as_stock_engines_have_them() {
        let meta = RpcMeta { host: "192.0.2.2".to_owned(), port: 15_394 };
        assert_eq!(meta.encode(), r#"{"ip_or_host_name":"192.0.2.2","rpc_port":15394}"#);
        assert_eq!(RpcMeta::decode(meta.encode().as_bytes()), Ok(meta));
        assert!(RpcMeta::decode(br#"{"ip_or_host_name":"a","rpc_port":65536}"#).is_err());
        assert!(RpcMeta::decode(b"\xff").is_err());
    }
}
