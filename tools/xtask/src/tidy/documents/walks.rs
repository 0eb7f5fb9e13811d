//! Rule: the walks in `docs/architecture.md` lead through code that exists, and are short.
//!
//! The section `## Walks` follows requests through the code. Each `###` below it is a walk; a section without any is
//! one walk. In a walk, a link to a source is a stop, and so is `` `path/file.rs` `` where it names one file, from the
//! root or from any folder. Names in backticks directly behind a stop, `` `function` ``, `` `Type::function` `` or
//! `` `Type` ``, are defined in that file. A walk has at most nine different files, so that it stays short enough to
//! follow.

use std::collections::BTreeSet;

use crate::tidy::Violation;
use crate::tidy::sources::tree::{File, Tree};

const DOCUMENT: &str = "docs/architecture.md";
const SECTION: &str = "## Walks";
const WALK: &str = "### ";
const MOST_FILES: usize = 9;

/// Checks the section, if it exists.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    let Some(document) = tree.file(DOCUMENT) else { return };
    let lines = document.text.lines().enumerate().map(|(at, text)| (at + 1, text));
    let section = lines.skip_while(|(_, text)| text.trim_end() != SECTION).skip(1);
    let section: Vec<(usize, &str)> = section.take_while(|(_, text)| !text.starts_with("## ")).collect();
    let Some((first, _)) = section.first() else { return };
    let mut walk = Walk::new(tree, first - 1, "this walk");
    for (line, text) in section {
        match text.strip_prefix(WALK) {
            Some(name) => {
                walk.end(out);
                walk = Walk::new(tree, line, name.trim());
            }
            None => walk.follow(line, text, out),
        }
    }
    walk.end(out);
}

/// Walk in progress of reading.
struct Walk<'a> {
    tree: &'a Tree,
    line: usize,
    name: &'a str,
    files: BTreeSet<&'a str>,
    /// Last stop, and the text behind it or behind the function named last.
    stop: Option<&'a File>,
    behind: String,
}

impl<'a> Walk<'a> {
    const fn new(tree: &'a Tree, line: usize, name: &'a str) -> Self {
        Self { tree, line, name, files: BTreeSet::new(), stop: None, behind: String::new() }
    }

    /// Reads a line, in which text and names in backticks alternate.
    fn follow(&mut self, line: usize, text: &str, out: &mut Vec<Violation>) {
        let mut parts = text.split('`');
        self.behind.push('\n');
        self.read_text(line, parts.next().unwrap_or_default(), out);
        while let Some(name) = parts.next() {
            let behind = parts.next().unwrap_or_default();
            // The text of a link is not a stop by itself.
            let is_linked = behind.starts_with("](") && next_link(behind).is_some();
            if name.ends_with(".rs") && !is_linked {
                self.stop_at(line, name, &named(self.tree, name), out);
            } else if let Some(file) = self.stop.filter(|_| is_beside(&self.behind) && is_name(name)) {
                if !defines(file, name) {
                    let message = format!("`{}` defines no `{name}`; fix the walk", file.path);
                    out.push(Violation::new(DOCUMENT, line, message));
                }
            } else {
                self.stop = None;
            }
            self.behind.clear();
            self.read_text(line, behind, out);
        }
    }

    fn read_text(&mut self, line: usize, mut text: &str, out: &mut Vec<Violation>) {
        while let Some((target, rest)) = next_link(text) {
            let files: Vec<&File> = self.tree.file(&from_root(target)).into_iter().collect();
            self.stop_at(line, target, &files, out);
            self.behind.clear();
            text = rest;
        }
        self.behind += text;
    }

    fn stop_at(&mut self, line: usize, name: &str, files: &[&'a File], out: &mut Vec<Violation>) {
        let fault = match files {
            [file] => {
                self.files.insert(&file.path);
                self.stop = Some(file);
                return;
            }
            [] => format!("there is no `{name}`; fix the walk"),
            several => format!("`{name}` may be any of {} files; name more of its path", several.len()),
        };
        self.stop = None;
        out.push(Violation::new(DOCUMENT, line, fault));
    }

    fn end(&self, out: &mut Vec<Violation>) {
        let (name, count) = (self.name, self.files.len());
        if count > MOST_FILES {
            let message = format!(
                "{name} leads through {count} files, over {MOST_FILES}; shorten the way through the code, or cut the \
                 walk in two"
            );
            out.push(Violation::new(DOCUMENT, self.line, message));
        }
    }
}

/// Returns the target of the next link to a source of the tree, and the text behind the link.
fn next_link(mut text: &str) -> Option<(&str, &str)> {
    loop {
        let (target, rest) = text.split_once("](")?.1.split_once(')')?;
        let path = target.split('#').next().unwrap_or_default();
        if path.ends_with(".rs") && !path.contains("://") {
            return Some((path, rest));
        }
        text = rest;
    }
}

/// Returns the path from the root that a link in the document leads to.
fn from_root(target: &str) -> String {
    let folder = DOCUMENT.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut parts: Vec<&str> = Vec::new();
    for part in folder.split('/').chain(target.split('/')) {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            _ => parts.push(part),
        }
    }
    parts.join("/")
}

