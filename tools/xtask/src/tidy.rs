//! `cargo x tidy`: checks the source tree for rules of the project that neither the compiler nor clippy checks.
//!
//! Each rule is a function from a [`Tree`] to [`Violation`]s, in a file of its own, with tests on a sample that breaks
//! it and one that does not. The tree is read and parsed once and kept in memory, so a rule touches no file and a test
//! needs none. Rules look at definitions and names in sources, not at their text: a word in a sentence misleads no
//! rule, and no rule understands types. Lints of clippy or rustc are not repeated here, but enabled in the workspace's
//! `Cargo.toml`.

pub mod documents;
pub mod rings;
pub mod shape;
pub mod sources;
pub mod wording;

use crate::measuring::figures;
use crate::process::Failure;
use crate::workspace::Workspace;
use documents::{adr, code_map, links, messages, parity, references, walks};
use rings::{dependencies, purity, unsafe_code};
use shape::{circles, errors, folders, length, parameters, types};
use sources::cores;
use sources::tree::Tree;
use wording::{behaviours, comments, header, names, text};

/// Violation of a rule at one place of the tree.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Violation {
    /// Path from the root of the tree, with `/`.
    pub path: String,
    /// Line, from 1; 1 too if the whole file is meant.
    pub line: usize,
    /// Problem and remedy.
    pub message: String,
}

impl Violation {
    /// Creates a violation at `path:line`.
    #[must_use]
    pub fn new(path: &str, line: usize, message: impl Into<String>) -> Self {
        Self { path: path.to_string(), line, message: message.into() }
    }
}

/// Consequence of a violation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Level {
    /// Violations are printed, and the run passes.
    Advice,
    /// A violation fails the run.
    Failure,
}

/// Rule of the source tree.
#[derive(Debug, Clone, Copy)]
pub struct Rule {
    /// Name, printed with each violation.
    pub name: &'static str,
    /// Consequence of a violation.
    pub level: Level,
    /// Function that checks the tree and adds its violations.
    pub check: Check,
}

/// Check of a rule.
pub type Check = fn(&Tree, &mut Vec<Violation>);

impl Rule {
    const fn new(name: &'static str, level: Level, check: Check) -> Self {
        Self { name, level, check }
    }

    /// Returns all violations, ordered by place.
    #[must_use]
    pub fn violations(&self, tree: &Tree) -> Vec<Violation> {
        let mut found = Vec::new();
        (self.check)(tree, &mut found);
        found.sort();
        found.dedup();
        found
    }
}

/// All rules.
///
/// A new rule that the tree does not follow yet is advice, until the last violation is fixed. No rule has exceptions.
pub const RULES: [Rule; 25] = [
    Rule::new("syntax", Level::Failure, check_syntax),
    Rule::new("dependencies", Level::Failure, dependencies::check),
    Rule::new("unsafe", Level::Failure, unsafe_code::check),
    Rule::new("purity", Level::Failure, purity::check),
    Rule::new("header", Level::Failure, header::check),
    Rule::new("names", Level::Failure, names::check),
    Rule::new("text", Level::Failure, text::check),
    Rule::new("code-map", Level::Failure, code_map::check),
    Rule::new("walks", Level::Failure, walks::check),
    Rule::new("adr", Level::Failure, adr::check),
    Rule::new("parity", Level::Failure, parity::check),
    Rule::new("links", Level::Failure, links::check),
    Rule::new("references", Level::Failure, references::check),
    Rule::new("messages", Level::Failure, messages::check),
    Rule::new("figures", Level::Failure, figures::check),
    Rule::new("comments", Level::Failure, comments::check),
    Rule::new("behaviours", Level::Failure, behaviours::check),
    Rule::new("fields", Level::Failure, types::check_fields),
    Rule::new("methods", Level::Failure, types::check_methods),
    Rule::new("impl-files", Level::Failure, types::check_impl_files),
    Rule::new("parameters", Level::Failure, parameters::check),
    Rule::new("folders", Level::Failure, folders::check),
    Rule::new("string-errors", Level::Failure, errors::check),
    Rule::new("circles", Level::Failure, circles::check),
    // Lengths stay advice: see `shape::length`.
    Rule::new("length", Level::Advice, length::check),
];

