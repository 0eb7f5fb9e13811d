//! Advice: files over 500 lines and functions over 70 deserve a second look.
//!
//! A length is not a rule: a file is split where ownership splits, and never to satisfy a number. Files and functions
//! above the limits are printed, and nothing fails for it.

use crate::tidy::Violation;
use crate::tidy::sources::tree::Tree;

const LONG_FILE_LINES: usize = 500;
const LONG_FUNCTION_LINES: usize = 70;

/// Lists every long Rust source and every long function.
pub fn check(tree: &Tree, out: &mut Vec<Violation>) {
    for file in tree.rust() {
        let path = file.path.as_str();
        let lines = file.text.lines().count();
        if lines > LONG_FILE_LINES {
            out.push(Violation::new(path, 1, format!("{lines} lines: does it own more than one thing?")));
        }
        for function in &file.outline.functions {
            let lines = function.lines();
            if lines > LONG_FUNCTION_LINES {
                let message = format!("`{}` has {lines} lines: does it do more than one thing?", function.name);
                out.push(Violation::new(path, function.first_line, message));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::testing::places;

    fn function(lines: usize) -> String {
        format!("//! x\nfn long() {{\n{}}}\n", "    a();\n".repeat(lines - 2))
    }

    #[test]
    fn long_files_and_functions_are_listed() {
        assert_eq!(places(check, &[("a.rs", &function(70))]), Vec::<String>::new());
        assert_eq!(places(check, &[("a.rs", &function(71))]), ["a.rs:2"]);
        assert_eq!(places(check, &[("a.rs", &"//\n".repeat(500))]), Vec::<String>::new());
        assert_eq!(places(check, &[("a.rs", &"//\n".repeat(501))]), ["a.rs:1"]);
    }
}
