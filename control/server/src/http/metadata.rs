//! Mooncake's metadata server: keys and values in memory, by which engines find each other.
//!
//! | request | answer |
//! |---|---|
//! | `GET /metadata?key=` | 200 and the value, or 404 |
//! | `PUT /metadata?key=` | 200; 400 for another value of a living engine's `rpc_meta` key; 413 or 507 at a limit |
//! | `DELETE /metadata?key=` | 200, or 404 |
//!
//! An empty key is answered with 400. Nothing is durable, as with Mooncake's own server: engines publish at their
//! start. Every host that reaches the port may read and write every key, as the protocol has no authentication.
//!
//! An `rpc_meta` key holds the address of an engine's daemon. A second engine of that name is rejected while the first
//! one's port accepts connections, or may do so; a closed port means that the engine was killed and left its key
//! behind. The port is probed only if the key names the address from which it was put: otherwise a client could learn
//! which ports of other hosts are open, from inside the network.

use std::collections::HashMap;
use std::io;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, StatusCode};
use percent_encoding::percent_decode_str;
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;

/// Deadline of the probe whether an engine is gone.
const INCARNATION_DEADLINE: Duration = Duration::from_secs(1);

/// Limits of the metadata server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetadataLimits {
    /// Most keys.
    pub keys: usize,
    /// Most bytes of a key.
    pub key_bytes: usize,
    /// Most bytes of a value.
    pub value_bytes: usize,
    /// Most bytes of all keys and values.
    pub bytes: usize,
}

impl Default for MetadataLimits {
    fn default() -> Self {
        Self { keys: 65_536, key_bytes: 4096, value_bytes: 1 << 20, bytes: 256 << 20 }
    }
}

/// Table of keys and values, for any thread.
pub(crate) struct Metadata {
    limits: MetadataLimits,
    kept: Mutex<MetadataTable>,
}

#[derive(Default)]
struct MetadataTable {
    values: HashMap<String, Value>,
    bytes: usize,
}

/// A value, with the address that put it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Value {
    bytes: Bytes,
    from: IpAddr,
}

/// Result of a put.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Put {
    Updated,
    Unchanged,
    /// Rejected because of this value.
    Duplicate(Value),
    Full,
}

pub(crate) type Answer = (StatusCode, Bytes);

fn say(status: StatusCode, text: &'static str) -> Answer {
    (status, Bytes::from_static(text.as_bytes()))
}

impl Metadata {
    pub(crate) fn new(limits: MetadataLimits) -> Self {
        Self { limits, kept: Mutex::default() }
    }

    /// Answers a request from this address; reads at most one value.
    pub(crate) async fn answer(&self, request: Request<Incoming>, from: IpAddr) -> Answer {
        let Some(key) = request.uri().query().and_then(key) else {
            return say(StatusCode::BAD_REQUEST, "the query must have a key\n");
        };
        if key.len() > self.limits.key_bytes {
            return say(StatusCode::BAD_REQUEST, "the key is too long\n");
        }
        match *request.method() {
            Method::GET => match self.get(&key) {
                Some(value) => (StatusCode::OK, value),
                None => say(StatusCode::NOT_FOUND, "metadata not found"),
            },
            Method::PUT => match Limited::new(request.into_body(), self.limits.value_bytes).collect().await {
                Ok(body) => {
                    let value = Value { bytes: body.to_bytes(), from: from.to_canonical() };
                    self.answer_put(key, value).await
                }
                Err(error) if error.is::<LengthLimitError>() => {
                    say(StatusCode::PAYLOAD_TOO_LARGE, "the value is too long\n")
                }
                Err(_) => say(StatusCode::BAD_REQUEST, "the value did not arrive whole\n"),
            },
            Method::DELETE if self.remove(&key) => say(StatusCode::OK, "metadata deleted"),
            Method::DELETE => say(StatusCode::NOT_FOUND, "metadata not found"),
            _ => say(StatusCode::METHOD_NOT_ALLOWED, "only GET, PUT and DELETE are served here\n"),
        }
    }

