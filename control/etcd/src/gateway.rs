//! Ranges and transactions of etcd's version 3, as JSON: keys and values in base64, numbers of 64 bits as strings, and
//! what is empty or zero left out.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::http::{Http, HttpError, Method};

/// A call that failed. It may have taken effect all the same, unless it only reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GatewayError {
    /// Which endpoint said so, or was asked last.
    pub endpoint: String,
    /// What happened.
    pub reason: String,
}

impl fmt::Display for GatewayError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "etcd at {}: {}", self.endpoint, self.reason)
    }
}

impl std::error::Error for GatewayError {}

/// A key with its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The key.
    pub key: Vec<u8>,
    /// The value.
    pub value: Vec<u8>,
    /// The revision of etcd in which the value was set.
    pub modified: i64,
}

/// Which keys are wanted.
#[derive(Clone, Copy, Debug)]
pub struct Range<'a> {
    /// The first key.
    pub from: &'a [u8],
    /// The key behind the last; empty for `from` alone.
    pub to: &'a [u8],
    /// At most so many; 0 for all.
    pub limit: u32,
    /// As of this revision; 0 for now.
    pub revision: i64,
}

/// What a range has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeResult {
    /// Its entries, in the order of their keys.
    pub entries: Vec<Entry>,
    /// Whether there are more than the limit.
    pub more: bool,
    /// As of which revision.
    pub revision: i64,
}

/// What must hold for a transaction.
#[derive(Clone, Copy, Debug)]
pub enum Compare<'a> {
    /// There is no such key.
    Absent(&'a [u8]),
    /// The key has this value.
    Value(&'a [u8], &'a [u8]),
    /// The key was set in this revision.
    Modified(&'a [u8], i64),
}

/// What a transaction does.
#[derive(Clone, Copy, Debug)]
pub enum Operation<'a> {
    /// Sets a key.
    Put(&'a [u8], &'a [u8]),
    /// Removes a key.
    Delete(&'a [u8]),
    /// Removes all keys from this one up to, and without, the other.
    DeleteRange(&'a [u8], &'a [u8]),
}

/// What became of a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// All held, and everything is done.
    Done,
    /// Something did not hold, and nothing is done. The entries that were asked for in that case.
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

impl EntryAnswer {
    fn read(self) -> Result<Entry, String> {
        let bytes = |text: &str| STANDARD.decode(text).map_err(|error| format!("not base64: {error}"));
        let modified = number(&self.mod_revision)?;
        Ok(Entry { key: bytes(&self.key)?, value: bytes(&self.value)?, modified })
    }
}

fn number(text: &str) -> Result<i64, String> {
    if text.is_empty() { Ok(0) } else { text.parse().map_err(|_| format!("{text:?} is no number")) }
}

fn entries(answers: Vec<EntryAnswer>) -> Result<Vec<Entry>, String> {
    answers.into_iter().map(EntryAnswer::read).collect()
}

/// A client of an etcd cluster.
#[derive(Debug)]
pub struct Gateway {
    http: Http,
    urls: Vec<String>,
    /// Which endpoint answered last: it is asked first.
    first: AtomicUsize,
}

impl Gateway {
    /// A client of the cluster with these endpoints, such as `http://127.0.0.1:2379`.
    #[must_use]
    pub fn new(urls: Vec<String>, http: Http) -> Self {
        Self { http, urls, first: AtomicUsize::new(0) }
    }

    /// Makes a call, such as `kv/range`, by the deadline, at whichever endpoint answers first when they are tried in
    /// turn and share the time. The answer is JSON.
    ///
    /// # Errors
    /// When none answers, or one refuses.
    pub fn call(&self, method: &str, request: &Value, deadline: Instant) -> Result<Vec<u8>, GatewayError> {
        let body = request.to_string();
        let first = self.first.load(Ordering::Relaxed);
        let mut last = GatewayError { endpoint: "none".to_owned(), reason: "there are no endpoints".to_owned() };
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
                // Without a leader, or going down: another one may do.
                Ok((status, answer)) => {
                    let said = String::from_utf8_lossy(&answer[..answer.len().min(200)]).trim().to_owned();
                    last = failed(format!("it answers {status}: {said}"));
                    if !(500..600).contains(&status) {
                        return Err(last);
                    }
                }
                // More of the same would come from the others.
                Err(error @ HttpError::TooLong { .. }) => return Err(failed(error.to_string())),
                Err(error) => last = failed(error.to_string()),
            }
        }
        Err(last)
    }

    fn read<T: for<'a> Deserialize<'a>>(&self, answer: &[u8]) -> Result<T, GatewayError> {
        serde_json::from_slice(answer).map_err(|error| self.nonsense(&error.to_string()))
    }

    fn nonsense(&self, reason: &str) -> GatewayError {
        let endpoint = self.urls.get(self.first.load(Ordering::Relaxed)).cloned().unwrap_or_default();
        GatewayError { endpoint, reason: format!("its answer cannot be read: {reason}") }
    }

    /// The entries of a range.
    ///
    /// # Errors
    /// When nobody answers, or not so.
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
        let nonsense = |reason: String| self.nonsense(&reason);
        let revision = number(&answer.header.revision).map_err(nonsense)?;
        Ok(RangeResult { entries: entries(answer.kvs).map_err(nonsense)?, more: answer.more, revision })
    }

    /// Sets a key.
    ///
    /// # Errors
    /// When nobody answers: whether it was done is not known then.
    pub fn put(&self, key: &[u8], value: &[u8], deadline: Instant) -> Result<(), GatewayError> {
        let request = json!({ "key": STANDARD.encode(key), "value": STANDARD.encode(value) });
        self.call("kv/put", &request, deadline).map(drop)
    }

    /// Removes a key; whether it was there.
    ///
    /// # Errors
    /// When nobody answers: whether it was done is not known then.
    pub fn remove(&self, key: &[u8], deadline: Instant) -> Result<bool, GatewayError> {
        let request = json!({ "key": STANDARD.encode(key) });
        let answer: RemoveAnswer = self.read(&self.call("kv/deleterange", &request, deadline)?)?;
        Ok(!matches!(answer.deleted.as_str(), "" | "0"))
    }

    /// Does all of `operations` if all of `compares` hold, else nothing; then the answer has the entries of
    /// `otherwise`. At most 128 operations, unless etcd was told to allow more.
    ///
    /// # Errors
    /// When nobody answers: whether it was done is not known then.
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
