//! Rule: decision records in `docs/adr` have unique numbers, the required sections, and an entry in the index.

use std::collections::BTreeMap;

use crate::tidy::Violation;
use crate::tidy::sources::tree::{File, Tree};

const DIRECTORY: &str = "docs/adr";
const INDEX: &str = "docs/adr/README.md";
const SECTIONS: [&str; 5] = ["Context", "Decision", "Evidence", "Consequences", "What would reverse it"];

/// Checks the records and their index.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    let index = tree.file(INDEX).map_or("", |file| file.text.as_str());
    let mut numbers: BTreeMap<&str, &str> = BTreeMap::new();
    for file in tree.below(DIRECTORY).filter(|file| file.path != INDEX) {
        let name = &file.path[DIRECTORY.len() + 1..];
        let number = name.split('-').next().unwrap_or_default();
        let well_named = number.len() == 4 && number.bytes().all(|byte| byte.is_ascii_digit()) && name.ends_with(".md");
        if !well_named {
            out.push(Violation::new(&file.path, 1, "is not named `NNNN-what.md`"));
            continue;
        }
        if let Some(other) = numbers.insert(number, name) {
            out.push(Violation::new(&file.path, 1, format!("has the number of {other}; take the next free one")));
        }
        if !index.contains(&format!("({name})")) {
            out.push(Violation::new(&file.path, 1, format!("is not listed in {INDEX}; add a line that links to it")));
        }
        check_sections(file, number, out);
    }
    for (at, line) in index.lines().enumerate() {
        for target in links(line) {
            let path = format!("{DIRECTORY}/{target}");
            if target.starts_with(|c: char| c.is_ascii_digit()) && tree.file(&path).is_none() {
                out.push(Violation::new(INDEX, at + 1, format!("{target} does not exist; remove or fix the link")));
            }
        }
    }
}

fn check_sections(file: &File, number: &str, out: &mut Vec<Violation>) {
    if !file.text.starts_with(&format!("# {number}")) {
        out.push(Violation::new(&file.path, 1, format!("its title does not begin with {number}")));
    }
    for section in SECTIONS {
        if !file.text.lines().any(|line| line.strip_prefix("## ") == Some(section)) {
            out.push(Violation::new(
                &file.path,
                1,
                format!("has no section `## {section}`; add it: every decision record has this section"),
            ));
        }
    }
}

fn links(line: &str) -> impl Iterator<Item = &str> {
    line.split("](").skip(1).filter_map(|rest| rest.split(')').next())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::testing::found;

    const RECORD: &str = "# 0001 A\n## Context\n## Decision\n## Evidence\n## Consequences\n## What would reverse it\n";

    fn messages(files: &[(&str, &str)]) -> String {
        found(check, files).iter().map(|found| format!("{}: {}\n", found.path, found.message)).collect()
    }

    #[test]
    fn listed_records_with_all_sections_pass() {
        let index = "# Decisions\n* [0001](0001-a.md)\n* [elsewhere](../architecture.md)\n";
        assert_eq!(messages(&[("docs/adr/0001-a.md", RECORD), (INDEX, index)]), "");
    }

    #[test]
    fn each_fault_is_named() {
        let index = "# Decisions\n* [0001](0001-a.md)\n* [0007](0007-gone.md)\n";
        let files = [
            ("docs/adr/0001-a.md", RECORD),
            ("docs/adr/0001-b.md", RECORD),
            ("docs/adr/0002-c.md", RECORD),
            ("docs/adr/notes.md", "# Notes\n"),
            ("docs/adr/0003-d.md", "# 0003 D\n## Context\n"),
            (INDEX, index),
        ];
        let text = messages(&files);
        for part in [
            "0001-b.md: has the number of 0001-a.md",
            "0001-b.md: is not listed",
            "0002-c.md: its title does not begin with 0002",
            "notes.md: is not named",
            "0003-d.md: has no section `## Evidence`",
            "README.md: 0007-gone.md does not exist",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }
}
