//! What the rules recognise in a stream of tokens: items, test code, functions, paths and imports.
//!
//! Recognition is by brackets and keywords, which rustfmt'd source makes reliable. Macros are read as the code they
//! look like.

use std::ops::Range;

use super::lex::{Token, tokens};

/// Index just behind the item that begins at `start`: behind its closing brace, or its semicolon.
#[must_use]
pub fn item_end(tokens: &[Token<'_>], start: usize) -> usize {
    let mut depth = 0_usize;
    for (index, token) in tokens.iter().enumerate().skip(start) {
        match token.text {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => {
                depth = depth.saturating_sub(1);
                if depth == 0 && token.text == "}" {
                    return index + 1;
                }
            }
            ";" if depth == 0 => return index + 1,
            _ => {}
        }
    }
    tokens.len()
}

/// Index just behind the attribute whose `#` is at `start`.
fn attribute_end(tokens: &[Token<'_>], start: usize) -> usize {
    let mut depth = 0_usize;
    for (index, token) in tokens.iter().enumerate().skip(start) {
        match token.text {
            "[" => depth += 1,
            "]" if depth == 1 => return index + 1,
            "]" => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    tokens.len()
}

/// The token ranges of items that exist only in tests: under `#[cfg(test)]` or `#[test]`.
#[must_use]
pub fn test_items(tokens: &[Token<'_>]) -> Vec<Range<usize>> {
    let mut ranges = Vec::new();
    let mut at = 0;
    while at < tokens.len() {
        let opens = tokens[at].text == "#" && tokens.get(at + 1).is_some_and(|token| token.text == "[");
        if !opens {
            at += 1;
            continue;
        }
        let end = attribute_end(tokens, at);
        let words: Vec<&str> = tokens[at..end].iter().filter(|token| token.is_word()).map(|token| token.text).collect();
        let is_test = words == ["test"] || (words.first() == Some(&"cfg") && words.contains(&"test"));
        if !is_test || words.contains(&"not") {
            at = end;
            continue;
        }
        // Further attributes lie between this one and the item; the item's end is found behind them.
        let mut item = end;
        while tokens.get(item).is_some_and(|token| token.text == "#") {
            item = attribute_end(tokens, item);
        }
        let behind = item_end(tokens, item);
        ranges.push(at..behind);
        at = behind;
    }
    ranges
}

/// A function with a body.
#[derive(Debug, PartialEq, Eq)]
pub struct Function<'a> {
    /// Its name.
    pub name: &'a str,
    /// Line of `fn`.
    pub first_line: usize,
    /// Line of the closing brace.
    pub last_line: usize,
}

impl Function<'_> {
    /// How many lines it takes, attributes and comments above it not counted.
    #[must_use]
    pub const fn lines(&self) -> usize {
        self.last_line - self.first_line + 1
    }
}

/// Every function with a body, nested ones too.
#[must_use]
pub fn functions<'a>(tokens: &[Token<'a>]) -> Vec<Function<'a>> {
    let mut functions = Vec::new();
    for (index, pair) in tokens.windows(2).enumerate() {
        // `fn(` is a type, and `fn $name` stands in a macro that is not yet a function.
        if pair[0].text != "fn" || !pair[1].is_word() {
            continue;
        }
        let last = &tokens[item_end(tokens, index) - 1];
        if last.text == "}" {
            let (name, first_line) = (pair[1].text, pair[0].line);
            functions.push(Function { name, first_line, last_line: last.line });
        }
    }
    functions
}

/// One name brought in by a `use`, spelled out.
#[derive(Debug, PartialEq, Eq)]
pub struct Import<'a> {
    /// The segments of the path; a glob ends with `*`, and `self` is left out.
    pub path: Vec<&'a str>,
    /// Line of its last segment.
    pub line: usize,
    /// Index of its last token.
    pub index: usize,
}

/// Every import, with groups spelled out, and the token ranges of the `use` items.
#[must_use]
pub fn imports<'a>(tokens: &[Token<'a>]) -> (Vec<Import<'a>>, Vec<Range<usize>>) {
    let mut imports = Vec::new();
    let mut ranges = Vec::new();
    for index in 0..tokens.len() {
        let next = tokens.get(index + 1);
        // `use<'a>` is a bound, not an import.
        let begins = tokens[index].text == "use" && next.is_some_and(|next| next.is_word() || next.text != "<");
        if begins {
            let end = use_tree(tokens, index + 1, &[], &mut imports);
            ranges.push(index..end);
        }
    }
    (imports, ranges)
}

