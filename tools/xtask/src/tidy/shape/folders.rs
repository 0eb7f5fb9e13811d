//! Rule: a folder holds fewer than 16 sources, of tests and benchmarks too.
//!
//! A reader should see the content of a folder at a glance. A larger one is divided into folders by ownership, each
//! with a front.

use std::collections::BTreeMap;

use crate::tidy::Violation;
use crate::tidy::sources::tree::Tree;

const MOST_FILES: usize = 15;

/// Checks every folder.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    let mut folders: BTreeMap<&str, usize> = BTreeMap::new();
    for file in tree.rust() {
        let folder = file.path.rsplit_once('/').map_or("", |(folder, _)| folder);
        *folders.entry(folder).or_default() += 1;
    }
    for (folder, count) in folders.into_iter().filter(|(_, count)| *count > MOST_FILES) {
        let message = format!(
            "{count} sources in one folder, over {MOST_FILES}; make folders of those that belong \
                               together, each with a front"
        );
        out.push(Violation::new(folder, 1, message));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::testing::places;

    fn folders(count: usize, name: impl Fn(usize) -> String) -> Vec<String> {
        let paths: Vec<String> = (0..count).map(name).collect();
        let files: Vec<(&str, &str)> = paths.iter().map(|path| (path.as_str(), "")).collect();
        places(check, &files)
    }

    #[test]
    fn full_folders_fail() {
        assert_eq!(folders(16, |index| format!("a/src/x/m{index}.rs")), ["a/src/x:1"]);
        assert!(folders(15, |index| format!("a/src/x/m{index}.rs")).is_empty());
    }

    #[test]
    fn tests_are_counted_and_folders_below_are_not() {
        for folder in ["src/x/tests", "tests/suite", "benches"] {
            assert_eq!(folders(16, |index| format!("a/{folder}/m{index}.rs")), [format!("a/{folder}:1")]);
        }
        assert!(folders(20, |index| format!("a/src/x/m{index}/mod.rs")).is_empty());
        assert!(folders(20, |index| format!("a/src/x/m{index}.md")).is_empty());
    }
}
