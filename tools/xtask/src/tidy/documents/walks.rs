//! Rule: the walks in `docs/architecture.md` lead through code that exists, and are short.
//!
//! The section `## Walks` follows requests through the code. Each `###` below it is a walk; a section without any is
//! one walk. In a walk, `` `path/file.rs` `` is a stop, from the root or from any folder where that names one file;
//! names in backticks directly behind it, `` `function` `` or `` `Type::function` ``, are functions of that file. A
//! walk has at most nine different files: what leads through more is not a path but a tour.

use std::collections::BTreeSet;

use crate::tidy::Violation;
use crate::tidy::sources::tree::{File, Tree};

const DOCUMENT: &str = "docs/architecture.md";
const SECTION: &str = "## Walks";
const WALK: &str = "### ";
const MOST_FILES: usize = 9;

/// Checks the section, where there is one.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    let Some(document) = tree.file(DOCUMENT) else { return };
    let lines = document.text.lines().enumerate().map(|(at, text)| (at + 1, text));
    let section = lines.skip_while(|(_, text)| text.trim_end() != SECTION).skip(1);
    let section: Vec<(usize, &str)> = section.take_while(|(_, text)| !text.starts_with("## ")).collect();
    let Some((first, _)) = section.first() else { return };
    let mut walk = Walk { line: first - 1, name: "this walk", files: BTreeSet::new() };
    for (line, text) in section {
        if let Some(name) = text.strip_prefix(WALK) {
            walk.end(out);
            walk = Walk { line, name: name.trim(), files: BTreeSet::new() };
        } else {
            walk.follow(tree, line, text, out);
        }
    }
    walk.end(out);
}

/// One walk, as far as it is read.
struct Walk<'a> {
    line: usize,
    name: &'a str,
    files: BTreeSet<&'a str>,
}

impl<'a> Walk<'a> {
    fn follow(&mut self, tree: &'a Tree, line: usize, text: &str, out: &mut Vec<Violation>) {
        let mut report = |message: String| out.push(Violation::new(DOCUMENT, line, message));
        // Text and names in backticks take turns; the text says whether the next name belongs to the last stop.
        let mut parts = text.split('`');
        let mut between = parts.next().unwrap_or_default();
        let mut stop: Option<&File> = None;
        while let Some(name) = parts.next() {
            if name.ends_with(".rs") {
                stop = match named(tree, name).as_slice() {
                    [file] => {
                        self.files.insert(&file.path);
                        Some(*file)
                    }
                    [] => {
                        report(format!("there is no `{name}`; mend the walk"));
                        None
                    }
                    several => {
                        report(format!("`{name}` may be any of {} files; name more of its path", several.len()));
                        None
                    }
                };
            } else if let Some(file) = stop.filter(|_| is_beside(between) && is_function_name(name)) {
                if !has_function(file, name) {
                    report(format!("`{}` has no function `{name}`; mend the walk", file.path));
                }
            } else {
                stop = None;
            }
            between = parts.next().unwrap_or_default();
        }
    }

    fn end(&self, out: &mut Vec<Violation>) {
        let count = self.files.len();
        if count > MOST_FILES {
            let message = format!(
                "{} leads through {count} files, over {MOST_FILES}; shorten the way through the \
                                   code, or cut the walk in two",
                self.name
            );
            out.push(Violation::new(DOCUMENT, self.line, message));
        }
    }
}

/// The files at this path, from the root or from any folder.
fn named<'a>(tree: &'a Tree, path: &str) -> Vec<&'a File> {
    match tree.file(path) {
        Some(file) => vec![file],
        None => {
            let ending = format!("/{path}");
            tree.rust().filter(|file| file.path.ends_with(&ending)).collect()
        }
    }
}

/// Whether nothing but the target of a link and punctuation stands between two names in backticks.
fn is_beside(between: &str) -> bool {
    let behind_link = between.strip_prefix("](").and_then(|rest| rest.split_once(')')).map(|(_, rest)| rest);
    behind_link.unwrap_or(between).chars().all(|character| " ,:()[]|".contains(character))
}

fn is_function_name(name: &str) -> bool {
    let name = name.strip_suffix("()").unwrap_or(name);
    name.split("::")
        .all(|part| !part.is_empty() && part.chars().all(|letter| letter.is_alphanumeric() || letter == '_'))
}

fn has_function(file: &File, name: &str) -> bool {
    let name = name.strip_suffix("()").unwrap_or(name);
    let (owner, name) = match name.rsplit_once("::") {
        Some((owner, name)) => (owner.rsplit("::").next(), name),
        None => (None, name),
    };
    let belongs = |found: Option<&str>| owner.is_none() || found == owner;
    let mut functions = file.outline.functions.iter();
    functions.any(|function| function.name == name && belongs(function.owner.as_deref()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::testing::{found, places};

    const SOURCE: &str = "fn get() {}\nimpl Store { fn put() {} }\n";

    fn messages(section: &str) -> Vec<String> {
        let document = format!("# A\n`gone.rs`\n## Walks\n{section}\n## Next\n`gone.rs` `f`\n");
        let files = [(DOCUMENT, document.as_str()), ("a/src/x.rs", SOURCE), ("b/src/x.rs", ""), ("b/src/y.rs", SOURCE)];
        found(check, &files).iter().map(|found| format!("{} {}", found.line, found.message)).collect()
    }

    #[test]
    fn stops_and_functions_that_exist_pass() {
        let section = "### A get\n1. [`a/src/x.rs`](../a/src/x.rs) `get` finds it, `any word` and `elsewhere` too.\n\
                       2. `y.rs`: `Store::put`, `get()`, then `src/y.rs` and `S` | `T`.\n";
        assert_eq!(messages(section), Vec::<String>::new());
        assert!(places(check, &[(DOCUMENT, "# A\n")]).is_empty());
        assert!(places(check, &[]).is_empty());
    }

    #[test]
    fn what_does_not_exist_is_named() {
        let cases = [
            ("`a/src/z.rs` `get`", "4 there is no `a/src/z.rs`"),
            ("`src/x.rs` `get`", "4 `src/x.rs` may be any of 2 files"),
            ("`a/src/x.rs` `got`", "4 `a/src/x.rs` has no function `got`"),
            ("`a/src/x.rs` `get`, `got`", "4 `a/src/x.rs` has no function `got`"),
            ("[`a/src/x.rs`](../a/src/x.rs) `Store::get`", "4 `a/src/x.rs` has no function `Store::get`"),
            ("`b/src/x.rs` `put`", "4 `b/src/x.rs` has no function `put`"),
        ];
        for (section, expected) in cases {
            let messages = messages(section);
            assert!(messages.len() == 1 && messages[0].starts_with(expected), "{section}: {messages:?}");
        }
    }

    #[test]
    fn walks_are_short() {
        let sources: Vec<String> = (0..10).map(|index| format!("a/src/f{index}.rs")).collect();
        let stops = |count: usize| sources[..count].iter().map(|path| format!("* `{path}`\n")).collect::<String>();
        let document = format!("# A\n## Walks\n### One\n{}### Two\n{}### Three\n{}", stops(9), stops(10), stops(9));
        let mut files: Vec<(&str, &str)> = sources.iter().map(|path| (path.as_str(), "")).collect();
        files.push((DOCUMENT, &document));
        assert_eq!(places(check, &files), [format!("{DOCUMENT}:13")]);
        let document = format!("# A\n## Walks\n{0}{0}{1}", stops(9), stops(10));
        files.pop();
        files.push((DOCUMENT, &document));
        assert_eq!(places(check, &files), [format!("{DOCUMENT}:2")]);
    }
}
