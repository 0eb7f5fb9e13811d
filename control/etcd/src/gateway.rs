//! JSON gateway of etcd version 3: ranges and transactions, with keys and values in base64, 64-bit numbers as strings,
//! and empty or zero fields omitted.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use base64::engine::general_purpose::STANDARD;
use base64::{DecodeError, Engine as _};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::http::{Http, HttpError, Method};

/// Failed call. It may have taken effect nevertheless, unless it only reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayError {
    /// Endpoint that returned the error, or was tried last.
    pub endpoint: String,
    /// Reason of the failure.
    pub reason: String,
}

impl fmt::Display for GatewayError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "etcd at {}: {}", self.endpoint, self.reason)
    }
}

impl std::error::Error for GatewayError {}

/// Key with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the fields are named for what they hold")]
pub struct Entry {
    pub key: Vec<u8>,
    pub value: Vec<u8>,
    /// Revision of etcd in which the value was set.
    pub modified: i64,
}

/// Range of keys to be read.
#[derive(Clone, Copy, Debug)]
pub struct Range<'a> {
    /// First key.
    pub from: &'a [u8],
    /// Key behind the last one; empty for `from` alone.
    pub to: &'a [u8],
    /// Maximum number of entries; 0 for all.
    pub limit: u32,
    /// Revision to be read; 0 for the newest.
    pub revision: i64,
}

/// Result of reading a range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeResult {
    /// Entries, in the order of their keys.
    pub entries: Vec<Entry>,
    /// True if the range has more entries than the limit.
    pub more: bool,
    /// Revision that was read.
    pub revision: i64,
}

/// Condition of a transaction.
#[derive(Clone, Copy, Debug)]
pub enum Compare<'a> {
    /// The key does not exist.
    Absent(&'a [u8]),
    /// The key has this value.
    Value(&'a [u8], &'a [u8]),
    /// The key was set in this revision.
    Modified(&'a [u8], i64),
}

/// Operation of a transaction.
#[derive(Clone, Copy, Debug)]
pub enum Operation<'a> {
    /// Sets a key.
    Put(&'a [u8], &'a [u8]),
    /// Removes a key.
    Delete(&'a [u8]),
    /// Removes all keys from the first one up to, but without, the second.
    DeleteRange(&'a [u8], &'a [u8]),
}

/// Outcome of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All conditions held, and all operations are done.
    Done,
    /// A condition did not hold, and no operation is done. The entries that were requested for that case.
    Refused(Vec<Entry>),
}

#[derive(Deserialize, Default)]
struct Head {
    #[serde(default)]
    revision: String,
}

#[derive(Deserialize, Default)]
struct RangeAnswer {
    #[serde(default)]
    header: Head,
    #[serde(default)]
    kvs: Vec<EntryAnswer>,
    #[serde(default)]
    more: bool,
}

#[derive(Deserialize)]
struct EntryAnswer {
    #[serde(default)]
    key: String,
    #[serde(default)]
    value: String,
    #[serde(default)]
    mod_revision: String,
}

#[derive(Deserialize)]
struct RemoveAnswer {
    #[serde(default)]
    deleted: String,
}

#[derive(Deserialize)]
struct TxnAnswer {
    #[serde(default)]
    succeeded: bool,
    #[serde(default)]
    responses: Vec<OperationAnswer>,
}

#[derive(Deserialize)]
struct OperationAnswer {
    #[serde(default)]
    response_range: RangeAnswer,
}

/// Reason why an answer cannot be decoded.
#[derive(Debug)]
enum AnswerError {
    /// The answer is not the expected JSON.
    Json(serde_json::Error),
    /// A key or a value is not in base64.
    Base64(DecodeError),
    /// A number is none.
    NotNumber(String),
}

impl fmt::Display for AnswerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Json(error) => error.fmt(f),
            Self::Base64(error) => write!(f, "not base64: {error}"),
            Self::NotNumber(text) => write!(f, "{text:?} is not a number"),
        }
    }
}

