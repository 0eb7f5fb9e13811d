//! Text in XML and HTML.

use std::borrow::Cow;

/// Escapes text for an element or a quoted attribute of XML or HTML. Line breaks and tabs become blanks; characters
/// that XML 1.0 cannot represent at all become U+FFFD.
#[must_use]
pub fn escape(text: &str) -> Cow<'_, str> {
    let special = |letter: char| replacement(letter).is_some();
    if !text.contains(special) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for letter in text.chars() {
        match replacement(letter) {
            Some(other) => out.push_str(other),
            None => out.push(letter),
        }
    }
    Cow::Owned(out)
}

fn replacement(letter: char) -> Option<&'static str> {
    Some(match letter {
        '&' => "&amp;",
        '<' => "&lt;",
        '>' => "&gt;",
        '"' => "&quot;",
        '\'' => "&#39;",
        '\n' | '\r' | '\t' => " ",
        '\u{fffe}' | '\u{ffff}' => "\u{fffd}",
        control if control.is_control() => "\u{fffd}",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_in_names_is_shown_not_obeyed() {
        let name = "<script>alert('x')</script>&\"\u{1}\n\u{ffff}é";
        let escaped = "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&amp;&quot;\u{fffd} \u{fffd}é";
        assert_eq!(escape(name), escaped);
        assert!(matches!(escape("plain.jsonl"), Cow::Borrowed(_)));
    }
}
