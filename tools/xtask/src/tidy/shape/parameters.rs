//! Rule: a function names its parameters, and destructures none of them in its signature.
//!
//! `fn f((a, b): (u8, u8))` hides from the caller that two things belong together: they should be a struct, or a
//! parameter each. Closures are exempt. Functions in the input of macros are not seen.

use crate::tidy::Violation;
use crate::tidy::sources::crates::Crate;
use crate::tidy::sources::tree::Tree;

/// Checks every function of the crates outside tests.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    for found in Crate::all(tree) {
        for (_, file) in found.files() {
            for function in file.outline.functions.iter().filter(|function| function.takes_apart && !function.in_test) {
                let message = format!(
                    "`{}` takes a parameter apart where it declares it; name the whole, or pass the \
                                       parts",
                    function.name
                );
                out.push(Violation::new(&file.path, function.first_line, message));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::testing::places;

    fn lines(source: &str) -> usize {
        places(check, &[("a/Cargo.toml", "[package]\nname = \"a\"\n"), ("a/src/lib.rs", source)]).len()
    }

    #[test]
    fn parts_in_signatures_fail() {
        for source in [
            "fn f((a, b): (u8, u8)) {}",
            "fn f(a: u8, S { b, .. }: S) {}",
            "fn f(&W(a): &W) {}",
            "fn f([a, b]: [u8; 2]) {}",
            "fn f(all @ (a, _): (u8, u8)) {}",
            "impl A { fn f(&self, (a, b): (u8, u8)) {} }",
            "trait A { fn f((a, b): (u8, u8)) {} }",
            "fn g() { fn f((a, b): (u8, u8)) {} }",
        ] {
            assert_eq!(lines(source), 1, "{source}");
        }
    }

    #[test]
    fn names_closures_and_tests_pass() {
        for source in [
            "fn f(a: (u8, u8), mut b: u8, _: u8, &c: &u8) {}",
            "fn f() { g(|(a, b)| a + b); }",
            "type F = fn((u8, u8));",
            "#[cfg(test)]\nmod tests { fn f((a, b): (u8, u8)) {} }",
        ] {
            assert_eq!(lines(source), 0, "{source}");
        }
    }
}
