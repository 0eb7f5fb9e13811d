//! Central metadata: the stores where Mooncake's engines publish their segments, behind one trait.

use std::fmt;
use std::str::Utf8Error;
use std::time::Duration;

mod etcd;
mod http;
pub mod keys;
mod redis;

use etcd::Etcd;
use http::HttpStore;
use redis::Redis;

use crate::environment::Environment;
use crate::names::{NameError, Peer};

/// Deadline of a whole call of a store, as Mooncake has it for HTTP.
const CALL_TIMEOUT: Duration = Duration::from_secs(3);
const ETCD_PORT: u16 = 2379;
const REDIS_PORT: u16 = 6379;
/// Most endpoints of one etcd cluster.
const MAX_ENDPOINTS: usize = 16;

/// Directory by which engines find each other: the connection string that every Mooncake engine is started with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Metadata {
    /// `P2PHANDSHAKE`: no store; a segment's name is the address on which its daemon listens.
    PeerToPeer,
    /// `http://host:port/path`: a server of keys and values.
    Http(String),
    /// `etcd://a:2379;b:2379`, or the same without a scheme.
    Etcd(Vec<Peer>),
    /// `redis://host:port`.
    Redis(Peer),
}

/// Central key-value store. Calls block their thread for a few seconds at most; any thread may make them.
pub trait MetadataStore: Send + Sync {
    /// Returns the value of a key; `None` if there is none.
    ///
    /// # Errors
    /// If the store cannot be reached in time, or refuses.
    fn get(&self, key: &str) -> Result<Option<String>, StoreError> {
        self.get_within(key, Duration::MAX)
    }

    /// Returns the value of a key within this time, or the deadline of any call if that is shorter.
    ///
    /// # Errors
    /// If the store cannot be reached in time, or refuses.
    fn get_within(&self, key: &str, limit: Duration) -> Result<Option<String>, StoreError>;

    /// Sets the value of a key. Some HTTP servers refuse to replace an `rpc_meta` key.
    ///
    /// # Errors
    /// If the store cannot be reached in time, or refuses.
    fn put(&self, key: &str, value: &str) -> Result<(), StoreError>;

    /// Removes a key. Returns true if it existed, as far as the store reports that.
    ///
    /// # Errors
    /// If the store cannot be reached in time, or refuses.
    fn remove(&self, key: &str) -> Result<bool, StoreError>;
}

/// Error of a call of a store.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreError {
    /// Address of the store, without passwords.
    pub store: String,
    pub key: String,
    pub reason: String,
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { store, key, reason } = self;
        write!(f, "the metadata store {store} failed with key {key:?}: {reason}")
    }
}

impl std::error::Error for StoreError {}

/// Error of an invalid connection string.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectionError {
    /// The scheme is unknown.
    Scheme(String),
    /// A host or port is invalid.
    Name(NameError),
    /// The path or the number of endpoints is invalid.
    Shape(&'static str),
}

impl fmt::Display for ConnectionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Scheme(scheme) => write!(
                f,
                "{scheme:?} is not a supported metadata store: use one of P2PHANDSHAKE, http://, etcd:// and redis://"
            ),
            Self::Name(error) => write!(f, "the metadata store's address: {error}"),
            Self::Shape(reason) => write!(f, "the metadata store's address {reason}"),
        }
    }
}

impl std::error::Error for ConnectionError {}

impl From<NameError> for ConnectionError {
    fn from(error: NameError) -> Self {
        Self::Name(error)
    }
}

impl Metadata {
    /// Parses a connection string.
    ///
    /// # Errors
    /// If it is invalid.
    pub fn parse(text: &str) -> Result<Self, ConnectionError> {
        let text = text.trim();
        if text == "P2PHANDSHAKE" {
            return Ok(Self::PeerToPeer);
        }
        match text.split_once("://") {
            None => endpoints(text).map(Self::Etcd),
            Some(("etcd", rest)) => endpoints(rest).map(Self::Etcd),
            Some(("redis", rest)) if rest.contains('@') => {
                Err(ConnectionError::Shape("must not contain a password: set MC_REDIS_USERNAME and MC_REDIS_PASSWORD"))
            }
            Some(("redis", rest)) => Ok(Self::Redis(Peer::parse(rest.trim_end_matches('/'), REDIS_PORT)?)),
            Some(("http", rest)) => {
                let printable = rest.bytes().all(|byte| byte.is_ascii_graphic());
                if !printable || rest.contains(['?', '#', '@']) {
                    return Err(ConnectionError::Shape("must be http://host:port/path, without a query"));
                }
                let (host, path) = rest.split_once('/').unwrap_or((rest, "metadata"));
                Ok(Self::Http(format!("http://{}/{path}", Peer::parse(host, 80)?)))
            }
            Some((scheme, _)) => Err(ConnectionError::Scheme(scheme.chars().take(32).collect())),
        }
    }

