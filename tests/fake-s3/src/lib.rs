//! A small S3 service on a loopback port, for tests: PUT, GET with ranges, HEAD, DELETE and LIST version 2, with
//! objects in memory. On request it denies, throttles, truncates, corrupts or does not answer, and its clock jumps.
//!
//! It checks that requests are signed, not by whom.

#![forbid(unsafe_code)]

mod dates;
mod http;

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::http::{Request, Response};

/// Objects of one page of a list.
const PAGE: usize = 50;

/// What goes wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Trouble {
    /// Nothing.
    #[default]
    None,
    /// Requests are denied (403).
    Deny,
    /// Writes are denied, as by a policy for readers.
    DenyWrites,
    /// Requests are throttled (503 SlowDown).
    Throttle,
    /// Reads return other bytes.
    Corrupt,
    /// Reads return fewer bytes than the range has, and say so.
    Truncate,
    /// Requests are not answered.
    Hang,
    /// There is no such bucket (404).
    NoBucket,
}

#[derive(Clone)]
struct StoredObject {
    bytes: Arc<Vec<u8>>,
    written: Duration,
}

#[derive(Default)]
struct State {
    objects: BTreeMap<String, StoredObject>,
    trouble: Trouble,
    /// Time by which the service's clock is ahead.
    ahead: Duration,
}

/// Running service.
pub struct FakeS3 {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
    requests: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
}

impl FakeS3 {
    /// Starts a service on a free loopback port.
    ///
    /// # Panics
    /// If the host has no free port or thread.
    #[must_use]
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("an address");
        let (state, requests, stop) = <(Arc<Mutex<State>>, Arc<AtomicU64>, Arc<AtomicBool>)>::default();
        let served = (Arc::clone(&state), Arc::clone(&requests), Arc::clone(&stop));
        std::thread::spawn(move || {
            let (state, requests, stop) = served;
            for stream in listener.incoming().flatten() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let (state, requests) = (Arc::clone(&state), Arc::clone(&requests));
                std::thread::spawn(move || serve(&stream, &state, &requests));
            }
        });
        Self { address, state, requests, stop }
    }

    /// Returns its URL.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the environment by which clients find it.
    #[must_use]
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        vec![
            ("AWS_ENDPOINT", self.endpoint()),
            ("AWS_ALLOW_HTTP", "true".to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
            ("AWS_ACCESS_KEY_ID", "key".to_owned()),
            ("AWS_SECRET_ACCESS_KEY", "secret".to_owned()),
        ]
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets what goes wrong from now on.
    pub fn set_trouble(&self, trouble: Trouble) {
        self.state().trouble = trouble;
    }

    /// Sets the service's clock ahead of the host's by this time: objects that are written from now on have its time.
    pub fn set_clock_ahead(&self, ahead: Duration) {
        self.state().ahead = ahead;
    }

    /// Returns the names of the objects, with their buckets, and their lengths.
    #[must_use]
    pub fn objects(&self) -> Vec<(String, usize)> {
        self.state().objects.iter().map(|(name, stored)| (name.clone(), stored.bytes.len())).collect()
    }

    /// Returns the bytes of an object, by its name with its bucket.
    #[must_use]
    pub fn bytes(&self, name: &str) -> Option<Arc<Vec<u8>>> {
        self.state().objects.get(name).map(|stored| Arc::clone(&stored.bytes))
    }

    /// Returns the number of requests that were received.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }
}

impl Drop for FakeS3 {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // Wakes the thread that accepts; if that fails, it stays asleep.
        let _ = TcpStream::connect(self.address);
    }
}

/// Serves the requests of a connection.
fn serve(stream: &TcpStream, state: &Mutex<State>, requests: &AtomicU64) {
    let mut reader = std::io::BufReader::new(stream);
    while let Some(request) = http::read(&mut reader) {
        requests.fetch_add(1, Ordering::Relaxed);
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        let trouble = state.trouble;
        if trouble == Trouble::Hang {
            drop(state);
            // Until the client gives the connection up.
            let _ = http::read(&mut reader);
            return;
        }
        let response = answer(&request, &mut state, trouble);
        drop(state);
        if http::write(stream, &request, &response).is_none() {
            return;
        }
    }
}

