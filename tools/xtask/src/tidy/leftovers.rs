//! Rule: nothing unfinished and no debugging aid outside tests.

use super::Violation;
use super::lex;
use super::syntax::{self, Pattern};
use super::tree::Tree;

const MACROS: [&str; 3] = ["todo!", "unimplemented!", "dbg!"];

/// Checks every Rust source.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    let patterns = MACROS.map(|name| (name, Pattern::new(name)));
    for file in tree.rust().filter(|file| !file.is_test()) {
        let tokens = lex::tokens(&file.code);
        let tests = syntax::test_items(&tokens);
        for (index, token) in tokens.iter().enumerate() {
            if tests.iter().any(|range| range.contains(&index)) {
                continue;
            }
            for (name, _) in patterns.iter().filter(|(_, pattern)| pattern.stands_at(&tokens, index)) {
                let message = format!("`{name}` is left over; finish it, or leave the feature out");
                out.push(Violation::new(&file.path, token.line, message));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::places;
    use super::*;

    #[test]
    fn unfinished_code_fails_and_tests_do_not() {
        let source = "fn a() {\n    todo!()\n}\n#[test]\nfn b() {\n    dbg!(1);\n}\nfn c() {\n    dbg!(2);\n}\n";
        assert_eq!(places(check, &[("a/src/a.rs", source)]), ["a/src/a.rs:2", "a/src/a.rs:9"]);
        assert_eq!(places(check, &[("a/tests/a.rs", source)]), Vec::<String>::new());
    }

    #[test]
    fn words_in_comments_and_strings_are_clean() {
        let source = "// todo!()\nfn a() { f(\"dbg!(x)\"); dbg(x); }\n";
        assert_eq!(places(check, &[("a/src/a.rs", source)]), Vec::<String>::new());
    }
}
