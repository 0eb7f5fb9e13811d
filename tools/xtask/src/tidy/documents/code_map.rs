//! Rule: the code map in `docs/architecture.md` matches the tree.
//!
//! The map lists every crate and, below it, every file and module directory at the top of its `src`, each with the
//! first sentence of its header. It is generated, so a header is written once and read in two places; the check
//! compares, and `cargo x tidy --write-map` writes.

use std::collections::BTreeMap;
use std::fmt;

use super::super::wording::header::first_sentence;
use crate::tidy::Violation;
use crate::tidy::sources::manifest::{self, Manifest};
use crate::tidy::sources::tree::{File, Tree};

/// The document that holds the map.
pub const DOCUMENT: &str = "docs/architecture.md";
const BEGIN: &str = "<!-- code-map -->";
const END: &str = "<!-- /code-map -->";
const SEPARATOR: &str = " — ";
const REMEDY: &str = "run `cargo x tidy --write-map`";

/// Compares the document's map with the tree.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    let Some(document) = tree.file(DOCUMENT) else {
        out.push(Violation::new(DOCUMENT, 1, "is missing; the code map belongs there"));
        return;
    };
    let Some((before, map, _)) = split(&document.text) else {
        let message = format!("has no code map between `{BEGIN}` and `{END}`; add both lines, then {REMEDY}");
        out.push(Violation::new(DOCUMENT, 1, message));
        return;
    };
    let first_line = before.lines().count() + 1;
    let listed = entries(map);
    let wanted_map = generate(tree);
    let wanted = entries(&wanted_map);
    let wanted_by_path: BTreeMap<&str, &str> = wanted.iter().map(|entry| (entry.path.as_str(), entry.what)).collect();
    for entry in &listed {
        let line = first_line + entry.line;
        match wanted_by_path.get(entry.path.as_str()) {
            None => out.push(Violation::new(DOCUMENT, line, format!("{} is not in the tree; {REMEDY}", entry.path))),
            Some(what) if *what != entry.what => {
                let message = format!("{} says in its header: {what}; {REMEDY}", entry.path);
                out.push(Violation::new(DOCUMENT, line, message));
            }
            Some(_) => {}
        }
    }
    for entry in &wanted {
        if !listed.iter().any(|listed| listed.path == entry.path) {
            let message = format!("{} is missing from the code map; {REMEDY}", entry.path);
            out.push(Violation::new(DOCUMENT, first_line, message));
        }
    }
}

/// Generates the map of the tree, fence included, ending with a line end.
#[must_use]
pub fn generate(tree: &Tree) -> String {
    let mut map = String::from("```text\n");
    for manifest in manifest::all(tree) {
        let files: Vec<&File> = tree.below(manifest.directory).collect();
        let source = |name: &str| tree.file(&format!("{}/src/{name}", manifest.directory));
        let root = source("lib.rs").or_else(|| source("main.rs"));
        map += &format!("{}{SEPARATOR}{}\n", manifest.directory, root.map(first_sentence).unwrap_or_default());
        for (path, file) in modules(&manifest, &files) {
            if root.is_none_or(|root| root.path != file.path) {
                map += &format!("  {path}{SEPARATOR}{}\n", first_sentence(file));
            }
        }
    }
    map + "```\n"
}

/// Returns the files at the top of a crate's `src`, and the directories there that have no file of their name, by path
/// from the crate; each with the file that describes it.
fn modules<'a>(manifest: &Manifest<'_>, files: &[&'a File]) -> BTreeMap<String, &'a File> {
    let source = format!("{}/src/", manifest.directory);
    let rust = files.iter().filter(|file| file.is_rust());
    let within: Vec<(&str, &'a File)> =
        rust.filter_map(|file| Some((file.path.strip_prefix(&source)?, *file))).collect();
    let mut modules = BTreeMap::new();
    for (path, file) in within {
        let parts: Vec<&str> = path.split('/').collect();
        match parts.as_slice() {
            // Files of a binary's directory are listed one by one: each is a program.
            ["bin", name] | [name] if !name.ends_with("tests.rs") => modules.insert(format!("src/{path}"), file),
            [directory, "mod.rs"] => modules.insert(format!("src/{directory}/"), file),
            _ => None,
        };
    }
    modules
}

/// Error of a document without the lines around its map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoMap;

impl fmt::Display for NoMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{DOCUMENT} lacks the lines `{BEGIN}` and `{END}`")
    }
}

