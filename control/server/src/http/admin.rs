//! HTTP for operators, in the paths and the JSON of Mooncake's tools, with some additions.
//!
//! | path | answer |
//! |---|---|
//! | `/debug/shards` | JSON: every shard with all its counters, latencies, and slow requests by stages |
//! | `/metrics/summary` | one line for operators |
//! | `/role`, `/ha_status`, `/leader` | the leader: this process |
//! | `/query_key?key=`, `/batch_query_keys?keys=` | locations of objects, requested from their owners |
//! | `/query_segment?segment=`, `/get_segments_detail`, `/api/v1/segments/status?segment=` | segments |
//! | `/kv_events/status` | counts of published events |
//! | `/get_all_keys` | keys of a tenant, one per line |
//! | `POST /api/v1/remove_all` | removes a tenant's objects |
//! | `POST /api/v1/soft_pin`, `soft_unpin`, `retain`, `release`, `priority` | pins and priorities, see [`pins`] |
//! | `/api/v1/tenant_quotas` | tenants and their quotas, see [`tenants`] |
//! | `/api/v1/drain_jobs`, `/query`, `/cancel` | nodes that are drained, see [`drains`] |
//!
//! Keys are those of the tenant named by `tenant_id`, or of the default tenant. Nodes report with their heartbeats, so
//! numbers are at most one interval old.

mod drains;
mod keys;
mod objects;
mod pins;
mod segments;
mod shards;
mod tenants;

use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode};
use kvplane_http::TEXT;
use percent_encoding::percent_decode_str;
use serde_json::{Value, json};

use crate::cluster::view::View;
use crate::http::{Answer, JSON, Pages};
pub(super) use drains::DrainJobs;
use kvplane_rpc::Refusal;
pub(crate) use segments::used_bytes;
pub use shards::shard_json;
pub(crate) use tenants::effective_bytes;

/// Mooncake's error codes, as far as its tools compare them.
const INTERNAL: i32 = -1;
const SEGMENT_NOT_FOUND: i32 = -101;
const NO_SPACE: i32 = -200;
const INVALID_PARAMS: i32 = -600;
const OBJECT_NOT_FOUND: i32 = -704;
const UNAVAILABLE: i32 = -1010;
const NOT_SUPPORTED: i32 = -1012;
const JOB_NOT_FOUND: i32 = -1402;

/// Most bytes of a JSON body.
const BODY_BYTES: usize = 64 << 10;

/// Served paths with other methods than GET.
const WRITTEN: [&str; 10] = [
    TENANT_QUOTAS,
    REMOVE_ALL,
    DRAIN_JOBS,
    DRAIN_QUERY,
    DRAIN_CANCEL,
    pins::SOFT_PIN,
    pins::SOFT_UNPIN,
    pins::RETAIN,
    pins::RELEASE,
    pins::PRIORITY,
];
const TENANT_QUOTAS: &str = "/api/v1/tenant_quotas";
const REMOVE_ALL: &str = "/api/v1/remove_all";
const DRAIN_JOBS: &str = "/api/v1/drain_jobs";
const DRAIN_QUERY: &str = "/api/v1/drain_jobs/query";
const DRAIN_CANCEL: &str = "/api/v1/drain_jobs/cancel";

/// Served paths with GET only.
const SERVED: [&str; 11] = [
    "/get_all_keys",
    "/debug/shards",
    "/metrics/summary",
    "/role",
    "/ha_status",
    "/leader",
    "/query_key",
    "/batch_query_keys",
    "/query_segment",
    "/get_segments_detail",
    "/kv_events/status",
];
const SEGMENT_STATUS: &str = "/api/v1/segments/status";

/// Returns the path's name in metrics, if it is one of these.
pub(crate) fn known(path: &str) -> Option<&'static str> {
    SERVED.iter().copied().chain([SEGMENT_STATUS]).chain(WRITTEN).find(|known| *known == path)
}

pub(crate) fn answer_json(status: StatusCode, value: &Value) -> Answer {
    (status, JSON, format!("{value}\n").into())
}

/// Encodes a failure in the form that Mooncake's tools parse.
pub(crate) fn failure(status: StatusCode, code: i32, message: &str) -> Answer {
    answer_json(status, &json!({ "success": false, "error_code": code, "error_message": message }))
}

pub(crate) fn refused(refusal: &Refusal) -> Answer {
    failure(StatusCode::SERVICE_UNAVAILABLE, UNAVAILABLE, &refusal.reason)
}

fn ok(value: &Value) -> Answer {
    answer_json(StatusCode::OK, value)
}

fn text(text: impl Into<String>) -> Answer {
    (StatusCode::OK, TEXT, text.into().into())
}

/// Returns a parameter of the query, decoded; the first of its name.
pub(crate) fn parameter(request: &Request<Incoming>, name: &str) -> Option<String> {
    let query = request.uri().query()?;
    let value = query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='))?;
    Some(percent_decode_str(&value.replace('+', " ")).decode_utf8_lossy().into_owned())
}

