//! Notices: short messages that one engine sends to the user of another, and the JSON of all replies.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Text of the reply to a notice that was accepted.
pub(crate) const TAKEN: &str = "success";
/// Reply to a probe.
pub(crate) const ALIVE: &str = r#"{"status":"success"}"#;

/// Message to the user of an engine.
#[allow(missing_docs, reason = "the fields are named for what they hold")]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Notice {
    /// Sender or subject, as the users agree.
    pub name: String,
    #[serde(rename = "notify_msg")]
    pub message: String,
}

/// Error of bytes that are not a notice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MalformedNotice(String);

impl fmt::Display for MalformedNotice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the notice cannot be read: {}", self.0)
    }
}

impl std::error::Error for MalformedNotice {}

impl Notice {
    /// Decodes JSON.
    ///
    /// # Errors
    /// If it is not an object with the two texts.
    pub fn decode(bytes: &[u8]) -> Result<Self, MalformedNotice> {
        serde_json::from_slice(bytes).map_err(|error| MalformedNotice(error.to_string()))
    }

    /// Encodes JSON.
    #[must_use]
    pub fn encode(&self) -> String {
        serde_json::json!({ "name": self.name, "notify_msg": self.message }).to_string()
    }
}

/// Returns the reply to a notice: accepted, or the reason of the refusal.
pub(crate) fn reply_to_notice(refusal: Option<&str>) -> String {
    let message = refusal.map_or_else(|| TAKEN.to_owned(), |reason| format!("refused: {reason}"));
    Notice { name: String::new(), message }.encode()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn notices_are_as_stock_engines_have_them() {
        let notice = Notice { name: "a".to_owned(), message: "b\n\"c\"".to_owned() };
        assert_eq!(notice.encode(), r#"{"name":"a","notify_msg":"b\n\"c\""}"#);
        assert_eq!(Notice::decode(notice.encode().as_bytes()), Ok(notice));
        assert_eq!(reply_to_notice(None), r#"{"name":"","notify_msg":"success"}"#);
        assert_eq!(reply_to_notice(Some("full")), r#"{"name":"","notify_msg":"refused: full"}"#);
        for bad in ["", "{}", "[]", r#"{"name":1,"notify_msg":""}"#, r#"{"name":"a"}"#, "{\"name\":\"\x01\"}"] {
            assert!(Notice::decode(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn any_text_travels(name in "\\PC*", message in any::<String>()) {
            let notice = Notice { name, message };
            prop_assert_eq!(Notice::decode(notice.encode().as_bytes()), Ok(notice));
        }
    }
}
