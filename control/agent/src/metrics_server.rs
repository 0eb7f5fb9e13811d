//! HTTP server of `/metrics` for processes without another HTTP server: on loopback, without authentication, read only.
//!
//! One thread accepts connections; each scrape runs on a thread of its own, so that a slow connection delays no other.
//! The number of connections, the length of a request and its duration are limited.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Limit of concurrent connections; further ones are closed at once.
const CONNECTIONS: usize = 8;
/// Deadline of a request, from its connection to the last byte of the response.
const DEADLINE: Duration = Duration::from_secs(5);
const REQUEST_BYTES: usize = 8 << 10;
/// Backoff after a failed accept; an immediate retry would spin.
const REFUSED: Duration = Duration::from_millis(100);

const TEXT: &str = "text/plain; charset=utf-8";
const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Callback that renders the metrics for each scrape; `None` when they are no longer available.
type Render = dyn Fn() -> Option<String> + Send + Sync;

/// Serves `/metrics` until it is dropped.
pub struct MetricsServer {
    address: SocketAddr,
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for MetricsServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MetricsServer").field("address", &self.address).finish_non_exhaustive()
    }
}

impl MetricsServer {
    /// Serves on this port of the loopback address, 0 for a free one. `render` is called for each scrape, on a thread
    /// of the server; `None` is answered with status 503.
    ///
    /// # Errors
    /// When the port is taken, or the system refuses a thread.
    pub fn start(port: u16, render: impl Fn() -> Option<String> + Send + Sync + 'static) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port))
            .map_err(|error| io::Error::new(error.kind(), format!("port {port} for metrics: {error}")))?;
        let address = listener.local_addr()?;
        let stopping = Arc::new(AtomicBool::new(false));
        let stop = Arc::clone(&stopping);
        let render: Arc<Render> = Arc::new(render);
        let thread =
            std::thread::Builder::new().name("metrics".to_owned()).spawn(move || accept(&listener, &stop, &render))?;
        Ok(Self { address, stopping, thread: Some(thread) })
    }

    /// Returns the address that the server listens on.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::SeqCst);
        // Wakes the thread. If that fails, the thread is left running rather than waited for.
        if TcpStream::connect_timeout(&self.address, Duration::from_secs(1)).is_ok()
            && let Some(thread) = self.thread.take()
        {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
    }
}

fn accept(listener: &TcpListener, stopping: &AtomicBool, render: &Arc<Render>) {
    let open = Arc::new(AtomicUsize::new(0));
    loop {
        let accepted = listener.accept();
        if stopping.load(Ordering::SeqCst) {
            return;
        }
        let Ok((stream, _)) = accepted else {
            std::thread::sleep(REFUSED);
            continue;
        };
        let place = Place::take(&open);
        if place.number >= CONNECTIONS {
            continue;
        }
        let render = Arc::clone(render);
        // Without a thread the connection is closed, and the scraper retries.
        let _ = std::thread::Builder::new().name("metrics-scrape".to_owned()).spawn(move || {
            let _place = place;
            // A client that violates HTTP, is slow or disconnects affects only itself.
            let _ = serve(stream, &*render);
        });
    }
}

/// Open connection, counted.
struct Place {
    number: usize,
    open: Arc<AtomicUsize>,
}

impl Place {
    fn take(open: &Arc<AtomicUsize>) -> Self {
        Self { number: open.fetch_add(1, Ordering::SeqCst), open: Arc::clone(open) }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::SeqCst);
    }
}

fn serve(mut stream: TcpStream, render: &Render) -> io::Result<()> {
    let deadline = Instant::now() + DEADLINE;
    let mut request = Vec::new();
    while !request.windows(4).any(|end| end == b"\r\n\r\n") {
        let mut part = [0; 1024];
        stream.set_read_timeout(Some(left(deadline)?))?;
        match stream.read(&mut part)? {
            0 => return Ok(()),
            count => request.extend_from_slice(&part[..count]),
        }
        if request.len() > REQUEST_BYTES {
            return Err(io::Error::other("the request head is longer than the limit"));
        }
    }
    let head = String::from_utf8_lossy(&request);
    let mut words = head.split([' ', '\r']);
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let (status, kind, body) = match (method, path.split('?').next().unwrap_or_default()) {
        ("GET" | "HEAD", "/metrics") => match render() {
            Some(text) => ("200 OK", PROMETHEUS, text),
            None => ("503 Service Unavailable", TEXT, "The metrics are no longer available.\n".to_owned()),
        },
        ("GET" | "HEAD", _) => ("404 Not Found", TEXT, "Only /metrics is served.\n".to_owned()),
        _ => ("405 Method Not Allowed", TEXT, "Only GET and HEAD are served.\n".to_owned()),
    };
    let bytes = body.len();
    let mut answer =
        format!("HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {bytes}\r\nConnection: close\r\n\r\n");
    if method != "HEAD" {
        answer.push_str(&body);
    }
    let mut rest = answer.as_bytes();
    while !rest.is_empty() {
        stream.set_write_timeout(Some(left(deadline)?))?;
        rest = &rest[stream.write(rest)?..];
    }
    Ok(())
}

/// Returns the time left until a deadline.
fn left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(server: &MetricsServer, request: &str) -> String {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn only_metrics_are_served_and_only_on_loopback() {
        let scrapes = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&scrapes);
        let render = move || match count.fetch_add(1, Ordering::SeqCst) {
            0..3 => Some("x_total 1\n".to_owned()),
            _ => None,
        };
        let server = MetricsServer::start(0, render).unwrap();
        assert!(server.address().ip().is_loopback());
        // Idle connections delay no other.
        let idle: Vec<TcpStream> =
            (0..CONNECTIONS / 2).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
        let answer = ask(&server, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.contains(PROMETHEUS), "{answer}");
        assert!(answer.contains("Content-Length: 10\r\n") && answer.ends_with("\r\n\r\nx_total 1\n"), "{answer}");
        drop(idle);
        assert!(ask(&server, "GET /metrics?x=1 HTTP/1.0\r\n\r\n").ends_with("x_total 1\n"));
        assert!(ask(&server, "HEAD /metrics HTTP/1.1\r\n\r\n").ends_with("Connection: close\r\n\r\n"));
        assert!(ask(&server, "GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 503 "));
        assert!(ask(&server, "GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
        assert!(ask(&server, "POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
        assert_eq!(scrapes.load(Ordering::SeqCst), 4);
        let address = server.address();
        drop(server);
        assert!(TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_err(), "nobody listens any more");
    }
}