    async fn answer_put(&self, key: String, value: Value) -> Answer {
        let mut put = self.put(&key, &value, None);
        if let Put::Duplicate(old) = &put
            && is_gone(old).await
        {
            let old = old.clone();
            put = self.put(&key, &value, Some(&old));
        }
        match put {
            Put::Updated => say(StatusCode::OK, "metadata updated"),
            Put::Unchanged => say(StatusCode::OK, "metadata unchanged"),
            Put::Duplicate(_) => say(StatusCode::BAD_REQUEST, "Duplicate rpc_meta key not allowed"),
            Put::Full => say(StatusCode::INSUFFICIENT_STORAGE, "there is no room for more keys or values\n"),
        }
    }

    fn with<T>(&self, change: impl FnOnce(&mut MetadataTable) -> T) -> T {
        // The table is consistent at every point, so a panic elsewhere does not spoil it.
        change(&mut self.kept.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn get(&self, key: &str) -> Option<Bytes> {
        self.with(|kept| kept.values.get(key).map(|value| value.bytes.clone()))
    }

    /// Sets a value. `gone` is the value of an engine that is known to be gone.
    fn put(&self, key: &str, value: &Value, gone: Option<&Value>) -> Put {
        self.with(|kept| {
            let old = kept.values.get(key);
            if old.is_some_and(|old| old.bytes == value.bytes) {
                return Put::Unchanged;
            }
            // Two engines with one name would receive each other's transfers.
            if let Some(old) = old
                && key.contains("rpc_meta")
                && Some(old) != gone
            {
                return Put::Duplicate(old.clone());
            }
            let freed = old.map_or(0, |old| key.len() + old.bytes.len());
            let bytes = kept.bytes - freed + key.len() + value.bytes.len();
            if bytes > self.limits.bytes || (old.is_none() && kept.values.len() >= self.limits.keys) {
                return Put::Full;
            }
            kept.bytes = bytes;
            kept.values.insert(key.to_owned(), value.clone());
            Put::Updated
        })
    }

    fn remove(&self, key: &str) -> bool {
        self.with(|kept| {
            let Some(old) = kept.values.remove(key) else { return false };
            kept.bytes -= key.len() + old.bytes.len();
            true
        })
    }
}

/// Returns true if no process listens any more at the address in `meta`, if that is the one that put it. Only a refused
/// connection proves it: an unreadable address, one elsewhere, or one that does not answer in time may be alive.
async fn is_gone(meta: &Value) -> bool {
    let Some((host, port)) = place_of(&meta.bytes) else { return false };
    let looked = timeout(INCARNATION_DEADLINE, async {
        let named: Vec<IpAddr> = match host.parse::<IpAddr>() {
            Ok(address) => vec![address],
            Err(_) => lookup_host((host.as_str(), port)).await?.map(|address| address.ip()).collect(),
        };
        if !named.iter().any(|address| address.to_canonical() == meta.from) {
            return Ok(());
        }
        TcpStream::connect((meta.from, port)).await.map(|_| ())
    });
    match looked.await {
        Ok(Err(error)) => error.kind() == io::ErrorKind::ConnectionRefused,
        _ => false,
    }
}

/// Returns host and port of an engine's daemon.
fn place_of(meta: &[u8]) -> Option<(String, u16)> {
    let meta = serde_json::from_slice::<serde_json::Value>(meta).ok()?;
    let host = meta.get("ip_or_host_name").and_then(serde_json::Value::as_str)?;
    let port = meta.get("rpc_port").and_then(serde_json::Value::as_u64)?;
    Some((host.to_owned(), u16::try_from(port).ok()?))
}

/// Returns the key in a query; none if it is missing or blank.
fn key(query: &str) -> Option<String> {
    let value = query.split('&').find_map(|pair| pair.strip_prefix("key="))?;
    let spaced = value.replace('+', " ");
    let key = percent_decode_str(&spaced).decode_utf8().ok()?;
    let key = key.trim();
    (!key.is_empty()).then(|| key.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> Value {
        Value { bytes: Bytes::copy_from_slice(text.as_bytes()), from: IpAddr::from([127, 0, 0, 1]) }
    }

    /// A closed port is detected, but not for a client that named another address than its own.
    #[test]
    fn only_the_address_that_put_a_key_is_probed() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let daemon = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = daemon.local_addr().expect("bound").port();
        let gone = |host: &str, from: [u8; 4]| {
            let meta = serde_json::json!({ "ip_or_host_name": host, "rpc_port": port }).to_string();
            let meta = Value { from: IpAddr::from(from), ..value(&meta) };
            runtime.block_on(is_gone(&meta))
        };
        assert!(!gone("127.0.0.1", [127, 0, 0, 1]), "somebody listens");
        daemon.set_nonblocking(true).expect("it can be asked");
        daemon.accept().expect("it was looked at");
        let elsewhere = [10, 0, 0, 9];
        for (host, from) in [("127.0.0.1", elsewhere), ("localhost", elsewhere), ("127.0.0.1", [127, 0, 0, 2])] {
            assert!(!gone(host, from), "{host}");
        }
        let untouched = daemon.accept().map(|_| ()).map_err(|error| error.kind());
        assert_eq!(untouched, Err(io::ErrorKind::WouldBlock), "nobody connected");
        drop(daemon);
        assert!(!gone("127.0.0.1", [10, 0, 0, 9]) && !gone("nowhere.invalid", [127, 0, 0, 1]));
        assert!(gone("127.0.0.1", [127, 0, 0, 1]) && gone("::ffff:127.0.0.1", [127, 0, 0, 1]));
        assert!(gone("localhost", [127, 0, 0, 1]), "names are looked up");
        assert!(!runtime.block_on(is_gone(&value("{}"))));
    }

    #[test]
    fn keys_are_decoded_and_blank_ones_refused() {
        assert_eq!(key("key=mooncake%2Fram%2Fa%3A1").as_deref(), Some("mooncake/ram/a:1"));
        assert_eq!(key("a=b&key=%20a+b%2B%C3%A9%20").as_deref(), Some("a b+é"));
        for blank in ["", "key", "key=", "key=%20+", "keys=a", "key=%ff"] {
            assert_eq!(key(blank), None, "{blank}");
        }
    }

    #[test]
    fn numbers_and_bytes_are_limited() {
        let limits = MetadataLimits { keys: 2, key_bytes: 10, value_bytes: 10, bytes: 12 };
        let metadata = Metadata::new(limits);
        let put = |key: &str, text: &str| metadata.put(key, &value(text), None);
        assert_eq!(put("a", "12345"), Put::Updated);
        assert_eq!(put("b", "123456"), Put::Full);
        assert_eq!(put("b", "12345"), Put::Updated);
        assert_eq!(put("c", ""), Put::Full);
        assert_eq!(put("a", "123456"), Put::Full);
        assert_eq!(metadata.get("a").as_deref(), Some(&b"12345"[..]), "the old value stays");
        assert_eq!(put("a", "1"), Put::Updated);
        assert!(metadata.remove("a") && !metadata.remove("a"));
        assert_eq!(put("c", "12345"), Put::Updated);
        assert!(metadata.remove("b") && metadata.remove("c"));
        assert_eq!(metadata.with(|kept| (kept.bytes, kept.values.len())), (0, 0));
    }

    #[test]
    fn an_engine_is_not_replaced_by_another_of_its_name() {
        let metadata = Metadata::new(MetadataLimits::default());
        let put = |key: &str, text: &str| metadata.put(key, &value(text), None);
        assert_eq!(put("mooncake/rpc_meta/a", "1"), Put::Updated);
        assert_eq!(put("mooncake/rpc_meta/a", "1"), Put::Unchanged);
        let old = value("1");
        assert_eq!(put("mooncake/rpc_meta/a", "2"), Put::Duplicate(old.clone()));
        let (new, other) = (value("2"), value("3"));
        assert_eq!(metadata.put("mooncake/rpc_meta/a", &new, Some(&other)), Put::Duplicate(old.clone()));
        assert_eq!(metadata.put("mooncake/rpc_meta/a", &new, Some(&old)), Put::Updated);
        assert!(metadata.remove("mooncake/rpc_meta/a"));
        assert_eq!(put("mooncake/rpc_meta/a", "2"), Put::Updated);
        assert_eq!(put("mooncake/ram/a", "1"), Put::Updated);
        assert_eq!(put("mooncake/ram/a", "2"), Put::Updated);
    }
}
