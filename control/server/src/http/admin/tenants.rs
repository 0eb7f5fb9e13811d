//! Tenant quotas, in the paths and the JSON of Mooncake's master: `/api/v1/tenant_quotas`.
//!
//! | request | action |
//! |---|---|
//! | `GET` | returns all tenants, or with `?tenant_id=` one |
//! | `PUT ?tenant_id=`, body `{"requested_quota_bytes": n}`, optionally with `weight`, `ssd_quota_bytes` (null for no
//!   quota) and `ssd_weight`; with one of the latter two the first may be left out | creates or changes a tenant |
//! | `DELETE ?tenant_id=` | removes a tenant without objects |

use std::fmt;

use hyper::body::Incoming;
use hyper::{Method, Request, StatusCode};
use kvplane_rpc::message::{
    RemoveTenant, SetTenant, SetTenantSsd, Tenant, TenantList, TenantSsd, TenantSsdList, TenantSsdStatus, TenantStatus,
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
    let list = control.cluster.lock().map(|hosted| (hosted.tenants(), hosted.tenant_ssds()));
    let (list, ssds) = match list {
        Ok(lists) => lists,
        Err(refusal) => return refused(&refusal),
    };
    let former = list.tenants.into_iter().find(|one| one.name == name && one.is_set);
    let former_ssd = ssds.tenants.into_iter().find(|one| one.name == name).map(|one| one.ssd).unwrap_or_default();
    let ssd = match ssd_of(&body, former_ssd) {
        Ok(ssd) => ssd,
        Err(error) => return bad(&error.to_string()),
    };
    let quota = match body.get("requested_quota_bytes") {
        None if ssd.is_some() => former.as_ref().and_then(|tenant| tenant.dram_bytes),
        quota => match quota.and_then(Value::as_u64).filter(|quota| (1..=i64::MAX as u64).contains(quota)) {
            Some(quota) => Some(quota),
            None => return bad("the body must have requested_quota_bytes, from 1 to 2^63 - 1"),
        },
    };
    let weight = former.as_ref().map_or(1, |tenant| tenant.weight);
    let weight =
        body.get("weight").map_or(Some(weight.into()), Value::as_u64).and_then(|weight| weight.try_into().ok());
    let Some(weight) = weight else { return bad("weight must be a number from 1 to 1000") };
    let tenant = Tenant { name: name.to_owned(), dram_bytes: quota, weight };
    let set_ssd = |ssd| control.set_tenant_ssd_now(SetTenantSsd { name: name.to_owned(), ssd }).map(|_| ());
    // What can be refused comes first: a refused request changes nothing.
    let is_new = former.is_none();
    let set = match ssd {
        Some(ssd) if !is_new => set_ssd(ssd).and_then(|()| control.set_tenant_now(SetTenant { tenant }).map(|_| ())),
        Some(ssd) => {
            let set = control.set_tenant_now(SetTenant { tenant }).and_then(|_| set_ssd(ssd));
            set.inspect_err(|_| {
                let removed = RemoveTenant { name: name.to_owned(), only_empty: false };
                let _ = control.remove_tenant_now(removed);
            })
        }
        None => control.set_tenant_now(SetTenant { tenant }).map(|_| ()),
    };
    match set {
        Ok(()) => show(control, Some(name)),
        Err(refusal) => failed(&refusal, name),
    }
}

/// Setting on SSDs that a body has, and that is none.
#[derive(Clone, Copy, Debug)]
enum BadSsd {
    Quota,
    Weight,
}

impl fmt::Display for BadSsd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Quota => "ssd_quota_bytes must be a number from 0 to 2^63 - 1, or null for no quota",
            Self::Weight => "ssd_weight must be a number from 1 to 1000",
        })
    }
}

/// Returns the settings on SSDs that a body requests, if it requests any.
fn ssd_of(body: &Value, former: TenantSsd) -> Result<Option<TenantSsd>, BadSsd> {
    let (quota, weight) = (body.get("ssd_quota_bytes"), body.get("ssd_weight"));
    let ssd_bytes = match quota {
        None => former.ssd_bytes,
        Some(Value::Null) => None,
        Some(quota) => match quota.as_u64().filter(|quota| *quota <= i64::MAX as u64) {
            Some(quota) => Some(quota),
            None => return Err(BadSsd::Quota),
        },
    };
    let weight_of = |weight: &Value| weight.as_u64().and_then(|weight| u32::try_from(weight).ok());
    let new = match weight {
        None => former.weight.filter(|_| ssd_bytes != Some(0)),
        Some(weight) => Some(weight_of(weight).ok_or(BadSsd::Weight)?),
    };
    Ok((quota.is_some() || weight.is_some()).then_some(TenantSsd { ssd_bytes, weight: new }))
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
