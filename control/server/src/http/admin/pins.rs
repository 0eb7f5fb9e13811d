//! Pins over HTTP: soft pins in the paths of Mooncake's master, retentions, and priorities of objects.
//!
//! | request | body | effect |
//! |---|---|---|
//! | `POST /api/v1/soft_pin` | `keys`, `ttl_ms` (half an hour if absent) | gives objects soft pins |
//! | `POST /api/v1/soft_unpin` | `keys` | ends soft pins |
//! | `POST /api/v1/retain` | `retention` and perhaps `keys`, or `group`; `ttl_ms` | adds to a retention, or renews it |
//! | `POST /api/v1/release` | `retention` | ends a retention |
//! | `POST /api/v1/priority` | `keys`, `priority` | sets the priority of objects |

use std::fmt;
use std::time::Duration;

use hyper::StatusCode;
use kvplane_proto::message::{ObjectPriority, PriorityOutOfRange};
use serde_json::{Value, json};
use tokio::task::spawn_blocking;

use super::{INTERNAL, INVALID_PARAMS, NO_SPACE, OBJECT_NOT_FOUND, UNAVAILABLE, failure, ok};
use crate::http::Answer;
use crate::http::objects::{ObjectsAccess, Pin, PinOutcome, PinResult};

/// Paths of the pins.
pub(super) const SOFT_PIN: &str = "/api/v1/soft_pin";
pub(super) const SOFT_UNPIN: &str = "/api/v1/soft_unpin";
pub(super) const RETAIN: &str = "/api/v1/retain";
pub(super) const RELEASE: &str = "/api/v1/release";
pub(super) const PRIORITY: &str = "/api/v1/priority";

/// Duration of a soft pin that names none, as Mooncake's.
const SOFT_PIN_TTL: Duration = Duration::from_millis(1_800_000);
/// Most keys of one request.
const KEYS_MOST: usize = 4_096;

/// Path of a pin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PinPath {
    SoftPin,
    SoftUnpin,
    Retain,
    Release,
    Priority,
}

impl PinPath {
    /// Returns the pin of a path.
    pub(super) fn of(path: &str) -> Option<Self> {
        Some(match path {
            SOFT_PIN => Self::SoftPin,
            SOFT_UNPIN => Self::SoftUnpin,
            RETAIN => Self::Retain,
            RELEASE => Self::Release,
            PRIORITY => Self::Priority,
            _ => return None,
        })
    }
}

/// Returns a number of a body, as a number or, where JavaScript's would not be exact, as text.
fn number(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.parse().ok())
}

/// Reason why a body is refused.
#[derive(Clone, PartialEq, Eq, Debug)]
enum BodyError {
    /// The call has no such field: it would do something else than meant.
    Unknown { field: String, known: &'static [&'static str] },
    /// The keys are missing, none, too many or no texts.
    Keys,
    /// The field is missing or no number.
    Number(&'static str),
    /// The priority is missing or no whole number.
    Priority,
    /// The priority is out of range.
    Range(PriorityOutOfRange),
    /// A retention and a group, or neither, or a group and keys.
    Selection,
}

impl fmt::Display for BodyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { field, known } => {
                write!(
                    f,
                    "the body has a {field:?}, which this call does not know; its fields are {}",
                    known.join(", ")
                )
            }
            Self::Keys => write!(f, "the body must have keys, 1 to {KEYS_MOST} texts"),
            Self::Number(field) => write!(f, "the body must have a {field}, a number of 64 bits"),
            Self::Priority => f.write_str("the body must have a priority, a whole number from -4 to 4"),
            Self::Range(error) => error.fmt(f),
            Self::Selection => f.write_str(
                "the body must have a retention, with or without keys, or a group, whose number is the retention's",
            ),
        }
    }
}

