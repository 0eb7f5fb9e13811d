//! Rule: `unsafe` is used only in `dataplane/sys` and in the language bindings. The root of every other crate forbids
//! it, so that the compiler enforces that too, also in the output of macros.
//!
//! The `// SAFETY:` argument of each block and impl is checked by clippy (`undocumented_unsafe_blocks`). This rule
//! covers the gaps of the compiler's lint: code that is compiled out, and roots that do not forbid it.

use crate::tidy::Violation;
use crate::tidy::sources::tree::Tree;

/// Directories that may use `unsafe`: the system layer, the bindings for Python and C, and the drivers and devices for
/// tests.
const ALLOWED: [&str; 5] =
    ["dataplane/sys/", "tools/python/", "tools/capi/", "tests/fake-devices/", "tests/soft-verbs/"];

const FORBID: &str = "#![forbid(unsafe_code)]";

/// Checks every Rust source.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    for file in tree.rust() {
        if ALLOWED.iter().any(|directory| file.path.starts_with(directory)) {
            continue;
        }
        let is_root = file.path.ends_with("/src/lib.rs") || file.path.ends_with("/src/main.rs");
        if is_root && !file.outline.forbids_unsafe {
            out.push(Violation::new(&file.path, 1, format!("the crate's root does not say `{FORBID}`")));
        }
        for &line in &file.outline.unsafe_lines {
            let message = "`unsafe` outside dataplane/sys; put a safe interface there and call it";
            out.push(Violation::new(&file.path, line, message));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::testing::places;

    #[test]
    fn unsafe_elsewhere_fails_and_in_words_does_not() {
        let source = "// unsafe\nfn a() { let s = \"unsafe\"; }\nfn b() { m!(unsafe { c() }) }\n";
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
    fn the_system_layer_and_the_rims_may() {
        let source = "#![allow(x)]\nfn a() { unsafe { b() } }\n";
        for path in ["dataplane/sys/src/a.rs", "tools/python/src/lib.rs", "tools/capi/src/a.rs"] {
            assert_eq!(places(check, &[(path, source)]), Vec::<String>::new());
        }
    }
}
