//! Server of `/metrics` for processes without another HTTP server: on loopback, without authentication, read only.
//!
//! It has a thread of its own. The metrics of each scrape are rendered on a further thread, so that a slow one delays
//! no other.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, StatusCode};
use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;

use crate::connections::ConnectionLimits;
use crate::server::{Limits, PROMETHEUS, Service, TEXT, response, serve};

/// Limit of concurrent connections. For a further one the oldest idle connection is closed, or else itself.
const CONNECTIONS: usize = 8;

const LIMITS: Limits = Limits {
    connections: ConnectionLimits {
        all: CONNECTIONS,
        of_one_address: CONNECTIONS,
        requests: CONNECTIONS,
        grace: Duration::from_millis(500),
    },
    deadline: Duration::from_secs(5),
    head_deadline: Duration::from_secs(4),
    head_bytes: 8 << 10,
    header_fields: 64,
};

const _: () = assert!(LIMITS.head_deadline.as_secs() < LIMITS.deadline.as_secs());

/// Callback that renders the metrics for each scrape; `None` when they are no longer available.
type Render = dyn Fn() -> Option<String> + Send + Sync;

/// Serves `/metrics` until it is dropped.
pub struct MetricsServer {
    address: SocketAddr,
    /// Stops the thread when it is dropped.
    running: Option<oneshot::Sender<()>>,
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
        listener.set_nonblocking(true)?;
        let runtime = Builder::new_current_thread()
            .enable_all()
            .thread_name("metrics-scrape")
            .max_blocking_threads(CONNECTIONS)
            .build()?;
        let listener = {
            let _inside = runtime.enter();
            tokio::net::TcpListener::from_std(listener)?
        };
        let scrapes = Arc::new(Scrapes { render: Arc::new(render) });
        let (running, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new().name("metrics".to_owned()).spawn(move || {
            runtime.block_on(async {
                tokio::select! {
                    () = serve(&listener, LIMITS, scrapes) => {}
                    _ = stopped => {}
                }
            });
            // A scrape that is being rendered is not waited for.
            runtime.shutdown_background();
        })?;
        Ok(Self { address, running: Some(running), thread: Some(thread) })
    }

    /// Returns the address that the server listens on.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        drop(self.running.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was printed when it happened.
            let _ = thread.join();
        }
    }
}

/// Service of scrapes.
struct Scrapes {
    render: Arc<Render>,
}

impl Service for Scrapes {
    fn is_probe(&self, _path: &str) -> bool {
        false
    }

    async fn answer(&self, _from: IpAddr, request: Request<Incoming>) -> Response<Full<Bytes>> {
        if !matches!(*request.method(), Method::GET | Method::HEAD) {
            return response(StatusCode::METHOD_NOT_ALLOWED, TEXT, "Only GET and HEAD are served.\n");
        }
        if request.uri().path() != "/metrics" {
            return response(StatusCode::NOT_FOUND, TEXT, "Only /metrics is served.\n");
        }
        let render = Arc::clone(&self.render);
        match spawn_blocking(move || render()).await {
            Ok(Some(text)) => response(StatusCode::OK, PROMETHEUS, text),
            // A panic was printed when it happened.
            Ok(None) | Err(_) => {
                response(StatusCode::SERVICE_UNAVAILABLE, TEXT, "The metrics are no longer available.\n")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Mutex, mpsc};

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
        assert!(answer.contains("content-length: 10\r\n") && answer.ends_with("\r\n\r\nx_total 1\n"), "{answer}");
        drop(idle);
        assert!(ask(&server, "GET /metrics?x=1 HTTP/1.0\r\n\r\n").ends_with("x_total 1\n"));
        let answer = ask(&server, "HEAD /metrics HTTP/1.1\r\n\r\n");
        assert!(answer.contains("connection: close\r\n") && answer.ends_with("\r\n\r\n"), "{answer}");
        assert!(ask(&server, "GET /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 503 "));
        assert!(ask(&server, "GET / HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 404 "));
        assert!(ask(&server, "POST /metrics HTTP/1.1\r\n\r\n").starts_with("HTTP/1.1 405 "));
        assert_eq!(scrapes.load(Ordering::SeqCst), 4);
        let address = server.address();
        drop(server);
        assert!(TcpStream::connect_timeout(&address, Duration::from_secs(1)).is_err(), "nobody listens any more");
    }

    #[test]
    fn a_slow_scrape_delays_neither_another_nor_the_end() {
        let (release, released) = mpsc::channel::<()>();
        let (began, begun) = mpsc::channel();
        let first = Mutex::new(Some(released));
        let server = MetricsServer::start(0, move || {
            let taken = first.lock().unwrap().take();
            if let Some(released) = taken {
                began.send(()).unwrap();
                // Fails once the test has ended.
                let _ = released.recv();
            }
            Some("x_total 1\n".to_owned())
        })
        .unwrap();
        let mut slow = TcpStream::connect(server.address()).unwrap();
        slow.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        begun.recv().unwrap();
        assert!(ask(&server, "GET /metrics HTTP/1.1\r\n\r\n").ends_with("x_total 1\n"));
        drop(server);
        assert_eq!(slow.read(&mut [0; 1]).unwrap_or(0), 0, "its connection is closed");
        drop(release);
    }

    #[test]
    fn idle_connections_lock_nobody_out_and_long_heads_are_refused() {
        let server = MetricsServer::start(0, || Some("x_total 1\n".to_owned())).unwrap();
        let idle: Vec<TcpStream> = (0..CONNECTIONS).map(|_| TcpStream::connect(server.address()).unwrap()).collect();
        std::thread::sleep(2 * LIMITS.connections.grace);
        assert!(ask(&server, "GET /metrics HTTP/1.1\r\n\r\n").ends_with("x_total 1\n"));
        drop(idle);
        // All of it is read, so that the connection is not reset before the answer has arrived.
        let long = format!("{:y<bytes$}", "GET /metrics HTTP/1.1\r\nx: ", bytes = LIMITS.head_bytes);
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.write_all(long.as_bytes()).unwrap();
        let mut status = [0; 12];
        stream.read_exact(&mut status).unwrap();
        assert_eq!(&status, b"HTTP/1.1 431");
    }
}