/// Reads a request's JSON body; returns the answer to send if it is not JSON.
async fn json_body(request: Request<Incoming>) -> Result<Value, Answer> {
    let bad = |reason: &str| failure(StatusCode::BAD_REQUEST, INVALID_PARAMS, reason);
    let body = Limited::new(request.into_body(), BODY_BYTES).collect().await;
    let body = body.map_err(|error| match error.downcast_ref::<LengthLimitError>() {
        Some(_) => {
            let why = format!("the body has more than {BODY_BYTES} bytes: name the keys in several requests");
            failure(StatusCode::PAYLOAD_TOO_LARGE, INVALID_PARAMS, &why)
        }
        None => bad("the body did not arrive"),
    })?;
    serde_json::from_slice(&body.to_bytes()).map_err(|_| bad("the body is not JSON"))
}

/// Answers a path that [`known`] accepts.
pub(crate) async fn answer(pages: &Pages, path: &'static str, request: Request<Incoming>) -> Answer {
    let control = &pages.control;
    if request.uri().query().is_some_and(|query| percent_decode_str(query).decode_utf8().is_err()) {
        // A name with a replacement character for invalid bytes would name no object.
        return failure(StatusCode::BAD_REQUEST, INVALID_PARAMS, "the query is not UTF-8");
    }
    if path == TENANT_QUOTAS {
        return tenants::answer(control, request).await;
    }
    if [DRAIN_JOBS, DRAIN_QUERY, DRAIN_CANCEL].contains(&path) {
        return pages.drains.answer(path, request).await;
    }
    // As in Mooncake, the default tenant's unless another is named.
    let tenant = parameter(&request, "tenant_id").filter(|tenant| tenant != "default").unwrap_or_default();
    let pin = pins::PinPath::of(path);
    if (path == REMOVE_ALL || pin.is_some()) && *request.method() != Method::POST {
        return failure(StatusCode::METHOD_NOT_ALLOWED, INVALID_PARAMS, "only POST is served here");
    }
    if path == REMOVE_ALL {
        return objects::remove_all(&pages.objects, Some(tenant)).await;
    }
    if let Some(pin) = pin {
        return match json_body(request).await {
            Ok(body) => pins::answer(&pages.objects, tenant, pin, &body).await,
            Err(answer) => answer,
        };
    }
    if !matches!(*request.method(), Method::GET | Method::HEAD) {
        return failure(StatusCode::METHOD_NOT_ALLOWED, INVALID_PARAMS, "only GET and HEAD are served here");
    }
    let view = match View::of(&control.cluster) {
        Ok(view) => view,
        Err(refusal) => return refused(&refusal),
    };
    let required = |name| {
        let value = parameter(&request, name).filter(|value| !value.is_empty());
        let missing = || failure(StatusCode::BAD_REQUEST, INVALID_PARAMS, &format!("the query must have a {name}"));
        value.ok_or_else(missing)
    };
    let answer = match path {
        "/debug/shards" => Ok(ok(&shards::all(&view))),
        "/metrics/summary" => Ok(text(summary(&view))),
        "/role" => Ok(text("leader")),
        "/ha_status" => Ok(text("serving")),
        "/leader" => {
            let address = control.address();
            Ok(ok(&json!({ "present": true, "leader_address": address, "view_version": view.epoch })))
        }
        "/query_key" => match required("key") {
            Ok(key) => Ok(keys::one(&control.cluster, &tenant, &key).await),
            Err(missing) => Err(missing),
        },
        "/batch_query_keys" => match required("keys") {
            Ok(keys) => Ok(keys::several(&control.cluster, &tenant, &keys).await),
            Err(missing) => Err(missing),
        },
        "/get_all_keys" => Ok(objects::keys(&pages.objects, tenant).await),
        "/query_segment" => required("segment").map(|name| segments::used(&view, &name)),
        "/get_segments_detail" => Ok(ok(&segments::detail(&view))),
        SEGMENT_STATUS => required("segment").map(|name| segments::status(&view, &name)),
        _ => Ok(ok(&events_status(&view))),
    };
    answer.unwrap_or_else(|answer| answer)
}

fn summary(view: &View) -> String {
    let shards = || view.shards.iter().flat_map(|node| &node.shards);
    let sum = |of: fn(&kvplane_rpc::message::ShardFigures) -> u64| shards().map(of).sum::<u64>();
    format!(
        "role=leader, state=serving, service_ready=true, epoch={}, members={}, segments={}, objects={}, used={} of {} \
         bytes, hits={}, misses={}, puts={}, evictions={}\n",
        view.epoch,
        view.members.iter().filter(|member| crate::http::metrics::is_live(member)).count(),
        view.segments.len(),
        sum(|shard| shard.objects),
        sum(|shard| shard.pool.used_bytes),
        sum(|shard| shard.pool.bytes),
        sum(|shard| shard.gets.hits),
        sum(|shard| shard.gets.misses),
        sum(|shard| shard.puts.objects),
        sum(|shard| shard.evictions.objects),
    )
}

fn events_status(view: &View) -> Value {
    let kept = view.shards.iter().flat_map(|node| &node.shards).map(|shard| shard.events);
    json!({
        "enabled": view.is_followed,
        "published_batches": view.published.reports,
        "published_events": view.published.events,
        "dropped_events": view.published.lost + kept.map(|events| events.lost).sum::<u64>(),
        "skipped_unparsed_keys": 0,
    })
}
