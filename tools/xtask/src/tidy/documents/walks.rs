//! Rule: the walks in `docs/architecture.md` lead through code that exists, and are short.
//!
//! The section `## Walks` follows requests through the code. Each `###` below it is a walk; a section without any is
//! one walk. In a walk, a link to a source is a stop, and so is `` `path/file.rs` `` where it names one file, from the
//! root or from any folder. Names in backticks directly behind a stop, `` `function` ``, `` `Type::function` `` or
//! `` `Type` ``, are defined in that file. A walk has at most nine different files, so that it stays short enough to
//! follow.
//!
//! The stops of a walk between two blank lines follow each other as calls do: the function that is named first behind a
//! stop is called by a function that is named at the stop before it, or at one of those that had led there. Behind a
//! blank line the walk goes on elsewhere: in another thread or process, or when an answer has come. Further functions
//! of a stop are called from anywhere between the same blank lines.

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
    /// Stops since the last blank line.
    calls: Vec<Stop<'a>>,
    /// Last stop, and the text behind it or behind the function named last.
    stop: Option<&'a File>,
    behind: String,
}

/// Stop of a walk: a file, and the functions that are named behind it.
struct Stop<'a> {
    line: usize,
    file: &'a File,
    functions: Vec<&'a str>,
    /// A name behind the stop is not defined in the file.
    has_unknown_name: bool,
}

impl Stop<'_> {
    /// Returns true if one of the functions named here calls a function of this name. What lies outside all functions,
    /// such as a table of functions, counts for each.
    fn calls(&self, name: &str) -> bool {
        let outline = &self.file.outline;
        let calls = outline.calls.iter().filter(|call| call.name == last_part(name));
        let lines: Vec<usize> = calls.map(|call| call.line).collect();
        lines.iter().any(|line| {
            let around = || outline.functions.iter().filter(|one| (one.first_line..=one.last_line).contains(line));
            let is_named = |one: &str| around().any(|function| function.name == last_part(one));
            around().next().is_none() || self.functions.iter().any(|one| is_named(one))
        })
    }
}

/// Returns the name of a function without its type.
fn last_part(name: &str) -> &str {
    let name = name.strip_suffix("()").unwrap_or(name);
    name.rsplit("::").next().unwrap_or(name)
}

impl<'a> Walk<'a> {
    const fn new(tree: &'a Tree, line: usize, name: &'a str) -> Self {
        Self { tree, line, name, files: BTreeSet::new(), calls: Vec::new(), stop: None, behind: String::new() }
    }

    /// Reads a line, in which text and names in backticks alternate.
    fn follow(&mut self, line: usize, text: &'a str, out: &mut Vec<Violation>) {
        if text.trim().is_empty() {
            self.end_calls(out);
        }
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
                    self.calls.last_mut().into_iter().for_each(|stop| stop.has_unknown_name = true);
                } else if is_function(file, name)
                    && let Some(stop) = self.calls.last_mut()
                {
                    stop.functions.push(name);
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
                self.calls.push(Stop { line, file, functions: Vec::new(), has_unknown_name: false });
                self.stop = Some(file);
                return;
            }
            [] => format!("there is no `{name}`; fix the walk"),
            several => format!("`{name}` may be any of {} files; name more of its path", several.len()),
        };
        self.stop = None;
        out.push(Violation::new(DOCUMENT, line, fault));
    }

    /// Checks that the stops since the last blank line follow each other as calls do.
    fn end_calls(&mut self, out: &mut Vec<Violation>) {
        let stops = core::mem::take(&mut self.calls);
        let mut callers: Vec<&Stop<'_>> = Vec::new();
        for (at, stop) in stops.iter().enumerate() {
            let path = &stop.file.path;
            let fault = match stop.functions.first() {
                None if stop.has_unknown_name => None,
                None => Some(format!("the stop at `{path}` names no function of that file")),
                Some(_) if at == 0 => None,
                Some(first) => match callers.iter().rposition(|caller| caller.calls(first)) {
                    Some(caller) => {
                        callers.truncate(caller + 1);
                        None
                    }
                    None => Some(format!(
                        "no function named at the stops before calls `{first}` of `{path}`; name the one that does, or \
                         fix the walk"
                    )),
                },
            };
            callers.push(stop);
            let further = stop.functions.iter().skip(1).filter(|name| !stops.iter().any(|stop| stop.calls(name)));
            let further =
                further.map(|name| format!("no function named in this part of the walk calls `{name}` of `{path}`"));
            out.extend(fault.into_iter().chain(further).map(|fault| Violation::new(DOCUMENT, stop.line, fault)));
        }
    }

    fn end(&mut self, out: &mut Vec<Violation>) {
        self.end_calls(out);
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
    is_function(file, name) || file.outline.definitions.iter().any(|definition| definition.name == name)
}

