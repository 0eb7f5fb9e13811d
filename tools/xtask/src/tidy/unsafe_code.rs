//! Rule: `unsafe` stands only in `dataplane/sys`, and each block and impl there is preceded by its `// SAFETY:`
//! argument. The root of every other crate forbids it, so that the compiler holds that too, in what macros write.
//!
//! Clippy checks the second half too, where it understands the code; this one also sees what is compiled out.

use super::Violation;
use super::lex;
use super::tree::{File, Tree};

/// Directories that may say `unsafe`: the system layer, and the rims towards Python and C.
const ALLOWED: [&str; 3] = ["dataplane/sys/", "tools/python/", "tools/capi/"];

const FORBID: &str = "#![forbid(unsafe_code)]";

/// Checks every Rust source.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    for file in tree.rust() {
        let allowed = ALLOWED.iter().any(|directory| file.path.starts_with(directory));
        let is_root = file.path.ends_with("/src/lib.rs") || file.path.ends_with("/src/main.rs");
        if is_root && !allowed && !file.code.lines().any(|line| line.trim() == FORBID) {
            out.push(Violation::new(&file.path, 1, format!("the crate's root does not say `{FORBID}`")));
        }
        let tokens = lex::tokens(&file.code);
        for (index, token) in tokens.iter().enumerate().filter(|(_, token)| token.text == "unsafe") {
            let next = tokens.get(index + 1).map_or("", |token| token.text);
            if !allowed {
                let message = "`unsafe` outside dataplane/sys; put a safe interface there and call it";
                out.push(Violation::new(&file.path, token.line, message));
            } else if matches!(next, "{" | "impl") && !is_argued(file, token.line) {
                let message = "no `// SAFETY:` comment above; say why this is sound and who keeps it so";
                out.push(Violation::new(&file.path, token.line, message));
            }
        }
    }
}

/// Whether a SAFETY comment stands directly above the statement that holds `line`.
fn is_argued(file: &File, line: usize) -> bool {
    let above: Vec<&str> = file.text.lines().take(line - 1).map(str::trim).collect();
    for text in above.iter().rev() {
        if text.starts_with("//") {
            if text.contains("SAFETY:") {
                return true;
            }
        } else if text.is_empty() || (text.ends_with([';', '{', '}', ',']) && !text.starts_with("#[")) {
            return false;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::super::testing::places;
    use super::*;

    #[test]
    fn unsafe_elsewhere_fails_and_in_words_does_not() {
        let source = "// unsafe\nfn a() { let s = \"unsafe\"; }\nfn b() { unsafe { c() } }\n";
        assert_eq!(places(check, &[("dataplane/store/src/a.rs", source)]), ["dataplane/store/src/a.rs:3"]);
        assert_eq!(places(check, &[("dataplane/system/a.rs", "unsafe fn a() {}\n")]), ["dataplane/system/a.rs:1"]);
    }

    #[test]
    fn the_root_of_a_crate_forbids_it_unless_it_is_of_the_system_layer() {
        let without = "//! A crate.\n\n// #![forbid(unsafe_code)]\npub mod a;\n";
        let with = "//! A crate.\n\n#![forbid(unsafe_code)]\n";
        let files = [
            ("dataplane/store/src/lib.rs", without),
            ("dataplane/tier/src/lib.rs", with),
            ("tools/a/src/main.rs", without),
            ("dataplane/sys/src/lib.rs", without),
            ("dataplane/store/src/a/mod.rs", without),
        ];
        assert_eq!(places(check, &files), ["dataplane/store/src/lib.rs:1", "tools/a/src/main.rs:1"]);
    }

    #[test]
    fn each_block_is_argued_by_itself() {
        let argued = "fn a() {\n    // SAFETY: the caller holds the lock,\n    // and so on.\n    let x =\n        \
                      unsafe { b() };\n}\n// SAFETY: only one owner.\nunsafe impl Send for A {}\n";
        assert_eq!(places(check, &[("dataplane/sys/src/a.rs", argued)]), Vec::<String>::new());
        let second = "fn a() {\n    // SAFETY: x\n    unsafe { b() };\n    unsafe { c() };\n}\n";
        assert_eq!(places(check, &[("dataplane/sys/src/a.rs", second)]), ["dataplane/sys/src/a.rs:4"]);
        let bare = "struct A;\nunsafe impl Send for A {}\n";
        assert_eq!(places(check, &[("dataplane/sys/src/a.rs", bare)]), ["dataplane/sys/src/a.rs:2"]);
    }
}
