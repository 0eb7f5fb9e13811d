//! Rule: files stay under 500 lines and functions under 70; exceptions are listed with their length and only shrink.
//!
//! The list is `tools/xtask/ratchet.txt`: a line `path lines` for a file, `path#function lines` for a function. An
//! exception that grew fails, and so does one that is larger than what it excuses: the list is always exact. What
//! several functions of one name in a file need is one entry, for the longest.

use std::collections::BTreeMap;

use super::Violation;
use super::lex;
use super::syntax;
use super::tree::Tree;

/// Where the exceptions are listed.
pub const RATCHET: &str = "tools/xtask/ratchet.txt";
const MAX_FILE_LINES: usize = 500;
const MAX_FUNCTION_LINES: usize = 70;

/// Something that is measured: how long it is, where it begins, and what it may be.
struct Measurement<'a> {
    path: &'a str,
    line: usize,
    lines: usize,
    limit: usize,
}

/// Checks every Rust source against the limits and the list.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    let measured = measure(tree);
    let exceptions = exceptions(tree, out);
    for (name, found) in &measured {
        let excused = exceptions.get(name).map(|(lines, _)| *lines);
        if found.lines <= found.limit.max(excused.unwrap_or(0)) {
            continue;
        }
        let message = match excused {
            Some(excused) => format!("{name} grew from {excused} to {} lines; exceptions only shrink", found.lines),
            None => format!("{name} has {} lines, over {}; split it by what it does", found.lines, found.limit),
        };
        out.push(Violation::new(found.path, found.line, message));
    }
    for (name, (lines, line)) in &exceptions {
        let message = match measured.get(name) {
            None => format!("{name} does not exist; remove this line"),
            Some(found) if found.lines <= found.limit => {
                format!("{name} has {} lines and needs no exception; remove this line", found.lines)
            }
            Some(found) if found.lines < *lines => format!("{name} has {} lines now; lower it to that", found.lines),
            Some(_) => continue,
        };
        out.push(Violation::new(RATCHET, *line, message));
    }
}

fn measure(tree: &Tree) -> BTreeMap<String, Measurement<'_>> {
    let mut measured = BTreeMap::new();
    for file in tree.rust() {
        let path = file.path.as_str();
        let whole = Measurement { path, line: 1, lines: file.text.lines().count(), limit: MAX_FILE_LINES };
        measured.insert(path.to_string(), whole);
        for function in syntax::functions(&lex::tokens(&file.code)) {
            let lines = function.lines();
            let found = Measurement { path, line: function.first_line, lines, limit: MAX_FUNCTION_LINES };
            let longest = measured.entry(format!("{path}#{}", function.name)).or_insert(found);
            if lines > longest.lines {
                (longest.line, longest.lines) = (function.first_line, lines);
            }
        }
    }
    measured
}

/// The listed exceptions: lines excused, and the line of the list.
fn exceptions(tree: &Tree, out: &mut Vec<Violation>) -> BTreeMap<String, (usize, usize)> {
    let mut exceptions = BTreeMap::new();
    let text = tree.file(RATCHET).map_or("", |file| file.text.as_str());
    for (index, line) in text.lines().enumerate() {
        if line.is_empty() || line.starts_with("# ") {
            continue;
        }
        let parsed = line.rsplit_once(' ').and_then(|(name, lines)| Some((name, lines.parse::<usize>().ok()?)));
        match parsed {
            Some((name, lines)) => {
                exceptions.insert(name.to_string(), (lines, index + 1));
            }
            None => out.push(Violation::new(RATCHET, index + 1, "not of the form `path lines`")),
        }
    }
    exceptions
}

#[cfg(test)]
mod tests {
    use super::super::testing::found;
    use super::*;

    fn messages(files: &[(&str, &str)]) -> Vec<String> {
        found(check, files).iter().map(|found| format!("{}:{} {}", found.path, found.line, found.message)).collect()
    }

    fn function(lines: usize) -> String {
        format!("//! x\nfn long() {{\n{}}}\n", "    a();\n".repeat(lines - 2))
    }

    #[test]
    fn the_limits_hold_exactly() {
        assert_eq!(messages(&[("a.rs", &function(70))]), Vec::<String>::new());
        assert!(messages(&[("a.rs", &function(71))])[0].starts_with("a.rs:2 a.rs#long has 71 lines, over 70"));
        assert_eq!(messages(&[("a.rs", &"//\n".repeat(500))]), Vec::<String>::new());
        assert!(messages(&[("a.rs", &"//\n".repeat(501))])[0].starts_with("a.rs:1 a.rs has 501 lines, over 500"));
    }

    #[test]
    fn exceptions_only_shrink() {
        let source = function(80);
        let with = |list: &str| messages(&[("a.rs", &source), (RATCHET, list)]);
        assert_eq!(with("# why\na.rs#long 80\n"), Vec::<String>::new());
        assert!(with("a.rs#long 79\n")[0].contains("grew from 79 to 80"));
        assert!(with("a.rs#long 81\n")[0].contains("lower it"));
        assert!(with("a.rs#long 80\na.rs 600\n")[0].contains("ratchet.txt:2 a.rs has 81 lines and needs no exception"));
        assert!(with("a.rs#long 80\nb.rs 600\n")[0].contains("does not exist"));
        assert!(with("a.rs#long 80\nb.rs\n")[0].contains("not of the form"));
    }
}
