//! Tenant quotas, in the paths and the JSON of Mooncake's master: `/api/v1/tenant_quotas`.
//!
//! | request | action |
//! |---|---|
//! | `GET` | returns all tenants, or with `?tenant_id=` one |
//! | `PUT ?tenant_id=`, body `{"requested_quota_bytes": n}`, optionally with `weight` | creates or changes a tenant |
//! | `DELETE ?tenant_id=` | removes a tenant without objects |

use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode};
use kvplane_rpc::message::{RemoveTenant, SetTenant, Tenant, TenantList, TenantStatus};
use kvplane_rpc::{Refusal, RefusalCode};
use serde_json::{Value, json};

use super::{INTERNAL, INVALID_PARAMS, failure, json_body, ok, parameter, refused};
use crate::control::Control;
use crate::http::Answer;

const TENANT_NOT_REGISTERED: i32 = -1701;
const TENANT_NOT_EMPTY: i32 = -1702;

/// Answers a request, its body included.
pub(super) async fn answer(control: &Control, request: Request<Incoming>) -> Answer {
    let named = parameter(&request, "tenant_id");
    let method = request.method().clone();
    match (method, named) {
        (Method::GET | Method::HEAD, name) => show(control, name.as_deref().map(internal)),
        (Method::PUT, Some(name)) => put(control, internal(&name), request).await,
        (Method::DELETE, Some(name)) => delete(control, internal(&name)),
        (Method::PUT | Method::DELETE, None) => {
            failure(StatusCode::BAD_REQUEST, INVALID_PARAMS, "the query must have a tenant_id")
        }
        _ => failure(StatusCode::METHOD_NOT_ALLOWED, INVALID_PARAMS, "GET, PUT and DELETE are served here"),
    }
}

/// Maps `default` to the empty name of the default tenant.
fn internal(name: &str) -> &str {
    if name == "default" { "" } else { name }
}

fn external(name: &str) -> &str {
    if name.is_empty() { "default" } else { name }
}

fn no_tenant(name: &str) -> Answer {
    let reason = format!("TENANT_NOT_REGISTERED: there is no tenant {name:?}");
    failure(StatusCode::NOT_FOUND, TENANT_NOT_REGISTERED, &reason)
}

fn show(control: &Control, name: Option<&str>) -> Answer {
    let list = match control.cluster.lock() {
        Ok(hosted) => hosted.tenants(),
        Err(refusal) => return refused(&refusal),
    };
    let as_json = |tenant: &TenantStatus| as_json(tenant, &list);
    let data: Value = match name {
        None => list.tenants.iter().map(as_json).collect(),
        Some(name) => match list.tenants.iter().find(|tenant| tenant.name == name) {
            Some(tenant) => as_json(tenant),
            None => return no_tenant(name),
        },
    };
    ok(&json!({ "success": true, "data": data }))
}

/// Returns the effective quota of a tenant: if the quotas exceed the pools in sum, each is scaled down.
pub(crate) fn effective_bytes(tenant: &TenantStatus, list: &TenantList) -> u64 {
    let pool_bytes = list.pool_bytes;
    let asked: u64 = list.tenants.iter().filter_map(|tenant| tenant.dram_bytes).fold(0, u64::saturating_add);
    match tenant.dram_bytes {
        Some(quota) if asked > pool_bytes => (u128::from(pool_bytes) * u128::from(quota) / u128::from(asked)) as u64,
        Some(quota) => quota,
        None => pool_bytes,
    }
}

fn as_json(tenant: &TenantStatus, list: &TenantList) -> Value {
    let (requested, effective) = (tenant.dram_bytes.unwrap_or(0), effective_bytes(tenant, list));
    json!({
        "tenant_id": external(&tenant.name),
        "requested_quota_bytes": requested,
        "effective_quota_bytes": effective,
        "charged_bytes": tenant.used_bytes,
        // A tenant at its quota evicts its own objects: puts are admitted all the same.
        "admission_closed": tenant.dram_bytes == Some(0),
        "over_quota": tenant.dram_bytes.is_some_and(|quota| tenant.used_bytes > quota),
        "has_explicit_policy": tenant.is_set,
        "weight": tenant.weight,
        "leased_bytes": tenant.leased_bytes,
        "evicted_bytes": tenant.evicted_bytes,
        "rejects": tenant.refused,
    })
}

async fn put(control: &Control, name: &str, request: Request<Incoming>) -> Answer {
    let bad = |reason: &str| failure(StatusCode::BAD_REQUEST, INVALID_PARAMS, reason);
    let body = match json_body(request).await {
        Ok(body) => body,
        Err(answer) => return answer,
    };
    let quota = body.get("requested_quota_bytes").and_then(Value::as_u64);
    let Some(quota) = quota.filter(|quota| (1..=i64::MAX as u64).contains(quota)) else {
        return bad("the body must have requested_quota_bytes, from 1 to 2^63 - 1");
    };
    let list = control.cluster.lock().map(|hosted| hosted.tenants());
    let former = list.ok().and_then(|list| list.tenants.into_iter().find(|one| one.name == name));
    let former = former.map_or(1, |tenant| tenant.weight);
    let weight =
        body.get("weight").map_or(Some(former.into()), Value::as_u64).and_then(|weight| weight.try_into().ok());
    let Some(weight) = weight else { return bad("weight must be a number from 1 to 1000") };
    let tenant = Tenant { name: name.to_owned(), dram_bytes: Some(quota), weight };
    match control.set_tenant_now(SetTenant { tenant }) {
        Ok(_) => show(control, Some(name)),
        Err(refusal) => failed(&refusal, name),
    }
}

fn delete(control: &Control, name: &str) -> Answer {
    match control.remove_tenant_now(RemoveTenant { name: name.to_owned(), only_empty: true }) {
        Ok(_) => ok(&json!({ "success": true, "data": { "tenant_id": external(name) } })),
        Err(refusal) => failed(&refusal, name),
    }
}

fn failed(refusal: &Refusal, name: &str) -> Answer {
    let is = |code: RefusalCode| refusal.code == code as u16;
    if is(RefusalCode::NotFound) {
        return no_tenant(name);
    }
    let (status, code) = if is(RefusalCode::AlreadyExists) {
        (StatusCode::CONFLICT, TENANT_NOT_EMPTY)
    } else if is(RefusalCode::BadRequest) || is(RefusalCode::LimitReached) {
        (StatusCode::BAD_REQUEST, INVALID_PARAMS)
    } else {
        (StatusCode::INTERNAL_SERVER_ERROR, INTERNAL)
    };
    failure(status, code, &refusal.reason)
}
