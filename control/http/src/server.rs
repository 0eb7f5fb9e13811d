//! Server: accepts connections within limits and passes their requests to a service.
//!
//! One request per connection, all of it within a deadline. A client that violates HTTP, is slow or disconnects affects
//! only itself. Which connection is closed at a limit: [`crate::connections`].

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{sleep, sleep_until, timeout};

use crate::connections::{ConnectionLimits, ConnectionSlot, Connections, Entrance};

/// Backoff after a failed accept, mostly for lack of file descriptors; an immediate retry would spin.
const REFUSED: Duration = Duration::from_millis(100);

/// Content type of plain text.
pub const TEXT: &str = "text/plain; charset=utf-8";
/// Content type of Prometheus text.
pub const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Limits of a server.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Limits of connections and concurrent requests.
    pub connections: ConnectionLimits,
    /// Deadline of a request, from its connection to the last byte of the response.
    pub deadline: Duration,
    /// Deadline of the head of a request, shorter than `deadline`.
    pub head_deadline: Duration,
    /// Most bytes of the head of a request, at least 8 KiB. A longer one is answered with status 431.
    pub head_bytes: usize,
    /// Most header fields of a request.
    pub header_fields: usize,
}

/// Answers the requests of a server.
pub trait Service: Send + Sync + 'static {
    /// Returns true if the path is for probes, which are served beside all other requests: at once, under load too.
    fn is_probe(&self, path: &str) -> bool;

    /// Answers a request of this address.
    fn answer(&self, from: IpAddr, request: Request<Incoming>) -> impl Future<Output = Response<Full<Bytes>>> + Send;
}

/// Returns a response with this content type.
#[must_use]
pub fn response(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// Serves until it is dropped; then all connections are closed.
pub async fn serve(listener: &TcpListener, limits: Limits, service: Arc<impl Service>) {
    let places = Connections::new(limits.connections);
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, from)) => {
                    if let Some((slot, gives_way)) = place_for(&places, from.ip(), limits.deadline).await {
                        let service = Arc::clone(&service);
                        connections.spawn(connection(stream, from.ip(), limits, service, slot, gives_way));
                    }
                }
                Err(_) => sleep(REFUSED).await,
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

/// Waits for a connection's place; none if its address has too many connections. Every connection ends within
/// `deadline`, so this wait ends too.
async fn place_for(
    places: &Arc<Connections>,
    from: IpAddr,
    deadline: Duration,
) -> Option<(ConnectionSlot, oneshot::Receiver<()>)> {
    loop {
        let (entrance, gives_way) = places.enter(from, Instant::now());
        let until = match entrance {
            Entrance::Open(slot) => return Some((slot, gives_way)),
            Entrance::TooMany => return None,
            Entrance::Full(until) => until,
        };
        tokio::select! {
            () = places.left() => {}
            () = sleep_until(until.unwrap_or_else(|| Instant::now() + deadline).into()) => {}
        }
    }
}

async fn connection(
    stream: TcpStream,
    from: IpAddr,
    limits: Limits,
    service: Arc<impl Service>,
    slot: ConnectionSlot,
    gives_way: oneshot::Receiver<()>,
) {
    let slot = Arc::new(slot);
    let held = Arc::clone(&slot);
    let answer = service_fn(move |request: Request<Incoming>| {
        let (service, slot) = (Arc::clone(&service), Arc::clone(&held));
        async move {
            slot.begin();
            let _turn = slot.turn(service.is_probe(request.uri().path())).await;
            Ok::<_, Infallible>(service.answer(from, request).await)
        }
    });
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_deadline)
        .max_buf_size(limits.head_bytes)
        .max_headers(limits.header_fields)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), answer);
    tokio::select! {
        _ = timeout(limits.deadline, serving) => {}
        Ok(()) = gives_way => {}
    }
}
