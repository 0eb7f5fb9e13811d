//! Metadata in etcd, through the JSON gateway that every etcd of version 3 serves beside gRPC.

use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::http::{Http, Method};
use crate::metadata::{MetadataStore, StoreError, excerpt, text};
use crate::names::Peer;

/// A client of an etcd cluster. Endpoints are tried in order and share the time.
#[derive(Debug)]
pub(crate) struct Etcd {
    http: Http,
    endpoints: Vec<Peer>,
    timeout: Duration,
}

/// What answers hold of what is needed. Numbers of 64 bits are strings, and what is empty or zero is left out.
#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    kvs: Vec<Entry>,
    #[serde(default)]
    deleted: String,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(default)]
    value: String,
}

impl Etcd {
    pub(crate) fn new(endpoints: Vec<Peer>, timeout: Duration, max_bytes: usize) -> Self {
        // Base64 and the frame around it.
        let answer_bytes = max_bytes.saturating_mul(4) / 3 + 4096;
        Self { http: Http::new(answer_bytes), endpoints, timeout }
    }

    fn call(&self, method: &str, key: &str, request: &Value) -> Result<Answer, StoreError> {
        self.call_within(method, key, request, self.timeout)
    }

    fn call_within(&self, method: &str, key: &str, request: &Value, limit: Duration) -> Result<Answer, StoreError> {
        let failed = |peer: &Peer, reason| {
            let store = format!("etcd://{peer}");
            StoreError { store, key: key.to_owned(), reason }
        };
        let deadline = Instant::now() + limit.min(self.timeout);
        let body = request.to_string();
        let mut last = None;
        for (index, peer) in self.endpoints.iter().enumerate() {
            let now = Instant::now();
            let left = u32::try_from(self.endpoints.len() - index).unwrap_or(u32::MAX);
            let share = deadline.saturating_duration_since(now) / left;
            let url = format!("http://{peer}/v3/kv/{method}");
            match self.http.exchange(Method::Post, &url, body.as_bytes(), now + share) {
                Ok((200, answer)) => {
                    return serde_json::from_slice(&answer)
                        .map_err(|error| failed(peer, format!("its answer cannot be read: {error}")));
                }
                // Without a leader, or going down: another one may do.
                Ok((status, answer)) => {
                    let error = failed(peer, format!("it answers {status}: {}", excerpt(&answer)));
                    if status != 503 {
                        return Err(error);
                    }
                    last = Some(error);
                }
                Err(reason) => last = Some(failed(peer, reason)),
            }
        }
        Err(last.unwrap_or_else(|| StoreError {
            store: "etcd://".to_owned(),
            key: key.to_owned(),
            reason: "it has no endpoints".to_owned(),
        }))
    }

    fn store(&self) -> String {
        self.endpoints.first().map_or_else(String::new, |peer| format!("etcd://{peer}"))
    }
}

impl MetadataStore for Etcd {
    fn get_within(&self, key: &str, limit: Duration) -> Result<Option<String>, StoreError> {
        let answer = self.call_within("range", key, &json!({ "key": STANDARD.encode(key) }), limit)?;
        let Some(entry) = answer.kvs.first() else { return Ok(None) };
        let value = STANDARD.decode(&entry.value).map_err(|error| format!("the value is not base64: {error}"));
        let failed = |reason| StoreError { store: self.store(), key: key.to_owned(), reason };
        value.and_then(text).map(Some).map_err(failed)
    }

    fn put(&self, key: &str, value: &str) -> Result<(), StoreError> {
        let request = json!({ "key": STANDARD.encode(key), "value": STANDARD.encode(value) });
        self.call("put", key, &request).map(drop)
    }

    fn remove(&self, key: &str) -> Result<bool, StoreError> {
        let answer = self.call("deleterange", key, &json!({ "key": STANDARD.encode(key) }))?;
        Ok(!matches!(answer.deleted.as_str(), "" | "0"))
    }
}