/// Decodes a body.
fn decode(path: PinPath, body: &Value) -> Result<Pin, BodyError> {
    let known: &[&str] = match path {
        PinPath::SoftPin => &["keys", "ttl_ms"],
        PinPath::SoftUnpin => &["keys"],
        PinPath::Release => &["retention"],
        PinPath::Priority => &["keys", "priority"],
        PinPath::Retain => &["keys", "ttl_ms", "retention", "group"],
    };
    let fields = body.as_object().into_iter().flatten().map(|(field, _)| field);
    if let Some(other) = fields.into_iter().find(|field| !known.contains(&field.as_str())) {
        return Err(BodyError::Unknown { field: other.clone(), known });
    }
    let text = |key: &Value| key.as_str().map(str::to_owned);
    let keys = match body.get("keys") {
        None => None,
        Some(keys) => {
            let keys: Option<Vec<String>> = keys.as_array().ok_or(BodyError::Keys)?.iter().map(text).collect();
            Some(keys.filter(|keys| (1..=KEYS_MOST).contains(&keys.len())).ok_or(BodyError::Keys)?)
        }
    };
    let field = |name| body.get(name).map(|value| number(value).ok_or(BodyError::Number(name))).transpose();
    let ttl = field("ttl_ms")?.map(Duration::from_millis);
    let (retention, group) = (field("retention")?, field("group")?);
    match path {
        PinPath::SoftPin => {
            Ok(Pin::Soft { keys: keys.ok_or(BodyError::Keys)?, ttl: Some(ttl.unwrap_or(SOFT_PIN_TTL)) })
        }
        PinPath::SoftUnpin => Ok(Pin::Soft { keys: keys.ok_or(BodyError::Keys)?, ttl: None }),
        PinPath::Release => Ok(Pin::Release { retention: retention.ok_or(BodyError::Number("retention"))? }),
        PinPath::Priority => {
            let number = body.get("priority").and_then(Value::as_i64).ok_or(BodyError::Priority)?;
            let priority = ObjectPriority::new(number).map_err(BodyError::Range)?;
            Ok(Pin::Priority { keys: keys.ok_or(BodyError::Keys)?, priority })
        }
        PinPath::Retain => {
            let ttl = ttl.ok_or(BodyError::Number("ttl_ms"))?;
            match (retention, keys, group) {
                (Some(retention), Some(keys), None) => Ok(Pin::Retain { retention, keys, ttl }),
                (Some(retention), None, None) => Ok(Pin::Renew { retention, ttl }),
                (None, None, Some(group)) => Ok(Pin::Group { group, ttl }),
                _ => Err(BodyError::Selection),
            }
        }
    }
}

/// Answers a request to pin objects of a tenant.
pub(super) async fn answer(objects: &ObjectsAccess, tenant: String, path: PinPath, body: &Value) -> Answer {
    let Some(objects) = objects.0.clone() else { return super::objects::no_way() };
    let pin = match decode(path, body) {
        Ok(pin) => pin,
        Err(reason) => return failure(StatusCode::BAD_REQUEST, INVALID_PARAMS, &reason.to_string()),
    };
    match spawn_blocking(move || objects.pin(&tenant, &pin)).await {
        Ok(Ok(outcome)) => shown(&outcome),
        Ok(Err(error)) => failure(StatusCode::SERVICE_UNAVAILABLE, UNAVAILABLE, &error.to_string()),
        Err(error) => failure(StatusCode::INTERNAL_SERVER_ERROR, INTERNAL, &error.to_string()),
    }
}

