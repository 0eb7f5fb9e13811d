//! Rule: plain, clean text: no tabs, no trailing blanks, a line end at the end, bounded width, titles, no stray words.
//!
//! Recorded data (directories named `fixtures` or `golden`, files of proptest) is exempt, and so are the licences and
//! the lock file.

use crate::tidy::Violation;
use crate::tidy::sources::cores;
use crate::tidy::sources::tree::{File, Tree};

const MAX_WIDTH_CHARS: usize = 120;

/// Words that are banned from the tree, with the reason. Split here, so that this file passes.
const WORDS: [(&str, &str); 6] = [
    (concat!("/wo", "rk/"), "a path of one machine; write it relative to the tree"),
    (concat!("/ro", "ot/"), "a path of one machine; write it relative to the tree"),
    (concat!("TO", "DO("), "do it, or describe it where it will be found"),
    (concat!("FIX", "ME"), "mend it, or describe it where it will be found"),
    (concat!("<<<<", "<<< "), "left over from a merge"),
    (concat!(">>>>", ">>> "), "left over from a merge"),
];

/// Checks every text file.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    out.extend(cores::map(&tree.files, check_file).into_iter().flatten());
}

fn check_file(file: &File) -> Vec<Violation> {
    let mut found = Vec::new();
    if is_recorded(&file.path) {
        return found;
    }
    let is_markdown = file.path.ends_with(".md");
    let is_source = is_markdown || file.is_rust() || file.path.ends_with(".toml");
    // Nearly all files have none, and searching each line for each word takes long.
    let has_tabs = is_source && file.text.contains('\t');
    let words: Vec<_> = WORDS.iter().filter(|(word, _)| file.text.contains(word)).collect();
    for (index, line) in file.text.lines().enumerate() {
        let mut report = |message: String| found.push(Violation::new(&file.path, index + 1, message));
        for (word, why) in words.iter().filter(|(word, _)| line.contains(word)) {
            report(format!("`{word}`: {why}"));
        }
        if has_tabs && line.contains('\t') {
            report("a tab; indent with spaces, and write `\\t` in a string".to_string());
        }
        if is_source && matches!(line.as_bytes().last(), Some(b' ' | b'\t' | b'\r')) {
            report("blanks at the end of the line; remove them".to_string());
        }
        // No line has more characters than bytes.
        let is_long = file.is_rust() && line.len() > MAX_WIDTH_CHARS;
        let width = if is_long { line.chars().count() } else { 0 };
        if width > MAX_WIDTH_CHARS {
            report(format!("{width} characters wide, over {MAX_WIDTH_CHARS}; break the line"));
        }
    }
    check_ends(file, is_markdown, &mut found);
    found
}

fn check_ends(file: &File, is_markdown: bool, out: &mut Vec<Violation>) {
    if !file.text.is_empty() && !file.text.ends_with('\n') {
        let last = file.text.lines().count();
        out.push(Violation::new(&file.path, last, "no line end at the end of the file; add one"));
    }
    if is_markdown && !file.text.starts_with("# ") {
        out.push(Violation::new(&file.path, 1, "does not start with a title; open with `# ...`"));
    }
}

fn is_recorded(path: &str) -> bool {
    let mut parts = path.split('/');
    let name = parts.next_back().unwrap_or_default();
    name.starts_with("LICENSE")
        || name == "Cargo.lock"
        || parts.any(|part| matches!(part, "fixtures" | "golden" | "proptest-regressions"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::testing::places;

    #[test]
    fn clean_text_passes() {
        let wide = format!("//! {}\n", "é".repeat(116));
        let files =
            [("a.md", "# Title\n\ntext\n"), ("a.rs", wide.as_str()), ("empty.toml", ""), ("x/fixtures/y", "\t ")];
        assert_eq!(places(check, &files), Vec::<String>::new());
    }

    #[test]
    fn each_blemish_is_found() {
        let wide = format!("//! {}\n", "é".repeat(117));
        let cases = [
            ("a.rs", wide.as_str(), 1),
            ("a.rs", "//! x\n\tfn a() {}\n", 2),
            ("a.md", "# T\nx \n", 2),
            ("a.toml", "x = 1\ny = 2", 2),
            ("a.md", "text\n", 1),
            ("a.txt", concat!("see /wo", "rk/x\n"), 1),
            ("a.rs", concat!("//! x\n// FIX", "ME\n"), 2),
        ];
        for (path, text, line) in cases {
            assert_eq!(places(check, &[(path, text)]), [format!("{path}:{line}")], "{text}");
        }
    }
}