impl std::error::Error for NoMap {}

/// Returns the document with `map` in place of its present map.
pub fn replace(document: &str, map: &str) -> Result<String, NoMap> {
    let (before, _, after) = split(document).ok_or(NoMap)?;
    Ok(format!("{before}{map}{after}"))
}

/// Splits the document into the text up to and including the line that opens the map, the map, and the rest.
fn split(document: &str) -> Option<(&str, &str, &str)> {
    let begin = document.find(&format!("{BEGIN}\n"))? + BEGIN.len() + 1;
    let end = begin + document[begin..].find(END)?;
    Some((&document[..begin], &document[begin..end], &document[end..]))
}

struct Entry<'a> {
    path: String,
    what: &'a str,
    /// Line within the map, from 0.
    line: usize,
}

/// Returns the entries of a map, nested paths joined with their crate's.
fn entries(map: &str) -> Vec<Entry<'_>> {
    let mut entries = Vec::new();
    let mut directory = "";
    for (line, text) in map.lines().enumerate() {
        let Some((path, what)) = text.split_once(SEPARATOR) else {
            continue;
        };
        let path = match path.strip_prefix("  ") {
            Some(nested) => format!("{directory}/{nested}"),
            None => {
                directory = path;
                path.to_string()
            }
        };
        entries.push(Entry { path, what, line });
    }
    entries
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::testing::found;

    const TREE: [(&str, &str); 7] = [
        ("b/a/Cargo.toml", "[package]\nname = \"a\"\n"),
        ("b/a/src/lib.rs", "//! The crate. More.\n"),
        ("b/a/src/index.rs", "//! The index.\n"),
        ("b/a/src/index/tests.rs", "//! Hidden.\n"),
        ("b/a/src/pins/mod.rs", "//! The pins.\n"),
        ("b/a/src/tests.rs", "//! Hidden too.\n"),
        ("b/a/tests/all.rs", "//! Hidden as well.\n"),
    ];
    const MAP: &str = "```text\nb/a — The crate\n  src/index.rs — The index\n  src/pins/ — The pins\n```\n";

    fn messages(map: &str) -> Vec<String> {
        let document = format!("# A\n{BEGIN}\n{map}{END}\n");
        let mut files = TREE.to_vec();
        files.push((DOCUMENT, &document));
        found(check, &files).iter().map(|found| format!("{} {}", found.line, found.message)).collect()
    }

    #[test]
    fn the_generated_map_passes() {
        assert_eq!(generate(&Tree::of(&TREE)), MAP);
        assert_eq!(messages(MAP), Vec::<String>::new());
    }

    #[test]
    fn every_difference_is_named() {
        let missing = messages(&MAP.replace("  src/pins/ — The pins\n", ""));
        assert!(missing[0].starts_with("3 b/a/src/pins/ is missing"), "{missing:?}");
        let gone = messages(&MAP.replace("```\n", "  src/old.rs — Old\n```\n"));
        assert!(gone[0].contains("b/a/src/old.rs is not in the tree"), "{gone:?}");
        let stale = messages(&MAP.replace("The index", "The list"));
        assert_eq!(stale.len(), 1);
        assert!(stale[0].starts_with("5 b/a/src/index.rs says in its header: The index"), "{stale:?}");
    }

    #[test]
    fn a_document_without_a_map_fails() {
        assert!(found(check, &[(DOCUMENT, "# A\n")])[0].message.contains("has no code map"));
        assert!(found(check, &[])[0].message.contains("is missing"));
    }

    #[test]
    fn writing_replaces_only_the_map() {
        let document = format!("# A\n{BEGIN}\nold\n{END}\nrest\n");
        assert_eq!(replace(&document, MAP), Ok(format!("# A\n{BEGIN}\n{MAP}{END}\nrest\n")));
        assert!(replace("# A\n", MAP).is_err());
    }
}
