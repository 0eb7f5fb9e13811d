//! Rule: doc comments of the product begin with a noun or a verb, and sentences name their subject, in the words of the
//! glossary.
//!
//! The words that the glossary replaces stand in code quotes in the last column of its tables ([`GLOSSARY`]): those,
//! and no others, are looked for in comments, and in pages that are no dated records.

use std::sync::LazyLock;

use crate::tidy::Violation;
use crate::tidy::sources::cores;
use crate::tidy::sources::tree::{File, Tree};

/// The page that says which word stands for which concept.
pub const GLOSSARY: &str = "docs/glossary.md";

/// Words that must not begin a doc comment: a noun phrase or a verb says more.
const FIRST_WORDS: [&str; 18] = [
    "What",
    "Who",
    "TimedTenant",
    "Whom",
    "Whether",
    "Where",
    "When",
    "How",
    "Which",
    "Why",
    "That",
    "As",
    "Nothing",
    "Nobody",
    "Somebody",
    "Something",
    "Everything",
    "Same",
];

/// Phrases without a subject that can be searched for.
const PHRASES: [&str; 18] = [
    "asked for",
    "asks for",
    "is told",
    "are told",
    "was told",
    "were told",
    "been told",
    "who asks",
    "who asked",
    "who has",
    "who reads",
    "as there",
    "somebody",
    "whoever",
    "says so",
    "said so",
    "heard of",
    "under way",
];

/// Checks the product's sources, and the pages.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    let replaced = tree.file(GLOSSARY).map(|file| replaced_words(&file.text)).unwrap_or_default();
    let found = cores::map(&tree.files, |file| {
        if is_product(file) {
            check_source(file, &replaced)
        } else if is_page(file) {
            check_page(file, &replaced)
        } else {
            Vec::new()
        }
    });
    out.extend(found.into_iter().flatten());
}

fn is_product(file: &File) -> bool {
    // This file names what it refuses.
    file.is_rust() && !file.is_test() && !file.path.starts_with("tests/") && !file.path.ends_with("wording/comments.rs")
}

fn is_page(file: &File) -> bool {
    file.path.ends_with(".md") && !file.is_dated_record() && file.path != GLOSSARY
}

/// The words in code quotes of the last column of the glossary's tables.
fn replaced_words(glossary: &str) -> Vec<String> {
    let rows = glossary.lines().filter(|line| line.starts_with("| **"));
    let last = rows.filter_map(|row| row.trim_end().strip_suffix('|')?.rsplit('|').next());
    last.flat_map(|column| column.split('`').skip(1).step_by(2)).map(str::to_lowercase).collect()
}

fn check_source(file: &File, replaced: &[String]) -> Vec<Violation> {
    let mut found = Vec::new();
    let (mut before, mut after_heading) = ("", false);
    for (index, line) in file.text.lines().enumerate() {
        let Some((kind, text)) = comment(line) else {
            (before, after_heading) = ("", false);
            continue;
        };
        let mut report = |message: String| found.push(Violation::new(&file.path, index + 1, message));
        let first = text.split(|c: char| !c.is_alphabetic()).next().unwrap_or_default();
        if kind != "//" && before != kind && FIRST_WORDS.contains(&first) {
            report(format!("a doc comment begins with `{first}`; begin with a noun or a verb"));
        }
        if kind != "//" && after_heading && (first == "As" || text.starts_with("The same")) {
            report("a section begins with `As` or `The same`; begin with a noun: errors of, conditions of".to_owned());
        }
        for phrase in refused(&prose(text), replaced) {
            report(format!("`{phrase}`: name the subject, in the words of {GLOSSARY}"));
        }
        (before, after_heading) = (kind, text.starts_with("# "));
    }
    found
}

