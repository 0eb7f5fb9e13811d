//! Just enough of Rust's lexical grammar for the rules: what is code, and what its tokens are.
//!
//! [`blank`] overwrites comments, strings and character literals with spaces and keeps every line where it is;
//! [`tokens`] splits the rest. Nested comments, raw strings, byte and C strings, lifetimes and raw identifiers are told
//! apart as the reference describes; a source that does not lex is the compiler's to report, and is blanked to its end.

/// One token of blanked source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Token<'a> {
    /// An identifier or number, `::`, or one other character.
    pub text: &'a str,
    /// Line, from 1.
    pub line: usize,
}

impl Token<'_> {
    /// Whether this is a word: an identifier, a keyword or a number.
    #[must_use]
    pub fn is_word(&self) -> bool {
        self.text.bytes().next().is_some_and(is_word_byte)
    }
}

const fn is_word_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || byte >= 0x80
}

/// `text` with all that is not code turned into spaces, byte for byte, line ends kept.
#[must_use]
pub fn blank(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = at + not_code(&bytes[at..], at > 0 && is_word_byte(bytes[at - 1]));
        if end == at {
            at += 1;
            continue;
        }
        for byte in &mut code[at..end] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at = end;
    }
    // Only whole comments and literals were overwritten, so what is left is as valid as before.
    String::from_utf8_lossy(&code).into_owned()
}

/// Length of the comment or literal that `rest` begins with, 0 where it begins with code.
fn not_code(rest: &[u8], within_word: bool) -> usize {
    match rest {
        [b'/', b'/', ..] => rest.iter().position(|&byte| byte == b'\n').unwrap_or(rest.len()),
        [b'/', b'*', ..] => block_comment(rest),
        [b'"', ..] => 1 + quoted(&rest[1..], b'"'),
        [b'\'', ..] => character(rest),
        [b'r' | b'b' | b'c', ..] if !within_word => prefixed_string(rest),
        _ => 0,
    }
}

fn block_comment(rest: &[u8]) -> usize {
    let mut depth = 0_usize;
    let mut at = 0;
    while at < rest.len() {
        match &rest[at..] {
            [b'/', b'*', ..] => {
                depth += 1;
                at += 2;
            }
            [b'*', b'/', ..] => {
                depth -= 1;
                at += 2;
                if depth == 0 {
                    return at;
                }
            }
            _ => at += 1,
        }
    }
    rest.len()
}

/// Length up to and with the closing `quote`, backslashes honoured.
fn quoted(rest: &[u8], quote: u8) -> usize {
    let mut at = 0;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            byte if byte == quote => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

/// A character literal; 0 for a lifetime, whose quote is followed by a word and no other quote.
fn character(rest: &[u8]) -> usize {
    match rest.get(1) {
        Some(b'\\') => 1 + quoted(&rest[1..], b'\''),
        Some(_) => {
            let next = rest.iter().skip(2).position(|byte| byte & 0xc0 != 0x80).map_or(rest.len(), |width| width + 2);
            if rest.get(next) == Some(&b'\'') { next + 1 } else { 0 }
        }
        None => 0,
    }
}

/// A string that begins with one of `r b br c cr`; 0 for a word that only looks like it.
fn prefixed_string(rest: &[u8]) -> usize {
    let prefix = rest.iter().take(2).take_while(|&&byte| matches!(byte, b'r' | b'b' | b'c')).count();
    let raw = rest[prefix - 1] == b'r';
    let hashes = rest[prefix..].iter().take_while(|&&byte| byte == b'#').count();
    let start = prefix + hashes;
    if rest.get(start) != Some(&b'"') || (hashes > 0 && !raw) {
        return 0;
    }
    let body = &rest[start + 1..];
    if !raw {
        return start + 1 + quoted(body, b'"');
    }
    let closes = |window: &[u8]| window[0] == b'"' && window[1..].iter().all(|&byte| byte == b'#');
    body.windows(hashes + 1).position(closes).map_or(rest.len(), |at| start + 1 + at + 1 + hashes)
}

/// The tokens of blanked source.
#[must_use]
pub fn tokens(code: &str) -> Vec<Token<'_>> {
    let mut tokens = Vec::new();
    for (index, line) in code.lines().enumerate() {
        let mut rest = line.trim_start();
        while !rest.is_empty() {
            let word = rest.bytes().position(|byte| !is_word_byte(byte)).unwrap_or(rest.len());
            let length = if word > 0 {
                word
            } else if rest.starts_with("::") {
                2
            } else {
                1
            };
            let (text, after) = rest.split_at(length);
            tokens.push(Token { text, line: index + 1 });
            rest = after.trim_start();
        }
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(source: &str) -> Vec<String> {
        tokens(&blank(source)).iter().map(|token| token.text.to_string()).collect()
    }

    #[test]
    fn comments_and_literals_vanish() {
        let cases = [
            ("a // unsafe\nb", "a b"),
            ("a /* x /* unsafe */ y */ b", "a b"),
            (r#"a "uns\"afe" b"#, "a b"),
            (r##"a r#"un"safe"# b"##, "a b"),
            (r#"a br"\" b"#, "a b"),
            (r#"a c"x" b"x" b"#, "a b"),
            (r"a '\'' '\u{41}' 'é' '\\' b", "a b"),
            ("f('{') b'\"' g", "f ( ) b g"),
            ("a /// \"quote\nb", "a b"),
        ];
        for (source, expected) in cases {
            assert_eq!(words(source).join(" "), expected, "{source}");
        }
    }

    #[test]
    fn lifetimes_and_raw_identifiers_stay() {
        assert_eq!(words("fn f<'a>(x: &'a str)").join(" "), "fn f < ' a > ( x : & ' a str )");
        assert_eq!(words("let r#type = bar\"x\"").join(" "), "let r # type = bar");
        assert_eq!(words("'outer: loop { break 'outer; }").join(" "), "' outer : loop { break ' outer ; }");
    }

    #[test]
    fn lines_and_lengths_are_kept() {
        let source = "a /* é\n\n */ \"x\ny\" b\n";
        let code = blank(source);
        assert_eq!(code.len(), source.len());
        assert_eq!(
            tokens(&code).iter().map(|token| (token.text, token.line)).collect::<Vec<_>>(),
            [("a", 1), ("b", 4)]
        );
    }

    #[test]
    fn sources_that_do_not_lex_end_quietly() {
        for source in ["\"open", "/* open", "r#\"open", "'", "'\\", "br", "\\", "b'"] {
            assert_eq!(blank(source).len(), source.len(), "{source}");
        }
    }
}
