//! Rule: a Rust file opens with a `//!` header that describes it.

use crate::tidy::Violation;
use crate::tidy::sources::tree::{File, Tree};

/// Minimum length of a header's first sentence.
const SHORTEST_HEADER_CHARS: usize = 10;

/// Checks every Rust source.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    for file in tree.rust() {
        if !file.text.starts_with("//!") {
            let message =
                "does not open with `//!`; begin with a noun phrase that names the component and what it does";
            out.push(Violation::new(&file.path, 1, message));
        } else if first_sentence(file).chars().count() < SHORTEST_HEADER_CHARS {
            out.push(Violation::new(&file.path, 1, "the `//!` header is too short; describe this file"));
        }
    }
}

/// Returns the first sentence of a file's header, on one line, without its full stop and without the brackets of links
/// to items; empty without a header.
#[must_use]
pub fn first_sentence(file: &File) -> String {
    let lines = file.text.lines().map_while(|line| line.strip_prefix("//!")).map(str::trim);
    let paragraph: Vec<&str> = lines.skip_while(|line| line.is_empty()).take_while(|line| !line.is_empty()).collect();
    let paragraph = paragraph.join(" ");
    let sentence = paragraph.split(". ").next().unwrap_or_default();
    let sentence = sentence.trim_end_matches('.').trim_start_matches("# ");
    sentence.replace("[`", "`").replace("`]", "`")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::testing::places;

    #[test]
    fn a_file_without_a_header_fails() {
        let files = [
            ("a.rs", "fn a() {}\n"),
            ("b.rs", "//! What this file is.\n"),
            ("c.rs", "//!\n\nfn c() {}\n"),
            ("d.rs", "// Not a header.\n"),
        ];
        assert_eq!(places(check, &files), ["a.rs:1", "c.rs:1", "d.rs:1"]);
    }

    #[test]
    fn the_first_sentence_is_joined_and_cut() {
        let text = "//! One [`idea`]\n//! over two lines. And more.\n//!\n//! Even more.\n";
        let tree = Tree::of(&[("a.rs", text)]);
        assert_eq!(first_sentence(&tree.files[0]), "One `idea` over two lines");
    }
}