/// Spells out the use tree at `at` below `prefix`; returns the index of the token behind it.
fn use_tree<'a>(tokens: &[Token<'a>], mut at: usize, prefix: &[&'a str], out: &mut Vec<Import<'a>>) -> usize {
    let mut path = prefix.to_vec();
    let mut last = at;
    while let Some(token) = tokens.get(at) {
        match token.text {
            "{" => {
                at += 1;
                while tokens.get(at).is_some_and(|token| token.text != "}" && token.text != ";") {
                    at = use_tree(tokens, at, &path, out);
                    if tokens.get(at).is_some_and(|token| token.text == ",") {
                        at += 1;
                    }
                }
                return at + 1;
            }
            "," | "}" | ";" => break,
            "as" => at += 1,
            "::" | "#" | "self" | "r" => {}
            segment => {
                path.push(segment);
                last = at;
            }
        }
        at += 1;
    }
    if let Some(token) = tokens.get(last) {
        out.push(Import { path, line: token.line, index: last });
    }
    at
}

/// A path or macro to look for, such as `std::fs`, `thread::` or `dbg!`.
#[derive(Debug)]
pub struct Pattern {
    words: Vec<&'static str>,
}

impl Pattern {
    /// The pattern written in `text`.
    #[must_use]
    pub fn new(text: &'static str) -> Self {
        Self { words: tokens(text).iter().map(|token| token.text).collect() }
    }

    /// Whether it stands at `index`, at the beginning of a path.
    #[must_use]
    pub fn stands_at(&self, tokens: &[Token<'_>], index: usize) -> bool {
        let begins = index == 0 || tokens[index - 1].text != "::";
        let here = tokens.get(index..index + self.words.len());
        begins && here.is_some_and(|here| here.iter().map(|token| token.text).eq(self.words.iter().copied()))
    }

    /// Whether an import brings in what it names, or something below, or everything beside it.
    #[must_use]
    pub fn is_imported_by(&self, import: &Import<'_>) -> bool {
        let segments = self.words.iter().filter(|word| **word != "::");
        let mut wanted = segments.copied();
        for have in &import.path {
            match wanted.next() {
                None => return true,
                Some(_) if *have == "*" => return true,
                Some(want) if want != *have => return false,
                Some(_) => {}
            }
        }
        wanted.next().is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::super::lex::blank;
    use super::*;

    #[test]
    fn functions_are_measured_to_their_closing_brace() {
        let code = blank("fn a(x: [u8; 2]) -> u8 {\n  if x { \"}\" }\n}\ntrait T { fn b(&self); }\ntype F = fn(u8);\n");
        let tokens = tokens(&code);
        let functions = functions(&tokens);
        assert_eq!(functions, [Function { name: "a", first_line: 1, last_line: 3 }]);
        assert_eq!(functions[0].lines(), 3);
    }

    #[test]
    fn test_items_are_found_behind_further_attributes() {
        let code =
            "fn a() {}\n#[cfg(all(test, unix))]\n#[allow(x)]\nmod tests { fn b() {} }\n#[cfg(not(test))]\nfn c() {}";
        let tokens = tokens(code);
        let ranges = test_items(&tokens);
        assert_eq!(ranges.len(), 1);
        let lines: Vec<usize> = tokens[ranges[0].clone()].iter().map(|token| token.line).collect();
        assert_eq!((lines.first(), lines.last()), (Some(&2), Some(&4)));
    }

    #[test]
    fn use_trees_are_spelled_out() {
        let code = "use std::{fs, io::{self, Read as R}, net::*};\nuse a::b;\nfn f() -> impl X + use<'a> {}";
        let tokens = tokens(code);
        let (imports, ranges) = imports(&tokens);
        let paths: Vec<String> = imports.iter().map(|import| import.path.join("::")).collect();
        assert_eq!(paths, ["std::fs", "std::io", "std::io::Read", "std::net::*", "a::b"]);
        assert_eq!(ranges.len(), 2);
    }

    #[test]
    fn patterns_match_paths_from_their_beginning() {
        let found = |pattern, code: &str| {
            let tokens = tokens(code);
            let (pattern, count) = (Pattern::new(pattern), tokens.len());
            (0..count).filter(|&index| pattern.stands_at(&tokens, index)).count()
        };
        assert_eq!(found("thread::", "thread::spawn(); my::thread::x(); threads::y()"), 1);
        assert_eq!(found("dbg!", "dbg!(x); dbg(x)"), 1);
        let imported = |pattern, path: &[&'static str]| {
            Pattern::new(pattern).is_imported_by(&Import { path: path.to_vec(), line: 1, index: 0 })
        };
        assert!(imported("std::fs", &["std", "fs", "File"]));
        assert!(imported("std::time::Instant", &["std", "time", "*"]));
        assert!(!imported("std::time::Instant", &["std", "time", "Duration"]));
        assert!(!imported("std::time::Instant", &["std", "time"]));
    }
}
