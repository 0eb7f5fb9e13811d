//! JSON texts of the model: those of `serde_json`, with the control characters escaped that it writes as they are (DEL
//! and the C1 range), because terminals obey them.

use serde::Serialize;
use serde_json::Serializer;
use serde_json::ser::Formatter;
use std::io::{self, Write};

/// Formats a value on one line without a line feed. The keys of its maps are texts, as JSON requires.
pub(crate) fn text(value: &(impl Serialize + ?Sized)) -> String {
    let mut out = Vec::new();
    let written = value.serialize(&mut Serializer::with_formatter(&mut out, TerminalSafe));
    // Writing to memory does not fail, and nothing here has another key or a failure of its own.
    written.ok().and_then(|()| String::from_utf8(out).ok()).unwrap_or_default()
}

/// Layout without blanks that escapes all control characters.
struct TerminalSafe;

impl Formatter for TerminalSafe {
    fn write_string_fragment<W: ?Sized + Write>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        for part in fragment.split_inclusive(char::is_control) {
            let plain = part.trim_end_matches(char::is_control);
            writer.write_all(plain.as_bytes())?;
            for control in part[plain.len()..].chars() {
                write!(writer, "\\u{:04x}", u32::from(control))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_control_characters_are_escaped() {
        let name = "a\"b\\c\nd\u{1}\u{7f}\u{1b}é\u{9b}\u{85}";
        assert_eq!(text(name), r#""a\"b\\c\nd\u0001\u007f\u001bé\u009b\u0085""#);
        assert_eq!(serde_json::from_str::<String>(&text(name)).unwrap(), name);
    }
}
