//! `kvplane ctl keys`: lists objects.

use std::io::Write;

use kvplane::{Client, KeyInfo};

use crate::command::Failure;
use crate::command::size;

/// Prints the objects of all shards, page by page.
pub(super) fn list(client: &mut Client, long: bool, json: bool, limit: u64) -> Result<(), Failure> {
    let (mut cursor, mut left) = (None, limit);
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    while left > 0 {
        let page = client.keys().list(cursor)?;
        for key in page.keys.iter().take(usize::try_from(left).unwrap_or(usize::MAX)) {
            left -= 1;
            if json {
                writeln!(out, "{}", as_json(key))?;
            } else if long {
                let place = match (key.in_memory, key.on_ssd) {
                    (true, true) => "both",
                    (true, false) => "memory",
                    _ => "ssd",
                };
                writeln!(out, "{:>12}  {:>20}  {place:6}  {}", size::show(key.bytes), key.version, name_of(key))?;
            } else {
                writeln!(out, "{}", name_of(key))?;
            }
        }
        match page.next {
            Some(next) => cursor = Some(next),
            None => break,
        }
    }
    Ok(out.flush()?)
}

/// Formats the key, with escapes for bytes that are not text; or the digest of an object without a key.
pub(crate) fn name_of(key: &KeyInfo) -> String {
    if key.key.is_empty() {
        return format!("digest:{}", key.digest);
    }
    match std::str::from_utf8(&key.key) {
        Ok(text) if !text.chars().any(char::is_control) => text.to_owned(),
        _ => key.key.escape_ascii().to_string(),
    }
}

fn as_json(key: &KeyInfo) -> serde_json::Value {
    serde_json::json!({
        "key": name_of(key),
        "digest": key.digest.to_string(),
        "tenant": String::from_utf8_lossy(&key.tenant),
        "bytes": key.bytes,
        "version": key.version.0,
        "group": key.group,
        "data_type": key.data_type,
        "hard_pin": key.hard_pin,
        "soft_pin_ms": key.soft_pin_ms,
        "retained": key.retained,
        "priority": key.priority.number(),
        "in_memory": key.in_memory,
        "on_ssd": key.on_ssd,
    })
}