    /// Opens a client of the store; `None` for peer-to-peer handshakes. The client connects with each call.
    #[must_use]
    pub fn open(&self, environment: &Environment) -> Option<Box<dyn MetadataStore>> {
        let max_bytes = environment.max_message_bytes;
        match self {
            Self::PeerToPeer => None,
            Self::Http(base) => Some(Box::new(HttpStore::new(base, CALL_TIMEOUT, max_bytes))),
            Self::Etcd(peers) => Some(Box::new(Etcd::new(peers, CALL_TIMEOUT, max_bytes))),
            Self::Redis(peer) => Some(Box::new(Redis::new(peer.clone(), CALL_TIMEOUT, environment))),
        }
    }
}

fn endpoints(text: &str) -> Result<Vec<Peer>, ConnectionError> {
    let parts: Vec<&str> = text.split([';', ',']).map(str::trim).filter(|part| !part.is_empty()).collect();
    if parts.is_empty() || parts.len() > MAX_ENDPOINTS {
        return Err(ConnectionError::Shape("must name 1 to 16 hosts, such as etcd://host:2379"));
    }
    parts.into_iter().map(|part| Ok(Peer::parse(part.trim_end_matches('/'), ETCD_PORT)?)).collect()
}

impl fmt::Display for Metadata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PeerToPeer => f.write_str("P2PHANDSHAKE"),
            Self::Http(base) => f.write_str(base),
            Self::Redis(peer) => write!(f, "redis://{peer}"),
            Self::Etcd(peers) => {
                f.write_str("etcd://")?;
                for (index, peer) in peers.iter().enumerate() {
                    write!(f, "{}{peer}", if index > 0 { ";" } else { "" })?;
                }
                Ok(())
            }
        }
    }
}

/// Returns the beginning of a server's answer, for an error.
pub(crate) fn excerpt(bytes: &[u8]) -> String {
    String::from_utf8_lossy(&bytes[..bytes.len().min(200)]).trim().to_owned()
}

/// Error of a value that is no text.
#[derive(Debug)]
pub(crate) struct NotText(Utf8Error);

impl fmt::Display for NotText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the value is not UTF-8: {}", self.0)
    }
}

impl std::error::Error for NotText {}

/// Converts a value to text.
pub(crate) fn text(bytes: Vec<u8>) -> Result<String, NotText> {
    String::from_utf8(bytes).map_err(|error| NotText(error.utf8_error()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_strings_are_read_as_mooncake_means_them() {
        let cases = [
            ("P2PHANDSHAKE", "P2PHANDSHAKE"),
            ("http://127.0.0.1:8080/metadata", "http://127.0.0.1:8080/metadata"),
            ("http://meta", "http://meta:80/metadata"),
            ("http://[::1]:8080/a/b", "http://[::1]:8080/a/b"),
            ("etcd://a;b:1", "etcd://a:2379;b:1"),
            ("10.0.0.1:2379", "etcd://10.0.0.1:2379"),
            ("a:1, b:2", "etcd://a:1;b:2"),
            ("redis://cache", "redis://cache:6379"),
        ];
        for (text, expected) in cases {
            let metadata = Metadata::parse(text).expect(text);
            assert_eq!(metadata.to_string(), expected);
            assert_eq!(Metadata::parse(expected), Ok(metadata));
        }
        for bad in ["", ";", "https://a", "ftp://a", "redis://:pw@a", "http://a?key=1", "http://a b/", "etcd://a:x"] {
            assert!(Metadata::parse(bad).is_err(), "{bad}");
        }
        assert!(Metadata::parse(&"a;".repeat(17)).is_err());
    }
}