impl std::error::Error for AnswerError {}

impl EntryAnswer {
    fn read(self) -> Result<Entry, AnswerError> {
        let bytes = |text: &str| STANDARD.decode(text).map_err(AnswerError::Base64);
        let modified = number(&self.mod_revision)?;
        Ok(Entry { key: bytes(&self.key)?, value: bytes(&self.value)?, modified })
    }
}

fn number(text: &str) -> Result<i64, AnswerError> {
    if text.is_empty() { Ok(0) } else { text.parse().map_err(|_| AnswerError::NotNumber(text.to_owned())) }
}

fn entries(answers: Vec<EntryAnswer>) -> Result<Vec<Entry>, AnswerError> {
    answers.into_iter().map(EntryAnswer::read).collect()
}

/// Client of an etcd cluster.
#[derive(Debug)]
pub struct Gateway {
    http: Http,
    urls: Vec<String>,
    /// Index of the endpoint that answered last, which is tried first.
    first: AtomicUsize,
}

impl Gateway {
    /// Creates a client of the cluster with these endpoints, such as `http://127.0.0.1:2379`.
    #[must_use]
    pub fn new(urls: Vec<String>, http: Http) -> Self {
        Self { http, urls, first: AtomicUsize::new(0) }
    }

    /// Calls a method, such as `kv/range`, by the deadline. Endpoints are tried in turn and share the time; the first
    /// answer is returned, which is JSON.
    ///
    /// # Errors
    /// When no endpoint answers, or one returns an error.
    pub fn call(&self, method: &str, request: &Value, deadline: Instant) -> Result<Vec<u8>, GatewayError> {
        let body = request.to_string();
        let first = self.first.load(Ordering::Relaxed);
        let mut last = GatewayError { endpoint: "none".to_owned(), reason: "no endpoints are configured".to_owned() };
        for turn in 0..self.urls.len() {
            let index = (first + turn) % self.urls.len();
            let endpoint = &self.urls[index];
            let now = Instant::now();
            let left = u32::try_from(self.urls.len() - turn).unwrap_or(u32::MAX);
            let share = deadline.saturating_duration_since(now) / left;
            let failed = |reason| GatewayError { endpoint: endpoint.clone(), reason };
            match self.http.exchange(Method::Post, &format!("{endpoint}/v3/{method}"), body.as_bytes(), now + share) {
                Ok((200, answer)) => {
                    self.first.store(index, Ordering::Relaxed);
                    return Ok(answer);
                }
                // The endpoint has no leader, or is shutting down: another one may answer.
                Ok((status, answer)) => {
                    let said = String::from_utf8_lossy(&answer[..answer.len().min(200)]).trim().to_owned();
                    last = failed(format!("status {status}: {said}"));
                    if !(500..600).contains(&status) {
                        return Err(last);
                    }
                }
                // The other endpoints would return the same.
                Err(error @ HttpError::TooLong { .. }) => return Err(failed(error.to_string())),
                Err(error) => last = failed(error.to_string()),
            }
        }
        Err(last)
    }

    fn read<T: for<'a> Deserialize<'a>>(&self, answer: &[u8]) -> Result<T, GatewayError> {
        serde_json::from_slice(answer).map_err(|error| self.nonsense(&AnswerError::Json(error)))
    }

    fn nonsense(&self, reason: &AnswerError) -> GatewayError {
        let endpoint = self.urls.get(self.first.load(Ordering::Relaxed)).cloned().unwrap_or_default();
        GatewayError { endpoint, reason: format!("cannot decode its answer: {reason}") }
    }