fn answer(request: &Request, state: &mut State, trouble: Trouble) -> Response {
    let is_write = matches!(request.method.as_str(), "PUT" | "DELETE");
    if trouble == Trouble::Deny || trouble == Trouble::DenyWrites && is_write || !request.is_signed {
        return Response::error(403, "AccessDenied");
    }
    if trouble == Trouble::NoBucket {
        return Response::error(404, "NoSuchBucket");
    }
    if trouble == Trouble::Throttle {
        return Response::error(503, "SlowDown");
    }
    let (bucket, key) = request.path.trim_start_matches('/').split_once('/').unwrap_or((&request.path[1..], ""));
    let name = format!("{bucket}/{key}");
    match (request.method.as_str(), key) {
        ("GET", "") => list(bucket, request, state),
        ("PUT", _) => {
            let written = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default() + state.ahead;
            state.objects.insert(name, StoredObject { bytes: Arc::new(request.body.clone()), written });
            Response::new(200).with("ETag", "\"tag\"")
        }
        ("DELETE", _) => {
            state.objects.remove(&name);
            Response::new(204)
        }
        ("GET" | "HEAD", _) => match state.objects.get(&name) {
            Some(stored) => read(request, stored, trouble),
            None => Response::error(404, "NoSuchKey"),
        },
        _ => Response::error(405, "MethodNotAllowed"),
    }
}

fn read(request: &Request, stored: &StoredObject, trouble: Trouble) -> Response {
    let bytes = &stored.bytes;
    let whole = bytes.len();
    let range = request.range.as_deref().and_then(|range| range.strip_prefix("bytes="));
    let (from, to) = match range.and_then(|range| range.split_once('-')) {
        None => (0, whole),
        Some(("", last)) => (whole.saturating_sub(last.parse().unwrap_or(0)), whole),
        Some((from, "")) => (from.parse().unwrap_or(0), whole),
        Some((from, last)) => {
            (from.parse().unwrap_or(0), last.parse::<usize>().map_or(whole, |last| last + 1).min(whole))
        }
    };
    if from >= to && range.is_some() {
        return Response::error(416, "InvalidRange");
    }
    let to = if trouble == Trouble::Truncate { from + (to - from) / 2 } else { to };
    let mut body = bytes[from..to].to_vec();
    if trouble == Trouble::Corrupt
        && let Some(byte) = body.last_mut()
    {
        *byte ^= 0x40;
    }
    let response = Response::new(if range.is_some() { 206 } else { 200 })
        .with("ETag", "\"tag\"")
        .with("Last-Modified", &dates::http(stored.written));
    let last = to.saturating_sub(1);
    let response = if range.is_some() {
        response.with("Content-Range", &format!("bytes {from}-{last}/{whole}"))
    } else {
        response
    };
    response.with_body(body)
}

fn list(bucket: &str, request: &Request, state: &State) -> Response {
    let prefix = format!("{bucket}/{}", request.query("prefix").unwrap_or_default());
    let after = request.query("continuation-token").unwrap_or_default();
    let mut found =
        state.objects.iter().filter(|(name, _)| name.starts_with(&prefix) && name.as_str() > after.as_str());
    let page: Vec<_> = found.by_ref().take(PAGE).collect();
    let is_truncated = found.next().is_some();
    let mut xml = String::from("<?xml version=\"1.0\"?><ListBucketResult>");
    for (name, stored) in &page {
        let key = &name[bucket.len() + 1..];
        let (bytes, at) = (stored.bytes.len(), dates::iso(stored.written));
        xml.push_str(&format!(
            "<Contents><Key>{key}</Key><LastModified>{at}</LastModified><ETag>\"tag\"</ETag><Size>{bytes}</Size>\
             </Contents>"
        ));
    }
    if let (true, Some((name, _))) = (is_truncated, page.last()) {
        xml.push_str(&format!("<NextContinuationToken>{name}</NextContinuationToken>"));
    }
    xml.push_str(&format!("<IsTruncated>{is_truncated}</IsTruncated></ListBucketResult>"));
    Response::new(200).with("Content-Type", "application/xml").with_body(xml.into_bytes())
}
