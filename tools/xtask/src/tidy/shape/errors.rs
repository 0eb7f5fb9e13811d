//! Rule: an error is no text.
//!
//! `Result<_, String>` leaves its caller nothing to match, and a message without its numbers and files. An error is an
//! enum with fields; the text is its `Display`. The rule covers results in signatures, fields and aliases, and the
//! types that traits call `Err` and `Error`. Tests are exempt, and so is the input of macros.

use crate::tidy::Violation;
use crate::tidy::sources::crates::Crate;
use crate::tidy::sources::tree::Tree;

const MESSAGE: &str = "an error is a text here; make it an enum with fields: what failed, which number or file, what \
                       to do";

/// Checks every result type of the crates outside tests.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    for found in Crate::all(tree) {
        for (_, file) in found.files() {
            out.extend(file.outline.text_errors.iter().map(|line| Violation::new(&file.path, *line, MESSAGE)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::testing::places;

    const MANIFEST: (&str, &str) = ("a/Cargo.toml", "[package]\nname = \"a\"\n");

    #[test]
    fn texts_as_errors_fail() {
        let source = "pub fn f() -> Result<(), String> {\n    g()\n}\nfn g() -> Result<(), String> {}\n";
        assert_eq!(places(check, &[MANIFEST, ("a/src/lib.rs", source)]), ["a/src/lib.rs:1", "a/src/lib.rs:4"]);
    }

    #[test]
    fn enums_and_tests_pass() {
        let test = "fn f() -> Result<(), String> {}\n";
        let root = format!("pub fn f() -> Result<String, FileError> {{}}\n#[cfg(test)]\nmod rig;\n#[test]\n{test}");
        let files =
            [MANIFEST, ("a/src/lib.rs", &root), ("a/src/rig.rs", test), ("a/tests/it.rs", test), ("b.rs", test)];
        assert!(places(check, &files).is_empty());
    }
}