fn check_page(file: &File, replaced: &[String]) -> Vec<Violation> {
    let mut found = Vec::new();
    for (number, line) in file.prose_lines() {
        for phrase in refused(&prose(line), replaced) {
            let message = format!("`{phrase}`: name the subject, in the words of {GLOSSARY}");
            found.push(Violation::new(&file.path, number, message));
        }
    }
    found
}

/// The marker and the text of a line that is a comment alone.
fn comment(line: &str) -> Option<(&'static str, &str)> {
    let line = line.trim_start();
    ["///", "//!", "//"].into_iter().find_map(|kind| Some((kind, line.strip_prefix(kind)?.trim_start())))
}

/// Returns a line without its code spans: names of tests, items and files are what they are.
fn prose(line: &str) -> String {
    line.split('`').step_by(2).collect::<Vec<_>>().join(" ")
}

/// The refused phrases in a text.
fn refused<'a>(text: &str, replaced: &'a [String]) -> Vec<&'a str> {
    static ALWAYS: LazyLock<Vec<String>> = LazyLock::new(|| PHRASES.iter().map(ToString::to_string).collect());
    let text = text.to_lowercase();
    let all: Vec<&str> = ALWAYS.iter().chain(replaced).map(String::as_str).collect();
    all.into_iter().filter(|phrase| has_words(&text, phrase)).collect()
}

/// True if a text has a phrase as whole words.
fn has_words(text: &str, phrase: &str) -> bool {
    text.match_indices(phrase).any(|(at, _)| {
        let (before, after) = (text[..at].chars().next_back(), text[at + phrase.len()..].chars().next());
        let ends = |c: Option<char>| c.is_none_or(|c| !c.is_alphanumeric() && c != '_');
        ends(before) && ends(after)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::testing::found;

    fn messages(files: &[(&str, &str)]) -> Vec<String> {
        found(check, files)
            .into_iter()
            .map(|found| format!("{}:{} {}", found.path, found.line, found.message))
            .collect()
    }

    #[test]
    fn doc_comments_begin_with_nouns_and_verbs() {
        let source = "//! Who is here.\n\n/// Whether it is.\n/// When a line goes on, any word may begin it.\n\
            fn a() {}\n// Why not here?\n";
        let found = messages(&[("a.rs", source), ("tests/a.rs", source), ("b.rs", "//! Members.\n")]);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].starts_with("a.rs:1 ") && found[1].starts_with("a.rs:3 "), "{found:?}");
    }

    #[test]
    fn sections_that_refer_to_another_item_begin_with_nouns() {
        let source = "/// Lists.\n///\n/// # Errors\n/// As [`b`].\nfn a() {}\n\n/// Lists.\n///\n/// # Safety\n\
            /// The same as [`b`].\nfn b() {}\n\n/// Lists.\n///\n/// # Errors\n/// Errors of [`b`].\nfn c() {}\n";
        let found = messages(&[("a.rs", source)]);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].starts_with("a.rs:4 ") && found[1].starts_with("a.rs:10 "), "{found:?}");
    }

    #[test]
    fn phrases_without_a_subject_are_refused_in_comments_and_pages() {
        let found = messages(&[
            ("a.rs", "//! A thing.\n// What is asked for.\nlet a = \"asked for\";\n"),
            ("docs/a.md", "# A\nThe node is told.\n`is told`\n```\nis told\n```\n"),
            ("docs/adr/0001-a.md", "is told\n"),
        ]);
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(
            found[0].starts_with("a.rs:2 `asked for`") && found[1].starts_with("docs/a.md:2 `is told`"),
            "{found:?}"
        );
    }

    #[test]
    fn words_that_the_glossary_replaces_are_refused() {
        let glossary = "| term | meaning | instead of |\n|---|---|---|\n| **incarnation** | A run. | `life`, turn |\n\
            | **policy** | `lru` or others. | |\n";
        let source = "//! A life of a turn, and lifelong by lru.\n";
        let found = messages(&[(GLOSSARY, glossary), ("a.rs", source)]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("`life`"), "{found:?}");
    }
}
