//! Metadata store over HTTP.

use std::time::{Duration, Instant};

use kvplane_etcd::{Http, HttpError, Method};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use super::{MetadataStore, StoreError, excerpt, text};

/// Characters that are not escaped in a query: RFC 3986's unreserved ones.
const QUERY: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// Formats an error with the next step.
pub(crate) fn in_words(error: &HttpError) -> String {
    match error {
        HttpError::TooLong { .. } => format!("{error}: raise MC_HANDSHAKE_MAX_LENGTH"),
        error => error.to_string(),
    }
}

/// Client of Mooncake's metadata over HTTP: `GET`, `PUT` and `DELETE` of `{base}?key=`.
#[derive(Debug)]
pub(crate) struct HttpStore {
    http: Http,
    base: String,
    timeout: Duration,
}

impl HttpStore {
    pub(crate) fn new(base: &str, timeout: Duration, max_bytes: usize) -> Self {
        Self { http: Http::new(max_bytes), base: base.to_owned(), timeout }
    }

    fn call(&self, method: Method, key: &str, body: &[u8]) -> Result<(u16, Vec<u8>), StoreError> {
        self.call_within(method, key, body, self.timeout)
    }

    fn call_within(
        &self,
        method: Method,
        key: &str,
        body: &[u8],
        limit: Duration,
    ) -> Result<(u16, Vec<u8>), StoreError> {
        let url = format!("{}?key={}", self.base, utf8_percent_encode(key, QUERY));
        let answer = self.http.exchange(method, &url, body, Instant::now() + limit.min(self.timeout));
        answer.map_err(|error| self.failed(key, in_words(&error)))
    }

    fn failed(&self, key: &str, reason: String) -> StoreError {
        StoreError { store: self.base.clone(), key: key.to_owned(), reason }
    }

    fn refused(&self, key: &str, status: u16, body: &[u8]) -> StoreError {
        self.failed(key, format!("it answers {status}: {}", excerpt(body)))
    }
}

impl MetadataStore for HttpStore {
    fn get_within(&self, key: &str, limit: Duration) -> Result<Option<String>, StoreError> {
        match self.call_within(Method::Get, key, &[], limit)? {
            (200, body) => text(body).map(Some).map_err(|error| self.failed(key, error.to_string())),
            (404, _) => Ok(None),
            (status, body) => Err(self.refused(key, status, &body)),
        }
    }

    fn put(&self, key: &str, value: &str) -> Result<(), StoreError> {
        match self.call(Method::Put, key, value.as_bytes())? {
            (200, _) => Ok(()),
            (status, body) => Err(self.refused(key, status, &body)),
        }
    }

    fn remove(&self, key: &str) -> Result<bool, StoreError> {
        match self.call(Method::Delete, key, &[])? {
            (200, _) => Ok(true),
            (404, _) => Ok(false),
            (status, body) => Err(self.refused(key, status, &body)),
        }
    }
}
