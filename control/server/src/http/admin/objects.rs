//! Listing of all keys and removal of all objects: requested from the nodes, in pages, by a client of this process.

use hyper::StatusCode;
use kvplane_http::TEXT;
use serde_json::json;
use tokio::task::spawn_blocking;

use super::{INTERNAL, NOT_SUPPORTED, UNAVAILABLE, failure, ok};
use crate::http::Answer;
use crate::http::objects::ObjectsAccess;

/// Most keys in one answer.
const KEYS_MOST: usize = 1 << 20;

pub(super) fn no_way() -> Answer {
    let instead = "this control plane has no client access to the nodes' objects: with --identity it needs \
                   client.pem and client.key in that directory; or list them with kvplane ctl keys, and remove \
                   them with kvplane ctl delete-all";
    failure(StatusCode::NOT_IMPLEMENTED, NOT_SUPPORTED, instead)
}

/// Answers that the nodes could not be reached.
fn unavailable(reason: &str) -> Answer {
    failure(StatusCode::SERVICE_UNAVAILABLE, UNAVAILABLE, reason)
}

fn trouble(reason: &str) -> Answer {
    failure(StatusCode::INTERNAL_SERVER_ERROR, INTERNAL, reason)
}

/// Answers `/get_all_keys`: one key per line.
pub(super) async fn keys(objects: &ObjectsAccess, tenant: String) -> Answer {
    let Some(objects) = objects.0.clone() else { return no_way() };
    match spawn_blocking(move || objects.keys(&tenant, KEYS_MOST)).await {
        Ok(Ok((keys, false))) => (StatusCode::OK, TEXT, (keys.join("\n") + "\n").into()),
        Ok(Ok((_, true))) => trouble(&format!("there are more than {KEYS_MOST} keys: kvplane ctl keys lists them")),
        Ok(Err(error)) => unavailable(&error.to_string()),
        Err(error) => trouble(&error.to_string()),
    }
}

/// Answers `/api/v1/remove_all`. Objects have no leases here, so the removal is always a forced one.
pub(super) async fn remove_all(objects: &ObjectsAccess, tenant: Option<String>) -> Answer {
    let Some(objects) = objects.0.clone() else { return no_way() };
    match spawn_blocking(move || objects.remove_all(tenant.as_deref())).await {
        Ok(Ok(removed)) => ok(&json!({ "success": true, "removed_count": removed })),
        Ok(Err(error)) => unavailable(&error.to_string()),
        Err(error) => trouble(&error.to_string()),
    }
}
