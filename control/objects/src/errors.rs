//! Failures of a store, by what an operator does about them.

use std::error::Error;
use std::io;

use kvplane_shared::StoreError;

/// Longest text of a reason.
const REASON_BYTES: usize = 300;

/// Returns what a failure of the store means.
pub(crate) fn error_of(error: &object_store::Error) -> StoreError {
    let text = text_of(error);
    let answer = Answer::of(&text);
    let reason = reason_of(&text, &answer);
    // Without the bucket there is nothing of what it had: that says nothing of the object.
    if answer.code == "NoSuchBucket" {
        return StoreError::Absent { reason };
    }
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
    match answer.status_number() {
        401 | 403 => StoreError::Denied { reason },
        _ if DENIALS.contains(&answer.code) => StoreError::Denied { reason },
        429 | 503 => StoreError::Throttled { reason },
        _ if THROTTLES.iter().any(|sign| answer.code.contains(sign)) => StoreError::Throttled { reason },
        507 => StoreError::NoSpace { reason },
        _ => StoreError::Other { reason },
    }
}

/// Codes of S3 that mean that credentials are missing, wrong or out of date, whatever the status is.
const DENIALS: [&str; 6] = [
    "AccessDenied",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
];
/// Parts of codes of S3 that mean that there are too many requests.
const THROTTLES: [&str; 4] = ["SlowDown", "Throttl", "TooManyRequests", "RequestLimitExceeded"];

/// Answer of an S3 service as the text of an error has it; parts that it lacks are empty.
struct Answer<'a> {
    /// Number and name of the status.
    status: &'a str,
    code: &'a str,
    message: &'a str,
    /// Text before the answer.
    before: &'a str,
}

impl<'a> Answer<'a> {
    fn of(text: &'a str) -> Self {
        let element = |name: &str| {
            let (_, rest) = text.split_once(&format!("<{name}>"))?;
            Some(rest.split_once(&format!("</{name}>"))?.0)
        };
        let (before, status) = text
            .split_once("status code: ")
            .map_or((text, ""), |(before, after)| (before, after.split([':', '<']).next().unwrap_or_default().trim()));
        // The body of an answer may have a key's id, or a token.
        let before = before.split_once("<Error>").map_or(before, |(before, _)| before);
        let before = before.split_once("Server returned").map_or(before, |(before, _)| before);
        let (code, message) = (element("Code").unwrap_or_default(), element("Message").unwrap_or_default());
        Self { status, code, message, before: before.trim_end_matches([' ', '-', ':']) }
    }

    fn status_number(&self) -> u16 {
        self.status.split(' ').next().and_then(|number| number.parse().ok()).unwrap_or(0)
    }
}

/// Returns a text for operators: the answer of the service first, and then as much of the rest as fits.
fn reason_of(text: &str, answer: &Answer<'_>) -> String {
    let Answer { status, code, message, before } = *answer;
    let parts = [status, code, message].into_iter().filter(|part| !part.is_empty());
    let answered = parts.collect::<Vec<_>>().join(", ");
    let mut reason = if answered.is_empty() { text.to_owned() } else { format!("{answered}: {before}") };
    if let Some((at, _)) = reason.char_indices().find(|(at, _)| *at >= REASON_BYTES) {
        reason.truncate(at);
        reason.push_str("...");
    }
    reason
}

/// Returns the text of an error with its causes, as far as they add to it.
fn text_of(error: &object_store::Error) -> String {
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
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(text: String) -> StoreError {
        error_of(&object_store::Error::Generic { store: "S3", source: text.into() })
    }

    /// Text of a request that failed, for an object of a long name.
    fn refused(status: &str, body: &str) -> String {
        let name = "prefix/".repeat(60);
        let answer = format!("Server returned non-2xx status code: {status}: {body}");
        format!("Error performing PUT http://host/bucket/{name} in 3.2s - {answer}")
    }

    #[test]
    fn the_answer_is_classified_and_shown_however_long_the_name_is() {
        let body =
            |code: &str| format!("<Error><Code>{code}</Code><Message>why</Message><Token-0>secret</Token-0></Error>");
        let denied = generic(refused("400 Bad Request", &body("ExpiredToken")));
        let StoreError::Denied { reason } = denied else { panic!("{denied:?}") };
        assert!(reason.starts_with("400 Bad Request, ExpiredToken, why: "), "{reason}");
        assert!(reason.len() <= REASON_BYTES + 3 && !reason.contains("secret"), "{reason}");
        for (status, code) in
            [("503 Service Unavailable", "SlowDown"), ("503 Service Unavailable", ""), ("400 x", "Throttling")]
        {
            let found = generic(refused(status, &body(code)));
            assert!(matches!(found, StoreError::Throttled { .. }), "{found:?}");
        }
        let full = generic(refused("507 Insufficient Storage", &body("XMinioStorageFull")));
        assert!(matches!(full, StoreError::NoSpace { .. }), "{full:?}");
        let other = generic(refused("500 Internal Server Error", ""));
        let StoreError::Other { reason } = other else { panic!("{other:?}") };
        assert!(reason.starts_with("500 Internal Server Error: "), "{reason}");
        assert_eq!(
            generic("no route".to_owned()),
            StoreError::Other { reason: "Generic S3 error: no route".to_owned() }
        );
    }

    #[test]
    fn a_missing_bucket_is_no_missing_object() {
        let not_found = |code: &str| {
            let text = refused("404 Not Found", &format!("<Error><Code>{code}</Code></Error>"));
            error_of(&object_store::Error::NotFound { path: "a".to_owned(), source: text.into() })
        };
        assert!(matches!(not_found("NoSuchBucket"), StoreError::Absent { .. }));
        assert_eq!(not_found("NoSuchKey"), StoreError::NotFound);
    }
}