/// Reports sources that the parser does not understand, which other rules cannot check.
fn check_syntax(tree: &Tree, out: &mut Vec<Violation>) {
    for file in &tree.files {
        out.extend(
            file.fault.as_ref().map(|fault| Violation::new(&file.path, 1, format!("is not valid Rust: {fault}"))),
        );
    }
}

/// Violations of one rule.
struct Finding {
    rule: Rule,
    violations: Vec<Violation>,
}

impl Finding {
    /// Returns the lines to print, ordered by place.
    fn lines(&self) -> impl Iterator<Item = String> {
        let shown =
            |found: &Violation| format!("{}:{}: [{}] {}", found.path, found.line, self.rule.name, found.message);
        self.violations.iter().map(shown)
    }
}

/// Returns the findings of all rules of these levels, in the order of [`RULES`].
fn findings(levels: &[Level], tree: &Tree) -> Vec<Finding> {
    let rules: Vec<Rule> = RULES.into_iter().filter(|rule| levels.contains(&rule.level)).collect();
    cores::map(&rules, |rule| Finding { rule: *rule, violations: rule.violations(tree) })
}

/// Checks the tree and prints every violation; for advice, the number of places too.
pub fn run(workspace: &Workspace) -> Result<(), Failure> {
    let tree = Tree::read(&workspace.root).map_err(|error| Failure::new(error.to_string()))?;
    let findings = findings(&[Level::Advice, Level::Failure], &tree);
    let (advice, failures): (Vec<&Finding>, Vec<&Finding>) =
        findings.iter().partition(|finding| finding.rule.level == Level::Advice);
    for finding in advice.iter().filter(|finding| !finding.violations.is_empty()) {
        finding.lines().for_each(|line| println!("advice: {line}"));
        println!("advice: [{}] {} in all", finding.rule.name, finding.violations.len());
    }
    failures.iter().flat_map(|finding| finding.lines()).for_each(|line| println!("{line}"));
    let count = |findings: &[&Finding]| findings.iter().map(|finding| finding.violations.len()).sum::<usize>();
    let files = tree.files.len();
    match count(&failures) {
        0 => {
            let (rules, advice) = (failures.len(), count(&advice));
            eprintln!("tidy: {files} files, {rules} rules, nothing to report; {advice} pieces of advice");
            Ok(())
        }
        violations => Err(Failure::new(format!("tidy found {violations} violations in {files} files"))),
    }
}

/// Regenerates the code map from the first sentences of the files.
pub fn write_map(workspace: &Workspace) -> Result<(), Failure> {
    let tree = Tree::read(&workspace.root).map_err(|error| Failure::new(error.to_string()))?;
    let path = workspace.root.join(code_map::DOCUMENT);
    let document = tree.file(code_map::DOCUMENT).map(|file| file.text.as_str()).unwrap_or_default();
    let updated =
        code_map::replace(document, &code_map::generate(&tree)).map_err(|error| Failure::new(error.to_string()))?;
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
    //! Helpers of the rules' tests.

    use super::{Check, Tree, Violation};

    /// Returns the violations of `check` in these files, as `path:line`.
    pub(crate) fn places(check: Check, files: &[(&str, &str)]) -> Vec<String> {
        found(check, files).iter().map(|found| format!("{}:{}", found.path, found.line)).collect()
    }

    /// Returns the violations of `check` in these files.
    pub(crate) fn found(check: Check, files: &[(&str, &str)]) -> Vec<Violation> {
        let mut found = Vec::new();
        check(&Tree::of(files), &mut found);
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
        let tree = Tree::read(&workspace.root).unwrap();
        let lines: Vec<String> = findings(&[Level::Failure], &tree).iter().flat_map(Finding::lines).collect();
        assert!(lines.is_empty(), "{} violations:\n{}", lines.len(), lines.join("\n"));
    }

    #[test]
    fn an_invalid_source_fails() {
        let found =
            testing::found(check_syntax, &[("a.rs", "fn a() {}\nfn b( {}\n"), ("b.rs", "fn a() {}\n"), ("c.md", "(")]);
        assert_eq!(found.len(), 1);
        assert!(found[0].path == "a.rs" && found[0].message.contains("line 2"), "{found:?}");
    }

    #[test]
    fn rules_have_names_of_their_own() {
        let names: std::collections::BTreeSet<&str> = RULES.iter().map(|rule| rule.name).collect();
        assert_eq!(names.len(), RULES.len());
    }
}
