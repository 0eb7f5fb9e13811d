//! Rule: names of tests state a behaviour, with a noun for its subject.

use crate::tidy::Violation;
use crate::tidy::sources::cores;
use crate::tidy::sources::tree::{File, Tree};

/// Words that begin no test's name.
const FIRST_WORDS: [&str; 8] = ["what", "who", "whose", "whom", "nobody", "nothing", "somebody", "whoever"];

/// Words without a subject.
const PARTS: [&str; 5] = ["asked_for", "is_told", "are_told", "somebody", "heard_of"];

/// Checks every test of every crate.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    let rust: Vec<&File> = tree.rust().collect();
    let found = cores::map(&rust, |file| check_file(file));
    out.extend(found.into_iter().flatten());
}

fn check_file(file: &File) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut is_test = false;
    for (index, line) in file.text.lines().enumerate() {
        let line = line.trim_start();
        if line.starts_with("#[") {
            is_test |= line.starts_with("#[test]") || line.starts_with("#[tokio::test");
            continue;
        }
        let name = line.strip_prefix("fn ").filter(|_| is_test).and_then(|rest| rest.split('(').next());
        is_test = false;
        let Some(name) = name else { continue };
        let first = name.split('_').next().unwrap_or_default();
        if FIRST_WORDS.contains(&first) || PARTS.iter().any(|part| name.contains(part)) {
            let message = format!("`{name}` has no noun for its subject; state the behaviour");
            found.push(Violation::new(&file.path, index + 1, message));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::testing::places;

    #[test]
    fn names_without_a_subject_fail() {
        let source = "#[test]\nfn what_is_there() {}\n#[test]\n#[ignore]\nfn an_object_is_told() {}\n\
            #[test]\nfn an_object_is_evicted() {}\nfn who() {}\n";
        assert_eq!(places(check, &[("tests/a.rs", source)]), ["tests/a.rs:2", "tests/a.rs:5"]);
    }
}