fn shown(outcome: &PinOutcome) -> Answer {
    let results = match outcome {
        PinOutcome::Count(objects) => return ok(&json!({ "success": true, "objects": objects })),
        PinOutcome::Full(reason) => return failure(StatusCode::INSUFFICIENT_STORAGE, NO_SPACE, reason),
        PinOutcome::Wrong(reason) => return failure(StatusCode::BAD_REQUEST, INVALID_PARAMS, reason),
        PinOutcome::Each(results) => results,
    };
    let pinned = results.iter().filter(|(_, pinned)| *pinned == PinResult::Yes).count();
    let result = |(key, pinned): &(String, PinResult)| {
        // The code is that of Mooncake's master, whose results have nothing else beside the key.
        let (there, error, code) = match pinned {
            PinResult::Yes => (true, Value::Null, 0),
            PinResult::NotFound => (false, "not in memory".into(), OBJECT_NOT_FOUND),
            PinResult::Failed(reason) => (false, reason.as_str().into(), INTERNAL),
        };
        json!({ "key": key, "pinned": there, "error": error, "error_code": code })
    };
    let results: Vec<Value> = results.iter().map(result).collect();
    ok(&json!({ "success": pinned == results.len(), "objects": pinned, "results": results }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_have_the_codes_of_mooncakes_master() {
        let results = [
            ("a", PinResult::Yes, 0),
            ("b", PinResult::NotFound, -704),
            ("c", PinResult::Failed("no answer".to_owned()), -1),
        ];
        let outcomes = results.iter().map(|(key, pinned, _)| ((*key).to_owned(), pinned.clone()));
        let outcome = PinOutcome::Each(outcomes.collect());
        let shown: Value = serde_json::from_slice(&shown(&outcome).2).expect("JSON");
        for (result, (key, _, code)) in shown["results"].as_array().expect("results").iter().zip(&results) {
            assert_eq!((&result["key"], &result["error_code"]), (&json!(key), &json!(code)));
        }
        assert_eq!((&shown["success"], &shown["objects"]), (&json!(false), &json!(1)));
    }

    #[test]
    fn bodies_are_decoded_or_refused_with_the_field() {
        let ttl = Duration::from_millis(500);
        let keys = vec!["a".to_owned()];
        let good = [
            (PinPath::SoftPin, json!({ "keys": ["a"] }), Pin::Soft { keys: keys.clone(), ttl: Some(SOFT_PIN_TTL) }),
            (PinPath::SoftUnpin, json!({ "keys": ["a"] }), Pin::Soft { keys: keys.clone(), ttl: None }),
            (
                PinPath::Retain,
                json!({ "retention": "18446744073709551615", "keys": ["a"], "ttl_ms": 500 }),
                Pin::Retain { retention: u64::MAX, keys, ttl },
            ),
            (PinPath::Retain, json!({ "retention": 7, "ttl_ms": 500 }), Pin::Renew { retention: 7, ttl }),
            (PinPath::Retain, json!({ "group": 7, "ttl_ms": 500 }), Pin::Group { group: 7, ttl }),
            (PinPath::Release, json!({ "retention": 7 }), Pin::Release { retention: 7 }),
            (
                PinPath::Priority,
                json!({ "keys": ["a"], "priority": -4 }),
                Pin::Priority { keys: vec!["a".to_owned()], priority: ObjectPriority::LOWEST },
            ),
        ];
        for (path, body, expected) in good {
            assert_eq!(decode(path, &body), Ok(expected), "{body}");
        }
        let wrong = [
            (PinPath::SoftPin, json!({}), "keys"),
            // It would end the whole retention.
            (PinPath::Release, json!({ "retention": 7, "keys": ["a"] }), "its fields are retention"),
            (PinPath::SoftPin, json!({ "keys": ["a"], "ttl": 1 }), "keys, ttl_ms"),
            // A parameter of the address, not of the body.
            (PinPath::SoftPin, json!({ "keys": ["a"], "tenant_id": "t" }), "tenant_id"),
            (PinPath::SoftPin, json!({ "keys": [] }), "keys"),
            (PinPath::SoftPin, json!({ "keys": [1] }), "keys"),
            (PinPath::SoftPin, json!({ "keys": ["a"], "ttl_ms": -1 }), "ttl_ms"),
            (PinPath::Retain, json!({ "retention": 7 }), "ttl_ms"),
            (PinPath::Retain, json!({ "keys": ["a"], "ttl_ms": 1 }), "retention"),
            (PinPath::Retain, json!({ "group": 1, "retention": 2, "ttl_ms": 1 }), "group"),
            (PinPath::Release, json!({ "retention": "x" }), "retention"),
            (PinPath::Priority, json!({ "keys": ["a"] }), "a priority, a whole number from -4 to 4"),
            (PinPath::Priority, json!({ "keys": ["a"], "priority": 0.5 }), "a whole number"),
            (PinPath::Priority, json!({ "keys": ["a"], "priority": 5 }), "from -4 to 4, not 5"),
            (PinPath::Priority, json!({ "priority": 1 }), "keys"),
        ];
        for (path, body, field) in wrong {
            let reason = decode(path, &body).expect_err("it is wrong").to_string();
            assert!(reason.contains(field), "{body}: {reason}");
        }
    }
}
