//! `cargo x tidy`: the rules of the house that neither the compiler nor clippy checks, run over the source tree.
//!
//! Each rule is a function from a [`Tree`] to [`Violation`]s, in a file of its own, with tests that hold a sample that
//! breaks it and one that does not. The tree is read once and lies in memory, so a rule touches no file and a test
//! needs none. Rules look at tokens, with comments and strings blanked: no rule is fooled by a word in a sentence, and
//! none understands types.

pub mod adr;
pub mod code_map;
pub mod dependencies;
pub mod header;
pub mod leftovers;
pub mod length;
pub mod lex;
pub mod manifest;
pub mod names;
pub mod parity;
pub mod purity;
pub mod syntax;
pub mod text;
pub mod tree;
pub mod unsafe_code;

use crate::process::Failure;
use crate::workspace::Workspace;
use tree::Tree;

/// One place where the tree breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Violation {
    /// Path from the root of the tree, with `/`.
    pub path: String,
    /// Line, from 1; 1 too where the whole file is meant.
    pub line: usize,
    /// What is wrong and what to do.
    pub message: String,
}

impl Violation {
    /// A violation at `path:line`.
    #[must_use]
    pub fn new(path: &str, line: usize, message: impl Into<String>) -> Self {
        Self { path: path.to_string(), line, message: message.into() }
    }
}

/// A rule: looks at the tree, adds what it finds.
pub type Rule = fn(&Tree, &mut Vec<Violation>);

/// Every rule with its name, which is printed with each violation.
pub const RULES: [(&str, Rule); 10] = [
    ("dependencies", dependencies::check),
    ("unsafe", unsafe_code::check),
    ("purity", purity::check),
    ("leftovers", leftovers::check),
    ("header", header::check),
    ("names", names::check),
    ("code-map", code_map::check),
    ("text", text::check),
    ("adr", adr::check),
    ("parity", parity::check),
];

/// Rules whose violations are printed as advice and fail nothing.
pub const ADVICE: [(&str, Rule); 1] = [("length", length::check)];

/// Every violation of these rules, one printable line each, by rule and place.
#[must_use]
pub fn violations(rules: &[(&str, Rule)], tree: &Tree) -> Vec<String> {
    let mut lines = Vec::new();
    for (name, rule) in rules {
        let mut found = Vec::new();
        rule(tree, &mut found);
        found.sort();
        found.dedup();
        lines.extend(found.iter().map(|found| format!("{}:{}: [{name}] {}", found.path, found.line, found.message)));
    }
    lines
}

/// Checks the tree and prints every violation.
pub fn run(workspace: &Workspace) -> Result<(), Failure> {
    let tree = Tree::read(&workspace.root).map_err(Failure::new)?;
    for line in violations(&ADVICE, &tree) {
        println!("advice: {line}");
    }
    let lines = violations(&RULES, &tree);
    if lines.is_empty() {
        eprintln!("tidy: {} files, {} rules, nothing to report", tree.files.len(), RULES.len());
        return Ok(());
    }
    for line in &lines {
        println!("{line}");
    }
    Err(Failure::new(format!("tidy found {} violations in {} files", lines.len(), tree.files.len())))
}

/// Regenerates the code map from the files' first sentences.
pub fn write_map(workspace: &Workspace) -> Result<(), Failure> {
    let tree = Tree::read(&workspace.root).map_err(Failure::new)?;
    let path = workspace.root.join(code_map::DOCUMENT);
    let document = tree.file(code_map::DOCUMENT).map(|file| file.text.as_str()).unwrap_or_default();
    let updated = code_map::replace(document, &code_map::generate(&tree)).map_err(Failure::new)?;
    if updated == document {
        eprintln!("tidy: the code map in {} is up to date", code_map::DOCUMENT);
        return Ok(());
    }
    std::fs::write(&path, updated).map_err(|error| Failure::new(format!("{}: {error}", path.display())))?;
    eprintln!("tidy: wrote the code map in {}", code_map::DOCUMENT);
    Ok(())
}

#[cfg(test)]
pub(crate) mod testing {
    //! What the rules' tests share.

    use super::{Rule, Tree, Violation};

    /// What `rule` finds in these files, as `path:line`.
    pub(crate) fn places(rule: Rule, files: &[(&str, &str)]) -> Vec<String> {
        found(rule, files).iter().map(|found| format!("{}:{}", found.path, found.line)).collect()
    }

    /// What `rule` finds in these files.
    pub(crate) fn found(rule: Rule, files: &[(&str, &str)]) -> Vec<Violation> {
        let mut found = Vec::new();
        rule(&Tree::of(files), &mut found);
        found.sort();
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_real_tree_is_tidy() {
        let Ok(workspace) = Workspace::find() else {
            println!("skipped: this crate is not inside its workspace");
            return;
        };
        let lines = violations(&RULES, &Tree::read(&workspace.root).unwrap());
        assert!(lines.is_empty(), "{} violations:\n{}", lines.len(), lines.join("\n"));
    }
}
