//! HTTP as a client, with a deadline and limits, and the metadata store that speaks it.

use std::time::{Duration, Instant};

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use ureq::Agent;

use crate::metadata::{MetadataStore, StoreError, excerpt, text};

/// What stays as it is in a query: RFC 3986's unreserved characters.
const QUERY: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

pub(crate) const JSON: &str = "application/json";
/// What servers say in an error is not longer than this.
const ERROR_BYTES: usize = 4096;

/// Methods that are used.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Method {
    Get,
    Put,
    Post,
    Delete,
}

/// A client without memory: a connection for each request, no proxies, no redirects.
#[derive(Debug)]
pub(crate) struct Http {
    agent: Agent,
    max_bytes: usize,
}

impl Http {
    pub(crate) fn new(max_bytes: usize) -> Self {
        let config = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .proxy(None)
            .max_idle_connections(0)
            .user_agent(concat!("kvplane/", env!("CARGO_PKG_VERSION")))
            .build();
        Self { agent: config.new_agent(), max_bytes }
    }

    /// Status and body of the answer, or why there is none by the deadline.
    pub(crate) fn exchange(
        &self,
        method: Method,
        url: &str,
        body: &[u8],
        deadline: Instant,
    ) -> Result<(u16, Vec<u8>), String> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err("the deadline has passed".to_owned());
        }
        let limit = Some(left);
        let answer = match method {
            Method::Get => self.agent.get(url).config().timeout_global(limit).build().call(),
            Method::Delete => self.agent.delete(url).config().timeout_global(limit).build().call(),
            Method::Put => self.agent.put(url).config().timeout_global(limit).build().content_type(JSON).send(body),
            Method::Post => self.agent.post(url).config().timeout_global(limit).build().content_type(JSON).send(body),
        };
        let mut answer = answer.map_err(|error| in_words(&error, left))?;
        let status = answer.status().as_u16();
        let max_bytes = if status == 200 { self.max_bytes } else { ERROR_BYTES };
        // One more than allowed, to tell an answer that just fits from one that does not.
        let body = answer.body_mut().with_config().limit(max_bytes as u64 + 1).read_to_vec();
        match body {
            Ok(body) if body.len() <= max_bytes => Ok((status, body)),
            _ if status != 200 => Ok((status, Vec::new())),
            Ok(_) | Err(ureq::Error::BodyExceedsLimit(_)) => {
                Err(format!("the answer has more than {max_bytes} bytes: raise MC_HANDSHAKE_MAX_LENGTH"))
            }
            Err(error) => Err(in_words(&error, left)),
        }
    }
}

fn in_words(error: &ureq::Error, limit: Duration) -> String {
    match error {
        ureq::Error::Timeout(_) => format!("no answer within {} ms", limit.as_millis()),
        error => error.to_string(),
    }
}

/// Mooncake's metadata over HTTP: `GET`, `PUT` and `DELETE` of `{base}?key=`.
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
        answer.map_err(|reason| self.failed(key, reason))
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
            (200, body) => text(body).map(Some).map_err(|reason| self.failed(key, reason)),
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
