//! Status page: `/status` is a page without data, `/status.json` its data, requested once a second.
//!
//! The page loads nothing but that JSON, makes no markup from text, and is served with a policy by which the browser
//! rejects both. It is the same for every reader, so it needs no token, which browsers do not send by themselves; it
//! asks its reader for one. The JSON needs the token, as all other paths do.

use std::sync::OnceLock;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, HeaderValue, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS,
};
use hyper::{Method, Request, Response, StatusCode};
use kvplane_http::{TEXT, response};
use kvplane_rpc::message::{SegmentKind, SegmentOwner, ShardFigures};
use serde_json::{Value, json};

use crate::cluster::view::View;
use crate::control::{Control, SOFTWARE};
use crate::http::Answer;
use crate::http::admin::{answer_json, parameter, refused};
use crate::http::metrics::is_live;

pub(crate) const PAGE: &str = "/status";
pub(crate) const JSON: &str = "/status.json";

/// The page, with placeholders for its style and its script.
const HTML: &str = include_str!("status/page.html");
const STYLE: &str = include_str!("status/page.css");
const SCRIPT: &str = include_str!("status/page.js");

/// Most segments in the JSON.
const SEGMENTS: usize = 4_096;

/// Returns the complete page.
fn page() -> Bytes {
    static WHOLE: OnceLock<Bytes> = OnceLock::new();
    let whole = || Bytes::from(HTML.replace("/*style*/", STYLE).replace("/*script*/", SCRIPT));
    WHOLE.get_or_init(whole).clone()
}

/// Content security policy: the page may connect to this server, and draw. The browser itself rejects markup from text.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; \
                      img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
                      require-trusted-types-for 'script'; trusted-types 'none'";

/// Answers `GET` and `HEAD` with the page.
pub(crate) fn answer_page(request: &Request<Incoming>) -> Response<Full<Bytes>> {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return response(StatusCode::METHOD_NOT_ALLOWED, TEXT, "Only GET and HEAD are served.\n");
    }
    let mut response = Response::new(Full::new(page()));
    let headers: [(HeaderName, &str); 5] = [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CONTENT_SECURITY_POLICY, POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-cache"),
    ];
    for (name, value) in headers {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Answers with the page's data. `map` is the epoch of the slots that the requester has: slots are sent if the epoch
/// differs.
pub(crate) fn answer(control: &Control, request: &Request<Incoming>) -> Answer {
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return (StatusCode::METHOD_NOT_ALLOWED, TEXT, "Only GET and HEAD are served.\n".into());
    }
    let known = parameter(request, "map").and_then(|epoch| epoch.parse().ok());
    match status(control, known) {
        Ok(value) => answer_json(StatusCode::OK, &value),
        Err(refusal) => refused(&refusal),
    }
}

fn status(control: &Control, known: Option<u64>) -> Result<Value, kvplane_rpc::Refusal> {
    let view = View::of(&control.cluster)?;
    let slots = if known == Some(view.epoch) { None } else { Some(control.cluster.lock()?.slots()) };
    Ok(json!({
        "software": SOFTWARE,
        "cluster": view.cluster,
        "epoch": view.epoch,
        "uptime_ns": view.uptime_ns,
        "members": members(&view),
        "segments": segments(&view),
        "more_segments": view.segments.len().saturating_sub(SEGMENTS),
        "slots": slots.map(|map| json!({ "epoch": map.epoch, "owners": map.owners, "slots": map.slots })),
        "conductor": control.conductor.as_ref().map(|conductor| conductor.status()),
    }))
}

/// Returns the live members with their shards.
fn members(view: &View) -> Vec<Value> {
    let of = |member: &kvplane_rpc::message::MemberStatus| {
        let reported =
            view.shards.iter().find(|node| (node.node, node.incarnation) == (member.node, member.incarnation));
        let shards = reported.map(|node| node.shards.iter().map(shard).collect::<Vec<_>>());
        json!({
            "node": member.node.to_string(),
            "state": member.state,
            "host": member.host,
            "failure_domain": member.failure_domain,
            "weight": member.weight,
            "version": member.version,
            "silent_ns": member.silent_ns,
            "capacity_bytes": member.load.map_or(member.capacity_bytes, |load| load.capacity_bytes),
            "used_bytes": member.load.map(|load| load.used_bytes),
            "objects": member.load.map(|load| load.objects),
            "shards": shards.unwrap_or_default(),
        })
    };
    view.members.iter().filter(|member| is_live(member)).map(of).collect()
}

fn shard(shard: &ShardFigures) -> Value {
    json!({
        "shard": shard.shard,
        "address": shard.address,
        "objects": shard.objects,
        "pool_bytes": shard.pool.bytes,
        "used_bytes": shard.pool.used_bytes,
        "connections": shard.connections,
        "hits": shard.gets.hits,
        "misses": shard.gets.misses,
        "ssd_hits": shard.ssd.map(|ssd| ssd.hits),
        "get_bytes": shard.gets.bytes,
        "put_bytes": shard.puts.bytes,
        "puts": shard.puts.objects,
        "evictions": shard.evictions.objects,
    })
}

fn segments(view: &View) -> Vec<Value> {
    let of = |segment: &kvplane_rpc::message::Segment| {
        let (owner, node) = match segment.owner {
            SegmentOwner::Node { node, .. } => ("node", node.0),
            SegmentOwner::Client { client } => ("client", client.0),
        };
        json!({
            "name": segment.name,
            "owner": owner,
            // Numbers of 64 bits are not exact in JavaScript.
            "of": node.to_string(),
            "kind": match segment.kind {
                SegmentKind::Dram => "memory",
                SegmentKind::Gpu => "gpu",
                SegmentKind::Nvme => "ssd",
            },
            "bytes": segment.bytes,
            "used_bytes": crate::http::admin::used_bytes(view, segment),
            "address": segment.address.to_string(),
        })
    };
    view.segments.iter().take(SEGMENTS).map(of).collect()
}