    /// Reads the entries of a range.
    ///
    /// # Errors
    /// When no endpoint answers, or the answer cannot be decoded.
    pub fn range(&self, range: &Range<'_>, deadline: Instant) -> Result<RangeResult, GatewayError> {
        let mut request = json!({ "key": STANDARD.encode(range.from) });
        if !range.to.is_empty() {
            request["range_end"] = STANDARD.encode(range.to).into();
        }
        if range.limit > 0 {
            request["limit"] = range.limit.to_string().into();
        }
        if range.revision > 0 {
            request["revision"] = range.revision.to_string().into();
        }
        let answer: RangeAnswer = self.read(&self.call("kv/range", &request, deadline)?)?;
        let nonsense = |reason: AnswerError| self.nonsense(&reason);
        let revision = number(&answer.header.revision).map_err(nonsense)?;
        Ok(RangeResult { entries: entries(answer.kvs).map_err(nonsense)?, more: answer.more, revision })
    }

    /// Sets a key.
    ///
    /// # Errors
    /// When no endpoint answers: the key may have been set nevertheless.
    pub fn put(&self, key: &[u8], value: &[u8], deadline: Instant) -> Result<(), GatewayError> {
        let request = json!({ "key": STANDARD.encode(key), "value": STANDARD.encode(value) });
        self.call("kv/put", &request, deadline).map(drop)
    }

    /// Removes a key; returns true if it existed.
    ///
    /// # Errors
    /// When no endpoint answers: the key may have been removed nevertheless.
    pub fn remove(&self, key: &[u8], deadline: Instant) -> Result<bool, GatewayError> {
        let request = json!({ "key": STANDARD.encode(key) });
        let answer: RemoveAnswer = self.read(&self.call("kv/deleterange", &request, deadline)?)?;
        Ok(!matches!(answer.deleted.as_str(), "" | "0"))
    }

    /// Applies all `operations` if all `compares` hold, else none; then the outcome has the entries of `otherwise`. At
    /// most 128 operations, unless etcd is configured to allow more.
    ///
    /// # Errors
    /// When no endpoint answers: the transaction may have been applied nevertheless.
    pub fn transact(
        &self,
        compares: &[Compare<'_>],
        operations: &[Operation<'_>],
        otherwise: &[&[u8]],
        deadline: Instant,
    ) -> Result<Outcome, GatewayError> {
        let request = json!({
            "compare": compares.iter().map(compare).collect::<Vec<_>>(),
            "success": operations.iter().map(operation).collect::<Vec<_>>(),
            "failure": otherwise
                .iter()
                .map(|key| json!({ "requestRange": { "key": STANDARD.encode(key) } }))
                .collect::<Vec<_>>(),
        });
        let answer: TxnAnswer = self.read(&self.call("kv/txn", &request, deadline)?)?;
        if answer.succeeded {
            return Ok(Outcome::Done);
        }
        let found = answer.responses.into_iter().flat_map(|response| response.response_range.kvs).collect();
        entries(found).map(Outcome::Refused).map_err(|reason| self.nonsense(&reason))
    }
}

fn compare(compare: &Compare<'_>) -> Value {
    match compare {
        Compare::Absent(key) => {
            json!({ "key": STANDARD.encode(key), "target": "CREATE", "result": "EQUAL", "createRevision": "0" })
        }
        Compare::Value(key, value) => {
            let (key, value) = (STANDARD.encode(key), STANDARD.encode(value));
            json!({ "key": key, "target": "VALUE", "result": "EQUAL", "value": value })
        }
        Compare::Modified(key, revision) => {
            let revision = revision.to_string();
            json!({ "key": STANDARD.encode(key), "target": "MOD", "result": "EQUAL", "modRevision": revision })
        }
    }
}

fn operation(operation: &Operation<'_>) -> Value {
    match operation {
        Operation::Put(key, value) => {
            json!({ "requestPut": { "key": STANDARD.encode(key), "value": STANDARD.encode(value) } })
        }
        Operation::Delete(key) => json!({ "requestDeleteRange": { "key": STANDARD.encode(key) } }),
        Operation::DeleteRange(from, to) => {
            let (from, to) = (STANDARD.encode(from), STANDARD.encode(to));
            json!({ "requestDeleteRange": { "key": from, "range_end": to } })
        }
    }
}