/// Returns the files at this path, from the root or from any folder.
fn named<'a>(tree: &'a Tree, path: &str) -> Vec<&'a File> {
    match tree.file(path) {
        Some(file) => vec![file],
        None => {
            let ending = format!("/{path}");
            tree.rust().filter(|file| file.path.ends_with(&ending)).collect()
        }
    }
}

/// Returns true if only blanks and punctuation stand between two names in backticks.
fn is_beside(between: &str) -> bool {
    between.chars().all(|character| " \n,:()[]|".contains(character))
}

fn is_name(name: &str) -> bool {
    let name = name.strip_suffix("()").unwrap_or(name);
    name.split("::")
        .all(|part| !part.is_empty() && part.chars().all(|letter| letter.is_alphanumeric() || letter == '_'))
}

fn defines(file: &File, name: &str) -> bool {
    let name = name.strip_suffix("()").unwrap_or(name);
    let (owner, name) = match name.rsplit_once("::") {
        Some((owner, name)) => (owner.rsplit("::").next(), name),
        None => (None, name),
    };
    let belongs = |found: Option<&str>| owner.is_none() || found == owner;
    let mut functions = file.outline.functions.iter();
    let mut definitions = file.outline.definitions.iter();
    functions.any(|function| function.name == name && belongs(function.owner.as_deref()))
        || (owner.is_none() && definitions.any(|definition| definition.name == name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::testing::{found, places};

    const SOURCE: &str = "fn get() {}\nstruct Store;\nimpl Store { fn put() {} }\n";

    fn messages(section: &str) -> Vec<String> {
        let document = format!("# A\n`gone.rs`\n## Walks\n{section}\n## Next\n`gone.rs` `f`\n");
        let files = [(DOCUMENT, document.as_str()), ("a/src/x.rs", SOURCE), ("b/src/x.rs", ""), ("b/src/y.rs", SOURCE)];
        found(check, &files).iter().map(|found| format!("{} {}", found.line, found.message)).collect()
    }

    #[test]
    fn stops_and_names_that_exist_pass() {
        let section = "### A get\n1. [`a/src/x.rs`](../a/src/x.rs) `get` finds it, `any word` and `elsewhere` too.\n\
                       2. `y.rs`: `Store::put`,\n   `get()`, `Store`, then `src/y.rs` and `S` | `T`.\n\
                       3. [`x.rs`](../a/src/x.rs#L2) `put`, [there](https://a/b.rs) `here`.\n";
        assert_eq!(messages(section), Vec::<String>::new());
        assert!(places(check, &[(DOCUMENT, "# A\n")]).is_empty());
        assert!(places(check, &[]).is_empty());
    }

    #[test]
    fn missing_files_and_names_are_named() {
        let cases = [
            ("`a/src/z.rs` `get`", "4 there is no `a/src/z.rs`"),
            ("`src/x.rs` `get`", "4 `src/x.rs` may be any of 2 files"),
            ("`a/src/x.rs` `got`", "4 `a/src/x.rs` defines no `got`"),
            ("`a/src/x.rs` `Shop`", "4 `a/src/x.rs` defines no `Shop`"),
            ("`a/src/x.rs` `get`, `got`", "4 `a/src/x.rs` defines no `got`"),
            ("`a/src/x.rs`\n`got`", "5 `a/src/x.rs` defines no `got`"),
            ("[the store](../a/src/x.rs#L1) `got`", "4 `a/src/x.rs` defines no `got`"),
            ("[`x.rs`](../a/src/x.rs) `got`", "4 `a/src/x.rs` defines no `got`"),
            ("[`y.rs`](../a/src/y.rs) `get`", "4 there is no `../a/src/y.rs`"),
            ("[`a/src/x.rs`](../a/src/x.rs) `Store::get`", "4 `a/src/x.rs` defines no `Store::get`"),
            ("`b/src/x.rs` `put`", "4 `b/src/x.rs` defines no `put`"),
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
