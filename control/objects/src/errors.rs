//! Failures of a store, by what an operator does about them.

use std::error::Error;
use std::io;

use kvplane_shared::StoreError;

/// Longest text of a reason.
const REASON_BYTES: usize = 300;

/// Returns what a failure of the store means.
pub(crate) fn error_of(error: &object_store::Error) -> StoreError {
    let reason = reason_of(error);
    match error {
        object_store::Error::NotFound { .. } => return StoreError::NotFound,
        object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => {
            return StoreError::Denied { reason };
        }
        _ => {}
    }
    let mut source: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(cause) = source {
        if let Some(error) = cause.downcast_ref::<io::Error>() {
            match error.kind() {
                io::ErrorKind::NotFound => return StoreError::NotFound,
                io::ErrorKind::PermissionDenied => return StoreError::Denied { reason },
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => return StoreError::NoSpace { reason },
                io::ErrorKind::ReadOnlyFilesystem => return StoreError::ReadOnly { reason },
                _ => {}
            }
        }
        source = cause.source();
    }
    // Statuses of requests are only in the text.
    let is_throttled = ["SlowDown", "status code: 503", "status code: 429", "Throttl", "TooManyRequests"];
    if is_throttled.iter().any(|sign| reason.contains(sign)) {
        return StoreError::Throttled { reason };
    }
    StoreError::Other { reason }
}

/// Returns the text of an error with its causes, as far as they add to it.
fn reason_of(error: &object_store::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let more = cause.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        source = cause.source();
    }
    let mut text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    if let Some((at, _)) = text.char_indices().find(|(at, _)| *at >= REASON_BYTES) {
        text.truncate(at);
        text.push_str("...");
    }
    text
}
