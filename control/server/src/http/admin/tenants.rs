//! Tenant quotas, in the paths and the JSON of Mooncake's master: `/api/v1/tenant_quotas`.
//!
//! | request | action |
//! |---|---|
//! | `GET` | returns all tenants, or with `?tenant_id=` one |
//! | `PUT ?tenant_id=`, body `{"requested_quota_bytes": n}`, optionally with `weight`, `ssd_quota_bytes` (null for no
//!   quota) and `ssd_weight`; with one of the latter two the first may be left out | creates or changes a tenant |
//! | `DELETE ?tenant_id=` | removes a tenant without objects |
//!
//! A change that is refused, also because of a field that no tenant has, changes nothing.

use std::fmt;

use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode};
use kvplane_rpc::message::{
    RemoveTenant, SetTenant, TenantChange, TenantList, TenantSsdList, TenantSsdStatus, TenantStatus,
};
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
    let (list, ssds) = match control.cluster.lock() {
        Ok(hosted) => (hosted.tenants(), hosted.tenant_ssds()),
        Err(refusal) => return refused(&refusal),
    };
    let as_json = |tenant: &TenantStatus| as_json(tenant, &list, &ssds);
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

fn as_json(tenant: &TenantStatus, list: &TenantList, ssds: &TenantSsdList) -> Value {
    let ssd = ssds.tenants.iter().find(|one| one.name == tenant.name);
    let TenantSsdStatus { ssd, used_bytes, leased_bytes, evicted_bytes, refused, .. } =
        ssd.cloned().unwrap_or_default();
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
        "ssd_quota_bytes": ssd.ssd_bytes,
        "ssd_charged_bytes": used_bytes,
        "ssd_leased_bytes": leased_bytes,
        "ssd_evicted_bytes": evicted_bytes,
        "ssd_rejects": refused,
        "ssd_weight": ssd.weight.unwrap_or(1),
    })
}

async fn put(control: &Control, name: &str, request: Request<Incoming>) -> Answer {
    let bad = |reason: &str| failure(StatusCode::BAD_REQUEST, INVALID_PARAMS, reason);
    let body = match json_body(request).await {
        Ok(body) => body,
        Err(answer) => return answer,
    };
    let change = match change_of(name, &body) {
        Ok(change) => change,
        Err(error) => return bad(&error.to_string()),
    };
    match control.set_tenant_now(SetTenant { change }) {
        Ok(_) => show(control, Some(name)),
        Err(refusal) => failed(&refusal, name),
    }
}

/// Fault of a body that is to change a tenant.
#[derive(Debug)]
enum BadChange {
    Object,
    Field(String),
    Memory,
    Weight(&'static str),
    Ssd,
}

impl fmt::Display for BadChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Object => f.write_str("the body must be a JSON object"),
            Self::Field(name) => write!(f, "the body has a field {name:?}, which no tenant has"),
            Self::Memory => f.write_str("the body must have requested_quota_bytes, from 1 to 2^63 - 1"),
            Self::Weight(name) => write!(f, "{name} must be a number from 1 to 1000"),
            Self::Ssd => f.write_str("ssd_quota_bytes must be a number from 0 to 2^63 - 1, or null for no quota"),
        }
    }
}

/// Returns the change of a tenant that a body requests.
fn change_of(name: &str, body: &Value) -> Result<TenantChange, BadChange> {
    let bytes = |value: &Value, least: u64| value.as_u64().filter(|bytes| (least..=i64::MAX as u64).contains(bytes));
    let weight = |field: &'static str, value: &Value| {
        let weight = value.as_u64().and_then(|weight| weight.try_into().ok());
        weight.map(Some).ok_or(BadChange::Weight(field))
    };
    let mut change = TenantChange { name: name.to_owned(), ..TenantChange::default() };
    for (field, value) in body.as_object().ok_or(BadChange::Object)? {
        match field.as_str() {
            "requested_quota_bytes" => {
                change.dram_bytes = Some(Some(bytes(value, 1).ok_or(BadChange::Memory)?));
            }
            "weight" => change.weight = weight("weight", value)?,
            "ssd_quota_bytes" if value.is_null() => change.ssd_bytes = Some(None),
            "ssd_quota_bytes" => change.ssd_bytes = Some(Some(bytes(value, 0).ok_or(BadChange::Ssd)?)),
            "ssd_weight" => change.ssd_weight = weight("ssd_weight", value)?,
            other => return Err(BadChange::Field(other.to_owned())),
        }
    }
    if change.dram_bytes.is_none() && change.ssd_bytes.is_none() && change.ssd_weight.is_none() {
        return Err(BadChange::Memory);
    }
    Ok(change)
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
