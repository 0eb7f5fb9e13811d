//! Metadata in etcd, through the JSON gateway that every etcd of version 3 serves beside gRPC.

use std::time::{Duration, Instant};

use kvplane_etcd::{Gateway, GatewayError, Http, Range};

use super::{MetadataStore, NotText, StoreError, text};
use crate::names::Peer;

/// Client of an etcd cluster. Endpoints are tried in order and share the deadline.
#[derive(Debug)]
pub(crate) struct Etcd {
    gateway: Gateway,
    timeout: Duration,
}

impl Etcd {
    pub(crate) fn new(endpoints: &[Peer], timeout: Duration, max_bytes: usize) -> Self {
        // Room for base64 and the enclosing JSON.
        let answer_bytes = max_bytes.saturating_mul(4) / 3 + 4096;
        let urls = endpoints.iter().map(|peer| format!("http://{peer}")).collect();
        Self { gateway: Gateway::new(urls, Http::new(answer_bytes)), timeout }
    }

    fn by(&self, limit: Duration) -> Instant {
        Instant::now() + limit.min(self.timeout)
    }
}

fn failed(key: &str, error: GatewayError) -> StoreError {
    let store = error.endpoint.replacen("http", "etcd", 1);
    StoreError { store, key: key.to_owned(), reason: error.reason }
}

impl MetadataStore for Etcd {
    fn get_within(&self, key: &str, limit: Duration) -> Result<Option<String>, StoreError> {
        let range = Range { from: key.as_bytes(), to: &[], limit: 1, revision: 0 };
        let found = self.gateway.range(&range, self.by(limit)).map_err(|error| failed(key, error))?;
        let Some(entry) = found.entries.into_iter().next() else { return Ok(None) };
        let store = "etcd://".to_owned();
        let failed = |error: NotText| StoreError { store, key: key.to_owned(), reason: error.to_string() };
        text(entry.value).map(Some).map_err(failed)
    }

    fn put(&self, key: &str, value: &str) -> Result<(), StoreError> {
        let by = self.by(Duration::MAX);
        self.gateway.put(key.as_bytes(), value.as_bytes(), by).map_err(|error| failed(key, error))
    }

    fn remove(&self, key: &str) -> Result<bool, StoreError> {
        self.gateway.remove(key.as_bytes(), self.by(Duration::MAX)).map_err(|error| failed(key, error))
    }
}
