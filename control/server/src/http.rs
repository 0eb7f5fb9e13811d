//! HTTP for probes, Prometheus, operators and Mooncake's tools: on loopback, or with a token.
//!
//! | path | answer |
//! |---|---|
//! | `/health` | JSON; status 503 once the control plane has failed |
//! | `/metrics` | Prometheus text |
//! | `/get_all_segments` | names of segments, one per line |
//! | `/metadata` | Mooncake's metadata server, if enabled: the only path that can be written |
//! | `/status`, `/status.json` | the status page, and its data: see [`crate::http::status`] |
//! | `/register`, `/query` and others | the Conductor, see [`shim`] |
//! | others | see [`crate::http::admin`] |
//!
//! One request per connection, all of it within a deadline. Heads and bodies are limited; read-only paths reject a body
//! without reading it. Limits of connections, and the rule that picks which one is closed: [`kvplane_http`]. `/health`
//! and `/metrics` are served beside all other requests.

pub(crate) mod access;
pub(crate) mod admin;
pub(crate) mod metadata;
mod metrics;
pub(crate) mod mooncake_metrics;
pub(crate) mod objects;
mod shim;
pub(crate) mod status;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Body, Bytes, Incoming};
use hyper::header::{HeaderValue, WWW_AUTHENTICATE};
use hyper::{Method, Request, Response, StatusCode};
use kvplane_http::{ConnectionLimits, Limits, PROMETHEUS, Service, TEXT, response};
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::cluster::view::View;
use crate::control::{Control, SOFTWARE};
use crate::http::access::Access;
use crate::http::admin::DrainJobs;
use crate::http::metadata::{Metadata, MetadataLimits};
use crate::http::metrics::is_live;
use crate::http::objects::ObjectsAccess;
use crate::server::Role;

const LIMITS: Limits = Limits {
    connections: ConnectionLimits { all: 512, of_one_address: 192, requests: 64, grace: Duration::from_millis(500) },
    deadline: Duration::from_secs(10),
    head_deadline: Duration::from_secs(5),
    head_bytes: 16 << 10,
    header_fields: 64,
};

const _: () = assert!(LIMITS.head_deadline.as_secs() < LIMITS.deadline.as_secs());

const METADATA: &str = "/metadata";
/// Error code of a missing token. Mooncake has no number for it, as its paths need no authentication.
const UNAUTHORIZED: i32 = -1;
pub(crate) const JSON: &str = "application/json";
pub(crate) const MSGPACK: &str = "application/msgpack";

/// State behind the paths of a leader.
pub(crate) struct Pages {
    control: Arc<Control>,
    access: Access,
    metadata: Option<Metadata>,
    objects: ObjectsAccess,
    drains: DrainJobs,
}

impl Pages {
    pub(crate) fn new(
        control: Arc<Control>,
        access: Access,
        metadata: Option<MetadataLimits>,
        objects: ObjectsAccess,
    ) -> Self {
        let drains = DrainJobs::new(Arc::clone(&control));
        Self { control, access, metadata: metadata.map(Metadata::new), objects, drains }
    }
}

