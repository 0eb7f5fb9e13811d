//! `cargo x lines`: lines of Rust of the product, of tooling and of tests, in this tree or in that of another checkout.
//!
//! The product is what ships: the crates of `dataplane`, `control`, `topology`, and of `tools` those that become
//! programs and libraries of users. Tooling is what a newcomer need not read: the build's tasks, simulators, rivals and
//! benchmarks. A file of tests counts as tests, and so does the module of tests at the end of another file.

use std::path::Path;

use crate::process::Failure;
use crate::tidy::sources::crates::Crate;
use crate::tidy::sources::tree::{File, Tree};
use crate::workspace::Workspace;

/// Folders of tooling.
const TOOLING: [&str; 4] = ["tools/xtask/", "tools/sim/", "tools/simulator/", "benches/"];

/// Folders of the product.
const PRODUCT: [&str; 6] = ["dataplane/", "control/", "topology/", "tools/kvplane/", "tools/capi/", "tools/python/"];

/// Lines of files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lines {
    /// All lines.
    pub all: usize,
    /// Lines that are neither blank nor only a comment.
    pub code: usize,
}

impl Lines {
    fn add<'a>(&mut self, lines: impl Iterator<Item = &'a str>) {
        for line in lines {
            let text = line.trim_start();
            self.all += 1;
            self.code += usize::from(!text.is_empty() && !text.starts_with("//"));
        }
    }
}

/// Lines of a tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Crates that ship.
    pub product: Lines,
    /// Build tasks, simulators and benchmarks.
    pub tooling: Lines,
    /// Tests of both.
    pub tests: Lines,
}

impl Count {
    /// Counts the Rust sources of a tree.
    #[must_use]
    pub fn of(tree: &Tree) -> Self {
        let crates = Crate::all(tree);
        let product: std::collections::BTreeSet<&str> =
            crates.iter().flat_map(|one| one.files().map(|(_, file)| file.path.as_str())).collect();
        let mut count = Self::default();
        for file in tree.rust() {
            let begins = |folder: &&str| file.path.starts_with(*folder);
            let is_tooling = TOOLING.iter().any(begins);
            let is_source = product.contains(file.path.as_str()) || file.path.starts_with("benches/");
            if !is_source || !is_tooling && !PRODUCT.iter().any(begins) {
                count.tests.add(file.text.lines());
                continue;
            }
            let (sources, tests) = split(file);
            if is_tooling { &mut count.tooling } else { &mut count.product }.add(sources.lines());
            count.tests.add(tests.lines());
        }
        count
    }
}

/// Returns the text of a file before its module of tests, and from it on.
fn split(file: &File) -> (&str, &str) {
    let at = file.text.find("\n#[cfg(test)]\nmod tests {").map_or(file.text.len(), |at| at + 1);
    file.text.split_at(at)
}

/// Prints the count of the tree in `folder`, or of this one.
pub fn run(workspace: &Workspace, folder: Option<&str>) -> Result<(), Failure> {
    let root = folder.map_or(workspace.root.as_path(), Path::new);
    let tree = Tree::read(root).map_err(|error| Failure::new(error.to_string()))?;
    let Count { product, tooling, tests } = Count::of(&tree);
    println!("{:<8} {:>8} {:>8}", "", "lines", "of code");
    for (name, Lines { all, code }) in [("product", product), ("tooling", tooling), ("tests", tests)] {
        println!("{name:<8} {all:>8} {code:>8}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_belong_to_the_product_to_tooling_or_to_tests() {
        let manifest = "[package]\nname = \"a\"\n";
        let text = "//! A.\n\nfn a() {}\n\n#[cfg(test)]\nmod tests {\n    fn b() {}\n}\n";
        let tree = Tree::of(&[
            ("dataplane/a/Cargo.toml", manifest),
            ("dataplane/a/src/lib.rs", text),
            ("dataplane/a/tests/one.rs", "fn c() {}\n"),
            ("tools/sim/Cargo.toml", manifest),
            ("tools/sim/src/lib.rs", "fn d() {}\n\n"),
            ("tests/fake/Cargo.toml", manifest),
            ("tests/fake/src/lib.rs", "fn e() {}\n"),
        ]);
        let lines = |all, code| Lines { all, code };
        let expected = Count { product: lines(4, 1), tooling: lines(2, 1), tests: lines(6, 6) };
        assert_eq!(Count::of(&tree), expected);
    }
}
