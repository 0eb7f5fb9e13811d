//! Rule: the page on parity with Mooncake's features names tests that exist.
//!
//! In its tables the second column is a state, one of [`STATES`], and the last one names tests in backticks. A row that
//! is `done` names at least one.

use std::collections::BTreeSet;

use crate::tidy::Violation;
use crate::tidy::sources::tree::Tree;

/// Path of the page.
const PAGE: &str = "docs/mooncake-parity.md";
/// First words of valid states.
const STATES: [&str; 4] = ["done", "different", "open", "not planned"];
const COLUMNS: usize = 4;
const PYTHON_TESTS: &str = "tools/python/tests";

/// Checks the page, if it exists.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    let Some(page) = tree.files.iter().find(|file| file.path == PAGE) else { return };
    let rust = tree.rust().flat_map(|file| &file.outline.functions).map(|function| function.name.as_str());
    let python = tree.below(PYTHON_TESTS).flat_map(|file| file.text.lines().filter_map(python_test));
    let functions: BTreeSet<&str> = rust.chain(python).collect();
    for (at, line) in page.text.lines().enumerate() {
        let Some(row) = line.strip_prefix("| ").and_then(|line| line.strip_suffix('|')) else { continue };
        let cells: Vec<&str> = row.split('|').map(str::trim).collect();
        let mut wrong = |message: String| out.push(Violation::new(PAGE, at + 1, message));
        if cells.len() != COLUMNS {
            wrong(format!("a row of {} cells: it has a name, a state, a reason and tests", cells.len()));
            continue;
        }
        let (state, tests) = (cells[1], cells[3]);
        if state == "state" {
            continue;
        }
        if !STATES.iter().any(|known| state.starts_with(known)) {
            wrong(format!("state `{state}`: use one of {}", STATES.join(", ")));
        }
        let named: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        if state.starts_with("done") && named.is_empty() {
            wrong(format!("`{}` is done and names no test", cells[0]));
        }
        for test in named {
            if !functions.contains(test) {
                wrong(format!("there is no test `{test}`: name the one that proves this row"));
            }
        }
    }
}

/// The name of the test that a line of Python defines.
fn python_test(line: &str) -> Option<&str> {
    let (name, _) = line.trim_start().strip_prefix("def ")?.split_once('(')?;
    name.starts_with("test_").then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::testing::places;

    const TEST: &str = "//! Tests.\n#[test]\nfn it_holds() {}\nproptest! { fn for_all(x in 0..9) {} }\n";

    #[test]
    fn named_tests_must_exist_and_done_names_one() {
        let good = "| row | state | how | tests |\n|---|---|---|---|\n| a | done | b | `it_holds` `for_all` |\n\
                    | c | open (issue 6) | | |\n| d | not planned | `word` | |\n| e | done | | `test_it` |\n";
        let python = ("tools/python/tests/test_a.py", "class A:\n    def test_it(self):\n        pass\n");
        assert_eq!(places(check, &[(PAGE, good), ("a.rs", TEST), python]), Vec::<String>::new());
        let bad = "| a | done | b | |\n| c | different | d | `it_hold` |\n| e | perhaps | f | |\n| g | done |\n";
        let found = places(check, &[(PAGE, bad), ("a.rs", TEST)]);
        assert_eq!(found, [1, 2, 3, 4].map(|line| format!("{PAGE}:{line}")));
    }

    #[test]
    fn without_the_page_there_is_nothing_to_check() {
        assert_eq!(places(check, &[("a.rs", TEST)]), Vec::<String>::new());
    }
}