fn is_function(file: &File, name: &str) -> bool {
    let name = name.strip_suffix("()").unwrap_or(name);
    let (owner, name) = match name.rsplit_once("::") {
        Some((owner, name)) => (owner.rsplit("::").next(), name),
        None => (None, name),
    };
    let belongs = |found: Option<&str>| owner.is_none() || found == owner;
    file.outline.functions.iter().any(|function| function.name == name && belongs(function.owner.as_deref()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::testing::{found, places};

    const SOURCE: &str = "fn get() { Store::put(); }\nstruct Store;\nimpl Store { fn put() { get() } }\n";

    fn messages(section: &str) -> Vec<String> {
        let document = format!("# A\n`gone.rs`\n## Walks\n{section}\n## Next\n`gone.rs` `f`\n");
        let files = [(DOCUMENT, document.as_str()), ("a/src/x.rs", SOURCE), ("b/src/x.rs", ""), ("b/src/y.rs", SOURCE)];
        found(check, &files).iter().map(|found| format!("{} {}", found.line, found.message)).collect()
    }

    #[test]
    fn stops_and_names_that_exist_pass() {
        let section = "### A get\n1. [`a/src/x.rs`](../a/src/x.rs) `get` finds it, `any word` and `elsewhere` too.\n\
                       2. `y.rs`: `Store::put`,\n   `get()`, `Store`, then `src/y.rs` `get` and `S` | `T`.\n\
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
        let source = |index: usize| (format!("a/src/f{index}.rs"), format!("fn f{index}() {{ f{}(); }}\n", index + 1));
        let sources: Vec<(String, String)> = (0..10).map(source).collect();
        let stop = |index: usize| format!("* `a/src/f{index}.rs` `f{index}`\n");
        let stops = |count: usize| (0..count).map(stop).collect::<String>();
        let document = format!("# A\n## Walks\n### One\n{}### Two\n{}### Three\n{}", stops(9), stops(10), stops(9));
        let mut files: Vec<(&str, &str)> = sources.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect();
        files.push((DOCUMENT, &document));
        assert_eq!(places(check, &files), [format!("{DOCUMENT}:13")]);
        let document = format!("# A\n## Walks\n{0}\n{0}\n{1}", stops(9), stops(10));
        files.pop();
        files.push((DOCUMENT, &document));
        assert_eq!(places(check, &files), [format!("{DOCUMENT}:2")]);
    }

    /// Returns the messages about a walk through these files.
    fn calls(section: &str) -> Vec<String> {
        let document = format!("# A\n## Walks\n{section}");
        let files = [
            (DOCUMENT, document.as_str()),
            ("a.rs", "fn a() { self.b(); E::e(); }\nfn other() { X::c(); }\n"),
            ("b.rs", "fn b() { d(); }\n#[test]\nfn tests() { c(); }\n"),
            ("c.rs", "fn c() {}\nfn unused() {}\n"),
            ("d.rs", "fn d() {}\nconst TABLE: [fn(); 1] = [|| x.c()];\n"),
            ("e.rs", "fn e() {}\n"),
        ];
        found(check, &files).iter().map(|found| format!("{} {}", found.line, found.message)).collect()
    }

    #[test]
    fn stops_follow_each_other_as_calls_do() {
        for section in [
            "* `a.rs` `a`\n* `b.rs` `b`\n* `d.rs` `d`\n* `c.rs` `c`\n",
            // Back to the first.
            "* `a.rs` `a`\n* `b.rs` `b`\n* `d.rs` `d`\n* `e.rs` `e`\n",
            "* `b.rs` `b`\n\n* `a.rs` `a`\n",
        ] {
            assert_eq!(calls(section), Vec::<String>::new(), "{section}");
        }
        for (section, expected) in [
            ("* `a.rs` `a`\n* `d.rs` `d`\n", "4 no function named at the stops before calls `d` of `d.rs`"),
            ("* `a.rs` `a`\n* `c.rs` `c`\n", "4 no function named at the stops before calls `c` of `c.rs`"),
            ("* `b.rs` `b`\n* `c.rs` `c`\n", "4 no function named at the stops before calls `c` of `c.rs`"),
            ("* `a.rs` `a`\n* `e.rs` `e`\n* `b.rs` `b`\n* `e.rs` `e`\n* `d.rs` `d`\n", "7 no function"),
            ("* `a.rs` `a`\n* `b.rs`\n", "4 the stop at `b.rs` names no function"),
            ("* `c.rs` `c`, `unused`\n", "3 no function named in this part of the walk calls `unused` of `c.rs`"),
        ] {
            let messages = calls(section);
            assert!(messages.len() == 1 && messages[0].starts_with(expected), "{section}: {messages:?}");
        }
    }
}