/// Listens on `address`; needs a runtime.
pub(crate) async fn listen(address: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind(address).await?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

/// Serves until it is dropped.
pub(crate) async fn serve(listener: Arc<TcpListener>, pages: Pages) {
    kvplane_http::serve(&listener, LIMITS, Arc::new(Who::Leads(pages))).await;
}

/// Answers for a standby until it is dropped.
pub(crate) async fn stand_by(listener: Arc<TcpListener>, role: watch::Receiver<Role>) {
    kvplane_http::serve(&listener, LIMITS, Arc::new(Who::StandsBy(role))).await;
}

/// State behind the paths.
enum Who {
    Leads(Pages),
    StandsBy(watch::Receiver<Role>),
}

impl Service for Who {
    fn is_probe(&self, path: &str) -> bool {
        matches!(path, "/health" | "/metrics")
    }

    async fn answer(&self, from: IpAddr, request: Request<Incoming>) -> Response<Full<Bytes>> {
        match self {
            Self::Leads(pages) => answer(pages, from, request).await,
            Self::StandsBy(role) => standby_answer(&role.borrow(), request.uri().path()),
        }
    }
}

pub(crate) type Answer = (StatusCode, &'static str, Bytes);

async fn answer(pages: &Pages, from: IpAddr, request: Request<Incoming>) -> Response<Full<Bytes>> {
    let permitted = pages.access.permits(request.uri().path(), from, request.headers());
    if permitted && request.uri().path() == status::PAGE {
        let response = status::answer_page(&request);
        pages.control.counts.observe_http(status::PAGE, response.status().as_u16());
        return response;
    }
    let (path, (status, content_type, body)) = match &pages.metadata {
        _ if !permitted => {
            let what = "this path needs the header Authorization: Bearer with the token of the token file; without a \
                        token file it serves only this host, by address or as localhost, and no page of another site";
            ("refused", admin::failure(StatusCode::UNAUTHORIZED, UNAUTHORIZED, what))
        }
        Some(metadata) if request.uri().path() == METADATA => {
            let (status, body) = metadata.answer(request, from).await;
            (METADATA, (status, if status == StatusCode::OK { JSON } else { TEXT }, body))
        }
        _ if request.uri().path() == status::JSON => (status::JSON, status::answer(&pages.control, &request)),
        _ => match (admin::known(request.uri().path()), shim::known(request.uri().path())) {
            (Some(path), _) => (path, admin::answer(pages, path, request).await),
            (None, Some(path)) => (path, shim::answer(&pages.control, path, request).await),
            (None, None) => route(pages, &request),
        },
    };
    pages.control.counts.observe_http(path, status.as_u16());
    let mut response = response(status, content_type, body);
    if status == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

/// Answers for a standby: healthy, to probes; who the leader is, to all other requests.
fn standby_answer(role: &Role, path: &str) -> Response<Full<Bytes>> {
    let words = match role {
        Role::StandsBy(words) => words.as_str(),
        Role::Leads => "this control plane is about to become the leader",
    };
    let (status, content_type, body) = match path {
        "/health" => {
            let health = serde_json::json!({
                "status": "ok",
                "role": "standby",
                "ha_state": "standby",
                "service_ready": false,
                "software": SOFTWARE,
                "reason": words,
            });
            (StatusCode::OK, JSON, format!("{health}\n"))
        }
        "/metrics" => (StatusCode::OK, PROMETHEUS, metrics::render_standby()),
        _ => (StatusCode::SERVICE_UNAVAILABLE, TEXT, format!("{words}\n")),
    };
    response(status, content_type, body)
}

/// Returns the path's name in metrics, and the answer.
fn route(pages: &Pages, request: &Request<Incoming>) -> (&'static str, Answer) {
    let path = match request.uri().path() {
        "/health" => "/health",
        "/metrics" => "/metrics",
        "/get_all_segments" => "/get_all_segments",
        _ => {
            let text = match pages.metadata {
                None => "There are /status, /health, /metrics, /get_all_segments and more: see docs/operations.md.\n",
                Some(_) => "There are /status, /health, /metrics, /get_all_segments, /metadata and more.\n",
            };
            return ("other", (StatusCode::NOT_FOUND, TEXT, text.into()));
        }
    };
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return (path, (StatusCode::METHOD_NOT_ALLOWED, TEXT, "Only GET and HEAD are served.\n".into()));
    }
    if !request.body().is_end_stream() {
        return (path, (StatusCode::PAYLOAD_TOO_LARGE, TEXT, "A request with a body is not served.\n".into()));
    }
    let control = &pages.control;
    let view = match View::of(&control.cluster) {
        Ok(view) => view,
        Err(refusal) => {
            let text = serde_json::json!({ "status": "failed", "reason": refusal.reason });
            return (path, (StatusCode::SERVICE_UNAVAILABLE, JSON, format!("{text}\n").into()));
        }
    };
    let answer = match path {
        "/health" => {
            let health = serde_json::json!({
                "status": "ok",
                "role": "leader",
                "ha_state": "serving",
                "service_ready": true,
                "view_version": view.epoch,
                "software": SOFTWARE,
                "cluster": view.cluster,
                "epoch": view.epoch,
                "members": view.members.iter().filter(|member| is_live(member)).count(),
                "uptime_seconds": view.uptime_ns / 1_000_000_000,
            });
            (StatusCode::OK, JSON, format!("{health}\n").into())
        }
        "/metrics" => {
            let text = metrics::render(control, &view);
            (StatusCode::OK, PROMETHEUS, text.into())
        }
        _ => {
            let names: Vec<&str> = view.segments.iter().map(|segment| segment.name.as_str()).collect();
            (StatusCode::OK, TEXT, lines(&names).into())
        }
    };
    (path, answer)
}

/// Joins names, one per line; control characters, which could fake a line, are escaped.
fn lines(names: &[&str]) -> String {
    let mut text = String::new();
    for name in names {
        for letter in name.chars() {
            if letter.is_control() {
                text.extend(letter.escape_default());
            } else {
                text.push(letter);
            }
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::lines;

    #[test]
    fn a_name_cannot_fake_a_line() {
        let names = ["plain", "two\nlines", "é"];
        assert_eq!(lines(&names), "plain\ntwo\\nlines\né\n");
    }
}
